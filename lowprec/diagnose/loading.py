"""From a path to what the probe reads: a model with all its weights, a capture, a text's tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import textwrap
import zipfile
from pathlib import Path

import torch

from lowprec import UserError
from lowprec.records import files, runs
from lowprec.records.tables import load_archive, require_whole
from lowprec.training.capture import Capture
from lowprec.training.data.text import VOCABULARIES
from lowprec.training.model import GPT

WRAPPERS = {r"(?<![^.])_orig_mod\.": "", r"^module\.": ""}
"""What torch.compile, of a model or of parts, and a distributed wrapper put into the names of
weights."""
MASKS = r"\.(attn|attention)\.(masked_)?bias$|\.(causal_mask|inv_freq)$|(^|\.)version$"
"""Names of what older versions stored beside the weights; a model makes its own."""

HERE = dict(local_files_only=True, trust_remote_code=False)
"""Nothing is downloaded, and no code of a model run."""
GPT2_SIZES = 50257, 50304
"""Of GPT-2's vocabulary, as it is and padded to a multiple of 64."""
FEWEST = 64
"""Tokens of a probe at least: a few rows for each of its blocks."""
BESIDE = "by the tokenizer beside the model"
TOKENIZERS = ("tokenizer*", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece*", "tekken*")
"""Files that transformers' tokenizers are made of."""
NOISE = "for want of its tokenizer, so noise to a model that was trained with another"


def load(path: Path, seed: int):
    """A Capture, a GPT or a transformers model, by the kind of path; and its weights in words."""
    if path.suffix == ".gguf" and path.is_file():
        from lowprec.diagnose import pretrained

        return pretrained.load(path)
    if path.name == "config.json" and path.is_file() and (beside := _weights(path.parent)):
        raise UserError(
            f"{path} alone is a model of random weights, and {beside[0].name} lies beside it: give "
            f"their folder {path.parent}"
        )
    if path.is_file() and path.suffix != ".json" and (path.parent / "config.json").is_file():
        raise UserError(f"{path} is a part of a transformers model; give its folder {path.parent}")
    if path.suffix in (".xz", ".safetensors"):
        return Capture.load(path), "its own"
    if runs.is_run(path):
        raise UserError(
            f"{path} is a run; give its checkpoint.pt if it is unfinished, a file of its .weights/ "
            "or a capture"
        )
    weights = _weights(path)
    saved = [p.parent for p in path.glob("checkpoint-*/config.json")]  # by transformers' Trainer
    if saved and not weights:
        names = sorted((p.name for p in saved), key=lambda name: (len(name), name))
        raise UserError(f"{path} has no weights of its own; give one of {', '.join(names)} in it")
    kept = sorted(p.name for kind in ("*.pt", "*.xz") for p in path.glob(kind))
    kept = [] if (path / "config.json").is_file() else kept
    kept += sorted(p.name for p in path.glob("*.gguf") if not weights)
    if kept:
        raise UserError(f"{path} is a folder; give one file of it: {', '.join(kept)}")
    if path.is_dir() and not weights:
        if not (path / "config.json").is_file():
            raise UserError(f"{path} has no weights and no config.json; give a model's folder")
        raise UserError(f"{path} has no weights; give its config.json for random ones")
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        return _checkpoint(path), f"the weights of {path}"
    if path.suffix in (".csv", ".jsonl", ".txt", ".log"):
        raise UserError(
            f"{path} has no weights: losses and norms alone do not tell why a run exploded; give a "
            "checkpoint, or watch with lowprec.Monitor as the model trains"
        )
    return _transformers(path, seed)


def _weights(folder: Path) -> list[Path]:
    return [file for kind in ("safetensors", "bin") for file in folder.glob(f"*.{kind}")]


def _checkpoint(path: Path):
    """From a checkpoint, or from weights that a run kept in its .weights, or nanoGPT's."""
    try:
        state = load_archive(path)
        if not (nano := "model_args" in state):
            model, weights = _own(path, state)
            found = model.load_state_dict(weights, strict=False)
    except Exception as error:  # a damaged archive raises many types
        raise UserError(
            f"{path} holds no checkpoint or weights of a run ({type(error).__name__}): it reads "
            "those of `lowprec train` and of nanoGPT; of another model give the folder that "
            "save_pretrained of transformers makes, or watch it with lowprec.Monitor as it trains"
        ) from None
    if nano:
        with transformers_reading(path) as hub:
            model, weights = _nanogpt(hub, state)
            found = model.load_state_dict(weights, strict=False)
    require_fit(path, found.missing_keys, found.unexpected_keys)
    return model


def _own(path: Path, state: dict) -> tuple[GPT, dict]:
    from lowprec.training.config import TrainConfig

    if "config" in state:
        config, state = json.loads(state["config"]), state["model"]
    else:
        config = runs.read_info(path.parent.parent)["config"]
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    settings = {name: value for name, value in config.items() if name in names}
    weights = _unwrapped(state)
    shape = TrainConfig(**settings).model()
    if "token.weight" in weights:  # of the vocabulary of its tokens
        shape = dataclasses.replace(shape, vocab_size=len(weights["token.weight"]))
    return GPT(shape), weights


def _nanogpt(hub, state: dict):
    """nanoGPT's checkpoint as a GPT-2 of transformers: the same network, with matrices of attention
    and MLP the other way round, and with biases of zero where it has none."""
    c = state["model_args"]
    sizes = {name: c[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    given = _unwrapped(state["model"])
    ends = [given.get(name) for name in ("lm_head.weight", "transformer.wte.weight")]
    config = hub.GPT2Config(
        **sizes, n_positions=c["block_size"], activation_function="gelu",
        tie_word_embeddings=any(x is None for x in ends) or torch.equal(*ends),
    )  # fmt: skip
    model, weights = hub.GPT2LMHeadModel(config), {}
    for name, weight in given.items():
        if not re.search(MASKS, name):
            turned = re.search(r"\.h\.\d+\.(attn|mlp)\.c_\w+\.weight$", name)
            weights[name] = weight.T if turned else weight
    zero = {name: torch.zeros_like(x) for name, x in model.named_parameters() if "bias" in name}
    return model, (weights if c.get("bias", True) else zero | weights)


def _unwrapped(weights: dict) -> dict:
    for wrapper, nothing in WRAPPERS.items():
        weights = {re.sub(wrapper, nothing, name): weight for name, weight in weights.items()}
    return weights


def _transformers(path: Path, seed: int):
    with transformers_reading(path) as hub:
        if path.suffix != ".json":
            return _pretrained(hub, path)
        torch.manual_seed(seed)
        config = hub.AutoConfig.from_pretrained(path, **HERE)
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
        path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
        key_mapping=WRAPPERS, **HERE,
    )  # fmt: skip
    buffers = {name for name, _ in model.named_buffers()}
    left = sorted(key for key in found["unexpected_keys"] - buffers if not re.search(MASKS, key))
    parts = {name for m in (model, model.base_model) for name, _ in m.named_children()}
    inside = [key for key in left if key.split(".")[0] in parts]
    missing, other = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    require_fit(path, missing, left if missing else inside, other)
    beside = f" without {_some(left)}, for which it has no place" if left else ""
    return model, f"the weights of {path}{beside}"


def require_fit(path: Path, missing, left, other=()) -> None:
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
def transformers_reading(path: Path):
    """The library; what a damaged file makes it raise, of many types, is one sentence, and the bar
    and the table of weights that it would print before are left out."""
    try:
        import transformers
    except ImportError:
        raise UserError("a model needs transformers: pip install -e '.[transformers]'") from None
    said = transformers.logging
    before, bar = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity_error()
    said.disable_progress_bar()
    try:
        yield transformers
    except UserError:
        raise
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise UserError(f"{path} is no causal language model, which the probe reads") from None
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{path} has code of its own: load it yourself, and call lowprec.probe(model, text)"
            ) from None
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 250)
        raise UserError(f"transformers cannot read {path} ({words})") from None
    finally:
        said.set_verbosity(before)
        if bar:
            said.enable_progress_bar()


def tokens(text, folder, vocab_size, sequences, length, seed) -> tuple[torch.Tensor, str]:
    """(sequences, length) int64, ids beyond the vocabulary wrapped around; and of what."""
    from lowprec.training.data import shards as data

    few = f"has {{}} tokens; the probe needs {FEWEST} and more"
    if sequences * length < FEWEST:
        raise UserError(f"{sequences} x {length} " + few.format(sequences * length))
    if text is None:
        smoke = data.load_tokens(files.data_root() / "corpora" / "smoke.safetensors")
        ids = data.batch(smoke, 0, seed, sequences, length)[0]
        words = "the committed text, in GPT-2's vocabulary"
        if vocab_size not in GPT2_SIZES:
            words += f", its numbers modulo {vocab_size:,}" if vocab_size < GPT2_SIZES[0] else ""
            words += ": noise to a model that has another, so give it a text"
        return ids % vocab_size, words
    text = Path(text)
    try:
        there = text.is_file()
    except OSError:  # too long for a name: the text itself
        there = False
    if not there:
        raise UserError(f"there is no text {str(text).partition(chr(10))[0]:.200}; name a file")
    ids, how = _beginning(text, sequences * length, folder, vocab_size)
    ids = torch.tensor(ids)
    # of a short text fewer sequences, and not much shorter ones, whose rows would see few keys
    sequences = min(sequences, max(round(len(ids) / length), 1))
    length = min(length, len(ids) // sequences)
    if length * sequences < FEWEST:
        raise UserError(f"{text} {few.format(len(ids))}")
    if how == BESIDE and ids.max() >= vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has numbers up to {ids.max():,} and the model rows for "
            f"{vocab_size:,}: it is another model's"
        )
    return ids[: sequences * length].view(sequences, length) % vocab_size, f"{text.name}, {how}"


def _beginning(path: Path, count: int, folder, vocab_size: int) -> tuple[list[int], str]:
    """The first `count` tokens of a file and more, or all it has; and by what."""
    characters = 8 * count
    while True:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                part = file.read(characters)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        if part.count("\0") + part.count("\N{REPLACEMENT CHARACTER}") > len(part) / 1000:
            raise UserError(f"{path} is no text in UTF-8; convert it")
        ids, how = _encoded(part, folder, vocab_size)
        # what is cut off changes the tokens next to the cut
        if len(part) < characters or len(ids) >= count + 64:
            return ids, how
        characters *= 4


def _encoded(text: str, folder, vocab_size: int) -> tuple[list[int], str]:
    """By the model's tokenizer, else GPT-2's, or as bytes if the vocabulary is smaller. folder: of
    the model, or its GGUF file."""
    if folder is not None and folder.suffix == ".gguf":
        from lowprec.diagnose import pretrained

        return pretrained.tokenizer(folder)(text)["input_ids"], "by the model's own tokenizer"
    if folder is not None and any(file for kind in TOKENIZERS for file in folder.glob(kind)):
        with transformers_reading(folder) as hub:
            tokenizer = hub.AutoTokenizer.from_pretrained(folder, **HERE)
            return tokenizer(text)["input_ids"], BESIDE
    if vocab_size >= 50257:
        from lowprec.training.data.text import gpt2_encoding

        how = "by GPT-2's tokenizer"
        how += f" {NOISE}" if vocab_size not in GPT2_SIZES else ""
        try:
            return gpt2_encoding().encode_ordinary(text), how
        except UserError as error:
            none = f"{folder} has no tokenizer: save it there. Else " if folder else ""
            raise UserError(f"{none}{error}") from None
    how = "as bytes" if vocab_size == VOCABULARIES["bytes"] else f"as bytes {NOISE}"
    return list(text.encode()), how
