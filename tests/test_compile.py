"""The drop-in under torch.compile, torch.export and checkpointing: one graph, and the same bits."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lowprec import sdpa
from lowprec.attention import attention
from lowprec.attention.masks import Mask, Scores
from lowprec.numerics.policy import FA2, LOW

REFINED = FA2.replace(row_sum="refined")
WINDOW = Mask(causal=True, window=5)
CAP = Scores(softcap=3.0)

CALLS = {
    "is_causal": lambda q, k, v, m: sdpa(q, k, v, is_causal=True),
    "mask": lambda q, k, v, m: sdpa(q, k, v, m),
    "additive": lambda q, k, v, m: sdpa(q, k, v, torch.where(m, 0.0, -torch.inf)),
    "policy": lambda q, k, v, m: sdpa(q, k, v, is_causal=True, policy=REFINED),
    "policy as text": lambda q, k, v, m: sdpa(q, k, v, policy="LOW+delta_from=dp"),
    "window": lambda q, k, v, m: sdpa(q, k, v, WINDOW),
    "soft cap": lambda q, k, v, m: sdpa(q, k, v, is_causal=True, scores=CAP),
    "shared keys": lambda q, k, v, m: sdpa(q, k[:, :2], v[:, :2], m, enable_gqa=True),
    "values of another size": lambda q, k, v, m: sdpa(q, k, v[..., :8], is_causal=True),
    "fewer queries": lambda q, k, v, m: sdpa(q[:, :, :5], k, v, is_causal=True),
    "attention": lambda q, k, v, m: attention(q, k, v, LOW),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def inputs(batch=2, n=24, seed=0, grad=True):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, 4, n, 16, generator=g).bfloat16() for _ in range(3))
    seen = torch.rand(batch, 1, n, n, generator=g) < 0.7
    return [*(x.requires_grad_(grad) for x in (q, k, v)), seen]


def results(function, given):
    o = function(*given)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, given[:3], do)]


def same(ours, wanted):
    return all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name,dynamic",
    [
        *((name, None) for name in CALLS), ("mask", True), ("soft cap", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in CALLS),
    ],
)  # fmt: skip
def test_one_graph_and_the_same_bits(name, dynamic):
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert same(results(compiled, inputs()), results(call, inputs()))
    given = inputs(grad=False)
    with torch.no_grad():
        assert torch.equal(compiled(*given), call(*given))


@pytest.mark.parametrize("name", ["is_causal", "mask"])
def test_batches_and_lengths_of_one_graph(name):
    """The second shape makes them dynamic, and no later one compiles again."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name], fullgraph=True, backend=counter)
    counts = []
    for batch, n in ((2, 24), (3, 17), (5, 40), (4, 33)):
        given = inputs(batch, n)
        assert same(results(compiled, given), results(CALLS[name], given))
        counts.append(counter.frame_count)
    assert counts[0] == 1 and counts[1:] == 3 * [2]


@pytest.mark.slow
def test_the_default_compiler_gives_the_same_bits():
    compiled = torch.compile(CALLS["mask"], fullgraph=True)
    assert same(results(compiled, inputs()), results(CALLS["mask"], inputs()))


@calls
def test_export(call):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, m):
            return call(q, k, v, m)

    given = inputs()
    program = torch.export.export(Layer(), tuple(given))
    assert torch.equal(program.module()(*given), call(*given))
    assert sum(n.target is torch.ops.lowprec.attention.default for n in program.graph.nodes) == 1


def test_the_policy_may_be_made_outside():
    policy = FA2.replace(delta_from="dp")
    call = torch.compile(
        lambda q, k, v, m: sdpa(q, k, v, m, policy=policy), fullgraph=True, backend="aot_eager"
    )
    assert same(results(call, inputs()), results(lambda *x: sdpa(*x, policy=policy), inputs()))


@calls
def test_checkpointing_changes_no_bit(call):
    def recomputed(*given):
        return checkpoint(call, *given, use_reentrant=False)

    assert same(results(recomputed, inputs()), results(call, inputs()))


def test_checkpointing_drops_the_same_weights():
    def call(*given):
        return sdpa(*given[:3], dropout_p=0.3)

    def recomputed(*given):
        return checkpoint(call, *given, use_reentrant=False)

    both = []
    for function in (call, recomputed):
        torch.manual_seed(0)
        both.append(results(function, inputs()))
    assert same(*both)


def test_dropout_in_one_graph_is_repeated_by_the_seed():
    compiled = torch.compile(
        lambda *x: sdpa(*x[:3], dropout_p=0.3), fullgraph=True, backend="aot_eager"
    )
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(results(compiled, inputs()))
    assert same(runs[0], runs[1]) and not torch.equal(runs[0][0], runs[2][0])


def test_a_backward_repeats_bit_by_bit():
    for call in CALLS.values():
        assert same(results(call, inputs()), results(call, inputs()))


@pytest.mark.parametrize("padded", [False, True])
def test_a_transformers_model_in_one_graph(padded):
    transformers = pytest.importorskip("transformers")
    from lowprec.attention import huggingface

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    huggingface.register("exact", "ALL_FP32", "emulate")
    model.set_attn_implementation("exact")
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    how = dict(attention_mask=mask) if padded else {}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (compiled, model):
        model.zero_grad()
        function(input_ids=ids, labels=ids, use_cache=False, **how).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_another_policy_is_another_graph():
    """The text of a policy is a constant of the graph, and the graph is not reused for another."""
    policy = FA2
    call = torch.compile(lambda q, k, v, m: sdpa(q, k, v, m, policy=policy), backend="aot_eager")
    for policy in (FA2, LOW, REFINED, FA2.replace(delta_from="dp")):
        given = results(lambda *x: sdpa(*x, policy=policy), inputs())  # noqa: B023
        assert same(results(call, inputs()), given), policy
