"""Rounding is checked bit for bit against four independent oracles: torch's casts, ml_dtypes,
gfloat and NumPy; where inputs can be enumerated, they are."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from fractions import Fraction

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec import UserError
from lowprec.numerics import formats
from lowprec.numerics.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    FP64,
    ROUNDINGS,
    TF32,
    Format,
    bit_fields,
    keyed_bits,
    round_to,
    ulp,
)

E8M5 = Format.custom(8, 5)
E3M4 = Format.custom(3, 4)
MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "stochastic": gfloat.RoundMode.Stochastic,
}


def ieee_info(fmt):
    """gfloat's description of an IEEE-like format, from the two counts alone."""
    e, m = fmt.exponent_bits, fmt.significand_bits
    return gfloat.FormatInfo(
        fmt.name,
        k=1 + e + m,
        precision=m + 1,
        bias=2 ** (e - 1) - 1,
        is_signed=True,
        domain=gfloat.Domain.Extended,
        has_nz=True,
        num_high_nans=2**m - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )


GFLOAT = {
    BF16: gf.format_info_bfloat16,
    FP16: gf.format_info_binary16,
    E5M2: gf.format_info_ocp_e5m2,
    E4M3: gf.format_info_ocp_e4m3,
    E4M3.replace(overflow="saturate"): gf.format_info_ocp_e4m3,
    E2M1: gf.format_info_ocp_e2m1,
    E8M5: ieee_info(E8M5),
    E3M4: ieee_info(E3M4),
    TF32: ieee_info(TF32),
}
NAMED = [FP64, FP32, TF32, BF16, FP16, E4M3, E5M2, E2M1]
named = pytest.mark.parametrize("fmt", GFLOAT, ids=lambda f: f.name)
rounding_modes = pytest.mark.parametrize("rounding", ROUNDINGS)


def code_points(fmt):
    """Every finite value of a format that is not negative, in order, decoded by gfloat."""
    info = GFLOAT[fmt]
    values = gfloat.decode_ndarray(info, np.arange(2 ** (info.k - 1)))
    return values[np.isfinite(values)]


def hard_inputs(fmt, dtype):
    """The inputs where rounding goes wrong, as a tensor, of both signs.

    Every value of fmt (of TF32 a sample), every midpoint, the float just below and above each of
    them, points at 0.3, 0.49, 0.51 and 0.7 of the way to the next value, the same around the
    first value that overflows, then zeros, infinities, NaN and the ends of the float range.
    """
    values = code_points(fmt)
    if fmt is TF32:
        sample = np.random.default_rng(0).choice(values, 2**14)
        values = np.union1d(sample, values[[0, 1, -2, -1]])
    step = ulp(torch.from_numpy(values), fmt).numpy()
    points = [values + f * step for f in (0, 0.3, 0.49, 0.5, 0.51, 0.7, 1)]
    with np.errstate(over="ignore"):
        points = np.concatenate(points).astype(str(dtype).removeprefix("torch."))
    info = np.finfo(points.dtype)
    ends = [0.0, math.inf, math.nan, info.max, info.tiny, info.smallest_subnormal]
    zero, infinity = points.dtype.type(0), points.dtype.type(math.inf)
    around = [points, np.nextafter(points, zero), np.nextafter(points, infinity)]
    everything = np.concatenate([*around, np.array(ends, dtype=points.dtype)])
    return torch.from_numpy(np.concatenate([everything, -everything]))


def random_patterns(n, seed=0):
    """n float32 values with uniformly random bits: all exponents, some infinities and NaN."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32))


def random_words(x, seed=1):
    return torch.randint(2**32, x.shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(got, want):
    """Equal bit for bit, signed zeros included; one NaN is as good as another."""
    got, want = (np.asarray(t, dtype=np.float64) for t in (got, want))
    agree = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    bad = np.flatnonzero(~agree)
    assert bad.size == 0, f"{bad.size} of {got.size}: got {got[bad[:3]]}, want {want[bad[:3]]}"


# Against the oracles


@pytest.mark.filterwarnings("ignore:overflow encountered in ldexp:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@rounding_modes
@named
def test_every_mode_equals_gfloat(fmt, rounding, dtype):
    x = hard_inputs(fmt, dtype)
    words = random_words(x) if rounding == "stochastic" else None
    want = gfloat.round_ndarray(
        GFLOAT[fmt],
        x.double().numpy(),
        MODES[rounding],
        sat=fmt.overflow == "saturate",
        srbits=None if words is None else words.numpy(),
        srnumbits=32,
    )
    assert_same_bits(round_to(x, fmt, rounding, bits=words), want)


@rounding_modes
@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2, E8M5], ids=lambda f: f.name)
def test_scalar_gfloat_agrees_too(fmt, rounding):
    # float32 inputs, because gfloat's scalar nearest_away rounds 0.49999999999999994 up.
    x = hard_inputs(fmt, torch.float32).double()
    x = x[~x.isnan()][:: len(x) // 2000 + 1]
    words = random_words(x)
    want = [
        gfloat.round_float(GFLOAT[fmt], v, MODES[rounding], fmt.overflow == "saturate", b, 32)
        for v, b in zip(x.tolist(), words.tolist(), strict=True)
    ]
    assert_same_bits(round_to(x, fmt, rounding, bits=words), want)


CASTS = {
    BF16: torch.bfloat16, FP16: torch.float16, E5M2: torch.float8_e5m2,
    E4M3.replace(overflow="saturate"): torch.float8_e4m3fn,
}  # fmt: skip


@pytest.mark.parametrize("fmt", CASTS, ids=lambda f: f.name)
def test_nearest_even_equals_torch_casts(fmt):
    x = torch.cat([hard_inputs(fmt, torch.float32), random_patterns(2**20)])
    want = x.to(CASTS[fmt]).float()
    assert_same_bits(round_to(x, fmt), want)
    assert_same_bits(formats._round_by_scaling(x, fmt, "nearest_even"), want)


def test_e4m3_equals_torch_cast_below_overflow():
    x = torch.cat([hard_inputs(E4M3, torch.float32), random_patterns(2**20)])
    x = x[(x.abs() <= 464) | x.isnan()]
    assert_same_bits(round_to(x, E4M3), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (BF16, ml_dtypes.bfloat16),
        (FP16, np.float16),
        (E5M2, ml_dtypes.float8_e5m2),
        (E4M3, ml_dtypes.float8_e4m3fn),
        (Format.custom(4, 3), ml_dtypes.float8_e4m3),
        (Format.custom(3, 4), ml_dtypes.float8_e3m4),
        (E2M1, ml_dtypes.float4_e2m1fn),
    ],
    ids=lambda v: getattr(v, "name", v.__class__.__name__),
)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_nearest_even_equals_ml_dtypes(fmt, dtype):
    hard = hard_inputs(fmt if fmt in GFLOAT else E4M3, torch.float32)
    x = torch.cat([hard, random_patterns(2**20)])
    if not fmt.has_nan:
        x = x[~x.isnan()]
    assert_same_bits(round_to(x, fmt), x.numpy().astype(dtype).astype(np.float64))


def test_float64_to_fp32_and_fp16_equals_numpy():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**64, 2**19, dtype=np.uint64).view(np.float64)
    near = rng.standard_normal(2**19) * 2.0 ** rng.integers(-150, 129, 2**19)
    # Midpoints between FP32 values and the floats beside them.
    low = rng.integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    low = low[np.isfinite(low)]
    high = np.nextafter(low, np.float32(np.inf))
    middle = (low.astype(np.float64) + high) / 2
    sides = [np.nextafter(middle, s) for s in (-np.inf, np.inf)]
    x = np.concatenate([x, near, low, middle, *sides])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for fmt, dtype in ((FP32, np.float32), (FP16, np.float16)):
            assert_same_bits(round_to(torch.from_numpy(x), fmt), x.astype(dtype))


def integer_round_to_bf16(x):
    """FP32 to BF16 on the bit pattern: add half an ulp, less one where the kept part is even."""
    u = x.view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FC00000), rounded)


@pytest.mark.slow
def test_all_float32_inputs_to_bf16():
    chunk = 2**18
    offsets = np.arange(chunk, dtype=np.uint32)
    for start in range(0, 2**32, chunk):
        pattern = offsets + np.uint32(start)
        x = pattern.view(np.float32)
        want = integer_round_to_bf16(x)
        tensor = torch.from_numpy(x)
        for got in (
            formats._round_by_scaling(tensor, BF16, "nearest_even"),
            round_to(tensor, BF16),
        ):
            got = got.numpy().view(np.uint32)
            if not np.array_equal(got, want):
                # Only the sign and payload of NaN may differ.
                differ = got != want
                assert np.isnan(x[differ]).all(), f"in patterns from {start:#010x}"
                assert np.isnan(got[differ].view(np.float32)).all()


# Particular cases


def test_float64_is_not_rounded_twice():
    # Just above the tie between 1 and 1 + 2^-7: by way of FP32 it would become the tie, and 1.
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-8 + 2.0**-40)], dtype=torch.float64)
    assert round_to(x, BF16).tolist() == [1 + 2.0**-7, -(1 + 2.0**-7)]
    # Just below the tie between 1 + 2^-7 and 1 + 2^-6, which is even.
    x = torch.tensor([1 + 3 * 2.0**-8 - 2.0**-40], dtype=torch.float64)
    assert round_to(x, BF16).tolist() == [1 + 2.0**-7]


def test_nearest_away_just_below_one_half():
    below = 0.49999999999999994
    fmt = Format.custom(3, 2)
    tie = fmt.min_subnormal * torch.tensor([below, 0.5, 1.5, -below, -0.5], dtype=torch.float64)
    want = [0.0, 1.0, 2.0, -0.0, -1.0]
    assert_same_bits(round_to(tie, fmt, "nearest_away") / fmt.min_subnormal, want)


@pytest.mark.parametrize(
    ("fmt", "tie", "beyond", "infinity"),
    [
        # the midpoint past max, the first number above that midpoint, and infinity
        (BF16, math.inf, math.inf, math.inf),
        (FP16, math.inf, math.inf, math.inf),
        (BF16.replace(overflow="saturate"), BF16.max, BF16.max, BF16.max),
        (FP16.replace(overflow="nan"), math.nan, math.nan, math.nan),
        (E5M2, math.inf, math.inf, math.inf),
        (E5M2.replace(overflow="nan"), math.nan, math.nan, math.nan),
        (E5M2.replace(overflow="saturate"), 57344.0, 57344.0, 57344.0),
        (E4M3, 448.0, math.nan, math.nan),
        (E4M3.replace(overflow="saturate"), 448.0, 448.0, 448.0),
        (E2M1, 6.0, 6.0, 6.0),
    ],
    ids=lambda v: getattr(v, "name", None),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overflow(fmt, tie, beyond, infinity, dtype):
    middle = torch.tensor(fmt.max + 2.0 ** (fmt.emax - fmt.significand_bits - 1), dtype=dtype)
    above = middle.nextafter(torch.tensor(math.inf, dtype=dtype))
    below = middle.nextafter(torch.tensor(0.0, dtype=dtype))
    x = torch.stack([below, middle, above, torch.tensor(math.inf, dtype=dtype)])
    want = np.array([fmt.max, tie, beyond, infinity])
    assert_same_bits(round_to(x, fmt), want)
    assert_same_bits(round_to(-x, fmt), -want)
    assert round_to(x, fmt, "toward_zero")[:3].tolist() == [fmt.max] * 3
    assert_same_bits(round_to(x, fmt, "toward_zero")[3], infinity)


@rounding_modes
def test_nan_and_signed_zero_stay(rounding):
    x = torch.tensor([math.nan, 0.0, -0.0])
    for fmt in NAMED:
        got = round_to(x, fmt, rounding, bits=torch.zeros(3, dtype=torch.int64))
        assert_same_bits(got, x)


def test_wider_formats_leave_float32_alone():
    x = random_patterns(2**12)
    for fmt in (FP32, FP64, Format.custom(9, 30)):
        for rounding in ("nearest_even", "nearest_away", "toward_zero"):
            got = round_to(x, fmt, rounding)
            assert torch.equal(got.view(torch.int32), x.view(torch.int32))
            assert got.data_ptr() != x.data_ptr()
    saturated = round_to(torch.tensor([-math.inf, 1.5]), FP32.replace(overflow="saturate"))
    assert saturated.tolist() == [-FP32.max, 1.5]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_shape_dtype_layout_and_gradient(shape):
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        for fmt in (BF16, FP32, E4M3):
            for t in (x, x.mT if x.ndim == 2 else x):
                before = t.detach().clone()
                got = round_to(t, fmt, "nearest_away")
                assert (got.shape, got.dtype, got.requires_grad) == (t.shape, dtype, False)
                assert torch.equal(t, before)
                assert torch.equal(got, round_to(before.contiguous(), fmt, "nearest_away"))


# Properties

small_formats = st.builds(
    Format.custom,
    st.integers(2, 10),
    st.integers(1, 52),
    st.sampled_from(["inf", "nan", "saturate"]),
) | st.sampled_from(NAMED[1:])
floats = st.floats(width=64)
deterministic = st.sampled_from(ROUNDINGS[:3])


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=400, deadline=None)
@given(small_formats, deterministic, floats, st.floats(-4, 4))
def test_idempotent_odd_and_close(fmt, rounding, wild, mild):
    x = tensor(wild, mild)
    once = round_to(x, fmt, rounding)
    assert_same_bits(round_to(once, fmt, rounding), once)
    assert_same_bits(round_to(-x, fmt, rounding), -once)
    assert ((once.abs() <= fmt.max) | ~once.isfinite()).all()
    for exact, got, step in zip(x.tolist(), once.tolist(), ulp(x, fmt).tolist(), strict=True):
        if abs(exact) <= fmt.max:
            error = abs(Fraction(got) - Fraction(exact))
            limit = Fraction(step) if rounding == "toward_zero" else Fraction(step) / 2
            assert error < limit or (error == limit and rounding != "toward_zero")
            assert rounding != "toward_zero" or abs(got) <= abs(exact)


@settings(max_examples=400, deadline=None)
@given(small_formats, deterministic, floats, floats)
def test_monotone(fmt, rounding, a, b):
    low, high = sorted(v if not math.isnan(v) else 0.0 for v in (a, b))
    got = round_to(tensor(low, high), fmt, rounding)
    assert got.isnan().any() or got[0] <= got[1]


@settings(max_examples=200, deadline=None)
@given(small_formats, floats, st.integers(0, 2**32 - 1))
def test_stochastic_takes_a_neighbour(fmt, v, word):
    x = tensor(v)
    got = round_to(x, fmt, "stochastic", bits=torch.tensor([word]))
    down = round_to(x, fmt, "toward_zero")
    if got.isfinite() and x.isfinite():
        distance = (got.abs() - down.abs()) / ulp(x, fmt)
        assert distance.item() in (0, 1)
        if x.item() == down.item():
            assert_same_bits(got, x)


# Stochastic rounding


def test_stochastic_probability_is_the_discarded_fraction():
    # A float32 input to BF16 discards 16 bits, so the upper 16 bits of the word decide: run all.
    for discarded, low in itertools.product((0, 1, 2, 0x7FFF, 0x8000, 0xFFFF), (0, 0xFFFF)):
        words = torch.arange(2**16) << 16 | low
        for base in (1.0, -2.40625, 3 * 2.0**-130, 1.5 * 2.0**127):
            pattern = torch.tensor([base]).view(torch.int32) | discarded
            x = pattern.view(torch.float32).expand(2**16)
            up = round_to(x, BF16, "stochastic", bits=words) != round_to(x, BF16, "toward_zero")
            assert up.sum() == discarded


@pytest.mark.parametrize("fraction", [2.0**-33, 1.5 * 2.0**-32, 0.3, 1 / 3, 0.75, 1 - 2.0**-32])
def test_stochastic_probability_is_to_the_nearest_2_to_minus_32(fraction):
    x = tensor(1 + fraction * 2.0**-7)
    exact = (Fraction(x.item()) - 1) * 2**7
    # Words from 2^32 - chances on round up; `round` takes a tie to the even number of chances.
    chances = round(exact * 2**32)
    for word in {2**32 - 1 - chances, 2**32 - max(chances, 1), 0, 2**32 - 1}:
        got = round_to(x, BF16, "stochastic", bits=torch.tensor([word]))
        assert got.item() == (1 + 2.0**-7 if word >= 2**32 - chances else 1)


def test_stochastic_equals_integer_addition_on_the_pattern():
    x = random_patterns(2**20)
    x = x[~x.isnan()]
    words = random_words(x)
    pattern = (x.view(torch.int32).long() + (words >> 16)) & 0xFFFF0000
    want = torch.where(x.isinf(), x, pattern.to(torch.int32).view(torch.float32))
    assert_same_bits(round_to(x, BF16, "stochastic", bits=words), want)


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E2M1, E8M5], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stochastic_is_unbiased(fmt, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2**20, generator=generator, dtype=dtype) * 3 - 1
    step = ulp(x, fmt).double()
    error = (round_to(x, fmt, "stochastic", generator).double() - x) / step
    fraction = (x.double().abs() / step).frac()
    # Each error has mean 0 and variance f (1 - f) ulp²; five standard deviations of their mean.
    bound = 5 * (fraction * (1 - fraction)).sum().sqrt() / len(x)
    assert error.mean().abs() < bound
    # The same bound tells a biased rounding apart.
    biased = (round_to(x, fmt, "toward_zero").double() - x) / step * x.sign()
    assert biased.mean().abs() > bound


def test_stochastic_repeats_with_its_generator():
    x = torch.randn(1000)
    a, b, c = (round_to(x, BF16, "stochastic", torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# Random words keyed by position


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # The known answers that the Random123 library publishes for philox4x32, 10 rounds.
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, want):
    counter, key, want = ([int(w, 16) for w in words.split()] for words in (counter, key, want))
    got = formats._philox([torch.tensor(w) for w in counter], key)
    assert [w.item() for w in got] == want
    column, row, head, batch = counter
    assert keyed_bits(*key, batch, head, row, column).item() == want[0]


def test_keyed_bits_depend_on_position_only():
    b, h, r, c = (
        torch.arange(n).view([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate((2, 3, 5, 7))
    )
    words = keyed_bits(7, 3, b, h, r, c)
    assert (words.shape, words.dtype) == ((2, 3, 5, 7), torch.int64)
    assert words.unique().numel() == words.numel()
    assert words[1, 2, 4, 6] == keyed_bits(7, 3, 1, 2, 4, 6)
    assert torch.equal(words[:, :, 2:], keyed_bits(7, 3, b, h, r[:, :, 2:], c))
    others = [keyed_bits(8, 3, b, h, r, c), keyed_bits(7, 4, b, h, r, c)]
    assert all((words != other).all() for other in others)


TRITON_SCRIPT = """
import sys, torch, triton, triton.language as tl
from lowprec.numerics.formats import keyed_bits

@triton.jit
def kernel(p_out, key, batch, head, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None] + tl.zeros([ROWS, COLUMNS], tl.int32)
    column = tl.arange(0, COLUMNS)[None, :] + tl.zeros([ROWS, COLUMNS], tl.int32)
    zero = tl.zeros([ROWS, COLUMNS], tl.int32)
    words, _, _, _ = tl.philox(key, column, row, zero + head, zero + batch)
    tl.store(p_out + row * COLUMNS + column, words.to(tl.int64))

device = sys.argv[1]
for seed, site in ((0, 0), (1, 2), (0xDEADBEEF, 0x7FFFFFFE)):
    out = torch.zeros(16, 32, dtype=torch.int64, device=device)
    kernel[(1,)](out, seed | site << 32, 5, 3, 16, 32)
    rows, columns = torch.arange(16)[:, None], torch.arange(32)[None]
    want = keyed_bits(seed, site, 5, 3, rows.to(device), columns.to(device))
    assert torch.equal(out, want), (seed, site)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_keyed_bits_equal_tritons_philox(device, tmp_path):
    pytest.importorskip("triton")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    script = tmp_path / "philox.py"
    script.write_text(TRITON_SCRIPT)
    # Triton reads this variable when it is imported, hence the process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), device]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Formats, ulp and bit fields


@pytest.mark.parametrize(
    ("fmt", "info"),
    [
        (FP64, np.finfo(np.float64)),
        (FP32, np.finfo(np.float32)),
        (FP16, np.finfo(np.float16)),
        (BF16, ml_dtypes.finfo(ml_dtypes.bfloat16)),
        (E5M2, ml_dtypes.finfo(ml_dtypes.float8_e5m2)),
        (E4M3, ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)),
        (Format.custom(4, 3), ml_dtypes.finfo(ml_dtypes.float8_e4m3)),
        (E2M1, ml_dtypes.finfo(ml_dtypes.float4_e2m1fn)),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_constants(fmt, info):
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.tiny)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.unit_roundoff == float(info.eps) / 2
    assert fmt.bits == info.bits


def test_has_inf_and_nan():
    assert [f.has_inf for f in (BF16, E5M2, E4M3, E2M1)] == [True, True, False, False]
    assert [f.has_nan for f in (BF16, E5M2, E4M3, E2M1)] == [True, True, True, False]


@pytest.mark.parametrize("text", ["bf16", "BF16", "bfloat16", "e8m5", "fp32", "float32", "fp64"])
def test_parse(text):
    assert Format.parse(text) == {
        "bf16": BF16,
        "bfloat16": BF16,
        "e8m5": E8M5,
        "fp32": FP32,
        "float32": FP32,
        "fp64": FP64,
    }.get(text.lower())


def test_parse_gives_back_every_format():
    made = [*NAMED, E8M5, Format.custom(4, 3), Format.custom(2, 1), Format.custom(5, 2, "nan")]
    made += [f.replace(overflow="saturate") for f in made if f is not FP64]
    for fmt in made:
        assert Format.parse(fmt.name) == fmt
        assert Format.parse(fmt) is fmt
    assert Format.parse("e4m3") == E4M3 != Format.custom(4, 3)
    assert (E8M5.name, Format.custom(4, 3).name) == ("e8m5", "e4m3ieee")
    assert E4M3.replace(overflow="saturate").replace(overflow="nan") == E4M3
    assert dataclasses.replace(E4M3, overflow="saturate").max == 448
    assert Format.parse("e4m3fn@2^32").max == 448 * 2.0**-32


def test_a_format_that_reaches_below_another_is_not_within_it():
    assert Format.parse("e4m3fn@2^12").within(FP16)
    assert not Format.parse("e4m3fn@2^16").within(FP16)


def test_ulp_equals_numpy_spacing():
    for dtype, fmt in ((np.float16, FP16), (np.float32, FP32), (np.float64, FP64)):
        rng = np.random.default_rng(0)
        pattern = rng.integers(0, 2**fmt.bits, 2**16, dtype=f"u{fmt.bits // 8}")
        x = pattern.view(dtype)
        x = np.concatenate([x[np.abs(x) < fmt.max], [dtype(0), dtype(fmt.min_subnormal)]])
        container = np.float64 if dtype is np.float64 else np.float32
        got = ulp(torch.from_numpy(x.astype(container)), fmt)
        assert_same_bits(got, np.spacing(np.abs(x)))


def test_ulp_at_the_edges():
    x = torch.tensor([1.0, 1.99, -2.0, 0.0, 1e-45, 7.0, 1e9, math.inf, math.nan])
    want = [0.5, 0.5, 1.0, 0.5, 0.5, 2.0, 2.0, math.nan, math.nan]
    assert_same_bits(ulp(x, E2M1), want)
    assert ulp(torch.tensor([3.5, 2.0**-130]), "bf16").tolist() == [2.0**-6, 2.0**-133]


@pytest.mark.parametrize(
    ("x", "fmt", "want", "value"),
    [
        (-2.40625, BF16, "1 10000000 0011010", -2.40625),
        (-4.703990459442139, FP32, "1 10000001 00101101000011100010111", -4.703990459442139),
        (-4.703990459442139, BF16, "1 10000001 0010111", -4.71875),
        (-0.0, FP16, "1 00000 0000000000", -0.0),
        (1e39, BF16, "0 11111111 0000000", math.inf),
        (math.nan, BF16, "0 11111111 1000000", math.nan),
        (math.nan, E4M3, "0 1111 111", math.nan),
        (448.0, E4M3, "0 1111 110", 448.0),
        (6.0, E2M1, "0 11 1", 6.0),
        (0.5, "e2m1", "0 00 1", 0.5),
    ],
)
def test_bit_fields(x, fmt, want, value):
    got = bit_fields(x, fmt)
    assert str(got) == want
    assert (got.sign, got.exponent, got.significand) == tuple(want.split())
    assert_same_bits(got.value, value)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E5M2, ml_dtypes.float8_e5m2),
        (BF16, ml_dtypes.bfloat16),
        (FP16, np.float16),
        (FP32, np.float32),
        (FP64, np.float64),
    ],
    ids=lambda v: getattr(v, "name", v.__class__.__name__),
)
def test_bit_fields_are_the_stored_bits(fmt, dtype):
    rng = np.random.default_rng(0)
    n = 256 if fmt.bits == 8 else 500
    codes = rng.permutation(256) if n == 256 else rng.integers(0, 2**fmt.bits, n, dtype=np.uint64)
    codes = codes.astype(f"u{fmt.bits // 8}")
    for code, value in zip(codes, codes.view(dtype).astype(np.float64), strict=True):
        if not np.isnan(value):
            assert str(bit_fields(value, fmt)).replace(" ", "") == f"{code:0{fmt.bits}b}"


# Mistakes of the user


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Format.parse("bf17"), "bf16"),
        (lambda: Format.parse("bf17"), "'bf17'"),
        (lambda: Format.parse(""), "Unknown number format"),
        (lambda: Format.parse(None), "Unknown number format"),
        (lambda: Format.parse("e12m3"), "2 to 10 exponent bits"),
        (lambda: Format.custom(11, 3), "2 to 10 exponent bits"),
        (lambda: Format.custom(1, 3), "2 to 10 exponent bits"),
        (lambda: FP64.replace(overflow="saturate"), "or fp64"),
        (lambda: Format.custom(8, 0), "1 to 52 significand bits"),
        (lambda: Format.custom(8, 53), "1 to 52 significand bits"),
        (lambda: Format.custom(8, 5, "wrap"), "overflow='wrap'"),
        (lambda: E2M1.replace(overflow="nan"), "saturate"),
        (lambda: E4M3.replace(overflow="inf"), "nan, saturate"),
        (lambda: round_to(torch.ones(2), "bf16", "nearest"), "nearest_even"),
        (lambda: round_to(torch.ones(2), "bf16", "stochastic"), "torch.Generator"),
        (
            lambda: round_to(
                torch.ones(2), BF16, "stochastic", torch.Generator(), torch.zeros(2).long()
            ),
            "either generator",
        ),
        (
            lambda: round_to(torch.ones(2, device="meta"), BF16, "stochastic", torch.Generator()),
            "generator is on cpu and x on meta",
        ),
        (lambda: round_to(torch.ones(2).bfloat16(), "e4m3"), "torch.bfloat16"),
        (lambda: round_to(1.5, "e4m3"), "x is float"),
        (lambda: Format.parse("e4m3fn@2^33"), r"2\^-32 to 2\^32"),
        (lambda: round_to(torch.ones(2), "e9m5"), r"x.double\(\)"),
        (lambda: ulp(torch.ones(2), "fp64"), r"x.double\(\)"),
        (
            lambda: round_to(torch.ones(2), BF16, "stochastic", bits=torch.zeros(3).long()),
            r"\(2,\)",
        ),
        (lambda: round_to(torch.ones(2), BF16, "stochastic", bits=torch.zeros(2)), "int64"),
        (lambda: bit_fields(math.nan, E2M1), "e2m1 has no code for NaN"),
        (lambda: keyed_bits(2**32, 0, 0, 0, 0, 0), "seed is 4294967296"),
        (lambda: keyed_bits(0, -1, 0, 0, 0, 0), "site is -1"),
    ],
)
def test_user_errors(call, words):
    with pytest.raises(UserError, match=words) as error:
        call()
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@rounding_modes
@named
def test_cuda_equals_cpu(fmt, rounding, dtype):
    x = hard_inputs(fmt, dtype)
    words = random_words(x)
    want = round_to(x, fmt, rounding, bits=words)
    got = round_to(x.cuda(), fmt, rounding, bits=words.cuda())
    assert got.is_cuda
    assert_same_bits(got.cpu(), want)
    assert_same_bits(ulp(x.cuda(), fmt).cpu(), ulp(x, fmt))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_stochastic_repeats_and_draws_the_same_keyed_bits():
    x = torch.randn(4096, device="cuda")
    a, b = (
        round_to(x, BF16, "stochastic", torch.Generator("cuda").manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(a, b)
    with pytest.raises(UserError, match="The generator is on cpu and x on cuda"):
        round_to(x, BF16, "stochastic", torch.Generator())
    rows, columns = torch.arange(100)[:, None], torch.arange(300)[None]
    want = keyed_bits(5, 1, 2, 3, rows, columns)
    assert torch.equal(keyed_bits(5, 1, 2, 3, rows.cuda(), columns.cuda()).cpu(), want)


def test_a_saturating_format_without_infinities_is_not_that_of_another():
    beyond = torch.tensor([70_000.0, 1e6, -1e6])
    fmt = Format("e5m2fn", 5, 2, "saturate", "nan")
    assert round_to(beyond, fmt).tolist() == [65_536.0, 98_304.0, -98_304.0]
