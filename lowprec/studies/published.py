"""Tiled attention in plain PyTorch, with no rounding in it: the types of its tensors do all of it.

Code that is published as "BF16 flash attention" often contains no rounding at all. It multiplies,
exponentiates and adds tensors, and what is rounded follows from their types, from PyTorch's rules
of promotion and from autocast. This is such a program: the steps of the code released with Qiu &
Yao (2025), written anew, so that a policy can be compared with what PyTorch does by itself.

The steps: scores of one block of keys, scaled and masked; the running maximum; the exponential;
running row sum and numerator, both kept in q's type; a division at the end; and a backward that
forms the probabilities again from row sum and maximum. Each runs under whatever autocast is on.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pandas as pd
import torch
from torch.overrides import TorchFunctionMode

from lowprec.attention.inputs import causal_mask, check_inputs

FLOOR = 1e-10
"""Least sum of a block."""


def forward(q, k, v, tile=512, causal=True, scale=None) -> SimpleNamespace:
    """Attention over blocks of `tile` keys; q, k, v: (batch, heads, seqlen, head_dim).

    Returns o in q's type, lse (batch, heads, seqlen, 1), and as the last block left them s, x,
    p_unnorm, total, alpha, pv, l and o_acc, by the names of `lowprec.attention.reference.Trace`.
    """
    scale = check_inputs(q, k, v, causal, scale, shared=False)
    hidden = causal_mask(q.shape[2], k.shape[2], q.device, causal).logical_not()
    o_acc = torch.zeros_like(q)
    rows = (*q.shape[:3], 1)
    l, m = q.new_zeros(rows), q.new_full(rows, float("-inf"))  # noqa: E741
    blocks = zip(k.split(tile, 2), v.split(tile, 2), hidden.split(tile, 1), strict=True)
    for kj, vj, masked in blocks:
        s = (torch.matmul(q, kj.mT) * scale).masked_fill(masked, float("-inf"))
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        x = s - m_new
        alpha, p_unnorm = torch.exp(m - m_new), torch.exp(x)
        total = torch.sum(p_unnorm, -1, keepdim=True).clamp(min=FLOOR)
        pv = torch.matmul(p_unnorm, vj)
        torch.add(alpha * l, total, out=l)
        o_acc.mul_(alpha).add_(pv)
        m = m_new
    return SimpleNamespace(
        s=s, x=x, p_unnorm=p_unnorm, total=total, alpha=alpha, pv=pv, l=l, o_acc=o_acc,
        o=o_acc / l, lse=torch.log(l) + m,
    )  # fmt: skip


def backward(t, q, k, v, do, tile=512, causal=True, scale=None) -> SimpleNamespace:
    """dq, dk, dv in the inputs' type, over blocks of `tile` queries and keys.

    t: what `forward` returned. do: gradient of o, in q's type. Also p, dp, delta and ds as the last
    pair of blocks left them; ds carries the scale.
    """
    scale = check_inputs(q, k, v, causal, scale, shared=False)
    hidden = causal_mask(q.shape[2], k.shape[2], q.device, causal).logical_not()
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    row_blocks = [x.split(tile, 2) for x in (q, do, t.o, t.lse, dq)]
    key_blocks = [x.split(tile, 2) for x in (k, v, dk, dv)]
    for qi, doi, oi, lse, dqi, masks in zip(*row_blocks, hidden.split(tile, 0), strict=True):
        for kj, vj, dkj, dvj, masked in zip(*key_blocks, masks.split(tile, 1), strict=True):
            s = (torch.matmul(qi, kj.mT) * scale).masked_fill(masked, float("-inf"))
            p = torch.exp(s - lse)
            dvj.add_(torch.matmul(p.mT, doi))
            dp = torch.matmul(doi, vj.mT)
            delta = torch.sum(doi * oi, -1, keepdim=True)
            ds = p * scale * (dp - delta)
            dqi.add_(torch.matmul(ds, kj))
            dkj.add_(torch.matmul(ds.mT, qi))
    return SimpleNamespace(p=p, dp=dp, delta=delta, ds=ds, dq=dq, dk=dk, dv=dv)


class GpuAutocast(TorchFunctionMode):
    """The rules of BF16 autocast on a GPU, for tensors on a CPU, whose own autocast has others.

    Matrix products are formed from BF16 operands and give BF16; exp, log and sum work on FP32 and
    give FP32; all else follows the types that it is given. Only for the functions used above.
    """

    RULES = {
        torch.matmul: torch.bfloat16,
        torch.exp: torch.float32,
        torch.log: torch.float32,
        torch.sum: torch.float32,
    }

    def __torch_function__(self, function, types, args=(), kwargs=None):
        dtype = self.RULES.get(function)
        if dtype is not None:
            args = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in args]
        return function(*args, **(kwargs or {}))


REGIMES = {
    "GPU autocast, BF16 inputs": (GpuAutocast, torch.bfloat16),
    "GPU autocast, FP32 inputs": (GpuAutocast, torch.float32),
    "CPU autocast, BF16 inputs": (partial(torch.autocast, "cpu", torch.bfloat16), torch.bfloat16),
    "no autocast, BF16 inputs": (nullcontext, torch.bfloat16),
}
"""What may surround the program, and the type of its inputs."""
VALUES = {
    "s": "scores", "x": "argument of exp", "p_unnorm": "P̄", "total": "row sum of a block",
    "alpha": "rescaling factor", "pv": "P̄V of a block", "l": "running ℓ", "o_acc": "running Ō",
    "o": "output O", "lse": "m + log ℓ, for the backward",
}  # fmt: skip


def under(regime: str, q, k, v, tile: int = 512, **how) -> SimpleNamespace:
    """`forward` in one of REGIMES."""
    context, dtype = REGIMES[regime]
    with context():
        return forward(q.to(dtype), k.to(dtype), v.to(dtype), tile, **how)


def value_types() -> pd.DataFrame:
    """The type that each of VALUES gets, a column a regime."""
    small = torch.ones(1, 1, 8, 16)
    found = {regime: under(regime, small, small, small, 4) for regime in REGIMES}
    short = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    table = {r: [short[getattr(t, name).dtype] for name in VALUES] for r, t in found.items()}
    return pd.DataFrame({"value": VALUES.values()} | table)


def backward_error(t, q, k, v, do, tile: int = 512) -> str:
    """What the backward says if it raises under the autocast that is on; empty if it runs."""
    try:
        backward(t, q, k, v, do, tile)
    except RuntimeError as error:
        return str(error)
    return ""
