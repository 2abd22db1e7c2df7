"""Distances between weights, against scipy and by hand, and a campaign of tiny runs compared."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from lowprec import UserError
from lowprec.records import runs
from lowprec.studies import pairs
from lowprec.training.config import TrainConfig
from lowprec.training.loop import train

SMALL = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2, steps=2, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu",
             weights_at=(0, 1, 2))  # fmt: skip


@pytest.mark.parametrize("make", [
    lambda g: torch.randn(999, generator=g),
    lambda g: torch.randint(-2, 3, (40, 25), generator=g).float(),  # ties
    lambda g: torch.randn(1, generator=g),
    lambda g: torch.randn(500, generator=g) * 1e-20 + 3,
])  # fmt: skip
def test_wasserstein_is_scipys(make):
    g = torch.Generator().manual_seed(0)
    a, b = make(g), make(g)
    wanted = stats.wasserstein_distance(a.flatten().numpy(), b.flatten().numpy())
    assert pairs.wasserstein(a, b) == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    assert pairs.wasserstein(a, a.flip(0)) == 0, "where a value stands does not count"


def test_wasserstein_of_a_shift_is_the_shift():
    a = torch.linspace(-1, 1, 65)
    assert pairs.wasserstein(a, a + 0.5) == 0.5
    with pytest.raises(UserError, match="equally many"):
        pairs.wasserstein(a, a[1:])


def test_distances_by_hand():
    found = pairs.distances(torch.tensor([[0.0, 3.0]]), torch.tensor([[4.0, 0.0]]))
    assert found == pytest.approx(dict(largest=4, mean=3.5, rms=12.5**0.5, wasserstein=0.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    for arm, changes in {"plain": {}, "low": {"policy": "LOW"}}.items():
        for seed in (0, 1):
            config = dataclasses.replace(TrainConfig(**SMALL), seed=seed, **changes)
            train(config, folder / f"{arm}-seed{seed}", arm=arm)
    return folder


@pytest.fixture(scope="module")
def table(folder):
    return pairs.compare(folder, ["low:plain", "plain:plain", "plain:gone"])


def test_pairs_of_a_campaign(folder, table):
    assert table.groupby("pair").apply(
        lambda g: sorted(set(zip(g.seed, g.other_seed, strict=True))), include_groups=False
    ).to_dict() == {"low:plain": [(0, 0), (1, 1)], "plain:plain": [(0, 1)]}
    assert set(table.step) == {0, 1, 2}
    assert set(table.weight) == {"token", "position", "0.qkv", "0.proj", "0.up", "0.down", "all"}
    same = table[table.pair == "low:plain"]
    assert (same[same.step == 0].largest == 0).all(), "one seed, one start"
    late = table[(table.step == 2) | (table.pair == "plain:plain")]
    assert (late.loc[late.weight == "all", "largest"] > 0).all()
    assert (late.wasserstein <= late["mean"] * (1 + 1e-6)).all()
    assert (late["mean"] <= late.rms * (1 + 1e-6)).all() and (late.rms <= late.largest).all()
    a, b = (runs.load_run(folder / f"{arm}-seed1") for arm in ("low", "plain"))
    wq = [pairs.load(run, 2, "cpu")["blocks.0.qkv.weight"].numpy() for run in (a, b)]
    row = table.query("pair == 'low:plain' and seed == 1 and step == 2 and weight == '0.qkv'")
    assert row.largest.item() == np.abs(wq[0] - wq[1]).max()
    gone = wq[1] - pairs.load(b, 0, "cpu")["blocks.0.qkv.weight"].numpy()
    assert row.moved.item() == pytest.approx(np.sqrt((gone.astype(float) ** 2).mean()), rel=1e-6)


def test_a_ratio_is_by_seed_and_over_the_largest_of_two_seeds(table):
    mine = pairs.along(table, "low:plain", "largest").loc[2]
    of_seeds = pairs.along(table, "plain:plain", "largest").loc[2].item()
    found = pairs.over(table, "low:plain", "plain:plain", "largest")
    assert found.index.tolist() == [0, 1]
    assert found.tolist() == (mine / of_seeds).tolist()
    assert (pairs.over(table, "low:plain", "low:plain", "mean") == 1).all()


def test_the_table_on_disk_says_which_runs(folder, capsys):
    pairs.main([str(folder), "low:plain", "--device", "cpu"])
    table = pd.read_parquet(folder / "weights.parquet")
    assert "1 pairs" in capsys.readouterr().out
    with pytest.raises(UserError, match="weights.parquet exists and is never overwritten"):
        pairs.main([str(folder), "plain:gone"])
    shared, own = table.attrs["shared"], table.attrs["runs"]
    assert shared["hardware"] == "CPU" and shared["n_embd"] == 16 and "policy" not in shared
    for run in runs.load_runs(folder).run:
        of_run = own[run.name]
        assert of_run["weights_sha256"] == run.info["weights_sha256"]
        assert (of_run["arm"], of_run["seed"]) == (run.info["arm"], run.seed)
        assert of_run["policy"] == run.info["config"]["policy"] and of_run["skipped"] == 0
        assert of_run["loss"] == pytest.approx(run.metrics.loss.mean())


def test_weights_of_another_run_are_refused(folder):
    run, other = (runs.load_run(folder / f"plain-seed{seed}") for seed in (0, 1))
    broken = dataclasses.replace(run, path=other.path)
    with pytest.raises(UserError, match="not those of the run"):
        pairs.load(broken, 2, "cpu")
    with pytest.raises(UserError, match="no two runs"):
        pairs.compare(folder, ["plain:gone"])


def test_a_damaged_file_of_weights_is_one_sentence(folder, tmp_path):
    run = runs.load_run(folder / "plain-seed0")
    (tmp_path / ".weights").mkdir()
    whole = pairs.kept(run)[2].read_bytes()
    for size in (0, 1000, len(whole) - 100):
        (tmp_path / ".weights/step-2.pt").write_bytes(whole[:size])
        with pytest.raises(UserError, match="step-2.pt holds no weights"):
            pairs.load(dataclasses.replace(run, path=tmp_path), 2, "cpu")
