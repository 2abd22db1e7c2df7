"""Row sums of dS out of dQ from outside a kernel: by a channel of ones, and by centred keys."""

import functools
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import family
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowprec import UserError
from lowprec.attention import attention
from lowprec.attention.outside import centred, row_sums_out
from lowprec.attention.reference import emulate, oracle
from lowprec.diagnose import contenders
from lowprec.numerics.policy import FA2, LOW, PrecisionPolicy

REMOVED = dict(row_sum="removed")


@pytest.mark.parametrize("vector", ["mean key", "weighted key"])
def test_in_float64_the_gradient_is_that_of_the_kernel(vector):
    q, k, v = (x.double().requires_grad_() for x in family("normal", (1, 1, 5, 4))[:3])
    kernel = scaled_dot_product_attention
    assert torch.autograd.gradcheck(lambda *x: row_sums_out(kernel, *x, vector=vector), (q, k, v))
    w = torch.ones(1, 1, 5, 4).double()
    ours, plain = (
        torch.autograd.grad(o, (q, k, v), w)
        for o in (row_sums_out(kernel, q, k, v, vector=vector), kernel(q, k, v))
    )
    assert max((a - b).abs().max() for a, b in zip(ours, plain, strict=True)) < 1e-14


def inputs(dtype=torch.float32, shape=(2, 2, 96, 32), common=10.0):
    """Keys with a large common part; numbers that BF16 holds."""
    q, k, v, do = (x.float() for x in family("normal", shape))
    k = k + common * torch.randn(shape[-1], generator=torch.Generator().manual_seed(1))
    return [x.bfloat16().to(dtype) for x in (q, k, v, do)]


def gradients(function, q, k, v, do):
    """(o, dq, dk, dv) of a function of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = function(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def ours(policy, impl="emulate"):
    def kernel(q, k, v, scale):
        return attention(q, k, v, policy, scale=scale, impl=impl)

    return kernel


def flash(q, k, v, **how):
    """PyTorch's flash kernel, somebody else's: on a CPU, too."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, **how)


def error(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("policy", [FA2, LOW, FA2.replace(ds="e8m4")], ids=str)
def test_a_channel_of_ones_holds_the_row_sums_and_changes_nothing_else(policy):
    """All in FP32 tensors, where dQ is not rounded when it is stored."""
    q, k, v, do = inputs()
    t = emulate(q, k, v, policy, do=do)
    seen = {}

    def kernel(wide_q, wide_k, wide_v, scale):
        for name, x in (("q", wide_q), ("k", wide_k), ("v", wide_v)):
            x.register_hook(functools.partial(seen.__setitem__, name))
        return attention(wide_q, wide_k, wide_v, policy, scale=scale, impl="emulate")

    o, dq, dk, dv = gradients(functools.partial(row_sums_out, kernel), q, k, v, do)
    assert torch.equal(o, t.o) and seen["k"][..., 32:].count_nonzero() == 0
    scale = 32**-0.5
    torch.testing.assert_close(seen["q"][..., 32], scale * t.row_sum, rtol=1e-5, atol=1e-7)
    near = dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dk, t.dk, **near)
    torch.testing.assert_close(dv, t.dv, **near)
    wanted = emulate(q, k, v, policy.replace(**REMOVED), do=do).dq
    torch.testing.assert_close(dq, wanted, rtol=1e-5, atol=2e-5 * wanted.abs().max().item())
    assert error(dq, wanted.double()) < 1e-5 < error(t.dq, wanted.double())


def test_the_weighted_key_is_the_one_of_the_row():
    q, k, v, do = inputs()
    policy = FA2.replace(p="fp32", o="fp32", delta_from="o", dodo="e8m5")
    t = emulate(q, k, v, policy, do=do)
    taken = 32**-0.5 * t.row_sum[..., None] * oracle(q, k, k).o
    got = gradients(
        functools.partial(row_sums_out, ours(policy), vector="weighted key"), q, k, v, do
    )
    torch.testing.assert_close(got[0], t.o, rtol=1e-5, atol=1e-5)
    assert error(got[1], t.dq - taken) < 1e-5 < 0.01 < error(t.dq, t.dq - taken)
    torch.testing.assert_close(got[2], t.dk, rtol=1e-5, atol=1e-5)


def test_our_kernels_give_up_their_row_sums_too():
    """Through the interpreter, in BF16, with the width that they take."""
    pytest.importorskip("triton")
    from lowprec.attention.kernels import launch

    if launch.NATIVE:
        pytest.skip("needs TRITON_INTERPRET=1")
    q, k, v, do = inputs(torch.bfloat16, (1, 1, 96, 16))
    way = functools.partial(row_sums_out, ours(FA2, "triton"), width=32)
    o, dq, dk, dv = gradients(way, q, k, v, do)
    plain = gradients(functools.partial(ours(FA2, "triton"), scale=0.25), q, k, v, do)
    wanted = gradients(
        functools.partial(ours(FA2.replace(**REMOVED), "triton"), scale=0.25), q, k, v, do
    )
    assert torch.equal(o, plain[0]) and torch.equal(dk, plain[2]) and torch.equal(dv, plain[3])
    ulps = 2.0**-8 * (plain[1].float().abs() + wanted[1].float().abs())
    mean = k.float().mean(2, keepdim=True).abs()
    r = (plain[1].float() - wanted[1].float()).abs().amax(-1, keepdim=True) / mean.amax(-1, True)
    assert ((dq.float() - wanted[1].float()).abs() <= ulps + 2.0**-8 * r * mean).all()
    right = oracle(q, k, v, do=do).dq
    assert error(dq, right) < 0.2 * error(plain[1], right)


@pytest.mark.parametrize("vector", ["mean key", "weighted key"])
def test_somebody_elses_kernel(vector):
    q, k, v, do = inputs(torch.bfloat16, (1, 2, 128, 64))
    how = dict(is_causal=True)
    right = oracle(q, k, v, do=do)
    plain = gradients(functools.partial(flash, **how), q, k, v, do)
    got = gradients(functools.partial(row_sums_out, flash, vector=vector, **how), q, k, v, do)
    assert error(got[1], right.dq) < 0.2 * error(plain[1], right.dq)
    for i, name in ((0, "o"), (2, "dk"), (3, "dv")):
        assert error(got[i], plain[i].double()) < 2e-3, name


def test_a_kernel_that_adds_dq_up_in_few_bits_needs_centred_keys():
    q, k, v, do = inputs()
    right = oracle(q, k, v, do=do).dq
    left = {}
    for site in ("fp32", "bf16"):
        policy = FA2.replace(dq_acc=site)

        def kernel(q, k, v, scale, policy=policy):
            return attention(q, k, v, policy, scale=scale, tile=32, impl="emulate")

        for name, change in (("given", lambda k: k), ("centred", centred)):
            keys = change(k)
            found = gradients(functools.partial(row_sums_out, kernel), q, keys, v, do)[1]
            left[site, name] = error(found, right)
    assert left["bf16", "given"] > 5 * left["fp32", "given"]
    assert left["bf16", "centred"] < 2 * left["fp32", "centred"]


def test_torch_compile_keeps_it_in_one_graph():
    q, k, v, do = inputs(torch.bfloat16, (1, 2, 64, 32))
    way = functools.partial(row_sums_out, scaled_dot_product_attention, is_causal=True)
    compiled = torch.compile(way, backend="aot_eager", fullgraph=True)
    wanted = gradients(way, q, k, v, do)
    for got, one in zip(gradients(compiled, q, k, v, do), wanted, strict=True):
        assert torch.equal(got, one)


def test_heads_that_share_keys_and_tokens_before_heads():
    q, k, v, do = inputs(torch.float32, (1, 6, 64, 32))
    k, v = (x[:, ::3] for x in (k, v))
    how = dict(is_causal=True, enable_gqa=True)

    def turned(q, k, v, **how):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

    here = gradients(
        functools.partial(row_sums_out, scaled_dot_product_attention, **how), q, k, v, do
    )
    plain = gradients(functools.partial(scaled_dot_product_attention, **how), q, k, v, do)
    there = gradients(
        functools.partial(row_sums_out, turned, tokens=-3, **how),
        *(x.transpose(1, 2) for x in (q, k, v, do)),
    )
    for a, b, c in zip(here, plain, there, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(c.transpose(1, 2), a, rtol=1e-4, atol=1e-4)


def test_the_channels_that_the_kernel_gets():
    widths = []

    def kernel(q, k, v, scale):
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1], scale))
        return scaled_dot_product_attention(q, k, v, scale=scale)

    q, k, v, _ = inputs()
    for how in ({}, dict(vector="weighted key"), dict(width=48, scale=0.1)):
        assert row_sums_out(kernel, q, k, v, **how).shape == v.shape
    assert widths == [(40, 40, 40, 32**-0.5), (64, 64, 64, 32**-0.5), (48, 48, 48, 0.1)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(vector="mean"), "is not one of mean key, weighted key"),
        (dict(width=32), "width=32 is too small for 33 channels"),
    ],
)
def test_what_cannot_be_taken_is_one_sentence(how, message):
    q, k, v, _ = inputs()
    with pytest.raises(UserError, match=message):
        row_sums_out(scaled_dot_product_attention, q, k, v, **how)
    with pytest.raises(UserError, match="3 heads of queries are no multiple of 2 of keys"):
        row_sums_out(scaled_dot_product_attention, torch.cat([q, q[:, :1]], 1), k, v)


def test_centred_keys_give_the_same_attention_and_a_dk_without_a_mean():
    q, k, v, do = (x.double() for x in inputs())
    exact = functools.partial(scaled_dot_product_attention, is_causal=True)
    plain = gradients(exact, q, k, v, do)
    got = gradients(lambda q, k, v: exact(q, centred(k), v), q, k, v, do)
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    k = k.bfloat16()
    assert centred(k).dtype == k.dtype and centred(k.transpose(1, 2), -3).shape[1] == 96
    assert centred(k).double().mean(-2).abs().max() < 1e-2 * k.double().mean(-2).abs().max()
    some = [x.bfloat16() for x in (q, k, v, do)]
    policy = PrecisionPolicy.parse("FA2")
    of_centred = gradients(
        lambda q, k, v: attention(q, centred(k), v, policy, impl="emulate"), *some
    )
    before = gradients(lambda q, k, v: attention(q, k, v, policy, impl="emulate"), *some)
    assert error(of_centred[1], plain[1]) < 0.5 * error(before[1], plain[1])
    assert of_centred[2].double().mean(-2).norm() < before[2].double().mean(-2).norm()


def test_the_page_for_people_who_write_kernels_runs(tmp_path, monkeypatch):
    """Its loop is dQ of the policy and the delta that dK takes; what it says of a capture holds;
    what it keeps of a training step is what attention got."""
    x = torch.randn(3, 2, 16, 3, 8, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    given, first = x.clone().requires_grad_(), []

    def training_step():
        for layer in range(2):
            qkv = first * 3 if layer else given
            o = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
            o.retain_grad()
            first.append(o)
        o.square().sum().backward()

    monkeypatch.setattr(
        safetensors.torch, "save_file",
        lambda tensors, name: save_file(tensors, tmp_path / name),
    )  # fmt: skip
    page = (Path(__file__).resolve().parent.parent / "book" / "write_kernels.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names = {"training_step": training_step}
    for block in blocks:
        exec(block, names)
    mine = contenders.read(tmp_path / "mine.safetensors", causal=True)
    assert torch.equal(torch.stack([mine.q, mine.k, mine.v]), x)
    assert torch.equal(mine.do, first[0].grad)
    assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
    q, k, v, do = (x[0, 0] for x in inputs(shape=(1, 1, 160, 32)))
    rows = slice(96, 160)
    for value in ("removed", "refined"):
        t = emulate(*(x[None, None] for x in (q, k, v)), FA2.replace(row_sum=value),
                    do=do[None, None])  # fmt: skip
        lse, delta = (x[0, 0, rows] for x in (t.lse, t.delta))
        dq, delta_dk = names["dq_of_rows"](
            q[rows], k, v, do[rows], lse, delta, 32**-0.5, 96, value == "refined"
        )
        assert error(dq, t.dq[0, 0, rows].double()) < 1e-3
        torch.testing.assert_close(delta_dk, delta + t.row_sum[0, 0, rows], rtol=1e-3, atol=1e-4)
    assert names["error_of_dq"](scaled_dot_product_attention) > 0.1
    assert names["error_of_dq"](names["around"]) < 0.01


def test_row_sums_go_out_in_fp32_and_are_rounded_once():
    q, k, v, do = family("tied", (1, 2, 32, 16))
    wide = torch.randn(1, 2, 32, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    q.requires_grad_()
    o = row_sums_out(lambda q, k, v, scale: (q * wide).sum(-1, keepdim=True) + 0 * v, q, k, v)
    (dq,) = torch.autograd.grad(o[..., :1].float().sum(), q)
    mean = k.float().mean(-2, keepdim=True)
    assert torch.equal(dq, (wide[..., :16].float() - wide[..., 16:17].float() * mean).bfloat16())


def test_centred_keys_are_rounded_once():
    k = family("tied", (1, 2, 96, 16))[1]
    wanted = (k.double() - k.double().mean(-2, keepdim=True)).bfloat16()
    assert (centred(k) != wanted).double().mean() < 0.01
