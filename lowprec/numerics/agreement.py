"""Whether two machines computed the same policy.

Two implementations of one policy order FP32 sums differently and have another exp. So before a
rounding their numbers differ by FP32 noise; after it most are the same number, and a few are
neighbours, one ulp of the site's format apart. Such a flip happens with a chance of about noise
over ulp. It follows what can be asked of another machine: few elements differ at all, and none by
more than flips at every rounding can do. `forward_bounds` carries both through attention to first
order; the tests of the kernels go on from there through the backward.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from lowprec.numerics import scaling
from lowprec.numerics.formats import FP32, Format, ulp

U = FP32.unit_roundoff
SHARE = 1 / 64
"""How many elements of o may differ. Between the kernels on an H100 and `emulate` on a CPU, over
all layers of a model whose scores grew to 3,500, flips moved at most 0.4 % of the elements. (In one
capture since, under FA2, whose scores of 900 stay in FP32, it was 2.0 %, which is too many.) The
presets differ from each other in 1 % (scores in the thousands) to 60 % of them, so a wrong policy
is mostly, but not always, seen."""


def unequal(o, wanted) -> torch.Tensor:
    """Elements that are not the same number; NaN equals NaN.  bool"""
    return ~((o == wanted) | (o.isnan() & wanted.isnan()))


def agrees(o, wanted, t, q, k, v, policy, tile, scale) -> bool:
    """Whether o and `wanted` (B, H, T, D), in one dtype, can be outputs of one policy.

    At most `SHARE` of the elements differ (by more than FP32 noise, where o is kept in FP32), and
    none by more than `forward_bounds`. t: the trace of `emulate` under this policy on q, k, v.
    """
    distance = (o.double() - wanted.double()).abs()
    distance = torch.where(unequal(o, wanted), distance, 0.0)  # NaN beside a number stays NaN
    noise, flipped = (
        forward_bounds(t, q, k, v, policy, tile, scale, flips)["o"].nan_to_num(0.0)
        for flips in (False, True)
    )
    if stored_format(wanted, policy) != FP32:
        noise = torch.zeros_like(noise)
    dtype = Format.parse(str(wanted.dtype).removeprefix("torch."))
    if not policy.o.fmt.within(dtype):
        flipped = flipped + step(dtype, t.o.double().abs() + flipped)
    few = (~(distance <= noise)).double().mean() <= SHARE
    return bool(few and (distance <= flipped).all())


def ulp_distance(o, wanted, t, v, policy) -> float:
    """Largest difference of o, in ulp of the format that it is stored in.

    The ulp is that of the sum of magnitudes P |v|, not of o itself: where terms cancel, o is
    small and its own ulp is finer than what any of its terms is known to.
    """
    size = weights(t) @ v.double().abs()
    scale = 1.0
    if policy.o.by_row:
        scale = scaling.by_row(t.o_acc / t.l[..., None], policy.o).scale.double()
    apart = ulp(size / scale, stored_format(wanted, policy)) * scale
    distance = (o.double() - wanted.double()).abs() / apart
    return torch.where(unequal(o, wanted), distance.nan_to_num(math.inf), 0.0).max().item()


def stored_format(o, policy) -> Format:
    """The coarser of the policy's format of o and the tensor's dtype."""
    dtype = Format.parse(str(o.dtype).removeprefix("torch."))
    return policy.o.fmt if policy.o.fmt.within(dtype) else dtype


def weights(t) -> torch.Tensor:
    """P = exp(s - L) of a trace of `emulate`.  (B, H, queries, keys) float64"""
    p = (t.s.double() - t.lse.double()[..., None]).exp()
    return torch.where(t.s.isfinite(), p, 0.0)


def sum_noise(n: int) -> float:
    """Relative to the sum of magnitudes, how far two FP32 sums of n terms in different orders may
    lie: four standard deviations for each (Higham & Mary 2019, with lambda = 4)."""
    return 8 * math.sqrt(n) * U


def step(fmt: Format, x):
    """An ulp of fmt at x >= 0, or a little more: how far apart two roundings of x may lie."""
    return 2.0**-fmt.significand_bits * x + fmt.min_subnormal


def flip(policy, field: str, x):
    """How far apart the roundings of two numbers of size x may lie beyond the numbers themselves.
    Stochastic rounding goes up or down by an ulp. A row's own scale is at most twice its largest
    number over the format's."""
    site = getattr(policy, field)
    if site.is_fp32:
        return 0.0
    far = step(site.fmt, x)
    if site.by_row:
        scale = 2 * x.amax(-1, keepdim=True) / site.fmt.max
        far = far + (scale - 1) * site.fmt.min_subnormal
    return (2 if site.rounding == "stochastic" else 1) * far


def forward_bounds(t, q, k, v, policy, tile, scale, flips=True) -> dict[str, torch.Tensor]:
    """How far two implementations of one policy may lie apart, float64: s (B, H, T, T), o and
    o_fp32 (B, H, T, D), lse (B, H, T).

    t: the trace of `emulate`. flips: whether every rounded number may be its neighbour, all in the
    same direction, or FP32 noise is all there is. A shift common to a row cancels, whatever it is;
    it only has the roundings of p, l and o_acc drawn again, which a flip of each covers. (Not
    covered is a flip of s that makes or breaks a tie under shift=mute.)
    """

    def moved(field, x):
        return flip(policy, field, x) if flips else 0.0

    tensors = {name: x.double() for name, x in vars(t).items() if torch.is_tensor(x)}
    t = SimpleNamespace(**tensors)
    q, k, v = (x.double().abs() for x in (q, k, v))
    n, blocks = t.s.shape[-1], t.alpha.shape[-1]
    s, x = (torch.where(y.isfinite(), y, 0.0).abs() for y in (t.s, t.x))
    of_s = sum_noise(q.shape[3]) * scale * (q @ k.mT) + 2 * U * s
    roundings = 1 if math.frexp(scale)[0] == 0.5 else 2  # a power of two keeps a rounded number
    of_s = of_s + roundings * moved("s", s + of_s)

    following = torch.cat([t.alpha[..., 1:], torch.ones_like(t.alpha[..., :1])], -1)
    following = following.flip(-1).cumprod(-1).flip(-1).repeat_interleave(tile or n, -1)[..., :n]
    share = following / t.l[..., None]  # what p_unnorm counts for in its row
    weight = t.p_unnorm * share
    size = weight @ v
    kind = policy.shift
    largest = s.amax(-1, keepdim=True)
    if kind.kind == "beta":
        largest = largest * (1 + max(abs(kind.beta), abs(kind.gamma)))
    elif kind.kind in ("offset", "dither"):
        largest = largest + abs(kind.amplitude)

    argument = of_s + 4 * U * (s + largest + 1)
    argument = argument + moved("x", x + argument)
    of_p = of_weight(weight, t.s - t.lse[..., None], argument)
    unrounded = t.p_unnorm + torch.where(share > 0, of_p / share, 0.0)
    of_rounding = share * moved("p", unrounded)
    shrinking = torch.where(t.alpha > 0, t.alpha, 1.0).log().abs()
    of_alpha = expm1(4 * U * largest + moved("x", shrinking)).sum(-1, keepdim=True)
    rounded = policy.l_from != "p_unnorm"
    in_l = of_p + of_rounding if rounded else of_p
    of_l = in_l.sum(-1, keepdim=True) + of_alpha + sum_noise(n)
    numerator = (of_p + of_rounding) @ v + (of_alpha + sum_noise(n)) * size

    unrounded_l = _unrounded_l(t.p if rounded else t.p_unnorm, following, policy)
    o_fp32 = (numerator + of_l * size) * t.l[..., None] / unrounded_l
    of_lse = of_l
    if policy.l_from == "p_both":  # of the other sum, in which p is not rounded
        moved_p = of_p.sum(-1, keepdim=True) * t.l[..., None]
        of_lse = moved_p / _unrounded_l(t.p_unnorm, following, policy) + of_alpha + sum_noise(n)
    of_l, of_lse = (x + blocks * moved("l", 1.0) for x in (of_l, of_lse))
    o = numerator + (of_l + 3 * blocks * moved("o_acc", 1.0) + 4 * U) * size
    o = o + moved("o", t.o.abs() + o)
    lse = (of_lse + 4 * U * (largest + t.lse.abs()[..., None] + 1))[..., 0]
    return dict(s=of_s, o=o, o_fp32=o_fp32, lse=lse)


def _unrounded_l(p, following, policy):
    """What p (..., queries, keys) add up to, unrounded; following: what alpha makes of each."""
    return (p * following).sum(-1, keepdim=True).clamp(min=policy.l_floor)


def of_weight(p, log_p, of_log):
    """How far a weight p = exp(log_p) may move if log_p does by of_log: to 1 at most, or a little
    more where l is rounded. Scores of several thousand have an ulp of 16 in BF16, so that a flip
    makes a weight of nothing one of everything."""
    far = (log_p + of_log).clamp(max=2.0**-6).exp()
    return torch.where(of_log < 1, p * expm1(of_log), far)


def expm1(x):
    """Relative change of exp; kept finite, so that zero times it is zero."""
    return torch.expm1(x.clamp(max=80.0))
