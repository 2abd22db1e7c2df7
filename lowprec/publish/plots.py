"""Figures of a page. The usual ones take one call each: data, a name and a caption.

`outcomes`, `dots`, `courses`, `heat` and `film` derive from the data what a figure needs besides:
rows, colours, labels, the alternative text, the table behind it and the runs it was drawn from. Any
other figure is drawn into `subplots` and shown by `save_figure`; a panel of it may be of a usual
kind, drawn by `draw_outcomes`, `draw_dots`, `draw_courses` or `draw_heat`, which return what they
show in words, for its alternative text.
"""

from lowprec.publish.cells import draw_heat, heat
from lowprec.publish.figure import (
    COLOURS,
    INK,
    SPARE,
    colour,
    ink_on,
    look,
    save_figure,
    show_table,
    subplots,
    tint,
)  # fmt: skip
from lowprec.publish.film import film
from lowprec.publish.labels import label_ends, label_lines
from lowprec.publish.lines import courses, draw_courses, loss_course
from lowprec.publish.marks import dots, draw_dots, draw_outcomes, outcomes

__all__ = [
    "COLOURS", "INK", "SPARE", "colour", "courses", "dots", "draw_courses", "draw_dots",
    "draw_heat", "draw_outcomes", "film", "heat", "ink_on", "label_ends", "label_lines", "look",
    "loss_course", "outcomes", "save_figure", "show_table", "subplots", "tint",
]  # fmt: skip
