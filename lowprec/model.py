"""GPT-2 with attention whose precision is a policy; everything else is plain PyTorch.

Pre-norm blocks, learned positions, tied embeddings, no biases and no dropout (Radford et al. 2019;
the set-up of Qiu & Yao 2025, section 3.1). Run it under autocast to BF16 with FP32 weights: the
matmuls outside attention are then BF16 in every arm of an experiment, and only the policy differs.
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
from lowprec.policy import PrecisionPolicy

VOCAB_SIZE = 50304
"""GPT-2's 50,257 tokens padded to a multiple of 128."""


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

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        for layer in range(self.n_layer):
            self.groups(layer)

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


class HeadNorm(Norm):
    """RMS norm over the last dimension, in FP32; keeps the dtype of x."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        width = config.n_embd
        self.config, self.groups = config, config.groups(layer)
        self.norm_attn, self.norm_mlp = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        if config.qk_norm:
            self.norm_q, self.norm_k = (HeadNorm(width // config.n_head) for _ in range(2))
        if config.gate:
            self.gate = nn.Linear(width, width, bias=False)

    def forward(self, x, probe=None, seed: int = 0):
        x = x + self.attend(self.norm_attn(x), probe, seed)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    def attend(self, x, probe, seed):
        c = self.config
        q, k, v = self.heads(x)
        o = self.attention(q, k, v, probe, seed).transpose(1, 2).reshape(x.shape)
        if c.gate:
            o = o * torch.sigmoid(self.gate(x))
        return self.proj(o)

    def heads(self, x):
        """q, k, v, (B, H, T, D) each, of the normalised input."""
        c = self.config
        shape = (x.shape[0], x.shape[1], c.n_head, c.n_embd // c.n_head)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).split(c.n_embd, dim=2))
        if c.qk_norm:
            q, k = self.norm_q(q), self.norm_k(k)
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
            some = (take_heads(t, heads) for t in (q, k, v))
            part = None if probe is None else torch.stack([probe[h] for h in heads])
            o = call(*some, policy, probe=part)
            parts |= {head: o[:, i : i + 1] for i, head in enumerate(heads)}
        return torch.cat([parts[head] for head in range(q.shape[1])], 1)


def autocast(device, amp) -> torch.autocast:
    """The autocast of a run: amp True is BF16, "fp16" is FP16, False none."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=bool(amp))


def take_heads(x, heads):
    """(B, len(heads), T, D); by slices, since an index has no deterministic gradient on CUDA."""
    return torch.cat([x[:, h : h + 1] for h in heads], 1)


class GPT(nn.Module):
    """The language model; `forward` returns the mean cross-entropy in nats."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = Norm(config.n_embd)
        self._init_weights()

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
        x = x + self.position.weight[: x.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x, None if probe is None else probe[i], seed * len(self.blocks) + i)
        logits = F.linear(self.norm(x), self.token.weight).float()
        if self.config.logit_softcap:
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def new_probe(self) -> torch.Tensor:
        """(layers, heads, 3) leaf; its gradient sums `PROBE_COLUMNS` over the backwards done."""
        shape = (self.config.n_layer, self.config.n_head, len(PROBE_COLUMNS))
        return torch.zeros(shape, device=self.token.weight.device, requires_grad=True)

    def head_weights(self, which: str) -> torch.Tensor:
        """(layers, heads, head_dim, n_embd) rows of W_Q, W_K or W_V ("q", "k", "v")."""
        c = self.config
        index = "qkv".index(which)
        stacked = torch.stack(
            [b.qkv.weight.view(3, c.n_embd, c.n_embd)[index] for b in self.blocks]
        )
        return stacked.view(c.n_layer, c.n_head, c.n_embd // c.n_head, c.n_embd)

    def flops_per_token(self) -> float:
        """Forward and backward, 6 a parameter plus causal attention; for utilisation figures."""
        c = self.config
        matmul = (12 + c.gate) * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd
        return 6.0 * matmul + 6.0 * c.n_layer * c.block_size * c.n_embd
