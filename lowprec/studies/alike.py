"""How alike the tokens are in models of several arms, head by head (Qiu & Yao 2025 on QK-norm).

The runs of a campaign kept their weights at some steps (`TrainConfig.weights_at`). Each model reads
the first sequences of the batch of that step, the same in all arms of a seed, in FP32 and with
PyTorch's attention whatever the arm rounds, and of every head
`lowprec.diagnose.directions.head_cosines` is written into one small table, after which the weights
may go:

    python -m lowprec.studies.alike runs/alike
"""

from __future__ import annotations

import functools

import pandas as pd

from lowprec import entry
from lowprec.diagnose.directions import head_cosines
from lowprec.studies.kept import table, tabulate

COLUMNS = {
    "arm": "str", "seed": "int16", "step": "int32", "sequence": "int16", "layer": "int16",
    "head": "int16", "cos_r": "float32", "cos_pk": "float32", "cos_x": "float32",
    "k_common": "float32",
}  # fmt: skip


def _cosines(model, text, *_) -> pd.DataFrame:
    return pd.concat([head_cosines(model, row).assign(sequence=i) for i, row in enumerate(text)])


compare = functools.partial(table, _cosines, COLUMNS, impl="sdpa", policy="FA2", layers={})
"""`head_cosines` of the kept weights of all runs in a folder; see `lowprec.studies.kept.table`."""


def main(argv: list[str] | None = None) -> None:
    """Measure how alike the tokens are in the kept weights of a campaign's runs."""
    tabulate(argv, main.__doc__, compare, 4, "alike.parquet")


if __name__ == "__main__":
    entry(main)
