"""Training in 16 bits, emulated: every operand of every product rounded, sums in FP32.

This is how Kalamkar et al. (2019) emulated BF16: FP32 tensors are rounded before each matrix
product, in the forward and in the backward, and the product accumulates in FP32. Everything
between products stays FP32. `round_to` does the rounding, so the same code runs on CPU and GPU.

Tensors carry a leading dimension of seeds. Seeds share nothing, so a sum of their losses has the
gradient of each, and one product trains all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowprec.numerics.formats import round_to
from lowprec.numerics.scaling import LossRule, LossScaler


@dataclass(frozen=True)
class Recipe:
    """What one arm of the comparison rounds.

    fmt, rounding: of the operands of products. scaled: dynamic loss scaling. weights: how the
    stored weights are rounded to `fmt` after each update; None keeps them in FP32.
    """

    fmt: str = "fp32"
    rounding: str = "nearest_even"
    scaled: bool = False
    weights: str | None = None


ARMS = {
    "fp32": Recipe(),
    "bf16": Recipe("bf16"),
    "fp16": Recipe("fp16"),
    "fp16-scaled": Recipe("fp16", scaled=True),
    "bf16-truncated": Recipe("bf16", "toward_zero"),
    "bf16-weights": Recipe("bf16", weights="nearest_even"),
    "bf16-weights-stochastic": Recipe("bf16", weights="stochastic"),
}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, recipe, watch):
        a, b = (round_to(t, recipe.fmt, recipe.rounding) for t in (a, b))
        ctx.save_for_backward(a, b)
        ctx.recipe, ctx.watch = recipe, watch
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        rounded = round_to(g, ctx.recipe.fmt, ctx.recipe.rounding)
        if ctx.watch:
            ctx.watch(g, rounded)
        return rounded @ b.mT, a.mT @ rounded, None, None


def product(a, b, recipe: Recipe, watch: Callable | None = None):
    """a @ b with both operands rounded, and so is the gradient before its two products.

    a: (..., m, k), b: (..., k, n), float32 with equal leading dimensions. watch(g, rounded) is
    called in the backward with the gradient (..., m, n) before and after its rounding. On CUDA,
    TF32 has to be off, as it is by default.
    """
    return _Product.apply(a, b, recipe, watch)


def per_seed(flags, like):
    """(seeds,) with dimensions of one appended, to broadcast against `like`."""
    return flags.view(-1, *[1] * (like.ndim - 1))


class LossScale(LossScaler):
    """One dynamic loss scale a seed, by the rule of torch.amp.GradScaler and with its defaults.

    Off, the scale is 1 and no step is ever skipped.
    """

    def __init__(self, seeds: int, on: bool, device="cpu", interval=2000):
        super().__init__(LossRule(2.0**16, interval) if on else LossRule(), seeds, device)
        self.on = on

    def accept(self, grads):
        """Which seeds may take the step, (seeds,) bool; moves the scale on."""
        fine = torch.ones_like(self.scale, dtype=torch.bool)
        if self.on:
            for g in grads:
                fine &= g.flatten(1).isfinite().all(1)
            super().accept(fine)
        return fine


class Optimiser:
    """Adam, or SGD with momentum if `second` is None, in FP32, with one step counter a seed.

    A seed that skips a step keeps its moments and its counter, as if the step had not been; that
    is all that torch.optim cannot do for stacked seeds.
    """

    def __init__(self, weights, first=0.9, second=None):
        self.first, self.second = first, second
        self.m, self.v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        self.t = torch.zeros(len(weights[0]), device=weights[0].device)

    def updates(self, grads, lr, ok):
        """The change of each weight tensor; zero for seeds that are not `ok`, (seeds,) bool."""
        self.t += ok
        return [self._update(i, g, lr, ok) for i, g in enumerate(grads)]

    def _update(self, i, g, lr, ok):
        keep = per_seed(ok, g)
        if self.second is None:
            self.m[i] = torch.where(keep, self.first * self.m[i] + g, self.m[i])
            step = self.m[i]
        else:
            m = self.first * self.m[i] + (1 - self.first) * g
            v = self.second * self.v[i] + (1 - self.second) * g * g
            self.m[i] = torch.where(keep, m, self.m[i])
            self.v[i] = torch.where(keep, v, self.v[i])
            m, v = (
                moment[i] / per_seed(1 - beta**self.t, g)
                for moment, beta in ((self.m, self.first), (self.v, self.second))
            )
            step = m / (v.sqrt() + 1e-8)
        return torch.where(keep, -lr * step, 0.0)


def store(weight, change, recipe: Recipe, generator=None):
    """The weight after an update as it is stored, and how many non-zero updates changed nothing.

    Returns (weight, (seeds, 2) counts of non-zero updates and of those that left the weight).
    """
    new = weight + change
    if recipe.weights:
        new = round_to(new, recipe.fmt, recipe.weights, generator)
    moved = change != 0
    counts = torch.stack([moved.flatten(1).sum(1), (moved & (new == weight)).flatten(1).sum(1)], 1)
    return new, counts
