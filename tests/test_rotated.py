"""Attention of a text that moves, and a pretrained Llama as a GPT whose rotation can be rounded."""

import pytest
import torch

from lowprec import UserError
from lowprec.diagnose import pretrained
from lowprec.studies import dated, rotated, smollm2
from lowprec.studies.rotated import ARMS, USUAL

BASE, T = 1e4, 96


@pytest.fixture(scope="module")
def layer():
    kept = smollm2.captured("qk", 18)
    return [kept[name][:, :160].float() for name in "qk"]


def heads(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, T, 16, generator=g), torch.randn(2, T, 16, generator=g)


def moves(arm):
    return rotated.change(rotated.moved(*heads(), ARMS[arm], BASE)).mean().item()


def test_what_is_rounded_before_or_behind_the_rotation_commutes_with_a_shift():
    plain, turned = moves("fp32"), moves("qk")
    assert turned > 100 * plain
    assert max(moves("before"), moves("s"), moves("rate")) < 0.02 * turned
    assert min(moves("cs"), moves("rot")) > 0.2 * turned
    assert moves("place") == moves("place16") == plain, "no place is beyond 256"


def test_columns_are_counted_by_their_rows():
    q, k = heads()
    here, there = (rotated.weights(q, k, ARMS["code"], BASE, first) for first in (0, 16))
    by_hand = sum((here - there).abs()[:, :, j].sum(1) / (T - j) for j in range(T))
    columns = rotated.moved(q, k, ARMS["code"], BASE)
    torch.testing.assert_close(rotated.change(columns), by_hand)
    assert rotated.share(columns).max() < 1


def test_a_hidden_key_is_seen_by_its_own_row_alone():
    weights = rotated.weights(*heads(), USUAL, BASE, hidden=1)
    assert (weights[:, 1:, 0] == 0).all() and (weights[:, 0, 0] == 1).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(6, T))


def test_the_first_keys_scores_are_those_of_attention():
    q, k = heads()
    found = []
    for first in (0, 16):
        turned = rotated._turned(q, k, ARMS["code"], BASE, first)
        found.append((turned[0] @ turned[1].mT)[..., 0] / 4)
    wanted = (found[0] - found[1]).abs()
    torch.testing.assert_close(rotated.first_scores(q, k, ARMS["code"], BASE), wanted)


def test_the_change_goes_where_the_sinks_key_goes(layer):
    table = rotated.follows(*layer, smollm2.BASE)
    moved = table[f"token {rotated.PLANTED + 1}"]
    assert table["first"].iloc[0] > 3 * table["largest other"].iloc[0]
    assert moved.iloc[2] > 3 * table["largest other"].iloc[2] and moved.iloc[:2].max() < 5


def test_drawn_vectors_keep_lengths():
    q, _ = heads()
    other = rotated.drawn(q, torch.Generator().manual_seed(1))
    torch.testing.assert_close(other.norm(dim=-1), q.norm(dim=-1))
    assert torch.cosine_similarity(q, other, -1).abs().mean() < 0.3


def test_a_pretrained_llama_is_a_gpt_whose_rotation_can_be_rounded():
    hub = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
        intermediate_size=48, vocab_size=64, max_position_embeddings=512, rms_norm_eps=1e-5,
        initializer_range=0.2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        rope_theta=BASE,
    )  # fmt: skip
    theirs = hub.LlamaForCausalLM(config)
    model, tokens = rotated.as_gpt(theirs), torch.arange(301) * 7 % 64
    logits = theirs(input_ids=tokens[None, :-1]).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    found = {
        arm: rotated.losses(model, tokens, ARMS[arm]) for arm in ("fp32", "code", "place", "s")
    }
    torch.testing.assert_close(found["fp32"], wanted, rtol=1e-4, atol=1e-4)
    off = {arm: (loss - found["fp32"]).abs() for arm, loss in found.items()}
    assert off["place"][:256].max() == 0 < off["place"][257:].max()
    assert 0 < off["s"].mean() < 0.1 and 0 < off["code"].mean() < 0.1
    later = rotated.losses(model, tokens, USUAL, first=1000)
    torch.testing.assert_close(later, found["fp32"], rtol=1e-3, atol=1e-3)
    (q, k), *_ = rotated.unturned(model, tokens)[0]
    assert q.shape == (4, 300, 8) and k.shape == (2, 300, 8)
    layer = theirs.model.layers[0]
    x = layer.input_layernorm(theirs.model.embed_tokens(tokens[None, :-1]))
    torch.testing.assert_close(layer.self_attn.k_proj(x)[0].unflatten(1, (2, 8)).transpose(0, 1), k)


@pytest.mark.slow
def test_the_recorded_losses_come_out_again():
    """With the model's package installed; the text is jinja2's, which does not change."""
    try:
        path = pretrained.real_path()
    except UserError as error:
        pytest.skip(str(error))
    model, words = rotated.as_gpt(pretrained.load(path)[0]), pretrained.tokenizer(path)
    ids = words(rotated._text(rotated.TEXTS["parser"]))["input_ids"][: rotated.TOKENS + 1]
    table = dated.recorded("rotated", shift=rotated.SHIFT)["losses"]
    row = table.query("text == 'parser' and first == 0").set_index("arm").loss
    for arm in ("fp32", "counting"):
        loss = rotated.losses(model, torch.tensor(ids), ARMS[arm]).mean().item()
        assert loss == pytest.approx(row[arm], abs=2e-4)


def test_formats_count_as_far_as_their_digits_go():
    assert [rotated.places(fmt, 8192) for fmt in ("bf16", "fp16", "fp32")] == [897, 4097, 8192]


@pytest.mark.parametrize(
    "changes",
    [dict(rms_norm_eps=1e-2),
     dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4))],
)  # fmt: skip
def test_a_llama_that_no_gpt_is_is_refused(changes):
    hub = pytest.importorskip("transformers")
    usual = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                 num_attention_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5)  # fmt: skip
    with pytest.raises(UserError, match="plain rotary positions"):
        rotated.as_gpt(hub.LlamaForCausalLM(hub.LlamaConfig(**usual | changes)))
    rotated.as_gpt(hub.LlamaForCausalLM(hub.LlamaConfig(**usual)))
