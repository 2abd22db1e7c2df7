"""What sixteen bits cost: gaps of the held-out loss in the records of `mixed_runs`.

A *gap* is the loss of one arm less that of another with the same seed, so with the same start and
the same batches. It is divided by the *spread*, the standard deviation of FP32's loss over its
seeds: below 1 it is less than what another start does. Intervals are at 95 %.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lowprec.evidence.claims import Measured
from lowprec.records.files import data_root
from lowprec.studies.deviation import Estimate, estimate
from lowprec.studies.mixed_runs import load, record, record_products
from lowprec.studies.small import TASKS


@dataclass(frozen=True)
class Record:
    """One model in the arms of `lowprec.studies.mixed.ARMS`; what `mixed_runs.load` returns."""

    about: dict
    ends: pd.DataFrame
    curves: pd.DataFrame

    @cached_property
    def loss(self) -> pd.DataFrame:
        """Held-out loss (nats), a row a seed, a column an arm; a run that is not finite guesses."""
        chance = math.log(self.about["config"].get("classes", 10) or 50_257)
        ends = self.ends.assign(loss=self.ends.loss.fillna(chance))
        return ends.pivot(index="seed", columns="arm", values="loss")

    @property
    def spread(self) -> float:
        return float(self.loss["fp32"].std())

    def gap(self, arm: str, base: str = "fp32") -> Estimate:
        """The mean gap, in spreads; its interval takes the spread as known."""
        return estimate(((self.loss[arm] - self.loss[base]) / self.spread).tolist())

    def of(self, gap: Estimate) -> Measured:
        """An estimate with the seeds of this record behind it, for a claim."""
        return Measured(gap.mean, len(self.loss), gap.interval)

    def ending(self, arm: str, column: str) -> pd.Series:
        """What the runs of an arm ended with, by seed; column: of `mixed_runs.train`."""
        return self.ends[self.ends.arm == arm].set_index("seed")[column]

    def away(self) -> pd.DataFrame:
        """Training loss less that of FP32 by (step, seed), a column an arm; means of ten steps."""
        loss = self.curves.pivot(index=["step", "seed"], columns="arm", values="loss")
        return loss.sub(loss["fp32"], axis=0)

    def left(self, arm: str, of: str, base: str = "fp32") -> Estimate:
        """The share of the mean gap of arm `of` to `base` that `arm` leaves, see `share`."""
        return share(self.loss[arm] - self.loss[base], self.loss[of] - self.loss[base])


def share(part, whole, draws: int = 10_000) -> Estimate:
    """The mean of some gaps over that of others, with the interval of a bootstrap over seeds.

    part, whole: (seeds,), the same seeds in order. Where the interval of the others' mean holds 0
    there may be nothing to have a share of, and that of the share is unbounded.
    """
    gaps = np.stack([part, whole], axis=1)
    rng = np.random.default_rng(0)
    means = gaps[rng.integers(len(gaps), size=(draws, len(gaps)))].mean(1)
    with np.errstate(divide="ignore"):  # a draw of seeds without a gap has no share: infinite
        shares = means[:, 0] / means[:, 1]
    low, high = np.quantile(shares, (0.025, 0.975))
    least, most = np.quantile(means[:, 1], (0.025, 0.975))
    if least <= 0 <= most:
        low, high = -np.inf, np.inf
    return Estimate(gaps.mean(0)[0] / gaps.mean(0)[1], low, high)


def read(folder: Path | None = None) -> dict[str, Record]:
    """Every record by the name of its task: from `folder` where it is there, else from data."""
    found = {name: folder and load(name, folder) or load(name) for name in TASKS}
    return {name: Record(*parts) for name, parts in found.items() if parts}


def read_products(folder: Path | None = None) -> dict:
    """The record of a GPU's casts and products, of `mixed_runs.record_products`."""
    paths = [each / "products.json" for each in (folder, data_root() / "mixed") if each]
    return json.loads(next(path for path in paths if path.exists()).read_text())


def make(folder: Path, device, names=("gpt", "text-many", "digits-many")) -> Path:
    """Make records anew, and that of casts and products, silently; returns the folder."""
    with contextlib.redirect_stdout(io.StringIO()):
        record_products(folder, device)
        for name in names:
            record(folder, name, TASKS[name], device=device)
    return folder


def size(gap: Estimate) -> Estimate:
    """The size of a gap; its interval begins at 0 if that of the gap holds 0."""
    low, high = sorted((abs(gap.low), abs(gap.high)))
    return Estimate(abs(gap.mean), 0.0 if gap.low < 0 < gap.high else low, high)


def largest(records, arm: str, base: str = "fp32", of=lambda gap: gap, pick=max) -> Measured:
    """The largest gap of several models, or with pick=min the smallest, and of its bounds.

    of: what is taken of each gap, such as `size`. n: the fewest seeds of a model.
    """
    gaps = [of(each.gap(arm, base)) for each in records]
    mean, *interval = (pick(bounds) for bounds in zip(*gaps, strict=True))
    return Measured(mean, min(len(each.loss) for each in records), tuple(interval))
