"""Cells: a table of numbers as a map of colours."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import CenteredNorm, LogNorm, Normalize

from lowprec import UserError
from lowprec.evidence.words import minus, span
from lowprec.publish.figure import INK, ink_on, save_figure
from lowprec.publish.labels import count, flat, joined, label_rows, row_panels, split_at, wrapped

MIDDLE = 0.5
"""Where the middle of the first cell is, from the left and from the top."""


def heat(
    frame: pd.DataFrame, name: str, caption: str, *, alt: str | None = None, runs=None,
    hardware=None, **how,
) -> None:  # fmt: skip
    """A table of numbers as coloured cells, its rows and columns as they are; see `draw_heat`.

    frame: numbers, NaN for an empty cell; it is the data behind the figure. name, caption, alt,
    runs, hardware: as in `save_figure`.
    Raises `UserError` for a table without numbers, or a scale that cannot show them.
    """
    if not all(pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes):
        raise UserError(f"figure {name}: every column of its table must be of numbers")
    numbers, floor = frame.to_numpy(float), how.get("floor")
    if not np.isfinite(numbers).any():
        raise UserError(f"figure {name} has nothing to draw: its table has no finite number")
    if np.isinf(numbers).any():
        raise UserError(f"figure {name}: no colour is that of an infinite number")
    if (scale := how.get("scale")) not in (None, "linear", "log", "centred"):
        raise UserError(f"figure {name}: {scale=} must be linear, log or centred")
    shown = np.nanmin(numbers) > 0 if floor is None else np.nanmax(numbers) > floor > 0
    if scale == "log" and not shown:
        raise UserError(
            f"figure {name}: a log scale takes numbers above 0, or some above a floor= above 0"
        )
    fig, (ax,) = row_panels([joined(row, ", ") for row in frame.index])
    told = draw_heat(ax, frame, **how)
    label = f", {how['label']}" if how.get("label") else ""
    alt = alt or (
        f"Heat map, {count(frame.index, 'row')} by {count(frame.columns, 'column')}{label}. {told}"
    )
    data = frame.set_axis([flat(joined(column, " ")) for column in frame], axis=1)
    data.insert(0, "row", [flat(joined(row, ", ")) for row in frame.index])
    save_figure(fig, data, name, alt, caption, hardware, runs)


def draw_heat(
    ax, frame: pd.DataFrame, *, label: str = "", form: str = "{:.2g}", floor: float | None = None,
    scale: str | None = None, split=(), split_rows=(),
) -> str:  # fmt: skip
    """A cell for each number, which stands in it if there is room, or else beside a bar of colours;
    returns the range of each row in words.

    label: what the numbers are, with their unit. form: how one is written. floor: numbers up to it
    are written "< floor" and have the palest colour. scale: "linear", "log" or "centred" on 0; by
    default from the numbers above the floor. split, split_rows: after how many columns or rows a
    line is drawn, or several such numbers.
    """
    import seaborn as sns  # here: a page without a map need not wait for it

    values = frame.to_numpy(float)
    above = values[values > (-np.inf if floor is None else floor)]
    norm, colours = _scale(above if len(above) else values, scale)
    shown = values if floor is None else np.maximum(values, floor)

    def text(value):
        low = floor is not None and value <= floor
        return "–" if np.isnan(value) else f"< {floor:g}" if low else form.format(value)

    columns = [joined(column, "\n") for column in frame]
    room = 3.7 * 72 / len(columns) / 5  # letters of 9 points in a cell, roughly
    fits = max(len(text(value)) for value in shown.flat) <= room
    bar = dict(location="bottom", aspect=40, pad=0.02, label=label)
    sns.heatmap(
        shown, ax=ax, norm=norm, cmap=colours, cbar=not fits, cbar_kws=bar,
        xticklabels=False, yticklabels=False, linewidths=1, linecolor="face",  # leave no seams
    )  # fmt: skip
    if fits:
        _label_cells(ax, shown, text)
        ax.set_title(label)
    label_rows(ax, [joined(row, ", ") for row in frame.index], MIDDLE)
    narrow = max(len(word) for column in columns for word in column.split()) > room
    turned = dict(rotation=45, ha="right", rotation_mode="anchor") if narrow else {}
    names = columns if narrow else [wrapped(column, int(room)) for column in columns]
    ax.set_xticks(MIDDLE + np.arange(len(columns)), names, fontsize=9, **turned)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    split_at([ax], np.add(split, MIDDLE), "v")
    split_at([ax], np.add(split_rows, MIDDLE), "h")
    told = [
        f"{flat(joined(row, ', '))}: {span(line[np.isfinite(line)], form)}"
        for row, line in zip(frame.index, values, strict=True)
    ]
    return "; ".join(told) + "."


def _label_cells(ax, values, text) -> None:
    """Write text(value) into each cell of a map, in `ink_on` the cell's colour.

    values: (rows, columns), as the map shows them.
    """
    (cells,), panel = ax.collections, ax.figure.axes.index(ax)
    for (row, column), value in np.ndenumerate(values):
        ink = INK if np.isnan(value) else ink_on(cells.to_rgba(value))
        ax.text(
            column + MIDDLE, row + MIDDLE, minus(text(value)), color=ink, fontsize=9,
            ha="center", va="center", gid=f"cell_{panel}_{row}_{column}",
        )  # fmt: skip


def _scale(values, scale: str | None):
    """Norm and colours of cells."""
    low, high = np.nanmin(values), np.nanmax(values)
    if scale is None:
        scale = "centred" if low < 0 < high else "log" if low > 0 and high / low > 8 else "linear"
    if scale == "centred":
        return CenteredNorm(0, max(-low, high)), "RdBu_r"
    return LogNorm(low, high) if scale == "log" else Normalize(low, high), "YlOrRd"
