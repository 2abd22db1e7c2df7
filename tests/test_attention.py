"""The one entry: every implementation, autograd, the probe, and torch.compile kept out."""

import warnings

import pytest
import torch
from conftest import family
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec import UserError
from lowprec.attention import PROBE_COLUMNS, attention, operator, trace
from lowprec.attention.drop_in import sdpa
from lowprec.attention.masks import Mask, Scores
from lowprec.attention.operator import lacking, resolve_impl, that_runs
from lowprec.attention.ops import flash_backward
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics import agreement
from lowprec.numerics.formats import BF16, Format
from lowprec.numerics.policy import ALL_FP32, FA2, LOW, PrecisionPolicy


def run(inputs, policy, probe=None, **how):
    q, k, v, do = inputs
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o = attention(*leaves, policy, probe=probe, **how)
    o.backward(do)
    return o.detach(), *(t.grad for t in leaves)


@pytest.mark.parametrize("impl", ["oracle", "emulate", "sdpa"])
def test_implementations_agree_on_fp32_inputs(impl):
    inputs = family("normal", (1, 2, 40, 32), dtype=torch.float32)
    q, k, v, do = inputs
    policy = FA2 if impl == "sdpa" else ALL_FP32
    t = oracle(q, k, v, do=do)
    for got, wanted in zip(run(inputs, policy, impl=impl), (t.o, t.dq, t.dk, t.dv), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


def test_emulate_and_autograd_return_the_trace(inputs):
    q, k, v, do = inputs
    t = emulate(q, k, v, LOW, tile=32, do=do)
    for got, wanted in zip(run(inputs, LOW, tile=32), (t.o, t.dq, t.dk, t.dv), strict=True):
        assert got.dtype == q.dtype and torch.equal(got, wanted.to(q.dtype))


def test_triton_equals_emulate_through_the_entry():
    pytest.importorskip("triton")
    from lowprec.attention.kernels import launch

    if launch.NATIVE:
        pytest.skip("needs TRITON_INTERPRET=1")
    inputs = family("normal", (1, 2, 80, 64))
    for policy in (LOW, FA2.replace(inputs="e4m3_saturate@block4096,pow2")):
        for got, wanted in zip(
            run(inputs, policy, impl="triton"), run(inputs, policy), strict=True
        ):
            assert (got.double() - wanted.double()).norm() <= 0.01 * wanted.double().norm()


@pytest.mark.parametrize("impl", ["emulate", "triton"])
def test_probe_gradient_is_the_sum_over_rows_and_accumulates(impl):
    if impl == "triton":
        pytest.importorskip("triton")
    q, k, v, do = inputs = family("tied", (2, 3, 64, 64))
    t = emulate(q, k, v, LOW, do=do)
    probe = torch.zeros(3, len(PROBE_COLUMNS), requires_grad=True)
    plain = run(inputs, LOW, impl=impl)
    with_probe = run(inputs, LOW, probe=probe, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(plain, with_probe, strict=True))
    bias = t.delta_o - t.delta_ref
    wanted = torch.stack([bias.sum((0, 2)), bias.abs().sum((0, 2)), (t.ties > 1).sum((0, 2))], -1)
    torch.testing.assert_close(probe.grad, wanted.float(), rtol=1e-2, atol=1e-2)
    run(inputs, LOW, probe=probe, impl=impl)
    torch.testing.assert_close(probe.grad, 2 * wanted.float(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("sinks", [None, torch.tensor([100.0])])
def test_the_oracle_counts_ties_as_the_emulation_does(sinks):
    q, k, v, do = (x[..., :4, :] for x in family("normal", (1, 1, 8, 16)))
    dense = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    dense[..., 2, :] = False  # sees no key
    ties = [
        trace(q, k, v, do, "ALL_FP32", impl=i, mask=Mask(dense=dense), scores=Scores(sinks=sinks))
        .ties.tolist()
        for i in ("oracle", "emulate")
    ]  # fmt: skip
    assert ties[0] == ties[1] == [[[1, 1, 0, 1]]]


def test_the_output_of_pytorch_with_our_backward():
    pytest.importorskip("triton")
    q, k, v, do = inputs = family("tied", (1, 2, 80, 64))
    saved = FA2.replace(delta_from="o_fp32")
    probe = torch.zeros(2, len(PROBE_COLUMNS), requires_grad=True)
    half, theirs = run(inputs, FA2, probe, impl="sdpa_forward"), run(inputs, FA2, impl="sdpa")
    ours, apart = run(inputs, FA2, impl="triton"), run(inputs, saved, impl="sdpa_forward")
    assert torch.equal(half[0], theirs[0]) and torch.equal(apart[0], theirs[0])
    assert not torch.equal(theirs[0], ours[0]) and not torch.equal(half[1], ours[1])
    # the output reaches the gradients through delta alone
    for got, wanted in zip(apart[1:], run(inputs, saved, impl="triton")[1:], strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(half[3], ours[3])
    for x in ("removed", "refined"):
        mended = [run(inputs, saved.replace(row_sum=x), impl=i) for i in ("sdpa_forward", "triton")]
        assert torch.equal(mended[0][1], mended[1][1]) and not torch.equal(mended[0][1], apart[1])
    t = emulate(q, k, v, FA2, do=do)
    eps = (do.float() * (theirs[0].float() - t.o_fp32)).sum(-1)
    torch.testing.assert_close(probe.grad[:, 0], eps.sum((0, 2)), rtol=1e-2, atol=1e-3)
    moved = -((do.float() * (theirs[0].float() - t.o)).sum(-1, keepdim=True)) * (t.p @ k.float())
    moved = moved / t.l[..., None] * q.shape[-1] ** -0.5
    rest = half[1].float() - ours[1].float() - moved  # ds and dq are rounded to BF16
    assert rest.norm() < 0.3 * moved.norm()


def test_the_backward_of_pytorch_takes_another_output():
    pytest.importorskip("triton")
    q, k, v, do = inputs = family("tied", (1, 2, 80, 64))
    other = FA2.replace(delta_from="o_redrawn")
    probe = torch.zeros(2, len(PROBE_COLUMNS), requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = run(inputs, FA2, impl="sdpa")
    for got, wanted in zip(run(inputs, FA2, probe, impl="sdpa_backward"), theirs, strict=True):
        assert torch.equal(got, wanted)
    half = torch.zeros_like(probe, requires_grad=True)
    run(inputs, FA2, half, impl="sdpa_forward")
    assert torch.equal(probe.grad, half.grad)
    swapped = run(inputs, other, impl="sdpa_backward")
    again, later = (run(inputs, other, impl="sdpa_backward", seed=s) for s in (0, 1))
    assert torch.equal(swapped[0], theirs[0]) and torch.equal(swapped[3], theirs[3])
    assert torch.equal(swapped[1], again[1]) and not torch.equal(swapped[1], later[1])
    t = emulate(q, k, v, FA2, do=do)
    fair = run(inputs, FA2.replace(o="bf16:stochastic"), impl="triton")[0]
    moved = -((do.float() * (fair.float() - theirs[0].float())).sum(-1, keepdim=True))
    moved = moved * (t.p @ k.float()) / t.l[..., None] * q.shape[-1] ** -0.5
    rest = swapped[1].float() - theirs[1].float() - moved  # ds and dq are rounded to BF16
    assert moved.norm() > 0 and rest.norm() < 0.3 * moved.norm()


def test_the_backward_of_pytorch_is_called_as_a_gpu_wants_it():
    with FakeTensorMode():
        rows = dict(device="cuda", dtype=torch.bfloat16)
        inputs = [torch.empty(1, 64, 2, 64, **rows).transpose(1, 2) for _ in range(5)]
        for grad in flash_backward(*inputs, causal=True, scale=0.1):
            assert grad.shape == (1, 2, 64, 64) and grad.device.type == "cuda"


@pytest.mark.parametrize("impl", ["emulate", "triton", "sdpa_forward", "sdpa_backward"])
def test_operator_is_well_formed(impl):
    """Schema, fake implementation and autograd registration, by PyTorch's own checker."""
    if impl != "emulate":
        pytest.importorskip("triton")
    q, k, v, _ = family("normal", (1, 2, 32, 32))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    probe = torch.zeros(2, 3, requires_grad=True)
    torch.library.opcheck(
        torch.ops.lowprec.attention.default,
        (*leaves, probe, "FA2" if impl.startswith("sdpa") else "LOW", True, 0.2, 0, impl, 0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_gradients_of_bias_and_sinks_have_their_dtype():
    q, k, v, do = family("normal", (1, 2, 16, 16))
    bias, sinks, none = torch.zeros(1, 1, 16, 16).bfloat16(), torch.zeros(2).bfloat16(), q[:0]
    torch.library.opcheck(
        torch.ops.lowprec.attention_backward.default,
        (do, q, k, v, q, none, none, none, False, True, "LOW", True, 0.25, 0, "emulate", 0, None,
         bias, None, sinks, None, 0, 0, 0.0, 0.0),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        *(dict(delta_from=x) for x in ("o_fp32", "o_split", "o_redrawn", "o_prime", "dp")),
        *(dict(delta_bias=x) for x in (0.5, -0.5)), dict(o="fp32"), dict(o="e4m3fn@token,pow2"),
    ],
    ids=str,
)  # fmt: skip
def test_the_operator_keeps_what_the_backward_of_the_kernels_reads(change):
    """The trace keeps all of it. In FP16, which would lose small numbers of an 8-bit output."""
    pytest.importorskip("triton")
    q, k, v, do = family("tied", (1, 1, 64, 32), dtype=torch.float16)
    inputs, policy = (q, k, v * 2.0**-22, do * 2.0**13), FA2.replace(**change)
    t = trace(*inputs, policy, impl="triton")
    for got, wanted in zip(run(inputs, policy, impl="triton")[1:], (t.dq, t.dk, t.dv), strict=True):
        assert got.isfinite().all() and got.any() and torch.equal(got, wanted)


def test_a_trace_takes_do_as_q_is_stored():
    q, k, v, do = family("normal", (1, 1, 16, 16))
    fine = do.float() * 1.001
    a, b = (trace(q, k, v, x, ALL_FP32).dq for x in (fine, fine.bfloat16()))
    assert torch.equal(a, b)


def test_stochastic_backward_regenerates_the_forward():
    inputs = family("normal", (1, 1, 32, 32))
    policy = LOW.replace(s="bf16:stochastic", ds="bf16:stochastic")
    a, b, c = (run(inputs, policy, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[1], c[1])


@pytest.mark.parametrize(
    "how,word",
    [
        (dict(policy=LOW, impl="sdpa"), "FA2"),
        (dict(policy=LOW, impl="sdpa_forward"), "FA2"),
        (dict(policy="FA2+delta_from=o_fp32", impl="sdpa_backward"), "o_redrawn"),
        (dict(policy="FA2+l_from=p_both", impl="sdpa_forward"), "but for delta_from and row_sum"),
        (dict(policy="FA2+row_sum=removed", impl="sdpa_backward"), "but for delta_from, and"),
        (dict(policy="FA2+row_sum=refined", impl="sdpa_backward"), "but for delta_from, and"),
        (
            dict(policy="FA2+row_sum=refined", impl="sdpa"),
            "roundings cannot be set; use policy=FA2",
        ),
        (dict(policy=LOW, impl="cudnn"), "cudnn"),
        (dict(policy=LOW.replace(x="e5m9"), impl="triton"), "x=e5m9"),
        (dict(policy=LOW, impl="triton", tile=48), "tile=48"),
        (dict(policy="FA2+inputs=e5m2@block99,mx", impl="triton", columns=24), "this head size"),
        (dict(policy=LOW, probe=torch.zeros(1, 3)), "probe"),
        (dict(policy=LOW, probe=torch.zeros(2, 2)), "probe"),
        (dict(impl="sdpa", tile=4), "tile=None and no probe"),
        (dict(impl="sdpa", probe=torch.zeros(2, 3)), "tile=None and no probe"),
        (dict(impl="sdpa_forward", tile=4), "and tile=None"),
        (dict(impl="emulate", tile=2.5), "tile=2.5"),
        (dict(impl="triton", tile=2.5), "tile=2.5"),
        (dict(impl="emulate", tile=0), "tile=0"),
        (dict(impl="triton", seed=-1), "seed=-1"),
        (dict(impl="emulate", seed=2**32), "seed=4294967296"),
    ],
)
def test_errors_before_any_work(how, word):
    q, k, v, _ = family("normal", (1, 2, 8, how.pop("columns", 32)))
    if how.get("impl") == "triton":
        pytest.importorskip("triton")
    with pytest.raises(UserError, match=word):
        attention(q, k, v, **how)


@pytest.mark.parametrize("impl", ["sdpa", "sdpa_forward", "sdpa_backward"])
def test_pytorchs_kernels_show_no_intermediates(impl):
    with pytest.raises(UserError, match=f"impl='{impl}' shows no intermediates"):
        trace(*family("normal", (1, 2, 8, 32)), FA2, impl=impl)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sdpa_is_the_flash_kernel_where_cudnn_has_one(monkeypatch, device, dtype):
    kernels = torch.backends.cuda
    allowed = []

    def spy(q, k, v, is_causal, scale):
        allowed.append((kernels.flash_sdp_enabled(), kernels.cudnn_sdp_enabled()))
        return q

    monkeypatch.setattr("lowprec.attention.ops.scaled_dot_product_attention", spy)
    with FakeTensorMode():
        q = torch.empty(1, 2, 16, 16, device=device, dtype=dtype)
        attention(q, q, q, FA2, impl="sdpa")
    assert allowed == [(True, device == "cpu" or dtype == torch.float32)]
    assert kernels.cudnn_sdp_enabled()


@pytest.mark.gpu
def test_sdpa_gives_the_numbers_of_the_flash_kernel():
    """Though another kernel is asked for outside, and also under torch.compile."""
    inputs = family("tied", (2, 3, 256, 64), device="cuda")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, FA2, impl="sdpa"))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        got, traced = run(inputs, FA2, impl="sdpa"), compiled(*inputs[:3])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = F.scaled_dot_product_attention(*inputs[:3], is_causal=True)
    assert torch.equal(got[0], wanted) and torch.equal(traced, wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "heads, how",
    [(6, {"is_causal": True}), (6, {}), (2, {"is_causal": True, "enable_gqa": True})],
)
def test_the_drop_in_is_as_near_to_float64_as_pytorch(heads, how, device):
    """SAFE rounds where the flash kernel does, and delta less: no error is a quarter larger."""
    g = torch.Generator(device).manual_seed(0)
    shapes = (2, 6, 512, 64), *[(2, heads, 512, 64)] * 2
    inputs = [torch.randn(s, generator=g, device=device).bfloat16() for s in shapes]
    do = torch.randn(shapes[0], generator=g, device=device).bfloat16()
    results = []
    for function, dtype in (
        (F.scaled_dot_product_attention, torch.float64), (sdpa, None),
        (F.scaled_dot_product_attention, None),
    ):  # fmt: skip
        leaves = [t.to(dtype or t.dtype).requires_grad_() for t in inputs]
        o = function(*leaves, **how)
        results.append([o, *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    for exact, ours, theirs in zip(*results, strict=True):
        assert 0 < (ours.double() - exact).norm() < 1.25 * (theirs.double() - exact).norm()


def test_auto():
    assert resolve_impl("auto", "cpu") == "emulate" and resolve_impl("auto", "cuda") == "triton"


@pytest.mark.parametrize(
    "policy, head_dim, impl",
    [
        ("FA2", 64, "triton"),
        ("FA2", 48, "triton"),
        ("FA2", 512, "emulate"),
        ("FA2+inputs=e4m3_saturate@block64,pow2", 48, "emulate"),
    ],
)
def test_what_runs_is_known_beforehand(policy, head_dim, impl, monkeypatch):
    """It is what run.json names."""
    pytest.importorskip("triton")
    monkeypatch.setattr(operator, "_told", {*operator._told})
    with warnings.catch_warnings(action="ignore"):
        assert that_runs(policy, None, "auto", "cuda", head_dim) == impl


@pytest.mark.parametrize(
    "scores, grad, missing",
    [
        (Scores(1.0, bias=torch.zeros(8, 8)), True, ""),
        (Scores(1.0, bias=torch.zeros(8, 8, requires_grad=True)), False, ""),
        (Scores(1.0, bias=torch.zeros(8, 8, requires_grad=True)), True, "the gradient of a bias"),
        (Scores(0.0), True, "a scale that is not positive"),
    ],
)
def test_what_the_kernels_lack(scores, grad, missing):
    q = torch.zeros(1, 2, 8, 64)
    assert " and ".join(lacking(q, q, scores, 0.0, grad)) == missing


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy, impl",
    [
        (LOW, "triton"),
        (LOW.replace(delta_from="o_fp32"), "triton"),
        (FA2, "triton"),
        (FA2.replace(row_sum="removed"), "triton"),
        (FA2.replace(row_sum="refined"), "triton"),
        (FA2.replace(l_from="p_both"), "triton"),
        (FA2, "sdpa_forward"),
        (FA2.replace(delta_from="o_redrawn"), "sdpa_backward"),
    ],
    ids=str,
)
def test_compiled_model_gives_the_eager_roundings(policy, impl):
    """Under torch.compile the operator stays opaque: equal inputs give bitwise equal outputs."""
    inputs = family("tied", (2, 3, 256, 64), device="cuda")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, policy, impl=impl))
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    o = compiled(*leaves)
    o.backward(inputs[3])
    got, eager = (o, *(t.grad for t in leaves)), run(inputs, policy, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))
    if impl.startswith("sdpa"):
        assert torch.equal(o, run(inputs, FA2, impl="sdpa")[0])


@pytest.mark.parametrize("impl", ["emulate", "triton"])
def test_a_seed_may_be_a_tensor(impl):
    if impl == "triton":
        pytest.importorskip("triton")
        from lowprec.attention.kernels import launch

        if launch.NATIVE:
            pytest.skip("needs TRITON_INTERPRET=1")
    q, k, v = (torch.randn(1, 1, 32, 16, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    found = []
    for seed in (7, torch.tensor([7]), 8):
        o = attention(q, k, v, "LOW+p=bf16:stochastic+ds=bf16:stochastic", impl=impl, seed=seed)
        found.append((o, *torch.autograd.grad(o.float().sum(), (q, k, v))))
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][0], found[2][0])
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match=f"seed={seed} must be from 0"):
            attention(q, k, v, "LOW+p=bf16:stochastic", impl=impl, seed=torch.tensor([seed]))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_no_scale_makes_nan_of_pytorch_s_attention(scale):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in "qkv")
    ours, want = (attention(q, k, v, "FA2", scale=scale, impl=impl) for impl in ("sdpa", "oracle"))
    assert torch.allclose(ours, want.float(), atol=1e-5)


@pytest.mark.parametrize("shift", ["offset(amplitude=-20)", "beta(beta=-2)"])
def test_an_output_agrees_with_itself_where_the_maximum_moves_down(shift):
    q, k, v = torch.randn(3, 1, 1, 64, 16)
    policy = PrecisionPolicy.parse(f"ALL_FP32+shift={shift}")
    t = emulate(q, k, v, policy)
    how = (t, q, k, v, policy, None, 0.25)
    assert agreement.agrees(t.o, t.o, *how)
    assert all((bound >= 0).all() for bound in agreement.forward_bounds(*how).values())


def test_a_distance_in_ulp_is_that_of_the_scale_of_each_row():
    policy = FA2.replace(o="e4m3fn@token,pow2")
    q, k, v = (x.bfloat16() for x in torch.randn(3, 1, 1, 64, 16))
    found = []
    for exponent in (-10, 0, 10):
        values = v * 2.0**exponent
        t = emulate(q, k, values, policy)
        found.append(agreement.ulp_distance(0 * t.o, t.o, t, values, policy))
    assert found[0] == found[1] == found[2] > 1


def test_a_distance_is_in_ulp_of_the_terms_and_not_of_what_they_leave():
    q = k = torch.zeros(1, 1, 2, 16).bfloat16()
    v = torch.tensor([1.5, -1.5])[:, None].expand(1, 1, 2, 16).bfloat16()
    t = emulate(q, k, v, FA2)
    o = t.o + torch.tensor([0.0, 2.0**-7])[:, None]  # the second row is 3/4 - 3/4
    assert agreement.ulp_distance(o.bfloat16(), t.o.bfloat16(), t, v, FA2) == 1


def test_an_output_in_fp32_agrees_within_the_noise_of_its_sums():
    q, k, v = torch.randn(3, 1, 1, 64, 16, generator=torch.Generator().manual_seed(0))
    t = emulate(q, k, v, ALL_FP32)
    how = (t, q, k, v, ALL_FP32, None, 0.25)
    assert agreement.agrees(t.o * (1 + 2.0**-22), t.o, *how)
    assert not agreement.agrees(t.o * (1 + 2.0**-10), t.o, *how)


def test_how_far_apart_two_roundings_may_lie():
    assert agreement.step(BF16, 0.0) == BF16.min_subnormal and agreement.step(BF16, 1.0) >= 2.0**-7
    near, drawn = (PrecisionPolicy.parse(f"FA2+ds=bf16{x}") for x in ("", ":stochastic"))
    x = torch.ones(1, 1, 2, 4)
    assert torch.equal(agreement.flip(drawn, "ds", x), 2 * agreement.flip(near, "ds", x))
    assert agreement.flip(near, "s", x) == 0.0


def test_a_scale_a_row_widens_how_far_roundings_may_lie_apart():
    near, by_row = (PrecisionPolicy.parse(f"FA2+o={x}") for x in ("e4m3fn", "e4m3fn@token,pow2"))
    x, fmt = torch.full((1, 1, 1, 2), 448.0 * 4), Format.parse("e4m3fn")
    far = agreement.flip(by_row, "o", x) - agreement.flip(near, "o", x)
    torch.testing.assert_close(far, torch.full_like(x, 7 * fmt.min_subnormal))


def test_a_weight_of_nothing_may_become_one_of_everything():
    log_p = torch.tensor([-200.0, -8.0], dtype=torch.float64)
    few, all_of_it = agreement.of_weight(log_p.exp(), log_p, torch.tensor([16.0, 16.0]))
    assert few < 1e-70 and 1 < all_of_it < 1.1
