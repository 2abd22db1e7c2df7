"""Verdicts follow from the rule, and nothing the book says about them can go stale unseen."""

import json
import math
import re
from pathlib import Path

import nbformat
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lowprec import UserError, claims, pages
from lowprec.notebook import as_page
from lowprec.words import CLAIM_MIME

ROOT = Path(__file__).resolve().parent.parent
ENTRY = dict(
    id="bias", sentence="The bias is negative.", source="qiu2025", tests="biased",
    gloss="Take care.", notebook="36_bias", metric="mean error in ulp", operator="<",
    threshold=0.0, n="8 sums", profile=["recorded", "gpu"],
    refuted_if="the mean error is 0 or positive", verdict="supported",
)  # fmt: skip


@pytest.fixture
def registry(tmp_path):
    """Writes a claims.yml of the entries it is called with; returns its path."""

    def write(*entries):
        path = tmp_path / "claims.yml"
        path.write_text(yaml.safe_dump(list(entries)))
        return path

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


@given(st.sampled_from(list(claims.OPERATORS)), st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_opposite_operators_give_opposite_verdicts(operator, value, threshold):
    opposite = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}[operator]
    verdicts = {
        claims.parse({**ENTRY, "operator": op, "threshold": threshold}).verdict_on(value, 8)
        for op in (operator, opposite)
    }
    assert verdicts == {"supported", "refuted"}


def test_a_profile_that_cannot_measure_a_claim_does_not_run_it(registry):
    result = claims.check("bias", math.nan, 0, path=registry({**ENTRY, "profile": "gpu"}))
    assert (result.verdict, result.value) == ("not run", None)
    assert "needs profile gpu" in result.markdown()


def test_without_an_observation_a_claim_is_not_run(registry):
    result = claims.check("bias", math.nan, 0, path=registry(ENTRY))
    assert (result.verdict, result.value) == ("not run", None)
    assert "not recorded yet" in result.markdown()


@pytest.mark.parametrize("n, words", [(0, "not recorded yet"), (5, "not yet, 5 of 8 recorded")])
def test_a_claim_whose_runs_are_to_come_has_no_verdict(registry, n, words):
    result = claims.check("bias", None, n, path=registry(ENTRY))
    assert (result.verdict, result.value) == ("not run", None)
    assert words in result.markdown()
    assert claims.Result.from_dict(result.as_dict()) == result


def test_with_all_recorded_and_nothing_to_measure_a_claim_is_inconclusive(registry):
    path = registry(ENTRY)
    for value in (None, math.nan):
        result = claims.check("bias", value, 0, path=path, complete=True)
        assert (result.verdict, result.value) == ("inconclusive", None)
        assert "nothing to measure once all is recorded, n = 0 sums, 8 needed" in result.markdown()
        assert claims.Result.from_dict(result.as_dict()) == result
    assert claims.check("bias", -1, 8, path=path, complete=True).verdict == "supported"


def test_what_nothing_can_change_is_judged_early(registry):
    path = registry(ENTRY)
    assert claims.check("bias", 1, 2, path=path).verdict == "inconclusive"
    early = claims.check("bias", 1, 2, path=path, settled=True)
    assert early.verdict == "refuted" and "n = 2 of 8" in early.measured()


@pytest.mark.parametrize(
    "operator, threshold, count, n, is_settled",
    [(">=", 3, 3, 3, True), (">=", 3, 2, 3, False), (">=", 3, 0, 2, True), (">=", 3, 0, 0, False),
     ("==", 0, 0, 3, False), ("==", 0, 1, 1, True), ("==", 4, 3, 4, True)],
)  # fmt: skip
def test_a_count_is_settled_if_what_is_missing_cannot_change_it(
    registry, operator, threshold, count, n, is_settled
):
    path = registry({**ENTRY, "operator": operator, "threshold": threshold, "n": 4})
    assert claims.settled("bias", count, n, path) == is_settled
    assert not claims.settled("bais", count, n, path), "check says that there is none"


def test_a_count_of_the_gpu_profile_is_settled_no_sooner(registry):
    entry = {**ENTRY, "operator": "==", "threshold": 0, "n": 4, "profile": "gpu"}
    assert not claims.settled("bias", 0, 3, registry(entry))
    assert claims.settled("bias", 1, 1, registry(entry))


def test_a_verdict_other_than_the_recorded_one_stops_the_build(registry):
    path = registry(ENTRY)
    assert claims.check("bias", -1, 8, path=path).verdict == "supported"
    for value, n, verdict in ((1, 8, "refuted"), (-1, 7, "inconclusive")):
        record = claims.check("bias", value, n, path=path).as_dict()
        assert record["verdict"] == verdict, "a reader who changes a parameter is not stopped"
        with pytest.raises(
            UserError, match=f"claim bias is {verdict} .* says supported: .* update"
        ):
            claims.compare([record], path)
    right = claims.check("bias", -1, 8, path=path)
    for name in ("", "forks/other", right.claim.notebook):
        claims.compare([right.as_dict()], path, name)
    with pytest.raises(UserError, match="claim bias is checked in 99_other and .*: correct one"):
        claims.compare([right.as_dict()], path, "99_other")


def test_a_refuted_claim_is_a_result(registry):
    result = claims.check("bias", 1, 8, path=registry({**ENTRY, "verdict": "refuted"}))
    assert result.verdict == "refuted"
    assert result.markdown().startswith("**Refuted.** The bias is negative.")


def test_what_was_not_measured_has_no_verdict(registry):
    path = registry(ENTRY)
    with pytest.raises(UserError, match="claim bias: the measured mean error in ulp is nan"):
        claims.check("bias", math.nan, 8, path=path)
    with pytest.raises(UserError, match="claim bias: the interval of mean error in ulp is .*nan"):
        claims.check("bias", 0.5, 8, (0.1, math.nan), path=path)
    with pytest.raises(UserError, match="there is no claim 'bais': did you mean 'bias'?"):
        claims.check("bais", 1, 8, path=path)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"operator": "=<"}, "claim bias: operator '=<' is none of"),
        ({"verdict": "true"}, "claim bias: verdict 'true' is none of"),
        ({"profile": "fast"}, "claim bias: profile 'fast' is none of"),
        ({"threshold": "zero"}, "claim bias: threshold 'zero' is not a number"),
        ({"treshold": 1}, "claim bias: unknown key 'treshold'"),
        ({"n": 0}, "claim bias: n 0 is not a number of observations"),
        ({"n": "0 sums"}, "claim bias: n 0 is not a number of observations"),
        ({"n": 7.5}, "claim bias: n 7.5 is not a number of observations"),
        ({"n": None}, "claim bias: n None is not a number of observations"),
    ],
)
def test_a_damaged_entry_is_named(registry, change, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        claims.load(registry({**ENTRY, **change}))


def test_a_misspelt_threat_is_named(registry):
    path = registry({**ENTRY, "threats": ["aftr"]})
    assert claims.load(path)["bias"].threats == ("aftr",), "no legend, no check"
    path.with_name("threats.md").write_text("(threat-after)=\n## After\n\n(threat-gpu)=\n## GPU\n")
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match="claim bias: 'aftr' is no threat of threats.md; those are"):
        claims.load(path)
    path = registry({**ENTRY, "threats": ["GPU", "after"]})
    assert claims.load(path)["bias"].exploratory


def test_missing_keys_and_repeated_ids_are_named(registry):
    for key in ("refuted_if", "n"):
        short = {k: v for k, v in ENTRY.items() if k != key}
        with pytest.raises(UserError, match=f"claim bias: key '{key}' is missing"):
            claims.load(registry(short))
    with pytest.raises(UserError, match="claim bias stands twice"):
        claims.load(registry(ENTRY, ENTRY))


def test_a_result_survives_the_notebook_file(registry):
    result = claims.check("bias", -0.25, 8, (-0.5, -0.1), note="Seen.", path=registry(ENTRY))
    data = result._repr_mimebundle_()
    assert claims.Result.from_dict(json.loads(json.dumps(data[CLAIM_MIME]))) == result
    for words in ("Supported", "mean error in ulp: −0.25 [−0.5, −0.1]", "n = 8", "Seen.", "qiu2025",
                  "Would refute it: the mean error is 0 or positive"):  # fmt: skip
        assert words in data["text/markdown"]


def test_a_claim_with_a_gloss_is_not_laid_in_its_sources_mouth(registry):
    for entry, words, source in (
        (ENTRY, "The bias is negative. *Take care.*", "Tests a statement of {cite:t}`qiu2025`."),
        ({**ENTRY, "gloss": ""}, "The bias is negative.\n\n", "Source: {cite:t}`qiu2025`."),
    ):
        box = claims.check("bias", -1, 8, path=registry(entry)).myst()
        assert words in box and source in box


@pytest.mark.parametrize(
    "text, words",
    [(None, "there are no claims at .*claims.yml"), ("\xff", "claims.yml is not valid YAML"),
     ("a: [", "claims.yml is not valid YAML.* in line 1, column 5"),
     ("- id: a\n  note: b: c", "in line 2, column 10; quote a text that has ': ' in it"),
     ("- 3", "must be a list of claims"),
     ("a: 1", "must be a list of claims")],
)  # fmt: skip
def test_a_damaged_claims_file_is_named(tmp_path, text, words):
    path = tmp_path / "claims.yml"
    if text:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=words):
        claims.load(path)


def test_a_fork_needs_no_entry():
    hypothesis = {k: v for k, v in ENTRY.items() if k not in ("id", "notebook", "verdict")}
    result = claims.judge(hypothesis, 1, 8)
    assert (result.verdict, result.registered) == ("refuted", False)
    for key in ("threshold", "n"):
        with pytest.raises(UserError, match=f"key '{key}' is missing"):
            claims.judge({k: v for k, v in hypothesis.items() if k != key}, 1, 8)


# The generated pages, in a small repository


@pytest.fixture
def repository(tmp_path, registry):
    """One claim, one notebook and its executed page; `publish()` writes the generated pages."""
    book = tmp_path / "book"
    (book / "executed").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    registry(ENTRY).rename(book / "claims.yml")
    said = [{"id": "biased", "where": "§1", "says": "It is biased."}]
    (book / "statements.yml").write_text(yaml.safe_dump(said))
    (tmp_path / "notebooks" / "36_bias.ipynb").write_text("source")
    (tmp_path / "README.md").write_text(f"# Title\n\n{pages.MARKERS[0]}\n{pages.MARKERS[1]}\n")
    return tmp_path


def execute(repository, *results):
    """Stands in for papermill: a page whose cells printed `results`."""
    cells = [new_markdown_cell("# Bias")]
    for result in results:
        output = new_output("execute_result", data=result._repr_mimebundle_())
        cells.append(new_code_cell("claims.check(...)", outputs=[output]))
    page = as_page(new_notebook(cells=cells), "36_bias", "recorded", 1.25)
    nbformat.write(page, repository / "book" / "executed" / "36_bias.ipynb")


def test_pages_say_what_was_measured(repository):
    result = claims.check("bias", -0.25, 9, path=repository / "book" / "claims.yml")
    execute(repository, result)
    pages.write(repository)
    book = repository / "book"
    linked = "[**supported**](#claim-bias)"
    paper, every = (
        (book / "_generated" / f"claims_{name}.md").read_text().splitlines()
        for name in ("paper", "all")
    )
    assert paper[-3:] == [
        "**It is biased.** §1.",
        "",
        f"- {linked}: The bias is negative. (n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}9 sums) "
        "*Take care.*",
    ]
    assert every[0] == "## Bias"
    assert every[-2:] == [
        f"- {linked}: The bias is negative.\\",
        "  Measured: mean error in ulp: −0.25, n = 9 sums. Tests a statement of {cite:t}`qiu2025`.",
    ]
    status = (book / "status.md").read_text().splitlines()[-1]
    assert status.startswith("| {doc}`/executed/36_bias` | recorded | 20")
    assert status.endswith(" s | 1 supported |")
    assert "{admonition} Supported" in (book / "_generated" / "claim-bias.md").read_text()
    downloads = book / "_generated" / "extra" / "downloads" / "36_bias"
    assert (downloads / "source.ipynb").read_text() == "source"
    assert (downloads / "executed.ipynb").is_file()
    readme = (repository / "README.md").read_text()
    assert (
        "- **supported**: The bias is negative. ([36](notebooks/36_bias.ipynb)) *Take care.*"
        in readme
    )
    counts = "All 1 claims: 1 with a rule from before the measurement (1 supported), 0 exploratory"
    for text in (readme, (book / "_generated" / "claims_counts.md").read_text()):
        assert counts in text


def test_pages_are_the_same_when_written_again(repository):
    execute(repository, claims.check("bias", -1, 8, path=repository / "book" / "claims.yml"))
    first = {path: path.read_bytes() for path in pages.write(repository)}
    assert {path: path.read_bytes() for path in pages.write(repository)} == first


def test_a_claim_that_its_notebook_does_not_check_is_an_error(repository):
    execute(repository)
    with pytest.raises(UserError, match="claim bias names notebook 36_bias, which does not check"):
        pages.write(repository)
    (repository / "book" / "executed" / "36_bias.ipynb").unlink()
    with pytest.raises(UserError, match="README.md is renewed; .* 36_bias was not executed"):
        pages.write(repository)
    assert "All 1 claims" in (repository / "README.md").read_text()


def test_a_statement_has_claims_or_a_reason_to_have_none(repository):
    file, registry = (
        repository / "book" / "statements.yml",
        claims.load(repository / "book/claims.yml"),
    )
    [said] = yaml.safe_load(file.read_text())
    why = dict(untested="one GPU", threat="GPU")
    other = {**said, "id": "other"}
    with pytest.raises(UserError, match="statement other .* why there is none"):
        pages.of_paper(registry, [said, other])
    with pytest.raises(UserError, match="statement biased .* why there is none"):
        pages.of_paper(registry, [said | why])
    for results, link in ((None, "[GPU](book/threats.md)"), ({}, "{ref}`GPU <threat-gpu>`")):
        text = pages.of_paper(registry, [said, other | why], results)
        assert text.endswith(f"- not tested here: one GPU, see the threat {link}\n")


def test_a_claim_of_a_later_notebook_waits(repository):
    (repository / "notebooks" / "36_bias.ipynb").unlink()
    pages.write(repository)
    table = (repository / "book" / "_generated" / "claims_paper.md").read_text()
    assert table.endswith("- **supported**: The bias is negative. *Take care.*\n")


def test_an_exploratory_claim_says_so(repository):
    file = repository / "book" / "claims.yml"
    file.write_text(file.read_text() + "  threats: [after, seeds]\n")
    result = claims.check("bias", -0.25, 9, path=file)
    assert "chosen after seeing these data" in result.markdown()
    assert "Doubt it first for: after, seeds." in result.markdown()
    assert claims.parse({**ENTRY, "threats": "after"}).exploratory, "one word is a list of one"
    assert "{ref}`seeds <threat-seeds>`" in result.myst()
    execute(repository, result)
    pages.write(repository)
    for page, shown in {
        "README.md": "- **supported**, exploratory: ",
        "book/_generated/claims_paper.md": "- [**supported**](#claim-bias), exploratory: ",
    }.items():
        assert shown in (repository / page).read_text()
    assert "1 exploratory (1 supported)" in (repository / "README.md").read_text()
    assert (repository / "book/_generated/threat-seeds.md").read_text().splitlines() == [
        ":::{dropdown} Claims doubted for this: 1",
        "- {doc}`/executed/36_bias`: [`bias`](#claim-bias)",
        ":::",
    ]


# The repository's own claims


def test_the_books_claims_are_whole():
    registry = claims.load(ROOT / "book" / "claims.yml")
    keys = re.findall(r"^@\w+\{([^,]+),", (ROOT / "book/references.bib").read_text(), re.MULTILINE)
    for claim in registry.values():
        assert claim.source is None or claim.source in keys, f"{claim.id}: no {claim.source} in bib"
        there = (ROOT / "notebooks" / f"{claim.notebook}.ipynb").is_file()
        assert there or claim.verdict == "not run", f"{claim.id} has a verdict without a notebook"


def test_a_claim_is_understood_without_the_one_before_it():
    """The list of all claims and other pages show a sentence without its neighbours."""
    words = "And But So Nor Or Also Then Yet It They This That These Those Its Their There Such"
    for claim in claims.load(ROOT / "book" / "claims.yml").values():
        first = re.match(r"\w*", claim.sentence)[0]
        assert first not in words.split(), f"{claim.id}: say what {first!r} leads on from"


def test_readme_has_the_claims_of_claims_yml():
    readme = (ROOT / "README.md").read_text()
    registry = claims.load(ROOT / "book" / "claims.yml")
    stale = "README.md is older than book/claims.yml: run `make book`, or\n"
    stale += "`python -m lowprec claims --write`, which renews it before it asks for the pages"
    assert pages.with_claims(readme, registry, pages.statements(ROOT / "book")) == readme, stale
