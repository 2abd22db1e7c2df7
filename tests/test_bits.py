"""Bits taken from operands, as `round_to` and centred; what is an event, and what a warning."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from test_moments import InThisProcess

from lowprec import UserError
from lowprec.numerics.formats import round_to
from lowprec.studies import bits
from lowprec.studies.mixed_runs import losses

MODES = {"mask": "toward_zero", "nearest": "nearest_even"}


def patterns(count=100_000):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator)
    x = words.to(torch.int32).view(torch.float32)
    return torch.where(x.isnan(), math.nan, x)


@pytest.mark.parametrize("count", (1, 2, 3, 7))
@pytest.mark.parametrize("how", MODES)
def test_a_cut_is_round_to_in_all_bits(count, how):
    x = patterns()
    mine, theirs = bits.cut(x, count, how), round_to(x, f"e8m{count}", MODES[how])
    same = (mine.view(torch.int32) == theirs.view(torch.int32)) | (mine.isnan() & theirs.isnan())
    assert same.all() and mine.isnan().any()


def test_at_random_is_round_to_with_the_same_words(monkeypatch):
    x = patterns(20_000)
    words = torch.randint(2**21, x.shape, generator=torch.Generator().manual_seed(2))
    mine = bits.cut(x, 2, "random", torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch, "randint", lambda *a, **k: words.to(torch.int32))
    assert torch.equal(mine.nan_to_num(), bits.cut(x, 2, "random").nan_to_num())
    normal = (x.abs() > 2.0**-100) & (x.abs() < 2.0**100)
    theirs = round_to(x[normal], "e8m2", "stochastic", bits=(words << 11)[normal])
    assert torch.equal(mine[normal], theirs)


def test_what_cutting_takes_on_average_and_what_the_constant_leaves():
    x = 2.0 ** (20 * torch.rand(400_000, generator=torch.Generator().manual_seed(0)))
    below = 1 + torch.arange(8, dtype=torch.float64) / 8
    step = 1 / 8 / below
    share = ((1 + step).log() - step / (1 + step)).sum().item() / math.log(2)
    error = {how: bits.changes(x, 3, how) for how in bits.HOW}
    assert error["mask"][0] == pytest.approx(-share, rel=0.01)
    assert 1 - 1 / bits.factor(3) == pytest.approx(share, rel=0.04)
    assert all(abs(error[how][0]) < 0.05 * share for how in ("centred", "nearest", "random"))
    sizes = {how: size for how, (_, size) in error.items()}
    assert sizes["mask"] / sizes["nearest"] == pytest.approx(2, rel=0.05)
    assert sizes["random"] / sizes["nearest"] == pytest.approx(math.sqrt(2), rel=0.01)
    assert 1 < sizes["centred"] / sizes["nearest"] < 1.15
    assert bits.changes(x, 2, "nearest")[1] == pytest.approx(sizes["mask"], rel=0.05)


def test_the_sharpness_is_the_largest_rise_in_the_box():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, 7, generator=generator)
    targets = torch.randint(7, (2, 5), generator=generator)
    low = losses(logits, targets)
    rise = bits.sharpness(logits, targets, 0.1) * (1 + low) / 100
    for _ in range(200):
        move = 2 * torch.rand(logits.shape, generator=generator) - 1
        move = (0.1 * (logits.abs() + 1)) * move.sign()
        assert (losses(logits + move, targets) - low <= rise + 1e-6).all()
    assert bits.sharpness(logits, targets, 0.0).abs().max() < 1e-5


def test_smaller_takes_the_mean_and_no_bit():
    x = patterns(100)
    assert torch.equal(bits.cut(x, 2, "smaller").nan_to_num(), (x / bits.factor(2)).nan_to_num())


SMALL = dataclasses.replace(bits.TASKS["images"], steps=40, hidden=16, seeds=2)


def test_fp32_is_an_arm_and_every_way_differs():
    ends = {arm: bits.train(SMALL, *bits.ARMS[arm], 0.01, (1, 2))[1] for arm in ("fp32", *many())}
    values = [end.loss[0] for end in ends.values()]
    assert len(set(values)) == len(values) and all(map(math.isfinite, values))
    again = bits.train(SMALL, None, "", 0.01, (2,))[1]
    assert again.loss[0] == pytest.approx(ends["fp32"].loss[1], rel=1e-4)


def many():
    return [f"{how}2" for how in bits.HOW]


def test_a_course_has_means_of_ten_steps_and_stops_where_asked():
    course, _ = bits.train(SMALL, 2, "mask", 0.01, (1, 2), stop=20)
    assert course.step.tolist() == [10, 10, 20, 20] and course.sharpness.gt(0).all()
    assert course.loss[0] == pytest.approx(math.log(10), abs=1.5)


def test_operands_are_seen_before_they_are_cut():
    seen = bits.operands(SMALL, (1,), 20)
    assert all((x != 0).all() for x in seen.values())
    weights = 64 * 16 + 16 * 10
    assert weights < len(seen["forward"]) <= 64 * 64 + 64 * 16 + weights
    assert 0 < len(seen["backward"]) <= 64 * 16 + 64 * 10
    assert bits.cut(seen["forward"], 7, "nearest").ne(seen["forward"]).any()


def test_a_census_counts_powers_of_two():
    counted = bits.census(torch.tensor([3.0, -2.0, 0.75, 1.0]))
    assert counted.to_dict() == {-1: 1, 0: 1, 1: 2}


def made(**courses):
    """A record with one rate and a run a course: {arm: (losses, sharpness)}, each 10 steps."""
    rows = [
        dict(arm=arm, rate=0.1, seed=0, step=10 * (i + 1), loss=loss, sharpness=sharp)
        for arm, pair in courses.items()
        for i, (loss, sharp) in enumerate(zip(*pair, strict=True))
    ]
    ends = [dict(arm=arm, rate=0.1, seed=0, loss=pair[0][-1]) for arm, pair in courses.items()]
    return bits.Record({"config": {"classes": 10}}, pd.DataFrame(ends), pd.DataFrame(rows))


def test_an_event_is_a_rise_above_the_lowest_loss_before_or_no_number():
    held = made(
        calm=([2, 1.2, 1.6, 1], [1] * 4), jump=([2, 1, 1.6, 1], [1] * 4),
        ended=([2, 1, 1, math.nan], [1] * 4),
    )  # fmt: skip
    steps = held.events[:, 0.1].droplevel("seed").to_dict()
    assert math.isnan(steps["calm"]) and (steps["jump"], steps["ended"]) == (30, 40)
    assert held.jumped("jump", 0.1).all() and not held.jumped("calm", 0.1).any()


def test_a_warning_is_held_against_quiet_runs_at_the_same_step():
    held = made(
        jump=([2, 1, 1.1, 3], [1, 5, 1, 9]), low=([2, 1, 1, 1], [0, 3, 0, 0]),
        high=([2, 1, 1, 1], [9, 9, 9, 9]), same=([2, 1, 1, 1], [2, 5, 2, 2]),
    )  # fmt: skip
    assert held.ahead("sharpness", 20).tolist() == [pytest.approx((1 + 0 + 0.5) / 3)]
    assert held.ahead("sharpness", 40).empty


def test_a_run_that_ends_worse_than_guessing_guesses():
    held = made(fp32=([1, 1], [1, 1]), mask2=([1, math.nan], [1, 1]), mask1=([1, 9], [1, 1]))
    assert held.at(0.1).loss.loc[0].to_dict() == {
        "fp32": 1, "mask2": math.log(10), "mask1": math.log(10),
    }  # fmt: skip


def test_a_record_reads_as_it_was_made(tmp_path, monkeypatch):
    monkeypatch.setitem(bits.TASKS, "images", dataclasses.replace(SMALL, steps=20))
    monkeypatch.setitem(bits.RATES, "images", (0.01, 0.1))
    monkeypatch.setattr(bits, "ProcessPoolExecutor", InThisProcess)
    bits.record(tmp_path, "images", ("fp32", "mask2"))
    held = bits.read("images", tmp_path)
    assert held.rates == [0.01, 0.1] and held.at().loss.columns.tolist() == ["fp32", "mask2"]
    assert held.at(0.1).loss.index.tolist() == [700, 701] and np.isfinite(held.at().spread)
    assert json.loads((tmp_path / "images.json").read_text())["config"]["steps"] == 20
    with pytest.raises(UserError, match="never overwritten"):
        bits.record(tmp_path, "images", ("fp32",))
    with pytest.raises(UserError, match="there is no record text"):
        bits.read("text", tmp_path)


def test_what_the_constant_leaves_is_a_part_of_the_gap():
    rows = [
        dict(arm=arm, rate=0.1, seed=seed, loss=loss + 0.01 * seed)
        for seed in range(4)
        for arm, loss in (("nearest2", 1.0), ("centred2", 1.1), ("mask2", 1.5))
    ]
    held = bits.Record({"config": {"classes": 10}}, pd.DataFrame(rows), pd.DataFrame())
    assert held.left(2) == pytest.approx((0.2, 0.2, 0.2))
