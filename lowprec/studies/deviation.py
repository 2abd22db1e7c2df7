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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowprec import UserError
from lowprec.attention.inputs import check_inputs
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import BF16, Format, round_to
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.numerics.scaling import stored

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
        return lambda x: stored(x, site)

    s = at("s")(scale * _product(q, k.mT, at("s"), serial))
    p = at("x")(s - s.amax(-1, keepdim=True)).exp()
    if policy.l_from == "p_rounded":
        p = at("p")(p)
    return _product(at("p")(p / _sum(p, at("l"), serial)), v, at("o"), serial)


def tiled(inputs, policy, tile=None):
    """O of `reference.emulate`, tile by tile, unmasked; tile: keys, None for the whole row."""
    return emulate(*inputs, policy, tile=tile, causal=False).o


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


def both_ways(inputs, fmt, tile):
    """`deviations` with every site rounded to `fmt`: of flash and of baseline attention from
    float64, and of flash from baseline."""
    exact = oracle(*inputs, causal=False).o
    base, tiles = baseline(*inputs, every_site(fmt)), tiled(inputs, every_site(fmt), tile)
    return {
        "flash": deviations(tiles, exact),
        "baseline": deviations(base, exact),
        "flash − baseline": deviations(tiles, base),
    }


def production(fmt):
    """The policy of production kernels with `fmt` for BF16: exponentials and O are stored in it."""
    return PrecisionPolicy(p=Format.parse(fmt).name, o=Format.parse(fmt).name)


def fp32_sums(fmt):
    """The same with the scores in `fmt` as well; the sums stay in FP32."""
    return production(fmt).replace(s=Format.parse(fmt).name)


def placements(inputs, fmt, tile):
    """Six places to round in either form: {place: (O of flash, O of baseline)}.

    every addition: every operation, products and sums term by term. O normalised early: every
    operation, O divided by the row sum after each tile. every operation: of flash, α included.
    every site: `every_site`. FP32 sums: `fp32_sums`. FA2: `production`.
    """
    every = baseline(*inputs, every_site(fmt))
    found = {
        "every addition": (
            flash(*inputs, fmt, tile, serial=True),
            baseline(*inputs, every_site(fmt), serial=True),
        ),
        "O normalised early": (flash(*inputs, fmt, tile, early=True), every),
        "every operation": (flash(*inputs, fmt, tile), every),
        "every site": (tiled(inputs, every_site(fmt), tile), every),
    }
    for name, policy in {"FP32 sums": fp32_sums(fmt), "FA2": production(fmt)}.items():
        found[name] = tiled(inputs, policy, tile), baseline(*inputs, policy)
    return found


def by_length(lengths, seeds, queries, head_dim, fmt, tile, count, at_once=2**15):
    """`deviations` of forms with every site rounded, a row for each of `lengths` in keys, form and
    seed; `relative` is max over rms.

    Forms: flash attention with `tile` keys a tile or, where named so, with `count` tiles; baseline;
    and flash with its row sum ℓ or its numerator Ō in FP32. at_once: keys of all seeds together
    that are computed at once, which bounds the memory.
    """
    policy, tables = every_site(fmt), []
    for n in lengths:
        forms = {
            f"flash, tiles of {tile}": lambda x: tiled(x, policy, tile),
            f"flash, {count} tiles": lambda x, n=n: tiled(x, policy, max(1, n // count)),
            "baseline": lambda x: baseline(*x, policy),
            "ℓ in FP32": lambda x: tiled(x, policy.replace(l="fp32"), tile),
            "Ō in FP32": lambda x: tiled(x, policy.replace(o_acc="fp32"), tile),
        }
        group = max(1, at_once // n)
        for some in (seeds[i : i + group] for i in range(0, len(seeds), group)):
            inputs = random_inputs(some, queries, n, head_dim, fmt)
            exact = oracle(*inputs, causal=False).o
            for name, form in forms.items():
                table = deviations(form(inputs), exact).assign(keys=n, form=name, seed=list(some))
                tables.append(table)
    found = pd.concat(tables, ignore_index=True)
    return found.assign(relative=found["max"] / found.rms)


def _of_torch(backend):
    """PyTorch's attention by one of its kernels, on BF16 inputs."""

    def call(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*(t.bfloat16() for t in (q, k, v)))

    return call


ON_CAPTURES = {
    "flash": lambda *x: tiled(x, every_site(BF16), 64),
    "baseline": lambda *x: baseline(*x, every_site(BF16)),
    "flash, FA2": lambda *x: tiled(x, "FA2", 64),
    "flash, scores in FP32": lambda *x: tiled(x, every_site(BF16).replace(s="fp32"), 64),
    "PyTorch flash": _of_torch(SDPBackend.FLASH_ATTENTION),
    "PyTorch plain": _of_torch(SDPBackend.MATH),
}
"""What `on_captures` compares; PyTorch's are its kernels for a CPU."""


def on_captures(captures, last=32, forms=ON_CAPTURES):
    """The largest deviation of each form on captured q, k and v, in percent of the root mean square
    of the exact outputs: a row a capture, a column a form.

    The `last` queries of a sequence, and the keys that all of them see, so that no mask is needed.
    """
    rows = {}
    for name, capture in captures.items():
        q, k, v = (capture.tensors[n].float() for n in "qkv")
        keys = k.shape[-2] - last + 1
        inputs = q[..., -last:, :], k[..., :keys, :], v[..., :keys, :]
        exact = oracle(*inputs, causal=False).o
        found = {form: deviations(call(*inputs), exact).iloc[0] for form, call in forms.items()}
        rows[name] = {form: 100 * d["max"] / d.rms for form, d in found.items()}
    return pd.DataFrame(rows).T


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


def times(over, under):
    """`typical` ratio of the largest deviations of two tables of the same draws."""
    return typical(over["max"] / under["max"])


def factor(ratio, target=1.0):
    """By which factor, at least 1, the `Estimate` of a ratio misses `target`; an `Estimate`."""
    away = abs(math.log(ratio.mean / target))
    half = math.log(ratio.high / ratio.low) / 2
    return Estimate(math.exp(away), math.exp(max(away - half, 0)), math.exp(away + half))
