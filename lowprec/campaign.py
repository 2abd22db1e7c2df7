"""Campaigns: arms x seeds from one YAML file, predictions included, one run a GPU.

    question: Does ...?
    predictions: [what is expected, and what would refute it]
    preset: gpt2                      # lowprec.train.PRESETS, then any field of TrainConfig
    train: {lr: 2.0e-3, steps: 6500}
    arms:
      low: {policy: LOW, seeds: [0, 1, 2]}

Each run is its own process and lands in the folder of the YAML as ARM-seedN; runs that are there
already are not started again, and one that fails does not stop the others.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import yaml

from lowprec import UserError
from lowprec.runs import at_root

KEYS = ("question", "predictions", "preset", "train", "arms")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a campaign: its arm, its configuration and the folder it will write."""

    arm: str
    config: object
    out: Path


def load_campaign(path: str | Path, **overrides) -> list[Job]:
    """The jobs of a campaign file in seed order; `overrides` win over the file's `train`."""
    from lowprec.train import PRESETS, TrainConfig

    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no campaign file {path}")
    try:
        spec = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path.name} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(spec, dict) or set(spec) - set(KEYS) or not spec.get("arms"):
        raise UserError(f"{path.name} must have the keys {', '.join(KEYS)} and at least one arm")
    if not spec.get("predictions"):
        raise UserError(f"{path.name} has no predictions; write them before the runs")
    if spec.get("preset") not in PRESETS:
        raise UserError(f"{path.name}: preset must be one of {', '.join(PRESETS)}")
    fields = [f.name for f in dataclasses.fields(TrainConfig)]
    jobs = []
    for arm, changes in spec["arms"].items():
        changes = dict(changes)
        seeds = changes.pop("seeds", None)
        if not seeds:
            raise UserError(f"{path.name}: arm {arm} has no seeds")
        values = {**(spec.get("train") or {}), **changes, **overrides}
        for name in values:
            if name not in fields:
                close = difflib.get_close_matches(name, fields, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UserError(f"{path.name}: arm {arm} sets unknown field {name}{hint}")
        for seed in seeds:
            config = dataclasses.replace(PRESETS[spec["preset"]], **values, seed=seed)
            jobs.append(Job(arm, config, path.parent / f"{arm}-seed{seed}"))
    return sorted(jobs, key=lambda job: job.config.seed)


def run_campaign(path: str | Path, gpus: int | None = None, out: Path | None = None, **overrides):
    """Start what is missing, one process a GPU (or one on the CPU); return {run name: how it went}.

    out: folder for the runs instead of the YAML's own; logs go to OUT/.logs.
    Raises `UserError` before anything starts if the tokens are not there.
    """
    import torch

    from lowprec.data import load_tokens

    jobs = load_campaign(path, **overrides)
    if out is not None:
        jobs = [dataclasses.replace(job, out=Path(out) / job.out.name) for job in jobs]
    missing = [job for job in jobs if not job.out.exists()]
    for path in {job.config.data for job in missing}:
        load_tokens(at_root(path), verify=False)
    slots = Queue()
    for index in range(gpus or max(torch.cuda.device_count(), 1)):
        slots.put(index)
    result = {job.out.name: "recorded before" for job in jobs}

    def work(job):
        slot = slots.get()
        try:
            result[job.out.name] = _run_job(job, slot)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(slots.qsize()) as pool:
        list(pool.map(work, missing))
    return result


def _run_job(job: Job, gpu: int) -> str:
    """Run one job in a process that sees one GPU; "done in N s" or "failed, see LOG"."""
    job.out.parent.mkdir(parents=True, exist_ok=True)
    logs = job.out.parent / ".logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{job.out.name}.txt"
    spec = json.dumps(dict(config=dataclasses.asdict(job.config), out=str(job.out), arm=job.arm))
    code = "import sys; from lowprec.campaign import run_one; run_one(sys.stdin.read())"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    start = time.time()
    with open(log, "w") as file:
        status = subprocess.run(
            [sys.executable, "-c", code], input=spec, text=True, env=environment,
            stdout=file, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
    return f"done in {time.time() - start:.0f} s" if status == 0 else f"failed, see {log}"


def run_one(spec: str) -> None:
    """Entry of a job's process: train what the JSON says."""
    from lowprec.train import TrainConfig, train

    job = json.loads(spec)
    train(TrainConfig(**job["config"]), job["out"], arm=job["arm"])
