"""How far apart the weights of two trainings are, along training (Golden et al. 2024, phase 2).

The runs of a campaign kept their weights at some steps (`TrainConfig.weights_at`). Two runs with
one seed that differ in a single setting are a pair, and so are two seeds of one arm. For each kept
step and each weight matrix this compares one run's numbers with the other's, and writes all that
into one small table, with the facts of its runs, after which the weights themselves may go:

    python -m lowprec.studies.pairs runs/pairs flash:fp32 bf16:fp32 fp32:fp32

`fp32:fp32` stands for all pairs of seeds of that arm. A pair of which a run is missing is left out.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lowprec import UserError, entry
from lowprec.records import explosion, runs
from lowprec.studies.kept import kept, load, unwritten
from lowprec.training import recorder
from lowprec.training.loop import pick_device

COLUMNS = {
    "pair": "str", "seed": "int16", "other_seed": "int16", "step": "int32", "weight": "str",
    "largest": "float32", "mean": "float32", "rms": "float32", "wasserstein": "float32",
    "moved": "float32",
}  # fmt: skip


def distances(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """How far two tensors of one shape are apart: four numbers, from FP32 differences.

    largest, mean and rms are of |a - b|, number by number. wasserstein is the distance W1 of their
    values as two samples, which forgets where each value stands: never more than `mean`.
    """
    size = (a - b).abs()
    return dict(
        largest=size.max().item(), mean=size.mean(dtype=torch.float64).item(),
        rms=size.double().square().mean().sqrt().item(), wasserstein=wasserstein(a, b),
    )  # fmt: skip


def wasserstein(a: torch.Tensor, b: torch.Tensor) -> float:
    """W1 of the empirical distributions of two equally large tensors' values.

    The integral of |F_a^-1 - F_b^-1|: with n values each, the mean distance of the i-th smallest of
    one from the i-th smallest of the other. Equals scipy.stats.wasserstein_distance.
    """
    if a.numel() != b.numel():
        raise UserError(f"W1 is computed for equally many values, not {a.numel()} and {b.numel()}")
    apart = a.flatten().sort().values - b.flatten().sort().values
    return apart.abs().mean(dtype=torch.float64).item()


def matrices(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weight matrices by short names (token, 0.qkv, ...), and `all` weights in one row."""
    short = {name.removeprefix("blocks.").removesuffix(".weight"): w for name, w in weights.items()}
    return {name: w for name, w in short.items() if w.dim() == 2} | {
        "all": torch.cat([w.flatten() for w in short.values()])
    }


def named_pairs(table: pd.DataFrame, names: list[str]) -> list[tuple[str, runs.Run, runs.Run]]:
    """(name, run, the run it is compared with) of all runs that kept weights.

    table: of `lowprec.records.runs.load_runs`. names: ARM:ARM for equal seeds, or one arm twice for
    its seeds with each other.
    """
    by_place = {(row.arm, row.seed): row.run for row in table.itertuples() if kept(row.run)}
    found = []
    for name in names:
        arm, _, other = name.partition(":")
        seeds = sorted(seed for a, seed in by_place if a == arm)
        places = itertools.combinations(seeds, 2) if arm == other else zip(seeds, seeds)  # noqa: B905
        found += [
            (name, by_place[arm, i], by_place[other, j])
            for i, j in places
            if (other, j) in by_place
        ]
    return found


def compare(folder, names: list[str], device: str = "cpu") -> pd.DataFrame:
    """Distances of every pair at every step that both kept: columns `COLUMNS`.

    moved: rms distance of the second run's weights from its own at step 0, to set the rest beside
    (NaN if it did not keep those). The table's `attrs` say what the runs were, see `facts`.
    """
    pairs = named_pairs(runs.load_runs(Path(folder)), names)
    if not pairs:
        raise UserError(f"no two runs of {', '.join(names)} have kept weights in {folder}")
    used = {run.name: run for _, *both in pairs for run in both}
    start = {name: matrices(load(run, 0, device)) for name, run in used.items() if 0 in kept(run)}
    rows = []
    for step in sorted(set().union(*(kept(run) for run in used.values()))):
        now = {n: matrices(load(r, step, device)) for n, r in used.items() if step in kept(r)}
        for name, a, b in pairs:
            if a.name in now and b.name in now:
                rows += _rows(name, a, b, step, now, start.get(b.name))
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)
    table.attrs = facts(used)
    return table


def facts(used: dict[str, runs.Run]) -> dict:
    """What a table of distances says of its runs: `shared`, all that their run.json have in common,
    and `runs`, by name: the rest, `loss` (mean of the last 50 steps, nats) and `skipped` (steps
    whose gradient was not finite)."""
    flat = {
        name: {k: v for k, v in run.info.items() if k != "config"} | run.info["config"]
        for name, run in used.items()
    }
    every = list(flat.values())
    shared = {k: v for k, v in every[0].items() if all(k in i and i[k] == v for i in every)}
    own = {name: {k: v for k, v in i.items() if k not in shared} for name, i in flat.items()}
    for name, run in used.items():
        own[name]["loss"] = float(run.metrics.loss.tail(explosion.WINDOW).mean())
        own[name]["skipped"] = int((~np.isfinite(run.metrics.grad_norm)).sum())
    return dict(shared=shared, runs=own)


def _rows(name, a, b, step, now, start) -> list[dict]:
    rows = []
    for weight, x in now[b.name].items():
        gone = None if start is None else (x - start[weight]).double().square().mean().sqrt()
        rows.append(dict(
            pair=name, seed=a.seed, other_seed=b.seed, step=step, weight=weight,
            **distances(now[a.name][weight], x), moved=float("nan" if gone is None else gone),
        ))  # fmt: skip
    return rows


def along(table: pd.DataFrame, pair: str, column: str) -> pd.DataFrame:
    """One distance of a pair, over all weights: a row a step, a column for each two seeds."""
    rows = table[(table.pair == pair) & (table.weight == "all")]
    return rows.pivot(index="step", columns=["seed", "other_seed"], values=column)


def over(table: pd.DataFrame, pair: str, other: str, column: str) -> pd.Series:
    """One distance of a pair over that of another at the last step, by seed; over the largest if
    the other is of two seeds."""
    mine, theirs = (along(table, name, column).iloc[-1] for name in (pair, other))
    arm, _, of = other.partition(":")
    return (mine / (theirs.max() if arm == of else theirs)).droplevel("other_seed")


def main(argv: list[str] | None = None) -> None:
    """Compare the kept weights of a campaign's runs."""
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.pairs", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="a campaign's folder")
    parser.add_argument("pairs", nargs="+", help="ARM:ARM, the second as the reference")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto is a GPU if there is one")
    args = parser.parse_args(argv)
    out = unwritten(args.folder / "weights.parquet")
    table = compare(args.folder, args.pairs, pick_device(args.device))
    recorder.write_table(out, table)
    print(f"{out}: {len(table):,} rows, {table.pair.nunique()} pairs")


if __name__ == "__main__":
    entry(main)
