"""The two references: `oracle` says what attention is, `emulate` says what a policy computes.

`oracle` is untiled float64 on the inputs as given (already rounded), so its distance to anything
else is arithmetic error alone. `emulate` is eager PyTorch that walks the same key blocks as a
kernel would, rounds explicitly after each site of the policy and returns every intermediate: it
is the specification of `lowprec.numerics.policy`, and the Triton kernels are tested against it.
Neither may run under torch.compile, which removes a rounding that looks like a round trip; the
custom op in `lowprec.attention` keeps the compiler out.

Shapes: q and do are (batch, heads, seqlen, head_dim); a row is one query. k and v may have fewer
heads, each read by as many consecutive heads of queries, a group (Ainslie et al. 2023); so have dk
and dv, the sums over a group. Everything else has the heads of q.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import torch

from lowprec import UserError
from lowprec.numerics.formats import BF16, keyed_bits, round_to
from lowprec.numerics.policy import DITHER, REDRAW, SITES, PrecisionPolicy

NEG_INF = float("-inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Trace(SimpleNamespace):
    """Named intermediates of one attention call, FP32 (`emulate`) or float64 (`oracle`).

    forward:  s, x, p_unnorm, p (..., queries, keys); m, l, lse (..., queries); ties, the number of
              scores equal to the row's maximum; alpha (..., queries, blocks); o_acc, o, o_fp32,
              the shadow output that is never rounded (..., queries, head_dim)
    backward: delta, the one used; delta_o = rowsum(dO*o) as the policy forms it; delta_ref, FP32
              from o_fp32; row_sum of ds (..., queries); dp, p_bwd, ds (..., queries, keys); dq, dk,
              dv as inputs
    p is not normalised, it enters P V; p_bwd is, and enters dV. `emulate` has ds_dk as well, ds as
    it enters dK: ds itself, or from delta + row_sum with row_sum="refined".
    """

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(value.shape)}" for name, value in vars(self).items()
                  if isinstance(value, torch.Tensor))  # fmt: skip
        return f"Trace({', '.join(shapes)})"


def check_inputs(
    q, k, v, causal: bool, scale: float | None, do=None, tile=None, seed=0, shared=True
) -> float:
    """Raise `UserError` for what is not attention; return the softmax scale.

    shared: whether k and v may have fewer heads than q.
    """
    own = slice(1 if shared else 2)
    fits = q.dim() == k.dim() == 4 and q.shape[own] == k.shape[own] and q.shape[3] == k.shape[3]
    if not fits or k.shape != v.shape:
        raise UserError(
            "q, k, v must be (batch, heads, seqlen, head_dim), k and v alike; got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if min(*q.shape, *k.shape) < 1:
        raise UserError(
            f"no dimension of q, k, v may be empty; got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise UserError(
            f"{k.shape[1]} heads of keys and values must divide the {q.shape[1]} heads of queries; "
            "take a divisor, or as many"
        )
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise UserError(f"q, k, v must share a floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if do is not None and do.shape != q.shape:
        raise UserError(f"do must have the shape of q, {tuple(q.shape)}, not {tuple(do.shape)}")
    if tile is not None and (not isinstance(tile, int) or tile < 1):
        raise UserError(
            f"tile={tile} must be a whole number of at least 1 key, or None for the whole row"
        )
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must be from 0 to 2^32 - 1")
    if causal and q.shape[2] != k.shape[2]:
        raise UserError(
            f"causal attention needs as many queries as keys; got {q.shape[2]} and {k.shape[2]}"
        )
    return 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)


def outside_autocast(function):
    """Run with autocast off: it would silently turn an FP32 product into a BF16 one."""

    @functools.wraps(function)
    def wrapped(q, *args, **kwargs):
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            return function(q, *args, **kwargs)

    return wrapped


def causal_mask(n_q: int, n_k: int, device, causal: bool = True) -> torch.Tensor:
    """(n_q, n_k) bool, True where a query sees a key."""
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
    return seen.tril() if causal else seen


def for_queries(x, heads: int):
    """x (B, H', T, D) with each head as often as heads of queries read it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def of_keys(x, heads: int):
    """The heads of queries' parts x (B, H, T, D) of a gradient, summed by group: (B, H', T, D)."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


@outside_autocast
def oracle(q, k, v, causal=True, scale=None, do=None) -> Trace:
    """Exact attention: float64, no tiles; with `do` also its gradients (float64)."""
    scale = check_inputs(q, k, v, causal, scale, do)
    heads = k.shape[1]
    q, k, v = q.double(), *(for_queries(t.double(), q.shape[1]) for t in (k, v))
    seen = causal_mask(q.shape[2], k.shape[2], q.device, causal)
    s = (scale * (q @ k.mT)).masked_fill(~seen, NEG_INF)
    m = s.amax(-1)
    p_unnorm = (s - m[..., None]).exp()
    l = p_unnorm.sum(-1)  # noqa: E741
    p = p_unnorm / l[..., None]
    o = p @ v
    t = Trace(s=s, m=m, p_unnorm=p_unnorm, p=p_unnorm, l=l, p_bwd=p, o=o, lse=m + l.log())
    if do is not None:
        do = do.double()
        t.dp = do @ v.mT
        t.delta = (do * o).sum(-1)
        t.ds = p * (t.dp - t.delta[..., None])
        t.row_sum = t.ds.sum(-1)
        t.dq = scale * (t.ds @ k)
        t.dk, t.dv = (of_keys(x, heads) for x in (scale * (t.ds.mT @ q), p.mT @ do))
    return t


@outside_autocast
def emulate(q, k, v, policy, tile=None, do=None, causal=True, scale=None, seed=0) -> Trace:
    """Attention with every rounding of `policy` made explicitly, and every intermediate returned.

    tile: keys per rounding block (queries of a head per block for dK and dV, which go through the
        heads of a group in order); None is the whole row.
    do: gradient of the output; None computes the forward only.
    seed: keys the random bits of stochastic sites and of the dithered shift.
    Gradients take the inputs' dtype, everything else is FP32. A row that sees no key gives o = 0
    and lse = -inf; a row whose sum underflows to 0 gives NaN, as it would on hardware.
    """
    policy = PrecisionPolicy.parse(policy)
    scale = check_inputs(q, k, v, causal, scale, do, tile, seed)
    dtype = q.dtype
    if dtype not in DTYPES:
        raise UserError(
            f"a policy rounds bfloat16, float16 or float32, not {dtype}; convert q, k, v or take "
            "impl='oracle'"
        )
    heads = k.shape[1]
    q, k, v = q.float(), *(for_queries(t.float(), q.shape[1]) for t in (k, v))
    rnd = _Rounder(policy, seed)
    tile = tile or max(q.shape[2], k.shape[2])
    t = _forward(q, k, v, policy, rnd, tile, causal, scale)
    if do is not None:
        _backward(t, q, k, v, do.float(), policy, rnd, tile, scale)
        _dk_dv(t, q, do.float(), heads, rnd, tile, scale)
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
        return round_to(x, site.fmt, site.rounding, bits=bits)

    def bits(self, stream: int, x, row=0, column=0, heads=slice(None)):
        batch, head, rows, columns = torch.meshgrid(
            *(torch.arange(n, device=x.device) for n in x.shape),
            indexing="ij",
        )
        head = (heads.start or 0) + (heads.step or 1) * head
        return keyed_bits(self.seed, stream, batch, head, rows + row, columns + column)


def scores(q, k, seen, rnd, scale, column=0, width=0):
    """s = rnd_s(scale * rnd_s(q k^T)), -inf where masked."""
    qk = rnd("s", q @ k.mT, column=column)
    return rnd("s", scale * qk, column=column, step=1, width=width).masked_fill(~seen, NEG_INF)


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
    return r


def _forward(q, k, v, policy, rnd, tile, causal, scale) -> Trace:
    n_q, n_k, d = q.shape[2], k.shape[2], q.shape[3]
    rows = (*q.shape[:3], 1)
    m, l = q.new_full(rows, NEG_INF), q.new_zeros(rows)  # noqa: E741
    l_lse = l
    l_shadow, o_acc, o_shadow = q.new_zeros(rows), torch.zeros_like(q), torch.zeros_like(q)
    blocks = []
    seen_all = causal_mask(n_q, n_k, q.device, causal)
    for j, start in enumerate(range(0, n_k, tile)):
        keys = slice(start, min(start + tile, n_k))
        seen = seen_all[:, keys]
        s = scores(q, k[:, :, keys], seen, rnd, scale, column=start, width=n_k)
        r = s.amax(-1, keepdim=True)
        m_new = torch.maximum(m, torch.where(r == NEG_INF, r, shifted_max(r, s, policy.shift, rnd)))
        finite = torch.where(m_new == NEG_INF, 0.0, m_new)  # a row that has seen no key yet
        x = rnd("x", s - finite, column=start)
        alpha = rnd("x", m - finite, column=n_k + j).exp()
        p_unnorm = x.exp()
        p = rnd("p", p_unnorm, column=start)
        sees = seen.any(-1, keepdim=True)
        total = _total(p_unnorm if policy.l_from == "p_unnorm" else p, sees, policy)
        if policy.l_from == "p_both":
            other = _total(p_unnorm, sees, policy)
            l_lse = rnd("l", alpha * l_lse + other, column=n_k + j)
        pv = p @ v[:, :, keys]
        l_shadow = alpha * l_shadow + total
        o_shadow = alpha * o_shadow + pv
        l = rnd("l", alpha * l + total, column=j)  # noqa: E741
        kept = rnd("o_acc", alpha * o_acc, step=3 * j, width=d)
        added = rnd("o_acc", pv, step=3 * j + 1, width=d)
        o_acc = rnd("o_acc", kept + added, step=3 * j + 2, width=d)
        m = m_new
        blocks.append(dict(s=s, x=x, p_unnorm=p_unnorm, p=p, alpha=alpha))
    t = Trace(**{name: torch.cat([b[name] for b in blocks], -1) for name in blocks[0]})
    blind = m == NEG_INF
    t.m, t.l, t.o_acc = m[..., 0], l[..., 0], o_acc
    t.o = rnd("o", torch.where(blind, 0.0, o_acc / l))
    t.o_fp32 = torch.where(blind, 0.0, o_shadow / l_shadow)
    l_lse = l_lse if policy.l_from == "p_both" else l
    t.lse = torch.where(blind, NEG_INF, m + l_lse.log())[..., 0]
    t.ties = ((t.s == t.s.amax(-1, keepdim=True)) & seen_all).sum(-1)
    return t


def _total(p, sees, policy):
    """The sum of a block's p (..., rows, 1), at least l_floor in rows that see a key of it."""
    total = p.sum(-1, keepdim=True)
    return torch.where(sees, total.clamp(min=policy.l_floor), total) if policy.l_floor else total


def _backward(t, q, k, v, do, policy, rnd, tile, scale):
    """Fill in the backward half of the trace, but for dk and dv; `t.s` is the forward's, formed the
    same way."""
    lse = torch.where(t.lse == NEG_INF, float("inf"), t.lse)[..., None]
    p = (t.s - lse).exp()
    t.p_bwd = rnd("p_bwd", p)
    t.dp = rnd("dp", do @ v.mT)
    t.delta_o = rnd("dodo", do * t.o).sum(-1)
    t.delta_ref = (do * t.o_fp32).sum(-1)
    t.delta = _delta(t, p, do, policy, rnd)
    if policy.delta_bias:
        t.delta = t.delta + policy.delta_bias * (t.delta_o - t.delta_ref).abs()
    t.ds = rnd("ds", p * (t.dp - t.delta[..., None]))

    dq = torch.zeros_like(q)
    for j, start in enumerate(range(0, k.shape[2], tile)):
        keys = slice(start, start + tile)
        dq = _accumulate("dq_acc", dq, t.ds[..., keys] @ k[:, :, keys], rnd, 2 * j)
    t.row_sum = t.ds.sum(-1)
    t.ds_dk = t.ds
    if policy.row_sum == "removed":
        mean_key = (k / k.shape[2]).sum(2, keepdim=True)  # in this order no finite key overflows
        dq = dq - t.row_sum[..., None] * mean_key
    elif policy.row_sum == "refined":
        dq = dq - t.row_sum[..., None] * (t.p_bwd @ k)
        t.ds_dk = rnd("ds", p * (t.dp - (t.delta + t.row_sum)[..., None]))
    t.dq = scale * dq


def _dk_dv(t, q, do, heads, rnd, tile, scale):
    """dk and dv of as many heads of keys: sums over the queries of the first head of each group,
    then over those of the next."""
    group = q.shape[1] // heads
    dk, dv = (q.new_zeros(q.shape[0], heads, t.ds.shape[3], q.shape[3]) for _ in range(2))
    for first in range(group):
        own = slice(first, None, group)
        for i, start in enumerate(range(0, q.shape[2], tile)):
            part = (slice(None), own, slice(start, start + tile))
            ds, p_bwd = t.ds_dk[part], t.p_bwd[part]
            dk = _accumulate("dkdv_acc", dk, ds.mT @ q[part], rnd, 4 * i, own)
            dv = _accumulate("dkdv_acc", dv, p_bwd.mT @ do[part], rnd, 4 * i + 2, own)
    t.dk, t.dv = scale * dk, dv


def _delta(t, p, do, policy, rnd):
    source = policy.delta_from
    if source == "dp":
        return (p * t.dp).sum(-1)
    if source == "o":
        return t.delta_o
    o = t.o_fp32
    if source == "o_split":
        o = t.o + round_to(t.o_fp32 - t.o, BF16)
    elif source == "o_redrawn" and not policy.o.is_fp32:
        o = round_to(o, policy.o.fmt, "stochastic", bits=rnd.bits(REDRAW, o))
    return rnd("dodo", do * o).sum(-1)


def _accumulate(field, acc, product, rnd, step, heads=slice(None)):
    how = dict(width=acc.shape[-1], heads=heads)
    added = rnd(field, product, step=step, **how)
    return rnd(field, acc + added, step=step + 1, **how)
