"""Cells: a table of numbers as a map of colours."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import CenteredNorm, LogNorm, Normalize

from lowprec import UserError
from lowprec.figure import save_figure
from lowprec.labels import (
    count,
    flat,
    joined,
    label_cells,
    label_rows,
    row_panels,
    split_at,
    wrapped,
)
from lowprec.words import span


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
    if not np.isfinite(frame.to_numpy(float)).any():
        raise UserError(f"figure {name} has nothing to draw: its table has no finite number")
    if (scale := how.get("scale")) not in (None, "linear", "log", "centred"):
        raise UserError(f"figure {name}: {scale=} must be linear, log or centred")
    if scale == "log" and how.get("floor") is None and (frame <= 0).any(axis=None):
        raise UserError(f"figure {name}: on a log scale numbers up to 0 need a floor= above 0")
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
    values = frame.to_numpy(float)
    above = values[values > (-np.inf if floor is None else floor)]
    norm, colours = _scale(above if len(above) else values, scale)
    shown = values if floor is None else np.maximum(values, floor)

    def text(value):
        low = floor is not None and value <= floor
        return "–" if np.isnan(value) else f"< {floor:g}" if low else form.format(value)

    cells = ax.imshow(shown, norm=norm, cmap=colours, aspect="auto")
    columns = [joined(column, "\n") for column in frame]
    room = 3.7 * 72 / len(columns) / 5  # letters of 9 points in a cell, roughly
    if max(len(text(value)) for value in shown.flat) <= room:
        label_cells(ax, cells, shown, text)
        ax.set_title(label)
    else:
        ax.figure.colorbar(cells, ax=ax, location="bottom", aspect=40, pad=0.02, label=label)
    label_rows(ax, [joined(row, ", ") for row in frame.index])
    narrow = max(len(word) for column in columns for word in column.split()) > room
    turned = dict(rotation=45, ha="right", rotation_mode="anchor") if narrow else {}
    names = columns if narrow else [wrapped(column, int(room)) for column in columns]
    ax.set_xticks(range(len(columns)), names, fontsize=9, **turned)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    split_at([ax], split, "v")
    split_at([ax], split_rows, "h")
    told = [
        f"{flat(joined(row, ', '))}: {span(line[np.isfinite(line)], form)}"
        for row, line in zip(frame.index, values, strict=True)
    ]
    return "; ".join(told) + "."


def _scale(values, scale: str | None):
    """Norm and colours of cells."""
    low, high = np.nanmin(values), np.nanmax(values)
    if scale is None:
        scale = "centred" if low < 0 < high else "log" if low > 0 and high / low > 8 else "linear"
    if scale == "centred":
        return CenteredNorm(0, max(-low, high)), "RdBu_r"
    return LogNorm(low, high) if scale == "log" else Normalize(low, high), "YlOrRd"
