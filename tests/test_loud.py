"""Pairs of a gated layer and their bound; channels made louder; those of a tiny Llama."""

import dataclasses
import math

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from lowprec import UserError
from lowprec.numerics.formats import E4M3
from lowprec.studies import gated, loud, loud_real, loud_wide

IMAGES = dataclasses.replace(loud.TASKS["images"], plain=3, steps=4, hidden=8, seeds=2)
RETURNS = dataclasses.replace(loud.TASKS["returns"], plain=3, steps=40, hidden=8, seeds=2)


def test_no_input_makes_more_of_a_pair_than_its_bound():
    draw = torch.Generator().manual_seed(0)
    g, u = torch.randn(2, 30, 5, generator=draw, dtype=torch.float64)
    x = 40 * F.normalize(torch.randn(20_000, 5, generator=draw, dtype=torch.float64), dim=1)
    share = gated.KINDS["SwiGLU"](x @ g.mT, x @ u.mT).abs().amax(0) / gated.bound(g, u, 40)
    assert share.max() <= 1 and share.min() > 0.9


def test_an_aligned_pair_has_twice_the_bound_of_one_at_right_angles():
    g, u = torch.eye(2)
    assert gated.bound(g, 3 * g) == 2 * gated.bound(g, 3 * u) == 3
    assert gated.bound(g, -3 * g, 2) == 12


@pytest.mark.parametrize("pair", gated.PAIRS)
def test_gated_pairs_grow_with_the_square_and_others_do_not(pair):
    power = {kind: gated.slope(kind, pair, pairs=4, inputs=200).mean() for kind in gated.KINDS}
    assert power["SwiGLU"] == pytest.approx(2, abs=0.01)
    assert power["ReGLU"] == pytest.approx(2) and power["GELU"] == pytest.approx(1, abs=0.01)


def test_decay_takes_the_same_from_both_eigenvalues():
    assert gated.shrunk(0.5, 0.0) == 0.5 and gated.shrunk(0.5, 0.25) == 1
    assert gated.shrunk(0.5, 0.1) == pytest.approx((0.65 - 0.15) / 0.8)
    assert gated.fitted(0.5, 0.1) == pytest.approx(gated.shrunk(0.5, 0.1), abs=1e-4)
    assert gated.fitted(-0.5, 0.3) == pytest.approx(-1, abs=1e-4)


def test_a_neuron_starts_from_its_own_draw():
    cos, size = gated.neurons(0.5, 0.0, starts=3, rows=64, steps=5)
    again, _ = gated.neurons(0.5, 0.0, starts=2, rows=64, steps=5)
    assert torch.allclose(cos[:2], again) and len(set(cos.tolist())) == 3 and (size > 0).all()


def test_whole_numbers_by_group():
    x = torch.tensor([[127.0, 0.4, -0.6], [12.7, 0.06, 0.0]])
    assert torch.equal(loud.Integers("tensor")(x), torch.tensor([[127.0, 0, -1], [13, 0, 0]]))
    by_token = torch.tensor([[127.0, 0, -1], [12.7, 0.1, 0]])
    assert torch.allclose(loud.Integers("token")(x), by_token)
    assert torch.allclose(loud.Integers("channel")(x)[:, 2], x[:, 2])
    assert torch.equal(loud.Integers("token")(torch.zeros(2, 2)), torch.zeros(2, 2))


def ends(began, arm, octaves):
    return loud.go_on(began, arm, octaves).loss.tolist()


@pytest.mark.parametrize("task", [IMAGES, RETURNS], ids=["images", "returns"])
def test_louder_by_a_power_of_two_changes_no_bit_where_nothing_is_rounded(task, monkeypatch):
    monkeypatch.setitem(loud.ARMS, "bf16", "fp32")
    began = loud.start(task, (1, 2))
    assert ends(began, "bf16", 12) == ends(began, "fp32", 0)


def test_smooth_changes_hardly_a_digit_where_nothing_is_rounded(monkeypatch):
    for arm in loud.DIVIDES:
        monkeypatch.setitem(loud.ARMS, arm, "fp32")
        began = loud.start(IMAGES, (1, 2))
        assert ends(began, arm, 12) == pytest.approx(ends(began, "fp32", 0), rel=1e-5)


def test_every_arm_stores_and_every_plan_names_arms():
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    for text in loud.ARMS.values():
        stored = loud.storing(text, torch.Generator().manual_seed(0))(x)
        assert stored.shape == x.shape and not torch.equal(stored, x)
    planned = {
        arm for plan in (loud.STEADY, loud.RETURNS) for arms in plan.values() for arm in arms
    }
    assert planned == set(loud.ARMS)


def test_the_loudest_channel_is_made_louder():
    began = loud.start(IMAGES, (1, 2))
    factor, top = loud.louder(began, 8)[0], began.look()[0]
    assert factor.shape == (2, 1, 8) and factor.sum().item() == 2 * (7 + 256)
    assert torch.equal(factor.argmax(-1), top.argmax(-1))
    planted = loud.louder(loud.start(RETURNS, (1, 2)), 8)[0]
    assert (planted[..., -1] == 256).all() and planted.sum().item() == 2 * (8 + 256)


def test_marks_come_when_they_return_and_only_the_planted_pair_reads_them():
    at = RETURNS.plain + loud.PERIOD // 2
    assert RETURNS.returns(at) and not RETURNS.returns(at + 1)
    images, labels = RETURNS.rows(at, 1)
    assert (images[: loud.MARKED, 0, 0, 0] == 1).all() and (labels[: loud.MARKED] == 0).all()
    assert RETURNS.rows(at + 1, 1)[0][:, 0, 0, 0].abs().max() == 0
    began = loud.start(RETURNS, (1, 2))
    for name in ("gate0", "up0"):
        held = began.weights[name]
        assert (held[:, 0, -1] == RETURNS.reads).all() and held[:, 1:, -1].abs().max() == 0
        assert held[:, 0, :-1].abs().max() == 0


def test_a_short_history_cuts_what_returns():
    began = loud.start(RETURNS, (1, 2))
    gap = {
        arm: loud.go_on(began, arm, 12)["first"] - loud.go_on(began, "fp32", 0)["first"]
        for arm in ("current", "delayed16")
    }
    assert gap["delayed16"].abs().max() > 10 * gap["current"].abs().max()


def test_language_is_gated_and_cosines_are_followed(monkeypatch):
    small = loud.Language(seeds=1, plain=4, width=16, length=8, batch=2)
    shapes = {n: tuple(w.shape) for n, w in small.init(torch.Generator()).items()}
    assert shapes["gate0"] == shapes["up0"] == (16, 48) and shapes["down1"] == (48, 16)
    monkeypatch.setitem(loud.LONG, "language", small)
    table = loud.cosines("language", 1.0, parts=2)
    assert table.step.tolist() == [0, 2, 4]
    assert table["tail"].between(0, 1).all() and table.rank_norms.abs().max() <= 1


def test_ranks_are_those_of_spearman():
    x, y = torch.tensor([1.0, 5, 3, 9]), torch.tensor([2.0, 8, 1, 9])
    assert float(loud.ranked(x, y)) == pytest.approx(0.8)
    assert float(loud.ranked(x, -(x**3))) == pytest.approx(-1)


def test_a_record_reads_as_it_was_made(tmp_path, monkeypatch):
    learns = dataclasses.replace(IMAGES, plain=60, lr=0.01)
    monkeypatch.setitem(loud.TASKS, "images", learns)
    monkeypatch.setattr(loud, "STEADY", {8: ("current",)})
    loud.record(tmp_path, "images")
    held = loud.read("images", tmp_path)
    assert held.end("current", 8).index.tolist() == [900, 901] and held.gap("fp32", 0).eq(0).all()
    assert held.measured("current", 8).value == pytest.approx(held.spreads("current", 8).mean)
    with pytest.raises(UserError, match="there is no arm int8"):
        held.end("int8", 8)
    with pytest.raises(UserError, match="there is no record returns"):
        loud.read("returns", tmp_path)


# A pretrained Llama


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=32, vocab_size=32)
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


TOKENS = torch.arange(20) % 7


def test_losses_are_the_models_own_and_hooks_are_taken_back(llama):
    own = llama(TOKENS[None], labels=TOKENS[None]).loss
    assert loud_real.token_losses(llama, TOKENS).mean() == pytest.approx(own.item(), rel=1e-5)
    coarse = loud_real.token_losses(llama, TOKENS, "e2m1")
    assert not torch.equal(coarse, loud_real.token_losses(llama, TOKENS))
    assert not llama.model.layers[0].mlp.down_proj._forward_pre_hooks


def test_what_a_layer_reads_is_within_the_bound_of_its_pairs(llama):
    for layer, a in enumerate(loud_real.inputs_of(llama, TOKENS)):
        found = loud_real.explained(a, *loud_real.pairs(llama, layer))
        assert 0 < found["met_quiet"] < found["met"] <= 1 and found["loudest"] == a.abs().max()
        assert a[found["token"]].abs().max() == found["loudest"]


def test_a_scale_that_has_forgotten_cuts_the_first_token():
    a = torch.tensor([[[1000.0, 1.0], [7.0, 3.0], [2.0, 1.0]]])
    stored = loud_real._stored("stale")(a)
    assert stored[0, 0, 0] == 7 and stored[0, 1, 0] == 7
    kept = loud_real._stored("int8-but-first")(a)
    assert torch.equal(kept[:, 0], a[:, 0]) and kept[0, 1, 0] == 7


def test_zeros_and_returns_by_hand():
    a = torch.tensor([[448.0, 2.0**-11, 0.0, 1.0]])
    assert loud_real.zeros(a, "e4m3_saturate@tensor") == pytest.approx(1 / 3)
    x = torch.ones(4, 2)
    x[0, 0] = 1000.0
    text = f"{loud.E4}@tensor,delayed2"
    assert loud_real.returned(x, text, 1, size=2) == 1
    assert loud_real.returned(x, text, 2, size=2) == pytest.approx(1 / 1000)
    assert E4M3.max == 448 and math.isclose(loud_real.returned(x, f"{loud.E4}@tensor", 9, 2), 1)


def test_a_wide_models_channel_is_loud_only_at_returns(tmp_path):
    sizes = dict(width=16, length=8, batch=2, seeds=2, plain=3, steps=40, layers=1, classes=64)
    task = dataclasses.replace(loud_wide.TASK, heads=2, path=loud.Text.path, **sizes)
    loud_wide.record(tmp_path, task, arms=("fp32", "current", "delayed16"))
    table = pd.read_parquet(tmp_path / "wide.parquet").set_index(["arm", "seed"])
    away = (table - table.loc["fp32"]).abs().groupby("arm").mean()
    assert away.loud["delayed16"] > 3 * away.loud["current"] > 0
