"""Which number of a forward pass leaves the range of its format first.

The runs of a campaign kept their weights at some steps (`TrainConfig.weights_at`). Each model reads
the batch of that step, and of each place that its numbers pass, in order, the largest is noted and
how many are not finite. One small table, after which the weights may go:

    python -m lowprec.studies.overflow runs/fp16
"""

from __future__ import annotations

import contextlib
import functools

import pandas as pd
import torch

from lowprec import entry
from lowprec.numerics.formats import round_to
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies.kept import table, tabulate
from lowprec.training.capture import observe
from lowprec.training.model import take_heads

COLUMNS = {
    "arm": "str", "seed": "int16", "step": "int32", "place": "str", "largest": "float32",
    "lost": "int64",
}  # fmt: skip


def largest(model, text, targets, amp) -> pd.DataFrame:
    """One row a place, in the order of the forward pass, `loss` last.

    text, targets: (B, T) int64. amp: as `lowprec.training.model.autocast` takes it. place: the name
    of a module, for what it returns; `blocks.i.qk` for the products of queries with the keys they
    see, before the scale, as the policy stores them. largest: of the finite numbers' sizes, 0 if
    none is. lost: how many are infinite or NaN.
    """
    found = []

    def about(place, x):
        finite = x.isfinite()
        size = x.float().abs().where(finite, 0.0).max().item()
        return dict(place=place, largest=size, lost=int((~finite).sum()))

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if not list(module.children()):
                hook = module.register_forward_hook(
                    lambda m, x, y, name=name: found.append(about(name, y))
                )
                stack.callback(hook.remove)
        seen = observe(model, text, targets, amp=amp)
    products = {
        f"blocks.{i}.qkv": about(
            f"blocks.{i}.qk", torch.cat([_products(s, *g) for g in s.groups], 1)
        )
        for i, s in seen.items()
    }
    rows = [row for each in found for row in (each, products.get(each["place"])) if row]
    return pd.DataFrame([*rows, about("loss", seen[0].loss)])


def _products(seen, policy: str, heads) -> torch.Tensor:
    q, k = (take_heads(x, heads, seen.q.shape[1]).float() for x in (seen.q, seen.k))
    site = PrecisionPolicy.parse(policy).s
    return round_to((q @ k.mT).tril(), site.fmt, "nearest_even")


compare = functools.partial(table, largest, COLUMNS)
"""`largest` of the kept weights of all runs in a folder; see `lowprec.studies.kept.table`."""


def main(argv: list[str] | None = None) -> None:
    """Note the largest numbers of the forward pass in the kept weights of a campaign's runs."""
    tabulate(argv, main.__doc__, compare, 32, "overflow.parquet")


if __name__ == "__main__":
    entry(main)
