"""A figure in fewer bytes draws what matplotlib's own SVG draws: mark for mark, in its order."""

import io
import re
import xml.etree.ElementTree as ET

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from lowprec import plots
from lowprec.publish import figure
from lowprec.publish.lean import lean, path

NUMBER = r"-?(?:\d+\.?\d*|\.\d+)"
PARAMETERS = dict(m=2, l=2, h=1, v=1, q=4, c=6, z=0)


def points(d):
    """[letter, points] of each command of a path, in absolute coordinates."""
    at = start = np.zeros(2)
    found = []
    for letter, said in re.findall(r"([a-zA-Z])([^a-zA-Z]*)", d):
        kind, numbers = letter.lower(), [float(x) for x in re.findall(NUMBER, said)]
        if kind == "z":
            at = start
            found.append(("z", [tuple(at)]))
        for i in range(0, len(numbers), PARAMETERS[kind] or 1):
            some = numbers[i : i + PARAMETERS[kind]]
            assert len(some) == PARAMETERS[kind]
            full = {"h": lambda x: [x[0], 0.0], "v": lambda x: [0.0, x[0]]}.get(kind, list)(some)
            pairs = np.array(full).reshape(-1, 2) + (at if letter.islower() else 0)
            at = pairs[-1]
            first = kind == "m" and i == 0
            start = at if first else start
            found.append(
                (kind if first else "l" if kind in "mhv" else kind, list(map(tuple, pairs)))
            )
    return found


def matrix(text):
    total = np.eye(3)
    for kind, said in re.findall(r"(\w+)\(([^)]*)\)", text):
        x, y = (*map(float, said.split()), None)[:2]
        step = np.eye(3)
        if kind == "translate":
            step[:2, 2] = x, y
        elif kind == "scale":
            step[0, 0], step[1, 1] = x, x if y is None else y
        else:
            angle = np.radians(x)
            step[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        total = total @ step
    return total


def drawn(svg):
    """(path in points of the page, style, clip) of each mark of an SVG that leaves ink."""
    root = ET.fromstring(svg)
    ids = {each.get("id"): each for each in root.iter() if each.get("id")}
    sheet = {"stroke-linejoin": "round"} if "<style" in svg else {}
    marks = []

    def walk(each, at, style, clip):
        kind = each.tag.rpartition("}")[2]
        own = dict(part.split(":") for part in each.get("style", "").split(";") if part)
        own = sheet | {k.strip(): v.strip() for k, v in own.items()}
        own |= {k: each.get(k) for k in ("fill", "stroke-linejoin") if each.get(k)}
        style = style | own
        at = at @ matrix(each.get("transform", ""))
        if each.get("clip-path"):
            rect = ids[each.get("clip-path")[5:-1]][0]
            clip = [round(float(rect.get(k)), 1) for k in ("x", "y", "width", "height")]
        if kind == "use":
            at = at @ matrix(f"translate({each.get('x', 0)} {each.get('y', 0)})")
            walk(ids[each.get("href")[1:]], at, style, clip)
        elif kind == "path" and each.get("d") and {style["fill"], style["stroke"]} != {"none"}:
            there = [
                (letter, [tuple((at @ [*pair, 1])[:2]) for pair in pairs])
                for letter, pairs in points(each.get("d"))
            ]
            seen = {k: v for k, v in style.items() if k.startswith(("fill", "stroke"))}
            marks.append((there, seen, clip))
        elif kind in ("svg", "g"):
            for child in each:
                walk(child, at, style, clip)

    walk(root, np.eye(3), {"fill": "currentColor", "stroke": "none"}, None)
    return marks


@pytest.fixture
def many():
    """A figure of all that the book draws with."""
    fig, (left, right) = plots.subplots(1, 2)
    x = np.random.default_rng(0).normal(size=(3, 40))
    left.plot(x.T, lw=1)
    left.plot(x[0], x[1], "o", ms=4, ls="--", label=r"$\bar k_{10^{-3}}$, curved Q")
    left.scatter(x[1], x[2], c=["#e8590c", "#7335fe"] * 20, alpha=0.5)
    left.fill_between(range(40), x[0] - 1, x[0] + 1, alpha=0.2, lw=0)
    left.errorbar([1, 2], [0, 1], yerr=0.5, capsize=3)
    left.legend()
    right.pcolormesh(x[:, :4])
    right.bar([0, 1], [1, 2], color="none", edgecolor=figure.INK)
    right.set(xlabel="two words", ylabel="turned Σε")
    yield fig
    plt.close(fig)


def test_the_same_marks_are_drawn_in_the_same_order(many):
    raw = io.StringIO()
    many.savefig(raw, format="svg")
    theirs = re.sub(r"#(1a1a1a|000000)\b", "currentColor", raw.getvalue().replace("xlink:", ""))
    theirs = theirs[theirs.index("<svg") :]
    ours = figure.svg(many, "many", "All of it.")
    assert len(ours) < 0.6 * len(theirs)
    assert {"translate", "rotate", "scale"} <= set(re.findall(r"(\w+)\(", ours))
    long, short = drawn(theirs), drawn(ours)
    assert len(long) == len(short) > 200
    for (a, its, clip), (b, style, clipped) in zip(long, short, strict=True):
        assert its == style and clip == clipped
        assert [letter for letter, _ in a] == [letter for letter, _ in b]
        for (_, wanted), (_, got) in zip(a, b, strict=True):
            np.testing.assert_allclose(got, wanted, atol=0.02)


@pytest.mark.parametrize(
    "given, short",
    [
        ("M 10.004 20 L 10 30.5 L 12 30.5 L 13 31 z ", "m10 20v10.5h2l1 .5z"),
        ("M0 0 0 3.5", "m0 0v3.5"),
        ("M 1 1 L 1 1", "m1 1 0 0"),
        ("M1 1L2 3zM5 5Q6 6 7 5.5C1 2 3 4 5 5", "m1 1 1 2zm4 4q1 1 2 .5c-6-3.5-4-1.5-2-.5"),
        ("M0.25 -0.75L0.5 -0.5", "m.25-.75.25.25"),
    ],
)
def test_a_path_is_relative_and_no_longer_than_it_need_be(given, short):
    assert path(given) == short
    for (a, wanted), (b, got) in zip(points(given), points(short), strict=True):
        assert a == b
        np.testing.assert_allclose(got, wanted, atol=0.0051)


def test_ink_inside_another_colour_stays():
    mark = '<g style="fill:currentColor"><path d="M 0 0 L 1 1"/></g>'
    assert lean(f'<g style="fill:#ff0000">{mark}</g>').count("currentColor") == 1
    assert "currentColor" not in lean(mark)
