"""Would a distance between two runs have warned of an explosion?

Weights of long runs are not kept; what every run has is its loss and, at each probe, the spectral
norm σ(W_Q) of each head's query weights. A run that explodes is as far from its twin, a healthy run
with the same seed, as a measure says; the *bound* is how far healthy runs of two seeds are apart,
the median pair.

Source: the question of Golden et al. (2024), phase 2, put to runs that explode.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pandas as pd

from lowprec.evidence.heads import HEAD
from lowprec.records.explosion import WINDOW, window_mean


def loss_gap(a, b) -> pd.Series:
    """Root mean square difference of two runs' mean losses of 50 steps, from step 50 up to each
    step, nats."""
    a, b = (pd.Series(window_mean(run.metrics.loss)) for run in (a, b))
    return ((a - b).dropna().loc[WINDOW:] ** 2).expanding().mean() ** 0.5


def sigma_gaps(a, b) -> pd.DataFrame:
    """Sizes of the differences of two runs' σ(W_Q): a row a common probe, a column a head."""
    a, b = (run.probes.pivot(index="step", columns=HEAD, values="sigma_q") for run in (a, b))
    return (a - b).dropna().abs()


MEASURES = {
    "loss": loss_gap,
    "mean head": lambda a, b: sigma_gaps(a, b).mean(axis=1),
    "largest head": lambda a, b: sigma_gaps(a, b).max(axis=1),
}
"""Distances of two runs, Series by step: of the loss, and of σ(W_Q) in the mean or the largest."""


def over_bound(runs: Mapping, twins: Mapping, healthy: Mapping) -> dict[str, pd.DataFrame]:
    """By measure the distance of each run from the twin with its seed, over the bound, the median
    over pairs of healthy runs: step down, seed across. Above 1 it is further away than two seeds
    are. runs, twins, healthy: {seed: `lowprec.records.runs.Run`}; a run without a twin is left out.
    """
    found = {}
    for name, gap in MEASURES.items():
        pairs = [gap(healthy[i], healthy[j]) for i, j in combinations(sorted(healthy), 2)]
        bound = pd.concat(pairs, axis=1).median(axis=1)
        found[name] = pd.DataFrame(
            {s: gap(run, twins[s]) / bound for s, run in runs.items() if s in twins}
        )
    return found


def around(table: pd.DataFrame, steps: Mapping, ends: Mapping, start: int) -> pd.DataFrame:
    """A table's columns counted from a step of their own, which is 0 of the index, beginning
    `start` steps before it and up to another. steps, ends: {column: step}."""
    own = {c: v.dropna().loc[steps[c] - start : ends[c]] for c, v in table.items()}
    return pd.DataFrame({c: v.set_axis(v.index - steps[c]) for c, v in own.items()})


def at(table: pd.DataFrame, steps: Mapping) -> pd.Series:
    """Each column of a table at its last row with a number by its step. steps: {column: step}."""
    return pd.Series({c: values.loc[: steps[c]].dropna().iloc[-1] for c, values in table.items()})


def halves(run, stop: int) -> tuple[float, float, float]:
    """Signed sums of δ's error before half of the steps up to `stop` and after, and the sum of
    both over the sum of sizes; in the head with the largest σ(W_Q) at the last probe by
    `stop`."""
    probes = run.probes[run.probes.step <= stop]
    top = probes[probes.step == probes.step.max()].nlargest(1, "sigma_q").iloc[0]
    probes = probes[(probes[HEAD] == top[HEAD].astype(int)).all(axis=1)]
    first, second = probes.groupby(probes.step >= stop / 2).delta_bias.sum()
    return float(first), float(second), float((first + second) / probes.delta_abs.sum())
