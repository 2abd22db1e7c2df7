"""What both references and the kernels ask of a call of attention, before they compute anything.

Shapes as in `lowprec.attention.reference`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from numbers import Integral

import torch
from torch.autograd import forward_ad

from lowprec import UserError
from lowprec.attention.masks import Mask, Scores
from lowprec.numerics.formats import keyed_bits
from lowprec.numerics.policy import DROPOUT, PrecisionPolicy
from lowprec.numerics.scaling import scaled

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_inputs(
    q, k, v, causal: bool, scale: float | None, do=None, tile=None, seed=0, shared=True
) -> float:
    """Raise `UserError` for what is not attention; return the softmax scale.

    shared: whether k and v may have fewer heads than q, and v another head_dim.
    """
    own = slice(1 if shared else 2)
    fits = q.dim() == k.dim() == 4 and q.shape[own] == k.shape[own] and q.shape[3] == k.shape[3]
    if not fits or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape != v.shape and not shared:
        raise UserError(
            "q, k, v must be (batch, heads, seqlen, head_dim), k and v alike; got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if min(*q.shape, *k.shape, v.shape[3]) < 1:
        raise UserError(
            f"no dimension of q, k, v may be empty; got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise UserError(
            f"{k.shape[1]} heads of keys and values must divide the {q.shape[1]} heads of queries; "
            "take a divisor, or as many"
        )
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise UserError(f"q, k, v must share a floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if do is not None and do.shape != (*q.shape[:3], v.shape[3]):
        raise UserError(
            f"do must have the shape of q, {tuple(q.shape)}, not {tuple(do.shape)}"
            if q.shape[3] == v.shape[3]
            else f"do must be {(*q.shape[:3], v.shape[3])}, as o, not {tuple(do.shape)}"
        )
    if tile is not None and (not _whole(tile) or tile < 1):
        raise UserError(
            f"tile={tile} must be a whole number of at least 1 key, or None for the whole row"
        )
    check_seed(seed)
    if causal and q.shape[2] != k.shape[2]:
        raise UserError(
            f"causal attention needs as many queries as keys; got {q.shape[2]} and {k.shape[2]}"
        )
    return check_scale(scale, q.shape[3])


def outside_autocast(function):
    """Run with autocast off: it would silently turn an FP32 product into a BF16 one."""

    @functools.wraps(function)
    def wrapped(q, *args, **kwargs):
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            return function(q, *args, **kwargs)

    return wrapped


def causal_mask(n_q: int, n_k: int, device, causal: bool = True) -> torch.Tensor:
    """(n_q, n_k) bool, True where a query sees a key."""
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
    return seen.tril() if causal else seen


def for_queries(x, heads: int):
    """x (B, H', T, D) with each head as often as heads of queries read it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def of_keys(x, heads: int):
    """The heads of queries' parts x (B, H, T, D) of a gradient, summed by group: (B, H', T, D)."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def conditions(q, k, v, causal, scale, mask, scores, dropout, **checked) -> tuple[Mask, Scores]:
    """Mask and scores of a call, checked and `lowered`; the scores have their scale."""
    if mask is None:
        mask = Mask(causal=causal)
    elif not isinstance(mask, Mask):
        raise UserError(f"mask must be a lowprec.attention.masks.Mask, not {type(mask).__name__}")
    else:
        causal = False  # the mask says it, for any number of queries and keys
    scores = scores or Scores()
    if scores.scale is not None and scale is not None:
        raise UserError("give scale or Scores(scale=...), not both")
    scale = check_inputs(q, k, v, causal, scores.scale if scale is None else scale, **checked)
    if not 0 <= dropout <= 1:
        raise UserError(f"dropout={dropout} must be from 0 to 1")
    return mask.lowered(q, k), replace(scores.lowered(q, k), scale=scale)


def check_seed(seed: int) -> int:
    """The seed; raises `UserError` for one that random bits cannot be keyed with."""
    if not _whole(seed) or not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must be from 0 to 2^32 - 1, a whole number")
    return seed


def _whole(x) -> bool:
    return not isinstance(x, bool) and (isinstance(x, int) or isinstance(x, Integral))


def check_scale(scale, head_dim: int) -> float:
    """The scale of the scores, by default 1/sqrt(head_dim)."""
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise UserError("scale is a number and gets no gradient: multiply q by one that is trained")
    return 1 / math.sqrt(head_dim) if scale is None else float(scale)


def refuse_tangents(*tensors) -> None:
    """Raise `UserError` for forward-mode derivatives, which our operators do not have and would
    drop unsaid."""
    if torch.compiler.is_compiling():  # no such derivative passes there, nor need a graph see this
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UserError("there are no forward-mode derivatives (torch.func.jvp) here: take grad")


def kept(shape, dropout: float, seed: int, device):
    """(B, H, L, S) bool, False for the weights that dropout sets to 0; None without dropout.

    A function of (seed, batch, head, row, column) alone, so the backward forms it again.
    """
    if not dropout:
        return None
    index = torch.meshgrid(*(torch.arange(n, device=device) for n in shape), indexing="ij")
    return keyed_bits(seed, DROPOUT, *index) >= round(dropout * 2**32)


def inverse(dropout: float) -> float:
    """What the weights that dropout keeps are multiplied by."""
    return 1 / (1 - dropout) if dropout < 1 else 0.0


def stored_inputs(policy: PrecisionPolicy, *tensors) -> tuple:
    """q, k, v and dO as `policy.inputs` stores them, in their dtype."""
    cast = policy.inputs
    return tensors if cast.keeps else tuple(scaled(x.float(), cast).to(x.dtype) for x in tensors)


def check_row_sum(policy: PrecisionPolicy, softcap: float | bool) -> None:
    """Raise `UserError` where row sums of ds are not zero in exact arithmetic."""
    if softcap and policy.row_sum == "removed":
        raise UserError(
            "row_sum=removed is for scores without a soft cap: with one a row of dS does not sum "
            "to zero; take as_rounded or refined"
        )
