"""Ties in heads and runs: rows made by hand, whose numbers can be told beforehand."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import RUNS

from lowprec import UserError
from lowprec.evidence import claims, survival
from lowprec.studies import ties, twins


def capture(q, k, v, do=None):
    """What `ties.head` reads of a capture: one head, not scaled."""
    q, k, v = (torch.tensor(x, dtype=torch.bfloat16)[None, None] for x in (q, k, v))
    do = torch.ones_like(v) if do is None else torch.tensor(do, dtype=torch.bfloat16)[None, None]
    return SimpleNamespace(tensors=dict(q=q, k=k, v=v, do=do), scale=1.0, meta=dict(causal=True))


PAIR = dict(
    q=[[1.0, 0.0]] * 3,
    k=[[4.0, 0.0], [4.0, 0.0], [-4.0, 0.0]],
    v=[[-2.40625, 1.0], [-2.296875, -1.0], [-2.0, 1.0]],
)
"""Row 2 has two ties, those of the paper's worked addition in feature 0, of both signs in 1, and a
third key with a weight of e⁻⁸."""


def rows(**columns):
    """Rows as `ties.pool` has them, from numbers of one feature."""
    shaped = {name: torch.tensor(x, dtype=torch.float64)[:, None] for name, x in columns.items()}
    return SimpleNamespace(**shaped)


def test_a_head_has_the_ties_the_residual_and_the_error_of_the_worked_addition():
    h = ties.heads({"one": capture(**PAIR)}, "LOW")["one"]
    assert h.k[:, 0].tolist() == [1, 2, 2]
    assert ties.places(h).tolist() == [[False, False], [True, False], [True, False]]
    assert h.sign[2].tolist() == [-1, 0]
    unit = 2.0**-5  # of a sum between 4 and 8
    assert h.residual[1, 0] == 0 and h.error[1, 0] == 0.5  # halfway, to the even neighbour
    assert h.residual[2, 0].item() * unit == pytest.approx(-2 * np.exp(-8), rel=0.01)
    assert h.error[2, 0].item() == pytest.approx(-0.5 - h.residual[2, 0].item())
    assert h.keys[1] == h.keys[2] != h.keys[0]


def test_a_policy_without_ties_or_another_delta_is_refused():
    one = {"one": capture(**PAIR)}
    for policy in ("FA2", "LOW+delta_from=o_fp32"):
        with pytest.raises(UserError, match="must round scores .* and read δ from the stored"):
            ties.heads(one, policy)
    apart = {"apart": capture(**PAIR | dict(k=[[4.0, 0.0], [2.0, 0.0], [-4.0, 0.0]]))}
    with pytest.raises(UserError, match="under LOW no row ties in apart: take another policy"):
        ties.heads(apart, "LOW")


def test_pooled_rows_of_two_heads_share_no_cluster():
    found = ties.heads({"one": capture(**PAIR), "other": capture(**PAIR)}, "LOW")
    pool = ties.pool(found)
    assert pool.error.shape == (6, 2) and len(pool.keys.unique()) == 4
    assert pool.each[:, 0].tolist() == list(range(6))


def test_the_interval_of_a_mean_takes_clusters_as_units():
    x = torch.tensor([[1.0], [1], [3], [3], [9]], dtype=torch.float64)
    where = torch.tensor([[True], [True], [True], [True], [False]])
    single = ties.mean_of(x, where, torch.arange(5)[:, None])
    paired = ties.mean_of(x, where, torch.tensor([0, 0, 1, 1, 2])[:, None])
    assert (single.mean, single.clusters, single.places) == (2, 4, 4)
    assert (paired.mean, paired.clusters) == (2, 2) and paired.half > 3 * single.half
    assert paired.half == pytest.approx(12.706 * 8**0.5 / 4, rel=1e-3)
    assert single.interval == (2 - single.half, 2 + single.half)


def test_the_path_ends_with_the_error_of_the_row_and_jumps_at_its_ties():
    h = ties.heads({"one": capture(**PAIR)}, "LOW")["one"]
    sums, error = ties.path(h, 2)
    assert sums.shape == (3, 2) and torch.equal(sums[-1].double(), h.exact[2].float().double())
    assert error[-1, 0].item() == pytest.approx((h.o_acc - h.exact)[2, 0].item())
    found = ties.jumps(h)
    # At keys 0 and 1 by 0 and ½ ulp, at key 2 from ½ ulp to the error of the worked addition.
    end = abs(error[-1, 0].item())
    assert found["ties"] == pytest.approx(2**-7 / (2**-6 + end), rel=1e-3)
    assert np.isnan(found["large"])  # no other weight of ½ or more
    third = PAIR | dict(k=[[4.0, 0.0], [4.0, 0.0], [3.5, 0.0]])
    assert ties.jumps(ties.head(capture(**third), "LOW"))["large"] > 0


def test_parts_add_up_to_the_error_of_delta():
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 32, 16, generator=draw)
    h = ties.head(capture(*((4 * q).tolist(), k.tolist(), v.tolist(), do.tolist())), "LOW")
    parts = ties.parts(h)
    assert (sum(parts.values()) - h.eps).abs().max() < 0.02 * h.eps.abs().mean()
    total = ties.sums(h)
    assert total["tied"] + total["others"] == pytest.approx(total["all"])
    assert sum(total[name] for name in parts) == pytest.approx(total["all"], abs=0.02)
    assert total["chance"] == pytest.approx((h.eps.norm() / h.eps.abs().sum()).item())


def test_the_excess_of_tied_rows():
    h = SimpleNamespace(k=torch.tensor([[2], [2], [1], [1]]), eps=torch.tensor([3.0, -1, 1, -1]))
    assert ties.tied_excess(h) == 0.5
    draws = {ties.tied_excess(h, np.random.default_rng(seed)) for seed in range(20)}
    assert len(draws) > 3 and all(-2 <= x <= 2 for x in draws)


def test_a_rule_is_met_by_chance_where_the_part_is_small(monkeypatch):
    one = {"one": SimpleNamespace(eps=torch.full((64,), 1.0))}
    for part, met in ((0.5, 1.0), (0.7, 0.0)):
        monkeypatch.setattr(ties, "parts", lambda h, part=part: {"Ō": part * h.eps})
        assert ties.met_by_chance(one, 0.0, 0.6, np.random.default_rng(0), draws=51) == met


def test_constant_signs_make_the_sum_only_where_both_are_constant():
    def of(error, do):
        error, do = torch.tensor(error)[:, None], torch.tensor(do)[:, None]
        zero = torch.zeros_like(error)
        return ties.constant_part(SimpleNamespace(o=error, exact=zero, row_sum=1.0, do=do))

    assert of([1.0, 1], [2.0, 2]) == (1, 1)
    assert of([1.0, -1], [2.0, -2]) == (0, 0)
    assert of([2.0, 0], [1.0, 1]) == (1, 1)
    assert of([3.0, -1], [1.0, 1]) == (1, 0.5)  # 2 of 3 − 1, of 3 + 1


def test_powers_of_two_among_large_weights():
    h = SimpleNamespace(p=torch.tensor([[1, 0.5, 0.25, 0.75, 0.2, 0.1]]))
    assert ties.powers_of_two(h) == (2, 4)


def of_weights(p):
    p = torch.tensor(p, dtype=torch.float64)
    tied = p == 1
    k, row_sum = tied.sum(1, keepdim=True), p.sum(1, keepdim=True)
    return SimpleNamespace(p_unnorm=p, row_sum=row_sum, tied=tied, k=k)


def test_the_key_with_most_of_p_and_whether_it_is_tied():
    h = of_weights([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0.5, 0], [1, 0.5, 1, 0.5]])
    found = ties.top_key(h)
    assert (found["key"], found["seen"], found["tied"]) == (0, 3, 1)
    assert found["share"] == pytest.approx(100 * (1 + 1 / 2 + 2 / 5 + 1 / 3) / 4)
    # Key 1 is tied in 2 of 3 rows that see it, key 2 in 1 of 2.
    assert found["drawn"] == pytest.approx((2 * (1 + 2 / 3) / 2 + (1 + 1 / 2) / 2) / 3)
    assert ties.first_key(h) == pytest.approx([1 / 2, 2 / 5, 1 / 3])


def test_a_late_key_has_most_of_p_in_the_rows_that_see_it():
    h = of_weights([[1, 0, 0, 0], [1, 0, 0, 0], [0.1, 0, 1, 0], [0.1, 0, 1, 0]])
    assert ties.top_key(h)["key"] == 0
    late = ties.top_key(h, seen_by=0.25)
    assert late["key"] == 2 and late["share"] == pytest.approx(100 / 1.1)
    assert late["seen"] == 0 and np.isnan(late["tied"])  # no row ties
    assert ties.top_key(h, seen_by=0.75)["key"] == 0  # too few rows see key 2


def test_a_planted_sink_leaves_no_ties():
    low, high = ties.planted(0, seed=0, rows=400), ties.planted(8, seed=0, rows=400)
    assert low[0] < 0.01 and low[1] > 0.3
    assert high[0] > 0.7 and high[1] < 0.01
    assert ties.planted(0, seed=0, rows=400) == low


def run(ties_of, sigma, explosion=None):
    """A run with two heads and a probe every 50 steps, from lists by head."""
    steps = 50 * np.arange(len(sigma[0])) + 649
    probes = [
        dict(step=step, layer=1, head=head, sigma_q=sigma[head][i], tied_rows=ties_of[head][i],
             rows=100, delta_bias=(1 + head) * ties_of[head][i], delta_abs=50.0)
        for head in (0, 1) for i, step in enumerate(steps)
    ]  # fmt: skip
    return SimpleNamespace(
        probes=pd.DataFrame(probes), explosion=explosion, metrics=range(int(steps[-1]) + 1),
        name="run", info=dict(config=dict(probe_every=50)),
    )  # fmt: skip


def test_ties_of_the_first_head_to_take_off_by_steps_from_then():
    failing = run([[1, 1, 1, 1], [2, 3, 40, 50]], [[1, 1, 1, 1], [1, 1, 3, 9]],
                  SimpleNamespace(onset=760))  # fmt: skip
    healthy = run([[7, 7, 7, 7], [8, 8, 8, 8]], [[1, 1, 1, 1], [1, 1, 1, 1]])
    own = ties.of_first_head(failing)
    assert own.to_dict() == {-100: 0.02, -50: 0.03, 0: 0.4}  # the last probe is after the onset
    assert ties.of_first_head(failing, healthy).to_dict() == {
        -100: 0.08,
        -50: 0.08,
        0: 0.08,
        50: 0.08,
    }


def test_the_rank_correlation_of_ties_with_sums_counts_late_steps():
    one = run([[9, 9, 1, 1], [4, 4, 2, 2]], [[1] * 4] * 2)
    assert ties.rank_with_sums(one, after=700) == pytest.approx(1)
    assert ties.rank_with_sums(one, after=0) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("below", "mended", "verdicts"),
    [
        ("", "", ["not run"] * 3),
        ("x", "", ["inconclusive", "inconclusive", "not run"]),
        ("xx", "..", ["inconclusive"] * 3),
        ("xxxx", "....", ["supported"] * 3),
        ("xxx.", "...x", ["refuted", "inconclusive", "refuted"]),
        (".", "x", ["refuted", "not run", "refuted"]),
        ("....", "....", ["refuted", "inconclusive", "supported"]),
    ],
)
def test_a_smaller_largest_weight_is_judged_as_its_runs_come(below, mended, verdicts, tmp_path):
    """below, mended: a character a seed of an arm of pow2, in whose place comes a run of FA2 that
    explodes (x) or one with a clean δ that does not (.)."""
    shutil.copy(RUNS / "pow2" / "campaign.yaml", tmp_path)
    sources = {"x": RUNS / "mini" / "fa2", ".": RUNS / "mini" / "o_fp32"}
    for arm, fates in (("fa2", below), ("refined", mended)):
        for seed, fate in enumerate(fates, 2):
            run = tmp_path / f"{arm}-seed{seed}"
            shutil.copytree(f"{sources[fate]}-seed{seed}", run)
            info = json.loads((run / "run.json").read_text()) | dict(name=run.name, arm=arm)
            (run / "run.json").write_text(json.dumps(info))
    arms = survival.load_arms(str(tmp_path))
    found = claims.check(
        rounding_pow2_fails=arms["fa2"],
        rounding_pow2_onset=twins.later(arms["fa2"], survival.load_arms("mini")["fa2"]),
        rounding_pow2_refined=arms["refined"],
    )
    assert [result.verdict for result in found] == verdicts
