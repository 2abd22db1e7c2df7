"""The stabilised softmax: made rows, limits, and captures under another policy."""

import math

import pytest
import torch

from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import round_to
from lowprec.numerics.policy import ALL_FP32, LOW, Shift
from lowprec.records.files import data_root
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
