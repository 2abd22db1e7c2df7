"""One loud channel in a wider model, for a GPU: what comes back after a silence.

The language model of `lowprec.studies.loud` as wide and as deep as the book's small model (6 layers
of width 384, a SwiGLU of 1,152), on the whole of GPT-2's vocabulary and the corpus of source code.
It trains in FP32 first. Then its loudest channel of each layer is made 2^`OCTAVES` louder every
`loud.PERIOD` steps and is as it was in between: a loud token that comes and goes, without a change
of what FP32 computes. Inputs of down-projections are stored by an arm from then on.

The rule of the prediction, of 3 seeds, against FP32 with the same seed:

    returns     delayed16 costs more than 0.1 nats at returns, on average over all but the first, in
                every seed; current, token, channel and delayed64 less than 0.02 nats
    between     delayed16 costs less than 0.02 nats in the last half of the steps between returns
    stays       no run ends above guessing, and delayed16 does not diverge: its cost at the last
                five returns is less than three times that at the first five
    four bits   e2m1-delayed16 costs more than 0.5 nats between returns, e2m1 less than 0.1

Refuted where a number is on the other side. Made by

    python -m lowprec.studies.loud_wide FOLDER --data shards/pysource --device cuda

in some ten minutes of a GPU: `wide.parquet` with a row an arm and seed, and `wide.json`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path

import pandas as pd
import torch

from lowprec import entry
from lowprec.records.tables import write_table
from lowprec.studies import loud
from lowprec.studies.mixed_runs import new_record, write_about

OCTAVES = 8
TASK = loud.Language(
    lr=1e-3, warmup=100, plain=1500, steps=480, seeds=3, first_seed=900, width=384, layers=6,
    heads=6, length=256, batch=16, classes=None, path="shards/pysource",
)  # fmt: skip
ARMS = (
    "fp32", "current", "delayed16", "delayed64", "token", "channel", "smooth", "e2m1",
    "e2m1-delayed16",
)  # fmt: skip


def go_on(began: loud.Training, arm: str) -> pd.DataFrame:
    """The rest of a training in an arm: by seed `loss`, between returns in the last half of the
    steps, `loud`, at returns but the first, and of these the first and last five, `early`, `late`.
    """
    training, curve, back = copy.deepcopy(began), [], []
    louder = loud.louder(began, OCTAVES)
    silent = {layer: torch.ones_like(factor) for layer, factor in louder.items()}
    dot = loud.Products() if arm == "fp32" else loud.Storing(arm, louder)
    for step in range(began.task.steps):
        back.append(step % loud.PERIOD == loud.PERIOD // 2)
        if arm != "fp32":
            dot.louder = louder if back[-1] else silent
        curve.append(training.run(1, dot)[0].double().cpu())
    curve, back = torch.stack(curve), torch.tensor(back)
    half = torch.arange(len(curve)) >= len(curve) // 2
    returns = curve[back][1:]
    return pd.DataFrame({
        "seed": training.seeds, "loss": curve[half & ~back].mean(0), "loud": returns.mean(0),
        "early": returns[:5].mean(0), "late": returns[-5:].mean(0),
    })  # fmt: skip


def record(folder, task=TASK, device="cpu", arms=ARMS) -> None:
    """Train every arm; write `wide.json` and `wide.parquet` into `folder`."""
    about = new_record(folder, "wide", device, "loud-wide")
    began = loud.Training(task, range(task.first_seed, task.first_seed + task.seeds), device)
    began.run(task.plain)
    parts = []
    for arm in arms:
        parts.append(go_on(began, arm).assign(arm=arm))
        print(parts[-1].to_string(), flush=True)
    config, tokens = dataclasses.asdict(task), task.data[0]
    about |= {"config": config | {"path": tokens.name}, "data_sha256": tokens.sha256}
    write_table(Path(folder) / "wide.parquet", pd.concat(parts, ignore_index=True))
    write_about(folder, "wide", about)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.loud_wide", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where the record goes")
    parser.add_argument("--data", help="token shards")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    task = dataclasses.replace(TASK, path=args.data) if args.data else TASK
    record(args.folder, task, args.device)


if __name__ == "__main__":
    entry(main)
