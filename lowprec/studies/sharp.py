"""Whether the sharpness of the logits warns of an explosion, in trainings that kept weights.

The sharpness is that of `lowprec.studies.bits`. Each kept model reads the batch that follows, but
in FP32 and with PyTorch's attention whatever its run rounds, so that arms differ in their weights
alone. The whole batch is read, as its loss is then the recorded one but for the run's roundings.

    python -m lowprec.studies.sharp data/runs/sharp
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from lowprec import entry
from lowprec.evidence.heads import HEAD
from lowprec.records.explosion import WINDOW, window_mean
from lowprec.records.runs import load_runs
from lowprec.studies.bits import sharpness
from lowprec.studies.kept import table, tabulate
from lowprec.studies.mixed_runs import losses
from lowprec.studies.warnings_tested import LAG

COLUMNS = dict(arm="str", seed="int16", step="int32", loss="float32", sharpness="float32")
SIGNALS = ["sharpness", "loss", "mean", "gradient", "sigma", "growth"]


@torch.no_grad()
def of_batch(model, text, targets, *_) -> pd.DataFrame:
    """loss and sharpness of a `GPT` without a soft cap on a batch, one row.

    text, targets: (sequences, T) int64. It holds the logits of one sequence a few times.
    """
    low, rise = [], []
    for row, target in zip(text.split(1), targets.split(1), strict=True):
        x = model.placed(model.token(row))
        for block in model.blocks:
            x = block(x)
        logits = F.linear(model.norm(x), model.token.weight)
        low.append(losses(logits, target))
        rise.append(sharpness(logits, target) * (1 + low[-1]))
    low, rise = (torch.cat(some).double().mean().item() for some in (low, rise))
    return pd.DataFrame(dict(loss=[low], sharpness=rise / (1 + low)))


compare = functools.partial(table, of_batch, COLUMNS, impl="sdpa", policy="FA2", layers={})
"""`of_batch` of the kept weights of all runs in a folder; see `lowprec.studies.kept.table`."""


def read(folder: Path) -> pd.DataFrame | None:
    """arm, seed, onset (NaN without one), step and SIGNALS, a row a kept step of each run; None
    until the campaign's sharpness.parquet is there."""
    if not (path := Path(folder) / "sharpness.parquet").is_file():
        return None
    found = pd.read_parquet(path).set_index(["arm", "seed"])
    runs = {(run.info["arm"], run.seed): run for run in load_runs(folder).run}
    parts = {key: signals(runs[key], found.loc[[key]]) for key in found.index.unique()}
    return pd.concat(parts, names=["arm", "seed"]).reset_index(["arm", "seed"])


def signals(run, found: pd.DataFrame) -> pd.DataFrame:
    """onset, step and SIGNALS of a run at its kept steps; found: step, loss and sharpness.

    mean, and gradient, a median: of the 50 steps before. sigma: at the last probe before. growth:
    the largest factor by which σ(W_Q) of a head grew in the LAG steps before.
    """
    norm = run.metrics.grad_norm.fillna(np.inf).clip(upper=1e30)  # a median of infinities is NaN
    sigma = run.probes.pivot(index="step", columns=HEAD, values="sigma_q")
    own = dict(
        mean=pd.Series(window_mean(run.metrics.loss)), gradient=norm.rolling(WINDOW).median(),
        sigma=sigma.max(axis=1), growth=sigma.div(sigma.set_axis(sigma.index + LAG)).max(axis=1),
    )  # fmt: skip
    own = {s: x.reindex(found.step - 1).to_numpy() for s, x in own.items()}
    onset = run.explosion.onset if run.explosion else np.nan
    found = found.reset_index(drop=True).assign(onset=onset, **own)
    return found[["onset", "step", *SIGNALS]]


def lower(found: pd.DataFrame, ahead: int = 200) -> pd.DataFrame:
    """The part of the healthy runs that is lower, a row a failing run, a column a signal: at the
    last kept step `ahead` of its onset or earlier; a tie is half. The mean of a column is the area
    under the ROC curve. found: of `read`; runs without so early a step are left out."""
    calm, failing = _sides(found)
    last = failing[failing.step <= failing.onset - ahead].groupby("seed").tail(1).set_index("seed")
    rows = {}
    for seed, mine in last.iterrows():
        mine, others = mine[SIGNALS], calm.loc[calm.step == mine.step, SIGNALS]
        rows[seed] = (others < mine).mean() + (others == mine).mean() / 2
    return pd.DataFrame.from_dict(rows, orient="index", columns=SIGNALS)


def leaves(found: pd.DataFrame) -> pd.DataFrame:
    """The kept step from which on a failing run is above all healthy ones, up to the first one at
    or after its onset, infinity without one; a row a failing run, a column a signal."""
    calm, failing = _sides(found)
    highest, rows = calm.groupby("step")[SIGNALS].max(), {}
    for seed, run in failing.groupby("seed"):
        run = run[run.step.shift(fill_value=-1) < run.onset].set_index("step")[SIGNALS]
        above = (run.fillna(np.inf) > highest.reindex(run.index))[::-1].cummin()
        rows[seed] = {s: min(above.index[above[s]], default=np.inf) for s in SIGNALS}
    return pd.DataFrame.from_dict(rows, orient="index", columns=SIGNALS)


def _sides(found):
    up = found.onset.notna()
    return found[(found.arm == "refined") & ~up], found[(found.arm == "fa2") & up]


def judged(found: pd.DataFrame | None) -> dict:
    """What each of the claims takes, a number, or true or false, a failing run; None before."""
    if found is None:
        return dict.fromkeys(("area", "growth", "loss", "after"))
    part, first = lower(found), leaves(found)
    return dict(
        area=part.sharpness, growth=part.growth - part.sharpness,
        loss=part.sharpness - part.loss, after=first.sharpness < first.loss,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Read loss and sharpness of the logits of kept weights, on the batch that follows each."""
    tabulate(argv, main.__doc__, compare, 32, "sharpness.parquet", study="sharp")


if __name__ == "__main__":
    entry(main)
