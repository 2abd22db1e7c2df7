"""Casts with a scale, and what is built of them, against ml_dtypes and gfloat, and against torchao
and bitsandbytes where these are installed."""

import math

import gfloat
import gfloat.block
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowprec import UserError
from lowprec.numerics.formats import Format, round_to
from lowprec.numerics.recipe import CASTS, PRESETS, Adam, Recipe, linear
from lowprec.numerics.scaling import TINY, Cast, Caster, quantise, scaled

TORCHAO = "torchao is not installed: 3 MB of wheel, 26 MB unpacked, for this alone"
BITSANDBYTES = (
    "bitsandbytes is not installed: 43 MB of wheel, 125 MB unpacked, for this check alone"
)


def numbers(*shape, spread=3.0, seed=0):
    """Numbers over many octaves, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, *shape, generator=generator)
    return draw[0] * (spread * draw[1]).exp() * (draw[2] > -1)


# Text


casts = st.builds(
    Cast,
    fmt=st.sampled_from(["e4m3", "e5m2_saturate", "e2m1", "e3m4"]).map(Format.parse),
    rounding=st.sampled_from(["nearest_even", "stochastic"]),
    group=st.sampled_from(["tensor", "token", "channel", "block32"]),
    power=st.sampled_from(["exact", "pow2"]),
    history=st.sampled_from([0, 4]),
    times=st.booleans(),
    floor=st.booleans(),
)


@given(casts)
def test_a_cast_is_its_text(cast):
    assert Cast.parse(str(cast)) == cast


@given(
    st.dictionaries(st.sampled_from(CASTS), casts, max_size=3), st.sampled_from(["fresh", "stored"])
)
def test_a_recipe_is_its_text(fields, step):
    recipe = Recipe(**fields, step=step)
    assert Recipe.parse(str(recipe)) == recipe
    assert Recipe.parse(recipe) is recipe


def test_a_difference_names_fields_in_text():
    other = PRESETS["FP8"].replace(v="e4m3_saturate@block128,pow2,floor")
    assert other.diff(PRESETS["FP8"]) == {"v": ("e4m3fn_saturate@block128,pow2,floor", "fp32")}
    assert str(other) == "FP8+v=e4m3fn_saturate@block128,pow2,floor"


@pytest.mark.parametrize(
    "text, said",
    [
        ("e4m3@rows", "unknown group 'rows'"),
        ("e4m3,pow2", "has no scale: name its group"),
        ("e4m3@tensor,sqrt", "unknown option 'sqrt'"),
        ("bf16@tensor", "bf16 cannot hold a scale"),
        ("fp32@block128", "fp32 cannot hold a scale"),
        ("e4m3@block128,expand,pow2", "expand has a scale of its own"),
        ("e4m3@tensor,mx,times", "times and mx exclude each other"),
        ("e4m3@tensor,pow2,mx", "take one of pow2 and mx"),
        ("e4m3:up@tensor", "unknown rounding 'up'"),
    ],
)
def test_what_a_cast_cannot_be_is_said(text, said):
    with pytest.raises(UserError, match=said):
        Cast.parse(text)


def test_a_cast_has_no_static_scale():
    with pytest.raises(UserError, match="name a group, as @tensor"):
        Cast(Format.parse("e4m3@2^8"))


def test_a_delayed_cast_of_a_vector_is_that_of_one_row():
    a, b = (Caster(Cast.parse("e4m3_saturate@tensor,delayed3")) for _ in range(2))
    for x in torch.randn(4, 5) * torch.logspace(0, 3, 4)[:, None]:
        assert torch.equal(a(x), b(x[None])[0])


def test_what_a_recipe_cannot_be_is_said_with_its_field():
    with pytest.raises(UserError, match="recipe field v: bf16 cannot hold a scale"):
        Recipe(v="bf16@tensor")
    with pytest.raises(UserError, match="did you mean 'g_dx'"):
        Recipe().replace(gdx="bf16")
    with pytest.raises(UserError, match="step: 'later' is not one of"):
        Recipe(step="later")
    with pytest.raises(UserError, match="unknown recipe 'BF16'"):
        Recipe.parse("BF16")
    recipe = Recipe(x="e4m3_saturate@tensor,delayed16")
    recipe.require(16)
    with pytest.raises(UserError, match="recipe field x: a history of 16 casts is longer than"):
        recipe.require(15)


# Casts, bit for bit


@pytest.mark.parametrize("name, dtype", [
    ("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2),
    ("e2m1", ml_dtypes.float4_e2m1fn),
])  # fmt: skip
@pytest.mark.parametrize("group", ["tensor", "token", "channel", "block32", "block48"])
def test_a_scaled_cast_is_a_quotient_in_fp32_and_the_cast_of_ml_dtypes(name, dtype, group):
    x = numbers(64, 40)
    limit = float(ml_dtypes.finfo(dtype).max)
    flat = x.numpy()
    size = int(group.removeprefix("block")) if "block" in group else 0
    rows = {"tensor": [flat.ravel()], "token": list(flat), "channel": list(flat.T)}.get(
        group, np.split(flat.ravel(), range(size, flat.size, size or 1)) if size else None
    )
    want = []
    for row in rows:
        scale = np.abs(row).max() / np.float32(limit)
        want.append((row / scale).astype(dtype).astype(np.float32) * scale)
    want = np.stack(want).T if group == "channel" else np.concatenate(want).reshape(flat.shape)
    assert (scaled(x, f"{name}@{group}").numpy() == want).all()


@pytest.mark.parametrize("name, info", [
    ("e4m3_saturate", gf.format_info_mxfp8_e4m3), ("e5m2_saturate", gf.format_info_mxfp8_e5m2),
    ("e2m1", gf.format_info_mxfp4_e2m1),
])  # fmt: skip
def test_mx_blocks_are_those_of_gfloat(name, info):
    x = numbers(16, 32, spread=1.0)
    got = scaled(x, f"{name}@block32,mx")
    want = [gfloat.block.quantize_block(info, row, gfloat.block.compute_scale_amax)
            for row in x.double().numpy()]  # fmt: skip
    assert (got.double().numpy() == np.array(want)).all()


def test_e3m2_of_mx_is_another_format():
    # OCP's has no infinity, and so an octave more; a format without infinities is no eXmY here.
    assert Format.parse("e3m2").emax == gf.format_info_ocp_e3m2.emax - 1


def test_the_scale_of_powers_of_two_is_the_smallest_that_clamps_nothing():
    top = torch.tensor([[448.0], [448.0001], [1.0], [7 * 2.0**-40], [3e38]])
    scale = quantise(top, Cast.parse("e4m3@token,pow2")).scale
    assert scale.flatten().tolist() == [1, 2, 2.0**-8, 2.0**-46, 2.0**120]
    assert (top / scale <= 448).all() and (top / scale > 224).all()


def test_times_multiplies_by_the_inverse_which_is_another_number():
    x = numbers(64, 64)
    scale = torch.tensor(448.0 / x.abs().max().double().item(), dtype=torch.float32)
    want = round_to(x * scale, "e4m3_saturate") / scale
    assert torch.equal(scaled(x, "e4m3_saturate@tensor,times"), want)
    assert not torch.equal(scaled(x, "e4m3_saturate@tensor"), want)


def test_leading_dimensions_have_scales_of_their_own_and_vectors_one():
    x = numbers(3, 8, 16)
    each = torch.stack([scaled(part, "e4m3@tensor") for part in x])
    assert torch.equal(scaled(x, "e4m3@tensor"), each)
    assert torch.equal(scaled(x[0, 0], "e4m3@tensor"), scaled(x[0, :1], "e4m3@tensor")[0])


def test_without_a_scale_it_is_round_to():
    x = numbers(8, 8)
    assert torch.equal(scaled(x, "bf16"), round_to(x, "bf16"))
    assert torch.equal(scaled(x, "fp32"), x)


@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "e4m3fn", "e4m3_saturate", "bf16"])
def test_without_a_scale_the_rule_of_overflow_holds_however_it_rounds(fmt):
    """A gradient that is not finite has to show: by it a loss scale comes down."""
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 2.0]])
    near, fair = (scaled(x, f"{fmt}{how}", torch.Generator()) for how in ("", ":stochastic"))
    torch.testing.assert_close(fair, near, rtol=2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("group", ["", "@tensor", "@token", "@channel", "@block4"])
def test_a_cast_of_nothing_is_nothing(group):
    assert scaled(torch.zeros(0, 4), f"e4m3_saturate{group}").shape == (0, 4)


def test_stochastic_rounding_is_fair_and_takes_its_generator():
    x = torch.full((1, 4096), 0.3)
    x[0, 0] = 448
    generator = torch.Generator().manual_seed(1)
    stored = scaled(x, "e4m3:stochastic@tensor,pow2", generator)[0, 1:]
    assert sorted(set(stored.tolist())) == pytest.approx([0.28125, 0.3125])
    assert stored.double().mean().item() == pytest.approx(0.3, abs=1e-3)
    with pytest.raises(UserError, match="generator=torch.Generator"):
        scaled(x, "e4m3:stochastic@tensor")


# What goes wrong


def test_a_group_of_zeros_stays_zero_and_one_with_nan_is_lost_as_a_whole():
    x = torch.tensor([[0.0, -0.0], [1.0, math.nan], [math.inf, 2.0], [1.0, 2.0]])
    got = scaled(x, "e4m3@token")
    assert got[0].tolist() == [0, 0] and math.copysign(1, got[0, 1]) == -1
    assert got[1:3].isnan().all()
    assert got[3].tolist() == [1, 2]


@pytest.mark.parametrize("option", ["", ",pow2", ",mx", ",times", ",pow2,times", ",expand"])
@pytest.mark.parametrize("top", [1e-45, 1e-40, 2.0**-126, 1e-30, 1e30, 3e38])
def test_no_size_of_a_group_makes_its_scale_zero_or_infinite(option, top):
    q = quantise(torch.tensor([[top, top / 3]]), Cast.parse("e4m3_saturate@tensor" + option))
    assert (q.scale.isfinite() & (q.scale > 0)).all()
    assert q.values("times" in option).isfinite().all()
    assert "times" in option or (q.scale >= TINY).all()


def test_floor_keeps_what_would_be_lost_and_no_zero():
    x = torch.tensor([[448.0, 1e-4, -1e-4, 0.0]])
    assert scaled(x, "e4m3@tensor").tolist() == [[448, 0, 0, 0]]
    assert scaled(x, "e4m3@tensor,floor").tolist() == [[448, 2.0**-9, -(2.0**-9), 0]]


def test_beyond_the_largest_number_the_format_decides():
    caster = {name: Caster(Cast.parse(f"{name}@tensor,delayed1"))
              for name in ("e4m3", "e4m3_saturate", "e5m2")}  # fmt: skip
    for cast in caster.values():
        cast(torch.full((1, 2), 1.0))
    loud = torch.tensor([[4.0, 1.0]])
    assert caster["e4m3"](loud)[0, 0].isnan()
    assert caster["e4m3_saturate"](loud).tolist() == [[1, 1]]
    assert caster["e5m2"](loud)[0, 0].isinf()


def test_a_delayed_scale_is_of_the_casts_before():
    caster = Caster(Cast.parse("e4m3_saturate@tensor,delayed2"))
    got = [caster(torch.tensor([[top]])).item() for top in (100.0, 900.0, 30.0, 20.0, 9.0)]
    # max|x| as the scale has it: 448, which makes s = 1; then 100, twice 900, and 30
    tops = (448.0, 100.0, 900.0, 900.0, 30.0)
    for value, x, top in zip(got, (100.0, 900.0, 30.0, 20.0, 9.0), tops, strict=True):
        s = torch.tensor(top) / 448
        assert value == (round_to(torch.tensor(x) / s, "e4m3_saturate") * s).item()
    assert got[1] == pytest.approx(100)


def test_an_overflow_is_lost_and_no_later_cast():
    caster = Caster(Cast.parse("e5m2@tensor,delayed4"))
    caster(torch.ones(2, 2))
    assert not caster(torch.full((2, 2), math.inf)).isfinite().any()
    assert caster(torch.ones(2, 2)).tolist() == [[1, 1], [1, 1]]


def test_a_delayed_scale_does_not_hide_an_overflow_however_it_rounds():
    caster = Caster(Cast.parse("e5m2:stochastic@tensor,delayed1"), torch.Generator().manual_seed(0))
    caster(torch.ones(1, 2))
    assert caster(torch.tensor([[1.0, 3.0]])).isfinite().tolist() == [[True, False]]


def test_a_history_is_of_groups_that_stay_and_of_one_tensor():
    caster = Caster(Cast.parse("e4m3_saturate@token,delayed2"))
    caster(torch.ones(3, 2))
    with pytest.raises(UserError, match="seen 3 groups a cast and now 1: .* take @tensor"):
        caster(torch.ones(1, 2))
    with pytest.raises(UserError, match="recipe field out: .* rounds y, dx and dw"):
        Recipe.parse("FP32+out=e4m3_saturate@tensor,delayed4").casters()


def test_expand_fills_the_format_and_makes_a_narrow_group_exact():
    generator = torch.Generator().manual_seed(0)
    v = (torch.rand(64, 128, generator=generator) * math.log(30)).exp()

    def error(text):
        return ((scaled(v, text) / v - 1) ** 2).mean().sqrt().item()

    assert error("e4m3@block128,expand") < error("e4m3@block128") / 2
    q = quantise(v, Cast.parse("e4m3@block128,expand"))
    assert (q.power * 16 == (q.power * 16).floor()).all() and (q.power > 3).all()
    assert q.codes.abs().amax(-1).eq(448).all() and q.codes.amin() < 2.0**-6


def test_expand_keeps_signs_zeros_and_groups_of_one_number():
    x = torch.tensor([[-3.0, 0.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [0.0, 7.0, 0.0, 0.0]])
    assert torch.allclose(scaled(x, "e4m3@token,expand"), x, rtol=1e-6)


# The layer and the optimiser


def test_a_layer_without_rounding_is_a_product():
    x, w = numbers(4, 8).requires_grad_(), numbers(8, 6, seed=1).requires_grad_()
    g = numbers(4, 6, seed=2)
    (x @ w).backward(g)
    want = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    linear(x, w, Recipe().casters()).backward(g)
    assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])


@pytest.mark.parametrize("field, changes", [
    ("x", "y"), ("w", "y"), ("g_dx", "dx"), ("w_dx", "dx"), ("x_dw", "dw"), ("g_dw", "dw"),
])  # fmt: skip
def test_each_operand_changes_its_product_alone(field, changes):
    x, w, g = (
        numbers(4, 8, spread=1),
        numbers(8, 6, spread=1, seed=1),
        numbers(4, 6, spread=1, seed=2),
    )

    def products(recipe):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = linear(a, b, recipe.casters())
        y.backward(g)
        return {"y": y.detach(), "dx": a.grad, "dw": b.grad}

    plain, cast = products(Recipe()), products(Recipe(**{field: "e4m3@tensor"}))
    assert [name for name in plain if not torch.equal(plain[name], cast[name])] == [changes]


def test_a_gradient_with_equal_casts_is_cast_once():
    recipe = Recipe.parse("FP32+g_dx=bf16:stochastic+g_dw=bf16:stochastic")
    x, w = torch.eye(8)[None].requires_grad_(), torch.eye(8)[None].requires_grad_()
    y, g = linear(x, w, recipe.casters(torch.Generator().manual_seed(0))), numbers(1, 8, 8)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    assert torch.equal(dx, dw) and not torch.equal(dx, g)


def run(recipe, steps=20, shape=(2, 8, 16), **kwargs):
    weights = [numbers(*shape, spread=0.1), numbers(shape[0], 1, 16, spread=0.1, seed=1)]
    adam = Adam(weights, recipe, **kwargs)
    for step in range(steps):
        grads = [numbers(*w.shape, spread=1.0, seed=10 + step) for w in weights]
        weights = adam.step(weights, grads, 1e-2)
    return weights, adam


def test_without_rounding_it_is_adam():
    weights, _ = run("FP32", betas=(0.9, 0.99))
    leaves = [numbers(2, 8, 16, spread=0.1), numbers(2, 1, 16, spread=0.1, seed=1)]
    optimiser = torch.optim.Adam(leaves, 1e-2, (0.9, 0.99))
    for step in range(20):
        for leaf in leaves:
            leaf.grad = numbers(*leaf.shape, spread=1.0, seed=10 + step)
        optimiser.step()
    for mine, theirs in zip(weights, leaves, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)


def test_states_are_numbers_of_their_formats_and_seeds_are_apart():
    both, adam = run("FP32+m=e4m3_saturate@tensor,pow2+v=bf16+master=bf16")
    assert torch.equal(adam.v[0], round_to(adam.v[0], "bf16"))
    assert torch.equal(both[0], round_to(both[0], "bf16"))
    assert torch.equal(adam.m[0], scaled(adam.m[0], "e4m3_saturate@tensor,pow2"))
    assert adam.ended == [None, None]


@pytest.mark.parametrize("least, small", [(16, False), (17, True)])
def test_small_tensors_keep_fp32_states(least, small):
    """The second has 16 elements a seed."""
    _, adam = run("FP32+v=bf16", least=least)
    assert torch.equal(adam.v[0], round_to(adam.v[0], "bf16"))
    assert torch.equal(adam.v[1], round_to(adam.v[1], "bf16")) != small


def test_the_step_may_read_what_is_stored():
    fresh, stored = run("FP32+v=e2m1@tensor")[0], run("FP32+v=e2m1@tensor+step=stored")[0]
    assert not torch.equal(fresh[0], stored[0])


def test_a_state_that_is_not_finite_is_named_with_its_step_and_seed():
    weights = [torch.ones(2, 1, 4), torch.ones(2, 2, 4)]
    adam = Adam(weights, "FP32+v=e4m3@tensor")
    grads = [torch.ones(2, 1, 4), torch.ones(2, 2, 4)]
    weights = adam.step(weights, grads, 0.1)
    assert adam.ended == [None, None]
    grads[1][1, 0, 0] = 1e30
    weights = adam.step(weights, grads, 0.1)
    assert adam.ended == [None, "v of tensor 1, step 2"]
    adam.step(weights, grads, 0.1)
    assert adam.ended == [None, "v of tensor 1, step 2"]


# torchao and bitsandbytes


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao", reason=TORCHAO)


def test_states_in_fp8_are_those_of_torchao(torchao):
    from torchao.optim.subclass_fp8 import quantize_fp8

    x = numbers(64, 256)
    theirs, scale = quantize_fp8(x, 256)
    mine = quantise(x, Cast.parse("e4m3_saturate@block256"))
    assert torch.equal(theirs.float().flatten(), mine.codes.flatten())
    assert torch.equal(scale, mine.scale.flatten())
    # The difference: torchao takes no group's largest for less than 1e-12, squares of 1e-6.
    small = x * 1e-16 / x.abs().max()
    lost, kept = (
        quantize_fp8(small, 256)[0].float(),
        quantise(small, mine_cast := Cast.parse("e4m3_saturate@block256")),
    )
    assert (lost == 0).sum() > (kept.codes == 0).sum() and mine_cast.group == "block256"


def test_a_step_of_adam_in_fp8_is_that_of_torchao(torchao):
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_fp8 import OptimStateFp8

    weight = numbers(32, 256, spread=0.1)
    m, v = (OptimStateFp8.zeros(weight.shape, 256) for _ in range(2))
    adam = Adam(
        [weight[None]], "FP32+m=e4m3_saturate@block256+v=e4m3_saturate@block256", (0.9, 0.999)
    )
    mine, theirs = [weight[None]], weight.clone()
    for step in range(1, 11):
        g = numbers(32, 256, spread=1.0, seed=step)
        mine = adam.step(mine, [g[None]], torch.tensor(1e-3))
        single_param_adam(theirs, g, torch.tensor(float(step)), m, v, None, torch.tensor(1e-3),
                          0.9, 0.999, 0.0, 1e-8, False, False)  # fmt: skip
        assert torch.equal(adam.m[0][0], m.dequantize()) and torch.equal(
            adam.v[0][0], v.dequantize()
        )
        assert torch.equal(mine[0][0], theirs)


def test_an_fp8_layer_is_that_of_torchao_up_to_the_order_of_sums(torchao):
    from torchao.float8.float8_linear import Float8Linear

    layer = Float8Linear.from_float(torch.nn.Linear(64, 32, bias=False))
    x, g = numbers(16, 64, spread=1.0), numbers(16, 32, spread=1.0, seed=1)
    theirs = x.clone().requires_grad_()
    y = layer(theirs)
    y.backward(g)
    mine, w = x.clone().requires_grad_(), layer.weight.detach().mT.clone().requires_grad_()
    z = linear(mine, w, PRESETS["FP8"].casters())
    z.backward(g)
    for a, b, terms in (
        (y, z, 64),
        (theirs.grad, mine.grad, 32),
        (layer.weight.grad.mT, w.grad, 16),
    ):
        assert (a - b).abs().max() <= terms * 2.0**-24 * a.abs().max() * terms
    for cast, dtype, t in (("x", torch.float8_e4m3fn, x), ("g_dx", torch.float8_e5m2, g)):
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

        held = hp_tensor_to_float8_dynamic(t, dtype, LinearMMConfig())
        mine = quantise(t, getattr(PRESETS["FP8"], cast))
        assert torch.equal(held._data.float(), mine.codes.view(t.shape))
        assert held._scale == mine.scale


def test_the_8_bit_map_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional", reason=BITSANDBYTES)
    from lowprec.studies.forgetting import dynamic_map

    assert torch.equal(functional.create_dynamic_map(signed=False).double(), dynamic_map())


def test_the_8_bit_map_is_that_of_torchao(torchao):
    from torchao.optim.quant_utils import create_dynamic_map

    from lowprec.studies.forgetting import dynamic_map

    assert create_dynamic_map(signed=False) == pytest.approx(dynamic_map().tolist(), rel=1e-7)


def test_fp4_of_bitsandbytes_is_e2m1_but_for_its_smallest_number():
    functional = pytest.importorskip("bitsandbytes.functional", reason=BITSANDBYTES)
    theirs = functional.get_4bit_type("fp4", device="cpu").abs().unique().double() * 6
    mine = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    apart = [i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if abs(a - b) > 1e-6]
    assert apart == [1] and theirs[1].item() == pytest.approx(6 / 192)


def test_a_group_of_very_many_octaves_is_raised_to_a_sixteenth_and_comes_back():
    x = torch.tensor([[2.0**100, 2.0**-100, -1.0]])
    assert quantise(x, Cast.parse("e2m1@token,expand")).power.item() == 1 / 16
    assert scaled(x, "e2m1@token,expand")[0, 0].item() == pytest.approx(2.0**100, rel=1e-3)


def test_a_linear_layer_refuses_second_derivatives():
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in "xw")
    y = linear(x, w, Recipe().casters()).square().sum()
    with pytest.raises(UserError, match="no second derivatives"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.autograd.grad(y, x)[0].shape == x.shape


def test_the_largest_of_a_group_is_never_rounded_beyond_the_format():
    x = torch.rand(200_000, 1) * 10 + 1
    beyond = x[x / (x / 448) > 448][:1]  # by an ulp, as the scale is rounded
    up = torch.full((1, 1), 2**32 - 1)  # takes what lies above a number to the next
    seen = quantise(beyond[:, None], Cast.parse("e4m3:stochastic@tensor"), bits=up)
    assert len(beyond) and seen.codes.item() == 448


@pytest.mark.parametrize("cast", ["e4m3@tensor", "e4m3@tensor,pow2"])
def test_a_cast_refuses_16_bits(cast):
    with pytest.raises(UserError, match="takes float32 tensors, not torch.bfloat16"):
        scaled(torch.zeros(2, 3, dtype=torch.bfloat16), cast)
