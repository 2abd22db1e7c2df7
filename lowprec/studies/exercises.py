"""What the solutions of some exercises say, computed: rows of attention and counters that a format
holds up."""

from __future__ import annotations

import torch

from lowprec.attention.reference import emulate
from lowprec.numerics.formats import round_to
from lowprec.numerics.policy import PrecisionPolicy


def equal_scores(keys: int, policy, tile: int | None = None) -> tuple[float, float]:
    """(ℓ, sum of the row's weights) of one query whose scores are all zero."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, keys, 16)
    t = emulate(q, k, k, policy, tile, torch.zeros_like(q), causal=False)
    return t.l.item(), t.p_bwd.sum().item()


def values_of_one(policy, tokens: int = 256, seed: int = 0) -> torch.Tensor:
    """The output before its rounding where every value is 1, less 1: (tokens, D).

    Queries and keys are normal, in BF16, in one causal head of 64 numbers.
    """
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, tokens, 64, generator=g).bfloat16() for _ in range(2))
    policy = PrecisionPolicy.parse(policy).replace(o="fp32")
    return emulate(q, k, torch.ones_like(k), policy).o[0, 0] - 1


def counter(fmt, adds: int, rounding: str = "nearest_even", count: int = 1, seed: int = 0):
    """Where `count` counters stand, (count,): each starts at 0, adds 1 and is rounded, so often."""
    g = torch.Generator().manual_seed(seed)
    value = torch.zeros(count)
    for _ in range(adds):
        value = round_to(value + 1, fmt, rounding, generator=g)
    return value
