"""Documents from files and from the hub, and their tokens.

The hub cannot be reached from a test: the call that would stream from it is compared instead.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Bytes

from lowprec import UserError, __main__
from lowprec.records import runs
from lowprec.training.config import TrainConfig
from lowprec.training.data import shards as data
from lowprec.training.data import text

needs_gpt2 = pytest.mark.skipif(
    "LOWPREC_GPT2_VOCAB" not in os.environ, reason="set LOWPREC_GPT2_VOCAB to run it"
)
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets is not installed"
)
TEXTS = ["A first text.\n", "<|endoftext|> is text here", "Drittes: äöü 中文\n\nend", "x" * 40]


def stream(texts):
    return np.array(sum(([*t.encode(), 256] for t in texts), []), np.uint16)


def write_text(folder):
    """Texts 1 and 3 in a subfolder, so that the order is that of the names, not of the folders."""
    (folder / "b").mkdir(parents=True)
    for name, content in zip(["a.txt", "b/1.txt", "b/2 [1].txt", "c.txt"], TEXTS, strict=True):
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "d.txt").write_text("")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "notes.log").write_text("of another kind")
    return folder


def write_jsonl(folder):
    folder.mkdir()
    lines = [json.dumps({"text": t}) for t in TEXTS[:3]]
    (folder / "0.jsonl").write_text("\n".join(lines) + '\n{"text": null}\n{"text": ""}\n')
    (folder / "1.jsonl").write_text(json.dumps({"id": 7, "text": TEXTS[3]}), encoding="utf-8-sig")
    return folder


def write_parquet(folder):
    folder.mkdir()
    pq.write_table(pa.table({"text": TEXTS[:3]}), folder / "0.parquet", row_group_size=1)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "1.parquet")
    pq.write_table(pa.table({"id": [0, 1], "text": [None, TEXTS[3]]}), folder / "2.parquet")
    return folder


def build(path, out, processes=1, tokens=None):
    data.build_text(data.find_source(path), out, Bytes, processes, tokens)
    return data.load_tokens(out)


def contents(tokens):
    return tokens.window(0, len(tokens))


# Files


@needs_datasets
@pytest.mark.parametrize("write", [write_text, write_jsonl, write_parquet])
def test_a_folder_becomes_shards(tmp_path, write):
    folder = write(tmp_path / "mine")
    tokens = build(folder, tmp_path / "out")
    assert np.array_equal(contents(tokens), stream(TEXTS))
    assert (tokens.name, tokens.vocabulary) == ("mine", "gpt2")
    assert tokens.sha256 == data.sha256(stream(TEXTS))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"], "nothing else is left"


@needs_datasets
@pytest.mark.parametrize("name", ["a.txt", "0.jsonl", "0.parquet"])
def test_a_file_becomes_shards(tmp_path, name):
    write = {"txt": write_text, "jsonl": write_jsonl, "parquet": write_parquet}
    folder = write[name.split(".")[1]](tmp_path / "mine")
    tokens = build(folder / name, tmp_path / "out")
    assert np.array_equal(contents(tokens), stream(TEXTS[:1] if name == "a.txt" else TEXTS[:3]))


@needs_datasets
@pytest.mark.parametrize("limit", [1, 15, 30, 10_000])
def test_tokens_says_where_to_stop(tmp_path, capsys, limit):
    tokens = build(write_parquet(tmp_path / "mine"), tmp_path / "out", tokens=limit)
    assert np.array_equal(contents(tokens), stream(TEXTS)[:limit])
    asked = f"{limit:,} were asked for"
    assert (asked in capsys.readouterr().out) == (limit > len(stream(TEXTS)))


@needs_datasets
def test_shards_do_not_depend_on_processes(tmp_path):
    texts = [chr(65 + i % 26) * (i % 700) + "\nz" for i in range(2000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "many.parquet")
    for processes in (1, 2):
        build(tmp_path / "many.parquet", tmp_path / str(processes), processes, tokens=500_000)
    one, two = ((tmp_path / p / "000.safetensors").read_bytes() for p in "12")
    assert one == two, "every byte, the header's too"
    assert len(one) > 1_000_000


@needs_datasets
def test_no_shard_folder_is_overwritten(tmp_path):
    folder, out = write_text(tmp_path / "mine"), tmp_path / "out"
    build(folder, out)
    before = (out / "000.safetensors").read_bytes()
    with pytest.raises(UserError, match="out exists and is never overwritten; give another folder"):
        build(folder, out)
    assert (out / "000.safetensors").read_bytes() == before


@needs_datasets
@pytest.mark.parametrize("reader", ["parquet", "jsonl"])
def test_a_missing_text_column_is_named(tmp_path, reader):
    write_parquet(tmp_path / "mine") if reader == "parquet" else write_jsonl(tmp_path / "mine")
    if reader == "parquet":
        pq.write_table(pa.table({"id": [1], "content": ["x"]}), tmp_path / "mine" / "1.parquet")
    else:
        (tmp_path / "mine" / "1.jsonl").write_text('{"id": 1, "content": "x"}\n')
    message = rf"1\.{reader} has no column `text` with strings, its columns are id, content; rename"
    with pytest.raises(UserError, match=message):
        build(tmp_path / "mine", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@needs_datasets
def test_a_text_column_with_numbers_is_named(tmp_path):
    pq.write_table(pa.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet has no column `text` with strings"):
        build(tmp_path / "a.parquet", tmp_path / "out")


@needs_datasets
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("2.parquet", b"PAR1", r"2\.parquet could not be read \(.*\); mend or remove that file"),
        ("2.jsonl", b'{"text": "a"}\n{"text"\n', r"2\.jsonl could not be read \(line 2 is no JSON"),
        ("b/2 [1].txt", b"\xff\xfe", r"2 \[1\]\.txt is not UTF-8; convert or remove it"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    write = {"txt": write_text, "jsonl": write_jsonl, "parquet": write_parquet}
    folder = write[name.split(".")[-1]](tmp_path / "mine")
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        build(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@needs_datasets
def test_a_source_without_text_is_named(tmp_path):
    pq.write_table(pa.table({"text": ["", None]}), tmp_path / "hollow.parquet")
    with pytest.raises(UserError, match="hollow has no text"):
        build(tmp_path / "hollow.parquet", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_paths_without_text_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no text in .*; name a \.txt, \.jsonl, \.parquet file"):
        data.find_source(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="no text in .*empty.txt"):
        data.find_source(tmp_path / "empty.txt")
    (tmp_path / "thesis.doc").write_text("x")
    with pytest.raises(UserError, match=r"thesis.doc is none of \.txt, \.jsonl, \.parquet"):
        data.find_source(tmp_path / "thesis.doc")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"holds \.jsonl and \.txt files; name files of one kind"):
        data.find_source(tmp_path)
    (tmp_path / "pysource.txt").write_text("x")
    with pytest.raises(UserError, match="pysource is the name of another corpus; rename"):
        data.find_source(tmp_path / "pysource.txt")
    with pytest.raises(UserError, match="no path 'pysauce'; take pysource, smoke, fineweb, openw"):
        data.find_source("pysauce")


@pytest.mark.parametrize("option", ["processes", "tokens"])
def test_options_below_one_and_tokens_of_a_list_are_refused(option):
    with pytest.raises(UserError, match=f"--{option} is 0; give 1 or more"):
        data.build("smoke", **{option: 0})
    with pytest.raises(UserError, match="smoke is a fixed list; leave --tokens away"):
        data.build("smoke", tokens=5)


@pytest.mark.slow
@needs_datasets
def test_an_interrupted_build_leaves_nothing_that_looks_finished(tmp_path):
    """Killed without warning, it leaves a hidden folder at most, and the build can start again."""
    pq.write_table(pa.table({"text": ["word " * 1000] * 20_000}), tmp_path / "big.parquet")
    script = "from test_text import *; build(sys.argv[1], data.Path(sys.argv[2]))"
    child = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "big.parquet", tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
    )
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size for p in tmp_path.glob(".out.*/tokens")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    for path in tmp_path.glob(".out.*"):
        with pytest.raises(UserError, match="no token shards at"):
            data.load_tokens(path)
    assert len(build(tmp_path / "big.parquet", tmp_path / "out", tokens=100)) == 100


@needs_datasets
@pytest.mark.parametrize("count", [3, 1024, 1025])
def test_too_few_tokens_for_a_block_are_told_when_they_are_made(tmp_path, capsys, count):
    (tmp_path / "a.txt").write_text("a" * (count - 1))
    tokens = build(tmp_path / "a.txt", tmp_path / "out")
    hint = "too few for a block of 1024: give more, or train with a smaller --block-size"
    assert len(tokens) == count and (hint in capsys.readouterr().out) == (count < 1025)
    draw = partial(data.batch, tokens, 0, 0, 1, TrainConfig().block_size)
    if count < 1025:
        pytest.raises(UserError, draw)
    else:
        draw()


# The hub


class Stub:
    """`datasets.load_dataset`, noting how it was called."""

    def __init__(self, rows):
        self.rows, self.calls = rows, []

    def __call__(self, path, **options):
        self.calls.append((path, options))
        if isinstance(self.rows, Exception):
            raise self.rows
        return iter(self.rows)


@needs_datasets
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fineweb", ("HuggingFaceFW/fineweb", {"name": "sample-10BT"})),
        ("openwebtext", ("Skylion007/openwebtext", {})),
    ],
)
def test_the_hub_is_streamed(tmp_path, monkeypatch, name, call):
    stub = Stub({"text": t, "id": i} for i, t in enumerate(TEXTS))
    monkeypatch.setattr("datasets.load_dataset", stub)
    monkeypatch.setattr(data, "gpt2_encoding", lambda folder: Bytes())
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["data", "prepare", name, "--tokens", "40", "--processes", "1"]) == 0
    assert stub.calls == [(call[0], call[1] | {"split": "train", "streaming": True})]
    tokens = data.load_tokens(tmp_path / "shards" / name)
    assert tokens.name == name and np.array_equal(contents(tokens), stream(TEXTS)[:40])


def test_the_hub_has_a_default_number_of_tokens():
    assert {source.tokens for source in text.HUB.values()} == {200_000_000}


@needs_datasets
def test_a_missing_network_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", Stub(ConnectionError("Couldn't reach it\nat all")))
    message = r"HuggingFaceFW/fineweb could not be read \(Couldn't reach it\); open the network, or"
    with pytest.raises(UserError, match=message) as caught:
        build("fineweb", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@needs_datasets
def test_datasets_itself_is_offline_in_one_sentence(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from lowprec.training.data import text; next(text.documents(text.HUB['fineweb']))",
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "HuggingFaceFW/fineweb could not be read" in last and "open the network" in last


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"package datasets; install it with `pip install -e '\.\["):
        build("fineweb", tmp_path / "out")


# Tokens


def encoded(texts, **options):
    return np.concatenate(list(text.encode(texts, **options)))


@pytest.mark.parametrize("size", [1, 7, 1 << 18])
def test_order_does_not_depend_on_processes_or_pieces(size):
    texts = ["", *(chr(65 + i % 26) * (i % 7) + "\nb" for i in range(100)), ""]
    for processes in (1, 2):
        tokens = encoded(texts, encoding=Bytes(), processes=processes, size=size)
        assert tokens.dtype == np.uint16 and np.array_equal(tokens, stream(texts))


def test_only_a_few_texts_are_read_ahead():
    taken = []
    texts = (taken.append(i) or "x" * 100 for i in range(10_000))
    parts = text.encode(texts, Bytes(), processes=2, size=100)
    next(parts)
    parts.close()
    assert 0 < len(taken) < 20


class Fatal(Bytes):
    def encode_ordinary(self, text):
        os._exit(1)


def test_a_process_that_dies_is_named():
    with pytest.raises(UserError, match="a tokenizing process died.*fewer --processes"):
        encoded(["x"], encoding=Fatal(), processes=2)


@needs_gpt2
def test_pieces_have_the_tokens_of_the_whole():
    """On the smoke corpus and on every arrangement of white space around a newline."""
    encoding = data.gpt2_encoding()
    tokens = contents(data.load_tokens(data.SMOKE))
    texts = encoding.decode(tokens.tolist()).split("<|endoftext|>")[:-1]
    assert np.array_equal(encoded(texts, encoding=encoding, processes=1, size=50), tokens)
    parts = ["a", "'s", "\n", " ", "\t", "\u00a0", "\u3000", "\x1c", "9", "中", "\r"]
    grid = ["".join((a, b, "\n", c, d)) for a in parts for b in parts for c in parts for d in parts]
    whole = sum(([*encoding.encode_ordinary(t), 50256] for t in grid), [])
    assert encoded(grid, encoding=encoding, processes=1, size=1).tolist() == whole


@needs_datasets
def test_bytes_need_no_vocabulary_and_train(tmp_path, monkeypatch, capsys):
    """From a text to the probe of what was trained on it, with no file of GPT-2's."""
    monkeypatch.delenv("LOWPREC_GPT2_VOCAB", raising=False)
    monkeypatch.setattr(text, "gpt2_encoding", None)
    monkeypatch.chdir(tmp_path)
    written = "Drittes: äöü 中文\n\nend, and on it goes. " * 40
    (tmp_path / "mine.txt").write_text(written, encoding="utf-8")
    command = ["data", "prepare", "mine.txt", "--vocabulary", "bytes", "--processes", "1"]
    assert __main__.main(command) == 0
    tokens = data.load_tokens("shards/mine")
    assert contents(tokens).tolist() == [*written.encode(), 256]
    assert (tokens.vocabulary, tokens.vocab_size) == ("bytes", 384)
    how = "--data shards/mine --steps 40 --weights-at 40 --batch-size 2 --block-size 32"
    assert __main__.main(["train", "tiny", *how.split(), "--device", "cpu", "--out", "run"]) == 0
    losses = runs.load_run("run").metrics.loss
    assert abs(losses[0] - np.log(384)) < 0.3 and losses.iloc[-1] < losses[0] - 1
    capsys.readouterr()
    assert __main__.main(["probe", "run/.weights/step-000040.pt", "--text", "mine.txt"]) == 0
    assert "of mine.txt, as bytes" in capsys.readouterr().out


def test_a_vocabulary_is_one_of_those_known(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for how, words in (
        (dict(vocabulary="letters"), "--vocabulary is letters; give gpt2 or bytes"),
        (dict(vocabulary="bytes", vocab_dir=tmp_path), "--vocab-dir is of GPT-2's vocabulary"),
    ):
        with pytest.raises(UserError, match=words):
            data.build(tmp_path / "a.txt", tmp_path / "out", **how)
    with pytest.raises(UserError, match="made with the vocabulary gpt2, not bytes"):
        data.build("smoke", tmp_path / "out", vocabulary="bytes")
    data.write_shards(np.zeros(4, np.uint16), tmp_path / "out", "a", "letters")
    with pytest.raises(UserError, match="vocabulary letters, not gpt2 or bytes"):
        data.load_tokens(tmp_path / "out")


@needs_gpt2
@needs_datasets
def test_the_command_line_writes_gpt2_tokens(tmp_path, monkeypatch, capsys):
    write_text(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["data", "prepare", "mine", "--processes", "2"]) == 0
    tokens = contents(data.load_tokens("shards/mine"))
    assert "shards/mine" in capsys.readouterr().out
    decoded = data.gpt2_encoding().decode(tokens.tolist())
    assert decoded == "".join(t + "<|endoftext|>" for t in TEXTS)
    assert np.count_nonzero(tokens == 50256) == len(TEXTS), "a marker in the text is only text"
    assert __main__.main(["data", "prepare", "mine"]) == 2
    assert "shards/mine exists and is never overwritten" in capsys.readouterr().err


def test_lines_of_json_need_no_fields_in_common_but_text(tmp_path):
    pytest.importorskip("datasets")
    rows = [dict(text="a", id=1)] * 3 + [dict(text="b", meta=dict(x=[1])), dict(id="2", text="c\n")]
    rows += [dict(text="2020-01-01")]
    lines = "\n\n".join(map(json.dumps, rows)) + "\r\n"
    (tmp_path / "a.jsonl").write_bytes(lines.encode())
    assert list(text.documents(text.local_source(tmp_path))) == [row["text"] for row in rows]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n["b"]\n')
    with pytest.raises(UserError, match=r"row 2 of \S*a.jsonl has no column .* columns are list"):
        list(text.documents(text.local_source(tmp_path)))
