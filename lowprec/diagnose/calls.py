"""The calls of attention in a model: which weights made the queries, and a model seen through.

A call is traced back to W_Q by automatic differentiation, from q to what each linear map of the
layer put out, so that rotary positions, norms of q and fused projections need no special case.
"""

from __future__ import annotations

import functools
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lowprec import UserError
from lowprec.diagnose import measures
from lowprec.numerics.policy import FA2, PrecisionPolicy
from lowprec.training.model import GPT

UNLIKE = dict(
    softcap="a soft cap", position_bias="a bias of positions", s_aux="sinks", sinks="sinks",
    indices="a choice of keys", block_indices="a choice of keys",
)  # fmt: skip
"""Arguments of the registry's functions by which a model's attention is another than is emulated
here, in words."""
ASKED = ("cache", "head_mask", "output_attentions")
"""Those that a caller can leave out."""
HIDDEN = "its mask hides the first token"
BIASED = "its mask adds a bias to the scores"
NOTHING = -1000.0
"""What is added to a score that is to be none: this and less."""


class Linears:
    """What the linear maps of a model read and put out, from one call of attention to the next.

    A context manager: inside, hooks are on all modules in the model, and torch.nn.functional.linear
    tells of weights that no linear map of its own holds, as in nn.MultiheadAttention. The model
    itself has no hook: it may be going through its hooks when they are taken away. What runs
    elsewhere than it was entered, by `here`, is passed over.
    """

    listening: list[Linears] = []
    plain = None  # what torch has under that name while some listen

    def __init__(self, model: nn.Module):
        self.model = model
        self._clear()

    def _clear(self):
        self.inside, self.passed, self.last, self.attended = [], {}, (None, []), set()
        self.names = {}  # of the modules
        self.bare = {}  # of a module, of what has passed the maps that it has as functions
        self.outs = set()  # of the calls of attention

    def __enter__(self):
        self.hooks, self.inside, self.here = [], [self.model], here()
        self.names = {module: name for name, module in self.model.named_modules()}
        for module in list(self.names)[1:]:
            self.hooks.append(module.register_forward_pre_hook(self._enter))
            self.hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if not self.listening:
            Linears.plain, F.linear = staticmethod(F.linear), _linear
        self.listening.append(self)
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()
        self.listening.remove(self)
        if not self.listening:
            F.linear = self.plain
        self._clear()

    def _enter(self, module, inputs):
        if self.here == here():
            self.inside.append(module)

    def _leave(self, module, inputs, output):
        if self.here != here():
            return
        while self.inside and self.inside.pop() is not module:
            pass
        if module in self.attended:  # its maps are of no later call, by whatever layer
            self.attended.remove(module)
            for part in module.modules():
                self.passed.pop(part, None)
                self.bare.pop(part, None)
            self.last = (None, []) if module is self.last[0] else self.last
        floats = inputs and torch.is_tensor(output) and inputs[0].is_floating_point()
        if floats and _is_linear(module):
            self.passed.setdefault(module, []).append((inputs[0].detach(), _edge(output)))

    def heard(self, x, weight, y):
        """A call of `torch.nn.functional.linear`: of no module's forward that is that map."""
        if self.here != here() or not self.inside or _is_linear(self.inside[-1]):
            return
        if x.is_floating_point():
            ways = self.bare.setdefault(self.inside[-1], [])
            known = (m for m, *_ in ways if _same(m.weight, weight))
            ways.append((next(known, None) or Bare(weight), x.detach(), _edge(y)))

    def name(self) -> str:
        """Of the innermost module that is under way; "" where that is the model itself."""
        return next((self.names.get(module, "") for module in reversed(self.inside)), "")

    def before(self, q) -> Queries:
        """The way from q back, to the maps of the innermost module that has called any since the
        last call of attention, or to those that were that call's."""
        around = [
            (module, [(m, *way) for m in module.modules() for way in self.passed.get(m, ())]
             + [way for m in module.modules() for way in self.bare.get(m, ())])
            for module in reversed(self.inside)
        ]  # fmt: skip
        around = [(module, maps) for module, maps in around if maps]
        before, self.last = self.last, around[0] if around else self.last
        if around and before[0] is self.last[0]:
            self.last = before[0], self.last[1] + before[1]
        around.append(before)
        self.passed, self.bare = {}, {}
        self.attended.update(self.inside)
        return Queries(q, [maps for _, maps in around if maps], frozenset(self.outs))

    def after(self, o):
        """The output of that call: no later one's queries are traced through it."""
        if o.requires_grad:
            y = get_gradient_edge(o)
            self.outs.add((y.node, y.output_nr))


def here() -> tuple[int, int]:
    """The thread, and the backward pass or -1: a checkpointed layer runs again in one."""
    return threading.get_ident(), torch._C._current_graph_task_id()


class Bare:
    """A linear map that is a function, by its weight."""

    def __init__(self, weight):
        self.weight = weight


def _same(a, b) -> bool:
    """Whether they are one tensor, or the same view of one."""
    views = a._base is not None and a._base is b._base
    return a is b or views and a.is_set_to(b)


def _is_linear(module) -> bool:
    return getattr(getattr(module, "weight", None), "ndim", 0) == 2


def _linear(input, weight, bias=None):
    y = Linears.plain(input, weight, bias)
    for linears in Linears.listening:
        linears.heard(input, weight, y)
    return y


class Queries:
    """From a dQ to the norms of the gradients that it makes in the weights of q.

    around: (map, x, y) of the linear maps that may have made q, those of the innermost module
    first; y is where its output is in the graph, or None. The graph from q back to them must be
    there when it is called, with a dQ of the first rows of some sequences: those in `rows`, or the
    first. outs: where the outputs of attention before it are in the graph. known: a map to what
    `_columns` says of its outputs, if that was found before.
    """

    def __init__(self, q, around, outs=frozenset(), known=None):
        self.q, self.outs, self.known = q, outs, {} if known is None else known
        self.around = [[way for way in maps if way[2] is not None] for maps in around]
        self.maps = self.heads = self.owners = self.rows = None

    def __call__(self, dq):
        """(H,) of all sequences together and (B, H) of each, float64."""
        if self.maps is None:
            self._find()
        if not self.maps:
            each = dq.double().square().sum((2, 3))
            return each.sum(0).sqrt(), each.sqrt()
        if self.owners is None and len(dq) > 1:
            self._find_owners(dq)
        together = torch.zeros(self.q.shape[1], dtype=torch.float64, device=dq.device)
        each = together.new_zeros(len(dq), len(together))
        for some, heads in self._parts(dq):
            back = [g.flatten(0, -2) for g in self._back(some)]
            # of one sequence are all rows that its gradient reaches
            owned = self.owners or [[g.any(1).nonzero()[:, 0]] for g in back]
            for calls in self._calls(heads):
                whole, (own, head) = 0.0, heads[calls[0]]
                for b, norms in enumerate(each):
                    made = functools.reduce(torch.add, (
                        back[i][owned[i][b]][:, own].double().mT
                        @ self.maps[i][1].flatten(0, -2)[owned[i][b]].double()
                        for i in calls
                    ))  # fmt: skip
                    norms.index_add_(0, head, made.square().sum(1))
                    whole = whole + made
                together.index_add_(0, head, whole.square().sum(1))
        return together.sqrt(), each.sqrt()

    def _calls(self, heads) -> list[list[int]]:
        """The maps by number, together those that are calls of one map for the same heads, as its
        gradient is the sum of theirs."""
        found = []
        for i, (m, *_) in enumerate(self.maps):
            for calls in found:
                if self.maps[calls[0]][0] is m and _alike(heads[calls[0]], heads[i]):
                    calls.append(i)
                    break
            else:
                found.append([i])
        return found

    def _find_owners(self, dq):
        """Of each map the rows of each sequence of dQ, wherever they lie, found as heads are."""
        marks = torch.arange(1, dq.shape[3] + 1, device=dq.device).sin().expand(dq.shape)
        numbers = torch.arange(1, len(dq) + 1, device=dq.device)[:, None, None, None]
        codes = [0 for _ in self.maps]
        for bit in range(len(dq).bit_length()):
            for i, g in enumerate(self._back(marks * (numbers >> bit & 1))):
                codes[i] = codes[i] + (g.flatten(0, -2).any(1).long() << bit)
        self.owners = [
            [(code == b).nonzero()[:, 0] for b in range(1, len(dq) + 1)] for code in codes
        ]

    def _parts(self, dq):
        """dQ and of each map what `_columns` says; where an output is of several heads, as with a
        norm over all of q, head by head."""
        if self.heads is not None:
            yield dq, self.heads
            return
        for h in range(self.q.shape[1]):
            part = torch.zeros_like(dq)
            part[:, h] = dq[:, h]
            heads = [torch.full((w,), h, device=dq.device) for w in self.widths]
            yield part, [(slice(None), head) for head in heads]

    @property
    def of(self) -> str:
        """What the gradients are of."""
        if self.maps is None:
            self._find()
        return "W_Q" if self.maps else "dQ"

    def _find(self):
        """Which maps made q, and what `_columns` says of each."""
        self.maps = []
        for maps in self.around if self.q.requires_grad else []:
            once = len({m for m, *_ in maps}) == len(maps)  # else they may be of other heads
            if once and all(m in self.known for m, *_ in maps):
                self.maps = [way for way in maps if self.known[way[0]] is not None]
                self.heads = [self.known[m] for m, *_ in self.maps]
            else:
                self._mark(maps, self.known if once else {})
            if self.maps:
                return

    def _mark(self, maps, known):
        """Find them by gradients that are not zero: heads are numbered from 1, in binary."""
        n, d = self.q.shape[1], self.q.shape[3]
        direct = _direct(self.q, maps, self.outs)
        direct = [way for way in direct if way[0].weight.requires_grad] or direct
        kept = [m for m, *_ in direct]
        known.update({m: None for m, *_ in maps if m not in kept})
        if not direct:
            return
        marks = torch.arange(1, d + 1, device=self.q.device).sin().expand(self.q.shape)
        self.maps = direct
        whole = self._back(marks, allow_unused=True)
        self.maps = [way for way, g in zip(direct, whole, strict=True) if g is not None]
        whole = [g for g in whole if g is not None]
        codes = [torch.zeros(g.shape[-1], dtype=torch.long, device=g.device) for g in whole]
        numbers = torch.arange(1, n + 1, device=self.q.device)
        for bit in range(n.bit_length() if self.maps else 0):
            some = (numbers >> bit & 1)[:, None, None]
            for code, g, part in zip(codes, whole, self._back(marks * some), strict=True):
                on = part.flatten(0, -2).any(0)
                if not torch.equal(part, g * on):
                    self.widths = [len(code) for code in codes]
                    return  # an output is of several heads
                code += on.long() << bit
        self.heads = [_columns(code - 1) for code in codes]
        known.update(dict.fromkeys([m for m, *_ in maps]))
        known.update({m: head for (m, *_), head in zip(self.maps, self.heads, strict=True)})

    def _back(self, dq, allow_unused=False):
        """The gradient of the output of each map, as the map put it out."""
        whole = dq
        if dq.shape != self.q.shape:
            whole = torch.zeros_like(self.q, dtype=dq.dtype)
            rows = range(len(dq)) if self.rows is None else self.rows
            whole[list(rows), :, : dq.shape[2]] = dq
        outs = [y for _, _, y in self.maps]
        whole, size = _scaled(whole, self.q.dtype)
        made = torch.autograd.grad(
            self.q, outs, whole, retain_graph=True, allow_unused=allow_unused
        )
        return made if size == 1 else [g if g is None else g.double() / size for g in made]


def _columns(head):
    """Which outputs of a map are of a head, and of which. head: of each output, -1 for none."""
    own = (head >= 0).nonzero()[:, 0]
    return (slice(None), head) if len(own) == len(head) else (own, head[own])


def _alike(one, other) -> bool:
    """Whether two maps have the same columns."""
    return all(
        type(a) is type(b) and (torch.equal(a, b) if torch.is_tensor(a) else a == b)
        for a, b in zip(one, other, strict=True)
    )


def _edge(y):
    """Where y is in the graph, whatever is written into it later; of a view of all of another
    tensor where that is, which writing in place leaves in the graph."""
    if not y.requires_grad:
        return None
    base = y._base
    if base is not None and base.requires_grad and base.shape[-1:] == y.shape[-1:]:
        if base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous():
            y = base
    return get_gradient_edge(y)


PRODUCTS = {"MmBackward0": 0, "BmmBackward0": 0, "AddmmBackward0": 1, "BaddbmmBackward0": 1,
            "LinearBackward0": 0}  # fmt: skip
"""Nodes of a graph that are matrix products, to the place of their first factor."""


def _direct(q, maps, outs):
    """Of the maps those from whose output q is made by no other weights, nor by attention."""
    ends = {(y.node, y.output_nr) for *_, y in maps} | outs
    start = get_gradient_edge(q)
    ahead, seen = [(start.node, start.output_nr)], set()
    while ahead:
        at = ahead.pop()
        if at[0] is None or at in seen:
            continue
        seen.add(at)
        if at in ends:
            continue
        first = PRODUCTS.get(at[0].name())
        nodes = at[0].next_functions
        if first is None or None in (nodes[first][0], nodes[first + 1][0]):
            ahead += nodes
    return [way for way in maps if (way[2].node, way[2].output_nr) in seen]


def _scaled(x, dtype):
    """x in a dtype, times a power of two that keeps it from underflowing there, and that power."""
    if dtype != torch.float16:
        return x.to(dtype), 1
    size = 2.0 ** -int(x.abs().max().frexp().exponent)
    return (size * x).to(dtype), size


# A whole model in float32, with attention emulated


class _Emulated(torch.autograd.Function):
    """Attention that reads BF16 and rounds as the policy says, and measures on its way back."""

    @staticmethod
    def forward(ctx, q, k, v, call, done):
        ctx.save_for_backward(q, k, v)
        ctx.call, ctx.done = call, done
        measures.require_finite(call.layer, q, k, v)  # here, as the backward meets the last first
        given = (x.bfloat16() for x in (q, k, v))
        o = measures.forward(*given, call.policy, call.scale, call.tile)
        done()
        return o.bfloat16().to(q.dtype)  # the dtype of its inputs is what a caller gets

    @staticmethod
    def backward(ctx, do):
        full, call = ctx.saved_tensors, ctx.call
        given = [x.bfloat16() for x in (*full, do)]
        grads, seen = measures.backward(
            *given, full[0], full[1], call.policy, call.scale, call.tile, call.layer
        )
        call.seen = {name: x.float() if x.dim() == 4 else x for name, x in seen.items()}
        ctx.done()
        return *(g.to(x.dtype) for g, x in zip(grads, full, strict=True)), None, None


def emulated(model, tokens, policy, done=lambda: None) -> list[measures.Call]:
    """The calls of one forward and backward in the model's dtype, measured on the way.

    model: a transformers model or a GPT; tokens (B, T). done: called after every call of attention
    and after every one's backward. Layers have the numbers that the model gives them, or those of
    the calls. Raises `UserError` for what the probe is not for.
    """
    calls, linears = [], Linears(model)

    def attend(q, k, v, policy, scale=None, tile=None, layer=None):
        layer = len(calls) if layer is None else layer
        call = measures.Call(
            layer=layer, policy=PrecisionPolicy.parse(policy), tile=tile,
            scale=q.shape[3] ** -0.5 if scale is None else scale, norms=linears.before(q),
        )  # fmt: skip
        if call.policy.draws:
            raise UserError(f"policy {call.policy} draws random bits; the probe takes none that do")
        calls.append(call)
        o = _Emulated.apply(q, k, v, call, done)
        linears.after(o)
        return o

    with linears:
        loss = (_gpt_loss if isinstance(model, GPT) else _hub_loss)(model, tokens, policy, attend)
    if not calls:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UserError(
            f"no attention was called: {kind} has its own, as Bloom, Falcon, GPT-J and GPT-Neo do; "
            "the probe is for causal language models whose attention goes through transformers' "
            "registry"
        )
    torch.autograd.grad(loss, calls[0].norms.q, retain_graph=True)
    if len({call.layer for call in calls}) < len(calls):  # some share a number, or have none
        for number, call in enumerate(calls):
            call.layer = number
    return calls


def _hub_loss(model, tokens, policy, attend):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attention(
        module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
        **others,
    ):  # fmt: skip
        given = [name for name, x in others.items() if x is not None and x is not False]
        for name in given:
            if name in UNLIKE:
                raise UserError(
                    f"the scores of the model's attention have {UNLIKE[name]} ({name}): the probe "
                    "takes plain causal attention"
                )
            if name in ASKED:
                raise UserError(f"attention 'lowprec-probe' does not support {name}; leave it out")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        length = query.shape[2]
        if plain_length(attention_mask, causal, query, key) != length:
            raise UserError(_why_not(model, module, others.get("sliding_window"), length))
        number = getattr(module, "layer_idx", None)
        o = attend(query, key, value, policy or FA2, scaling, layer=number)
        return o.transpose(1, 2).contiguous(), None

    before = _implementations(model.config)
    AttentionInterface.register("lowprec-probe", attention)
    AttentionMaskInterface.register("lowprec-probe", sdpa_mask)
    try:
        model.set_attn_implementation("lowprec-probe")
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        if model.can_generate() and not model.config.is_encoder_decoder:
            raise
        raise UserError(
            f"{_no_language_model(model)}; it does not take tokens as their own labels "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        model.config._attn_implementation = before
        AttentionInterface._global_mapping.pop("lowprec-probe")  # it would keep the model
    if getattr(out, "loss", None) is None:
        raise UserError(f"{_no_language_model(model)}; it has no loss")
    return out.loss


def _no_language_model(model) -> str:
    return (
        f"a {type(model).__name__} is no causal language model with its head, as "
        "AutoModelForCausalLM reads them"
    )


def _implementations(config) -> dict:
    """Of a configuration and those in it, as its setter takes them."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    inner = {name: _implementations(part) for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation} | inner


def plain_length(mask, causal: bool, q, k, window=None, positions=None, count=None) -> int | str:
    """How many tokens from the first on attend to all before them and to nothing else, in the first
    `count` sequences; or why none do. Those of a longer sequence are as if it ended there.

    mask: None, of booleans or floats, (..., T, T) or of tokens (B, T); causal: what is said where
    that is None or of tokens; window: keys that a query sees; positions (B, T) of packed sequences.
    """
    length = q.shape[-2]
    if length != k.shape[-2]:
        return "its queries and keys differ in number"
    if mask is not None and not torch.is_tensor(mask):
        return f"its mask is a {type(mask).__name__}"
    if (mask is None or mask.dim() == 2) and not causal and length > 1:  # one token sees all
        return "it is not causal"
    ends = [length, window or length]
    if mask is not None:
        seen = mask[:count]
        if mask.is_floating_point() and mask.dim() > 2:
            if ((seen != 0) & ~(seen <= NOTHING)).any():
                return BIASED
            seen = seen == 0
        if mask.dim() > 2:
            seen = seen[..., :length].expand(*seen.shape[:-2], length, length)
            if seen[..., :1, 1:2].any():
                return "it is not causal"
            lower = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
            wrong = (seen.bool() != lower).reshape(-1, length, length).any(0).nonzero()
            ends.append(int(wrong.amax(1).min()) if len(wrong) else length)
        else:
            ends.append(int(seen.bool().int().cumprod(1).sum(1).min()))
    if positions is not None and positions.dim() == 2:
        breaks = (positions[:count].diff(dim=1) != 1).any(0).nonzero()
        ends.append(int(breaks.min()) + 1 if len(breaks) else length)
    return min(ends) or HIDDEN


def _why_not(model, module, window, length: int) -> str:
    """Why the probe does not take a call of attention; with the layers of a window."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    some = [str(i) for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    where = f"layers {', '.join(some)} have" if len(some) > 1 else f"layer {''.join(some)} has"
    where = where if 0 < len(some) < len(kinds) else "the model has"
    if window and window < length:
        return (
            f"{where} a sliding window of {window} tokens, and the sequences have {length}: the "
            f"probe takes causal attention without a window; with --length {window} and less there "
            "is none"
        )
    return "the probe is for causal attention; this model has another"


def _gpt_loss(model, tokens, policy, attend):
    for block in model.blocks:
        if policy is None and len(block.groups) > 1:
            raise UserError("heads of a layer have several policies; give one with --policy")

        def attention(q, k, v, probe=None, seed=0, block=block):
            return attend(q, k, v, policy or block.groups[0][0], tile=model.config.tile)

        block.attention = attention
    try:
        return model(tokens[:, :-1], tokens[:, 1:])
    finally:
        for block in model.blocks:
            del block.attention
