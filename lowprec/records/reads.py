"""What a page reads, so that make executes it again when that has changed and only then.

`lowprec.publish.notebook.execute` starts the kernel with `record`, which writes a line for each
file of the repository that is opened to read, each folder that is listed, and each path that is
looked for and not there. `rule` turns them into a rule for make, as C compilers do for headers.

Python announces what it opens and lists (its audit events). Parquet and safetensors are opened
below Python, so their readers announce it here. The claims of all pages are read at once and used
one by one: who uses one says so with `note`, and their files are left out otherwise. So is the
contents of the book, which gives them their order.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from importlib.util import source_from_cache
from pathlib import Path

CLAIMS, ABSENT = "lowprec.evidence.claims", "lowprec.absent"
"""Audit events of our own."""
KINDS = {"open": "read", "os.listdir": "listed", "os.scandir": "listed", CLAIMS: "claims",
         ABSENT: "absent"}  # fmt: skip
OF_CLAIMS = (".claims.yml", ".lock.json", "threats.md", "_toc.yml")
MADE = (("build",), ("runs",), ("shards",), ("book", "executed"), ("book", "_build"),
        ("book", "_generated"))  # fmt: skip


def note(path) -> None:
    """Say that a page depends on a file of claims; heard only where something records."""
    sys.audit(CLAIMS, os.fspath(path))


# In the kernel


def record(log: str, root: str) -> None:
    """From now on, write to `log` what is read, listed or looked for below `root`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    inside, seen = os.path.join(root, ""), set()

    def heard(event: str, args: tuple) -> None:
        if event not in KINDS or event == "open" and _writes(*args[1:]):
            return
        if not isinstance(args[0], str | bytes | os.PathLike):  # a file that is open already
            return
        path = os.path.abspath(os.fsdecode(args[0]))
        line = f"{KINDS[event]}\t{path}\n"
        if path.startswith(inside) and line not in seen:
            seen.add(line)
            os.write(file, line.encode())

    sys.addaudithook(heard)
    for module in list(sys.modules.values()):  # those that were there before
        if source := getattr(module, "__file__", None):
            sys.audit("open", source, "r", 0)
    _announce_readers()
    _announce_absence()


def _writes(mode: str | None, flags: int) -> bool:
    return bool(set(mode or "") & set("wax+")) or bool(flags & (os.O_WRONLY | os.O_RDWR))


def _announce_readers() -> None:
    """Make the readers that open files below Python say what they open."""
    import pyarrow.parquet as parquet
    import safetensors

    def announcing(read, place: int):
        @functools.wraps(read)
        def wrapper(*args, **options):
            source = args[place] if len(args) > place else next(iter(options.values()), None)
            if isinstance(source, str | os.PathLike):
                sys.audit("open", source, "r", 0)
            return read(*args, **options)

        return wrapper

    for reader in (parquet.ParquetFile, parquet.ParquetDataset):
        reader.__init__ = announcing(reader.__init__, 1)
    parquet.read_schema = announcing(parquet.read_schema, 0)
    parquet.read_metadata = announcing(parquet.read_metadata, 0)
    safetensors.safe_open = announcing(safetensors.safe_open, 0)


def _announce_absence() -> None:
    """Make a question for a path that is not there heard."""

    def announcing(ask):
        @functools.wraps(ask)
        def wrapper(path, *args, **options):
            if there := ask(path, *args, **options):
                return there
            sys.audit(ABSENT, path)
            return there

        return wrapper

    for name in ("exists", "is_file", "is_dir"):
        setattr(Path, name, announcing(getattr(Path, name)))
    for name in ("exists", "isfile", "isdir"):
        setattr(os.path, name, announcing(getattr(os.path, name)))


# For make


def dependencies(log: Path, root: Path) -> list[str]:
    """What a page depends on, relative to `root`: what its kernel read, the folders of data that
    it listed or missed something in, and the modules of this process, which make the page."""
    modules = (module for name, module in sys.modules.items() if name.startswith("lowprec."))
    found = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    for line in log.read_text().splitlines():
        kind, _, name = line.partition("\t")
        path = Path(name)
        if kind == "claims" or kind == "read" and not name.endswith(OF_CLAIMS):
            found.add(Path(source_from_cache(path)) if path.suffix == ".pyc" else path)
        elif kind in ("listed", "absent") and root / "data" in path.parents:
            found.add(next(p for p in (path, *path.parents) if p.is_dir()))
    inside = (path.relative_to(root) for path in found if root in path.parents)
    return sorted(str(path) for path in inside if not _made(path))


def gpu_minutes(files) -> float:
    """What the recorded runs among some files took on GPUs: run.json, or runs.jsonl of many."""
    from lowprec.records import packed  # not before a kernel records what it reads

    infos = []
    for path in files:
        if path.name == "run.json":
            infos.append(json.loads(path.read_text()))
        elif path.name == packed.RUNS:
            infos += packed.list_of(path).values()
    return sum(_gpu_seconds(info) for info in infos if "NVIDIA" in info["hardware"]) / 60


def _gpu_seconds(info: dict) -> float:
    """Of a run that several numbers of GPUs made, as if each step took as long on one GPU."""
    if not (earlier := info.get("earlier")):
        return info["seconds"] * info.get("processes", 1)
    parts = [*earlier, info]
    ends = [0, *(part["steps"] for part in parts)]
    shares = [(end - begin) / part.get("processes", 1)
              for begin, end, part in zip(ends, ends[1:], parts, strict=False)]  # fmt: skip
    return info["seconds"] * info["steps"] / sum(shares)


def _made(path: Path) -> bool:
    """Whether a path is hidden, or written by a build, a training or an installation."""
    hidden = any(part.startswith(".") for part in path.parts)
    made = any(path.parts[: len(folder)] == folder for folder in MADE)
    return hidden or made or path.parts[0].endswith(".egg-info")


def rule(target: Path, names: list[str]) -> str:
    """A rule for make. What is not there any more counts as changed, and is no error."""
    escaped = [name.replace("$", "$$").replace("#", r"\#").replace(" ", r"\ ") for name in names]
    lines = " \\\n  ".join([f"{target}:", *escaped])
    return f"{lines}\n\n" + "".join(f"{name}:\n" for name in escaped)
