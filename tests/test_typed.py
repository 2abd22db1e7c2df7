"""Numbers that pages in the old form type and no cell computes: a test goes with its sentence."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from conftest import chosen, excess

from lowprec.attention import trace
from lowprec.evidence.heads import sums, take_offs
from lowprec.numerics.policy import PrecisionPolicy

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = ("fa2-a-seed1", "fa2-b-seed4", "low-c-seed6")


def test_page_12_one_run_of_fa2_has_no_take_off_between_probes_far_apart(recorded):
    first = [run for run in chosen(recorded, "mini", "fa2") if run.seed < 4]
    assert [take_offs(run, 2, 200, every=200).empty for run in first].count(True) == 1


def test_page_12_the_errors_sum_to_something_positive_with_each(recorded):
    trained = chosen(recorded, "sites", "paper", "released") + chosen(recorded, "mini", "fa2")
    assert len(trained) == 16
    assert all(sums(run, 599, 999).loc[1].delta_bias.sum() > 0 for run in trained)


def test_page_24_how_often_the_largest_sum_of_all_heads_names_the_first(recorded):
    def named(*names):
        of = []
        for run in chosen(recorded, *names):
            taken = take_offs(run, lag=200, every=200)
            if len(taken) and (end := taken.step[0] - 400) >= 200:
                values = sums(run, end - 200, end).delta_bias
                of.append(values.idxmax() == (taken.layer[0], taken["head"][0]))
        return np.array([sum(of), len(of)])

    other = [("sites", "paper", "only_o", "only_o_acc"), ("mini", "fa2")]
    other += [("production", "fa2_tile128"), ("rivals", "fp16")]
    assert list(sum(named(*names) for names in other)) == [20, 27]
    assert list(named("sites", "only_o")) == [3, 4], "page 24 says three of six, none of them"
    assert list(named("sites", "only_o_acc")) == [2, 4], "with the numerator alone"
    bf16 = [("sites", "released"), ("mini", "low", "o_acc", "dodo")]
    assert list(sum(named(*names) for names in bf16)) == [8, 28]


def test_page_41_ties_with_the_rule(recorded):
    def share(run, step):
        some = run.probes[run.probes.step == step]
        return some.tied_rows.sum() / some.rows.sum()

    ruled = chosen(recorded, "rivals", "beta2_floor")
    assert len(ruled) == 8 and not any(run.explosion for run in ruled)
    assert min(share(run, 6999) / share(run, 599) for run in ruled) > 3


def test_page_46_weights_below_1_without_silence(recorded):
    """The shelf, too."""
    moved = chosen(recorded, "rivals", "dither", "offset_1", "offset_2")
    ended = chosen(recorded, "untying", "untied_faint", "loud_open")
    assert len(moved) == 12 and {run.info["ended"] for run in moved} == {"explosion"}
    assert len(ended) == 8 and {run.info["ended"] for run in ended} == {"non-finite"}
    assert sum(run.explosion.onset < len(run.metrics) - 1 for run in ended) == 2
    assert all(not take_offs(run, lag=200, every=200).empty for run in moved), "intro"
    bare = ended + chosen(recorded, "rivals", "beta2", "beta7")
    bare += chosen(recorded, "ties", "untied_open")
    assert {run.info["ended"] for run in bare} == {"non-finite"}
    assert sum(run.explosion.onset < len(run.metrics) - 1 for run in bare) == 2
    begun = [not take_offs(run, lag=200, every=200).empty for run in bare]
    assert (sum(begun), len(begun)) == (7, 20), "page 46 and intro"
    assert sum(run.probes.step.max() < 799 for run in bare) == 8, "intro"


def test_page_46_silence(recorded):
    loud = chosen(recorded, "held", "untied_loud")
    assert all(run.explosion is None and not take_offs(run, 2, 200).empty for run in loud)
    rows = pd.read_parquet(ROOT / "data/runs/untying/silence.parquet")
    rows = rows[(rows.arm == "loud_seen") & (rows.layer == 1)]
    rows = rows.groupby(["step", "seed"])[["tied", "tied_lost"]].sum()
    share = (rows.tied_lost / rows.tied).unstack()
    assert (share.loc[1400] > 0.95).all() and share.loc[2400].mean() < 0.8
    muted, late = (chosen(recorded, "silent", arm) for arm in ("tied_muted", "tied_muted_late"))
    ruled = chosen(recorded, "rivals", "beta2_floor", "beta7_floor")
    ruled = [run for run in ruled if run.seed < 4]
    ruled += loud + chosen(recorded, "ties", "untied")
    assert (len(muted), len(late), len(ruled)) == (4, 4, 16), "the page has them in a table"
    for run in muted + late + ruled:
        assert run.explosion is None and run.info["ended"] == "completed"
    first = [run for run in chosen(recorded, "mini", "low") if run.seed < 4]
    assert len(first) == 4 and all(run.explosion.confirmed for run in first)
    healthy = {run.seed: run.final_loss for run in chosen(recorded, "mini", "o_fp32")}
    for run in muted:
        assert take_offs(run, lag=200, every=50).empty
        assert 0 < run.final_loss - healthy[run.seed] < 0.02
    for run in late:
        assert not take_offs(run, lag=200, every=50).empty and excess(run).max() < 0.3
        assert 0.04 < run.final_loss - healthy[run.seed] < 0.07


def test_page_43_one_capture_apart_the_errors_of_a_sequence_add_up_to_about_as_much():
    record = sorted((ROOT / "data/peers").glob("*.json"))[-1]
    table = pd.DataFrame(json.loads(record.read_text())["captures"])
    size = table.pivot(index="capture", columns="program", values="gradient")
    ratio = size[["flash", "cuDNN", "efficient", "flex"]].div(size.FA2, axis=0).stack()
    assert len(ratio) == 28 and 0.24 < ratio["fa2-b-seed4-1580", "cuDNN"] < 0.26
    assert ratio.drop(("fa2-b-seed4-1580", "cuDNN")).between(0.5, 2).all()


def test_page_32_how_much_of_the_errors_adds_up():
    """Its first screen: nearly nine tenths, more than a third, unrelated ones about a tenth."""
    for name, head, low, high in zip(
        WINDOWS, (2, 5, 3), (0.85, 0.85, 1 / 3), (0.9, 0.9, 0.4), strict=True
    ):
        table = pd.read_parquet(ROOT / f"data/runs/windows/{name}/query_error.parquet")
        table = table[(table.layer == 1) & (table["head"] == head)]
        lengths = table.error_norm.astype(float)
        assert low < float(table.sum_norm.iloc[-1]) / lengths.sum() < high, name
        assert 0.07 < (lengths**2).sum() ** 0.5 / lengths.sum() < 0.14, name


def test_page_31_dp_alone_misses_zero_about_as_far_as_o_alone(captures):
    for name, c in captures.items():
        q, k, v, do = (c.tensors[x] for x in ("q", "k", "v", "do"))
        off = {}
        for site in ("o", "dp"):
            policy = PrecisionPolicy.parse(f"ALL_FP32+{site}=bf16")
            t = trace(q, k, v, do, policy, scale=c.scale, impl="emulate")
            ds = (t.s - t.lse[..., None]).exp() * (t.dp - t.delta[..., None])
            off[site] = ds.sum(-1, dtype=torch.float64).norm()
        assert 0.4 < off["dp"] / off["o"] < 2, name


def test_page_45_the_probe_does_not_see_p(recorded):
    of = chosen(recorded, "amount", "p_e8m5", "p_e8m6")
    assert len(of) == 8 and all(run.probes.delta_abs.max() == 0 for run in of)
    assert all(run.explosion.confirmed for run in of)


def test_page_45_the_papers_setting(recorded):
    (run,), (other,) = (chosen(recorded, "paper", arm) for arm in ("low", "o_fp32"))
    assert run.explosion.onset == 4506, "data/README.md"
    assert take_offs(other).empty and set(take_offs(run).layer) == {1}, "shelf.md"
    table = pd.read_parquet(ROOT / "data/runs/paper/probed.parquet")
    alarms = table.groupby(["run", "sequences"]).alarm.sum()
    assert dict(alarms["o_fp32-seed0"]) == {4: 1, 32: 0}
    middle = table[table.sequences == 32].groupby(["run", "layer"]).coherence.median()
    assert middle.abs().max() < 0.02, "near 0 in every layer"


def test_pages_47_and_21_what_is_sooner(recorded):
    shorter = {run.seed: run.explosion.onset for run in chosen(recorded, "rivals", "fp16")}
    wide = chosen(recorded, "fp16", "fp16_s_fp32")
    assert all(run.explosion.confirmed for run in wide) and len(wide) == 4, "and intro"
    assert sum(run.explosion.onset < shorter[run.seed] for run in wide) == 2
    low = {run.seed: run for run in chosen(recorded, "mini", "low")}
    tiled = chosen(recorded, "sites", "tile64", "tile512")
    early = [run for run in tiled if run.explosion.onset < low[run.seed].explosion.onset]
    assert (len(early), sum("H100" in run.hardware for run in early)) == (7, 5), "limits of page 21"

    def total(run):
        return run.probes[run.probes.step.between(200, 800, "right")].delta_bias.sum()

    ratios = [total(run) / total(low[run.seed]) for run in chosen(recorded, "sites", "tile64")]
    assert (np.array(ratios) < 1.3).sum() == 2, "limits of page 21"
