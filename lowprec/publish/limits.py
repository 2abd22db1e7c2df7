"""Where every page stands: how much it asks of a reader, and of whoever changes it.

A page is held to its limits by tests/test_limits.py. What is folded is not counted.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from lowprec.evidence import registry
from lowprec.evidence.registry import LABORATORY
from lowprec.evidence.words import CLAIM_MIME, FIGURE_MIME
from lowprec.publish import form

LIMITS = {
    "code": (250, "lines of code"),
    "strings": (300, "words in strings of its code"),
    "words": (1200, "words that are not folded"),
    "boxes": (5, "claims in full"),
    "figures": (4, "figures"),
    "twice": (0, "figures shown twice"),
    "answer": (60, "words in the answer"),
    "numbers": (3, "numbers in the answer"),
    "sentence": (35, "words in its longest sentence"),
}
"""The most of each on a main page, and what it counts."""
IN_LABORATORY = {"code": (450, LIMITS["code"][1]), "strings": LIMITS["strings"]}
"""The same for a page of the laboratory, which may be as long as it needs."""
PROSE = 4
"""Words from which on a string of the code is taken for prose."""


def of_source(nb: dict) -> dict[str, int]:
    """What the notebook itself shows: lines of code that are not blank, words of prose in it."""
    cells = ["".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "code"]
    lines = sum(bool(line.strip()) for cell in cells for line in cell.split("\n"))
    texts = [text.split() for cell in cells for text in _strings(ast.parse(cell))]
    return {"code": lines, "strings": sum(len(words) for words in texts if len(words) >= PROSE)}


def _strings(node: ast.AST):
    """The strings of some code, the literal parts of an f-string as one; not its docstrings."""
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    for child in ast.iter_child_nodes(node):
        if is_text and child is first and not isinstance(node, ast.Module):
            continue
        if isinstance(child, ast.JoinedStr):
            parts = (part.value for part in child.values if isinstance(part, ast.Constant))
            yield " ".join(parts)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        else:
            yield from _strings(child)


def of_page(nb: dict) -> dict[str, int]:
    """What a reader sees of the executed page."""
    texts = form.visible(nb)
    shown = [
        output.get("data", {}) for cell in nb["cells"]
        if "fold" not in cell["metadata"].get("tags", []) for output in cell.get("outputs", [])
    ]  # fmt: skip
    names = [data[FIGURE_MIME]["name"] for data in shown if FIGURE_MIME in data]
    answer = answer_of("".join(nb["cells"][0]["source"]))
    return {
        "words": len(form.words("\n\n".join(texts))),
        "boxes": sum(CLAIM_MIME in data for data in shown),
        "figures": len(set(names)),
        "twice": len(names) - len(set(names)),
        "answer": len(form.words(answer)),
        "numbers": len(re.findall(r"(?<![\w.])\d[\d.,]*(?: of \d[\d.,]*)?", answer)),
        "sentence": max((len(form.words(text)) for text in sentences(texts)), default=0),
        "seconds": round(nb["metadata"]["lowprec"]["seconds"]),
    }


def answer_of(source: str) -> str:
    """What stands behind **Answer.** in the first cell; empty for a page in the old form."""
    return source.partition("**Answer.**")[2].strip()


def sentences(texts: list[str]) -> list[str]:
    """The sentences of texts in Markdown, without headings, tables, code and HTML."""
    found = []
    for text in texts:
        if text.lstrip().startswith("<"):
            continue
        text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"^(?:#|\||:::|<|\(\w).*$", "", text, flags=re.MULTILINE)
        for block in re.split(r"\n\s*\n|\n(?=[ \t]*(?:[-*]|\d+\.) )", text):
            block = block.replace("*", "")
            found += re.split(r"(?:(?<=[.!?])|(?<=[.!?][)”\"]))\s+(?=[^a-z\s])", block)
    return found


def of(page: str) -> dict[str, tuple[int, str]]:
    """The limits of a page, by its name."""
    return IN_LABORATORY if page.startswith(f"{LABORATORY}/") else LIMITS


def beyond(measured: dict[str, int], page: str = "") -> list[str]:
    """What is above its limit, a phrase each."""
    return [
        f"{measured[key]:,} {what}, where {limit:,} is the most"
        for key, (limit, what) in of(page).items()
        if measured.get(key, 0) > limit
    ]


def pages(root: Path) -> dict[str, dict[str, int]]:
    """What is measured of every page, in the order of the contents; of one not executed, only its
    source."""
    measured = {}
    for name in registry.in_order(registry.pages(root / "notebooks"), root):
        source, page = (root / of / f"{name}.ipynb" for of in ("notebooks", "book/executed"))
        measured[name] = of_source(json.loads(source.read_text()))
        if page.is_file():
            measured[name] |= of_page(json.loads(page.read_text()))
    return measured


def table(measured: dict[str, dict[str, int]]) -> str:
    """The measures as a text, a row a page, with a star at what is above its limit."""
    columns = [*LIMITS, "seconds"]
    width = max(map(len, measured), default=4)
    rows = [f"{'':{width}}" + "".join(f"{name:>10}" for name in columns)]
    rows.append(f"{'at most':{width}}" + "".join(f"{limit:>9,} " for limit, _ in LIMITS.values()))
    for page, found in measured.items():
        limits = of(page)
        cells = [f"{found[key]:,}" if key in found else "" for key in columns]
        above = (key in limits and found.get(key, 0) > limits[key][0] for key in columns)
        marks = ["*" if each else " " for each in above]
        rows.append(
            f"{page:{width}}" + "".join(f"{c:>9}{m}" for c, m in zip(cells, marks, strict=True))
        )
    return "\n".join(line.rstrip() for line in rows)
