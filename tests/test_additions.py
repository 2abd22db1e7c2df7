"""Rounded sums of tied terms: against exact enumeration, and the example worked in the paper."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch

from lowprec import UserError
from lowprec.evidence.claims import Measured
from lowprec.numerics.formats import BF16, E4M3, E5M2, FP16, round_to, ulp
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies.additions import (
    RESIDUALS,
    Bias,
    as_table,
    bias,
    check_format,
    choose_pair,
    counted,
    decided,
    draw_addition,
    largest_size,
    operands_of,
    output_errors,
    pair_errors,
    replayed_pairs,
    residual,
    sawtooth,
    significant_bits,
    sum_error,
    sum_fp32,
    tensor_core_sum,
    tied_pairs,
    tied_sum_bias,
    tied_values,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def column(*terms):
    return torch.tensor(terms, dtype=torch.float64)[:, None]


def test_the_worked_addition():
    """Values of Qiu & Yao 2025, section 3.3.2: the sum rounds to -4.71875; an ulp is 2^-5 there."""
    error = sum_error(column(-2.40625, -2.296875, -1815 * 2.0**-21), BF16)
    assert error.item() * 2**-5 == -0.014759540557861328
    tie = sum_error(column(-2.40625, -2.296875, 0.0), BF16)
    assert tie.item() == 0.5


@pytest.mark.parametrize("fmt", [BF16, E4M3])
@pytest.mark.parametrize("r", [0.0, -(2.0**-8), 2.0**-8])
@pytest.mark.parametrize("sign", [-1, 1])
def test_all_pairs_of_one_binade_are_biased_by_a_quarter_less_the_residual(fmt, r, sign):
    count = 2**fmt.significand_bits
    values = sign * (2 + 2.0 * torch.arange(count).double() / count)
    pairs = torch.cartesian_prod(values, values).T
    step = 4 / count
    terms = torch.cat([pairs, torch.full((1, count**2), r * step, dtype=torch.float64)])
    error = sum_error(terms, fmt)
    # -4 + r lies in the lower binade, where an ulp is half as large: one pair has twice the error.
    lower = 1 if r * sign < 0 else 0
    expected = (r > 0) * (0.25 - r) - (r < 0) * (0.25 + r) - lower * r / count**2
    assert error.mean().item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_tied_values_are_all_the_numbers_of_the_binade(fmt, sign):
    values = tied_values(fmt, 20_000, 3, seeded(), sign)
    assert values.shape == (3, 20_000) and values.dtype == torch.float64
    assert torch.equal(round_to(values, fmt), values)
    assert (sign * values).min() == 2 and (sign * values).max() == 4 - ulp(values[0, :1], fmt)
    assert len(values.unique()) == 2**fmt.significand_bits


def test_residuals_have_the_size_and_sign_they_are_asked_for():
    total = torch.full((20_000,), -5.0, dtype=torch.float64)
    found = {kind: residual(total, BF16, kind, 0.1, seeded()) * 2**5 for kind in RESIDUALS}
    assert (found["none"] == 0).all()
    assert (found["negative"] < 0).all() and (found["positive"] > 0).all()
    assert 0.48 < (found["symmetric"] < 0).double().mean() < 0.52
    for kind in RESIDUALS[1:]:
        assert found[kind].square().mean().sqrt().item() == pytest.approx(0.1, rel=0.02)


def test_the_sum_is_formed_in_fp32_from_left_to_right():
    terms = column(1.0, 2.0**-24, 2.0**-24)
    assert sum_fp32(terms).item() == 1.0
    assert sum_fp32(terms.flip(0)).item() == 1 + 2.0**-23


def test_bias_is_the_mean_with_its_interval():
    error = torch.tensor([-0.5, -0.5, 0.0, 0.5], dtype=torch.float64)
    b = bias(error)
    assert (b.mean, b.negative, b.n) == (-0.125, 0.5, 4)
    assert b.half == pytest.approx(1.96 * (0.6875 / 3) ** 0.5 / 2)
    assert b.interval == (-0.125 - b.half, -0.125 + b.half)
    assert b.along() == Measured(-0.125, 4, b.interval)
    assert b.along(-1) == Measured(0.125, 4, (0.125 - b.half, 0.125 + b.half))
    assert b.uneven == Measured(0.0, 4, (0.0, 0.49))
    assert Bias(0, 1, 0.25, 10_000).uneven.interval == pytest.approx((0.2402, 0.2598))


def test_the_largest_size_is_of_either_sign():
    small, large = Bias(0.2, 0.1, 0.5, 9), Bias(-0.3, 0.4, 0.5, 7)
    assert largest_size([small, large]) == Measured(0.3, 7, (0.0, 0.7))
    assert largest_size([small]) == Measured(0.2, 9, (0.1, pytest.approx(0.3)))


def test_the_second_operand_is_found_by_the_bits_of_the_sum():
    """The worked addition of Qiu & Yao 2025, section 3.3.2, and one of a positive sum."""
    printed = "1 10000001 00101101000011100010111"
    assert operands_of(-2.40625, -0.0008654594421387, printed) == ([-2.296875], 65280)
    assert operands_of(1.0, 0.0, "0 10000000 10000000000000000000000") == ([2.0], 65280)


@pytest.mark.parametrize("fmt", [BF16, E5M2])
def test_errors_of_all_pairs_are_a_quarter_of_an_ulp_less_the_residual(fmt):
    errors = pair_errors(fmt, 2.0**-8)
    means = {kind: error.mean().item() for kind, error in errors.items()}
    assert means == {"none": 0, "negative": 2.0**-8 - 0.25, "positive": 0.25 - 2.0**-8}
    assert errors["none"].shape == (2**fmt.significand_bits,) * 2
    # -2 and its neighbour add up to a halfway case next to -4, which is even.
    assert errors["none"][0, :2].tolist() == [0, 0.5]
    assert errors["negative"][0, 1] == 2.0**-8 - 0.5


def test_the_bias_falls_as_the_teeth_of_a_saw_predict():
    assert sawtooth(0.0) == 0.25
    assert sawtooth(0.01) == pytest.approx(0.25 - 0.01 * (2 / torch.pi) ** 0.5, abs=1e-5)
    for size in (0.1, 0.56):
        b = tied_sum_bias(BF16, 2, "positive", size, 40_000, seeded())
        assert abs(b.mean - sawtooth(size)) < 2 * b.half
    assert abs(sawtooth(3.2)) < 0.01


def test_significant_bits_are_counted_without_zeros_at_the_end():
    found = [significant_bits(x, BF16) for x in (1, 0.5, 0.75, 0.625, 255 / 256, 1 + 2**-9)]
    assert found == [1, 1, 2, 3, 8, 1]


def test_a_table_has_a_column_for_each_key():
    table = as_table({(2, "negative"): Bias(-0.2, 0.01, 0.5, 9)}, "ties", "residual")
    assert table.to_dict("records") == [
        dict(ties=2, residual="negative", mean=-0.2, half=0.01, negative=0.5, n=9)
    ]


def test_a_seed_gives_the_same_numbers_again():
    runs = [tied_sum_bias(BF16, 2, "negative", 0.03, 500, seeded(4)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != tied_sum_bias(BF16, 2, "negative", 0.03, 500, seeded(5))


@pytest.mark.parametrize("rounding", ["toward_zero", "stochastic"])
def test_the_rounding_mode_is_honoured(rounding):
    b = tied_sum_bias(BF16, 2, "none", 0.0, 20_000, seeded(), rounding=rounding)
    expected = 0.25 if rounding == "toward_zero" else 0.0
    assert abs(b.mean - expected) < 0.02


def test_without_another_token_division_by_two_changes_nothing():
    errors = output_errors(BF16, 2, (1, 2), 0.0, 5_000, seeded())
    assert torch.equal(errors["numerator"], errors["output"])
    assert torch.equal(errors["numerator"], errors["both"])
    assert set(errors["output"].abs().tolist()) == {0.0, 0.5}


def test_rounding_the_quotient_once_is_within_half_an_ulp():
    errors = output_errors(BF16, 4, (2, 4), 1e-3, 5_000, seeded())
    assert 0.49 < errors["output"].abs().max() <= 0.5001
    assert errors["both"].abs().max() > 0.51


@pytest.mark.parametrize("name", ["fp32", "e2m1", "e8m1"])
def test_formats_that_do_not_suit_are_refused(name):
    with pytest.raises(UserError, match=f"fmt {name} does not suit: take one with"):
        check_format(name)


def test_other_mistakes_are_named():
    with pytest.raises(UserError, match="samples is 1: take at least 2"):
        tied_values(BF16, 1, 2, seeded())
    with pytest.raises(UserError, match="Unknown residual 'up': take one of none"):
        residual(torch.zeros(2).double(), BF16, "up", 0.1, seeded())
    with pytest.raises(UserError, match="residual is -1 ulp large"):
        residual(torch.zeros(2).double(), BF16, "negative", -1, seeded())


def test_a_tensor_core_cuts_what_lies_below_the_largest():
    small = 2.0**-23
    for terms, extra, wanted in (
        ((1, small), 0, 1 + small),
        ((1, small / 2), 0, 1),
        ((1, small / 2, small / 2), 0, 1),  # each is cut
        ((1, small / 2, small / 2), 1, 1 + small),  # and not with one bit more
        ((-1, -0.75 * small), 2, -1),  # toward zero, after the sum
    ):
        assert tensor_core_sum(column(*terms), 4, extra).item() == wanted
    assert tensor_core_sum(column(small / 2, small / 2, 1, 0), 2).item() == 1 + small
    assert tensor_core_sum(column(0, 0), 1).item() == 0


def test_the_bias_of_tensor_cores_is_far_below_an_ulp():
    """As book/notation.md says: K = 1,024, and the bound of sums that are cut."""
    p, v = torch.rand(2, 1024, 1000, generator=seeded(), dtype=torch.float64)
    products = round_to(p, BF16) * round_to(-2 - 2 * v, BF16)
    exact = products.sum(0)
    for block, extra in ((4, 0), (8, 1), (16, 2)):
        toward_zero = (tensor_core_sum(products, block, extra) - exact) / ulp(exact, BF16)
        assert 1e-4 < toward_zero.mean() < 2e-3
        assert toward_zero.min() >= 0
        assert (toward_zero * ulp(exact, BF16) < 1024 * 2.0**-23 * exact.abs()).all()


def test_a_captured_pair_is_chosen_by_residual_then_by_error():
    """Row 0 has one key, rows 1 to 3 two ties; feature 1 of row 1 has values of both signs."""
    inf = float("-inf")
    s = torch.tensor([[4, inf, inf, inf], [4, 4, inf, inf], [4, 4, 1, inf], [4, 4, 1, 0]])
    p = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0.001, 0], [1, 1, 0.5, 0.25]])
    v = -torch.tensor([[2.40625, 1], [2.296875, -1], [2, 1], [3, 1]])
    t = SimpleNamespace(s=s[None, None], p=p[None, None], o_acc=round_to(p @ v, BF16)[None, None])
    pairs = tied_pairs(t, v[None, None])
    assert pairs[["row", "feature"]].values.tolist() == [[1, 0], [2, 0], [3, 0]]
    assert pairs.key_1.eq(0).all() and pairs.key_2.eq(1).all()
    assert pairs.residual.tolist() == pytest.approx([0, -0.064, -56], rel=1e-3)
    assert pairs.error.tolist() == pytest.approx([0.5, -0.436, 0.5], abs=1e-3)
    assert choose_pair(pairs).row == 2 == choose_pair(pairs, feature=0).row  # along its residual
    assert choose_pair(pairs[1:], small=0.01).row == 2
    assert choose_pair(pairs, row=3).row == 3
    with pytest.raises(UserError, match=r"row=0 has no two tied .* choose one of 1, 2, 3, or -1"):
        choose_pair(pairs, row=0)
    with pytest.raises(UserError, match="feature=1 has no two tied .* choose one of 0, or -1"):
        choose_pair(pairs, row=2, feature=1)


def test_a_residual_decides_where_it_is_small_and_the_ties_are_halfway():
    """-2 - 2.015625 is halfway at BF16's ulp of 1/32 between 4 and 8; -2 - 2.03125 is a number."""
    inf = float("-inf")
    s = torch.tensor([[4, 4, inf], [4, 4, 1], [4, 4, 1]])
    p = torch.tensor([[1, 1, 0], [1, 1, 0.001], [1, 1, 0.5]])
    v = -torch.tensor([[2, 2.0], [2.015625, 2.03125], [1, 1]])
    t = SimpleNamespace(s=s[None, None], p=p[None, None], o_acc=round_to(p @ v, BF16)[None, None])
    pairs = tied_pairs(t, v[None, None])
    shown = pairs[decided(pairs)]
    assert shown[["row", "feature"]].values.tolist() == [[1, 0]]
    assert not decided(pairs.assign(error=-pairs.error)).any()
    (line,) = counted({"a": pairs}).itertuples(index=False, name=None)
    assert line == ("a", 3, 6, pairs.residual.abs().median(), 4, 1)


def test_a_capture_is_replayed_with_ties(captures):
    capture = captures["fa2-a-seed1-1680"]
    pairs = replayed_pairs(capture, PrecisionPolicy.parse("LOW"))
    assert (pairs.v_1 * pairs.v_2 > 0).all() and len(pairs)
    assert ((pairs.rounded - pairs.total) / pairs.error > 0).all()
    with pytest.raises(UserError, match=r"FA2.* must round scores \(s\) and Ō \(o_acc\) to bf16"):
        replayed_pairs(capture, PrecisionPolicy.parse("FA2"))


def test_an_addition_is_drawn_bit_by_bit():
    """The worked addition: the ninth bit of the sum is 1, and the residual puts others behind."""
    total = -2.40625 - 2.296875 - 1815 * 2.0**-21
    fig, ax = plt.subplots()
    table, told = draw_addition(ax, -2.40625, -2.296875, total, -4.71875, ("#111111",) * 3)
    drawn = {text.get_text() for text in ax.texts}
    plt.close(fig)
    assert table.bits.tolist() == [
        "10011010", "10010011", "11100010111", "100101101000011100010111", "10010111",
        "100101101000000000000000", "10010110",
    ]  # fmt: skip
    assert told.endswith("Without the residual the sum is −4.703125, rounded to −4.6875.")
    assert table.value.tolist()[-3:] == ["-4.71875", "-4.703125", "-4.6875"]
    assert "sum without residual  −4.703125" in drawn and "$2^{-21}$" in drawn
    assert len(ax.patches) == 4 * 8 + 24 + 11 + 24
