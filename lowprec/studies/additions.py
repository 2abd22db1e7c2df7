"""Sums of a few tied terms, rounded once: how large the mean signed error is, in ulp.

A softmax row with k tied maxima adds k values of V, which are short numbers, and a residual, which
is the rest of the row and small. The sum is formed in FP32 and rounded to the low format. Short
numbers of one exponent put the sum exactly between two neighbours of the format far more often
than chance would, and there the residual alone decides which way it goes.

Signed error is rounded minus exact sum, in ulp of the format at the exact sum. Source of the
argument: Qiu & Yao 2025, section 3.3.2 and Eq. 4; the measurements are this book's own.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from lowprec import UserError
from lowprec.evidence.verdicts import Measured
from lowprec.numerics.formats import BF16, Format, bit_fields, round_to, ulp

RESIDUALS = ("none", "negative", "positive", "symmetric")


class Bias(NamedTuple):
    """Mean signed error in ulp, half the width of its 95 % interval, share of errors below 0."""

    mean: float
    half: float
    negative: float
    n: int

    @property
    def interval(self):
        """95 % interval of the mean."""
        return self.mean - self.half, self.mean + self.half

    @property
    def size_interval(self):
        """The same for the mean's absolute value."""
        return max(abs(self.mean) - self.half, 0.0), abs(self.mean) + self.half

    @property
    def signed(self) -> Measured:
        """The mean, as a claim takes it."""
        return Measured(self.mean, self.n, self.interval)

    @property
    def sized(self) -> Measured:
        """Its absolute value, as a claim takes it."""
        return Measured(abs(self.mean), self.n, self.size_interval)


def bias(error):
    """The `Bias` of a float64 tensor of independent signed errors."""
    n = len(error)
    half = 1.96 * error.std().item() / math.sqrt(n)
    return Bias(error.mean().item(), half, (error < 0).double().mean().item(), n)


def as_table(biases, *names):
    """A dictionary of `Bias` by tuples of keys as a DataFrame; names: one for each key."""
    rows = [(*key, *b) for key, b in biases.items()]
    return pd.DataFrame(rows, columns=[*names, *Bias._fields])


def check_format(fmt):
    """The format if its sums can be studied here, else `UserError`."""
    fmt = Format.parse(fmt)
    if not 2 <= fmt.significand_bits <= 10 or fmt.max < 64:
        raise UserError(
            f"fmt {fmt.name} does not suit: take one with 2 to 10 stored significand bits that "
            "reaches 64, for example bf16, fp16 or e4m3fn."
        )
    return fmt


def tied_values(fmt, samples, k, generator, sign=-1):
    """Values of V that tied tokens carry: uniform over the numbers of `fmt` in sign·[2, 4).

    Returns float64 of shape (k, samples). sign: -1 or 1.
    """
    if samples < 2:
        raise UserError(f"samples is {samples}: take at least 2.")
    count = 2**fmt.significand_bits
    steps = torch.randint(count, (k, samples), generator=generator)
    return sign * (2 + 2.0 * steps.double() / count)


def residual(total, fmt, kind, size, generator):
    """The rest of the row: a half-normal number of standard deviation `size` ulp of `total`.

    total: float64 tensor, the sum of the tied terms. kind: one of RESIDUALS; "symmetric" takes
    either sign at random. Returns float64 of total's shape.
    """
    if kind not in RESIDUALS:
        raise UserError(f"Unknown residual {kind!r}: take one of {', '.join(RESIDUALS)}.")
    if size < 0:
        raise UserError(f"The residual is {size} ulp large: take 0 or more.")
    normal = torch.randn(total.shape, generator=generator, dtype=torch.float64)
    if kind == "none":
        normal.zero_()
    elif kind != "symmetric":
        normal = normal.abs() * (-1 if kind == "negative" else 1)
    return size * normal * ulp(total, fmt)


def sum_fp32(terms):
    """Sum over the first dimension in its order, each partial sum rounded to FP32."""
    total, *others = terms.float()
    for term in others:
        total = total + term
    return total


def tensor_core_sum(products, block, extra=0):
    """Sums of (K, n) float64 products as tensor cores form them, by a model; (n,) float64.

    `block` products and the sum so far at a time: aligned with the largest of them, bits below the
    24 of FP32 and `extra` more are cut, the rest is added exactly and cut to FP32 (Fasi et al.
    2021). Neither overflow nor subnormal numbers.
    """

    def cut(x, size, bits):
        unit = 2.0 ** (size.clamp(min=1e-300).log2().floor() + 1 - bits)
        return (x / unit).trunc() * unit

    total = torch.zeros_like(products[0])
    for part in products.split(block):
        terms = torch.cat([part, total[None]])
        total = cut(terms, terms.abs().amax(0), 24 + extra).sum(0)
        total = cut(total, total.abs(), 24)
    return total


def sum_error(terms, fmt, rounding="nearest_even", generator=None):
    """Signed error in ulp of the FP32 sum of `terms` rounded once to `fmt`.

    terms: float64 of shape (terms, samples). Terms are rounded to FP32 first, and the exact sum
    is that of the rounded ones. Returns float64 of shape (samples,).
    """
    terms = terms.float().double()
    exact = terms.sum(0)
    rounded = round_to(sum_fp32(terms), fmt, rounding=rounding, generator=generator)
    return (rounded.double() - exact) / ulp(exact, fmt)


def tied_sum_bias(
    fmt, k, kind, size, samples, generator, weight=1.0, sign=-1, rounding="nearest_even"
):
    """`Bias` of `samples` sums of k tied terms weight·V and a residual; see `residual`.

    weight: the tied P̄, a number of `fmt`. The generator also gives stochastic rounding its words.
    """
    ties = weight * tied_values(fmt, samples, k, generator, sign)
    rest = residual(ties.sum(0), fmt, kind, size, generator)
    return bias(sum_error(torch.cat([ties, rest[None]]), fmt, rounding, generator))


def output_errors(fmt, k, rest, weight, samples, generator):
    """Signed errors in ulp of one attention output by the place where it is rounded.

    A row has k tied tokens of weight 1 with V in −[2, 4), and one more token of weight
    `weight`·U(0.2, 1) with V uniform in −[rest[0], rest[1]], both rounded to `fmt`. Numerator and
    row sum are FP32. Returns float64 tensors of shape (samples,) by name:

        numerator   the numerator alone, rounded (Qiu & Yao, Eq. 4)
        both        the rounded numerator divided by the row sum and rounded again
        output      the FP32 numerator divided by the row sum and rounded
    """

    def uniform(low, high):
        draw = torch.rand(1, samples, generator=generator, dtype=torch.float64)
        return round_to(low + (high - low) * draw, fmt)

    ties = tied_values(fmt, samples, k, generator)
    p = uniform(0.2 * weight, weight)
    terms = torch.cat([ties, -p * uniform(*rest)])
    numerator, row_sum = sum_fp32(terms), sum_fp32(torch.cat([torch.ones(k, samples), p]))
    exact = terms.sum(0) / (k + p[0])
    rounded = {
        "both": round_to(round_to(numerator, fmt) / row_sum, fmt),
        "output": round_to(numerator / row_sum, fmt),
    }
    errors = {name: (value.double() - exact) / ulp(exact, fmt) for name, value in rounded.items()}
    return {"numerator": sum_error(terms, fmt), **errors}


def tied_pairs(t, v):
    """Where one head's rows have exactly two tied maxima with V of one sign, a row a place.

    t: trace of the head under a policy that rounds its scores and the numerator to BF16; v: its
    V. Columns: row, feature, the tied keys, their values of V, the exact sum and the rounded one,
    the residual and the error of the rounding in ulp at the sum.
    """
    s, p, kept = (x[0, 0].double() for x in (t.s, t.p, t.o_acc))
    v = v[0, 0].double()
    tied = s == s.amax(-1, keepdim=True)
    rows = (tied.sum(-1) == 2).nonzero()[:, 0]
    keys = tied[rows].nonzero()[:, 1].view(-1, 2)
    pair = v[keys]
    at, feature = (pair.prod(1) > 0).nonzero().T
    row, (first, second) = rows[at], pair[at, :, feature].T
    exact, rounded = (p[rows] @ v)[at, feature], kept[row, feature]
    unit = ulp(exact, BF16)
    columns = dict(row=row, feature=feature, key_1=keys[at, 0], key_2=keys[at, 1])
    columns |= dict(v_1=first, v_2=second, total=exact, rounded=rounded)
    columns |= dict(residual=(exact - first - second) / unit, error=(rounded - exact) / unit)
    return pd.DataFrame({name: x.numpy() for name, x in columns.items()})


def choose_pair(pairs, row=-1, feature=-1, small=0.25):
    """One place of `tied_pairs`: of those with a residual below `small` ulp and above 2^-16, an ulp
    of the FP32 sum, the largest error along the residual; without any, the smallest residual.

    row, feature: choose among the places of that row, of that feature; -1 for all.
    """
    for name, value in (("row", row), ("feature", feature)):
        if value == -1:
            continue
        found = pairs[name].unique()
        pairs = pairs[pairs[name] == value]
        if pairs.empty:
            choices = ", ".join(map(str, sorted(found)[:12])) or "none"
            choices += f" and {len(found) - 12} others" * (len(found) > 12)
            raise UserError(
                f"{name}={value} has no two tied values of one sign here: choose one of {choices}, "
                "or -1"
            )
    if pairs.empty:
        raise UserError("no row has exactly two tied values of one sign: take another capture")
    near = pairs[pairs.residual.abs().between(2**-16, small, inclusive="neither")]
    if near.empty:
        return pairs.loc[pairs.residual.abs().idxmin()]
    return pairs.loc[(near.error * np.sign(near.residual)).idxmax()]


def decided(pairs) -> pd.Series:
    """In which of `tied_pairs` a residual below half an ulp, and above an ulp of the FP32 sum,
    decides a halfway case of the two ties: where the paper's mechanism shows."""
    ties = torch.tensor((pairs.v_1 + pairs.v_2).to_numpy())
    halfway = (round_to(ties, BF16) - ties).abs() == ulp(ties, BF16) / 2
    small = pairs.residual.abs().between(2**-16, 0.5, inclusive="neither")
    return halfway.numpy() & small & (pairs.residual * pairs.error > 0)


def second_operands(first: float, rest: float, printed: str) -> list[float]:
    """The BF16 numbers x for which (first + rest) + x in FP32 has the bits `printed`; all finite
    ones are tried, `FINITE` of them. printed: sign, exponent and significand as 0 and 1."""
    every = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    every = every[every.isfinite()]
    sums = (torch.tensor(first) + torch.tensor(rest)) + every
    bits = int(printed.replace(" ", ""), 2)
    return every[sums.view(torch.int32) == bits - 2**32 * (bits >= 2**31)].tolist()


FINITE = 2**16 - 2**8
"""How many bit patterns of BF16 are finite numbers."""


def all_pairs(fmt, r: float) -> torch.Tensor:
    """Errors in ulp of the sums of all pairs of numbers of `fmt` in −[2, 4) and a residual of r
    ulp, rounded once; an ulp is that of the sums, (count, count) float64."""
    count = 2**fmt.significand_bits
    values = -(2 + 2.0 * torch.arange(count).double() / count)
    step = 4 / count
    exact = values[:, None] + values + r * step
    return (round_to(exact, fmt) - exact) / step


def significant_bits(p: float, fmt) -> int:
    """How many significant bits a number of `fmt` has: 1 for a power of two."""
    return 1 + len(bit_fields(p, fmt).significand.rstrip("0"))


def draw_addition(ax, rows, colours) -> pd.DataFrame:
    """Numbers in binary below each other, aligned at the binary point; returns what is drawn.

    rows: (text, value, of), from top to bottom. of: the sum whose last places a value has, which
    are coloured: kept, rounding bit, sticky bits; or None for one that has 8 bits. colours: three.
    """
    kept, rounding, sticky = colours
    top = max(math.frexp(value)[1] for _, value, _ in rows) - 1
    drawn = []
    for i, (text, value, of) in enumerate(rows):
        bits, y = _places(value, 24 if of else 8, top), -2.3 * i
        tints = kept
        if of:
            left = 9 + top - math.frexp(of)[1]
            tints = ([kept] * left + [rounding] + [sticky] * 24)[:24]
        draw_bits(ax, 0, y, bits, tints)
        said = f"{text}  {value:.9g}".replace("-", "−")
        ax.text(0, y + 1.2, said, va="center", fontsize=10)
        drawn.append((text, repr(value), bits.strip()))
    for x, power in ((0.5, top), (8.5, top - 8), (23.5, top - 23)):
        ax.text(x, 1.9, f"$2^{{{power}}}$", ha="center", fontsize=9)
    ax.set(xlim=(-0.1, 24.1), ylim=(y - 0.2, 2.6))
    ax.axis("off")
    return pd.DataFrame(drawn, columns=["row", "value", "bits"])


def _places(x: float, stored: int, top: int) -> str:
    """The 24 places of |x| from 2^top on, of which it fills `stored` from its first 1 on."""
    text = f"{int(abs(x) * 2 ** (23 - top)):024b}"
    start = text.find("1") % 25
    return (" " * start + text[start : start + stored]).ljust(24)


def draw_bits(ax, x, y, bits, colour, digits=True):
    """One row of unit boxes from (x, y) to the right, a bit of the string `bits` in each.

    colour: one colour, or one per bit. A space in `bits` leaves its place empty.
    """
    colours = [colour] * len(bits) if isinstance(colour, str) else colour
    for i, (bit, tint) in enumerate(zip(bits, colours, strict=True)):
        if bit == " ":
            continue
        ax.add_patch(Rectangle((x + i, y), 1, 0.8, facecolor=to_rgba(tint, 0.35), edgecolor=tint))
        if digits:
            ax.text(x + i + 0.5, y + 0.38, bit, ha="center", va="center", fontsize=9)
