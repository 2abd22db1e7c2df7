"""What cutting does that rounding to nearest does not: it makes every number smaller.

Cutting an operand to p bits takes away u units of the last place, u between 0 and 1, so on average
a share of 2^-p times the mean of 1/m, where m in [1, 2) is the significand: in BF16 0.28 %, if
digits are spread as over many magnitudes. Tensor cores cut too, inside their sums.
"""

from __future__ import annotations

import torch

from lowprec.numerics.formats import BF16, Format, round_to, ulp
from lowprec.studies.additions import tensor_core_sum
from lowprec.studies.mixed_runs import losses


def relative_change(x, fmt: Format | str, rounding: str):
    """Mean of (rounded − x) / x over entries that are normal in `fmt`, and how many they are."""
    fmt = Format.parse(fmt)
    x = x.flatten().double()
    x = x[(x.abs() >= fmt.min_normal) & x.isfinite()]
    change = round_to(x.float(), fmt, rounding).double() / x - 1
    return change.mean().item(), len(x)


def products(task):
    """The products of a task's first step from its first seed, in FP32.

    Returns (pairs, gradients): the operands (a, b) of each product of the forward, and the gradient
    that each product gets in the backward.
    """
    weights = task.init(torch.Generator().manual_seed(0))
    weights = {name: w[None].requires_grad_() for name, w in weights.items()}
    pairs, gradients = [], []

    def dot(a, b, site=None):
        pairs.append((a.detach(), b.detach()))
        out = a @ b
        out.register_hook(gradients.append)
        return out

    x, targets = (t[None] for t in task.rows(0, 0))
    losses(task.logits(weights, x, dot), targets).sum().backward()
    return pairs, gradients


def common_factor(a, b, rounding: str, fmt=BF16) -> tuple[float, float]:
    """(factor, rest): a @ b with rounded operands as a factor times the exact product, by least
    squares, and the norm of what is left over that of the exact product."""
    exact = a.double() @ b.double()
    low = round_to(a, fmt, rounding).double() @ round_to(b, fmt, rounding).double()
    factor = (low * exact).sum() / exact.square().sum()
    return factor.item(), ((low - factor * exact).norm() / exact.norm()).item()


def lost_in_sums(block: int, extra: int, terms: int = 1024, sums: int = 1000) -> float:
    """Mean of what `additions.tensor_core_sum` cuts from sums of BF16 products of one sign, in ulp
    of a BF16 output: P uniform in [0, 1), V in (−4, −2]."""
    generator = torch.Generator().manual_seed(0)
    p, v = torch.rand(2, terms, sums, generator=generator, dtype=torch.float64)
    products = round_to(p, BF16) * round_to(-2 - 2 * v, BF16)
    whole = products.sum(0)
    off = (tensor_core_sum(products, block, extra) - whole) / ulp(whole, BF16)
    return off.mean().item()
