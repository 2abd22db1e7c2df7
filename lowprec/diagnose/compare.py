"""Bug or rounding? Two attention functions on the same inputs, against float64.

The maintainers of FlashAttention accept a kernel that errs at most twice as much as a plain
attention in the same 16-bit format. `measure` has that ratio for O and each gradient, and what a
ratio does not show: the sign of the error, and what moving every input by one ulp does to the exact
result (the tolerance of TTrace, arXiv:2506.09280). `verdict` says it in words.

Functions and inputs, with their shapes: `lowprec.diagnose.contenders`.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd
import scipy
import torch

from lowprec import UserError
from lowprec.attention.inputs import DTYPES, for_queries
from lowprec.attention.masks import Mask
from lowprec.attention.reference import oracle
from lowprec.diagnose import drift
from lowprec.diagnose.contenders import Inputs, of_policy, plain
from lowprec.numerics.formats import BF16, FP16, Format, round_to, ulp
from lowprec.numerics.policy import SITES
from lowprec.publish import plots
from lowprec.publish.labels import row_panels

TIMES, WORST = 2, 4
"""The rule: this many times the error of a plain attention; and in the worst row, which is more
noisy, of the row's yardstick."""
FAINT, APART = 0.01, {torch.bfloat16: 2, torch.float16: 16, torch.float32: 200}
"""A row of O, dK or dV may err by WORST times as much as a plain attention, one ulp or storing make
it err, at least this share of their root mean square, times APART: on captured heads in that dtype
PyTorch's function has about half of the limit or less, on random inputs a key at the end without a
gradient twice it or more."""
LEAN = 0.5
"""A sign beyond noise counts as a fault from this share of a plain attention's error on."""
PIECES = ", as where a kernel makes FP32 products of shorter ones and cuts their sums off"
"""What else a sign of a few ulps may come from in FP32. PyTorch's memory-efficient kernel has one
on an H200, where with one key O is not V."""
LEVEL, BLOCKS = 0.05, 16
"""Of all tests of a sign in a table together, and blocks of rows behind each."""
ULPS, ULPS_FP32 = 1.5, 10
"""Beyond so many times what one ulp of the inputs does, an error is called magnified; of inputs in
FP32 beyond the second, since sums round as they do there: of normal numbers a plain attention errs
by up to 4, and by 0.4 in 16 bits."""
WEAK = 0.1
"""From this error of a plain attention on, the rule says little."""
NOISE = 1e-12
"""An exact gradient of no more than this share of the product of the norms that it is made of is
float64 noise."""
ALIKE = 1.5
"""Errors within this factor are called alike."""
OF = ("O", "dQ", "dK", "dV", "δ")
COLUMNS = {
    "input": "which q, k, v and dO",
    "of": "O, a gradient, or δ as dQ shows it",
    "who": "the function",
    "error": "norm of the error over the norm of the exact result, or itself where that is 0",
    "plain": "that of a plain attention in the dtype of q, at least that of storing the exact one",
    "times": "the one over the other",
    "worst": "the same for the row with the largest error; or, of O, dK and dV, for the row that "
    "errs most over what it may, if more",
    "signed": "mean error of a row along its exact direction, of dQ along the mean key of the "
    "head, of δ as it is; over the root mean square of the exact rows",
    "half": f"half its 95 % interval, from {BLOCKS} blocks of rows",
    "p": "of no sign, two-sided, the same blocks",
    "n": "number of blocks",
    "ulps": "error over what moving all inputs by one ulp does to the exact result, which is taken "
    "to be at least what storing it does",
    "far": f"ulps over the most that is not called magnified: {ULPS}, and {ULPS_FP32} of inputs in "
    "FP32",
    "large": f"times above {TIMES}, or worst above {WORST}, or not a number; δ is left out, and of "
    "inputs in FP32 with a mask what is not far",
    "clear": f"a sign beyond noise, by Bonferroni's correction over the table, of {BLOCKS} blocks",
    "lean": "such a sign, of LEAN times `plain` or more",
}
"""The columns of `measure`, in words."""


# Measures


@torch.inference_mode(False)
@torch.enable_grad()
def run(call: Callable, inputs: Inputs, name: str = "A") -> dict[str, torch.Tensor]:
    """{O, dQ, dK, dV} of a function in float64; O alone of one that is not differentiable.

    q, k, v and dO lie in memory as those of a model do, each a (B, T, H, D) transposed.
    """
    leaves = [_laid(x).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    shared = dict(enable_gqa=True) if inputs.k.shape[1] < inputs.q.shape[1] else {}
    how = dict(is_causal=inputs.causal, scale=inputs.scale, **shared)
    how |= {} if inputs.mask is None else dict(attn_mask=inputs.mask)
    try:
        o = call(*leaves, **how)
        if not isinstance(o, torch.Tensor) or o.shape != inputs.q.shape:
            got = tuple(o.shape) if isinstance(o, torch.Tensor) else type(o).__name__
            raise UserError(
                f"{name} must return O of shape {tuple(inputs.q.shape)}, and gives {got}"
            )
        gradients = [None] * 3
        if o.requires_grad:
            gradients = torch.autograd.grad(o, leaves, _laid(inputs.do.to(o)), allow_unused=True)
            gradients = [torch.zeros_like(x) if g is None else g
                         for g, x in zip(gradients, leaves, strict=True)]  # fmt: skip
    except UserError as error:
        raise UserError(f"{error}" if name in str(error) else f"{name}: {error}") from None
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        given = ", ".join(
            f"{key}={'mask' if key == 'attn_mask' else value}" for key, value in how.items()
        )
        raise UserError(
            f"{name} fails on {inputs.name} ({words}); it is called as PyTorch's "
            f"scaled_dot_product_attention: f(q, k, v, {given})"
        ) from None
    found = dict(zip(OF, (o.detach(), *gradients), strict=False))
    return {of: x.double() for of, x in found.items() if x is not None}


def _laid(x: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as (B, T, H, D)."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


class Exact:
    """The exact attention on some inputs, what a plain one errs there, and what one ulp does.

    draws: how often all inputs are moved by one ulp, up or down at random.
    """

    def __init__(self, inputs: Inputs, draws: int = 3):
        if inputs.q.dtype == torch.float64:
            raise UserError(
                f"{inputs.name} is float64, and so is the attention it would be held against: take "
                "float32 or fewer bits"
            )
        if inputs.q.dtype not in DTYPES:
            raise UserError(f"{inputs.name} is {inputs.q.dtype}: take bfloat16, float16 or float32")
        self.inputs, self.fmt = inputs, Format.parse(str(inputs.q.dtype).removeprefix("torch."))
        tensors = (inputs.q, inputs.k, inputs.v)
        mask = Mask(causal=inputs.causal, dense=inputs.mask)
        exact = functools.partial(oracle, scale=inputs.scale, mask=mask)
        t = exact(*tensors, do=inputs.do)
        key = for_queries(inputs.k.double(), inputs.q.shape[1])
        self.mean_key = torch.nn.functional.normalize(key.mean(2, keepdim=True), dim=-1)
        self.weighted = t.p_bwd @ key
        self.right = dict(zip(OF, (t.o, t.dq, t.dk, t.dv, self._delta(t.delta)), strict=True))
        self.noise = self._noise(*tensors, inputs.do)
        g, moved = torch.Generator().manual_seed(0), dict.fromkeys(OF, 0)
        for _ in range(draws):
            q, k, v, do = (self._moved(x, g) for x in (*tensors, inputs.do))
            t = exact(q, k, v, do=do)
            for of, x in zip(OF, (t.o, t.dq, t.dk, t.dv, self._delta(t.delta)), strict=True):
                moved[of] = moved[of] + (x - self.right[of]).square().sum(-1) / draws
        found = run(plain, inputs, "a plain attention")
        self.overflows = not all(x.isfinite().all() for x in found.values())
        if self.overflows:  # a kernel has its scores and dP in FP32
            sites = "".join(f"+{site}={self.fmt.name}" for site in ("p", "o", "p_bwd", "ds"))
            found = run(of_policy(f"FA2{sites}"), inputs, "FA2")
        for of, x in found.items():
            if not x.isfinite().all():
                raise UserError(
                    f"{of} of {inputs.name} is beyond what {self.fmt.name} holds, or what leads to "
                    "it: no error can be judged; make dO or v smaller"
                )
        self.ulp, self.plain, self.yardstick = {}, {}, {}
        for of, error in self.errors(found).items():
            one, right = moved[of].sqrt(), self.right[of]
            stored = (self._stored(right) - right if of != "δ" else 0 * right).norm(dim=-1)
            error = error.norm(dim=-1)
            self.ulp[of] = max(self._share(of, one), self._share(of, stored))
            self.plain[of] = max(self._share(of, error), self._share(of, stored))
            self.yardstick[of] = self._yardstick(of, one, stored, error)

    def _yardstick(self, of, one, stored, plain):
        """What a row may err by: as much as any, and of O, dK and dV as that row, if less. Late
        rows of causal attention are small; some of dQ are 0."""
        most, rows = torch.maximum(stored, plain).max(), one.maximum(stored).maximum(plain)
        if of in ("dQ", "δ"):
            return most
        faint = FAINT * rows.square().mean().sqrt()
        return (APART[self.inputs.q.dtype] * rows.maximum(faint)).minimum(most)

    def _noise(self, q, k, v, do) -> list[str]:
        """The gradients that are 0 but for float64 noise: no yardstick fits an error of theirs."""
        q, k, v, do = (x.double().norm() for x in (q, k, v, do))
        scale = abs(self.inputs.scale)
        of = {"dQ": scale * do * v * k, "dK": scale * do * v * q, "dV": do}
        return [name for name, size in of.items() if self.right[name].norm() <= NOISE * size]

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

    def worse(self, found: dict, again: dict) -> dict[str, torch.Tensor]:
        """Of two runs each quantity of the one that errs more in it, or that is not finite."""

        def errs(of, x):
            return (x - self.right[of]).norm().nan_to_num(math.inf)

        return {of: y if errs(of, y) > errs(of, x) else x
                for (of, x), y in zip(found.items(), again.values(), strict=True)}  # fmt: skip

    def _share(self, of, error) -> float:
        return (error.norm() / (self.right[of].norm() or 1.0)).item()

    def _worst(self, of, error) -> float:
        size = error.norm(dim=-1)
        return torch.where(size == 0, 0, size / self.yardstick[of]).max().item()

    def _along(self, of, error) -> np.ndarray:
        """(T, B H) each row's error along its direction, over the rms of the exact rows."""
        right = self.right[of]
        toward = right if of in ("O", "dK", "dV") else self.mean_key
        if of == "δ":
            toward = self.weighted.norm(dim=-1, keepdim=True)
            toward = toward / (toward.square().mean().sqrt() or 1.0)
        else:
            toward = torch.nn.functional.normalize(toward, dim=-1)
        size = right.square().sum(-1).mean().sqrt() or 1.0
        return ((error * toward).sum(-1) / size).flatten(0, 1).mT.cpu().numpy()

    def rows(self, who: str, found: dict) -> list[dict]:
        """The rows of `measure` of one function."""
        rows = []
        for of, error in self.errors(found).items():
            if of.replace("δ", "dQ") in self.noise and error.isfinite().all():
                continue
            along = self._along(of, error).mean(1)
            n = min(BLOCKS, len(along))
            mean, se, p = drift.batch_means(along, n) if n > 1 else (along.mean(), math.nan, 1.0)
            size = self._share(of, error)
            ulps = _over(size, self.ulp[of])
            rows.append(dict(
                input=self.inputs.name, of=of, who=who, error=size, plain=self.plain[of],
                times=_over(size, self.plain[of]),
                worst=self._worst(of, error),
                signed=float(mean), half=float(scipy.stats.t.ppf(0.975, max(n - 1, 1)) * se),
                p=float(p), n=n, ulps=ulps,
                far=ulps / (ULPS_FP32 if self.inputs.q.dtype == torch.float32 else ULPS),
            ))  # fmt: skip
        return rows


def _over(a: float, b: float) -> float:
    return math.nan if math.isnan(a) else 0.0 if a == 0 else a / b if b else math.inf


def measure(functions: dict[str, Callable], inputs: Iterable[Inputs], draws=3, twice=True):
    """How functions err on inputs: a row an input, function and quantity, columns as in COLUMNS.

    functions: who -> call. twice: run each twice, and judge of what differs the run that errs more;
    `.attrs["unsteady"]` has (who, input, of, relative difference) of that. `.attrs["forward"]` has
    who gives no gradients, `.attrs["coarse"]` who has a format coarser than the inputs', as a
    policy or in all of O, and which, `.attrs["overflows"]` the inputs on which a plain attention
    does, so that `FA2` in their dtype is the yardstick, and `.attrs["noise"]` (input, gradients)
    that are 0 but for noise and left out, and `.attrs["fp32"]` of inputs in FP32 whether they have
    a mask.
    Raises `UserError` where that yardstick overflows as well.
    """
    rows, unsteady, forward, coarse, overflows, noise, fp32 = [], [], [], {}, [], [], {}
    for some in inputs:
        exact = Exact(some, draws)
        overflows += [some.name] * exact.overflows
        fp32 |= {some.name: some.mask is not None} if some.q.dtype == torch.float32 else {}
        noise += [(some.name, exact.noise)] * bool(exact.noise)
        for who, call in functions.items():
            found = run(call, some, who)
            fmt = _coarsest(call) or _of_all(found["O"], exact._stored(exact.right["O"]))
            if fmt is not None and fmt.significand_bits < exact.fmt.significand_bits:
                coarse[who] = fmt.name
            again = run(call, some, who) if twice else found
            rows += exact.rows(who, exact.worse(found, again))
            forward += [who] * ("dQ" not in found and who not in forward)
            unsteady += [
                (who, some.name, of, exact._share(of, again[of] - x))
                for of, x in found.items()
                if not torch.equal(again[of].nan_to_num(), x.nan_to_num())
            ]
    table = pd.DataFrame(rows)
    table.attrs.update(unsteady=unsteady, forward=forward, coarse=coarse)
    table.attrs.update(overflows=overflows, noise=noise, fp32=fp32)
    return judged(table)


def _coarsest(call) -> Format | None:
    """That of all that a policy stores; None for another function."""
    policy = getattr(call, "policy", None)
    sites = [] if policy is None else [policy.inputs, *(getattr(policy, site) for site in SITES)]
    return min((x.fmt for x in sites), key=lambda fmt: fmt.significand_bits, default=None)


def _of_all(o, stored) -> Format | None:
    """The 16-bit format in which all numbers of O lie, as one that was rounded there has them, and
    those of the exact O, as it is stored, do not."""

    def holds(fmt, x):
        return torch.equal(round_to(x.float(), fmt).double(), x)

    fits = (fmt for fmt in (BF16, FP16) if holds(fmt, o) and not holds(fmt, stored))
    return next(fits, None) if o.any() else None


# In words


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the last three of COLUMNS. δ is no output and has no part in the rule on
    sizes: its error enters dQ. In FP32 a plain attention errs by next to nothing in
    rows that a mask shows few keys, and a fault is many ulps."""
    within = (table.times <= TIMES) & (table.worst <= WORST)
    if masked := [name for name, has in table.attrs.get("fp32", {}).items() if has]:
        within |= table.input.isin(masked) & (table.far <= 1)
    clear = (table.p < LEVEL / len(table)) & (table.n == BLOCKS)
    lean = clear & (table.signed.abs() >= LEAN * table.plain)
    return table.assign(large=~within & (table.of != "δ"), clear=clear, lean=lean)


def outside(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table of `measure` that are outside the rule."""
    return table[table.large | table.lean]


def most(table: pd.DataFrame) -> pd.DataFrame:
    """One row a quantity and function, of the input on which it comes nearest to the limits of its
    error, or is farthest beyond."""
    near = table[["times", "worst", "far"]] / np.array([TIMES, WORST, 1])
    some = table.assign(place=near.max(axis=1, skipna=False).fillna(math.inf))
    some = some.sort_values("place", ascending=False).groupby(["of", "who"], sort=False).head(1)
    order = some.of.map(OF.index) * len(some) + some.who.map(list(table.who.unique()).index)
    return some.loc[order.sort_values().index].drop(columns="place")


def sizes(inputs: Inputs) -> str:
    """Of inputs in words: a file in another layout, such as (B, T, H, D), is known by them."""
    heads, tokens = inputs.q.shape[1:3]
    return f"{heads:,} head{'s' * (heads > 1)} of {tokens:,} token{'s' * (tokens > 1)}"


def shown(table: pd.DataFrame) -> str:
    """`most` of a table as aligned text."""
    lines = [("of", "who", "error", "× plain", "worst row", "signed", "× one ulp", "input")]
    for row in most(table).itertuples():
        signed = f"{_signed(row)}{'*' if row.clear else ' '}"
        numbers = (f"{x:.2f}" if x < 100 else f"{x:.3g}" for x in (row.times, row.worst, row.ulps))
        times, worst, ulps = numbers
        lines.append((row.of, row.who, f"{100 * row.error:.3g} %", times, worst, signed, ulps,
                      row.input))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<<>>>>><"
    cells = (zip(line, sides, widths, strict=True) for line in lines)
    text = ("  ".join(f"{cell:{side}{w}}" for cell, side, w in line) for line in cells)
    note = (
        f"signed: with half its 95 % interval, n = {table.n.min()} blocks of rows; *: beyond noise"
    )
    return "\n".join([*(line.rstrip() for line in text), "", note])


def _signed(row) -> str:
    """The mean error and half its interval, if any, to the interval's first digit."""
    half = 100 * row.half
    if math.isnan(half):
        return f"{100 * row.signed:+.2g} %"
    places = max(0, -math.floor(math.log10(half))) if half > 0 else 1
    return f"{100 * row.signed:+.{places}f} ± {half:.{places}f} %"


def verdict(table: pd.DataFrame, names: dict[str, str] | None = None) -> str:
    """What a table of `measure` says, a sentence each: of every function, of how they differ, of
    the yardstick, and of what differs between two runs. names: who -> name."""
    names = names or {}
    call = {who: names.get(who, who) for who in table.who.unique()}
    said = [_of_one(table[table.who == who], name) for who, name in call.items()]
    said += _between(table, call)
    weak = table[(table.of != "δ") & (table.plain > WEAK)]
    if len(weak):
        row = weak.loc[weak.plain.idxmax()]
        said.append(
            f"The yardstick is weak here: a plain attention's {row.of} itself errs by "
            f"{row.plain:.0%} ({row.input}), so the {TIMES}x rule lets much by."
        )
    for name in table.attrs["overflows"]:
        said.append(
            f"A plain attention overflows ({name}): there the yardstick is one with scores and dP "
            "in FP32."
        )
    for name, some in table.attrs["noise"]:
        said.append(f"The exact {' and '.join(some)} of {name} are 0, so they were not compared.")
    for who in table.attrs["forward"]:
        said.append(f"{call[who]} gives no gradients, so only its forward pass was compared.")
    for who in call:
        if differs := [entry for entry in table.attrs["unsteady"] if entry[0] == who]:
            differs.sort(key=lambda entry: np.nan_to_num(entry[3], nan=math.inf))
            _, where, of, share = differs[-1]
            by = f" by {share:.2g} of its norm" if math.isfinite(share) else ""
            said.append(
                f"{call[who]} is not deterministic: two runs on the same inputs differ, in "
                f"{of}{by} ({where})."
            )
    return "\n".join(said)


def _of_one(table, name: str) -> str:
    bad = outside(table)
    if len(bad):
        row = bad.loc[bad.times.fillna(math.inf).idxmax()]
        if not math.isfinite(row.error):
            return f"{name}'s {row.of} has numbers that are not finite ({row.input})."
        also = [of for of in OF if of in set(bad.of) - {row.of}]
        parts = [f"{name}'s {row.of} errs {_times(row.times)} as much as a plain attention's"]
        parts += [f"in its worst row {_times(row.worst)}"] * bool(row.worst > WORST)
        parts += [f"outside the {TIMES}x rule"] * bool(row.large)
        parts += [f"likewise {' and '.join(also)}"] * bool(also)
        if len(signs := bad[bad.lean]):
            sign = signs.loc[signs.p.idxmin()]
            toward = " along the mean key" * (sign.of == "dQ")
            parts.append(f"and {sign.of} has a sign{toward}, {_signed(sign)}, n = {sign.n}")
        fp32 = bad.input.isin(list(table.attrs.get("fp32", ())))
        sure = (bad.lean & ~fp32 | (bad.far > 1)).any()
        so = "not rounding alone" if sure else "a bug, or rounding in other places"
        so += PIECES if bad.lean.any() and not sure else ""
        if fmt := table.attrs["coarse"].get(row.who):
            so = f"it rounds to {fmt}, which is coarser than the inputs"
        return f"{', '.join(parts)} ({row.input}): {so}."
    row = table[table.of != "δ"].sort_values("times").iloc[-1]
    rule = f"no output or gradient errs more than {_times(row.times)} as much as a plain attention"
    far = table[(table.of != "δ") & (table.far > 1)]
    if len(far):
        row = far.loc[far.far.idxmax()]
        return (
            f"{name} is within the {TIMES}x rule, {rule}; but its {row.of} errs "
            f"{_times(row.ulps)} as much as one ulp of every input makes of it ({row.input}): "
            "rounding, magnified."
        )
    return f"{name} is within rounding: {rule}."


def _times(x: float) -> str:
    return f"{_number(x)} times"


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"


def _between(table, call: dict) -> list[str]:
    """Where two functions err differently, by the quantity in which they do so most, in ulps."""
    if len(call) != 2:
        return []
    a, b = call
    some = table[table.of != "δ"]
    all_of = some.pivot(index=["input", "of"], columns="who", values="error")
    wide, ulps = all_of.dropna(), some.pivot(index=["input", "of"], columns="who", values="ulps")
    if wide.empty or not np.isfinite(some.error).all():
        return []
    apart = wide.max(axis=1) > ALIKE * wide.min(axis=1)
    if not apart.any():
        where = "O and all gradients" if len(wide) == len(all_of) else "what both give"
        return [f"They err alike, within a factor of {ALIKE} in {where}."]
    where, of = (ulps[a] - ulps[b]).abs().loc[apart.index[apart]].idxmax()
    two = wide.loc[(where, of)]
    more, less = (a, b) if two[a] > two[b] else (b, a)
    return [
        f"They differ most, in ulps of the inputs, in {of} of {where}: {call[more]} errs by "
        f"{_number(ulps.loc[where, of][more])}, or {100 * two[more]:.3g} %, and {call[less]} by "
        f"{_number(ulps.loc[where, of][less])}, or {100 * two[less]:.3g} %."
    ]


def figure(table: pd.DataFrame, names: dict[str, str] | None = None):
    """Errors in units of a plain attention's, and of one ulp, a dot an input; returns the
    matplotlib figure."""
    names = names or {}
    told = table[table.of.isin(OF[:4])].copy()
    told["row"] = [
        f"{of}, {names.get(who, who)}" for of, who in zip(told.of, told.who, strict=True)
    ]
    rows = list(most(told).row)
    told["row"] = pd.Categorical(told.row, rows)
    tints = [plots.COLOURS["FA2"], plots.SPARE[0], plots.COLOURS["LOW"]]
    of_who = dict(zip(told.who.unique(), tints, strict=False))
    colours = dict(zip(told.row, told.who.map(of_who), strict=True))
    fig, axes = row_panels(rows, 2)
    limits = (("times", "error / plain attention's", TIMES), ("ulps", "error / one ulp's", 1))
    for ax, (x, label, line) in zip(axes, limits, strict=True):
        some = told.assign(**{x: told[x].clip(lower=1e-3)})
        plots.draw_dots(ax, some, x=x, row="row", label=label, line=line, log=True, colours=colours)
    return fig
