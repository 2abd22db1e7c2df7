"""The first screens: short, true to the locks, and with commands and links that work; and the word
for each statement of the paper."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lowprec import UserError, claims
from lowprec.__main__ import COMMANDS
from lowprec.evidence.words import FIGURE_MIME
from lowprec.publish import facts, form, limits, pages, statements

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
README = (ROOT / "README.md").read_text()
INTRO = (BOOK / "intro.md").read_text()
SCREENS = ("README.md", "data/README.md", *(f"book/{name}.md" for name in (
    "intro", "how_to_read", "take_it_home", "write_kernels", "statements", "argument"
)))  # fmt: skip


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_is_short_and_begins_with_the_commands():
    lines = README.splitlines()
    assert len(lines) <= 130
    assert next(i for i, line in enumerate(lines) if line.startswith("```")) < 24
    listed = README.split(pages.FINDINGS[0])[1].split(pages.FINDINGS[1])[0].strip().splitlines()
    assert [line.partition(".")[0] for line in listed] == [str(i) for i in range(1, 11)]


def test_the_introduction_is_short():
    caption, standing = 45, 20  # words of what it includes
    text = re.sub(r"^```.*?^```", "", INTRO, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\{\{.*?\}\}", "8 of 8", text)
    assert len(form.words(text)) + caption + standing <= 900
    assert max(len(form.words(sentence)) for sentence in limits.sentences([text])) <= 35
    assert INTRO.count("```{include}") == 2 and "δ = rowsum(dO∘O)" in text


@pytest.mark.parametrize("name", SCREENS)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        source = target.replace("executed/", "../notebooks/")
        assert ((ROOT / name).parent / source).is_file(), f"{name} links to {target}"
    labels = "".join(path.read_text() for path in BOOK.glob("*.md"))
    for label in re.findall(r"\]\(#([\w-]+)\)", text):
        known = label.removeprefix("claim-") in claims.load() or f"({label})=" in labels
        assert known, f"{name} links to {label}"


@pytest.mark.parametrize("name", SCREENS)
def test_what_is_said_of_locks_is_in_them(name):
    """What the builder would fill in; it stops at a name that is not there."""
    text = (ROOT / name).read_text()
    cited = re.findall(r"""\{\{ claim\("([\w-]+)"(?:, "(.*?)")?\)\.(\w+) \}\}""", text)
    for id, how, part in cited:
        assert facts.locked_claim(id, part, how)
    said = re.findall(r"""\{\{ fact\("([\w-]+)", "(\w+)"\) \}\}""", text)
    for page, name_of in said:
        assert facts.locked_fact(page, name_of)
    assert text.count("{{") == len(cited) + len(said)


def test_the_blocks_of_readme_run():
    code = blocks(README, "python")
    assert len(code) == 2
    for block in code:
        subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True)


def test_the_commands_of_readme_are_there():
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = "".join(blocks(README, "shell")).splitlines()
    assert len(lines) == 6
    for line in lines:
        words = line.split("#")[0].split()
        if words[0] == "make":
            assert words[1] in targets
        if "lowprec" in words:
            assert words[words.index("lowprec") + 1] in COMMANDS
        for word in words:
            if word.startswith("notebooks/") and "forks" not in word:
                assert (ROOT / word).is_file()


def test_the_parameter_that_readme_changes_is_one_of_the_page():
    page, name = re.search(r"papermill (\S+) .* -p (\w+)", README).groups()
    cells = json.loads((ROOT / page).read_text())["cells"]
    [cell] = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    assert re.search(rf"^{name}: ", "".join(cell["source"]), re.MULTILINE)


def test_the_claims_of_the_argument_stand_on_their_side():
    """Each row of its table: what the link is, the claims for it, those against it."""
    rows = re.findall(r"^\| \d\..*$", (BOOK / "argument.md").read_text(), re.MULTILINE)
    assert len(rows) == 6
    found = claims.recorded()
    for row in rows:
        _, link, carry, against, _ = row.split("|")
        for id in re.findall(r"#claim-([\w-]+)", link + carry):
            # Refuted as "`FA2` is mostly harmless", which is what the link says.
            known = "refuted" if id == "explosion-fa2-safe" else "supported"
            assert found[id].verdict == known, id
        for id in re.findall(r"#claim-([\w-]+)", against):
            assert found[id].verdict == "refuted", id


# README's picture


def test_the_picture_of_readme_is_that_of_its_page(tmp_path):
    page, figure = pages.PICTURE
    data = {FIGURE_MIME: {"name": figure}, "image/png": base64.b64encode(b"new").decode()}
    nb = {"cells": [{"outputs": [{"data": data}, {"data": {"text/plain": "1"}}]}, {}]}
    path = tmp_path / "book" / "_static" / f"{figure}.png"
    assert path.relative_to(tmp_path).as_posix() in README
    pages.renew_picture(tmp_path, {"other": nb})
    assert not path.exists()
    pages.renew_picture(tmp_path, {page: nb})
    assert path.read_bytes() == b"new"
    time = path.stat().st_mtime_ns
    pages.renew_picture(tmp_path, {page: nb})
    assert path.stat().st_mtime_ns == time


@pytest.mark.book
def test_the_picture_is_fresh():
    page, figure = pages.PICTURE
    nb = json.loads((BOOK / "executed" / f"{page}.ipynb").read_text())
    assert pages.pictures(nb)[figure] == (BOOK / "_static" / f"{figure}.png").read_bytes()


# The word for a statement

RULE = dict(sentence="It is.", rule="number == 1", needs=1, source="qiu2025", tests="biased")
WAYS = [
    ({}, "holds"),
    ({"other": "refuted"}, "holds in part"),
    ({"bias": "refuted"}, "does not hold here"),
    ({"bias": "inconclusive"}, "not tested here"),
    ({"bias": "inconclusive", "other": "supported"}, "holds"),
    ({"other": "inconclusive"}, "holds"),
]


def judged(verdicts, counts, glosses=("bias", "other")):
    """The word for a statement whose claims have these verdicts."""
    registry, found = {}, {}
    for id, verdict in verdicts.items():
        gloss = "A reason." if id in glosses else ""
        registry[id] = claims.parse(dict(RULE, id=id, gloss=gloss))
        found[id] = claims.Result(registry[id], verdict, 1, 8)
    said = {"id": "biased", "where": "§1", "says": "It is.", "counts": counts}
    [(statement, some)] = statements.of_paper(registry, [said])
    return statements.word_of(statement, some, found)


@pytest.mark.parametrize("verdicts, word", WAYS)
def test_a_statement_has_the_word_that_its_claims_give(verdicts, word):
    assert judged({"bias": "supported"} | verdicts, {}) == word


def test_a_statement_says_how_a_claim_counts():
    both = {"bias": "supported", "other": "refuted"}
    assert judged(both, {"other": "neither"}) == "holds"
    assert judged(both, {"bias": "against"}) == "does not hold here"
    assert judged(both, {"bias": "against", "other": "for"}) == "holds in part"
    for verdict in ("inconclusive", "not run"):  # counts neither way, whatever is said
        assert judged({"bias": "supported", "other": verdict}, {"other": "against"}) == "holds"
    for id, way, glosses in (("third", "for", both), ("bias", "pro", both), ("bias", "for", ())):
        with pytest.raises(UserError, match=f"biased .* counts {id} .* has a gloss"):
            judged(both, {id: way}, glosses)


def test_the_statements_of_the_paper_have_words_by_the_rule():
    said = yaml.safe_load((BOOK / "statements.yml").read_text())
    text = (BOOK / "statements.md").read_text()
    words = re.findall(r"^\*\*.*\. \*([A-Z][a-z ]+)\.\*$", text, re.MULTILINE)
    assert len(words) == len(said) and {word.lower() for word in words} == set(statements.WORDS)
