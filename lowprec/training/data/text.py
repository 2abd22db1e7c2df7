"""Text to tokens: documents from the Hugging Face hub or from your own files, and encodings.

Every source goes through `datasets` in streaming mode, so nothing is downloaded or held whole.
Documents are encoded side by side and come back in order: the tokens do not depend on the number
of processes.
"""

import glob
import hashlib
import json
import os
import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lowprec import UserError

VOCABULARY = "gpt2"
VOCABULARIES = {"gpt2": 50304, "bytes": 384}
"""Rows of a model's embedding by vocabulary: its tokens, up to a multiple of 128."""
TOKEN = np.dtype("<u2")
PIECE = 1 << 18  # characters that one process encodes at a time

# As OpenAI published them; tiktoken checks its own download for the same.
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@dataclass(frozen=True)
class Source:
    """Where documents come from: rows of `load_dataset(**load)` for each (label, load) in `loads`.

    `tokens` is where to stop unless told otherwise, None for the whole; `mend` ends the sentence
    about a source that cannot be read.
    """

    name: str
    loads: tuple[tuple[str, dict], ...]
    tokens: int | None
    mend: str


HUB = {
    name: Source(
        name,
        ((load["path"], load),),
        200_000_000,
        "open the network, or fetch its Parquet files elsewhere and name their folder",
    )
    for name, load in {
        "fineweb": {"path": "HuggingFaceFW/fineweb", "name": "sample-10BT"},
        "openwebtext": {"path": "Skylion007/openwebtext"},
    }.items()
}

# A text file is one document; in the others each row is one. JSON is read line by line: its reader
# asks for the same fields in all. With its own batch size that of Parquet fails on a file without
# rows.
READERS = {
    ".txt": {"path": "text", "sample_by": "document"},
    ".jsonl": {"path": "text", "sample_by": "line"},
    ".parquet": {"path": "parquet", "batch_size": 1000},
}


def local_source(path: Path) -> Source:
    """Return a source for a .txt, .jsonl or .parquet file, or for a folder with files of one kind.

    Files of a folder and of its subfolders come in the order of their names; hidden ones are left
    out. Raises UserError if there is nothing to read.
    """
    path = path.resolve()
    kinds = ", ".join(READERS)
    if path.is_file():
        files = [path]
        if path.suffix not in READERS:
            raise UserError(f"{path.name} is none of {kinds}; rename it if it is one of them.")
    else:
        inside = (file.relative_to(path) for file in path.rglob("*") if file.suffix in READERS)
        shown = (file for file in inside if not any(part[0] == "." for part in file.parts))
        files = [path / file for file in sorted(shown) if (path / file).is_file()]
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1:
        raise UserError(f"{path} holds {' and '.join(suffixes)} files; name files of one kind.")
    # the readers fail on files without a byte
    files = [file for file in files if file.stat().st_size]
    if not files:
        raise UserError(f"there is no text in {path}; name a {kinds} file or a folder of them.")
    reader = READERS[suffixes[0]]
    # one call for thousands of small files, else one a file: they may differ in other columns
    groups = [files] if suffixes == [".txt"] else [[file] for file in files]
    loads = tuple(
        # names are patterns to `datasets`, so brackets in them have to be escaped
        (str(group[0]), reader | {"data_files": [glob.escape(str(file)) for file in group]})
        for group in groups
    )
    name = path.stem if path.is_file() else path.name
    return Source(name, loads, None, "mend or remove that file")


def documents(source: Source) -> Iterator[str]:
    """Yield the texts of a source in order, without empty ones.

    Raises UserError if `datasets` is missing, a row has no text, or something cannot be read.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "reading text needs the package datasets; install it with `pip install -e '.[data]'`."
        ) from error
    # what it would log here is in the exception as well
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    for label, load in source.loads:
        try:
            rows = datasets.load_dataset(**load, split="train", streaming=True)
            rows = _from_json(rows) if label.endswith(".jsonl") else rows
            for number, row in enumerate(rows, 1):
                if "text" not in row or not isinstance(row["text"], str | None):
                    there = label if number == 1 else f"row {number:,} of {label}"
                    raise UserError(
                        f"{there} has no column `text` with strings, its columns are "
                        f"{', '.join(row)}; rename the one to read."
                    )
                if row["text"]:
                    yield row["text"]
        except UserError:
            raise
        except UnicodeDecodeError as error:
            files = (file for name in load.get("data_files", ()) for file in glob.glob(name))
            label = next((file for file in files if not _is_utf8(file)), label)
            raise UserError(f"{label} is not UTF-8; convert or remove it.") from error
        except Exception as error:  # each reader and each transport raises its own
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{label} could not be read ({reason}); {source.mend}.") from error


def _from_json(lines) -> Iterator[dict]:
    for number, line in enumerate(lines, 1):
        if line["text"].strip():
            try:
                row = json.loads(line["text"].removeprefix("\ufeff"))
            except ValueError:
                raise ValueError(f"line {number} is no JSON") from None
            yield row if isinstance(row, dict) else {type(row).__name__: row}


def _is_utf8(path: str) -> bool:
    try:
        Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def gpt2_encoding(vocab_dir: Path | str | None = None):
    """Return GPT-2's byte-pair encoding as a `tiktoken.Encoding` of 50,257 tokens.

    `vocab_dir`, or else the environment variable LOWPREC_GPT2_VOCAB, names a folder with OpenAI's
    `encoder.json` and `vocab.bpe`; without either, tiktoken downloads them.
    """
    import tiktoken  # here, because training from shards needs no tokenizer

    folder = vocab_dir or os.environ.get("LOWPREC_GPT2_VOCAB")
    if not folder:
        try:
            return tiktoken.get_encoding(VOCABULARY)
        except OSError as error:
            raise UserError(
                "GPT-2's vocabulary could not be downloaded; set LOWPREC_GPT2_VOCAB to a folder "
                "with encoder.json and vocab.bpe."
            ) from error
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    paths = [Path(folder) / name for name in GPT2_FILES]
    for path, digest in zip(paths, GPT2_FILES.values(), strict=True):
        if not path.is_file():
            raise UserError(f"there is no {path}; name a folder with GPT-2's vocabulary.")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UserError(f"{path} is not the file OpenAI published; fetch it again.")
    # The hashes go along because tiktoken caches even local files, by path.
    ranks = data_gym_to_mergeable_bpe_ranks(*map(str, paths), *GPT2_FILES.values())
    return tiktoken.Encoding(
        VOCABULARY,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
        explicit_n_vocab=50257,
    )


class ByteEncoding:
    """UTF-8 bytes and an end-of-text as 257 tokens, in the form of a `tiktoken.Encoding`: the
    vocabulary that needs no file and no network."""

    name = "bytes"
    eot_token = 256

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))  # JSON can hold half of a surrogate pair


# GPT-2's encoding takes a newline between two visible characters as a unit of its own, so a text
# may be cut there and encoded in pieces without changing a token.
_LONE_NEWLINE = re.compile(r"(?<=\S)\n(?=\S)")


def _pieces(text: str, size: int) -> Iterator[tuple[str, bool]]:
    """Yield pieces of about `size` characters, each with whether the document ends with it."""
    start = 0
    while cut := _LONE_NEWLINE.search(text, start + size):
        yield text[start : cut.end()], False
        start = cut.end()
    yield text[start:], True


def _batches(texts: Iterable[str], size: int) -> Iterator[list[tuple[str, bool]]]:
    """Group pieces, in order, until a group has `size` characters."""
    batch, length = [], 0
    for text in texts:
        for piece in _pieces(text, size):
            batch.append(piece)
            length += len(piece[0])
            if length >= size:
                yield batch
                batch, length = [], 0
    if batch:
        yield batch


def _encode(encoding, batch: list[tuple[str, bool]]) -> tuple[np.ndarray, int]:
    """Return the tokens of a batch, uint16 (n,), and how many documents end in it."""
    tokens = []
    for text, ends in batch:
        tokens += encoding.encode_ordinary(text)
        if ends:
            tokens.append(encoding.eot_token)
    return np.array(tokens, TOKEN), sum(ends for _, ends in batch)


def _start_worker(encoding) -> None:
    global _encode_here
    _encode_here = partial(_encode, encoding)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _encode_in_worker(batch: list[tuple[str, bool]]) -> tuple[np.ndarray, int]:
    return _encode_here(batch)


def _parallel(batches: Iterable, encoding, processes: int) -> Iterator[tuple[np.ndarray, int]]:
    """Encode batches in order, reading only a few ahead of what is taken."""
    pool = ProcessPoolExecutor(processes, initializer=_start_worker, initargs=(encoding,))
    try:
        # fork now, before reading a source starts threads
        pool.submit(_encode_in_worker, []).result()
        waiting = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 4 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenizing process died, perhaps for want of memory; take fewer --processes."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode(
    texts: Iterable[str],
    encoding,
    processes: int | None = None,
    total: int | None = None,
    size: int = PIECE,
) -> Iterator[np.ndarray]:
    """Encode texts in order, each followed by end-of-text; yields uint16 tokens (n,).

    Shows documents and tokens a second, and how far it is if `total` tokens are expected.
    """
    processes = processes or os.cpu_count() or 1
    batches = _batches(texts, size)
    if processes == 1:
        encoded = (_encode(encoding, batch) for batch in batches)
    else:
        encoded = _parallel(batches, encoding, processes)
    seen = 0
    bar = tqdm(None, "tokenizing", total, unit=" tokens", unit_scale=True, disable=None)
    with bar, closing(encoded):
        for tokens, ended in encoded:
            seen += ended
            bar.set_postfix(documents=seen, refresh=False)
            bar.update(len(tokens))
            yield tokens
