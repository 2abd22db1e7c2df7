"""On what a run ran: hardware, versions and the commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def git_commit() -> str:
    """The commit of the code, with "+changes" if the tree differs; LOWPREC_COMMIT overrides it."""
    if "LOWPREC_COMMIT" in os.environ:
        return os.environ["LOWPREC_COMMIT"]
    here = Path(__file__).resolve().parents[1]

    def git(*args):
        return subprocess.run(
            ["git", *args], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "records/provenance.py")  # else it is another's
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
