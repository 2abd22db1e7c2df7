"""Facts: what a page found, under names, for its Markdown and for the documents of the book.

A page says `facts(low="8 of 8", share=0.031)`, and `lowprec.publish.notebook.execute` fills {low}
and {share:.0%} in its Markdown cells. {explosion_low_happens.count} is a field of a claim that the
page checks. A document, which no kernel fills, takes the same from the pages' locks: one of book/
says `{{ fact("the_explosion", "low") }}` (`lowprec.publish.book`), and README.md, read as it is,
has the text between `<!--fact the_explosion.low-->` and `<!--/-->` renewed. Marks also take what
data/ says of itself: `<!--runs mini.recorded-->` counts the runs of a campaign in its manifest, and
`<!--data corpora/pysource.tokens:,-->` is a key of a JSON file there. So no number of a result is
typed, and a name that nothing gives, or that nothing uses, stops the build.
"""

from __future__ import annotations

import difflib
import html
import json
import math
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

from lowprec import UserError
from lowprec.evidence.words import FACTS_MIME, minus, number

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
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if not str(name).isidentifier():
        raise UserError(f"a fact cannot be named {name!r}: take letters, digits and _")
    if not isinstance(value, str | bool | int | float):
        raise UserError(f"fact {name} is a {type(value).__name__}: give a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"fact {name} is {value}: say in words what that means")
    return value


def shown(value, form: str = "") -> str:
    """A value as prose prints it, or by a format of Python's: `shown(0.031, ".0%")` is 3%.

    After ≤ the number is the next above that can be printed so, after ≥ the next below: "at most
    {share:≤.0%}" is true of 0.031 as 4%.
    """
    try:
        if form[:1] in ("≤", "≥"):
            return minus(_bound(value, form[0], form[1:]))
        if form:
            return minus(format(value, form))
    except (ValueError, ArithmeticError):
        raise UserError(f"the format {form!r} is not one for {value!r}") from None
    return value if isinstance(value, str) else number(value)


def _bound(value, side: str, form: str) -> str:
    exact, text = Decimal(repr(value)), format(value, form).replace(",", "")
    said = Decimal(text.rstrip("%")).scaleb(-2 if text.endswith("%") else 0)
    unit = Decimal(1).scaleb(said.as_tuple().exponent)
    beyond = exact - said if side == "≤" else said - exact
    if beyond > unit * Decimal("1e-6"):  # else it is a float's rounding
        said += unit if side == "≤" else -unit
    return format(said, form)


def field(claim, name: str):
    """What FIELDS say of a measured claim, or of one in a lock."""
    if name not in FIELDS:
        raise UserError(f"a claim has no {name!r}: take {', '.join(FIELDS)}")
    if (value := getattr(claim, name)) is None:
        why = f"claim {claim.claim.id} is {claim.verdict} and has no {name}"
        raise UserError(f"{why}: say its .verdict or .n")
    return value


def fill(text: str, values: dict, claims: dict, where: str) -> tuple[str, set[str]]:
    """Markdown with its placeholders filled, and the names of the facts among them.

    values: fact by name. claims: `lowprec.evidence.claims.Result` by id. where: the page, for the
    `UserError` that names what is unknown.
    """
    used = set()

    def put(found: re.Match) -> str:
        if found["name"] is None:
            return found[0]
        name, _, part = found["name"].partition(".")
        name, form = name.replace("-", "_"), found["form"] or ""
        if part:
            known = {id.replace("-", "_"): claim for id, claim in claims.items()}
            return shown(field(_one(name, known, f"{where} checks no claim"), part), form)
        used.add(name)
        return shown(_one(name, values, f"{where} publishes no fact"), form)

    return PLACEHOLDER.sub(put, text), used


def _one(name: str, known: dict, lacking: str):
    """known[name]; raises `UserError` that says what is lacking, and the nearest name."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise UserError(f"{lacking} {name}" + (f": did you mean {close[0]}?" if close else ""))
    return known[name]


def collect(outputs: list) -> dict:
    """All facts among the outputs of a page; raises `UserError` for a name with two values."""
    values: dict = {}
    for output in outputs:
        for name, value in output.get("data", {}).get(FACTS_MIME, {}).items():
            if values.setdefault(name, value) != value:
                raise UserError(f"fact {name} is {values[name]!r} and {value!r}: rename one")
    return values


# In documents, from the locks


def locked_fact(page: str, name: str, form: str = "") -> str:
    """A fact of a page as prose prints it; raises `UserError` for one that its lock has not."""
    from lowprec.evidence.claims import lock

    return shown(_one(name, lock(page)["facts"], f"the lock of {page} has no fact"), form)


def locked_claim(id: str, part: str, form: str = "") -> str:
    """A field of a claim as its page last found it, as prose prints it."""
    from lowprec.evidence.claims import recorded

    return shown(field(_one(id, recorded(), "no lock has a claim"), part), form)


def of_data(file: str, key: str, form: str = "") -> str:
    """What a JSON file of data/ has under a key; of a list, how long it is."""
    from lowprec.records.files import data_root

    path = data_root() / f"{file}.json"
    if not path.is_file():
        raise UserError(f"there is no {file}.json in data/, for its {key}")
    value = _one(key, json.loads(path.read_text()), f"{file}.json of data/ has no key")
    return shown(len(value) if isinstance(value, list) else value, form)


def recorded_runs(campaign: str, key: str = "recorded", form: str = "") -> str:
    """How many runs of a campaign, or of `all`, the manifest of data/ lists."""
    from lowprec.records.files import data_root
    from lowprec.records.packed import RUNS

    if key != "recorded":
        raise UserError(f"of the runs of {campaign} there is no {key!r}: take recorded")
    root = data_root()
    listed = json.loads((root / "manifest.json").read_text())
    parts = [path.split("/") for path in listed if path.startswith("runs/")]
    counts = Counter({name: 0 for _, name, *rest in parts if rest == ["campaign.yaml"]})
    counts.update(name for _, name, *rest in parts if rest[1:] == ["run.json"])
    for name in (name for _, name, *rest in parts if not rest):  # packed, a line a run
        if not (lines := root / "runs" / name / RUNS).is_file():
            raise UserError(f"data/runs/{name} has no {RUNS}; restore it from git")
        counts[name] += len(lines.read_bytes().splitlines())
    counts["all"] = sum(counts.values())
    return shown(_one(campaign, counts, "the manifest has no runs of"), form)


SAYS = {"fact": locked_fact, "claim": locked_claim, "data": of_data, "runs": recorded_runs}
MARKED = re.compile(
    rf"(?P<head><!--(?P<kind>{'|'.join(SAYS)}) "
    r"(?P<of>[\w/-]+)\.(?P<name>\w+)(?::(?P<form>[^>]*))?-->).*?(?P<end><!--/-->)",
    re.DOTALL,
)


def renewed(text: str) -> str:
    """A document with what stands between its marks as the locks and data/ have it."""

    def put(found: re.Match) -> str:
        said = SAYS[found["kind"]](found["of"], found["name"], found["form"] or "")
        return found["head"] + said + found["end"]

    return MARKED.sub(put, text)


CITED = re.compile(
    r"""\bfact\(\s*["']([\w/-]+)["']\s*,\s*["'](\w+)["']|<!--fact ([\w/-]+)\.(\w+)"""
)


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
