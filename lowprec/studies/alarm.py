"""The alarm of the probe on trial: captures, half of their rows, young models.

What it reads, and its limits, are in `lowprec.diagnose.measures`.
"""

from __future__ import annotations

import dataclasses
import warnings

import pandas as pd
import torch

from lowprec.attention import huggingface
from lowprec.diagnose import probe
from lowprec.numerics.policy import CLEAN
from lowprec.records.files import data_root
from lowprec.training.data import shards

FIRST_RULE = 0.9
"""Mean key over rms key from which on a head with a large share rang by the first rule."""

SIZES = dict(vocab_size=2048, bos_token_id=0, eos_token_id=0)
KINDS = ("GPT-2", "Llama")


def second_rule(heads: pd.DataFrame) -> pd.Series:
    """Whether each head of a table rang by the rule before today's, of share and mean score."""
    return (heads.share >= probe.SHARE) & (heads.common.abs() >= probe.COMMON)


def read(captures: dict, policy=None) -> pd.DataFrame:
    """The probe's columns for one head of each capture, a row a name.

    policy: of the backward that is judged; by default the capture's own with δ from the stored
    output, so that a twin is judged as if it had read that.
    """
    tables = {}
    for name, capture in captures.items():
        own = policy or capture.policy.replace(delta_from="o")
        tables[name] = probe.probe(capture, policy=own).iloc[0]
    return pd.DataFrame(tables).T.infer_objects()


def first_half(capture):
    """The same capture, with the first half of its rows."""
    rows = capture.tensors["x"].shape[1] // 2
    names = ("x", "q", "k", "v", "o", "do")
    cut = {name: capture.tensors[name].narrow(-2, 0, rows) for name in names}
    return dataclasses.replace(capture, tensors=capture.tensors | cut)


def young(kind: str, seed: int, steps: int, length: int) -> pd.DataFrame:
    """A model of KINDS trained from random weights and probed on the way, a row a probe and head.

    Four layers of four heads, in the Llama two of keys; batches of two sequences of `length` tokens
    in BF16, attention under CLEAN. Probed under FA2 at the start and three times after. Columns of
    the probe, and model, seed, step and first_rule, whether the first rule would ring.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress")  # tqdm would like widgets
        huggingface.register(policy=CLEAN)
    torch.manual_seed(seed)
    model, tables = _fresh(kind, length), []
    model.set_attn_implementation("lowprec")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    smoke = shards.load_tokens(data_root() / "corpora" / "smoke.safetensors")
    for step in range(steps + 1):
        if step % max(steps // 3, 1) == 0:
            table = probe.probe(model, None, "FA2", sequences=2, length=length, seed=seed + 1)
            tables.append(table.assign(model=kind, seed=seed, step=step))
        tokens = shards.batch(smoke, step, seed, 2, length)[0] % SIZES["vocab_size"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    table = pd.concat(tables, ignore_index=True)
    large = table.share >= probe.SHARE
    return table.assign(first_rule=large & (table.key_share >= FIRST_RULE))


def _fresh(kind: str, length: int):
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = SIZES | dict(max_position_embeddings=length)
    if kind == "GPT-2":
        config = transformers.GPT2Config(n_layer=4, n_head=4, n_embd=64, attn_pdrop=0.0, **sizes)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=172, **sizes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)
