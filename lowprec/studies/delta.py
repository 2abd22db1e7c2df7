"""What rounds δ wrong, and what that does to a head: captures replayed under other policies.

The gradient of the scores is dS = P∘(dP − δ), and its rows sum to zero if δ is the mean of dP over
the keys. An error of δ leaves such a row with a sum of its own, and W_Q's gradient with an error
along what the keys have in common. `replays` measures both, one policy at a time; how much of an
error a run has read is in `read_sum`.

Source: Qiu & Yao (2025), Section 3; Dao (2023), the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from lowprec.attention import trace
from lowprec.evidence.heads import total
from lowprec.numerics.formats import E4M3
from lowprec.numerics.policy import ALL_FP32, PrecisionPolicy
from lowprec.studies.rivals import delta_error, exact_gradient, gradient_error


def replays(captures: Mapping, policies: Mapping) -> pd.DataFrame:
    """Captured heads under other policies: a row a policy and capture, indexed so by their names.

    captures: {name: Capture}. policies: {name: policy, or a function of a capture that returns
    one}. The CPU emulates them. Columns, float64:

    error: ‖G − G_exact‖ / ‖G_exact‖ of W_Q's gradient G, against float64 attention
    row_sums: root mean square of the row sums of dS before dS is rounded, see `row_sums`
    eps: root mean square of δ_o − δ_ref, of the δ that O gives, whether it is read or not
    read: the same of the δ that the gradient reads
    rest: the same of the sum of a row and its δ_o − δ_ref, which is what else moves the row
    factor: root mean square of ηδ, see `row_factor`
    """
    rows = {}
    for name, capture in captures.items():
        exact = exact_gradient(capture)
        for label, policy in policies.items():
            t = _trace(capture, policy(capture) if callable(policy) else policy)
            eps = (t.delta_o - t.delta_ref).double()
            rows[label, name] = dict(
                error=gradient_error(capture, t, exact), row_sums=_rms(row_sums(t)),
                eps=_rms(eps), read=_rms(delta_error(t)), rest=_rms(row_sums(t) + eps),
                factor=_rms(row_factor(t) * t.delta_ref),
            )  # fmt: skip
    order = pd.MultiIndex.from_product([policies, captures], names=["policy", "capture"])
    return pd.DataFrame(rows).T.reindex(order)


def row_sums(t) -> torch.Tensor:
    """Σ_j P_ij (dP_ij − δ_i) of a trace, with P not rounded: zero if δ is right.
    (..., queries) float64"""
    p = (t.s - t.lse[..., None]).exp()
    return (p * (t.dp - t.delta[..., None])).sum(-1, dtype=torch.float64)


def row_factor(t) -> torch.Tensor:
    """η: the row sum ℓ as a trace has it over that of its weights, less 1. All of a row of P and O
    is too small by 1 + η, and with δ from that O the row of dS sums to about ηδ.
    (..., queries) float64"""
    return t.l / t.p_unnorm.sum(-1, dtype=torch.float64) - 1


def in_format(capture, site: str) -> np.ndarray:
    """δ_o − δ_ref of each row with O alone in a format, all else in FP32.  (rows,) float64

    site: such as "bf16" or "e4m3fn". V is first multiplied by the power of two with which the
    largest |O| still fits E4M3, as a program with a scale for each head would do, and the result
    is divided by it.
    """
    top = _trace(capture, ALL_FP32).o.abs().max().item()
    room = 2.0 ** int(np.floor(np.log2(E4M3.max / top)))
    t = _trace(capture, ALL_FP32.replace(o=site), v=room * capture.tensors["v"])
    return ((t.delta_o - t.delta_ref).double() / room).flatten().numpy()


def same_backward(capture, policy, one: dict, other: dict) -> bool:
    """Whether two changes of a policy give a captured head the same O, dQ, dK and dV bit by bit, in
    the dtype that its neighbours take. one, other: fields of the policy, {name: value}."""
    dtype = capture.tensors["q"].dtype
    policy = PrecisionPolicy.parse(policy)
    traces = [_trace(capture, policy.replace(**change)) for change in (one, other)]
    parts = ([x.to(dtype) for x in (t.o, t.dq, t.dk, t.dv)] for t in traces)
    return all(map(torch.equal, *parts))


def read_sum(run, after: int, until: int, layer: int) -> float:
    """Σε that the gradient of a layer reads in the steps from `after`, left out, to `until`: of the
    rounding, or what `delta_bias` of the run's policy puts in its place. Errors as in `heads.sums`.
    """
    found, imposed = total(run, after, until, layer), run.policy.delta_bias
    return float(imposed * found.delta_abs if imposed else found.delta_bias)


def _trace(capture, policy, **tensors):
    """The trace of a capture on the CPU under another policy, with some other `tensors`."""
    inputs = [(capture.tensors | tensors)[name] for name in ("q", "k", "v", "do")]
    how = dict(tile=capture.tile, scale=capture.scale, impl="emulate")
    return trace(*inputs, PrecisionPolicy.parse(policy), capture.meta["causal"], **how)


def _rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()
