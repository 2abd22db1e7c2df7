"""What the probe reads in trainings that fail with attention in FP32, before they do.

Of each run of the campaigns `otherwise` and `otherwise_again` that explodes or ends in a loss that
is not finite: the last weights kept before that, and where the data had a fault also those kept
within it. Of the controls of the second all weights kept before the onset or the end.

    python -m lowprec.studies.otherwise data/runs/otherwise
    python -m lowprec.studies.otherwise data/runs/otherwise_again
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from lowprec import UserError, entry
from lowprec.diagnose.measures import COLUMNS
from lowprec.diagnose.probe import probe
from lowprec.evidence.heads import end_of
from lowprec.records import runs
from lowprec.studies.kept import kept, unwritten
from lowprec.training import recorder

WITHIN = 2250, 2500
"""Steps within the fault of data, from 2,000 to 2,649, at which weights are kept."""
FAULTY = ("noise", "shuffled")
CONTROLS = ("fa2", "nope", "refined")
"""Arms with attention in BF16: two that must ring, and one that must not."""


def read(run: runs.Run) -> list[int]:
    """Steps whose kept weights are read: the last before the onset, and those within a fault; of
    controls all before the onset or the end; of other runs that do not fail none."""
    steps, arm = sorted(kept(run)), run.info["arm"]
    before = [step for step in steps if step <= end_of(run)]
    if arm in CONTROLS:
        return before
    if not run.explosion and run.info["ended"] == "completed":
        return []
    within = [step for step in steps if step in WITHIN and arm in FAULTY]
    return sorted({*before[-1:], *within})


def probed(folder: Path, device: str = "auto") -> pd.DataFrame:
    """run, step and the columns of the probe, in float32: FA2 on the committed text."""
    tables = [
        probe(kept(run)[step], policy="FA2", device=device).assign(run=run.name, step=step)
        for run in runs.load_runs(folder).run
        for step in read(run)
    ]
    if not tables:
        raise UserError(f"no run in {folder} failed and has kept weights; record some first")
    table = pd.concat(tables, ignore_index=True)[["run", "step", *COLUMNS]]
    return table.astype(dict.fromkeys(table.select_dtypes("float").columns, "float32"))


def main(argv: list[str] | None = None) -> None:
    """Write what the probe reads in the kept weights of runs that fail into probed.parquet."""
    parser = argparse.ArgumentParser(
        "python -m lowprec.studies.otherwise", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="the campaign's folder")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto is a GPU if there is one")
    args = parser.parse_args(argv)
    out = unwritten(args.folder / "probed.parquet")
    table = probed(args.folder, args.device)
    recorder.write_table(out, table)
    print(f"{out}: {len(table):,} rows, {table.alarm.sum()} alarms")


if __name__ == "__main__":
    entry(main)
