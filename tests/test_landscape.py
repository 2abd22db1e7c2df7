"""The loss along the drift in kept weights: against autograd and R by hand, and the command."""

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec.studies import landscape
from lowprec.training.config import TrainConfig
from lowprec.training.data import shards as data
from lowprec.training.loop import train
from lowprec.training.model import GPT

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=10, steps=2, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu", policy="LOW",
             weights_at=(0, 2))  # fmt: skip


@pytest.fixture
def trial(monkeypatch):
    monkeypatch.setattr(landscape, "LENGTHS", (-0.02, 0.0, 0.02))
    torch.manual_seed(0)
    model = GPT(TrainConfig(**SMALL | dict(impl="sdpa", policy="FA2")).model())
    with torch.no_grad():
        model.blocks[1].qkv.weight *= 20  # the loss sees W_Q
    batch = data.batch(data.load_tokens(data.SMOKE), 0, 3, 10, 16)
    return model, *batch, landscape.along(model, *batch)


def test_the_slope_is_that_of_the_losses(trial):
    model, text, targets, found = trial
    assert len(found) == 2 * 2 * 3
    wide = found.pivot(index=["head", "direction"], columns="t", values="loss")
    slope = found.groupby(["head", "direction"]).slope.first()
    assert ((wide[0.02] - wide[-0.02]) / 0.04).to_numpy() == pytest.approx(slope, abs=3e-4)
    assert slope.abs().max() > 5e-3, "slopes of 0 would be no test"
    at_zero = found[found.t == 0].loss
    whole = model(text, targets).item()
    assert at_zero.to_numpy() == pytest.approx(whole, abs=1e-6), "chunks, and weights put back"


def test_the_bend_is_a_second_difference():
    curves = dict(drift=lambda t: 3 + t + 5 * t**2, random=lambda t: 3 - 2 * t - t**2 + t**4)
    rows = [
        ("fa2", 0, 800, 4, name, np.float32(t), curve(t), slope)
        for (name, curve), slope in zip(curves.items(), (1.0, -2.0), strict=True)
        for t in landscape.LENGTHS
    ]
    columns = ["arm", "seed", "step", "head", "direction", "t", "loss", "slope"]
    found = landscape.shapes(pd.DataFrame(rows, columns=columns)).loc["fa2", 0, 800, 4]
    assert found["bend", "drift"] == pytest.approx(2 * 5 * 0.2**2)
    assert found["bend", "random"] == pytest.approx(2 * (-(0.2**2) + 0.2**4))
    assert (found["slope", "drift"], found["slope", "random"]) == (1.0, -2.0)


def test_the_drift_is_the_mean_of_r(trial):
    model, text, *_ = trial
    with torch.no_grad():
        x = model.blocks[0](model.token(text) + model.position.weight[:16])
        x = model.blocks[1].norm_attn(x)
        q, k, _ = (t.double() for t in model.blocks[1].heads(x))
    scores = (q @ k.mT / 4).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    keys = scores.softmax(-1) @ k
    by_hand = sum(keys[b, :, i, :, None] * x[b, i].double() for b in range(10) for i in range(16))
    found = landscape.mean_r(model, text, 1)
    assert torch.allclose(found, by_hand / 160, rtol=0, atol=1e-5 * found.abs().max())


def test_the_table_on_disk(tmp_path, capsys):
    train(TrainConfig(**SMALL | dict(seed=3)), tmp_path / "low-seed3", arm="low")
    options = ["--data", str(data.SMOKE), "--sequences", "4", "--device", "cpu"]
    landscape.main([str(tmp_path), *options])
    assert "of 1 arms" in capsys.readouterr().out
    table = pd.read_parquet(tmp_path / "landscape.parquet")
    assert len(table) == 2 * 2 * 2 * len(landscape.LENGTHS) and set(table.step) == {0, 2}
    assert set(table.direction) == {"drift", "random"} and table.loss.between(5, 20).all()
