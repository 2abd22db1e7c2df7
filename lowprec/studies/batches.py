"""Runs with a larger batch beside those of their seed with a smaller one.

Errors of δ are ε = delta_o - delta_ref: with clean δ what the stored output would put into it, and
the gradient does not read. A layer's Σε is over all its heads.
"""

from __future__ import annotations

import pandas as pd

from lowprec.evidence.heads import end_of, total
from lowprec.records.explosion import window_mean


def tokens(run) -> int:
    """Tokens of one step of a run."""
    config = run.info["config"]
    return config["batch_size"] * config["block_size"]


def passes(run, corpus: int) -> float:
    """How often a run has read a corpus of so many tokens, at its onset or else at its end."""
    return end_of(run) * tokens(run) / corpus


def signed(run, after: int, until: int, layer: int) -> float:
    """Σε of a layer over the steps from `after`, left out, to `until`."""
    return float(total(run, after, until, layer).delta_bias)


def share_course(run, layer: int) -> pd.Series:
    """Σε over Σ|ε| of a layer since the probe before, by step of each probe before the onset.  %"""
    found = run.probes[run.probes.layer == layer].groupby("step")[["delta_bias", "delta_abs"]].sum()
    return (100 * found.delta_bias / found.delta_abs).loc[: end_of(run) - 1]


def at_equal_loss(run, other, layer: int, steps, every: int = 200) -> dict[int, float]:
    """Σε of a run over that of another, each over the `every` steps up to where both have the same
    mean loss of these steps: {step of the run: ratio}.

    Left out is a step whose loss the other does not reach before its onset, looked for at every
    50th step, at which it has a probe.
    """
    (mine, theirs), found = (window_mean(r.metrics.loss, every) for r in (run, other)), {}
    for step in steps:
        reached = (p for p in range(every - 1, end_of(other), 50) if theirs[p] <= mine[step])
        if (late := next(reached, None)) is not None:
            ends = (run, step), (other, late)
            one, two = (signed(r, end - every, end, layer) for r, end in ends)
            found[step] = one / two
    return found


def largest_at_onset(run) -> tuple[int, tuple[int, int]]:
    """At the first probe from the onset on: how many steps after it, and the (layer, head) with the
    largest σ(W_Q)."""
    table = run.probes[run.probes.step >= run.explosion.onset]
    top = table.loc[table[table.step == table.step.min()].sigma_q.idxmax()]
    return int(top.step) - run.explosion.onset, (int(top.layer), int(top["head"]))
