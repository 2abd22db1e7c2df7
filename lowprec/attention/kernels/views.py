"""Which query sees which key in a kernel, which blocks that leaves, and the scores of a block.

The names are those of `lowprec.attention.kernels.rounding`. `where` is (number of keys, scale, who,
view); `view` says of a head's mask and bias what is not in the constants.
"""

import triton
import triton.language as tl

from lowprec.attention.kernels.rounding import round_site


@triton.jit
def view_of(mask, batch, head, c: tl.constexpr):
    """(n_q, offset, first key, end of keys, pointer and strides of mask and of bias) of a head."""
    n_q, n, offset, p_keys, p_dense, dense, p_bias, bias = mask
    lo, hi = 0, n
    if c.ranged:
        lo = tl.maximum(tl.load(p_keys + 2 * batch), 0)
        hi = tl.minimum(tl.load(p_keys + 2 * batch + 1), n)
    sdb, sdh, sdq, sdk = dense
    sbb, sbh, sbq, sbk = bias
    p_dense += batch * sdb + head * sdh
    p_bias += batch * sbb + head * sbh
    return n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk


@triton.jit
def of_head(view, mask, head):
    """The view of another head, from that of head 0. (In a loop Triton 3.6 loses the ones in a
    tuple of arguments, so there `view_of` cannot unpack them.)"""
    n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk = view
    p_dense += head * mask[5][1]
    p_bias += head * mask[7][1]
    return n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk


@triton.jit
def visible(o_q, o_k, where, c: tl.constexpr):
    """Where a query sees a key; o_q and o_k broadcast to the block's shape. (Plain and causal: a
    key beyond the end is seen only by queries beyond the end, which are not stored.)"""
    n, scale, who, view = where
    if c.plain:
        m_seen = o_k <= o_q if c.causal else (o_k < n) & (o_q >= 0)
    else:
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk = view
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
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk = view
        end, mid = hi, hi
        if c.causal:
            end = tl.minimum(tl.maximum(start + c.bm + offset, 0), hi)
            mid = tl.minimum(tl.maximum(start + 1 + offset, 0), hi)
        begin = lo
        if c.window > 0:
            begin = tl.maximum(start + offset - c.window + 1, lo)
        begin = begin // c.bn * c.bn
        mid = begin if c.window > 0 or c.ranged or c.dense else mid // c.bn * c.bn
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
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk = view
        begin, mid = 0, 0
        if c.causal:
            begin = tl.maximum(first - offset, 0) // c.bm * c.bm
            mid = tl.cdiv(tl.maximum(first + c.bn - 1 - offset, 0), c.bm) * c.bm
        if c.window > 0:
            end = tl.minimum(tl.maximum(first + c.bn - 1 - offset + c.window, 0), n_q)
        if c.window > 0 or c.ranged or c.dense:
            mid = tl.cdiv(end, c.bm) * c.bm
    return begin, mid, end


@triton.jit
def turn_of(first, start, n, view, c: tl.constexpr):
    """How many blocks of keys after that from `first` have the queries from `start` on among those
    of `queries_of`."""
    last = tl.cdiv(n, c.bn) - 1
    if c.causal:
        last = tl.minimum(last, (start + c.bm - 1 + view[1]) // c.bn)
    return last - first // c.bn


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
        n_q, offset, lo, hi, p_dense, sdq, sdk, p_bias, sbq, sbk = view
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
