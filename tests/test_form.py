"""The form of a page: what stands first, what is folded, and what a reader sees of it."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lowprec import UserError
from lowprec.evidence import claims
from lowprec.evidence.registry import pages, parse
from lowprec.evidence.verdicts import Result
from lowprec.evidence.words import CLAIM_MIME, FIGURE_MIME
from lowprec.publish import form, notebook

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# What carries it\n\n**Question.** Which one?\n\n**Answer.** This one does."


def figure(name="x", caption="Four words of caption."):
    shown = f'<figure id="figure-{name}"><path id="{name}-a"/></figure>'
    about = dict(name=name, id=f"figure-{name}", alt="a", caption=caption, hardware=None)
    data = {"text/html": shown, "image/png": "", FIGURE_MIME: about}
    return new_output("display_data", data=data)


def cell(source, *outputs, tags=()):
    made = new_code_cell(source, outputs=list(outputs))
    made.metadata["tags"] = list(tags)
    return made


def text(source, *tags):
    made = new_markdown_cell(source)
    made.metadata["tags"] = list(tags)
    return made


def verdict(id, weight="support", rule="count of runs that explode == 0", page="the_explosion",
            value=0, verdict="supported", shown=False):  # fmt: skip
    entry = dict(id=id, sentence=f"No {id}.", rule=rule, needs=8, weight=weight, threats=["length"])
    result = Result(parse(entry, page), verdict, value, 8, shown=shown)
    data = {"text/markdown": result.markdown(), CLAIM_MIME: result.as_dict()}
    return new_output("display_data", data=data)


def page_of(*cells, name="the_explosion", parameters=None):
    nb = new_notebook(cells=[text(HEAD), *cells])
    page = notebook.as_page(nb, name, "recorded", 12.4, parameters)
    nbformat.validate(page)
    return page


def test_the_lead_figure_is_moved_under_the_answer():
    page = page_of(text("## Section"), cell("draw()", figure(), tags=["hide-input", "lead"]))
    assert [c.source for c in page.cells[1:3]] == ["draw()", "## Section"]
    shown = [o for c in page.cells for o in c.get("outputs", [])]
    assert len(shown) == 1 and 'id="figure-x"' in shown[0].data["text/html"]


def test_code_that_shows_nothing_is_in_the_notebook_alone():
    some = [cell("seed = 3", tags=["parameters"]), cell("draw()", figure())]
    pages = {name: page_of(*some, name=name).cells for name in ("the_explosion", "forks/mine")}
    silent = {
        name: ["remove-cell" in cell.metadata.get("tags", []) for cell in cells]
        for name, cells in pages.items()
    }
    assert silent["the_explosion"][1:3] == [True, False] and not any(silent["forks/mine"])


def test_the_line_of_place_says_where_how_long_and_offers_the_files():
    page = page_of(text("word " * 1000))
    title, place, question = page.cells[0].source.split("\n\n")[:3]
    assert title == "# What carries it" and question == "**Question.** Which one?"
    assert place.startswith('<p class="lowprec-place">Part I, page 1 of 4 · 4 minutes')
    assert " · computed in 12 s on a " in place
    link = '<a href="../downloads/the_explosion/source.ipynb" download="the_explosion.ipynb">'
    assert f"download {link}the notebook</a>" in place


def test_a_page_outside_the_contents_and_one_with_parameters_have_no_place():
    first = page_of(name="forks/mine").cells[0].source
    assert "lowprec-place" in first and "Part" not in first and "download" not in first
    page = page_of(parameters={"seed": 3})
    title, note, rest = page.cells[0].source.split("\n\n", 2)
    assert HEAD == f"{title}\n\n{rest}" and note.startswith("*Measured with `seed=3`.")
    assert "-p seed 3" in page.cells[-1].source


def test_the_rerun_cell_is_folded_at_the_end():
    page = page_of(text("## Section"), cell("draw()", figure()))
    last = page.cells[-1].source
    assert last.startswith(":::{dropdown} Rerun, machine, files\n") and last.endswith("\n:::")
    assert "papermill notebooks/the_explosion.ipynb" in last
    assert 'Computed on this page: <a href="#figure-x">x</a>.' in last and "download" not in last


@pytest.mark.parametrize(
    "source, title", [("## By seed\n\nBody", "By seed"), ("**All limits**\nBody", "All limits")]
)
def test_a_text_tagged_fold_is_shown_under_its_first_line(source, title):
    page = page_of(text(source, "fold"))
    assert page.cells[1].source == f":::{{dropdown}} {title}\nBody\n:::"


def test_a_fold_may_hold_directives():
    assert form.dropdown("T", ":::{tip}\na\n:::").startswith("::::{dropdown} T\n:::{tip}\n")
    assert form.dropdown("T", "  ::::{tip}\n  a\n  ::::").endswith("\n:::::")


def test_a_code_cell_tagged_fold_hides_its_outputs_under_its_comment():
    source = "import x\n# By seed\n# and more\nx"
    page = page_of(cell(source, figure(), tags=["hide-input", "fold"]), cell("x", tags=["fold"]))
    first, second = page.cells[1:3]
    assert first.metadata == {"tags": ["fold", "hide-input", "hide-output"], "fold": "By seed"}
    assert second.metadata["fold"] == "More"


def test_what_a_reader_sees_leaves_out_what_is_folded():
    html = new_output("display_data", data={"text/html": "<style>.a</style><td>seven</td>"})
    markdown = new_output("display_data", data={"text/markdown": "*eight* `nine`"})
    page = page_of(
        text("## One two\n\n- three $x^2$\n\n::::{tip} four\n:class: a\n[five](x.md)\n::::"),
        text("## Hidden\n\nwords", "fold"),
        cell("hidden", figure(), tags=["fold"]),
        cell("hidden", figure("y", "six"), html, markdown),
    )
    seen = form.words("\n\n".join(form.visible(page)))
    assert seen[:3] == ["What", "carries", "it"]
    assert seen[10:] == ["One", "two", "three", "$x^2$", "four", "five", "six", "seven", "eight",
                        "nine"]  # fmt: skip


def test_roles_and_targets_are_not_words():
    assert form.words("{term}`a run <run>` and {doc}`/x/y`\n\n(claim-a)=") == [
        "a", "run", "and", "/x/y",
    ]  # fmt: skip


# One vocabulary

DOCUMENTS = (
    "README.md", "book/intro.md", "book/round_it_yourself.md", "book/how_to_read.md",
    "book/take_it_home.md", "book/shelf.md", "book/threats.md", "book/statements.md",
    "book/argument.md", "book/write_kernels.md", "book/fork.md",
)  # fmt: skip


OTHERWISE = {
    "twin": r"partners?|healthy arms?|one-field variants?",
    "clean δ": r"unrounded outputs?|output before rounding",
    "fresh rounding": r"redrawn|rounded afresh",
}
"""The one name of a thing, and names for it that prose does not use."""
CODE = re.compile(r"```.*?```|`[^`]*`|\{\{?.*?\}\}?|\]\([^)]*\)", re.DOTALL)


def other_names(text: str) -> list[str]:
    """What a text calls by another name than the book's, with that; not in code and addresses."""
    text = CODE.sub(" ", text)
    return [
        f"{found}: say {name}"
        for name, others in OTHERWISE.items()
        for found in re.findall(rf"\b(?:{others})\b", text, re.IGNORECASE)
    ]


def test_other_names_are_found_in_prose_alone():
    text = "A [Partner](partner.md) with `o_redrawn`, {redrawn} partnerships, an unrounded output."
    assert other_names(text) == ["Partner: say twin", "unrounded output: say clean δ"]


@pytest.mark.parametrize("name", [*pages(ROOT / "notebooks"), *DOCUMENTS])
def test_a_page_calls_one_thing_by_one_name(name):
    if name in DOCUMENTS:
        said = [(ROOT / name).read_text()]
    else:
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
        said = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        said += [f"{c.sentence} {c.gloss} {c.words}" for c in claims.load().values()
                 if c.page == name]  # fmt: skip
    assert [found for text in said for found in other_names(text)] == []


# Verdicts


def test_a_key_claim_is_a_box_in_its_place():
    page = page_of(cell("check()", verdict("a", "key")))
    (shown,) = page.cells[1].outputs
    lines = shown.data["text/markdown"].split("\n")
    assert lines[:5] == [
        "::::{admonition} Supported: 0 of 8 runs", ":class: tip", ":name: claim-a", "", "No a.",
    ]  # fmt: skip
    assert lines[6].endswith("{ref}`length <threat-length>`, {ref}`after <threat-after>`.* `a`")
    assert lines[8] == ":::{dropdown} How it was judged" and lines[-2:] == ["::::", ""]
    assert "Supported if equal to 0." in lines[9]


def test_the_other_claims_are_one_fold_at_the_end():
    rule = "max over runs of loss <= 2"
    some = (
        verdict("a"), verdict("b", "check", rule, value=3.5, verdict="refuted"),
        verdict("c", "key"), verdict("d", shown=True),
    )  # fmt: skip
    page = page_of(cell("check()", *some), text("## Last"))
    assert len(page.cells[1].outputs) == 1
    n = "n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}8 runs"
    assert page.cells[3].source == (
        ":::{dropdown} 3 more claims of this page: 2 supported, 1 refuted\n"
        "- (claim-a)=\n  **supported**: No a. Runs that explode: 0 of 8. `a`\n\n"
        f"- (claim-b)=\n  **refuted**: No b. 3.5 (≤\N{NO-BREAK SPACE}2 asked), {n}. `b`\n\n"
        "- **supported**: No d. Runs that explode: 0 of 8. `d`\n:::"
    )
    assert page.cells[4].source.startswith(":::{dropdown} Rerun")
    assert [v["claim"]["id"] for v in page.metadata["lowprec"]["verdicts"]] == ["a", "b", "c", "d"]


def test_a_hypothesis_without_a_page_is_a_box_without_a_target():
    page = page_of(cell("judge()", verdict("a", page="")))
    box = page.cells[1].outputs[0].data["text/markdown"]
    assert box.startswith("::::{admonition} Supported: 0 of 8 runs\n:class: tip\n\nNo a.")


def test_a_fork_has_nothing_that_only_the_book_renders():
    cells = cell("judge()", verdict("a", page="")), text("**Small < print**\nBody", "fold")
    page = page_of(*cells, name="forks/mine")
    [output] = page.cells[1].outputs
    head, judged = output.data["text/markdown"].split("\n\n", 1)
    assert head == "**Supported: 0 of 8 runs.** No a."
    assert judged.startswith("<details><summary>How it was judged</summary>\n\nMeasured: ")
    assert "{" not in judged and form.unfolded(judged).strip() == ""
    assert page.cells[2].source == (
        "<details><summary>Small &lt; print</summary>\n\nBody\n\n</details>"
    )
    assert page.cells[-1].source.startswith("<details><summary>Rerun, machine, files</summary>")
    assert not any(":::" in each.source for each in page.cells)
    assert form.unfolded(page.cells[-1].source).strip() == ""


def test_a_claim_is_judged_once():
    again = [verdict("a"), verdict("a"), verdict("a", value=1, shown=True)]
    page_of(cell("check()", *again))
    with pytest.raises(UserError, match=r"claim a is judged twice, .*0 of 8\) and refuted"):
        page_of(cell("check()", *again), cell("check()", verdict("a", value=3, verdict="refuted")))


def test_with_parameters_of_ones_own_verdicts_stay_where_they_are():
    page = page_of(cell("check()", verdict("a"), verdict("b")), parameters={"seed": 3})
    texts = [o.data["text/markdown"] for o in page.cells[1].outputs]
    assert all("Measured with `seed=3`" in text and "{" not in text for text in texts)
    assert len(texts) == 2 and "more claims" not in page.cells[-2].source


def test_what_was_measured_is_said_even_if_it_is_nothing():
    page = page_of(cell("check()", verdict("a", "key", value=None, verdict="not run")))
    box = page.cells[1].outputs[0].data["text/markdown"]
    assert box.startswith("::::{admonition} Not run: not yet, 8 of 8 recorded\n:class: note")


PATHS = sorted((ROOT / "notebooks").rglob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_table_ends_its_cell(path):
    """Jupyter shows the value of a cell's last statement, so any other table is seen by nobody."""
    unseen = []
    for cell in nbformat.read(path, 4).cells:
        body = ast.parse(cell.source).body if cell.cell_type == "code" else []
        for node in (x for statement in body for x in ast.walk(statement)):
            text = ast.unparse(node) if isinstance(node, ast.Expr) else ""
            if text.startswith("plots.show_table(") and node is not body[-1]:
                unseen.append(text)
    assert unseen == []
