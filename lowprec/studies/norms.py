"""Layer norm in BF16, by where it rounds, and gains stored in blocks with a shared scale.

y = (x - mean) / deviation, dx = (g - mean g - y mean(g y)) / deviation, all in FP32 but for

    edges       x, y, g and dx are stored in BF16
    statistics  mean and 1 / deviation, and both means of the backward, are stored in BF16
    serial      all four sums are rounded to BF16 after each addition
    pairwise    the same, by halves: neighbours, then pairs of neighbours, and so on

Gains of a layer norm are near one another. A block of 32 in E4M3 has a power of two as its scale.
By the rule of OCP's MX that scale puts the largest of a block between 256 and 512, and what is
beyond 448, or near it, is clamped: all gains of a block, where they lie between 7/8 and 1.

A student learns from a teacher whose gains are such a block's. The record is made by

    python -m lowprec.studies.norms data/studies/small_parts gains

in a minute or two of a core: how each run ended (`gains.parquet`), and where (`gains.json`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import entry
from lowprec.numerics.scaling import Cast, quantise, scaled
from lowprec.records import files
from lowprec.studies import gaps, router
from lowprec.studies.mixed import Optimiser
from lowprec.studies.mixed_runs import command, learning_rate, new_record, write_about
from lowprec.studies.router import bf16
from lowprec.training.capture import Capture

WAYS = ("edges", "statistics", "serial", "pairwise")
WIDTHS = (384, 512, 1024, 2048, 4096)
EPS = 1e-5


def drawn(width: int, rows: int = 256, mean: float = 0.0, seed: int = 0):
    """Rows of N(mean, 1) and of gradients N(0, 1), each (rows, width) float32."""
    generator = torch.Generator().manual_seed(seed)
    x, g = torch.randn(2, rows, width, generator=generator)
    return x + mean, g


def total(x, way: str):
    """Sum over the last dimension, (rows, 1): "serial", "pairwise" or, by other names, in FP32."""
    if way == "serial":
        found = torch.zeros_like(x[:, 0])
        for column in x.T.contiguous():
            found = bf16(found + column)
        return found[:, None]
    if way == "pairwise":
        while x.shape[1] > 1:
            x = F.pad(x, (0, x.shape[1] % 2))
            x = bf16(x[:, ::2] + x[:, 1::2])
        return x
    return x.sum(1, keepdim=True)


def norm(x, g, way: str = ""):
    """(y, dx) for rows x and gradients g (rows, width); no gain. In the dtype of x."""
    edge = bf16 if way == "edges" else lambda t: t
    kept = bf16 if way == "statistics" else lambda t: t
    x, g, width = edge(x), edge(g), x.shape[1]
    centred = x - kept(total(x, way) / width)
    inverse = kept((total(centred.square(), way) / width + EPS).rsqrt())
    y = centred * inverse
    dx = inverse * (g - kept(total(g, way) / width) - y * kept(total(g * y, way) / width))
    return edge(y), edge(dx)


def errors(x, g, ways=WAYS) -> pd.DataFrame:
    """What each way does to y and dx, against float64: `size` and `size_back`, the part by which
    they are too large, along what is right; `error` and `error_back`, root mean square of the
    difference over that of what is right."""
    exact = norm(x.double(), g.double())
    rows = {}
    for way in ways:
        found = {}
        for name, mine, right in zip(("", "_back"), norm(x, g, way), exact, strict=True):
            square = right.square().sum()
            found[f"size{name}"] = float((mine * right).sum() / square - 1)
            found[f"error{name}"] = float(((mine - right).square().sum() / square).sqrt())
        rows[way] = found
    return pd.DataFrame(rows).T


def law(width: int) -> float:
    """By how much outputs are too large if squares of N(0, 1) are added one by one in BF16: what is
    added is a multiple of the sum's ulp, and its mean follows from the tail of the squares."""
    s = 0.0
    for _ in range(width):
        unit = 2.0 ** (math.frexp(s)[1] - 8) if s else 2.0**-20
        edges = unit * (torch.arange(max(1, min(4096, int(40 / unit)))) + 0.5)
        s += unit * float(torch.erfc((edges.double() / 2).sqrt()).sum()) if unit > 0.01 else 1.0
    return math.sqrt(width / s) - 1


CAPTURED = 256
"""Rows taken of each capture."""


def captured(folder=None) -> dict[str, torch.Tensor]:
    """Rows (CAPTURED, 384) by capture, float32: what attention reads in a GPT-2 of six layers, so a
    layer norm's output times its gain, in BF16."""
    folder = Path(folder) if folder else files.data_root() / "captures"
    paths = sorted(folder.glob("*.xz"))
    return {path.stem: Capture.load(path).tensors["x"][0, :CAPTURED].float() for path in paths}


def of_torch(x):
    """Outputs of torch's layer norm of BF16 rows that differ from FP32's rounded once: (count, the
    most ulps between them). x is rounded to BF16 first."""
    x = x.bfloat16()
    mine = F.layer_norm(x, x.shape[-1:])
    theirs = F.layer_norm(x.float(), x.shape[-1:]).bfloat16()
    apart = (mine.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    return int((apart > 0).sum()), int(apart.max())


# Gains in blocks


CASTS = {
    "floor": "e4m3_saturate@block32,mx",
    "floor-random": "e4m3_saturate:stochastic@block32,mx",
    "ceil": "e4m3_saturate@block32,pow2",
    "ceil-random": "e4m3_saturate:stochastic@block32,pow2",
    "exact": "e4m3_saturate@block32",
}
"""Casts by name. floor: a scale by OCP's rule. ceil: the next power of two where the largest would
clamp. exact: the largest is 448. random: rounded stochastically."""
HALF = 0.02
"""Gains lie within this part of their centre."""
PLACES = tuple(round(0.8 + 0.03 * i, 2) for i in range(40))
"""Centres of clusters, from 0.8 to 1.97."""


def cluster(centre: float, count: int, generator):
    """`count` gains spread evenly around `centre`, within a part `HALF` of it, (1, count)."""
    return centre * (1 + HALF * (2 * torch.rand(1, count, generator=generator) - 1))


def stored(gains, name: str, seed: int = 0) -> tuple[float, float]:
    """(mean relative error, share clamped) of gains (1, count) as one of `CASTS` stores them."""
    cast = Cast.parse(CASTS[name])
    generator = torch.Generator().manual_seed(seed)
    held = quantise(gains, cast, generator)
    back = scaled(gains, cast, torch.Generator().manual_seed(seed))
    scale = held.scale.expand_as(held.codes).reshape(gains.shape)
    beyond = gains.abs() / scale > cast.fmt.max * (1 + 2.0**-20)
    error = (back.double() / gains.double() - 1).mean()
    return float(error), float(beyond.double().mean())


@dataclass(frozen=True)
class Student:
    """`layers` residual blocks x + down relu(up (gain * norm(x))), taught by one with fixed gains.

    Teacher and student start with gains spread around a centre, within a part `HALF` of it.
    """

    lr: float = 3e-3
    steps: int = 200
    warmup: int = 20
    first: float = 0.9
    second: float = 0.95
    seeds: int = 12
    first_seed: int = 1300
    width: int = 64
    hidden: int = 128
    layers: int = 2
    batch: int = 128

    def init(self, generator, centre: float):
        c, h = self.width, self.hidden
        weights = {}
        for i in range(self.layers):
            weights[f"gain{i}"] = cluster(centre, c, generator)
            weights[f"up{i}"] = torch.randn(c, h, generator=generator) * math.sqrt(2 / c)
            weights[f"down{i}"] = torch.randn(h, c, generator=generator) / math.sqrt(h)
        return weights

    def outputs(self, w, x, cast=lambda gain: gain):
        for i in range(self.layers):
            inner = F.layer_norm(x, x.shape[-1:]) * cast(w[f"gain{i}"])
            x = x + (inner @ w[f"up{i}"]).relu() @ w[f"down{i}"]
        return x


TASKS = {"gains": Student()}
CENTRES = (0.95, 1.4)
ARMS = ("fp32", *CASTS)


def train(task: Student, arm: str, centre: float, seeds) -> pd.DataFrame:
    """Train students whose gains are stored as `arm` says, one of `CASTS` or "fp32"; the gradient
    passes the cast unchanged. Returns a row a seed: `early` and `loss`, mean squared errors of the
    first 20 and last 50 steps over the variance of the teacher's change of its input; `clamped`,
    the share of gains that are, and `error`, their mean relative error, both after the last step.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    starts = ([task.init(g, centre) for g in generators] for _ in range(2))
    teacher, weights = ({n: torch.stack([w[n] for w in ws]) for n in ws[0]} for ws in starts)
    optimiser = Optimiser(list(weights.values()), task.first, task.second)
    random = torch.Generator().manual_seed(0)
    ok, curve = torch.ones(len(seeds), dtype=torch.bool), []

    def cast(gain):
        if arm == "fp32":
            return gain
        return gain + (scaled(gain.detach(), Cast.parse(CASTS[arm]), random) - gain.detach())

    for step in range(task.steps):
        x = torch.stack([torch.randn(task.batch, task.width, generator=g) for g in generators])
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        wanted = task.outputs(teacher, x)
        loss = (task.outputs(leaves, x, cast) - wanted).square().mean((1, 2))
        loss = loss / (wanted - x).var((1, 2))
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        changes = optimiser.updates(grads, learning_rate(task, step), ok)
        weights = {n: w + c for (n, w), c in zip(weights.items(), changes, strict=True)}
        curve.append(loss.detach())
    table = torch.stack(curve).double()
    name = "floor" if arm == "fp32" else arm
    ends = [
        stored(torch.cat([weights[f"gain{i}"][k] for i in range(task.layers)], 1), name)
        for k in range(len(seeds))
    ]
    error, clamped = zip(*ends, strict=True)
    return pd.DataFrame({
        "seed": list(seeds), "early": table[:20].mean(0), "loss": table[-50:].mean(0),
        "clamped": clamped, "error": error,
    })  # fmt: skip


# Records


def read(folder=None) -> dict[float, gaps.Record]:
    """The students' record by the centre of their gains; raises UserError if there is none."""
    held = router.read(folder, "gains")
    return {
        centre: dataclasses.replace(held, ends=held.ends[held.ends.centre == centre])
        for centre in CENTRES
    }


def record(folder, which: str = "gains", workers=1) -> None:
    """Train all arms around both centres; write `gains.json` and `gains.parquet` into `folder`."""
    folder, start, task = Path(folder), time.monotonic(), TASKS[which]
    about = new_record(folder, which, "cpu", "norms")
    seeds, ends = range(task.first_seed, task.first_seed + task.seeds), []
    for arm, centre in itertools.product(ARMS, CENTRES):
        end = train(task, arm, centre, seeds)
        ends.append(end.assign(arm=arm, centre=centre))
        print(f"{arm} {centre}: {end.loss.mean():.5f}", flush=True)
    about |= {"config": dataclasses.asdict(task), "seconds": round(time.monotonic() - start)}
    about |= {"arms": CASTS}
    router.save(pd.concat(ends, ignore_index=True), folder / f"{which}.parquet")
    write_about(folder, which, about)


if __name__ == "__main__":
    entry(functools.partial(command, "norms", __doc__, TASKS, record))
