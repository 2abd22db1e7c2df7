"""Is my model affected? What BF16 attention does to each head of a model, on some text.

The warning sign of the captured failures is neither a tied maximum nor the sign of delta's error,
which healthy heads have as well. It is how much of a head's W_Q gradient is error: the rounding of
O moves delta by eps = delta_o - delta_ref in each row, and the gradient by
e = -scale * sum_i eps_i (P K)_i x_i^T (`lowprec.training.probes`). A head is alarmed if

    share    ||e|| / ||exact gradient|| >= 0.2, and
    common   |mean score| >= 10

The first, because errors of many steps agree and gradients of many batches do not: Adam with
beta_1 = 0.9 averages about 19 gradients, which shortens a sum of independent ones by sqrt(19) = 4.4
and not one of equal ones, so from a share of 0.23 on the error is the larger part of the step. The
second, because that step moves q along the mean key and so raises all scores of a row alike; where
they are small the drift has done nothing yet. Without it heads ring that have no gradient to speak
of, as in the first steps of a training. Both limits were chosen on the seven captures of
`data/captures`, the second after false alarms (book, part IV); they are no theorem. A few rows
carry much of e, so little text can miss a failing head: the more of it, the better.

`share` is the statistic that runs record, and on which the limit was tested. It is what the stored
output does to a delta that reads it, also under a policy whose delta reads something else.
`share_all` is the same with the whole error of the gradient, of every rounding of the policy: dQ as
the backward has it, less dQ in float64. The rounding of P is in it. No alarm reads it, so a model
that fails by P alone gives none.

`tv` is how far rounding q and k moves P: 0.05 and more, and the head computes something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
from scipy import stats

from lowprec import UserError
from lowprec.attention import trace
from lowprec.attention.drop_in import sdpa
from lowprec.attention.reference import oracle
from lowprec.diagnose import drift, scores
from lowprec.diagnose.directions import common_part
from lowprec.numerics.formats import BF16, ulp
from lowprec.numerics.policy import FA2, PrecisionPolicy
from lowprec.publish import plots
from lowprec.records import files, runs
from lowprec.records.tables import load_archive, require_whole
from lowprec.training.capture import Capture
from lowprec.training.model import GPT
from lowprec.training.rotary import rotate

SHARE, COMMON, BROKEN = 0.2, 10.0, 0.05
BLOCKS = 16
"""Blocks of consecutive rows behind the interval of delta's bias."""
WRAPPERS = {r"(?<![^.])_orig_mod\.": "", r"^module\.": ""}
"""What torch.compile, of a model or of parts, and a distributed wrapper put into the names of
weights."""
MASKS = r"\.(attn|attention)\.(masked_)?bias$|\.(causal_mask|inv_freq)$|(^|\.)version$"
"""Names of what older versions stored beside the weights; a model makes its own."""

GPT2_SIZES = 50257, 50304
"""Of GPT-2's vocabulary, as it is and padded to a multiple of 64."""
COLUMNS = {
    "layer": "counted from 0, as heads are",
    "head": "of queries",
    "tied": "share of rows whose largest score is tied",
    "o_bias": "sum of the errors of O, over the sum of the BF16 ulps of the exact O",
    "delta_bias": "sum eps / sum |eps| over rows; eps is delta from the stored O less "
    "delta from O before that rounding, not delta against float64",
    "delta_low": f"lower end of its 95 % interval, from {BLOCKS} blocks of rows",
    "delta_high": "upper end",
    "share": "the error that eps makes in W_Q's gradient, over the exact gradient, in norm; "
    f"an alarm needs {SHARE:g} and more",
    "error": "that error itself, in norm, of the gradient of the mean loss",
    "coherence": "inner product of the errors of two sequences over their mean square, on average; "
    "0: a larger batch averages them away, 1: it does not. nan for one sequence",
    "share_all": "that share with the whole error of that gradient, of all roundings: dQ of the "
    "policy less dQ in float64",
    "key_share": "size of the mean key, over the rms of the keys",
    "common": "mean score of a row, averaged over the rows from the second on; "
    f"an alarm needs {COMMON:g} and more, in size",
    "tv": "how far rounding q and k moves P, in total variation; "
    f"from {BROKEN:g} on the head computes something else",
    "alarm": "whether both limits are reached",
}
"""The columns of `probe`, in words."""


def probe(model, text=None, policy=None, sequences=4, length=512, seed=0) -> pd.DataFrame:
    """What attention does in each head of a model; `verdict` says it in words.

    model: a transformers model, a GPT or a Capture; or a path, of a transformers folder, or of its
        config.json, whose weights are then random from `seed`, of a run's checkpoint.pt, or of a
        capture. A capture brings its own text.
    text: a file; None for the committed text, which is there as GPT-2's tokens only, noise to a
        model with another vocabulary. It is cut into `sequences` of `length` tokens.
    policy: of attention; None for FA2, what production kernels do, or what the run used.

    The model runs in float32 on the CPU, and attention reads BF16 and rounds as the policy says.
    One row a layer and head, with the columns of `COLUMNS`. Exact is float64, on the q, k, v
    and do that attention got. Raises `UserError` for a path that is none of these, a model without
    causal attention, too little text, or one that has failed.
    """
    if sequences < 1 or length < 1:
        raise UserError(f"sequences={sequences} and length={length} must be at least 1")
    weights, folder = "the weights given", None
    if isinstance(model, (str, Path)):
        path = files.at_root(model)
        if (
            not path.exists()
            and not runs.is_run(path)
            and path.suffix not in (".xz", ".safetensors")
        ):
            raise UserError(
                f"there is no {model}; give a folder, config.json, checkpoint.pt or capture"
            )
        (model, weights), folder = _load(path, seed), path if path.is_dir() else path.parent
    if isinstance(model, Capture):
        return _table([_capture_call(model, policy)], f"{model.path.name}, with its own text")
    c = model.config if isinstance(model, GPT) else model.config.get_text_config()
    limit = getattr(c, "block_size" if isinstance(model, GPT) else "max_position_embeddings", None)
    length = min(length, limit or length)  # some have no limit
    tokens, words = _tokens(text, folder, c.vocab_size, sequences, length, seed)
    if tokens.shape[1] < 3:  # a GPT reads one less, and a mean score needs two keys
        raise UserError(
            f"sequences of length {tokens.shape[1]} are too short; take 3 tokens and more, of "
            "fewer sequences or of a longer text"
        )
    size = " x ".join(map(str, tokens.shape))
    return _table(_run(model.eval(), tokens, policy), f"{weights}, and {size} tokens of {words}")


def verdict(table: pd.DataFrame) -> str:
    """What a table of `probe` says, in words, and what was read."""
    ill = table[table.alarm]
    # A head that attends to one key alone has next to no gradient, and any error is many of it.
    worst = (table.nlargest(1, "share") if ill.empty else ill.nlargest(1, "error")).iloc[0]
    text = (
        f"in layer {worst.layer:.0f}, head {worst['head']:.0f} the error that rounding O makes "
        f"through delta is {worst.share:.2g} times as long as W_Q's gradient, and the mean score "
        f"is {round(worst.common, 1) + 0.0:.1f}. Rounding q and k moves P by {worst.tv:.2%}"
    )
    read = f"\nRead: {table.attrs['read']}." if "read" in table.attrs else ""
    if ill.empty:
        small = f" An alarm needs a mean score of {COMMON:.0f} and more, in size, as well."
        return (
            f"No alarm in {len(table)} head(s), which on little text proves nothing. The largest "
            f"share: {text}.{small * bool(worst.share >= SHARE)}{read}"
        )
    late = "it computes something else already" if worst.tv >= BROKEN else "it is still right"
    return (
        f"ALARM in {len(ill)} of {len(table)} head(s). The largest error: {text}: {late}. The "
        "policy SAFE is for training from before an alarm; that it rescues such a head is not "
        f"shown.{read}"
    )


def figure(table: pd.DataFrame):
    """The two numbers that the alarm reads, a dot a head; returns the matplotlib figure."""
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


# One call of attention: what it read, and how an error of dq reaches W_Q


def _measure(call) -> dict[str, torch.Tensor]:
    """The columns of `probe`, one number a head.

    call: layer, policy, scale, tile; q, k, v, do (B, H, T, D) as attention reads them; full_q,
    full_k before they were rounded; norms, from a part of dq to those of its W_Q gradients, (H,) of
    all sequences together and (B, H) of each.
    """
    if not all(x.isfinite().all() for x in (call.q, call.k, call.v, call.do)):
        raise UserError(
            f"attention of layer {call.layer} has numbers that are not finite: the model has "
            "failed already; give a checkpoint or a capture from before that"
        )
    parts = [_sequence(call, slice(b, b + 1)) for b in range(len(call.q))]
    seen = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    eps, full_k = seen["eps"], call.full_k.double()
    rows = eps.transpose(1, 2).flatten(0, 1)
    mean, error, _ = drift.batch_means(rows.numpy(), BLOCKS)
    size = rows.abs().mean(0).clamp(min=torch.finfo(torch.float64).tiny).numpy()
    half = stats.t.ppf(0.975, BLOCKS - 1) * error
    gradient, _ = call.norms(seen["dq"])
    moved, each = call.norms(-call.scale * eps[..., None] * seen["mean_key"])
    apart = each.square().sum(0)
    pairs = (moved.square() - apart) / (len(each) - 1 or math.nan)  # one sequence makes none

    return dict(
        tied=seen["tied"].mean((0, 2)), o_bias=seen["o_error"].sum(0) / seen["o_ulp"].sum(0),
        delta_bias=mean / size, delta_low=(mean - half) / size, delta_high=(mean + half) / size,
        share=_share(moved, gradient), error=moved, coherence=_share(pairs, apart),
        share_all=_share(call.norms(seen["dq_error"])[0], gradient),
        key_share=torch.tensor([common_part(k) for k in full_k.unbind(1)], dtype=torch.float64),
        common=seen["common"].mean((0, 2)), tv=seen["moved"].mean((0, 2)),
    )  # fmt: skip


def _share(error, gradient) -> torch.Tensor:
    """Nothing of nothing is nothing: a head whose output goes nowhere has neither."""
    return torch.where(error == 0, 0.0, error / gradient)


def _sequence(call, one: slice) -> dict[str, torch.Tensor]:
    """What `_measure` adds up, of one sequence: a (T, T) matrix a head at a time is enough."""
    q, k, v, do, full_q, full_k = (
        getattr(call, name)[one] for name in ("q", "k", "v", "do", "full_q", "full_k")
    )
    t = trace(q, k, v, do, call.policy, scale=call.scale, tile=call.tile, impl="emulate")
    exact = oracle(q, k, v, scale=call.scale, do=do)
    p = exact.p / exact.l[..., None]
    full_q, full_k = full_q.double(), full_k.double()
    before = full_k.cumsum(2) / torch.arange(1, k.shape[2] + 1, dtype=torch.float64)[:, None]
    moved = (p - scores.probabilities(full_q, full_k, call.scale)).abs().sum(-1) / 2
    return dict(
        tied=(t.ties > 1).double(), eps=t.delta_o.double() - t.delta_ref.double(),
        dq_error=t.dq.double() - exact.dq, dq=exact.dq, mean_key=p @ k.double(),
        o_error=(t.o.double() - exact.o).sum((2, 3)),
        o_ulp=ulp(exact.o, BF16).sum((2, 3)), moved=moved[..., 1:],
        common=call.scale * (full_q * before).sum(-1)[..., 1:],
    )  # fmt: skip


def _table(calls, read: str) -> pd.DataFrame:
    tables = []
    for call in calls:
        columns = {name: torch.as_tensor(x).tolist() for name, x in _measure(call).items()}
        heads = call.heads or range(len(columns["share"]))
        tables.append(pd.DataFrame(dict(layer=call.layer, head=heads) | columns))
    table = pd.concat(tables, ignore_index=True)
    table["alarm"] = (table.share >= SHARE) & (table.common.abs() >= COMMON)
    policies = ", ".join(dict.fromkeys(str(call.policy) for call in calls))
    table.attrs["read"] = f"{read}; attention emulated under {policies}"
    return table


def _capture_call(capture, policy):
    x = capture.tensors["x"].double()

    def norms(dq):
        back = rotate(dq, capture.rotation, back=True)
        each = torch.einsum("bhtd,btc->bhdc", back, x).flatten(2)
        return each.sum(0).norm(dim=1), each.norm(dim=2)

    full_q, full_k = scores.unrounded(capture)
    return SimpleNamespace(
        layer=capture.layer, heads=capture.heads, scale=capture.scale, tile=capture.tile,
        policy=PrecisionPolicy.parse(policy or capture.policy), full_q=full_q, full_k=full_k,
        norms=norms, **{name: capture.tensors[name] for name in ("q", "k", "v", "do")},
    )  # fmt: skip


# A whole model: its calls of attention, recorded


def _run(model, tokens, policy) -> list[SimpleNamespace]:
    """One forward and backward in float32 whose calls of attention are recorded."""
    calls, passed = [], {}

    def attend(q, k, v, *mask, module, policy, tile=None, scale=None, enable_gqa=False, **how):
        given = [t.bfloat16() for t in (q, k, v)]
        if not how["is_causal"]:
            raise UserError("the probe is for causal attention; this model has another")
        o = sdpa(*given, *mask, scale=scale, enable_gqa=enable_gqa, policy=policy, **how)
        o = o.to(q.dtype)
        times = q.shape[1] // k.shape[1]
        full_k, *given[1:] = (t.detach().repeat_interleave(times, 1) for t in (k, *given[1:]))
        calls.append(
            SimpleNamespace(
                layer=len(calls), heads=None, policy=PrecisionPolicy.parse(policy), tile=tile,
                scale=q.shape[3] ** -0.5 if scale is None else scale, full_q=q.detach(),
                full_k=full_k, q=given[0].detach(), k=given[1], v=given[2], o=o,
                norms=_norms(q, [m for m in module.modules() if m in passed], passed),
            )
        )  # fmt: skip
        return o

    def keep(module, inputs, output):
        passed[module] = inputs[0].detach(), output

    hooks = [
        m.register_forward_hook(keep)
        for m in model.modules()
        if getattr(getattr(m, "weight", None), "ndim", 0) == 2
    ]
    try:
        loss = (_gpt_loss if isinstance(model, GPT) else _hub_loss)(model, tokens, policy, attend)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UserError(
            f"no attention was called: {kind} has its own, as Bloom, Falcon, GPT-J and GPT-Neo do; "
            "the probe is for causal language models whose attention goes through transformers' "
            "registry"
        )
    gradients = torch.autograd.grad(loss, [call.o for call in calls], retain_graph=True)
    for call, do in zip(calls, gradients, strict=True):
        call.do = do.bfloat16()
    return calls


def _norms(q, modules, passed):
    """From dq (B, H, T, D) to the norms of the gradients it makes in the weights of q, (H,) of all
    sequences together and (B, H) of each.

    By automatic differentiation from q back to what each linear map of the layer put out, so that
    rotary positions, norms of q and fused projections need no special case.
    """

    def norms(dq):
        together, each = [], []
        for h in range(q.shape[1]):
            part = torch.zeros_like(q)
            part[:, h] = dq[:, h]
            outs = [passed[m][1] for m in modules]
            back = torch.autograd.grad(q, outs, part, retain_graph=True, allow_unused=True)
            total, apart = torch.zeros((), dtype=torch.float64), torch.zeros(len(q)).double()
            for module, g in zip(modules, back, strict=True):
                if g is not None:
                    # by sequence, also where a model puts all rows into one axis
                    g, x = (t.reshape(len(q), -1, t.shape[-1]) for t in (g, passed[module][0]))
                    made = g[..., g.flatten(0, 1).any(0)].double().mT @ x.double()
                    total += made.sum(0).square().sum()
                    apart += made.square().sum((1, 2))
            together.append(total)
            each.append(apart)
        return torch.stack(together).sqrt(), torch.stack(each, 1).sqrt()

    return norms


def _hub_loss(model, tokens, policy, attend):
    from lowprec.attention import huggingface

    before = model.config._attn_implementation
    huggingface.register("lowprec-probe", policy or FA2, "emulate", attend)
    model.set_attn_implementation("lowprec-probe")
    try:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss
    finally:
        model.set_attn_implementation(before)


def _gpt_loss(model, tokens, policy, attend):
    for block in model.blocks:
        if policy is None and len(block.groups) > 1:
            raise UserError("heads of a layer have several policies; give one with --policy")

        def attention(q, k, v, probe=None, seed=0, block=block):
            used = policy or block.groups[0][0]
            return attend(q, k, v, module=block, policy=used, is_causal=True, impl="emulate",
                          tile=model.config.tile, enable_gqa=k.shape[1] < q.shape[1])  # fmt: skip

        block.attention = attention
    try:
        return model(tokens[:, :-1], tokens[:, 1:])
    finally:
        for block in model.blocks:
            del block.attention


def _load(path: Path, seed: int):
    """A Capture, a GPT or a transformers model, by the kind of path; and its weights in words."""
    if path.is_file() and path.suffix != ".json" and (path.parent / "config.json").is_file():
        raise UserError(f"{path} is a part of a transformers model; give its folder {path.parent}")
    if path.suffix in (".xz", ".safetensors"):
        return Capture.load(path), "its own"
    if runs.is_run(path):
        raise UserError(
            f"{path} is a run; give its checkpoint.pt if it is unfinished, a file of its .weights/ "
            "or a capture"
        )
    weights = any(any(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
    saved = [p.parent for p in path.glob("checkpoint-*/config.json")]  # by transformers' Trainer
    if saved and not weights:
        names = sorted((p.name for p in saved), key=lambda name: (len(name), name))
        raise UserError(f"{path} has no weights of its own; give one of {', '.join(names)} in it")
    kept = sorted(p.name for kind in ("*.pt", "*.xz") for p in path.glob(kind))
    if kept and not (path / "config.json").is_file():
        raise UserError(f"{path} is a folder; give one file of it: {', '.join(kept)}")
    if path.is_dir() and not weights:
        if not (path / "config.json").is_file():
            raise UserError(f"{path} has no weights and no config.json; give a model's folder")
        raise UserError(f"{path} has no weights; give its config.json for random ones")
    if path.suffix == ".pt":
        return _checkpoint(path), f"the weights of {path}"
    return _transformers(path, seed)


def _checkpoint(path: Path) -> GPT:
    """From a checkpoint, or from weights that a run kept in its .weights."""
    from lowprec.training.config import TrainConfig

    try:
        state = load_archive(path)
        if "config" in state:
            config, state = json.loads(state["config"]), state["model"]
        else:
            config = runs.read_info(path.parent.parent)["config"]
        names = {field.name for field in dataclasses.fields(TrainConfig)}
        settings = {name: value for name, value in config.items() if name in names}
        model = GPT(TrainConfig(**settings).model())
        for wrapper, nothing in WRAPPERS.items():
            state = {re.sub(wrapper, nothing, name): weight for name, weight in state.items()}
        found = model.load_state_dict(state, strict=False)
    except Exception as error:  # a damaged archive raises many types
        raise UserError(
            f"{path} holds no checkpoint or weights of a run ({type(error).__name__})"
        ) from None
    _require_fit(path, found.missing_keys, found.unexpected_keys)
    return model


def _transformers(path: Path, seed: int):
    with _transformers_reading(path) as hub:
        if path.suffix != ".json":
            return _pretrained(hub, path)
        torch.manual_seed(seed)
        config = hub.AutoConfig.from_pretrained(path, local_files_only=True)
        model = hub.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model, f"random weights of seed {seed}"


def _pretrained(hub, path: Path):
    """The model of a folder with all its weights, and these in words.

    transformers draws at random what a file lacks and leaves out what it does not know, with a
    warning. What attention reads and gets back depends on all that the model has, so what is
    missing is an error here, and what is left over as well if it belongs to one of the model's
    parts: a further layer, an adapter. Else it stands beside them, as another head does.
    """
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{path} holds an adapter; merge it into its model and save that")
    for file in path.glob("pytorch_model*.bin"):
        if zipfile.is_zipfile(file):
            require_whole(file)  # safetensors have no checksums
    model, found = hub.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, output_loading_info=True,
        ignore_mismatched_sizes=True, key_mapping=WRAPPERS,
    )  # fmt: skip
    buffers = {name for name, _ in model.named_buffers()}
    left = sorted(key for key in found["unexpected_keys"] - buffers if not re.search(MASKS, key))
    parts = {name for m in (model, model.base_model) for name, _ in m.named_children()}
    inside = [key for key in left if key.split(".")[0] in parts]
    missing, other = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    _require_fit(path, missing, left if missing else inside, other)
    beside = f" without {_some(left)}, for which it has no place" if left else ""
    return model, f"the weights of {path}{beside}"


def _require_fit(path: Path, missing, left, other=()) -> None:
    """Raise `UserError` naming weights that a model lacks, has no place for, or has with another
    shape, as (name, shape, the model's)."""
    faults = [f"lack {_some(missing)}"] if missing else []
    faults += [f"have {_some(left)}, for which it has no place"] if left else []
    faults += [f"have {name} of shape {(*a,)}, not {(*b,)}" for name, a, b in other[:1]]
    if faults:
        raise UserError(
            f"the weights in {path} do not fit the model of its configuration: they "
            f"{' and '.join(faults)}; save the whole model"
        )


def _some(keys: list[str]) -> str:
    return f"{keys[0]} and {len(keys) - 1} more" if len(keys) > 1 else keys[0]


@contextlib.contextmanager
def _transformers_reading(path: Path):
    """The library; what a damaged file makes it raise, of many types, is one sentence, and the
    table of weights that it would print before is left out."""
    try:
        import transformers
    except ImportError:
        raise UserError("a model needs transformers: pip install -e '.[transformers]'") from None
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    except UserError:
        raise
    except Exception as error:
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 250)
        raise UserError(f"transformers cannot read {path} ({words})") from None
    finally:
        transformers.logging.set_verbosity(before)


def _tokens(text, folder, vocab_size, sequences, length, seed) -> tuple[torch.Tensor, str]:
    """(sequences, length) int64, ids beyond the vocabulary wrapped around; and of what."""
    from lowprec.training.data import shards as data

    few = f"has {{}} tokens; the probe needs {4 * BLOCKS} and more"
    if sequences * length < 4 * BLOCKS:
        raise UserError(f"{sequences} x {length} " + few.format(sequences * length))
    if text is None:
        smoke = data.load_tokens(files.data_root() / "corpora" / "smoke.safetensors")
        tokens = data.batch(smoke, 0, seed, sequences, length)[0]
        words = "the committed text, in GPT-2's vocabulary"
        if vocab_size not in GPT2_SIZES:
            words += f", its numbers modulo {vocab_size:,}" if vocab_size < GPT2_SIZES[0] else ""
            words += ": noise to a model that has another, so give it a text"
        return tokens % vocab_size, words
    text = Path(text)
    if not text.is_file():
        raise UserError(f"there is no text {text}")
    ids, how = _beginning(text, sequences * length, folder, vocab_size)
    ids = torch.tensor(ids)
    length = min(length, len(ids) // sequences)
    if length * sequences < 4 * BLOCKS:
        raise UserError(f"{text} {few.format(len(ids))} in {sequences} sequences of one length")
    return ids[: sequences * length].view(sequences, length) % vocab_size, f"{text.name}, {how}"


def _beginning(path: Path, count: int, folder, vocab_size: int) -> tuple[list[int], str]:
    """The first `count` tokens of a file and more, or all it has; and by what."""
    characters = 8 * count
    while True:
        with open(path, errors="replace") as file:
            part = file.read(characters)
        ids, how = _encoded(part, folder, vocab_size)
        # what is cut off changes the tokens next to the cut
        if len(part) < characters or len(ids) >= count + 64:
            return ids, how
        characters *= 4


def _encoded(text: str, folder, vocab_size: int) -> tuple[list[int], str]:
    """By the model's tokenizer, else GPT-2's, or as bytes if the vocabulary is smaller."""
    if folder is not None and any(folder.glob("tokenizer*")):
        with _transformers_reading(folder) as hub:
            tokenizer = hub.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            return tokenizer(text)["input_ids"], "by the tokenizer beside the model"
    if vocab_size >= 50257:
        from lowprec.training.data.text import gpt2_encoding

        return gpt2_encoding().encode_ordinary(text), "by GPT-2's tokenizer"
    return list(text.encode()), "as bytes"
