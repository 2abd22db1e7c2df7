"""Parameters are checked in the kernel; an executed notebook becomes a clean page or nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import IPython
import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lowprec import UserError
from lowprec.publish import limits, notebook

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = 'profile: str = "recorded"\nseeds: int = 3\nlr: float = 2e-3\nquick: bool = False'
CHECK = "from lowprec.publish.notebook import check_parameters\ncheck_parameters()"


# The check, with a stand-in for the kernel


def kernel(monkeypatch, *cells):
    """A kernel that has executed `cells`; returns its names."""
    names = {"In": ["", *cells]}
    for cell in cells:
        exec(cell, names)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(user_ns=names))
    return names


def test_parameters_that_are_right_pass(monkeypatch):
    kernel(monkeypatch, "x = 1", PARAMETERS, "# Parameters\nseeds = 5\nprofile = 'recorded'\n")
    notebook.check_parameters()


def test_parameters_may_be_edited_without_papermill(monkeypatch):
    kernel(monkeypatch, PARAMETERS)
    notebook.check_parameters()


def test_a_whole_number_is_a_float(monkeypatch):
    names = kernel(monkeypatch, PARAMETERS, "# Parameters\nlr = 1\n")
    notebook.check_parameters()
    assert type(names["lr"]) is float


def test_a_number_is_a_text_where_one_is_declared(monkeypatch):
    declared = PARAMETERS + '\ntiles: str = "512 64"\n'
    names = kernel(monkeypatch, declared, "# Parameters\ntiles = 64\n")
    notebook.check_parameters()
    assert names["tiles"] == "64"


def test_a_cell_run_again_counts_in_its_last_form(monkeypatch):
    again = PARAMETERS.replace("seeds: int", "seed_count: int")
    kernel(monkeypatch, PARAMETERS, again, "# Parameters\nseed_count = 4\n")
    notebook.check_parameters()


@pytest.mark.parametrize(
    "injected, sentence",
    [
        ("sedes = 5", "there is no parameter 'sedes': did you mean 'seeds' (int)?"),
        ("zzz = 5", "there is no parameter 'zzz': this notebook takes profile (str), seeds (int)"),
        ("seeds = 'all'", "parameter 'seeds' takes int and was given 'all' (str)"),
        ("seeds = 2.5", "parameter 'seeds' takes int and was given 2.5 (float)"),
        ("seeds = True", "parameter 'seeds' takes int and was given True (bool)"),
        ("quick = 1", "parameter 'quick' takes bool and was given 1 (int)"),
        ("lr = None", "parameter 'lr' takes float and was given None (NoneType)"),
        ("profile = 'fast'", "profile 'fast' is none of recorded, gpu"),
        ("seeds = 0", "seeds=0 must be at least 1"),
    ],
)
def test_a_wrong_parameter_is_named(monkeypatch, injected, sentence):
    kernel(monkeypatch, PARAMETERS, f"# Parameters\n{injected}\n")
    with pytest.raises(UserError) as error:
        notebook.check_parameters()
    assert str(error.value).startswith(sentence)


def test_a_parameter_without_a_type_is_told(monkeypatch):
    kernel(monkeypatch, PARAMETERS + "\nterms = 200", "# Parameters\nterms = 100\n")
    with pytest.raises(UserError, match="'terms' has no type: write terms: TYPE = 200"):
        notebook.check_parameters()


def test_claims_beside_a_notebook_elsewhere_are_not_passed_over(tmp_path):
    source = write_notebook(tmp_path / "question.ipynb")
    source.with_suffix(".claims.yml").touch()
    with pytest.raises(UserError, match="has claims beside it, which are read in notebooks/forks"):
        notebook.execute(source, tmp_path / "page.ipynb")


def test_a_notebook_without_a_parameters_cell_is_told(monkeypatch):
    kernel(monkeypatch, "x: int = 1")
    with pytest.raises(UserError, match='must declare profile: str = "recorded"'):
        notebook.check_parameters()


def test_a_page_starts_with_its_parameters_checked_and_one_thread(monkeypatch):
    names = kernel(monkeypatch, PARAMETERS, "# Parameters\nlr = 1\n")
    torch.set_num_threads(2)
    page = notebook.Page()
    assert (page.profile, type(names["lr"]), torch.get_num_threads()) == ("recorded", float, 1)
    assert list(page.captures("low-c-seed*.xz")) == ["low-c-seed6-1230"]
    assert page.captures("gpt2/low-*.xz")
    with pytest.raises(UserError, match="no capture in data/captures is called fa3"):
        page.captures("fa3*.xz")
    kernel(monkeypatch, PARAMETERS, "# Parameters\nsedes = 5\n")
    with pytest.raises(UserError, match="no parameter 'sedes'"):
        notebook.Page()


def test_values_from_the_command_line_get_papermills_types():
    values = [notebook.parse_value(text) for text in ("3", "1e-3", "True", "None", "LOW", "1.0")]
    assert values == [3, 1e-3, True, None, "LOW", 1.0]
    assert [type(v) for v in values[:2]] == [int, float]


# Execution, with a real kernel


def write_notebook(path, *code):
    cells = [new_markdown_cell("# A question"), new_code_cell(PARAMETERS), new_code_cell(CHECK)]
    cells[1].metadata["tags"] = ["parameters"]
    cells += [new_code_cell(source) for source in code]
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)
    return path


VERDICT = """from lowprec import claims
claims.judge(dict(sentence="Two is small.", rule="two < 3", needs=1, source="qiu2025"), 2, 1)"""
FIGURE = """from IPython.display import display
about = dict(name="{0}", id="figure-{0}", alt="a", caption="c", hardware={1!r})
data = {{"text/html": "<figure></figure>", "application/vnd.lowprec.figure+json": about}}
display(data, raw=True)"""


def test_a_page_carries_its_provenance_and_no_trace_of_the_machine(tmp_path):
    source = write_notebook(
        tmp_path / "question.ipynb",
        "import os, sys\nprint(os.getcwd() + '/data')\nprint(sys.prefix)",
        FIGURE.format("live", None),
        FIGURE.format("loss", "NVIDIA H200"),
        VERDICT,
    )
    page = notebook.execute(source, tmp_path / "out" / "page.ipynb")
    text = (tmp_path / "out" / "page.ipynb").read_text()
    for trace in (str(ROOT), sys.prefix, str(tmp_path), "papermill.record", "injected-parameters"):
        assert trace not in text
    about = page.metadata["lowprec"]
    assert (about["notebook"], about["profile"]) == ("question", "recorded")
    assert [v["verdict"] for v in about["verdicts"]] == ["supported"]
    assert [f["name"] for f in about["figures"]] == ["live", "loss"]
    rerun = page.cells[-1].source
    assert "papermill notebooks/question.ipynb out.ipynb -f notebooks/profiles/recorded" in rerun
    assert 'Computed on this page: <a href="#figure-live">live</a>.' in rerun
    assert 'recorded on NVIDIA H200: <a href="#figure-loss">loss</a>.' in rerun
    assert "{cite:t}`qiu2025`" in page.cells[-2].outputs[0].data["text/markdown"]
    assert not [name for name in os.listdir(tmp_path / "out") if name != "page.ipynb"]
    nbformat.validate(page)


def test_a_table_is_the_same_text_in_every_execution(tmp_path):
    table = "from lowprec.publish.plots import show_table\nimport pandas as pd\n"
    source = write_notebook(tmp_path / "question.ipynb", table + "show_table(pd.DataFrame([1]))")
    page = notebook.execute(source, tmp_path / "page.ipynb")
    (output,) = page.cells[-2].outputs
    assert output.data["text/plain"] == "<pandas.io.formats.style.Styler>"


def test_a_home_at_the_root_is_no_trace(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    output = new_output("stream", text="2/3 of </b>\n")
    notebook._scrub(output)
    assert output.text == "2/3 of </b>\n"


def test_a_page_with_parameters_says_so_and_reads_without_the_book(tmp_path):
    source = write_notebook(tmp_path / "question.ipynb", VERDICT)
    page = notebook.execute(source, tmp_path / "page.ipynb", "recorded", {"seeds": 7})
    rerun = page.cells[-1].source
    assert "-f notebooks/profiles/recorded.yaml -p seeds 7\n" in rerun
    assert not any("download" in cell.source for cell in page.cells)
    verdict = page.cells[-2].outputs[0].data["text/markdown"]
    assert verdict.startswith("**Supported.** Two is small.") and "cite" not in verdict
    assert "\n\nMeasured with `seeds=7`; the sentence" in verdict
    title = page.cells[0].source.splitlines()[2]
    assert title.startswith("*Measured with `seeds=7`. The text is about")


def test_a_failed_execution_keeps_the_older_page(tmp_path):
    source = write_notebook(tmp_path / "question.ipynb", "1 / 0")
    output = tmp_path / "page.ipynb"
    output.write_text("older")
    command = [sys.executable, "-m", "lowprec", "notebook", source, output]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert output.read_text() == "older"
    assert sorted(os.listdir(tmp_path)) == ["page.ipynb", "question.ipynb"]


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("seeds", "parameter 'seeds' takes int and was given 'all' (str)"),
        ("seed", "there is no parameter 'seed': did you mean 'seeds' (int)?"),
    ],
)
def test_a_users_mistake_is_one_sentence(tmp_path, caplog, name, sentence):
    source = write_notebook(tmp_path / "question.ipynb")
    with pytest.raises(UserError) as error:
        notebook.execute(source, tmp_path / "page.ipynb", "recorded", {name: "all"})
    assert str(error.value) == f"question.ipynb: {sentence}"
    assert not caplog.records, "papermill would warn"
    assert not (tmp_path / "page.ipynb").exists()


def test_an_empty_text_leaves_no_output(tmp_path):
    code = "from IPython.display import Markdown\ndisplay(Markdown('')); Markdown('x')"
    source = write_notebook(tmp_path / "question.ipynb", code)
    page = notebook.execute(source, tmp_path / "page.ipynb")
    assert [o.data["text/markdown"] for o in page.cells[-2].outputs] == ["x"]


def test_a_table_shows_minus_signs():
    html = '<table class="dataframe"><td>-0.5</td><td>fa2-seed1</td><td>a -1</td></table>'
    cell = new_code_cell("t", outputs=[new_output("display_data", data={"text/html": html})])
    nb = new_notebook(cells=[new_markdown_cell("# A"), cell])
    page = notebook.as_page(nb, "11", "recorded", 1)
    shown = page.cells[-2].outputs[0].data["text/html"]
    assert shown == html.replace("-0.5", "−0.5")


def test_two_figures_of_one_name_are_refused(tmp_path):
    figure = FIGURE.format("loss", None)
    source = write_notebook(tmp_path / "question.ipynb", figure, figure)
    with pytest.raises(UserError, match="two figures have one name"):
        notebook.execute(source, tmp_path / "page.ipynb")


def test_a_verdict_that_changed_unseen_stops_the_build_and_not_the_reader(tmp_path):
    source, output = tmp_path / "page.ipynb", tmp_path / "out.ipynb"
    code = "claims.check('addition-worked-example', 1.0, 1)"
    write_notebook(source, "from lowprec import claims", code)
    with pytest.raises(
        UserError, match="addition-worked-example: verdict is refuted .* says supported"
    ):
        notebook.execute(source, output)
    assert not output.exists()
    page = notebook.execute(source, output, "recorded", {"profile": "recorded"})
    assert page.metadata["lowprec"]["verdicts"][0]["verdict"] == "refuted"


def test_a_page_that_agrees_replaces_one_that_was_refused(tmp_path):
    source = write_notebook(tmp_path / "page_of_a_test.ipynb")
    refused = ROOT / "build" / "changed" / source.name
    refused.parent.mkdir(parents=True, exist_ok=True)
    refused.write_text("refused")
    notebook.execute(source, tmp_path / "out.ipynb")
    assert not refused.exists()


def test_a_notebook_is_called_by_where_it_lies_below_notebooks(tmp_path):
    for path, name in [
        ("notebooks/the_explosion", "the_explosion"), ("notebooks/forks/a", "forks/a"),
        ("notebooks/forks/mine/the_explosion", "forks/mine/the_explosion"),
        ("elsewhere/forks/a", "forks/a"), ("elsewhere/mine/the_explosion", "the_explosion"),
    ]:  # fmt: skip
        assert notebook._name(tmp_path / f"{path}.ipynb", tmp_path) == name


def test_an_unknown_profile_or_notebook_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no notebook [^;]*$"):
        notebook.execute(tmp_path / "none.ipynb", tmp_path / "page.ipynb")
    source = write_notebook(tmp_path / "question.ipynb")
    for name in ("quest.ipynb", "question", "qestion.ipynb"):
        with pytest.raises(UserError, match=r"; did you mean .*question.ipynb\?$"):
            notebook.execute(tmp_path / name, tmp_path / "page.ipynb")
    (tmp_path / "book").mkdir()
    moved = "executed/11_why: executed/question\nexecuted/laboratory/11_a: executed/laboratory/b"
    (tmp_path / "book" / "redirects.yml").write_text(moved)
    for old, new in (("11_why", "question"), ("laboratory/11_a", "laboratory/b")):
        with pytest.raises(UserError, match=rf"; did you mean .*/notebooks/{new}.ipynb\?$"):
            notebook.execute(tmp_path / "notebooks" / f"{old}.ipynb", tmp_path / "page.ipynb")
    with pytest.raises(UserError, match="profile 'fast' is none of"):
        notebook.execute(source, tmp_path / "page.ipynb", "fast")


@pytest.mark.parametrize("text", ["{", "[]", "3", "{}", '{"nbformat": 4}', "\xff"])
def test_a_file_that_is_no_notebook_is_named(tmp_path, text):
    source = tmp_path / "question.ipynb"
    source.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="question.ipynb is not a notebook"):
        notebook.execute(source, tmp_path / "page.ipynb")


def test_parameters_without_their_tag_are_told(tmp_path):
    source = write_notebook(tmp_path / "question.ipynb")
    nb = nbformat.read(source, 4)
    del nb.cells[1].metadata["tags"]
    nbformat.write(nb, source)
    with pytest.raises(UserError, match="give the cell of its parameters the tag parameters"):
        notebook.execute(source, tmp_path / "page.ipynb")


def test_a_page_replaces_neither_its_source_nor_a_folder(tmp_path):
    source = write_notebook(tmp_path / "question.ipynb")
    before = source.read_bytes()
    for output in (source, tmp_path / "a" / ".." / source.name, tmp_path):
        with pytest.raises(UserError, match="is not replaced by a page"):
            notebook.execute(source, output)
    with pytest.raises(UserError, match="cannot make the folder .*question.ipynb: "):
        notebook.execute(source, source / "page.ipynb")
    assert source.read_bytes() == before and os.listdir(tmp_path) == [source.name]


@pytest.mark.slow
def test_papermill_itself_ends_with_the_sentence(tmp_path):
    source = write_notebook(tmp_path / "question.ipynb")
    profile = ROOT / "notebooks" / "profiles" / "recorded.yaml"
    command = [sys.executable, "-m", "papermill", source, tmp_path / "out.ipynb", "-f", profile]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-p", "profile", "gpu"],
        cwd=ROOT, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    sentence = "profile 'gpu' needs a CUDA device and there is none"
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith(f"lowprec: {sentence}")


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Copies the template as book/fork.md says, in a repository of which data/ alone is not empty;
    returns the copied notebook."""
    for folder in ("notebooks/forks", "book"):
        (tmp_path / folder).mkdir(parents=True)
    one = "notebooks/where_the_sign_comes_from"
    for name in ("data", "notebooks/profiles", f"{one}.ipynb", f"{one}.claims.yml",
                 "book/threats.md", "book/_toc.yml", "notebooks/_template.ipynb",
                 "notebooks/_template.claims.yml"):  # fmt: skip
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "book" / "fork.md").read_text()
    copies = re.findall(r"^cp .*$", page, re.MULTILINE)
    assert len(copies) == 2
    for copy in copies:
        subprocess.run(copy.split(), check=True)
    return tmp_path / "notebooks" / "forks" / "mine.ipynb"


def verdicts(page):
    assert page.metadata["lowprec"]["figures"] and page.metadata["lowprec"]["seconds"] < 60
    return [v["verdict"] for v in page.metadata["lowprec"]["verdicts"]]


def test_the_template_runs_and_reaches_a_verdict(tmp_path, fork):
    source = ROOT / "notebooks" / "_template.ipynb"
    (fork.parent / "other.claims.yml").write_text("- id: running-sum-short\n  rule: [")
    page = notebook.execute(fork, tmp_path / "page.ipynb")
    assert verdicts(page) == ["supported", "supported"]
    assert limits.beyond(limits.of_source(json.loads(source.read_text()))) == []
    assert limits.beyond(limits.of_page(page)) == []
    assert "the sum is 49 % too small" in page.cells[0].source


@pytest.mark.parametrize("registered", [False, True])
def test_a_fork_says_what_no_commit_has_registered(registered, tmp_path, fork, capsys):
    """Also one without a cell of its prediction."""
    nb = nbformat.read(fork, 4)
    nb.cells = [cell for cell in nb.cells if cell.id != "prediction"]
    nbformat.write(nb, fork)
    if registered:
        claims = fork.with_suffix(".claims.yml")
        claims.write_text(
            claims.read_text().replace("  needs: 16", "  needs: 16\n  registered: abcdef0")
        )
    notebook.main([str(fork), str(tmp_path / "page.ipynb")])
    said = "since no commit in `registered` has the rule: running-sum-short, running-sum-fair\n"
    assert (said in capsys.readouterr().out) != registered
    page = (tmp_path / "page.ipynb").read_text()
    assert page.count("No commit in `registered` says") == 2 * (not registered)


def test_what_a_fork_says_is_explained_where_its_verdict_is():
    _, _, page = (ROOT / "book" / "fork.md").read_text().partition("## 4. Read the verdict")
    said = page.partition("\n## ")[0]
    assert "exploratory" in said and "`registered: " in said


CELLS = ("question", "prediction", "parameters", "load", "measure", "figure", "verdict")
"""The cells that the blocks of book/fork.md replace, in its order."""


def test_the_example_of_the_fork_page_runs_and_reaches_a_verdict(tmp_path, fork):
    page = (ROOT / "book" / "fork.md").read_text()
    found = re.findall(r"^```(\w+)\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    [registered] = [text for kind, text in found if kind == "yaml"]
    fork.with_suffix(".claims.yml").write_text(registered)
    blocks = [text for kind, text in found if kind in ("markdown", "python")]
    nb = nbformat.read(fork, 4)
    cells = {cell.id: cell for cell in nb.cells}
    for id, block in zip(CELLS, blocks, strict=True):
        cells[id].source = block
    nbformat.write(nb, fork)
    page = notebook.execute(fork, tmp_path / "page.ipynb", parameters={"names": "fa2-b"})
    assert verdicts(page) == ["inconclusive", "inconclusive"]
    assert any("papermill notebooks/forks/mine.ipynb" in c.source for c in page.cells)
    assert not any("downloads" in c.source or "{" in c.source.partition(":::")[0]
                   for c in page.cells if c.cell_type == "markdown")  # fmt: skip
    assert limits.beyond(limits.of_page(page)) == []


def test_the_fork_page_keeps_short():
    assert len((ROOT / "book" / "fork.md").read_text().split()) <= 1400
