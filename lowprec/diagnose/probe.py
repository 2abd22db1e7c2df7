"""Is my model affected? What BF16 attention does to each head of a model, on some text.

What is measured, and when it is an alarm, is in `lowprec.diagnose.measures`.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from lowprec import UserError
from lowprec.diagnose import contenders, loading, measures, scores
from lowprec.diagnose.calls import emulated
from lowprec.diagnose.measures import BROKEN, COLUMNS, COMMON, KEYS, SHARE
from lowprec.numerics.policy import SAFE, PrecisionPolicy
from lowprec.publish import plots
from lowprec.records import files, runs
from lowprec.training.capture import Capture
from lowprec.training.model import GPT
from lowprec.training.rotary import rotate

__all__ = ["BROKEN", "COLUMNS", "COMMON", "KEYS", "SHARE", "figure", "probe", "verdict"]


@torch.inference_mode(False)
@torch.enable_grad()
def probe(
    model, text=None, policy=None, sequences=4, length=512, seed=0, device="auto", progress=False
) -> pd.DataFrame:
    """What attention does in each head of a model; `verdict` says it in words.

    model: a transformers model, a GPT or a Capture; or a path, of a transformers folder, or of its
        config.json, whose weights are then random from `seed`, of a Llama's GGUF file, of a run's
        checkpoint.pt, or of a capture, in data/captures also its name. A capture brings its own
        text.
    text: a file, read by the tokenizer beside the model or in its GGUF file, else by GPT-2's or as
        bytes; None for the committed text, which is there as GPT-2's tokens only, noise to a model
        with another vocabulary. It is cut into `sequences` of `length` tokens.
    policy: of attention; None for FA2, what production kernels do, or what the run used.
    device: where a model that is read from a path runs; "auto" is a GPU if there is one. A model
        that is given runs where it lies, a capture on the CPU.
    progress: a line on stderr that counts the calls of attention, forward and backward, and one
        more where the tokens of a text are not the model's.

    The model runs in float32, one of another dtype as a copy that lies beside it, with gradients
    also where its weights are frozen, and attention reads BF16 and rounds as the policy says. One
    row a layer and head, with the columns of `COLUMNS`. Exact is float64, on the q, k, v and do
    that attention got. Raises `UserError` for a path or a model that is none of these, a model
    without causal attention or without a loss, too little text, one that has failed, or one that is
    too large for the GPU.
    """
    if sequences < 1 or length < 1:
        raise UserError(f"sequences={sequences} and length={length} must be at least 1")
    weights, folder = "the weights given", None
    if isinstance(model, (str, Path)):
        path = files.at_root(contenders.by_name(model))
        if (
            not path.exists()
            and not runs.is_run(path)
            and path.suffix not in (".xz", ".safetensors")
        ):
            raise UserError(
                f"there is no {model}; give a folder, config.json, .gguf, checkpoint.pt or capture"
            )
        (model, weights), folder = loading.load(path, seed), path
        if path.suffix != ".gguf" and not path.is_dir():
            folder = path.parent
        if not isinstance(model, Capture):
            model = _placed(model, device)
    if isinstance(model, Capture):
        if text is not None or (sequences, length) != (4, 512):
            raise UserError("a capture brings its own text; leave text, sequences and length out")
        call = _capture_call(model, policy)
        return measures.table([call], f"{model.path.name}, with its own text")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, GPT) and not hasattr(getattr(model, "config", 0), "get_text_config"):
        raise UserError(
            f"a {type(model).__name__} is no transformers model, GPT or Capture; lowprec.Monitor "
            "watches causal attention in other modules, while they train"
        )
    c = model.config if isinstance(model, GPT) else model.config.get_text_config()
    if getattr(c, "vocab_size", None) is None:
        raise UserError(f"a {type(model).__name__} reads no tokens: it is no language model")
    limit = getattr(c, "block_size" if isinstance(model, GPT) else "max_position_embeddings", None)
    length = min(length, limit or length)  # some have no limit
    tokens, words = loading.tokens(text, folder, c.vocab_size, sequences, length, seed)
    if tokens.shape[1] < 3:  # a GPT reads one less, and a mean score needs two keys
        raise UserError(
            f"sequences of length {tokens.shape[1]} are too short; take 3 tokens and more, of "
            "fewer sequences or of a longer text"
        )
    if progress and loading.NOISE in words:
        print(f"lowprec: the model reads {words}", file=sys.stderr)
    size = " x ".join(map(str, tokens.shape))
    layers = c.n_layer if isinstance(model, GPT) else getattr(c, "num_hidden_layers", None)
    on, modes = next(model.parameters()).device, {m: m.training for m in model.modules()}
    floats, frozen = [p for p in model.parameters() if p.is_floating_point()], []
    try:
        if any(p.dtype != torch.float32 or p.is_inference() for p in floats):
            model = copy.deepcopy(model).float()
            floats = [p for p in model.parameters() if p.is_floating_point()]
        frozen = [p.requires_grad_() for p in floats if not p.requires_grad]
        # what is compiled calls no hooks
        with torch.autocast(on.type, enabled=False), torch.compiler.set_stance("force_eager"), tqdm(
            desc=f"probe, on the {'GPU' if on.type == 'cuda' else 'CPU'}", unit=" calls",
            total=layers and 2 * layers, disable=not progress, leave=False, dynamic_ncols=True,
        ) as bar:  # fmt: skip
            calls = emulated(model.eval(), tokens.to(on), policy, bar.update)
            return measures.table(calls, f"{weights}, and {size} tokens of {words}")
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"{size} tokens do not fit on the GPU with this model; take fewer, or device cpu"
        ) from None
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for module, training in modes.items():
            module.training = training


def verdict(table: pd.DataFrame) -> str:
    """What a table of `probe` says, in words, and what was read."""
    ill = table[table.alarm]
    # A head that attends to one key alone has next to no gradient, and any error is many of it.
    worst = (table.nlargest(1, "share") if ill.empty else ill.nlargest(1, "error")).iloc[0]
    text = f"{measures.describe(worst)}. Rounding q and k moves P by {worst.tv:.2%}"
    read = f"\nRead: {table.attrs['read']}." if "read" in table.attrs else ""
    if ill.empty:
        small = (
            f" An alarm needs a mean score of {COMMON:.0f} and more, in size, {SHARE:g} of all "
            f"roundings, and a mean key of {KEYS:g} and more as well."
        )
        return (
            f"No alarm in {len(table)} head(s), which on little text proves nothing. The largest "
            f"share: {text}.{small * bool(worst.share >= SHARE)}{read}"
        )
    late = "it computes something else already" if worst.tv >= BROKEN else "it is still right"
    return (
        f"ALARM in {len(ill)} of {len(table)} head(s). The largest error: {text}: {late}. The "
        f"policy SAFE, {SAFE}, is for training from before an alarm; that it rescues such a head "
        f"is not shown.{read}"
    )


def figure(table: pd.DataFrame):
    """Two of the numbers that the alarm reads, a dot a head; returns the matplotlib figure."""
    fig, ax = plots.subplots(figsize=(5.4, 3.8))
    ax.axhline(SHARE, color=plots.INK, lw=0.8, ls=":")
    ax.axvline(COMMON, color=plots.INK, lw=0.8, ls=":")
    for alarm, tint in ((False, plots.SPARE[3]), (True, plots.COLOURS["LOW"])):
        some = table[table.alarm == alarm]
        ax.scatter(some.common.abs(), some.share, color=tint, s=24, alpha=0.8)
    for row in table[table.alarm].itertuples():
        ax.annotate(f" {row.layer}.{row.head}", (abs(row.common), row.share), fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="size of the mean score",
           ylabel="error of W_Q's gradient / gradient")  # fmt: skip
    return fig


def _placed(model, device: str):
    """The model on the device that "auto" means; where it does not fit, a sentence."""
    from lowprec.training.loop import pick_device

    try:
        return model.to(pick_device(device))
    except torch.cuda.OutOfMemoryError:
        raise UserError("the model does not fit on the GPU; take device cpu") from None


def _capture_call(capture, policy) -> measures.Call:
    x = capture.tensors["x"].double()

    def norms(dq):
        back = rotate(dq, capture.rotation, back=True)
        each = torch.einsum("bhtd,btc->bhdc", back, x).flatten(2)
        return each.sum(0).norm(dim=1), each.norm(dim=2)

    full_q, full_k = scores.unrounded(capture)
    return measures.Call(
        layer=capture.layer, heads=capture.heads, scale=capture.scale, tile=capture.tile,
        policy=PrecisionPolicy.parse(policy or capture.policy), full_q=full_q, full_k=full_k,
        norms=norms, **{name: capture.tensors[name] for name in ("q", "k", "v", "do")},
    )  # fmt: skip
