"""Remedies on trial: what a change leaves of the error of W_Q's gradient in a captured layer.

The gradient of a head's W_Q is sum_i dQ_i x_i^T. Computed with the roundings of a policy it differs
from the float64 gradient at the same inputs by everything that the backward rounds, delta among it.
So a remedy can be judged by what it leaves, without saying first where the error comes from.
"""

from __future__ import annotations

import dataclasses

import torch

from lowprec.attention.reference import oracle
from lowprec.evidence.survival import LEVEL
from lowprec.training.rotary import rotate


def query_gradient(capture, dq) -> torch.Tensor:
    """sum_i dQ_i x_i^T over the captured sequences, (H', D, C) float64, with rotary positions
    undone in dQ; dq: (S, H', T, D)."""
    dq = rotate(dq.double(), capture.rotation, back=True)
    return torch.einsum("shtd,stc->hdc", dq, capture.tensors["x"].double())


def exact_gradient(capture) -> torch.Tensor:
    """The same from float64 attention on the captured q, k, v and dO."""
    q, k, v, do = (capture.tensors[name] for name in ("q", "k", "v", "do"))
    return query_gradient(capture, oracle(q, k, v, scale=capture.scale, do=do).dq)


def centred(capture):
    """The capture with the mean key of each head and sequence taken out, as `center_keys` does."""
    k = capture.tensors["k"]
    mean = k.float().mean(2, keepdim=True)
    return dataclasses.replace(
        capture, tensors=capture.tensors | dict(k=(k.float() - mean).to(k.dtype))
    )


def gradient_error(capture, t, exact) -> float:
    """Size of the difference between the gradient of a trace and the exact one, over the latter."""
    return ((query_gradient(capture, t.dq) - exact).norm() / exact.norm()).item()


def delta_error(t) -> torch.Tensor:
    """The delta that a trace used, less delta_ref, (S, H', T) float64."""
    return (t.delta - t.delta_ref).double()


def effect(row, base) -> str:
    """One word on an arm of training: what became of the time, or its verdict if no run exploded or
    it has fewer than four.

    row, base: of the arm and of what it was compared with, in
    `lowprec.evidence.survival.compare_arms` with the permutation test.
    """
    if row.exploded == 0 or row.n < 4:
        return row.verdict
    if row.p_holm >= LEVEL:
        return "not resolved"
    return "postpones" if row["median"] > base["median"] else "hastens"
