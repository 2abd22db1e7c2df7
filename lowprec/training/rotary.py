"""Rotary positions: each pair of channels of q and k turns with its place in the sequence, so that
their product knows the distance alone (Su et al. 2021, RoFormer, section 3.2).

The pairs are those of transformers' Llama (`rotate_half`): of R rotated channels, the first ones of
a head, i is paired with i + R/2, and at place t they turn by t / base^(2i/R). The other channels
stay as they are.

A rotation keeps lengths, and turning the other way undoes it. So a gradient of what attention reads
is a gradient of what W_Q and W_K put out once it is turned back.
"""

from __future__ import annotations

import torch

from lowprec.attention.inputs import refuse_tangents
from lowprec.numerics.formats import round_to
from lowprec.numerics.rotation import PRESETS, Rotation

FP32 = PRESETS["FP32"]


def rotation(
    length: int, channels: int, base: float = 10000.0, how: Rotation = FP32, first: int = 0,
    rates=None,
) -> torch.Tensor:  # fmt: skip
    """(2, length, channels / 2) float32: cosine and sine of each pair's angle at each place.

    The angles are formed in float64, and the table rounded once; how: the sites at which it is
    rounded beside that. first: the first place. rates: (channels / 2,) in place of base^(-2i/R).
    """
    if rates is None:
        rates = base ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    places = torch.arange(first, first + length, dtype=torch.float64)[:, None]
    angles = rounded(rounded(places, how.place) * rounded(rates.double(), how.rate), how.angle)
    return torch.stack([rounded(f, how.cs).float() for f in (angles.cos(), angles.sin())])


def rounded(x, site):
    return round_to(x, site.fmt, site.rounding)


def rotate(x, table, back: bool = False, how: str = ""):
    """x (..., T, D) turned to its places, or back; x itself where table is None.

    table: from `rotation`, of T places at least. Computed in FP32, or in float64 if x is, and
    rounded once, to the dtype of x. how: the text of a `Rotation` that rounds beside that; the
    gradient turns back with its roundings of `rot`, as PyTorch's of the same products does.
    """
    if table is None:
        return x
    cos, sin = table[:, : x.shape[-2]].to(x.device)
    sin = -sin if back else sin
    if how:
        refuse_tangents(x)
        return turned(x, cos, sin, how)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


@torch.library.custom_op("lowprec::turned", mutates_args=())
def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, how: str) -> torch.Tensor:
    """`rotate` with roundings, an operator since torch.compile removes those that it can see."""
    how, half = Rotation.parse(how), cos.shape[-1]
    read = rounded(x.float(), how.before)
    a, b, rest = read[..., :half], read[..., half : 2 * half], read[..., 2 * half :]

    def products(a, b, sin):
        return rounded(rounded(a * cos, how.rot) + rounded(b * sin, how.rot), how.rot)

    return rounded(torch.cat([products(a, b, -sin), products(b, a, sin), rest], -1), how.qk).to(
        x.dtype
    )


@turned.register_fake
def _(x, cos, sin, how):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):
    _, cos, sin, how = inputs
    ctx.save_for_backward(cos, sin)
    ctx.how = str(FP32.replace(rot=Rotation.parse(how).rot))


def _backward(ctx, g):
    cos, sin = ctx.saved_tensors
    return turned(g, cos, -sin, ctx.how), None, None, None


turned.register_autograd(_backward, setup_context=_keep)
