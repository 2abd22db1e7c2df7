"""Adam's moments in few bits: what a training pays, and how far apart the numbers of a group are.

The criterion is in `lowprec.studies.forgetting`. Here one moment of a whole training is rounded
after each step, and all else is FP32.

The records are made by

    python -m lowprec.studies.moments data/studies/moments digits     (so is text)

in minutes. They hold how each run ended (`digits.json`, with where it was made) and its losses
(`digits.parquet`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lowprec import UserError, entry
from lowprec.numerics.recipe import Adam, Recipe
from lowprec.numerics.scaling import Cast, scaled
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies.mixed_runs import command, load, losses, new_record, write_about
from lowprec.studies.small import Digits, Text


@dataclass(frozen=True)
class Dense(Digits):
    """The images of `small.Digits` in a network of 64, 64 and 10 units, with biases and ReLU."""

    lr: float = 2e-3
    steps: int = 1000
    warmup: int = 0
    seeds: int = 64
    first_seed: int = 500
    second: float | None = 0.95
    hidden: int = 64

    def init(self, generator):
        shapes = {"up": (64, self.hidden), "down": (self.hidden, 10)}
        weights = {}
        for name, shape in shapes.items():
            weights[name] = math.sqrt(2 / shape[0]) * torch.randn(shape, generator=generator)
            weights[name + "_bias"] = torch.zeros(1, shape[1])
        return weights

    def logits(self, w, x, dot):
        hidden = (dot(x.flatten(2), w["up"]) + w["up_bias"]).relu()
        return dot(hidden, w["down"], "logits") + w["down_bias"]


TASKS = {"digits": Dense(), "text": Text(steps=300, seeds=16, first_seed=200)}
V, M, E5 = "FP32+v=e4m3_saturate", "FP32+m=e4m3_saturate", "FP32+v=e5m2_saturate"
ARMS = {
    "fp32": "FP32",
    "pow2": f"{V}@tensor,pow2",
    "pow2-random": f"{V}:stochastic@tensor,pow2",
    "moving": f"{V}@tensor",
    "floor-pow2": f"{V}@tensor,pow2,floor",
    "floor-pow2-random": f"{V}:stochastic@tensor,pow2,floor",
    "floor-moving": f"{V}@tensor,floor",
    "groups": f"{V}@block128",
    "groups-floor": f"{V}@block128,floor",
    "coat": f"{V}@block128,expand",
    "e5m2-moving": f"{E5}@tensor",
    "e5m2-pow2": f"{E5}@tensor,pow2,floor",
    "e5m2-pow2-random": f"{E5}:stochastic@tensor,pow2,floor",
    "m-pow2": f"{M}@tensor,pow2",
    "m-slow": f"{M}@tensor,pow2",
    "fp32-slow-m": "FP32",
    "v-quick": f"{V}@tensor,pow2,floor",
    "fp32-quick-v": "FP32",
}
"""Recipes by arm. pow2: a scale that is a power of two, with which a stored number stays where it
is; moving: one that follows the largest number. random: rounded stochastically."""
BETAS = {
    "m-slow": (0.99, 0.95), "fp32-slow-m": (0.99, 0.95),
    "v-quick": (0.9, 0.9), "fp32-quick-v": (0.9, 0.9),
}  # fmt: skip
"""Rates of m and v that are not 0.9 and 0.95."""
BASE = {"m-slow": "fp32-slow-m", "v-quick": "fp32-quick-v"}
"""The arm without rounding that an arm is compared with, where it is not "fp32"."""
TEXT = ("fp32", "moving", "groups", "floor-moving", "floor-pow2", "floor-pow2-random", "coat")
"""Arms of the language model, which is slower."""
SMALL = 512
"""Tensors with fewer elements a seed, biases and gains, keep their states in FP32."""


def train(task, arm: str, seeds, stop: int | None = None, look=()):
    """Train one arm for all of `seeds`; equal starts and batches in every arm, a constant rate.

    stop: take only the first steps. look: steps after which the moments are kept.

    Returns (losses, ends, moments). losses: DataFrame (seed, step, loss), means of 50 steps. ends:
    DataFrame with a row a seed: `loss`, the mean of the last 100 steps, infinite if one is not
    finite; `high`, the median of sqrt(stored v / v kept in FP32 beside it), and `lost`, the share
    of non-zero elements of that v that are zero as stored, both over the matrices; `ended`, of
    `Adam`. moments: {step: (m, v)}, lists of tensors (seeds, ...), of the matrices.
    """
    steps = min(stop or task.steps, task.steps)
    recipe, betas = Recipe.parse(ARMS[arm]), BETAS.get(arm, (0.9, 0.95))
    recipe.require(steps)
    each = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
    weights = {name: torch.stack([w[name] for w in each]) for name in each[0]}
    generator = torch.Generator().manual_seed(0)
    adam = Adam(list(weights.values()), recipe, betas, least=SMALL, generator=generator)
    big = [i for i, w in enumerate(weights.values()) if w[0].numel() >= SMALL]
    beside, curve, moments = [torch.zeros_like(adam.v[i]) for i in big], [], {}
    for step in range(steps):
        rows = zip(*(task.rows(step, seed) for seed in seeds), strict=True)
        x, targets = map(torch.stack, rows)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        loss = losses(task.logits(leaves, x, lambda a, b, site=None: a @ b), targets)
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        lr = task.lr * min(1, (step + 1) / max(1, task.warmup))
        weights = dict(zip(weights, adam.step(list(weights.values()), grads, lr), strict=True))
        beside = [v.lerp(grads[i].square(), 1 - betas[1]) for v, i in zip(beside, big, strict=True)]
        curve.append(loss.detach())
        if step + 1 in look:
            moments[step + 1] = [adam.m[i] for i in big], [adam.v[i] for i in big]
    table = torch.stack(curve).double()
    end = table[-100:].mean(0)
    stored = torch.cat([adam.v[i].flatten(1) for i in big], 1)
    true = torch.cat([v.flatten(1) for v in beside], 1)
    there, both = true > 0, (true > 0) & (stored > 0)
    ratio = torch.where(both, stored / true, math.nan).sqrt()
    ends = pd.DataFrame({
        "seed": list(seeds),
        "loss": torch.where(end.isfinite(), end, math.inf).numpy(),
        "high": ratio.nanmedian(1).values.numpy(),
        "lost": ((there & (stored == 0)).sum(1) / there.sum(1)).numpy(),
        "ended": adam.ended,
    })  # fmt: skip
    parts = [
        pd.DataFrame({"seed": seeds, "step": at, "loss": table[at : at + 50].mean(0)})
        for at in range(0, steps, 50)
    ]
    return pd.concat(parts, ignore_index=True), ends, moments


# What a rounding does to recorded moments


def spans(tensor, size=128) -> np.ndarray:
    """max / min over the non-zero elements of each group of `size`, groups with two or more."""
    groups = tensor.flatten(1).abs()
    groups = groups[:, : groups.shape[1] // size * size].reshape(-1, size)
    least = torch.where(groups > 0, groups, math.inf).amin(1)
    return (groups.amax(1) / least)[(groups > 0).sum(1) >= 2].numpy()


def step_error(v, cast: str, size=128) -> np.ndarray:
    """Relative error of 1 / sqrt(v) by one rounding, root mean square of each group of `size`, over
    elements that are not zero before and after."""
    stored = scaled(v, Cast.parse(cast))
    error = torch.where((v > 0) & (stored > 0), (v / stored).sqrt() - 1, math.nan).flatten(1)
    groups = error[:, : error.shape[1] // size * size].reshape(-1, size)
    return groups.square().nanmean(1).sqrt().numpy()


# Records


@dataclass(frozen=True)
class Record:
    """One task in its arms."""

    about: dict
    ends: pd.DataFrame
    curves: pd.DataFrame

    def end(self, arm: str, column="loss") -> pd.Series:
        """What the runs of an arm ended with, by seed."""
        return self.ends[self.ends.arm == arm].set_index("seed")[column]

    def times(self, arm: str, base: str | None = None) -> pd.Series:
        """The loss over that of `base` with the same seed, by default the arm without rounding; at
        most a million."""
        under = self.end(base or BASE.get(arm, "fp32"))
        return (self.end(arm) / under).clip(upper=1e6)

    def guessing(self, arm: str) -> pd.Series:
        """Whether the loss ends above that of guessing, by seed."""
        return self.end(arm) > math.log(self.about["config"].get("classes", 10))

    def away(self, arm: str) -> pd.Series:
        """The loss less that of the arm without rounding (nats), by seed."""
        return self.end(arm) - self.end(BASE.get(arm, "fp32"))


def read(name: str, folder=None) -> Record:
    """The record of a task; raises UserError if there is none."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "moments"
    if (found := load(name, folder)) is None:
        raise UserError(f"there is no record {name} in {folder}: make it as its study says")
    about, ends, course = found
    ends["loss"] = ends.loss.fillna(math.inf)
    return Record(about, ends, course.astype({"arm": "category"}))


def _arm(name: str, arm: str):
    torch.set_num_threads(1)
    task = TASKS[name]
    curve, end, _ = train(task, arm, range(task.first_seed, task.first_seed + task.seeds))
    print(f"{name} {arm}: done", flush=True)
    return curve.assign(arm=arm), end.assign(arm=arm)


def record(folder, name: str, arms=None, workers=1) -> None:
    """Train `arms` of a task, by default all of it; write `name.json` and `name.parquet`."""
    folder, start = Path(folder), time.monotonic()
    arms = arms or (TEXT if name == "text" else tuple(ARMS))
    about = new_record(folder, name, "cpu", "moments")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        curves, ends = zip(*pool.map(_arm, [name] * len(arms), arms), strict=True)
    about |= {"config": dataclasses.asdict(TASKS[name]), "seconds": round(time.monotonic() - start)}
    about |= {"arms": {arm: ARMS[arm] for arm in arms}, "betas": BETAS}
    table = pd.concat(ends, ignore_index=True)
    about |= {"ends": json.loads(table.to_json(orient="split", index=False, double_precision=6))}
    table = pd.concat(curves, ignore_index=True).astype({"seed": "int16", "step": "int16"})
    table = table.astype({"loss": "float32"})
    write_table(folder / f"{name}.parquet", table)
    write_about(folder, name, about)


if __name__ == "__main__":
    entry(functools.partial(command, "moments", __doc__, TASKS, record))
