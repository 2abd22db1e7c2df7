"""The calls of attention of somebody's training step, measured while its backward passes by.

Inside one forward of the model three doors are watched, each for what goes through no inner one:
the operator of this package (`GPT`, `lowprec.sdpa`), torch.nn.functional's
scaled_dot_product_attention where it is called by that name, and transformers' registry of
attention functions (eager, flash, ...). A hook on each call's output sees do, and measures before
the gradient goes on: then the graph from q back to W_Q is still there. Hooks change no gradient
and nothing here draws random numbers.
"""

from __future__ import annotations

import contextlib
import sys
import weakref

import torch
import torch.nn.functional as F

from lowprec import UserError
from lowprec.attention import operator
from lowprec.diagnose import measures
from lowprec.diagnose.calls import Linears, plain_length
from lowprec.numerics.policy import FA2, PrecisionPolicy

UNLIKE = ("softcap", "position_bias", "s_aux", "cache", "head_mask", "cu_seq_lens_q")
"""Arguments of the registry's functions by which attention is another than is emulated here."""

USUAL = {torch.float16: FA2.replace(**dict.fromkeys(("p", "o", "p_bwd", "ds"), "fp16"))}
"""What production kernels do, where it is not FA2."""


class Watch:
    """One forward and backward of a model whose calls of attention are measured.

    found: a call's number to its columns and what its gradients are of; left_out: to the reason.
    called: whether a forward with gradients was seen. Only the first of them is watched, and of it
    the first `sequences` and `length` tokens, which a causal model reads as if they were all.
    """

    def __init__(self, model, policy=None, sequences=1, length=512, known=None):
        self.model = getattr(model, "_orig_mod", model)
        self.policy = None if policy is None else PrecisionPolicy.parse(policy)
        self.sequences, self.length = sequences, length
        self.known = weakref.WeakKeyDictionary() if known is None else known
        self.found, self.left_out, self.count, self.called = {}, {}, 0, False
        self.linears, self.doors = Linears(self.model), None
        self.hooks = [
            self.model.register_forward_pre_hook(self._begin),
            self.model.register_forward_hook(self._end, always_call=True),
        ]
        # what is compiled calls neither hooks nor doors; off for this forward, if there is any
        self.eager = torch.compiler.set_stance("force_eager") if _compiled(model) else None

    def stop(self):
        """Take everything away that was put in; the hooks on outputs stay until their backward."""
        self._end()
        for hook in self.hooks:
            hook.remove()
        if self.eager is not None:
            self.eager.__exit__(None, None, None)
            self.eager = None

    def _begin(self, *_):
        if self.called or not torch.is_grad_enabled():
            return
        self.called = True
        self.doors = contextlib.ExitStack()
        self.doors.enter_context(self.linears)
        self.doors.enter_context(_replaced(F, "scaled_dot_product_attention", self._torch))
        self.doors.enter_context(_replaced(operator, "_attention", self._operator))
        if registry := sys.modules.get("transformers.modeling_utils"):
            self.doors.enter_context(
                _replaced(registry.AttentionInterface, "get_interface", self._registry)
            )

    def _end(self, *_):
        if self.doors is not None:
            self.doors.close()
            self.doors = None

    # Doors: each calls what was there and says what it saw

    def _torch(self, original):
        def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **how):
            o = original(query, key, value, attn_mask, dropout_p, is_causal, **how)
            self._saw(query, key, value, o, attn_mask, is_causal, how.get("scale"))
            return o

        return attention

    def _operator(self, original):
        def attention(q, k, v, probe, policy, causal, scale, tile, impl, seed):
            out = original(q, k, v, probe, policy, causal, scale, tile, impl, seed)
            self._saw(q, k, v, out[0], None, causal, scale, policy=policy, tile=tile or None)
            return out

        return attention

    def _registry(self, original):
        def get_interface(interface, name, default):
            function = original(interface, name, default)

            def attention(module, query, key, value, mask, *others, **how):
                before = self.count
                out = function(module, query, key, value, mask, *others, **how)
                if self.count == before:
                    causal = how.get("is_causal")
                    causal = getattr(module, "is_causal", True) if causal is None else causal
                    scale = how.get("scaling", others[1] if len(others) > 1 else None)
                    self._saw(query, key, value, out[0].transpose(1, 2), mask,
                              causal and name != "eager", scale, **how)  # fmt: skip
                return out

            return attention

        return get_interface

    def _saw(self, q, k, v, o, mask, causal, scale, policy=None, tile=None, **how):
        layer, self.count = self.count, self.count + 1
        own = self.linears.before(q)
        if not o.requires_grad:
            self.left_out[layer] = "it has no gradient"
            return
        for name in UNLIKE:
            if how.get(name) is not None:
                self.left_out[layer] = f"it has {name}"
                return
        if q.dim() != 4 or v.shape[-1] != q.shape[-1]:
            self.left_out[layer] = "its sizes are not those of plain attention"
            return
        count = min(self.sequences, len(q))
        length = plain_length(
            mask, causal, q, k, how.get("sliding_window"), how.get("position_ids"), count
        )
        if isinstance(length, str):
            self.left_out[layer] = length
            return
        part = (slice(count), slice(None), slice(min(length, self.length)))
        full = [x.detach()[part] for x in (q, k, v)]
        ours = policy is not None
        policy = self.policy or PrecisionPolicy.parse(policy or USUAL.get(q.dtype, FA2))
        if policy.draws:
            self.left_out[layer] = "its policy draws random bits"
            return
        own.known = self.known

        def measure(do):
            # what a policy governs is read as it is, other attention as in training in 16 bits
            given = [x if ours else _short(x) for x in (*full, do[part])]
            call = measures.Call(
                layer, policy, q.shape[3] ** -0.5 if scale is None else scale, own,
                *given, full_q=full[0], full_k=full[1], tile=tile,
            )  # fmt: skip
            try:
                self.found[layer] = measures.measure(call), own.of
            except (UserError, RuntimeError) as error:  # a training goes on whatever is measured
                self.left_out[layer] = str(error)

        o.register_hook(measure)


def _short(x):
    return x if x.dtype in (torch.bfloat16, torch.float16) else x.bfloat16()


def _compiled(model) -> bool:
    """Whether torch.compile has taken the model, a part of it, or a method."""
    return any(
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(hasattr(x, "_torchdynamo_orig_callable") for x in vars(module).values())
        for module in (model, *model.modules())
    )


@contextlib.contextmanager
def _replaced(where, name, door):
    original = getattr(where, name)
    setattr(where, name, door(original))
    try:
        yield
    finally:
        setattr(where, name, original)
