"""Which head takes off first, on made-up runs, and the exact test of agreement, by enumeration."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lowprec import UserError
from lowprec.diagnose.drift import share
from lowprec.evidence.heads import (
    agreement,
    end_of,
    fastest,
    first_take_off,
    norms,
    over_healthy,
    picked_for,
    rank_correlations,
    sums,
    take_offs,
    takes_off,
    total,
)
from lowprec.records.explosion import Explosion

STEPS = range(49, 1500, 50)


def made_up(onset=None, **growing):
    """A run of one layer and three heads with σ = 4; head hN grows from a step on, by a factor each
    100 steps. onset: of its explosion, which is confirmed, or that explosion."""
    rows = []
    for step in STEPS:
        for head in range(3):
            start, rate = growing.get(f"h{head}", (np.inf, 1))
            sigma = 4 * rate ** max(0, (step - start) / 100)
            rows.append((step, 1, head, sigma, 3.0, head - 1.0, 2.0, head, 10))
    columns = ["step", "layer", "head", "sigma_q", "sigma_k", "delta_bias", "delta_abs",
               "tied_rows", "rows"]  # fmt: skip
    return SimpleNamespace(
        name="made-up",
        probes=pd.DataFrame(rows, columns=columns),
        metrics=range(1500),
        explosion=Explosion(onset, True) if isinstance(onset, int) else onset,
        info={"config": {"probe_every": 50}},
    )


def test_heads_in_the_order_in_which_they_take_off():
    found = take_offs(made_up(h2=(799, 3), h0=(999, 3)))
    assert found.to_numpy().tolist() == [[1, 2, 899], [1, 0, 1099]]
    faster = take_offs(made_up(h0=(799, 3), h2=(799, 4)))
    assert faster["head"].tolist() == [2, 0] and faster.step.nunique() == 1
    assert take_offs(made_up()).empty


def test_what_is_early_or_after_the_onset_does_not_count():
    assert take_offs(made_up(h0=(99, 1.9), h1=(1299, 3), onset=1350)).empty
    assert take_offs(made_up(h1=(299, 3)), settled=600).step.tolist() == [649]
    assert end_of(made_up(onset=1350)) == 1350 and end_of(made_up()) == 1500
    assert end_of(made_up(onset=Explosion(1350, False))) == 1350
    assert norms(made_up(onset=1350)).index[-1] == 1349


def test_a_lag_between_probes_is_refused():
    for lag in (70, 0):
        with pytest.raises(UserError, match=f"lag={lag} must be a multiple of 50"):
            take_offs(made_up(), lag=lag)
    with pytest.raises(UserError, match="every=70 must be a multiple of 50"):
        take_offs(made_up(), lag=70, every=70)


def test_take_offs_on_a_coarser_grid():
    run = made_up(h2=(799, 3))
    assert take_offs(run, lag=200, every=200).step.tolist() == [999]
    assert take_offs(run, lag=200, every=100).step.tolist() == [899]
    assert first_take_off(made_up(h2=(799, 3), h0=(999, 3))) == 999
    assert takes_off(made_up(h2=(799, 3))) and not takes_off(made_up())
    assert np.isnan(first_take_off(made_up(h2=(799, 1.4)))), "less than twice in 200 steps"


def test_how_near_a_run_comes_to_a_take_off():
    assert fastest(made_up()) == 1 and fastest(made_up(h1=(799, 3))) == pytest.approx(3)
    assert fastest(made_up(h1=(799, 3)), lag=200, every=200) == pytest.approx(9)
    assert fastest(made_up(h0=(99, 1.5), h1=(1299, 3), onset=1310)) == pytest.approx(1.5)
    with pytest.raises(UserError, match="lag=70 must be a multiple of 50"):
        fastest(made_up(), lag=70)


def test_over_the_healthy_run_at_the_last_common_probe():
    ratio = over_healthy(made_up(h1=(899, 2), onset=1100), made_up())
    assert ratio.name == 1099 and ratio.idxmax() == (1, 1)
    assert ratio[1, 1] == pytest.approx(4) and ratio[1, 0] == 1
    with pytest.raises(UserError, match="no probe before the onset in common"):
        over_healthy(made_up(onset=20), made_up())


def test_a_sum_of_what_one_probe_lacks_is_unknown():
    run = made_up()
    run.probes.loc[(run.probes.step == 149) & (run.probes["head"] == 2), "delta_abs"] = np.nan
    table = sums(run, 99, 199)
    assert np.isnan(table.delta_abs[1, 2]) and table.delta_bias[1, 2] == 2
    assert table.delta_abs[1, 0] == 4
    assert np.isnan(share(run, 99, 199)) and share(run, 149, 199) == 0
    assert np.isnan(total(run, 99, 199).delta_abs)


def test_a_total_is_of_all_layers_or_of_one():
    run = made_up()
    run.probes.loc[run.probes["head"] == 2, "layer"] = 4
    found = {layer: total(run, 99, 199, layer).tolist() for layer in (None, 1, 4)}
    assert found == {None: [0, 12, 6, 60], 1: [-2, 8, 2, 40], 4: [2, 4, 4, 20]}


def test_a_share_has_no_probe_of_the_onset():
    run = made_up(onset=199)
    run.probes.loc[run.probes.step == 199, "delta_bias"] = 2.0
    assert share(run, 99, 249) == 0


def test_sums_leave_the_first_step_out():
    table = sums(made_up(), 99, 199)
    assert table.loc[(1, 2)].tolist() == [2, 4, 4, 20] and table.delta_bias[1, 0] == -2
    with pytest.raises(UserError, match="no probe"):
        sums(made_up(), 100, 120)


@pytest.mark.parametrize("ours, wanted", [({0: 2, 1: 0, 5: 1}, 3), ({0: 1, 1: 2, 5: 1}, 1)])
def test_agreement_against_every_way_to_draw(ours, wanted):
    theirs = {0: [2, 2, 1], 1: [0], 5: []}
    hits, pairs, p = agreement(ours, theirs, count=3)
    assert (hits, pairs) == (wanted, 4)
    drawn = [
        sum(theirs[seed].count(head) for seed, head in zip(theirs, heads, strict=True))
        for heads in itertools.product(range(3), repeat=3)
    ]
    assert p == pytest.approx(np.mean(np.array(drawn) >= hits))
    assert agreement({0: 1}, {0: [2]}, count=3)[2] == 1


def test_correlations_are_between_arms_only():
    up, down = pd.Series([1, 2, 3]), pd.Series([30, 20, 10])
    table = rank_correlations({("a", 0): up, ("a", 1): down, ("b", 0): up * 7})
    assert len(table) == 2 and set(table.arm) == {"a"} and set(table["other arm"]) == {"b"}
    assert dict(zip(table.seed, table.correlation, strict=True)) == {0: 1, 1: -1}


def test_a_sequence_is_picked_for_the_head_with_the_largest_error_of_the_step_and_layer():
    keys = itertools.product((1, 2), (0, 1), (0, 1, 2))  # step, layer, head
    errors = pd.DataFrame(keys, columns=["step", "layer", "head"])
    errors["error_norm"] = [9, 8, 7, 1, 3, 2, 5, 6, 4, 2, 1, 3]
    capture = SimpleNamespace(step=1, layer=1, path=Path("made-up.xz"))
    assert picked_for(capture, errors) == 1
    capture.step = 2
    assert picked_for(capture, errors) == 2
    capture.step = 3
    with pytest.raises(UserError, match="made-up: step 3 is not in the run's window"):
        picked_for(capture, errors)


def test_norms_end_before_the_onset():
    assert norms(made_up(onset=349)).index[-1] == 299


def test_growth_before_step_600_is_no_take_off():
    run = made_up()
    run.probes["sigma_q"] = run.probes.sigma_q.where(run.probes.step >= 300, 0.4)
    assert fastest(run) == 1 and take_offs(run).empty


def test_correlations_are_of_ranks():
    one, other = pd.Series([1, 2, 3]), pd.Series([1, 2, 300])
    assert rank_correlations({("a", 0): one, ("b", 0): other}).correlation[0] == pytest.approx(1)
