"""Sums of eps beside sums of squares: on made tables in which both are known."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import chosen

from lowprec.records.runs import load_runs
from lowprec.studies import squares
from lowprec.studies.curvature import FINE, HESSIAN


def test_a_ratio_of_totals_has_the_interval_of_its_batches():
    below = np.array([1.0, 2.0, 3.0, 2.0])
    same = squares.ratio(2 * below, below)
    assert same == (2, 0) and str(same) == "2.00 ± 0.00"
    off = np.array([0.5, -0.5, 0.5, -0.5])
    found = squares.ratio(below + off, below)
    assert found.value == pytest.approx(1)
    assert found.half == pytest.approx(3.182 * np.std(off, ddof=1) / 2 / 2, rel=1e-3)
    half = (np.stack([x, x], 1) for x in (below + off, below))
    assert squares.ratio(*half) == pytest.approx(found), "summed over all but the batches"
    assert squares.Ratio(-0.5, 1).sizes == (0, 1.5) and squares.Ratio(-2, 0.5).sizes == (1.5, 2.5)
    words = [str(squares.Ratio(*x)) for x in ((60.4, 7.2), (8.84, 0.9), (-1e-4, 0))]
    assert words == ["60 ± 7", "8.8 ± 0.9", "0.00 ± 0.00"]


@pytest.fixture
def small():
    """Two batches of ten tokens, one layer, two heads: even part h + 1 and odd part 5, over 2^b."""
    rows = []
    for batch, rounding, b in np.ndindex(2, 2, 4):
        for head in range(2):
            even = (head + 1) / 4**b * (1 + rounding)
            sums = {"as it is": even + 5 / 2**b, "flipped": even - 5 / 2**b, "kept out": 5 / 2**b}
            sums |= {HESSIAN: 1.25 * even} if batch == 0 else {}
            name = ("nearest_even", "stochastic")[rounding]
            rows += [(batch, name, b, w, 0, head, x, 8 / 2**b, even / 10) for w, x in sums.items()]
    columns = ["batch", "rounding", "bits", "way", "layer", "head", "eps", "abs", "squares"]
    shuffled = pd.DataFrame(rows, columns=columns).sample(frac=1, random_state=0)
    return squares.Signs(shuffled, tokens=10)


def test_the_parts_of_a_sum_by_batch_layer_and_head(small):
    even, odd = small.parts(1)
    assert even.shape == (2, 1, 2)
    np.testing.assert_allclose(even, [[[0.25, 0.5]]] * 2)
    np.testing.assert_allclose(odd, 2.5)
    np.testing.assert_allclose(small.parts(1, "stochastic")[0], 2 * even)
    np.testing.assert_allclose(small.law(1), even), "ten tokens times a tenth"


def test_the_even_part_by_head_bit_and_second_derivatives(small):
    table = small.heads([0, 1]).set_index(["bits", "layer", "head"])
    np.testing.assert_allclose(table.even, [12.5, 25, 6.25, 12.5])
    np.testing.assert_allclose(table.law, table.even)
    assert small.slope(range(4)) == pytest.approx(-1)
    assert small.hessian(2) == (pytest.approx(0.2), 1)
    np.testing.assert_allclose(small.tails(0), [[2 * 10 * 0.2 / 16**2, 2 * 10 * 0.4 / 16**2]])


def test_a_whole_text_says_in_which_models_the_sign_of_the_error_decides():
    wave = np.array([1, -1, 1, -1])
    table = pd.concat(
        pd.DataFrame(dict(seed=seed, even=1.0, odd=odd + spread * wave))
        for seed, odd, spread in ((0, -3.0, 0.1), (1, 0.2, 0.1), (2, -1.5, 2.0), (3, 3.0, 0.1))
    )
    found = squares.whole_text(table)
    assert found.negative.tolist() == [True, False, True, False]
    assert found.flips.tolist() == [True, False, True, True]
    assert found.sure.tolist() == [True, False, False, True]
    assert (found.nats == 4).all() and found.least[0] == pytest.approx(3 - found.half[0])


def test_a_term_beside_the_even_part_of_the_rows_that_are_asked_for():
    columns = ["bits", "follow", "first", "even"]
    rows = [(FINE, "power 0.9", 6.0, 2.0), (FINE, "power 0.9", 6.0, 2.0)]
    rows += [(FINE, "power 0.98", 1.0, 2.0), (4, "power 0.9", 100.0, 2.0)] * 2
    table = pd.DataFrame(rows, columns=columns)
    assert squares.misfit(table, 0.9) == (3, 0)
    assert squares.of_even(table, "first", bits=4, follow="power 0.9").value == 50


def test_a_site_is_beside_its_own_squares_and_beside_the_output():
    rows = [("O", 2.0, 1.0, 4.0), ("P", 6.0, 2.0, 1.0)] * 2
    columns = ["rounded", "even", "squares", "output"]
    held, beside = squares.by_site(pd.DataFrame(rows, columns=columns))
    assert list(held) == ["O", "P"] and held["P"].value == 3
    assert beside.loc["P"].tolist() == [3, 2, 0.25]


def test_the_law_of_trained_models_and_of_those_read_in_low():
    columns = ["way", "seed", "eps", "eps_abs", "eps_sq", "e_sq"]
    rows = [("FP16", 0, 2.0, 40.0, 0.5, 1.0), ("FP16", 0, 2.0, 40.0, 0.5, 1.0)]
    rows += [("LOW", 0, 6.0, 80.0, 6.0, 4.0)]
    total = squares.law(pd.DataFrame(rows, columns=columns), 2, ["way", "seed"])
    assert total.loc[("FP16", 0), ["ratio", "sum_share", "law_share"]].tolist() == [2, 5, 2.5]
    low = squares.in_low(total).loc[0]
    assert low.to_dict() == {"read": 0.5, "scaled": 1.5, "grown": 3}


def run_of(probes, steps=1000, onset=None):
    config = dict(batch_size=2, block_size=3, probe_every=10, window=[11, 40])
    explosion = SimpleNamespace(onset=onset) if onset else None
    info, metrics = dict(config=config), range(steps)
    return SimpleNamespace(probes=probes, info=info, explosion=explosion, metrics=metrics)


@pytest.fixture
def probes():
    rows = [
        (step, 0, head, bias * (step < 100), 8.0, 16, head * (step == 29))
        for step in (9, 19, 29, 39, 99, 109)
        for head, bias in enumerate((1.0, 3.0))
    ]
    columns = ["step", "layer", "head", "delta_bias", "delta_abs", "rows", "tied_rows"]
    return pd.DataFrame(rows, columns=columns)


def test_a_runs_sum_is_beside_the_least_that_squares_allow(probes):
    bound = 6 * 8**2 / 16
    assert squares.over_bound(run_of(probes), 9, 39) == pytest.approx(2 / bound)
    assert squares.over_bound(run_of(probes), 99, 200) == pytest.approx(1 / bound)
    assert squares.over_bound(run_of(probes, onset=105), 99, 200) == pytest.approx(2 / bound)
    growing = probes.assign(delta_abs=8.0 + probes["head"] / 1e6)
    found = squares.of_run(run_of(growing), 9, 39)
    assert found["share"] == pytest.approx(0.25) and found["bound"] == pytest.approx(2 / bound)
    assert found["rank"] == pytest.approx(1)


def test_tied_rows_of_a_window_would_need_so_large_an_error(probes):
    found = squares.needed_of_ties(run_of(probes), 0, 1)
    assert found == pytest.approx(dict(share=3 / 8, tied=1 / 32, needed=12)), "steps 29 and 39"
    assert squares.needed_of_ties(run_of(probes), 0, 0)["needed"] == np.inf


def test_rows_of_a_capture_in_which_two_weights_round_to_one(captures):
    c = captures["low-c-seed6-1230"]
    found = squares.of_capture(c)
    t = c.replay()
    eps = (t.delta_o - t.delta_ref).double().flatten()
    tied = torch.tensor([(row == 1).sum() > 1 for row in t.p.flatten(0, 2)])
    assert 0.4 < found["near"] == tied.double().mean() < 0.6
    assert found["carried"] == pytest.approx((eps[tied].sum() / eps.sum()).item())
    assert found["kappa"] == pytest.approx((eps.square().mean() / eps.abs().mean() ** 2).item())


def test_the_windows_and_runs_of_the_book_can_be_read(recorded):
    window = next(run for run in load_runs("windows").run if run.info["arm"] == "fa2-b")
    assert squares.needed_of_ties(window, 1, 5)["needed"] == pytest.approx(653.163, rel=1e-4)
    run = chosen(recorded, "mini", "low")[4]
    assert squares.of_run(run, 500, 1500)["bound"] == pytest.approx(0.94, abs=0.005)
