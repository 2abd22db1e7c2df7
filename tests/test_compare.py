"""Bug or rounding: planted faults are found, and other roundings are not taken for faults."""

import dataclasses
import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention

from lowprec import UserError
from lowprec.__main__ import main
from lowprec.attention.reference import oracle
from lowprec.diagnose import compare, contenders
from lowprec.records.files import data_root
from lowprec.studies import dated, planted

OWN = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def same(q, k, v, is_causal=False, scale=None):
    return sdpa(q, k, v, is_causal=is_causal, scale=scale)

def scaled(q, k, v, is_causal=False, scale=None):
    return sdpa(q, k, v, is_causal=is_causal, scale=1.01 * scale)

def forward(q, k, v, is_causal=False, scale=None):
    with torch.no_grad():
        return sdpa(q, k, v, is_causal=is_causal, scale=scale)

def wide_forward(q, k, v, is_causal=False, scale=None):
    return forward(q.double(), k.double(), v.double(), is_causal, scale).float()

def broken(q, k, v, is_causal=False, scale=None):
    return sdpa(q, k, v, is_causal=is_causal, scale=scale) * float("nan")

def short(q, k, v, is_causal=False, scale=None):
    return q[:, :, 1:]

def raises(q, k, v):
    return q

number = 3
"""
ROOT = planted.CHANGES[-1]
SMALL = ["--shape", "1", "2", "64", "32", "--causal"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_attention.py").write_text(OWN)
    return tmp_path


@pytest.fixture(scope="module")
def inputs():
    return contenders.drawn((1, 4, 256, 64), kv_heads=2, seed=3)


def one(call, inputs):
    return compare.measure({"B": call}, [inputs])


# Faults and roundings, on random inputs


@pytest.mark.parametrize("fault", planted.FAULTS)
def test_a_planted_fault_is_found(fault, inputs):
    table = one(planted.call(fault), inputs)
    assert planted.found(table).all()
    words = compare.verdict(table)
    assert ("not deterministic" in words) == (fault == "order")
    assert ("not rounding alone" in words) == (fault != "order")


def test_without_a_fault_nothing_is_found(inputs):
    table = one(planted.call(), inputs)
    assert not planted.found(table).any()
    fa2 = one(contenders.function("FA2"), inputs)
    assert table.error.to_numpy() == pytest.approx(fa2.error.to_numpy(), rel=0.02)


@pytest.mark.parametrize("name", planted.HEALTHY)
def test_other_roundings_are_no_fault(name, inputs):
    table = one(contenders.function(name), inputs)
    assert not planted.found(table).any()
    assert "within rounding" in compare.verdict(table)


@pytest.mark.parametrize(("times", "error"), [(1.5, "O errs"), (float("nan"), "not finite")])
def test_a_fault_of_the_second_run_alone_is_found(times, error, inputs):
    runs = []

    def first_right(q, k, v, **how):
        runs.append(1)
        return (times if len(runs) > 1 else 1) * scaled_dot_product_attention(q, k, v, **how)

    table = one(first_right, inputs)
    assert set(table.of[table.large]) == {"O", "dQ", "dK", "dV"}
    words = compare.verdict(table)
    assert "within rounding" not in words and error in words
    assert "not deterministic" in words and "nan" not in words


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_of_a_policy_coarser_than_the_inputs_that_is_said(dtype):
    some = contenders.drawn((1, 2, 64, 32), dtype=dtype)
    table = compare.measure({n: contenders.function(n) for n in ("FA2", "ALL_FP32")}, [some])
    fa2, exact, *_ = compare.verdict(table).split("\n")
    assert fa2.endswith("it rounds to bf16, which is coarser than the inputs.")
    assert "ALL_FP32 is within" in exact
    same = contenders.drawn((1, 2, 64, 32), dtype=torch.bfloat16)
    table = compare.measure({"A": contenders.function("FA2")}, [same], twice=False)
    assert table.attrs["coarse"] == {}


def test_of_a_function_whose_output_was_rounded_coarser_than_the_inputs_that_is_said():
    def coarse(q, k, v, **how):
        return scaled_dot_product_attention(q, k, v, **how).bfloat16().float()

    some = contenders.drawn((1, 2, 64, 32), dtype=torch.float32)
    table = compare.measure({"A": coarse, "B": scaled_dot_product_attention}, [some])
    a, b, *_ = compare.verdict(table).split("\n")
    assert a.endswith("it rounds to bf16, which is coarser than the inputs.")
    assert "coarser" not in b


def test_numbers_that_need_no_more_bits_were_not_rounded_coarser():
    """Where all of V is 1 the exact O is, too, and every format has it."""
    some = contenders.drawn((1, 2, 64, 32), dtype=torch.float16)
    some = dataclasses.replace(some, v=torch.ones_like(some.v))

    def wrong(q, k, v, scale, **how):
        return scaled_dot_product_attention(q, k, v, scale=2 * scale, **how)

    said = compare.verdict(one(wrong, some))
    assert "B's dV errs" in said and "coarser" not in said


def test_a_sign_too_small_for_a_fault_is_no_proof_of_one():
    def noisy(q, k, v, **how):
        o = scaled_dot_product_attention(q, k, v, **how)
        noise = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
        return o * (1 + 1e-7 + 1e-6 * noise)

    table = one(noisy, contenders.drawn((1, 2, 256, 64), dtype=torch.float32))
    assert table[table.large].clear.any() and not table.lean.any()
    said = compare.verdict(table)
    assert "sign" not in said and said.endswith("a bug, or rounding in other places.")


def test_one_row_has_no_interval():
    q, k, v, do = (torch.randn(1, 2, n, 16).bfloat16() for n in (1, 40, 40, 1))
    some = contenders.Inputs("one query", q, k, v, do, False, 0.25)
    assert "nan" not in compare.shown(one(contenders.plain, some))


def test_small_errors_have_digits():
    some = contenders.drawn((1, 2, 64, 32), dtype=torch.float32)
    calls = {"A": contenders.function("ALL_FP32"), "B": contenders.function("FA2")}
    said = compare.verdict(compare.measure(calls, [some], twice=False))
    assert "e-05 %" in said and "0.00%" not in said and "e+" not in said


def twins(table):
    """The rows of one function as those of two."""
    both = pd.concat([table.assign(who=who) for who in "AB"], ignore_index=True)
    both.attrs = table.attrs
    return both


@pytest.mark.parametrize("factor, alike", [(1.4, True), (1.6, False)])
def test_errors_are_alike_within_a_factor(factor, alike, inputs):
    both = twins(one(contenders.plain, inputs))
    both.loc[both.who == "B", "error"] *= factor
    assert ("They err alike" in compare.verdict(both)) == alike


def test_errors_are_alike_in_what_is_compared_and_that_is_not_delta(inputs):
    both = twins(one(contenders.plain, inputs))
    both.loc[(both.who == "B") & (both.of == "δ"), "error"] *= 2
    said = compare.verdict(both)
    assert "They err alike, within a factor of 1.5 in O and all gradients." in said


def test_sums_that_round_as_fp32_inputs_do_are_nothing_magnified():
    def noisy(q, k, v, **how):
        o = scaled_dot_product_attention(q, k, v, **how)
        return o * (1 + 1e-6 * torch.randn(o.shape, generator=torch.Generator().manual_seed(0)))

    some = contenders.drawn((1, 2, 256, 64), dtype=torch.float32)
    calls = {"A": contenders.plain, "B": scaled_dot_product_attention, "C": noisy}
    table = compare.measure(calls, [some], twice=False)
    a, b, c, *_ = compare.verdict(table).split("\n")
    assert "A is within rounding" in a and "B is within rounding" in b
    assert (table.groupby("who").ulps.max() > compare.ULPS).all()
    assert c.endswith("a bug, or rounding in other places.")


def test_rounding_is_magnified_in_fp32_as_well():
    some = contenders.named("fa2-a-seed1-1680")
    wide = {name: getattr(some, name).float() for name in ("q", "k", "v", "do")}
    said = compare.verdict(one(contenders.plain, dataclasses.replace(some, **wide)))
    assert "rounding, magnified" in said


@pytest.mark.parametrize("short, words", [(4e-7, "sums off"), (1e-4, "not rounding alone")])
def test_in_fp32_a_sign_of_a_few_ulps_is_no_proof(short, words):
    def less(q, k, v, **how):
        return (1 - short) * scaled_dot_product_attention(q, k, v, **how)

    some = contenders.drawn((1, 4, 256, 64), dtype=torch.float32)
    table = one(less, some)
    assert table.lean[table.of == "O"].all()
    assert f"{words}." in compare.verdict(table) and "O has a sign, -0.0" in compare.verdict(table)


def test_the_table_in_fp32_is_what_its_study_measures():
    """On a CPU *math* is another, and as near; *efficient* is there on a GPU alone."""
    then = dated.recorded("planted", draws=3)["fp32"]
    now = planted.in_fp32(1, "cpu", ("math",))
    some = then[then.input.isin(now.input) & (then.who == "math")].reset_index(drop=True)
    assert then.attrs["hardware"].startswith("NVIDIA") and then.dtypes.equals(now.dtypes)
    assert list(some.input) == list(now.input) and list(some.of) == list(now.of)
    assert np.allclose(now.error, some.error, rtol=0.5) and not now.lean.any()
    assert np.array_equal(then.lean, (then.who == "efficient") & then.of.isin(["O", "dK", "dV"]))


@pytest.mark.gpu
def test_pytorch_s_fp32_kernel_has_a_sign_on_a_gpu():
    """With equal weights, which need no rounding. *math* has none beyond noise."""
    g, lean = torch.Generator().manual_seed(0), {}
    for keys in (1, 64):
        q, k, v = (torch.randn(1, 4, n, 64, generator=g).cuda() for n in (256, keys, keys))
        right = v.double().mean(-2, keepdim=True).expand_as(q)
        for who in ("efficient", "math"):
            error = contenders.function(who)(0 * q, k, v).double() - right
            share = (error * right.sign()).sum() / right.abs().sum()
            lean.setdefault(who, []).append(abs(share).item())
    assert min(lean["efficient"]) > 2e-8 > max(lean["math"])


def test_where_do_is_zero_no_gradient_was_compared():
    some = contenders.drawn((1, 2, 64, 32))
    some = dataclasses.replace(some, do=torch.zeros_like(some.do))
    said = compare.verdict(one(contenders.function("FA2"), some))
    assert f"The exact dQ and dK and dV of {some.name} are 0, so they were not compared." in said


def test_each_fault_shows_where_it_is(inputs):
    def bad(fault):
        return set(compare.outside(one(planted.call(fault), inputs)).of)

    assert {"O", "dQ", "dK", "dV"} <= bad("mask") and {"O", "dQ", "dK", "dV"} <= bad("padding")
    assert bad("head") == {"dK"}
    assert bad("delta") <= {"dQ", "dK", "δ"}


def test_a_scale_of_a_third_of_a_percent_is_found_by_its_sign_alone(inputs):
    def call(q, k, v, is_causal, scale, **how):
        return scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=1.004 * scale, **how
        )

    table = one(call, inputs)
    assert not table.large.any() and table.lean[table.of == "O"].all()
    assert "has a sign" in compare.verdict(table)


# Captured inputs


@pytest.fixture(scope="module")
def captured():
    some = [contenders.named(name) for name in ("fa2-a-healthy-seed1-1680", "fa2-a-seed1-1680")]
    calls = {name: contenders.function(name) for name in ("FA2", "CLEAN", ROOT, "sdpa")}
    return compare.measure(calls, some, twice=False)


def test_stored_and_clean_delta_look_alike_on_random_inputs_and_not_on_captured_ones(captured):
    some = contenders.drawn(seed=3)
    drawn = compare.measure(
        {n: contenders.function(n) for n in ("FA2", "CLEAN")}, [some], twice=False
    )
    assert planted.dq(drawn, "FA2").item() == pytest.approx(
        planted.dq(drawn, "CLEAN").item(), rel=0.1
    )
    assert (planted.dq(captured, "FA2") > 1.4 * planted.dq(captured, "CLEAN")).all()
    assert (planted.dq(captured, "FA2") > 3 * planted.dq(captured, ROOT)).all()


def test_other_roundings_are_no_fault_on_captured_inputs(captured):
    assert not planted.found(captured).any()


def test_the_verdict_says_that_the_yardstick_is_weak_and_the_rounding_magnified(captured):
    words = compare.verdict(captured[captured.who.isin(["FA2", ROOT])])
    assert "The yardstick is weak here" in words and "FA2 is within the 2x rule" in words
    assert "rounding, magnified" in words and f"{ROOT} is within rounding" in words


def test_a_delta_summed_in_bf16_passes_on_random_inputs_and_not_on_captured_ones(inputs):
    call = planted.call(planted.SUM)
    assert not planted.found(one(call, inputs)).any()
    table = one(call, contenders.named("fa2-a-healthy-seed1-1680"))
    assert set(compare.outside(table).of) == {"dQ"} and "not rounding alone" in compare.verdict(
        table
    )


def test_a_fault_of_a_percent_in_the_scale_is_found_on_captured_inputs():
    some = contenders.named("fa2-a-healthy-seed1-1680")
    assert planted.found(one(planted.call("scale"), some)).all()


# Measures


def test_an_exact_attention_errs_by_nothing_and_the_plain_one_by_one(inputs):
    exact = compare.Exact(inputs)
    t = oracle(inputs.q, inputs.k, inputs.v, inputs.causal, inputs.scale, inputs.do)
    rows = exact.rows("x", dict(zip(compare.OF, (t.o, t.dq, t.dk, t.dv), strict=False)))
    assert {row["of"] for row in rows} == set(compare.OF)
    assert all(row["error"] == row["times"] == row["signed"] == 0 for row in rows)
    table = one(contenders.plain, inputs)
    assert table.times.to_numpy() == pytest.approx(1)
    assert table.worst[table.of != "δ"].to_numpy() == pytest.approx(1)


def test_a_part_of_the_exact_result_is_a_sign_of_its_size(inputs):
    exact = compare.Exact(inputs)
    found = {of: 1.01 * x for of, x in exact.right.items() if of != "δ"}
    rows = {row["of"]: row for row in exact.rows("x", found)}
    for of in ("O", "dK", "dV"):
        assert rows[of]["error"] == pytest.approx(0.01)
        assert 0.005 < rows[of]["signed"] < 0.0101 and rows[of]["p"] < 0.01


def test_an_error_of_delta_is_read_off_dq(inputs):
    exact = compare.Exact(inputs)
    wrong = -0.01 * inputs.scale * exact.weighted  # what delta + 0.01 makes of dQ
    errors = exact.errors({"dQ": exact.right["dQ"] + wrong})
    size = exact.weighted.norm(dim=-1, keepdim=True)
    assert torch.allclose(errors["δ"], 0.01 * size, rtol=1e-9)
    row = next(
        row for row in exact.rows("x", {"dQ": exact.right["dQ"] + wrong}) if row["of"] == "δ"
    )
    assert row["signed"] > 0 and row["p"] < 0.01


def test_one_ulp_moves_every_number_to_a_neighbour(inputs):
    exact = compare.Exact(inputs, draws=1)
    moved = exact._moved(inputs.q, torch.Generator().manual_seed(0))
    steps = (moved - inputs.q.double()).abs() / compare.ulp(inputs.q.double(), exact.fmt)
    assert (steps == 1).all()
    assert all(0.003 < exact.ulp[of] < 0.03 for of in ("O", "dQ", "dK", "dV"))


# Functions and inputs


@pytest.mark.parametrize("words", ["sys.exit(0)", "os.chdir('/'); raise ValueError"])
def test_a_module_that_ends_the_program_or_moves_away_cannot_be_imported(words, own):
    (own / "other_attention.py").write_text(f"import os, sys\n{words}\n")
    with pytest.raises(UserError, match="^B: other_attention cannot be imported from .*"):
        contenders.function("other_attention:f", "B")


def handed_back(change):
    """A function that changes no number, but by `change` the gradient that is handed back to it."""

    class HandedBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o):
            return o.clone()

        @staticmethod
        def backward(ctx, do):
            return change(do)

    return HandedBack.apply


def test_what_a_backward_pass_writes_into_is_its_own(inputs):
    def writes(do):
        kept = do.clone()
        do.zero_()
        return kept

    before = inputs.do.clone()
    compare.run(lambda *qkv, **how: handed_back(writes)(contenders.plain(*qkv, **how)), inputs)
    assert torch.equal(inputs.do, before)


@pytest.mark.parametrize("only", ["q", "k", "v", "do"])
def test_a_kernel_that_ignores_strides_is_found(only, inputs):
    """On tensors of a model, whose heads lie beside each other."""

    def flat(x):
        return torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())

    def attention(q, k, v, **how):
        q, k, v = (flat(x) if n == only else x for n, x in (("q", q), ("k", k), ("v", v)))
        o = scaled_dot_product_attention(q, k, v, **how)
        return handed_back(flat)(o) if only == "do" else o

    assert "not rounding alone" in compare.verdict(one(attention, inputs))


def test_a_function_that_ends_the_program_fails(inputs):
    with pytest.raises(UserError, match="A fails on .*SystemExit"):
        compare.run(lambda *qkv, **how: sys.exit(0), inputs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FA3", "did you mean FA2"), ("flsh", "did you mean flash"), ("zzz", "take one of"),
        ("FA2+o=bf1", "o: Unknown number format"), ("nowhere:f", "nowhere cannot be imported"),
        ("own_attention", "name the function in it"),
        ("own_attention.same", "did you mean own_attention:same"),
        ("own_attention:sane", "has no function 'sane'; it has .*same"),
        ("own_attention:number", "has no function 'number'"),
    ],
)  # fmt: skip
def test_an_attention_that_is_not_there_is_one_sentence(text, words, own):
    with pytest.raises(UserError, match=f"^B: .*{words}"):
        contenders.function(text, "B")


def test_a_file_is_the_one_that_its_path_names(tmp_path, monkeypatch):
    """Not the one of that name in the working directory."""
    (tmp_path / "deep").mkdir()
    for folder, value in ((tmp_path, 1), (tmp_path / "deep", 2)):
        (folder / "kernel.py").write_text(f"def f():\n    return {value}\n")
    monkeypatch.chdir(tmp_path / "deep")
    named = ("../kernel.py", "kernel.py", f"{tmp_path}/kernel.py", "../deep/kernel", "kernel")
    assert [contenders.function(f"{place}:f", "A")() for place in named] == [1, 2, 1, 2, 2]
    with pytest.raises(UserError, match="^A: ../none.py cannot be imported"):
        contenders.function("../none.py:f", "A")


def test_the_one_that_errs_more_is_named_first_and_what_is_no_number_is_most(inputs):
    table = one(contenders.plain, inputs)
    both = twins(table)
    both.loc[both.who == "B", ["error", "ulps"]] *= 4
    assert re.search(r"in \w+ of .*: B errs by .*%, and A by ", compare.verdict(both))
    sizes = (("whole", 1.9, 1.0), ("row", 1.0, 3.0))  # of limits of 2 and of 4
    near = [table.assign(input=x, times=times, worst=worst, far=0.0) for x, times, worst in sizes]
    assert set(compare.most(pd.concat(near)).input) == {"whole"}
    broken = table.assign(input="broken", times=np.nan)
    assert set(compare.most(pd.concat([table, broken])).input) == {"broken"}


def test_what_is_not_finite_is_not_alike(own, capsys):
    def without_gradients(q, k, v, **how):
        return scaled_dot_product_attention(q, k, v, **how) + 0 * (q - q.detach()).sqrt()

    some = contenders.drawn((1, 2, 64, 32), dtype=torch.float32)
    calls = {"A": scaled_dot_product_attention, "B": without_gradients}
    said = compare.verdict(compare.measure(calls, [some]), {"A": "one", "B": "two"})
    assert "not finite" in said and "alike" not in said


def test_one_infinite_number_is_not_finite(inputs):
    def infinite(q, k, v, **how):
        o = scaled_dot_product_attention(q, k, v, **how).clone()
        o[0, 0, 5, 3] = torch.inf
        return o

    assert "B's O has numbers that are not finite" in compare.verdict(one(infinite, inputs))


@pytest.mark.parametrize("sizes", [(60, 1, 1e-3), (1, 200, 40), (60, 20, 5)])
def test_where_a_plain_attention_overflows_a_kernels_is_the_yardstick(sizes):
    """In FP16 scores, dP or both are too large, and a right kernel, which has them in FP32, errs
    more than an attention in FP32 throughout."""
    some = contenders.drawn((1, 2, 128, 64), dtype=torch.float16)
    score, v, do = sizes
    some = dataclasses.replace(
        some, q=score * some.q, k=score * some.k, v=v * some.v, do=do * some.do
    )
    table = compare.measure({"A": scaled_dot_product_attention, "B": contenders.plain}, [some])
    a, b, *said = compare.verdict(table).split("\n")
    assert a.startswith("A is within") and "has numbers that are not finite" in b
    assert said == [
        f"A plain attention overflows ({some.name}): there the yardstick is one with scores and dP "
        "in FP32."
    ]

    def late(q, k, v, is_causal=False, scale=None):
        o = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        return torch.cat([o[:, :, :-8], 0.99 * o[:, :, -8:]], dim=2)

    assert "outside the 2x rule" in compare.verdict(compare.measure({"A": late}, [some]))


def test_what_no_number_of_the_dtype_holds_cannot_be_judged():
    some = contenders.drawn((1, 2, 64, 64), dtype=torch.float16)
    some = dataclasses.replace(some, q=60 * some.q, k=60 * some.k, v=400 * some.v, do=100 * some.do)
    with pytest.raises(UserError, match="dQ of .* is beyond what fp16 holds"):
        compare.measure({"A": scaled_dot_product_attention}, [some])


def test_float64_cannot_be_judged():
    some = contenders.drawn((1, 2, 64, 32), dtype=torch.float64)
    with pytest.raises(UserError, match="is float64, and so is the attention"):
        compare.measure({"A": scaled_dot_product_attention}, [some])


def test_eight_bits_cannot_be_judged(inputs):
    tensors = {n: getattr(inputs, n).to(torch.float8_e4m3fn) for n in ("q", "k", "v", "do")}
    some = dataclasses.replace(inputs, **tensors)
    with pytest.raises(UserError, match="seed 3 is torch.float8_e4m3fn: take bfloat16, float16 or"):
        compare.measure({"A": scaled_dot_product_attention}, [some])


def test_plain_attention_is_attention():
    some = contenders.drawn((1, 2, 32, 16), dtype=torch.float32)
    o = contenders.plain(some.q, some.k, some.v, is_causal=True)
    right = scaled_dot_product_attention(some.q, some.k, some.v, is_causal=True)
    assert torch.allclose(o, right, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_functions_take_a_mask_and_a_scale_as_torch_s_does(causal):
    some, other = (contenders.drawn((1, 2, 32, 16), seed=s, dtype=torch.float32) for s in (0, 1))
    assert not torch.equal(some.q, other.q)
    given, how = (some.q, some.k, some.v), dict(is_causal=causal, scale=0.7)
    right = scaled_dot_product_attention(*given, **how)
    for call in (contenders.of_policy("ALL_FP32"), contenders.plain):
        assert torch.allclose(call(*given, **how), right, atol=1e-5)


def test_inputs_are_kept_in_safetensors_with_torch_alone(tmp_path):
    some = contenders.named("fa2-b-seed4-1580")
    contenders.write(some, tmp_path / "x.safetensors", licence="MIT")
    again = contenders.read(tmp_path / "x.safetensors")
    assert (again.causal, again.scale) == (True, some.scale)
    for name in ("q", "k", "v", "do"):
        assert torch.equal(getattr(again, name), getattr(some, name))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert json.loads(file.metadata()["licence"]) == "MIT"


def test_only_the_captures_of_the_book_carry_its_licence(tmp_path, capsys):
    named = "fa2-b-seed4-1580"
    own = tmp_path / "own.xz"
    own.write_bytes((data_root() / "captures" / f"{named}.xz").read_bytes())
    for name, licensed in ((named, True), (str(own), False)):
        file = tmp_path / f"{licensed}.safetensors"
        assert not main(["data", "capture", name, str(file)])
        assert ("MIT" in capsys.readouterr().out) is licensed
        with safe_open(file, "pt") as written:
            assert ("licence" in written.metadata()) is licensed
    assert main(["data", "capture", named, str(file)]) == 2
    assert "is never overwritten" in capsys.readouterr().err


def near(n=96, window=32, padding=8):
    """A window of keys, of two sequences the second padded on the right."""
    mask = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - window)[None, None].repeat(2, 1, 1, 1)
    mask[1, :, : n - padding, n - padding :] = False
    return mask


def test_attention_with_a_mask_is_compared_under_it(tmp_path, own, capsys):
    some = contenders.drawn((2, 4, 96, 32), kv_heads=2, causal=False)
    some = dataclasses.replace(some, mask=near())
    contenders.write(some, tmp_path / "x.safetensors")
    again = contenders.read(tmp_path / "x.safetensors")
    assert torch.equal(again.mask, some.mask) and not again.causal

    def unmasked(q, k, v, attn_mask=None, **how):
        return scaled_dot_product_attention(q, k, v, **how)

    def one_more(q, k, v, attn_mask=None, **how):
        wider = attn_mask | attn_mask.roll(1, -2).tril()
        return scaled_dot_product_attention(q, k, v, attn_mask=wider, **how)

    right = {"A": scaled_dot_product_attention, "B": contenders.function("FA2")}
    table = compare.measure(right, [again])
    assert not len(compare.outside(table))
    for wrong in (unmasked, one_more):
        assert set(compare.outside(compare.measure({"A": wrong}, [again])).of) >= {"O", "dQ"}
    assert main(["compare", "sdpa", "FA2", "--on", str(tmp_path / "x.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "bfloat16, with a mask, on" in out and "\nnot tried: biases\n" in out


def documents(n=256, length=8):
    """Causal attention within documents of so many tokens."""
    at = torch.arange(n) // length
    return (at[:, None] == at) & torch.ones(n, n, dtype=torch.bool).tril()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("who", ["efficient", "cudnn", "math", "sdpa"])
def test_kernels_of_pytorch_are_right_under_masks_on_a_gpu(who, dtype):
    call, inputs = contenders.function(who), []
    for seed, mask in enumerate((near(256, 64, 32)[1:], documents()[None, None])):
        some = contenders.drawn((1, 4, 256, 64), None, False, seed, dtype)
        inputs.append(dataclasses.replace(some, mask=mask).to("cuda"))

    def more(q, k, v, attn_mask=None, **how):
        wider = attn_mask | attn_mask.roll(1, -2).tril()
        return call(q, k, v, attn_mask=wider, **how)

    assert not len(compare.outside(compare.measure({"A": call}, inputs)))
    assert set(compare.outside(compare.measure({"B": more}, inputs)).of) >= {"O", "dQ"}


@pytest.mark.parametrize("window", [1, 2, 8])
def test_in_fp32_rows_that_see_few_keys_are_no_fault(window):
    """There a plain attention errs by next to nothing."""
    inputs, wrong = [], lambda q, k, v, **how: 1.0001 * scaled_dot_product_attention(q, k, v, **how)
    for seed in range(4):
        some = contenders.drawn((1, 4, 96, 32), None, False, seed, torch.float32)
        inputs.append(dataclasses.replace(some, mask=near(window=window, padding=0)[:1]))
    table = compare.measure({"A": scaled_dot_product_attention, "B": wrong}, inputs)
    assert (table.who[table.large] == "B").all() and table.large[table.who == "B"].any()


@pytest.mark.parametrize(
    "mask, about, words",
    [
        (near(), {"causal": "true"}, "put what is causal into that"),
        (near().float(), {}, "is boolean, True where a query sees a key, not torch.float32"),
        (near()[:, :, :95], {}, "its mask of shape .* does not broadcast to"),
        (near() & (torch.arange(96) > 4), {}, "shows no key to some query"),
    ],
)
def test_a_mask_that_does_not_fit_is_one_sentence(mask, about, words, tmp_path):
    some = contenders.drawn((2, 4, 96, 32), causal=False)
    tensors = {name: getattr(some, name) for name in ("q", "k", "v", "do")}
    save_file(tensors | {"mask": mask.contiguous()}, tmp_path / "x.safetensors", about)
    with pytest.raises(UserError, match=f"^--on: .*x.safetensors: .*{words}"):
        contenders.read(tmp_path / "x.safetensors")


@pytest.mark.parametrize("causal, wanted", [("True", True), ("false", False), (None, False)])
def test_metadata_may_be_written_as_python_writes_it(tmp_path, causal, wanted):
    from safetensors.torch import save_file

    x = torch.randn(1, 1, 4, 8)
    about = {"scale": "None"} | ({} if causal is None else {"causal": causal})
    save_file(
        {n: x + i for i, n in enumerate(("q", "k", "v", "do"))}, tmp_path / "x.safetensors", about
    )
    assert contenders.read(tmp_path / "x.safetensors", causal=wanted).causal is wanted
    if causal is not None:
        with pytest.raises(UserError, match=f"causal={causal}, against --.*causal$"):
            contenders.read(tmp_path / "x.safetensors", causal=not wanted)
    if causal is None:
        with pytest.raises(UserError, match="^--on: .*has no causal; add it, or say --causal or"):
            contenders.read(tmp_path / "x.safetensors")


def test_inputs_that_do_not_fit_are_one_sentence(tmp_path):
    from safetensors.torch import save_file

    def refused(words, about=None, **tensors):
        about = {"causal": "false"} | (about or {})
        save_file(tensors, tmp_path / "x.safetensors", about)
        with pytest.raises(UserError, match=f"^--on: .*{words}"):
            contenders.read(tmp_path / "x.safetensors")

    x = torch.zeros(1, 1, 4, 8)
    refused("has no tensor v, do; it has k, q", q=x, k=x + 1)
    refused("must be \\(batch, heads", q=x, k=x + 1, v=x[0] + 2, do=x + 3)
    half = dict(v=x[..., :4] + 2, do=x[..., :4] + 3)
    refused("v and do must have q's head_dim, 8, not 4", q=x, k=x + 1, **half)
    refused("k has numbers that are not finite", q=x, k=x / 0, v=x + 2, do=x + 3)
    for name, text in (("scale", "abc"), ("scale", "nan"), ("causal", "maybe")):
        about = {name: text}
        refused(f"its metadata has {name}={text}; write", about, q=x, k=x + 1, v=x + 2, do=x + 3)
    (tmp_path / "x.safetensors").write_text("no")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        contenders.read(tmp_path / "x.safetensors")
    captured = contenders.path_named("fa2-seed2-1750")
    assert contenders.read(captured, causal=True).causal
    with pytest.raises(UserError, match="^--on: .*1750.*.xz has causal=True$"):
        contenders.read(captured, causal=False)
    with pytest.raises(UserError, match="did you mean fa2-seed2-1750"):
        contenders.named("fa2-seed2-175")


def test_one_capture_is_compared_by_its_name(tmp_path, monkeypatch, capsys):
    name = "fa2-b-seed4-1580"
    assert torch.equal(contenders.read(name).q, contenders.named(name).q)
    assert main(["compare", "sdpa", "CLEAN", "--on", name]) == 0
    assert f"inputs: {name}, bfloat16, causal, on cpu, 1 head of" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["probe", name[:-1]]) == main(["compare", "sdpa", "math", "--on", name[:-1]]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == 2 * [f"lowprec: there is no {name[:-1]}: did you mean the capture {name}?"]
    run = data_root() / "runs" / "gpt2" / "fa2-seed2"  # packed
    assert main(["probe", str(run)]) == 2
    assert "fa2-seed2 is a run; give its checkpoint" in capsys.readouterr().err
    (tmp_path / name).mkdir()  # of one's own
    with pytest.raises(UserError, match=f"{name} is a folder"):
        contenders.read(name)


# The command


def test_the_status_says_whether_both_are_within_the_rule(own, capsys):
    assert main(["compare", "sdpa", "own_attention:same", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "They err alike" in out
    assert "inputs: random, bfloat16, causal, on cpu, 2 heads of 64 tokens\n" in out
    assert "not tried: no mask, another scale, fewer heads of keys (--kv-heads), other masks" in out
    assert main(["compare", "sdpa", "own_attention.py:broken", *SMALL]) == 1
    assert "not finite" in capsys.readouterr().out
    how = ["compare", "FA2", "own_attention:scaled", "--table", "t.csv", "--figure", "f.png"]
    assert main([*how, "--causal"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.partition("\n\nA (FA2)")[0].splitlines())) <= 100
    assert len((own / "t.csv").read_text().splitlines()) == 11
    assert (own / "f.png").stat().st_size > 5000


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_random_inputs_come_in_the_dtype_that_is_asked_for(dtype, capsys):
    assert main(["compare", "sdpa", "FA2", *SMALL, "--dtype", dtype]) == 1
    out = capsys.readouterr().out
    assert f"inputs: random, {dtype}, causal" in out and "coarser than the inputs" in out


@pytest.mark.parametrize("size", [8, 64])
def test_of_one_key_the_gradients_to_q_and_k_are_0_and_not_compared(size, capsys):
    """The exact dQ and dK are 0 there, or float64 noise."""
    arguments = ["compare", "sdpa", "FA2", "--shape", "1", "4", "1", f"{size}", "--causal"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "not finite" not in said and "inf" not in said
    assert "The exact dQ and dK of random, seed 0 are 0, so they were not compared." in said
    inputs = contenders.drawn((1, 4, 1, size))

    def off(q, k, v, **how):
        return contenders.plain(q, k, v, **how) + 0 * (q - q.detach()).sqrt()

    table = one(off, inputs)
    assert set(table.of) == {"O", "dQ", "dV", "δ"}
    assert "B's dQ has numbers that are not finite" in compare.verdict(table)


def test_a_plain_attention_on_few_rows_has_no_sign():
    table = one(contenders.plain, contenders.drawn((1, 2, 2, 64)))
    assert (table.n == 2).all() and not len(compare.outside(table))


def test_a_forward_pass_alone_is_compared_and_said(own, capsys):
    assert main(["compare", "sdpa", "own_attention:forward", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "gives no gradients" in out and "in what both give" in out
    assert main(["compare", "sdpa", "own_attention:wide_forward", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "They differ most, in ulps of the inputs, in O" in out and "gives no gradients" in out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inputs_lie_on_the_device_that_is_asked_for(device, monkeypatch, capsys):
    met = set()

    def kept(call):
        return lambda q, *rest, **how: met.add(q.device.type) or call(q, *rest, **how)

    named = contenders.function
    monkeypatch.setattr(contenders, "function", lambda *args: kept(named(*args)))
    assert main(["compare", "sdpa", "SAFE", *SMALL, "--device", device]) == 0
    assert met == {device} and f"on {device}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sdpa", "math", "--device", "tpu"], "no device=tpu; take cuda, cpu or auto"),
        (["sdpa", "own_attention:raises"], "B fails on random.*TypeError.*is_causal"),
        (["own_attention:short", "sdpa"], "A must return O of shape"),
        (["sdpa", "math", "--on", "none.safetensors"], "--on: there is no none.safetensors"),
        (["sdpa", "math", "--on", "."], "--on: . is a folder"),
        (["sdpa", "math", "--seed", f"{2**64}"], "seed=18446744073709551616 must be from -2"),
        (["sdpa", "math", "--on", "captures", "--seed", "1"], "--seed are of random inputs"),
        (["sdpa", "math", "--on", "captures", "--no-causal"], "the captures are causal"),
        (["sdpa", "math", "--causal", "--no-causal"], "one of --causal and --no-causal"),
        (["sdpa", "math", "--kv-heads", "3"], "3 heads of keys"),
        (["sdpa", "math", "--kv-heads", "0"], "kv_heads=0 must be at least 1"),
        (["sdpa", "math", "--shape", "1", "2", "-3", "32"], "1, 2, -3, 32.* must be at least 1"),
        (["sdpa", "math", "--table", "t.txt"], "must end in .csv"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_argument(arguments, words, own, capsys):
    shape = [] if {"--shape", "--on"} & {*arguments} else ["--shape", "1", "2", "64", "32"]
    assert main(["compare", *arguments, *shape]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.count("\n") == 1


@pytest.mark.parametrize("flag, masked", [("--causal", "causal"), ("--no-causal", "not causal")])
def test_of_a_file_that_does_not_say_the_user_must_say_whether_it_is_causal(
    flag, masked, own, capsys
):
    from safetensors.torch import save_file

    x = torch.randn(4, 1, 2, 32, 16).bfloat16()
    tensors = {n: y.clone() for n, y in zip(("q", "k", "v", "do"), x, strict=True)}
    save_file(tensors, "x.safetensors")
    assert main(["compare", "sdpa", "math", "--on", "x.safetensors"]) == 2
    assert "has no causal" in capsys.readouterr().err
    assert main(["compare", "sdpa", "math", "--on", "x.safetensors", flag]) == 0
    assert f"bfloat16, {masked}, on" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_fault_in_the_last_tile_is_found(dtype):
    """Though late rows of causal attention are small: no gradient of the last key, or a mask."""

    def detached(q, k, v, **how):
        k, v = (torch.cat([x[:, :, :-1], x[:, :, -1:].detach()], 2) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, **how)

    def dropped(q, k, v, scale, **how):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        seen[-1, -1] = False
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

    calls = {"A": scaled_dot_product_attention, "B": detached, "C": dropped}
    some = [contenders.drawn((1, 2, n, 64), seed=n, dtype=dtype) for n in (257, 1025)]
    table = compare.measure(calls, some, twice=False)
    of_keys = table[table.of.isin(["dK", "dV"])]
    found, worst = planted.found(table), of_keys.groupby(["who", "input"]).worst.max()
    assert not found["A"].any() and found[["B", "C"]].all()
    assert worst[["B", "C"]].min() > 1.5 * compare.WORST


def test_a_capture_is_written_and_compared(own, capsys):
    assert main(["data", "capture", "fa2-a-seed1-1520", "x.safetensors"]) == 0
    assert main(["compare", "FA2", "CLEAN", "--on", "x.safetensors"]) == 0
    assert "rounding, magnified" in capsys.readouterr().out


def test_limits_of_a_table_and_signs_corrected_for_it():
    table = compare.judged(
        pd.DataFrame(
            dict(
                of=["O"] * 4,
                times=[1, 2, 2.1, 1],
                worst=[1, 4, 1, 4.1],
                p=[0.012, 0.013, 1, 1],
                n=compare.BLOCKS,
                signed=[-0.5, 1, 0, 0],
                plain=1.0,
            )
        )
    )
    assert list(table.large) == [False, False, True, True]
    assert list(table.clear) == list(table.lean) == [True, False, False, False]


def test_an_interval_and_a_p_of_a_sign_are_of_one_t_test(inputs):
    table = one(contenders.plain, inputs)
    t = scipy.stats.t(table.n - 1)
    error = table.signed.abs() / t.isf(table.p / 2)
    assert np.allclose(table.half, t.ppf(0.975) * error, rtol=1e-6)


def test_one_ulp_is_at_least_what_storing_does():
    g = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 1, 1, 256, 16, generator=g)
    given = [x.bfloat16() for x in (0 * q, k, v + 8, do)]
    exact = compare.Exact(contenders.Inputs("even", *given, causal=False, scale=0.25))
    right = exact.right["O"]
    stored = (right.bfloat16().double() - right).norm() / right.norm()
    assert exact.ulp["O"] >= stored.item()


@pytest.mark.parametrize("plain, weak", [(0.09, False), (0.11, True)])
def test_a_yardstick_that_errs_by_a_tenth_is_weak(plain, weak, inputs):
    table = one(contenders.plain, inputs).assign(plain=plain)
    assert ("The yardstick is weak here" in compare.verdict(table)) == weak


def test_of_what_differs_between_two_runs_the_largest_part_is_said(inputs):
    table = one(contenders.plain, inputs)
    shares = dict(dQ=0.01, dK=0.25, dV=0.02)
    table.attrs["unsteady"] = [("B", "here", of, share) for of, share in shares.items()]
    assert "B is not deterministic: two runs on the same inputs differ, in dK by 0.25 of" in (
        compare.verdict(table)
    )


def test_a_sign_of_delta_is_over_root_mean_squares(inputs):
    exact = compare.Exact(inputs)
    wrong = -0.01 * inputs.scale * exact.weighted
    rows = exact.rows("x", {"dQ": exact.right["dQ"] + wrong})
    signed = next(row["signed"] for row in rows if row["of"] == "δ")
    size, right = (
        x.square().mean().sqrt().item() for x in (exact.weighted.norm(dim=-1), exact.right["δ"])
    )
    assert signed == pytest.approx(0.01 * size / right, rel=1e-6)


def test_a_policy_with_a_space_is_no_module():
    assert callable(contenders.function("LOW +o=bf16:stochastic"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_where_none_are_kept(mode, inputs):
    with mode():
        assert "dQ" in set(one(contenders.function("FA2"), inputs).of)
