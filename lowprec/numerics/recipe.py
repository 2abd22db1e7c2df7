"""What products and optimiser states are stored in: a `Cast` for each.

A policy says where attention rounds; a `Recipe` says the same of all else that training keeps in
few bits. For a layer y = x w its products and its Adam have these fields:

    x, w            operands of y = x w
    g_dx, w_dx      operands of dx = g w^T
    x_dw, g_dw      operands of dw = x^T g; g is cast once for both where its casts are equal
    out             y, dx and dw, rounded once after their sums
    grad            the gradient of a weight, as Adam reads it
    m, v            Adam's moments, rounded once after each step
    master          the weight that the step changes, rounded after it
    step            which moments the step divides: "fresh", before their rounding, or "stored"

Sums of products are FP32, until `out`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowprec import UserError
from lowprec.numerics.scaling import Cast, Caster
from lowprec.numerics.spelled import Spelled


@dataclass(frozen=True)
class Recipe(Spelled):
    """The casts of products and states; two are equal when every field is. Text as of a policy:
    "FP32+v=e4m3_saturate@tensor,pow2"."""

    noun, example = "recipe", "FP32+v=bf16"

    x: Cast = Cast()
    w: Cast = Cast()
    g_dx: Cast = Cast()
    w_dx: Cast = Cast()
    x_dw: Cast = Cast()
    g_dw: Cast = Cast()
    out: Cast = Cast()
    grad: Cast = Cast()
    m: Cast = Cast()
    v: Cast = Cast()
    master: Cast = Cast()
    step: str = "fresh"

    def __post_init__(self):
        for name in CASTS:
            try:
                object.__setattr__(self, name, Cast.parse(getattr(self, name)))
            except UserError as error:
                raise UserError(f"recipe field {name}: {error}") from None
        if self.step not in ("fresh", "stored"):
            raise UserError(f"recipe field step: {self.step!r} is not one of fresh, stored")

    def casters(self, generator=None) -> dict[str, Caster]:
        """A caster a field, with histories of their own; one set a layer."""
        if self.out.history:
            raise UserError(
                f"recipe field out: {self.out} rounds y, dx and dw, which share no history; leave "
                "delayed out"
            )
        return {name: Caster(getattr(self, name), generator) for name in CASTS}

    def require(self, steps: int) -> None:
        """Raise UserError for what a run of `steps` steps cannot do."""
        for name in CASTS:
            if (history := getattr(self, name).history) > steps:
                raise UserError(
                    f"recipe field {name}: a history of {history} casts is longer than a run of "
                    f"{steps} steps and never fills; shorten it"
                )


FIELDS = Recipe.fields()
CASTS = FIELDS[:-1]
_IN, _OUT = "e4m3_saturate@tensor,times", "e5m2_saturate@tensor,times"
PRESETS = {
    "FP32": Recipe(),
    "FP8": Recipe(x=_IN, w=_IN, g_dx=_OUT, w_dx=_IN, x_dw=_IN, g_dw=_OUT),
}
"""Starting points. FP8 is torchao's default layer: a current scale a tensor, E5M2 gradients."""
Recipe.presets = Recipe.names = PRESETS


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, casters):
        ctx.save_for_backward(x, w)
        ctx.casters = casters
        return casters["out"](casters["x"](x) @ casters["w"](w))

    @staticmethod
    def backward(ctx, g):
        if torch.is_grad_enabled():  # casts carry no gradient, so one of this would be wrong
            raise UserError("a linear layer with casts has no second derivatives")
        (x, w), cast = ctx.saved_tensors, ctx.casters
        g_dx = cast["g_dx"](g)
        g_dw = g_dx if cast["g_dx"].cast == cast["g_dw"].cast else cast["g_dw"](g)
        dx, dw = g_dx @ cast["w_dx"](w).mT, cast["x_dw"](x).mT @ g_dw
        return cast["out"](dx), cast["out"](dw), None


def linear(x, w, casters):
    """x w with the operands of its three products cast. x: (..., rows, k), w: (..., k, columns),
    float32 with equal leading dimensions. casters: `Recipe.casters()`, kept from step to step."""
    return _Linear.apply(x, w, casters)


class Adam:
    """Adam with its states as a recipe stores them, over weights with a leading dimension of seeds.

    weights: float32 tensors (seeds, rows, columns). A tensor with fewer than `least` elements a
    seed keeps FP32 states. Arithmetic between roundings is that of torchao's Adam: both averages
    by lerp, the step lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
    `ended` has for each seed None, or where a state was first not finite: "v of tensor 2, step 7".
    """

    def __init__(self, weights, recipe, betas=(0.9, 0.95), eps=1e-8, least=0, generator=None):
        self.recipe, self.betas, self.eps, self.t = Recipe.parse(recipe), betas, eps, 0
        self.m, self.v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        big = [w[0].numel() >= least for w in weights]
        self.casters = [(self.recipe if b else PRESETS["FP32"]).casters(generator) for b in big]
        self.ended: list[str | None] = [None] * len(weights[0])

    @torch.no_grad()
    def step(self, weights, grads, lr):
        """The weights after one step."""
        self.t += 1
        corrections = [1 - beta ** torch.tensor(float(self.t)) for beta in self.betas]
        pairs = enumerate(zip(weights, grads, strict=True))
        return [self._one(i, w, g, lr, *corrections) for i, (w, g) in pairs]

    def _one(self, i, w, g, lr, first, second):
        cast, stored = self.casters[i], self.recipe.step == "stored"
        g = cast["grad"](g)
        m = self.m[i].lerp(g, 1 - self.betas[0])
        v = self.v[i].lerp(g.square(), 1 - self.betas[1])
        self.m[i], self.v[i] = cast["m"](m), cast["v"](v)
        for name, state in (("m", self.m[i]), ("v", self.v[i])):
            self._watch(f"{name} of tensor {i}, step {self.t}", state)
        m, v = (self.m[i], self.v[i]) if stored else (m, v)
        return cast["master"](w - lr * (m / first) / (v.sqrt() / second.sqrt() + self.eps))

    def _watch(self, where, state):
        for seed, fine in enumerate(state.flatten(1).isfinite().all(1).tolist()):
            if not fine and self.ended[seed] is None:
                self.ended[seed] = where
