"""Captured heads in blocks: what is as it was, what grows, and counts told by hand."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec.records.files import data_root
from lowprec.studies import tiling
from lowprec.training.capture import Capture


@pytest.fixture(scope="module")
def table():
    capture = Capture.load(data_root() / "captures" / "fa2-b-seed4-1580.xz").first(256)
    return tiling.replays({"head": capture}, (256, 32)).xs("head", level="capture")


def test_one_block_is_no_tile(table):
    one = table.xs(256, level="tile")
    assert (one[["error", "own", "size", "part", "gradient", "same"]] == 1).all(axis=None)
    assert (one[["rescalings", "rank", "sign"]] == 0).all(axis=None)


def test_blocks_round_where_the_running_sums_are_stored(table):
    fa2, low = table.loc["FA2", 32], table.loc["LOW", 32]
    assert fa2.error == pytest.approx(1, abs=0.02) and fa2.own == pytest.approx(1, abs=0.02)
    assert low.own > 1.1 and low.same < fa2.same < 1
    assert low.rescalings > 0 and np.isfinite(table).all(axis=None)


def test_the_rank_is_among_rows_of_equally_many_blocks():
    row, rescaled = np.array([1.0, 2, 9, 8, 7, 7]), np.array([0, 1, 0, 1, 5, 5])
    assert tiling._rank(SimpleNamespace(row=row, rescaled=rescaled), 2) == pytest.approx(0)
    assert tiling._rank(SimpleNamespace(row=row, rescaled=0 * rescaled), 2) == 0


def test_what_is_added_has_a_sign_if_it_has_one():
    sizes = dict(error=2.0)
    made = dict(o=torch.tensor([1.0, 2]), row=np.ones(4), rescaled=np.ones(4), sizes=sizes)
    whole = SimpleNamespace(**made | dict(eps=torch.zeros(4)))
    tiled = SimpleNamespace(**made | dict(eps=torch.full((4,), 0.5), sizes=dict(error=3.0)))
    found = tiling._beside(tiled, whole, 2)
    assert found["sign"] == pytest.approx(2) and found["error"] == 1.5 and found["same"] == 1


def test_monotone_asks_for_each_doubling():
    index = pd.MultiIndex.from_product([(512, 256), ("a", "b", "c")], names=["tile", "capture"])
    some = pd.DataFrame({"own": [1.1, 0.9, 1.2, 1.3, 1.1, 1.1]}, index)
    assert tiling.monotone(some, "own").to_dict() == {"a": True, "b": False, "c": False}
