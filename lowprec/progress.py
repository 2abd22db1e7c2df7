"""What unfinished runs show: the live table of a campaign.

A run says where it is in two places, and neither is asked for anything: its log, whose last line is
tqdm's, and its unfinished folder, which is written again every few hundred steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

BAR = re.compile(r"(\d+)/\d+ \[[\d:]+<([\d:?]+), +(?:([\d.]+)\w+/s|([\d.]+)s/\w+)?(.*)\]")
"""tqdm's line: step/steps [elapsed<left, rate, loss=...]; below 1 step/s the rate is inverted."""

HEAD = ("run", "state", "step", "loss", "tokens/s", "to go")


def table_row(job, state: str, log: Path) -> tuple[str, ...]:
    """A run's cells, as `HEAD` names them; empty where nothing is known.

    job: a `lowprec.plan.Job`.
    """
    step, loss, speed, left = 0, "", "", ""
    if state == "waiting":
        return job.name, state, f"0/{job.config.steps}", loss, speed, left
    if bars := BAR.findall(tail(log)):
        step, left, fast, slow, more = bars[-1]
        if rate := float(fast or 0) or 1 / float(slow or "inf"):
            speed = f"{rate * job.config.batch_size * job.config.block_size:,.0f}"
        loss = dict(re.findall(r"(\w+)=([^\s,\]]+)", more)).get("loss", "")
    if not loss:
        step, loss, speed = _recorded(job.part) or (step, loss, speed)
    left = left if state == "running" else ""
    return job.name, state, f"{step}/{job.config.steps}", loss, speed, left


def _recorded(folder: Path) -> tuple | None:
    """(step, loss, tokens/s) of an unfinished run folder, or None if it holds nothing yet."""
    import pandas as pd

    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        info = json.loads((folder / "run.json").read_text())
        loss = pd.read_parquet(folder / "metrics.parquet", columns=["loss"])["loss"].iloc[-1]
        return info["steps"], f"{loss:.3f}", f"{info['tokens_per_second']:,}"
    return None


def tail(file: Path) -> str:
    """The last 8,192 bytes of a text file; empty if it is not there."""
    with contextlib.suppress(FileNotFoundError), open(file, "rb") as stream:
        stream.seek(max(stream.seek(0, os.SEEK_END) - 8192, 0))
        return stream.read().decode(errors="replace").replace("\r", "\n")
    return ""


class Table:
    """Rows redrawn in place on a terminal; elsewhere a line when the state of a run changes."""

    def __init__(self, stream):
        self.stream, self.drawn, self.states = stream, 0, {}

    def show(self, rows: list[tuple[str, ...]]):
        lines = self._screen(rows) if self.stream.isatty() else self._changes(rows)
        if self.drawn and self.stream.isatty():
            self.stream.write(f"\x1b[{self.drawn}F\x1b[J")  # up to the first line, clear the rest
        self.drawn = len(lines)
        self.stream.writelines(line + "\n" for line in lines)
        self.stream.flush()

    def _changes(self, rows) -> list[str]:
        new = [r for r in rows if self.states.get(r[0], "waiting") != r[1]]
        self.states = {r[0]: r[1] for r in rows}
        return [
            "  ".join(f"{name} {cell}" if name in HEAD[2:5] else cell
                      for name, cell in zip(HEAD, r, strict=True) if cell) for r in new
        ]  # fmt: skip

    def _screen(self, rows) -> list[str]:
        width, height = shutil.get_terminal_size()
        room, more = max(height - 3, 1), []
        if len(rows) > room:  # what moves comes first
            order = ("running", "failed", "waiting", "done")
            more = [f"and {len(rows) - room} more"]
            rows = sorted(rows, key=lambda r: order.index(r[1]))[:room]
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, r, widths)).rstrip() for r in (HEAD, *rows)]
        return [line[: width - 1] for line in lines + more]
