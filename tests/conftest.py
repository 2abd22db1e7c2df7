"""Shared inputs: families that show different roundings, and a stand-in for the tokenizer."""

import os
import sys

# Triton decides when its kernels are defined whether to interpret them, so this comes first.
if not os.environ.get("LOWPREC_GPU_TESTS"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

torch.set_num_threads(1)
# As `lowprec.publish.notebook.main` does: jsonschema would build a grammar of web addresses from
# it, which takes each worker three seconds.
sys.modules.setdefault("rfc3987_syntax", None)


def pytest_configure():
    if os.environ.get("LOWPREC_GPU_TESTS") and not torch.cuda.is_available():
        pytest.exit("the tests of the kernels need an NVIDIA GPU and there is none", returncode=2)


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
