"""Signed bias: of tied rows over same-sign values, as theory says; site by site, none with
stochastic rounding and the predicted sign toward zero; and random words that depend on nothing but
where they are used. A mean comes with the half-width of its interval, four standard errors."""

import functools

import pytest
import torch
from conftest import family

pytest.importorskip("triton")
from kernel_checks import DEVICES, beyond_bounds, every, inputs_on, run

from lowprec.attention import kernels
from lowprec.attention.kernels import launch
from lowprec.numerics.formats import BF16, ulp
from lowprec.numerics.policy import ALL_FP32, LOW, SITES


def interval(e):
    """(mean, half-width of its 4-sigma confidence interval) of independent samples."""
    return e.mean().item(), 4 * e.std().item() / len(e) ** 0.5


def tied_inputs(device, n=128, d=64):
    """Rows with two equal maxima far above the rest, over negative values."""
    g = torch.Generator().manual_seed(1)
    k = torch.zeros(1, 2, n, d)
    k[:, :, :2, 0] = 10.0  # the rest adds 0.2 ulp in all
    q = torch.zeros(1, 2, n, d)
    q[..., 0] = 10.0
    k[:, :, 2:, 0] = 1.0 + 0.1 * torch.rand(1, 2, n - 2, generator=g)
    v = -(2 + 2 * torch.rand(1, 2, n, d, generator=g))
    do = torch.randn(1, 2, n, d, generator=g)
    return [x.bfloat16().to(device) for x in (q, k, v, do)]


def bias_of_o(results, tied):
    """Interval of o - o_fp32 in ulp of o_fp32, over rows with two equal maxima or with one.

    The first rows sum few terms, and a sum of one is exact."""
    samples = []
    for got in results:
        rows = (got.ties == 2) if tied else (got.ties == 1)
        rows[:, :, :8] &= tied
        exact = got.o_fp32.double()
        samples.append(((got.o.double() - exact) / ulp(exact, BF16))[rows].flatten())
    return interval(torch.cat(samples))


@pytest.mark.parametrize("device", DEVICES)
def test_bias_of_tied_rows(device):
    """A BF16 numerator of rows with two equal maxima over negative values is biased away from zero
    by a share of an ulp; the sign follows V. There is none with stochastic rounding, with an FP32
    numerator and in rows without ties."""
    q, k, v, do = tied_inputs(device)
    policy = ALL_FP32.replace(s="bf16", p="bf16", o_acc="bf16")
    mean, width = bias_of_o([run(q, k, v, do, policy)], tied=True)
    assert mean < -0.05 - width, (mean, width)
    mean, width = bias_of_o([run(q, k, -v, do, policy)], tied=True)
    assert mean > 0.05 + width, (mean, width)

    unbiased = policy.replace(o_acc="bf16:stochastic")
    several = [run(q, k, v, do, unbiased, seed=seed) for seed in range(2)]
    mean, width = bias_of_o(several, tied=True)
    assert abs(mean) <= width < 0.05, (mean, width)
    mean, width = bias_of_o([run(q, k, v, do, policy.replace(o_acc="fp32"))], tied=True)
    assert abs(mean) <= width + 1e-6, (mean, width)

    inputs = family("normal", (1, 2, 128, 64), device=device)
    mean, width = bias_of_o([run(*inputs, policy)], tied=False)
    assert abs(mean) <= width < 0.05, (mean, width)


# Site, what it feeds linearly, and the sign of that error where the site rounds toward zero, with
# V < 0 < dO, K. Smaller |p|, |o_acc| and |o| raise o, which is negative, and a smaller l lowers it;
# dp and dodo are negative too, and dq follows dp while delta follows dodo. ds has both signs.
FED = [
    ("p", "o", 1), ("l", "o", -1), ("o_acc", "o", 1), ("o", "o", 1), ("dodo", "delta", 1),
    ("dp", "dq", 1), ("p_bwd", "dv", -1), ("ds", "dq", 0), ("dq_acc", "dq", 0),
    ("dkdv_acc", "dv", -1),
]  # fmt: skip


@functools.cache
def one_signed(device):
    """q, k, v, do in FP32 with K > 0, V < 0 and dO > 0, and what the kernels make of them."""
    q, k, v, do = family("normal", (1, 1, 128, 32), dtype=torch.float32, device=device)
    inputs = q, k.abs(), -v.abs() - 1, do.abs() + 0.5
    return inputs, run(*inputs, ALL_FP32, 64)


def bias(device, policy, name, seeds):
    """Interval of the error against ALL_FP32, in BF16 ulp of the mean size.

    The elements of a row share words, so a row and a seed make one sample.
    """
    inputs, exact = one_signed(device)
    wanted = getattr(exact, name).double()
    unit = ulp(wanted.abs().mean(), BF16)
    samples = []
    for seed in range(seeds):
        error = (getattr(run(*inputs, policy, 64, seed=seed), name).double() - wanted) / unit
        samples.append((error if error.dim() == 3 else error.mean(-1)).flatten())
    return interval(torch.cat(samples))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("field,name,sign", FED)
def test_stochastic_sites_are_unbiased_and_truncating_ones_are_not(device, field, name, sign):
    stochastic = ALL_FP32.replace(**{field: "bf16:stochastic"})
    mean, bound = bias(device, stochastic, name, seeds=3 if sign else 5)
    assert abs(mean) <= bound and bound > 0, (mean, bound)
    if not sign:
        assert bound < 0.1, bound  # of an ulp
        return
    truncated, of_truncated = bias(
        device, ALL_FP32.replace(**{field: "bf16:toward_zero"}), name, seeds=1
    )
    assert sign * truncated > 0.1 + of_truncated, (truncated, of_truncated)
    assert bound < truncated * sign / 5, (bound, truncated)  # such a bias would be seen


def test_every_site_of_a_linear_quantity_is_there():
    """The rest act through exp, where an error without bias gives one with bias."""
    assert set(SITES) - {field for field, _, _ in FED} == {"s", "x"}


def with_blocks(monkeypatch, bm, bn):
    blocks = launch.blocks

    def other(kernel, d, lengths, *how):
        sizes, options = blocks(kernel, d, lengths, *how)
        even = lengths[0] % bm == lengths[1] % bn == 0
        return sizes | dict(bm=bm, bn=bn, even=even), options

    monkeypatch.setattr(launch, "blocks", other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bm,bn", [(32, 64), (64, 32)])
def test_words_of_scores_do_not_depend_on_the_hardware_block(device, bm, bn, monkeypatch):
    """Scores of small whole numbers are exact, so their random rounding decides alone which are
    tied. Other blocks count the same ties, another seed does not."""
    q, k, v, _ = (x.float().mul(2).round().to(x) for x in inputs_on(device, n=100))
    policy = ALL_FP32.replace(s="e8m3:stochastic")

    def ties(seed):
        return kernels.forward(q, k, v, policy, True, 0.125, seed=seed, ties=True)[-1]

    a, c = ties(1), ties(2)
    with_blocks(monkeypatch, bm, bn)
    b = ties(1)
    assert torch.equal(a, b)
    assert (a != c).double().mean() > 0.1 and (a > 1).double().mean() > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "policy,tile", [(every("bf16:stochastic"), 64), (LOW, None)], ids=["stochastic", "LOW"]
)
def test_other_hardware_blocks_compute_the_same(device, policy, tile, monkeypatch):
    """Up to the order of sums; so each site draws the same words, and other seeds draw others."""
    inputs = inputs_on(device, n=70)
    if policy != LOW:
        other_seed = run(*inputs, policy, tile, seed=8)
        assert len(beyond_bounds(other_seed, inputs, policy, tile, seed=7)) > 5
    with_blocks(monkeypatch, 32, 32)
    got = run(*inputs, policy, tile, seed=7)
    assert beyond_bounds(got, inputs, policy, tile, seed=7) == []
