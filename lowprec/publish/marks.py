"""Marks in rows: what became of the runs of each arm, and numbers of units."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from lowprec import UserError
from lowprec.evidence.survival import Arm, exploded_of
from lowprec.evidence.words import span
from lowprec.publish.figure import INK, colour, hue, save_figure, tint
from lowprec.publish.labels import (
    LETTERS,
    beside_rows,
    count,
    flat,
    known,
    label_rows,
    nothing,
    range_of,
    row_panels,
    set_axis,
    split_at,
    spread,
    wrapped,
)  # fmt: skip

NARROW = 14
"""Most letters in a line of a row's label beside several panels."""


def outcomes(arms, name: str, caption: str, *, split=(), alt: str | None = None) -> None:
    """What became of runs: a row an arm, a mark a run; see `draw_outcomes`.

    arms: {label: `lowprec.evidence.survival.Arm`}, from top to bottom; or {title: {label: Arm}},
    panels side by side that share their rows. split: after how many rows a line is drawn, or
    several such numbers. name, caption, alt: as in `save_figure`; what disc and ring mean is added.
    Raises `UserError` for what is no arm, or if no run is recorded.
    """
    nested = bool(arms) and all(isinstance(some, Mapping) for some in arms.values())
    panels = arms if nested else {"": arms}
    named = [(label, arm) for some in panels.values() for label, arm in some.items()]
    if wrong := [label for label, arm in named if not isinstance(arm, Arm)]:
        raise UserError(f"figure {name}: {flat(wrong[0])} is no arm; take arms of load_arms")
    if not any(arm.n for _, arm in named):
        raise UserError(f"figure {name}: none of its {len(named)} arms has a recorded run")
    letters = LETTERS if len(panels) == 1 else NARROW
    panels = {
        title: {wrapped(label, letters): arm for label, arm in some.items()}
        for title, some in panels.items()
    }
    rows = list(dict.fromkeys(label for some in panels.values() for label in some))
    fig, axes = row_panels(rows, len(panels))
    told, tidy = [], []
    for ax, (title, some) in zip(axes, panels.items(), strict=True):
        words = draw_outcomes(ax, {label: some.get(label) for label in rows})
        told.append(f"{title}: {words}" if title else words)
        ax.set_title(title)
        ax.xaxis.set_major_locator(
            MaxNLocator(6 if len(panels) == 1 else 3, steps=[1, 2, 3, 5, 10])
        )
        there = {rows.index(label): arm for label, arm in some.items() if arm.n}
        beside_rows(ax, {y: exploded_of(arm) for y, arm in there.items()}, "explode")
        tidy += [arm.runs.assign(panel=title, arm=flat(rows[y])) for y, arm in there.items()]
    split_at(axes, split, "h")
    table = pd.concat(tidy).rename(columns={"duration": "step"})
    late = ", or a rise too late to be confirmed, which counts neither way"
    late *= any(arm.rising for _, arm in named)
    save_figure(
        fig,
        table[["panel"] * nested + ["arm", "seed", "step", "exploded"]],
        name,
        alt or f"When runs explode, {count(rows, 'row')}. {' '.join(told)}",
        f"{caption} Disc: onset of an explosion. Ring: the last step without one{late}.",
        runs=table,
    )


def draw_outcomes(ax, arms: dict) -> str:
    """A row for each arm, a mark for each run: a disc at the onset of its explosion, a ring at the
    last step at which a run without one was watched, both in the colour of `tint`.

    arms: label to `lowprec.evidence.survival.Arm`, from top to bottom, or to None for an empty row.
    """
    there = {label: (y, arm) for y, (label, arm) in enumerate(arms.items()) if arm is not None}
    for y, arm in there.values():
        if not arm.n:
            nothing(ax, arm.config.steps, y, f"{len(arm.seeds)} planned, none recorded")
            continue
        own = tint(arm.config)
        for run, height in zip(arm.runs.itertuples(), spread(y, arm.n), strict=True):
            face = own if run.exploded else "none"
            ax.plot(run.duration, height, "o", ms=4.5, mec=own, mfc=face)
    label_rows(ax, list(arms))
    ax.set_xlabel("step")
    ax.set_xlim(0, 1.04 * max(arm.config.steps for _, arm in there.values()))
    ax.xaxis.set_major_formatter("{x:,.10g}")
    return "; ".join(f"{flat(label)}: {fate(arm)}" for label, (_, arm) in there.items()) + "."


def fate(arm) -> str:
    """What became of an arm's runs: "8 of 8 explode, at steps 1,742 to 5,020"."""
    if not arm.n:
        return "none recorded"
    up, known = arm.runs.exploded.astype(bool), arm.runs.seed.isin(arm.outcomes().index)
    calm, words = arm.runs.duration[known & ~up], f"{exploded_of(arm)} explode"
    if up.any():
        words += f", at step{'s' * int(up.sum() > 1)} {span(arm.runs.duration[up], '{:,}')}"
    if len(calm):
        words += f"{', the others not' * int(up.any())} by step {calm.min():,}"
    return words + f", of {arm.rising} more it is not known" * bool(arm.rising)


def dots(
    table: pd.DataFrame, name: str, caption: str, *, x: str, row: str = "arm", words=None,
    split=(), alt: str | None = None, runs=None, hardware=None, **how,
) -> None:  # fmt: skip
    """A number of each unit: a row an arm or a capture, a mark a unit; see `draw_dots` for `how`.

    table: a line a mark; all of it but column `run` is the data behind the figure. words: {row:
    text} on the right of rows. split: after how many rows a line is drawn, or several such numbers.
    runs: by default those in column `run`. name, caption, alt, hardware: as in `save_figure`.
    Raises `UserError` for a column or a row that is not there, or if there is nothing to draw.
    """
    rows = _check_dots(table, name, x, row, words=words or {}, **how)
    fig, (ax,) = row_panels(rows)
    told = draw_dots(ax, table, x=x, row=row, **how)
    beside_rows(ax, {rows.index(label): text for label, text in (words or {}).items()})
    split_at([ax], split, "h")
    runs = table.run.dropna() if runs is None and "run" in table else runs
    shown = table.drop(columns="run", errors="ignore").assign(**{row: table[row].map(flat)})
    alt = alt or f"Dots, {count(rows, 'row')}, {how.get('label') or x}. {told}"
    save_figure(fig, shown, name, alt, caption, hardware, runs)


def draw_dots(
    ax, table: pd.DataFrame, *, x: str, row: str = "arm", label: str = "", interval=None,
    filled: str | None = None, tick: str | None = None, line=None, log: bool = False,
    limits=(None, None), colours=None,
) -> str:  # fmt: skip
    """Marks at column `x` in rows by column `row`, from top to bottom as they first come (or as its
    categories do); returns what they show in words.

    label: of the x axis, with its unit, or the column's name. interval: column of half widths, or
    two, of lower and upper ends. filled: column true for a disc, false for a ring. tick: column of
    a value marked by an upright line. line: where a line of reference goes down all rows, a number
    or several. log: a logarithmic axis. limits: of the axis. colours: {row: policy or "#rrggbb"};
    else a row has the colour of column `policy`, of its runs, or is in ink.
    """
    rows = _rows(table[row])
    hues = _hues(rows, dict(iter(table.groupby(row, observed=True))), colours)
    told = []
    for y, name in enumerate(rows):
        part = table[(table[row] == name) & np.isfinite(table[x].astype(float))]
        if part.empty:
            nothing(ax, 0.99, y, "none recorded", transform=ax.get_yaxis_transform())
            told.append(f"{flat(name)}: none")
            continue
        heights = spread(y, len(part))
        error = _error(part, x, interval)
        for i, value in enumerate(part[x]):
            face = hues[y] if filled is None or part[filled].iloc[i] else "none"
            bar = None if error is None else error[:, i : i + 1]
            ax.errorbar(
                value, heights[i], xerr=bar, fmt="o", ms=4.5, color=hues[y], mfc=face, elinewidth=1
            )
            if tick:
                ends = heights[i] + np.array([-0.5, 0.5]) * max(0.7 / len(part), 0.1)
                ax.plot([part[tick].iloc[i]] * 2, ends, color=INK, lw=2)
        few = f"{len(part)} marks, " if len(part) > 1 else ""
        told.append(f"{flat(name)}: {few}{range_of(part[x])}")
    label_rows(ax, rows)
    set_axis(ax, "x", label or x, log, limits, line)
    return "; ".join(told) + "."


def _check_dots(table, name, x, row, *, words, log=False, colours=None, **columns) -> list:
    """The rows of a figure of dots; see `dots` for what raises."""
    interval = columns.get("interval")
    asked = [x, row, columns.get("filled"), columns.get("tick")]
    asked += [interval] if isinstance(interval, str) else interval or []
    if lacking := [column for column in asked if column is not None and column not in table]:
        has = ", ".join(map(str, table.columns))
        raise UserError(f"the table of figure {name} has no column {lacking[0]!r}; it has {has}")
    values = pd.to_numeric(table[x], errors="coerce")
    if not np.isfinite(values).any():
        raise UserError(f"figure {name} has nothing to draw: column {x!r} has no finite number")
    if log and (values <= 0).any():
        raise UserError(f"figure {name} has numbers not above 0; leave out log=True")
    rows = _rows(table[row])
    known(name, "colours", colours, rows)
    known(name, "words", words, rows)
    return rows


def _rows(column) -> list:
    """The rows of a column: its categories, or its values as they first come."""
    categories = getattr(column.dtype, "categories", None)
    return list(column.unique() if categories is None else categories)


def _hues(rows, parts: dict, colours) -> list[str]:
    """The colour of each row, see `draw_dots`. parts: {row: its part of the table}."""
    hues = []
    for label in rows:
        given, part = (colours or {}).get(label), parts.get(label, pd.DataFrame())
        if given is not None:
            hues.append(hue(given))
        elif "policy" in part and part.policy.notna().any():
            hues.append(colour(part.policy.dropna().iloc[0]))
        elif "run" in part and part.run.notna().any():
            hues.append(tint(part.run.dropna().iloc[0].info["config"]))
        else:
            hues.append(INK)
    return hues


def _error(part, x, interval):
    """Distances of the ends of intervals from column `x`, (2, marks), or None."""
    if interval is None:
        return None
    if isinstance(interval, str):
        return np.tile(part[interval], (2, 1))
    low, high = interval
    return np.array([part[x] - part[low], part[high] - part[x]])
