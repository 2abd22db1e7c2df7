"""Which query sees which key, and what happens to a score before the softmax.

`Mask` and `Scores` go beside q, k, v into `attention`, `emulate`, `oracle` and `lowprec.sdpa`. The
set is closed on purpose: each part has its place among the rounding sites of a policy, which a
Python function of the scores would not have.

    s = rnd_s(scale * rnd_s(q k^T));  with softcap c:  s = rnd_s(c tanh(s / c));
    with a bias:  s = rnd_s(s + bias);  -inf where the mask hides the key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lowprec import UserError

NEG_INF = float("-inf")


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees: those that every part of the mask shows. A row may see none.

    causal: query i sees no key after i + offset. offset: 0, as PyTorch's is_causal; S - L puts the
        last query at the last key. window: of these keys only the last so many, 0 for all.
    keys: (B, 2) integers, the first key of each sequence and the end of its keys: padding on the
        left and on the right. documents: (B, T) integers, for queries and keys alike, or a pair
        (B, L), (B, S): a query sees keys of its own document only.
    dense: boolean, True where a query sees a key, broadcast to (B, H, L, S).
    """

    causal: bool = False
    offset: int = 0
    window: int = 0
    keys: torch.Tensor | None = None
    documents: torch.Tensor | tuple | None = None
    dense: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("keys", "documents", "dense"):
            part = getattr(self, name)
            require_tensors(f"Mask({name}=...)", *(part if isinstance(part, tuple) else (part,)))
        if isinstance(self.window, float) or isinstance(self.offset, float):
            raise UserError(
                f"Mask(window={self.window}, offset={self.offset}): both count keys, so they are "
                "whole numbers"
            )
        if self.window < 0 or (self.window or self.offset) and not self.causal:
            raise UserError(
                f"Mask(window={self.window}, offset={self.offset}, causal={self.causal}): a window "
                "of at least 0 keys, and an offset, belong to causal=True"
            )
        if self.dense is not None and self.dense.dtype != torch.bool:
            raise UserError(
                f"Mask(dense=...) is boolean, not {self.dense.dtype}; numbers that are added to "
                "the scores are Scores(bias=...)"
            )

    def lowered(self, q, k) -> Mask:
        """The same with documents in `dense`, which is then (B or 1, H or 1, L or 1, S or 1).

        Raises `UserError` for a part whose shape does not fit q (B, H, L, D) and k (B, H', S, D).
        """
        b, n_q, n_k = q.shape[0], q.shape[2], k.shape[2]
        dense = None if self.dense is None else fitting("Mask(dense=...)", self.dense, q, k)
        if self.keys is not None and tuple(self.keys.shape) != (b, 2):
            raise UserError(f"Mask(keys=...) must be ({b}, 2), not {tuple(self.keys.shape)}")
        if self.documents is not None:
            pair = self.documents if isinstance(self.documents, tuple) else (self.documents,) * 2
            for ids, n in zip(pair, (n_q, n_k), strict=True):
                if tuple(ids.shape) != (b, n):
                    raise UserError(
                        f"Mask(documents=...) must be ({b}, {n}), not {tuple(ids.shape)}"
                    )
            same = pair[0][:, None, :, None] == pair[1][:, None, None, :]
            dense = same if dense is None else dense & same
        return replace(self, documents=None, dense=dense)

    @property
    def plain(self) -> bool:
        """Whether it is causal with the first query at the first key, or hides nothing."""
        parts = (self.keys, self.documents, self.dense)
        return not self.offset and not self.window and all(part is None for part in parts)

    def seen(self, n_q: int, n_k: int, device) -> torch.Tensor:
        """Boolean, True where a query sees a key: (L, S), or four dimensions that broadcast to
        (B, H, L, S). Of a `lowered` mask."""
        rows = torch.arange(n_q, device=device)[:, None] + self.offset
        columns = torch.arange(n_k, device=device)
        seen = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
        if self.causal:
            seen = columns <= rows
        if self.window:
            seen = seen & (columns > rows - self.window)
        if self.keys is not None:
            first, end = self.keys.to(device)[:, None, None, :].unbind(-1)
            seen = seen & ((columns >= first[..., None]) & (columns < end[..., None]))
        return seen if self.dense is None else seen & self.dense


@dataclass(frozen=True, eq=False)
class Scores:
    """What becomes of the product q k^T before the softmax.

    scale: by default 1/sqrt(D). softcap: c > 0 bounds scores, c tanh(s / c); 0 is off.
    bias: floats, broadcast to (B, H, L, S), added to s; it may need a gradient. -inf hides a key.
    sinks: (H,) floats, a logit per head of queries that takes part in the denominator alone, as a
        key whose value is 0 would; they may need a gradient.
    """

    scale: float | None = None
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self):
        if not 0 <= self.softcap < float("inf"):
            raise UserError(f"Scores(softcap={self.softcap}) must be finite, 0 (off) or more")
        for name in ("bias", "sinks"):
            require_tensors(f"Scores({name}=...)", getattr(self, name))

    def lowered(self, q, k) -> Scores:
        """The same with a bias of four dimensions; `UserError` for one that does not fit."""
        bias, sinks = self.bias, self.sinks
        if bias is not None:
            if not bias.is_floating_point():
                raise UserError(f"Scores(bias=...) takes floats, not {bias.dtype}")
            bias = fitting("Scores(bias=...)", bias, q, k)
        if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
            raise UserError(f"Scores(sinks=...) must be ({q.shape[1]},), not {tuple(sinks.shape)}")
        return replace(self, bias=bias)


def require_tensors(name: str, *given):
    """Raise `UserError` for one that is neither a tensor nor None."""
    for x in given:
        if x is not None and not torch.is_tensor(x):
            raise UserError(f"{name} takes a tensor, not a {type(x).__name__}")


def fitting(name: str, x, q, k):
    """x with four dimensions if it broadcasts to (B, H, L, S), or `UserError`."""
    wanted = (*q.shape[:3], k.shape[2])
    if x.dim() <= 4:
        four = x[(None,) * (4 - x.dim())]
        if all(n == 1 or n == w for n, w in zip(four.shape, wanted, strict=True)):
            return four
    raise UserError(f"{name} of shape {tuple(x.shape)} does not broadcast to {tuple(wanted)}")


def packed(cu_seqlens, n: int) -> torch.Tensor:
    """(1, n) the document of each of n tokens, from the first token of each document and n:
    [0, 3, 8] is two documents, of 3 and of 5 tokens."""
    places = torch.arange(n, device=cu_seqlens.device)
    return torch.bucketize(places, cu_seqlens[1:].contiguous(), right=True)[None]
