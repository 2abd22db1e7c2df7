"""Find the guilty rounding by trainings: which sets of fields must go for a run not to explode.

The search is that of `lowprec.diagnose.bisect`, and the test of a set a whole training.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from lowprec import UserError
from lowprec.diagnose.bisect import asked, changed, fields_of, modes_of, possible, search
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.records import runs
from lowprec.records.files import at_root
from lowprec.training.config import TrainConfig
from lowprec.training.data.shards import load_tokens
from lowprec.training.loop import train


class Trainings:
    """Whether trainings with other policies explode; each is trained once, into a folder of its own
    below `folder`, and one that is there already is read.

    config: of the training, all but its policy; policies of single layers stay as they are. A run
    explodes if its loss rises and does not come back before the run ends
    (`lowprec.records.explosion`). An explosion later than `config.steps` is not seen.
    """

    def __init__(self, config: TrainConfig, folder: Path):
        self.config, self.folder, self.onsets = config, folder, {}

    def __call__(self, policy: PrecisionPolicy) -> int | None:
        """The step of the explosion, or None."""
        if policy not in self.onsets:
            config = dataclasses.replace(self.config, policy=str(policy))
            path = self.folder / policy.slug
            run = runs.load_run(path) if runs.is_run(path) else train(config, path, resume=True)
            _require_same(run, config)
            if run.explosion is None and run.info["ended"] != "completed":
                why = run.info["ended"]
                raise UserError(f"{run.path} ended early without an explosion ({why}): whether it "
                                "would have exploded is not known")  # fmt: skip
            if run.explosion and not run.explosion.confirmed:
                raise UserError(f"{run.path} ends in a rise that may come back: whether it is an "
                                "explosion is not known; take more steps")  # fmt: skip
            self.onsets[policy] = run.explosion and run.explosion.onset
        return self.onsets[policy]

    def search(self, size: int | None = None, modes: bool = False) -> list[tuple[str, ...]]:
        """The minimal sets with which the training does not explode.

        Raises `UserError` if it does not explode as it is, or if the policy rounds nothing."""
        policy = PrecisionPolicy.parse(self.config.policy)
        whole = fields_of(policy, all_gradients=True)
        items = whole + (modes_of(policy) if modes else ())
        if self(policy) is None:
            raise UserError(f"{policy} does not explode in {self.config.steps} steps; take more, "
                            "another seed or a higher rate")  # fmt: skip

        def calm(some):
            return possible(some) and self(changed(policy, some)) is None

        return search(items, whole, calm, asked(size, len(items)))


def _require_same(run, config: TrainConfig) -> None:
    """Raise `UserError` for a run with other settings or tokens; device and name of data may
    differ. A field that an older run does not know has what was done before there was one."""
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    then = config.usual() | run.info["config"]
    differ = [name for name in now if name not in ("data", "device") and then[name] != now[name]]
    if run.info["data_sha256"] != load_tokens(at_root(config.data), verify=False).sha256:
        differ.append("tokens")
    if differ:
        raise UserError(f"{run.path} was trained with another {', '.join(differ)}; take another "
                        "--out")  # fmt: skip
