"""The arms of `mixed` on the tasks of `small`: training, comparisons, records.

A record is `NAME.json`, where and with what it was made and how each run ended, and
`NAME.parquet`, its losses. They are made by

    python -m lowprec.studies.mixed_runs data/mixed digits   (minutes on a core, so is text)
    python -m lowprec.studies.mixed_runs data/mixed gpt --device cuda --data shards/pysource
    python -m lowprec.studies.mixed_runs data/mixed products --device cuda

and `digits-many` and `text-many`, with new seeds, on either.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import UserError, entry
from lowprec.numerics.formats import BF16, round_to, ulp
from lowprec.records import files, provenance
from lowprec.studies.mixed import ARMS, LossScale, Optimiser, per_seed, product, store
from lowprec.studies.small import TASKS


def losses(logits, targets):
    """Mean cross-entropy of each seed, (seeds,), in nats. targets: (seeds, ...)."""
    targets = targets.flatten(1)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape).mean(1)


def learning_rate(task, step):
    """Linear warm-up, then a cosine to zero at the task's last step."""
    if step < task.warmup:
        return task.lr * (step + 1) / task.warmup
    return task.lr * (1 + math.cos(math.pi * (step - task.warmup) / (task.steps - task.warmup))) / 2


class Watch:
    """What the last step's backward shows: shares that vanish, and where the gradients lie."""

    def __init__(self, seeds, device):
        self.counts = defaultdict(lambda: torch.zeros(2, seeds, device=device))
        self.exponents = defaultdict(lambda: torch.zeros(101, dtype=torch.int64, device=device))

    def __call__(self, site, g, rounded):
        there = (g != 0).flatten(1)
        gone = there & (rounded == 0).flatten(1)
        self.counts[site] += torch.stack([there.sum(1), gone.sum(1)])
        exponent = (g[g != 0].frexp().exponent - 1).clamp(-80, 20) + 80
        self.exponents[site] += exponent.bincount(minlength=101)


def train(task, arm, seeds, stop=None, device="cpu"):
    """Train one arm for all of `seeds`, a sequence; the same start and batches in every arm.

    stop: take only the first `stop` of the task's steps.

    Returns (curve, ends, exponents). curve: DataFrame with seed, step and loss, the mean of up to
    10 steps. ends: DataFrame with one row a seed: `loss` and `accuracy` on the held-out part in
    the arm's own arithmetic; `vanished_logits` and `vanished_inside`, shares of non-zero gradient
    entries that round to zero in the last step; `stalled`, the share of non-zero updates of the
    last quarter that left the weight as it was; `skipped` steps and the last loss `scale`.
    exponents: {site: {exponent: count}} of the last step's gradients, all seeds, loss scale
    included.
    """
    recipe, steps = ARMS[arm], min(stop or task.steps, task.steps)
    if task.steps <= task.warmup:
        raise UserError(f"steps={task.steps} must be above the warm-up of {task.warmup}")
    each = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
    weights = {name: torch.stack([w[name] for w in each]).to(device) for name in each[0]}
    generator = torch.Generator(device).manual_seed(0)
    if recipe.weights:
        weights = {name: round_to(w, recipe.fmt) for name, w in weights.items()}
    optimiser = Optimiser(list(weights.values()), task.first, task.second)
    scaler = LossScale(len(seeds), recipe.scaled, device)
    watch, stalled, curve = Watch(len(seeds), device), 0, []
    for step in range(steps):
        last = step == steps - 1

        def dot(a, b, site="inside", last=last):
            return product(a, b, recipe, functools.partial(watch, site) if last else None)

        rows = zip(*(task.rows(step, seed) for seed in seeds), strict=True)
        x, targets = (torch.stack(parts).to(device) for parts in rows)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        loss = losses(task.logits(leaves, x, dot), targets)
        grads = torch.autograd.grad((loss * scaler.scale).sum(), list(leaves.values()))
        scale = scaler.scale
        ok = scaler.accept(grads)
        grads = [g / per_seed(scale, g) for g in grads]
        changes = optimiser.updates(grads, learning_rate(task, step), ok)
        for (name, w), change in zip(weights.items(), changes, strict=True):
            weights[name], counts = store(w, change, recipe, generator)
            if step >= steps - max(1, steps // 4):
                stalled = stalled + counts
        curve.append(loss.detach())
    return (
        _curve(curve, seeds),
        _ends(task, weights, recipe, watch, stalled, scaler, seeds),
        {
            site: {str(i - 80): int(n) for i, n in enumerate(counts.tolist()) if n}
            for site, counts in watch.exponents.items()
        },
    )


def _curve(curve, seeds):
    table = torch.stack(curve).double().cpu().numpy()
    parts = [
        pd.DataFrame({"seed": seeds, "step": first, "loss": table[first : first + 10].mean(0)})
        for first in range(0, len(table), 10)
    ]
    return pd.concat(parts, ignore_index=True)


@torch.no_grad()
def _ends(task, weights, recipe, watch, stalled, scaler, seeds):
    def dot(a, b, site=None):
        return product(a, b, recipe)

    found, right, batches = 0.0, 0.0, task.held_out()
    for x, targets in batches:
        x, targets = (t.to(scaler.scale.device).expand(len(seeds), *t.shape) for t in (x, targets))
        logits = task.logits(weights, x, dot)
        found = found + losses(logits, targets) / len(batches)
        right = right + (logits.argmax(-1) == targets.flatten(1)).double().mean(1) / len(batches)
    columns = {
        "seed": list(seeds),
        "loss": found,
        "accuracy": right,
        "stalled": stalled[:, 1] / stalled[:, 0],
        "skipped": scaler.skipped,
        "scale": scaler.scale,
    }
    for site, (there, gone) in watch.counts.items():
        columns["vanished_" + site] = gone / there
    return pd.DataFrame({k: v if k == "seed" else v.cpu().numpy() for k, v in columns.items()})


def cast_inputs() -> dict[str, torch.Tensor]:
    """Bits of FP32 inputs at which a cast to BF16 goes wrong if anywhere, int32 tensors by kind."""
    rng = np.random.default_rng(0)
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)  # every BF16 number, NaN included
    sign = rng.integers(0, 2, 2**18, dtype=np.uint32) << np.uint32(31)
    some = rng.integers(1, 2**23, 2**18, dtype=np.uint32)
    beside = [upper + np.uint32(0x8000 + k) for k in (-1, 0, 1)]
    bits = {
        "ties and their neighbours": np.concatenate(beside),
        "subnormal numbers": sign | some,
        "NaN": sign | np.uint32(0x7F800000) | some,
        "random bits": rng.integers(0, 2**32, 2**20, dtype=np.uint32),
    }
    return {kind: torch.from_numpy(pattern.view(np.int32)) for kind, pattern in bits.items()}


def every_nan():
    """The bits of all FP32 NaN of both signs, a uint32 array."""
    every = np.arange(0x7F800001, 0x80000000, dtype=np.uint32)
    return np.concatenate([every, every | np.uint32(0x80000000)])


def compare_casts(pattern):
    """How many FP32 inputs torch's BF16 cast and `round_to` by scaling round to other bits.

    pattern: int32 tensor, the inputs' bits. One NaN is as good as another.
    """
    x = pattern.view(torch.float32)
    cast, scaled = x.bfloat16().float(), round_to(x.double(), BF16).float()
    same = (cast.view(torch.int32) == scaled.view(torch.int32)) | (cast.isnan() & scaled.isnan())
    return int((~same).sum())


def compare_all_casts(device, first=-(2**31), last=2**31, chunk=2**24):
    """`compare_casts` over all inputs from `first` until `last`, in chunks: by default all 2^32,
    which takes seconds on a GPU and minutes on a core."""
    offsets = torch.arange(chunk, dtype=torch.int32, device=device)
    return sum(compare_casts(offsets + start) for start in range(first, last, chunk))


def native_product(a, b):
    """PyTorch's own BF16 product, BF16, of operands that BF16 can hold."""
    return a.bfloat16() @ b.bfloat16()


def compare_product(inner: int, size: int = 256, device="cpu", positive=False):
    """PyTorch's own BF16 product beside the emulated one, on N(0, 1) or |N(0, 1)| operands.

    inner: length of the sums. Returns counts over size² outputs. `differ`: the emulation, an FP32
    product rounded once, has other bits. `outside`: further from the exact product than half an
    ulp and inner · 2^-24 Σ|a||b|, the bound of FP32 sums in any order. `outside_halves`: the same
    count for two halves that are rounded before they are added, so a program with a second
    rounding; and `outside_serial` for a BF16 accumulator.
    """
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(2, size, inner, generator=generator)
    a, b = round_to(draw.abs() if positive else draw, BF16).to(device)
    b = b.mT
    exact = a.double() @ b.double()
    allowed = ulp(exact, BF16) / 2 + inner * 2.0**-24 * (a.abs().double() @ b.abs().double())

    def outside(result):
        return int(((result.double() - exact).abs() > allowed).sum())

    native = native_product(a, b).float()
    first, second = (round_to(x @ y, BF16) for x, y in zip(a.chunk(2, 1), b.chunk(2, 0)))  # noqa: B905
    serial = torch.zeros_like(native)
    for k in range(inner):
        serial = round_to(serial + a[:, k : k + 1] * b[k : k + 1], BF16)
    return {
        "inner": inner,
        "positive": positive,
        "outputs": native.numel(),
        "differ": int((native != round_to(a @ b, BF16)).sum()),
        "outside": outside(native),
        "outside_halves": outside(round_to(first + second, BF16)),
        "outside_serial": outside(serial),
    }


def trick(pattern):
    """FP32 to BF16 on the bit pattern, a uint32 array: add half an ulp, less one where even, cut.

    The widely used one-liner; it wraps around, and it knows nothing of NaN.
    """
    return pattern + 0x7FFF + (pattern >> 16 & 1) & 0xFFFF0000


def record(folder, name, task, arms=tuple(ARMS), device="cpu", deadline=math.inf):
    """Train `arms` of a task and write `name.json` and `name.parquet` into `folder`.

    deadline: seconds after which no further arm is begun; the record then lists fewer arms.
    Existing files are never overwritten.
    """
    about, start = new_record(folder, name, device), time.monotonic()
    curves, ends, exponents = [], [], {}
    for arm in arms:
        if curves and time.monotonic() - start > deadline:
            break
        began = time.monotonic()
        seeds = range(task.first_seed, task.first_seed + task.seeds)
        curve, end, found = train(task, arm, seeds, device=device)
        curves.append(curve.assign(arm=arm))
        ends.append(end.assign(arm=arm))
        if arm == "fp32":
            exponents = found
        print(f"{name} {arm}: loss {end.loss.mean():.4f}, {time.monotonic() - began:.0f} s")
    about |= {"config": dataclasses.asdict(task), "seconds": round(time.monotonic() - start)}
    if "path" in about["config"]:  # the same tokens may lie anywhere
        tokens = task.data[0]
        about["config"]["path"], about["data_sha256"] = tokens.name, tokens.sha256
    ends = pd.concat(ends, ignore_index=True)
    about |= {"arms": {arm: dataclasses.asdict(ARMS[arm]) for arm in ends.arm.unique()}}
    about |= {"exponents": exponents, "ends": json.loads(ends.to_json(orient="split", index=False))}
    table = pd.concat(curves, ignore_index=True).astype({"seed": "int16", "step": "int16"})
    table = table.astype({"loss": "float32", "arm": "category"})
    table.to_parquet(folder / f"{name}.parquet", index=False, compression="zstd")
    write_about(folder, name, about)


def record_products(folder, device):
    """Write `products.json`: the hardware's BF16 casts and products beside the emulated ones."""
    about, found = new_record(folder, "products", device), []
    about |= {"inputs": 2**32, "casts": compare_all_casts(device)}
    flags = torch.backends.cuda.matmul
    for reduced in (False, True):
        flags.allow_bf16_reduced_precision_reduction = reduced
        for inner in (256, 4096):
            for positive in (False, True):
                result = compare_product(inner, device=device, positive=positive)
                found.append({"reduced_precision_reduction": reduced, **result})
                print(found[-1])
    write_about(folder, "products", about | {"products": found})


def write_about(folder, name, about):
    """Write `name.json`, one line a key: readable, and still small with many seeds."""
    compact = functools.partial(json.dumps, separators=(",", ":"))
    lines = ",\n".join(f" {compact(key)}: {compact(value)}" for key, value in about.items())
    (Path(folder) / f"{name}.json").write_text("{\n" + lines + "\n}\n")


def new_record(folder, name, device, kind="mixed"):
    """Where and with what a record is made. Raises `UserError` if it exists."""
    path = Path(folder) / f"{name}.json"
    if path.exists():
        raise UserError(f"{path} exists and is never overwritten; take another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    return {"format": f"lowprec-{kind}-1", "name": name, **provenance.provenance(device)}


def load(name, folder=None):
    """A record as (about, ends, curves); None if it does not exist. The last two are DataFrames."""
    folder = Path(folder) if folder else files.data_root() / "mixed"
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    about = json.loads(path.read_text())
    return about, pd.DataFrame(**about["ends"]), pd.read_parquet(folder / f"{name}.parquet")


def command(study: str, doc: str, tasks, record) -> None:
    """The command of a study that trains a record on CPUs: python -m lowprec.studies.STUDY."""
    parser = argparse.ArgumentParser(prog=f"python -m lowprec.studies.{study}", description=doc)
    parser.add_argument("folder", type=Path, help="where the record goes")
    parser.add_argument("name", choices=tasks)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", help="cuda, for a study that trains on it")
    args = parser.parse_args()
    device = {"device": args.device} if args.device else {}
    record(args.folder, args.name, workers=args.workers, **device)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.mixed_runs", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where the record goes")
    parser.add_argument("name", choices=(*TASKS, "products"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="token shards, for text and gpt")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--deadline", type=float, default=math.inf)
    args = parser.parse_args()
    if args.name == "products":
        return record_products(args.folder, args.device)
    given = {"path": args.data, "steps": args.steps, "seeds": args.seeds}
    given = {name: value for name, value in given.items() if value is not None}
    task = TASKS[args.name]
    if args.data and not hasattr(task, "path"):
        parser.error(f"{args.name} has its data in data/corpora; leave --data away")
    task = dataclasses.replace(task, **given)
    record(args.folder, args.name, task, device=args.device, deadline=args.deadline)


if __name__ == "__main__":
    entry(main)
