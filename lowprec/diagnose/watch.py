"""The calls of attention of somebody's training step, measured while its backward passes by.

Inside one forward of the model, in its thread, four doors are watched, each for what goes through
no inner one: the operator of this package (`GPT`, `lowprec.sdpa`) and its impl="sdpa",
torch.nn.functional's scaled_dot_product_attention where it is called by that name, and
transformers' registry of attention functions (eager, flash, ...). A hook on each call's output sees
do, and measures before the gradient goes on: then the graph from q back to W_Q is still there.
Hooks change no gradient and nothing here draws random numbers.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.library import CustomOpDef

from lowprec.attention import operator
from lowprec.attention.masks import Mask
from lowprec.diagnose import measures
from lowprec.diagnose.calls import HIDDEN, NOTHING, Linears, here, plain_length
from lowprec.numerics.policy import FA2, PrecisionPolicy

OPERATOR = next(
    name
    for name, x in vars(operator).items()
    if isinstance(x, CustomOpDef) and x._qualname == "lowprec::attention"
)
PLAIN = ("q", "k", "v", "probe", "policy", "causal", "scale", "tile", "impl", "seed")
"""Its arguments without which it is no attention; any other that is set is of a mask or a score."""
UNLIKE = ("softcap", "position_bias", "s_aux", "cache", "head_mask", "cu_seq_lens_q", "bias",
          "sinks", "offset", "indices", "block_indices")  # fmt: skip
"""Arguments by which attention is another than is emulated here."""

SHORT = (torch.bfloat16, torch.float16)
USUAL = {torch.float16: FA2.replace(**dict.fromkeys(("p", "o", "p_bwd", "ds"), "fp16"))}
"""What production kernels do, where it is not FA2."""

FAILED = "the forward ended before its output"
SEVERAL = "several backward passes came through it"
NO_GRADIENT = "it has no gradient: its layer is frozen, or checkpointed with use_reentrant"

STEPS: list[Watch] = []
"""Those whose step is under way: in it nothing runs compiled."""
STANCE: list = []
"""What holds off compiled code in these steps, one at most."""
INSIDE: list[Watch] = []
"""Those whose forward is under way."""
REPLACED: list[tuple] = []


class Watch:
    """One forward and backward of a model whose calls of attention are measured.

    seen: what was seen of the forward whose backward came first, or while none has come of the
    last forward with gradients. Of it at most `sequences`, see `_fullest`, and their first `length`
    tokens are measured, which a causal model reads as if they were all.
    another: whether a call was left out that may be measured in another batch.
    called: whether a forward with gradients was seen.
    Dropout inside attention is left out of what is measured.
    """

    def __init__(self, model, policy=None, sequences=1, length=512, known=None):
        self.model = getattr(model, "_orig_mod", model)
        self.policy = None if policy is None else PrecisionPolicy.parse(policy)
        self.sequences, self.length = sequences, length
        self.known = defaultdict(weakref.WeakKeyDictionary) if known is None else known
        self.seen, self.back = Seen(), False
        self.called = self.another = False
        self.deeper = 0  # of its own calls of itself, how many are under way
        self.linears = Linears(self.model)
        self.hooks = [
            self.model.register_forward_pre_hook(Hook(self._begin)),
            self.model.register_forward_hook(Hook(self._end), always_call=True),
        ]
        if not STEPS:  # what is compiled calls neither hooks nor doors
            STANCE.append(torch.compiler.set_stance("force_eager"))
        STEPS.append(self)

    def stop(self):
        """Take everything away that was put in; the hooks on outputs stay until their backward."""
        self._end()
        for hook in self.hooks:
            hook.remove()
        if self in STEPS:
            STEPS.remove(self)
        while not STEPS and STANCE:
            STANCE.pop().__exit__(None, None, None)

    def _begin(self, *_):
        if self in INSIDE and self.linears.here != here():
            return
        if self in INSIDE and _calls_itself(self.model):
            self.deeper += 1
            return
        self._end()  # of one that was interrupted
        if self.back or not torch.is_grad_enabled():
            return
        self.called, self.seen = True, Seen()
        self.linears.__enter__()
        _open(self)

    def _end(self, module=None, inputs=None, output=None):
        if self not in INSIDE or module is not None and self.linears.here != here():
            return
        if module is not None and self.deeper:
            self.deeper -= 1
            return
        self.deeper = 0
        _shut(self)
        self.linears.__exit__()
        if output is None and (module is None or sys.exception()):  # it failed: the next is watched
            self.called, self.another = False, True
            self.seen = Seen([""], left_out={0: FAILED})

    def saw(self, q, k, v, o, mask, causal, scale, policy=None, tile=None, turned=False, **how):
        """A call of attention in the watched forward; turned: o is (B, T, H, D)."""
        seen, flat = self.seen, q.dim() == 3  # (B·H, T, D): all are heads of one sequence
        layer = seen.count
        seen.names.append(self.linears.name())
        q, k, v = (x[None] if flat else x for x in (q, k, v))
        own = self.linears.before(q)
        if not o.requires_grad:
            seen.left_out[layer] = NO_GRADIENT
            return
        self.linears.after(o)
        for name in UNLIKE:
            if how.get(name) is not None and (torch.is_tensor(how[name]) or how[name]):
                seen.left_out[layer] = f"it has {name}"
                return
        if q.dim() != 4:
            seen.left_out[layer] = "its sizes are not those of plain attention"
            return
        k, v = (x.expand(len(q), -1, -1, -1) if len(x) == 1 else x for x in (k, v))
        dense = how.get("dense") if mask is None else mask
        rows = _fullest(dense, how.get("keys"), len(q), self.sequences, self.length)
        count, of_rows = len(rows), _taken(rows, len(q))
        mask, window = _said(of_rows(mask), causal, q, k, of_rows, how)
        length = plain_length(mask, causal, q, k, window, of_rows(how.get("position_ids")))
        if isinstance(length, str):
            self.another |= length == HIDDEN
            seen.left_out[layer] = length
            return
        length = min(length, self.length)
        if count * length < measures.BLOCKS or length < 2:  # the first sees one key
            self.another = True
            few = measures.BLOCKS if length > 1 else "2 of a sequence"
            seen.left_out[layer] = f"{count * length} tokens; {few} and more are needed"
            return
        part = (slice(None), slice(None), slice(length))
        full = [of_rows(x.detach())[part] for x in (q, k, v)]
        ours = policy is not None
        # autocast may cast inside of what is called, as its output then says
        dtype = next((x.dtype for x in (o, q) if x.dtype in SHORT), None)
        if not ours and dtype is None:
            seen.as_if.add(layer)
        dtype = dtype or torch.bfloat16
        policy = self.policy or PrecisionPolicy.parse(policy or USUAL.get(dtype, FA2))
        if policy.draws:
            seen.left_out[layer] = "its policy draws random bits"
            return
        own.known, own.rows = self.known[seen.module(layer)], rows

        def measure(do):
            if not self.back:
                self.seen, self.back = seen, True
            if self.seen is not seen:  # of another forward of this step
                return
            if layer in seen.found or layer in seen.left_out:  # one alone is not the step's
                seen.found.pop(layer, None)
                seen.left_out.setdefault(layer, SEVERAL)
                return
            do = do.transpose(1, 2) if turned else do[None] if flat else do
            # what a policy governs is read as it is, other attention as in training in 16 bits
            given = [x if ours else x.to(dtype) for x in (*full, of_rows(do)[part])]
            call = measures.Call(
                None, policy, q.shape[3] ** -0.5 if scale is None else scale, own,
                *given, full_q=full[0], full_k=full[1], tile=tile,
            )  # fmt: skip
            try:
                seen.found[layer] = measures.measure(call), own.of, count * length
            except Exception as error:  # a training goes on whatever is measured
                self.another = True
                seen.left_out[layer] = str(error) or type(error).__name__

        o.register_hook(measure)


@dataclass
class Seen:
    """Of one forward: the names of the modules that called attention, what was measured of the
    calls by their number, columns, what their gradients are of and of how many tokens, why others
    were left out, and which were read as if in BF16, though in more bits."""

    names: list = field(default_factory=list)
    found: dict = field(default_factory=dict)
    left_out: dict = field(default_factory=dict)
    as_if: set = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many calls of attention it made."""
        return len(self.names)

    def module(self, call: int) -> str:
        """Which call that is, by the module that makes it or, where none is known, its number."""
        name = self.names[call]
        again = self.names[:call].count(name) if name else call
        return f"{name}/call_{again}".lstrip("/") if again or not name else name


class Hook:
    """A hook that does nothing in a copy of the model, or in one that was saved whole."""

    def __init__(self, function=None):
        self.function = function

    def __call__(self, *given):
        if self.function is not None:
            self.function(*given)

    def __reduce__(self):
        return Hook, ()


def _calls_itself(model) -> bool:
    """Whether a forward of the model goes on around the one that begins."""
    frame, found = sys._getframe(), 0
    while frame is not None:
        here = frame.f_code is torch.nn.Module._call_impl.__code__
        found += here and frame.f_locals.get("self") is model
        frame = frame.f_back
    return found > 1


def _fullest(mask, keys, count: int, sequences: int, length: int) -> list[int]:
    """The sequences to measure: of those whose first two tokens are seen, as others are padded on
    the left or have one, as many as have the most tokens together, where each is cut to the
    shortest; the first ones where that is the same for all."""
    ends = []
    if keys is not None:
        ends.append(keys[:, 1].where((keys[:, 0] == 0) & (keys[:, 1] > 1), 0))
    if torch.is_tensor(mask) and mask.dim() > 1 and mask.numel():
        added = mask.is_floating_point() and mask.dim() > 2

        def shown(part):
            part = part > NOTHING if added else part.bool()
            return part.reshape(len(part), -1, part.shape[-1]).all(1)

        if mask.dim() == 2 or mask.shape[-2] == 1:
            own = shown(mask if mask.dim() == 2 else mask[..., 0, :])
            begun = own[:, :2].all(1)
        else:  # a token counts that sees itself and the first
            own = shown(mask.diagonal(dim1=-2, dim2=-1))
            own = own & shown(mask[..., : own.shape[1], 0])
            ahead = shown(mask[..., 0, 1:2]).any(1)  # some by padding whose rows are made visible
            begun = shown(mask[..., 1, :2]).all(1) & (~ahead | ahead.all())
        ends.append(own.int().cumprod(1).sum(1).where(begun, 0))
    ends = [x.long() for x in ends if len(x) == count]
    ends = torch.stack(ends).amin(0).clamp(max=length).tolist() if ends else []
    if not any(ends):
        return list(range(count))[:sequences]
    order = sorted((i for i in range(count) if ends[i]), key=lambda i: -ends[i])[:sequences]
    most = max(range(len(order)), key=lambda n: (n + 1) * ends[order[n]])
    return sorted(order[: most + 1])


def _taken(rows: list[int], count: int):
    """A function that takes these of `count` sequences of a tensor, and leaves what is for all."""
    some = slice(len(rows)) if rows == list(range(len(rows))) else rows
    return lambda x: x[some] if torch.is_tensor(x) and x.dim() and len(x) == count else x


def _said(mask, causal, q, k, of_rows, how):
    """The mask, of the sequences that are taken, and the window of a call, from the arguments of
    this package's operator as well."""
    window = how.get("sliding_window") or how.get("window")
    parts = {x: of_rows(how[x]) for x in ("keys", "dense") if how.get(x) is not None}
    if parts:
        mask = Mask(causal=causal, **parts).seen(q.shape[2], k.shape[2], q.device)
    return mask, window


# Doors: each calls what was there before and tells all watches whose forward it is in what it saw


def _open(watch):
    if not INSIDE:
        _replace(F, "scaled_dot_product_attention", _torch)
        _replace(operator, OPERATOR, _operator)
        _replace(operator, "stock", _stock)
        if registry := sys.modules.get("transformers.modeling_utils"):
            _replace(registry.AttentionInterface, "get_interface", _registry)
    INSIDE.append(watch)


def _shut(watch):
    INSIDE.remove(watch)
    while not INSIDE and REPLACED:
        setattr(*REPLACED.pop())


def _replace(where, name, door):
    REPLACED.append((where, name, getattr(where, name)))
    setattr(where, name, door(getattr(where, name)))


def _inside():
    """The watches whose forward is under way here, and not in another thread."""
    return [watch for watch in tuple(INSIDE) if watch.linears.here == here()]


def _counts():
    return {id(watch): watch.seen.count for watch in _inside()}


def _unseen(before):
    """The watches that have seen no call since `_counts` gave this."""
    return [watch for watch in _inside() if watch.seen.count == before.get(id(watch))]


def _torch(original):
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **how):
        if hasattr(attn_mask, "_dispatch"):  # a CausalBias: it calls the function by its name
            return attn_mask._dispatch(query, key, value, attn_mask, dropout_p, is_causal, **how)
        before = _counts()
        o = original(query, key, value, attn_mask, dropout_p, is_causal, **how)
        if torch.is_tensor(attn_mask) and attn_mask.dim() < 4:  # the last two: queries and keys
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        for watch in _unseen(before):  # `lowprec.sdpa` under this name goes by `_operator`
            watch.saw(query, key, value, o, attn_mask, is_causal, how.get("scale"))
        return o

    return attention


def _stock(original):
    def attention(q, k, v, causal, scale, dense=None):
        o = original(q, k, v, causal, scale, dense)
        for watch in _inside():
            watch.saw(q, k, v, o, dense, causal, scale)
        return o

    return attention


def _operator(original):
    names = list(inspect.signature(original._init_fn).parameters)

    def attention(*given):
        out = original(*given)
        call = dict(zip(names, given, strict=True))
        q, k, v, causal, scale = (call[name] for name in ("q", "k", "v", "causal", "scale"))
        how = dict(policy=call["policy"], tile=call["tile"] or None)
        others = {name: call[name] for name in names[len(PLAIN) :]}
        given, mask = [name for name, x in others.items() if torch.is_tensor(x)], None
        if given == ["bias"] and not causal and not others["bias"].requires_grad:
            mask = others.pop("bias")  # numbers that are added may be a mask
        for watch in _inside():
            watch.saw(q, k, v, out[0], mask, causal, scale, **how, **others)
        return out

    return attention


def _registry(original):
    def get_interface(interface, name, default):
        function = original(interface, name, default)

        def attention(module, query, key, value, attention_mask, *others, **how):  # also by name
            before = _counts()
            out = function(module, query, key, value, attention_mask, *others, **how)
            causal = how.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            causal = causal and name != "eager"  # there the mask says it all
            scale = how.get("scaling", others[1] if len(others) > 1 else None)
            for watch in _unseen(before):
                given = query, key, value, out[0], attention_mask, causal, scale
                watch.saw(*given, turned=True, **how)
            return out

        return attention

    return get_interface
