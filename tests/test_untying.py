"""What runs say of the stabilised softmax taken apart, on made-up runs and the recorded ones."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lowprec.studies import untying


def run(loss, ended="completed", **probes):
    probes = dict(step=[599], layer=[1], head=[0], sigma_q=[2.0], sigma_k=[3.0], delta_bias=[0.0],
                  delta_abs=[8.0], tied_rows=[1], rows=[4]) | probes  # fmt: skip
    metrics = pd.DataFrame(dict(step=np.arange(len(loss)), loss=loss))
    config = dict(n_embd=64, n_head=4, probe_every=200)
    return SimpleNamespace(
        metrics=metrics, probes=pd.DataFrame(probes), explosion=None, name="made",
        info=dict(ended=ended, config=config),
    )  # fmt: skip


def with_bump(height, at=1000, length=100, steps=2000):
    loss = np.full(steps, 2.0)
    loss[at : at + length] += height
    return run(loss)


def test_a_rise_is_counted_from_the_lowest_mean_after_the_start():
    assert untying.rise(with_bump(0.7)) == pytest.approx(0.7)
    assert untying.rise(with_bump(3, at=300)) == 0
    broken = with_bump(0.3)
    broken.metrics.loc[1999, "loss"] = np.nan
    assert untying.rise(broken) == pytest.approx(0.3)


def test_a_spell_lasts_until_the_loss_is_back():
    ((first, steps),) = untying.spells(with_bump(1.0))
    assert first == 1024 and steps == 113  # half of 50 losses are up; three quarters are back
    assert untying.spells(with_bump(0.4)) == []
    twice = with_bump(1.0)
    twice.metrics.loc[1500:1599, "loss"] += 1
    assert [first for first, _ in untying.spells(twice)] == [1024, 1524]


def test_norms_bound_scores():
    two = dict(step=[599, 599], layer=[1, 2], head=[0, 0], sigma_q=[2.0, 5.0], sigma_k=[3.0, 3.0])
    more = {name: [1, 1] for name in ("delta_bias", "delta_abs", "tied_rows", "rows")}
    made = run(np.ones(700), **two, **more)
    assert untying.allowed(made, 1)[599] == 2 * 3 * 64 / 4
    assert untying.allowed(made)[599] == 5 * 3 * 64 / 4
    assert untying.nearest(pd.Series([1.0, 2.0], [99, 199]), 140) == 1


def test_rows_of_the_second_layer():
    made = run(np.ones(700))
    assert untying.tied(made, 399, 599) == 0.25
    assert untying.error_of(1, 399, 599)(made) == 2


def test_a_jump_ends_with_the_run_without_the_floor():
    bare, floored = run(np.full(1000, 2.0)), run(np.full(2000, 2.0))
    floored.metrics.loc[[880, 950, 1500], "loss"] = [9.0, 3.5, 7.0]
    assert untying.jump(floored, bare, 900) == 1.5


COUNTS = pd.DataFrame(
    [(0, step, layer, head, 10, 4, lost, 1.0 + (step == 2400), 2.0, 3.0)
     for step, lost in ((800, 0), (2400, 3)) for layer in (0, 1) for head in (0, 1)],
    columns="seed step layer head rows tied lost o do eps".split(),
)  # fmt: skip


def test_silent_rows_are_counted_in_the_second_layer():
    assert untying.silenced(COUNTS).loc[0].tolist() == [0, 0.75]
    assert untying.silenced(COUNTS, "rows").loc[0].tolist() == [0, 0.3]
    assert untying.grown(COUNTS).to_dict() == dict(o=2, do=1, eps=1)


@pytest.fixture(scope="module")
def arms():
    return untying.load()


def test_arms_with_all_seeds_and_with_those_that_all_have(arms):
    every, four = arms
    assert every["beta2_floor"].n == 8 and four["beta2_floor"].n == four["untied"].n == 4


def test_an_end_in_nan_is_told_apart_from_an_explosion(arms):
    every, four = arms
    names = ("low", "beta7", "tied_muted", "o_fp32")
    table = untying.fates({name: four[name] for name in names}, every["o_fp32"])
    assert table["explode"].tolist() == ["4 of 4", "0 of 4", "0 of 4", "0 of 4"]
    assert table.NaN.tolist() == ["0 of 4", "4 of 4", "0 of 4", "0 of 4"]
    above = table["ends above clean δ by"]
    assert above["low"] == above["beta7"] == "–" and above["o_fp32"] == "0.000"
    assert untying.taken(four["low"]) == 4 and untying.taken(four["low"], four["tied_muted"]) == 4
    first = [untying.first_layer(run) for run in four["tied_muted"].by_seed.values()]
    assert first == [-1] * 4


def test_courses_of_runs(arms):
    _, four = arms
    table = untying.losses(four["beta7"], four["untied"])
    assert len(table.columns) == 8 and table["beta7 0"].last_valid_index() < 300
    low = four["low"].by_seed[0]
    assert untying.largest_norm(low).max() > 20
    assert 0 < untying.tied_course(low).max() < 0.5
