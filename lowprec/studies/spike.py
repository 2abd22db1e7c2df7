"""From a drift to a spike: how a head's norm grows, what Adam does to an error, what breaks.

The error e of W_Q's gradient moves W_Q by a multiple of kbar xbar^T, mean key and mean input, and
adds a multiple of kbar to every query: to all scores of a row alike, as far as keys are alike.
Softmax does not see that *common part* (`lowprec.diagnose.scores`); rounding does. Adam divides a
gradient by its own recent size, so an error counts by its share of the gradient. `growth` is of
recorded runs, `course` and `steps` of the windows of `lowprec.studies.signs`, the rest of captures.

Source: Qiu & Yao (2025), Sections 3.3.1 and 3.4; Kingma & Ba (2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from lowprec import UserError
from lowprec.attention.reference import emulate, oracle
from lowprec.diagnose import scores
from lowprec.evidence.heads import end_of, norms, take_offs
from lowprec.numerics.formats import BF16, round_to
from lowprec.studies.common import of_head
from lowprec.training.capture import Capture
from lowprec.training.probes import sketched_sum, spectral_norms

# Norms along a run


def growth(run, factor: float = 2.0, lag: int = 100, settled: int = 600) -> dict:
    """How σ(W_Q) of the first head to take off grows, from its take-off to the onset.

    factor, lag, settled: of `take_offs`. take_off, onset: steps; probes: between them; doubling:
    steps, and r2, of a straight line through log σ (NaN with fewer than three probes); fastest:
    growth between two probes over what Adam can do at most, see `speed_limit`; track: σ by step.
    Raises `UserError` if no head takes off.
    """
    found = take_offs(run, factor, lag, settled)
    if found.empty:
        raise UserError(f"no head of {run.name} takes off with factor={factor:g}: take less")
    layer, head, step = found.iloc[0]
    track = norms(run)[layer, head].loc[settled:]
    path, config = track.loc[step:], run.info["config"]
    doubling, r2 = _line(path) if len(path) > 2 else (np.nan, np.nan)
    return dict(
        take_off=int(step), onset=end_of(run), probes=len(path), doubling=doubling, r2=r2,
        fastest=track.diff().max() / config["probe_every"] / speed_limit(config), track=track,
    )  # fmt: skip


def _line(path: pd.Series) -> tuple[float, float]:
    slope, _ = np.polyfit(path.index, np.log(path), 1)
    return math.log(2) / slope, np.corrcoef(path.index, np.log(path))[0, 1] ** 2


def speed_limit(config: dict) -> float:
    """Largest Frobenius norm of one of Adam's steps for the W_Q of a head: lr, times the root of
    its weights, times the largest ratio of Adam's two averages, by Cauchy and Schwarz.

    config: of a run.json."""
    b1, b2 = config["beta1"], config["beta2"]
    ratio = (1 - b1) / math.sqrt(1 - b2) / math.sqrt(1 - b1**2 / b2)
    return ratio * _unit(config)


def _unit(config: dict) -> float:
    return config["lr"] * math.sqrt(config["n_embd"] ** 2 / config["n_head"])


# The last steps of a run


def course(window) -> pd.DataFrame:
    """The rows of the failing head in the query_error.parquet of a `signs.Window`, by step."""
    table = pd.read_parquet(window.run.path / "query_error.parquet")
    return of_head(table, *window.head).set_index("step", drop=False)


def adam_steps(run, errors: pd.DataFrame) -> pd.DataFrame:
    """Errors of `course` in units of Adam's step: clipped, over the recent size of the gradient.

    One size stands for all weights of the head, and there is no momentum."""
    config = run.info["config"]
    clip = config["clip"] / run.metrics.set_index("step").grad_norm.loc[errors.index]
    clip = clip.clip(upper=1)
    size = (clip * errors.grad_norm).pow(2).ewm(alpha=1 - config["beta2"]).mean().pow(0.5)
    return errors.assign(error_norm=errors.error_norm * _unit(config) * clip / size)


def steps(window) -> pd.DataFrame:
    """Growth of σ(W_Q) between any two neighbouring probes of a window, and over all of it.

    predicted: ‖Σ of `adam_steps`‖, measured; sigma_k: by what factor σ(W_K) grows. Index start,
    end; the last row is the whole window."""
    errors, run = course(window), window.run
    moved = adam_steps(run, errors)
    first, last = errors.index[[0, -1]]
    sigma = run.probes.set_index(["layer", "head"]).loc[window.head].set_index("step")
    sigma = sigma.loc[first:last]
    ends = [*zip(sigma.index, sigma.index[1:], strict=False), tuple(sigma.index[[0, -1]])]
    rows = {
        (start, end): dict(
            predicted=sketched_sum(moved.loc[start + 1 : end]).sum_norm.iloc[0],
            measured=sigma.sigma_q[end] - sigma.sigma_q[start],
            sigma_k=sigma.sigma_k[end] / sigma.sigma_k[start],
        )
        for start, end in ends
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def projected(window) -> float:
    """The length of the sum of a window's errors by random projections, from which `steps` takes
    its sums, over the recorded one."""
    errors = course(window)
    return float(sketched_sum(errors).sum_norm.iloc[0] / errors.sum_norm.iloc[-1])


def factor_off(found: pd.DataFrame) -> pd.Series:
    """Predicted over measured growth or its inverse, whichever is larger; inf if σ shrinks."""
    measured = found.measured.where(found.measured > 0, 0)
    with np.errstate(divide="ignore"):
        return np.exp(np.abs(np.log(found.predicted / measured)))


def last_over_first(errors: pd.DataFrame, column: str) -> float:
    """Median of a column in the last quarter of the steps over that in the first."""
    quarter = len(errors) // 4
    return float(errors[column][-quarter:].median() / errors[column][:quarter].median())


# Captured heads


@dataclass(frozen=True)
class Specimen:
    """A captured head with its q and k as they were before BF16.

    q, k: (1, 1, T, D) float64; p: their weights, exact; gradient: of W_Q, (D, C), exact with the
    recorded dO."""

    capture: Capture
    q: torch.Tensor
    k: torch.Tensor
    p: torch.Tensor
    gradient: torch.Tensor

    @property
    def site(self):
        """The format of the scores in the capture's policy, None for FP32."""
        policy = self.capture.policy
        return None if policy.s.is_fp32 else policy.s.fmt

    @property
    def centred(self) -> torch.Tensor:
        """k less its mean over the keys."""
        return self.k - self.k.mean(-2, keepdim=True)


def specimen(capture) -> Specimen:
    """A capture of one sequence and head."""
    q, k = scores.unrounded(capture)
    v, do, x = (capture.tensors[name] for name in ("v", "do", "x"))
    exact = oracle(q, k, v.double(), scale=capture.scale, do=do)
    p = scores.probabilities(q, k, capture.scale)
    return Specimen(capture, q, k, p, exact.dq[0, 0].mT @ x[0].double())


def broken(s: Specimen, keys=None, site=None) -> float:
    """Total variation between P from q and keys rounded to BF16, and exact P."""
    q, keys = (round_to(t, BF16) for t in (s.q, s.k if keys is None else keys))
    return scores.total_variation(s.p, scores.probabilities(q, keys, s.capture.scale, site))


def noisy(s: Specimen, noise, keys=None, site=None) -> float:
    """The same if the roundings were independent noise; noise: standard normal, (1, 1, T, T)."""
    keys = s.k if keys is None else keys
    deviation = scores.rounding_noise(s.q, keys, s.capture.scale, site)
    exact = scores.causal_scores(s.q, keys, s.capture.scale)
    return scores.total_variation(s.p, (exact + deviation * noise).softmax(-1))


def output_error(s: Specimen, keys=None, policy=None) -> float:
    """Error of O, as a policy computes it from rounded q and keys, against exact O: relative."""
    v, keys = s.capture.tensors["v"], s.k if keys is None else keys
    exact = s.p @ v.double()
    policy = policy or s.capture.policy
    o = emulate(s.q.bfloat16(), keys.bfloat16(), v, policy, scale=s.capture.scale).o
    return ((o.double() - exact).norm() / exact.norm()).item()


def gradient_error(head: Specimen, keys=None, **change) -> float:
    """Relative error of W_Q's gradient from rounded q and keys, δ from the rounded output unless
    `change`, fields of the policy, says otherwise."""
    v, do, x = (head.capture.tensors[name] for name in ("v", "do", "x"))
    policy = head.capture.policy.replace(**{"delta_from": "o"} | change)
    q, keys = head.q.bfloat16(), (head.k if keys is None else keys).bfloat16()
    t = emulate(q, keys, v, policy, do=do, scale=head.capture.scale)
    mine = t.dq[0, 0].double().mT @ x[0].double()
    return ((mine - head.gradient).norm() / head.gradient.norm()).item()


def sweep(s: Specimen, shifts, noise) -> pd.DataFrame:
    """A head whose keys are shifted along the mean query, so that the common part of its scores
    grows by each of `shifts`; exact attention does not change.

    Columns shift, common (mean score) and, for `FA2` and for `LOW`, which rounds the scores too,
    (policy, "measured") of `broken`, (policy, "noise") of `noisy`, (policy, "output").
    """
    along = s.q.mean(-2, keepdim=True)
    along = along / (s.capture.scale * along.square().sum(-1, keepdim=True))
    rows = []
    for shift in shifts:
        keys = s.k + shift * along
        common = scores.row_parts(s.q, keys, s.capture.scale)[0].mean().item()
        row = {"shift": shift, "common": common}
        for name, site in (("FA2", None), ("LOW", BF16)):
            row[name, "measured"] = broken(s, keys, site)
            row[name, "noise"] = noisy(s, noise, keys, site)
            row[name, "output"] = output_error(s, keys, name)
        rows.append(row)
    return pd.DataFrame(rows)


def threshold(found: pd.DataFrame, policy: str, target: float) -> float:
    """The common part at which `broken` reaches a target in a `sweep`, between points on log axes.

    Raises `UserError` if it never does, or from the start."""
    value = found[policy, "measured"].to_numpy()
    i = (value >= target).argmax()
    if value[i] < target or i < 1:
        raise UserError(f"target={target:g} is not reached within the shifts: choose another one")
    near = found.iloc[i - 1 : i + 1]
    known = np.log(near[policy, "measured"]), np.log(near.common)
    return math.exp(np.interp(math.log(target), *known))


def output_at(found: pd.DataFrame, policy: str, common: float) -> float:
    """Error of O at a common part, over that without a shift."""
    moved = found[found["shift"] > 0]
    there = np.interp(math.log(common), np.log(moved.common), moved[policy, "output"])
    return float(there / found[policy, "output"][found["shift"] == 0].iloc[0])


def pull(s: Specimen, push: float, generator, directions: int = 4) -> dict[str, float]:
    """Does exact attention see the drift, and does its gradient oppose it?

    flat, random: total variation of P when all queries move along the mean key, until the common
    part has grown by `push`, and as far in random directions, on the mean. gradient, error: signed
    shares of the norms of W_Q's exact gradient and of its error e along kbar xbar^T; part,
    wrong_part: the same, not divided.
    """
    scale, k_bar = s.capture.scale, s.k.mean(-2, keepdim=True)
    length = push / (scale * k_bar.norm())
    ways = torch.randn(directions, s.k.shape[-1], generator=generator, dtype=torch.float64)

    def change(way) -> float:
        q = s.q + length * way / way.norm()
        return scores.total_variation(s.p, scores.probabilities(q, s.k, scale))

    error = s.capture.query_error(s.capture.replay())[0].double()
    (own, part), (wrong, wrong_part) = (_along(s, e) for e in (s.gradient, error))
    return dict(
        flat=change(k_bar), random=np.mean([change(way) for way in ways]),
        gradient=own, error=wrong, part=part, wrong_part=wrong_part,
    )  # fmt: skip


def _along(s: Specimen, gradient) -> tuple[float, float]:
    k_bar, x_bar = s.k.mean((0, 1, 2)), s.capture.tensors["x"].double().mean((0, 1))
    part = k_bar @ gradient @ x_bar / (k_bar.norm() * x_bar.norm())
    return (part / gradient.norm()).item(), part.item()


def moved(s: Specimen, wrong_part: float, move: float) -> tuple[float, float]:
    """A move of W_Q by `move` times σ(W_Q) with the drift, against it if negative: the spread of
    scores in a row over what it was, and the total variation of exact P.

    wrong_part: of `pull`; descent subtracts the error."""
    x, k_bar, scale = s.capture.tensors["x"].double()[:, None], s.k.mean(-2, True), s.capture.scale
    x_bar = x.mean(-2, keepdim=True)
    along = (x @ x_bar.mT) * k_bar / (x_bar.norm() * k_bar.norm())
    size = spectral_norms(s.capture.tensors["w_q"].double()).item()
    q = s.q - np.sign(wrong_part) * move * size * along
    changed = scores.total_variation(s.p, scores.probabilities(q, s.k, scale))
    before, after = (scores.parts(some, s.k, scale)["spread"] for some in (s.q, q))
    return after / before, changed
