"""The attention backward as two Triton kernels, every rounding of the policy explicit.

`attention_bwd_dq_kernel` owns a block of queries: it forms delta, stores it, and sums dq over the
keys. `attention_bwd_dkdv_kernel` then owns a block of keys and sums dk and dv over the queries; its
blocks are transposed, keys by queries, so that p and ds enter their products as they lie in
registers. Both form s, p, dp and ds again; neither adds with atomics, so a step repeats bitwise.
"""

import triton
import triton.language as tl

from lowprec.kernels.rounding import (
    dot,
    exp_difference,
    load_rows,
    operand,
    round_bf16,
    round_site,
    scores,
    store_rows,
    visible,
)


@triton.jit
def load_row(p_x, o_row, o_q, n, other, EVEN: tl.constexpr):
    """One number per query.  # [BM]"""
    return tl.load(p_x + o_row) if EVEN else tl.load(p_x + o_row, mask=o_q < n, other=other)


@triton.jit
def load_lse(p_lse, o_row, o_q, n, EVEN: tl.constexpr):
    """L of each query, +inf (so P = 0) beyond the end and for rows that see no key.  # [BM]"""
    b_lse = load_row(p_lse, o_row, o_q, n, float("inf"), EVEN)
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit
def p_and_dp(
    b_product, b_dp, b_lse, o_q, o_k, n, scale, who,
    S: tl.constexpr, EXACT: tl.constexpr, DP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """P = exp(s - L) in FP32 and rnd_dp(dO V^T); all arguments broadcast to the block's shape."""
    b_stored, b_s = scores(b_product, o_q, o_k, n, scale, who, S, EXACT, NATIVE)
    b_p = exp_difference(b_stored, b_s, b_lse, scale, S, EXACT)
    return b_p, round_site(b_dp, DP, who, o_q, o_k, NATIVE)


@triton.jit
def products(
    b_q, b_do, p_k, p_v, skt, svt, b_lse, o_q, o_k, n, scale, who,
    D: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, S: tl.constexpr, EXACT: tl.constexpr, DP: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(k, P, dp) of one block of keys.  # [BN, D], [BM, BN], [BM, BN]"""
    b_k = load_rows(p_k, skt, o_k, n, D, EVEN or not MASKED, NATIVE)
    b_v = load_rows(p_v, svt, o_k, n, D, EVEN or not MASKED, NATIVE)
    zeros = tl.zeros([b_q.shape[0], BN], tl.float32)
    b_x = dot(b_q, tl.trans(b_k), zeros, PIECES, NATIVE)
    b_dp = dot(b_do, tl.trans(b_v), zeros, PIECES, NATIVE)
    b_p, b_dp = p_and_dp(
        b_x, b_dp, b_lse[:, None], o_q[:, None], o_k[None, :], n, scale, who, S, EXACT, DP, NATIVE
    )
    if MASKED:
        b_p = tl.where(visible(o_q[:, None], o_k[None, :], n, CAUSAL), b_p, 0.0)
    return b_k, b_p, b_dp


@triton.jit
def sum_p_dp(
    b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, o_q, lo, hi, n, scale, who,
    D: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, S: tl.constexpr, EXACT: tl.constexpr, DP: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Add the keys lo to hi to delta = rowsum(P * dp).  # [BM]"""
    for first in range(lo, hi, BN):
        o_k = first + tl.arange(0, BN)
        _, b_p, b_dp = products(
            b_q, b_do, p_k, p_v, skt, svt, b_lse, o_q, o_k, n, scale, who,
            D, BN, CAUSAL, MASKED, EVEN, S, EXACT, DP, PIECES, NATIVE,
        )  # fmt: skip
        b_delta += tl.sum(b_p * b_dp, 1)
    return b_delta


@triton.jit
def sum_dq(
    b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, b_dq, b_sum, o_q, lo, hi, n, scale, who,
    D: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, S: tl.constexpr, EXACT: tl.constexpr, DP: tl.constexpr,
    DS: tl.constexpr, ROW_SUM: tl.constexpr, PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Add the keys lo to hi to ds k and, with ROW_SUM, to the row sums of ds.  # [BM, D], [BM]"""
    for first in range(lo, hi, BN):
        o_k = first + tl.arange(0, BN)
        b_k, b_p, b_dp = products(
            b_q, b_do, p_k, p_v, skt, svt, b_lse, o_q, o_k, n, scale, who,
            D, BN, CAUSAL, MASKED, EVEN, S, EXACT, DP, PIECES, NATIVE,
        )  # fmt: skip
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_ds = operand(b_ds, DS, who, o_q[:, None], o_k[None, :], NATIVE)
        b_dq = dot(b_ds, b_k, b_dq, PIECES, NATIVE)
        if ROW_SUM:
            b_sum += tl.sum(b_ds.to(tl.float32), 1)
    return b_dq, b_sum


@triton.jit(do_not_specialize=["seed"])
def attention_bwd_dq_kernel(
    p_q, p_k, p_v, p_do, p_o, p_o_fp32, p_mean_key, p_lse, p_ties, p_delta, p_delta_o,
    p_delta_ref, p_sums, p_dq,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sob, soh, sot, sgb, sgh, sgt,
    n, scale, seed,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, PROBE: tl.constexpr, DELTA_FROM: tl.constexpr,
    REDRAWN: tl.constexpr, DELTA_BIAS: tl.constexpr, ROW_SUM: tl.constexpr,
    S: tl.constexpr, EXACT: tl.constexpr, DODO: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    DQ_ACC: tl.constexpr, PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One block of BM queries: delta, and dq = scale * ds k, in the inputs' dtype.

    PROBE: also delta from the policy's o and from the unrounded o, and this block's sums of their
    difference, of its absolute value, and of the rows whose largest score is tied.
    TILE: keys per rounding of dq's accumulator, 0 for one rounding at the end.
    ROW_SUM: take the row sums of ds, times the mean key of the head and sequence, out of ds k.
    """
    n_blocks = tl.cdiv(n, BM)
    pid = tl.program_id(0)
    pid_bh = pid // n_blocks
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    who = (seed, batch, head)
    block = n_blocks - 1 - pid % n_blocks  # causal: the longest rows first
    start = block * BM
    o_q = start + tl.arange(0, BM)
    o_d = tl.arange(0, D)[None, :]
    o_row = pid_bh.to(tl.int64) * n + o_q
    p_k += batch * skb + head * skh
    p_v += batch * svb + head * svh
    o_bh = batch * sob + head * soh
    b_q = load_rows(p_q + batch * sqb + head * sqh, sqt, o_q, n, D, EVEN, NATIVE)
    b_do = load_rows(p_do + batch * sdb + head * sdh, sdt, o_q, n, D, EVEN, NATIVE)
    b_lse = load_lse(p_lse, o_row, o_q, n, EVEN)
    end = tl.minimum(start + BM, n) if CAUSAL else n
    mid = ((start + 1) if CAUSAL else n) // BN * BN  # every query of the block sees keys below it

    MEASURED: tl.constexpr = PROBE or DELTA_BIAS != 0
    b_delta = tl.zeros([BM], tl.float32)
    if MEASURED or DELTA_FROM == "o" or DELTA_FROM == "o_split":
        b_o = load_rows(p_o + o_bh, sot, o_q, n, D, EVEN, NATIVE).to(tl.float32)
    if MEASURED or DELTA_FROM == "o_fp32" or DELTA_FROM == "o_split" or DELTA_FROM == "o_redrawn":
        b_o_fp32 = load_rows(p_o_fp32 + o_bh, sot, o_q, n, D, EVEN, NATIVE).to(tl.float32)
    if MEASURED or DELTA_FROM == "o":
        b_dodo = round_site(b_do.to(tl.float32) * b_o, DODO, who, o_q[:, None], o_d, NATIVE)
        b_delta = tl.sum(b_dodo, 1)
    if MEASURED:
        b_ref = tl.sum(b_do.to(tl.float32) * b_o_fp32, 1)
        b_bias = tl.where(o_q < n, b_delta - b_ref, 0.0)
    if PROBE:
        m_tied = tl.load(p_ties + o_row, mask=o_q < n, other=0) > 1
        tl.store(p_delta_o + o_row, b_delta, mask=o_q < n)
        tl.store(p_delta_ref + o_row, b_ref, mask=o_q < n)
        p_block = p_sums + (pid_bh.to(tl.int64) * n_blocks + block) * 3
        tl.store(p_block, tl.sum(b_bias, 0))
        tl.store(p_block + 1, tl.sum(tl.abs(b_bias), 0))
        tl.store(p_block + 2, tl.sum(m_tied.to(tl.float32), 0))
    if DELTA_FROM == "o_fp32" or DELTA_FROM == "o_split" or DELTA_FROM == "o_redrawn":
        if DELTA_FROM == "o_split":
            b_o_fp32 = b_o + round_bf16(b_o_fp32 - b_o, NATIVE)
        elif DELTA_FROM == "o_redrawn":
            b_o_fp32 = round_site(b_o_fp32, REDRAWN, who, o_q[:, None], o_d, NATIVE)
        b_dodo = round_site(b_do.to(tl.float32) * b_o_fp32, DODO, who, o_q[:, None], o_d, NATIVE)
        b_delta = tl.sum(b_dodo, 1)
    elif DELTA_FROM == "dp":
        b_delta = tl.zeros([BM], tl.float32)
        b_delta = sum_p_dp(
            b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, o_q, 0, mid, n, scale, who,
            D, BN, CAUSAL, False, EVEN, S, EXACT, DP, PIECES, NATIVE,
        )  # fmt: skip
        b_delta = sum_p_dp(
            b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, o_q, mid, end, n, scale, who,
            D, BN, CAUSAL, True, EVEN, S, EXACT, DP, PIECES, NATIVE,
        )  # fmt: skip
    if DELTA_BIAS != 0:
        b_delta += DELTA_BIAS * tl.abs(b_bias)
    tl.store(p_delta + o_row, b_delta, mask=o_q < n)

    b_dq = tl.zeros([BM, D], tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    if TILE == 0:
        b_dq, b_sum = sum_dq(
            b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, b_dq, b_sum, o_q, 0, mid,
            n, scale, who, D, BN, CAUSAL, False, EVEN, S, EXACT, DP, DS, ROW_SUM, PIECES, NATIVE,
        )  # fmt: skip
        b_dq, b_sum = sum_dq(
            b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, b_dq, b_sum, o_q, mid, end,
            n, scale, who, D, BN, CAUSAL, True, EVEN, S, EXACT, DP, DS, ROW_SUM, PIECES, NATIVE,
        )  # fmt: skip
        b_dq = round_site(b_dq, DQ_ACC, who, o_q[:, None], o_d, NATIVE)
    else:
        for first in range(0, end, TILE):
            last = tl.minimum(first + TILE, end)
            seen = tl.minimum(tl.maximum(mid, first), last)
            b_new = tl.zeros([BM, D], tl.float32)
            b_new, b_sum = sum_dq(
                b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, b_new, b_sum, o_q, first, seen,
                n, scale, who,
                D, BN, CAUSAL, False, EVEN, S, EXACT, DP, DS, ROW_SUM, PIECES, NATIVE,
            )  # fmt: skip
            b_new, b_sum = sum_dq(
                b_q, b_do, p_k, p_v, skt, svt, b_lse, b_delta, b_new, b_sum, o_q, seen, last,
                n, scale, who,
                D, BN, CAUSAL, True, EVEN, S, EXACT, DP, DS, ROW_SUM, PIECES, NATIVE,
            )  # fmt: skip
            o_j = o_d + 2 * D * (first // TILE)
            b_new = round_site(b_new, DQ_ACC, who, o_q[:, None], o_j, NATIVE)
            b_dq = round_site(b_dq + b_new, DQ_ACC, who, o_q[:, None], o_j + D, NATIVE)
    if ROW_SUM:
        b_mean = tl.load(p_mean_key + pid_bh.to(tl.int64) * D + o_d)  # [1, D]
        b_dq -= b_sum[:, None] * b_mean
    store_rows(p_dq + batch * sgb + head * sgh, sgt, o_q, n, scale * b_dq, D, NATIVE)


@triton.jit
def sum_dk_dv(
    b_k, b_v, p_q, p_do, p_lse, p_delta, sqt, sdt, b_dk, b_dv, o_k, row, lo, hi, n, scale, who,
    D: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr,
    S: tl.constexpr, EXACT: tl.constexpr, P_BWD: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Add the queries lo to hi to ds^T q and p_bwd^T dO.  # [BN, D] each

    MASKED: some of these queries do not see all keys of the block (causal).
    """
    for start in range(lo, hi, BM):
        o_q = start + tl.arange(0, BM)
        b_q = load_rows(p_q, sqt, o_q, n, D, EVEN, NATIVE)
        b_do = load_rows(p_do, sdt, o_q, n, D, EVEN, NATIVE)
        b_lse = load_lse(p_lse, row + o_q, o_q, n, EVEN)
        b_delta = load_row(p_delta, row + o_q, o_q, n, 0.0, EVEN)
        zeros = tl.zeros([b_k.shape[0], BM], tl.float32)
        b_x = dot(b_k, tl.trans(b_q), zeros, PIECES, NATIVE)  # [BN, BM]
        b_dp = dot(b_v, tl.trans(b_do), zeros, PIECES, NATIVE)
        b_p, b_dp = p_and_dp(
            b_x,
            b_dp,
            b_lse[None, :],
            o_q[None, :],
            o_k[:, None],
            n,
            scale,
            who,
            S,
            EXACT,
            DP,
            NATIVE,
        )
        if MASKED:
            b_p = tl.where(o_k[:, None] <= o_q[None, :], b_p, 0.0)
        if not EVEN:  # 0 times an infinite key is NaN
            b_p = tl.where(o_q[None, :] < n, b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[None, :])
        b_p = operand(b_p, P_BWD, who, o_q[None, :], o_k[:, None], NATIVE)
        b_ds = operand(b_ds, DS, who, o_q[None, :], o_k[:, None], NATIVE)
        b_dv = dot(b_p, b_do, b_dv, PIECES, NATIVE)
        b_dk = dot(b_ds, b_q, b_dk, PIECES, NATIVE)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["seed"])
def attention_bwd_dkdv_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dk, p_dv,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sgb, sgh, sgt,
    n, scale, seed,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    S: tl.constexpr, EXACT: tl.constexpr, P_BWD: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    DKDV_ACC: tl.constexpr, PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One block of BN keys: dk = scale * ds^T q and dv = p_bwd^T dO, in the inputs' dtype.

    TILE: queries per rounding of the accumulators, 0 for one rounding at the end.
    """
    n_blocks = tl.cdiv(n, BN)
    pid = tl.program_id(0)
    pid_bh = pid // n_blocks
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    who = (seed, batch, head)
    first = (pid % n_blocks) * BN
    o_k = first + tl.arange(0, BN)
    o_d = tl.arange(0, D)[None, :]
    row = pid_bh.to(tl.int64) * n
    p_q += batch * sqb + head * sqh
    p_do += batch * sdb + head * sdh
    b_k = load_rows(p_k + batch * skb + head * skh, skt, o_k, n, D, EVEN, NATIVE)
    b_v = load_rows(p_v + batch * svb + head * svh, svt, o_k, n, D, EVEN, NATIVE)
    begin = first // BM * BM if CAUSAL else 0  # queries below it see none of these keys
    mid = tl.cdiv(first + BN - 1, BM) * BM if CAUSAL else 0  # those from it see all

    b_dk = tl.zeros([BN, D], tl.float32)
    b_dv = tl.zeros([BN, D], tl.float32)
    if TILE == 0:
        b_dk, b_dv = sum_dk_dv(
            b_k, b_v, p_q, p_do, p_lse, p_delta, sqt, sdt, b_dk, b_dv, o_k, row,
            begin, tl.minimum(mid, n), n, scale, who,
            D, BM, True, EVEN, S, EXACT, P_BWD, DP, DS, PIECES, NATIVE,
        )  # fmt: skip
        b_dk, b_dv = sum_dk_dv(
            b_k, b_v, p_q, p_do, p_lse, p_delta, sqt, sdt, b_dk, b_dv, o_k, row,
            mid, n, n, scale, who,
            D, BM, False, EVEN, S, EXACT, P_BWD, DP, DS, PIECES, NATIVE,
        )  # fmt: skip
        b_dk = round_site(b_dk, DKDV_ACC, who, o_k[:, None], o_d, NATIVE)
        b_dv = round_site(b_dv, DKDV_ACC, who, o_k[:, None], o_d + 2 * D, NATIVE)
    else:
        for tile in range(begin // TILE * TILE, n, TILE):
            lo, last = tl.maximum(tile, begin), tl.minimum(tile + TILE, n)
            seen = tl.minimum(tl.maximum(mid, lo), last)
            b_dk_new = tl.zeros([BN, D], tl.float32)
            b_dv_new = tl.zeros([BN, D], tl.float32)
            b_dk_new, b_dv_new = sum_dk_dv(
                b_k, b_v, p_q, p_do, p_lse, p_delta, sqt, sdt, b_dk_new, b_dv_new, o_k, row,
                lo, seen, n, scale, who, D, BM, True, EVEN, S, EXACT, P_BWD, DP, DS, PIECES, NATIVE,
            )  # fmt: skip
            b_dk_new, b_dv_new = sum_dk_dv(
                b_k, b_v, p_q, p_do, p_lse, p_delta, sqt, sdt, b_dk_new, b_dv_new, o_k, row,
                seen, last, n, scale, who,
                D, BM, False, EVEN, S, EXACT, P_BWD, DP, DS, PIECES, NATIVE,
            )  # fmt: skip
            o_i = o_d + 4 * D * (tile // TILE)
            b_dk_new = round_site(b_dk_new, DKDV_ACC, who, o_k[:, None], o_i, NATIVE)
            b_dk = round_site(b_dk + b_dk_new, DKDV_ACC, who, o_k[:, None], o_i + D, NATIVE)
            b_dv_new = round_site(b_dv_new, DKDV_ACC, who, o_k[:, None], o_i + 2 * D, NATIVE)
            b_dv = round_site(b_dv + b_dv_new, DKDV_ACC, who, o_k[:, None], o_i + 3 * D, NATIVE)
    o_bh = batch * sgb + head * sgh
    store_rows(p_dk + o_bh, sgt, o_k, n, scale * b_dk, D, NATIVE)
    store_rows(p_dv + o_bh, sgt, o_k, n, b_dv, D, NATIVE)
