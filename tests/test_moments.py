"""What averages forget, by criterion and by enumeration; trainings with a moment in few bits."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec import UserError
from lowprec.numerics.formats import Format, round_to
from lowprec.studies import forgetting, moments


def test_codes_are_the_positive_numbers_of_a_format():
    assert forgetting.codes("e2m1").tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    for name in ("e4m3", "e5m2", "fp16"):
        x, fmt = forgetting.codes(name), Format.parse(name)
        unused = 2 if fmt.specials == "nan" else 2**fmt.significand_bits + 1
        assert len(x) == 2 ** (fmt.bits - 1) - unused
        assert torch.equal(round_to(x, fmt), x) and x[-1] == fmt.max and (x.diff() > 0).all()


@pytest.mark.parametrize("name", forgetting.FORMATS)
def test_the_criterion_is_the_enumeration(name):
    for beta in forgetting.RATES:
        assert torch.equal(forgetting.leaves(name, beta), forgetting.left(name, beta))


def test_the_word_is_that_of_normal_numbers():
    for name in forgetting.FORMATS:
        fmt = Format.parse(name)
        normal = forgetting.codes(name) > fmt.min_normal
        for beta in forgetting.RATES:
            left = forgetting.left(name, beta)[normal]
            assert {"falls": left.all(), "never": not left.any(), "stops": left.any()}[
                forgetting.word(name, beta)
            ]


def test_the_threshold_by_hand():
    assert forgetting.threshold("e4m3", 0.95) == pytest.approx(1.25)
    assert forgetting.word("e4m3", 0.9) == "falls"
    assert forgetting.word("e5m2", 0.95) == forgetting.word("bf16", 0.999) == "never"


def test_an_average_comes_to_rest_by_its_significand():
    assert forgetting.rest(1.875, "e4m3", 0.95) == 1.25
    assert forgetting.rest(1.0, "e4m3", 0.95) == 0.625
    assert forgetting.rest(1.75, "e5m2", 0.95) == 1.75
    assert forgetting.rest(448.0, "e4m3", 0.9) == 4 * Format.parse("e4m3").min_subnormal


def test_the_map_is_coarse_at_its_top_and_a_slow_average_leaves_no_level():
    levels = forgetting.dynamic_map()
    assert len(levels) == 256 and levels[0] == 0 and levels[-1] == 1
    assert levels[-2] == pytest.approx(1 - 0.9 / 256)
    assert not forgetting.left_in_map(levels, 0.999).any()
    middle = (levels[:-1] + levels[1:]) / 2
    below = np.searchsorted(middle.numpy(), (0.95 * levels[1:]).numpy(), side="left")
    assert torch.equal(
        forgetting.left_in_map(levels, 0.95), torch.from_numpy(below < np.arange(1, 256))
    )


def test_an_average_is_lifted_and_stays_lifted():
    ratio = forgetting.followed("e5m2", "nearest_even", (0.95,), width=64, steps=400)
    fair = forgetting.followed("e5m2", "stochastic", (0.95,), width=64, steps=400)
    assert ratio[0.95] > 1.5 and fair[0.95] == pytest.approx(1, abs=0.05)


TASK = moments.Dense(steps=40, hidden=16)


def test_arms_share_starts_and_batches_and_equal_fp32_where_nothing_is_rounded():
    curve, ends, _ = moments.train(TASK, "fp32", (1, 2))
    again, same, _ = moments.train(TASK, "fp32-quick-v", (1, 2), stop=1)
    assert curve.loss[0] == pytest.approx(moments.train(TASK, "fp32", (1, 2), stop=50)[0].loss[0])
    assert len(ends) == 2 and ends.lost.eq(0).all() and ends.high.eq(1).all()
    assert math.log(10) / 2 < again.loss[0] < 2 * math.log(10) and same.ended.isna().all()


def test_a_seed_trains_as_it_does_alone():
    both = moments.train(TASK, "floor-pow2", (1, 2))[1].set_index("seed").loss
    alone = moments.train(TASK, "floor-pow2", (2,))[1].set_index("seed").loss
    assert both[2] == pytest.approx(alone[2], rel=1e-3)


def test_rounding_loses_and_the_smallest_number_keeps():
    lost = moments.train(TASK, "moving", (1,))[1].lost[0]
    assert lost > 0.01
    assert moments.train(TASK, "floor-moving", (1,))[1].lost[0] == 0


def test_moments_are_kept_where_asked():
    kept = moments.train(TASK, "fp32", (1, 2), look=(5, 40))[2]
    assert list(kept) == [5, 40]
    m, v = kept[40]
    assert [tuple(t.shape) for t in v] == [(2, 64, 16)]
    assert not torch.equal(kept[5][1][0], v[0]) and (v[0] >= 0).all() and (m[0] < 0).any()


def test_spans_leave_zeros_and_lonely_numbers_out():
    t = torch.zeros(1, 3, 4)
    t[0, 0] = torch.tensor([1.0, -8.0, 0, 2.0])
    t[0, 1, 0] = 5
    assert moments.spans(t, 4).tolist() == [8]
    assert moments.spans(torch.ones(2, 1, 6), 4).tolist() == [1, 1]


def test_the_error_of_a_step_is_that_of_the_root():
    v = torch.tensor([[[448.0, 17.0, 17.0, 17.0]]])
    root = math.sqrt(17 / 16) - 1
    assert moments.step_error(v, "e4m3@tensor", 4)[0] == pytest.approx(root * math.sqrt(3) / 2)


def test_a_record_reads_as_it_was_made(tmp_path, monkeypatch):
    small = moments.Dense(steps=20, hidden=16, seeds=2)
    monkeypatch.setitem(moments.TASKS, "digits", small)
    monkeypatch.setattr(moments, "ProcessPoolExecutor", InThisProcess)
    moments.record(tmp_path, "digits", ("fp32", "moving"))
    held = moments.read("digits", tmp_path)
    assert held.end("moving").index.tolist() == [500, 501]
    assert held.times("fp32").eq(1).all() and held.away("fp32").eq(0).all()
    assert held.guessing("fp32").dtype == bool
    assert (
        json.loads((tmp_path / "digits.json").read_text())["arms"]["moving"]
        == moments.ARMS["moving"]
    )
    with pytest.raises(UserError, match="never overwritten"):
        moments.record(tmp_path, "digits", ("fp32",))
    with pytest.raises(UserError, match="there is no record text"):
        moments.read("text", tmp_path)


class InThisProcess:
    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    map = staticmethod(map)


def test_a_loss_that_is_not_finite_is_worse_than_guessing():
    ends = pd.DataFrame({"arm": ["fp32", "moving"], "seed": 0, "loss": [0.5, math.inf]})
    held = moments.Record({"config": {}}, ends, pd.DataFrame())
    assert held.guessing("moving").all() and not held.guessing("fp32").any()
    assert held.times("moving").tolist() == [1e6]


def test_every_arm_is_a_recipe_and_has_its_base():
    for arm, text in moments.ARMS.items():
        assert str(moments.Recipe.parse(text)).startswith("FP32")
        assert moments.BASE.get(arm, "fp32") in moments.ARMS
    for arm, base in moments.BASE.items():
        assert moments.BETAS[arm] == moments.BETAS[base] and moments.ARMS[base] == "FP32"
