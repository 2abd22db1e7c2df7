"""Generated pages: what the executed notebooks and claims.yml say, written for the book to include.

book/_generated/claims_paper.md      the claims of Qiu & Yao (2025) with verdict, value and n
book/_generated/claims_counts.md     how many claims of each page have which verdict
book/_generated/claims_all.md        every claim, page by page
book/_generated/claim-ID.md          one claim, for prose that rests on it
book/_generated/figure-NB-NAME.md    one figure, for another page to show
book/_generated/extra/downloads/     sources and executed notebooks, published as they are
book/status.md                       page x profile x date x hardware x duration x verdicts
README.md                            the paper's claims between its two markers, from claims.yml
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lowprec import UserError, claims
from lowprec.claims import Claim, Result
from lowprec.notebook import FIGURE_MIME

PAPER = "qiu2025"
MARKERS = "<!-- claims -->", "<!-- /claims -->"


def write(root: Path) -> list[Path]:
    """Write every generated page of the repository at `root`; returns the paths written.

    Raises `UserError` for a claim whose notebook was executed without checking it.
    """
    book = root / "book"
    registry = claims.load(book / "claims.yml")
    executed = read_executed(book / "executed")
    results = check_coverage(registry, executed, root / "notebooks")
    generated = book / "_generated"
    shutil.rmtree(generated, ignore_errors=True)
    titles = {name: title(nb) for name, nb in executed.items()}
    texts = {
        generated / "claims_paper.md": claims_table(of_paper(registry), results, titles, "Source"),
        generated / "claims_counts.md": counts_table(registry, results, titles),
        generated / "claims_all.md": all_claims(registry, results, titles),
    }
    for id, result in results.items():
        texts[generated / f"claim-{id}.md"] = result.myst()
    for name, nb in executed.items():
        for figure, markup in figures(nb).items():
            texts[generated / f"figure-{name}-{figure}.md"] = raw_html(markup)
    texts[book / "status.md"] = status(root)
    readme = root / "README.md"
    if readme.is_file():
        texts[readme] = with_claims(readme.read_text(), registry)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    return [*texts, *copy_downloads(root, executed)]


def read_executed(folder: Path) -> dict[str, dict]:
    """Executed notebooks by name, as parsed JSON."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.ipynb"))}


def check_coverage(registry, executed, sources: Path) -> dict[str, Result]:
    """The measured result of each claim whose notebook is there, by claim id."""
    results = {}
    for nb in executed.values():
        for record in nb["metadata"]["lowprec"]["verdicts"]:
            if record["registered"]:
                results[record["claim"]["id"]] = Result.from_dict(record)
    for claim in registry.values():
        if (sources / f"{claim.notebook}.ipynb").is_file() and claim.id not in results:
            if claim.notebook not in executed:
                raise UserError(f"notebook {claim.notebook} was not executed: run `make book`")
            raise UserError(
                f"claim {claim.id} names notebook {claim.notebook}, which does not check it: call "
                f"claims.check({claim.id!r}, ...) there, or mend the entry in book/claims.yml"
            )
    return results


def table(header: tuple[str, ...], rows) -> str:
    """A Markdown table."""

    def line(row):
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        return f"| {' | '.join(cells)} |\n"

    return "".join(map(line, [header, ("---",) * len(header), *rows]))


def title(nb: dict) -> str:
    """The first heading of a notebook."""
    return "".join(nb["cells"][0]["source"]).partition("\n")[0].lstrip("# ")


def of_paper(registry: dict[str, Claim]) -> list[Claim]:
    return [claim for claim in registry.values() if claim.source == PAPER]


def verdict_of(claim: Claim, results: dict[str, Result]) -> str:
    """As measured by an executed page, else as claims.yml has it."""
    return results[claim.id].verdict if claim.id in results else claim.verdict


def page_of(name: str, titles: dict[str, str]) -> str:
    return f"{{doc}}`/executed/{name}`" if name in titles else "to come"


def claims_table(some: list[Claim], results, titles, leave_out: str = "") -> str:
    """Some claims, with the measurement if a page made one, but for the column `leave_out`."""
    rows = []
    for claim in some:
        result = results.get(claim.id)
        measured = result is not None and result.value is not None
        rows.append(
            {
                "Verdict": in_words(claim, verdict_of(claim, results)),
                "Claim": claim.sentence,
                "Measured": result.text if measured else "",
                "n": result.n if measured else "",
                "Source": f"{{cite:t}}`{claim.source}`" if claim.source else "this book",
                "Page": page_of(claim.notebook, titles),
            }
        )
    header = [name for name in rows[0] if name != leave_out] if rows else []
    return table(tuple(header), [[row[name] for name in header] for row in rows])


def by_page(registry: dict[str, Claim]) -> dict[str, list[Claim]]:
    """The claims of each notebook, in the order of the notebooks' names."""
    names = sorted({claim.notebook for claim in registry.values()})
    return {name: [c for c in registry.values() if c.notebook == name] for name in names}


def counts_table(registry, results, titles) -> str:
    """A row a page and one for all: how many claims have which verdict."""
    verdicts = {claim.id: verdict_of(claim, results) for claim in registry.values()}
    shown = [v for v in claims.VERDICTS if v in verdicts.values()]

    def counts(some):
        found = [verdicts[claim.id] for claim in some]
        return [found.count(v) or "" for v in shown]

    rows = [(page_of(name, titles), *counts(some)) for name, some in by_page(registry).items()]
    return table(("Page", *shown), [*rows, ("**all**", *counts(registry.values()))])


def all_claims(registry, results, titles) -> str:
    """A section a page."""
    sections = []
    for name, some in by_page(registry).items():
        head = f"## {titles.get(name, name)}\n\nPage: {page_of(name, titles)}\n\n"
        sections.append(head + claims_table(some, results, titles, "Page"))
    return "\n".join(sections)


def in_words(claim: Claim, verdict: str) -> str:
    """The verdict as a table shows it."""
    return f"**{verdict}**" + (", exploratory" if claim.exploratory else "")


def readme_table(registry: dict[str, Claim]) -> str:
    """The paper's claims that are decided or open, without measurements, so that it changes only
    with claims.yml, and the count of all."""
    paper = of_paper(registry)
    run = [c for c in paper if c.verdict != "not run"]
    rows = [(in_words(c, c.verdict), c.sentence, f"`{c.notebook}.ipynb`") for c in run]
    wait = len(paper) - len(run)
    more = f"Claims of the paper that wait for runs: {wait}. " if wait else ""
    found = [claim.verdict for claim in registry.values()]
    counts = ", ".join(f"{found.count(v)} {v}" for v in claims.VERDICTS if v in found)
    shown = table(("Verdict", "Claim", "Notebook"), rows)
    return f"{shown}\n{more}All {len(found)} claims: {counts}.\n"


def with_claims(text: str, registry: dict[str, Claim]) -> str:
    """README's text with the claims table between its markers."""
    start, end = MARKERS
    if text.count(start) != 1 or text.count(end) != 1:
        raise UserError(f"README.md must hold {start} and {end} once each, for the claims table")
    head, rest = text.split(start)
    return f"{head}{start}\n{readme_table(registry)}{end}{rest.split(end)[1]}"


def status(root: Path) -> str:
    """The status page: what was executed, where and when, and what it found."""
    folders = root / "book" / "executed", root / "build" / "smoke", root / "build" / "gpu"
    rows = []
    for folder in folders:
        for name, nb in read_executed(folder).items():
            about = nb["metadata"]["lowprec"]
            verdicts = [record["verdict"] for record in about["verdicts"]]
            counts = [f"{verdicts.count(v)} {v}" for v in claims.VERDICTS if v in verdicts]
            page = f"{{doc}}`/executed/{name}`" if folder == folders[0] else name
            machine = f"{about['hardware']}, torch {about['torch']}"
            rows.append((page, about["profile"], about["date"], machine,
                         f"{about['seconds']:.0f} s", ", ".join(counts)))  # fmt: skip
    header = ("Page", "Profile", "Executed", "On", "Took", "Verdicts")
    return (
        "# Status\n\n"
        "What this copy of the book was made from. Each row is one execution of a notebook.\n\n"
        + table(header, sorted(rows))
    )


def figures(nb: dict) -> dict[str, str]:
    """The HTML of each figure of an executed notebook, by its name."""
    outputs = [o.get("data", {}) for c in nb["cells"] for o in c.get("outputs", [])]
    return {o[FIGURE_MIME]["name"]: "".join(o["text/html"]) for o in outputs if FIGURE_MIME in o}


def raw_html(markup: str) -> str:
    return f"```{{raw}} html\n{markup}\n```\n"


def copy_downloads(root: Path, executed) -> list[Path]:
    """Publish each page's source and executed notebook under downloads/NAME/."""
    extra = root / "book" / "_generated" / "extra"
    extra.mkdir(parents=True)
    copied = []
    for name in executed:
        folder = extra / "downloads" / name
        folder.mkdir(parents=True)
        copied += [
            Path(shutil.copy(root / "notebooks" / f"{name}.ipynb", folder / "source.ipynb")),
            Path(shutil.copy(root / "book/executed" / f"{name}.ipynb", folder / "executed.ipynb")),
        ]
    return copied
