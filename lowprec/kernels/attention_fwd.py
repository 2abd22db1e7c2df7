"""The attention forward as a Triton kernel, every rounding of the policy explicit.

A rounding block is `TILE` keys, or the whole row. Within it every p = exp(s - m) is formed against
the block's final maximum, so its keys are read twice: first for the maximum, then for p and P V.
Where a rounding block is one hardware block, both happen in one pass. Keys that some query of the
block must not see are handled apart, so that the other blocks need no mask.
"""

import triton
import triton.language as tl

from lowprec.kernels.rounding import (
    STOCHASTIC,
    difference,
    dot,
    exp,
    exp_difference,
    load_rows,
    masked,
    operand,
    random_words,
    round_site,
    scores,
    store_rows,
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
    b_q, p_k, skt, o_q, b_r, b_r2, lo, hi, n, scale, who,
    D: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, SECOND: tl.constexpr, S: tl.constexpr, EXACT: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """First pass over keys lo to hi: maxima of the products, or of s if its rounding is random."""
    for first in range(lo, hi, BN):
        o_k = first + tl.arange(0, BN)
        b_k = load_rows(p_k, skt, o_k, n, D, EVEN or not MASKED, NATIVE)
        b_x = tl.zeros([b_q.shape[0], BN], tl.float32)
        b_x = dot(b_q, tl.trans(b_k), b_x, PIECES, NATIVE)
        if (S >> 8) & 255 == STOCHASTIC:
            _, b_x = scores(b_x, o_q[:, None], o_k[None, :], n, scale, who, S, EXACT, NATIVE)
        if MASKED:
            b_x = masked(b_x, o_q, o_k, n, CAUSAL)
        b_r, b_r2 = maxima(b_x, b_r, b_r2, SECOND)
    return b_r, b_r2


@triton.jit
def as_scores(b_r, n, scale, S: tl.constexpr, NATIVE: tl.constexpr):
    """Row maxima of products as maxima of s: rounding to a neighbour and a positive scale keep
    the order. (With random rounding `find_maxima` has looked at s itself.)"""
    if (S >> 8) & 255 == STOCHASTIC:
        return b_r
    else:
        _, b_s = scores(b_r, 0, 0, n, scale, (0, 0, 0), S, False, NATIVE)
        return b_s


@triton.jit
def new_maximum(
    b_m, b_r, b_r2, o_q, who, X: tl.constexpr, n, j, NATIVE: tl.constexpr,
    SHIFT: tl.constexpr, BETA: tl.constexpr, GAMMA: tl.constexpr, TOL: tl.constexpr,
    AMPLITUDE: tl.constexpr, DITHER_STREAM: tl.constexpr,
):  # fmt: skip
    """(m after block j, m with 0 for rows that have seen no key, alpha).  # [BM] each"""
    b_shifted = b_r
    if SHIFT == "beta":
        tied = b_r2 >= b_r - TOL
        b_shifted = tl.where(tied & (b_r > 0), BETA * b_r, b_shifted)
        b_shifted = tl.where(tied & (b_r < 0), GAMMA * b_r, b_shifted)
    elif SHIFT == "mute":
        tied = b_r2 >= b_r - TOL
        b_shifted = tl.where(tied & (b_r > AMPLITUDE), 1e30, b_r)
    elif SHIFT == "offset":
        b_shifted = b_r + AMPLITUDE
    elif SHIFT == "dither":
        word = random_words(who, DITHER_STREAM, o_q, 0)
        b_shifted = b_r + AMPLITUDE * (word.to(tl.float32) * 2.3283064365386963e-10)
    b_new = tl.maximum(b_m, tl.where(b_r == float("-inf"), b_r, b_shifted))
    b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_alpha = exp(round_site(b_m - b_finite, X, who, o_q, n + j, NATIVE))
    return b_new, b_finite, b_alpha


@triton.jit
def weighted_sum(
    b_product, b_v, o_q, o_k, b_finite, b_r, b_total, b_pv, b_ties, n, scale, who,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TIES: tl.constexpr,
    S: tl.constexpr, EXACT: tl.constexpr, X: tl.constexpr, P: tl.constexpr,
    L_FROM_P: tl.constexpr, PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Second pass over one hardware block: add its p to the row's sum and p v to the output."""
    b_stored, b_s = scores(b_product, o_q[:, None], o_k[None, :], n, scale, who, S, EXACT, NATIVE)
    if MASKED:
        b_stored = masked(b_stored, o_q, o_k, n, CAUSAL)
        b_s = masked(b_s, o_q, o_k, n, CAUSAL)
    if TIES:
        m_top = b_s == b_r[:, None]
        if MASKED:  # where all scores seen are -inf, the hidden keys equal them
            m_top &= visible(o_q[:, None], o_k[None, :], n, CAUSAL)
        b_ties += tl.sum(m_top.to(tl.int32), 1)
    if X == 0:
        b_p = exp_difference(b_stored, b_s, b_finite[:, None], scale, S, EXACT)
    else:
        b_x = difference(b_stored, b_s, b_finite[:, None], scale, EXACT)
        b_p = exp(round_site(b_x, X, who, o_q[:, None], o_k[None, :], NATIVE))
    b_operand = operand(b_p, P, who, o_q[:, None], o_k[None, :], NATIVE)
    if L_FROM_P:
        b_p = b_operand.to(tl.float32)
    b_total += tl.sum(b_p, 1)
    return b_total, dot(b_operand, b_v, b_pv, PIECES, NATIVE), b_ties


@triton.jit
def weighted_sums(
    b_q, p_k, p_v, skt, svt, o_q, b_finite, b_r, b_total, b_pv, b_ties, lo, hi, n, scale, who,
    D: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, TIES: tl.constexpr,
    S: tl.constexpr, EXACT: tl.constexpr, X: tl.constexpr, P: tl.constexpr,
    L_FROM_P: tl.constexpr, PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Second pass over keys lo to hi."""
    for first in range(lo, hi, BN):
        o_k = first + tl.arange(0, BN)
        b_k = load_rows(p_k, skt, o_k, n, D, EVEN or not MASKED, NATIVE)
        b_v = load_rows(p_v, svt, o_k, n, D, EVEN or not MASKED, NATIVE)
        b_x = tl.zeros([b_q.shape[0], BN], tl.float32)
        b_x = dot(b_q, tl.trans(b_k), b_x, PIECES, NATIVE)
        b_total, b_pv, b_ties = weighted_sum(
            b_x, b_v, o_q, o_k, b_finite, b_r, b_total, b_pv, b_ties, n, scale, who,
            CAUSAL, MASKED, TIES, S, EXACT, X, P, L_FROM_P, PIECES, NATIVE,
        )  # fmt: skip
    return b_total, b_pv, b_ties


@triton.jit
def rounding_block(
    b_q, p_k, p_v, skt, svt, o_q, first, mid, last, j, n, scale, who,
    b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties,
    D: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    ONE_PASS: tl.constexpr, MASKED: tl.constexpr, SHADOW: tl.constexpr, TIES: tl.constexpr,
    S: tl.constexpr, EXACT: tl.constexpr, X: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
    O_ACC: tl.constexpr, L_FROM_P: tl.constexpr, L_FLOOR: tl.constexpr,
    SHIFT: tl.constexpr, BETA: tl.constexpr, GAMMA: tl.constexpr, TOL: tl.constexpr,
    AMPLITUDE: tl.constexpr, DITHER_STREAM: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Block j, keys first to last, of which those from mid need a mask; updates the row's state.

    ONE_PASS: the block is BN keys wide, and MASKED says whether it needs a mask.
    """
    BM: tl.constexpr = b_q.shape[0]
    SECOND: tl.constexpr = SHIFT == "beta" or SHIFT == "mute"
    o_k = first + tl.arange(0, BN)
    b_r = tl.full([BM], float("-inf"), tl.float32)
    b_r2 = b_r
    if ONE_PASS:
        b_k = load_rows(p_k, skt, o_k, n, D, EVEN or not MASKED, NATIVE)
        b_v = load_rows(p_v, svt, o_k, n, D, EVEN or not MASKED, NATIVE)
        b_x = tl.zeros([BM, BN], tl.float32)
        b_x = dot(b_q, tl.trans(b_k), b_x, PIECES, NATIVE)
        b_seen = b_x
        if (S >> 8) & 255 == STOCHASTIC:
            _, b_seen = scores(b_x, o_q[:, None], o_k[None, :], n, scale, who, S, EXACT, NATIVE)
        if MASKED:
            b_seen = masked(b_seen, o_q, o_k, n, CAUSAL)
        b_r, b_r2 = maxima(b_seen, b_r, b_r2, SECOND)
    else:
        b_r, b_r2 = find_maxima(
            b_q, p_k, skt, o_q, b_r, b_r2, first, mid, n, scale, who,
            D, BN, CAUSAL, False, EVEN, SECOND, S, EXACT, PIECES, NATIVE,
        )  # fmt: skip
        b_r, b_r2 = find_maxima(
            b_q, p_k, skt, o_q, b_r, b_r2, mid, last, n, scale, who,
            D, BN, CAUSAL, True, EVEN, SECOND, S, EXACT, PIECES, NATIVE,
        )  # fmt: skip
    b_r = as_scores(b_r, n, scale, S, NATIVE)
    b_r2 = as_scores(b_r2, n, scale, S, NATIVE)
    b_m, b_finite, b_alpha = new_maximum(
        b_m, b_r, b_r2, o_q, who, X, n, j, NATIVE,
        SHIFT, BETA, GAMMA, TOL, AMPLITUDE, DITHER_STREAM,
    )  # fmt: skip

    b_total = tl.zeros([BM], tl.float32)
    b_tied = tl.zeros([BM], tl.int32)
    if O_ACC == 0:  # nothing rounds the block's product alone: add it to the accumulator at once
        b_pv = b_acc * b_alpha[:, None]
    else:
        b_pv = tl.zeros([BM, D], tl.float32)
    if ONE_PASS:
        b_total, b_pv, b_tied = weighted_sum(
            b_x, b_v, o_q, o_k, b_finite, b_r, b_total, b_pv, b_tied, n, scale, who,
            CAUSAL, MASKED, TIES, S, EXACT, X, P, L_FROM_P, PIECES, NATIVE,
        )  # fmt: skip
    else:
        b_total, b_pv, b_tied = weighted_sums(
            b_q, p_k, p_v, skt, svt, o_q, b_finite, b_r, b_total, b_pv, b_tied,
            first, mid, n, scale, who,
            D, BN, CAUSAL, False, EVEN, TIES, S, EXACT, X, P, L_FROM_P, PIECES, NATIVE,
        )  # fmt: skip
        b_total, b_pv, b_tied = weighted_sums(
            b_q, p_k, p_v, skt, svt, o_q, b_finite, b_r, b_total, b_pv, b_tied,
            mid, last, n, scale, who,
            D, BN, CAUSAL, True, EVEN, TIES, S, EXACT, X, P, L_FROM_P, PIECES, NATIVE,
        )  # fmt: skip

    if L_FLOOR > 0:
        sees = (o_q >= first) if CAUSAL else (o_q >= 0)
        b_total = tl.where(sees & (b_total < L_FLOOR), L_FLOOR, b_total)  # NaN stays NaN
    b_l = round_site(b_alpha * b_l + b_total, L, who, o_q, j, NATIVE)
    b_l_shadow = b_alpha * b_l_shadow + b_total
    if O_ACC == 0:
        b_acc = b_pv
    else:
        if SHADOW:
            b_shadow = b_alpha[:, None] * b_shadow + b_pv
        o_d = 3 * D * j + tl.arange(0, D)[None, :]
        b_kept = round_site(b_alpha[:, None] * b_acc, O_ACC, who, o_q[:, None], o_d, NATIVE)
        b_new = round_site(b_pv, O_ACC, who, o_q[:, None], o_d + D, NATIVE)
        b_acc = round_site(b_kept + b_new, O_ACC, who, o_q[:, None], o_d + 2 * D, NATIVE)
    if TIES:
        b_ties = tl.where(b_r > b_top, b_tied, tl.where(b_r == b_top, b_ties + b_tied, b_ties))
        b_top = tl.maximum(b_top, b_r)
    return b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties


@triton.jit(do_not_specialize=["seed"])
def attention_fwd_kernel(
    p_q, p_k, p_v, p_o, p_o_stored, p_o_fp32, p_lse, p_ties,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot,
    n, scale, seed,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    STORED: tl.constexpr, SHADOW: tl.constexpr, TIES: tl.constexpr,
    S: tl.constexpr, EXACT: tl.constexpr, X: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
    O_ACC: tl.constexpr, O: tl.constexpr, L_FROM_P: tl.constexpr, L_FLOOR: tl.constexpr,  # noqa: E741
    SHIFT: tl.constexpr, BETA: tl.constexpr, GAMMA: tl.constexpr, TOL: tl.constexpr,
    AMPLITUDE: tl.constexpr, DITHER_STREAM: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One block of BM queries: o, lse, and if asked the stored o, the shadow o and the ties.

    TILE: keys per rounding block, 0 for the whole row. EVEN: n is a multiple of BM and BN.
    """
    n_blocks = tl.cdiv(n, BM)
    pid = tl.program_id(0)
    pid_bh = pid // n_blocks
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    who = (seed, batch, head)
    start = (n_blocks - 1 - pid % n_blocks) * BM  # causal: the longest rows first
    o_q = start + tl.arange(0, BM)
    p_k += batch * skb + head * skh
    p_v += batch * svb + head * svh
    b_q = load_rows(p_q + batch * sqb + head * sqh, sqt, o_q, n, D, EVEN, NATIVE)
    end = tl.minimum(start + BM, n) if CAUSAL else n
    mid = ((start + 1) if CAUSAL else n) // BN * BN  # every query of the block sees keys below it

    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D], tl.float32)
    b_l_shadow = b_l
    b_shadow = b_acc
    b_top = b_m
    b_ties = tl.zeros([BM], tl.int32)
    if TILE == 0:
        b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
            b_q, p_k, p_v, skt, svt, o_q, 0, mid, end, 0, n, scale, who,
            b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties,
            D, BN, CAUSAL, EVEN, False, True, SHADOW, TIES,
            S, EXACT, X, P, L, O_ACC, L_FROM_P, L_FLOOR,
            SHIFT, BETA, GAMMA, TOL, AMPLITUDE, DITHER_STREAM, PIECES, NATIVE,
        )  # fmt: skip
    elif TILE == BN:
        for first in range(0, mid, BN):
            b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
                b_q, p_k, p_v, skt, svt, o_q, first, mid, end, first // TILE, n, scale, who,
                b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties, D, BN, CAUSAL, EVEN,
                True, False, SHADOW, TIES, S, EXACT, X, P, L, O_ACC, L_FROM_P, L_FLOOR,
                SHIFT, BETA, GAMMA, TOL, AMPLITUDE, DITHER_STREAM, PIECES, NATIVE,
            )  # fmt: skip
        for first in range(mid, end, BN):
            b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
                b_q, p_k, p_v, skt, svt, o_q, first, mid, end, first // TILE, n, scale, who,
                b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties, D, BN, CAUSAL, EVEN,
                True, True, SHADOW, TIES, S, EXACT, X, P, L, O_ACC, L_FROM_P, L_FLOOR,
                SHIFT, BETA, GAMMA, TOL, AMPLITUDE, DITHER_STREAM, PIECES, NATIVE,
            )  # fmt: skip
    else:
        for first in range(0, end, TILE):
            last = tl.minimum(first + TILE, end)
            seen = tl.minimum(tl.maximum(mid, first), last)
            b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties = rounding_block(
                b_q, p_k, p_v, skt, svt, o_q, first, seen, last, first // TILE, n, scale, who,
                b_m, b_l, b_acc, b_l_shadow, b_shadow, b_top, b_ties, D, BN, CAUSAL, EVEN,
                False, True, SHADOW, TIES, S, EXACT, X, P, L, O_ACC, L_FROM_P, L_FLOOR,
                SHIFT, BETA, GAMMA, TOL, AMPLITUDE, DITHER_STREAM, PIECES, NATIVE,
            )  # fmt: skip

    blind = (b_m == float("-inf")) & (b_l == b_l)  # the maximum of NaN alone is -inf, too
    o_d = tl.arange(0, D)[None, :]
    b_o = tl.where(blind[:, None], 0.0, tl.div_rn(b_acc, b_l[:, None]))
    b_o = round_site(b_o, O, who, o_q[:, None], o_d, NATIVE)
    o_bh = batch * sob + head * soh
    store_rows(p_o + o_bh, sot, o_q, n, b_o, D, NATIVE)
    if STORED:
        store_rows(p_o_stored + o_bh, sot, o_q, n, b_o, D, NATIVE)
    if SHADOW:
        if O_ACC == 0:
            b_shadow = b_acc
        b_o = tl.where(blind[:, None], 0.0, tl.div_rn(b_shadow, b_l_shadow[:, None]))
        store_rows(p_o_fp32 + o_bh, sot, o_q, n, b_o, D, NATIVE)
    o_row = pid_bh.to(tl.int64) * n + o_q
    b_lse = tl.where(blind, float("-inf"), b_m + tl.log(b_l))
    tl.store(p_lse + o_row, b_lse, mask=o_q < n)
    if TIES:
        tl.store(p_ties + o_row, b_ties, mask=o_q < n)
