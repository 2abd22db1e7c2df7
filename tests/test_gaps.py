"""Gaps of the records of small models in 16 bits."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from lowprec.studies import gaps, mixed_runs
from lowprec.studies.deviation import Estimate
from lowprec.studies.small import TASKS


def made(losses, classes=512):
    """A record of runs that end with these losses: {arm: one a seed}."""
    ends = pd.concat(
        pd.DataFrame(dict(seed=range(len(of)), arm=arm, loss=of, stalled=0.25 * np.arange(len(of))))
        for arm, of in losses.items()
    )
    curves = pd.concat([ends.assign(step=0), ends.assign(step=10, loss=ends.loss / 2)])
    return gaps.Record(dict(config=dict(classes=classes)), ends, curves)


FP32 = [1.0, 2.0, 3.0]  # a spread of 1


def test_a_gap_is_of_equal_seeds_and_in_spreads():
    wide = made(dict(fp32=[10.0, 20.0, 30.0], bf16=[11.0, 23.0, 32.0], fp16=[12.0, 24.0, 33.0]))
    assert wide.spread == 10
    assert wide.gap("bf16").mean == pytest.approx(0.2)
    assert wide.gap("fp16", "bf16").mean == pytest.approx(0.1)
    low, high = wide.of(wide.gap("bf16")).interval
    assert low < 0.2 < high and wide.of(wide.gap("bf16")).n == 3
    assert high - 0.2 == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)  # Student's t, 2 degrees


@pytest.mark.parametrize("classes, chance", [(512, np.log(512)), (None, np.log(50_257))])
def test_a_run_that_is_not_finite_guesses(classes, chance):
    found = made(dict(fp32=FP32, fp16=[1.0, np.nan, 3.0]), classes)
    assert found.loss["fp16"].tolist() == [1.0, pytest.approx(chance), 3.0]


def test_what_runs_ended_with_and_how_far_they_were():
    found = made(dict(fp32=FP32, bf16=[1.5, 2.5, 3.5]))
    assert found.ending("bf16", "stalled").to_dict() == {0: 0.0, 1: 0.25, 2: 0.5}
    assert found.away()["bf16"].groupby("step").mean().to_dict() == {0: 0.5, 10: 0.25}


def test_what_another_arm_leaves_of_a_gap():
    some = dict(fp32=FP32, whole=[2.0, 4.0, 5.0], half=[1.5, 3.0, 4.0])
    share = made(some).left("half", "whole")
    assert share == Estimate(*[pytest.approx(0.5)] * 3)
    some["half"] = [1.0, 3.0, 4.0]
    share = made(some).left("half", "whole")
    assert share.mean == pytest.approx(0.4) and share.low == 0 and share.high == pytest.approx(0.5)
    unsure = gaps.share([1.0, 1.0, 1.0, 1.0], [9.0, -8.0, 9.0, -8.0])
    assert unsure == (2.0, float("-inf"), float("inf")), "of what may be nothing"


def test_the_size_of_a_gap_reaches_zero_where_the_gap_does():
    assert gaps.size(Estimate(-1.0, -3.0, 0.5)) == (1.0, 0.0, 3.0)
    assert gaps.size(Estimate(-2.0, -3.0, -1.0)) == (2.0, 1.0, 3.0)


def test_the_largest_gap_has_the_fewest_seeds_behind_it():
    near = made(dict(fp32=FP32, bf16=[1.1, 2.0, 3.2]))
    far = made(dict(fp32=[*FP32, 2.0], bf16=[1.0, 1.0, 2.5, 1.5]))
    largest, smallest = (gaps.largest([far, near], "bf16", pick=pick) for pick in (max, min))
    assert largest.n == smallest.n == 3
    assert largest.value == near.gap("bf16").mean and smallest.value == far.gap("bf16").mean
    assert gaps.largest([far, near], "bf16", of=gaps.size).value == -far.gap("bf16").mean


def test_records_are_read_from_a_folder_first(tmp_path):
    own = dataclasses.replace(TASKS["digits"], steps=21, warmup=2, batch=8, seeds=2)
    mixed_runs.record(tmp_path, "digits", own, arms=("fp32",))
    found, held = gaps.read(tmp_path), gaps.read()
    assert len(found["digits"].loss) == 2 and len(held["digits"].loss) == 10
    assert set(found) == set(held) == set(TASKS)
    assert found["text"].loss.equals(held["text"].loss)
    assert gaps.read_products(tmp_path) == gaps.read_products()
    (tmp_path / "products.json").write_text("{}")
    assert gaps.read_products(tmp_path) == {}


def test_records_are_made_silently(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gaps, "record_products", lambda *of: print(*of))
    small = dataclasses.replace(TASKS["digits"], steps=21, warmup=2, batch=8, seeds=2)
    monkeypatch.setitem(gaps.TASKS, "digits-many", small)
    assert gaps.make(tmp_path, "cpu", ["digits-many"]) == tmp_path
    assert (tmp_path / "digits-many.json").exists() and not capsys.readouterr().out


def test_the_recorded_images_can_be_trained_again():
    curve = mixed_runs.train(TASKS["digits"], "bf16", [0, 1], stop=20)[0]
    held = gaps.read()["digits"].curves.query("arm == 'bf16' and seed < 2 and step < 20")
    both = curve.merge(held, on=["seed", "step"])
    assert len(both) == 4
    np.testing.assert_allclose(both.loss_x, both.loss_y, rtol=1e-4)
