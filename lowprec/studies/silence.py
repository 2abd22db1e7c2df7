"""How many rows of attention have lost their output to the floor under l, head by head.

The runs of a campaign kept their weights at some steps (`TrainConfig.weights_at`). Each model reads
the first sequences of the batch of that step under the run's own policy, forward and backward, and
its layers are then computed again with the same q, k and v and without the floor. What differs is
what the floor takes. One small table, after which the weights may go:

    python -m lowprec.studies.silence runs/untying
"""

from __future__ import annotations

import functools

import pandas as pd

from lowprec import entry
from lowprec.attention import trace
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies.kept import table, tabulate
from lowprec.training.capture import observe
from lowprec.training.model import take_heads

COLUMNS = {
    "arm": "str", "seed": "int16", "step": "int32", "layer": "int16", "head": "int16",
    "rows": "int32", "tied": "int32", "lost": "int32", "tied_lost": "int32", "o": "float32",
    "do": "float32", "eps": "float32",
}  # fmt: skip


def count(model, text, targets, amp: bool = True) -> pd.DataFrame:
    """One row a layer and head; `lost` rows have less than half of |O| without the floor, or none.

    text, targets: (B, T) int64. tied: rows with a tied maximum. o, do, eps: means over the rows of
    |O|, |dO| (Euclidean, dO of the mean loss) and |delta_o - delta_ref|.
    """
    found = []
    for layer, seen in observe(model, text, targets, amp=amp).items():
        for name, heads in seen.groups:
            policy = PrecisionPolicy.parse(name)
            given = (seen.q, seen.k, seen.v, seen.do)
            tensors = [take_heads(x, heads, seen.q.shape[1]) for x in given]
            how = dict(tile=seen.tile, impl=seen.impl, seed=seen.seed)
            t = trace(*tensors, policy, **how)
            bare = trace(*tensors[:3], None, policy.replace(l_floor=0.0), **how)
            size, whole = (x.o.float().norm(dim=-1) for x in (t, bare))
            tied, lost = t.ties > 1, ~(size >= 0.5 * whole)
            counts = dict(tied=tied, lost=lost, tied_lost=tied & lost)
            means = dict(o=size, do=tensors[3].float().norm(dim=-1))
            means |= dict(eps=(t.delta_o - t.delta_ref).abs())
            for i, head in enumerate(heads):
                row = dict(layer=layer, head=head, rows=tied[:, i].numel())
                row |= {key: int(x[:, i].sum()) for key, x in counts.items()}
                found.append(row | {key: x[:, i].mean().item() for key, x in means.items()})
    return pd.DataFrame(found)


compare = functools.partial(table, count, COLUMNS)
"""`count` of the kept weights of all runs in a folder; see `lowprec.studies.kept.table`."""


def main(argv: list[str] | None = None) -> None:
    """Count the rows without output in the kept weights of a campaign's runs."""
    tabulate(argv, main.__doc__, compare, 8, "silence.parquet")


if __name__ == "__main__":
    entry(main)
