"""The main line of the built book as one PDF and one EPUB: `make print`.

The pages are taken from the built book, folds left out, into one document. Chromium, which reads
the book in the tests, prints it: it draws the figures and MathJax's equations as a reader saw them.
pandoc makes the EPUB of the same document, and poppler's pdfinfo says on which page a chapter is.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import html
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

from lowprec import UserError, __version__
from lowprec.publish import form
from lowprec.records import files

REFERENCE = ("notation", "glossary")
"""What of the part Reference is printed behind the main line."""
DROPPED = "details, .headerlink, .lowprec-place, .lowprec-data, .toggle-button, script, .onlyprint"
"""What can be unfolded or clicked, in a page."""
NEEDS = {"chromium": ("chromium", "chromium-browser", "google-chrome"), "pandoc": ("pandoc",),
         "poppler-utils": ("pdfinfo",)}  # fmt: skip
"""Debian's packages, and the programs of each of which one is used."""
MARK = "<!-- as PDF and EPUB -->"
LINK = (
    '<p class="lowprec-print">The main line to print or to take along: '
    '<a href="downloads/lowprec.pdf">PDF</a>, <a href="downloads/lowprec.epub">EPUB</a>.</p>'
)
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>{style}</style>
<script>window.MathJax = {{options: {{enableMenu: false, enableAssistiveMml: false}}}}</script>
<script defer src="/{mathjax}"></script>
"""
COVER = """<section id="cover"><h1>{title}</h1><p>{author}</p><p>Version {version}, {date}</p>
<p>The main line of the book. What is folded there, and the laboratory, is not printed.</p>
</section>
"""


def main_line(root: Path) -> dict[str, list[str]]:
    """The pages that are printed, by the caption of their part, in the order of the contents."""
    found = {}
    for caption, pages in form.contents(root).items():
        if caption in ("", "Start") or caption.startswith("Part "):
            found[caption] = pages
        elif caption == "Reference":
            found[caption] = [page for page in pages if page in REFERENCE]
    return found


def slug(page: str) -> str:
    return page.replace("/", "-")


def chapter(site: Path, page: str, part: str, pages: set[str]):
    """A page of the built book as a section: without folds, its ids and links those of the whole.

    Returns BeautifulSoup's element, and its drawings, which stand in it as comments.
    """
    from bs4 import BeautifulSoup

    text, drawings = (site / f"{page}.html").read_text(), []

    def put_aside(drawing: re.Match) -> str:
        own = rf"\g<1>{slug(page)}--"
        drawings.append(re.sub(r'(\bid="|href="#|url\(#)', own, drawing[0]))
        return f"<!--{slug(page)}:{len(drawings) - 1}-->"

    article = re.search(r"<article.*?</article>", text, re.DOTALL)[0]
    soup = BeautifulSoup(SVG.sub(put_aside, article), "html.parser")
    for element in soup.select(DROPPED):
        element.decompose()
    for element in soup.select("[id]"):
        element["id"] = f"{slug(page)}--{element['id']}"
    for link in soup.select("a[href]"):
        where, anchor = urldefrag(urljoin(f"{page}.html", link["href"]))
        target = unquote(where).removesuffix(".html")
        if urlparse(where).scheme:
            continue
        if target in pages:
            link["href"] = f"#{slug(target)}--{unquote(anchor)}" if anchor else f"#{slug(target)}"
        else:
            link.unwrap()
    del soup.section["id"]  # that of the page is its name
    for element in soup.select("section[id], dt[id]"):  # pandoc keeps the ids of words
        anchor = soup.new_tag("span", id=element["id"])
        (element if element.name == "dt" else element.find(re.compile("h[1-6]"))).insert(0, anchor)
        del element["id"]
    for element in soup.select("section"):
        element.unwrap()
    for title in soup.select(".admonition-title"):
        bold = soup.new_tag("strong")
        bold.extend(list(title.contents))
        title.append(bold)
    soup.h1["id"] = slug(page)
    section = soup.new_tag("section", attrs={"class": "page"})
    above = soup.new_tag("p", attrs={"class": "part"})
    above.string = part
    section.extend([above, *soup.article.contents])
    return section, {f"<!--{slug(page)}:{i}-->": drawing for i, drawing in enumerate(drawings)}


def document(root: Path, site: Path) -> tuple[list[tuple[str, str, str]], str]:
    """([(part, page, title)], HTML of all pages): an id is there once, a link leads to one."""
    line = main_line(root)
    pages = {page for part in line.values() for page in part}
    if missing := [page for page in pages if not (site / f"{page}.html").is_file()]:
        raise UserError(f"{missing[0]}.html is not in {site}: run `make book`")
    listed, sections, drawings = [], [], {}
    for part, of_part in line.items():
        for page in of_part:
            section, drawn = chapter(site, page, part, pages)
            listed.append((part, page, section.h1.get_text().strip()))
            sections.append(section)
            drawings |= drawn
    ids = {element["id"] for section in sections for element in section.select("[id]")}
    for link in (link for section in sections for link in section.select('a[href^="#"]')):
        if link["href"][1:] not in ids:  # it stood in a fold
            link["href"] = link["href"].partition("--")[0]
    text = "\n".join(map(str, sections))
    return listed, re.sub(r"<!--[\w-]+:\d+-->", lambda mark: drawings[mark[0]], text)


def table_of_contents(listed, numbers: dict[str, int]) -> str:
    """The pages by part; numbers: on which printed page each begins."""
    rows, last = [], ""
    for part, page, title in listed:
        if part != last:
            rows.append(f"<h3>{html.escape(part)}</h3>")
        number = f"<span>{numbers.get(slug(page), '')}</span>"
        rows.append(f'<a href="#{slug(page)}">{html.escape(title)}</a>{number}')
        last = part
    items = "".join(row if row.startswith("<h3") else f"<p>{row}</p>" for row in rows)
    return f'<nav id="contents"><h2>Contents</h2>{items}</nav>\n'


def programs() -> dict[str, str]:
    """The program of each package that is needed. Raises `UserError` that names those missing."""
    found = {package: next(filter(None, map(shutil.which, names)), None)
             for package, names in NEEDS.items()}  # fmt: skip
    if missing := [package for package, program in found.items() if not program]:
        raise UserError(
            f"the printed book needs {', '.join(missing)}: apt-get install {' '.join(missing)}"
        )
    return found


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def print_pdf(chromium: str, site: Path, source: Path, output: Path) -> None:
    """Print a page of the site, when its equations are drawn."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        address = f"http://127.0.0.1:{server.server_port}/{source.relative_to(site)}"
        tab.goto(address, wait_until="load", timeout=300_000)
        tab.evaluate("MathJax.startup.promise")
        tab.pdf(path=output, prefer_css_page_size=True, print_background=True, outline=True,
                tagged=True)  # fmt: skip
        browser.close()
    server.shutdown()


def page_numbers(pdfinfo: str, pdf: Path) -> dict[str, int]:
    """On which page of a PDF each of its destinations is."""
    done = subprocess.run([pdfinfo, "-dests", pdf], capture_output=True, text=True, check=True)
    return {name: int(page) for page, name in re.findall(r'^ *(\d+) .*"(.+)"$', done.stdout, re.M)}


def for_epub(text: str, folder: Path) -> str:
    """The document for pandoc: its drawings as files of SVG 1.1, which EPUB has, in the folder."""

    def drawing(found: re.Match) -> str:
        svg = re.sub(r'\bhref="', 'xlink:href="', found[0])
        svg = svg.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
        name = f"{hashlib.sha256(svg.encode()).hexdigest()[:16]}.svg"
        (folder / name).write_text(svg)
        alt = re.search(r'aria-label="([^"]*)"', svg)[1]
        return f'<img src="{name}" alt="{alt}">'

    # pandoc begins a chapter at a heading that stands in nothing else.
    text = re.sub(r'<section class="page"><p class="part">.*?</p>|</section>', "", text)
    return SVG.sub(drawing, text)


def make(root: Path) -> list[Path]:
    """Write downloads/lowprec.pdf and .epub into the built book, and the link to them."""
    import yaml

    site, folder, found = root / "book/_build/html", root / "build" / "print", programs()
    files.make_folder(folder)
    config = yaml.safe_load((root / "book" / "_config.yml").read_text())
    about = dict(title=config["title"], author=config["author"], version=__version__,
                 date=f"{datetime.date.today():%-d %B %Y}")  # fmt: skip
    listed, body = document(root, site)
    pdf, epub = site / "downloads" / "lowprec.pdf", site / "downloads" / "lowprec.epub"
    source, numbers = site / "print.html", {}
    mathjax = f"_static/{config['sphinx']['config']['mathjax_path']}"
    style = Path(__file__).with_suffix(".css").read_text()
    try:
        for _ in range(2):  # the contents know their numbers when all is printed
            head = HEAD.format(title=about["title"], style=style, mathjax=mathjax)
            text = head + COVER.format(**about) + table_of_contents(listed, numbers) + body
            source.write_text(text)
            print_pdf(found["chromium"], site, source, pdf)
            numbers = page_numbers(found["poppler-utils"], pdf)
    finally:
        source.replace(folder / "lowprec.html")  # no page of the book
    book = folder / "epub.html"
    book.write_text(for_epub(body, folder))
    metadata = [f"--metadata={key}={about[key]}" for key in ("title", "author", "date")]
    subprocess.run(
        [found["pandoc"], book, "-f", "html-auto_identifiers+tex_math_single_backslash",
         "-o", epub, "--mathml", "--toc-depth=1", "--epub-chapter-level=1",
         f"--resource-path={folder}", "--metadata=lang=en", *metadata], check=True,
    )  # fmt: skip
    intro = site / "intro.html"
    intro.write_text(intro.read_text().replace(MARK, LINK))
    return [pdf, epub]


def main() -> None:
    """Print the main line of the built book."""
    argparse.ArgumentParser(
        prog="python -m lowprec.publish.printed", description=main.__doc__
    ).parse_args()
    for path in make(files.repo_root()):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    from lowprec import entry

    entry(main)
