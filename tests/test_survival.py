"""Time to explosion against published data, scipy, and counts done by hand."""

import shutil
from dataclasses import replace
from itertools import combinations
from math import comb
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from lowprec import UserError, claims
from lowprec.evidence.survival import (
    Arm,
    compare_arms,
    counted,
    exploded_of,
    holm,
    kaplan_meier,
    load_arms,
    onsets,
)
from lowprec.records import files, runs


def arm(name, durations, exploded):
    n = len(durations)
    return pd.DataFrame(
        dict(arm=name, seed=range(n), duration=durations, exploded=np.broadcast_to(exploded, n))
    )


# Remission in weeks (Freireich et al., Blood 21, 1963), the example of most textbooks.
DRUG = arm("6-MP", [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35],
           [True] * 9 + [False] * 12)  # fmt: skip
PLACEBO = arm("placebo", [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23],
              True)  # fmt: skip
FREIREICH = pd.concat([PLACEBO, DRUG])

LOW = arm("low", [2100, 2200, 2300, 2400, 2500, 2600, 2700, 2800], True)
FIXED = arm("fixed", [6500] * 8, False)


def test_kaplan_meier_by_hand():
    """Ties, a censored run in the step of an explosion, and a last run that is censored."""
    runs_ = arm("a", [100, 100, 200, 200, 300, 400], [True, True, True, False, True, False])
    curve = kaplan_meier(runs_).drop(columns=["arm", "low", "high"])
    wanted = pd.DataFrame(
        [
            (0, 1, 6, 0, 0),
            (100, 4 / 6, 6, 2, 0),
            (200, 4 / 6 * 3 / 4, 4, 1, 1),
            (300, 4 / 6 * 3 / 4 * 1 / 2, 2, 1, 0),
            (400, 4 / 6 * 3 / 4 * 1 / 2, 1, 0, 1),
        ],
        columns=["step", "survival", "at_risk", "exploded", "censored"],
    )
    pd.testing.assert_frame_equal(curve, wanted, check_dtype=False, rtol=1e-12)


def test_the_interval_by_hand():
    """One of four exploded: S = 3/4, Greenwood's sum 1 / (4 x 3), and log S = log(3/4)."""
    curve = kaplan_meier(arm("a", [100, 200, 200, 200], [True, False, False, False]))
    spread = 1.959963984540054 * np.sqrt(1 / 12) / -np.log(3 / 4)
    np.testing.assert_allclose(curve.low[1], 0.75 ** np.exp(spread), rtol=1e-9)
    np.testing.assert_allclose(curve.high[1], 0.75 ** np.exp(-spread), rtol=1e-9)


def test_kaplan_meier_is_the_published_curve():
    curve = kaplan_meier(FREIREICH).query("arm == '6-MP' and exploded > 0").set_index("step")
    wanted = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
    assert curve.survival.round(3).to_dict() == wanted
    assert curve.at_risk.to_dict() == {6: 21, 7: 17, 10: 15, 13: 12, 16: 11, 22: 7, 23: 6}


def test_a_curve_has_its_columns_and_no_interval_at_one_and_zero(recwarn):
    curve = kaplan_meier(FREIREICH)
    assert list(curve.columns) == ["arm", "step", "survival", "low", "high", "at_risk", "exploded",
                                   "censored"]  # fmt: skip
    for name, group in FREIREICH.groupby("arm"):
        ours = curve[curve.arm == name]
        assert ours.step.tolist() == [0, *np.unique(group.duration)]
        assert ours.exploded.sum() + ours.censored.sum() == len(group)
    inside = (curve.survival > 0) & (curve.survival < 1)
    assert inside.sum() == len(curve) - 3, "both curves start at one, and one ends at zero"
    within = curve[inside]
    assert ((0 < within.low) & (within.low < within.survival)).all()
    assert ((within.survival < within.high) & (within.high < 1)).all()
    assert curve.loc[~inside, ["low", "high"]].isna().all(axis=None)
    assert not recwarn.list


def test_logrank_is_the_published_one():
    row = compare_arms(FREIREICH, "placebo", test="logrank").iloc[1]
    assert scipy.stats.chi2.isf(row.p, 1) == pytest.approx(16.79, abs=0.005)


def test_logrank_by_hand():
    """At each explosion: those expected in the base, and the hypergeometric variance."""
    base, other = arm("low", [1, 2, 4], True), arm("b", [3, 5, 6], [True, True, False])
    expected = 3 / 6 + 2 / 5 + 1 / 4 + 1 / 3
    variance = 3 * 3 / 6**2 + 2 * 3 / 5**2 + 1 * 3 / 4**2 + 1 * 2 / 3**2
    row = compare_arms(pd.concat([base, other]), "low", test="logrank").iloc[1]
    assert scipy.stats.chi2.isf(row.p, 1) == pytest.approx((3 - expected) ** 2 / variance, rel=1e-9)


@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("censored", [[], [2, 6], [5, 6, 7], [2, 3]])
def test_the_permutation_test_is_the_count_over_all_arrangements(censored, size):
    """Of scipy's log-rank statistic, for all ways to deal eight runs to two arms."""
    ends, exploded = np.array([1, 2, 4, 3, 5, 5, 6, 7]), ~np.isin(np.arange(8), censored)

    def statistic(first):
        sides = (np.isin(np.arange(8), first), ~np.isin(np.arange(8), first))
        times = (scipy.stats.CensoredData.right_censored(ends[i], ~exploded[i]) for i in sides)
        return abs(scipy.stats.logrank(*times).statistic)

    every = np.array([statistic(first) for first in combinations(range(8), size)])
    low, b = (
        arm(x, ends[i], exploded[i]) for x, i in (("low", range(size)), ("b", range(size, 8)))
    )
    p = (every >= statistic(range(size)) - 1e-9).mean()
    for base, other in ((low, b), (b, low)):
        found = compare_arms(pd.concat([base, other]), base.arm.iloc[0], test="permutation")
        assert found.iloc[1].p == pytest.approx(p)


def test_of_many_ways_to_deal_the_same_20_000_are_drawn_again():
    table = pd.concat([arm("low", range(10), True), arm("b", range(2, 22, 2), True)])
    p, again = (compare_arms(table, "low", test="permutation").p[1] for _ in range(2))
    assert p == again and p * 20_001 == pytest.approx(round(p * 20_001), abs=1e-6)


def test_medians():
    table = compare_arms(FREIREICH, "placebo").set_index("arm")
    assert table["median"].to_dict() == {"placebo": 8, "6-MP": 23}
    assert table.time.to_dict() == {"placebo": "8 [4, 11]", "6-MP": "23 [13, not reached]"}
    assert compare_arms(pd.concat([LOW, FIXED]), "low").time[1] == "not reached"


@pytest.mark.parametrize("n", [*range(1, 13), 24, 38])
def test_the_median_is_the_first_step_with_half_of_the_runs_gone(n):
    """Also where a product of fractions comes out a little above one half."""
    every = arm("low", np.arange(1, n + 1), True)
    but_one = every.assign(arm="b", exploded=every.seed < n - 1)
    table = compare_arms(pd.concat([every, but_one]), "low")
    half = (n + 1) // 2
    assert table["median"][0] == half
    assert table["median"][1] == (half if n > 1 else np.inf)


def test_few_seeds_do_not_bound_the_median():
    """All of three can explode before the median with probability 1/8, of one with 1/2."""
    for n in (1, 3):
        row = compare_arms(pd.concat([LOW[:n], FIXED]), "low").iloc[0]
        assert row.low == 2100 and row.high == np.inf and row.time.endswith("not reached]")


def test_fisher_is_the_count_over_all_splits():
    """All ways to deal 8 explosions to 16 runs; those as unlikely as what was seen."""
    table = compare_arms(pd.concat([LOW, FIXED]), "low")
    ways = [sum(i < 8 for i in chosen) for chosen in combinations(range(16), 8)]
    assert len(ways) == comb(16, 8)
    assert table.p[1] == pytest.approx(sum(k in (0, 8) for k in ways) / len(ways), rel=1e-9)
    assert table.horizon[1] == 6500 and table.n.tolist() == [8, 8]
    assert table.exploded.tolist() == [8, 0] and np.isnan(table.p[0])


def test_no_explosion_counts_in_a_step_that_one_arm_did_not_make():
    base, other = LOW.assign(duration=6500), FIXED.assign(duration=6500)  # which has no step 6,500
    row = compare_arms(pd.concat([base, other]), "low").iloc[1]
    assert (row.horizon, row.p, row.verdict) == (6500, 1.0, "not seen in 8")
    row = compare_arms(pd.concat([base, other.assign(duration=6501)]), "low").iloc[1]
    assert row.verdict == "prevents"


def test_prevents_needs_eight_seeds_and_a_base_that_explodes():
    def verdict(base, other):
        return compare_arms(pd.concat([base, other]), "low").verdict[1]

    spared = LOW.assign(exploded=LOW.seed > 0, duration=np.where(LOW.seed > 0, LOW.duration, 6500))
    half = LOW.assign(exploded=LOW.seed > 3, duration=np.where(LOW.seed > 3, LOW.duration, 6500))
    assert verdict(LOW, FIXED) == verdict(spared, FIXED) == "prevents"
    assert verdict(half, FIXED) == "not seen in 8"
    assert verdict(LOW, FIXED[:7]) == "not seen in 7"
    assert verdict(LOW[:7], FIXED) == "not seen in 8"
    one = FIXED.assign(exploded=FIXED.seed == 3)
    assert verdict(LOW, one) == "seen in 1 of 8"


def test_prevents_needs_a_p_that_bears_the_number_of_arms():
    """7 of 8 against none has p = 0.0014: enough for one arm, not for 40."""
    base = LOW.assign(exploded=LOW.seed > 0, duration=np.where(LOW.seed > 0, LOW.duration, 6500))
    many = pd.concat([base, *(FIXED.assign(arm=f"a{i}") for i in range(40))])
    assert compare_arms(many, "low", ["a0"]).verdict[1] == "prevents"
    assert set(compare_arms(many, "low").verdict[1:]) == {"not seen in 8"}


def test_an_arm_that_was_not_followed_long_enough_prevents_nothing():
    short = FIXED.assign(duration=[1000] + [6500] * 7)
    row = compare_arms(pd.concat([LOW, short]), "low").iloc[1]
    assert (row.horizon, row.p, row.verdict) == (1000, 1.0, "not seen in 8")
    late = FIXED.assign(duration=2750)
    row = compare_arms(pd.concat([LOW, late]), "low").iloc[1]
    assert row.p == pytest.approx(scipy.stats.fisher_exact([[7, 1], [0, 8]]).pvalue)
    assert row.verdict == "prevents", "7 of 8 had exploded by then"
    early = FIXED.assign(duration=2650)
    row = compare_arms(pd.concat([LOW, early]), "low").iloc[1]
    assert row.p_holm == pytest.approx(scipy.stats.fisher_exact([[6, 2], [0, 8]]).pvalue)
    assert row.p_holm < 0.05
    assert row.verdict == "not seen in 8", "only 6 of 8 had, the others later"
    for last, verdict in ((2700, "not seen in 8"), (2701, "prevents")):
        row = compare_arms(pd.concat([LOW, FIXED.assign(duration=last)]), "low").iloc[1]
        assert row.verdict == verdict, "the seventh exploded in step 2,700"


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.6, 0.7]), [1.0, 1.0])
    assert holm([0.02]) == [0.02]


def test_the_arms_named_are_what_is_corrected_for():
    others = [FIXED.assign(arm=name) for name in ("a", "b", "c")]
    table = pd.concat([LOW, *others])
    every, one = compare_arms(table, "low"), compare_arms(table, "low", ["b"])
    assert list(every.arm) == ["low", "a", "b", "c"] and list(one.arm) == ["low", "b"]
    np.testing.assert_allclose(every.p_holm[1:], 3 * every.p[1:])
    assert one.p_holm[1] == one.p[1]


def test_runs_too_short_to_confirm_a_rise_have_no_p():
    short = pd.concat([arm("low", [60] * 4, False), arm("fixed", [60] * 4, False)])
    done = SimpleNamespace(explosion=None, info=dict(ended="completed"))
    for test in ("fisher", "logrank", "permutation"):
        assert compare_arms(short, "low", test=test).p[1] == 1

        def told_of(duration, test=test):
            table = short.assign(run=done, duration=duration)
            return compare_arms(table, "low", test=test)

        told = told_of(60)
        assert np.isnan(told.p[1]) and np.isnan(told.p_holm[1])
        assert told.verdict[1] == "not known of any"
        base = told_of(short.duration.where(short.arm == "low", 7000))
        assert np.isnan(base.p[1]) and base.verdict[1] == "not seen in 4"


def test_what_a_campaign_has_not_is_one_sentence():
    arms = load_arms("mini")
    with pytest.raises(UserError, match="campaign 'mini' has no arm nope; it has .*fa2"):
        arms["nope"]
    with pytest.raises(UserError, match="arm fa2 has no recorded run of seed 99; it has 0, 1"):
        arms["fa2"].by_seed[99]
    with pytest.raises(UserError, match="there is no campaign explosionn: did you mean explosion"):
        load_arms("explosionn")


def test_explosions_in_the_last_step_of_the_other_arm_are_among_the_times():
    both = pd.concat([LOW.assign(duration=6500), FIXED.assign(duration=6500)])
    assert compare_arms(both, "low", test="logrank").p[1] < 0.001


def test_a_run_that_ends_in_a_rise_does_not_count_for_prevents():
    def run(rise):
        return SimpleNamespace(explosion=rise or None, info=dict(ended="completed"))

    def verdict(rising):
        ends = [6900] * rising + [7000] * (8 - rising)
        runs_ = pd.concat([LOW, arm("fixed", ends, False)])
        runs_["run"] = [run(i in range(8, 8 + rising)) for i in range(16)]
        return compare_arms(runs_, "low").verdict[1]

    said = ["prevents", "not seen in 7", "not seen in 1", "not known of any"]
    assert [verdict(k) for k in (0, 1, 7, 8)] == said


def test_when_nothing_or_everything_explodes():
    never = pd.concat([FIXED.assign(arm="low"), FIXED])
    always = pd.concat([LOW, LOW.assign(arm="other")])
    for test in ("fisher", "logrank", "permutation"):
        assert compare_arms(never, "low", test=test).p[1] == 1.0
        assert compare_arms(always, "low", test=test).p[1] == pytest.approx(1.0)
        early = arm("low", [500] * 15 + [900] * 7, [True] * 15 + [False] * 7)
        unseen = pd.concat([early, arm("other", [100] * 8, False)])
        assert compare_arms(unseen, "low", test=test).p[1] == 1.0
        at_once = pd.concat([arm(name, [7] * 3, True) for name in ("low", "other")])
        assert compare_arms(at_once, "low", test=test).p[1] == 1.0
    assert compare_arms(at_once, "low").horizon[1] == 8
    single = compare_arms(pd.concat([LOW[:1], FIXED[:1]]), "low")
    assert single.p[1] == 1.0 and single.verdict[1] == "not seen in 1"
    assert kaplan_meier(arm("low", [0, 5], [True, False])).survival.tolist()[-1] == 0.5


def test_the_recorded_campaign():
    table = runs.load_runs("explosion")
    done = compare_arms(table, "low", ["o_fp32", "fa2"]).set_index("arm")
    assert done.n.to_dict() == {"low": 3, "o_fp32": 3, "fa2": 2}
    assert not done.verdict.str.contains("prevents").any(), "three seeds are too few"
    curve = kaplan_meier(table)
    assert set(curve.arm) == {"low", "o_fp32", "fa2"} and (curve.survival <= 1).all()


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda t: compare_arms(t, "lwo"), "no arm 'lwo'; take one of low, fixed"),
        (lambda t: compare_arms(t, "low", ["low"]), "other arm than the base"),
        (lambda t: compare_arms(t, "low", []), "at least one other"),
        (lambda t: compare_arms(t, "low", ["fixed", "fixed"]), "each once"),
        (lambda t: compare_arms(t, "low", test="t"), "fisher, logrank or permutation"),
        (lambda t: compare_arms(pd.concat([t, t]), "low"), "seed 0 twice"),
        (lambda t: kaplan_meier(t.drop(columns="duration")), "no column duration"),
    ],
)
def test_mistakes(call, says):
    with pytest.raises(UserError, match=says):
        call(pd.concat([LOW, FIXED]))


def test_unfinished_runs_are_not_in_the_table(tmp_path):
    import shutil

    source = files.data_root() / "runs" / "explosion" / "low-seed1"
    shutil.copytree(source, tmp_path / "low-seed1")
    shutil.copytree(source, tmp_path / ".low-seed2.part")
    assert list(runs.load_runs(tmp_path).name) == ["low-seed1"]


PLAN = """
question: q
predictions: [p]
preset: mini
train: {lr: 4.0e-3, warmup: 1000, steps: 7000}
arms:
  low: {policy: LOW, seeds: [0, 1]}
  fa2: {policy: FA2, tile: 128, seeds: [1]}
"""


def test_arms_know_what_was_planned_and_what_is_recorded(tmp_path):
    (tmp_path / "campaign.yaml").write_text(PLAN)
    arms = load_arms(tmp_path)
    assert {name: (a.seeds, a.n, a.exploded, a.complete) for name, a in arms.items()} == {
        "low": ((0, 1), 0, 0, False), "fa2": ((1,), 0, 0, False)
    }  # fmt: skip
    assert (arms["fa2"].config.policy, arms["fa2"].config.tile) == ("FA2", 128)
    assert arms["fa2"].by_seed == {}
    other = pd.DataFrame(dict(seed=[1, 2], exploded=False, duration=9))
    assert not Arm("low", None, (0, 1), other).complete, "as many, but not those"
    assert Arm("low", None, (1,), other).complete, "and one more"

    mini = files.data_root() / "runs" / "mini"
    for seed, complete in ((0, False), (1, True)):
        shutil.copytree(mini / f"low-seed{seed}", tmp_path / f"low-seed{seed}")
        arms = load_arms(tmp_path)
        low = arms["low"]
        assert (low.n, low.exploded, low.complete) == (seed + 1, seed + 1, complete)
        assert low.by_seed[seed].name == f"low-seed{seed}"
        assert not arms["fa2"].complete
        assert exploded_of(low) == f"{seed + 1} of {seed + 1}" == exploded_of(*arms.values())
    with pytest.raises(UserError, match="there is no campaign nowhere: give a"):
        load_arms("nowhere")


def test_an_arm_knows_the_onsets_of_the_runs_that_have_one():
    arms = load_arms("positions", ["nope-fix", "fix"])
    assert arms["nope-fix"].onsets == {2: 4014, 4: 5140, 5: 2477} and arms["fix"].onsets == {}
    assert Arm("none", None, (1,), None).onsets == {}


def test_an_arm_is_joined_by_that_of_another_campaign():
    one, more = (load_arms(name)["only1"] for name in ("layers", "layers_again"))
    both = one.joined(more)
    assert both.seeds == (0, 1, 2, 4) == tuple(both.by_seed) and (both.n, both.exploded) == (4, 4)
    assert (one.n, one.seeds, both.config) == (2, (1, 4), one.config)
    empty = Arm(one.name, one.config, one.seeds, None)
    assert one.joined(empty).n == 2 and empty.joined(empty).runs is None


def test_a_campaign_is_named_or_its_folder_is(tmp_path, monkeypatch):
    """By `load_runs` and `load_arms` alike."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "campaign.yaml").write_text(PLAN)
    source = files.data_root() / "runs" / "mini" / "low-seed0"
    shutil.copytree(source, tmp_path / "mine" / "low-seed0")
    monkeypatch.chdir(tmp_path)
    for campaign in ("mine", "./mine", str(tmp_path / "mine"), tmp_path / "mine"):
        assert load_arms(campaign)["low"].n == len(runs.load_runs(campaign)) == 1, campaign
    assert load_arms("data/runs/mini").keys() == load_arms("mini").keys()


@pytest.mark.parametrize("load", [load_arms, runs.load_runs])
def test_a_campaign_without_an_arm_that_a_page_needs(load):
    load("remedies", ("fa2_dp",))
    with pytest.raises(UserError, match="'remedies' has no arm low, fa2; it has .*fa2_dp"):
        load("remedies", ("low", "fa2_dp", "fa2"))


def test_a_run_that_ends_in_a_rise_counts_neither_way():
    """Before its onset it did not explode; later it is not known."""
    table = runs.load_runs("remedies")
    table = table[table.arm == "low_centred"]
    (rise,) = [run.explosion for run in table.run if run.explosion]
    assert not rise.confirmed and not table.exploded.any()
    assert counted(table) == counted(table, rise.onset) == (0, len(table) - 1)
    assert counted(table, rise.onset - 1) == (0, len(table))
    centred = load_arms("remedies")["low_centred"]
    known = centred.outcomes()
    assert len(known) == len(table) - 1 and not known.any() and rise.onset > 1
    assert set(centred.outcomes(rise.onset - 1).index) == set(table.seed) > set(known.index)
    assert load_arms("mini")["low"].outcomes().to_dict() == dict.fromkeys(range(8), True)
    assert centred.rising == 1 and centred.exploded == 0
    assert list(centred.onsets.values()) == [rise.onset]
    both = centred, load_arms("mini")["low"]
    assert exploded_of(*both) == f"8 of {7 + centred.n}" and exploded_of() == "0 of 0"
    assert Arm("-", centred.config, (0,), None).rising == 0
    low = runs.load_runs("mini")
    assert counted(low[low.arm == "low"]) == (8, 8)


def test_a_run_too_short_to_confirm_a_rise_counts_neither_way():
    run = SimpleNamespace(explosion=None, info=dict(ended="completed"))
    for steps, known in ((500, 0), (501, 8)):
        mine = Arm("a", None, tuple(range(8)), arm("a", [steps] * 8, False).assign(run=run))
        assert (len(mine.outcomes()), counted(mine.runs)) == (known, (0, known))
        claim = dict(sentence="-", rule="count of seeds that explode == 0", needs=8)
        verdict = claims.judge(claim, mine).verdict
        assert verdict == ("supported" if known else "inconclusive")


def test_a_run_that_ended_before_its_steps_counts_neither_way():
    for ended, known in (("completed", 8), ("50 steps skipped, step 999", 0)):
        run = SimpleNamespace(explosion=None, info=dict(ended=ended))
        assert counted(arm("a", [1000] * 8, False).assign(run=run)) == (0, known)


def test_what_lies_beyond_the_end_of_a_run_is_not_known():
    low = load_arms("mini")["low"]  # all of these explode
    healthy = load_arms("mini")["o_fp32"]
    steps = int(healthy.runs.duration.max())
    assert not healthy.outcomes(steps).empty and healthy.outcomes(steps + 1).empty
    assert counted(healthy.runs, steps + 1) == (0, 0)
    assert len(low.outcomes(steps + 1)) == low.n and not low.outcomes(1000).any()
    assert low.only(iter(low.seeds[:3])).seeds == low.seeds[:3]


def test_an_arm_is_judged_once_the_seeds_to_come_cannot_change_it(monkeypatch):
    rules = {"most": ">= 3", "none": "== 0", "two": "== 2", "few": "<= 1"}

    def claim(id, needs=4):
        rule = f"count of runs that exploded {rules[id]}"
        return claims.parse(dict(id=id, sentence="-", rule=rule, needs=needs))

    registry = {id: claim(id) for id in rules}
    monkeypatch.setattr(claims, "load", lambda folder=None: registry)

    def verdicts(*exploded, by=np.inf):
        table = pd.DataFrame({"seed": range(len(exploded)), "exploded": exploded, "duration": 700})
        table["run"] = SimpleNamespace(explosion=None, info=dict(ended="completed"))
        arm = Arm("a", None, (0, 1, 2, 3), table if len(table) else None)
        given = arm if by == np.inf else arm.outcomes(by)
        return [result.verdict for result in claims.check(**dict.fromkeys(rules, given))]

    yes, no, open_ = "supported", "refuted", "inconclusive"
    assert verdicts() == ["not run"] * 4
    assert verdicts(True) == [open_, no, open_, open_]
    assert verdicts(True, True) == [open_, no, open_, no]
    assert verdicts(False, False) == [no, open_, open_, open_]
    assert verdicts(False, False, False) == [no, open_, no, yes]
    assert verdicts(True, True, True) == [yes, no, no, no]
    assert verdicts(True, True, False, False) == [no, no, yes, no]
    assert verdicts(True, True, False, False, by=700) == [no, no, yes, no]
    assert verdicts(True, True, False, False, by=699) == [no, yes, no, yes]
    registry["none"] = claim("none", needs=8)
    assert verdicts(False, False, False, False)[1] == open_  # all that are planned are too few


def test_onsets_by_seed_in_words():
    arms = load_arms("positions", ["nope-fix", "fix"])
    table = onsets(
        {
            "mean key": arms["nope-fix"],
            "with positions": replace(arms["fix"].only([2]), seeds=(2, 3)),
        },
        "to come",
    )
    assert list(table) == ["onset", "seed 2", "seed 3", "seed 4", "seed 5"]
    assert list(table.loc[0]) == ["mean key", "4,014", "none by 7,000", "5,140", "2,477"]
    assert list(table.loc[1]) == ["with positions", "none by 7,000", "to come", "", ""]


def test_an_explosion_at_a_step_counts_as_one_by_that_step():
    low = Arm("low", None, tuple(range(8)), LOW)
    assert [low.exploded_by(step) for step in (2099, 2100, 2800)] == [0, 1, 8]


def test_a_seed_that_two_joined_arms_have_is_named():
    one = load_arms("layers")["only1"]
    with pytest.raises(UserError, match="only1 and only1 both have seed 1"):
        one.joined(one)


def test_a_run_that_ends_in_a_rise_is_known_until_the_step_before():
    def runs_of(arm, ends, exploded):
        found = [SimpleNamespace(explosion=rise, info=dict(ended="completed")) for _, rise in ends]
        return pd.DataFrame(dict(
            arm=arm, seed=range(len(ends)), run=found, duration=[step for step, _ in ends],
            exploded=exploded,
        ))  # fmt: skip

    base = runs_of("low", [(2700, True)] * 8, True)
    other = runs_of("x", [(2700, True)] + [(7000, None)] * 8, False)
    row = compare_arms(pd.concat([base, other]), "low").iloc[1]
    assert row.horizon == 2700 and row.p == 1
