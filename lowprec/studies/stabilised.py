"""The stabilised softmax: rows made for it, and what it does to captured ones.

Where a row's largest score r is tied, the rule of Qiu & Yao (2025, section 4, Algorithm 1)
subtracts beta * r (r > 0) or gamma * r (r < 0) instead of r; here it is `Shift("beta")` of
`lowprec.numerics.policy`. In exact arithmetic nothing changes. In a format whose smallest number is
f, all weights of a row vanish once exp(-(beta - 1) r) < f / 2, and before that a floor under their
sum takes over.
"""

from __future__ import annotations

import math

import torch

from lowprec.attention import trace
from lowprec.attention.reference import emulate, shifted_max
from lowprec.numerics.formats import BF16, Format, round_to


def made_rows(maxima, ties, others, generator, below=(8.0, 12.0), head_dim=8):
    """q (R, 1, 1, D), k, v (R, 1, N, D) float32 whose scores are known: the products are exact.

    maxima: (R,) float32, the largest score of each row. ties: places of the N = max(ties) + 1 +
    others keys that have it. The other scores lie uniformly `below` it, rounded to BF16. The first
    component of a key is its score, and the query is the first unit vector; use scale 1. v is
    uniform in [-1, 0], rounded to BF16.
    """
    count = max(ties) + 1 + others
    low, high = below
    draw = torch.rand(len(maxima), count, generator=generator)
    scores = round_to(maxima[:, None] - low - (high - low) * draw, BF16)
    scores[:, list(ties)] = maxima[:, None]
    k = torch.zeros(len(maxima), 1, count, head_dim)
    k[:, 0, :, 0] = scores
    q = torch.zeros(len(maxima), 1, 1, head_dim)
    q[..., 0] = 1
    v = -torch.rand(len(maxima), 1, count, head_dim, generator=generator)
    return q, k, round_to(v, BF16)


def attend(rows, policy, tile=None):
    """The trace of `lowprec.attention.reference.emulate` on `made_rows`."""
    return emulate(*rows, policy, tile, causal=False, scale=1.0)


def shifted_softmax(s, shift):
    """P of scores s (..., N), in their dtype, with the maximum shifted; no dithering."""
    p = (s - shifted_max(s.amax(-1, keepdim=True), s, shift, None)).exp()
    return p / p.sum(-1, keepdim=True)


def tied_weight(r, beta, store="fp32"):
    """The weight exp(r - m) of a tied maximum r (R,) float32 with m = beta r kept in `store`: the
    weight rounded to BF16, and its relative error in that rounding. (R,) float64 both."""
    m = round_to(beta * r, store).double()
    exact = (r.double() - m).exp()
    p = round_to(exact, BF16)
    return p, p / exact - 1


def vanishes_above(fmt, subnormals=True) -> float:
    """The x above which exp(-x) becomes 0 in `fmt`: rounded to nearest, or, without subnormals, cut
    off below the smallest normal number."""
    fmt = Format.parse(fmt)
    return -math.log(fmt.min_subnormal / 2 if subnormals else fmt.min_normal)


def acts(t) -> torch.Tensor:
    """Rows of a trace in which the rule changes the maximum, (B, H, T) bool; untiled, tol 0."""
    return (t.ties > 1) & (t.s.amax(-1) != 0)


def retrace(capture, seed=None, **changes):
    """The trace of a capture on the CPU under its policy with some fields changed; `policy` in it.

    As `Capture.replay` without its check, which is another trace. seed: of random roundings, by
    default the captured one; their bits are those of a head alone in its batch."""
    policy = capture.policy.replace(**changes)
    inputs = (capture.tensors[name] for name in ("q", "k", "v", "do"))
    how = dict(tile=capture.tile, scale=capture.scale, impl="emulate")
    how["seed"] = capture.meta["seed"] if seed is None else seed
    t = trace(*inputs, policy, capture.meta["causal"], **how)
    t.policy = policy
    return t


def compare(capture, base, t, rows) -> dict[str, float]:
    """Trace t of a capture under another policy beside `base`, that of its own.

    rows: a mask like `acts`. Returns rows, how many they are; broken, rows of the whole capture
    that are not finite in t; and, of those that are, size, sum |eps| over `rows`, eps = delta_o -
    delta_ref; muted, the share of `rows` that lost more than half of |O|; error, ||e|| of W_Q's
    gradient over all finite rows. size and error are relative to the base; NaN if no row is left.
    """
    eps, before = ((x.delta_o - x.delta_ref).double() for x in (t, base))
    finite = t.o.isfinite().all(-1) & eps.isfinite()
    kept = rows & finite
    clean = [(x.delta_o - x.delta_ref).where(finite, 0.0) for x in (t, base)]
    e, e_before = (_error_norm(capture, x, eps) for x, eps in zip((t, base), clean, strict=True))
    muted = t.o.norm(dim=-1) < 0.5 * base.o.norm(dim=-1)
    return dict(
        rows=int(rows.sum()), broken=int((~finite).sum()), error=e / e_before,
        size=(eps[kept].abs().sum() / before[kept].abs().sum()).item(),
        muted=muted[kept].double().mean().item(),
    )  # fmt: skip


def _error_norm(capture, t, eps) -> float:
    """||e|| over all heads of a capture, with eps in the place of what the trace says."""
    zero = torch.zeros_like(eps)
    t = type(t)(**vars(t) | dict(delta_o=eps, delta_ref=zero))
    return capture.query_error(t).norm().item()
