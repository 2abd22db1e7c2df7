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
import sys

import torch

from lowprec import UserError
from lowprec.attention.drop_in import sdpa
from lowprec.attention.masks import Mask, Scores, packed
from lowprec.numerics.policy import SAFE, PrecisionPolicy

REFUSED = ("cache", "head_mask", "output_attentions")
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
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and attention_mask is None and query.shape[2] > 1
        if attention_mask is None and cu_seq_lens_q is not None and query.shape[2] > 1:
            documents = packed(cu_seq_lens_q, query.shape[2])
            attention_mask, is_causal = Mask(causal=is_causal, documents=documents), False
        if position_bias is not None:
            attention_mask, is_causal = _biased(attention_mask, is_causal, position_bias, key), False
        extra = {} if attention is sdpa else {"module": module}
        if softcap is not None or s_aux is not None:
            extra["scores"] = Scores(softcap=softcap or 0.0, sinks=s_aux)
        o = attention(
            query, key, value, attention_mask, dropout, is_causal=is_causal, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1], policy=policy, impl=impl, **extra,
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), None

    forward.lowprec = name
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
