"""Baseline and flash attention rounded everywhere: against float64, `emulate`, and by symmetry."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lowprec import UserError
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import BF16, round_to
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies.deviation import (
    ON_CAPTURES,
    baseline,
    both_ways,
    by_length,
    deviations,
    estimate,
    every_site,
    factor,
    flash,
    on_captures,
    placements,
    random_inputs,
    tied_inputs,
    tiled,
    times,
    typical,
)

KEYS = ["keys", "form", "seed"]


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


def test_every_place_to_round_in_fp32_is_attention_and_in_bf16_its_own():
    inputs = draws()
    for pair in placements(inputs, "fp32", 16).values():
        for o in pair:
            torch.testing.assert_close(o.double(), exact(inputs), atol=1e-6, rtol=1e-5)
    found = placements(inputs, "bf16", 16)
    assert torch.equal(found["FA2"][0], emulate(*inputs, "FA2", 16, causal=False).o)
    assert torch.equal(found["FA2"][1], baseline(*inputs, PrecisionPolicy(p="bf16", o="bf16")))
    tiles = [pair[0] for pair in found.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(tiles) for b in tiles[:i])


def test_both_ways_measure_from_float64_and_from_each_other():
    inputs = draws()
    tiles, base = tiled(inputs, every_site(BF16), 16), baseline(*inputs, every_site(BF16))
    found = both_ways(inputs, BF16, 16)
    assert found["flash"].equals(deviations(tiles, exact(inputs)))
    assert found["baseline"].equals(deviations(base, exact(inputs)))
    assert found["flash − baseline"].equals(deviations(tiles, base))


def test_by_length_measures_each_length_whatever_is_computed_at_once():
    table = by_length((32, 64), range(3), 8, 16, "bf16", 16, 2)
    in_parts = by_length((32, 64), range(3), 8, 16, "bf16", 16, 2, at_once=64)
    pd.testing.assert_frame_equal(*(t.set_index(KEYS).sort_index() for t in (table, in_parts)))
    of = {key: rows.reset_index(drop=True) for key, rows in table.groupby(["keys", "form"])}
    assert len(of) == 10 and all(rows.seed.tolist() == [0, 1, 2] for rows in of.values())
    inputs = draws()
    for form, tile in (("flash, tiles of 16", 16), ("flash, 2 tiles", 32)):
        by_hand = deviations(tiled(inputs, every_site(BF16), tile), exact(inputs))
        assert of[64, form][list(by_hand)].equals(by_hand)
        assert (of[64, form].relative == by_hand["max"] / by_hand.rms).all()
    kept = every_site(BF16).replace(l="fp32")
    by_hand = deviations(tiled(inputs, kept, 16), exact(inputs))
    assert of[64, "ℓ in FP32"][list(by_hand)].equals(by_hand)


def test_on_captures_compares_the_last_queries_with_the_keys_that_all_of_them_see():
    q, k, v = (torch.randn(1, 1, 8, 16).bfloat16() for _ in range(3))
    capture = SimpleNamespace(tensors=dict(q=q, k=k, v=v))

    def off(*inputs):
        assert [t.shape[-2] for t in inputs] == [3, 6, 6]
        return exact(inputs) + 0.5

    table = on_captures({"a": capture}, last=3, forms={"off": off, "flash": flash_16})
    rows = q[..., -3:, :].float(), k[..., :6, :].float(), v[..., :6, :].float()
    assert table.at["a", "off"] == pytest.approx(50 / exact(rows).square().mean().sqrt().item())
    assert 0 < table.at["a", "flash"] < 10


def flash_16(*inputs):
    return tiled(inputs, "FA2", 16)


@pytest.mark.parametrize("form", ["PyTorch flash", "PyTorch plain"])
def test_pytorchs_kernels_are_attention_on_bf16_inputs(form):
    inputs = draws()
    o = ON_CAPTURES[form](*inputs)
    assert o.dtype == torch.bfloat16
    assert 0 < deviations(o, exact(inputs))["max"].max() < 0.01


def test_times_is_the_ratio_of_the_largest():
    over, under = (
        deviations(torch.tensor([[x, 0.0], [2 * x, 0.0]]), torch.zeros(2, 2)) for x in (3.0, 1.5)
    )
    assert times(over, under).mean == pytest.approx(2)


def test_mistakes_are_named():
    with pytest.raises(UserError, match="tile=0 must be at least 1 key"):
        flash(*draws(), BF16, 0)
    with pytest.raises(UserError, match="must be"):
        baseline(torch.zeros(1), torch.zeros(1), torch.zeros(1), "LOW")
