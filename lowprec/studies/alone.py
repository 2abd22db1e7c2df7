"""The errors of delta that one healthy model makes, one rounding at a time: do they add up alike?

The runs of a campaign kept their weights at some steps (`TrainConfig.weights_at`). Each model reads
sequences like those of that step's batch with attention in FP32 but for one of `WAYS`, forward and
backward, and what is wrong with delta in its second layer is summed into one small table, as in
`lowprec.studies.crossed`, after which the weights may go:

    python -m lowprec.studies.alone runs/amount
"""

from __future__ import annotations

from functools import partial

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


def main(argv: list[str] | None = None) -> None:
    """Sum the errors of delta of one rounding at a time with the kept weights of a campaign."""
    tabulate(argv, main.__doc__, compare, 4096, "alone.parquet")


if __name__ == "__main__":
    entry(main)
