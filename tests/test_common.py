"""What the errors of W_Q's gradient have in common: of tokens in a captured head, and of steps."""

import pandas as pd
import pytest
import torch

from lowprec.records.files import data_root
from lowprec.studies import common
from lowprec.training.capture import Capture
from lowprec.training.probes import QueryErrorWindow


@pytest.fixture(scope="module")
def failing():
    capture = Capture.load(data_root() / "captures" / "fa2-b-seed4-1580.xz").first(128)
    return common.head(capture)


def stretched(s, factor):
    """A head whose mean keys are longer or shorter, and all else as it is."""
    return type(s)(**vars(s) | {"a": factor * s.a})


def test_the_error_is_the_sum_of_the_parts_of_its_tokens(failing):
    table = common.of_heads({"it": failing, "turned": type(failing)(**vars(failing) | {
        "error": -failing.error
    })})  # fmt: skip
    row = table.loc["it"]
    assert row.reproduced and 0.5 < row.energy <= 1 and 0 < row.left < 1
    assert row.energy >= row.cos_r > 0.5 and 0.9 < row.k_common <= 1
    assert table.error["turned"] == -row.error and table.ratio["turned"] == row.ratio
    assert abs(row.error) > 0.9 > abs(row.gradient)


def test_the_largest_features_come_first_and_all_make_one():
    shares = common.features(torch.tensor([[1.0, 3, 0], [1.0, 5, 0]], dtype=torch.float64))
    assert list(shares.index) == [1, 0, 2] and shares[1] == pytest.approx(16 / 17)
    assert shares.sum() == pytest.approx(1)


def test_the_same_head_twice_is_no_more_than_once(failing):
    twice = common.stacked(stretched(failing, 3), failing)
    assert twice["as_is"] == pytest.approx(failing.energy)
    assert twice["equal"] == pytest.approx(failing.energy)
    assert twice["share"] == pytest.approx(0.9) and twice["cosine"] == pytest.approx(1)


def test_equal_keys_hide_every_step_of_the_queries(failing):
    same = type(failing)(**vars(failing) | {"k": failing.k[:1].expand_as(failing.k)})
    hidden, seen = (common.moved(s, 4, torch.Generator().manual_seed(0)) for s in (same, failing))
    assert hidden["change"] < 1e-12 and hidden["random_shared"] == pytest.approx(1)
    assert 1e-5 < seen["change"] < 0.1 and seen["shared"] > seen["random_shared"]


def test_a_model_that_was_never_trained_has_a_row_a_head_and_depends_on_its_seed():
    table, other = common.untrained(1, 0, 32), common.untrained(2, 0, 32)
    assert len(table) == 36 and (table.start == 0).all()
    assert not table.cos_r.equals(other.cos_r) and table.cos_r.equals(
        common.untrained(1, 0, 32).cos_r
    )


# Windows


def window(signs, seed=0, sketch=64):
    """The table of a run whose one head has the same e in every step, but for its sign."""
    generator = torch.Generator().manual_seed(seed)
    q, k, x = (
        torch.randn(1, *shape, generator=generator) for shape in ((1, 16, 8),) * 2 + ((16, 24),)
    )
    recorder = QueryErrorWindow(1, 1, 8, 24, sketch=sketch)
    eps = torch.randn(1, 1, 16, generator=generator)
    for step, sign in enumerate(signs):
        recorder.update(step, 0, x, q, k, sign * eps, policy="ALL_FP32", impl="emulate")
        recorder.end_step(step)
    return recorder.to_table(), recorder.total[0, 0] / sum(signs)


def test_errors_of_one_direction_add_up_and_of_changing_sign_do_not():
    for signs, expected in (([1] * 4, 1), ([1, -1, 1, 1], 0.5)):
        table, _ = window(signs)
        assert common.coherence(table)[0, 0] == pytest.approx(expected, rel=1e-5)
        assert common.unrelated(common.of_head(table, 0, 0)) == pytest.approx(0.5, rel=1e-5)


def test_unequal_lengths_add_up_more_by_chance():
    rows = pd.DataFrame(dict(error_norm=[3.0, 4.0]))
    assert common.unrelated(rows) == pytest.approx(5 / 7)


def test_near_and_far_are_told_apart():
    table, _ = window([1] * 100 + [-1] * 50)
    near, far = common.near_and_far(table, 0, 0)
    assert far == pytest.approx(-1, abs=1e-3) and 0.8 < near < 1


def test_a_sum_lies_along_its_own_direction():
    table, e = window([1, 1, 1])
    rows = common.of_head(table, 0, 0)
    assert common.against(rows, e) == pytest.approx(1, abs=1e-3)
    assert common.against(rows, -e) == pytest.approx(-1, abs=1e-3)


def test_more_projections_are_less_noisy_and_none_at_cosine_one():
    direction = torch.ones(8, 24, dtype=torch.float64)
    coarse, fine = (common.sketch_noise(0.5, direction, width, 40) for width in (16, 256))
    assert coarse > 2 * fine > 0
    assert common.sketch_noise(1.0, direction, 16, 4) == pytest.approx(0, abs=1e-12)
