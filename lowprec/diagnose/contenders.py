"""What a comparison compares, and on what: attention functions by name, and inputs.

A function is called as PyTorch's scaled_dot_product_attention is, f(q, k, v, is_causal=, scale=),
with enable_gqa=True where keys have fewer heads than queries and attn_mask= of inputs with a mask,
and on what a model hands over, view(B, T, H, D).transpose(1, 2). `drawn` makes inputs, `captures`
are those of `data/captures`, and `read` and `write` keep them in safetensors.

Shapes: q, do (B, H, T, D); k, v (B, H', S, D), where H' divides H, and S = T if causal; mask is
boolean, True where a query sees a key, (B or 1, H or 1, T or 1, S or 1).
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowprec import UserError
from lowprec.attention import attention
from lowprec.attention.inputs import causal_mask, check_inputs, for_queries
from lowprec.attention.masks import Mask, fitting
from lowprec.numerics.policy import NAMES, PrecisionPolicy
from lowprec.records import files
from lowprec.training.capture import Capture

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Inputs:
    """What both functions get; see the module for shapes."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    causal: bool
    scale: float
    mask: torch.Tensor | None = None
    """in place of causal"""

    def to(self, device) -> Inputs:
        moved = (x.to(device) for x in (self.q, self.k, self.v, self.do))
        mask = None if self.mask is None else self.mask.to(device)
        return Inputs(self.name, *moved, self.causal, self.scale, mask)


# Functions


def plain(q, k, v, attn_mask=None, is_causal=False, scale=None, **_):
    """Attention in the dtype of q, each step a tensor: what a model in eager mode does."""
    k, v = (for_queries(x, q.shape[1]) for x in (k, v))
    seen = causal_mask(q.shape[2], k.shape[2], q.device, is_causal)
    seen = seen if attn_mask is None else seen & attn_mask
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (scale * (q @ k.mT)).masked_fill(~seen, -math.inf).softmax(-1) @ v


def of_policy(policy) -> Callable:
    """The emulation of a policy, with PyTorch's signature."""

    def call(q, k, v, attn_mask=None, is_causal=False, scale=None, **_):
        mask = Mask(causal=is_causal, dense=attn_mask)
        return attention(q, k, v, policy, scale=scale, impl="emulate", mask=mask)

    call.policy = PrecisionPolicy.parse(policy)
    return call


def _of_backend(name: str) -> Callable:
    def call(*args, **how):
        with sdpa_kernel(BACKENDS[name]):  # only this one: it raises where it cannot run
            return scaled_dot_product_attention(*args, **how)

    return call


def function(text: str, argument: str = "A") -> Callable:
    """The attention that a text names: a policy, `sdpa` or one of its BACKENDS, `eager`, or
    `module:function` from the working directory, or `path/to/file.py:function`.

    Raises `UserError` that names the argument.
    """
    if ":" in text and text.partition("+")[0].strip() not in NAMES:
        return _imported(text, argument)
    own = {"eager": plain, "sdpa": scaled_dot_product_attention}
    if text in own or text in BACKENDS:
        return own.get(text) or _of_backend(text)
    if text.partition("+")[0].strip() not in NAMES:
        raise UserError(f"{argument}: there is no attention {text!r}; {_hint(text, own)}")
    try:
        return of_policy(PrecisionPolicy.parse(text))
    except UserError as error:
        raise UserError(f"{argument}: {error}") from None


def _hint(text: str, own) -> str:
    place, _, name = text.removesuffix(".py").rpartition(".")
    if Path(f"{place.replace('.', '/')}.py").is_file():
        return f"did you mean {place}:{name}?"
    if Path(f"{text.removesuffix('.py')}.py").is_file():
        return f"name the function in it, as in {text}:attention"
    names = [*NAMES, *own, *BACKENDS]
    if close := difflib.get_close_matches(text, names, n=1):
        return f"did you mean {close[0]}? One of yours is module:function"
    return f"take one of {', '.join(names)}, or module:function"


def _imported(text: str, argument: str) -> Callable:
    place, _, name = text.rpartition(":")
    sys.path.insert(0, here := os.getcwd())
    try:
        is_path = place.endswith(".py") or "/" in place
        found = _module_at(place) if is_path else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{argument}: {place} cannot be imported from {here} ({words})") from None
    finally:
        if here in sys.path:
            sys.path.remove(here)
    call = getattr(found, name, None)
    if not callable(call):
        own = [n for n, x in vars(found).items() if inspect.isfunction(x)]
        has = f"; it has {', '.join(own)}" if own else ""
        raise UserError(f"{argument}: {place} has no function {name!r}{has}")
    return call


def _module_at(place: str):
    """The module of one file, under its whole path, so that two of one name are two."""
    path = Path(place).with_suffix(".py").resolve()
    name = path.as_posix()
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


# Inputs


def drawn(shape=(1, 4, 256, 64), kv_heads=None, causal=True, seed=0, dtype=torch.bfloat16):
    """Normal inputs of shape (B, H, T, D): `Inputs`, all keys apart."""
    kv_heads = shape[1] if kv_heads is None else kv_heads
    if min(*shape, kv_heads) < 1:
        raise UserError(f"shape={tuple(shape)} and kv_heads={kv_heads} must be at least 1 each")
    if not -(2**63) <= seed < 2**64:
        raise UserError(f"seed={seed} must be from -2^63 to 2^64 - 1, as torch takes them")
    g, heads = torch.Generator().manual_seed(seed), (shape[1], kv_heads, kv_heads, shape[1])
    tensors = (torch.randn(shape[0], h, *shape[2:], generator=g).to(dtype) for h in heads)
    return Inputs(f"random, seed {seed}", *tensors, causal, shape[-1] ** -0.5)


def captured(capture: Capture) -> Inputs:
    """What the attention of a capture got."""
    tensors = (capture.tensors[name] for name in ("q", "k", "v", "do"))
    return Inputs(capture.path.stem, *tensors, capture.meta["causal"], capture.scale)


def captures() -> list[Inputs]:
    """Those of `data/captures`, which are causal, one head and one sequence each."""
    if not (paths := _paths()):
        raise UserError(f"there are no captures in {files.data_root() / 'captures'}")
    return [captured(Capture.load(path)) for path in paths.values()]


def named(name: str) -> Inputs:
    """What a capture of `path_named` got."""
    return captured(Capture.load(path_named(name)))


def path_named(name: str) -> Path:
    """Of a capture of `data/captures` by its name, or the path that is given; `UserError` for a
    name that is none."""
    paths = _paths()
    if name not in paths and not Path(name).suffix:
        close = difflib.get_close_matches(name, paths, n=1)
        hint = f"did you mean {close[0]}?" if close else f"take one of {', '.join(paths)}"
        raise UserError(f"there is no capture {name!r}: {hint}")
    return paths.get(name, Path(name))


def by_name(name) -> Path:
    """A path, or where there is none that of a capture of `data/captures` with this name.
    Raises `UserError` for what is nearly such a name."""
    if Path(name).exists() or Path(name).suffix:
        return Path(name)
    paths, bare = _paths(), Path(name).name == str(name)
    close = difflib.get_close_matches(str(name), paths, n=1) if bare else []
    if close and close != [str(name)]:
        raise UserError(f"there is no {name}: did you mean the capture {close[0]}?")
    return paths.get(str(name), Path(name))


def _paths() -> dict[str, Path]:
    return {p.stem: p for p in sorted((files.data_root() / "captures").glob("**/*.xz"))}


def read(path, causal: bool | None = None) -> Inputs:
    """The inputs of a safetensors file with q, k, v and do, perhaps a mask, or of a capture, which
    may be one of `data/captures` by its name.

    Its metadata may have `causal` and `scale`, in JSON: true, 0.125. causal: where it has not, and
    then it must be given, but beside a mask, which says all; it must not be another than they say.
    Raises `UserError` naming the file.
    """
    path = by_name(path)
    if path.suffix == ".xz":
        inputs = captured(Capture.load(path))
        if causal is not None and causal != inputs.causal:
            raise UserError(f"--on: {path} has causal={inputs.causal}")
        return inputs
    if path.is_dir():
        raise UserError(f"--on: {path} is a folder; take random, captures or a .safetensors file")
    if not path.is_file():
        raise UserError(f"--on: there is no {path}; take random, captures or a .safetensors file")
    try:
        with safe_open(path, "pt") as file:
            about, names = file.metadata() or {}, list(file.keys())
            tensors = {n: file.get_tensor(n) for n in ("q", "k", "v", "do") if n in names}
            mask = file.get_tensor("mask") if "mask" in names else None
    except (SafetensorError, OSError) as error:
        raise UserError(f"--on: {path} cannot be read as safetensors ({error})") from None
    if lacking := [n for n in ("q", "k", "v", "do") if n not in tensors]:
        raise UserError(
            f"--on: {path} has no tensor {', '.join(lacking)}; it has "
            + ", ".join(names[:5] + ["…"] * (len(names) > 5))
        )
    try:
        masked = mask is not None and causal is None and "causal" not in about
        causal, scale = _said(about, False if masked else causal)
        scale = check_inputs(*(tensors[n] for n in "qkv"), causal, scale, tensors["do"])
        if (ours := tensors["q"].shape[3]) != (theirs := tensors["v"].shape[3]):
            raise UserError(f"v and do must have q's head_dim, {ours}, not {theirs}")
        for n, x in tensors.items():
            if not x.float().isfinite().all():
                raise UserError(f"{n} has numbers that are not finite; take other inputs")
        if mask is not None:
            mask = _masked(mask, causal, tensors["q"], tensors["k"])
    except UserError as error:
        raise UserError(f"--on: {path}: {error}") from None
    return Inputs(path.stem, *tensors.values(), causal, scale, mask)


def _masked(mask, causal, q, k):
    """A mask of a file, of four dimensions."""
    if causal:
        raise UserError("it has a mask: put what is causal into that, and leave causal out")
    if mask.dtype != torch.bool:
        raise UserError(f"its mask is boolean, True where a query sees a key, not {mask.dtype}")
    mask = fitting("its mask", mask, q, k)
    if not mask.any(-1).all():
        raise UserError("its mask shows no key to some query: what attention is there, none agree")
    return mask


def _said(about: dict, causal) -> tuple[bool, float | None]:
    """`causal` and `scale` of metadata, also as Python writes them."""
    said, scale = about.get("causal", str(causal)), about.get("scale", "null")
    if said == "None":
        raise UserError("its metadata has no causal; add it, or say --causal or --no-causal")
    if said.lower() not in ("true", "false"):
        raise UserError(f"its metadata has causal={said}; write true or false")
    if causal is not None and causal != (said.lower() == "true"):
        raise UserError(f"its metadata has causal={said}, against --{'no-' * (not causal)}causal")
    try:
        number = None if scale in ("null", "None") else float(scale)
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise UserError(f"its metadata has scale={scale}; write a number or null")
    return said.lower() == "true", number


def write(inputs: Inputs, path, **about: str) -> None:
    """Write inputs as `read` reads them, and any reader of safetensors; about: what else its header
    says."""
    tensors = {n: getattr(inputs, n).cpu().contiguous() for n in ("q", "k", "v", "do")}
    tensors |= {} if inputs.mask is None else {"mask": inputs.mask.cpu().contiguous()}
    about |= dict(causal=inputs.causal, scale=inputs.scale, name=inputs.name)
    content = save(tensors, {name: json.dumps(value) for name, value in about.items()})
    files.write_atomic(Path(path), lambda file: file.write(content))
