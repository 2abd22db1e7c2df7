"""How far baseline and flash attention lie from float64: the microbenchmark of Golden et al. 2024.

*Baseline* attention forms the whole row and normalises the probabilities before it multiplies by
V. *Flash* attention walks over tiles of keys, with a running maximum and sum, and rescales what it
has so far at each tile. In exact arithmetic both are the same; with rounding they differ, and by
how much depends on where the roundings are. `baseline` takes a policy, as `reference.emulate` does
for flash attention. `flash` rounds after every operation without exception, in the order of
FlashAttention-2 (Dao 2024) or of the first FlashAttention (Dao et al. 2022, Algorithm 1).

Shapes: q (batch, heads, queries, head_dim), k and v (batch, heads, keys, head_dim), float32. No
mask. In the notebook one element of the batch is one seed, an independent draw.
"""

import math
from typing import NamedTuple

import pandas as pd
import torch
from scipy import stats

from lowprec import UserError
from lowprec.attention.reference import check_inputs
from lowprec.numerics.formats import Format, round_to
from lowprec.numerics.policy import PrecisionPolicy

FORWARD = ("s", "x", "p", "l", "o_acc", "o")


def every_site(fmt, rounding="nearest_even"):
    """The policy that rounds every site of the forward to `fmt`; the row sum adds rounded p."""
    site = f"{Format.parse(fmt).name}:{rounding}"
    return PrecisionPolicy(**dict.fromkeys(FORWARD, site), l_from="p_rounded")


def random_inputs(seeds, queries, keys, head_dim, fmt):
    """q, k, v of N(0, 1) rounded to `fmt`, one batch element for each of `seeds`, one head."""

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(queries + 2 * keys, head_dim, generator=generator)
        return round_to(rows, fmt).split([queries, keys, keys])

    return tuple(torch.stack(t)[:, None] for t in zip(*map(draw, seeds), strict=True))


def tied_inputs(seeds, queries, keys, head_dim, fmt):
    """The same with two equal keys whose score is about 17, and V uniform in (−4, −2].

    Every query has a common part that matches the two keys, the first of the row.
    """
    q, k, v = random_inputs(seeds, queries, keys, head_dim, "fp32")
    carrier = math.sqrt(17 / math.sqrt(head_dim))
    k[:, :, :2] = carrier
    v = -2 - 2 * torch.special.ndtr(v)
    return tuple(round_to(t, fmt) for t in (q + carrier, k, v))


def baseline(q, k, v, policy, serial=False):
    """Untiled attention, probabilities normalised before P V, under the forward sites of a policy.

    Fields as in `lowprec.numerics.policy`, except that `p` is the normalised P; with
    l_from="p_rounded" the exponentials are rounded to it, too. `o_acc` is not used: O needs no
    division. serial: products and sums add from left to right and round every product and every
    partial sum to the format of their site; else they accumulate in FP32. Returns O, float32.
    Stochastic sites raise `UserError`.
    """
    policy = PrecisionPolicy.parse(policy)
    scale = check_inputs(q, k, v, False, None, shared=False)

    def at(field):
        site = getattr(policy, field)
        return lambda x: round_to(x, site.fmt, site.rounding)

    s = at("s")(scale * _product(q, k.mT, at("s"), serial))
    p = at("x")(s - s.amax(-1, keepdim=True)).exp()
    if policy.l_from == "p_rounded":
        p = at("p")(p)
    return _product(at("p")(p / _sum(p, at("l"), serial)), v, at("o"), serial)


def flash(q, k, v, fmt, tile, serial=False, early=False):
    """Flash attention with the result of every operation rounded to `fmt`, alpha's included.

    tile: keys a tile. serial: as in `baseline`. early: keep O normalised from tile to tile, as
    the first FlashAttention does; else divide once at the end. Returns O, float32.
    """
    if tile < 1:
        raise UserError(f"tile={tile} must be at least 1 key")
    scale = check_inputs(q, k, v, False, None, shared=False)

    def rnd(x):
        return round_to(x, fmt)

    m, l, o = q.new_full((*q.shape[:3], 1), -math.inf), 0.0, torch.zeros_like(q)  # noqa: E741
    for keys, values in zip(k.split(tile, 2), v.split(tile, 2), strict=True):
        s = rnd(scale * _product(q, keys.mT, rnd, serial))
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p = rnd(rnd(s - m_new).exp())
        alpha = rnd(rnd(m - m_new).exp())
        kept = rnd(alpha * l)
        l = rnd(kept + _sum(p, rnd, serial))  # noqa: E741
        added = _product(p, values, rnd, serial)
        o = rnd(rnd((kept if early else alpha) * o) + added)
        if early:
            o = rnd(o / l)
        m = m_new
    return o if early else rnd(o / l)


def _product(a, b, rnd, serial):
    """Rounded product of matrices: FP32 sums rounded once or, serial, term by term."""
    if not serial:
        return rnd(a @ b)
    total = rnd(a[..., :1] * b[..., :1, :])
    for i in range(1, a.shape[-1]):
        total = rnd(total + rnd(a[..., i : i + 1] * b[..., i : i + 1, :]))
    return total


def _sum(x, rnd, serial):
    if not serial:
        return rnd(x.sum(-1, keepdim=True))
    total = rnd(x[..., :1])
    for i in range(1, x.shape[-1]):
        total = rnd(total + x[..., i : i + 1])
    return total


def deviations(o, exact):
    """Statistics of o − exact, one row for each element of the batch.

    max and mean of its absolute value, its std, `signed`, its mean, and `along`, the mean of
    sign(exact)·(o − exact), which is negative where outputs come out too small in magnitude; `rms`
    is the root mean square of `exact`, not of the deviation. All in the unit of the outputs.
    """
    exact = exact.double().flatten(1)
    off = o.double().flatten(1) - exact
    columns = dict(
        max=off.abs().amax(1), mean=off.abs().mean(1), std=off.std(1), signed=off.mean(1),
        along=(exact.sign() * off).mean(1), rms=exact.square().mean(1).sqrt(),
    )  # fmt: skip
    return pd.DataFrame({name: column.numpy() for name, column in columns.items()})


class Estimate(NamedTuple):
    """A mean over independent draws and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def interval(self):
        return self.low, self.high

    @property
    def half_widths(self):
        """Size of the mean in half-widths of its interval: above 1 the interval excludes zero."""
        return 2 * abs(self.mean) / (self.high - self.low)


def estimate(draws, level=0.95):
    """`Estimate` of the mean of `draws` by Student's t."""
    half = stats.t.ppf((1 + level) / 2, len(draws) - 1) * stats.sem(draws)
    mean = float(sum(draws) / len(draws))
    return Estimate(mean, mean - half, mean + half)


def typical(draws):
    """`Estimate` of the geometric mean of positive `draws`, for example of ratios by seed."""
    logs = estimate([math.log(x) for x in draws])
    return Estimate(*map(math.exp, logs))


def factor(ratio, target=1.0):
    """By which factor, at least 1, the `Estimate` of a ratio misses `target`; an `Estimate`."""
    away = abs(math.log(ratio.mean / target))
    half = math.log(ratio.high / ratio.low) / 2
    return Estimate(math.exp(away), math.exp(max(away - half, 0)), math.exp(away + half))
