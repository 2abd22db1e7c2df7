"""Campaigns on this machine and on a real Slurm, with a model that trains in a second."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from lowprec import UserError
from lowprec.__main__ import main
from lowprec.evidence.survival import load_arms
from lowprec.records import files, runs
from lowprec.records.tables import write_table
from lowprec.training import campaign, progress
from lowprec.training import loop as train
from lowprec.training.campaign import Slurm, run_campaign
from lowprec.training.data import shards as data
from lowprec.training.plan import load_campaign

CAMPAIGN = """
question: q
predictions: [p]
preset: tiny
train: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 16, batch_size: 2, steps: STEPS}
arms:
  low: {policy: LOW, seeds: [0, 1]}
  bad: {policy: SAFE, impl: sdpa, seeds: [0, 1]}
"""
ONE_RUN = CAMPAIGN.split("  bad:")[0].replace("[0, 1]", "[0]")
ON_CPU = Slurm(minutes=5, gpus_per_node=0, cpus=1, memory=2.0)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A campaign of two arms and two seeds; each run of the second arm fails."""
    monkeypatch.chdir(files.repo_root())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "campaign.yaml"
    path.write_text(CAMPAIGN.replace("STEPS", "4"))
    return path


def command(file, *words, **kwargs):
    """The command line in a process of its own, which heeds Ctrl-C even where the tests run in the
    background of a shell, which has its jobs ignore it."""
    return subprocess.Popen(
        [sys.executable, "-m", "lowprec", "campaign", str(file), *words], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **kwargs,
    )  # fmt: skip


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def check_summary(out, result, again):
    """Both arms were tried; the second call tried only what was missing."""
    assert list(result) == ["low-seed0", "bad-seed0", "low-seed1", "bad-seed1"]
    for name, how in result.items():
        if name.startswith("low"):
            assert re.fullmatch(r"done in \d+ s", how) and again[name] == "recorded before"
        else:
            why = (
                "impl='sdpa' runs PyTorch's own kernel, whose roundings cannot be set; use "
                "policy=FA2, tile=None and no probe, or impl='triton'"
            )
            assert how.startswith(f"failed ({why}), see ")
            assert again[name].startswith(f"failed ({why}), see ")
            assert why in open(how.rpartition("see ")[2]).read()
    table = runs.load_runs(out)
    digest = files.sha256(out / "campaign.yaml")
    assert all(run.info["campaign_sha256"] == digest for run in table.run)
    assert load_arms(out)["low"].n == 2
    assert list(table.name) == ["low-seed0", "low-seed1"] and set(table.arm) == {"low"}
    assert list(table.seed) == [0, 1] and (table.steps == 4).all()


@pytest.mark.slow
def test_on_this_machine(file, capfd):
    out = file.parent / "runs"
    result = run_campaign(file, gpus=2, out=out)
    shown = capfd.readouterr().err
    for line in ("low-seed0  running", "low-seed0  done", "bad-seed1  failed"):
        assert sum(row.startswith(line) for row in shown.splitlines()) == 1, shown
    assert re.search(r"low-seed1  done  step 4/4  loss 10\.\d+  tokens/s [\d,]+\n", shown)
    written = {p: p.stat().st_mtime_ns for p in out.glob("low-*/*")}
    second = command(file, "--out", out, "--gpus", "2")
    again, err = second.communicate()
    check_summary(out, result, dict(line.split(": ", 1) for line in again.splitlines()))
    assert written == {p: p.stat().st_mtime_ns for p in out.glob("low-*/*")}
    assert second.returncode == 2 and "Traceback" not in err
    assert err.endswith("lowprec: 2 of 4 runs failed: bad-seed0, bad-seed1\n")


def test_only_some_of_its_runs(file, here):
    result = run_campaign(file, out=file.parent / "runs", only=("low-seed1", "bad*0"))
    assert list(result) == ["bad-seed0", "low-seed1"]
    assert list(runs.load_runs(file.parent / "runs").name) == ["low-seed1"]
    again = run_campaign(file, out=file.parent / "runs", only=("low-seed1",), eps=1e-5)
    assert again == {"low-seed1": "recorded before, with eps=1e-08, not 1e-05"}
    file.write_text(file.read_text() + "# another prediction\n")
    again = run_campaign(file, out=file.parent / "runs", only=("low-seed1",))
    assert again == {"low-seed1": "recorded before, when the campaign file had another text"}


def test_of_a_run_of_another_text_it_is_said_before_others_begin(file, here, capfd):
    run_campaign(file, only=("low-seed1",))
    file.write_text(file.read_text() + "# another prediction\n")
    run_campaign(file, only=("low-*",))
    said = capfd.readouterr().err
    assert "low-seed1: recorded before, when the campaign file had another text\n" in said


def test_the_copy_beside_the_runs_is_that_of_the_last_and_earlier_ones_stay(file, here, capfd):
    out = file.parent / "runs"
    file.write_text(ONE_RUN.replace("STEPS", "4"))
    run_campaign(file, out=out)
    text, digest = file.read_text(), files.sha256(file)
    file.write_text(text.replace("[0]", "[0, 1]"))
    run_campaign(file, out=out, only=("low-seed0",))
    assert (out / "campaign.yaml").read_text() == text, "nothing was missing"
    file.write_text(text)
    (out / "low-seed0").rename(out / "aside")
    capfd.readouterr()
    run_campaign(file, out=out)
    assert "has changed" not in capfd.readouterr().err
    file.write_text(text.replace("[0]", "[0, 1]"))
    run_campaign(file, out=out)
    kept = out / f"campaign-{digest[:8]}.yaml"
    assert f"{file} has changed; its earlier text is kept as {kept}\n" in capfd.readouterr().err
    first = runs.load_run(out / "low-seed0")
    assert kept.read_text() == text and first.info["campaign_sha256"] == digest
    assert (out / "campaign.yaml").read_bytes() == file.read_bytes()
    assert load_arms(out)["low"].seeds == (0, 1)
    file.write_text(text)
    (out / "low-seed0").rename(out / "aside again")
    run_campaign(file, out=out)
    assert (out / "campaign.yaml").read_text() == text and not kept.exists(), "changed back"
    assert len(list(out.glob("campaign*.yaml"))) == 2


def test_what_was_recorded_otherwise_is_said_before_anything_starts(file, here, tmp_path, capfd):
    out = tmp_path / "runs"
    run_campaign(file, out=out, only=("low-seed0",))
    tokens = data.load_tokens(files.repo_root() / "data/corpora/smoke.safetensors")
    data.write_shards(tokens.window(0, 5000), tmp_path / "other", "other", tokens.vocabulary)
    capfd.readouterr()
    result = run_campaign(file, out=out, only=("low-*",), data=str(tmp_path / "other"))
    digest = data.load_tokens(tmp_path / "other").sha256[:8]
    said = f"recorded before, with tokens of sha256 {tokens.sha256[:8]}…, not other, {digest}…"
    assert result["low-seed0"] == said and result["low-seed1"].startswith("done in ")
    shown = capfd.readouterr().err
    assert shown.index(f"low-seed0: {said}") < shown.index("low-seed1  running")


def test_a_field_that_a_run_does_not_know_had_its_default(file, here):
    run_campaign(file, only=("low-seed0",))
    record = file.parent / "low-seed0" / "run.json"
    info = json.loads(record.read_text())
    del info["config"]["norm"]
    record.write_text(json.dumps(info))
    file.write_text(file.read_text().replace("n_layer: 1", "n_layer: 1, norm: rms"))
    said = run_campaign(file, only=("low-seed0",))["low-seed0"]
    assert said == "recorded before, with norm=layer, not rms"


def test_how_a_run_went_says_whether_it_exploded(tmp_path):
    recorded = files.data_root() / "runs" / "mini"
    for name, end in (("low-seed0", r", exploded at step [\d,]+"), ("o_fp32-seed0", "")):
        job = campaign.Job("low", None, recorded / name)
        assert re.fullmatch(r"done in \d+ s" + end, campaign.outcome(job, tmp_path / "no.log"))
    short = shutil.copytree(recorded / "low-seed0", tmp_path / "low-seed0")
    run = runs.load_run(short)
    steps = run.explosion.onset + 100
    write_table(short / "metrics.parquet", run.metrics[:steps])
    (short / "run.json").write_text(json.dumps(run.info | dict(steps=steps)))
    went = campaign.outcome(campaign.Job("low", None, short), tmp_path / "no.log")
    assert went.endswith(f", loss rose, unconfirmed, at step {run.explosion.onset:,}")


def test_a_run_that_cannot_be_read_failed_and_the_others_are_told(tmp_path):
    (tmp_path / "low-seed0").mkdir()
    (tmp_path / "low-seed0" / "run.json").write_text("{")
    how = campaign.outcome(campaign.Job("low", None, tmp_path / "low-seed0"), tmp_path / "no.log")
    assert how.startswith("failed (low-seed0/run.json is damaged; restore it from a copy, or move")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_runs(file, number):
    file.write_text(ONE_RUN.replace("STEPS", "1000000"))
    parent = command(file, start_new_session=True)
    log = file.parent / ".logs" / "low-seed0.txt"
    wait_for(lambda: progress.BAR.search(progress.tail(log)))
    children = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(parent.pid)], text=True)
    assert len(children.split()) == 1
    parent.send_signal(number)
    _, err = parent.communicate(timeout=30)
    assert parent.returncode == 130 and err.endswith("if checkpoint_every makes them\n")
    assert "Traceback" not in err
    for pid in map(int, children.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (file.parent / "low-seed0").exists(), "an unfinished run is not a run"
    with pytest.raises(UserError, match="it has no checkpoint to go on from"):
        campaign.run_one(campaign.load_campaign(file)[0].spec())


@pytest.mark.parametrize("words", [["verify"], ["campaign", "c.yaml"]])
def test_ctrl_c_again_while_a_stopped_command_ends_changes_nothing(words):
    code = f"""if True:
        import atexit, os, signal, sys
        from lowprec import __main__
        from lowprec.records import manifest
        from lowprec.training import campaign

        def stop(*_):
            raise KeyboardInterrupt

        manifest.verify = campaign.run_campaign = stop
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(os.kill, os.getpid(), signal.SIGINT)
        sys.exit(__main__.main({words}))
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130 and len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_stopped_run_goes_on_from_its_checkpoint(file):
    file.write_text(ONE_RUN.replace("STEPS", "80, checkpoint_every: 10"))
    parent = command(file)
    part = file.parent / ".low-seed0.part"
    wait_for((part / "checkpoint.pt").exists)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    stopped = json.loads((part / "run.json").read_text())
    assert stopped["ended"] == "stopped" and 10 <= stopped["steps"] < 80
    assert run_campaign(file)["low-seed0"].startswith("done in ") and not part.exists()
    log = file.parent / ".logs" / "low-seed0.txt"
    assert f"| {stopped['steps']}/80 [00:00" in progress.tail(log), "it did not start again"
    config = campaign.load_campaign(file)[0].config
    whole = train.train(config, file.parent / "whole")
    assert whole.metrics.equals(runs.load_run(file.parent / "low-seed0").metrics)


@pytest.mark.slow
def test_a_run_that_outlived_its_campaign_is_left_alone(file):
    file.write_text(ONE_RUN.replace("STEPS", "1000000, checkpoint_every: 10"))
    first = command(file, start_new_session=True)
    checkpoint = file.parent / ".low-seed0.part" / "checkpoint.pt"
    wait_for(checkpoint.exists)
    pid = int(subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(first.pid)], text=True))
    try:
        first.kill()
        first.communicate()
        job = campaign.load_campaign(file)[0]
        with pytest.raises(UserError, match="low-seed0 is being run by another process"):
            campaign.run_one(job.spec())
        log = job.logs / f"{job.name}.txt"
        before = log.read_text()
        again = campaign.run_campaign(file)
        assert "is being run by another process" in again["low-seed0"]
        assert before and log.read_text().startswith(before)
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("impl: sdpa", "lr: 2e-3", "arm bad: lr='2e-3' must be a number; write it as 2.0e-3"),
        ("impl: sdpa", "lrr: 1", "did you mean lr"),
        ("policy: SAFE, ", "", "arm bad must say its policy"),
        ("seeds: [0, 1]", "seeds: [0, 0]", "arm low must list its seeds, each once"),
        ("seeds: [0, 1]", "seeds: 3", "arm low must list its seeds, each once"),
        ("seeds: [0, 1]", "seeds: [null]", "arm low must list its seeds, each once"),
        ("seeds: [0, 1]", "seeds: [[0]]", "arm low must list its seeds, each once"),
        ("seeds: [0, 1]", "seeds: [0, 0.5]", "arm low must list its seeds, each once"),
        ("seeds: [0, 1]", "seeds: [true]", "arm low must list its seeds, each once"),
        ("seeds: [0, 1]", "seeds: [2020-01-01]", "arm low must list its seeds, each once"),
        ("seeds: [0, 1]", "seeds: [-1]", "arm low: seed=-1 must be from 0"),
        ("impl: sdpa", "weights_at: 2", "weights_at=2 must be a list of whole numbers"),
        ("impl: sdpa", "tile: 7.5", "arm bad: tile=7.5 must be a whole number or None"),
        ("steps: STEPS", "steps: [2]", r"steps=\[2\] must be a whole number"),
        ("bad:", "low:", "not valid YAML: low stands twice, again in line 8"),
        ("question: q", "question: \xff", "not valid YAML: .* can't decode byte 0xff"),
        ("preset: tiny", "preset: tiny\narm: 1", "unknown key arm"),
        ("seeds: [0, 1]", "seeds: [zero]", "arm low must list its seeds, each once"),
        ("low:", "../low:", "names folders"),
        ("low:", "1.10:", "arm 1.1 is no text to YAML, but 1.1; write its name in quotes"),
        ("  bad:", "  1: {}\n  0x1:", "0x1 stands twice"),
        ("seeds: [0, 1]", "seeds: [0, 1], seed: 5", "arm low sets seed"),
        ("{policy: LOW, seeds: [0, 1]}", "LOW", "must be settings"),
        ("preset: tiny", "preset: [tiny]", "preset must be one of gpt2"),
        ("impl: sdpa", "device: cuda", "bad-seed0: device=cuda needs .* use device=cpu; --only"),
        ("[p]", "[]", "has no predictions; write them before the runs"),
        ("[p]", "larger", "predictions must be a list of texts; quote a text that has ': ' in it"),
        ("[p]", "[p larger: refuted if not]", "predictions must be a list of texts"),
    ],
)
def test_a_campaign_file_is_checked_before_anything_starts(file, old, new, says):
    file.write_bytes(CAMPAIGN.replace(old, new).replace("STEPS", "4").encode("latin-1"))
    with pytest.raises(UserError, match=says):
        run_campaign(file)
    assert [p.name for p in file.parent.iterdir()] == ["campaign.yaml"]


def test_an_arm_overrides_the_campaign_and_the_command_both(file):
    file.write_text(file.read_text().replace("impl: sdpa", "impl: sdpa, steps: 7"))

    def steps(**overrides):
        return {job.arm: job.config.steps for job in load_campaign(file, **overrides)}

    assert steps() == dict(low=4, bad=7) and steps(steps=9) == dict(low=9, bad=9)


def test_a_campaign_named_by_its_folder_is_told_its_file(file):
    for name, meant in ((file.parent, file), ("mini", "data/runs/mini/campaign.yaml")):
        with pytest.raises(UserError, match=rf"no campaign file {name}; did you mean {meant}\?$"):
            run_campaign(name)
    with pytest.raises(UserError, match="there is no campaign file nothing$"):
        run_campaign("nothing")


def test_a_damaged_run_is_named_and_the_others_go_on(file, here, capfd):
    damages = ("{", "{}", "[]", None)
    file.write_text(ONE_RUN.replace("STEPS", "4").replace("[0]", "[0, 1, 2, 3, 4]"))
    names = [f"low-seed{i}" for i in range(len(damages))]
    for name, damage in zip(names, damages, strict=True):
        (file.parent / name).mkdir()
        if damage:
            (file.parent / name / "run.json").write_text(damage)
    result = run_campaign(file)
    shown = capfd.readouterr().err
    assert result.pop("low-seed4").startswith("done in ") and list(result) == names
    for name, how in result.items():
        assert re.fullmatch(rf"failed \(.*{name}.*run\.json.*\)", how) and "from git" not in how
        assert shown.index(f"{name}: failed (") < shown.index("low-seed4  running")
    assert main(["campaign", str(file)]) == 2
    assert f"4 of 5 runs failed: {', '.join(names)}\n" in capfd.readouterr().err


def test_a_file_in_the_place_of_a_folder_is_named(file):
    with pytest.raises(UserError, match="cannot make the folder .*campaign.yaml/.logs: Not a dir"):
        run_campaign(file, out=file)
    (file.parent / "low-seed0").touch()
    result = run_campaign(file, only=("low-seed0",))
    assert "there is no run folder 'low-seed0'" in result["low-seed0"]


@pytest.mark.slow
def test_the_table_is_redrawn_on_a_terminal(file):
    screen, child = pty.openpty()
    file.write_text(CAMPAIGN.replace("STEPS", "300"))
    parent = subprocess.Popen(
        [sys.executable, "-m", "lowprec", "campaign", str(file), "--gpus", "2"],
        stdout=subprocess.DEVNULL, stderr=child, env=os.environ | {"COLUMNS": "90", "LINES": "24"},
    )  # fmt: skip
    os.close(child)
    written = b""
    while True:
        try:
            written += os.read(screen, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
    assert parent.wait() == 2
    frames = re.split("\x1b\\[5F\x1b\\[J", written.decode().replace("\r\n", "\n"))
    assert len(frames) > 3, "a header and four rows, drawn over themselves"
    first, last = frames[0].splitlines(), frames[-1].splitlines()
    assert first[0].split() == last[0].split() == ["run", "state", "step", "loss", "tokens/s", "to",
                                                   "go"]  # fmt: skip
    assert [row.split()[:2] for row in last[1:5]] == [
        ["low-seed0", "done"], ["bad-seed0", "failed"], ["low-seed1", "done"],
        ["bad-seed1", "failed"],
    ]  # fmt: skip
    moving = [row.split() for frame in frames for row in frame.splitlines() if " running" in row]
    assert any(len(cells) == 6 for cells in moving), "step, loss, tokens/s and time to go"


def fake_job(tmp_path, **changes):
    config = campaign.load_campaign(files.data_root() / "runs/explosion/campaign.yaml")[0].config
    return campaign.Job("low", config, tmp_path / "low-seed0")


def test_a_row_reads_the_progress_bar(tmp_path):
    job, log = fake_job(tmp_path), tmp_path / "log"
    row = lambda state="running": progress.table_row(job, state, log)  # noqa: E731
    assert row() == ("low-seed0", "running", "0/6500", "", "", "")
    log.write_text("low-seed0:   0%|          | 0/6500 [00:00<?, ?it/s]")
    assert row()[2:] == ("0/6500", "", "", "?")
    bar = "\rlow-seed0:  45%|####      | 2900/6500 [05:03<06:12,  9.50it/s, loss=3.412]"
    log.write_text("x" * 20000 + bar + "\r" + bar.replace("2900", "2950"))
    assert row()[2:] == ("2950/6500", "3.412", f"{9.5 * 32 * 1024:,.0f}", "06:12")
    log.write_text(bar.replace("9.50it/s", "2.00s/it").replace("06:12", "1:59:00"))
    assert row()[4:] == (f"{32 * 1024 / 2:,.0f}", "1:59:00")
    assert row("waiting")[2:] == ("0/6500", "", "", ""), "the log of an earlier try says nothing"


def test_a_row_falls_back_on_the_unfinished_folder(tmp_path):
    job = fake_job(tmp_path)
    source = files.data_root() / "runs" / "explosion" / "low-seed0"
    job.part.mkdir()
    for name in ("run.json", "metrics.parquet"):
        (job.part / name).write_bytes((source / name).read_bytes())
    info = json.loads((source / "run.json").read_text())
    row = progress.table_row(job, "running", tmp_path / "no log")
    loss = runs.load_run(source).metrics.loss.iloc[-1]
    assert row[2:5] == (f"{info['steps']}/6500", f"{loss:.3f}", f"{info['tokens_per_second']:,}")
    (job.part / "metrics.parquet").write_bytes(b"half")
    assert progress.table_row(job, "running", tmp_path / "no log")[3] == ""


def test_a_long_table_shows_what_moves(monkeypatch):
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((30, 6)))
    states = ["done"] * 5 + ["running", "failed"] + ["waiting"] * 5
    rows = [(f"run{i}", state, "1/2", "3.0", "4", "") for i, state in enumerate(states)]
    lines = progress.Table(None)._screen(rows)
    assert len(lines) == 5 and all(len(line) < 30 for line in lines)
    assert [line.split()[0] for line in lines[1:4]] == ["run5", "run6", "run7"]
    assert lines[4] == "and 9 more"


@pytest.mark.parametrize(
    "named, count, wanted",
    [(None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("GPU-ab,GPU-cd", 2, ["GPU-ab", "GPU-cd"]),
     ("4,-1,5", 1, ["4"]), ("", 0, [])],
)  # fmt: skip
def test_gpus_are_those_that_may_be_seen(monkeypatch, named, count, wanted):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert campaign.visible_gpus() == wanted


def test_each_run_sees_one_of_the_gpus_and_gives_it_back(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    jobs = campaign.load_campaign(file)
    seen = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **k: start([sys.executable, "-c", seen], **k)
    )
    local = campaign.Local(jobs, None)
    assert set(local.look().values()) == {"running", "waiting"} and len(local.running) == 2
    wait_for(lambda: not local.look())
    devices = [local.log(job).read_text().strip() for job in jobs]
    assert devices[:2] == ["3", "5"] and set(devices[2:]) <= {"3", "5"}
    assert campaign.Local(jobs, 2).free == ["3", "5"]
    with pytest.raises(UserError, match="3 x 1 GPUs are asked for, and 2 can be seen"):
        campaign.Local(jobs, 3)


def test_a_run_of_several_gpus_sees_them_all(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7,8")
    jobs = campaign.load_campaign(file)
    assert campaign.Local(jobs, None, 2).free == ["3,5", "6,7"]
    assert campaign.Local(jobs, 1, 2).free == ["3,5"]
    jobs[0].logs.rmdir()
    with pytest.raises(UserError, match="2 x 3 GPUs are asked for, and 5 can be seen"):
        campaign.Local(jobs, 2, 3)
    assert not jobs[0].logs.exists()


LOST = "[rank1]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:9120\n"
TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"


@pytest.mark.parametrize(
    "log, why",
    [
        ("lowprec.UserError: no tokens\n", "no tokens"),
        (f"[rank0]: lowprec.UserError: no room\n{'x' * 9000}\n{LOST}{TORCHRUN}", "no room"),
        (f"[rank0]: torch.OutOfMemoryError: CUDA out\n{LOST}{TORCHRUN}", "CUDA out"),
        (
            f"{LOST}{TORCHRUN}  exitcode  : -9 (pid: 7)\n  error_file: <N/A>\n"
            "  traceback : Signal 9 (SIGKILL) received by PID 7\n",
            "Signal 9 (SIGKILL) received by PID 7",
        ),
        (LOST + TORCHRUN, None),
    ],
)
def test_the_reason_is_that_of_the_process_that_failed(file, tmp_path, log, why):
    path = tmp_path / "log.txt"
    path.write_text(log)
    said = f"failed ({why}), see {path}" if why else f"failed, see {path}"
    assert campaign.outcome(campaign.load_campaign(file)[0], path) == said


@pytest.mark.slow
def test_two_processes_make_one_run(file):
    """torchrun with gloo: the same global batches, so the same numbers up to the order of sums."""
    result = run_campaign(file, only=("low-seed0",), processes=2)
    assert result["low-seed0"].startswith("done in ")
    run = runs.load_run(file.parent / "low-seed0")
    assert run.info["processes"] == 2 and run.info["campaign_sha256"] == files.sha256(file)
    alone = train.train(campaign.load_campaign(file)[0].config, file.parent / "alone")
    for name in ("loss", "grad_norm"):
        assert list(run.metrics[name]) == pytest.approx(list(alone.metrics[name]), rel=1e-4)
    assert list(run.probes.delta_abs) == pytest.approx(list(alone.probes.delta_abs), rel=1e-2)
    assert list(run.probes.rows) == list(alone.probes.rows)


@pytest.mark.slow
def test_of_two_processes_the_reason_is_that_of_the_run(file):
    """As test_the_reason_is_that_of_the_process_that_failed, from torchrun as it is now."""
    result = run_campaign(file, only=("bad-seed0",), processes=2)
    assert result["bad-seed0"].startswith("failed (impl='sdpa' runs PyTorch's own kernel, ")


@pytest.mark.parametrize(
    "words, says",
    [
        (["--gpus", "0"], "gpus=0 must be at least 1"),
        (["--processes", "0"], "processes=0 must be at least 1"),
        (["--processes", "3"], "low-seed0: batch_size=2 cannot be shared by 3 processes"),
        (
            ["--only", "low-*", "high-*"],
            "no run is called 'high-*'; there are low-seed0, bad-seed0,",
        ),
        (["--only"], "--only wants the names of runs, as in --only 'low-*' fa2-seed0"),
        (["--only", "--gpus", "1"], "--only wants the names of runs"),
        (["--partition", "long"], "add --cluster slurm"),
        (["--cluster", "slurm", "--gpus-per-node", "2"], "gpus_per_node=2"),
        (["--cluster", "slurm", "--processes", "2"], "processes=2 is for this machine"),
        (["--cluster", "slurm"], "there is no Slurm here"),
    ],
)
def test_mistakes_start_nothing(file, monkeypatch, capsys, words, says):
    monkeypatch.setenv("PATH", str(file.parent))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own
    assert main(["campaign", str(file), *words]) == 2
    assert says in capsys.readouterr().err
    assert [p.name for p in file.parent.iterdir()] == ["campaign.yaml"]


def test_a_slurm_that_does_not_answer_leaves_no_folder(file, tmp_path, monkeypatch):
    for name in ("sbatch", "srun", "squeue"):
        (tmp_path / name).symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue failed: "):
        run_campaign(file, out=tmp_path / "runs", slurm=ON_CPU)
    assert not (tmp_path / "runs").exists()


class Executor:
    """In the place of submitit's."""

    def __init__(self, folder):
        self.devices, Executor.last = [], self

    def update_parameters(self, **asked):
        self.asked = asked

    batch = contextlib.nullcontext

    def submit(self, _, spec, device):
        self.devices.append(device)
        return SimpleNamespace(job_id=f"7_{len(self.devices) - 1}")


def test_what_is_asked_of_slurm_and_when_its_jobs_are_over(file, monkeypatch):
    queued = {"7_0": "RUNNING", "7_1": "PENDING"}
    monkeypatch.setattr(campaign.shutil, "which", lambda _: "there")
    monkeypatch.setattr(campaign.Cluster, "_queue", lambda _: queued)
    monkeypatch.setattr("submitit.SlurmExecutor", Executor)
    jobs = load_campaign(file)[:2]
    cluster = campaign.Cluster(jobs, 1, Slurm(minutes=7, memory=1.5))
    asked = Executor.last.asked
    assert (asked["time"], asked["mem"], asked["array_parallelism"]) == (7, "1536MB", 1)
    assert Executor.last.devices == ["cuda", "cuda"], "a GPU that is not there is no CPU"
    assert list(cluster.look().values()) == ["running", "waiting"]
    del queued["7_0"]
    assert len(cluster.look()) == 2 and list(cluster.look()) == [jobs[1].name]
    again = campaign.Cluster(jobs, 1, Slurm(gpus_per_node=0))
    assert again.ids[jobs[1].name] == "7_1" and Executor.last.devices == ["cpu"]


# On a real Slurm of one node, which tests/slurm.sh starts


def queue():
    listed = subprocess.check_output(["squeue", "--array", "--noheader", "--format=%i"], text=True)
    return listed.split()


@pytest.mark.slurm
def test_on_slurm(file):
    result = run_campaign(file, slurm=ON_CPU)
    notes = {p.stem: p.read_text() for p in (file.parent / ".logs").glob("*.job")}
    assert set(notes) == set(result)
    arrays, tasks = zip(*(number.split("_") for number in notes.values()), strict=True)
    assert len(set(arrays)) == 1 and set(tasks) == set("0123"), "one array, a job a run"
    again = run_campaign(file, slurm=ON_CPU)
    check_summary(file.parent, result, again)
    later = {p.stem: p.read_text() for p in (file.parent / ".logs").glob("*.job")}
    same = [name for name in notes if notes[name] == later[name]]
    assert sorted(same) == ["low-seed0", "low-seed1"], "only what is missing is sent again"


@pytest.mark.slurm
def test_slurm_gives_what_was_asked_for(file):
    run_campaign(file, slurm=Slurm("test", 7, 0, 1, 1.5))
    number = (file.parent / ".logs" / "low-seed0.job").read_text()
    asked = subprocess.check_output(["scontrol", "show", "job", number], text=True)
    for words in ("Partition=test", "TimeLimit=00:07:00", "CPUs/Task=1", "MinMemoryNode=1.50G"):
        assert words in asked
    run = runs.load_run(file.parent / "low-seed0")
    assert run.info["config"]["device"] == "cpu"


@pytest.mark.slurm
def test_the_same_numbers_as_on_this_machine(file):
    run_campaign(file, slurm=ON_CPU)
    run_campaign(file, out=file.parent / "local")
    a, b = (runs.load_run(p / "low-seed1") for p in (file.parent, file.parent / "local"))
    assert a.metrics.equals(b.metrics) and a.probes.equals(b.probes)


@pytest.mark.slurm
def test_jobs_outlive_the_command_and_are_found_again(file):
    file.write_text(CAMPAIGN.replace("STEPS", "100"))
    words = ("--cluster", "slurm", "--gpus-per-node", "0", "--cpus", "1", "--memory", "2")
    first = command(file, *words)
    note = file.parent / ".logs" / "bad-seed1.job"
    wait_for(lambda: note.exists() and note.read_text())
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=30)
    assert first.returncode == 130 and "Traceback" not in err
    number = (file.parent / ".logs" / "low-seed0.job").read_text()
    assert number in queue(), "the job goes on"
    second = command(file, *words)
    out, err = second.communicate(timeout=120)
    assert (file.parent / ".logs" / "low-seed0.job").read_text() == number, "sent once"
    assert second.returncode == 2 and "low-seed0: done in" in out and "low-seed1: done in" in out


@pytest.mark.slurm
def test_a_cancelled_job_is_a_failed_run_that_stopped_cleanly(file):
    file.write_text(ONE_RUN.replace("STEPS", "1000000, checkpoint_every: 1000000"))
    parent = command(file, "--cluster", "slurm", "--gpus-per-node", "0", "--cpus", "1",
                     "--memory", "2")  # fmt: skip
    note = file.parent / ".logs" / "low-seed0.job"
    wait_for(lambda: note.exists() and note.read_text())
    log = file.parent / ".logs" / "slurm" / f"{note.read_text()}_0_log.out"
    wait_for(lambda: progress.BAR.search(progress.tail(log)))
    subprocess.run(["scancel", note.read_text()], check=True)
    out, _ = parent.communicate(timeout=60)
    assert parent.returncode == 2 and "low-seed0: failed (low-seed0 was stopped after" in out
    part = file.parent / ".low-seed0.part"
    assert json.loads((part / "run.json").read_text())["ended"] == "stopped"
    assert (part / "checkpoint.pt").is_file() and not (file.parent / "low-seed0").exists()


@pytest.mark.slurm
def test_what_slurm_refuses_is_one_sentence(file):
    with pytest.raises(UserError, match="Slurm refused the jobs: .*partition") as error:
        run_campaign(file, slurm=Slurm("nosuch", 5, 0, 1, 1.0))
    assert "\n" not in str(error.value)
