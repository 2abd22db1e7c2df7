"""The rule of a claim: one line that says what is measured, over which units, and what supports it.

    max over captures of |error of δ / error with O − 1| <= 0.25
    count of seeds that explode == 0
    share of heads whose sum is positive in [0.4, 0.6]
    p of the log-rank test of the times to explosion < 0.05

The first three take a number, or true or false, for each unit, and make one number of them. The
last has no quantifier: it takes the number itself. "share of runs with a rise, less that of others"
has none either.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from lowprec import UserError
from lowprec.evidence.words import number

COMPARISONS = {
    "==": (operator.eq, "equal to"),
    "!=": (operator.ne, "other than"),
    "<": (operator.lt, "below"),
    "<=": (operator.le, "at most"),
    ">": (operator.gt, "above"),
    ">=": (operator.ge, "at least"),
}
QUANTIFIERS = {
    "max": max, "min": min, "median": statistics.median, "mean": statistics.fmean, "sum": sum,
    "count": sum, "share": statistics.fmean,
}  # fmt: skip
COUNTED = ("count", "share")
_KNOWN = "max, min, median, mean or sum `over UNIT of ...`, or count or share `of UNIT that ...`"

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_ENDS = (
    re.compile(rf"(?P<left>.*\S)\s+(?P<comparison>==|!=|<=|>=|<|>)\s*(?P<low>{_NUMBER})"),
    re.compile(rf"(?P<left>.*\S)\s+(?P<comparison>in)\s*\[(?P<low>{_NUMBER}),\s*(?P<high>{_NUMBER})\]"),
)  # fmt: skip
_RELATIVE = "(?<! less)(?<! over) (?:that|whose|in which)"
_STARTS = (
    re.compile(r"(?P<quantifier>max|min|median|mean|sum) over (?P<unit>.+?) of .+"),
    re.compile(rf"(?P<quantifier>count|share) of (?P<unit>.+?){_RELATIVE} .+"),
)
_LIKE_A_START = re.compile(
    rf"(?:the )?(?:\w+ over(?! that | those )(?=.+? of )|(?:number|fraction) of(?=.+?{_RELATIVE} ))"
)


@dataclass(frozen=True)
class Rule:
    """A rule in its parts; `str()` gives its line.

    metric: the line without its comparison. limits: one number, or both ends of `in [a, b]`.
    """

    metric: str
    quantifier: str
    unit: str
    comparison: str
    limits: tuple[float, ...]

    @property
    def counts(self) -> bool:
        """Whether it takes true or false for each unit."""
        return self.quantifier in COUNTED

    @property
    def is_exact(self) -> bool:
        """Whether it asks for one fractional number, which is then shown in full."""
        return self.comparison == "==" and not float(self.limits[0]).is_integer()

    def __str__(self) -> str:
        limit = "[{}, {}]" if self.comparison == "in" else "{}"
        return f"{self.metric} {self.comparison} {limit.format(*self.limits)}"

    @property
    def words(self) -> str:
        """The comparison as prose says it: "at most 0.25"."""
        shown = [number(limit, self.is_exact) for limit in self.limits]
        if self.comparison == "in":
            return f"from {shown[0]} to {shown[1]}"
        return f"{COMPARISONS[self.comparison][1]} {shown[0]}"

    @property
    def symbols(self) -> str:
        """The comparison as short as can be: "≤ 0.25"."""
        if self.comparison == "in":
            return self.words.removeprefix("from ")
        sign = {"==": "=", "!=": "≠", "<=": "≤", ">=": "≥"}.get(self.comparison, self.comparison)
        return f"{sign}\N{NO-BREAK SPACE}{number(self.limits[0], self.is_exact)}"

    def holds(self, value) -> bool:
        if self.comparison == "in":
            return self.limits[0] <= value <= self.limits[1]
        return bool(COMPARISONS[self.comparison][0](value, self.limits[0]))

    def reduce(self, by: Mapping):
        """The one number of the units' numbers, or truths; None without a unit.

        Raises `UserError` for a number where the rule counts, for a truth where it does not, and
        for a number that is not finite.
        """
        if not self.quantifier:
            raise UserError(
                f"its rule takes one number and was given {len(by)}: begin it with a quantifier, "
                f"{_KNOWN}"
            )
        values = [self._checked(unit, value) for unit, value in by.items()]
        return QUANTIFIERS[self.quantifier](values) if values else None

    def _checked(self, unit, value):
        if self.counts != isinstance(value, bool):
            wants = "true or false" if self.counts else "a number"
            raise UserError(
                f"its rule, {self.quantifier} over {self.unit}, takes {wants} for each and was "
                f"given {value!r} for {unit}: hand it {wants}, or change the quantifier"
            )
        if not isinstance(value, numbers.Real):
            raise UserError(f"{self.metric} is {value!r} for {unit}: hand it a number")
        if not math.isfinite(value):
            raise UserError(f"{self.metric} is {value} for {unit}: leave it out, or say why not")
        return value


@functools.cache
def parse(text: str) -> Rule:
    """A rule from its line; raises `UserError` with the grammar for one that has no comparison, and
    for one that begins as with a quantifier that there is not."""
    found = next(filter(None, (end.fullmatch(text.strip()) for end in _ENDS)), None)
    if found is None:
        raise UserError(
            f"rule {text!r} does not end in a comparison: end it with one of "
            f"{', '.join(COMPARISONS)} and a number, or with `in [a, b]`"
        )
    ends = [float(end) if re.search(r"[.eE]", end) else int(end)
            for end in (found["low"], found.groupdict().get("high")) if end]  # fmt: skip
    if not all(map(math.isfinite, ends)):
        raise UserError(f"rule {text!r} compares with a number that is not finite")
    if len(ends) == 2 and ends[0] > ends[1]:
        raise UserError(
            f"rule {text!r} asks for a number between {ends[0]} and {ends[1]}: swap them"
        )
    start = next(filter(None, (start.fullmatch(found["left"]) for start in _STARTS)), None)
    if start is None and (like := _LIKE_A_START.match(found["left"])):
        raise UserError(
            f"rule {text!r} begins with {like[0]!r}, which is no quantifier: begin it with {_KNOWN}"
        )
    quantifier, unit = (start["quantifier"], start["unit"]) if start else ("", "")
    return Rule(found["left"], quantifier, unit, found["comparison"], tuple(ends))
