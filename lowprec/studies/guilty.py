"""Guilty sets of roundings in captured heads, under the policy of the run that failed.

`sets` has the minimal sets of `lowprec.diagnose.bisect` and `tried` every set that the search for
the error of dQ met. Over a minute for all captures, so the page reads tables:

    python -m lowprec.studies.guilty data/studies/guilty        DATE-sets.parquet, -tried.parquet
"""

from __future__ import annotations

import math

import pandas as pd
import torch

from lowprec import entry
from lowprec.attention import trace
from lowprec.attention.reference import oracle
from lowprec.diagnose import bisect
from lowprec.numerics.policy import FA2, SITES
from lowprec.studies import dated
from lowprec.studies.row_sums import base_of, load_captures

PARAMETERS = dict(within=bisect.WITHIN)
"""Those of the page."""
OTHERS = (0.5, 0.1)
"""Shares that are asked for besides."""
DELTAS = ("p", "l", "o_acc", "o", "dodo")
"""Fields that delta is made of, with stored delta."""


def measure(within: float) -> dict[str, pd.DataFrame]:
    """Both tables of all captures."""
    parts = [of_capture(name, capture, within) for name, capture in load_captures().items()]
    return {key: pd.concat([part[key] for part in parts], ignore_index=True) for key in parts[0]}


def of_capture(name: str, capture, within: float) -> dict[str, pd.DataFrame]:
    """Both tables of one captured head.

    Columns of both: capture, failing, base (FA2 or LOW); set, as `bisect.shown` writes it; size;
    left, the share of the error. sets, a row a minimal set, the small first and of these the one
    that leaves least, or one row without a set: of, within, modes, as `bisect.guilty` was asked;
    every, what all fields leave; redrawn, as `bisect.Guilty`. tried: of dQ, without modes.
    """
    base, policy = base_of(name)
    about = dict(capture=name, failing="healthy" not in name, base=base)
    replays, sets, tried = bisect.Replays(capture), [], {}
    shares = dict.fromkeys((within, *OTHERS))
    asked = [(of, share, False) for of in ("dq", "wq") for share in shares]
    for of, share, modes in (*asked, ("dq", within, True)):
        (found,) = bisect.guilty(replays, policy, of, share, modes=modes, draws=bisect.DRAWS)
        how = about | dict(of=of, within=share, modes=modes)
        ends = dict(every=found.left[found.whole], redrawn=found.redrawn)
        rows = [_row(one, left) for one, left in found.minimal] or [_row((), math.nan)]
        sets += [how | row | ends for row in rows]
        if of == "dq" and not modes:
            tried |= found.left
    tried = [about | _row(one, left) for one, left in tried.items()]
    return dict(sets=pd.DataFrame(sets), tried=pd.DataFrame(tried))


def _row(one, left) -> dict:
    return dict(set=bisect.shown(one), size=len(one), left=left)


def members(text: str) -> set[str]:
    """The items of a set as it is written."""
    return set(filter(None, text.strip("{}").split(", ")))


def by_capture(sets: pd.DataFrame, **how) -> pd.Series:
    """The minimal sets of each capture, a list of sets of items, of the rows that were asked so."""
    for column, value in how.items():
        sets = sets[sets[column] == value]
    grouped = sets.groupby("capture", sort=False).set
    return grouped.agg(lambda some: [members(one) for one in some if members(one)])


def alone(tried: pd.DataFrame) -> pd.DataFrame:
    """The one-field table: what each field alone leaves, a row a capture."""
    singles = tried[tried["size"] == 1]
    table = singles.assign(field=singles.set.str.strip("{}"))
    wide = table.pivot(index="capture", columns="field", values="left")
    return wide.reindex(tried.capture.unique())[[site for site in SITES if site in wide]]


def foretold(alone_left) -> float:
    """What fields leave together if their errors are independent, by what each leaves alone."""
    return math.sqrt(max(0.0, 1 - sum(1 - left**2 for left in alone_left)))


def parts(capture) -> dict[str, float]:
    """The two parts of FA2's error in a head: of P and dS, with O in FP32, and the rest, of O.

    in_o, in_delta: size of the former over that of the latter, in O and in rowsum(dO∘O),
    where dS has no part. cosine: between the two parts of the error of dQ."""
    inputs = [capture.tensors[name] for name in ("q", "k", "v", "do")]
    how = dict(tile=capture.tile, scale=capture.scale, impl="emulate")
    stored, clean = (trace(*inputs, FA2.replace(o=site), **how) for site in ("bf16", "fp32"))
    *qkv, do = inputs
    right = oracle(*qkv, scale=capture.scale, do=do)
    of_p, of_o = clean.o - right.o, stored.o.double() - clean.o
    dq = (clean.dq - right.dq).flatten(), (stored.dq.double() - clean.dq).flatten()
    return dict(
        in_o=(of_p.norm() / of_o.norm()).item(),
        in_delta=((do * of_p).sum(-1).norm() / (do * of_o).sum(-1).norm()).item(),
        cosine=torch.cosine_similarity(*dq, 0).item(),
    )


def main(argv: list[str] | None = None) -> None:
    """Search captured heads for the smallest sets of roundings that must go."""
    dated.command("guilty", main.__doc__, measure, argv, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
