"""Where the repository lies, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from lowprec import UserError


def repo_root() -> Path:
    """The folder that holds book/, notebooks/ and data/: from the working directory up, or our
    own."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if all((folder / name).is_dir() for name in ("book", "notebooks", "data")):
            return folder
    raise UserError("no clone of the repository here or above; go to its root")


def data_root() -> Path:
    return repo_root() / "data"


def at_root(path: str | Path) -> Path:
    """A path as given if it exists, else relative to the repository's root if that is there, or if
    only there is a folder for it."""
    path = Path(path)
    if path.exists() or path.is_absolute():
        return path
    there = repo_root() / path
    return there if there.exists() or path.parent.is_dir() < there.parent.is_dir() else path


def make_folder(path: Path) -> None:
    """Make a folder and those above it; raises `UserError` where there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}; name another") from None


def write_atomic(path: Path, write) -> None:
    """Call `write(open file)`, then give the file its name; an earlier one stays until then."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of this writer alone
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        cause = error  # torch answers a full disk with a sentence of its own
        while cause.__context__ is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"cannot write {path}: {reason}; what was written before is still there"
        ) from None


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
