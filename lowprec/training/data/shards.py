"""Corpora to token shards to batches.

`build` turns a corpus list (`lowprec.training.data.corpora`) or other text
(`lowprec.training.data.text`) into tokens, GPT-2's or bytes, kept as safetensors shards. A list
carries the sha256 of the whole token stream, so two machines that built a corpus hold the same
tokens. `batch` draws seeded random windows; it is a pure function of (seed, step, row), so that a
resumed run, and every rank of a parallel one, sees the same data.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lowprec import UserError
from lowprec.training.data.corpora import (
    CORPORA,
    Corpus,
    Download,
    collect,
    known_corpora,
    pip_download,
    read_corpus,
)
from lowprec.training.data.text import (
    HUB,
    TOKEN,
    VOCABULARIES,
    VOCABULARY,
    ByteEncoding,
    Source,
    documents,
    encode,
    gpt2_encoding,
    local_source,
)

SMOKE = CORPORA / "smoke.safetensors"
SHARD_FORMAT = "lowprec-tokens-1"
SHARD_TOKENS = 1 << 26
BLOCK = 1024  # TrainConfig.block_size, without loading torch
HEADER = {
    "format", "corpus", "vocabulary", "shard", "shards", "n_tokens", "sha256", "corpus_sha256"
}  # fmt: skip


def sha256(tokens: np.ndarray) -> str:
    """Return the sha256 of tokens as little-endian uint16 bytes."""
    return hashlib.sha256(np.ascontiguousarray(tokens, TOKEN)).hexdigest()


def write_shards(
    tokens: np.ndarray, out: Path, corpus: str, vocabulary: str, shard_tokens: int = SHARD_TOKENS
) -> str:
    """Write tokens as `out/000.safetensors`, ...; the folder appears complete or not at all.

    Returns the sha256 of the whole stream.
    """
    count = max(1, -(-len(tokens) // shard_tokens))
    stream = sha256(tokens)
    with _unfinished(out) as unfinished:
        folder = unfinished / "shards"
        folder.mkdir()
        for index in range(count):
            part = tokens[index * shard_tokens : (index + 1) * shard_tokens]
            header = {
                "format": SHARD_FORMAT,
                "corpus": corpus,
                "vocabulary": vocabulary,
                "shard": str(index),
                "shards": str(count),
                "n_tokens": str(len(part)),
                "sha256": sha256(part),
                "corpus_sha256": stream,
            }
            with (folder / f"{index:03d}.safetensors").open("wb") as file:
                file.writelines(_safetensors(part, header))
        folder.rename(out)
    return stream


def _safetensors(tokens: np.ndarray, header: dict[str, str]) -> tuple[bytes, bytes, memoryview]:
    """Return a shard's bytes with the header's fields sorted: the library shuffles them."""
    content = save({"tokens": tokens}, header)
    end = 8 + int.from_bytes(content[:8], "little")
    fields = json.loads(content[8:end])
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return content[:8], text.ljust(end - 8), memoryview(content)[end:]


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """Make a hidden folder beside `out` that is gone afterwards; raises UserError where it cannot
    be made or written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".part", f".{out.name}.", out.parent) as folder:
            yield Path(folder)
    except OSError as error:  # no such place, or a full disk
        why = error.strerror or error
        raise UserError(f"cannot write {out}: {why}; give another folder.") from error


def build(
    corpus: str = "pysource",
    out: Path | None = None,
    vocab_dir: Path | None = None,
    processes: int | None = None,
    tokens: int | None = None,
    vocabulary: str = VOCABULARY,
) -> None:
    """Build the token shards of a corpus.

    Of a corpus list, shards that are there already are left alone. Other text is never written
    into a folder that holds something. Raises UserError naming what is not as it should be.

    Args:
        corpus: a list in data/corpora, or a name or path that `find_source` knows.
        out: the folder for the shards, by default shards/NAME.
        vocab_dir: a folder with GPT-2's encoder.json and vocab.bpe, see `gpt2_encoding`.
        processes: tokenizing processes, by default one a core.
        tokens: where to stop, by default at 200 million for fineweb and openwebtext and at the end
            for a path; a list is always built whole.
        vocabulary: one of VOCABULARIES, for other text than a list.
    """
    if vocabulary not in VOCABULARIES:
        raise UserError(f"--vocabulary is {vocabulary}; give {' or '.join(VOCABULARIES)}.")
    if vocab_dir is not None and vocabulary != VOCABULARY:
        raise UserError("--vocab-dir is of GPT-2's vocabulary; leave it away.")
    for option, value in {"--processes": processes, "--tokens": tokens}.items():
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}; give 1 or more.")
    load_encoding = ByteEncoding if vocabulary == "bytes" else partial(gpt2_encoding, vocab_dir)
    if corpus not in known_corpora():
        source = find_source(corpus)
        out = Path(out or f"shards/{source.name}")
        build_text(source, out, load_encoding, processes, tokens)
    elif tokens is not None:
        raise UserError(f"{corpus} is a fixed list; leave --tokens away.")
    else:
        out = Path(out or f"shards/{corpus}")
        build_corpus(read_corpus(corpus), out, load_encoding, processes)


def find_source(name: str | Path) -> Source:
    """Return the source on the hub, or the file or folder, of that name."""
    if name in HUB:
        return HUB[name]
    taken = [*known_corpora(), *HUB]
    if not Path(name).exists():
        raise UserError(
            f"there is no corpus and no path {str(name)!r}; take {', '.join(taken)} or a path."
        )
    source = local_source(Path(name))
    if source.name in taken:
        raise UserError(f"{source.name} is the name of another corpus; rename {name}.")
    return source


def build_text(
    source: Source,
    out: Path,
    load_encoding: Callable[[], object],
    processes: int | None = None,
    tokens: int | None = None,
) -> None:
    """`build` for documents: encode them until there are `tokens`, then write the shards.

    The stream is kept on disk until then, because each shard's header names the whole.
    """
    if _occupied(out):
        raise UserError(f"{out} exists and is never overwritten; give another folder.")
    limit = tokens or source.tokens
    encoding = load_encoding()
    with _unfinished(out) as folder:
        count = 0
        with (folder / "tokens").open("wb") as file:
            for part in encode(documents(source), encoding, processes, limit):
                part = part[: limit and limit - count]
                file.write(part)
                count += len(part)
                if count == limit:
                    break
        if not count:
            raise UserError(f"{source.name} has no text; name a source with some.")
        stream = np.memmap(folder / "tokens", TOKEN, "r")
        digest = write_shards(stream, out, source.name, encoding.name)
    print(f"{out}: {count:,} tokens of {source.name}, sha256 {digest[:12]}…")
    if limit and count < limit:
        print(f"{source.name} has no more than that; {limit:,} were asked for")
    if count <= BLOCK:
        print(f"too few for a block of {BLOCK}: give more, or train with a smaller --block-size")


def build_corpus(
    corpus: Corpus,
    out: Path,
    load_encoding: Callable[[], object],
    processes: int | None = None,
    download: Download = pip_download,
) -> None:
    """`build`, with the tokenizer and the download as arguments."""
    if _occupied(out):
        if not _holds(out, corpus):
            raise UserError(f"{out} exists and does not hold {corpus.name}; give another folder.")
        print(f"{out} already holds {corpus.name}")
        return
    encoding = load_encoding()
    if encoding.name != corpus.vocabulary:
        raise UserError(
            f"corpus {corpus.name} is made with the vocabulary {corpus.vocabulary}, "
            f"not {encoding.name}; pass that one."
        )
    texts = (content.decode("utf-8") for content in collect(corpus, download))
    parts = encode(texts, encoding, processes, corpus.tokens)
    tokens = np.concatenate([np.empty(0, TOKEN), *parts])
    if (len(tokens), sha256(tokens)) != (corpus.tokens, corpus.sha256):
        raise UserError(
            f"{corpus.name} came out as {len(tokens)} tokens with another sha256 than its list "
            f"says ({corpus.tokens} tokens); install the pinned tiktoken and build again."
        )
    write_shards(tokens, out, corpus.name, corpus.vocabulary)
    print(f"{out}: {len(tokens):,} tokens of {corpus.name}, sha256 {corpus.sha256[:12]}…")


def _occupied(out: Path) -> bool:
    return out.is_file() or (out.is_dir() and any(out.iterdir()))


def _holds(out: Path, corpus: Corpus) -> bool:
    try:
        return load_tokens(out, corpus.vocabulary).sha256 == corpus.sha256
    except UserError:
        return False


@dataclass(frozen=True)
class Tokens:
    """A token stream on disk: memory-mapped uint16 shards that read as one sequence.

    `name` is the corpus, `sha256` that of the whole stream as little-endian uint16.
    """

    name: str
    vocabulary: str
    sha256: str
    shards: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding of a model that reads them."""
        return VOCABULARIES[self.vocabulary]

    def window(self, start: int, length: int) -> np.ndarray:
        """Return tokens start .. start + length - 1, uint16 (length,), across shard borders."""
        parts, first = [], 0
        for shard in self.shards:
            parts.append(shard[max(start - first, 0) : max(start + length - first, 0)])
            first += len(shard)
        return np.concatenate(parts)


def load_tokens(path: Path | str, vocabulary: str | None = None, verify: bool = True) -> Tokens:
    """Open a shard file or a folder of shards, of one vocabulary or of any that is known.

    Checks every header, that no shard is missing and, unless `verify` is False, the sha256 of the
    stream (which reads it once). Raises UserError naming the file that is not as its header says.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(f"there are no token shards at {path}{_instead(path)}.")
    if files == [path] and path.suffix != ".safetensors":
        raise UserError(
            f"{path} is no token shard; make shards of a text with `python -m lowprec data prepare "
            f"{path}`, and name their folder."
        )
    opened = [open_shard(file) for file in files]
    first = opened[0][1]
    for index, (file, (_, header)) in enumerate(zip(files, opened, strict=True)):
        if (header["corpus_sha256"], header["shard"]) != (first["corpus_sha256"], str(index)):
            raise UserError(f"{file} is not shard {index} of {first['corpus']}; build it again.")
    if int(first["shards"]) != len(files):
        raise UserError(f"{path} has {len(files)} of {first['shards']} shards; build it again.")
    wanted = VOCABULARIES if vocabulary is None else (vocabulary,)
    if first["vocabulary"] not in wanted:
        raise UserError(
            f"{path} was made with the vocabulary {first['vocabulary']}, not "
            f"{' or '.join(wanted)}; build the shards again with that one."
        )
    shards = tuple(tokens for tokens, _ in opened)
    if verify:
        _verify(files, opened)
    return Tokens(first["corpus"], first["vocabulary"], first["corpus_sha256"], shards)


def _instead(path: Path) -> str:
    """What to do about a path without shards: make those of a corpus, or name another path."""
    if path.name in (*known_corpora(), *HUB):
        return f"; make them with `python -m lowprec data prepare {path.name}`"
    return (
        (", where there is a folder" if path.is_dir() else ", a path that does not exist")
        + "; name a .safetensors shard or a folder of shards, as `python -m lowprec data prepare` "
        "writes them"
    )


def open_shard(path: Path) -> tuple[np.ndarray, dict[str, str]]:
    """Memory-map one shard; returns its tokens, uint16 (n_tokens,), and its header."""
    try:
        with safe_open(path, framework="numpy") as file:
            header, names = file.metadata() or {}, list(file.keys())
            stored = file.get_slice("tokens") if names == ["tokens"] else None
            layout = (stored.get_dtype(), stored.get_shape()) if stored else None
        numbers = [header.get(key, "") for key in ("shard", "shards", "n_tokens")]
        whole = HEADER <= header.keys() and all(number.isdecimal() for number in numbers)
        fits = whole and layout == ("U16", [int(header["n_tokens"])])
        if header.get("format") != SHARD_FORMAT or not fits:
            raise UserError(f"{path} is not a lowprec token shard; name one that `build` wrote.")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); build it again.") from error
    with path.open("rb") as file:
        # safetensors: 8 bytes with the header's length, the header, then the tensors
        offset = 8 + int.from_bytes(file.read(8), "little")
    return np.memmap(path, TOKEN, "r", offset, tuple(layout[1])), header


def _verify(files: list[Path], opened: list[tuple[np.ndarray, dict[str, str]]]) -> None:
    stream = hashlib.sha256()
    for tokens, _ in opened:
        stream.update(tokens)
    if stream.hexdigest() == opened[0][1]["corpus_sha256"]:
        return
    intact = [sha256(tokens) == header["sha256"] for tokens, header in opened]
    damaged = files[intact.index(False)] if False in intact else files[0].parent
    raise UserError(f"the tokens in {damaged} differ from their sha256; build them again.")


def batch(
    tokens: Tokens,
    step: int,
    seed: int,
    batch_size: int,
    block_size: int,
    rows: slice = slice(None),
):
    """Return inputs and targets of a step, two int64 tensors (rows, block_size) on the CPU.

    Row r is the window that starts at the r-th output of the counter-based generator Philox with
    the key (seed, step), modulo the number of windows; targets are the inputs one token later.
    Nothing else enters, so data order needs no state to resume, and a rank that takes only
    `rows` (see `rank_rows`) gets those rows of the global batch.
    """
    import torch  # here, because building shards needs no torch

    starts = window_starts(tokens, step, seed, batch_size, block_size)[rows]
    block = np.stack([tokens.window(int(start), block_size + 1) for start in starts])
    block = torch.from_numpy(block.astype(np.int64))
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def window_starts(tokens: Tokens, step: int, seed: int, batch_size: int, block_size: int):
    """Where the windows of a step's whole batch begin in the stream, uint64 (batch_size,)."""
    windows = len(tokens) - block_size
    if windows < 1:
        raise UserError(
            f"{tokens.name} has {len(tokens)} tokens, too few for a block of {block_size}; "
            "make block_size smaller."
        )
    # The raw 64-bit outputs are the same in every numpy; the modulo's bias is below 1e-9.
    return np.random.Philox(key=[seed, step]).random_raw(batch_size) % windows


def rank_rows(batch_size: int, rank: int, world_size: int) -> slice:
    """Return the rows of the global batch that belong to one of `world_size` ranks."""
    if batch_size % world_size or not 0 <= rank < world_size:
        raise UserError(
            f"rank {rank} of {world_size} cannot take an equal part of {batch_size} rows; make "
            "batch_size a multiple of the number of ranks."
        )
    share = batch_size // world_size
    return slice(rank * share, (rank + 1) * share)
