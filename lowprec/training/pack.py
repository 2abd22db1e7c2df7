"""Packing a finished campaign: its run folders become the three files of `lowprec.records.packed`.

The files are written aside and read back, then named one by one, `runs.jsonl` last; only then do
the folders lose what is packed, each its run.json first. Killed at any moment, a campaign reads as
before, and packing it again ends the work. Captures, kept weights and all other files of a run stay
in its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa

from lowprec import UserError
from lowprec.records import files, packed, runs
from lowprec.records.tables import write_groups
from lowprec.training.campaign import only_process
from lowprec.training.plan import load_campaign

COLUMNS = dict(zip(packed.TABLES, (runs.METRICS, runs.PROBES), strict=True))


def pack(campaign) -> str:
    """Pack every run of a campaign, with those packed before; return what was done, in words.

    campaign: its name in data/runs, or its folder. Raises `UserError`, and removes nothing, if a
    planned run is missing, or if any run is unfinished, damaged or unlike the others.
    """
    folder = runs.campaign_folder(campaign)
    require_ended(folder)
    files.make_folder(folder / ".logs")
    with only_process(folder / ".logs" / "pack.lock"):
        recorded, there = list(runs.load_runs(folder).run), packed.infos(folder)
        require_alike(recorded)
        if any(run.name not in there for run in recorded):
            _write(folder, recorded)
        left = {run.path: _left(folder, run) for run in recorded}
        for path, whole in left.items():
            _clear(path, whole)
        shutil.rmtree(_aside(folder), ignore_errors=True)
    size = sum((folder / name).stat().st_size for name in _files()) / 1e6
    return f"{folder}: {len(recorded)} runs are packed in {', '.join(_files())}, {size:.2f} MB"


def require_ended(folder: Path) -> None:
    """Raise `UserError` naming a run that the campaign plans and that has not ended."""
    file = folder / "campaign.yaml"
    names, again = [job.name for job in load_campaign(file)], f"`python -m lowprec campaign {file}`"
    if parts := sorted(folder.glob(".*.part")):
        name = parts[0].name[1:].removesuffix(".part")
        raise UserError(f"{name} is unfinished; end it with {again}, or remove {parts[0]}")
    there = {path.name for path in runs.run_paths(folder)}
    if lacking := [name for name in names if name not in there]:
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise UserError(f"{folder.name} lacks {lacking[0]}{more}; {again} records what is missing")


def require_alike(recorded: list[runs.Run]) -> None:
    """Raise `UserError` naming a run that cannot be packed with the others."""
    for run in recorded:
        if not run.finished:
            raise UserError(f"{run.name} is unfinished: its run.json says {run.info['ended']!r}")
        if (name := run.info.get("name")) != run.name:
            raise UserError(f"{run.name} calls itself {name} in its run.json; rename its folder")
        for table in packed.TABLES:
            ours, first = (getattr(r, table).dtypes for r in (run, recorded[0]))
            if not ours.equals(first):
                raise UserError(
                    f"{run.name} has other columns in {table}.parquet than {recorded[0].name}; "
                    f"leave this campaign in folders"
                )


def same(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Whether two tables of numbers are the same bit by bit."""
    return a.dtypes.equals(b.dtypes) and all(
        a[name].to_numpy().tobytes() == b[name].to_numpy().tobytes() for name in a
    )


def _aside(folder: Path) -> Path:
    return folder / ".packed"


def _files() -> list[str]:
    """In the order in which they get their names."""
    return [*(f"{table}.parquet" for table in packed.TABLES), packed.RUNS]


def _write(folder: Path, recorded: list[runs.Run]) -> None:
    aside, names = _aside(folder), [run.name for run in recorded]
    files.make_folder(aside)
    for table in packed.TABLES:
        groups = [_named(run.name, getattr(run, table)) for run in recorded]
        write_groups(aside / f"{table}.parquet", groups, {packed.NAMES.decode(): json.dumps(names)})
    infos = [run.info for run in recorded]
    text = "".join(packed.line(info, infos[:i]) for i, info in enumerate(infos))
    files.write_atomic(aside / packed.RUNS, lambda file: file.write(text.encode()))
    for run, again in zip(recorded, runs.load_runs(aside).run, strict=True):
        whole = json.dumps(run.info) == json.dumps(again.info)
        if not whole or not all(same(getattr(run, t), getattr(again, t)) for t in packed.TABLES):
            raise UserError(f"{run.name} does not read back from {aside}; nothing was removed")
    for name in _files():
        os.replace(aside / name, folder / name)


def _named(run: str, table: pd.DataFrame) -> pa.Table:
    """A run's table with its name in a first column."""
    content = pa.Table.from_pandas(table, preserve_index=False)
    return content.add_column(0, "run", pa.array([run] * len(table), pa.string()))


def _left(folder: Path, run: runs.Run) -> list[Path]:
    """The tables in a run's own folder, once more compared with what is packed."""
    left = []
    for table, columns in COLUMNS.items():
        file = run.path / f"{table}.parquet"
        if not file.is_file():
            continue
        if not same(
            runs.read_table(file, columns), runs.read_table(folder / file.name, columns, run.name)
        ):
            raise UserError(
                f"{run.name}/{file.name} is not what {folder.name}/{file.name} has of that run; "
                f"move one of them away"
            )
        left.append(file)
    return left


def _clear(path: Path, whole: list[Path]) -> None:
    """Remove from a run's folder what is packed."""
    (path / "run.json").unlink(missing_ok=True)  # first: without it the packed run is read
    for file in whole:
        file.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()
