"""How alike tokens are in kept weights: against the model's own keys, and what is refused."""

import dataclasses

import pandas as pd
import pytest
import torch

from lowprec import UserError
from lowprec.diagnose.directions import head_cosines, mean_cosine
from lowprec.studies import alike
from lowprec.training.config import TrainConfig
from lowprec.training.data import shards as data
from lowprec.training.loop import train
from lowprec.training.model import GPT

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=2, steps=2, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu", policy="LOW",
             weights_at=(0, 2))  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    for arm, changes in {
        "low": {"capture_at": (1,)},
        "qk_norm": {"qk_norm": True},
        "gate": {"gate": True},
    }.items():
        config = dataclasses.replace(TrainConfig(**SMALL), seed=3, **changes)
        train(config, folder / f"{arm}-seed3", arm=arm)
    return folder


@pytest.fixture(scope="module")
def tokens():
    return data.load_tokens(data.SMOKE)


def test_every_run_step_sequence_and_head_has_a_row(folder, tokens):
    table = alike.compare(folder, tokens, sequences=2)
    index = ["arm", "seed", "step", "sequence", "layer", "head"]
    assert not table.duplicated(index).any() and len(table) == 3 * 2 * 2 * 2 * 2
    assert table[["cos_r", "cos_pk", "cos_x"]].abs().max().max() <= 1 + 1e-6
    assert table.k_common.between(0, 1).all()
    start = table[(table.step == 0) & (table.layer == 0)].groupby("arm").cos_x.mean()
    assert start["low"] == pytest.approx(start["qk_norm"]), "one seed, one text, one start"
    keys = table[(table.step == 0) & (table.layer == 0)].groupby("arm").cos_pk.mean()
    assert keys["low"] != pytest.approx(keys["qk_norm"], rel=1e-3), "keys are taken after the norm"
    torch.manual_seed(3)
    text, _ = data.batch(tokens, 0, 3, 2, 16, rows=slice(1, 2))
    first = table[(table.arm == "low") & (table.step == 0) & (table.sequence == 1)]
    wanted = head_cosines(GPT(TrainConfig(**SMALL).model()), text[0])
    assert first.cos_r.to_numpy() == pytest.approx(wanted.cos_r, abs=1e-4), "the run's own batch"


def test_a_head_by_hand(tokens):
    torch.manual_seed(0)
    model = GPT(TrainConfig(**SMALL).model())
    text = torch.from_numpy(tokens.window(0, 16).astype("int64"))
    with torch.no_grad():
        x = model.blocks[0].norm_attn(model.token(text[None]) + model.position.weight[:16])
        q, k, _ = (t[0, 1] for t in model.blocks[0].heads(x))
        scores = (q @ k.mT / 4).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
        a = scores.softmax(1) @ k
    found = head_cosines(model, text).query("layer == 0 and head == 1").iloc[0]
    assert found.cos_r == pytest.approx(mean_cosine(a, x[0]), abs=1e-5)
    assert found.cos_pk == pytest.approx(mean_cosine(a), abs=1e-5)
    assert found.k_common == pytest.approx((k.mean(0).norm() / k.norm() * 4).item(), abs=1e-5)


def test_the_table_on_disk_and_what_is_refused(folder, tokens, tmp_path, capsys):
    alike.main([str(folder), "--data", str(data.SMOKE), "--sequences", "1", "--device", "cpu"])
    assert "of 3 arms" in capsys.readouterr().out
    with pytest.raises(UserError, match="alike.parquet exists and is never overwritten"):
        alike.main([str(folder), "--data", "nothing"])
    assert len(pd.read_parquet(folder / "alike.parquet")) == 3 * 2 * 2 * 2
    with pytest.raises(UserError, match=r"other tokens than .*--data"):
        alike.compare(folder, dataclasses.replace(tokens, sha256="0"), 1)
    plain = dataclasses.replace(TrainConfig(**SMALL), weights_at=())
    train(plain, tmp_path / "low-seed0", arm="low")
    with pytest.raises(UserError, match="kept weights"):
        alike.compare(tmp_path, tokens, 1)
