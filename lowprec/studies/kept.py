"""The weights that runs kept at some steps (`TrainConfig.weights_at`), and studies of the models.

Such a study makes one small table of a campaign's folder, after which the weights may go.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch

from lowprec import UserError
from lowprec.records import runs
from lowprec.training import recorder
from lowprec.training.config import TrainConfig
from lowprec.training.data import shards as data
from lowprec.training.loop import pick_device
from lowprec.training.model import GPT


def kept(run: runs.Run) -> dict[int, Path]:
    """The files of a run's kept weights by step."""
    return {int(p.stem.removeprefix("step-")): p for p in sorted(run.path.glob(".weights/*.pt"))}


def load(run: runs.Run, step: int, device: str) -> dict[str, torch.Tensor]:
    """Weights kept before a step. Raises `UserError` for a damaged file, and if the last ones are
    not the run's own."""
    path = kept(run)[step]
    try:
        weights = recorder.load_archive(path, device)
    except Exception as error:  # a damaged archive raises many types
        raise UserError(f"{path} holds no weights ({type(error).__name__}); restore it") from None
    if step == run.info["steps"] and recorder.weights_sha256(weights) != run.info["weights_sha256"]:
        raise UserError(f"{run.name}: the weights kept at step {step} are not those of the run")
    return weights


def unwritten(path: Path) -> Path:
    """The path of a table to be made. Raises `UserError` if there is one."""
    if path.exists():
        raise UserError(f"{path} exists and is never overwritten; rename it")
    return path


def models(folder, tokens, sequences: int, device: str, **changes) -> Iterator[tuple]:
    """(run, step, config, model, text, targets) of all weights that the runs of a folder kept.

    tokens: the stream the runs were trained on, a `lowprec.training.data.shards.Tokens`; another
    one is refused. text, targets: the first sequences of the batch of that step, (sequences, T)
    int64. changes: of the run's config. Raises `UserError` where no run kept any.
    """
    found = [(run, step) for run in runs.load_runs(Path(folder)).run for step in kept(run)]
    if not found:
        raise UserError(
            f"no run in {folder} has kept weights; record new ones, with weights_at in the campaign"
        )
    for run, step in found:
        if run.info["data_sha256"] != tokens.sha256:
            raise UserError(f"{run.name} has other tokens than {tokens.name}: name them (--data)")
        once = dict(capture_at=(), capture_every=0, window=None) | changes  # what a step showed
        config = dataclasses.replace(TrainConfig(**run.info["config"]), **once)
        model = GPT(dataclasses.replace(config.model(), vocab_size=tokens.vocab_size)).to(device)
        model.load_state_dict(load(run, step, device))
        seed = run.seed if config.data_seed is None else config.data_seed
        shape = config.batch_size, config.block_size
        batch = data.batch(tokens, step, seed, *shape, rows=slice(sequences))
        yield run, step, config, model, *(ids.to(device) for ids in batch)


def table(measure, columns: dict, folder, tokens, sequences: int, device="cpu", **changes):
    """What a study says of all weights that the runs of a folder kept, as one DataFrame.

    measure: from (model, text, targets, amp), amp the run's, to a DataFrame. columns: of the table,
    name to dtype; arm, seed and step are added. The rest, and errors: as in `models`.
    """
    rows = [
        measure(model, text, targets, text.is_cuda if config.amp is None else config.amp).assign(
            arm=run.info["arm"], seed=run.seed, step=step
        )
        for run, step, config, model, text, targets in models(
            folder, tokens, sequences, device, **changes
        )
    ]
    return pd.concat(rows)[list(columns)].astype(columns).reset_index(drop=True)


def tabulate(
    argv, doc: str, compare: Callable, sequences: int, path: str, study: str | None = None
) -> None:
    """The command of a study of kept weights: what `compare` finds in a folder, written into it.

    compare: from (folder, tokens, sequences, device) to a table with a column arm. sequences: how
    many by default. path: the file's name in the folder. study: its module, if not named alike.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m lowprec.studies.{study or Path(path).stem}", description=doc
    )
    parser.add_argument("folder", type=Path, help="a campaign's folder")
    parser.add_argument("--data", default="shards/pysource", help="the runs' token shards")
    parser.add_argument("--sequences", type=int, default=sequences, help="of each step's batch")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto is a GPU if there is one")
    args = parser.parse_args(argv)
    out = unwritten(args.folder / path)
    tokens, device = data.load_tokens(args.data), pick_device(args.device)
    table = compare(args.folder, tokens, args.sequences, device)
    recorder.write_table(out, table)
    print(f"{out}: {len(table):,} rows of {table.arm.nunique()} arms")
