"""The usual figures say, from their data alone, what they show; bad input is one sentence."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from lowprec import UserError, plots
from lowprec.evidence import survival
from lowprec.publish import figure, labels
from lowprec.publish.figure import FIGURE_MIME
from lowprec.records.runs import Run


def loss(onset=None, steps=1200):
    """A loss of 2 that jumps to 6 at a step, so that its 50-step mean is above 2.5 six later."""
    values = np.full(steps, 2.0)
    values[slice(onset or steps, None)] = 6.0
    return values


def run(arm, seed, policy, values):
    config = dict(policy=policy, seed=seed)
    info = dict(arm=arm, config=config, hardware="NVIDIA H200", ended="completed")
    made = Run(Path("mini") / f"{arm}-seed{seed}", info)
    made.__dict__["metrics"] = pd.DataFrame(dict(step=range(len(values)), loss=values))
    return made


def arm(name, policy, onsets, planned=None):
    """An arm as `load_arms` reads it; onsets: a step each seed, or None."""
    runs = [run(name, seed, policy, loss(onset)) for seed, onset in enumerate(onsets)]
    rows = [
        dict(run=r, seed=r.seed, exploded=bool(r.explosion and r.explosion.confirmed),
             duration=r.explosion.onset if r.explosion else len(r.metrics))
        for r in runs
    ]  # fmt: skip
    config = SimpleNamespace(policy=policy, layers={}, steps=1200, impl="auto")
    seeds = tuple(range(planned or len(onsets)))
    return survival.Arm(name, config, seeds, pd.DataFrame(rows) if rows else None)


LOW, CALM = arm("low", "LOW", [100, 300]), arm("o_fp32", "LOW+delta_from=o_fp32", [None, None])
LATE, NONE = arm("late", "FA2", [400, 1000]), arm("none", "FA2", [], planned=3)


@pytest.fixture
def shown(monkeypatch):
    """What a call shows: figure, table, alt, caption, and its output."""
    got = SimpleNamespace()
    bundle = figure.bundle

    def keep(fig, table, name, alt, caption, *more):
        got.fig, got.alt, got.caption = fig, alt, caption
        return bundle(fig, table, name, alt, caption, *more)

    def display(data, **_):
        got.about = data[FIGURE_MIME]
        link = re.search(r'text/csv,([^"]+)"', data["text/html"])[1]
        got.table = pd.read_csv(io.StringIO(unquote(link)))

    monkeypatch.setattr(figure, "bundle", keep)
    monkeypatch.setattr("IPython.display.display", display)
    return got


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def rows_of(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


# Outcomes


def test_outcomes_count_and_tell_every_arm(shown):
    arms = {"LOW": LOW, "δ from an unrounded output": CALM, "FA2": LATE, "to come": NONE}
    plots.outcomes(arms, "outcomes", "Two rows explode.", split=2)
    assert shown.alt == (
        "When runs explode, 4 rows. LOW: 2 of 2 explode, at steps 106 to 306; "
        "δ from an unrounded output: 0 of 2 explode by step 1,200; "
        "FA2: 1 of 1 explode, at step 406, of 1 more it is not known; to come: none recorded."
    )
    assert shown.caption.startswith("Two rows explode. Disc: onset of an explosion. Ring: ")
    assert "a rise too late to be confirmed" in shown.caption
    (ax,) = shown.fig.axes
    assert rows_of(ax) == ["LOW", "δ from an unrounded\noutput", "FA2", "to come"]
    words = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert words["2 of 2"] == 0 and words["1 of 1"] == 2
    assert words["3 planned, none recorded"] == 3
    assert [list(line.get_ydata()) for line in ax.lines[-1:]] == [[1.5, 1.5]]
    assert list(shown.table.columns) == ["arm", "seed", "step", "exploded"]
    assert list(shown.table.arm.unique()) == [*arms][:3]
    assert shown.about["runs"][0] == "Drawn from 6 runs of 3 arms"


def test_outcomes_in_panels_share_their_rows(shown):
    panels = {"stored": {"LOW": LOW, "FA2": LATE}, "clean": {"LOW": CALM}}
    plots.outcomes(panels, "outcomes", "Cut.")
    left, right = shown.fig.axes
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == ("stored", "clean")
    assert rows_of(left) == ["LOW", "FA2"] and not right.yaxis.get_tick_params()["labelleft"]
    assert len(right.lines) == 2
    assert ". stored: LOW: 2 of 2 explode" in shown.alt and ". clean: LOW: 0 of 2" in shown.alt
    assert list(shown.table.panel.unique()) == ["stored", "clean"]


def test_a_rise_too_late_is_spoken_of_where_there_is_one(shown):
    plots.outcomes({"LOW": LOW}, "outcomes", "All.", alt="Mine.")
    assert shown.alt == "Mine." and "too late" not in shown.caption


# Dots

UNITS = pd.DataFrame(
    dict(arm=["b", "b", "a", "c"], value=[1.0, 3.0, 2.5, np.nan], half=0.5, up=[True, False] * 2)
)


def test_dots_have_a_row_a_label_as_they_come(shown):
    plots.dots(UNITS, "dots", "Few.", x="value", label="share (%)", line=2, words={"a": "-1"})
    assert shown.alt == "Dots, 3 rows, share (%). b: 2 marks, 1 to 3; a: 2.5; c: none."
    (ax,) = shown.fig.axes
    assert rows_of(ax) == ["b", "a", "c"] and ax.get_xlabel() == "share (%)"
    words = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert words["none recorded"] == 2 and words["−1"] == 1
    marks = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in marks] == [1, 3, 2.5]
    assert {line.get_color() for line in marks} == {plots.INK}
    pd.testing.assert_frame_equal(shown.table, UNITS)


def test_dots_take_colours_runs_and_order_from_the_table(shown):
    arms = {"LOW": LOW, "calm": CALM, "to come": NONE}
    table = survival.measured(arms, share=lambda run: run.seed + 1)
    table["arm"] = pd.Categorical(table.arm, ["calm", "LOW", "to come"])
    plots.dots(table, "dots", "Few.", x="share", log=True)
    (ax,) = shown.fig.axes
    assert rows_of(ax) == ["calm", "LOW", "to come"]
    hues = [line.get_color() for line in ax.lines if line.get_marker() == "o"]
    assert hues == [plots.colour("LOW+delta_from=o_fp32")] * 2 + [plots.colour("LOW")] * 2
    assert shown.about["runs"][0] == "Drawn from 4 runs of 2 arms"
    assert list(shown.table) == ["arm", "seed", "share"]
    plots.dots(UNITS, "dots", "Few.", x="value", colours={"a": "#123456", "b": "FA2"})
    hues = [line.get_color() for line in shown.fig.axes[0].lines if line.get_marker() == "o"]
    assert hues == [plots.colour("FA2")] * 2 + ["#123456"]


def test_intervals_rings_and_ticks():
    fig, ax = plots.subplots()
    table = UNITS.assign(low=UNITS.value - 1, high=UNITS.value + 2)
    plots.draw_dots(ax, table, x="value", interval=("low", "high"), filled="up", tick="half")
    bars = [bar.get_segments()[0][:, 0].tolist() for bar in ax.collections]
    assert bars == [[0, 3], [2, 5], [1.5, 4.5]]
    faces = [line.get_markerfacecolor() for line in ax.lines if line.get_marker() == "o"]
    assert faces == [plots.INK, "none", plots.INK]
    ticks = [list(line.get_xdata()) for line in ax.lines if line.get_marker() != "o"]
    assert ticks == [[0.5, 0.5]] * 3
    fig, ax = plots.subplots()
    plots.draw_dots(ax, table, x="value", interval="half")
    assert ax.collections[0].get_segments()[0][:, 0].tolist() == [0.5, 1.5]


# Courses


def drawn(ax):
    return [line for line in ax.lines if line.get_marker() != "o"]


def test_courses_end_at_an_onset(shown):
    plots.courses({"LOW": LOW, "twin": CALM}, "loss", "Jump.", start=60)
    (ax,) = shown.fig.axes
    assert [line.get_xdata()[-1] for line in drawn(ax)] == [105, 305, 1199, 1199]
    assert min(line.get_xdata()[0] for line in drawn(ax)) == 60
    assert [line.get_color() for line in drawn(ax)][::2] == [
        plots.colour("LOW"), plots.colour("LOW+delta_from=o_fp32"),
    ]  # fmt: skip
    assert [text.get_text() for text in ax.texts] == [
        "LOW\n2 of 2 explode", "twin\n0 of 2 explode",
    ]  # fmt: skip
    assert ax.get_ylabel() == "training loss, 50-step mean (nats)"
    assert shown.alt == (
        "Lines: training loss, 50-step mean (nats) against step. LOW: 2 of 2 explode, at steps 106 "
        "to 306; first 2, last 2.48. twin: 0 of 2 explode by step 1,200; first 2, last 2."
    )
    assert shown.caption == "Jump. Disc: onset of an explosion."
    assert list(shown.table) == [
        "step",
        *(f"{a} seed {s}" for a in ("LOW", "twin") for s in (0, 1)),
    ]
    assert len(shown.table) < 310 and shown.table["LOW seed 0"].last_valid_index() is not None
    assert shown.about["runs"][0] == "Drawn from 4 runs of 2 arms"


def test_courses_go_on_past_an_onset_as_far_as_asked(shown):
    plots.courses({"LOW": LOW}, "loss", "Jump.", past=100)
    (ax,) = shown.fig.axes
    assert [line.get_xdata()[-1] for line in drawn(ax)] == [205, 405]
    discs = [line for line in ax.lines if line.get_marker() == "o"]
    assert all(
        abs(disc.get_xdata()[0] - at) < 5 for disc, at in zip(discs, (106, 306), strict=True)
    )
    plots.courses(
        {"LOW": LOW},
        "norm",
        "Jump.",
        measure=lambda run: run.metrics.loss,
        past=np.inf,
        label="loss",
    )
    assert [line.get_xdata()[-1] for line in drawn(shown.fig.axes[0])] == [1199, 1199]


def test_an_axis_of_parts_has_their_numbers(shown):
    parts = np.linspace(0, 1, 11)
    plots.courses({"a": pd.Series(parts**2, parts)}, "f", "F.", label="y", x="share")
    ax = shown.fig.axes[0]
    ax.figure.canvas.draw()
    ticks = {round(t.get_loc(), 6): t.label1.get_text() for t in ax.xaxis.get_major_ticks()}
    assert ticks[0.2] == "0.2" and ticks[1.0] == "1"


def test_courses_of_other_lines(shown):
    one = pd.Series([1.0, np.inf, 3.0], index=[0, 10, 20])
    two = pd.DataFrame({"a": [2.0, 4.0], "b": [np.nan, np.nan]}, index=[0, 30])
    plots.courses({"FA2": one, "others": two}, "lines", "Rise.", label="σ", x="token", log=True)
    (ax,) = shown.fig.axes
    assert shown.alt == "Lines: σ against token. FA2: first 1, last 3. others: first 2, last 4."
    assert [text.get_text() for text in ax.texts] == ["FA2", "others"]
    assert drawn(ax)[0].get_color() == plots.colour("FA2") != drawn(ax)[1].get_color()
    assert list(shown.table) == ["token", "FA2", "others a", "others b"]
    assert list(shown.table["FA2"].dropna()) == [1, 3]
    assert shown.about["runs"] == [] and ax.get_yscale() == "log"


def test_an_arm_without_runs_is_told_and_not_drawn(shown):
    plots.courses({"LOW": LOW, "to come": NONE}, "loss", "Jump.")
    assert shown.alt.endswith("to come: none recorded; none.")
    assert [text.get_text() for text in shown.fig.axes[0].texts] == ["LOW\n2 of 2 explode"]


def test_two_arms_of_one_policy_differ_in_colour(shown):
    plots.courses({"LOW": LOW, "again": LOW, "mine": LOW}, "loss", "Jump.", colours={"mine": "FA2"})
    hues = [line.get_color() for line in drawn(shown.fig.axes[0])][::2]
    assert hues == [plots.colour("LOW"), plots.SPARE[0], plots.colour("FA2")]


def test_labels_cover_neither_lines_nor_each_other(shown):
    x = np.linspace(0, 1, 200)
    wave = {f"wave {k}": pd.Series(np.sin(3 * x + k), x) for k in (0, 3)}
    wave["again"] = wave["wave 3"]
    plots.courses(wave, "waves", "Waves.", label="height")
    (ax,) = shown.fig.axes
    shown.fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
        assert ax.get_window_extent().contains(box.x0, box.y0)
        for line in ax.lines:
            points = ax.transData.transform(np.transpose(line.get_data()))
            assert not any(box.contains(*point) for point in points)


# Heat


def test_a_heat_map_writes_its_cells(shown):
    frame = pd.DataFrame({"one": [1.0, 1e-5], "two": [20.0, np.nan]}, index=["ℓ", "S"])
    plots.heat(frame, "heat", "Dark.", label="size", split=1, floor=1e-3)
    assert shown.alt == "Heat map, 2 rows by 2 columns, size. ℓ: 1 to 20; S: 1e-05."
    (ax,) = shown.fig.axes
    assert [text.get_text() for text in ax.texts] == ["1", "20", "< 0.001", "–"]
    assert ax.texts[-1].get_color() == plots.INK
    assert rows_of(ax) == ["ℓ", "S"] and ax.get_title(loc="left") == "size"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["one", "two"]
    assert [line.get_xdata()[0] for line in ax.lines] == [1.0]
    assert list(shown.table) == ["row", "one", "two"] and shown.table.one[1] == 1e-5


def test_many_cells_get_a_bar_of_colours(shown):
    names = pd.MultiIndex.from_product([[0, 1, 2, 3, 4], range(6)], names=["layer", "head"])
    plots.heat(pd.DataFrame([range(30)], ["seed 1"], names), "heat", "Dark.", label="σ")
    ax, bar = shown.fig.axes
    assert not ax.texts and bar.get_xlabel() == "σ"
    assert list(shown.table)[:2] == ["row", "0 0"]


@pytest.mark.parametrize(
    "numbers, kind", [((-1, 2), "CenteredNorm"), ((1, 2), "Normalize"), ((1, 20), "LogNorm")]
)
def test_the_scale_follows_the_numbers(numbers, kind):
    fig, ax = plots.subplots()
    plots.draw_heat(ax, pd.DataFrame([numbers]))
    assert type(ax.collections[0].norm).__name__ == kind


# Words


def test_long_labels_wrap_and_breaks_stay():
    assert labels.wrapped("FA2, δ from a fresh rounding", 14) == "FA2, δ from a\nfresh rounding"
    assert labels.wrapped("a\nb c", 20) == "a\nb c"


@pytest.mark.parametrize("limits", [(0.09, 40), (40, 0.09)])
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(limits):
    fig, ax = plots.subplots()
    ax.set(xscale="log", xlim=limits)
    labels.log_ticks(ax.xaxis)
    fig.canvas.draw()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0.1", "0.3", "1", "3", "10", "30"]


def test_a_short_logarithmic_axis_has_ticks_that_differ():
    for low, high in ((2.1, 4.9), (1000.5, 1002.5)):
        fig, ax = plots.subplots()
        ax.set(xscale="log", xlim=(low, high))
        labels.log_ticks(ax.xaxis)
        fig.canvas.draw()
        ticks = zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
        words = [label.get_text() for at, label in ticks if low <= at <= high]
        assert len(set(words)) == len(words) >= 2


def test_an_axis_has_the_limits_that_are_asked_for(shown):
    plots.courses({"a": UNITS.value[:3]}, "courses", "C.", label="y", limits=(0.5, 7))
    assert shown.fig.axes[0].get_ylim() == (0.5, 7)
    plots.dots(UNITS, "dots", "D.", x="value", limits=(0.5, 7))
    assert shown.fig.axes[0].get_xlim() == (0.5, 7)


# Bad input

FRAME = pd.DataFrame({"a": [0.0, 1.0]})


@pytest.mark.parametrize(
    "draw, sentence",
    [
        (lambda: plots.outcomes({"LOW": "LOW"}, "f", "C."), "f: LOW is no arm; take arms of"),
        (lambda: plots.outcomes({"to come": NONE}, "f", "C."), "none of its 1 arms has a recorded"),
        (lambda: plots.outcomes({}, "f", "C."), "none of its 0 arms has a recorded run"),
        (lambda: plots.dots(UNITS, "f", "C.", x="size"), "no column 'size'; it has arm, value"),
        (lambda: plots.dots(UNITS, "f", "C.", x="value", row="run"), "no column 'run'; it has arm"),
        (lambda: plots.dots(UNITS, "f", "C.", x="value", interval="w"), "has no column 'w'"),
        (lambda: plots.dots(UNITS, "f", "C.", x="value", words={"d": ""}), "words names d, which"),
        (lambda: plots.dots(UNITS, "f", "C.", x="value", colours={"d": ""}), "colours names d"),
        (lambda: plots.dots(UNITS[3:], "f", "C.", x="value"), "column 'value' has no finite"),
        (lambda: plots.dots(UNITS, "f", "C.", x="up", log=True), "not above 0; leave out log"),
        (lambda: plots.courses({"a": [1, 2]}, "f", "C."), "f: a is no arm, Series or table"),
        (lambda: plots.courses({"to come": NONE}, "f", "C."), "f has nothing to draw"),
        (lambda: plots.courses({"LOW": LOW}, "f", "C.", window=2000), "of 2000 steps; take window"),
        (lambda: plots.courses({"LOW": LOW}, "f", "C.", colours={"b": ""}), "colours names b, whi"),
        (lambda: plots.courses({"a": FRAME}, "f", "C.", log=True, label="y"), "not above 0; leave"),
        (lambda: plots.courses({"a": FRAME.a}, "f", "C."), "f needs label=, what its y axis"),
        (lambda: plots.heat(pd.DataFrame({"a": ["x"]}), "f", "C."), "must be of numbers"),
        (lambda: plots.heat(FRAME * np.nan, "f", "C."), "f has nothing to draw"),
        (lambda: plots.heat(FRAME, "f", "C.", scale="log"), "some above a floor= above 0"),
        (lambda: plots.heat(FRAME, "f", "C.", scale="log", floor=-1), "some above a floor="),
        (lambda: plots.heat(FRAME, "f", "C.", scale="log", floor=2), "some above a floor="),
        (lambda: plots.heat(1 / FRAME, "f", "C."), "that of an infinite number"),
        (lambda: plots.heat(FRAME, "f", "C.", scale="cubic"), "scale='cubic' must be linear"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(draw, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        draw()
    assert "\n" not in str(caught.value)
    assert not plt.get_fignums()


def test_parts_of_arms_and_a_row_a_run():
    part = LOW.only([1, 7])
    assert part.seeds == (1,) and list(part.runs.seed) == [1] and LOW.only([7]).n == 0
    table = survival.measured({"LOW": LOW, "to come": NONE}, end=lambda run: len(run.metrics))
    assert list(table.columns) == ["arm", "seed", "run", "end"]
    assert list(table.arm) == ["LOW", "LOW", "to come"] and np.isnan(table.end[2])
    assert table.run[1].seed == table.seed[1] == 1
