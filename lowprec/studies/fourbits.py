"""Linear layers trained in 4 bits: the estimator, outliers, ties, scales, modules and a schedule.

Weights and inputs of linear layers are in E2M1, its gradients in FP32 unless an arm says otherwise.
The backward multiplies what the forward had stored. An operand is in BF16 before it is cast, as in
the published code of Wang et al. (2025). An arm differs from another in one field.

The records are made by

    python -m lowprec.studies.fourbits data/studies/fourbits images     (so are sgd, text, again)

in minutes of a core. They hold how each run ended (`images.parquet`, and `images.json`, with where
it was made).
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
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

from lowprec import UserError, entry
from lowprec.numerics.formats import BF16, E2M1, round_to
from lowprec.numerics.recipe import Recipe
from lowprec.numerics.scaling import Cast, quantise
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies import forgetting, gaps
from lowprec.studies.clamped import Clamp, stored
from lowprec.studies.mixed import Optimiser
from lowprec.studies.mixed_runs import command, learning_rate, losses, new_record, write_about
from lowprec.studies.moments import Dense
from lowprec.studies.small import Text

POWER, CLIP = 5.0, 3.0
"""k of the estimator, and its largest slope."""
KEPT = "e8m16"
"""What losses are written in: 5 digits, as paired runs may differ in the fourth."""

TASKS = {
    "images": Dense(lr=0.01, steps=300, warmup=20, seeds=32, first_seed=1100),
    "sgd": Dense(lr=0.1, steps=300, warmup=20, seeds=32, first_seed=1100, second=None),
    "text": Text(
        lr=0.01, steps=150, warmup=20, seeds=8, first_seed=1100, width=64, length=32, batch=8,
        classes=256,
    ),
}  # fmt: skip
TASKS["again"] = dataclasses.replace(TASKS["text"], seeds=16, first_seed=2100)


@dataclass(frozen=True)
class Arm:
    """One training: its recipe, of which w_dx and x_dw are not read, and what else differs.

    slope: what the gradient of a weight is multiplied with: "one" passes it straight through, "dge"
    is `slopes`, "mean" their mean over the matrix, "shuffled" the same slopes at random places of
    it, drawn at each step, "level" `slopes` over their mean. clamp: of the inputs.
    last: the share of the steps, at the end, that are FP32. attention: another recipe for qkv and
    proj of a language model.
    """

    recipe: str = "FP32"
    slope: str = "one"
    clamp: Clamp | None = None
    last: float = 0.0
    attention: str | None = None


def _recipe(x="e2m1@token", w="e2m1@channel", g="fp32"):
    return f"FP32+x={x}+w={w}+g_dx={g}+g_dw={g}"


FP8 = "e4m3_saturate"
W4A8, W4A4 = _recipe(x=f"{FP8}@token"), _recipe()
ATTENTION = _recipe(f"{FP8}@token", f"{FP8}@channel")
POW2 = _recipe("e2m1@token,pow2", "e2m1@channel,pow2")
ARMS = {
    "fp32": Arm(),
    "w4a8": Arm(W4A8),
    "dge": Arm(W4A8, "dge"),
    "mean": Arm(W4A8, "mean"),
    "shuffled": Arm(W4A8, "shuffled"),
    "level": Arm(W4A8, "level"),
    "w8a4": Arm(_recipe(w=f"{FP8}@channel")),
    "w8a4-tensor": Arm(_recipe("e2m1@tensor", f"{FP8}@channel")),
    "w4a4": Arm(W4A4),
    "occ": Arm(W4A4, clamp=Clamp()),
    "tensor": Arm(_recipe("e2m1@tensor", "e2m1@tensor")),
    "tensor-occ": Arm(_recipe("e2m1@tensor", "e2m1@tensor"), clamp=Clamp()),
    "clamp": Arm(W4A4, clamp=Clamp(over="token", rest=False)),
    "input": Arm(_recipe(w="e2m1@token")),
    "pow2": Arm(POW2),
    "up": Arm(_recipe("e2m1@token,pow2,up", "e2m1@channel,pow2,up")),
    "e1m2": Arm(_recipe("e1m2@token", "e1m2@channel")),
    "released": Arm(
        _recipe("e2m1@token,pow2,up", "e2m1@token,pow2,up"), "dge", Clamp(over="token", rest=False)
    ),
    "random": Arm(_recipe("e2m1:stochastic@token", "e2m1:stochastic@channel")),
    "g-e5m2": Arm(_recipe(g="e5m2_saturate@token")),
    "g-e2m1": Arm(_recipe(g="e2m1@token")),
    "g-e2m1-random": Arm(_recipe(g="e2m1:stochastic@token")),
    "last5": Arm(W4A4, last=0.05),
    "last10": Arm(W4A4, last=0.1),
    "last20": Arm(W4A4, last=0.2),
    "feed": Arm(W4A4, attention=ATTENTION),
    "attend": Arm(ATTENTION, attention=W4A4),
}
"""w4a8: weights in 4 bits, inputs in 8. From "occ" to "e1m2" one field is changed, of W4A4, of
"tensor", or, for "up", of "pow2"; "released" has all that the published code does otherwise, but
for E1M2, its default. "feed" has 4 bits in the feed-forward part alone, "attend" in qkv and proj
alone."""
ONLY = {
    "sgd": ("fp32", "w4a8", "dge", "mean", "shuffled", "level"),
    "images": tuple(arm for arm in ARMS if arm not in ("level", "clamp", "feed", "attend")),
    "again": ("fp32", "w4a8", "dge", "level"),
    "text": tuple(arm for arm in ARMS if arm not in ("w8a4", "w8a4-tensor")),
}
"""Arms of a task. Rows of fewer than 100 numbers have no 99 % quantile below their largest, so the
clamp of single tokens does nothing in the image model. "again" is "text" with other seeds."""


# The estimator


def slopes(x, fmt=E2M1, k: float = POWER, clip: float = CLIP):
    """The slope of the smooth stand-in for rounding scaled x to `fmt`, at most `clip`.

    Between two neighbours, with t in [0, 1] the place between them, it is |2 t - 1|^(1/k - 1) / k.
    Beyond the largest number it is that of the last interval's end.
    """
    codes = torch.cat([torch.zeros(1), forgetting.codes(fmt).float()])
    size = x.abs().clamp(max=fmt.max)
    right = torch.searchsorted(codes, size.contiguous(), right=True).clamp(max=len(codes) - 1)
    low, high = codes[right - 1], codes[right]
    middle = (2 * (size - low) / (high - low) - 1).abs()
    return (middle ** (1 / k - 1) / k).clamp(max=clip)


def mean_slope(k: float = POWER, clip: float = CLIP) -> float:
    """Its mean over an interval, in closed form."""
    edge = (k * clip) ** (1 / (1 / k - 1))
    return clip * edge + 1 - edge ** (1 / k)


def weight_slopes(w, cast: Cast):
    """`slopes` at weights (..., k, columns), which `cast` scales."""
    scale = quantise(w, cast).scale
    return slopes(w / (scale.mT if cast.group == "channel" else scale), cast.fmt)


def _estimated(w, arm: Arm, cast: Cast, generator):
    """What the gradient of w is multiplied with."""
    if arm.slope == "one":
        return 1.0
    found = weight_slopes(w.detach(), cast)
    mean = found.mean((-2, -1), keepdim=True)
    if arm.slope in ("mean", "level"):
        return mean if arm.slope == "mean" else found / mean
    if arm.slope == "shuffled":
        flat = found.flatten(-2)
        order = torch.rand(flat.shape, generator=generator).argsort(-1)
        return flat.gather(-1, order).view_as(found)
    return found


# Training


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, cast, arm, generator):
        ctx.slope = _estimated(w, arm, cast["w"].cast, generator)
        x = stored(x, None, arm.clamp, lambda x, _: cast["x"](x))
        w = cast["w"](round_to(w, BF16))
        ctx.save_for_backward(x, w)
        ctx.cast = cast
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dx = ctx.cast["g_dx"](g) @ w.mT
        return dx, ctx.slope * (x.mT @ ctx.cast["g_dw"](g)), None, None, None


class Layers:
    """The product of a model's matrices and all else: `dot` of `small` for the weights in leaves,
    those of linear layers by `arm`, every other product FP32."""

    def __init__(self, arm: Arm, generator):
        self.arm, self.generator = arm, generator
        recipes = {"other": arm.recipe, "attention": arm.attention or arm.recipe}
        self.casts = {k: Recipe.parse(text).casters(generator) for k, text in recipes.items()}

    def dot(self, leaves: dict, exact: bool = False):
        names = {id(w): name for name, w in leaves.items()}

        def dot(a, b, site=None):
            name = names.get(id(b))
            cast = self.casts["attention" if (name or "").startswith(("qkv", "proj")) else "other"]
            if exact or name is None or cast["w"].cast.keeps:
                return a @ b
            return _Product.apply(a, b, cast, self.arm, self.generator)

        return dot


def train(task, arm: Arm | str, seeds, stop: int | None = None):
    """Train one arm for all of `seeds`; equal starts and batches in every arm.

    stop: take only the first steps. Returns (ends, weights). ends: DataFrame with a row a seed:
    `loss`, held out, in the arithmetic of the last step; `exact`, the same weights in FP32.
    weights: {name: (seeds, ...)}.
    """
    arm = ARMS[arm] if isinstance(arm, str) else arm
    steps = min(stop or task.steps, task.steps)
    each = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
    weights = {name: torch.stack([w[name] for w in each]) for name in each[0]}
    layers = Layers(arm, torch.Generator().manual_seed(0))
    optimiser = Optimiser(list(weights.values()), task.first, task.second)
    ok = torch.ones(len(seeds), dtype=torch.bool)
    for step in range(steps):
        rows = zip(*(task.rows(step, seed) for seed in seeds), strict=True)
        x, targets = map(torch.stack, rows)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        dot = layers.dot(leaves, exact=step >= steps - round(arm.last * steps))
        loss = losses(task.logits(leaves, x, dot), targets)
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        changes = optimiser.updates(grads, learning_rate(task, step), ok)
        weights = {n: w + c for (n, w), c in zip(weights.items(), changes, strict=True)}
    ends = dict(
        seed=list(seeds),
        loss=held_out(task, weights, layers.dot(weights, exact=bool(arm.last))).numpy(),
        exact=held_out(task, weights, layers.dot(weights, exact=True)).numpy(),
    )
    return pd.DataFrame(ends), weights


@torch.no_grad()
def held_out(task, weights, dot):
    """The loss on the held-out part, (seeds,)."""
    seeds, batches = len(next(iter(weights.values()))), task.held_out()
    parts = []
    for x, targets in batches:
        x, targets = (t.expand(seeds, *t.shape) for t in (x, targets))
        parts.append(losses(task.logits(weights, x, dot), targets))
    return torch.stack(parts).mean(0)


# What it costs


SHARES = {"feed": 57.0, "projections": 28.7, "core": 14.3}
"""Percent of a layer's products, LLaMA-7B at 4,096 tokens, as reported of Zhou et al. (2025)."""


def layer_shares(width=4096, hidden=11008, tokens=4096) -> dict[str, float]:
    """The same in percent, counted: three matrices of the feed-forward part, four of attention, and
    its two products over all keys."""
    parts = dict(feed=3 * width * hidden, projections=4 * width**2, core=2 * tokens * width)
    return {name: 100 * part / sum(parts.values()) for name, part in parts.items()}


def cost(bits: dict[str, tuple[int, int, int]], speeds: dict[int, float], shares=None) -> float:
    """Percent of the time of 16 bits that products take: {module: bits of the forward, of the
    gradients of inputs and of weights}, each a third; speeds: {bits: times that of 16}."""
    shares = shares or SHARES
    return sum(shares[m] * sum(1 / speeds[b] for b in three) / 3 for m, three in bits.items())


ALL_FOUR = {"feed": (4, 4, 4), "projections": (4, 4, 4), "core": (16, 16, 16)}
SPLIT = {"feed": (4, 8, 8), "projections": (8, 8, 8), "core": (16, 16, 16)}
"""The module split of Zhou et al. as we understand it."""


# Records


@dataclass(frozen=True)
class Record(gaps.Record):
    """One model in its arms; `curves` is empty."""

    column: str = "loss"

    @cached_property
    def loss(self) -> pd.DataFrame:
        """A row a seed, a column an arm: `column` of `train`, at most that of guessing."""
        guess = math.log(self.about["config"].get("classes", 10))
        ends = self.ends.assign(value=self.ends[self.column].fillna(guess).clip(upper=guess))
        return ends.pivot(index="seed", columns="arm", values="value")

    def by(self, column: str) -> Record:
        """The same by another column of `train`."""
        return dataclasses.replace(self, column=column)

    def above(self, arm: str, base: str) -> pd.Series:
        """Whether an arm ends above another, by seed."""
        return self.loss[arm] > self.loss[base]


def read(task: str, folder=None) -> Record:
    """The record of a task; raises UserError if there is none."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "fourbits"
    if not (path := folder / f"{task}.json").is_file():
        raise UserError(f"there is no record {task} in {folder}: make it as its study says")
    ends = pd.read_parquet(folder / f"{task}.parquet")
    return Record(json.loads(path.read_text()), ends, pd.DataFrame())


def _arm(name: str, arm: str):
    torch.set_num_threads(1)
    task, start = TASKS[name], time.process_time()
    ends, _ = train(task, arm, range(task.first_seed, task.first_seed + task.seeds))
    print(f"{name} {arm}: {time.process_time() - start:.0f} s", flush=True)
    return ends.assign(arm=arm)


def _changes(arm: Arm) -> dict:
    """The fields of an arm that are not those of `Arm()`."""
    pairs = zip(dataclasses.asdict(arm).items(), dataclasses.asdict(Arm()).values(), strict=True)
    return {name: value for (name, value), plain in pairs if value != plain}


def record(folder, name: str, arms=None, workers=1) -> None:
    """Train `arms` of a task, by default all; write `name.json` and its table into `folder`."""
    folder, start, arms = Path(folder), time.monotonic(), arms or ONLY[name]
    about = new_record(folder, name, "cpu", "fourbits")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        ends = list(pool.map(_arm, [name] * len(arms), arms))
    about |= {"config": dataclasses.asdict(TASKS[name]), "seconds": round(time.monotonic() - start)}
    about |= {"arms": {arm: _changes(ARMS[arm]) for arm in arms}}
    table = pd.concat(ends, ignore_index=True).astype({"seed": "int16"})
    save(table, folder / f"{name}.parquet")
    write_about(folder, name, about)


def save(table, path) -> None:
    """Write how runs ended, losses in `KEPT`."""
    for column in ("loss", "exact"):
        losses = torch.tensor(table[column].to_numpy(), dtype=torch.float32)
        table = table.assign(**{column: round_to(losses, KEPT).numpy()})
    write_table(path, table)


if __name__ == "__main__":
    entry(functools.partial(command, "fourbits", __doc__, TASKS, record))
