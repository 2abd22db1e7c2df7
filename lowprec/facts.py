"""Facts: what a page found, under names, for its Markdown and for the documents of the book.

A page says `facts(low="8 of 8", share=0.031)`, and `lowprec.notebook.execute` fills {low} and
{share:.0%} in its Markdown cells. {explosion_low_happens.count} is a field of a claim that the page
checks. A document, which no kernel fills, takes the same from the page's lock. So no number of a
result is typed, and a name that nothing gives, or that nothing uses, stops the build.
"""

from __future__ import annotations

import difflib
import html
import math
import re
from pathlib import Path

from lowprec import UserError
from lowprec.words import FACTS_MIME, minus, number

FIELDS = ("value", "n", "count", "verdict")
"""What can be said of a claim."""

NAME = r"[A-Za-z_][\w-]*(?:\.\w+)?"
NO_BREAK = r"(?:(?!\n[ \t]*\n).)"  # an inline piece ends with its paragraph
PLACEHOLDER = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,}).*?(?:^[ \t]*(?P=fence)|\Z)"
    rf"|(?P<ticks>`+){NO_BREAK}+?(?<!`)(?P=ticks)(?!`)"
    rf"|\\\$|\$\$.+?\$\$|\${NO_BREAK}+?(?<!\\)\$"
    r"|\\begin\{(?P<maths>\w+\*?)\}.+?\\end\{(?P=maths)\}"
    r"|(?<![{:])\{(?P<name>" + NAME + r")(?::(?P<form>[^{}`\n]*))?\}(?![`}])",
    re.MULTILINE | re.DOTALL,
)
"""A placeholder, or first what may look like one and is none: code, mathematics, a directive's name
and a role's, which a backtick follows."""


def facts(several: dict | None = None, /, **named) -> None:
    """Publish values under names: `facts(low="8 of 8", share=0.031)`, or from a dictionary.

    A value is a text, a number or a bool. JupyterLab lists them; a page shows nothing.
    """
    from IPython.display import display

    values = {name: _plain(name, value) for name, value in {**(several or {}), **named}.items()}
    rows = "".join(
        f"<tr><td><code>{{{name}}}</code></td><td>{html.escape(shown(value))}</td></tr>"
        for name, value in values.items()
    )
    text = "\n".join(f"{name}: {shown(value)}" for name, value in values.items())
    data = {"text/plain": text, "text/html": f"<table>{rows}</table>", FACTS_MIME: values}
    display(data, raw=True)


def _plain(name: str, value):
    value = value.item() if hasattr(value, "item") else value
    if not str(name).isidentifier():
        raise UserError(f"a fact cannot be named {name!r}: take letters, digits and _")
    if not isinstance(value, str | bool | int | float):
        raise UserError(f"fact {name} is a {type(value).__name__}: give a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"fact {name} is {value}: say in words what that means")
    return value


def shown(value, form: str = "") -> str:
    """A value as prose prints it, or by a format of Python's: `shown(0.031, ".0%")` is 3%."""
    if form:
        try:
            return minus(format(value, form))
        except ValueError:
            raise UserError(f"the format {form!r} is not one for {value!r}") from None
    return value if isinstance(value, str) else number(value)


def field(claim, name: str):
    """What FIELDS say of a measured claim, or of one in a lock."""
    if name not in FIELDS:
        raise UserError(f"a claim has no {name!r}: take {', '.join(FIELDS)}")
    if (value := getattr(claim, name, None)) is None:
        raise UserError(f"this claim has no {name}: take another of {', '.join(FIELDS)}")
    return value


def fill(text: str, values: dict, claims: dict, where: str) -> tuple[str, set[str]]:
    """Markdown with its placeholders filled, and the names of the facts among them.

    values: fact by name. claims: `lowprec.claims.Result` by id. where: the page, for the
    `UserError` that names what is unknown.
    """
    used = set()

    def put(found: re.Match) -> str:
        if found["name"] is None:
            return found[0]
        name, _, part = found["name"].partition(".")
        known = {id.replace("-", "_"): claim for id, claim in claims.items()} if part else values
        name = name.replace("-", "_")
        if name not in known:
            raise UserError(f"{where} says {found[0]}, and {_unknown(name, known, part)}")
        if part:
            return shown(field(known[name], part), found["form"] or "")
        used.add(name)
        return shown(values[name], found["form"] or "")

    return PLACEHOLDER.sub(put, text), used


def _unknown(name: str, known, part: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    kind = "checks no such claim" if part else "publishes no such fact"
    return f"it {kind}" + (f": did you mean {close[0]}?" if close else "")


def collect(outputs: list) -> dict:
    """All facts among the outputs of a page; raises `UserError` for a name with two values."""
    values: dict = {}
    for output in outputs:
        for name, value in output.get("data", {}).get(FACTS_MIME, {}).items():
            if values.setdefault(name, value) != value:
                raise UserError(f"fact {name} is {values[name]!r} and {value!r}: rename one")
    return values


CITED = re.compile(r"""\bfact\(\s*["'](\w+)["']\s*,\s*["'](\w+)["']|<!--\s*fact (\w+)\.(\w+)""")


def documents(root: Path) -> list[Path]:
    """The texts that may cite facts: those of the book, and two that are read as they are."""
    return [*sorted((root / "book").glob("*.md")), root / "README.md", root / "data" / "README.md"]


def cited(root: Path) -> set[tuple[str, str]]:
    """(page, name) of every fact that a document cites."""
    texts = (path.read_text() for path in documents(root) if path.is_file())
    found = (match for text in texts for match in CITED.findall(text))
    return {(a or c, b or d) for a, b, c, d in found}


def refuse_unused(page: str, values: dict, used: set[str], root: Path) -> None:
    """Raise `UserError` for a fact that neither the page nor a document says."""
    idle = [name for name in values if name not in used and (page, name) not in cited(root)]
    if idle:
        raise UserError(
            f"{page} publishes {', '.join(idle)}, which neither its Markdown nor a document says: "
            "leave it out, or say it"
        )
