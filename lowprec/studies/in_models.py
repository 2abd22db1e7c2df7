"""What the drop-in costs other people's models on this GPU, beside PyTorch's own attention.

Models of transformers with the shapes of a Llama and a Gemma of a billion weights, 12 layers of
each and a vocabulary of 32,000, so that attention is not hidden behind the last product. They
train compiled, in BF16 autocast over FP32 weights, with AdamW; they generate in BF16. The weights
are drawn, which changes no time.

    python -m lowprec.studies.in_models data/benchmarks/models
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
import warnings
from pathlib import Path

import torch

from lowprec import UserError, entry
from lowprec.attention import huggingface
from lowprec.numerics.policy import SAFE
from lowprec.records import provenance
from lowprec.studies import benchmark

SIZES = dict(num_hidden_layers=12, vocab_size=32_000, max_position_embeddings=4096)
MODELS = {
    "Llama": ("Llama", dict(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
    )),
    "Gemma": ("Gemma3", dict(
        hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, sliding_window=512,
    )),
}  # fmt: skip
"""Source of the shapes: the configurations of Llama 3.2 1B and Gemma 3 1B."""
BATCH, SEQLEN = 4, 2048
ATTENTIONS = ("sdpa", "lowprec")
SHORTEST = 0.75
"""Of a padded batch each sequence has this share of tokens or more, the first all of them."""


def build(name: str, attention: str, device: str = "cuda", **sizes):
    """A model of `MODELS` with drawn weights; attention: "sdpa", or "lowprec" with `SAFE`."""
    try:
        import transformers
    except ImportError:
        raise UserError("models of transformers are timed here: install transformers 5") from None
    kind, shape = MODELS[name]
    kind = kind if kind == "Llama" else f"{kind}Text"
    config = getattr(transformers, f"{kind}Config")(**SIZES | shape | sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    if attention == "lowprec":
        huggingface.register(attention, SAFE)
    model.set_attn_implementation(attention)
    return model


def batch(model, padded: bool, size: int = BATCH, seqlen: int = SEQLEN) -> dict:
    """Random tokens, and where padded a mask that hides the ends of all sequences but the first."""
    device, vocabulary = model.device, model.config.vocab_size
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (size, seqlen), generator=g).to(device)
    if not padded:
        return dict(input_ids=ids, labels=ids)
    kept = torch.linspace(1, SHORTEST, size).mul(seqlen).long()
    mask = (torch.arange(seqlen) < kept[:, None]).long().to(device)
    labels = torch.where(mask.bool(), ids, -100)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def trained(name: str, attention: str, padded: bool = False, rounds: int = 5, steps: int = 8,
            device: str = "cuda", compiled: bool = True, **sizes) -> dict:  # fmt: skip
    """Tokens per second, the median, least and most of so many rounds of steps; MiB at the peak;
    and how often the compiler broke the graph.

    sizes: of `batch` (size, seqlen), and of the model's configuration.
    """
    given = {k: sizes.pop(k) for k in ("size", "seqlen") if k in sizes}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = build(name, attention, device, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    function = torch.compile(model) if compiled else model
    inputs = batch(model, padded, **given)

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = function(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        step()
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        rates.append(steps * inputs["input_ids"].numel() / (time.perf_counter() - start))
    return dict(
        model=name, padded=padded, attention=attention, tokens_per_second=statistics.median(rates),
        least=min(rates), most=max(rates), parameters=sum(p.numel() for p in model.parameters()),
        peak_mib=torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
        graph_breaks=sum(torch._dynamo.utils.counters["graph_break"].values()),
    )  # fmt: skip


def generated(name: str, size: int = 8, prompt: int = 512, tokens: int = 64, rounds: int = 15,
              device: str = "cuda", **sizes) -> list[dict]:  # fmt: skip
    """Of each attention, seconds for so many new tokens of each sequence in BF16, the likeliest
    ones; the median, least and most. The attentions take turns, so that a host that is busy for a
    while delays both: a token of one sequence is mostly launches."""
    models = {a: build(name, a, device, **sizes).to(torch.bfloat16) for a in ATTENTIONS}
    ids = batch(models[ATTENTIONS[0]], False, size, prompt)["input_ids"]
    how = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    seconds = {attention: [] for attention in ATTENTIONS}
    for _ in range(rounds + 1):  # the first one warms up
        for attention, model in models.items():
            start = time.perf_counter()
            with torch.no_grad():
                model.generate(ids, attention_mask=torch.ones_like(ids), **how)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[attention].append(time.perf_counter() - start)
    return [
        dict(
            model=name, attention=attention, size=size, prompt=prompt, tokens=tokens,
            seconds=statistics.median(took[1:]), least=min(took[1:]), most=max(took[1:]),
        )
        for attention, took in seconds.items()
    ]  # fmt: skip


def monitored(name: str, steps: int = 7, device: str = "cuda", **sizes) -> dict:
    """Seconds of a step that the monitor watches and of another, medians; nothing compiled."""
    from lowprec import Monitor

    given = {k: sizes.pop(k) for k in ("size", "seqlen") if k in sizes}
    model = build(name, "sdpa", device, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    inputs = batch(model, False, **given)
    seconds = {True: [], False: []}
    with warnings.catch_warnings(action="ignore"), Monitor(model, every=2) as monitor:
        for i in range(2 * steps + 4):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.autocast(device, torch.bfloat16):
                loss = model(**inputs, use_cache=False).loss
            loss.backward()
            seen = monitor.step() is not None
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= 4:
                seconds[seen].append(time.perf_counter() - start)
    watched, other = (statistics.median(seconds[x]) for x in (True, False))
    return dict(model=name, watched=watched, other=other)


def record() -> dict:
    """Everything, on this GPU."""
    benchmark.need_gpu()
    out = dict(date=datetime.date.today().isoformat(), **provenance.provenance("cuda"))
    out |= dict(policy=str(SAFE), batch=BATCH, seqlen=SEQLEN, sizes=SIZES)
    out["generation"] = [row for name in MODELS for row in generated(name)]
    out["training"] = [
        trained(name, attention, padded)
        for name, padded in (("Llama", False), ("Gemma", False), ("Llama", True))
        for attention in ATTENTIONS
    ]
    out["monitor"] = monitored("Llama")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lowprec.studies.in_models", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where the dated record goes")
    path = benchmark.new_path(parser.parse_args().folder)
    path.write_text(json.dumps(record(), separators=(",", ":")) + "\n")
    print(path)


if __name__ == "__main__":
    entry(main)
