"""A bias put into a clean δ by hand: how long runs last with it, where they fail, what it pushes.

δ = δ_ref + c|ε|, where δ_ref is from the output before its rounding and ε is the error that the
rounding would make: `delta_bias` of `lowprec.numerics.policy.PrecisionPolicy` is c. Arms here are
`lowprec.evidence.survival.Arm`; what is said of one run is by its seed.

Source: the question of the reviewers of Qiu & Yao (2025), how a drift ends in a spike.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from lowprec.diagnose.drift import share
from lowprec.evidence.heads import end_of, norms, over_healthy
from lowprec.training.probes import query_error


def against(arm, other) -> pd.DataFrame:
    """How long an arm lasts beside another, a row for each seed that both have.

    mine, theirs: steps to the onset, or to the end of a run without one; up, both: whether the arm,
    or both, explode; later: it explodes later, or not at all; sooner: it explodes, and the other
    does later or not; factor: mine over theirs; at_full_rate: the same in `full_rate` steps.
    """
    peers = other.by_seed
    rows = {
        seed: dict(
            mine=end_of(run), theirs=end_of(peers[seed]), up=run.explosion is not None,
            both=None not in (run.explosion, peers[seed].explosion),
            at_full_rate=full_rate(run) / full_rate(peers[seed]),
        )
        for seed, run in arm.by_seed.items()
        if seed in peers
    }  # fmt: skip
    columns = ["mine", "theirs", "up", "both", "at_full_rate"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    later, sooner = table.mine > table.theirs, table.mine < table.theirs
    up = table.up.astype(bool)
    return table.assign(later=later | ~up, sooner=sooner & up, factor=table.mine / table.theirs)


def full_rate(run) -> float:
    """The learning rates of a run up to its onset or end, added up, in steps of the full rate."""
    return float(run.metrics.lr[: end_of(run)].sum() / run.info["config"]["lr"])


def shares(arm, after: int, until: int, layers) -> pd.DataFrame:
    """sum eps / sum |eps| of `lowprec.diagnose.drift.share`: a row a layer, a column a seed."""
    runs = arm.by_seed.items()
    return pd.DataFrame(
        {seed: [share(run, after, until, layer) for layer in layers] for seed, run in runs}, layers
    )


def sizes(arm, after: int, until: int, layer: int) -> pd.DataFrame:
    """sum |eps| of each layer over that of `layer`, over the steps from `after`, left out, to
    `until`: a row a layer, a column a seed."""
    found = {}
    for seed, run in arm.by_seed.items():
        some = run.probes[run.probes.step.between(after, until, inclusive="right")]
        found[seed] = some.groupby("layer").delta_abs.sum()
    table = pd.DataFrame(found)
    return table / table.loc[layer]


# Where it fails


def ratios(arms: dict, healthy) -> pd.DataFrame:
    """`over_healthy` of each run that explodes: (arm, seed) down, (layer, head) across.

    arms: {name: arm}; healthy: the arm whose run of the same seed each is held against.
    """
    found = {
        (name, seed): over_healthy(run, healthy.by_seed[seed])
        for name, arm in arms.items()
        for seed, run in arm.by_seed.items()
        if run.explosion
    }
    return pd.DataFrame(found).T


def by_chance(healthy, step: int, layer: int) -> list[bool]:
    """Of healthy runs over those of other seeds: is the largest ratio of σ(W_Q) in a layer?"""
    at = {seed: norms(run).loc[step] for seed, run in healthy.by_seed.items()}
    return [(at[a] / at[b]).idxmax()[0] == layer for a in at for b in at if a != b]


def course(run, healthy, layer: int) -> pd.Series:
    """The largest σ(W_Q) of a layer over that of a healthy run, by step, before an onset."""
    mine, theirs = (norms(r)[layer].max(axis=1) for r in (run, healthy))
    return (mine / theirs).dropna()


def notice(run, path: pd.Series, above: float = 1.25) -> float:
    """Steps from the first at which `path` of `course` is above a level to the onset or the end of
    the run, NaN if it never is."""
    past = path.index[path > above]
    return float(end_of(run) - past[0]) if len(past) else np.nan


def at_dose(run, path: pd.Series, dose: float) -> float:
    """`path` of `course` at the last probe before the run has had a dose, in steps of the full
    learning rate: how far a run is when it has had as much bias as another."""
    had = run.metrics.lr.cumsum() / run.info["config"]["lr"]
    return float(path.loc[: int((had >= dose).to_numpy().argmax())].iloc[-1])


# What it pushes


def gradient(capture) -> dict[str, float]:
    """What |ε|, put into δ of a captured head, does to the gradient of W_Q.

    rank_one: the share of its square that the largest singular value has; cosine: with the error
    that ε itself makes; length: over the length of that error.
    """
    replay = capture.replay()
    eps = replay.delta_o - replay.delta_ref
    how = {name: capture.tensors[name] for name in ("q", "k", "x")} | {"scale": capture.scale}
    put, own = (query_error(eps=values, **how)[0] for values in (eps.abs(), eps))
    squares = torch.linalg.svdvals(put.double()).square()
    return dict(
        rank_one=(squares[0] / squares.sum()).item(),
        cosine=torch.cosine_similarity(put.flatten(), own.flatten(), 0).item(),
        length=(put.norm() / own.norm()).item(),
    )
