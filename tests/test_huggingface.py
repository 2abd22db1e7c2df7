"""Models of transformers, tiny and from a config, with our attention beside the library's own."""

import re
from pathlib import Path

import pytest
import torch

from lowprec import UserError, sdpa
from lowprec.attention import huggingface
from lowprec.numerics.policy import SAFE

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MOE = dict(num_experts_per_tok=2)
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=1,
    first_k_dense_replace=1, num_key_value_heads=4,
)  # fmt: skip
MODELS = {
    # of models with a window the second is longer than the sequence
    "gpt2": dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    "llama": {}, "qwen2": {}, "qwen3": dict(head_dim=8), "mistral": dict(sliding_window=5),
    "mistral wide": dict(sliding_window=40), "ministral": dict(sliding_window=5, head_dim=8),
    "gemma": dict(head_dim=16),
    "gemma2": dict(head_dim=16, sliding_window=5, attn_logit_softcapping=2.0,
                   query_pre_attn_scalar=16),
    "gemma3_text": dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=16),
    "gpt_neox": {}, "phi": {}, "phi3": {}, "olmo2": {}, "olmo3": dict(sliding_window=5),
    "smollm3": {}, "opt": dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0), "granite": {},
    "cohere2": dict(sliding_window=5), "stablelm": {}, "glm4": dict(head_dim=8),
    "starcoder2": dict(sliding_window=5, residual_dropout=0.0, embedding_dropout=0.0),
    "exaone4": dict(sliding_window=5, head_dim=8), "seed_oss": dict(head_dim=8), "nemotron": {},
    "qwen3_moe": dict(head_dim=8, num_experts=4, moe_intermediate_size=16, **MOE),
    "mixtral": dict(num_local_experts=4, **MOE),
    "gpt_oss": dict(head_dim=8, sliding_window=5, num_local_experts=4, **MOE),
    "deepseek_v3": dict(**LATENT, **MOE),
    "bert": dict(is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
}  # fmt: skip
ABSOLUTE = ("gpt2", "opt", "bert")
"""With a table of positions: these are tried with padding, and not with packed sequences."""
LEAKS = "gpt_oss"
"""In transformers 5.23 this model hands no positions to its masks: packed by positions alone its
documents see each other, with the library's own attention as well."""
CAPPED = ("gemma2", "gpt_oss")
"""Transformers' own *sdpa* does not take these."""
models = pytest.mark.parametrize("name", MODELS)


def make(name, **changes):
    """A model whose weights are three times as large as at the start, where attention is nearly
    uniform; its norms stay."""
    torch.manual_seed(0)
    kind = name.split()[0]
    sizes = dict(SIZES)
    if kind == "gpt2":
        sizes = dict(n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=64, bos_token_id=1,
                     eos_token_id=2, pad_token_id=0)  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **sizes | MODELS[name] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight *= 3
    huggingface.register("exact", "ALL_FP32", "emulate")
    huggingface.register()
    return model


def tokens(*shape, seed=1):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def run(model, implementation, ids, keep=None, **how):
    """Logits where `keep`, and the gradient of all weights."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(ids, **how).logits
    logits = logits if keep is None else logits[keep]
    logits.float().square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits.detach(), gradient


def apart(a, b):
    return ((a - b).norm() / b.norm()).item()


@models
@pytest.mark.parametrize("side", ["left", "right"])
def test_with_padding_it_is_the_librarys(name, side):
    ids = tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[1, slice(4) if side == "left" else slice(12, 16)] = 0
    model = make(name)
    ours = run(model, "exact", ids, mask.bool(), attention_mask=mask)
    assert huggingface.check(model, "exact") == 2
    for stock in ("eager", *(["sdpa"] if name not in CAPPED else [])):
        theirs = run(model, stock, ids, mask.bool(), attention_mask=mask)
        assert all(apart(*pair) < 5e-6 for pair in zip(ours, theirs, strict=True))


def registered(*how, **more):
    """What the registry then calls."""
    return transformers.AttentionInterface()[huggingface.register(*how, **more)]


def test_a_module_that_does_not_say_so_is_causal():
    q = torch.randn(1, 2, 8, 16)
    o, _ = registered("exact", "ALL_FP32")(torch.nn.Module(), q, q, q, None)
    wanted = sdpa(q, q, q, is_causal=True, policy="ALL_FP32")
    torch.testing.assert_close(o.transpose(1, 2), wanted)


@pytest.mark.parametrize("how", [{}, dict(cu_seq_lens_q=torch.tensor([0, 9]))], ids=str)
def test_one_query_without_a_mask_sees_every_key(how):
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 9, 16)
    o, _ = registered("exact", "ALL_FP32")(torch.nn.Module(), q, k, k, None, **how)
    torch.testing.assert_close(o.transpose(1, 2), sdpa(q, k, k, policy="ALL_FP32"))


def test_a_mask_that_is_only_causal_comes_as_is_causal():
    """So that the kernels skip what it hides, and read no mask."""
    asked = []

    def attention(q, k, v, mask, *_, module, is_causal, **how):
        asked.append((mask, is_causal))
        return sdpa(q, k, v, mask, is_causal=is_causal, **how)

    model = make("llama")
    model.set_attn_implementation(huggingface.register("watched", attention=attention))
    model(tokens(1, 16))
    assert asked == [(None, True)] * 2


def test_a_decoder_whose_modules_do_not_say_that_they_are_causal():
    """NllbMoe leaves that to its mask, and transformers has no *sdpa* for it."""
    config = transformers.AutoConfig.for_model(
        "nllb-moe", vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_experts=4, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    ids, other = tokens(1, 12), tokens(1, 12)
    other[0, -1] = (ids[0, -1] + 1) % 60 + 3
    huggingface.register("exact", "ALL_FP32", "emulate")
    found = {}
    for name in ("eager", "exact"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name], b = (
                model(input_ids=ids, decoder_input_ids=x).logits[0] for x in (ids, other)
            )
        assert torch.equal(found[name][:11], b[:11]) and not torch.equal(found[name][11], b[11])
    assert apart(found["exact"], found["eager"]) < 5e-6


def test_layers_with_fewer_queries_than_keys_are_aligned_by_their_mask():
    """Gemma 4 cuts its mask where layers share keys, for *sdpa* by that name alone."""
    config = transformers.AutoConfig.for_model(
        "gemma4_text", **SIZES | dict(num_hidden_layers=4), vocab_size_per_layer_input=64,
        head_dim=16, global_head_dim=16, hidden_size_per_layer_input=8, num_kv_shared_layers=2,
        sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    huggingface.register("exact", "ALL_FP32", "emulate")

    def logits(name, **how):
        model.set_attn_implementation(name)
        with torch.no_grad():
            return model(tokens(1, 12), **how).logits

    def static():
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        return dict(logits_to_keep=1, past_key_values=cache)

    for how in (lambda: dict(logits_to_keep=4), static):
        assert apart(logits("exact", **how()), logits("eager", **how())) < 5e-6


def test_sparse_attention_is_refused():
    sizes = SIZES | LATENT | MOE | dict(index_topk=4, index_n_heads=2, index_head_dim=16)
    config = transformers.AutoConfig.for_model("deepseek_v32", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    huggingface.register()
    model.set_attn_implementation("lowprec")
    with pytest.raises(UserError, match="does not support indices; leave it out"):
        model(tokens(1, 24))


@models
def test_no_later_token_reaches_an_earlier_logit(name):
    model = make(name)
    model.set_attn_implementation("lowprec")
    ids, other = tokens(1, 16), tokens(1, 16)
    other[0, 11] = (ids[0, 11] + 1) % 60 + 3
    with torch.no_grad():
        a, b = (model(x).logits[0] for x in (ids, other))
    torch.testing.assert_close(a[:11], b[:11], rtol=1e-5, atol=1e-5)
    assert all(not torch.equal(x, y) for x, y in zip(a[11:14], b[11:14], strict=True))


@pytest.mark.parametrize("name", [x for x in MODELS if x not in (*ABSOLUTE, LEAKS)])
def test_no_document_reaches_another(name):
    """Packed as the flattening collator packs: positions start again, and there is no mask."""
    model = make(name)
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    ids, other = tokens(1, 16), tokens(1, 16)
    other[0, 2] = (ids[0, 2] + 1) % 60 + 3
    ours = run(model, "exact", ids, position_ids=positions, use_cache=False)
    theirs = run(model, "eager", ids, position_ids=positions, use_cache=False)
    assert all(apart(*pair) < 5e-6 for pair in zip(ours, theirs, strict=True))
    moved = run(model, "exact", other, position_ids=positions, use_cache=False)[0][0]
    torch.testing.assert_close(moved[6:], ours[0][0, 6:], rtol=1e-5, atol=1e-5)
    assert not torch.equal(moved[2], ours[0][0, 2])


@pytest.mark.parametrize("name", ["llama", "mistral", LEAKS])
def test_documents_by_their_first_tokens(name):
    """`cu_seq_lens_q`, at which *sdpa* does not look, and an all-ones mask, as collators make."""
    model, starts = make(name), torch.tensor([0, 6, 16], dtype=torch.int32)
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    ids, other = tokens(1, 16), tokens(1, 16)
    other[0, 2] = (ids[0, 2] + 1) % 60 + 3
    how = dict(cu_seq_lens_q=starts, attention_mask=torch.ones_like(ids), position_ids=positions)
    a, b = (run(model, "exact", x, use_cache=False, **how)[0][0] for x in (ids, other))
    torch.testing.assert_close(a[6:], b[6:], rtol=1e-5, atol=1e-5)
    assert not torch.equal(a[2], b[2])
    alone = run(model, "exact", ids[:, 6:], use_cache=False)[0][0]
    torch.testing.assert_close(a[6:], alone, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation(huggingface.register("without a gradient", "ALL_FP32"))
    with torch.no_grad():
        again = model(ids, use_cache=False, **how).logits[0]
    torch.testing.assert_close(again, a, rtol=1e-4, atol=1e-4)
    del how["cu_seq_lens_q"]  # what the page warns of: positions count where there is no mask
    a, b = (run(model, "eager", x, use_cache=False, **how)[0][0] for x in (ids, other))
    assert (a[6:9] - b[6:9]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mistral"])
def test_safe_in_bf16_is_as_near_as_eager_in_bf16(name):
    model, ids = make(name), tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    exact = run(model, "eager", ids, mask.bool(), attention_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        ours, stock = (
            run(model, x, ids, mask.bool(), attention_mask=mask) for x in ("lowprec", "eager")
        )
    for a, b, wanted in zip(ours, stock, exact, strict=True):
        assert 0 < apart(a.float(), wanted) <= 1.2 * apart(b.float(), wanted)


# Generation


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"]
)
def test_generation_with_padding_on_the_left(name, cache):
    if cache == "static" and name == "gpt2":
        pytest.skip("the library has no static cache for GPT-2")
    model, ids = make(name), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    texts = []
    for implementation in ("exact", "eager"):
        model.set_attn_implementation(implementation)
        texts.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False,
                           eos_token_id=None, cache_implementation=cache, disable_compile=True)
        )  # fmt: skip
    assert torch.equal(*texts)


# Training


def test_a_trainer_with_its_padding_collator(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
        Trainer,
        TrainingArguments,
    )

    words = Tokenizer(WordLevel({"[PAD]": 0} | {str(i): i for i in range(1, 64)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    rows = [dict(input_ids=tokens(n, seed=n).tolist()) for n in (9, 16, 12, 5)]
    collator, losses = DataCollatorForLanguageModeling(tokenizer, mlm=False), {}
    assert (collator(rows)["attention_mask"] == 0).any()
    for implementation in ("exact", "sdpa"):
        model = make("llama")
        model.set_attn_implementation(implementation)
        arguments = TrainingArguments(
            output_dir=tmp_path, per_device_train_batch_size=4, max_steps=2, report_to=[],
            use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator)
        losses[implementation] = trainer.train().training_loss
    assert losses["exact"] == pytest.approx(losses["sdpa"], rel=1e-5)


def test_dropout_in_training_is_repeated_by_torchs_seed():
    model, ids = make("gpt2", attn_pdrop=0.3).train(), tokens(2, 16)

    def step(seed):
        torch.manual_seed(seed)
        return run(model, "exact", ids)

    one, again, other = (step(s) for s in (1, 1, 2))
    assert all(torch.equal(*pair) for pair in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])
    model.eval()
    assert torch.equal(step(1)[0], step(2)[0])


def test_a_learned_position_bias():
    torch.manual_seed(0)
    huggingface.register("exact", "ALL_FP32", "emulate")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    model = transformers.T5ForConditionalGeneration(config)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    how = dict(attention_mask=mask, decoder_input_ids=tokens(2, 7, seed=2))
    if not model._can_set_attn_implementation():
        pytest.skip("T5 of this version has attention of its own")
    ours, theirs = (run(model, x, ids, **how) for x in ("exact", "eager"))
    assert all(apart(*pair) < 5e-6 for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["booleans", "numbers"])
def test_a_position_bias_is_added_to_a_mask(kind):
    q, bias = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 8)
    seen = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, 8, 8).masked_fill(~seen, -torch.inf)
    mask, forward = seen if kind == "booleans" else added, registered("exact", "ALL_FP32")
    o, _ = forward(torch.nn.Module(), q, q, q, mask, position_bias=bias)
    wanted = sdpa(q, q, q, bias + added, policy="ALL_FP32")
    torch.testing.assert_close(o.transpose(1, 2), wanted)


def test_a_position_bias_of_packed_sequences_is_refused():
    q, bias = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 8)
    how = dict(cu_seq_lens_q=torch.tensor([0, 3, 8]), position_bias=bias)
    with pytest.raises(UserError, match="position_bias beside cu_seq_lens_q"):
        registered("exact", "ALL_FP32")(torch.nn.Module(), q, q, q, None, **how)


def test_an_encoder_with_padding_and_cross_attention():
    huggingface.register("exact", "ALL_FP32", "emulate")
    sides = {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in dict(layers=2, attention_heads=4, ffn_dim=48).items()
    }
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, max_position_embeddings=64, dropout=0.0, **sides
    )
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    how = dict(attention_mask=mask, decoder_input_ids=tokens(2, 7, seed=2))
    ours = run(model, "exact", ids, **how)
    assert huggingface.check(model, "exact") == 6
    for stock in ("eager", "sdpa"):
        theirs = run(model, stock, ids, **how)
        assert all(apart(*pair) < 5e-6 for pair in zip(ours, theirs, strict=True))


# Models that the registry does not reach


@pytest.mark.parametrize(
    "kind,sizes",
    [
        ("bloom", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)),
        ("falcon", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)),
        ("gptj", dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=64)),
        ("gpt_neo", dict(hidden_size=32, num_layers=2, num_heads=4, vocab_size=64,
                         attention_types=[[["global", "local"], 1]])),
    ],
)  # fmt: skip
def test_attention_of_their_own_is_told(kind, sizes):
    huggingface.register()
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("lowprec")
    with pytest.raises(UserError, match="attention of its own.*'lowprec' does not reach it"):
        huggingface.check(model)


def test_attention_of_its_own_beside_the_registry_s_is_told():
    """GIT's text has it and its images have not, in one file; so has a class that inherits."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision = sizes | dict(image_size=28, patch_size=14)
    config = transformers.GitConfig(vision_config=vision, vocab_size=64, **sizes)
    model = transformers.GitForCausalLM(config)
    model.set_attn_implementation(huggingface.register())
    with pytest.raises(UserError, match="is a GitSelfAttention, which has attention of its own"):
        huggingface.check(model)
    assert huggingface.check(model.git.image_encoder) == 1

    model = make("llama")
    model.set_attn_implementation("lowprec")
    layer = model.model.layers[1]
    for forward, found in ({}, 2), (dict(forward=lambda self, x, **_: (x, None)), None):
        layer.self_attn.__class__ = type("OfMyAttention", (type(layer.self_attn),), forward)
        if found:
            assert huggingface.check(model) == found
        else:
            with pytest.raises(UserError, match="is a OfMyAttention, which has attention of its"):
                huggingface.check(model)


def test_a_wrapped_model_is_checked_within():
    model = make("llama")
    model.set_attn_implementation("lowprec")
    assert huggingface.check(torch.nn.Sequential(model)) == 2


def test_a_model_that_was_not_set_is_told():
    model = make("llama")
    with pytest.raises(UserError, match="uses 'sdpa'; call model.set_attn_implementation"):
        huggingface.check(model)
    with pytest.raises(UserError, match="Linear has no module"):
        huggingface.check(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("what", huggingface.REFUSED)
def test_what_the_registry_may_ask_is_refused(what):
    forward = registered("other")
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(UserError, match=f"'other' does not support {what}"):
        forward(None, q, q, q, None, **{what: True})
    for nothing in (False, None):
        forward(None, q, q, q, None, **{what: nothing})


@pytest.mark.parametrize("what", huggingface.OWN)
def test_a_function_in_our_place_gets_no_scores_of_ours(what):
    forward = registered("watched", SAFE, attention=lambda *a, **k: None)
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(UserError, match=f"'watched' does not support {what}"):
        forward(None, q, q, q, None, **{what: torch.zeros(2)})


def test_the_page_names_these_models():
    page = (Path(__file__).resolve().parent.parent / "book" / "take_it_home.md").read_text()
    (listed,) = re.findall(r"^`\w+`(?:, `\w+`)+\.$", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", listed) == sorted({name.split()[0] for name in MODELS})
