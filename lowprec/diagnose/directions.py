"""Does the error of a W_Q gradient have one direction, and can softmax see it?

The error is a sum over tokens, e = -scale * sum_i eps_i R_i with R_i = (P K)_i x_i^T (Qiu & Yao
2025, section 3.3.1; `lowprec.training.probes`). Each R_i has rank one, so an inner product of two
of them is a product of two inner products, <a x^T, b y^T> = (a.b)(x.y), and no (head_dim * n_embd)
x tokens matrix is ever formed.

Shapes: a (T, D) mean keys (P K)_i of one head, x (T, C) inputs of the projection, q and k (T, D).
Results are float64; `mean_keys` keeps the dtype it gets.
"""

import numpy as np
import pandas as pd
import torch
from scipy.sparse.linalg import eigsh
from torch.nn.functional import normalize, scaled_dot_product_attention

from lowprec.training.rotary import rotate


def mean_keys(q, k) -> torch.Tensor:
    """(P K)_i of a causal head, (T, D): the mean of the keys that row i sees, weighted by P."""
    return scaled_dot_product_attention(q[None], k[None], k[None], is_causal=True)[0]


def mean_cosine(*factors) -> float:
    """Mean cosine over all pairs of different tokens: of rows, or of a_i x_i^T given a and x."""
    units = [normalize(f.double(), dim=1) for f in factors]
    count = len(units[0])
    total = units[0].sum(0) if len(units) == 1 else units[0].mT @ units[1]
    return ((total.square().sum() - count) / (count * (count - 1))).item()


@torch.no_grad()
def head_cosines(model, text) -> pd.DataFrame:
    """How alike two tokens of a sequence are in every head of a `GPT`, a row a layer and head.

    text: (T,) int64 token ids. cos_r, cos_pk, cos_x: mean cosine of their matrices R_i, mean keys
    and inputs, with rotary positions undone in the mean keys. k_common: length of the mean key over
    the root mean square of a key's.
    """
    stream, found = model.placed(model.token(text[None])), []
    for layer, block in enumerate(model.blocks):
        x = block.norm_attn(stream)
        q, k, _ = block.heads(x)
        for head in range(model.config.n_head):
            keys = k[0, head * k.shape[1] // q.shape[1]]
            a = mean_keys(q[0, head], keys)
            a = rotate(a, block.rotation, back=True)
            cosines = mean_cosine(a, x[0]), mean_cosine(a), mean_cosine(x[0])
            found.append((layer, head, *cosines, common_part(keys)))
        stream = block(stream)
    return pd.DataFrame(found, columns=["layer", "head", "cos_r", "cos_pk", "cos_x", "k_common"])


def common_part(keys) -> float:
    """Length of the mean key over the root mean square of a key's; keys: (..., T, D), the mean
    over the rest."""
    return common_parts(keys).mean().item()


def common_parts(keys) -> torch.Tensor:
    """`common_part` of each, (...)."""
    size = keys.square().sum(-1).mean(-1).sqrt()
    return keys.mean(-2).norm(dim=-1) / size


def principal(a, x) -> tuple[torch.Tensor, float]:
    """The first right singular vector of the stacked vec(a_i x_i^T), as a (D, C) matrix of norm 1
    whose inner product with their sum is positive, and its share of their energy."""
    a, x = a.double(), x.double()
    gram = (a @ a.mT) * (x @ x.mT)
    start = np.random.default_rng(0).standard_normal(len(gram))  # ARPACK's own differs every time
    value, vector = eigsh(gram.numpy(), k=1, v0=start)  # one of thousands: no full decomposition
    direction = (a * torch.from_numpy(vector)).mT @ x
    direction *= torch.sign((direction * (a.mT @ x)).sum())
    return direction / direction.norm(), (value[0] / gram.trace()).item()


def along(matrix, direction) -> float:
    """Cosine of a matrix and a direction of norm 1: the signed share of its norm along it."""
    matrix = matrix.double()
    return ((matrix * direction).sum() / matrix.norm()).item()


def shifted(p, k, direction, rise, scale=None) -> torch.Tensor:
    """How much P changes if all q move alike: total variation, mean over rows, of each direction.

    p: (T, T) probabilities; direction: (D,), or (n, D) for n results. rise: how far the mean score
    over the keys would rise by a step of this length along the mean key; every direction gets a
    step of that length. Such a step adds the same vector `lift` to the scores of every row, so
    only its differences between keys reach P.
    """
    k = k.double()
    scale = k.shape[1] ** -0.5 if scale is None else scale
    length = rise / (scale * k.mean(0).norm())
    lift = scale * length * normalize(direction.double().view(-1, k.shape[1]), dim=1) @ k.mT
    changes = []
    for tilt in (lift - lift.mean(1, keepdim=True)).exp():
        after = p * tilt
        changes.append((after / after.sum(1, keepdim=True) - p).abs().sum(1).mean() / 2)
    return torch.stack(changes)


def step_cosines(table: pd.DataFrame, layer: int, head: int, span: int = 1) -> pd.DataFrame:
    """Cosine between e of any two steps of a window, of one head, by step and step.

    table: a run's query_error.parquet. span: sums of so many consecutive steps instead. From the
    sketches, whose inner products have the right mean; two e of unrelated direction get 0 with a
    standard deviation of 1/sqrt(sketch), 0.125 for 64.
    """
    chosen = table[(table["layer"] == layer) & (table["head"] == head)].set_index("step")
    e = chosen.filter(like="sketch_").astype(np.float64).mul(chosen["error_norm"], axis=0)
    first = chosen.index - (chosen.index - chosen.index[0]) % span
    e = e.groupby(first).sum()
    sketch = e.div(np.sqrt((e**2).sum(axis=1)), axis=0)
    return sketch @ sketch.T
