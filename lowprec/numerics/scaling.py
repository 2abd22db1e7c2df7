"""A tensor stored in few bits with a scale: quantised and back.

A `Cast` divides each group of elements by its scale s = max|x| / max of the format, in FP32, rounds
the quotient in the one place where a value loses bits, `round_to`, and multiplies back. Its text is
FORMAT[:ROUNDING][@GROUP[,OPTION ...]] or FORMAT,OPTION:

    e4m3_saturate@tensor    one s for the last two dimensions; each of the leading ones has its own
    @token, @channel        one for each row (over the last dimension), one for each column
    @block128               one for every 128 elements row by row; the last may be shorter
    pow2                    s = the power of two at or above max|x| / max: nothing clamps
    mx                      s = 2^(floor(log2 max|x|) - emax), as OCP's MX: the top may clamp
    times                   x times FP32(max / max|x|), as scaled products on a GPU have it
    delayed16               max|x| is the largest of the 16 casts before; of the first, s is 1
    floor                   what would round to zero without being zero becomes the smallest code
    expand                  COAT: a group is raised to a power first, see `_expand`
    up                      a tie goes toward +infinity, where nearest sends it to the even number

Beyond the format's largest value its overflow rule holds (`e4m3_saturate`, `e4m3_nan`, ...). A
group of zeros has s = 1 and stays zero; s is never below 2^-126. A group with an infinity or a NaN
becomes NaN as a whole. With a delayed scale only what is not finite does, and no later cast; an
infinity is then what the overflow rule says.

A `LossRule` scales the loss instead, and so every gradient, until the weights' are divided by it.
Its text is a number, for a scale that stays, or dynamic[,OPTION ...]:

    from2^13        the first scale; 2^16 without it
    every250        after so many steps without an overflow the scale doubles; 2000 without it
    least2^7@100    from step 100 on the scale is at least 2^7, and so on for more of these

An overflow is a gradient that is not finite. Its step is skipped and the scale, if dynamic, halved.

Sources: the code of Apex (dynamic loss scales), Peng et al. 2023 and the code of MS-AMP (pow2), the
OCP Microscaling specification (mx), Micikevicius et al. 2022 and Transformer Engine (delayed), the
published kernels of COAT (expand), torchao (tensor, token, channel and block, times),
the FP4 code of MS-AMP (up).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from lowprec import UserError
from lowprec.numerics.formats import FP32, Format, round_to, ulp
from lowprec.numerics.site import Site

TINY = 2.0**-126
"""The smallest normal FP32 number, below which no scale goes."""
FLAGS = ("times", "floor", "expand", "up")


@dataclass(frozen=True)
class Cast:
    """How one tensor is stored; see the module's docstring for the text and its parts.

    group: "", "tensor", "token", "channel" or "blockN". power: "exact", "pow2" or "mx".
    history: casts that a delayed scale looks back on, 0 for the current one.
    """

    fmt: Format = FP32
    rounding: str = "nearest_even"
    group: str = ""
    power: str = "exact"
    history: int = 0
    times: bool = False
    floor: bool = False
    expand: bool = False
    up: bool = False

    def __post_init__(self):
        if not re.fullmatch(r"|tensor|token|channel|block[1-9]\d*", self.group):
            raise UserError(
                f"unknown group {self.group!r}; take tensor, token, channel or a block as block128"
            )
        scaling = self.power != "exact" or self.history or self.times or self.expand
        if scaling and not self.group:
            raise UserError(f"{self} has no scale: name its group, as in @tensor")
        if self.fmt.scale:
            raise UserError(
                f"{self.fmt.name}: a cast takes no static scale; name a group, as @tensor"
            )
        if self.group and self.fmt.max > 2.0**64:
            raise UserError(
                f"{self.fmt.name} cannot hold a scale: its largest value of {self.fmt.max:.0e} "
                "leaves max|x| / max no FP32 number; leave the scale out"
            )
        if self.expand and (self.power != "exact" or self.history or self.times):
            raise UserError(f"{self}: expand has a scale of its own; leave the other options out")
        if self.times and self.power == "mx":
            raise UserError(f"{self}: times and mx exclude each other")
        if self.up and self.rounding != "nearest_even":
            raise UserError(f"{self}: up is where a tie goes when rounding to nearest")

    @classmethod
    @lru_cache(maxsize=512)
    def parse(cls, text: str | Cast) -> Cast:
        """Read "bf16", "e4m3_saturate:stochastic@block128,pow2,floor"; a Cast passes through."""
        if isinstance(text, Cast):
            return text
        head, at, rest = str(text).strip().partition("@")
        name, *options = head.split(",")
        if at:
            group, *more = rest.split(",")
            options += more
        site = Site.parse(name)
        fields = {"group": group if at else ""}
        for option in map(str.strip, options):
            if option in ("pow2", "mx") and "power" in fields:
                raise UserError(f"{text}: take one of pow2 and mx, once")
            if option in FLAGS:
                fields[option] = True
            elif option in ("pow2", "mx"):
                fields["power"] = option
            elif found := re.fullmatch(r"delayed([1-9]\d*)", option):
                fields["history"] = int(found[1])
            else:
                raise UserError(
                    f"unknown option {option!r}; take pow2, mx, delayedN, {', '.join(FLAGS)}"
                )
        return cls(site.fmt, site.rounding, **fields)

    def __str__(self) -> str:
        options = [self.power] * (self.power != "exact")
        options += [f"delayed{self.history}"] * bool(self.history)
        options += [flag for flag in FLAGS if getattr(self, flag)]
        text = str(Site(self.fmt, self.rounding)) + f"@{self.group}" * bool(self.group)
        return ",".join([text, *options])

    @property
    def keeps(self) -> bool:
        """Whether it leaves every FP32 value as it is."""
        return self.fmt == FP32


class Quantised(NamedTuple):
    """A tensor as stored: `codes`, values of the format by group (..., groups, elements), and a
    scale a group; for `expand`, also the power and the middle of each group."""

    codes: torch.Tensor
    scale: torch.Tensor
    power: torch.Tensor | None = None
    middle: torch.Tensor | None = None

    def values(self, times: bool) -> torch.Tensor:
        """The values that the codes stand for, by group."""
        x = self.codes / self.scale if times else self.codes * self.scale
        if self.power is not None:
            x = (x.abs() ** (1 / self.power) * self.middle).copysign(x)
        return x


def _by_group(x, group):
    """x as (..., groups, elements), zeros added to the last block, and the way back."""
    if group == "token":
        return x, lambda y: y
    if group == "channel":
        return x.mT, lambda y: y.mT
    flat = x.flatten(-2)
    if group in ("", "tensor"):
        return flat.unsqueeze(-2), lambda y: y.reshape(x.shape)
    size, n = int(group.removeprefix("block")), flat.shape[-1]
    padded = torch.nn.functional.pad(flat, (0, -n % size)).unflatten(-1, (-1, size))
    return padded, lambda y: y.flatten(-2)[..., :n].reshape(x.shape)


def largest(x, cast: Cast):
    """max|x| of each group, (..., groups, 1), for x of (..., rows, columns)."""
    return _by_group(x, cast.group)[0].abs().amax(-1, keepdim=True)


def _scale(top, cast: Cast):
    """The scale of each group from its max|x|, which may be infinite or NaN."""
    exact = top.double() / cast.fmt.max
    if cast.times:
        scale = (cast.fmt.max / top.double().clamp(min=TINY)).float()
    else:
        scale = top / cast.fmt.max
    if cast.power == "pow2":
        part, exponent = exact.frexp()
        exponent = exponent - (part == 0.5).int()
        scale = torch.ldexp(torch.ones_like(exact), -exponent if cast.times else exponent).float()
    elif cast.power == "mx":
        exponent = top.double().frexp()[1] - 1 - cast.fmt.emax
        scale = torch.ldexp(torch.ones_like(exact), exponent).float()
    scale = scale.clamp(max=2.0**126) if cast.times else scale.clamp(min=TINY)
    scale = torch.where(top == 0, 1.0, scale)
    return torch.where(top.isfinite(), scale, math.nan)


def _expand(x, cast: Cast, top):
    """A group in the middle of the format: (x / middle)^k, its k and its middle.

    middle = sqrt(max min), min over elements that are not zero, and k, a multiple of 1/16, the
    largest with which (max / min)^k is at most max^2 / 2 of the format. COAT's kernel counts a zero
    as 1e-20 or 1e-30 in min, and where max = min divides by zero; here k is then 1.
    """
    bottom = torch.where(x == 0, math.inf, x.abs()).amin(-1, keepdim=True).minimum(top)
    octaves = (top.double() / bottom).log2()
    whole = math.log2(cast.fmt.max**2 / 2)
    power = ((16 * whole / octaves).floor() / 16).clamp(min=1 / 16)
    power = torch.where(octaves > 0, power, 1.0).float()
    middle = (top.double() * bottom).sqrt().float()
    middle = torch.where(top == 0, 1.0, middle)
    return ((x / middle).abs() ** power).copysign(x), power, middle


def tied(x, fmt: Format):
    """Which elements of float32 x lie half way between two neighbours in `fmt`."""
    return (x - round_to(x, fmt, "toward_zero")).abs() == ulp(x, fmt) / 2


def _above(x, fmt: Format):
    """The neighbour above each x, float32, that is no number of `fmt`."""
    return torch.where(x < 0, round_to(x, fmt, "toward_zero"), round_to(x, fmt, "nearest_away"))


def quantise(x, cast: Cast, generator=None, top=None, bits=None) -> Quantised:
    """x (..., rows, columns), float32 or float64, as `cast` stores it.

    generator, bits: for stochastic rounding, bits by group. top: max|x| by group to take the scale
    from, in place of the present one. Raises UserError for another dtype and for missing random
    bits.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise UserError(f"a cast takes float32 tensors, not {x.dtype}")
    present = cast.group and top is None and cast.power == "exact"
    grouped, _ = _by_group(x.detach(), cast.group)
    power = middle = None
    scale = torch.ones_like(grouped[..., :1])
    if cast.group:
        top = grouped.abs().amax(-1, keepdim=True) if top is None else top
        if cast.expand:
            grouped, power, middle = _expand(grouped, cast, top)
            top = grouped.abs().amax(-1, keepdim=True)
        scale = _scale(top, cast)
    small = grouped * scale if cast.times else grouped / scale
    if present and cast.rounding == "stochastic":  # a scale is rounded: the largest can lie beyond
        small = small.clamp(-cast.fmt.max, cast.fmt.max)
    codes = round_to(small, cast.fmt, cast.rounding, generator, bits)
    if cast.up:
        codes = torch.where(tied(small, cast.fmt), _above(small, cast.fmt), codes)
    if cast.floor:
        least = torch.full_like(codes, cast.fmt.min_subnormal).copysign(grouped)
        codes = torch.where((codes == 0) & (grouped != 0), least, codes)
    return Quantised(codes, scale, power, middle)


def scaled(x, cast: Cast | str, generator=None, top=None):
    """x as it reads after being stored by `cast`: quantised and back, in x's shape.

    x: float32, (rows, columns) with any leading dimensions, or (columns,).
    """
    cast = Cast.parse(cast)
    if cast.keeps or not x.numel():
        return x.detach().clone()
    if x.ndim == 1:
        return scaled(x[None], cast, generator, top)[0]
    back = _by_group(x, cast.group)[1]
    return back(quantise(x, cast, generator, top).values(cast.times))


def stored(x, site: Site, bits=None):
    """x (..., rows, columns), float32, as a rounding site keeps it; bits: as of `round_to`."""
    if not site.by_row:
        return round_to(x, site.fmt, site.rounding, bits=bits)
    return by_row(x, site, bits).values(times=False)


def by_row(x, site: Site, bits=None) -> Quantised:
    """x as such a site keeps it that gives each row a scale, a power of two."""
    return quantise(x, Cast(site.fmt, site.rounding, "token", "pow2"), bits=bits)


class Caster:
    """A cast with its memory: the history of a delayed scale, and random bits."""

    def __init__(self, cast: Cast, generator=None):
        self.cast, self.generator = cast, generator
        self.seen = deque(maxlen=cast.history or None)

    def __call__(self, x):
        if not self.cast.history or self.cast.keeps:
            return scaled(x, self.cast, self.generator)
        if x.ndim == 1:
            return self(x[None])[0]
        now = largest(x, self.cast)
        if self.seen and self.seen[-1].shape != now.shape:
            raise UserError(
                f"{self.cast} has seen {self.seen[-1].shape[-2]} groups a cast and now "
                f"{now.shape[-2]}: a delayed scale is of groups that stay; take @tensor, or "
                "micro-batches of one size"
            )
        top = torch.stack(tuple(self.seen)).amax(0) if self.seen else None
        if top is None:
            top = torch.full_like(now, self.cast.fmt.max)
        self.seen.append(torch.where(now.isfinite(), now, top))  # an overflow is of its cast alone
        return scaled(x, self.cast, self.generator, top)


# The scale of a loss

LARGEST = 2.0**24
"""The largest dynamic loss scale, Apex's."""
PATIENCE = 50
"""Steps skipped in a row with which a run has ended."""


@dataclass(frozen=True)
class LossRule:
    """How a loss scale moves; see the module's docstring for the text and its parts.

    every: steps without an overflow until it doubles, 0 for a scale that stays. least: pairs of a
    step and the smallest scale from then on, in order.
    """

    start: float = 1.0
    every: int = 0
    least: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        for scale in (self.start, *(scale for _, scale in self.least)):
            if not TINY <= scale <= LARGEST:
                raise UserError(f"a loss scale of {scale:g} is not between 2^-126 and 2^24")
        if self.least and not self.every:
            raise UserError("a loss scale that stays has no minimum; say dynamic, or leave it out")
        if any(a >= b for (a, _), (b, _) in itertools.pairwise(self.least)):
            raise UserError(f"the minima of {self} must begin one after the other")

    @classmethod
    @lru_cache(maxsize=64)
    def parse(cls, text: str | LossRule) -> LossRule:
        """Read "1", "2^13", "dynamic,every250,least2^7@0"; a LossRule passes through."""
        if isinstance(text, LossRule):
            return text
        kind, *options = str(text).strip().split(",")
        if kind != "dynamic":
            if options:
                raise UserError(f"loss scale {text!r}: only a dynamic one has options")
            return cls(_number(kind))
        fields, least = {"start": 2.0**16, "every": 2000}, []
        for option in map(str.strip, options):
            if found := re.fullmatch(r"from(\S+)", option):
                fields["start"] = _number(found[1])
            elif found := re.fullmatch(r"every([1-9]\d*)", option):
                fields["every"] = int(found[1])
            elif found := re.fullmatch(r"least(\S+)@(\d+)", option):
                least.append((int(found[2]), _number(found[1])))
            else:
                raise UserError(f"unknown option {option!r}; take from2^13, every250, least2^7@100")
        return cls(**fields, least=tuple(least))

    def __str__(self) -> str:
        if not self.every:
            return _power(self.start)
        options = [f"from{_power(self.start)}", f"every{self.every}"]
        return ",".join(["dynamic", *options, *(f"least{_power(s)}@{t}" for t, s in self.least)])

    def bottom(self, step: int) -> float:
        """The smallest scale at a step."""
        return max((scale for at, scale in self.least if at <= step), default=0.0)

    def require(self, steps: int) -> None:
        """Raise UserError for a minimum that a run of `steps` steps never comes to."""
        for at, scale in self.least:
            if at >= steps:
                raise UserError(
                    f"the minimum of {_power(scale)} begins at step {at}, and a run of {steps} "
                    "steps never comes to it; shorten it"
                )


def _number(text: str) -> float:
    """The number that "8192" or "2^13" says."""
    if not (found := re.fullmatch(r"2\^(-?\d{1,3})|(\d+(?:\.\d+)?)", text.strip())):
        raise UserError(f"{text!r} is no loss scale; write 2^13, 8192, or dynamic")
    return 2.0 ** int(found[1]) if found[1] else float(found[2])


def _power(scale: float) -> str:
    part, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if part == 0.5 else np.format_float_positional(scale, trim="-")


class LossScaler:
    """A loss scale for each seed, moved by one rule.

    scale: (seeds,) float32. skipped: (seeds,) steps that were. `ended` has for each seed None, or
    where `PATIENCE` steps were skipped in a row, the last one named: "50 steps skipped, step 163".
    """

    def __init__(self, rule: LossRule | str, seeds: int = 1, device="cpu"):
        self.rule, self.t = LossRule.parse(rule), 0
        start = max(self.rule.start, self.rule.bottom(0))
        self.scale = torch.full((seeds,), start, device=device)
        self.good, self.bad, self.skipped = (
            torch.zeros(seeds, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.ended: list[str | None] = [None] * seeds

    def accept(self, fine):
        """Move the scale on. fine: (seeds,) whether all gradients of a seed are finite."""
        self.t += 1
        self.good, self.bad = (
            torch.where(fine, self.good + 1, 0),
            torch.where(fine, 0, self.bad + 1),
        )
        self.skipped += ~fine
        for seed in (self.bad == PATIENCE).nonzero().flatten().tolist():
            self.ended[seed] = self.ended[seed] or f"{PATIENCE} steps skipped, step {self.t - 1}"
        if every := self.rule.every:
            grown = self.good == every
            self.good = torch.where(grown, 0, self.good)
            self.scale = torch.where(grown, 2 * self.scale, self.scale)
            self.scale = torch.where(fine, self.scale, self.scale / 2)
            self.scale = self.scale.clamp(self.rule.bottom(self.t), LARGEST)


def flushed(exponents, fmt, scale: float = 1.0) -> float:
    """The share of numbers that are zero in `fmt` after a multiplication with `scale`.

    exponents: {exponent: count} of non-zero numbers, those from 2^e until 2^(e + 1) under e; scale:
    a power of two. Exact but for numbers that are half of the format's smallest, which are counted
    as kept. Raises UserError for a count of nothing.
    """
    counts = {int(e): int(n) for e, n in exponents.items()}
    if not (whole := sum(counts.values())):
        raise UserError("all these numbers are zero or not finite, so no share of them is flushed")
    kept = math.log2(Format.parse(fmt).min_subnormal) - 1 - math.log2(scale)
    return sum(n for e, n in counts.items() if e < kept) / whole
