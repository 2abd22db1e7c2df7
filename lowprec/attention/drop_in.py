"""Attention for other people's models: PyTorch's signature, and roundings that are a policy.

    from lowprec import sdpa        # in place of torch.nn.functional.scaled_dot_product_attention
    o = sdpa(q, k, v, is_causal=True)

The default policy, `lowprec.numerics.policy.SAFE`, rounds where production kernels do, but the
backward adds to delta what the row of dS sums to. For Hugging Face models see
`lowprec.attention.huggingface`.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch._C._nn import scaled_dot_product_attention  # torch's own, also if ours has its name

from lowprec import UserError
from lowprec.attention import attention
from lowprec.attention.inputs import DTYPES, causal_mask, check_scale, for_queries
from lowprec.attention.masks import Mask, Scores
from lowprec.attention.operator import tell
from lowprec.numerics.policy import ALL_FP32, FA2, SAFE, PrecisionPolicy

BACKWARD = (
    "dodo",
    "dp",
    "p_bwd",
    "ds",
    "dq_acc",
    "dkdv_acc",
    "delta_from",
    "delta_bias",
    "row_sum",
)
"""Fields of a policy that act in the backward alone."""


def sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False, policy=SAFE, impl="auto", scores=None,
):  # fmt: skip
    """scaled_dot_product_attention with the roundings of `policy`; differentiable.

    query (..., H, L, D), key (..., H, S, D), value (..., H, S, Dv) of one dtype, their leading
        dimensions alike or broadcast; returns (..., H, L, Dv) in that dtype, which is bfloat16,
        float16 or float32, or with impl "auto" or "oracle" float64. Under autocast they are cast to
        its dtype, as PyTorch does.
    attn_mask: booleans, True where a query sees a key, or floats that are added to the scores and
        may need a gradient, broadcast to (..., H, L, S); a bias of torch.nn.attention.bias; or a
        `lowprec.attention.masks.Mask`. A row that sees no key gives 0.
    dropout_p: the share of weights that is set to 0. Which ones follows from a number that is drawn
        from torch's generator of the CPU, so torch.manual_seed repeats it on any device.
    is_causal: query i sees keys 0 to i, as in PyTorch, also where L and S differ.
    enable_gqa: key and value may have fewer heads, each shared by H / its number of queries'
        heads. Their gradient is the sum over those, rounded to the dtype once.
    policy: a PrecisionPolicy or its text. It rounds whatever the dtype: for exact attention on
        float32 tensors take ALL_FP32. A policy that draws random bits needs a seed that changes:
        call `lowprec.attention.attention`. float64 is not rounded: it is for the oracle.
    impl: as in `attention`, but "auto" is PyTorch's own function where no gradient is needed, and
        the forward of the policy is what that rounds: FA2's on BF16 tensors, ALL_FP32's on FP32.
    scores: `lowprec.attention.masks.Scores`, a soft cap or sinks, which PyTorch's function lacks.

    Raises `UserError` naming what is not supported.
    """
    usual, policy = policy is SAFE, getattr(policy, "text", policy)
    if _simple(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, impl, scores):
        if _known(policy, query.dtype) == (False, True):
            return _pytorch(query, key, value, scale, attn_mask=attn_mask, is_causal=is_causal)
    if query.is_nested or key.is_nested or value.is_nested:
        raise UserError("nested tensors are not taken: pad them and give an attn_mask")
    if not 0 <= dropout_p <= 1:
        raise UserError(f"dropout_p={dropout_p} must be from 0 to 1")
    if min(t.dim() for t in (query, key, value)) < 2:
        raise UserError("query, key, value must be (..., seqlen, head_dim)")
    if attn_mask is not None and is_causal:
        raise UserError("give attn_mask or is_causal, not both")
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(
            f"query, key, value must share a dtype; got {query.dtype}, {key.dtype}, {value.dtype}"
        )
    draws, alike = _known(policy, query.dtype)
    if usual and query.dtype in (torch.float16, torch.float32):
        tell(
            f"{query.dtype} tensors are rounded to BF16 where SAFE says so: take policy='ALL_FP32' "
            "for none, or 'SAFE+p=fp16+o=fp16+p_bwd=fp16+ds=fp16'"
        )
    if draws:
        raise UserError(
            f"policy {policy} draws random bits, and sdpa has no seed that changes with the step; "
            "call lowprec.attention.attention"
        )
    if enable_gqa:
        _check_heads(query, key, value)
    query, key, value = _broadcast(query, key, value, -3 if enable_gqa else -2)
    shape = (*query.shape[:-1], value.shape[-1])
    lead, (query, key, value) = query.shape[:-2], map(_four, (query, key, value))
    if impl == "auto" and query.dtype == torch.float64:
        tell("float64 tensors go to the oracle: attention is exact, whatever the policy")
        impl = "oracle"
    if query.shape[-1] == 0:  # all scores are 0
        query, key = (torch.nn.functional.pad(x, (0, 1)) for x in (query, key))
    mask, bias = _mask(attn_mask, is_causal, query, key, lead)
    if bias is not None:
        if scores is not None and scores.bias is not None:
            raise UserError("give a bias as attn_mask or as Scores(bias=...), not both")
        scores = dataclasses.replace(scores or Scores(), bias=bias)
    if any(n == 0 for n in (*query.shape, key.shape[2], value.shape[3])):
        nothing = sum(t.flatten()[:0].sum() for t in (query, key, value))
        return query.new_zeros(shape) + nothing
    scale = None if scale is None else check_scale(scale, query.shape[-1])
    how = _stock(query, key, value, mask, scores, dropout_p) if alike and impl == "auto" else None
    if how is not None:
        return _pytorch(query, key, value, scale, **how).reshape(shape)
    if is_causal and query.shape[2] < key.shape[2]:  # nobody sees the keys beyond
        n = query.shape[2]
        key, value = (t[:, :, :n] for t in (key, value))
        bias = None if scores is None else scores.bias
        if bias is not None and bias.shape[-1:] not in ((), (1,)):
            scores = dataclasses.replace(scores, bias=bias[..., :n])
    if key.shape[1] != value.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    seed = torch.randint(2**32, (1,)) if dropout_p else 0
    o = attention(
        query, key, value, policy, scale=scale, impl=impl, seed=seed, mask=mask, scores=scores,
        dropout=dropout_p,
    )  # fmt: skip
    return o.reshape(shape)


def _simple(query, key, value, mask, dropout_p, is_causal, enable_gqa, impl, scores) -> bool:
    """Whether nothing about the arguments needs a second look, as where a model generates: there
    each question delays every token of every layer."""
    if torch.is_grad_enabled() or scores is not None or dropout_p or impl != "auto":
        return False
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4 or torch.is_autocast_enabled(query.device.type):
        return False
    if not (q[0] == k[0] == v[0] and q[3] == k[3] and k[1:3] == v[1:3] and q[2] and k[2] and v[3]):
        return False
    if not (query.dtype == key.dtype == value.dtype and q[0] and q[1] and q[3] and k[1]):
        return False
    if q[1] != k[1] and (not enable_gqa or q[1] % k[1]) or is_causal and q[2] != k[2]:
        return False
    if mask is None:
        return True
    m = mask.shape if type(mask) is torch.Tensor and mask.dtype == torch.bool else ()
    return not is_causal and m in (q[:3] + k[2:3], (q[0], 1, q[2], k[2]))


def _pytorch(query, key, value, scale, attn_mask=None, is_causal=False):
    """PyTorch's function, whose fused kernels do not all share keys where there is a mask: there
    the heads that share a key are its queries, if each has one, and else the keys are repeated."""
    b, h, n, _ = query.shape
    theirs, alike = key.shape[1], key.shape[1] == value.shape[1]
    if is_causal and scale is not None and scale <= 0:  # its kernel of the CPU would give NaN
        attn_mask, is_causal = causal_mask(n, n, query.device), False
    if attn_mask is not None and alike and h != theirs and n == 1:
        query = query.reshape(b, theirs, h // theirs, -1)
        if attn_mask.dim() == 4 and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.reshape(len(attn_mask), theirs, h // theirs, -1)
    elif attn_mask is not None:
        key, value = (for_queries(t, h) for t in (key, value))
    o = scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
        enable_gqa=not query.shape[1] == key.shape[1] == value.shape[1],
    )  # fmt: skip
    return o.reshape(b, h, n, -1)


def _known(policy, dtype: torch.dtype) -> tuple[bool, bool]:
    """(whether a policy draws random bits, whether PyTorch's own function rounds what its forward
    rounds, on tensors of that dtype); a constant for torch.compile."""
    return _read(policy, dtype)


@functools.lru_cache
def _read(policy: str, dtype: torch.dtype) -> tuple[bool, bool]:
    policy = PrecisionPolicy.parse(policy)
    stock = {torch.bfloat16: FA2, torch.float32: ALL_FP32}.get(dtype)
    same = {name: getattr(stock, name) for name in BACKWARD} if stock else {}
    return policy.draws, stock is not None and policy.replace(**same) == stock


_known._dynamo_marked_constant = True


def _stock(query, key, value, mask, scores, dropout_p) -> dict | None:
    """Arguments of PyTorch's function, if it may stand in: a forward pass alone, plain scores."""
    bias = None if scores is None else scores.lowered(query, key).bias
    given = [t for t in (query, key, value, bias) if t is not None]
    if torch.is_grad_enabled() and any(_asks_gradient(t) for t in given):
        return None
    more = scores is not None and (scores.scale is not None or scores.sinks is not None)
    if dropout_p or more or scores is not None and scores.softcap:
        return None
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        return None
    mask = mask.lowered(query, key)
    nothing_hidden = mask.plain and not mask.causal
    if bias is not None:
        return dict(attn_mask=bias) if nothing_hidden else None
    if nothing_hidden or mask.plain and query.shape[2] == key.shape[2]:
        return dict(is_causal=mask.causal)
    if mask.keys is None and not mask.causal:
        return dict(attn_mask=mask.dense)
    return dict(attn_mask=mask.seen(query.shape[2], key.shape[2], query.device))


def _asks_gradient(t) -> bool:
    """Under `torch.vmap` a tensor does not say so, but the one that it is a part of does."""
    while torch._C._functorch.is_batchedtensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t.requires_grad


def _autocast(query, *others):
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return query, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if getattr(t, "dtype", None) in DTYPES and not _is_causal_bias(t) else t
        for t in (query, *others)
    )


def _check_heads(query, key, value):
    ours, *theirs = (x.shape[-3] if x.dim() > 2 else 0 for x in (query, key, value))
    for name, x, heads in zip(("key", "value"), (key, value), theirs, strict=True):
        if not (ours and heads) or ours % heads:
            raise UserError(
                f"enable_gqa: query {tuple(query.shape)} must have a multiple of the heads of "
                f"{name} {tuple(x.shape)}, in the third dimension from the end"
            )


def _broadcast(query, key, value, end):
    """The three with their dimensions before `end` alike, which those before the heads then are."""
    fits = query.shape[-1] == key.shape[-1] and key.shape[-2] == value.shape[-2]
    given = (query, key, value)
    leads = [t.shape[:end] for t in given]
    if fits and leads[0] == leads[1] == leads[2]:
        return given
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError:
        fits = False
    if not fits:
        raise UserError(
            "query, key, value must be (..., L, D), (..., S, D), (..., S, Dv) with the same "
            "leading dimensions, or ones that broadcast (fewer heads: enable_gqa); got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    return [t.expand(*lead, *t.shape[end:]) for t in given]


def _four(t):
    """(B, H, T, D) of a tensor with any number of leading dimensions."""
    return t.flatten(0, -4) if t.dim() > 4 else t[(None,) * (4 - t.dim())]


def _is_causal_bias(given) -> bool:
    """Whether it is a bias of torch.nn.attention.bias. No plain tensor is one, and to import that
    module loads torch's compiler, which takes as long as the rest of torch."""
    if type(given) is torch.Tensor:
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(given, CausalBias)


def _mask(given, is_causal, query, key, lead):
    """(Mask, bias or None) of attn_mask and is_causal, for query and key of four dimensions.

    lead: the dimensions of query before the last two as they were given.
    """
    n_q, n_k = query.shape[2], key.shape[2]
    if given is None:
        return Mask(causal=is_causal), None
    if isinstance(given, Mask):
        return given, None
    if _is_causal_bias(given):
        size = (given.seq_len_q, given.seq_len_kv)
        if size != (n_q, n_k):
            raise UserError(f"attn_mask is a causal bias of {size}, for scores of {(n_q, n_k)}")
        right = given.variant.name == "LOWER_RIGHT"
        return Mask(causal=True, offset=n_k - n_q if right else 0), None
    if not isinstance(given, torch.Tensor):
        raise UserError(
            f"attn_mask is a tensor, a causal bias or a Mask, not {type(given).__name__}"
        )
    if given.dtype != torch.bool and given.dtype not in (query.dtype, torch.float32):
        raise UserError(
            f"attn_mask of {given.dtype} for a query of {query.dtype}: take booleans, True where a "
            "query sees a key, or floats to add, of the query's dtype or torch.float32"
        )
    wanted = (*lead, n_q, n_k)
    x = given[(None,) * (len(wanted) - given.dim())]
    fits = 2 <= given.dim() and x.dim() == len(wanted)
    if not fits or not all(n == 1 or n == w for n, w in zip(x.shape, wanted, strict=True)):
        raise UserError(
            f"attn_mask of shape {tuple(given.shape)} does not broadcast to {wanted}, the scores; "
            + (
                "a mask of tokens is attn_mask[:, None, None, :]"
                if given.shape == (wanted[0], n_k)
                else "it has at least 2 dimensions"
            )
        )
    if x.dim() > 4 and any(n > 1 for n in x.shape[:-3]):
        x = x.expand(*lead[:-1], *x.shape[-3:])
    x = _four(x)
    return (Mask(dense=x), None) if x.dtype == torch.bool else (Mask(), x)
