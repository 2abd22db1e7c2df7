"""Which head of a run takes off first, what it had before, and how alike runs are."""

import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from test_heads import made_up

from lowprec import UserError
from lowprec.evidence.heads import sums, take_offs
from lowprec.evidence.survival import load_arms
from lowprec.records.explosion import Explosion
from lowprec.records.files import data_root
from lowprec.records.runs import ONSET, load_run
from lowprec.records.tables import write_table
from lowprec.studies import first_heads


@pytest.fixture(scope="module")
def runs():
    return {("a", 0): made_up(h2=(799, 3), h0=(999, 3), onset=1400), ("a", 1): made_up()}


@pytest.fixture(scope="module")
def firsts(runs):
    return first_heads.firsts(runs)


def test_the_first_take_off_of_each_run_that_has_one(firsts):
    [(key, first)] = firsts.iterrows()
    assert key == ("a", 0) and first.place == (1, 2) == (first.layer, first["head"])
    assert (first.step, first.together, first.inside, first.outside) == (899, 1, 2, 0)
    both = made_up(h0=(799, 3), h2=(799, 4))
    assert first_heads.firsts({0: both}).together[0] == 2


def test_take_offs_that_the_page_cannot_show_are_refused():
    mini = load_arms("mini")
    runs = first_heads.exploded({name: mini[name] for name in ("low", "dodo", "o_acc", "fa2")})
    how = dict(factor=2.0, lag=100, settled=600, ahead=200)
    assert len(first_heads.started(runs, **how | dict(factor=1.7))) == len(runs) == 32
    assert len(first_heads.started(runs, **how | dict(factor=2.8, ahead=900))) == 32
    for given, sentence in (
        (dict(factor=0.0), "with factor=0, lag=100, settled=600 not every run has its first"),
        (dict(factor=100.0), "second layer; factor=1.7 to 2.8, lag=100, settled=600 do"),
        (dict(ahead=5000), "ahead=5000 must be 1 to 999, the steps"),
        (dict(ahead=0), "ahead=0 must be 1 to"),
    ):
        with pytest.raises(UserError, match=sentence):
            first_heads.started(runs, **how | given)


def test_only_confirmed_explosions_count(runs):
    rising = made_up(onset=1400)
    rising.explosion = Explosion(1400, False)
    arm = SimpleNamespace(by_seed={0: runs["a", 0], 1: runs["a", 1], 2: rising})
    assert list(first_heads.exploded({"a": arm})) == [("a", 0)]


def test_steps_from_each_take_off_to_the_onset(runs):
    arm = SimpleNamespace(by_seed={0: runs["a", 0]}, config=SimpleNamespace(n_head=3))
    assert first_heads.until_onset(arm).fillna(-1).to_numpy().tolist() == [[301, -1, 501]]


def test_the_place_of_a_head_before_it_takes_off(firsts):
    place = first_heads.standing(firsts, 100, 200).loc[("a", 0)]
    assert place["Σε"] == place["tied rows"] == 1, "both grow with the head's number"
    assert place["Σ|ε|"] == place["σ(W_K)"] == 3, "equal in all, and so the last place"
    assert first_heads.standing(firsts, 750, 200).empty, "recorded for too short a time"
    other = firsts.assign(layer=[1]).assign(place=[(1, 0)])
    assert first_heads.standing(other, 100, 200, layer=1)["Σε"].tolist() == [3]


def test_sums_before_the_take_off(firsts):
    own = first_heads.own_sums(firsts, 300, 100).iloc[0]
    assert own.delta_bias == 4 and own.rows == 40, "four probes of head 2"
    table = first_heads.layer_sums(firsts.run, 99, firsts.step - 700)
    assert table.to_numpy().tolist() == [[-2, 0, 2]]
    assert first_heads.shares(table).to_numpy().tolist() == [[0, 0, 1]]
    before = {("a", 0): first_heads.measures(firsts.run.iloc[0], 799)}
    net = first_heads.net(before, firsts.place)
    assert net.loc[("a", 0), ["layer 1", "first head"]].tolist() == [0, 4]


def test_before_a_head_outgrows_the_healthy_run(runs):
    over, step = first_heads.before_growth(runs["a", 0], runs["a", 1], (1, 2))
    assert step == 799 and over == pytest.approx(3**5.5)


def test_the_last_steps_before_the_onset():
    steps = [(s, layer, 0, sign) for s in (7, 8, 9) for layer, sign in ((1, 1.0), (2, -1.0))]
    table = pd.DataFrame(steps, columns=["step", "layer", "head", "delta_bias"])
    run = SimpleNamespace(name="a", onset=table, explosion=SimpleNamespace(onset=9))
    found = first_heads.single_steps(run)
    assert found.total.tolist() == [2, -2]
    wanted = dict(own=1, others=0, total=2, begin=7)
    assert first_heads.last_steps(found, run, (1, 0)) == wanted


def test_the_single_steps_of_a_campaign_become_one_table(tmp_path, capsys):
    path = tmp_path / "mini"
    shutil.copytree(data_root() / "runs/mini/fa2-seed0", path / "fa2-seed0")
    with pytest.raises(UserError, match="has an onset.parquet"):
        first_heads.main([str(path)])
    run = load_run(path / "fa2-seed0")
    onset = run.explosion.onset
    steps = [(s, 1, h, 2 * h - 0.5 + s) for s in range(-2, 3) for h in range(2)]
    table = pd.DataFrame(steps, columns=["step", "layer", "head", "delta_bias"])
    table = table.assign(step=table.step + onset, delta_abs=1.0, tied_rows=0.0)[list(ONSET)]
    write_table(path / "fa2-seed0/onset.parquet", table)
    first_heads.main([str(path)])
    assert "2 heads of 1 runs" in capsys.readouterr().out
    found = pd.read_parquet(path / "last_steps.parquet")
    assert found.positive.tolist() == [0, 0.5] and found.total.tolist() == [-4, 0]
    assert set(found.begin) == {onset - 2} and set(found.run) == {"fa2-seed0"}
    with pytest.raises(UserError, match="never overwritten"):
        first_heads.main([str(path)])


def test_luck_is_a_sum_over_all_draws():
    assert first_heads.by_luck([True, False], 3) == pytest.approx(1 - (2 / 3) ** 2)


def test_stretches_and_their_likeness(runs):
    table = first_heads.stretches(runs["a", 1], 500)
    assert table.shape == (3, 3) and table.loc[0].tolist() == [-10, 0, 10]
    up, down = pd.Series([1, 2, 3]), pd.Series([3, 2, 1])
    same, other = first_heads.likeness({("a", 0): up, ("b", 0): up * 2, ("b", 1): down})
    assert same.to_dict() == {0: 1} and other == -1
    both = {("a", 0): runs["a", 0], ("b", 0): runs["a", 1]}
    course = first_heads.tendency(both, 500, 2)
    assert list(course) == [0, 500] and course[500][0][0] == pytest.approx(1)


def test_arms_that_share_a_head():
    place = {("a", 0): 1, ("a", 1): 2, ("b", 0): 1, ("c", 1): 0, ("c", 5): 2}
    assert first_heads.shared(place, "a", "b", "c") == {("b", 0): True, ("c", 1): False}


def test_the_heads_that_read_their_error():
    arms = load_arms("layers")
    found = {
        name: first_heads.reading(arms[name].config) for name in ("only1", "head-a", "others-a")
    }
    assert found == {"only1": list(range(6)), "head-a": [2], "others-a": [0, 1, 3, 4, 5]}
    head, times = first_heads.fastest_inside(made_up(h1=(799, 4)))
    assert head == 1 and times == pytest.approx(2)


def test_arms_are_pooled_by_the_rounding_of_the_row_sum():
    arms = load_arms("mini")
    low, fa2 = arms["low"], arms["fa2"]
    found = first_heads.by_row_sum([{"low": low, "fa2": fa2, "fa2_seen": fa2}], [])
    assert len(found[True]) == 8 and len(found[False]) == 7, "one has no take-off by this rule"
    without = first_heads.by_row_sum([{"low": low, "fa2": fa2, "more": arms["dodo"]}], [low])
    assert len(without[True]) == 8 and not np.array_equal(without[True], found[True])


def test_luck_is_scipys():
    p = stats.binomtest(20, 32, 1 / 6, alternative="greater").pvalue
    assert first_heads.by_luck([True] * 20 + [False] * 12) == p


def test_how_often_a_measure_names_the_head_in_recorded_runs():
    arms = load_arms("mini")
    runs = first_heads.exploded({name: arms[name] for name in ("low", "fa2", "dodo", "o_acc")})
    found = first_heads.standing(first_heads.firsts(runs), 100, layer=first_heads.LAYER)
    named = dict.fromkeys(("delta_bias", "delta_abs", "tied_rows", "sigma_q"), 0)
    for run in runs.values():
        first = take_offs(run).iloc[0]
        table = sums(run, first.step - 300, first.step - 100).loc[1]
        norms = run.probes[(run.probes.step == first.step - 100) & (run.probes.layer == 1)]
        table = table.assign(sigma_q=norms.set_index("head").sigma_q)
        for measure in named:
            named[measure] += table[measure].idxmax() == first["head"]
    assert (len(found), *(found == 1).sum()[:4]) == (32, *named.values())
