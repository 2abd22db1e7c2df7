"""A film: the numbers that a slider moves through, and what it refuses."""

import json
import re
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from lowprec import UserError, plots
from lowprec.publish import film
from lowprec.publish.figure import luminance

CELLS = pd.MultiIndex.from_product([["first", "second"], [0, 1, 2]], names=["layer", "head"])
STEPS = pd.Index([49, 99, 149], name="step")


def table(factor=1.0):
    return pd.DataFrame(factor * np.arange(1.0, 19).reshape(3, 6), STEPS, CELLS)


@pytest.fixture
def shown(monkeypatch):
    """The outputs of `plots.film`."""
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    return shown


def draw(panels, **changes):
    how = dict(label="σ(W_Q)", still=[49, 149]) | changes
    plots.film(panels, "heads", "Some grow.", **how)


def test_what_moves_is_every_number_and_its_shade(shown):
    draw({"mine": table(), "twin": table(0.5)}, form="{:.2f}")
    [data] = shown
    html = data["text/html"]
    moving = json.loads(re.search(r'<script type="application/json">(.*?)</script>', html)[1])
    assert (moving["rows"], moving["columns"], moving["across"]) == (
        ["first", "second"], ["0", "1", "2"], "head"
    )  # fmt: skip
    assert moving["steps"] == [49, 99, 149] and moving["ends"] == ["0.50", "18.00"]
    mine, twin = moving["panels"]
    assert (mine["title"], twin["title"]) == ("mine", "twin")
    assert mine["texts"][1] == ["7.00", "8.00", "9.00", "10.00", "11.00", "12.00"]
    assert mine["shades"][2][5] == 63 and twin["shades"][0][0] == 0
    exact = 64 * np.log(7 / 0.5) / np.log(18 / 0.5)
    assert mine["shades"][1][0] == int(exact)
    assert moving["colours"][63][0] == to_hex(film.SHADES(63))
    assert "\n\n" not in html, "an empty line would end the block"
    link = re.search(r"data:text/csv,([^\"]+)", html)[1]
    csv = unquote(link).splitlines()
    assert data["text/plain"].startswith("Figure heads: Maps at 3 steps, 2 panels, σ(W_Q). mine: ")
    assert csv[0] == "panel,step,layer,head,σ(W_Q)" and len(csv) == 1 + 2 * 3 * 6


def test_numbers_stand_out_from_their_cells(shown):
    draw({"mine": table()})
    moving = json.loads(re.search(r">(\{.*?\})</script>", shown[0]["text/html"])[1])
    for pair in moving["colours"]:
        low, high = sorted(
            luminance([int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for c in pair
        )
        assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize(
    "panels, changes, said",
    [
        ({"a": table(), "b": table().iloc[1:]}, {}, "differ in their steps or cells"),
        ({"a": -table()}, {}, "a number that a log scale cannot show"),
        ({"a": table().replace(3.0, np.nan)}, {}, "a number that a log scale cannot show"),
        ({"a": table()}, dict(still=[50]), "has no step 50 to draw still"),
        ({"a": table()}, dict(form="{:.9000f}"), "bytes and 60,000 is the most: take fewer steps"),
    ],
)
def test_what_cannot_be_drawn_is_said(shown, panels, changes, said):
    with pytest.raises(UserError, match=f"figure heads.*{said}"):
        draw(panels, **changes)
    assert shown == []
