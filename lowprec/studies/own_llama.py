"""A Llama of our own while it learns: pairs of its gated layers, sinks, rotary positions, few bits.

Read are the weights that the runs of the campaign `llama20k` kept, all on the same text: the first
windows of the batch that would follow the last step, of the stream the runs learned from. The
models are computed in FP32, with PyTorch's attention, whatever the run rounded.

    python -m lowprec.studies.own_llama data/runs/llama20k

The tables, each with arm, seed and step: `pairs` (a row a layer and window), `heads` (a layer, a
head and a window), `costs` (a window and a way of rounding).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import UserError, entry
from lowprec.evidence.claims import Measured
from lowprec.evidence.words import span
from lowprec.records.tables import write_table
from lowprec.studies import gated, loud, loud_real, rotated
from lowprec.studies.kept import models, unwritten
from lowprec.training.data import shards as data
from lowprec.training.loop import pick_device

WINDOWS, MOVED = 4, 512
"""Windows that are read, and tokens of those whose attention is moved by `rotated.SHIFT` places."""
TURNS = ("fp32", "qk", "code", "place", "counting")
"""Arms of `rotated.ARMS` whose loss is taken; the change of attention is, of the first three."""
STORED = ("bf16", "current", "channel", "int8", "int8-token", "e2m1", "e2m1-block32")
"""Arms of `loud_real.ARMS` in which the inputs of all down-projections are stored."""


def observe(model, tokens) -> dict:
    """One forward of a window (T + 1,), in FP32: for each layer q (H, T, D) and k before they turn,
    gate and up (T, channels), and the stream after it (T, C)."""
    seen, hooks = {name: [] for name in ("gate", "up", "stream")}, []

    def keep_pair(module, given, out):
        for name, half in zip(("gate", "up"), out[0].chunk(2, -1), strict=True):
            seen[name].append(half)

    for block in model.blocks:
        hooks += [
            block.up.register_forward_hook(keep_pair),
            block.register_forward_hook(lambda m, given, out: seen["stream"].append(out[0])),
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
        q, k = (x[:, :MOVED] for x in both)
        moved = {arm: rotated.moved(q, k, rotated.ARMS[arm], base) for arm in TURNS[:3]}
        columns = dict(
            sink=rotated.weights(q, k, rotated.USUAL, base)[:, 1:, 0].mean(-1),
            first=rotated.share(moved["code"]), q=q.norm(dim=-1).mean(-1),
            k=k.norm(dim=-1).mean(-1).repeat_interleave(len(q) // len(k)),
        )  # fmt: skip
        columns |= {arm: rotated.change(table) for arm, table in moved.items()}
        table = pd.DataFrame({name: x.cpu() for name, x in columns.items()})
        rows.append(table.assign(layer=layer, head=range(len(q))))
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


# What pages ask of the tables

END, MIDDLE, YOUNG, EARLY = 20_000, 5_000, 2_000, 500
"""Steps that the rules of `llama20k` name; 0 is before the first."""
LOUD, MASSIVE = 50, 20
"""A channel, and a number of the stream, count as large from so many times the usual one on."""


def read(folder) -> dict[str, pd.DataFrame]:
    """The tables of a campaign's folder by name."""
    return {n: pd.read_parquet(Path(folder) / f"{n}.parquet") for n in ("pairs", "heads", "costs")}


def of_pairs(tables: dict) -> dict:
    """What the page on loud channels asks, by the end of its claims' names."""
    pairs = tables["pairs"].set_index(["arm", "step"]).sort_index()
    tail = pairs[pairs.window == 0].groupby(["arm", "step"])["tail"].median()
    last = pairs.loc[("clean", END)]
    loud_, size = _first(pairs, "token", "loudest", "quiet", LOUD), last.layer.nunique()
    massive = _first(pairs, "stream_token", "stream", "stream_median", MASSIVE)
    by_layer = last[last.window == 0].set_index("layer")
    return dict(
        aligned=by_layer["tail"], late=Measured(tail["clean", END] / tail["clean", MIDDLE], size),
        decay=Measured(tail["clean", END] / tail["free", END], size), end=by_layer.highest,
        grows=loud_(END), early=loud_(EARLY), stream=massive(END), e4m3=added(tables, "current"),
        int8=added(tables, "int8", END), token=added(tables, "int8-token", END),
    )  # fmt: skip


def _first(pairs, token: str, largest: str, usual: str, times: float):
    """Of a step in clean, by window, whether in some layer the largest number is at the first token
    and so many times the usual one."""

    def at(step: int) -> pd.Series:
        rows = pairs.loc[("clean", step)]
        found = (rows[token] == 0) & (rows[largest] >= times * rows[usual])
        return found.groupby(rows.window).any()

    return at


def of_turns(tables: dict) -> dict:
    """What the page on rotary positions asks, likewise."""
    heads = tables["heads"].query("arm == 'clean'").set_index("step")
    change = heads.qk.groupby("step").mean()
    sink = heads.groupby(["step", "layer", "head"]).sink.mean() > rotated.SINK
    sinks = {s: sink[s].set_axis([f"{i}, {h}" for i, h in sink[s].index]) for s in (EARLY, END)}
    later = {s: added(tables, "counting", s, "later") for s in (YOUNG, END)}
    return dict(
        code=added(tables, "code").abs(), counting=later[END],
        more=Measured(later[END].mean() - later[YOUNG].mean(), len(later[END])),
        change=Measured(change[END] / change[0], len(heads.loc[END])),
        sinks=sinks[END], early=sinks[EARLY],
    )  # fmt: skip


def added(tables: dict, way: str, step: int | None = None, column: str = "loss") -> pd.Series:
    """The loss that a way of rounding adds in clean, by window, or by "step, window"."""
    costs = tables["costs"].query("arm == 'clean'")
    wide = costs.pivot(index=["step", "window"], columns="way", values=column)
    gap = wide[way] - wide.fp32
    return gap.set_axis([f"{s}, {w}" for s, w in gap.index]) if step is None else gap[step]


def loudest(tables: dict, arm: str, step: int = END) -> pd.DataFrame:
    """Of each window the row of `pairs` whose loudest channel is most `times` the median one."""
    rows = tables["pairs"].query("arm == @arm and step == @step")
    rows = rows.assign(times=rows.loudest / rows.quiet)
    return rows.loc[rows.groupby("window").times.idxmax()].set_index("window")


def told_of_pairs(tables: dict) -> dict:
    """What the page on loud channels says of the last step's, as facts, by window and by arm."""
    pairs, course = tables["pairs"], courses(tables).set_index(["step", "arm"])
    end, young = course.loc[END], course.loc[YOUNG]
    last = pairs[(pairs.step == END) & (pairs.window == 0)]
    high = last.pivot(index="layer", columns="arm", values="highest")
    grew = {arm: loudest(tables, arm) for arm in ("clean", "free")}
    clean = grew["clean"]
    found = dict(
        layer=int(clean.layer.mean()), elsewhere=int((clean.token > 0).sum()),
        at_first=span(clean.times[clean.token == 0], "{:.1f}"),
        higher=int((high.clean > high.free).sum()), young=span(young.aligned),
        tail=span(end.aligned), ratio=end.aligned.clean / end.aligned.free,
        int8=span(end.int8, "{:.3f}"), int8_young=span(young.int8, "{:.3f}"),
        e4m3=f"{added(tables, 'current').max():.3f}",
    )  # fmt: skip
    for arm, rows in grew.items():
        found |= {arm: span(rows.times, "{:.0f}"), f"highest_{arm}": float(high[arm].max())}
        found |= {f"{c}_{arm}": float(rows[c].abs().mean())
                  for c in ("cos", "most", "met", "loudest", "quiet")}  # fmt: skip
    return found


def told_of_turns(tables: dict) -> dict:
    """What the page on rotary positions says, likewise: of clean where no arm is named."""
    clean = tables["heads"].query("arm == 'clean'").groupby("step")[["qk", "q", "k"]].mean()
    paid = tables["heads"].groupby(["arm", "step", "layer", "head"]).sink.mean()
    window = int(loudest(tables, "clean").query("token == 0").index[0])
    there = tables["heads"].query(f"arm == 'clean' and step == @END and window == {window}")
    later = pd.DataFrame({s: added(tables, "counting", s, "later") for s in (YOUNG, END)})
    fell = later.loc[later[END] < later[YOUNG]]
    return dict(
        change=clean.qk[END] / clean.qk[0], change_early=clean.qk[EARLY] / clean.qk[0],
        longer=(clean.q + clean.k)[END] / (clean.q + clean.k)[0], counting=span(later[END]),
        sink=paid["clean", END].max(), sink_early=paid["clean", EARLY].max(),
        sink_free=paid["free", END].max(), sink_loud=there.sink.max(),
        more=len(later) - len(fell), fell=f"{fell[END].mean():.2f} after {fell[YOUNG].mean():.2f}",
    )  # fmt: skip


FORMS = dict(aligned="{:.2f}", loud="{:.1f}", sinks="{:.2f}") | dict.fromkeys(
    ("code", "counting", "current", "int8"), "{:z.4f}"
)
"""How a page shows the columns of `courses`."""


def courses(tables: dict) -> pd.DataFrame:
    """A row an arm and step, medians over windows: 90th percentile of |cos| in the median layer,
    the loudest channel over the median one in the layer where that is largest, share of heads with
    a sink, and what is added in nats by the code's rotation, counting, E4M3 and int8."""
    pairs, keys = tables["pairs"], ["arm", "step"]
    found = pd.DataFrame({"aligned": pairs.groupby(keys)["tail"].median()})
    ratio = (pairs.loudest / pairs.quiet).groupby([pairs.arm, pairs.step, pairs.window]).max()
    found["loud"] = ratio.groupby(keys).median()
    found["sinks"] = (tables["heads"].sink > rotated.SINK).groupby(
        [tables["heads"][key] for key in keys]
    ).mean()  # fmt: skip
    wide = tables["costs"].pivot(index=[*keys, "window"], columns="way", values="loss")
    for way in ("code", "counting", "current", "int8"):
        found[way] = (wide[way] - wide.fp32).groupby(keys).median()
    return found.reset_index()


def main(argv: list[str] | None = None) -> None:
    """Measure the kept weights of a campaign's Llamas."""
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.own_llama", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="the campaign's folder")
    parser.add_argument("--data", default="shards/pysource", help="the runs' token shards")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of text that are read")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto is a GPU if there is one")
    args = parser.parse_args(argv)
    tokens, device = data.load_tokens(args.data), pick_device(args.device)
    outs = {
        name: unwritten(args.folder / f"{name}.parquet") for name in ("pairs", "heads", "costs")
    }
    for name, table in measure(args.folder, tokens, device, args.windows).items():
        write_table(outs[name], table)
        print(f"{outs[name]}: {len(table):,} rows")


if __name__ == "__main__":
    entry(main)
