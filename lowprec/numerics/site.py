"""A rounding site: a format, a rounding into it, and perhaps a scale."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowprec import UserError
from lowprec.numerics.formats import ROUNDINGS, Format

BY_ROW = "@token,pow2"


@dataclass(frozen=True)
class Site:
    """A storage format and the rounding into it, written "bf16" or "bf16:stochastic".

    FP32 keeps its value whatever the mode, so there the mode is always "nearest_even". A small
    format may have a static scale, "e4m3fn@2^8", which is the format's, or a current one for each
    row, "e4m3fn@token,pow2", as `lowprec.numerics.scaling.Cast` has it.
    """

    fmt: Format
    rounding: str = "nearest_even"
    by_row: bool = False

    def __post_init__(self):
        if self.is_fp32:
            object.__setattr__(self, "rounding", "nearest_even")
        if self.by_row and (self.fmt.exponent_bits > 7 or self.fmt.scale):
            raise UserError(
                f"{self.fmt.name} takes no scale a row: it has FP32's range or a scale of its own"
            )

    @classmethod
    def parse(cls, text: str | Site) -> Site:
        if isinstance(text, Site):
            return text
        name, _, rounding = str(text).removesuffix(BY_ROW).partition(":")
        rounding = rounding or "nearest_even"
        scale = name.partition("@")[2]
        if scale and not re.fullmatch(r"2\^-?\d+", scale):
            raise UserError(f"{text}: a scale is a power of two, as in @2^8, or for o {BY_ROW}")
        if rounding not in ROUNDINGS:
            raise UserError(f"unknown rounding {rounding!r}; choose one of {', '.join(ROUNDINGS)}")
        return cls(Format.parse(name), rounding, str(text).endswith(BY_ROW))

    @property
    def is_fp32(self) -> bool:
        """True where the FP32 value is kept as it is."""
        return self.fmt.name == "fp32"

    def __str__(self) -> str:
        text = (
            self.fmt.name if self.rounding == "nearest_even" else f"{self.fmt.name}:{self.rounding}"
        )
        return text + BY_ROW * self.by_row
