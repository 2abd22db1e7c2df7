"""The attention forward as a Triton kernel, every rounding of the policy explicit.

A rounding block is `tile` keys, or the whole row. Within it every p = exp(s - m) is formed against
the block's final maximum, so its keys are read twice: first for the maximum, then for p and P V.
Where a rounding block is one hardware block, both happen in one pass. Keys that some query of the
block must not see are handled apart, so that the other blocks need no mask.
"""

import triton
import triton.language as tl

from lowprec.attention.kernels.rounding import (
    INF,
    LN2,
    LOG2E,
    by_powers,
    difference,
    dot,
    exp,
    exp_difference,
    load_rows,
    operand,
    power_of_two,
    random_words,
    round_rows,
    round_site,
    store_rows,
)
from lowprec.attention.kernels.views import (
    keys_of,
    masked,
    scale_of,
    scores,
    view_of,
    visible,
)


@triton.jit
def maxima(b_x, b_r, b_r2, SECOND: tl.constexpr):
    """The largest number of each row so far; with SECOND also the next one, ties counted."""
    b_max = tl.max(b_x, 1)
    if SECOND:
        m_top = b_x == b_max[:, None]
        tied = tl.sum(m_top.to(tl.int32), 1) > 1
        b_next = tl.where(tied, b_max, tl.max(tl.where(m_top, float("-inf"), b_x), 1))
        b_r2 = tl.maximum(tl.minimum(b_r, b_max), tl.maximum(b_r2, b_next))
    return tl.maximum(b_r, b_max), b_r2


@triton.jit
def find_maxima(
    b_q, p_k, skt, o_q, b_r, b_r2, lo, hi, where, c: tl.constexpr, MASKED: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """First pass over keys lo to hi: maxima of the products, or of s if its rounding is random."""
    n, scale, who, view = where
    for first in range(lo, hi, c.bn):
        o_k = first + tl.arange(0, c.bn)
        b_k = load_rows(p_k, skt, o_k, n, c.d, c.even or not MASKED, c.native)
        b_x = tl.full([b_q.shape[0], c.bn], 0, tl.float32)
        b_x = dot(b_q, tl.trans(b_k), b_x, c.pieces, c.native)
        if c.direct:
            _, b_x = scores(b_x, o_q[:, None], o_k[None, :], where, c)
        if MASKED:
            b_x = masked(b_x, o_q, o_k, where, c)
        b_r, b_r2 = maxima(b_x, b_r, b_r2, SECOND)
    return b_r, b_r2


@triton.jit
def as_scores(b_r, where, c: tl.constexpr):
    """Row maxima of products as maxima of s: rounding to a neighbour and a positive scale keep
    the order. (With random rounding, a format without infinity or a bias `find_maxima` has looked
    at s itself.)"""
    n, scale, who, view = where
    if c.direct:
        return b_r
    else:
        b_s = round_site(b_r, c.s, (0, 0, 0), 0, 0, c.native) * scale
        return round_site(b_s, c.s, (0, 0, 0), 0, n, c.native)


@triton.jit
def new_maximum(b_m, b_r, b_r2, o_q, who, n, j, c: tl.constexpr):
    """(m after block j, m with 0 for rows that have seen no key, alpha).  # [BM] each"""
    b_shifted = b_r
    if c.shift == "beta":
        tied = b_r2 >= b_r - c.tol
        b_shifted = tl.where(tied & (b_r > 0), c.beta * b_r, b_shifted)
        b_shifted = tl.where(tied & (b_r < 0), c.gamma * b_r, b_shifted)
    elif c.shift == "mute":
        tied = b_r2 >= b_r - c.tol
        b_shifted = tl.where(tied & (b_r > c.amplitude), 1e30, b_r)
    elif c.shift == "offset":
        b_shifted = b_r + c.amplitude
    elif c.shift == "dither":
        word = random_words(who, c.dither_stream, o_q, 0)
        b_shifted = b_r + c.amplitude * (word.to(tl.float32) * 2.3283064365386963e-10)
    elif c.shift == "pow2":  # in whole powers of two from here on
        b_shifted = tl.ceil(b_r * LOG2E)
        b_shifted = tl.where(tl.abs(b_shifted) < 2097152.0, b_shifted, float("nan"))
    b_shifted = tl.where(b_r == float("-inf"), b_r, b_shifted)
    b_new = tl.maximum(b_m, b_shifted)
    if c.shift == "pow2":  # the maximum of a number and NaN is the number
        b_new = tl.where(b_shifted == b_shifted, b_new, b_shifted)
    b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
    if c.shift == "pow2":
        b_alpha = power_of_two((tl.maximum(b_m - b_finite, -127.0) + 127.0).to(tl.int32))
        b_alpha = tl.where(b_finite == b_finite, b_alpha, b_finite)
    else:
        b_alpha = exp(round_site(b_m - b_finite, c.x, who, o_q, n + j, c.native))
        if c.x != 0 and c.x.beyond != INF:  # such a format does not keep what is hidden at -inf
            b_alpha = tl.where(b_m == float("-inf"), 0.0, b_alpha)
    return b_new, b_finite, b_alpha


@triton.jit
def weighted_sum(
    b_product, b_v, o_q, o_k, b_finite, b_r, b_total, b_total_lse, b_pv, b_ties, where,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Second pass over one hardware block: add its p to the row's sums and p v to the output."""
    n, scale, who, view = where
    b_stored, b_s = scores(b_product, o_q[:, None], o_k[None, :], where, c)
    if MASKED:
        b_stored = masked(b_stored, o_q, o_k, where, c)
        b_s = masked(b_s, o_q, o_k, where, c)
    if c.ties:
        m_top = b_s == b_r[:, None]
        if MASKED:  # where all scores seen are -inf, the hidden keys equal them
            m_top &= visible(o_q[:, None], o_k[None, :], where, c)
        b_ties += tl.sum(m_top.to(tl.int32), 1)
    if c.shift == "pow2":
        b_p = by_powers(b_stored, b_s, b_finite[:, None], scale_of(where, c), c.exact)
    elif c.x == 0:
        b_p = exp_difference(
            b_stored, b_s, b_finite[:, None], scale_of(where, c), c.s, c.exact, c.bias
        )
    else:
        b_x = difference(b_stored, b_s, b_finite[:, None], scale, c.exact)
        b_p = exp(round_site(b_x, c.x, who, o_q[:, None], o_k[None, :], c.native))
        if c.x.beyond != INF:
            b_p = tl.where(b_x == float("-inf"), 0.0, b_p)
    b_operand = operand(b_p, c.p, who, o_q[:, None], o_k[None, :], c.native)
    if c.l_from == "p_both":
        b_total_lse += tl.sum(b_p, 1)
    if c.l_from != "p_unnorm":
        b_p = b_operand.to(tl.float32)
    b_total += tl.sum(b_p, 1)
    return b_total, b_total_lse, dot(b_operand, b_v, b_pv, c.pieces, c.native), b_ties


@triton.jit
def weighted_sums(
    b_q, keys, o_q, b_finite, b_r, b_total, b_total_lse, b_pv, b_ties, lo, hi, where,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Second pass over keys lo to hi."""
    p_k, p_v, skt, svt = keys
    n, scale, who, view = where
    for first in range(lo, hi, c.bn):
        o_k = first + tl.arange(0, c.bn)
        b_k = load_rows(p_k, skt, o_k, n, c.d, c.even or not MASKED, c.native)
        b_v = load_rows(p_v, svt, o_k, n, c.d, c.even or not MASKED, c.native)
        b_x = tl.full([b_q.shape[0], c.bn], 0, tl.float32)
        b_x = dot(b_q, tl.trans(b_k), b_x, c.pieces, c.native)
        b_total, b_total_lse, b_pv, b_ties = weighted_sum(
            b_x, b_v, o_q, o_k, b_finite, b_r, b_total, b_total_lse, b_pv, b_ties, where, c, MASKED
        )  # fmt: skip
    return b_total, b_total_lse, b_pv, b_ties


@triton.jit
def rounding_block(
    b_q, keys, o_q, first, mid, last, j, where, b_m, b_l, b_l_lse, b_acc, b_l_shadow, b_shadow,
    b_top, b_ties, c: tl.constexpr, ONE_PASS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Block j, keys first to last, of which those from mid need a mask; updates the row's state.

    ONE_PASS: the block is BN keys wide, and MASKED says whether it needs a mask.
    """
    p_k, p_v, skt, svt = keys
    n, scale, who, view = where
    BM: tl.constexpr = b_q.shape[0]
    SECOND: tl.constexpr = c.shift == "beta" or c.shift == "mute"
    o_k = first + tl.arange(0, c.bn)
    b_r = tl.full([BM], float("-inf"), tl.float32)
    b_r2 = b_r
    if ONE_PASS:
        b_k = load_rows(p_k, skt, o_k, n, c.d, c.even or not MASKED, c.native)
        b_v = load_rows(p_v, svt, o_k, n, c.d, c.even or not MASKED, c.native)
        b_x = tl.full([BM, c.bn], 0, tl.float32)
        b_x = dot(b_q, tl.trans(b_k), b_x, c.pieces, c.native)
        b_seen = b_x
        if c.direct:
            _, b_seen = scores(b_x, o_q[:, None], o_k[None, :], where, c)
        if MASKED:
            b_seen = masked(b_seen, o_q, o_k, where, c)
        b_r, b_r2 = maxima(b_seen, b_r, b_r2, SECOND)
    else:
        b_r, b_r2 = find_maxima(b_q, p_k, skt, o_q, b_r, b_r2, first, mid, where, c, False, SECOND)
        b_r, b_r2 = find_maxima(b_q, p_k, skt, o_q, b_r, b_r2, mid, last, where, c, True, SECOND)
    b_r = as_scores(b_r, where, c)
    b_r2 = as_scores(b_r2, where, c)
    b_m, b_finite, b_alpha = new_maximum(b_m, b_r, b_r2, o_q, who, n, j, c)

    b_total = tl.zeros([BM], tl.float32)
    b_total_lse = tl.zeros([BM], tl.float32)
    b_tied = tl.zeros([BM], tl.int32)
    if c.o_acc == 0:  # nothing rounds the block's product alone: add it to the accumulator at once
        b_pv = b_acc * b_alpha[:, None]
    else:
        b_pv = tl.full([BM, c.d], 0, tl.float32)
    if ONE_PASS:
        b_total, b_total_lse, b_pv, b_tied = weighted_sum(
            b_x, b_v, o_q, o_k, b_finite, b_r, b_total, b_total_lse, b_pv, b_tied, where, c, MASKED
        )  # fmt: skip
    else:
        b_total, b_total_lse, b_pv, b_tied = weighted_sums(
            b_q, keys, o_q, b_finite, b_r, b_total, b_total_lse, b_pv, b_tied, first, mid, where, c,
            False,
        )  # fmt: skip
        b_total, b_total_lse, b_pv, b_tied = weighted_sums(
            b_q, keys, o_q, b_finite, b_r, b_total, b_total_lse, b_pv, b_tied, mid, last, where, c,
            True,
        )  # fmt: skip

    if c.l_floor > 0:
        sees = (o_q >= first) if c.causal else (o_q >= 0)
        b_total = tl.where(sees & (b_total < c.l_floor), c.l_floor, b_total)  # NaN stays NaN
        b_total_lse = tl.where(sees & (b_total_lse < c.l_floor), c.l_floor, b_total_lse)
    b_l = round_site(b_alpha * b_l + b_total, c.l, who, o_q, j, c.native)
    if c.l_from == "p_both":
        b_l_lse = round_site(b_alpha * b_l_lse + b_total_lse, c.l, who, o_q, n + j, c.native)
    b_l_shadow = b_alpha * b_l_shadow + b_total
    if c.o_acc == 0:
        b_acc = b_pv
    else:
        if c.shadow:
            b_shadow = b_alpha[:, None] * b_shadow + b_pv
        o_d = 3 * c.d * j + tl.arange(0, c.d)[None, :]
        b_kept = round_site(b_alpha[:, None] * b_acc, c.o_acc, who, o_q[:, None], o_d, c.native)
        b_new = round_site(b_pv, c.o_acc, who, o_q[:, None], o_d + c.d, c.native)
        b_acc = round_site(b_kept + b_new, c.o_acc, who, o_q[:, None], o_d + 2 * c.d, c.native)
    if c.ties:
        b_ties = tl.where(b_r > b_top, b_tied, tl.where(b_r == b_top, b_ties + b_tied, b_ties))
        b_top = tl.maximum(b_top, b_r)
    return b_m, b_l, b_l_lse, b_acc, b_l_shadow, b_shadow, b_top, b_ties


@triton.jit(do_not_specialize=["seed"])
def attention_fwd_kernel(
    p_q, p_k, p_v, p_o, p_o_stored, p_o_fp32, p_lse, p_ties, strides, mask, scale, seed,
    c: tl.constexpr,
):  # fmt: skip
    """One block of BM queries: o, lse, and if asked the stored o, the shadow o and the ties.

    mask: lengths of queries and keys, and the rest of `view_of`. c.tile: keys per rounding block, 0
    for the whole row. c.even: the lengths are multiples of BM and BN.
    """
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot = strides
    n_q, n = mask[0], mask[1]
    n_blocks = tl.cdiv(n_q, c.bm)
    pid = tl.program_id(0)
    pid_bh = pid // n_blocks
    batch, head = (pid_bh // c.h).to(tl.int64), (pid_bh % c.h).to(tl.int64)
    who = (seed, batch, head)
    view = view_of(mask, batch, head, c)
    start = (n_blocks - 1 - pid % n_blocks) * c.bm  # causal: the longest rows first
    o_q = start + tl.arange(0, c.bm)
    p_k += batch * skb + head // c.group * skh
    p_v += batch * svb + head // c.group * svh
    keys, where = (p_k, p_v, skt, svt), (n, scale, who, view)
    b_q = load_rows(p_q + batch * sqb + head * sqh, sqt, o_q, n_q, c.d, c.even, c.native)
    begin, mid, end = keys_of(start, n, view, c)

    b_m = tl.full([c.bm], float("-inf"), tl.float32)
    b_l = tl.full([c.bm], 0, tl.float32)
    b_l_lse = b_l
    b_acc = tl.full([c.bm, c.d], 0, tl.float32)
    b_l_shadow = b_l
    b_shadow = b_acc
    b_top = b_m
    b_ties = tl.full([c.bm], 0, tl.int32)
    if c.tile == 0:
        b_m, b_l, b_l_lse, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
            b_q, keys, o_q, begin, mid, end, 0, where, b_m, b_l, b_l_lse, b_acc, b_l_shadow,
            b_shadow, b_top, b_ties, c, False, True,
        )  # fmt: skip
    elif c.tile == c.bn:
        for first in range(begin, mid, c.bn):
            b_m, b_l, b_l_lse, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
                b_q, keys, o_q, first, mid, end, first // c.tile, where, b_m, b_l, b_l_lse, b_acc,
                b_l_shadow, b_shadow, b_top, b_ties, c, True, False,
            )  # fmt: skip
        for first in range(mid, end, c.bn):
            b_m, b_l, b_l_lse, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
                b_q, keys, o_q, first, mid, end, first // c.tile, where, b_m, b_l, b_l_lse, b_acc,
                b_l_shadow, b_shadow, b_top, b_ties, c, True, True,
            )  # fmt: skip
    else:
        for first in range(begin // c.tile * c.tile, end, c.tile):
            lo, last = tl.maximum(first, begin), tl.minimum(first + c.tile, end)
            seen = tl.minimum(tl.maximum(mid, lo), last)
            b_m, b_l, b_l_lse, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
                b_q, keys, o_q, lo, seen, last, first // c.tile, where, b_m, b_l, b_l_lse, b_acc,
                b_l_shadow, b_shadow, b_top, b_ties, c, False, True,
            )  # fmt: skip

    blind = (b_m == float("-inf")) & (b_l == b_l)  # the maximum of NaN alone is -inf, too
    o_d = tl.arange(0, c.d)[None, :]
    b_o = tl.where(blind[:, None], 0.0, tl.div_rn(b_acc, b_l[:, None]))
    b_o = round_rows(b_o, c.o, who, o_q[:, None], o_d, c.native)
    o_bh = batch * sob + head * soh
    store_rows(p_o + o_bh, sot, o_q, n_q, b_o, c.d, c.native)
    if c.stored:
        store_rows(p_o_stored + o_bh, sot, o_q, n_q, b_o, c.d, c.native)
    if c.shadow:
        if c.o_acc == 0:
            b_shadow = b_acc
        b_o = tl.where(blind[:, None], 0.0, tl.div_rn(b_shadow, b_l_shadow[:, None]))
        store_rows(p_o_fp32 + o_bh, sot, o_q, n_q, b_o, c.d, c.native)
    o_row = pid_bh.to(tl.int64) * n_q + o_q
    if c.l_from == "p_both":
        b_l = b_l_lse
    if c.shift == "pow2":
        b_m *= LN2
    b_lse = tl.where(blind, float("-inf"), b_m + tl.log(b_l))
    tl.store(p_lse + o_row, b_lse, mask=o_q < n_q)
    if c.ties:
        tl.store(p_ties + o_row, b_ties, mask=o_q < n_q)
