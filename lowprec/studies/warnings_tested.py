"""Which number of a run warns of its explosion, how early, and how often for nothing.

Six signals of every recorded run with probes at most LAG steps apart are read every `clock` steps,
from step SETTLED on. An alarm is a reading above a level with none above it in the REST steps
before. A level is chosen on some runs without an explosion and judged on others.

Read of a run are the steps before its onset. A run without a rise is healthy as far as it was
watched, so its last `PATIENCE` steps are left out: a rise after them would not have been seen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from lowprec import UserError
from lowprec.evidence.heads import HEAD, end_of
from lowprec.records.explosion import PATIENCE, WINDOW, excess
from lowprec.records.files import data_root
from lowprec.records.runs import load_runs, run_paths

SIGNALS = {
    "loss": "loss above its minimum",
    "gradient": "gradient norm",
    "sigma": "largest σ(W_Q)",
    "growth": "growth of σ(W_Q)",
    "sign": "signed sum of δ's errors",
    "ties": "tied rows",
}
SETTLED, REST, LAG, AHEAD = 600, 1000, 200, 100
"""First step that is read; quiet steps before another alarm; steps in which σ(W_Q) grows; least
notice of a warning."""
FINE = 50
"""Steps between the probes of some campaigns; the others have 200."""
OUTCOMES = ("healthy", "explodes", "not finite", "open")
"""open: it ended with a rise that nothing confirms."""


def load(campaigns: Iterable[str] = ()) -> pd.DataFrame:
    """A row a recorded run: campaign, arm, name, seed, policy, positions, outcome, end, apart,
    hardware, run; without runs whose probes are more than LAG steps apart.

    campaigns: all that have runs, by default. outcome: of OUTCOMES; "not finite" if the loss does
    not rise before that. end: step of the onset, or number of steps. apart: steps between probes.
    A run that repeats another, or its first steps, loss by loss counts once, as the longest.
    """
    root = data_root() / "runs"
    names = list(campaigns) or sorted(path.name for path in root.iterdir() if run_paths(path))
    rows = []
    for name in names:
        for run in load_runs(name).run:
            config = run.info["config"]
            if config["probe_every"] > LAG:
                continue
            rows.append(dict(
                campaign=name, arm=run.info["arm"], name=run.name, seed=run.seed,
                policy=str(run.policy), positions=config.get("positions", "learned"),
                outcome=_outcome(run), end=end_of(run), apart=config["probe_every"],
                hardware=run.hardware, run=run,
            ))  # fmt: skip
    table = pd.DataFrame(rows)
    return table[~_repeats(table.run)].reset_index(drop=True)


def _outcome(run) -> str:
    found = run.explosion
    if found is None:
        return "healthy"
    if not np.isfinite(run.metrics.loss[found.onset]):
        return "not finite"
    return "explodes" if found.confirmed else "open"


def _repeats(runs: pd.Series) -> pd.Series:
    """Whether each run has the losses of the beginning of one that is longer, or comes before."""
    kept: dict[bytes, list[np.ndarray]] = {}
    repeats = pd.Series(False, index=runs.index)
    lengths = runs.map(lambda run: len(run.metrics))
    for i in lengths.sort_values(ascending=False, kind="stable").index:
        loss = runs[i].metrics.loss.to_numpy()
        alike = kept.setdefault(loss[:WINDOW].tobytes(), [])
        repeats[i] = any(np.array_equal(x[: len(loss)], loss, equal_nan=True) for x in alike)
        if not repeats[i]:
            alike.append(loss)
    return repeats


def readings(run, clock: int = 200) -> pd.DataFrame:
    """The signals of a run before its onset or end, a row each `clock` steps: step, left, SIGNALS.

    left: steps to the onset or the end. loss: the 50-step mean above its lowest so far, nats;
    gradient: the 50-step median of the norm before clipping, both the largest of these steps.
    sigma: the largest σ(W_Q) of a head; growth: the largest factor by which one grew in LAG steps;
    sign: the largest |Σε|/Σ|ε| of a head in these steps, 0 where δ has no error; ties: the largest
    share of tied rows of a head. Raises `UserError` if probes are too far apart, or LAG is.
    """
    apart = run.info["config"]["probe_every"]
    if clock % apart or LAG % clock:
        raise UserError(
            f"{run.name} has probes every {apart} steps: clock={clock} must be a multiple of that, "
            f"and {LAG} a multiple of clock"
        )
    end = end_of(run)
    metrics, probes = run.metrics[:end], run.probes[run.probes.step < end]
    norm = metrics.grad_norm.fillna(np.inf).clip(upper=1e30)  # a median of infinities is NaN
    steps = pd.DataFrame(
        dict(loss=excess(metrics.loss), gradient=norm.rolling(WINDOW, min_periods=1).median())
    )
    table = steps.groupby(metrics.step // clock).max()
    heads = probes.groupby([probes.step // clock, *(probes[name] for name in HEAD)])
    sums = heads[["delta_bias", "delta_abs", "tied_rows", "rows"]].sum()
    sigma = heads.sigma_q.last().unstack(HEAD)
    table["sigma"] = sigma.max(axis=1)
    table["growth"] = (sigma / sigma.shift(LAG // clock)).max(axis=1)
    share = (sums.delta_bias.abs() / sums.delta_abs).where(sums.delta_abs > 0, 0.0)
    table["sign"] = share.groupby("step").max()
    table["ties"] = (sums.tied_rows / sums.rows).groupby("step").max()
    last = (table.index.to_numpy() + 1) * clock - 1
    table.insert(0, "step", last)
    table.insert(1, "left", end - last)
    return table[(last >= SETTLED) & (last < end)].reset_index(drop=True)


def read(runs: pd.DataFrame, clock: int = 200) -> pd.DataFrame:
    """The readings of all runs of `load`, one below the other; column `of`: the run's row there."""
    parts = {i: readings(run, clock) for i, run in runs.run.items()}
    return pd.concat(parts, names=["of"]).reset_index("of").reset_index(drop=True)


def healthy(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """The healthy readings of the healthy ones among some runs."""
    calm = runs.index[runs.outcome == "healthy"]
    return table[table.of.isin(calm) & (table.left > PATIENCE)]


def rings(table: pd.DataFrame, signal: str, level: float, clock: int = 200) -> np.ndarray:
    """Whether an alarm begins at each reading; `table` as `read` orders it.  (readings,) bool"""
    above = (table[signal] > level).to_numpy()
    here = np.arange(len(above))
    before = np.maximum.accumulate(np.where(above, here, -len(above) - REST))
    before = np.concatenate([[-len(above) - REST], before[:-1]])
    start = np.maximum.accumulate(np.where(table["of"].duplicated(), 0, here))
    return above & ((before < start) | (here - before > REST // clock))


def rate(table: pd.DataFrame, signal: str, level: float, clock: int = 200) -> float:
    """Alarms per 1,000 steps of some readings."""
    return 1000 * rings(table, signal, level, clock).sum() / (len(table) * clock)


def level(table: pd.DataFrame, signal: str, per: float, clock: int = 200) -> float:
    """The lowest level at which, as at all higher ones, alarms are `per` steps apart or more.

    table: healthy readings. An alarm every so many steps is the mean over all of them.
    """
    found = np.inf
    for value in np.sort(table[signal].unique())[::-1]:
        if rate(table, signal, value, clock) > 1000 / per:
            break
        found = float(value)
    return found


def notice(runs: pd.DataFrame, table: pd.DataFrame, levels: dict[str, float]) -> pd.DataFrame:
    """Steps from a run's first reading above each signal's level to its end; 0 where there is none.

    A row for each of `runs`, a column a signal.
    """
    of = {
        signal: table[table[signal] > by].groupby("of").left.max() for signal, by in levels.items()
    }
    return pd.DataFrame(of).reindex(runs.index).fillna(0).astype(int)


def peaks(runs: pd.DataFrame, table: pd.DataFrame, ahead: int = AHEAD) -> pd.DataFrame:
    """The largest reading of each signal in each run, `ahead` steps before an onset or more.

    Of healthy runs, of the healthy readings. Runs without a reading have -inf.
    """
    failing = table[~table.of.isin(runs.index[runs.outcome == "healthy"]) & (table.left >= ahead)]
    both = pd.concat([healthy(runs, table), failing])
    return both.groupby("of")[list(SIGNALS)].max().reindex(runs.index).fillna(-np.inf)


def area(failing, calm) -> float:
    """The area under the ROC curve: how often a failing run's number is above a healthy run's.

    Equal ones count as a half.
    """
    a, b = np.asarray(failing)[:, None], np.asarray(calm)[None]
    return float(((a > b) + 0.5 * (a == b)).mean())
