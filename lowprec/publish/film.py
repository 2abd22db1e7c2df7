"""A film: a map of a table's numbers at each step, with a slider; in print a few of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import LogNorm, to_hex

from lowprec import UserError
from lowprec.evidence.words import span
from lowprec.publish.figure import ink_on, save_figure, subplots
from lowprec.publish.labels import WIDE, count, flat, joined, log_ticks

SHADES = colormaps["YlOrRd"].resampled(64)
MAX_JSON = 60_000
"""Bytes of the numbers behind the slider."""


def film(
    panels: Mapping[str, pd.DataFrame], name: str, caption: str, *, label: str, still,
    form: str = "{:.1f}", alt: str | None = None, runs=None, hardware=None,
) -> None:  # fmt: skip
    """Maps side by side, one a panel, that a slider takes from step to step, on one log scale.

    panels: {title: numbers above 0, a step a row, (row, column) of the map across}, all of the same
    steps and cells. label: what the numbers are, with their unit. still: steps that are drawn where
    nothing moves, as in print. form: how a number is written. name, caption, alt, runs, hardware:
    as in `save_figure`. `book/_static/film.js` draws what moves.
    Raises `UserError` for panels that differ, numbers that a log scale lacks, or too many.
    """
    first, *others = panels.values()
    if any(not (o.index.equals(first.index) and o.columns.equals(first.columns)) for o in others):
        raise UserError(f"figure {name}: its panels differ in their steps or cells")
    every = np.stack([table.to_numpy(float) for table in panels.values()])
    if not (np.isfinite(every).all() and (every > 0).all()):
        raise UserError(f"figure {name} has a number that a log scale cannot show")
    if absent := [step for step in still if step not in first.index]:
        raise UserError(f"figure {name} has no step {absent[0]} to draw still")
    norm = LogNorm(every.min(), every.max())
    fig = _still(panels, still, label, norm)
    table = pd.concat(
        {title: t.stack([0, 1], future_stack=True) for title, t in panels.items()}, names=["panel"]
    )
    told = "; ".join(
        f"{title}: {span(t.iloc[0], form)} at step {t.index[0]:,}, {span(t.iloc[-1], form)} at "
        f"step {t.index[-1]:,}" for title, t in panels.items()
    )  # fmt: skip
    alt = alt or f"Maps at {count(first.index, 'step')}, {count(panels, 'panel')}, {label}. {told}."
    data = table.rename(flat(label)).reset_index()
    moving = _moving(panels, label, form, norm)
    if len(moving) > MAX_JSON:
        raise UserError(f"figure {name} moves {len(moving):,} bytes and {MAX_JSON:,} is the most: "
                        "take fewer steps")  # fmt: skip
    save_figure(fig, data, name, alt, caption, hardware, runs, moving)


def _still(panels, steps, label, norm):
    """A row of maps a panel, a column a step."""
    size = (WIDE, 0.8 + 1.6 * len(panels))
    fig, axes = subplots(len(panels), len(steps), figsize=size, squeeze=False)
    for line, (title, table) in zip(axes, panels.items(), strict=True):
        for ax, step in zip(line, steps, strict=True):
            grid = table.loc[step].unstack(sort=False)
            cells = ax.imshow(grid, norm=norm, cmap=SHADES, aspect="auto")
            ax.set_title(f"step {step:,}", fontsize=9)
            ax.set_xticks(range(grid.shape[1]), grid.columns, fontsize=8)
            ax.set_yticks([], [])
            ax.tick_params(length=0)
            ax.grid(visible=False)
            ax.spines[:].set_visible(False)
        line[0].set_yticks(range(len(grid)), grid.index, fontsize=8)
        line[0].set_ylabel(title, fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel(table.columns.names[1], fontsize=9)
    bar = fig.colorbar(cells, ax=axes, location="bottom", aspect=50, pad=0.02, label=label)
    log_ticks(bar.ax.xaxis)
    return fig


def _moving(panels, label, form, norm) -> str:
    """What film.js reads: rows, columns, steps and, of each panel and step, the numbers as texts
    and shades, each an index of `colours`, (fill, ink)."""
    first = next(iter(panels.values()))
    cells = first.iloc[0].unstack(sort=False)
    shades = [SHADES(i) for i in range(SHADES.N)]
    about = dict(
        label=label, steps=first.index.tolist(), across=first.columns.names[1],
        rows=[joined(row, " ") for row in cells.index], columns=[str(c) for c in cells.columns],
        ends=[form.format(norm.vmin), form.format(norm.vmax)],
        colours=[(to_hex(shade), ink_on(shade)) for shade in shades],
        panels=[
            dict(
                title=title,
                texts=[[form.format(x) for x in row] for row in table.to_numpy()],
                shades=shades_of(norm, table),
            )
            for title, table in panels.items()
        ],
    )  # fmt: skip
    return json.dumps(about, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def shades_of(norm, table) -> list:
    """The shade of each number, as matplotlib takes it."""
    share = np.asarray(norm(table.to_numpy(float)))
    return np.minimum((share * SHADES.N).astype(int), SHADES.N - 1).tolist()
