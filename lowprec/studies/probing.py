"""How long the probe of attention takes: untrained models of two sizes on one thread of a CPU.

python -m lowprec.studies.probing data/studies/probing      DATE-seconds.parquet
"""

from __future__ import annotations

import time

import pandas as pd

from lowprec import entry
from lowprec.diagnose import probe
from lowprec.studies import dated

PARAMETERS = dict(tokens=512)
"""Those of the page: the length of the one sequence that is read."""
MODELS = {
    "small": dict(n_layer=4, n_head=4, n_embd=64, vocab_size=2048, bos_token_id=0, eos_token_id=0),
    "GPT-2": dict(n_layer=12),
}
"""A name to what its config has that GPT-2's own has not."""
REPEATS = 3


def seconds(name: str, tokens: int) -> pd.DataFrame:
    """One row: model, weights (how many), tokens, seconds (the least of REPEATS)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model, times = GPT2LMHeadModel(GPT2Config(**MODELS[name])), []
    for _ in range(REPEATS):
        start = time.monotonic()
        probe.probe(model, None, "FA2", sequences=1, length=tokens)
        times.append(time.monotonic() - start)
    weights = sum(w.numel() for w in model.parameters())
    row = dict(model=name, weights=weights, tokens=tokens, seconds=min(times))
    return pd.DataFrame([row])


def measure(tokens: int) -> dict[str, pd.DataFrame]:
    """The table `seconds` of all MODELS."""
    return dict(seconds=pd.concat([seconds(name, tokens) for name in MODELS], ignore_index=True))


def main(argv: list[str] | None = None) -> None:
    """Time the probe on untrained models."""
    dated.command("probing", main.__doc__, measure, argv, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
