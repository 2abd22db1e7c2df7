"""The errors of delta that one model makes in several formats: is it the format, or the weights?

The runs of a campaign kept their weights at some steps (`TrainConfig.weights_at`). Each model reads
sequences drawn like the batch of that step in each of `WAYS`, whatever it was trained in, forward
and backward, and what its second layer rounds is summed into one small table, after which the
weights may go:

    python -m lowprec.studies.crossed runs/crossed
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from scipy import stats

from lowprec import UserError, entry
from lowprec.attention import trace
from lowprec.numerics.policy import ALL_FP32, LOW, SITES
from lowprec.studies.kept import table, tabulate
from lowprec.training.capture import observe

ROUNDED = LOW.replace(delta_from="o_fp32")
IN_FP16 = ROUNDED.replace(**{s: "fp16" for s in SITES if not getattr(LOW, s).is_fp32})
WAYS = {
    "LOW": dict(policy=str(ROUNDED), amp=True),
    "FP16": dict(policy=str(IN_FP16), amp="fp16"),
}
"""A name to what it changes of a run's config; delta reads an unrounded output in each."""
COLUMNS = {
    "arm": "str", "seed": "int16", "step": "int32", "part": "int16", "head": "int16",
    "rows": "int32", "tied": "int32", "eps": "float64", "eps_abs": "float64", "eps_sq": "float64",
    "e_sq": "float64",
}  # fmt: skip
LAYER = 1
"""Of layers counted from 0, the one in which these runs fail."""
LOSS_SCALE = 2.0**16
"""Of FP16: that of the recorded runs from step 2,020 to 4,020 or so."""
CHUNK = 32
"""Sequences that are read at once, as many as a batch has; the loss is their mean."""
PART = 8
"""Chunks whose sums make a row of the table."""


def measure(model, text, targets, amp, exact: bool = False) -> pd.DataFrame:
    """One row a part and head, sums over the rows of its sequences.

    text, targets: (B, T) int64, B a multiple of `CHUNK * PART`. amp: as
    `lowprec.training.model.autocast` takes it. tied: rows with a tied maximum. eps, eps_abs,
    eps_sq: delta_o - delta_ref, its size and its square, in the units of a chunk's mean loss. e_sq:
    the square of the output's error, |o - o_fp32|^2. exact: delta_ref and o_fp32 are those of
    attention in FP32 on the same inputs and dO, so that a rounding of P, which the model's own
    o_fp32 has too, is an error as well.
    Raises `UserError` if a sum is not finite.
    """
    scale = LOSS_SCALE if amp == "fp16" else 1.0
    parts = {}
    for i, (x, y) in enumerate(zip(text.split(CHUNK), targets.split(CHUNK), strict=True)):
        seen = observe(model, x, y, amp=amp, layers=[LAYER], loss_scale=scale)[LAYER]
        ((policy, _),) = seen.groups
        given = (seen.q, seen.k, seen.v, seen.do)
        t = trace(*given, policy, tile=seen.tile, impl=seen.impl)
        right = trace(*given, ALL_FP32, tile=seen.tile, impl=seen.impl) if exact else t
        eps = (t.delta_o - right.delta_ref).double() / scale
        e = (t.o - right.o_fp32).double().square().sum(-1)
        tied = (t.ties > 1).double()
        sums = torch.stack([z.sum((0, 2)) for z in (tied, eps, eps.abs(), eps.square(), e)], -1)
        if not sums.isfinite().all():
            raise UserError(f"the errors of sequences {i * CHUNK} and on are not finite, amp={amp}")
        parts[i // PART] = parts.get(i // PART, 0) + sums
    names = ["tied", "eps", "eps_abs", "eps_sq", "e_sq"]
    found = [
        pd.DataFrame(sums.cpu().numpy(), columns=names).rename_axis("head").assign(part=part)
        for part, sums in parts.items()
    ]
    rows = text.numel() // len(parts)
    return pd.concat(found).assign(rows=rows).reset_index()


def compare(
    folder, tokens, sequences: int, device: str = "cpu", ways=WAYS, measure=measure
) -> pd.DataFrame:
    """`measure` in each of some ways of the kept weights of all runs in a folder; the column `way`
    says which. The rest, and errors: as in `lowprec.studies.kept.models`."""
    if sequences < 1 or sequences % (CHUNK * PART):
        raise UserError(f"sequences={sequences} must be a multiple of {CHUNK * PART}")
    return pd.concat(
        table(measure, COLUMNS, folder, tokens, sequences, device, batch_size=sequences,
              layers={}, **way).assign(way=name)
        for name, way in ways.items()
    )  # fmt: skip


def totals(table: pd.DataFrame) -> pd.DataFrame:
    """eps, eps_abs and e_sq of a whole model, by way, arm and seed; h is eps over e_sq, a mean
    curvature of the loss along the output's error."""
    total = table.groupby(["way", "arm", "seed"])[["eps", "eps_abs", "e_sq"]].sum()
    return total.assign(h=total.eps / total.e_sq)


def in_fp16(table: pd.DataFrame) -> pd.DataFrame:
    """The `totals` of each model, by arm and seed, read in FP16 over the same read in LOW."""
    total = totals(table)
    return total.loc["FP16"] / total.loc["LOW"]


def nats(table: pd.DataFrame, block_size: int) -> pd.Series:
    """eps of a whole model a token, in nats, by way, arm and seed: it is recorded for the mean loss
    of a chunk. block_size: tokens of a sequence."""
    chunks = table.rows.iloc[0] * table.part.nunique() / (CHUNK * block_size)
    return totals(table).eps / chunks


def unsure(table: pd.DataFrame) -> pd.Series:
    """Half the width of the 95 % interval of eps over the parts of the text, in % of eps, by way,
    arm and seed."""
    keys = ["way", "arm", "seed"]
    parts = table.groupby([*keys, "part"]).eps.sum().groupby(keys)
    return 100 * stats.t.ppf(0.975, table.part.nunique() - 1) * parts.sem() / parts.mean()


def least(table: pd.DataFrame, arms) -> tuple[float, float, float]:
    """The least h of some arms `in_fp16`, and its 95 % interval, by a jackknife over the parts, of
    the logarithm."""
    ratio = in_fp16(table).h[list(arms)]
    parts = table.part.unique()
    without = [np.log(in_fp16(table[table.part != i]).h[ratio.idxmin()]) for i in parts]
    error = np.sqrt((len(parts) - 1) * np.var(without))
    reach = np.exp(stats.t.ppf(0.975, len(parts) - 1) * error)
    return ratio.min(), ratio.min() / reach, ratio.min() * reach


def main(argv: list[str] | None = None) -> None:
    """Sum the errors of delta in two formats with the kept weights of a campaign's runs."""
    tabulate(argv, main.__doc__, compare, 4096, "crossed.parquet")


if __name__ == "__main__":
    entry(main)
