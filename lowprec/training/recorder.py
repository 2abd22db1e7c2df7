"""What a training run writes: metrics, probes, checkpoints and captures in one folder.

Measurements gather on the device and come to the host with the probes. Until a run has ended its
folder is called `.NAME.part`; it is written whole every `FLUSH` steps, before that every few
seconds, run.json last, so that a process killed at any moment leaves the run as it was at the last
flush.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections import deque
from math import isfinite
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lowprec import UserError
from lowprec.attention import PROBE_COLUMNS
from lowprec.attention.operator import that_runs
from lowprec.numerics import scaling
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.records import explosion, files, provenance, runs
from lowprec.records.tables import load_archive, weights_sha256, write_table
from lowprec.training.probes import spectral_norms

FLUSH, EARLY = 500, 2.0
"""Steps after which a run is written, and seconds in the first so many."""
BEFORE, AFTER = 300, 50
"""Steps around the onset of an explosion whose probes are kept one by one."""


PEAK_TFLOPS = {"H100": 989.4, "H200": 989.4, "A100": 312.0}
"""Dense BF16 rate in TFLOP/s that the maker states, by a part of the GPU's name."""


def _impl(config, device) -> str:
    """What runs attention; a name for each part of the model where parts differ."""
    model = config.model()
    policies = {policy for layer in range(model.n_layer) for policy, _ in model.groups(layer)}
    ran = {that_runs(p, config.tile, config.impl, device, model.head_dim) for p in policies}
    return ", ".join(sorted(ran))


class Recorder:
    """Gathers what is measured, and writes the run folder. On ranks above 0 it only gathers."""

    def __init__(
        self, config, out: Path, arm: str, group, tokens, resume: bool = False, campaign: str = ""
    ):
        self.config, self.group, self.name = config, group, out.name
        self.part = out.with_name(f".{out.name}.part")
        self.resumes = resume and (self.part / "checkpoint.pt").is_file()
        if self.part.exists() and not self.resumes:
            mend = "remove it, or choose another name"
            if (self.part / "checkpoint.pt").is_file():
                mend = "add --resume to go on from its checkpoint, or choose another name"
            elif resume:
                mend = "it has no checkpoint to go on from; " + mend
            raise UserError(f"{self.part} holds an unfinished run; {mend}")
        group.wait()
        here = dict(device=torch.device(group.device).type, data=tokens.name)
        recorded = dataclasses.asdict(config) | here
        self.info = dict(
            name=out.name, arm=arm or PrecisionPolicy.parse(config.policy).slug,
            config=json.loads(json.dumps(recorded)), processes=group.size,
            impl=_impl(config, group.device), data_sha256=tokens.sha256,
            **provenance.provenance(group.device),
        )  # fmt: skip
        if campaign:  # says whether the predictions are those of the commit
            self.info["campaign_sha256"] = campaign
        if group.rank == 0:
            files.make_folder(self.part)
            self._hold()
            for rest in self.part.rglob("*.tmp"):  # of a process that was killed as it wrote
                rest.unlink()
        self.step = self.flushed = 0  # steps done, steps written
        self.pending, self.metrics, self.probes = [], [], []
        self.recent = deque(maxlen=max(explosion.PATIENCE + BEFORE, 2 * config.probe_every) + 200)
        self.onset = []
        self.seconds, self.clock = 0.0, time.time()
        self.began, self.timed = (0, self.clock), None

    def _hold(self):
        """Keep other processes of this machine from writing the folder until this one ends."""
        import fcntl  # here, because pages import what trains also where there is no fcntl

        self.held = os.open(self.part, os.O_RDONLY)
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.held)
            raise UserError(f"{self.part} is being trained by another process") from None
        except OSError:  # a file system without locks
            pass

    def measured(self, loss, norm, probe):
        """One step's numbers, still on the device."""
        sums = None if probe is None or probe.grad is None else probe.grad
        self.pending.append((self.step, loss, norm, sums))
        if probe is not None:
            probe.grad = None
        self.step += 1

    def collect(self):
        """Move what is pending to the host."""
        if not self.pending:
            return
        steps, losses, norms, sums = zip(*self.pending, strict=True)
        values = torch.stack([torch.stack(losses), torch.stack(norms)]).double().cpu().numpy()
        self.metrics += zip(steps, *values, strict=True)
        if sums[0] is not None:
            total = self.group.sum(torch.stack(sums))
            total[..., :2] /= self.group.size  # the gradients of each process are of its own mean
            self.recent.extend(total.cpu().numpy())
        self.pending = []
        broken = next((row[0] for row in self.metrics if not isfinite(row[1])), None)
        if broken is not None:  # no update was made from there on
            surplus = len(self.metrics) - broken - 1
            del self.metrics[broken + 1 :]
            for _ in range(min(surplus, len(self.recent))):
                self.recent.pop()
            self.step = broken + 1

    def broken(self) -> bool:
        """Whether the loss of some step so far is not finite."""
        self.collect()
        return not isfinite(self.metrics[-1][1])

    def probe(self, model):
        """The sums since the last probe, and the weights."""
        first = self.probes[-1][0, 0] + 1 if self.probes else 0
        self.collect()
        sigma_q, sigma_k = (spectral_norms(model.head_weights(w)).cpu().numpy() for w in "qk")
        sigma_k = sigma_k.repeat(sigma_q.shape[1] // sigma_k.shape[1], 1)  # of the keys it reads
        sums = np.full((*sigma_q.shape, len(PROBE_COLUMNS)), np.nan)
        count = int(self.step - first)
        made = np.full(count, True)
        if self.config.amp == "fp16" or self.config.loss_scale:  # an overflow there skips a step
            made = np.array([isfinite(n) or not isfinite(x) for _, x, n in self.metrics[-count:]])
        if self.recent and made.any():
            sums = np.sum(np.array(list(self.recent)[-count:])[made], axis=0, dtype=float)
        rows = made.sum() * self.config.batch_size * self.config.block_size
        layer, head = np.indices(sigma_q.shape)
        columns = (np.full(sigma_q.shape, self.step - 1), layer, head, sigma_q, sigma_k,
                   *np.moveaxis(sums, -1, 0), np.full(sigma_q.shape, rows))  # fmt: skip
        self.probes.append(np.stack([c.ravel() for c in columns], -1))
        self._keep_onset()
        now = time.time()
        self.timed = self.timed or (self.step, now)  # what comes before is compiling
        early = self.step < FLUSH and now - self.clock > EARLY  # a short run has a curve as well
        if early or self.step // FLUSH > first // FLUSH:
            self.flush("running")

    def _keep_onset(self):
        """Keep the steps around an onset, once those after it are there."""
        e = explosion.find_explosion(self.losses())
        if e is None or (self.onset and e.onset not in self.onset[0][:, 0]):  # the last came back
            self.onset = []
        if e is None or self.onset or not self.recent:
            return
        if e.confirmed or self.step > e.onset + AFTER:
            oldest = self.step - len(self.recent)
            first, last = max(e.onset - BEFORE, oldest, 0), min(e.onset + AFTER, self.step)
            sums = np.stack(list(self.recent)[first - oldest : last - oldest])
            index = np.indices(sums.shape[:-1])
            index[0] += first
            columns = (*index, *np.moveaxis(sums, -1, 0))
            self.onset = [np.stack([c.ravel() for c in columns], -1)]

    def losses(self) -> np.ndarray:
        return np.array([row[1] for row in self.metrics])

    def line(self) -> str:
        """The state of the run in a few words, for the progress bar."""
        rate = self.speed()["tokens_per_second"]
        return f"loss={self.metrics[-1][1]:.3f}, {rate:,} tokens/s"

    def should_stop(self) -> str | None:
        """Why the run ends now, or None."""
        losses = self.losses()
        if not isfinite(losses[-1]):
            return "non-finite"
        most = scaling.PATIENCE
        norms = [norm for *_, norm in self.metrics[-most:]]
        if self.config.amp == "fp16" and len(norms) == most and not any(map(isfinite, norms)):
            return f"{most} steps skipped, step {self.step - 1}"
        after = self.config.stop_after_explosion
        if after is None or (e := explosion.find_explosion(losses)) is None or not e.confirmed:
            return None
        return "explosion" if len(losses) > e.onset + after else None

    def speed(self, model=None) -> dict:
        """Tokens per second, from the first probe on, and the share of the GPUs' peak rate."""
        first, since = self.timed if self.timed and self.timed[0] < self.step else self.began
        tokens = (self.step - first) * self.config.batch_size * self.config.block_size
        rate = tokens / (time.time() - since)
        peaks = [v for k, v in PEAK_TFLOPS.items() if k in self.info["hardware"]]
        if model is None or not peaks:
            return dict(tokens_per_second=round(rate))
        used = rate * model.flops_per_token() / self.group.size / 1e12
        return dict(tokens_per_second=round(rate), mfu=round(used / peaks[0], 4))

    def flush(self, ended: str, model=None):
        """Write the folder; what the last flush wrote stays if this one fails."""
        self.flushed = self.step
        if self.group.rank:
            return
        self.seconds, self.clock = self.seconds + time.time() - self.clock, time.time()
        self.info |= dict(
            ended=ended,
            steps=len(self.metrics),
            seconds=round(self.seconds, 1),
            **self.speed(model),
        )
        metrics = pd.DataFrame(self.metrics, columns=runs.METRICS)
        metrics = metrics.astype({"step": "int32", "grad_norm": "float32"})
        write_table(self.part / "metrics.parquet", metrics)
        for name, columns, rows in (
            ("probes", runs.PROBES, self.probes), ("onset", runs.ONSET, self.onset)
        ):  # fmt: skip
            values = np.concatenate(rows) if rows else np.empty((0, len(columns)))
            table = pd.DataFrame(values, columns=columns).astype("float32")
            if rows or name == "probes":
                table = table.astype({"step": "int32", "layer": "int16", "head": "int16"})
                write_table(self.part / f"{name}.parquet", table)
            else:
                (self.part / f"{name}.parquet").unlink(missing_ok=True)
        text = json.dumps(self.info, indent=1) + "\n"
        files.write_atomic(self.part / "run.json", lambda file: file.write(text.encode()))

    def keep_weights(self, model):
        """All weights as they are, for `lowprec.studies`; hidden, being too large for git."""
        if self.group.rank == 0:
            path = self.part / ".weights" / f"step-{self.step:06d}.pt"
            files.make_folder(path.parent)
            files.write_atomic(path, lambda file: torch.save(model.state_dict(), file))

    def checkpoint(self, model, optimizer, scaler):
        """Everything that the next step depends on, in one file."""
        self.collect()
        if self.step > self.flushed:
            self.flush("running")
        if self.group.rank:
            return
        state = dict(
            config=json.dumps(self._fixed()), sittings=json.dumps(self._sittings()),
            step=self.step, model=model.state_dict(),
            optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
            seconds=self.seconds + time.time() - self.clock,
            metrics=torch.tensor(self.metrics, dtype=torch.float64),
            probes=[torch.from_numpy(p) for p in self.probes],
            onset=[torch.from_numpy(p) for p in self.onset],
            recent=[torch.from_numpy(p) for p in self.recent],
        )  # fmt: skip
        files.write_atomic(self.part / "checkpoint.pt", lambda file: torch.save(state, file))

    def _fixed(self) -> dict:
        """What a run that goes on must have as before."""
        return self.info["config"] | {"data_sha256": self.info["data_sha256"]}

    def _sittings(self) -> list[dict]:
        """What made the steps so far, and up to which: the last is this sitting."""
        asked = ("processes", "hardware", "versions", "commit", "campaign_sha256")
        now = {k: self.info[k] for k in asked if k in self.info}
        return [*self.info.get("earlier", []), dict(steps=self.step) | now]

    def restore(self, model, optimizer, scaler):
        """Put everything where the checkpoint of an unfinished run left it."""
        if not self.resumes:
            return
        path = self.part / "checkpoint.pt"
        try:
            state = load_archive(path)
            before, now = self.config.usual() | json.loads(state["config"]), self._fixed()
            differ = sorted(k for k in before.keys() | now if before.get(k) != now.get(k))
            if not differ:
                self._take(state, model, optimizer, scaler)
        except (OSError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path} is there, and could not be taken up: {reason}") from None
        except Exception as error:  # a damaged archive or another program's raises many types
            raise UserError(
                f"{path} is damaged ({type(error).__name__}); move {self.part} away, whose tables "
                "can still be read, and start again"
            ) from None
        if not differ and self.group.rank == 0:
            self._shorten()
        if differ:
            raise UserError(
                f"{path} was made with other {', '.join(differ)}; take the same, or start anew"
            )

    def _shorten(self):
        """Have run.json say no more steps than the tables will have once they are written anew."""
        file = self.part / "run.json"
        if file.is_file() and (info := json.loads(file.read_text()))["steps"] > self.step:
            info |= dict(steps=self.step, ended="running")  # also where it had come to its end
            text = json.dumps(info, indent=1) + "\n"
            files.write_atomic(file, lambda out: out.write(text.encode()))

    def _take(self, state: dict, model, optimizer, scaler):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        *earlier, last = json.loads(state["sittings"])
        now = self._sittings()[-1] | dict(steps=last["steps"])
        last = now | last  # an older checkpoint says nothing of the campaign
        if last != now:
            earlier.append(last)
            differ = ", ".join(
                f"{k} {last[k]} -> {now.get(k)}" for k in last if last[k] != now.get(k)
            )
            if self.group.rank == 0:
                print(f"{self.name} goes on at step {last['steps']:,} with other {differ}")
        if earlier:  # else as if it had never stopped
            self.info["earlier"] = earlier
        self.step, self.seconds = state["step"], state["seconds"]
        self.began = (self.step, time.time())
        rows = state["metrics"].tolist()  # in an older checkpoint with the learning rate
        self.metrics = [(int(step), loss, norm) for step, loss, norm, *_ in rows]
        self.probes, self.onset = ([p.numpy() for p in state[k]] for k in ("probes", "onset"))
        self.recent.extend(p.numpy() for p in state["recent"])

    def stopped(self, model, optimizer, scaler):
        """Leave the run where it is, on request."""
        self.collect()
        self.flush("stopped", model)
        goes_on = "nothing goes on from there, since checkpoint_every is 0"
        if self.config.checkpoint_every:
            self.checkpoint(model, optimizer, scaler)
            goes_on = "with --resume, or started again by its campaign, it goes on from there"
        raise UserError(
            f"{self.name} was stopped after {self.step} steps, see {self.part}; {goes_on}"
        )

    def leave(self):
        """Let go of the folder, and drop it if nothing was recorded in it."""
        if self.group.rank == 0:
            os.close(self.held)
            with contextlib.suppress(OSError):
                self.part.rmdir()

    def finish(self, end: str, model, out: Path):
        """Write the rest, and give the folder its name."""
        self.info["weights_sha256"] = weights_sha256(model.state_dict())
        self.flush(end, model)
        if self.group.rank == 0:
            try:
                os.rename(self.part, out)  # first: what is killed in between can be resumed
            except OSError as error:
                words = f"{out} came to be meanwhile ({error.strerror})"
                raise UserError(f"{words}; the run is whole in {self.part}") from None
            (out / "checkpoint.pt").unlink(missing_ok=True)
