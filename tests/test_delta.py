"""Replays of captures under other policies: what δ is wrong by, and what becomes of the rows."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import family

from lowprec import UserError
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.policy import ALL_FP32, FA2, LOW, PrecisionPolicy
from lowprec.records.files import data_root
from lowprec.studies import delta
from lowprec.training.capture import Capture


@pytest.fixture(scope="module")
def captures():
    names = ("fa2-b-seed4-1580", "low-c-healthy-seed6-1230")
    return {n: Capture.load(data_root() / "captures" / f"{n}.xz").first(128) for n in names}


@pytest.fixture(scope="module")
def table(captures):
    policies = {"FP32": ALL_FP32, "own": lambda c: c.policy, "δ from O*": "FA2+delta_from=o_fp32"}
    policies |= {s: ALL_FP32.replace(**{s: "bf16"}) for s in ("o", "l")} | {"FA2": FA2}
    return delta.replays(captures, policies)


def test_rows_are_policies_by_captures_in_their_order(table, captures):
    assert list(table.index.unique("policy")) == ["FP32", "own", "δ from O*", "o", "l", "FA2"]
    assert list(table.loc["own"].index) == list(captures)
    assert table.notna().all(axis=None)


def test_a_policy_may_depend_on_the_capture(table, captures):
    failing, healthy = captures
    assert table.loc[("own", failing)].equals(table.loc[("FA2", failing)])
    assert not table.loc[("own", healthy)].equals(table.loc[("FA2", healthy)])


def test_what_rounds_nothing_is_next_to_exact(table):
    assert (table.loc["FP32"].row_sums < 1e-3 * table.loc["FA2"].row_sums).all()
    assert (table.loc["FP32"].error < table.loc["FA2"].error).all()


def test_the_error_that_is_read_is_not_the_one_that_o_has(table):
    assert (table.loc["δ from O*"].read == 0).all() and (table.loc["δ from O*"].eps > 0).all()
    assert (table.loc["FA2"].read == table.loc["FA2"].eps).all()


def test_o_alone_moves_rows_by_its_error_of_delta_and_nothing_else_does(table):
    assert (table.loc["o"].rest < 1e-2 * table.loc["o"].eps).all()
    assert (table.loc["FA2"].rest > 0.1 * table.loc["FA2"].eps).all()


def test_a_row_sums_to_minus_the_error_of_delta():
    q, k, v, do = family("normal", (1, 1, 64, 64))
    t = emulate(q, k, v, ALL_FP32.replace(o="bf16"), do=do)
    eps = (t.delta - t.delta_ref).double()
    torch.testing.assert_close(delta.row_sums(t), -eps, rtol=1e-3, atol=1e-6)
    exact = oracle(q, k, v, do=do)
    assert delta.row_sums(exact).abs().max() < 1e-12


def test_a_wrong_row_sum_is_a_factor_of_its_row():
    q, k, v, do = family("normal", (1, 1, 64, 64))
    t = emulate(q, k, v, ALL_FP32.replace(l="bf16"), do=do)
    factor = delta.row_factor(t)
    assert 2**-10 < factor.abs().max() <= 2**-8
    torch.testing.assert_close(
        t.o.double() * (1 + factor[..., None]), oracle(q, k, v).o, rtol=1e-5, atol=1e-5
    )
    assert (delta.row_factor(emulate(q, k, v, ALL_FP32, do=do)).abs() < 1e-6).all()


def test_a_format_with_fewer_bits_makes_a_larger_error(captures):
    for capture in captures.values():
        fp8, bf16, fp32 = (delta.in_format(capture, site) for site in ("e4m3fn", "bf16", "fp32"))
        assert fp8.shape == (128,) and not fp32.any()
        assert 8 < np.abs(fp8).sum() / np.abs(bf16).sum() < 32  # four bits fewer


def test_the_scale_of_a_format_is_taken_out_again(captures):
    capture = next(iter(captures.values()))
    own = delta.replays({"": capture}, {"": ALL_FP32.replace(o="bf16")}).eps.iloc[0]
    assert np.sqrt((delta.in_format(capture, "bf16") ** 2).mean()) == pytest.approx(own, rel=1e-6)


def test_an_output_in_fp32_and_a_delta_from_one(captures):
    changes = dict(o="fp32"), dict(delta_from="o_fp32")
    for capture in captures.values():
        assert delta.same_backward(capture, FA2, *changes)
        assert not delta.same_backward(capture, LOW, *changes)
        assert not delta.same_backward(capture, "FA2", {}, changes[1])


def made_run(policy="FA2"):
    probes = pd.DataFrame(
        [(step, layer, head, layer + 0.5, 10.0, 0, 4) for step in (49, 99, 149) for layer in (0, 1)
         for head in (0, 1)],
        columns=["step", "layer", "head", "delta_bias", "delta_abs", "tied_rows", "rows"],
    )  # fmt: skip
    return SimpleNamespace(name="made", probes=probes, policy=PrecisionPolicy.parse(policy))


def test_the_sum_that_is_read_is_of_its_steps_and_layer():
    assert delta.read_sum(made_run(), 49, 149, 1) == 6
    assert delta.read_sum(made_run(), -1, 99, 0) == 2
    with pytest.raises(UserError, match="made has no probe after step 149"):
        delta.read_sum(made_run(), 149, 180, 1)


def test_a_bias_by_hand_is_read_in_the_place_of_the_rounding():
    run = made_run("FA2+delta_from=o_fp32+delta_bias=0.02")
    assert delta.read_sum(run, 49, 149, 1) == pytest.approx(0.02 * 40)
