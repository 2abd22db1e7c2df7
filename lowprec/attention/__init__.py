"""Attention whose every rounding is a named choice: what it is, what a policy computes, and fast.

`oracle` in `reference` says what attention is, `emulate` there what a policy computes, `kernels`
compute it fast; `masks` says which query sees which key; `operator` is the one entry to all of
them, and `drop_in` has PyTorch's signature. `outside` takes row sums of dS out of dQ around a
kernel of somebody else.
"""

from lowprec.attention.masks import Mask, Scores
from lowprec.attention.operator import IMPLS, PROBE_COLUMNS, attention, trace

__all__ = ["IMPLS", "PROBE_COLUMNS", "Mask", "Scores", "attention", "trace"]
