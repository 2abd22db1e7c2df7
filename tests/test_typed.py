"""Numbers that pages in the old form type and no cell computes: a test goes with its sentence."""

from pathlib import Path

import pandas as pd
import torch
from conftest import chosen

from lowprec.attention import trace
from lowprec.evidence.heads import take_offs
from lowprec.numerics.policy import PrecisionPolicy

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = ("fa2-a-seed1", "fa2-b-seed4", "low-c-seed6")


def test_how_much_of_the_errors_adds_up():
    """Its first screen: nearly nine tenths, more than a third, unrelated ones about a tenth."""
    for name, head, low, high in zip(
        WINDOWS, (2, 5, 3), (0.85, 0.85, 1 / 3), (0.9, 0.9, 0.4), strict=True
    ):
        table = pd.read_parquet(ROOT / f"data/runs/windows/{name}/query_error.parquet")
        table = table[(table.layer == 1) & (table["head"] == head)]
        lengths = table.error_norm.astype(float)
        assert low < float(table.sum_norm.iloc[-1]) / lengths.sum() < high, name
        assert 0.07 < (lengths**2).sum() ** 0.5 / lengths.sum() < 0.14, name


def test_dp_alone_misses_zero_about_as_far_as_o_alone(captures):
    for name, c in captures.items():
        q, k, v, do = (c.tensors[x] for x in ("q", "k", "v", "do"))
        off = {}
        for site in ("o", "dp"):
            policy = PrecisionPolicy.parse(f"ALL_FP32+{site}=bf16")
            t = trace(q, k, v, do, policy, scale=c.scale, impl="emulate")
            ds = (t.s - t.lse[..., None]).exp() * (t.dp - t.delta[..., None])
            off[site] = ds.sum(-1, dtype=torch.float64).norm()
        assert 0.4 < off["dp"] / off["o"] < 2, name


def test_the_probe_does_not_see_p(recorded):
    of = chosen(recorded, "amount", "p_e8m5", "p_e8m6")
    assert len(of) == 8 and all(run.probes.delta_abs.max() == 0 for run in of)
    assert all(run.explosion.confirmed for run in of)


def test_the_papers_setting(recorded):
    (run,), (other,) = (chosen(recorded, "paper", arm) for arm in ("low", "o_fp32"))
    assert run.explosion.onset == 4506, "data/README.md"
    assert take_offs(other).empty and set(take_offs(run).layer) == {1}, "shelf.md"
    table = pd.read_parquet(ROOT / "data/runs/paper/probed.parquet")
    alarms = table.groupby(["run", "sequences"]).alarm.sum()
    assert dict(alarms["o_fp32-seed0"]) == {4: 1, 32: 0}
    middle = table[table.sequences == 32].groupby(["run", "layer"]).coherence.median()
    assert middle.abs().max() < 0.02, "near 0 in every layer"


def test_what_is_sooner(recorded):
    shorter = {run.seed: run.explosion.onset for run in chosen(recorded, "rivals", "fp16")}
    wide = chosen(recorded, "fp16", "fp16_s_fp32")
    assert all(run.explosion.confirmed for run in wide) and len(wide) == 4, "and intro"
    assert sum(run.explosion.onset < shorter[run.seed] for run in wide) == 2
