"""The training loop: seeded data order, one process or several, everything per step into a folder.

Two arms of an experiment differ in `policy` alone: with equal seeds they start from the same
weights and see the same batches. TF32 is off and deterministic algorithms are on, so a seed run
twice gives the same numbers. `lowprec.training.recorder` writes what is measured.

Several GPUs: `torchrun --nproc-per-node 8 -m lowprec train ...`; each process takes its rows of
every batch, and gradients are averaged.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic

import torch
import torch.distributed as dist
from tqdm import tqdm

from lowprec import UserError
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.numerics.recipe import Recipe
from lowprec.records import files, runs
from lowprec.training.config import TrainConfig, learning_rate
from lowprec.training.data import shards as data
from lowprec.training.eight import RuledScaler, put_into, recipe_of
from lowprec.training.galore import Galore
from lowprec.training.model import GPT, autocast
from lowprec.training.recorder import Recorder
from lowprec.training.specimens import Specimens


def train(
    config: TrainConfig, out: str | Path, arm: str = "", resume: bool = False, campaign: str = ""
) -> runs.Run:
    """Train, record, and return the run. `out` is a new run folder; an existing one is refused.

    resume: go on from the checkpoint of an unfinished run of the same configuration, on as many
    GPUs of the same kind with the numbers it would have had; without an unfinished run, start.
    campaign: sha256 of the campaign file that asks for the run, for run.json.
    SIGTERM and Ctrl-C write what there is, with a checkpoint if the run makes them, and raise
    `UserError`. Every process of `torchrun` calls this; the first one writes.
    """
    out = Path(out)
    if out.exists() or runs.is_run(out):
        ended = resume and runs.is_run(out)
        if ended:  # a process that was killed as it ended can have left it
            (out / "checkpoint.pt").unlink(missing_ok=True)
        why = "has ended, there is nothing to resume" if ended else "exists"
        raise UserError(f"run folder {out} {why}; it is never overwritten, choose another name")
    with processes(config) as group, deterministic(), stop_signal() as stop:
        tokens = data.load_tokens(files.at_root(config.data))
        recorder = Recorder(config, out, arm, group, tokens, resume, campaign)
        try:
            model, end = _loop(config, tokens, group, recorder, stop)
            recorder.finish(end, model, out)
        finally:
            recorder.leave()
        group.wait()
    return runs.load_run(out)


@dataclass(frozen=True)
class Group:
    """This process among those that train together."""

    device: str
    rank: int = 0
    size: int = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def wait(self):
        if self.size > 1:
            dist.barrier()


@contextlib.contextmanager
def processes(config: TrainConfig):
    """The group that torchrun made, or this process alone."""
    device = pick_device(config.device)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Group(device)
        return
    end_with_launcher()
    rank, size, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    config.check_processes(size)
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield Group(device, rank, size)
    except BaseException as error:
        # The failed frames hold DDP, which would end the group last, waiting for gloo's threads
        # with the GIL, for which those wait in turn. destroy_process_group waits without it.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        dist.destroy_process_group()


def end_with_launcher():
    """Have Linux stop this process (SIGTERM) once torchrun, its parent, is gone: if that is killed
    with SIGKILL it cannot stop its processes itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def pick_device(device: str) -> str:
    """The device that "auto" means; raises `UserError` for one that is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = None
    if kind not in ("cuda", "cpu"):
        raise UserError(f"there is no device={device}; take cuda, cpu or auto")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={device} needs an NVIDIA GPU and there is none; use device=cpu")
    return device


@contextlib.contextmanager
def deterministic():
    """TF32 off, deterministic algorithms on, and back again."""
    memory = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # only costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warned)
        memory.fill_uninitialized_memory = before[1]
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def stop_signal():
    """An event that SIGTERM and Ctrl-C set, so that a run ends between two steps."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    asked = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop.set()) for number in asked]
    try:
        yield stop
    finally:
        for number, handler in zip(asked, before, strict=True):
            signal.signal(number, handler)


def _loop(config, tokens, group, recorder, stop) -> tuple[GPT, str]:
    """Train from where the recorder stands; the model and why the run ended."""
    torch.manual_seed(config.seed)
    shape = dataclasses.replace(config.model(), vocab_size=tokens.vocab_size)
    model = GPT(shape).to(group.device)
    on_gpu = torch.device(group.device).type == "cuda"
    optimizer = make_optimizer(config, model)
    # The fused step leaves the weights alone where found_inf is 1. So the first loss that is not
    # finite stops all updates at once, without the host having to wait for each loss.
    broken = optimizer.found_inf = torch.zeros((), device=group.device)
    amp = on_gpu if config.amp is None else config.amp
    recipe, draws = recipe_of(config), torch.Generator(group.device).manual_seed(config.seed)
    put_into(model, recipe, draws)
    if recipe == Recipe() and config.loss_scale is None:
        scaler = loss_scaler(amp == "fp16", group, optimizer, broken)
    else:
        scaler = RuledScaler(recipe, config.loss_scale, config.spurious, broken, draws)
    recorder.restore(model, optimizer, scaler)
    if (on_gpu if config.compile is None else config.compile) and recipe == Recipe():
        model.loss = torch.compile(model.loss)
    replicas = model
    if group.size > 1:
        replicas = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    probe = None if config.impl == "sdpa" else model.new_probe()
    seeds = functools.partial(draw_seed, config, group)
    specimens = Specimens(recorder, model, bool(amp), seeds, broken)
    if recorder.resumes and group.size > 1:
        # DDP adds gradients up in another order from its second step on, the one in which they
        # came in its first. A pass that is thrown away takes a run that goes on to that order.
        batches = micro_batches(config, tokens, group, recorder.step)
        _gradients(replicas, group, batches[-1:], probe, amp, lambda *_: 0, scaler)
        optimizer.zero_grad(set_to_none=True)
        if probe is not None:
            probe.grad = None
    progress = tqdm(
        range(recorder.step, config.steps), desc=recorder.name, initial=recorder.step,
        total=config.steps, mininterval=1.0, dynamic_ncols=True, disable=group.rank > 0,
    )  # fmt: skip
    for step in progress:
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(config, step)
        batches = micro_batches(config, tokens, group, step)
        specimens.before_step(step, batches)
        if step in config.weights_at and not broken:  # as there is no such step
            recorder.keep_weights(model)
        draw = functools.partial(seeds, step)
        loss = _gradients(replicas, group, batches, probe, amp, draw, scaler)
        scaler.unscale_(optimizer)
        specimens.after_gradients(step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        broken.copy_(torch.maximum(broken, (~loss.isfinite()).float()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        recorder.measured(loss, norm, probe)
        stopping = stop.is_set() and group.size == 1
        saving = config.checkpoint_every and recorder.step % config.checkpoint_every == 0
        due = recorder.step % config.probe_every == 0 or recorder.step == config.steps
        # A run whose loss is not finite has ended: what goes on from there would update again.
        if due or ((saving or stopping) and recorder.broken()):
            recorder.probe(model)
            progress.set_postfix_str(recorder.line(), refresh=False)
            if (reason := recorder.should_stop() or getattr(scaler, "ended", None)) is not None:
                break
            # Processes must agree; asking at every step would make them wait for each other.
            asked = torch.tensor(float(stop.is_set()), device=group.device)
            stopping = group.size > 1 and bool(group.sum(asked)) or stopping
        if stopping and recorder.step < config.steps:
            recorder.stopped(model, optimizer, scaler)
        if saving:
            recorder.checkpoint(model, optimizer, scaler)
    else:
        reason = "completed"
        if config.steps in config.weights_at:
            recorder.keep_weights(model)
    specimens.finish(reason)
    return model, reason


def make_optimizer(config, model):
    """AdamW in its fused form, or what `config.optimizer` says."""
    if config.optimizer != "adamw":
        return Galore(model, config)
    return torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
        weight_decay=config.weight_decay, fused=True,
    )  # fmt: skip


def loss_scaler(enabled: bool, group, optimizer, broken) -> torch.amp.GradScaler:
    """What keeps the gradients of FP16 from underflowing; where not enabled, it does nothing.

    It skips a step whose gradient is not finite, and tells the fused optimizer so in `found_inf`.
    The hook adds `broken`: a loss that is not finite ends all updates here as well.
    """
    if enabled:

        def stop_if_broken(optimizer, *_):
            optimizer.found_inf = torch.maximum(optimizer.found_inf, broken)

        optimizer.register_step_pre_hook(stop_if_broken)
    return torch.amp.GradScaler(torch.device(group.device).type, enabled=enabled)


def micro_batches(config, tokens, group, step):
    """This process's rows of the batch of a step, as pairs (inputs, targets) on its device."""
    rows = data.rank_rows(config.batch_size, group.rank, group.size)
    seed = config.seed if config.data_seed is None else config.data_seed
    batch = data.batch(tokens, step, seed, config.batch_size, config.block_size, rows)
    size = config.micro_batch or len(batch[0])
    x, y = (t.to(group.device, non_blocking=True).split(size) for t in batch)
    return list(zip(x, y, strict=True))


def draw_seed(config, group, step: int, i: int, count: int) -> int:
    """Seed of the random roundings of one micro-batch; a constant, which costs torch.compile
    nothing, where no policy draws."""
    policies = (config.policy, *config.layers.values())
    draws = any(PrecisionPolicy.parse(policy).draws for policy in policies)
    return (step * group.size + group.rank) * count + i if draws else 0


def _gradients(model, group, batches, probe, amp, seed, scaler) -> torch.Tensor:
    """Leave the gradient of the mean loss, times the scale, in the parameters; return that loss."""
    rows = sum(len(x) for x, _ in batches)
    total = torch.zeros((), device=group.device)
    for i, (x, y) in enumerate(batches):
        last = i + 1 == len(batches)
        wait = contextlib.nullcontext() if last or group.size == 1 else model.no_sync()
        with wait:
            with autocast(group.device, amp):
                loss = model(x, y, probe, seed(i, len(batches)))
            scaler.scale(loss * (len(x) / rows)).backward()
        total += loss.detach() * (len(x) / rows)
    if probe is not None and scaler.is_enabled():  # sums of delta are as large as the gradient
        probe.grad[..., :2] /= scaler.scale(torch.ones_like(total))
    return group.sum(total) / group.size
