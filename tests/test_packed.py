"""Packed campaigns: read as their folders were, refused when not whole, safe against any kill."""

import hashlib
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from lowprec import UserError
from lowprec.__main__ import main
from lowprec.diagnose import probe as affected
from lowprec.evidence import heads, survival
from lowprec.records import explosion, files, manifest, packed, runs
from lowprec.records.tables import write_groups, write_table
from lowprec.studies import kept
from lowprec.training import campaign, pack
from lowprec.training.loop import train

FILES = ["campaign.yaml", "metrics.parquet", "probes.parquet", "runs.jsonl"]


@pytest.fixture
def folder(tmp_path):
    """The smallest recorded campaign with runs that exploded and runs that did not: 4 runs."""
    return shutil.copytree(files.data_root() / "runs" / "layers_again", tmp_path / "layers_again")


def content(folder):
    """Every file that is not hidden, by its path."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    names = {p.relative_to(folder).as_posix(): p for p in files}
    return {name: p.read_bytes() for name, p in names.items() if not name.startswith(".")}


def everything(folder):
    """The runs of a folder with their tables, which load when first asked for."""
    found = list(runs.load_runs(folder).run)
    return [(run, run.metrics, run.probes, run.explosion, run.summary()) for run in found]


def assert_same(found, wanted):
    assert [run for run, *_ in found] == [run for run, *_ in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert json.dumps(ours[0].info) == json.dumps(theirs[0].info)
        for a, b in zip(ours[1:3], theirs[1:3], strict=True):
            pd.testing.assert_frame_equal(a, b, check_exact=True)
            assert all(a[name].to_numpy().tobytes() == b[name].to_numpy().tobytes() for name in b)
        assert ours[3:] == theirs[3:]


@pytest.mark.parametrize("name", ["layers_again", "windows"])
def test_readers_cannot_tell(tmp_path, name):
    """All that reads a recorded campaign says the same of its packed form."""
    folder = shutil.copytree(files.data_root() / "runs" / name, tmp_path / name)
    before, table, arms = everything(folder), runs.load_runs(folder), survival.load_arms(folder)
    others = {f: data for f, data in content(folder).items() if f.endswith("error.parquet")}
    pack.pack(folder)
    assert sorted(content(folder)) == sorted([*FILES, *others])
    assert others.items() <= content(folder).items()

    assert_same(everything(folder), before)
    again, packed_arms = runs.load_runs(folder), survival.load_arms(folder)
    pd.testing.assert_frame_equal(again.drop(columns="run"), table.drop(columns="run"))
    assert arms.keys() == packed_arms.keys()
    for arm, other in zip(arms.values(), packed_arms.values(), strict=True):
        assert (arm.config, arm.seeds, arm.by_seed) == (other.config, other.seeds, other.by_seed)
        assert (arm.exploded, arm.complete) == (other.exploded, other.complete)
    curves = [survival.kaplan_meier(t) for t in (again, table)]
    pd.testing.assert_frame_equal(*curves)
    base = table.arm.iloc[0]
    pd.testing.assert_frame_equal(*(survival.compare_arms(t, base) for t in (again, table)))
    for run, *_ in before:
        ours = runs.load_run(run.path)
        assert ours == run and ours.explosion == explosion.find_explosion(ours.metrics.loss)
        recorded = runs.load_run(files.data_root() / "runs" / name / run.name)
        lag = 400 if name == "layers_again" else 100
        takes = [heads.take_offs(r, lag=lag) for r in (ours, recorded)]
        pd.testing.assert_frame_equal(*takes)
        assert re.sub(r"^.*: ", "", ours.summary()) == re.sub(r"^.*: ", "", recorded.summary())


def test_what_else_a_run_holds_stays_in_its_folder(folder):
    kept_files = {}
    for name in ("captures/step-000010.xz", ".weights/step-000020.pt", "onset.parquet"):
        path = folder / "only1-seed0" / name
        path.parent.mkdir(exist_ok=True)
        pd.DataFrame(dict.fromkeys(runs.ONSET, [1, 2])).to_parquet(path)
        kept_files[path] = path.read_bytes()
    onset = runs.load_run(folder / "only1-seed0").onset
    pack.pack(folder)
    run = runs.load_run(folder / "only1-seed0")
    assert {path: path.read_bytes() for path in kept_files} == kept_files
    pd.testing.assert_frame_equal(run.onset, onset)
    assert "  captures   1" in run.summary() and list(kept.kept(run)) == [20]
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [".logs", "only1-seed0"]
    assert len(runs.load_runs(folder)) == 4


def test_the_files_are_small_and_others_can_read_them(folder):
    before = sum(len(data) for data in content(folder).values())
    names = sorted(path.parent.name for path in folder.glob("*/run.json"))
    lines = {name: json.loads((folder / name / "run.json").read_text()) for name in names}
    metrics = runs.load_run(folder / names[1]).metrics
    pack.pack(folder)
    assert sum(len(data) for data in content(folder).values()) < before
    first, *others = map(json.loads, (folder / "runs.jsonl").read_text().splitlines())
    assert first == lines[names[0]]
    for name, brief in zip(names[1:], others, strict=True):
        assert (brief.pop("name"), brief.pop("like")) == (name, names[0])
        whole = first | brief | {"name": name, "config": first["config"] | brief["config"]}
        assert whole == lines[name] and len(json.dumps(brief)) < len(json.dumps(whole)) / 2

    table = pd.read_parquet(folder / "metrics.parquet")
    ours = table[table.run == names[1]].drop(columns="run").reset_index(drop=True)
    pd.testing.assert_frame_equal(ours, metrics)
    footer = pq.ParquetFile(folder / "metrics.parquet").metadata
    assert footer.num_row_groups == 4 and list(footer.metadata) == [packed.NAMES]
    columns = {footer.row_group(0).column(i).path_in_schema: footer.row_group(0).column(i)
               for i in range(footer.num_columns)}  # fmt: skip
    assert set(columns) == {"run", *runs.METRICS}
    assert {c.compression for c in columns.values()} == {"BROTLI"}
    assert "BYTE_STREAM_SPLIT" in columns["loss"].encodings
    assert not any(c.is_stats_set for c in columns.values())


def test_a_run_with_other_fields_has_its_line_to_itself(folder):
    names = sorted(path.parent.name for path in folder.glob("*/run.json"))
    infos = {name: json.loads((folder / name / "run.json").read_text()) for name in names}
    infos[names[1]]["earlier"] = infos[names[2]]["earlier"] = []
    infos[names[2]]["config"]["layers"] = {"0": "LOW"}  # as a whole, never in part
    infos[names[3]]["config"] = dict(reversed(infos[names[3]]["config"].items()))
    for name, info in infos.items():
        (folder / name / "run.json").write_text(json.dumps(info))
    before = everything(folder)
    pack.pack(folder)
    assert_same(everything(folder), before)
    listed = list(map(json.loads, (folder / "runs.jsonl").read_text().splitlines()))
    assert [line.get("like") for line in listed] == [None, None, names[1], None]
    assert listed[2]["config"]["layers"] == {"0": "LOW"} and "earlier" not in listed[2]


def test_a_run_without_a_probe_is_packed_among_others(folder):
    path = folder / "not1-seed2" / "probes.parquet"
    write_table(path, pd.read_parquet(path)[:0])
    about = path.with_name("run.json")
    info = json.loads(about.read_text())
    info["config"]["probe_every"] = info["steps"] + 1
    about.write_text(json.dumps(info))
    before = everything(folder)
    pack.pack(folder)
    assert_same(everything(folder), before)


def test_one_run_is_read_without_the_others(folder):
    pack.pack(folder)
    path = folder / "metrics.parquet"
    last = pq.read_metadata(path).row_group(3)
    damaged = bytearray(path.read_bytes())
    damaged[last.column(2).data_page_offset + last.column(2).total_compressed_size // 2] ^= 1
    path.write_bytes(damaged)
    first, *_, broken = (folder / info["name"] for info in packed.infos(folder).values())
    assert len(runs.load_run(first).metrics) == runs.load_run(first).info["steps"]
    with pytest.raises(UserError, match=r"layers_again/metrics.parquet is damaged .*; restore it"):
        runs.load_run(broken)
    with pytest.raises(UserError, match=r"layers_again/metrics.parquet is damaged"):
        runs.load_runs(folder)


# A campaign of two runs with tables of a few rows

SMALL = """
question: q
predictions: [p]
preset: tiny
train: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 64, batch_size: 2, steps: 4, weights_at: [4]}
arms:
  low: {policy: LOW, seeds: [0, 1]}
"""


def make(folder, names=("low-seed0", "low-seed1"), steps=40):
    folder.mkdir(exist_ok=True)
    (folder / "campaign.yaml").write_text(SMALL)
    for i, name in enumerate(names):
        draw = np.random.default_rng(i).normal
        metrics = pd.DataFrame(dict(step=range(steps), loss=draw(size=steps)))
        metrics["grad_norm"] = np.where(metrics.step == 7, np.nan, 1.0).astype("float32")
        probes = pd.DataFrame({name: draw(size=5).astype("float32") for name in runs.PROBES})
        (folder / name).mkdir()
        write_table(folder / name / "metrics.parquet", metrics[list(runs.METRICS)])
        write_table(folder / name / "probes.parquet", probes.assign(step=range(5)))
        info = dict(name=name, arm="low", config=dict(policy="LOW", seed=i), hardware="CPU")
        info |= dict(ended="completed", steps=steps, seconds=1.5, tokens_per_second=9)
        (folder / name / "run.json").write_text(json.dumps(info, indent=1) + "\n")
    return folder


@pytest.fixture
def small(tmp_path):
    return make(tmp_path / "small")


@pytest.mark.parametrize("each", [11, pytest.param(3, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_noticed(small, each):
    """Of so many bytes of the tables one: a changed bit raises or changes nothing that is read."""
    wanted = [(run.info, run.metrics, run.probes) for run in runs.load_runs(small).run]
    pack.pack(small)
    noticed = 0
    for name in FILES[1:3]:
        path = small / name
        data = path.read_bytes()
        for i in range(0, len(data), each):
            path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
            try:
                found = [(run.info, run.metrics, run.probes) for run in runs.load_runs(small).run]
            except UserError as error:
                assert "\n" not in str(error)
                noticed += 1
                continue
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours[0] == theirs[0]
                for a, b in zip(ours[1:], theirs[1:], strict=True):
                    pd.testing.assert_frame_equal(a, b, check_exact=True)
        path.write_bytes(data)
    assert noticed > 1500 / each


def without(folder, name, run):
    """Take a run out of one of the packed files."""
    path = folder / name
    if name == "runs.jsonl":
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["name"] != run))
        return
    other = make(folder.parent / "other")
    text = SMALL.replace("[0, 1]", "[0]" if run == "low-seed1" else "[1]")
    (other / "campaign.yaml").write_text(text)
    shutil.rmtree(other / run)
    pack.pack(other)
    (other / name).replace(path)


def rewrite(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def beside(folder, name, **changes):
    """The folder of a packed run, with another run.json."""
    shutil.copytree(make(folder.parent / "other") / name, folder / name)
    path = folder / name / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "damage, says",
    [
        (
            lambda f: without(f, "metrics.parquet", "low-seed1"),
            "small/metrics.parquet lacks run low-seed1, which runs.jsonl names; restore both from",
        ),
        (lambda f: without(f, "probes.parquet", "low-seed0"), "probes.parquet lacks run low-seed0"),
        (lambda f: (f / "probes.parquet").unlink(), "probes.parquet lacks run low-seed0, which"),
        (
            lambda f: without(f, "runs.jsonl", "low-seed0"),
            "small/runs.jsonl is damaged in line 1; restore it from git",  # what is like it
        ),
        (
            lambda f: without(f, "runs.jsonl", "low-seed1"),
            "small/runs.jsonl lacks run low-seed1, which metrics.parquet holds; restore both from",
        ),
        (lambda f: (f / "runs.jsonl").unlink(), "runs.jsonl lacks run low-seed0, which metrics"),
        (lambda f: rewrite(f / "runs.jsonl", "}\n", "\n"), "small/runs.jsonl is damaged in line 1"),
        (lambda f: rewrite(f / "runs.jsonl", "hardware", "hard"), "runs.jsonl is damaged in line"),
        (lambda f: rewrite(f / "runs.jsonl", '{"seed"', '{"sead"'), "damaged in line 2; restore"),
        (lambda f: rewrite(f / "runs.jsonl", '"like"', '"lake"'), "damaged in line 2; restore it"),
        (lambda f: rewrite(f / "runs.jsonl", '"like"', '"arn":"a","like"'), "damaged in line 2; "),
        (lambda f: (f / "runs.jsonl").write_bytes(b"\xff"), "runs.jsonl is damaged in line 1; res"),
        (lambda f: rewrite(f / "runs.jsonl", "seed1", "seed0"), "names run low-seed0 twice"),
        (lambda f: rewrite(f / "runs.jsonl", "40", "41"), "40 steps of low-seed0 where its run.js"),
        (lambda f: (f / "metrics.parquet").write_bytes(b"x"), "small/metrics.parquet is damaged ("),
        (
            lambda f: beside(f, "low-seed0", seconds=2.5),
            "low-seed0 is packed in small/runs.jsonl and another run lies beside it in the folder "
            "low-seed0; move that folder away",
        ),
    ],
)  # fmt: skip
def test_a_packed_campaign_that_is_not_whole_is_named(small, damage, says):
    pack.pack(small)
    damage(small)
    before = content(small)
    for read in (runs.load_runs, survival.load_arms, pack.pack):
        with pytest.raises(UserError, match=re.escape(says)) as error:
            read(small)
        assert "\n" not in str(error.value)
    assert content(small) == before, "nothing is rewritten or removed"


def test_rows_of_another_run_are_noticed(small):
    """A footer that lists the runs in another order than their row groups have."""
    pack.pack(small)
    path = small / "metrics.parquet"
    with pq.ParquetFile(path) as file:
        groups = [file.read_row_group(i) for i in (1, 0)]
        write_groups(path, groups, {"runs": file.metadata.metadata[packed.NAMES].decode()})
    with pytest.raises(UserError, match=r"small/metrics.parquet is damaged \(ValueError\)"):
        runs.load_runs(small)


def test_a_folder_with_other_tables_than_are_packed_stays(small):
    """The same run.json, as an interrupted packing leaves it, beside other numbers."""
    pack.pack(small)
    beside(small, "low-seed1")
    path = small / "low-seed1" / "metrics.parquet"
    write_table(path, pd.read_parquet(path).assign(loss=2.0))
    before = content(small)
    with pytest.raises(UserError, match="low-seed1/metrics.parquet is not what small/metrics.par"):
        pack.pack(small)
    assert content(small) == before


def unfinish(folder):
    rewrite(folder / "low-seed1" / "run.json", "completed", "stopped")


def other_columns(folder):
    path = folder / "low-seed1" / "metrics.parquet"
    write_table(path, pd.read_parquet(path).assign(lr=1e-3))  # as an older run


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda f: shutil.rmtree(f / "low-seed1"), "small lacks low-seed1; `python -m lowprec cam"),
        (lambda f: (f / "low-seed1/run.json").unlink(), "small lacks low-seed1; "),
        (lambda f: shutil.rmtree(f), "there is no campaign file"),
        (lambda f: (f / ".low-seed1.part").mkdir(), "low-seed1 is unfinished; end it with `python"),
        (unfinish, "low-seed1 is unfinished: its run.json says 'stopped'"),
        (lambda f: (f / "low-seed1/run.json").write_text("{"), "low-seed1/run.json is damaged"),
        (lambda f: (f / "low-seed1/probes.parquet").write_bytes(b"x"), "low-seed1/probes.parquet"),
        (lambda f: (f / "low-seed1/metrics.parquet").unlink(), "low-seed1 has no metrics.parquet"),
        (lambda f: (f / "low-seed1").rename(f / "a"), "small lacks low-seed1"),
        (lambda f: shutil.copytree(f / "low-seed1", f / "a"), "a calls itself low-seed1 in its"),
        (other_columns, "low-seed1 has other columns in metrics.parquet than low-seed0"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_named_and_stays(small, change, says):
    change(small)
    before = content(small) if small.exists() else None
    with pytest.raises(UserError, match=re.escape(says)) as error:
        pack.pack(small)
    assert "\n" not in str(error.value)
    assert before is None or content(small) == before


def test_tables_that_do_not_read_back_cost_nothing(small, monkeypatch):
    """An earlier packing, whose folders are gone, stays as it is."""
    text = SMALL.replace("[0, 1]", "[0]")
    shutil.move(small / "low-seed1", small.parent / "low-seed1")
    (small / "campaign.yaml").write_text(text)
    pack.pack(small)
    shutil.move(small.parent / "low-seed1", small / "low-seed1")
    before, read = content(small), packed.read

    def wrong(path, run):
        table = read(path, run)
        return table.assign(loss=0.0) if ".packed" in path.parts and "loss" in table else table

    monkeypatch.setattr(packed, "read", wrong)
    with pytest.raises(UserError, match="low-seed0 does not read back from .*nothing was removed"):
        pack.pack(small)
    assert content(small) == before
    monkeypatch.undo()
    pack.pack(small)
    assert sorted(content(small)) == FILES and len(runs.load_runs(small)) == 2


def test_packing_again_does_nothing(small):
    said = pack.pack(small)
    written = {p: p.stat().st_mtime_ns for p in small.iterdir() if p.is_file()}
    assert pack.pack(small) == said
    assert written == {p: p.stat().st_mtime_ns for p in small.iterdir() if p.is_file()}
    assert re.fullmatch(
        r".*small: 2 runs are packed in metrics.parquet, probes.parquet, runs.jsonl, 0.0\d MB", said
    )


def test_one_process_packs(small):
    (small / ".logs").mkdir()
    lock = "from lowprec.training.campaign import *\n"
    lock += f"with only_process(Path({str(small / '.logs')!r}) / "
    lock += "'pack.lock'):\n    print(flush=True)\n    input()"
    with subprocess.Popen(
        [sys.executable, "-c", lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match="pack is being run by another process; let it end"):
            pack.pack(small)
        other.stdin.close()


KILL = """
import os, shutil, signal, sys
from itertools import count
from pathlib import Path
from lowprec.training import pack

source, target = map(Path, sys.argv[1:])
EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

for n in count():
    folder = shutil.copytree(source, target / str(n) / source.name)
    if not os.fork():
        steps = count()

        def hook(event, args):
            writes = event == "open" and isinstance(args[1], str) and "w" in args[1]
            if (writes or event in EVENTS) and next(steps) == n:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        pack.pack(folder)
        os._exit(0)
    _, status = os.wait()
    assert status in (0, signal.SIGKILL), status
    if status == 0:
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("merge", [True, False])
def test_killed_at_any_moment_it_reads_and_packing_again_ends_the_work(small, tmp_path, merge):
    """SIGKILL before each change of the disk: of the first packing, and of one that adds a run."""
    if merge:
        shutil.move(small / "low-seed1", tmp_path / "low-seed1")
        (small / "campaign.yaml").write_text(SMALL.replace("[0, 1]", "[0]"))
        pack.pack(small)
        (small / "campaign.yaml").write_text(SMALL)
        shutil.move(tmp_path / "low-seed1", small / "low-seed1")
    shutil.rmtree(small / ".logs", ignore_errors=True)
    before = [(run.info, run.metrics, run.probes) for run in runs.load_runs(small).run]
    target = tmp_path / "killed"
    subprocess.run([sys.executable, "-c", KILL, small, target], check=True)
    folders = sorted(target.glob("*/small"), key=lambda p: int(p.parent.name))
    states = {tuple(sorted(content(folder).items())) for folder in folders}
    names, runs_to_clear = 3, 1 if merge else 2
    assert len(states) == 1 + names + 3 * runs_to_clear, "each state was there"
    for folder in folders:
        for _ in range(2):  # as it was left, and when packed again
            found = [(run.info, run.metrics, run.probes) for run in runs.load_runs(folder).run]
            for ours, theirs in zip(found, before, strict=True):
                assert ours[0] == theirs[0]
                for a, b in zip(ours[1:], theirs[1:], strict=True):
                    pd.testing.assert_frame_equal(a, b, check_exact=True)
            pack.pack(folder)
        assert sorted(p.name for p in folder.iterdir()) == [".logs", *FILES]


def test_more_seeds_are_recorded_beside_what_is_packed(tmp_path, here, monkeypatch):
    monkeypatch.chdir(files.repo_root())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "campaign.yaml"
    file.write_text(SMALL.replace("[0, 1]", "[0]"))
    campaign.run_campaign(file)
    first = runs.load_run(tmp_path / "low-seed0")
    weights = kept.kept(first)[4]
    assert main(["pack", str(tmp_path)]) == 0
    file.write_text(SMALL)
    assert survival.load_arms(tmp_path)["low"].seeds == (0, 1)
    result = campaign.run_campaign(file)
    assert result["low-seed0"] == "recorded before, when the campaign file had another text"
    assert result["low-seed1"].startswith("done in ")
    both = everything(tmp_path)
    assert [run.name for run, *_ in both] == ["low-seed0", "low-seed1"] and both[0][0] == first
    pack.pack(tmp_path)
    assert sorted(content(tmp_path)) == sorted(
        [*FILES, *(f"low-seed{seed}/.weights/{weights.name}" for seed in (0, 1))]
    )
    assert_same(everything(tmp_path), both)
    shutil.rmtree(tmp_path / "low-seed1")  # which held its weights alone
    done = campaign.run_campaign(file)
    assert done["low-seed1"] == "recorded before"
    assert list(campaign.run_campaign(file, eps=1e-5).values())[1].startswith(
        "recorded before, with eps=1e-08, not 1e-05"
    )

    config = campaign.load_campaign(file)[0].config
    shutil.move(tmp_path / "low-seed0", tmp_path / "moved")
    with pytest.raises(UserError, match="low-seed0 exists; it is never overwritten"):
        train(config, tmp_path / "low-seed0")
    with pytest.raises(UserError, match="low-seed0 has ended, there is nothing to resume"):
        train(config, tmp_path / "low-seed0", resume=True)
    with pytest.raises(UserError, match="low-seed0 is a run; give its checkpoint.pt"):
        affected.probe(tmp_path / "low-seed0")
    shutil.move(tmp_path / "moved", tmp_path / "low-seed0")
    assert len(affected.probe(weights, length=64)) == 2, "under the policy of its run.json"


def test_the_manifest_has_a_line_for_a_packed_campaign(tmp_path, folder):
    root = tmp_path
    (root / "README.md").write_text("1")
    (folder / "only1-seed0" / "captures").mkdir()
    (folder / "only1-seed0" / "captures" / "step-000010.xz").write_bytes(b"2")
    pack.pack(folder)
    manifest.write_manifest(root)
    listed = json.loads((root / "manifest.json").read_text())
    assert list(listed) == ["README.md", "layers_again"] and manifest.verify(root) == 6
    names = sorted(content(folder))
    printed = subprocess.check_output(["sha256sum", *names], cwd=folder)
    assert listed["layers_again"] == hashlib.sha256(printed).hexdigest()

    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data + b" ")
        with pytest.raises(UserError, match="layers_again differs; restore the files with git"):
            manifest.verify(root)
        (folder / name).write_bytes(data)
    (folder / "more").touch()
    with pytest.raises(UserError, match="layers_again differs"):
        manifest.verify(root)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="layers_again is missing"):
        manifest.verify(root)


def test_the_command_says_what_it_did(small, capsys):
    assert main(["pack", str(small)]) == 0
    assert "2 runs are packed" in capsys.readouterr().out
    assert main(["pack", str(small / "nothing")]) == 2
    assert re.fullmatch(r"lowprec: there is no campaign file .*\n", capsys.readouterr().err)


def test_tables_of_an_interrupted_packing_are_read_past(small, tmp_path):
    before = shutil.copytree(small, tmp_path / "before")
    pack.pack(small)
    for name in ("metrics.parquet", "probes.parquet"):  # runs.jsonl is written last
        shutil.copy(small / name, before / name)
    assert list(runs.load_runs(before).name) == ["low-seed0", "low-seed1"]
