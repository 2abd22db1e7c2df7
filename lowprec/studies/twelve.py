"""GPT-2 with twelve layers: what names the head that takes off first, and what such a head holds.

A head takes off when its σ(W_Q) doubles within LAG steps. Errors of δ are ε = delta_o - delta_ref.
"""

from __future__ import annotations

import numpy as np

from lowprec import UserError
from lowprec.attention.reference import oracle
from lowprec.diagnose.directions import principal
from lowprec.evidence.heads import sums, take_offs
from lowprec.studies.rivals import exact_gradient, gradient_error
from lowprec.studies.stabilised import retrace

LAG = 100
"""Steps within which σ(W_Q) grows, and that lie between the sums and a take-off."""


def first_head(run, factor: float = 2.0, ahead: int = 200) -> dict | None:
    """The head of a run that takes off first, and how large its errors of δ were before; None if no
    head takes off.

    Returns layer, head and step of the take-off; signed, Σε over the `ahead` steps that end LAG
    before; and its place among all heads, 1 the largest, by_sum (Σε) and by_size (Σ|ε|).
    Raises `UserError` if no probe lies in these steps.
    """
    found = take_offs(run, factor, LAG)
    if found.empty:
        return None
    layer, head, step = (int(x) for x in found[["layer", "head", "step"]].iloc[0])
    table = sums(run, step - LAG - ahead, step - LAG)
    place = table.rank(ascending=False).loc[layer, head].astype(int)
    return dict(
        layer=layer, head=head, step=step, signed=float(table.delta_bias.loc[layer, head]),
        by_sum=int(place.delta_bias), by_size=int(place.delta_abs),
    )  # fmt: skip


def specimen(capture, draws: int) -> dict:
    """What one captured head holds, over its sequence; errors are of W_Q's gradient.

    Returns walk, the running sum of ε along the tokens over Σ|ε|, (T,); energy, the share of all
    (PK)_i x_i^T that one direction has; error, with δ from the stored output, over the exact
    gradient; and over that error, left, with δ from O before it is rounded, and anew, with δ from
    each of `draws` outputs rounded at random. differs: the share of the captured O that the replay
    does not give. Raises `UserError` if an element is off by more than one rounding.
    """
    replayed = capture.replay()
    if not replayed.reproduced and replayed.max_ulp > 1:
        raise UserError(f"the replay of {capture.path.name} does not give the captured output")
    tensors, gradient = capture.tensors, exact_gradient(capture)
    exact = oracle(*(tensors[x] for x in "qkv"), scale=capture.scale, do=tensors["do"])

    def error(source, seed=None):
        return gradient_error(capture, retrace(capture, seed, delta_from=source), gradient)

    eps, stored = (replayed.delta_o - replayed.delta_ref)[0, 0].double().numpy(), error("o")
    return dict(
        walk=eps.cumsum() / np.abs(eps).sum(), error=stored, left=error("o_fp32") / stored,
        energy=principal(exact.p_bwd[0, 0] @ tensors["k"][0, 0].double(), tensors["x"][0])[1],
        anew=np.array([error("o_redrawn", seed) for seed in range(draws)]) / stored,
        differs=replayed.differs,
    )  # fmt: skip
