"""Notebooks: their parameters checked in the kernel, and their execution into pages of the book.

Papermill runs a notebook but takes any name and any type for a parameter, and leaves its own
traces in the output. So a notebook calls `check_parameters()` right after its `parameters` cell,
and `execute` turns what papermill returns into a page: paths and injected cells removed, and one
cell added that says how to rerun it and which figures rest on recorded GPU runs.
"""

from __future__ import annotations

import argparse
import ast
import copy
import datetime
import difflib
import html
import logging
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from lowprec import UserError
from lowprec.evidence.registry import LABORATORY, RUNNING, renamed
from lowprec.evidence.words import CLAIM_MIME, FACTS_MIME, FIGURE_MIME, PROFILES
from lowprec.publish import facts, form
from lowprec.records import reads

VECTORS = "amx_bf16", "avx512_bf16", "avx512f", "avx2"
"""Units of processors of one name, the widest first."""
TYPES = {"str": str, "int": int, "float": float, "bool": bool}
COUNTS = ("batches", "count", "directions", "draws", "per", "resamples", "rows", "seeds", "terms")
"""Parameters that count something, on whatever page: at least 1."""


# In the kernel


def declared_parameters(source: str) -> dict[str, str]:
    """Name and annotation of each `name: type = value` line of a cell, empty if it has none."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return {}
    lines = [n for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return {n.target.id: ast.unparse(n.annotation) for n in lines}


def _untyped(source: str) -> list[tuple[str, str]]:
    """Name and value of each `name = value` line of a cell."""
    plain = [n for n in ast.parse(source).body if isinstance(n, ast.Assign)]
    return [(ast.unparse(n.targets[0]), ast.unparse(n.value)) for n in plain]


def injected_parameters(source: str) -> list[str]:
    """Names that papermill assigns in the cell it injects after the parameters cell."""
    if not source.startswith("# Parameters"):
        return []
    return [n.targets[0].id for n in ast.parse(source).body if isinstance(n, ast.Assign)]


def check_parameters() -> None:
    """Check the notebook's parameters: names papermill passed, types of all, and the profile.

    Call it in the cell after `parameters`. A whole number is a valid float and becomes one.
    Raises `UserError` naming the parameter, its type and the nearest valid name.
    """
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise UserError("check_parameters() reads a notebook's cells; call it in a notebook")
    values, cells = shell.user_ns, shell.user_ns["In"]
    starts = [i for i, cell in enumerate(cells) if "profile" in declared_parameters(cell)]
    if not starts:
        raise UserError('the parameters cell must declare profile: str = "recorded"')
    declared = declared_parameters(cells[starts[-1]])
    for name, value in _untyped(cells[starts[-1]]):
        raise UserError(f"parameter {name!r} has no type: write {name}: TYPE = {value}")
    for cell in cells[starts[-1] + 1 :]:
        for name in injected_parameters(cell):
            if name not in declared:
                raise UserError(_unknown(name, declared))
    for name, annotation in declared.items():
        values[name] = _typed(name, annotation, values[name])
    if values["profile"] not in PROFILES:
        raise UserError(f"profile {values['profile']!r} is none of {', '.join(PROFILES)}")
    require_gpu(values["profile"])


class Page:
    """The start of a page: its parameters checked, one thread, and what most pages load.

    Make it in the cell after `parameters`; raises `UserError` as `check_parameters` does. One
    thread, so that sums have one order and pages can be made side by side.
    """

    def __init__(self):
        from IPython import get_ipython

        check_parameters()
        self.profile = get_ipython().user_ns["profile"]
        import torch

        torch.set_num_threads(1)

    def captures(self, pattern: str = "*.xz") -> dict:
        """The recorded captures in data/captures that match, by name: {name: Capture}.

        Raises `UserError` if there is none.
        """
        from lowprec.records.files import data_root
        from lowprec.training.capture import Capture

        paths = sorted((data_root() / "captures").glob(pattern))
        if not paths:
            raise UserError(f"no capture in data/captures is called {pattern}")
        return {path.stem: Capture.load(path) for path in paths}


def _unknown(name: str, declared: dict[str, str]) -> str:
    close = difflib.get_close_matches(name, declared, n=1)
    if close:
        return f"there is no parameter {name!r}: did you mean {close[0]!r} ({declared[close[0]]})?"
    listed = ", ".join(f"{n} ({a})" for n, a in declared.items())
    return f"there is no parameter {name!r}: this notebook takes {listed}"


def _typed(name: str, annotation: str, value):
    if annotation not in TYPES:
        raise UserError(f"parameter {name!r} is declared {annotation}: use {', '.join(TYPES)}")
    if annotation == "float" and type(value) is int:
        return float(value)
    if annotation == "str" and type(value) in (int, float):  # -p reads 256 as a number
        return str(value)
    if type(value) is not TYPES[annotation]:
        found = type(value).__name__
        raise UserError(f"parameter {name!r} takes {annotation} and was given {value!r} ({found})")
    if name in COUNTS and annotation == "int" and value < 1:
        raise UserError(f"{name}={value} must be at least 1")
    return value


def require_gpu(profile: str) -> None:
    """Raise `UserError` if the profile is `gpu` and there is no CUDA device."""
    if profile != "gpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "profile 'gpu' needs a CUDA device and there is none: use profile 'recorded', which "
            "recomputes the figures from recorded runs"
        )


# Execution


def execute(source: Path, output: Path, profile: str = "recorded", parameters: dict | None = None,
            depfile: Path | None = None):  # fmt: skip
    """Execute `source` with a profile and write `output`, a page without traces of the machine.

    The output is replaced only by a whole execution. `parameters` win over the profile's. depfile:
    where to write, for make, what the page has read; the page then has the time of its start, so
    that what changes meanwhile is newer.
    Returns the notebook. Raises `UserError` with the sentence of the failing cell, or for a verdict
    that is not the recorded one, and papermill's error with the cell's traceback if it failed for
    another reason.
    """
    import nbformat

    from lowprec.records import files

    source, output, started = Path(source), Path(output), time.time()
    _check_paths(source, output)
    files.make_folder(output.parent)
    values = {**_profile_values(profile), **(parameters or {})}
    root = files.repo_root()
    with tempfile.TemporaryDirectory() as scratch:
        nb = _run(source, values, Path(scratch), root)
        read = reads.dependencies(Path(scratch) / "reads", root)
    name = _name(source, root)
    minutes = reads.gpu_minutes(root / name for name in read)
    nb = as_page(nb, name, profile, time.time() - started, parameters, minutes)
    text = nbformat.writes(nb) + "\n"

    def put(path: Path) -> None:
        files.make_folder(path.parent)
        files.write_atomic(path, lambda file: file.write(text.encode()))
        if depfile:
            os.utime(path, (started, started))

    if depfile:
        rule = reads.rule(output, read)
        files.write_atomic(Path(depfile), lambda file: file.write(rule.encode()))
    if profile == "recorded" and not parameters:
        from lowprec.evidence import claims

        about = nb.metadata["lowprec"]
        found = about["verdicts"], about["facts"]
        try:
            differ = claims.compare(name, *found, hardware=about["hardware"])
        except UserError:  # a page of the book is kept for `claims --accept`
            if root / "notebooks" in source.resolve().parents:
                put(root / "build" / "changed" / f"{name}.ipynb")
            raise
        if differ:
            print(f"{name}: other than in its lock, made elsewhere: {', '.join(differ)}")
        (root / "build" / "changed" / f"{name}.ipynb").unlink(missing_ok=True)  # refused before
    put(output)
    return nb


def _name(source: Path, root: Path) -> str:
    """A notebook's name below notebooks/; of one that lies elsewhere by the folder it lies in."""
    home, path = (root / "notebooks").resolve(), source.resolve()
    if path.is_relative_to(home):
        return path.relative_to(home).with_suffix("").as_posix()
    folder = source.parent.name
    return f"{folder}/{source.stem}" if folder in ("forks", LABORATORY) else source.stem


def _check_paths(source: Path, output: Path) -> None:
    import nbformat

    from lowprec.records.files import repo_root

    if not source.is_file():
        names = sorted(path.name for path in source.parent.glob("[!_]*.ipynb"))
        close = [name for name in names if name.startswith(source.stem)]
        folder = source.parent.parent if source.parent.name == LABORATORY else source.parent
        old = source.relative_to(folder).with_suffix("").as_posix()
        moved = [folder / f"{new}.ipynb" for new in renamed(old, folder.parent)]
        close = close or difflib.get_close_matches(source.name, names, n=1)
        found = [*moved, *(source.parent / name for name in close)]
        hint = f"; did you mean {found[0]}?" if found else ""
        raise UserError(f"there is no notebook {source}{hint}")
    try:
        nb = nbformat.read(source, 4)
    except Exception as error:  # nbformat raises many types
        raise UserError(f"{source} is not a notebook ({type(error).__name__})") from None
    home = (repo_root() / "notebooks").resolve()
    if source.with_suffix(".claims.yml").is_file() and home not in source.resolve().parents:
        raise UserError(f"{source} has claims beside it, which are read in notebooks/forks/ alone: "
                        "move both there")  # fmt: skip
    if not any("parameters" in cell.metadata.get("tags", []) for cell in nb.cells):
        raise UserError(f"{source}: give the cell of its parameters the tag parameters")
    if output.is_dir() or output.resolve() == source.resolve():
        raise UserError(f"{output} is not replaced by a page; name another file for the page")


def _run(source: Path, values: dict, scratch: Path, root: Path):
    """What papermill returns; the kernel records what it reads in the file `reads` of scratch."""
    import papermill
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    logging.getLogger("papermill").setLevel("ERROR")  # the page tells of an unknown parameter
    # Fewer collections: what a page imports stays.
    first = "import gc; gc.set_threshold(100_000); from lowprec.records import reads; "
    first += f"reads.record({str(scratch / 'reads')!r}, {str(root)!r}); "
    first += f"reads.os.environ[{RUNNING!r}] = {str(source.resolve())!r}"
    config = Config(
        # Kernels talk through files of their own: two that start at once cannot take one port.
        KernelManager={"transport": "ipc", "ip": f"{scratch}/kernel"},
        NotebookClient={
            "extra_arguments": [f"--IPKernelApp.exec_lines={first}"],
            # Two seconds sooner. Trainings are left the time to stop their processes.
            "shutdown_kernel": "graceful" if values["profile"] == "gpu" else "immediate",
        },
    )
    try:
        return papermill.execute_notebook(
            source, None, parameters=values, kernel_name="python3", progress_bar=False,
            config=config,
        )  # fmt: skip
    except PapermillExecutionError as error:
        raise _sentence(source, error) or error from None


def _profile_values(profile: str) -> dict:
    import yaml

    from lowprec.records.files import repo_root

    folder = repo_root() / "notebooks" / "profiles"
    if profile not in PROFILES:
        raise UserError(f"profile {profile!r} is none of {', '.join(PROFILES)}")
    return yaml.safe_load((folder / f"{profile}.yaml").read_text())


def _sentence(source: Path, error) -> UserError | None:
    """The user's mistake behind a failed cell: `UserError` renders as one line in the kernel."""
    if len(error.traceback) == 1 and error.traceback[0].startswith("lowprec: "):
        return UserError(f"{source.name}: {error.traceback[0].removeprefix('lowprec: ')}")
    return None


def as_page(
    nb, name: str, profile: str, seconds: float, parameters: dict | None = None, minutes: float = 0
):
    """What papermill returned, as a page: cleaned, with provenance and the rerun cell.

    minutes: of a GPU that the campaigns it read took.

    A page with `parameters` of its own is no page of the book: its verdicts stay plain Markdown,
    and it offers nothing to download.
    """
    from lowprec.records.files import repo_root

    nb = copy.deepcopy(nb)
    if not parameters:
        nb.cells = [c for c in nb.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    outputs = [o for c in nb.cells if c.cell_type == "code" for o in c.outputs]
    for cell in nb.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code":
            outs = _merge_streams(cell.outputs)  # an empty text would show the name of its class
            data = [o.get("data", {}) for o in outs]
            seen = [d.get("text/markdown") != "" and FACTS_MIME not in d for d in data]
            cell.outputs = [o for o, see in zip(outs, seen, strict=True) if see]
    for output in outputs:
        _scrub(output)
        if parameters and CLAIM_MIME in output.get("data", {}):
            output.data["text/markdown"] += f"\n\n{_measured_with(parameters)}\n"
    about = {
        "notebook": name,
        "profile": profile,
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "gpu_minutes": round(minutes),
        "hardware": hardware(profile),
        "python": platform.python_version(),
        "torch": version("torch"),
        "verdicts": _collect(outputs, CLAIM_MIME),
        "figures": _collect(outputs, FIGURE_MIME),
        "facts": facts.collect(outputs),
    }
    _fill(nb, about)
    names = [figure["name"] for figure in about["figures"]]
    if len(names) != len(set(names)):
        raise UserError(f"{name}: two figures have one name in {', '.join(names)}; rename one")
    nb.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        "lowprec": about,
    }
    root = None if parameters else repo_root()
    form.arrange(nb, about, _rerun(about, parameters or {}), root)
    if parameters:
        title, _, rest = nb.cells[0].source.partition("\n")
        note = f"*Measured with {_given(parameters)}. The text is about the page's own parameters.*"
        nb.cells[0].source = f"{title}\n\n{note}\n{rest}"
    return nb


def _fill(nb, about: dict) -> None:
    """Put facts and the fields of claims into the Markdown cells; raises `UserError` for a claim
    with two verdicts."""
    from lowprec.evidence.verdicts import Result
    from lowprec.records.files import repo_root

    page, used = about["notebook"], set()
    found = [Result.from_dict(verdict) for verdict in about["verdicts"]]
    results = {r.claim.id: r for r in sorted(found, key=lambda r: not r.shown)}
    for one in found:
        if (other := results[one.claim.id]) != one and not one.shown:
            first, second = (f"{r.verdict} ({r.measured()})" for r in (one, other))
            raise UserError(f"{page}: claim {one.claim.id} is judged twice, {first} and {second}: "
                            "take one out, or give it an id of its own")  # fmt: skip
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source, names = facts.fill(cell.source, about["facts"], results, page)
            used |= names
    facts.refuse_unused(page, about["facts"], used, repo_root())


def _measured_with(parameters: dict) -> str:
    return (
        f"Measured with {_given(parameters)}; the sentence and its rule are about the page's own "
        "parameters."
    )


def _given(parameters: dict) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in parameters.items())


def _merge_streams(outputs: list) -> list:
    """Join neighbouring chunks of one stream, whose number depends on timing."""
    merged = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == "stream" == last.output_type and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def _scrub(output) -> None:
    """Take this machine's paths and addresses in memory out of an output's text, and hyphens for
    minus out of a table."""
    places = {Path.cwd(), Path(sys.prefix), Path.home()} - {Path("/")}
    longest_first = sorted((str(p) for p in places), key=len, reverse=True)

    def clean(text):
        for place in longest_first:
            text = text.replace(place + "/", "").replace(place, ".")
        return re.sub(r" at 0x[0-9a-f]+(?=>)", "", text)

    if output.output_type == "stream":
        output.text = clean(output.text)
    for mime, value in output.get("data", {}).items():
        if mime.startswith("text/") and isinstance(value, str):
            output.data[mime] = clean(value)
    if 'class="dataframe"' in (table := output.get("data", {}).get("text/html", "")):
        output.data["text/html"] = re.sub(r">-(?=[\d.])", ">−", table)


def _collect(outputs: list, mime: str) -> list[dict]:
    return [output.data[mime] for output in outputs if mime in output.get("data", {})]


def hardware(profile: str = "recorded") -> str:
    """The machine in words: cores and `processor`, or the GPU that the gpu profile runs on."""
    if profile == "gpu":
        import torch

        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    return f"{os.cpu_count()}-core CPU ({processor(info.read_text() if info.is_file() else '')})"


def processor(cpuinfo: str) -> str:
    """What /proc/cpuinfo calls it and the widest of its VECTORS, by which libraries choose in which
    order they sum."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    said = {key.strip(): value.split() for key, _, value in lines}
    name = " ".join(said.get("model name", [platform.machine()]))
    return ", ".join([name, *[unit for unit in VECTORS if unit in said.get("flags", ())][:1]])


def _rerun(about: dict, parameters: dict) -> str:
    """How to rerun a page and what ran where, in Markdown."""
    computed = [f for f in about["figures"] if not f["hardware"]]
    recorded: dict[str, list] = {}
    for figure in about["figures"]:
        if figure["hardware"]:
            recorded.setdefault(figure["hardware"], []).append(figure)

    def links(figures):
        return ", ".join(f'<a href="#{f["id"]}">{html.escape(f["name"])}</a>' for f in figures)

    badges = [
        f"Executed on a {html.escape(about['hardware'])} in {about['seconds']:.0f} s, "
        f"profile {about['profile']}, torch {about['torch']}."
    ]
    if computed:
        badges.append(f"Computed on this page: {links(computed)}.")
    for machine, figures in recorded.items():
        badges.append(f"Drawn from runs recorded on {html.escape(machine)}: {links(figures)}.")
    if about["gpu_minutes"]:
        badges.append(f"GPU minutes behind the runs that it reads: {about['gpu_minutes']:,}.")
    items = "\n".join(f"<li>{badge}</li>" for badge in badges)
    given = "".join(f" -p {key} {shlex.quote(str(value))}" for key, value in parameters.items())
    source = f"notebooks/{about['notebook']}.ipynb"
    return f"""Rerun this page:

```shell
papermill {source} out.ipynb -f notebooks/profiles/{about["profile"]}.yaml{given}
```

<ul class="lowprec-provenance">
{items}
</ul>"""


# Command line


def parse_value(text: str):
    """A parameter's value as papermill's own -p reads it: True, False, None, int, float or str."""
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def main(argv: list[str]) -> None:
    """Execute one notebook into a page."""
    # jsonschema would build a grammar of web addresses from it, which takes longer than all other
    # imports of papermill together; the format of notebooks has no such field.
    sys.modules.setdefault("rfc3987_syntax", None)
    from papermill.exceptions import PapermillExecutionError

    from lowprec.evidence.verdicts import Result

    parser = argparse.ArgumentParser(prog="python -m lowprec notebook", description=main.__doc__)
    parser.add_argument("source", type=Path, help="notebook to execute")
    parser.add_argument("output", type=Path, help="where the executed page goes")
    parser.add_argument("--profile", default="recorded", help=", ".join(PROFILES))
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter"
    )
    parser.add_argument("--depfile", type=Path, help="for make: what the page has read")
    args = parser.parse_args(argv)
    parameters = {name: parse_value(value) for name, value in args.p}
    try:
        nb = execute(args.source, args.output, args.profile, parameters, args.depfile)
    except PapermillExecutionError as error:
        sys.exit(f"{args.source} failed and {args.output} was left as it was.{error}")
    about = nb.metadata["lowprec"]
    verdicts = [v["verdict"] for v in about["verdicts"]]
    parts = [f"{about['seconds']:.0f} s"]
    parts += [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)]
    for verdict in about["verdicts"]:
        print(Result.from_dict(verdict))
    claims = [v["claim"] for v in about["verdicts"]]
    if loose := ", ".join(claim["id"] for claim in claims if claim["registered"] is None):
        print(f"exploratory, since no commit in `registered` has the rule: {loose}")
    if parameters and verdicts:
        print(_measured_with(parameters))
    print(f"{args.output}: {', '.join(parts)}")
