"""Three programs that all go by the name of BF16 flash attention, and how far apart they are.

RELEASED is the code released with Qiu & Yao (2025), in blocks of keys, PAPER their Eq. 4, FA2 a
production kernel. They are policies, see `lowprec.numerics.policy`. How alike two of them are is
the share of elements that they store with one value, on made inputs: for each family q, k, v and dO
in BF16, (1, heads, length, 64) each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import pandas as pd
import torch
from torch.nn.functional import normalize

from lowprec.attention.reference import emulate
from lowprec.numerics.policy import FA2, LOW, PAPER, RELEASED, SITES

TILE = 512
"""Keys in a block of the released code."""
READINGS = {"PAPER": PAPER, "RELEASED": RELEASED, "FA2": FA2}
FAMILIES = ("normal", "tied", "sink")
FORWARD = ("s", "x", "p", "l", "o_acc", "o")
BACKWARD = SITES[len(FORWARD) :]
STORES = dict(
    zip(
        SITES,
        (
            "scores S", "S − m, the argument of exp", "P̄ where it multiplies V", "row sum ℓ",
            "numerator Ō = P̄V", "output O = Ō/ℓ", "products dO∘O in δ", "dP = dO·Vᵀ",
            "P where it multiplies dO", "dS = P∘(dP − δ)", "running sum of dQ",
            "running sums of dK, dV",
        ),
        strict=True,
    )
)  # fmt: skip
"""What each site stores; m is the largest score of a row."""


def sites() -> pd.DataFrame:
    """Where the readings and LOW round: a row a site, empty where it is FP32, then their blocks."""
    table = pd.DataFrame({"site": SITES, "stores": STORES.values()})
    more = pd.DataFrame({"stores": ["keys in a block", "least row sum of a block"]})
    table = pd.concat([table, more]).fillna("")
    for name, policy in (READINGS | {"LOW": LOW}).items():
        own = (str(getattr(policy, site)) for site in SITES)
        floor = f"{policy.l_floor:g}" if policy.l_floor else ""
        table[name] = [*("" if kind == "fp32" else kind for kind in own), _size(name), floor]
    return table


def _size(name: str) -> str:
    return str(TILE) if name == "RELEASED" else "all"


def inputs(seed: int = 0, heads: int = 2, length: int = 1024) -> dict[str, list[torch.Tensor]]:
    """[q, k, v, dO] of each family.

    normal: independent Gaussian numbers. tied: all keys share a large part, so that many scores of
    a row are equal once rounded, and V is negative. sink: the first key draws much of every row.
    """
    return {family: _inputs(family, seed, heads, length) for family in FAMILIES}


def _inputs(family, seed, heads, length):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, length, 64)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    common = normalize(torch.randn(64, generator=generator), dim=0)
    if family == "tied":
        q, k, v = q + 8 * common, 0.02 * k + 8 * common, -v.abs() - 1
    if family == "sink":
        k[:, :, 0] += 6 * common
        q = q + 4 * common
    return [x.bfloat16() for x in (q, k, v, do)]


def programs(*names: str, tile: int = TILE) -> dict[str, tuple]:
    """(policy, keys in a block or None) by name: presets, of which RELEASED has blocks."""
    presets = READINGS | {"LOW": LOW}
    return {name: (presets[name], tile if name == "RELEASED" else None) for name in names}


def without(which: Iterable[str], tile: int = TILE) -> dict[str, tuple]:
    """The same for RELEASED with one site in FP32, for each of these sites."""
    return {f"without {site}": (RELEASED.replace(**{site: "fp32"}), tile) for site in which}


def equal(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of elements with equal values."""
    return (a.float() == b.float()).double().mean().item()


def moved(tensors, tile: int = TILE) -> float:
    """Share of the differences S − m of visible scores that are no BF16 numbers, in RELEASED."""
    x = emulate(*tensors[:3], RELEASED.replace(x="fp32"), tile).x
    x = x[x.isfinite()]
    return 1 - equal(x, x.bfloat16())


def products(tensors, tile: int = TILE) -> dict[str, float]:
    """Share of elements of this machine's BF16 products that are the FP32 product, rounded once."""
    q, k, v, _ = tensors
    p = emulate(q, k, v, RELEASED, tile).p.bfloat16()
    return {
        name: equal(a @ b, (a.float() @ b.float()).bfloat16())
        for name, (a, b) in {"QKᵀ": (q, k.mT), "P̄V": (p, v)}.items()
    }


def traces(programs: Mapping, inputs: Mapping, backward: bool = False) -> dict:
    """What `emulate` gives, {(program, family): its trace}, with gradients if asked for.

    Traces are large; only o, or dq, dk and dv, are kept.
    """
    kept, found = ("dq", "dk", "dv") if backward else ("o",), {}
    for name, (policy, tile) in programs.items():
        for family, (q, k, v, do) in inputs.items():
            t = emulate(q, k, v, policy, tile, do if backward else None)
            found[name, family] = {value: getattr(t, value) for value in kept}
    return found


def agreement(own: Mapping, traces: Mapping) -> pd.DataFrame:
    """Smallest share of equal elements over the values that are kept of the traces: a row a
    program, a column a family. own: {family: namespace with the same values}."""
    share = {
        key: min(equal(getattr(own[key[1]], value), x) for value, x in kept.items())
        for key, kept in traces.items()
    }
    return _unstacked(share)


def between(traces: Mapping) -> pd.DataFrame:
    """Share of equal elements of O of every two programs, a row a pair, a column a family."""
    names, families = (dict.fromkeys(key[i] for key in traces) for i in (0, 1))
    share = {
        (f"{a}, {b}", family): equal(traces[a, family]["o"], traces[b, family]["o"])
        for a, b in combinations(names, 2)
        for family in families
    }
    return _unstacked(share)


def _unstacked(share: dict) -> pd.DataFrame:
    table = pd.Series(share).unstack()
    names, families = (list(dict.fromkeys(key[i] for key in share)) for i in (0, 1))
    return table.loc[names, families]
