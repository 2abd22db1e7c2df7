"""Whether a rule is as old as it says: `registered` held against the history of the repository.

A claim names the commit that first had its rule, and its lock the one at which it was first judged.
The rule must come first, and the named commit must have it, its quantifier, comparison and limits,
and need no more units: in the page's claims file or, before there was one a page, in
book/claims.yml; or the commit must have left the claim as it was and changed a `campaign.yaml`,
whose predictions are the rules of the runs that it asks for, or a study that says "the rule of the
prediction" and had no table in data/studies yet. The page must name that study, and it or one of
its studies that campaign.
"""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from lowprec import UserError
from lowprec.evidence import rules

_SAID = {
    "max": r"\b(max|largest|larger)\b", "min": r"\b(min|smallest|smaller)\b",
    "median": r"\bmedians?\b", "mean": r"\bmeans?\b",
}  # fmt: skip
"""How a metric of book/claims.yml, which was prose, said a quantifier."""


def _git(root: Path, *args: str) -> str | None:
    """What git says, None if it fails or is not there."""
    try:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def head(root: Path) -> str | None:
    """The commit that is checked out, short; None where the whole history is not there, as in an
    archive or a shallow clone."""
    if (_git(root, "rev-parse", "--is-shallow-repository") or "").strip() != "false":
        return None
    return (_git(root, "rev-parse", "--short", "HEAD") or "").strip() or None


def fault(claim, first_run: str, root: Path) -> str | None:
    """What is wrong with a claim's `registered`, in a sentence with the mend, or None.

    claim: of `lowprec.evidence.claims`. first_run: the commit at which it was first judged.
    """
    commit = claim.registered
    if commit is None:
        return None
    mend = "name the commit that first had the rule, or leave `registered` out"
    if not _is_commit(root, commit):
        return f"registered {commit} is no commit here: {mend}"
    if not _is_before(root, commit, first_run):
        return f"registered {commit} is not before {first_run}, which first judged it: {mend}"
    then = _rules_at(root, commit).get(claim.id)
    if then and (other := _change(*then, claim)) is None:
        return None
    as_before = then == _rules_at(root, f"{commit}^").get(claim.id)
    if as_before and _announced(root, commit, claim.page):
        return None
    if then is None:
        return (
            f"registered {commit} does not have it, nor predictions of a campaign or study that "
            f"its page reads: {mend}"
        )
    return f"registered {commit} {other}: {mend}"


def _change(was: rules.Rule, is_prose: bool, needs: int, claim) -> str | None:
    """What a commit has otherwise than a claim, as the sentence goes on; None if all is the same,
    or the claim needs more."""
    now = claim.parsed
    as_said = _says(was.metric, now) if is_prose else was.quantifier == now.quantifier
    if (was.comparison, was.limits) != (now.comparison, now.limits):
        shown = [f"{rule.comparison} {' to '.join(f'{x:g}' for x in rule.limits)}"
                 for rule in (was, now)]  # fmt: skip
    elif not as_said:
        shown = [repr(str(rule)) for rule in (was, now)]
    else:
        return f"needs {needs:,}, more than {claim.needs:,}" if claim.needs < needs else None
    return "has another rule, {}, than {}".format(*shown)


def _says(prose: str, now: rules.Rule) -> bool:
    """Whether a rule has the quantifiers that a metric in prose says, if it says any."""
    said, has = ({name for name, words in _SAID.items() if re.search(words, text)}
                 for text in (prose, now.metric))  # fmt: skip
    return said <= has and (not said or now.quantifier not in _SAID.keys() - said)


@functools.cache
def _is_commit(root: Path, commit: str) -> bool:
    return _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is not None


@functools.cache
def _is_before(root: Path, commit: str, later: str) -> bool:
    return _git(root, "merge-base", "--is-ancestor", commit, later) is not None


@functools.cache
def _announced(root: Path, commit: str, page: str) -> bool:
    """Whether a commit brought or changed the file of a campaign that a page reads, or a prediction
    of a study."""
    files = _git(root, "diff-tree", "--root", "-m", "-r", "--no-commit-id", "--name-only", commit)
    notebook, studies = _sources(root, page)
    for name in (files or "").splitlines():
        folder, _, file = name.rpartition("/")
        word = rf"\b{re.escape(folder.rpartition('/')[2])}\b"
        if file == "campaign.yaml" and re.search(word, notebook + "".join(studies.values())):
            return True
        if file.removesuffix(".py") in studies and _predicts(root, commit, name):
            return True
    return False


@functools.cache
def _sources(root: Path, page: str) -> tuple[str, dict[str, str]]:
    """The text of a page, and those of the studies that it names, by module."""
    path = root / "notebooks" / f"{page}.ipynb"
    notebook = path.read_text() if path.is_file() else ""
    words = set(re.findall(r"\w+", notebook))
    found = (root / "lowprec" / "studies").glob("*.py")
    return notebook, {study.stem: study.read_text() for study in found if study.stem in words}


def _predicts(root: Path, commit: str, name: str) -> bool:
    """Whether a file is a study that has its rule at a commit, and no table by then."""
    study = re.fullmatch(r"lowprec/studies/(\w+)\.py", name)
    if study is None or "he rule of the prediction" not in (
        _git(root, "show", f"{commit}:{name}") or ""
    ):
        return False
    return not _git(root, "ls-tree", "-r", "--name-only", commit, f"data/studies/{study[1]}")


@functools.cache
def _rules_at(root: Path, commit: str) -> dict[str, tuple]:
    """(rule, whether its metric was prose, needs) of each claim of a commit, by id."""
    listed = _git(root, "ls-tree", "-r", commit, "book/claims.yml", "notebooks") or ""
    found = {}
    for line in listed.splitlines():  # mode, type, hash, a tab, name
        if line.endswith(("/claims.yml", ".claims.yml")):
            found |= _rules_of(root, line.split()[2])
    return found


@functools.cache
def _rules_of(root: Path, blob: str) -> dict[str, tuple]:
    """Those of one file, which most commits leave as it was. blob: its hash."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        entries = yaml.load(_git(root, "cat-file", "blob", blob) or "", loader) or []
        return {entry["id"]: _rule(entry) for entry in entries}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):  # a fork's that was broken then
        return {}


def _rule(entry: dict) -> tuple[rules.Rule, bool, int] | None:
    is_prose = "rule" not in entry  # as book/claims.yml had it
    text = f"it {entry.get('operator')} {entry.get('threshold')}" if is_prose else entry["rule"]
    try:
        rule = rules.parse(text)
        needs = int(str(entry.get("needs", entry.get("n", 1))).split()[0])
    except (UserError, ValueError, IndexError):
        return None
    return replace(rule, metric=str(entry.get("metric", rule.metric))), is_prose, needs
