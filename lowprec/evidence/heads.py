"""Which head fails first, what points at it before, and how often two arms agree by chance.

A head is a pair (layer, head), both counted from 0. What is recorded of it is a row of
`lowprec.records.runs.PROBES` every few steps.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd

from lowprec import UserError

HEAD = ["layer", "head"]
SUMS = ["delta_bias", "delta_abs", "tied_rows", "rows"]


def end_of(run) -> int:
    """Step of the onset of a run's explosion, or the number of steps of a run without one."""
    return run.explosion.onset if run.explosion else len(run.metrics)


def norms(run, of: str = "sigma_q") -> pd.DataFrame:
    """A norm at each probe before the onset: step down, (layer, head) across, float64.

    of: sigma_q or sigma_k, the largest singular value of the head's W_Q or W_K.
    """
    table = run.probes.pivot(index="step", columns=HEAD, values=of)
    return table.loc[: end_of(run) - 1]


def take_offs(
    run, factor: float = 2.0, lag: int = 100, settled: int = 600, every: int | None = None
) -> pd.DataFrame:
    """The heads whose σ(W_Q) becomes more than `factor` times what it was `lag` steps earlier.

    Only from step `settled` on and before the onset. every: look at probes so many steps apart, all
    by default; runs that are to be compared need the same. Columns layer, head, step (of the first
    such probe), in this order of steps; of equals the one that grows faster first.
    Raises `UserError` if the run's probes are too far apart for `lag` or `every`.
    """
    ratio = _growth(run, lag, settled, every)
    above = (ratio > factor).loc[:, (ratio > factor).any()]
    found = [(*head, step, ratio.at[step, head]) for head, step in above.idxmax().items()]
    found = pd.DataFrame(found, columns=[*HEAD, "step", "ratio"])
    order = found.sort_values(["step", "ratio"], ascending=[True, False], kind="stable")
    return order.drop(columns="ratio").astype(int).reset_index(drop=True)


def first_take_off(run, lag: int = 200, every: int = 200) -> float:
    """Step of the first of the `take_offs` of a run, NaN without one: at probes so far apart as all
    campaigns of the small model have them."""
    return take_offs(run, lag=lag, every=every).step.min()


def takes_off(run) -> bool:
    """Whether a run has a `first_take_off`."""
    return bool(np.isfinite(first_take_off(run)))


def fastest(run, lag: int = 100, every: int | None = None) -> float:
    """The largest factor by which the σ(W_Q) of a head grows within `lag` steps, from step 600 on:
    how far the run is from a take-off, or past it. Arguments and errors as in `take_offs`."""
    return float(_growth(run, lag, 600, every).max().max())


def _growth(run, lag: int, settled: int, every: int | None) -> pd.DataFrame:
    """σ(W_Q) over what it was `lag` steps earlier: step down, (layer, head) across."""
    apart = run.info["config"]["probe_every"]
    every = every or apart
    if lag < 1 or lag % every or every % apart:
        wrong, of = (f"every={every}", apart) if every % apart else (f"lag={lag}", every)
        raise UserError(f"{run.name}: {wrong} must be a multiple of {of}, a probe's steps")
    sigma = norms(run)
    sigma = sigma[(sigma.index + 1) % every == 0]
    return (sigma / sigma.shift(lag // every)).loc[settled:]


def over_healthy(run, healthy) -> pd.Series:
    """σ(W_Q) of each (layer, head) over that of a healthy run, at the last common probe before the
    onset of `run`. The series' name is that step."""
    mine, theirs = norms(run), norms(healthy)
    common = mine.index.intersection(theirs.index)
    if common.empty:
        raise UserError(f"{run.name} and {healthy.name} have no probe before the onset in common")
    step = int(common[-1])
    return (mine.loc[step] / theirs.loc[step]).rename(step)


def picked_for(capture, errors: pd.DataFrame) -> int:
    """The head whose error picked the sequence of a capture; it need not be the captured one.

    `lowprec.training.capture.suspect` takes the sequence with the largest part in the error of one
    head, the one with the largest ||e|| over the batch, also where the run named the heads to
    capture. errors: the query_error.parquet of the capture's run, in one micro-batch and with the
    layer named. Raises `UserError` if the capture's step is not in it.
    """
    at = errors[(errors.step == capture.step) & (errors.layer == capture.layer)]
    if at.empty:
        raise UserError(f"{capture.path.stem}: step {capture.step:,} is not in the run's window")
    return int(at.set_index("head").error_norm.idxmax())


def sums(run, after: int, until: int) -> pd.DataFrame:
    """Sums over the steps from `after`, left out, to `until`, both of a probe, by (layer, head).

    Columns delta_bias = Σ(delta_o - delta_ref), delta_abs = Σ|delta_o - delta_ref|, tied_rows,
    rows; NaN where a probe has no number. Raises `UserError` if no probe lies between.
    """
    found = summed(run.probes, after, until, SUMS)
    if found.empty:
        raise UserError(f"{run.name} has no probe after step {after:,} and up to {until:,}")
    return found


def total(run, after: int, until: int, layer: int | None = None) -> pd.Series:
    """What `sums` has, of all heads together or of those of a layer; NaN if it is of one."""
    found = sums(run, after, until)
    return (found if layer is None else found.loc[[layer]]).sum(skipna=False)


def summed(probes: pd.DataFrame, after: int, until: int, columns: list[str]) -> pd.DataFrame:
    """Some columns of a run's probes as `sums` adds them; empty if no probe lies between."""
    chosen = probes[probes.step.between(after, until, inclusive="right")]
    return chosen.groupby(HEAD)[columns].sum(min_count=chosen.step.nunique())


def agreement(ours: dict, theirs: dict, count: int = 6) -> tuple[int, int, float]:
    """How often other arms have the head that one arm has, and how often chance has as much.

    ours: {seed: head}; theirs: {seed: [head of another arm, ...]}; count: heads to choose from.
    Returns pairs that agree, pairs, and p: the probability of at least as many were each of
    `ours` drawn at random, all heads alike and seeds independent. Exact, whatever `theirs` have
    in common: within a seed the number of pairs that agree with a drawn head is how often it
    stands there.
    """
    distribution, hits, pairs = np.ones(1), 0, 0
    for seed, head in ours.items():
        others = list(theirs.get(seed, []))
        times = np.array([others.count(one) for one in dict.fromkeys(others)], dtype=int)
        chance = np.bincount(times, minlength=len(others) + 1) / count
        chance[0] = 1 - len(times) / count
        distribution = np.convolve(distribution, chance)
        hits, pairs = hits + others.count(head), pairs + len(others)
    return hits, pairs, float(min(1.0, distribution[hits:].sum()))


def rank_correlations(columns: dict) -> pd.DataFrame:
    """Spearman's correlation of every two runs of different arms over the heads they share.

    columns: {(arm, seed): Series by head}. Columns of the result: arm, seed, other arm, other
    seed, correlation; each pair of runs once.
    """
    table = pd.DataFrame(columns).corr(method="spearman").to_numpy()
    rows = [
        (*one, *other, table[i, j])
        for (i, one), (j, other) in combinations(enumerate(columns), 2)
        if one[0] != other[0]
    ]
    names = ["arm", "seed", "other arm", "other seed", "correlation"]
    return pd.DataFrame(rows, columns=names)
