"""FP8 and FP4 inside attention, replayed on captured heads, beside BF16.

A replay is `emulate` under `FA2` with P, O or dS in another format, with or without a scale, and
with a delta of `CHANGES`. Scales are powers of two: for P the largest with which a weight of 1
fits, for dS the largest with which the largest number of the head fits, for O one a row.

    python -m lowprec.studies.eight_attention data/studies/eight_attention
                                                       DATE-replayed.parquet, DATE-weights.parquet

The rules of the predictions are claims of the page. Those on captures are judged on the four of the
larger GPT-2; the other seven had been replayed before the rules were written.
"""

from __future__ import annotations

import itertools
import math

import pandas as pd
import torch

from lowprec import entry
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import Format, round_to
from lowprec.numerics.policy import FA2, PrecisionPolicy
from lowprec.studies import dated
from lowprec.studies.rivals import exact_gradient, gradient_error
from lowprec.studies.row_sums import load_captures

PARAMETERS = dict(draws=2)
FORMATS = {"E4M3": "e4m3fn", "E5M2": "e5m2", "E2M1": "e2m1"}
CHANGES = {
    "stored δ": "", "clean δ": "+delta_from=o_fp32", "O′ in BF16": "+delta_from=o_prime",
    "δ from P∘dP": "+delta_from=dp", "refined δ": "+row_sum=refined",
}  # fmt: skip
BOTH = "P, O"
RANDOM = ":stochastic"


def fitting(fmt: str, largest: float) -> int:
    """The exponent of the largest power of two, up to 2^32, with which a number still fits."""
    room = math.floor(math.log2(Format.parse(fmt).max / largest))
    return max(-32, min(32, room))


def site(field: str, fmt: str, largest: float | None, rounding: str = "") -> str:
    """A change of a policy, "+p=e4m3fn@2^8:stochastic"; largest: None for no scale."""
    scale = "" if largest is None else f"@2^{fitting(fmt, largest)}"
    if field == "o" and scale:
        return f"+o={fmt}{rounding}@token,pow2"
    return f"+{field}={fmt}{scale}{rounding}"


def policies(largest_ds: float) -> pd.DataFrame:
    """All replays of a head, a row each: sites, format, scaled, rounding, change and the policy."""
    rows = [("", "BF16", False, "", change, f"FA2{field}") for change, field in CHANGES.items()]
    largest = {"p": 1.0, "o": 1.0, "ds": largest_ds}
    names = {"p": "P", "o": "O", "ds": "dS"}
    for (field, top), (name, fmt), scaled in itertools.product(
        largest.items(), FORMATS.items(), (False, True)
    ):
        text = "FA2" + site(field, fmt, top if scaled else None)
        rows.append((names[field], name, scaled, "", "stored δ", text))
    for field, top in largest.items():
        text = "FA2" + site(field, "e4m3fn", top, RANDOM)
        rows.append((names[field], "E4M3", True, RANDOM, "stored δ", text))
    for rounding, change in [*(("", change) for change in CHANGES), (RANDOM, "stored δ")]:
        text = "FA2" + "".join(site(field, "e4m3fn", 1.0, rounding) for field in ("p", "o"))
        rows.append((BOTH, "E4M3", True, rounding, change, text + CHANGES[change]))
    return pd.DataFrame(rows, columns=["sites", "format", "scaled", "rounding", "change", "policy"])


def _rms(x) -> float:
    return x.double().square().mean().sqrt().item()


def _vanish(sites: str, t) -> float:
    """The share of numbers of one site that are not zero before their rounding and are after it."""
    if sites == "P":
        before, after = t.p_unnorm, t.p
    elif sites == "O":
        before, after = t.o_fp32, t.o
    elif sites == "dS":
        before, after = (t.s - t.lse[..., None]).exp() * (t.dp - t.delta[..., None]), t.ds
    else:
        return math.nan
    return ((after == 0) & (before != 0)).sum().item() / (before != 0).sum().item()


def replayed(name: str, capture, draws: int, some=slice(None)) -> pd.DataFrame:
    """A row each of `policies`, those of `some`; columns after them:

    w_q: error of the gradient of W_Q, as a share of its norm, against float64 attention on the same
    inputs, rounded at random a root mean square over `draws`; delta: the same of delta, and vanish:
    of `_vanish`, both of the first draw.
    """
    tensors = {x: capture.tensors[x] for x in ("q", "k", "v", "do")}
    how, right = dict(scale=capture.scale), exact_gradient(capture)
    delta = oracle(**tensors, **how).delta
    plain = emulate(**tensors, policy=FA2, tile=capture.tile, **how)
    table = policies(plain.ds.abs().max().item()).iloc[some]
    found = []
    for row in table.itertuples():
        policy = PrecisionPolicy.parse(row.policy)
        ts = [
            emulate(**tensors, policy=policy, tile=capture.tile, seed=seed, **how)
            for seed in range(draws if row.rounding else 1)
        ]
        squares = [gradient_error(capture, t, right) ** 2 for t in ts]
        found.append(dict(
            w_q=math.sqrt(math.fsum(squares) / len(ts)),
            delta=_rms(ts[0].delta.double() - delta) / _rms(delta),
            vanish=_vanish(row.sites, ts[0]),
        ))  # fmt: skip
    about = pd.DataFrame(dict(capture=name, failing="healthy" not in name), index=table.index)
    return pd.concat([about, table, pd.DataFrame(found, index=table.index)], axis=1)


def seen(capture) -> tuple[float, float]:
    """How the rounding of a head's O' to BF16 goes with that of O, which dO is taken after: the
    correlation of the two errors with P and O in BF16, and with both in E4M3."""
    q, k, v = (capture.tensors[x] for x in ("q", "k", "v"))
    eight = "".join(site(field, "e4m3fn", 1.0) for field in ("p", "o"))
    outputs = [
        emulate(q, k, v, PrecisionPolicy.parse(text), capture.tile, scale=capture.scale)
        for text in ("FA2+p=fp32", "FA2", f"FA2{eight}")
    ]
    errors = torch.stack([(t.o - t.o_fp32).flatten() for t in outputs])
    return tuple(torch.corrcoef(errors)[0, 1:].tolist())


SCALES = {"E4M3": (0, 4, 8), "E5M2": (0, 8, 15), "E2M1": (0, 1, 2)}
"""Exponents of static scales of P."""


def weights(name: str, capture) -> pd.DataFrame:
    """What becomes of the weights P of a head, a row a format and scale.

    zero: the share of weights that a query sees and that vanish; mass: the share of all weight that
    they have; lean: what the weights of a row sum to too much, mean over rows.
    """
    q, k, v = (capture.tensors[x] for x in ("q", "k", "v"))
    t = emulate(q, k, v, FA2, capture.tile, scale=capture.scale)
    p, rows = t.p_unnorm, []
    for fmt, exponents in SCALES.items():
        for exponent in exponents:
            kept = round_to(p, Format.parse(FORMATS[fmt]).replace(scale=exponent))
            lost = (kept == 0) & (p > 0)
            rows.append(dict(
                capture=name, format=fmt, scale=exponent,
                zero=(lost.sum() / (p > 0).sum()).item(),
                mass=((p * lost).sum(-1) / t.l).double().mean().item(),
                lean=((kept - p).double().sum(-1) / t.l).mean().item(),
            ))  # fmt: skip
    return pd.DataFrame(rows)


def measure(draws: int) -> dict[str, pd.DataFrame]:
    """The tables `replayed` and `weights` of all captures."""
    captures = load_captures().items()
    return dict(
        replayed=pd.concat([replayed(*item, draws) for item in captures], ignore_index=True),
        weights=pd.concat([weights(*item) for item in captures], ignore_index=True),
    )


def main(argv: list[str] | None = None) -> None:
    """Replay captured heads with P, O and dS in FP8 and FP4."""
    dated.command("eight_attention", main.__doc__, measure, argv, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
