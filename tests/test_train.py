"""Model, probes, trainer and campaign, with a model that trains in a second."""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowprec import UserError
from lowprec.__main__ import main
from lowprec.attention import reference
from lowprec.diagnose import probe as affected
from lowprec.numerics import policy
from lowprec.records import explosion, files, provenance, runs
from lowprec.records.tables import weights_sha256
from lowprec.training import campaign, loop, recorder
from lowprec.training.capture import Capture
from lowprec.training.config import PRESETS, TrainConfig, learning_rate
from lowprec.training.data import shards as data
from lowprec.training.loop import Group, deterministic, draw_seed, processes, train
from lowprec.training.model import GPT, GPTConfig
from lowprec.training.probes import QueryErrorWindow, spectral_norms
from lowprec.training.recorder import Recorder

SMALL = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2, steps=4, warmup=2,
             probe_every=2, data="data/corpora/smoke.safetensors", device="cpu")  # fmt: skip


def small(**changes):
    return dataclasses.replace(TrainConfig(**SMALL), **changes)


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(files.repo_root())


def test_model_starts_at_the_uniform_loss_and_overfits():
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 64, 32, vocab_size=128, policy="LOW"))
    x, y = torch.randint(0, 128, (2, 2, 32))
    loss = model(x, y)
    assert abs(loss.item() - math.log(128)) < 0.3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 1.0


def test_a_delta_of_one_s_own_trains(tmp_path, monkeypatch):
    """As book/rerun.md has it: a name, and a formula in the emulation."""
    names = (*policy.CHOICES["delta_from"], "mine")
    monkeypatch.setitem(policy.CHOICES, "delta_from", names)
    usual, how = reference._delta, dict(impl="emulate", steps=8, probe_every=8)

    def delta(t, p, v, do, given, *rest):
        mine = given.delta_from == "mine"
        return (do * t.o_fp32).sum(-1) if mine else usual(t, p, v, do, given, *rest)

    monkeypatch.setattr(reference, "_delta", delta)
    losses = {
        name: train(small(policy=f"FA2+delta_from={name}", **how), tmp_path / name).metrics.loss
        for name in ("mine", "o_fp32", "o")
    }
    assert losses["mine"].equals(losses["o_fp32"]) and not losses["mine"].equals(losses["o"])
    pytest.importorskip("triton")
    with pytest.raises(UserError, match="do not honour policy field delta_from=mine; use impl='em"):
        train(small(policy="FA2+delta_from=mine", impl="triton"), tmp_path / "triton")


def test_model_sizes():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    n = sum(p.numel() for p in model.parameters())
    assert n == 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    weights = model.head_weights("k")
    assert weights.shape == (12, 12, 64, 768)
    with pytest.raises(UserError, match="n_embd=10"):
        GPTConfig(n_embd=10, n_head=3)


def test_head_weights_are_the_rows_that_make_the_head():
    model = GPT(GPTConfig(1, 2, 8, 4, vocab_size=16))
    w = model.blocks[0].qkv.weight
    assert torch.equal(model.head_weights("k")[0, 1], w[8 + 4 : 8 + 8])


def test_what_ran_is_asked_of_every_part_of_the_model(tmp_path, monkeypatch):
    """The policy of the run is no head's where `layers` name all of them."""
    run = train(small(policy="LOW", layers={"*": "FA2"}, impl="sdpa"), tmp_path / "a")
    assert run.info["ended"] == "completed" and run.info["impl"] == "sdpa"
    monkeypatch.setattr(recorder, "that_runs", lambda policy, *call: f"of {policy}")
    parts = small(policy="LOW", layers={"0/1": "FA2"})
    assert recorder._impl(parts, "cuda") == "of FA2, of LOW"


def test_spectral_norms():
    w = torch.randn(2, 3, 5, 9)
    wanted = torch.linalg.matrix_norm(w.double(), ord=2)
    torch.testing.assert_close(spectral_norms(w), wanted, rtol=1e-7, atol=0)
    torch.testing.assert_close(spectral_norms(w.mT), wanted, rtol=1e-7, atol=0)
    u, v = (torch.linalg.qr(torch.randn(n, 64).double())[0] for n in (64, 384))
    assert spectral_norms(u @ v.mT).item() == pytest.approx(1, abs=4e-8)  # all 64 are 1
    w[0, 1, 2, 3] = float("nan")
    w[1, 2, 0, 0] = float("inf")
    broken = spectral_norms(w).isnan()
    assert broken.sum() == 2 and broken[0, 1] and broken[1, 2]


def test_a_run_is_recorded_whole(tmp_path):
    run = train(small(policy="LOW"), tmp_path / "a", arm="low")
    assert run.info["ended"] == "completed" and run.info["impl"] == "emulate"
    assert run.info["config"]["data"] == "smoke" and str(tmp_path) not in json.dumps(run.info)
    assert list(run.metrics.step) == [0, 1, 2, 3] and run.metrics.loss.iloc[0] > 10
    assert tuple(run.metrics) == runs.METRICS
    probes = run.probes
    assert len(probes) == 2 * 2 and set(probes.step) == {1, 3}
    assert (probes.rows == 2 * 2 * 16).all() and (probes.delta_abs > 0).all()
    assert (probes.delta_bias.abs() <= probes.delta_abs).all()
    assert not (tmp_path / ".a.part").exists()


def test_a_seed_run_twice_is_equal_and_arms_share_batches_and_weights(tmp_path):
    a, b = (train(small(policy="LOW"), tmp_path / n) for n in "ab")
    assert a.metrics.equals(b.metrics) and a.probes.equals(b.probes)
    c = train(small(policy="LOW+delta_from=o_fp32"), tmp_path / "c")
    assert c.metrics.loss[0] == a.metrics.loss[0], "same weights, batch and forward"
    assert c.metrics.grad_norm[0] != a.metrics.grad_norm[0]
    d = train(small(policy="LOW", seed=1), tmp_path / "d")
    assert d.metrics.loss[0] != a.metrics.loss[0]


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory):
    """The hash of the weights that three steps of `small` leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files.repo_root())
        run = train(small(steps=3), tmp_path_factory.mktemp("plain") / "a")
    return run.info["weights_sha256"]


@pytest.mark.parametrize(
    "change",
    [{}, dict(weight_decay=0.1), dict(eps=1e-3), dict(beta1=0.5), dict(beta2=0.5), dict(clip=0.1)],
    ids=str,
)
def test_each_switch_of_the_optimiser_reaches_the_weights(tmp_path, plain_weights, change):
    run = train(small(steps=3, **change), tmp_path / "a")
    assert (run.info["weights_sha256"] == plain_weights) == (not change)


def test_random_roundings_differ_by_step_micro_batch_and_process():
    config = small(policy="LOW+o=bf16:stochastic")
    groups = [Group("cpu", rank, 2) for rank in range(2)]
    seeds = [
        draw_seed(config, g, step, i, 3) for g in groups for step in range(4) for i in range(3)
    ]
    assert len(set(seeds)) == len(seeds) == 24
    assert draw_seed(small(policy="LOW"), groups[1], 3, 1, 3) == 0, "torch.compile sees a constant"
    some = small(policy="LOW", layers={"0/1": "LOW+o=bf16:stochastic"})
    assert draw_seed(some, groups[1], 3, 1, 3) > 0


def test_nothing_recorded_is_overwritten(tmp_path):
    train(small(), tmp_path / "a")
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    with pytest.raises(UserError, match="exists"):
        train(small(), tmp_path / "a")
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    (tmp_path / ".b.part").mkdir()
    with pytest.raises(UserError, match="unfinished run; remove it"):
        train(small(), tmp_path / "b")


def test_a_non_finite_loss_ends_the_run_before_the_weights_are_lost(tmp_path):
    run = train(small(lr=1e30, warmup=1, steps=40, probe_every=8), tmp_path / "a")
    assert run.info["ended"] == "non-finite" and run.explosion.confirmed
    assert np.isfinite(run.metrics.loss[:-1]).all() and not np.isfinite(run.metrics.loss.iloc[-1])
    assert run.info["steps"] == len(run.metrics) < 8 and np.isfinite(run.probes.sigma_q).all()
    (tmp_path / "a").rename(tmp_path / "b")
    short = train(small(lr=1e30, warmup=1, steps=run.info["steps"]), tmp_path / "c")
    assert short.info["weights_sha256"] == run.info["weights_sha256"], "updates went on"


def test_a_run_that_dies_at_once_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="too few for a block"):
        train(small(block_size=600_000), tmp_path / "a")
    assert not any(tmp_path.iterdir())


def test_it_stops_after_an_explosion(tmp_path, monkeypatch):
    monkeypatch.setattr(explosion, "find_explosion", lambda loss: explosion.Explosion(3, True))
    run = train(small(steps=40, stop_after_explosion=6), tmp_path / "a")
    assert run.info["ended"] == "explosion" and len(run.metrics) == 10


@pytest.mark.parametrize(
    "changes,word",
    [
        (dict(policy="LOW+o=bf17"), "field o"),
        (dict(steps=0), "steps=0"),
        (dict(data="data/corpora/nothing"), "nothing"),
        (dict(impl="fast"), "fast"),
        (dict(device="cudda"), "no device=cudda; take cuda, cpu or auto"),
        (dict(device="mps"), "no device=mps; take cuda, cpu or auto"),
    ],
)
def test_user_errors_before_any_work(tmp_path, changes, word):
    with pytest.raises(UserError, match=word):
        train(small(**changes), tmp_path / "a")
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path):
    with pytest.raises(UserError, match="NVIDIA GPU"):
        train(small(device="cuda"), tmp_path / "a")


def test_warm_up_is_linear_then_constant():
    config = PRESETS["gpt2"]
    rates = [learning_rate(config, s) for s in (0, 499, 999, 1000, 6000)]
    assert rates == pytest.approx([2e-6, 1e-3, 2e-3, 2e-3, 2e-3])


def test_cosine_ends_where_it_says():
    config = PRESETS["gpt2-paper"]
    rates = [learning_rate(config, s) for s in (1999, 301_000, 600_000, 700_000)]
    assert rates == pytest.approx([1e-3, (1e-3 + 1e-5) / 2, 1e-5, 1e-5])
    assert config.batch_size * config.block_size == 524_288


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def stop_in_step(last, config, out, monkeypatch, **how):
    measured = Recorder.measured

    def interrupted(self, *numbers):
        measured(self, *numbers)
        if self.step == last:
            signal.raise_signal(signal.SIGTERM)

    said = f"stopped after {last} steps"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=said):
        patch.setattr(Recorder, "measured", interrupted)
        train(config, out, resume=True, **how)


def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path, monkeypatch):
    """Stopped between two probes, after a checkpoint, by a signal that comes in step 5."""
    config = small(
        policy="LOW", steps=8, probe_every=4, checkpoint_every=3, capture_at=(4,), capture_every=2
    )
    whole = train(config, tmp_path / "a")
    stop_in_step(5, config, tmp_path / "b", monkeypatch)
    unfinished = runs.load_run(tmp_path / ".b.part")
    assert len(unfinished.metrics) == 5 and not unfinished.finished
    monkeypatch.chdir(files.repo_root())
    with pytest.raises(UserError, match="unfinished run; add --resume to go on from"):
        train(config, tmp_path / "b")
    with pytest.raises(UserError, match="with other lr; take the same"):
        train(dataclasses.replace(config, lr=1.0), tmp_path / "b", resume=True)
    held = os.open(tmp_path / ".b.part", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="is being trained by another process"):
        train(config, tmp_path / "b", resume=True)
    os.close(held)
    tokens = data.load_tokens(config.data)
    data.write_shards(tokens.window(1, 9999), tmp_path / "c", tokens.name, tokens.vocabulary)
    with pytest.raises(UserError, match="with other data_sha256; take the same"):
        train(dataclasses.replace(config, data=str(tmp_path / "c")), tmp_path / "b", resume=True)
    resumed = train(config, tmp_path / "b", resume=True)
    assert resumed.metrics.equals(whole.metrics) and resumed.probes.equals(whole.probes)
    assert resumed.info["weights_sha256"] == whole.info["weights_sha256"]
    assert "earlier" not in resumed.info
    assert [p.name for p in sorted((tmp_path / "b").iterdir())] == [
        "captures", "metrics.parquet", "probes.parquet", "run.json"
    ]  # fmt: skip
    name = "captures/step-000004.xz"
    a, b = (Capture.load(tmp_path / run / name).tensors for run in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert list(contents(tmp_path / "b/captures")) == ["step-000004.xz"]


@pytest.mark.parametrize("ends", ["checkpoint", "signal"])
def test_a_loss_that_is_not_finite_ends_the_run_between_probes_too(tmp_path, monkeypatch, ends):
    """At a checkpoint or a signal, after which the run would go on with weights that may move."""
    forward, calls = GPT.forward, []

    def failing(self, *how):
        calls.append(forward(self, *how))
        if ends == "signal" and len(calls) == 6:
            signal.raise_signal(signal.SIGTERM)
        return calls[-1] * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(GPT, "forward", failing)
    config = small(steps=8, probe_every=4)
    whole = train(config if ends == "checkpoint" else small(steps=5), tmp_path / "a")
    calls.clear()
    every = 3 if ends == "checkpoint" else 4
    run = train(dataclasses.replace(config, checkpoint_every=every), tmp_path / "b")
    assert run.info["ended"] == whole.info["ended"] == "non-finite" and run.info["steps"] == 5
    assert len(calls) == 6 and run.probes.step.max() == 4
    assert run.metrics.equals(whole.metrics)
    assert run.info["weights_sha256"] == whole.info["weights_sha256"]
    assert not (tmp_path / "b" / "checkpoint.pt").exists()


def test_a_record_says_what_made_which_steps(tmp_path, monkeypatch):
    """Three sittings, of which the second has other code on another machine."""
    config, here = small(steps=8, checkpoint_every=8), provenance.provenance("cpu")
    there = here | dict(hardware="H", commit="c")
    stop_in_step(3, config, tmp_path / "a", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "provenance", lambda device: there)
        stop_in_step(5, config, tmp_path / "a", monkeypatch)
    stop_in_step(6, config, tmp_path / "a", monkeypatch)
    run = train(config, tmp_path / "a", resume=True)
    assert run.info["earlier"] == [
        dict(steps=3, processes=1) | here, dict(steps=5, processes=1) | there
    ]  # fmt: skip
    assert run.hardware == "CPU and H" and len(run.metrics) == 8


def test_predictions_that_were_changed_in_between_show(tmp_path, monkeypatch, capsys):
    config, here = small(steps=8, checkpoint_every=8), provenance.provenance("cpu")
    stop_in_step(3, config, tmp_path / "a", monkeypatch, campaign="a")
    run = train(config, tmp_path / "a", resume=True, campaign="b")
    assert run.info["earlier"] == [dict(steps=3, processes=1, campaign_sha256="a") | here]
    assert run.info["campaign_sha256"] == "b"
    assert "goes on at step 3 with other campaign_sha256 a -> b" in capsys.readouterr().out


def test_a_checkpoint_from_when_rates_were_recorded_goes_on(tmp_path, monkeypatch):
    config = small(checkpoint_every=2)
    stop_in_step(3, config, tmp_path / "a", monkeypatch)
    path = tmp_path / ".a.part" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["metrics"] = torch.cat([state["metrics"], torch.full((3, 1), 1e-3)], 1)
    torch.save(state, path)
    resumed = train(config, tmp_path / "a", resume=True)
    assert resumed.metrics.equals(train(config, tmp_path / "b").metrics)


def test_a_resumed_run_keeps_its_projections(tmp_path, monkeypatch):
    """The checkpoint comes between two choices of GaLore's directions."""
    pytest.importorskip("pytorch_optimizer")
    text = "galore,rank8,every3,scale0.5"
    config = small(optimizer=text, steps=8, probe_every=4, checkpoint_every=4)
    whole = train(config, tmp_path / "a")
    stop_in_step(5, config, tmp_path / "b", monkeypatch)
    resumed = train(config, tmp_path / "b", resume=True)
    assert resumed.metrics.equals(whole.metrics) and resumed.probes.equals(whole.probes)
    assert resumed.info["weights_sha256"] == whole.info["weights_sha256"]
    assert resumed.info["config"]["optimizer"] == text
    adamw = train(small(steps=8, probe_every=4), tmp_path / "c")
    assert adamw.metrics.loss[0] == whole.metrics.loss[0]
    assert not adamw.metrics.loss.equals(whole.metrics.loss)


def test_a_run_that_cannot_take_its_name_can_be_resumed(tmp_path, monkeypatch):
    config = small(checkpoint_every=2)

    def killed(*how):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recorder.os, "rename", killed)
        train(config, tmp_path / "a")
    (tmp_path / ".a.part" / "checkpoint.pt.123.tmp").write_bytes(b"half of one")
    run = train(config, tmp_path / "a", resume=True)
    assert run.finished and list(contents(tmp_path / "a")) == [
        "metrics.parquet", "probes.parquet", "run.json"
    ]  # fmt: skip


def test_a_run_killed_as_it_ended_and_again_as_it_went_on_reads(tmp_path, monkeypatch):
    config, write = small(steps=8, checkpoint_every=6, probe_every=8), files.write_atomic

    def killed(*how):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recorder.os, "rename", killed)
        train(config, tmp_path / "a")
    assert runs.load_run(tmp_path / ".a.part").info["ended"] == "completed"

    def between(path, how):
        write(path, how)
        if path.name == "run.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_atomic", between)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "a", resume=True)
    assert len(runs.load_run(tmp_path / ".a.part").metrics) == 6


def test_a_checkpoint_left_in_a_run_that_has_ended_goes(tmp_path):
    train(small(), tmp_path / "a")
    (tmp_path / "a/checkpoint.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="has ended, there is nothing to resume"):
        train(small(), tmp_path / "a", resume=True)
    assert not (tmp_path / "a/checkpoint.pt").exists()


def test_a_checkpoint_that_does_not_fit_is_not_called_damaged(tmp_path, monkeypatch):
    config = small(checkpoint_every=2)
    stop_in_step(3, config, tmp_path / "a", monkeypatch)

    def full(*how):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_take", full)
        with pytest.raises(UserError, match="could not be taken up: out of memory"):
            train(config, tmp_path / "a", resume=True)
    assert train(config, tmp_path / "a", resume=True).finished


def test_an_existing_folder_is_refused_and_has_ended_only_if_it_is_a_run(tmp_path):
    with pytest.raises(UserError, match="run folder .* exists; it is never overwritten"):
        train(small(), tmp_path, resume=True)
    (tmp_path / "run.json").touch()
    with pytest.raises(UserError, match="has ended, there is nothing to resume; it is never"):
        train(small(), tmp_path, resume=True)
    with pytest.raises(UserError, match="run folder .* exists; it is never overwritten"):
        train(small(), tmp_path)


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / ".a.part").mkdir()
    (tmp_path / ".a.part" / "checkpoint.pt").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="checkpoint.pt is damaged"):
        train(small(), tmp_path / "a", resume=True)
    torch.save(dict(model={}), tmp_path / ".a.part" / "checkpoint.pt")
    with pytest.raises(UserError, match=r"checkpoint.pt is damaged \(KeyError\)"):
        train(small(), tmp_path / "a", resume=True)


@pytest.mark.parametrize("member", ["data.pkl", "data/0", "data/9", "data/16", "data/24"])
def test_a_checkpoint_with_a_flipped_bit_is_found_and_its_folder_stays(
    tmp_path, monkeypatch, member
):
    """In what holds it together, a weight, two moments and what is recorded."""
    config = small(checkpoint_every=2)
    stop_in_step(3, config, tmp_path / "a", monkeypatch)
    path = tmp_path / ".a.part" / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"archive/{member}")
    name, extra = struct.unpack_from("<HH", content, member.header_offset + 26)
    content[member.header_offset + 30 + name + extra + member.file_size // 2] ^= 1 << 2
    path.write_bytes(content)
    before = contents(path.parent)
    with pytest.raises(UserError, match=r"is damaged \(BadZipFile\); move .*a.part away, whose"):
        train(config, tmp_path / "a", resume=True)
    assert contents(path.parent) == before
    assert len(runs.load_run(path.parent).metrics) == 3
    with pytest.raises(UserError, match=r"holds no checkpoint .* \(BadZipFile\)"):
        affected.probe(path)


def test_no_flipped_bit_of_an_archive_reads_as_other_numbers(tmp_path):
    """Two bits of each byte, its directory's too: of these torch checks none, and one empties a
    tensor into whatever the memory held."""
    path, wanted, refused = tmp_path / "a.pt", torch.arange(5.0), 0
    torch.save({"a": wanted, "step": 7}, path)
    content = path.read_bytes()
    for i, bit in itertools.chain(*(((i, 4), (i, i % 8)) for i in range(len(content)))):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << bit]) + content[i + 1 :])
        try:
            state = recorder.load_archive(path)
        except Exception:  # many types
            refused += 1
        else:
            assert torch.equal(state["a"], wanted) and state["step"] == 7, (i, bit)
    assert refused > len(content) // 2


@pytest.fixture
def server():
    """Starts processes in which everything is imported; it has no threads, so its forks work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "lowprec.training.loop",
            "lowprec.training.capture",
            "torch._inductor.config",
            "pyarrow.dataset",
            "pytest",
        ]
    )
    return context


def _forever(folder):
    torch.set_num_threads(1)
    recorder.FLUSH = 4
    train(small(steps=10**6, checkpoint_every=3), folder)


@pytest.mark.slow
def test_killed_at_random_moments_a_run_keeps_its_last_flush(tmp_path, server, kills=20):
    """At each SIGKILL the folder reads, has every step up to the last flush, and no gap."""
    draw, kept = random.Random(0), 0
    for i in range(kills):
        process = server.Process(target=_forever, args=(tmp_path / str(i),))
        process.start()
        part = tmp_path / f".{i}.part"
        while not (part / "run.json").exists():
            time.sleep(0.01)
            assert process.is_alive()
        flushed = runs.load_run(part).info["steps"]
        time.sleep(0.2 * draw.random())
        process.kill()
        process.join()
        run = runs.load_run(part)
        assert len(run.metrics) == run.info["steps"] >= flushed
        assert list(run.metrics.step) == list(range(len(run.metrics)))
        assert run.probes.step.max() >= run.info["steps"] - 2, "a probe every 2 steps"
        if (part / "checkpoint.pt").exists():
            kept += torch.load(part / "checkpoint.pt", weights_only=True)["step"]
    assert kept > 0


@pytest.mark.parametrize("early, seen", [(0.0, [2, 4, 6]), (1e9, [])])
def test_a_short_run_is_written_as_its_steps_come(tmp_path, monkeypatch, early, seen):
    flush, written = Recorder.flush, []

    def noted(self, ended, *how):
        flush(self, ended, *how)
        if ended == "running":
            written.append(len(runs.load_run(self.part).metrics))

    monkeypatch.setattr(recorder, "EARLY", early)
    monkeypatch.setattr(Recorder, "flush", noted)
    assert len(train(small(steps=7), tmp_path / "a").metrics) == 7
    assert written == seen or written == [*seen, 7]


def test_a_full_disk_leaves_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "FLUSH", 2)
    measured = Recorder.measured

    def filling(self, *numbers):
        measured(self, *numbers)
        if self.step == 3:
            (self.part / f"metrics.parquet.{os.getpid()}.tmp").symlink_to("/dev/full")

    monkeypatch.setattr(Recorder, "measured", filling)
    with pytest.raises(UserError, match="cannot write .*metrics.parquet: No space left"):
        train(small(), tmp_path / "a")
    assert len(runs.load_run(tmp_path / ".a.part").metrics) == 2
    assert not list((tmp_path / ".a.part").glob("*.tmp"))


def test_a_disk_that_is_full_at_a_checkpoint_is_said_to_be(tmp_path):
    """A limit on the size of files stands in for it: the write comes back in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(UserError, match="cannot write .*checkpoint.pt: File too large; what w"):
            train(small(checkpoint_every=2), tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / ".a.part").glob("checkpoint*"))
    assert len(runs.load_run(tmp_path / ".a.part").metrics) == 2


def test_a_full_disk_leaves_no_half_of_the_weights(tmp_path, monkeypatch):
    (tmp_path / ".a.part" / ".weights").mkdir(parents=True)
    full = f"step-000002.pt.{os.getpid()}.tmp"
    (tmp_path / ".a.part" / ".weights" / full).symlink_to("/dev/full")
    part = Recorder.__init__

    def starts(self, config, out, *how):
        part(self, config, tmp_path / "b", *how)
        self.part = tmp_path / ".a.part"

    monkeypatch.setattr(Recorder, "__init__", starts)
    with pytest.raises(UserError, match="cannot write .*step-000002.pt: "):
        train(small(weights_at=(1, 2)), tmp_path / "a")
    assert list(contents(tmp_path / ".a.part" / ".weights")) == ["step-000001.pt"]


@pytest.mark.parametrize("place", ["README.md", "/proc"])
def test_a_place_without_folders_is_named(place):
    with pytest.raises(UserError, match=f"cannot make the folder {place}/.x.part: "):
        train(small(), f"{place}/x")


@pytest.mark.parametrize("rows", [1, 3])
def test_micro_batches_add_up_to_the_batch(tmp_path, rows):
    whole = train(small(policy="LOW", batch_size=4), tmp_path / "a")
    parts = train(small(policy="LOW", batch_size=4, micro_batch=rows), tmp_path / "b")
    for name in ("loss", "grad_norm"):
        assert list(parts.metrics[name]) == pytest.approx(list(whole.metrics[name]), rel=1e-4)
    assert list(parts.probes.delta_abs) == pytest.approx(list(whole.probes.delta_abs), rel=1e-2)


def torchrun(*words, count=2, program=("-m", "lowprec")):
    """Starts the training of a tiny model by a few processes, two unless told."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}",
         "--standalone", *program, "train", "tiny", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def train_by_torchrun(out, *words, count=2, program=("-m", "lowprec"), **config):
    words = [*words, "--out", str(out)]
    for name, value in (SMALL | config).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    launcher = torchrun(*words, count=count, program=program)
    said, err = launcher.communicate()
    assert launcher.returncode == 0, err[-6000:]
    return runs.load_run(out), said


@pytest.mark.slow
def test_two_processes_go_on_from_where_one_stopped(tmp_path, monkeypatch):
    """Same numbers up to the order of sums; the record says who made which steps."""
    changed = dict(steps=8, batch_size=4, checkpoint_every=3, seed=3)
    alone = train(small(**changed), tmp_path / "a")
    stop_in_step(5, small(**changed), tmp_path / "b", monkeypatch)
    run, said = train_by_torchrun(tmp_path / "b", "--resume", **changed)
    made = {k: alone.info[k] for k in ("hardware", "versions", "commit")}
    assert run.info["earlier"] == [dict(steps=5, processes=1) | made]
    assert run.info["processes"] == 2 and "b goes on at step 5 with other processes 1 -> 2" in said
    assert said.count("completed") == 1
    first = run.metrics.step < 5
    assert run.metrics[first].equals(alone.metrics[first]) and len(run.metrics) == 8
    assert list(run.metrics.loss) == pytest.approx(list(alone.metrics.loss), rel=1e-4)


KEEPS = """
import os, shutil, sys
from lowprec.__main__ import main
from lowprec.training.recorder import Recorder

def keep(self, *state, checkpoint=Recorder.checkpoint):
    checkpoint(self, *state)
    if self.group.rank == 0 and self.step == 4:
        shutil.copy(self.part / "checkpoint.pt", os.environ["KEPT"])

Recorder.checkpoint = keep
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_four_processes_go_on_as_if_never_stopped(tmp_path, monkeypatch):
    """Sums of two do not depend on their order, those of four do, and DDP changes it once."""
    (tmp_path / "keeps.py").write_text(KEEPS)
    (part := tmp_path / ".b.part").mkdir()
    monkeypatch.setenv("KEPT", str(part / "checkpoint.pt"))
    by_four = dict(n_layer=2, n_embd=64, steps=16, batch_size=8, micro_batch=1, checkpoint_every=4)
    by_four |= dict(count=4, program=[str(tmp_path / "keeps.py")])
    whole, _ = train_by_torchrun(tmp_path / "a", **by_four)
    assert [f.name for f in part.iterdir()] == ["checkpoint.pt"]
    resumed, _ = train_by_torchrun(tmp_path / "b", "--resume", **by_four)
    assert resumed.metrics.equals(whole.metrics) and resumed.probes.equals(whole.probes)
    assert resumed.info["weights_sha256"] == whole.info["weights_sha256"]
    assert "earlier" not in resumed.info


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent")
def test_processes_whose_launcher_was_killed_stop_as_if_asked_to(tmp_path):
    words = "--steps 1000000 --probe-every 2 --checkpoint-every 4 --device cpu --out".split()
    launcher, part = torchrun(*words, str(tmp_path / "a")), tmp_path / ".a.part"
    while not (part / "checkpoint.pt").exists():
        assert launcher.poll() is None
        time.sleep(0.1)
    listed = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], text=True)
    workers = [int(pid) for pid in listed.split()]
    try:
        launcher.kill()
        _, err = launcher.communicate(timeout=60)  # once no process holds its pipes
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert len(workers) == 2 and "lowprec: a was stopped after " in err
    assert json.loads((part / "run.json").read_text())["ended"] == "stopped"


@pytest.mark.parametrize(
    "words, says",
    [
        (["tyny", "--out", "x"], "lowprec: there is no preset 'tyny': did you mean tiny?\n"),
        (["--seed", "1", "tiny"], "there is no preset '--seed': take one of gpt2, gpt2-paper"),
        (["tiny", "--stepz", "3", "--out", "x"], "run python -m lowprec train tiny --help "),
    ],
)
def test_a_mistyped_training_names_the_command_to_type(capsys, words, says):
    try:
        status = main(["train", *words])
    except SystemExit as end:
        status = end.code
    err = capsys.readouterr().err
    assert status == 2 and says in err
    assert "python tiny" not in err and "gpt2 --help" not in err


def test_a_process_of_a_second_node_takes_its_own_gpu(monkeypatch):
    """Without a GPU: what torchrun's variables are turned into, here for rank 5 of two nodes."""
    asked = []
    for name, value in dict(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, TORCHELASTIC_RUN_ID="x").items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(
        "lowprec.training.loop.end_with_launcher", lambda: None
    )  # its parent is pytest's
    monkeypatch.setattr(torch.distributed, "init_process_group", asked.append)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: asked.append("end"))
    with processes(small(batch_size=16, device="auto")) as group:
        assert (group.device, group.rank, group.size) == ("cuda:1", 5, 8)
    assert asked == [1, "nccl", "end"]


def _fails_during_a_sum(rank, port, folder):
    """One of two processes, both of which fail while gloo still holds a tensor."""
    torch.set_num_threads(1)
    os.environ |= dict(
        TORCHELASTIC_RUN_ID="test", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip

    def failing(*_):
        torch.distributed.all_reduce(torch.zeros(2**25), async_op=True)
        raise UserError("no space left")

    Recorder.measured = failing
    with pytest.raises(UserError, match="no space left"):
        train(small(), folder)


@pytest.mark.slow
def test_processes_that_fail_leave_at_once(tmp_path, server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        server.Process(target=_fails_during_a_sum, args=(i, port, tmp_path / "a")) for i in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(20)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0], "None is a process that hangs"


def test_captures_and_the_window_leave_the_run_alone(tmp_path):
    plain = train(small(policy="LOW", steps=8), tmp_path / "a")
    watched = small(
        policy="LOW", steps=8, window=(2, 5), capture_at=(3,), capture_every=2, capture_layer=0,
        capture_heads=(1,),
    )  # fmt: skip
    run = train(watched, tmp_path / "b")
    assert run.metrics.equals(plain.metrics)
    assert run.info["weights_sha256"] == plain.info["weights_sha256"]
    assert sorted(contents(tmp_path / "b" / "captures")) == ["step-000003.xz"]
    specimen = Capture.load(tmp_path / "b" / "captures" / "step-000003.xz")
    assert specimen.step == 3 and list(specimen.heads) == [1] and specimen.replay().reproduced
    errors = pd.read_parquet(tmp_path / "b" / "query_error.parquet")
    assert set(errors.step) == {2, 3, 4, 5} and len(errors) == 4 * 2
    assert (errors.error_norm > 0).all() and (errors.error_norm < errors.grad_norm).all()


@pytest.mark.parametrize(("rows", "policy"), [(1, "LOW"), (3, "ALL_FP32+o=bf16")])
def test_the_window_of_micro_batches_is_that_of_the_batch(tmp_path, rows, policy):
    """The same error of W_Q's gradient, summed over sequences one by one, over three and the one
    that is left, or all at once. Three need an error that is linear in dO, as only O's is."""
    config = small(policy=policy, batch_size=4, window=(0, 1), steps=2)
    train(config, tmp_path / "a")
    train(dataclasses.replace(config, micro_batch=rows), tmp_path / "b")
    whole, parts = (pd.read_parquet(tmp_path / run / "query_error.parquet") for run in "ab")
    for name in ("delta_abs", "error_norm", "sum_norm", "grad_norm"):
        assert list(parts[name]) == pytest.approx(list(whole[name]), rel=0.01), name


@pytest.mark.parametrize("oldest", [200, 600])
def test_the_onset_keeps_300_steps_before_and_50_after(oldest, monkeypatch):
    """Of those before it what is still there."""
    monkeypatch.setattr(explosion, "find_explosion", lambda losses: explosion.Explosion(700, True))
    watch = object.__new__(Recorder)
    watch.metrics, watch.onset, watch.step = [], [], 1000
    watch.recent = [np.full((1, 2, 3), step) for step in range(oldest, 1000)]
    watch._keep_onset()
    (rows,) = watch.onset
    kept = np.repeat(range(max(400, oldest), 750), 2)
    assert list(rows[:, 0]) == list(kept) == list(rows[:, 3])


def test_a_run_stops_so_many_steps_after_the_onset(monkeypatch):
    monkeypatch.setattr(explosion, "find_explosion", lambda losses: explosion.Explosion(700, True))
    watch = object.__new__(Recorder)
    watch.config, said = small(stop_after_explosion=100), {}
    for steps in (800, 801):
        watch.metrics = [(step, 2.0, 1.0) for step in range(steps)]
        said[steps] = watch.should_stop()
    assert said == {800: None, 801: "explosion"}


@pytest.mark.parametrize(
    "losses, onset, steps",
    [
        ([3] * 400 + [5] * 300 + [3] * 500, None, None),
        # back between two probes, and up again before the second
        ([3] * 420 + [5] * 240 + [3] * 48 + [40] * 2 + [5] * 490, 708, range(408, 758)),
    ],
    ids=["comes back", "comes back and rises again"],
)
def test_the_onset_is_that_of_the_rise_that_stays(tmp_path, losses, onset, steps):
    config = small(steps=1200, probe_every=50)
    model, tokens = GPT(config.model()), data.load_tokens(config.data)
    watch = Recorder(config, tmp_path / "a", "", Group("cpu"), tokens)
    for loss in losses:
        sums = SimpleNamespace(grad=torch.ones(1, 2, 3))
        watch.measured(torch.tensor(float(loss)), torch.tensor(1.0), sums)
        if watch.step % 50 == 0:
            watch.probe(model)
    watch.finish("completed", model, tmp_path / "a")
    run = runs.load_run(tmp_path / "a")
    assert getattr(run.explosion, "onset", None) == onset
    assert (tmp_path / "a" / "onset.parquet").exists() == (onset is not None)
    if onset is not None:
        assert list(run.onset.step.unique()) == list(steps)


def test_speed_and_the_share_of_the_peak_rate(monkeypatch):
    """100 steps of 32 x 1,024 tokens in 8 seconds on two GPUs of 989.4 TFLOP/s."""
    monkeypatch.setattr(recorder.time, "time", lambda: 1008.0)
    watch = object.__new__(Recorder)
    watch.config, watch.group = TrainConfig(), Group("cuda", 0, 2)
    watch.info, watch.step = dict(hardware="NVIDIA H200"), 150
    watch.began, watch.timed = (0, 0.0), (50, 1000.0)
    model = SimpleNamespace(flops_per_token=lambda: 1e9)
    share = 409_600 * 1e9 / 2 / 989.4e12
    assert watch.speed(model) == dict(tokens_per_second=409_600, mfu=pytest.approx(share, abs=1e-4))
    watch.info["hardware"], watch.timed = "CPU", None
    assert watch.speed(model) == dict(tokens_per_second=round(150 * 32 * 1024 / 1008))


@pytest.mark.parametrize("gate", [False, True])
def test_flops_are_those_that_pytorch_counts(gate):
    """All products but attention's, which are two of 2 T C a token, half of them masked, and
    twice as many in the backward."""
    model = GPT(GPTConfig(2, 2, 32, 16, vocab_size=64, impl="sdpa", gate=gate))
    x, y = torch.randint(0, 64, (2, 3, 16))
    with FlopCounterMode(display=False) as counter:
        model(x, y).backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    attention = 2 * (2 * 2 * 16 * 32) / 2 * 3
    assert model.flops_per_token() == products / (3 * 16) + attention


@pytest.fixture
def low_scale(monkeypatch):
    """Start from 2^10: a batch of 32 tokens overflows at PyTorch's own 2^16."""
    start_low = functools.partial(torch.amp.GradScaler, init_scale=1024.0)
    monkeypatch.setattr(torch.amp, "GradScaler", start_low)


def test_fp16_scales_the_loss_and_nothing_recorded_shows_it(tmp_path, low_scale):
    """Losses, gradient norms and sums of delta are those of FP32 training, up to rounding."""
    plain = train(small(amp=False, policy="FA2+s=e8m2"), tmp_path / "a")
    half = train(small(amp="fp16", policy="FA2+s=e8m2"), tmp_path / "b")
    for name in ("loss", "grad_norm"):
        assert list(half.metrics[name]) == pytest.approx(list(plain.metrics[name]), rel=2e-3)
    assert (half.metrics.loss != plain.metrics.loss).any()
    assert list(half.probes.delta_abs) == pytest.approx(list(plain.probes.delta_abs), rel=0.2)
    ties = half.probes.tied_rows
    assert ties.any() and (ties % 1 == 0).all(), "a number of rows"
    assert half.info["config"]["amp"] == "fp16"


def overflowing(monkeypatch, at: int, scales: list):
    """Make one gradient of the step `at` infinite, as an overflow would; note each step's scale."""
    from lowprec.training import loop as module

    gradients, steps = module._gradients, iter(range(100))

    def broken(model, *how):
        loss = gradients(model, *how)
        scales.append(how[-1].get_scale())
        if next(steps) == at:
            next(model.parameters()).grad[0, 0] = float("inf")
        return loss

    monkeypatch.setattr(module, "_gradients", broken)


def test_fp16_skips_a_step_whose_gradient_is_not_finite(tmp_path, monkeypatch, low_scale):
    scales = []
    overflowing(monkeypatch, 1, scales)
    run = train(small(amp="fp16", weights_at=(0, 1, 2, 3, 4)), tmp_path / "a")
    before = [torch.load(p)["token.weight"] for p in sorted((tmp_path / "a/.weights").iterdir())]
    same = [torch.equal(a, b) for a, b in zip(before, before[1:], strict=False)]
    assert same == [False, True, False, False], "step 1 and no other is skipped"
    assert scales == [1024, 1024, 512, 512]
    assert list(np.isfinite(run.metrics.grad_norm)) == [True, False, True, True]
    rows = run.probes.groupby("step").rows.first().sum() / run.info["config"]["block_size"]
    assert rows == 3 * run.info["config"]["batch_size"], "its sums are left out, and its rows"
    assert np.isfinite(run.metrics.loss).all() and run.info["ended"] == "completed"


def test_a_gradient_that_is_never_finite_ends_an_fp16_run(tmp_path, monkeypatch, low_scale):
    monkeypatch.setattr(recorder.scaling, "PATIENCE", 3)
    for at in range(1, 8):
        overflowing(monkeypatch, at, [])
    run = train(small(amp="fp16", steps=8, probe_every=2), tmp_path / "a")
    assert run.info["ended"] == "3 steps skipped, step 3" and run.info["steps"] == 4
    assert run.explosion is None and run.finished


def test_in_fp16_too_a_non_finite_loss_ends_all_updates(tmp_path, monkeypatch, low_scale):
    forward = GPT.forward
    calls = []

    def failing(self, *how):
        calls.append(forward(self, *how))
        return calls[-1] * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(GPT, "forward", failing)
    run = train(small(amp="fp16", probe_every=4, weights_at=(1, 2, 3)), tmp_path / "a")
    (before,) = (tmp_path / "a/.weights").iterdir()  # there are no steps 2 and 3
    assert before.name == "step-000001.pt" and len(calls) == 4
    assert run.info["ended"] == "non-finite" and run.info["steps"] == 2
    same = weights_sha256(torch.load(before)) == run.info["weights_sha256"]
    assert same, "the finite loss after it made an update"


def test_a_resumed_fp16_run_keeps_its_scale(tmp_path, monkeypatch, low_scale):
    config = small(amp="fp16", steps=6, checkpoint_every=3)
    scales, measured = [], Recorder.measured
    with monkeypatch.context() as patch:
        overflowing(patch, 1, scales)
        whole = train(config, tmp_path / "a")

    def interrupted(self, *numbers):
        measured(self, *numbers)
        if self.step == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        overflowing(patch, 1, [])
        patch.setattr(Recorder, "measured", interrupted)
        with pytest.raises(UserError, match="stopped after 4 steps"):
            train(config, tmp_path / "b")
    overflowing(monkeypatch, -1, scales)
    resumed = train(config, tmp_path / "b", resume=True)
    assert scales[-2:] == [512, 512], "the checkpoint forgot the scale"
    assert resumed.info["weights_sha256"] == whole.info["weights_sha256"]
    assert resumed.metrics.equals(whole.metrics)


def test_the_order_of_the_data_has_a_seed_of_its_own(tmp_path):
    a = train(small(seed=1, steps=1), tmp_path / "a")
    b = train(small(seed=1, data_seed=1, steps=1), tmp_path / "b")
    c = train(small(seed=1, data_seed=2, steps=1, weights_at=(0,)), tmp_path / "c")
    d = train(small(seed=1, steps=1, weights_at=(0,)), tmp_path / "d")
    assert a.info["weights_sha256"] == b.info["weights_sha256"] == d.info["weights_sha256"]
    assert c.metrics.loss[0] != a.metrics.loss[0]
    first = [torch.load(tmp_path / run / ".weights/step-000000.pt") for run in "cd"]
    assert all(torch.equal(first[0][name], first[1][name]) for name in first[0])


def test_the_rolling_captures_before_an_explosion_stay(tmp_path, monkeypatch):
    real = explosion.find_explosion

    def rising(losses):
        return explosion.Explosion(5, len(losses) > 9) if len(losses) > 6 else real(losses)

    monkeypatch.setattr(explosion, "find_explosion", rising)
    config = small(policy="LOW", steps=40, capture_every=1, capture_keep=3, stop_after_explosion=4)
    run = train(config, tmp_path / "a")
    kept = sorted(int(n[5:11]) for n in contents(tmp_path / "a" / "captures"))
    assert run.info["ended"] == "explosion" and kept == [5, 6, 7, 8, 9]
    assert list(run.onset.step.unique()) == list(range(len(run.metrics)))
    sums = run.onset.groupby(["step"]).delta_abs.sum()
    by_probe = run.probes.groupby("step").delta_abs.sum()
    assert sums[:2].sum() == pytest.approx(by_probe[1], rel=1e-6)


def test_a_run_killed_in_its_rise_keeps_the_captures_before_it(tmp_path, monkeypatch):
    """It goes on from a checkpoint before the rise, with captures in its folder from after it."""
    real, measured = explosion.find_explosion, Recorder.measured

    def rising(losses):
        return explosion.Explosion(5, len(losses) > 14) if len(losses) > 6 else real(losses)

    def killed(self, *numbers):
        measured(self, *numbers)
        if self.step == 11:
            raise KeyboardInterrupt

    monkeypatch.setattr(explosion, "find_explosion", rising)
    config = small(
        policy="LOW", steps=40, capture_every=1, capture_keep=3, stop_after_explosion=4,
        checkpoint_every=6,
    )  # fmt: skip
    whole = train(config, tmp_path / "a")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recorder, "measured", killed)
        train(config, tmp_path / "b")
    run = train(config, tmp_path / "b", resume=True)
    assert run.metrics.equals(whole.metrics)
    names = [sorted(contents(tmp_path / k / "captures")) for k in "ab"]
    assert names[0] == names[1] and len(names[0]) > 3


@pytest.mark.parametrize(
    "changes,word",
    [(dict(window=(3, 2)), "window"), (dict(window=(0, 1), checkpoint_every=2), "uninterrupted"),
     (dict(window=(0, 9)), "below 4"), (dict(layers={"7": "LOW"}), "layers: '7'"),
     (dict(micro_batch=0), "micro_batch=0"), (dict(capture_at=(4,)), "capture_at"),
     (dict(capture_layer=5), "capture_layer=5"), (dict(capture_heads=(2,)), "capture_heads"),
     (dict(capture_keep=0), "capture_keep=0"), (dict(impl="sdpa", capture_at=(1,)), "sdpa"),
     (dict(amp="fp8"), "amp='fp8'"), (dict(amp="fp16", capture_at=(1,)), "BF16 or FP32"),
     (dict(lr_end=0.0, lr_steps=100, warmup=100), "lr_steps=100 must be above warmup=100"),
     (dict(weights_at=(5,)), "weights_at"), (dict(layers={"-1": "LOW"}), "layers: '-1'"),
     (dict(layers={"0/-1": "LOW"}), "layers: '0/-1'"), (dict(n_head=0), "n_head=0 must be"),
     (dict(n_layer=0), "n_layer=0 must be"), (dict(n_embd=33), "n_embd=33 must be a multiple"),
     (dict(layers={"0/1": "LOW"}, capture_heads=(0, 1)), "several policies in layer 0"),
     (dict(block_size=8000, capture_at=(3,), capture_heads=(0, 1)), "would take 6.2 MB"),
     (dict(block_size=16000, capture_every=3, amp=True), "would take 3.7 MB")],
)  # fmt: skip
def test_settings_that_cannot_be(tmp_path, changes, word):
    with pytest.raises(UserError, match=word):
        train(small(**changes), tmp_path / "a")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", [math.nan, math.inf, -1])
@pytest.mark.parametrize(
    "name", ["lr", "lr_end", "beta1", "beta2", "eps", "weight_decay", "clip", "logit_softcap"]
)
def test_a_number_that_is_none_is_refused(name, value):
    if (name, value) != ("clip", math.inf):  # clips nothing
        with pytest.raises(UserError, match=f"{name}={value} must be "):
            small(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [dict(clip=0), dict(beta1=1), dict(beta2=2), dict(tile=0), dict(checkpoint_every=-1),
     dict(capture_every=-1), dict(warmup=-1), dict(stop_after_explosion=-1), dict(seed=-1),
     dict(seed=2**63), dict(data_seed=-1), dict(lr_steps=0), dict(probe_every=0)],
    ids=str,
)  # fmt: skip
def test_a_number_out_of_its_range_is_refused(changes):
    ((name, value),) = changes.items()
    with pytest.raises(UserError, match=f"{name}={value} must be "):
        small(**changes)


@pytest.mark.parametrize(
    "changes, word",
    [(dict(steps=2.5), "a whole number"), (dict(steps=True), "a whole number"),
     (dict(steps=[2]), "a whole number"), (dict(lr=None), "a number"),
     (dict(lr="2e-3"), "a number; write it as 2.0e-3"), (dict(data=None), "a text"),
     (dict(gate=1), "True or False"), (dict(amp=1), "True or False or a text or None"),
     (dict(layers="LOW"), "policies by layer"), (dict(layers={"0": 3}), "policies by layer"),
     (dict(window=[1]), "two steps, as"), (dict(window=["a", "b"]), "two steps, as"),
     (dict(capture_at=["x"]), "a list of whole numbers"), (dict(tile=7.5), "a whole number or N")],
    ids=str,
)  # fmt: skip
def test_a_setting_of_another_type_is_refused(changes, word):
    ((name, value),) = changes.items()
    with pytest.raises(UserError, match=re.escape(f"{name}={value!r} must be {word}")):
        small(**changes)
    small(lr=1, layers={0: "LOW"}, window=[1, 2], capture_at=[1], amp=None, tile=8)


def test_deterministic_puts_everything_back():
    def state():
        return (
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )  # fmt: skip

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with deterministic():
            assert state() == ("highest", True, False)
        assert state() == ("high", False, True)
    finally:
        torch.set_float32_matmul_precision(before)


def test_every_committed_campaign_can_be_started():
    for file in (files.data_root() / "runs").glob("*/campaign.yaml"):
        assert campaign.load_campaign(file)  # which also makes each model's configuration


CAMPAIGN = """
question: q
predictions: [p]
preset: tiny
train: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 16, batch_size: 2, steps: 2}
arms:
  low: {policy: LOW, seeds: [0]}
  bad: {policy: LOW, lr: 1.0, seeds: [0]}
"""


def test_a_campaign_without_tokens_starts_nothing(tmp_path):
    file = tmp_path / "campaign.yaml"
    file.write_text(CAMPAIGN)
    with pytest.raises(UserError, match="nowhere"):
        campaign.run_campaign(file, data="nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["campaign.yaml"]


@pytest.mark.parametrize(
    "name", sorted(p.name for p in (files.data_root() / "runs").iterdir() if runs.run_paths(p))
)
def test_recorded_runs_are_those_that_the_campaign_asks_for(name):
    """A campaign may still lack runs; what is there has the committed configuration."""
    jobs = {
        j.name: j for j in campaign.load_campaign(files.data_root() / f"runs/{name}/campaign.yaml")
    }
    corpus = json.loads((files.data_root() / "corpora" / "pysource.json").read_text())
    usual = TrainConfig.usual()
    for run in runs.load_runs(name).run:
        recorded = usual | run.info["config"]  # a field may be younger than the run
        asked = json.loads(json.dumps(dataclasses.asdict(jobs[run.name].config)))
        for field in asked.keys() - {"data", "device"}:
            assert recorded[field] == asked[field], (run.name, field)
        assert run.info["arm"] == jobs[run.name].arm and run.finished
        spoilt = jobs[run.name].config.data != "shards/pysource"  # see lowprec.studies.fault
        assert (run.info["data_sha256"] == corpus["sha256"]) != spoilt


@pytest.mark.parametrize(
    "text,word",
    [
        (CAMPAIGN.replace("predictions: [p]", ""), "predictions"),
        (CAMPAIGN.replace("tiny", "huge"), "preset"),
        (CAMPAIGN.replace("lr: 1.0", "lrr: 1"), "did you mean lr"),
        (CAMPAIGN.replace("seeds: [0]", "seeds: []"), "list its seeds"),
        (CAMPAIGN.replace("arms:", "arm:"), "arms"),
        ("a: [", "YAML"),
    ],
)
def test_campaign_errors(tmp_path, text, word):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=word):
        campaign.load_campaign(tmp_path / "c.yaml")


@pytest.mark.gpu
def test_training_on_the_gpu_is_bitwise_repeatable(tmp_path):
    config = TrainConfig(
        policy="LOW", n_layer=2, n_head=2, n_embd=128, block_size=256, batch_size=4, steps=20,
        warmup=5, probe_every=10, data="data/corpora/smoke.safetensors",
    )  # fmt: skip
    a, b = (train(config, tmp_path / n) for n in "ab")
    assert a.info["impl"] == "triton"
    assert a.metrics.equals(b.metrics) and a.probes.equals(b.probes)
    assert a.info["weights_sha256"] == b.info["weights_sha256"]
    assert np.isfinite(a.metrics.loss).all()


def test_nothing_is_captured_after_a_loss_that_is_not_finite(tmp_path, monkeypatch):
    gradients = loop._gradients

    def failing(model, group, batches, probe, amp, seed, scaler):
        loss = gradients(model, group, batches, probe, amp, seed, scaler)
        return loss * (math.nan if seed.args[-1] >= 11 else 1)

    monkeypatch.setattr(loop, "_gradients", failing)
    config = small(steps=40, probe_every=20, capture_every=3, capture_keep=2, window=(0, 39))
    run = train(config, tmp_path / "a")
    assert (run.info["ended"], run.info["steps"]) == ("non-finite", 12)
    kept = sorted(path.name for path in (tmp_path / "a/captures").iterdir())
    assert kept == ["step-000006.xz", "step-000009.xz"]
    assert pd.read_parquet(tmp_path / "a/query_error.parquet").step.max() == 11


def test_a_resumed_run_reads_when_it_is_killed_between_its_tables(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    flush, write = Recorder.flush, files.write_atomic

    def killed(self, *how):
        flush(self, *how)
        if self.step == 8:
            raise Killed

    def between(path, how):
        write(path, how)
        if path.name == "probes.parquet":
            raise Killed

    monkeypatch.setattr(recorder, "EARLY", -1.0)
    config = small(steps=20, checkpoint_every=5)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "flush", killed)
        with pytest.raises(Killed):
            train(config, tmp_path / "a")
    monkeypatch.setattr(files, "write_atomic", between)
    with pytest.raises(Killed):
        train(config, tmp_path / "a", resume=True)
    assert len(runs.load_run(tmp_path / ".a.part").metrics) == 5


def test_a_run_asked_to_stop_in_its_last_step_has_ended(tmp_path, monkeypatch):
    measured = Recorder.measured

    def asked(self, *numbers):
        measured(self, *numbers)
        if self.step == 4:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Recorder, "measured", asked)
    assert train(small(), tmp_path / "a").info["ended"] == "completed"


def gathering(group, *losses):
    from collections import deque

    from lowprec.training.recorder import Recorder

    watch = Recorder.__new__(Recorder)
    watch.group, watch.metrics, watch.recent, one = group, [], deque(), torch.tensor(1.0)
    watch.pending = [
        (i, torch.tensor(loss), one, torch.full((1, 2, 3), float(i)))
        for i, loss in enumerate(losses)
    ]
    watch.collect()
    return watch


def test_sums_of_delta_over_processes_are_of_the_gradient_of_the_mean():
    group = SimpleNamespace(size=2, sum=lambda x: 2 * x)
    assert gathering(group, 1.0, 1.0).recent[1][0, 0].tolist() == [1, 1, 2]


def test_of_steps_after_a_loss_that_is_not_finite_no_sums_are_kept():
    watch = gathering(SimpleNamespace(size=1, sum=lambda x: x), 1.0, float("nan"), 1.0, 1.0)
    assert watch.step == 2 and [sums[0, 0, 0] for sums in watch.recent] == [0, 1]


def test_no_two_layers_of_any_steps_draw_the_same_bits(monkeypatch):
    from lowprec.training.model import GPT, Block, GPTConfig

    seeds = []
    monkeypatch.setattr(
        Block, "attention", lambda self, q, k, v, probe, seed: seeds.append(seed) or q
    )
    model = GPT(GPTConfig(3, 2, 16, 8, vocab_size=32))
    x = torch.zeros(1, 8, dtype=torch.long)
    for seed in range(3):
        model(x, x, seed=seed)
    assert len(seeds) == len(set(seeds)) == 9


def test_the_first_step_has_the_first_rate_of_the_warm_up(tmp_path):
    a = train(small(steps=1, lr=2e-3, warmup=2), tmp_path / "a")
    b = train(small(steps=1, lr=1e-3, warmup=0), tmp_path / "b")
    assert a.info["weights_sha256"] == b.info["weights_sha256"]


def recording(tmp_path, **changes):
    config = small(**changes)
    tokens = data.load_tokens(config.data)
    return GPT(config.model()), Recorder(config, tmp_path / "a", "", Group("cpu"), tokens)


def step_of(watch):
    sums = SimpleNamespace(grad=torch.ones(1, 2, 3))
    watch.measured(torch.tensor(3.0), torch.tensor(1.0), sums)


def test_a_probe_sums_over_all_its_steps_however_many(tmp_path):
    model, watch = recording(tmp_path, steps=1200, probe_every=1200)
    for _ in range(1200):
        step_of(watch)
    watch.probe(model)
    watch.leave()
    assert (watch.probes[0][:, 5:8] == 1200).all()


def test_the_seconds_of_a_run_add_up_over_its_flushes(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(recorder.time, "time", lambda: now[0])
    model, watch = recording(tmp_path)
    for now[0] in (10.0, 25.0):
        step_of(watch)
        watch.collect()
        watch.flush("running")
    watch.leave()
    assert watch.info["seconds"] == 25


def test_a_resumed_run_counts_the_seconds_of_its_first_sitting(tmp_path, monkeypatch):
    config = small(steps=8, checkpoint_every=8)
    with monkeypatch.context() as patch:
        patch.setattr(recorder.time, "time", itertools.count(0, 1000).__next__)
        stop_in_step(3, config, tmp_path / "a", monkeypatch)
    first = runs.load_run(tmp_path / ".a.part").info["seconds"]
    assert train(config, tmp_path / "a", resume=True).info["seconds"] >= first > 900


@pytest.mark.parametrize(
    "changes,word",
    [(dict(window=(0, 4)), "below 4"), (dict(impl="sdpa", window=(0, 1)), "sdpa"),
     (dict(amp="fp16", window=(0, 1)), "BF16 or FP32")],
)  # fmt: skip
def test_windows_that_cannot_be(changes, word):
    with pytest.raises(UserError, match=word):
        small(**changes)


def test_heads_of_the_captured_layer_alone_must_share_a_policy():
    small(n_layer=2, layers={"0/1": "LOW"}, capture_layer=1, capture_heads=(0, 1))


@pytest.mark.parametrize("how", [dict(capture_at=(1,)), dict(capture_every=2), dict(window=(0, 1))])
def test_captures_are_of_one_process(how):
    small(**how).check_processes(1)
    with pytest.raises(UserError, match="made by one process, and not by 2"):
        small(**how).check_processes(2)


def test_what_a_command_sets_wins_over_train_and_arms(tmp_path):
    (tmp_path / "c.yaml").write_text(CAMPAIGN)
    jobs = campaign.load_campaign(tmp_path / "c.yaml", lr=0.5, steps=3)
    assert {(job.config.lr, job.config.steps) for job in jobs} == {(0.5, 3)}


def test_sums_of_delta_are_of_the_head_that_has_the_policy():
    torch.manual_seed(0)
    config = GPTConfig(1, 2, 32, 16, vocab_size=64, policy="ALL_FP32", layers={"0/1": "LOW"})
    model, (x, y) = GPT(config), torch.randint(0, 64, (2, 3, 16))
    probe = model.new_probe()
    model(x, y, probe).backward()
    assert probe.grad[0, 0, 1] == 0 < probe.grad[0, 1, 1]


def test_a_head_without_an_error_has_a_sketch_of_zeros():
    window, (q, k) = QueryErrorWindow(1, 1, 4, 6), torch.randn(2, 1, 1, 8, 4)
    window.update(0, 0, torch.randn(1, 8, 6), q, k, torch.zeros(1, 1, 8))
    window.end_step(0)
    assert (window.to_table().filter(like="sketch_") == 0).all(axis=None)


def test_weights_of_zero_have_norm_zero():
    assert spectral_norms(torch.zeros(2, 3, 5)).tolist() == [0, 0]


def test_a_hash_of_weights_is_of_every_bit_of_them():
    weights = dict(a=torch.zeros(2), b=torch.zeros(2))
    hashes = {weights_sha256(weights | {name: -weights[name]}) for name in weights}
    assert len(hashes | {weights_sha256(weights)}) == 3
