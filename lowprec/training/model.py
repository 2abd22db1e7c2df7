"""GPT-2 with attention whose precision is a policy; everything else is plain PyTorch.

Pre-norm blocks, learned positions, tied embeddings, no biases and no dropout (Radford et al. 2019;
the set-up of Qiu & Yao 2025, section 3.1). Run it under autocast to BF16 with FP32 weights: the
matmuls outside attention are then BF16 in every arm of an experiment, and only the policy differs.

Its parts can be exchanged one at a time for those of a Llama (Touvron et al. 2023): rotary
positions, RMS norm, a gated MLP, and heads of queries that share their keys. With tied embeddings
and all of them it is transformers' `LlamaForCausalLM`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from lowprec import UserError
from lowprec.attention import PROBE_COLUMNS, attention
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.numerics.rotation import Rotation
from lowprec.training.data.text import VOCABULARIES
from lowprec.training.rotary import rotate, rotation

VOCAB_SIZE = VOCABULARIES["gpt2"]
"""Of GPT-2's tokens; the trainer takes that of the tokens it reads."""

PARTS = dict(positions=("learned", "rotary", "none"), norm=("layer", "rms"), mlp=("gelu", "swiglu"))
"""Parts of the model that can be exchanged, and for what."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes, how attention is computed (see `lowprec.attention.attention`), and its rivals.

    layers: policies that differ from `policy`, as {"1": ...} for a layer, {"1/0,6,7": ...} for some
        of its heads and {"*/0": ...} for a head of every layer; a later entry wins.
    qk_norm: RMS norm of each query and key, with a weight per channel (Henry et al. 2020).
    center_keys: subtract from each key the mean of all keys of its head and sequence. The softmax
        is the same: q times the mean is common to a row, so nothing leaks from later tokens.
    gate: o times sigmoid(W_G x), elementwise, before the output projection (Qiu et al. 2025).
    logit_softcap: c tanh(logits / c) on the output logits, 0 is off (Gemma 2).
    positions: "learned", a vector for each place; "rotary", q and k turned by it, as in
        transformers' Llama (`lowprec.training.rotary`); or "none". Rotation is in FP32, outside the
        rounding sites of attention: q and k are rounded to the dtype of the matmuls before and
        after it. It comes after qk_norm and before center_keys, which is the same softmax for this
        reason.
    rotary_share: of a head's channels that turn; rotary_base: of the angles; unrotated_layers:
        those without rotation among rotary ones. rotary: where that rotation rounds, as in "CODE"
        or "FP32+cs=bf16" (`lowprec.numerics.rotation`).
    norm: "layer" or "rms" of the blocks' inputs and of the last output, with weights and no bias.
    mlp: "gelu", or "swiglu", silu(W_G x) times W_U x (Shazeer 2020); mlp_hidden: its width, None
        for 4 n_embd, or 8/3 n_embd up to a multiple of 64 with swiglu, which keeps its size.
    n_kv_head: heads of keys and values, None for n_head. Each serves n_head / n_kv_head consecutive
        heads of queries, which read it where it lies; their parts of its gradient add up in FP32
        inside attention and are rounded once. (Runs from before this had copies, whose gradients
        were rounded each and added in BF16; so still has a layer whose heads differ in policy.)
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = VOCAB_SIZE
    policy: str = "FA2"
    layers: dict[str, str] = field(default_factory=dict)
    tile: int | None = None
    impl: str = "auto"
    qk_norm: bool = False
    center_keys: bool = False
    gate: bool = False
    logit_softcap: float = 0.0
    positions: str = "learned"
    rotary_share: float = 1.0
    rotary_base: float = 10000.0
    rotary: str = "FP32"
    unrotated_layers: tuple[int, ...] = ()
    norm: str = "layer"
    mlp: str = "gelu"
    mlp_hidden: int | None = None
    n_kv_head: int | None = None

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        for name, known in PARTS.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        if self.mlp_hidden is not None and self.mlp_hidden < 1:
            raise UserError(f"mlp_hidden={self.mlp_hidden} must be at least 1")
        if self.kv_heads < 1 or self.n_head % self.kv_heads:
            raise UserError(f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}")
        self._check_rotation()
        for layer in range(self.n_layer):
            self.groups(layer)

    def _check_rotation(self):
        if self.positions != "rotary":
            for name in ("rotary_share", "rotary_base", "rotary", "unrotated_layers"):
                if (value := getattr(self, name)) and value != getattr(GPTConfig, name):
                    raise UserError(f"{name} is of rotary positions; set positions=rotary")
            return
        if not Rotation.parse(self.rotary).s.is_fp32:
            raise UserError(f"rotary={self.rotary!r}: scores are attention's, set s in policy")
        turned = self.rotary_share * self.head_dim
        if not 0 < self.rotary_share <= 1 or abs(turned - self.rotated) > 1e-6 or self.rotated % 2:
            raise UserError(
                f"rotary_share={self.rotary_share} turns {turned:g} of {self.head_dim} channels; "
                "take a share above 0, at most 1, that makes an even number"
            )
        if not 1 < self.rotary_base < math.inf:
            raise UserError(f"rotary_base={self.rotary_base} must be above 1, and finite")
        if any(not 0 <= layer < self.n_layer for layer in self.unrotated_layers):
            raise UserError(
                f"unrotated_layers={self.unrotated_layers} must be layers below {self.n_layer}"
            )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        usual = 4 * self.n_embd if self.mlp == "gelu" else 64 * -(-8 * self.n_embd // 192)
        return usual if self.mlp_hidden is None else self.mlp_hidden

    @property
    def rotated(self) -> int:
        """Channels of a head that turn in a rotary layer."""
        return round(self.rotary_share * self.head_dim)

    def rotation(self, layer: int) -> torch.Tensor | None:
        """The table of `training.rotary` that a layer's q and k turn by; None where they do not."""
        if self.positions != "rotary" or layer in self.unrotated_layers:
            return None
        how = Rotation.parse(self.rotary)
        return rotation(self.block_size, self.rotated, self.rotary_base, how)

    def by_head(self, rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of W_QKV, or of its gradient, as W_Q (n_head, head_dim, n_embd), W_K and W_V
        (heads of keys, head_dim, n_embd)."""
        of = rows.view(-1, self.head_dim, self.n_embd)
        return of.split([self.n_head, self.kv_heads, self.kv_heads])

    def groups(self, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """(policy, its heads) of a layer; one pair where all heads have the same."""
        policies = [str(PrecisionPolicy.parse(self.policy))] * self.n_head
        for key, policy in self.layers.items():
            where, _, heads = str(key).partition("/")
            try:
                chosen = [int(h) for h in heads.split(",")] if heads else range(self.n_head)
                applies = where == "*" or int(where) == layer
                known = (where == "*" or 0 <= int(where) < self.n_layer) and all(
                    0 <= head < self.n_head for head in chosen
                )
            except ValueError:
                known = False
            if not known:
                raise UserError(
                    f"layers: {key!r} is not a layer below {self.n_layer} or *, with heads below "
                    f"{self.n_head} after a slash; write 1 or 1/0,6,7 or */0"
                )
            for head in chosen if applies else ():
                policies[head] = str(PrecisionPolicy.parse(policy))
        return [
            (policy, tuple(h for h, p in enumerate(policies) if p == policy))
            for policy in dict.fromkeys(policies)
        ]


class Norm(nn.Module):
    """Layer norm with a weight and no bias, in FP32 under autocast."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


class RMSNorm(Norm):
    """RMS norm with a weight, in FP32 under autocast, with layer norm's constant."""

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


class HeadNorm(Norm):
    """RMS norm over the last dimension, in FP32; keeps the dtype of x."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight).to(x.dtype)


NORMS = {"layer": Norm, "rms": RMSNorm}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        width, hidden, kind = config.n_embd, config.hidden, NORMS[config.norm]
        heads = config.n_head + 2 * config.kv_heads
        self.config, self.groups = config, config.groups(layer)
        self.turning = Rotation.parse(config.rotary).turning
        self.norm_attn, self.norm_mlp = kind(width), kind(width)
        self.qkv = nn.Linear(width, heads * config.head_dim, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        # of a gated MLP the rows of W_G, then those of W_U
        self.up = nn.Linear(width, hidden * (1 + (config.mlp == "swiglu")), bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        if config.qk_norm:
            self.norm_q, self.norm_k = (HeadNorm(config.head_dim) for _ in range(2))
        if config.gate:
            self.gate = nn.Linear(width, width, bias=False)
        self.register_buffer("rotation", config.rotation(layer), persistent=False)

    @staticmethod
    def times(layer, x):
        """The product of a linear layer, but the gate's; `lowprec.training.eight` puts another."""
        return layer(x)

    def forward(self, x, probe=None, seed: int = 0):
        x = x + self.attend(self.norm_attn(x), probe, seed)
        up = self.times(self.up, self.norm_mlp(x))
        return x + self.times(self.down, self.activated(up))

    def activated(self, x):
        if self.config.mlp == "gelu":
            return F.gelu(x)
        gate, x = x.chunk(2, -1)
        return F.silu(gate) * x

    def attend(self, x, probe, seed):
        c = self.config
        q, k, v = self.heads(x)
        o = self.attention(q, k, v, probe, seed).transpose(1, 2).reshape(x.shape)
        if c.gate:
            o = o * torch.sigmoid(self.gate(x))
        return self.times(self.proj, o)

    def heads(self, x):
        """q (B, n_head, T, D), k, v (B, heads of keys, T, D) of the normalised input, as attention
        reads them."""
        c = self.config
        width = c.kv_heads * c.head_dim
        q, k, v = (
            t.unflatten(2, (-1, c.head_dim)).transpose(1, 2)
            for t in self.times(self.qkv, x).split([c.n_embd, width, width], dim=2)
        )
        if c.qk_norm:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k = (rotate(t, self.rotation, how=self.turning) for t in (q, k))
        if c.center_keys:
            k = (k.float() - k.float().mean(2, keepdim=True)).to(k.dtype)
        return q, k, v

    def attention(self, q, k, v, probe=None, seed: int = 0):
        """Attention of all heads, one call for each group of heads that share a policy."""
        call = functools.partial(attention, tile=self.config.tile, impl=self.config.impl, seed=seed)
        if len(self.groups) == 1:
            return call(q, k, v, self.groups[0][0], probe=probe)
        parts = {}
        for policy, heads in self.groups:
            some = (take_heads(t, heads, q.shape[1]) for t in (q, k, v))
            part = None if probe is None else torch.stack([probe[h] for h in heads])
            o = call(*some, policy, probe=part)
            parts |= {head: o[:, i : i + 1] for i, head in enumerate(heads)}
        return torch.cat([parts[head] for head in range(q.shape[1])], 1)


def autocast(device, amp) -> torch.autocast:
    """The autocast of a run: amp True is BF16, "fp16" is FP16, False none."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=bool(amp))


def take_heads(x, heads, n_head: int):
    """What these of n_head heads of queries read of x (B, H, T, D): (B, len(heads), T, D).

    By slices, since an index has no deterministic gradient on CUDA."""
    own = [head * x.shape[1] // n_head for head in heads]
    return torch.cat([x[:, h : h + 1] for h in own], 1)


class GPT(nn.Module):
    """The language model; `forward` returns the mean cross-entropy in nats."""

    times = staticmethod(F.linear)
    """What makes the logits, of the last norm's output and the embedding."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = NORMS[config.norm](config.n_embd)
        self._init_weights()
        if config.positions != "learned":  # drawn all the same: a seed gives all else as with them
            self.position = None

    def _init_weights(self):
        """Normal with sd 0.02; projections into the residual stream scaled by 1/sqrt(2 layers)."""
        residual = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = residual if name.endswith(("proj.weight", "down.weight")) else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, tokens, targets, probe=None, seed: int = 0):
        """tokens, targets: (B, T) int64; probe: (layers, heads, 3), see `new_probe`."""
        return self.loss(self.token(tokens), targets, probe, seed)

    def loss(self, x, targets, probe=None, seed: int = 0):
        """Everything after the look-up of tokens, which is what torch.compile may have: Inductor
        turns the gradient of a look-up into a scatter whose deterministic form is ten times as
        slow as PyTorch's own. x: (B, T, C)."""
        x = self.placed(x)
        for i, block in enumerate(self.blocks):
            x = block(x, None if probe is None else probe[i], seed * len(self.blocks) + i)
        logits = self.times(self.norm(x), self.token.weight).float()
        if self.config.logit_softcap:
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def placed(self, x):
        """The stream that the first block reads: x (B, T, C), and learned positions if any."""
        return x if self.position is None else x + self.position.weight[: x.shape[1]]

    def new_probe(self) -> torch.Tensor:
        """(layers, heads, 3) leaf; its gradient sums `PROBE_COLUMNS` over the backwards done."""
        shape = (self.config.n_layer, self.config.n_head, len(PROBE_COLUMNS))
        return torch.zeros(shape, device=self.token.weight.device, requires_grad=True)

    def head_weights(self, which: str) -> torch.Tensor:
        """(layers, heads, head_dim, n_embd) rows of W_Q, W_K or W_V ("q", "k", "v"); of the last
        two there are as many heads as of keys."""
        index = "qkv".index(which)
        return torch.stack([self.config.by_head(b.qkv.weight)[index] for b in self.blocks])

    def flops_per_token(self) -> float:
        """Forward and backward, 6 a parameter plus causal attention; for utilisation figures."""
        c = self.config
        rows = 2 * c.n_head + 2 * c.kv_heads + c.gate * c.n_head  # qkv, proj and the gate, in heads
        rows = rows * c.head_dim + (2 + (c.mlp == "swiglu")) * c.hidden
        matmul = c.n_layer * rows * c.n_embd + c.vocab_size * c.n_embd
        return 6.0 * matmul + 6.0 * c.n_layer * c.block_size * c.n_embd
