"""Generated pages: what the executed notebooks and the claims say, written for the book to include.

book/_generated/claims_counts.md     how many claims have which verdict
book/_generated/claims_standing.md   how many of the paper's statements hold
book/_generated/claims_all.md        every claim, page by page
book/_generated/claim-ID.md          one claim, for prose that rests on it
book/_generated/threat-WORD.md       the claims to doubt for one threat, folded
book/_generated/figure-NB-NAME.md    one figure, for another page to show
book/_generated/contents.json        the title of every page
book/_generated/extra/downloads/     sources and executed notebooks, published as they are
book/_generated/extra/               addresses that stay (`lowprec.publish.addresses`)
book/status.md                       page x profile x date x hardware x duration x verdicts
book/statements.md                   what Qiu & Yao (2025) say, each statement with its word and its
                                     tests, between markers
README.md                            the headlines and the counts between markers; in its marks and
                                     those of data/README.md, facts (`lowprec.publish.facts`)
book/_static/one-rounding.png        README's picture, a figure of a page
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import re
import shutil
from pathlib import Path

from lowprec import UserError
from lowprec.evidence import claims
from lowprec.evidence.registry import Claim, in_order, pages, unchecked
from lowprec.evidence.verdicts import VERDICTS, Result, threat_links
from lowprec.evidence.words import FIGURE_MIME
from lowprec.publish import addresses, facts, form, statements
from lowprec.publish.statements import in_words, verdict_of
from lowprec.records import files, manifest

MARKERS = "<!-- claims -->", "<!-- /claims -->"
FINDINGS = "<!-- findings -->", "<!-- /findings -->"
PICTURE = "the_explosion", "one-rounding"
"""The page and the figure that README shows."""


def write(root: Path) -> list[Path]:
    """Write every generated page of the repository at `root`; returns the pages.

    Raises `UserError` for a claim whose notebook was executed without checking it, or was not;
    what `renew` writes is renewed all the same. Also for a page that has another verdict than its
    lock.
    """
    book, sources = root / "book", root / "notebooks"
    registry, found = claims.load(sources), claims.recorded(sources)
    renew(root, registry, found)  # first, as it needs no executed page
    executed = read_executed(book / "executed")
    results = check_coverage(registry, executed, sources)
    generated = book / "_generated"
    titles = {name: title(executed[name]) for name in in_order(executed, root)}
    texts = {
        generated / "contents.json": contents(root, titles),
        generated / "claims_counts.md": counts(registry, found),
        generated / "claims_standing.md": statements.standing(
            registry, statements.load(book), found
        ),
        generated / "claims_all.md": all_claims(registry, results, titles),
    }
    for id, result in results.items():
        texts[generated / f"claim-{id}.md"] = result.myst()
    for word in {word for claim in registry.values() for word in claim.doubts}:
        text = doubted(word, registry, results, titles)
        texts[generated / f"threat-{word.lower()}.md"] = text
    for name, nb in executed.items():
        for figure, markup in figures(nb).items():
            texts[generated / f"figure-{name.replace('/', '-')}-{figure}.md"] = raw_html(markup)
    texts[book / "status.md"] = status(root)
    if renew_places(root, executed):
        shutil.rmtree(book / "_build" / ".doctrees", ignore_errors=True)  # they go by times
    renew_picture(root, executed)
    texts |= downloads(root, executed)
    texts |= addresses_of(root, registry)
    if not _same(generated / "contents.json", texts[generated / "contents.json"]):
        shutil.rmtree(book / "_build" / "html", ignore_errors=True)  # it is in all of its pages
    for path in generated.rglob("*"):
        if path.is_file() and path not in texts:
            path.unlink()
    for path, text in texts.items():
        _put(path, text)
    return list(texts)


def renew(root: Path, registry: dict[str, Claim], found: dict[str, Result]) -> None:
    """Write what stands between markers and in marks anew, from the claims and their locks: in
    README.md, data/README.md and book/statements.md."""
    readme, of_data = root / "README.md", root / "data" / "README.md"
    said, of_paper = statements.load(root / "book"), root / "book" / "statements.md"
    if readme.is_file():
        titles = source_titles(root / "notebooks")
        text = with_claims(readme.read_text(), registry, said, found, titles)
        _put(readme, facts.renewed(text))
    if of_paper.is_file():
        listed = "\n" + statements.listed(registry, said, found)
        text = _between(MARKERS, of_paper.read_text(), listed, "book/statements.md")
        _put(of_paper, text)
    if of_data.is_file() and (text := facts.renewed(of_data.read_text())) != of_data.read_text():
        of_data.write_text(text)
        manifest.accept_file(of_data)


def renew_places(root: Path, executed) -> bool:
    """Say anew where each page stands in the book, which its contents decide; whether some page
    stands elsewhere than it said.

    A page keeps its time: what it was computed from has not changed.
    """
    import nbformat

    moved = False
    for name in executed:
        path = root / "book" / "executed" / f"{name}.ipynb"
        nb = nbformat.read(path, 4)
        place = form.with_place(nb, nb.metadata["lowprec"], root)
        if place != nb.cells[0].source:
            nb.cells[0].source, moved = place, True
            time = path.stat().st_mtime_ns
            path.write_text(nbformat.writes(nb) + "\n")
            os.utime(path, ns=(time, time))
    return moved


def renew_picture(root: Path, executed) -> None:
    """Write README's picture anew, from the page that shows it."""
    page, figure = PICTURE
    image = pictures(executed[page]).get(figure) if page in executed else None
    path = root / "book" / "_static" / f"{figure}.png"
    if image and not (path.is_file() and path.read_bytes() == image):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)


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
    return {name: json.loads((folder / f"{name}.ipynb").read_text()) for name in pages(folder)}


def check_coverage(registry, executed, sources: Path) -> dict[str, Result]:
    """The measured result of each claim whose notebook is there, by claim id."""
    results = {}
    for name, nb in executed.items():
        about = nb["metadata"]["lowprec"]
        facts, hardware = about.get("facts"), about["hardware"]
        claims.compare(name, about["verdicts"], facts, sources, hardware)
        of_page = map(Result.from_dict, about["verdicts"])
        results |= {result.claim.id: result for result in of_page if result.registered}
    for claim in registry.values():
        if claim.id not in results:
            if claim.page not in executed:
                raise UserError(
                    f"README.md is renewed; for the pages, notebook {claim.page} was not "
                    "executed: run `make book`"
                )
            raise UserError(unchecked(claim))
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


def source_titles(sources: Path) -> dict[str, str]:
    """The title of each page by name, from the notebooks themselves."""
    return {name: title(nb) for name, nb in read_executed(sources).items()}


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


def by_page(registry: dict[str, Claim], names) -> dict[str, list[Claim]]:
    """The claims of each notebook that has some; first those of the names, in their order."""
    pages = dict.fromkeys([*names, *(claim.page for claim in registry.values())])
    every = {name: [c for c in registry.values() if c.page == name] for name in pages}
    return {name: some for name, some in every.items() if some}


def doubted(word: str, registry, results, titles) -> str:
    """The claims that name a threat, folded, an item a page: each id, linked to its box."""
    some = {id: claim for id, claim in registry.items() if word in claim.doubts}
    items = [f":::{{dropdown}} Claims doubted for this: {len(some)}\n"]
    for name, of_page in by_page(some, titles).items():
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
    for name, some in by_page(registry, titles).items():
        head = f"## {titles.get(name, name)}\n\nPage: {page_of(name, titles)}\n\n"
        sections.append(head + claims_list(some, results))
    return "\n".join(sections)


def with_claims(text: str, registry: dict[str, Claim], said: list[dict],
                found: dict[str, Result], titles: dict[str, str]) -> str:  # fmt: skip
    """README's text with the headlines between their markers, if it has them, and with how many of
    the paper's statements hold and of the claims have which verdict.

    titles: of the notebooks. From them, claims, statements and locks alone, so that no page needs
    to be executed for it.
    """
    if any(mark in text for mark in FINDINGS):
        text = _between(FINDINGS, text, headlines(registry, found, titles))
    sums = f"{statements.standing(registry, said, found)}\n{counts(registry, found)}"
    return _between(MARKERS, text, sums)


def _between(marks: tuple[str, str], text: str, content: str, name: str = "README.md") -> str:
    """The text of a document with this between two marks."""
    start, end = marks
    if text.count(start) != 1 or text.count(end) != 1:
        raise UserError(f"{name} must hold {start} and {end} once each, for the claims")
    head, rest = text.split(start)
    return f"{head}{start}\n{content}{end}{rest.split(end)[1]}"


def headlines(registry: dict[str, Claim], found: dict[str, Result], titles: dict[str, str]) -> str:
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
        names = dict.fromkeys(claim.page for claim in of_place)
        links = ", ".join(f"[{titles[name]}](notebooks/{name}.ipynb)" for name in names)
        words = " ".join(result.headline for result in some)
        items.append(f"{place}. {words} ({links})\n")
    return "".join(items)


def status(root: Path) -> str:
    """The status page: what was executed, where and when, and what it found."""
    folders = root / "book" / "executed", root / "build" / "gpu"
    rows = []
    for folder in folders:
        executed = read_executed(folder)
        for name in in_order(executed, root):
            nb = executed[name]
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
        + table(header, rows)
    )


def figures(nb: dict) -> dict[str, str]:
    """The HTML of each figure of an executed notebook, by its name."""
    outputs = [o.get("data", {}) for c in nb["cells"] for o in c.get("outputs", [])]
    return {o[FIGURE_MIME]["name"]: "".join(o["text/html"]) for o in outputs if FIGURE_MIME in o}


def pictures(nb: dict) -> dict[str, bytes]:
    """The PNG of each figure of an executed notebook, by its name."""
    outputs = [o.get("data", {}) for c in nb["cells"] for o in c.get("outputs", [])]
    return {
        o[FIGURE_MIME]["name"]: base64.b64decode(o["image/png"])
        for o in outputs
        if FIGURE_MIME in o and "image/png" in o
    }


def raw_html(markup: str) -> str:
    return f"```{{raw}} html\n{markup}\n```\n"


def downloads(root: Path, executed) -> dict[Path, str]:
    """The notebook of each page, and of a main page the executed one, for downloads/NAME/."""
    folder, pages = root / "book" / "_generated" / "extra" / "downloads", root / "book" / "executed"
    files = {}
    for name in executed:
        files[folder / name / "source.ipynb"] = (root / "notebooks" / f"{name}.ipynb").read_text()
        if "/" not in name:
            files[folder / name / "executed.ipynb"] = offered((pages / f"{name}.ipynb").read_text())
    return files


def offered(text: str) -> str:
    """An executed notebook as it is offered: each figure once, as a picture over its caption, and
    each verdict at its output alone.

    The page has the figure in lines and its data, which is half of what the page is.
    """
    nb = json.loads(text)
    for listed in ("verdicts", "figures", "facts"):
        nb["metadata"].get("lowprec", {}).pop(listed, None)
    for cell in (cell for cell in nb["cells"] if "outputs" in cell):
        cell["outputs"] = [shown for output in cell["outputs"] for shown in _as_picture(output)]
    return json.dumps(nb, separators=(",", ":"), ensure_ascii=False, sort_keys=True) + "\n"


def _as_picture(output: dict) -> list[dict]:
    data = output.get("data", {})
    if FIGURE_MIME not in data or "image/png" not in data:
        return [output]
    caption = f"<p>{html.escape(data[FIGURE_MIME]['caption'])}</p>"
    under = {"output_type": "display_data", "metadata": {}, "data": {"text/html": caption}}
    return [{**output, "data": {k: v for k, v in data.items() if k != "text/html"}}, under]


def addresses_of(root: Path, registry: dict[str, Claim]) -> dict[Path, str]:
    """The stubs of old pages and of claims, published as they are."""
    book, of_claims = root / "book", {claim.id: claim.page for claim in registry.values()}
    table = addresses.redirects(book, sum(form.contents(root).values(), []))
    stubs = addresses.stubs(table, of_claims)
    return {book / "_generated" / "extra" / path: text for path, text in stubs.items()}


def main(argv: list[str]) -> None:
    """Print the claims, each with its verdict and page; with --write, write the book's pages."""
    parser = argparse.ArgumentParser(
        prog="python -m lowprec claims", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write the generated pages and tables")
    parser.add_argument("--accept", nargs="+", metavar="PAGE", default=[],
                        help="write the locks of these pages from what they found")  # fmt: skip
    args = parser.parse_args(argv)
    root = files.repo_root()
    for page in [claims.page_named(name, root / "notebooks") for name in args.accept]:
        changes = claims.accept(page, root)
        print(f"{page}.lock.json: {len(changes) or 'nothing'} changed", *changes, sep="\n  ")
    if args.write:
        print(f"{len(write(root))} generated pages and downloads")
    if args.write or args.accept:
        return
    found = claims.recorded()
    for claim in claims.load().values():
        kind = " (exploratory)" * claim.exploratory
        verdict = found[claim.id].verdict if claim.id in found else "not run"
        print(f"{verdict:13} {claim.page} {claim.id}{kind}: {claim.sentence}")
