"""GPT-2 with attention whose precision is a policy; everything else is plain PyTorch.

Pre-norm blocks, learned positions, tied embeddings, no biases and no dropout (Radford et al. 2019;
the set-up of Qiu & Yao 2025, section 3.1). Run it under autocast to BF16 with FP32 weights: the
matmuls outside attention are then BF16 in every arm of an experiment, and only the policy differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lowprec import UserError
from lowprec.attention import PROBE_COLUMNS, attention

VOCAB_SIZE = 50304
"""GPT-2's 50,257 tokens padded to a multiple of 128."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes, and how attention is computed (see `lowprec.attention.attention`)."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = VOCAB_SIZE
    policy: str = "FA2"
    tile: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")


class Norm(nn.Module):
    """Layer norm with a weight and no bias, in FP32 under autocast."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.n_embd
        self.config = config
        self.norm_attn, self.norm_mlp = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, probe=None, seed: int = 0):
        x = x + self.attend(self.norm_attn(x), probe, seed)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    def attend(self, x, probe, seed):
        c = self.config
        heads = (x.shape[0], x.shape[1], c.n_head, c.n_embd // c.n_head)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).split(c.n_embd, dim=2))
        o = attention(q, k, v, c.policy, tile=c.tile, impl=c.impl, seed=seed, probe=probe)
        return self.proj(o.transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    """The language model; `forward` returns the mean cross-entropy in nats."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
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
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for i, block in enumerate(self.blocks):
            x = block(x, None if probe is None else probe[i], seed * len(self.blocks) + i)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

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
        matmul = 12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd
        return 6.0 * matmul + 6.0 * c.n_layer * c.block_size * c.n_embd
