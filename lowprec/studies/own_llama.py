"""A Llama of our own while it learns: pairs of its gated layers, sinks, rotary positions, few bits.

Read are the weights that the runs of the campaign `llama20k` kept, all on the same text: the first
windows of the batch that would follow the last step, of the stream the runs learned from. The
models are computed in FP32, with PyTorch's attention, whatever the run rounded.

    python -m lowprec.studies.own_llama data/runs/llama20k
    python -m lowprec.studies.own_llama data/runs/llama20k --captures data/captures/llama20k

The tables, each with arm, seed and step: `pairs` (a row a layer and window), `heads` (a layer, a
head and a window), `costs` (a window and a way of rounding). The captures are of the first run's
last weights and the first window.
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes

from lowprec import UserError, entry
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies import gated, loud, loud_real, rotated
from lowprec.studies.kept import models, unwritten
from lowprec.studies.smollm2 import XZ
from lowprec.training.data import shards as data
from lowprec.training.loop import pick_device

WINDOWS, MOVED = 4, 512
"""Windows that are read, and tokens of those whose attention is moved by `rotated.SHIFT` places."""
TURNS = ("fp32", "qk", "code", "place", "counting")
"""Arms of `rotated.ARMS` whose loss is taken; the change of attention is, of the first three."""
STORED = ("bf16", "current", "channel", "int8", "int8-token", "e2m1", "e2m1-block32")
"""Arms of `loud_real.ARMS` in which the inputs of all down-projections are stored."""
QK_TOKENS, GATED_TOKENS, NORM_TOKENS = 128, 48, 16
"""The first tokens of which captures keep q and k, gate and up, and inputs of norms."""


def observe(model, tokens) -> dict:
    """One forward of a window (T + 1,), in FP32: for each layer q (H, T, D) and k before they turn,
    gate and up (T, channels), the stream after it (T, C), and what norms read, by name."""
    seen = {name: [] for name in ("gate", "up", "stream")} | {"norms": {}}

    def keep_pair(module, given, out):
        for name, half in zip(("gate", "up"), out[0].chunk(2, -1), strict=True):
            seen[name].append(half)

    def keep_norm(name):
        return lambda module, given, out: seen["norms"].update({name: given[0][0]})

    hooks = [model.norm.register_forward_hook(keep_norm("end"))]
    for i, block in enumerate(model.blocks):
        hooks += [
            block.up.register_forward_hook(keep_pair),
            block.register_forward_hook(lambda m, given, out: seen["stream"].append(out[0])),
            block.norm_attn.register_forward_hook(keep_norm(f"attn-{i}")),
            block.norm_mlp.register_forward_hook(keep_norm(f"mlp-{i}")),
        ]
    try:
        heads, loss = rotated.unturned(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return seen | dict(q=[q for q, _ in heads], k=[k for _, k in heads], loss=loss)


@torch.no_grad()
def pairs(model, seen: dict) -> pd.DataFrame:
    """A row a layer: `loud_real.explained`, of |cos| of all pairs the median, the 90th percentile
    (`tail`) and the largest, `aligned` the share of pairs above a half, and of the stream after the
    layer the largest size, its token and the median over features of their largest."""
    rows = []
    for i, block in enumerate(model.blocks):
        g, u = (block.up.weight * block.norm_mlp.weight).chunk(2)
        a, stream = F.silu(seen["gate"][i]) * seen["up"][i], seen["stream"][i].abs()
        cos = gated.cosine(g, u).abs()
        rows.append(
            loud_real.explained(a, g, u)
            | dict(
                layer=i, middle=float(cos.median()), highest=float(cos.max()),
                aligned=float((cos > 0.5).float().mean()), stream=float(stream.max()),
                stream_token=int(stream.max(1).values.argmax()),
                stream_median=float(stream.amax(0).median()),
            )
        )  # fmt: skip
    return pd.DataFrame(rows)


def heads(model, seen: dict) -> pd.DataFrame:
    """A row a layer and head: `sink`, the attention to the first token, mean over the later ones;
    the change of attention as the text moves in `TURNS`' first three, `first` its part at the first
    token with the code's roundings; the mean lengths of q and k."""
    rows, base = [], model.config.rotary_base
    for layer, both in enumerate(zip(seen["q"], seen["k"], strict=True)):
        q, k = (x[:, :MOVED].cpu() for x in both)
        moved = {arm: rotated.moved(q, k, rotated.ARMS[arm], base) for arm in TURNS[:3]}
        rows.append(pd.DataFrame(
            dict(
                layer=layer, head=range(len(q)),
                sink=rotated.weights(q, k, rotated.USUAL, base)[:, 1:, 0].mean(-1),
                first=rotated.share(moved["code"]), q=q.norm(dim=-1).mean(-1),
                k=k.norm(dim=-1).mean(-1).repeat_interleave(len(q) // len(k)),
            )
            | {arm: rotated.change(columns) for arm, columns in moved.items()}
        ))  # fmt: skip
    return pd.concat(rows)


@torch.no_grad()
def costs(model, tokens) -> pd.DataFrame:
    """A row a way of rounding, `TURNS` and `STORED`: the mean loss (nats) of a window (T + 1,), and
    that from token 257 on (`later`)."""

    def row(arm, each):
        return dict(arm=arm, loss=each.mean().item(), later=each[256:].mean().item())

    rows = [row(arm, rotated.losses(model, tokens, rotated.ARMS[arm])) for arm in TURNS]
    for arm in STORED:
        by = loud.storing(loud_real.ARMS[arm])
        hooks = [
            block.down.register_forward_pre_hook(lambda m, given, by=by: by(given[0]))
            for block in model.blocks
        ]
        rows.append(row(arm, rotated.losses(model, tokens)))
        for hook in hooks:
            hook.remove()
    return pd.DataFrame(rows).rename(columns={"arm": "way"})


def grown(folder, tokens, device: str = "cpu", windows: int = WINDOWS):
    """(where, model, text): arm, seed and step of all kept weights, the model, (windows, T + 1)
    tokens. Raises `UserError` for models that are not gated and rotary."""
    for run, step, config, model, _, _ in models(folder, tokens, 1, device, impl="sdpa",
                                                 policy="FA2", layers={}):  # fmt: skip
        if (config.mlp, config.positions) != ("swiglu", "rotary"):
            raise UserError(f"{run.name} has no gated layers or no rotary positions")
        seed = run.seed if config.data_seed is None else config.data_seed
        shape = config.batch_size, config.block_size
        ids, targets = data.batch(tokens, config.steps, seed, *shape, rows=slice(windows))
        text = torch.cat([ids, targets[:, -1:]], 1).to(device)
        yield dict(arm=run.info["arm"], seed=run.seed, step=step), model, text


def measure(folder, tokens, device: str = "cpu", windows: int = WINDOWS) -> dict:
    """The tables `pairs`, `heads` and `costs` of all kept weights in a folder."""
    found = {"pairs": [], "heads": [], "costs": []}
    for where, model, text in grown(folder, tokens, device, windows):
        for i, window in enumerate(text):
            seen = observe(model, window)
            parts = dict(pairs=pairs(model, seen), heads=heads(model, seen),
                         costs=costs(model, window))  # fmt: skip
            for name, table in parts.items():
                found[name].append(table.assign(**where, window=i))
        print(where, flush=True)
    tables = {name: pd.concat(parts, ignore_index=True) for name, parts in found.items()}
    return {name: loud.short(t, 16 if name == "costs" else 10) for name, t in tables.items()}


def capture(folder: Path, out: Path, tokens, device: str = "cpu") -> Path:
    """Write the numbers of a first window before rounding, in BF16: of the layer with the strongest
    sinks q (H, 128, D) and k before they turn, of the one with the loudest channel gate and up
    (48, channels), and of all norms what they read (16, C)."""
    first, path = None, out / "own-llama.safetensors.lzma"
    for where, model, text in grown(folder, tokens, device, 1):
        if first in (None, (where["arm"], where["seed"])):  # weights come by step
            first, last = (where["arm"], where["seed"]), (model, text[0])
    seen = observe(*last)
    at = heads(last[0], seen).groupby("layer").sink.mean().idxmax()
    loudest = pairs(last[0], seen).loudest.argmax()
    kept = {f"{n}-{at}": seen[n][at][:, :QK_TOKENS] for n in "qk"}
    kept |= {f"{n}-{loudest}": seen[n][loudest][:GATED_TOKENS] for n in ("gate", "up")}
    kept |= {f"norm-{n}": x[:NORM_TOKENS] for n, x in seen["norms"].items()}
    content = to_bytes({n: x.bfloat16().cpu().contiguous() for n, x in kept.items()})
    files.make_folder(out)
    packed = lzma.compress(content, lzma.FORMAT_ALONE, filters=XZ)
    files.write_atomic(unwritten(path), lambda file: file.write(packed))
    return path


def main(argv: list[str] | None = None) -> None:
    """Measure the kept weights of a campaign's Llamas, or write captures of the last ones."""
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.own_llama", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="the campaign's folder")
    parser.add_argument("--captures", type=Path, help="write captures there, and no tables")
    parser.add_argument("--data", default="shards/pysource", help="the runs' token shards")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of text that are read")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto is a GPU if there is one")
    args = parser.parse_args(argv)
    tokens, device = data.load_tokens(args.data), pick_device(args.device)
    if args.captures:
        print(capture(args.folder, args.captures, tokens, device))
        return
    outs = {
        name: unwritten(args.folder / f"{name}.parquet") for name in ("pairs", "heads", "costs")
    }
    for name, table in measure(args.folder, tokens, device, args.windows).items():
        write_table(outs[name], table)
        print(f"{outs[name]}: {len(table):,} rows")


if __name__ == "__main__":
    entry(main)
