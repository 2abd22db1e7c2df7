"""A tensor stored in few bits with a scale: quantised and back.

A `Cast` divides each group of elements by its scale s = max|x| / max of the format, in FP32, rounds
the quotient in the one place where a value loses bits, `round_to`, and multiplies back. Its text is
FORMAT[:ROUNDING][@GROUP[,OPTION ...]] or FORMAT,OPTION:

    e4m3_saturate@tensor    one s for the last two dimensions; each of the leading ones has its own
    @token, @channel        one for each row (over the last dimension), one for each column
    @block128               one for every 128 elements in storage order; the last may be shorter
    pow2                    s = the power of two at or above max|x| / max: nothing clamps
    mx                      s = 2^(floor(log2 max|x|) - emax), as OCP's MX: the top may clamp
    times                   x times FP32(max / max|x|), as scaled products on a GPU have it
    delayed16               max|x| is the largest of the 16 casts before; of the first, s is 1
    floor                   what would round to zero without being zero becomes the smallest code
    expand                  COAT: a group is raised to a power first, see `_expand`
    up                      a tie goes toward +infinity, where nearest sends it to the even number

Beyond the format's largest value its overflow rule holds (`e4m3_saturate`, `e4m3_nan`, ...). A
group of zeros has s = 1 and stays zero; s is never below 2^-126. A group with an infinity or a NaN
becomes NaN as a whole.

Sources: Peng et al. 2023 and the code of MS-AMP (pow2), the OCP Microscaling specification (mx),
Micikevicius et al. 2022 and Transformer Engine (delayed), the published kernels of COAT (expand),
torchao (tensor, token, channel and block, times), the FP4 code of MS-AMP (up).
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from lowprec import UserError
from lowprec.numerics.formats import FP32, Format, round_to, ulp
from lowprec.numerics.policy import Site

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
        scale = scale.clamp(max=2.0**126)
    else:
        scale = top / cast.fmt.max
    if cast.power == "pow2":
        part, exponent = exact.frexp()
        exponent = exponent - (part == 0.5).int()
        scale = torch.ldexp(torch.ones_like(exact), -exponent if cast.times else exponent).float()
    elif cast.power == "mx":
        exponent = top.double().frexp()[1] - 1 - cast.fmt.emax
        scale = torch.ldexp(torch.ones_like(exact), exponent).float()
    scale = scale if cast.times else scale.clamp(min=TINY)
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


def quantise(x, cast: Cast, generator=None, top=None) -> Quantised:
    """x (..., rows, columns), float32, as `cast` stores it.

    generator: for stochastic rounding. top: max|x| by group to take the scale from, in place of the
    present one. Raises UserError for another dtype and for missing random bits.
    """
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
    codes = round_to(small, cast.fmt, cast.rounding, generator)
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
    if cast.keeps:
        return x.detach().clone()
    if x.ndim == 1:
        return scaled(x[None], cast, generator, top)[0]
    back = _by_group(x, cast.group)[1]
    return back(quantise(x, cast, generator, top).values(cast.times))


class Caster:
    """A cast with its memory: the history of a delayed scale, and random bits."""

    def __init__(self, cast: Cast, generator=None):
        self.cast, self.generator = cast, generator
        self.seen = deque(maxlen=cast.history or None)

    def __call__(self, x):
        if not self.cast.history or self.cast.keeps:
            return scaled(x, self.cast, self.generator)
        now = largest(x, self.cast)
        top = torch.stack(tuple(self.seen)).amax(0) if self.seen else None
        if top is None:
            top = torch.full_like(now, self.cast.fmt.max)
        self.seen.append(now)
        return scaled(x, self.cast, self.generator, top)
