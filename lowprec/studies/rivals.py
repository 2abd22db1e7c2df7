"""Remedies on trial: what a change leaves of the error of W_Q's gradient in a captured layer.

The gradient of a head's W_Q is sum_i dQ_i x_i^T. Computed with the roundings of a policy it differs
from the float64 gradient at the same inputs by everything that the backward rounds, delta among it.
So a remedy can be judged by what it leaves, without saying first where the error comes from. With
some draws of each random rounding that takes a while, so the page reads a table:

    python -m lowprec.studies.rivals data/studies/rivals        DATE-left.parquet

In training a remedy is judged beside the runs without it, with `judged`.
"""

from __future__ import annotations

import dataclasses
import math

import pandas as pd
import torch

from lowprec import entry
from lowprec.attention.reference import oracle
from lowprec.evidence import survival
from lowprec.evidence.heads import first_take_off
from lowprec.records.files import data_root
from lowprec.studies import dated
from lowprec.studies.stabilised import retrace
from lowprec.training.capture import Capture, query_gradient

PARAMETERS = dict(draws=24)
"""Those of the page."""
FAILING = {
    "fa2-a 1520": "fa2-a-seed1-1520",
    "fa2-a 1680": "fa2-a-seed1-1680",
    "fa2-b 1580": "fa2-b-seed4-1580",
    "low-c 1230": "low-c-seed6-1230",
}
CAPTURES = FAILING | {"healthy": "low-c-healthy-seed6-1230"}
"""A name to that of a file in data/captures."""
OF_LOW = {
    "low": "LOW",
    "o_fp32": "clean δ",
    "o_acc": "numerator in FP32",
    "o_split": "δ from O and residual",
    "dp": "δ from P∘dP",
    "low_centred": "centred keys",
    "qk_norm": "QK-norm",
    "gate": "output gate",
    "softcap": "cap on the logits",
    "decay": "weight decay of 0.1",
    "eps_1e5": "Adam's eps at 1e-5",
    "clip_03": "clipped at 0.3",
    "clip_01": "clipped at 0.1",
    "lr_half": "half the rate",
    "lr_quarter": "a quarter of the rate",
    "warmup_4x": "4 × the warm-up",
    "beta2_floor": "paper's rule, β = 2",
    "beta7_floor": "paper's rule, β = 7",
    "beta2": "β = 2, no floor",
    "beta7": "β = 7, no floor",
    "dither": "dithered maximum",
    "offset_1": "maximum moved by 1",
    "offset_2": "maximum moved by 2",
    "p_rounded": "ℓ from rounded p",
    "low_stochastic": "O, numerator at random",
    "fp16": "all in FP16",
}
OF_FA2 = {
    "fa2": "FA2",
    "fa2_o_fp32": "FA2, clean δ",
    "fa2_dp": "FA2, δ from P∘dP",
    "fa2_centred": "FA2, centred keys",
    "fa2_redrawn": "FA2, fresh rounding for δ",
    "fa2_stochastic": "FA2, O at random",
    "fa2_stochastic_o_fp32": "FA2, O at random, clean δ",
}
"""Arms of campaigns that change `LOW` or `FA2`, those first, and what they are called in print."""
REMEDIES = {
    "O drawn anew (control)": dict(delta_from="o_redrawn"),
    "stochastic O": dict(delta_from="o", o="bf16:stochastic"),
    "ℓ from rounded p": dict(delta_from="o", l_from="p_rounded"),
    "Ō in FP32": dict(delta_from="o", o_acc="fp32"),
    "δ from FP32 O": dict(delta_from="o_fp32"),
    "δ from O + residual": dict(delta_from="o_split"),
    "δ from P∘dP": dict(delta_from="dp"),
    "centred keys": dict(delta_from="o"),
    "centred, FP32 O": dict(delta_from="o_fp32"),
    "all in FP32": dict.fromkeys("s p l o_acc o dodo dp p_bwd ds".split(), "fp32"),
}
"""A change to the fields of the policy that it sets; those called centred change the keys, too."""
RANDOM = ("O drawn anew (control)", "stochastic O")


def exact_gradient(capture) -> torch.Tensor:
    """The same from float64 attention on the captured q, k, v and dO."""
    q, k, v, do = (capture.tensors[name] for name in ("q", "k", "v", "do"))
    return query_gradient(capture, oracle(q, k, v, scale=capture.scale, do=do).dq)


def centred(capture):
    """The capture with the mean key of each head and sequence taken out, as `center_keys` does."""
    k = capture.tensors["k"]
    mean = k.float().mean(2, keepdim=True)
    return dataclasses.replace(
        capture, tensors=capture.tensors | dict(k=(k.float() - mean).to(k.dtype))
    )


def gradient_error(capture, t, exact) -> float:
    """Size of the difference between the gradient of a trace and the exact one, over the latter."""
    return ((query_gradient(capture, t.dq) - exact).norm() / exact.norm()).item()


def delta_error(t) -> torch.Tensor:
    """The delta that a trace used, less delta_ref, (S, H', T) float64."""
    return (t.delta - t.delta_ref).double()


def load_captures() -> dict[str, Capture]:
    """The captures of CAPTURES by name."""
    folder = data_root() / "captures"
    return {name: Capture.load(folder / f"{stem}.xz") for name, stem in CAPTURES.items()}


def left(capture, draws: int) -> pd.DataFrame:
    """What each of REMEDIES leaves of a capture's errors, a row a change.

    left: size of the gradient's error, as a share of that with delta from the stored O, the root
    mean square over `draws` of each of RANDOM; size: the same of the sum of |delta's error|, mean.
    """
    exact, base = exact_gradient(capture), retrace(capture, delta_from="o")
    wrong, size, rows = gradient_error(capture, base, exact), delta_error(base).abs().sum(), []
    for name, change in REMEDIES.items():
        some = centred(capture) if name.startswith("centred") else capture
        found = [retrace(some, seed, **change) for seed in range(draws if name in RANDOM else 1)]
        squares = [gradient_error(capture, t, exact) ** 2 for t in found]
        sizes = [(delta_error(t).abs().sum() / size).item() for t in found]
        mean = math.fsum(squares) / len(found)
        rows.append((name, math.sqrt(mean) / wrong, math.fsum(sizes) / len(found)))
    return pd.DataFrame(rows, columns=["change", "left", "size"])


def measure(draws: int) -> dict[str, pd.DataFrame]:
    """The table `left` of all CAPTURES, the name in the column `capture`."""
    captures = load_captures()
    tables = [left(capture, draws).assign(capture=name) for name, capture in captures.items()]
    return dict(left=pd.concat(tables, ignore_index=True))


def effect(row, base) -> str:
    """One word on an arm of training: what became of the time, or its verdict if no run exploded or
    it has fewer than four.

    row, base: of the arm and of what it was compared with, in
    `lowprec.evidence.survival.compare_arms` with the permutation test.
    """
    if row.exploded == 0 or row.n < 4:
        return row.verdict
    if row.p_holm >= survival.LEVEL:
        return "not resolved"
    return "postpones" if row["median"] > base["median"] else "hastens"


FIRST = 799
"""The first probe at which a head can take off, where probes are 200 steps apart."""


def judged(arms: dict, base: str) -> pd.DataFrame:
    """Arms of training beside one of them, a row each, the base first, those without runs left out.

    arms: {name: `lowprec.evidence.survival.Arm`}. Columns of `survival.compare_arms` with the
    permutation test, but `verdict` by its test of counts; took_off, in how many runs a head takes
    off (NaN if all are too short to tell); effect, the word of `effect`, "base", or "not finite"
    where every run ends with such a loss.
    """
    there = {name: arm.runs.assign(arm=name) for name, arm in arms.items() if arm.n}
    runs = pd.concat(there.values(), ignore_index=True)
    counts = survival.compare_arms(runs, base)
    table = survival.compare_arms(runs, base, test="permutation").assign(verdict=counts.verdict)
    long = runs[runs.duration > FIRST]
    rose = long.run.map(first_take_off).notna().groupby(long.arm).sum()
    first, *rest = (row for _, row in table.iterrows())
    table = table.assign(
        took_off=table.arm.map(rose), effect=["base", *(effect(row, first) for row in rest)]
    )
    ended = (runs.ended == "non-finite").groupby(runs.arm).all()
    table.loc[table.arm.map(ended), "effect"] = "not finite"
    return table


def shares(run, first: int, last: int, without=()) -> dict[str, float]:
    """Sums over a run's probes between two steps, both included, and all layers but some.

    tied: tied rows, %; bias: the signed sum of delta's errors over the sum of their sizes, %; size:
    mean size of such an error.
    """
    table = run.probes[run.probes.step.between(first, last) & ~run.probes.layer.isin(without)]
    total = table[["tied_rows", "rows", "delta_bias", "delta_abs"]].sum(skipna=False)
    return dict(
        tied=100 * total.tied_rows / total.rows,
        bias=100 * total.delta_bias / total.delta_abs,
        size=total.delta_abs / total.rows,
    )


def main(argv: list[str] | None = None) -> None:
    """Measure what changes of rounding leave of the error of captured gradients."""
    dated.command("rivals", main.__doc__, measure, argv, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
