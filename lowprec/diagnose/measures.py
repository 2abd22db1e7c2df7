"""What BF16 attention does to each head in one call of it: what the probe and the monitor measure.

The warning sign of the captured failures is neither a tied maximum nor the sign of delta's error,
which healthy heads have as well. It is how much of a head's W_Q gradient is error: the rounding of
O moves delta by eps = delta_o - delta_ref in each row, and the gradient by
e = -scale * sum_i eps_i (P K)_i x_i^T (`lowprec.training.probes`). A head is alarmed if

    share       ||e|| / ||exact gradient|| >= 0.2,
    share_all   that share with the whole error of the gradient, of all roundings, >= 0.2,
    key_share   |mean key| / rms key >= 0.9, and
    common      |mean score| >= 10

The first, because errors of many steps agree and gradients of many batches do not: Adam with
beta_1 = 0.9 averages about 19 gradients, which shortens a sum of independent ones by sqrt(19) = 4.4
and not one of equal ones, so from a share of 0.23 on the error is the larger part of the step. The
second, because the step has all errors, and others can cancel that of O. The third, because what
errors of many steps have in common is the mean key: keys that are not alike give them no direction
to agree on, and scores that grow without it, as at too high a rate, grow for another reason. The
fourth, because that step moves q along the mean key and so raises all scores of a row alike; where
they are small the drift has done nothing yet. Without it heads ring that have no gradient to speak
of, as in the first steps of a training.

The limits of share and common were chosen on the seven captures of `data/captures`, the latter
after false alarms (book, part IV). key_share and share_all joined them after false alarms in the
campaign `otherwise`: 0.9 is the limit of the first rule, which had read key_share in the place of
common, and 0.2 is that of share. They are no theorem, and on other seeds (`otherwise_again`) the
alarm still rings in some runs that fail with attention in FP32. A few rows carry much of e, so
little text can miss a failing head: the more of it, the better.

`share` is the statistic that runs record, and on which the limit was tested. It is what the stored
output does to a delta that reads it, also under a policy whose delta reads something else.
`share_all` is the same with the whole error of the gradient, of every rounding of the policy: dQ as
the backward has it, less dQ in float64. The rounding of P is in it. An alarm needs both, so a model
that fails by P alone gives none, and one under `SAFE`, which takes that error out again, hardly
any.

`tv` is how far rounding q and k moves P: 0.05 and more, and the head computes something else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pandas as pd
import scipy
import torch

from lowprec import UserError
from lowprec.attention.inputs import outside_autocast
from lowprec.attention.reference import emulate
from lowprec.diagnose import drift
from lowprec.diagnose.directions import common_parts
from lowprec.numerics.formats import BF16, ulp
from lowprec.numerics.policy import PrecisionPolicy

SHARE, KEYS, COMMON, BROKEN = 0.2, 0.9, 10.0, 0.05
BLOCKS = 16
"""Blocks of consecutive rows behind the interval of delta's bias."""
ROWS = 128
"""Rows that attention in float64 takes at a time, at least."""
AT_ONCE = {"cpu": 0, "cuda": 2**26}
"""Elements of T x T matrices that are worked on together: those of one head of keys stay in a
processor's cache, and a GPU would wait for the next call."""
COLUMNS = {
    "layer": "by the number that the model gives it, from 0, as heads are",
    "head": "of queries",
    "tied": "share of rows whose largest score is tied",
    "o_bias": "sum of the errors of O, over the sum of the BF16 ulps of the exact O",
    "delta_bias": "sum eps / sum |eps| over rows; eps is delta from the stored O less "
    "delta from O before that rounding, not delta against float64",
    "delta_low": f"lower end of its 95 % interval, from {BLOCKS} blocks of rows",
    "delta_high": "upper end",
    "share": "the error that eps makes in W_Q's gradient, over the exact gradient, in norm; "
    f"an alarm needs {SHARE:g} and more",
    "error": "that error itself, in norm, of the gradient of the mean loss",
    "coherence": "inner product of the errors of two sequences over their mean square, on average; "
    "0: a larger batch averages them away, 1: it does not. nan for one sequence",
    "share_all": "that share with the whole error of that gradient, of all roundings: dQ of the "
    f"policy less dQ in float64; an alarm needs {SHARE:g} and more",
    "key_share": "size of the mean key, over the rms of the keys; "
    f"an alarm needs {KEYS:g} and more",
    "common": "mean score of a row, averaged over the rows from the second on; "
    f"an alarm needs {COMMON:g} and more, in size",
    "tv": "how far rounding q and k moves P, in total variation; "
    f"from {BROKEN:g} on the head computes something else",
    "logit": "largest score, scale q k^T, of a query and a key that it sees",
    "alarm": "whether the four limits are reached",
}
"""The columns of `probe`, in words."""
ALSO = {
    "entropy": "of the weights P of a row, in nats, averaged over the rows from the second on",
    "gradient": "norm of the exact gradient of W_Q, of the mean loss",
    "error_all": "norm of its whole error, of all roundings",
}
"""What `measure` gives besides, for the monitor."""


@dataclass
class Call:
    """One causal call of attention, and how an error of dQ reaches W_Q.

    q, do (B, H, T, D), k, v as q or with fewer heads, as attention reads them, v and do also with
    another size of a head; full_q, full_k
    before they were rounded; norms, from a dQ (B, H, T, D) to the norms of the W_Q gradients that
    it makes, (H,) of all sequences together and (B, H) of each. seen: what `rows` gives, where it
    is there already.
    """

    layer: int | None
    policy: PrecisionPolicy
    scale: float
    norms: Callable
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    do: torch.Tensor | None = None
    full_q: torch.Tensor | None = None
    full_k: torch.Tensor | None = None
    tile: int | None = None
    heads: list[int] | None = None
    seen: dict | None = None


def alarmed(heads: pd.DataFrame) -> pd.Series:
    """Whether each head of a table is: by share, share_all, key_share and common."""
    large = (heads.share >= SHARE) & (heads.share_all >= SHARE)
    return large & (heads.key_share >= KEYS) & (heads.common.abs() >= COMMON)


def measure(call: Call) -> dict[str, torch.Tensor]:
    """The columns of `COLUMNS` and `ALSO` but for layer, head and alarm, one number a head.

    Raises `UserError` where the call has numbers that are not finite.
    """
    seen = call.seen or rows(call)
    eps = seen["eps"]
    by_row = eps.transpose(1, 2).flatten(0, 1).cpu()
    mean, error, _ = drift.batch_means(by_row.numpy(), BLOCKS)
    kept = by_row[len(by_row) % BLOCKS :]  # of which `mean` is
    size = kept.abs().mean(0).clamp(min=torch.finfo(torch.float64).tiny).numpy()
    half = scipy.stats.t.ppf(0.975, BLOCKS - 1) * error
    gradient, _ = call.norms(seen["dq"])
    moved, each = call.norms(seen["moved"])
    whole, _ = call.norms(seen["dq_error"])
    apart = each.square().sum(0)
    pairs = (moved.square() - apart) / (len(each) - 1 or math.nan)  # one sequence makes none

    found = dict(
        tied=seen["tied"].mean(0), o_bias=seen["o_error"].sum(0) / seen["o_ulp"].sum(0),
        delta_bias=mean / size, delta_low=(mean - half) / size, delta_high=(mean + half) / size,
        share=part_of(moved, gradient), error=moved, coherence=part_of(pairs, apart),
        share_all=part_of(whole, gradient), key_share=seen["key_share"].mean(0),
        common=seen["common"].mean(0), tv=seen["tv"].mean(0), logit=seen["logit"].amax(0),
        entropy=seen["entropy"].mean(0), gradient=gradient, error_all=whole,
    )  # fmt: skip
    return {name: torch.as_tensor(x).cpu() for name, x in found.items()}


def part_of(error, whole) -> torch.Tensor:
    """Nothing of nothing is nothing: a head whose output goes nowhere has neither."""
    return torch.where(error == 0, 0.0, error / whole)


def blocks(q, k):
    """Indices (sequence, heads of queries, heads of keys) of the parts of a call that are worked on
    one by one."""
    group = q.shape[1] // k.shape[1]
    heads = max(1, AT_ONCE.get(q.device.type, 0) // (group * q.shape[2] * k.shape[2]))
    for b in range(len(q)):
        for h in range(0, k.shape[1], heads):
            yield slice(b, b + 1), slice(h * group, (h + heads) * group), slice(h, h + heads)


@outside_autocast
def forward(q, k, v, policy, scale, tile=None) -> torch.Tensor:
    """O of the emulation, (B, H, T, size of v) float32; q, k, v as attention reads them."""
    o = torch.empty(*q.shape[:3], v.shape[3], device=q.device)
    for b, of_q, of_k in blocks(q, k):
        part = emulate(q[b, of_q], k[b, of_k], v[b, of_k], policy, tile, scale=scale)
        o[b, of_q] = part.o
    return o


def require_finite(layer: int | None, *tensors) -> None:
    """Raise `UserError` that names a layer, if it is known, in which a number is none."""
    if not all(x.isfinite().all() for x in tensors):
        of = "" if layer is None else f" of layer {layer}"
        raise UserError(
            f"attention{of} has numbers that are not finite: the model has failed, "
            "or its loss is scaled too far; read a checkpoint or a capture from before that"
        )


@outside_autocast
def backward(q, k, v, do, full_q, full_k, policy, scale, tile=None, layer=None):
    """((dq, dk, dv) of the emulation, what `measure` needs), all (B, H, ...)."""
    require_finite(layer, q, k, v, do)
    if policy.draws:  # random bits count the heads of the call
        parts = [(slice(b, b + 1), slice(None), slice(None)) for b in range(len(q))]
    else:
        parts = list(blocks(q, k))
    grads, seen = tuple(torch.empty_like(x) for x in (q, k, v)), {}
    for b, of_q, of_k in parts:
        given = q[b, of_q], k[b, of_k], v[b, of_k], do[b, of_q]
        *parted, found = _block(*given, full_q[b, of_q], full_k[b, of_k], policy, scale, tile)
        for grad, part, heads in zip(grads, parted, (of_q, of_k, of_k), strict=True):
            grad[b, heads] = part
        for name, x in found.items():
            if name not in seen:
                seen[name] = x.new_empty(*q.shape[:2], *x.shape[2:])
            seen[name][b, of_q] = x
    return grads, seen


def rows(call: Call) -> dict[str, torch.Tensor]:
    """What `measure` needs of a call: (B, H, T) eps; (B, H, T, D) dq, moved, dq_error, which are
    the exact dQ, the error that eps makes in it and the whole error; the rest (B, H)."""
    given = (getattr(call, name) for name in ("q", "k", "v", "do", "full_q", "full_k"))
    return backward(*given, call.policy, call.scale, call.tile, call.layer)[1]


def _block(q, k, v, do, full_q, full_k, policy, scale, tile):
    """dq, dk, dv of the emulation and the numbers of `rows`, of one sequence and a few heads."""
    t = emulate(q, k, v, policy, tile, do, scale=scale)
    q, do, full_q = q.double(), do.double(), full_q.double()
    k, v, full_k = (_for_queries(x.double(), q) for x in (k, v, full_k))
    exact = _exact(q, k, v, do, full_q, full_k, scale)
    eps = t.delta_o.double() - t.delta_ref.double()
    counts = torch.arange(1, k.shape[2] + 1, dtype=torch.float64, device=k.device)
    common = scale * (full_q * (full_k.cumsum(2) / counts[:, None])).sum(-1)
    entropy = exact.lse - scale * (q * exact.mean_key).sum(-1)  # log l + m - sum of p s
    return t.dq, t.dk, t.dv, dict(
        eps=eps, dq=exact.dq, moved=-scale * eps[..., None] * exact.mean_key,
        dq_error=t.dq.double() - exact.dq, tied=(t.ties > 1).double().mean(2),
        o_error=(t.o.double() - exact.o).sum((2, 3)), o_ulp=ulp(exact.o, BF16).sum((2, 3)),
        common=common[..., 1:].mean(2), tv=exact.tv[..., 1:].mean(2),
        key_share=common_parts(full_k).expand(-1, q.shape[1]), logit=exact.m.amax(2),
        entropy=entropy[..., 1:].clamp(min=0).mean(2),
    )  # fmt: skip


def _exact(q, k, v, do, full_q, full_k, scale) -> SimpleNamespace:
    """Of the oracle what is needed here, a row each, and tv; float64.

    Rows are taken a few at a time with the keys that they see, for memory and half the time.
    """
    found = defaultdict(list)
    many = max(ROWS, AT_ONCE.get(q.device.type, 0) // (q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], many):
        part, seen = (..., slice(start, start + many), slice(None)), slice(start + many)
        keys, values, full_keys = (x[:, :, seen] for x in (k, v, full_k))
        s = _scores(q[part], keys, scale, start)
        m, p = s.amax(-1), s.softmax(-1)
        o, mean_key = (p @ torch.cat([values, keys], -1)).split([v.shape[-1], k.shape[-1]], -1)
        lse = m - p.amax(-1).log()  # the largest p is 1 / l
        tv = _scores(full_q[part], full_keys, scale, start).softmax(-1).sub_(p).abs_().sum(-1) / 2
        delta = (do[part] * o).sum(-1, keepdim=True)
        dq = scale * ((do[part] @ values.mT).sub_(delta).mul_(p) @ keys)
        for name, x in dict(m=m, lse=lse, o=o, dq=dq, mean_key=mean_key, tv=tv).items():
            found[name].append(x)
    return SimpleNamespace(**{name: torch.cat(xs, 2) for name, xs in found.items()})


def _scores(q, k, scale, start):
    """-inf where masked, of the rows from `start` on."""
    s = (q @ k.mT).mul_(scale)
    masked = torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu_(start + 1)
    return s.masked_fill_(masked, -torch.inf)


def _for_queries(x, q):
    """x (1, H', T, D), which broadcasts over the heads of q."""
    return x if x.shape[1] in (1, q.shape[1]) else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def table(calls, read: str) -> pd.DataFrame:
    """A row a layer and head, with the columns of `COLUMNS`; attrs["read"] says what was read."""
    tables = []
    for call in calls:
        columns = {name: x.tolist() for name, x in measure(call).items() if name in COLUMNS}
        heads = call.heads or range(len(columns["share"]))
        tables.append(pd.DataFrame(dict(layer=call.layer, head=heads) | columns))
    found = pd.concat(tables, ignore_index=True)
    found["alarm"] = alarmed(found)
    policies = ", ".join(dict.fromkeys(str(call.policy) for call in calls))
    found.attrs["read"] = f"{read}; attention emulated under {policies}"
    return found


def describe(row) -> str:
    """The numbers that an alarm reads, of one row of a table, in words."""
    where = row["module"] if "module" in row else f"layer {row['layer']:.0f}"
    return (
        f"in {where}, head {row['head']:.0f} the error that rounding O makes "
        f"through a delta that reads it is {row['share']:.2g} times as long as W_Q's gradient, "
        f"that of all roundings {row['share_all']:.2g} times, the mean key is "
        f"{row['key_share']:.2f} of the rms key, and the mean score is "
        f"{round(row['common'], 1) + 0.0:.1f}"
    )
