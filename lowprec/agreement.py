"""Whether two machines computed the same policy.

Two implementations of one policy order FP32 sums differently and have another exp. So before a
rounding their numbers differ by FP32 noise; after it most are the same number, and a few are
neighbours, one ulp of the site's format apart. Such a flip happens with a chance of about noise
over ulp. It follows what can be asked of another machine: few elements differ at all, and none by
more than flips at every rounding can do.
"""

from __future__ import annotations

import math

import torch

from lowprec.formats import FP32, Format, ulp

SHARE = 1 / 64
"""How many elements of o may differ. Between the kernels on an H100 and `emulate` on a CPU, over
all layers of a model whose scores grew to 3,500, flips moved at most 0.4 % of the elements. The
presets differ from each other in 1 % (scores in the thousands) to 60 % of them, so a wrong policy
is mostly, but not always, seen."""


def unequal(o, wanted) -> torch.Tensor:
    """Elements that are not the same number; NaN equals NaN.  bool"""
    return ~((o == wanted) | (o.isnan() & wanted.isnan()))


def agrees(o, wanted, t, q, k, v, policy, scale) -> bool:
    """Whether o and `wanted` (B, H, T, D), in one dtype, can be outputs of one policy.

    At most `SHARE` of the elements differ (by more than FP32 noise, where o is kept in FP32), and
    none by more than `flip_bound`. t: the trace of `emulate` under this policy on q, k, v.
    """
    distance = (o.double() - wanted.double()).abs()
    distance = torch.where(unequal(o, wanted), distance, 0.0)  # NaN beside a number stays NaN
    noise, flipped = (flip_bound(t, q, k, v, policy, scale, flips) for flips in (False, True))
    if stored_format(wanted, policy) != FP32:
        noise = torch.zeros_like(noise)
    few = (~(distance <= noise.nan_to_num(0.0))).double().mean() <= SHARE
    return bool(few and (distance <= flipped.nan_to_num(0.0)).all())


def ulp_distance(o, wanted, t, v, policy) -> float:
    """Largest difference of o, in ulp of the format that it is stored in.

    The ulp is that of the sum of magnitudes P |v|, not of o itself: where terms cancel, o is
    small and its own ulp is finer than what any of its terms is known to.
    """
    size = weights(t) @ v.double().abs()
    distance = (o.double() - wanted.double()).abs() / ulp(size, stored_format(wanted, policy))
    return torch.where(unequal(o, wanted), distance.nan_to_num(math.inf), 0.0).max().item()


def stored_format(o, policy) -> Format:
    """The coarser of the policy's format of o and the tensor's dtype."""
    dtype = Format.parse(str(o.dtype).removeprefix("torch."))
    return policy.o.fmt if policy.o.fmt.within(dtype) else dtype


def weights(t) -> torch.Tensor:
    """P = exp(s - L) of a trace of `emulate`.  (B, H, queries, keys) float64"""
    p = (t.s.double() - t.lse.double()[..., None]).exp()
    return torch.where(t.s.isfinite(), p, 0.0)


def flip_bound(t, q, k, v, policy, scale, flips=True) -> torch.Tensor:
    """How far two implementations of one policy may lie apart in o.  (B, H, T, D) float64

    t: the trace of `emulate`. FP32 noise enters q k^T, exp and the sums; with `flips` also every
    rounded number may be its neighbour, all in the same direction. Carried through attention to
    first order, relative to the weights of a row.
    """

    def moved(field, x):
        site = getattr(policy, field)
        if site.is_fp32 or not flips:
            return 0.0 * x
        return (2 if site.rounding == "stochastic" else 1) * _step(site.fmt, x)

    dtype = Format.parse(str(q.dtype).removeprefix("torch."))
    q, k, v = (x.double().abs() for x in (q, k, v))
    blocks, seen = t.alpha.shape[-1], t.s.isfinite()
    s, x = (torch.where(seen, y, 0.0).double().abs() for y in (t.s, t.x))
    argument = _sum_noise(q.shape[3]) * scale * (q @ k.mT) + 4 * FP32.unit_roundoff * (s + x + 1)
    argument = argument + 2 * moved("s", s + argument) + moved("x", x + argument)
    p = t.p_unnorm.double()
    of_p = _expm1(argument) + torch.where(p > 0, moved("p", p) / p, 0.0)
    shrinking = torch.where(t.alpha > 0, t.alpha, 1.0).double().log().abs()
    in_sums = _expm1(moved("x", shrinking)).sum(-1, keepdim=True) + _sum_noise(s.shape[-1])
    weight = weights(t)
    of_l = (weight * of_p).sum(-1, keepdim=True) + in_sums + blocks * moved("l", 1.0)
    rest = in_sums + of_l + 3 * blocks * moved("o_acc", 1.0) + 4 * FP32.unit_roundoff
    bound = (weight * of_p) @ v + rest * (weight @ v)
    bound = bound + moved("o", t.o.double().abs() + bound)
    if flips and not policy.o.fmt.within(dtype):
        bound = bound + _step(dtype, t.o.double().abs() + bound)
    return bound


def _expm1(x):
    """Relative change of exp; kept finite, so that a weight of zero times it is zero."""
    return torch.expm1(x.clamp(max=80.0))


def _step(fmt: Format, x):
    """An ulp of fmt at x >= 0, or a little more."""
    return 2.0**-fmt.significand_bits * x + fmt.min_subnormal


def _sum_noise(n: int) -> float:
    """Relative to the sum of magnitudes, how far two FP32 sums of n terms in different orders may
    lie: four standard deviations for each (Higham & Mary 2019, with lambda = 4)."""
    return 8 * math.sqrt(n) * FP32.unit_roundoff
