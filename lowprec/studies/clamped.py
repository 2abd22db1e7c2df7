"""What 4 bits keep of captured tensors, whole and with their outliers clamped.

`Clamp` is the outlier clamping of Wang et al. (2025): values beyond two quantiles are clamped
before the cast, and what was cut off is multiplied apart and added, or, in their published code,
left out. `kept` says how well a tensor survives a cast; `lost` how much of a gradient becomes zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from torch.nn.functional import silu

from lowprec.numerics.formats import BF16, round_to
from lowprec.numerics.scaling import Cast, quantise, scaled, tied
from lowprec.records.files import data_root
from lowprec.studies import smollm2
from lowprec.training.capture import Capture


@dataclass(frozen=True)
class Clamp:
    """Clamp to the quantiles `share` and 1 - `share`, over the "tensor" or each "token".

    rest: add what was cut off to the stored tensor, in FP32; False leaves it out.
    """

    share: float = 0.99
    over: str = "tensor"
    rest: bool = True

    def __call__(self, x):
        """x (..., rows, columns) clamped, and what is added after the cast."""
        flat = x if self.over == "token" else x.flatten(-2)
        ordered, n = flat.sort(-1).values, flat.shape[-1]
        low, high = (
            ordered[..., int(share * n), None].view(*x.shape[:-2], -1, 1)
            for share in (1 - self.share, self.share)
        )
        inside = x.clamp(low, high)
        return inside, x - inside if self.rest else torch.zeros_like(x)


def stored(x, cast: str, clamp: Clamp | None = None, cast_by=scaled):
    """x (..., rows, columns) in BF16, then as it reads after a clamp and a cast."""
    x = round_to(x, BF16)
    if clamp is None:
        return cast_by(x, cast)
    inside, rest = clamp(x)
    return cast_by(inside, cast) + rest


def kept(x, cast: str, clamp: Clamp | None = None) -> dict[str, float]:
    """How well x (tokens, features) is stored.

    snr: of the whole tensor, in dB. token: the median over tokens of their own SNR. zeros: the
    share of numbers that are not zero and become it. cosine: between x and what is stored.
    """
    y = stored(x, cast, clamp).double()
    x = round_to(x, BF16).double()
    power, error = x.square().sum(1), (y - x).square().sum(1)
    there = power > 0
    return dict(
        snr=(10 * (power.sum() / error.sum()).log10()).item(),
        token=(10 * (power[there] / error[there]).log10()).median().item(),
        zeros=((y == 0) & (x != 0)).sum().item() / (x != 0).sum().item(),
        cosine=((x * y).sum() / x.norm() / y.norm()).item(),
    )


def ties(x, cast: str) -> tuple[float, float]:
    """The share of the numbers of x (tokens, features) in BF16 that lie on a tie of `cast`, with
    a scale a token, and how much more the mean error is with ties toward +infinity than to even,
    over x's root mean square."""
    x, cast = round_to(x, BF16), Cast.parse(cast)
    share = tied(x / quantise(x, cast).scale, cast.fmt).double().mean().item()
    more = (scaled(x, f"{cast},up") - scaled(x, cast)).double().mean()
    return share, (more / x.double().square().mean().sqrt()).item()


def lost(x, cast: str) -> float:
    """The share of x's numbers that are not zero and become zero, x (rows, columns)."""
    there = x != 0
    return ((scaled(x, cast) == 0) & there).sum().item() / there.sum().item()


def gated() -> dict[int, torch.Tensor]:
    """silu(gate) * up of the kept layers of SmolLM2, what its down projections read, float32."""
    kept = {layer: smollm2.captured("gated", layer) for layer in smollm2.GATED}
    return {i: silu(t["gate"].float()) * t["up"].float() for i, t in kept.items()}


def own(names=("x", "q", "k", "v", "do")) -> pd.DataFrame:
    """Tensors of the captures of the book's own models, a row a capture and name: capture, name,
    tensor (T, C) or (T, D), float32, of the first sequence and head."""
    folder = data_root() / "captures"
    rows = []
    for path in sorted([*folder.glob("*.xz"), *folder.glob("gpt2/*.xz")]):
        tensors = Capture.load(path).tensors
        for name in names:
            x = tensors[name].float()
            rows.append(dict(capture=path.stem, name=name, tensor=x.reshape(-1, *x.shape[-2:])[0]))
    return pd.DataFrame(rows)
