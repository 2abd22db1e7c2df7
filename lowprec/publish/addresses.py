"""Addresses that stay: that of a page which was renamed, and one for each claim.

book/redirects.yml has a line for each old page, `executed/11_explosion: executed/the_explosion`. A
claim is at claim/ID.html, whatever page has its box. At both is a stub, a page of HTML that leads
on: from an old page to the same anchor of the new one, or to the claim that was asked for.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

import yaml

from lowprec import UserError, yaml_fault

STUB = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<link rel="canonical" href="{to}">
<script>
const at = location.hash, claim = at.match(/^#claim-(.+)$/);
location.replace({leads});
</script>
<noscript><meta http-equiv="refresh" content="0; url={to}"></noscript>
<p>Here now: <a href="{to}">{title}</a>.</p>
</html>
"""


def redirects(book: Path, names) -> dict[str, str]:
    """The page that each old page became, from redirects.yml; names: the pages that there are.

    Raises `UserError` for a file that is no such table, for an old page that is still there, and
    for one that leads to none.
    """
    file = book / "redirects.yml"
    if not file.is_file():
        return {}
    try:
        table = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"redirects.yml is not valid YAML: {yaml_fault(error)}") from None
    if not isinstance(table, dict):
        raise UserError("redirects.yml must have lines `old page: new page`")
    for old, new in table.items():
        if old in names:
            raise UserError(f"redirects.yml leads away from {old}, which is a page: take it out")
        if new not in names:
            raise UserError(f"redirects.yml leads from {old} to {new}, which is no page: name one "
                            "of _toc.yml")  # fmt: skip
    return table


def stubs(table: dict[str, str], pages: dict[str, str]) -> dict[str, str]:
    """The stub of each old page and of each claim, by its address in the book.

    table: of `redirects`. pages: the page of each claim, by id.
    """
    found = {}
    for old, new in table.items():
        to = f"{_up(old)}{new}.html"
        claim = f'"{_up(old)}claim/" + claim[1] + ".html"'
        found[f"{old}.html"] = _stub(new, to, f"claim ? {claim} : {json.dumps(to)} + at")
    for id, page in pages.items():
        to = f"../executed/{page}.html#claim-{id}"
        found[f"claim/{id}.html"] = _stub(f"The claim {id}", to, json.dumps(to))
    return found


def _up(page: str) -> str:
    """The way from a page to the root of the book."""
    return "../" * page.count("/")


def _stub(title: str, to: str, leads: str) -> str:
    """leads: the address in JavaScript, with `at` and `claim` of what is asked for."""
    return STUB.format(title=html.escape(title), to=html.escape(to), leads=leads)
