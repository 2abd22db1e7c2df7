"""A bias put into delta by hand: what it is beside that of rounding, and what becomes of it.

Runs with `delta_bias` compute delta = delta_ref + c |eps|, where eps is the error that rounding O
makes in delta, which they do not read, and c the bias. The bias is in all rows of a head or of a
layer, from the first step on. Healthy runs, their twins, have c = 0.
"""

from __future__ import annotations

import pandas as pd
import torch

from lowprec.evidence.heads import end_of, norms
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.training.config import TrainConfig, learning_rate
from lowprec.training.probes import query_error


def by_layer(config) -> pd.Series:
    """The bias that a config puts into each layer, as a share of |eps|, by layer."""
    policies = (config.layers.get(str(i), config.policy) for i in range(config.n_layer))
    shares = [PrecisionPolicy.parse(policy).delta_bias for policy in policies]
    return pd.Series(shares, name="share").rename_axis("layer")


def rates(run) -> pd.Series:
    """The learning rate of each step of a run up to its onset or its end, float32."""
    config = TrainConfig(**run.info["config"])
    return pd.Series([learning_rate(config, s) for s in range(end_of(run))], dtype="float32")


def at_full_rate(run) -> pd.Series:
    """Steps that a run has had by each step, up to its onset or its end, in steps of the full
    learning rate: the warm-up counts for less. What a constant bias would add up to."""
    return (rates(run) / run.info["config"]["lr"]).cumsum()


def course(run, healthy, layer: int) -> pd.Series:
    """The largest σ(W_Q) of a layer over that of the healthy run, by step, before both end."""
    mine, theirs = (norms(some)[layer].max(axis=1) for some in (run, healthy))
    return (mine / theirs).dropna()


def courses(arm, healthy, layer: int) -> pd.DataFrame:
    """`course` of each run of an arm, a column a seed."""
    runs = arm.by_seed.items()
    return pd.DataFrame({s: course(run, healthy.by_seed[s], layer) for s, run in runs})


def sizes(run, after: int, until: int, layer: int) -> pd.Series:
    """The sum of |eps| of each layer over that of one, over the steps from `after`, left out, to
    `until`: by how much the same share is a larger bias there."""
    some = run.probes[run.probes.step.between(after, until, inclusive="right")]
    total = some.groupby("layer").delta_abs.sum()
    return total / total[layer]


def in_gradient(capture, bias: float) -> dict[str, float]:
    """What a bias puts into the gradient of a captured head's W_Q, beside the error of rounding.

    rank_one: the share of its square that its largest singular value has; cosine: to the error that
    rounding makes; length: over the length of that.
    """
    t = capture.replay()
    eps = t.delta_o - t.delta_ref
    how = {name: capture.tensors[name] for name in ("q", "k", "x")} | dict(scale=capture.scale)
    put, own = (query_error(eps=e, **how)[0].double() for e in (bias * eps.abs(), eps))
    squares = torch.linalg.svdvals(put).square()
    return dict(
        rank_one=(squares[0] / squares.sum()).item(),
        cosine=torch.cosine_similarity(put.flatten(), own.flatten(), 0).item(),
        length=(put.norm() / own.norm()).item(),
    )  # fmt: skip
