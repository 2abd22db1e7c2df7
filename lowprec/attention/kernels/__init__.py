"""Triton kernels: the GPU form of `lowprec.attention.reference.emulate`, with the policy as
constexprs.

`forward` and `backward` are the two entries; `check_supported` says which policies they honour
and raises, naming the field, for the rest. Nothing is autotuned and nothing falls back.
"""

from lowprec.attention.kernels.launch import backward, check_supported, forward

__all__ = ["backward", "check_supported", "forward"]
