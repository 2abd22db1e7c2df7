"""The test over steps holds its level where steps are correlated; terms of a capture add up."""

import numpy as np
import pandas as pd
import pytest
from scipy import signal, stats

from lowprec import UserError
from lowprec.diagnose.drift import batch_means, output_terms, relative_sum, top_share
from lowprec.records.files import data_root
from lowprec.training.capture import Capture

NOISE = np.random.default_rng(0).standard_normal((400, 1000))


def test_white_noise_is_rejected_at_the_level():
    mean, error, p = batch_means(NOISE, 10)
    assert np.allclose(mean, NOISE.mean(0))
    assert error.mean() == pytest.approx(400**-0.5, rel=0.05)
    assert 0.03 < (p < 0.05).mean() < 0.07


def test_correlated_steps_fool_a_t_test_and_not_this_one():
    series = signal.lfilter([1], [1, -0.8], NOISE, axis=0)[200:]
    naive = stats.ttest_1samp(series, 0).pvalue
    assert (naive < 0.05).mean() > 0.4
    assert (batch_means(series, 10)[2] < 0.05).mean() < 0.12


def test_a_drift_is_found_and_the_last_steps_count():
    series = np.concatenate([np.full((3, 2), -1e9), NOISE[:200, :2] + 1])
    mean, _, p = batch_means(series, 10)
    assert (mean > 0.7).all() and (p < 1e-3).all()


def test_zero_has_no_sign():
    assert batch_means(np.zeros((20, 3)), 4)[2].tolist() == [1, 1, 1]


@pytest.mark.parametrize("batches", [-1, 0, 1, 21])
def test_a_wrong_number_of_batches_is_named(batches):
    with pytest.raises(UserError, match=f"batches={batches} must be at least 2 and at most 20"):
        batch_means(np.zeros(20), batches)


def test_relative_sum_takes_steps_after_and_until():
    probes = pd.DataFrame(
        dict(step=[0, 1, 2, 2], layer=0, head=[0, 0, 0, 1], delta_bias=[9.0, -1.0, 2.0, 0.0],
             delta_abs=[9.0, 2.0, 2.0, 0.0])
    )  # fmt: skip
    found = relative_sum(probes, 0, 2)
    assert found[0, 0] == 0.25 and np.isnan(found[0, 1])
    assert relative_sum(probes)[0, 0] == pytest.approx(10 / 13)


def test_top_share():
    assert top_share(np.array([[1.0, 5.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), 2).tolist() == [
        0.7,
        0.5,
    ]


def test_terms_of_a_capture_add_up():
    capture = Capture.load(data_root() / "captures/fa2-b-seed4-1580.xz")
    eps, terms = output_terms(capture)
    assert terms.shape == (1024, 64)
    assert np.abs(eps - terms.sum(1)).sum() < 1e-3 * np.abs(eps).sum()
