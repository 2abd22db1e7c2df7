"""The stabilised softmax: made rows, limits, and captures under another policy."""

import math

import pytest
import torch

from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import round_to
from lowprec.numerics.policy import ALL_FP32, LOW, Shift
from lowprec.records.files import data_root
from lowprec.studies import stabilised
from lowprec.studies.additions import Bias
from lowprec.studies.stabilised import (
    acts,
    attend,
    compare,
    made_rows,
    retrace,
    shifted_softmax,
    tied_weight,
    vanishes_above,
)
from lowprec.training.capture import Capture

SHIFTS = [
    Shift(),
    Shift("beta"),
    Shift("beta", beta=7.0, gamma=0.5),
    Shift("offset", amplitude=2.0),
    Shift("pow2"),
]


def rows(maximum, ties=(0, 1), count=16, **how):
    generator = torch.Generator().manual_seed(0)
    return made_rows(torch.full((count,), float(maximum)), ties, 30, generator, **how)


@pytest.mark.parametrize("maximum", [-3.0, 5.0, 91.0])
def test_made_rows_have_the_scores_that_were_asked_for(maximum):
    t = attend(rows(maximum, ties=(2, 7, 9)), LOW)
    assert (t.ties == 3).all() and (t.s[..., [2, 7, 9]] == maximum).all()
    others = t.s.masked_fill(t.s == maximum, maximum - 10)
    assert (others <= maximum - 7.7).all() and (others >= maximum - 12.3).all()


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_any_shift_gives_the_same_probabilities(shift):
    s = torch.randn(64, 40, dtype=torch.float64)
    s[:, 3] = s[:, 5] = s.amax(-1) + 0.5
    torch.testing.assert_close(shifted_softmax(s, shift), s.softmax(-1), rtol=1e-12, atol=0)


def test_the_tied_weight_is_the_one_that_attention_forms():
    r = torch.tensor([0.5, 3.25, 9.0])
    policy = LOW.replace(shift=Shift("beta", beta=7.0))
    generator = torch.Generator().manual_seed(0)
    t = attend(made_rows(r, (0, 1), 8, generator), policy)
    p, error = tied_weight(r, 7.0)
    torch.testing.assert_close(t.p[:, 0, 0, 0].double(), p, rtol=1e-6, atol=0)
    assert (error.abs() <= 2**-8).all() and error.abs().max() > 2**-12


def test_a_maximum_kept_in_bf16_may_not_move_at_all():
    assert tied_weight(torch.tensor([4.0]), 1.001, "bf16")[0] == 1
    assert tied_weight(torch.tensor([4.0]), 1.001)[0] < 1


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
def test_exp_vanishes_where_it_is_said_to(fmt):
    x = vanishes_above(fmt)
    around = torch.tensor([x - 1e-6, x + 1e-6], dtype=torch.float64)
    below, above = round_to((-around).exp(), fmt)
    assert below > 0 and above == 0
    assert vanishes_above(fmt, subnormals=False) < x


def test_a_row_beyond_the_limit_has_no_sum():
    limit = vanishes_above("fp32") / 6
    policy = ALL_FP32.replace(shift=Shift("beta", beta=7.0))
    assert (attend(rows(0.98 * limit), policy).l > 0).all()
    assert (attend(rows(1.02 * limit), policy).l == 0).all()


def test_mute_silences_tied_rows_with_large_maxima_and_nothing_else():
    maxima = torch.arange(20, 34, 0.25)
    floor = ALL_FP32.replace(l_floor=1e-10)
    for ties, silent in (((0, 1), maxima > 23.7), ((4,), maxima > 34)):
        made = made_rows(maxima, ties, 30, torch.Generator().manual_seed(0))
        plain, beta, mute = (
            emulate(*made, floor.replace(shift=shift), None, made[0] + 1, causal=False, scale=1.0)
            for shift in ("none", "beta(beta=2)", "mute(amplitude=23.7)")
        )
        for name in ("o", "o_fp32", "delta", "dq", "dk", "dv"):
            of_plain, of_mute = getattr(plain, name), getattr(mute, name)
            assert (of_mute[silent] == 0).all() and (of_plain != 0).any(), name
            assert torch.equal(of_mute[~silent], of_plain[~silent]), name
        lost = (beta.o.norm(dim=-1) < 0.01 * plain.o.norm(dim=-1)).flatten()
        assert lost.any() == silent.any() and silent[lost].all()
        assert torch.equal(beta.l.flatten() <= 1e-10, silent)


def test_the_rule_acts_on_tied_rows_whose_maximum_is_not_zero():
    assert acts(attend(rows(2.0), LOW)).all()
    assert not acts(attend(rows(0.0), LOW)).any()
    assert not acts(attend(rows(2.0, ties=(4,)), LOW)).any()


@pytest.fixture(scope="module")
def failing():
    capture = Capture.load(data_root() / "captures" / "low-c-seed6-1230.xz")
    return capture, capture.replay()


def test_a_trace_without_the_check_is_the_replay(failing):
    capture, base = failing
    assert base.reproduced and torch.equal(retrace(capture).o, base.o)
    changed = retrace(capture, shift=Shift("beta"), l_floor=1e-10)
    assert changed.policy.diff(capture.policy).keys() == {"shift", "l_floor"}
    where = acts(base)
    assert torch.equal(changed.o[~where], base.o[~where])
    assert not torch.equal(changed.o[where], base.o[where])


def test_a_capture_beside_itself_has_not_changed(failing):
    capture, base = failing
    found = compare(capture, base, base, acts(base))
    assert found["rows"] > 0 == found["broken"]
    assert found["error"] == found["size"] == 1 and found["muted"] == 0


def test_lost_and_broken_rows_are_counted(failing):
    capture, base = failing
    t = type(base)(**vars(base))
    t.o = base.o.clone()
    t.o[0, 0, :3] = math.nan
    t.o[0, 0, 3:] *= 0.25
    t.delta_o = base.delta_ref + 2 * (base.delta_o - base.delta_ref)
    found = compare(capture, base, t, acts(base))
    assert found["broken"] == 3 and found["muted"] == 1
    assert found["error"] == pytest.approx(2, rel=1e-4)
    assert found["size"] == pytest.approx(2, rel=1e-4)


def test_the_error_is_that_of_the_oracle_in_made_rows():
    made = rows(2.0)
    exact = oracle(*made, causal=False, scale=1.0).o
    torch.testing.assert_close(attend(made, ALL_FP32).o.double(), exact, rtol=1e-5, atol=1e-6)


def test_the_rule_changes_nothing_within_the_range_of_float64():
    found = stabilised.exact(32, stabilised.seeded(0))
    assert found.most < 1e-12 and found.limit < found.off < found.lost


def test_a_weight_is_one_where_its_exponent_is_small():
    count, largest, reached = stabilised.still_one()
    assert count == 1012 and largest == 1 and reached == {2.0: 2**-9, 8.0: 2**-12}


def test_biases_are_averaged_as_independent_ones():
    mean = stabilised.averaged([Bias(0.1, 0.03, 0.4, 10), Bias(-0.3, 0.04, 0.6, 30)])
    assert mean == pytest.approx(Bias(-0.1, 0.025, 0.5, 40))


def test_two_ties_lose_their_bias_and_a_stored_maximum_leans():
    made = stabilised.weights(100, stabilised.seeded(0))
    assert made.untouched.n == made.ties[2.0].n == 6400 and made.untouched.mean < -0.2
    assert abs(made.ties[2.0].mean) < 0.03 and made.gamma[0.999, "bf16"] == 1
    assert made.table.error[1.01, "bf16"] < -1e-3 < made.table.error[1.01, "fp32"]
    assert made.table.one[1.001, "bf16"] == 1 and made.table.low[1.001, "bf16"] == 0


def test_an_offset_errs_like_its_weight_unless_the_sum_does_as_well():
    found = stabilised.offsets(32, stabilised.seeded(0))
    assert (found.weight - found.o).abs().max() < 1e-5
    assert found["o, l from p"].abs().max() < 1e-5 < found.o.abs().min()


def test_a_row_keeps_its_output_up_to_the_limit():
    reach, found = stabilised.limits(), stabilised.ranges(16, stabilised.seeded(0))
    assert reach["r, β=7"]["FP32"] == pytest.approx(found.empty[7.0], rel=0.01)
    fade = reach["r, β=7"].iloc[-1]
    floored = found.kept[7.0, 1e-10]
    assert (abs(floored[floored.index < 0.9 * fade] - 1) < 0.05).all()
    assert (floored[floored.index > 2 * fade] < 0.01).all() and found.five < 0.01
    assert found.coarse["beta"] > found.coarse["none"]


def test_negative_maxima_fall_silent_whatever_beta_is():
    sides = stabilised.both_signs(16, stabilised.seeded(0))
    assert (sides[-40].iloc[:3] < 1e-3).all() and sides[-40][2.0, 0.9] == pytest.approx(1, abs=0.05)
    assert sides[40][1.1, 0.0] == pytest.approx(1, abs=0.05) and sides[40][7.0, 0.0] == 0


def test_the_rule_in_every_row_and_in_tiles():
    assert 0.2 < stabilised.single_maxima(64, stabilised.seeded(0)) < 0.8
    assert stabilised.in_two_tiles(32, stabilised.seeded(0)) == [1, 0]


def test_what_becomes_of_captured_rows(failing):
    capture, base = failing
    row = stabilised.survey({"low": capture}).loc["low"]
    assert row.base == "LOW" and row.acts == pytest.approx(row.tied / base.ties.numel())
    assert not row.same and row["every 7"] > row["every 2"] and row.low < row.half < row.high
    found = stabilised.fates({"low": capture}).loc["low"]
    assert found[list(stabilised.FATES)].sum(axis=1).to_numpy() == pytest.approx(1)
    assert (found["tie, output lost"] > 0).to_dict() == {
        "β=2": True, "β=7": False, "β=2, floor": True, "β=7, floor": True, "offset 1": False
    }  # fmt: skip
    assert (found["rows"] == row.tied).all() and found["muted positive"]["offset 1"] == 0
