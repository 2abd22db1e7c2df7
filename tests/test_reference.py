"""The references: oracle against PyTorch in float64, emulate against its specification."""

import math

import pytest
import torch
from conftest import FAMILIES, family

from lowprec import UserError
from lowprec.attention import reference
from lowprec.attention.masks import Scores
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import Format, round_to
from lowprec.numerics.policy import (
    ALL_FP32,
    CHOICES,
    FA2,
    LOW,
    PAPER,
    PRESETS,
    RELEASED,
    SITES,
    PrecisionPolicy,
)  # fmt: skip
from lowprec.numerics.scaling import scaled

NAMES = ("o", "lse", "delta", "ds", "dq", "dk", "dv")


@pytest.mark.parametrize("causal", [True, False])
def test_oracle_is_attention(inputs, causal):
    q, k, v, do = (t.double().requires_grad_() for t in inputs)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    o.backward(do.detach())
    t = oracle(q.detach(), k.detach(), v.detach(), causal=causal, do=do.detach())
    for got, wanted in zip((t.o, t.dq, t.dk, t.dv), (o, q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tile", [None, 32, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_all_fp32_has_fp32_accuracy(inputs, tile, causal):
    q, k, v, do = (t.float() for t in inputs)
    t, exact = (f(q, k, v, causal=causal, do=do, **kw) for f, kw in (
        (oracle, {}), (lambda *a, **b: emulate(*a, ALL_FP32, **b), {"tile": tile})))  # fmt: skip
    # p = exp(s - m) turns an FP32 error of s into a relative one, and s may be large
    bound = 2.0**-22 * (1 + exact.s[exact.s.isfinite()].abs().max())
    for name in NAMES:
        a, b = getattr(exact, name).double(), getattr(t, name)
        # dS cancels where keys are alike: the error is relative to what cancels
        cancels = name in ("ds", "dq", "dk")
        size = (exact.p_bwd * exact.dp).norm() * q.norm() if cancels else a.norm()
        assert (a - b).norm() <= bound * size, name


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def test_eager_mode_under_autocast_has_a_policy(inputs):
    """As book/notation.md has it: what eager mode errs by in a gradient the policy errs by."""
    q, k, v, do = inputs
    own = [t.clone().requires_grad_() for t in (q, k, v)]
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = (own[0] @ own[1].mT) * q.shape[3] ** -0.5
        p = s.masked_fill(~seen, -math.inf).softmax(-1, dtype=torch.float32)
        o = p @ own[2]
    eager = (o.detach(), *torch.autograd.grad(o, own, do))
    exact = oracle(q, k, v, do=do)
    near, far = {}, {}
    for found, policy in ((near, "FA2+s=bf16+dp=bf16+delta_from=dp"), (far, "FA2")):
        t = emulate(q, k, v, policy, do=do)
        for name, other in zip(("o", "dq", "dk", "dv"), eager, strict=True):
            right = getattr(exact, name)
            found[name] = cosine(other - right, getattr(t, name).double() - right)
    assert min(near[name] for name in ("dq", "dk", "dv")) > 0.99, near
    assert max(far[name] for name in ("dq", "dk")) < 0.9, far


# Rows of a table in book/rerun.md


def test_a_site_that_overflows_in_fp16_is_found_one_at_a_time():
    q, k, v, do = family("normal")
    broken = []
    for site in SITES:
        t = emulate(300 * q.sign(), 300 * k.sign(), v, f"ALL_FP32+{site}=fp16", do=do)
        if not all(x.isfinite().all() for x in (t.o, t.dq, t.dk, t.dv)):
            broken.append(site)
    assert broken == ["s"]


def test_a_row_sum_in_fp16_stalls_and_the_weights_sum_to_2():
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 4096, 16), torch.ones(1, 1, 4096, 16)
    for tile, l, o in ((1, 2048, 2), (None, 4096, 1)):  # noqa: E741
        t = emulate(q, k, v, "ALL_FP32+l=fp16", tile=tile, causal=False)
        assert t.l.item() == l and (t.o == o).all()


def test_partial_outputs_in_bf16_err_more_the_more_there_are():
    q, k, v, _ = family("normal", (1, 2, 512, 64))
    exact, errors = oracle(q, k, v).o, {}
    for o_acc in ("bf16", "fp32"):
        for tile in (None, 128, 32, 8):
            o = emulate(q, k, v, f"FA2+o_acc={o_acc}", tile=tile).o
            errors[o_acc, tile] = ((o - exact).norm() / exact.norm()).item()
    growing = [errors["bf16", tile] for tile in (None, 128, 32, 8)]
    assert growing == sorted(growing) and growing[-1] > 1.5 * growing[0]
    assert max(errors["fp32", tile] for tile in (None, 128, 32, 8)) < growing[0]


@pytest.mark.parametrize("tile", [None, 32])
@pytest.mark.parametrize("preset", ["PAPER", "FA2", "LOW", "RELEASED"])
def test_stored_values_are_in_their_format(inputs, preset, tile):
    t = emulate(*inputs[:3], preset, tile=tile, do=inputs[3])
    policy = PRESETS[preset]
    for site in ("s", "x", "p", "l", "o_acc", "o", "dp", "p_bwd", "ds"):
        value = getattr(t, site)
        assert torch.equal(value, round_to(value, getattr(policy, site).fmt)), site


def test_low_by_hand():
    """LOW on a row short enough to write down, against independent code."""
    q, k, v, do = family("tied", (1, 1, 16, 64))
    t = emulate(q, k, v, LOW, do=do)
    bf = lambda x: x.bfloat16().float()  # noqa: E731
    row = 15
    q, k, v, do = q[0, 0, row].float(), k[0, 0].float(), v[0, 0].float(), do[0, 0, row].float()
    s = bf(bf(k @ q) / math.sqrt(64))
    p_unnorm = (s - s.max()).exp()
    l = bf(p_unnorm.sum())  # noqa: E741
    o_acc = bf(bf(p_unnorm) @ v)
    o = bf(o_acc / l)
    delta = bf(do * o).sum()
    p = (s - (s.max() + l.log())).exp()
    ds = bf(p * (bf(v @ do) - delta))
    assert torch.equal(t.s[0, 0, row], s) and torch.equal(t.l[0, 0, row], l)
    assert torch.equal(t.o[0, 0, row], o)
    torch.testing.assert_close(t.delta[0, 0, row], delta, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(t.ds[0, 0, row], ds, rtol=2**-7, atol=1e-6)


def test_tile_of_whole_row_is_untiled(inputs):
    whole, tiled = (emulate(*inputs[:3], RELEASED, tile=n, do=inputs[3]) for n in (None, 96))
    for name in NAMES:
        assert torch.equal(getattr(whole, name), getattr(tiled, name))


@pytest.mark.parametrize("queries, keys", [(100, 30), (30, 100)])
def test_the_whole_row_is_one_rounding_with_any_number_of_queries(queries, keys):
    """Of dK and dV over the queries, of dQ over the keys."""
    rows = [torch.randn(1, 1, n, 16) for n in (queries, keys, keys, queries)]
    whole, tiled = (
        emulate(*rows[:3], RELEASED, tile, rows[3], causal=False) for tile in (None, 128)
    )
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(getattr(whole, name), getattr(tiled, name)), name


def test_fp32_shadow_keeps_row_sums_of_ds_zero():
    """With delta from the shadow output sum_j P (dP - delta) = 0, whatever `l` is rounded to; with
    the rounded output it is not."""
    q, k, v, do = family("normal")
    policy = ALL_FP32.replace(p="fp32", o="bf16")
    drift = {}
    for source in ("o", "o_fp32"):
        t = emulate(q, k, v, policy.replace(delta_from=source), do=do)
        drift[source] = (t.ds.sum(-1) / t.ds.abs().sum(-1).clamp(min=1e-30))[..., 1:].abs().mean()
    assert drift["o_fp32"] < 1e-5 < 1e-4 < drift["o"]


TWO_SUMS = [("e8m2", None), ("bf16", 16), ("fp32", 16)]


@pytest.mark.parametrize("p,tile", TWO_SUMS)
def test_two_row_sums_are_one_of_rounded_and_one_of_unrounded_weights(p, tile):
    """Forward as with p_rounded, and P of the backward as with p_unnorm. Over values of 1 the
    output is then 1, and the P of the backward sums to 1 at the same time."""
    q, k, v, do = family("normal", dtype=torch.float32)
    policy = FA2.replace(p=p, o="fp32")
    of = {x: emulate(q, k, v, policy.replace(l_from=x), tile, do) for x in CHOICES["l_from"]}
    both, unnorm, rounded = of["p_both"], of["p_unnorm"], of["p_rounded"]
    for name in ("l", "o", "o_fp32", "delta"):
        assert torch.equal(getattr(both, name), getattr(rounded, name)), name
        assert torch.equal(getattr(both, name), getattr(unnorm, name)) == (p == "fp32"), name
    for name in ("lse", "p_bwd", "dv"):
        assert torch.equal(getattr(both, name), getattr(unnorm, name)), name
    ones = {x: emulate(q, k, torch.ones_like(v), policy.replace(l_from=x), tile) for x in of}
    assert (ones["p_both"].o - 1).abs().max() < 1e-6
    if p != "fp32":
        assert (ones["p_unnorm"].o - 1).abs().max() > 1e-4
        of_rows = ((t.s - t.lse[..., None]).exp().sum(-1) for t in (both, rounded))
        sums, off = ((x - 1).abs().max() for x in of_rows)
        assert sums < 1e-5 < 1e-4 < off


def test_each_row_sum_is_rounded_as_l_is_with_random_bits_of_its_own():
    q, k, v, _ = family("normal", dtype=torch.float32)
    policy = ALL_FP32.replace(l="e8m3:stochastic")
    one, both = (emulate(q, k, v, policy.replace(l_from=x), 16) for x in ("p_unnorm", "p_both"))
    assert torch.equal(one.l, both.l) and not torch.equal(one.lse, both.lse)
    l_lse = (both.lse - both.m).exp()
    torch.testing.assert_close(l_lse, round_to(l_lse, Format.parse("e8m3")), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", ["bf16", "e8m2", "e2m1"])
@pytest.mark.parametrize("l", ["fp32", "e8m3"])
def test_delta_from_an_output_of_the_backward_s_weights_is_that_from_dp(p, l):  # noqa: E741
    """O' = P V, with the P that the backward forms again, which quantisation-aware training of
    attention stores beside O (Attn-QAT, arXiv:2603.00040). dO O' sums to P dP, whatever p and l are
    rounded to: delta_from=dp is the same number without a second output."""
    inputs = family("normal", (1, 2, 64, 16), dtype=torch.float32)
    q, k, v, do = inputs
    policy = FA2.replace(p=p, l=l)
    t, stored = (emulate(q, k, v, policy.replace(delta_from=x), do=do) for x in ("dp", "o"))
    o_prime = (t.s.double() - t.lse.double()[..., None]).exp() @ v.double()
    wanted = (do.double() * o_prime).sum(-1)
    bound = delta_bound(oracle(q, k, v, do=do), *inputs)
    assert ((t.delta - wanted).abs() <= bound).all()
    assert ((stored.delta - wanted).abs() > bound).any()


def test_an_output_of_the_backward_s_weights_stored_in_bf16_has_the_gradients_of_unrounded_p():
    """As the code of Attn-QAT stores it: the rounding of P is out of delta, that of O is in."""
    q, k, v, do = family("normal", dtype=torch.float32)
    t, other = (emulate(q, k, v, FA2.replace(p=p), do=do) for p in ("e8m2", "fp32"))
    assert torch.equal(t.lse, other.lse) and not torch.equal(t.o, other.o)
    o_prime = (t.p_unnorm @ v / t.l[..., None]).bfloat16().float()
    assert torch.equal(other.o, o_prime)
    p = (t.s - t.lse[..., None]).exp()
    delta = (do * o_prime).sum(-1)
    ds = round_to(p * (t.dp - delta[..., None]), Format.parse("bf16"))
    scale = q.shape[3] ** -0.5
    assert torch.equal(other.dq, scale * (ds @ k)) and not torch.equal(t.dq, other.dq)
    assert torch.equal(other.dv, t.dv)


def delta_bound(t, q, k, v, do):
    """How far delta in FP32 may be from that of the float64 trace t; (..., queries).

    To first order in u = 2^-24, with n terms in a sum rounding n times and exp and log off by one
    ulp: a score errs by e = (D + 2) u scale |q||k|, so a weight beside its row's other weights by
    eta = max(e + u |s - m|) + 2u, its sum by eta + T u. P of the backward reads that as lse, with
    u (|lse| + 2 log l) more, and takes s - lse, as large as s - m and log l. Sums over T of the
    numerator, or over D of dP, and over the rest for delta: together (2 eta + 2 T + D + 4) u of
    what is summed, without its signs.
    """
    u, (n, d) = 2.0**-24, k.shape[2:]
    seen = t.s.isfinite()
    products = d**-0.5 * (q.double().abs() @ k.double().abs().mT)
    spread = (t.m[..., None] - t.s).where(seen, 0.0)
    eta = ((d + 2) * products.where(seen, 0.0) + spread).amax(-1) + 2
    lse = t.lse.abs() + 3 * t.l.log() + spread.amax(-1)
    size = (do.double().abs() * (t.p_bwd @ v.double().abs())).sum(-1)
    return 1.01 * u * (2 * eta + 2 * n + d + 4 + lse) * size


@pytest.mark.parametrize("name", FAMILIES)
def test_delta_from_each_source_is_that_of_float64_within_fp32(name):
    """In FP32 they are one number, within a bound that follows from the format. O rounded to BF16
    breaks it; with its residual it errs by 2^-8 of 2^-8 of the output more."""
    inputs = family(name, (1, 2, 16, 16), dtype=torch.float32)
    exact = oracle(*inputs[:3], do=inputs[3])
    bound = delta_bound(exact, *inputs)
    residual = 2.0**-16 * (inputs[3] * exact.o).abs().sum(-1)

    def error(policy):
        t = emulate(*inputs[:3], ALL_FP32.replace(**policy), do=inputs[3])
        return (t.delta - exact.delta).abs()

    for source in ("o", "o_fp32", "o_split", "dp"):
        assert (error(dict(delta_from=source)) <= bound).all(), source
    for source in ("o_fp32", "dp"):
        assert (error(dict(o="bf16", delta_from=source)) <= bound).all(), source
    assert (error(dict(o="bf16", delta_from="o_split")) <= bound + residual).all()
    assert (error(dict(o="bf16")) > bound).any()


def test_beta_rule_lowers_p_max_below_one_and_underflows():
    q, k, v, _ = family("tied")
    plain = emulate(q, k, v, PAPER)
    assert (plain.ties > 1).float().mean() > 0.5
    tied = (plain.ties > 1) & (plain.m > 0)
    stable = emulate(q, k, v, PAPER.replace(shift="beta(beta=1.1)"))
    assert (plain.p.amax(-1)[tied] == 1).all() and (stable.p.amax(-1)[tied] < 1).all()
    far = emulate(4 * q, 4 * k, v, PAPER.replace(shift="beta(beta=2)"))
    assert far.o.isnan().any(), "(beta - 1) m beyond 88 leaves no p: 0/0"
    clamped = emulate(4 * q, 4 * k, v, PAPER.replace(shift="beta(beta=2)", l_floor=1e-10))
    assert not clamped.o.isnan().any()


def test_a_floor_does_not_fill_the_blocks_that_a_row_does_not_see():
    """Keys of zero give each a weight of 1: a row's sum is the floor once for each block it sees,
    of the later ones nothing, although their sum is below the floor, too."""
    k = torch.zeros(1, 1, 96, 16)
    t = emulate(k, k, k + 1, ALL_FP32.replace(l_floor=100.0), tile=32, do=k)
    blocks = torch.arange(96) // 32 + 1
    assert torch.equal(t.l[0, 0], 100.0 * blocks)
    seen = torch.arange(96) + 1.0
    torch.testing.assert_close(t.o[0, 0, :, 0], seen / (100 * blocks), rtol=1e-6, atol=0)


def test_stochastic_sites_depend_on_seed_and_not_on_tiles_or_order():
    q, k, v, do = family("normal")
    policy = ALL_FP32.replace(s="bf16:stochastic", p_bwd="bf16:stochastic")
    a, b = (emulate(q, k, v, policy, tile=n, do=do, seed=1) for n in (None, 32))
    assert torch.equal(a.s, b.s)
    assert not torch.equal(a.s, emulate(q, k, v, policy, do=do, seed=2).s)
    first = emulate(q[:, :1], k[:, :1], v[:, :1], policy, do=do[:, :1], seed=1)
    assert torch.equal(first.s, a.s[:, :1]), "bits must not depend on the number of heads"


def test_stochastic_rounding_is_unbiased_and_nearest_is_not_on_tied_rows():
    """The signed-bias contract, in ulp of the BF16 numerator, with a 4-sigma interval."""
    q, k, v, _ = family("tied", (8, 4, 64, 64), seed=3)

    def bias(mode):
        t = emulate(q, k, v, ALL_FP32.replace(s="bf16", p="bf16", o_acc=f"bf16:{mode}"), seed=5)
        exact = emulate(q, k, v, ALL_FP32.replace(s="bf16", p="bf16"), seed=5)
        rows = (exact.ties > 1)[..., None].expand_as(exact.o_acc)
        ulp = 2.0 ** (exact.o_acc.abs().log2().floor() - 7)
        e = ((t.o_acc - exact.o_acc) / ulp)[rows].double()
        return e.mean().item(), 4 * e.std().item() / math.sqrt(len(e))

    mean, bound = bias("stochastic")
    assert abs(mean) < bound
    mean, bound = bias("toward_zero")
    assert mean > 0.25 + bound, "V < 0: toward zero is upward"


@pytest.mark.parametrize("name", FAMILIES)
def test_non_finite_inputs_stay_visible(name):
    q, k, v, do = family(name)
    v[0, 0, 3, 5] = float("nan")
    t = emulate(q, k, v, FA2, do=do)
    assert t.o[0, 0, 3:, 5].isnan().all() and t.o[0, 0, :, :5].isfinite().all()


def test_row_without_keys():
    q, k, v, do = family("normal", (1, 1, 4, 16))
    k = torch.full_like(k, float("-inf"))
    t = emulate(q.abs(), k, v, FA2, do=do)
    assert (t.o == 0).all() and (t.lse == float("-inf")).all() and (t.dv == 0).all()
    assert torch.equal(t.ties[0, 0], torch.arange(4) + 1), "hidden keys are no ties"


def test_a_row_whose_sum_underflows_gives_nan_and_no_gradient_to_v():
    q, k, v, do = family("normal", (1, 1, 8, 16))
    t = emulate(q, k, v, FA2.replace(shift="offset(amplitude=200)"), do=do)
    assert (t.l == 0).all() and t.o.isnan().all() and (t.dv == 0).all()


def test_gradients_take_the_dtype_of_the_inputs_and_the_rest_is_fp32():
    t = emulate(*(inputs := family("normal", (1, 1, 8, 16)))[:3], LOW, do=inputs[3])
    assert {getattr(t, name).dtype for name in ("dq", "dk", "dv")} == {torch.bfloat16}
    assert {getattr(t, name).dtype for name in ("s", "o", "lse", "ds")} == {torch.float32}


@pytest.mark.parametrize(
    "call,word",
    [
        (lambda q, k, v: emulate(q, k[:, :, :5], v[:, :, :5], FA2), "causal"),
        (lambda q, k, v: emulate(q, k, v[:, :, :5], FA2), "alike"),
        (lambda q, k, v: emulate(q.float(), k, v, FA2), "dtype"),
        (lambda q, k, v: emulate(q.double(), k.double(), v.double(), FA2), "impl='oracle'"),
        (lambda q, k, v: emulate(q, k, v, FA2, seed=2**32), "seed=4294967296"),
        (lambda q, k, v: emulate(q, k, v, FA2, seed=-1), "seed=-1"),
        (lambda q, k, v: emulate(q, k, v, FA2, tile=0), "tile=0"),
        (lambda q, k, v: oracle(q[0], k[0], v[0]), "head_dim"),
        (lambda q, k, v: oracle(q, k[..., 0], v[..., 0]), "head_dim"),
        (lambda q, k, v: emulate(q, k[..., None], v[..., None], FA2), "head_dim"),
        (lambda q, k, v: emulate(q[:, :, :0], k, v, FA2, causal=False), "empty"),
        (lambda q, k, v: emulate(q, k[:, :, :0], v[:, :, :0], FA2, causal=False), "empty"),
        (lambda q, k, v: oracle(q[..., :0], k[..., :0], v[..., :0]), "empty"),
        (lambda q, k, v: emulate(q, k, v[..., :0], FA2), "empty"),
        (lambda q, k, v: emulate(q[:, :, :5], k, v, FA2), "causal"),
        (lambda q, k, v: oracle(q, k, v, do=v[:, :, :5]), "do must have the shape"),
        (lambda q, k, v: emulate(q, k, v, FA2, do=v[..., :8]), "do must have the shape"),
        (lambda q, k, v: emulate(q, k, v[..., :8], FA2, do=v), "do must be .*, as o"),
        (lambda q, k, v: emulate(q, k, v, FA2, do=v[:, :, :1]), "do must have the shape"),
    ],
)
def test_errors(call, word):
    q, k, v, _ = family("normal", (1, 1, 8, 16))
    with pytest.raises(UserError, match=word):
        call(q, k, v)


def test_autocast_does_not_reach_inside(inputs):
    q, k, v, do = inputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = emulate(q, k, v, PAPER, do=do)
    outside = emulate(q, k, v, PAPER, do=do)
    assert all(torch.equal(getattr(inside, n), getattr(outside, n)) for n in NAMES)


def test_a_redrawn_output_gives_delta_an_error_that_the_output_has_not():
    """Unbiased over seeds, as large as a rounding, and unrelated to the error of o itself."""
    q, k, v, do = family("normal")
    policy = FA2.replace(delta_from="o_redrawn", o="bf16:stochastic")
    traces = [emulate(q, k, v, policy, do=do, seed=seed) for seed in range(200)]
    rows = slice(1, None)  # the first sees one key, so its output is a number of the format
    redrawn = torch.stack([(t.delta - t.delta_ref)[..., rows] for t in traces]).double()
    of_o = torch.stack([(t.delta_o - t.delta_ref)[..., rows] for t in traces]).double()
    assert 0.9 < redrawn.std() / of_o.std() < 1.1
    z = redrawn.mean(0) / redrawn.std(0) * len(traces) ** 0.5
    assert z.abs().max() < 5.5 and abs(z.mean()) < 4 / z.numel() ** 0.5
    related = (redrawn * of_o).mean() / (redrawn.std() * of_o.std())
    assert abs(related) < 5 / redrawn.numel() ** 0.5
    exact = emulate(q, k, v, FA2.replace(delta_from="o_redrawn", o="fp32"), do=do)
    assert torch.equal(exact.delta, exact.delta_ref)


def test_a_trace_prints_as_names_and_shapes():
    q = torch.zeros(1, 2, 3, 16)
    shown = repr(emulate(q, q, q, "LOW"))
    assert "o (1, 2, 3, 16)" in shown and "m (1, 2, 3)" in shown and "tensor" not in shown


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["normal", "tied", "sink"])
def test_removing_the_row_sum_changes_nothing_in_exact_arithmetic(name, causal):
    """For the mean key, the row's own weighted key and any other vector: a row of dS sums to zero,
    whatever it sees. And so delta plus that sum is delta, for dK."""
    q, k, v, do = (x.double() for x in family(name))
    t = oracle(q, k, v, causal, do=do)
    other = torch.randn(k.shape[:2] + (1, k.shape[3]), generator=torch.Generator().manual_seed(1))
    scale = k.shape[3] ** -0.5
    for vector in (k.mean(2, keepdim=True), t.p_bwd @ k, 10 * other.double()):
        taken = scale * t.row_sum[..., None] * vector
        assert taken.abs().max() <= 1e-12 * (scale * (t.ds.abs() @ k.abs())).max()
    moved = scale * (t.p_bwd * t.row_sum[..., None]).mT @ q
    assert moved.abs().max() <= 1e-12 * (scale * (t.ds.abs().mT @ q.abs())).max()


def test_removing_the_row_sum_takes_the_mean_key_s_part_out_of_dq():
    """dS in four bits: dq + scale * row_sum * mean key is the dq that keeps it, and keys with a
    large common part lose most of their error."""
    q, k, v, do = family("normal", dtype=torch.float32)
    k = k + 20
    policy = PrecisionPolicy(ds="e8m4")
    kept, gone = (emulate(q, k, v, p, do=do) for p in (policy, policy.replace(row_sum="removed")))
    scale = q.shape[3] ** -0.5
    back = gone.dq + scale * gone.row_sum[..., None] * k.mean(2, keepdim=True)
    torch.testing.assert_close(back, kept.dq, rtol=1e-4, atol=1e-5)
    exact = oracle(q, k, v, do=do).dq
    assert (gone.dq - exact).norm() < 0.2 * (kept.dq - exact).norm()


@pytest.mark.parametrize("causal", [True, False])
def test_refining_takes_the_row_sum_off_where_p_is(causal):
    """dS in four bits: dQ is that of dS - r P, with P as p_bwd stores it, and dK that of a delta
    without its residual."""
    q, k, v, do = family("normal", dtype=torch.float32)
    k, v = k + 20, v + 3
    policy, scale = PrecisionPolicy(ds="e8m4", p_bwd="bf16"), q.shape[3] ** -0.5
    kept, gone = (
        emulate(q, k, v, p, do=do, causal=causal)
        for p in (policy, policy.replace(row_sum="refined"))
    )
    assert torch.equal(gone.ds, kept.ds) and torch.equal(gone.row_sum, kept.row_sum)
    assert torch.equal(gone.delta, kept.delta) and kept.ds_dk is kept.ds
    wanted = scale * (kept.ds - kept.row_sum[..., None] * kept.p_bwd) @ k
    torch.testing.assert_close(gone.dq, wanted, rtol=1e-3, atol=1e-3)
    p = (kept.s - kept.lse[..., None]).exp()
    ds = round_to(p * (kept.dp - (kept.delta + kept.row_sum)[..., None]), Format.parse("e8m4"))
    assert torch.equal(gone.ds_dk, ds) and not torch.equal(ds, kept.ds)
    torch.testing.assert_close(gone.dk, scale * ds.mT @ q, rtol=1e-4, atol=1e-5)
    exact = oracle(q, k, v, causal, do=do).dq
    assert (gone.dq - exact).norm() < 0.2 * (kept.dq - exact).norm()


@pytest.mark.parametrize("causal", [True, False])
def test_a_refined_delta_has_lost_the_error_that_its_rows_show(causal):
    """A bias of delta is the whole of its row sums where nothing else rounds: r = -bias sum P."""
    q, k, v, do = family("normal", dtype=torch.float32)
    policy = PrecisionPolicy(o="bf16", delta_bias=3.0, row_sum="refined")
    t = emulate(q, k, v, policy, do=do, causal=causal)
    exact = oracle(q, k, v, causal, do=do)
    for got, wanted in ((t.dq, exact.dq), (t.dk, exact.dk), (t.delta + t.row_sum, exact.delta)):
        assert (got - wanted).norm() < 1e-5 * wanted.norm()
    assert (t.delta - exact.delta).norm() > 1e-3 * exact.delta.norm()


@pytest.mark.parametrize("floor", [1e-10, 50.0])
def test_a_floor_of_the_row_sum_counts_no_block_that_a_query_does_not_see(floor):
    """The first 32 queries see one block of 32 keys, whatever comes after; only a large floor
    would show another."""
    q, k, v, _ = family("normal", dtype=torch.float32)
    policy = PrecisionPolicy(l_floor=floor)
    whole, first = (emulate(*(x[:, :, :n] for x in (q, k, v)), policy, 32) for n in (96, 32))
    for name in ("l", "o", "lse"):
        assert torch.equal(getattr(whole, name)[:, :, :32], getattr(first, name)), name
    assert (first.l >= floor).all() and (whole.l[:, :, 95] >= floor).all()


def test_the_residual_of_o_split_is_a_bf16_number():
    q, k, v, do = family("normal")
    t = emulate(q, k, v, FA2.replace(delta_from="o_split"), do=do)
    residual = (t.o_fp32 - t.o).bfloat16().float()
    assert not torch.equal(residual, t.o_fp32 - t.o)
    assert torch.equal(t.delta, (do.float() * (t.o + residual)).sum(-1))


@pytest.mark.parametrize(
    "scores, width",
    [(Scores(softcap=2.0), 8), (Scores(bias=torch.zeros(4, 24, 24)), 24)],
    ids=["cap", "bias"],
)
def test_no_two_roundings_share_random_bits(scores, width, monkeypatch):
    """Of one site, over blocks, the roundings of one element, and dK beside dV."""
    drawn, keyed = {}, reference.keyed_bits

    def noted(seed, site, batch, head, row, column):
        place = batch + 2 * (head + 4 * (row + 24 * column))
        drawn.setdefault(site, []).append(place.flatten())
        return keyed(seed, site, batch, head, row, column)

    monkeypatch.setattr(reference, "keyed_bits", noted)
    policy = PrecisionPolicy(**dict.fromkeys(SITES, "bf16:stochastic"), l_from="p_both")
    q, k = torch.randn(2, 4, 24, 16), torch.randn(2, 2, 24, 16)
    v, do = torch.randn(2, 2, 24, width), torch.randn(2, 4, 24, width)
    emulate(q, k, v, policy, tile=8, do=do, scores=scores)
    assert set(drawn) == set(range(len(SITES)))
    for site, places in drawn.items():
        places = torch.cat(places)
        assert len(places.unique()) == len(places), SITES[site]


def test_a_tie_at_the_amplitude_itself_is_not_muted():
    q, k, v, _ = family("normal", (1, 1, 8, 16))
    policy = ALL_FP32.replace(l_floor=1e-10)
    t, muted = (emulate(0 * q, k, v, p) for p in (policy, policy.replace(shift="mute(tol=1)")))
    assert torch.equal(t.o, muted.o) and t.o.any()


def test_do_is_stored_as_the_other_inputs():
    q, k, v, do = family("normal", (1, 2, 16, 16))
    policy = FA2.replace(inputs="e4m3_saturate@tensor,pow2")
    stored = scaled(do.float(), policy.inputs).to(do.dtype)
    assert not torch.equal(stored, do)
    t, other = (emulate(q, k, v, policy, do=x) for x in (do, stored))
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(t, name), getattr(other, name)), name


def test_keys_whose_sum_overflows_have_a_mean():
    q, k, v, do = family("normal", (1, 1, 8, 16), dtype=torch.float32)
    policy, large = ALL_FP32.replace(row_sum="removed"), torch.full_like(k, 2.0**126)
    assert emulate(0 * q, large, v, policy, do=do, scale=2.0**-126).dq.isfinite().all()


def test_under_a_soft_cap_the_gradient_of_a_bias_sums_rounded_ds():
    q, k, v, do = family("normal", (1, 2, 16, 16))
    scores = Scores(softcap=2.0, bias=torch.zeros(1, 2, 16, 16))
    t = emulate(q, k, v, FA2, do=do, scores=scores)
    assert torch.equal(t.dbias, t.dbias.bfloat16().float()) and t.dbias.any()
