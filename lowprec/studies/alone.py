"""The errors of delta that one healthy model makes, one rounding at a time: do they add up alike?

The runs of a campaign kept their weights at some steps (`TrainConfig.weights_at`). Each model reads
sequences like those of that step's batch with attention in FP32 but for one of `WAYS`, forward and
backward, and what is wrong with delta in its second layer is summed into one small table, as in
`lowprec.studies.crossed`, after which the weights may go. As in a training with that rounding,
delta reads it in all layers. Which rows err, and so what becomes of W_Q, is not in the table:

    python -m lowprec.studies.alone runs/amount
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from scipy import stats

from lowprec import entry
from lowprec.studies import crossed
from lowprec.studies.kept import tabulate

ROUNDED = (
    "o=bf16", "o_acc=bf16", "o_acc=e8m8", "l=bf16", "p=bf16", "p=e8m6", "p=e8m5",
    "p=e8m5+l_from=p_rounded",
)  # fmt: skip
WAYS = {name: dict(policy=f"ALL_FP32+{name}", amp=True) for name in ROUNDED}
"""A name to what it changes of a run's config."""
compare = partial(crossed.compare, ways=WAYS, measure=partial(crossed.measure, exact=True))
"""As `lowprec.studies.crossed.compare`; errors are against attention in FP32."""


def beside(table: pd.DataFrame, column: str, way: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A sum of each model and way over that of one way, (seeds, ways), and half the width of its
    95 % interval, by a jackknife over the parts of the text."""
    parts = table.groupby(["seed", "part", "way"])[column].sum().unstack("way")
    whole = parts.groupby("seed").sum()
    without = whole.reindex(parts.index, level="seed") - parts
    ratios = without.div(without[way], axis=0)
    count = parts.groupby("seed").size()
    spread = ratios.groupby("seed").var(ddof=0).mul(count - 1, axis=0) ** 0.5
    quantile = stats.t.ppf(0.975, count - 1)
    return whole.div(whole[way], axis=0), spread.mul(quantile, axis=0)


def separated(table: pd.DataFrame, column: str, ways) -> pd.Series:
    """Whether each of these ways has a larger sum than each of the others, by seed."""
    whole = table.groupby(["seed", "way"])[column].sum().unstack("way")
    return whole[list(ways)].min(axis=1) > whole.drop(columns=list(ways)).max(axis=1)


def main(argv: list[str] | None = None) -> None:
    """Sum the errors of delta of one rounding at a time with the kept weights of a campaign."""
    tabulate(argv, main.__doc__, compare, 4096, "alone.parquet")


if __name__ == "__main__":
    entry(main)
