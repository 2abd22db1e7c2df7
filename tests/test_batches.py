"""A larger batch: what it has read, what its layer sums to, on made-up runs."""

import pytest
from test_twins import run

from lowprec.studies import batches


def test_tokens_of_a_step_and_passes_up_to_the_onset():
    made = run(0, steps=400, batch_size=4, block_size=8)
    assert batches.tokens(made) == 32 and batches.passes(made, 6400) == 2
    assert batches.passes(run(0, onset=200, batch_size=4, block_size=8), 6400) == 1


def test_a_layer_has_the_sum_of_its_heads_over_the_steps():
    assert batches.signed(run(0), 49, 149, layer=1) == 4.0
    assert batches.signed(run(0), 49, 149, layer=0) == 0.0


def test_the_share_of_a_layer_ends_before_the_onset():
    course = batches.share_course(run(0, onset=199), layer=1)
    assert course.to_dict() == {49: 10, 99: 10, 149: 10}
    assert batches.share_course(run(0), layer=0).abs().max() == 0


def test_sums_are_compared_where_both_have_the_same_loss():
    fast, slow = run(0, steps=900), run(0, steps=900)
    for made, speed in ((fast, 50), (slow, 100)):
        made.metrics["loss"] = 10 - made.metrics.step / speed
    fast.probes["delta_bias"] *= 3
    slow.probes.loc[slow.probes.step > 600, "delta_bias"] *= 2
    found = batches.at_equal_loss(
        fast, slow, 1, (399, 899)
    )  # at 699: four probes, two of them twice
    assert found == {399: pytest.approx(2)}
    early = run(0, onset=650, steps=900)
    early.metrics["loss"] = slow.metrics.loss
    assert batches.at_equal_loss(fast, early, 1, (399,)) == {}


def test_the_largest_head_is_that_of_the_first_probe_from_the_onset_on():
    assert batches.largest_at_onset(run(0, onset=220)) == (29, (0, 1))
    assert batches.largest_at_onset(run(0, onset=249)) == (0, (0, 1))
