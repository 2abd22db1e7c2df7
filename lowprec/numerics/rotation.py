"""Where rotary positions round: a format for each site of the rotation of queries and keys.

Channels i and i + R/2 of q and k turn at place t by the angle t base^(-2i/R), see
`lowprec.training.rotary`. The sites, in the order of the data:

    before  q and k as the rotation reads them
    place   the number t
    rate    base^(-2i/R)
    angle   place times rate
    cs      cosine and sine of the angle
    rot     the two products of a turned channel, and their sum
    qk      turned q and k, as attention reads them
    s       their products, the scores; in a model this is the field `s` of attention's policy

Angles are formed in float64 and kept so unless their field says otherwise, all else in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowprec import UserError
from lowprec.numerics.site import Site
from lowprec.numerics.spelled import Spelled

COUNTING = ("place", "rate", "angle")
"""The sites that say where a token is."""


@dataclass(frozen=True)
class Rotation(Spelled):
    """The formats of a rotation, each written "bf16" or "bf16:toward_zero"; text as of a policy:
    "FP32+cs=bf16"."""

    noun, example = "rotation", "FP32+cs=bf16"

    before: Site = "fp32"
    place: Site = "fp64"
    rate: Site = "fp64"
    angle: Site = "fp64"
    cs: Site = "fp32"
    rot: Site = "fp32"
    qk: Site = "fp32"
    s: Site = "fp32"

    def __post_init__(self):
        for name in self.fields():
            try:
                site = Site.parse(getattr(self, name))
            except UserError as error:
                raise UserError(f"rotation field {name}: {error}") from None
            if site.rounding == "stochastic" or site.by_row:
                raise UserError(
                    f"rotation field {name}: a rotation draws no random bits and has no scale a row"
                )
            object.__setattr__(self, name, site)

    @property
    def turning(self) -> str:
        """Its text, empty where q and k are not rounded as they turn, by whatever table."""
        return "" if self.before.is_fp32 and self.rot.is_fp32 and self.qk.is_fp32 else str(self)


_FP32 = Rotation()
_USUAL = _FP32.replace(rate="fp32", angle="fp32")
PRESETS = {
    "FP32": _FP32,
    "TEXT": _USUAL.replace(qk="bf16"),
    "CODE": _USUAL.replace(cs="bf16", rot="bf16", qk="bf16"),
    "CAST": Rotation(*["bf16"] * 7),
}
"""Starting points. TEXT is the rotation in FP32 of Wang et al. (2024), section 2, CODE that of the
file they publish, transformers' Llama in BF16: angles in FP32, all else in BF16. CAST is all of
it in BF16, as where positions and frequencies are converted with the model."""
Rotation.presets = Rotation.names = PRESETS
