"""Four bits: where ties go, the estimator's slopes, clamping, and what an arm changes."""

import dataclasses

import pytest
import torch
from test_moments import InThisProcess

from lowprec import UserError
from lowprec.numerics.formats import E1M2, Format, round_to
from lowprec.numerics.scaling import Cast, scaled
from lowprec.studies import fourbits
from lowprec.studies.clamped import Clamp, kept, lost, stored, ties

EDGES = torch.tensor([-5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5,
                      5])  # fmt: skip
NUMBERS = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_ties_go_up_as_with_thresholds_that_belong_to_the_number_above():
    x = torch.cat([EDGES, draw(2000) * 3, torch.tensor([6.0])]).clamp(-6, 6)
    want = NUMBERS[torch.bucketize(x, EDGES, right=True)]
    assert torch.equal(scaled(x, "e2m1@tensor,up"), want)
    even = scaled(x, "e2m1@tensor")
    assert (even != want).sum() == 7 and torch.equal(even, round_to(x, "e2m1"))


def test_up_is_for_nearest_alone_and_is_spelled():
    assert str(Cast.parse("e2m1@token,pow2,up")) == "e2m1@token,pow2,up"
    with pytest.raises(UserError, match="where a tie goes"):
        Cast.parse("e2m1:stochastic@token,up")


def test_e1m2_is_an_integer_of_seven_steps():
    x = torch.cat([draw(1000), torch.tensor([2.0, -2.0])]).clamp(-2, 2)
    assert torch.allclose(scaled(x, "e1m2@tensor"), (x * 3.5).round() / 3.5, atol=1e-6)
    assert (E1M2.max, E1M2.min_subnormal, E1M2.bits) == (3.5, 0.5, 4)
    with pytest.raises(UserError, match="out of range"):
        Format.custom(1, 2)


def smooth(x, k):
    """The stand-in itself between 0 and 6, whose slope `slopes` is."""
    low, high = (NUMBERS[torch.bucketize(x, NUMBERS, right=True) + i] for i in (-1, 0))
    part = 2 * (x - low) / (high - low) - 1
    return low + (high - low) / 2 * (1 + part.sign() * part.abs() ** (1 / k))


@pytest.mark.parametrize("k", (3.0, 5.0))
def test_a_slope_is_the_derivative_of_the_stand_in(k):
    x = torch.linspace(0.03, 5.97, 500, dtype=torch.float64)
    numeric = (smooth(x + 1e-6, k) - smooth(x - 1e-6, k)) / 2e-6
    mine = fourbits.slopes(x.float(), k=k, clip=1e9)
    calm = mine < 2
    assert torch.allclose(mine[calm].double(), numeric[calm], rtol=2e-3)
    assert torch.equal(fourbits.slopes(-x.float(), k=k), fourbits.slopes(x.float(), k=k))


@pytest.mark.parametrize("k", (3.0, 5.0, 10.0))
def test_the_mean_slope_is_that_of_a_fine_grid(k):
    grid = (torch.arange(400_000) + 0.5) * 6 / 400_000
    assert fourbits.slopes(grid, k=k).mean() == pytest.approx(fourbits.mean_slope(k), abs=2e-4)
    assert fourbits.slopes(grid, k=k).max() == fourbits.CLIP


def test_slopes_of_weights_follow_the_scale_of_their_column():
    w = draw(40, 6)
    cast = Cast.parse("e2m1@channel")
    by_column = [fourbits.slopes(6 * c / c.abs().max()) for c in w.T]
    assert torch.allclose(fourbits.weight_slopes(w, cast), torch.stack(by_column, 1), rtol=1e-3)


def test_a_clamp_cuts_both_ends_and_the_rest_makes_them_exact():
    x = round_to(draw(50, 40), "bf16")
    x[3, 5] = 1000.0
    inside, rest = Clamp(0.9)(x)
    assert 0.18 <= (rest != 0).double().mean() <= 0.2 and torch.equal(inside + rest, x)
    y = stored(x, "e2m1@tensor", Clamp(0.9))
    assert y[3, 5] == pytest.approx(1000.0, abs=1) and kept(x, "e2m1@tensor")["zeros"] > 0.99
    token = Clamp(0.9, "token", rest=False)
    assert torch.equal(token(x)[0][7], Clamp(0.9)(x[7:8])[0][0])
    assert not token(x)[1].any()
    assert torch.equal(Clamp(0.99, "token")(x)[0], x), "40 numbers have no such quantile"


def test_what_is_kept_lost_and_tied():
    x = torch.tensor([[6.0, 0.1875, -0.1875, 1.0], [6.0, 0.25, 0.75, 0.0]])
    assert kept(x, "e2m1@token")["zeros"] == pytest.approx(3 / 7)
    assert lost(x, "e2m1@token") == pytest.approx(3 / 7)
    share, more = ties(x, "e2m1@token")
    assert share == 2 / 8 and more == pytest.approx(0.5 / 8 / x.square().mean().sqrt().item())


SMALL = dataclasses.replace(
    fourbits.TASKS["text"], steps=20, warmup=2, width=16, length=8, batch=2, held=4
)


def loss(arm, **changes):
    arm = dataclasses.replace(fourbits.ARMS[arm], **changes)
    return fourbits.train(SMALL, arm, (1,))[0].iloc[0]


def test_arms_differ_where_they_should():
    found = {arm: loss(arm) for arm in ("fp32", "w4a8", "dge", "shuffled", "w4a4", "feed")}
    assert len({end.loss for end in found.values()}) == len(found)
    assert found["fp32"].loss == found["fp32"].exact and found["w4a4"].loss != found["w4a4"].exact
    assert loss("w4a4", last=1.0).loss == found["fp32"].loss
    assert loss("feed", attention=None).loss == found["w4a4"].loss
    assert loss("dge", slope="one").loss == found["w4a8"].loss


def test_a_gradient_has_the_slopes_of_its_arm():
    x, w = draw(1, 30, 12), draw(1, 12, 5, seed=1).requires_grad_()
    grads = {}
    for slope in ("one", "dge", "mean", "shuffled"):
        arm = dataclasses.replace(fourbits.ARMS["w4a8"], slope=slope)
        layers = fourbits.Layers(arm, torch.Generator().manual_seed(0))
        y = layers.dot({"up": w})(x, w)
        grads[slope] = torch.autograd.grad(y.square().sum(), w)[0]
    ratio = {slope: (g / grads["one"]).flatten() for slope, g in grads.items()}
    want = fourbits.weight_slopes(w.detach(), Cast.parse("e2m1@channel")).flatten()
    assert torch.allclose(ratio["dge"], want, rtol=1e-4)
    assert torch.allclose(ratio["mean"], want.mean().expand(60), rtol=1e-4)
    assert torch.allclose(ratio["shuffled"].sort().values, want.sort().values, rtol=1e-4)
    assert not torch.allclose(ratio["shuffled"], want, rtol=1e-2)


def test_time_of_products_at_the_speeds_of_their_bits():
    same = dict.fromkeys((4, 8, 16), 1.0)
    assert fourbits.cost(fourbits.SPLIT, same) == pytest.approx(100)
    fast = {16: 1, 8: 2, 4: 4}
    assert fourbits.cost(fourbits.ALL_FOUR, fast) == pytest.approx((57 + 28.7) / 4 + 14.3)
    counted = fourbits.layer_shares()
    assert all(abs(counted[m] - part) < 0.4 for m, part in fourbits.SHARES.items())


def test_an_unknown_record_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match="there is no record text"):
        fourbits.read("text", tmp_path)


def test_a_record_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(fourbits, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setitem(fourbits.TASKS, "text", dataclasses.replace(SMALL, seeds=2))
    fourbits.record(tmp_path, "text", ("fp32", "w4a4"))
    record = fourbits.read("text", tmp_path)
    assert record.loss.shape == (2, 2) and record.spread > 0
    assert record.gap("w4a4").mean == pytest.approx(
        ((record.loss.w4a4 - record.loss.fp32) / record.spread).mean()
    )
    assert record.by("exact").loss.fp32.equals(record.loss.fp32)
    assert record.above("w4a4", "fp32").tolist() == (record.loss.w4a4 > record.loss.fp32).tolist()
