"""A bias put in by hand, on made-up runs and on captured heads."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lowprec.attention.reference import oracle
from lowprec.evidence import survival
from lowprec.records.explosion import Explosion
from lowprec.studies import imposed


def run(growth, onset=None, steps=400):
    """σ of head h of layer l is h + 1 + growth * l * step, its sum of |eps| l + 1."""
    probes = pd.DataFrame(
        [(step, layer, head, head + 1 + growth * layer * step, layer + 1)
         for step in range(49, steps, 50) for layer in (0, 1) for head in (0, 1)],
        columns="step layer head sigma_q delta_abs".split(),
    )  # fmt: skip
    return SimpleNamespace(
        probes=probes, metrics=range(steps), info=dict(config=dict(lr=0.5, warmup=100)),
        explosion=Explosion(onset, True) if onset else None,
    )  # fmt: skip


def test_a_layer_has_the_bias_of_its_own_policy():
    arms = survival.load_arms("measured")
    assert imposed.by_layer(arms["size-1x"].config).tolist() == [9e-4, 7e-3, 6e-4, 4e-4, 8e-5, 0]
    assert imposed.by_layer(arms["elsewhere"].config).tolist() == [7e-3, 0, *[7e-3] * 4]
    assert (imposed.by_layer(survival.load_arms("drift")["bias-negative"].config) == -0.02).all()


def test_steps_of_the_warm_up_count_for_less_and_those_after_an_onset_not_at_all():
    had = imposed.at_full_rate(run(0))
    assert had[0] == pytest.approx(0.01) and had[99] == pytest.approx(50.5)
    assert len(had) == 400 and had[399] == pytest.approx(350.5)
    assert imposed.at_full_rate(run(0, onset=200)).iloc[-1] == pytest.approx(150.5)


def test_a_course_is_of_the_largest_head_before_both_end():
    mine, healthy = run(0.1, onset=220), run(0)
    path = imposed.course(mine, healthy, 1)
    assert path.to_dict() == pytest.approx({s: 1 + 0.05 * s for s in (49, 99, 149, 199)})
    assert (imposed.course(mine, healthy, 0) == 1).all(), "another layer"
    arms = (SimpleNamespace(by_seed=dict(zip((3, 1), x, strict=True)))
            for x in ((mine, run(0)), (healthy, healthy)))  # fmt: skip
    table = imposed.courses(*arms, 1)
    assert list(table) == [3, 1] and table[3].dropna().to_dict() == path.to_dict()
    assert len(table) == 8 and (table[1] == 1).all()


def test_sizes_are_beside_those_of_a_layer_over_the_same_steps():
    made = run(0)
    made.probes.loc[(made.probes.layer == 0) & (made.probes.step == 99), "delta_abs"] = 7
    assert imposed.sizes(made, 49, 99, 1).to_dict() == {0: 3.5, 1: 1}
    assert imposed.sizes(made, 49, 149, 1).to_dict() == {0: 2, 1: 1}
    assert imposed.sizes(made, 48, 49, 1).to_dict() == {0: 0.5, 1: 1}


def test_what_a_bias_puts_into_a_gradient(captures):
    capture = captures["fa2-a-seed1-1680"]
    found = imposed.in_gradient(capture, 0.02)
    q, k, x = (capture.tensors[name].double() for name in ("q", "k", "x"))
    mean_keys = oracle(q, k, k, scale=capture.scale).o
    eps = (capture.replay().delta_o - capture.replay().delta_ref).double()
    put, own = ((e[..., None] * mean_keys)[0, 0].T @ x[0] for e in (0.02 * eps.abs(), eps))
    assert found["length"] == pytest.approx((put.norm() / own.norm()).item(), rel=0.01)
    cosine = (put * own).sum() / put.norm() / own.norm()
    assert found["cosine"] == pytest.approx(cosine.item(), abs=0.01)
    first = torch.linalg.matrix_norm(put, 2) / put.norm()
    assert 0.95 < found["rank_one"] == pytest.approx(first.item() ** 2, abs=0.01)
    doubled = imposed.in_gradient(capture, -0.04)
    assert doubled["length"] == pytest.approx(2 * found["length"])
    assert doubled["cosine"] == pytest.approx(-found["cosine"])
