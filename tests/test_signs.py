"""The sign of δ's errors: sums over a window, over seeds, and in the rows of a capture."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lowprec.diagnose.drift import output_terms
from lowprec.evidence import survival
from lowprec.evidence.heads import end_of, take_offs
from lowprec.records.files import data_root
from lowprec.studies import signs
from lowprec.training.capture import Capture

RNG = np.random.default_rng(0)


def made(bias) -> signs.Window:
    """A window of two heads, from (steps, 2) sums; every Σ|ε| is 4, and e as long as |b|."""
    steps = len(bias)
    errors = pd.DataFrame(
        dict(
            step=np.repeat(np.arange(10, 10 + steps), 2), layer=1, head=[0, 1] * steps,
            delta_bias=bias.ravel(), delta_abs=4.0, error_norm=np.abs(bias).ravel(),
            sum_norm=np.linalg.norm([bias.cumsum(0), 0 * bias], axis=0).ravel(),
        )
    )  # fmt: skip
    bias, size = (
        errors.pivot(index="step", columns=["layer", "head"], values=c)
        for c in ("delta_bias", "delta_abs")
    )
    probes = errors.assign(delta_bias=2 * errors.delta_bias)
    return signs.Window(SimpleNamespace(probes=probes), (1, 0), errors, bias, size)


@pytest.fixture(scope="module")
def window():
    noise = RNG.standard_normal((200, 2))
    return made(noise + [1.0, 0.0])


def test_a_lean_is_found_and_noise_is_not(window):
    assert window.relative[1, 0] == pytest.approx(0.25, abs=0.05)
    p = window.of_batches(10)
    assert p[1, 0] < 1e-3 < 0.05 < p[1, 1]
    alone = window.of_batches(10, [(1, 0)])
    assert list(alone.index) == [(1, 0)] and alone[1, 0] < p[1, 0]  # nothing to correct for


def test_what_is_left_of_the_steps(window):
    kept = window.kept()
    assert kept.number[1, 0] > 0.6 > 0.2 > kept.number[1, 1]
    assert kept.matrix.to_numpy() == pytest.approx(kept.number.to_numpy())


def test_rows_needed_follow_the_scatter_of_steps(window):
    wider = made(2 * window.bias.to_numpy())
    assert wider.rows_needed() == pytest.approx(4 * window.rows_needed())


def test_a_window_is_held_against_the_same_steps_of_its_run(window):
    mine, of_run = window.again()
    assert (2 * mine).equals(of_run)
    assert mine[1, 0] == pytest.approx(window.bias[1, 0].iloc[1:].sum())  # from the first probe on


def test_windows_are_of_pairs_with_one_head():
    found = signs.windows()
    assert list(found)[:2] == ["fa2-a", "fa2-a-healthy"] and len(found) == 6
    for pair in signs.PAIRS:
        fails, twin = found[pair], found[f"{pair}-healthy"]
        assert fails.head == twin.head and fails.run.seed == twin.run.seed
        assert fails.bias.shape == twin.bias.shape == (200, 36)
    assert signs.by_chance([found["fa2-a"]]) == (found["fa2-a"].relative > 0).mean()


def test_the_interval_counts_seeds_and_not_runs():
    values = pd.Series({(arm, seed): seed / 10 for arm in "ab" for seed in range(4)})
    both, one = signs.mean_over_seeds(values), signs.mean_over_seeds(values.loc[["a"]])
    assert (both.value, both.n, one.n) == (pytest.approx(0.15), 8, 4)
    assert both.interval == pytest.approx(one.interval)


def test_equals_are_a_coin():
    assert signs.auc([1, 2], [1, 2]) == 0.5 and signs.auc([3, 4], [1, 2]) == 1.0


def test_a_correlation_has_an_interval():
    found = signs.rank_correlation(range(50), [*range(1, 50), 0])
    low, high = found.interval
    assert low < found.value < high < 1 and found.n == 50


def test_both_of_a_pair_are_measured_before_the_take_off():
    arm = survival.load_arms("mini")["fa2"].only([0])
    base = survival.load_arms("production")["fa2_o_fp32"]
    found = signs.before_take_off(arm, base)
    assert list(found.index) == [0] and found["mine", "heads"].between(1, 36).all()
    run = arm.by_seed[0]
    assert take_offs(run).step.min() < end_of(run)
    same = signs.before_take_off(arm, arm)
    assert (same["mine"] == same["base"]).all(axis=None) and not same["mine"].equals(found["base"])


def test_the_rows_of_a_capture():
    capture = Capture.load(data_root() / "captures/fa2-b-seed4-1580.xz")
    found = signs.of_rows(capture)
    eps, terms = output_terms(capture)
    assert found["relative"] == pytest.approx(eps.sum() / np.abs(eps).sum())
    assert found["rest"] < 1e-3 and 2 / 64 < found["two"] < 1 and 0.01 < found["heavy"] < 1
    assert found["all"] == (terms[1:] > 0).mean()
    split = signs.split(capture)
    assert split["tied_rows"] == 0 and np.isnan(split["tied"]) and split["untied"] == found["all"]


def test_agreement_is_tested_in_rows_that_did_not_choose():
    terms = RNG.standard_normal((400, 64))
    terms[:, 5] = 3.0
    assert 5 in signs.leaders(terms)
    assert signs.agreement(terms, [5], odd=True) == 1.0
    assert signs.agreement(terms, [5], where=np.zeros_like(terms, bool)) is np.nan
    chosen = signs.leaders(np.delete(terms, 5, axis=1))
    assert abs(signs.agreement(terms, chosen, odd=True) - 0.5) < 0.15


def test_noise_has_few_large_terms():
    noise = signs.of_noise()
    assert 2 / 64 < noise["two"] < 0.3 and 0 < noise["of_eps"] < 1
