"""A bias put into δ by hand: times against each other, courses beside a healthy run, one push."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec.diagnose.drift import share
from lowprec.studies import dose


def made(onset=None, steps=400, sigma=(1.0, 1.0, 1.0, 1.0), sizes=(1.0, 3.0), rate=None):
    """A run of two layers of one head, probed each 100 steps; layer 1 has `sigma`, layer 0 ones."""
    probes = pd.DataFrame(
        dict(step=step, layer=layer, head=0, sigma_q=(1.0, value)[layer],
             delta_bias=0.5 * sizes[layer], delta_abs=sizes[layer], tied_rows=0, rows=1)
        for step, value in zip(range(99, 400, 100), sigma, strict=True) for layer in (0, 1)
    )  # fmt: skip
    metrics = pd.DataFrame(dict(lr=np.full(steps, 0.5) if rate is None else rate))
    explosion = None if onset is None else SimpleNamespace(onset=onset)
    return SimpleNamespace(
        name="made", probes=probes, metrics=metrics, explosion=explosion,
        info=dict(config=dict(lr=0.5, probe_every=100)),
    )  # fmt: skip


def arm(*runs):
    return SimpleNamespace(by_seed=dict(enumerate(runs)))


def test_later_counts_a_run_that_does_not_explode_and_sooner_does_not():
    found = dose.against(
        arm(made(200), made(300), made(), made(), made(100)),
        arm(made(300), made(200), made(200), made(), made()),
    )
    assert found.later.tolist() == [False, True, True, True, False]
    assert found.sooner.tolist() == [True, False, False, False, True]
    assert found.both.tolist() == [True, True, False, False, False]
    assert found.factor.tolist() == pytest.approx([2 / 3, 1.5, 2, 1, 0.25])
    assert list(dose.against(arm(made(200)), arm(made(300), made(100))).index) == [0]
    assert dose.against(arm(made(200)), arm()).later.tolist() == []


def test_steps_count_by_their_learning_rate():
    warming = np.r_[np.linspace(0, 0.5, 200, endpoint=False), np.full(200, 0.5)]
    assert dose.full_rate(made(200, rate=warming)) == pytest.approx(99.5)
    assert dose.full_rate(made(rate=warming)) == pytest.approx(299.5)
    found = dose.against(arm(made(rate=warming)), arm(made(200, rate=warming)))
    assert found.at_full_rate[0] == pytest.approx(299.5 / 99.5) and found.factor[0] == 2


def test_shares_and_sizes_are_of_the_steps_asked_for():
    run = made(sizes=(1.0, 4.0))
    run.probes.loc[run.probes.step > 200, "delta_abs"] *= [10, 1, 10, 1]
    some = arm(run, run)
    table = dose.shares(some, 0, 250, range(2))
    assert table.to_numpy() == pytest.approx(0.5) and list(table) == [0, 1]
    assert dose.shares(some, 250, 400, [0]).loc[0, 1] == pytest.approx(share(run, 250, 400, 0))
    assert dose.sizes(some, 0, 250, 1)[0].tolist() == pytest.approx([0.25, 1])
    assert dose.sizes(some, 250, 400, 1)[0].tolist() == pytest.approx([2.5, 1])


def test_the_place_is_that_of_the_last_probe_before_the_onset():
    healthy = arm(made(sigma=(1, 2, 2, 2)), made(sigma=(1, 1, 4, 4)))
    found = dose.ratios({"a": arm(made(300, sigma=(1, 1, 6, 90)), made())}, healthy)
    assert list(found.index) == [("a", 0)] and found.iloc[0].tolist() == [1, 3]
    assert dose.by_chance(healthy, 299, 1) == [False, True]
    assert dose.by_chance(healthy, 99, 0) == [True, True]


def test_a_course_beside_a_healthy_run():
    run, healthy = made(350, sigma=(1, 2, 6, 8)), made(sigma=(1, 2, 2, 2))
    path = dose.course(run, healthy, 1)
    assert path.to_dict() == {99: 1, 199: 1, 299: 3}
    assert dose.notice(run, path) == 51 and np.isnan(dose.notice(run, path, above=4))
    assert dose.at_dose(run, path, 250) == 1 and dose.at_dose(run, path, 301) == 3


class Captured:
    """A capture of one head whose ε is given: all rows alike but for the sign."""

    scale = 1.0

    def __init__(self, eps):
        rows = torch.ones(1, 1, len(eps), 2)
        self.tensors = dict(q=rows, k=rows, x=torch.ones(1, len(eps), 3))
        self.eps = torch.tensor(eps)[None, None]

    def replay(self):
        return SimpleNamespace(delta_o=self.eps, delta_ref=torch.zeros_like(self.eps))


def test_a_push_of_one_sign_is_longer_than_one_that_mostly_cancels():
    found = dose.gradient(Captured([1.0, 1.0, 1.0, -1.0]))
    assert found == pytest.approx(dict(rank_one=1, cosine=1, length=2), abs=1e-5)
    assert dose.gradient(Captured([-2.0, -1.0]))["cosine"] == pytest.approx(-1)
