"""The book's Sphinx extension: results in documents by name, titles for folded outputs, terms of
the glossary, and links that are resolved anew when what they lead to has changed.

`{{ fact("the_explosion", "low") }}` and `{{ claim("explosion-low-happens").count }}` in a page
of book/ say what the locks of the notebooks have; `{{ count("explosion-low-happens") }}` is that
count as a link to the claim. MyST's substitutions do the work; an unknown name is a warning, which
stops the build.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from docutils.nodes import container
from jinja2 import pass_context
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.transforms.post_transforms import SphinxPostTransform

from lowprec import __version__
from lowprec.evidence.registry import load, pages_folder
from lowprec.publish import facts, terms


@pass_context
def fact(context, page: str, name: str, form: str = "") -> str:
    """A fact of a page, by a format of Python's if one is given."""
    _depend(context, page)
    return facts.locked_fact(page, name, form)


@pass_context
def claim(context, id: str, form: str = "") -> Fields:
    """What prose may say of a claim as its page found it: .count, .value, .n and .verdict."""
    if id in (registry := load()):
        _depend(context, registry[id].page)
    return Fields(id, form)


@pass_context
def count(context, id: str) -> str:
    """The count of a claim, linked to the claim."""
    return f"[{claim(context, id).count}](#claim-{id})"


class Fields:
    """A claim whose attributes are looked up in the locks."""

    def __init__(self, id: str, form: str):
        self.__claim = id, form

    def __getattr__(self, name: str) -> str:
        id, form = self.__claim
        return facts.locked_claim(id, name, form)


NAMES = {"fact": fact, "claim": claim, "count": count}
"""What stands in `{{ }}`."""


def _depend(context, page: str) -> None:
    """Read the document again when the lock of the page changes."""
    context["env"].note_dependency(str(pages_folder() / f"{page}.lock.json"))


def _targets(app, env) -> list[str]:
    """Write all documents again when something that they may link to is gone or elsewhere.

    Sphinx resolves links as it writes, and by itself writes only what was read again, so a link in
    another document would break unseen.
    """
    then, now = getattr(env, "lowprec_targets", set()), set()
    for domain in env.domains.values():
        now |= {tuple(map(str, target)) for target in domain.get_objects()}
    env.lowprec_targets = now
    return [] if then <= now else sorted(env.found_docs)


def _names(app) -> None:
    config = app.env.myst_config  # a copy: Sphinx warns of functions in its own configuration
    config.substitutions = {**config.substitutions, **NAMES}


def _say_who(app, config) -> None:
    """Tell book/_static/lowprec.js whom a reader cites."""
    cited = {"title": config.html_title, "author": config.author, "version": __version__}
    app.add_js_file(None, body=f"window.LOWPREC = {json.dumps(cited)}")


def _launch_if_public(app, config) -> None:
    """Launch buttons where _config.yml names the repository, which a service could open."""
    if not config.html_theme_options.get("repository_url"):
        config.html_theme_options.pop("launch_buttons", None)


def _launch_sources(app, pagename, templatename, context, doctree) -> None:
    """Launch buttons open the notebook that a page was executed from: the page is not committed."""
    for group in context.get("header_buttons", ()):
        for button in group.get("buttons", ()) if group.get("label") == "launch-buttons" else ():
            button["url"] = button["url"].replace("/book/executed/", "/notebooks/")


class TitleFolds(SphinxPostTransform):
    """The outputs of a cell tagged `fold` unfold under its title (`lowprec.publish.form`)."""

    default_priority = 200  # after the cells are folded
    formats = ("html",)

    def run(self, **kwargs) -> None:
        for cell in self.document.findall(container):
            title = cell.get("cell_metadata", {}).get("fold")
            for node in cell.findall(HideCodeCellNode) if title else ():
                if "above-input" not in node["classes"]:
                    node["prompt_show"] = node["prompt_hide"] = title


def _defer(app, pagename, templatename, context, doctree) -> None:
    """Let a page be drawn before its scripts come, but for Sphinx's own, which are small and which
    the search and scripts in the page go on from."""
    for script in context["script_files"]:
        if script.filename and script.priority > SPHINX_OWN:
            script.attributes.setdefault("defer", "defer")


SPHINX_OWN = 200
"""The priority of the scripts that Sphinx itself adds."""


def _leave_out(app, error) -> None:
    """What no page loads: of MathJax all but one bundle, its fonts and extensions; the theme's
    languages, icons that no page shows, fonts in a second format and of brands, whose icons are
    drawn by the script; maps of sources."""
    site = Path(app.outdir)
    static = site / "_static"
    mathjax = (static / app.config.mathjax_path).parent
    needed = {mathjax / part for part in ("output/chtml/fonts/woff-v2", "input/tex/extensions")}
    for file in mathjax.rglob("*.*"):
        if file.is_file() and file.name != Path(app.config.mathjax_path).name:
            if not needed & set(file.parents) or file.name == "all-packages.js":
                file.unlink()
    shutil.rmtree(static / "locales", ignore_errors=True)
    for pattern in ("*.map", "vendor/**/*.ttf", "vendor/**/fa-brands-*"):
        for file in list(static.rglob(pattern)):
            file.unlink()
    _leave_out_icons(static / "scripts" / "fontawesome.js", _icons(site))


ICON = re.compile(r'"?([a-z0-9-]+)"?:\[\d+,\d+,(\[[^]]*\]),"[0-9a-f]+",(?:"[^"]*"|\[[^]]*\])\],?')
"""One icon of Font Awesome's script: name:[width,height,[other names],"code","path"]."""


def _icons(site: Path) -> set[str]:
    """The names of the icons that pages and scripts of the book name."""
    files = (*site.rglob("*.html"), *site.glob("_static/*.js"), *site.glob("_static/scripts/*.js"))
    texts = (f.read_text() for f in files if not f.name.startswith("fontawesome"))
    return {name for text in texts for name in re.findall(r"\bfa-([a-z0-9-]+)", text)}


def _leave_out_icons(script: Path, used: set[str]) -> None:
    def kept(icon: re.Match) -> str:
        return icon[0] if used & {icon[1], *re.findall(r'"([a-z0-9-]+)"', icon[2])} else ""

    if script.is_file():
        script.write_text(ICON.sub(kept, script.read_text()))


def setup(app) -> dict:
    app.connect("builder-inited", _names, priority=600)  # after MyST has read its configuration
    app.connect("config-inited", _say_who)
    app.connect("config-inited", _launch_if_public)
    app.connect("env-updated", _targets)
    app.connect("env-updated", terms.write)
    app.add_js_file("definitions.js")
    app.connect("html-page-context", _defer, priority=900)
    app.connect("html-page-context", _launch_sources, priority=900)  # when the theme has made them
    app.connect("build-finished", _leave_out)
    app.add_transform(terms.LinkTerms)
    app.add_post_transform(TitleFolds)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
