"""The largest numbers of a forward pass: by hand, where FP16 has no room, and the table on disk."""

import pandas as pd
import pytest
import torch

from lowprec.studies import overflow
from lowprec.training.config import TrainConfig
from lowprec.training.data import shards as data
from lowprec.training.loop import train
from lowprec.training.model import GPT, autocast

FP16 = "ALL_FP32+s=fp16"
SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=2, steps=2, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu", policy=FP16,
             amp="fp16", weights_at=(0, 2))  # fmt: skip
PLACES = ["norm_attn", "qkv", "qk", "proj", "norm_mlp", "up", "down"]


@pytest.fixture(scope="module")
def tokens():
    return data.load_tokens(data.SMOKE)


def found_in(tokens, factor=1, policy=FP16):
    torch.manual_seed(0)
    model = GPT(TrainConfig(**SMALL | dict(policy=policy)).model())
    with torch.no_grad():
        model.blocks[1].qkv.weight[:64] *= factor
    text, targets = data.batch(tokens, 0, 3, 2, 16)
    return model, text, overflow.largest(model, text, targets, "fp16").set_index("place")


def test_places_come_in_the_order_of_the_forward_pass(tokens):
    _, _, found = found_in(tokens)
    blocks = [f"blocks.{i}.{name}" for i in (0, 1) for name in PLACES]
    assert list(found.index) == ["token", *blocks, "norm", "loss"]
    assert (found.lost == 0).all() and (found.largest > 0).all()


def test_products_of_queries_and_keys_by_hand(tokens):
    model, text, found = found_in(tokens, 20)
    with torch.no_grad(), autocast("cpu", "fp16"):
        x = model.blocks[0](model.token(text) + model.position.weight[:16])
        q, k, _ = (t.float() for t in model.blocks[1].heads(model.blocks[1].norm_attn(x)))
    pairs = [(i, j) for i in range(16) for j in range(i + 1)]
    heads = zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)
    size = max(abs(float(a[i] @ b[j])) for a, b in heads for i, j in pairs)
    assert found.largest["blocks.1.qk"] == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("policy,lost", [(FP16, True), ("ALL_FP32", False)])
def test_products_beyond_fp16_are_the_first_to_go(tokens, policy, lost):
    _, _, found = found_in(tokens, 3000, policy)
    gone = list(found.index[found.lost > 0])
    assert gone[:1] == (["blocks.1.qk"] if lost else []), "q and k themselves have room"
    assert ("loss" in gone) == lost and found.largest["blocks.1.qkv"] < 65504


def test_the_table_on_disk(tokens, tmp_path, capsys):
    train(TrainConfig(**SMALL, seed=3), tmp_path / "a-seed3", arm="a")
    options = ["--data", str(data.SMOKE), "--sequences", "1", "--device", "cpu"]
    overflow.main([str(tmp_path), *options])
    table = pd.read_parquet(tmp_path / "overflow.parquet")
    assert list(table) == list(overflow.COLUMNS) and set(table.step) == {0, 2}
    assert "rows of 1 arms" in capsys.readouterr().out
