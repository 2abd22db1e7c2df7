"""One line that gives a Hugging Face transformers model the attention of a policy.

    from lowprec import huggingface
    huggingface.register()
    model.set_attn_implementation("lowprec")       # or attn_implementation= where it is made

The library keeps a registry of attention functions by name; this adds one. Checked with GPT-2 and
Llama, with as many and with fewer heads of keys than of queries; models that go through the same
registry should work, and what `lowprec.sdpa` cannot do is an error. Needs transformers.
"""

from __future__ import annotations

from lowprec import UserError
from lowprec.attention.drop_in import sdpa
from lowprec.numerics.policy import SAFE, PrecisionPolicy

CHANGES_ATTENTION = ("softcap", "position_bias", "s_aux", "cache", "head_mask", "output_attentions")
"""Arguments of the registry's functions that change attention, or ask for its weights."""


def register(name: str = "lowprec", policy=SAFE, impl: str = "auto", attention=sdpa) -> str:
    """Add attention with the roundings of `policy` to transformers' registry; returns its name.

    policy, impl: as in `lowprec.sdpa`. attention: what is called in its place, with the module as
    a further keyword, for those who want to see q, k and v. A name may be registered again.
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
                is_causal=None, **others):  # fmt: skip
        for what in CHANGES_ATTENTION:
            if others.get(what) is not None and others[what] is not False:
                raise UserError(f"attention {name!r} does not support {what}; leave it out")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        extra = {} if attention is sdpa else {"module": module}
        o = attention(
            query, key, value, attention_mask, dropout,
            is_causal=is_causal and attention_mask is None and query.shape[2] > 1, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1], policy=policy, impl=impl, **extra,
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
