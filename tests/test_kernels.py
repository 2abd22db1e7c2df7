"""Triton kernels against the emulation, the oracle and what theory says about their bias.

In CI they run through Triton's interpreter on the CPU; with LOWPREC_GPU_TESTS=1 and `-m gpu` the
same comparisons run on a GPU, at larger shapes and over more inputs. `make gpu-check` does that.
"""

import pytest
import torch
from conftest import FAMILIES, family

pytest.importorskip("triton")
from kernel_checks import DEVICES, beyond_bounds, every, run

from lowprec import UserError
from lowprec.formats import BF16, ulp
from lowprec.kernels import launch
from lowprec.policy import (
    ALL_FP32,
    FA2,
    FIELDS,
    LOW,
    PAPER,
    RELEASED,
    SITES,
)  # fmt: skip
from lowprec.reference import emulate

ONE_FIELD = [
    *(LOW.replace(**{x: "bf16" if getattr(LOW, x).is_fp32 else "fp32"}) for x in SITES),
    LOW.replace(o="fp16"), LOW.replace(p="e8m4"), LOW.replace(ds="e8m10"),
    LOW.replace(l_from="p_rounded"), LOW.replace(l_floor=3.0),
    *(LOW.replace(delta_from=source) for source in ("o_fp32", "o_split", "dp")),
]  # fmt: skip
SHIFTS = ["beta(beta=7)", "beta(beta=2,gamma=0.5,tol=0.1)", "offset(amplitude=0.5)",
          "dither(amplitude=0.5)"]  # fmt: skip
MODES = ["nearest_away", "toward_zero", "stochastic"]
CASES = [
    *((p, None) for p in (ALL_FP32, FA2, PAPER, LOW, *ONE_FIELD)),
    *((p, 64) for p in (FA2, PAPER, LOW, RELEASED)), (RELEASED, 32), (LOW, 128),
    *((PAPER.replace(shift=shift), tile) for shift in SHIFTS for tile in (None, 64)),
    *((every(f"{fmt}:{mode}"), 64) for fmt in ("bf16", "fp16") for mode in MODES),
    (every("bf16:stochastic"), None), (every("e8m10:toward_zero"), 32),
]  # fmt: skip
FAST = (FA2, LOW, PAPER)


def compare(q, k, v, do, policy, tile=None, causal=True, seed=0):
    """Assert that the kernels compute what `emulate` does; returns what they returned."""
    got = run(q, k, v, do, policy, tile, causal, seed=seed)
    wrong = beyond_bounds(got, (q, k, v, do), policy, tile, causal, seed=seed)
    assert not wrong, wrong
    bias, tied = (got.delta_o - got.delta_ref).double(), (got.ties > 1).double()
    sums = torch.stack([x.sum((0, 2)) for x in (bias, bias.abs(), tied)], -1)
    torch.testing.assert_close(got.sums.double(), sums, rtol=1e-5, atol=1e-4)
    return got


def name_of(case):
    return f"{case[0]}-{case[1]}" if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernel_equals_emulation(device, name, case):
    policy, tile = case
    if device == "cpu" and name != "tied" and policy not in FAST:
        pytest.skip("the interpreter is slow; the other families run on the GPU")
    if policy.shift.kind == "beta" and name == "lowrank":
        pytest.skip("on scores of this size the rule underflows, in subnormals that exp2 flushes")
    shape = (1, 1, 150, 64) if device == "cpu" else (2, 3, 1000, 64)
    compare(*family(name, shape, device=device), policy, tile, seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [64, 128, 256, 512])
@pytest.mark.parametrize("policy", [FA2, PAPER, LOW, RELEASED], ids=str)
def test_tiles(policy, tile):
    compare(*family("normal", (2, 3, 1100, 64), device="cuda"), policy, tile)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n,d", [(1, 64), (16, 32), (129, 16), (130, 128), (150, 32)])
@pytest.mark.parametrize("causal", [True, False])
def test_shapes(device, n, d, causal):
    compare(*family("normal", (2, 1, n, d), device=device), LOW, 64 if n > 64 else None, causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("policy", [ALL_FP32, LOW, FA2], ids=str)
def test_input_dtypes(device, dtype, policy):
    """FP16 and FP32 inputs; with nothing rounded, FP32 inputs give an error of FP32's size."""
    inputs = family("normal", (1, 2, 140, 64), dtype=dtype, device=device)
    got = compare(*inputs, policy)
    if dtype == torch.float32 and policy == ALL_FP32:
        exact = emulate(*(x.double().float() for x in inputs[:3]), ALL_FP32, do=inputs[3])
        for name in ("o", "dq", "dk", "dv"):
            a, b = getattr(got, name), getattr(exact, name)
            assert (a - b).norm() <= 2e-6 * b.norm(), name


# For one changed field of LOW: what must change, and what lies upstream and must not.
FORWARD = {"o", "o_fp32", "lse", "delta", "delta_o", "dq", "dk", "dv"}
LIVE = {
    "s": (dict(s="fp32"), FORWARD),
    "x": (dict(x="bf16"), FORWARD),
    "p": (dict(p="fp32"), FORWARD - {"lse", "dv"}),
    "l": (dict(l="fp32"), FORWARD - {"o_fp32"}),
    "o_acc": (dict(o_acc="fp32"), {"o", "delta", "delta_o", "dq", "dk"}),
    "o": (dict(o="fp32"), {"o", "delta", "delta_o", "dq", "dk"}),
    "dodo": (dict(dodo="fp32"), {"delta", "delta_o", "dq", "dk"}),
    "dp": (dict(dp="fp32"), {"dq", "dk"}),
    "p_bwd": (dict(p_bwd="fp32"), {"dv"}),
    "ds": (dict(ds="fp32"), {"dq", "dk"}),
    "dq_acc": (dict(dq_acc="e8m3"), {"dq"}),
    "dkdv_acc": (dict(dkdv_acc="e8m3"), {"dk", "dv"}),
    "l_from": (dict(l_from="p_rounded"), FORWARD),
    "delta_from": (dict(delta_from="o_fp32"), {"delta", "dq", "dk"}),
    "shift": (dict(shift="offset(amplitude=0.3)"), FORWARD),
    "l_floor": (dict(l_floor=50.0), FORWARD),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("field", FIELDS)
def test_each_field_changes_its_site_and_nothing_upstream(device, field):
    change, downstream = LIVE[field]
    q, k, v, do = family("normal", (1, 2, 100, 64), device=device)
    a, b = run(q, k, v, do, LOW), run(q, k, v, do, LOW.replace(**change))
    for name in (*FORWARD, "delta_ref"):
        same = torch.equal(getattr(a, name), getattr(b, name))
        if name in downstream:
            assert not same, f"{field} leaves {name} alone"
        elif name != "delta_ref" or "o_fp32" not in downstream:
            assert same, f"{field} changes {name}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy,tile", [(every("bf16:stochastic"), 64), (LOW, None)], ids=str)
def test_hardware_blocks_and_layout_change_nothing_but_sums(device, policy, tile, monkeypatch):
    """Views of one (B, T, 3, H, D) tensor give what copies give, twice the same; other hardware
    blocks draw the same random words, so that the same bounds hold; another seed draws others."""
    fused = torch.randn(1, 200, 3, 2, 64, device=device).bfloat16()
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    do = torch.randn(1, 2, 200, 64, device=device).bfloat16()
    a = run(*views, do, policy, tile, seed=5)
    for again in (views, [x.contiguous() for x in views]):
        b = run(*again, do, policy, tile, seed=5)
        assert all(torch.equal(getattr(a, name), x) for name, x in vars(b).items())
    if policy != LOW:
        assert not torch.equal(a.o, run(*views, do, policy, tile, seed=6).o)
    blocks = launch.blocks

    def smaller(kernel, d, n, tile, dtype):
        sizes = blocks(kernel, d, n, tile, dtype)
        return sizes | dict(BM=32, BN=32, EVEN=False)

    monkeypatch.setattr(launch, "blocks", smaller)
    compare(*views, do, policy, tile, seed=5)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_stay_in_their_rows(device):
    q, k, v, do = family("normal", (1, 1, 40, 64), device=device)
    v[0, 0, 3, 5] = float("nan")
    o = run(q, k, v, do, LOW).o
    assert o[0, 0, 3:, 5].isnan().all() and o[0, 0, :, :5].isfinite().all()
    q, k, v, do = family("normal", (1, 1, 40, 64), device=device)
    q[0, 0, 7] = float("nan")
    got = run(q, k, v, do, LOW)
    assert got.o[0, 0, 7].isnan().all() and got.o[0, 0, :7].isfinite().all()
    assert got.o[0, 0, 8:].isfinite().all() and got.lse[0, 0, 7].isnan()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy,tile", [(LOW, None), (FA2, 32)], ids=str)
def test_a_row_that_sees_no_finite_score(device, policy, tile):
    """All scores -inf: o = 0, lse = -inf, and the other rows as if it were not there."""
    q, k, v, do = family("normal", (1, 1, 70, 64), device=device)
    k[..., 0] = k[..., 0].abs() + 1
    clean = run(q, k, v, do, policy, tile)
    q[0, 0, 9] = 0
    q[0, 0, 9, 0] = -3e38
    k[..., 0] *= 4  # the product overflows to -inf
    got = run(q, k, v, do, policy, tile)
    assert (got.o[0, 0, 9] == 0).all() and got.lse[0, 0, 9] == float("-inf")
    assert got.o.isfinite().all() and clean.o.isfinite().all()


def bias_in_ulp(o, o_exact, rows):
    """Mean of (o - exact) in ulp over chosen rows, and the 4-sigma half-width of that mean."""
    e = ((o.double() - o_exact.double()) / ulp(o_exact.double(), BF16))[rows]
    return e.mean().item(), 4 * e.std().item() / max(e.numel(), 1) ** 0.5


def tied_inputs(device, n=128, d=64):
    """Rows with two equal maxima far above the rest, over same-sign values."""
    g = torch.Generator().manual_seed(1)
    k = torch.zeros(1, 2, n, d)
    k[:, :, :2, 0] = 10.0  # the rest adds 0.2 ulp in all
    q = torch.zeros(1, 2, n, d)
    q[..., 0] = 10.0
    k[:, :, 2:, 0] = 1.0 + 0.1 * torch.rand(1, 2, n - 2, generator=g)
    v = -(2 + 2 * torch.rand(1, 2, n, d, generator=g))
    do = torch.randn(1, 2, n, d, generator=g)
    return [x.bfloat16().to(device) for x in (q, k, v, do)]


@pytest.mark.parametrize("device", DEVICES)
def test_signed_bias_contract(device):
    """A BF16 numerator of rows with two equal maxima and negative V is biased away from zero by a
    share of an ulp. The sign follows V; stochastic rounding, an FP32 numerator and rows without
    ties have none."""
    q, k, v, do = tied_inputs(device)
    policy = ALL_FP32.replace(s="bf16", p="bf16", o_acc="bf16")
    got = run(q, k, v, do, policy)
    mean, bound = bias_in_ulp(got.o, got.o_fp32, got.ties == 2)
    assert mean < -0.05 - bound, (mean, bound)
    got = run(q, k, -v, do, policy)
    mean, bound = bias_in_ulp(got.o, got.o_fp32, got.ties == 2)
    assert mean > 0.05 + bound, (mean, bound)

    unbiased = policy.replace(o_acc="bf16:stochastic")
    several = [run(q, k, v, do, unbiased, seed=seed) for seed in range(4)]
    o, exact, ties = (torch.cat([getattr(x, f) for x in several]) for f in ("o", "o_fp32", "ties"))
    mean, bound = bias_in_ulp(o, exact, ties == 2)
    assert abs(mean) <= bound and bound < 0.05, (mean, bound)
    got = run(q, k, v, do, policy.replace(o_acc="fp32"))
    mean, bound = bias_in_ulp(got.o, got.o_fp32, got.ties == 2)
    assert abs(mean) <= bound + 1e-6

    inputs = family("normal", (2, 2, 128, 64), device=device)
    got = run(*inputs, ALL_FP32.replace(s="bf16", p="bf16", o_acc="bf16"))
    rows = got.ties == 1
    rows[:, :, :8] = False  # the first rows sum few terms, and a sum of one is exact
    mean, bound = bias_in_ulp(got.o, got.o_fp32, rows)
    assert abs(mean) <= bound and bound < 0.05, (mean, bound)


@pytest.mark.parametrize(
    "change", [dict(o="e4m3fn"), dict(p="e5m2"), dict(s="bf16_saturate"), dict(ds="e2m1")], ids=str
)
def test_formats_not_honoured_raise_and_are_named(change):
    with pytest.raises(UserError, match=f"policy field {next(iter(change))}="):
        launch.check_supported(LOW.replace(**change))


def test_other_refusals():
    q, k, v, _ = family("normal", (1, 1, 8, 48))
    for tile in (8, 48, 100):
        with pytest.raises(UserError, match=f"tile={tile}"):
            launch.check_supported(LOW, tile)
    with pytest.raises(UserError, match="head_dim=48"):
        launch.check_tensors(q, k, v, 1.0)
    with pytest.raises(UserError, match="float64"):
        launch.check_tensors(q.double(), k.double(), v.double(), 1.0)
    q, k, v, _ = family("normal", (1, 1, 8, 64))
    with pytest.raises(UserError, match="positive scale"):
        launch.check_tensors(q, k, v, -1.0)
    with pytest.raises(UserError, match="as many queries as keys"):
        launch.check_tensors(q[:, :, :4], k, v, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2100, 16, 1024, 64), (70_000, 1, 64, 64)])
def test_offsets_and_grids_beyond_32_and_16_bits(shape):
    """More than 2^31 elements a tensor, and more than 65,535 heads: the last is right."""
    need = 12 * 2 * torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory")
    q, k, v, do = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    scale = shape[3] ** -0.5
    o, _, _, lse, _ = launch.forward(q, k, v, LOW, True, scale)
    grads = launch.backward(do, q, k, v, o, None, lse, None, LOW, True, scale)[:3]
    last = [x[-1:, -1:] for x in (q, k, v, do)]
    t = emulate(*last[:3], LOW, do=last[3])
    for got, wanted in zip((o, *grads), (t.o, t.dq, t.dk, t.dv), strict=True):
        error = (got[-1:, -1:].double() - wanted.double()).norm()
        assert error <= 2e-3 * wanted.double().norm()
