"""What a page found, under names, comes into its Markdown; no name is unknown and none is idle."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lowprec import UserError
from lowprec.evidence.words import FACTS_MIME
from lowprec.publish import facts, notebook

PLAIN = r"\{[\w.-]+:(?![≤≥])[^}]*\}"
BOUND = re.compile(
    rf"\b(?:at most|at least|up to)\s+{PLAIN}"
    rf"|{PLAIN}[^.{{}}]{{0,16}}?\s(?:or more|or less|at most|at least)\b(?!\s+\{{)"
)
CLAIMS = {"delta-alone": SimpleNamespace(value=-0.25, n=8, count="0 of 8", verdict="supported")}


def filled(text, **values):
    return facts.fill(text, values, CLAIMS, "a")[0]


def test_facts_are_filled_in_as_prose_prints_them():
    values = dict(low="8 of 8", share=0.0314, runs=1234, loss=-2.34567, yes=True)
    assert filled("{low}, {share:.0%}, {runs}.", **values) == "8 of 8, 3%, 1,234."
    assert filled("{loss}, {loss:+.1f}, {yes}", **values) == "−2.346, −2.3, true"


@pytest.mark.parametrize(
    "value, form, most, least",
    [
        (0.7587, ".2f", "0.76", "0.75"), (0.75, ".2f", "0.75", "0.75"), (3, ".1f", "3.0", "3.0"),
        (-2.34, ".1f", "−2.3", "−2.4"), (0.201, ".0%", "21%", "20%"), (0.2, ".0%", "20%", "20%"),
        (1234.5, ",.0f", "1,235", "1,234"), (99.96, ".1f", "100.0", "99.9"),
        (0.1 + 0.2, ".1f", "0.3", "0.3"), (0.00012345, ".2g", "0.00013", "0.00012"),
        (1.24e-7, ".1e", "1.3e-7", "1.2e-7"),
    ],
)  # fmt: skip
def test_a_bound_is_not_beyond_its_value(value, form, most, least):
    text = f"at most {{x:≤{form}}}, {{x:≥{form}}} or more"
    assert filled(text, x=value) == f"at most {most}, {least} or more"


def test_a_fact_of_several_numbers_is_told():
    with pytest.raises(UserError, match="fact x is a Series: give a text or a number"):
        facts.facts(x=pd.Series([1.0, 2.0]))


def test_pages_print_bounds_as_bounds():
    texts = {
        f"{path.stem}: {' '.join(found[0].split())}"
        for path in Path(__file__).resolve().parent.parent.glob("notebooks/**/*.ipynb")
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "markdown"
        for found in BOUND.finditer("".join(cell["source"]))
    }
    assert BOUND.search("at most {x:.1f} %") and not BOUND.search("{x:≤.1f} % at most")
    assert not texts


def test_fields_of_a_claim_are_filled_in():
    text = "{delta_alone.count} runs, {delta-alone.verdict}: {delta_alone.value:.1f}"
    assert filled(text) == "0 of 8 runs, supported: −0.2"


@pytest.mark.parametrize(
    "text",
    [
        "`{low}` and ``a ` {low}``", "```python\nf'{low}'\n```", "~~~\n{low}\n~~~",
        "  ```\n  {low}\n", "$x_{low}$ and $$y_{low}$$", "$a\n_{low}$",
        "\\begin{align}\nx_{low}\n\\end{align}", "{doc}`low`", "{term}`a <b>`",
        ":::{admonition} Title", "{{ low }}", "{{low}}", "{#low}", "{.low}", "{low: x`y`}", "{}",
    ],
)  # fmt: skip
def test_code_mathematics_roles_and_directives_are_left_alone(text):
    assert filled(text, low="8 of 8") == text


def test_what_only_looks_like_code_or_mathematics_is_filled():
    assert filled("costs \\$5 and {low} \\$", low=1) == "costs \\$5 and 1 \\$"
    assert filled("a ` here\n\n{low} and ` there", low=1) == "a ` here\n\n1 and ` there"
    assert filled("$ here\n\n{low} and $x$", low=1) == "$ here\n\n1 and $x$"
    assert filled(":::{tip} Title\n{low} `x` {low}\n:::", low=1) == ":::{tip} Title\n1 `x` 1\n:::"


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{lwo}", "a publishes no fact lwo: did you mean low?"),
        ("{zzz:.0%}", "a publishes no fact zzz"),
        ("{delta_alnoe.n}", "a checks no claim delta_alnoe: did you mean delta_alone?"),
        ("{delta_alone.size}", "a claim has no 'size': take value, n, count, verdict"),
        ("{low:.0%}", "the format '.0%' is not one for '8 of 8'"),
        ("{low:≤.1f}", "the format '≤.1f' is not one for '8 of 8'"),
        ("{delta_alone.value:≥.1q}", "the format '≥.1q' is not one for -0.25"),
    ],
)
def test_what_cannot_be_filled_in_is_named(text, sentence):
    with pytest.raises(UserError) as error:
        filled(text, low="8 of 8")
    assert sentence in str(error.value)


def test_a_claim_without_a_value_is_named_and_says_why(monkeypatch):
    claim = SimpleNamespace(id="w5-cost")
    found = {"w5-cost": SimpleNamespace(claim=claim, value=None, n=2, verdict="inconclusive")}
    says = r"^claim w5-cost is inconclusive and has no value: say its \.verdict or \.n$"
    with pytest.raises(UserError, match=says):
        facts.fill("{w5_cost.value}", {}, found, "a")
    monkeypatch.setattr("lowprec.evidence.claims.recorded", lambda: found)
    with pytest.raises(UserError, match=says):
        facts.locked_claim("w5-cost", "value")


@pytest.mark.parametrize("value", [None, [1], np.nan, np.inf, np.zeros(2)])
def test_a_value_that_prose_cannot_print_is_refused(value):
    with pytest.raises((UserError, ValueError)):
        facts.facts(low=value)


def test_a_name_is_an_identifier():
    with pytest.raises(UserError, match="'fa2 low'"):
        facts.facts({"fa2 low": 1})


def test_one_name_has_one_value():
    outputs = [{"data": {FACTS_MIME: {"low": 1}}}, {"data": {FACTS_MIME: {"low": 2}}}]
    assert facts.collect(outputs[:1] * 2) == {"low": 1}
    with pytest.raises(UserError, match="fact low is 1 and 2: rename one"):
        facts.collect(outputs)


def test_documents_cite_facts(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "intro.md").write_text('{{ fact("a", "low") }} {{fact( \'b\',"x")}}')
    (tmp_path / "README.md").write_text("<!--fact c.share:.0%-->3%<!--/-->")
    assert facts.cited(tmp_path) == {("a", "low"), ("b", "x"), ("c", "share")}
    facts.refuse_unused("a", {"low": 1, "own": 2}, {"own"}, tmp_path)
    with pytest.raises(UserError, match="^b publishes low, which neither its Markdown"):
        facts.refuse_unused("b", {"low": 1, "x": 2}, set(), tmp_path)


# With a real kernel

PARAMETERS = 'profile: str = "recorded"'
START = (
    "from lowprec.publish.facts import facts\n"
    "from lowprec.publish.notebook import check_parameters\n"
)


def write(path, *cells):
    first = [new_code_cell(PARAMETERS), new_code_cell(START + "check_parameters()")]
    first[0].metadata["tags"] = ["parameters"]
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    title = new_markdown_cell("# {runs} runs")
    nbformat.write(
        new_notebook(cells=[title, *first, *cells], metadata={"kernelspec": kernelspec}), path
    )
    return path


def test_a_is_filled_and_shows_no_facts(tmp_path):
    code = "import numpy as np\nfacts(runs=np.int64(8))\nfacts({'share': 1/3})\nprint('x')"
    cells = new_markdown_cell("{share:.1%} of {runs}, `{runs}`"), new_code_cell(code)
    source = write(tmp_path / "question.ipynb", *cells)
    page = notebook.execute(source, tmp_path / "page.ipynb")
    text = "\n".join(c.source for c in page.cells if c.cell_type == "markdown")
    assert text.startswith("# 8 runs\n") and "33.3% of 8, `{runs}`" in text
    assert page.metadata["lowprec"]["facts"] == {"runs": 8, "share": 1 / 3}
    assert [o.output_type for o in page.cells[-2].outputs] == ["stream"]
    assert FACTS_MIME not in (tmp_path / "page.ipynb").read_text()


@pytest.mark.parametrize("code", ["facts(run=8)", "facts(runs=8, idle=3)"])
def test_an_unknown_and_an_idle_fact_stop_the_page(tmp_path, code):
    source = write(tmp_path / "question.ipynb", new_code_cell(code))
    with pytest.raises(UserError, match="publishes no fact runs: did you|publishes idle, which"):
        notebook.execute(source, tmp_path / "page.ipynb")
    assert not (tmp_path / "page.ipynb").exists()
