"""Which sizes of inputs attention stands: what is derived, and what is counted."""

import pytest
import torch

from lowprec.numerics.policy import CLEAN, FA2
from lowprec.studies import sizes
from lowprec.studies.sizes import SIDE, D, T


def test_the_bounds_of_one_common_size():
    """dQ is the largest, 2 T D 2^3e, and is to stay at 2^127 at most."""
    assert SIDE == 38 and 2 * T * D * 8.0**SIDE <= 2.0**127 < 2 * T * D * 8.0 ** (SIDE + 1)
    assert sizes.side(1024, 64) == 36 and sizes.side(times=T + 1) == 36


@pytest.mark.parametrize(
    "exponents, bound",
    [((60, 60, 0, 0), 5 + 120), ((0, 0, 100, -100), 6 + 100), ((0, 0, -100, 100), 6 + 100),
     ((-60, -60, 30, 30), 1 + 5 + 60), ((10, 0, 30, 30), 1 + 5 + 60 + 6 + 10)],
)  # fmt: skip
def test_the_largest_bound_counts(exponents, bound):
    """A score, Σ P̃V, dV, dS and dK, each in turn the largest."""
    assert sizes.room(exponents) == 127 - bound


def test_an_edge_is_as_far_as_the_bounds_go():
    found = sizes.edge(2, (0, 0, 0))
    assert found == (0, 0, 115, 0) and sizes.room(found) >= 0
    assert sizes.room((0, 0, 116, 0)) < 0
    assert sizes.edge(0, (126, 126, 126)) is None


def test_sets_are_the_corners_and_the_edges():
    sets = sizes.inside()
    assert len(sets) == 902 and set(sizes.corners(-126, SIDE)) <= set(sets)
    assert min(map(sizes.room, sets)) >= 0


def test_numbers_that_are_not_finite_are_counted():
    ones = [torch.ones(T, D)] * 4
    small, scores, mean = sizes.lost(ones, [(0, 0, 0, 0), (128, 128, 0, 0), (0, 0, 126, 0)])
    assert small.sum() == 0 and scores[0] == T * D
    assert 0 < mean[0] < T * D  # early rows sum few values
    assert sizes.lost(ones, [(0, 0, 126, 0)], impl="oracle")[0, 0] == 0


def test_patterns_are_of_size_one_and_the_same_each_time():
    one, other = sizes.Inputs(), sizes.Inputs()
    for a, b in zip(one.patterns + one.equal, other.patterns + other.equal, strict=True):
        assert all(map(torch.equal, a, b)) and max(x.abs().max() for x in a) <= 1
    assert one.drawn(2)["moderate"].shape == (2,) and one.drawn(1)["corners"].shape == (16,)


def test_equal_scores_come_nearest_to_the_bounds():
    inputs = sizes.Inputs()
    near = [max(sizes.reached(p)) for p in inputs.equal]
    assert 0.25 < max(near) <= 1 and max(max(sizes.reached(p)) for p in inputs.patterns) < 0.1


def test_a_policy_stands_the_box_and_float64_more():
    inputs = sizes.Inputs()
    fixed, exact = inputs.stands(CLEAN), inputs.stands(FA2, "oracle")
    assert fixed["corners"] == 0 and fixed["upto"] >= SIDE
    assert exact["upto"] > fixed["upto"] and exact["scores"] == exact["mean"] == 0 < fixed["scores"]
    assert inputs.stands("FA2+delta_from=dp")["corners"] > 0 and sizes.lost_from_dp(inputs) == (
        36,
        0,
    )
    assert inputs.within(sizes.corners(-126, SIDE), inputs.patterns) == 0
    assert inputs.within([(50, 50, 50, 50)], inputs.patterns) > 0


def test_a_power_of_two_in_print():
    assert sizes.two(-126) == "2⁻¹²⁶" and sizes.two(38) == "2³⁸"
