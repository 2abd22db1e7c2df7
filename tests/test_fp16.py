"""How runs in FP16 fail: on made tables of which the answer is known, and on records."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec.evidence.survival import load_arms
from lowprec.studies import crossed, fp16


def probed(bias, layer=fp16.LAYER):
    """A run of 600 steps, two heads, 10 rows a probe; errors of each probe in a span alike."""
    probes = pd.DataFrame(
        [(step, where, head, b if where == layer else 7.0, 2.0, 1, 10)
         for step, b in zip((199, 399, 599), bias, strict=True)
         for where in (0, layer) for head in (0, 1)],
        columns=["step", "layer", "head", "delta_bias", "delta_abs", "tied_rows", "rows"],
    )  # fmt: skip
    return SimpleNamespace(name="made", probes=probes, metrics=pd.DataFrame(index=range(600)))


def test_a_course_has_means_per_row_of_the_second_layer():
    found = fp16.course(probed([0.5, 1.0, 2.0]))
    assert found.index.tolist() == [199, 399, 599]
    assert found.delta_bias.tolist() == pytest.approx([0.05, 0.1, 0.2])
    assert found.share.tolist() == pytest.approx([0.25, 0.5, 1.0])
    assert found.tied_rows.tolist() == pytest.approx([0.1] * 3)


def test_courses_of_arms_beside_each_other():
    arms = {
        "a": SimpleNamespace(by_seed={0: probed([1, 1, 1.0]), 1: probed([2, 1, 0.5])}),
        "b": SimpleNamespace(by_seed={0: probed([0.5, 1, 1.0]), 1: probed([0.5, 1, 1.0])}),
    }
    found = fp16.Courses(arms)
    assert found.over("a", "delta_bias", [199, 599]).tolist() == pytest.approx([0.1, 0.125])
    assert found.over("a", "share", [199, 599]).tolist() == pytest.approx([0.5, 0.625])
    ratio = found.beside("delta_bias", ("a", [199]), ("b", [199]))
    assert ratio.to_dict() == pytest.approx({0: 2, 1: 4})
    assert found.percent("a", [199]) == "50.0 to 100.0"


PASSES = pd.DataFrame(
    [(0, 10, "blocks.0.qk", 5.0, 0), (0, 10, "blocks.1.qk", 9.0, 3), (0, 20, "blocks.0.qk", 6.0, 0),
     (0, 20, "blocks.0.proj", 2.0, 1), (0, 20, "blocks.1.qk", 8.0, 2), (1, 10, "blocks.0.qk", 4, 0),
     (1, 10, "blocks.1.qk", 3.0, 0)],
    columns=["seed", "step", "place", "largest", "lost"],
)  # fmt: skip


def test_what_is_lost_first_is_that_of_the_last_step():
    assert fp16.first_lost(PASSES) == {0: "blocks.0.proj", 1: None}


def test_products_and_what_norms_allow():
    tops = fp16.products(PASSES)
    assert tops.loc[(0, 20)].tolist() == [6, 8] and tops.loc[(1, 10)].tolist() == [4, 3]
    probes = pd.DataFrame(
        dict(step=[8, 8, 8, 30], layer=[0, 0, 1, 0], sigma_q=[1.0, 2, 3, 9], sigma_k=[1.0, 1, 2, 9])
    )
    run = SimpleNamespace(probes=probes, info={"config": {"n_embd": 4}})
    found = fp16.looseness({1: run}, tops.loc[[1]])
    assert found.loc[(1, 10)].tolist() == pytest.approx([2 * 4 / 4, 3 * 2 * 4 / 3])
    assert found.index.names == ["seed", "step"]


def test_how_recorded_runs_in_fp16_end():
    stored, clean = (
        fp16.ends(load_arms("rivals")["fp16"]),
        fp16.ends(load_arms("fp16")["fp16_o_fp32"]),
    )
    assert (stored.take_off < stored.onset).all() and stored.high.isna().all()
    assert (stored.steps == stored.onset + 1).all(), "the first NaN is the last step"
    assert clean[["take_off", "high", "onset"]].isna().all(axis=None) and set(clean.steps) == {7000}


def test_in_bf16_the_loss_first_rises_at_the_onset():
    found = fp16.ends(load_arms("mini")["low"])
    assert (found.high <= found.onset).all() and (found.take_off < found.high).all()


def test_errors_in_fp16_are_an_eighth_and_what_is_handed_on_follows_the_dtype(captures):
    c = next(c for name, c in captures.items() if "healthy" in name)
    low = fp16.error_size(c, "LOW", 1.0)
    for scale in (2.0**10, 2.0**20):
        assert 0.1 < fp16.error_size(c, "FP16", scale) / low < 0.15
    handed = {name: fp16.handed_error(c, name) for name in fp16.HANDED}
    assert handed["LOW"] > 1.5 * handed["FP32, outside BF16"]
    assert handed["FP32, outside BF16"] / handed["FP32, outside FP16"] == pytest.approx(8, rel=0.05)
    assert handed["LOW, outside FP16"] == pytest.approx(handed["LOW"], rel=0.01)


def parts(noise=0.0):
    """Four parts of two arms, in FP16 a 64th of the sum, an eighth of the size."""
    generator = np.random.default_rng(0)
    rows = [
        (way, arm, 0, part, 0, 64, s * (4 if arm == "b" else 1) * (1 + noise * x), s**0.5, s)
        for way, s in (("LOW", 1.0), ("FP16", 1 / 64)) for arm in "ab"
        for part, x in enumerate(generator.normal(size=4))
    ]  # fmt: skip
    columns = ["way", "arm", "seed", "part", "head", "rows", "eps", "eps_abs", "e_sq"]
    return pd.DataFrame(rows, columns=columns)


def test_totals_of_models_in_both_formats():
    total, both = crossed.totals(parts()), crossed.in_fp16(parts())
    assert total.h["LOW", "a", 0] == 1 and total.h["FP16", "b", 0] == 4
    assert both.loc[("a", 0)].to_dict() == pytest.approx(
        dict(eps=1 / 64, eps_abs=1 / 8, e_sq=1 / 64, h=1)
    )
    nats = crossed.nats(parts(), block_size=2)
    assert nats["LOW", "b", 0] == pytest.approx(16 / (64 * 4 / (crossed.CHUNK * 2)))


def test_how_sure_totals_are_goes_with_the_spread_of_parts():
    assert crossed.unsure(parts()).max() == 0
    wide, narrow = (crossed.unsure(parts(noise)) for noise in (0.2, 0.1))
    assert (wide > 1.5 * narrow).all()
    one, low, high = crossed.least(parts(0.1), ["a", "b"])
    assert one == crossed.in_fp16(parts(0.1)).h.min() and low < one < high
    assert crossed.least(parts(), ["a"]) == pytest.approx((1, 1, 1))


def test_a_replay_scales_with_its_gradient(captures):
    c = next(iter(captures.values()))
    one, four = (fp16.replayed(c, "ALL_FP32", scale) for scale in (1.0, 4.0))
    assert torch.allclose(4 * one.delta_ref, four.delta_ref, rtol=1e-4, atol=1e-6)
    assert torch.equal(one.o, four.o)
