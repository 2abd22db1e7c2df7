"""Which way whole programs err on made rows: mean signed errors of O and δ against float64, in ulp.

Two ties: one query, two keys with equal, largest scores whose V is in −[2, 4), and other keys whose
weights are small. Hundreds: rows of many near-equal scores, where S − m takes few values in BF16,
so that P̄ is rounded the same way again and again. V and dO are negative.

Source of the first kind: Qiu & Yao (2025), Section 3.3.2; the second is this book's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
from torch.nn.functional import normalize

from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import BF16, ulp
from lowprec.studies import published
from lowprec.studies.additions import bias
from lowprec.studies.readings import READINGS

PLAIN = "program, FP32 inputs"
"""The plain PyTorch program of `published` under a GPU's autocast, its inputs in FP32."""
CONSISTENT = "PAPER+l_from=p_rounded"
NUMERATOR = "PAPER+o_acc=fp32"
PROGRAMS = (*READINGS, "LOW", NUMERATOR, CONSISTENT, PLAIN)
SIZES = (5, 6.5, 8, 9.5, 11, 12.5, 14, 16)
"""How large the part is that all q and k share, in `grid`."""


def two_ties(second: int, seed: int, rows: int, keys: int, gap: float, rest=(0.1, 1)) -> list:
    """[q, k, v, dO] of rows whose ties are key 0 and key `second`, BF16, (rows, 1, 1 or keys, 64).

    gap: how far their scores are above the others. rest: V of the others lies in −[rest).
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(count, low, high):
        return low + (high - low) * torch.rand(rows, 1, count, 64, generator=generator)

    towards = torch.randn(rows, 1, 1, 64, generator=generator)
    q = (8 * gap) ** 0.5 * normalize(towards, dim=-1)
    k = 0.05 * torch.randn(rows, 1, keys, 64, generator=generator)
    k[:, :, [0, second]] = q
    v = -uniform(keys, *rest)
    v[:, :, [0, second]] = -uniform(2, 2, 4)
    return [x.bfloat16() for x in (q, k, v, -uniform(1, 0.5, 1.5))]


def kinds(tied: list, tile: int, seed: int, rows: int, keys: int, gap: float) -> dict[str, tuple]:
    """(tensors, causal, tile) of each kind of rows; tied: the inputs of that family, `tile` for
    them."""
    made = dict(seed=seed, rows=rows, keys=keys, gap=gap)
    q, k, v, do = tied
    return {
        "two ties": (two_ties(1, **made), False, None),
        "two ties, two blocks": (two_ties(keys // 2, **made), False, keys // 2),
        "hundreds": ([q, k, v, -do.abs()], True, tile),
    }


def biases(kinds: Mapping, programs=PROGRAMS) -> dict:
    """The `additions.Bias` of O, a mean over each row's elements, and of δ over all rows:
    {(kind, program, "O" or "δ"): Bias}."""
    found = {}
    for kind, (tensors, causal, tile) in kinds.items():
        q, k, v, do = tensors
        exact = oracle(q, k, v, causal, do=do)
        for name in programs:
            t = _trace(name, tensors, causal, tile)
            found[kind, name, "O"] = bias(_off(t.o, exact.o).mean(-1).flatten())
            found[kind, name, "δ"] = bias(_off(t.delta, exact.delta).flatten())
    return found


def _trace(name, tensors, causal, tile):
    q, k, v, do = tensors
    if name != PLAIN:
        return emulate(q, k, v, name, tile if name == "RELEASED" else None, do, causal)
    t = published.under("GPU autocast, FP32 inputs", q, k, v, tile or k.shape[2], causal=causal)
    t.delta = (do.float() * t.o).sum(-1)
    return t


def _off(value, exact) -> torch.Tensor:
    return ((value - exact) / ulp(exact, BF16)).double()


def grid(seed: int, length: int, programs=("PAPER", CONSISTENT, "FA2")) -> pd.DataFrame:
    """Mean signed error of O in rows of near-equal scores, by how large these are.

    A row a size: the median over rows of the largest score, the index, and a column a program. Two
    heads of `length` rows a size.
    """
    rows = {}
    for size in SIZES:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, length, 64, generator=generator) for _ in range(3))
        common = size * normalize(torch.randn(64, generator=generator), dim=0)
        tensors = [x.bfloat16() for x in (q + common, 0.02 * k + common, -v.abs() - 1)]
        exact = oracle(*tensors)
        rows[exact.m.median().item()] = {
            name: _off(emulate(*tensors, name).o, exact.o).mean().item() for name in programs
        }
    return pd.DataFrame.from_dict(rows, orient="index")
