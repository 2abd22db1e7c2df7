"""Errors of delta in several formats: by hand, part by part, and the table on disk."""

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec import UserError, data
from lowprec.attention import trace
from lowprec.capture import observe
from lowprec.config import TrainConfig
from lowprec.model import GPT
from lowprec.studies import alone, crossed
from lowprec.train import train

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, steps=2, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu",
             weights_at=(2,))  # fmt: skip
SUMS = ["tied", "eps", "eps_abs", "eps_sq", "e_sq"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(crossed, "CHUNK", 4)
    monkeypatch.setattr(crossed, "PART", 2)


@pytest.fixture(scope="module")
def tokens():
    return data.load_tokens(data.SMOKE)


def measured(way, text, targets, factor=1.0):
    torch.manual_seed(0)
    model = GPT(TrainConfig(**SMALL | dict(policy=crossed.WAYS[way]["policy"])).model())
    with torch.no_grad():
        model.blocks[0].down.weight *= factor
    return model, crossed.measure(model, text, targets, crossed.WAYS[way]["amp"])


def test_the_sums_by_hand(tokens):
    text, targets = data.batch(tokens, 0, 3, 4, 16)
    model, found = measured("LOW", text, targets)
    seen = observe(model, text, targets)[1]
    t = trace(seen.q, seen.k, seen.v, seen.do, crossed.WAYS["LOW"]["policy"])
    eps, e = (t.delta_o - t.delta_ref).double(), (t.o - t.o_fp32).double()
    by_hand = dict(eps=eps, eps_abs=eps.abs(), eps_sq=eps**2, e_sq=(e**2).sum(-1), tied=t.ties > 1)
    for name, values in by_hand.items():
        assert found[name].to_numpy() == pytest.approx(values.sum((0, 2)).numpy(), rel=1e-9), name
    assert list(found["head"]) == [0, 1] and (found.rows == 4 * 16).all()


def test_parts_are_consecutive_chunks(tokens):
    text, targets = data.batch(tokens, 0, 3, 16, 16)
    _, whole = measured("LOW", text, targets)
    assert list(whole.part) == [0, 0, 1, 1] and (whole.rows == 8 * 16).all()
    later = [measured("LOW", text[i : i + 4], targets[i : i + 4])[1][SUMS] for i in (8, 12)]
    expected = (later[0] + later[1]).to_numpy()
    assert whole[whole.part == 1][SUMS].to_numpy() == pytest.approx(expected, rel=1e-9)


def test_in_fp16_errors_are_about_an_eighth_whatever_the_scale(tokens, monkeypatch):
    text, targets = data.batch(tokens, 0, 3, 4, 16)
    _, low = measured("LOW", text, targets)
    sizes = []
    for scale in (2.0**12, 2.0**16):
        monkeypatch.setattr(crossed, "LOSS_SCALE", scale)
        _, half = measured("FP16", text, targets)
        sizes.append(half.eps_abs.sum())
        assert 1 / 16 < sizes[-1] / low.eps_abs.sum() < 1 / 4
        assert 1 / 256 < half.e_sq.sum() / low.e_sq.sum() < 1 / 16
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_what_is_not_finite_is_an_error(tokens):
    text, targets = data.batch(tokens, 0, 3, 4, 16)
    with pytest.raises(UserError, match="sequences 0 and on are not finite"):
        measured("FP16", text, targets, factor=1e38)


def test_the_table_on_disk(tokens, tmp_path, capsys):
    for arm, policy in (("a", "LOW"), ("b", "ALL_FP32")):
        train(TrainConfig(**SMALL, seed=3, policy=policy), tmp_path / f"{arm}-seed3", arm=arm)
    options = ["--data", str(data.SMOKE), "--device", "cpu", "--sequences"]
    crossed.main([str(tmp_path), *options, "16"])
    table = pd.read_parquet(tmp_path / "crossed.parquet")
    assert list(table) == [*crossed.COLUMNS, "way"] and set(table.step) == {2}
    rows = table.groupby(["way", "arm"]).size()
    assert dict(rows) == {(way, arm): 4 for way in crossed.WAYS for arm in "ab"}
    assert (table.rows == 8 * 16).all() and (table.eps_abs > 0).all()
    assert "rows of 2 arms" in capsys.readouterr().out
    with pytest.raises(UserError, match="multiple of 8"):
        crossed.compare(tmp_path, tokens, 12)


def test_one_rounding_alone_is_against_attention_in_fp32(tokens, tmp_path, capsys):
    train(TrainConfig(**SMALL, seed=3, policy="ALL_FP32"), tmp_path / "a-seed3", arm="a")
    options = ["--data", str(data.SMOKE), "--device", "cpu", "--sequences"]
    alone.main([str(tmp_path), *options, "8"])
    found = pd.read_parquet(tmp_path / "alone.parquet").groupby("way")[SUMS].sum()
    assert set(found.index) == set(alone.WAYS) and (found.eps_sq > 0).all()
    bits = found.eps_sq[["p=bf16", "p=e8m6", "p=e8m5"]].to_numpy()
    assert (bits[1:] > 2 * bits[:-1]).all(), "each bit less makes about four times the square"
    seen = crossed.table(
        crossed.measure, crossed.COLUMNS, tmp_path, tokens, 8, batch_size=8, layers={},
        **alone.WAYS["p=bf16"],
    )  # fmt: skip
    assert (seen.eps_abs == 0).all(), "beside an output of the same P there is no error"
    assert "rows of 1 arms" in capsys.readouterr().out


def test_an_error_of_p_is_what_rows_of_ds_miss_zero_by(tokens):
    text, targets = data.batch(tokens, 0, 3, 4, 16)
    torch.manual_seed(0)
    model = GPT(TrainConfig(**SMALL | dict(policy="ALL_FP32+p=e8m5")).model())
    found = crossed.measure(model, text, targets, True, exact=True)
    seen = observe(model, text, targets)[1]
    t = trace(seen.q, seen.k, seen.v, seen.do, "ALL_FP32+p=e8m5")
    ds = (t.s - t.lse[..., None]).exp() * (t.dp - t.delta[..., None])
    rows = -ds.double().sum((-1, 0, 2)).numpy()
    assert found.eps.to_numpy() == pytest.approx(rows, rel=1e-3)


def test_a_ratio_of_sums_and_its_interval():
    generator = np.random.default_rng(0)
    drawn = generator.normal([100, 40], [10, 8], (500, 16, 2))
    rows = [
        (seed, part, way, drawn[seed, part, i])
        for seed, part, i in np.ndindex(drawn.shape)
        for way in [("o", "p")[i]]
    ]
    table = pd.DataFrame(rows, columns=["seed", "part", "way", "eps"])
    ratio, half = alone.beside(table, "eps", "o")
    assert ratio.p.to_numpy() == pytest.approx(drawn[..., 1].sum(1) / drawn[..., 0].sum(1))
    assert (ratio.o == 1).all() and half.o.abs().max() < 1e-12
    inside = ((ratio.p - 0.4).abs() < half.p).mean()
    assert 0.88 < inside < 0.98, "a 95 % interval, a little short with 16 parts"


def test_ways_are_separated_if_the_least_of_them_is_above_all_others():
    rows = [(seed, part, way, eps) for seed, all_eps in enumerate([(3, 2, 1), (3, 1, 1), (1, 3, 2)])
            for part in (0, 1) for way, eps in zip("abc", all_eps, strict=True)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["seed", "part", "way", "eps"])
    assert alone.separated(table, "eps", "ab").tolist() == [True, False, False]
    assert alone.separated(table, "eps", ["a"]).tolist() == [True, True, False]
