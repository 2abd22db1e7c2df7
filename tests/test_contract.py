"""What PyTorch's function takes: the same result, forward and backward, within the rounding.

`CASES` is the contract that the page *Take it home* shows, a row a test id. In FP32 under ALL_FP32
only the order of sums differs. In BF16 under SAFE the distance to float64 is held against PyTorch's
own. The reference is PyTorch's function where it is right about all of it, on float64 tensors.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from lowprec import UserError, sdpa
from lowprec.attention import drop_in, operator
from lowprec.attention.masks import Mask, Scores
from lowprec.training import rotary

PAGE = Path(__file__).resolve().parent.parent / "book" / "take_it_home.md"
B, H, L, D = 2, 4, 12, 16

NAME = "lowprec.attention.drop_in.scaled_dot_product_attention"


def random_mask(*shape):
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.6
    seen[..., 0] = True
    return seen


def padding(side):
    """(B, 1, 1, L): the first sequence is whole, the second has 5 tokens of padding."""
    seen = torch.ones(2, 1, 1, L, dtype=torch.bool)
    seen[1, ..., slice(5) if side == "left" else slice(L - 5, L)] = False
    return seen


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
BLIND = CAUSAL.clone()
BLIND[3] = BLIND[7] = False

CASES = {
    # id: shapes of query, key, value; arguments
    "nothing": ({}, {}),
    "is_causal": ({}, dict(is_causal=True)),
    "is_causal, more keys": (dict(S=20), dict(is_causal=True)),
    "is_causal, fewer keys": (dict(S=7), dict(is_causal=True)),
    "boolean mask (L, S)": ({}, dict(attn_mask=random_mask(L, L))),
    "boolean mask (1, S)": ({}, dict(attn_mask=random_mask(1, L))),
    "boolean mask (L, 1)": ({}, dict(attn_mask=torch.ones(L, 1, dtype=torch.bool))),
    "boolean mask (B, 1, 1, S)": ({}, dict(attn_mask=random_mask(B, 1, 1, L))),
    "boolean mask (H, L, S)": ({}, dict(attn_mask=random_mask(H, L, L))),
    "boolean mask (B, H, L, S)": (dict(S=20), dict(attn_mask=random_mask(B, H, L, 20))),
    "additive mask": ({}, dict(attn_mask=numbers(B, 1, L, L))),
    "additive mask, -inf": (
        {}, dict(attn_mask=torch.where(random_mask(B, 1, L, L), numbers(L, L), -torch.inf)),
    ),
    "additive mask, least number": (
        {}, dict(attn_mask=torch.zeros(L, L).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)),
    ),
    "additive mask with a gradient": ({}, dict(attn_mask=numbers(1, H, L, L).requires_grad_())),
    "additive mask (1, S) with a gradient": ({}, dict(attn_mask=numbers(1, L).requires_grad_())),
    "causal_upper_left": (dict(S=20), dict(attn_mask=causal_upper_left(L, 20))),
    "causal_lower_right": (dict(S=20), dict(attn_mask=causal_lower_right(L, 20))),
    "padding on the left": ({}, dict(attn_mask=padding("left") & CAUSAL)),
    "padding on the right": ({}, dict(attn_mask=padding("right") & CAUSAL)),
    "rows that see nothing": ({}, dict(attn_mask=BLIND)),
    "rows that see nothing, -inf": (
        {}, dict(attn_mask=torch.zeros(L, L).masked_fill(~BLIND, -torch.inf)),
    ),
    "one query": (dict(L=1), {}),
    "enable_gqa": (dict(heads=2), dict(is_causal=True, enable_gqa=True)),
    "enable_gqa, mask": (dict(heads=1), dict(attn_mask=random_mask(B, H, L, L), enable_gqa=True)),
    "enable_gqa, heads of values": (dict(heads=2, v_heads=1), dict(enable_gqa=True)),
    "values of another size": (dict(Dv=24), dict(is_causal=True)),
    "head size 72": (dict(D=72), dict(is_causal=True)),
    "head size 256": (dict(D=256), dict(is_causal=True)),
    "head size 260": (dict(D=260), dict(is_causal=True)),
    "scale": ({}, dict(scale=0.3, is_causal=True)),
    "negative scale": ({}, dict(scale=-0.3)),
    "two dimensions": (dict(lead=()), dict(attn_mask=CAUSAL)),
    "three dimensions": (dict(lead=(H,)), dict(attn_mask=random_mask(H, 1, L))),
    "five dimensions": (dict(lead=(3, B, H)), dict(attn_mask=random_mask(B, 1, L, L))),
    "leading dimensions that broadcast": (dict(k_lead=(1, H)), dict(is_causal=True)),
    "empty batch": (dict(lead=(0, H)), dict(is_causal=True)),
    "no keys": (dict(S=0), {}),
    "no queries": (dict(L=0), {}),
    "head size 0": (dict(D=0, Dv=24), dict(is_causal=True)),
}  # fmt: skip
cases = pytest.mark.parametrize("case", CASES)


def tensors(lead=(B, H), k_lead=None, heads=None, v_heads=None, L=L, S=None, D=D, Dv=None):
    g = torch.Generator().manual_seed(0)
    S, k_lead = L if S is None else S, lead if k_lead is None else k_lead
    k_lead = k_lead if heads is None else (*k_lead[:-1], heads)
    v_lead = k_lead if v_heads is None else (*k_lead[:-1], v_heads)
    shapes = (*lead, L, D), (*k_lead, S, D), (*v_lead, S, Dv or D)
    return [torch.randn(s, generator=g) for s in shapes]


def run(function, case, dtype, **extra):
    """Output and gradients, of a mask with a gradient as well."""
    shapes, how = CASES[case]
    leaves = [t.to(dtype).requires_grad_() for t in tensors(**shapes)]
    mask = how.get("attn_mask")
    if type(mask) is torch.Tensor and mask.is_floating_point():
        mask = mask.detach().to(dtype).requires_grad_(mask.requires_grad)
        leaves += [mask] if mask.requires_grad else []
    extra = extra | ({} if mask is None else {"attn_mask": mask})
    o = function(*leaves[:3], **how | extra)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@cases
def test_fp32_is_pytorchs(case):
    theirs = run(F.scaled_dot_product_attention, case, torch.float32)
    for a, b in zip(run(sdpa, case, torch.float32, policy="ALL_FP32"), theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)


@cases
def test_float64_is_pytorchs(case):
    theirs = run(F.scaled_dot_product_attention, case, torch.float64)
    for a, b in zip(run(sdpa, case, torch.float64), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@cases
def test_bf16_is_as_near_as_pytorchs(case):
    """To float64 on the same BF16 numbers, or within 1 ulp of BF16: for some masks PyTorch computes
    in FP32 and rounds the result alone, and SAFE rounds P and dS whatever the mask."""
    shapes, how = CASES[case]
    exact = run(on_doubles, case, torch.bfloat16)
    ours = run(sdpa, case, torch.bfloat16)
    theirs = run(F.scaled_dot_product_attention, case, torch.bfloat16)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16 and a.shape == b.shape
        if c.numel():
            error, of_theirs = ((x.double() - c.double()).norm() for x in (a, b))
            assert error <= 1.5 * of_theirs + 2.0**-8 * c.double().norm()


def on_doubles(*leaves, attn_mask=None, **how):
    if type(attn_mask) is torch.Tensor and attn_mask.is_floating_point():
        attn_mask = attn_mask.double()
    leaves = [t.double() for t in leaves]
    return F.scaled_dot_product_attention(*leaves, attn_mask=attn_mask, **how)


def test_a_bias_that_drowns_a_row_is_as_in_a_flash_kernel():
    """What the page says of it: L keeps m and loses log l, so each weight of that row is 1."""
    bias = torch.zeros(1, 1, L, L)
    bias[..., 3, :] = -1e9

    def gradients(function, dtype=torch.float32, **how):
        leaves = [t.to(dtype).requires_grad_() for t in tensors()]
        o = function(*leaves, attn_mask=bias.to(dtype), **how)
        return torch.autograd.grad(o, leaves, torch.ones_like(o) * numbers(D).to(dtype))

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = gradients(F.scaled_dot_product_attention)
    exact = gradients(sdpa, torch.float64)
    for a, b, c in zip(gradients(sdpa, policy="ALL_FP32"), theirs, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert (a - c).norm() > 0.1 * c.norm()


def test_derivatives_that_there_are_not():
    q, k, v = (t.requires_grad_() for t in tensors())
    (dq,) = torch.autograd.grad(sdpa(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: sdpa(x, k, v).sum())(q.detach())
    with pytest.raises(RuntimeError, match="inplace"):
        sdpa(q, k, v).mul_(2).sum().backward()


# Without a gradient


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_gradient_it_is_pytorchs_function(case, dtype, monkeypatch):
    """Where the forward of the policy is what that rounds; with impl named the call is ours."""
    calls, stock = [], F.scaled_dot_product_attention
    monkeypatch.setattr(NAME, lambda *a, **k: calls.append(1) or stock(*a, **k))
    shapes, how = CASES[case]
    inputs = [t.to(dtype) for t in tensors(**shapes)]
    policy = {torch.float32: "ALL_FP32", torch.bfloat16: "SAFE"}[dtype]
    if (mask := how.get("attn_mask")) is not None and mask.is_floating_point():
        how = how | dict(attn_mask=mask.to(dtype)) if type(mask) is torch.Tensor else how
    with torch.no_grad():
        fast, ours = (sdpa(*inputs, **how, policy=policy, impl=i) for i in ("auto", "emulate"))
    nothing = not fast.numel() or 0 in (shapes.get("S"), shapes.get("L"))
    assert len(calls) == (0 if nothing else 1)
    assert fast.shape == ours.shape and fast.dtype == ours.dtype
    step = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(fast, ours, rtol=step, atol=step)


@pytest.mark.parametrize(
    "how",
    [
        dict(policy="SAFE"), dict(policy="ALL_FP32+p=bf16"), dict(policy="ALL_FP32", dropout_p=0.1),
        dict(policy="ALL_FP32", scores=Scores(softcap=2.0)),
        dict(policy="ALL_FP32", scores=Scores(sinks=numbers(H))),
        dict(policy="ALL_FP32", scores=Scores(scale=0.3)),
        dict(policy="ALL_FP32", attn_mask=Mask(causal=True), scores=Scores(bias=numbers(L, L))),
        dict(policy="ALL_FP32", impl="emulate"),
    ],
    ids=str,
)  # fmt: skip
def test_other_forwards_are_ours_without_a_gradient_too(how, monkeypatch):
    monkeypatch.setattr(NAME, None)
    with torch.no_grad():
        sdpa(*tensors(), **how)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(causal=True), Mask(causal=True, window=3), Mask(dense=random_mask(L, L)),
        Mask(causal=True, documents=torch.tensor(5 * [0] + 7 * [1]).expand(B, L)),
        Mask(causal=True, offset=2), Mask(keys=torch.tensor([[0, 9], [2, 12]])),
    ],
    ids=str,
)  # fmt: skip
def test_masks_without_a_gradient_hide_the_same(mask):
    with torch.no_grad():
        fast, ours = (
            sdpa(*tensors(), mask, policy="ALL_FP32", impl=i) for i in ("auto", "emulate")
        )
    torch.testing.assert_close(fast, ours, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_one_query_with_a_mask_may_have_fewer_heads_of_keys_than_of_values():
    how = dict(attn_mask=random_mask(B, H, 1, 9), enable_gqa=True, policy="ALL_FP32")
    inputs = tensors(L=1, S=9, heads=2, v_heads=4)
    fast, ours = (sdpa(*inputs, **how, impl=i) for i in ("auto", "emulate"))
    torch.testing.assert_close(fast, ours, rtol=1e-5, atol=1e-5)


def test_a_bias_in_scores_without_a_gradient():
    bias = numbers(L)
    with torch.no_grad():
        fast, ours = (
            sdpa(*tensors(), scores=Scores(bias=bias), policy="ALL_FP32", impl=i)
            for i in ("auto", "emulate")
        )
        torch.testing.assert_close(fast, ours, rtol=1e-5, atol=1e-5)
        with pytest.raises(UserError, match="broadcast"):
            sdpa(*tensors(), scores=Scores(bias=numbers(L + 1, L)), policy="ALL_FP32")


def test_autocast_decides_before_pytorch_is_asked(monkeypatch):
    """ALL_FP32 on FP32 tensors under BF16: PyTorch's function would round P."""
    asked, stock = [], F.scaled_dot_product_attention
    monkeypatch.setattr(NAME, lambda *a, **k: asked.append(a[0].dtype) or stock(*a, **k))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        sdpa(*tensors(), policy="ALL_FP32")
        assert asked == []
        sdpa(*tensors())
    assert asked == [torch.bfloat16]


def test_a_causal_bias_stays_one_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        o = sdpa(*tensors(), attn_mask=causal_lower_right(L, L))
        assert torch.equal(o, sdpa(*tensors(), is_causal=True))


def test_a_mask_that_needs_a_gradient_is_asked_about(monkeypatch):
    monkeypatch.setattr(NAME, None)
    mask = torch.zeros(L, L, requires_grad=True)
    sdpa(*tensors(), attn_mask=mask, policy="ALL_FP32").sum().backward()
    assert mask.grad.shape == mask.shape


def test_the_fields_of_the_backward_are_those_that_leave_the_output_alone():
    from lowprec.attention.reference import emulate
    from lowprec.numerics.policy import FIELDS, LOW, SITES

    inputs = tensors(L=32, S=32)
    changes = dict.fromkeys(SITES, "e8m3") | dict(
        l_from="p_rounded", shift="offset(amplitude=0.3)", l_floor=40.0, delta_from="dp",
        delta_bias=0.5, row_sum="removed", inputs="e4m3_saturate@tensor,pow2",
    )  # fmt: skip
    assert set(changes) == set(FIELDS)
    plain = emulate(*inputs, LOW).o
    same = {
        x for x in FIELDS if torch.equal(emulate(*inputs, LOW.replace(**{x: changes[x]})).o, plain)
    }
    assert same == set(drop_in.BACKWARD)


# The page


def ran_on_a_gpu(case, monkeypatch):
    """What would run there, were the tensors on one."""
    ran = []

    def run_nothing(q, k, v, *how):
        ran.append(how[5])
        return (q.new_zeros(*q.shape[:3], v.shape[3]),)

    monkeypatch.setattr(operator, "resolve_impl", lambda impl, device: "triton")
    monkeypatch.setattr(operator, "attention_op", run_nothing)
    shapes, how = CASES[case]
    with warnings.catch_warnings(action="ignore"):
        sdpa(*(t.bfloat16().requires_grad_() for t in tensors(**shapes)), **how)
    return {("triton",): "kernels", ("emulate",): "emulated", (): "nothing to compute"}[tuple(ran)]


@cases
def test_the_page_has_each_case_and_what_runs_on_a_gpu(case, monkeypatch):
    pytest.importorskip("triton")
    rows = re.findall(
        r"^\| `(.+?)` \| (kernels|emulated|nothing to compute) \|$", PAGE.read_text(), re.M
    )
    assert [name for name, _ in rows] == list(CASES)
    assert dict(rows)[case] == ran_on_a_gpu(case, monkeypatch)


def test_under_vmap_the_backward_is_that_of_the_policy():
    q, k, v, do = torch.randn(4, 2, B, L, D, dtype=torch.bfloat16).unsqueeze(3)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def gradients(function):
        return torch.autograd.grad(function(*leaves), leaves, do)

    def one(*qkv):
        return sdpa(*qkv, is_causal=True, policy="FA2+delta_from=dp")

    for mine, theirs in zip(gradients(torch.vmap(one)), gradients(one_by_one(one)), strict=True):
        assert torch.equal(mine, theirs)


def one_by_one(function):
    return lambda *all: torch.stack([function(*some) for some in zip(*all, strict=True)])


def test_a_scale_that_asks_for_a_gradient_is_refused():
    q = torch.randn(B, H, L, D, requires_grad=True)
    with pytest.raises(UserError, match="scale is a number"):
        sdpa(q, q, q, scale=torch.nn.Parameter(torch.tensor(0.3)))


def test_an_output_lies_as_pytorchs_does():
    q = torch.randn(B, L, H, D, requires_grad=True).transpose(1, 2)
    assert (
        sdpa(q, q, q, policy="ALL_FP32").stride()
        == F.scaled_dot_product_attention(q, q, q).stride()
    )


def test_mistakes_are_named_whatever_needs_a_gradient():
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(UserError, match="scale is a number and gets no gradient"):
        sdpa(q, q, q, policy="ALL_FP32", scale=torch.tensor(0.3, requires_grad=True))
    for how, what in ((dict(seed=1.5), "seed=1.5"), (dict(tile=True), "tile=True")):
        with pytest.raises(UserError, match=what):
            operator.attention(q, q, q, **how)
    short, bias = q[:, :, :3].requires_grad_(), Scores(bias=torch.tensor(0.5))
    o = sdpa(short, q, q, is_causal=True, policy="ALL_FP32", scores=bias)
    torch.testing.assert_close(o, sdpa(short, q, q, is_causal=True, policy="ALL_FP32"))


@pytest.mark.parametrize("policy", ["FA2", "ALL_FP32"])
def test_forward_mode_derivatives_are_refused(policy):
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(UserError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: operator.attention(x, q, q, policy).sum(), (q,), (q,))
    table = rotary.rotation(4, 16)
    with pytest.raises(UserError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: rotary.rotate(x, table, how="BF16"), (q,), (q,))


def test_pytorchs_own_kernel_gives_the_dtype_of_q_under_autocast():
    q = torch.randn(1, 2, 4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        o = operator.attention(q, q, q, impl="sdpa")
    assert torch.equal(o, F.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_gradcheck_passes_with_gradients_that_are_not_there():
    q = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: sdpa(t, t, t, policy="ALL_FP32"), (q,))


def test_values_of_size_0_give_an_output_of_size_0():
    q, k, v = (x.requires_grad_() for x in tensors())
    o = sdpa(q, k, v[..., :0], policy="ALL_FP32")
    assert o.shape == (B, H, L, 0)
    assert not torch.autograd.grad(o.sum(), q)[0].any()


def test_an_additive_mask_leaves_the_other_scores():
    bias, how = numbers(L, L), dict(policy="ALL_FP32")
    o = sdpa(*tensors(), attn_mask=bias, scores=Scores(softcap=0.5), **how)
    assert torch.equal(o, sdpa(*tensors(), scores=Scores(softcap=0.5, bias=bias), **how))
