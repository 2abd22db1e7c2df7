"""The sign of δ's errors: over a window of steps, over training, and in the rows of one sequence.

ε = delta_o - delta_ref is what the rounding of the output adds to a row's δ. Its signed sum Σε over
the sum of sizes Σ|ε|, `lowprec.diagnose.drift.relative_sum`, is the share of the errors that
add up. Runs of the campaign `windows` recorded both for every head at each of their last 200 steps:
three that fail, and their twins with clean δ.

Source: Qiu & Yao (2025), Section 3.3.2 and Fig. 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from lowprec.diagnose.drift import batch_means, output_terms, relative_sum, top_share
from lowprec.evidence.claims import Measured
from lowprec.evidence.heads import HEAD, summed, take_offs
from lowprec.evidence.survival import holm
from lowprec.records.runs import Run, load_runs
from lowprec.studies.common import coherence
from lowprec.studies.twins import beside

PAIRS = ("fa2-a", "fa2-b", "low-c")
"""The arms of `windows` that fail; that of the twin is called ARM-healthy."""
COLUMNS = ["step", *HEAD, "delta_bias", "delta_abs", "error_norm", "sum_norm"]
BATCH_ROWS = 32 * 1024
"""Rows of a head in one step."""


@dataclass(frozen=True)
class Window:
    """The last steps of a run, with sums for every head at each of them.

    head: (layer, head), the one that fails in the failing run of the pair. errors: the columns
    COLUMNS of the run's query_error.parquet. bias, size: Σε and Σ|ε| of a step, step down, (layer,
    head) across, float64.
    """

    run: Run
    head: tuple[int, int]
    errors: pd.DataFrame
    bias: pd.DataFrame
    size: pd.DataFrame

    @property
    def relative(self) -> pd.Series:
        """Σε/Σ|ε| over the window, by (layer, head)."""
        return self.bias.sum() / self.size.sum()

    def of_batches(self, batches: int, heads=slice(None)) -> pd.Series:
        """p of each head's sum against none, by so many batch means, after Holm for the heads."""
        scaled = (self.bias / self.size.mean()).loc[:, heads]
        return pd.Series(holm(batch_means(scaled, batches)[2]), scaled.columns)

    def kept(self) -> pd.DataFrame:
        """What is left in the sum over steps, by (layer, head): number, |Σb|/Σ|b| of the signed sum
        b of a step, and matrix, ‖Σe‖/Σ‖e‖ of the error e of W_Q's gradient."""
        number = self.bias.sum().abs() / self.bias.abs().sum()
        return pd.DataFrame(dict(number=number, matrix=coherence(self.errors)))

    def rows_needed(self) -> float:
        """Rows in which a bias of 1 % of the mean |ε| is two standard errors, from the scatter of
        whole steps of the failing head."""
        spread = self.bias[self.head].std() / self.size[self.head].mean()
        return (2 * spread / 0.01) ** 2 * BATCH_ROWS

    def again(self) -> tuple[pd.Series, pd.Series]:
        """Σε of each head over the same steps: in the window, which is a second pass over each
        batch that is not compiled, and as the run itself recorded it."""
        first, last = self.errors.step.min(), self.errors.step.max()
        begin = min(step for step in self.run.probes.step.unique() if step >= first - 1)
        tables = self.errors, self.run.probes
        return tuple(summed(t, begin, last, ["delta_bias"]).delta_bias for t in tables)


def windows() -> dict[str, Window]:
    """The windows of all runs of the campaign `windows`, by arm: each of PAIRS, then its twin."""
    runs = load_runs("windows").set_index("arm").run
    found = {}
    for pair in PAIRS:
        config = runs[pair].info["config"]
        head = (config["capture_layer"], config["capture_heads"][0])
        for arm in (pair, f"{pair}-healthy"):
            found[arm] = window(runs[arm], head)
    return found


def window(run: Run, head: tuple[int, int]) -> Window:
    """The window of a run that recorded one."""
    errors = pd.read_parquet(run.path / "query_error.parquet", columns=COLUMNS)
    errors = errors.astype(dict.fromkeys(COLUMNS[3:], float))
    bias, size = (
        errors.pivot(index="step", columns=HEAD, values=name)
        for name in ("delta_bias", "delta_abs")
    )
    return Window(run, head, errors, bias, size)


def by_chance(windows) -> float:
    """How likely one head of each window, drawn at random, has a positive sum in all of them."""
    return float(np.prod([(each.relative > 0).mean() for each in windows]))


def rank_correlation(one, other) -> Measured:
    """Spearman's correlation with its 95 % interval, by Fisher's transformation with the variance
    of Bonett & Wright (Psychometrika 65, 2000)."""
    rho, n = stats.spearmanr(one, other).statistic, len(one)
    half = 1.96 * ((1 + rho**2 / 2) / (n - 3)) ** 0.5
    return Measured(rho, n, tuple(np.tanh(np.arctanh(rho) + np.array([-half, half]))))


# Over training


def mean_over_seeds(values: pd.Series) -> Measured:
    """Mean of a number of runs by (arm, seed), with the 95 % interval over seeds: runs of one seed
    share their batches and count once."""
    by_seed = values.groupby(level=1).mean()
    mean, half = by_seed.mean(), stats.t.ppf(0.975, len(by_seed) - 1) * stats.sem(by_seed)
    return Measured(mean, len(values), (mean - half, mean + half))


def auc(bad, good) -> float:
    """Chance that one of `bad` has a larger number than one of `good`; ties count one half."""
    return float(stats.mannwhitneyu(bad, good).statistic / (len(bad) * len(good)))


def before_take_off(arm, base) -> pd.DataFrame:
    """The heads with a positive sum (heads) and the largest share Σε/Σ|ε| of a head (largest) over
    the 200 steps that end 100 before a run's first take-off: of each run (mine) and, over the same
    steps, of the base's run with its seed (base). Columns (side, number), a row a seed."""
    pairs, rows = beside(arm, base, lambda run: run), {}
    for seed, pair in pairs.iterrows():
        end = take_offs(pair.mine).step.min() - 100
        found = {side: relative_sum(run.probes, end - 200, end) for side, run in pair.items()}
        rows[seed] = {(side, "heads"): (sums > 0).sum() for side, sums in found.items()} | {
            (side, "largest"): sums.max() for side, sums in found.items()
        }
    return pd.DataFrame(rows).T


# In the rows of one sequence


def of_rows(capture) -> dict[str, float]:
    """What the rows of a capture's sequence have of ε, and the terms dO·(O - O*) of each.

    relative: Σε/Σ|ε|; error: its standard error if rows are independent; rows: how many of them it
    takes to see a bias of 1 % of the mean |ε| at two standard errors. heavy: share of Σ|ε| in the
    largest 1 % of rows. Of those rows: two, share of the two largest of their terms, in size;
    of_eps, the two over ε itself, median; positive, share with ε > 0. agree: share of odd rows in
    which dO and O - O* have one sign, in the two features that contribute most in even rows; all,
    over all rows but the first, which sees one key, and all features. rest: share of Σ|ε| that the
    terms leave, as where products are rounded.
    """
    eps, terms = output_terms(capture)
    sizes, spread = np.abs(eps), eps.std(ddof=1) / np.abs(eps).mean()
    largest = np.argsort(sizes)[-round(len(eps) / 100) :]
    top = terms[largest]
    first = np.argsort(np.abs(top), axis=1)[:, -2:]
    two = np.take_along_axis(top, first, axis=1).sum(1)
    return dict(
        relative=eps.sum() / sizes.sum(), error=spread / len(eps) ** 0.5,
        rows=(2 * spread / 0.01) ** 2, heavy=top_share(sizes, len(largest)),
        two=top_share(np.abs(top), 2).mean(), of_eps=np.median(two / eps[largest]),
        positive=(eps[largest] > 0).mean(), agree=agreement(terms, leaders(terms), odd=True),
        all=agreement(terms), rest=np.abs(eps - terms.sum(1)).sum() / sizes.sum(),
    )  # fmt: skip


def leaders(terms) -> np.ndarray:
    """The two features whose terms sum to most in even rows."""
    return np.argsort(np.abs(terms[::2].sum(0)))[-2:]


def agreement(terms, features=slice(None), odd: bool = False, where=None) -> float:
    """Share of places in which dO and the error of O have one sign, NaN without a place.

    terms: (rows, features). odd: of odd rows, not of all but the first. where: of places with True,
    an array of the shape of `terms`."""
    rows = slice(1, None, 2 if odd else 1)
    same = terms[rows, features] > 0
    kept = same if where is None else same[where[rows, features]]
    return kept.mean() if kept.size else np.nan


def split(capture) -> dict[str, float]:
    """`agreement` where values V of one sign hold 90 % of P (one) or not (two), and in rows whose
    largest score is tied (tied) or not (untied). tied_rows: how many are tied."""
    _, terms = output_terms(capture)
    t = capture.replay()
    p = t.p_unnorm[0, 0].double()
    positive = p @ (capture.tensors["v"][0, 0] > 0).double() / p.sum(1, keepdim=True)
    one = np.abs(positive.numpy() - 0.5) >= 0.4
    tied = np.broadcast_to((t.ties[0, 0, :, None] > 1).numpy(), one.shape)
    places = dict(one=one, two=~one, tied=tied, untied=~tied)
    found = {name: agreement(terms, where=where) for name, where in places.items()}
    return found | dict(tied_rows=int(tied[1:, 0].sum()))


def of_noise(rows: int = 4000, features: int = 64) -> dict[str, float]:
    """`two` and `of_eps` of `of_rows` where the terms are products of Gaussian numbers, of the 1 %
    of rows with the largest sums."""
    noise = np.random.default_rng(0).standard_normal((2, rows, features)).prod(0)
    biggest = noise[np.argsort(-np.abs(noise.sum(1)))[: rows // 100]]
    first = np.argsort(np.abs(biggest), axis=1)[:, -2:]
    of_two = np.take_along_axis(biggest, first, axis=1).sum(1)
    return dict(two=top_share(np.abs(biggest), 2).mean(), of_eps=np.median(of_two / biggest.sum(1)))
