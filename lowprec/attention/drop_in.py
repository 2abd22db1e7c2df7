"""Attention for other people's models: PyTorch's signature, and roundings that are a policy.

    from lowprec import sdpa        # in place of torch.nn.functional.scaled_dot_product_attention
    o = sdpa(q, k, v, is_causal=True)

The default policy, `lowprec.numerics.policy.SAFE`, rounds where production kernels do, but the
backward adds to delta what the row of dS sums to. For Hugging Face models see
`lowprec.attention.huggingface`.
"""

from __future__ import annotations

import torch

from lowprec import UserError
from lowprec.attention import attention
from lowprec.attention.reference import DTYPES
from lowprec.numerics.policy import SAFE, PrecisionPolicy


def sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False, policy=SAFE, impl="auto",
):  # fmt: skip
    """scaled_dot_product_attention with the roundings of `policy`; differentiable.

    query (..., H, L, D), key and value (..., H, S, D), the same leading dimensions and one dtype
        of bfloat16, float16, float32; returns query's shape and dtype. Under autocast they are
        cast to its dtype, as PyTorch does.
    attn_mask: None, or one that says no more than is_causal can: all True (or all 0), or causal
        with the last query at the last key, as in generation, S >= L. It takes no gradient, and
        its values are read on the host.
    dropout_p: 0. is_causal: query i sees keys 0 to i, as in PyTorch, also where S > L.
    enable_gqa: key and value may have fewer heads, each shared by H / its number of queries'
        heads. Their gradient is the sum over those, rounded to the dtype once.
    policy: a PrecisionPolicy or its text. It rounds whatever the dtype: for exact attention on
        float32 tensors take ALL_FP32. A policy that draws random bits needs a seed that changes:
        call `lowprec.attention.attention`.
    impl: as in `attention`, but "auto" is emulate, on any device, where L and S differ and the
        kernels do not go.

    Raises `UserError` naming what is not supported.
    """
    policy = PrecisionPolicy.parse(policy)
    if dropout_p:
        raise UserError(
            f"dropout_p={dropout_p}: sdpa has no dropout inside attention; set it to 0 "
            "(in transformers attn_pdrop or attention_dropout)"
        )
    if policy.draws:
        raise UserError(
            f"policy {policy} draws random bits, and sdpa has no seed that changes with the step; "
            "call lowprec.attention.attention"
        )
    if min(t.dim() for t in (query, key, value)) < 2:
        raise UserError("query, key, value must be (..., seqlen, head_dim)")
    query, key, value = _autocast(query, key, value)
    if enable_gqa:
        _check_heads(query, key)
    lead = -3 if enable_gqa else -2
    if query.shape[:lead] != key.shape[:lead] or key.shape[:-2] != value.shape[:-2]:
        raise UserError(
            "query, key, value must have the same leading dimensions (or enable_gqa); got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    shape, (query, key, value) = query.shape, map(_four, (query, key, value))
    lead = 0
    if attn_mask is not None:
        if is_causal:
            raise UserError("give attn_mask or is_causal, not both")
        is_causal = _causal(attn_mask, query, key)
        lead = key.shape[2] - query.shape[2] if is_causal else 0
        query = torch.nn.functional.pad(query, (0, 0, lead, 0))
    elif is_causal:
        key, value = (t[:, :, : query.shape[2]] for t in (key, value))
    if impl == "auto" and query.shape[2] != key.shape[2]:
        impl = "emulate"
    o = attention(query, key, value, policy, is_causal, scale, impl=impl)
    return o[:, :, lead:].reshape(shape)


def _autocast(*tensors):
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in DTYPES else t for t in tensors)


def _check_heads(query, key):
    ours, theirs = (x.shape[-3] if x.dim() > 2 else 0 for x in (query, key))
    if not (ours and theirs) or ours % theirs:
        raise UserError(
            f"enable_gqa: {tuple(query.shape)} must have a multiple of the heads of "
            f"{tuple(key.shape)}, in the third dimension from the end"
        )


def _four(t):
    """(B, H, T, D) of a tensor with any number of leading dimensions."""
    return t.flatten(0, -4) if t.dim() > 4 else t[(None,) * (4 - t.dim())]


def _causal(mask, query, key) -> bool:
    """Whether a mask is causal, aligned at the end; False if it hides nothing."""
    additive = mask.is_floating_point()
    if mask.requires_grad or not (additive or mask.dtype == torch.bool):
        raise UserError("attn_mask: only masks of booleans, or of floats that take no gradient")
    seen = mask == 0 if additive else mask
    clear = (seen | (mask <= torch.finfo(mask.dtype).min)).all() if additive else True
    if clear and seen.all():
        return False
    shape = (query.shape[2], key.shape[2])
    causal = torch.ones(shape, dtype=torch.bool, device=mask.device).tril(shape[1] - shape[0])
    fits = seen.shape[-2:] == shape and shape[0] <= shape[1]
    if clear and fits and torch.equal(seen, causal.expand_as(seen)):
        return True
    raise UserError(
        "attn_mask: only masks that hide nothing, or all later keys, are supported. Padding on the "
        "right needs no mask in a causal model: leave it out and ignore those labels"
    )
