"""What is read in the kept weights of a small Llama."""

import dataclasses
import lzma

import pandas as pd
import pytest
import torch
from safetensors.torch import load as from_bytes

from lowprec import UserError
from lowprec.records import files
from lowprec.studies import own_llama
from lowprec.studies.kept import models
from lowprec.training.config import LLAMA, PRESETS
from lowprec.training.data import shards as data
from lowprec.training.loop import train

TINY = dataclasses.replace(
    PRESETS["tiny"], **LLAMA, steps=4, weights_at=(4,), policy="ALL_FP32", device="cpu",
    data=str(files.data_root() / "corpora/smoke.safetensors"), lr=0.1, warmup=0, block_size=300,
    batch_size=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    train(TINY, folder / "clean-seed0", "clean")
    return folder


def test_tables(folder):
    tokens = data.load_tokens(TINY.data)
    words = [str(folder), "--data", TINY.data, "--device", "cpu", "--windows", "1"]
    own_llama.main(words)
    found = {n: pd.read_parquet(folder / f"{n}.parquet") for n in ("pairs", "heads", "costs")}
    keys = {"arm", "seed", "step", "window"}
    assert [len(t) for t in found.values()] == [2, 4, 12]
    assert all(keys <= set(t) and not t.isna().any().any() for t in found.values())
    *_, (run, step, config, model, *_) = models(folder, tokens, 1, "cpu")
    ids, targets = data.batch(tokens, 4, 0, 1, 300, rows=slice(1))
    block = model.blocks[1]
    with torch.no_grad():
        loss = model(ids, targets).item()
        g, u = block.up.weight.split(config.model().hidden)
        cos = torch.cosine_similarity(g * block.norm_mlp.weight, u * block.norm_mlp.weight).abs()
    costs = found["costs"].set_index("way").loss
    assert costs["fp32"] == pytest.approx(loss, abs=2e-4)
    assert costs["e2m1"] != costs["fp32"] and costs["counting"] != costs["fp32"]
    row = found["pairs"].query("layer == 1").iloc[0]
    assert row.highest == pytest.approx(cos.max().item(), rel=1e-3)
    assert row["tail"] == pytest.approx(cos.quantile(0.9).item(), rel=1e-3)
    changes = found["heads"][["fp32", "qk", "code"]].median()
    assert changes.fp32 < changes.qk and changes.fp32 < changes.code
    with pytest.raises(UserError, match="never overwritten"):
        own_llama.main(words)


def test_captures_are_what_the_model_reads(folder, tmp_path):
    tokens = data.load_tokens(TINY.data)
    kept = from_bytes(lzma.decompress(own_llama.capture(folder, tmp_path, tokens).read_bytes()))
    *_, (_, _, _, model, *_) = models(folder, tokens, 1, "cpu")
    ids, _ = data.batch(tokens, 4, 0, 1, 300, rows=slice(1))
    with torch.no_grad():
        x = model.token(ids)
        q, k, _ = model.blocks[0].qkv(model.blocks[0].norm_attn(x))[0].split(64, 1)
    assert torch.equal(kept["norm-attn-0"], x[0, :16].bfloat16())
    if "q-0" in kept:
        wanted = q[:128].unflatten(1, (2, 32)).transpose(0, 1)
        torch.testing.assert_close(kept["q-0"].float(), wanted, rtol=2**-7, atol=1e-6)
    assert len(kept) == 2 + 2 + 2 * 2 + 1


def test_a_gpt2_is_refused(folder, tmp_path):
    tokens = data.load_tokens(TINY.data)
    usual = dataclasses.replace(PRESETS["tiny"], weights_at=(0,), steps=1, device="cpu",
                                data=TINY.data)  # fmt: skip
    train(usual, tmp_path / "gpt2-seed0")
    with pytest.raises(UserError, match="gpt2-seed0 has no gated layers"):
        own_llama.measure(tmp_path, tokens)
