"""Few bits in a training run outside attention: its products by a recipe, and its loss scale.

A recipe of a run casts the operands and results of the products of `GPT`'s linear layers, logits
included, the gradients of all matrices and, after each step, the matrices. The position embedding
and a gate, which are in no such product, are among them. Adam is torch's, so its
moments are FP32. A loss scale is a `lowprec.numerics.scaling.LossRule`; the run ends where
`LossScaler` says that it has.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from lowprec import UserError
from lowprec.numerics.recipe import Recipe, linear
from lowprec.numerics.scaling import LossRule, LossScaler, scaled


def recipe_of(config) -> Recipe:
    """The recipe of a run's config; raises UserError for what a run cannot do."""
    recipe = Recipe.parse(config.recipe)
    for name in ("m", "v"):
        if not getattr(recipe, name).keeps:
            raise UserError(
                f"recipe field {name}: a run keeps Adam's moments in FP32; leave it out"
            )
    recipe.require(config.steps)
    if any(getattr(recipe, name).history for name in ("grad", "master", "out")):
        raise UserError("a run has no history of grad, master and out; leave delayed out")
    if config.checkpoint_every and (recipe != Recipe() or config.loss_scale is not None):
        raise UserError("a run with a recipe or a loss scale has no checkpoints; leave them out")
    if recipe != Recipe() and (config.capture_at or config.capture_every or config.window):
        raise UserError("captures and windows are of runs without a recipe; leave them out")
    if recipe != Recipe() and config.amp is not False:
        raise UserError("a recipe casts what FP32 has: set amp=False with it")
    if recipe != Recipe() and config.compile:
        raise UserError("a compiler removes roundings of a recipe; leave compile out with it")
    if config.loss_scale is not None:
        if config.amp == "fp16":
            raise UserError("amp=fp16 has a loss scale of its own; leave loss_scale out")
        LossRule.parse(config.loss_scale).require(config.steps)
    elif config.spurious:
        raise UserError("spurious overflows are of a loss scale: set loss_scale with them")
    return recipe


def put_into(model, recipe: Recipe, generator) -> None:
    """Let a `GPT` multiply by a recipe; nothing changes where that keeps all FP32 values."""
    if recipe == Recipe():
        return
    casters = defaultdict(lambda: recipe.casters(generator))  # a layer's scales are of its own past

    def times(x, weight):
        product = linear(x.flatten(0, 1), weight.mT, casters[weight])
        return product.unflatten(0, x.shape[:2])

    model.times = times
    for block in model.blocks:
        block.times = lambda layer, x: times(x, layer.weight)


def _as_cast(p, cast):
    """A matrix (out, in), seen as (in, out) where the cast has groups: those that products have."""
    return p if cast.group in ("", "tensor") else p.mT


class RuledScaler:
    """What `torch.amp.GradScaler` is in the loop, with a `LossRule` and a recipe's casts.

    rule: text, or None for a scale of 1 with which no step is skipped. spurious: steps between two
    overflows that are put in, 0 for none.
    """

    def __init__(self, recipe: Recipe, rule: str | None, spurious: int, broken, generator):
        self.recipe, self.spurious, self.broken, self.generator = (
            recipe,
            spurious,
            broken,
            generator,
        )
        self.watches = rule is not None
        self.scaler = LossScaler(rule or "1", 1, broken.device)
        self.fine = torch.ones(1, dtype=torch.bool, device=broken.device)

    def is_enabled(self) -> bool:
        return True

    def scale(self, x):
        return x * self.scaler.scale[0]

    @torch.no_grad()
    def unscale_(self, optimizer):
        """Cast the gradients of matrices, ask whether all are finite, and divide by the scale."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        for p in weights:
            if p.dim() == 2 and not self.recipe.grad.keeps:
                grad = _as_cast(p.grad, self.recipe.grad)
                grad.copy_(scaled(grad, self.recipe.grad, self.generator))
        if self.watches:
            self.fine = torch.stack([p.grad.isfinite().all() for p in weights]).all()[None]
            if self.spurious and (self.scaler.t + 1) % self.spurious == 0:
                self.fine = torch.zeros_like(self.fine)
        for p in weights:
            p.grad.div_(self.scaler.scale[0])

    @torch.no_grad()
    def step(self, optimizer):
        """Adam's step, but for one with an overflow; then the weights as they are stored."""
        optimizer.found_inf = torch.maximum(self.broken, (~self.fine[0]).float())
        optimizer.step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.dim() == 2 and not self.recipe.master.keeps:
                    p = _as_cast(p, self.recipe.master)
                    p.copy_(scaled(p, self.recipe.master, self.generator))

    def update(self):
        if self.watches:
            self.scaler.accept(self.fine)

    @property
    def ended(self) -> str | None:
        return self.scaler.ended[0]
