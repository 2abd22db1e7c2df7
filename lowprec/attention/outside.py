"""Row sums of dS out of dQ with somebody else's attention kernel, and without a second pass.

Without a soft cap or sinks a row of dS sums to zero in exact arithmetic. What rounding leaves of
it, r_i, enters dQ times what the keys have in common (`row_sum` in `lowprec.numerics.policy`).
Outside a kernel neither dS nor r_i is to be had. But give every key one more channel that is 1,
and every query one that is 0: the scores stay, bit by bit, and this channel of dQ is scale * r_i,
of dS as that kernel rounds it.

    from torch.nn.functional import scaled_dot_product_attention
    o = row_sums_out(scaled_dot_product_attention, q, k, v, is_causal=True)

`centred` does nearly as well before the kernel, in training, for one more rounding of the keys.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from lowprec import UserError

VECTORS = ("mean key", "weighted key")


def row_sums_out(kernel, q, k, v, scale=None, *, vector="mean key", width=None, tokens=-2, **how):
    """Attention of a kernel whose dQ has lost its row sums of dS times a vector; differentiable.

    kernel: called as kernel(q, k, v, scale=scale, **how); any that is differentiable and sums over
        the last dimension, with any mask. It may round as it likes, but has neither a soft cap nor
        sinks: with these rows of dS do not sum to zero.
    q: (..., H, L, D); k, v: (..., heads of keys, S, D), which divides H. scale: of the scores, by
        default 1/sqrt(D) with the D of q. Returns what the kernel does, without the new channels.
    vector: "mean key", of the head and sequence; or "weighted key", (P K)_i of each row, which the
        kernel computes as if keys were values. The latter leaves far less of the error.
    width: channels that the kernel gets. By default D + 1, or 2 D for the weighted key, up to a
        multiple of 8. This is the cost: kernels are made for some widths, and from 64 the next may
        be 96 or 128. It costs nothing where D is padded anyway.
    tokens: dimension of the sequence, -2, or -3 where that of the heads comes after it.

    The sums are those of dS as rounded in the kernel, in the dtype of dQ: half an ulp of each
    remains, and half an ulp of dQ with its error, in which it was stored before. A kernel that adds
    dQ up in BF16, as PyTorch's on a CPU does beyond 512 keys, keeps what that rounds; give it
    `centred` keys. dK and dV stay.
    Raises `UserError` for another vector, a width that is too small, or heads that do not fit.
    """
    if vector not in VECTORS:
        raise UserError(f"vector={vector!r} is not one of {', '.join(VECTORS)}")
    d, out = q.shape[-1], v.shape[-1]
    weighted = vector == "weighted key"
    values = torch.cat([v, k.detach()], -1) if weighted else v
    least = max(d + 1, values.shape[-1])
    width = -(-least // 8) * 8 if width is None else width
    if width < least:
        raise UserError(f"width={width} is too small for {least} channels; leave it out")
    taken = None if weighted else _mean_key(k.detach(), q, tokens)
    ones = torch.ones_like(k[..., :1])
    wide_q, wide_k, wide_v = (
        pad(x, (0, width - x.shape[-1])) for x in (q, torch.cat([k, ones], -1), values)
    )
    o = kernel(wide_q, wide_k, wide_v, scale=d**-0.5 if scale is None else scale, **how)
    taken = o[..., out : out + d].detach() if weighted else taken
    if wide_q.requires_grad:
        wide_q.register_hook(lambda dq: _without(dq, taken))
    return o[..., :out]


def _mean_key(k, q, tokens: int) -> torch.Tensor:
    """The FP32 mean key for each head of q, one token long."""
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    mean, heads = wide.mean(tokens, keepdim=True), -5 - tokens
    if q.shape[heads] % k.shape[heads]:
        raise UserError(
            f"{q.shape[heads]} heads of queries are no multiple of {k.shape[heads]} of keys"
        )
    return mean.repeat_interleave(q.shape[heads] // k.shape[heads], heads)


def _without(dq, taken):
    """dq of the wide q, less its row sums times a vector (..., D)."""
    if dq is None:
        return None
    d, kind = taken.shape[-1], torch.promote_types(dq.dtype, torch.float32)
    left = dq[..., :d].to(kind) - dq[..., d : d + 1].to(kind) * taken.to(kind)
    return torch.cat([left.to(dq.dtype), dq[..., d:]], -1)


def centred(k, tokens=-2):
    """Keys less the mean of all keys of their head and sequence, in k's dtype, FP32 or more inside.

    The softmax is the same, since q times the mean is common to a row; so a model trained with it
    needs it no longer when it generates, and no cache of keys is touched. The gradient goes through
    the mean: it takes out of dK its mean over the keys, zero in exact arithmetic. k: (..., S, D).
    """
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    return (wide - wide.mean(tokens, keepdim=True)).to(k.dtype)
