"""How wrong the gradient of a head's W_Q is in a capture, and how much of that is the error of δ.

δ off by ε_i moves a whole row of dS, which then sums to −ε_i and no longer to zero. dQ is off by
−c ε_i (PK)_i, along the mean key of the row, and the gradient by e = −c Σ_i ε_i (PK)_i x_iᵀ. E is
all that a policy makes of the gradient less what float64 attention makes of the same inputs.

Source: Qiu & Yao (2025), Equations (1) and (2).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pandas as pd
import torch

from lowprec.attention import trace
from lowprec.attention.reference import oracle
from lowprec.numerics.formats import BF16, round_to
from lowprec.numerics.policy import SITES, PrecisionPolicy
from lowprec.studies import delta
from lowprec.studies.rivals import query_gradient

SOURCES = ("o", "o_fp32", "o_split", "dp")
"""What δ may be computed from, in `left`."""


def residuals(capture) -> dict[str, float]:
    """What the paper's equations miss of exact attention with O alone rounded to BF16, float64.

    dq, w_q: of Equations (1) and (2), over the size of the error that they say. terms: of (2) over
    the sum of the sizes of its terms, which cancel.
    """
    exact, k = _exact(capture), capture.tensors["k"].double()
    rounded = (capture.tensors["do"].double() * round_to(exact.o, BF16)).sum(-1)
    dq = capture.scale * (exact.p_bwd * (exact.dp - rounded[..., None])) @ k
    said = -capture.scale * (rounded - exact.delta)[..., None] * (exact.p_bwd @ k)
    missed = query_gradient(capture, dq) - query_gradient(capture, exact.dq)
    missed = (missed - query_gradient(capture, said)).norm()
    x = capture.tensors["x"].double()[:, None]
    return dict(
        dq=((dq - exact.dq - said).norm() / said.norm()).item(),
        w_q=(missed / query_gradient(capture, said).norm()).item(),
        terms=(missed / (said.norm(dim=-1) * x.norm(dim=-1)).sum()).item(),
    )


def of_heads(captures: Mapping) -> pd.DataFrame:
    """The error of the gradient of captured heads, each under its own policy, a row a capture.

    reproduced: whether the replay gives the recorded output
    delta: root mean square of ε over that of δ
    common: length of the mean key over the root mean square distance of the keys from it
    error: ‖E‖ over the norm of the exact gradient
    of_delta, explained: ‖e‖/‖E‖; 1 − ‖E − e‖²/‖E‖²
    of_p: ‖e_p‖/‖E‖ of what rounding the weights inside O does to δ, which ε leaves out
    against, both: cosine of e and e_p; as `explained`, of e + e_p
    row_sums_out, stored: ‖E‖ with the row sums out of dS (`zero_sums`), or with dQ as it was before
        it was stored, over ‖E‖
    inputs: change of the exact gradient by the rounding of q, k and v, over its norm
    """
    rows = {name: _of_head(capture) for name, capture in captures.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def _of_head(capture) -> dict:
    exact, t = _exact(capture), capture.replay(impl="emulate", device="cpu")
    right = query_gradient(capture, exact.dq)
    wrong = query_gradient(capture, t.dq) - right
    by_o = _carried(capture, t, t.delta_o - t.delta_ref)
    by_p = _carried(capture, t, t.delta_ref - exact.delta)
    k = capture.tensors["k"].float()
    mean = k.mean(-2, keepdim=True)

    def over(matrix):
        return (matrix.norm() / wrong.norm()).item()

    def left(dq):
        return over(query_gradient(capture, dq) - right)

    return dict(
        reproduced=bool(t.reproduced),
        delta=_rms(t.delta_o - t.delta_ref) / _rms(t.delta_ref),
        common=(mean.norm() / (k - mean).square().sum(-1).mean().sqrt()).item(),
        error=(wrong.norm() / right.norm()).item(),
        of_delta=over(by_o), explained=1 - over(wrong - by_o) ** 2,
        of_p=over(by_p), both=1 - over(wrong - by_o - by_p) ** 2,
        against=((by_o * by_p).sum() / by_o.norm() / by_p.norm()).item(),
        row_sums_out=left(zero_sums(t, capture)),
        stored=left(capture.scale * t.ds.double() @ k.double()),
        inputs=((right - _from_unrounded(capture)).norm() / right.norm()).item(),
    )  # fmt: skip


def zero_sums(t, capture) -> torch.Tensor:
    """dQ of a trace with dS_ij − P_ij Σ_j dS_ij for dS, in float64, stored as the inputs are.
    (S, H', T, D)"""
    p = (t.s - t.lse[..., None]).double().exp()
    p, ds = p / p.sum(-1, keepdim=True), t.ds.double()
    dq = capture.scale * (ds - p * ds.sum(-1, keepdim=True)) @ capture.tensors["k"].double()
    return dq.to(capture.tensors["q"].dtype)


def left(captures: Mapping) -> pd.DataFrame:
    """The error of the gradient with one field of a head's policy changed, over that without.

    A row a change, a column a capture; NaN where its policy has that already. The changes are a
    site in FP32, called as in `lowprec.numerics.policy.SITES`, and "δ from " one of SOURCES.
    """
    changes = {site: {site: "fp32"} for site in SITES}
    changes |= {f"δ from {source}": {"delta_from": source} for source in SOURCES}
    policies = {"own": lambda capture: capture.policy} | {
        name: lambda capture, change=change: capture.policy.replace(**change)
        for name, change in changes.items()
    }
    error = delta.replays(captures, policies).error.unstack("capture")[list(captures)]
    same = pd.DataFrame(
        {n: {row: policies[row](c) == c.policy for row in changes} for n, c in captures.items()}
    )
    return (error.loc[list(changes)] / error.loc["own"]).mask(same).dropna(how="all")


def nearness(capture, policies: Mapping) -> dict[str, float]:
    """How many times as far from float64 δ from dO∘O is as δ from P∘dP: their errors' standard
    deviations over rows, for each policy by its name, whatever its δ reads."""
    right, found = _exact(capture).delta, {}
    for name, policy in policies.items():
        policy = PrecisionPolicy.parse(policy).replace(delta_from="dp")
        inputs = (capture.tensors[n] for n in ("q", "k", "v", "do"))
        t = trace(*inputs, policy, scale=capture.scale, tile=capture.tile, impl="emulate")
        of_o, of_dp = ((x.double() - right).std().item() for x in (t.delta_o, t.delta))
        found[name] = of_o / of_dp
    return found


def beside(run) -> pd.DataFrame:
    """‖e‖ over the norm of the gradient, of the whole batch, by step and (layer, head); of a run
    with a query_error.parquet. In a run whose δ is clean e is not in the gradient."""
    table = pd.read_parquet(run.path / "query_error.parquet")
    table = table.assign(share=table.error_norm / table.grad_norm)
    return table.pivot(index="step", columns=["layer", "head"], values="share")


def _exact(capture):
    inputs = (capture.tensors[name] for name in "qkv")
    return oracle(*inputs, scale=capture.scale, do=capture.tensors["do"])


def _carried(capture, t, error) -> torch.Tensor:
    """What an error of δ (S, H', T) does to the gradient of W_Q, by Equation (2)."""
    about = SimpleNamespace(delta_o=error.float(), delta_ref=0 * error.float(), policy=t.policy)
    return capture.query_error(about).double()


def _from_unrounded(capture) -> torch.Tensor:
    """The exact gradient on q, k and v as the projections make them, not rounded."""
    x = capture.tensors["x"].double()
    q, k, v = ((x @ capture.tensors[f"w_{n}"][0].double().mT)[:, None] for n in "qkv")
    return query_gradient(
        capture, oracle(q, k, v, scale=capture.scale, do=capture.tensors["do"]).dq
    )


def _rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()
