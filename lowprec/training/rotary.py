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


def rotation(length: int, channels: int, base: float = 10000.0) -> torch.Tensor:
    """(2, length, channels / 2) float32: cosine and sine of each pair's angle at each place.

    The angles are formed in float64, and the table rounded once."""
    rates = base ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x, table, back: bool = False):
    """x (..., T, D) turned to its places, or back; x itself where table is None.

    table: from `rotation`, of T places at least. Computed in FP32, or in float64 if x is, and
    rounded once, to the dtype of x.
    """
    if table is None:
        return x
    cos, sin = table[:, : x.shape[-2]].to(x.device)
    sin = -sin if back else sin
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)
