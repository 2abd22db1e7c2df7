"""A rule says in one line what is measured, over which units, and what supports the sentence."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec import UserError
from lowprec.evidence import rules

PARTS = {
    "max over captures of |error of δ / error with O − 1| <= 0.25":
        ("max", "captures", "<=", (0.25,)),
    "count of seeds that explode == 0": ("count", "seeds", "==", (0,)),
    "count of runs of `FA2` that exploded by step 7,000 >= 3":
        ("count", "runs of `FA2`", ">=", (3,)),
    "share of heads whose sum is above 2 in [0.4, 0.6]": ("share", "heads", "in", (0.4, 0.6)),
    "count of pairs in which a < b > 2": ("count", "pairs", ">", (2,)),
    "p of the log-rank test < 5e-2": ("", "", "<", (0.05,)),
    "mean error in ulp < -.5": ("", "", "<", (-0.5,)),
    "share of equal elements >= 0.99": ("", "", ">=", (0.99,)),
    "share of runs with a rise, less that of others > 0.2": ("", "", ">", (0.2,)),
    "Σε over that of O, mean of heads < 0.5": ("", "", "<", (0.5,)),
}  # fmt: skip


@pytest.mark.parametrize("text, parts", PARTS.items())
def test_a_rule_has_its_parts(text, parts):
    rule = rules.parse(text)
    assert (rule.quantifier, rule.unit, rule.comparison, rule.limits) == parts
    assert rule.metric == text[: len(rule.metric)] and rules.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text", ["the largest error", "error < small", "error =< 2", "error in [0.1 0.2]", "< 3", ""]
)
def test_a_rule_without_a_comparison_is_refused(text):
    with pytest.raises(UserError, match="does not end in a comparison: end it with one of =="):
        rules.parse(text)


def test_a_range_whose_ends_are_swapped_is_refused():
    with pytest.raises(UserError, match="between 0.6 and 0.4: swap them"):
        rules.parse("share of heads whose sum is positive in [0.6, 0.4]")


@pytest.mark.parametrize(
    "start, rest",
    [("variance over", "of"), ("maximum over", "of"), ("the max over", "of"), ("Min over", "of"),
     ("count over", "of"), ("number of", "in which"), ("fraction of", "that")],
)  # fmt: skip
def test_a_quantifier_that_there_is_not_is_refused(start, rest):
    sentence = f"begins with {start!r}, which is no quantifier: begin it with max, min, median"
    with pytest.raises(UserError, match=re.escape(sentence)):
        rules.parse(f"{start} seeds {rest} the loss explodes > 0")


NUMBERS = {"a": 1.0, "b": 4.0, "c": 2.0}
TRUTHS = {0: True, 1: False, 2: True, 3: True}


@pytest.mark.parametrize(
    "quantifier, value", [("max", 4), ("min", 1), ("median", 2), ("mean", 7 / 3), ("sum", 7)]
)
def test_numbers_of_units_become_one(quantifier, value):
    rule = rules.parse(f"{quantifier} over captures of error <= 3")
    assert rule.reduce(NUMBERS) == value and rule.reduce({}) is None


def test_truths_of_units_are_counted():
    assert rules.parse("count of seeds that explode == 0").reduce(TRUTHS) == 3
    assert rules.parse("share of seeds that explode == 1").reduce(TRUTHS) == 0.75
    assert rules.parse("share of seeds that explode == 1").reduce({0: True, 1: True}) == 1


@pytest.mark.parametrize(
    "text, by, sentence",
    [
        ("max over seeds of error < 1", {7: True}, "max over seeds, takes a number for each and "
         "was given True for 7"),
        ("count of seeds that explode == 0", {7: 0.2}, "count over seeds, takes true or false for "
         "each and was given 0.2 for 7"),
        ("count of seeds that explode == 0", {7: 1}, "was given 1 for 7"),
        ("median over seeds of error < 1", {7: math.nan}, "of error is nan for 7"),
        ("max over seeds of error < 1", {7: -math.inf}, "of error is -inf for 7"),
        ("max over seeds of error < 1", {7: "0.2"}, "of error is '0.2' for 7: hand it a number"),
        ("error < 1", {7: 0.2}, "takes one number and was given 1: begin it with a quantifier"),
    ],
)  # fmt: skip
def test_a_unit_that_does_not_fit_its_rule_is_named(text, by, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        rules.parse(text).reduce(by)


@given(st.sampled_from(list(rules.COMPARISONS)), st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_opposite_comparisons_disagree(comparison, value, limit):
    opposite = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}[comparison]
    one, other = (rules.Rule("x", "", "", c, (limit,)) for c in (comparison, opposite))
    assert one.holds(value) != other.holds(value)


@pytest.mark.parametrize(
    "comparison, words, symbol",
    [
        ("==", "equal to", "="), ("!=", "other than", "≠"), ("<", "below", "<"),
        ("<=", "at most", "≤"), (">", "above", ">"), (">=", "at least", "≥"),
    ],
)  # fmt: skip
def test_a_comparison_reads_as_it_judges(comparison, words, symbol):
    rule = rules.parse(f"error {comparison} 2")
    assert rule.words == f"{words} 2" and rule.symbols == f"{symbol}\N{NO-BREAK SPACE}2"


def test_both_ends_of_a_range_are_in_it():
    rule = rules.parse("share of equal elements in [0.1, 0.18]")
    assert [rule.holds(x) for x in (0.09, 0.1, 0.15, 0.18, 0.19)] == [False, *[True] * 3, False]
    assert rule.words == "from 0.1 to 0.18"
    assert rule.symbols == "0.1 to 0.18"
    assert rules.parse("error in [2, 2]").holds(2)


def test_a_single_fraction_is_asked_for_in_full():
    assert rules.parse("error in ulp == -0.7890625").words == "equal to −0.7890625"
    assert rules.parse("error in ulp < -0.7890625").words == "below −0.7891"
    assert rules.parse("error in ulp < -0.7890625").symbols == "<\N{NO-BREAK SPACE}−0.7891"
    assert rules.parse("error in ulp == 0.5").is_exact
    assert not rules.parse("count of sums that round == 3").is_exact


def test_the_median_of_an_even_number_of_units_lies_between_two():
    assert rules.parse("median over seeds of error < 3").reduce({0: 1.0, 1: 4.0}) == 2.5
