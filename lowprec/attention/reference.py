"""The two references: `oracle` says what attention is, `emulate` says what a policy computes.

`oracle` is untiled float64 on the inputs as given (already rounded), so its distance to anything
else is arithmetic error alone. `emulate` is eager PyTorch that walks the same key blocks as a
kernel would, rounds explicitly after each site of the policy and returns every intermediate: it
is the specification of `lowprec.numerics.policy`, and the Triton kernels are tested against it.
Neither may run under torch.compile, which removes a rounding that looks like a round trip; the
custom op in `lowprec.attention` keeps the compiler out.

Shapes: q and do are (batch, heads, seqlen, head_dim); a row is one query. k and v may have fewer
heads, each read by as many consecutive heads of queries, a group (Ainslie et al. 2023); so have dk
and dv, the sums over a group. Everything else has the heads of q. v may have another head_dim, Dv,
which o and do then have, and without causal=True another seqlen than q. Masks and what else
becomes of a score are `lowprec.attention.masks`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from lowprec import UserError
from lowprec.attention.inputs import (
    DTYPES,
    check_row_sum,
    conditions,
    for_queries,
    inverse,
    kept,
    of_keys,
    outside_autocast,
    stored_inputs,
)
from lowprec.attention.masks import NEG_INF
from lowprec.numerics.formats import BF16, keyed_bits, round_to
from lowprec.numerics.policy import DITHER, REDRAW, SITES, PrecisionPolicy
from lowprec.numerics.scaling import stored

LN2 = math.log(2)
LOG2E = 1 / LN2


class Trace(SimpleNamespace):
    """Named intermediates of one attention call, FP32 (`emulate`) or float64 (`oracle`).

    forward:  s, x, p_unnorm, p (..., queries, keys); m, l, lse (..., queries); ties, the number of
              scores equal to the row's maximum; alpha (..., queries, blocks); o_acc, o, o_fp32,
              the shadow output that is never rounded (..., queries, head_dim)
    backward: delta, the one used; delta_o = rowsum(dO*o) as the policy forms it; delta_ref, FP32
              from o_fp32; row_sum of ds (..., queries); dp, p_bwd, ds (..., queries, keys); dq, dk,
              dv as inputs; dsinks (heads,) and dbias, as the bias, FP32, where there are any
    p is not normalised, it enters P V; p_bwd is, and enters dV. `emulate` has ds_dk as well, ds as
    it enters dK: ds itself, or from delta + row_sum with row_sum="refined". With a sink row_sum
    counts its share, which is in no ds; with a soft cap it is that of the gradient of capped
    scores, unrounded. With dropout p is after it, and p_bwd before.
    """

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(value.shape)}" for name, value in vars(self).items()
                  if isinstance(value, torch.Tensor))  # fmt: skip
        return f"Trace({', '.join(shapes)})"


@outside_autocast
def oracle(
    q, k, v, causal=True, scale=None, do=None, *, mask=None, scores=None, dropout=0.0, seed=0
) -> Trace:
    """Exact attention: float64, no tiles; with `do` also its gradients (float64).

    mask, scores, dropout, seed: as in `emulate`.
    """
    mask, how = conditions(q, k, v, causal, scale, mask, scores, dropout, do=do, seed=seed)
    seen = mask.seen(q.shape[2], k.shape[2], q.device)
    heads = k.shape[1]
    q, k, v = q.double(), *(for_queries(t.double(), q.shape[1]) for t in (k, v))
    scale = how.scale
    s = scale * (q @ k.mT)
    slope = None
    if how.softcap:
        s = how.softcap * (s / how.softcap).tanh()
        slope = 1 - (s / how.softcap).square()
    if how.bias is not None:
        s = s + how.bias.double()
    s = s.masked_fill(~seen, NEG_INF)
    m = s.amax(-1)
    if how.sinks is not None:
        sink = how.sinks.double()[:, None]
        m = torch.maximum(m, sink)
    finite = torch.where(m == NEG_INF, 0.0, m)  # a row that sees no key
    p_unnorm = (s - finite[..., None]).exp()
    l = p_unnorm.sum(-1)  # noqa: E741
    if how.sinks is not None:
        l = l + (sink - finite).exp()  # noqa: E741
    p = p_unnorm / torch.where(l == 0, 1.0, l)[..., None]
    keep = kept(s.shape, dropout, seed, q.device)
    entering = p if keep is None else inverse(dropout) * p.masked_fill(~keep, 0.0)
    o = entering @ v
    t = Trace(s=s, m=m, p_unnorm=p_unnorm, p=p_unnorm, l=l, p_bwd=p, o=o, lse=m + l.log())
    if do is not None:
        do = do.double()
        t.dp = do @ v.mT
        if keep is not None:
            t.dp = inverse(dropout) * t.dp.masked_fill(~keep, 0.0)
        t.delta = (do * o).sum(-1)
        t.ds = p * (t.dp - t.delta[..., None])
        t.row_sum = t.ds.sum(-1)
        if how.bias is not None:
            t.dbias = t.ds.sum_to_size(how.bias.shape)
        if how.sinks is not None:
            of_sink = -(sink - torch.where(l == 0, torch.inf, t.lse)).exp() * t.delta
            t.row_sum, t.dsinks = t.row_sum + of_sink, of_sink.sum((0, 2))
        if slope is not None:
            t.ds = t.ds * slope
        t.dq = scale * (t.ds @ k)
        t.dk, t.dv = (of_keys(x, heads) for x in (scale * (t.ds.mT @ q), entering.mT @ do))
    return t


@outside_autocast
def emulate(
    q, k, v, policy, tile=None, do=None, causal=True, scale=None, seed=0, *, mask=None,
    scores=None, dropout=0.0,
) -> Trace:  # fmt: skip
    """Attention with every rounding of `policy` made explicitly, and every intermediate returned.

    tile: keys per rounding block (queries of a head per block for dK and dV, which go through the
        heads of a group in order); None is the whole row.
    do: gradient of the output; None computes the forward only.
    seed: keys the random bits of stochastic sites, of the dithered shift and of dropout.
    mask: a `Mask`, in place of `causal`. scores: `Scores`. A sink is a block before all keys: it
        starts m and l, and is not rounded.
    dropout: the share of weights that are set to 0, after p was rounded; the others count
        1 / (1 - dropout) times, which multiplies o before it is rounded, dv, and dp before it is.
    Gradients take the inputs' dtype, everything else is FP32. A row that sees no key gives o = 0
    and lse = -inf; a row whose sum underflows to 0 gives NaN, as it would on hardware.
    """
    policy = PrecisionPolicy.parse(policy)
    mask, how = conditions(
        q, k, v, causal, scale, mask, scores, dropout, do=do, tile=tile, seed=seed
    )
    dtype = q.dtype
    if dtype not in DTYPES:
        raise UserError(
            f"a policy rounds bfloat16, float16 or float32, not {dtype}; convert q, k, v or take "
            "impl='oracle'"
        )
    check_row_sum(policy, how.softcap)
    q, k, v = stored_inputs(policy, q, k, v)
    heads = k.shape[1]
    q, k, v = q.float(), *(for_queries(t.float(), q.shape[1]) for t in (k, v))
    rnd = _Rounder(policy, seed)
    keep = kept((*q.shape[:3], k.shape[2]), dropout, seed, q.device)
    dropped = None if keep is None else (keep, inverse(dropout))
    tile = tile or max(q.shape[2], k.shape[2])
    seen = mask.seen(q.shape[2], k.shape[2], q.device)
    t = _forward(q, k, v, policy, rnd, tile, seen, how, dropped)
    if do is not None:
        (do,) = stored_inputs(policy, do)
        _backward(t, q, k, v, do.float(), policy, rnd, tile, how, dropped)
        _dk_dv(t, q, do.float(), heads, rnd, tile, how.scale, dropped)
        t.dq, t.dk, t.dv = (g.to(dtype) for g in (t.dq, t.dk, t.dv))
    return t


class _Rounder:
    """Rounds a (batch, heads, rows, columns) tensor into the format of a policy field.

    Random bits are a function of (seed, field, batch, head, row, column + width*step) alone, where
    `step` counts the roundings that one element of a site goes through; so neither the order of
    the work nor a second computation in the backward changes them.
    """

    def __init__(self, policy: PrecisionPolicy, seed: int):
        self.policy, self.seed = policy, seed

    def __call__(self, field, x, row=0, column=0, step=0, width=0, heads=slice(None)):
        """heads: those of the queries that x belongs to."""
        site = getattr(self.policy, field)
        if site.is_fp32:
            return x
        bits = None
        if site.rounding == "stochastic":
            bits = self.bits(SITES.index(field), x, row, column + width * step, heads)
        return stored(x, site, bits)

    def bits(self, stream: int, x, row=0, column=0, heads=slice(None)):
        batch, head, rows, columns = torch.meshgrid(
            *(torch.arange(n, device=x.device) for n in x.shape),
            indexing="ij",
        )
        head = (heads.start or 0) + (heads.step or 1) * head
        return keyed_bits(self.seed, stream, batch, head, rows + row, columns + column)


def scores(q, k, seen, rnd, how, keys, width):
    """(s as in `lowprec.attention.masks`, -inf where masked; ds/d(scale q k^T), None for 1)."""
    at = dict(column=keys.start, width=width)
    s, slope = rnd("s", how.scale * rnd("s", q @ k.mT, column=keys.start), step=1, **at), None
    if how.softcap:
        s = rnd("s", how.softcap * (s / how.softcap).tanh(), step=2, **at)
        slope = 1 - (s / how.softcap).square()
    if how.bias is not None:
        s = rnd("s", s + _columns(how.bias.float(), keys), step=3, **at)
    return s.masked_fill(~seen, NEG_INF), slope


def _columns(x, keys):
    """The columns of some keys, where x has a column a key."""
    return x[..., keys] if x.shape[-1] > 1 else x


def shifted_max(r, s, shift, rnd):
    """The block maximum r (..., rows, 1) of scores s after the policy's shift."""
    if shift.kind in ("beta", "mute"):
        tied = (s >= r - shift.tol).sum(-1, keepdim=True) > 1
    if shift.kind == "mute":  # exp(s - 1e30) is 0, and unlike inf - inf, 1e30 - 1e30 is 0 too
        return torch.where(tied & (r > shift.amplitude), 1e30, r)
    if shift.kind == "beta":
        return torch.where(
            tied & (r > 0), shift.beta * r, torch.where(tied & (r < 0), shift.gamma * r, r)
        )
    if shift.kind == "offset":
        return r + shift.amplitude
    if shift.kind == "dither":
        return r + shift.amplitude * rnd.bits(DITHER, r).float() * 2.0**-32
    if shift.kind == "pow2":
        whole = (r * LOG2E).ceil()
        return torch.where(whole.abs() < 2**21, whole, math.nan) * LN2
    return r


def powers(m):
    """m of shift "pow2" in whole powers of two, float64."""
    return (m * LOG2E).round().double()


def by_powers(s, m):
    """exp(s - m) of shift "pow2", a fraction of a power of two times the power, FP32."""
    t = s * LOG2E
    fraction = (t - t.round()).double().exp2().float()
    p = (fraction.double() * (t.round() - powers(m)).exp2()).float()
    return torch.where(s == NEG_INF, 0.0, p)


def _forward(q, k, v, policy, rnd, tile, seen_all, how, dropped) -> Trace:
    n_k, d = k.shape[2], v.shape[3]
    rows = (*q.shape[:3], 1)
    m, l = q.new_full(rows, NEG_INF), q.new_zeros(rows)  # noqa: E741
    if how.sinks is not None:
        sink = how.sinks.float()[:, None, None].expand(rows)
        m, l = sink, q.new_ones(rows)  # noqa: E741
        if policy.shift.kind == "pow2":
            m = torch.where(sink == NEG_INF, sink, shifted_max(sink, sink, policy.shift, rnd))
            l = by_powers(sink, m)  # noqa: E741
    l_lse = l_shadow = l
    o_acc = o_shadow = q.new_zeros(*q.shape[:3], d)
    blocks = []
    for j, start in enumerate(range(0, n_k, tile)):
        keys = slice(start, min(start + tile, n_k))
        seen = _columns(seen_all, keys)
        s, slope = scores(q, k[:, :, keys], seen, rnd, how, keys, n_k)
        r = s.amax(-1, keepdim=True)
        m_new = torch.maximum(m, torch.where(r == NEG_INF, r, shifted_max(r, s, policy.shift, rnd)))
        finite = torch.where(m_new == NEG_INF, 0.0, m_new)  # a row that has seen no key yet
        x = rnd("x", s - finite, column=start).masked_fill(s == NEG_INF, NEG_INF)
        alpha = rnd("x", m - finite, column=n_k + j).masked_fill(m == NEG_INF, NEG_INF).exp()
        p_unnorm = x.exp()
        if policy.shift.kind == "pow2":
            alpha = (powers(m) - powers(finite)).exp2().float()
            p_unnorm = by_powers(s, finite)
        p = rnd("p", p_unnorm, column=start)
        sees = seen.any(-1, keepdim=True)
        total = _total(p_unnorm if policy.l_from == "p_unnorm" else p, sees, policy)
        if policy.l_from == "p_both":
            other = _total(p_unnorm, sees, policy)
            l_lse = rnd("l", alpha * l_lse + other, column=n_k + j)
        if dropped:
            p = p.masked_fill(~dropped[0][..., keys], 0.0)
        pv = p @ v[:, :, keys]
        l_shadow = alpha * l_shadow + total
        o_shadow = alpha * o_shadow + pv
        l = rnd("l", alpha * l + total, column=j)  # noqa: E741
        old = rnd("o_acc", alpha * o_acc, step=3 * j, width=d)
        added = rnd("o_acc", pv, step=3 * j + 1, width=d)
        o_acc = rnd("o_acc", old + added, step=3 * j + 2, width=d)
        m = m_new
        blocks.append(dict(s=s, x=x, p_unnorm=p_unnorm, p=p, alpha=alpha))
        if slope is not None:
            blocks[-1]["slope"] = slope
    t = Trace(**{name: torch.cat([b[name] for b in blocks], -1) for name in blocks[0]})
    blind = m == NEG_INF
    t.m, t.l, t.o_acc = m[..., 0], l[..., 0], o_acc
    times = dropped[1] if dropped else 1.0
    t.o = rnd("o", torch.where(blind, 0.0, times * (o_acc / l)))
    t.o_fp32 = torch.where(blind, 0.0, times * (o_shadow / l_shadow))
    l_lse = l_lse if policy.l_from == "p_both" else l
    t.lse = torch.where(blind, NEG_INF, m + l_lse.log())[..., 0]
    t.ties = ((t.s == t.s.amax(-1, keepdim=True)) & seen_all).sum(-1)
    return t


def _total(p, sees, policy):
    """The sum of a block's p (..., rows, 1), at least l_floor in rows that see a key of it."""
    total = p.sum(-1, keepdim=True)
    return torch.where(sees, total.clamp(min=policy.l_floor), total) if policy.l_floor else total


def _backward(t, q, k, v, do, policy, rnd, tile, how, dropped):
    """Fill in the backward half of the trace, but for dk and dv; `t.s` is the forward's, formed the
    same way."""
    lse = torch.where(t.lse == NEG_INF, float("inf"), t.lse)[..., None]
    p = (t.s - lse).exp()
    t.p_bwd = rnd("p_bwd", p)
    t.dp = do @ v.mT
    if dropped:
        t.dp = dropped[1] * t.dp.masked_fill(~dropped[0], 0.0)
    t.dp = rnd("dp", t.dp)
    t.delta_o = rnd("dodo", do * t.o).sum(-1)
    t.delta_ref = (do * t.o_fp32).sum(-1)
    t.delta = _delta(t, p, v, do, policy, rnd, dropped)
    if policy.delta_bias:
        t.delta = t.delta + policy.delta_bias * (t.delta_o - t.delta_ref).abs()
    raw = p * (t.dp - t.delta[..., None])
    t.ds = rnd("ds", raw * t.slope if how.softcap else raw)

    dq = torch.zeros_like(q)
    for j, start in enumerate(range(0, k.shape[2], tile)):
        keys = slice(start, start + tile)
        dq = _accumulate("dq_acc", dq, t.ds[..., keys] @ k[:, :, keys], rnd, 2 * j)
    t.row_sum = (raw if how.softcap else t.ds).sum(-1)  # zero in exact arithmetic
    if how.sinks is not None:
        of_sink = -(how.sinks.float()[:, None] - lse[..., 0]).exp()
        t.row_sum = t.row_sum + of_sink * t.delta
    t.ds_dk, delta = t.ds, t.delta
    if policy.row_sum == "removed":
        mean_key = (k / k.shape[2]).sum(2, keepdim=True)  # in this order no finite key overflows
        dq = dq - t.row_sum[..., None] * mean_key
    elif policy.row_sum == "refined":
        slope, delta = t.slope if how.softcap else 1.0, t.delta + t.row_sum
        dq = dq - t.row_sum[..., None] * ((slope * t.p_bwd) @ k)
        raw = p * (t.dp - delta[..., None])
        t.ds_dk = rnd("ds", slope * raw)
    if how.bias is not None:
        t.dbias = (rnd("ds", raw) if how.softcap else t.ds_dk).sum_to_size(how.bias.shape)
    if how.sinks is not None:
        t.dsinks = (of_sink * delta).sum((0, 2))
    t.dq = how.scale * dq


def _dk_dv(t, q, do, heads, rnd, tile, scale, dropped):
    """dk and dv of as many heads of keys: sums over the queries of the first head of each group,
    then over those of the next."""
    group = q.shape[1] // heads
    p = t.p_bwd.masked_fill(~dropped[0], 0.0) if dropped else t.p_bwd
    dk, dv = (q.new_zeros(q.shape[0], heads, p.shape[3], x.shape[3]) for x in (q, do))
    wide = max(q.shape[3], do.shape[3])  # so that dk and dv share no random bits
    for first in range(group):
        own = slice(first, None, group)
        for i, start in enumerate(range(0, q.shape[2], tile)):
            part = (slice(None), own, slice(start, start + tile))
            dk = _accumulate("dkdv_acc", dk, t.ds_dk[part].mT @ q[part], rnd, 4 * i, own, wide)
            dv = _accumulate("dkdv_acc", dv, p[part].mT @ do[part], rnd, 4 * i + 2, own, wide)
    t.dk, t.dv = scale * dk, dropped[1] * dv if dropped else dv


def _delta(t, p, v, do, policy, rnd, dropped):
    source = policy.delta_from
    if source == "dp":
        return (p * t.dp).sum(-1)
    if source == "o":
        return t.delta_o
    o = t.o_fp32
    if source == "o_split":
        o = t.o + round_to(t.o_fp32 - t.o, BF16)
    elif source == "o_prime":
        entering = dropped[1] * p.masked_fill(~dropped[0], 0.0) if dropped else p
        o = round_to(entering @ v, BF16)
    elif source == "o_redrawn" and not policy.o.is_fp32:
        o = stored(o, replace(policy.o, rounding="stochastic"), rnd.bits(REDRAW, o))
    return rnd("dodo", do * o).sum(-1)


def _accumulate(field, acc, product, rnd, step, heads=slice(None), width=None):
    how = dict(width=width or acc.shape[-1], heads=heads)
    added = rnd(field, product, step=step, **how)
    return rnd(field, acc + added, step=step + 1, **how)
