"""Verdicts follow from the rule, and nothing the book says about them can go stale unseen."""

import ast
import json
import math
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lowprec import UserError, claims
from lowprec.__main__ import main
from lowprec.evidence import locks, registration, registry
from lowprec.evidence.words import CLAIM_MIME
from lowprec.publish import notebook, pages, statements
from lowprec.publish.notebook import as_page

ROOT = Path(__file__).resolve().parent.parent
ENTRY = dict(
    id="bias", sentence="The bias is negative.", source="qiu2025", tests="biased",
    gloss="Take care.", rule="mean error in ulp < 0.0", needs="8 sums", registered="0123abcd",
    refuted_if="the mean error is 0 or positive",
)  # fmt: skip
EXPLODES = dict(
    id="low-explodes", sentence="`LOW` explodes.", rule="count of seeds that explode >= 3", needs=4
)


@pytest.fixture
def folder(tmp_path):
    """Writes the claims of a_bias, and of other pages by name; returns the notebooks' folder."""

    def write(*entries, **others):
        notebooks = tmp_path / "notebooks"
        notebooks.mkdir(exist_ok=True)
        for page, some in {"a_bias": entries, **others}.items():
            (notebooks / page).parent.mkdir(exist_ok=True)
            (notebooks / f"{page}.claims.yml").write_text(yaml.safe_dump(list(some)))
            titled = new_notebook(cells=[new_markdown_cell("# Bias")])
            nbformat.write(titled, notebooks / f"{page}.ipynb")
        return notebooks

    return write


@pytest.mark.parametrize(
    "value, n, interval, verdict",
    [
        (-0.2, 8, None, "supported"),
        (0.2, 8, None, "refuted"),
        (0.0, 8, None, "refuted"),
        (-0.2, 7, None, "inconclusive"),
        (0.2, 7, None, "inconclusive"),
        (-0.2, 8, (-0.3, -0.1), "supported"),
        (-0.2, 8, (-0.5, 0.1), "inconclusive"),
        (0.2, 8, (-0.1, 0.5), "inconclusive"),
        (-0.2, 8, (-0.4, 0.0), "supported"),
    ],
)
def test_rule(value, n, interval, verdict):
    assert claims.parse(ENTRY).verdict_on(value, n, interval) == verdict


def test_an_interval_that_holds_either_end_of_a_range_decides_nothing():
    claim = claims.parse({**ENTRY, "rule": "mean error in ulp in [0.1, 0.2]"})
    wide, low, high, inside = (0.0, 0.3), (0.05, 0.15), (0.15, 0.25), (0.12, 0.18)
    verdicts = [claim.verdict_on(0.15, 8, interval) for interval in (wide, low, high, inside)]
    assert verdicts == ["inconclusive"] * 3 + ["supported"]


# What a page hands to check


def judged(folder, entry, given):
    """The one result of a claim that a page checks by its name."""
    name = entry["id"].replace("-", "_")
    (result,) = claims.check(folder=folder(entry), **{name: given})
    return result


SEEDS = {0: True, 1: True, 2: False, 3: True}


@pytest.mark.parametrize("kind", [dict, pd.Series])
def test_units_give_value_n_and_the_list(folder, kind):
    result = judged(folder, EXPLODES, kind(SEEDS))
    assert (result.verdict, result.value, result.n, result.count) == ("supported", 3, 4, "3 of 4")
    assert result.by == {"0": True, "1": True, "2": False, "3": True}
    assert "Measured: seeds that explode: 3 of 4" in result.markdown()
    assert "No: 2." in result.markdown()
    share = {**EXPLODES, "rule": "share of seeds that explode == 1"}
    result = judged(folder, share, kind(SEEDS))
    assert (result.verdict, result.value, result.count) == ("refuted", 0.75, "3 of 4")
    many = judged(folder, share, kind({seed: seed < 29 for seed in range(100)}))
    assert many.count == "29 of 100", "though 100 × 0.29 is a little less in float64"
    few = judged(folder, EXPLODES, kind({0: True, 1: True}))
    assert few.measured() == "seeds that explode: 2 of 2, 4 needed"
    most = {**EXPLODES, "rule": "max over captures of |error| <= 0.25", "needs": 2}
    result = judged(folder, most, kind({"a": 0.125, "b": 0.5}))
    assert (result.verdict, result.value, result.n) == ("refuted", 0.5, 2)
    assert "n = 2 captures" in result.measured() and "a: 0.125, b: 0.5" in result.markdown()
    with pytest.raises(UserError, match="low-explodes has no count"):
        print(result.count)


def test_what_a_page_checks_it_shows_once(folder, capsys):
    notebooks = folder(EXPLODES, {**ENTRY, "needs": 1})
    results = claims.check(folder=notebooks, low_explodes=SEEDS, bias=-1.0)
    assert [result.claim.id for result in results] == ["low-explodes", "bias"]
    assert capsys.readouterr().out.count("supported: ") == 2
    assert results._ipython_display_() is None, "nor again as the last value of a cell"


@pytest.mark.parametrize(
    "rule, units, verdict",
    [("count of seeds that explode >= 3", "111", "supported"),
     ("count of seeds that explode >= 3", "110", "inconclusive"),
     ("count of seeds that explode >= 3", "00", "refuted"),
     ("count of seeds that explode == 0", "1", "refuted"),
     ("count of seeds that explode == 0", "000", "inconclusive"),
     ("share of seeds that explode == 1", "10", "refuted"),
     ("share of seeds that explode == 1", "111", "inconclusive"),
     ("share of seeds that explode <= 0.5", "111", "refuted"),
     ("share of seeds that explode >= 0.5", "11", "supported")],
)  # fmt: skip
def test_a_count_is_judged_once_the_units_to_come_cannot_change_it(folder, rule, units, verdict):
    by = {seed: mark == "1" for seed, mark in enumerate(units)}
    assert judged(folder, {**EXPLODES, "rule": rule}, by).verdict == verdict


def arm(outcomes, complete=True):
    return SimpleNamespace(outcomes=lambda: pd.Series(outcomes, dtype=bool), complete=complete)


def test_an_arm_gives_the_seeds_that_explode(folder):
    result = judged(folder, EXPLODES, arm({0: True, 4: True, 5: True, 6: True}))
    assert (result.verdict, result.count, list(result.by)) == ("supported", "4 of 4", list("0456"))
    assert judged(folder, EXPLODES, arm({}, complete=False)).verdict == "not run"
    assert judged(folder, EXPLODES, arm({})).verdict == "inconclusive"
    assert judged(folder, {**EXPLODES, "rule": "count of runs of `LOW` that explode >= 3"},
                  arm({0: True})).verdict == "inconclusive"  # fmt: skip


def test_a_number_that_the_page_made_brings_its_n(folder):
    given = claims.Measured(-0.25, 8, interval=(-0.5, -0.1), by={("a", 1): -0.2, ("a", 2): -0.3})
    result = judged(folder, ENTRY, given)
    assert (result.verdict, result.value, result.n, result.text) == (
        "supported", -0.25, 8, "−0.25 [−0.5, −0.1]",
    )  # fmt: skip
    assert result.by == {"a, 1": -0.2, "a, 2": -0.3}
    assert judged(folder, EXPLODES, claims.Measured(3, 4)).count == "3 of 4"
    assert judged(folder, {**ENTRY, "needs": 1}, -0.25).verdict == "supported"
    assert judged(folder, ENTRY, None).verdict == "not run"
    assert judged(folder, EXPLODES, {}).verdict == "inconclusive", "there is nothing to measure"


def test_a_long_list_of_units_is_not_kept(folder):
    result = judged(folder, EXPLODES, dict.fromkeys(range(claims.LISTED + 1), True))
    assert result.n == claims.LISTED + 1 and result.by is None


@pytest.mark.parametrize(
    "rule, given, sentence",
    [
        ("max over captures of error < 1", arm({0: True}), "claim low-explodes: its rule takes a "
         "number and was given an arm"),
        ("count of captures that tie == 0", arm({0: True}), "claim low-explodes: its rule counts "
         "captures and was given an arm, which has seeds: say runs or seeds in the rule"),
        ("count of seeds that explode == 0", 3, "claim low-explodes: its rule, count over seeds, "
         "takes a number for each and was given 3"),
        ("error < 1", 0.5, "claim low-explodes: it needs 4 units: say how many stand behind 0.5"),
        ("error < 1", {0: 0.5}, "claim low-explodes: its rule takes one number and was given 1"),
        ("count of seeds that explode == 0", pd.Series([True, False], [7, 7]),
         "claim low-explodes: 7 is given twice: a unit counts once"),
        ("max over seeds of error < 1", pd.DataFrame({"a": [1]}),
         "claim low-explodes: it takes one number for each unit and was given a table"),
        ("max over seeds of error < 1", {3: True}, "claim low-explodes: its rule, max over seeds"),
        *((rule, given, f"claim low-explodes: it was given a {kind}: hand check one number, or a "
           "dictionary or a Series with one for each unit, as in check(low_explodes={'a': 0.25, ")
          for rule in ("max over seeds of error < 1", "max of seeds of error < 1")
          for given, kind in (([0.25, 0.5], "list"), (np.ones(2), "ndarray"))),
    ],
)  # fmt: skip
def test_what_does_not_fit_its_rule_is_named(folder, rule, given, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        judged(folder, {**EXPLODES, "rule": rule}, given)


def test_several_numbers_are_not_one(folder):
    for given in ([-1.0, -2.0], {"a": -1.0}, "-1"):
        with pytest.raises(UserError, match="claim bias: it was given a .*, as in check.bias="):
            claims.check("bias", given, 8, folder=folder(ENTRY))
    (result,) = claims.check(bias=np.array(-0.5), folder=folder({**ENTRY, "needs": 1}))
    assert (result.value, result.verdict) == (-0.5, "supported")


def test_an_unknown_claim_is_named(folder):
    notebooks = folder(ENTRY)
    with pytest.raises(UserError, match="there is no claim 'bais': did you mean 'bias'?"):
        claims.check("bais", 1, 8, folder=notebooks)
    with pytest.raises(UserError, match="there is no claim 'bi-as': did you mean 'bias'?"):
        claims.check(folder=notebooks, bi_as=1)


# One claim by its number


def test_without_an_observation_a_claim_is_not_run(folder):
    result = claims.check("bias", math.nan, 0, folder=folder(ENTRY))
    assert (result.verdict, result.value) == ("not run", None)
    assert "not recorded yet" in result.markdown()


def test_without_n_a_value_speaks_for_itself_or_is_asked_for_n(folder):
    notebooks = folder(
        ENTRY, *({**ENTRY, "id": x, "needs": n} for x, n in (("one", 1), ("two", 2)))
    )
    assert claims.check("one", -0.5, folder=notebooks).verdict == "supported"
    with pytest.raises(UserError, match="claim two: it needs 2 units: say how many"):
        claims.check("two", -0.5, folder=notebooks)
    assert claims.check("bias", claims.Measured(-0.5, 8), folder=notebooks).verdict == "supported"
    with pytest.raises(UserError, match="claim bias: it needs 8 sums: say how many"):
        claims.check("bias", -0.5, folder=notebooks)
    for n in (-1, 2.5, "8"):
        with pytest.raises(UserError, match="claim bias: n=.* must be a whole number of units"):
            claims.check("bias", -0.5, n, folder=notebooks)
    with pytest.raises(UserError, match="claim bias: interval, complete and settled take n"):
        claims.check("bias", -0.5, interval=(-1, 0), folder=notebooks)


@pytest.mark.parametrize("n, words", [(0, "not recorded yet"), (5, "not yet, 5 of 8 recorded")])
def test_a_claim_whose_runs_are_to_come_has_no_verdict(folder, n, words):
    result = claims.check("bias", None, n, folder=folder(ENTRY))
    assert (result.verdict, result.value) == ("not run", None)
    assert words in result.markdown()
    assert claims.Result.from_dict(result.as_dict()) == result


def test_with_all_recorded_and_nothing_to_measure_a_claim_is_inconclusive(folder):
    notebooks = folder(ENTRY)
    for value in (None, math.nan):
        result = claims.check("bias", value, 0, folder=notebooks, complete=True)
        assert (result.verdict, result.value) == ("inconclusive", None)
        assert "nothing to measure once all is recorded, n = 0 sums, 8 needed" in result.markdown()
        assert claims.Result.from_dict(result.as_dict()) == result
    assert claims.check("bias", -1, 8, folder=notebooks, complete=True).verdict == "supported"


def test_what_nothing_can_change_is_judged_early(folder):
    notebooks = folder(ENTRY)
    assert claims.check("bias", 1, 2, folder=notebooks).verdict == "inconclusive"
    early = claims.check("bias", 1, 2, folder=notebooks, settled=True)
    assert early.verdict == "refuted" and "n = 2 sums, 8 asked for" in early.measured()


@pytest.mark.parametrize(
    "rule, count, n, is_settled",
    [("runs >= 3", 3, 3, True), ("runs >= 3", 2, 3, False), ("runs >= 3", 0, 2, True),
     ("runs >= 3", 0, 0, False), ("runs == 0", 0, 3, False), ("runs == 0", 1, 1, True),
     ("runs == 4", 3, 4, True)],
)  # fmt: skip
def test_a_count_is_settled_if_what_is_missing_cannot_change_it(folder, rule, count, n, is_settled):
    notebooks = folder({**ENTRY, "rule": rule, "needs": 4})
    assert claims.load(notebooks)["bias"].settled(count, n) == is_settled


@pytest.mark.parametrize("rule, value", [
    ("count of seeds that explode <= 9", 5), ("share of seeds that explode <= 1", 1.5),
    ("share of seeds that explode <= 1", -0.5),
])  # fmt: skip
def test_no_more_can_be_counted_than_there_are(rule, value):
    claim = claims.parse({**ENTRY, "rule": rule, "needs": 4})
    with pytest.raises(UserError, match=f"{value} of 4 seeds: it counts up to"):
        claim.verdict_on(value, 4)


@pytest.mark.parametrize("rule, n, wanted", [
    ("== 0.5", 4, "inconclusive"), ("!= 0.5", 4, "inconclusive"), ("<= 0.9", 4, "supported"),
    ("> 0.9", 4, "refuted"), ("> 0.5", 4, "inconclusive"),
])  # fmt: skip
def test_a_share_is_settled_if_that_so_far_has_the_same_verdict(folder, rule, n, wanted):
    notebooks = folder({**ENTRY, "rule": f"share of runs that explode {rule}", "needs": 5})
    (result,) = claims.check(bias={i: i < 2 for i in range(n)}, folder=notebooks)
    assert result.verdict == wanted


def test_a_refuted_claim_is_a_result(folder):
    result = claims.check("bias", 1, 8, folder=folder(ENTRY))
    assert result.verdict == "refuted"
    assert result.markdown().startswith("**Refuted.** The bias is negative.")


def test_what_was_not_measured_has_no_verdict(folder):
    notebooks = folder(ENTRY)
    with pytest.raises(UserError, match="claim bias: the measured mean error in ulp is nan"):
        claims.check("bias", math.nan, 8, folder=notebooks)
    with pytest.raises(UserError, match="claim bias: the measured mean error in ulp is inf"):
        claims.check("bias", math.inf, 8, folder=notebooks)
    with pytest.raises(UserError, match="claim bias: the interval of mean error in ulp is .*nan"):
        claims.check("bias", 0.5, 8, (0.1, math.nan), folder=notebooks)
    with pytest.raises(UserError, match="claim bias: the interval .*; it does not hold the va"):
        claims.check("bias", -1, 8, (0.5, -2), folder=notebooks)
    with pytest.raises(UserError, match="it does not hold the value -1"):
        claims.check("bias", -1, 8, (-3, -2), folder=notebooks)
    with pytest.raises(UserError, match="claim bias: interval=0.1 is not two numbers"):
        claims.check("bias", -1, 8, 0.1, folder=notebooks)
    for value in (True, np.False_):
        with pytest.raises(UserError, match="mean error in ulp is (True|False), no number"):
            claims.check("bias", value, 8, folder=notebooks)


# The files


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"rule": "mean error =< 2"}, "claim bias: rule 'mean error =< 2' does not end in a"),
        ({"rule": 3}, "claim bias: rule 3 is not a text"),
        ({"rule": "mean error < 1e999"}, "claim bias: rule 'mean error < 1e999' compares with a"),
        ({"sentence": 3}, "claim bias: sentence 3 is not a text"),
        ({"refuted_if": True}, "claim bias: refuted_if True is not a text"),
        ({"threats": 3}, "claim bias: threats 3 is not a list of words"),
        ({"id": "my_bias"}, "claim my_bias: an id has hyphens, 'my-bias'"),
        ({"threshold": 1}, "claim bias: unknown key 'threshold'; keys are id, sentence, rule"),
        ({"page": "a_bias"}, "claim bias: unknown key 'page'"),
        ({"needs": 0}, "claim bias: needs 0 is not a number of units"),
        ({"needs": "0 sums"}, "claim bias: needs 0 is not a number of units"),
        ({"needs": "eight sums"}, "claim bias: needs 'eight sums' is not a number, nor one with"),
        ({"needs": 7.5}, "claim bias: needs 7.5 is not a number of units"),
        ({"needs": None}, "claim bias: needs None is not a number of units"),
        ({"weight": "heavy"}, "claim bias: weight 'heavy' is none of key, support, check"),
        ({"registered": "before"}, "claim bias: registered 'before' is not a commit"),
        ({"registered": 1234567}, "claim bias: registered 1234567 is not a commit; give 7 to 40 "
         "hexadecimal digits, in quotes"),
        ({"headline": 1}, "claim bias: headline and words go together"),
        ({"words": "It is."}, "claim bias: headline and words go together"),
        ({"headline": 11, "words": "It is."}, "claim bias: headline 11 is not one of 1 to 10"),
        ({"headline": 1, "words": "{m} is."}, "claim bias: words ask for {m}; there are {count}"),
        ({"headline": 1, "words": "{count} is."}, "claim bias: words ask for {count} and its rule"),
    ],
)  # fmt: skip
def test_a_damaged_entry_is_named(folder, change, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        claims.load(folder({**ENTRY, **change}))


def test_a_misspelt_threat_is_named(folder):
    notebooks = folder({**ENTRY, "threats": ["sedes"]})
    assert claims.load(notebooks)["bias"].threats == ("sedes",), "no legend, no check"
    legend = notebooks.parent / "book" / "threats.md"
    legend.parent.mkdir()
    legend.write_text("(threat-seeds)=\n## Seeds\n\n(threat-gpu)=\n## GPU\n")
    with pytest.raises(UserError, match="claim bias: 'sedes' is no threat of threats.md; those "):
        claims.load(notebooks)
    assert claims.load(folder({**ENTRY, "threats": "GPU"}))["bias"].threats == ("GPU",)


@pytest.mark.parametrize("key", ["sentence", "rule", "needs"])
def test_missing_keys_are_named(folder, key):
    with pytest.raises(UserError, match=f"claim bias: key '{key}' is missing"):
        claims.load(folder({k: v for k, v in ENTRY.items() if k != key}))


def test_a_repeated_id_is_named_in_whatever_file(folder):
    twice = "claim bias stands twice, in a_bias{}: rename one"
    with pytest.raises(UserError, match=twice.format("")):
        claims.load(folder(ENTRY, ENTRY))
    with pytest.raises(UserError, match=twice.format(" and laboratory/bias")):
        claims.load(folder(ENTRY, **{"laboratory/bias": [ENTRY]}))


def test_a_claims_file_without_its_notebook_is_named(folder):
    notebooks = folder(ENTRY)
    (notebooks / "a_bias.ipynb").rename(notebooks / "b_bias.ipynb")
    with pytest.raises(UserError, match="a_bias.claims.yml has no notebook a_bias.ipynb beside"):
        claims.load(notebooks)


def test_the_claims_of_a_fork_stay_with_it(folder):
    fork = {**ENTRY, "id": "mine", "threats": ["sequence"]}
    notebooks = folder(ENTRY, _template=[fork], **{"forks/mine": [{**fork, "needs": 4}, ENTRY]})
    assert list(claims.load(notebooks)) == ["bias"]
    result = claims.check("mine", -0.25, 4, folder=notebooks)
    assert (result.verdict, result.claim.page, result.registered) == ("supported", "", False)
    assert not result.claim.exploratory, "nobody knows"
    assert "Source: this fork." in claims.judge({**ENTRY, "source": None, "gloss": ""}, 1, 8).myst()
    assert claims.check("bias", -0.25, 8, folder=notebooks).claim.page == "a_bias"
    (notebooks / "forks" / "mine.claims.yml").unlink()
    assert claims.check("mine", -0.25, 4, folder=notebooks).verdict == "inconclusive", "template's"
    claims.compare("_template", [result.as_dict()], {"a": 1}, notebooks)


def test_two_copies_of_one_claim_do_not_stop_each_other(folder):
    mine = {**ENTRY, "id": "mine"}
    notebooks = folder(ENTRY, **{"forks/a": [mine], "forks/b": [mine]})
    assert claims.check("mine", -0.25, 8, folder=notebooks).verdict == "supported"


def test_a_fork_has_no_rule_of_its_own_for_an_id_of_the_book(folder):
    notebooks = folder(ENTRY, **{"forks/a": [ENTRY], "forks/b": [{**ENTRY, "needs": 4}]})
    claims.compare("forks/none", [], {}, notebooks)
    with pytest.raises(UserError, match="claim bias stands twice, in a_bias and forks/b: rename"):
        claims.compare("forks/b", [], {}, notebooks)


def test_an_id_of_the_book_is_not_judged_by_the_book_where_a_fork_has_another_rule(
    folder, monkeypatch
):
    notebooks = folder(ENTRY, **{"forks/b": [{**ENTRY, "needs": 4}], "forks/a": [ENTRY]})
    for running in ("forks/b", ""):  # nobody says which runs
        monkeypatch.setenv("JPY_SESSION_NAME", running and str(notebooks / f"{running}.ipynb"))
        with pytest.raises(UserError, match="claim bias stands twice, in a_bias and forks/b"):
            claims.check("bias", -0.25, 8, folder=notebooks)
    (notebooks / "forks" / "without.ipynb").touch()
    for running in ("forks/a", "a_bias", "forks/without"):
        monkeypatch.setenv("JPY_SESSION_NAME", str(notebooks / f"{running}.ipynb"))
        assert claims.check("bias", -0.25, 8, folder=notebooks).verdict == "supported"


def test_a_fork_without_claims_takes_those_of_no_other(folder, monkeypatch):
    mine = {**ENTRY, "id": "mine"}
    notebooks = folder(ENTRY, _template=[mine], **{"forks/b": [mine]})
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebooks / "forks" / "a.ipynb"))
    assert claims.check("mine", -0.25, 8, folder=notebooks).verdict == "supported", "renamed since"
    (notebooks / "forks" / "a.ipynb").touch()
    with pytest.raises(UserError, match="there is no claim 'mine': a.claims.yml is missing"):
        claims.check("mine", -0.25, 8, folder=notebooks)


def test_a_claim_that_its_fork_does_not_check_is_an_error(folder):
    notebooks = folder(ENTRY, **{"forks/a": [{**ENTRY, "id": "mine"}]})
    with pytest.raises(UserError, match="claim mine stands in forks/a.claims.yml and the .* not"):
        claims.compare("forks/a", [], {}, notebooks)
    result = claims.check("mine", -0.25, 8, folder=notebooks)
    claims.compare("forks/a", [result.as_dict()], {}, notebooks)


def test_a_fork_reads_the_claims_of_no_other(folder, monkeypatch):
    mine = {**ENTRY, "id": "mine"}
    others = {"forks/b": [{**mine, "needs": 4}], "forks/broken": [{"id": "mine"}], "_template": []}
    notebooks = folder(ENTRY, **{"forks/a": [mine]}, **others)
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebooks / "forks" / "a.ipynb"))
    assert claims.check("mine", -0.25, 7, folder=notebooks).verdict == "inconclusive"
    with pytest.raises(UserError, match="no claim 'mien': did you mean 'mine'?"):
        claims.check("mien", -0.25, 8, folder=notebooks)
    for id, sentence in (
        ("bais", "a.claims.yml has no claim 'bais', nor has the book"),
        ("mien", "a.claims.yml has no claim 'mien': did you mean 'mine'"),
    ):
        with pytest.raises(UserError, match=f"^{sentence}"):
            claims.check(id, -0.25, 8, folder=notebooks)
    monkeypatch.delenv("JPY_SESSION_NAME")
    folder(ENTRY, **{"forks/b": [], "forks/broken": [{"id": "other"}]})
    assert claims.check("mine", -0.25, 8, folder=notebooks).verdict == "supported"


def test_a_claim_of_two_forks_or_of_none_is_named(folder, monkeypatch):
    mine = {**ENTRY, "id": "mine"}
    notebooks = folder(ENTRY, **{"forks/a": [mine], "forks/b": [{**mine, "needs": 4}]})
    assert list(claims.load(notebooks)) == ["bias"]
    with pytest.raises(UserError, match="claim mine stands twice, in forks/a and forks/b: rename"):
        claims.check("mine", -0.25, 8, folder=notebooks)
    with pytest.raises(UserError, match="no claim 'mien' beside a notebook"):
        claims.check("mien", -0.25, 8, folder=notebooks)


@pytest.mark.parametrize(
    "text, words",
    [(None, "there are no claims in .*notebooks; restore them"),
     ("\xff", "claims.yml is not valid YAML"),
     ("a: [", "claims.yml is not valid YAML.* in line 1, column 5"),
     ("- id: a\n  rule: a < 1\n  rule: a < 2", "rule stands twice, again in line 3"),
     ("- id: a\n  note: b: c", "in line 2, column 10; quote a text that has ': ' in it"),
     ("- 3", "must be a list of claims"),
     ("a: 1", "must be a list of claims")],
)  # fmt: skip
def test_a_damaged_claims_file_is_named(folder, text, words):
    file = folder(ENTRY) / "a_bias.claims.yml"
    file.unlink() if text is None else file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=words):
        claims.load(file.parent)


# Results


def test_a_result_survives_the_notebook_file(folder):
    result = claims.check("bias", -0.25, 8, (-0.5, -0.1), note="Seen.", folder=folder(ENTRY))
    data = result._repr_mimebundle_()
    assert claims.Result.from_dict(json.loads(json.dumps(data[CLAIM_MIME]))) == result
    for words in ("Supported", "mean error in ulp: −0.25 [−0.5, −0.1]", "n = 8 sums", "Seen.",
                  "qiu2025", "Supported if below 0.",
                  "Would refute it: the mean error is 0 or positive"):  # fmt: skip
        assert words in data["text/markdown"]
    one = claims.check("bias", -0.25, 1, folder=folder(ENTRY))
    assert one.measured() == "mean error in ulp: −0.25, n = 1 sum, 8 needed"
    units = judged(folder, EXPLODES, SEEDS)
    assert claims.Result.from_dict(json.loads(json.dumps(units.as_dict()))) == units
    wide = claims.check("bias", -0.25, 8, (-math.inf, math.inf), folder=folder(ENTRY))
    record = json.dumps(wide.as_dict(), allow_nan=False)
    assert claims.Result.from_dict(json.loads(record)) == wide and wide.verdict == "inconclusive"
    assert wide.text == "−0.25 [−∞, ∞]" and wide.as_lock()["interval"] == ["-inf", "inf"]


def test_a_claim_with_a_gloss_is_not_laid_in_its_sources_mouth(folder):
    for entry, words, source in (
        (ENTRY, "The bias is negative. *Take care.*", "Tests a statement of {cite:t}`qiu2025`."),
        ({**ENTRY, "gloss": ""}, "The bias is negative.\n\n", "Source: {cite:t}`qiu2025`."),
    ):
        box = claims.check("bias", -1, 8, folder=folder(entry)).myst()
        assert words in box and source in box


def test_a_fork_needs_no_entry():
    hypothesis = {"sentence": "Two is small.", "rule": "two < 3", "needs": "8 twos"}
    result = claims.judge(hypothesis, 1, 8)
    assert (result.verdict, result.registered) == ("supported", False)
    assert "xploratory" not in result.markdown(), "nobody knows"
    counted = {**hypothesis, "rule": "count of twos that are small == 2", "needs": 2}
    assert claims.judge(counted, {0: True, 1: False}).count == "1 of 2"
    for key in ("rule", "needs"):
        with pytest.raises(UserError, match=f"key '{key}' is missing"):
            claims.judge({k: v for k, v in hypothesis.items() if k != key}, 1, 8)
    with pytest.raises(UserError, match="does not hold the value 1"):
        claims.judge(hypothesis, 1, 8, (2, 1))


def test_a_page_shows_what_it_checks_and_what_another_found(tmp_path):
    """In a real kernel: one output a claim, and none for the value of the last line."""
    value = claims.recorded()["addition-worked-example"].value
    code = "from lowprec import claims"
    checks = f"claims.check(addition_worked_example={value})"
    sources = (code, checks, "claims.show('bias-once')")
    cells = [new_markdown_cell("# A"), new_code_cell('profile: str = "recorded"')]
    cells[1].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells += map(new_code_cell, sources)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / "a.ipynb")
    page = notebook.execute(tmp_path / "a.ipynb", tmp_path / "out.ipynb")
    results = map(claims.Result.from_dict, page.metadata["lowprec"]["verdicts"])
    assert [(r.claim.id, r.registered) for r in results] == [
        ("addition-worked-example", True), ("bias-once", False),
    ]  # fmt: skip
    outputs = [cell.outputs for cell in page.cells if cell.cell_type == "code"]
    assert [len(some) for some in outputs] == [0, 0, 0, 1]
    (box,) = outputs[3]
    (lines,) = (
        cell.source for cell in page.cells if "more-claims" in cell.metadata.get("tags", [])
    )
    assert lines.count("(claim-addition-worked-example)=") == 1 and "claim-bias-once)=" not in lines
    assert "check(" not in lines and ":name:" not in box.data["text/markdown"]


# Locks


@pytest.fixture
def accepted(folder):
    """The notebooks' folder of a page that was executed with a value and accepted."""

    def accept(value=-0.25, **about):
        notebooks = folder(ENTRY)
        execute(notebooks.parent, claims.check("bias", value, 8, folder=notebooks), **about)
        claims.accept("a_bias", notebooks.parent)
        return notebooks

    return accept


def execute(root, *results, place="book/executed", **about):
    """Stands in for papermill: a page whose cells printed `results`."""
    cells = [new_markdown_cell("# Bias")]
    for result in results:
        output = new_output("execute_result", data=result._repr_mimebundle_())
        cells.append(new_code_cell("claims.check(...)", outputs=[output]))
    page = as_page(new_notebook(cells=cells), "a_bias", "recorded", 1.25)
    page.metadata["lowprec"] |= about
    (root / place).mkdir(parents=True, exist_ok=True)
    nbformat.write(page, root / place / "a_bias.ipynb")


def test_a_lock_has_a_line_a_claim_with_six_digits(accepted):
    notebooks = accepted(-0.123456789, facts={"low": "8 of 8", "share": 0.0312512345})
    lines = (notebooks / "a_bias.lock.json").read_text().splitlines()
    assert '"bias": {"n": 8, "value": -0.123457, "verdict": "supported"}' in lines
    assert '"low": "8 of 8",' in lines and '"share": 0.0312512' in lines
    assert claims.lock("a_bias", notebooks) == claims.locks(notebooks)["a_bias"] == {
        "claims": {"bias": {"n": 8, "value": -0.123457, "verdict": "supported"}},
        "facts": {"low": "8 of 8", "share": 0.0312512},
        "hardware": notebook.hardware(),
    }  # fmt: skip
    assert claims.recorded(notebooks)["bias"].text == "−0.1235"
    again = (notebooks / "a_bias.lock.json").read_bytes()
    assert claims.accept("a_bias", notebooks.parent) == []
    assert (notebooks / "a_bias.lock.json").read_bytes() == again


def test_a_lock_has_a_number_in_full_where_the_rule_does(folder):
    result = judged(folder, {**ENTRY, "rule": "error == -0.7890625", "needs": 1}, -0.7890625)
    assert (result.verdict, result.as_lock()["value"]) == ("supported", -0.7890625)
    assert result.measured() == "error: −0.7890625, n = 1"


def test_a_lock_keeps_what_each_unit_gave(folder):
    notebooks = folder(EXPLODES)
    execute(notebooks.parent, *claims.check(folder=notebooks, low_explodes=SEEDS))
    (line,) = claims.accept("a_bias", notebooks.parent)
    assert line == "low-explodes: nothing -> verdict supported, value 3, n 4"
    assert claims.recorded(notebooks)["low-explodes"].count == "3 of 4"
    assert claims.lock("a_bias", notebooks)["claims"]["low-explodes"]["by"]["2"] is False


def test_a_lock_that_was_changed_by_hand_is_refused(accepted):
    notebooks = accepted()
    file = notebooks / "a_bias.lock.json"
    text = file.read_text()
    for other in (text.replace("supported", "refuted"), text.replace("-0.25", "-0.26")):
        assert other != text
        file.write_text(other)
        with pytest.raises(UserError, match="a_bias.lock.json was changed by hand: run `python"):
            claims.lock("a_bias", notebooks)
    for other in ("", "{}", "[]", text[:-9]):
        file.write_text(other)
        with pytest.raises(UserError, match="a_bias.lock.json is no lock: run `python -m lowprec"):
            claims.lock("a_bias", notebooks)
    claims.accept("a_bias", notebooks.parent)
    assert file.read_text() == text


@pytest.mark.parametrize(
    "value, n, sentence",
    [(1, 8, "claim bias: verdict is refuted .*lock.json says supported: look why, then run `p"),
     (-0.25, 9, "claim bias: n is 9 .* a_bias.lock.json says 8"),
     (-0.251, 8, "claim bias: value is -0.251 .* says -0.25"),
     (-0.2501, 8, None)],
)  # fmt: skip
def test_what_the_lock_does_not_say_stops_the_build(accepted, value, n, sentence):
    notebooks = accepted()
    record = claims.check("bias", value, n, folder=notebooks).as_dict()
    for page in ("a_bias", "forks/other", ""):
        if sentence is None:
            claims.compare(page, [record], {}, notebooks)
            continue
        with pytest.raises(UserError, match=sentence):
            claims.compare(page, [record], {}, notebooks)


def test_other_units_with_what_is_counted_stop_the_build(folder):
    notebooks = folder({**ENTRY, "rule": "count of runs that explode == 1", "needs": 3})
    root, here = notebooks.parent, notebook.hardware()
    first, other = ({i: i == k for i in range(3)} for k in (0, 1))
    execute(root, claims.check(bias=first, folder=notebooks)[0])
    claims.accept("a_bias", root)
    (record,) = (result.as_dict() for result in claims.check(bias=other, folder=notebooks))
    with pytest.raises(UserError, match="claim bias: by is .*'0': False, '1': True"):
        claims.compare("a_bias", [record], {}, notebooks, here)
    assert claims.compare("a_bias", [record], {}, notebooks, "8-core CPU (another)") == []


def test_whole_numbers_are_alike_if_equal():
    assert [locks.alike(*some) for some in ((5020, 5024), (5020.0, 5024), (8, 8))] == [0, 1, 1]


def test_processors_of_one_name_with_other_vectors_are_two():
    older, newer = (
        f"processor\t: 0\nmodel name\t: A Name\nflags\t\t: fma {flags}\n"
        for flags in ("avx2", "avx2 avx512f avx512_bf16")
    )
    assert notebook.processor(older) == "A Name, avx2"
    assert notebook.processor(newer) == "A Name, avx512_bf16"
    assert notebook.processor("") == platform.machine()


def test_on_another_machine_the_verdict_stands_and_the_value_may_differ(accepted):
    notebooks = accepted(facts={"share": 0.03125})
    here, there = notebook.hardware(), "8-core CPU (another)"

    def held(value, n, facts, hardware):
        record = claims.check("bias", value, n, folder=notebooks).as_dict()
        return claims.compare("a_bias", [record], facts, notebooks, hardware)

    assert held(-0.3, 8, {"share": 0.04}, there) == ["bias", "share"]
    assert held(-0.25, 8, {"share": 0.03125}, there) == []
    for value, n, facts, sentence in [
        (1, 8, {"share": 0.04}, f"is refuted .* says supported on a {re.escape(here)}, which"),
        (-0.3, 9, {"share": 0.04}, "n is 9"),
        (-0.3, 8, {}, "fact share of a_bias is nothing"),
    ]:
        with pytest.raises(UserError, match=sentence):
            held(value, n, facts, there)
    with pytest.raises(UserError, match="value is -0.3 .* says -0.25"):
        held(-0.3, 8, {"share": 0.03125}, here)
    with pytest.raises(UserError, match="fact share of a_bias is 0.04"):
        held(-0.25, 8, {"share": 0.04}, here)


def test_a_claim_is_checked_on_its_own_page(accepted):
    notebooks = accepted()
    (notebooks / "other.ipynb").write_text("source")
    record = claims.check("bias", -0.25, 8, folder=notebooks).as_dict()
    with pytest.raises(UserError, match="is checked in other and stands in a_bias.claims.yml"):
        claims.compare("other", [record], {}, notebooks)
    claims.compare("other", [record | {"shown": True}], {}, notebooks)
    (notebooks / "a_bias.lock.json").unlink()
    with pytest.raises(UserError, match="claim bias is supported .* does not have it: look why"):
        claims.compare("a_bias", [record], {}, notebooks)


@pytest.mark.parametrize(
    "facts, sentence",
    [({"low": "8 of 8", "share": 0.031251}, None),
     ({"low": "7 of 8", "share": 0.03125}, "fact low of a_bias is '7 of 8' and .* says '8 of 8'"),
     ({"low": "8 of 8", "share": 0.032}, "fact share of a_bias is 0.032 and .* says 0.03125"),
     ({"low": "8 of 8"}, "fact share of a_bias is nothing and .* says 0.03125: look why"),
     ({"low": "8 of 8", "share": 0.03125, "high": 1}, "fact high of a_bias is 1 and .* nothing")],
)  # fmt: skip
def test_facts_are_held_against_the_lock(accepted, facts, sentence):
    notebooks = accepted(facts={"low": "8 of 8", "share": 0.03125})
    if sentence is None:
        claims.compare("a_bias", [], facts, notebooks)
        return
    with pytest.raises(UserError, match=sentence):
        claims.compare("a_bias", [], facts, notebooks)


def test_accepting_takes_the_page_that_was_refused(accepted):
    notebooks = accepted()
    root = notebooks.parent
    execute(root, claims.check("bias", 1, 8, folder=notebooks), place="build/changed")
    (line,) = claims.accept("a_bias", root)
    assert line.endswith("value -0.25, n 8 -> verdict refuted, value 1, n 8")
    assert not (root / "build/changed/a_bias.ipynb").exists()
    assert '"verdict": "refuted"' in (root / "book/executed/a_bias.ipynb").read_text()
    (root / "book/executed/a_bias.ipynb").unlink()
    with pytest.raises(UserError, match="notebook a_bias was not executed: run `make book`"):
        claims.accept("a_bias", root)


def test_a_claim_is_shown_from_its_lock(accepted, capsys):
    notebooks = accepted()
    claims.show("bias", folder=notebooks)
    assert "supported: The bias is negative. (mean error in ulp: −0.25" in capsys.readouterr().out
    with pytest.raises(UserError, match="there is no claim 'bais': did you mean 'bias'?"):
        claims.show("bais", folder=notebooks)
    (notebooks / "a_bias.lock.json").unlink()
    with pytest.raises(UserError, match="claim bias has no verdict yet: run `make book`, then"):
        claims.show("bias", folder=notebooks)


def test_the_command_accepts_a_page_by_its_first_letters(accepted, monkeypatch, capsys):
    notebooks = accepted()
    monkeypatch.setattr("lowprec.records.files.repo_root", lambda: notebooks.parent)
    pages.main(["--accept", "a_b"])
    assert capsys.readouterr().out == "a_bias.lock.json: nothing changed\n"
    pages.main([])
    assert capsys.readouterr().out == "supported     a_bias bias: The bias is negative.\n"
    with pytest.raises(UserError, match="'a_bais' is no page of the book: did you mean a_bias"):
        pages.main(["--accept", "a_bais"])


def test_a_fork_is_told_that_it_has_no_lock(folder):
    notebooks = folder(ENTRY, **{"forks/w": [{**ENTRY, "id": "w-cost"}]})
    for name in ("forks/w", "notebooks/forks/w.ipynb", "w"):
        with pytest.raises(UserError, match=f"'{name}' is a fork, .* move both files to"):
            claims.page_named(name, notebooks)
    assert claims.page_named("a_b", notebooks) == "a_bias"
    with pytest.raises(UserError, match="'forks/x' is no page of the book"):
        claims.page_named("forks/x", notebooks)


@pytest.mark.parametrize("name", ["36", "36_bias", "notebooks/36_bias.ipynb"])
@pytest.mark.parametrize("command", [["claims", "--accept"], ["pages"]])
def test_an_old_name_is_answered_with_the_new_one(accepted, monkeypatch, capsys, name, command):
    root = accepted().parent
    monkeypatch.setattr("lowprec.records.files.repo_root", lambda: root)
    (root / "book").mkdir(exist_ok=True)
    (root / "book" / "redirects.yml").write_text("executed/36_bias: executed/a_bias\n")
    assert main([*command, name]) == 2
    assert f"'{name}' is no page of the book: did you mean a_bias?" in capsys.readouterr().err


# How old a rule is


def git(root, *args):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *who, *args], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def history(folder):
    """A repository with three commits: nothing, a rule, another limit; and the commits."""
    notebooks = folder({**ENTRY, "rule": "mean error < 1"})
    root = notebooks.parent
    git(root, "init", "-q")
    git(root, "commit", "-q", "--allow-empty", "-m", "nothing")
    commits = [git(root, "rev-parse", "HEAD")]
    for limit in (1, 2):
        folder({**ENTRY, "rule": f"mean error in ulp < {limit}"})
        git(root, "add", "notebooks")
        git(root, "commit", "-q", "-m", f"below {limit}")
        commits.append(git(root, "rev-parse", "HEAD"))
    registration._rules_at.cache_clear()
    registration._announced.cache_clear()
    registration._sources.cache_clear()
    return root, commits


def test_a_rule_is_as_old_as_it_says(history):
    root, (nothing, first, second) = history

    def fault(registered, judged=second, limit=2, page="a_bias"):
        rule = f"error, in whatever words < {limit}"
        claim = claims.parse({**ENTRY, "rule": rule, "registered": registered}, page)
        registration._announced.cache_clear()
        registration._sources.cache_clear()
        return registration.fault(claim, judged, root)

    assert fault(second) is None and fault(first, limit=1) is None
    assert "has another rule, < 1, than < 2: name" in fault(first)
    assert "is not before" in fault(second, judged=first)
    assert "does not have it, nor predictions of a campaign" in fault(nothing)
    assert "is no commit here: name the commit that first had the rule" in fault("abcdef012345")
    for name, text, told in (
        ("data/runs/mini/campaign.yaml", "predictions: []", True),
        ("lowprec/studies/sums.py", "Sums.", False),
        ("lowprec/studies/sums.py", "Sums. The rule of the prediction: below 2.", True),
        ("data/studies/sums/2026-11-27-left.parquet", "a table", False),
        ("lowprec/studies/sums.py", "Sums. The rule of the prediction: below 3.", False),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        git(root, "add", "data", *(["lowprec"] if "lowprec" in name else []))
        git(root, "commit", "-q", "-m", name)
        commit = git(root, "rev-parse", "HEAD")
        assert fault(commit, judged=commit, limit=3, page="b") is not None
        (root / "notebooks" / "a_bias.ipynb").write_text("runs of `mini`, sums.read()")
        assert (fault(commit, judged=commit, limit=3) is None) == told, (name, text)
        (root / "notebooks" / "a_bias.ipynb").write_text("of minis, resums")
        assert fault(commit, judged=commit, limit=3) is not None, (name, text)


def test_without_the_whole_history_nothing_is_held_against_a_rule(history, tmp_path):
    root, (*_, commit) = history
    assert commit.startswith(registration.head(root))
    git(root, "clone", "-q", "--depth", "1", f"file://{root}", tmp_path / "shallow")
    assert registration.head(tmp_path / "shallow") is None


def test_a_claim_is_not_accepted_before_its_rule_is_committed(history, folder):
    root, (_, first, second) = history
    notebooks = root / "notebooks"

    def accept(registered):
        folder({**ENTRY, "rule": "mean error in ulp < 2", "registered": registered})
        execute(root, claims.check("bias", 1, 8, folder=notebooks))
        claims.accept("a_bias", root)

    with pytest.raises(UserError, match=f"claim bias: registered {first[:8]} has another rule"):
        accept(first[:8])
    accept(second[:8])
    assert second.startswith(claims.lock("a_bias", notebooks)["claims"]["bias"]["first_run"])


def test_a_claim_that_was_judged_keeps_its_rule(history, folder):
    root, (*_, commit) = history
    notebooks = root / "notebooks"

    def accept(value=1, **change):
        folder({**ENTRY, "rule": "mean error in ulp < 2", "registered": commit[:8], **change})
        execute(root, claims.check("bias", value, 8, folder=notebooks))
        (line,) = claims.accept("a_bias", root)
        assert commit.startswith(claims.lock("a_bias", notebooks)["claims"]["bias"]["first_run"])
        return line

    accept()
    before = (notebooks / "a_bias.lock.json").read_text()
    for change, sentence in (
        ({"rule": "mean error in ulp < 3"}, "has another rule, < 2, than < 3: name the commit"),
        ({"needs": 7}, "needs 8, more than 7: name the commit"),
    ):
        with pytest.raises(UserError, match=f"claim bias: registered {commit[:8]} {sentence}"):
            accept(2.5, **change)
    assert (notebooks / "a_bias.lock.json").read_text() == before
    git(root, "commit", "-q", "--allow-empty", "-m", "later")
    assert accept(2.5).endswith("verdict refuted, value 2.5, n 8")
    assert "verdict not run" in accept(None), "and still it was first judged then"
    other = {**ENTRY, "rule": "mean error in ulp < 3"}
    other["registered"] = registered(root, "notebooks/a_bias.claims.yml", other)
    with pytest.raises(UserError, match=f"is not before {commit[:7]}.*, which first judged it"):
        accept(2.5, **other)
    accept(1, sentence="It is small.", rule="error in ulp, the mean < 2")
    (root / ".git").rename(root / "no-git")
    accept(1.5, rule="mean error in ulp < 3")  # without the history nothing can be held against it


def test_a_fork_is_registered_by_a_commit_that_there_is(history, folder):
    root, _ = history
    notebooks = folder({**ENTRY, "rule": "mean error in ulp < 2"}, **{"forks/b": [3, {"id": 1}]})
    (notebooks / "forks" / "c.claims.yml").write_text("a: [")
    git(root, "add", "notebooks")
    git(root, "commit", "-q", "-m", "two broken forks")
    for registered in (git(root, "rev-parse", "HEAD"), "deadbee"):
        fork = {**ENTRY, "rule": "mean error in ulp < 2", "registered": registered}
        notebooks = folder(fork, **{"forks/a": [fork]})
        record = [claims.check("bias", None, 0, folder=notebooks).as_dict() | {"shown": True}]
        if registered != "deadbee":
            claims.compare("forks/a", record, {}, notebooks)
    with pytest.raises(UserError, match="claim bias: registered deadbee is no commit here: name"):
        claims.compare("forks/a", record, {}, notebooks)
    (root / ".git").rename(root / "no-git")
    claims.compare("forks/a", record, {}, notebooks)


def registered(root, file, entry, **others):
    """The commit that brings a claim, and other files by name."""
    for name, text in {file: yaml.safe_dump([entry]), **others}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        git(root, "add", "-f", name)
    git(root, "commit", "-q", "-m", "a rule")
    return git(root, "rev-parse", "HEAD")


CAMPAIGN = "data/runs/mini/campaign.yaml"


@pytest.mark.parametrize("others", [{}, {CAMPAIGN: "predictions: []"}])
def test_a_rule_keeps_its_quantifier_and_its_units(history, others):
    root, _ = history
    entry = {"id": "gap", "sentence": "A gap.", "rule": "min over seeds of gap > 0", "needs": 3}
    commit = registered(root, "notebooks/a_bias.claims.yml", entry, **others)
    (root / "notebooks" / "a_bias.ipynb").write_text("runs of `mini`")

    def fault(**change):
        claim = claims.parse({**entry, "registered": commit, **change}, "a_bias")
        return registration.fault(claim, commit, root)

    assert fault() is None and fault(needs=4, rule="min over pairs of the gap > 0") is None
    shown = "has another rule, 'min over seeds of gap > 0', than '{} > 0': name the commit that"
    for other in ("max over seeds of gap", "count of seeds that gap", "smallest gap"):
        assert shown.format(other) in fault(rule=f"{other} > 0")
    assert "has another rule, > 0, than > -1: name" in fault(rule="max over seeds of gap > -1")
    assert "has another rule, > 0, than < 0: name" in fault(rule="min over seeds of gap < 0")
    assert "needs 3, more than 2: name the commit" in fault(needs="2 seeds")


@pytest.mark.parametrize(
    "prose, rule, told",
    [("gap over the mean, smallest of seeds", "min over seeds of the gap over the mean", True),
     ("gap over the mean, smallest of seeds", "max over seeds of the gap over the mean", False),
     ("gap over the mean, smallest of seeds", "mean over seeds of the smaller gap", True),
     ("smallest gap", "count of seeds that have a gap", False),
     ("the larger of the two gaps", "median over seeds of the gap", False),
     ("the mean gap of the seeds", "mean over seeds of the gap", True),
     ("the mean gap of the seeds", "max over seeds of the mean gap", False),
     ("predicted over measured gap, worst of three", "max over seeds of the gap", True),
     ("seeds with a gap", "count of seeds that have a gap", True)],
)  # fmt: skip
def test_a_rule_has_the_quantifier_that_its_first_prose_said(history, prose, rule, told):
    root, _ = history
    old = {"id": "gap", "metric": prose, "operator": ">", "threshold": 0.5, "n": "3 seeds"}
    commit = registered(root, "book/claims.yml", old)
    new = {"id": "gap", "sentence": "A gap.", "rule": f"{rule} > 0.5", "registered": commit}
    for needs in (2, 3):
        claim = claims.parse({**new, "needs": needs}, "a_bias")
        fault = registration.fault(claim, commit, root)
        assert (fault is None) == (told and needs == 3)
        assert (fault or "registered").startswith("registered")
        assert told or f"another rule, '{prose} > 0.5', than '{rule} > 0.5': name" in fault


def test_every_rule_is_older_than_its_first_verdict():
    if registration.head(ROOT) is None:
        pytest.skip("the history is not here: an archive or a shallow clone")
    faults, registry = {}, claims.load()
    for page, lock in claims.locks().items():
        for id, entry in lock["claims"].items():
            judged = entry["verdict"] != "not run"
            assert not judged or "first_run" in entry, f"claim {id} of {page}: accept it again"
            if fault := registration.fault(registry[id], entry.get("first_run", "HEAD"), ROOT):
                faults[id] = fault
    assert not faults


# The generated pages, in a small repository


@pytest.fixture
def repository(accepted):
    """One claim, one notebook, its executed page and its lock."""
    root = accepted().parent
    said = [{"id": "biased", "where": "§1", "says": "It is biased."}]
    (root / "book" / "statements.yml").write_text(yaml.safe_dump(said))
    (root / "book" / "_toc.yml").write_text("root: intro\nparts: []\n")
    for name in ("README", "book/statements"):
        (root / f"{name}.md").write_text(f"# Title\n\n{pages.MARKERS[0]}\n{pages.MARKERS[1]}\n")
    return root


def test_pages_say_what_was_measured(repository):
    pages.write(repository)
    book = repository / "book"
    linked = "[**supported**](#claim-bias)"
    every = (book / "_generated" / "claims_all.md").read_text().splitlines()
    assert (book / "statements.md").read_text().splitlines()[3:-1] == [
        "",
        "**It is biased.** §1. *Holds.*",
        "",
        f"- {linked}: The bias is negative. (n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}8 sums) "
        "*Take care.*",
    ]
    assert every[0] == "## Bias"
    assert every[-2:] == [
        f"- {linked}: The bias is negative.\\",
        "  Measured: mean error in ulp: −0.25, n = 8 sums. Tests a statement of {cite:t}`qiu2025`.",
    ]
    status = (book / "status.md").read_text().splitlines()[-1]
    assert status.startswith("| {doc}`/executed/a_bias` | recorded | 20")
    assert status.endswith(" s | 1 supported |")
    assert "{admonition} Supported" in (book / "_generated" / "claim-bias.md").read_text()
    downloads = book / "_generated" / "extra" / "downloads" / "a_bias"
    source = (repository / "notebooks" / "a_bias.ipynb").read_text()
    assert (downloads / "source.ipynb").read_text() == source
    assert (downloads / "executed.ipynb").is_file()
    readme = (repository / "README.md").read_text()
    counts = (
        "1 claims: 1 with a rule from before the measurement (1 supported), 0 exploratory ().\n"
    )
    held = "Of 1 statements of the paper 1 hold here, 0 hold in part, 0 do not, and 0 were not "
    for name, text in {"counts": counts, "standing": f"{held}tested.\n"}.items():
        assert (book / "_generated" / f"claims_{name}.md").read_text() == text
        assert text in readme


def test_pages_are_the_same_when_written_again(repository):
    first = {path: path.read_bytes() for path in pages.write(repository)}
    assert {path: path.read_bytes() for path in pages.write(repository)} == first


def test_a_claim_that_its_notebook_does_not_check_is_an_error(repository):
    execute(repository)
    with pytest.raises(UserError, match="claim bias stands in a_bias.claims.yml and the .* not"):
        pages.write(repository)
    (repository / "book" / "executed" / "a_bias.ipynb").unlink()
    with pytest.raises(UserError, match="README.md is renewed; .* a_bias was not executed"):
        pages.write(repository)
    assert "1 claims: 1" in (repository / "README.md").read_text()


def test_a_statement_has_claims_or_a_reason_to_have_none(repository):
    file, notebooks = repository / "book" / "statements.yml", repository / "notebooks"
    registry, found = claims.load(notebooks), claims.recorded(notebooks)
    [said] = yaml.safe_load(file.read_text())
    why = dict(untested="one GPU", threat="GPU")
    other = {**said, "id": "other"}
    with pytest.raises(UserError, match="statement other .* why there is none"):
        statements.of_paper(registry, [said, other])
    with pytest.raises(UserError, match="statement biased .* why there is none"):
        statements.of_paper(registry, [said | why])
    text = statements.listed(registry, [said, other | dict(why, says="Or not.")], found)
    untested = "*Not tested here.*\n\n- One GPU: see the threat [GPU](threats.md).\n"
    assert text.endswith(f"**Or not.** §1. {untested}")


def test_an_exploratory_claim_says_so(repository, folder):
    notebooks = folder({k: v for k, v in ENTRY.items() if k != "registered"} | {"threats": "seeds"})
    result = claims.check("bias", -0.25, 8, folder=notebooks)
    assert "chosen after seeing these data" in result.markdown()
    assert "Doubt it first for: seeds, after." in result.markdown()
    assert "{ref}`seeds <threat-seeds>`" in result.myst()
    pages.write(repository)
    shown = "- [**supported**](#claim-bias), exploratory: "
    assert shown in (repository / "book" / "statements.md").read_text()
    assert "1 exploratory (1 supported)" in (repository / "README.md").read_text()
    for word in ("seeds", "after"):
        text = (repository / f"book/_generated/threat-{word}.md").read_text()
        assert text.splitlines() == [
            ":::{dropdown} Claims doubted for this: 1",
            "- {doc}`/executed/a_bias`: [`bias`](#claim-bias)",
            ":::",
        ]


def test_what_could_hardly_fail_is_in_no_count(repository, folder):
    folder({**ENTRY, "weight": "check"})
    pages.write(repository)
    text = (repository / "book/_generated/claims_counts.md").read_text()
    assert text.startswith("0 claims: ")
    assert "Not counted: 1 that could hardly have failed." in text


def test_a_page_that_its_lock_contradicts_is_not_published(repository):
    execute(repository, claims.check("bias", 1, 8, folder=repository / "notebooks"))
    with pytest.raises(UserError, match="claim bias: verdict is refuted .* says supported"):
        pages.write(repository)


def test_headlines_are_filled_in(repository, folder):
    folder(
        {**ENTRY, "headline": 2, "words": "**Small.** It is {value} ulp,"},
        {**EXPLODES, "headline": 1, "words": "**Loud.** {count} explode."},
        {**ENTRY, "id": "size", "headline": 2, "words": "or {value:.1%}, in {n} sums."},
    )
    notebooks = repository / "notebooks"
    given = dict(bias=claims.Measured(-0.25, 8), size=claims.Measured(0.125, 8))
    execute(repository, *claims.check(folder=notebooks, low_explodes=SEEDS, **given))
    claims.accept("a_bias", repository)
    readme = repository / "README.md"
    readme.write_text(readme.read_text() + "{}\n{}\nThe end.\n".format(*pages.FINDINGS))
    pages.write(repository)
    text = readme.read_text()
    assert text.endswith(f"{pages.FINDINGS[1]}\nThe end.\n")
    assert text.split(pages.FINDINGS[0])[1].split(pages.FINDINGS[1])[0].splitlines()[1:] == [
        "1. **Loud.** 3 of 4 explode. ([Bias](notebooks/a_bias.ipynb))",
        "2. **Small.** It is −0.25 ulp, or 12.5%, in 8 sums. ([Bias](notebooks/a_bias.ipynb))",
    ]


# The repository's own claims


def test_the_books_claims_are_whole():
    registry = claims.load()
    keys = re.findall(r"^@\w+\{([^,]+),", (ROOT / "book/references.bib").read_text(), re.MULTILINE)
    for claim in registry.values():
        assert claim.source is None or claim.source in keys, f"{claim.id}: no {claim.source} in bib"
    assert set(claims.recorded()) == set(registry), "a claim has no verdict in its lock"
    for file in (ROOT / "notebooks").rglob("*.claims.yml"):
        assert file.stat().st_size <= 25_000, f"{file.name} is too long to read"


def test_a_claim_is_understood_without_the_one_before_it():
    """The list of all claims and other pages show a sentence without its neighbours."""
    words = "And But So Nor Or Also Then Yet It They This That These Those Its Their There Such"
    for claim in claims.load().values():
        first = re.match(r"\w*", claim.sentence)[0]
        assert first not in words.split(), f"{claim.id}: say what {first!r} leads on from"


def test_readme_has_the_claims():
    readme = (ROOT / "README.md").read_text()
    stale = "README.md is older than the claims or their locks: run `make book`, or\n"
    stale += "`python -m lowprec claims --write`, which renews it before it asks for the pages"
    said, of_paper = statements.load(ROOT / "book"), (ROOT / "book/statements.md").read_text()
    registry, found = claims.load(), claims.recorded()
    titles = pages.source_titles(ROOT / "notebooks")
    assert pages.with_claims(readme, registry, said, found, titles) == readme, stale
    assert statements.listed(registry, said, found) in of_paper, stale.replace("README", "a page")


def test_every_headline_has_its_place():
    headlines = {claim.headline for claim in claims.load().values() if claim.headline}
    assert headlines == set(range(1, 11))
    assert all(claim.weight == "key" for claim in claims.load().values() if claim.headline)


# What reading claims needs


def test_claims_are_read_without_torch_and_on_any_system():
    """torch takes seconds to import, and fcntl is not there on Windows."""
    run_without(
        "torch fcntl",
        "from lowprec.evidence import claims, survival, words; from lowprec.training import plan",
        "assert len(claims.recorded()) == len(claims.load())",
    )


@pytest.mark.slow
def test_what_pages_import_is_there_without_fcntl():
    imports = set()
    for path in (ROOT / "notebooks").rglob("[!_]*.ipynb"):
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code":
                lines = ast.walk(ast.parse(cell.source))
                imports |= {ast.unparse(x) for x in lines if isinstance(x, ast.ImportFrom)}
    run_without(
        "fcntl",
        *sorted(line for line in imports if line.startswith("from lowprec")),
        "from lowprec.evidence import survival",
        "assert survival.load_arms('mini')['low'].complete",
    )


def run_without(blocked, *lines):
    code = f"""
import sys

class Blocked:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {blocked.split()}:
            raise ImportError(f"{{name}} is asked for")

sys.meta_path.insert(0, Blocked())
"""
    code += "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_of_as_many_units_with_as_without_those_with_are_listed():
    by = dict(a=True, b=True, c=False, d=False)
    hypothesis = dict(sentence="Half explode.", rule="count of runs that explode == 2", needs=4)
    assert claims.judge(hypothesis, by).listed() == "Yes: a, b"


def test_a_list_of_just_so_many_units_is_kept(folder):
    result = judged(folder, EXPLODES, dict.fromkeys(range(claims.LISTED), True))
    assert len(result.by) == claims.LISTED


def test_of_numbers_by_unit_the_one_that_is_judged_is_enough(folder):
    notebooks = folder({**ENTRY, "rule": "max over runs of error < 1", "needs": 2})
    execute(notebooks.parent, *claims.check(bias={0: 0.5, 1: 0.24}, folder=notebooks))
    claims.accept("a_bias", notebooks.parent)
    (result,) = claims.check(bias={0: 0.5, 1: 0.25}, folder=notebooks)
    assert claims.compare("a_bias", [result.as_dict()], {}, notebooks) == []


def test_a_claim_that_is_not_run_was_not_judged(history, folder):
    root, (*_, second) = history
    folder({**ENTRY, "rule": "mean error in ulp < 2", "registered": second[:8]})
    execute(root, claims.check("bias", None, 0, folder=root / "notebooks"))
    claims.accept("a_bias", root)
    assert "first_run" not in claims.lock("a_bias", root / "notebooks")["claims"]["bias"]


def test_a_page_locks_no_claim_of_another(folder):
    notebooks = folder(ENTRY, b=[{**ENTRY, "id": "other"}])
    results = [claims.check(id, -0.25, 8, folder=notebooks) for id in ("bias", "other")]
    execute(notebooks.parent, *results)
    claims.accept("a_bias", notebooks.parent)
    assert list(claims.lock("a_bias", notebooks)["claims"]) == ["bias"]


def test_a_share_of_more_units_than_are_needed_is_judged(folder):
    every = {**EXPLODES, "rule": "share of seeds that explode == 1"}
    assert judged(folder, every, dict.fromkeys(range(6), True)).verdict == "supported"


def test_a_main_page_comes_before_the_laboratory():
    assert registry.pages_named("la", ["landscape", "laboratory/bias"]) == ["landscape"]


def test_what_goes_with_one_id_is_refused_with_several(folder):
    notebooks = folder(ENTRY)
    (noted,) = claims.check(bias=claims.Measured(-0.25, 8), note="Or -1.", folder=notebooks)
    assert noted.note == "Or −1."
    with pytest.raises(UserError, match="go with one id"):
        claims.check(bias=-0.25, complete=True, folder=notebooks)
