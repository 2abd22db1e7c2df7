"""What attention costs on this GPU: time and memory of each policy beside PyTorch's own kernels.

q, k and v are strided views of one (B, T, 3 H D) tensor, and the backward ends with the gradient
of that tensor, as in a transformer. Times are medians over replays of a CUDA graph, so they hold
no launch overhead; in training the same calls are queued ahead of the GPU. A record is one JSON
file: where and with what it was made, the two ceilings of the GPU, the cases, and the sweep that
the table of hardware blocks (`lowprec.attention.kernels.launch.HARDWARE`) was chosen from.

    python -m lowprec.studies.benchmark data/benchmarks     (make gpu-check runs the tests first)

`--released FILE` also times the PyTorch attention that Qiu & Yao (2025) published: attention.py
in a clone of their repository, compiled and under autocast as their trainer runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import operator
import os
import statistics
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowprec import UserError, entry
from lowprec.attention import PROBE_COLUMNS, attention
from lowprec.records import files, provenance
from lowprec.training.probes import spectral_norms

TOKENS = 32_768
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Case:
    """One call of attention, causal, BF16. impl: triton; flash, cudnn or flex of PyTorch, the last
    FlexAttention compiled for the shape; or released."""

    impl: str = "triton"
    policy: str = "FA2"
    tile: int | None = None
    probe: bool = False
    batch: int = 32
    heads: int = 12
    seqlen: int = 1024
    head_dim: int = 64


def cases() -> list[Case]:
    """Policies at one shape, and FA2 beside PyTorch's kernels at T = 512 to 65,536: `TOKENS` at
    every T, and at the last twice as many with half of the heads."""
    policies = [
        Case(policy=p) for p in (
            "ALL_FP32", "FA2", "PAPER", "LOW", "LOW+delta_from=o_fp32", "LOW+delta_from=o_split",
            "LOW+delta_from=dp", "PAPER+shift=beta(beta=7)", "LOW+o_acc=bf16:stochastic",
            "FA2+delta_from=o_fp32", "FA2+delta_from=o_split", "FA2+delta_from=dp",
            "FA2+o=bf16:stochastic", "FA2+l_from=p_rounded", "FA2+shift=dither(amplitude=0.6931)",
            "FA2+row_sum=removed", "FA2+row_sum=refined", "FA2+p=e4m3fn@2^8+o=e4m3fn@token,pow2",
            "FA2+p=e4m3fn@2^8+p_bwd=e4m3fn@2^8+ds=e5m2@2^24",
        )
    ] + [
        Case(policy="FA2", tile=64), Case(policy="FA2", tile=128), Case(policy="PAPER", tile=128),
        Case(policy="LOW", tile=512), Case(policy="RELEASED", tile=512),
        Case(policy="FA2", probe=True), Case(policy="LOW", probe=True),
    ]  # fmt: skip
    shapes = [
        dict(batch=TOKENS // n or 1, seqlen=n, heads=h if n <= TOKENS else h // 2, head_dim=d)
        for h, d in ((12, 64), (6, 128))
        for n in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    ]
    kernels = (("triton", None), ("triton", 64), ("flash", None), ("cudnn", None), ("flex", None))
    lengths = [Case(impl=impl, tile=tile, **shape) for shape in shapes for impl, tile in kernels]
    return list(dict.fromkeys(policies + lengths))


@functools.lru_cache
def flex(seqlen: int, device: str = "cuda"):
    """Causal FlexAttention, compiled, for q, k, v of that length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, q, k):
        return q >= k

    mask = create_block_mask(causal, None, None, seqlen, seqlen, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


class Inputs:
    """Tensors of a case, and its two halves as functions without arguments."""

    def __init__(self, case: Case, released=None):
        shape = (case.batch, case.seqlen, case.heads, case.head_dim)
        g = torch.Generator("cuda").manual_seed(0)
        width = case.heads * case.head_dim
        self.fused = torch.randn(
            *shape[:2], 3 * width, generator=g, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        self.q, self.k, self.v = (x.view(shape).transpose(1, 2) for x in self.fused.split(width, 2))
        self.do = torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)
        self.do = self.do.transpose(1, 2)
        probe = torch.zeros(case.heads, len(PROBE_COLUMNS), device="cuda", requires_grad=True)
        self.probe = probe if case.probe else None
        self.case, self.released = case, released

    def forward(self):
        case, inputs = self.case, (self.q, self.k, self.v)
        if self.released is not None:
            return self.released(*inputs)
        if case.impl in SDPA:
            with sdpa_kernel(SDPA[case.impl]):
                return scaled_dot_product_attention(*inputs, is_causal=True)
        if case.impl == "flex":
            return flex(case.seqlen)(*inputs)
        return attention(*inputs, case.policy, tile=case.tile, probe=self.probe, impl=case.impl)

    def backward(self, o):
        leaves = [x for x in (self.fused, self.probe) if x is not None]
        return torch.autograd.grad(o, leaves, self.do, retain_graph=True)


def milliseconds(stream, call, calls: int = 8, replays: int = 9) -> dict[str, float]:
    """Median, least and most GPU time of one call, over replays of a graph of several calls."""
    for _ in range(3):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        graph.replay()
        end.record(stream)
        stream.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return dict(ms=statistics.median(times), least=min(times), most=max(times))


def _kept():
    """The backward is run many times on one forward, so it must not reuse its inputs' memory."""
    return torch._functorch.config.patch(donated_buffer=False)


def measure(case: Case, released=None) -> dict:
    """The case with its times in milliseconds and the memory that forward and backward add."""
    stream = torch.cuda.Stream()  # a graph cannot hold the default stream's work
    torch.compiler.reset()  # it compiles a function 8 times, and then no more
    with torch.cuda.stream(stream), _kept():
        x = Inputs(case, released)
        x.backward(x.forward())  # compiles, and lets libraries take their workspaces
        stream.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = x.forward()
        x.backward(o)
        stream.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        calls = 8 if case.seqlen < TOKENS else 2
        with torch.no_grad():
            forward = milliseconds(stream, x.forward, calls)
        backward = milliseconds(stream, lambda: x.backward(o), calls)
    row = dataclasses.asdict(case) | {"peak_mib": peak / 2**20}
    for half, times in (("forward", forward), ("backward", backward)):
        row |= {f"{half}_{name}": value for name, value in times.items()}
    return row


TRAINED = (
    ("FA2", "triton"), ("FA2", "sdpa"),
    *((f"FA2+{change}", "triton") for change in (
        "delta_from=o_fp32", "delta_from=o_split", "delta_from=dp", "l_from=p_rounded",
        "o=bf16:stochastic", "row_sum=removed", "row_sum=refined",
    )),
)  # fmt: skip


def training_step(policy: str, impl: str = "triton", steps: int = 100, device: str = "cuda",
                  probed: bool = False, **sizes) -> dict:  # fmt: skip
    """Tokens per second and peak memory in MiB of GPT-2's training step.

    probed: with what a run records in each step, and the spectral norms every `probe_every` steps.
    The step of `lowprec.training.loop`: compiled but for attention, BF16 autocast over FP32
    weights, AdamW, deterministic algorithms. Random tokens, 32 sequences. sizes: of `GPTConfig`.
    Source of the sizes left out: the preset gpt2.
    """
    from lowprec.training import loop as train
    from lowprec.training.config import PRESETS
    from lowprec.training.model import GPT

    config = dataclasses.replace(PRESETS["gpt2"], policy=policy, impl=impl, **sizes)
    torch.manual_seed(config.seed)
    model = GPT(config.model()).to(device)
    if device == "cuda":
        torch.compiler.reset()  # it compiles a function 8 times, and then no more
        model.loss = torch.compile(model.loss)
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (config.batch_size, config.block_size)
    batches = [(torch.randint(50257, shape, device=device),) * 2]
    scaler = torch.amp.GradScaler(device, enabled=False)  # BF16 needs no loss scale
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    probe, sums = model.new_probe() if probed else None, []

    def step():
        group, draw = train.Group(device), lambda i, count: 0
        train._gradients(model, group, batches, probe, True, draw, scaler)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if probed:
            sums.append(probe.grad)
            probe.grad = None

    def look():
        torch.stack(sums).cpu()
        sums.clear()
        for which in "qk":
            spectral_norms(model.head_weights(which)).cpu()

    with train.deterministic():
        for _ in range(5):
            step()
        if probed:
            look()
        wait()
        start = time.perf_counter()
        for i in range(steps):
            step()
            if probed and (i + 1) % config.probe_every == 0:
                look()
        wait()
    rate = steps * shape[0] * shape[1] / (time.perf_counter() - start)
    row = dict(policy=policy, impl=impl, tokens_per_second=rate)
    if device == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def load_released(path: Path):
    """attention(q, k, v) of the published attention.py: compiled, under BF16 autocast, in blocks of
    512 queries and keys. The code is run from there and is no part of this package."""
    spec = importlib.util.spec_from_file_location("released_attention", path)
    if spec is None or not path.is_file():
        raise UserError(f"there is no {path}; name attention.py in a clone of the repository")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # compile looks there
    spec.loader.exec_module(module)

    @torch.compile
    def released(q, k, v):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return module.FlashAttentionFunction.apply(q, k, v, None, True, 512, 512)

    return released


def ceilings() -> dict[str, float]:
    """BF16 matrix rate in TFLOP/s on random data, and copy bandwidth in TB/s, read and written."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        n = 8192
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product = milliseconds(stream, lambda: a @ b)["least"]
        source = torch.randn(2**30, device="cuda")
        target = torch.empty_like(source)
        copy = milliseconds(stream, lambda: torch.neg(source, out=target))["least"]
    return dict(tflops=2 * n**3 / product / 1e9, tbps=2 * source.nbytes / copy / 1e9)


def floors(case: dict, ceilings: dict) -> dict[str, float]:
    """Least milliseconds of forward and backward: operations over the matrix rate, bytes over the
    bandwidth, for causal attention that reads its inputs and writes its outputs once."""
    elements = case["batch"] * case["heads"] * case["seqlen"] * case["head_dim"]
    product = elements * case["seqlen"] / ceilings["tflops"] / 1e9  # one matmul of 2 T^2 D / 2 each
    rows = elements * 2 / ceilings["tbps"] / 1e9  # one BF16 tensor
    return dict(
        forward_operations=2 * product, forward_bytes=4 * rows,
        backward_operations=5 * product, backward_bytes=8 * rows,
    )  # fmt: skip


BLOCKS = {
    "forward": [(64, 64, 4, 2, 128), (64, 64, 4, 3, None), (64, 64, 4, 3, 128), (64, 64, 4, 3, 160),
                (64, 32, 4, 3, 96), (64, 128, 4, 2, None), (128, 64, 4, 3, None),
                (128, 64, 8, 3, None), (128, 128, 8, 2, None), (128, 32, 4, 4, None)],
    "dq": [(64, 64, 4, 2, None), (64, 64, 4, 2, 128), (64, 64, 4, 3, None), (64, 32, 4, 3, 96),
           (64, 32, 4, 4, None), (128, 64, 4, 3, None), (128, 64, 8, 3, None)],
    "dkdv": [(32, 64, 4, 4, None), (32, 64, 4, 4, 128), (32, 64, 4, 3, 128), (64, 64, 4, 2, None),
             (64, 64, 4, 3, None), (64, 128, 8, 2, None), (32, 128, 8, 3, None)],
}  # fmt: skip
WIDE = {
    "forward": [(64, 64, 4, 2, None), (64, 64, 8, 2, None), (64, 32, 4, 3, None),
                (128, 64, 8, 2, None), (128, 32, 8, 3, None)],
    "dq": [(64, 32, 8, 2, None), (64, 64, 8, 2, None), (64, 32, 8, 3, None), (64, 32, 4, 2, None)],
    "dkdv": [(32, 64, 8, 2, None), (16, 64, 8, 3, None), (32, 64, 8, 1, None),
             (64, 64, 8, 2, None), (16, 64, 4, 2, None)],
}  # fmt: skip
"""For heads of 256."""
RELEASED = Case(policy="RELEASED", tile=512)
PUBLISHED = Case(impl="released", policy="RELEASED", tile=512)
SWEPT = [(kernel, case) for kernel in BLOCKS
         for case in (Case(), Case(policy="LOW"), Case(heads=6, head_dim=128))]  # fmt: skip
SWEPT += [(f"{kernel} tiled", RELEASED) for kernel in BLOCKS]
SWEPT += [(kernel, Case(policy="SAFE", heads=3, head_dim=256)) for kernel in WIDE]


@contextlib.contextmanager
def hardware_blocks(kernel: str, head_dim: int, block: tuple):
    """One entry of the table replaced."""
    from lowprec.attention.kernels import launch

    table = launch.HARDWARE["sm_90"]
    entry = table[min(size for size in table if head_dim <= size)]
    kept = entry[kernel]
    entry[kernel] = block
    try:
        yield
    finally:
        entry[kernel] = kept


def sweep_one(kernel: str, case: Case, block: tuple) -> dict:
    """Milliseconds of the half that the kernel belongs to, with these hardware blocks; None if
    the GPU has not enough shared memory for them."""
    from triton.runtime.errors import OutOfResources

    half = "forward" if kernel.startswith("forward") else "backward"
    try:
        with hardware_blocks(kernel, case.head_dim, block):
            ms = measure(case)[f"{half}_ms"]
    except OutOfResources:
        ms = None
    names = ("BM", "BN", "warps", "stages", "registers")
    return dict(kernel=kernel, policy=case.policy, head_dim=case.head_dim, half=half, ms=ms,
                **dict(zip(names, block, strict=True)))  # fmt: skip


def _compile(job) -> None:
    """Fill the caches of Triton and of the compiler; what does not fit shows when it is timed."""
    kernel, case, block = job
    small = case if case.impl == "flex" else dataclasses.replace(case, batch=1)
    with contextlib.suppress(Exception), _kept():
        with hardware_blocks(kernel, case.head_dim, block) if block else contextlib.nullcontext():
            x = Inputs(small)
            x.backward(x.forward())


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise UserError("the benchmark needs an NVIDIA GPU and there is none")


def count_tests(junit: Path) -> dict[str, int]:
    """Tests, failures, errors and skipped ones of a junit file, all suites together."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    return {name: sum(int(suite.get(name)) for suite in suites) for name in names}


def record(tests: Path | None = None, sweep: bool = True, released: Path | None = None) -> dict:
    """Measure everything. tests: the junit file of the GPU tests, summed up in the record.
    released: the published attention.py."""
    need_gpu()
    plan = [(None, case, None) for case in cases()]
    if sweep:
        plan += [
            (kernel, case, block)
            for kernel, case in SWEPT
            for block in (BLOCKS if case.head_dim <= 128 else WIDE)[kernel.split()[0]]
        ]
    processes = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, [job for job in plan if job[1].impl not in SDPA]))
    out = dict(date=datetime.date.today().isoformat(), **provenance.provenance("cuda"))
    if tests is not None:
        out["gpu_tests"] = count_tests(tests)
    out["ceilings"] = ceilings()
    out["cases"] = [measure(case) for _, case, block in plan if block is None]
    if released is not None:
        out["cases"].append(measure(PUBLISHED, load_released(released)))
        out["released_sha256"] = hashlib.sha256(released.read_bytes()).hexdigest()
    out["training"] = [training_step(*case) for case in TRAINED]
    out["training_probed"] = training_step("FA2", probed=True)
    out["sweep"] = [sweep_one(*job) for job in plan if job[2] is not None]
    return out


def recorded() -> dict[str, dict]:
    """The records of data/benchmarks by name. A name begins with the date, so the last is the
    newest; records of one day have no other order than that of their names."""
    paths = sorted((files.data_root() / "benchmarks").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def newest_with(*policies: str) -> dict:
    """The newest record that timed a training step of all these policies; {} if none did."""
    for found in reversed(recorded().values()):
        if set(policies) <= {step["policy"] for step in found.get("training", [])}:
            return found
    return {}


def relative(record: dict, policy: str, base: str = "FA2") -> dict[str, float]:
    """What a policy takes over what `base` takes, of our kernels, as far as a record has it.

    time, memory: of attention, forward and backward, at the sizes of `Case`. step speed, step
    memory: tokens per second and peak memory of a training step.
    """
    cases, steps = ({p: _row(record, kind, p) for p in (policy, base)}
                    for kind in ("cases", "training"))  # fmt: skip
    found = {}
    if all(cases.values()):
        times = (sum(cases[p][f"{half}_ms"] for half in ("forward", "backward"))
                 for p in (policy, base))  # fmt: skip
        found["time"] = operator.truediv(*times)
        found["memory"] = cases[policy]["peak_mib"] / cases[base]["peak_mib"]
    if all(steps.values()):
        for name, key in (("step speed", "tokens_per_second"), ("step memory", "peak_mib")):
            found[name] = steps[policy][key] / steps[base][key]
    return found


def time_ratio(record: dict, policy: str, base: str) -> tuple[float, tuple[float, float]]:
    """Time of attention under a policy over that under `base`, forward and backward, at the sizes
    of `Case`: the ratio of medians, and its range over all replays."""
    mine, theirs = (
        [row[f"forward_{x}"] + row[f"backward_{x}"] for x in ("ms", "least", "most")]
        for row in (_row(record, "cases", p) for p in (policy, base))
    )
    return mine[0] / theirs[0], (mine[1] / theirs[2], mine[2] / theirs[1])


def _row(record: dict, kind: str, policy: str) -> dict | None:
    """The case of a policy, all else as in `Case`, or its training step; None without it."""
    wanted = dict(policy=policy, impl="triton")
    if kind == "cases":
        wanted = dataclasses.asdict(Case(policy=policy))
    return next((row for row in record.get(kind, []) if wanted.items() <= row.items()), None)


def new_path(folder: Path) -> Path:
    """Where today's record of this GPU goes; `UserError` if there is one already."""
    need_gpu()
    gpu = provenance.provenance("cuda")["hardware"].lower().replace(" ", "-")
    path = folder / f"{datetime.date.today().isoformat()}-{gpu}.json"
    if path.exists():
        raise UserError(f"{path} exists and is never overwritten; rename it or take another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.benchmark", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where the dated record goes")
    parser.add_argument("--tests", type=Path, help="junit file of the GPU tests")
    parser.add_argument("--released", type=Path, help="attention.py of the published code")
    parser.add_argument("--no-sweep", action="store_true", help="leave out the hardware blocks")
    args = parser.parse_args()
    path = new_path(args.folder)
    result = record(args.tests, not args.no_sweep, args.released)
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    for row in result["cases"]:
        name = " ".join(str(row[k]) for k in ("impl", "policy", "tile", "seqlen", "head_dim"))
        print(f"{name:60} {row['forward_ms']:.3f} {row['backward_ms']:.3f} ms")
    print(path)


if __name__ == "__main__":
    entry(main)
