"""Shared inputs: families that show different roundings, a stand-in for the tokenizer, and what
is recorded."""

import os
import sys
from pathlib import Path

# Triton decides when its kernels are defined whether to interpret them, so this comes first.
if not os.environ.get("LOWPREC_GPU_TESTS"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

DATA = Path(__file__).resolve().parent.parent / "data"
RUNS = DATA / "runs"
UNDER_WAY = ("paper_again", "refined_again")
APART = ("windows", "pairs", *UNDER_WAY)
OF_KERNELS = ("test_kernel", "test_shared_keys", "test_compile")

torch.set_num_threads(1)
# As `lowprec.publish.notebook.main` does: jsonschema would build a grammar of web addresses from
# it, which takes each worker three seconds.
sys.modules.setdefault("rfc3987_syntax", None)


def pytest_configure():
    if os.environ.get("LOWPREC_GPU_TESTS") and not torch.cuda.is_available():
        pytest.exit("the tests of the kernels need an NVIDIA GPU and there is none", returncode=2)


@pytest.hookimpl(tryfirst=True)  # before those marked slow are left out
def pytest_collection_modifyitems(items):
    """Of many cases that a test of kernels has on a CPU every third is quick, the others slow."""
    asked = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.path.name.startswith(OF_KERNELS) and not marks & {"gpu", "slow"}:
            asked.setdefault(item.function, []).append(item)
    for cases in asked.values():
        for i, case in enumerate(cases if len(cases) > 5 else ()):
            if i % 3:
                case.add_marker(pytest.mark.slow)


def family(name, shape=(1, 2, 96, 64), seed=0, dtype=torch.bfloat16, device="cpu"):
    """q, k, v, do of one input family.

    normal: independent Gaussians. tied: keys share a large carrier, so that many rows have
    several maxima, and V is negative. sink: the first key draws most of every row. lowrank: q and
    k span three directions.
    """
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(*shape, generator=g) for _ in range(4))
    carrier = torch.nn.functional.normalize(torch.randn(shape[-1], generator=g), dim=0)
    if name == "tied":
        q, k, v = q + 8 * carrier, 0.02 * k + 8 * carrier, -v.abs() - 1
    elif name == "sink":
        k[:, :, 0] += 6 * carrier
        q = q + 4 * carrier
    elif name == "lowrank":
        basis = torch.randn(3, shape[-1], generator=g)
        q, k = q[..., :3] @ basis, k[..., :3] @ basis
    elif name != "normal":
        raise ValueError(name)
    return [t.to(dtype).to(device) for t in (q, k, v, do)]


FAMILIES = ("normal", "tied", "sink", "lowrank")


@pytest.fixture(params=FAMILIES)
def inputs(request):
    return family(request.param)


class Bytes:
    """A byte-level stand-in for tiktoken's Encoding."""

    name = "gpt2"
    eot_token = 256

    def encode_ordinary(self, text):
        return list(text.encode())


# The recorded runs and captures


@pytest.fixture(scope="session")
def recorded():
    """The runs of each campaign but `windows`, one whose runs are not kept and those under way."""
    from lowprec.records import runs

    folders = sorted(path.parent.name for path in RUNS.glob("*/campaign.yaml"))
    return {name: runs.load_runs(name) for name in folders if name not in APART}


@pytest.fixture(scope="session")
def captures():
    return load_captures("captures")


@pytest.fixture(scope="session")
def larger():
    """The captures of the model with 12 layers."""
    return load_captures("captures/gpt2")


def load_captures(folder):
    from lowprec.training.capture import Capture

    return {path.stem: Capture.load(path) for path in sorted((DATA / folder).glob("*.xz"))}


class Here:
    """Stands in for `campaign.Local` where a test is not about processes: trains in this one."""

    pause = 0

    def __init__(self, jobs, *_):
        from lowprec.records.files import make_folder

        self.waiting, self.running = list(jobs), []
        make_folder(jobs[0].logs)

    def log(self, job):
        return job.logs / f"{job.name}.txt"

    def look(self):
        from lowprec import UserError
        from lowprec.training.campaign import run_one

        for job in self.running:
            try:
                run_one(job.spec())
            except UserError as error:
                self.log(job).write_text(f"lowprec.UserError: {error}\n")
        self.running, self.waiting = self.waiting[:1], self.waiting[1:]
        states = {job.name: "waiting" for job in self.waiting}
        return states | {job.name: "running" for job in self.running}

    def stop(self):
        pass


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr("lowprec.training.campaign.Local", Here)


def chosen(recorded, campaign, *arms):
    """The runs of some arms of a campaign."""
    table = recorded[campaign]
    return list(table[table.arm.isin(arms)].run)


def excess(run, settled=600):
    """By how much the mean loss is above its lowest so far, from step `settled` on."""
    from lowprec.records import explosion

    return explosion.excess(run.metrics.loss)[settled:]


@pytest.fixture(scope="module")
def hub():
    """transformers, quiet; a test that asks for it is skipped where it is not installed."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers
