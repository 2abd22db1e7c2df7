"""The errors of other people's attention beside ours: PyTorch's kernels on the same inputs.

A production kernel shows no intermediates, only O and gradients. That is enough: its error of O
against float64 gives the error of the delta that a backward reads from it, and the error of its dQ
gives away the delta that it used. Two kinds of inputs: rows with exactly k tied maxima, and the
committed captures. On a GPU there are flash, cuDNN, memory-efficient and FlexAttention; everywhere
PyTorch's plain attention ("math"), and on a CPU its own flash attention.

    python -m lowprec.studies.peers data/peers          one record, DATE-GPU.json

A program that fails is named in the record with its error, and the rest goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowprec import UserError, entry
from lowprec.attention import attention, trace
from lowprec.attention.reference import oracle
from lowprec.diagnose.contenders import BACKENDS
from lowprec.evidence.claims import Measured
from lowprec.numerics.formats import BF16, round_to, ulp
from lowprec.records import files, provenance
from lowprec.studies.additions import output_errors
from lowprec.training.capture import Capture
from lowprec.training.rotary import rotate

SDPA = {{"cudnn": "cuDNN"}.get(name, name): backend for name, backend in BACKENDS.items()}
PRODUCTION = ("flash", "cuDNN", "efficient", "flex")
"""Kernels that round P for the product with V and read delta from the stored O."""
POLICIES = {
    "FA2": ("FA2", None),
    "FA2 tile 128": ("FA2", 128),
    "FA2 o_fp32": ("FA2+delta_from=o_fp32", None),
    "FA2 p_rounded": ("FA2+l_from=p_rounded", None),
    "FA2 both": ("FA2+delta_from=o_fp32+l_from=p_rounded", None),
    "RELEASED": ("RELEASED", 512),
}
"""Our own implementation: policy and tile."""
OURS = "FA2"

TIES = (1, 2, 3, 4, 8)
OTHERS = {"nearer to 0": (0.1, 1.0), "alike": (2.0, 4.0), "further from 0": (5.0, 8.0)}
"""-V of the one token beside the ties, whose own V is uniform in -[2, 4)."""
WEIGHT = BF16.unit_roundoff / 4
GROUP, LEVEL = 16, 40.0


@dataclass(frozen=True)
class Program:
    """One way to compute causal attention; `call(q, k, v)` is differentiable. policy, tile: of
    ours, which also show the delta that their backward uses."""

    name: str
    call: callable
    policy: str | None = None
    tile: int | None = None


def programs(device) -> dict[str, Program]:
    """What can be tried on this device, ours first; whether it runs shows when it is called."""
    gpu = torch.device(device).type == "cuda"
    found = {name: _ours(name, *how) for name, how in POLICIES.items()}
    for name in SDPA if gpu else ("flash", "math"):
        found[name] = _sdpa(name)
    if gpu:
        found["flex"] = Program("flex", Flex())
    return found


def _ours(name, policy, tile):
    def call(q, k, v):
        return attention(q, k, v, policy, tile=tile)

    return Program(name, call, policy, tile)


def _sdpa(name):
    def call(q, k, v):
        with sdpa_kernel(SDPA[name]):  # only this one: it raises where it cannot run
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return Program(name, call)


class Flex:
    """FlexAttention with a causal block mask, compiled at the first call; the GPU has no other."""

    def __init__(self):
        self.compiled = None

    def __call__(self, q, k, v):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self.compiled is None:
            self.compiled = torch.compile(flex_attention, dynamic=False)
        n = q.shape[2]
        seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=q.device)
        return self.compiled(q, k, v, block_mask=seen)


# Rows with k ties


def tied_rows(k: int, other, heads=3, head_dim=64, seqlen=1024, weight=WEIGHT):
    """q, k, v (1, heads, seqlen, head_dim) BF16, the rows that count, and their exact O.

    Tokens come in groups of 16. The last query of a group sees k keys of its group at the score
    LEVEL, one at LEVEL - a, with exp(-a) near `weight` U(0.2, 1), and all else at 0, where it
    weighs nothing. Tied V are the BF16 numbers of -[2, 4), the other token's are uniform in
    -[other[0], other[1]]. Every group, head and feature is a draw of its own. The exact O is
    float64, (heads, rows, head_dim). Scale is 1/sqrt(head_dim); LEVEL, a and V are exact in BF16.
    """
    g = torch.Generator().manual_seed(0)
    groups = min(seqlen // GROUP, head_dim - 1)  # the last feature carries -a
    shape = (heads, groups)
    place = torch.rand(*shape, GROUP, generator=g).argsort(-1)
    a = -(weight * (0.2 + 0.8 * torch.rand(shape, generator=g))).log()
    a = round_to(a, BF16)
    ties = -2 - torch.randint(128, (k, *shape, head_dim), generator=g).double() / 64
    low, high = other
    rest = -(low + (high - low) * torch.rand(*shape, head_dim, generator=g))
    rest = round_to(rest, BF16).double()

    keys = torch.zeros(heads, groups, GROUP, head_dim)
    value = -2 - 2 * torch.rand(heads, groups, GROUP, head_dim, generator=g)
    q = torch.zeros(heads, groups, GROUP, head_dim)
    h, n = torch.meshgrid(torch.arange(heads), torch.arange(groups), indexing="ij")
    for j in range(k + 1):
        at = place[..., j]
        keys[h, n, at, n] = LEVEL
        value[h, n, at] = (ties[j] if j < k else rest).float()
    keys[h, n, place[..., k], -1] = -a
    q[h, n, -1, n] = math.sqrt(head_dim)
    q[h, n, -1, -1] = math.sqrt(head_dim)

    def whole(x):
        padded = torch.zeros(1, heads, seqlen, head_dim)
        padded[:, :, : groups * GROUP] = x.reshape(1, heads, groups * GROUP, head_dim)
        return padded.bfloat16()

    rows = torch.arange(groups) * GROUP + GROUP - 1
    w = (-a.double()).exp()[..., None]
    return *(whole(x) for x in (q, keys, value)), rows, (ties.sum(0) + w * rest) / (k + w)


def measure_ties(program, device, heads=9, seqlen=256, counts=TIES) -> list[dict]:
    """Mean error of O in ulp and half its 95 % interval, by ties and by the other token's V.

    delta_same, delta_drawn: bias `in_ulp` of the delta read from that O for a normal dO, without
    its sign and with it; delta_drawn_half: half the interval of the latter.
    """
    out, g = [], torch.Generator().manual_seed(1)
    for k in counts:
        for other, interval in OTHERS.items():
            *inputs, rows, exact = tied_rows(k, interval, heads, seqlen=seqlen)
            # with gradients and in the captures' shape FlexAttention is compiled once for both
            leaves = [x.to(device).requires_grad_() for x in inputs]
            o = program.call(*leaves).detach()[0].double().cpu()
            error = (o[:, rows] - exact) / ulp(exact, BF16)
            half = 1.96 * error.std().item() / math.sqrt(error.numel())
            values = dict(mean=error.mean().item(), half=half, n=error.numel())
            do = torch.randn(exact.shape, generator=g, dtype=torch.float64)
            wrong = o[:, rows] - exact
            values["delta_same"], _ = in_ulp((do.abs() * wrong).sum(-1), do, exact)
            values["delta_drawn"], values["delta_drawn_half"] = in_ulp(
                (do * wrong).sum(-1), do, exact
            )
            out.append(dict(program=program.name, ties=k, other=other, **values))
    return out


def tie_model(samples=100_000, counts=TIES) -> dict[tuple, float]:
    """{(k, place of the other V): mean error of O in ulp} of `tied_rows`, if the FP32 quotient is
    rounded once, from so many draws of each."""
    g = torch.Generator().manual_seed(0)
    return {
        (k, other): output_errors(BF16, k, interval, WEIGHT, samples, g)["output"].mean().item()
        for other, interval in OTHERS.items()
        for k in counts
    }


def beside_model(rows, model: dict) -> pd.DataFrame:
    """Rows of `measure_ties` with columns `model`, and `off`, the distance of the mean from it."""
    table = pd.DataFrame(rows)
    table["model"] = [model[cell] for cell in zip(table.ties, table.other, strict=True)]
    return table.assign(off=(table["mean"] - table.model).abs())


def within(value: float, half: float, n: int) -> Measured:
    """A size, which is not below 0, with its interval."""
    return Measured(value, n, (max(value - half, 0), value + half))


def in_ulp(eps, do, o) -> tuple[float, float]:
    """Sum of the errors eps (..., rows) of dO * O over the sum of their ulps, and half its 95 %
    interval over rows. do, o: (..., rows, D), of which o is exact.

    One ulp of a row is sum |dO| ulp(O): what its delta is off by if each number of O is, by one ulp
    of BF16 and towards dO. (An ulp of delta's own value says nothing: every backward keeps delta in
    FP32, and its terms cancel.) With sign(O) for dO it is the bias of O along its own sign.
    """
    ulps = (do.double().abs() * ulp(o, BF16)).sum()
    return (eps.sum() / ulps).item(), (1.96 * eps.square().sum().sqrt() / ulps).item()


# Captures


def captures() -> dict[str, Capture]:
    """The committed captures by name; all have one head and one sequence."""
    paths = sorted((files.data_root() / "captures").glob("*.xz"))
    return {path.stem: Capture.load(path) for path in paths}


class Specimens:
    """The captures side by side as heads of one call, and the exact attention on them.

    q, k, v, do: (1, captures, tokens, D); x: (captures, tokens, C) float64; exact: float64 with o,
    delta, dq, `mean_key` = P K and `gradient` = that of W_Q, (captures, D, C). tokens: the first
    rows of each, all by default.
    """

    def __init__(self, found: dict[str, Capture], device="cpu", tokens=None):
        self.names, rows = list(found), slice(tokens)
        scales = {c.scale for c in found.values()}
        if not found or scales != {c.tensors["q"].shape[-1] ** -0.5 for c in found.values()}:
            raise UserError("the captures must be there and have the usual scale of scores")

        def side_by_side(name):
            tensors = [c.tensors[name][:, :, rows] for c in found.values()]
            return torch.cat(tensors, 1).to(device)

        self.q, self.k, self.v, self.do = map(side_by_side, ("q", "k", "v", "do"))
        self.x = torch.stack([c.tensors["x"][0, rows] for c in found.values()]).to(device).double()
        self.scale = scales.pop()
        self.turned = [c.rotation for c in found.values()]
        self.exact = oracle(self.q, self.k, self.v, do=self.do)
        self.exact.mean_key = self.exact.p_bwd @ self.k.double()
        self.exact.gradient = self.of_query_weights(self.exact.dq)

    def of_query_weights(self, dq):
        """(captures, D, C) float64: what dQ (1, captures, tokens, D) gives W_Q."""
        each = zip(dq[0].double(), self.turned, strict=True)
        return torch.stack([rotate(rows, table, back=True) for rows, table in each]).mT @ self.x

    def run(self, program) -> dict:
        """What the program is off by, float64: `o`, `delta` as read from its O (ours: as used),
        `dq`, `gradient` of W_Q, and `implied`, the error of delta that its dQ shows."""
        if program.policy is None:
            leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
            o = program.call(*leaves)
            (dq,) = torch.autograd.grad(o, leaves[:1], self.do)
            error = o.detach().double() - self.exact.o
            delta = (self.do.double() * error).sum(-1)
        else:
            t = self.trace(program.policy, program.tile)
            error, dq, delta = t.o.double() - self.exact.o, t.dq, t.delta - self.exact.delta
        of_dq, key = dq.double() - self.exact.dq, self.exact.mean_key
        implied = -(of_dq * key).sum(-1) / (self.scale * key.square().sum(-1))
        gradient = self.of_query_weights(of_dq)
        return dict(o=error, delta=delta, dq=of_dq, gradient=gradient, implied=implied)

    def trace(self, policy, tile=None):
        """`lowprec.attention.trace` of these inputs."""
        return trace(self.q, self.k, self.v, self.do, policy, tile=tile, scale=self.scale)


def measure_captures(specimens: Specimens, found: dict[str, dict]) -> list[dict]:
    """One row a program and capture, from {program: what `Specimens.run` gave}; needs OURS.

    along, along_half: mean error of O along its own sign in ulp, and half of its 95 % interval
        with rows as clusters
    o_ulp, o_ulp_half, delta_ulp, delta_ulp_half: bias of O along its own sign and of delta `in_ulp`
    corr_o, equal, equal_p_rounded: correlation of the errors of O with ours; share of outputs that
        are ours bit by bit, and ours under l_from=p_rounded
    delta_bias, delta_half: sum of the errors of delta over that of their sizes, half its interval
    delta_size: that sum of sizes, relative to that of ours; corr_delta: correlation with ours
    gradient: ||E|| over the norm of the exact gradient of W_Q; cosine: of E with ours
    share: how much of ||E||^2 the error of delta accounts for
    implied_bias, corr_implied: the error of delta that dQ shows, and its correlation with `delta`
    """
    s, ours, out = specimens, found[OURS], []
    unit = ulp(s.exact.o, BF16)
    other = found.get("FA2 p_rounded", ours)["o"]
    for program, e in found.items():
        along = e["o"] * s.exact.o.sign() / unit
        from_delta = -s.scale * e["delta"][..., None] * s.exact.mean_key
        left = e["gradient"] - s.of_query_weights(from_delta)
        for i, capture in enumerate(s.names):
            row, eps, mine = along[0, i].mean(-1), e["delta"][0, i], ours["delta"][0, i]
            seen = e["implied"][0, i]
            size = e["gradient"][i].norm()
            exact, sign = s.exact.o[0, i], s.exact.o[0, i].sign()
            o_ulp, o_ulp_half = in_ulp((e["o"][0, i] * sign).sum(-1), sign, exact)
            delta_ulp, delta_ulp_half = in_ulp(eps, s.do[0, i], exact)
            values = dict(
                along=row.mean(), along_half=1.96 * row.std() / math.sqrt(len(row)),
                o_ulp=o_ulp, o_ulp_half=o_ulp_half,
                delta_ulp=delta_ulp, delta_ulp_half=delta_ulp_half,
                corr_o=correlation(e["o"][0, i], ours["o"][0, i]),
                equal=(e["o"][0, i] == ours["o"][0, i]).double().mean(),
                equal_p_rounded=(e["o"][0, i] == other[0, i]).double().mean(),
                delta_bias=eps.sum() / eps.abs().sum(),
                delta_half=1.96 * eps.square().sum().sqrt() / eps.abs().sum(),
                delta_size=eps.abs().sum() / mine.abs().sum(), corr_delta=correlation(eps, mine),
                gradient=size / s.exact.gradient[i].norm(),
                cosine=(e["gradient"][i] * ours["gradient"][i]).sum()
                / (size * ours["gradient"][i].norm()),
                share=1 - (left[i].norm() / size) ** 2,
                implied_bias=seen.sum() / seen.abs().sum(), corr_implied=correlation(seen, eps),
            )  # fmt: skip
            values = {name: round(float(value), 6) for name, value in values.items()}
            out.append(dict(program=program, capture=capture, **values))
    return out


def correlation(a, b) -> torch.Tensor:
    """Pearson's, over all elements."""
    a, b = (x - x.mean() for x in (a.flatten(), b.flatten()))
    return (a @ b) / (a.norm() * b.norm())


def mismatch(specimens: Specimens) -> torch.Tensor:
    """Sum of the rounded P-bar over that of the unrounded, minus 1: (captures, tokens) float64."""
    t = trace(specimens.q, specimens.k, specimens.v, None, "FA2", impl="emulate")
    return (t.p.double().sum(-1) / t.p_unnorm.double().sum(-1) - 1)[0]


def cpu_flash_row_sum(k: int) -> float:
    """The row sum of PyTorch's flash attention on a CPU for k tied maxima and nothing else, so that
    k is right; from the logarithm that it returns."""
    q, keys, v, rows, _ = tied_rows(k, (2.0, 4.0), heads=1, weight=2.0**-80)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    lse = operator(q, keys, v, 0.0, True)[1].reshape(-1)  # one head
    return (lse[rows].double() - LEVEL).exp().mean().item()


# Tables of captures


def table(rows) -> pd.DataFrame:
    """Rows of `measure_captures`, each capture by its `short` name."""
    frame = pd.DataFrame(rows)
    return frame.assign(capture=frame.capture.map(short))


def short(capture: str) -> str:
    """Window and step of a capture, "a, 1,520"; of a healthy twin "a, healthy"."""
    _, window, *_, step = capture.split("-")
    return f"{window}, healthy" if "healthy" in capture else f"{window}, {int(step):,}"


def failing(captures) -> list[str]:
    """The short names of failing heads among some."""
    return [name for name in captures if "healthy" not in name]


def kernels(frame: pd.DataFrame) -> list[str]:
    """The production kernels that a table has."""
    return [name for name in PRODUCTION if name in set(frame.program)]


def grid(frame: pd.DataFrame, column: str, programs) -> pd.DataFrame:
    """A column of a `table`: captures down, programs across."""
    return frame.pivot(index="capture", columns="program", values=column)[list(programs)]


def apart(frame: pd.DataFrame, programs) -> pd.DataFrame:
    """The factor, at least 1, between each program's ||E|| and ours: captures by programs."""
    size = grid(frame, "gradient", {OURS, *programs})
    return np.exp(np.log(size[list(programs)].div(size[OURS], axis=0)).abs())


def over_ours(frame: pd.DataFrame, program: str) -> pd.Series:
    """A program's ||E|| over ours, by capture of a failing head."""
    size = grid(frame, "gradient", [OURS, program])
    return (size[program] / size[OURS])[failing(size.index)]


def most_along(frame: pd.DataFrame, programs) -> pd.Series:
    """The row of the largest mean error of O along its own sign; `measured` is its size, with its
    interval, of as many captures as there are."""
    some = frame[frame.program.isin(programs)]
    row = some.loc[some.along.abs().idxmax()]
    size = within(abs(row.along), row.along_half, frame.capture.nunique())
    return pd.concat([row, pd.Series({"measured": size})])


def delta_in_ulp(frame: pd.DataFrame, programs, specimens: Specimens, eps) -> pd.DataFrame:
    """The summed error of delta `in_ulp`, captures by programs, of a record that has it relative to
    the sizes and these relative to ours. eps: our errors of delta on all rows, (captures, rows)."""
    each = zip(specimens.names, eps.abs(), specimens.do[0], specimens.exact.o[0], strict=True)
    size = pd.Series({short(name): in_ulp(*about)[0] for name, *about in each})
    bias, own = (grid(frame, name, programs) for name in ("delta_bias", "delta_size"))
    return (bias * own).mul(size, axis=0)


# The record


def recorded() -> dict[str, dict]:
    """The records of data/peers by name; the last is the newest."""
    paths = sorted((files.data_root() / "peers").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def chosen(name: str) -> dict:
    """The record of data/peers of that name, or the `newest`."""
    records = recorded()
    if not records or name not in ("newest", *records):
        raise UserError(
            f"there is no record {name!r} in data/peers: take newest or one of "
            f"{', '.join(records) or 'none'}; python -m lowprec.studies.peers data/peers makes one"
        )
    return records[max(records) if name == "newest" else name]


def measure(specimens: Specimens, **size) -> dict:
    """`ties` and `captures`, tables as lists of rows, `failed`, program to error, and `errors`,
    what `Specimens.run` gave. size: heads, seqlen and counts of `measure_ties`."""
    device = specimens.q.device
    ties, found, failed = [], {}, {}
    for name, program in programs(device).items():
        try:
            found[name] = specimens.run(program)
            if program.policy is None or name in (OURS, "RELEASED"):
                ties += measure_ties(program, device, **size)
        except Exception as error:  # a kernel that does not run here must not hide the others
            words = str(error).strip().partition("\n")[0][:300]
            failed[name] = f"{type(error).__name__}: {words}"
    if OURS not in found:
        raise UserError(f"our own kernel does not run here: {failed[OURS]}")
    table = measure_captures(specimens, found)
    return dict(ties=ties, captures=table, failed=failed, errors=found)


def record(device) -> dict:
    """Everything on this device, with its provenance, as JSON holds it."""
    specimens = Specimens(captures(), device)
    _, heads, seqlen, _ = specimens.q.shape
    about = dict(date=datetime.date.today().isoformat(), **provenance.provenance(device))
    found = measure(specimens, heads=heads, seqlen=seqlen)
    del found["errors"]
    return about | found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lowprec.studies.peers", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the dated record goes")
    folder = parser.parse_args().folder
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = provenance.provenance(device)["hardware"].lower().replace(" ", "-")
    path = folder / f"{datetime.date.today().isoformat()}-{hardware}.json"
    if path.exists():
        raise UserError(f"{path} exists and is never overwritten; rename it")
    result = record(device)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    for name, error in result["failed"].items():
        print(f"{name} failed: {error}")
    print(f"{path}: {len(result['ties'])} rows of ties, {len(result['captures'])} of captures")


if __name__ == "__main__":
    entry(main)
