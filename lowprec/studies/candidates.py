"""Changes of attention that are to keep δ right: what is left of its error, and of its signed sum.

The right δ is the one with which a row of dS sums to zero, for the P that the backward pass has.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from lowprec.attention import trace
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies.row_sums import base_of

CANDIDATES = {
    "delta_from=o_fp32": "clean δ",
    "delta_from=o_split": "δ from O and its residual",
    "delta_from=dp": "δ from P∘dP",
    "l_from=p_rounded": "ℓ from rounded p",
    "shift=dither(amplitude=0.6931)": "dithered maximum",
    "o=bf16:stochastic": "O rounded at random",
}
"""What each change of a base policy is called. The dither is ln 2, as it was trained."""


def balanced(t, v, do):
    """The δ with which each row of dS sums to zero, for the P of a trace.  (S, H, T) float64

    t: the trace; v, do: (S, H, T, D), as it was given them."""
    p = (t.s.double() - t.lse.double()[..., None]).exp()
    dp = do.double() @ v.double().transpose(-1, -2)
    return (p * dp).sum(-1) / p.sum(-1)


def errors(captures) -> pd.DataFrame:
    """The error ε of δ, less `balanced`, in captured heads, a row a capture and change.

    captures: {name: Capture}, each computed with the policy of the run that failed. Columns:
    capture, failing, base (FA2 or LOW), change ("" for none); error, root mean square of ε over the
    rows; eps, abs, squares: Σε, Σ|ε|, Σε². The CPU emulates.
    """
    rows = []
    for name, c in captures.items():
        base, policy = base_of(name)
        q, k, v, do = (c.tensors[n] for n in ("q", "k", "v", "do"))
        for change in ("", *CANDIDATES):
            changed = with_change(policy, change)
            t = trace(q, k, v, do, changed, scale=c.scale, tile=c.tile, impl="emulate")
            eps = t.delta - balanced(t, v, do)
            about = dict(capture=name, failing="healthy" not in name, base=base, change=change)
            sums = dict(eps=eps.sum(), abs=eps.abs().sum(), squares=eps.square().sum())
            sums["error"] = eps.square().mean().sqrt()
            rows.append(about | {key: x.item() for key, x in sums.items()})
    return pd.DataFrame(rows)


def with_change(base, change: str) -> PrecisionPolicy:
    """A policy with a change of CANDIDATES, or with none."""
    return PrecisionPolicy.parse(f"{base}+{change}".rstrip("+"))


def left(errors) -> pd.DataFrame:
    """The error with each change over that without it, from `errors`: a row a change and capture,
    columns capture, failing, base, change (in words), left."""
    about = ["capture", "failing", "base"]
    wide = errors.pivot(index=about, columns="change", values="error")
    shares = wide.div(wide[""], axis=0)[list(CANDIDATES)].rename(columns=CANDIDATES)
    return shares.rename_axis(columns="change").stack().rename("left").reset_index()


def trained_sums(runs, policy, first: int = 600, last: int = 1399) -> np.ndarray:
    """Σε/Σ|ε| of the runs with a policy, and the least that it is by the law, in %.  (runs, 2)

    Over steps `first` to `last`, or to an explosion, and all heads. ε is that of the stored O. The
    law: ε adds up to the tokens of a batch times Σε², which is at least (Σ|ε|)² over the rows.
    runs: of `lowprec.records.runs.load_runs`.
    """
    found = []
    for row in runs[runs.policy.map(str) == str(policy)].itertuples():
        p, config = row.run.probes, row.run.info["config"]
        until = min(last, row.duration - 1 if row.exploded else last)
        p = p[p.step.between(first + config["probe_every"] - 1, until)].astype(float)
        least = config["batch_size"] * config["block_size"] * (p.delta_abs**2 / p.rows).sum()
        found.append((p.delta_bias.sum() / p.delta_abs.sum(), least / p.delta_abs.sum()))
    return 100 * np.array(found)


def captured_sums(errors, tokens) -> tuple[float, float, float]:
    """Mean of Σε/Σ|ε| over captures, twice its error with independent rows, and the law, in %.

    errors: rows of `errors` with one base and change. tokens: {capture: tokens of its batch}."""
    noise = (errors.squares / errors["abs"] ** 2).sum() ** 0.5 / len(errors)
    law = errors.capture.map(tokens) * errors.squares / errors["abs"]
    return tuple(100 * x for x in ((errors.eps / errors["abs"]).mean(), 2 * noise, law.mean()))


def signed(errors, runs, tokens) -> pd.DataFrame:
    """The signed sums of each base and change that was trained, a row each, in %.

    Arguments as above. Columns: base, change; runs, those of the trained runs; own, whether the
    runs read the ε that they recorded; least, the law's for them, at least; share, twice, law: of
    `captured_sums`, NaN where a replay would draw the rounding anew.
    """
    rows = []
    for (base, change), some in errors.groupby(["base", "change"], sort=False):
        of_runs = trained_sums(runs, with_change(base, change))
        if not len(of_runs):
            continue
        row = dict(base=base, change=CANDIDATES.get(change, "none"), runs=of_runs[:, 0])
        row |= dict(own="delta_from" not in change, least=of_runs[:, 1])
        if "delta_from" in change or not change:
            row |= dict(zip(("share", "twice", "law"), captured_sums(some, tokens), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def norm_around(run, step: int) -> tuple[float, float, float]:
    """Largest σ(W_Q) of a run at the last probe before a step, interpolated at it, at the next."""
    top = run.probes.groupby("step").sigma_q.max()
    return top.loc[:step].iloc[-1], float(np.interp(step, top.index, top)), top.loc[step:].iloc[0]
