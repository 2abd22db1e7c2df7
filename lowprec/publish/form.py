"""The form of a page: question, answer and one figure, then the argument, then folds.

A page whose first cell has a line `**Question.**` is in this form. Its author writes sections and
tags cells; where the figure, the verdicts and the small print go is decided here. Tags: `lead`, the
cell whose figure stands under the answer; `fold`, a cell shown under its first line when clicked.
The book renders MyST; a fork, and a page with parameters of its own, are read in JupyterLab, which
shows a directive as it is typed. So they fold with HTML, and their verdicts have no boxes.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path

from lowprec.evidence.registry import LABORATORY, contents
from lowprec.evidence.words import CLAIM_MIME, FIGURE_MIME

WORDS_A_MINUTE = 230
PLACE = re.compile(r'\n*<p class="lowprec-place">.*?</p>', re.DOTALL)


def arrange(nb, about: dict, rerun: str, root: Path | None) -> None:
    """Lay out an executed notebook in place: the lead figure, folds, verdicts, place and rerun.

    rerun: what the last fold says. root: of the book that the page belongs to; None for one with
    parameters of its own, which has no place.
    """
    of_book = root is not None and not about["notebook"].startswith("forks/")
    fold = dropdown if of_book else details
    _move_lead(nb)
    for cell in nb.cells:
        if "fold" in cell.metadata.get("tags", []):
            _fold_markdown(cell, fold) if cell.cell_type == "markdown" else _fold_outputs(cell)
    if of_book:
        _show_claims(nb)
        _leave_out_silent(nb)
    elif root is not None:
        _show_in_place(nb)
    if root is not None:
        nb.cells[0].source = with_place(nb, about, root)
    nb.cells.append(_folded("Rerun, machine, files", rerun, "rerun", fold))


def _leave_out_silent(nb) -> None:
    """Code that shows nothing, such as the set-up, is left to the notebook to be downloaded."""
    for cell in nb.cells:
        if cell.cell_type == "code" and not cell.outputs:
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "remove-cell"]


def _move_lead(nb) -> None:
    for cell in nb.cells:
        if "lead" in cell.metadata.get("tags", []):
            nb.cells.remove(cell)
            nb.cells.insert(1, cell)
            return


def directive(kind: str, title: str, text: str) -> str:
    """A directive of MyST, its fence longer than those inside."""
    longest = max(map(len, re.findall(r"^\s*(:{3,})", text, re.MULTILINE)), default=0)
    fence = ":" * max(3, longest + 1)
    return f"{fence}{{{kind}}} {title}\n{text.strip()}\n{fence}"


def dropdown(title: str, text: str) -> str:
    """A text under a title that unfolds it."""
    return directive("dropdown", title, text)


def details(title: str, text: str) -> str:
    """The same in HTML; the empty lines make what is inside Markdown again."""
    return f"<details><summary>{html.escape(title)}</summary>\n\n{text.strip()}\n\n</details>"


def _folded(title: str, text: str, id: str, fold=dropdown):
    from nbformat.v4 import new_markdown_cell

    return new_markdown_cell(fold(title, text), id=id, metadata={"tags": [id]})


def title_of(line: str) -> str:
    """The words of a heading, of bold text or of a comment."""
    return line.strip().strip("#*").strip()


def _fold_markdown(cell, fold) -> None:
    first, _, rest = cell.source.strip().partition("\n")
    cell.source = fold(title_of(first), rest)


def _fold_outputs(cell) -> None:
    """Jupyter Book folds source and outputs each; `publish.book` gives the second its title."""
    lines = (line for line in cell.source.split("\n") if line.startswith("#"))
    cell.metadata["fold"] = title_of(next(lines, "More"))
    hidden = {"hide-input", "hide-output"}
    cell.metadata["tags"] = [t for t in cell.metadata["tags"] if t not in hidden] + sorted(hidden)


# Verdicts


def _show_claims(nb) -> None:
    """A box for a claim of weight `key`, and for a hypothesis in no claims file; the others in one
    fold."""
    from lowprec.evidence.verdicts import Result

    rest = []
    for cell in nb.cells:
        kept = []
        for output in cell.get("outputs", []):
            record = output.get("data", {}).get(CLAIM_MIME)
            result = record and Result.from_dict(record)
            if result and result.claim.page and result.claim.weight != "key":
                rest.append(result)
                continue
            if result:
                output.data["text/markdown"] = box(result)
            kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept
    if rest:
        counts = Counter(result.verdict for result in rest)
        listed = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        title = f"{len(rest)} more claim{'s' * (len(rest) > 1)} of this page: {listed}"
        nb.cells.append(_folded(title, "\n".join(map(line, rest)), "more-claims"))


def _show_in_place(nb) -> None:
    """Every verdict of a fork where it was made; how it was judged unfolds."""
    from lowprec.evidence.verdicts import Result

    for output in (o for cell in nb.cells for o in cell.get("outputs", [])):
        if record := output.get("data", {}).get(CLAIM_MIME):
            result = Result.from_dict(record)
            judged = details("How it was judged", result.markdown().partition("\n\n")[2])
            head = f"**{result.verdict.capitalize()}: {found(result)}.**"
            output.data["text/markdown"] = f"{head} {result.claim.sentence}\n\n{judged}\n"


def found(result) -> str:
    """What was measured, as short as can be: a count, or the value with what its rule asks of it
    and its n."""
    if result.value is None:
        return result.measured()
    if result.claim.parsed.counts:
        return f"{result.count} {result.claim.unit}".rstrip()
    asked = f"({result.claim.parsed.symbols} asked)"
    return f"{result.text} {asked}, n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{result.size}"


def line(result) -> str:
    """A claim as an item, which other pages link to as claim-ID."""
    id = result.claim.id
    target = f"(claim-{id})=\n  " if result.registered else ""
    rule = result.claim.parsed
    exceptions = rule.counts and rule.limits[0] == 0 and result.value is not None
    what = result.measured() if exceptions else found(result)  # the unit alone would not say
    what = what[0].upper() + what[1:]
    said = f"**{result.verdict}**: {result.claim.sentence} {what}. `{id}`"
    return f"- {target}{said}\n"


def box(result) -> str:
    """A claim in full: the verdict and what was measured, the sentence, its threats and its id;
    the rule unfolds."""
    from lowprec.evidence.verdicts import BOXES, threat_links

    claim = result.claim
    doubt = f"*Doubt it first for: {', '.join(threat_links(claim))}.* " if claim.doubts else ""
    gloss = f" *{claim.gloss}*" if claim.gloss else ""
    name = f":name: claim-{claim.id}\n" if result.registered else ""
    judged = dropdown("How it was judged", result.judged())
    text = f""":class: {BOXES[result.verdict]}
{name}
{claim.sentence}{gloss}

{doubt}`{claim.id}`

{judged}"""
    return directive("admonition", f"{result.verdict.capitalize()}: {found(result)}", text) + "\n"


# The line of place


def with_place(nb, about: dict, root: Path) -> str:
    """The source of the first cell, its line of place new: part and page, minutes, downloads. Code
    has none."""
    if nb["cells"][0]["cell_type"] != "markdown":
        return nb["cells"][0]["source"]
    source = PLACE.sub("", "".join(nb["cells"][0]["source"]))
    title, _, rest = source.partition("\n")
    name = about["notebook"]
    minutes = max(1, round(len(words("\n\n".join(visible(nb)))) / WORDS_A_MINUTE))
    parts = [
        *filter(None, [position(name, root)]),
        f"{minutes} minute{'s' * (minutes > 1)} to read",
        f"computed in {about['seconds']:.0f} s on a {html.escape(about['hardware'])}",
        downloads(name),
    ]
    place = " · ".join(filter(None, parts))
    return f'{title}\n\n<p class="lowprec-place">{place}</p>\n{rest}'


def position(name: str, root: Path) -> str | None:
    """The part of a page and its number in it, by book/_toc.yml; None for a page not in there. For
    one of the laboratory, the main page that it belongs to."""
    parts, file = contents(root), f"executed/{name}"
    for caption, files in parts.items():
        if file in files and name.startswith(f"{LABORATORY}/"):
            return f"{caption}{_belongs(name, root, sum(parts.values(), []))}"
        if file in files:
            part = caption.partition(":")[0]
            return f"{part}, page {files.index(file) + 1} of {len(files)}"
    return None


def _belongs(name: str, root: Path, files: list[str]) -> str:
    """The page of the contents that names this one most often, as a link; empty if none does."""
    texts = {}
    for file in files:
        folder, _, main = file.partition("/")
        source = root / "notebooks" / f"{main}.ipynb"
        if folder == "executed" and "/" not in main and source.is_file():
            texts[main] = source.read_text()
    often = {main: len(re.findall(rf"\b{name}\b", text)) for main, text in texts.items()}
    main = max(often, key=often.get, default=None)
    if not main or not often[main]:
        return ""
    first = "".join(json.loads(texts[main])["cells"][0]["source"]).partition("\n")[0]
    title = html.escape(title_of(first).replace("`", ""))
    return f' of <a href="../{main}.html">{title}</a>'


def downloads(name: str) -> str:
    """Links to a page's files; the book offers its own pages only, and those of the laboratory
    without what they print, which is long."""
    if name.startswith("forks/"):
        return ""
    folder, file = f"{'../' * (1 + name.count('/'))}downloads/{name}", name.rpartition("/")[2]
    source = f'download <a href="{folder}/source.ipynb" download="{file}.ipynb">the notebook</a>'
    if "/" in name:
        return source
    return (
        f'{source} or\n<a href="{folder}/executed.ipynb" download="{file}-executed.ipynb">this '
        "page, executed</a>"
    )


# What a reader sees


def visible(nb) -> list[str]:
    """The texts of an executed page that nothing folds, in Markdown or as plain text."""
    texts = []
    for cell in nb["cells"]:
        if "fold" in cell["metadata"].get("tags", []):
            continue
        if cell["cell_type"] == "markdown":
            texts.append(unfolded("".join(cell["source"])))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if FIGURE_MIME in data:
                texts.append(data[FIGURE_MIME]["caption"])
            elif "text/markdown" in data:
                texts.append(unfolded("".join(data["text/markdown"])))
            elif "text/html" in data:
                texts.append("".join(data["text/html"]))
    return texts


FOLD = re.compile(
    r"^(:{3,})\{dropdown\}.*?^\1[ \t]*$|^<details>.*?^</details>$", re.MULTILINE | re.DOTALL
)


def unfolded(text: str) -> str:
    """Markdown without what a reader has to unfold, and without the line of place."""
    return FOLD.sub("", PLACE.sub("", text))


MARKUP = re.compile(
    r"<style(?s:.*?)</style>|<[^>]+>"
    r"|^:{3,}\{\w+\}|^:{3,}[ \t]*$|^:(?:class|name):.*$|^\(claim-[\w-]+\)=$|^#+ |^[ \t]*[-*] "
    r"|\{[\w:]+\}(?=`)|<[^<>`]+>(?=`)|\]\([^)]*\)|[*_`|\[]",
    re.MULTILINE,
)
"""What a text has beside words: tags, directives, roles, the targets of links, emphasis."""


def words(text: str) -> list[str]:
    """The words of a text in Markdown; a formula without spaces is one."""
    return [word for word in MARKUP.sub(" ", text).split() if re.search(r"\w", word)]
