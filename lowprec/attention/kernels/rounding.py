"""What every attention kernel shares: rounding sites, random words, matrix products, tiles.

A site reaches a kernel as a `Code`; 0 is FP32, which rounds nothing. Numbers are rounded as in
`lowprec.numerics.formats.round_to`, on the bits of the FP32 pattern.

The same source runs under Triton's CPU interpreter, whose BF16 arithmetic is wrong: with
NATIVE=False values are FP32 as soon as they are loaded, rounded with integer operations on their
bit pattern and multiplied in FP32, which is exact for BF16 operands.

Names: p_* pointers, o_* offsets, m_* masks, b_* block values; BM queries, BN keys, D head_dim;
`c` is the kernel's `Constants`; `who` is (seed, batch, head), which keys random words together
with a row and a column.
"""

import math
from dataclasses import dataclass
from typing import Self

import triton
import triton.language as tl

from lowprec import UserError
from lowprec.numerics.formats import BF16, FP16, ROUNDINGS
from lowprec.numerics.policy import REDRAW, SITES, PrecisionPolicy

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO, STOCHASTIC = map(tl.constexpr, range(4))  # ROUNDINGS
OVERFLOWS = ("inf", "nan", "saturate")
INF, NAN, SATURATE = map(tl.constexpr, range(3))  # OVERFLOWS


class Code(int):
    """A rounding site as a kernel knows it: one integer, whose bytes are its attributes. (Triton
    hands numbers on from one function to the next, and not every object.)

    stream: place in SITES, or beyond; mode: place in ROUNDINGS; bits: stored significand bits;
    emin, emax: exponents of the smallest and largest normal number; unused: codes above the largest
    number in its binade; beyond: place in OVERFLOWS of what becomes of larger ones; by_row: 1 where
    each row has a scale of its own. A static scale is in emin and emax.
    """

    BYTES = ("bits", "mode", "stream", "emin", "emax", "unused", "beyond", "by_row")

    @classmethod
    def of(cls, **parts: int) -> Self:
        return cls(sum((parts[name] & 255) << 8 * i for i, name in enumerate(cls.BYTES)))

    def __getattr__(self, name: str) -> int:
        if name not in self.BYTES:
            raise AttributeError(name)
        byte = int(self) >> 8 * self.BYTES.index(name) & 255
        return byte - 256 * (byte > 127)

    @property
    def max(self) -> float:
        return math.ldexp(2 - self.unused * 2.0**-self.bits, self.emax)

    def replace(self, **parts: int) -> Self:
        return Code.of(**{name: getattr(self, name) for name in self.BYTES} | parts)


@dataclass(frozen=True)
class Constants:
    """What a kernel knows when it is compiled, as one constexpr: shapes, options and sites.

    h heads of queries, group of them a head of keys, d head_dim; bm x bn the hardware block; tile
    keys (queries of a head for dK and dV) a rounding block, 0 for the whole row; even: the lengths
    are multiples of bm and bn; exact: see `scores` in `views`; pieces: see `dot`; native: above.
    plain: the mask is causal from the first query and key on, or there is none. If it is not plain,
    window, ranged and dense say what there is of `lowprec.attention.masks.Mask`. bias: numbers are
    added to s; direct: maxima are of s and not of the products.
    Each site is its `site_code`, redrawn that of a second rounding of o; the rest are fields of the
    policy and what the caller wants back.
    """

    h: int
    group: int
    d: int
    bm: int
    bn: int
    tile: int
    causal: bool
    even: bool
    exact: bool
    pieces: int
    native: bool
    plain: bool = True
    window: int = 0
    ranged: bool = False
    dense: bool = False
    bias: bool = False
    direct: bool = False
    s: Code = Code()
    x: Code = Code()
    p: Code = Code()
    l: Code = Code()  # noqa: E741
    o_acc: Code = Code()
    o: Code = Code()
    dodo: Code = Code()
    dp: Code = Code()
    p_bwd: Code = Code()
    ds: Code = Code()
    dq_acc: Code = Code()
    dkdv_acc: Code = Code()
    redrawn: Code = Code()
    l_from: str = "p_unnorm"
    l_floor: float = 0.0
    shift: str = "none"
    beta: float = 0.0
    gamma: float = 0.0
    tol: float = 0.0
    amplitude: float = 0.0
    dither_stream: int = 0
    delta_from: str = "o"
    delta_bias: float = 0.0
    row_sum: str = "as_rounded"
    stored: bool = False
    shadow: bool = False
    ties: bool = False
    probe: bool = False


def site_code(policy: PrecisionPolicy, name: str) -> Code:
    """Site `name` as a constexpr; 0 is FP32.

    Raises `UserError`, naming the field, for a format that the kernels do not have.
    """
    site = getattr(policy, name)
    if site.is_fp32:
        return Code()
    fmt = site.fmt
    wide = fmt.exponent_bits == 8 and fmt.significand_bits < 23 and fmt.overflow == "inf"
    small = fmt.exponent_bits < 8 and fmt.within(BF16)
    if not (wide or small or fmt.replace(overflow="inf", scale=0) == FP16):
        raise UserError(
            f"the Triton kernels do not honour policy field {name}={site}: a site there is fp32, "
            "fp16, bf16, e8mX with X below 23, or eXmY with X and Y up to 7; use impl='emulate'"
        )
    return Code.of(
        stream=SITES.index(name), mode=ROUNDINGS.index(site.rounding), bits=fmt.significand_bits,
        emin=fmt.emin, emax=fmt.emax, unused=2 if fmt.specials == "nan" else 1,
        beyond=OVERFLOWS.index(fmt.overflow), by_row=site.by_row,
    )  # fmt: skip


def redrawn_code(policy: PrecisionPolicy) -> Code:
    """The code of o's format, stochastic, with the random words of delta_from="o_redrawn"."""
    code = site_code(policy, "o")
    return code and code.replace(stream=REDRAW, mode=ROUNDINGS.index("stochastic"))


@triton.jit
def random_words(who, STREAM: tl.constexpr, o_row, o_col):
    """`numerics.formats.keyed_bits`: 32 random bits for each (row, column).  # [rows, columns]"""
    seed, batch, head = who
    o_row, o_col = (o_row + 0 * o_col).to(tl.uint32), (o_col + 0 * o_row).to(tl.uint32)
    key = tl.cast(seed, tl.int64) | (STREAM << 32)
    return tl.philox(key, o_col, o_row, head.to(tl.uint32), batch.to(tl.uint32))[0]


@triton.jit
def round_wide(x, bits, word, MODE: tl.constexpr, DROP: tl.constexpr):
    """FP32 with its last DROP significand bits rounded away; an overflow carries into infinity."""
    if MODE == NEAREST_EVEN:
        bits += ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)
    elif MODE == NEAREST_AWAY:
        bits += 1 << (DROP - 1)
    elif MODE == STOCHASTIC:
        bits += word >> (32 - DROP)
    return tl.where(x == x, ((bits >> DROP) << DROP).to(tl.float32, bitcast=True), x)


@triton.jit
def round_small(x, bits, word, CODE: tl.constexpr):
    """A format with a range of its own: |x| to a multiple of its ulp, then what lies beyond max."""
    MODE: tl.constexpr = CODE.mode
    LEAST: tl.constexpr = (CODE.emin + 127) << 23
    MOST: tl.constexpr = (CODE.emax + 127) << 23
    power = tl.minimum(tl.maximum(bits & 0x7F800000, LEAST), MOST)  # at |x|, as FP32 stores it
    size = tl.abs(x)
    if MODE == NEAREST_EVEN:  # the sum has the ulp wanted, and the processor rounds it
        large = (power + ((23 - CODE.bits) << 23)).to(tl.float32, bitcast=True)
        y = (size + large) - large
    else:
        ulp = power - (CODE.bits << 23)
        scaled = size * ((254 << 23) - ulp).to(tl.float32, bitcast=True)
        integer = tl.floor(scaled)
        fraction = scaled - integer
        if MODE == NEAREST_AWAY:
            up = fraction >= 0.5
        elif MODE == STOCHASTIC:
            part = fraction * 4294967296.0
            part = tl.where(part < 8388608.0, tl.floor(part + 0.5), part)  # to the nearest 2^-32
            up = part.to(tl.int64) + word.to(tl.int64) >= 4294967296
        else:
            up = fraction < 0
        y = (integer + up.to(tl.float32)) * ulp.to(tl.float32, bitcast=True)
    if MODE == TOWARD_ZERO:
        y = tl.where(size < float("inf"), tl.minimum(y, CODE.max), size)
    if CODE.beyond == SATURATE:
        y = tl.where(y > CODE.max, CODE.max, y)
    elif CODE.beyond == NAN:
        y = tl.where(y > CODE.max, float("nan"), y)
    else:
        y = tl.where(y > CODE.max, float("inf"), y)
    signed = y.to(tl.uint32, bitcast=True) | ((bits >> 31) << 31)  # -y would be 0 - y: +0 for 0
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """exp(x) as the hardware's exp2: 2 ulp of FP32, and a result below 2^-126 is 0."""
    return tl.exp2(x * LOG2E)


@triton.jit
def round_bf16_native(x):
    """To BF16 and back, two numbers per conversion: Triton's own cast takes one, at a quarter of
    the rate."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, -65536; }",
        "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def round_site(x, CODE: tl.constexpr, who, o_row, o_col, NATIVE: tl.constexpr):
    """x as the site of that code stores it; o_row and o_col broadcast to x's shape."""
    if CODE == 0:
        y = x
    else:
        MODE: tl.constexpr = CODE.mode
        WIDE: tl.constexpr = CODE.emin == -126
        HALF: tl.constexpr = CODE.bits == 10 and CODE.emin == -14
        if NATIVE and MODE == NEAREST_EVEN and WIDE and CODE.bits == 7:
            y = round_bf16_native(x)
        elif NATIVE and MODE == NEAREST_EVEN and HALF and CODE.beyond == INF:
            y = x.to(tl.float16).to(tl.float32)
        else:
            bits = x.to(tl.uint32, bitcast=True)
            word = bits
            if MODE == STOCHASTIC:
                word = random_words(who, CODE.stream, o_row, o_col)
            if WIDE:
                y = round_wide(x, bits, word, MODE, 23 - CODE.bits)
            else:
                y = round_small(x, bits, word, CODE)
    return y


@triton.jit
def round_rows(x, CODE: tl.constexpr, who, o_row, o_col, NATIVE: tl.constexpr):
    """`round_site` for whole rows: a site may give each its own scale, the power of two at or above
    max|x| / max of the format.  # [rows, columns]"""
    if CODE == 0 or CODE.by_row == 0:
        y = round_site(x, CODE, who, o_row, o_col, NATIVE)
    else:
        TOP: tl.constexpr = ((1 << CODE.bits) - CODE.unused) << (23 - CODE.bits)
        top = tl.max((x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32), 1)
        power = (top >> 23) - CODE.emax + ((top & 0x7FFFFF) > TOP).to(tl.int32)
        power = tl.where(top == 0, 127, tl.maximum(power, 1)) << 23
        power = tl.where(top < 0x7F800000, power, 0x7FC00000)  # else NaN
        scale = power.to(tl.float32, bitcast=True)[:, None]
        y = round_site(tl.div_rn(x, scale), CODE, who, o_row, o_col, NATIVE) * scale
    return y


@triton.jit
def round_bf16(x, NATIVE: tl.constexpr):
    """FP32 value nearest to x among BF16 numbers, ties to even."""
    if NATIVE:
        y = round_bf16_native(x)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        y = round_wide(x, bits, bits, NEAREST_EVEN, 16)
    return y


@triton.jit
def operand(x, CODE: tl.constexpr, who, o_row, o_col, NATIVE: tl.constexpr):
    """x rounded by its site for `dot`: in the 16-bit type that holds the numbers, if one does."""
    if not NATIVE or CODE == 0:
        y = round_site(x, CODE, who, o_row, o_col, NATIVE)
    elif CODE.emin == -126 and CODE.bits == 7 and CODE.mode == NEAREST_EVEN:
        y = x.to(tl.bfloat16)
    elif CODE.bits <= 7:
        y = round_site(x, CODE, who, o_row, o_col, NATIVE).to(tl.bfloat16)
    elif CODE.bits == 10 and CODE.emin == -14:
        y = round_site(x, CODE, who, o_row, o_col, NATIVE).to(tl.float16)
    else:
        y = round_site(x, CODE, who, o_row, o_col, NATIVE)
    return y


@triton.jit
def remainder(x, piece, GUARD: tl.constexpr):
    """What a BF16 piece leaves of x; with GUARD nothing of an infinity, else NaN."""
    rest = x - piece
    return tl.where(tl.abs(piece) == float("inf"), 0.0, rest) if GUARD else rest


@triton.jit
def pieces(x, GUARD: tl.constexpr):
    """x as a sum of three BF16 numbers, largest first; exact for FP32 unless it underflows."""
    if x.dtype == tl.bfloat16:
        first, second, third = x, x, x  # only the first is used
    else:
        x = x.to(tl.float32)
        kept = round_bf16_native(x)
        rest = remainder(x, kept, GUARD)
        kept_rest = round_bf16_native(rest)
        first, second = kept.to(tl.bfloat16), rest.to(tl.bfloat16)
        third = remainder(rest, kept_rest, GUARD).to(tl.bfloat16)
    return first, second, third


@triton.jit
def dot(a, b, acc, PIECES: tl.constexpr, NATIVE: tl.constexpr):
    """acc + a @ b, accumulated in FP32.

    Operands of one 16-bit type go to the tensor cores as they are. Otherwise each is a sum of
    BF16 numbers: one for a BF16 operand, two for FP16 (exact), PIECES for FP32. PIECES=2 leaves a
    relative error of 2^-17 in each factor, PIECES=3 none away from under- and overflow. Products
    of pieces that are left out make 2^-24 of a product of two FP32 factors. Tensor cores cut where
    FP32 would round, see book/notation.md.
    """
    if not NATIVE:
        acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        acc = tl.dot(a, b, acc)
    else:
        NA: tl.constexpr = 1 if a.dtype == tl.bfloat16 else PIECES if a.dtype == tl.float32 else 2
        NB: tl.constexpr = 1 if b.dtype == tl.bfloat16 else PIECES if b.dtype == tl.float32 else 2
        # infinities arrive in FP16 and FP32 inputs; an FP32 site of BF16 inputs may turn to NaN
        a0, a1, a2 = pieces(a, PIECES > 2 or a.dtype == tl.float16)
        b0, b1, b2 = pieces(b, PIECES > 2 or b.dtype == tl.float16)
        if NA > 2:
            acc = tl.dot(a2, b0, acc)
        if NB > 2:
            acc = tl.dot(a0, b2, acc)
        if NA > 1 and NB > 1:
            acc = tl.dot(a1, b1, acc)
        if NA > 1:
            acc = tl.dot(a1, b0, acc)
        if NB > 1:
            acc = tl.dot(a0, b1, acc)
        acc = tl.dot(a0, b0, acc)
    return acc


@triton.jit
def load_rows(p_x, stride_row, o_row, n, D: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """Rows of one head, 0 beyond the end unless EVEN; FP32 in the interpreter.  # [rows, D]"""
    p_rows = p_x + o_row[:, None] * stride_row + tl.arange(0, D)[None, :]
    b_x = tl.load(p_rows) if EVEN else tl.load(p_rows, mask=o_row[:, None] < n, other=0.0)
    return b_x if NATIVE else b_x.to(tl.float32)


@triton.jit
def store_rows(p_x, stride_row, o_row, n, b_x, D: tl.constexpr, NATIVE: tl.constexpr):
    """Store rows of one head, rounded to nearest even into the pointer's dtype."""
    if p_x.dtype.element_ty == tl.bfloat16:
        b_x = round_bf16(b_x, NATIVE)
    p_rows = p_x + o_row[:, None] * stride_row + tl.arange(0, D)[None, :]
    tl.store(p_rows, b_x.to(p_x.dtype.element_ty), mask=o_row[:, None] < n)


@triton.jit
def difference(b_stored, b_s, b_shift, scale, EXACT: tl.constexpr):
    """s - shift; with EXACT the same number in one operation."""
    return tl.fma(b_stored, scale, -b_shift) if EXACT else b_s - b_shift


@triton.jit
def exp_difference(b_stored, b_s, b_shift, scale, S: tl.constexpr, EXACT: tl.constexpr,
                   BIAS: tl.constexpr):  # fmt: skip
    """exp(s - shift). Where s is FP32, scale and base change in one fused multiply-add.

    Rounded scores are subtracted exactly when they are close, so the row maximum gives exactly 1,
    and so are scores with a bias, which may take 1e9 and more from all keys of a row. The fused
    form carries the rounding of shift * log2(e), a factor within 1 ± |shift| * 2^-24 that is common
    to a row. So it is for |shift| far below 2^24: from 1e9 on it may be NaN.
    """
    if S == 0 and not BIAS:
        return tl.exp2(tl.fma(b_stored, scale * LOG2E, -(b_shift * LOG2E)))
    else:
        return exp(difference(b_stored, b_s, b_shift, scale, EXACT))


@triton.jit
def power_of_two(b_field):
    """2^(b_field - 127) of an exponent field from 1 to 254, int32; 0 of 0."""
    return (b_field << 23).to(tl.float32, bitcast=True)


@triton.jit
def by_powers(b_stored, b_s, b_whole, scale, EXACT: tl.constexpr):
    """exp(s) 2^-b_whole: 2^(t - round(t)) times a power of two, with t = s / log 2; 0 below 2^-126.

    Added to 1.5 2^23 a number becomes whole, and its last bits are that whole number. Beyond 2^21
    rows are NaN by then. NaN stays NaN, and -inf is no reason for one.
    """
    MAGIC: tl.constexpr = 12582912.0
    b_least = b_whole + (MAGIC - 127)
    if EXACT:
        b_z = tl.maximum(tl.fma(b_stored, scale * LOG2E, MAGIC), b_least)
        b_fraction = tl.fma(b_stored, scale * LOG2E, MAGIC - b_z)
    else:
        b_z = tl.maximum(tl.fma(b_s, LOG2E, MAGIC), b_least)
        b_fraction = tl.fma(b_s, LOG2E, MAGIC - b_z)
    b_field = b_z.to(tl.int32, bitcast=True) - b_least.to(tl.int32, bitcast=True)
    return tl.exp2(b_fraction) * power_of_two(b_field)
