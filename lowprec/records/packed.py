"""Packed campaigns: the runs of a finished campaign in three files instead of a folder each.

`runs.jsonl` has a line for each run, its run.json. Where that has the same fields as an earlier
run's it is what differs from it, with that run's name, whose line is whole, as `like`.
`metrics.parquet` and `probes.parquet` have a row group for each, with the run's name in column
`run`; the footer lists these names in order, so that one run is read without the others.
`lowprec.training.pack` writes them, the list last. A run whose folder still has its run.json is
read from there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from lowprec import UserError

RUNS, TABLES = "runs.jsonl", ("metrics", "probes")
NAMES = b"runs"
"""Key of the footer under which a packed table lists the runs of its row groups."""


def parse(text: str) -> dict:
    """A run.json; raises ValueError, KeyError or TypeError if the text is none."""
    return _checked(json.loads(text))


def _checked(info: dict) -> dict:
    info["config"]["policy"], info["config"]["seed"], info["arm"], info["hardware"], info["ended"]
    return info


def line(info: dict, earlier: list[dict]) -> str:
    """The line of a run.json in `runs.jsonl`, after those of earlier runs."""
    config = info["config"]
    alike = (e for e in earlier if [*e, "", *e["config"]] == [*info, "", *config])
    if other := next(alike, None):
        brief = _differing(info, other) | {"config": _differing(config, other["config"])}
        info = {"name": info["name"], "like": other["name"]} | brief
    return json.dumps(info, separators=(",", ":")) + "\n"


def _differing(of: dict, other: dict) -> dict:
    return {key: x for key, x in of.items() if json.dumps(x) != json.dumps(other[key])}


def _whole(info: dict, found: dict[str, dict]) -> dict:
    """The run.json that a line stands for, given those of the lines above."""
    if "like" not in info:
        return info
    other = found[info.pop("like")]
    if info.keys() - other.keys() or info["config"].keys() - other["config"].keys():
        raise KeyError("a field that the other has not")
    return other | info | {"config": other["config"] | info["config"]}


def infos(folder: Path) -> dict[str, dict]:
    """The run.json of each packed run of a campaign's folder, by name; {} where nothing is packed.

    Raises `UserError` if a file is damaged, or if list and tables name other runs. A run that has
    a folder, too, may be in the tables alone: packing it was interrupted.
    """
    listed, name = list_of(folder / RUNS), folder.absolute().name
    for path in (folder / f"{table}.parquet" for table in TABLES):
        held = _held(path) if path.is_file() else []
        if lacking := [run for run in listed if run not in held]:
            raise UserError(
                f"{name}/{path.name} lacks run {lacking[0]}, which {RUNS} names; restore both "
                f"from git"
            )
        for run in held:
            if run not in listed and not (folder / run / "run.json").is_file():
                raise UserError(
                    f"{name}/{RUNS} lacks run {run}, which {path.name} holds; restore both from "
                    f"git, or the folder {run}"
                )
    return listed


def list_of(path: Path) -> dict[str, dict]:
    """The run.json of each run of a `runs.jsonl`, by name; {} if it is not there. Raises
    `UserError` if it is damaged."""
    if not path.is_file():
        return {}
    found, where = {}, f"{path.absolute().parent.name}/{path.name}"
    for i, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            info = _checked(_whole(json.loads(text.decode()), found))
            name = info["name"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{where} is damaged in line {i}; restore it from git") from None
        if name in found:
            raise UserError(f"{where} names run {name} twice; restore it from git")
        found[name] = info
    return found


def _held(path: Path) -> list[str]:
    """The runs of a packed table; none for the table of one run."""
    try:
        return _names(pq.read_metadata(path))
    except Exception as error:  # pyarrow raises many types for a damaged file
        where = f"{path.absolute().parent.name}/{path.name}"
        raise UserError(
            f"{where} is damaged ({type(error).__name__}); restore it from git"
        ) from None


def _names(footer) -> list[str]:
    return json.loads((footer.metadata or {}).get(NAMES, b"[]"))


def read(path: Path, run: str) -> pd.DataFrame:
    """A run's part of a packed table; raises whatever pyarrow raises for a damaged file."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read_row_group(_names(file.metadata).index(run)).to_pandas()
    if (table.pop("run") != run).any():
        raise ValueError("another run's rows")
    return table
