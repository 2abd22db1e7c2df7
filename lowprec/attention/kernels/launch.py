"""Launches the attention kernels: checks, constexprs from the policy, hardware blocks, outputs.

The hardware blocks BM x BN come from a table by head_dim, measured once (`HARDWARE`); the rounding
block `tile` is the caller's. Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from lowprec import UserError
from lowprec.attention.inputs import stored_inputs
from lowprec.attention.kernels import backward as bwd
from lowprec.attention.kernels import forward as fwd
from lowprec.attention.kernels import views
from lowprec.attention.kernels.rounding import Code, Constants, redrawn_code, site_code
from lowprec.attention.masks import Mask
from lowprec.numerics.policy import DITHER, SITES, PrecisionPolicy

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LONGEST = 2**30
"""A tile that holds any row."""
MODES = {
    "l_from": ("p_unnorm", "p_rounded", "p_both"),
    "delta_from": ("o", "o_fp32", "o_split", "o_redrawn", "o_prime", "dp"),
    "row_sum": ("as_rounded", "removed", "refined"),
}
"""What the kernels do of `policy.CHOICES`, to which a fork may add."""
NATIVE = not isinstance(fwd.attention_fwd_kernel, InterpretedFunction)
"""False under TRITON_INTERPRET=1, where the kernels run on CPU tensors."""

HARDWARE = {
    # architecture: head_dim up to: kernel, of a tile, of any tile:
    # (BM, BN, warps, stages, most registers a thread or None)
    "sm_90": {
        64: {
            "forward": (64, 64, 4, 3, 128), "forward 64": (64, 64, 4, 3, None),
            "forward 128": (64, 128, 4, 2, None), "forward tiled": (64, 64, 4, 3, 160),
            "forward pow2": (64, 64, 4, 3, 128), "forward dense": (64, 64, 4, 3, 128),
            "dkdv dense": (64, 64, 4, 2, None), "dkdv shared": (64, 64, 4, 2, None),
            "dq": (64, 64, 4, 2, None), "dq tiled": (64, 32, 4, 4, None),
            "dkdv": (32, 64, 4, 4, 128), "dkdv tiled": (64, 64, 4, 3, None),
        },
        128: {
            "forward": (64, 64, 4, 3, None), "forward tiled": (64, 64, 4, 2, None),
            "forward pow2": (64, 64, 4, 3, None), "forward dense": (64, 32, 4, 3, None),
            "dq": (64, 64, 4, 2, None), "dkdv": (32, 64, 4, 4, None),
        },
        256: {
            "forward": (128, 32, 8, 3, None), "dq": (64, 64, 8, 2, None),
            "dkdv": (64, 64, 8, 2, None),
        },
    },
    "other": {
        64: {
            "forward": (128, 64, 8, 2, None), "forward tiled": (128, 32, 8, 2, None),
            "forward dense": (128, 32, 8, 2, None), "dq": (128, 32, 8, 2, None),
            "dq dense": (64, 32, 8, 2, None), "dkdv": (32, 128, 8, 2, None),
        },
        128: {
            "forward": (64, 64, 8, 2, None), "forward dense": (32, 64, 8, 2, None),
            "dq": (64, 32, 8, 2, None), "dkdv": (64, 64, 8, 2, None),
            "dkdv shared": (64, 64, 8, 1, None),
        },
        256: {
            "forward": (64, 64, 8, 1, None), "forward dense": (64, 32, 8, 2, None),
            "dq": (32, 64, 8, 1, None), "dkdv": (32, 32, 8, 2, None),
        },
    },
}  # fmt: skip
HARDWARE["sm_90"][32] = HARDWARE["sm_90"][64] | {"forward dense": (64, 32, 4, 3, None)}
"""sm_90's are chosen from the sweep that data/benchmarks/ records. All other architectures take
"other": compiled, not timed, for sm_80, 86, 89, 100 and 120. Each fits into the 99 KiB of shared
memory that some of them have, and spills no register with FA2, SAFE, LOW or ALL_FP32 on bfloat16
inputs. Dense masks with heads up to 32 were not timed on sm_90 either: with the block of 64 they
spill."""


def check_supported(policy: PrecisionPolicy, tile: int | None = None) -> None:
    """Raise `UserError`, naming the field, for what the kernels do not honour."""
    for name in SITES:
        site_code(policy, name)
    for name, modes in MODES.items():
        if getattr(policy, name) not in modes:
            raise UserError(
                f"the Triton kernels do not honour policy field {name}={getattr(policy, name)}; "
                "use impl='emulate'"
            )
    if tile is not None and (tile < 16 or tile & (tile - 1)):
        raise UserError(
            f"tile={tile}: a rounding block in the Triton kernels is 16, 32, 64 ... keys (a power "
            f"of two) or None for the whole row; use impl='emulate'"
        )


def check_tensors(q, k, v, scale: float) -> None:
    """Raise `UserError` for tensors that the kernels do not take."""
    mend = "use impl='emulate'"
    if q.dtype not in DTYPES:
        raise UserError(f"the Triton kernels take {', '.join(DTYPES.values())}, not {q.dtype}")
    if q.shape[3] not in HEAD_DIMS:
        raise UserError(f"head_dim={q.shape[3]} is not one of {HEAD_DIMS}; {mend}")
    if len(q) != len(k):
        raise UserError(f"batches of {len(q)} queries and {len(k)} keys must be alike")
    if q.shape[3] != v.shape[3]:
        raise UserError(
            f"the Triton kernels take values of the head_dim of queries, {q.shape[3]}, not "
            f"{v.shape[3]}; {mend}"
        )
    if q.shape[1] % k.shape[1]:
        raise UserError(f"{k.shape[1]} heads of keys must divide the {q.shape[1]} of queries")
    if not scale > 0:
        raise UserError(f"the Triton kernels need a positive scale, not {scale}; {mend}")
    ours = q.shape[1] * q.shape[3]  # of outputs and gradients, see `new_rows`
    longest = max(q.shape[2], k.shape[2])
    if longest * max(ours, *(x.stride(2) for x in (q, k, v))) >= 2**31:
        raise UserError(
            f"seqlen={longest} with these strides needs offsets beyond 32 bits within a head; "
            f"make q, k, v contiguous, take fewer heads at once, or {mend}"
        )
    if NATIVE and not q.is_cuda:
        raise UserError(
            "the Triton kernels need CUDA tensors; for CPU tensors set TRITON_INTERPRET=1 before "
            f"starting Python, or {mend}"
        )


@functools.cache
def hopper() -> bool:
    """Whether the first GPU here is of the kind that blocks were chosen on; True without one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(0)[0] == 9


@functools.lru_cache
def codes(policy: PrecisionPolicy, *sites: str) -> dict[str, Code]:
    """{"p_bwd": code, ...} of the sites that a kernel rounds at."""
    return {name: site_code(policy, name) for name in sites}


def blocks(kernel: str, d: int, lengths, tile: int, dtype, kind: str = "") -> tuple[dict, dict]:
    """Hardware blocks and launch options of one kernel; large blocks keep the interpreter quick.

    kind: "pow2", "dense" or "shared" (heads of keys), which may have a row of their own.
    """
    if not NATIVE:
        bm, bn, options = 128, 128, {}
    else:
        table = HARDWARE["sm_90" if hopper() else "other"]
        table = table[min(size for size in table if d <= size)]
        names = (f"{kernel} {tile}", f"{kernel} tiled") if tile else (f"{kernel} {kind}",)
        names += (kernel,)
        bm, bn, warps, stages, registers = next(table[name] for name in names if name in table)
        if dtype != torch.bfloat16:  # operands in several pieces need more of everything
            stages, registers = 1, None
        if dtype == torch.float32 and (d > 128 or not hopper()):  # three pieces must fit
            most = 32 if hopper() or d <= 128 else 16
            bm, bn = min(bm, most), min(bn, most)
        # Each product and each sum rounds on its own, as in the emulation.
        options = dict(num_warps=warps, num_stages=stages, enable_fp_fusion=False)
        if registers:
            options["maxnreg"] = registers
    if tile:  # the side that the kernel walks along
        bm, bn = (min(bm, tile), bn) if kernel == "dkdv" else (bm, min(bn, tile))
    even = lengths[0] % bm == 0 and lengths[1] % bn == 0
    return dict(bm=bm, bn=bn, tile=tile, even=even), options


def one_pass(policy: PrecisionPolicy) -> bool:
    """Whether blocks of any width leave the forward as it is over the whole row, but for the order
    of FP32 sums. A power of two may push p out of the range of a small format."""
    plain = policy.l.is_fp32 and policy.o_acc.is_fp32 and not policy.l_floor
    plain = plain and policy.p.fmt.exponent_bits == 8
    return policy.shift.kind == "pow2" and plain


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if its last dimension, which the kernels walk along, is strided."""
    return x if x.stride(3) == 1 else x.contiguous()


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Those of batch, head and row of each tensor, in elements; the last one is 1."""
    return tuple(s for x in tensors for s in x.stride()[:3])


def common(q, k, mask: Mask, bias, scale: float, policy: PrecisionPolicy) -> dict:
    """Constants of every kernel."""
    power_of_two = math.frexp(scale)[0] == 0.5
    # rounding that keeps neither the order of scores nor -inf, at which hidden ones are
    unordered = policy.s.rounding == "stochastic" or policy.s.fmt.overflow != "inf"
    hides = mask.window < q.shape[2] + mask.offset
    plain = mask.plain and not (mask.causal and q.shape[2] != k.shape[2])
    return dict(
        h=q.shape[1], group=q.shape[1] // k.shape[1], d=q.shape[3], causal=mask.causal,
        native=NATIVE, exact=power_of_two and policy.s.fmt.exponent_bits == 8 and bias is None,
        pieces=3 if q.dtype == torch.float32 else 2, plain=plain and bias is None,
        window=mask.window if hides else 0, ranged=mask.keys is not None,
        dense=mask.dense is not None, bias=bias is not None, direct=unordered or bias is not None,
    )  # fmt: skip


def mask_arguments(q, k, mask: Mask, bias) -> tuple:
    """(queries, keys, offset, ranges of keys, dense, its strides, bias, its strides).

    q stands for a tensor that is not there. Strides are of (B, H, L, S), 0 where a part is shared.
    """
    shape = (*q.shape[:3], k.shape[2])
    if abs(mask.offset) >= 2**30:
        raise UserError(f"the Triton kernels count queries in 32 bits; offset={mask.offset} is "
                        "beyond")  # fmt: skip
    keys = q
    if mask.keys is not None:
        keys = mask.keys.to(q.device).clamp(0, k.shape[2]).int().contiguous()
    found = [q.shape[2], k.shape[2], mask.offset, keys]
    for x in (mask.dense, bias):
        if x is None:
            found += [q, (0, 0, 0, 0)]
        else:  # Triton loads bytes, and the interpreter no BF16 that it could add
            x = x.to(q.device)
            x = (x.view(torch.uint8) if x.dtype == torch.bool else x.float()).expand(shape)
            found += [x, x.stride()]
    return tuple(found)


def blocks_seen(view: tuple, sizes: dict, by_keys: bool) -> tuple:
    """`mask_arguments` and, of a dense mask, what each block of queries sees of the blocks of keys,
    as first block, end of the whole ones and end, or by which queries a block of keys is seen; with
    strides of (B, H, blocks)."""
    n_q, n_k, dense, strides = view[0], view[1], view[4], view[5]
    if dense.dtype != torch.uint8:
        return *view, dense, (0, 0, 0)
    b, h = (n if s else 1 for n, s in zip(dense.shape[:2], strides, strict=False))
    sb, sh, sq, sk = strides
    if by_keys:
        shape, strides = (n_k, n_q, sizes["bn"], sizes["bm"]), (sb, sh, sk, sq)
    else:
        shape, strides = (n_q, n_k, sizes["bm"], sizes["bn"]), (sb, sh, sq, sk)
    n_rows, n_columns, rows, columns = shape
    blocks = triton.cdiv(n_rows, rows)
    found = torch.empty(b, h, blocks, 3, dtype=torch.int32, device=dense.device)
    with on_device(dense):
        views.blocks_seen_kernel[(b * h * blocks,)](
            dense, found, strides, n_rows, n_columns, h, rows, columns, by_keys
        )
    of = found.stride()
    return *view, found, (of[0] if b > 1 else 0, of[1] if h > 1 else 0, of[2])


def on_device(x: torch.Tensor):
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def new_rows(q, dtype=None):
    """An empty (B, H, T, D) tensor, (B, T, H, D) in memory: the reshape to (B, T, H * D) that
    follows in a transformer is free."""
    b, h, n, d = q.shape
    return torch.empty(b, n, h, d, dtype=dtype or q.dtype, device=q.device).transpose(1, 2)


def forward(
    q, k, v, policy, causal, scale, tile=None, seed=0, stored=False, shadow=False, ties=False,
    mask=None, bias=None,
):  # fmt: skip
    """(o, o_stored, o_fp32, lse, ties) of attention; None where not asked for.

    q: (B, H, T, D), bfloat16, float16 or float32; k, v: as q, or with fewer heads, each read by as
    many consecutive heads of q, and with another T. mask: a lowered `Mask`, in place of causal;
    bias: floats to add to s, each dimension that of (B, H, queries, keys) or 1.
    o: as q. o_stored: float32, o as the policy stores it, wanted where q's dtype cannot hold that.
    o_fp32: float32, the shadow output. lse: (B, H, T) float32. ties: (B, H, T) int32, scores equal
    to the row's maximum. A row that sees no key, or whose scores are all -inf, gives o = 0 and
    lse = -inf; a score of +inf or NaN gives NaN in its row.
    """
    check_supported(policy, tile)
    check_tensors(q, k, v, scale)
    q, k, v = (last_contiguous(x) for x in stored_inputs(policy, q, k, v))
    mask = mask or Mask(causal=causal)
    b, h, n, d = q.shape
    lengths = n, k.shape[2]
    o = new_rows(q)
    o_stored = new_rows(q, torch.float32) if stored else None
    o_fp32 = new_rows(q, torch.float32) if shadow else None
    lse = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    b_ties = torch.empty_like(lse, dtype=torch.int32) if ties else None
    tile = 0 if tile is None or tile >= max(lengths) else tile
    at_once = one_pass(policy)
    kind = "pow2" if at_once else "dense" if mask.dense is not None else ""
    sizes, options = blocks("forward", d, lengths, 0 if at_once else tile, q.dtype, kind)
    if at_once:
        sizes["tile"] = sizes["bn"]
    if ties and kind == "dense":  # all that a probe asks for needs more registers
        options.pop("maxnreg", None)
    shift = policy.shift
    known = Constants(
        **common(q, k, mask, bias, scale, policy), **sizes, stored=stored, shadow=shadow, ties=ties,
        **codes(policy, "s", "x", "p", "l", "o_acc", "o"),
        l_from=policy.l_from, l_floor=policy.l_floor,
        shift=shift.kind, beta=shift.beta, gamma=shift.gamma, tol=shift.tol,
        amplitude=shift.amplitude, dither_stream=DITHER,
    )  # fmt: skip
    view = blocks_seen(mask_arguments(q, k, mask, bias), sizes, by_keys=False)
    with on_device(q):
        fwd.attention_fwd_kernel[(triton.cdiv(n, known.bm) * b * h,)](
            q, k, v, o, o_stored, o_fp32, lse, b_ties, strides(q, k, v, o),
            view, scale, seed, known, **options,
        )  # fmt: skip
    return o, o_stored, o_fp32, lse, b_ties


def _mean_key(k, same: dict) -> torch.Tensor:
    """(B, H', parts, D) float32, which sum to the mean key of each head of keys and sequence. same:
    `common` of the call."""
    b, h, n, d = k.shape
    rows = bwd.MEAN_ROWS.value
    parts = triton.cdiv(n, rows)
    mean = torch.empty(b, h, parts, d, dtype=torch.float32, device=k.device)
    known = Constants(**same, bm=rows, bn=rows, tile=0, even=n % rows == 0)
    with on_device(k):
        bwd.attention_bwd_mean_key_kernel[(parts * b * h,)](
            k, mean, strides(k), n, known, num_warps=8, enable_fp_fusion=False
        )
    return mean


def backward(
    do, q, k, v, o, o_fp32, lse, ties, policy, causal, scale, tile=None, seed=0, probe=False,
    mask=None, bias=None,
):  # fmt: skip
    """(dq, dk, dv, delta, delta_o, delta_ref, sums); the last three None without `probe`.

    o: the output as the backward reads it (`o_stored` of `forward` if there is one); o_fp32: the
    shadow output, needed for delta_from="o_fp32", "o_split", "o_redrawn", for delta_bias and, like
    `ties`, for `probe`.
    dk, dv: as k. delta (the one used), delta_o (from o), delta_ref (from o_fp32): (B, H, T)
    float32. sums:
    (H, 3) float32, per head the sum of delta_o - delta_ref, of its absolute value, and the number
    of rows whose largest score is tied.
    """
    do, q, k, v = (last_contiguous(x) for x in stored_inputs(policy, do, q, k, v))
    if do.shape[2] * do.stride(2) >= 2**31:  # autograd chose the layout
        do = do.contiguous()
    mask = mask or Mask(causal=causal)
    b, h, n, d = q.shape
    lengths = n, k.shape[2]
    delta, sums, delta_o, delta_ref = torch.empty_like(lse), None, None, None
    same = common(q, k, mask, bias, scale, policy)
    view = mask_arguments(q, k, mask, bias)
    tile = 0 if tile is None or tile >= max(lengths) else tile
    dq, dk, dv = (new_rows(x) for x in (q, k, v))
    mean_key = _mean_key(k, same) if policy.row_sum == "removed" else None
    delta_dk = torch.empty_like(lse) if policy.row_sum == "refined" else delta

    kind = "" if mask.dense is None else "dense"
    sizes, options = blocks("dq", d, lengths, 0 if policy.dq_acc.is_fp32 else tile, q.dtype, kind)
    known = Constants(
        **same, **sizes, probe=probe, delta_from=policy.delta_from, redrawn=redrawn_code(policy),
        delta_bias=policy.delta_bias, row_sum=policy.row_sum,
        **codes(policy, "s", "dodo", "dp", "p_bwd", "ds", "dq_acc"),
    )  # fmt: skip
    n_blocks = triton.cdiv(n, known.bm)
    if probe:
        delta_o, delta_ref = torch.empty_like(lse), torch.empty_like(lse)
        sums = torch.empty(b, h, n_blocks, 3, dtype=torch.float32, device=q.device)
    # one set of strides serves both; a hook on saved tensors may have changed a layout
    o = last_contiguous(o)
    if o_fp32 is not None and o_fp32.dim() == 4 and o_fp32.stride() != o.stride():
        o_fp32 = torch.empty_like(o, dtype=torch.float32).copy_(o_fp32)
    with on_device(q):
        bwd.attention_bwd_dq_kernel[(n_blocks * b * h,)](
            q, k, v, do, o, o_fp32, mean_key, lse, ties, delta, delta_dk, delta_o, delta_ref, sums,
            dq, strides(q, k, v, do, o, dq), blocks_seen(view, sizes, by_keys=False), scale,
            seed, known, **options,
        )  # fmt: skip
    if same["group"] > 1:  # the whole row is the queries of one head, and there are more
        tile, kind = tile or LONGEST, kind or "shared"
    tile = 0 if policy.dkdv_acc.is_fp32 else tile
    sizes, options = blocks("dkdv", d, lengths, tile, q.dtype, kind)
    sites = codes(policy, "s", "p_bwd", "dp", "ds", "dkdv_acc")
    known = Constants(**same, **sizes, **sites)
    with on_device(q):
        bwd.attention_bwd_dkdv_kernel[(triton.cdiv(k.shape[2], known.bn) * b * k.shape[1],)](
            q, k, v, do, lse, delta_dk, dk, dv, strides(q, k, v, do, dk),
            blocks_seen(view, sizes, by_keys=True), scale, seed, known, **options,
        )  # fmt: skip
    return dq, dk, dv, delta, delta_o, delta_ref, sums.sum((0, 2)) if probe else None
