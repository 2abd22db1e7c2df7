"""Triton kernels against the emulation, with each field of the policy in its own place.

In CI they run through Triton's interpreter on the CPU; with LOWPREC_GPU_TESTS=1 and `-m gpu` the
same comparisons run on a GPU, at larger shapes and over more inputs. `make gpu-check` does that.
Around them: `test_kernel_rounding` (parts, native code), `test_kernel_inputs` (edges, refusals),
`test_kernel_bias` (signed bias, random words).
"""

import functools

import pytest
import torch
from conftest import FAMILIES, family

pytest.importorskip("triton")
from kernel_checks import (
    CAPTURES,
    DEVICES,
    GRADIENTS,
    beyond_bounds,
    bounds,
    captured,
    every,
    inputs_on,
    run,
)  # fmt: skip

from lowprec.attention import operator
from lowprec.attention.kernels import launch
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.policy import ALL_FP32, CHOICES, FA2, FIELDS, LOW, PAPER, RELEASED, SITES

# NumPy, which is behind the interpreter, remarks on every infinity and NaN that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EIGHT, BY_ROW = "e4m3_saturate@2^8", "e4m3_saturate@token,pow2"
ONE_FIELD = [
    *(LOW.replace(**{x: "bf16" if getattr(LOW, x).is_fp32 else "fp32"}) for x in SITES),
    LOW.replace(o="fp16"), LOW.replace(p="e8m4"), LOW.replace(ds="e8m10"),
    *(LOW.replace(l_from=x) for x in ("p_rounded", "p_both")), LOW.replace(l_floor=3.0),
    LOW.replace(delta_bias=0.5), FA2.replace(delta_from="o_fp32", delta_bias=-2.0),
    *(p.replace(row_sum=x) for p in (LOW, FA2) for x in ("removed", "refined")),
    LOW.replace(row_sum="refined", p_bwd="e8m4"), FA2.replace(p=EIGHT, o=EIGHT),
    FA2.replace(p=EIGHT, o=BY_ROW, ds="e5m2", p_bwd="e4m3@2^8", delta_from="o_redrawn"),
    FA2.replace(p="e2m1@2^2", o="e2m1@token,pow2", ds="e2m1@2^4"),
    *(LOW.replace(delta_from=source) for source in CHOICES["delta_from"][1:]),
]  # fmt: skip
SHIFTS = ["beta(beta=7)", "beta(beta=2,gamma=0.5,tol=0.1)", "offset(amplitude=0.5)",
          "dither(amplitude=0.5)", "pow2"]  # fmt: skip
MODES = ["nearest_away", "toward_zero", "stochastic"]
CASES = [
    *((p, None) for p in (ALL_FP32, FA2, PAPER, LOW, *ONE_FIELD)),
    *((p, 64) for p in (FA2, PAPER, LOW, RELEASED)), (RELEASED, 32), (LOW, 128),
    *((RELEASED.replace(row_sum=x), 64) for x in ("removed", "refined")),
    (LOW.replace(l_floor=50.0), 64), (RELEASED.replace(l_from="p_both"), 64),
    (every("bf16:stochastic").replace(l_from="p_both"), 64),
    (RELEASED.replace(delta_from="o_fp32"), 64), (PAPER.replace(delta_from="o_fp32"), None),
    *((PAPER.replace(shift=shift), tile) for shift in SHIFTS for tile in (None, 64)),
    (FA2.replace(shift="pow2"), None), (FA2.replace(shift="pow2", p=EIGHT), None),
    (FA2.replace(shift="pow2", l_from="p_both"), 64),
    *((p.replace(shift="mute(amplitude=8)", l_floor=1e-10), tile)
      for p, tile in ((PAPER, None), (PAPER, 64), (LOW, None))),
    *((every(f"{fmt}:{mode}"), 64) for fmt in ("bf16", "fp16", "e5m6") for mode in MODES),
    (every("bf16:stochastic"), None), (every("e8m10:toward_zero"), 32),
]  # fmt: skip
UNDERFLOWING = [(p, tile) for p, tile in CASES if p.shift.kind == "beta"]


def families(device, case):
    """The interpreter is slow: it sees few families. A changed field shows on any."""
    if device == "cuda":
        return ("normal", "tied", "captured") if case[0] in ONE_FIELD else (*FAMILIES, "captured")
    if case in ((FA2, None), (LOW, None), (PAPER, None)):
        return (*FAMILIES, "captured")
    return ("tied", "lowrank") if case in UNDERFLOWING else ("tied",)


def comparisons(param):
    """The cases of one of DEVICES."""
    (device,) = param.values
    for policy, tile in CASES:
        alike = policy == every(policy.s) != ALL_FP32
        label = f"{f'every={policy.s}' if alike else policy}-{tile}"
        for name in families(device, (policy, tile)):
            how = dict(id=f"{label}-{name}-{device}", marks=param.marks)
            yield pytest.param(device, name, policy, tile, **how)


def compare(q, k, v, do, policy, tile=None, causal=True, by_row=False, **how):
    """Assert that the kernels compute what `emulate` does; returns what they returned."""
    got = run(q, k, v, do, policy, tile, causal, **how)
    assert beyond_bounds(got, (q, k, v, do), policy, tile, causal, by_row=by_row, **how) == []
    bias, tied = (got.delta_o - got.delta_ref).double(), (got.ties > 1).double()
    sums = torch.stack([x.sum((0, 2)) for x in (bias, bias.abs(), tied)], -1)
    torch.testing.assert_close(got.sums.double(), sums, rtol=1e-5, atol=1e-4, equal_nan=True)
    return got


@pytest.mark.parametrize("device,name,policy,tile", [c for d in DEVICES for c in comparisons(d)])
def test_kernel_equals_emulation(device, name, policy, tile):
    compare(*inputs_on(device, name), policy, tile, seed=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("policy,tile", [(FA2, 64), (LOW, None)], ids=str)
def test_captured_inputs(device, path, policy, tile):
    compare(*captured(path, device), policy, tile, by_row=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [64, 128, 256, 512])
@pytest.mark.parametrize("policy", [FA2, PAPER, LOW, RELEASED], ids=str)
def test_tiles(policy, tile):
    compare(*family("normal", (2, 3, 1100, 64), device="cuda"), policy, tile)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "n,d,tile",
    [
        (1, 64, None),
        (16, 32, None),
        (129, 16, None),
        (130, 128, 64),
        (150, 32, 64),
        (20, 256, None),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_shapes(device, n, d, tile, causal):
    """Also rows beyond one hardware block, several heads, and keys that fill no block."""
    heads = (2, 1) if n < 100 else (1, 1)
    compare(*family("normal", (*heads, n, d), device=device), LOW, tile, causal)


@pytest.mark.parametrize("device", DEVICES)
def test_each_sequence_of_a_batch_draws_its_own_words(device):
    compare(*family("normal", (2, 1, 64, 32), device=device), every("bf16:stochastic"), seed=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [None, 64])
def test_the_shift_of_tied_rows_below_zero(device, tile):
    q, k, v, do = inputs_on(device, "tied")
    policy = PAPER.replace(shift="beta(beta=2,gamma=0.5,tol=0.1)")
    assert (emulate(-q, k, v, policy, tile).ties > 1).double().mean() > 0.5
    compare(-q, k, v, do, policy, tile)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy,scale", [(LOW, 0.07), (PAPER, 0.5)], ids=str)
def test_scales(device, policy, scale):
    compare(*inputs_on(device, "lowrank"), policy, scale=scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("policy", [ALL_FP32, LOW, FA2], ids=str)
def test_input_dtypes(device, dtype, policy):
    """With nothing rounded the errors against float64 are FP32's; the gradients take the inputs'
    dtype, hence only those of FP32 inputs."""
    inputs = inputs_on(device, "sink", dtype=dtype)
    got = compare(*inputs, policy)
    if policy != ALL_FP32:
        return
    exact, t = oracle(*inputs[:3], do=inputs[3]), emulate(*inputs[:3], policy, do=inputs[3])
    noise = bounds(t, *inputs, policy, None, inputs[0].shape[-1] ** -0.5, flips=False)
    for name in ("o", "lse", "delta") + (GRADIENTS if dtype == torch.float32 else ()):
        error = (getattr(got, name).double() - getattr(exact, name)).abs()
        assert (error <= noise[name]).all(), name


# For one changed field of LOW: the results that change. The others lie upstream and must not.
FORWARD = {"o", "o_fp32", "lse", "delta", "delta_o", "dq", "dk", "dv"}
LIVE = {
    "s": ("fp32", FORWARD),
    "x": ("bf16", FORWARD),
    "p": ("fp32", FORWARD - {"lse", "dv"}),
    "l": ("fp32", FORWARD - {"o_fp32"}),
    "o_acc": ("fp32", {"o", "delta", "delta_o", "dq", "dk"}),
    "o": ("fp32", {"o", "delta", "delta_o", "dq", "dk"}),
    "dodo": ("fp32", {"delta", "delta_o", "dq", "dk"}),
    "dp": ("fp32", {"dq", "dk"}),
    "p_bwd": ("fp32", {"dv"}),
    "ds": ("fp32", {"dq", "dk"}),
    "dq_acc": ("e8m3", {"dq"}),  # the gradients of BF16 inputs hide a BF16 sum
    "dkdv_acc": ("e8m3", {"dk", "dv"}),
    "l_from": ("p_rounded", FORWARD),
    "delta_from": ("o_fp32", {"delta", "dq", "dk"}),
    "shift": ("offset(amplitude=0.3)", FORWARD),
    "l_floor": (50.0, FORWARD),
    "delta_bias": (0.5, {"delta", "dq", "dk"}),
    "row_sum": ("removed", {"dq"}),
    "inputs": ("e4m3_saturate@tensor,pow2", FORWARD),
}
FIELD_BY_FIELD = pytest.mark.parametrize(
    "field,value,downstream",
    [
        *((f, *LIVE[f]) for f in FIELDS),
        ("row_sum", "refined", {"dq", "dk"}),
        ("p", EIGHT, FORWARD - {"lse", "dv"}),
        ("o", BY_ROW, {"o", "delta", "delta_o", "dq", "dk"}),
        ("ds", "e4m3_saturate@2^4", {"dq", "dk"}),
        ("l_from", "p_both", {"o", "o_fp32", "delta", "delta_o", "dq", "dk"}),
    ],
)


@functools.cache
def of_low(device, short=False):
    inputs = family("normal", (1, 1, 100, 64), device=device) if short else inputs_on(device)
    return inputs, run(*inputs, LOW)


@pytest.mark.parametrize("device", DEVICES)
@FIELD_BY_FIELD
def test_each_field_changes_its_site_and_nothing_upstream(device, field, value, downstream):
    inputs, a = of_low(device)
    b = run(*inputs, LOW.replace(**{field: value}))
    for name in (*FORWARD, "delta_ref"):
        same = torch.equal(getattr(a, name), getattr(b, name))
        if name in downstream:
            assert not same, f"{field} leaves {name} alone"
        elif name != "delta_ref" or "o_fp32" not in downstream:
            assert same, f"{field} changes {name}"


@pytest.mark.parametrize("device", DEVICES)
@FIELD_BY_FIELD
def test_bounds_notice_each_field(device, field, value, downstream):
    """Kernels that run LOW do not pass for a policy that differs in one field, and what betrays
    them lies downstream of it. (Ties, of rows with the same scores, change only with s.)

    delta_bias moves delta by a part of delta_o - delta_ref, and row_sum moves dq and dk by a sum
    that is nearly zero. The bound of a sum grows with its length and in rows of 1000 keys is larger
    than that, hence the short ones.
    """
    inputs, got = of_low(device, short=field in ("delta_bias", "row_sum"))
    wrong = beyond_bounds(got, inputs, LOW.replace(**{field: value}))
    noticed = {sentence.partition(":")[0] for sentence in wrong}
    with_o_fp32 = {"delta_ref"} if "o_fp32" in downstream else set()
    allowed = downstream | with_o_fp32 | ({"ties"} if field in ("s", "inputs") else set())
    assert noticed and noticed <= allowed, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2100, 16, 1024, 64), (70_000, 1, 64, 64)])
def test_offsets_and_grids_beyond_32_and_16_bits(shape):
    """More than 2^31 elements a tensor, and more than 65,535 heads: the last is right."""
    need = 12 * 2 * torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory")
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(shape, generator=g, dtype=torch.bfloat16, device="cuda") for _ in range(4)
    )
    scale = shape[3] ** -0.5
    o, _, _, lse, _ = launch.forward(q, k, v, LOW, True, scale)
    grads = launch.backward(do, q, k, v, o, None, lse, None, LOW, True, scale)[:3]
    last = [x[-1:, -1:] for x in (q, k, v, do)]
    t = emulate(*last[:3], LOW, do=last[3])
    for got, wanted in zip((o, *grads), (t.o, t.dq, t.dk, t.dv), strict=True):
        error = (got[-1:, -1:].double() - wanted.double()).norm()
        assert error <= 2e-3 * wanted.double().norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_floor_is_one_of_both_sums(device):
    q, k, v, _ = family("normal", (1, 1, 32, 16), device=device)
    how = (q, k, v, None, "FA2+l_from=p_both+l_floor=100")
    ours, want = (operator.trace(*how, impl=impl) for impl in ("triton", "emulate"))
    torch.testing.assert_close(ours.lse, want.lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_mean_key_taken_out_is_that_of_more_than_512_keys(device):
    q, k, v, do = family("tied", (1, 2, 600, 16), dtype=torch.float32, device=device)
    k[:, :, 512:] *= 3
    how = (q, k[:, :1], v[:, :1], do, "LOW+row_sum=removed")
    ours, want = (operator.trace(*how, impl=impl).dq for impl in ("triton", "emulate"))
    assert (ours - want).norm() < 0.05 * want.norm()
