"""The stabilised softmax: rows made for it, and what it does to captured ones.

Where a row's largest score r is tied, the rule of Qiu & Yao (2025, section 4, Algorithm 1)
subtracts beta * r (r > 0) or gamma * r (r < 0) instead of r; here it is `Shift("beta")` of
`lowprec.numerics.policy`. In exact arithmetic nothing changes. In a format whose smallest number is
f, all weights of a row vanish once exp(-(beta - 1) r) < f / 2, and before that a floor under their
sum takes over.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

from lowprec.attention import trace
from lowprec.attention.reference import emulate, oracle, shifted_max
from lowprec.numerics.formats import BF16, Format, round_to
from lowprec.numerics.policy import ALL_FP32, LOW, RELEASED, PrecisionPolicy, Shift
from lowprec.studies.additions import Bias, tied_sum_bias

BETAS = (1.001, 1.01, 1.1, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0)
FLOOR = RELEASED.l_floor
EVERY_ROW = 1e6
"""A tolerance with which all scores that a row sees count as tied."""
CHANGES = {
    "β=2": dict(shift=Shift("beta")),
    "β=7": dict(shift=Shift("beta", beta=7.0)),
    "β=2, floor": dict(shift=Shift("beta"), l_floor=FLOOR),
    "β=7, floor": dict(shift=Shift("beta", beta=7.0), l_floor=FLOOR),
    "offset 1": dict(shift=Shift("offset", amplitude=1.0)),
}
"""With what a captured step is computed again; the offset rounds anew and leaves ties alone."""
FATES = ("no tie", "tie, output kept", "tie, output lost", "not finite")


def seeded(seed: int) -> torch.Generator:
    """The generator of made rows."""
    return torch.Generator().manual_seed(seed)


def uniform(low: float, high: float, count: int, generator) -> torch.Tensor:
    """(count,) float32, uniform between two numbers."""
    return low + (high - low) * torch.rand(count, generator=generator)


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


# Made rows, in the order in which the page draws them


def changed(shift, share, generator) -> torch.Tensor:
    """By how much a shift changes P in float64, (R,), in rows of 64 scores with two ties, every
    second maximum negative; (β − 1) r or (1 − γ) |r| is a `share` (R,) of what float64 has."""
    sign = torch.ones(len(share), dtype=torch.float64)
    sign[1::2] = -1
    limit = vanishes_above("fp64", subnormals=False)
    r = sign * share * limit / torch.where(sign > 0, shift.beta - 1, 1 - shift.gamma)
    scores = r[:, None] - 12 * torch.rand(len(r), 64, generator=generator, dtype=torch.float64)
    scores[:, 3] = scores[:, 11] = r
    return (shifted_softmax(scores, shift) - shifted_softmax(scores, Shift())).abs().amax(-1)


def exact(rows: int, generator) -> SimpleNamespace:
    """most: the largest change of P in float64 over 9 rules and 10 offsets, within the limit. off,
    lost: the (β − 1) r from which β = 2 changes P by 1e-12 or more, and from which P is 0/0."""
    rules = [Shift("beta", beta=b, gamma=g) for b in (2.0, 7.0, 8.0) for g in (0.0, 0.5, 0.9)]
    offsets = [1.0, 2.0, *uniform(0, np.log(2), 8, generator).tolist()]
    shifts = [*rules, *(Shift("offset", amplitude=c) for c in offsets)]
    inside = torch.linspace(0, 1, rows, dtype=torch.float64)
    most = max(changed(shift, inside, generator).max().item() for shift in shifts)
    outside = torch.linspace(1, 1.1, 10 * rows, dtype=torch.float64)
    change, limit = changed(Shift("beta"), outside, generator), vanishes_above("fp64", False)
    off, lost = (limit * outside[~(change < x)].min().item() for x in (1e-12, np.inf))
    return SimpleNamespace(most=most, off=off, lost=lost, limit=limit)


def still_one() -> tuple[int, float, dict]:
    """(rows, largest P̄, {β: largest maximum whose weight rounds to 1}), maxima from 2⁻¹² to 16."""
    r = torch.cat([2.0 ** -torch.arange(1.0, 13.0), torch.linspace(0.1, 16, 1000)])
    p = {b: tied_weight(r, b)[0] for b in (2.0, 4.0, 8.0)}
    largest = max(x.max().item() for x in p.values())
    return len(r), largest, {b: r[p[b] == 1].max().item() for b in (2.0, 8.0)}


def averaged(biases) -> Bias:
    """The mean of some independent `Bias`es, as one."""
    biases = list(biases)
    half = math.sqrt(sum(b.half**2 for b in biases)) / len(biases)
    mean, negative = (np.mean([getattr(b, name) for b in biases]) for name in ("mean", "negative"))
    return Bias(float(mean), half, float(negative), sum(b.n for b in biases))


def two_ties(weights, samples: int, generator) -> Bias:
    """The mean error of two tied terms and a small negative residual, averaged over weights P̄."""
    how = (BF16, 2, "negative", 0.03, samples, generator)
    return averaged(tied_sum_bias(*how, weight=p) for p in weights)


def weights(samples: int, generator) -> SimpleNamespace:
    """Weights of 4,000 tied maxima from 1 to 10, and sums of two ties, with the rule.

    table: by β, and by where the shifted maximum is kept, the mean relative error of P̄ (error),
    and the shares of P̄ that are 1 (one) and of errors below 0 (low). gamma: {(γ, where): share of
    P̄ that are 1} of negative maxima. ties: {β: Bias} of 64 `samples` sums; untouched: of as many
    without the rule.
    """
    maxima = round_to(uniform(1, 10, 4000, generator), BF16)
    rows = {}
    for b in BETAS:
        for store in ("fp32", "bf16"):
            p, error = tied_weight(maxima, b, store)
            shares = ((p == 1).double().mean().item(), (error < 0).double().mean().item())
            rows[b, store] = (error.mean().item(), *shares)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["error", "one", "low"])
    gamma = {
        (g, store): (tied_weight(-maxima, g, store)[0] == 1).double().mean().item()
        for g in (0.9, 0.99, 0.999)
        for store in ("fp32", "bf16")
    }
    untouched = two_ties([1.0], 64 * samples, generator)
    spread = torch.linspace(1, 10, 64)
    ties = {b: two_ties(tied_weight(spread, b)[0].tolist(), samples, generator) for b in BETAS}
    return SimpleNamespace(
        table=table.set_index(pd.MultiIndex.from_tuples(rows, names=["beta", "m in"])),
        gamma=gamma, untouched=untouched, ties=ties, rows=len(maxima),
    )  # fmt: skip


def offsets(rows: int, generator) -> pd.DataFrame:
    """With a fixed offset c, by c: the relative error of the weight exp(−c) in BF16, and the mean
    error of O along O with ℓ from unrounded and from rounded weights, all else in FP32."""
    made = made_rows(round_to(uniform(1, 4, rows, generator), BF16), (0, 1), 30, generator)
    right = oracle(*made, causal=False, scale=1.0).o

    def along(policy):
        o = attend(made, policy).o.double()
        return ((o * right).sum(-1) / right.square().sum(-1) - 1).mean().item()

    found = {}
    for c in (0.1, 1.0, 2.0):
        one = torch.tensor([-c], dtype=torch.float64).exp()
        policy = ALL_FP32.replace(p="bf16", shift=Shift("offset", amplitude=c))
        found[c] = [(round_to(one, BF16) / one - 1).item()]
        found[c] += [along(policy), along(policy.replace(l_from="p_rounded"))]
    return pd.DataFrame.from_dict(found, orient="index", columns=["weight", "o", "o, l from p"])


def limits() -> pd.DataFrame:
    """The (β − 1) r from which a row of two ties has no sum, or less than the floor; and the
    largest scores that these are with three β."""
    found = {
        "FP32": vanishes_above("fp32"),
        "FP32, no subnormals": vanishes_above("fp32", subnormals=False),
        "BF16": vanishes_above("bf16"),
        "FP16": vanishes_above("fp16"),
        "floor 1e-10, two ties": math.log(2 / FLOOR),
    }
    rows = {name: [x, *(x / (b - 1) for b in (2, 7, 8))] for name, x in found.items()}
    columns = ["(β−1)r", "r, β=2", "r, β=7", "r, β=8"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def kept(r, policy, generator) -> np.ndarray:
    """|O| of rows with two maxima r (R,) under a policy, over that of exact attention.  (R,)"""
    made = made_rows(r, (0, 1), 30, generator)
    right = oracle(*made, causal=False, scale=1.0).o.norm(dim=-1)[:, 0, 0]
    return (attend(made, policy).o.double().norm(dim=-1)[:, 0, 0] / right).numpy()


def ranges(rows: int, generator) -> SimpleNamespace:
    """empty: {β: the least maximum of a row without a sum, FP32 throughout}. kept: `kept` under LOW
    by maximum r, a column for each (β, floor). five: with β = 7, the floor and r = 5, the median.
    coarse: median relative errors of O, r near 10, where s − m is stored in BF16, by shift."""
    empty = {}
    for b in (2.0, 7.0, 8.0):
        r = torch.linspace(0.9, 1.1, 1600) * vanishes_above("fp32") / (b - 1)
        policy = ALL_FP32.replace(shift=Shift("beta", beta=b))
        l_of = attend(made_rows(r, (0, 1), 6, generator), policy).l
        empty[b] = r[(l_of == 0)[:, 0, 0]].min().item()
    r = round_to(torch.from_numpy(np.geomspace(0.5, 200, 150)).float(), BF16)
    ruled = {b: LOW.replace(shift=Shift("beta", beta=b)) for b in (2.0, 7.0)}
    share = {
        (b, floor): kept(r, ruled[b].replace(l_floor=floor), generator)
        for b in ruled
        for floor in (0.0, FLOOR)
    }
    fives = kept(torch.full((rows,), 5.0), ruled[7.0].replace(l_floor=FLOOR), generator)
    some = round_to(uniform(9, 11, rows, generator), BF16)
    made = made_rows(some, (0, 1), 30, generator, below=(0.5, 2.0))
    right, coarse = oracle(*made, causal=False, scale=1.0).o, {}
    for shift in (Shift(), Shift("beta", beta=7.0)):
        o = attend(made, RELEASED.replace(l_floor=0.0, shift=shift)).o.double()
        coarse[shift.kind] = ((o - right).norm(dim=-1) / right.norm(dim=-1)).median().item()
    return SimpleNamespace(
        empty=empty, kept=pd.DataFrame(share, index=r.numpy()), five=np.median(fives), coarse=coarse
    )


def both_signs(rows: int, generator) -> pd.DataFrame:
    """Median of `kept` at maxima of −40 and 40 under LOW with the floor, by (β, γ)."""
    found = {}
    for b, g in ((1.1, 0.0), (2.0, 0.0), (7.0, 0.0), (2.0, 0.9)):
        policy = LOW.replace(shift=Shift("beta", beta=b, gamma=g), l_floor=FLOOR)
        full = (torch.full((rows,), r) for r in (-40.0, 40.0))
        found[b, g] = [np.median(kept(r, policy, generator)) for r in full]
    return pd.DataFrame.from_dict(found, orient="index", columns=[-40, 40])


def single_maxima(rows: int, generator) -> float:
    """Share of rows with one maximum, from 1 to 30, that have no sum if β = 7 acts in every row."""
    policy = ALL_FP32.replace(shift=Shift("beta", beta=7.0, tol=EVERY_ROW))
    made = made_rows(uniform(1, 30, rows, generator), (0,), 31, generator)
    return (attend(made, policy).l == 0).double().mean().item()


def in_two_tiles(rows: int, generator) -> list[float]:
    """Share of rows with one maximum in each of two tiles of 32 keys whose two weights are 1 with
    β = 2; and with all keys in one tile."""
    made = made_rows(round_to(uniform(1, 10, rows, generator), BF16), (0, 32), 31, generator)
    policy = LOW.replace(shift=Shift("beta"))
    p = (attend(made, policy, tile=tile).p for tile in (32, None))
    return [((x == 1).sum(-1) == 2).double().mean().item() for x in p]


# Captured rows


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


def survey(captures: dict) -> pd.DataFrame:
    """Captures as they are, by name: base, their preset; acts, the share of rows in which the rule
    acts, and negative, how many of these have a negative maximum, of tied; middle, the median of
    the largest score; low, half, high: its 5, 50 and 95 % where it is above ½; every 2, every 7:
    the share of rows that are not finite if the rule acts in every row, without a floor; same:
    whether O stays the same, bit by bit, with β = 7."""
    found = {}
    for name, capture in captures.items():
        t = retrace(capture)
        top, fired = t.s.amax(-1), acts(t)
        row = dict(
            base=str(PrecisionPolicy.parse(capture.policy)).split("+")[0],
            acts=fired.double().mean().item(), tied=int(fired.sum()),
            negative=int((top[fired] < 0).sum()), middle=top.median().item(),
            same=torch.equal(retrace(capture, **CHANGES["β=7"]).o, t.o),
        )  # fmt: skip
        row["low"], row["half"], row["high"] = np.quantile(top[top > 0.5], [0.05, 0.5, 0.95])
        for b in (2, 7):
            o = retrace(capture, shift=Shift("beta", beta=float(b), tol=EVERY_ROW)).o
            row[f"every {b}"] = (~o.isfinite().all(-1)).double().mean().item()
        found[name] = row
    return pd.DataFrame.from_dict(found, orient="index")


def fates(captures: dict) -> pd.DataFrame:
    """What becomes of captured rows under each of CHANGES: by (capture, change) the shares FATES of
    the rows, all that `compare` says, and muted positive, the share of tied rows with a positive
    maximum and a finite output that lose more than half of it."""
    found = {}
    for name, capture in captures.items():
        base = retrace(capture)
        fired, before = acts(base), base.o.norm(dim=-1)
        for label, change in CHANGES.items():
            t = retrace(capture, **change)
            finite = t.o.isfinite().all(-1)
            lost = finite & fired & (t.o.norm(dim=-1) < 0.5 * before)
            parts = (~fired, fired & finite & ~lost, lost, ~finite)
            row = dict(zip(FATES, (x.double().mean().item() for x in parts), strict=True))
            row["muted positive"] = lost[finite & fired & (base.s.amax(-1) > 0)].double().mean()
            row["muted positive"] = row["muted positive"].item()
            found[name, label] = row | compare(capture, base, t, fired)
    return pd.DataFrame.from_dict(found, orient="index")
