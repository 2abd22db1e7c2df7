"""One line that gives a Hugging Face transformers model the attention of a policy.

    from lowprec.attention import huggingface
    huggingface.register()
    model.set_attn_implementation("lowprec")       # or attn_implementation= where it is made
    huggingface.check(model)                       # is every layer's attention ours?

The library keeps a registry of attention functions by name; this adds one, with the masks of
transformers' own *sdpa*: padding on either side, windows, packed sequences and static caches arrive
as masks. `tests/test_huggingface.py` lists the models that were tried. Needs transformers.
"""

from __future__ import annotations

import inspect

import torch

from lowprec import UserError
from lowprec.attention.drop_in import sdpa
from lowprec.attention.masks import Mask, Scores, packed
from lowprec.numerics.policy import SAFE, PrecisionPolicy

REFUSED = ("cache", "head_mask", "output_attentions", "indices", "block_indices", "sinks")
"""Arguments of the registry's functions that change attention, or ask for its weights."""
OWN = ("softcap", "s_aux", "position_bias")
"""Those that `sdpa` has and PyTorch's signature has not."""


def register(name: str = "lowprec", policy=SAFE, impl: str = "auto", attention=sdpa) -> str:
    """Add attention with the roundings of `policy` to transformers' registry; returns its name.

    policy, impl: as in `lowprec.sdpa`. attention: what is called in its place, with the module as
    a further keyword, for those who want to see q, k and v; it gets no soft cap, sinks or position
    bias. A name may be registered again.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        raise UserError(
            "huggingface.register needs transformers 5; install lowprec[transformers]"
        ) from None
    policy = PrecisionPolicy.parse(policy)

    def forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
                is_causal=None, softcap=None, s_aux=None, position_bias=None, cu_seq_lens_q=None,
                **others):  # fmt: skip
        refused = [x for x in REFUSED if others.get(x) is not None and others[x] is not False]
        if attention is not sdpa:
            given = dict(zip(OWN, (softcap, s_aux, position_bias), strict=True))
            refused += [x for x in OWN if given[x] is not None]
        if refused:
            raise UserError(f"attention {name!r} does not support {refused[0]}; leave it out")
        if getattr(attention_mask, "is_causal_alone", False):
            attention_mask, is_causal = None, True
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and attention_mask is None and query.shape[2] > 1
        if cu_seq_lens_q is not None and query.shape[2] > 1:
            documents = packed(cu_seq_lens_q, query.shape[2])
            attention_mask = Mask(causal=is_causal, documents=documents, dense=attention_mask)
            is_causal = False
        if position_bias is not None:
            shape = query.shape[2], key.shape[2]
            attention_mask, is_causal = (
                _biased(attention_mask, is_causal, position_bias, shape),
                False,
            )
        extra = {} if attention is sdpa else {"module": module}
        if softcap is not None or s_aux is not None:
            extra["scores"] = Scores(softcap=softcap or 0.0, sinks=s_aux)
        o = attention(
            query, key, value, attention_mask, dropout, is_causal=is_causal, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1], policy=policy, impl=impl, **extra,
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), None

    def mask(*given, **how):
        """transformers' own. Where that leaves the causal mask to the attention, whose module need
        not know that it is causal, one that says so, for as long as nobody cuts it."""
        made = sdpa_mask(*given, **how)
        if made is None and how.get("allow_is_causal_skip", True) and how.get("q_length") != 1:
            made = sdpa_mask(*given, **how | dict(allow_is_causal_skip=False))
            if made is not None and not torch.compiler.is_compiling():
                made.is_causal_alone = True
        return made

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    return name


def _biased(mask, causal: bool, bias, shape: tuple[int, int]):
    """A position bias and what else is known of the mask, as numbers to add."""
    if isinstance(mask, Mask):
        raise UserError("position_bias beside cu_seq_lens_q is not supported; leave one out")
    if causal:
        mask = torch.ones(shape, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def check(model, name: str = "lowprec") -> int:
    """Raise `UserError` where a layer's attention is not that of the registry; how many layers are.

    Bloom, Falcon, GPT-J and GPT-Neo have attention of their own, which `set_attn_implementation`
    leaves, and only transformers' log says so. name: what `register` was given. Judged by the
    source of the class that has the forward, of each module whose class has Attention in its name,
    and by the module's configuration, or the model's where it has none.
    """
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if "Attention" in type(module).__name__
        and not any("Attention" in type(m).__name__ for m in module.modules() if m is not module)
    ]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no module that is called Attention; look at it"
        )
    for path, module in layers:
        own = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
        try:
            source = inspect.getsource(own)
        except (OSError, TypeError):
            source = ""
        if "ALL_ATTENTION_FUNCTIONS" not in source:
            raise UserError(
                f"{path} is a {type(module).__name__}, which has attention of its own, outside "
                f"transformers' registry: {name!r} does not reach it"
            )
        config = getattr(module, "config", None) or getattr(model, "config", None)
        used = getattr(config, "_attn_implementation", None)
        if used != name:
            raise UserError(
                f"{path} uses {used!r}; call model.set_attn_implementation({name!r}) first"
            )
    return len(layers)
