"""Terms and symbols: how the text writes them, and what of their entries is shown."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils import nodes
from docutils.utils import new_document

from lowprec.publish import terms

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = (ROOT / "book" / "glossary.md").read_text()


@pytest.mark.parametrize(
    "text, found",
    [
        ("With stored δ it takes off; δ in its twins.", ["stored δ", "take-off", "δ", "twin"]),
        ("Clean δ, from the output O: σ(W_Q) and W_Q.", ["clean δ", "O", "σ(W_Q)", "W_Q"]),
        ("δ = rowsum(dO∘O), P∘dP, √S, P̄·V, O*, Ō/ℓ, O′ and OK.", ["δ"]),
        ("The sum Σε of ε over P̄ and Ō.", ["Σε", "ε", "P̄", "Ō"]),
        ("Captured, rowsum, tiled maxima, twinned.", []),
    ],
)  # fmt: skip
def test_symbols_are_found_and_formulas_left_alone(text, found):
    assert [[*terms.MARKED][int(use.lastgroup[1:])] for use in terms.USES.finditer(text)] == found


def test_what_is_marked_has_an_entry():
    assert [entry for entry in terms.MARKED if f"\n{entry}\n" not in GLOSSARY] == []


def linked(*parts):
    """The text of a page after `LinkTerms`, with links in brackets."""
    document = new_document("")
    document.settings.env = SimpleNamespace(docname="executed/page", found_docs={"glossary"})
    document += parts
    terms.LinkTerms(document).apply()
    for link in document.findall(terms.addnodes.pending_xref):
        link.replace_self(nodes.Text(f"[{link.astext()}]"))
    return document.astext()


def test_the_first_use_of_each_term_on_a_page_is_linked():
    said = ("Twins, and the onset of a twin.", "At an onset δ.")
    shown = linked(*(nodes.paragraph(text=text) for text in said))
    assert shown == "[Twins], and the [onset] of a twin.\n\nAt an onset [δ]."


@pytest.mark.parametrize(
    "around",
    [
        nodes.container(nb_element="cell_code_output"),
        nodes.container(design_component="dropdown"),
        nodes.table(),
        nodes.admonition(),
    ],
)
def test_outputs_folds_tables_and_boxes_have_no_links(around):
    around += nodes.paragraph(text="A twin.")
    assert linked(around, nodes.paragraph(text="A twin.")) == "A twin.\n\nA [twin]."


@pytest.mark.parametrize(
    "tex, text",
    [
        (r"\bar k", "k̄"), (r"\bar P = \exp(0) = 1", "P̄ = exp(0) = 1"), ("2^{-7}", "2⁻⁷"),
        (r"c\,q_i \cdot (k_j - \bar k)", "c q_i · (k_j − k̄)"), (r"O^\ast", "O*"),
        (r"(PK)_i\, x_i^\top", "(PK)_i x_iᵀ"), (r"\pm 1 \times 2^e", "±1 × 2ᵉ"),
    ],
)  # fmt: skip
def test_a_short_formula_reads_as_text(tex, text):
    assert terms.plain(tex) == text


def test_an_entry_is_shown_by_its_first_sentences():
    long = " ".join(["word"] * 30) + "."
    assert (
        terms.short(f"One. {long.capitalize()} {long.capitalize()}") == f"One. {long.capitalize()}"
    )
    assert terms.short(long * 3) == long * 3


@pytest.mark.book
def test_every_entry_has_a_short_definition_in_plain_text():
    text = (ROOT / "book/_build/html/_static/definitions.js").read_text()
    found = json.loads(re.fullmatch(r"const DEFINITIONS = (.*);\n", text, re.DOTALL)[1])
    blocks = re.findall(r"^```\{glossary\}\n(.*?)^```", GLOSSARY, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^(?! )(.+)$", "\n".join(blocks), re.MULTILINE)
    assert [term for term, _ in found.values()] == entries
    for term, said in found.values():
        assert 2 < len(said.split()) <= 45 and not re.search(r"[\\${}`]", said), term
