"""What a campaign plans: its YAML file as jobs, arms x seeds, without starting any.

question: Does ...?
predictions: [what is expected, and what would refute it]
preset: gpt2                      # lowprec.training.config.PRESETS, then any field of TrainConfig
train: {lr: 2.0e-3, steps: 6500}
arms:
  low: {policy: LOW, seeds: [0, 1, 2]}
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from pathlib import Path

import yaml

from lowprec import UserError, load_yaml, yaml_fault
from lowprec.records.files import sha256

KEYS = ("question", "predictions", "preset", "train", "arms")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a campaign: its arm, its configuration and the folder it will write."""

    arm: str
    config: object
    out: Path
    campaign: str = ""
    """sha256 of the campaign file, with the predictions"""

    @property
    def name(self) -> str:
        return self.out.name

    @property
    def part(self) -> Path:
        """The run's folder until it has ended."""
        return self.out.with_name(f".{self.name}.part")

    @property
    def logs(self) -> Path:
        return self.out.parent / ".logs"

    @property
    def lock(self) -> Path:
        """What the process of the run holds, see `lowprec.training.campaign.only_process`."""
        return self.logs / f"{self.name}.lock"

    def spec(self) -> str:
        return json.dumps(
            dict(config=dataclasses.asdict(self.config), out=str(self.out.absolute()),
                 arm=self.arm, campaign=self.campaign)
        )  # fmt: skip


def load_campaign(path: str | Path, **overrides) -> list[Job]:
    """The jobs of a campaign file in seed order; `overrides` win over the file's `train`."""
    from lowprec.training.config import PRESETS, TrainConfig

    path = Path(path)
    spec = _read(path)
    if spec.get("preset") not in list(PRESETS):
        raise UserError(f"{path.name}: preset must be one of {', '.join(PRESETS)}")
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    digest = sha256(path)
    jobs = []
    for arm, changes in spec["arms"].items():
        where = f"{path.name}: arm {arm}"
        if not isinstance(arm, str):
            raise UserError(f"{where} is no text to YAML, but {arm!r}; write its name in quotes")
        if not re.fullmatch(r"\w[\w.+-]*", arm):
            raise UserError(f"{where} names folders; take letters, digits and _ . + -")
        changes = dict(changes)
        seeds = changes.pop("seeds", None)
        whole = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
        if not whole or not seeds or len(set(seeds)) < len(seeds):
            raise UserError(f"{where} must list its seeds, each once: seeds: [0, 1, 2]")
        values = {**(spec.get("train") or {}), **changes, **overrides}
        if "policy" not in values:
            raise UserError(f"{where} must say its policy, such as policy: LOW")
        for name in values:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UserError(f"{where} sets unknown field {name}{hint}")
        if "seed" in values:
            raise UserError(f"{where} sets seed, which each of its seeds is")
        for seed in seeds:
            try:
                config = dataclasses.replace(PRESETS[spec["preset"]], **(values | {"seed": seed}))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            jobs.append(Job(arm, config, path.parent / f"{arm}-seed{seed}", digest))
    return sorted(jobs, key=lambda job: job.config.seed)


def _read(path: Path) -> dict:
    """What a campaign file says, with all that a campaign needs."""
    try:
        spec = load_yaml(path.read_text())
    except OSError:
        places = path / "campaign.yaml", Path("data/runs", path, "campaign.yaml")
        found = [place for place in places if place.is_file()]
        hint = f"; did you mean {found[0]}?" if found else ""
        raise UserError(f"there is no campaign file {path}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} is not valid YAML: {yaml_fault(error)}") from None
    for key in set(spec if isinstance(spec, dict) else ()) - set(KEYS):
        raise UserError(f"{path.name} has an unknown key {key}; it takes {', '.join(KEYS)}")
    if not isinstance(spec, dict) or not spec.get("arms") or not spec.get("question"):
        raise UserError(f"{path.name} must have a question and at least one arm")
    if not spec.get("predictions"):
        raise UserError(f"{path.name} has no predictions; write them before the runs")
    told = spec["predictions"]
    if not isinstance(told, list) or not all(isinstance(text, str) for text in told):
        raise UserError(
            f"{path.name}: predictions must be a list of texts; quote a text that has ': ' in it"
        )
    arms = spec["arms"].values() if isinstance(spec["arms"], dict) else [None]
    if not all(isinstance(settings, dict) for settings in (spec.get("train") or {}, *arms)):
        raise UserError(f"{path.name}: train and each of the arms must be settings, name: value")
    return spec
