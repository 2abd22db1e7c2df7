"""Is what the errors of delta sum to the sum of their squares? What the records of it say.

eps is the error of delta in a row. Where labels follow the model and the errors of rows are
unrelated, the mean of eps is that of eps^2, with the loss as a sum over tokens in nats. Recorded
eps are of the mean loss, so that their sum should be the number of tokens times that of eps^2, the
law of this module. It reads the tables of `curvature`, `crossed` and `alone`, what runs recorded
while they trained, and captures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from lowprec.attention import trace
from lowprec.diagnose.drift import relative_sum
from lowprec.evidence.heads import HEAD, end_of, summed
from lowprec.studies.curvature import FINE, HESSIAN


class Ratio(NamedTuple):
    """A ratio of two totals and half the width of its 95 % interval."""

    value: float
    half: float

    def __str__(self) -> str:
        """With as many digits as the interval deserves: "60 ± 7", "0.98 ± 0.05"."""
        digits = 0 if self.value >= 10 else 1 if self.half >= 0.5 else 2
        value = round(self.value, digits) + 0.0  # no minus zero
        return f"{value:.{digits}f} ± {self.half:.{digits}f}"

    @property
    def sizes(self) -> tuple[float, float]:
        """The ends of the interval, of its size: the lower one at least 0."""
        return max(0.0, abs(self.value) - self.half), abs(self.value) + self.half


def ratio(above, below) -> Ratio:
    """The ratio of two totals, with an interval over the batches.  (batches, ...) both"""
    above, below = (np.reshape(x, (len(x), -1)).sum(1) for x in (above, below))
    value = above.sum() / below.sum()
    spread = np.std(above - value * below, ddof=1) / below.mean()
    return Ratio(value, stats.t.ppf(0.975, len(above) - 1) * spread / np.sqrt(len(above)))


# The small model of `curvature`


@dataclass(frozen=True)
class Signs:
    """The table `signs` of `curvature`, as sums of each batch, layer and head.

    tokens: of a batch, over which its loss is a mean.
    """

    table: pd.DataFrame
    tokens: int

    def sums(self, column: str, way: str, bits: int, rounding="nearest_even") -> np.ndarray:
        """A column of the table, (batches, layers, heads)."""
        table = self.table
        some = table[(table.way == way) & (table.bits == bits) & (table.rounding == rounding)]
        shape = [some[name].nunique() for name in ("batch", *HEAD)]
        return some.sort_values(["batch", *HEAD])[column].to_numpy().reshape(shape)

    def parts(self, bits: int, rounding="nearest_even") -> tuple[np.ndarray, np.ndarray]:
        """The even and the odd part of the sum of eps, (batches, layers, heads) each."""
        plus, minus = (self.sums("eps", way, bits, rounding) for way in ("as it is", "flipped"))
        return (plus + minus) / 2, (plus - minus) / 2

    def law(self, bits: int) -> np.ndarray:
        """The sum of squares that the even part should be, (batches, layers, heads)."""
        return self.tokens * self.sums("squares", "kept out", bits)

    def heads(self, bits) -> pd.DataFrame:
        """A row a head and number of bits: `even` and `law`, in % of the sum of |eps|."""
        rows = []
        for b in bits:
            sizes = self.sums("abs", "kept out", b).sum(0)
            both = (100 * x.sum(0) / sizes for x in (self.parts(b)[0], self.law(b)))
            even, law = (pd.DataFrame(x).stack() for x in both)
            rows.append(pd.DataFrame(dict(even=even, law=law)).rename_axis(HEAD).assign(bits=b))
        return pd.concat(rows).reset_index()

    def slope(self, bits) -> float:
        """By how many powers of two even part / sum of |eps| grows with a bit."""
        shares = [ratio(self.parts(b)[0], self.sums("abs", "kept out", b)).value for b in bits]
        return float(np.polyfit(list(bits), np.log2(shares), 1)[0])

    def hessian(self, bits: int) -> tuple[float, int]:
        """How far the even part is from err . H err, rms over rms, and of how many batches."""
        product = self.sums("eps", HESSIAN, bits)
        off = self.parts(bits)[0][: len(product)] - product
        return float(np.sqrt((off**2).mean() / (product**2).mean())), len(product)

    def tails(self, bits: int) -> np.ndarray:
        """Rows times the sum of eps^2, over the square of the sum of |eps|: (layers, heads)."""
        squares, sizes = (self.sums(x, "kept out", bits) for x in ("squares", "abs"))
        return len(squares) * self.tokens * squares.sum(0) / sizes.sum(0) ** 2


def whole_text(table: pd.DataFrame) -> pd.DataFrame:
    """The table `whole` of `curvature` as a row a model: odd, the odd part over the even one, half,
    of its interval, nats, the even part of a mean loss, and of three things whether they are so.

    negative: the sum with both parts is below zero. flips: it has the other sign if the error has.
    sure: so beyond the intervals of both.
    """
    rows = {}
    for seed, some in table.groupby("seed"):
        odd = ratio(some.odd.to_numpy(), some.even.to_numpy())
        both = 1 + odd.value, 1 - odd.value
        flips = both[0] * both[1] < 0
        rows[seed] = dict(
            odd=odd.value, half=odd.half, nats=some.even.sum(), negative=both[0] < 0, flips=flips,
            sure=flips and min(map(abs, both)) > odd.half, least=odd.sizes[0],
        )  # fmt: skip
    return pd.DataFrame(rows).T.infer_objects()


def of_even(table: pd.DataFrame, column: str, **chosen) -> Ratio:
    """A column of the table `labels` of `curvature` beside the even part, of the rows that have
    these values in other columns."""
    some = table[np.logical_and.reduce([table[key] == value for key, value in chosen.items()])]
    return ratio(some[column].to_numpy(), some.even.to_numpy())


def misfit(table: pd.DataFrame, power: float) -> Ratio:
    """The first term of rounding towards zero with the bits of BF16 over the even part, if labels
    follow the model to a power."""
    return of_even(table, "first", bits=FINE, follow=f"power {power}")


def by_site(table: pd.DataFrame) -> tuple[dict[str, Ratio], pd.DataFrame]:
    """Of the table `sites` of `curvature`: the even part over the law for each rounding, and the
    columns even, squares, output beside those of O."""
    held = {
        name: ratio(some.even.to_numpy(), some.squares.to_numpy())
        for name, some in table.groupby("rounded", sort=False)
    }
    total = table.groupby("rounded", sort=False)[["even", "squares", "output"]].sum()
    return held, total / total.loc["O"]


# Trained models


def law(table: pd.DataFrame, tokens: int, by) -> pd.DataFrame:
    """Sums of the tables of `crossed` and `alone`, a row for each value of the columns `by`: those
    of the table, ratio, of the sum of eps to the law, and the sum and the law as shares, in % of
    the sum of |eps|. tokens: over which a loss was a mean."""
    total = table.groupby(by)[["eps", "eps_abs", "eps_sq", "e_sq"]].sum()
    right = tokens * total.eps_sq
    return total.assign(
        ratio=total.eps / right, sum_share=100 * total.eps / total.eps_abs,
        law_share=100 * right / total.eps_abs,
    )  # fmt: skip


def in_low(total: pd.DataFrame) -> pd.DataFrame:
    """Models read in `LOW`, a row a model: read, the sum over the law; scaled, the same with the
    squares read in FP16 times the ratio of both squared errors of the output; grown, by how much
    the squares are larger than those. total: `law` by way and model."""
    low, fp16 = total.loc["LOW"], total.loc["FP16"]
    grown = low.eps_sq / (fp16.eps_sq * low.e_sq / fp16.e_sq)
    return pd.DataFrame(dict(read=low.ratio, scaled=low.ratio * grown, grown=grown))


def over_bound(run, after: int, until: int) -> float:
    """The sum of eps over the least that the law allows, tokens * (sum of |eps|)^2 / rows of each
    probe, in steps from `after` to `until` and not after an onset."""
    config, probes = run.info["config"], run.probes
    some = probes[probes.step.between(after, min(until, end_of(run)))]
    tokens = config["batch_size"] * config["block_size"]
    return some.delta_bias.sum() / (tokens * some.delta_abs**2 / some.rows).sum()


def of_run(run, after: int, until: int) -> dict[str, float]:
    """Of a run's steps from `after` to `until`, not after an onset: bound, as in `over_bound`;
    share, the mean over heads of their sum of eps over that of |eps|; rank, Spearman's correlation
    over the heads of that share with their mean |eps|."""
    last = min(until, end_of(run))
    shares = relative_sum(run.probes, after - 1, last)
    sums = summed(run.probes, after - 1, last, ["delta_abs", "rows"])
    rank = shares.corr(sums.delta_abs / sums.rows, method="spearman")
    return dict(bound=over_bound(run, after, until), share=shares.mean(), rank=rank)


# Ties


def needed_of_ties(run, layer: int, head: int) -> dict[str, float]:
    """Of a head in the window of a run: share, its sum of eps over that of |eps|; tied, the share
    of rows with a tied maximum; needed, the |eps|, in units of the mean, that these rows would need
    to make all of the sum."""
    first, last = run.info["config"]["window"]
    whole = first - 1 + run.info["config"]["probe_every"]  # the first probe of steps of the window
    probes = run.probes[(run.probes.layer == layer) & (run.probes["head"] == head)]
    some = probes[probes.step.between(whole, last)]
    total = some[["delta_bias", "delta_abs", "tied_rows", "rows"]].sum()
    share, tied = total.delta_bias / total.delta_abs, total.tied_rows / total.rows
    return dict(share=share, tied=tied, needed=share / tied if tied else np.inf)


def of_capture(capture) -> dict[str, float]:
    """Of a captured head: near, the share of rows in which two weights or more round to 1; carried,
    the part of the sum of eps in them; kappa, rows * sum of eps^2 over the squared sum of |eps|."""
    inputs = [capture.tensors[name] for name in ("q", "k", "v", "do")]
    t = trace(*inputs, capture.policy, tile=capture.tile, scale=capture.scale)
    eps = (t.delta_o - t.delta_ref).double().flatten()
    ones = ((t.p == 1).sum(-1) > 1).flatten()
    return dict(
        near=ones.double().mean().item(), carried=(eps[ones].sum() / eps.sum()).item(),
        kappa=(len(eps) * eps.square().sum() / eps.abs().sum() ** 2).item(),
    )  # fmt: skip
