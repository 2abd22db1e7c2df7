"""Heads of queries that share keys: as with a copy of the keys for each, and no copy is made.

What a head of queries gives is bitwise what it gives with copies. The gradient of a shared key is
the sum of the copies' in FP32, rounded once.
"""

import pytest
import torch
from conftest import family
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

pytest.importorskip("triton")
from kernel_checks import DEVICES, beyond_bounds, every, run, shared

from lowprec import UserError, sdpa
from lowprec.attention import attention
from lowprec.attention.inputs import for_queries
from lowprec.attention.kernels import launch
from lowprec.attention.ops import flash_backward
from lowprec.attention.reference import emulate, oracle
from lowprec.diagnose.directions import head_cosines
from lowprec.numerics.formats import Format, round_to
from lowprec.numerics.policy import ALL_FP32, FA2, LOW, RELEASED, SAFE
from lowprec.studies import curvature, deviation, landscape, overflow, published, silence
from lowprec.training import capture
from lowprec.training.model import GPT, GPTConfig

# NumPy, which is behind the interpreter, remarks on every infinity and NaN that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = [
    (ALL_FP32, None), (FA2, None), (SAFE, None), (LOW, None), (RELEASED, None), (RELEASED, 32),
    *((FA2.replace(row_sum=x), None) for x in ("removed", "refined")),
    (LOW.replace(l_from="p_both"), 64),
    (RELEASED.replace(row_sum="refined"), 32), (LOW.replace(delta_from="dp"), None),
    (SAFE.replace(delta_bias=-2.0), None), (LOW.replace(delta_from="o_redrawn"), 64),
    (ALL_FP32.replace(dkdv_acc="e8m3:stochastic"), None),
    (ALL_FP32.replace(dkdv_acc="e8m3:stochastic"), 32),
    (every("bf16:stochastic").replace(shift="dither(amplitude=0.5)"), 64),
]  # fmt: skip
cases = pytest.mark.parametrize("policy,tile", CASES, ids=str)
HEADS = pytest.mark.parametrize("heads", [2, 1])
OF_QUERIES = ("o", "o_fp32", "lse", "ties", "delta", "delta_o", "delta_ref", "dq")


def inputs_of(heads, name="tied", n=70, device="cpu", batch=2, of=4, **how):
    """q and do of 4 heads, k and v of fewer."""
    return shared(family(name, (batch, of, n, 32), device=device, **how), heads)


def with_copies(q, k, v, do):
    return q, *(for_queries(x, q.shape[1]) for x in (k, v)), do


# Reference


@HEADS
@pytest.mark.parametrize("causal", [True, False])
def test_the_oracle_is_attention_with_shared_keys(heads, causal):
    q, k, v, do = inputs_of(heads, "normal", dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    wanted = [o, *torch.autograd.grad(o, leaves, do)]
    t = oracle(q, k, v, causal, do=do)
    for got, exact in zip((t.o, t.dq, t.dk, t.dv), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


@HEADS
@pytest.mark.parametrize("tile", [None, 40])
def test_with_nothing_rounded_the_emulation_is_float64_to_fp32_s_accuracy(heads, tile):
    q, k, v, do = inputs_of(heads, "normal", dtype=torch.float32)
    t, exact = emulate(q, k, v, ALL_FP32, tile, do), oracle(q, k, v, do=do)
    for name in ("o", "dq", "dk", "dv"):
        got, wanted = getattr(t, name), getattr(exact, name)
        assert got.shape == wanted.shape
        assert (got - wanted).norm() < 1e-6 * wanted.norm(), name


@HEADS
@cases
def test_heads_of_queries_are_emulated_as_with_copies(policy, tile, heads):
    """Bit by bit, random words included."""
    inputs = inputs_of(heads)
    t, copies = (emulate(*x[:3], policy, tile, x[3], seed=3)
                 for x in (inputs, with_copies(*inputs)))  # fmt: skip
    for name in vars(copies).keys() - {"dk", "dv"}:
        assert torch.equal(getattr(t, name), getattr(copies, name)), name


@HEADS
def test_the_gradient_of_a_shared_key_is_an_fp32_sum_rounded_once(heads):
    """In the order of the heads, also where the copies' would be rounded before they are added."""
    q, k, v, do = inputs_of(heads)
    t = emulate(q, k, v, LOW, do=do, scale=0.125)
    wide = [x.float() for x in with_copies(q, k, v, do)]
    copies = emulate(*wide[:3], LOW, do=wide[3], scale=0.125)
    for got, parts in ((t.dk, copies.dk), (t.dv, copies.dv)):
        first, *others = parts.unflatten(1, (heads, -1)).unbind(2)
        assert torch.equal(got, sum(others, first).to(q.dtype))
        rounded = parts.to(q.dtype).unflatten(1, (heads, -1)).unbind(2)
        assert not torch.equal(got, sum(rounded[1:], rounded[0]))


def test_a_block_of_the_accumulator_is_of_one_head():
    """The whole row is one block for each head, as a tile is that is longer than any."""
    q, k, v, do = inputs_of(1)
    policy = ALL_FP32.replace(dkdv_acc="e8m3")
    whole, long = (emulate(q, k, v, policy, tile, do) for tile in (None, 256))
    parts = emulate(*with_copies(q, k, v, do)[:3], ALL_FP32, do=do)
    assert torch.equal(whole.dk, long.dk) and torch.equal(whole.dv, long.dv)
    once = emulate(q, k, v, ALL_FP32, do=do).dv.float()
    fmt, acc = Format.parse("e8m3"), 0.0
    for part in parts.p_bwd.mT.matmul(do.float()).unbind(1):
        acc = round_to(acc + round_to(part, fmt), fmt)
    assert torch.equal(whole.dv[:, 0].float(), acc)
    assert not torch.equal(acc, round_to(once[:, 0], fmt))


# Kernels


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "policy,tile,heads",
    [*((*case, 2) for case in CASES), (SAFE, None, 1), (RELEASED, 32, 1)],
    ids=str,
)
def test_kernels_equal_the_emulation(policy, tile, heads, device):
    inputs = inputs_of(heads, device=device, batch=1)
    got = run(*inputs, policy, tile, seed=3)
    assert got.dk.shape == got.dv.shape == inputs[1].shape
    assert beyond_bounds(got, inputs, policy, tile, seed=3) == []
    copies = run(*with_copies(*inputs), policy, tile, seed=3)
    for name in (*OF_QUERIES, "sums"):
        assert torch.equal(getattr(got, name), getattr(copies, name)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("policy,tile", [(FA2, None), (RELEASED, 64)], ids=str)
def test_rows_beyond_one_hardware_block(policy, tile, causal, device):
    inputs = inputs_of(1, "normal", n=150, device=device, batch=1, of=2)
    got = run(*inputs, policy, tile, causal)
    assert beyond_bounds(got, inputs, policy, tile, causal) == []


@pytest.mark.parametrize("device", DEVICES)
def test_each_sequence_has_its_own_keys_and_a_call_repeats_bit_by_bit(device):
    n = 500 if device == "cuda" else 30
    inputs, policy = inputs_of(2, n=n, device=device), every("bf16:stochastic")
    got, again = (run(*inputs, policy, seed=3) for _ in range(2))
    assert beyond_bounds(got, inputs, policy, seed=3) == []
    assert all(torch.equal(x, getattr(again, name)) for name, x in vars(got).items())


@pytest.mark.parametrize("device", DEVICES)
def test_the_bounds_notice_keys_of_another_head(device):
    q, k, v, do = inputs_of(2, device=device, batch=1)
    got = run(q, k, v, do, LOW)
    wrong = beyond_bounds(got, (q, k.flip(1), v.flip(1), do), LOW)
    assert {sentence.partition(":")[0] for sentence in wrong} >= {"o", "dq", "dk", "dv"}
    got.dk, got.dv = got.dk.flip(1), got.dv.flip(1)
    wrong = beyond_bounds(got, (q, k, v, do), LOW)
    assert {sentence.partition(":")[0] for sentence in wrong} == {"dk", "dv"}


@pytest.mark.skipif(launch.NATIVE, reason="needs TRITON_INTERPRET=1")
def test_no_output_of_the_kernels_has_a_copy_for_each_head(monkeypatch):
    """Of tensors with rows of D numbers a step has o, its FP32 shadow and dq for each head of
    queries, and dk and dv for each of keys."""
    empty, made = torch.empty, []

    def noted(*shape, **how):
        made.append(shape)
        return empty(*shape, **how)

    monkeypatch.setattr(launch.torch, "empty", noted)
    run(*inputs_of(1, n=16), SAFE)
    of_rows = sorted(shape for shape in made if shape[-1] == 32)
    assert of_rows == [(2, 16, 1, 32)] * 2 + [(2, 16, 4, 32)] * 4  # o and as the policy stores it


# Operator


def gradients(inputs, function, **how):
    """o, dq, dk, dv."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    o = function(*leaves, **how)
    return o.detach(), *torch.autograd.grad(o, leaves, inputs[3].to(o.dtype))


IMPLS = ("oracle", "emulate", "triton", "sdpa", "sdpa_forward", "sdpa_backward")


@HEADS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_shares_keys(impl, heads, device):
    inputs = inputs_of(heads, "normal", device=device)
    exact = gradients([x.double() for x in inputs], attention, impl="oracle")
    assert [x.shape[1] for x in exact] == [4, 4, heads, heads]
    for got, wanted in zip(gradients(inputs, attention, impl=impl), exact, strict=True):
        assert got.shape == wanted.shape and (got - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("impl", ["emulate", "triton"])
def test_eight_copies_summed_in_bf16_are_further_from_float64(impl):
    """What a sum inside gains: a rounding for each copy and one for each that is added."""
    x = family("normal", (2, 8, 64, 32))
    inputs = shared(x, 1)
    exact = oracle(*inputs[:3], do=inputs[3])
    inside = gradients(inputs, attention, impl=impl)

    def copied(q, k, v):
        return attention(q, *(y.expand(-1, 8, -1, -1) for y in (k, v)), impl=impl)

    outside = gradients(inputs, copied)
    assert torch.equal(inside[0], outside[0]) and torch.equal(inside[1], outside[1])
    for a, b, wanted in zip(inside[2:], outside[2:], (exact.dk, exact.dv), strict=True):
        assert (a - wanted).norm() < 0.9 * (b - wanted).norm()


@pytest.mark.parametrize("impl", ["emulate", "triton", "sdpa"])
@HEADS
def test_what_is_kept_for_the_backward_has_the_heads_of_the_keys(impl, heads):
    q, k, v, _ = (x.requires_grad_() for x in inputs_of(heads))
    kept = []

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o = attention(q, k, v, impl=impl)
    for x in (k, v):
        assert any(y.data_ptr() == x.data_ptr() and y.shape == x.shape for y in kept)
    as_queries = {y.data_ptr() for y in kept if y.shape == q.shape}
    assert as_queries == {q.data_ptr(), o.data_ptr()}


@pytest.mark.parametrize("impl", ["emulate", "triton", "sdpa_forward", "sdpa_backward"])
def test_the_operator_is_well_formed(impl):
    leaves = [x.requires_grad_() for x in inputs_of(2, n=32)[:3]]
    probe = torch.zeros(4, 3, requires_grad=True)
    policy = "FA2" if impl.startswith("sdpa") else "LOW"
    torch.library.opcheck(
        torch.ops.lowprec.attention.default,
        (*leaves, probe, policy, True, 0.2, 0, impl, 0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_the_backward_of_pytorch_is_called_as_a_gpu_wants_it():
    with FakeTensorMode():
        q, k, v, o, do = (
            torch.empty(1, 64, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for heads in (4, 2, 2, 4, 4)
        )
        grads = flash_backward(do, q, k, v, o, causal=True, scale=0.1)
        assert [x.shape[1] for x in grads] == [4, 2, 2]


@pytest.mark.parametrize("call", [attention, published.forward, deviation.baseline])
def test_heads_that_do_not_divide_are_refused(call):
    q, k, v, _ = shared(family("normal", (1, 3, 8, 16)), 2)
    words = "2 heads of keys and values must divide the 3 heads of queries"
    extra = () if call is not deviation.baseline else ("FA2",)
    with pytest.raises(UserError, match=words if call is attention else "k and v alike; got"):
        call(q, k, v, *extra)


@pytest.mark.parametrize("causal", [True, False])
def test_the_drop_in_hands_shared_keys_on(causal):
    """Bit by bit what attention gives, with gradients of the heads of keys."""
    inputs = inputs_of(2)
    ours = gradients(inputs, sdpa, is_causal=causal, enable_gqa=True)
    wanted = gradients(inputs, attention, policy=SAFE, causal=causal)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


# Models


SMALL = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=64)


def pair(heads, **changes):
    """A model of shared keys, and the usual one whose weights are copies for each head."""
    models = []
    for n_kv_head in (heads, None):
        torch.manual_seed(0)
        models.append(GPT(GPTConfig(**SMALL | changes, n_kv_head=n_kv_head)))
    few, copies = models
    with torch.no_grad():
        for block in few.blocks:
            block.qkv.weight *= 8
        state = few.state_dict()
        for i, block in enumerate(few.blocks):
            q, k, v = few.config.by_head(block.qkv.weight)
            k, v = (x.repeat_interleave(4 // heads, 0) for x in (k, v))
            state[f"blocks.{i}.qkv.weight"] = torch.cat([q, k, v]).flatten(0, 1)
        copies.load_state_dict(state)
    return few, copies


def batch():
    return torch.randint(64, (2, 3, 24), generator=torch.Generator().manual_seed(1)).unbind()


@HEADS
@pytest.mark.parametrize(
    "layers", [{}, {"1/0,3": "ALL_FP32", "0/1": "FA2"}], ids=["alike", "policies by head"]
)
def test_a_model_is_that_with_copied_weights(heads, layers):
    few, copies = pair(heads, policy="LOW", layers=layers, positions="rotary")
    losses = [model(*batch()) for model in (few, copies)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(few.blocks, copies.blocks, strict=True):
        q, *shared_keys = few.config.by_head(ours.qkv.weight.grad)
        wanted_q, *of_copies = copies.config.by_head(theirs.qkv.weight.grad)
        assert (q - wanted_q).norm() < 1e-3 * wanted_q.norm()
        for got, parts in zip(shared_keys, of_copies, strict=True):
            wanted = parts.unflatten(0, (heads, -1)).sum(1)
            assert (got - wanted).norm() < 1e-3 * wanted.norm()


@HEADS
def test_a_model_keeps_its_keys_once(heads):
    """Of (B, H, T, D) its attention keeps q and o for each head of queries."""
    few, _ = pair(heads, positions="rotary")
    kept = {}

    def keep(x):
        if x.dim() == 4:
            kept[x.data_ptr()] = x  # which holds on to it, so that no other takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        few(*batch())
    shapes = [tuple(x.shape) for x in kept.values()]
    assert shapes.count((3, 4, 24, 8)) == shapes.count((3, heads, 24, 8)) == 2 * SMALL["n_layer"]


@HEADS
def test_studies_read_of_shared_keys_what_they_read_of_copies(heads):
    few, copies = pair(heads, policy="LOW", layers={"0/1": "FA2"})
    x, y = batch()
    observed = [capture.observe(model, x, y, amp=False) for model in (few, copies)]
    assert observed[0][1].k.shape == (3, heads, 24, 8) and len(observed[0][0].groups) == 2
    assert capture.suspect(observed[0]) == capture.suspect(observed[1])
    for s, c in zip(*(o.values() for o in observed), strict=True):
        ours, theirs = map(capture.query_bias, (s, c))
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()
    for study in (silence.count, overflow.largest):
        ours, theirs = (study(model, x, y, amp=False) for model in (few, copies))
        for column in ours.select_dtypes("number"):
            assert ours[column].to_numpy() == pytest.approx(theirs[column].to_numpy(), rel=1e-3)
    ours, theirs = (landscape.mean_r(model, x, 1) for model in (few, copies))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    ours, theirs = (curvature.site_errors(model, x, [FA2, LOW]) for model in (few, copies))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for model in (few, copies):
        model.requires_grad_(False)
    ours, theirs = (head_cosines(model, x[0]) for model in (few, copies))
    torch.testing.assert_close(*(torch.tensor(t.to_numpy()) for t in (ours, theirs)))
