"""Bug or rounding? Two attention functions on the same inputs, against float64.

The maintainers of FlashAttention accept a kernel that errs at most twice as much as a plain
attention in the same 16-bit format. `measure` has that ratio for O and each gradient, and what a
ratio does not show: the sign of the error, and what moving every input by one ulp does to the exact
result (the tolerance of TTrace, arXiv:2506.09280). `verdict` says it in words.

A function is called as PyTorch's scaled_dot_product_attention is, f(q, k, v, is_causal=, scale=),
with enable_gqa=True where keys have fewer heads than queries.

Shapes: q, do (B, H, T, D); k, v (B, H', S, D), where H' divides H, and S = T if causal.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy import stats
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowprec import UserError
from lowprec.attention import attention
from lowprec.attention.reference import causal_mask, check_inputs, for_queries, oracle
from lowprec.diagnose import drift
from lowprec.numerics.formats import Format, round_to, ulp
from lowprec.numerics.policy import NAMES, PrecisionPolicy
from lowprec.publish import plots
from lowprec.records import files
from lowprec.training.capture import Capture

TIMES = 2
"""The rule: this many times the error of a plain attention."""
LEAN = 0.5
"""A sign beyond noise counts as a fault from this share of a plain attention's error on."""
LEVEL, BLOCKS = 0.05, 16
"""Of all tests of a sign in a table together, and blocks of rows behind each."""
OF = ("O", "dQ", "dK", "dV", "δ")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
COLUMNS = {
    "input": "which q, k, v and dO",
    "of": "O, a gradient, or δ as dQ shows it",
    "who": "the function",
    "error": "norm of the error over the norm of the exact result",
    "plain": "that of a plain attention in the dtype of q, at least that of storing the exact one",
    "times": "the one over the other",
    "worst": "the same for the row with the largest error",
    "signed": "mean error of a row along its exact direction, of dQ along the mean key of the "
    "head, of δ as it is; over the root mean square of the exact rows",
    "half": f"half its 95 % interval, from {BLOCKS} blocks of rows",
    "p": "of no sign, two-sided, the same blocks",
    "n": "number of blocks",
    "ulps": "error over what moving all inputs by one ulp does to the exact result",
}
"""The columns of `measure`, in words."""


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

    def to(self, device) -> Inputs:
        moved = (x.to(device) for x in (self.q, self.k, self.v, self.do))
        return Inputs(self.name, *moved, self.causal, self.scale)


# Functions


def plain(q, k, v, is_causal=False, scale=None, **_):
    """Attention in the dtype of q, each step a tensor: what a model in eager mode does."""
    k, v = (for_queries(x, q.shape[1]) for x in (k, v))
    seen = causal_mask(q.shape[2], k.shape[2], q.device, is_causal)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (scale * (q @ k.mT)).masked_fill(~seen, -math.inf).softmax(-1) @ v


def of_policy(policy) -> Callable:
    """The emulation of a policy, with PyTorch's signature."""

    def call(q, k, v, is_causal=False, scale=None, **_):
        return attention(q, k, v, policy, is_causal, scale, impl="emulate")

    return call


def _of_backend(name: str) -> Callable:
    def call(*args, **how):
        with sdpa_kernel(BACKENDS[name]):  # only this one: it raises where it cannot run
            return scaled_dot_product_attention(*args, **how)

    return call


def function(text: str, argument: str = "A") -> Callable:
    """The attention that a text names: a policy, `sdpa` or one of its BACKENDS, `eager`, or
    `module:function` or `file.py:function` from the working directory.

    Raises `UserError` that names the argument.
    """
    if ":" in text and text.partition("+")[0] not in NAMES:
        return _imported(text, argument)
    own = {"eager": plain, "sdpa": scaled_dot_product_attention}
    if text in own or text in BACKENDS:
        return own.get(text) or _of_backend(text)
    try:
        return of_policy(PrecisionPolicy.parse(text))
    except UserError as error:
        names = [*NAMES, *own, *BACKENDS]
        if text.partition("+")[0].strip() in NAMES:
            raise UserError(f"{argument}: {error}") from None
        close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"take one of {', '.join(names)}"
        raise UserError(
            f"{argument}: there is no attention {text!r}: {hint} One of yours is module:function"
            if close
            else f"{argument}: there is no attention {text!r}: {hint}, or module:function"
        ) from None


def _imported(text: str, argument: str) -> Callable:
    place, _, name = text.rpartition(":")
    module = place.removesuffix(".py").replace("/", ".").strip(".")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a user's module raises
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"{argument}: {place} cannot be imported from {os.getcwd()} ({words})"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    call = getattr(found, name, None)
    if not callable(call):
        own = [n for n, x in vars(found).items() if inspect.isfunction(x)]
        has = f"; it has {', '.join(own)}" if own else ""
        raise UserError(f"{argument}: {place} has no function {name!r}{has}")
    return call


# Inputs


def drawn(shape=(1, 4, 256, 64), kv_heads=None, causal=True, seed=0, dtype=torch.bfloat16):
    """Normal inputs of shape (B, H, T, D): `Inputs`, all keys apart."""
    g = torch.Generator().manual_seed(seed)
    heads = (shape[1], kv_heads or shape[1], kv_heads or shape[1], shape[1])
    tensors = (torch.randn(shape[0], h, *shape[2:], generator=g).to(dtype) for h in heads)
    return Inputs(f"random, seed {seed}", *tensors, causal, shape[-1] ** -0.5)


def captured(capture: Capture) -> Inputs:
    """What the attention of a capture got."""
    tensors = (capture.tensors[name] for name in ("q", "k", "v", "do"))
    return Inputs(capture.path.stem, *tensors, capture.meta["causal"], capture.scale)


def captures() -> list[Inputs]:
    """Those of `data/captures`, which are causal, one head and one sequence each."""
    paths = sorted((files.data_root() / "captures").glob("**/*.xz"))
    return [captured(Capture.load(path)) for path in paths]


def read(path, causal: bool | None = None) -> Inputs:
    """The inputs of a safetensors file with q, k, v and do, or of a capture.

    Its metadata may have `causal` and `scale`, in JSON: true, 0.125. causal: where it has not.
    Raises `UserError` naming the file.
    """
    path = Path(path)
    if path.suffix == ".xz":
        return captured(Capture.load(path))
    if not path.is_file():
        raise UserError(f"--on: there is no {path}; take random, captures or a .safetensors file")
    try:
        with safe_open(path, "pt") as file:
            about, names = file.metadata() or {}, list(file.keys())
            tensors = {n: file.get_tensor(n) for n in ("q", "k", "v", "do") if n in names}
        causal = bool(json.loads(about.get("causal", json.dumps(bool(causal)))))
        scale = json.loads(about.get("scale", "null"))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"--on: {path} cannot be read as safetensors ({error})") from None
    if lacking := [n for n in ("q", "k", "v", "do") if n not in tensors]:
        raise UserError(
            f"--on: {path} has no tensor {', '.join(lacking)}; it has {', '.join(names)}"
        )
    try:
        scale = check_inputs(*(tensors[n] for n in "qkv"), causal, scale, tensors["do"])
    except UserError as error:
        raise UserError(f"--on: {path}: {error}") from None
    return Inputs(path.stem, *tensors.values(), causal, scale)


def write(inputs: Inputs, path) -> None:
    """Write inputs as `read` reads them, and any reader of safetensors."""
    tensors = {n: getattr(inputs, n).cpu().contiguous() for n in ("q", "k", "v", "do")}
    about = dict(causal=inputs.causal, scale=inputs.scale, name=inputs.name, licence="MIT")
    save_file(tensors, path, {name: json.dumps(value) for name, value in about.items()})


# Measures


def run(call: Callable, inputs: Inputs, name: str = "A") -> dict[str, torch.Tensor]:
    """{O, dQ, dK, dV} of a function in float64; O alone of one that is not differentiable."""
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    shared = dict(enable_gqa=True) if inputs.k.shape[1] < inputs.q.shape[1] else {}
    try:
        o = call(*leaves, is_causal=inputs.causal, scale=inputs.scale, **shared)
        gradients = ()
        if isinstance(o, torch.Tensor) and o.requires_grad:
            gradients = torch.autograd.grad(o, leaves, inputs.do.to(o), allow_unused=True)
            gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves)]
    except Exception as error:  # whatever a user's function raises
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"{name} fails on {inputs.name} ({words}); it is called as PyTorch's "
            f"scaled_dot_product_attention: f(q, k, v, is_causal={inputs.causal}, "
            f"scale={inputs.scale:.4g}{', enable_gqa=True' * bool(shared)})"
        ) from None
    if not isinstance(o, torch.Tensor) or o.shape != inputs.q.shape:
        got = tuple(o.shape) if isinstance(o, torch.Tensor) else type(o).__name__
        raise UserError(f"{name} must return O of shape {tuple(inputs.q.shape)}, and gives {got}")
    found = dict(zip(OF, (o.detach(), *gradients), strict=False))
    return {of: x.double() for of, x in found.items()}


class Exact:
    """The exact attention on some inputs, what a plain one errs there, and what one ulp does.

    draws: how often all inputs are moved by one ulp, up or down at random.
    """

    def __init__(self, inputs: Inputs, draws: int = 3):
        self.inputs, self.fmt = inputs, Format.parse(str(inputs.q.dtype).removeprefix("torch."))
        tensors, how = (inputs.q, inputs.k, inputs.v), (inputs.causal, inputs.scale)
        t = oracle(*tensors, *how, do=inputs.do)
        key = for_queries(inputs.k.double(), inputs.q.shape[1])
        self.mean_key = torch.nn.functional.normalize(key.mean(2, keepdim=True), dim=-1)
        self.weighted = t.p_bwd @ key
        self.right = dict(zip(OF, (t.o, t.dq, t.dk, t.dv, self._delta(t.delta)), strict=True))
        g, moves = torch.Generator().manual_seed(0), []
        for _ in range(draws):
            q, k, v, do = (self._moved(x, g) for x in (*tensors, inputs.do))
            t = oracle(q, k, v, *how, do=do)
            there = zip(OF, (t.o, t.dq, t.dk, t.dv, self._delta(t.delta)), strict=True)
            moves.append({of: self._share(of, x - self.right[of]) for of, x in there})
        self.ulp = {of: math.sqrt(sum(m[of] ** 2 for m in moves) / draws) for of in OF}
        stored = {of: self._stored(x) - x for of, x in self.right.items() if of != "δ"}
        errors = self.errors(run(plain, inputs, "a plain attention"))
        both = [(of, errors[of], stored.get(of, torch.zeros_like(errors[of]))) for of in OF]
        self.plain = {of: max(self._share(of, a), self._share(of, b)) for of, a, b in both}
        self.plain_worst = {of: max(self._worst(of, a), self._worst(of, b)) for of, a, b in both}

    def _moved(self, x, g):
        up = torch.randint(2, x.shape, generator=g).to(x.device) * 2 - 1
        return x.double() + up * ulp(x.double(), self.fmt)

    def _stored(self, x):
        return round_to(x.float(), self.fmt).double()

    def _delta(self, delta):
        """delta, or its error, (B, H, T, 1), times the length of the row's weighted key."""
        return delta[..., None] * self.weighted.norm(dim=-1, keepdim=True)

    def errors(self, found: dict) -> dict[str, torch.Tensor]:
        """What `run` found, less the exact; with δ's error as that of dQ shows it: it enters dQ
        as -scale times the error of δ times the row's weighted key."""
        errors = {of: x - self.right[of] for of, x in found.items()}
        if "dQ" in errors:
            unit = torch.nn.functional.normalize(self.weighted, dim=-1)
            errors["δ"] = -(errors["dQ"] * unit).sum(-1, keepdim=True) / self.inputs.scale
        return errors

    def _share(self, of, error) -> float:
        return (error.norm() / self.right[of].norm()).item()

    def _worst(self, of, error) -> float:
        return error.norm(dim=-1).max().item()

    def _along(self, of, error) -> np.ndarray:
        """(T, B H) each row's error along its direction, over the rms of the exact rows."""
        right = self.right[of]
        toward = right if of in ("O", "dK", "dV") else self.mean_key
        if of == "δ":
            toward = self.weighted.norm(dim=-1, keepdim=True)
            toward = toward / toward.square().mean().sqrt()
        else:
            toward = torch.nn.functional.normalize(toward, dim=-1)
        size = right.square().sum(-1).mean().sqrt()
        return ((error * toward).sum(-1) / size).flatten(0, 1).mT.cpu().numpy()

    def rows(self, who: str, found: dict) -> list[dict]:
        """The rows of `measure` of one function."""
        rows = []
        for of, error in self.errors(found).items():
            along = self._along(of, error).mean(1)
            n = min(BLOCKS, len(along))
            mean, se, p = drift.batch_means(along, n) if n > 1 else (along.mean(), math.nan, 1.0)
            size = self._share(of, error)
            rows.append(dict(
                input=self.inputs.name, of=of, who=who, error=size, plain=self.plain[of],
                times=_over(size, self.plain[of]),
                worst=_over(self._worst(of, error), self.plain_worst[of]),
                signed=float(mean), half=float(stats.t.ppf(0.975, max(n - 1, 1)) * se),
                p=float(p), n=n, ulps=_over(size, self.ulp[of]),
            ))  # fmt: skip
        return rows


def _over(a: float, b: float) -> float:
    return math.nan if math.isnan(a) else 0.0 if a == 0 else a / b if b else math.inf


def measure(functions: dict[str, Callable], inputs: Iterable[Inputs], draws=3, twice=True):
    """How functions err on inputs: a row an input, function and quantity, columns as in COLUMNS.

    functions: who -> call. twice: run each twice; `.attrs["unsteady"]` has (who, input, of,
    relative difference) of what differs. `.attrs["forward"]` has who gives no gradients.
    """
    rows, unsteady, forward = [], [], []
    for some in inputs:
        exact = Exact(some, draws)
        for who, call in functions.items():
            found = run(call, some, who)
            rows += exact.rows(who, found)
            forward += [who] * ("dQ" not in found and who not in forward)
            again = run(call, some, who) if twice else found
            unsteady += [
                (who, some.name, of, exact._share(of, again[of] - x))
                for of, x in found.items()
                if not torch.equal(again[of], x)
            ]
    table = pd.DataFrame(rows)
    table.attrs.update(unsteady=unsteady, forward=forward)
    return judged(table)


# In words


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """The table with two columns more: `large`, beyond the rule; `lean`, a sign beyond noise, by
    Bonferroni's correction over the table, that is LEAN of a plain attention's error or more."""
    large = ~(table[["times", "worst"]].max(axis=1, skipna=False) <= TIMES)
    clear = table.p < LEVEL / len(table)
    lean = clear & (table.signed.abs() >= LEAN * table.plain)
    return table.assign(large=large, clear=clear, lean=lean)
