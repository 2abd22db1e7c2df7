"""The plain PyTorch program: it is attention, PyTorch types it so, and it rounds like RELEASED."""

import logging

import pytest
import torch
from conftest import family
from torch._subclasses.fake_tensor import FakeTensorMode

from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.policy import RELEASED
from lowprec.studies.published import (
    REGIMES,
    GpuAutocast,
    backward,
    backward_error,
    forward,
    under,
    value_types,
)


@pytest.fixture
def cuda_autocast():
    """PyTorch's own autocast for CUDA, on tensors without data; needs no GPU."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    with torch.inference_mode(), FakeTensorMode():
        yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


def types(t):
    return {name: x.dtype for name, x in vars(t).items()}


def both(device, dtype):
    q, k, v, do = (torch.zeros(1, 1, 8, 16, device=device, dtype=dtype) for _ in range(4))
    t = forward(q, k, v, tile=4)
    return types(t) | types(backward(t, q, k, v, do, tile=4))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile", [32, 40, 96])
def test_it_is_attention(tile, causal):
    q, k, v, do = family("normal", dtype=torch.float64)
    exact = oracle(q, k, v, causal, do=do)
    t = forward(q, k, v, tile, causal)
    grads = backward(t, q, k, v, do, tile, causal)
    assert torch.allclose(t.o, exact.o, rtol=1e-9, atol=1e-9)  # the floor adds 1e-10 a block
    for name in ("dq", "dk", "dv"):
        assert torch.allclose(getattr(grads, name), getattr(exact, name), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_autocast_types_every_value_as_pytorch_does(dtype, cuda_autocast):
    expected = both("cuda", dtype)
    torch.set_autocast_enabled("cuda", False)
    with GpuAutocast():
        assert both("cpu", dtype) == expected
    assert expected["p_unnorm"] == torch.float32
    assert expected["o"] == dtype


def test_the_backward_outside_autocast_raises_in_pytorch_too(cuda_autocast):
    q, k, v, do = (torch.zeros(1, 1, 8, 16, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    t = forward(q, k, v)
    backward(t, q, k, v, do)
    torch.set_autocast_enabled("cuda", False)
    with pytest.raises(RuntimeError, match="expected scalar type .*loat.* but found .*float16"):
        backward(t, q, k, v, do)


@pytest.mark.parametrize("name", ["normal", "tied", "sink"])
def test_released_is_this_program(name):
    q, k, v, do = family(name)
    with GpuAutocast():
        t = forward(q, k, v, tile=32)
    assert t.o.dtype == torch.bfloat16
    equal = (t.o == emulate(q, k, v, RELEASED, tile=32).o).float().mean()
    assert equal > 0.97


def test_what_surrounds_the_program_types_its_values():
    table = value_types().set_index("value")
    assert list(table.columns) == list(REGIMES)
    assert table.loc["output O"].tolist() == ["bf16", "fp32", "bf16", "bf16"]
    assert table.loc["P̄"].tolist() == ["fp32", "fp32", "bf16", "bf16"]


def test_the_backward_says_why_it_raises():
    q, k, v, do = family("normal")
    with GpuAutocast():
        t = forward(q, k, v)
        assert backward_error(t, q, k, v, do) == ""
    assert "dtype" in backward_error(t, q, k, v, do)


def test_under_gives_the_inputs_the_type_of_the_regime():
    q, k, v, _ = family("normal")
    with GpuAutocast():
        expected = forward(q, k, v, 32).o
    assert torch.equal(under("GPU autocast, BF16 inputs", q, k, v, 32).o, expected)
    assert under("GPU autocast, FP32 inputs", q, k, v, 32).o.dtype == torch.float32
