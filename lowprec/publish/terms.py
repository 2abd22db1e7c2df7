"""Terms and symbols that a reader meets: linked to the glossary at their first use on a page, and
what book/_static/hover.js shows of their entries.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

GLOSSARY = "glossary"
MARKED = {
    "stored δ": r"[Ss]tored δ",
    "clean δ": r"[Cc]lean δ",
    "signed sum": r"[Ss]igned sums?",
    "row sum": r"[Rr]ow sums?",
    "take-off": r"[Tt]akes? off|[Tt]ake-offs?",
    "tied maximum": r"[Tt]ied (?:maximum|maxima)",
    "mean key": r"[Mm]ean keys?",
    "weighted key": r"[Ww]eighted keys?",
    "twin": r"[Tt]wins?",
    "onset": r"[Oo]nsets?",
    "capture": r"[Cc]aptures?",
    "ulp": r"ulp",
    "σ(W_Q)": r"σ\(W_Q\)",
    **{name: name for name in ("W_Q", "Σε", "dO", "dP", "dS", "dQ", "dK", "P̄", "Ō")},
    **{name: name for name in ("δ", "ε", "ℓ", "O", "P", "V")},
}
"""Entries of the glossary, and how the text writes them; what is part of another comes later."""
BESIDE, BEHIND = r"[\w\u0304∘·/√‖*ᵀ(]", r"[\w\u0304∘·/√‖*ᵀ′]"
"""Before and behind these a symbol is part of a formula or of a longer word."""
USES = re.compile(
    rf"(?<!{BESIDE})(?:%s)(?!{BEHIND})"
    % "|".join(f"(?P<g{i}>{form})" for i, form in enumerate(MARKED.values()))
)
PROSE = ("intro", "round_it_yourself", "take_it_home")
"""Pages that are no notebook and have their terms marked."""
WORDS = 40
"""Sentences of an entry are shown up to about as many words, the first one in any case."""


class LinkTerms(SphinxTransform):
    """Link the first use of each term in `MARKED` on a page that has no link to it yet; not in
    headings, tables, boxes, code, formulas, outputs and folds."""

    default_priority = 600

    def apply(self, **kwargs) -> None:
        page = self.env.docname
        if GLOSSARY not in self.env.found_docs or not page.startswith(("executed/", *PROSE)):
            return
        linked = {
            xref["reftarget"] for xref in self.document.findall(addnodes.pending_xref)
            if xref.get("reftype") == "term"
        }  # fmt: skip
        for text in list(self.document.findall(nodes.Text)):
            if not _is_prose(text):
                continue
            parts, end = [], 0
            for use in USES.finditer(text):
                entry = [*MARKED][int(use.lastgroup[1:])]
                if entry not in linked:
                    linked.add(entry)
                    parts += [nodes.Text(text[end : use.start()]), _link(entry, use[0], page)]
                    end = use.end()
            if parts:
                text.parent.replace(text, [*parts, nodes.Text(text[end:])])


APART = (
    nodes.title, nodes.table, nodes.Admonition, nodes.FixedTextElement, nodes.literal, nodes.math,
    nodes.reference, nodes.raw, nodes.term, nodes.caption, addnodes.pending_xref,
)  # fmt: skip


def _is_prose(text: nodes.Text) -> bool:
    above, node = [], text.parent
    while node is not None:
        above.append(node)
        node = node.parent
    kinds = {each.get("design_component") or each.get("nb_element") for each in above[:-1]}
    return (
        any(isinstance(each, nodes.paragraph) for each in above)
        and not any(isinstance(each, APART) for each in above)
        and not kinds & {"dropdown", "cell_code_output"}
    )


def _link(entry: str, words: str, page: str) -> addnodes.pending_xref:
    """What the role {term} makes."""
    shown = nodes.inline("", words, classes=["xref", "std", "std-term"])
    about = dict(refdomain="std", reftype="term", reftarget=entry, refdoc=page)
    return addnodes.pending_xref("", shown, refexplicit=True, refwarn=True, **about)


# What is shown


def definitions(glossary: nodes.document, titles: dict) -> dict[str, list[str]]:
    """{id: [term, first sentences]} of the entries of a glossary, as plain text.

    titles: {page: its title}, for links that have no words of their own.
    """
    found = {}
    for entry in glossary.findall(nodes.definition_list_item):
        terms = [child for child in entry if isinstance(child, nodes.term)]
        text = short(_plain(next(entry.findall(nodes.paragraph)), titles))
        found |= {id: [term.astext(), text] for term in terms for id in term["ids"]}
    return found


def _plain(paragraph: nodes.paragraph, titles: dict) -> str:
    def words(node: nodes.Text) -> str:
        text, above = node.astext(), node.parent.parent
        if isinstance(node.parent, nodes.math):
            return plain(text)
        return titles[text].astext() if above.get("reftype") == "doc" and text in titles else text

    return " ".join("".join(map(words, paragraph.findall(nodes.Text))).split())


SIGNS = dict(
    delta="δ", ell="ℓ", sigma="σ", varepsilon="ε", ast="*", times="×", cdot="·", pm="±", dots="…",
    top="ᵀ", bar="\u0304",
)  # fmt: skip
RAISED = dict(zip("0123456789-eᵀ*", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵉᵀ*", strict=True))


def plain(tex: str) -> str:
    r"""A short formula as text: ``\bar k`` as k̄, ``2^{-7}`` as 2⁻⁷, ``\exp`` as exp."""
    text = re.sub(r"\\bar\s*(\\?\w+)\s*", r"\1\\bar ", tex)
    text = re.sub(r"\\([a-z]+)(?:\s+(?!=))?", lambda name: SIGNS.get(name[1], name[1]), text)
    text = text.replace("\\,", " ").replace("·", " · ").replace("×", " × ").replace("…", " … ")
    raised = r"\^(?:\{([^}]*)\}|(\S))"
    text = re.sub(raised, lambda up: "".join(RAISED.get(c, c) for c in up[1] or up[2]), text)
    return " ".join(re.sub(r"[{}]", "", text).replace("-", "−").split())


def short(text: str) -> str:
    """The first sentences of a text, up to about `WORDS` words."""
    first, *rest = re.split(r"(?<=[.!?:]) +(?=[A-Z*])", text)
    for sentence in rest:
        if len(f"{first} {sentence}".split()) > WORDS:
            break
        first = f"{first} {sentence}"
    return re.sub(":$", ".", first)


def write(app, env) -> list:
    """Put the definitions where hover.js finds them, before the pages that load it are written."""
    if app.builder.format == "html" and GLOSSARY in env.found_docs:
        static = Path(app.outdir) / "_static"
        static.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            definitions(env.get_doctree(GLOSSARY), env.titles), ensure_ascii=False, indent=0
        )
        (static / "definitions.js").write_text(f"const DEFINITIONS = {text};\n", encoding="utf-8")
    return []
