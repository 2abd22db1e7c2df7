"""Rotation by site: against the trainer's rotary positions, and against transformers' Llama."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lowprec import UserError
from lowprec.numerics.formats import round_to
from lowprec.numerics.rotation import COUNTING, PRESETS, Rotation
from lowprec.training.config import LLAMA, TrainConfig
from lowprec.training.config import PRESETS as RUNS
from lowprec.training.model import GPT
from lowprec.training.rotary import rotate, rotation, turned

T, D, BASE = 4096, 64, 1e5


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def theirs(dtype, cast=False):
    """transformers' rotary embedding, and what it gives; cast: its module converted as well."""
    made = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=9 * D, num_attention_heads=9, rope_theta=BASE)
    )
    assert made.config.rope_parameters["rope_theta"] == BASE
    made = made.to(dtype) if cast else made
    cos, sin = made(torch.zeros(1, dtype=dtype), torch.arange(T)[None])
    return made.inv_freq, cos[0, :, : D // 2], sin[0, :, : D // 2], (cos, sin)


# Text


@given(
    st.dictionaries(st.sampled_from(Rotation.fields()), st.sampled_from(["bf16", "fp16", "e8m3"]))
)
def test_a_rotation_is_its_text(fields):
    assert Rotation.parse(str(Rotation(**fields))) == Rotation(**fields)


def test_what_no_rotation_can_have():
    for text in ("FP32+cs=bf16:stochastic", "FP32+qk=e4m3fn@token,pow2", "FP32+cs=half",
                 "FP32+sin=bf16", "FP33"):  # fmt: skip
        with pytest.raises(UserError, match="rotation"):
            Rotation.parse(text)
    tiny = dict(n_layer=1, n_head=1, n_embd=4, vocab_size=8)
    with pytest.raises(UserError, match="policy"):
        TrainConfig(positions="rotary", rotary="FP32+s=bf16").model()
    with pytest.raises(UserError, match="rotary positions"):
        TrainConfig(rotary="CODE", **{k: tiny[k] for k in ("n_layer", "n_head", "n_embd")})


# Bits


def test_with_nothing_rounded_it_is_the_trainers():
    q, table = drawn(2, 3, 100, D), rotation(100, D)
    exact = "FP32+qk=e8m23"  # of FP32's size: the operator of roundings runs, and rounds nothing
    assert PRESETS["FP32"].turning == "" and Rotation.parse(exact).turning == exact
    assert torch.equal(rotate(q, table, how=exact), rotate(q, table))
    assert torch.equal(rotate(q, table, True, exact), rotate(q, table, True))


def test_the_rates_of_transformers_are_ours_but_for_their_last_bit():
    rates = theirs(torch.float32)[0]
    ours = BASE ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    assert (rates / ours - 1).abs().max() <= 2**-23


@pytest.mark.parametrize("cast", [False, True])
def test_code_is_transformers_in_bf16(cast):
    """Given its rates, which are not ours to the last bit, and its cosines in FP32, which are not
    always the nearest: all that is rounded to BF16 is the same."""
    rates, cos, sin, both = theirs(torch.bfloat16, cast)
    how = PRESETS["CODE"].replace(rate="bf16") if cast else PRESETS["CODE"]
    angles = torch.arange(T)[:, None].float() * rates.float()
    in_fp32 = torch.stack([angles.cos(), angles.sin()])
    table = rotation(T, D, BASE, how.replace(cs="fp32"), rates=rates.float())
    assert (table - in_fp32).abs().max() <= 2**-23
    assert torch.equal(round_to(in_fp32, "bf16"), torch.stack([cos, sin]).float())
    q = drawn(1, 2, T, D).bfloat16()
    want, _ = apply_rotary_pos_emb(q, q, *both)
    assert torch.equal(rotate(q, torch.stack([cos, sin]).float(), how=how.turning), want)
    assert not torch.equal(rotate(q, table), want)


def test_gradients_are_transformers():
    *_, both = theirs(torch.bfloat16)
    table = torch.stack([t[0, :, : D // 2] for t in both]).float()
    mine, other = (drawn(1, 2, T, D).bfloat16().requires_grad_() for _ in range(2))
    g = drawn(1, 2, T, D, seed=1).bfloat16()
    rotate(mine, table, how="CODE").backward(g)
    apply_rotary_pos_emb(other, other.detach(), *both)[0].backward(g)
    assert torch.equal(mine.grad, other.grad)


def test_the_operator_is_one_that_a_compiler_can_trust():
    cos, sin = rotation(8, D)
    x = drawn(1, 8, 2, D + 2).transpose(1, 2).bfloat16().requires_grad_()
    torch.library.opcheck(turned, (x, cos, sin, "CODE"))


def test_bf16_counts_to_256_and_fp16_to_2048():
    for fmt, until in (("bf16", 256), ("fp16", 2048)):
        how = PRESETS["FP32"].replace(place=fmt)
        same = (rotation(2 * until + 3, D, how=how) == rotation(2 * until + 3, D)).all(2).all(0)
        assert same[: until + 1].all() and not same[until + 1]
    turned = rotation(600, D, how=Rotation(**dict.fromkeys(COUNTING, "bf16")))
    assert torch.equal(turned[:, 512], turned[:, 513])


def test_a_first_place_is_a_slice():
    assert torch.equal(rotation(10, D, first=30), rotation(40, D)[:, 30:])


# In a model


def trained(rotary, **also):
    config = TrainConfig(**{**vars(RUNS["tiny"]), **LLAMA, "amp": False, "rotary": rotary} | also)
    torch.manual_seed(0)
    model = GPT(config.model())
    tokens = torch.arange(64)[None] % 50
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    return loss.item(), model.blocks[0].qkv.weight.grad


def test_a_model_rotates_as_it_is_told():
    plain, code, cast = (trained(rotary) for rotary in ("FP32", "CODE", "CAST"))
    assert plain[0] != code[0] != cast[0] and plain[0] == pytest.approx(cast[0], rel=1e-2)
    assert torch.equal(trained("FP32")[1], plain[1])
    assert all(grad.isfinite().all() for _, grad in (code, cast))
    assert (code[1] - plain[1]).norm() < 0.05 * plain[1].norm()


def test_a_rotation_that_rounds_compiles_into_one_graph():
    config = TrainConfig(**{**vars(RUNS["tiny"]), **LLAMA, "rotary": "CODE"})
    model, tokens = GPT(config.model()), torch.arange(64)[None] % 50
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    y = tokens.roll(-1, 1)
    torch.testing.assert_close(compiled(model.token(tokens), y), model(tokens, y))


@pytest.mark.parametrize("site", ["before", "rot", "qk"])
def test_each_rounding_of_turning_q_and_k_is_done(site):
    how = Rotation.parse(f"FP32+{site}=bf16")
    assert how.turning == str(how)


def test_the_gradient_has_no_rounding_of_what_was_turned():
    from lowprec.training.rotary import rotate, rotation

    table = rotation(8, 16)
    x, g = torch.randn(2, 1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    rotate(x, table, how="FP32+before=bf16+qk=bf16").backward(g)
    assert torch.allclose(x.grad, rotate(g, table, back=True), atol=1e-6)


@pytest.mark.parametrize("site", ["before", "qk"])
def test_q_and_k_are_rounded_before_and_after_they_turn(site):
    q, table = drawn(1, 1, 8, D), rotation(8, D)
    first, last = ["bf16" if site == name else "fp32" for name in ("before", "qk")]
    wanted = round_to(rotate(round_to(q, first), table), last)
    assert torch.equal(rotate(q, table, how=f"FP32+{site}=bf16"), wanted)
    assert not torch.equal(wanted, rotate(q, table))
