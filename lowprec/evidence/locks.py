"""Locks: what a page of the book found when it was last accepted.

`notebooks/SLUG.lock.json` stands beside the page and its claims. It has the verdict of each
claim, its value and n, and the named facts that prose uses, so that any document can cite a page
without executing it, and a change of either is a line of a diff.

    claims     {id: {verdict, value, n, interval, by, first_run}}; the last three only where there
               are some. by: what each unit gave. first_run: the commit at which it was first judged
    facts      {name: a text or a number}
    hardware   where the page was executed: elsewhere FP32 sums may have another order
    digest     of all three: a lock is written by `python -m lowprec claims --accept`, never by hand
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from lowprec import UserError


def lock_path(page: str, folder: Path) -> Path:
    return folder / f"{page}.lock.json"


def read_lock(page: str, folder: Path) -> dict:
    """{"claims", "facts", "hardware"} of a page, empty for one that was never accepted.

    Raises `UserError` for a lock that is no JSON or that was changed by hand.
    """
    path = lock_path(page, folder)
    if not path.is_file():
        return {"claims": {}, "facts": {}, "hardware": ""}
    mend = f"run `python -m lowprec claims --accept {page}`, which writes it from the executed page"
    try:
        lock = json.loads(path.read_text())
        held = {key: lock[key] for key in ("claims", "facts", "hardware")}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path.name} is no lock: {mend}") from None
    if lock.get("digest") != _digest(held):
        raise UserError(f"{path.name} was changed by hand: {mend}")
    return held


def write_lock(page: str, folder: Path, claims: dict, facts: dict, hardware: str = "") -> Path:
    """Write a page's lock, a line a claim and a line a fact, sorted; returns its path."""
    from lowprec.records.files import write_atomic

    held = {"claims": claims, "facts": facts, "hardware": hardware}
    parts = [f'"{key}": {_lines(held[key])}' for key in ("claims", "facts")]
    parts += [f'"hardware": {_line(hardware)}', f'"digest": "{_digest(held)}"']
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    write_atomic(lock_path(page, folder), lambda file: file.write(text.encode()))
    return lock_path(page, folder)


def _line(value) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _lines(entries: dict) -> str:
    lines = [f"{_line(name)}: {_line(entries[name])}" for name in sorted(entries)]
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _digest(held: dict) -> str:
    return hashlib.sha256(_line(held).encode()).hexdigest()[:16]


def rounded(value):
    """The same with every float to six digits: the last ones may differ between machines."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def alike(a, b) -> bool:
    """Whether two values, or facts, are the same: texts and whole numbers equal, others within a
    thousandth."""
    if type(a) is type(b) is int:
        return a == b
    if type(a) in (int, float) and type(b) in (int, float):
        return math.isclose(a, b, rel_tol=1e-3)
    return a == b
