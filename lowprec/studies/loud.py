"""One loud channel: what the input of a SwiGLU's down-projection is stored in, and what that costs.

Two small models with SwiGLU, `images` and `language`, train in FP32 first. Then one channel a layer
is made louder by a power of two, its weights in the down-projection smaller by as much, and the
training goes on with that input stored in few bits:

    steady      the loudest channel is made 2^`octaves` louder; it is loud in every batch
    returns     a pair beside the others reads only a mark in the corner of an image, which then has
                to be called 0 whatever it shows. Marked images come every `PERIOD` steps, so the
                loud channel is silent in between

Powers of two change no bit in FP32, forward or backward, and Adam's steps are those of the weights
before the change: what differs is the storing alone. The gradient passes it unchanged.

The record is made by

    python -m lowprec.studies.loud data/studies/loud images     (so are returns, language, decay)

in minutes of a core. It holds how each run ended (`images.parquet`) and where it was made
(`images.json`). `decay` follows the cosines of pairs under weight decay, in both models.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import UserError, entry
from lowprec.evidence.claims import Measured
from lowprec.numerics.formats import round_to
from lowprec.numerics.scaling import Cast, Caster
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies import gated
from lowprec.studies.deviation import Estimate, estimate
from lowprec.studies.mixed import Optimiser
from lowprec.studies.mixed_runs import command, losses, new_record, write_about
from lowprec.studies.small import Digits, Text

PERIOD = 24
"""Steps from one batch with marked images to the next."""
MARKED = 16
"""Marked images of such a batch, of 64."""
E4 = "e4m3_saturate"
ARMS = {
    "bf16": "bf16",
    "current": f"{E4}@tensor",
    "delayed16": f"{E4}@tensor,delayed16",
    "delayed64": f"{E4}@tensor,delayed64",
    "delayed16-pow2": f"{E4}@tensor,pow2,delayed16",
    "delayed16-random": f"{E4}:stochastic@tensor,delayed16",
    "smooth": f"{E4}@tensor,delayed16",
    "smooth-token": f"{E4}@tensor,delayed16",
    "token": f"{E4}@token",
    "channel": f"{E4}@channel",
    "block32": f"{E4}@block32",
    "random": f"{E4}:stochastic@tensor",
    "e2m1": "e2m1@tensor",
    "e2m1-random": "e2m1:stochastic@tensor",
    "e2m1-token": "e2m1@token",
    "e2m1-channel": "e2m1@channel",
    "e2m1-block32": "e2m1@block32",
    "e2m1-delayed16": "e2m1@tensor,delayed16",
    "int8": "int8@tensor",
    "int8-token": "int8@token",
    "int8-channel": "int8@channel",
}
"""What the input is stored in, by arm. delayed16 takes the scale from the 16 casts before. smooth
divides the up-projection by its largest |u|, of a channel or of a token, before the cast and
multiplies after it: Smooth-SwiGLU as reported, and as released."""
DIVIDES = {"smooth": -2, "smooth-token": -1}
STEADY = {
    0: ("current", "e2m1", "int8"),
    8: ("bf16", "current", "delayed16", "e2m1", "e2m1-token", "e2m1-channel", "e2m1-block32",
        "e2m1-random", "int8", "int8-token", "int8-channel"),
    12: ("current",),
    16: ("bf16", "current", "token", "channel", "block32", "smooth", "random"),
    20: ("current",),
}  # fmt: skip
"""Arms by octaves that the loudest channel is raised."""
RETURNS = {
    8: ("bf16", "current", "delayed16", "delayed64", "delayed16-pow2", "delayed16-random",
        "smooth", "smooth-token", "token", "channel", "block32", "e2m1", "e2m1-delayed16"),
}  # fmt: skip
DECAYS = (0.0, 0.1, 1.0)


class Integers:
    """int8: whole numbers up to 127 times max|x| / 127 of the tensor, the token or the channel."""

    def __init__(self, group: str):
        self.dims = {"tensor": (-2, -1), "token": (-1,), "channel": (-2,)}[group]

    def __call__(self, x):
        scale = x.abs().amax(self.dims, keepdim=True) / 127
        return torch.where(scale > 0, (x / scale).round() * scale, x)


def storing(text: str, generator=None):
    """What stores x (..., rows, columns) as a cast's text says, "int8@GROUP" too."""
    if text.startswith("int8@"):
        return Integers(text.removeprefix("int8@"))
    return Caster(Cast.parse(text), generator)


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, by):
        return by(a)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Products:
    """Plain products, and the input of a down-projection as it is."""

    def __call__(self, a, b, site=None):
        return a @ b

    def stored(self, layer, gate, up):
        """What the down-projection of a layer reads; gate, up: (seeds, rows, channels)."""
        return F.silu(gate) * up


class Looking(Products):
    """The same; keeps the largest |a| of each channel of the last call, by layer."""

    def __init__(self):
        self.largest = {}

    def stored(self, layer, gate, up):
        a = super().stored(layer, gate, up)
        self.largest[layer] = a.detach().abs().amax(1, keepdim=True)
        return a


class Storing(Products):
    """Stores each layer's input by an arm, with channels made `louder`: {layer: (seeds, 1,
    channels)}."""

    def __init__(self, arm: str, louder):
        self.arm, self.louder = arm, louder
        generator = torch.Generator().manual_seed(0)
        self.casts = {layer: storing(ARMS[arm], generator) for layer in louder}

    def stored(self, layer, gate, up):
        factor, cast = self.louder[layer], self.casts[layer]
        if self.arm in DIVIDES:
            top = (up.detach() * factor).abs().amax(DIVIDES[self.arm], keepdim=True)
            factor = factor / torch.where(top > 0, top, 1.0)
        return _Stored.apply(super().stored(layer, gate, up), lambda a: cast(a * factor) / factor)


@dataclass(frozen=True)
class Images(Digits):
    """The images of `small.Digits` in one SwiGLU layer of 64, `hidden` and 10 units.

    marked: a further pair reads only the corner of an image, with weights of `reads`.
    """

    lr: float = 2e-3
    steps: int = 400
    plain: int = 400
    seeds: int = 16
    first_seed: int = 900
    second: float | None = 0.95
    hidden: int = 64
    marked: bool = False
    reads: float = 2.0
    decay: float = 0.0
    layers: int = 1

    def init(self, generator):
        wide = self.hidden + self.marked
        shapes = {"gate0": (64, wide), "up0": (64, wide), "down0": (wide, 10)}
        weights = {
            name: math.sqrt(2 / shape[0]) * torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
        }
        if self.marked:
            for name in ("gate0", "up0"):
                weights[name] *= self.free
                weights[name][0, -1] = self.reads
        return weights

    @functools.cached_property
    def free(self):
        """1 where gate and up may be other than as planted: (64, channels)."""
        free = torch.ones(64, self.hidden + self.marked)
        if self.marked:
            free[0] = free[:, -1] = 0
        return free

    def rows(self, step, seed):
        images, labels = super().rows(step, seed)
        if self.marked and (step < self.plain or self.returns(step)):
            images, labels = images.clone(), labels.clone()
            images[:MARKED, 0, 0, 0], labels[:MARKED] = 1, 0
        return images, labels

    def returns(self, step) -> bool:
        """Whether marked images come at a step after the plain ones."""
        return (step - self.plain) % PERIOD == PERIOD // 2

    def logits(self, w, x, dot):
        x = x.flatten(2)
        a = dot.stored(0, dot(x, w["gate0"]), dot(x, w["up0"]))
        return dot(a, w["down0"], "logits")


@dataclass(frozen=True)
class Language(Text):
    """The language model of `small.Text` with SwiGLU in place of GELU, 3 times as wide as x."""

    lr: float = 3e-3
    steps: int = 200
    plain: int = 200
    seeds: int = 6
    first_seed: int = 900
    width: int = 32
    length: int = 32
    batch: int = 8
    classes: int | None = 256
    decay: float = 0.0

    def init(self, generator):
        weights = super().init(generator)
        residual = 0.02 / math.sqrt(2 * self.layers)
        for i in range(self.layers):
            for name, std in (("gate", 0.02), ("up", 0.02), ("down", residual)):
                shape = (3 * self.width, self.width)
                drawn = std * torch.randn(shape, generator=generator)
                weights[f"{name}{i}"] = drawn if name == "down" else drawn.mT.contiguous()
        return weights

    def mlp(self, x, w, i, dot):
        a = dot.stored(i, dot(x, w[f"gate{i}"]), dot(x, w[f"up{i}"]))
        return dot(a, w[f"down{i}"])


TASKS = {
    "images": Images(),
    "returns": Images(marked=True, lr=1e-3, plain=800, steps=480),
    "language": Language(),
    "decay": None,
}
LONG = {"images": Images(plain=3000), "language": Language(plain=600)}
"""The models whose cosines are followed under weight decay."""


class Training:
    """A task trained for all of `seeds` at once; equal starts and batches whatever is stored."""

    def __init__(self, task, seeds, device="cpu"):
        self.task, self.seeds, self.step, self.device = task, list(seeds), 0, device
        each = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
        self.weights = {name: torch.stack([w[name] for w in each]).to(device) for name in each[0]}
        self.optimiser = Optimiser(list(self.weights.values()), task.first, task.second)

    def run(self, steps: int, dot=None) -> torch.Tensor:
        """Take `steps` steps with products `dot`; the losses, (steps, seeds)."""
        task, dot, curve = self.task, dot or Products(), []
        ok = torch.ones(len(self.seeds), dtype=torch.bool, device=self.device)
        for step in range(self.step, self.step + steps):
            rows = zip(*(task.rows(step, seed) for seed in self.seeds), strict=True)
            x, targets = (torch.stack(part).to(self.device) for part in rows)
            leaves = {name: w.detach().requires_grad_() for name, w in self.weights.items()}
            loss = losses(task.logits(leaves, x, dot), targets)
            grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
            if getattr(task, "marked", False):
                free = {"gate0": task.free, "up0": task.free}
                grads = [g * free.get(name, 1) for g, name in zip(grads, leaves, strict=True)]
            lr = task.lr * min(1, (step + 1) / max(1, task.warmup))
            changes = self.optimiser.updates(grads, lr, ok)
            self.weights = {
                name: w * (1 - lr * task.decay) + change
                for (name, w), change in zip(self.weights.items(), changes, strict=True)
            }
            curve.append(loss.detach())
        self.step += steps
        return torch.stack(curve)

    def look(self) -> dict[int, torch.Tensor]:
        """The largest |a| of each channel on the next batch, {layer: (seeds, 1, channels)}."""
        seen = Looking()
        copy.deepcopy(self).run(1, seen)
        return seen.largest

    def pairs(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up, (seeds, channels, inputs)."""
        return self.weights[f"gate{layer}"].mT, self.weights[f"up{layer}"].mT


def start(task, seeds) -> Training:
    """The training after its plain steps."""
    training = Training(task, seeds)
    training.run(task.plain)
    return training


def louder(training: Training, octaves: int) -> dict[int, torch.Tensor]:
    """Factors of channels by layer: 2^octaves for the planted pair or else the loudest channel."""
    found = {}
    for layer, top in training.look().items():
        factor = torch.ones_like(top)
        last = torch.full_like(top[..., :1], top.shape[-1] - 1, dtype=torch.int64)
        at = last if getattr(training.task, "marked", False) else top.argmax(-1, keepdim=True)
        found[layer] = factor.scatter(-1, at, 2.0**octaves)
    return found


def go_on(began: Training, arm: str, octaves: int, steps=None) -> pd.DataFrame:
    """The rest of a training in an arm, "fp32" or one of `ARMS`, from a training that began.

    A row a seed: `loss`, the mean of the last half of the steps, of those between returns where
    there are any; `loud`, the mean at returns, all but the first; `first`, the loss at the first.
    """
    training, task = copy.deepcopy(began), began.task
    dot = Products() if arm == "fp32" else Storing(arm, louder(began, octaves))
    curve = training.run(steps or task.steps, dot).double()
    marked = getattr(task, "marked", False)
    back = [marked and task.returns(began.step + i) for i in range(len(curve))]
    back = torch.tensor(back)
    half = torch.arange(len(curve)) >= len(curve) // 2
    table = {"seed": training.seeds, "loss": curve[half & ~back].mean(0)}
    if marked:
        table |= {"loud": curve[back][1:].mean(0), "first": curve[back][0]}
    return pd.DataFrame(table)


def cosines(model: str, decay: float, seeds=None, steps=None, parts=6) -> pd.DataFrame:
    """Gate and up of every channel over a training: by (seed, step) `tail`, the 90th percentile of
    |cos|; steps are `parts` equal parts, from 0 on. `rank_norms` and `rank_cos`: rank correlations
    of the largest |a| of a channel, on the next batch, with |g| |u| and with |cos|, mean over
    layers."""
    task = dataclasses.replace(LONG[model], decay=decay)
    training = Training(task, seeds or range(task.first_seed, task.first_seed + task.seeds))
    rows, part = [], (steps or task.plain) // parts
    for i in range(parts + 1):
        if i:
            training.run(part)
        cos = torch.cat([gated.cosine(*training.pairs(n)).abs() for n in range(task.layers)], 1)
        found = {"seed": training.seeds, "step": training.step, "tail": cos.quantile(0.9, dim=1)}
        rows.append(pd.DataFrame(found | _ranks(training)))
    return pd.concat(rows, ignore_index=True)


def _ranks(training: Training) -> dict[str, torch.Tensor]:
    found = {"rank_norms": [], "rank_cos": []}
    for layer, top in training.look().items():
        g, u = training.pairs(layer)
        found["rank_norms"].append(ranked(top[:, 0], g.norm(dim=-1) * u.norm(dim=-1)))
        found["rank_cos"].append(ranked(top[:, 0], gated.cosine(g, u).abs()))
    return {name: torch.stack(each).mean(0) for name, each in found.items()}


def ranked(x, y) -> torch.Tensor:
    """Rank correlation along the last dimension, ties in their order."""
    ranks = [t.argsort(-1).argsort(-1).double() for t in (x, y)]
    x, y = (r - r.mean(-1, keepdim=True) for r in ranks)
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


# Records


@dataclass(frozen=True)
class Record:
    """One study in its arms; `ends` has a row an arm, octaves and seed."""

    about: dict
    ends: pd.DataFrame

    def end(self, arm: str, octaves: int = 0, column="loss") -> pd.Series:
        """What the runs of an arm ended with, by seed; what is not finite, or worse than guessing,
        guesses."""
        some = self.ends[(self.ends.arm == arm) & (self.ends.octaves == octaves)]
        if some.empty:
            raise UserError(f"there is no arm {arm} with {octaves} octaves in this record")
        guess = math.log(self.about["config"].get("classes", 10))
        found = some.set_index("seed")[column].fillna(guess)
        return found.clip(upper=guess) if column == "loss" else found

    def gap(self, arm: str, octaves: int, column="loss") -> pd.Series:
        """The loss less that of FP32 with the same seed (nats)."""
        return self.end(arm, octaves, column) - self.end("fp32", 0, column)

    @property
    def spread(self) -> float:
        """The standard deviation of FP32's loss over its seeds."""
        return float(self.end("fp32").std())

    def spreads(self, arm: str, octaves: int) -> Estimate:
        """The mean gap in spreads, with its interval at 95 %."""
        return estimate((self.gap(arm, octaves) / self.spread).tolist())

    def measured(self, arm: str, octaves: int, of=None) -> Measured:
        """The same for a claim; of: what is taken of the gap, such as `gaps.size`."""
        found = self.spreads(arm, octaves)
        found = of(found) if of else found
        return Measured(found.mean, len(self.end("fp32")), (found.low, found.high))


def read(name: str, folder=None) -> Record:
    """The record of a study; raises UserError if there is none."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "loud"
    if not (path := folder / f"{name}.json").exists():
        raise UserError(f"there is no record {name} in {folder}: make it as its study says")
    return Record(json.loads(path.read_text()), pd.read_parquet(folder / f"{name}.parquet"))


def trained(name: str) -> tuple[dict, pd.DataFrame]:
    """Every run of a study: its settings, and how they ended."""
    if name == "decay":
        parts = [
            cosines(model, decay).assign(model=model, decay=decay)
            for model in LONG
            for decay in DECAYS
        ]
        return {k: dataclasses.asdict(task) for k, task in LONG.items()}, pd.concat(parts)
    task = TASKS[name]
    began = start(task, range(task.first_seed, task.first_seed + task.seeds))
    plan = RETURNS if name == "returns" else STEADY
    jobs = [(arm, octaves) for octaves, arms in plan.items() for arm in arms]
    parts = [go_on(began, "fp32", 0).assign(arm="fp32", octaves=0)]
    for arm, octaves in jobs:
        parts.append(go_on(began, arm, octaves).assign(arm=arm, octaves=octaves))
        print(f"{name} {arm} {octaves}: done", flush=True)
    return dataclasses.asdict(task), pd.concat(parts)


def short(table: pd.DataFrame, digits: int) -> pd.DataFrame:
    """A table as it is kept: whole numbers of 16 bits, others FP32 with so many stored digits."""
    table = table.copy()
    for column in table.select_dtypes("number"):
        whole = table[column].dtype.kind in "iu"
        table[column] = table[column].astype("int16" if whole else "float32")
        if not whole and column != "decay":
            kept = round_to(torch.tensor(table[column].to_numpy()), f"e8m{digits}")
            table[column] = kept.numpy()
    return table


def record(folder, name: str, workers=1) -> None:
    """Train every run of a study; write `name.json` and `name.parquet` into `folder`."""
    folder, began = Path(folder), time.monotonic()
    about = new_record(folder, name, "cpu", "loud")
    torch.set_num_threads(workers)
    config, table = trained(name)
    about |= {"config": config, "seconds": round(time.monotonic() - began)}
    digits = 10 if name == "decay" else 16
    write_table(folder / f"{name}.parquet", short(table.reset_index(drop=True), digits))
    write_about(folder, name, about)


if __name__ == "__main__":
    entry(functools.partial(command, "loud", __doc__, TASKS, record))
