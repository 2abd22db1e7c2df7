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
from lowprec.attention.reference import emulate
from lowprec.evidence.claims import Measured
from lowprec.evidence.words import minus
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

    def along(self, sign: int = 1) -> Measured:
        """The mean, or with sign -1 its opposite, with its 95 % interval."""
        return Measured(sign * self.mean, self.n, tuple(sorted(sign * x for x in self.interval)))

    @property
    def uneven(self) -> Measured:
        """Distance of the share of negative errors from one half, with its 95 % interval."""
        away, wide = abs(self.negative - 0.5), 1.96 * 0.5 / math.sqrt(self.n)
        return Measured(away, self.n, (max(away - wide, 0.0), away + wide))


def bias(error):
    """The `Bias` of a float64 tensor of independent signed errors."""
    n = len(error)
    half = 1.96 * error.std().item() / math.sqrt(n)
    return Bias(error.mean().item(), half, (error < 0).double().mean().item(), n)


def largest_size(biases) -> Measured:
    """The largest size of a mean among `Bias`es, with its 95 % interval."""
    worst = max(biases, key=lambda b: abs(b.mean))
    found = abs(worst.mean)
    return Measured(found, worst.n, (max(found - worst.half, 0.0), found + worst.half))


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


def operands_of(first: float, rest: float, bits: str) -> tuple[list[float], int]:
    """The finite BF16 numbers x for which (first + rest) + x, summed in FP32, has these bits.

    bits: sign, exponent and significand of an FP32 number, in 0 and 1. Also returns how many
    numbers were tried.
    """
    every = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    every = every[every.isfinite()]
    sums = (torch.tensor(first) + torch.tensor(rest)) + every
    wanted = int(bits.replace(" ", ""), 2) - (2**32 if bits[0] == "1" else 0)
    return every[sums.view(torch.int32) == wanted].tolist(), len(every)


def pair_errors(fmt, size):
    """Signed errors in ulp of all sums of two numbers of `fmt` in -[2, 4), plus a residual.

    The sums lie in [-8, -4], where an ulp is that of 4. size: of the residual in ulp. Returns
    float64 of shape (numbers, numbers) by kind of residual: none, negative, positive.
    """
    count = 2**fmt.significand_bits
    values = -(2 + 2.0 * torch.arange(count).double() / count)
    sums, step = values[:, None] + values, 4 / count
    exact = {
        "none": sums, "negative": sums - size * step, "positive": sums + size * step
    }  # fmt: skip
    return {kind: (round_to(x, fmt) - x) / step for kind, x in exact.items()}


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


def sawtooth(size: float, draws: int = 20_000) -> float:
    """The mean error in ulp, along the residual, that two ties should have by argument.

    With a residual of r ulp it is 1/4 - r up to half an ulp, and repeats itself every half ulp;
    this is its mean over a half-normal r of standard deviation `size`.
    """
    quantiles = (torch.arange(draws).double() + 0.5) / draws
    r = size * math.sqrt(2) * torch.erfinv(quantiles)
    return (0.25 - r % 0.5).mean().item()


def significant_bits(x: float, fmt) -> int:
    """How many significant bits x has once it is rounded to `fmt`, without zeros at the end."""
    return 1 + len(bit_fields(x, fmt).significand.rstrip("0"))


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


def replayed_pairs(capture, policy):
    """`tied_pairs` of a capture's head, replayed under a policy.

    Raises `UserError` unless the policy rounds the scores and the numerator to BF16.
    """
    if not policy.s.fmt == policy.o_acc.fmt == BF16:
        raise UserError(f"policy {policy} must round scores (s) and Ō (o_acc) to bf16")
    q, k, v = (capture.tensors[name] for name in "qkv")
    t = emulate(q, k, v, policy, causal=capture.meta["causal"], scale=capture.scale)
    return tied_pairs(t, v)


def decided(pairs):
    """In which places of `tied_pairs` a residual below half an ulp decides a halfway case."""
    ties = torch.tensor((pairs.v_1 + pairs.v_2).to_numpy())
    halfway = (round_to(ties, BF16) - ties).abs() == ulp(ties, BF16) / 2
    small = pairs.residual.abs().between(2**-16, 0.5, inclusive="neither")
    return halfway.numpy() & small & (pairs.residual * pairs.error > 0)


def counted(by_capture) -> pd.DataFrame:
    """What `tied_pairs` of each capture hold, by its name: a line a capture."""
    return pd.DataFrame(
        {
            "capture": name,
            "rows": pairs.row.nunique(),
            "places": len(pairs),
            "residual, median (ulp)": pairs.residual.abs().median(),
            "below ¼ ulp": int((pairs.residual.abs() < 0.25).sum()),
            "decided": int(decided(pairs).sum()),
        }
        for name, pairs in by_capture.items()
    )


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


def draw_addition(ax, first, second, total, rounded, hues):
    """An addition of two BF16 numbers and a residual, bit by bit and without signs.

    total: the exact sum; rounded: the BF16 number it became. Below them stand the sum without the
    residual and what it becomes. hues: of the bits kept, of the rounding bit and of those behind
    it. Returns the rows as a table of row, value and bits, and what they show in words.
    """
    ties = first + second
    bare = round_to(torch.tensor(ties, dtype=torch.float64), BF16).item()
    rows = [
        ("tied value", first, 8), ("tied value", second, 8), ("residual", total - ties, 24),
        ("sum", total, 24), ("rounded", rounded, 8), ("sum without residual", ties, 24),
        ("rounded", bare, 8),
    ]  # fmt: skip
    top = max(math.frexp(value)[1] for _, value, _ in rows)
    start = top - math.frexp(total)[1]
    parts = ([hues[0]] * (start + 8) + [hues[1]] + [hues[2]] * 24)[:24]
    table = []
    for y, (name, value, stored) in zip((14, 12, 10, 8, 5, 3, 1), rows, strict=True):
        bits = _placed(value, stored, top)
        _draw_bits(ax, y, bits, parts if stored == 24 else parts[:1] * 24)
        ax.text(0, y + 1.2, f"{name}  {value:.9g}".replace("-", "−"), va="center", fontsize=10)
        table.append((name, repr(value), bits.strip()))
    for place, text, hue in ((0, "8 bits kept", 0), (9, "rounding bit", 1), (15, "any 1?", 2)):
        align = "left" if place == 0 else "center"
        ax.text(start + place, 7.5, text, color=hues[hue], ha=align, va="center", fontsize=10)
    for place in (0, 8, 23):
        ax.text(place + 0.5, 15.9, f"$2^{{{top - 1 - place}}}$", ha="center", fontsize=9)
    ax.set(xlim=(-0.1, 24.1), ylim=(0.9, 16.5))
    ax.axis("off")
    told = (
        f"An addition in binary. Two numbers of eight bits and a residual add up to {total:.9g}, "
        f"rounded to {rounded:.9g}. Without the residual the sum is {ties:.9g}, rounded to "
        f"{bare:.9g}."
    )
    return pd.DataFrame(table, columns=["row", "value", "bits"]), minus(told)


def _placed(x, stored, top):
    """`stored` bits of |x| from its first 1 on, each in its place of 24, which begin below 2^top;
    a space where none is."""
    text = f"{int(abs(x) * 2.0 ** (24 - top)):024b}"
    start = text.find("1") % 25
    return (" " * start + text[start : start + stored]).ljust(24)


def _draw_bits(ax, y, bits, colours):
    """A row of boxes at height y, a bit in each; a space leaves its place empty."""
    for x, (bit, tint) in enumerate(zip(bits, colours, strict=True)):
        if bit != " ":
            box = dict(facecolor=to_rgba(tint, 0.35), edgecolor=tint)
            ax.add_patch(Rectangle((x, y), 1, 0.8, **box))
            ax.text(x + 0.5, y + 0.38, bit, ha="center", va="center", fontsize=9)
