"""What a pair of a gated layer can make of an input, and what weight decay makes of the pair.

A channel of SwiGLU multiplies two projections of one input, a = silu(g . x) (u . x). Since
|silu(z)| <= |z|, an input of length r gives at most

    |a| <= r^2 |g| |u| (1 + |cos(g, u)|) / 2,

reached, where the gate is saturated, by the x between g and u, or between g and -u. So every pair
grows with the square of r; a cosine from 0 to 1 doubles the bound, and norms carry the rest.

Saturated, a pair is the quadratic form (g u^T + u g^T) / 2, with the two eigenvalues
|g| |u| (cos + 1) / 2 and |g| |u| (cos - 1) / 2. The smallest |g|^2 + |u|^2 with which a pair makes
a form is twice the sum of their sizes. So weight decay takes an equal amount from both, and where
the smaller one is used up the pair is aligned or opposite.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

KINDS = {
    "SwiGLU": lambda g, u: F.silu(g) * u,
    "ReGLU": lambda g, u: g.relu() * u,
    "GELU": lambda g, u: F.gelu(g),
    "SiLU": lambda g, u: F.silu(g),
}
PAIRS = ("aligned", "opposite", "random")


def cosine(g, u):
    """Of vectors along the last dimension."""
    return F.cosine_similarity(g, u, dim=-1, eps=1e-30)


def bound(g, u, length=1.0):
    """The most that |a| of a pair can be with an input of that length; see the module."""
    return length**2 * g.norm(dim=-1) * u.norm(dim=-1) * (1 + cosine(g, u).abs()) / 2


def slope(kind: str, pair: str, width=64, pairs=64, inputs=1000, lengths=(64, 128), seed=0):
    """By which power of the length of x the largest |a| grows, a number a pair.

    Pairs and directions of x are drawn from N(0, 1); x has the two `lengths`.
    """
    draw = torch.Generator().manual_seed(seed)
    g, u = torch.randn(2, pairs, width, generator=draw, dtype=torch.float64)
    u = {"aligned": g, "opposite": -g, "random": u}[pair]
    x = F.normalize(torch.randn(inputs, width, generator=draw, dtype=torch.float64), dim=-1)
    low, high = (KINDS[kind](r * x @ g.mT, r * x @ u.mT).abs().amax(0) for r in lengths)
    return (high / low).log2() / math.log2(lengths[1] / lengths[0])


def shrunk(cos: float, decay: float) -> float:
    """The cosine of a saturated pair that fits one of cosine `cos`, with |g| |u| = 1, under weight
    decay: eigenvalues less `decay`, none below zero."""
    above, below = (max(0.0, (1 + s * cos) / 2 - decay) for s in (1, -1))
    return (above - below) / (above + below)


def _target(cos, width):
    g, u = torch.zeros(2, width, dtype=torch.float64)
    g[0], u[0], u[1] = 1, cos, math.sqrt(1 - cos**2)
    return g, u


def fitted(cos: float, decay: float, width=4, steps=1500, rate=0.2, seed=0) -> float:
    """The same by gradient descent on half the squared distance of forms plus decay / 2 times
    |g|^2 + |u|^2, from a drawn start."""
    form = torch.outer(*_target(cos, width))
    form = (form + form.mT) / 2
    draw = torch.Generator().manual_seed(seed)
    g, u = 0.3 * torch.randn(2, width, generator=draw, dtype=torch.float64)
    for _ in range(steps):
        off = (torch.outer(g, u) + torch.outer(u, g)) / 2 - form
        g, u = g - rate * (off @ u + decay * g), u - rate * (off @ g + decay * u)
    return float(cosine(g, u))


def neurons(cos, decay, starts=8, size=8.0, width=4, rows=512, steps=800, rate=0.4):
    """SwiGLU neurons that fit another of cosine `cos`, each on inputs of its own draw: cosines and
    |g| |u| at the end, (starts,).

    In units of the target's length, `size`, so that decay compares with `shrunk`: half the mean
    squared error over size^4, plus decay / 2 times |g|^2 + |u|^2. Full gradient descent, FP64.
    """
    drawn = []
    for seed in range(starts):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, width, generator=draw, dtype=torch.float64)
        drawn.append((x, 0.3 * torch.randn(width, 2, generator=draw, dtype=torch.float64)))
    x, pair = map(torch.stack, zip(*drawn, strict=True))
    x, target = x * size, torch.stack(_target(cos, width), 1)
    swiglu = KINDS["SwiGLU"]
    y = swiglu(*(x @ target).unbind(-1)) / size**2
    for _ in range(steps):
        pair.requires_grad_()
        off = swiglu(*(x @ pair).unbind(-1)) / size**2 - y
        loss = off.square().mean(1) / 2 + decay / 2 * pair.square().sum((1, 2))
        (slope_,) = torch.autograd.grad(loss.sum(), pair)
        pair = (pair - rate * slope_).detach()
    return cosine(*pair.unbind(-1)), pair.norm(dim=1).prod(-1)
