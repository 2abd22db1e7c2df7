"""The small parts of a router, one at a time in BF16, and a mixture of experts that trains with it.

A router sends each token to the expert with its largest probability. Its parts:

    logits      the product of a token and the router's weights, operands and result
    softmax     exponentials, their sum, probabilities
    gate        the probability by which an expert's output is multiplied
    count       the running number of an expert's tokens, which is the slot of the next one
    mask        the sum of ones behind the share of tokens that an expert has
    number      the number of tokens that means divide by, as a sum of ones

Sums of ones are rounded after each addition, so in BF16 they stop at 256: 257 lies half-way to 258,
and ties go to the even digit. Tokens with one slot are added up, and each gets what the expert
makes of the sum, as in the appendix of Switch Transformers, whose dispatch is a product with a
one-hot tensor. Everything else is FP32. The record is made by

    python -m lowprec.studies.router data/studies/small_parts mixture   (so are later, images)

in minutes of a core: how each run ended (`mixture.parquet`), and where (`mixture.json`).
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
from typing import NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import UserError, entry
from lowprec.numerics.formats import BF16, round_to
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.studies import gaps
from lowprec.studies.bits import cut
from lowprec.studies.mixed import Optimiser
from lowprec.studies.mixed_runs import command, learning_rate, losses, new_record, write_about
from lowprec.studies.small import Digits, Text

SITES = ("logits", "softmax", "gate", "count", "mask", "number")
STOP = 256
"""Where a sum of ones in BF16 stops."""
JITTER = 0.01
ARMS = {
    "fp32": (),
    **{site: (site,) for site in SITES},
    "stored": ("stored",),
    "random": ("random",),
    "router": SITES,
    "integers": ("logits", "softmax", "gate"),
    "jitter": ("jitter",),
    "unbalanced": ("unbalanced",),
    "last": ("count", "last"),
    "without": ("without",),
}
"""Parts in BF16 by arm. stored: the count is summed in FP32 and stored in BF16. random: it is
rounded stochastically after each addition. integers: counts are integers, the rest is in BF16.
jitter: FP32, with the router's input times U(1 - 0.01, 1 + 0.01). unbalanced: FP32, without the
loss that balances experts. last: the count is in BF16 and a slot keeps its last token, not the sum.
without: FP32, with gates of zero, so that experts do nothing."""
LATER = ("last", "without")
"""Arms that were thought of when others had been seen; a record of their own."""


def bf16(x):
    """x as BF16 stores it, float32; its gradient is stored in BF16 as well."""
    return x.bfloat16().float()


class Routing(NamedTuple):
    """Where tokens go: `expert` and `slot` (seeds, tokens) int64, `gate` (seeds, tokens), `logits`
    and `probabilities` (seeds, tokens, experts), and the loss that balances experts (seeds,)."""

    expert: torch.Tensor
    slot: torch.Tensor
    gate: torch.Tensor
    logits: torch.Tensor
    probabilities: torch.Tensor
    balance: torch.Tensor


def ranks(expert, experts: int):
    """How many tokens before it went to the same expert, (seeds, tokens) int64."""
    seen = F.one_hot(expert, experts).cumsum(1)
    return seen.gather(2, expert[..., None])[..., 0] - 1


def slots(expert, experts: int, how: str = "", generator=None):
    """The slot of each token by a count that is exact, "count", "stored" or "random" as in `ARMS`.

    expert: (seeds, tokens) int64. generator: for "random".
    """
    rank = ranks(expert, experts)
    if how == "count":
        return rank.clamp(max=STOP)
    if how == "stored":
        return round_to(rank.float(), BF16).long()
    if how == "random":
        number = torch.arange(int(rank.max()) + 1, dtype=torch.float32)
        counts = number.repeat(len(expert), experts, 1)
        for i in range(STOP + 1, counts.shape[2]):
            counts[..., i] = round_to(counts[..., i - 1] + 1, BF16, "stochastic", generator)
        flat = expert * counts.shape[2] + rank
        return counts.flatten(1).gather(1, flat).long()
    return rank


def route(x, w, sites=(), generator=None) -> Routing:
    """Route x (seeds, tokens, width) by w (seeds, width, experts), with `sites` in BF16."""
    if "jitter" in sites:
        x = x * (1 + JITTER * (2 * torch.rand(x.shape, generator=generator) - 1))
    logits = bf16(bf16(x) @ bf16(w)) if "logits" in sites else x @ w
    shifted = logits - logits.amax(-1, keepdim=True).detach()
    if "softmax" in sites:
        powers = bf16(bf16(shifted).exp())
        probabilities = bf16(powers / bf16(powers.sum(-1, keepdim=True)))
    else:
        probabilities = shifted.softmax(-1)
    gate, expert = probabilities.max(-1)
    gate = bf16(gate) if "gate" in sites else 0 * gate if "without" in sites else gate
    experts, tokens = w.shape[-1], x.shape[1]
    how = next((site for site in ("count", "stored", "random") if site in sites), "")
    ones = F.one_hot(expert, experts).sum(1)
    ones = ones.clamp(max=STOP) if "mask" in sites else ones
    number = min(tokens, STOP) if "number" in sites else tokens
    share, mean = ones / number, probabilities.sum(1) / number
    balance = experts * (share * mean).sum(-1)
    slot = slots(expert, experts, how, generator)
    return Routing(expert, slot, gate, logits, probabilities, balance)


def sharing(expert, slot, experts: int):
    """Which tokens have a slot that another token has, too, (seeds, tokens) bool."""
    place = slot * experts + expert
    size = int(place.max()) + 1
    held = torch.zeros(len(expert), size, dtype=torch.int64)
    held.scatter_add_(1, place, torch.ones_like(place))
    return held.gather(1, place) > 1


def last(place):
    """Which tokens are the last of their place, (seeds, tokens) bool; place: (seeds, tokens)."""
    number = torch.arange(place.shape[1]).expand_as(place)
    held = torch.full((len(place), int(place.max()) + 1), -1)
    held.scatter_reduce_(1, place, number, "amax")
    return held.gather(1, place) == number


def mixture(x, routing: Routing, up, down, capacity: int, add: bool = True):
    """The experts' outputs by token, times the gate; zero for tokens beyond the capacity.

    x: (seeds, tokens, width). up, down: (seeds, experts, width, hidden) and (seeds, experts,
    hidden, out). add: whether tokens of one slot are added up, or the last one stays.
    """
    seeds, tokens, width = x.shape
    kept = (routing.slot < capacity)[..., None]
    place = routing.expert * capacity + routing.slot.clamp(max=capacity - 1)
    read = kept if add else kept & last(place)[..., None]
    empty = x.new_zeros(seeds, up.shape[1] * capacity, width)
    inputs = empty.scatter_add(1, place[..., None].expand(x.shape), x * read)
    outputs = (F.relu(inputs.unflatten(1, (-1, capacity)) @ up) @ down).flatten(1, 2)
    taken = outputs.gather(1, place[..., None].expand(-1, -1, outputs.shape[2]))
    return taken * kept * routing.gate[..., None]


SPREADS, EXPERTS = (0.1, 0.3, 1.0, 3.0), (8, 64)
"""Standard deviations of drawn logits, and numbers of experts."""


def drawn(spread: float, experts: int, tokens: int = 8192, width: int = 64, seed: int = 0):
    """Tokens (1, tokens, width) and weights (1, width, experts) that make logits of that spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, width, generator=generator)
    w = torch.randn(1, width, experts, generator=generator)
    return x, spread / math.sqrt(width) * w


def moved(x, w, seed: int = 0) -> dict[str, float]:
    """What BF16 and noise do to a routing. `logits`, `softmax`, `jitter`: shares of tokens that go
    elsewhere; `ties`: of those with two largest logits in BF16; `gate`, `gate_size`: mean and root
    mean square of the gate's relative error by the softmax, where the expert is the same."""
    right = route(x, w)
    generator = torch.Generator().manual_seed(seed)
    other = {site: route(x, w, (site,), generator) for site in ("logits", "softmax", "jitter")}
    found = {site: (r.expert != right.expert).double().mean() for site, r in other.items()}
    top = other["logits"].logits.topk(2).values
    same = other["softmax"].expert == right.expert
    error = (other["softmax"].gate.double() / right.gate.double() - 1)[same]
    found |= {"ties": (top[..., 0] == top[..., 1]).double().mean()}
    found |= {"gate": error.mean(), "gate_size": error.square().mean().sqrt()}
    return {key: float(value) for key, value in found.items()}


def crowded(how: str, tokens: int = 8192, experts: int = 8, seed: int = 0) -> float:
    """Share of an expert's tokens past the first 256 whose slot another token has, too; experts
    are drawn evenly. how: of `slots`."""
    generator = torch.Generator().manual_seed(seed)
    expert = torch.randint(experts, (1, tokens), generator=generator)
    shared = sharing(expert, slots(expert, experts, how, generator), experts)
    return float(shared[ranks(expert, experts) >= STOP].double().mean())


def running(count: int, step=bf16) -> torch.Tensor:
    """The running sum of `count` ones, each sum passed through `step` before the next is added."""
    found, total = [], torch.zeros(())
    for _ in range(count):
        total = step(total + 1)
        found.append(total)
    return torch.stack(found)


# A language model with a mixture of experts


@dataclass(frozen=True)
class Mixture(Text):
    """`small.Text` with `experts` experts in place of each MLP; tokens of a step are routed as one.

    capacity: slots of an expert over its even share of tokens. balance: weight of the loss that
    balances experts. spread: what the router's weights start with times the root of the width.
    """

    lr: float = 0.01
    steps: int = 120
    warmup: int = 20
    seeds: int = 8
    first_seed: int = 1200
    classes: int = 128
    width: int = 32
    layers: int = 1
    length: int = 32
    batch: int = 128
    experts: int = 8
    hidden: int = 32
    capacity: float = 1.25
    balance: float = 0.01

    def init(self, generator):
        weights = super().init(generator)
        e, c, h = self.experts, self.width, self.hidden
        for i in range(self.layers):
            weights[f"router{i}"] = torch.randn(c, e, generator=generator) / math.sqrt(10 * c)
            weights[f"up{i}"] = torch.randn(e, c, h, generator=generator) * math.sqrt(2 / c)
            weights[f"down{i}"] = torch.randn(e, h, c, generator=generator) * 0.5 / math.sqrt(h)
        return weights

    @property
    def slots(self) -> int:
        """Slots of an expert in a step."""
        return math.ceil(self.capacity * self.batch * self.length / self.experts)


@dataclass(frozen=True)
class Images(Digits):
    """Digits told by `experts` experts of one hidden layer and by nothing else: an image is a
    token, and one beyond the capacity has logits of zero. Fields as of `Mixture`."""

    lr: float = 0.01
    steps: int = 80
    batch: int = 4096
    seeds: int = 10
    first_seed: int = 1400
    second: float | None = 0.95
    layers: int = 1
    experts: int = 8
    hidden: int = 16
    capacity: float = 1.25
    balance: float = 0.1

    def init(self, generator):
        e, h = self.experts, self.hidden
        return {
            "router0": torch.randn(64, e, generator=generator) / math.sqrt(640),
            "up0": torch.randn(e, 64, h, generator=generator) * math.sqrt(2 / 64),
            "down0": torch.randn(e, h, 10, generator=generator) / math.sqrt(h),
        }

    @property
    def slots(self) -> int:
        return math.ceil(self.capacity * self.batch / self.experts)

    def logits(self, w, x, dot, mlp):
        return mlp(x.flatten(2) - self.data[0].flatten(1).mean(0), w, 0, dot)


def train(task: Mixture | Images, arm: str, seeds, stop: int | None = None, watch=None):
    """Train an arm for all of `seeds`; equal starts and batches in every arm.

    stop: take only the first steps. watch(x, w, routing) sees the router of every layer and step.

    Returns ends, DataFrame with a row a seed: `early` and `loss`, the mean training loss of the
    first 20 and the last 50 steps (nats); `dropped`, `shared` and `heaviest`, shares of tokens
    beyond the capacity, in a slot with others, and of the expert with most, means of the last 50.
    """
    sites, steps = ARMS[arm], min(stop or task.steps, task.steps)
    each = [task.init(torch.Generator().manual_seed(seed)) for seed in seeds]
    weights = {name: torch.stack([w[name] for w in each]) for name in each[0]}
    generator = torch.Generator().manual_seed(seeds[0])
    optimiser = Optimiser(list(weights.values()), task.first, task.second)
    strength = 0.0 if "unbalanced" in sites else task.balance
    ok, curve, seen = torch.ones(len(seeds), dtype=torch.bool), [], []
    for step in range(steps):
        rows = zip(*(task.rows(step, seed) for seed in seeds), strict=True)
        x, targets = map(torch.stack, rows)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        routings = []

        def experts(x, w, i, dot, routings=routings):
            routing = route(x, w[f"router{i}"], sites, generator)
            routings.append(routing)
            if watch:
                watch(x.detach(), w[f"router{i}"].detach(), routing)
            return mixture(x, routing, w[f"up{i}"], w[f"down{i}"], task.slots, "last" not in sites)

        logits = task.logits(leaves, x, lambda a, b, site=None: a @ b, experts)
        loss = losses(logits, targets)
        total = loss + strength * sum(r.balance for r in routings)
        grads = torch.autograd.grad(total.sum(), list(leaves.values()))
        changes = optimiser.updates(grads, learning_rate(task, step), ok)
        weights = {n: w + c for (n, w), c in zip(weights.items(), changes, strict=True)}
        curve.append(loss.detach())
        seen.append(_seen(routings, task))
    last = {name: torch.stack([s[name] for s in seen[-50:]]).mean(0) for name in seen[0]}
    table = torch.stack(curve).double()
    end = {"early": table[:20].mean(0), "loss": table[-50:].mean(0)} | last
    return pd.DataFrame({"seed": list(seeds)} | {name: x.numpy() for name, x in end.items()})


@torch.no_grad()
def _seen(routings, task):
    shares = []
    for r in routings:
        ones = F.one_hot(r.expert, task.experts).double().mean(1)
        kept = r.slot < task.slots
        shared = sharing(r.expert, r.slot, task.experts) & kept
        shares.append((1 - kept.double().mean(1), shared.double().mean(1), ones.amax(1)))
    means = (torch.stack(parts).mean(0) for parts in zip(*shares, strict=True))
    return dict(zip(("dropped", "shared", "heaviest"), means, strict=True))


TASKS = {"mixture": Mixture(), "later": Mixture(), "images": Images()}


# Records


def read(folder=None, name: str = "mixture") -> gaps.Record:
    """The record of the mixture of experts; raises UserError if there is none."""
    folder = Path(folder) if folder else files.data_root() / "studies" / "small_parts"
    if not (path := folder / f"{name}.json").exists():
        raise UserError(f"there is no record {name} in {folder}: make it as its study says")
    ends = pd.read_parquet(folder / f"{name}.parquet").astype({"arm": str})
    return gaps.Record(json.loads(path.read_text()), ends, pd.DataFrame())


def _arm(name: str, arm: str):
    torch.set_num_threads(1)
    task = TASKS[name]
    seeds = range(task.first_seed, task.first_seed + task.seeds)
    groups = [seeds] if name == "images" else [[seed] for seed in seeds]
    end = pd.concat([train(task, arm, group) for group in groups], ignore_index=True)
    print(f"{name} {arm}: {end.loss.mean():.4f}", flush=True)
    return end.assign(arm=arm)


def record(folder, name: str, arms=None, workers=1) -> None:
    """Train `arms` of a task, by default all but, of "mixture", those of `LATER`, which are those
    of "later"; write `name.json` and `name.parquet` into `folder`."""
    folder, start = Path(folder), time.monotonic()
    first = [arm for arm in ARMS if arm not in LATER]
    arms = arms or {"mixture": first, "later": LATER}.get(name, tuple(ARMS))
    about = new_record(folder, name, "cpu", "router")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        ends = list(pool.map(_arm, [name] * len(arms), arms))
    about |= {"config": dataclasses.asdict(TASKS[name]), "seconds": round(time.monotonic() - start)}
    about |= {"arms": {arm: " ".join(ARMS[arm]) for arm in arms}}
    save(pd.concat(ends, ignore_index=True), folder / f"{name}.parquet")
    write_about(folder, name, about)


def save(table, path) -> None:
    """Write ends with 13 stored bits, 4 digits, which halves the file."""
    for column in table.select_dtypes("float").columns.drop("centre", errors="ignore"):
        numbers = torch.tensor(table[column].to_numpy(), dtype=torch.float32)
        table = table.assign(**{column: cut(numbers, 13, "nearest").numpy()})
    write_table(path, table.astype({"seed": "int16", "arm": "category"}))


if __name__ == "__main__":
    entry(functools.partial(command, "router", __doc__, TASKS, record))
