"""How a run in FP16 fails, step by step, from what it recorded.

FP16 has three stored significand bits more than BF16 and a smaller range. So two things may end a
run, errors that add up and a number beyond the range. The probes of a run have the first, the table
of `overflow` has the second. Everything is of the second layer, in which the six-layer model fails.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from lowprec.attention import trace
from lowprec.evidence.heads import first_take_off, total
from lowprec.evidence.words import span
from lowprec.records.explosion import excess
from lowprec.studies.crossed import LAYER, WAYS

RANGE = 65504
"""The largest number of FP16."""
PRODUCT = f"blocks.{LAYER}.qk"
"""The name of the layer's products of queries and keys in the table of `overflow`."""
HANDED = {
    "LOW": (WAYS["LOW"]["policy"], torch.bfloat16, "low_o_fp32"),
    "FA2": ("FA2", torch.bfloat16, "fa2_o_fp32"),
    "FP32, outside BF16": ("ALL_FP32", torch.bfloat16, "fp32"),
    "FP16": (WAYS["FP16"]["policy"], torch.float16, "fp16_o_fp32"),
    "FP32, outside FP16": ("ALL_FP32", torch.float16, "fp32_fp16"),
    "LOW, outside FP16": (WAYS["LOW"]["policy"], torch.float16, "low_o_fp32_fp16"),
}
"""A training to its policy, the dtype in which attention hands its output on, and the arm."""


def course(run, every: int = 200) -> pd.DataFrame:
    """Means per row over spans of `every` steps, of the delta errors, their sizes and tied rows.

    Index: the step that ends a span. Columns delta_bias, delta_abs, tied_rows, and share, the
    signed sum over the sum of sizes.
    """
    ends = range(every - 1, len(run.metrics), every)
    spans = {step: total(run, step - every, step, LAYER) for step in ends}
    table = pd.DataFrame(spans).T.rename_axis("step")
    table = table[["delta_bias", "delta_abs", "tied_rows"]].div(table.rows, axis=0)
    return table.assign(share=table.delta_bias / table.delta_abs)


class Courses:
    """The `course` of each run of some arms, {name: `lowprec.evidence.survival.Arm`}, in `of`:
    {name: {seed: table}}. What it says of spans is named by the steps at which they end."""

    def __init__(self, arms: dict):
        self.of = {
            name: {seed: course(run) for seed, run in arm.by_seed.items()}
            for name, arm in arms.items()
        }

    def over(self, name: str, column: str, steps: list[int]) -> pd.Series:
        """The mean of a column over spans, by seed; of the share, that of the sums."""
        means = pd.DataFrame({seed: t.loc[steps].mean() for seed, t in self.of[name].items()}).T
        return means.delta_bias / means.delta_abs if column == "share" else means[column]

    def beside(self, column: str, above: tuple, below: tuple) -> pd.Series:
        """`over` of one arm and spans, over that of another, by seed; each as (name, steps)."""
        return self.over(above[0], column, above[1]) / self.over(below[0], column, below[1])

    def percent(self, name: str, steps: list[int]) -> str:
        """The share in %, for prose: "1.2 to 1.6"."""
        return span(100 * self.over(name, "share", steps), "{:.1f}")


def last_steps(passes: pd.DataFrame) -> pd.DataFrame:
    """The rows of the table of `overflow` of each seed's last step, the one that ends its run."""
    return passes[passes.step == passes.groupby("seed").step.transform("max")]


def first_lost(passes: pd.DataFrame) -> dict:
    """{seed: the first place of its last step with a number that is not finite, None without}."""
    return {
        seed: next(iter(some.place[some.lost > 0]), None)
        for seed, some in last_steps(passes).groupby("seed")
    }


def products(passes: pd.DataFrame) -> pd.DataFrame:
    """The largest finite product of queries and keys, before the scale: (seed, step) by layer."""
    some = passes[passes.place.str.endswith(".qk")]
    layer = some.place.str.extract(r"(\d+)", expand=False).astype(int)
    return some.assign(layer=layer).pivot_table("largest", ["seed", "step"], "layer")


def looseness(runs: dict, tops: pd.DataFrame) -> pd.DataFrame:
    """What norms allow a product to be, over what it is, in the shape of `products`.

    runs: {seed: run}. The bound is sigma(W_Q) sigma(W_K) times the width, the largest of a layer's
    heads at the probe nearest to the step; it holds if LayerNorm's gains are 1.
    """

    def bound(seed, step):
        away = abs(runs[seed].probes.step - step)
        some = runs[seed].probes[away == away.min()]
        most = some.sigma_q * some.sigma_k * runs[seed].info["config"]["n_embd"]
        return most.groupby(some.layer).max()

    bounds = pd.DataFrame({at: bound(*at) for at in tops.index}).T
    return bounds.rename_axis(tops.index.names) / tops.to_numpy()


def ends(arm, high: float = 0.5, settled: int = 600) -> pd.DataFrame:
    """How the runs of an arm go, a row a seed: `take_off`, the step of the first, `high`, the first
    at which the loss has risen by so many nats, `onset`, from which it is up for good, NaN for
    none, and `steps`."""
    rows = {}
    for seed, run in arm.by_seed.items():
        up = np.flatnonzero(excess(run.metrics.loss)[settled:] >= high)
        rows[seed] = dict(
            take_off=first_take_off(run),
            high=up[0] + settled if len(up) else np.nan,
            onset=run.explosion.onset if run.explosion else np.nan,
            steps=len(run.metrics),
        )
    return pd.DataFrame(rows, dtype=float).T


def replayed(capture, policy, scale: float = 1.0):
    """The trace of a captured head under another policy, on the CPU, with dO times a scale."""
    q, k, v, do = (capture.tensors[name].float() for name in ("q", "k", "v", "do"))
    return trace(q, k, v, scale * do, policy, scale=capture.scale, impl="emulate")


def error_size(capture, way: str, scale: float) -> float:
    """Mean size of delta's error of a captured head under one of `crossed.WAYS`, in units of dO."""
    t = replayed(capture, WAYS[way]["policy"], scale)
    return ((t.delta_o - t.delta_ref) / scale).abs().mean().item()


def handed_error(capture, training: str) -> float:
    """Relative error of the output that attention hands to the model in one of HANDED, against
    attention in FP32 whose output stays FP32."""
    policy, dtype, _ = HANDED[training]
    exact = replayed(capture, "ALL_FP32").o.double()
    handed = replayed(capture, policy).o.to(dtype).double()
    return ((handed - exact).norm() / exact.norm()).item()
