"""What an average that is stored in few bits can forget.

An average v <- beta v + (1 - beta) g^2 that is stored with p significand bits and rounded to
nearest falls only from codes that it would leave by more than half their distance to the next one
below. With a significand s, 1 <= s < 2, that is s > s* = 2^-(p + 1) / (1 - beta). Where s* >= 2 no
code is left, however small the gradients are. Large ones still lift it.

Rates are taken as FP32 holds them: their products with a format's numbers are then exact in FP64,
and so are ties.
"""

from __future__ import annotations

import torch

from lowprec.numerics.formats import Format, round_to

FORMATS = ("e2m1", "e3m2", "e5m2", "e4m3", "e3m4", "bf16", "fp16", "tf32")
RATES = (0.5, 0.75, 0.9, 0.9375, 0.95, 0.98, 0.99, 0.999, 0.9999)
SHOWN = ("e4m3", "e5m2", "bf16", "fp16"), (0.9, 0.95, 0.99, 0.999)
"""Formats and rates whose averages are followed through random gradients."""


def threshold(fmt, beta: float) -> float:
    """s*: the significand above which an average in `fmt` falls; 2 and more means never."""
    return 2.0 ** -(Format.parse(fmt).significand_bits + 1) / (1 - beta)


def word(fmt, beta: float) -> str:
    """What that makes of an average: it "falls", "stops" part of the way, or is "never" lower."""
    s = threshold(fmt, beta)
    return "falls" if s <= 1 else "stops" if s < 2 else "never"


def codes(fmt) -> torch.Tensor:
    """Every positive number of a format, float64, in order."""
    fmt = Format.parse(fmt)
    p, count = fmt.significand_bits, 2**fmt.significand_bits
    below = torch.arange(1, count, dtype=torch.float64) * fmt.min_subnormal
    power = torch.arange(fmt.emin, fmt.emax + 1, dtype=torch.float64).exp2()
    normal = power[:, None] * (1 + torch.arange(count, dtype=torch.float64) * 2.0**-p)
    return torch.cat([below, normal.flatten()[normal.flatten() <= fmt.max]])


def leaves(fmt, beta: float) -> torch.Tensor:
    """By the criterion, in closed form: which of `codes` a step with a gradient of zero leaves.

    A subnormal number is k times the smallest and leaves if (1 - beta) k > 1/2. A power of two has
    its next code half as far below as above. A tie goes to the code with an even significand.
    """
    fmt = Format.parse(fmt)
    x, p = codes(fmt), fmt.significand_bits
    part, exponent = x.frexp()
    normal = x >= fmt.min_normal
    units = torch.where(normal, part * 2.0 ** (p + 1), x / fmt.min_subnormal)
    first = (units == 2.0**p) & (x > fmt.min_normal)
    drop = (1 - _held(beta)) * units * torch.where(first, 2.0, 1.0)
    return (drop > 0.5) | ((drop == 0.5) & (units % 2 == 1))


def left(fmt, beta: float) -> torch.Tensor:
    """The same by enumeration: the step is taken and rounded."""
    x = codes(fmt)
    return round_to(_held(beta) * x, fmt) < x


def rest(start: float, fmt, beta: float) -> float:
    """Where an average that starts at a number of `fmt` ends when all gradients are zero.

    Products are FP32, as in the optimisers of PyTorch and of `lowprec.numerics.recipe`.
    """
    x = torch.tensor(start, dtype=torch.float32)
    while (lower := round_to(beta * x, fmt)) < x:
        x = lower
    return x.item()


def _held(beta: float) -> float:
    return torch.tensor(beta, dtype=torch.float32).item()


def dynamic_map() -> torch.Tensor:
    """The 256 levels of the unsigned 8-bit map of Dettmers et al. (2021), in order, float64.

    Seven decades, each half as fine as the one above it. As bitsandbytes and torchao make it.
    """
    levels = [torch.zeros(1), torch.ones(1)]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + 1) + 1)
        levels.append(10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2)
    return torch.cat(levels).sort().values.double()


def left_in_map(levels, beta: float) -> torch.Tensor:
    """Which positive ones of sorted `levels` a step with a gradient of zero leaves."""
    middle = (levels[:-1] + levels[1:]) / 2
    return beta * levels[1:] < middle


def followed(fmt, rounding: str, rates=SHOWN[1], width=512, steps=3000, seed=0):
    """Root of the stored average over the true one by rate, with g from N(0, s^2) at each step.

    s^2 goes over one octave, so that no place between two powers of two is preferred. Both start
    at s^2; the last half of the steps counts. Returns {beta: ratio}.
    """
    generator = torch.Generator().manual_seed(seed)
    beta = torch.tensor(rates, dtype=torch.float32)[:, None]
    variance = torch.logspace(0, 1, width, 2.0).expand(len(rates), width)
    true, kept = variance.clone(), round_to(variance, fmt)
    sums = torch.zeros(2, len(rates), dtype=torch.float64)
    for step in range(steps):
        square = variance * torch.randn(variance.shape, generator=generator).square()
        true = beta * true + (1 - beta) * square
        kept = round_to(beta * kept + (1 - beta) * square, fmt, rounding, generator)
        if step >= steps // 2:
            sums += torch.stack([kept.double().mean(1), true.double().mean(1)])
    return dict(zip(rates, (sums[0] / sums[1]).sqrt().tolist(), strict=True))
