"""Directions of rank-one sums: against stacked matrices written out, and shifts no softmax sees."""

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec.attention.reference import oracle
from lowprec.diagnose.directions import (
    along,
    mean_cosine,
    mean_keys,
    principal,
    shifted,
    step_cosines,
)
from lowprec.training.probes import QueryErrorWindow


def rows(count=20, width=5, seed=0, common=0.5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64) + common


@pytest.fixture
def factors():
    return rows(seed=1), rows(width=7, seed=2)


def stacked(a, x):
    return torch.einsum("td,tc->tdc", a, x).flatten(1)


def test_mean_cosine_is_that_of_the_stacked_matrices(factors):
    units = torch.nn.functional.normalize(stacked(*factors), dim=1)
    cosines = units @ units.T
    assert mean_cosine(*factors) == pytest.approx(cosines.fill_diagonal_(0).sum().item() / 380)
    assert mean_cosine(stacked(*factors)) == pytest.approx(mean_cosine(*factors))
    assert mean_cosine(torch.ones(3, 2)) == pytest.approx(1)


def test_principal_is_the_singular_vector_of_the_stacked_matrices(factors):
    _, s, right = torch.linalg.svd(stacked(*factors), full_matrices=False)
    direction, energy = principal(*factors)
    assert energy == pytest.approx((s[0] ** 2 / (s**2).sum()).item())
    assert abs(along(right[0].view(5, 7), direction)) == pytest.approx(1)
    assert along(factors[0].mT @ factors[1], direction) > 0


def test_a_principal_direction_has_the_sign_of_the_sum():
    for seed in range(9):
        a, x = rows(seed=seed), rows(width=7, seed=9 + seed)
        found = principal(a, x)[0]
        assert along(a.mT @ x, found) > 0 and torch.equal(found, principal(a, x)[0])


def test_the_first_row_sees_one_key():
    q, k = rows(seed=3), rows(seed=4)
    assert torch.allclose(mean_keys(q, k)[0], k[0])
    assert torch.allclose(mean_keys(0 * q, k)[-1], k.mean(0))


def weights(q, k):
    return oracle(q[None, None], k[None, None], k[None, None]).p_bwd[0, 0]


def test_equal_keys_hide_every_move_along_them():
    q, k = rows(seed=3), rows(1, seed=4).expand(20, 5)
    assert shifted(weights(q, k), k, k[0], 10.0).item() < 1e-14


def test_a_shift_is_that_of_moved_queries():
    q, k = rows(seed=3), rows(seed=5)
    mean = k.mean(0)
    length = 2.0 / (mean.norm() * 5**-0.5)
    moved = weights(q + length * mean / mean.norm(), k)
    change = (moved - weights(q, k)).abs().sum(1).mean() / 2
    assert shifted(weights(q, k), k, mean, 2.0).item() == pytest.approx(change.item())
    assert shifted(weights(q, k), k, torch.eye(5), 2.0).shape == (5,)


def test_steps_along_one_direction_have_cosine_one_and_its_sign():
    window = QueryErrorWindow(1, 2, 4, 6)
    one = [rows(8, w, seed=w).float().view(1, 1, 8, w) for w in (4, 4, 6)]
    for step, size in enumerate((1.0, -3.0, 1.0, 1.0)):
        window.update(step, 0, one[2][0], *(t.expand(1, 2, 8, 4) for t in one[:2]),
                      torch.full((1, 2, 8), size))  # fmt: skip
        window.end_step(step)
    cosines = step_cosines(window.to_table(), 0, 1)
    assert cosines.loc[0].to_numpy() == pytest.approx([1, -1, 1, 1], abs=1e-2)
    pairs = step_cosines(window.to_table(), 0, 1, span=2)
    assert list(pairs.index) == [0, 2]
    assert pairs.loc[0, 2] == pytest.approx(-1, abs=1e-2)


def test_spans_of_steps_begin_at_the_first():
    table = pd.DataFrame(
        dict(
            step=[5, 6, 7, 8],
            layer=0,
            head=0,
            error_norm=1.0,
            sketch_00=[1.0, 1, 0, 0],
            sketch_01=[0.0, 0, 1, 1],
        )
    )
    pairs = step_cosines(table, 0, 0, span=2)
    assert list(pairs.index) == [5, 7] and np.allclose(pairs, np.eye(2))


def test_steps_of_another_layer_have_no_part():
    table = pd.DataFrame(dict(step=[5, 5, 6, 6], layer=[0, 1] * 2, head=0, error_norm=1.0,
                              sketch_00=[1.0, 9, 0, 9], sketch_01=[0.0, 0, 1, 0]))  # fmt: skip
    assert np.allclose(step_cosines(table, 0, 0), np.eye(2))
