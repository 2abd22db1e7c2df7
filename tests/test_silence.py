"""Rows without output in kept weights: against scores by hand, and what is refused."""

import dataclasses

import pandas as pd
import pytest
import torch

from lowprec import UserError
from lowprec.studies import silence
from lowprec.training.config import TrainConfig
from lowprec.training.data import shards as data
from lowprec.training.loop import train
from lowprec.training.model import GPT

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=2, steps=2, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu", policy="LOW",
             weights_at=(0, 2))  # fmt: skip
MUTED = "LOW+shift=mute(amplitude=0,tol=1e6)+l_floor=1e-10"


@pytest.fixture(scope="module")
def tokens():
    return data.load_tokens(data.SMOKE)


def model_and_batch(tokens, policy):
    torch.manual_seed(0)
    model = GPT(TrainConfig(**SMALL | dict(policy=policy)).model())
    return model, *data.batch(tokens, 0, 3, 2, 16)


def test_rows_are_lost_where_the_policy_silences_them(tokens):
    model, text, targets = model_and_batch(tokens, MUTED)
    found = silence.count(model, text, targets).set_index(["layer", "head"])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        x = model.blocks[0].norm_attn(model.token(text) + model.position.weight[:16])
        q, k, _ = (t.double() for t in model.blocks[0].heads(x))
    scores = (q @ k.mT / 4).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    silent = scores.amax(-1)[:, :, 1:] > 0
    assert (found.rows == 2 * 16).all() and silent.any() and not silent.all()
    for head in (0, 1):
        assert found.lost[0, head] == silent[:, head].sum(), "the first row sees one key"
    assert (found.tied_lost <= found.lost).all() and (found.tied_lost <= found.tied).all()


def test_without_a_floor_nothing_is_lost(tokens):
    model, text, targets = model_and_batch(tokens, "LOW")
    found = silence.count(model, text, targets)
    assert (found.lost == 0).all() and (found[["o", "do", "eps"]] > 0).all(axis=None)
    alone, _ = model_and_batch(tokens, MUTED)[:2]
    muted = silence.count(alone, text, targets)
    assert (muted.o < found.o)[:2].all(), "the same weights and the same q, k, v in the first layer"


@pytest.mark.parametrize("factor,lost", [(1, 0), (300, 30)])
def test_ties_with_large_scores_lose_their_output(tokens, factor, lost):
    model, text, targets = model_and_batch(tokens, "LOW+shift=beta(beta=2)+l_floor=1e-10")
    with torch.no_grad():
        model.position.weight.zero_()  # of one token repeated all scores of a row are equal
        model.blocks[0].qkv.weight[:64] *= factor
    found = silence.count(model, torch.full_like(text, 7), targets).query("layer == 0")
    assert (found.tied == 30).all(), "all rows but the first of each sequence"
    assert (found.lost == lost).all() and (found.tied_lost == lost).all()


def test_the_table_on_disk_and_what_is_refused(tokens, tmp_path, capsys):
    for arm, policy in (("low", "LOW"), ("muted", MUTED)):
        config = TrainConfig(**SMALL | dict(policy=policy, seed=3))
        train(config, tmp_path / f"{arm}-seed3", arm=arm)
    options = ["--data", str(data.SMOKE), "--sequences", "1", "--device", "cpu"]
    silence.main([str(tmp_path), *options])
    assert "of 2 arms" in capsys.readouterr().out
    table = pd.read_parquet(tmp_path / "silence.parquet")
    assert len(table) == 2 * 2 * 2 * 2 and (table.rows == 16).all()
    lost = table.groupby("arm").lost.sum()
    assert lost["low"] == 0 < lost["muted"]
    with pytest.raises(UserError, match="other tokens"):
        silence.compare(tmp_path, dataclasses.replace(tokens, sha256="0"), 1)
