"""What the paper says, statement by statement, and by a written rule whether it holds here.

book/statements.yml has the statements, and a claim names the one that it tests. A supported claim
counts for its statement and a refuted one against it, unless the statement says under `counts` how
it counts, for which the claim's gloss has the reason. An inconclusive one counts neither way.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from lowprec import UserError
from lowprec.evidence.registry import Claim
from lowprec.evidence.verdicts import Result

PAPER = "qiu2025"
FOR, AGAINST, NEITHER = "for", "against", "neither"
WORDS = {
    "holds": "hold here",
    "holds in part": "hold in part",
    "does not hold here": "do not",
    "not tested here": "were not tested",
}
"""The words for a statement of the paper, and how several are counted; see `word_of`."""


def load(book: Path) -> list[dict]:
    """What the paper says, from book/statements.yml; its first lines say what its keys are."""
    return yaml.safe_load((book / "statements.yml").read_text())


def of_paper(registry: dict[str, Claim], said: list[dict]) -> list[tuple[dict, list[Claim]]]:
    """Each statement of the paper with the claims that test it, in the order of the book.

    Raises `UserError` for a claim of the paper's that tests none of its statements, for a statement
    with neither or both of claims and a reason to have none, and for one whose `counts` names
    something else.
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
    for statement in said:
        name, some = statement["id"], tests[statement["id"]]
        if bool(some) == ("untested" in statement):
            raise UserError(
                f"statement {name} of book/statements.yml needs a claim that tests it or, under "
                "`untested`, why there is none"
            )
        explained = [claim.id for claim in some if claim.gloss]
        for id, way in statement.get("counts", {}).items():
            if id not in explained or way not in (FOR, AGAINST, NEITHER):
                raise UserError(
                    f"statement {name} of book/statements.yml counts {id} as {way!r}: name a claim "
                    f"that tests it and has a gloss with the reason, and {FOR}, {AGAINST} or "
                    f"{NEITHER}"
                )
    return [(statement, tests[statement["id"]]) for statement in said]


def word_of(statement: dict, some: list[Claim], found: dict[str, Result]) -> str:
    """Whether a statement holds, by the rule on book/statements.md: a claim counts for it if it is
    supported and against it if refuted, or then as `counts` says, and otherwise neither way."""
    of_verdict, counts = {"supported": FOR, "refuted": AGAINST}, statement.get("counts", {})
    ways = set()
    for claim in some:
        way = of_verdict.get(verdict_of(claim, found), NEITHER)
        ways.add(way if way == NEITHER else counts.get(claim.id, way))
    held, part, failed, untested = WORDS
    if FOR in ways:
        return part if AGAINST in ways else held
    return failed if AGAINST in ways else untested


def standing(registry: dict[str, Claim], said: list[dict], found: dict[str, Result]) -> str:
    """How many of the paper's statements hold, as a sentence."""
    words = [word_of(*pair, found) for pair in of_paper(registry, said)]
    *some, last = (f"{words.count(word)} {many}" for word, many in WORDS.items())
    return f"Of {len(words)} statements of the paper {', '.join(some)}, and {last}.\n"


def listed(registry: dict[str, Claim], said: list[dict], found: dict[str, Result]) -> str:
    """Each statement with its word, and under it the claims that test it, linked to their boxes in
    the book, or why there are none. From claims and locks alone."""
    lines = []
    for statement, some in of_paper(registry, said):
        word = word_of(statement, some, found).capitalize()
        lines += [f"**{statement['says']}** {statement['where']}. *{word}.*", ""]
        for claim in some:
            size = found[claim.id].size if claim.id in found else "nothing"
            n = f"(n = {size})".replace(" ", "\N{NO-BREAK SPACE}", 2)
            gloss = f" *{claim.gloss}*" if claim.gloss else ""
            way = statement.get("counts", {}).get(claim.id)
            gloss += f" Counts {'neither way' if way == NEITHER else way}." * bool(way)
            lines.append(f"- {in_words(claim, found)}: {claim.sentence} {n}{gloss}")
        if "untested" in statement:
            why = f"see the threat [{statement['threat']}](threats.md)"
            reason = statement["untested"]
            lines.append(f"- {reason[0].upper()}{reason[1:]}: {why}.")
        lines.append("")
    return "\n".join(lines)


def verdict_of(claim: Claim, found: dict[str, Result]) -> str:
    return found[claim.id].verdict if claim.id in found else "not run"


def in_words(claim: Claim, found: dict[str, Result]) -> str:
    """The verdict as a list or table shows it, with a link to its box if a page has one."""
    words = f"**{verdict_of(claim, found)}**"
    if claim.id in found:
        words = f"[{words}](#claim-{claim.id})"
    return words + (", exploratory" if claim.exploratory else "")
