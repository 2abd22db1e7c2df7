"""Lines: how a number goes on, in each run or otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from lowprec import UserError
from lowprec.evidence.heads import end_of
from lowprec.evidence.survival import Arm, exploded_of
from lowprec.publish.figure import COLOURS, INK, SPARE, hue, save_figure, subplots, tint
from lowprec.publish.labels import WIDE, flat, known, label_lines, range_of, set_axis, wrapped
from lowprec.publish.marks import fate
from lowprec.records.explosion import WINDOW, window_mean

POINTS = 300
"""About as many points of a line are drawn, and stand in the table."""


def courses(
    lines: Mapping, name: str, caption: str, *, alt: str | None = None, runs=None, hardware=None,
    **how,
) -> None:  # fmt: skip
    """How a number goes on: a line a run, one colour an arm; see `draw_courses` for `how`.

    lines: {label: `lowprec.evidence.survival.Arm`, or a Series by step, or a table with the step as
    its index and a column a line}. runs: by default those of the arms. name, caption, alt,
    hardware: as in `save_figure`; what a disc means is added where there is one.
    Raises `UserError` for what is none of these, or if there is nothing that can be drawn.
    """
    kinds = Arm | pd.Series | pd.DataFrame
    if wrong := [label for label, some in lines.items() if not isinstance(some, kinds)]:
        raise UserError(f"figure {name}: {flat(wrong[0])} is no arm, Series or table of lines")
    known(name, "colours", how.get("colours"), list(lines))
    arms = [some for some in lines.values() if isinstance(some, Arm)]
    if not how.get("label") and (how.get("measure") or len(arms) < len(lines)):
        raise UserError(f"figure {name} needs label=, what its y axis shows and the unit")
    fig, ax = subplots(figsize=(WIDE, 3.9))
    told, table = draw_courses(ax, lines, **how)
    lacking = "has nothing to draw: no line has a finite number" if table.empty else ""
    steps = max((len(run.metrics) for arm in arms for run in arm.by_seed.values()), default=0)
    if lacking and not how.get("measure") and 0 < steps < (window := how.get("window", WINDOW)):
        lacking += f" in means of {window} steps; take window= of at most {steps}, the longest run"
    if how.get("log") and (table <= 0).any(axis=None):
        lacking = "has numbers not above 0; leave out log=True"
    if lacking:
        plt.close(fig)
        raise UserError(f"figure {name} {lacking}")
    if any(arm.exploded for arm in arms):
        caption = f"{caption} Disc: onset of an explosion."
    runs = [run for arm in arms for run in arm.by_seed.values()] if runs is None else runs
    what = flat(f"{ax.get_ylabel()} against {ax.get_xlabel()}.")
    alt = alt or f"Lines: {what} {told}"
    save_figure(fig, table.reset_index(), name, alt, caption, hardware, runs)


def draw_courses(
    ax, lines: Mapping, *, measure=None, label: str = "", window: int = WINDOW, start: int = 0,
    past: float = 0, x: str = "step", line=None, log: bool = False, limits=(None, None),
    colours=None,
) -> tuple[str, pd.DataFrame]:  # fmt: skip
    """Lines, labelled where there is room; returns what they show in words, and their points.

    measure: what is drawn of a run, a function of it that returns a Series by step; by default its
    loss, the mean of the last `window` steps. label: of the y axis, with its unit. start: first
    step drawn. past: how many steps after the onset of an explosion, at which a disc stands, a
    line still goes on. x: label of the x axis. line: a level of reference, or several. log,
    limits: of the y axis. colours: {label: policy or "#rrggbb"}; else an arm has that of `tint`, a
    policy's name its own, and what would look like another takes a spare one.
    """
    label = label or (f"training loss, {window}-step mean (nats)" if measure is None else "")
    tables, onsets = {}, {}
    for name, some in lines.items():
        tables[name] = _lines(some, measure or loss_course(window), past).loc[start:]
        onsets[name] = _onsets(some)
    tables = _thinned(tables)
    hues = _line_hues(lines, colours)
    groups, told = [], []
    for name, table in tables.items():
        drawn = []
        for unit, values in table.items():
            values = values.dropna()
            drawn += ax.plot(values.index, values, color=hues[name], lw=1.3, alpha=0.85)
            onset = onsets[name].get(unit)
            if onset is not None and len(values.loc[:onset]):
                at = values.loc[:onset].index[-1]
                ax.plot(at, values[at], "o", ms=4.5, color=hues[name])
        arm = lines[name] if isinstance(lines[name], Arm) else None
        outcome = f"\n{exploded_of(arm)} explode" if arm and arm.n else ""
        groups.append((wrapped(name) + outcome, hues[name], drawn))
        told.append(f"{flat(name)}: {fate(arm) + '; ' if arm else ''}{_ends(table)}")
    set_axis(ax, "y", label, log, limits, line)
    ax.set_xlabel(x)
    ax.xaxis.set_major_formatter("{x:,.10g}")
    label_lines(ax, [group for group in groups if group[2]])
    wide = [t.set_axis([flat(f"{k} {c}".strip()) for c in t], axis=1) for k, t in tables.items()]
    return ". ".join(told) + ".", pd.concat(wide, axis=1).sort_index().rename_axis(x)


def loss_course(window: int = WINDOW):
    """A measure of `draw_courses`: the mean of the last `window` losses of a run, by step."""

    def measure(run) -> pd.Series:
        mean = window_mean(run.metrics.loss, window)
        return pd.Series(mean, run.metrics.step).iloc[window - 1 :]

    return measure


def _lines(some, measure, past: float) -> pd.DataFrame:
    """The lines of one label, a column each; those of runs end `past` steps after an onset."""
    if isinstance(some, pd.Series):
        some = some.to_frame("")
    if isinstance(some, pd.DataFrame):
        return some.where(np.isfinite(some.astype(float)))
    paths = {}
    for seed, run in some.by_seed.items():
        end = end_of(run) - 1 + (past if run.explosion else 0)
        paths[f"seed {seed}"] = measure(run).loc[:end]
    return pd.DataFrame(paths)


def _ends(table) -> str:
    """The first and the last numbers of some lines in words."""
    ends = [line.dropna().iloc[[0, -1]] for _, line in table.items() if line.notna().any()]
    if not ends:
        return "none"
    first, last = np.transpose(ends)
    return f"first {range_of(first)}, last {range_of(last)}"


def _onsets(some) -> dict:
    """{column: step} of the explosions among the lines of one label."""
    if not isinstance(some, Arm) or not some.n:
        return {}
    up = some.runs[some.runs.exploded]
    return {f"seed {seed}": step for seed, step in zip(up.seed, up.duration, strict=True)}


def _thinned(tables: dict) -> dict:
    """Of each table about as many steps as `POINTS`, the same in all, and the last of each line."""
    steps = sorted({step for table in tables.values() for step in table.index})
    kept = set(steps[:: -(-len(steps) // POINTS) or 1])
    thin = {}
    for name, table in tables.items():
        last = {values.last_valid_index() for _, values in table.items()}
        thin[name] = table[table.index.isin(kept | last)]
    return thin


def _line_hues(lines, colours) -> dict[str, str]:
    """The colour of each label, see `draw_courses`; no two alike while the spare ones last."""
    hues, spare = {}, iter(SPARE)
    for name, some in lines.items():
        if name in (colours or {}):
            hues[name] = hue(colours[name])
            continue
        own = tint(some.config) if isinstance(some, Arm) else COLOURS.get(name)
        hues[name] = own if own and own not in hues.values() else next(spare, INK)
    return hues
