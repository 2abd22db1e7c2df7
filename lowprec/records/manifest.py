"""`data/manifest.json`: a sha256 of everything in `data/`, and the check against it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lowprec import UserError
from lowprec.records import packed
from lowprec.records.files import data_root, sha256, write_atomic


def _entries(root: Path) -> dict[str, tuple[Path, list[Path]]]:
    """What the manifest lists: each file, and each packed campaign as one; {name: (path, files)}.

    Not the manifest itself, nor what is hidden: logs and unfinished runs. Raises `UserError` at a
    link, through which what is read could change without a trace."""
    if link := next((p for p in sorted(root.rglob("*")) if p.is_symlink()), None):
        raise UserError(f"{link} is a link; put in its place what it leads to")
    files = [p for p in root.rglob("*") if p.is_file() and p != root / "manifest.json"]
    hidden = {p for p in files if any(part.startswith(".") for part in p.relative_to(root).parts)}
    files = sorted(set(files) - hidden)
    folders = {p.parent for p in files if p.name == packed.RUNS}
    entries: dict = {}
    for file in files:
        path = next((folder for folder in file.parents if folder in folders), file)
        entries.setdefault(path.relative_to(root).as_posix(), (path, []))[1].append(file)
    return entries


def _digest(path: Path, files: list[Path]) -> str:
    """The sha256 of a file, or of what `sha256sum` prints of the sorted files of a folder."""
    if path.is_file():
        return sha256(path)
    names = sorted(file.relative_to(path).as_posix() for file in files)
    lines = "".join(f"{sha256(path / name)}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


def write_manifest(root: Path | None = None) -> Path:
    """Record the sha256 of every file and packed campaign under data/ in data/manifest.json."""
    root = root or data_root()
    entries = {name: _digest(*what) for name, what in _entries(root).items()}
    path = root / "manifest.json"
    _put(path, entries)
    return path


def accept_file(path: Path) -> None:
    """Record one file of data/ in the manifest as it is now, and no other."""
    root = data_root()
    manifest = root / "manifest.json"
    digests = {path.relative_to(root).as_posix(): sha256(path)}
    _put(manifest, json.loads(manifest.read_text()) | digests)


def _put(manifest: Path, entries: dict[str, str]):
    text = json.dumps(entries, indent=1, sort_keys=True) + "\n"
    write_atomic(manifest, lambda file: file.write(text.encode()))


def verify(root: Path | None = None) -> int:
    """Check every file of data/ against the manifest; return how many there are.

    Raises `UserError` naming the first few files, or packed campaigns, that differ, are missing or
    are not listed.
    """
    root = root or data_root()
    try:
        entries = dict(json.loads((root / "manifest.json").read_text()))
    except (OSError, ValueError, TypeError):
        raise UserError("data/manifest.json is missing or damaged; restore it from git") from None
    present = _entries(root)
    wrong = [f"{name} is missing" for name in entries if name not in present]
    wrong += [f"{name} is not in the manifest" for name in present if name not in entries]
    wrong += [
        f"{name} differs" for name, digest in entries.items()
        if name in present and _digest(*present[name]) != digest
    ]  # fmt: skip
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"data/ does not match its manifest: {'; '.join(wrong[:3])}{more}; restore the files "
            f"with git, or accept the change with `python -m lowprec verify --write`"
        )
    return sum(len(files) for _, files in present.values())
