"""Where rotary positions break: attention of a text that is moved, and the loss, by rounding site.

The change of attention (Wang et al. 2024, Eq. 4). In exact arithmetic attention of rotary positions
depends on distances alone, so a text at places 0, 1, ... has the weights A that it has 16 places
further. With roundings it has not. Column j of a head changes by the sum over rows of |A_ij(0) -
A_ij(16)|. T - j rows see column j; the columns divided by these counts add up to the head's change,
and that of a text is the mean over layers and heads. q and k are those of the model in FP32, so a
site is rounded in one layer, and nothing reaches the next. The share of a column is its part of the
plain sum of columns, which are not divided.

The loss: a site is rounded in all layers, and everything else is FP32.

SmolLM2-135M-Instruct is the model (`lowprec.diagnose.pretrained`). Texts are three files of jinja2
3.1.6 and three pages of this book (`TEXTS`), their first 1,024 tokens, or 512 for the change. A
longer text is their first 4,096. A head with a sink pays more than `SINK` of its attention to the
first token, on average over rows.

The tables are made by `python -m lowprec.studies.rotated data/studies/rotated`, in ten minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import UserError, entry
from lowprec.numerics.rotation import COUNTING, PRESETS, Rotation
from lowprec.studies import dated
from lowprec.studies.bits import cut
from lowprec.studies.smollm2 import text_of
from lowprec.training.config import LLAMA
from lowprec.training.model import GPT, GPTConfig
from lowprec.training.rotary import rotate, rotation, rounded

USUAL = PRESETS["FP32"].replace(rate="fp32", angle="fp32")
"""Nothing rounded beyond what a program in FP32 rounds."""
ARMS = {
    "fp32": USUAL,
    **{name: USUAL.replace(**{name: "bf16"}) for name in Rotation.fields()},
    "code": PRESETS["CODE"],
    "counting": USUAL.replace(**dict.fromkeys(COUNTING, "bf16")),
    "cast": PRESETS["CAST"],
    "place16": USUAL.replace(place="fp16"),
}
"""The rotation of the paper's text is `qk`, where nothing else is rounded."""
EVERYWHERE = ("fp32", "place", "rate", "angle", "counting", "code")
REST, FEW = ("before", "cs", "rot", "qk", "s", "cast"), ("environment", "threats")
"""Arms whose loss is taken on all texts, and others, on some."""
TEXTS = {
    "environment": "jinja2/environment.py", "parser": "jinja2/parser.py",
    "runtime": "jinja2/runtime.py", "threats": "book/threats.md",
    "statements": "book/statements.md", "glossary": "book/glossary.md",
}  # fmt: skip
LONG = {"compiler": "jinja2/compiler.py", "threats": "book/threats.md"}
TOKENS, MOVED, SHIFT = 1024, 512, 16
LATER = 2048
"""The first place of a text that is set further on."""
SINK, PLANTED = 0.5, 100
"""Least attention of a sink; the token that is given the first one's key."""
EVERY = 3
"""Attention is moved in one of so many layers, but where layers are compared."""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def places(fmt: str, until: int) -> int:
    """How many of the positions 0 to until - 1 a format tells apart."""
    return len(set(rounded_places(fmt, range(until))))


def rounded_places(fmt: str, of) -> list[float]:
    """What positions become in a format."""
    return rounded(torch.tensor([*of], dtype=torch.float64), Rotation(place=fmt).place).tolist()


# Attention


def weights(q, k, how: Rotation, base: float, first: int = 0, hidden: int = 0):
    """Weights of causal attention, (H, T, T) float32, of a text that begins at place `first`.

    q (H, T, D), k (heads of keys, T, D): float32, before their rotation. hidden: how many of the
    first keys later rows do not see.
    """
    turned, scale = _turned(q, k, how, base, first), q.shape[-1] ** -0.5
    scores = rounded(scale * (turned[0] @ turned[1].mT), how.s)
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril()
    seen[hidden:, :hidden] = False
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def _turned(q, k, how, base, first):
    table = rotation(q.shape[-2], q.shape[-1], base, how, first)
    q, k = (rotate(t, table, how=how.turning) for t in (q, k))
    return q, k.repeat_interleave(len(q) // len(k), 0)


def moved(q, k, how: Rotation, base: float, by: int = SHIFT, hidden: int = 0, rows: int = 0):
    """How much each column changes as the text moves: (H, T), of rows from `rows` on."""
    here, there = (weights(q, k, how, base, first, hidden) for first in (0, by))
    return (here - there).abs()[:, rows:].sum(1)


def change(columns):
    """The change of each head, (H,), of its columns."""
    return (columns / torch.arange(columns.shape[-1], 0, -1, device=columns.device)).sum(-1)


def share(columns, column: int = 0):
    """The part of a column in the plain sum of columns, (H,)."""
    return columns[:, column] / columns.sum(-1)


def first_scores(q, k, how: Rotation, base: float, by: int = SHIFT):
    """|change of the first key's score| as the text moves, (H, T)."""
    found = []
    for first in (0, by):
        q_turned, k_turned = _turned(q, k, how, base, first)
        found.append(q.shape[-1] ** -0.5 * (q_turned @ k_turned[:, :1].mT)[..., 0])
    return (found[0] - found[1]).abs()


def drawn(x, generator):
    """Vectors with the lengths of x and directions at random."""
    other = torch.randn(x.shape, generator=generator)
    return other * (x.norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True))


# The model


@torch.no_grad()
def take_weights(model: GPT, theirs) -> None:
    """Copy the weights of a transformers Llama whose embeddings are tied."""
    model.token.weight.copy_(theirs.model.embed_tokens.weight)
    model.norm.weight.copy_(theirs.model.norm.weight)
    for ours, layer in zip(model.blocks, theirs.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        rows = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        ours.qkv.weight.copy_(torch.cat(rows))
        ours.proj.weight.copy_(attention.o_proj.weight)
        ours.up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        ours.down.weight.copy_(mlp.down_proj.weight)
        ours.norm_attn.weight.copy_(layer.input_layernorm.weight)
        ours.norm_mlp.weight.copy_(layer.post_attention_layernorm.weight)


@torch.no_grad()
def as_gpt(theirs) -> GPT:
    """A GPT with the weights of a transformers Llama whose embeddings are tied. Attention is
    PyTorch's, in FP32 on FP32 inputs."""
    c = theirs.config
    if c.rope_parameters.get("rope_type", "default") != "default" or c.rms_norm_eps != 1e-5:
        raise UserError("a GPT has plain rotary positions and norms with a constant of 1e-5")
    model = GPT(
        GPTConfig(
            n_layer=c.num_hidden_layers, n_head=c.num_attention_heads, n_embd=c.hidden_size,
            n_kv_head=c.num_key_value_heads, mlp_hidden=c.intermediate_size,
            vocab_size=c.vocab_size, block_size=4096, rotary_base=c.rope_parameters["rope_theta"],
            policy="FA2", impl="sdpa", rotary=str(USUAL), **LLAMA,
        )
    )  # fmt: skip
    take_weights(model, theirs)
    return model


@torch.no_grad()
def losses(model: GPT, tokens, how: Rotation = USUAL, first: int = 0):
    """The loss of each token but the first, (T - 1,), of a text that begins at place `first`."""
    c, length = model.config, len(tokens) - 1
    table = rotation(length, c.rotated, c.rotary_base, how, first)
    policy, impl = ("FA2", "sdpa") if how.s.is_fp32 else (f"ALL_FP32+s={how.s}", "emulate")
    for block in model.blocks:
        block.turning, block.rotation = how.turning, table
        block.config = dataclasses.replace(c, policy=policy, impl=impl)
        block.groups = block.config.groups(0)
    x = model.token(tokens[None, :-1])
    for block in model.blocks:
        x = block(x)
    logits = F.linear(model.norm(x), model.token.weight)[0]
    return F.cross_entropy(logits, tokens[1:], reduction="none")


@torch.no_grad()
def unturned(model: GPT, tokens):
    """q (H, T, D) and k of each layer as attention would read them without positions, and the loss
    of the model as it is."""
    found, c = [], model.config

    def keep(_, inputs, output):
        heads = output[0].unflatten(1, (-1, c.head_dim)).transpose(0, 1)
        q, k, _ = heads.split([c.n_head, c.kv_heads, c.kv_heads])
        found.append((q.contiguous(), k.contiguous()))

    hooks = [block.qkv.register_forward_hook(keep) for block in model.blocks]
    loss = losses(model, tokens)
    for hook in hooks:
        hook.remove()
    return found, loss


# Tables


def _of_losses(model, texts, long) -> pd.DataFrame:
    """Loss by text and arm, in nats: of all tokens, and of those from token 257 on."""
    rows = []

    def add(name, tokens, arm, first=0):
        each = losses(model, tokens, ARMS[arm], first)
        rows.append((name, first, len(each), arm, each.mean().item(), each[256:].mean().item()))

    for name, tokens in texts.items():
        for arm in (*EVERYWHERE, *(REST if name in FEW else ())):
            add(name, tokens, arm)
        for arm in ("fp32", "code", "place16"):
            add(name, tokens, arm, LATER)
        print(name, flush=True)
    for arm in ("fp32", "code", "counting"):
        add("threats", long["threats"], arm)
    columns = ["text", "first", "tokens", "arm", "loss", "later"]
    return pd.DataFrame(rows, columns=columns).astype(dict(loss="float32", later="float32"))


def _of_changes(read, base) -> pd.DataFrame:
    """The change by text and arm, the mean over layers and heads; first: the first column's share,
    of the median head."""
    rows = []
    for name, layers in read.items():
        for arm, how in ARMS.items():
            columns = torch.cat([moved(q, k, how, base) for q, k in layers[::EVERY]])
            rows.append((name, arm, change(columns).mean(), share(columns).nanmedian()))
        print(name, flush=True)
    table = pd.DataFrame(rows, columns=["text", "arm", "change", "first"])
    return table.astype(dict(change="float32", first="float32"))


def _of_heads(read, base) -> pd.DataFrame:
    """By text, layer and head, with the code's roundings: attention to the first token, the first
    column's share; the second one's with the first hidden; whether the column that changes most is
    that of the planted key, the first being hidden, in rows behind it."""
    rows, how = [], ARMS["code"]
    for name, layers in read.items():
        for layer, (q, k) in list(enumerate(layers))[::EVERY]:
            sink = weights(q, k, USUAL, base)[..., 0].mean(-1)
            columns = moved(q, k, how, base)
            second = moved(q, k, how, base, hidden=1)
            second[:, 0] = 0  # the first row sees but itself
            given = k.clone()
            given[:, PLANTED] = k[:, 0]
            planted = moved(q, given, how, base, hidden=1, rows=PLANTED + 1)
            rows.append(pd.DataFrame(dict(
                text=name, layer=layer, head=range(len(q)), sink=sink, first=share(columns),
                second=share(second, 1), follows=planted.argmax(-1) == PLANTED,
            )))  # fmt: skip
    table = pd.concat(rows, ignore_index=True)
    for column in ("sink", "first", "second"):  # three digits, which halves the file
        table[column] = cut(torch.tensor(table[column].to_numpy()), 10, "nearest").numpy()
    return table


def _of_layers(read, read_untrained, base) -> pd.DataFrame:
    """The change with turned q and k rounded, by layer, the mean over `FEW` texts and heads: the
    model's own; `drawn`, directions at random; `untrained`, of a model before training; `short`,
    the model's own with the mean lengths of that one."""
    rows, how = [], ARMS["qk"]
    generator = torch.Generator().manual_seed(0)

    def mean(q, k):
        return change(moved(q, k, how, base)).mean().item()

    for name in FEW:
        for layer, ((q, k), fresh) in enumerate(zip(read[name], read_untrained[name], strict=True)):
            short = [x * (y.norm(dim=-1).mean() / x.norm(dim=-1).mean())
                     for x, y in zip((q, k), fresh, strict=True)]  # fmt: skip
            random = [drawn(x, generator) for x in (q, k)]
            rows.append((layer, mean(q, k), mean(*random), mean(*fresh), mean(*short)))
    columns = ["layer", "own", "drawn", "untrained", "short"]
    return pd.DataFrame(rows, columns=columns).groupby("layer", as_index=False).mean()


def _of_lengths(read, base) -> pd.DataFrame:
    """Mean over layers, heads and rows of the change of the first key's score, by rows."""
    rows = []
    for name, layers in read.items():
        for arm in ("qk", "code", "counting"):
            each = torch.cat([first_scores(q, k, ARMS[arm], base) for q, k in layers]).mean(0)
            rows += [(name, arm, n, each[:n].mean().item()) for n in LENGTHS]
    return pd.DataFrame(rows, columns=["text", "arm", "tokens", "change"])


def measure(shift: int = SHIFT) -> dict[str, pd.DataFrame]:
    """The tables `losses`, `changes`, `heads`, `layers` and `lengths`."""
    from lowprec.diagnose import pretrained

    path = pretrained.real_path()
    model, words = pretrained.load(path)[0], pretrained.tokenizer(path)
    model = as_gpt(model)
    torch.manual_seed(0)
    fresh, base = GPT(model.config), model.config.rotary_base

    def tokens(texts, count):
        found = {}
        for name, where in texts.items():
            text = text_of(where)
            found[name] = torch.tensor(words(text)["input_ids"][: count + 1])
            print(name, hashlib.sha256(text.encode()).hexdigest(), len(found[name]), flush=True)
        return found

    texts, long = tokens(TEXTS, TOKENS), tokens(LONG, LENGTHS[-1])
    read = {n: unturned(model, t[: MOVED + 1])[0] for n, t in texts.items()}
    other = {n: unturned(fresh, t[: MOVED + 1])[0] for n, t in texts.items() if n in FEW}
    found = dict(
        losses=_of_losses(model, texts, long), changes=_of_changes(read, base),
        heads=_of_heads(read, base), layers=_of_layers(read, other, base),
    )  # fmt: skip
    del read, other
    read = {n: unturned(model, t)[0] for n, t in long.items()}
    return found | dict(lengths=_of_lengths(read, base))


# What a page reads in them


def added(losses, arm: str, first: int = 0, tokens: int = TOKENS, column="loss") -> pd.Series:
    """The loss that an arm adds to that in FP32, by text."""
    some = losses[(losses["first"] == first) & (losses.tokens == tokens)]
    wide = some.pivot(index="text", columns="arm", values=column)
    return (wide[arm] - wide.fp32).dropna()


def with_sinks(heads) -> pd.DataFrame:
    """The rows of heads with a sink, by "text, layer, head"."""
    some = heads[heads.sink > SINK]
    names = [f"{h.text}, {h.layer}, {h.head}" for h in some.itertuples()]
    return some.set_index(pd.Index(names))


def follows(q, k, base: float, how: Rotation = ARMS["code"], token: int = PLANTED):
    """Shares of the change in percent, a mean over the heads with a sink: of the first token, the
    second, the one at `token` and the largest of all others, in rows behind it: as the layer is,
    with the first token hidden, and with its key given to `token` as well."""
    sink = weights(q, k, USUAL, base)[..., 0].mean(-1) > SINK
    given = k.clone()
    given[:, token] = k[:, 0]
    rows = {}
    for name, keys, hidden in (
        ("as it is", k, 0), ("first token hidden", k, 1), ("hidden, its key moved", given, 1),
    ):  # fmt: skip
        columns = moved(q, keys, how, base, hidden=hidden, rows=token + 1)[sink]
        part = 100 * columns / columns.sum(-1, keepdim=True)
        named = [0, 1, token]
        other = part.index_fill(-1, torch.tensor(named), 0).amax(-1)
        means = [part[:, i].mean().item() for i in named] + [other.mean().item()]
        rows[name] = means
    columns = ["first", "second", f"token {token + 1}", "largest other"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def apart(arms: dict) -> dict[str, pd.Series]:
    """By arm and seed the mean loss of a run's last 200 steps, less that of "text"."""
    end = {
        name: pd.Series(
            {s: run.metrics.loss.tail(200).mean() for s, run in arm.by_seed.items()}, dtype=float
        )
        for name, arm in arms.items()
    }
    return {name: (each - end["text"]).dropna() for name, each in end.items()}


main = functools.partial(dated.command, "rotated", __doc__, measure, shift=SHIFT)

if __name__ == "__main__":
    entry(main)
