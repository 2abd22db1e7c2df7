"""The error of the gradient of W_Q in captured heads: what the equations say, and what is left."""

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lowprec.numerics.policy import FIELDS, PrecisionPolicy
from lowprec.records.files import data_root
from lowprec.studies import gradient
from lowprec.training.capture import Capture

ONLY_O = "ALL_FP32+o=bf16"


@pytest.fixture(scope="module")
def fa2():
    return Capture.load(data_root() / "captures" / "fa2-b-seed4-1580.xz").first(128)


def under(capture, policy):
    """The capture as if its run had had another policy."""
    policy = PrecisionPolicy.parse(policy)
    named = {name: str(getattr(policy, name)) for name in FIELDS}
    return dataclasses.replace(capture, meta=capture.meta | {"policy": named})


def test_the_equations_hold_to_float64(fa2):
    missed = gradient.residuals(fa2)
    assert missed["terms"] < missed["w_q"] < 1e-10 and missed["dq"] < 1e-10


def test_with_o_alone_all_that_is_wrong_is_the_error_of_delta(fa2):
    table = gradient.of_heads({"only O": under(fa2, ONLY_O), "FA2": fa2})
    only, own = table.loc["only O"], table.loc["FA2"]
    assert only.explained > 0.995 > own.explained
    assert only.of_p < 1e-2 < own.of_p and own.both > own.explained
    assert only.row_sums_out < 0.05 and own.row_sums_out < 0.2
    assert table.error.gt(0.01).all() and table.delta.between(1e-5, 1e-2).all()
    assert own.reproduced and table.common.nunique() == 1 and table.common.gt(1).all()


def test_rows_brought_to_zero_drop_what_all_keys_have_in_common(fa2):
    k = fa2.tensors["k"]
    same = dataclasses.replace(fa2, tensors=fa2.tensors | {"k": k[..., :1, :].expand_as(k)})
    t = same.replay("FA2", impl="emulate", device="cpu")
    assert gradient.zero_sums(t, same).double().norm() < 1e-6 * t.dq.double().norm()


def test_a_change_that_is_none_is_left_out(fa2):
    table = gradient.left({"only O": under(fa2, ONLY_O), "FA2": fa2})
    assert list(table.index) == ["p", "o", "p_bwd", "ds", *(
        f"δ from {source}" for source in ("o_fp32", "o_split", "dp")
    )]  # fmt: skip
    assert table["only O"][["p", "p_bwd", "ds"]].isna().all() and table.FA2.notna().all()
    assert table.loc["o", "only O"] < 0.05 and table.loc["p_bwd", "FA2"] == 1


def test_delta_from_the_keys_does_not_read_the_output_but_dp(fa2):
    near = gradient.nearness(fa2, {"o": ONLY_O, "dp": "ALL_FP32+dp=bf16"})
    assert near["o"] > 10 and near["dp"] < 0.1


def test_an_error_stands_beside_the_gradient_of_its_step_and_head(tmp_path):
    pd.DataFrame(
        dict(step=[5, 5, 6], layer=1, head=[0, 1, 0], error_norm=[1.0, 2, 3], grad_norm=[2.0, 2, 4])
    ).to_parquet(tmp_path / "query_error.parquet")
    table = gradient.beside(SimpleNamespace(path=tmp_path))
    assert table[1, 0].to_dict() == {5: 0.5, 6: 0.75} and table.loc[5, (1, 1)] == 1


def test_unrounded_inputs_move_the_exact_gradient(fa2):
    exact = under(fa2, "ALL_FP32")
    moved = gradient.of_heads({"as captured": exact}).inputs.item()
    rounded = {
        name: torch.einsum(
            "stc,hdc->shtd", exact.tensors["x"].float(), exact.tensors[f"w_{name}"].float()
        )
        for name in "qkv"
    }
    again = dataclasses.replace(exact, tensors=exact.tensors | rounded)
    assert 1e-4 < moved < 1 and gradient.of_heads({"unrounded": again}).inputs.item() < 1e-2 * moved
