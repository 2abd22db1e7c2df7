"""One direction for the errors of W_Q's gradient: of a head's tokens, and of the steps of a run.

The error of token i is -c eps_i R_i with R_i = (P K)_i x_i^T, its mean key times its input. What
the R_i share is the direction R, the first singular one (`lowprec.diagnose.directions`). Here it is
found in captured heads, held against the errors of a run's window, and looked for in models that
were never trained.

Source: Qiu & Yao (2025), Section 3.3.1.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import normalize

from lowprec.attention.reference import oracle
from lowprec.diagnose.directions import (
    along,
    common_part,
    head_cosines,
    mean_cosine,
    principal,
    shifted,
    step_cosines,
)
from lowprec.training.config import PRESETS
from lowprec.training.data.shards import SMOKE, load_tokens
from lowprec.training.model import GPT
from lowprec.training.probes import sketch_signs


def head(capture) -> SimpleNamespace:
    """A captured head of one sequence in float64, but for ε, which is that of the replay.

    p (T, T), k (T, D), x (T, C); a: mean keys (T, D); direction R (D, C) and its share of the
    energy of all R_i; error e and the exact gradient (D, C); left: ‖e‖ over the summed lengths of
    its tokens' parts; scale; reproduced: whether the replay gives the recorded output.
    """
    tensors = capture.tensors
    exact = oracle(*(tensors[n] for n in "qkv"), scale=capture.scale, do=tensors["do"])
    t = capture.replay()
    eps = (t.delta_o - t.delta_ref)[0, 0].double()
    p, k, x = exact.p_bwd[0, 0], tensors["k"][0, 0].double(), tensors["x"][0].double()
    a = p @ k
    direction, energy = principal(a, x)
    error = -capture.scale * (eps[:, None] * a).mT @ x
    lengths = capture.scale * eps.abs() * a.norm(dim=1) * x.norm(dim=1)
    return SimpleNamespace(
        p=p, k=k, x=x, a=a, direction=direction, energy=energy, error=error,
        gradient=exact.dq[0, 0].mT @ x, left=(error.norm() / lengths.sum()).item(),
        scale=capture.scale, reproduced=t.reproduced,
    )  # fmt: skip


def of_heads(heads) -> pd.DataFrame:
    """What heads of `head` have in common, a row each by its name.

    energy, left, reproduced: as there. cos_r: mean cosine between two tokens' R_i. k_common: length
    of the mean key over the root mean square of a key's. error, gradient: signed shares of their
    norms along R; ratio: size of the component of the error along R over that of the gradient.
    """
    rows = {
        name: dict(
            energy=s.energy, left=s.left, reproduced=s.reproduced, cos_r=mean_cosine(s.a, s.x),
            k_common=common_part(s.k), error=along(s.error, s.direction),
            gradient=along(s.gradient, s.direction),
            ratio=abs(((s.error * s.direction).sum() / (s.gradient * s.direction).sum()).item()),
        )
        for name, s in heads.items()
    }  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index")


def features(x) -> pd.Series:
    """Each feature's share of the square of the mean input, from the largest on; x: (T, C)."""
    square = x.mean(0).square()
    return pd.Series((square / square.sum()).numpy()).sort_values(ascending=False, kind="stable")


def stacked(early, late) -> dict[str, float]:
    """How much of the R_i of two heads, or of one at two steps, one direction carries.

    as_is, equal: energy of the first singular direction of both, as they are and with equal sums of
    squares; share: of the squares, of the one that has more; cosine: of the sums of their R_i.
    """
    square = [(s.a.square().sum(1) * s.x.square().sum(1)).sum() for s in (early, late)]
    x = torch.cat([early.x, late.x])
    sums = [s.a.mT @ s.x for s in (early, late)]
    equal = early.a * (square[1] / square[0]).sqrt()
    return dict(
        as_is=principal(torch.cat([early.a, late.a]), x)[1],
        equal=principal(torch.cat([equal, late.a]), x)[1],
        share=(max(square) / sum(square)).item(),
        cosine=along(sums[0], sums[1] / sums[1].norm()),
    )


def moved(s, count: int, generator) -> dict[str, float]:
    """What becomes of a head's weights P when all its queries move by one step, whose length is
    that which raises the mean score by 1 along the mean key.

    change: total variation of P, mean over rows; shared: of the square of the scores' change, the
    part that is common to the row, which softmax does not see. random_change, random_shared:
    medians over `count` random directions.
    """
    random = torch.randn(count, s.k.shape[1], generator=generator).double()
    tried = torch.cat([s.k.mean(0)[None], random])
    change = shifted(s.p, s.k, tried, 1.0, s.scale)
    lift = normalize(tried, dim=1) @ s.k.mT
    shared = lift.mean(1).square() / lift.square().mean(1)
    table = pd.DataFrame(dict(change=change.numpy(), shared=shared.numpy()))
    return table.iloc[0].to_dict() | table.iloc[1:].median().add_prefix("random_").to_dict()


def untrained(seed: int, start: int, tokens: int) -> pd.DataFrame:
    """`head_cosines` of a model of six layers that was never trained, with columns seed and start.

    seed: of its weights; start: of the text, `tokens` long, in the small corpus."""
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(PRESETS["mini"].model(), impl="sdpa"))
    text = torch.from_numpy(load_tokens(SMOKE).window(start, tokens).astype(np.int64))
    return head_cosines(model, text).assign(seed=seed, start=start)


# Windows: the tables query_error.parquet of runs


def coherence(table) -> pd.Series:
    """‖Σe‖/Σ‖e‖ over all steps of a window, by (layer, head): 1 if all e point one way."""
    by_head = table.groupby(["layer", "head"])
    return by_head.sum_norm.last().astype(float) / by_head.error_norm.sum().astype(float)


def of_head(table, layer: int, head: int) -> pd.DataFrame:
    """The rows of one head."""
    return table[(table.layer == layer) & (table["head"] == head)]


def unrelated(rows) -> float:
    """The coherence that errors of these lengths would have if their directions were unrelated."""
    lengths = rows.error_norm.astype(float)
    return float((lengths**2).sum() ** 0.5 / lengths.sum())


def near_and_far(table, layer: int, head: int) -> tuple[float, float]:
    """Mean cosine between the e of steps at most 10 apart, and of steps 100 or more apart."""
    cosine = step_cosines(table, layer, head)
    apart = np.abs(np.subtract.outer(cosine.index, cosine.index))
    cosine = cosine.to_numpy()
    return cosine[(apart > 0) & (apart <= 10)].mean(), cosine[apart >= 100].mean()


def against(rows, direction) -> float:
    """Cosine between the sum of a head's e and a direction (D, C), estimated from the sketches."""
    total = rows.filter(like="sketch_").astype(float).mul(rows.error_norm, axis=0).sum().to_numpy()
    left, right = sketch_signs(0, len(total), *direction.shape)
    mine = ((left.double() @ direction) * right).sum(1).numpy()
    return float(total @ mine / np.linalg.norm(total) / np.linalg.norm(mine))


def sketch_noise(cosine: float, direction, width: int, draws=200) -> float:
    """Standard deviation of `against` where the cosine is `cosine`, over sketches of `width`."""
    generator, found = torch.Generator().manual_seed(0), []
    for seed in range(1, draws + 1):
        other = torch.randn(direction.shape, generator=generator, dtype=torch.float64)
        other -= (other * direction).sum() * direction / direction.square().sum()
        total = cosine * direction / direction.norm()
        total = total + (1 - cosine**2) ** 0.5 * other / other.norm()
        left, right = (signs.double() for signs in sketch_signs(seed, width, *direction.shape))
        a, b = (((left @ m) * right).sum(1) for m in (total, direction))
        found.append((a @ b / a.norm() / b.norm()).item())
    return float(np.std(found))
