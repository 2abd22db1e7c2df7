"""The training loop: one process, seeded data order, everything per step into a run folder.

Two arms of an experiment differ in `policy` alone: with equal seeds they start from the same
weights and see the same batches. TF32 is off and deterministic algorithms are on, so a seed run
twice gives the same numbers. The run folder is written when the run ends, and every
`FLUSH` steps before that under a name that starts with a dot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from lowprec import UserError, data, runs
from lowprec.attention import PROBE_COLUMNS, resolve_impl
from lowprec.model import GPT, GPTConfig
from lowprec.policy import PrecisionPolicy
from lowprec.probes import spectral_norms

FLUSH = 500


@dataclass(frozen=True)
class TrainConfig:
    """One run. Defaults are the 12-layer GPT-2 of the first recorded campaign."""

    policy: str = "FA2"
    """attention's rounding sites, e.g. LOW or LOW+delta_from=o_fp32"""
    seed: int = 0
    """seeds the weights and the data order"""
    data: str = "shards/pysource"
    """a token shard or a folder of shards, see `lowprec data prepare`"""
    steps: int = 6500
    stop_after_explosion: int | None = 1000
    """steps to go on after the onset of a confirmed explosion; None never stops"""
    batch_size: int = 32
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    lr: float = 2e-3
    warmup: int = 1000
    """steps of linear warm-up; the learning rate is constant after it"""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """largest global gradient norm"""
    impl: str = "auto"
    tile: int | None = None
    probe_every: int = 50
    device: str = "auto"
    compile: bool | None = None
    """torch.compile everything but attention; None means on CUDA"""
    amp: bool | None = None
    """BF16 autocast outside attention, over FP32 weights; None means on CUDA"""

    def __post_init__(self):
        PrecisionPolicy.parse(self.policy)
        for name in ("steps", "batch_size", "block_size", "probe_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")

    def model(self) -> GPTConfig:
        names = {f.name for f in dataclasses.fields(GPTConfig)} & set(vars(self))
        return GPTConfig(**{name: getattr(self, name) for name in names})


PRESETS = {
    "gpt2": TrainConfig(),
    "mini": TrainConfig(n_layer=6, n_head=6, n_embd=384, warmup=500, steps=4000),
    "tiny": TrainConfig(
        n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=4, steps=100, warmup=20,
        probe_every=10, data="data/corpora/smoke.safetensors",
    ),
}  # fmt: skip


def train(config: TrainConfig, out: str | Path, arm: str = "") -> runs.Run:
    """Train, record, and return the run. `out` is a new run folder; an existing one is refused."""
    out = Path(out)
    if out.exists():
        raise UserError(f"run folder {out} exists and is never overwritten; choose another name")
    device = pick_device(config.device)
    tokens = data.load_tokens(runs.at_root(config.data))
    recorder = Recorder(config, out, arm, device, tokens)
    try:
        with deterministic():
            end = _loop(config, tokens, device, recorder)
    finally:
        recorder.leave_nothing_empty()
    return recorder.finish(end)


def pick_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={device} needs an NVIDIA GPU and there is none; use device=cpu")
    return device


@contextlib.contextmanager
def deterministic():
    """TF32 off, deterministic algorithms on, and back again."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # only costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def learning_rate(config: TrainConfig, step: int) -> float:
    return config.lr * min(1.0, (step + 1) / max(config.warmup, 1))


def _loop(config, tokens, device, recorder) -> str:
    torch.manual_seed(config.seed)
    model = GPT(config.model()).to(device)
    kind = torch.device(device).type
    on_gpu = kind == "cuda"
    amp = on_gpu if config.amp is None else config.amp
    compiled = (
        torch.compile(model) if (on_gpu if config.compile is None else config.compile) else model
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
        weight_decay=config.weight_decay, fused=on_gpu,
    )  # fmt: skip
    probe = None if config.impl == "sdpa" else model.new_probe()
    stochastic = "stochastic" in config.policy or "dither" in config.policy
    progress = tqdm(range(config.steps), desc=recorder.name, mininterval=1.0, dynamic_ncols=True)
    for step in progress:
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = (
            t.to(device, non_blocking=True)
            for t in data.batch(tokens, step, config.seed, config.batch_size, config.block_size)
        )
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=amp):
            loss = compiled(x, y, probe, step if stochastic else 0)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.metric(step, loss.detach(), norm, lr)
        if (step + 1) % config.probe_every == 0 or step + 1 == config.steps:
            recorder.probe(step, model, probe)
            last = recorder.collect()
            progress.set_postfix(loss=f"{last:.3f}", refresh=False)
            if (reason := recorder.should_stop()) is not None:
                return reason
    return "completed"


class Recorder:
    """Gathers metrics on the device, and writes the run folder."""

    def __init__(self, config, out: Path, arm: str, device: str, tokens):
        self.config, self.out, self.name = config, out, out.name
        self.part = out.with_name(f".{out.name}.part")
        if self.part.exists():
            raise UserError(
                f"{self.part} holds an unfinished run; remove it, or choose another name"
            )
        recorded = dataclasses.asdict(config) | {"device": device, "data": tokens.name}
        self.info = dict(
            name=out.name, arm=arm or PrecisionPolicy.parse(config.policy).slug, config=recorded,
            impl=resolve_impl(config.impl, device), data_sha256=tokens.sha256,
            **runs.provenance(device),
        )  # fmt: skip
        self.part.mkdir(parents=True)
        self.pending, self.metrics, self.probes = [], [], []
        self.rows_since = 0
        self.started = time.time()

    def metric(self, step, loss, norm, lr):
        self.pending.append((step, loss, norm, lr))
        self.rows_since += self.config.batch_size * self.config.block_size

    def collect(self) -> float:
        """Move pending metrics to the host; return the last loss."""
        steps, losses, norms, rates = zip(*self.pending, strict=True)
        values = torch.stack([torch.stack(losses), torch.stack(norms)]).double().cpu().numpy()
        self.metrics += zip(steps, *values, rates, strict=True)
        self.pending = []
        if len(self.metrics) % FLUSH < len(steps):
            self.flush("running")
        return self.metrics[-1][1]

    def probe(self, step, model, probe):
        """Read and clear the sums since the last probe, and measure the weights."""
        sigma_q, sigma_k = (spectral_norms(model.head_weights(w)).cpu().numpy() for w in "qk")
        sums = np.full((*sigma_q.shape, len(PROBE_COLUMNS)), np.nan)
        if probe is not None and probe.grad is not None:
            sums = probe.grad.double().cpu().numpy()
            probe.grad = None
        layer, head = np.indices(sigma_q.shape)
        columns = (np.full(sigma_q.shape, step), layer, head, sigma_q, sigma_k,
                   *np.moveaxis(sums, -1, 0), np.full(sigma_q.shape, self.rows_since))  # fmt: skip
        self.probes.append(np.stack([c.ravel() for c in columns], -1))
        self.rows_since = 0

    def losses(self) -> np.ndarray:
        return np.array([row[1] for row in self.metrics])

    def should_stop(self) -> str | None:
        """Why the run ends now, or None."""
        losses = self.losses()
        if not math.isfinite(losses[-1]):
            return "non-finite"
        after = self.config.stop_after_explosion
        if after is None or (e := runs.find_explosion(losses)) is None or not e.confirmed:
            return None
        return "explosion" if len(losses) > e.onset + after else None

    def flush(self, ended: str):
        seconds = time.time() - self.started
        n_tokens = len(self.metrics) * self.config.batch_size * self.config.block_size
        self.info |= dict(
            ended=ended, steps=len(self.metrics), seconds=round(seconds, 1),
            tokens_per_second=round(n_tokens / seconds),
        )  # fmt: skip
        metrics = pd.DataFrame(self.metrics, columns=runs.METRICS)
        metrics = metrics.astype({"step": "int32", "grad_norm": "float32", "lr": "float32"})
        probes = pd.DataFrame(np.concatenate(self.probes), columns=runs.PROBES).astype("float32")
        probes = probes.astype({"step": "int32", "layer": "int16", "head": "int16"})
        self.part.mkdir(exist_ok=True)
        for name, table in (("metrics", metrics), ("probes", probes)):
            write_atomic(self.part / f"{name}.parquet", lambda f, t=table: t.to_parquet(
                f, index=False, compression="zstd"))  # fmt: skip
        text = json.dumps(self.info, indent=1) + "\n"
        write_atomic(self.part / "run.json", lambda f: Path(f).write_text(text))

    def leave_nothing_empty(self):
        """Drop the unfinished folder if nothing was recorded in it."""
        with contextlib.suppress(OSError):
            self.part.rmdir()

    def finish(self, end: str) -> runs.Run:
        self.flush(end)
        os.rename(self.part, self.out)
        return runs.load_run(self.out)


def write_atomic(path: Path, write) -> None:
    """Call `write(temporary path)`, then move the file to `path`."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)
