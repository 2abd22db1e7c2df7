"""What the first directions of a gradient keep of its rounding error, as GaLore projects it, and
what trainings with GaLore come to.

Of a captured head's W_Q, from one sequence: G, the gradient (D, C) under the capture's own policy,
its error E against float64 attention of the same inputs, and V, the first D / 4 right singular
vectors of G. Kept of a matrix M is |M V|^2 / |M|^2. GaLore takes V of the rows of all heads and of
a whole batch, every 200 steps (Zhao et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch

from lowprec.attention.reference import oracle
from lowprec.evidence import heads, survival
from lowprec.studies import twins
from lowprec.studies.rivals import query_gradient


def share(matrix, directions) -> float:
    """Of the squared size of a matrix (D, C), what orthonormal directions (r, C) keep."""
    return ((matrix @ directions.mT).square().sum() / matrix.square().sum()).item()


def of_captures(captures: Mapping, seed: int = 0) -> pd.DataFrame:
    """A row a capture of one head: what is kept of the gradient, of its error, of one drawn from
    N(0, 1) in which each row of dQ is as long as its own, and of the inputs of all tokens."""
    rows, draw = {}, torch.Generator().manual_seed(seed)
    for name, capture in captures.items():
        t, how = capture.tensors, dict(scale=capture.scale, do=capture.tensors["do"])
        exact = oracle(t["q"], t["k"], t["v"], **how).dq.double()
        seen = capture.replay(impl="emulate", device="cpu").dq.double()
        noise = torch.randn(seen.shape, generator=draw, dtype=torch.float64)
        noise *= (seen - exact).norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        gradient, right, drawn = (query_gradient(capture, d)[0] for d in (seen, exact, noise))
        first = torch.linalg.svd(gradient, full_matrices=False)[2][: len(gradient) // 4]
        parts = dict(
            gradient=gradient, error=gradient - right, drawn=drawn, inputs=t["x"][0].double()
        )
        rows[name] = {part: share(m, first) for part, m in parts.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def trained(campaign) -> tuple[dict, dict]:
    """The arms of the campaign `galore`, those of AdamW as `adamw` and `adamw-fp32`, and what the
    rules on its runs ask, each empty where none is recorded.

    learns: the mean loss of the last 200 steps in FP32 less that with AdamW, by seed. later:
    whether FA2 explodes later than with AdamW, or not at all. second: whether the largest head at
    the last probe before each explosion of FA2 is in layer 1.
    """
    arms = survival.load_arms(campaign, ("fa2", "fp32", "half", "paper", "paper-fp32"))
    arms["adamw"] = survival.load_arms("mini")["fa2"]
    arms["adamw-fp32"] = survival.load_arms("production")["fp32"]
    asked = dict(learns={}, later={}, second={})
    if arms["fp32"].n:
        last = twins.beside(arms["fp32"], arms["adamw-fp32"], _end)
        asked["learns"] = (last.mine - last.base).to_dict()
    if arms["fa2"].n:
        asked["later"] = twins.outlasts(arms["fa2"], arms["adamw"]).to_dict()
        asked["second"] = {
            seed: heads.norms(run).iloc[-1].idxmax()[0] == 1
            for seed, run in arms["fa2"].by_seed.items()
            if run.explosion
        }
    return arms, asked


def _end(run) -> float:
    return run.metrics.loss.tail(200).mean()
