"""Bits, or bias? Significand bits taken from every operand of a training's products.

    mask        the lower bits become zero: every number is cut toward zero
    centred     the same, times a constant that makes the mean change zero
    nearest     to nearest, ties to even
    random      stochastic: right on average, with twice the variance of nearest
    smaller     none is taken, but every number is divided by that constant: the bias alone

Cutting to m bits makes a number smaller by a share of 2^-(m+1) / (2 ln 2) on average, if digits are
spread as over many magnitudes and m is not small: with 1 bit it is 0.88 of that. Its root mean
square error is about twice that of rounding to nearest, so that of nearest with a bit less; once
centred it is about that of nearest with as many bits.

Operands of products are cut, forward and backward; all else is FP32. The records are made by

    python -m lowprec.studies.bits data/studies/bits images     (so is text)

in minutes of a core. They hold how each run ended (`images.json`, with where it was made) and its
course (`images.parquet`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lowprec import UserError, entry
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies import gaps
from lowprec.studies.deviation import Estimate
from lowprec.studies.mixed import Optimiser
from lowprec.studies.mixed_runs import (
    command,
    learning_rate,
    load,
    losses,
    new_record,
    write_about,
)
from lowprec.studies.moments import Dense
from lowprec.studies.small import Text

HOW = ("mask", "centred", "nearest", "random")
BITS = (1, 2, 3)
EPSILON = 5e-4
"""Half the side of the box of `sharpness`, for a logit of 0; the customary one of Keskar et al."""
EVERY = 10
"""Steps between two rows of a course."""
JUMP = 0.5
"""Nats by which the loss of an event lies above the lowest before it."""

TASKS = {
    "images": Dense(lr=0.01, steps=300, warmup=20, seeds=48, first_seed=700),
    "text": Text(
        lr=0.01, steps=150, warmup=20, seeds=6, first_seed=700, width=32, length=32, batch=8,
        classes=256,
    ),
}  # fmt: skip
RATES = {"images": (0.01, 0.4), "text": (0.01, 0.3)}
"""Learning rates of a task: a usual one and a high one. With seeds of a pilot, 9000 and on, FP32
had no event at 0.3, and one in all 11 runs at 1."""


def factor(bits: int) -> float:
    """What `centred` multiplies with: 1 over what is left on average after a cut to `bits`."""
    return 1 / (1 - 2.0 ** -(bits + 1) / (2 * math.log(2)))


def cut(x, bits: int | None, how: str, generator=None):
    """float32 x with `bits` stored significand bits, on its bit pattern; exponents are kept.

    "mask", "nearest" and "random" are `round_to(x, f"e8m{bits}", ...)` toward zero, to nearest even
    and stochastic, for all but signalling NaN. None leaves x as it is.
    """
    if bits is None:
        return x
    if how == "smaller":
        return x / factor(bits)
    drop = 23 - bits
    pattern = x.contiguous().view(torch.int32)
    if how == "nearest":
        pattern = pattern + ((pattern >> drop & 1) + (2 ** (drop - 1) - 1))
    elif how == "random":
        pattern = pattern + torch.randint(2**drop, x.shape, generator=generator, dtype=torch.int32)
    short = (pattern & -(2**drop)).view(torch.float32)
    return short * factor(bits) if how == "centred" else short


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, by, watch):
        watch("forward", a, b)
        a, b = by(a), by(b)
        ctx.save_for_backward(a, b)
        ctx.by, ctx.watch = by, watch
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        ctx.watch("backward", g)
        g = ctx.by(g)
        return g @ b.mT, a.mT @ g, None, None


def _unseen(*_):
    pass


def sharpness(logits, targets, epsilon: float = EPSILON):
    """How much the loss can rise in a box around the logits, in percent of 1 + loss, (seeds,).

    The box lets logit z move by epsilon (|z| + 1). Cross-entropy falls with the target's logit and
    rises with all others, so its largest value is at a corner and is exact. After Keskar et al.
    2017; Lee et al. 2024 are said to take the logits of the last token, here it is all of them.
    logits: (seeds, rows, classes). targets: (seeds, ...) of as many rows.
    """
    away = epsilon * (logits.abs() + 1)
    target = targets.flatten(1)[..., None]
    highest = (logits + away).scatter(-1, target, (logits - away).gather(-1, target))
    low = losses(logits, targets)
    return 100 * (losses(highest, targets) - low) / (1 + low)


def train(task, bits, how, rate, seeds, stop=None, watch=_unseen):
    """Train for all of `seeds` with operands cut to `bits`; equal starts and batches in every arm.

    bits: None is FP32. stop: take only the first steps. watch(direction, *operands) sees the
    operands of every product before they are cut, forward and backward, in the last step.

    Returns (course, ends). course: DataFrame (seed, step, loss, sharpness), `loss` the mean of the
    `EVERY` steps that end with `step`, the sharpness that of the batch of this step before it.
    ends: DataFrame (seed, loss), the mean of the last 50 steps, of at most 50.
    """
    task = dataclasses.replace(task, lr=rate)
    steps = min(stop or task.steps, task.steps)
    each = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
    weights = {name: torch.stack([w[name] for w in each]) for name in each[0]}
    generator = torch.Generator().manual_seed(0)
    optimiser = Optimiser(list(weights.values()), task.first, task.second)
    every, sharp, ok = [], {}, torch.ones(len(seeds), dtype=torch.bool)

    def by(x):
        return cut(x, bits, how, generator)

    for step in range(steps):
        see = watch if step == steps - 1 else _unseen

        def dot(a, b, site=None, see=see):
            return _Product.apply(a, b, by, see)

        rows = zip(*(task.rows(step, seed) for seed in seeds), strict=True)
        x, targets = map(torch.stack, rows)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        logits = task.logits(leaves, x, dot)
        loss = losses(logits, targets)
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        changes = optimiser.updates(grads, learning_rate(task, step), ok)
        weights = {n: w + c for (n, w), c in zip(weights.items(), changes, strict=True)}
        every.append(loss.detach())
        if (step + 1) % EVERY == 0:
            sharp[step + 1] = sharpness(logits.detach(), targets)
    table = torch.stack(every).double()
    course = [
        pd.DataFrame(dict(seed=seeds, step=at, loss=table[at - EVERY : at].mean(0), sharpness=s))
        for at, s in sharp.items()
    ]
    ends = pd.DataFrame({"seed": list(seeds), "loss": table[-50:].mean(0)})
    return pd.concat(course, ignore_index=True), ends


def operands(task, seeds, stop=None) -> dict[str, torch.Tensor]:
    """The operands of all products in the last step of an FP32 training, at the task's own rate:
    `forward` and `backward`, flat, without zeros."""
    seen = {"forward": [], "backward": []}

    def watch(direction, *tensors):
        seen[direction] += [t.detach().flatten() for t in tensors]

    train(task, None, "", task.lr, seeds, stop, watch)
    flat = {direction: torch.cat(tensors) for direction, tensors in seen.items()}
    return {direction: x[x != 0] for direction, x in flat.items()}


def census(x) -> pd.Series:
    """Numbers of x, without zeros, by power of two: 3 has the exponent 1."""
    values, counts = (x.frexp().exponent - 1).unique(return_counts=True)
    return pd.Series(counts.numpy(), index=values.numpy())


def changes(x, bits: int, how: str, seed=0) -> tuple[float, float]:
    """Mean and root mean square of the relative change of x, without zeros and tiny numbers."""
    x = x[x.abs() >= 2.0**-100]
    short = cut(x, bits, how, torch.Generator().manual_seed(seed))
    change = short.double() / x.double() - 1
    return change.mean().item(), change.square().mean().sqrt().item()


def name(bits, how) -> str:
    """An arm in text: "fp32", "mask3"."""
    return f"{how}{bits}" if bits else "fp32"


ARMS = {name(None, ""): (None, "")}
ARMS |= {name(b, how): (b, how) for b in BITS for how in HOW}
ARMS |= {name(7, how): (7, how) for how in ("mask", "nearest")}


# Records


@dataclass(frozen=True)
class Record:
    """One task in its arms and rates."""

    about: dict
    ends: pd.DataFrame
    courses: pd.DataFrame

    @property
    def rates(self) -> list[float]:
        """Its learning rates, the usual one first."""
        return sorted(self.ends.rate.unique())

    def at(self, rate=None) -> gaps.Record:
        """Its runs at the usual rate, or at another. What is not finite at the end, or worse than
        guessing, guesses."""
        guess = math.log(self.about["config"].get("classes", 10))
        ends = self.ends[self.ends.rate == (rate or self.rates[0])]
        return gaps.Record(
            self.about, ends.assign(loss=ends.loss.fillna(guess).clip(upper=guess)), self.courses
        )

    def left(self, bits: int) -> Estimate:
        """The share of the mean gap of `mask` to `nearest` that `centred` has, at the usual rate,
        see `gaps.share`."""
        return self.at().left(f"centred{bits}", f"mask{bits}", f"nearest{bits}")

    @cached_property
    def events(self) -> pd.Series:
        """The step of the first event by (arm, rate, seed), NaN without one: the mean loss of ten
        steps is not finite, or `JUMP` above the lowest such mean before it."""
        loss = self.courses.pivot(index="step", columns=["arm", "rate", "seed"], values="loss")
        bad = ~np.isfinite(loss) | (loss > loss.fillna(math.inf).cummin().shift() + JUMP)
        return bad.idxmax().astype(float).where(bad.any())

    def jumped(self, arm: str, rate: float) -> pd.Series:
        """Whether a run has an event, by seed."""
        return self.events.xs((arm, rate), level=("arm", "rate")).notna()

    def ahead(self, column: str, steps: int) -> pd.Series:
        """How often the `column` of a run is above that of runs of its rate that have no event, at
        the same step, `steps` before its own event: an entry an event, whose mean is the area under
        the ROC curve. Ties count half. An event too early to look back on is left out."""
        value = self.courses.pivot(index="step", columns=["arm", "rate", "seed"], values=column)
        found = {}
        for (arm, rate, seed), at in self.events.dropna().items():
            beside = self.events.xs(rate, level="rate")
            columns = [(a, rate, s) for a, s in beside.index[beside.isna()]]
            if at - steps in value.index and columns:
                mine, others = value[arm, rate, seed][at - steps], value.loc[at - steps, columns]
                found[arm, rate, seed] = float(((mine > others) + (mine == others) / 2).mean())
        return pd.Series(found, dtype=float)


def read(task: str, folder=None) -> Record:
    """The record of a task; raises UserError if there is none."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "bits"
    if (found := load(task, folder)) is None:
        raise UserError(f"there is no record {task} in {folder}: make it as its study says")
    about, ends, course = found
    return Record(about, ends, course.astype({"arm": "category"}))


def _arm(task: str, rate: float, arm: str):
    torch.set_num_threads(1)
    one = TASKS[task]
    seeds = range(one.first_seed, one.first_seed + one.seeds)
    course, end = train(one, *ARMS[arm], rate, seeds)
    print(f"{task} {rate} {arm}: done", flush=True)
    return course.assign(arm=arm, rate=rate), end.assign(arm=arm, rate=rate)


def record(folder, task: str, arms=tuple(ARMS), workers=1) -> None:
    """Train `arms` of a task at its rates; write `task.json` and `task.parquet` into `folder`."""
    folder, start, one = Path(folder), time.monotonic(), TASKS[task]
    about = new_record(folder, task, "cpu", "bits")
    jobs = list(itertools.product([task], RATES[task], arms))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        courses, ends = zip(*pool.map(_arm, *zip(*jobs, strict=True)), strict=True)
    about |= {"config": dataclasses.asdict(one), "seconds": round(time.monotonic() - start)}
    table = pd.concat(ends, ignore_index=True)
    about |= {"ends": json.loads(table.to_json(orient="split", index=False, double_precision=6))}
    table = pd.concat(courses, ignore_index=True).astype({"seed": "int16", "step": "int16"})
    save(table, folder / f"{task}.parquet")
    write_about(folder, task, about)


def save(table, path) -> None:
    """Write a course, losses and sharpness with 10 stored bits, 3 digits, which halves the file."""
    for column in ("loss", "sharpness"):
        numbers = torch.tensor(table[column].to_numpy(), dtype=torch.float32)
        table = table.assign(**{column: cut(numbers, 10, "nearest").numpy()})
    write_table(path, table)


if __name__ == "__main__":
    entry(functools.partial(command, "bits", __doc__, TASKS, record))
