"""Claims: what a page says, the number that decides it, and the verdict.

A claim stands in `book/claims.yml` before it is measured: a sentence, its source, a metric, an
operator and a threshold, how many observations a verdict needs, and what would refute it. A
notebook measures and calls `check`; the verdict follows from the rule, not from the author. The
file records the verdict of the `recorded` profile, and a measurement that disagrees with it fails
the build: a refuted claim is a result, a verdict that changes unseen is not.

    not run         the profile cannot measure it, or its runs are not recorded yet
    inconclusive    fewer observations than the claim needs, be it none once all runs are there, or
                    an interval that holds the threshold
    supported       the metric satisfies the operator and the threshold
    refuted         it does not
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import operator
import re
from dataclasses import dataclass
from pathlib import Path

from lowprec import UserError, yaml_fault
from lowprec.words import CLAIM_MIME, PROFILES, minus, number

OPERATORS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
BOXES = {"supported": "tip", "refuted": "danger", "inconclusive": "warning", "not run": "note"}
VERDICTS = tuple(BOXES)
WORDS = {"==": "equal to", "!=": "other than", "<": "below", "<=": "at most", ">": "above",
         ">=": "at least"}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One entry of claims.yml.

    source: BibTeX key of who says it, None for this book. tests: the statement of the source that
    it tests, an id of book/statements.yml. gloss: what a reader of that statement should know of
    the verdict. n: observations a verdict needs, in claims.yml a number or a number with its unit,
    "8 runs". profile: the profiles that can measure it. threats: why to doubt it, words of
    book/threats.md. verdict: the recorded one.
    """

    id: str
    sentence: str
    metric: str
    operator: str
    threshold: float
    refuted_if: str
    notebook: str
    n: int
    source: str | None = None
    tests: str | None = None
    gloss: str = ""
    unit: str = ""
    profile: tuple[str, ...] = ("recorded",)
    threats: tuple[str, ...] = ()
    verdict: str = "not run"

    def __post_init__(self):
        for field in ("profile", "threats"):
            words = getattr(self, field)
            object.__setattr__(self, field, (words,) if isinstance(words, str) else tuple(words))
        self._one_of("operator", OPERATORS)
        self._one_of("verdict", VERDICTS)
        for profile in self.profile:
            if profile not in PROFILES:
                raise UserError(f"claim {self.id}: profile {profile!r} is none of {PROFILES}")
        if not isinstance(self.threshold, int | float):
            raise UserError(f"claim {self.id}: threshold {self.threshold!r} is not a number")
        if type(self.n) is not int or self.n < 1:
            raise UserError(f"claim {self.id}: n {self.n!r} is not a number of observations")

    def _one_of(self, field: str, valid) -> None:
        if getattr(self, field) not in valid:
            raise UserError(
                f"claim {self.id}: {field} {getattr(self, field)!r} is none of {', '.join(valid)}"
            )

    @property
    def exploratory(self) -> bool:
        """Found in the very data that judge it, so a lead and not a test."""
        return "after" in self.threats

    @property
    def is_exact(self) -> bool:
        """Whether the rule asks for one fractional number, which is then shown in full."""
        return self.operator == "==" and not float(self.threshold).is_integer()

    def sourced(self, source: str | None) -> str:
        """Whose the sentence is. One that needs a gloss is not its source's own."""
        return f"{'Tests a statement of' if self.gloss else 'Source:'} {source or 'this book'}"

    def verdict_on(self, value, n: int, interval=None, profile: str = "recorded",
                   complete: bool = False, settled: bool = False) -> str:  # fmt: skip
        """The verdict that the rule gives for a measured value; see the module's docstring."""
        if profile not in self.profile:
            return "not run"
        if value is None or n == 0:
            return "inconclusive" if complete else "not run"
        if not math.isfinite(value):
            raise UserError(f"claim {self.id}: the measured {self.metric} is {value}")
        if interval is not None and any(map(math.isnan, interval)):
            raise UserError(f"claim {self.id}: the interval of {self.metric} is {interval}")
        if n < self.n and not settled:
            return "inconclusive"
        if interval is not None and interval[0] < self.threshold < interval[1]:
            return "inconclusive"
        return "supported" if OPERATORS[self.operator](value, self.threshold) else "refuted"


@dataclass(frozen=True)
class Result:
    """A claim and its measurement. Displays as its verdict in words; `str()` gives one line."""

    claim: Claim
    verdict: str
    value: float | None
    n: int
    interval: tuple[float, float] | None = None
    profile: str = "recorded"
    note: str | None = None
    registered: bool = True

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
    def size(self) -> str:
        """n with its unit."""
        unit = self.claim.unit.removesuffix("s") if self.n == 1 else self.claim.unit
        return f"{self.n:,} {unit}".rstrip()

    def __str__(self) -> str:
        return f"{self.verdict}: {self.claim.sentence} ({self.measured()})"

    def measured(self) -> str:
        c = self.claim
        if self.verdict == "not run":
            if self.profile in c.profile:
                return f"not yet, {self.n} of {c.n} recorded" if self.n else "not recorded yet"
            return f"needs profile {' or '.join(c.profile)}"
        size, need = self.size, ""
        if self.n < c.n:
            if self.verdict == "inconclusive":
                need = f", {c.n:,} needed"
            else:
                size = f"{self.n:,} of {c.n:,} {c.unit}".rstrip()
        if self.value is None:
            return f"nothing to measure once all is recorded, n = {size}{need}"
        value = number(self.value, exact=True) if c.is_exact else self.text
        return f"{c.metric}: {value}, n = {size}{need}"

    def markdown(self) -> str:
        """The verdict in words: what was claimed, measured, and what would refute it."""
        c = self.claim
        return self._paragraphs(f"**{self.verdict.capitalize()}.** {c.sentence}", c.source)

    def myst(self, target: bool = False) -> str:
        """The same for a page of the book: a box in the verdict's colour, the source a citation and
        each threat a link. target: other pages link to this box, as claim-ID."""
        c = self.claim
        source = c.source and f"{{cite:t}}`{c.source}`"
        body = self._paragraphs(c.sentence, source, threat_links(c))
        head = f":::{{admonition}} {self.verdict.capitalize()}\n:class: {BOXES[self.verdict]}\n"
        return f"{head}{f':name: claim-{c.id}' if target else ''}\n{body}\n:::\n"

    def _paragraphs(self, sentence: str, source: str | None, threats=None) -> str:
        c = self.claim
        rule = (
            f"Measured: {self.measured()}. Supported if {WORDS[c.operator]} "
            f"{number(c.threshold, c.is_exact)}. "
            f"Would refute it: {c.refuted_if.rstrip('.')}. {c.sourced(source)}."
        )
        if c.exploratory:
            rule += " Exploratory: the rule was chosen after seeing these data."
        if c.threats:
            rule += f" Doubt it first for: {', '.join(threats or c.threats)}."
        gloss = f" *{c.gloss}*" if c.gloss else ""
        return "\n\n".join(filter(None, (sentence + gloss, rule, self.note)))

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: dict) -> Result:
        interval = record["interval"] and tuple(record["interval"])
        return cls(**{**record, "claim": Claim(**record["claim"]), "interval": interval})

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {
            "text/plain": str(self),
            "text/markdown": self.markdown(),
            CLAIM_MIME: self.as_dict(),
        }


def threat_links(claim: Claim) -> list[str]:
    """The threats of a claim, as links to their sections of book/threats.md."""
    return [threat_link(word) for word in claim.threats]


def threat_link(word: str) -> str:
    return f"{{ref}}`{word} <threat-{word.lower()}>`"


def load(path: Path | None = None) -> dict[str, Claim]:
    """The claims of book/claims.yml by id, in its order."""
    if path is None:
        from lowprec.runs import repo_root

        path = repo_root() / "book" / "claims.yml"
    try:
        return dict(_read(Path(path), Path(path).stat().st_mtime_ns))
    except OSError:
        raise UserError(f"there are no claims at {path}; restore it from git") from None


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> dict[str, Claim]:
    """Read once, not at each of a page's twenty claims."""
    import yaml

    try:
        entries = yaml.safe_load(path.read_text()) or []
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} is not valid YAML: {yaml_fault(error)}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path.name} must be a list of claims, each with its keys")
    threats = path.with_name("threats.md")
    text = threats.read_text() if threats.is_file() else ""
    labels = re.findall(r"^\(threat-(\w+)\)=$", text, re.MULTILINE)
    claims: dict[str, Claim] = {}
    for entry in entries:
        claim = parse(entry)
        for word in claim.threats:
            if labels and word.lower() not in labels:
                raise UserError(
                    f"claim {claim.id}: {word!r} is no threat of threats.md; those are "
                    f"{', '.join(labels)}"
                )
        if claim.id in claims:
            raise UserError(f"claim {claim.id} stands twice in {path.name}: rename one")
        claims[claim.id] = claim
    return claims


def parse(entry: dict) -> Claim:
    """A claim from its keys; raises `UserError` for one that is unknown or missing."""
    fields = dataclasses.fields(Claim)
    name = entry.get("id", "without id")
    for key in entry:
        if key not in (known := [f.name for f in fields]):
            raise UserError(f"claim {name}: unknown key {key!r}; keys are {', '.join(known)}")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in entry:
            raise UserError(f"claim {name}: key {field.name!r} is missing")
    if isinstance(entry.get("n"), str):
        n, _, unit = entry["n"].partition(" ")
        if not n.isdecimal():
            raise UserError(f"claim {name}: n {entry['n']!r} is not a number, nor one with a unit")
        entry = {**entry, "n": int(n), "unit": unit}
    return Claim(**entry)


def check(
    id: str, value, n: int, interval=None, profile: str = "recorded", note: str | None = None,
    path: Path | None = None, complete: bool = False, settled: bool = False,
) -> Result:  # fmt: skip
    """Judge a claim of claims.yml by its measured value.

    value: the claim's metric (a number or a bool), None while what it needs is not recorded. n:
    observations behind it. interval: (low, high) of the value, inconclusive when the threshold lies
    inside. note: a sentence shown below. complete: every run that the claim asks for is recorded;
    one that finds nothing to measure in them, such as a share of the exploded runs where none has
    exploded, is then inconclusive and no longer not run. settled: no observation that is still to
    come can change the verdict, as after the first explosion where none was to be; n may then be
    too small.
    Raises `UserError` for an unknown id, a value that is not finite and an interval that is not a
    number. A reader who changes a parameter may well get another verdict than the recorded one; a
    page of the book may not, and `lowprec.notebook.execute` sees to that with `compare`.
    """
    claims = load(path)
    if id not in claims:
        close = difflib.get_close_matches(id, claims, n=1)
        raise UserError(f"there is no claim {id!r}" + (f": did you mean {close[0]!r}?" if close else
                                                       " in book/claims.yml"))  # fmt: skip
    return _result(
        claims[id], value, n, interval, profile, note, True, complete=complete, settled=settled
    )


def settled(id: str, count: int, n: int, path: Path | None = None) -> bool:
    """Whether none of the observations that are missing to a claim's n can change its verdict.

    count: of n observations, as many as have what the claim counts. False for an unknown id, which
    `check` refuses.
    """
    claim = load(path).get(id)
    missing = max(claim.n - n, 0) if claim else 0
    counts = range(count, count + missing + 1) if claim else ()
    return len({claim.verdict_on(k, claim.n, profile=claim.profile[0]) for k in counts}) == 1


def compare(records: list[dict], path: Path | None = None, name: str = "") -> None:
    """Raise `UserError` for the first verdict of an executed page that claims.yml does not have.

    name: of the page; a claim of the book is checked on its own, or in a fork.
    """
    recorded = load(path)
    for result in map(Result.from_dict, records):
        if result.registered and name[:1].isdecimal() and result.claim.notebook != name:
            raise UserError(
                f"claim {result.claim.id} is checked in {name} and book/claims.yml has "
                f"`notebook: {result.claim.notebook}`: correct one of them"
            )
        if result.registered and result.verdict != recorded[result.claim.id].verdict:
            raise UserError(
                f"claim {result.claim.id} is {result.verdict} ({result.measured()}) and "
                f"book/claims.yml says {recorded[result.claim.id].verdict}: look why, then update "
                f"the verdict there"
            )


def judge(hypothesis: dict, value, n: int, interval=None, profile: str = "recorded",
          note: str | None = None) -> Result:  # fmt: skip
    """Judge a hypothesis that is not in claims.yml, by the same rule; for forks.

    hypothesis: the keys of a claim; id, notebook and verdict may be left out.
    """
    claim = parse({"id": "hypothesis", "notebook": "", "profile": PROFILES, **hypothesis})
    if interval is not None and interval[0] > interval[1]:
        raise UserError(f"the interval {tuple(interval)} ends before it begins")
    if profile not in PROFILES:
        raise UserError(f"there is no profile {profile!r}; take {', '.join(PROFILES)}")
    return _result(claim, value, n, interval, profile, note, False)


def _result(claim, value, n, interval, profile, note, registered, **how) -> Result:
    value = value.item() if hasattr(value, "item") else value
    if interval is not None:
        interval = float(interval[0]), float(interval[1])
    verdict = claim.verdict_on(value, int(n), interval, profile, **how)
    if verdict == "not run" or not n:
        value = interval = None
    note = note and minus(note)
    return Result(claim, verdict, value, int(n), interval, profile, note, registered)


def main(argv: list[str]) -> None:
    """Print the claims, each with its verdict and page; with --write, write the book's pages."""
    parser = argparse.ArgumentParser(
        prog="python -m lowprec claims", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write the generated pages and tables")
    if parser.parse_args(argv).write:
        from lowprec import pages
        from lowprec.runs import repo_root

        print(f"{len(pages.write(repo_root()))} generated pages and downloads")
        return
    for claim in load().values():
        kind = " (exploratory)" * claim.exploratory
        print(f"{claim.verdict:13} {claim.notebook[:2]} {claim.id}{kind}: {claim.sentence}")
