"""Attention in eight bits: the scales, the replays, and what a second output does not see."""

import pytest
import torch
from conftest import family

from lowprec.attention.reference import emulate
from lowprec.numerics.formats import Format
from lowprec.numerics.policy import FA2, PrecisionPolicy
from lowprec.studies import eight_attention
from lowprec.studies.row_sums import head


@pytest.mark.parametrize("fmt", eight_attention.FORMATS.values())
@pytest.mark.parametrize("largest", [1.0, 1.75, 3e-5, 448.0])
def test_the_next_power_of_two_would_not_fit(fmt, largest):
    scale, top = eight_attention.fitting(fmt, largest), Format.parse(fmt).max
    assert largest * 2.0**scale <= top < largest * 2.0 ** (scale + 1)


def test_every_replay_is_a_policy_of_its_own():
    table = eight_attention.policies(largest_ds=1e-6)
    policies = [PrecisionPolicy.parse(text) for text in table.policy]
    assert len(set(policies)) == len(policies) == len(table)
    assert "p=e4m3fn@2^8" in str(policies[-1]) and "@token,pow2" in str(policies[-1])


@pytest.mark.parametrize("source", ["dp", "o_prime"])
def test_a_delta_of_unrounded_weights_sees_neither_p_nor_o(source):
    q, k, v, do = family("normal", (1, 2, 48, 32))
    eight = FA2.replace(p="e4m3fn@2^8", o="e4m3fn@token,pow2")
    ts = [emulate(q, k, v, p.replace(delta_from=source), do=do) for p in (FA2, eight)]
    assert not torch.equal(ts[0].o, ts[1].o)
    assert all(torch.equal(getattr(ts[0], x), getattr(ts[1], x)) for x in ("delta", "dq", "dk"))


def test_of_weights_below_half_the_smallest_number_nothing_is_left():
    q, k, v, do = family("normal", (1, 1, 64, 32))
    table = eight_attention.weights("made", head(4 * q, k, v, do)).set_index(["format", "scale"])
    p = emulate(4 * q, k, v, FA2).p_unnorm
    for fmt, scale in table.index:
        least = Format.parse(eight_attention.FORMATS[fmt]).min_subnormal / 2 * 2.0**-scale
        share = ((p <= least) & (p > 0)).sum() / (p > 0).sum()
        assert table.zero[fmt, scale] == pytest.approx(share.item(), abs=1e-6)


def test_where_weights_are_exact_a_second_output_is_rounded_as_the_first():
    q, k, v, do = family("normal", (1, 1, 64, 32))
    alike, eight = eight_attention.seen(head(0 * q, k, v, do))
    assert alike == pytest.approx(1, abs=1e-6) and abs(eight) < 0.2
