"""Launches the attention kernels: checks, constexprs from the policy, block sizes, outputs.

Honoured now: s p l o_acc o dodo dp p_bwd ds in FP32 or BF16 (nearest even), delta_from "o" and
"o_fp32", whole-row tile, causal or full, BF16 inputs, head_dim 16 to 128, any strides whose last
is 1. Everything else raises and names the field.
"""

from __future__ import annotations

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from lowprec import UserError
from lowprec.kernels import attention as kernels
from lowprec.policy import SITES, PrecisionPolicy, Shift

HEAD_DIMS = (16, 32, 64, 128)
KERNEL_SITES = ("s", "p", "l", "o_acc", "o", "dodo", "dp", "p_bwd", "ds")
NATIVE = not isinstance(kernels.attention_fwd_kernel, InterpretedFunction)
"""False under TRITON_INTERPRET=1, where the kernels run on CPU tensors."""

# Each product and each sum rounds on its own, as in the emulation: no fused multiply-add.
OPTIONS = {"enable_fp_fusion": False} if NATIVE else {}


def check_supported(policy: PrecisionPolicy, tile: int | None = None) -> None:
    """Raise `UserError`, naming the field, for what the kernels do not honour."""
    mend = "use impl='emulate'"
    for name in SITES:
        site = str(getattr(policy, name))
        if site != "fp32" and (name not in KERNEL_SITES or site != "bf16"):
            raise UserError(f"the Triton kernels do not honour policy field {name}={site}; {mend}")
    wanted = {"l_from": ("p_unnorm",), "delta_from": ("o", "o_fp32"), "shift": (Shift(),),
              "l_floor": (0.0,)}  # fmt: skip
    for name, values in wanted.items():
        if getattr(policy, name) not in values:
            raise UserError(
                f"the Triton kernels do not honour policy field {name}={getattr(policy, name)}; "
                f"{mend}"
            )
    if tile is not None:
        raise UserError(f"the Triton kernels round whole rows (tile=None), not tile={tile}; {mend}")


def check_tensors(q, k, v) -> None:
    if q.dtype != torch.bfloat16:
        raise UserError(f"the Triton kernels take bfloat16 q, k, v, not {q.dtype}; cast them first")
    if q.shape[3] not in HEAD_DIMS:
        raise UserError(f"head_dim={q.shape[3]} is not one of {HEAD_DIMS}; use impl='emulate'")
    if q.shape != k.shape:
        raise UserError("the Triton kernels take as many queries as keys; use impl='emulate'")
    if q.shape[2] * max(x.stride(2) for x in (q, k, v)) >= 2**31:
        raise UserError(
            f"seqlen={q.shape[2]} with these strides needs offsets beyond 32 bits within a head; "
            f"make q, k, v contiguous or use impl='emulate'"
        )
    if NATIVE and not q.is_cuda:
        raise UserError(
            "the Triton kernels need CUDA tensors; for CPU tensors set TRITON_INTERPRET=1 before "
            "starting Python, or use impl='emulate'"
        )


def blocks(backward: bool) -> tuple[dict, dict]:
    """(block sizes, launch options); large blocks keep the interpreter quick."""
    if not NATIVE:
        return {"BM": 128, "BN": 128}, {}
    if backward:
        return {"BM": 64, "BN": 64}, {"num_warps": 4, "num_stages": 2, **OPTIONS}
    return {"BM": 128, "BN": 64}, {"num_warps": 4, "num_stages": 3, **OPTIONS}


def bf16_flags(policy: PrecisionPolicy, *names: str) -> dict[str, bool]:
    """{"P_BWD": True, ...}: which sites are BF16, as the kernels' constexprs."""
    return {name.upper(): not getattr(policy, name).is_fp32 for name in names}


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def strides(*tensors: torch.Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


def forward(q, k, v, policy, causal, scale, shadow, ties):
    """(o, o_stored, o_fp32, lse, ties) of attention.

    q, k, v: (B, H, T, D) bfloat16. o: as q. o_stored: o as the backward reads it, FP32, or None
    where o itself is that. o_fp32: (B, H, T, D) float32 shadow output, lse: (B, H, T) float32,
    ties: (B, H, T) int32 scores equal to the row's maximum; None where not asked for.
    """
    check_supported(policy)
    check_tensors(q, k, v)
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    n_batch, n_head, n, d = q.shape
    # (B, T, H, D) in memory: the reshape to (B, T, C) that follows in a transformer is free
    o = torch.empty(n_batch, n, n_head, d, dtype=q.dtype, device=q.device).transpose(1, 2)
    stored = torch.empty_like(o, dtype=torch.float32) if policy.o.is_fp32 else None
    o_fp32 = torch.empty_like(o, dtype=torch.float32) if shadow else None
    rows = (n_batch, n_head, n)
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    b_ties = torch.empty(rows, dtype=torch.int32, device=q.device) if ties else None
    sizes, options = blocks(backward=False)
    grid = (triton.cdiv(n, sizes["BM"]), n_batch * n_head)
    kernels.attention_fwd_kernel[grid](
        q, k, v, o, stored, o_fp32, lse, b_ties, *strides(q, k, v, o), n, scale,
        H=n_head, D=d, **sizes, CAUSAL=causal, NATIVE=NATIVE,
        STORED=stored is not None, SHADOW=shadow, TIES=ties,
        **bf16_flags(policy, "s", "p", "l", "o_acc", "o"), **options,
    )  # fmt: skip
    return o, stored, o_fp32, lse, b_ties


def backward(do, q, k, v, o, o_fp32, lse, policy, causal, scale, probe):
    """(dq, dk, dv, delta_o, delta_ref); the last two (B, H, T) float32, or None without `probe`.

    o: the output as the backward reads it (`o_stored` of `forward` if there is one);
    o_fp32: the shadow output, needed for delta_from="o_fp32" and for `probe`.
    """
    do, q, k, v = (last_contiguous(x) for x in (do, q, k, v))
    n_batch, n_head, n, d = q.shape
    delta = torch.empty_like(lse)
    delta_o, delta_ref = (torch.empty_like(lse), torch.empty_like(lse)) if probe else (None, None)
    from_shadow = policy.delta_from == "o_fp32"
    grid = (triton.cdiv(n, 128), n_batch * n_head)
    kernels.delta_bwd_kernel[grid](
        do, o, o_fp32, delta, delta_o, delta_ref, *strides(do, o), n,
        H=n_head, D=d, BM=128, NATIVE=NATIVE, FROM_SHADOW=from_shadow, PROBE=probe,
        **bf16_flags(policy, "dodo"), **OPTIONS,
    )  # fmt: skip
    dq, dk, dv = (
        torch.empty(n_batch, n, n_head, d, dtype=q.dtype, device=q.device).transpose(1, 2)
        for _ in range(3)
    )
    sizes, options = blocks(backward=True)
    common = dict(
        H=n_head, D=d, **sizes, CAUSAL=causal, NATIVE=NATIVE,
        **bf16_flags(policy, "s", "dp", "ds"), **options,
    )  # fmt: skip
    grid = (triton.cdiv(n, sizes["BM"]), n_batch * n_head)
    kernels.attention_bwd_dq_kernel[grid](
        q, k, v, do, lse, delta, dq, *strides(q, k, v, do, dq), n, scale, **common
    )
    grid = (triton.cdiv(n, sizes["BN"]), n_batch * n_head)
    kernels.attention_bwd_dkdv_kernel[grid](
        q, k, v, do, lse, delta, dk, dv, *strides(q, k, v, do, dk), n, scale,
        **bf16_flags(policy, "p_bwd"), **common,
    )  # fmt: skip
    return dq, dk, dv, delta_o, delta_ref
