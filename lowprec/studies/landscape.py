"""The loss along the drift: does it see a step of W_Q along the mean of R, and which way is down?

The error of a head's W_Q gradient is a sum of -eps_i R_i, R_i = (P K)_i x_i^T, with eps of one sign
most often (`lowprec.diagnose.directions`). Descent subtracts it. So if eps is positive W_Q drifts
along the mean R, and a positive slope opposes the drift. The runs of a campaign kept their weights
at some steps (`TrainConfig.weights_at`). Of each model the loss of the first sequences of the batch
of that step is taken at W_Q + t * sigma(W_Q) * u, head by head of one layer, for u the mean R of
the head and for a random vector in the place of its mean key, both of norm 1, in FP32 and with
PyTorch's attention whatever the arm rounds. One small table, after which the weights may go:

    python -m lowprec.studies.landscape runs/landscape
"""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

from lowprec import entry
from lowprec.diagnose.drift import relative_sum
from lowprec.evidence.heads import take_offs
from lowprec.studies.kept import table, tabulate
from lowprec.training.probes import spectral_norms
from lowprec.training.rotary import rotate

LAYER = 1
"""The layer in which the six-layer model fails, counted from 0."""
LENGTHS = tuple(i / 5 for i in range(-5, 6))
"""t, in units of the head's sigma(W_Q)."""
MOVE = 0.4
"""The t of a large move."""
CHUNK = 8
"""Sequences at a time, for the logits."""
COLUMNS = {
    "arm": "str", "seed": "int16", "step": "int32", "head": "int16", "direction": "str",
    "t": "float32", "loss": "float64", "slope": "float64",
}  # fmt: skip


def mean_loss(model, text, targets) -> torch.Tensor:
    """Mean cross-entropy in nats; leaves its gradient in what requires one."""
    total = 0.0
    for x, y in zip(text.split(CHUNK), targets.split(CHUNK), strict=True):
        loss = model(x, y) * (len(x) / len(text))
        if loss.requires_grad:
            loss.backward()
        total += loss.detach().double()
    return total


@torch.no_grad()
def mean_r(model, text, layer: int) -> torch.Tensor:
    """The mean over tokens of (P K)_i x_i^T, (H, D, C) float64, of every head of a layer, with
    rotary positions undone in (P K)_i."""
    total = 0.0
    for x in text.split(CHUNK):
        stream = model.placed(model.token(x))
        for block in model.blocks[:layer]:
            stream = block(stream)
        inputs = model.blocks[layer].norm_attn(stream)
        q, k, _ = model.blocks[layer].heads(inputs)
        shared = k.shape[1] < q.shape[1]
        keys = scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=shared)
        keys = rotate(keys, model.blocks[layer].rotation, back=True)
        total += torch.einsum("bhtd,btc->hdc", keys.double(), inputs.double())
    return total / text.numel()


def along(model, text, targets, amp=None, layer: int = LAYER, seed: int = 0) -> pd.DataFrame:
    """One row a head, direction and t: the loss in nats, and its exact derivative by t at 0.

    text, targets: (B, T) int64. direction: "drift", the head's mean R, or "random", a random vector
    of seed `seed` in place of its mean key, with the same input. amp is ignored: all is in FP32.
    """
    model.requires_grad_(False)
    weight = model.blocks[layer].qkv.weight
    weight.requires_grad_(True).grad = None
    mean_loss(model, text, targets)
    gradient = weight.grad.double()
    weight.requires_grad_(False).grad = None
    drift, norms = mean_r(model, text, layer), spectral_norms(model.head_weights("q"))[layer]
    draws = torch.randn(drift.shape[:2], generator=torch.Generator().manual_seed(seed))
    found = []
    for head, mean in enumerate(drift):
        rows = slice(head * len(mean), (head + 1) * len(mean))
        whole, inputs = weight[rows].clone(), torch.linalg.svd(mean, full_matrices=False).Vh[0]
        random = torch.outer(normalize(draws[head].to(mean), dim=0), inputs)
        for name, u in (("drift", mean / mean.norm()), ("random", random)):
            step = norms[head] * u
            slope = (gradient[rows] * step).sum().item()
            for t in LENGTHS:
                weight[rows] = whole + (t * step).to(whole)
                loss = mean_loss(model, text, targets).item()
                found.append((head, name, t, loss, slope))
        weight[rows] = whole
    return pd.DataFrame(found, columns=["head", "direction", "t", "loss", "slope"])


def shapes(table: pd.DataFrame) -> pd.DataFrame:
    """The slope of each curve at 0 and its second difference over t = -0.2, 0 and 0.2, `bend`.

    table: of `compare`. Index arm, seed, step, head; columns (slope or bend, direction).
    """
    curve = ["arm", "seed", "step", "head", "direction"]
    near = table[table.t.abs() < 0.3].assign(weight=lambda some: np.where(some.t == 0, -2.0, 1.0))
    bend = (near.loss * near.weight).groupby([near[name] for name in curve]).sum()
    found = pd.DataFrame(dict(bend=bend, slope=table.groupby(curve).slope.first()))
    return found.unstack("direction")


def cost(table: pd.DataFrame, place, way: float, direction: str = "drift") -> tuple[float, float]:
    """By how much the mean loss is higher after a move of W_Q by MOVE, with the drift and against
    it.  nats

    place: (arm, seed, step, head). way: a number with the sign of the head's Σε."""
    loss = curve(table, place, way, direction)
    return loss[MOVE], loss[-MOVE]


def curve(table: pd.DataFrame, place, way: float, direction: str = "drift") -> pd.Series:
    """Change of the mean loss by the move of W_Q, in σ(W_Q), above 0 with the drift.  nats"""
    keys = ["arm", "seed", "step", "head", "direction"]
    mine = table.set_index(keys).sort_index().loc[(*place, direction)]
    move = (mine.t.astype(float) * np.sign(way)).round(1) + 0.0  # no move is 0 and not -0
    loss = pd.Series(mine.loss.to_numpy(), move.to_numpy()).sort_index()
    return loss - loss[0.0]


def before_take_off(table: pd.DataFrame, run, **how) -> dict | None:
    """The drift of a run's first head to take off, at the last kept step 100 before; None if that
    head is in another layer, or no step was kept so early.

    how: of `take_offs`. place: of `cost`, and its way; take_off; slopes: of the loss with the drift
    at every step kept so early, nats a σ(W_Q), positive if it opposes the drift; slope, the last of
    them; bend, and random, that along a random vector: of `shapes`.
    """
    layer, head, step = take_offs(run, **how).iloc[0]
    earlier = [kept for kept in run.info["config"]["weights_at"] if kept <= step - 100]
    if layer != LAYER or not earlier:
        return None
    found, signs = shapes(table).loc[run.info["arm"], run.seed], []
    for kept in earlier:
        signs.append(np.sign(relative_sum(run.probes, until=kept).loc[layer, head]))
    slopes = [sign * found.loc[(kept, head), ("slope", "drift")]
              for sign, kept in zip(signs, earlier, strict=True)]  # fmt: skip
    last = found.loc[earlier[-1], head]
    return dict(
        place=(run.info["arm"], run.seed, earlier[-1], int(head)), way=signs[-1],
        take_off=int(step), slopes=slopes, slope=slopes[-1], bend=last["bend", "drift"],
        random=last["bend", "random"],
    )  # fmt: skip


def clearest(run, step: int) -> tuple[tuple, float]:
    """(place, way) of `cost` for the head of the layer whose errors have the clearest sign up to a
    step."""
    found = relative_sum(run.probes, until=step).loc[LAYER]
    head = found.abs().idxmax()
    return (run.info["arm"], run.seed, step, int(head)), found[head]


compare = functools.partial(table, along, COLUMNS, impl="sdpa", policy="FA2", layers={})
"""`along` of the kept weights of all runs in a folder; see `lowprec.studies.kept.table`."""


def main(argv: list[str] | None = None) -> None:
    """Measure the loss along the drift in the kept weights of a campaign's runs."""
    tabulate(argv, main.__doc__, compare, 64, "landscape.parquet")


if __name__ == "__main__":
    entry(main)
