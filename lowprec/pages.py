"""Generated pages: what the executed notebooks and the claims say, written for the book to include.

book/_generated/claims_paper.md      what Qiu & Yao (2025) say, each statement with its tests
book/_generated/claims_counts.md     how many claims have which verdict
book/_generated/claims_all.md        every claim, page by page
book/_generated/claim-ID.md          one claim, for prose that rests on it
book/_generated/threat-WORD.md       the claims to doubt for one threat, folded
book/_generated/figure-NB-NAME.md    one figure, for another page to show
book/_generated/contents.json        the title of every page
book/_generated/extra/downloads/     sources and executed notebooks, published as they are
book/status.md                       page x profile x date x hardware x duration x verdicts
README.md                            the paper's statements and the counts, and the headlines, each
                                     between two markers, and its facts (`lowprec.facts`)
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import yaml

from lowprec import UserError, claims, facts, form, runs
from lowprec.registry import Claim
from lowprec.verdicts import VERDICTS, Result, threat_link, threat_links
from lowprec.words import FIGURE_MIME

PAPER = "qiu2025"
MARKERS = "<!-- claims -->", "<!-- /claims -->"
FINDINGS = "<!-- findings -->", "<!-- /findings -->"


def write(root: Path) -> list[Path]:
    """Write every generated page of the repository at `root`, and README's list; returns the pages.

    Raises `UserError` for a claim whose notebook was executed without checking it, or was not; the
    list in README.md is renewed all the same. Also for a page that has another verdict than its
    lock.
    """
    book, sources = root / "book", root / "notebooks"
    registry, found = claims.load(sources), claims.recorded(sources)
    renew(root, registry, found)  # first, as it needs no executed page
    executed = read_executed(book / "executed")
    results = check_coverage(registry, executed, sources)
    generated = book / "_generated"
    titles = {name: title(nb) for name, nb in executed.items()}
    texts = {
        generated / "contents.json": contents(root, titles),
        generated / "claims_paper.md": of_paper(registry, statements(book), found, results),
        generated / "claims_counts.md": counts(registry, found),
        generated / "claims_all.md": all_claims(registry, results, titles),
    }
    for id, result in results.items():
        texts[generated / f"claim-{id}.md"] = result.myst()
    for word in {word for claim in registry.values() for word in claim.doubts}:
        text = doubted(word, registry, results, titles)
        texts[generated / f"threat-{word.lower()}.md"] = text
    for name, nb in executed.items():
        for figure, markup in figures(nb).items():
            texts[generated / f"figure-{name}-{figure}.md"] = raw_html(markup)
    texts[book / "status.md"] = status(root)
    renew_places(root, executed)
    texts |= downloads(root, executed)
    if not _same(generated / "contents.json", texts[generated / "contents.json"]):
        shutil.rmtree(book / "_build" / "html", ignore_errors=True)  # it is in all of its pages
    for path in generated.rglob("*"):
        if path.is_file() and path not in texts:
            path.unlink()
    for path, text in texts.items():
        _put(path, text)
    return list(texts)


def renew(root: Path, registry: dict[str, Claim], found: dict[str, Result]) -> None:
    """Write the claims and the facts of README.md and data/README.md anew, from the locks."""
    readme, of_data = root / "README.md", root / "data" / "README.md"
    if readme.is_file():
        text = with_claims(readme.read_text(), registry, statements(root / "book"), found)
        _put(readme, facts.renewed(text))
    if of_data.is_file() and (text := facts.renewed(of_data.read_text())) != of_data.read_text():
        of_data.write_text(text)
        runs.accept_file(of_data)


def renew_places(root: Path, executed) -> None:
    """Say anew where each page in the new form stands in the book, which its contents decide.

    A page keeps its time: what it was computed from has not changed.
    """
    import nbformat

    for name in (name for name, nb in executed.items() if form.is_new(nb)):
        path = root / "book" / "executed" / f"{name}.ipynb"
        nb = nbformat.read(path, 4)
        place = form.with_place(nb, nb.metadata["lowprec"], root)
        if place != nb.cells[0].source:
            nb.cells[0].source = place
            time = path.stat().st_mtime_ns
            path.write_text(nbformat.writes(nb) + "\n")
            os.utime(path, ns=(time, time))


def contents(root: Path, titles: dict[str, str]) -> str:
    """The titles of all pages, which each page shows beside itself."""
    documents = sorted(path for path in (root / "book").glob("*.md") if path.name != "status.md")
    heads = {path.stem: re.search(r"^# .*$", path.read_text(), re.MULTILINE) for path in documents}
    of_documents = {name: head and head[0] for name, head in heads.items()}
    return json.dumps({**of_documents, **titles}, indent=1) + "\n"


def _put(path: Path, text: str) -> None:
    """Write what differs, so that what is built from the rest stays as it is."""
    if not _same(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def read_executed(folder: Path) -> dict[str, dict]:
    """Executed notebooks by name, as parsed JSON."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.ipynb"))}


def check_coverage(registry, executed, sources: Path) -> dict[str, Result]:
    """The measured result of each claim whose notebook is there, by claim id."""
    results = {}
    for name, nb in executed.items():
        about = nb["metadata"]["lowprec"]
        claims.compare(name, about["verdicts"], about.get("facts"), sources)
        of_page = map(Result.from_dict, about["verdicts"])
        results |= {result.claim.id: result for result in of_page if result.registered}
    for claim in registry.values():
        if claim.id not in results:
            if claim.page not in executed:
                raise UserError(
                    f"README.md is renewed; for the pages, notebook {claim.page} was not "
                    "executed: run `make book`"
                )
            raise UserError(
                f"claim {claim.id} stands in {claim.page}.claims.yml and the notebook does not "
                f"check it: call claims.check there, or take it out"
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


def statements(book: Path) -> list[dict]:
    """What the paper says, from book/statements.yml: id, where, says. One that no claim tests has
    `untested`, why, and `threat`, the word of book/threats.md that says more."""
    return yaml.safe_load((book / "statements.yml").read_text())


def of_paper(registry: dict[str, Claim], said: list[dict], found: dict[str, Result],
             results: dict | None = None) -> str:  # fmt: skip
    """Each statement of the paper and under it the claims that test it, in the order of the book:
    measured and linked to their boxes if `results` has them, else as the locks have it, `found`.

    Raises `UserError` for a claim of the paper's that tests none of its statements, and for a
    statement with neither or both of claims and a reason to have none.
    """
    tests = {statement["id"]: [] for statement in said}
    for claim in registry.values():
        if claim.tests not in (tests if claim.source == PAPER else [None]):
            raise UserError(
                f"claim {claim.id}: source {claim.source} and tests {claim.tests} do not go "
                f"together; tests names one of book/statements.yml: {', '.join(tests)}"
            )
        if claim.tests:
            tests[claim.tests].append(claim)
    lines = []
    for statement in said:
        lines.append(f"**{statement['says']}** {statement['where']}.\n")
        for claim in tests[statement["id"]]:
            if results is None:
                more = f" ({_source_link(claim)})"
            else:
                n = results[claim.id].n if claim.id in results else 0
                more = (
                    f" (n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{results[claim.id].size})"
                    if n
                    else ""
                )
            gloss = f" *{claim.gloss}*" if claim.gloss else ""
            lines.append(f"- {in_words(claim, results, found)}: {claim.sentence}{more}{gloss}")
        if bool(tests[statement["id"]]) == ("untested" in statement):
            raise UserError(
                f"statement {statement['id']} of book/statements.yml needs a claim that tests it "
                "or, under `untested`, why there is none"
            )
        if "untested" in statement:
            word = statement["threat"]
            link = f"[{word}](book/threats.md)" if results is None else threat_link(word)
            lines.append(f"- not tested here: {statement['untested']}, see the threat {link}")
        lines.append("")
    return "\n".join(lines)


def verdict_of(claim: Claim, *found: dict | None) -> str:
    """Of the first of these results that has the claim."""
    having = (results[claim.id].verdict for results in found if results and claim.id in results)
    return next(having, "not run")


def page_of(name: str, titles: dict[str, str]) -> str:
    return f"{{doc}}`/executed/{name}`" if name in titles else "to come"


def claims_list(some: list[Claim], results) -> str:
    """Some claims, each an item: its verdict and sentence, and what was measured if a page did."""
    items = []
    for claim in some:
        result, under = results.get(claim.id), []
        if result is not None:
            under.append(f"Measured: {result.measured()}.")
        if claim.source:
            under.append(f"{claim.sourced(f'{{cite:t}}`{claim.source}`')}.")
        if claim.doubts:
            under.append(f"Doubt it for: {', '.join(threat_links(claim))}.")
        words = [f"{in_words(claim, results)}: {claim.sentence}", " ".join(under)]
        items.append("- " + "\\\n  ".join(filter(None, words)) + "\n")
    return "".join(items)


def by_page(registry: dict[str, Claim]) -> dict[str, list[Claim]]:
    """The claims of each notebook, in the order of the notebooks' names."""
    names = sorted({claim.page for claim in registry.values()})
    return {name: [c for c in registry.values() if c.page == name] for name in names}


def doubted(word: str, registry, results, titles) -> str:
    """The claims that name a threat, folded, an item a page: each id, linked to its box."""
    some = {id: claim for id, claim in registry.items() if word in claim.doubts}
    items = [f":::{{dropdown}} Claims doubted for this: {len(some)}\n"]
    for name, of_page in by_page(some).items():
        linked = (f"[`{c.id}`](#claim-{c.id})" if c.id in results else f"`{c.id}`" for c in of_page)
        items.append(f"- {page_of(name, titles)}: {', '.join(linked)}\n")
    return "".join([*items, ":::\n"])


def counts(registry: dict[str, Claim], found: dict[str, Result]) -> str:
    """How many claims have which verdict, those found in the data that judge them apart, without
    those that could hardly have failed."""

    def line(some):
        verdicts = [verdict_of(claim, found) for claim in some]
        return ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts)

    counted = [claim for claim in registry.values() if claim.weight != "check"]
    before = [claim for claim in counted if not claim.exploratory]
    after = [claim for claim in counted if claim.exploratory]
    checks = len(registry) - len(counted)
    return (
        f"{len(counted)} claims: {len(before)} with a rule from before the measurement "
        f"({line(before)}), {len(after)} exploratory ({line(after)})."
        + f" Not counted: {checks} that could hardly have failed." * bool(checks)
        + "\n"
    )


def all_claims(registry, results, titles) -> str:
    """A section a page."""
    sections = []
    for name, some in by_page(registry).items():
        head = f"## {titles.get(name, name)}\n\nPage: {page_of(name, titles)}\n\n"
        sections.append(head + claims_list(some, results))
    return "\n".join(sections)


def in_words(claim: Claim, results: dict | None, found: dict | None = None) -> str:
    """The verdict as a list or table shows it, with a link to its box if a page has one."""
    words = f"**{verdict_of(claim, results, found)}**"
    if results and claim.id in results:
        words = f"[{words}](#claim-{claim.id})"
    return words + (", exploratory" if claim.exploratory else "")


def with_claims(text: str, registry: dict[str, Claim], said: list[dict],
                found: dict[str, Result]) -> str:  # fmt: skip
    """README's text with the paper's statements, their tests and the counts between its markers,
    and the headlines if it has markers for them.

    From claims, statements and locks alone, so that no page needs to be executed for it.
    """
    if any(mark in text for mark in FINDINGS):
        text = _between(FINDINGS, text, headlines(registry, found))
    return _between(MARKERS, text, f"{of_paper(registry, said, found)}\n{counts(registry, found)}")


def _between(marks: tuple[str, str], text: str, content: str) -> str:
    """The text with this between two marks."""
    start, end = marks
    if text.count(start) != 1 or text.count(end) != 1:
        raise UserError(f"README.md must hold {start} and {end} once each, for the claims")
    head, rest = text.split(start)
    return f"{head}{start}\n{content}{end}{rest.split(end)[1]}"


def headlines(registry: dict[str, Claim], found: dict[str, Result]) -> str:
    """The claims that are headlines as a numbered list, those of one number in one item."""
    numbers = sorted({claim.headline for claim in registry.values() if claim.headline})
    items = []
    for place in numbers:
        of_place = [claim for claim in registry.values() if claim.headline == place]
        if missing := [claim for claim in of_place if claim.id not in found]:
            raise UserError(
                f"claim {missing[0].id} is a headline and has no verdict yet: execute its page, "
                f"then `python -m lowprec claims --accept {missing[0].page}`"
            )
        some = [found[claim.id] for claim in of_place]
        pages = dict.fromkeys(_source_link(result.claim) for result in some)
        words = " ".join(result.headline for result in some)
        items.append(f"{place}. {words} ({', '.join(pages)})\n")
    return "".join(items)


def _source_link(claim: Claim) -> str:
    """The number of a claim's page, or its name, linked to the notebook."""
    name = claim.page.rpartition("/")[2]
    return f"[{name[:2] if name[:2].isdecimal() else name}](notebooks/{claim.page}.ipynb)"


def status(root: Path) -> str:
    """The status page: what was executed, where and when, and what it found."""
    folders = root / "book" / "executed", root / "build" / "gpu"
    rows = []
    for folder in folders:
        for name, nb in read_executed(folder).items():
            about = nb["metadata"]["lowprec"]
            verdicts = [record["verdict"] for record in about["verdicts"]]
            counts = [f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts]
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


def downloads(root: Path, executed) -> dict[Path, str]:
    """Each page's source and executed notebook, published as they are under downloads/NAME/."""
    folder, book = root / "book" / "_generated" / "extra" / "downloads", root / "book"
    files = {}
    for name in executed:
        files[folder / name / "source.ipynb"] = root / "notebooks" / f"{name}.ipynb"
        files[folder / name / "executed.ipynb"] = book / "executed" / f"{name}.ipynb"
    return {path: source.read_text() for path, source in files.items()}
