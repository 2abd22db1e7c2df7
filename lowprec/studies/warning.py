"""How early a number of a run warns of its explosion.

`lead` takes any number by step, such as `gradient_norm`. That it exceeds a level says nothing by
itself: healthy runs must be measured in the same way.
"""

from __future__ import annotations

import pandas as pd

from lowprec.runs import WINDOW
from lowprec.studies.heads import end_of


def gradient_norm(run, window: int = WINDOW) -> pd.Series:
    """The gradient's norm before clipping: median of the last `window` steps, by step.

    A median shows a jump half a window late, and no single spike.
    """
    norm = run.metrics.grad_norm.rolling(window).median()
    return norm.set_axis(run.metrics.step).iloc[window - 1 :]


def peak(run, number: pd.Series, settled: int = 0) -> float:
    """The largest of a number by step, from step `settled` on and before the run's onset."""
    return float(number.loc[settled : end_of(run) - 1].max())


def lead(run, number: pd.Series, level: float, settled: int = 0) -> int:
    """Steps from the first at which a number is above `level`, from `settled` on, to the onset or
    the end of the run; 0 where it never is before that."""
    before = number.loc[settled : end_of(run) - 1]
    above = before.index[before > level]
    return int(end_of(run) - above[0]) if len(above) else 0
