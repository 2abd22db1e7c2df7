"""Which sizes of inputs attention stands: where O, dQ, dK and dV are finite.

With q, k, v, g the largest sizes of an element of q, k, v and dO, T tokens, D numbers a head and a
scale of at most 1, no weight is larger than 1, and with δ from an output `room` bounds every number
that is formed. Sizes are powers of two and given by their exponents. The inputs tried are made.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from lowprec.attention import trace
from lowprec.numerics.policy import CLEAN, FA2, PrecisionPolicy

T, D = 64, 32
"""Tokens, and numbers a head, of the inputs that are tried."""
LARGEST = torch.finfo(torch.bfloat16).max
LOWEST, HIGHEST = -126, 61
"""Exponents: of the smallest normal number, and one above which exact gradients leave FP32."""


def lost(patterns, exponents, policy=CLEAN, impl="emulate") -> torch.Tensor:
    """Elements of O, dQ, dK and dV that are not finite BF16 numbers, (sets, 4).

    patterns: q, k, v and dO, (T, D) each. exponents: powers of two to multiply them with, a set of
    four for each entry of the batch.
    """
    sizes = 2.0 ** torch.tensor(exponents, dtype=torch.float64).T.reshape(4, -1, 1, 1, 1)
    inputs = [
        (x * size).clamp(-LARGEST, LARGEST).bfloat16()
        for x, size in zip(patterns, sizes, strict=True)
    ]
    t = trace(*inputs, policy, impl=impl)
    numbers = [getattr(t, name).bfloat16() for name in ("o", "dq", "dk", "dv")]
    return torch.stack([(~x.isfinite()).flatten(1).sum(1) for x in numbers], 1)


def room(exponents, tokens=T, numbers=D, times=2) -> float:
    """Powers of two by which the largest bound stays below 2^127, half of what FP32 ends at.

    exponents: of q, k, v and g. times: dP − δ over D g v, 2 where δ is from an output and T + 1
    where it is from P∘dP.
    """
    q, k, v, g = exponents
    t, d = math.log2(tokens), math.log2(numbers)
    errs = math.log2(times) + d + g + v
    return 127 - max(d + q + k, t + v, t + g, errs + max(0, t + max(q, k)))


def side(tokens=T, numbers=D, times=2) -> int:
    """The largest exponent that the bounds allow all four; arguments as in `room`."""
    return max(e for e in range(127) if room([e] * 4, tokens, numbers, times) >= 0)


SIDE = side()


def corners(low, high) -> list[tuple]:
    return list(itertools.product((low, high), repeat=4))


def edge(place, others, top=126):
    """The four exponents with the largest of one of q, k, v, dO that the bounds allow beside three
    others, or None. place: which one, 0 to 3."""
    sets = [(*others[:place], e, *others[place:]) for e in range(top, -top - 1, -1)]
    return next((one for one in sets if room(one) >= 0), None)


def inside() -> list[tuple]:
    """Sets of exponents: the corners of 2^-126 and 2^SIDE, and those with one at the bounds."""
    triples = itertools.product(range(LOWEST, -LOWEST + 1, 42), repeat=3)
    faces = {edge(place, others) for others in triples for place in range(4)} - {None}
    return sorted({*corners(LOWEST, SIDE), *faces})


def _signs(generator):
    return [2.0 * torch.randint(2, (T, D), generator=generator) - 1 for _ in range(4)]


def _gaussian(generator):
    return [torch.randn(T, D, generator=generator).clamp(-4, 4) for _ in range(4)]


class Inputs:
    """Patterns of q, k, v and dO, (T, D) each with sizes up to 1, of one seed.

    patterns: one sign, random signs, Gaussian numbers, and signs with which all scores are zero and
    dQ is as large as weights that sum to 1 allow. equal: all scores of a row are equal, with one
    half of the V against the other, and one V against all others.
    """

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        one, rows, columns = torch.ones(T, D), torch.arange(T)[:, None], torch.arange(D)
        by_row, by_column = one * (1 - 2 * (rows % 2)), one * (1 - 2 * (columns % 2))
        halves = [one * (columns == 0), by_row.where(columns > 0, one), by_row, one]
        self.patterns = [
            [one] * 4, _signs(self.generator), [x / 4 for x in _gaussian(self.generator)],
            [by_column, by_row, by_row, one],
        ]  # fmt: skip
        self.equal = [halves, [one, one, one.where(rows > 0, -one), one]]

    def drawn(self, draws: int) -> dict[str, np.ndarray]:
        """Elements that are not finite with `CLEAN`, an entry a set of inputs.

        moderate: Gaussian, sizes drawn between 2^-50 and 2^50; corners: those of 2^-50 and 2^50,
        and exact, the same in float64; largest: of O alone, with q and k the largest BF16 numbers.
        """
        g = self.generator
        exponents = (100 * torch.rand(draws, 4, generator=g) - 50).tolist()
        moderate = [lost(_gaussian(g), [e]).sum().item() for e in exponents]
        corner, of = _gaussian(g), corners(-50, 50)
        found = dict(
            moderate=moderate,
            corners=lost(corner, of).sum(1).tolist(),
            exact=lost(corner, of, impl="oracle").sum(1).tolist(),
            largest=[lost(_signs(g), [(128, 128, 0, 0)])[0, 0].item() for _ in range(draws)],
        )
        return {name: np.array(counts) for name, counts in found.items()}

    def within(self, sets, patterns) -> int:
        """Elements that are not finite in all sets of exponents, with `FA2` and with `CLEAN`."""
        return sum(lost(p, sets, policy).sum().item() for policy in (FA2, CLEAN) for p in patterns)

    def stands(self, policy, impl="emulate") -> dict[str, int]:
        """What a policy loses of the `patterns` and of the `equal`.

        corners: how many of those of 2^-126 and 2^SIDE have elements that are not finite; upto: the
        largest exponent of all four that has none; scores, mean: elements of O that are not finite
        with q and k the largest BF16 numbers, and with all of V at 2^126.
        """
        cubes = [(e,) * 4 for e in range(SIDE - 4, HIGHEST)]
        sets = [*corners(LOWEST, SIDE), *cubes]
        found = sum(lost(p, sets, policy, impl) for p in self.patterns + self.equal).sum(1)
        bad = found[16:].nonzero().flatten()
        upto = cubes[bad[0]][0] - 1 if len(bad) else cubes[-1][0]
        scores = lost(self.patterns[1], [(128, 128, 0, 0)], policy, impl)[0, 0]
        mean = lost(self.patterns[0], [(0, 0, 126, 0)], policy, impl)[0, 0]
        lost_corners = int(found[:16].count_nonzero())
        return dict(corners=lost_corners, upto=upto, scores=int(scores), mean=int(mean))


def reached(patterns) -> list[float]:
    """The largest element of dQ and of dK over its bound, with all four sizes 2^SIDE."""
    inputs = [(x * 2.0**SIDE).bfloat16()[None, None] for x in patterns]
    t = trace(*inputs, CLEAN, scale=1.0, impl="emulate")
    return [x.double().abs().max().item() / (2 * T * D * 8.0**SIDE) for x in (t.dq, t.dk)]


def lost_from_dp(inputs: Inputs) -> tuple[int, int]:
    """(exponent, elements that are not finite) at the corners that bounds allow δ from P∘dP."""
    allowed = side(times=T + 1)
    policy = PrecisionPolicy.parse("FA2+delta_from=dp")
    sets = corners(LOWEST, allowed)
    return allowed, sum(int(lost(p, sets, policy).sum()) for p in inputs.patterns + inputs.equal)


def two(exponent) -> str:
    """A power of two in print."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
