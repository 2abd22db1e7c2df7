"""Claims: what a page says, the rule that decides it, and the verdict.

The claims of `notebooks/SLUG.ipynb` stand beside it in `SLUG.claims.yml`, each with the rule
that was written before it was measured. The page measures and calls `check`; the verdict follows
from the rule, not from the author. What came out is kept in `SLUG.lock.json`
(`lowprec.evidence.locks`), and a page that finds something else does not build: a refuted claim is
a result, a verdict that changes unseen is not.

    not run         its runs are not recorded yet
    inconclusive    fewer units than the claim needs, be it none once all runs are there, or an
                    interval that holds the limit
    supported       the number satisfies the rule
    refuted         it does not

The keys of a claim are explained in `lowprec.evidence.registry`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import numbers
import re
from pathlib import Path

from lowprec import UserError
from lowprec.evidence import registration
from lowprec.evidence.locks import alike, lock_path, read_lock, rounded, write_lock
from lowprec.evidence.registry import (
    Claim,
    load,
    of_fork,
    of_forks,
    of_running,
    pages,
    pages_folder,
    pages_named,
    parse,
    refuse_rule_of_fork,
    renamed,
    unchecked,
)
from lowprec.evidence.verdicts import Measured, Result
from lowprec.evidence.words import minus, number
from lowprec.records import reads

LISTED = 64
"""Units up to which a verdict keeps what each gave."""


class Results(list):
    """The results of one `check`, which has displayed them."""

    def _ipython_display_(self) -> None:
        pass


# In a page


def check(
    id: str | None = None, value=None, n: int | None = None, interval=None, note: str | None = None,
    *, complete: bool = False, settled: bool = False, folder: Path | None = None, **measured,
) -> Result | Results:  # fmt: skip
    """Judge claims by what was measured, and display each: claims.check(the_id=value, ...).

    value: a number, or true or false, for each unit, as a mapping or a pandas Series; an arm of
    `lowprec.evidence.survival` for a rule that counts runs or seeds; `Measured`; or one number, for
    a rule without a quantifier that needs one unit. Returns the results, in the order given.

    claims.check("the-id", value, n) judges one claim by its number and returns its result; without
    n the value is taken as above.
    interval: (low, high) of the value, inconclusive when a limit lies inside. note: a sentence
    shown below. complete: every run that the claim asks for is recorded; one that finds nothing to
    measure in them is then inconclusive and no longer not run. settled: no unit that is still to
    come can change the verdict; n may then be too small.

    Raises `UserError` for an unknown id, a value that is not finite or does not fit the rule, and
    an interval that is not a number. A reader who changes a parameter may well get another verdict
    than the recorded one; a page of the book may not, and `lowprec.publish.notebook.execute` sees
    to that with `compare`.
    """
    registry = load(folder)
    if id is not None:
        claim = _named(id, registry, folder)
        if n is not None:
            return _result(claim, Measured(value, n, interval), note, complete, settled)
        if interval is None and not (complete or settled):
            return _judged(claim, value, note)
        raise UserError(f"claim {id}: interval, complete and settled take n: check(id, value, n)")
    if n is not None or interval is not None or complete or settled:
        raise UserError("n, interval, complete and settled go with one id, check('the-id', …)")
    results = Results(_judged(_named(name.replace("_", "-"), registry, folder), given, note)
                      for name, given in measured.items())  # fmt: skip
    _display(results)
    return results


def _display(results) -> None:
    from IPython.display import display

    display(*results)


def _named(id: str, registry: dict[str, Claim], folder: Path | None) -> Claim:
    """The claim of this id: of the book, or else of a fork."""
    if id in registry:
        refuse_rule_of_fork(registry[id], folder)
    else:
        registry = registry | (mine := of_forks(id, folder))
    if id not in registry:
        if (own := of_running(folder)) and not own.is_file():
            raise UserError(f"there is no claim {id!r}: {own.name} is missing beside the notebook")
        if own and own.is_relative_to(Path(folder or pages_folder()).resolve() / "forks"):
            close = difflib.get_close_matches(id, mine, n=1)
            hint = f": did you mean {close[0]!r}?" if close else ", nor has the book"
            raise UserError(f"{own.name} has no claim {id!r}{hint}")
        close = difflib.get_close_matches(id, registry, n=1)
        hint = f": did you mean {close[0]!r}?" if close else " beside a notebook"
        raise UserError(f"there is no claim {id!r}{hint}")
    if page := registry[id].page:
        reads.note(Path(folder or pages_folder()) / f"{page}.claims.yml")
    return registry[id]


def _judged(claim: Claim, given, note: str | None = None) -> Result:
    """The result of what a page hands to `check`, by whatever it is."""
    try:
        measured, complete, settled = _measured(claim, given)
    except UserError as error:
        raise UserError(f"claim {claim.id}: {error}") from None
    return _result(claim, measured, note, complete, settled)


def _measured(claim: Claim, given) -> tuple[Measured, bool, bool]:
    """(measured, complete, settled) of what a page hands to `check`."""
    if isinstance(given, Measured):
        return given, False, False
    if hasattr(given, "outcomes"):
        return _of_units(claim, _outcomes(claim, given), given.complete)
    if hasattr(given, "items"):
        return _of_units(claim, _units(given), True)
    if given is None or _are_several(given):  # which `_result` refuses
        return Measured(given, 0), False, False
    rule = claim.parsed
    if rule.quantifier:
        raise UserError(
            f"its rule, {rule.quantifier} over {rule.unit}, takes a number for each and was given "
            f"{given!r}: hand it all of them, or claims.Measured(value, n)"
        )
    if claim.needs > 1:
        raise UserError(
            f"it needs {claim.needs:,} {claim.unit or 'units'}: say how many stand behind "
            f"{number(given)} with claims.Measured(value, n)"
        )
    return Measured(given, 1), False, False


def _are_several(given) -> bool:
    """Whether it is a list, an array or a text, and no number."""
    return hasattr(given, "__iter__") and getattr(given, "ndim", 1) > 0


def _of_units(claim: Claim, by: dict, complete: bool) -> tuple[Measured, bool, bool]:
    value = claim.parsed.reduce(by)
    settled = bool(by) and claim.parsed.counts and claim.settled(sum(by.values()), len(by))
    return Measured(value, len(by), by=by), complete, settled


def _units(given) -> dict:
    """The numbers of a mapping or a Series by unit, as plain Python numbers."""
    if hasattr(given, "columns"):
        raise UserError("it takes one number for each unit and was given a table: pick a column")
    pairs = [(unit, value.item() if hasattr(value, "item") else value)
             for unit, value in given.items()]  # fmt: skip
    by = dict(pairs)
    if len(by) < len(pairs):
        names = [unit for unit, _ in pairs]
        twice = next(unit for unit in names if names.count(unit) > 1)
        raise UserError(f"{twice} is given twice: a unit counts once")
    return by


def _outcomes(claim: Claim, arm) -> dict:
    """Which seeds of an arm exploded, for a rule that counts them."""
    rule = claim.parsed
    if not rule.counts:
        raise UserError(
            f"its rule takes a number and was given an arm, of which only is known which seeds "
            f"exploded: hand it the numbers by {rule.unit or 'unit'}"
        )
    if not re.search(r"\b(runs|seeds)\b", rule.unit):
        raise UserError(
            f"its rule counts {rule.unit} and was given an arm, which has seeds: say runs or seeds "
            "in the rule, or hand it what it counts"
        )
    return _units(arm.outcomes())


def _result(claim: Claim, measured: Measured, note=None, complete=False, settled=False) -> Result:
    if _are_several(measured.value):
        raise UserError(
            f"claim {claim.id}: it was given a {type(measured.value).__name__}: hand check one "
            "number, or a dictionary or a Series with one for each unit, as in "
            f"check({claim.id.replace('-', '_')}={{'a': 0.25, 'b': 0.5}})"
        )
    if not isinstance(measured.n, numbers.Real) or measured.n % 1 or measured.n < 0:
        raise UserError(f"claim {claim.id}: n={measured.n!r} must be a whole number of units")
    value, n, interval = measured.value, int(measured.n), measured.interval
    value = value.item() if hasattr(value, "item") else value
    if interval is not None:
        try:
            low, high = map(float, interval)
        except (TypeError, ValueError):
            raise UserError(f"claim {claim.id}: interval={interval!r} is not two numbers") from None
        interval = low, high
    verdict = claim.verdict_on(value, n, interval, complete, settled)
    if verdict == "not run" or not n:
        value = interval = None
    by = measured.by and {_unit_name(unit): each for unit, each in _units(measured.by).items()}
    if not by or len(by) > LISTED:
        by = None
    return Result(claim, verdict, value, n, interval, by, note and minus(note))


def _unit_name(unit) -> str:
    return ", ".join(map(str, unit)) if isinstance(unit, tuple) else str(unit)


def judge(hypothesis: dict, value, n: int | None = None, interval=None,
          note: str | None = None) -> Result:  # fmt: skip
    """Judge a hypothesis that stands in no claims file, by the same rule; for forks.

    hypothesis: the keys of a claim; `sentence`, `rule` and `needs` are enough. value: as for
    `check`, a number for each unit; or one number, with n units behind it.
    """
    claim = parse({"id": "hypothesis", **hypothesis})
    if n is None:
        return _judged(claim, value, note)
    return _result(claim, Measured(value, n, interval), note)


def show(*ids: str, folder: Path | None = None) -> None:
    """Display claims as their pages last found them, measuring nothing; for a page that tells what
    another one measures."""
    results = recorded(folder)
    registry = load(folder)
    for id in ids:
        page = _named(id, registry, folder).page
        reads.note(lock_path(page, Path(folder or pages_folder())))
        if id not in results:
            raise UserError(
                f"claim {id} has no verdict yet: run `make book`, then `python -m lowprec claims "
                f"--accept {page}`"
            )
    _display([dataclasses.replace(results[id], shown=True) for id in ids])


# What was found


def lock(page: str, folder: Path | None = None) -> dict:
    """The lock of a page: {"claims": {id: entry}, "facts": {name: value}, "hardware": text}, see
    `evidence.locks`."""
    return read_lock(page, Path(folder or pages_folder()))


def locks(folder: Path | None = None) -> dict[str, dict]:
    """Every page's lock, by the page's name."""
    folder = Path(folder or pages_folder())
    names = sorted(path.relative_to(folder).as_posix().removesuffix(".lock.json")
                   for path in folder.rglob("*.lock.json"))  # fmt: skip
    return {name: read_lock(name, folder) for name in names}


def recorded(folder: Path | None = None) -> dict[str, Result]:
    """The results that the locks have, by claim id, for the claims that have one."""
    registry = load(folder)
    held = {page: lock(page, folder)["claims"] for page in {c.page for c in registry.values()}}
    results = {}
    for claim in registry.values():
        if entry := held[claim.page].get(claim.id):
            entry = {key: value for key, value in entry.items() if key != "first_run"}
            interval = entry.get("interval") and tuple(map(float, entry["interval"]))
            results[claim.id] = Result(claim, **{**entry, "interval": interval})
    return results


def compare(page: str, verdicts: list[dict], facts: dict | None = None,
            folder: Path | None = None, hardware: str | None = None) -> list[str]:  # fmt: skip
    """Raise `UserError` for the first verdict or fact of an executed page that its lock has
    otherwise: another verdict or n, a value off by more than a thousandth, other units that have
    what it counts, another fact.

    page: its name below notebooks/; a claim of the book is checked on its own page, or in a fork.
    A fork checks all of its own, none of which is younger than its `registered` says.
    hardware: where it was executed. Elsewhere than the lock says FP32 sums may have another order,
    which a page amplifies as it rounds or trains: verdict, n and the names of facts are compared,
    and neither values nor what facts say; returns the names of those that differ.
    """
    folder = Path(folder or pages_folder())
    of_book = (folder / f"{page}.ipynb").is_file() and not page.startswith(("forks/", "_"))
    checked = {verdict["claim"]["id"] for verdict in verdicts}
    for claim in of_fork(page, folder) if page.startswith("forks/") else ():
        if claim.id not in checked:
            raise UserError(unchecked(claim))
        _first_judged(claim, folder.parent)
    differ = []
    for result in map(Result.from_dict, verdicts):
        if not result.registered:
            continue
        claim = result.claim
        if of_book and claim.page != page:
            raise UserError(
                f"claim {claim.id} is checked in {page} and stands in {claim.page}.claims.yml: "
                "move it, or call claims.show here"
            )
        of_page = read_lock(claim.page, folder)
        held = of_page["claims"].get(claim.id)
        if held is None:
            raise UserError(
                f"claim {claim.id} is {result.verdict} ({result.measured()}) and "
                f"{claim.page}.lock.json does not have it: {_mend(claim.page)}"
            )
        here = hardware in (None, of_page["hardware"])
        for key in ("verdict", "n", "value", "by"):
            now, then = result.as_lock().get(key), held.get(key)
            if key == "by" and not (here and {type(x) for x in (then or {}).values()} == {bool}):
                continue  # which units have what is counted; of other values their sum is enough
            if key == "value" and not here:
                differ += [] if alike(now, then) else [claim.id]
            elif not (alike(now, then) if key == "value" else now == then):
                other = "" if here else f" on a {of_page['hardware']}, which sums in another order"
                raise UserError(
                    f"claim {claim.id}: {key} is {now} ({result.measured()}) and "
                    f"{claim.page}.lock.json says {then}{other}: {_mend(claim.page)}"
                )
    if of_book:
        of_page = read_lock(page, folder)
        here = hardware in (None, of_page["hardware"])
        differ += _compare_facts(page, facts or {}, of_page["facts"], names_only=not here)
    return differ


def _compare_facts(page: str, facts: dict, held: dict, names_only: bool) -> list[str]:
    """The names of facts that differ, if their names are all that has to be the same."""
    differ = []
    for name in sorted(facts.keys() | held.keys()):
        if name in facts and name in held and alike(facts[name], held[name]):
            continue
        if names_only and name in facts and name in held:
            differ.append(name)
        else:
            now, then = (repr(some[name]) if name in some else "nothing" for some in (facts, held))
            raise UserError(f"fact {name} of {page} is {now} and {page}.lock.json says {then}: "
                            f"{_mend(page)}")  # fmt: skip
    return differ


def _mend(page: str) -> str:
    return f"look why, then run `python -m lowprec claims --accept {page}`"


def accept(page: str, root: Path) -> list[str]:
    """Write the lock of a page of the repository at `root` from its executed page, the one that
    `compare` refused if there is one; returns what changed, a line a claim or fact.

    Raises `UserError` for a page that was not executed, and for a claim whose rule is younger than
    its `registered` says, when first judged or ever after.
    """
    folder, executed = root / "notebooks", root / "book" / "executed" / f"{page}.ipynb"
    changed = root / "build" / "changed" / f"{page}.ipynb"
    if changed.is_file():
        executed.parent.mkdir(parents=True, exist_ok=True)
        changed.replace(executed)
    if not executed.is_file():
        raise UserError(f"notebook {page} was not executed: run `make book`, then accept it")
    about = json.loads(executed.read_text())["metadata"]["lowprec"]
    try:
        held = read_lock(page, folder)
    except UserError:  # damaged, which is what a new one mends
        held = {"claims": {}, "facts": {}, "hardware": ""}
    registry, entries = load(folder), {}
    for result in map(Result.from_dict, about["verdicts"]):
        if result.registered and result.claim.page == page:
            then = held["claims"].get(result.claim.id, {})
            entries[result.claim.id] = result.as_lock() | _first_run(
                _named(result.claim.id, registry, folder), result, then, root
            )
    facts = rounded(about.get("facts", {}))
    write_lock(page, folder, entries, facts, about["hardware"])
    return _changes(held["claims"], entries) + _changes(held["facts"], facts)


def _first_run(claim: Claim, result: Result, then: dict, root: Path) -> dict:
    """{"first_run": the commit at which a claim was first judged}; {} before, or without git."""
    first = then.get("first_run")
    if first is None and result.verdict == "not run":
        return {}
    first = _first_judged(claim, root, first)
    return {"first_run": first} if first else {}


def _first_judged(claim: Claim, root: Path, first: str | None = None) -> str | None:
    """The commit at which a claim was first judged, the one that is checked out if it never was,
    None without git; raises `UserError` if its rule is younger than its `registered` says."""
    head = registration.head(root)
    if head and (fault := registration.fault(claim, first or head, root)):
        raise UserError(f"claim {claim.id}: {fault}")
    return first or head


def _changes(then: dict, now: dict) -> list[str]:
    def words(entry):
        if not isinstance(entry, dict):  # a fact
            return str(entry)
        return ", ".join(f"{key} {entry[key]}" for key in ("verdict", "value", "n"))

    lines = []
    for name in sorted(then.keys() | now.keys()):
        before, after = (words(some[name]) if name in some else "nothing" for some in (then, now))
        if before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines


def page_named(text: str, folder: Path) -> str:
    """The page that a command names, see `registry.pages_named`."""
    names = pages(folder)
    found = pages_named(text, names)
    if len(found) != 1:
        name = text.removeprefix("notebooks/").removeprefix("forks/").removesuffix(".ipynb")
        if not found and (folder / "forks" / f"{name}.ipynb").is_file():
            raise UserError(
                f"{text!r} is a fork, which has no lock: its verdict is in its page; to keep it, "
                "move both files to notebooks/, see book/fork.md"
            )
        some = found or renamed(text, folder.parent)
        some = some or difflib.get_close_matches(text, names, n=3, cutoff=0.3)
        hint = f": did you mean {' or '.join(some)}?" if some else ""
        raise UserError(f"{text!r} is no page of the book{hint}")
    return found[0]
