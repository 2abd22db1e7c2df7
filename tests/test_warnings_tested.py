"""Signals, levels and alarms, on made-up runs and one recorded."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lowprec import UserError
from lowprec.records.explosion import Explosion
from lowprec.studies import warnings_tested as wt


def run(steps=1400, onset=None, apart=50, loss=None):
    """σ of head h is h + 1 until step 999, and of head 1 then three times that; δ's errors have the
    signed sum −1 of 10 in head 0 each probe, +1 and −1 by turns in head 1."""
    seen = np.arange(steps)
    probes = pd.DataFrame(
        [(step, 0, head, (head + 1) * (3 if head and step >= 1000 else 1),
          -1.0 if head == 0 or k % 2 else 1.0, 10.0, head, 4)
         for k, step in enumerate(range(apart - 1, steps, apart)) for head in (0, 1)],
        columns="step layer head sigma_q delta_bias delta_abs tied_rows rows".split(),
    )  # fmt: skip
    norm = np.where(seen >= 1300, 2.0, 0.5)
    norm[700:701] = np.nan
    metrics = pd.DataFrame(
        dict(step=seen, loss=2.0 - seen / 1e4 if loss is None else loss, grad_norm=norm)
    )
    explosion = Explosion(onset, True) if onset else None
    return SimpleNamespace(name="made", info=dict(config=dict(probe_every=apart)), probes=probes,
                           metrics=metrics, explosion=explosion)  # fmt: skip


def test_signals_are_read_by_the_clock_before_the_onset():
    table = wt.readings(run(onset=1390))
    assert table.step.tolist() == [599 + 200, 999, 1199] and table.left.tolist() == [591, 391, 191]
    assert table.sigma.tolist() == [2, 2, 6] and table.growth.tolist() == [1, 1, 3]
    assert table.sign.tolist() == pytest.approx([0.1] * 3), "the head whose errors cancel has none"
    assert table.ties.tolist() == [0.25] * 3 and table.loss.tolist() == [0, 0, 0]
    assert table.gradient.tolist() == [0.5] * 3, "one lost norm is no alarm"
    late = wt.readings(run())
    assert late.step.tolist() == [799, 999, 1199, 1399] and late.gradient.iloc[-1] == 2
    assert late.left.iloc[-1] == 1
    fine = wt.readings(run(), 50)
    assert fine.step.iloc[0] == 649 and fine.growth[fine.step == 1049].item() == 3
    assert fine.growth[fine.step == 1249].item() == 1


def test_a_rise_of_the_loss_is_above_its_minimum():
    loss = np.where(np.arange(1400) >= 1000, 1.3, 1.0)
    assert wt.readings(run(loss=loss)).loss.tolist() == pytest.approx([0, 0, 0.3, 0.3])


def test_runs_with_probes_too_far_apart_are_not_read():
    arms = set(wt.load(["rotary"]).arm)
    assert "rate4" in arms and "rate4-fp32" not in arms, "one has 200 steps from probe to probe"


@pytest.mark.parametrize("clock", [75, 150])
def test_a_clock_that_probes_do_not_have_is_refused(clock):
    with pytest.raises(UserError, match="must be a multiple"):
        wt.readings(run(), clock)


def table(*runs):
    """Readings of one signal, of runs that end 200 steps after the last."""
    parts = [
        pd.DataFrame(dict(of=i, left=200 * np.arange(len(x), 0, -1)) | dict.fromkeys(wt.SIGNALS, x))
        for i, x in enumerate(runs)
    ]
    return pd.concat(parts, ignore_index=True)


def test_an_alarm_begins_after_a_thousand_quiet_steps():
    readings = table([0, 1, 1, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1, 0, 0])
    found = wt.rings(readings, "sigma", 0.5)
    assert np.flatnonzero(found).tolist() == [1, 9, 15], "five quiet readings, and a run of its own"
    assert wt.rate(readings, "sigma", 0.5) == pytest.approx(1000 * 3 / (18 * 200))
    assert not wt.rings(readings, "sigma", 1).any()


def test_a_level_is_the_lowest_that_keeps_the_rate():
    readings = table([1, 2, 1, 3, 1] * 2, [4, 1, 1, 1, 1] * 2)
    assert wt.level(readings, "loss", per=4000) == 3
    assert wt.level(readings, "loss", per=2000) == 1, "what rings all the time rings once a run"
    assert wt.level(readings, "loss", per=1e9) == 4


def test_notice_is_from_the_first_reading_above_the_level():
    runs = pd.DataFrame({"outcome": ["explodes"] * 3})
    found = wt.notice(runs, table([0, 2, 0, 2], [0, 0, 0]), {"growth": 1})
    assert found.growth.tolist() == [600, 0, 0]


def test_peaks_are_of_healthy_readings_and_of_those_ahead_of_an_onset():
    runs = pd.DataFrame({"outcome": ["explodes", "healthy", "explodes"]})
    readings = table([1, 3, 9], [1, 5, 9, 9])
    assert wt.peaks(runs, readings, ahead=300).loss.tolist() == [3, 5, -np.inf]
    assert set(wt.healthy(runs, readings).left) == {800, 600}
    assert wt.area([3, 1], [1, 0, 2]) == pytest.approx((3 + 0.5 + 1) / 6)


def test_a_run_that_repeats_another_counts_once():
    long, other = np.arange(100.0), np.arange(100.0)
    other[80:] += 1
    losses = [long[:90], long, other, long]
    runs = pd.Series([run(steps=len(x), loss=x) for x in losses])
    assert wt._repeats(runs).tolist() == [True, False, False, True]


def test_outcomes_tell_a_rise_from_a_loss_that_is_lost():
    lost = run(loss=np.where(np.arange(1400) >= 1300, np.nan, 1.0), onset=1300)
    assert wt._outcome(lost) == "not finite" and wt._outcome(run(onset=1300)) == "explodes"
    open_ = run(onset=1300)
    open_.explosion = Explosion(1300, False)
    assert wt._outcome(open_) == "open" and wt._outcome(run()) == "healthy"
