"""What every kernel is made of: rounding sites bit by bit, split products, and native code.

The compiled code is looked at on a machine without a GPU: the very arguments of a launch go to the
compiler for Hopper, in a process that does not interpret.
"""

import ast
import inspect
import itertools
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from conftest import family
from kernel_checks import DEVICES, inputs_on, run
from machine_code import overwritten

from lowprec.attention import attention
from lowprec.attention.kernels import launch, rounding, views
from lowprec.attention.kernels.rounding import dot, round_rows, round_site, site_code
from lowprec.numerics.agreement import sum_noise
from lowprec.numerics.formats import ROUNDINGS, Format, keyed_bits, round_to
from lowprec.numerics.policy import CHOICES, LOW, SITES, PrecisionPolicy, Site
from lowprec.numerics.scaling import stored

# NumPy, which is behind the interpreter, remarks on every infinity and NaN that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMATS = (
    "bf16", "fp16", "e8m1", "e8m4", "e8m10", "e8m22", "e4m3fn", "e4m3fn_saturate", "e5m2",
    "e5m2_nan", "e2m1", "e7m7",
)  # fmt: skip
COLUMNS = 256


@triton.jit
def round_kernel(
    p_x, p_y, n, seed, batch, head,
    CODE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """y = x (n,) as the site stores it; x is row after row of COLUMNS elements."""
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x, mask=o_x < n)
    who = (seed, tl.cast(batch, tl.int64), tl.cast(head, tl.int64))
    b_y = round_site(b_x, CODE, who, o_x // COLUMNS, o_x % COLUMNS, NATIVE)
    tl.store(p_y + o_x, b_y, mask=o_x < n)


def bit_patterns(fmt):
    """float32: random bits, subnormals of both formats, the ends of the range, and for numbers of
    the format the halfway points with their neighbours."""
    g = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (1 << 12,), generator=g).int().view(torch.float32)
    near = random.sign() * random.abs().clamp(2.0**-30, 2.0**17)  # the range of FP16
    small = torch.randint(0, 2**24, (1 << 11,), generator=g).int().view(torch.float32)
    subnormal = torch.rand(1 << 11, generator=g) * 4 * fmt.min_normal
    ends = torch.tensor(
        [0.0, 1.0, 2.0**-126, 2.0**-149, 3e38, 3.4028235e38, 65504, 65519.99, 65520]
    )
    ends = torch.cat(
        [ends, torch.tensor([2.0**-24, 2.0**-25, 2.0**-14, 65536, torch.inf, torch.nan])]
    )
    start = torch.cat([random, near, small, subnormal, ends])
    down = round_to(start, fmt, "toward_zero").double()
    nudged = start.abs().double() + (0.75 * 2.0**-fmt.significand_bits * start.abs()).double()
    up = round_to(nudged.float(), fmt, "nearest_away").double().abs().copysign(down)
    middle = ((down + up) / 2).float()
    bits = middle.view(torch.int32)
    beside = [(bits + step).view(torch.float32) for step in (-1, 1)]
    x = torch.cat([start, down.float(), middle, *beside])
    return torch.cat([x, -x])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_sites_round_as_formats_do(device, fmt, rounding):
    """Bit by bit, the sign of zero included; a NaN is a NaN. Stochastic words are `keyed_bits`."""
    site = SITES[FORMATS.index(fmt)]
    code = site_code(PrecisionPolicy(**{site: f"{fmt}:{rounding}"}), site)
    x = bit_patterns(Format.parse(fmt))
    seed, batch, head = 12345, 3, 70_001
    at = torch.arange(len(x))
    words = keyed_bits(seed, SITES.index(site), batch, head, at // COLUMNS, at % COLUMNS)
    wanted = round_to(x, fmt, rounding, bits=words if rounding == "stochastic" else None)
    x, got = x.to(device), torch.full_like(x, 7.0, device=device)
    grid = (triton.cdiv(len(x), 4096),)
    native = launch.NATIVE
    round_kernel[grid](x, got, len(x), seed, batch, head, code, COLUMNS, 4096, native)
    got = got.cpu()
    same = (got.view(torch.int32) == wanted.view(torch.int32)) | (got.isnan() & wanted.isnan())
    bad = (~same).nonzero().flatten()[:5]
    assert same.all(), [(x[i].item(), got[i].item(), wanted[i].item()) for i in bad]


@triton.jit
def row_kernel(p_x, p_y, CODE: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """y = x (ROWS, 256) with a scale a row, as the site stores it."""
    o_row, o_col = tl.arange(0, ROWS)[:, None], tl.arange(0, 256)[None, :]
    b_x = tl.load(p_x + o_row * 256 + o_col)
    who = (12345, tl.cast(3, tl.int64), tl.cast(70_001, tl.int64))
    tl.store(p_y + o_row * 256 + o_col, round_rows(b_x, CODE, who, o_row, o_col, NATIVE))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1", "fp16"])
def test_rows_with_a_scale_of_their_own_round_as_casts_do(device, fmt, rounding):
    """Rows of all sizes, of zeros, of subnormals, with an infinity or a NaN, and those whose
    largest number is the format's times a power of two, or its neighbour."""
    site = Site.parse(f"{fmt}:{rounding}@token,pow2")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=g) * 2.0 ** torch.arange(-140, 116, 4)[:, None]
    x[0], x[1, 3], x[2, 5] = 0.0, torch.inf, torch.nan
    largest = torch.tensor([site.fmt.max]) * 2.0 ** torch.arange(-8, 8)
    steps = torch.tensor([-1, 0, 1], dtype=torch.int32)[:, None]
    x[8:56, 7] = (largest.view(torch.int32) + steps).view(torch.float32).flatten()
    x[8:56] = x[8:56].clamp(-x[8:56, 7:8], x[8:56, 7:8])
    words = keyed_bits(12345, SITES.index("o"), 3, 70_001, *torch.meshgrid(
        torch.arange(64), torch.arange(256), indexing="ij"))  # fmt: skip
    wanted = stored(x, site, words if rounding == "stochastic" else None)
    code = site_code(PrecisionPolicy(o=site), "o")
    x, got = x.to(device), torch.full_like(x, 7.0, device=device)
    row_kernel[(1,)](x, got, code, 64, launch.NATIVE)
    got = got.cpu()
    same = (got.view(torch.int32) == wanted.view(torch.int32)) | (got.isnan() & wanted.isnan())
    assert same.all() and wanted[3:].isfinite().all() and wanted[1:3].isnan().all()


def test_bit_patterns_hold_the_hard_cases():
    """Halfway points, subnormals, overflow, infinities and NaN are there, for every format."""
    for fmt in map(Format.parse, FORMATS):
        x = bit_patterns(fmt)
        even, away = (round_to(x, fmt, mode).double() for mode in ("nearest_even", "nearest_away"))
        assert (even != away).sum() > 1000, fmt.name  # these only differ halfway
        assert ((x.abs() < fmt.min_normal) & (x != 0)).sum() > 1000, fmt.name
        lost = x.isfinite() & (x.abs() > fmt.max) & ~(even.abs() < fmt.max)
        assert x.isnan().any() and x.isinf().any() and lost.any(), fmt.name


@triton.jit
def dot_kernel(p_a, p_b, p_c, PIECES: tl.constexpr, N: tl.constexpr):
    o_row, o_col = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    b_a, b_b = tl.load(p_a + o_row * N + o_col), tl.load(p_b + o_row * N + o_col)
    b_c = dot(b_a, b_b, tl.zeros([N, N], tl.float32), PIECES, True)
    tl.store(p_c + o_row * N + o_col, b_c)


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("a", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("b", ["float32", "float16", "bfloat16"])
def test_products_of_pieces(pieces, a, b):
    """The accuracy that `dot` states for each operand, over what FP32 sums lose anyway."""
    n = 64
    g = torch.Generator("cuda").manual_seed(0)
    types = [getattr(torch, x) for x in (a, b)]
    x, y = (torch.randn(n, n, generator=g, device="cuda").to(t) for t in types)
    c = torch.empty(n, n, device="cuda")
    dot_kernel[(1,)](x, y, c, pieces, n)
    x, y = x.double(), y.double()
    lost = sum(2.0**-17 if pieces == 2 else 2.0**-24 for t in types if t == torch.float32)
    left_out = 2.0**-24 * 3  # three products of pieces at most
    bound = (lost + left_out + sum_noise(n)) * (x.abs() @ y.abs())
    assert ((c.double() - x @ y).abs() <= bound).all()


COMPILE = """
import json, re, subprocess, sys, tempfile, torch, triton
from triton.backends.compiler import GPUTarget
from lowprec.attention.kernels import launch, rounding
from lowprec.attention.masks import Mask
from lowprec.numerics.policy import PrecisionPolicy

class Target:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", job["architecture"], 32)

class Compiled:
    "Compiles a kernel for the arguments of its launch, and does not launch it."
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, **how):
            made = self.kernel.warmup(*args, grid=grid, **how)
            asm = dict(made.asm)
            with tempfile.NamedTemporaryFile() as file:
                file.write(asm["cubin"])
                file.flush()
                def dumped(what):
                    command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
                    return subprocess.run(command, capture_output=True, text=True).stdout
                asm["sass"] = dumped("-sass")  # the one that is there ends after 64 KiB
                stack, local = re.findall(r"\\b(?:STACK|LOCAL):(\\d+)", dumped("-res-usage"))
            row = dict(kernel=self.kernel.__name__, shared=made.metadata.shared)
            row["spilled"] = int(stack) + int(local)
            row["overwritten"] = overwritten(asm["sass"])
            for language, patterns in job["count"].items():
                row |= {k: len(re.findall(p, asm[language])) for k, p in patterns.items()}
            rows.append(row)
        return launch

job, rows = json.load(sys.stdin), []
sys.path.append(job["tests"])
from machine_code import overwritten
launch.hopper = lambda: job["architecture"] == 90
triton.runtime.driver.set_active(Target())
launch.check_tensors = lambda *_: None  # the tensors are on the CPU
for module in (launch.fwd, launch.bwd, launch.views):
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        setattr(module, name, Compiled(getattr(module, name)))
p = PrecisionPolicy.parse(job["policy"])
tile, scale, probe = (job[name] for name in ("tile", "scale", "probe"))
q = torch.zeros(2, 3, job["n"], job["head_dim"], dtype=getattr(torch, job["dtype"]))
k = q[:, : job["heads"]]
parts = dict(causal=True)
if job["mask"] == "window":  # behind a cache, with padding
    k = torch.cat([k, k], 2)
    parts |= dict(offset=job["n"], window=128, keys=torch.tensor([[0, 99], [5, 200]]))
elif job["mask"] in ("dense", "dense in ranges"):
    parts = dict(dense=torch.ones(2, 1, job["n"], job["n"], dtype=torch.bool))
    if job["mask"] == "dense in ranges":
        parts |= dict(keys=torch.tensor([[0, job["n"] - 10], [10, job["n"]]]))
bias = torch.zeros(1, 3, 1, job["n"], dtype=q.dtype) if job["mask"] == "bias" else None
how = dict(mask=Mask(**parts), bias=bias)
out = launch.forward(q, k, k, p, True, scale, tile, 0, True, True, probe, **how)
launch.backward(q, q, k, k, *out[1:], p, True, scale, tile, 0, probe, **how)
print(json.dumps(rows))
"""
COUNT = {
    "ptx": {
        "sm_90": r"\.target sm_90a",
        "wgmma": r"wgmma\.mma_async",
        "tf32": r"tf32",
        "fma": r"\bfma\.rn\.f32",  # log's own polynomial is fma.rn.ftz
        "may fuse": r"\b(?:add|sub|mul)\.f32",  # .rn forbids the assembler to fuse them
        "exp2": r"\bex2\.approx",
    },
    "sass": {"HGMMA": r"\bHGMMA\.", "HMMA": r"\bHMMA\.", "FFMA": r"\bFFMA\b"},
}
PRESETS = [
    ("ALL_FP32", None), ("FA2", None), ("PAPER", None), ("LOW", None), ("RELEASED", 512),
    ("PAPER+shift=beta(beta=7)", None), ("LOW+shift=mute(amplitude=23.7)+l_floor=1e-10", None),
    *((f"LOW+delta_from={source}", None) for source in CHOICES["delta_from"][1:]),
    ("FA2+delta_from=o_fp32+delta_bias=0.02", None), ("RELEASED+delta_from=o_fp32", 512),
    *((f"FA2+row_sum={x}", None) for x in ("removed", "refined")), ("FA2+shift=pow2", None),
    *(("FA2+l_from=p_both", tile) for tile in (None, 128)), ("RELEASED+l_from=p_both", 512),
    *((f"RELEASED+row_sum={x}", 512) for x in ("removed", "refined")),
    *((f"FA2+p=e4m3fn@2^8+o=e4m3fn@token,pow2{rest}", None)
      for rest in ("", "+row_sum=refined", "+delta_from=o_prime", "+ds=e5m2+p_bwd=e4m3fn@2^8")),
]  # fmt: skip
NATIVE = [
    pytest.param("FA2", None, 64, dict(probe=False), id="FA2-64-without-probe"),
    *(
        pytest.param(policy, tile, d, {}, id=f"{policy}-{d}", marks=pytest.mark.slow)
        for policy, tile in PRESETS
        for d in (64, 128)
    ),
    pytest.param("SAFE", None, 256, dict(probe=False), id="SAFE-256", marks=pytest.mark.slow),
    *(
        pytest.param(policy, tile, 64, how, id=f"{policy}-{tile}-{how}", marks=pytest.mark.slow)
        for policy, tile, how in [
            ("SAFE", None, dict(probe=False, heads=1)),
            ("ALL_FP32", None, dict(n=200, dtype="float32")),
            ("ALL_FP32+row_sum=removed", None, dict(n=200, dtype="float32")),
            ("ALL_FP32+row_sum=refined", None, dict(n=200, dtype="float32")),
            ("FA2+ds=fp16+row_sum=removed", None, dict(dtype="float16")),
            ("FA2+ds=fp16+row_sum=refined", None, dict(dtype="float16")),
            ("ALL_FP32+p=e8m6+row_sum=refined", None, {}),
            ("LOW", 128, dict(dtype="float16")),
            ("RELEASED", 64, dict(n=200)),
            ("LOW", None, dict(scale=0.1)),
            ("FA2+row_sum=removed", None, dict(heads=1)),
            ("FA2+row_sum=refined", None, dict(heads=1)),
            ("RELEASED", None, dict(heads=1)),
            ("RELEASED", 512, dict(heads=1)),
            ("LOW+s=bf16:stochastic+p=fp16:stochastic+shift=dither(amplitude=1)", 64, {}),
        ]
    ),
]


def compiled(policy, tile, d, cache, **how):
    """(job, a row a kernel) of the kernels of a launch, none of which overwrites a register that
    an instruction is still to read."""
    job = dict(n=1024, head_dim=d, scale=d**-0.5, dtype="bfloat16", probe=True, heads=3, mask=None,
               architecture=90)  # fmt: skip
    job |= dict(policy=policy, tile=tile, count=COUNT, tests=str(Path(__file__).parent)) | how
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], input=json.dumps(job),
        text=True, capture_output=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert not any(row["overwritten"] for row in rows), rows
    return job, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy,tile,mask",
    [
        ("SAFE", None, "window"), ("LOW", 64, "window"), ("SAFE", None, "dense"),
        ("SAFE", 128, "dense"), ("SAFE", None, "bias"), ("RELEASED", 512, "bias"),
    ],
)  # fmt: skip
def test_masks_compile_to_sm_90(policy, tile, mask, tmp_path):
    _, rows = compiled(policy, tile, 64, tmp_path, mask=mask, probe=False)
    of_mask = [row for row in rows if row["kernel"] == "blocks_seen_kernel"]
    assert len(of_mask) == (3 if mask == "dense" else 0)
    rows = [row for row in rows if row not in of_mask]
    assert len(rows) == 3
    for row in rows:
        assert row["sm_90"] == 1 and row["HGMMA"] == row["wgmma"] > 0 and row["tf32"] == 0, row
        assert row["may fuse"] == 0, row


@pytest.mark.parametrize("policy,tile,d,how", NATIVE)
def test_compiles_to_sm_90(policy, tile, d, how, tmp_path):
    """Matmuls are the tensor cores', none in TF32. No product and sum are fused but those that the
    source names: one for each probability whose score is FP32 or scaled by a power of two. The
    forward's machine code has more, inside division and log. Row sums of ds are products of eight
    columns, for which wgmma is too wide."""
    job, rows = compiled(policy, tile, d, tmp_path, **how)
    policy = str(PrecisionPolicy.parse(policy))
    summed = "row_sum=" in policy
    assert len(rows) == 3 + ("row_sum=removed" in policy)
    fused = job["scale"] == 0.125 or PrecisionPolicy.parse(policy).s.is_fp32
    for row in rows:
        kernel = row["kernel"].removeprefix("attention_")
        assert row["sm_90"] == 1 and (row["wgmma"] > 0) == (kernel != "bwd_mean_key_kernel"), row
        assert row["HGMMA"] == row["wgmma"] and row["tf32"] == 0, row
        assert (row["HMMA"] > 0) == (summed and kernel == "bwd_dq_kernel"), row
        assert row["may fuse"] == 0, row
        if (
            kernel == "fwd_kernel" and "shift=pow2" in policy
        ):  # a product's whole part, and its fraction
            assert row["fma"] == 2 * row["exp2"], row
        elif kernel == "fwd_kernel":  # a thread rescales two rows, in one or two loops
            assert row["exp2"] - row["fma"] in (2, 4) if fused else row["fma"] == 0, row
        else:
            assert row["FFMA"] == row["fma"] == fused * row["exp2"], row


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    "architecture,kib", [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)]
)
def test_a_block_fits_into_the_shared_memory(architecture, kib, d, dtype, tmp_path):
    """kib: the most that one block may have, by the CUDA programming guide's table."""
    how = dict(probe=False, architecture=architecture, dtype=dtype)
    _, rows = compiled("SAFE", None, d, tmp_path, **how)
    assert len(rows) == 3 and max(row["shared"] for row in rows) <= kib * 1024, rows


HOW = {"plain": {}, "shared keys": dict(heads=1), "dense mask": dict(mask="dense"),
       "float32": dict(dtype="float32")}  # fmt: skip
SPILLS = {
    # architecture, head_dim, policy: bytes with each HOW
    (90, 64, "FA2"): (16, 24, 104), (90, 64, "SAFE"): (16, 24, 104),
    (90, 64, "LOW"): (32, 32, 168), (90, 64, "ALL_FP32"): (40, 80, 152, 0),
    (90, 128, "FA2"): (0, 344, 32), (90, 128, "SAFE"): (40, 344, 400),
    (90, 128, "LOW"): (0, 352, 40), (90, 128, "ALL_FP32"): (0, 392, 32, 976),
    (90, 256, "FA2"): (448, 536, 696), (90, 256, "SAFE"): (448, 536, 696),
    (90, 256, "LOW"): (520, 544, 736), (90, 256, "ALL_FP32"): (952, 1776, 904, 8448),
    (80, 128, "ALL_FP32"): (0, 0, 0, 280), (80, 256, "ALL_FP32"): (0, 0, 0, 312),
    (86, 128, "ALL_FP32"): (0, 0, 0, 216), (86, 256, "ALL_FP32"): (0, 0, 0, 248),
    (89, 128, "ALL_FP32"): (0, 0, 0, 216), (89, 256, "ALL_FP32"): (0, 0, 0, 248),
    (100, 128, "ALL_FP32"): (0, 0, 0, 152), (100, 256, "ALL_FP32"): (0, 0, 0, 256),
    (120, 128, "ALL_FP32"): (0, 0, 0, 96), (120, 256, "ALL_FP32"): (0, 0, 0, 328),
}  # fmt: skip
"""Bytes a thread of the kernel that spills most. sm_90's blocks were chosen by time; elsewhere only
float32 inputs spill, with heads above 64."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture,d,policy,how",
    [
        case
        for case in itertools.product(
            (80, 86, 89, 90, 100, 120), (64, 128, 256), ("FA2", "SAFE", "LOW", "ALL_FP32"), HOW
        )
        if "ALL_FP32" in case or "float32" not in case
    ],
)
def test_no_kernel_spills(architecture, d, policy, how, tmp_path):
    """No local memory (STACK and LOCAL of cuobjdump -res-usage), to which a register goes that does
    not fit. What is in `SPILLS` spills no more than is said there, and an entry that does not spill
    has to go. Float32 inputs with heads of 128 and 256 spill on every architecture, and sm_90's
    table with most calls."""
    bytes_of = dict(zip(HOW, SPILLS.get((architecture, d, policy), ()), strict=False))
    job = dict(probe=False, architecture=architecture, count={}) | HOW[how]
    _, rows = compiled(policy, None, d, tmp_path, **job)
    most, known = max(row["spilled"] for row in rows), bytes_of.get(how, 0)
    assert len(rows) >= 3 and min(known, 1) <= most <= known, rows


TOO_EARLY = """
        /*71a0*/                   STL [R1+0x2f4], R7 ;            /* 0x0002f40701007387 */
                                                                   /* 0x0003e20000100800 */
        /*72a0*/                   FADD R7, -R7, -INF  ;           /* 0xff80000007077421 */
                                                                   /* 0x000fe20000000100 */
"""
"""A store says on barrier 1 that it has read R7, and nobody waits: of a kernel that ptxas made."""


def test_a_register_overwritten_before_a_store_reads_it_is_found():
    assert overwritten(TOO_EARLY) == [("71a0 STL [R1+0x2f4], R7", "72a0 FADD R7, -R7, -INF")]
    waits = TOO_EARLY.replace("0x000fe20000000100", "0x002fe20000000100")  # for barrier 1
    in_order = TOO_EARLY.replace("FADD R7, -R7, -INF ", "LDS R7, [R8]")
    other = TOO_EARLY.replace("FADD R7", "FADD R6")
    assert overwritten(waits) == overwritten(in_order) == overwritten(other) == []


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["dense", "dense in ranges"])
@pytest.mark.parametrize("d", [16, 32, 64])
def test_the_forward_with_everything_measured_spills_nothing(d, mask, tmp_path):
    """Under a dense mask with small heads. With 128 registers a thread it spilled up to 1,192
    bytes, and with a range of keys besides, ptxas 12.8.93 let the register of a spilled maximum be
    overwritten before its store had read it: L became -inf."""
    _, rows = compiled("SAFE", None, d, tmp_path, mask=mask, n=50, count={})
    assert [row["spilled"] for row in rows if "fwd" in row["kernel"]] == [0], rows


@pytest.mark.parametrize(
    "architecture,d", [(name, d) for name, table in launch.HARDWARE.items() for d in table]
)
def test_every_entry_of_the_block_table_is_used(architecture, d, monkeypatch):
    """An entry "kernel tile", "kernel tiled" or "kernel kind" is what that kernel takes for it."""
    monkeypatch.setattr(launch, "NATIVE", True)
    monkeypatch.setattr(launch, "hopper", lambda: architecture == "sm_90")
    for name, (bm, bn, warps, *_) in launch.HARDWARE[architecture][d].items():
        kernel, _, kind = name.partition(" ")
        tile = int(kind) if kind.isdigit() else 256 if kind == "tiled" else 0
        sizes, options = launch.blocks(kernel, d, (4096, 4096), tile, torch.bfloat16, kind)
        assert (sizes["bm"], sizes["bn"], options["num_warps"]) == (bm, bn, warps), name


@pytest.mark.parametrize(
    "module", [launch.fwd, launch.bwd, rounding, views], ids=lambda m: m.__name__
)
def test_no_kernel_function_takes_more_than_20_arguments(module):
    """Site codes that travel one by one are easily swapped, and then another site is rounded."""
    functions = [f for f in ast.walk(ast.parse(inspect.getsource(module)))
                 if isinstance(f, ast.FunctionDef)]  # fmt: skip
    assert functions and max(len(f.args.args) for f in functions) <= 20


def test_the_launch_enters_the_device_of_the_tensors(monkeypatch):
    """A model may lie on several GPUs, and the current one is that of another layer."""
    entered = []
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(device) or nullcontext()
    )
    there = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    with launch.on_device(there):
        assert entered == [there.device]
    with launch.on_device(torch.zeros(1)):
        assert len(entered) == 1


@pytest.mark.skipif(launch.NATIVE, reason="needs TRITON_INTERPRET=1")
def test_every_kernel_is_launched_on_that_device(monkeypatch):
    """Forward, dQ, dK with dV: on the device of q, also where another is current."""
    inside, launched = [], []

    @contextmanager
    def entered(x):
        inside.append(x)
        yield
        inside.pop()

    class Spy:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.extend(inside)
            return self.kernel[grid]

    monkeypatch.setattr(launch, "on_device", entered)
    for module in (launch.fwd, launch.bwd):
        for name in (name for name in vars(module) if name.endswith("_kernel")):
            monkeypatch.setattr(module, name, Spy(getattr(module, name)))
    q, k, v, do = inputs_on("cpu", n=16, d=16)
    run(q, k, v, do, LOW)
    assert len(launched) == 3 and all(x is q for x in launched)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "policy", ["FA2", "SAFE", "FA2+row_sum=removed", "FA2+row_sum=refined", "LOW"]
)
def test_attention_on_another_than_the_current_device(policy):
    """Output and gradients are those of the first GPU, bit by bit."""
    results = []
    for device in ("cuda:0", "cuda:1"):
        q, k, v, do = (x.to(device) for x in family("normal", (2, 3, 200, 64), device="cuda:0"))
        x = [y.detach().requires_grad_() for y in (q, k, v)]
        with torch.cuda.device(0):
            o = attention(*x, policy)
            o.backward(do)
        results.append([y.cpu() for y in (o, *(y.grad for y in x))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
