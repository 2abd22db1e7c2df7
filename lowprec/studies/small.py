"""The models that `lowprec.studies.mixed_runs` trains, and their data.

`digits`: a convolutional network on 8 × 8 images of handwritten digits, SGD with momentum. `text`:
a two-layer language model on the smoke corpus, Adam. `gpt`: the same language model as wide as the
book's 6-layer GPT-2, on the whole of GPT-2's vocabulary, for a GPU. A convolution is a product of
its unfolded input with the filters; unfolding only copies, so it rounds as a convolution does.

A task has `init` (the weights of one seed), `rows` (one seed's batch of a step), `held_out` and
`logits`, which takes weights and inputs with a leading dimension of seeds and a product `dot`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file

from lowprec.records import files
from lowprec.training.data import shards as data

DIGITS = data.CORPORA / "digits.safetensors"


def draw_rows(count, seed, step, size):
    """`size` places below `count`, a pure function of seed and step."""
    return np.random.Philox(key=[seed, step]).random_raw(size) % count


@dataclass(frozen=True)
class Digits:
    """Two 3 × 3 convolutions with biases and pooling, one linear layer; cross-entropy."""

    lr: float = 0.1
    steps: int = 300
    warmup: int = 20
    batch: int = 64
    seeds: int = 10
    first_seed: int = 0
    first: float = 0.9
    second: float | None = None
    channels: tuple[int, int] = (8, 16)
    held: int = 360

    @functools.cached_property
    def data(self):
        """Images (1797, 1, 8, 8) float32 in [0, 1] and labels, in one fixed random order."""
        file = load_file(DIGITS)
        order = np.random.default_rng(0).permutation(len(file["labels"]))
        images = torch.from_numpy(file["images"][order]).float()[:, None] / 16
        return images, torch.from_numpy(file["labels"][order].astype(np.int64))

    def init(self, generator):
        c1, c2 = self.channels
        shapes = {"conv1": (9, c1), "conv2": (9 * c1, c2), "linear": (4 * c2, 10)}
        weights = {}
        for name, (fan_in, out) in shapes.items():
            scale = math.sqrt(2 / fan_in)
            weights[name] = scale * torch.randn(fan_in, out, generator=generator)
            weights[name + "_bias"] = torch.zeros(1, out)
        return weights

    def rows(self, step, seed):
        images, labels = self.data
        places = draw_rows(len(labels) - self.held, seed, step, self.batch).astype(np.int64)
        return images[places], labels[places]

    def held_out(self):
        images, labels = self.data
        return [(images[-self.held :], labels[-self.held :])]

    def logits(self, w, x, dot):
        """x: (seeds, batch, 1, 8, 8) -> (seeds, batch, 10)"""
        seeds, batch = x.shape[:2]
        for name in ("conv1", "conv2"):
            side = x.shape[-1]
            columns = F.unfold(x.flatten(0, 1), 3, padding=1).mT.reshape(seeds, batch * side**2, -1)
            y = (dot(columns, w[name]) + w[name + "_bias"]).relu()
            y = y.view(seeds * batch, side, side, -1).permute(0, 3, 1, 2)
            x = F.max_pool2d(y, 2).unflatten(0, (seeds, batch))
        return dot(x.flatten(2), w["linear"], "logits") + w["linear_bias"]


@dataclass(frozen=True)
class Text:
    """A GPT-2 of `layers` layers, without biases and with tied embeddings.

    path: token shards. classes: the most frequent tokens of the training part keep a class of
    their own and the rest shares the last one; None keeps GPT-2's vocabulary.
    """

    lr: float = 3e-3
    steps: int = 300
    warmup: int = 30
    batch: int = 4
    seeds: int = 6
    first_seed: int = 0
    first: float = 0.9
    second: float = 0.95
    classes: int | None = 512
    width: int = 64
    layers: int = 2
    heads: int = 2
    length: int = 64
    held: int = 64
    path: str = "data/corpora/smoke.safetensors"

    @functools.cached_property
    def data(self):
        """Training and held-out tokens, the last twentieth, as `training.data.shards.Tokens`."""
        tokens = data.load_tokens(files.at_root(self.path), verify=self.classes is not None)
        cut = len(tokens) - len(tokens) // 20
        if self.classes is None:
            parts = [*tokens.shards[:-1], tokens.shards[-1][: cut - len(tokens)]]
            held = (tokens.shards[-1][cut - len(tokens) :],)
            return tuple(dataclasses.replace(tokens, shards=s) for s in (tuple(parts), held))
        stream = tokens.window(0, len(tokens))
        counts = np.bincount(stream[:cut], minlength=1 << 16)
        table = np.full(1 << 16, self.classes - 1, np.uint16)
        table[np.argsort(-counts, kind="stable")[: self.classes - 1]] = np.arange(self.classes - 1)
        stream = table[stream]
        return tuple(dataclasses.replace(tokens, shards=(s,)) for s in (stream[:cut], stream[cut:]))

    def init(self, generator):
        c, vocabulary = self.width, self.classes or 50257
        residual = 0.02 / math.sqrt(2 * self.layers)
        shapes = {"token": (vocabulary, c), "position": (self.length, c)}
        for i in range(self.layers):
            shapes |= {f"qkv{i}": (c, 3 * c), f"proj{i}": (c, c)}
            shapes |= {f"up{i}": (c, 4 * c), f"down{i}": (4 * c, c)}
        weights = {
            name: torch.randn(shape, generator=generator)
            * (residual if name.startswith(("proj", "down")) else 0.02)
            for name, shape in shapes.items()
        }
        gains = [f"norm_{part}{i}" for i in range(self.layers) for part in ("attn", "mlp")]
        return weights | {name: torch.ones(1, c) for name in (*gains, "norm")}

    def rows(self, step, seed):
        return data.batch(self.data[0], step, seed, self.batch, self.length)

    def held_out(self):
        """Batches of the held-out part, the same for every seed."""
        parts = range(self.held // self.batch)
        return [data.batch(self.data[1], step, 0, self.batch, self.length) for step in parts]

    def mlp(self, x, w, i, dot):
        return dot(F.gelu(dot(x, w[f"up{i}"])), w[f"down{i}"])

    def logits(self, w, tokens, dot, mlp=None):
        """tokens: (seeds, batch, length) -> (seeds, batch · length, classes)

        mlp(x, w, layer, dot): what takes the place of each MLP.
        """
        mlp = mlp or self.mlp
        seeds, batch, length = tokens.shape
        table = w["token"]
        offset = torch.arange(seeds, device=tokens.device).view(-1, 1, 1) * table.shape[1]
        x = F.embedding(tokens + offset, table.flatten(0, 1)) + w["position"][:, None]
        x = x.flatten(1, 2)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)

        def norm(x, name):
            return F.layer_norm(x, x.shape[-1:]) * w[name]

        for i in range(self.layers):
            heads = dot(norm(x, f"norm_attn{i}"), w[f"qkv{i}"])
            heads = heads.view(seeds, batch, length, 3, self.heads, -1)
            q, k, v = heads.permute(3, 0, 1, 4, 2, 5)
            s = dot(q, k.mT) / math.sqrt(q.shape[-1])
            p = s.masked_fill(hidden, -math.inf).softmax(-1)
            o = dot(p, v).transpose(2, 3).reshape(x.shape)
            x = x + dot(o, w[f"proj{i}"])
            x = x + mlp(norm(x, f"norm_mlp{i}"), w, i, dot)
        return dot(norm(x, "norm"), table.mT, "logits")


TASKS = {
    "digits": Digits(),
    "text": Text(),
    "digits-many": Digits(seeds=64, first_seed=100),
    "text-many": Text(seeds=64, first_seed=100),
    "gpt": Text(
        lr=1e-3, steps=300, warmup=30, batch=16, seeds=3, classes=None, width=384, layers=4,
        heads=6, length=256, path="shards/pysource",
    ),
}  # fmt: skip
