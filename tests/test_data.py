"""Corpora, shards and batches, without a network and without GPT-2's vocabulary."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Bytes
from safetensors import safe_open
from safetensors.numpy import save_file

from lowprec import UserError
from lowprec.training.data import corpora
from lowprec.training.data import shards as data

FILES = {
    "toylib/a.py": "print('α')\n",
    "toylib/b.md": "# b\r\n<|endoftext|>\n",
    "toylib/sub/c.txt": "c" * 50,
}
DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: toylib\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
ORDER = ["toylib/sub/c.txt", "toylib/a.py", "toylib/b.md"]


def stream():
    """The token stream of the toy corpus under the byte encoding."""
    parts = [[*FILES[path].encode(), 256] for path in ORDER]
    return np.array(sum(parts, []), dtype=np.uint16)


@pytest.fixture
def wheel_file(tmp_path):
    path = tmp_path / "wheels" / "toylib-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text.encode())
        for name, text in DIST_INFO.items():
            archive.writestr(f"toylib-1.0.dist-info/{name}", text)
    return path


@pytest.fixture
def corpus(wheel_file):
    digest = hashlib.sha256(wheel_file.read_bytes()).hexdigest()
    wheel = corpora.Wheel("toylib", "1.0", wheel_file.name, digest, "MIT")
    files = [(0, path, hashlib.sha256(FILES[path].encode()).digest()) for path in ORDER]
    return corpora.Corpus("toy", "gpt2", len(stream()), data.sha256(stream()), (wheel,), files)


@pytest.fixture
def installed(tmp_path, wheel_file, monkeypatch):
    """The toy wheel's files installed in a folder on sys.path."""
    site = tmp_path / "site"
    with ZipFile(wheel_file) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.fixture
def download(wheel_file):
    def copy(wheels, folder):
        copy.asked = [wheel.file for wheel in wheels]
        (folder / wheel_file.name).write_bytes(wheel_file.read_bytes())

    copy.asked = []
    return copy


def build(corpus, out, download):
    data.build_corpus(corpus, out, Bytes, processes=1, download=download)
    return data.load_tokens(out)


def contents(tokens):
    return tokens.window(0, len(tokens))


# The way from a list to shards


def test_build_from_installed_files(tmp_path, corpus, installed, download):
    tokens = build(corpus, tmp_path / "out", download)
    assert download.asked == []
    assert np.array_equal(contents(tokens), stream())
    assert (tokens.name, tokens.sha256) == ("toy", corpus.sha256)


def test_build_from_a_downloaded_wheel(tmp_path, corpus, download):
    tokens = build(corpus, tmp_path / "out", download)
    assert download.asked == ["toylib-1.0-py3-none-any.whl"]
    assert np.array_equal(contents(tokens), stream())


@pytest.mark.parametrize("spoil", ["other bytes", "missing file", "other version"])
def test_installed_files_that_differ_are_downloaded(tmp_path, corpus, installed, download, spoil):
    if spoil == "other bytes":
        (installed / ORDER[2]).write_text("edited")
    elif spoil == "missing file":
        (installed / ORDER[2]).unlink()
    else:
        corpus = dataclasses.replace(
            corpus, wheels=(dataclasses.replace(corpus.wheels[0], version="1.1"),)
        )
    tokens = build(corpus, tmp_path / "out", download)
    assert download.asked == ["toylib-1.0-py3-none-any.whl"]
    assert np.array_equal(contents(tokens), stream())


def test_a_wheel_with_another_hash_is_named(tmp_path, corpus, download):
    wheel = dataclasses.replace(corpus.wheels[0], sha256="0" * 64)
    with pytest.raises(UserError, match="toylib-1.0-py3-none-any.whl has another sha256"):
        build(dataclasses.replace(corpus, wheels=(wheel,)), tmp_path / "out", download)
    assert not (tmp_path / "out").exists()


def test_a_file_with_another_hash_is_named(tmp_path, corpus, download):
    files = [*corpus.files[:2], (0, "toylib/b.md", bytes(32))]
    with pytest.raises(UserError, match="toylib/b.md in toylib-1.0.*differs"):
        build(dataclasses.replace(corpus, files=files), tmp_path / "out", download)


def test_a_file_missing_from_the_wheel_is_named(tmp_path, corpus, download):
    files = [*corpus.files, (0, "toylib/gone.py", bytes(32))]
    with pytest.raises(UserError, match="toylib/gone.py is not in toylib-1.0"):
        build(dataclasses.replace(corpus, files=files), tmp_path / "out", download)


def test_a_download_that_brings_nothing_is_named(tmp_path, corpus):
    with pytest.raises(UserError, match="was not downloaded; install toylib==1.0"):
        build(corpus, tmp_path / "out", lambda wheels, folder: None)


def test_pip_fetches_the_very_wheel(tmp_path, corpus, wheel_file, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_file.parent))
    tokens = build(corpus, tmp_path / "out", corpora.pip_download)
    assert np.array_equal(contents(tokens), stream())


def test_a_failed_pip_is_one_sentence(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="could not download toylib==1.0 .*open the network") as e:
        build(corpus, tmp_path / "out", corpora.pip_download)
    assert "\n" not in str(e.value)


def test_another_token_stream_is_refused(tmp_path, corpus, download):
    with pytest.raises(UserError, match="another sha256 than its list"):
        build(dataclasses.replace(corpus, sha256="0" * 64), tmp_path / "out", download)
    assert not (tmp_path / "out").exists()


def test_another_vocabulary_is_refused(tmp_path, corpus, download):
    corpus = dataclasses.replace(corpus, vocabulary="bytes")
    with pytest.raises(UserError, match="vocabulary bytes, not gpt2"):
        build(corpus, tmp_path / "out", download)


def test_built_shards_are_left_alone_and_others_are_not_overwritten(tmp_path, corpus, download):
    out = tmp_path / "out"
    build(corpus, out, download)
    before = (out / "000.safetensors").stat().st_mtime_ns
    build(corpus, out, None)
    assert (out / "000.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="does not hold toy"):
        build(dataclasses.replace(corpus, sha256="0" * 64), out, download)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("keep me")
    with pytest.raises(UserError, match="does not hold toy"):
        build(corpus, tmp_path / "full", download)


# The vocabulary


def test_a_folder_without_the_vocabulary_is_named(tmp_path):
    with pytest.raises(UserError, match=r"vocab\.bpe; name a folder"):
        data.gpt2_encoding(tmp_path)


def test_another_vocabulary_file_is_refused(tmp_path):
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="vocab.bpe is not the file OpenAI published"):
        data.gpt2_encoding(tmp_path)


@pytest.mark.skipif(
    "LOWPREC_GPT2_VOCAB" not in os.environ, reason="set LOWPREC_GPT2_VOCAB to run it"
)
def test_gpt2_tokens_of_the_smoke_shard():
    encoding = data.gpt2_encoding()
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)
    assert encoding.encode_ordinary("Hello world") == [15496, 995]
    tokens = contents(data.load_tokens(data.SMOKE))
    documents = encoding.decode(tokens.tolist()).split("<|endoftext|>")[:-1]
    digests = [hashlib.sha256(document.encode()).digest() for document in documents]
    assert digests == [digest for _, _, digest in corpora.read_corpus("smoke").files]


# Committed lists and the committed shard


@pytest.mark.parametrize("name", ["pysource", "smoke"])
def test_committed_list_agrees_with_itself(name):
    corpus = corpora.read_corpus(name)
    facts = json.loads((corpora.CORPORA / f"{name}.json").read_text())
    digests = [digest for _, _, digest in corpus.files]
    assert len(digests) == len(set(digests)) == facts["files"], "deduplicated"
    keys = [hashlib.sha256(f"{facts['seed']}:{d.hex()}".encode()).digest() for d in digests]
    assert keys == sorted(keys), "in the seeded order"
    assert len({(index, path) for index, path, _ in corpus.files}) == len(corpus.files)
    suffixes = {Path(path).suffix for _, path, _ in corpus.files}
    assert suffixes <= {".py", ".pyi", ".md", ".rst", ".txt", ".h"}
    for wheel in corpus.wheels:
        name, version = wheel.file.split("-")[:2]
        assert name == wheel.name.replace("-", "_").lower() and version == wheel.version
        assert len(bytes.fromhex(wheel.sha256)) == 32 and wheel.license


def test_pysource_is_large_enough_and_smoke_is_part_of_it():
    pysource, smoke = corpora.read_corpus("pysource"), corpora.read_corpus("smoke")
    assert pysource.tokens >= 100_000_000
    assert {f[1:] for f in smoke.files} <= {f[1:] for f in pysource.files}
    assert set(smoke.wheels) <= set(pysource.wheels)


def test_corpora_are_small():
    sizes = {path.name: path.stat().st_size for path in corpora.CORPORA.iterdir()}
    assert sizes["pysource.parquet"] <= 2_000_000 and sizes["smoke.safetensors"] <= 2_000_000
    assert sum(sizes.values()) < 4_000_000


def test_smoke_shard_is_what_its_list_says():
    tokens, corpus = data.load_tokens(data.SMOKE), corpora.read_corpus("smoke")
    assert (len(tokens), tokens.sha256) == (corpus.tokens, corpus.sha256)
    assert data.sha256(contents(tokens)) == corpus.sha256
    assert int(contents(tokens).max()) == 50256
    assert np.count_nonzero(contents(tokens) == 50256) == len(corpus.files)


def test_a_place_that_cannot_hold_shards_is_named(tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "shards"
    with pytest.raises(UserError, match=f"cannot write {out}: File exists; give another folder"):
        data.write_shards(np.arange(9, dtype=data.TOKEN), out, "toy", "gpt2")


def test_an_unknown_or_damaged_list_is_named(tmp_path):
    with pytest.raises(UserError, match="no corpus 'pysauce'.*pysource, smoke"):
        corpora.read_corpus("pysauce")
    for suffix in ("json", "parquet"):
        source = corpora.CORPORA / f"smoke.{suffix}"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert corpora.read_corpus("smoke", tmp_path).tokens
    table = pq.read_table(tmp_path / "smoke.parquet")
    pq.write_table(table.slice(1), tmp_path / "smoke.parquet")
    with pytest.raises(UserError, match="smoke.json and smoke.parquet disagree"):
        corpora.read_corpus("smoke", tmp_path)
    pq.write_table(pa.table({"path": ["a"]}), tmp_path / "smoke.parquet")
    with pytest.raises(UserError, match="list of corpus 'smoke' is damaged"):
        corpora.read_corpus("smoke", tmp_path)
    (tmp_path / "smoke.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="list of corpus 'smoke' is damaged"):
        corpora.read_corpus("smoke", tmp_path)


# Shards


@pytest.fixture
def shards(tmp_path):
    """1000 tokens in four shards of at most 300."""
    tokens = np.random.default_rng(0).integers(0, 50257, 1000).astype(np.uint16)
    data.write_shards(tokens, tmp_path / "shards", "toy", "gpt2", shard_tokens=300)
    return tmp_path / "shards"


def test_windows_cross_shard_borders(shards):
    tokens = data.load_tokens(shards)
    whole = contents(tokens)
    assert [len(s) for s in tokens.shards] == [300, 300, 300, 100]
    assert data.sha256(whole) == tokens.sha256
    for start, length in [(0, 1), (299, 2), (300, 300), (250, 700), (999, 1)]:
        window = tokens.window(start, length)
        assert window.dtype == np.uint16
        assert np.array_equal(window, whole[start : start + length])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def garble(path):
    path.write_bytes(b"not safetensors at all")


def another_tensor(path):
    save_file({"q": np.zeros(3, np.float32)}, path)


def wrong_dtype(path):
    save_file({"tokens": np.zeros(3)}, path, {"format": data.SHARD_FORMAT, "n_tokens": "3"})


@pytest.mark.parametrize(
    "change",
    [{key: None} for key in sorted(data.HEADER)]
    + [dict(shard="one"), dict(shards="-4"), dict(n_tokens=""), dict(n_tokens="3.0")],
    ids=str,
)
def test_a_damaged_header_is_named(shards, change):
    """A field that is missing, or no number where one belongs."""
    path = shards / "001.safetensors"
    with safe_open(path, "numpy") as file:
        header, tokens = file.metadata() | change, file.get_tensor("tokens")
    save_file({"tokens": tokens}, path, {k: v for k, v in header.items() if v is not None})
    with pytest.raises(UserError, match="001.safetensors is not a lowprec token shard"):
        data.load_tokens(shards)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "001.safetensors is damaged"),
        (garble, "001.safetensors is damaged"),
        (flip_a_bit, "001.safetensors differ from their sha256"),
        (another_tensor, "001.safetensors is not a lowprec token shard"),
        (wrong_dtype, "001.safetensors is not a lowprec token shard"),
        (Path.unlink, "002.safetensors is not shard 1 of toy"),
    ],
)
def test_a_spoiled_shard_is_named(shards, spoil, message):
    spoil(shards / "001.safetensors")
    with pytest.raises(UserError, match=message):
        data.load_tokens(shards)


def test_missing_shards_and_another_vocabulary(shards, tmp_path):
    with pytest.raises(UserError, match="vocabulary gpt2, not bytes"):
        data.load_tokens(shards, vocabulary="bytes")
    (shards / "003.safetensors").unlink()
    with pytest.raises(UserError, match="has 3 of 4 shards"):
        data.load_tokens(shards)
    for absent, why in {
        tmp_path / "none": ", a path that does not exist; name a .safetensors shard or a folder",
        tmp_path: ", where there is a folder; name a .safetensors shard or a folder",
        tmp_path / "pysource": "; make them with `python -m lowprec data prepare pysource`.",
        tmp_path / "fineweb": "; make them with `python -m lowprec data prepare fineweb`.",
    }.items():
        with pytest.raises(UserError, match="no token shards at") as error:
            data.load_tokens(absent)
        assert f"{absent}{why}" in str(error.value)


# Batches


def test_a_batch_is_a_pure_function_of_seed_step_and_row(shards):
    tokens = data.load_tokens(shards)
    x, y = data.batch(tokens, step=7, seed=3, batch_size=8, block_size=64)
    assert x.shape == y.shape == (8, 64) and str(x.dtype) == str(y.dtype) == "torch.int64"
    assert (x[:, 1:] == y[:, :-1]).all()
    data.batch(tokens, step=8, seed=3, batch_size=8, block_size=64)
    again = data.batch(data.load_tokens(shards), 7, 3, 8, 64)
    assert (again[0] == x).all() and (again[1] == y).all()
    assert (data.batch(tokens, 7, 3, 5, 64)[0] == x[:5]).all(), "not of the batch size"
    for step, seed in [(8, 3), (7, 4), (3, 7)]:
        assert not (data.batch(tokens, step, seed, 8, 64)[0] == x).all()


def test_data_order_is_pinned():
    """The windows of a recorded run; they must never change."""
    whole = np.arange(50_000, dtype=np.uint16)
    tokens = data.Tokens("count", "gpt2", data.sha256(whole), (whole,))
    x, _ = data.batch(tokens, step=1000, seed=2, batch_size=4, block_size=16)
    assert x[:, 0].tolist() == [15523, 647, 14407, 8525]


def test_windows_are_uniform():
    whole = np.arange(100, dtype=np.uint16)
    tokens = data.Tokens("count", "gpt2", data.sha256(whole), (whole,))
    firsts = [data.batch(tokens, step, 0, 100, 90)[0][:, 0] for step in range(100)]
    counts = np.bincount(np.concatenate(firsts), minlength=10)
    assert len(counts) == 10, "every window fits with its targets"
    # 10,000 draws over 10 windows: chi-squared with 9 degrees of freedom, 99.99th percentile 33.7
    assert ((counts - 1000) ** 2 / 1000).sum() < 33.7


def test_ranks_share_out_the_rows_of_one_batch(shards):
    tokens = data.load_tokens(shards)
    x, _ = data.batch(tokens, 5, 1, 12, 32)
    slices = [data.rank_rows(12, rank, 4) for rank in range(4)]
    assert sorted(row for s in slices for row in range(12)[s]) == list(range(12))
    parts = [data.batch(tokens, 5, 1, 12, 32, rows)[0] for rows in slices]
    assert [len(p) for p in parts] == [3, 3, 3, 3]
    assert (np.concatenate(parts) == x.numpy()).all()
    for size, rank, world in [(12, 0, 5), (12, 4, 4), (12, -1, 4)]:
        with pytest.raises(UserError, match="cannot take an equal part"):
            data.rank_rows(size, rank, world)


def test_a_block_that_does_not_fit_is_refused(shards):
    tokens = data.load_tokens(shards)
    assert data.batch(tokens, 0, 0, 2, 999)[0].shape == (2, 999)
    with pytest.raises(UserError, match="too few for a block of 1000; make block_size smaller"):
        data.batch(tokens, 0, 0, 2, 1000)


def test_importing_data_needs_neither_torch_nor_a_tokenizer():
    heavy = "{'torch', 'tiktoken', 'tyro', 'papermill', 'datasets'}"
    script = f"import sys, lowprec.training.data.shards; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("name", ["my.txt", "my.jsonl", "my"])
def test_a_text_in_the_place_of_shards_is_to_be_prepared(tmp_path, name):
    (tmp_path / name).write_text("once upon a time\n" * 100)
    with pytest.raises(UserError, match=f"my.* is no token shard; make .* data prepare .*/{name}`"):
        data.load_tokens(tmp_path / name)
