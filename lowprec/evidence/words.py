"""Numbers as prose prints them, and the names by which a page's outputs are known."""

from __future__ import annotations

import math
import re

PROFILES = ("recorded", "gpu")
"""What a page may be run as: on the recorded runs, or with the runs made anew on a GPU."""

CLAIM_MIME = "application/vnd.lowprec.claim+json"
"""Carried by the output of a verdict (`lowprec.evidence.claims`)."""
FIGURE_MIME = "application/vnd.lowprec.figure+json"
"""Carried by the output of a figure (`lowprec.publish.plots`)."""
FACTS_MIME = "application/vnd.lowprec.facts+json"
"""Carried by the output of named numbers, which the page's Markdown fills in."""


def number(value, exact: bool = False) -> str:
    """A number as prose prints it: whole and large numbers whole, others to four digits or in
    full."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    value += 0  # minus zero is zero
    if (float(value).is_integer() or not exact and abs(value) >= 999.95) and abs(value) < 1e15:
        return f"{value:,.0f}".replace("-", "−")
    return (repr(float(value)) if exact else f"{value:.4g}").replace("-", "−")


def minus(text: str) -> str:
    """The text with a minus sign, at which no line breaks, for each hyphen before a number, but in
    code, formulas and links."""
    parts = r"(`[^`]*`|\$[^$]*\$|\]\([^)]*\))|(?<![\w⁻=/-])-(?=[\d.])"
    return re.sub(parts, lambda found: found[1] or "−", text)


def span(values, form: str = "{:.2f}") -> str:
    """The least and the largest of some numbers in words, one if they read alike."""
    values = list(values)
    ends = (min(values), max(values)) if values else ()
    return minus(" to ".join(dict.fromkeys(form.format(x) for x in ends))) or "none"


def of(truths) -> str:
    """How many of some truths hold, of how many: "3 of 4". truths: a dict, a Series or a list."""
    truths = list(truths.values() if isinstance(truths, dict) else truths)
    return f"{sum(map(bool, truths))} of {len(truths)}"


def say(text: str):
    """A computed text, in Markdown."""
    from IPython.display import Markdown

    return Markdown(minus(text))
