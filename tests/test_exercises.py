"""Five exercises stand on a main page, short, with a folded solution whose numbers it computes."""

import json
import re
from pathlib import Path

import pytest

from lowprec.evidence.locks import read_lock
from lowprec.evidence.registry import pages
from lowprec.numerics.policy import FA2
from lowprec.publish import form
from lowprec.studies import exercises

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
FIVE = {
    "4,096 equal scores": "tiled_p",
    "values of 1": "ones",
    "a counter": "stuck",
    "guess the head": "guess_head",
    "the square law": "finer_sum",
}
"""An exercise -> a fact of its solution."""
MAIN = [page for page in pages(NOTEBOOKS) if "/" not in page]


def texts(page):
    """(exercise, solution) of a page, ("", "") without one."""
    cells = json.loads((NOTEBOOKS / f"{page}.ipynb").read_text())["cells"]
    said = {cell["id"]: cell for cell in cells}
    if "solution" not in said:
        return "", ""
    assert said["solution"]["metadata"]["tags"] == ["fold"]
    return tuple("".join(said[id]["source"]) for id in ("try", "solution"))


@pytest.mark.parametrize("fact", FIVE.values(), ids=FIVE)
def test_an_exercise_has_a_solution_with_computed_numbers(fact):
    [page] = [page for page in MAIN if f"{{{fact}" in texts(page)[1]]
    exercise, solution = texts(page)
    facts = read_lock(page, NOTEBOOKS)["facts"]
    named = re.findall(r"\{(\w+)(?:[:.][^}]*)?\}", exercise + solution)
    assert fact in named and facts.keys() >= set(named)
    assert exercise.startswith("## Try it\n") and solution.startswith("**Solution**\n")
    for name in named:
        exercise = re.sub(rf"\{{{name}[^}}]*\}}", str(facts[name]), exercise)
    assert len(form.words(exercise.removeprefix("## Try it"))) <= 60


def test_a_sum_in_fp16_stops_at_2048_and_its_row_sums_to_two():
    policy = "ALL_FP32+l=fp16"
    assert exercises.equal_scores(4096, policy, tile=1) == (2048, 2)
    assert exercises.equal_scores(4096, policy) == (4096, 1)
    assert exercises.equal_scores(2048, policy, tile=1) == (2048, 1)


def test_rounded_weights_of_ones_do_not_make_one():
    off, mended = (
        exercises.values_of_one(FA2.replace(l_from=of)).abs().max()
        for of in ("p_unnorm", "p_rounded")
    )
    assert 2**-12 < off < 2**-8 and mended < 2**-22
    assert exercises.values_of_one("ALL_FP32").abs().max() < 2**-20


def test_a_counter_stops_where_its_step_is_half_an_ulp():
    assert exercises.counter("bf16", 1000).tolist() == [256]
    assert exercises.counter("bf16", 255).tolist() == [255]
    assert exercises.counter("fp32", 1000, count=2).tolist() == [1000, 1000]
    drawn = exercises.counter("bf16", 1000, "stochastic", count=4000)
    assert abs(drawn.mean() - 1000) < 4 * drawn.std() / 4000**0.5
