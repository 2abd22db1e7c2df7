"""What a tile changes in a captured head: the same q, k, v and dO in blocks of keys.

A block rounds the running numerator and row sum, where the policy stores these in fewer bits. The
errors are those of O against float64, and of O against O*, made of the same rounded probabilities
and then never rounded, which is what δ = rowsum(dO∘O) sees. A replay keeps dO, so it cannot show a
sign that the loss gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import numpy as np
import pandas as pd
from scipy import stats

from lowprec.attention import trace
from lowprec.attention.reference import oracle
from lowprec.numerics.policy import PrecisionPolicy

LAST = 8
"""Blocks of rows, the last ones, in which `rank` is taken."""


def replays(captures: Mapping, tiles: Iterable[int], policies=("FA2", "LOW")) -> pd.DataFrame:
    """Captured heads in blocks beside the same untiled, indexed by policy, tile and capture.

    error, own: root mean square of the error of O against float64, and of O − O*, over untiled
    size, part: what the error of δ puts into W_Q's gradient, for independent signs of the rows,
        sqrt(Σ ε²‖PK‖²‖x‖²), and as it is, ‖Σ ε (PK) xᵀ‖, over untiled
    gradient: the whole error of W_Q's gradient, over untiled
    same: share of the elements of O that are those of the untiled replay
    growth: ‖O − O*‖/‖O*‖ of a row, mean of the last block of rows over that of the first
    rescalings: how often a row is rescaled, mean
    rank: rank correlation of that with ‖O − O*‖/‖O*‖ among rows of equally many blocks, mean
    sign: Σ Δε / sqrt(Σ Δε²), where Δε is what the tile adds to a row's error of δ
    """
    tiles, rows = list(tiles), {}
    for name, capture in captures.items():
        exact = oracle(*(capture.tensors[n] for n in "qkv"), scale=capture.scale,
                       do=capture.tensors["do"])  # fmt: skip
        for policy in policies:
            whole = _replay(capture, exact, policy, None)
            for tile in tiles:
                rows[policy, tile, name] = _beside(
                    _replay(capture, exact, policy, tile), whole, tile
                )
    order = pd.MultiIndex.from_product(
        [policies, tiles, captures], names=["policy", "tile", "capture"]
    )
    return pd.DataFrame(rows).T.reindex(order)


def _replay(capture, exact, policy, tile) -> SimpleNamespace:
    q, k, v, do = (capture.tensors[n] for n in ("q", "k", "v", "do"))
    policy = PrecisionPolicy.parse(policy)
    t = trace(q, k, v, do, policy, scale=capture.scale, tile=tile, impl="emulate")
    own, x = (t.o - t.o_fp32).double()[0, 0], capture.tensors["x"][0].double()
    eps = (t.delta_o - t.delta_ref).double().flatten()
    moved = capture.scale * eps[:, None] * (exact.p_bwd @ k.double())[0, 0]  # of dQ, up to a sign
    return SimpleNamespace(
        o=t.o, eps=eps,
        row=(own.norm(dim=1) / t.o_fp32.double()[0, 0].norm(dim=1)).numpy(),
        rescaled=(t.alpha[0, 0, :, 1:] != 1).sum(-1).numpy(),
        sizes=dict(
            error=(t.o - exact.o).square().mean().sqrt().item(),
            own=own.square().mean().sqrt().item(),
            size=(moved.norm(dim=1) * x.norm(dim=1)).norm().item(),
            part=(moved.mT @ x).norm().item(),
            gradient=((t.dq - exact.dq)[0, 0].double().mT @ x).norm().item(),
        ),
    )  # fmt: skip


def _beside(tiled, whole, tile) -> dict[str, float]:
    added = tiled.eps - whole.eps
    return {name: value / whole.sizes[name] for name, value in tiled.sizes.items()} | dict(
        same=(tiled.o == whole.o).double().mean().item(),
        growth=tiled.row[-tile:].mean() / tiled.row[:tile].mean(),
        rescalings=tiled.rescaled.mean(),
        rank=_rank(tiled, tile),
        sign=(added.sum() / added.norm()).item() if added.any() else 0.0,
    )


def _rank(tiled, tile) -> float:
    blocks = np.arange(len(tiled.row)).reshape(-1, tile)[-LAST:]
    pairs = [(tiled.row[rows], tiled.rescaled[rows]) for rows in blocks]
    found = [stats.spearmanr(a, b).statistic for a, b in pairs if np.ptp(b) > 0]
    return float(np.mean(found)) if found else 0.0


def monotone(table: pd.DataFrame, column: str) -> pd.Series:
    """Whether a column of one policy of `replays` grows with each smaller tile, from untiled on, by
    capture."""
    wide = table[column].unstack("tile").sort_index(axis=1, ascending=False)
    return (wide.diff(axis=1).iloc[:, 1:] > 0).all(axis=1) & (wide.iloc[:, 0] > 1)
