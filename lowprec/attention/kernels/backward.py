"""The attention backward as two Triton kernels, every rounding of the policy explicit.

`attention_bwd_dq_kernel` owns a block of queries: it forms delta, stores it, and sums dq over the
keys. `attention_bwd_dkdv_kernel` then owns a block of keys and sums dk and dv over the queries; its
blocks are transposed, keys by queries, so that p and ds enter their products as they lie in
registers. Where heads of queries share keys, it goes through them in order, and the sums go on.
Both form s, p, dp and ds again; neither adds with atomics, so a step repeats bitwise.
`attention_bwd_mean_key_kernel` runs before them where row sums of ds, times the mean key, are taken
out of dq. Where they refine delta instead, the first kernel hands the second delta plus them.
"""

import triton
import triton.language as tl

from lowprec.attention.kernels.rounding import (
    dot,
    exp_difference,
    load_rows,
    operand,
    round_bf16,
    round_rows,
    round_site,
    store_rows,
)
from lowprec.attention.kernels.views import (
    keys_of,
    of_head,
    queries_of,
    scale_of,
    scores,
    view_of,
    visible,
)

MEAN_ROWS = tl.constexpr(512)
"""Keys that one program of `attention_bwd_mean_key_kernel` sums."""


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
def p_and_dp(b_product, b_dp, b_lse, o_q, o_k, where, c: tl.constexpr):
    """P = exp(s - L) in FP32 and rnd_dp(dO V^T); all arguments broadcast to the block's shape."""
    n, scale, who, view = where
    b_stored, b_s = scores(b_product, o_q, o_k, where, c)
    b_p = exp_difference(b_stored, b_s, b_lse, scale_of(where, c), c.s, c.exact, c.bias)
    return b_p, round_site(b_dp, c.dp, who, o_q, o_k, c.native)


@triton.jit
def products(b_q, b_do, keys, b_lse, o_q, o_k, where, c: tl.constexpr, MASKED: tl.constexpr):
    """(k, P, dp) of one block of keys.  # [BN, D], [BM, BN], [BM, BN]"""
    p_k, p_v, skt, svt = keys
    n, scale, who, view = where
    b_k = load_rows(p_k, skt, o_k, n, c.d, c.even or not MASKED, c.native)
    b_v = load_rows(p_v, svt, o_k, n, c.d, c.even or not MASKED, c.native)
    zeros = tl.full([b_q.shape[0], c.bn], 0, tl.float32)
    b_x = dot(b_q, tl.trans(b_k), zeros, c.pieces, c.native)
    b_dp = dot(b_do, tl.trans(b_v), zeros, c.pieces, c.native)
    b_p, b_dp = p_and_dp(b_x, b_dp, b_lse[:, None], o_q[:, None], o_k[None, :], where, c)
    if MASKED:
        b_p = tl.where(visible(o_q[:, None], o_k[None, :], where, c), b_p, 0.0)
    return b_k, b_p, b_dp


@triton.jit
def sum_p_dp(
    b_q, b_do, keys, b_lse, b_delta, o_q, lo, hi, where, c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys lo to hi to delta = rowsum(P * dp).  # [BM]"""
    p_k, p_v, skt, svt = keys
    n, scale, who, view = where
    for first in range(lo, hi, c.bn):
        o_k = first + tl.arange(0, c.bn)
        _, b_p, b_dp = products(b_q, b_do, keys, b_lse, o_q, o_k, where, c, MASKED)
        b_delta += tl.sum(b_p * b_dp, 1)
    return b_delta


@triton.jit
def sum_pv(
    b_q, keys, b_lse, b_pv, o_q, lo, hi, where, c: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add the keys lo to hi to P V of weights that are not rounded, nor cut to two pieces: what
    that leaves would turn roundings of the sum.  # [BM, D]"""
    p_k, p_v, skt, svt = keys
    n, scale, who, view = where
    for first in range(lo, hi, c.bn):
        o_k = first + tl.arange(0, c.bn)
        _, b_p, _ = products(b_q, b_q, keys, b_lse, o_q, o_k, where, c, MASKED)
        b_v = load_rows(p_v, svt, o_k, n, c.d, c.even or not MASKED, c.native)
        b_pv = dot(b_p, b_v, b_pv, 3, c.native)
    return b_pv


@triton.jit
def sum_dq(
    b_q, b_do, keys, b_lse, b_delta, b_dq, b_sum, b_pk, o_q, lo, hi, where, c: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys lo to hi to ds k and, as c.row_sum needs them, to the row sums of ds and to P k.

    The sums are a product with eight equal columns of ones, the least that a tensor core takes: ds
    is its operand anyway, and turned back into FP32 numbers it would be rounded one by one, on the
    units that form exp2.  # [BM, D], [BM, 8], [BM, D]
    """
    p_k, p_v, skt, svt = keys
    n, scale, who, view = where
    for first in range(lo, hi, c.bn):
        o_k = first + tl.arange(0, c.bn)
        b_k, b_p, b_dp = products(b_q, b_do, keys, b_lse, o_q, o_k, where, c, MASKED)
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_ds = operand(b_ds, c.ds, who, o_q[:, None], o_k[None, :], c.native)
        b_dq = dot(b_ds, b_k, b_dq, c.pieces, c.native)
        if c.row_sum != "as_rounded":
            b_ones = tl.full([c.bn, 8], 1.0, tl.float32)
            if c.native:
                b_ones = b_ones.to(tl.float16 if b_ds.dtype == tl.float16 else tl.bfloat16)
            b_sum = dot(b_ds, b_ones, b_sum, c.pieces, c.native)
        if c.row_sum == "refined":
            b_p = operand(b_p, c.p_bwd, who, o_q[:, None], o_k[None, :], c.native)
            b_pk = dot(b_p, b_k, b_pk, c.pieces, c.native)
    return b_dq, b_sum, b_pk


@triton.jit
def attention_bwd_mean_key_kernel(p_k, p_mean, strides, n, c: tl.constexpr):
    """The sum of MEAN_ROWS keys over n, FP32: their part in the mean key of the head and sequence.

    Each key is divided first, so that the mean of finite keys is finite. p_mean: (B, H', parts, D).
    """
    skb, skh, skt = strides
    parts = tl.cdiv(n, MEAN_ROWS)
    pid = tl.program_id(0)
    pid_bh = pid // parts
    KEY_HEADS: tl.constexpr = c.h // c.group
    batch, head = (pid_bh // KEY_HEADS).to(tl.int64), (pid_bh % KEY_HEADS).to(tl.int64)
    o_k = pid % parts * MEAN_ROWS + tl.arange(0, MEAN_ROWS)
    b_k = load_rows(p_k + batch * skb + head * skh, skt, o_k, n, c.d, c.even, c.native)
    b_mean = tl.sum(b_k.to(tl.float32) * (1.0 / n), 0)
    tl.store(p_mean + pid.to(tl.int64) * c.d + tl.arange(0, c.d), b_mean)


@triton.jit(do_not_specialize=["seed"])
def attention_bwd_dq_kernel(
    p_q, p_k, p_v, p_do, p_o, p_o_fp32, p_mean, p_lse, p_ties, p_delta, p_delta_dk, p_delta_o,
    p_delta_ref, p_sums, p_dq, strides, mask, scale, seed, c: tl.constexpr,
):  # fmt: skip
    """One block of BM queries: delta, and dq = scale * ds k, in the inputs' dtype.

    c.probe: also delta from the policy's o and from the unrounded o, and this block's sums of their
    difference, of its absolute value, and of the rows whose largest score is tied.
    c.tile: keys per rounding of dq's accumulator, 0 for one rounding at the end.
    c.row_sum: take the row sums of ds out of ds k, "removed" times the mean key of the head and
    sequence, "refined" times the row of P k; then delta_dk is delta plus them.
    """
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sob, soh, sot, sgb, sgh, sgt = (
        strides
    )
    n_q, n = mask[0], mask[1]
    n_blocks = tl.cdiv(n_q, c.bm)
    pid = tl.program_id(0)
    pid_bh = pid // n_blocks
    batch, head = (pid_bh // c.h).to(tl.int64), (pid_bh % c.h).to(tl.int64)
    who = (seed, batch, head)
    view = view_of(mask, batch, head, c)
    block = n_blocks - 1 - pid % n_blocks  # causal: the longest rows first
    start = block * c.bm
    o_q = start + tl.arange(0, c.bm)
    o_d = tl.arange(0, c.d)[None, :]
    o_row = pid_bh.to(tl.int64) * n_q + o_q
    p_k += batch * skb + head // c.group * skh
    p_v += batch * svb + head // c.group * svh
    keys, where = (p_k, p_v, skt, svt), (n, scale, who, view)
    o_bh = batch * sob + head * soh
    b_q = load_rows(p_q + batch * sqb + head * sqh, sqt, o_q, n_q, c.d, c.even, c.native)
    b_do = load_rows(p_do + batch * sdb + head * sdh, sdt, o_q, n_q, c.d, c.even, c.native)
    b_lse = load_lse(p_lse, o_row, o_q, n_q, c.even)
    begin, mid, end = keys_of(start, n, view, c)

    MEASURED: tl.constexpr = c.probe or c.delta_bias != 0
    b_delta = tl.full([c.bm], 0, tl.float32)
    if MEASURED or c.delta_from == "o" or c.delta_from == "o_split":
        b_o = load_rows(p_o + o_bh, sot, o_q, n_q, c.d, c.even, c.native).to(tl.float32)
    if (
        MEASURED
        or c.delta_from == "o_fp32"
        or c.delta_from == "o_split"
        or c.delta_from == "o_redrawn"
    ):
        b_o_fp32 = load_rows(p_o_fp32 + o_bh, sot, o_q, n_q, c.d, c.even, c.native).to(tl.float32)
    if MEASURED or c.delta_from == "o":
        b_dodo = round_site(b_do.to(tl.float32) * b_o, c.dodo, who, o_q[:, None], o_d, c.native)
        b_delta = tl.sum(b_dodo, 1)
    if MEASURED:
        b_ref = tl.sum(b_do.to(tl.float32) * b_o_fp32, 1)
        b_bias = tl.where(o_q < n_q, b_delta - b_ref, 0.0)
    if c.probe:
        m_tied = tl.load(p_ties + o_row, mask=o_q < n_q, other=0) > 1
        tl.store(p_delta_o + o_row, b_delta, mask=o_q < n_q)
        tl.store(p_delta_ref + o_row, b_ref, mask=o_q < n_q)
        p_block = p_sums + (pid_bh.to(tl.int64) * n_blocks + block) * 3
        tl.store(p_block, tl.sum(b_bias, 0))
        tl.store(p_block + 1, tl.sum(tl.abs(b_bias), 0))
        tl.store(p_block + 2, tl.sum(m_tied.to(tl.float32), 0))
    if c.delta_from == "o_prime":
        b_o_fp32 = tl.full([c.bm, c.d], 0, tl.float32)
        b_o_fp32 = sum_pv(b_q, keys, b_lse, b_o_fp32, o_q, begin, mid, where, c, False)
        b_o_fp32 = sum_pv(b_q, keys, b_lse, b_o_fp32, o_q, mid, end, where, c, True)
        b_o_fp32 = round_bf16(b_o_fp32, c.native)
    if c.delta_from != "o" and c.delta_from != "dp":
        if c.delta_from == "o_split":
            b_o_fp32 = b_o + round_bf16(b_o_fp32 - b_o, c.native)
        elif c.delta_from == "o_redrawn":
            b_o_fp32 = round_rows(b_o_fp32, c.redrawn, who, o_q[:, None], o_d, c.native)
        b_dodo = round_site(
            b_do.to(tl.float32) * b_o_fp32, c.dodo, who, o_q[:, None], o_d, c.native
        )
        b_delta = tl.sum(b_dodo, 1)
    elif c.delta_from == "dp":
        b_delta = tl.full([c.bm], 0, tl.float32)
        b_delta = sum_p_dp(b_q, b_do, keys, b_lse, b_delta, o_q, begin, mid, where, c, False)
        b_delta = sum_p_dp(b_q, b_do, keys, b_lse, b_delta, o_q, mid, end, where, c, True)
    if c.delta_bias != 0:
        b_delta += c.delta_bias * tl.abs(b_bias)
    tl.store(p_delta + o_row, b_delta, mask=o_q < n_q)

    b_dq = tl.full([c.bm, c.d], 0, tl.float32)
    b_sum = tl.full([c.bm, 8], 0, tl.float32)
    b_pk = tl.full([c.bm, c.d], 0, tl.float32)
    if c.tile == 0:
        b_dq, b_sum, b_pk = sum_dq(
            b_q, b_do, keys, b_lse, b_delta, b_dq, b_sum, b_pk, o_q, begin, mid, where, c, False
        )  # fmt: skip
        b_dq, b_sum, b_pk = sum_dq(
            b_q, b_do, keys, b_lse, b_delta, b_dq, b_sum, b_pk, o_q, mid, end, where, c, True
        )  # fmt: skip
        b_dq = round_site(b_dq, c.dq_acc, who, o_q[:, None], o_d, c.native)
    else:
        for first in range(begin // c.tile * c.tile, end, c.tile):
            lo, last = tl.maximum(first, begin), tl.minimum(first + c.tile, end)
            seen = tl.minimum(tl.maximum(mid, lo), last)
            b_new = tl.full([c.bm, c.d], 0, tl.float32)
            b_new, b_sum, b_pk = sum_dq(
                b_q, b_do, keys, b_lse, b_delta, b_new, b_sum, b_pk, o_q, lo, seen, where, c,
                False,
            )  # fmt: skip
            b_new, b_sum, b_pk = sum_dq(
                b_q, b_do, keys, b_lse, b_delta, b_new, b_sum, b_pk, o_q, seen, last, where, c,
                True,
            )  # fmt: skip
            o_j = o_d + 2 * c.d * (first // c.tile)
            b_new = round_site(b_new, c.dq_acc, who, o_q[:, None], o_j, c.native)
            b_dq = round_site(b_dq + b_new, c.dq_acc, who, o_q[:, None], o_j + c.d, c.native)
    b_row_sum = tl.sum(b_sum, 1) * 0.125
    if c.row_sum == "removed":
        parts = tl.cdiv(n, MEAN_ROWS)
        p_mean += pid_bh.to(tl.int64) // c.group * parts * c.d
        b_mean = tl.full([1, c.d], 0, tl.float32)
        for part in range(parts):
            b_mean += tl.load(p_mean + part * c.d + o_d)
        b_dq -= b_row_sum[:, None] * b_mean
    elif c.row_sum == "refined":
        b_dq -= b_row_sum[:, None] * b_pk
        tl.store(p_delta_dk + o_row, b_delta + b_row_sum, mask=o_q < n_q)
    store_rows(p_dq + batch * sgb + head * sgh, sgt, o_q, n_q, scale * b_dq, c.d, c.native)


@triton.jit
def sum_dk_dv(
    b_k, b_v, queries, b_dk, b_dv, o_k, lo, hi, where, c: tl.constexpr, MASKED: tl.constexpr
):
    """Add the queries lo to hi to ds^T q and p_bwd^T dO.  # [BN, D] each

    MASKED: some of these queries do not see all keys of the block (causal).
    """
    p_q, p_do, p_lse, p_delta, sqt, sdt, row, n_q = queries
    n, scale, who, view = where
    for start in range(lo, hi, c.bm):
        o_q = start + tl.arange(0, c.bm)
        b_q = load_rows(p_q, sqt, o_q, n_q, c.d, c.even, c.native)
        b_do = load_rows(p_do, sdt, o_q, n_q, c.d, c.even, c.native)
        b_lse = load_lse(p_lse, row + o_q, o_q, n_q, c.even)
        b_delta = load_row(p_delta, row + o_q, o_q, n_q, 0.0, c.even)
        zeros = tl.full([b_k.shape[0], c.bm], 0, tl.float32)
        b_x = dot(b_k, tl.trans(b_q), zeros, c.pieces, c.native)  # [BN, BM]
        b_dp = dot(b_v, tl.trans(b_do), zeros, c.pieces, c.native)
        b_p, b_dp = p_and_dp(b_x, b_dp, b_lse[None, :], o_q[None, :], o_k[:, None], where, c)
        if MASKED:
            b_p = tl.where(visible(o_q[None, :], o_k[:, None], where, c), b_p, 0.0)
        if not c.even:  # 0 times an infinite key is NaN
            b_p = tl.where(o_q[None, :] < n_q, b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[None, :])
        b_p = operand(b_p, c.p_bwd, who, o_q[None, :], o_k[:, None], c.native)
        b_ds = operand(b_ds, c.ds, who, o_q[None, :], o_k[:, None], c.native)
        b_dv = dot(b_p, b_do, b_dv, c.pieces, c.native)
        b_dk = dot(b_ds, b_q, b_dk, c.pieces, c.native)
    return b_dk, b_dv


@triton.jit
def add_head(b_k, b_v, queries, b_dk, b_dv, o_k, first, where, c: tl.constexpr):
    """Add the queries of a head to the accumulators of the keys from `first`.  # [BN, D] each"""
    n, scale, who, view = where
    o_d = tl.arange(0, c.d)[None, :]
    begin, mid, end = queries_of(first, queries[7], view, c)
    if c.tile == 0:
        b_dk, b_dv = sum_dk_dv(
            b_k, b_v, queries, b_dk, b_dv, o_k, begin, tl.minimum(mid, end), where, c, True
        )  # fmt: skip
        b_dk, b_dv = sum_dk_dv(b_k, b_v, queries, b_dk, b_dv, o_k, mid, end, where, c, False)
        b_dk = round_site(b_dk, c.dkdv_acc, who, o_k[:, None], o_d, c.native)
        b_dv = round_site(b_dv, c.dkdv_acc, who, o_k[:, None], o_d + 2 * c.d, c.native)
    else:
        for tile in range(begin // c.tile * c.tile, end, c.tile):
            lo, last = tl.maximum(tile, begin), tl.minimum(tile + c.tile, end)
            seen = tl.minimum(tl.maximum(mid, lo), last)
            b_dk_new = tl.full([c.bn, c.d], 0, tl.float32)
            b_dv_new = tl.full([c.bn, c.d], 0, tl.float32)
            b_dk_new, b_dv_new = sum_dk_dv(
                b_k, b_v, queries, b_dk_new, b_dv_new, o_k, lo, seen, where, c, True
            )  # fmt: skip
            b_dk_new, b_dv_new = sum_dk_dv(
                b_k, b_v, queries, b_dk_new, b_dv_new, o_k, seen, last, where, c, False
            )  # fmt: skip
            o_i = o_d + 4 * c.d * (tile // c.tile)
            b_dk_new = round_site(b_dk_new, c.dkdv_acc, who, o_k[:, None], o_i, c.native)
            b_dk = round_site(b_dk + b_dk_new, c.dkdv_acc, who, o_k[:, None], o_i + c.d, c.native)
            b_dv_new = round_site(b_dv_new, c.dkdv_acc, who, o_k[:, None], o_i + 2 * c.d, c.native)
            b_dv = round_site(
                b_dv + b_dv_new, c.dkdv_acc, who, o_k[:, None], o_i + 3 * c.d, c.native
            )
    return b_dk, b_dv


@triton.jit(do_not_specialize=["seed"])
def attention_bwd_dkdv_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dk, p_dv, strides, mask, scale, seed,
    c: tl.constexpr,
):  # fmt: skip
    """One block of BN keys: dk = scale * ds^T q and dv = p_bwd^T dO, in the inputs' dtype, summed
    over the heads of queries that read these keys, the first one first.

    c.tile: queries per rounding of the accumulators, 0 for one rounding at the end.
    """
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sgb, sgh, sgt = strides
    KEY_HEADS: tl.constexpr = c.h // c.group
    n_q, n = mask[0], mask[1]
    n_blocks = tl.cdiv(n, c.bn)
    pid = tl.program_id(0)
    pid_bh = pid // n_blocks
    batch, head = (pid_bh // KEY_HEADS).to(tl.int64), (pid_bh % KEY_HEADS).to(tl.int64)
    first = (pid % n_blocks) * c.bn
    o_k = first + tl.arange(0, c.bn)
    b_k = load_rows(p_k + batch * skb + head * skh, skt, o_k, n, c.d, c.even, c.native)
    b_v = load_rows(p_v + batch * svb + head * svh, svt, o_k, n, c.d, c.even, c.native)
    b_dk = tl.full([c.bn, c.d], 0, tl.float32)
    b_dv = tl.full([c.bn, c.d], 0, tl.float32)
    whole = view_of(mask, batch, 0, c)
    for i in range(c.group):
        reader = head * c.group + i
        row = (pid_bh.to(tl.int64) * c.group + i) * n_q
        p_q_head, p_do_head = p_q + batch * sqb + reader * sqh, p_do + batch * sdb + reader * sdh
        queries = (p_q_head, p_do_head, p_lse, p_delta, sqt, sdt, row, n_q)
        view = of_head(whole, mask, reader)
        where = (n, scale, (seed, batch, reader), view)
        b_dk, b_dv = add_head(b_k, b_v, queries, b_dk, b_dv, o_k, first, where, c)
    o_bh = batch * sgb + head * sgh
    store_rows(p_dk + o_bh, sgt, o_k, n, scale * b_dk, c.d, c.native)
    store_rows(p_dv + o_bh, sgt, o_k, n, b_dv, c.d, c.native)
