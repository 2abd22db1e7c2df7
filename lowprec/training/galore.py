"""GaLore (Zhao et al. 2024): AdamW of the gradients of matrices, projected onto few directions.

Of a matrix of m rows and n columns, with m >= n, Adam's averages are those of G V, (m, r), whose V
(n, r) is the first r right singular vectors of one gradient G, taken anew every so many steps; its
step goes back through V and is multiplied by a scale. With m < n it is the left ones, (r, n). The
algorithm is pytorch-optimizer's.

As in the released code (its Llamas): projected are the linear layers of attention and MLP, queries,
keys, values, gate and up each as a matrix of its own; embeddings, norms and the output, which here
is the embedding, have AdamW's step. All have one learning rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from lowprec import UserError


@dataclass(frozen=True)
class Projection:
    """rank: directions kept; every: steps between two choices of them, one less between the first
    two; scale: of the step back."""

    rank: int
    every: int = 200
    scale: float = 0.25

    @classmethod
    def parse(cls, text: str) -> Projection | None:
        """Of `TrainConfig.optimizer`: "galore,rank96,every200,scale0.25", None for "adamw"."""
        if text == "adamw":
            return None
        number = r"\d+(?:\.\d+)?"
        form = rf"galore,rank(\d+)(?:,every(\d+))?(?:,scale({number}))?"
        if (found := re.fullmatch(form, text)) is None:
            raise UserError(
                f"optimizer={text!r} must be adamw, or as galore,rank96,every200,scale0.25"
            )
        kinds = dict(rank=int, every=int, scale=float)
        given = zip(kinds.items(), found.groups(), strict=True)
        of = cls(**{name: kind(value) for (name, kind), value in given if value is not None})
        if min(of.rank, of.every, of.scale) <= 0:
            raise UserError(f"optimizer={text!r}: rank, every and scale must be above 0")
        return of


def require(config) -> None:
    """Raise `UserError` for a run that cannot have this optimizer."""
    if (of := Projection.parse(config.optimizer)) is None:
        return
    if of.rank > config.n_embd:
        raise UserError(f"optimizer={config.optimizer!r}: rank is above n_embd={config.n_embd}")
    if config.amp == "fp16" or config.recipe != "FP32" or config.loss_scale is not None:
        raise UserError("galore is of runs without a recipe, a loss scale and FP16; leave one out")


def matrices(model) -> list[tuple[torch.nn.Parameter, list[int]]]:
    """Weights of a `GPT` whose gradients are projected, and the rows of each matrix in them."""
    found = []
    for block in model.blocks:
        c = block.config
        keys = c.kv_heads * c.head_dim
        rows = {block.qkv: [c.n_embd, keys, keys]}
        if c.mlp == "swiglu":
            rows[block.up] = [c.hidden, c.hidden]
        linear = [m for m in block.children() if isinstance(m, torch.nn.Linear)]
        found += [(m.weight, rows.get(m, [len(m.weight)])) for m in linear]
    return found


class Galore:
    """The optimizer of a `GPT`, as the training loop calls one; its states are those of
    pytorch-optimizer's, with each projector as its fields.

    A step is left out where `found_inf` is above 0, which the host waits for. Raises `UserError`
    where pytorch-optimizer is not installed.
    """

    def __init__(self, model, config):
        try:
            from pytorch_optimizer import GaLore
        except ImportError:
            raise UserError(
                "optimizer=galore needs pytorch-optimizer: pip install -e '.[galore]'"
            ) from None
        of = Projection.parse(config.optimizer)
        # Each matrix is a view of the weight that the model multiplies with.
        self.parts = [(w, rows, w.detach().split(rows)) for w, rows in matrices(model)]
        projected = {id(weight) for weight, _, _ in self.parts}
        rest = [p for p in model.parameters() if id(p) not in projected]
        groups = [
            dict(
                params=[view for _, _, views in self.parts for view in views],
                rank=of.rank, update_proj_gap=of.every, scale=of.scale, projection_type="std",
            ),
            dict(params=rest),
        ]  # fmt: skip
        self.inner = GaLore(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
            weight_decay=config.weight_decay,
        )  # fmt: skip
        self.found_inf = torch.zeros(())

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self):
        if self.found_inf:
            return
        for weight, rows, views in self.parts:
            for view, grad in zip(views, weight.grad.split(rows), strict=True):
                view.grad = grad
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True):
        self.inner.zero_grad(set_to_none)
        for weight, _, _ in self.parts:
            weight.grad = None

    def state_dict(self) -> dict:
        state = self.inner.state_dict()
        state["state"] = {
            i: of | {k: dict(vars(v)) for k, v in of.items() if k == "projector"}
            for i, of in state["state"].items()
        }
        return state

    def load_state_dict(self, state: dict):
        from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

        self.inner.load_state_dict(state)
        for of in self.inner.state.values():
            if "projector" in of:
                fields, of["projector"] = of["projector"], GaLoreProjector()
                vars(of["projector"]).update(fields)
