"""A claim and its measurement: the verdict, and how it reads on a page and in a lock."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lowprec import UserError
from lowprec.evidence.locks import rounded
from lowprec.evidence.registry import Claim
from lowprec.evidence.words import CLAIM_MIME, number

BOXES = {"supported": "tip", "refuted": "danger", "inconclusive": "warning", "not run": "note"}
VERDICTS = tuple(BOXES)


@dataclass(frozen=True)
class Measured:
    """A number that a page made itself: value, the n units behind it, and perhaps the interval
    (low, high) of the value and what each unit gave. value is None where nothing is recorded."""

    value: float | None
    n: int
    interval: tuple[float, float] | None = None
    by: Mapping | None = None


@dataclass(frozen=True)
class Result:
    """A claim and its measurement. Displays as its verdict in words; `str()` gives one line.

    by: what each unit gave, by its name. shown: read from the lock and not measured here.
    """

    claim: Claim
    verdict: str
    value: float | None
    n: int
    interval: tuple[float, float] | None = None
    by: dict[str, float] | None = None
    note: str | None = None
    shown: bool = False

    @property
    def registered(self) -> bool:
        """Whether the lock of its page answers for it: not for a fork's, nor for one shown."""
        return bool(self.claim.page) and not self.shown

    @property
    def text(self) -> str:
        """The measured value for prose, with its interval."""
        if self.value is None:
            return "nothing to measure"
        text = number(self.value)
        if self.interval is not None:
            text += f" [{number(self.interval[0])}, {number(self.interval[1])}]"
        return text

    @property
    def count(self) -> str:
        """How many units have what the rule counts, "3 of 8"; raises for one that counts none."""
        if not self.claim.parsed.counts:
            raise UserError(f"claim {self.claim.id} has no count: its rule is no count or share")
        value = self.value or 0
        if self.claim.parsed.quantifier == "share":
            value = round(value * self.n)
        return f"{number(value)} of {number(self.n)}"

    @property
    def headline(self) -> str:
        """The words of a claim that is a headline, filled in."""
        count = self.count if self.claim.parsed.counts else ""
        return self.claim.words.format(count=count, value=_Shown(self.value), n=_Shown(self.n))

    @property
    def size(self) -> str:
        """n with its unit, without what the unit is of."""
        unit = re.split(" (?:of|with) ", self.claim.unit)[0]
        if self.n == 1:
            unit = unit.removesuffix("s")
        return f"{self.n:,} {unit}".rstrip()

    def __str__(self) -> str:
        return f"{self.verdict}: {self.claim.sentence} ({self.measured()})"

    def measured(self) -> str:
        c = self.claim
        if self.verdict == "not run":
            return f"not yet, {self.n} of {c.needs} recorded" if self.n else "not recorded yet"
        need = ""
        if self.n < c.needs:
            need = f", {c.needs:,} {'needed' if self.verdict == 'inconclusive' else 'asked for'}"
        if self.value is None:
            return f"nothing to measure once all is recorded, n = {self.size}{need}"
        if c.parsed.quantifier == "count":
            return f"{c.metric.removeprefix('count of ')}: {self.count}{need}"
        value = number(self.value, exact=True) if c.parsed.is_exact else self.text
        return f"{c.metric}: {value}, n = {self.size}{need}"

    def listed(self) -> str:
        """What each unit gave, for prose; empty where the number says it all."""
        if not self.by or len(set(self.by.values())) == 1:
            return ""
        if not self.claim.parsed.counts:
            return ", ".join(f"{unit}: {number(value)}" for unit, value in self.by.items())
        fewer = sum(self.by.values()) <= len(self.by) / 2
        names = [unit for unit, has in self.by.items() if has == fewer]
        return f"{'Yes' if fewer else 'No'}: {', '.join(names)}"

    def markdown(self) -> str:
        """The verdict in words: what was claimed, measured, and what would refute it."""
        c = self.claim
        return self._paragraphs(f"**{self.verdict.capitalize()}.** {c.sentence}", c.source)

    def myst(self) -> str:
        """The same for a page of the book: a box in the verdict's colour, the source a citation and
        each threat a link."""
        c = self.claim
        source = c.source and f"{{cite:t}}`{c.source}`"
        body = self._paragraphs(c.sentence, source, threat_links(c))
        head = f":::{{admonition}} {self.verdict.capitalize()}\n:class: {BOXES[self.verdict]}\n"
        return f"{head}\n{body}\n:::\n"

    def judged(self) -> str:
        """How it was judged, in MyST: measurement, rule, source, and what each unit gave."""
        source = self.claim.source and f"{{cite:t}}`{self.claim.source}`"
        return self._how(source, threat_links(self.claim))

    def _paragraphs(self, sentence: str, source: str | None, threats=None) -> str:
        gloss = f" *{self.claim.gloss}*" if self.claim.gloss else ""
        return f"{sentence}{gloss}\n\n{self._how(source, threats)}"

    def _how(self, source: str | None, threats) -> str:
        c = self.claim
        rule = f"Measured: {self.measured()}. Supported if {c.parsed.words}. "
        if c.refuted_if:
            rule += f"Would refute it: {c.refuted_if.rstrip('.')}. "
        rule += f"{c.sourced(source)}."
        if c.exploratory:
            rule += " Exploratory: the rule was chosen after seeing these data."
        elif c.registered is None:  # of a fork
            rule += " No commit in `registered` says that the rule came first."
        if c.doubts:
            rule += f" Doubt it first for: {', '.join(threats or c.doubts)}."
        listed = self.listed() and f"{self.listed()}."
        return "\n\n".join(filter(None, (rule, listed, self.note)))

    def as_dict(self) -> dict:
        return asdict(self) | {"interval": self._ends()}

    def _ends(self) -> list | None:
        """Its interval as JSON can hold it, which knows no infinity."""
        return self.interval and [x if math.isfinite(x) else str(x) for x in self.interval]

    @classmethod
    def from_dict(cls, record: dict) -> Result:
        interval = record["interval"] and tuple(map(float, record["interval"]))
        return cls(**{**record, "claim": Claim(**record["claim"]), "interval": interval})

    def as_lock(self) -> dict:
        """Its entry in the lock of its page, to six digits; in full where the rule asks for one
        fraction."""
        more = {"interval": self._ends(), "by": self.by}
        more = {key: rounded(value) for key, value in more.items() if value}
        value = self.value if self.claim.parsed.is_exact else rounded(self.value)
        return {"verdict": self.verdict, "value": value, "n": self.n} | more

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {
            "text/plain": str(self),
            "text/markdown": self.markdown(),
            CLAIM_MIME: self.as_dict(),
        }


class _Shown(float):
    """A number that reads as prose prints it, unless a format is asked for."""

    def __format__(self, form: str) -> str:
        return super().__format__(form) if form else number(self)


def threat_links(claim: Claim) -> list[str]:
    """The threats of a claim, as links to their sections of book/threats.md."""
    return [threat_link(word) for word in claim.doubts]


def threat_link(word: str) -> str:
    return f"{{ref}}`{word} <threat-{word.lower()}>`"
