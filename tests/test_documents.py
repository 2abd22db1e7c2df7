"""Documents say what the locks have: those of the book as it is built, README as it is written."""

import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import jinja2
import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from sphinx.cmd.build import main as sphinx

from lowprec import UserError
from lowprec.evidence import registry
from lowprec.evidence.locks import write_lock
from lowprec.publish import book, facts, form, pages
from lowprec.records import manifest

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = """- id: delta-alone
  sentence: Only δ matters.
  rule: count of runs that explode == 0
  needs: 8
"""
CONF = """extensions = ["myst_nb", "lowprec.publish.book"]
nb_execution_mode = "off"
myst_enable_extensions = ["substitution"]
"""
PAGE = """# A

Of runs {{ count("delta-alone") }} explode ({{ claim('delta-alone').verdict }}), a share of
{{ fact("a_page", "share", ".1%") }}, in {{ fact("a_page", "model") }}.
"""
B = "(claim-delta-alone)=\n\n# B\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with one page, accepted, and a book of three documents."""
    for folder in ("data", "notebooks", "book"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notebooks" / "a_page.claims.yml").write_text(CLAIMS)
    nbformat.write(
        new_notebook(cells=[new_markdown_cell("# A")]), tmp_path / "notebooks/a_page.ipynb"
    )
    lock(tmp_path)
    index = "# Book\n\n```{toctree}\na\nb\n```\n"
    for name, text in {"conf.py": CONF, "index.md": index, "a.md": PAGE, "b.md": B}.items():
        (tmp_path / "book" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lock(root, value=0, **more):
    entries = {"delta-alone": {"verdict": "supported", "value": value, "n": 8}}
    held = {"share": 0.0314, "model": "`mini` and -1", **more}
    write_lock("a_page", root / "notebooks", entries, held)


def build(root):
    """(exit status, what Sphinx printed, the text of a.html)."""
    with redirect_stdout(StringIO()) as said, redirect_stderr(said):
        status = sphinx(["-W", "--keep-going", "-v", "book", "build"])
    page = root / "build" / "a.html"
    text = re.sub(r"<[^>]+>", "", page.read_text()) if page.is_file() else ""
    return status, said.getvalue(), " ".join(text.split())


def test_documents_of_the_book_say_what_the_locks_have(root):
    status, said, text = build(root)
    assert status == 0, said
    assert "Of runs 0 of 8 explode (supported), a share of 3.1%, in mini and -1." in text
    lock(root, value=3)
    status, said, text = build(root)
    assert status == 0 and "Of runs 3 of 8 explode" in text
    assert "reading sources... [100%] a" in said and "] b" not in said.partition("reading")[2]


def test_a_link_that_broke_in_an_unchanged_document_stops_the_build(root):
    assert build(root)[0] == 0
    b = root / "book" / "b.md"
    b.write_text(f"{B}\nA sentence.\n")
    status, said, _ = build(root)
    assert status == 0 and "] a" not in said.partition("writing output")[2], "b alone is written"
    b.write_text(B.replace("delta-alone", "delta"))
    status, said, _ = build(root)
    assert status != 0
    assert re.search(r"a\.md:\d+: WARNING: .*'claim-delta-alone'", said)
    assert "] a" not in said.partition("looking for now-outdated")[0], "it was not read again"


WRONG = {
    'fact("a_page", "modle")': "the lock of a_page has no fact modle: did you mean model?",
    'fact("b_page", "model")': "the lock of b_page has no fact model",
    'claim("delta-aloen").n': "no lock has a claim delta-aloen: did you mean delta-alone?",
    'claim("delta-alone").size': "a claim has no 'size': take value, n, count, verdict",
}


def test_an_unknown_name_stops_the_build(root):
    (root / "book" / "a.md").write_text("# A\n\n" + "\n\n".join(f"{{{{ {x} }}}}" for x in WRONG))
    status, said, _ = build(root)
    assert status != 0
    for sentence in WRONG.values():
        assert sentence in said


@pytest.mark.parametrize("path", sorted((ROOT / "book").glob("*.md")), ids=lambda path: path.stem)
def test_every_name_in_a_document_is_known(path):
    """As the build finds, which takes minutes."""
    env = SimpleNamespace(note_dependency=lambda lock: None)
    for name in re.findall(r"\{\{.+?\}\}", path.read_text()):
        said = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(name)
        assert said.render(env=env, **book.NAMES)


TERMS = """# G

```{glossary}
δ
    A number of a row. It is {math}`2^{-7}`.

clean δ
    {term}`δ`, clean.
```
"""


def test_the_first_use_of_a_term_leads_to_the_glossary_and_its_definition(root):
    a = "# A δ\n\n`δ` δ and clean δ; δ.\n\n| δ |\n|---|\n| δ |\n"
    for name, text in {"glossary": TERMS, "executed/a": a, "other": a}.items():
        path = root / "book" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    index = "# Book\n\n```{toctree}\na\nb\nglossary\nother\nexecuted/a\n```\n"
    (root / "book/index.md").write_text(index)
    status, said, _ = build(root)
    assert status == 0, said
    page = (root / "build/executed/a.html").read_text()
    links = re.findall(r'<a [^>]*href="../glossary.html#([^"]+)"[^>]*><span[^>]*>([^<]+)<', page)
    assert [word for _, word in links] == ["δ", "clean δ"]
    assert "glossary.html#" not in (root / "build/other.html").read_text(), "no main page"
    written = (root / "build/_static/definitions.js").read_text()
    shown = json.loads(written.removeprefix("const DEFINITIONS = ").removesuffix(";\n"))
    assert [shown[id] for id, _ in links] == [
        ["δ", "A number of a row. It is 2⁻⁷."], ["clean δ", "δ, clean."],
    ]  # fmt: skip
    assert "_static/definitions.js" in page


def test_folded_outputs_have_their_title(root):
    folded = new_code_cell("x", outputs=[new_output("display_data", data={"text/plain": "7"})])
    folded.metadata = {"tags": ["fold", "hide-input", "hide-output"], "fold": "By seed"}
    page = new_notebook(cells=[new_markdown_cell("# A"), folded])
    page.metadata["language_info"] = {"name": "python"}
    (root / "book" / "a.md").unlink()
    nbformat.write(page, root / "book" / "a.ipynb")
    status, said, text = build(root)
    assert status == 0, said
    assert "Show code cell source" in text and "By seed" in text
    assert "Show code cell output" not in text


MARKED = "<!--fact a_page.share:.1%-->{}<!--/--> of <!--claim delta-alone.count-->{}<!--/-->."


def test_marks_are_renewed(root):
    fresh = MARKED.format("3.1%", "0 of 8")
    assert facts.renewed(MARKED.format("old\ntext", "")) == fresh
    assert facts.renewed(fresh) == fresh
    with pytest.raises(UserError, match="no fact shaer: did you mean share"):
        facts.renewed("<!--fact a_page.shaer--><!--/-->")


def test_marks_say_what_the_data_have(root):
    runs = root / "data" / "runs"
    for name in (
        "mini/low-seed0",
        "mini/low-seed1",
        "mini/low-seed0/captures",
        "sites/only_o-seed0",
    ):
        (runs / name).mkdir(parents=True, exist_ok=True)
        (runs / name / "run.json").write_text("{}")
    (runs / "pairs").mkdir()
    (runs / "pairs" / "weights.parquet").write_text("")
    (runs / "packed").mkdir()
    (runs / "packed" / "runs.jsonl").write_text("{}\n")
    (root / "data" / "text.json").write_text('{"tokens": 12345, "wheels": [{}, {}]}')
    manifest.write_manifest()

    def said(mark):
        return re.fullmatch(r"<!--.*-->(.*)<!--/-->", facts.renewed(f"<!--{mark}--><!--/-->"))[1]

    assert [said(f"runs {n}.recorded") for n in ("mini", "packed", "all")] == ["2", "1", "4"]
    assert said("data text.tokens:,") == "12,345" and said("data text.wheels") == "2"
    for mark, sentence in {
        "runs mnii.recorded": "the manifest has no runs of mnii: did you mean mini?",
        "runs pairs.recorded": "the manifest has no runs of pairs",
        "runs mini.planned": "of the runs of mini there is no 'planned': take recorded",
        "data test.tokens": "there is no test.json in data/, for its tokens",
        "data text.token": "text.json of data/ has no key token: did you mean tokens?",
    }.items():
        with pytest.raises(UserError, match=re.escape(sentence)):
            said(mark)
    (runs / "packed" / "runs.jsonl").unlink()
    with pytest.raises(UserError, match="data/runs/packed has no runs.jsonl; restore it from git"):
        said("runs packed.recorded")


def test_claims_write_renews_readme_and_the_page_about_the_data(root):
    (root / "README.md").write_text("<!-- claims -->\n<!-- /claims -->\n" + MARKED)
    (root / "data" / "README.md").write_text(MARKED)
    (root / "data" / "run.json").write_text("{}")
    (root / "book" / "statements.yml").write_text("[]")
    manifest.write_manifest()
    (root / "data" / "run.json").write_text("{ }")
    registry, found = pages.claims.load(), pages.claims.recorded()
    pages.renew(root, registry, found)
    for path in (root / "README.md", root / "data" / "README.md"):
        assert path.read_text().endswith(MARKED.format("3.1%", "0 of 8"))
    with pytest.raises(UserError, match="manifest: run.json differs; restore"):
        manifest.verify()
    assert json.loads((root / "data" / "manifest.json").read_text())["README.md"]


def test_the_marks_of_readme_and_the_page_about_the_data_are_fresh():
    for path in (ROOT / "README.md", ROOT / "data" / "README.md"):
        assert facts.renewed(path.read_text()) == path.read_text()


# What documents refer to, which the builder would only find out late

BOOK = ROOT / "book"
DOCUMENTS = sorted(path.stem for path in BOOK.glob("*.md") if path.stem != "status")


@pytest.mark.parametrize("page", DOCUMENTS)
def test_what_a_page_refers_to_exists(page):
    text = (BOOK / f"{page}.md").read_text()
    for target in re.findall(r"\]\((?!https?:|_generated/)([^)#]+)\)", text):
        source = target.replace("executed/", "../notebooks/")
        assert (BOOK / source).is_file(), f"{page} links to {target}"
    for name in re.findall(r"\{doc\}`(?:[^`<]*<)?([\w/]+)>?`", text):
        known = (BOOK / f"{name}.md").is_file() or name == "status"  # which is generated
        assert known or (ROOT / f"{name.replace('executed', 'notebooks')}.ipynb").is_file()
    entries = re.findall(r"^@\w+\{([^,]+),", (BOOK / "references.bib").read_text(), re.MULTILINE)
    for key in re.findall(r"\{cite:[tp]\}`([^`]+)`", text):
        assert key in entries, f"{page} cites {key}"
    every = "".join((BOOK / f"{name}.md").read_text() for name in DOCUMENTS)
    labels = re.findall(r"^\(([\w-]+)\)=$", every, re.MULTILINE)
    for label in re.findall(r"\{ref\}`[^`<]+<([\w-]+)>`", text):
        assert label in labels, f"{page} refers to {label}"
    glossary = (BOOK / "glossary.md").read_text().splitlines()
    for term in re.findall(r"\{term\}`(?:[^`<]*<)?([^`>]+)>?`", text):
        assert term in glossary, f"{page}: the glossary has no {term}"
    for id in re.findall(r"_generated/claim-([\w-]+)\.md", text):
        assert id in registry.load(), f"{page} shows claim {id}"


def test_the_pages_are_in_the_contents():
    parts = form.contents(ROOT)
    files = sum(parts.values(), [])
    assert sorted(f for f in files if "/" not in f) == sorted([*DOCUMENTS, "status"])
    executed = sorted(f"executed/{name}" for name in registry.pages(ROOT / "notebooks"))
    assert sorted(f for f in files if f.startswith("executed/")) == executed, "mend _toc.yml"


def test_a_page_of_the_laboratory_is_linked_from_a_main_page():
    for name in registry.pages(ROOT / "notebooks"):
        if "/" in name:
            assert " of <a href" in form.position(name, ROOT), f"no main page links to {name}"


def test_threats_say_how_many_campaigns_their_table_of_predictions_has():
    text = (ROOT / "book" / "threats.md").read_text()
    title, table = re.search(r"before the runs, (.*) campaigns\n(.*?)\n:::", text, re.S).groups()
    listed, recorded = re.findall(r"^\| `", table, re.M), ROOT.glob("data/runs/*/campaign.yaml")
    assert title == f"{len(listed)} of {len(list(recorded))}"


def test_icons_that_no_page_shows_are_left_out(tmp_path):
    script = tmp_path / "fontawesome.js"
    search = 'search:[3,4,[8,"glass"],"f1",["M1","M2"]],'
    script.write_text(f'a={{"up":[1,2,[9],"f0","M1 2"],{search}x:[5,6,[],"f2","M"]}};b')
    (tmp_path / "page.html").write_text('<i class="fa-solid fa-glass fa-lg"></i>')
    book._leave_out_icons(script, book._icons(tmp_path))
    assert script.read_text() == f"a={{{search}}};b"


KERNEL = {"name": "python3", "display_name": "Python 3"}


@pytest.mark.parametrize(
    "address",
    ["", pytest.param("https://github.com/someone/lowprec", marks=pytest.mark.slow)],
)
def test_a_page_opens_its_notebook_where_the_repository_is_public(tmp_path, address):
    """A book of the real settings and four pages, two of a folder, that have a title each."""
    book_folder, every = tmp_path / "book", sorted(registry.pages(ROOT / "notebooks"))
    names = every[:2] + [name for name in every if "/" in name][:2]
    config = yaml.safe_load((ROOT / "book" / "_config.yml").read_text())
    config["sphinx"]["config"]["html_theme_options"]["repository_url"] = address
    config["sphinx"]["config"].update(html_extra_path=[], templates_path=[])
    config["html"].pop("favicon")
    for name in names:
        cell = new_markdown_cell(f"# {name}")
        nb = new_notebook(cells=[cell], metadata={"kernelspec": KERNEL})
        path = book_folder / "executed" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, path)
    files = [f"executed/{name}" for name in names]
    toc = {"format": "jb-book", "root": files[0], "chapters": [{"file": f} for f in files[1:]]}
    for file, text in {"_config.yml": config, "_toc.yml": toc}.items():
        (book_folder / file).write_text(yaml.safe_dump(text))
    (book_folder / "references.bib").touch()
    builder = [Path(sys.executable).with_name("jupyter-book"), "build", book_folder, "-q"]
    done = subprocess.run(builder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        text = (book_folder / "_build" / "html" / "executed" / f"{name}.html").read_text()
        links = re.findall(r'href="(https://(?:mybinder|colab)[^"]+)"', text)
        if not address:
            assert not links
            continue
        binder, colab = links
        assert binder.startswith(
            "https://mybinder.org/v2/gh/someone/lowprec/main?urlpath=lab/tree/"
        )
        start = "https://colab.research.google.com/github/someone/lowprec/blob/main/"
        assert colab.startswith(start)
        for file in (binder.partition("lab/tree/")[2], colab.removeprefix(start)):
            assert file == f"notebooks/{name}.ipynb" and (ROOT / file).is_file()
