"""What is read in the kept weights of a small Llama."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

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


def test_a_gpt2_is_refused(folder, tmp_path):
    tokens = data.load_tokens(TINY.data)
    usual = dataclasses.replace(PRESETS["tiny"], weights_at=(0,), steps=1, device="cpu",
                                data=TINY.data)  # fmt: skip
    train(usual, tmp_path / "gpt2-seed0")
    with pytest.raises(UserError, match="gpt2-seed0 has no gated layers"):
        own_llama.measure(tmp_path, tokens)


def tables(last: dict) -> dict:
    """Tables of one layer and two windows in which all is 1, but in clean's last step."""
    steps = [0, 500, 2000, 5000, 20000]
    index = pd.MultiIndex.from_product([["clean", "free"], steps, [0, 1]])
    base = index.to_frame(index=False).set_axis(["arm", "step", "window"], axis=1)
    names = ("tail", "highest", "loudest", "quiet", "stream", "stream_median")
    pairs = base.assign(layer=0, token=0, stream_token=0, **dict.fromkeys(names, 1.0))
    heads = base.assign(layer=0, head=0, sink=0.1, qk=1.0)
    costs = pd.concat([base.assign(way=way, loss=1.0, later=1.0)
                       for way in (*own_llama.TURNS, *own_llama.STORED)])  # fmt: skip
    for table in (pairs, heads, costs):
        end = (table.arm == "clean") & (table.step == 20000)
        for name, value in last.items():
            if name in table:
                table.loc[end, name] = value
            elif "way" in table:
                table.loc[end & (table.way == name), ["loss", "later"]] = value
    return dict(pairs=pairs, heads=heads, costs=costs.reset_index(drop=True))


def test_what_pages_ask():
    last = dict(tail=3.0, highest=0.95, loudest=60, stream=19, sink=0.7, qk=6.0, counting=1.5,
                code=0.99, int8=1.25)  # fmt: skip
    pairs, turns = own_llama.of_pairs(found := tables(last)), own_llama.of_turns(found)
    assert (pairs["late"].value, pairs["decay"].value, pairs["decay"].n) == (3, 3, 1)
    assert pairs["aligned"].tolist() == [3] and pairs["end"].tolist() == [0.95]
    assert pairs["grows"].tolist() == [True] * 2 and pairs["early"].tolist() == [False] * 2
    assert pairs["stream"].tolist() == [False] * 2 and pairs["int8"].tolist() == [0.25] * 2
    assert pairs["token"].tolist() == [0, 0] and len(pairs["e4m3"]) == 10
    assert np.isclose(turns["code"].max(), 0.01) and turns["counting"].tolist() == [0.5] * 2
    assert (turns["more"].value, turns["change"].value) == (0.5, 6)
    assert turns["sinks"].to_dict() == {"0, 0": True} and not turns["early"].any()
    shown = own_llama.courses(found).set_index(["arm", "step"]).loc[("clean", 20000)]
    assert (shown.loud, shown.sinks, shown.counting) == (60, 1, 0.5)


@pytest.mark.parametrize("arm", ["clean", "free"])
def test_the_channel_that_grew_has_the_longest_and_most_aligned_pair_of_its_layer(arm):
    end = own_llama.loudest(own_llama.read(files.data_root() / "runs" / "llama20k"), arm)
    assert (len(end), end.layer.unique().tolist()) == (4, [3])
    assert (end.larger == 0).all() and np.allclose(end.cos.abs(), end.highest)
