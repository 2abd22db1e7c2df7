"""The spectral entropy of what training does to W_Q W_K^T, head by head (arXiv 2606.28116, known
here at second hand).

Between two kept weights of a run, the first-order change of the product whose form the scores are:
dW_Q^T W_K + W_Q^T dW_K of a head, (C, C) and of rank 2 D at most. Its entropy is low where few
directions take the whole change.

    python -m lowprec.studies.spectral data/runs/spectral
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

from lowprec import entry
from lowprec.evidence.heads import norms
from lowprec.records import runs
from lowprec.studies.kept import kept, load, unwritten
from lowprec.training import recorder
from lowprec.training.config import TrainConfig
from lowprec.training.loop import pick_device
from lowprec.training.model import GPT

COLUMNS = {
    "arm": "str", "seed": "int16", "step": "int32", "layer": "int16", "head": "int16",
    "entropy": "float32", "largest": "float32",
}  # fmt: skip
PART, FROM = 0.9, 700
"""A run rings below this part of the least entropy of healthy runs, from this step on."""


def entropy(q, k, dq, dk) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy in nats of the squared singular values, over their sum, of dq^T k + q^T dk, and the
    largest one's share; q, k, dq, dk: (heads, D, C), returns (heads,) each, float64.

    The change is L^T R of two (2 D, C) matrices, so its singular values are those of the product
    of their triangular factors.
    """
    left, right = torch.cat([dq, q], 1).double(), torch.cat([k, dk], 1).double()
    small = torch.linalg.qr(left.mT).R @ torch.linalg.qr(right.mT).R.mT
    share = torch.linalg.svdvals(small).square()
    share = share / share.sum(1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(1), share[:, 0]


def changes(run: runs.Run, device: str = "cpu") -> pd.DataFrame:
    """A row for each later one of two kept weights, layer and head: the step, the entropy and the
    largest share; of finite weights alone."""
    model, rows, before = GPT(TrainConfig(**run.info["config"]).model()).to(device), [], None
    for step in sorted(kept(run)):
        model.load_state_dict(load(run, step, device))
        now = [model.head_weights(which).detach().double() for which in "qk"]
        if not all(w.isfinite().all() for w in now):
            break
        if before is not None:
            for layer, (q, k, q0, k0) in enumerate(zip(*now, *before, strict=True)):
                for head, (e, share) in enumerate(zip(*entropy(q, k, q - q0, k - k0), strict=True)):
                    rows.append((step, layer, head, float(e), float(share)))
        before = [w.clone() for w in now]
    table = pd.DataFrame(rows, columns=list(COLUMNS)[2:])
    return table.assign(arm=run.info["arm"], seed=run.seed)[list(COLUMNS)].astype(COLUMNS)


def rings(table: pd.DataFrame, failing: dict[int, runs.Run]) -> pd.DataFrame:
    """By seed of fa2, as the campaign's predictions say: notice, steps from the first ring to the
    onset, 0 without one; largest, whether the head that rings first has the largest sigma(W_Q) at
    the last probe before the onset.

    A head rings whose entropy is below PART of the least of both refined runs from FROM on.
    """
    calm = table[(table.arm == "refined") & (table.step >= FROM)]
    rung = table[(table.arm == "fa2") & (table.entropy < PART * calm.entropy.min())]
    rows = {}
    for seed, run in failing.items():
        own = rung[(rung.seed == seed) & (rung.step < run.explosion.onset)]
        first = own.sort_values(["step", "entropy"]).head(1)
        heads = list(zip(first.layer, first["head"], strict=True))
        rows[seed] = dict(
            notice=int((run.explosion.onset - first.step).sum()),
            largest=heads == [norms(run).iloc[-1].idxmax()],
        )
    return pd.DataFrame.from_dict(rows, orient="index")


def main(argv: list[str] | None = None) -> None:
    """Write what the kept weights of a campaign's runs say into its spectral.parquet."""
    parser = argparse.ArgumentParser("python -m lowprec.studies.spectral", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="a campaign's folder")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto is a GPU if there is one")
    args = parser.parse_args(argv)
    out, device = unwritten(args.folder / "spectral.parquet"), pick_device(args.device)
    found = [run for run in runs.load_runs(args.folder).run if kept(run)]
    table = pd.concat([changes(run, device) for run in found], ignore_index=True)
    recorder.write_table(out, table)
    print(f"{out}: {len(table):,} rows of {len(found)} runs")


if __name__ == "__main__":
    entry(main)
