"""Remedies on captures: gradients, errors, centred keys, and the word on an arm."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lowprec.attention.reference import oracle
from lowprec.evidence import survival
from lowprec.records.files import data_root
from lowprec.studies import dated
from lowprec.studies.rivals import (
    CAPTURES,
    PARAMETERS,
    RANDOM,
    REMEDIES,
    centred,
    delta_error,
    effect,
    exact_gradient,
    gradient_error,
    judged,
    left,
    load_captures,
    query_gradient,
    shares,
)
from lowprec.studies.stabilised import retrace
from lowprec.training.capture import Capture


@pytest.fixture(scope="module")
def healthy():
    return Capture.load(data_root() / "captures" / "fa2-b-healthy-seed4-1580.xz")


def test_the_gradient_is_the_one_that_autograd_finds(healthy):
    x, w, k, v, do = (healthy.tensors[n].double() for n in ("x", "w_q", "k", "v", "do"))
    w.requires_grad_()
    q = torch.einsum("stc,hdc->shtd", x, w)
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    p = (healthy.scale * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    (p @ v).backward(do)
    dq = oracle(q.detach(), k, v, scale=healthy.scale, do=do).dq
    torch.testing.assert_close(query_gradient(healthy, dq), w.grad, rtol=1e-9, atol=1e-15)


def test_an_exact_gradient_has_no_error_and_no_gradient_one_of_one(healthy):
    exact = exact_gradient(healthy)
    t = retrace(healthy)
    assert 0 < gradient_error(healthy, t, exact) < 0.1
    t.dq = torch.zeros_like(t.dq)
    assert gradient_error(healthy, t, exact) == pytest.approx(1)


def test_centred_keys_have_no_mean_and_the_same_softmax(healthy):
    other = centred(healthy)
    k = other.tensors["k"].double()
    assert k.mean(2).norm() < 1e-2 * healthy.tensors["k"].double().mean(2).norm()
    p, q = (
        oracle(*(c.tensors[n] for n in ("q", "k", "v")), scale=c.scale).p_bwd
        for c in (healthy, other)
    )
    assert (p - q).abs().sum(-1).mean() < 0.02
    assert torch.equal(other.tensors["q"], healthy.tensors["q"])


def test_the_error_of_delta_is_of_the_one_used(healthy):
    t = retrace(healthy, delta_from="o_fp32")
    assert (delta_error(t) == 0).all() and (t.delta_o != t.delta_ref).any()
    t = retrace(healthy, delta_from="o")
    assert torch.equal(delta_error(t), (t.delta_o - t.delta_ref).double())


def test_what_a_remedy_leaves_is_a_share_of_the_error_and_random_ones_are_averaged(healthy):
    table = left(healthy, draws=2).set_index("change")
    assert list(table.index) == list(REMEDIES)
    exact, base = exact_gradient(healthy), retrace(healthy, delta_from="o")

    def leaves(**change):
        t = retrace(healthy, **change)
        size = delta_error(t).abs().sum() / delta_error(base).abs().sum()
        return gradient_error(healthy, t, exact), size.item()

    wrong = gradient_error(healthy, base, exact)
    error, size = leaves(delta_from="dp")
    assert table.loc["δ from P∘dP"].tolist() == pytest.approx([error / wrong, size])
    draws = [leaves(seed=seed, delta_from="o_redrawn") for seed in (0, 1)]
    (a, b), sizes = zip(*draws, strict=True)
    expected = [((a**2 + b**2) / 2) ** 0.5 / wrong, sum(sizes) / 2]
    assert a != b and table.loc[RANDOM[0]].tolist() == pytest.approx(expected)
    assert table.left["Ō in FP32"] == 1, "FA2 keeps it in FP32 anyway"


def test_a_column_of_the_recorded_table_comes_out_again():
    """But for the random roundings; as near as another CPU's order of sums leaves it."""
    table = dated.recorded("rivals", **PARAMETERS)["left"]
    assert table.groupby("capture", sort=False).size().to_dict() == dict.fromkeys(
        CAPTURES, len(REMEDIES)
    )
    name = "low-c 1230"
    then = table[table.capture == name].set_index("change").drop(index=list(RANDOM))
    again = left(load_captures()[name], 1).set_index("change").drop(index=list(RANDOM))
    assert again.left.to_dict() == pytest.approx(then.left.to_dict(), rel=0.02)
    assert again["size"].to_dict() == pytest.approx(then["size"].to_dict(), rel=0.02, abs=1e-6)


@pytest.mark.parametrize(
    ("n", "exploded", "median", "p", "word"),
    [
        (4, 0, float("inf"), 0.001, "the verdict"),
        (4, 4, 6000, 0.2, "not resolved"),
        (4, 3, 6000, 0.01, "postpones"),
        (4, 4, 1500, 0.01, "hastens"),
        (3, 3, 1500, 0.01, "the verdict"),
    ],
)
def test_the_word_on_an_arm(n, exploded, median, p, word):
    base = pd.Series(dict(n=8, exploded=8, median=3700.0, p_holm=float("nan")))
    row = dict(n=n, exploded=exploded, median=median, p_holm=p, verdict="the verdict")
    assert effect(pd.Series(row), base) == word


def test_arms_are_judged_beside_the_base():
    arms = survival.load_arms("rivals")
    names = ["decay", "o_split", "beta7", "lr_half"]
    low = survival.load_arms("mini")["low"]
    table = judged({"low": low} | {name: arms[name] for name in names}, "low").set_index("arm")
    assert table.effect.to_dict() == {
        "low": "base", "decay": "not seen in 4", "o_split": "prevents", "beta7": "not finite",
        "lr_half": "not resolved",
    }  # fmt: skip
    assert table.took_off.drop("beta7").to_dict() == {
        "low": 8, "decay": 4, "o_split": 0, "lr_half": 4
    }  # fmt: skip
    assert table.isna().took_off["beta7"], "its runs end before a head could take off"
    absent = survival.Arm("later", None, (0, 1), None)
    assert list(judged({"low": low, "later": absent, "half": arms["lr_half"]}, "low").arm) == [
        "low", "half"
    ]  # fmt: skip


def test_shares_are_of_the_probes_between_two_steps_without_some_layers():
    probes = pd.DataFrame(
        dict(step=[199, 399, 599, 599, 799], layer=[0, 0, 0, 1, 0], tied_rows=[9, 1, 2, 8, 9],
             rows=[10, 10, 10, 10, 10], delta_bias=[9, 1, -3, 4, 9.0], delta_abs=[9, 4, 4, 8, 9.0])
    )  # fmt: skip
    run = SimpleNamespace(probes=probes)
    assert shares(run, 200, 599) == pytest.approx(dict(tied=1100 / 30, bias=200 / 16, size=16 / 30))
    assert shares(run, 200, 599, [1]) == pytest.approx(dict(tied=15, bias=-25, size=8 / 20))
