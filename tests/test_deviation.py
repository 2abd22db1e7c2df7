"""Baseline and flash attention rounded everywhere: against float64, `emulate`, and by symmetry."""

import math

import pytest
import torch

from lowprec import UserError
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import BF16, round_to
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies.deviation import (
    baseline,
    deviations,
    estimate,
    every_site,
    factor,
    flash,
    random_inputs,
    tied_inputs,
    typical,
)


def draws(fmt="bf16", keys=64):
    return random_inputs(range(3), 8, keys, 16, fmt)


def exact(inputs):
    return oracle(*inputs, causal=False).o


@pytest.mark.parametrize("serial", [False, True])
def test_in_fp32_all_forms_are_attention(serial):
    inputs = draws()
    forms = [baseline(*inputs, "ALL_FP32", serial)]
    forms += [flash(*inputs, "fp32", 16, serial, early) for early in (False, True)]
    for o in forms:
        torch.testing.assert_close(o.double(), exact(inputs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("early", [False, True])
def test_every_value_is_rounded(early):
    inputs = draws()
    for o in (baseline(*inputs, every_site(BF16)), flash(*inputs, BF16, 16, early=early)):
        assert torch.equal(round_to(o, BF16), o)
        assert 1e-4 < deviations(o, exact(inputs))["max"].max() < 0.2


def test_with_one_tile_flash_is_emulate_where_both_round_the_same():
    """alpha is 0 there, so the roundings that `emulate` leaves out change nothing."""
    inputs = draws()
    mine = flash(*inputs, BF16, 64)
    theirs = emulate(*inputs, every_site(BF16), causal=False).o
    assert (mine != theirs).double().mean() < 0.01, "FP32 sums may differ in their order"


def test_baseline_rounds_the_named_sites_only():
    inputs = draws()
    assert torch.equal(
        baseline(*inputs, PrecisionPolicy(o="bf16")),
        round_to(baseline(*inputs, "ALL_FP32"), BF16),
    )
    p = oracle(*inputs, causal=False).p_bwd
    by_hand = round_to(p.float(), BF16) @ inputs[2]
    assert (baseline(*inputs, PrecisionPolicy(p="bf16")) - by_hand).abs().max() < 1e-3


def test_serial_sums_stop_growing():
    """2,048 equal scores: a BF16 sum of ones stays at 256, and P is 8 times too large."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2048, 16)
    v = torch.eye(2048, 16)[None, None]  # one key a column, so that P V adds nothing
    o = baseline(q, k, v, every_site(BF16), serial=True)
    assert torch.equal(o, torch.full_like(o, 2.0**-8))
    assert torch.equal(flash(q, k, v, BF16, 256, serial=True), torch.full_like(o, 2.0**-11))


def test_serial_sums_round_their_first_term_too():
    """With one stored bit 0.26 becomes 0.25, and 1.25 becomes 1; 1.26 would become 1.5."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([math.log(0.26), 0.0]).view(1, 1, 2, 1)
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    assert baseline(q, k, v, PrecisionPolicy(l="e8m1"), serial=True).item() == 1


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_attention_is_odd_in_v_so_the_mean_of_random_inputs_says_nothing(rounding):
    q, k, v = draws()
    policy = every_site(BF16, rounding)
    assert torch.equal(baseline(q, k, -v, policy), -baseline(q, k, v, policy))
    tiled = [emulate(q, k, sign * v, policy, 16, causal=False).o for sign in (1, -1)]
    assert torch.equal(tiled[0], -tiled[1])


def test_inputs():
    q, k, v = draws()
    assert q.shape == (3, 1, 8, 16) and k.shape == v.shape == (3, 1, 64, 16)
    assert torch.equal(q[1], random_inputs([1], 8, 64, 16, "bf16")[0][0])
    for t in (q, k, v):
        assert torch.equal(round_to(t, BF16), t)
    q, k, v = tied_inputs(range(2), 8, 64, 16, BF16)
    t = emulate(q, k, v, every_site(BF16), causal=False)
    assert (t.ties == 2).all() and t.s[..., :2].mean().item() == pytest.approx(17, abs=1)
    assert v.max() <= -2 and v.min() >= -4


def test_deviations_by_hand():
    target = torch.tensor([[1.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    table = deviations(torch.tensor([[1.5, -2.5], [2.0, 3.0]]), target)
    assert table["max"].tolist() == [0.5, 1.0] and table["mean"].tolist() == [0.5, 0.5]
    assert table["signed"].tolist() == [0.0, 0.5] and table["along"].tolist() == [0.5, 0.5]
    assert table["rms"].tolist() == pytest.approx([math.sqrt(2.5), 2.0])
    assert table["std"].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(0.5)])


def test_estimates():
    e = estimate([1.0, 2.0, 3.0])
    assert e.mean == 2 and e.high - 2 == pytest.approx(4.302653 / math.sqrt(3))
    assert e.half_widths == pytest.approx(2 / (e.high - 2))
    assert e.interval == (e.low, e.high)
    ratio = typical([2.0, 8.0, 4.0])
    assert ratio.mean == pytest.approx(4) and ratio.low * ratio.high == pytest.approx(16)
    assert factor(ratio).mean == pytest.approx(4) == factor(ratio, 16).mean
    assert factor(ratio).high == pytest.approx(ratio.high)
    assert factor(typical([0.5, 0.125, 0.25])).mean == pytest.approx(4)
    assert factor(typical([0.5, 1.0, 2.0])).low == 1


def test_mistakes_are_named():
    with pytest.raises(UserError, match="tile=0 must be at least 1 key"):
        flash(*draws(), BF16, 0)
    with pytest.raises(UserError, match="must be"):
        baseline(torch.zeros(1), torch.zeros(1), torch.zeros(1), "LOW")
