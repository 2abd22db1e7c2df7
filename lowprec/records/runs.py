"""Run folders: the recorded evidence, and how to read it.

A run folder holds `run.json` (configuration, data hash, commit, versions, hardware, how it ended),
`metrics.parquet` (one row a step) and `probes.parquet` (one row per probe step, layer and head).
It is written once and never overwritten. A campaign is a folder of run folders beside the
`campaign.yaml` that asked for them; once it is finished its runs may be packed into three files,
see `lowprec.records.packed`, and are read as before. `data/manifest.json` holds a sha256 of
everything in `data/`.

What happened to a run is decided in `records.explosion` and nowhere else.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lowprec import UserError
from lowprec.records import packed
from lowprec.records.explosion import PATIENCE, WINDOW, Explosion, find_explosion, window_mean
from lowprec.records.files import at_root, data_root

METRICS = ("step", "loss", "grad_norm")
"""The learning rate, which older runs have as a column `lr`, follows from the config."""
PROBES = (
    "step", "layer", "head", "sigma_q", "sigma_k",
    "delta_bias", "delta_abs", "tied_rows", "rows",
)  # fmt: skip
"""delta_* and tied_rows are sums over the `rows` query rows since the previous probe."""
ONSET = ("step", "layer", "head", "delta_bias", "delta_abs", "tied_rows")
"""The same sums for each step around the onset of an explosion."""


@dataclass(frozen=True)
class Run:
    """One recorded run, in a folder of its own or packed; tables load when first asked for."""

    path: Path
    info: dict

    def __repr__(self) -> str:
        return f"Run({self.name}: {self.policy}, seed {self.seed}, {self.info['ended']})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def policy(self):
        """What it was trained with, a `lowprec.numerics.policy.PrecisionPolicy`."""
        from lowprec.numerics.policy import PrecisionPolicy

        return PrecisionPolicy.parse(self.info["config"]["policy"])

    @property
    def layers(self) -> str:
        """Layers and heads with a policy of their own: "1: FA2; 4/0,2: LOW", "" without any."""
        own = self.info["config"].get("layers") or {}
        return "; ".join(f"{place}: {policy}" for place, policy in own.items())

    @property
    def seed(self) -> int:
        return self.info["config"]["seed"]

    @property
    def final_loss(self) -> float:
        """Mean of the last 500 losses, nats; NaN if one of them is."""
        return float(self.metrics.loss[-500:].mean(skipna=False))

    @property
    def hardware(self) -> str:
        made = [*self.info.get("earlier", []), self.info]
        return " and ".join(dict.fromkeys(sitting["hardware"] for sitting in made))

    @property
    def finished(self) -> bool:
        """False for a run that was killed or goes on: its folder says how far it had come."""
        return self.info["ended"] not in ("running", "stopped")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        return self._table("metrics", METRICS)

    @cached_property
    def probes(self) -> pd.DataFrame:
        return self._table("probes", PROBES)

    @cached_property
    def onset(self) -> pd.DataFrame:
        """Probes of each step around the explosion; only runs with a rise have them, and not all
        recorded ones keep them (data/README.md)."""
        return self._table("onset", ONSET)

    def _table(self, name: str, columns) -> pd.DataFrame:
        own = name not in packed.TABLES or (self.path / "run.json").is_file()
        folder = self.path if own else self.path.parent
        table = read_table(folder / f"{name}.parquet", columns, None if own else self.name)
        if self.finished:
            return table
        return table[table.step < self.info["steps"]]  # run.json is written last

    @cached_property
    def explosion(self) -> Explosion | None:
        return find_explosion(self.metrics["loss"])

    def summary(self) -> str:
        """What happened, on less than a screen."""
        info, config, e = self.info, self.info["config"], self.explosion
        mean, last = window_mean(self.metrics.loss), min(WINDOW, len(self.metrics))
        best = np.fmin.reduce(mean)  # the last loss may be NaN
        exploded = "none"
        if e is not None:
            sure = "confirmed" if e.confirmed else f"seen for less than {PATIENCE} steps"
            exploded = f"at step {e.onset:,}, {sure}"
        norm = self.metrics.grad_norm.tail(last).median()
        usual = dict(positions="learned", norm="layer", mlp="gelu", n_kv_head=None, qk_norm=False,
                     center_keys=False, gate=False, logit_softcap=0.0)  # fmt: skip
        parts = "".join(f", {k} {v}" for k in usual if (v := config.get(k, usual[k])) != usual[k])
        layers = "".join(f", {k}: {v}" for k, v in config.get("layers", {}).items())
        used = f", {info['mfu']:.0%} of the peak rate" if "mfu" in info else ""
        captures = len(list(self.path.glob("captures/*.xz")))
        return "\n".join((
            f"{self.path}: {info['ended']} after {info['steps']:,} steps, {info['seconds']:,.0f} s",
            f"  arm        {info['arm']}, seed {self.seed}: {self.policy}{layers}",
            f"  model      {config['n_layer']} layers, {config['n_head']} heads, "
            f"{config['n_embd']} wide{parts}; "
            f"{config['batch_size']} x {config['block_size']} tokens/step",
            f"  loss       {mean[-1]:.4f} over the last {last} steps, {best:.4f} at best",
            f"  gradient   norm {norm:.3g}, median of the last {last} steps",
            f"  explosion  {exploded}",
            f"  speed      {info['tokens_per_second']:,} tokens/s{used}",
            *([f"  captures   {captures}"] if captures else []),
        ))  # fmt: skip


def read_table(path: Path, columns, run: str | None = None) -> pd.DataFrame:
    """A table of a run, or a run's part of a packed one; raises `UserError` if it is not whole."""
    if not path.is_file():
        raise UserError(f"run folder {path.parent.name} has no {path.name}; {_mend(path)}")
    try:
        if run is None:
            table = pd.read_parquet(path, page_checksum_verification=True)
        else:
            table = packed.read(path, run)
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise UserError(
            f"{path.parent.name}/{path.name} is damaged ({type(error).__name__}); {_mend(path)}"
        ) from None
    missing = [c for c in columns if c not in table]
    if missing:
        raise UserError(f"{path.parent.name}/{path.name} lacks column {', '.join(missing)}")
    return table


def load_run(path) -> Run:
    """Read a run by its folder, which may be packed; raises `UserError` if it is none, or not
    whole."""
    path = Path(path)
    return _load(path, packed.infos(path.parent))


def _load(path: Path, there: dict[str, dict]) -> Run:
    """there: what is packed beside it, `packed.infos`."""
    run = Run(path, info := _info(path, there))
    if json.dumps(there.get(path.name, info)) != json.dumps(info):
        raise UserError(
            f"{path.name} is packed in {path.absolute().parent.name}/{packed.RUNS} and another run "
            f"lies beside it in the folder {path.name}; move that folder away"
        )
    steps = len(run.metrics)
    if steps != info.get("steps", steps):  # an unfinished run shows no more than run.json says
        raise UserError(
            f"metrics.parquet has {steps} steps of {path.name} where its run.json says "
            f"{info['steps']}; {_mend(path)}"
        )
    probes, every = path / "probes.parquet", info["config"].get("probe_every") or steps + 1
    if probes.is_file() and not _rows(probes) and run.finished and steps >= every:
        raise UserError(f"{path.name}/probes.parquet has no rows; {_mend(probes)}")
    return run


def _rows(path: Path) -> int:
    """Of a table; raises `UserError` for one without a footer, not written to its end."""
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(path).num_rows
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise UserError(
            f"{path.parent.name}/{path.name} is damaged ({type(error).__name__}); {_mend(path)}"
        ) from None


def _mend(path: Path) -> str:
    """What to do about a damaged file of a run: one of the repository's, or one's own."""
    with contextlib.suppress(UserError):
        if path.resolve().is_relative_to(data_root().resolve()):
            return "restore it from git, `python -m lowprec verify` shows what else differs"
    return "restore it from a copy, or move the run's folder away and train it again"


def _info(path: Path, there: dict[str, dict]) -> dict:
    """What a run's run.json says."""
    file = path / "run.json"
    if path.name in there and not file.is_file():
        return there[path.name]
    if not path.is_dir():
        part = path.with_name(f".{path.name}.part")
        hint = f"; {part.name} there holds an unfinished one" if part.is_dir() else ""
        where = path.absolute().parent.name
        raise UserError(f"there is no run folder {path.name!r} in {where!r}{hint}")
    if not file.is_file():
        raise UserError(f"{path.name!r} is not a run folder: it has no run.json")
    try:
        return packed.parse(file.read_text())
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path.name}/run.json is damaged; {_mend(path)}") from None


def read_info(path: Path) -> dict:
    """What the run.json of a run says, in its folder or packed; raises as `load_run` does."""
    return _info(path, packed.infos(path.parent))


def is_run(path: Path) -> bool:
    """Whether there is a run of that folder, or a packed one."""
    return (path / "run.json").is_file() or path.name in packed.infos(path.parent)


def run_paths(folder: Path) -> list[Path]:
    """The folders of a campaign's runs, the packed ones' included; not unfinished ones."""
    found = {path.parent for path in folder.glob("[!.]*/run.json")}
    return sorted(found | {folder / name for name in packed.infos(folder)})


def campaign_folder(campaign) -> Path:
    """The folder of a campaign: its name in data/runs, or its folder, as text or not."""
    folder = Path(campaign)
    if isinstance(campaign, str) and not folder.is_absolute():
        named = data_root() / "runs" / campaign
        folder = named if named.is_dir() else at_root(campaign)
    return folder


def nearest(campaign, folder: Path) -> str:
    """What to say where a campaign was not found."""
    known = [path.name for path in (data_root() / "runs").glob("*") if path != folder]
    close = difflib.get_close_matches(str(campaign), known, n=1, cutoff=0.75)
    asked = "give a campaign's name, or the whole path of its folder"
    return f"did you mean {close[0]}?" if close else asked


def require_arms(campaign, arms, there) -> None:
    """Raise `UserError` unless all of some arms are among those `there`, a campaign's."""
    if lacking := [arm for arm in arms if arm not in there]:
        name, known = Path(campaign).name, ", ".join(sorted(there))
        raise UserError(f"campaign {name!r} has no arm {', '.join(lacking)}; it has {known}")


def load_runs(campaign, arms=()) -> pd.DataFrame:
    """Every run of a campaign folder, one row each, with the Run itself in column `run`.

    exploded counts confirmed explosions only; `duration` is the onset or, for a run that did not
    explode, how many steps it was seen not to (censored).
    campaign: its name in data/runs, or its folder. arms: those that there must be.
    Raises `UserError` for a campaign without runs, or without one of `arms`.
    """
    folder = campaign_folder(campaign)
    paths, there = run_paths(folder), packed.infos(folder)
    if not paths:
        if (folder / "run.json").is_file():
            raise UserError(f"{folder} is one run: take load_run, or the folder that holds it")
        hint = nearest(campaign, folder)
        if unfinished := sorted(path.name for path in folder.glob(".*.part")):
            hint = f"only {', '.join(unfinished)}, unfinished"
        raise UserError(f"there are no run folders in {folder}; {hint}")
    rows = []
    for run in (_load(path, there) for path in paths):
        e = run.explosion
        exploded = e is not None and e.confirmed
        rows.append(
            dict(
                run=run, name=run.name, arm=run.info["arm"], policy=str(run.policy),
                layers=run.layers, seed=run.seed, steps=len(run.metrics), exploded=exploded,
                duration=e.onset if e else len(run.metrics), hardware=run.hardware,
                ended=run.info["ended"],
            )
        )  # fmt: skip
    require_arms(campaign, arms, {row["arm"] for row in rows})
    return pd.DataFrame(rows)


def require_writable(path: Path) -> None:
    """Raise `UserError` now rather than after the work if a file cannot be written there."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "there is a folder of that name")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another place") from None
