"""Policies: text form, errors that name the field, and that every field is alive."""

import pytest
import torch
from conftest import family

from lowprec import UserError
from lowprec.attention.reference import emulate
from lowprec.numerics.policy import (
    CHOICES,
    DITHER,
    FA2,
    FIELDS,
    LOW,
    PRESETS,
    REDRAW,
    SAFE,
    SITES,
    PrecisionPolicy,
    Shift,
    Site,
)  # fmt: skip

# In dataflow order. A field may change what stands behind its own value, never what stands before.
ORDER = ("s", "x", "p_unnorm", "p", "l", "o_acc", "o", "o_fp32", "p_bwd", "dp", "delta", "ds",
         "dq", "dk", "dv")  # fmt: skip
UPSTREAM = {
    "s": (),
    "shift": ("s",),
    "x": ("s",),
    "p": ("s", "x", "p_unnorm", "l"),
    "l_from": ("s", "x", "p_unnorm", "p"),
    "l_floor": ("s", "x", "p_unnorm", "p"),
    "l": ("s", "x", "p_unnorm", "p", "o_acc", "o_fp32"),
    "o_acc": ("s", "x", "p_unnorm", "p", "l", "o_fp32", "p_bwd", "dp", "dv"),
    "o": ("s", "x", "p_unnorm", "p", "l", "o_acc", "o_fp32", "p_bwd", "dp", "dv"),
    "p_bwd": ("s", "x", "p_unnorm", "p", "l", "o", "o_fp32", "dp", "delta", "ds", "dq", "dk"),
    "dp": ("s", "x", "p_unnorm", "p", "l", "o", "o_fp32", "p_bwd", "delta", "dv"),
    "dodo": ("s", "x", "p_unnorm", "p", "l", "o", "o_fp32", "p_bwd", "dp", "dv"),
    "delta_from": ("s", "x", "p_unnorm", "p", "l", "o", "o_fp32", "p_bwd", "dp", "dv"),
    "delta_bias": ("s", "x", "p_unnorm", "p", "l", "o", "o_fp32", "p_bwd", "dp", "dv"),
    "ds": ("s", "x", "p_unnorm", "p", "l", "o", "o_fp32", "p_bwd", "dp", "delta", "dv"),
    "dq_acc": ORDER[:-3] + ("dk", "dv"),
    "dkdv_acc": ORDER[:-3] + ("dq",),
    "row_sum": ORDER[:-3] + ("dv",),
    "inputs": (),
}
OWN = {"shift": "x", "l_from": "l", "l_floor": "l", "dodo": "delta", "delta_from": "delta",
       "delta_bias": "delta", "row_sum": "dq", "inputs": "s",
       "dq_acc": "dq", "dkdv_acc": "dk"}  # fmt: skip
CHANGES = {
    "l_from": ["p_rounded", "p_both"],
    "delta_from": ["o_fp32", "o_split", "o_redrawn", "o_prime", "dp"],
    "shift": [
        "beta(beta=2)",
        "offset(amplitude=0.3)",
        "dither(amplitude=0.3)",
        "mute(amplitude=3)",
    ],  # pow2 where x is FP32, see test_pow2
    "l_floor": [100.0],
    "delta_bias": [0.5, -0.5],
    "row_sum": ["removed", "refined"],
    "inputs": [
        "e4m3_saturate@tensor,pow2",
        "e4m3_saturate@block64,pow2",
        "e2m1@tensor,mx",
        "e5m2",
        "e5m7@tensor,pow2",
    ],
}


def changes(field):
    if field in CHANGES:
        return CHANGES[field]
    low = "fp32" if getattr(LOW, field).fmt.name == "bf16" else "bf16"
    small = ["e4m3_saturate@2^4", "e4m3_saturate@2^-4", "e2m1"]
    by_row = ["e4m3_saturate@token,pow2"] if field == "o" else []
    return [low, "bf16:toward_zero", "bf16:stochastic", "e8m4", *small, *by_row]


@pytest.mark.parametrize("field,value", [(f, v) for f in FIELDS for v in changes(f)])
def test_field_changes_its_own_site_and_nothing_upstream(field, value):
    own, alive = OWN.get(field, field), False
    for name in ("normal", "tied"):
        q, k, v, do = family(name, dtype=torch.float32)
        base = emulate(q, k, v, LOW, tile=32, do=do)
        other = emulate(q, k, v, LOW.replace(**{field: value}), tile=32, do=do)
        alive |= not torch.equal(getattr(base, own), getattr(other, own))
        for upstream in UPSTREAM[field]:
            same = torch.equal(getattr(base, upstream), getattr(other, upstream))
            assert same, f"{field} moved {upstream}"
    assert alive, f"{field} is not alive"


def test_only_a_refined_row_sum_reaches_dk():
    q, k, v, do = family("normal", dtype=torch.float32)
    of = {x: emulate(q, k, v, LOW.replace(row_sum=x), do=do) for x in CHOICES["row_sum"]}
    assert torch.equal(of["removed"].dk, of["as_rounded"].dk)
    assert not torch.equal(of["refined"].dk, of["as_rounded"].dk)


def test_dkdv_acc_rounds_dv_too():
    q, k, v, do = family("normal", dtype=torch.float32)
    base, other = (emulate(q, k, v, p, tile=32, do=do) for p in (LOW, LOW.replace(dkdv_acc="bf16")))
    assert not torch.equal(base.dv, other.dv)
    assert torch.equal(other.dv, other.dv.bfloat16().float())


@pytest.mark.parametrize("name", PRESETS)
def test_text_form_round_trips(name):
    policy = PRESETS[name]
    assert str(policy) == name and PrecisionPolicy.parse(name) == policy
    changed = policy.replace(o_acc="e8m5:stochastic", shift="beta(beta=7)", delta_from="dp")
    assert PrecisionPolicy.parse(str(changed)) == changed
    assert PrecisionPolicy.parse(str(changed).replace("+", " + ")) == changed
    assert set(changed.slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")


@pytest.mark.parametrize("amplitude", [2372.25625, 1 / 3, 1e30, -0.1, 23.7])
def test_a_shift_keeps_every_digit_in_its_text(amplitude):
    policy = LOW.replace(shift=Shift("offset", amplitude=amplitude))
    assert PrecisionPolicy.parse(str(policy)) == policy
    assert policy.diff(LOW.replace(shift=f"offset(amplitude={amplitude + 1e-9 * abs(amplitude)})"))


def test_slugs_are_unique():
    policies = [LOW.replace(**{f: v}) for f in FIELDS for v in changes(f)]
    assert len({p.slug for p in policies}) == len(set(policies))
    assert [PrecisionPolicy.parse(str(p)) for p in policies] == policies


def test_what_draws_random_bits():
    drawing = ("o=bf16:stochastic", "shift=dither(amplitude=1)", "delta_from=o_redrawn")
    assert all(PrecisionPolicy.parse(f"FA2+{change}").draws for change in drawing)
    assert not any(policy.draws for policy in PRESETS.values())
    assert not PrecisionPolicy.parse("FA2+s=fp32:stochastic").draws


def test_every_stream_of_random_bits_is_its_own():
    """By the numbers that book/notation.md names: another would redraw what runs recorded."""
    assert (len(SITES), DITHER, REDRAW) == (12, 12, 13)


def test_one_field_diff():
    other = LOW.replace(delta_from="o_fp32")
    assert LOW.diff(other) == {"delta_from": ("o", "o_fp32")}
    assert str(other) == "LOW+delta_from=o_fp32"
    assert LOW.diff(LOW) == {}
    assert other.slug == "low.delta_from-o_fp32"


def test_of_two_changes_the_later_wins():
    assert PrecisionPolicy.parse("FA2+o=fp32+o=fp16") == FA2.replace(o="fp16")


def test_safe_is_fa2_with_delta_from_the_shadow_output():
    """Its text is the long form: a recommendation may change, what runs recorded may not."""
    assert PrecisionPolicy.parse("SAFE") == SAFE and str(SAFE) == "FA2+row_sum=refined"


def test_presets_are_the_design_table():
    low_sites = {n: [s for s in SITES if not getattr(p, s).is_fp32] for n, p in PRESETS.items()}
    assert low_sites == {
        "ALL_FP32": [],
        "FA2": ["p", "o", "p_bwd", "ds"],
        "PAPER": ["s", "p", "o_acc", "o"],
        "LOW": ["s", "p", "l", "o_acc", "o", "dodo", "dp", "p_bwd", "ds"],
        "RELEASED": ["s", "x", "p", "l", "o_acc", "o", "dodo", "dp", "p_bwd", "ds", "dq_acc",
                     "dkdv_acc"],
    }  # fmt: skip
    assert {n: p.l_floor for n, p in PRESETS.items() if p.l_floor} == {"RELEASED": 1e-10}


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: LOW.replace(o_ac="fp32"), ("o_ac", "did you mean 'o_acc'")),
        (lambda: LOW.replace(o="bf17"), ("field o", "bf17")),
        (lambda: LOW.replace(o="bf16:up"), ("field o", "up", "toward_zero")),
        (lambda: LOW.replace(o="bf16@2^8"), ("field o", "bf16@2^8", "exponent bits")),
        (lambda: LOW.replace(p="e4m3@2^40"), ("field p", "e4m3fn@2^40", "2^32")),
        (lambda: LOW.replace(p="e4m3@8"), ("field p", "e4m3@8")),
        (lambda: LOW.replace(o="bf16@token,pow2"), ("field o", "bf16", "a row")),
        (lambda: LOW.replace(o="e4m3@2^8@token,pow2"), ("field o", "e4m3fn@2^8", "of its own")),
        (lambda: LOW.replace(ds="e4m3@token,pow2"), ("field ds", "only o", "e4m3fn@2^8")),
        (lambda: LOW.replace(o_acc="e4m3@token,pow2"), ("field o_acc", "only o")),
        (lambda: LOW.replace(dodo="e4m3@token,pow2"), ("field dodo", "only o")),
        (lambda: LOW.replace(inputs="e4m3@tensor"), ("field inputs", "e4m3fn@tensor", "pow2")),
        (lambda: LOW.replace(inputs="e5m2:stochastic"), ("field inputs", "draws no bits")),
        (lambda: LOW.replace(inputs="e4m3@rows"), ("field inputs", "rows")),
        (lambda: LOW.replace(inputs="e5m8@tensor,pow2"), ("field inputs", "at most 7 significand")),
        (lambda: LOW.replace(delta_from="q"), ("delta_from", "o_split")),
        (lambda: LOW.replace(l_floor=-1), ("l_floor",)),
        (lambda: LOW.replace(l_floor="inf"), ("l_floor", "finite")),
        (lambda: LOW.replace(l_floor="x"), ("l_floor",)),
        (lambda: LOW.replace(l_floor=None), ("l_floor",)),
        (lambda: LOW.replace(delta_bias="inf"), ("delta_bias", "finite")),
        (lambda: LOW.replace(delta_bias="-inf"), ("delta_bias", "finite")),
        (lambda: LOW.replace(shift="beta(gama=1)"), ("shift", "gama", "beta, gamma, tol")),
        (lambda: LOW.replace(shift="offset(amplitude=x)"), ("shift", "amplitude=x", "number")),
        (lambda: LOW.replace(shift="mute(amplitude=1,tol=inf)"), ("shift", "tol", "finite")),
        (lambda: LOW.replace(o="e4m3fn@token"), ("field o", "@token", "@2^8", "@token,pow2")),
        (lambda: LOW.replace(p="e4m3fn@256"), ("field p", "@256", "@2^8")),
        (lambda: LOW.replace(shift="wild"), ("shift", "wild", "dither")),
        (lambda: PrecisionPolicy.parse("LOW+delta=o"), ("delta", "delta_from")),
        (lambda: PrecisionPolicy.parse("low"), ("low", "LOW")),
    ],
)
def test_errors_name_the_field(make, words):
    with pytest.raises(UserError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_values_are_hashable_and_normalised():
    assert LOW.replace(o="bfloat16") == LOW and hash(LOW.replace(o="bfloat16")) == hash(LOW)
    for text in ("bf16:stochastic", "e4m3fn@2^8", "e5m2_saturate@2^-3:stochastic",
                 "e4m3fn_saturate:toward_zero@token,pow2"):  # fmt: skip
        assert str(Site.parse(text)) == text
    assert str(Shift.parse("beta(beta=7)")) == "beta(beta=7,gamma=0,tol=0)"
    assert str(Shift.parse("beta")) == "beta(beta=2,gamma=0,tol=0)"
    assert Shift("beta", amplitude=1.0) == Shift.parse("beta"), "as its text, which leaves that out"


def test_a_site_is_fp32_by_its_format_and_then_its_rounding_means_nothing():
    assert Site.parse("fp32:stochastic") == Site.parse("fp32") and str(Site.parse("fp32")) == "fp32"
    other = [Site.parse(text) for text in ("e7m23", "e8m24", "fp32_saturate")]
    assert not any(site.is_fp32 for site in other)
    policy = LOW.replace(s="fp32:toward_zero")
    assert PrecisionPolicy.parse(str(policy)) == policy


def test_an_unknown_shift_is_named():
    with pytest.raises(UserError, match="unknown shift 'foo'; choose one of none, beta"):
        Shift.parse("foo(bar=1)")


@pytest.mark.parametrize("text, near", [("fa2", "FA2"), ("FA3", "FA2"), ("low+p=fp32", "LOW")])
def test_a_preset_that_is_nearly_one_is_named(text, near):
    with pytest.raises(UserError, match=f"did you mean {near}"):
        PrecisionPolicy.parse(text)
