"""A page keeps within what a reader, and whoever changes it, can take in."""

import json
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lowprec.__main__ import main
from lowprec.evidence.words import CLAIM_MIME, FIGURE_MIME
from lowprec.publish import form, limits

ROOT = Path(__file__).resolve().parent.parent
CONVERTED = [
    "positions_decide",
    "my_run_exploded",
    "the_explosion",
    "not_tiling",
    "one_layer",
    "delta_carries_it",
    "twelve_layers",
    "a_larger_batch",
    "the_gradient_error",
    "a_common_direction",
    "the_errors_have_a_sign",
    "from_drift_to_spike",
    "ties_in_rows_that_fail",
    "one_biased_addition",
    "the_gradient_knows_the_rounding",
    "where_the_sign_comes_from",
    "a_bias_is_enough",
    "the_papers_remedy",
    "a_lower_rate",
    "production_kernels",
    "clean_delta",
    "is_my_model_affected",
    "three_more_bits",
    "not_only_delta",
    "a_fix_at_the_root",
    "what_it_costs",
    "what_else_helps",
    "is_flash_attention_stable",
    "do_weights_drift_apart",
    "the_alarm_tested",
    "guilty_rounding",
    "sixteen_bits_outside_attention",
    "moments_that_cannot_forget",
    "bits_or_bias",
    "where_rotary_positions_break",
    "eight_bits_without_a_scale",
    "which_small_parts",
    "one_loud_channel",
    "four_bits_in_training",
    "four_bits_after_training",
    "attention_in_eight_bits",
    "two_attentions",
    "in_the_training_loop",
    "laboratory/what_ran",
    "laboratory/which_heads",
    "laboratory/rivals",
    "laboratory/production_kernels_on_cpu",
    "laboratory/ties_or_silence",
]
"""Those that are held to the limits."""


def source(name):
    return json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())


@pytest.mark.parametrize("name", CONVERTED)
def test_the_source_of_a_page_keeps_within_the_limits(name):
    nb = source(name)
    assert limits.beyond(limits.of_source(nb), name) == []


@pytest.mark.parametrize("name", CONVERTED)
def test_no_code_stands_between_a_page_and_its_reader(name):
    folded = {"hide-input", "fold", "parameters"}
    code = [c for c in source(name)["cells"] if c["cell_type"] == "code"]
    assert [c["id"] for c in code if not folded & set(c["metadata"].get("tags", []))] == []


@pytest.mark.book
@pytest.mark.parametrize("name", CONVERTED)
def test_a_page_keeps_within_the_limits(name):
    page = json.loads((ROOT / "book" / "executed" / f"{name}.ipynb").read_text())
    assert limits.beyond(limits.of_page(page), name) == []


# The measures


def test_code_is_counted_without_blank_lines_and_prose_without_docstrings():
    code = '''"""Not a docstring, but a text of eight words."""
def f(x):
    """A docstring of f is not prose at all."""
    # A comment of five words

    return f"{x} of the {len(x)} runs", "three words only"
'''
    cells = [new_markdown_cell("# A"), new_code_cell(code), new_code_cell("x = 1")]
    measured = limits.of_source(new_notebook(cells=cells))
    assert measured == {"code": 6, "strings": 9}


def test_the_parts_of_a_text_are_one():
    text = new_code_cell('f("two words "\n  f"and {n} more words")')
    assert limits.of_source(new_notebook(cells=[text]))["strings"] == 5


def output(data):
    return new_output("display_data", data=data)


def page(*cells):
    head = "# A\n\n**Question.** Is it?\n\n**Answer.** In 0 of 8 runs, by 2.5 % of `x`. It is."
    nb = new_notebook(cells=[new_markdown_cell(head), *cells])
    nb.metadata["lowprec"] = {"seconds": 12.4}
    return nb


def test_what_a_reader_sees_is_counted():
    figure = output({FIGURE_MIME: {"name": "x", "caption": "Two words."}})
    folded = new_code_cell("x", outputs=[figure, output({CLAIM_MIME: {}})])
    folded.metadata["tags"] = ["fold"]
    box = output({CLAIM_MIME: {}, "text/markdown": ":::{tip} Yes\n:::"})
    shown = new_code_cell("x", outputs=[figure, box, figure])
    measured = limits.of_page(page(shown, folded))
    assert measured == {
        "words": 1 + 3 + 12 + 2 * 2 + 1, "boxes": 1, "figures": 1, "twice": 1, "answer": 11,
        "numbers": 2, "sentence": 9, "seconds": 12,
    }  # fmt: skip


def test_sentences_end_with_their_paragraph_item_or_stop():
    text = """## A heading. With a stop

One. Two *is.* `Three` is
long, i.e. this. (Four?) And

- five
- six: δ is. Σ is

| a | table. |

```
code. Here
```
"""
    found = [" ".join(form.words(s)) for s in limits.sentences([text, "<table>No. No</table>"])]
    assert [s for s in found if s] == [
        "One.", "Two is.", "Three is long, i.e. this.", "(Four?)", "And", "five", "six: δ is.",
        "Σ is",
    ]  # fmt: skip


def test_what_is_above_its_limit_is_said_and_starred():
    measured = {"code": 251, "strings": 300, "words": 1201}
    assert limits.beyond(measured) == [
        "251 lines of code, where 250 is the most",
        "1,201 words that are not folded, where 1,200 is the most",
    ]
    lines = limits.table({"a_page": measured, "b_page": {"code": 3, "strings": 0}}).split("\n")
    assert lines[2].split() == ["a_page", "251*", "300", "1,201*"]
    assert lines[3].split() == ["b_page", "3", "0"]


def test_a_page_of_the_laboratory_has_more_code_and_as_many_words_as_it_needs():
    measured = {"code": 451, "strings": 301, "words": 9000}
    assert limits.beyond(measured, "laboratory/a_page") == [
        "451 lines of code, where 450 is the most",
        "301 words in strings of its code, where 300 is the most",
    ]
    line = limits.table({"laboratory/a_page": measured}).split("\n")[2]
    assert line.split() == ["laboratory/a_page", "451*", "301*", "9,000"]


def test_the_command_shows_the_pages_that_one_asks_for(capsys):
    first, *_, last = CONVERTED
    assert main(["pages", first[:6], last]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == [first, last]
    typo = first[:-2] + first[:-3:-1]
    assert main(["pages", typo]) == 2
    assert f"'{typo}' is no page of the book: did you mean {first}" in capsys.readouterr().err
