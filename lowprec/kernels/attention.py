"""Attention forward and backward as Triton kernels, every rounding of the policy explicit.

The forward makes two passes over the keys: the first finds the row maximum, so that in the second
every p = exp(s - m) is formed once against the final maximum, as an untiled row demands. Matmul
operands that are BF16 by policy go to the tensor cores as BF16; the products accumulate in FP32.

The same source runs under Triton's CPU interpreter, whose BF16 arithmetic is wrong: with
NATIVE=False values are lifted to FP32 as soon as they are loaded, rounded with integer operations
on their bit pattern and multiplied in FP32, which is exact for BF16 operands.

Names: p_* pointers, o_* offsets, m_* masks, b_* block values; BM queries, BN keys, D head_dim.
"""

import triton
import triton.language as tl


@triton.jit
def round_bf16(x, NATIVE: tl.constexpr):
    """FP32 value nearest to x among BF16 numbers, ties to even; NaN stays NaN."""
    if NATIVE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)


@triton.jit
def round_site(x, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """x as a site stores it: BF16 if the policy says so, else unchanged."""
    return round_bf16(x, NATIVE) if BF16 else x


@triton.jit
def dot(a, b, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """a @ b in FP32 accumulation, for operands that are both BF16 numbers (BF16) or FP32."""
    if BF16 and NATIVE:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


@triton.jit
def load_rows(p_x, stride_row, o_row, n_rows, D: tl.constexpr, NATIVE: tl.constexpr):
    """Rows of one head, 0 beyond the end; FP32 in the interpreter.  # [rows, D]"""
    o_x = o_row[:, None] * stride_row + tl.arange(0, D)[None, :]
    b_x = tl.load(p_x + o_x, mask=o_row[:, None] < n_rows, other=0.0)
    return b_x if NATIVE else b_x.to(tl.float32)


@triton.jit
def store_rows(p_x, stride_row, o_row, n_rows, b_x, D: tl.constexpr):
    """Store rows of one head in the pointer's dtype; the value must already be rounded to it."""
    o_x = o_row[:, None] * stride_row + tl.arange(0, D)[None, :]
    tl.store(p_x + o_x, b_x.to(p_x.dtype.element_ty), mask=o_row[:, None] < n_rows)


@triton.jit
def scores(
    b_q, b_k, o_q, o_k, n, scale,
    CAUSAL: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """s = rnd_s(scale * rnd_s(q k^T)), -inf where masked.  # [BM, BN]"""
    b_s = round_site(dot(b_q, tl.trans(b_k), True, NATIVE), S, NATIVE)
    b_s = round_site(b_s * scale, S, NATIVE)
    m_s = o_k[None, :] < n
    if CAUSAL:
        m_s = m_s & (o_k[None, :] <= o_q[:, None])
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit
def attention_fwd_kernel(
    p_q, p_k, p_v, p_o, p_o_stored, p_o_fp32, p_lse, p_ties,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot,
    n, scale,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, NATIVE: tl.constexpr,
    STORED: tl.constexpr, SHADOW: tl.constexpr, TIES: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr, L: tl.constexpr, O_ACC: tl.constexpr, O: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """One block of BM queries: o, lse, and if asked the stored o, the shadow o and the ties."""
    pid_bh = tl.program_id(1)
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    start = tl.program_id(0) * BM
    o_q = start + tl.arange(0, BM)
    p_k += batch * skb + head * skh
    p_v += batch * svb + head * svh
    b_q = load_rows(p_q + batch * sqb + head * sqh, sqt, o_q, n, D, NATIVE)
    end = tl.minimum(start + BM, n) if CAUSAL else n

    b_m = tl.full([BM], float("-inf"), tl.float32)
    for first in range(0, end, BN):
        o_k = first + tl.arange(0, BN)
        b_k = load_rows(p_k, skt, o_k, n, D, NATIVE)
        b_s = scores(b_q, b_k, o_q, o_k, n, scale, CAUSAL, S, NATIVE)
        b_m = tl.maximum(b_m, tl.max(b_s, 1))

    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D], tl.float32)
    b_ties = tl.zeros([BM], tl.int32)
    for first in range(0, end, BN):
        o_k = first + tl.arange(0, BN)
        b_k = load_rows(p_k, skt, o_k, n, D, NATIVE)
        b_v = load_rows(p_v, svt, o_k, n, D, NATIVE)
        b_s = scores(b_q, b_k, o_q, o_k, n, scale, CAUSAL, S, NATIVE)
        b_p = tl.exp(b_s - b_m[:, None])
        b_l += tl.sum(b_p, 1)
        if TIES:
            b_ties += tl.sum((b_s == b_m[:, None]).to(tl.int32), 1)
        b_acc += dot(round_site(b_p, P, NATIVE), b_v, P, NATIVE)

    b_l_stored = round_site(b_l, L, NATIVE)
    b_o = round_site(b_acc, O_ACC, NATIVE)
    b_o = round_site(tl.div_rn(b_o, b_l_stored[:, None]), O, NATIVE)
    o_bh = batch * sob + head * soh
    store_rows(p_o + o_bh, sot, o_q, n, round_bf16(b_o, NATIVE), D)
    if STORED:
        store_rows(p_o_stored + o_bh, sot, o_q, n, b_o, D)
    if SHADOW:
        store_rows(p_o_fp32 + o_bh, sot, o_q, n, tl.div_rn(b_acc, b_l[:, None]), D)
    o_row = pid_bh.to(tl.int64) * n + o_q
    tl.store(p_lse + o_row, b_m + tl.log(b_l_stored), mask=o_q < n)
    if TIES:
        tl.store(p_ties + o_row, b_ties, mask=o_q < n)


@triton.jit
def delta_bwd_kernel(
    p_do, p_o, p_o_fp32, p_delta, p_delta_o, p_delta_ref,
    sdb, sdh, sdt, sob, soh, sot, n,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, NATIVE: tl.constexpr,
    FROM_SHADOW: tl.constexpr, PROBE: tl.constexpr, DODO: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) in FP32; with PROBE also the policy's and the FP32 reference's."""
    pid_bh = tl.program_id(1)
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    o_q = tl.program_id(0) * BM + tl.arange(0, BM)
    o_bh = batch * sob + head * soh
    b_do = load_rows(p_do + batch * sdb + head * sdh, sdt, o_q, n, D, NATIVE).to(tl.float32)
    o_row = pid_bh.to(tl.int64) * n + o_q
    if PROBE or not FROM_SHADOW:
        b_o = load_rows(p_o + o_bh, sot, o_q, n, D, NATIVE).to(tl.float32)
        b_delta = tl.sum(round_site(b_do * b_o, DODO, NATIVE), 1)
        if PROBE:
            tl.store(p_delta_o + o_row, b_delta, mask=o_q < n)
    if PROBE or FROM_SHADOW:
        b_o = load_rows(p_o_fp32 + o_bh, sot, o_q, n, D, NATIVE).to(tl.float32)
        if PROBE:
            tl.store(p_delta_ref + o_row, tl.sum(b_do * b_o, 1), mask=o_q < n)
        if FROM_SHADOW:
            b_delta = tl.sum(round_site(b_do * b_o, DODO, NATIVE), 1)
    tl.store(p_delta + o_row, b_delta, mask=o_q < n)


@triton.jit
def scores_bwd(
    b_q, b_k, b_v, b_do, b_lse, b_delta, o_q, o_k, n, scale,
    CAUSAL: tl.constexpr, NATIVE: tl.constexpr,
    S: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    """P = exp(s - L) in FP32 and ds = rnd_ds(P * (rnd_dp(dO V^T) - delta)).  # [BM, BN] each"""
    b_s = scores(b_q, b_k, o_q, o_k, n, scale, CAUSAL, S, NATIVE)
    b_p = tl.exp(b_s - b_lse[:, None])
    b_dp = round_site(dot(b_do, tl.trans(b_v), True, NATIVE), DP, NATIVE)
    return b_p, round_site(b_p * (b_dp - b_delta[:, None]), DS, NATIVE)


@triton.jit
def attention_bwd_dq_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dq,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sgb, sgh, sgt,
    n, scale,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, NATIVE: tl.constexpr,
    S: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    """One block of BM queries: dq = scale * ds k, in the inputs' dtype."""
    pid_bh = tl.program_id(1)
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    start = tl.program_id(0) * BM
    o_q = start + tl.arange(0, BM)
    p_k += batch * skb + head * skh
    p_v += batch * svb + head * svh
    b_q = load_rows(p_q + batch * sqb + head * sqh, sqt, o_q, n, D, NATIVE)
    b_do = load_rows(p_do + batch * sdb + head * sdh, sdt, o_q, n, D, NATIVE)
    o_row = pid_bh.to(tl.int64) * n + o_q
    b_lse = tl.load(p_lse + o_row, mask=o_q < n, other=float("inf"))
    b_delta = tl.load(p_delta + o_row, mask=o_q < n, other=0.0)
    end = tl.minimum(start + BM, n) if CAUSAL else n

    b_dq = tl.zeros([BM, D], tl.float32)
    for first in range(0, end, BN):
        o_k = first + tl.arange(0, BN)
        b_k = load_rows(p_k, skt, o_k, n, D, NATIVE)
        b_v = load_rows(p_v, svt, o_k, n, D, NATIVE)
        _, b_ds = scores_bwd(
            b_q, b_k, b_v, b_do, b_lse, b_delta, o_q, o_k, n, scale, CAUSAL, NATIVE, S, DP, DS
        )
        b_dq += dot(b_ds, b_k, DS, NATIVE)
    p_dq += batch * sgb + head * sgh
    store_rows(p_dq, sgt, o_q, n, round_bf16(scale * b_dq, NATIVE), D)


@triton.jit
def attention_bwd_dkdv_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dk, p_dv,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sgb, sgh, sgt,
    n, scale,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, NATIVE: tl.constexpr,
    S: tl.constexpr, P_BWD: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    """One block of BN keys: dk = scale * ds^T q and dv = p_bwd^T dO, in the inputs' dtype."""
    pid_bh = tl.program_id(1)
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    first = tl.program_id(0) * BN
    o_k = first + tl.arange(0, BN)
    p_q += batch * sqb + head * sqh
    p_do += batch * sdb + head * sdh
    b_k = load_rows(p_k + batch * skb + head * skh, skt, o_k, n, D, NATIVE)
    b_v = load_rows(p_v + batch * svb + head * svh, svt, o_k, n, D, NATIVE)

    b_dk = tl.zeros([BN, D], tl.float32)
    b_dv = tl.zeros([BN, D], tl.float32)
    for start in range((first // BM) * BM if CAUSAL else 0, n, BM):
        o_q = start + tl.arange(0, BM)
        b_q = load_rows(p_q, sqt, o_q, n, D, NATIVE)
        b_do = load_rows(p_do, sdt, o_q, n, D, NATIVE)
        o_row = pid_bh.to(tl.int64) * n + o_q
        b_lse = tl.load(p_lse + o_row, mask=o_q < n, other=float("inf"))
        b_delta = tl.load(p_delta + o_row, mask=o_q < n, other=0.0)
        b_p, b_ds = scores_bwd(
            b_q, b_k, b_v, b_do, b_lse, b_delta, o_q, o_k, n, scale, CAUSAL, NATIVE, S, DP, DS
        )
        b_dv += dot(tl.trans(round_site(b_p, P_BWD, NATIVE)), b_do, P_BWD, NATIVE)
        b_dk += dot(tl.trans(b_ds), b_q, DS, NATIVE)
    o_bh = batch * sgb + head * sgh
    store_rows(p_dk + o_bh, sgt, o_k, n, round_bf16(scale * b_dk, NATIVE), D)
    store_rows(p_dv + o_bh, sgt, o_k, n, round_bf16(b_dv, NATIVE), D)
