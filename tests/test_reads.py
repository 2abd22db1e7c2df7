"""What a page reads is recorded, whatever reads it, and make executes the pages it concerns."""

import contextlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from safetensors.numpy import save_file

from lowprec import UserError
from lowprec.__main__ import main
from lowprec.evidence import claims
from lowprec.evidence.locks import write_lock
from lowprec.evidence.registry import in_order
from lowprec.publish import facts, form, limits, pages
from lowprec.records import manifest, packed, reads

ROOT = Path(__file__).resolve().parent.parent

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def test_a_rule_names_what_is_gone_as_well():
    text = reads.rule(Path("book/a.ipynb"), ["data/a b", "data/c#$"])
    assert text == (
        "book/a.ipynb: \\\n  data/a\\ b \\\n  data/c\\#$$\n\ndata/a\\ b:\ndata/c\\#$$:\n"
    )


def test_gpu_minutes_are_those_of_runs_on_their_own_or_packed(tmp_path):
    gpu = dict(name="a-seed0", hardware="NVIDIA H200", seconds=90.0, processes=1, arm="a",
               ended="completed", config=dict(policy="FA2", seed=0))  # fmt: skip
    infos = [
        gpu, gpu | dict(name="b", processes=4), gpu | dict(name="c", hardware="CPU", seconds=600.0)
    ]  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(gpu))
    lines = [packed.line(info, infos[:i]) for i, info in enumerate(infos)]
    (tmp_path / "runs.jsonl").write_text("".join(lines))
    files = [tmp_path / name for name in ("run.json", "metrics.parquet", "runs.jsonl")]
    assert reads.gpu_minutes(files) == 1.5 + 1.5 + 6
    assert reads.gpu_minutes(files[1:2]) == 0
    sittings = dict(seconds=150.0, steps=6, processes=1, earlier=[dict(steps=4, processes=4)])
    (tmp_path / "run.json").write_text(json.dumps(gpu | sittings))
    assert reads.gpu_minutes(files[:1]) == 5  # 50 s a step on one GPU


def test_what_is_made_is_no_dependency(tmp_path):
    kept = ["data/x.json", "lowprec/evidence/heads.py", "book/references.bib"]
    made = [
        "build/x", "runs/a/run.json", "book/executed/a.ipynb", "book/_generated/a.md", ".git/HEAD",
        ".venv/lib/x.py", "data/runs/.a.part/x", "lowprec.egg-info/PKG-INFO",
        "notebooks/b_page.claims.yml", "notebooks/b_page.lock.json", "book/threats.md",
        "book/_toc.yml",
    ]  # fmt: skip
    lines = [f"read\t{tmp_path}/{name}\n" for name in (*kept, *made)]
    lines += [f"claims\t{tmp_path}/notebooks/a_page.claims.yml\n", "read\t/etc/hosts\n"]
    compiled = "lowprec/studies/__pycache__/kept.cpython-311.pyc"
    lines += [f"read\t{tmp_path}/{compiled}\n", f"listed\t{tmp_path}/lowprec\n"]
    (tmp_path / "log").write_text("".join(lines))
    expected = {*kept, "notebooks/a_page.claims.yml", "lowprec/studies/kept.py"}
    assert set(reads.dependencies(tmp_path / "log", tmp_path)) == expected


# A small book: a repository with two pages and one of the laboratory, executed by its own make

ONE = """import json
import lzma
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.numpy import load_file
from lowprec import claims
from lowprec.records.files import data_root
from lowprec.studies import one

data = data_root()
pd.read_parquet(data / "pandas.parquet")
pd.read_parquet(data / "columns.parquet", columns=["a"])
pq.read_table(data / "arrow.parquet")
pq.read_table(str(data / "filtered.parquet"), filters=[("a", ">", 1)])
with pq.ParquetFile(data / "file.parquet") as file:
    file.read()
pq.read_schema(data / "schema.parquet")
with safe_open(data / "open.safetensors", framework="numpy") as file:
    file.get_tensor("a")
load_file(data / "load.safetensors")
np.load(data / "array.npy")
lzma.open(data / "packed.xz").read()
json.loads((data / "text.json").read_text())
pd.read_csv(data / "table.csv")
found = [path.parent.name for path in sorted((data / "runs" / "mini").glob("*/run.json"))]
(data / "later" / "to-come.json").is_file()
claims.check(two_runs=len(found))
"""
READ = (
    "pandas.parquet", "columns.parquet", "arrow.parquet", "filtered.parquet", "file.parquet",
    "schema.parquet", "open.safetensors", "load.safetensors", "array.npy", "packed.xz", "text.json",
    "table.csv",
)  # fmt: skip
TWO = "from lowprec import claims\nfrom lowprec.studies import two\nclaims.check(one_is_one=1)"
CLAIM = "- id: {}\n  sentence: A claim.\n  rule: number == {}\n  needs: 1\n"


NEW = """# Another `x` < y

**Question.** Is it?

**Answer.** It is: [why](laboratory/b_more.ipynb)."""
IN_LABORATORY = "# More\n\n**Question.** Why?\n\n**Answer.** {two} < 3."
TOC = """root: intro
parts:
  - caption: "Part I: All"
    chapters:
      - file: executed/a_page
      - file: executed/b_page
  - caption: Laboratory
    chapters:
      - file: executed/laboratory/b_more
"""
MORE = """from lowprec import claims
from lowprec.publish.facts import facts

claims.check(zero_is_zero=0)
facts(two=2)"""
EVERY = ["a_page", "b_page", "laboratory/b_more"]


def write_notebook(path, title, code):
    cells = [new_markdown_cell(title), new_code_cell('profile: str = "recorded"')]
    cells[1].metadata["tags"] = ["parameters"]
    cells.append(new_code_cell(code))
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)


def write_data(data):
    frame = pd.DataFrame({"a": [1, 2], "b": [3, 4]})
    for name in READ:
        if name.endswith(".parquet"):
            frame.to_parquet(data / name)
        elif name.endswith(".safetensors"):
            save_file({"a": np.zeros(2)}, data / name)
        else:
            (data / name).write_text("{}")
    np.save(data / "array.npy", np.zeros(2))
    (data / "packed.xz").write_bytes(lzma.compress(b"{}"))
    for run in ("low-seed0", "low-seed1"):
        (data / "runs" / "mini" / run).mkdir(parents=True)
        (data / "runs" / "mini" / run / "run.json").write_text("{}")
    (data / "README.md").write_text("About the data.")


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(root, *words):
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", *words], cwd=root, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The repository after `make book`, with a jupyter-book that only says it was called."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copy(ROOT / "Makefile", root)
    shutil.copytree(
        ROOT / "lowprec", root / "lowprec", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "notebooks" / "profiles", root / "notebooks" / "profiles")
    for name in ("one", "two", "unused"):
        (root / "lowprec" / "studies" / f"{name}.py").write_text("")
    (root / "data").mkdir()
    write_data(root / "data")
    manifest.write_manifest(root / "data")
    (root / "notebooks" / "laboratory").mkdir()
    every = (
        ("a_page", "# A page", ONE, "two-runs", 2, {}),
        ("b_page", NEW, TWO, "one-is-one", 1, {}),
        ("laboratory/b_more", IN_LABORATORY, MORE, "zero-is-zero", 0, {"two": 2}),
    )
    for name, title, code, id, value, said in every:
        write_notebook(root / "notebooks" / f"{name}.ipynb", title, code)
        (root / "notebooks" / f"{name}.claims.yml").write_text(CLAIM.format(id, value))
        entries = {id: dict(verdict="supported", value=value, n=1)}
        write_lock(name, root / "notebooks", entries, said)
    (root / "book").mkdir()
    (root / "book" / "statements.yml").write_text("[]")
    (root / "book" / "_toc.yml").write_text(TOC)
    (root / "README.md").write_text("<!-- claims -->\n<!-- /claims -->\n")
    for name in ("constraints.txt", "pyproject.toml"):
        (root / name).touch()
    script(root / ".venv/bin/python", f'PYTHONPATH="{root}" exec "{sys.executable}" "$@"')
    script(root / ".venv/bin/jupyter-book", "mkdir -p book/_build/html && echo built")
    (root / ".venv" / ".stamp").touch()
    assert executed(make(root, "book")) == EVERY
    return root


def executed(output):
    return sorted(re.findall(r"-m lowprec notebook notebooks/([\w/]+)\.ipynb", output))


def depends_on(root, name):
    page = root / "book" / "executed" / name
    text = (page.parent / f".{page.name}.d").read_text()
    return set(text.partition("\n\n")[0].replace("\\\n", " ").split()[1:])


@needs_make
def test_a_page_depends_on_all_that_it_read_and_on_nothing_else(book):
    first, second = depends_on(book, "a_page"), depends_on(book, "b_page")
    here = {"data/runs/mini", "data"}  # listed; the folder in which `later` would be
    files = {path for path in first if path.startswith("data/") and (book / path).is_file()}
    assert files == {f"data/{name}" for name in READ} and here <= first
    assert "lowprec/studies/one.py" in first and "lowprec/studies/two.py" not in first
    assert "notebooks/a_page.claims.yml" in first and "notebooks/b_page.claims.yml" not in first
    for name in EVERY[1:]:
        of_others = {path for path in depends_on(book, name) if not path.startswith("lowprec/")}
        assert of_others == {f"notebooks/{name}.claims.yml"}
    assert {
        "lowprec/publish/notebook.py",
        "lowprec/publish/form.py",
        "lowprec/evidence/verdicts.py",
    } <= first & second
    assert not {"lowprec/publish/pages.py", "lowprec/__main__.py"} & (first | second)


CHANGES = {
    "lowprec/studies/one.py": ["a_page"],
    "lowprec/studies/unused.py": [],
    "lowprec/publish/form.py": EVERY,
    "lowprec/publish/pages.py": [],
    "notebooks/a_page.claims.yml": ["a_page"],
    "notebooks/a_page.lock.json": [],
    "notebooks/b_page.ipynb": ["b_page"],
    "notebooks/laboratory/b_more.ipynb": ["laboratory/b_more"],
    "notebooks/laboratory/b_more.claims.yml": ["laboratory/b_more"],
    "data/README.md": [],
    "data/manifest.json": [],
    "data/pandas.parquet": ["a_page"],
    "data/load.safetensors": ["a_page"],
    "constraints.txt": EVERY,
}


@contextlib.contextmanager
def unchanged(root):
    """Gives every file and folder below its time back."""
    times = {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}
    yield
    for path, time in times.items():
        os.utime(path, ns=(time, time))


@needs_make
def test_nothing_is_executed_or_built_when_nothing_changed(book):
    assert make(book, "book") == "make: Nothing to be done for 'book'.\n"


@needs_make
@pytest.mark.parametrize("changed, pages", CHANGES.items())
def test_a_change_executes_the_pages_that_read_it(book, changed, pages):
    with unchanged(book):
        (book / changed).touch()
        assert executed(make(book, "-n", "book")) == pages


@needs_make
@pytest.mark.parametrize(
    "changed, builds",
    [
        ("a_page.lock.json", True),
        ("laboratory/b_more.lock.json", True),
        ("forks/a.claims.yml", False),
    ],
)
def test_a_lock_builds_the_book_again_and_a_fork_does_not(book, changed, builds):
    with unchanged(book):
        file = book / "notebooks" / changed
        file.parent.mkdir(exist_ok=True)
        file.touch()
        assert ("jupyter-book build" in make(book, "-n", "book")) == builds
        if not builds:
            shutil.rmtree(file.parent)


@needs_make
def test_a_run_more_executes_the_page_that_lists_its_campaign(book):
    with unchanged(book):
        more = book / "data" / "runs" / "mini" / "low-seed2"
        more.mkdir()
        (more / "run.json").write_text("{}")
        assert executed(make(book, "-n", "book")) == ["a_page"]
        shutil.rmtree(more)


@needs_make
def test_what_was_not_there_executes_the_page_once_it_is(book):
    with unchanged(book):
        (book / "data" / "later").mkdir()
        assert executed(make(book, "-n", "book")) == ["a_page"]
        (book / "data" / "later").rmdir()


@needs_make
@pytest.mark.parametrize("name", ["lowprec/studies/one.py", "data/table.csv"])
def test_what_is_gone_executes_the_page_and_is_no_error(book, name):
    with unchanged(book):
        kept = (book / name).read_bytes()
        (book / name).unlink()
        assert executed(make(book, "-n", "book")) == ["a_page"]
        (book / name).write_bytes(kept)


@needs_make
def test_a_page_without_a_record_of_what_it_read_is_executed(book):
    with unchanged(book):
        record = book / "book" / "executed" / ".b_page.d"
        kept = record.read_bytes()
        record.unlink()
        assert executed(make(book, "-n", "book")) == ["b_page"]
        record.write_bytes(kept)


@needs_make
def test_a_page_has_the_time_of_its_start(book):
    """So what is changed while it runs makes it old."""
    page = book / "book" / "executed" / "a_page.ipynb"
    assert page.stat().st_mtime < (page.parent / ".a_page.d").stat().st_mtime


# What is written from the pages


@pytest.fixture
def written(book, monkeypatch):
    """The same, with an html folder; what a test changes in it is given back."""
    monkeypatch.chdir(book)
    (book / "book" / "_build" / "html").mkdir(exist_ok=True)
    page = book / "book" / "executed" / "b_page.ipynb"
    kept, toc = page.read_text(), book / "book" / "_toc.yml"
    yield book
    page.write_text(kept)
    toc.write_text(TOC)
    pages.write(book)


def state(root):
    return {path: path.stat().st_mtime_ns for path in (root / "book" / "_generated").rglob("*")}


def test_what_did_not_change_is_not_written_again(written):
    pages.write(written)
    before = state(written)
    pages.write(written)
    assert state(written) == before and len(before) > 5
    assert (written / "book" / "_build" / "html").is_dir()


def test_what_is_no_longer_generated_is_removed(written):
    old = written / "book" / "_generated" / "extra" / "downloads" / "b_more" / "source.ipynb"
    old.parent.mkdir()
    old.write_text("{}")
    pages.write(written)
    assert not old.exists()


def test_another_title_writes_all_pages_anew(written):
    pages.write(written)
    page = written / "book" / "executed" / "b_page.ipynb"
    page.write_text(page.read_text().replace("# Another", "# Yet another"))
    pages.write(written)
    assert not (written / "book" / "_build" / "html").exists()


def test_the_place_of_a_page_follows_the_contents_and_not_its_time(written):
    page = written / "book" / "executed" / "b_page.ipynb"
    assert "Part I, page 2 of 2 · 1 minute to read" in page.read_text()
    time = page.stat().st_mtime_ns
    toc = TOC.replace("      - file: executed/a_page\n", "")
    (trees := written / "book" / "_build" / ".doctrees").mkdir(parents=True)
    pages.write(written)
    assert trees.exists()
    (written / "book" / "_toc.yml").write_text(toc)
    pages.write(written)
    assert "Part I, page 1 of 1" in page.read_text() and page.stat().st_mtime_ns == time
    assert not trees.exists()  # they would show it as it was
    copied = written / "book" / "_generated" / "extra" / "downloads" / "b_page" / "executed.ipynb"
    assert copied.read_text() == pages.offered(page.read_text())


# The laboratory


def test_a_page_of_the_laboratory_names_its_main_page_and_offers_its_files(written):
    pages.write(written)
    page = nbformat.read(written / "book" / "executed" / "laboratory" / "b_more.ipynb", 4)
    place = page.cells[0].source
    assert 'Laboratory of <a href="../b_page.html">Another x &lt; y</a> · 1 minute' in place
    assert '"../../downloads/laboratory/b_more/source.ipynb" download="b_more.ipynb"' in place
    offered = written / "book" / "_generated" / "extra" / "downloads" / "laboratory" / "b_more"
    source = (written / "notebooks" / "laboratory" / "b_more.ipynb").read_text()
    assert (offered / "source.ipynb").read_text() == source


def test_a_page_of_the_laboratory_that_no_page_links_to_names_none(written):
    source = written / "notebooks" / "b_page.ipynb"
    kept = source.read_text()
    source.write_text(kept.replace("laboratory/b_more", "laboratory/b_mores"))
    assert form.position("laboratory/b_more", written) == "Laboratory"
    source.write_text(kept)


def test_the_claims_of_the_laboratory_stand_with_the_others(written):
    pages.write(written)
    listed = (written / "book" / "_generated" / "claims_all.md").read_text()
    main, more = "{doc}`/executed/b_page`", "## More\n\nPage: {doc}`/executed/laboratory/b_more`"
    assert listed.index(main) < listed.index(more)
    assert "- [**supported**](#claim-zero-is-zero), exploratory: A claim." in listed
    assert facts.locked_fact("laboratory/b_more", "two") == "2"
    measured = limits.pages(written)
    assert list(measured) == EVERY and measured["laboratory/b_more"]["answer"] == 2


def test_old_pages_and_claims_keep_their_addresses(written):
    table = written / "book" / "redirects.yml"
    table.write_text("executed/10_old: executed/laboratory/b_more\n")
    pages.write(written)
    table.unlink()
    extra = written / "book" / "_generated" / "extra"
    old, claim = (extra / f"{name}.html" for name in ("executed/10_old", "claim/one-is-one"))
    assert 'href="../executed/laboratory/b_more.html"' in old.read_text()
    assert 'href="../executed/b_page.html#claim-one-is-one"' in claim.read_text()


def test_all_claims_stand_in_the_order_of_the_contents(written):
    toc = TOC.replace("a_page", "first").replace("b_page", "a_page").replace("first", "b_page")
    (written / "book" / "_toc.yml").write_text(toc)
    assert in_order(EVERY, written) == ["b_page", "a_page", "laboratory/b_more"]
    of_claims = {claim.page: None for claim in claims.load(written / "notebooks").values()}
    assert list(of_claims) == list(limits.pages(written)) == in_order(EVERY, written)
    pages.write(written)
    listed = (written / "book" / "_generated" / "claims_all.md").read_text()
    assert re.findall("executed/(.*)`", listed) == ["b_page", "a_page", "laboratory/b_more"]
    rows = (written / "book" / "status.md").read_text()
    assert re.findall("executed/(.*?)`", rows) == ["b_page", "a_page", "laboratory/b_more"]


@pytest.mark.parametrize(
    "text, name",
    [("b_page", "b_page"), ("b", "b_page"), ("laboratory/b", "laboratory/b_more"),
     ("b_m", "laboratory/b_more"), ("notebooks/laboratory/b_more.ipynb", "laboratory/b_more")],
)  # fmt: skip
def test_of_two_pages_with_one_beginning_the_main_one_is_meant(written, text, name, capsys):
    assert claims.page_named(text, written / "notebooks") == name
    time = (written / "notebooks" / f"{name}.lock.json").stat().st_mtime_ns
    assert main(["claims", "--accept", text]) == 0
    assert f"{name}.lock.json: nothing changed" in capsys.readouterr().out
    assert (written / "notebooks" / f"{name}.lock.json").stat().st_mtime_ns > time


def test_a_page_that_the_laboratory_has_not_is_asked_back(written):
    with pytest.raises(UserError, match="'laboratory/c' is no page .*mean laboratory/b_more"):
        claims.page_named("laboratory/c", written / "notebooks")
