"""The implementations of attention behind one opaque custom operator with autograd.

torch.compile can compile everything around it but cannot move, fuse or remove a rounding inside.
An operator takes no objects: a policy goes in as text, `Mask` and `Scores` part by part.
"""

from __future__ import annotations

import torch
from torch._C._nn import scaled_dot_product_attention  # torch's own, also if ours has its name
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec import UserError
from lowprec.attention.inputs import causal_mask, check_seed
from lowprec.attention.masks import Mask, Scores
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import Format
from lowprec.numerics.policy import PrecisionPolicy

HYBRIDS = ("sdpa_forward", "sdpa_backward")
IMPLS = ("auto", "oracle", "emulate", "triton", "sdpa", *HYBRIDS)
KERNELS = ("triton", *HYBRIDS)
"""Those that run our kernels, if only for what PyTorch's do not show."""

PROBE_COLUMNS = ("delta_bias", "delta_abs", "tied_rows")
"""What a probe's gradient holds per head, summed over the batch's rows: sum(delta_o - delta_ref),
sum|delta_o - delta_ref| and the number of rows whose largest score is tied."""


def triton():
    try:
        from lowprec.attention import kernels
    except ImportError:
        raise UserError("impl='triton' needs the triton package (Linux); use 'emulate'") from None
    return kernels


def eager(q, k, v, do, policy, mask, scores, dropout, tile, impl, seed):
    """The trace of "oracle" or "emulate"; the oracle's output is exact, so is every delta."""
    how = dict(mask=mask, scores=scores, dropout=dropout)
    if impl == "emulate":
        return emulate(q, k, v, policy, tile, do, seed=seed, **how)
    t = oracle(q, k, v, do=do, seed=seed, **how)
    seen = mask.seen(q.shape[2], k.shape[2], q.device)
    t.o_fp32, t.ties = t.o, ((t.s == t.s.amax(-1, keepdim=True)) & seen).sum(-1)
    if do is not None:
        t.delta_o = t.delta_ref = t.delta
    return t


def _wants_shadow(policy: PrecisionPolicy, probe) -> bool:
    unrounded = policy.delta_from in ("o_fp32", "o_split", "o_redrawn")
    return probe is not None or unrounded or policy.delta_bias != 0


def _wants_stored(policy: PrecisionPolicy, dtype: torch.dtype, impl: str) -> bool:
    """Whether a tensor of that dtype cannot hold o as the policy stores it; PyTorch's o is as q."""
    as_q = Format.parse(str(dtype).removeprefix("torch."))
    held = policy.o.fmt.within(as_q) and not (policy.o.by_row and as_q.exponent_bits < 8)
    return impl == "triton" and not held


@torch.library.custom_op("lowprec::attention", mutates_args=())
def attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, probe: torch.Tensor | None,
    policy: str, causal: bool, scale: float, tile: int, impl: str, seed: int,
    dense: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    keys: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    draw: torch.Tensor | None = None, offset: int = 0, window: int = 0, softcap: float = 0.0,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(o, o_stored, o_fp32, lse, ties); empty tensors stand for what is not needed.

    dense to window: the parts of a lowered `Mask` and of `Scores`. draw: (1,), the seed of dropout.
    """
    p = PrecisionPolicy.parse(policy)
    none = q.new_empty(0)
    mask = Mask(causal, offset, window, keys, None, dense)
    seed = seed if draw is None else check_seed(int(draw))
    if impl in KERNELS:
        out = triton().forward(
            q, k, v, p, causal, scale, tile or None, seed,
            stored=_wants_stored(p, q.dtype, impl), shadow=_wants_shadow(p, probe),
            ties=probe is not None, mask=mask, bias=bias,
        )  # fmt: skip
        if impl in HYBRIDS:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out[0].copy_(stock(q, k, v, causal, scale))
        return tuple(none.clone() if x is None else x for x in out)
    scores = Scores(scale, softcap, bias, sinks)
    t = eager(q, k, v, None, p, mask, scores, dropout, tile or None, impl, seed)
    # the backward of these two recomputes the forward, so nothing but o is kept
    o = t.o.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)  # as of a projected q
    return o, none, none.clone(), none.clone(), none.clone()


@attention_op.register_fake
def _(q, k, v, probe, policy, causal, scale, tile, impl, seed, *_):
    p = PrecisionPolicy.parse(policy)
    b, h, t, _ = q.shape
    d = v.shape[3]
    o = q.new_empty(b, t, h, d).transpose(1, 2)
    if impl not in KERNELS:
        return o, *(q.new_empty(0) for _ in range(4))
    wanted = (_wants_stored(p, q.dtype, impl), _wants_shadow(p, probe))
    stored, shadow = (
        torch.empty_like(o, dtype=torch.float32) if want else q.new_empty(0) for want in wanted
    )
    lse = q.new_empty(b, h, t, dtype=torch.float32)
    ties = torch.empty_like(lse, dtype=torch.int32) if probe is not None else q.new_empty(0)
    return o, stored, shadow, lse, ties


def stock(q, k, v, causal, scale, dense=None):
    """PyTorch's attention; it is told of shared keys where there are some, since not every backend
    takes them."""
    how = dict(enable_gqa=True) if k.shape[1] < q.shape[1] else {}
    if dense is None and causal and scale <= 0 and not q.is_cuda:  # PyTorch's would give NaN
        dense = causal_mask(q.shape[2], k.shape[2], q.device)
    if dense is not None:
        causal, how["attn_mask"] = False, dense
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **how)


def flash_backward(do, q, k, v, o, causal, scale):
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
    o_fp32: torch.Tensor, lse: torch.Tensor, ties: torch.Tensor, want_probe: bool, want_bias: bool,
    policy: str, causal: bool, scale: float, tile: int, impl: str, seed: int,
    dense: torch.Tensor | None, bias: torch.Tensor | None, keys: torch.Tensor | None,
    sinks: torch.Tensor | None, draw: torch.Tensor | None, offset: int, window: int,
    softcap: float, dropout: float,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """(dq, dk, dv, gradients of probe, bias and sinks); empty tensors for what is not wanted."""
    p = PrecisionPolicy.parse(policy)
    mask = Mask(causal, offset, window, keys, None, dense)
    seed = seed if draw is None else check_seed(int(draw))
    none = [q.new_empty(0) for _ in range(3)]
    if impl in KERNELS:
        dq, dk, dv, *_, sums = triton().backward(
            do, q, k, v, o, o_fp32, lse, ties, p, causal, scale, tile or None, seed, want_probe,
            mask=mask, bias=bias,
        )  # fmt: skip
        if impl == "sdpa_backward":
            if p.delta_from == "o_redrawn":
                fair = p.replace(o="bf16:stochastic")
                o = triton().forward(q, k, v, fair, causal, scale, tile or None, seed)[0]
            for ours, theirs in zip(
                (dq, dk, dv), flash_backward(do, q, k, v, o, causal, scale), strict=True
            ):
                ours.copy_(theirs)
        return dq, dk, dv, sums if want_probe else none[0], *none[1:]
    scores = Scores(scale, softcap, bias, sinks)
    t = eager(q, k, v, do, p, mask, scores, dropout, tile or None, impl, seed)
    dq, dk, dv = (g.to(q.dtype).contiguous() for g in (t.dq, t.dk, t.dv))
    if want_probe:
        gap = t.delta_o - t.delta_ref
        columns = (gap, gap.abs(), (t.ties > 1).float())
        none[0] = torch.stack([c.float().sum((0, 2)) for c in columns], -1)
    if want_bias:
        none[1] = t.dbias.to(bias.dtype).contiguous()
    if sinks is not None:
        none[2] = t.dsinks.to(sinks.dtype)
    return dq, dk, dv, *none


@_attention_backward.register_fake
def _(
    do, q, k, v, o, o_fp32, lse, ties, want_probe, want_bias, policy, causal, scale, tile, impl,
    seed, dense, bias, keys, sinks, *_,
):  # fmt: skip
    if impl in KERNELS:
        rows = (x.transpose(1, 2).shape for x in (q, k, v))
        grads = (q.new_empty(shape).transpose(1, 2) for shape in rows)
    else:
        grads = (x.new_empty(x.shape) for x in (q, k, v))
    shape = (q.shape[1], len(PROBE_COLUMNS)) if want_probe else (0,)
    return (
        *grads,
        q.new_empty(shape, dtype=torch.float32 if want_probe else q.dtype),
        bias.new_empty(bias.shape) if want_bias else q.new_empty(0),
        q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _setup_context(ctx, inputs, output):
    q, k, v, probe, *how = inputs
    ctx.known, ctx.rest = how[:6], how[11:]
    dense, bias, keys, sinks, draw = how[6:11]
    o, o_stored, o_fp32, lse, ties = output
    ctx.want_probe = probe is not None
    ctx.want_bias = bias is not None and ctx.needs_input_grad[11]
    ctx.save_for_backward(
        q, k, v, o_stored if o_stored.numel() else o, o_fp32, lse, ties, dense, bias, keys, sinks,
        draw,
    )  # fmt: skip
    ctx.set_materialize_grads(False)


def _backward(ctx, do, *_):
    if do is None:
        return (None,) * len(ctx.needs_input_grad)
    q, k, v, o, o_fp32, lse, ties, *parts = ctx.saved_tensors
    dq, dk, dv, dprobe, dbias, dsinks = _attention_backward(
        do.to(q.dtype), q, k, v, o, o_fp32, lse, ties, ctx.want_probe, ctx.want_bias, *ctx.known,
        *parts, *ctx.rest,
    )  # fmt: skip
    return (
        dq, dk, dv, dprobe if ctx.want_probe else None, *(None,) * 7,
        dbias if ctx.want_bias else None, None, dsinks if parts[3] is not None else None,
        *(None,) * 5,
    )  # fmt: skip


attention_op.register_autograd(_backward, setup_context=_setup_context)
