"""Tied scores in captured heads and in runs: how many there are, and what rounding makes of them.

Several keys of one largest score, with weights P̄ = exp(score − largest score) of 1, add values V
of few bits. If all other keys add next to nothing, the residual, then the numerator Ō = Σ P̄V lies
halfway between two BF16 numbers far too often, and the residual decides where it goes. So the
errors of Ō can have a mean. A place is one feature of one row; an ulp is that of BF16 at Ō.

Source: Qiu & Yao (2025), Section 3.3 and Equations (4) and (5).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats

from lowprec import UserError
from lowprec.attention import trace
from lowprec.evidence.heads import end_of, take_offs
from lowprec.numerics.formats import BF16, round_to, ulp
from lowprec.numerics.policy import PrecisionPolicy

EDGES = [0, 0.25, 0.5, 1, 4, 16, 64, 128]
"""Ends of the classes of |residual|, in ulp."""


class Clustered(NamedTuple):
    """A mean, half its 95 % interval, and the clusters and places behind it."""

    mean: float
    half: float
    clusters: int
    places: int

    @property
    def interval(self):
        return self.mean - self.half, self.mean + self.half


def head(capture, policy) -> SimpleNamespace:
    """What a captured head computes under a policy, emulated; float64 without batch and head.

    tied: (rows, keys), keys of the largest score; k: how many, (rows, 1); sign: that of their V,
    0 where V has both. residual, error, output_error: (rows, features), what the other keys add
    to Ō and the errors of Ō and of O, in ulp. eps: (rows,), δ of the stored output less that of
    the unrounded one.
    """
    x = capture.tensors
    how = dict(scale=capture.scale, impl="emulate")
    t = trace(x["q"], x["k"], x["v"], x["do"], policy, capture.meta["causal"], **how)
    names = ("s", "p", "l", "o_acc", "o", "p_unnorm", "delta_o", "delta_ref")
    h = SimpleNamespace(**{name: getattr(t, name)[0, 0].double() for name in names})
    h.v, h.do = x["v"][0, 0].double(), x["do"][0, 0].double()
    h.row_sum, h.eps = h.p_unnorm.sum(-1, keepdim=True), h.delta_o - h.delta_ref
    h.tied = h.s == h.s.amax(-1, keepdim=True)
    h.k = h.tied.sum(-1, keepdim=True)
    signs = h.tied.double() @ h.v.sign()
    h.sign = torch.where(signs.abs() == h.k, signs.sign(), 0.0)
    h.exact = h.p @ h.v
    unit, output = ulp(h.exact, BF16), h.exact / h.row_sum
    h.residual = (h.exact - h.tied.double() @ h.v) / unit
    h.error = (h.o_acc - h.exact) / unit
    h.output_error = (h.o - output) / ulp(output, BF16)
    return h


def heads(captures: dict, policy) -> dict:
    """`head` of each capture by name, with `keys`, (rows, 1): a number for each set of tied keys.

    Raises `UserError` for a policy under which scores cannot tie, or δ does not read O.
    """
    policy = PrecisionPolicy.parse(policy)
    if policy.s.is_fp32 or policy.delta_from != "o":
        raise UserError(f"policy={policy} must round scores (s) and read δ from the stored output")
    found = {name: head(capture, policy) for name, capture in captures.items()}
    if lacking := [name for name, h in found.items() if not (h.k > 1).any()]:
        raise UserError(f"under {policy} no row ties in {', '.join(lacking)}: take another policy")
    for i, h in enumerate(found.values()):
        h.keys = torch.unique(h.tied, dim=0, return_inverse=True)[1][:, None] + 10_000 * i
    return found


def places(h) -> torch.Tensor:
    """Where rows with several ties have V of one sign at all of them, (rows, features)."""
    return (h.k > 1) & (h.sign != 0)


def pool(found: dict) -> SimpleNamespace:
    """The rows of all that `heads` found as those of one; `each`: a number for each row."""
    names = ("k", "sign", "residual", "error", "keys")
    pooled = {name: torch.cat([getattr(h, name) for h in found.values()]) for name in names}
    return SimpleNamespace(**pooled, each=torch.arange(len(pooled["k"]))[:, None])


def mean_of(x, where, group) -> Clustered:
    """Mean of x over the places `where`, with an interval for dependent rows: a ratio estimator.

    x, where: (rows, features). group: (rows, 1), which rows form a cluster.
    """
    ids = group.expand_as(x)[where].unique(return_inverse=True)[1]
    sums, count = torch.zeros(2, int(ids.max()) + 1 if len(ids) else 0, dtype=torch.float64)
    sums.index_add_(0, ids, x[where])
    count.index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
    mean = (sums.sum() / count.sum()).item()
    t = stats.t.ppf(0.975, max(len(sums) - 1, 1))
    half = t * ((sums - count * mean) ** 2).sum().sqrt() / count.sum()
    return Clustered(mean, half.item(), len(count), len(ids))


def path(h, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a row up to each key and the error of rounding it to BF16 there, which is the
    paper's Equation (5).  (keys, features) float32"""
    sums = (h.p[row, : row + 1, None].float() * h.v[: row + 1].float()).cumsum(0)
    return sums, round_to(sums, BF16) - sums


def jumps(h) -> dict[str, float]:
    """How far the error of `path` moves from key to key, mean over tied rows and features: at tied
    keys over that at others (`ties`), at others with P̄ ≥ ½ over that at tied ones (`large`, NaN
    if there are none)."""
    total, count = np.zeros(3), np.zeros(3)
    for row in (h.k[:, 0] > 1).nonzero()[:, 0].tolist():
        error = path(h, row)[1]
        jump = torch.diff(error, dim=0, prepend=torch.zeros_like(error[:1])).abs().mean(1)
        tied, large = h.tied[row, : row + 1], h.p[row, : row + 1] >= 0.5
        for i, kind in enumerate((tied, ~tied, ~tied & large)):
            total[i] += jump[kind].sum().item()
            count[i] += kind.sum().item()
    at_ties, others, large = np.divide(total, count, out=np.full(3, np.nan), where=count > 0)
    return dict(ties=at_ties / others, large=large / at_ties)


# The sum of the errors of δ


def parts(h) -> dict[str, torch.Tensor]:
    """What the roundings of Ō, ℓ, O and dO∘O add to eps, one after the other; (rows,) each."""
    kept, stored = h.o_acc, h.l[:, None]
    pieces = {
        "Ō": (kept - h.exact) / h.row_sum,
        "ℓ": kept / stored - kept / h.row_sum,
        "O": h.o - kept / stored,
    }
    pieces = {name: (h.do * x).sum(-1) for name, x in pieces.items()}
    return pieces | {"dO∘O": h.delta_o - (h.do * h.o).sum(-1)}


def sums(h) -> dict[str, float]:
    """Σeps of all rows, its `parts` and those of tied and other rows, over Σ|eps|; and `chance`,
    the standard deviation of the first if signs of rows were drawn at random."""
    whole = {"all": h.eps.sum()} | {name: x.sum() for name, x in parts(h).items()}
    whole |= {"tied": h.eps[h.k[:, 0] > 1].sum(), "others": h.eps[h.k[:, 0] == 1].sum()}
    whole["chance"] = h.eps.pow(2).sum().sqrt()
    return {name: (x / h.eps.abs().sum()).item() for name, x in whole.items()}


def tied_excess(h, generator=None) -> float:
    """Σeps/Σ|eps| of tied rows less that of the others; with a generator, of rows resampled."""
    ratio = []
    for kind in (h.k[:, 0] > 1, h.k[:, 0] == 1):
        eps = h.eps[kind].numpy()
        eps = eps if generator is None else generator.choice(eps, len(eps))
        ratio.append(eps.sum() / np.abs(eps).sum())
    return ratio[0] - ratio[1]


def met_by_chance(found: dict, bias: float, most: float, generator, draws: int = 1000) -> float:
    """How often Ō would make at most the part `most` of Σeps, median over what `heads` found, if
    rows had random signs and Ō alone a `bias`, in units of Σ|eps|."""
    drawn = []
    for h in found.values():
        rows = np.stack([parts(h)["Ō"].numpy(), h.eps.numpy()], 1)
        signs = generator.choice([-1.0, 1.0], (draws, len(rows)))
        drawn.append(signs @ rows + bias * np.abs(rows[:, 1]).sum())
    drawn = np.stack(drawn)
    return float((np.median(drawn[..., 0] / drawn[..., 1], axis=0) <= most).mean())


def constant_part(h) -> tuple[float, float]:
    """What a constant sign of the error in a feature, met by one of dO there, makes of
    Σ dO·(O − O_fp32): its share of it, and of the sum of the sizes of rows."""
    error = h.o - h.exact / h.row_sum
    constant = (len(error) * error.mean(0) * h.do.mean(0)).sum()
    rows = (error * h.do).sum(-1)
    return (constant / rows.sum()).item(), (constant / rows.abs().sum()).item()


# Weights and sinks


def powers_of_two(h) -> tuple[int, int]:
    """How many weights P̄ from 0.2 to below 1 are powers of two, and how many there are."""
    p = h.p[(h.p >= 0.2) & (h.p < 1)]
    return int((torch.frexp(p)[0] == 0.5).sum()), len(p)


def first_key(h) -> np.ndarray:
    """Share of P that goes to the first key, in each row but the first."""
    return (h.p_unnorm[1:, 0] / h.row_sum[1:, 0]).numpy()


def top_key(h, seen_by: float = 1.0) -> dict[str, float]:
    """The key with most of P: its share (%), the tied rows that see it (`seen`), and the share of
    those in which it is tied, NaN without one; `drawn` is the last for a key drawn from the tied
    ones of a tied row drawn at random.

    seen_by: 1 for the mean of P over all rows; below, over the rows that see a key, of the keys
    that so large a part of them sees.
    """
    share, tied = h.p_unnorm / h.row_sum, h.tied[h.k[:, 0] > 1].double()
    keys, rows = torch.arange(len(share)), (h.k[:, 0] > 1).nonzero()
    share = share.mean(0)
    if seen_by < 1:
        share = (share * len(keys) / (len(keys) - keys))[: int((1 - seen_by) * len(keys))]
    key, seeing = int(share.argmax()), (rows >= keys).double().sum(0)
    having = tied.sum(0) / seeing
    drawn = (tied / tied.sum(1, keepdim=True)).mean(0) @ having.nan_to_num()
    return dict(key=key, share=100 * share[key].item(), seen=int(seeing[key]),
                tied=having[key].item(), drawn=drawn.item())  # fmt: skip


def planted(height: float, seed: int, rows: int = 4000, keys: int = 256) -> tuple[float, float]:
    """Mean share of P on one raised key of drawn rows, and the share of rows with a tie.

    Scores are normal around 90, with a standard deviation of 1, one raised by `height`, all then
    rounded to BF16, whose numbers are ½ apart there.
    """
    s = 90 + torch.randn(rows, keys, generator=torch.Generator().manual_seed(seed)).double()
    s[:, 0] += height
    s = round_to(s, BF16)
    tied = (s == s.amax(1, keepdim=True)).sum(1) > 1
    return s.softmax(1)[:, 0].mean().item(), tied.double().mean().item()


# Runs


def tie_shares(run) -> pd.DataFrame:
    """Share of tied rows at each probe before the onset: step down, (layer, head) across."""
    wide = run.probes.pivot(index="step", columns=["layer", "head"], values=["tied_rows", "rows"])
    return (wide["tied_rows"] / wide["rows"]).loc[: end_of(run) - 1]


def rank_with_sums(run, after: int = 1000) -> float:
    """Rank correlation over heads of tied rows with Σeps/Σ|eps|, over the steps after `after`."""
    q = run.probes[run.probes.step > after].groupby(["layer", "head"])
    total = q[["delta_bias", "delta_abs", "tied_rows", "rows"]].sum()
    shares = total.tied_rows / total.rows, total.delta_bias / total.delta_abs
    return float(stats.spearmanr(*shares).statistic)


def of_first_head(run, other=None) -> pd.Series:
    """Share of tied rows in the head of a run that takes off first, by steps from its take-off; or
    of the same head of another run, by the same steps."""
    layer, head, step = take_offs(run).iloc[0]
    share = tie_shares(other or run)[layer, head]
    return share.set_axis(share.index - step)
