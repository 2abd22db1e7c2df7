"""The sharpness of the logits of kept weights, and what the claims on it take."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from lowprec.evidence import registry
from lowprec.records.runs import load_run
from lowprec.studies import bits, sharp
from lowprec.studies.kept import load
from lowprec.training.config import TrainConfig
from lowprec.training.data import shards as data
from lowprec.training.loop import train
from lowprec.training.model import GPT

SMALL = TrainConfig(
    n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=3, steps=4, warmup=2, probe_every=2,
    data="data/corpora/smoke.safetensors", device="cpu", policy="FA2", weights_at=(2, 4), seed=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharp")
    for arm, policy in dict(fa2="FA2", refined="FA2+row_sum=refined").items():
        train(dataclasses.replace(SMALL, policy=policy), folder / f"{arm}-seed3", arm=arm)
    sharp.main([str(folder), "--data", str(data.SMOKE), "--device", "cpu"])
    return folder


def test_the_table_has_the_loss_and_the_sharpness_of_the_batch_that_follows(folder):
    table = pd.read_parquet(folder / "sharpness.parquet")
    assert table.dtypes.astype(str).to_dict() == sharp.COLUMNS
    assert table[["arm", "step"]].to_numpy().tolist() == [
        [arm, step] for arm in ("fa2", "refined") for step in (2, 4)
    ]
    run = load_run(folder / "fa2-seed3")
    assert table.loss[0] == pytest.approx(run.metrics.loss[2], rel=1e-4), "the run's own batch"
    text, targets = data.batch(data.load_tokens(data.SMOKE), 2, 3, 3, 16)
    model = GPT(SMALL.model())
    model.load_state_dict(load(run, 2, "cpu"))
    found = []
    model.norm.register_forward_hook(lambda module, x, y: found.append(y))
    with torch.no_grad():
        model(text, targets)
        logits = F.linear(found[0], model.token.weight).flatten(0, 1)
    wanted = bits.sharpness(logits[None], targets[None]).item()
    assert table.sharpness[0] == pytest.approx(wanted, rel=1e-3) and wanted > 0.01


def test_a_table_is_read_beside_the_runs_own_numbers(folder, tmp_path):
    found = sharp.read(folder)
    assert list(found) == ["arm", "seed", "onset", "step", *sharp.SIGNALS] and len(found) == 4
    run = load_run(folder / "refined-seed3")
    row = found[(found.arm == "refined") & (found.step == 4)].iloc[0]
    assert row["mean"] == pytest.approx(run.metrics.loss.mean())
    assert row.sigma == run.probes[run.probes.step == 3].sigma_q.max() and np.isnan(row.onset)
    assert sharp.read(tmp_path) is None, "nothing was recorded there"


def test_signals_are_of_the_steps_before_the_weights():
    steps = np.arange(900)
    metrics = pd.DataFrame(dict(step=steps, loss=5.0, grad_norm=1.0))
    metrics.loc[800:, ["loss", "grad_norm"]] = 9.0
    probes = pd.DataFrame(
        [(step, 0, head, (1.0 + head) * (2.0 if (step, head) == (799, 0) else 1.0))
         for step in range(49, 900, 50) for head in (0, 1)],
        columns=["step", "layer", "head", "sigma_q"],
    )  # fmt: skip
    run = SimpleNamespace(metrics=metrics, probes=probes, explosion=SimpleNamespace(onset=810))
    kept = pd.DataFrame(dict(step=[700, 800], loss=[5.0, 6.0], sharpness=[0.1, 0.2]))
    found = sharp.signals(run, kept).set_index("step")
    assert found.loc[800].to_dict() == dict(
        onset=810, sharpness=0.2, loss=6, mean=5, gradient=1, sigma=2, growth=2
    )
    assert found.growth[700] == 1


def made_up():
    """Two failing runs and three healthy ones, of which one has a rise and is left out."""
    rows = []
    for arm, seed, onset, sharpness in [
        ("fa2", 6, 1050, [1, 5, 1, 5, 5]), ("fa2", 7, 990, [3, 2, 2, 0, 9]),
        ("refined", 6, np.nan, [2, 2, 2, 2, 2]), ("refined", 7, np.nan, [1, 1, 3, 3, 3]),
        ("refined", 8, 999, [9, 9, 9, 9, 9]),
    ]:  # fmt: skip
        for step, x in zip((700, 800, 900, 1000, 1100), sharpness, strict=True):
            rows.append((arm, seed, onset, step, x, 10 - x, 0, 0, 0, x))
    return pd.DataFrame(rows, columns=["arm", "seed", "onset", "step", *sharp.SIGNALS])


def test_the_area_is_over_pairs_at_the_step_before_each_onset():
    found = sharp.lower(made_up())
    assert found.sharpness.to_dict() == {6: 1, 7: 1}  # steps 800 and 700
    assert found.loss.to_dict() == {6: 0, 7: 0} and found["mean"].to_dict() == {6: 0.5, 7: 0.5}
    assert sharp.lower(made_up(), 100).sharpness.to_dict() == {6: 0, 7: 0.75}  # a tie is half
    assert list(sharp.lower(made_up(), 300).index) == [6], "onset 990 has no step 300 before it"


def test_a_run_leaves_the_healthy_ones_where_it_stays_above_them():
    found = sharp.leaves(made_up())
    assert found.sharpness.to_dict() == {6: 1000, 7: np.inf}, "not what comes after the onset"
    assert found.loss.to_dict() == {6: np.inf, 7: 1000}
    lost = made_up().astype({"sharpness": float})
    lost.loc[(lost.seed == 7) & (lost.step == 1000) & (lost.arm == "fa2"), "sharpness"] = np.nan
    assert sharp.leaves(lost).sharpness[7] == 1000, "what is lost is above all"


def judge(name, table):
    claim = registry.load()[f"bits-sharp-{name}"]
    by = sharp.judged(table)[name].to_dict()
    return claim.verdict_on(claim.parsed.reduce(by), len(by), complete=True)


@pytest.mark.parametrize(
    "name, supported, refuted",
    [("area", [1, 1, 3], [4, 4, 4]), ("growth", [1, 1, 1], [4, 4, 4]),
     ("loss", [1, 1, 2], [3, 3, 4]), ("after", [2, 2, 5], [4, 5, 5])],
)  # fmt: skip
def test_each_rule_can_come_out_either_way(name, supported, refuted):
    """Growth is above all healthy runs at 800; the loss is above 2 of 3 there and all from 900."""
    for sharpness, wanted in ((supported, "supported"), (refuted, "refuted")):
        rows = [("fa2", seed, 1000.0, step, x, y, 0, 0, 0, 9) for seed in (6, 7, 8) for step, x, y
                in zip((800, 900, 1000), sharpness, (2.5, 5, 5), strict=True)]  # fmt: skip
        rows += [("refined", seed, np.nan, step, y, y, 0, 0, 0, 1) for y, seed in
                 zip((1, 2, 3), (6, 7, 8), strict=True) for step in (800, 900, 1000)]  # fmt: skip
        table = pd.DataFrame(rows, columns=list(made_up()))
        assert judge(name, table) == wanted


def test_nothing_is_judged_before_it_is_recorded():
    assert set(sharp.judged(None).values()) == {None}
