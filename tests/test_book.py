"""The built book as a reader meets it: no network, a wide and a narrow window, light and dark.

`make check-book` runs these; they need the book in book/_build/html and the system's Chromium.
"""

import html
import json
import re
import shutil
import subprocess
import threading
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse
from xml.etree import ElementTree
from zipfile import ZipFile

import numpy as np
import pytest
import yaml
from matplotlib import colormaps
from matplotlib.colors import LogNorm, to_hex

from lowprec.evidence import claims, heads, survival
from lowprec.evidence.registry import pages
from lowprec.evidence.words import FIGURE_MIME
from lowprec.publish.figure import MIN_SCALE, luminance
from lowprec.publish.pages import offered
from lowprec.publish.printed import document

pytestmark = pytest.mark.book

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "book" / "_build" / "html"
FILES = [p.relative_to(SITE) for p in SITE.rglob("*.html")]
OLD = yaml.safe_load((ROOT / "book" / "redirects.yml").read_text()) or {}
STUBS = [p.as_posix() for p in FILES if p.parts[0] == "claim"] + [f"{page}.html" for page in OLD]
PAGES = sorted(p for p in map(Path.as_posix, FILES) if p not in STUBS and "_static/" not in p)
CONTENT = [p for p in PAGES if p not in ("index.html", "genindex.html", "search.html")]
PDF, EPUB = SITE / "downloads" / "lowprec.pdf", SITE / "downloads" / "lowprec.epub"
NOTEBOOKS = pages(ROOT / "book" / "executed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run"
).split()
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # the network is closed
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def test_the_book_is_built():
    assert (SITE / "index.html").is_file(), "there is no book to read: run `make book`"
    assert CHROMIUM, "there is no Chromium to read it with: install the package chromium"
    assert len(CONTENT) > 5


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def base():
    """Address of the book, served from this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest.fixture(scope="module")
def window(browser):
    """Gives the tab of a theme, kept from page to page: a new one takes longer to open than a page,
    and caches nothing yet."""

    @cache
    def window(theme):
        context = browser.new_context(viewport=DESK, color_scheme=theme, accept_downloads=True)
        context.add_init_script(
            f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')"
        )
        return context.new_page()

    return window


@pytest.fixture(scope="module")
def tab(base, window, request):
    """A page, opened and waited for; afterwards asserts that nothing went wrong on the way.

    Of the module, so that tests that look at one page in the same way follow each other and load
    it once.
    """
    page, theme = request.param
    wrong = []

    def asks(request):
        if not request.url.startswith((base, "data:", "blob:")):
            wrong.append(f"{page} asks for {request.url}")

    listeners = {
        "request": asks,
        "console": lambda m: m.type == "error" and wrong.append(f"{page}: {m.text}"),
        "pageerror": lambda error: wrong.append(f"{page}: {error}"),
    }
    tab = window(theme)
    for event, listener in listeners.items():
        tab.on(event, listener)
    tab.goto(base + page, wait_until="load")
    if tab.evaluate("window.MathJax !== undefined"):
        tab.wait_for_function("MathJax.startup !== undefined")
        tab.evaluate("MathJax.startup.promise")
    yield tab
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    assert not wrong, "\n".join(wrong)


def look_at(pages, theme="light"):
    """Runs a test once a page, with the page open in `tab`."""
    params = [pytest.param((p, theme), id=f"{p}-{theme}") for p in pages]
    return pytest.mark.parametrize("tab", params, indirect=True)


@pytest.fixture
def phone(tab):
    """The page as wide as a phone; to load it anew would take longer."""
    tab.set_viewport_size(PHONE)
    yield tab
    tab.set_viewport_size(DESK)


def unfold(tab):
    """Open what a reader can unfold."""
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")


def width_beyond(tab):
    """Pixels by which the page is wider than its window."""
    return tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def test_the_front_door_leads_to_the_first_page(base, browser):
    with browser.new_context() as context:
        tab = context.new_page()
        tab.goto(base)
        tab.wait_for_url(base + "intro.html")


@look_at([p for p in PAGES if p != "index.html"])
def test_page_loads_with_the_network_closed(tab):
    source = SITE / urlparse(tab.url).path[1:]
    has_equations = bool(re.search(r'class="math ', source.read_text()))
    assert (tab.locator("mjx-container").count() > 0) == has_equations
    assert tab.locator("mjx-merror").count() == 0
    assert width_beyond(tab) <= 0


@look_at(CONTENT)
def test_page_fits_a_phone(phone):
    assert width_beyond(phone) <= 0
    for frame in phone.locator(".lowprec-scroll:visible").all():
        image, drawn, outer = frame.evaluate(
            "e => { const svg = e.querySelector('svg'); return "
            "[svg.getBoundingClientRect().width, svg.viewBox.baseVal.width, e.clientWidth]; }"
        )
        assert image >= drawn / 72 * MIN_SCALE - 1, "a figure scrolls before its text is too small"
        assert outer <= PHONE["width"]


@look_at(CONTENT)
def test_what_is_wider_than_a_phone_scrolls_and_fades_until_its_end_is_seen(phone):
    """(pixels beyond its frame, pixels that fade at first, at the end) of tables and equations."""
    wide = phone.locator(".bd-article :is(table, mjx-container[display=true])").evaluate_all(
        """async all => {
            const drawn = () => new Promise(go => requestAnimationFrame(
                () => requestAnimationFrame(go)));
            const wide = all.filter(  // what is folded is not drawn
                e => e.checkVisibility() && (e.getBoundingClientRect().right > innerWidth
                    || e.matches('mjx-container') && e.scrollWidth > e.clientWidth + 1));
            return Promise.all(wide.map(async one => {
                const frame = one.closest('mjx-container') || one.parentElement.closest(
                    '.pst-scrollable-table-container, .output.text_html');
                const fades = () => parseFloat(
                    getComputedStyle(frame).getPropertyValue('--lowprec-more'));
                await drawn();  // what fades is known once a frame
                const first = fades();
                frame.scrollLeft = frame.scrollWidth;
                await drawn();
                return [frame.scrollLeft, first, fades()];
            }));
        }"""
    )
    for beyond, first, last in wide:
        assert beyond > 0 and first == pytest.approx(min(beyond, 48), abs=1.5) and last <= 1
    few = "notation" in phone.url and len(wide) < 3
    assert not few, "a table and several equations of that page are wider than a phone"


def contrasts(elements, ink="color"):
    """(contrast, luminance of the background) of each pair of colours the elements show."""
    pairs = elements.evaluate_all(
        """(all, property) => {
            const known = new Map();
            const paper = e => {
                if (!e) return 'rgb(255, 255, 255)';
                if (!known.has(e)) {
                    const c = getComputedStyle(e).backgroundColor;
                    const clear = c === 'transparent' || /, 0\\)$/.test(c);
                    known.set(e, clear ? paper(e.parentElement) : c);
                }
                return known.get(e);
            };
            const seen = all.map(e => getComputedStyle(e)[property] + ';' + paper(e));
            return [...new Set(seen)].map(pair => pair.split(';'));
        }""",
        ink,
    )
    found = []
    for pair in pairs:
        rgb = [[float(n) / 255 for n in re.findall(r"[\d.]+", colour)[:3]] for colour in pair]
        low, high = sorted(map(luminance, rgb))
        found.append(((high + 0.05) / (low + 0.05), luminance(rgb[1])))
    return found


ILLUSTRATED = [p for p in CONTENT if "lowprec-figure" in (SITE / p).read_text()]


@look_at(ILLUSTRATED)
def test_figures_are_seen(tab, dark=False):
    unfold(tab)
    figures = tab.locator("figure.lowprec-figure")
    assert figures.count() > 0
    for figure in figures.all():
        image = figure.locator(".lowprec-scroll svg")
        assert image.get_attribute("role") == "img" and image.get_attribute("aria-label")
        if figure.locator(".lowprec-film").count():
            continue  # it is at rest in print alone
        box = image.bounding_box()
        assert box["width"] > 300 and box["height"] > 100
        [(ratio, paper)] = contrasts(figure.locator("figcaption"))
        assert ratio >= 4.5
        assert (paper < 0.1) == dark, "the figure has the page's own background"
        letters = contrasts(image.locator("g[id*=text_] use"), "fill")
        assert letters and min(ratio for ratio, _ in letters) >= 3


@look_at(ILLUSTRATED)
def test_figures_are_seen_in_the_dark(tab):
    """On the open page, as the theme's button switches it: to load it anew takes longer."""
    switch = "theme => { document.documentElement.dataset.theme = theme; }"
    tab.evaluate(switch, "dark")
    try:
        test_figures_are_seen(tab, dark=True)
    finally:
        tab.evaluate(switch, "light")


@look_at(ILLUSTRATED[:1], theme="dark")
def test_figures_are_seen_on_a_page_that_opens_in_the_dark(tab):
    test_figures_are_seen(tab, dark=True)


@look_at([f"executed/{name}.html" for name in NOTEBOOKS])
def test_a_notebook_page_offers_its_sources_and_the_data_of_its_figures(tab):
    name = urlparse(tab.url).path.removeprefix("/executed/").removesuffix(".html")
    source = ROOT / "notebooks" / f"{name}.ipynb"
    assert download(tab, "the notebook") == (source.name, source.read_bytes())
    executed = ROOT / "book" / "executed" / f"{name}.ipynb"
    if "/" in name:
        assert tab.get_by_text("this page, executed").count() == 0
    else:
        assert download(tab, "this page, executed")[1].decode() == offered(executed.read_text())
    outputs = [o for c in json.loads(executed.read_text())["cells"] for o in c.get("outputs", [])]
    names = [o["data"][FIGURE_MIME]["name"] for o in outputs if FIGURE_MIME in o.get("data", {})]
    unfold(tab)
    offers = tab.locator("figure.lowprec-figure a.lowprec-data").evaluate_all(
        "all => all.map(a => [a.closest('figure').id, a.download, a.getAttribute('href')])"
    )
    assert [id for id, _, _ in offers] == [f"figure-{name}" for name in names]
    for name, (_, file, link) in zip(names, offers, strict=True):
        head, _, csv = link.partition(",")
        assert head == "data:text/csv" and file == f"{name}.csv" and unquote(csv).count("\n") > 1
    for name, (_, _, link) in zip(names[:1], offers, strict=False):  # Chromium stops the eleventh
        with tab.expect_download() as got:
            tab.locator(f"#figure-{name} a.lowprec-data").click()
        assert got.value.suggested_filename == f"{name}.csv"
        assert Path(got.value.path()).read_text() == unquote(link.partition(",")[2])


def download(tab, label):
    with tab.expect_download() as got:
        tab.get_by_role("link", name=label, exact=True).click()
    return got.value.suggested_filename, Path(got.value.path()).read_bytes()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_page_says_how_to_rerun_it(name):
    text = html.unescape(re.sub(r"<[^>]+>", "", (SITE / f"executed/{name}.html").read_text()))
    assert f"papermill notebooks/{name}.ipynb out.ipynb -f notebooks/profiles/recorded.yaml" in text


CLAIM = "delta-only-o"
HOME = f"executed/{claims.load()[CLAIM].page}.html"


def test_the_address_of_a_claim_leads_to_it_also_from_where_it_was(base, window):
    tab = window("light")
    for asked in (f"claim/{CLAIM}.html", f"intro.html#claim-{CLAIM}"):
        tab.goto(base + asked)
        tab.wait_for_url(f"{base}{HOME}#claim-{CLAIM}")


@pytest.mark.parametrize("page", OLD)
def test_an_old_address_leads_to_the_page(base, window, page):
    tab = window("light")
    tab.goto(f"{base}{page}.html#claims", wait_until="commit")
    tab.wait_for_url(f"{base}{OLD[page]}.html#claims", wait_until="commit")


@look_at([HOME, "claims.html", "statements.html"])
def test_a_claim_says_its_address_and_how_to_cite_it(tab, base):
    unfold(tab)
    button = tab.get_by_label(f"Link to the claim {CLAIM}, and how to cite it")
    button.click()
    line = tab.locator(".lowprec-citation")
    assert line.text_content().startswith("The lowprec authors: Why low-precision training fails,")
    assert f", claim {CLAIM}. {base}claim/{CLAIM}.html" in line.text_content()
    assert [b.text_content() for b in line.locator("button").all()] == [
        "Copy link",
        "Copy citation",
    ]
    button.click()
    assert not line.is_visible()


# Definitions on hover, focus and tap


def term(tab):
    """The first term of a page, and its definition as the book has it."""
    link = tab.locator("a.lowprec-term").first
    link.scroll_into_view_if_needed()
    return link, link.evaluate("a => DEFINITIONS[a.hash.slice(1)].join(' ')")


@look_at([HOME])
def test_a_term_shows_its_definition_on_hover_and_focus(tab, theme="light"):
    link, definition = term(tab)
    tip = tab.locator("#lowprec-tip")
    assert not tip.is_visible() and tip.get_attribute("role") == "tooltip"
    link.hover()
    assert tip.is_visible() and tip.text_content() == definition
    assert link.get_attribute("aria-describedby") == "lowprec-tip"
    tip.hover()
    tab.wait_for_timeout(400)
    assert tip.is_visible(), "the pointer may move onto it"
    [(ratio, paper)] = contrasts(tip)
    assert ratio >= 4.5 and (paper < 0.1) == (theme == "dark")
    tab.mouse.move(0, 0)
    tip.wait_for(state="hidden")
    link.focus()
    assert tip.is_visible()
    tab.keyboard.press("Escape")
    assert not tip.is_visible() and link.get_attribute("aria-describedby") is None


@look_at([HOME], theme="dark")
def test_a_term_shows_its_definition_in_the_dark(tab):
    test_a_term_shows_its_definition_on_hover_and_focus(tab, "dark")


def test_the_first_tap_shows_a_definition_and_the_second_follows_also_from_files(browser):
    with browser.new_context(viewport=PHONE, has_touch=True) as context:
        tab = context.new_page()
        tab.goto((SITE / HOME).as_uri())
        link, definition = term(tab)
        tip = tab.locator("#lowprec-tip")
        for _ in range(2):
            link.tap()
            assert tip.is_visible() and tip.text_content() == definition
            box = tip.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
            tab.touchscreen.tap(5, PHONE["height"] - 5)
            assert not tip.is_visible() and tab.url.endswith(HOME)
        link.tap()
        link.tap()
        tab.wait_for_url("**/glossary.html#term-*")


# Maps with a slider

FILM = f"executed/{claims.load()['layer-first'].page}.html"


@look_at([FILM])
def test_the_slider_paints_the_recorded_numbers(tab):
    mini, production = survival.load_arms("mini"), survival.load_arms("production")
    mine, twin = (heads.norms(arm.by_seed[1]) for arm in (mini["fa2"], production["fa2_o_fp32"]))
    twin = twin.loc[mine.index]
    norm = LogNorm(*np.quantile([mine, twin], [0, 1]))
    figure = tab.locator("#figure-film")
    slider = figure.get_by_role("slider")
    assert slider.evaluate("s => [+s.min, +s.max, +s.value]") == [0, len(mine) - 1, len(mine) - 1]
    slider.focus()
    painted = []
    for key, step in [("Home", 0), ("ArrowRight", 1), ("End", len(mine) - 1)]:
        tab.keyboard.press(key)
        assert figure.locator("output").text_content() == f"{mine.index[step]:,}"
        assert slider.get_attribute("aria-valuetext").startswith(f"step {mine.index[step]:,}; FA2")
        for run, svg in zip((mine, twin), figure.locator(".lowprec-maps svg").all(), strict=True):
            numbers = run.iloc[step].sort_index().to_numpy(float)
            fills = svg.locator("rect").evaluate_all("all => all.map(r => r.getAttribute('fill'))")
            texts = svg.locator("rect + text").all_text_contents()
            assert texts == [f"{number:.1f}" for number in numbers]
            wanted = [colormaps["YlOrRd"].resampled(64)(float(norm(x))) for x in numbers]
            assert fills == [to_hex(colour) for colour in wanted]
            painted.append(fills)
    for own in (painted[::2], painted[1::2]):
        assert len(set(map(tuple, own))) == 3, "each step has colours of its own"


@look_at([FILM])
def test_the_slider_fits_a_phone_and_print_has_the_figure_at_rest(phone):
    figure = phone.locator("#figure-film")
    film, still = figure.locator(".lowprec-film"), figure.locator(".lowprec-scroll")
    assert film.is_visible() and not still.is_visible()
    for svg in film.locator("svg").all():
        box = svg.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    phone.emulate_media(media="print")
    assert still.is_visible() and not film.is_visible()
    phone.emulate_media(media="screen")


def test_without_a_script_the_figure_is_at_rest(base, browser):
    with browser.new_context(java_script_enabled=False) as context:
        tab = context.new_page()
        tab.goto(base + FILM)
        assert tab.locator("#figure-film .lowprec-scroll svg").is_visible()


@look_at(["search.html?q=roundoff"])
def test_search_finds_a_word(tab):
    tab.wait_for_selector("#search-results li a")
    found = tab.locator("#search-results li a").evaluate_all("links => links.map(a => a.href)")
    assert any("glossary.html" in link for link in found)


# The files themselves


class Links(HTMLParser):
    """What a page links to and loads, and the ids it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get("id"):
            self.ids.add(attrs["id"])
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag == "link" and attrs.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(attrs["href"])
        elif attrs.get("src"):
            self.loads.append(attrs["src"])


@pytest.fixture(scope="module")
def parsed():
    return {page: Links((SITE / page).read_text()) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(parsed, page):
    for link in [*parsed[page].links, *parsed[page].loads]:
        if urlparse(link).scheme:
            assert link not in parsed[page].loads or link.startswith("data:"), f"loads {link}"
            continue
        target, anchor = urldefrag(urljoin(page, link))
        target = unquote(urlparse(target).path) or page
        assert (SITE / target).is_file(), f"{page} links to {link}"
        if anchor and target in parsed:
            assert unquote(anchor) in parsed[target].ids, f"{page}: no {anchor} in {target}"


def test_each_claim_has_an_address_that_leads_to_its_box(parsed):
    ids = {path.removeprefix("claim/").removesuffix(".html") for path in STUBS if "claim/" in path}
    assert ids == set(claims.load())
    for id in ids:
        [to] = Links((SITE / "claim" / f"{id}.html").read_text()).links
        page, anchor = urldefrag(urljoin(f"claim/{id}.html", to))
        assert anchor == f"claim-{id}" and anchor in parsed[page].ids


def test_the_book_and_its_pages_are_small():
    files = [path for path in SITE.rglob("*") if path.is_file() and path not in (PDF, EPUB)]
    assert sum(path.stat().st_size for path in files) < 25e6
    assert max(path.stat().st_size for path in files if path.suffix == ".html") < 1e6


def test_styles_load_nothing_from_elsewhere():
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text()), sheet.name


def test_no_page_names_a_path_of_the_machine_that_built_it():
    for path in SITE.rglob("*.html"):
        assert str(ROOT) not in path.read_text(), path.name


@look_at(["rerun.html", "notation.html", HOME])
def test_a_page_prints_without_buttons_and_within_its_margins(tab):
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 680, "height": 900})  # 180 mm
    try:
        shown = tab.locator(".bd-article :is(details:not([open]), .copybtn, .lowprec-cite)")
        assert not any(element.is_visible() for element in shown.all())
        beyond = tab.locator(".bd-article :is(pre, table, svg, p)").evaluate_all(
            "all => all.filter(e => e.checkVisibility() && (e.scrollWidth > e.clientWidth + 1 "
            "&& e.matches('pre') || e.getBoundingClientRect().right > innerWidth))"
            ".map(e => e.textContent.slice(0, 60))"
        )
        assert not beyond
    finally:
        tab.emulate_media(media="screen")
        tab.set_viewport_size(DESK)


# The printed book, where `make print` has written it

printed = pytest.mark.skipif(not PDF.is_file(), reason="there is no PDF: run `make print`")


@pytest.fixture(scope="module")
def listed():
    return document(ROOT, SITE)[0]


@printed
def test_the_pdf_has_every_main_page_in_the_order_of_the_contents(listed):
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    main = [part for part in toc["parts"] if part["caption"].startswith(("Start", "Part "))]
    files = [toc["root"], *(each["file"] for part in main for each in part["chapters"])]
    assert [page for _, page, _ in listed][: len(files)] == files
    assert {page for _, page, _ in listed[len(files) :]} == {"notation", "glossary"}
    said = subprocess.run(["pdftotext", "-layout", PDF, "-"], capture_output=True, text=True)
    sheets = said.stdout.split("\f")
    first = next(n for n, sheet in enumerate(sheets) if n > 1 and listed[0][2] in sheet)
    contents = "".join(sheets[1:first])
    for part, page, title in listed:
        [number] = re.findall(rf"^\s*{re.escape(title)}\s+(\d+)$", contents, re.MULTILINE)
        head = [line.strip() for line in sheets[int(number) - 1].splitlines() if line.strip()]
        assert " ".join(head[:4]).removeprefix(part).strip().startswith(title), page
    numbers = [int(n) for n in re.findall(r"\S +(\d+)$", contents, re.MULTILINE)]
    assert numbers == sorted(numbers) and len(numbers) == len(listed)
    assert "\\(" not in said.stdout and "Show code" not in said.stdout


@printed
def test_no_line_of_the_pdf_is_cut():
    bounds = subprocess.run(["pdftotext", "-bbox", PDF, "-"], capture_output=True, text=True).stdout
    width = float(re.search(r'<page width="([\d.]+)"', bounds)[1])
    assert width == pytest.approx(595, abs=1), "A4"
    words = re.findall(r'<word xMin="([\d.-]+)" .*xMax="([\d.-]+)" .*>.*\w.*</word>', bounds)
    left, right = zip(*[map(float, word) for word in words], strict=True)
    margin = 24 / 25.4 * 72
    assert len(right) > 20_000 and min(left) > margin - 3 and max(right) < width - margin + 3


@printed
def test_the_epub_is_whole(listed):
    with ZipFile(EPUB) as book:
        assert book.infolist()[0].filename == "mimetype"
        assert book.read("mimetype") == b"application/epub+zip" and book.testzip() is None
        names = [name for name in book.namelist() if name.endswith((".xhtml", ".svg", ".opf"))]
        trees = {name: ElementTree.fromstring(book.read(name)) for name in names}
    [nav] = [tree for name, tree in trees.items() if name.endswith("nav.xhtml")]
    heads = [" ".join("".join(a.itertext()).split()) for a in nav.iter() if a.tag.endswith("}a")]
    assert [head for head in heads if head in {t for _, _, t in listed}] == [t for *_, t in listed]
    ids = {name: {e.get("id") for e in tree.iter()} for name, tree in trees.items()}
    for name, tree in trees.items():
        for link in (e.get("href") for e in tree.iter() if e.tag.endswith("}a")):
            where, anchor = urldefrag(urljoin(name, link or ""))
            if not urlparse(where).scheme and anchor:
                assert anchor in ids[where], f"{name} links to {link}"


@printed
def test_the_introduction_offers_the_printed_book(parsed):
    assert {"downloads/lowprec.pdf", "downloads/lowprec.epub"} <= set(parsed["intro.html"].links)
