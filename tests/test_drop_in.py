"""sdpa is PyTorch's under ALL_FP32, and a transformers model with it is the stock model."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import lowprec
from lowprec import UserError
from lowprec.attention import attention, huggingface, operator
from lowprec.attention.drop_in import sdpa
from lowprec.attention.reference import oracle
from lowprec.numerics.policy import FA2, SAFE, PrecisionPolicy
from lowprec.records import files
from lowprec.training.data import shards as data

ROOT = Path(__file__).resolve().parent.parent


def qkv(*shape, keys=None, heads=None, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    other = list(shape)
    other[-2] = keys or shape[-2]
    if heads:
        other[-3] = heads
    return [
        torch.randn(*s, generator=g, dtype=dtype, requires_grad=True) for s in (shape, other, other)
    ]


def both(inputs, **how):
    """Output and gradients of ours under ALL_FP32 and of PyTorch's."""
    results = []
    for function, extra in ((sdpa, dict(policy="ALL_FP32")), (F.scaled_dot_product_attention, {})):
        o = function(*inputs, **how, **extra)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
        results.append([o, *torch.autograd.grad(o, inputs, do)])
    return zip(*results, strict=True)


@pytest.mark.parametrize(
    "shape,inputs,how",
    [
        ((2, 3, 24, 16), {}, dict(is_causal=True)),
        ((2, 3, 24, 16), {}, dict(scale=0.3)),
        ((2, 3, 24, 16), dict(keys=40), {}),
        ((2, 3, 24, 16), dict(keys=40), dict(is_causal=True)),
        ((2, 3, 1, 16), dict(keys=40), {}),
        ((2, 6, 24, 16), dict(heads=2), dict(is_causal=True, enable_gqa=True)),
        ((24, 16), {}, dict(is_causal=True)),
        ((3, 24, 16), {}, dict(is_causal=True)),
        ((2, 2, 3, 24, 16), {}, dict(is_causal=True)),
        ((4, 24, 16), dict(heads=2), dict(enable_gqa=True)),
    ],
)
def test_the_same_as_pytorch(shape, inputs, how):
    for ours, theirs in both(qkv(*shape, **inputs), **how):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("queries", [24, 8])
@pytest.mark.parametrize("hides", [False, True])
def test_masks_that_say_no_more_than_causal(additive, queries, hides):
    mask = torch.ones(1, 1, queries, 24, dtype=torch.bool)
    mask = mask.tril(24 - queries) if hides else mask
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    for ours, theirs in both(qkv(2, 3, queries, 16, keys=24), attn_mask=mask):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 2, 100, 64), (2, 100, 64)])
@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_without_a_gradient_a_scale_may_be_negative_or_zero(scale, shape):
    """PyTorch's kernel of the CPU gives NaN there, if causal."""
    inputs = [x.detach() for x in qkv(*shape, dtype=torch.bfloat16)]
    o, ours = (sdpa(*inputs, is_causal=True, scale=scale, impl=i) for i in ("auto", "emulate"))
    assert ours.isfinite().all()
    torch.testing.assert_close(o, ours, rtol=2**-7, atol=2**-7)


def test_meta_tensors_have_shapes():
    q, k, v = (torch.empty(1, 2, 32, 16, device="meta", requires_grad=True) for _ in range(3))
    o = sdpa(q, k, v, is_causal=True, policy="ALL_FP32")
    o.sum().backward()
    assert o.shape == q.grad.shape == q.shape and o.is_meta


def test_safe_is_what_attention_computes():
    inputs = qkv(1, 2, 32, 16, dtype=torch.bfloat16)
    assert SAFE == FA2.replace(row_sum="refined") == PrecisionPolicy.parse("SAFE")
    assert str(SAFE) == "FA2+row_sum=refined"
    do = torch.randn(1, 2, 32, 16, dtype=torch.bfloat16)
    grads = [
        torch.autograd.grad(o, inputs, do)
        for o in (sdpa(*inputs, is_causal=True), attention(*inputs, SAFE), attention(*inputs, FA2))
    ]
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[1], strict=True))
    assert not torch.equal(grads[0][0], grads[2][0])


def test_autocast_casts_as_pytorch_does():
    q, k, v = qkv(1, 2, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa(q, k.bfloat16(), v).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(dropout_p=1.1), ("dropout_p=1.1", "from 0 to 1")),
        (dict(policy="FA2+o=bf16:stochastic"), ("random bits", "lowprec.attention")),
        (dict(policy="SAVE"), ("SAVE", "SAFE")),
        (dict(policy=None), ("'None'", "SAFE")),
        (dict(attn_mask=torch.ones(16, dtype=torch.bool)), ("attn_mask", "(16,)", "2 dimensions")),
        (dict(attn_mask=torch.ones(2, 1, 16, 16)), ("attn_mask", "(2, 1, 16, 16)", "broadcast")),
        (dict(attn_mask=torch.ones(1, 1, 1, 16, 16)), ("attn_mask", "broadcast")),
        (dict(attn_mask=torch.ones(16, 16).half()), ("attn_mask", "torch.float16")),
        (dict(attn_mask=causal_lower_right(8, 16)), ("attn_mask", "(8, 16)", "(16, 16)")),
        (dict(attn_mask=[[True]]), ("attn_mask", "list")),
        (dict(attn_mask=torch.ones(16, 16, dtype=torch.bool), is_causal=True), ("not both",)),
        (dict(attn_mask=torch.ones(16, 16, dtype=torch.int64)), ("attn_mask", "booleans")),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_not_supported_is_named(change, words, grad):
    with torch.set_grad_enabled(grad), pytest.raises(UserError) as error:
        sdpa(*qkv(1, 2, 16, 16), **change)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("grad", [False, True])
def test_dtypes_must_be_alike(grad):
    q, k, v = qkv(1, 2, 8, 16)
    with torch.set_grad_enabled(grad), pytest.raises(UserError, match="float32, torch.bfloat16"):
        sdpa(q, k.bfloat16(), v, policy="ALL_FP32")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "shapes,words",
    [
        (((1, 3, 8, 16), (1, 2, 8, 16)), "multiple of the heads"),
        (((4,), (4,)), "seqlen, head_dim"),
        (((1, 3, 8, 16), (1, 0, 8, 16)), "multiple of the heads"),
        (((1, 2, 8, 16), (1, 2, 8, 32)), "same leading dimensions"),
        (((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 7, 16)), "query, key, value must be"),
    ],
)
def test_shapes_that_are_refused(shapes, words, grad):
    q, k, v = (torch.ones(shape) for shape in (*shapes, shapes[1])[:3])
    with torch.set_grad_enabled(grad), pytest.raises(UserError, match=words):
        sdpa(q, k, v, enable_gqa=True, policy="ALL_FP32")


@pytest.mark.parametrize(
    "q,k", [((2, 3, 4, 8, 16), (3, 2, 4, 8, 16)), ((6, 4, 8, 16), (2, 3, 4, 8, 16))]
)
def test_leading_dimensions_must_be_alike(q, k):
    with pytest.raises(UserError, match="the same leading dimensions"):
        sdpa(torch.ones(q), torch.ones(k), torch.ones(k))


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.ones(3, 2, 8), torch.ones(5, 2, 8)], layout=torch.jagged)
    with pytest.raises(UserError, match="nested tensors"):
        sdpa(*[x.transpose(1, 2)] * 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_that_are_refused(dtype, autocast):
    inputs = [torch.ones(1, 2, 8, 16, dtype=dtype) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(UserError, match=str(dtype)):
            sdpa(*inputs, policy="ALL_FP32")


def test_float64_is_for_the_oracle():
    inputs = qkv(1, 2, 8, 16, dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(*inputs)
    for impl in ("oracle", "auto"):
        torch.testing.assert_close(sdpa(*inputs, impl=impl), wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(UserError, match="torch.float64"):
        sdpa(*inputs, impl="emulate")


def test_it_may_take_the_name_of_pytorchs_function(monkeypatch):
    """Also where no gradient is needed, and PyTorch's own is what computes."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    q, k, v = torch.randn(3, 2, 4, 32, 16)
    right = oracle(q, k, v, causal=True).o.float()
    for dtype, policy, far in ((torch.bfloat16, "SAFE", 0.02), (torch.float32, "ALL_FP32", 1e-5)):
        given = [x.to(dtype) for x in (q, k, v)]
        o = sdpa(*given, is_causal=True, policy=policy)
        torch.testing.assert_close(o.float(), right, atol=far, rtol=far)
    o = attention(*given, "FA2", causal=True, impl="sdpa")
    torch.testing.assert_close(o, right, atol=1e-5, rtol=1e-5)


def test_the_name_loads_torch_only_when_asked():
    code = (
        "import sys, lowprec; assert 'torch' not in sys.modules; "
        "from lowprec import sdpa; assert 'torch' in sys.modules and callable(sdpa)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError):
        lowprec.spda  # noqa: B018


# transformers


def hub_model(kind):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = dict(vocab_size=512, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, attn_pdrop=0.0,
                                         resid_pdrop=0.0, embd_pdrop=0.0, **sizes)  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, hidden_size=64, intermediate_size=172,
                                      **sizes)  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(params=["gpt2", "llama"])
def model(request):
    model = hub_model(request.param)
    huggingface.register("exact", "ALL_FP32")
    huggingface.register()
    with torch.no_grad():  # away from the start, where attention is nearly uniform
        for weight in model.parameters():
            if weight.dim() == 2:
                weight *= 3
    return model


def run(model, implementation, dtype=torch.float32):
    """Logits, and all gradients in one vector, as float32."""
    tokens = torch.randint(0, 512, (2, 48), generator=torch.Generator().manual_seed(2))
    model.set_attn_implementation(implementation)
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return out.logits.detach().float(), gradient


def apart(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_a_stock_model_computes_the_same(model):
    ours = run(model, "exact")
    for stock in ("eager", "sdpa"):
        assert all(apart(*pair) < 2e-6 for pair in zip(ours, run(model, stock), strict=True))


def test_safe_in_bf16_is_as_close_as_stock_bf16(model):
    exact = run(model, "eager")
    ours, stock = (run(model, name, torch.bfloat16) for name in ("lowprec", "sdpa"))
    for i in range(2):
        assert 0 < apart(ours[i], exact[i]) <= 1.2 * apart(stock[i], exact[i])


def test_one_training_step(model):
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = []
    for implementation in ("exact", "sdpa"):
        model.load_state_dict(start, strict=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        run(model, implementation)
        optimizer.step()
        steps.append(torch.cat([(p.detach() - start[n]).flatten()
                                for n, p in model.named_parameters()]))  # fmt: skip
    assert steps[1].norm() > 0 and apart(*steps) < 1e-3


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_short_training(kind):
    huggingface.register()
    smoke = data.load_tokens(files.data_root() / "corpora" / "smoke.safetensors")
    losses = {}
    for implementation in ("lowprec", "sdpa"):
        model, path = hub_model(kind), []
        model.set_attn_implementation(implementation)
        # at three times this rate the loss of gpt2 jumps, and where it lands is up to the last bits
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(30):
            tokens = data.batch(smoke, step, 0, 4, 64)[0] % 512
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            path.append(loss.item())
        losses[implementation] = path
    ours, stock = losses.values()
    assert ours[0] - ours[-1] > 1
    assert ours != stock and max(abs(a - b) for a, b in zip(ours, stock, strict=True)) < 0.01


def test_generation_with_a_cache(model):
    prompt = torch.randint(1, 512, (2, 8), generator=torch.Generator().manual_seed(3))
    texts = []
    for implementation in ("exact", "sdpa"):
        model.set_attn_implementation(implementation)
        texts.append(model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None))
    assert torch.equal(*texts)


def test_padding(model):
    tokens = torch.randint(0, 512, (2, 16))
    mask = torch.ones_like(tokens)
    model.set_attn_implementation("exact")
    assert torch.equal(model(tokens, attention_mask=mask).logits, model(tokens).logits)


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("transformers")
    page = (ROOT / "book" / "take_it_home.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    plain, hub, other, masked, _ = made = [{} for _ in blocks]
    for block, names in zip(blocks, made, strict=True):
        exec(block, names)
    assert plain["q"].grad.isfinite().all() and hub["loss"].isfinite()
    assert other["exact"].dtype == torch.float32 and masked["capped"].shape == masked["q"].shape
    assert (tmp_path / "run" / "monitor.jsonl").read_text().count("\n") == 4


@pytest.mark.parametrize("mask_heads", [1, 4])
@pytest.mark.parametrize("kind", ["booleans", "bias"])
@pytest.mark.parametrize("n, heads", [(5, 4), (1, 2)])
def test_without_a_gradient_a_mask_meets_keys_that_heads_share(
    n, heads, kind, mask_heads, monkeypatch
):
    """PyTorch's fused kernels take shared keys or a mask: keys are repeated, as transformers does,
    or where each head has one query, the heads of a key become its queries."""
    plain, seen = torch.nn.functional.scaled_dot_product_attention, []

    def stock(q, k, v, **how):
        seen.append((q.shape[1], k.shape[1], v.shape[1], how["enable_gqa"]))
        return plain(q, k, v, **how)

    monkeypatch.setattr("lowprec.attention.drop_in.scaled_dot_product_attention", stock)
    q, k, v = torch.randn(2, 4, n, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    mask = torch.rand(2, mask_heads, n, 9) < 0.7
    mask[..., 0] = True
    if kind == "bias":
        mask = torch.where(mask, torch.randn(2, mask_heads, n, 9), -torch.inf)
    with torch.no_grad():
        masked = sdpa(q, k, v, mask, enable_gqa=True, policy="ALL_FP32")
        sdpa(q, k, v, enable_gqa=True, policy="ALL_FP32")
    assert seen == [(heads, heads, heads, False), (4, 2, 2, True)]
    torch.testing.assert_close(masked, plain(q, k, v, mask, enable_gqa=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_safe_on_other_tensors_than_bf16_is_said_once(dtype):
    q = torch.randn(1, 1, 4, 8, dtype=dtype, requires_grad=True)
    operator._told.clear()
    with pytest.warns(UserWarning, match=f"{dtype} tensors are rounded to BF16 where SAFE says so"):
        sdpa(q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa(q, q, q)
        sdpa(q, q, q, policy="ALL_FP32")
        sdpa(*(x.bfloat16() for x in (q, q, q)))


def test_a_mask_of_tokens_is_told_its_shape():
    q = torch.randn(2, 4, 16, 8)
    with pytest.raises(UserError, match=r"a mask of tokens is attn_mask\[:, None, None, :\]"):
        sdpa(q, q, q, attn_mask=torch.ones(2, 16, dtype=torch.bool))


def test_torchs_name_may_be_replaced_before_the_first_import():
    """Without a gradient the drop-in calls torch's own function, and not itself."""
    code = """
import torch
import torch.nn.functional as F

def ours(*args, **how):
    from lowprec import sdpa
    return sdpa(*args, **how)

F.scaled_dot_product_attention = ours
q = torch.ones(1, 2, 16, 64, dtype=torch.bfloat16)
with torch.no_grad():
    assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
