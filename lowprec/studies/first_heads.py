"""Which head of a run takes off first, and what points at it beforehand.

A head takes off where its σ(W_Q) doubles within so many steps, `lowprec.evidence.heads.take_offs`.
ε = delta_o - delta_ref is what the rounding of the output puts into δ. Every run recorded Σε, Σ|ε|
and the rows whose largest score is tied, in each head, whether or not its gradient reads ε.

Source: Qiu & Yao (2025), who name the heads whose query weights grow in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from scipy import stats

from lowprec import UserError, entry
from lowprec.evidence.heads import HEAD, end_of, norms, rank_correlations, sums, take_offs
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.records.runs import load_run
from lowprec.records.tables import write_table
from lowprec.studies.kept import unwritten

LAYER = 1
"""Of layers counted from 0, the second: the one in which the small model fails."""
MEASURES = ("Σε", "Σ|ε|", "tied rows", "σ(W_Q)", "σ(W_K)")


def exploded(arms: Mapping) -> dict:
    """The runs with a confirmed explosion, by (label, seed); arms: {label: `survival.Arm`}."""
    return {
        (label, seed): run
        for label, arm in arms.items()
        for seed, run in arm.by_seed.items()
        if run.explosion and run.explosion.confirmed
    }


def firsts(runs: Mapping, **how) -> pd.DataFrame:
    """The first take-off of each run that has one, a row each by its key in `runs`.

    Columns run, layer, head, step; place, (layer, head); together, heads that take off at that
    probe; inside and outside, heads that do so before the onset in the layer and in others.
    how: of `take_offs`.
    """
    rows = {}
    for key, run in runs.items():
        found = take_offs(run, **how)
        if len(found):
            layer, head, step = map(int, found.iloc[0])
            inside = int((found.layer == LAYER).sum())
            rows[key] = dict(
                run=run, layer=layer, head=head, step=step, place=(layer, head),
                together=int((found.step == step).sum()), inside=inside,
                outside=len(found) - inside,
            )  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index")


def started(runs: Mapping, ahead: int, **how) -> pd.DataFrame:
    """`firsts` of runs by (arm, seed), as its page takes them.

    Raises `UserError` unless each run first takes off in the layer, and for an `ahead` that in no
    run of some arm lies between its start and `lag` steps before the take-off.
    """
    found = firsts(runs, **how)
    if len(found) < len(runs) or (found.layer != LAYER).any():
        raise UserError(
            f"with {', '.join(f'{name}={value:g}' for name, value in how.items())} not every run "
            "has its first take-off in the second layer; factor=1.7 to 2.8, lag=100, settled=600 do"
        )
    most = (found.step - how["lag"]).groupby(level=0).max().min()
    if not 1 <= ahead <= most:
        raise UserError(f"ahead={ahead} must be 1 to {most:,}, the steps before the take-offs")
    return found


def until_onset(arm, **how) -> pd.DataFrame:
    """Steps from the take-off of each head of the layer to the onset: a row a seed, a column a
    head, NaN for one that does not take off. arm: `survival.Arm`."""
    rows = {}
    for seed, run in arm.by_seed.items():
        found = take_offs(run, **how)
        inside = found[found.layer == LAYER].set_index("head").step
        rows[f"seed {seed}"] = end_of(run) - inside.reindex(range(arm.config.n_head))
    return pd.DataFrame(rows).T.rename(columns="head {}".format)


def measures(run, end: int, steps: int = 200) -> pd.DataFrame:
    """MEASURES of each (layer, head): sums over so many steps up to a probe, and norms there."""
    found = sums(run, end - steps, end)
    weights = run.probes[run.probes.step == end].set_index(HEAD)
    columns = found.delta_bias, found.delta_abs, found.tied_rows, weights.sigma_q, weights.sigma_k
    return pd.DataFrame(dict(zip(MEASURES, columns, strict=True)))


def places(table: pd.DataFrame, head: tuple[int, int]) -> pd.Series:
    """The place of a (layer, head) in each column, 1 for the largest; equals share the last one."""
    return (table >= table.loc[head]).sum()


def standing(runs: pd.DataFrame, back: int, steps: int = 200, layer=None) -> pd.DataFrame:
    """`places` of the head that takes off, by `measures` `back` steps before it does: a row each of
    `firsts` that was recorded for so long. layer: among its heads; by default among all."""
    found = {}
    for key, first in runs.iterrows():
        if first.step - back >= steps:
            table = measures(first.run, first.step - back, steps)
            found[key] = places(table if layer is None else table.loc[[layer]], first.place)
    return pd.DataFrame.from_dict(found, orient="index", columns=MEASURES)


def own_sums(runs: pd.DataFrame, begin: int, end: int) -> pd.DataFrame:
    """`heads.sums` of the head that takes off, from `begin` to `end` steps before it does: a row
    each of `firsts`."""
    found = {k: sums(f.run, f.step - begin, f.step - end).loc[f.place] for k, f in runs.iterrows()}
    return pd.DataFrame(found).T


def layer_sums(runs: pd.Series, after, until, column: str = "delta_bias") -> pd.DataFrame:
    """A column of `heads.sums` in each head of the layer: a row a run. after, until: numbers, or a
    Series of them by run."""
    steps = pd.DataFrame(dict(run=runs, after=after, until=until))
    return pd.DataFrame(
        {key: sums(f.run, f.after, f.until)[column][LAYER] for key, f in steps.iterrows()}
    ).T


def shares(table: pd.DataFrame) -> pd.DataFrame:
    """Each head's share of the positive sums of its row, of `layer_sums`."""
    positive = table.clip(lower=0)
    return positive.div(positive.sum(axis=1), axis=0)


def net(tables: Mapping, heads: Mapping) -> pd.DataFrame:
    """Σε of each layer and of one head, a row a run. tables: of `measures`, by run; heads: (layer,
    head) by run."""
    layers = pd.DataFrame({k: table["Σε"].groupby("layer").sum() for k, table in tables.items()}).T
    own = pd.Series({key: table["Σε"][heads[key]] for key, table in tables.items()})
    return layers.rename(columns="layer {}".format).assign(**{"first head": own})


def before_growth(run, healthy, head: tuple[int, int], times: float = 1.5) -> tuple[float, int]:
    """(σ(W_Q) of a head over that of a healthy run at the last probe but one before the onset, the
    step of the last probe before it first exceeds `times`)."""
    over = (norms(run)[head] / norms(healthy)[head]).dropna().iloc[:-1]
    return float(over.iloc[-1]), int(over[(over < times).cummin()].index[-1])


def single_steps(run) -> pd.DataFrame:
    """Σε of the single steps before the onset, of a run that keeps them; a row each head.

    Columns run, layer, head; positive, the share of the steps in which it is; total, their sum;
    begin, the first of these steps.
    """
    steps = run.onset[run.onset.step < end_of(run)].groupby(HEAD)
    found = steps.delta_bias.agg(positive=lambda net: (net > 0).mean(), total="sum")
    return found.assign(begin=steps.step.min()).reset_index().assign(run=run.name)


def last_steps(table: pd.DataFrame, run, head: tuple[int, int]) -> dict[str, float]:
    """What `table`, of `single_steps`, says of a run and its (layer, head).

    own, others: share of positive ones, in the head and in the heads of other layers; total: their
    sum in the head; begin: the first of these steps.
    """
    found = table[table.run == run.name].set_index(HEAD)
    own, others = found.loc[head], found.drop(index=head[0], level="layer")
    return dict(own=own.positive, others=others.positive.mean(), total=own.total, begin=own.begin)


def by_luck(hits, count: int = 6) -> float:
    """P of at least as many hits by drawing one of `count` heads at random for each, exact."""
    hits = list(hits)
    return float(stats.binomtest(sum(map(int, hits)), len(hits), 1 / count, "greater").pvalue)


# The order of the heads


def stretches(run, steps: int) -> pd.DataFrame:
    """Σε of the layer's heads in consecutive stretches of so many steps: (stretches, heads)."""
    own = run.probes[(run.probes.layer == LAYER) & (run.probes.step < end_of(run))]
    return own.groupby([own.step // steps, "head"]).delta_bias.sum().unstack()


def likeness(columns: Mapping) -> tuple[pd.Series, float]:
    """Mean rank correlation over heads between runs of different arms: of one seed, by seed, and
    of two. columns: {(arm, seed): Series by head}."""
    pairs = rank_correlations(columns)
    same = pairs.seed == pairs["other seed"]
    return pairs[same].groupby("seed").correlation.mean(), pairs[~same].correlation.mean()


def tendency(runs: Mapping, steps: int = 200, count: int = 5) -> dict[int, tuple[pd.Series, float]]:
    """`likeness` of the heads' Σε in each of the first `count` stretches of so many steps, by its
    first step, of the runs that last for it. runs: {(arm, seed): Run}."""
    each = {key: stretches(run, steps) for key, run in runs.items()}
    return {
        steps * i: likeness(
            {k: t.loc[i] for k, t in each.items() if end_of(runs[k]) >= steps * (i + 1)}
        )
        for i in range(count)
    }


def shared(place: Mapping, one: str, *others: str) -> dict:
    """Whether other arms have the head that one arm has in a seed, by (arm, seed), where both have
    one. place: {(arm, seed): head}."""
    seeds = [seed for arm, seed in place if arm == one]
    return {
        (other, seed): place[one, seed] == place[other, seed]
        for other in others
        for seed in seeds
        if (other, seed) in place
    }


def by_row_sum(campaigns, known, back: int = 400) -> dict[bool, pd.DataFrame]:
    """`standing` among all heads in the arms of campaigns that explode, pooled by whether the row
    sum ℓ is in BF16. Left out are known arms and repeats. Take-offs at every 200th step."""
    found = {True: [], False: []}
    for name, arm in ((name, arm) for arms in campaigns for name, arm in arms.items()):
        if arm.exploded and not name.endswith("_seen") and not any(arm is one for one in known):
            in_bf16 = PrecisionPolicy.parse(arm.config.policy).l.fmt.name == "bf16"
            found[in_bf16].append(standing(firsts(arm.by_seed, lag=200, every=200), back))
    return {in_bf16: pd.concat(tables) for in_bf16, tables in found.items()}


def reading(config) -> list[int]:
    """The heads of the layer whose gradient reads ε, of an arm with policies for single heads, or
    for layers."""
    place = next(iter(config.layers))
    _, _, listed = place.partition("/")
    return [int(head) for head in listed.split(",")] if listed else list(range(config.n_head))


def fastest_inside(run, settled: int = 600) -> tuple[int, float]:
    """(head of the layer whose σ(W_Q) grows most from one probe to the next, by what factor)."""
    table = norms(run)[LAYER]
    ratio = (table / table.shift(1)).loc[settled:].max()
    return int(ratio.idxmax()), float(ratio.max())


def main(argv: list[str] | None = None) -> None:
    """Measure the single steps before the onset, in runs of a campaign that keep them."""
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.first_heads", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="a campaign's folder")
    folder = parser.parse_args(argv).folder
    out = unwritten(folder / "last_steps.parquet")
    kept = [load_run(path.parent) for path in sorted(folder.glob("*/onset.parquet"))]
    if not kept:
        raise UserError(f"no run in {folder} has an onset.parquet: make its failing runs anew")
    table = pd.concat(map(single_steps, kept), ignore_index=True)
    write_table(out, table)
    print(f"{out}: {len(table):,} heads of {len(kept)} runs")


if __name__ == "__main__":
    entry(main)
