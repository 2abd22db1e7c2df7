"""Tables that a study measures in a minute or more and its page reads at once.

A table lies in data/studies/STUDY as DATE-NAME.parquet. Its footer says when and on what it was
made, by which code, and with which parameters. A page that is given other parameters than any table
was made with measures anew, with the same function; otherwise it makes a small part of a table
again and compares it, with `agreement`.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
import torch

from lowprec import UserError
from lowprec.evidence.words import number
from lowprec.publish.notebook import hardware
from lowprec.records import files, provenance
from lowprec.records.tables import write_table


def recorded(study: str, **parameters) -> dict[str, pd.DataFrame]:
    """The newest tables of a study by name, of those made with these parameters; {} if none."""
    found = {}
    for path in sorted((files.data_root() / "studies" / study).glob("*.parquet")):
        table = pd.read_parquet(path)
        if table.attrs["parameters"] == parameters:
            found[path.stem[len("2026-11-26-") :]] = table
    return found


def tables(study: str, measure: Callable, **parameters) -> dict[str, pd.DataFrame]:
    """The tables that `measure(**parameters)` returns, by name: as recorded, or measured now."""
    if found := recorded(study, **parameters):
        return found
    given = ", ".join(f"{name}={value}" for name, value in parameters.items())
    print(line := f"no table has {study}({given}): measuring it now takes a minute or several")
    logging.getLogger("IPKernelApp").warning(line)  # at once; papermill keeps prints to the end
    return measure(**parameters)


def record(folder: Path, measure: Callable, **parameters) -> list[Path]:
    """Write the tables of `measure(**parameters)` into a folder, dated today.

    Raises `UserError`, before anything is measured, if the folder has tables of today.
    """
    date = datetime.date.today().isoformat()
    if there := sorted(folder.glob(f"{date}-*.parquet")):
        raise UserError(f"{there[0]} exists and is never overwritten; rename it")
    torch.set_num_threads(1)  # one order of sums, the page's
    about = provenance.provenance("cpu") | dict(hardware=hardware())
    files.make_folder(folder)
    paths = []
    for name, table in measure(**parameters).items():
        table.attrs = dict(date=date, **about, parameters=parameters)
        paths.append(folder / f"{date}-{name}.parquet")
        write_table(paths[-1], table)
    return paths


def command(study: str, doc: str, measure: Callable, argv=None, **parameters) -> None:
    """The command of a study: its tables, with its page's own parameters, written into a folder."""
    parser = argparse.ArgumentParser(prog=f"python -m lowprec.studies.{study}", description=doc)
    parser.add_argument("folder", type=Path, help=f"for the tables; data/studies/{study} here")
    for path in record(parser.parse_args(argv).folder, measure, **parameters):
        print(path)


def agreement(table: pd.DataFrame, again: Iterable, then: Iterable, within: float) -> str:
    """A sentence for the page: numbers made again are those of a table, as near as `within`.

    again, then: numbers made now, and the same ones of the table. within: relative. Raises
    `UserError` for the first that is not. A table measured just now has no sentence.
    """
    pairs = list(zip(again, then, strict=True))
    for now, before in pairs:
        if not math.isclose(now, before, rel_tol=within):
            raise UserError(
                f"a number of the table of {table.attrs.get('date', 'now')} is {number(before)} "
                f"and comes out as {number(now)} here: look why, then record the table again"
            )
    if "date" not in table.attrs:
        return ""
    off = max(abs(now / before - 1) for now, before in pairs)
    apart = "and are the same" if off < 1e-9 else f"and differ by {off:.1g} of their size at most"
    made = table.attrs
    return (
        f"Recorded on {made['date']} on a {made['hardware']} with torch {made['versions']['torch']}"
        f". Of the table {len(pairs)} numbers were made again for this page {apart}."
    )
