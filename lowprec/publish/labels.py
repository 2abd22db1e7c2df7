"""What figures of several kinds share: words of rows, lines and cells, axes, and their faults."""

from __future__ import annotations

from itertools import permutations
from textwrap import fill

import numpy as np
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from scipy import ndimage

from lowprec import UserError
from lowprec.evidence.words import minus, number, span
from lowprec.publish.figure import INK, subplots

WIDE = 5.4
"""Inches: a figure as wide fits on a phone."""
LETTERS = 20
"""Most letters in a line of a label."""


def wrapped(label, letters: int = LETTERS) -> str:
    """A label in lines of at most `letters`, with the line breaks it has."""
    lines = str(label).split("\n")
    return "\n".join(fill(line, letters, break_long_words=False) for line in lines)


def flat(label) -> str:
    """A label in one line."""
    return " ".join(str(label).split())


def row_panels(rows, panels: int = 1):
    """A figure for panels side by side that share their rows: (figure, list of axes)."""
    lines = [wrapped(row).count("\n") + 1 for row in rows]
    height = 0.95 + sum(max(0.34, 0.1 + 0.17 * count) for count in lines)
    fig, axes = subplots(1, panels, figsize=(WIDE, height), sharey=True, squeeze=False)
    return fig, list(axes[0])


def label_rows(ax, rows, first: float = 0.0) -> None:
    """Name the rows of an axis, 1 apart from the `first` at the top, and take out their grid."""
    size = 10 if any("\n" in wrapped(row) for row in rows) else 11
    names, places = [wrapped(row) for row in rows], first + np.arange(len(rows))
    ax.set_yticks(places, names, fontsize=size, linespacing=0.95)
    ax.set_ylim(first + len(rows) - 0.5, first - 0.5)
    ax.grid(axis="y", visible=False)


def beside_rows(ax, words: dict, title: str = "") -> None:
    """Words on the right of some rows, {place: text}, under a title."""
    place = dict(transform=ax.get_yaxis_transform(), va="center", fontsize=9)
    for y, text in words.items():
        ax.text(1.02, y, minus(str(text)), **place)
    ax.text(1.02, -0.7, title, **place)


def label_ends(ax, labels: dict | None = None, gap: float = 0.055) -> None:
    """Write each line's label at its right end, in its colour, instead of a legend.

    labels: label to text, to shorten or to leave out (None). gap: least distance between two
    labels as a fraction of the axis' height.
    """
    ends = []
    for line in ax.get_lines():
        label = (labels or {}).get(line.get_label(), line.get_label())
        x, y = line.get_data()
        if label and not label.startswith("_") and len(x):
            height = ax.transAxes.inverted().transform(ax.transData.transform((x[-1], y[-1])))[1]
            ends.append([height, label, line.get_color()])
    ends.sort(key=lambda end: end[0])
    previous = -1.0
    for height, label, tint in ends:
        previous = max(height, previous + gap)
        ax.text(1.01, previous, label, color=tint, transform=ax.transAxes, va="center")


def label_lines(ax, labels) -> None:
    """Write a label for each group of lines where there is room, near its own, in its colour.

    labels: (text, colour, lines) of each group; call it when limits and scales are set.
    """
    ax.figure.draw_without_rendering()
    box, cell = ax.get_window_extent(), 5
    shape = (int(box.height) // cell, int(box.width) // cell)
    words, costs = [], []
    drawn = [_cells(lines, box, cell, shape) for _, _, lines in labels]
    for i, (text, tint, _) in enumerate(labels):
        words.append(ax.text(0, 0, text, color=tint, fontsize=10, ha="center", va="center"))
        size = words[i].get_window_extent()
        high, wide = (int(length) // cell + 2 for length in (size.height, size.width))
        others = np.logical_or.reduce([np.zeros(shape, bool), *(drawn[:i] + drawn[i + 1 :])])
        costs.append((high, wide, _box_costs(drawn[i], others, high, wide)))
    orders = permutations(range(len(labels))) if len(labels) < 5 else [range(len(labels))]
    _, places = min((_place(costs, order) for order in orders), key=lambda found: found[0])
    for i, (y, x) in places.items():
        place = ((x + 0.5) / shape[1], (y + 0.5) / shape[0])
        words[i].set(transform=ax.transAxes, position=place)


def _box_costs(own, others, high: int, wide: int) -> np.ndarray:
    """What it costs to put the middle of a label on each cell: it should cover no line, be near its
    own and 8 cells from others.  own, others: (rows, columns) bool"""
    near, far = (
        ndimage.minimum_filter(ndimage.distance_transform_edt(~hit), (high, wide))
        for hit in (own, others)
    )
    covered = high * wide * ndimage.uniform_filter(1.0 * (own | others), (high, wide))
    cost = 4 * covered + near + np.maximum(8 - far, 0) * others.any()
    inside = np.zeros(own.shape, bool)
    rows, columns = own.shape
    inside[high // 2 : rows - high // 2, wide // 2 : columns - wide // 2] = True
    return cost + 1e6 * ~inside


def _place(costs, order) -> tuple[float, dict]:
    """Labels put down in an order, each where it costs least: (cost, {label: (row, column)})."""
    total, places = 0.0, {}
    for i in order:
        high, wide, cost = costs[i]
        cost = cost.copy()
        for k, (y, x) in places.items():
            up, aside = (high + costs[k][0]) // 2, (wide + costs[k][1]) // 2
            cost[max(y - up, 0) : y + up + 1, max(x - aside, 0) : x + aside + 1] += 1e4
        places[i] = tuple(map(int, np.unravel_index(cost.argmin(), cost.shape)))
        total += cost[places[i]]
    return total, places


def _cells(lines, box, cell: int, shape) -> np.ndarray:
    """The cells of a grid over the axes through which lines go, (rows, columns) bool."""
    hit = np.zeros(shape, bool)
    for line in lines:
        xy = line.axes.transData.transform(np.transpose(line.get_data()))
        xy = xy[np.isfinite(xy).all(1)]
        if len(xy) > 1:  # points close enough for no cell to be jumped
            pieces = np.abs(np.diff(xy, axis=0)).max(1) // cell + 1
            at = np.concatenate([i + np.arange(k) / k for i, k in enumerate(pieces.astype(int))])
            xy = np.transpose([np.interp(at, np.arange(len(xy)), column) for column in xy.T])
        column, row = ((xy - (box.x0, box.y0)) // cell).astype(int).T
        inside = (row >= 0) & (row < shape[0]) & (column >= 0) & (column < shape[1])
        hit[row[inside], column[inside]] = True
    return hit


def log_ticks(axis) -> None:
    """Plain numbers at 1 and 3, or 1, 2 and 5, of each decade of a logarithmic axis; where these
    are fewer than two, some others."""
    low, high = sorted(axis.get_view_interval())
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    few = np.log10(high / low)
    steps = (1, 2, 5) if few < 1.3 else (1, 3) if few < 3 else (1,)
    ticks = [t for d in decades for s in steps if low <= (t := float(f"{s}e{int(d)}")) <= high]
    axis.set_major_locator(FixedLocator(ticks) if len(ticks) > 1 else MaxNLocator(4))
    axis.set_major_formatter(lambda value, _: number(float(f"{value:.10g}"), True))
    axis.set_minor_locator(NullLocator())


def set_axis(ax, which: str, label: str, log: bool, limits, line) -> None:
    """Label, scale, limits and lines of reference of the axis of the numbers, x or y."""
    for value in np.atleast_1d([] if line is None else line):
        (ax.axvline if which == "x" else ax.axhline)(value, color=INK, lw=0.8)
    ax.set(**{f"{which}label": label})
    if log:
        ax.set(**{f"{which}scale": "log"})
    ax.set(**{f"{which}lim": limits})
    if log:
        log_ticks(getattr(ax, f"{which}axis"))


def split_at(axes, places, way: str) -> None:
    """A line before the row or the column of each number."""
    for ax in axes:
        for place in np.atleast_1d(places):
            (ax.axhline if way == "h" else ax.axvline)(place - 0.5, color=INK, lw=1.5)


def spread(y: float, count: int) -> np.ndarray:
    """Heights of the marks of a row, apart if there is room."""
    return y + min(0.08, 0.6 / count) * (np.arange(count) - (count - 1) / 2)


def nothing(ax, x, y, text, **place) -> None:
    ax.text(x, y, text, va="center", ha="right", fontsize=9, alpha=0.7, **place)


def known(name, what, given, rows) -> None:
    """Raise `UserError` unless all keys of `given` are rows."""
    if unknown := [label for label in given or {} if label not in rows]:
        has = ", ".join(map(flat, rows))
        raise UserError(f"figure {name}: {what} names {flat(unknown[0])}, which is none of {has}")


def range_of(values) -> str:
    """The least and the largest of some numbers, to three digits."""
    return span((float(f"{value:.3g}") for value in values), "{:,.10g}")


def count(things, noun: str) -> str:
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def joined(label, by: str) -> str:
    """A label of a table, in one text if it has several levels."""
    return by.join(map(str, label)) if isinstance(label, tuple) else str(label)
