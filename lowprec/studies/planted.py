"""Attention with the roundings of `FA2` and one planted fault: does a comparison find it?

FAULTS are kinds of mistakes that a kernel may have; `call(fault)` has PyTorch's signature.
"""

from __future__ import annotations

import dataclasses
import math

import pandas as pd
import torch

from lowprec.attention.inputs import causal_mask, for_queries, of_keys
from lowprec.diagnose import compare, contenders
from lowprec.numerics.formats import BF16, round_to

SCALE, DELTA, CHANNELS, BLOCK = 1.01, 0.05, 8, 64
FAULTS = {
    "scale": f"the scale of scores is {SCALE - 1:.0%} too large",
    "mask": "one row in the middle sees all keys",
    "delta": f"delta is off by {DELTA:g}",
    "head": "dK leaves out one of the heads that share keys",
    "padding": f"the last {BLOCK} keys are read without their last {CHANNELS} channels",
    "order": "dQ changes in its last bits from run to run",
}
SUM = "sum"
"""One more fault: products dO O and their sum delta are BF16 tensors, `(do * o).sum(-1)`."""
HEALTHY = ("FA2", "CLEAN", "PAPER", "sdpa", "math")
"""Attentions that round in other places each."""
FP32 = ("efficient", "math")
"""PyTorch's attention of FP32 tensors: what `sdpa` takes on a GPU, and products one by one."""
CHANGES = ("FA2", "CLEAN", "FA2+row_sum=refined")
"""Stored, clean and refined delta."""


class Planted(torch.autograd.Function):
    """softmax(scale q k^T) v in FP32 with the roundings of `FA2`, and a fault or none."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, fault):
        ctx.save_for_backward(q, k, v)
        ctx.how = causal, scale * (SCALE if fault == "scale" else 1), fault
        s, v = _scores(q, k, *ctx.how), for_queries(v.float(), q.shape[1])
        p = (s - s.amax(-1, keepdim=True)).exp()
        o = round_to(p, BF16) @ v / p.sum(-1, keepdim=True)
        ctx.o = o.to(q.dtype)
        return ctx.o.clone()

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        _, scale, fault = ctx.how
        heads, do, p = k.shape[1], do.float(), _scores(q, k, *ctx.how).softmax(-1)
        keys, values = (for_queries(x.float(), q.shape[1]) for x in (k, v))
        products = round_to(do * ctx.o.float(), BF16) if fault == SUM else do * ctx.o.float()
        delta = products.sum(-1, keepdim=True) + DELTA * (fault == "delta")
        delta = round_to(delta, BF16) if fault == SUM else delta
        ds = round_to(p * (do @ values.mT - delta), BF16)
        dq, dk, dv = scale * (ds @ keys), scale * (ds.mT @ q.float()), round_to(p, BF16).mT @ do
        if fault == "head":
            dk[:, :: q.shape[1] // heads] = 0
        if fault == "order":
            dq = dq * (1 + BF16.unit_roundoff * torch.rand(dq.shape).to(dq))
        return (
            *(g.to(q.dtype) for g in (dq, of_keys(dk, heads), of_keys(dv, heads))),
            None,
            None,
            None,
        )


def _scores(q, k, causal, scale, fault):
    keys = for_queries(k.float(), q.shape[1])
    if fault == "padding":
        keys = keys.clone()
        keys[:, :, -BLOCK:, -CHANNELS:] = 0
    seen = causal_mask(q.shape[2], k.shape[2], q.device, causal)
    if fault == "mask":
        seen[q.shape[2] // 2] = True
    return (scale * (q.float() @ keys.mT)).masked_fill(~seen, -math.inf)


def call(fault: str = ""):
    """An attention with one of FAULTS, or with none."""

    def attention(q, k, v, is_causal=False, scale=None, **_):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return Planted.apply(q, k, v, is_causal, scale, fault)

    return attention


def found(table: pd.DataFrame) -> pd.Series:
    """Whether each function of a table of `compare.measure` is outside the rule, or differs from
    run to run, by function and input: bool."""
    bad = compare.outside(table).set_index(["who", "input"]).index
    unsteady = {(who, where) for who, where, *_ in table.attrs["unsteady"]}
    keys = table.set_index(["who", "input"]).index.unique()
    return pd.Series([key in bad or key in unsteady for key in keys], index=keys)


def drawn(seeds) -> pd.DataFrame:
    """`compare.measure` of FAULTS and HEALTHY on random inputs of each seed; heads of queries share
    keys."""
    calls = {fault: call(fault) for fault in FAULTS} | _named(HEALTHY)
    return compare.measure(calls, [contenders.drawn((1, 4, 256, 64), 2, seed=s) for s in seeds])


def alike(seeds) -> pd.DataFrame:
    """`compare.measure` of CHANGES and SUM on random inputs of the shape of a capture."""
    inputs = [contenders.drawn((1, 1, 1024, 64), seed=seed) for seed in seeds]
    return compare.measure(_named(CHANGES) | {SUM: call(SUM)}, inputs, twice=False)


def in_fp32(draws: int, device="cuda", names=FP32) -> pd.DataFrame:
    """`compare.measure` of PyTorch's kernels on random inputs in FP32, not causal and causal."""
    inputs = [
        dataclasses.replace(
            contenders.drawn((1, 4, 256, 64), None, causal, seed, torch.float32).to(device),
            name=f"seed {seed}{', causal' * causal}",
        )
        for causal in (False, True)
        for seed in range(draws)
    ]
    return compare.measure(_named(names), inputs)


def captured() -> pd.DataFrame:
    """`compare.measure` of CHANGES and SUM on all captures; column `kind` is failing or twin."""
    calls = _named(CHANGES) | {SUM: call(SUM)}
    table = compare.measure(calls, contenders.captures(), twice=False)
    return table.assign(kind=table.input.map(lambda n: "twin" if "healthy" in n else "failing"))


def _named(names) -> dict:
    return {name: contenders.function(name) for name in names}


def dq(table: pd.DataFrame, who: str, column: str = "error") -> pd.Series:
    """A column of the rows on dQ of one function, by input."""
    return table[(table.who == who) & (table.of == "dQ")].set_index("input")[column]
