"""Row sums out of dQ: each candidate is an identity in exact arithmetic, and what it leaves."""

import math

import pandas as pd
import pytest
import torch
from conftest import family

from lowprec.attention.inputs import causal_mask
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.policy import ALL_FP32, FA2, LOW
from lowprec.records.files import data_root
from lowprec.studies import dated, row_sums
from lowprec.studies.row_sums import CHANGES, DELTAS, changed, errors, head, made
from lowprec.training.capture import Capture


def common(size=1.0, seed=0):
    return made("common part", size, torch.Generator().manual_seed(seed))


def inputs(some):
    return [some.tensors[n].float() for n in ("q", "k", "v", "do")]


def traced(some, policy, change="none"):
    q, k, v, do = inputs(some)
    return q, k, changed(change, q, k, v, do, policy, scale=some.scale)


def test_in_fp32_every_change_leaves_the_gradients_as_they_are():
    table = errors(common(), ALL_FP32)
    assert list(table.change.unique()) == list(CHANGES) and len(table) == 2 * len(CHANGES)
    assert (table.dq_fp32 < 1e-5).all() and table.dq.max() < 3e-3  # dQ is stored in BF16


@pytest.mark.parametrize("policy", [FA2, LOW], ids=["FA2", "LOW"])
@pytest.mark.parametrize("change", row_sums.POLICIES)
def test_a_change_is_the_field_of_the_policy(change, policy):
    """dQ and dK that the policy makes, and no two of them are alike."""
    q, k, v, do = inputs(common())
    value = row_sums.POLICIES[change]
    wanted = emulate(q, k, v, policy.replace(row_sum=value), do=do, scale=common().scale)
    got = traced(common(), policy, change)[2]
    assert torch.equal(got.dq, wanted.dq) and torch.equal(got.dk, wanted.dk)
    others = (traced(common(), policy, x)[2].dq for x in row_sums.POLICIES if x != change)
    assert not any(torch.allclose(got.dq, x, rtol=1e-5, atol=1e-6) for x in others)


def test_a_vector_of_the_study_is_taken_off_dq_and_nothing_else():
    q, k, t = traced(common(), FA2)
    got = traced(common(), FA2, "mean of seen keys")[2]
    back = got.dq + common().scale * t.row_sum[..., None] * row_sums.seen_mean(k)
    torch.testing.assert_close(back, t.dq, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.dk, t.dk) and not torch.allclose(got.dq, t.dq, rtol=1e-3)
    q, k, t = traced(common(), FA2, "second pass")
    got = traced(common(), FA2, "second pass, mean key")[2]
    back = got.dq + common().scale * t.row_sum[..., None] * k.mean(2, keepdim=True)
    torch.testing.assert_close(back, t.dq, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.dk, t.dk) and not torch.equal(got.dq, t.dq)


def test_the_mean_of_seen_keys_is_that_of_the_causal_rows():
    some = common()
    k = some.tensors["k"].float()
    seen = causal_mask(256, 256, "cpu").float()
    wanted = (seen / seen.sum(1, keepdim=True)) @ k
    torch.testing.assert_close(row_sums.seen_mean(k), wanted, rtol=1e-4, atol=1e-4)


def test_a_second_pass_makes_rows_sum_to_zero_as_far_as_ds_is_not_rounded_again():
    policy = FA2.replace(ds="fp32")
    for now, rest in ((policy, 1e-2), (FA2, 0.9)):
        q, k, t = traced(common(), now)
        got = traced(common(), now, "second pass")[2]
        assert got.row_sum.norm() < rest * t.row_sum.norm()
        torch.testing.assert_close(got.delta, t.delta + t.row_sum)
        torch.testing.assert_close(got.dq, common().scale * got.ds @ k)
        torch.testing.assert_close(got.dk, common().scale * got.ds.mT @ q)
    assert torch.equal(got.ds, got.ds.bfloat16().float())


def test_what_keys_have_in_common_is_what_the_changes_take_out():
    table = errors(common(10.0), FA2).set_index(["delta", "change"])
    plain, gone = table.loc[("o", "none")], table.loc[("o", "mean key")]
    assert gone.dq < 0.1 * plain.dq and gone.along < 0.1 * plain.along <= 0.1 * plain.dq
    assert table.loc[("o", "centred keys")].moved > 0 and plain.moved == 0
    assert plain.row_sum == gone.row_sum > 10 * traced(common(10.0), ALL_FP32)[2].row_sum.std()
    assert plain.dk_centred < plain.dk


def test_errors_are_shares_against_float64():
    some = common()
    q, k, v, do = (some.tensors[n] for n in ("q", "k", "v", "do"))
    right = oracle(q, k, v, do=do)
    t = emulate(q.float(), k.float(), v.float(), FA2, do=do.float())
    found = errors(some, FA2).iloc[0]
    for name in ("dq", "dk"):
        wrong = getattr(t, name).bfloat16().double() - getattr(right, name)
        assert found[name] == pytest.approx((wrong.norm() / getattr(right, name).norm()).item())


def test_made_heads_are_what_their_kind_says():
    k = common(100.0).tensors["k"].double()
    share = k.mean(2).norm() / k.square().sum(-1).mean().sqrt()
    assert share > 0.999
    some = made("negative scores", 100.0, torch.Generator().manual_seed(0))
    s = some.scale * some.tensors["q"].double() @ some.tensors["k"].double().mT
    assert s.max() < -50 and s.mean() == pytest.approx(-100, rel=0.05)
    assert made("long rows", 64.0, torch.Generator()).tensors["q"].shape == (1, 1, 64, 64)


def test_a_row_names_its_head_and_the_policy_of_the_run_that_failed():
    path = data_root() / "captures" / "low-c-healthy-seed6-1230.xz"
    table = row_sums.left("low-c-healthy-seed6-1230", Capture.load(path).first(128))
    assert not table.failing.any() and set(table.base) == {"LOW"} and set(table["head"]) == {3}
    assert table.notna().all(axis=None) and set(table.delta) == set(DELTAS)
    assert row_sums.base_of("gpt2/fa2-seed2-1750")[1] == FA2


def test_the_rule_compares_dq_on_failing_heads_of_fa2():
    rows = [
        ("a", True, "FA2", "o_fp32", "none", 6.0), ("a", True, "FA2", "o", "mean key", 0.5),
        ("a", True, "FA2", "o", "none", 9.0), ("b", False, "FA2", "o_fp32", "none", 1.0),
        ("b", False, "FA2", "o", "mean key", 1.0), ("c", True, "LOW", "o_fp32", "none", 1.0),
        ("c", True, "LOW", "o", "mean key", 1.0),
    ]  # fmt: skip
    columns = ["capture", "failing", "base", "delta", "change", "dq"]
    table = pd.DataFrame(rows, columns=columns)
    assert row_sums.against_safe(table).to_dict() == {"a": 12.0}
    both = row_sums.against_safe(table, bases=("FA2", "LOW"))
    assert both.to_dict() == {"a": 12.0, "c": 1.0}
    other = row_sums.against_safe(table.assign(dk=2 * table.dq + 1), of="dk")
    assert other.to_dict() == {"a": 6.5}


def test_families_without_a_common_part_are_not_harmed():
    q, k, v, do = family("normal", (1, 1, 128, 64))
    table = errors(head(q, k, v, do), FA2).set_index(["delta", "change"])
    assert table.dq.max() < 1.1 * table.loc[("o", "none")].dq < math.inf


def test_what_is_done_around_a_kernel_is_what_is_done_inside():
    """But for the storage of dQ before its row sums are taken off."""
    name = "gpt2/fa2-seed2-1750"
    capture = row_sums.load_captures()[name]
    around = row_sums.outside(capture).set_index(["kernel", "way"])
    assert len(around) == len(row_sums.WAYS) * len(row_sums.KERNELS)
    inside = row_sums.left(name, capture).set_index(["delta", "change"]).loc["o"]
    ours = around.loc["FA2"]
    assert ours.dq["as it is"] == pytest.approx(inside.dq["none"], rel=1e-3)
    for way, change in (("mean key", "mean key"), ("weighted key", "refined")):
        assert ours.dq[way] == pytest.approx(inside.dq[change], abs=2e-3)
        assert ours.dk[way] == pytest.approx(inside.dk["none"], rel=1e-2)
    for _, some in around.groupby("kernel"):
        some = some.droplevel("kernel").dq
        assert some["centred keys"] < 0.1 * some["as it is"]
        assert some["centred keys, weighted key"] < some["centred keys"]


def test_a_head_of_the_recorded_table_comes_out_again():
    """As near as another CPU's order of sums leaves it."""
    tables = dated.recorded("row_sums", **row_sums.PARAMETERS)
    table, of_ranges = tables["left"], tables["ranges"]
    captures = row_sums.load_captures()
    assert table.groupby("capture").size().to_dict() == dict.fromkeys(captures, 2 * len(CHANGES))
    others = tables["proposed"]
    assert others.groupby("capture").size().to_dict() == dict.fromkeys(
        captures, len(row_sums.PROPOSED)
    )
    assert of_ranges.groupby("kind")["size"].unique().map(tuple).to_dict() == row_sums.RANGES
    name = "gpt2/fa2-seed2-1750"
    then = table[table.capture == name].reset_index(drop=True)
    again = row_sums.left(name, captures[name])
    assert again[["capture", "head", "delta", "change"]].equals(
        then[["capture", "head", "delta", "change"]]
    )
    for column in ("dq", "along", "w_q", "dk"):
        assert again[column].tolist() == pytest.approx(then[column].tolist(), rel=0.02)
    then = others[others.capture == name]
    again = row_sums.proposed(name, captures[name])
    assert again.change.tolist() == then.change.tolist() == list(row_sums.PROPOSED)
    for column in ("dq", "along", "w_q", "dk"):
        assert again[column].tolist() == pytest.approx(then[column].tolist(), rel=0.05)


def test_the_recorded_table_decides_the_prediction():
    factors = row_sums.against_safe(dated.recorded("row_sums", **row_sums.PARAMETERS)["left"])
    assert len(factors) == 4 and factors.median() >= row_sums.TIMES


def test_what_others_propose_leaves_more_than_the_mean_key_in_each_failing_head_of_fa2():
    """But less than CLEAN, where the output that δ reads is not stored in BF16."""
    tables = dated.recorded("row_sums", **row_sums.PARAMETERS)
    own, others = (tables[name].query("failing and base == 'FA2'") for name in ("left", "proposed"))
    own = own.pivot(index="capture", columns=["delta", "change"], values="dq")
    others = others.pivot(index="capture", columns="change", values="dq")
    assert len(others) == len(own) == 4
    assert others.gt(own["o", "mean key"], axis=0).all(axis=None)
    less = others.lt(own["o_fp32", "none"], axis=0).all()
    assert less.to_dict() == {
        "two row sums": False, "O′ in BF16": False, "two row sums, clean δ": True,
        "O′ in FP32": True,
    }  # fmt: skip


def test_refined_leaves_less_than_safe_of_dq_and_dk_in_each_failing_head():
    """Of dK only under FA2: under LOW its error is in what scores and l are rounded to."""
    table = dated.recorded("row_sums", **row_sums.PARAMETERS)["left"]
    assert row_sums.against_safe(table, "refined", bases=("FA2", "LOW")).min() > 5
    assert row_sums.against_safe(table, "refined", of="dk").min() > 1
