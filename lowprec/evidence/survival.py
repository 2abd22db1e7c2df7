"""Time to explosion: curves over seeds, and whether an arm may be said to prevent explosions.

A run that had not exploded when it ended is censored: its time is known to be longer than that.
Curves are Kaplan and Meier's (J. Am. Stat. Assoc. 53, 1958), their intervals Greenwood's after two
logarithms, both from scipy. Counts are compared by Fisher's exact test, times by the log-rank test,
with the p of large samples or, for few runs, over all ways to deal them to the two arms.
P values are adjusted for the number of arms compared by Holm's method (Scand. J. Stat. 6, 1979).

What counts as an explosion, and when a run is censored, is decided in `lowprec.records.runs`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import scipy

from lowprec import UserError
from lowprec.records.explosion import PATIENCE
from lowprec.records.runs import campaign_folder, load_runs, nearest, require_arms, run_paths
from lowprec.training.plan import load_campaign

SEEDS, NEARLY_ALL, LEVEL = 8, 7 / 8, 0.05
"""To say "prevents": seeds an arm, share of the base's seeds that explode, adjusted p below."""


class Known(dict):
    """A dict of what there is, which says in a sentence what there is not. of: the words before
    what is asked for."""

    def __init__(self, pairs, of: str):
        super().__init__(pairs)
        self.of = of

    def __missing__(self, key):
        raise UserError(f"{self.of} {key}; it has {', '.join(map(str, self)) or 'none'}")


@dataclass(frozen=True)
class Arm:
    """An arm of a campaign: what was planned, `config` of its first seed and `seeds`, and what is
    recorded, `runs`, its part of `load_runs` or None."""

    name: str
    config: object
    seeds: tuple[int, ...]
    runs: pd.DataFrame | None

    @property
    def n(self) -> int:
        return 0 if self.runs is None else len(self.runs)

    @property
    def complete(self) -> bool:
        """Whether every planned seed is recorded."""
        return self.n > 0 and set(self.seeds) <= set(self.runs.seed)

    @property
    def exploded(self) -> int:
        return self.exploded_by(np.inf)

    def exploded_by(self, step: float) -> int:
        """How many of its runs exploded, at that step at the latest."""
        return int((self.runs.exploded & (self.runs.duration <= step)).sum()) if self.n else 0

    @property
    def rising(self) -> int:
        """Of how many of its runs it is not known whether they exploded, see `counted`."""
        return self.n - counted(self.runs)[1] if self.n else 0

    @property
    def by_seed(self) -> dict:
        """The runs, {seed: Run}."""
        pairs = zip(self.runs.seed, self.runs.run, strict=True) if self.n else ()
        return Known(pairs, f"arm {self.name} has no recorded run of seed")

    @property
    def onsets(self) -> dict[int, int]:
        """The step at which each run exploded, or began to rise unconfirmed, {seed: step}."""
        return {s: run.explosion.onset for s, run in self.by_seed.items() if run.explosion}

    def only(self, seeds) -> Arm:
        """The arm with some of its seeds alone, those that it plans."""
        wanted = set(seeds)
        seeds = tuple(seed for seed in self.seeds if seed in wanted)
        runs = self.runs[self.runs.seed.isin(seeds)] if self.n else None
        return replace(self, seeds=seeds, runs=None if runs is None or runs.empty else runs)

    def joined(self, other: Arm) -> Arm:
        """The arm with the seeds and runs of an arm of another campaign, of the same config."""
        runs = [arm.runs for arm in (self, other) if arm.n]
        if twice := sorted({*self.by_seed} & {*other.by_seed}):
            raise UserError(f"arms {self.name} and {other.name} both have seed {twice[0]}")
        both = pd.concat(runs).sort_values("seed", ignore_index=True) if runs else None
        return replace(self, seeds=tuple(sorted({*self.seeds, *other.seeds})), runs=both)

    def outcomes(self, by: float = np.inf) -> pd.Series:
        """Whether each seed exploded by a step, True or False, those left out of which it is not
        known, see `counted`. What a claim that counts runs or seeds takes."""
        if not self.n:
            return pd.Series(dtype=bool)
        known = self.runs[~_open_by(self.runs, by)]
        return pd.Series(_exploded(known, by).to_numpy(), index=known.seed.to_numpy())


def counted(runs: pd.DataFrame, by: float = np.inf) -> tuple[int, int]:
    """How many of these runs exploded by a step, and of how many it is known whether they did.

    runs: rows of `load_runs`. It is not known of a run that ended by that step with a rise which
    nothing confirms: it is censored at its onset. Nor of one that its loss scale ended, that is too
    short to confirm a rise, or that has fewer steps than asked for.
    """
    return int(_exploded(runs, by).sum()), len(runs) - int(_open_by(runs, by).sum())


def _exploded(runs: pd.DataFrame, by: float) -> pd.Series:
    return runs.exploded.astype(bool) & (runs.duration <= by)


def _open_by(runs: pd.DataFrame, by: float) -> pd.Series:
    """Which runs ended by a step with a rise that nothing confirms, before all their steps, before
    a rise could be confirmed, or before that step."""
    broke_off = runs.run.map(lambda r: r.explosion is not None or r.info["ended"] != "completed")
    unsure = broke_off | (runs.duration <= PATIENCE)
    short = (runs.duration < by) & np.isfinite(by)
    return ~runs.exploded.astype(bool) & (short | unsure & (runs.duration <= by))


def exploded_of(*arms: Arm) -> str:
    """How many of the runs of these arms exploded, of those of which it is known: "4 of 12"."""
    known = [arm.outcomes() for arm in arms]
    return f"{sum(int(some.sum()) for some in known)} of {sum(map(len, known))}"


def load_arms(campaign, arms=()) -> dict[str, Arm]:
    """The arms that a campaign plans, with as much of each as is recorded, perhaps nothing.

    campaign: its name in data/runs, or its folder. arms: those that it must plan. Raises
    `UserError` as `load_campaign` and `load_runs` do, but not for runs that are still to come.
    """
    folder = campaign_folder(campaign)
    if not folder.is_dir():
        raise UserError(f"there is no campaign {campaign}: {nearest(campaign, folder)}")
    planned: dict[str, list] = {}
    for job in load_campaign(folder / "campaign.yaml"):
        planned.setdefault(job.arm, []).append(job.config)
    require_arms(campaign, arms, planned)
    recorded = {}
    if run_paths(folder):
        recorded = dict(iter(load_runs(folder).groupby("arm")))
    found = {
        arm: Arm(arm, configs[0], tuple(c.seed for c in configs), recorded.get(arm))
        for arm, configs in planned.items()
    }
    return Known(found, f"campaign {folder.name!r} has no arm")


def measured(arms: dict, **measures) -> pd.DataFrame:
    """A row a run: columns arm (its label), seed, run, and one of each measure's name.

    arms: {label: `Arm`}. measures: name=function of a `lowprec.records.runs.Run`. An arm without
    runs has one row, with NaN for each measure and no run.
    """
    rows = []
    for label, arm in arms.items():
        for seed, run in arm.by_seed.items():
            numbers = {name: measure(run) for name, measure in measures.items()}
            rows.append(dict(arm=label, seed=seed, run=run) | numbers)
        if not arm.n:
            rows.append(dict(arm=label))
    return pd.DataFrame(rows, columns=["arm", "seed", "run", *measures])


def onsets(arms: dict, absent: str = "") -> pd.DataFrame:
    """When each run exploded, in words: a row for each label of some arms, a column for each seed.

    arms: {label: `Arm`}. absent: what stands where an arm plans a seed and has no run of it.
    """

    def words(run) -> str:
        if not run.explosion:
            return f"none by {len(run.metrics):,}"
        return f"{run.explosion.onset:,}" + " (unconfirmed)" * (not run.explosion.confirmed)

    said = {
        label: dict.fromkeys(arm.seeds, absent) | {s: words(run) for s, run in arm.by_seed.items()}
        for label, arm in arms.items()
    }
    table = pd.DataFrame.from_dict(said, orient="index", dtype=object).sort_index(axis=1)
    table = table.reindex(list(arms)).fillna("").rename(columns="seed {}".format)
    return table.rename_axis("onset").reset_index()


def kaplan_meier(table: pd.DataFrame) -> pd.DataFrame:
    """The share of an arm's runs without an explosion, a row at step 0 and wherever it may change.

    table: one row a run, of `lowprec.records.runs.load_runs`; `duration` in steps, `exploded` true
    or false.
    Returns columns arm, step, survival, low, high (95 % interval; NaN where survival is 1 or 0,
    for which there is no such interval), at_risk, exploded, censored (numbers of runs at that
    step; a run that exploded in the step in which another is censored went first).
    Source: Kaplan & Meier 1958; scipy.stats.ecdf.
    """
    curves = []
    for name, group in _groups(table).items():
        curve = _curve(group)
        curve.insert(0, "arm", name)
        curves.append(curve)
    return pd.concat(curves, ignore_index=True)


def compare_arms(table: pd.DataFrame, base: str, others=None, test: str = "fisher") -> pd.DataFrame:
    """Each arm against `base`: one row an arm, the base first.

    table: one row a run, of `lowprec.records.runs.load_runs`. others: the arms to compare, all by
    default; they are what Holm's correction counts, so name them before looking. test: "fisher",
    exact, of the numbers that exploded within `horizon`, the steps in which every run of both arms
    that did not explode was followed; "logrank", of the times, which relies on large n;
    "permutation", exact, of the same statistic over all ways to deal the runs to the two arms
    (beyond 20,000 ways, so many drawn). Two-sided; seeds count as independent samples of each arm.

    Returns columns arm, n (runs), exploded (runs), median, low, high (steps, with the 95 %
    interval; inf where the curve or its band does not come down to one half), time (the same in
    words, or "not reached"), test, horizon (steps), p, p_holm, verdict. Where of no run of an arm
    it is known whether it exploded, as all are too short, p is NaN. The verdict is "prevents"
    if none of at least 8 runs exploded, at least 7 in 8 of at least 8 runs of the base did by the
    horizon, and p_holm < 0.05; without that an arm in which none exploded is "not seen in n".
    Raises `UserError` for an unknown arm, no arm to compare, or a seed that counts twice.
    Source: scipy.stats.fisher_exact, logrank, permutation_test; Holm 1979.
    """
    groups = _groups(table)
    others = [name for name in groups if name != base] if others is None else list(others)
    for name in (base, *others):
        if name not in groups:
            raise UserError(f"there is no arm {name!r}; take one of {', '.join(map(str, groups))}")
    if not others or base in others or len(set(others)) < len(others):
        raise UserError(f"name at least one other arm than the base {base!r}, each once")
    if test not in ("fisher", "logrank", "permutation"):
        raise UserError(f"test={test!r} must be fisher, logrank or permutation")
    p = [
        _p_value(groups[base], groups[name], test)
        if _known(groups[base]) and _known(groups[name])
        else np.nan
        for name in others
    ]
    rows = [{"arm": base, **_summary(groups[base]), "verdict": "base"}]
    for name, value, adjusted in zip(others, p, holm(p), strict=True):
        rows.append({
            "arm": name, **_summary(groups[name]), "test": test,
            "horizon": _horizon(groups[base], groups[name]), "p": value, "p_holm": adjusted,
            "verdict": _verdict(groups[base], groups[name], adjusted),
        })  # fmt: skip
    columns = ["arm", "n", "exploded", "median", "low", "high", "time", "test", "horizon", "p",
               "p_holm", "verdict"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def holm(p) -> np.ndarray:
    """P values adjusted for their number by Holm's step-down method.  (k,) -> (k,) float64"""
    p = np.asarray(p, dtype=float)
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


def _groups(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    missing = {"arm", "seed", "duration", "exploded"} - set(table.columns)
    if missing:
        raise UserError(f"the table of runs has no column {', '.join(sorted(missing))}")
    twice = table[table.duplicated(["arm", "seed"])]
    if len(twice):
        name, seed = twice.iloc[0][["arm", "seed"]]
        raise UserError(f"arm {name} has seed {seed} twice; a seed counts once")
    return dict(iter(table.groupby("arm", sort=False)))


def _times(group: pd.DataFrame) -> scipy.stats.CensoredData:
    return scipy.stats.CensoredData.right_censored(group.duration, ~group.exploded.astype(bool))


def _curve(group: pd.DataFrame) -> pd.DataFrame:
    """The columns of `kaplan_meier` of one group."""
    survival = scipy.stats.ecdf(_times(group)).sf
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The confidence interval is undefined")
        interval = survival.confidence_interval(0.95, method="log-log")
    exploded = group.exploded.astype(int)
    runs = exploded.groupby(group.duration).agg(["sum", "size"])
    step = np.union1d([0], runs.index).astype(int)
    exploded, ended = runs.reindex(step, fill_value=0).to_numpy().T
    share = survival.evaluate(step)
    low, high = (
        np.where((share > 0) & (share < 1), side.evaluate(step), np.nan) for side in interval
    )
    return pd.DataFrame(
        dict(
            step=step, survival=share, low=low, high=high,
            at_risk=len(group) - np.cumsum(ended) + ended, exploded=exploded,
            censored=ended - exploded,
        )
    )  # fmt: skip


def _summary(group: pd.DataFrame) -> dict:
    """n, exploded, and the median time with the interval in which the band crosses one half."""
    curve = _curve(group)

    def first(bound) -> float:
        """The first step at which `bound` is at most one half, up to rounding."""
        below = curve.step[bound <= 0.5 + 1e-12]
        return float(below.iloc[0]) if len(below) else np.inf

    median = first(curve.survival)
    low, high = first(curve.low.where(curve.survival > 0, 0.0)), first(curve.high)
    words = "not reached"
    if np.isfinite(median):
        upper = f"{high:,.0f}" if np.isfinite(high) else "not reached"
        words = f"{median:,.0f} [{low:,.0f}, {upper}]"
    return dict(n=len(group), exploded=int(group.exploded.sum()), median=median, low=low, high=high,
                time=words)  # fmt: skip


def _horizon(*groups: pd.DataFrame) -> int:
    """The first steps, so many, in which it is known of every run whether it exploded."""
    runs = pd.concat(groups)
    censored = runs.duration[~runs.exploded.astype(bool)]
    return int(censored.min() if len(censored) else runs.duration.max() + 1)


def _exploded_within(group: pd.DataFrame, steps: int) -> int:
    return int((group.exploded.astype(bool) & (group.duration < steps)).sum())


def _p_value(base: pd.DataFrame, other: pd.DataFrame, test: str) -> float:
    if test == "logrank":
        known = min(base.duration.max(), other.duration.max())  # by then both have runs to lose
        if not any(_exploded_within(group, known + 1) for group in (base, other)):
            return 1.0
        with np.errstate(invalid="ignore"):  # 0/0: they all exploded at once
            p = scipy.stats.logrank(_times(base), _times(other)).pvalue
        return 1.0 if np.isnan(p) else float(p)
    if test == "permutation":
        return _permutation(base, other)
    steps = _horizon(base, other)
    counts = [(k := _exploded_within(g, steps), len(g) - k) for g in (base, other)]
    return float(scipy.stats.fisher_exact(counts).pvalue)


def _permutation(base: pd.DataFrame, other: pd.DataFrame) -> float:
    """The share of all ways to deal the runs to two arms whose log-rank statistic is as large."""
    both = pd.concat([base, other])
    ends, exploded = both.duration.to_numpy(), both.exploded.to_numpy(bool)
    if not exploded.any():
        return 1.0
    times, deaths = np.unique(ends[exploded], return_counts=True)
    risk = ends[:, None] >= times
    every = risk.sum(0)
    share = deaths / every
    spread = share * (every - deaths) / (every * np.maximum(every - 1, 1))

    def statistic(one, other, axis=-1):
        """Log-rank, of many pairs of arms at once: an arm is the numbers of its runs, on the last
        axis. `scipy.stats.logrank` takes one pair."""
        mine = risk[one].sum(-2)
        variance = (mine * (every - mine) * spread).sum(-1)
        more = abs(exploded[one].sum(-1) - mine @ share)
        # no variance: no explosion could tell the arms apart
        return np.divide(more, np.sqrt(variance), out=np.zeros(more.shape), where=variance > 0)

    if min(len(base), len(other)) == 1:  # scipy asks for two runs and more
        numbers = np.arange(len(both))
        dealt = np.array([statistic(numbers[[i]], np.delete(numbers, i)) for i in numbers])
        return float((dealt >= dealt[0 if len(base) == 1 else -1] - 1e-12).mean())
    found = scipy.stats.permutation_test(
        np.split(np.arange(len(both)), [len(base)]), statistic, vectorized=True, batch=1_000,
        n_resamples=20_000, alternative="greater", random_state=0,
    )  # fmt: skip
    return float(found.pvalue)


def _known(group: pd.DataFrame) -> bool:
    """Whether it is known of one run at least whether it exploded."""
    return "run" not in group or counted(group)[1] > 0


def _verdict(base: pd.DataFrame, other: pd.DataFrame, p_holm: float) -> str:
    if not _known(other):
        return "not known of any"
    exploded, n = counted(other) if "run" in other else (int(other.exploded.sum()), len(other))
    if exploded:
        return f"seen in {exploded} of {n}"
    share = _exploded_within(base, _horizon(base, other)) / len(base)
    enough = min(n, len(base)) >= SEEDS and share >= NEARLY_ALL and p_holm < LEVEL
    return "prevents" if enough else f"not seen in {n}"
