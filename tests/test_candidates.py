"""Changes that are to keep δ right: the δ that is right, what is left of its error, its sums."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec.attention import trace
from lowprec.numerics.policy import FA2, LOW
from lowprec.records.files import data_root
from lowprec.studies import candidates
from lowprec.studies.candidates import CANDIDATES
from lowprec.training.capture import Capture

HEALTHY = "fa2-a-healthy-seed1-1680"


@pytest.fixture(scope="module")
def errors():
    name = HEALTHY
    return candidates.errors({name: Capture.load(data_root() / "captures" / f"{name}.xz")})


def test_the_right_delta_makes_a_row_of_ds_sum_to_zero():
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 24, 16, generator=g).bfloat16() for _ in range(4))
    t = trace(q, k, v, do, FA2, impl="emulate")
    p = (t.s.double() - t.lse.double()[..., None]).exp()
    dp = do.double() @ v.double().mT
    right = candidates.balanced(t, v, do)
    assert (p * (dp - right[..., None])).sum(-1).abs().max() < 1e-12
    assert (p * (dp - t.delta.double()[..., None])).sum(-1).abs().max() > 1e-4


@pytest.mark.parametrize("base", [FA2, LOW])
def test_a_change_is_one_field_of_the_base(base):
    assert candidates.with_change(base, "") == base
    for change in CANDIDATES:
        changed = candidates.with_change(base, change)
        field = change.partition("=")[0]
        assert changed != base and changed.replace(**{field: getattr(base, field)}) == base


def test_each_change_stands_beside_the_same_head_without_it(errors):
    assert list(errors.change) == ["", *CANDIDATES]
    assert set(errors.base) == {"FA2"} and not errors.failing.any()
    left = candidates.left(errors).set_index("change").left
    by_change = errors.set_index("change").error
    assert list(left.index) == list(CANDIDATES.values())
    for change, words in CANDIDATES.items():
        assert left[words] == pytest.approx(by_change[change] / by_change[""])
    assert left["δ from P∘dP"] < 0.01 < 0.3 < left["clean δ"] < 0.5


def test_the_root_mean_square_is_that_of_the_sums(errors):
    rows = (errors.squares / errors.error**2).round(6)
    assert rows.nunique() == 1 and (errors.eps.abs() <= errors["abs"]).all()


def made_runs(policy="FA2", exploded=False, duration=2000):
    """One run with two heads, whose ε sums to 1 and 3 % of its size before and after step 999."""
    steps = np.repeat(np.arange(49, 2000, 50), 2)
    probes = pd.DataFrame(dict(step=steps, delta_abs=10.0, rows=400.0, sigma_q=0.0))
    probes["delta_bias"] = np.where(steps <= 999, 0.1, 0.3)
    config = dict(probe_every=50, batch_size=2, block_size=8)
    run = SimpleNamespace(probes=probes, info=dict(config=config))
    return pd.DataFrame([dict(policy=policy, run=run, exploded=exploded, duration=duration)])


def test_sums_of_a_run_are_of_the_steps_asked_for_or_end_with_its_explosion():
    ((share, least),) = candidates.trained_sums(made_runs(), "FA2")
    assert share == pytest.approx(2)  # 8 probes at 1 % and 8 at 3 %
    assert least == pytest.approx(100 * 16 * 10 / 400)
    ((share, _),) = candidates.trained_sums(made_runs(exploded=True, duration=1000), "FA2")
    assert share == pytest.approx(1)
    assert len(candidates.trained_sums(made_runs(), "LOW")) == 0


def test_sums_of_captures_are_means_with_the_noise_of_rows():
    some = pd.DataFrame(dict(capture=["a", "b"], eps=[1.0, 0.0], abs=10.0, squares=[4.0, 1.0]))
    share, twice, law = candidates.captured_sums(some, dict(a=2, b=10))
    assert share == pytest.approx(5) and law == pytest.approx(90)
    assert twice == pytest.approx(100 * 0.05**0.5)


def test_only_what_was_trained_has_signed_sums(errors):
    runs = pd.concat([
        made_runs(str(candidates.with_change(FA2, change)))
        for change in ("", "delta_from=dp", "o=bf16:stochastic")
    ])  # fmt: skip
    table = candidates.signed(errors, runs, {HEALTHY: 16}).set_index("change")
    assert list(table.index) == ["none", "δ from P∘dP", "O rounded at random"]
    assert list(table.own) == [True, False, True]
    assert list(table.share.isna()) == [False, False, True]  # drawn anew in a replay
    assert all(runs == pytest.approx([2]) for runs in table.runs)


def test_a_norm_is_interpolated_between_two_probes():
    probes = pd.DataFrame(dict(step=[1449, 1449, 1499, 1549], sigma_q=[1.0, 2.0, 4.0, 104.0]))
    run = SimpleNamespace(probes=probes)
    assert candidates.norm_around(run, 1500) == pytest.approx((4, 6, 104))
    assert candidates.norm_around(run, 1474) == pytest.approx((2, 3, 4))
