"""Which query sees which key in a kernel, which blocks that leaves, and the scores of a block.

The names are those of `lowprec.attention.kernels.rounding`. `where` is (number of keys, scale, who,
view); `view` says of a head's mask and bias what is not in the constants.
"""

import triton
import triton.language as tl

from lowprec.attention.kernels.rounding import round_site


@triton.jit
def view_of(mask, batch, head, c: tl.constexpr):
    """(n_q, offset, first key, end of keys, pointer and strides of mask and of bias, pointer and
    stride of what `blocks_seen_kernel` found) of a head."""
    n_q, n, offset, p_keys, p_dense, dense, p_bias, bias, p_found, found = mask
    lo, hi = 0, n
    if c.ranged:
        lo = tl.maximum(tl.load(p_keys + 2 * batch), 0)
        hi = tl.minimum(tl.load(p_keys + 2 * batch + 1), n)
    sdb, sdh, sdq, sdk = dense
    sbb, sbh, sbq, sbk = bias
    p_dense += batch * sdb + head * sdh
    p_bias += batch * sbb + head * sbh
    p_found += batch * found[0] + head * found[1]
    return n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk, p_found, found[2]


@triton.jit
def of_head(view, mask, head):
    """The view of another head, from that of head 0. (In a loop Triton 3.6 loses the ones in a
    tuple of arguments, so there `view_of` cannot unpack them.)"""
    n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk, p_found, sfn = view
    p_dense += head * mask[5][1]
    p_bias += head * mask[7][1]
    p_found += head * mask[9][1]
    return n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk, p_found, sfn


@triton.jit
def blocks_seen_kernel(
    p_seen, p_found, strides, n_rows, n_columns, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SUFFIX: tl.constexpr,
):  # fmt: skip
    """Of one block of rows of a mask: the first block of columns of which something is seen; with
    SUFFIX where those begin of which all is, up to the last, else where those end, from the first;
    and the end of the last. Rows are queries and columns keys, or the other way round."""
    sb, sh, srow, scolumn = strides
    n_blocks = tl.cdiv(n_rows, ROWS)
    pid = tl.program_id(0)
    head = pid // n_blocks
    p_seen += (head // H).to(tl.int64) * sb + (head % H).to(tl.int64) * sh
    o_row = pid % n_blocks * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n_rows
    begin, mid, end = 0, 0, 0
    for first in range(0, n_columns, COLUMNS):
        o_column = first + tl.arange(0, COLUMNS)
        m_inside = m_row[:, None] & (o_column < n_columns)[None, :]
        o_seen = o_row.to(tl.int64)[:, None] * srow + o_column.to(tl.int64)[None, :] * scolumn
        b_seen = tl.load(p_seen + o_seen, mask=m_inside, other=0)
        some = tl.max(tl.max(b_seen, 1), 0) > 0
        whole = tl.min(tl.min(tl.where(m_row[:, None], b_seen, 1), 1), 0) > 0
        begin = tl.where(some & (end == 0), first, begin)
        if SUFFIX:
            mid = tl.where(whole & (end < first), first, mid)
            mid = tl.where(some & (whole == 0), first + COLUMNS, mid)
        else:
            mid = tl.where(begin == first, first, mid)
            mid = tl.where(whole & (mid == first), first + COLUMNS, mid)
        end = tl.where(some, first + COLUMNS, end)
    p_found += pid * 3
    tl.store(p_found, begin)
    tl.store(p_found + 1, mid)
    tl.store(p_found + 2, tl.minimum(end, n_columns))


@triton.jit
def visible(o_q, o_k, where, c: tl.constexpr):
    """Where a query sees a key; o_q and o_k broadcast to the block's shape. (Plain and causal: a
    key beyond the end is seen only by queries beyond the end, which are not stored.)"""
    n, scale, who, view = where
    if c.plain:
        m_seen = o_k <= o_q if c.causal else (o_k < n) & (o_q >= 0)
    else:
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk, p_found, sfn = view
        m_seen = (o_k >= lo) & (o_k < hi) & (o_q < n_q)
        if c.causal:
            m_seen &= o_k <= o_q + offset
        if c.window > 0:
            m_seen &= o_k > o_q + offset - c.window
        if c.dense:
            o_seen = o_q.to(tl.int64) * sdq + o_k.to(tl.int64) * sdk
            m_seen &= tl.load(p_dense + o_seen, mask=m_seen, other=0) != 0
    return m_seen


@triton.jit
def masked(b_x, o_q, o_k, where, c: tl.constexpr):
    """-inf where a query does not see a key.  # [BM, BN]"""
    return tl.where(visible(o_q[:, None], o_k[None, :], where, c), b_x, float("-inf"))


@triton.jit
def keys_of(start, n, view, c: tl.constexpr):
    """(begin, mid, end): the BM queries from `start` see keys from begin to end, multiples of BN
    but for end, and each sees all of those from begin to mid."""
    begin = 0
    if c.plain:
        end = tl.minimum(start + c.bm, n) if c.causal else n
        mid = ((start + 1) if c.causal else n) // c.bn * c.bn
    else:
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk, p_found, sfn = view
        end, mid = hi, hi
        if c.causal:
            end = tl.minimum(tl.maximum(start + c.bm + offset, 0), hi)
            mid = tl.minimum(tl.maximum(start + 1 + offset, 0), hi)
        begin = lo
        if c.window > 0:
            begin = tl.maximum(start + offset - c.window + 1, lo)
        begin = begin // c.bn * c.bn
        mid = begin if c.window > 0 or c.ranged else mid // c.bn * c.bn
        if c.dense:
            p_found += start // c.bm * sfn
            begin = tl.maximum(begin, tl.load(p_found))
            mid = tl.maximum(tl.minimum(mid, tl.load(p_found + 1)), begin)
            end = tl.minimum(end, tl.load(p_found + 2))
    return begin, mid, end


@triton.jit
def queries_of(first, n_q, view, c: tl.constexpr):
    """(begin, mid, end): the BN keys from `first` are seen by queries from begin to end, multiples
    of BM but for end, and all of them by each of those from mid to end."""
    end = n_q
    if c.plain:
        begin = first // c.bm * c.bm if c.causal else 0
        mid = tl.cdiv(first + c.bn - 1, c.bm) * c.bm if c.causal else 0
    else:
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk, p_found, sfn = view
        begin, mid = 0, 0
        if c.causal:
            begin = tl.maximum(first - offset, 0) // c.bm * c.bm
            mid = tl.cdiv(tl.maximum(first + c.bn - 1 - offset, 0), c.bm) * c.bm
        if c.window > 0:
            end = tl.minimum(tl.maximum(first + c.bn - 1 - offset + c.window, 0), n_q)
        if c.window > 0 or c.ranged:
            mid = tl.cdiv(end, c.bm) * c.bm
        if c.dense:
            p_found += first // c.bn * sfn
            begin = tl.maximum(begin, tl.load(p_found))
            mid = tl.maximum(mid, tl.load(p_found + 1))
            end = tl.minimum(end, tl.load(p_found + 2))
    return begin, mid, end


@triton.jit
def scores(b_product, o_q, o_k, where, c: tl.constexpr):
    """(what `exp_difference` takes for s, s as in `lowprec.attention.masks`) from the product; o_q
    and o_k broadcast. The first is rnd_s(q k^T), to be scaled by `scale_of`; with a bias s itself.

    c.exact: the scale is a power of two and s has FP32's exponents, so that the second rounding
    does nothing (but below 2^-120, where exp no longer tells).
    """
    n, scale, who, view = where
    b_stored = round_site(b_product, c.s, who, o_q, o_k, c.native)
    b_s = b_stored * scale
    if not c.exact:
        b_s = round_site(b_s, c.s, who, o_q, o_k + n, c.native)
    if c.bias:
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk, p_found, sfn = view
        o_bias = o_q.to(tl.int64) * sbq + o_k.to(tl.int64) * sbk
        b_bias = tl.load(p_bias + o_bias, mask=(o_q < n_q) & (o_k < n), other=0.0)
        b_s = round_site(b_s + b_bias, c.s, who, o_q, o_k + 3 * n, c.native)
        b_stored = b_s
    return b_stored, b_s


@triton.jit
def scale_of(where, c: tl.constexpr):
    """What the first result of `scores` is yet to be multiplied by."""
    n, scale, who, view = where
    return 1.0 if c.bias else scale
