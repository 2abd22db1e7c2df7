"""What the probe reads in trainings that fail with attention in FP32, before they do.

Of each run of the campaigns `otherwise` and `otherwise_again` that explodes or ends in a loss that
is not finite: the last weights kept before that, and where the data had a fault also those kept
within it. Of the controls of the second all weights kept before the onset or the end.

    python -m lowprec.studies.otherwise data/runs/otherwise
    python -m lowprec.studies.otherwise data/runs/otherwise_again
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from lowprec import UserError, entry
from lowprec.diagnose.measures import COLUMNS, KEYS, alarmed
from lowprec.diagnose.probe import probe
from lowprec.evidence.heads import end_of, norms, take_offs
from lowprec.evidence.words import span
from lowprec.records import runs
from lowprec.records.explosion import window_mean
from lowprec.records.files import data_root
from lowprec.studies import dated, loop, warnings_tested
from lowprec.studies.alarm import second_rule
from lowprec.studies.kept import kept, unwritten
from lowprec.training import recorder

WITHIN = 2250, 2500
"""Steps within the fault of data, from 2,000 to 2,649, at which weights are kept."""
FAULTY = ("noise", "shuffled")
CAUSES = {
    "rate16": "rate too high", "rate8": "rate too high", "climb-fp16": "rate, in FP16",
    "noise": "spoilt data", "shuffled": "spoilt data",
}  # fmt: skip
RATES = ("rate16", "rate8")
FAILING = ("fa2", "nope")
CONTROLS = (*FAILING, "refined")
"""Arms with attention in BF16: two that must ring, and one that must not."""
ENDS = {"climb-fp16": "not finite", "refined": "healthy"}
"""How the runs of an arm were predicted to end, if not by an explosion; controls by step LATEST."""
LATEST = 3500
CLAIMS = ("ends", "otherwise", "rates", "genuine", "notice", "head", "healthy", "keys", "before")


def read(run: runs.Run) -> list[int]:
    """Steps whose kept weights are read: the last before the onset, and those within a fault; of
    controls all before the onset or the end; of other runs that do not fail none."""
    steps, arm = sorted(kept(run)), run.info["arm"]
    before = [step for step in steps if step <= end_of(run)]
    if arm in CONTROLS:
        return before
    if not run.explosion and run.info["ended"] == "completed":
        return []
    within = [step for step in steps if step in WITHIN and arm in FAULTY]
    return sorted({*before[-1:], *within})


def probed(folder: Path, device: str = "auto") -> pd.DataFrame:
    """run, step and the columns of the probe, in float32: FA2 on the committed text."""
    tables = [
        probe(kept(run)[step], policy="FA2", device=device).assign(run=run.name, step=step)
        for run in runs.load_runs(folder).run
        for step in read(run)
    ]
    if not tables:
        raise UserError(f"no run in {folder} failed and has kept weights; record some first")
    table = pd.concat(tables, ignore_index=True)[["run", "step", *COLUMNS]]
    return table.astype(dict.fromkeys(table.select_dtypes("float").columns, "float32"))


def read_table(campaign: str) -> pd.DataFrame:
    """The heads of a campaign's probed.parquet, `alarm` by today's rule and `before` by the second
    rule."""
    heads = pd.read_parquet(data_root() / "runs" / campaign / "probed.parquet")
    return heads.assign(alarm=alarmed(heads), before=second_rule(heads))


def by_reading(heads: pd.DataFrame, ends: pd.Series) -> pd.DataFrame:
    """A row a run and step: its onset or last step, heads that ring by either rule, and the largest
    number of any head in each. heads: of `read_table`; ends: steps by run."""
    found = heads.assign(common=heads.common.abs()).groupby(["run", "step"], as_index=False)
    found = found.agg(
        before=("before", "sum"), now=("alarm", "sum"), share=("share", "max"),
        key_share=("key_share", "max"), common=("common", "max"),
    )  # fmt: skip
    found.insert(1, "end", found.run.map(ends))
    names = {"common": "mean score", "key_share": "mean key", "before": "rang before"}
    return found.rename(columns=names | {"now": "ring now"})


def rung(heads: pd.DataFrame, captured: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The heads that ring by the second rule: of `read_table` by CAUSES, of captures that fail, of
    the last weights of `LOW` in the paper's setting and of planted biases."""
    cause = heads.run.str.rpartition("-")[0].map(CAUSES)
    paper = pd.read_parquet(data_root() / "runs" / "paper" / "probed.parquet")
    tables = {name: heads[cause == name] for name in dict.fromkeys(CAUSES.values())} | {
        "failing captures": captured,
        "LOW, last weights": paper[(paper.run == "low-seed0") & (paper.sequences == 32)],
        "planted bias": dated.recorded("loop", **loop.PARAMETERS)["watched"],
    }
    return {name: table[second_rule(table)] for name, table in tables.items()}


def ended(found: pd.DataFrame) -> dict[str, pd.Series]:
    """What the claims on the ends of runs of `otherwise` take, by claim; found: as for `judged`."""
    fails, faulty = found.outcome != "healthy", found[found.arm.isin(FAULTY)]
    half, climb = (found[found.arm == arm].set_index("seed") for arm in ("climb-fp16", "climb"))
    ends = {f"alarm_{arm}": fails[found.arm == arm] for arm in ("climb", *RATES)}
    return ends | dict(
        alarm_climb_fp16=(half.outcome == "not finite") & (half.end < climb.end),
        alarm_faults=(faulty.outcome != "explodes") | ~faulty.end.between(2000, 2060),
        alarm_faults_takeoff=faulty.run.map(lambda run: not take_offs(run, lag=200).empty),
    )


def again() -> tuple[pd.DataFrame, pd.DataFrame]:
    """(found, heads) of the campaign `otherwise_again`, as `judged` takes them."""
    found = warnings_tested.load(["otherwise_again"]).set_index("name")
    return found, read_table("otherwise_again")


def judged(found: pd.DataFrame, heads: pd.DataFrame) -> dict[str, pd.Series]:
    """Of each of CLAIMS a number for each run, or head, by the campaign's numbered predictions.

    found: of `warnings_tested.load`, by name. heads: of `read_table`. Runs that end otherwise than
    predicted, or before the first weights that are read, are in `ends` alone.
    """
    other = found.outcome != found.arm.map(ENDS).fillna("explodes")
    other |= found.arm.isin(FAILING) & (found.end > LATEST)
    by = heads.groupby("run")[["alarm", "before"]].any()
    good = found[~other & found.index.isin(by.index)]
    exact, rates, failing, calm = (
        good.index[some] for some in (
            ~good.arm.isin(CONTROLS), good.arm.isin(RATES), good.arm.isin(FAILING),
            good.arm == "refined",
        )
    )  # fmt: skip
    last = heads[heads.step == heads.groupby("run").step.transform("max")]
    rang = {name: last[(last.run == name) & last.alarm] for name in failing}
    first = {
        rule: heads[heads[rule]].groupby("run").step.min().reindex(failing).fillna(float("inf"))
        for rule in ("alarm", "before")
    }
    largest = {name: norms(found.run[name]).iloc[-1].idxmax() for name in failing}
    faulty = heads[heads.run.isin(good.index[good.arm.isin(FAULTY)])]
    early = faulty[faulty.step < WITHIN[0]].groupby("run").alarm.any()
    only = heads[heads.run.isin(exact) & heads.before & ~heads.alarm]
    names = [f"{x.run}, {x.step}: {x.layer}.{x.head}" for x in only.itertuples()]
    return dict(
        ends=other, otherwise=by.alarm.reindex(exact), rates=by.alarm.reindex(rates),
        genuine=pd.Series({name: some.empty for name, some in rang.items()}),
        notice=first["alarm"] > first["before"],
        head=pd.Series({
            name: largest[name] not in set(zip(some.layer, some["head"], strict=True))
            for name, some in rang.items()
        }),
        healthy=pd.concat([by.alarm.reindex(calm), early]),
        keys=(only.key_share < KEYS).set_axis(names), before=by.before.reindex(exact),
    )  # fmt: skip


def told(found: pd.DataFrame, heads: pd.DataFrame) -> dict[str, str]:
    """Facts beside the verdicts of `judged`, by name, from the same tables."""
    first = {rule: heads[heads[rule]].groupby("run").step.min() for rule in ("alarm", "before")}
    later = (first["alarm"] - first["before"]).reindex(found.index[found.arm.isin(FAILING)])
    notice = found.end - first["alarm"]
    early = found[(found.arm == "shuffled") & (found.end < 2000)]
    arm, rules = heads.run.map(found.arm), ["alarm", "before"]
    ahead = heads[~arm.isin(CONTROLS) & (heads.step < heads.run.map(found.end))]
    ahead, calm = (some.groupby("run")[rules].any() for some in (ahead, heads[arm == "refined"]))
    keys = heads[heads.alarm & arm.isin(RATES)].key_share
    low = early.run.map(lambda run: window_mean(run.metrics.loss)[: end_of(run)].min())
    return dict(
        again_later=span(later[later > 0], "{:,.0f}"),
        again_notice=span(notice[found.arm.isin(FAILING)], "{:,.0f}"),
        again_shuffled=" and ".join(map("{:,}".format, sorted(early.end))),
        again_low=span(low, "{:.1f}"), again_keys=span(keys),
    ) | {
        f"again_{name}_{rule}": f"{by[rule].sum()} of {len(by)}"
        for name, by in dict(ahead=ahead, calm=calm).items() for rule in rules
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Write what the probe reads in the kept weights of runs that fail into probed.parquet."""
    parser = argparse.ArgumentParser(
        "python -m lowprec.studies.otherwise", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="the campaign's folder")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto is a GPU if there is one")
    args = parser.parse_args(argv)
    out = unwritten(args.folder / "probed.parquet")
    table = probed(args.folder, args.device)
    recorder.write_table(out, table)
    print(f"{out}: {len(table):,} rows, {table.alarm.sum()} alarms")


if __name__ == "__main__":
    entry(main)
