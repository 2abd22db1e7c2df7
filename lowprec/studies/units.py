"""Unit scaling: constants in place of a loss scale, in a small language model.

`Net` is one language model in two parametrisations, with equal operations. Plain: weights as
GPT-2's, the mean loss. Unit: weights from N(0, 1), and constants in every operation, forward and
backward, so that tensors and gradients have about unit size at the start. Constants that depend on
a function are those of `unit_scaling.functional`; its products are written out here, since their
operands are rounded and all seeds are trained at once. Neither ties its embeddings.

The record is made by

    python -m lowprec.studies.units data/studies/eight units

in minutes of a core; `units-gpt --device cuda` makes that of a net 384 wide on a GPU. It holds the
loss of each run (`units.parquet`), means over seeds and sizes of all tensors after training
(`units.json`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
import unit_scaling.functional as U
from unit_scaling.scale import scale_bwd, scale_fwd

from lowprec import UserError, entry
from lowprec.records import files
from lowprec.studies.eight import Arm, load, save, train
from lowprec.studies.mixed_runs import command, losses, new_record
from lowprec.studies.small import Text


@dataclass(frozen=True)
class Net(Text):
    """`small.Text` with embeddings that are not tied, and in unit scaling if `unit`."""

    lr: float = 0.01
    steps: int = 200
    warmup: int = 20
    seeds: int = 6
    first_seed: int = 1300
    width: int = 32
    length: int = 32
    batch: int = 8
    classes: int | None = 256
    unit: bool = False

    @property
    def vocabulary(self) -> int:
        return self.classes or 50257

    def init(self, generator):
        weights = super().init(generator)
        weights["head"] = 0.02 * torch.randn(self.width, self.vocabulary, generator=generator)
        if self.unit:
            same = torch.Generator().manual_seed(int(generator.initial_seed()))
            for name, w in weights.items():
                if not name.startswith("norm"):
                    weights[name] = torch.randn(w.shape, generator=same)
        return weights

    def objective(self, logits, targets):
        """What is differentiated: the sum of mean losses, or the library's unit-scaled loss."""
        if self.unit:
            return U.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return losses(logits, targets).sum()

    def logits(self, w, tokens, dot):
        """tokens: (seeds, batch, length) -> (seeds, batch · length, classes)"""
        seeds, batch, length = tokens.shape
        rows = batch * length
        hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        linear, product = (unit_linear, unit_product) if self.unit else (plain, plain)
        softmax, gelu = (U.softmax, U.gelu) if self.unit else (torch.softmax, F.gelu)

        def parameter(name, used):
            """A weight whose elements are each used about so many times."""
            return scale_bwd(w[name], used**-0.5) if self.unit else w[name]

        def norm(x, name):
            return F.layer_norm(x, x.shape[-1:]) * parameter(name, rows)

        def add(x, branch):
            if not self.unit:
                return x + branch(x)
            split, skip = U.residual_split(x)
            return U.residual_add(branch(split), skip)

        def attend(x, i):
            heads = linear(dot, norm(x, f"norm_attn{i}"), w[f"qkv{i}"], f"qkv{i}")
            heads = heads.view(seeds, batch, length, 3, self.heads, -1)
            q, k, v = heads.permute(3, 0, 1, 4, 2, 5)
            s = product(dot, q, k.mT, f"scores{i}")
            s = s if self.unit else s / math.sqrt(q.shape[-1])
            p = softmax(s.masked_fill(hidden, -math.inf), -1)
            o = product(dot, p, v, f"values{i}").transpose(2, 3).reshape(x.shape)
            return linear(dot, o, w[f"proj{i}"], f"proj{i}")

        def feed(x, i):
            up = linear(dot, norm(x, f"norm_mlp{i}"), w[f"up{i}"], f"up{i}")
            return linear(dot, gelu(up), w[f"down{i}"], f"down{i}")

        table = parameter("token", rows / self.vocabulary)
        offset = torch.arange(seeds, device=tokens.device).view(-1, 1, 1) * self.vocabulary
        token = F.embedding(tokens + offset, table.flatten(0, 1))
        position = parameter("position", batch)[:, None].expand_as(token)
        x = (U.add(token, position) if self.unit else token + position).flatten(1, 2)
        for i in range(self.layers):
            x = add(x, functools.partial(attend, i=i))
            x = add(x, functools.partial(feed, i=i))
        x = norm(x, "norm")
        if not self.unit:
            return dot(x, w["head"], "logits")
        x, head = scale_bwd(x, self.vocabulary**-0.5), scale_bwd(w["head"], rows**-0.5)
        return scale_fwd(dot(x, head, "logits"), self.width**-0.5)


def plain(dot, a, b, site):
    return dot(a, b, site)


def unit_linear(dot, x, w, site):
    """The library's `linear`, of which the output's constant is the input gradient's as well."""
    x = scale_bwd(x, w.shape[-2] ** -0.5)
    return scale_fwd(dot(x, scale_bwd(w, x.shape[-2] ** -0.5), site), w.shape[-2] ** -0.5)


def unit_product(dot, a, b, site):
    """The library's `matmul`, with the output's constant everywhere."""
    by = a.shape[-1] ** -0.5
    return scale_fwd(dot(scale_bwd(a, by), scale_bwd(b, by), site), by)


TASKS = {
    "units": Net(),
    "units-gpt": Net(
        steps=600, warmup=60, seeds=3, classes=None, width=384, layers=6, heads=6, length=256,
        batch=16, path="shards/pysource",
    ),
}  # fmt: skip
_IN, _OUT = "e4m3_saturate", "e5m2_saturate{0}"
EIGHT = f"FP32+x={_IN}+w={_IN}+g_dx={_OUT}+w_dx={_IN}+x_dw={_IN}+g_dw={_OUT}"
RECIPES = {
    "fp32": "FP32",
    "eight": EIGHT.format(""),
    "random": EIGHT.format(":stochastic"),
    "scaled": "FP8",
}
"""Operands of products: as they are; E4M3, gradients E5M2, without a scale; the same with gradients
rounded stochastically; and with a scale for each matrix that follows its largest number."""
RATES = {"plain": (0.001, 0.003, 0.01), "unit": (0.01, 0.03, 0.1)}
LOWER = {"plain": (0.0003, 0.001, 0.003), "unit": (0.01, 0.03, 0.1)}
"""Learning rates of the two parametrisations; with FP32 and seeds of a pilot, 9000 and 9001, the
middle ones were best. LOWER: those of the larger net."""


def arms(name: str) -> list[tuple[str, str, float]]:
    """(parametrisation, recipe, rate) of every run of a task."""
    rates = LOWER if name == "units-gpt" else RATES
    return [(kind, recipe, rate)
            for kind in rates
            for recipe in RECIPES if kind == "plain" or recipe in ("fp32", "eight")
            for rate in rates[kind]]  # fmt: skip


def net(kind: str, rate: float, name: str = "units") -> Net:
    return dataclasses.replace(TASKS[name], unit=kind == "unit", lr=rate)


def sizes(task: Net, weights, seed: int) -> pd.Series:
    """Standard deviation of every operand, forward and backward, and of every gradient of a weight,
    in FP32: by name, as "qkv0 left", "qkv0 gradient" or "qkv0 weight's gradient"."""
    found = {}

    def dot(a, b, site):
        y = a @ b
        found[f"{site} left"], found[f"{site} right"] = a, b
        y.register_hook(lambda g: found.update({f"{site} gradient": g}))
        return y

    device = weights["head"].device
    x, targets = (t[None].to(device) for t in task.rows(0, seed))
    leaves = {name: w[:1].detach().requires_grad_() for name, w in weights.items()}
    aim = task.objective(task.logits(leaves, x, dot), targets)
    grads = torch.autograd.grad(aim, list(leaves.values()))
    found |= {f"{name} weight's gradient": g for name, g in zip(leaves, grads, strict=True)}
    return pd.Series({k: float(t.detach().std()) for k, t in found.items()})


def before(kind: str, seed: int) -> pd.Series:
    """`sizes` before the first step."""
    task = net(kind, 0.0)
    weights = task.init(torch.Generator().manual_seed(seed))
    return sizes(task, {name: w[None] for name, w in weights.items()}, seed)


def beyond(sizes: pd.Series) -> pd.Series:
    """How many octaves a size is from 1."""
    return sizes.map(math.log2).abs()


def drawn(length: int, width: int = 4096, draws: int = 256, seed: int = 0) -> pd.DataFrame:
    """Standard deviations of functions of N(0, 1) and of their gradients, for gradients of N(0, 1).

    length: of the softmax. Rows: gelu and softmax. Columns: `out` and `gradient` with the constants
    of the library, each with its own, `plain out` and `plain gradient` without.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for name, function, scaled, shape in (
        ("gelu", F.gelu, functools.partial(U.gelu, constraint=None), (draws, width)),
        ("softmax", lambda x: torch.softmax(x, -1),
         lambda x: U.softmax(x, -1, constraint=None), (draws * width // length, length)),
    ):  # fmt: skip
        x, g = torch.randn(2, *shape, generator=generator)
        found = []
        for f in (function, scaled):
            leaf = x.clone().requires_grad_()
            y = f(leaf)
            found += [y.detach(), *torch.autograd.grad(y, leaf, g)]
        y, dy, unit, dunit = (float(t.std()) for t in found)
        rows[name] = {"out": unit, "gradient": dunit, "plain out": y, "plain gradient": dy}
    return pd.DataFrame(rows).T


# Records


@dataclass(frozen=True)
class Record:
    """`Net` in its arms: how runs ended, and sizes of tensors after training in FP32."""

    about: dict
    ends: pd.DataFrame

    def loss(self, kind: str, recipe: str, rate: float | None = None) -> pd.Series:
        """The loss by seed, at a rate or at the best of an arm, by its mean; what is worse than
        guessing guesses."""
        some = self.ends[self.ends.arm == f"{kind} {recipe}"]
        guess = math.log(self.about["config"]["classes"] or 50257)
        some = some.assign(loss=some.loss.fillna(guess).clip(upper=guess))
        table = some.pivot(index="seed", columns="rate", values="loss")
        return table[rate or table.mean().idxmin()]

    def cost(self, kind: str, recipe: str, rate: float | None = None) -> pd.Series:
        """The loss less that in FP32 with the same seed (nats), each at a rate or at its best."""
        return self.loss(kind, recipe, rate) - self.loss(kind, "fp32", rate)

    def sizes(self, kind: str) -> pd.Series:
        """`sizes` of the first seed after training in FP32, at the middle rate."""
        found = self.about["sizes"]
        return pd.Series(found[kind], index=found["names"])


def read(folder=None, name: str = "units") -> Record:
    """The record; raises UserError if there is none."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "eight"
    if (found := load(folder, name)) is None:
        raise UserError(f"there is no record {name} in {folder}: make it as its study says")
    return Record(*found)


def record(folder, name: str = "units", some=None, workers=1, device="cpu") -> None:
    """Train `some` of a task's `arms`, by default all; write `NAME.json` and `NAME.parquet`.

    workers: one, as all seeds of an arm are trained at once.
    """
    folder, start, task = Path(folder), time.monotonic(), TASKS[name]
    about = new_record(folder, name, device, "eight")
    seeds = range(task.first_seed, task.first_seed + task.seeds)
    ends, found = [], {}
    torch.set_num_threads(workers)
    every = some or arms(name)
    for kind, recipe, rate in every:
        task = net(kind, rate, name)
        _, end, weights = train(task, Arm(RECIPES[recipe]), seeds, device=device)
        ends.append(end.assign(arm=f"{kind} {recipe}", rate=rate))
        if recipe == "fp32" and rate == sorted({r for k, _, r in every if k == kind})[-2:][0]:
            after = sizes(task, weights, seeds[0])
            found |= {"names": list(after.index), kind: [float(f"{x:.4g}") for x in after]}
        print(f"{kind} {recipe} {rate}: done", flush=True)
    about |= {"config": dataclasses.asdict(TASKS[name]), "recipes": RECIPES, "sizes": found}
    about |= {"data_sha256": TASKS[name].data[0].sha256}
    save(folder, name, about | {"seconds": round(time.monotonic() - start)}, ends)


if __name__ == "__main__":
    entry(functools.partial(command, "units", __doc__, TASKS, record))
