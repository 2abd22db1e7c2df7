"""The claims files: what stands in `notebooks/SLUG.claims.yml`, read and checked.

id          short and unique; the page calls claims.check(the_id=...), with _ for -
sentence    what is claimed, one plain sentence
rule        what is measured and what supports the sentence (`lowprec.evidence.rules`)
needs       units that a verdict needs, fewer is inconclusive; with their name, "8 runs", where
            the rule has none
weight      key: without it one of the book's answers would be another; check: met by
            construction or by chance, and in no count; support, the default: all others
headline    1 to 10, its place among README's findings, with
words       the line there; {count}, {value} and {n} are filled in
registered  the commit that first had the rule, before any measurement that judges it; without
            one the claim is exploratory, found in the very data that judge it
source      who says it: a key of references.bib; without one, this book or fork
tests       which of the source's statements: an id of book/statements.yml
gloss       a sentence for readers of that statement, where the verdict alone misleads
threats     why to doubt it, most first: words of book/threats.md; none for plain arithmetic
refuted_if  what would refute it, where the rule alone does not say so
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import string
from dataclasses import dataclass
from pathlib import Path

from lowprec import UserError, load_yaml, yaml_fault
from lowprec.evidence import rules

WEIGHTS = ("key", "support", "check")
HEADLINES = range(1, 11)
LABORATORY = "laboratory"
"""The folder of the pages with what a main page leaves out."""
TEMPLATE = "_template.claims.yml"
RUNNING = "JPY_SESSION_NAME"
"""The variable in which Jupyter tells a kernel the path of its notebook."""


@dataclass(frozen=True)
class Claim:
    """One entry of a claims file, its keys as in the module's docstring.

    unit: what `needs` counts, of its text or of the rule. page: the notebook below notebooks/ that
    measures it, empty for a hypothesis of a fork.
    """

    id: str
    sentence: str
    rule: str
    needs: int
    unit: str = ""
    page: str = ""
    weight: str = "support"
    headline: int | None = None
    words: str = ""
    registered: str | None = None
    source: str | None = None
    tests: str | None = None
    gloss: str = ""
    threats: tuple[str, ...] = ()
    refuted_if: str = ""

    def __post_init__(self):
        threats = (self.threats,) if isinstance(self.threats, str) else self.threats
        if not isinstance(threats, list | tuple):
            raise UserError(f"claim {self.id}: threats {threats!r} is not a list of words")
        object.__setattr__(self, "threats", tuple(threats))
        for name in ("id", "sentence", "rule", "words", "gloss", "refuted_if"):
            if not isinstance(text := getattr(self, name), str):
                raise UserError(f"claim {self.id}: {name} {text!r} is not a text")
        try:
            rule = self.parsed
        except UserError as error:
            raise UserError(f"claim {self.id}: {error}") from None
        if type(self.needs) is not int or self.needs < 1:
            raise UserError(f"claim {self.id}: needs {self.needs!r} is not a number of units")
        object.__setattr__(self, "unit", self.unit or rule.unit)
        if self.weight not in WEIGHTS:
            raise UserError(
                f"claim {self.id}: weight {self.weight!r} is none of {', '.join(WEIGHTS)}"
            )
        commit = self.registered
        if commit is not None and not (
            isinstance(commit, str) and re.fullmatch("[0-9a-f]{7,40}", commit)
        ):
            raise UserError(f"claim {self.id}: registered {commit!r} is not a commit; give 7 to 40 "
                            "hexadecimal digits, in quotes if all are decimal")  # fmt: skip
        self._check_headline()

    def _check_headline(self) -> None:
        if (self.headline is None) == bool(self.words):
            raise UserError(f"claim {self.id}: headline and words go together; one is missing")
        if self.headline is not None and self.headline not in HEADLINES:
            raise UserError(f"claim {self.id}: headline {self.headline!r} is not one of 1 to 10")
        for _, name, _, _ in string.Formatter().parse(self.words):
            if name not in (None, "count", "value", "n"):
                raise UserError(f"claim {self.id}: words ask for {{{name}}}; there are {{count}}, "
                                "{value} and {n}")  # fmt: skip
            if name == "count" and not self.parsed.counts:
                raise UserError(f"claim {self.id}: words ask for {{count}} and its rule counts "
                                "nothing: begin it with `count of`, or take {value}")  # fmt: skip

    @property
    def parsed(self) -> rules.Rule:
        return rules.parse(self.rule)

    @property
    def metric(self) -> str:
        """What is measured: the rule without its comparison."""
        return self.parsed.metric

    @property
    def limit(self) -> float:
        """The number that the rule compares with, the lower one of a range."""
        return self.parsed.limits[0]

    @property
    def exploratory(self) -> bool:
        """Found in the very data that judge it, so a lead and not a test. Not said of a fork's."""
        return self.registered is None and bool(self.page)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Its threats, and `after` for one that is exploratory."""
        return (*self.threats, "after") if self.exploratory else self.threats

    def sourced(self, source: str | None) -> str:
        """Whose the sentence is. One that needs a gloss is not its source's own."""
        source = source or ("this book" if self.page else "this fork")
        return f"{'Tests a statement of' if self.gloss else 'Source:'} {source}"

    def verdict_on(self, value, n: int, interval=None, complete: bool = False,
                   settled: bool = False) -> str:  # fmt: skip
        """The verdict that the rule gives for a measured value; see the module's docstring."""
        if value is None or n == 0:
            return "inconclusive" if complete else "not run"
        if isinstance(value, bool) or not math.isfinite(value):
            raise UserError(f"claim {self.id}: the measured {self.metric} is {value}, no number")
        most = {"count": n, "share": 1}.get(self.parsed.quantifier, math.inf)
        whole = self.parsed.quantifier != "count" or value % 1 == 0
        if self.parsed.counts and not (0 <= value <= most and whole):
            raise UserError(f"claim {self.id}: {value} of {n} {self.unit}: it counts up to {most}")
        if interval is not None and not interval[0] <= value <= interval[1]:
            raise UserError(
                f"claim {self.id}: the interval of {self.metric} is {interval}; it does not hold "
                f"the value {value}"
            )
        if n < self.needs and not settled:
            return "inconclusive"
        if interval is not None and any(
            interval[0] < limit < interval[1] for limit in self.parsed.limits
        ):
            return "inconclusive"
        return "supported" if self.parsed.holds(value) else "refuted"

    def settled(self, count: int, n: int) -> bool:
        """Whether none of the units that are missing to its `needs` can change the verdict, if
        `count` of `n` have what it counts."""
        missing = max(self.needs - n, 0)
        whole = max(self.needs, n) if self.parsed.quantifier == "share" else 1
        values = [k / whole for k in range(count, count + missing + 1)]
        if self.parsed.quantifier == "share" and n:
            values.append(count / n)  # that it is judged by
        return len({self.verdict_on(value, max(self.needs, n)) for value in values}) == 1


def pages_folder() -> Path:
    from lowprec.records.files import repo_root

    return repo_root() / "notebooks"


def pages(folder: Path) -> list[str]:
    """The pages of the book below a folder of notebooks, by name: the main ones, then those of the
    laboratory, as laboratory/SLUG. Forks are none."""
    paths = [*sorted(folder.glob("[!_]*.ipynb")), *sorted(folder.glob(f"{LABORATORY}/[!_]*.ipynb"))]
    return [path.relative_to(folder).as_posix().removesuffix(".ipynb") for path in paths]


def contents(root: Path) -> dict[str, list[str]]:
    """The pages in each part of book/_toc.yml, as it names them; under "" its first page."""
    import yaml

    toc = yaml.safe_load((root / "book" / "_toc.yml").read_text())
    parts = {p["caption"]: [each["file"] for each in p["chapters"]] for p in toc["parts"]}
    return {"": [toc["root"]], **parts}


def in_order(names, root: Path) -> list[str]:
    """Pages in the order of the book's contents, then those that are not in there."""
    toc = root / "book" / "_toc.yml"
    listed = _listed(root, toc.stat().st_mtime_ns) if toc.is_file() else []
    return [*(name for name in listed if name in names), *(n for n in names if n not in listed)]


@functools.lru_cache(maxsize=16)
def _listed(root: Path, changed: int) -> list[str]:
    """The notebooks of the contents, read once and not at each claim."""
    return [file.removeprefix("executed/") for file in sum(contents(root).values(), [])]


def pages_named(text: str, names) -> list[str]:
    """Those of some pages that a text names: in full, by file, by the first letters, or by those
    behind the folder; main pages before the laboratory's."""
    text = _name(text)
    slugs = {name: name.rpartition("/")[2] for name in names}
    for found in (
        [name for name in names if name == text],
        [name for name in names if name.startswith(text)],
        [name for name in names if slugs[name].startswith(text)],
    ):
        if found:
            return [name for name in found if "/" not in name] or found
    return []


def _name(file: str) -> str:
    return file.removeprefix("notebooks/").removesuffix(".ipynb")


def renamed(text: str, root: Path) -> list[str]:
    """The pages that the old name of a page, or its old number, stands for by redirects.yml."""
    import yaml

    file = root / "book" / "redirects.yml"
    table = yaml.safe_load(file.read_text()) or {} if file.is_file() else {}
    moved = {old.removeprefix("executed/"): new.removeprefix("executed/")
             for old, new in table.items()}  # fmt: skip
    found = [old for old in moved if re.fullmatch(rf"{re.escape(_name(text))}(_.*)?", old)]
    return list(dict.fromkeys(moved[old] for old in found))


def load(folder: Path | None = None) -> dict[str, Claim]:
    """The claims beside the notebooks by id, in the order of the contents; folder: notebooks/ by
    default.

    Raises `UserError` for a file that is damaged, that has no notebook, or that repeats an id.
    """
    folder = Path(folder or pages_folder())
    files = [path for path in sorted(folder.rglob("*.claims.yml"))
             if path.relative_to(folder).parts[0] not in ("forks", TEMPLATE)]  # fmt: skip
    if not files:
        raise UserError(f"there are no claims in {folder}; restore them from git")
    names = {path.relative_to(folder).as_posix().removesuffix(".claims.yml"): path
             for path in sorted(files, key=lambda path: (len(path.parts), path))}  # fmt: skip
    return _joined([names[name] for name in in_order(names, folder.parent)], folder)


def of_forks(id: str, folder: Path | None = None) -> dict[str, Claim]:
    """The claims of the fork that runs, by id; none of them is the book's, so `page` is empty.

    Where nobody says which notebook runs they are those of the template and of all forks that name
    an id; a fork comes before it.
    Raises `UserError` as `load` does, but not for a claim that several forks have word for word.
    """
    folder = Path(folder or pages_folder())
    found: dict[str, Claim] = {}
    for path in _files_of_forks(id, folder):
        for claim in _joined([path], folder).values():
            first = found.get(claim.id, claim)
            _refuse_another(claim, claim if first.page.startswith("_") else first)
            found[claim.id] = claim
    return {id: _anywhere(claim) for id, claim in found.items()}


def refuse_rule_of_fork(claim: Claim, folder: Path | None = None) -> None:
    """Raise `UserError` if the fork that runs has a rule of its own for a claim of the book, by
    whose it would be judged in silence; where nobody says which notebook runs, if any fork has."""
    folder = Path(folder or pages_folder())
    for path in _files_of_forks(claim.id, folder):
        _refuse_another(_joined([path], folder).get(claim.id, claim), claim)


def _files_of_forks(id: str, folder: Path) -> list[Path]:
    """Jupyter tells a kernel which notebook it runs, and so does `notebook.execute`; one that was
    renamed since is not there."""
    files = [*folder.glob(TEMPLATE), *sorted(folder.glob("forks/**/*.claims.yml"))]
    if own := of_running(folder):
        return [path for path in files if Path(os.path.realpath(path)) == own]
    return [path for path in files if id in path.read_text(errors="replace")]


def of_running(folder: Path | None = None) -> Path | None:
    """Where the claims of the notebook that runs belong, if it is known and lies below folder."""
    running = Path(os.path.realpath(os.environ.get(RUNNING) or os.sep))
    if running.is_file() and running.is_relative_to(os.path.realpath(folder or pages_folder())):
        return running.with_suffix(".claims.yml")
    return None


def of_fork(page: str, folder: Path) -> list[Claim]:
    """The claims beside a fork. page: its name below folder. Raises `UserError` if it has a rule of
    its own for an id of the book."""
    path, book = folder / f"{page}.claims.yml", load(folder)
    claims = list(_joined([path] if path.is_file() else [], folder).values())
    for claim in claims:
        _refuse_another(claim, book.get(claim.id, claim))
    return claims


def unchecked(claim: Claim) -> str:
    """What to say of a claim that its page does not check."""
    return (
        f"claim {claim.id} stands in {claim.page}.claims.yml and the notebook does not check it: "
        "call claims.check there, or take it out"
    )


def _anywhere(claim: Claim) -> Claim:
    return dataclasses.replace(claim, page="")


def _refuse_another(claim: Claim, first: Claim) -> None:
    """Raise `UserError` if two claims of one id, of different pages, do not say the same."""
    if _anywhere(claim) != _anywhere(first):
        raise UserError(_twice(claim, first))


def _twice(claim: Claim, first: Claim) -> str:
    where = " and ".join(dict.fromkeys((first.page, claim.page)))
    return f"claim {claim.id} stands twice, in {where}: rename one"


def _joined(files: list[Path], folder: Path) -> dict[str, Claim]:
    """The claims of some files by id; none stands twice."""
    threats = _words_of(folder.parent / "book" / "threats.md")
    claims: dict[str, Claim] = {}
    for path in files:
        for claim in _read(path, path.stat().st_mtime_ns, folder, threats):
            if claim.id in claims:
                raise UserError(_twice(claim, claims[claim.id]))
            claims[claim.id] = claim
    return claims


def _words_of(threats: Path) -> tuple[str, ...]:
    text = threats.read_text() if threats.is_file() else ""
    return tuple(re.findall(r"^\(threat-(\w+)\)=$", text, re.MULTILINE))


@functools.lru_cache(maxsize=256)
def _read(path: Path, changed: int, folder: Path, threats: tuple[str, ...]) -> list[Claim]:
    """The claims of one file, read once and not at each of a page's twenty claims."""
    import yaml

    page = path.relative_to(folder).as_posix().removesuffix(".claims.yml")
    if not (folder / f"{page}.ipynb").is_file():
        raise UserError(f"{path.name} has no notebook {page}.ipynb beside it: rename one of them")
    try:
        entries = load_yaml(path.read_text()) or []
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} is not valid YAML: {yaml_fault(error)}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path.name} must be a list of claims, each with its keys")
    found = [parse(entry, page) for entry in entries]
    for claim in found:
        for word in claim.threats:
            if threats and word.lower() not in threats:
                raise UserError(
                    f"claim {claim.id}: {word!r} is no threat of threats.md; those are "
                    f"{', '.join(threats)}"
                )
    return found


def parse(entry: dict, page: str = "") -> Claim:
    """A claim from its keys; raises `UserError` for one that is unknown or missing."""
    fields = [f for f in dataclasses.fields(Claim) if f.name not in ("page", "unit")]
    name = entry.get("id", "without id")
    if "_" in str(name):
        raise UserError(f"claim {name}: an id has hyphens, {name.replace('_', '-')!r}")
    for key in entry:
        if key not in (known := [f.name for f in fields]):
            raise UserError(f"claim {name}: unknown key {key!r}; keys are {', '.join(known)}")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in entry:
            raise UserError(f"claim {name}: key {field.name!r} is missing")
    unit = ""
    if isinstance(entry["needs"], str):
        count, _, unit = entry["needs"].partition(" ")
        if not count.isdecimal():
            raise UserError(
                f"claim {name}: needs {entry['needs']!r} is not a number, nor one with a unit"
            )
        entry = {**entry, "needs": int(count)}
    return Claim(**entry, unit=unit, page=page)
