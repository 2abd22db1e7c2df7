"""Campaigns: arms x seeds from one YAML file (`lowprec.training.plan`), one run a GPU or Slurm job.

Each run is its own process and lands in the folder of the YAML as ARM-seedN; runs that are there
already are not started again, and one that fails does not stop the others. While they run, a table
shows what their logs and unfinished folders say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from lowprec import UserError
from lowprec.records import packed
from lowprec.records.files import at_root, make_folder, sha256
from lowprec.records.runs import load_run
from lowprec.training.plan import Job, load_campaign
from lowprec.training.progress import Table, table_row


@dataclasses.dataclass(frozen=True)
class Slurm:
    """What one run asks of a Slurm cluster."""

    partition: str | None = None
    """partition of the cluster, its default if None"""
    minutes: int = 240
    """time limit of a run"""
    gpus_per_node: int = 1
    """1, or 0 to run on the CPU"""
    cpus: int = 8
    """CPU cores of a run"""
    memory: float = 64.0
    """GB of memory of a run"""

    def __post_init__(self):
        if self.gpus_per_node not in (0, 1):
            raise UserError(f"gpus_per_node={self.gpus_per_node}: a run takes 1 GPU, or 0 (a CPU)")


def run_campaign(
    path: str | Path, gpus: int | None = None, out: Path | None = None, slurm: Slurm | None = None,
    only: tuple[str, ...] = (), processes: int = 1, **overrides,
) -> dict[str, str]:  # fmt: skip
    """Start what is missing, one process a GPU or one Slurm job a run; {run name: how it went}.

    gpus: runs side by side; by default as many as there are GPUs for, and no limit on a cluster.
    processes: how many train a run together, on this machine, each with a GPU of its own.
    out: folder for the runs instead of the YAML's own, and for a copy of it; logs go to OUT/.logs.
    only: names of runs, ARM-seedN with * for anything; the others are left alone.
    Raises `UserError` before anything starts if the tokens, the GPUs or Slurm are not there.
    Interrupted, it stops the runs of this machine; Slurm jobs go on, and the next call finds them.
    """
    from lowprec.training.data.shards import load_tokens
    from lowprec.training.loop import pick_device

    jobs = load_campaign(path, **overrides)
    for pattern in only:
        if not fnmatch.filter(names := [job.name for job in jobs], pattern):
            known = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
            raise UserError(f"no run is called {pattern!r}; there are {known} (an arm is 'ARM-*')")
    if only:
        jobs = [job for job in jobs if any(fnmatch.fnmatch(job.name, p) for p in only)]
    if out is not None:
        jobs = [dataclasses.replace(job, out=Path(out) / job.out.name) for job in jobs]
    there = packed.infos(jobs[0].out.parent)
    missing = [job for job in jobs if not job.out.exists() and job.name not in there]
    for tokens in {job.config.data for job in missing}:
        load_tokens(at_root(tokens), verify=False)
    for name, count in dict(gpus=gpus, processes=processes).items():
        if count is not None and count < 1:
            raise UserError(f"{name}={count} must be at least 1")
    if slurm is not None and processes > 1:
        raise UserError(f"processes={processes} is for this machine; a Slurm job takes one GPU")
    for job in missing:
        try:
            job.config.check_processes(processes)
            if slurm is None:
                pick_device(job.config.device)
        except UserError as error:
            raise UserError(f"{job.name}: {error}; --only leaves it out") from None
    result = {job.name: "" if job in missing else _before(job) for job in jobs}
    if missing:
        for name, text in result.items():
            if text.startswith(("recorded before,", "failed")):
                print(f"{name}: {text}", file=sys.stderr)
        local = slurm is None
        where = Local(missing, gpus, processes) if local else Cluster(missing, gpus, slurm)
    if out is not None:
        _keep_copy(Path(path), Path(out) / "campaign.yaml", renew=bool(missing))
    return result | (_watch(missing, where) if missing else {})


def _keep_copy(path: Path, copy: Path, renew: bool):
    """The campaign file beside its runs; an earlier text stays, by the hash that its runs name."""
    if copy.exists():
        if not renew or (digest := sha256(copy)) == sha256(path):
            return
        kept = copy.rename(copy.with_name(f"campaign-{digest[:8]}.yaml"))
        print(f"{path} has changed; its earlier text is kept as {kept}", file=sys.stderr)
    copy.write_bytes(path.read_bytes())
    copy.with_name(f"campaign-{sha256(copy)[:8]}.yaml").unlink(missing_ok=True)  # changed back


def _before(job: Job) -> str:
    """What there is to say of a run that is there; a damaged one does not keep others back."""
    try:
        return "recorded before" + _otherwise(job)
    except UserError as error:
        return f"failed ({error})"


def _otherwise(job: Job) -> str:
    """What a recorded run has otherwise than the campaign asks for now: settings, or the file."""
    info = load_run(job.out).info
    then = job.config.usual() | info["config"]
    now = json.loads(job.spec())["config"]
    ours = ("data", "device")  # recorded by name, and as it was chosen
    differ = [f"{k}={then[k]}, not {now[k]}"
              for k in then if k in now and k not in ours and then[k] != now[k]]  # fmt: skip
    differ += _other_tokens(info.get("data_sha256"), job)
    if differ:
        return ", with " + ", ".join(differ)
    same = info.get("campaign_sha256", job.campaign) == job.campaign
    return "" if same else ", when the campaign file had another text"


def _other_tokens(then: str | None, job: Job) -> list[str]:
    """That a run was recorded with other tokens than are now where the campaign looks for them."""
    from lowprec.training.data.shards import load_tokens

    try:
        now = load_tokens(at_root(job.config.data), verify=False)
    except UserError:  # recorded elsewhere, and nothing to train here
        return []
    if then in (None, now.sha256):
        return []
    return [f"tokens of sha256 {then[:8]}…, not {now.name}, {now.sha256[:8]}…"]


def _watch(jobs: list[Job], where: Local | Cluster) -> dict[str, str]:
    """Show the table until every run is over; {run name: how it went}."""
    table = Table(sys.stderr)
    try:
        while True:
            alive = where.look()
            over = [job for job in jobs if job.name not in alive]
            states = alive | {job.name: "done" if job.out.exists() else "failed" for job in over}
            table.show([table_row(job, states[job.name], where.log(job)) for job in jobs])
            if not alive:
                return {job.name: outcome(job, where.log(job)) for job in jobs}
            time.sleep(where.pause)
    finally:
        where.stop()


class Local:
    """The runs on this machine, each in one process that sees one GPU (or none), or in several."""

    pause = 0.5

    def __init__(self, jobs: list[Job], side_by_side: int | None, processes: int = 1):
        self.waiting, self.running, self.processes = list(jobs), {}, processes
        devices = visible_gpus()
        needed = (side_by_side or 1) * processes
        if devices and needed > len(devices):
            asked = f"{side_by_side or 1} x {processes} GPUs are asked for"
            raise UserError(f"{asked}, and {len(devices)} can be seen")
        make_folder(jobs[0].logs)
        shares = [devices[i : i + processes] for i in range(0, len(devices), processes)]
        groups = [",".join(share) for share in shares if len(share) == processes]
        self.free = groups[:side_by_side] or [None] * (side_by_side or 1)

    def log(self, job: Job) -> Path:
        return job.logs / f"{job.name}.txt"

    def look(self) -> dict[str, str]:
        """Start what there is room for; the state of each run that is not over."""
        for name, (process, device) in list(self.running.items()):
            if process.poll() is not None:
                self.free.append(device)
                del self.running[name]
        while self.waiting and self.free:
            job, device = self.waiting.pop(0), self.free.pop(0)
            self.running[job.name] = self._start(job, device), device
        return {j.name: "waiting" for j in self.waiting} | dict.fromkeys(self.running, "running")

    def _start(self, job: Job, device: str | None) -> subprocess.Popen:
        words = ["-m", "lowprec.training.campaign", job.spec()]
        if self.processes > 1:
            count = f"--nproc-per-node={self.processes}"
            words = ["-m", "torch.distributed.run", "--standalone", count, *words]
        seen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        with contextlib.suppress(UserError), only_process(job.lock):
            self.log(job).unlink(missing_ok=True)  # that of a run which goes on is kept
        with open(self.log(job), "a") as log:
            return subprocess.Popen(
                [sys.executable, *words], env=os.environ | seen,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops them
            )  # fmt: skip

    def stop(self):
        """Ask what still runs to end; kill what has not ended after a minute."""
        processes = [process for process, _ in self.running.values()]
        if processes:
            print("lowprec: stopping the runs, a minute at most", file=sys.stderr)
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + 60
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [str(i) for i in range(count)] if named is None else named.split(",")[:count]


class Cluster:
    """The runs as one array of Slurm jobs, sent with submitit and watched with squeue."""

    pause = 5.0

    def __init__(self, jobs: list[Job], side_by_side: int | None, slurm: Slurm):
        if not all(map(shutil.which, ("sbatch", "srun", "squeue"))):
            raise UserError("there is no Slurm here (no sbatch, srun, squeue); use cluster=local")
        queued = self._queue()
        self.folder = jobs[0].logs.absolute() / "slurm"
        make_folder(self.folder)
        self.ids, self.gone = {}, set()
        for job in jobs:  # sent by an earlier call that was interrupted
            with contextlib.suppress(FileNotFoundError):
                if (number := self._note(job).read_text()) in queued:
                    self.ids[job.name] = number
        if new := [job for job in jobs if job.name not in self.ids]:
            self._submit(new, side_by_side, slurm)
        self.states = dict.fromkeys(self.ids, "waiting")

    def _submit(self, jobs: list[Job], side_by_side: int | None, slurm: Slurm):
        import submitit

        executor = submitit.SlurmExecutor(self.folder)
        executor.update_parameters(
            job_name="lowprec", time=slurm.minutes, cpus_per_task=slurm.cpus,
            mem=f"{slurm.memory * 1024:.0f}MB", array_parallelism=side_by_side or len(jobs),
            stderr_to_stdout=True,
            **({"partition": slurm.partition} if slurm.partition else {}),
            **({"gpus_per_node": slurm.gpus_per_node} if slurm.gpus_per_node else {}),
        )  # fmt: skip
        device = "cuda" if slurm.gpus_per_node else "cpu"  # never a CPU where a GPU was asked for
        try:
            with executor.batch():
                sent = [executor.submit(run_one, job.spec(), device) for job in jobs]
        except submitit.core.utils.FailedJobError as error:
            lines = [line for line in str(error).splitlines() if "error:" in line]
            raise UserError(f"Slurm refused the jobs: {(lines or [str(error)])[-1]}") from None
        for job, task in zip(jobs, sent, strict=True):
            self._note(job).write_text(task.job_id)
            self.ids[job.name] = task.job_id

    def _note(self, job: Job) -> Path:
        return job.logs / f"{job.name}.job"

    def log(self, job: Job) -> Path:
        return self.folder / f"{self.ids[job.name]}_0_log.out"

    def _queue(self) -> dict[str, str]:
        """{job id: state} of the user's jobs that are not over; raises if squeue fails."""
        command = ["squeue", "--me", "--array", "--noheader", "--format=%i %T"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"squeue failed: {done.stderr.strip()}")
        return dict(line.split() for line in done.stdout.splitlines())

    def look(self) -> dict[str, str]:
        """The state of each run that is not over."""
        try:
            queued = self._queue()
        except UserError:  # the controller is busy or restarts; the jobs go on
            return self.states
        # A job is over once it was missing twice: its folder may show late on a shared disk.
        missing = {name for name, number in self.ids.items() if number not in queued}
        over, self.gone = missing & self.gone, missing
        self.states = {
            name: "waiting" if queued.get(number) == "PENDING" else "running"
            for name, number in self.ids.items() if name not in over
        }  # fmt: skip
        return self.states

    def stop(self):
        """Nothing: jobs outlive the command that sent them; scancel ends them."""


def run_one(spec: str, device: str = "auto") -> None:
    """Entry of a job's process: train what the JSON says, from its last checkpoint if it has one.

    Raises `UserError` if another process runs it, or if an unfinished folder has no checkpoint.
    """
    from lowprec.training.config import TrainConfig
    from lowprec.training.loop import train

    job = json.loads(spec)
    if job["config"]["device"] == "auto":
        job["config"]["device"] = device
    out = Path(job["out"])
    lock = only_process(Job(job["arm"], None, out).lock)
    with lock if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
        train(TrainConfig(**job["config"]), out, job["arm"], True, job["campaign"])


@contextlib.contextmanager
def only_process(lock: Path):
    """Raise `UserError` if another process is inside with the same file, on any node.

    A run outlives a campaign that was killed, and two runs must not write one folder.
    """
    import fcntl  # here, because reading a campaign must work where there is no fcntl

    with open(lock, "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{lock.stem} is being run by another process; let it end") from None
        except OSError:  # a file system without locks
            pass
        yield


def outcome(job: Job, log: Path) -> str:
    """How a run that is over went: "done in N s, exploded at STEP" or "failed (WHY), see LOG"."""
    if job.out.exists():
        try:
            run = load_run(job.out)
        except UserError as error:  # the others have been run
            return f"failed ({error})"
        went = f"done in {run.info['seconds']:.0f} s"
        if rise := run.explosion:
            seen = "exploded" if rise.confirmed else "loss rose, unconfirmed,"
            went += f", {seen} at step {rise.onset:,}"
        return went
    text = log.read_text(errors="replace") if log.exists() else ""
    rank = r"^(?:\[rank\d+\]: )?"
    # Of several processes the first to fail has the reason; then the others lose it, and torchrun
    # reports them all.
    said = re.findall(rf"{rank}lowprec\.UserError: (.*)$", text, re.MULTILINE)[-1:]
    other = r"(?:\w+\.)*(?!ChildFailed|Signal)\w*(?:Error|Exception): (?!.*by peer)(.+)$"
    said += re.findall(rank + other, text, re.MULTILINE)[-1:]
    said += re.findall(r"exitcode +: -\d+ \(.*\)\n.*\n +traceback : (Signal .*)", text)[-1:]
    return f"failed ({said[0][:300]}), see {log}" if said else f"failed, see {log}"


if __name__ == "__main__":
    run_one(sys.argv[1])
