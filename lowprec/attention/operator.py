"""The one entry to attention: the same call runs the oracle, the emulation, Triton or SDPA.

Which of them, and whether it can do what is asked, is settled here; `lowprec.attention.ops` then
has them behind one operator.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec import UserError
from lowprec.attention.inputs import check_row_sum, conditions, refuse_tangents
from lowprec.attention.masks import Scores
from lowprec.attention.ops import (
    HYBRIDS,
    IMPLS,
    KERNELS,
    PROBE_COLUMNS,
    attention_op,
    eager,
    stock,
    triton,
)
from lowprec.numerics.policy import FA2, PrecisionPolicy


def attention(
    q, k, v, policy=FA2, causal=True, scale=None, tile=None, impl="auto", seed=0, probe=None, *,
    mask=None, scores=None, dropout=0.0,
):  # fmt: skip
    """softmax(scale q k^T) v with the roundings of `policy`; differentiable.

    q, k, v: (batch, heads, seqlen, head_dim), one dtype; returns q's shape and dtype. The policy
        governs what the backward reads; the caller always gets q's dtype. k and v may have fewer
        heads, a divisor of q's: head h of H reads head h // (H / theirs), where it lies, and their
        gradients are summed over the heads that read them before they are rounded to the dtype
        (by PyTorch's kernels as they do it). v may have another head_dim, and without causal k and
        v another seqlen.
    policy: a PrecisionPolicy or its text, e.g. "LOW+delta_from=o_fp32".
    scale: defaults to 1/sqrt(head_dim). tile: keys per rounding block, None for the whole row.
    impl: "auto" is triton on CUDA and emulate elsewhere; "oracle" is float64 and ignores the
        policy; "sdpa" is PyTorch's own kernel, whose roundings cannot be set (policy must be FA2):
        its flash kernel for 16-bit numbers on CUDA, elsewhere the one that PyTorch chooses;
        "sdpa_forward" is the output of its flash kernel with our backward pass, so the policy may
        differ from FA2 in where delta comes from; "sdpa_backward" is its flash kernel both ways,
        and delta_from="o_redrawn" hands its backward our output, rounded at random, for its own.
    seed: keys random bits of stochastic sites and of dropout; change it every step. It may
        be an int64 tensor (1,), which a compiled graph need not read.
    probe: (heads, 3) float32 leaf whose *gradient* receives PROBE_COLUMNS: it accumulates over
        micro-batches and is reduced over ranks like any gradient. Costs one FP32 output.
    mask: a `lowprec.attention.masks.Mask` in place of causal. scores: `Scores` there. dropout: the
        share of weights that is set to 0. For what the kernels lack of these "auto" is emulate,
        and says so once; PyTorch's own kernel takes neither soft cap nor sinks nor dropout here.
    """
    draw, seed = (seed, 0) if isinstance(seed, torch.Tensor) else (None, seed)
    mask, scores = conditions(q, k, v, causal, scale, mask, scores, dropout, tile=tile, seed=seed)
    refuse_tangents(q, k, v)
    if probe is not None and tuple(probe.shape) != (q.shape[1], len(PROBE_COLUMNS)):
        raise UserError(
            f"probe must be ({q.shape[1]}, {len(PROBE_COLUMNS)}), not {tuple(probe.shape)}"
        )
    policy, impl = plan(
        getattr(policy, "text", policy), tile, impl, q.device.type,
        probe is not None, mask.plain and scores.bias is None,
        lacking(q, v, scores, dropout, torch.is_grad_enabled()),
    )  # fmt: skip
    causal, scale = mask.causal, scores.scale
    if impl == "sdpa":
        # PyTorch may prefer cuDNN's kernel, another program. Flash takes no FP32, nor does cuDNN.
        plain = mask.plain and scores.bias is None
        choice = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and plain
        kernel = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if choice else nullcontext()
        with torch.autocast(q.device.type, enabled=False), kernel:
            return stock(q, k, v, causal, scale, None if plain else _dense(mask, scores, q, k))
    if dropout and draw is None:
        draw = torch.tensor([seed])
    width = v.shape[3]
    if impl == "triton":
        q, k, v = padded(q, k, v)
    o = attention_op(
        q, k, v, probe, policy, causal, scale, tile or 0, impl, seed, mask.dense, scores.bias,
        mask.keys, scores.sinks, draw, mask.offset, mask.window, scores.softcap, dropout,
    )[0]  # fmt: skip
    return o if o.shape[3] == width else o[..., :width]


def _dense(mask, scores, q, k):
    """attn_mask of PyTorch's function: booleans, or numbers to add."""
    seen = mask.seen(q.shape[2], k.shape[2], q.device)
    if scores.bias is None:
        return seen
    return torch.where(seen, scores.bias, -torch.inf).to(q.dtype)


OTHER_SIZES = "this head size with random bits or blocks of inputs"
"""What the kernels have by padding, but where a rounding depends on the place of a number."""


def lacking(q, v, scores, dropout, grad=True) -> tuple[str, ...]:
    """What a call asks of the Triton kernels and they do not have, or have by padding. grad: as
    `torch.is_grad_enabled`."""
    named = {
        "a soft cap": scores.softcap > 0, "sinks": scores.sinks is not None,
        "dropout": dropout > 0,
        "the gradient of a bias": grad and scores.bias is not None and scores.bias.requires_grad,
        "a scale that is not positive": not scores.scale > 0,
    }  # fmt: skip
    sizes = q.shape[3], v.shape[3]
    named["head sizes above 256"] = max(sizes) > 256
    named[OTHER_SIZES] = sizes[0] != sizes[1] or sizes[0] not in (16, 32, 64, 128, 256)
    return tuple(name for name, asked in named.items() if asked)


def padded(q, k, v, *more):
    """q, k, v with zeros up to a head_dim that the kernels have: no product changes."""
    most = max(q.shape[3], v.shape[3])
    d = max(16, 1 << (most - 1).bit_length())
    return [torch.nn.functional.pad(x, (0, d - x.shape[3])) if x.shape[3] < d else x
            for x in (q, k, v, *more)]  # fmt: skip


@torch.no_grad()
def trace(
    q, k, v, do, policy=FA2, causal=True, scale=None, tile=None, impl="auto", seed=0, *, mask=None,
    scores=None, dropout=0.0,
) -> SimpleNamespace:  # fmt: skip
    """What the operator and its backward compute, by the names of
    `lowprec.attention.reference.Trace`.

    q, do: (B, H, T, D); k, v: as q or with fewer heads. do=None leaves out the backward; the rest
    as in `attention`.
    Every implementation gives o (as the policy stores it) and o_fp32 (B, H, T, D); lse and ties
    (B, H, T); with `do` also delta (the one used), delta_o, delta_ref (B, H, T) and dq, dk, dv.
    FP32, but gradients as q, k, v; float64 from "oracle". "emulate" and "oracle" give more.
    """
    mask, scores = conditions(
        q, k, v, causal, scale, mask, scores, dropout, do=do, tile=tile, seed=seed
    )
    policy, impl = plan(
        policy, tile, impl, q.device.type, False, mask.plain and scores.bias is None,
        lacking(q, v, scores, dropout),
    )  # fmt: skip
    if impl.startswith("sdpa"):
        raise UserError(f"impl={impl!r} shows no intermediates; use 'triton' or 'emulate'")
    p = PrecisionPolicy.parse(policy)
    do = None if do is None else do.to(q.dtype)
    if impl != "triton":
        return eager(q, k, v, do, p, mask, scores, dropout, tile, impl, seed)
    sizes = dict(o=v, o_fp32=v, dq=q, dk=k, dv=v)
    sizes = {name: x.shape[3] for name, x in sizes.items()}
    q, k, v, *do = padded(q, k, v, *([] if do is None else [do]))
    do = do[0] if do else None
    names = ("o", "o_fp32", "lse", "ties")
    how = dict(mask=mask, bias=scores.bias)
    causal, scale = mask.causal, scores.scale
    _, *out = triton().forward(
        q, k, v, p, causal, scale, tile, seed, stored=True, shadow=True, ties=True, **how
    )
    t = SimpleNamespace(**dict(zip(names, out, strict=True)))
    if do is not None:
        out = triton().backward(do, q, k, v, *out, p, causal, scale, tile, seed, probe=True, **how)
        names = ("dq", "dk", "dv", "delta", "delta_o", "delta_ref")
        vars(t).update(zip(names, out, strict=False))
    for name, x in vars(t).items():
        setattr(t, name, x[..., : sizes[name]] if name in sizes else x)
    return t


def plan(
    policy, tile, impl: str, device: str, probing: bool, plain: bool, missing: tuple[str, ...],
) -> tuple[str, str]:  # fmt: skip
    """(canonical policy, implementation), checked; a constant for torch.compile, which would
    otherwise cut its graph here. missing: what of the call the kernels lack, see `lacking`."""
    p = PrecisionPolicy.parse(policy)
    by_place = p.draws or p.inputs.group.startswith("block")
    missing = [x for x in missing if x != OTHER_SIZES or by_place]
    if p.l_floor and not plain:
        missing.append("l_floor under such a mask")
    wanted, impl = impl, resolve_impl(impl, device)
    if impl == "triton" and missing:
        words = f"the Triton kernels do not have {' and '.join(missing)}"
        if wanted != "auto":
            raise UserError(f"{words}; use impl='emulate'")
        tell(f"{words}: attention is emulated, slowly and with the same roundings")
        impl = "emulate"
    unseen = {"a soft cap", "sinks", "dropout"} & set(missing)  # of PyTorch's kernels, as called
    if impl == "sdpa" and (p != FA2 or tile is not None or probing or unseen):
        raise UserError(
            "impl='sdpa' runs PyTorch's own kernel, whose roundings cannot be set; use "
            "policy=FA2, tile=None and no probe, or impl='triton'"
            if not unseen
            else f"impl='sdpa' does not have {' and '.join(sorted(unseen))}; use impl='emulate'"
        )
    ours = {"delta_from": "o"} | ({"row_sum": "as_rounded"} if impl == "sdpa_forward" else {})
    if impl in HYBRIDS and (p.replace(**ours) != FA2 or tile is not None):
        raise UserError(
            f"impl={impl!r} has the output of PyTorch's kernel, whose roundings cannot be "
            f"set; use policy=FA2 but for {' and '.join(ours)}, and tile=None, or impl='triton'"
        )
    if impl in HYBRIDS and (missing or not plain):
        raise UserError(
            f"impl={impl!r} takes neither masks nor {', '.join(missing) or 'biases'}; use "
            "impl='emulate'"
        )
    if impl == "sdpa_backward" and p.delta_from not in ("o", "o_redrawn"):
        raise UserError(
            f"PyTorch's backward forms delta from a BF16 output, not from {p.delta_from}; use "
            "delta_from=o or o_redrawn, or impl='sdpa_forward'"
        )
    check_row_sum(p, "a soft cap" in missing)
    if impl in KERNELS:
        triton().check_supported(p, tile)
    return str(p), impl


_told = set()


def tell(words: str) -> None:
    """A warning, once in a process."""
    if words not in _told:
        _told.add(words)
        warnings.warn(words, stacklevel=3)


# torch.compiler.assume_constant_result, which would load the compiler with every page.
plan._dynamo_marked_constant = tell._dynamo_marked_constant = True


def that_runs(policy, tile, impl: str, device, head_dim: int) -> str:
    """The implementation of causal calls with heads of this size and nothing beside them.
    Raises `UserError` where there is none."""
    head = torch.empty(1, 1, 1, head_dim, device="meta")
    missing = lacking(head, head, Scores(scale=1.0), 0.0)
    return plan(policy, tile, impl, torch.device(device).type, False, True, missing)[1]


def resolve_impl(impl: str, device) -> str:
    """The implementation that "auto" means on this device."""
    if impl not in IMPLS:
        raise UserError(f"unknown impl {impl!r}; choose one of {', '.join(IMPLS)}")
    if impl == "auto":
        return "triton" if torch.device(device).type == "cuda" else "emulate"
    return impl
