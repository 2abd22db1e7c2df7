"""A figure reads on any background, for any reader, and is the same bytes every time."""

import base64
import io
import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from urllib.parse import unquote

import matplotlib

matplotlib.use("agg")

import matplotlib.colors as mcolors
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from lowprec import UserError, plots
from lowprec.evidence import survival
from lowprec.evidence.words import FIGURE_MIME, minus
from lowprec.numerics.policy import FA2, LOW
from lowprec.publish import figure, pages
from lowprec.records.runs import Run

LONG = pd.DataFrame({"step": range(60_000), "loss": 0.125})
TABLE = pd.DataFrame({"step": [0, 1, 2], "loss": [10.5, 4.25, 1.0625]})


def bundle(name="loss", table=TABLE, **changes):
    fig, ax = plots.subplots()
    ax.plot(table["step"][:3], table["loss"][:3], label="LOW", color=plots.colour("LOW"))
    ax.text(1, 5, "ink")
    ax.set(xlabel="step", ylabel="loss (nats)")
    words = dict(alt='The loss falls, "fast".', caption="Loss & step.", hardware=None) | changes
    try:
        return figure.bundle(fig, table, name, **words)
    finally:
        plt.close(fig)


def svg_of(data):
    return re.search(r"<svg.*</svg>", data["text/html"], re.DOTALL)[0]


def test_a_figure_is_the_same_bytes_every_time():
    assert bundle() == bundle()
    assert "Date" not in bundle()[0]["text/html"]


def test_ids_belong_to_one_figure():
    data = {name: ET.fromstring(svg_of(bundle(name)[0])) for name in ("loss", "other")}
    ids = {name: [e.get("id") for e in root.iter() if e.get("id")] for name, root in data.items()}
    assert not set(ids["loss"]) & set(ids["other"])
    assert len(ids["loss"]) == len(set(ids["loss"])) > 10
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', svg_of(bundle()[0]))
    assert set(used) == {i for i in ids["loss"] if "text_" not in i}


def test_ink_is_the_pages_and_the_background_clear():
    image = svg_of(bundle()[0])
    colours = set(re.findall(r"#[0-9a-f]{6}\b", image))
    assert colours == {plots.colour("LOW")}
    assert "currentColor" in image
    assert "\n\n" not in image


def test_a_figure_says_what_it_shows_and_where_it_was_made():
    data, metadata = bundle()
    assert 'role="img" aria-label="The loss falls, &quot;fast&quot;."' in svg_of(data)
    assert "Loss &amp; step." in data["text/html"]
    assert "computed on this page" in data["text/html"]
    assert metadata["image/png"]["alt"] == 'The loss falls, "fast".'
    recorded = bundle(hardware="NVIDIA H200")[0]
    assert "recorded on NVIDIA H200" in recorded["text/html"]
    assert recorded[FIGURE_MIME]["hardware"] == "NVIDIA H200"
    assert recorded[FIGURE_MIME]["name"] == "loss"
    several = bundle(hardware=iter(["H200", "H100", "H200"]), alt="Down to -3.")[0]
    assert several[FIGURE_MIME]["hardware"] == "H100 and H200"
    assert several[FIGURE_MIME]["alt"] == "Down to −3."
    assert bundle(hardware=["CPU", "CPU"])[0][FIGURE_MIME]["hardware"] is None


def run(arm, seed, policy="LOW", campaign="mini", hardware="NVIDIA H200", **config):
    info = dict(arm=arm, config=dict(policy=policy, seed=seed) | config)
    return Run(Path(campaign) / f"{arm}-seed{seed}", info | dict(hardware=hardware))


def test_a_figure_names_the_runs_it_is_drawn_from():
    clean = "LOW+delta_from=o_fp32"
    several = [run("low", seed) for seed in (6, 0, 3, 1, 2, 0)]
    several += [run("o_fp32", 4, clean), run("o_fp32", 5, clean, f"{gettempdir()}/mini")]
    several += [run("one", 0, "FA2", "layers", layers={"1/2": clean}, impl="sdpa", tile=None)]
    said = [
        "Drawn from 7 runs of 3 arms",
        f"mini: low (LOW) seeds 0–3, 6; o_fp32 ({clean}) seed 4",
        f"layers: one (FA2, impl sdpa, layer 1 heads 2 {clean}) seed 0",
    ]
    for runs in (several, iter(several), pd.DataFrame({"run": several}), pd.Series(several)):
        data = bundle(runs=runs)[0]
        assert data[FIGURE_MIME]["runs"] == said
        assert data[FIGURE_MIME]["hardware"] == "NVIDIA H200"
    caption = ET.fromstring(re.search("<figcaption>.*</figcaption>", data["text/html"], re.S)[0])
    assert caption.find("details/summary").text == said[0]
    assert "".join(caption.find("details").itertext()) == said[0] + "\n" + "".join(said[1:])
    assert bundle(runs=[several[3], several[4]])[0][FIGURE_MIME]["runs"][1].endswith("seeds 1, 2")
    assert bundle(runs=several[:3])[0][FIGURE_MIME]["runs"][0] == "Drawn from 3 runs"
    alone = ["Drawn from 1 run", "mini: low (LOW) seed 6"]
    assert bundle(runs=several[:1])[0][FIGURE_MIME]["runs"] == alone
    assert bundle(runs=[])[0][FIGURE_MIME]["runs"] == []
    nothing = bundle(runs=several[-2:-1])[0]
    assert nothing[FIGURE_MIME]["runs"] == [] and "details" not in nothing["text/html"]
    assert "computed on this page" in nothing["text/html"]
    own = bundle(runs=[run("mine", 0, hardware="CPU")])[0]
    assert own[FIGURE_MIME]["runs"] and "recorded on a CPU" in own["text/html"]


def test_the_data_of_a_figure_come_with_it():
    page = bundle()[0]["text/html"]
    link = re.search(r'download="loss.csv" href="data:text/csv,([^"]+)"', page)
    csv = unquote(link[1])
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(csv)), TABLE)


def test_the_fallback_is_a_png_on_white():
    picture = plt.imread(io.BytesIO(base64.b64decode(bundle()[0]["image/png"])))
    assert np.allclose(picture[0, 0], 1)

    picture = Image.open(io.BytesIO(base64.b64decode(bundle()[0]["image/png"])))
    assert picture.mode == "P" and picture.text["Description"] == 'The loss falls, "fast".'


def test_the_notebook_that_is_offered_has_each_figure_once_over_its_caption():
    data, metadata = bundle()
    other = nbformat.v4.new_output("display_data", {"text/html": "<table></table>"})
    shown = nbformat.v4.new_output("display_data", data, metadata=metadata)
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[other, shown])])
    [cell] = nbformat.reads(pages.offered(nbformat.writes(nb)), 4).cells
    first, picture, caption = cell.outputs
    assert first == other and "text/html" not in picture.data
    assert picture.data["image/png"] == data["image/png"] and FIGURE_MIME in picture.data
    assert caption.data == {"text/html": "<p>Loss &amp; step.</p>"}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"alt": " "}, "figure loss has no alt text"),
        ({"caption": ""}, "figure loss has no caption text"),
        ({"name": "Loss curve"}, "figure name 'Loss curve' must be made of"),
        ({"table": LONG}, "the table of figure loss is"),
    ],
)
def test_a_figure_that_would_not_serve_is_refused(changes, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        bundle(**changes)


def test_outcomes_tell_exploded_censored_and_missing_runs_apart():
    def arm(policy, runs, layers=()):
        config = SimpleNamespace(policy=policy, layers=layers, steps=7000, impl="auto")
        return survival.Arm("a", config, (0, 1), runs)

    runs = pd.DataFrame(dict(seed=[0, 1], duration=[2000, 7000], exploded=[True, False]))
    ended = ((object(), "explosion"), (None, "completed"))
    runs["run"] = [SimpleNamespace(explosion=e, info=dict(ended=how)) for e, how in ended]
    fig, ax = plots.subplots()
    mixed = arm("FA2", runs, {"1": "LOW"})
    plots.draw_outcomes(ax, {"base": arm("LOW", runs), "to come": arm("FA2", None), "mix": mixed})
    exploded, censored, *inked = ax.get_lines()
    assert (exploded.get_xdata()[0], censored.get_xdata()[0]) == (2000, 7000)
    assert exploded.get_markerfacecolor() == plots.colour("LOW") == censored.get_markeredgecolor()
    assert censored.get_markerfacecolor() == "none"
    assert {mark.get_markeredgecolor() for mark in inked} == {plots.INK}
    assert [mark.get_ydata()[0] for mark in ax.get_lines()] == [-0.04, 0.04, 1.96, 2.04]
    (words,) = ax.texts
    assert words.get_text() == "2 planned, none recorded"
    assert words.get_position()[1] == 1
    assert [label.get_text() for label in ax.get_yticklabels()] == ["base", "to come", "mix"]
    plt.close(fig)


def test_end_labels_do_not_overlap():
    fig, ax = plots.subplots()
    for name, height in (("a", 1.0), ("b", 1.01), ("c", 1.0), ("d", 0.0)):
        ax.plot([0, 1], [0.5, height], label=name)
    ax.plot([0, 1], [0, 1], label="left out")
    plots.label_ends(ax, {"left out": None})
    heights = sorted(text.get_position()[1] for text in ax.texts)
    assert [text.get_text() for text in ax.texts] == ["d", "a", "c", "b"]
    assert np.diff(heights).min() >= 0.055 - 1e-9
    plt.close(fig)


# Colours


def linear(colour):
    """Linear RGB of "#rrggbb", 0 to 1."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """Contrast ratio of WCAG 2."""
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(rgb):
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ rgb / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


VISION = {
    "common": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB."""


@pytest.mark.parametrize("colour", [*plots.COLOURS.values(), *plots.SPARE])
def test_a_colour_stands_out_from_both_pages(colour):
    assert contrast(colour, "#ffffff") >= 3
    assert contrast(colour, "#121212") >= 3


@pytest.mark.parametrize("vision", VISION)
def test_policies_are_told_apart(vision):
    matrix = np.array(VISION[vision])
    seen = [lab(np.clip(matrix @ linear(c), 0, 1)) for c in plots.COLOURS.values()]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


def test_a_policy_has_one_colour_whatever_it_is_called_by():
    assert plots.colour(LOW) == plots.colour("LOW") == plots.COLOURS["LOW"]
    assert plots.colour(LOW.replace(delta_from="o_fp32")) == plots.COLOURS["LOW+delta_from=o_fp32"]
    assert plots.colour(FA2) == plots.COLOURS["FA2"]
    assert plots.colour("LOW+p=fp32") == plots.colour(LOW.replace(p="fp32"))


def test_a_change_keeps_the_colour_of_its_preset_unless_delta_reads_another_output():
    blue = plots.COLOURS["LOW+delta_from=o_fp32"]
    assert plots.look("FA2") == dict(color=plots.COLOURS["FA2"], ls="-")
    assert plots.look("LOW+dodo=fp32") == dict(color=plots.COLOURS["LOW"], ls="--")
    assert plots.look("LOW+o_acc=fp32") == dict(color=plots.COLOURS["LOW"], ls=":")
    assert plots.look(FA2.replace(delta_from="dp")) == dict(color=blue, ls="--")
    with pytest.raises(UserError, match="unknown policy"):
        plots.colour("nearest")


@pytest.mark.parametrize("low, scale", [(0, "linear"), (-1, "centred"), (0.01, "log")])
def test_a_label_is_read_on_its_cell(low, scale):
    values = np.linspace(low, 1, 40).reshape(4, 10)
    fig, ax = plots.subplots()
    plots.draw_heat(ax, pd.DataFrame(values), form="{:.2f}", scale=scale)
    fig.canvas.draw()
    (cells,) = ax.collections
    shown = {text.get_text(): text for text in ax.texts}
    drawn = figure.svg(fig, "cells", "labels")
    assert all(text.get_color() in drawn for text in ax.texts)
    for (row, column), value in np.ndenumerate(values):
        text = shown[minus(f"{value:.2f}")]
        cell = mcolors.to_hex(cells.to_rgba(value))
        assert contrast(text.get_color(), cell) >= 4.5
        x, y = ax.transData.inverted().transform(text.get_window_extent().get_points().mean(0))
        assert (int(x), int(y)) == (column, row)
    plt.close(fig)
