"""The scores of a head in two parts: what a row's keys have in common, and the rest.

With the mean key kbar, s_ij = c q_i . k_j is c q_i . kbar, the same for all keys of a row, plus
c q_i . (k_j - kbar). Softmax sees only the second part. Rounding sees their sum: an element of a
key is rounded to half an ulp of the whole, so the larger the common part, the coarser the rest.
Centring the keys before they are rounded is the same softmax in exact arithmetic.

Shapes: q, k, x (..., T, D), causal; a row is a query. Everything is float64.
"""

from __future__ import annotations

import torch

from lowprec.attention.inputs import causal_mask
from lowprec.diagnose.directions import common_part
from lowprec.numerics.formats import BF16, round_to, ulp
from lowprec.training.rotary import rotate


def unrounded(capture) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of a capture as exact products x W^T, (S, H', T, D), not rounded to BF16, and turned
    by rotary positions if the model has them."""
    x, table = capture.tensors["x"].double()[:, None], capture.rotation
    return tuple(rotate(x @ capture.tensors[w].double().mT, table) for w in ("w_q", "w_k"))


def causal_scores(q, k, scale, site=None) -> torch.Tensor:
    """s (..., T, T), -inf where masked. site: a Format that q k^T and s are rounded to, or None."""
    s = q @ k.mT
    s = scale * s if site is None else round_to(scale * round_to(s, site), site)
    return s.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), -torch.inf)


def probabilities(q, k, scale, site=None) -> torch.Tensor:
    """P (..., T, T); `site` as in `causal_scores`."""
    return causal_scores(q, k, scale, site).softmax(-1)


def total_variation(p, other) -> float:
    """Half the sum of |p - other| over the keys, mean over rows with at least two keys: 0 to 1."""
    return ((p - other).abs().sum(-1) / 2)[..., 1:].mean().item()


def parts(q, k, scale) -> dict[str, float]:
    """What a head's scores and keys are made of.

    common: mean over rows of the row's mean score; spread: root mean square over rows of the
    standard deviation within the row; along: the share of its square that goes away if all keys
    have the same component along kbar; key_share: |kbar| / rms |k|; alignment: cos(qbar, kbar).
    """
    mean, spread = row_parts(q, k, scale)
    q_bar, k_bar = q.mean(-2), k.mean(-2)
    unit = k_bar[..., None, :] / k_bar.norm(dim=-1)[..., None, None]
    across = row_parts(q, k - (k @ unit.mT) * unit, scale)[1]
    return dict(
        common=mean.mean().item(), spread=spread.square().mean().sqrt().item(),
        along=1 - (across.square().mean() / spread.square().mean()).item(),
        key_share=common_part(k),
        alignment=torch.cosine_similarity(q_bar, k_bar, dim=-1).mean().item(),
    )  # fmt: skip


def row_parts(q, k, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each row's scores, (..., T - 1), from the second row on."""
    s = causal_scores(q, k, scale)
    seen = s.isfinite()
    count = seen.sum(-1)
    mean = s.where(seen, 0.0).sum(-1) / count
    square = (s - mean[..., None]).where(seen, 0.0).square().sum(-1) / count
    return mean[..., 1:], square.sqrt()[..., 1:]


def rounding_noise(q, k, scale, site=None) -> torch.Tensor:
    """Standard deviation of each score if every rounding were independent noise, (..., T, T).

    Noise uniform over an ulp has the variance ulp^2 / 12. The rounding of a key's element counts
    times the query's; that of a query's element times the key's *less the mean key's*, since the
    rest moves a whole row; `site` adds the rounding of the scores themselves.
    """
    centred = k - k.mean(-2, keepdim=True)
    variance = q.square() @ ulp(k, BF16).square().mT + ulp(q, BF16).square() @ centred.square().mT
    variance = scale**2 * variance / 12
    if site is not None:
        variance = variance + ulp(scale * (q @ k.mT), site).square() / 12
    return variance.sqrt()
