"""The monitor in training loops: a tiny GPT with and without a planted bias of delta, and its cost.

Half a minute a pair of runs on an idle core, so the page reads tables:

    python -m lowprec.studies.loop data/studies/loop        DATE-losses.parquet, -watched, -seconds
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
import warnings

import pandas as pd
import torch

from lowprec import Monitor, entry
from lowprec.diagnose import measures
from lowprec.diagnose.calls import emulated
from lowprec.numerics.policy import CLEAN
from lowprec.records.files import data_root
from lowprec.studies import dated
from lowprec.training.data import shards
from lowprec.training.model import GPT, GPTConfig, autocast

PARAMETERS = dict(seeds=6, steps=200, bias=20.0)
"""Those of the page. bias: of delta, over the size of the error that rounding O makes in it."""
EVERY, BATCH, LENGTH, VOCABULARY = 10, 4, 64, 2048
LR, WARMUP, CLIP, WINDOW = 3e-3, 20, 1.0, 10
LEFT, LARGE = 0.1, 100.0
"""Nats above the healthy run, in the mean of WINDOW steps, that a loss has left it by; a logit that
QK-clip takes for too large (Kimi K2, arXiv:2507.20534)."""
KINDS = ("healthy", "planted")


def policy(kind: str, bias: float) -> str:
    """Attention of a run of KINDS."""
    return str(CLEAN.replace(delta_bias=bias) if kind == "planted" else CLEAN)


def gpt(policy, seed: int) -> GPT:
    """Two layers of two heads, on VOCABULARY tokens."""
    torch.manual_seed(seed)
    sizes = dict(n_layer=2, n_head=2, n_embd=64, block_size=LENGTH, vocab_size=VOCABULARY)
    return GPT(GPTConfig(**sizes, policy=str(policy), impl="emulate"))


def llama(seed: int, layers=2, width=64, length=LENGTH):
    """A small Llama of transformers with its own attention (sdpa), two heads of queries a key."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress")  # tqdm would like widgets
        import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, hidden_size=width,
        intermediate_size=8 * width // 3, vocab_size=VOCABULARY, max_position_embeddings=length,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def loss_of(model, step: int, seed: int, batch=BATCH, length=LENGTH) -> torch.Tensor:
    """Of a step's batch of the small corpus, under autocast to BF16."""
    smoke = shards.load_tokens(data_root() / "corpora" / "smoke.safetensors", verify=False)
    x, y = (part % VOCABULARY for part in shards.batch(smoke, step, seed, batch, length))
    with autocast("cpu", True):
        return model(x, y) if isinstance(model, GPT) else model(input_ids=x, labels=x).loss


def train(model, seed: int, steps: int, monitor: Monitor | None = None):
    """(losses, tables of the watched steps) of AdamW with warm-up and a clip."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses, tables = [], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARMUP)
        optimizer.zero_grad()
        loss = loss_of(model, step, seed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        tables.append(monitor.step() if monitor else None)
        optimizer.step()
        losses.append(loss.item())
    return losses, [table for table in tables if table is not None]


def run(kind: str, seed: int, steps: int, bias: float) -> dict[str, pd.DataFrame]:
    """`losses` (step, loss) and `watched` (the monitor's columns) of one training, of whole batches
    every EVERY steps, with its kind and seed."""
    logging.getLogger("lowprec.monitor").setLevel(logging.ERROR)
    model = gpt(policy(kind, bias), seed)
    with Monitor(model, every=EVERY, sequences=BATCH, length=LENGTH) as monitor:
        losses, tables = train(model, seed, steps, monitor)
    found = dict(losses=pd.DataFrame(dict(step=range(steps), loss=losses)),
                 watched=pd.concat(tables, ignore_index=True))  # fmt: skip
    return {name: table.assign(kind=kind, seed=seed) for name, table in found.items()}


def measure(seeds: int, steps: int, bias: float) -> dict[str, pd.DataFrame]:
    """`losses` and `watched` of all runs, and `seconds`: timed for PARAMETERS, else as recorded."""
    parts = [run(kind, seed, steps, bias) for seed in range(seeds) for kind in KINDS]
    tables = {name: pd.concat([p[name] for p in parts], ignore_index=True) for name in parts[0]}
    page = PARAMETERS == dict(seeds=seeds, steps=steps, bias=bias)
    timed = seconds() if page else dated.recorded("loop", **PARAMETERS)["seconds"]
    return tables | dict(seconds=timed)


def first(flags: pd.Series) -> float:
    """The first step at which a Series by step is true; infinite where none is."""
    return flags.idxmax() if flags.any() else float("inf")


def told(losses: pd.DataFrame, watched: pd.DataFrame) -> pd.DataFrame:
    """By seed, the first step of the planted run at which something is so; infinite for never.

    alarm: a head rings; alarm_50: at a step that every=50 watches; left: its loss is LEFT above the
    healthy run's, in the mean of the last WINDOW steps; for_good: and stays so to the end; logit:
    one is LARGE; whole: share_all reaches the limit of share. Of the healthy run, over all its
    steps: healthy, whether a head rings; healthy_whole, the largest share_all.
    """
    rows = {}
    for seed, own in watched.groupby("seed"):
        healthy, planted = (own[own.kind == kind] for kind in KINDS)
        by = planted.groupby("step")
        mine = losses[losses.seed == seed].pivot(index="step", columns="kind", values="loss")
        left = (mine.planted - mine.healthy).rolling(WINDOW).mean() > LEFT
        ringing = by.alarm.any()
        rows[seed] = dict(
            alarm=first(ringing), alarm_50=first(ringing[ringing.index % 50 == 0]),
            left=first(left), for_good=first(left[::-1].cummin()[::-1]),
            logit=first(by.logit.max() > LARGE),
            whole=first(by.share_all.max() >= measures.SHARE),
            healthy=healthy.alarm.any(), healthy_whole=healthy.share_all.max(),
        )  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("seed")


def differs(steps: int = 4) -> dict[tuple[str, str], bool]:
    """Whether numbers of a short training with the monitor at every step are others than without:
    {(model, numbers): bool}."""
    found = {}
    for name, make in {"GPT": lambda: gpt("FA2", 0), "Llama": lambda: llama(0)}.items():
        ends = [_end(make(), watched, steps) for watched in (False, True)]
        for what in ends[0]:
            pairs = zip(ends[0][what], ends[1][what], strict=True)
            found[name, what] = not all(torch.equal(a, b) for a, b in pairs)
    return found


def _end(model, watched: bool, steps: int) -> dict[str, list[torch.Tensor]]:
    losses, _ = train(model, 0, steps, Monitor(model, every=1) if watched else None)
    return dict(
        losses=[torch.tensor(losses)], weights=list(model.state_dict().values()),
        gradients=[p.grad for p in model.parameters()], randomness=[torch.get_rng_state()],
    )  # fmt: skip


def beside_probe(seed: int = 0, steps: int = 20) -> pd.DataFrame:
    """share, error and key_share by the monitor over those that the probe's pass over the same
    batch has, a row a head of a GPT that was trained for some steps."""
    model = gpt("FA2", seed)
    train(model, seed, steps)
    with Monitor(copy.deepcopy(model), every=1, sequences=BATCH, length=LENGTH) as monitor:
        loss_of(monitor.model, steps, seed).backward()
        table = monitor.step()
    smoke = shards.load_tokens(data_root() / "corpora" / "smoke.safetensors", verify=False)
    x, y = shards.batch(smoke, steps, seed, BATCH, LENGTH)
    tokens = torch.cat([x, y[:, -1:]], 1) % VOCABULARY
    with autocast("cpu", True):
        probed = measures.table(emulated(model, tokens, "FA2"), "")
    columns = ["share", "error", "key_share"]
    return (table[columns] / probed[columns]).set_index([table.layer, table["head"]])


def seconds(repeats: int = 7) -> pd.DataFrame:
    """Processor seconds of a step of training, watched and not, medians of pairs that alternate.

    Columns model, sequences, length, watched, other: the tiny GPT of the runs, and two Llamas.
    """
    rows = []
    for name, model, batch, length in (
        ("the tiny GPT", gpt("FA2", 0), BATCH, LENGTH),
        ("a Llama of 2 layers", llama(0, 2, 128, 256), 4, 256),
        ("a Llama of 4 layers", llama(0, 4, 256, 512), 4, 512),
    ):
        with Monitor(model, every=2) as monitor:
            spent = [_seconds(model, monitor, step, batch, length) for step in range(2 * repeats)]
        watched, other = (statistics.median(spent[i::2]) for i in (0, 1))
        size = dict(model=name, sequences=batch, length=length)
        rows.append(size | dict(watched=watched, other=other))
    return pd.DataFrame(rows)


def _seconds(model, monitor, step, batch, length) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    began = time.process_time()
    loss_of(model, step, 0, batch, length).backward()
    monitor.step()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - began


def main(argv: list[str] | None = None) -> None:
    """Train a tiny GPT with and without a planted bias of delta, and watch it."""
    dated.command("loop", main.__doc__, measure, argv, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
