"""Run folders: the recorded evidence, and how to read it.

A run folder holds `run.json` (configuration, data hash, commit, versions, hardware, how it ended),
`metrics.parquet` (one row a step) and `probes.parquet` (one row per probe step, layer and head).
It is written once and never overwritten. A campaign is a folder of run folders beside the
`campaign.yaml` that asked for them; once it is finished its runs may be packed into three files,
see `lowprec.packed`, and are read as before. `data/manifest.json` holds a sha256 of everything in
`data/`.

What happened to a run is decided here and nowhere else, by `find_explosion`.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lowprec import UserError, packed

METRICS = ("step", "loss", "grad_norm", "lr")
PROBES = (
    "step", "layer", "head", "sigma_q", "sigma_k",
    "delta_bias", "delta_abs", "tied_rows", "rows",
)  # fmt: skip
"""delta_* and tied_rows are sums over the `rows` query rows since the previous probe."""
ONSET = ("step", "layer", "head", "delta_bias", "delta_abs", "tied_rows")
"""The same sums for each step around the onset of an explosion."""

WINDOW, RISE, RETURN, PATIENCE = 50, 0.5, 0.25, 500
"""An explosion: the 50-step mean loss rises 0.5 above its running minimum and does not come back
within 0.25 of that minimum in the next 500 steps; or the loss is not finite."""


@dataclass(frozen=True)
class Explosion:
    """onset: first step at which the rise is reached; confirmed: the 500 steps after it are there
    (or the loss is not finite), so that it is not a spike that would have come back."""

    onset: int
    confirmed: bool


def window_mean(loss: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean of the last `window` losses at each step, fewer at the start.  (steps,) float64"""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(loss, dtype=float))])
    start = np.maximum(np.arange(1, len(total)) - window, 0)
    return (total[1:] - total[start]) / (np.arange(1, len(total)) - start)


def excess(loss) -> np.ndarray:
    """By how much the mean loss is above its lowest so far, in nats, at each step.  (steps,)"""
    mean = window_mean(loss)
    return mean - np.minimum.accumulate(mean)


def find_explosion(loss) -> Explosion | None:
    """The first explosion in a loss per step, or None; a rise that comes back is a spike."""
    loss = np.asarray(loss, dtype=float)
    broken = np.flatnonzero(~np.isfinite(loss))
    finite = loss[: broken[0]] if len(broken) else loss
    mean = window_mean(finite)
    low = np.minimum.accumulate(mean) if len(mean) else mean
    for onset in np.flatnonzero(mean >= low + RISE):
        after = mean[onset : onset + PATIENCE + 1]
        if (after <= low[onset] + RETURN).any():
            continue
        return Explosion(int(onset), bool(len(broken)) or len(after) > PATIENCE)
    return Explosion(int(broken[0]), True) if len(broken) else None


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
        """What it was trained with, a `lowprec.policy.PrecisionPolicy`."""
        from lowprec.policy import PrecisionPolicy  # here, because reading runs needs no torch

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
        """Mean of the last 500 losses, nats."""
        return float(self.metrics.loss[-500:].mean())

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
        usual = dict(positions="learned", norm="layer", mlp="gelu", n_kv_head=None)
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
        raise UserError(f"run folder {path.parent.name} has no {path.name}; restore it from git")
    try:
        if run is None:
            table = pd.read_parquet(path, page_checksum_verification=True)
        else:
            table = packed.read(path, run)
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise UserError(
            f"{path.parent.name}/{path.name} is damaged ({type(error).__name__}); restore it from "
            f"git, or run `python -m lowprec verify` to see what else differs"
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
            f"{info['steps']}; restore it from git"
        )
    return run


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
        raise UserError(f"{path.name}/run.json is damaged; restore it from git") from None


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


def require_arms(campaign, arms, there) -> None:
    """Raise `UserError` unless all of some arms are among those `there`, a campaign's."""
    if lacking := [arm for arm in arms if arm not in there]:
        name, known = Path(campaign).name, ", ".join(sorted(there))
        raise UserError(f"campaign {name!r} has no arm {', '.join(lacking)}; it has {known}")


def load_runs(campaign, arms=()) -> pd.DataFrame:
    """Every run of a campaign folder, one row each, with the Run itself in column `run`.

    exploded counts confirmed explosions only; `duration` is the onset or, for a run that did not
    explode, the last step at which it could still have been seen to (censored).
    campaign: its name in data/runs, or its folder. arms: those that there must be.
    Raises `UserError` for a campaign without runs, or without one of `arms`.
    """
    folder = campaign_folder(campaign)
    paths, there = run_paths(folder), packed.infos(folder)
    if not paths:
        if (folder / "run.json").is_file():
            raise UserError(f"{folder} is one run: take load_run, or the folder that holds it")
        known = [path.name for path in (data_root() / "runs").glob("*") if path != folder]
        close = difflib.get_close_matches(str(campaign), known, n=1)
        hint = f"did you mean {close[0]}?" if close else "give a campaign's name or folder"
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


def repo_root() -> Path:
    """The folder that holds data/ and notebooks/: from the working directory up, or our own."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if (folder / "data").is_dir() and (folder / "notebooks").is_dir():
            return folder
    raise UserError("no data/ and notebooks/ here or above; run from a clone of the repository")


def data_root() -> Path:
    return repo_root() / "data"


def at_root(path: str | Path) -> Path:
    """A path as given if it exists, else relative to the repository's root."""
    path = Path(path)
    return path if path.exists() or path.is_absolute() else repo_root() / path


def make_folder(path: Path) -> None:
    """Make a folder and those above it; raises `UserError` where there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}; name another") from None


def write_atomic(path: Path, write) -> None:
    """Call `write(open file)`, then give the file its name; an earlier one stays until then."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"cannot write {path}: {reason}; what was written before is still there"
        ) from None


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries(root: Path) -> dict[str, tuple[Path, list[Path]]]:
    """What the manifest lists: each file, and each packed campaign as one; {name: (path, files)}.

    Not the manifest itself, nor what is hidden: logs and unfinished runs."""
    files = [p for p in root.rglob("*") if p.is_file() and p != root / "manifest.json"]
    hidden = {p for p in files if any(part.startswith(".") for part in p.relative_to(root).parts)}
    files = sorted(set(files) - hidden)
    folders = {p.parent for p in files if p.name == packed.RUNS}
    entries: dict = {}
    for file in files:
        path = next((folder for folder in file.parents if folder in folders), file)
        entries.setdefault(path.relative_to(root).as_posix(), (path, []))[1].append(file)
    return entries


def _digest(path: Path, files: list[Path]) -> str:
    """The sha256 of a file, or of what `sha256sum` prints of the sorted files of a folder."""
    if path.is_file():
        return sha256(path)
    names = sorted(file.relative_to(path).as_posix() for file in files)
    lines = "".join(f"{sha256(path / name)}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


def write_manifest(root: Path | None = None) -> Path:
    """Record the sha256 of every file and packed campaign under data/ in data/manifest.json."""
    root = root or data_root()
    entries = {name: _digest(*what) for name, what in _entries(root).items()}
    path = root / "manifest.json"
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    return path


def accept_file(path: Path) -> None:
    """Record one file of data/ in the manifest as it is now, and no other."""
    root = data_root()
    manifest = root / "manifest.json"
    entries = json.loads(manifest.read_text())
    entries[path.relative_to(root).as_posix()] = sha256(path)
    manifest.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def verify(root: Path | None = None) -> int:
    """Check every file of data/ against the manifest; return how many there are.

    Raises `UserError` naming the first few files, or packed campaigns, that differ, are missing or
    are not listed.
    """
    root = root or data_root()
    try:
        entries = dict(json.loads((root / "manifest.json").read_text()))
    except (OSError, ValueError, TypeError):
        raise UserError("data/manifest.json is missing or damaged; restore it from git") from None
    present = _entries(root)
    wrong = [f"{name} is missing" for name in entries if name not in present]
    wrong += [f"{name} is not in the manifest" for name in present if name not in entries]
    wrong += [
        f"{name} differs" for name, digest in entries.items()
        if name in present and _digest(*present[name]) != digest
    ]  # fmt: skip
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"data/ does not match its manifest: {'; '.join(wrong[:3])}{more}; restore the files "
            f"with git, or accept the change with `python -m lowprec verify --write`"
        )
    return sum(len(files) for _, files in present.values())


def git_commit() -> str:
    """The commit of the code, with "+changes" if the tree differs; LOWPREC_COMMIT overrides it."""
    if "LOWPREC_COMMIT" in os.environ:
        return os.environ["LOWPREC_COMMIT"]
    here = Path(__file__).resolve().parent

    def git(*args):
        return subprocess.run(
            ["git", *args], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--", here.as_posix())
        return git("rev-parse", "HEAD") + ("+changes" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance(device: str) -> dict:
    """Hardware, versions and commit, for run.json and the status page."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.device(device).type != "cuda":
        return dict(hardware="CPU", versions=versions, commit=git_commit())
    import triton

    versions |= {"triton": triton.__version__, "cuda": torch.version.cuda}
    return dict(hardware=torch.cuda.get_device_name(device), versions=versions, commit=git_commit())
