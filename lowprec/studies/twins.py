"""Two trainings with one seed, side by side: at a step before either explodes, and bit by bit.

Runs of two arms with the same seed have the same first weights and batches, so what differs between
them is what the arms change. A run after its onset says nothing more about that: measures are taken
before it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from lowprec.evidence.heads import end_of, norms
from lowprec.records.explosion import WINDOW, window_mean


def beside(arm, base, measure) -> pd.DataFrame:
    """A measure of each run of an arm and of the base's run with its seed: columns mine, base, a
    row a seed that both have. arm, base: `survival.Arm`. measure: a function of a Run."""
    seeds = sorted(set(arm.by_seed) & set(base.by_seed))
    rows = [[measure(some.by_seed[seed]) for some in (arm, base)] for seed in seeds]
    return pd.DataFrame(rows, pd.Index(seeds, name="seed"), ["mine", "base"])


def beside_at(arm, base, measure, step: int) -> pd.DataFrame:
    """The same at a step: columns step, mine, base. Where one of the two explodes or ends by then,
    both are measured at its last step before. measure: a function of a Run and a step."""
    runs = beside(arm, base, lambda run: run)
    runs.insert(0, "step", [min(step, *(end_of(r) - 1 for r in pair)) for pair in runs.to_numpy()])
    for side in ("mine", "base"):
        runs[side] = [measure(r, at) for r, at in zip(runs[side], runs.step, strict=True)]
    return runs


def ratio(arm, base, measure) -> pd.Series:
    """A measure of each run of an arm over that of the base's run with its seed, by seed."""
    runs = beside(arm, base, measure)
    return runs.mine / runs.base


def sooner(arm, base) -> pd.Series:
    """Whether each run explodes, and sooner than the base's run with its seed ends. Seeds of which
    it is not known are left out, see `survival.counted`."""
    exploded, pair = _outcomes_beside(arm, base)
    return exploded & (pair.mine < pair.base)


def outlasts(arm, base) -> pd.Series:
    """Whether each run explodes later than the base's run with its seed ends, or not at all."""
    exploded, pair = _outcomes_beside(arm, base)
    return ~exploded | (pair.mine > pair.base)


def _outcomes_beside(arm, base):
    known = arm.outcomes()
    pair = beside(arm, base, end_of).reindex(known.index).dropna()
    return known[pair.index], pair


def later(arm, base) -> dict[int, int] | None:
    """By how many steps each run of an arm that explodes does so after the base's with its seed, by
    seed, where both do. None while there is no such run and others are to come."""
    mine, other = ({s: some.onsets[s] for s, yes in some.outcomes().items() if yes}
                   for some in (arm, base))  # fmt: skip
    steps = {seed: mine[seed] - other[seed] for seed in sorted(mine.keys() & other.keys())}
    return steps if steps or arm.complete else None


def loss_gap(arm, base, step: int) -> pd.Series:
    """By how much the loss of each run is above that of the base's run with its seed, by seed: at a
    step or, if one of the two explodes or ends by then, at the last before.  nats"""
    runs = beside_at(arm, base, loss_at, step)
    return runs.mine - runs.base


def loss_at(run, step: int, window: int = WINDOW) -> float:
    """Mean loss of the `window` steps up to a step, nats."""
    return float(window_mean(run.metrics.loss, window)[step])


def sigma_at(run, step: int, layer: int | None = None) -> float:
    """The largest σ(W_Q) of a head, of one layer or of all, at the last probe up to a step."""
    table = norms(run).loc[:step].iloc[-1]
    return float((table if layer is None else table[layer]).max())


def differing_losses(run, other) -> tuple[int, int]:
    """At how many steps the losses of two runs are not the same bits, and how many both have."""
    count = min(len(run.metrics), len(other.metrics))
    pair = (r.metrics.loss.to_numpy()[:count] for r in (run, other))
    return int(np.not_equal(*pair).sum()), count


def parted(run, other) -> int:
    """The first step at which the losses of two runs differ, or the last of the shorter run."""
    count = min(len(run.metrics), len(other.metrics))
    one, two = (some.metrics.loss.to_numpy()[:count] for some in (run, other))
    return int(np.append(np.flatnonzero(one != two), count)[0])
