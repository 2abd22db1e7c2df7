"""Twelve layers: the head that takes off first has its place, and a capture its errors."""

import numpy as np
import pytest
from conftest import chosen
from test_heads import made_up

from lowprec.studies import twelve


def test_the_first_head_has_the_sum_and_the_places_of_the_steps_before():
    run = made_up(h2=(799, 3), h1=(999, 3))  # δ's errors sum to 1 in head 2 at each probe
    found = twelve.first_head(run)
    assert found == dict(layer=1, head=2, step=899, signed=4.0, by_sum=1, by_size=2)
    assert twelve.first_head(run, ahead=100)["signed"] == 2.0
    last = twelve.first_head(made_up(h0=(799, 3)))
    assert (last["head"], last["by_sum"], last["signed"]) == (0, 3, -4.0)


def test_without_a_take_off_there_is_no_first_head():
    assert twelve.first_head(made_up()) is None
    assert twelve.first_head(made_up(h2=(799, 3)), factor=4) is None


def test_a_captured_head_takes_off_as_in_its_run(recorded, larger):
    (run,) = (run for run in chosen(recorded, "gpt2", "low") if run.seed == 0)
    capture, found = larger["low-seed0-800"], twelve.first_head(run)
    assert (found["layer"], [found["head"]]) == (capture.layer, capture.heads)
    held = twelve.specimen(capture, draws=2)
    assert held["walk"].shape == (1024,) and held["walk"][-1] == pytest.approx(0.088, abs=1e-3)
    assert held["energy"] == pytest.approx(0.861, abs=1e-3)
    assert held["left"] == pytest.approx(0.394, abs=1e-3) and held["left"] > held["anew"].max()
    assert len(np.unique(held["anew"])) == 2 and held["differs"] < 0.016
