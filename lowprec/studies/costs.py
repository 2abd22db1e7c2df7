"""What attention costs, read from a record that `lowprec.studies.benchmark` made.

Times are medians over replays of a CUDA graph. The interval of a ratio is its range over all
replays, least over most to most over least. Everything is BF16 and causal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pandas as pd

from lowprec import UserError
from lowprec.evidence.claims import Measured
from lowprec.records.files import data_root
from lowprec.studies import benchmark

HALVES = ("forward", "backward")
KERNELS = {
    "FA2": {}, "FA2, tile 64": {"tile": 64}, "flash": {"impl": "flash"}, "cuDNN": {"impl": "cudnn"},
    "Flex": {"impl": "flex"},
}  # fmt: skip
"""The kernels that were timed at every length, by how they differ from `BASE`; in records before
2026-11-27 but for PyTorch's FlexAttention."""
REPAIRS = {
    "FA2+delta_from=o_fp32": "clean δ: O kept in FP32",
    "FA2+delta_from=o_split": "clean δ: O and its residual in BF16",
    "FA2+delta_from=dp": "δ from P∘dP",
    "FA2+row_sum=removed": "mean key taken out of dQ",
    "FA2+row_sum=refined": "refined δ",
}
"""Changes of `FA2` that are meant to keep a training from exploding."""
BASE = dict(impl="triton", policy="FA2", tile=0, probe=False, seqlen=1024, head_dim=64)
"""The case that others are held against; a tile of 0 is a whole row."""
PRODUCTS = {"forward": (2, 3), "backward": (5, 7)}
"""Products of matrices that attention needs, and that our kernels do."""


def chosen(name: str) -> dict:
    """The record of data/benchmarks of that name, or the `newest`."""
    records = benchmark.recorded()
    if not records or name not in ("newest", *records):
        raise UserError(
            f"there is no record {name!r} in data/benchmarks: take newest or one of "
            f"{', '.join(records) or 'none'}; make gpu-check writes one"
        )
    return records[max(records) if name == "newest" else name]


def having(record: dict, has: Callable[[dict], bool]) -> tuple[str, dict | None]:
    """(which, record) of the record itself if `has` is true of it, else of the last by name in
    data/benchmarks of which it is; ("none", None) without one."""
    if has(record):
        return "this record", record
    for name, other in reversed(benchmark.recorded().items()):
        if has(other):
            return f"the record {name}", other
    return "none", None


def in_models() -> dict:
    """Of each part the newest record of `lowprec.studies.in_models` in data/benchmarks/models."""
    newest = {}
    for path in sorted((data_root() / "benchmarks" / "models").glob("*.json")):
        newest |= json.loads(path.read_text())
    return newest


def gpu_tests() -> dict:
    """The newest counts of GPU tests in data/benchmarks/tests, of the versions that are pinned."""
    path = max((data_root() / "benchmarks" / "tests").glob("*.json"))
    return json.loads(path.read_text())["gpu_tests"]


def tried(name: str) -> dict:
    """A record of data/benchmarks/tried, of what was timed apart: "five", "pow2" or "fa4"."""
    return json.loads((data_root() / "benchmarks" / "tried" / f"{name}.json").read_text())


def five_products() -> pd.Series:
    """Time of a backward by five products, with the best blocks, over that by seven, by (head_dim,
    seqlen)."""
    rows = pd.DataFrame(tried("five")["five"])
    best = rows.assign(kernel=rows.kernel.fillna("seven")).groupby(["head_dim", "seqlen", "kernel"])
    wide = best.ms.min().unstack()
    return wide["five"] / wide["seven"]


def powers_of_two() -> pd.Series:
    """Time of the forward of FA2 with shift=pow2, in one pass, over that of FA2 over the whole row,
    by (head_dim, seqlen)."""
    rows = pd.DataFrame(tried("pow2")["cases"])
    whole = rows[(rows.impl == "triton") & rows.tile.isna()]
    wide = whole.pivot(index=["head_dim", "seqlen"], columns="policy", values="forward_ms")
    return (wide["FA2+shift=pow2"] / wide["FA2"]).dropna()


def beside_fa4() -> pd.Series:
    """Time of both passes of FA2 over that of FlashAttention-4, by (head_dim, seqlen)."""
    rows = pd.DataFrame(tried("fa4")["cases"])
    both = rows.assign(ms=rows.forward_ms + rows.backward_ms)
    wide = both.pivot(index=["head_dim", "seqlen"], columns="impl", values="ms")
    return wide["triton"] / wide["fa4"]


def beside_stock(rows: list[dict], **columns: str) -> pd.DataFrame:
    """What the drop-in takes over PyTorch's attention: for each model, padded or not, the ratio of
    the numbers that `columns` rename. rows: "training" or "generation" of a record of models."""
    keys = ["model", *(name for name in ("padded",) if name in rows[0])]
    wide = pd.DataFrame(rows).pivot(index=keys, columns="attention", values=list(columns))
    wide = wide.reindex(columns=pd.MultiIndex.from_product([columns, ("lowprec", "sdpa")]))
    ratios = {new: wide[old]["lowprec"] / wide[old]["sdpa"] for old, new in columns.items()}
    return pd.DataFrame(ratios)


class Costs:
    """A record: its cases, and ratios of them. Times are in ms, memory in MiB."""

    def __init__(self, record: dict):
        self.record = record
        table = pd.DataFrame(record["cases"])
        self.cases = table.assign(tile=table.tile.fillna(0).astype(int))
        self.lengths = sorted(int(t) for t in set(self.cases.seqlen))
        impls = {"triton"} | set(self.cases.impl)
        self.kernels = {k: c for k, c in KERNELS.items() if c.get("impl", "triton") in impls}

    def case(self, **changes) -> pd.Series:
        """The one case that differs from `BASE` as said; `UserError` if the record has it not."""
        wanted = BASE | changes
        rows = self.cases[(self.cases[list(wanted)] == pd.Series(wanted)).all(axis=1)]
        if len(rows) != 1:
            raise UserError(f"the record has {len(rows)} cases of {wanted} and one is needed")
        return rows.iloc[0]

    def ratio(self, mine: dict, other: Mapping = {}, halves=HALVES) -> Measured:
        """Time of one case over that of another, both by their changes of `BASE`."""
        rows = self.case(**mine), self.case(**other)
        ms, least, most = (
            [sum(row[f"{half}_{name}"] for half in halves) for row in rows]
            for name in ("ms", "least", "most")
        )
        return Measured(ms[0] / ms[1], 1, (least[0] / most[1], most[0] / least[1]))

    def beside(self, impls, parts=(HALVES,), head_dim: int = 64, lengths=None) -> Measured | None:
        """The largest ratio of `FA2` to kernels of PyTorch, by length; None without one of them.

        parts: the halves that are timed together, as ("forward",) or both.
        """
        if not set(impls) <= set(self.cases.impl) or not set(lengths or ()) <= set(self.lengths):
            return None
        found = {}
        for t in lengths or self.lengths:
            shape = dict(seqlen=t, head_dim=head_dim)
            found[t] = largest({
                (impl, part): self.ratio(shape, shape | {"impl": impl}, part)
                for impl in impls for part in parts
            })  # fmt: skip
        return largest(found)

    def times(self, head_dim: int = 64) -> pd.DataFrame:
        """Each kernel's time and the floors, a row a half and length T.

        A floor is what products, or bytes, take at the rates that were measured; see
        `lowprec.studies.benchmark.floors`. The larger of the two is `floor`.
        """
        rows = []
        for half in HALVES:
            for t in self.lengths:
                shape = dict(seqlen=t, head_dim=head_dim)
                least = benchmark.floors(self.case(**shape), self.record["ceilings"])
                row = {name: least[f"{half}_{name}"] for name in ("operations", "bytes")}
                took = {k: self.case(**shape, **c)[f"{half}_ms"] for k, c in self.kernels.items()}
                rows.append({"half": half, "T": t, **row, "floor": max(row.values()), **took})
        return pd.DataFrame(rows)

    def over_floor(self, head_dim: int = 64) -> pd.DataFrame:
        """Time of forward and backward over the sum of their floors: T x kernels."""
        both = self.times(head_dim).groupby("T").sum(numeric_only=True)
        return both[list(self.kernels)].div(both.floor, axis=0)

    def busy(self, lengths) -> pd.DataFrame:
        """Products needed and products done at their full rate, beside the time of `FA2`; `share`
        of its time is in products."""
        rows = self.times()
        rows = rows[rows["T"].isin(lengths)].sort_values("T", kind="stable")
        more = [done / needed for needed, done in rows.half.map(PRODUCTS)]
        done = rows.operations * more
        columns = {"": rows.half, "T": rows["T"], "products needed": rows.operations,
                   "products done": done, "FA2": rows.FA2, "share": done / rows.FA2}  # fmt: skip
        return pd.DataFrame(columns)

    def memory(self) -> pd.DataFrame:
        """What forward and backward add at their peak, a row a length, and one T x T matrix of BF16
        scores for each head. The number of tokens is the same in every row."""
        rows = []
        for t in self.lengths:
            row = self.case(seqlen=t)
            peaks = [self.case(seqlen=t, impl=impl).peak_mib for impl in benchmark.SDPA]
            square = row.batch * row.heads * t * t * 2 / 2**20
            rows.append((t, row.batch, row.peak_mib, *peaks, square))
        columns = ["T", "sequences", "FA2", "flash", "cuDNN", "one score matrix"]
        return pd.DataFrame(rows, columns=columns)

    def policies(self) -> pd.DataFrame:
        """Our kernels at the shape of `BASE`, the slowest first: forward, backward, both over that
        of `FA2`, and memory. Whatever policies the record has."""
        same = self.cases.impl == "triton"
        for name in ("seqlen", "head_dim"):
            same &= self.cases[name] == BASE[name]
        table = self.cases[same]
        found = table[["policy", "tile", "probe"]].assign(
            forward=table.forward_ms, backward=table.backward_ms, MiB=table.peak_mib
        )
        base = self.case().forward_ms + self.case().backward_ms
        found.insert(3, "relative", (found.forward + found.backward) / base)
        return found.sort_values("relative", ascending=False, ignore_index=True)

    def steps(self) -> pd.DataFrame:
        """Training steps by (policy, impl): tokens per second, MiB, and both over those of `FA2`;
        no row where the record has none."""
        names = ["policy", "impl", "tokens_per_second", "peak_mib"]
        table = pd.DataFrame(self.record.get("training", []), columns=names).set_index(names[:2])
        if len(table):
            base = table.loc[("FA2", "triton")]
            table["speed"] = table.tokens_per_second / base.tokens_per_second
            table["memory"] = table.peak_mib / base.peak_mib
        return table

    def repairs(self) -> pd.DataFrame:
        """What each of `REPAIRS` costs over `FA2`, a row for each that the record has: time of
        attention, speed and memory of a training step; NaN for what was not timed."""
        costs = {words: benchmark.relative(self.record, p) for p, words in REPAIRS.items()}
        found = pd.DataFrame(costs, index=["time", "step speed", "step memory"], dtype=float).T
        return found.dropna(how="all").rename_axis("repair").reset_index()

    def untimed(self) -> list[str]:
        """The repairs of which the record has nothing."""
        timed = set(self.repairs().repair)
        return [words for words in REPAIRS.values() if words not in timed]


def largest(ratios: Mapping) -> Measured:
    """The largest of some ratios with its range, and all of them by unit."""
    low, high = (max(ends) for ends in zip(*(r.interval for r in ratios.values()), strict=True))
    by = {unit: ratio.value for unit, ratio in ratios.items()}
    return Measured(max(by.values()), len(by), (low, high), by)


def blocks(sweep: list[dict]) -> pd.DataFrame:
    """The fastest hardware block of each kernel, policy and head dimension of a sweep, how many
    were tried, and how much longer the slowest took. ms: of the half that the kernel belongs to."""
    table, rows = pd.DataFrame(sweep), []
    for (kernel, policy, d), tried in table.groupby(["kernel", "policy", "head_dim"], sort=False):
        ran = tried.dropna(subset="ms").sort_values("ms")
        best = ran.iloc[0]
        rows.append({
            "kernel": kernel.replace("_", " "), "policy": policy, "D": d,
            "queries × keys": f"{best.BM} × {best.BN}", "warps": best.warps, "stages": best.stages,
            "register limit": "none" if pd.isna(best.registers) else f"{best.registers:.0f}",
            "ms": best.ms, "of the": best.half, "tried": len(tried),
            "slowest / fastest": ran.ms.iloc[-1] / best.ms,
        })  # fmt: skip
    return pd.DataFrame(rows)
