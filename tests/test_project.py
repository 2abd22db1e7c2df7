"""The repository keeps its rules: pins agree, notebooks are stripped, make runs what changed."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lowprec
from lowprec.evidence.registry import pages

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [ROOT / f"notebooks/{name}.ipynb" for name in (*pages(ROOT / "notebooks"), "_template")]
PYTHONS = ("3.11", "3.12", "3.13")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def direct_requirements():
    extras = project()["optional-dependencies"].values()
    lines = [*project()["dependencies"], *(line for extra in extras for line in extra)]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins(lines):
    found = {}
    for line in lines:
        name, version = re.fullmatch(r"([\w.-]+)={1,2}([\w.]+)(?: ;.*)?", line).groups()
        found[canonicalize_name(name)] = version
    return found


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return pins(line for line in lines if line and not line.startswith("#"))


def test_constraints_pin_every_direct_dependency_within_its_range():
    fixed = constraints()
    for name, requirement in direct_requirements().items():
        assert name in fixed, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(fixed[name]), f"{requirement} excludes {fixed[name]}"
    assert fixed["torch"] == "2.13.0"
    assert fixed["triton"] == "3.7.1"


def test_constraints_pin_what_the_dependencies_pull_in():
    """On each Python of ours, not on this one alone."""
    fixed = constraints()
    linux = dict(sys_platform="linux", platform_system="Linux", platform_machine="x86_64")
    wanted, seen = [*direct_requirements().values()], set()
    while wanted:
        here = wanted.pop()
        name = canonicalize_name(here.name)
        assert name in fixed, f"constraints.txt does not pin {name}"
        with contextlib.suppress(metadata.PackageNotFoundError):  # another Python installs it
            needs = [Requirement(line) for line in metadata.requires(name) or ()]
            for need, python, extra in product(needs, PYTHONS, {"", *here.extras}):
                on = dict(python_version=python, python_full_version=f"{python}.9", extra=extra)
                cuda = name == "torch" and need.name.startswith(("nvidia", "cuda"))
                if need not in seen and not cuda:
                    if need.marker is None or need.marker.evaluate(linux | on):
                        wanted.append(need)
                        seen.add(need)


def test_environment_yml_has_the_same_pins():
    *conda, last = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = [line for line in conda if line != "pip" and not line.startswith("python>")]
    assert last["pip"][-1] == "-e ."
    environment = pins([*conda, *last["pip"][:-1]])
    fixed = constraints()
    assert environment == {name: fixed[name] for name in direct_requirements()}


def test_every_direct_dependency_says_why():
    text = (ROOT / "pyproject.toml").read_text()
    for name in direct_requirements():
        line = re.search(rf'^ *"{name.replace("-", "[-_]")}\W.*$', text, re.MULTILINE)
        assert line and "#" in line[0], f"pyproject.toml does not say why it needs {name}"


def test_licence_version_and_citation_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lowprec.__version__
    released = f"## {citation['version']}, {citation['date-released']}\n"
    assert released in (ROOT / "book" / "changelog.md").read_text()
    assert citation["license"] == project()["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License\n")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_stripped(path):
    nb = json.loads(path.read_text())
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            carries = cell["outputs"] or cell["execution_count"]
            assert not carries, f"{path.name} carries outputs: take them out with `make strip`"
        assert "papermill" not in cell["metadata"], f"{path.name}: `make strip` and save it again"
    assert "papermill" not in nb["metadata"], f"{path.name} is papermill's output, not a source"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_has_the_form_that_readers_and_papermill_rely_on(path):
    nb = json.loads(path.read_text())
    assert nb["metadata"]["kernelspec"]["name"] == "python3"
    cells = nb["cells"]
    title = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown" and title.startswith("# ")
    assert re.search(r"(?ms)^\*\*Question\.\*\* .+^\*\*Answer\.\*\* .", title)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert "parameters" in code[0]["metadata"].get("tags", [])
    assert "".join(code[0]["source"]).startswith('profile: str = "recorded"')
    assert re.search(r"\b(check_parameters|Page)\(\)", "".join(code[1]["source"]))
    leads = [cell["id"] for cell in code if "lead" in cell["metadata"].get("tags", [])]
    assert len(leads) == 1, "tag the cell of the figure that a reader should see first with `lead`"
    shown = [cell["id"] for cell in code if re.search(r'["\n]##+ \w', "".join(cell["source"]))]
    assert not shown, f"{shown}: a heading in an output is missing from the page's contents"


def test_lint():
    command = [sys.executable, "-m", "ruff", "check", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_import_is_light():
    code = (
        "import sys, time; t = time.perf_counter(); import lowprec; "
        "print(time.perf_counter() - t, 'torch' in sys.modules)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    seconds, torch = zip(*(run.split() for run in runs), strict=True)
    assert set(torch) == {b"False"}
    assert min(map(float, seconds)) < 0.3


def test_tracked_files_stay_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    data = {path: size for path, size in sizes.items() if path.is_relative_to(ROOT / "data")}
    of = Counter(code=sum(sizes.values()) - sum(data.values()))
    for path, size in data.items():
        part = path.relative_to(ROOT / "data").parts[0]
        of[part if part in ("runs", "captures") else "rest"] += size
    assert of["runs"] < 59.01e6 and of["captures"] < 17.51e6 and of["rest"] < 3.48e6, of  # 80 MB
    assert of["code"] < 6e6, of


@pytest.mark.parametrize("words", [["tarin"], ["claims", "--writ"]])
def test_a_mistyped_command_fails(words):
    command = [sys.executable, "-m", "lowprec", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if words == ["tarin"]:
        assert done.stderr == "lowprec: there is no command 'tarin': did you mean train?\n"


def test_a_reader_that_has_read_enough_ends_a_command_quietly():
    command = [sys.executable, "-m", "lowprec", "claims"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline().startswith("supported")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_without_a_gpu_the_tests_that_need_one_stop_at_once():
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", "gpu", "--collect-only"]
    no_gpu = os.environ | dict(LOWPREC_GPU_TESTS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, cwd=ROOT, env=no_gpu, capture_output=True, text=True)
    assert done.returncode == 2
    assert "need an NVIDIA GPU and there is none" in done.stdout + done.stderr


# make, in a folder with empty stand-ins for the package, the data and the notebooks


def make(folder, *words, **variables):
    assignments = [f"{name}={value}" for name, value in variables.items()]
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", *words, *assignments], cwd=folder, capture_output=True, text=True, env=environment
    )


BUILDER = (
    "publish/addresses",
    "publish/book",
    "publish/facts",
    "publish/form",
    "publish/pages",
    "publish/statements",
    "publish/terms",
    "evidence/claims",
    "evidence/verdicts",
)


EVERY = ["a_page", "b_page", "laboratory/c"]


@pytest.fixture
def built(tmp_path):
    """The stand-in after `make book`: every product newer than what it is made from."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    sources = (
        "notebooks/a_page.ipynb", "notebooks/b_page.ipynb", "notebooks/laboratory/c.ipynb",
        "notebooks/profiles/recorded.yaml", "notebooks/profiles/gpu.yaml", "data/run.parquet",
        "data/README.md", "book/statements.yml", "book/intro.md", "README.md",
        *(f"lowprec/{name}.py" for name in BUILDER),
    )  # fmt: skip
    products = (
        ".venv/.stamp", *(f"book/executed/{name}.ipynb" for name in EVERY),
        "book/executed/.a_page.d", "book/executed/.b_page.d", "book/executed/laboratory/.c.d",
        "book/_build/.stamp",
    )  # fmt: skip
    for age, name in enumerate((*sources, "constraints.txt", "pyproject.toml", *products)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9 + age, 1e9 + age))
    return tmp_path


def executed(output):
    return sorted(re.findall(r"-m lowprec notebook notebooks/([\w/]+)\.ipynb", output))


@needs_make
def test_make_does_nothing_when_nothing_changed(built):
    done = make(built, "-n", "book")
    assert (done.returncode, executed(done.stdout)) == (0, [])
    assert "jupyter-book" not in done.stdout


@needs_make
@pytest.mark.parametrize(
    "changed, notebooks",
    [
        ("notebooks/a_page.ipynb", ["a_page"]),
        ("notebooks/laboratory/c.ipynb", ["laboratory/c"]),
        ("notebooks/profiles/recorded.yaml", EVERY),
        ("notebooks/profiles/gpu.yaml", []),
        ("data/run.parquet", []),  # which no page has read: tests/test_reads.py has the others
        ("constraints.txt", EVERY),
        ("book/intro.md", []),
        ("book/statements.yml", []),
    ],
)
def test_make_executes_what_a_change_touches(built, changed, notebooks):
    (built / changed).touch()
    done = make(built, "-n", "book")
    assert executed(done.stdout) == notebooks
    built_anew = "jupyter-book build" in done.stdout
    assert built_anew == (changed not in ("notebooks/profiles/gpu.yaml", "data/run.parquet"))
    from_nothing = "rm -rf book/_build\n" in done.stdout
    assert from_nothing == (changed in ("constraints.txt", "book/statements.yml"))


@needs_make
def test_make_notebooks_keeps_profiles_apart(built):
    done = make(built, "-n", "notebooks", PROFILE="gpu")
    assert executed(done.stdout) == EVERY
    assert "build/gpu/a_page.ipynb --profile gpu" in done.stdout
    page = "build/gpu/laboratory/c.ipynb --profile gpu --depfile build/gpu/laboratory/.c.d"
    assert page in done.stdout
    done = make(built, "notebooks", PROFILE="gpus")
    assert done.returncode != 0 and "take recorded or gpu" in done.stderr


@needs_make
def test_a_page_whose_notebook_is_gone_leaves_the_book(built):
    for name in ("b_page", "laboratory/c"):
        (built / "notebooks" / f"{name}.ipynb").unlink()
    (built / "book" / "intro.md").touch()
    done = make(built, "-n", "book")
    assert "rm -f book/executed/b_page.ipynb book/executed/laboratory/c.ipynb\n" in done.stdout


@needs_make
@pytest.mark.parametrize(
    "memory, words, together",
    [(6_000_000, [], True), (4_000_000, [], False), (100, [], False), (6_000_000, ["-j1"], False),
     (100, ["-j2"], True), (6_000_000, ["clean"], False)],
)  # fmt: skip
def test_pages_are_made_side_by_side_if_there_is_memory(built, memory, words, together):
    (built / "notebooks" / "laboratory" / "c.ipynb").unlink()
    for page in (built / "book" / "executed").glob("*.ipynb"):
        page.unlink()
    said = 'test "$3" != notebook || { echo start >> log; sleep 0.5; echo end >> log; }'
    for name, text in {"python": said, "jupyter-book": "mkdir -p book/_build"}.items():
        script = built / ".venv" / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    (built / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {memory} kB\n")
    done = make(built, *words, "book", CORES="2", MEMORY="meminfo")
    assert done.returncode == 0, done.stderr
    log = (built / "log").read_text().split()
    assert log == (["start", "start", "end", "end"] if together else ["start", "end"] * 2)


@needs_make
@pytest.mark.parametrize("minor", [9, 15])
def test_make_refuses_a_python_without_wheels_of_the_pins(built, minor):
    shutil.rmtree(built / ".venv")
    pretend = f"import sys; sys.version_info = (3, {minor}, 1); exec(sys.argv[2])"
    other = built / "python3.x"
    other.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{pretend}' \"$@\"\n")
    other.chmod(0o755)
    done = make(built, "test", PYTHON="./python3.x")
    assert done.returncode != 0
    assert done.stderr.startswith(f"lowprec needs Python 3.11 to 3.14 and ./python3.x is 3.{minor}")
    assert not (built / ".venv").exists()


@needs_make
def test_make_refuses_a_missing_python(built):
    shutil.rmtree(built / ".venv")
    done = make(built, "book", PYTHON="python3.99")
    assert done.returncode != 0
    assert done.stderr.startswith("python3.99 is not there: install Python 3.11 to 3.14")
