"""Has the sum of delta_o - delta_ref a sign? Tests over steps, and what one sequence can tell.

Neighbouring steps of a training may be correlated, and a t-test over steps would then count them
more than once. The method of batch means (Law & Carson, Operations Research 27, 1979) adds
consecutive steps into a few batches and tests those; the correlation between batches falls with
their length.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy

from lowprec import UserError
from lowprec.evidence.heads import end_of, summed, total


def relative_sum(probes: pd.DataFrame, after: int = -1, until: int | None = None) -> pd.Series:
    """sum eps / sum |eps| of each (layer, head), eps = delta_o - delta_ref; NaN where all are zero.

    probes: of a run, with step, layer, head, delta_bias, delta_abs. after, until: the steps, the
    first left out, the last one in; by default all.
    """
    until = probes.step.max() if until is None else until
    sums = summed(probes, after, until, ["delta_bias", "delta_abs"])
    return sums.delta_bias / sums.delta_abs.where(sums.delta_abs > 0)


def share(run, after: int, until: int, layer: int | None = None) -> float:
    """sum eps / sum |eps| of all heads together, or of those of a layer: heads with large errors
    count for more. Over the steps from `after`, left out, to `until`, and before an onset.

    Raises `UserError` as `lowprec.evidence.heads.sums` does.
    """
    found = total(run, after, min(until, end_of(run) - 1), layer)
    return float(found.delta_bias / found.delta_abs)


def batch_means(series, batches: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Test the mean of each column of a series against zero, two-sided.

    series: (steps, ...), steps in order; where `batches` does not divide them the first few are
    left out. Returns the mean, its standard error and p, each of shape (...), float64. A column
    that is zero throughout has p = 1.
    Raises `UserError` if there are fewer than 2 batches or fewer steps than batches.
    """
    series = np.asarray(series, dtype=float)
    length = len(series) // batches if batches > 1 else 0
    if not length:
        raise UserError(
            f"batches={batches} must be at least 2 and at most {len(series)}, the steps"
        )
    kept = series[len(series) - batches * length :]
    means = kept.reshape(batches, length, *series.shape[1:]).mean(1)
    mean, error = means.mean(0), means.std(0, ddof=1) / batches**0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        p = 2 * scipy.stats.t.sf(np.abs(mean / error), batches - 1)
    return mean, error, np.where(np.isnan(p), 1.0, p)


def top_share(sizes: np.ndarray, count: int) -> np.ndarray:
    """Share of the sum over the last axis that its `count` largest terms have; sizes >= 0."""
    return np.sort(sizes)[..., -count:].sum(-1) / sizes.sum(-1)


def output_terms(capture) -> tuple[np.ndarray, np.ndarray]:
    """What rounding does to delta in each row of a capture's first sequence and head.

    Returns eps = delta_o - delta_ref, (T,), and dO * (o - o_fp32), (T, D), float64. Where the
    products of delta are not rounded (`dodo` is FP32) eps is the sum of these terms over D.
    """
    t = capture.replay()
    terms = capture.tensors["do"].double() * (t.o.double() - t.o_fp32.double())
    eps = t.delta_o.double() - t.delta_ref.double()
    return eps[0, 0].numpy(), terms[0, 0].numpy()
