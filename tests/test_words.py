"""Numbers in sentences."""

from lowprec.evidence import words


def test_hyphens_before_numbers_become_minus_signs():
    assert (
        words.minus("-1, x-1, 1e-05, (-.5), 10⁻-3, a - 2") == "−1, x-1, 1e-05, (−.5), 10⁻-3, a - 2"
    )
    assert words.say("| -1 |\n|---|").data == "| −1 |\n|---|"
    for kept in ("`delta_bias(-0.02)`", "`a=-1`", "$x_{-1}$", "[-](a/ -1.md)", "delta_bias=-0.02"):
        assert words.minus(kept) == kept


def test_a_span_has_both_ends_or_one():
    assert words.span([0.126, -2, 1]) == "−2.00 to 1.00"
    assert words.span({"a": 1.001, "b": 1.002}.values()) == "1.00"
    assert words.span((x for x in (1000, 2)), "{:,}") == "2 to 1,000"
    assert words.span([]) == "none"


def test_a_number_is_whole_short_or_in_full():
    for value, short, full in (
        (True, "true", "true"), (False, "false", "false"), (-1234567, "−1,234,567", "−1,234,567"),
        (float("-inf"), "−∞", "−∞"), (float("inf"), "∞", "∞"),
        (3.0, "3", "3"), (-1e-7, "−1e−07", "−1e−07"), (1e16, "1e+16", "1e+16"),
        (18821.7, "18,822", "18821.7"), (999.96, "1,000", "999.96"), (-999.94, "−999.9", "−999.94"),
        (1.00048828125, "1", "1.00048828125"), (-0.12345678, "−0.1235", "−0.12345678"),
    ):  # fmt: skip
        assert (words.number(value), words.number(value, exact=True)) == (short, full)


def test_a_large_negative_number_is_whole():
    assert words.number(-18821.7) == "−18,822"


def test_zero_has_no_sign():
    assert words.number(-0.0) == "0"
