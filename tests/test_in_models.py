"""Other people's models: how they are timed, and how they are spread over processes and devices."""

import subprocess
import sys

import pytest
import torch

from lowprec.studies import in_models

transformers = pytest.importorskip("transformers")
TINY = dict(num_hidden_layers=2, vocab_size=64, hidden_size=32, intermediate_size=48)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
SMALL = dict(size=2, seqlen=24)


def test_a_padded_batch_hides_ends_and_their_labels():
    model = in_models.build("Llama", "sdpa", "cpu", **TINY, **HEADS)
    whole, padded = (in_models.batch(model, x, 4, 16) for x in (False, True))
    assert torch.equal(whole["input_ids"], padded["input_ids"])
    assert padded["attention_mask"].sum(1).tolist() == [16, 14, 13, 12]
    assert ((padded["labels"] == -100) == (padded["attention_mask"] == 0)).all()


def test_both_attentions_train_generate_and_are_watched():
    how = dict(device="cpu", **TINY, **HEADS)
    rows = [
        in_models.trained("Llama", a, rounds=1, steps=1, compiled=False, **SMALL, **how)
        for a in in_models.ATTENTIONS
    ]
    rows += in_models.generated("Llama", size=2, prompt=12, tokens=3, rounds=1, **how)
    assert [row["attention"] for row in rows] == 2 * list(in_models.ATTENTIONS)
    assert rows[0]["parameters"] == rows[1]["parameters"] > 10_000
    assert all(row["least"] == row["most"] > 0 for row in rows)
    watched = in_models.monitored("Llama", 1, **SMALL, **how)
    assert watched["watched"] > 0 and watched["other"] > 0


SHARDED = """
import os, sys, torch, torch.distributed as dist, transformers
from torch.distributed.fsdp import fully_shard
from lowprec.studies import in_models

rank, device = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(rank)
model = in_models.build("Llama", "lowprec", device, num_hidden_layers=2, vocab_size=64,
                        hidden_size=32, intermediate_size=48, num_attention_heads=4,
                        num_key_value_heads=2)
def rows(which):
    g = torch.Generator().manual_seed(1)
    return torch.randint(3, 64, (4, 24), generator=g)[which].to(device)
def losses(model, which):
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(input_ids=rows(which), labels=rows(which), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)
twin = in_models.build("Llama", "lowprec", device, **{k: getattr(model.config, k) for k in (
    "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads")})
wanted = losses(twin, slice(None))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
got = losses(model, slice(2 * rank, 2 * rank + 2))
dist.all_reduce(got)
torch.testing.assert_close(got / 2, wanted, rtol=2e-3, atol=2e-3)
assert wanted[-1] < wanted[0] - 0.01, wanted
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_two_processes_with_sharded_weights_train_as_one(device, tmp_path):
    """fully_shard, each process with half of the sequences."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
         script, device],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_a_model_over_two_devices():
    """Its second layer on the second GPU: the numbers of one GPU, bit by bit."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    accelerate = pytest.importorskip("accelerate")
    found = []
    for devices in (1, 2):
        model = in_models.build("Llama", "lowprec", "cuda:0", **TINY, **HEADS)
        inputs = in_models.batch(model, True, **SMALL)
        if devices == 2:
            parts = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0,
                     "model.layers.1": 1, "model.norm": 1, "lm_head": 1}  # fmt: skip
            model = accelerate.dispatch_model(model, parts, main_device=0)
            where = {p.device.index for p in model.parameters()}
            assert where == {0, 1}
        with torch.autocast("cuda", torch.bfloat16):
            model(**inputs, use_cache=False).loss.backward()
        found.append([p.grad.cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
