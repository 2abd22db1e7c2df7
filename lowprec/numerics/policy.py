"""Which attention values are stored in fewer bits: one field per rounding site.

"BF16 flash attention" is not one thing. The released code of Qiu & Yao (2025), their Eq. 4 and
production kernels round in different places, and they fail differently. A `PrecisionPolicy` says
where, and nothing else: tile sizes and hardware are not precision. Every field is FP32 unless it
says otherwise, so a preset lists only what is low, and an ablation is a one-field `diff`.

Where each field acts, per query row and over key blocks (rnd_f is the rounding of field f):

    s       rnd_s(scale * rnd_s(q k^T)); the backward forms it the same way again
    shift   block maximum -> shifted block maximum; m is the running maximum of these
    x       the argument of exp: rnd_x(s - m); also the argument of the rescaling factor alpha
    p       exp(x), as it enters P V only
    l       rnd_l(alpha l + block sum), the sum of p_unnorm or, as l_from says, of p
    o_acc   rnd(rnd(alpha o_acc) + rnd(p v)) after each block; with one block, one rounding
    o       rnd_o(o_acc / l)
    p_bwd   P = exp(s - L) as it enters dV = P^T dO only
    dp      dO V^T
    dodo    the products dO * O that delta sums (the sum itself is FP32)
    ds      P * (dP - delta), before the scale
    dq_acc, dkdv_acc   the gradient accumulators, per block like o_acc; where heads of queries share
            keys, a block is of one head, and dk and dv go on from a head to the next

`l_from` says what l adds: "p_unnorm"; "p_rounded", p, the numbers that enter P V; "p_both", a sum
of each: o divides by that of p, and lse, so P of the backward, has that of p_unnorm, rounded as l
is (an open change of flash-attention, pull request 2721).

`delta_from` says which O delta = rowsum(dO * O) reads: "o", the stored one; "o_fp32", a shadow
output that is never rounded (same p, unrounded accumulator over unrounded l); "o_split", o plus
its BF16 residual; "o_redrawn", the shadow output rounded to o's format a second time,
stochastically and with random bits of its own, an error larger than o's that the forward never
saw; "o_prime", P V of the backward's own weights, unrounded, in BF16; "dp", rowsum(P * dP)
instead. `delta_bias` c adds c * |delta_o - delta_ref| to it, where
delta_o reads the stored O and delta_ref the shadow output: a bias of the size that rounding
makes, with any share of it and either sign.

`inputs` is a `Cast`: how q, k, v and dO are stored before anything is formed of them, each head and
sequence with its own scale ("e4m3_saturate@tensor,pow2") or each block of rows (@block4096 for 64
rows of 64). Gradients are those of the numbers stored.

`row_sum` says what becomes of sum_j ds_ij, which is zero in exact arithmetic: "as_rounded", it
stays in dQ, times the keys; "removed", dq_i = scale (sum_j ds_ij k_j - (sum_j ds_ij) c) with c the
mean of all keys of the head and sequence, FP32, ds as it was rounded; the sum times c is taken off
once, after the last rounding of dq_acc. That is the same dQ exactly, for any vector c and any mask.
"refined": c is the row's own weighted key, sum_j P_ij k_j with P as p_bwd stores it, which is to dQ
what delta_i + sum_j ds_ij in place of delta_i is: one step of iterative refinement. dK gets its ds
from that delta, rounded anew.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from lowprec import UserError
from lowprec.numerics.formats import BF16
from lowprec.numerics.scaling import Cast
from lowprec.numerics.site import Site
from lowprec.numerics.spelled import Spelled

SITES = ("s", "x", "p", "l", "o_acc", "o", "dodo", "dp", "p_bwd", "ds", "dq_acc", "dkdv_acc")
"""Rounding sites in the order in which a step computes them."""

DITHER, REDRAW, DROPOUT = (len(SITES) + i for i in range(3))
"""Streams of random bits that belong to no site."""

CHOICES = {
    "l_from": ("p_unnorm", "p_rounded", "p_both"),
    "delta_from": ("o", "o_fp32", "o_split", "o_redrawn", "o_prime", "dp"),
    "row_sum": ("as_rounded", "removed", "refined"),
}


@dataclass(frozen=True)
class Shift:
    """What is subtracted from the scores instead of the block maximum r.

    kind "none": r. "beta": Qiu & Yao's stabilised softmax (2025, Algorithm 1): where the maximum
    is tied (more than one score >= r - tol), beta*r if r > 0 and gamma*r if r < 0. "offset":
    r + amplitude. "dither": r + amplitude*u, u uniform in [0, 1), one draw per row.
    Softmax is invariant under any of these in exact arithmetic; only the rounding changes.

    "pow2": log 2 times M, the least whole number that is no smaller than r / log 2. p_unnorm is
    2^(t - round(t)) 2^(round(t) - M) with t = s / log 2 in FP32, so that another M changes its
    exponent and no digit, and alpha is a power of two: p and o do not depend on the blocks, but for
    the order of FP32 sums and what is below 2^-126. It forms no s - m, so x is FP32. A row with
    |M| >= 2^21 is NaN.

    "mute" is no such shift: r, but where the maximum is tied and r > amplitude 1e30, which leaves
    the row no weight and yet m + log l and the next block's m - m finite. With a large finite tol,
    every row that sees two keys. It needs l_floor: then o is 0 / l_floor = 0 and the row adds
    nothing to any gradient; without, o is 0 / 0 = NaN. Tiled, a block that is muted mutes its row.
    "beta" with l_floor=1e-10 fades rows out: two ties alone from (beta - 1) r = ln(2e10) = 23.7 on,
    or (gamma - 1) r where r < 0, and later the more other keys count.
    """

    kind: str = "none"
    beta: float = 2.0
    gamma: float = 0.0
    tol: float = 0.0
    amplitude: float = 0.0

    _USED = {
        "none": (),
        "beta": ("beta", "gamma", "tol"),
        "offset": ("amplitude",),
        "dither": ("amplitude",),
        "mute": ("amplitude", "tol"),
        "pow2": (),
    }

    def __post_init__(self):
        if self.kind not in self._USED:
            raise UserError(f"unknown shift {self.kind!r}; choose one of {', '.join(self._USED)}")
        for name in self._USED[self.kind]:
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"shift parameter {name}={getattr(self, name)} must be finite")
        for one in dataclasses.fields(self)[1:]:
            if one.name not in self._USED[self.kind]:  # as its text, which leaves it out
                object.__setattr__(self, one.name, one.default)

    @classmethod
    def parse(cls, text: str | Shift) -> Shift:
        """Read "none", "beta(beta=7)" or "dither(amplitude=0.5)"."""
        if isinstance(text, Shift):
            return text
        match = re.fullmatch(r"(\w+)(?:\((.*)\))?", str(text).strip())
        if not match:
            raise UserError(f"cannot read shift {text!r}; write for example beta(beta=7)")
        kind, inner = match.groups()
        if kind not in cls._USED:
            raise UserError(f"unknown shift {kind!r}; choose one of {', '.join(cls._USED)}")
        used = cls._USED[kind]
        values = {}
        for item in filter(None, (inner or "").split(",")):
            name, _, value = item.partition("=")
            if name.strip() not in used:
                raise UserError(
                    f"shift {kind!r} has no parameter {name.strip()!r}; it takes "
                    f"{', '.join(used) or 'none'}"
                )
            try:
                values[name.strip()] = float(value)
            except ValueError:
                raise UserError(f"shift parameter {item.strip()!r} needs a number") from None
        return cls(kind, **values)

    def __str__(self) -> str:
        inner = ",".join(f"{name}={_short(getattr(self, name))}" for name in self._USED[self.kind])
        return f"{self.kind}({inner})" if inner else self.kind


def _short(number: float) -> str:
    """As few digits as read back as the number: attention passes its policy on as text."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def _inputs(text: str | Cast) -> Cast:
    cast = Cast.parse(text)
    drawn = cast.rounding == "stochastic" or cast.history or cast.expand
    held = cast.power != "exact" if cast.group else cast.fmt.within(BF16)
    if not cast.keeps and (drawn or not held or cast.fmt.significand_bits > 7):
        raise UserError(
            f"{cast} has no memory and draws no bits, and what it keeps must be BF16 numbers: take "
            "at most 7 significand bits, and a scale with pow2 or mx"
        )
    return cast


@dataclass(frozen=True)
class PrecisionPolicy(Spelled):
    """The precision of every site of attention; see the module's docstring for their meaning.

    Sites take "fmt", "fmt:rounding" and a scale as in `Site`; errors name the field. Two policies
    are equal when every field is. `str(policy)` is short, canonical and readable by
    `PrecisionPolicy.parse`.
    """

    noun, example, presets = "policy", "LOW+delta_from=o_fp32", {}

    s: Site = "fp32"
    x: Site = "fp32"
    p: Site = "fp32"
    l: Site = "fp32"  # noqa: E741  the paper's name for the row sum
    o_acc: Site = "fp32"
    o: Site = "fp32"
    dodo: Site = "fp32"
    dp: Site = "fp32"
    p_bwd: Site = "fp32"
    ds: Site = "fp32"
    dq_acc: Site = "fp32"
    dkdv_acc: Site = "fp32"
    l_from: str = "p_unnorm"
    delta_from: str = "o"
    shift: Shift = Shift()
    l_floor: float = 0.0
    delta_bias: float = 0.0
    row_sum: str = "as_rounded"
    inputs: Cast = "fp32"

    def __post_init__(self):
        for name in SITES:
            self._set(name, Site.parse)
            if getattr(self, name).by_row and name != "o":
                raise UserError(
                    f"policy field {name}: only o has a scale a row, since no block of a kernel "
                    "holds whole rows of anything else; take a static scale, as in e4m3fn@2^8"
                )
        self._set("shift", Shift.parse)
        self._set("inputs", _inputs)
        self._set("l_floor", float)
        self._set("delta_bias", float)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(
                    f"policy field {name}: {getattr(self, name)!r} is not one of "
                    f"{', '.join(choices)}"
                )
        if self.shift.kind == "pow2" and not self.x.is_fp32:
            raise UserError(f"policy field x: {self.x} has nothing to round with shift=pow2")
        if not 0 <= self.l_floor < float("inf"):
            raise UserError(f"policy field l_floor: {self.l_floor} must be finite, 0 (off) or more")
        if not abs(self.delta_bias) < float("inf"):
            raise UserError(f"policy field delta_bias: {self.delta_bias} must be finite; 0 is off")
        if self.presets:  # else it is one of them
            self._spell()

    def _spell(self):
        """Set `text`, what `str` gives: torch.compile takes it for a constant and guards it, and
        cannot hand a policy on."""
        object.__setattr__(self, "text", str(self))

    def _set(self, name, convert):
        try:
            object.__setattr__(self, name, convert(getattr(self, name)))
        except (UserError, ValueError, TypeError) as error:
            raise UserError(f"policy field {name}: {error}") from None

    @property
    def draws(self) -> bool:
        """Whether some value depends on random bits, and so on the seed."""
        stochastic = any(getattr(self, site).rounding == "stochastic" for site in SITES)
        return stochastic or self.shift.kind == "dither" or self.delta_from == "o_redrawn"

    @property
    def slug(self) -> str:
        """The text form with file-name characters only, e.g. "low.delta_from-o_fp32"."""
        text = str(self).lower().replace("+", ".")
        text = re.sub(r"(?<=[=^])-", "minus", text)
        return re.sub(r"[^a-z0-9_.]+", "-", text).strip("-")


FIELDS = PrecisionPolicy.fields()


def _low(sites: str, **fields) -> PrecisionPolicy:
    return PrecisionPolicy(**dict.fromkeys(sites.split(), "bf16"), **fields)


ALL_FP32 = _low("")
FA2 = _low("p o p_bwd ds")
"""Production flash-attention kernels: operands of a matmul are BF16, accumulators FP32."""
PAPER = _low("s p o_acc o")
"""Qiu & Yao's Eq. 4: BF16 scores, probabilities, numerator and output; no site of the backward,
which forms the scores again, in BF16."""
LOW = _low("s p l o_acc o dodo dp p_bwd ds")
"""Scores, weights, ℓ, numerator, output and the products of the backward in BF16; the argument of
the exponential, L and δ in FP32; run untiled."""
RELEASED = _low("s x p l o_acc o dodo dp p_bwd ds dq_acc dkdv_acc", l_floor=1e-10)
"""The released PyTorch code of Qiu & Yao, run with a tile of 512 keys."""
CLEAN = FA2.replace(delta_from="o_fp32")
"""`FA2` with clean delta: the backward reads delta from an output that was never rounded, at the
price of one FP32 output a layer. See the book's page "Clean δ, the smallest fix"."""
SAFE = FA2.replace(row_sum="refined")
"""The policy to take home: `FA2` whose backward takes the sum of each row of dS back.

Of four candidates it is the one that a rule chose, written into data/runs/refined/campaign.yaml
before the runs: no explosion in 8 seeds with learned positions, the fewest without positions. What
is shown of it, and what it costs, is on the book's page "A fix at the root".

Its text form is FA2+row_sum=refined: a recommendation may change, what runs recorded may not. Until
November 2026 the name meant what `CLEAN` is."""

PRESETS = {
    "ALL_FP32": ALL_FP32,
    "FA2": FA2,
    "PAPER": PAPER,
    "LOW": LOW,
    "RELEASED": RELEASED,
}
NAMES = PRESETS | {"CLEAN": CLEAN, "SAFE": SAFE}
"""What `PrecisionPolicy.parse` starts from; `str` writes only the names in PRESETS."""
PrecisionPolicy.presets, PrecisionPolicy.names = PRESETS, NAMES
for _named in NAMES.values():
    _named._spell()
