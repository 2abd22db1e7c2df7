"""Model, probes, trainer and campaign, with a model that trains in a second."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from lowprec import UserError, campaign, runs
from lowprec.model import GPT, GPTConfig
from lowprec.probes import spectral_norms
from lowprec.train import PRESETS, TrainConfig, learning_rate, train

SMALL = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2, steps=4, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu")  # fmt: skip


def small(**changes):
    return dataclasses.replace(TrainConfig(**SMALL), **changes)


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(runs.repo_root())


def test_model_starts_at_the_uniform_loss_and_overfits():
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 64, 32, vocab_size=128, policy="LOW"))
    x, y = torch.randint(0, 128, (2, 2, 32))
    loss = model(x, y)
    assert abs(loss.item() - math.log(128)) < 0.3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 1.0


def test_model_sizes():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    n = sum(p.numel() for p in model.parameters())
    assert n == 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    weights = model.head_weights("k")
    assert weights.shape == (12, 12, 64, 768)
    with pytest.raises(UserError, match="n_embd=10"):
        GPTConfig(n_embd=10, n_head=3)


def test_head_weights_are_the_rows_that_make_the_head():
    model = GPT(GPTConfig(1, 2, 8, 4, vocab_size=16))
    w = model.blocks[0].qkv.weight
    assert torch.equal(model.head_weights("k")[0, 1], w[8 + 4 : 8 + 8])


def test_spectral_norms():
    w = torch.randn(2, 3, 5, 9)
    wanted = torch.linalg.matrix_norm(w.double(), ord=2)
    torch.testing.assert_close(spectral_norms(w), wanted, rtol=1e-7, atol=0)
    torch.testing.assert_close(spectral_norms(w.mT), wanted, rtol=1e-7, atol=0)
    w[0, 1, 2, 3] = float("nan")
    w[1, 2, 0, 0] = float("inf")
    broken = spectral_norms(w).isnan()
    assert broken.sum() == 2 and broken[0, 1] and broken[1, 2]


def test_a_run_is_recorded_whole(tmp_path):
    run = train(small(policy="LOW"), tmp_path / "a", arm="low")
    assert run.info["ended"] == "completed" and run.info["impl"] == "emulate"
    assert run.info["config"]["data"] == "smoke" and str(tmp_path) not in json.dumps(run.info)
    assert list(run.metrics.step) == [0, 1, 2, 3] and run.metrics.loss.iloc[0] > 10
    assert list(run.metrics.lr) == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3])
    probes = run.probes
    assert len(probes) == 2 * 2 and set(probes.step) == {1, 3}
    assert (probes.rows == 2 * 2 * 16).all() and (probes.delta_abs > 0).all()
    assert (probes.delta_bias.abs() <= probes.delta_abs).all()
    assert not (tmp_path / ".a.part").exists()


def test_a_seed_run_twice_is_equal_and_arms_share_batches_and_weights(tmp_path):
    a, b = (train(small(policy="LOW"), tmp_path / n) for n in "ab")
    assert a.metrics.equals(b.metrics) and a.probes.equals(b.probes)
    c = train(small(policy="LOW+delta_from=o_fp32"), tmp_path / "c")
    assert c.metrics.loss[0] == a.metrics.loss[0], "same weights, batch and forward"
    assert c.metrics.grad_norm[0] != a.metrics.grad_norm[0]
    d = train(small(policy="LOW", seed=1), tmp_path / "d")
    assert d.metrics.loss[0] != a.metrics.loss[0]


def test_nothing_recorded_is_overwritten(tmp_path):
    train(small(), tmp_path / "a")
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    with pytest.raises(UserError, match="exists"):
        train(small(), tmp_path / "a")
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    (tmp_path / ".b.part").mkdir()
    with pytest.raises(UserError, match="unfinished"):
        train(small(), tmp_path / "b")


def test_a_non_finite_loss_ends_the_run_and_is_kept(tmp_path):
    run = train(small(lr=1e30, warmup=1, steps=40), tmp_path / "a")
    assert run.info["ended"] == "non-finite" and len(run.metrics) < 40
    assert run.explosion.confirmed and run.probes.sigma_q.isna().any()


def test_a_run_that_dies_at_once_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="learning rate"):
        train(small(lr=-1.0), tmp_path / "a")
    assert not any(tmp_path.iterdir())


def test_it_stops_after_an_explosion(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "find_explosion", lambda loss: runs.Explosion(3, True))
    run = train(small(steps=40, stop_after_explosion=6), tmp_path / "a")
    assert run.info["ended"] == "explosion" and len(run.metrics) == 10


@pytest.mark.parametrize(
    "changes,word",
    [
        (dict(policy="LOW+o=bf17"), "field o"),
        (dict(steps=0), "steps=0"),
        (dict(data="data/corpora/nothing"), "nothing"),
        (dict(impl="fast"), "fast"),
    ],
)
def test_user_errors_before_any_work(tmp_path, changes, word):
    with pytest.raises(UserError, match=word):
        train(small(**changes), tmp_path / "a")
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path):
    with pytest.raises(UserError, match="NVIDIA GPU"):
        train(small(device="cuda"), tmp_path / "a")


def test_warm_up_is_linear_then_constant():
    config = PRESETS["gpt2"]
    rates = [learning_rate(config, s) for s in (0, 499, 999, 1000, 6000)]
    assert rates == pytest.approx([2e-6, 1e-3, 2e-3, 2e-3, 2e-3])


CAMPAIGN = """
question: q
predictions: [p]
preset: tiny
train: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 16, batch_size: 2, steps: 2}
arms:
  low: {policy: LOW, seeds: [0]}
  bad: {policy: LOW, lr: -1.0, seeds: [0]}
"""


def test_a_campaign_runs_what_is_missing_and_survives_a_failed_arm(tmp_path):
    file = tmp_path / "campaign.yaml"
    file.write_text(CAMPAIGN)
    result = campaign.run_campaign(file)
    assert result["low-seed0"].startswith("done") and "failed" in result["bad-seed0"]
    assert "learning rate" in (tmp_path / ".logs" / "bad-seed0.txt").read_text()
    again = campaign.run_campaign(file)
    assert again["low-seed0"] == "recorded before" and "failed" in again["bad-seed0"]
    table = runs.load_runs(tmp_path)
    assert list(table.name) == ["low-seed0"] and table.arm[0] == "low"


def test_a_campaign_without_tokens_starts_nothing(tmp_path):
    file = tmp_path / "campaign.yaml"
    file.write_text(CAMPAIGN)
    with pytest.raises(UserError, match="nowhere"):
        campaign.run_campaign(file, data="nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["campaign.yaml"]


def test_the_recorded_campaign_is_the_committed_one():
    path = runs.data_root() / "runs" / "explosion"
    jobs = {job.out.name: job.config for job in campaign.load_campaign(path / "campaign.yaml")}
    table = runs.load_runs("explosion").set_index("name")
    assert set(jobs) == set(table.index)
    for name, config in jobs.items():
        recorded = table.run[name].info["config"]
        for field, value in dataclasses.asdict(config).items():
            if field not in ("data", "device"):
                assert recorded[field] == value, (name, field)
        assert table.run[name].info["data_sha256"] == json.loads(
            (runs.data_root() / "corpora" / "pysource.json").read_text())["sha256"]  # fmt: skip


@pytest.mark.parametrize(
    "text,word",
    [
        (CAMPAIGN.replace("predictions: [p]", ""), "predictions"),
        (CAMPAIGN.replace("tiny", "huge"), "preset"),
        (CAMPAIGN.replace("lr: -1.0", "lrr: 1"), "did you mean lr"),
        (CAMPAIGN.replace("seeds: [0]", "seeds: []"), "no seeds"),
        (CAMPAIGN.replace("arms:", "arm:"), "arms"),
        ("a: [", "YAML"),
    ],
)
def test_campaign_errors(tmp_path, text, word):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=word):
        campaign.load_campaign(tmp_path / "c.yaml")


@pytest.mark.gpu
def test_training_on_the_gpu_is_bitwise_repeatable(tmp_path):
    config = TrainConfig(
        policy="LOW", n_layer=2, n_head=2, n_embd=128, block_size=256, batch_size=4, steps=20,
        warmup=5, probe_every=10, data="data/corpora/smoke.safetensors",
    )  # fmt: skip
    a, b = (train(config, tmp_path / n) for n in "ab")
    assert a.info["impl"] == "triton"
    assert a.metrics.equals(b.metrics) and a.probes.equals(b.probes)
    assert np.isfinite(a.metrics.loss).all()
