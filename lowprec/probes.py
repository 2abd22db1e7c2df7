"""What is measured during a run, per layer and head. Probes never raise on non-finite weights."""

from __future__ import annotations

import torch


@torch.no_grad()
def spectral_norms(weights: torch.Tensor) -> torch.Tensor:
    """Largest singular value of each (..., rows, columns) matrix, float64, same device.

    Through the eigenvalues of the smaller Gram matrix, in float64, which halves the digits but
    leaves eight; NaN where a weight is not finite, since the failure itself must be measurable.
    """
    w = weights.double()
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    finite = gram.isfinite().all(-1).all(-1)
    gram = torch.where(finite[..., None, None], gram, 0.0)
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt()
    return torch.where(finite, top, float("nan"))
