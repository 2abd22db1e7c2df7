"""The stabilised softmax taken apart: what runs say of weights below 1, and of rows without output.

An arm with the floor under ℓ and one without it are the same run, bit by bit, until the sum of a
row falls below the floor. So `lowprec.studies.twins.parted` dates the first row that loses output.
Layers are counted from 0; most is asked of the second, in which the six-layer model fails.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from lowprec.evidence import survival
from lowprec.evidence.heads import norms, take_offs, takes_off, total
from lowprec.evidence.words import span
from lowprec.publish.lines import loss_course
from lowprec.records import explosion
from lowprec.records.explosion import RETURN, RISE, excess
from lowprec.studies.ties import tie_shares

LAYER, SETTLED = 1, 600
CAMPAIGNS = ("mini", "rivals", "ties", "held", "untying", "silent")


def load(seeds=range(4)) -> tuple[dict, dict]:
    """(arms, those of them with some seeds) of all campaigns that take the rule apart, by name."""
    arms = {name: arm for c in CAMPAIGNS for name, arm in survival.load_arms(c).items()}
    return arms, {name: arm.only(seeds) for name, arm in arms.items()}


def ended_in_nan(run) -> bool:
    """Whether a run ended with a loss that is not finite."""
    return run.info["ended"] == "non-finite"


def losses(*arms) -> pd.DataFrame:
    """The mean of the last 50 losses of each run of some arms, a column a run, by step.  nats"""
    runs = {f"{arm.name} {seed}": run for arm in arms for seed, run in arm.by_seed.items()}
    return pd.DataFrame({name: loss_course()(run) for name, run in runs.items()})


def rise(run) -> float:
    """`explosion.rise` of a run."""
    return explosion.rise(run.metrics.loss, SETTLED)


def spells(run) -> list[tuple[int, int]]:
    """(first step, steps) of each time that the mean loss was RISE above its lowest, until it was
    back within RETURN of that; from step 600 on."""
    above = excess(run.metrics.loss)[SETTLED:]
    up = pd.Series(np.select([above >= RISE, above <= RETURN], [1.0, 0.0], np.nan)).ffill() == 1
    count = (up & ~up.shift(fill_value=False)).cumsum()[up]
    return [(SETTLED + part.index[0], len(part)) for _, part in count.groupby(count)]


def largest_norm(run, layer: int = LAYER) -> pd.Series:
    """The largest σ(W_Q) of a layer, by step, before the onset."""
    return norms(run)[layer].max(axis=1)


def allowed(run, layer: int | None = None) -> pd.Series:
    """The largest |score| that the norms of a layer, or of all, allow at each probe, if LayerNorm's
    gains are 1."""
    config = run.info["config"]
    some = run.probes if layer is None else run.probes[run.probes.layer == layer]
    width = config["n_embd"] / np.sqrt(config["n_embd"] / config["n_head"])
    return (some.sigma_q * some.sigma_k * width).groupby(some.step).max()


def nearest(series: pd.Series, step: int) -> float:
    """A number by step at the probe nearest to a step."""
    return float(series.iloc[abs(series.index - step).argmin()])


def tied_course(run) -> pd.Series:
    """Share of rows that tie, all layers and heads, at each probe before the onset."""
    return tie_shares(run).mean(axis=1)


def tied(run, after: int, until: int) -> float:
    """Share of the second layer's rows that tie, over the steps from `after`, left out."""
    found = total(run, after, until, LAYER)
    return found.tied_rows / found.rows


def error_of(layer: int, after: int, until: int):
    """A measure of runs: the mean |ε| of a layer's rows, over the steps from `after`, left out."""

    def measure(run) -> float:
        found = total(run, after, until, layer)
        return found.delta_abs / found.rows

    return measure


def jump(run, bare, begun: int) -> float:
    """By how much the largest loss of a run is above that of `bare`, the same run without the
    floor, from the first row without output, at step `begun`, to the end of `bare`.  nats"""
    steps = range(begun, len(bare.metrics) - 1)
    return float(run.metrics.loss[steps].max() - bare.metrics.loss[steps].max())


def silenced(counts: pd.DataFrame, of: str = "tied") -> pd.DataFrame:
    """Rows of the second layer without output over its tied `rows` or all: a row a seed, a column a
    step. counts: of `lowprec.studies.silence`, of one arm."""
    found = counts[counts.layer == LAYER].groupby(["seed", "step"])[["lost", of]].sum()
    return (found.lost / found[of]).unstack("step")


def grown(counts: pd.DataFrame, early: int = 800, late: int = 2400) -> pd.Series:
    """The means of |O|, |dO| and |ε| of the second layer at a step over those at an earlier one."""
    means = counts[counts.layer == LAYER].groupby("step")[["o", "do", "eps"]].mean()
    return means.loc[late] / means.loc[early]


def fates(arms: dict, healthy) -> pd.DataFrame:
    """What became of the runs of some arms, {label: `survival.Arm`}, in words, a row a label:
    exploded; NaN, ended so; take-off, in which a head takes off; rise, of runs that come to step
    600; above, the last loss less that of the healthy run with its seed, of runs without an
    explosion; σ, the largest of W_Q in the second layer."""
    rows = {}
    for label, arm in arms.items():
        runs = arm.by_seed
        gaps = [run.final_loss - healthy.by_seed[s].final_loss
                for s, run in runs.items() if run.explosion is None]  # fmt: skip
        nan = sum(map(ended_in_nan, runs.values()))
        rises = [rise(run) for run in runs.values() if len(run.metrics) > SETTLED]
        rows[label] = {
            "explode": f"{arm.exploded - nan} of {arm.n}",
            "NaN": f"{nan} of {arm.n}",
            "a head takes off": f"{taken(arm)} of {arm.n}",
            "loss rose by": span(rises) if rises else "–",
            "ends above clean δ by": span(gaps, "{:.3f}") if len(gaps) == arm.n else "–",
            "σ(W_Q), second layer": span([largest_norm(r).max() for r in runs.values()], "{:.0f}"),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def first_layer(run) -> int:
    """The layer of the head that takes off first, at probes 200 steps apart; -1 without one."""
    return next(iter(take_offs(run, lag=200, every=200).layer), -1)


def taken(*arms) -> int:
    """In how many runs of some arms a head takes off, at probes 200 steps apart."""
    return sum(takes_off(run) for arm in arms for run in arm.by_seed.values())
