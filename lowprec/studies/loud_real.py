"""Loud channels of a pretrained Llama: which pairs are loud, and what storing them costs.

A layer's MLP reads x = gain * z with |z| = sqrt(width) for every token, as its norm is an RMS norm.
So the bound of `lowprec.studies.gated` is the same for all tokens, and a channel's largest |a| is
its bound times the share of it that some token reaches: how well the token meets the pair.

The record of SmolLM2-135M, of `lowprec.diagnose.pretrained`, is made by

    python -m lowprec.studies.loud_real data/studies/loud TEXT ...

from the first `TOKENS` tokens of each text file: `real-layers.parquet` with a row a layer and text,
`real-losses.parquet` with a row a way of storing and text, and `real.json`, with the sha256 of each
text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import entry
from lowprec.numerics.scaling import Cast, largest, scaled
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies import gated
from lowprec.studies.loud import E4, ranked, short, storing
from lowprec.studies.mixed_runs import new_record, write_about

TOKENS = 512
ARMS = {
    "bf16": "bf16",
    "current": f"{E4}@tensor",
    "token": f"{E4}@token",
    "channel": f"{E4}@channel",
    "int8": "int8@tensor",
    "int8-token": "int8@token",
    "int8-channel": "int8@channel",
    "e2m1": "e2m1@tensor",
    "e2m1-token": "e2m1@token",
    "e2m1-channel": "e2m1@channel",
    "e2m1-block32": "e2m1@block32",
    "e2m1-random": "e2m1:stochastic@tensor",
}
"""What the input of every down-projection is stored in, by arm."""
BUT_FIRST = ("int8", "e2m1")
"""Arms that are tried again with the first token, the loud one, left out of cast and scale."""


def _stored(name: str):
    """What stores a (1, tokens, channels) in an arm: one of `ARMS`, one with "-but-first", or
    "stale": E4M3 with the largest number of all tokens but the first, as a delayed scale has it
    when the loud token returns."""
    base, but_first = name.removesuffix("-but-first"), name.endswith("-but-first")
    if name == "stale":
        cast = Cast.parse(ARMS["current"])
        return lambda a: scaled(a, cast, top=largest(a[:, 1:], cast))
    by = storing(ARMS[base], torch.Generator().manual_seed(0))
    return (lambda a: torch.cat([a[:, :1], by(a[:, 1:])], 1)) if but_first else by


@contextlib.contextmanager
def _hooked(model, kind: str, hook):
    """`hook(layer, inputs)` before each layer's projection `kind`; what it returns is read."""
    handles = [
        getattr(block.mlp, kind).register_forward_pre_hook(
            lambda _, inputs, i=i: hook(i, inputs[0])
        )
        for i, block in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def token_losses(model, tokens, arm: str | None = None) -> torch.Tensor:
    """Cross-entropy of each token but the first (nats), every down-projection's input stored by an
    arm. model: a LlamaForCausalLM; tokens: (n,) int64."""
    by = _stored(arm) if arm else None
    with _hooked(model, "down_proj", lambda i, a: by(a) if by else None):
        logits = model(tokens[None]).logits[0, :-1]
    return F.cross_entropy(logits, tokens[1:], reduction="none")


@torch.no_grad()
def inputs_of(model, tokens) -> list[torch.Tensor]:
    """What each layer's down-projection reads, (tokens, channels)."""
    kept = {}
    with _hooked(model, "down_proj", lambda i, a: kept.update({i: a[0]})):
        model(tokens[None])
    return [kept[i] for i in range(len(kept))]


@torch.no_grad()
def pairs(model, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of a layer with the norm's gain in them, (channels, width)."""
    block = model.model.layers[layer]
    gain = block.post_attention_layernorm.weight
    return block.mlp.gate_proj.weight * gain, block.mlp.up_proj.weight * gain


def explained(a, g, u) -> dict:
    """How loud the channels of a layer are and why, a row of `layers`.

    a: (tokens, channels) read by the down-projection; g, u: (channels, width), gain included.
    `loudest` and `quiet` are the largest and the median of max |a| over tokens, `token` is where
    the loudest is. `most` is its bound over the median one, `larger` the share of channels with a
    larger |g| |u|, `cos` its cosine and `met` the share of its bound; `met_quiet` is the median
    share. `rank_norms` and `rank_cos` are rank correlations of max |a| over channels with |g| |u|
    and |cos|; `tail` is the 90th percentile of |cos|.
    """
    top, where = a.abs().max(0)
    cos, norms = gated.cosine(g, u), g.norm(dim=1) * u.norm(dim=1)
    most = gated.bound(g, u, g.shape[1] ** 0.5)
    met = top / most
    loudest = int(top.argmax())
    return {
        "loudest": float(top[loudest]), "quiet": float(top.median()),
        "token": int(where[loudest]), "most": float(most[loudest] / most.median()),
        "larger": float((norms > norms[loudest]).float().mean()),
        "cos": float(cos[loudest]), "met": float(met[loudest]), "met_quiet": float(met.median()),
        "rank_norms": float(ranked(top, norms)), "rank_cos": float(ranked(top, cos.abs())),
        "tail": float(cos.abs().quantile(0.9)),
    }  # fmt: skip


def layers(model, tokens) -> pd.DataFrame:
    """`explained` of every layer."""
    rows = [explained(a, *pairs(model, i)) for i, a in enumerate(inputs_of(model, tokens))]
    return pd.DataFrame(rows).assign(layer=range(len(rows)))


def losses(model, tokens) -> pd.DataFrame:
    """Mean loss of a text by arm, the first of them "fp32"."""
    arms = [None, *ARMS, "stale", *(f"{arm}-but-first" for arm in BUT_FIRST)]
    found = {arm or "fp32": float(token_losses(model, tokens, arm).mean()) for arm in arms}
    return pd.DataFrame({"arm": found.keys(), "loss": found.values()})


def zeros(a, text: str) -> float:
    """The share of non-zero values of a (tokens, channels) that are zero as stored."""
    there = a != 0
    return float(((storing(text)(a) == 0) & there).sum() / there.sum())


def returned(a, text: str, gap: int, size=16) -> float:
    """The largest |a| as stored over itself, where the first `size` tokens, with it, are stored,
    then the next ones `gap` times, then the first again. a: (tokens, channels)."""
    by, first, rest = storing(text), a[:size], a[size : 2 * size]
    by(first)
    for _ in range(gap):
        by(rest)
    at = first.abs().argmax()
    return float(by(first).flatten()[at] / first.flatten()[at])


WAYS = {
    "E4M3": f"{E4}@tensor",
    "int8": "int8@tensor",
    "int8, a token": "int8@token",
    "int8, a channel": "int8@channel",
    "E2M1": "e2m1@tensor",
    "E2M1, for 32": "e2m1@block32",
}
HISTORIES = {
    "current": "",
    "history 16": ",delayed16",
    "16, power of two": ",pow2,delayed16",
    "history 1,024": ",delayed1024",
}


def zeros_by(products) -> pd.DataFrame:
    """`zeros` in percent, a row a way of storing, a column a layer; products: {layer: a}."""
    columns = {
        f"layer {layer}": {way: 100 * zeros(a, text) for way, text in WAYS.items()}
        for layer, a in products.items()
    }
    return pd.DataFrame(columns)


def returned_by(a, gaps=(8, 24, 1040)) -> pd.DataFrame:
    """`returned` in E4M3 by `HISTORIES` and gaps, over every sixteenth channel, the loudest too."""
    some = a[:, int(a.abs().amax(0).argmax()) % 16 :: 16]
    rows = [
        (scale, *(returned(some, f"{E4}@tensor{text}", gap) for gap in gaps))
        for scale, text in HISTORIES.items()
    ]
    return pd.DataFrame(rows, columns=["scale", *(f"after {gap:,}" for gap in gaps)])


# Records


@dataclass(frozen=True)
class Real:
    """What was measured on the pretrained model, with a column `text` in both tables."""

    about: dict
    layers: pd.DataFrame
    losses: pd.DataFrame

    def cost(self, arm: str) -> pd.Series:
        """Loss less that of FP32, by text (nats)."""
        by = self.losses.pivot(index="text", columns="arm", values="loss")
        return by[arm] - by["fp32"]


def read(folder=None) -> Real:
    """The record of SmolLM2."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "loud"
    tables = (pd.read_parquet(folder / f"real-{name}.parquet") for name in ("layers", "losses"))
    return Real(json.loads((folder / "real.json").read_text()), *tables)


def record(folder, texts) -> None:
    """Measure SmolLM2 on texts; write the record into `folder`."""
    from lowprec.diagnose import pretrained

    folder = Path(folder)
    about = new_record(folder, "real", "cpu", "loud-real")
    path = pretrained.real_path()
    model, words = pretrained.load(path)
    read_text, found = pretrained.tokenizer(path), {"layers": [], "losses": []}
    about |= {
        "weights": words.replace(str(path), path.name),
        "sha256": files.sha256(path),
        "texts": {},
    }
    for text in map(Path, texts):
        ids = read_text(text.read_text())["input_ids"][:TOKENS]
        about["texts"][text.name] = files.sha256(text)
        for name, measure in (("layers", layers), ("losses", losses)):
            table = measure(model, torch.tensor(ids)).assign(text=text.name)
            found[name].append(table)
        print(found["losses"][-1].to_string(), flush=True)
    for name, tables in found.items():
        table = pd.concat(tables, ignore_index=True)
        write_table(folder / f"real-{name}.parquet", short(table, 16 if name == "losses" else 10))
    write_about(folder, "real", about)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lowprec.studies.loud_real")
    parser.add_argument("folder", type=Path, help="where the record goes")
    parser.add_argument("texts", nargs="+", type=Path)
    args = parser.parse_args()
    record(args.folder, args.texts)


if __name__ == "__main__":
    entry(main)
