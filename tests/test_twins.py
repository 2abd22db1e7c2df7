"""Runs side by side before an onset, bit by bit, and what warns of one, on made-up runs."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lowprec.diagnose import drift
from lowprec.evidence.survival import Arm
from lowprec.records.explosion import Explosion
from lowprec.studies import twins, warning


def run(seed, onset=None, steps=400, shift=0.0, **config):
    """σ of head h of layer 1 is its number plus the step / 100, of layer 0 twice that; the norm of
    the gradient is 0.5, and 2 in the 60 steps before an onset and after."""
    steps_seen = np.arange(steps)
    probes = pd.DataFrame(
        [(step, layer, head, (2 - layer) * (head + step / 100), layer - 0.5 + head, 10.0, 1, 4)
         for step in range(49, steps, 50) for layer in (0, 1) for head in (0, 1)],
        columns="step layer head sigma_q delta_bias delta_abs tied_rows rows".split(),
    )  # fmt: skip
    norm = np.where(steps_seen >= (onset or np.inf) - 60, 2.0, 0.5)
    metrics = dict(step=steps_seen, loss=2.0 + shift + 0.0 * steps_seen, grad_norm=norm)
    return SimpleNamespace(
        name=f"made-{seed}", seed=seed, probes=probes, metrics=pd.DataFrame(metrics),
        explosion=Explosion(onset, True) if onset else None, info=dict(config=config),
    )  # fmt: skip


def arm(*runs):
    return SimpleNamespace(by_seed={r.seed: r for r in runs})


MINE = arm(run(3, onset=220, shift=0.5), run(1, shift=0.25), run(7))
BASE = arm(run(1), run(3), run(4))


def test_pairs_are_of_the_seeds_that_both_have():
    table = twins.beside(MINE, BASE, lambda run: run.metrics.loss[0])
    assert list(table.index) == [1, 3] and table.index.name == "seed"
    assert table.mine.tolist() == [2.25, 2.5] and table.base.tolist() == [2, 2]


def test_how_much_later_runs_explode_than_those_with_their_seed():
    def arm(planned, **onsets):
        runs = [run(int(name[1:]), onset) for name, onset in onsets.items()]
        table = pd.DataFrame({"seed": [r.seed for r in runs], "run": runs})
        table["exploded"] = [r.explosion is not None for r in runs]
        table["duration"] = [onset or 700 for onset in onsets.values()]
        for r in runs:
            r.info["ended"] = "explosion" if r.explosion else "completed"
        return Arm("a", None, planned, table if len(table) else None)

    base = arm((0, 1, 2), s0=100, s1=150, s2=None)
    assert twins.later(arm((1, 0), s1=100, s0=130), base) == {0: 30, 1: -50}
    assert twins.later(arm((0, 1, 2), s0=100, s2=90), base) == {0: 0}  # seed 2 of the base does not
    assert twins.later(arm((0, 1)), base) is None
    assert twins.later(arm((0, 1), s0=None), base) is None  # another may come
    assert twins.later(arm((0,), s0=None), base) == {}
    rise = arm((0, 1), s0=690, s1=100)
    rise.runs.loc[0, "exploded"] = False  # what followed the rise is not recorded
    assert twins.later(rise, base) == {1: -50}
    assert twins.sooner(rise, base).to_dict() == {1: True}
    assert twins.outlasts(rise, base).to_dict() == {1: False}
    third = arm((0, 2), s0=130, s2=None)
    assert twins.outlasts(third, base).to_dict() == {0: True, 2: True}
    assert twins.sooner(third, base).to_dict() == {0: False, 2: False}


def test_a_pair_is_compared_before_either_explodes():
    table = twins.beside_at(MINE, BASE, twins.loss_at, 300)
    assert table.step.to_dict() == {1: 300, 3: 219}
    assert (table.mine - table.base).to_dict() == {1: 0.25, 3: 0.5}
    late = twins.beside_at(MINE, BASE, lambda run, step: step, 9000)
    assert late.to_numpy().tolist() == [[399] * 3, [219] * 3]
    other_way = twins.beside_at(BASE, MINE, lambda run, step: step, 9000)
    assert other_way.step.tolist() == [399, 219]


def test_a_ratio_and_a_gap_are_of_pairs():
    assert twins.ratio(MINE, BASE, lambda run: run.metrics.loss[0]).to_dict() == {1: 1.125, 3: 1.25}
    later = arm(run(1), run(3, onset=220))
    later.by_seed[3].metrics.loc[200:, "loss"] = 5.0
    assert twins.loss_gap(later, BASE, 399).to_dict() == {1: 0, 3: pytest.approx(3 * 20 / 50)}


def test_numbers_at_a_step():
    rising = run(0)
    rising.metrics["loss"] = np.arange(400.0)
    assert twins.loss_at(rising, 100, window=3) == 99
    assert twins.sigma_at(rising, 100) == pytest.approx(2 * 1.99)  # the probe at step 99
    assert twins.sigma_at(rising, 149, layer=1) == pytest.approx(2.49)
    assert twins.sigma_at(run(0, onset=120), 399, layer=1) == pytest.approx(1.99)


def test_losses_are_the_same_bits_or_not():
    one, other = run(0), run(0, steps=300)
    assert twins.differing_losses(one, other) == (0, 300)
    other.metrics.loc[7, "loss"] = np.nextafter(2.0, 3)
    assert twins.differing_losses(one, other) == (1, 300)


def test_runs_part_where_a_loss_differs_or_the_shorter_ends():
    one, other = run(0), run(0, steps=300)
    assert twins.parted(one, other) == 300
    other.metrics.loc[[7, 9], "loss"] = 2.5
    assert twins.parted(one, other) == twins.parted(other, one) == 7


def test_a_median_shows_a_jump_half_a_window_late():
    norm = warning.gradient_norm(run(0, onset=300), window=21)
    assert norm.index[0] == 20 and norm[249] == 0.5
    assert norm[norm > 1].index[0] == 240 + 10


def test_a_lead_is_counted_to_the_onset():
    failing = run(0, onset=300)
    norm = warning.gradient_norm(failing, window=21)
    assert warning.lead(failing, norm, 1) == 50
    assert warning.lead(failing, norm, 1, settled=280) == 20
    assert warning.lead(failing, norm, 1, settled=300) == warning.lead(failing, norm, 2) == 0
    assert warning.peak(failing, norm) == 2 and warning.peak(failing, norm.loc[:239]) == 0.5
    early = run(0, onset=300, steps=301)
    early.metrics.loc[:30, "grad_norm"] = 9
    assert warning.peak(early, warning.gradient_norm(early, 21), settled=60) == 2


def test_the_share_of_all_heads_and_of_a_layer():
    assert drift.share(run(0), 49, 149) == pytest.approx((-0.5 + 0.5 + 0.5 + 1.5) / 40)
    assert drift.share(run(0), 49, 149, layer=1) == pytest.approx(2 / 20)
    grown = run(0, onset=120)
    grown.probes.loc[grown.probes.step >= 120, "delta_bias"] = 1e6
    assert drift.share(grown, -1, 399, layer=1) == pytest.approx(2 / 20)
