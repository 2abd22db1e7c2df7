"""Distances of runs from healthy ones, by hand on runs of a few probes."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lowprec import UserError
from lowprec.publish import notebook
from lowprec.studies import yardstick

PAGE = Path(__file__).resolve().parent.parent / "notebooks" / "do_weights_drift_apart.ipynb"


def run(loss, sigma, steps=(99, 149), bias=None):
    """A run of 200 steps with one loss, and at each of `steps` the σ(W_Q) of two heads."""
    probes = pd.DataFrame(
        [dict(step=step, layer=1, head=head, sigma_q=value)
         for step, values in zip(steps, sigma, strict=True) for head, value in enumerate(values)]
    )  # fmt: skip
    if bias is not None:
        probes = probes.assign(delta_bias=bias, delta_abs=np.abs(bias) * 10)
    return SimpleNamespace(metrics=SimpleNamespace(loss=pd.Series([loss] * 200)), probes=probes)


def test_the_gaps_of_two_runs():
    a, b = run(3.0, [(1, 2), (3, 4)]), run(2.5, [(1, 4), (6, 3)])
    gap = yardstick.loss_gap(a, b)
    assert gap.index[0] == 50 and np.allclose(gap, 0.5)
    assert yardstick.sigma_gaps(a, b).to_numpy().tolist() == [[0, 2], [3, 1]]
    assert yardstick.MEASURES["mean head"](a, b).tolist() == [1, 2]
    assert yardstick.MEASURES["largest head"](a, b).tolist() == [2, 3]


def test_the_loss_gap_is_over_all_steps_so_far():
    a, b = run(3.0, [(1, 2)], (99,)), run(3.0, [(1, 2)], (99,))
    a.metrics.loss[100:] = 4.0
    gap = yardstick.loss_gap(a, b)
    assert gap[99] == 0 and 0 < gap[149] < gap[199] < 1


def test_a_gap_is_in_units_of_the_median_pair_of_healthy_runs():
    healthy = {s: run(loss, [(loss, 0), (loss, 0)]) for s, loss in enumerate((1.0, 2.0, 4.0))}
    failing = {0: run(5.0, [(2, 0), (7, 0)]), 9: run(5.0, [(2, 0), (7, 0)])}
    found = yardstick.over_bound(failing, healthy, healthy)
    assert list(found) == list(yardstick.MEASURES)
    assert list(found["loss"]) == [0], "a run without a twin is left out"
    assert np.allclose(found["loss"][0], 4 / 2)  # pairs are 1, 2 and 3 apart
    assert found["largest head"][0].tolist() == [0.5, 3]


def test_columns_at_and_around_steps_of_their_own():
    table = pd.DataFrame({"a": [1, 2, np.nan, 4], "b": [5, 6, 7, 8.0]}, index=[0, 10, 20, 30])
    assert yardstick.at(table, {"a": 25, "b": 29}).to_dict() == {"a": 2, "b": 7}
    moved = yardstick.around(table, {"a": 10, "b": 30}, {"a": 20, "b": 30}, 10)
    assert moved["a"].dropna().to_dict() == {-10: 1, 0: 2}
    assert moved["b"].dropna().to_dict() == {-10: 7, 0: 8}


def test_halves_are_of_the_head_that_is_largest_at_the_end():
    steps = (10, 40, 60, 100, 120)
    sigma = [(9, 1), (9, 1), (9, 1), (2, 3), (9, 1)]
    bias = [0, 1.0, 0, 2.0, 0, -4.0, 0, 8.0, 0, 100.0]
    first, second, share = yardstick.halves(run(1.0, sigma, steps, bias), 100)
    assert (first, second) == (3, 4)
    assert share == pytest.approx(7 / 150)


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(mini="gpt2"), "mini='gpt2': FA2 must explode in all 8 seeds, and LOW; take mini"),
        (dict(mini="explosion"), "mini='explosion': FA2 must explode"),
        (dict(before=0), "before=0: take 1 to 1,664"),
    ],
    ids=str,
)
def test_what_the_page_cannot_read_is_one_sentence(given, words, tmp_path):
    with pytest.raises(UserError, match=words):
        notebook.execute(PAGE, tmp_path / "page.ipynb", parameters=given)
