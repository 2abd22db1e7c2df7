"""Triton kernels against the emulation, and their compilation for Hopper.

In CI they run through Triton's interpreter on the CPU; with LOWPREC_GPU_TESTS=1 and `-m gpu` the
same comparisons run on a GPU.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import FAMILIES, family

from lowprec import UserError
from lowprec.formats import BF16, ulp
from lowprec.policy import ALL_FP32, FA2, LOW, PAPER, PrecisionPolicy
from lowprec.reference import emulate, oracle

triton = pytest.importorskip("triton")
from lowprec import kernels  # noqa: E402
from lowprec.kernels import launch  # noqa: E402

POLICIES = {
    str(p): p
    for p in (
        FA2, PAPER, LOW, LOW.replace(delta_from="o_fp32"), LOW.replace(dodo="fp32"),
        LOW.replace(o_acc="fp32"), LOW.replace(s="fp32"), LOW.replace(p="fp32"),
        LOW.replace(o="fp32"), LOW.replace(dp="fp32"), LOW.replace(ds="fp32"),
        LOW.replace(p_bwd="fp32"), LOW.replace(l="fp32"), ALL_FP32,
    )
}  # fmt: skip
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(launch.NATIVE, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def run_kernels(q, k, v, do, policy, causal=True):
    scale = q.shape[-1] ** -0.5
    o, stored, o_fp32, lse, ties = kernels.forward(q, k, v, policy, causal, scale, True, True)
    used = o if stored is None else stored
    grads = kernels.backward(do, q, k, v, used, o_fp32, lse, policy, causal, scale, True)
    names = ("o", "o_fp32", "lse", "ties", "dq", "dk", "dv", "delta_o", "delta_ref")
    return dict(zip(names, (used, o_fp32, lse, ties, *grads), strict=True))


def flips(got, wanted, scale):
    """(share of elements that differ, largest difference in BF16 ulp of `scale`)."""
    got, wanted = got.double(), wanted.double()
    worst = ((got - wanted).abs() / ulp(scale.double(), BF16)).max()
    return (got != wanted).double().mean().item(), worst.item()


def check(device, name, policy, shape, causal=True):
    """Same policy, same inputs: the kernel may differ where the accumulation order decides a
    rounding, by one ulp there, and then in what a flipped rounding feeds."""
    q, k, v, do = family(name, shape, device=device)
    t = emulate(q, k, v, policy, do=do, causal=causal)
    got = run_kernels(q, k, v, do, policy, causal)
    assert all(value.isfinite().all() for value in got.values())
    if policy.o.fmt is BF16:
        # what an element of O is summed from
        size = (t.p.double() @ v.double().abs()) / t.l[..., None]
        share, worst = flips(got["o"], t.o, size)
        # p, l, o_acc and o may each flip by an ulp; a flip of s by an ulp moves p by exp of that
        of_s = 0 if policy.s.is_fp32 else ulp(t.s[t.s.isfinite()].abs().max(), BF16).item()
        assert worst <= 4 + 2 * of_s * 2**8 and share < 0.03, ("o", share, worst)
    exact = oracle(q, k, v, causal, do=do)
    for field in ("o", "dq", "dk", "dv"):
        error, allowed = ((x[field].double() - getattr(exact, field)).norm()
                          for x in (got, vars(t)))  # fmt: skip
        assert error <= 2 * allowed + 1e-6 * getattr(exact, field).norm(), field
    assert (got["ties"] != t.ties).double().mean() < 0.02
    for field in ("delta_o", "delta_ref"):
        a, b = got[field].double(), getattr(t, field).double()
        assert (a - b).norm() <= 0.02 * b.norm() + 1e-5, field


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_kernel_equals_emulation(device, name, policy):
    if device == "cpu" and name in ("sink", "lowrank") and policy not in (LOW, FA2):
        pytest.skip("the interpreter is slow; these families run on the GPU")
    check(device, name, policy, (1, 1, 150, 64) if device == "cpu" else (2, 3, 1000, 64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n,d", [(1, 64), (16, 32), (129, 16), (130, 128)])
@pytest.mark.parametrize("causal", [True, False])
def test_shapes(device, n, d, causal):
    check(device, "normal", LOW, (2, 1, n, d), causal)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_views_and_bitwise_repeat(device):
    """q, k, v as views of one (B, T, 3, H, D) tensor give what copies give, twice the same."""
    fused = torch.randn(1, 70, 3, 2, 64, device=device).bfloat16()
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    do = torch.randn(1, 2, 70, 64, device=device).bfloat16()
    a = run_kernels(*views, do, LOW)
    for again in (views, [x.contiguous() for x in views]):
        b = run_kernels(*again, do, LOW)
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_visible(device):
    q, k, v, do = family("normal", (1, 1, 40, 64), device=device)
    v[0, 0, 3, 5] = float("nan")
    o = run_kernels(q, k, v, do, LOW)["o"]
    assert o[0, 0, 3:, 5].isnan().all() and o[0, 0, :, :5].isfinite().all()


def bias_of_tied_rows(o, o_exact, ties, parity):
    """Mean and 4-sigma half-width of (o - exact) in ulp over rows with `parity` ties."""
    rows = parity(ties)[..., None].expand_as(o)
    e = ((o.double() - o_exact.double()) / ulp(o_exact.double(), BF16))[rows]
    return e.mean().item(), 4 * e.std().item() / max(len(e), 1) ** 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_signed_bias_contract(device):
    """Rounding the numerator of rows with two equal maxima and same-sign V is biased away from
    zero by a share of an ulp; an FP32 numerator rounded once after the division is not the same.
    """
    g = torch.Generator().manual_seed(1)
    n, d = 128, 64
    k = torch.zeros(1, 2, n, d)
    k[:, :, :2, 0] = 10.0  # two keys tie so far above the rest that it adds 0.2 ulp in all
    q = torch.zeros(1, 2, n, d)
    q[..., 0] = 10.0
    k[:, :, 2:, 0] = 1.0 + 0.1 * torch.rand(1, 2, n - 2, generator=g)
    v = -(2 + 2 * torch.rand(1, 2, n, d, generator=g))
    q, k, v = (x.bfloat16().to(device) for x in (q, k, v))
    do = torch.randn(1, 2, n, d, generator=g).bfloat16().to(device)
    policy = ALL_FP32.replace(s="bf16", p="bf16", o_acc="bf16")
    got = run_kernels(q, k, v, do, policy)
    mean, bound = bias_of_tied_rows(got["o"], got["o_fp32"], got["ties"], lambda t: t == 2)
    assert mean < -0.05 - bound, (mean, bound)
    got = run_kernels(q, k, v, do, policy.replace(o_acc="fp32"))
    mean, bound = bias_of_tied_rows(got["o"], got["o_fp32"], got["ties"], lambda t: t == 2)
    assert abs(mean) <= bound + 1e-9


@pytest.mark.parametrize(
    "change",
    [
        dict(x="bf16"), dict(dq_acc="bf16"), dict(dkdv_acc="bf16"), dict(o="fp16"),
        dict(s="bf16:stochastic"), dict(p="e8m5"), dict(l_from="p_rounded"),
        dict(delta_from="dp"), dict(shift="beta(beta=2)"), dict(l_floor=1e-10),
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_fields_not_honoured_raise_and_are_named(change):
    with pytest.raises(UserError, match=next(iter(change))):
        launch.check_supported(LOW.replace(**change))


def test_other_refusals():
    q, k, v, _ = family("normal", (1, 1, 8, 48))
    with pytest.raises(UserError, match="tile=64"):
        launch.check_supported(LOW, tile=64)
    with pytest.raises(UserError, match="head_dim=48"):
        launch.check_tensors(q, k, v)
    with pytest.raises(UserError, match="bfloat16"):
        launch.check_tensors(q.float(), k.float(), v.float())


KERNELS = {
    "attention_fwd_kernel": "p_q p_k p_v p_o",
    "delta_bwd_kernel": "p_do p_o",
    "attention_bwd_dq_kernel": "p_q p_k p_v p_do p_dq",
    "attention_bwd_dkdv_kernel": "p_q p_k p_v p_do p_dk p_dv",
}


COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lowprec.kernels import attention
job = json.load(sys.stdin)
for kernel, bf16 in job["kernels"].items():
    fn = getattr(attention, kernel)
    for policy, flags in job["policies"].items():
        signature, constants = {}, {}
        for name in fn.arg_names:
            if name in flags:
                signature[name], constants[name] = "constexpr", flags[name]
            elif name.startswith("p_"):
                kind = "bf16" if name in bf16.split() else "i32" if name == "p_ties" else "fp32"
                signature[name] = "*" + kind
            else:
                signature[name] = "fp32" if name == "scale" else "i32"
        source = ASTSource(fn, signature, constants)
        out = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=job["options"])
        ptx = out.asm["ptx"]
        row = dict(kernel=kernel, policy=policy, cubin=len(out.asm["cubin"]))
        row |= {part: part in ptx for part in ("fma.rn.f32", "sm_90", "wgmma")}
        print(json.dumps(row))
"""


@pytest.mark.parametrize(
    "names", ["LOW", pytest.param("FA2 PAPER ALL_FP32", marks=pytest.mark.slow)]
)
def test_compiles_to_sm_90(names, tmp_path):
    """Native code for Hopper comes out on a machine with no GPU, in a process that does not
    interpret. Matmuls of BF16 operands use the tensor cores, and no product and sum are fused by
    the compiler (log's own polynomial flushes subnormals, hence another name), unless an FP32
    operand makes a dot of fused operations."""
    const = dict(H=12, D=64, BM=64, BN=64, CAUSAL=True, NATIVE=True, STORED=True, SHADOW=True,
                 TIES=True, FROM_SHADOW=True, PROBE=True)  # fmt: skip
    policies = {str(p): const | launch.bf16_flags(p, *launch.KERNEL_SITES)
                for p in map(PrecisionPolicy.parse, names.split())}  # fmt: skip
    job = dict(kernels=KERNELS, policies=policies, options=dict(enable_fp_fusion=False))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], input=json.dumps(job), text=True,
                          capture_output=True, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(KERNELS) * len(policies)
    for row in rows:
        assert row["sm_90"] and row["cubin"] > 1000, row
        if row["policy"] in ("FA2", "LOW"):
            assert not row["fma.rn.f32"], row
            assert row["wgmma"] == row["kernel"].startswith("attention"), row
