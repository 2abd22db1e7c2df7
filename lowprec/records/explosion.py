"""What counts as an explosion: one rule for every run, on its losses alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WINDOW, RISE, RETURN, PATIENCE = 50, 0.5, 0.25, 500
"""An explosion: the 50-step mean loss rises 0.5 above its running minimum and does not come back
within 0.25 of that minimum in the next 500 steps; or the loss is not finite."""


@dataclass(frozen=True)
class Explosion:
    """onset: first step at which the rise is reached; confirmed: the 500 steps after it are there
    (or the loss is not finite), so that it is not a spike that would have come back."""

    onset: int
    confirmed: bool


def window_mean(loss: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean of the last `window` losses at each step, fewer at the start.  (steps,) float64"""
    padded = np.concatenate([np.zeros(window), np.asarray(loss, dtype=float)])
    # Each sum by itself: in differences of running sums one huge loss hides all that follow.
    sums = np.lib.stride_tricks.sliding_window_view(padded, window)[1:].sum(axis=1)
    return sums / np.minimum(np.arange(1, len(sums) + 1), window)


def excess(loss) -> np.ndarray:
    """By how much the mean loss is above its lowest so far, in nats, at each step.  (steps,)"""
    mean = window_mean(loss)
    return mean - np.minimum.accumulate(mean)


def rise(loss, settled: int = 600) -> float:
    """By how much the mean loss is above its lowest so far, at most, from a step on; what is not
    finite is left out.  nats"""
    return float(np.nanmax(excess(loss)[settled:], initial=0.0))


def find_explosion(loss) -> Explosion | None:
    """The first explosion in a loss per step, or None; a rise that comes back is a spike."""
    loss = np.asarray(loss, dtype=float)
    broken = np.flatnonzero(~np.isfinite(loss))
    finite = loss[: broken[0]] if len(broken) else loss
    mean = window_mean(finite)
    low = np.minimum.accumulate(mean) if len(mean) else mean
    for onset in np.flatnonzero(mean >= low + RISE):
        after = mean[onset : onset + PATIENCE + 1]
        if (after <= low[onset] + RETURN).any():
            continue
        return Explosion(int(onset), bool(len(broken)) or len(after) > PATIENCE)
    return Explosion(int(broken[0]), True) if len(broken) else None
