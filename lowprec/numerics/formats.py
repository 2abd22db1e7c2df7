"""Number formats and rounding: the one place where a value loses bits.

A binary format is two counts, exponent bits and stored significand bits, and a rule for values
beyond its largest one. Near x its values are equally spaced; the spacing is the ulp, a power of
two. So rounding needs no table: divide |x| by its ulp, round to an integer in the chosen mode,
multiply back. In float64 both scalings are exact, hence every result is the correctly rounded one
and no input is rounded twice.

Sources: IEEE 754-2019 (FP64, FP32, FP16 and the rounding modes), the OCP 8-bit and Microscaling
specifications (E4M3, E5M2, E2M1), Salmon et al. 2011 (the counter-based random words).
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec import UserError

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "stochastic")

# What the topmost codes mean, and the overflow rule that goes with it by nature.
_NATURAL_OVERFLOW = {"inf_nan": "inf", "nan": "nan", "none": "saturate"}


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with a sign bit and subnormal numbers.

    `significand_bits` counts stored bits; the hidden leading bit is not counted.
    `overflow` says what a magnitude becomes that lies beyond `max` after rounding, infinity
    included: "inf", "nan" or "saturate" (the largest finite value). It is only a choice of
    conversion, the values of the format stay the same.
    `specials` says what the topmost codes mean: "inf_nan" (the whole top exponent, as in IEEE
    754), "nan" (only the code with all bits set, as in E4M3) or "none" (every code is a finite
    number, as in E2M1).
    `scale` is a static scale: numbers are multiplied by 2^scale before they are stored and divided
    by it afterwards, so the values of the format are 2^-scale times those without.
    """

    name: str
    exponent_bits: int
    significand_bits: int
    overflow: str = "inf"
    specials: str = "inf_nan"
    scale: int = 0

    def __post_init__(self):
        e, m = self.exponent_bits, self.significand_bits
        # Up to 10 exponent bits every scaling below is exact in float64. With one, and no special
        # code, all numbers are equally spaced.
        least = 1 if self.specials == "none" else 2
        if not (least <= e <= 10 and 1 <= m <= 52) and (e, m, self.overflow) != (11, 52, "inf"):
            raise UserError(
                f"Format {self.name} is out of range: take 2 to 10 exponent bits and 1 to 52 "
                "significand bits, or fp64."
            )
        allowed = {"inf_nan": ("inf", "nan", "saturate"), "nan": ("nan", "saturate")}
        if self.overflow not in allowed.get(self.specials, ("saturate",)):
            raise UserError(
                f"Format {self.name} cannot have overflow={self.overflow!r}: take one of "
                f"{', '.join(allowed.get(self.specials, ('saturate',)))}."
            )
        if self.scale and (e > 7 or abs(self.scale) > 32):
            raise UserError(
                f"Format {self.name} cannot have that scale: take 2^-32 to 2^32, and at most 7 "
                "exponent bits; with FP32's range no scale changes anything."
            )

    @classmethod
    def custom(cls, exponent_bits, significand_bits, overflow="inf"):
        """The IEEE-like format of that size: `Format.custom(8, 5)` is e8m5.

        It has infinities and NaN. Where the short name belongs to a format without infinities
        (e4m3, e2m1) the name ends in "ieee".
        """
        name = f"e{exponent_bits}m{significand_bits}"
        if name in _KNOWN and not _KNOWN[name].has_inf:
            name += "ieee"
        return cls(name, exponent_bits, significand_bits).replace(overflow=overflow)

    @classmethod
    def parse(cls, text):
        """The format called `text`; a Format passes through.

        Known are the names in the error message, any eXmY, and each of these followed by
        _saturate, _nan or _inf for another overflow rule and @2^N for a static scale:
        "e4m3fn_saturate@2^8".
        `Format.parse(fmt.name) == fmt` for every format made here. Raises UserError otherwise.
        """
        return text if isinstance(text, cls) else _parse(str(text).lower())

    def replace(self, *, overflow=None, scale=None):
        """The same format with another overflow rule or static scale; the name tells which."""
        name = self.name.partition("@")[0].removesuffix(f"_{self.overflow}")
        overflow = self.overflow if overflow is None else overflow
        scale = self.scale if scale is None else scale
        if overflow != _NATURAL_OVERFLOW[self.specials]:
            name += f"_{overflow}"
        name += f"@2^{scale}" if scale else ""
        return dataclasses.replace(self, name=name, overflow=overflow, scale=scale)

    @property
    def bits(self):
        """Width in bits, sign included."""
        return 1 + self.exponent_bits + self.significand_bits

    @property
    def bias(self):
        """What the exponent field is ahead of the exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def emin(self):
        """Exponent of the smallest normal number; subnormals share it."""
        return 1 - self.bias - self.scale

    @property
    def emax(self):
        """Exponent of the largest finite number."""
        return (self.bias if self.has_inf else self.bias + 1) - self.scale

    @property
    def max(self):
        """Largest finite number. Where all ones is NaN, the code before it."""
        unused = 2 if self.specials == "nan" else 1
        return math.ldexp(2 - unused * 2.0**-self.significand_bits, self.emax)

    @property
    def min_normal(self):
        return 2.0**self.emin

    @property
    def min_subnormal(self):
        return math.ldexp(1.0, self.emin - self.significand_bits)

    @property
    def unit_roundoff(self):
        """Half the ulp of 1: bounds the relative error of nearest rounding in the normal range."""
        return 2.0 ** -(self.significand_bits + 1)

    @property
    def has_inf(self):
        return self.specials == "inf_nan"

    @property
    def has_nan(self):
        return self.specials != "none"

    def within(self, other):
        """Whether every finite value of this format is one of `other`, an IEEE-like format."""
        return (
            self.emax <= other.emax
            and self.significand_bits <= other.significand_bits
            and self.emin - self.significand_bits >= other.emin - other.significand_bits
        )


FP64 = Format("fp64", 11, 52)
FP32 = Format("fp32", 8, 23)
TF32 = Format("tf32", 8, 10)
BF16 = Format("bf16", 8, 7)
FP16 = Format("fp16", 5, 10)
E5M2 = Format("e5m2", 5, 2)
# Beyond 448 a rounded value becomes NaN, as in ml_dtypes, so that an overflow is never silent.
# torch 2.13 clamps instead, infinity too: that is E4M3.replace(overflow="saturate").
E4M3 = Format("e4m3fn", 4, 3, "nan", "nan")
# With neither infinity nor NaN, saturation is all it can do. A NaN input stays NaN in the float
# tensor that holds the result, although no code of E2M1 could store it.
E2M1 = Format("e2m1", 2, 1, "saturate", "none")
# Seven equal steps on either side of zero, as of a 4-bit integer with a sign.
E1M2 = Format("e1m2", 1, 2, "saturate", "none")

_KNOWN = {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, E4M3, E5M2, E2M1, E1M2)}
_KNOWN |= {"float64": FP64, "float32": FP32, "bfloat16": BF16, "float16": FP16, "e4m3": E4M3}


@lru_cache
def _parse(text):
    match = re.fullmatch(r"(.+?)(?:_(inf|nan|saturate))?(?:@2\^(-?\d+))?", text)
    base, overflow, scale = match.groups() if match else ("", None, None)
    fmt = _KNOWN.get(base)
    if fmt is None and (size := re.fullmatch(r"e(\d+)m(\d+)(?:ieee)?", base)):
        fmt = Format.custom(int(size[1]), int(size[2]))
    if fmt is None:
        raise UserError(
            f"Unknown number format {text!r}: take one of {', '.join(sorted(_KNOWN))}, or eXmY "
            "with X exponent and Y significand bits."
        )
    return fmt.replace(overflow=overflow, scale=scale and int(scale))


def round_to(x, fmt, rounding="nearest_even", generator=None, bits=None):
    """Round each element of x to a value of `fmt`; the result keeps x's shape, dtype and device.

    x: float32 or float64 tensor. fmt: Format or its name. rounding: one of ROUNDINGS.

    Each element is rounded once, correctly, subnormals included. Zeros and results that vanish
    keep their sign; NaN stays NaN. Magnitudes beyond `fmt.max` after rounding follow
    `fmt.overflow`, and so do infinities; only "toward_zero" brings finite ones back to `fmt.max`.

    "stochastic" takes the neighbour away from zero with the probability of the discarded
    fraction of an ulp, to the nearest 2^-32: exact for a fraction of up to 32 bits, so without
    bias for every float32 input to BF16, and a value of `fmt` never moves. The uniform 32-bit
    words come from `bits` (int64 tensor of x's shape, values in [0, 2^32), see `keyed_bits`) or
    from `generator` (torch.Generator on x's device); other modes ignore both. The rule is "add
    the word to the discarded bits and cut": for float32 to BF16, on the bit pattern,
    (pattern + (word >> 16)) & 0xFFFF0000.

    The result carries no gradient and shares no memory with x. Raises UserError for another
    dtype, an unknown format or mode, missing random words, or a format that fits no float32
    tensor (wider than FP32 in one count only); a format that contains x's dtype returns x's values.
    """
    fmt = Format.parse(fmt)
    container = _container(x)
    if rounding not in ROUNDINGS:
        raise UserError(f"Unknown rounding {rounding!r}: take one of {', '.join(ROUNDINGS)}.")
    if rounding == "stochastic":
        bits = _random_words(x, generator, bits)
    x = x.detach()
    if container.within(fmt) and fmt.overflow == "inf":
        return x.clone()
    _require_fit(fmt, container)
    if rounding == "nearest_even" and container is FP32:
        # The same numbers from one hardware conversion; the tests compare all 2^32 inputs.
        sizes = (fmt.exponent_bits, fmt.significand_bits, fmt.overflow, fmt.scale)
        if sizes == (8, 7, "inf", 0):
            return x.bfloat16().float()
        if sizes == (5, 10, "inf", 0):
            return x.half().float()
        e5m2 = fmt.has_inf and sizes in ((5, 2, "inf", 0), (5, 2, "saturate", 0))
        if x.device.type == "cpu" and e5m2:
            x = x.clamp(-fmt.max, fmt.max) if fmt.overflow == "saturate" else x
            return x.to(torch.float8_e5m2).float()
        if x.device.type == "cpu" and fmt == E4M3.replace(overflow="saturate"):
            return x.clamp(-fmt.max, fmt.max).to(torch.float8_e4m3fn).float()
    return _round_by_scaling(x, fmt, rounding, bits)


def _round_by_scaling(x, fmt, rounding, bits=None):
    """`round_to` for every format and mode: divide by the ulp, round to integer, multiply back."""
    magnitude = x.abs().double()
    spacing = _spacing(magnitude, fmt)
    scaled = magnitude / spacing
    if rounding == "nearest_even":
        integer = scaled.round_()
    else:
        integer = scaled.floor()
        # Exact, unlike floor(scaled + 0.5), which fails for the number just below one half. An
        # infinity has the fraction NaN, which no comparison takes up.
        fraction = scaled.sub_(integer)
        if rounding == "nearest_away":
            integer += fraction >= 0.5
        elif rounding == "stochastic":
            integer += fraction.mul_(2.0**32).round_().add_(bits) >= 2.0**32
    result = integer.mul_(spacing)
    if rounding == "toward_zero":
        result.clamp_(max=fmt.max).masked_fill_(magnitude.isinf(), math.inf)
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": fmt.max}[fmt.overflow]
    result.masked_fill_(result > fmt.max, beyond)
    return result.copysign_(x).to(x.dtype)


def _spacing(magnitude, fmt):
    """Spacing of `fmt` at each float64 magnitude, as float64."""
    # The exponent field alone is the power of two at or below a normal number; for float64
    # subnormals it is 0, for infinities and NaN it is infinity, and the clamp mends both.
    power = (magnitude.view(torch.int64) & (0x7FF << 52)).view(torch.float64)
    return power.clamp_(2.0**fmt.emin, 2.0**fmt.emax).mul_(2.0**-fmt.significand_bits)


def ulp(x, fmt):
    """Spacing of the values of `fmt` at |x|: the power of two that the last stored bit is worth.

    x: float32 or float64 tensor; the result has its shape, dtype and device. Below `min_normal`
    it is the subnormal spacing, beyond `max` the spacing at `max`, for infinities and NaN it is
    NaN. Raises UserError for another dtype or a format wider than x's.
    """
    fmt = Format.parse(fmt)
    _require_fit(fmt, _container(x))
    spacing = _spacing(x.detach().abs().double(), fmt)
    return spacing.masked_fill_(~x.isfinite(), math.nan).to(x.dtype)


def _container(x):
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"x is {what}: pass a float32 or float64 tensor.")
    return FP32 if x.dtype == torch.float32 else FP64


def _require_fit(fmt, container):
    if not fmt.within(container):
        raise UserError(f"A float32 tensor cannot hold all values of {fmt.name}: pass x.double().")


def _random_words(x, generator, bits):
    if (generator is None) == (bits is None):
        raise UserError("Stochastic rounding needs either generator=torch.Generator or bits=words.")
    if bits is None:
        if generator.device.type != x.device.type:
            raise UserError(
                f"The generator is on {generator.device.type} and x on {x.device.type}: make it "
                f"with torch.Generator({x.device.type!r})."
            )
        return torch.randint(2**32, x.shape, generator=generator, device=x.device)
    if bits.dtype != torch.int64 or bits.shape != x.shape:
        raise UserError(
            f"bits is {bits.dtype} of shape {tuple(bits.shape)}: pass int64 of shape "
            f"{tuple(x.shape)}."
        )
    return bits


class BitFields(NamedTuple):
    """The stored bits of one number, as strings of 0 and 1; str() gives '1 10000001 0010111'."""

    sign: str
    exponent: str
    significand: str
    value: float

    def __str__(self):
        return f"{self.sign} {self.exponent} {self.significand}"


def bit_fields(x, fmt):
    """The bits that store the number x in `fmt`, for display.

    x is rounded to nearest even first; `.value` is the number the bits stand for. Raises
    UserError for NaN in a format without NaN.
    """
    fmt = Format.parse(fmt)
    value = round_to(torch.tensor(x, dtype=torch.float64), fmt).item()
    ones = 2**fmt.exponent_bits - 1
    if math.isnan(value):
        if not fmt.has_nan:
            raise UserError(f"{fmt.name} has no code for NaN: pass a number.")
        # In IEEE-like formats the quiet NaN without payload, else the one NaN there is.
        top = fmt.significand_bits - 1
        exponent, significand = ones, 2**top if fmt.has_inf else 2 ** (top + 1) - 1
    elif math.isinf(value):
        exponent, significand = ones, 0
    else:
        power = max(math.frexp(value)[1] - 1, fmt.emin) if value else fmt.emin
        units = int(math.ldexp(abs(value), fmt.significand_bits - power))
        hidden, significand = divmod(units, 2**fmt.significand_bits)
        exponent = power - fmt.emin + 1 if hidden else 0
    return BitFields(
        "1" if math.copysign(1, value) < 0 else "0",
        f"{exponent:0{fmt.exponent_bits}b}",
        f"{significand:0{fmt.significand_bits}b}",
        value,
    )


def keyed_bits(seed, site, batch, head, row, column):
    """Random 32-bit words that depend on nothing but where they are used.

    The first output word of Philox-4x32-10 (Salmon et al. 2011) with the key (seed, site) and
    the counter (column, row, head, batch): in Triton,
    `tl.philox(seed | (site << 32), column, row, head, batch)[0]`. So tiling and launch order do
    not matter, and a backward pass can form the words of its forward again.

    seed, site: ints in [0, 2^32). The rest: ints or integer tensors that broadcast together, on
    one device, each below 2^32. Returns an int64 tensor of the broadcast shape with values in
    [0, 2^32). Raises UserError for a seed or site out of range.
    """
    for name, number in (("seed", seed), ("site", site)):
        if not 0 <= number < 2**32:
            raise UserError(f"{name} is {number}: take a whole number from 0 to 2^32 - 1.")
    counter = [torch.as_tensor(c).long() for c in (column, row, head, batch)]
    return _philox(counter, (seed, site))[0]


def _philox(counter, key):
    """Ten rounds of Philox-4x32: four words from a counter of four tensors and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_words(c0, 0xD2511F53)
        high2, low2 = _multiply_words(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _multiply_words(words, constant):
    """High and low 32 bits of words · constant, for words < 2^32 and 2^31 <= constant < 2^32."""
    # With constant - 2^32, which is negative, the product stays within int64.
    product = words * (constant - 2**32)
    return (product >> 32) + words, product & 0xFFFFFFFF
