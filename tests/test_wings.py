"""The wings of the package, and which may import which."""

import ast
from pathlib import Path

import pytest

import lowprec

PACKAGE = Path(lowprec.__file__).resolve().parent
WINGS = (
    "numerics", "attention", "records", "training", "evidence", "publish", "diagnose", "studies",
)  # fmt: skip
"""From the ground up, as in book/architecture.md; a wing imports none that comes later."""


def imported(path):
    """(line, module) of what a file imports from the package, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowprec"):
            names = [f"{node.module}.{a.name}" for a in node.names]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("lowprec"))


def test_the_wings_are_those_there_are():
    assert {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()} == set(WINGS)
    text = (PACKAGE.parent / "book" / "architecture.md").read_text()
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row in WINGS] == list(WINGS)


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_none_that_comes_later(wing):
    public = {name: home.split(".")[0] for name, home in lowprec.PUBLIC.items()}
    upward = []
    for path in sorted((PACKAGE / wing).rglob("*.py")):
        for line, module in imported(path):
            name = module.split(".")[1] if "." in module else ""
            other = name if name in WINGS else public.get(name)
            if other and WINGS.index(other) > WINGS.index(wing):
                upward.append(f"{path.relative_to(PACKAGE)}:{line} imports {module}")
    assert not upward


def test_no_two_wings_import_each_other():
    pairs = {
        (wing, module.split(".")[1])
        for wing in WINGS
        for path in (PACKAGE / wing).rglob("*.py")
        for _, module in imported(path)
        if module.split(".")[1:2] and module.split(".")[1] in WINGS
    }
    assert not [(a, b) for a, b in pairs if a != b and (b, a) in pairs]


@pytest.mark.parametrize("name", lowprec.PUBLIC)
def test_public_names_are_there(name):
    assert getattr(lowprec, name) is getattr(lowprec, name) and name in dir(lowprec)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'spda'"):
        lowprec.spda  # noqa: B018
