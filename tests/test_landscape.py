"""The loss along the drift in kept weights: against autograd and R by hand, and the command."""

from types import SimpleNamespace

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


def bowl(arm="fa2", seed=0, steps=(800, 1000), heads=(0, 1)):
    """A table of losses 3 + t² + t: falling against t, so with a negative drift, near 0."""
    rows = [
        (arm, seed, step, head, name, np.float32(t), 3 + t + t**2, 1.0)
        for step in steps for head in heads for name in ("drift", "random")
        for t in landscape.LENGTHS
    ]  # fmt: skip
    columns = ["arm", "seed", "step", "head", "direction", "t", "loss", "slope"]
    return pd.DataFrame(rows, columns=columns)


def test_a_move_with_the_drift_turns_with_its_sign():
    table, place = bowl(), ("fa2", 0, 800, 1)
    curve = landscape.curve(table, place, 1.0)
    assert curve[0.0] == 0 and list(curve.index) == sorted(landscape.LENGTHS)
    assert landscape.cost(table, place, 1.0) == pytest.approx((0.4 + 0.16, -0.4 + 0.16))
    assert landscape.cost(table, place, -0.2) == landscape.cost(table, place, 1.0)[::-1]


def made_run(weights_at, layer=1):
    """A run whose head 1 of a layer takes off at step 1,199, with a negative signed sum."""
    steps = np.arange(49, 1300, 50)
    sigma = np.where(steps < 1150, 2.0, 20.0)
    probes = pd.concat(
        pd.DataFrame(
            dict(step=steps, layer=at, head=head, delta_bias=-1.0 if head else 0.5, delta_abs=4.0,
                 sigma_q=sigma if (at, head) == (layer, 1) else 2.0)
        )
        for at in (0, 1) for head in (0, 1)
    )  # fmt: skip
    info = dict(arm="fa2", config=dict(probe_every=50, weights_at=weights_at))
    metrics = pd.DataFrame(dict(loss=np.ones(1300)))
    return SimpleNamespace(name="r", seed=0, info=info, probes=probes, metrics=metrics,
                           explosion=None)  # fmt: skip


def test_the_last_weights_before_a_take_off():
    found = landscape.before_take_off(bowl(), made_run([800, 1000, 1200]))
    assert found["place"] == ("fa2", 0, 1000, 1) and found["way"] == -1
    assert found["take_off"] == 1199
    assert found["slopes"] == [-1.0, -1.0] and found["slope"] == -1.0
    assert found["bend"] == pytest.approx(2 * 0.2**2) == pytest.approx(found["random"])


@pytest.mark.parametrize("weights_at, layer", [([1200], 1), ([800, 1000], 0)])
def test_a_take_off_elsewhere_or_too_early_is_left_out(weights_at, layer):
    assert landscape.before_take_off(bowl(), made_run(weights_at, layer)) is None


def test_the_head_with_the_clearest_sign():
    place, way = landscape.clearest(made_run([800]), 900)
    assert place == ("fa2", 0, 900, 1) and way == -0.25


def test_the_table_on_disk(tmp_path, capsys):
    train(TrainConfig(**SMALL | dict(seed=3)), tmp_path / "low-seed3", arm="low")
    options = ["--data", str(data.SMOKE), "--sequences", "4", "--device", "cpu"]
    landscape.main([str(tmp_path), *options])
    assert "of 1 arms" in capsys.readouterr().out
    table = pd.read_parquet(tmp_path / "landscape.parquet")
    assert len(table) == 2 * 2 * 2 * len(landscape.LENGTHS) and set(table.step) == {0, 2}
    assert set(table.direction) == {"drift", "random"} and table.loss.between(5, 20).all()
