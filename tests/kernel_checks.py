"""Runs the attention kernels and says how far they may lie from the emulation.

Both compute the same formulas and differ in the order of FP32 sums and in exp. So before a site
the two numbers differ by FP32 noise, and after it they are mostly the same number, sometimes its
neighbour: a flip. `bounds` carries both on from `lowprec.numerics.agreement.forward_bounds` through
the backward: with flips=False the noise alone, with flips=True also a flip at every rounding, all
in the same direction. No element may lie beyond the second. Flips are rare, about noise / ulp, so
few elements lie beyond the first.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import family

from lowprec.attention import kernels
from lowprec.attention.inputs import for_queries, of_keys
from lowprec.attention.kernels import launch
from lowprec.attention.masks import Scores
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.agreement import U, flip, forward_bounds, of_weight, step, sum_noise
from lowprec.numerics.formats import Format
from lowprec.numerics.policy import SITES, PrecisionPolicy
from lowprec.training.capture import Capture

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(launch.NATIVE, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
GRADIENTS = ("dq", "dk", "dv")
NAMES = ("o", "o_fp32", "lse", "delta", "delta_o", "delta_ref", *GRADIENTS)
CAPTURES = sorted((Path(__file__).parents[1] / "data/captures").glob("*.xz"))
SHARE = 1 / 32
"""Elements that flips may carry beyond FP32 noise."""


def every(site):
    """The policy with all sites alike."""
    return PrecisionPolicy(**dict.fromkeys(SITES, site))


def captured(path, device):
    """q, k, v, do of a committed capture; its first 128 rows for the interpreter."""
    tensors = Capture.load(path).tensors
    rows = slice(128 if device == "cpu" else None)
    return [tensors[name][:, :, rows].to(device) for name in ("q", "k", "v", "do")]


def inputs_on(device, name="normal", n=100, d=64, **how):
    """q, k, v, do: one head of n rows for the interpreter, which takes up to 128 at once; on a GPU
    six heads of 1000, so that all tests there share compiled kernels."""
    if name == "captured":
        return captured(CAPTURES[0], device)
    shape = (1, 1, n, d) if device == "cpu" else (2, 3, max(n, 1000), d)
    return family(name, shape, device=device, **how)


def shared(inputs, heads):
    """The same with so many heads of keys and values."""
    q, k, v, do = inputs
    return q, k[:, :heads], v[:, :heads], do


def run(q, k, v, do, policy, tile=None, causal=True, scale=None, seed=0, mask=None, bias=None):
    """Everything that forward and backward return; o is as the policy stores it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    how = dict(mask=mask, bias=bias)
    out, o, o_fp32, lse, ties = kernels.forward(
        q, k, v, policy, causal, scale, tile, seed, stored=True, shadow=True, ties=True, **how
    )
    assert torch.equal(out.nan_to_num(7), o.to(q.dtype).nan_to_num(7))
    names = ("dq", "dk", "dv", "delta", "delta_o", "delta_ref", "sums")
    grads = kernels.backward(
        do, q, k, v, o, o_fp32, lse, ties, policy, causal, scale, tile, seed, probe=True, **how
    )
    named = dict(zip(names, grads, strict=True))
    return SimpleNamespace(o=o, o_fp32=o_fp32, lse=lse, ties=ties, **named)


def beyond_bounds(
    got, inputs, policy, tile=None, causal=True, scale=None, seed=0, by_row=False, mask=None,
    bias=None,
):  # fmt: skip
    """What of `got` does not agree with the emulation of this policy, in words.

    by_row: in a gradient as many elements may lie beyond noise as `reached` expects. Captured rows
    have few weights that count, so that one flip carries a whole row; drawn ones stay below SHARE.

    Left out are rows whose sum has underflowed (only a shift brings that about), and dk and dv of
    their heads: exp2 flushes what is below 2^-126, which for the other rows is under FP32 noise.
    Left out, too, are rows that shift=mute silences in one only: there a flip made or broke a tie.
    """
    q, k, v, do = inputs
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    how = dict(mask=mask, scores=Scores(bias=bias))
    t = emulate(q, k, v, policy, tile, do, causal, scale, seed, **how)
    exact = oracle(q, k, v, causal, scale, do=do, **how)
    noise, flipped = (bounds(t, *inputs, policy, tile, scale, flips) for flips in (False, True))
    rows = (t.l >= 2.0**-126 / U) & ((got.lse > 1e29) == (t.lse > 1e29))
    group = q.shape[1] // k.shape[1]
    heads = rows.unflatten(1, (-1, group)).all(2).all(-1, keepdim=True).expand(-1, -1, k.shape[2])
    wrong = [] if rows.double().mean() > 0.9 else ["too few rows left to compare"]
    for name in NAMES:
        compared = heads if name in ("dk", "dv") else rows
        value, wanted = (getattr(x, name)[compared].double() for x in (got, t))
        within, far = noise[name][compared], flipped[name][compared]
        distance = (value - wanted).abs()
        if not (distance <= far).all():
            wrong.append(f"{name}: {(distance / far).max():.3g} of its bound")
        share = (distance > within).double().mean()
        if share > max(SHARE, noise["reached"].get(name, 0) if by_row else 0):
            wrong.append(f"{name}: {share:.3f} of the elements beyond FP32 noise")
        truth = getattr(exact, {"o_fp32": "o"}.get(name, name), None)
        if truth is None:
            continue
        error, of_emulate = ((x - truth[compared]).norm() for x in (value, wanted))
        if not error <= 2 * of_emulate + within.norm():
            wrong.append(f"{name}: {error / of_emulate:.3g} times the error of emulate")
    if (share := (got.ties != t.ties).double().mean()) > SHARE:
        wrong.append(f"ties: {share:.3f} of the rows")
    return wrong


def bounds(t, q, k, v, do, policy, tile, scale, flips):
    """{name: elementwise bound of |kernel - emulate|} for NAMES, from the trace t of `emulate`.

    dk and dv of shared keys are sums over all queries of a group, and so are their bounds; a block
    of the accumulator is of one head.
    """
    dtype = Format.parse(str(q.dtype).removeprefix("torch."))
    q, k, v, do = (x.double().abs() for x in (q, k, v, do))
    k, v = (for_queries(x, q.shape[1]) for x in (k, v))
    t = SimpleNamespace(**{name: x.double() for name, x in vars(t).items()})

    def moved(field, x):
        return flip(policy, field, x) if flips else 0.0

    seen = t.s.isfinite()
    s = torch.where(seen, t.s, 0.0).abs()
    of = forward_bounds(t, q, k, v, policy, tile, scale, flips)

    def row_sum(o, of_o, field=None):
        product = do * o.abs()
        of_product = do * of_o + 2 * U * product
        if field:
            of_product = of_product + moved(field, product + of_product)
        return of_product.sum(-1) + sum_noise(q.shape[3]) * product.sum(-1)

    p = torch.where(seen, (t.s - t.lse[..., None]).exp(), 0.0)
    argument = of["s"] + of["lse"][..., None] + 4 * U * (s + t.lse.abs()[..., None] + 1)
    of_p = of_weight(p, t.s - t.lse[..., None], argument) + 2.0**-126  # below it exp2 gives 0
    of_dp = sum_noise(q.shape[3]) * (do @ v.mT)
    of_dp = of_dp + moved("dp", t.dp.abs() + of_dp)
    of["delta_o"] = row_sum(t.o, of["o"], "dodo")
    of["delta_ref"] = row_sum(t.o_fp32, of["o_fp32"])
    drawn = PrecisionPolicy(o=replace(policy.o, rounding="stochastic"))
    redrawn = flips * flip(drawn, "o", t.o_fp32.abs() + of["o_fp32"])
    residual = (t.o_fp32 - t.o).abs() + of["o"] + of["o_fp32"]
    of_pv = of_p @ v + sum_noise(q.shape[2]) * (p @ v)
    delta = {
        "o": of["delta_o"],
        "o_fp32": row_sum(t.o_fp32, of["o_fp32"], "dodo"),
        "o_split": row_sum(t.o_fp32, of["o_fp32"] + flips * 2.0**-7 * residual, "dodo"),
        "o_prime": row_sum(p @ v, of_pv + flips * 2.0**-7 * (p @ v + of_pv), "dodo"),
        "o_redrawn": row_sum(t.o_fp32, of["o_fp32"] + redrawn, "dodo"),
        "dp": (of_p * (t.dp.abs() + of_dp) + p * of_dp).sum(-1)
        + sum_noise(q.shape[2]) * (p * t.dp.abs()).sum(-1),
    }[policy.delta_from]
    delta = delta + abs(policy.delta_bias) * (of["delta_o"] + of["delta_ref"])
    of["delta"] = delta

    def before_ds(delta, of_delta):
        """Of P * (dP - delta), before it is rounded."""
        delta, of_delta = delta[..., None], of_delta[..., None]
        gap = (t.dp - delta).abs()
        of_gap = of_dp + of_delta + 4 * U * (t.dp.abs() + delta.abs())
        return of_p * gap + (p + of_p) * of_gap + 2 * U * p * gap

    noise_ds = noise_ds_dk = before_ds(t.delta, delta)
    of_ds = of_ds_dk = noise_ds + moved("ds", t.ds.abs() + noise_ds)
    of_sum = of_ds.sum(-1) + sum_noise(k.shape[2]) * t.ds.abs().sum(-1)
    if policy.row_sum == "refined":
        refined = t.delta + t.row_sum
        noise_ds_dk = before_ds(refined, delta + of_sum + 2 * U * refined.abs())
        of_ds_dk = noise_ds_dk + moved("ds", t.ds_dk.abs() + noise_ds_dk)
    noise_p, of_p = of_p, of_p + moved("p_bwd", p + of_p)

    def product(field, left, of_left, right, result, factor):
        group = q.shape[1] // result.shape[1]
        size, of_acc = (of_keys(x @ right, result.shape[1]) for x in (left.abs(), of_left))
        of_acc = of_acc + sum_noise(group * q.shape[2]) * size
        of_acc = of_acc + 2 * group * t.alpha.shape[-1] * moved(field, size + of_acc)
        bound = factor * of_acc
        return bound + (step(dtype, result.abs() + bound) if flips else 0.0)

    of["dq"] = product("dq_acc", t.ds, of_ds, k, t.dq, scale)
    taken = (of_sum + sum_noise(k.shape[2]) * t.row_sum.abs())[..., None]
    if policy.row_sum == "removed":
        of["dq"] = of["dq"] + scale * taken * k.mean(2, keepdim=True)
    elif policy.row_sum == "refined":
        of_pk = of_p @ k
        of_product = taken * (t.p_bwd @ k + of_pk) + t.row_sum.abs()[..., None] * of_pk
        of["dq"] = of["dq"] + scale * of_product
    of["dk"] = product("dkdv_acc", t.ds_dk.mT, of_ds_dk.mT, q, t.dk, scale)
    of["dv"] = product("dkdv_acc", t.p_bwd.mT, of_p.mT, do, t.dv, 1.0)
    if not flips:
        of["reached"] = dict(
            dq=reached(policy.ds, t.ds, noise_ds, scale * k, of["dq"]),
            dk=reached(policy.ds, t.ds_dk.mT, noise_ds_dk.mT, scale * q, of["dk"]),
            dv=reached(policy.p_bwd, t.p_bwd.mT, noise_p.mT, do, of["dv"]),
        )
    return of


def reached(site, left, of_left, right, within, count=32):
    """Expected share of the elements of left @ right that a flip of left carries beyond `within`.

    A number of left flips with a chance of at most of_left / ulp, and moves what it enters by an
    ulp times its partner. From `count` rows, evenly spaced.
    """
    if site.is_fp32:
        return 0.0
    within = for_queries(within, left.shape[1])
    rows = torch.linspace(0, left.shape[-2] - 1, count, device=left.device).long()
    left, of_left, within = (x[..., rows, :] for x in (left, of_left, within))
    jump = step(site.fmt, left.abs())
    chance = (of_left / jump).clamp(max=1.0)
    far = jump[..., None] * right[..., None, :, :] > within[..., None, :]
    return float(-torch.expm1(-(chance[..., None] * far).sum(-2)).mean())
