"""Eight bits everywhere, and who supplies the scale: loss scales, and unit scaling.

As Mellempudi et al. 2019 have it, by their abstract: all operands of products and the gradients of
weights are E5M2, results of products and the stored weights FP16, and the loss is scaled. A scale
that moves can meet an overflow that says nothing of its size, a spurious one. Here it is put in:
every so many steps a gradient counts as not finite.

The runs are short, so that overflows come and scales grow `FASTER` times as often as by default.

The records are made by

    python -m lowprec.studies.eight data/studies/eight images     (so are text and more)

in minutes of a core. They hold the loss with which each run ended (`images.parquet`), and where it
was made, means over seeds and the exponents of FP32's gradients (`images.json`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from lowprec import UserError, entry
from lowprec.evidence.claims import Measured
from lowprec.numerics.formats import E5M2
from lowprec.numerics.recipe import Recipe, linear
from lowprec.numerics.scaling import LossRule, LossScaler
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies import gaps
from lowprec.studies.bits import cut
from lowprec.studies.deviation import Estimate, estimate
from lowprec.studies.mixed import Optimiser, per_seed
from lowprec.studies.mixed_runs import (
    command,
    learning_rate,
    losses,
    new_record,
    write_about,
)
from lowprec.studies.moments import SMALL, Dense
from lowprec.studies.small import Text

TASKS = {
    "images": Dense(
        lr=0.1, steps=200, warmup=20, second=None, seeds=64, first_seed=1100
    ),
    "text": Text(
        lr=0.01, steps=240, warmup=20, seeds=6, first_seed=1100, width=32, length=32, batch=8,
        classes=256,
    ),
}  # fmt: skip
TASKS["more"] = dataclasses.replace(TASKS["text"], seeds=12, first_seed=1200)
MANY = 500
"""Runs up to which a record keeps more of each than its loss."""
FASTER = 20
"""How much more often than by default a loss scale grows, and overflows are put in."""
EVERY, SPURIOUS = 2000 // FASTER, 500 // FASTER
"""Steps until a scale doubles, Apex's 2,000, and between overflows put in, one in 500."""
EIGHT = (
    "FP32+x=e5m2+w=e5m2+g_dx=e5m2{0}+w_dx=e5m2+x_dw=e5m2+g_dw=e5m2{0}+out=fp16+grad=e5m2{0}"
    "+master=fp16"
)
RECIPES = {"nearest": EIGHT.format(""), "random": EIGHT.format(":stochastic")}
"""How gradients are rounded to E5M2: to nearest, or stochastically."""


def rules(steps: int) -> dict[str, str]:
    """Loss scales by name, for a run of so many steps."""
    moving = f"dynamic,from2^8,every{EVERY}"
    minimum = ",".join(f"least{s}@{i * steps // 3}" for i, s in enumerate(("2^7", "2^10", "2^13")))
    return {
        "1": "1", "2^7": "2^7", "2^13": "2^13", "moving": moving, "minimum": f"{moving},{minimum}",
    }  # fmt: skip


RULES = tuple(rules(3))


@dataclass(frozen=True)
class Arm:
    """A recipe, a loss scale, and the steps between overflows that are put in, 0 for none."""

    recipe: str = "FP32"
    rule: str = "1"
    spurious: int = 0


def arms(steps: int) -> dict[str, Arm]:
    """Arms by name: "fp32", and a scale, a rounding and perhaps "spurious" with a blank between."""
    found = {"fp32": Arm()}
    for (name, rule), how, spurious in (
        (pair, how, spurious)
        for pair in rules(steps).items()
        for how in RECIPES
        for spurious in (0, SPURIOUS)
    ):
        found[" ".join([name, how] + ["spurious"] * bool(spurious))] = Arm(
            RECIPES[how], rule, spurious
        )
    return found


TEXT = (
    "fp32", *(f"{scale} {how}" for scale in ("1", "2^7", "2^13") for how in RECIPES),
    *(f"{scale} {how} spurious" for scale in ("moving", "minimum") for how in RECIPES),
    "2^13 nearest spurious",
)  # fmt: skip
"""Arms of the language model, which is slower."""
SOME = {"text": TEXT, "more": ("1 nearest", "1 random", "2^13 nearest")}
"""Arms of a task that lacks some. `more` has other seeds, for rules written after `text`."""


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, see):
        ctx.see = see
        return y.view_as(y)

    @staticmethod
    def backward(ctx, g):
        ctx.see(g)
        return g, None


def train(task, arm: Arm, seeds, stop=None, watch=None, device="cpu"):
    """Train for all of `seeds`; equal starts and batches in every arm.

    stop: take only the first steps. watch(step, site, g): sees the gradient of each product's
    result, loss scale included, before it is rounded; site: "logits", or another name. A task may
    have an `objective` of its own, (logits, targets) to what is differentiated; without it that is
    the sum of the seeds' losses.

    Returns (curve, ends, weights). curve: DataFrame (seed, step, loss), means of ten steps. ends:
    DataFrame with a row a seed: `loss`, the mean of the last 50 steps; `accuracy` on the
    held-out part, in the arm's own arithmetic; `vanished`, the share of non-zero gradients of
    logits in the last 50 steps that E5M2 rounds to zero, and `vanished_inside`, of other products;
    `norm`, the root of the sum of squares of the matrices; `skipped` steps; the last loss `scale`;
    `ended`: of `LossScaler`, or the step of the first loss that is not finite.
    """
    recipe, steps = Recipe.parse(arm.recipe), min(stop or task.steps, task.steps)
    rule = LossRule.parse(arm.rule)
    recipe.require(task.steps)
    rule.require(task.steps)
    each = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
    weights = {name: torch.stack([w[name] for w in each]).to(device) for name in each[0]}
    generator = torch.Generator(device).manual_seed(0)
    casters = recipe.casters(generator)
    big = {name for name, w in weights.items() if w[0].numel() >= SMALL}
    optimiser = Optimiser(list(weights.values()), task.first, task.second)
    scale, curve, broken = LossScaler(rule, len(seeds), device), [], [None] * len(seeds)
    counts = {site: torch.zeros(2, len(seeds), device=device) for site in ("logits", "inside")}

    def seen(step, site, g):
        if watch:
            watch(step, site, g)
        if step >= steps - 50:
            flat = g.flatten(1).abs()
            gone = (flat > 0) & (flat <= E5M2.min_subnormal / 2)
            counts["logits" if site == "logits" else "inside"] += torch.stack(
                [(flat > 0).sum(1), gone.sum(1)]
            )

    for step in range(steps):

        def dot(a, b, site="inside", step=step):
            return _Seen.apply(linear(a, b, casters), functools.partial(seen, step, site))

        rows = zip(*(task.rows(step, seed) for seed in seeds), strict=True)
        x, targets = (torch.stack(parts).to(device) for parts in rows)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        logits = task.logits(leaves, x, dot)
        loss = losses(logits.detach(), targets)
        grads = torch.autograd.grad(
            logits, list(leaves.values()), _pull(task, logits, targets, scale.scale)
        )
        grads = [
            casters["grad"](g) if name in big else g for name, g in zip(weights, grads, strict=True)
        ]
        fine = torch.stack([g.flatten(1).isfinite().all(1) for g in grads]).all(0)
        if arm.spurious and (step + 1) % arm.spurious == 0:
            fine = torch.zeros_like(fine)
        grads = [g / per_seed(scale.scale, g) for g in grads]
        scale.accept(fine)
        changes = optimiser.updates(grads, learning_rate(task, step), fine)
        weights = {
            name: casters["master"](w + c)
            for (name, w), c in zip(weights.items(), changes, strict=True)
        }
        curve.append(loss)
        for i, value in enumerate(loss.tolist()):
            if broken[i] is None and not math.isfinite(value):
                broken[i] = f"loss not finite, step {step + 1}"
    table = torch.stack(curve).double().cpu()
    counts = {site: count.cpu() for site, count in counts.items()}
    squares = sum(weights[name].double().square().flatten(1).sum(1) for name in sorted(big))
    ends = pd.DataFrame({
        "seed": list(seeds),
        "loss": table[-50:].mean(0).numpy(),
        "accuracy": _accuracy(task, weights, casters),
        "vanished": (counts["logits"][1] / counts["logits"][0]).numpy(),
        "vanished_inside": (counts["inside"][1] / counts["inside"][0]).numpy(),
        "norm": squares.sqrt().cpu().numpy(),
        "skipped": scale.skipped.cpu().numpy(),
        "scale": scale.scale.cpu().numpy(),
        "ended": [a or b for a, b in zip(broken, scale.ended, strict=True)],
    })  # fmt: skip
    parts = [
        pd.DataFrame({"seed": seeds, "step": at, "loss": table[at : at + 10].mean(0)})
        for at in range(0, steps, 10)
    ]
    return pd.concat(parts, ignore_index=True), ends, weights


def _pull(task, logits, targets, scale):
    """The gradient of the scaled objective at the logits, FP32."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        aim = getattr(task, "objective", lambda *pair: losses(*pair).sum())(leaf, targets)
    return torch.autograd.grad(aim, leaf)[0] * per_seed(scale, logits)


@torch.no_grad()
def _accuracy(task, weights, casters):
    right, batches = 0.0, task.held_out()
    one = next(iter(weights.values()))
    for x, targets in batches:
        x, targets = (t.to(one.device).expand(len(one), *t.shape) for t in (x, targets))
        logits = task.logits(weights, x, lambda a, b, site=None: linear(a, b, casters))
        right = right + (logits.argmax(-1) == targets.flatten(1)).double().mean(1) / len(batches)
    return right.cpu().numpy()


class Exponents:
    """A watch that counts gradients by the power of two below them, of some steps."""

    def __init__(self, steps):
        self.steps, self.counts = set(steps), {}

    def __call__(self, step, site, g):
        if step in self.steps:
            exponents = (g[(g != 0) & g.isfinite()].frexp().exponent - 1).unique(return_counts=True)
            counts = dict(zip(*(t.tolist() for t in exponents), strict=True))
            self.counts[site] = self.counts.get(site, Counter()) + Counter(counts)


# Records


@dataclass(frozen=True)
class Record(gaps.Record):
    """One task in its arms; its `loss` is the mean of the last 50 steps, and what is worse than
    guessing guesses. Courses are not kept."""

    curves: pd.DataFrame | None = None

    @property
    def exponents(self) -> dict[str, dict[str, int]]:
        """FP32's gradients of the last 50 steps by site: {power of two: count}."""
        return self.about["exponents"]

    def more(self, arm: str, base: str) -> Estimate:
        """The mean loss less that of another arm with the same seed (nats)."""
        return estimate((self.loss[arm] - self.loss[base]).tolist())

    def above(self, arm: str, base: str) -> pd.Series:
        """Whether the loss ends above that of another arm, by seed."""
        return self.loss[arm] > self.loss[base]


def read(task: str, folder=None) -> Record:
    """The record of a task; raises UserError if there is none."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "eight"
    if (found := load(folder, task)) is None:
        raise UserError(f"there is no record {task} in {folder}: make it as its study says")
    about, ends = found
    guess = math.log(about["config"].get("classes", 10))
    return Record(about, ends.assign(loss=ends.loss.fillna(guess).clip(upper=guess)))


def last(arm) -> pd.Series:
    """The mean loss of the last 100 steps of an arm of a campaign, by seed, of what is recorded."""
    return pd.Series({seed: run.metrics.loss[-100:].mean() for seed, run in arm.by_seed.items()})


def apart(arms: dict, arm: str, base: str) -> pd.Series | None:
    """`last` less that of another arm, for seeds that both have; None without any."""
    gap = (last(arms[arm]) - last(arms[base])).dropna()
    return gap if len(gap) else None


def off(gap: pd.Series | None) -> Measured | None:
    """The size of a mean gap, over so many seeds; None without any."""
    return None if gap is None else Measured(abs(gap.mean()), len(gap))


def record(folder, name: str, some=None, workers=1) -> None:
    """Train `some` arms of a task, by default all it has; write `name.json` and `name.parquet`.

    workers: one, as all seeds of an arm are trained at once.
    """
    folder, start, task = Path(folder), time.monotonic(), TASKS[name]
    about = new_record(folder, name, "cpu", "eight")
    every = arms(task.steps)
    some = some or SOME.get(name, tuple(every))
    seeds = range(task.first_seed, task.first_seed + task.seeds)
    ends, seen = [], Exponents(range(task.steps - 50, task.steps))
    torch.set_num_threads(workers)
    for arm in some:
        watch = seen if arm == "fp32" else None
        _, end, _ = train(task, every[arm], seeds, watch=watch)
        ends.append(end.assign(arm=arm))
        print(f"{name} {arm}: done", flush=True)
    about |= {"config": dataclasses.asdict(task), "seconds": round(time.monotonic() - start)}
    about |= {"recipes": RECIPES, "rules": rules(task.steps), "spurious": SPURIOUS}
    counts = {site: dict(sorted(c.items())) for site, c in seen.counts.items()}
    save(folder, name, about | {"exponents": counts}, ends)


def save(folder, name, about, ends) -> None:
    """Write a record: `NAME.parquet` with the loss of each run and, of up to `MANY`, its norm, with
    16 stored bits; `NAME.json` with the means over seeds of all else."""
    table = pd.concat(ends, ignore_index=True)
    keys = [column for column in ("arm", "rate") if column in table]
    kept = ["loss", "norm"] if len(table) <= MANY else ["loss"]
    means = table.groupby(keys, sort=False).mean(numeric_only=True).reset_index()
    means = means.drop(columns=["seed", *kept])
    rounded = means.drop(columns=keys).round(4)
    means = pd.concat([means[keys], rounded], axis=1).to_json(orient="split", index=False)
    about |= {"means": json.loads(means)}
    short = {
        name: cut(torch.tensor(table[name].to_numpy(), dtype=torch.float32), 16, "nearest").numpy()
        for name in kept
    }
    table = table[[*keys, "seed", *kept, "ended"]].assign(**short)
    table = table.astype({"arm": "category", "seed": "int16", "ended": "category"})
    write_table(Path(folder) / f"{name}.parquet", table)
    write_about(folder, name, about)


def load(folder, name) -> tuple[dict, pd.DataFrame] | None:
    """What `save` wrote: (about, ends), with the means of an arm at each of its runs."""
    path = Path(folder) / f"{name}.json"
    if not path.exists():
        return None
    about = json.loads(path.read_text())
    means = pd.DataFrame(**about["means"])
    keys = [column for column in ("arm", "rate") if column in means]
    ends = pd.read_parquet(path.with_suffix(".parquet")).astype({"arm": "object"})
    return about, ends.merge(means, on=keys, how="left", validate="many_to_one")


if __name__ == "__main__":
    entry(functools.partial(command, "eight", __doc__, TASKS, record))
