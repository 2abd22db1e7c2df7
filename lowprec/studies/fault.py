"""A token stream with a fault in it, for runs that fail by their data: from some step on all that
they read is noise, or text out of order.

The windows of a step are a function of the run's data seed (`lowprec.training.data.shards.batch`),
so the fault is written into those that the faulty steps read. Other steps meet it where their
windows overlap: 650 steps of 32 x 1,025 tokens are an eighth of `pysource`, in every batch from the
first.

    python -m lowprec.studies.fault noise shards/pysource shards/pysource-noise
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from lowprec import entry
from lowprec.training.data.shards import Tokens, load_tokens, window_starts, write_shards

KINDS = ("noise", "shuffled")
"""Every token of a window drawn anew, uniformly; the tokens of a window in another order."""


def spoil(
    tokens: Tokens, kind: str, steps=range(2000, 2650), seed=2, batch_size=32, block_size=1024
) -> np.ndarray:
    """The stream with a fault in all windows of some steps, uint16 (len(tokens),).

    seed: the data seed of the runs. The same everywhere: only raw bits are drawn.
    """
    size = min(tokens.vocab_size, 50257)  # without the rows that GPT-2's embedding is padded with
    stream = np.concatenate(tokens.shards)
    for step in steps:
        for start in window_starts(tokens, step, seed, batch_size, block_size):
            window = stream[int(start) : int(start) + block_size + 1]  # with the last target
            bits = np.random.Philox(key=[int(start), step]).random_raw(len(window))
            window[:] = bits % size if kind == "noise" else window[bits.argsort()]
    return stream


def main(argv: list[str] | None = None) -> None:
    """Write a copy of token shards whose batches are spoilt in steps 2,000 to 2,649."""
    parser = argparse.ArgumentParser("python -m lowprec.studies.fault", description=main.__doc__)
    parser.add_argument("kind", choices=KINDS, help="noise: random tokens; shuffled: their order")
    parser.add_argument("source", type=Path, help="a folder of token shards")
    parser.add_argument("out", type=Path, help="a new folder for the spoilt ones")
    parser.add_argument("--data-seed", type=int, default=2, help="of the runs that will read it")
    args = parser.parse_args(argv)
    tokens = load_tokens(args.source)
    stream = spoil(tokens, args.kind, seed=args.data_seed)
    digest = write_shards(stream, args.out, f"{tokens.name}-{args.kind}", tokens.vocabulary)
    print(f"{args.out}: {len(stream):,} tokens of sha256 {digest}")


if __name__ == "__main__":
    entry(main)
