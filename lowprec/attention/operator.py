"""The one entry to attention: the same call runs the oracle, the emulation, Triton or SDPA.

The implementations sit behind one opaque custom operator with autograd, so torch.compile can
compile everything around attention but cannot move, fuse or remove a rounding inside it.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec import UserError
from lowprec.attention.reference import check_inputs, emulate, oracle
from lowprec.numerics.formats import Format
from lowprec.numerics.policy import FA2, PrecisionPolicy

HYBRIDS = ("sdpa_forward", "sdpa_backward")
IMPLS = ("auto", "oracle", "emulate", "triton", "sdpa", *HYBRIDS)
KERNELS = ("triton", *HYBRIDS)
"""Those that run our kernels, if only for what PyTorch's do not show."""

PROBE_COLUMNS = ("delta_bias", "delta_abs", "tied_rows")
"""What a probe's gradient holds per head, summed over the batch's rows: sum(delta_o - delta_ref),
sum|delta_o - delta_ref| and the number of rows whose largest score is tied."""


def attention(
    q, k, v, policy=FA2, causal=True, scale=None, tile=None, impl="auto", seed=0, probe=None
):
    """softmax(scale q k^T) v with the roundings of `policy`; differentiable.

    q, k, v: (batch, heads, seqlen, head_dim), one dtype; returns q's shape and dtype. The policy
        governs what the backward reads; the caller always gets q's dtype. k and v may have fewer
        heads, a divisor of q's: head h of H reads head h // (H / theirs), where it lies, and their
        gradients are summed over the heads that read them before they are rounded to the dtype
        (by PyTorch's kernels as they do it).
    policy: a PrecisionPolicy or its text, e.g. "LOW+delta_from=o_fp32".
    scale: defaults to 1/sqrt(head_dim). tile: keys per rounding block, None for the whole row.
    impl: "auto" is triton on CUDA and emulate elsewhere; "oracle" is float64 and ignores the
        policy; "sdpa" is PyTorch's own kernel, whose roundings cannot be set (policy must be FA2):
        its flash kernel for 16-bit numbers on CUDA, elsewhere the one that PyTorch chooses;
        "sdpa_forward" is the output of its flash kernel with our backward pass, so the policy may
        differ from FA2 in where delta comes from; "sdpa_backward" is its flash kernel both ways,
        and delta_from="o_redrawn" hands its backward our output, rounded at random, for its own.
    seed: keys random bits of stochastic sites; change it every step.
    probe: (heads, 3) float32 leaf whose *gradient* receives PROBE_COLUMNS: it accumulates over
        micro-batches and is reduced over ranks like any gradient. Costs one FP32 output.
    """
    scale = check_inputs(q, k, v, causal, scale, None, tile, seed)
    policy, impl = _plan(
        policy if isinstance(policy, str) else str(policy), tile, impl, q.device.type,
        None if probe is None else tuple(probe.shape), q.shape[1],
    )  # fmt: skip
    if impl == "sdpa":
        # PyTorch may prefer cuDNN's kernel, another program. Flash takes no FP32, nor does cuDNN.
        choice = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if choice else nullcontext():
            return _sdpa(q, k, v, causal, scale)
    return _attention(q, k, v, probe, policy, causal, scale, tile or 0, impl, seed)[0]


@torch.no_grad()
def trace(
    q, k, v, do, policy=FA2, causal=True, scale=None, tile=None, impl="auto", seed=0
) -> SimpleNamespace:
    """What the operator and its backward compute, by the names of
    `lowprec.attention.reference.Trace`.

    q, do: (B, H, T, D); k, v: as q or with fewer heads. do=None leaves out the backward; the rest
    as in `attention`.
    Every implementation gives o (as the policy stores it) and o_fp32 (B, H, T, D); lse and ties
    (B, H, T); with `do` also delta (the one used), delta_o, delta_ref (B, H, T) and dq, dk, dv.
    FP32, but gradients as q, k, v; float64 from "oracle". "emulate" and "oracle" give more.
    """
    scale = check_inputs(q, k, v, causal, scale, do, tile, seed)
    policy, impl = _plan(str(policy), tile, impl, q.device.type, None, q.shape[1])
    if impl.startswith("sdpa"):
        raise UserError(f"impl={impl!r} shows no intermediates; use 'triton' or 'emulate'")
    p = PrecisionPolicy.parse(policy)
    do = None if do is None else do.to(q.dtype)
    if impl != "triton":
        return _eager(q, k, v, do, p, causal, scale, tile, impl, seed)
    names = ("o", "o_fp32", "lse", "ties")
    _, *out = _triton().forward(
        q, k, v, p, causal, scale, tile, seed, stored=True, shadow=True, ties=True
    )
    t = SimpleNamespace(**dict(zip(names, out, strict=True)))
    if do is not None:
        out = _triton().backward(do, q, k, v, *out, p, causal, scale, tile, seed, probe=True)
        names = ("dq", "dk", "dv", "delta", "delta_o", "delta_ref")
        vars(t).update(zip(names, out, strict=False))
    return t


def _eager(q, k, v, do, policy, causal, scale, tile, impl, seed):
    """The trace of "oracle" or "emulate"; the oracle's output is exact, so is every delta."""
    if impl == "emulate":
        return emulate(q, k, v, policy, tile, do, causal, scale, seed)
    t = oracle(q, k, v, causal, scale, do=do)
    t.o_fp32, t.ties = t.o, (t.s == t.m[..., None]).sum(-1)
    if do is not None:
        t.delta_o = t.delta_ref = t.delta
    return t


def _plan(policy: str, tile, impl: str, device: str, probe_shape, heads: int) -> tuple[str, str]:
    """(canonical policy, implementation), checked; a constant for torch.compile, which would
    otherwise cut its graph here."""
    p = PrecisionPolicy.parse(policy)
    impl = resolve_impl(impl, device)
    if impl == "sdpa" and (p != FA2 or tile is not None or probe_shape is not None):
        raise UserError(
            "impl='sdpa' runs PyTorch's own kernel, whose roundings cannot be set; use "
            "policy=FA2, tile=None and no probe, or impl='triton'"
        )
    ours = {"delta_from": "o"} | ({"row_sum": "as_rounded"} if impl == "sdpa_forward" else {})
    if impl in HYBRIDS and (p.replace(**ours) != FA2 or tile is not None):
        raise UserError(
            f"impl={impl!r} has the output of PyTorch's kernel, whose roundings cannot be "
            f"set; use policy=FA2 but for {' and '.join(ours)}, and tile=None, or impl='triton'"
        )
    if impl == "sdpa_backward" and p.delta_from not in ("o", "o_redrawn"):
        raise UserError(
            f"PyTorch's backward forms delta from a BF16 output, not from {p.delta_from}; use "
            "delta_from=o or o_redrawn, or impl='sdpa_forward'"
        )
    if probe_shape is not None and probe_shape != (heads, len(PROBE_COLUMNS)):
        raise UserError(f"probe must be ({heads}, {len(PROBE_COLUMNS)}), not {probe_shape}")
    if impl in KERNELS:
        _triton().check_supported(p, tile)
    return str(p), impl


# torch.compiler.assume_constant_result, which would load the compiler with every page.
_plan._dynamo_marked_constant = True


def resolve_impl(impl: str, device) -> str:
    """The implementation that "auto" means on this device."""
    if impl not in IMPLS:
        raise UserError(f"unknown impl {impl!r}; choose one of {', '.join(IMPLS)}")
    if impl == "auto":
        return "triton" if torch.device(device).type == "cuda" else "emulate"
    return impl


def _triton():
    try:
        from lowprec.attention import kernels
    except ImportError:
        raise UserError("impl='triton' needs the triton package (Linux); use 'emulate'") from None
    return kernels


def _wants_shadow(policy: PrecisionPolicy, probe) -> bool:
    unrounded = policy.delta_from in ("o_fp32", "o_split", "o_redrawn")
    return probe is not None or unrounded or policy.delta_bias != 0


def _wants_stored(policy: PrecisionPolicy, dtype: torch.dtype, impl: str) -> bool:
    """Whether a tensor of that dtype cannot hold o as the policy stores it; PyTorch's o is as q."""
    as_q = Format.parse(str(dtype).removeprefix("torch."))
    return impl == "triton" and not policy.o.fmt.within(as_q)


@torch.library.custom_op("lowprec::attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, probe: torch.Tensor | None,
    policy: str, causal: bool, scale: float, tile: int, impl: str, seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(o, o_stored, o_fp32, lse, ties); empty tensors stand for what is not needed."""
    p = PrecisionPolicy.parse(policy)
    none = q.new_empty(0)
    if impl in KERNELS:
        out = _triton().forward(
            q, k, v, p, causal, scale, tile or None, seed,
            stored=_wants_stored(p, q.dtype, impl), shadow=_wants_shadow(p, probe),
            ties=probe is not None,
        )  # fmt: skip
        if impl in HYBRIDS:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out[0].copy_(_sdpa(q, k, v, causal, scale))
        return tuple(none.clone() if x is None else x for x in out)
    t = _eager(q, k, v, None, p, causal, scale, tile or None, impl, seed)
    # the backward of these two recomputes the forward, so nothing else is kept
    return t.o.to(q.dtype).contiguous(), none, none.clone(), none.clone(), none.clone()


@_attention.register_fake
def _(q, k, v, probe, policy, causal, scale, tile, impl, seed):
    p = PrecisionPolicy.parse(policy)
    if impl not in KERNELS:
        return q.new_empty(q.shape), *(q.new_empty(0) for _ in range(4))
    b, h, t, d = q.shape
    o = q.new_empty(b, t, h, d).transpose(1, 2)
    wanted = (_wants_stored(p, q.dtype, impl), _wants_shadow(p, probe))
    stored, shadow = (
        torch.empty_like(o, dtype=torch.float32) if want else q.new_empty(0) for want in wanted
    )
    lse = q.new_empty(b, h, t, dtype=torch.float32)
    ties = torch.empty_like(lse, dtype=torch.int32) if probe is not None else q.new_empty(0)
    return o, stored, shadow, lse, ties


def _sdpa(q, k, v, causal, scale):
    """PyTorch's attention; it is told of shared keys where there are some, since not every backend
    takes them."""
    how = dict(enable_gqa=True) if k.shape[1] < q.shape[1] else {}
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, **how
    )


def _flash_backward(do, q, k, v, o, causal, scale):
    """(dq, dk, dv) of PyTorch's flash kernel, which takes o for its output."""
    aten, how = torch.ops.aten, (0.0, causal)
    if not q.is_cuda:
        lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *how, scale=scale)[1]
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(do, q, k, v, o, lse, *how, scale=scale)
    out = aten._scaled_dot_product_flash_attention(q, k, v, *how, False, scale=scale)
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(do, q, k, v, o, *out[1:6], *how, *out[6:8], scale=scale)


@torch.library.custom_op("lowprec::attention_backward", mutates_args=())
def _attention_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    o_fp32: torch.Tensor, lse: torch.Tensor, ties: torch.Tensor, want_probe: bool,
    policy: str, causal: bool, scale: float, tile: int, impl: str, seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv, probe gradient)."""
    p = PrecisionPolicy.parse(policy)
    if impl in KERNELS:
        dq, dk, dv, *_, sums = _triton().backward(
            do, q, k, v, o, o_fp32, lse, ties, p, causal, scale, tile or None, seed, want_probe
        )
        if impl == "sdpa_backward":
            if p.delta_from == "o_redrawn":
                fair = p.replace(o="bf16:stochastic")
                o = _triton().forward(q, k, v, fair, causal, scale, tile or None, seed)[0]
            for ours, theirs in zip(
                (dq, dk, dv), _flash_backward(do, q, k, v, o, causal, scale), strict=True
            ):
                ours.copy_(theirs)
        return dq, dk, dv, sums if want_probe else q.new_empty(0)
    t = _eager(q, k, v, do, p, causal, scale, tile or None, impl, seed)
    dq, dk, dv = (g.to(q.dtype).contiguous() for g in (t.dq, t.dk, t.dv))
    if not want_probe:
        return dq, dk, dv, q.new_empty(0)
    bias = t.delta_o - t.delta_ref
    columns = (bias, bias.abs(), (t.ties > 1).float())
    return dq, dk, dv, torch.stack([c.float().sum((0, 2)) for c in columns], -1)


@_attention_backward.register_fake
def _(do, q, k, v, o, o_fp32, lse, ties, want_probe, policy, causal, scale, tile, impl, seed):
    if impl in KERNELS:
        rows = (x.transpose(1, 2).shape for x in (q, k, v))
        grads = (q.new_empty(shape).transpose(1, 2) for shape in rows)
    else:
        grads = (x.new_empty(x.shape) for x in (q, k, v))
    shape = (q.shape[1], len(PROBE_COLUMNS)) if want_probe else (0,)
    return *grads, q.new_empty(shape, dtype=torch.float32 if want_probe else q.dtype)


def _setup_context(ctx, inputs, output):
    q, k, v, probe, *ctx.how = inputs
    o, o_stored, o_fp32, lse, ties = output
    ctx.want_probe = probe is not None
    ctx.save_for_backward(q, k, v, o_stored if o_stored.numel() else o, o_fp32, lse, ties)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, *_):
    q, k, v, o, o_fp32, lse, ties = ctx.saved_tensors
    dq, dk, dv, dprobe = _attention_backward(
        do.to(q.dtype), q, k, v, o, o_fp32, lse, ties, ctx.want_probe, *ctx.how
    )
    return dq, dk, dv, dprobe if ctx.want_probe else None, None, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)
