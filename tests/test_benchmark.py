"""What of the benchmark runs without a GPU."""

import pytest

from lowprec import UserError
from lowprec.benchmark import Case, floors, need_gpu, training_step

SMALL = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2)


@pytest.mark.parametrize("policy, impl", [("FA2+delta_from=o_split", "emulate"), ("FA2", "sdpa")])
def test_a_training_step_is_timed(policy, impl):
    row = training_step(policy, impl, steps=2, device="cpu", **SMALL)
    assert (row["policy"], row["impl"]) == (policy, impl) and row["tokens_per_second"] > 0


def test_a_floor_is_linear_in_its_ceiling():
    case = vars(Case())
    slow, fast = (floors(case, dict(tflops=400.0 * k, tbps=2.0)) for k in (1, 2))
    assert slow["forward_operations"] == pytest.approx(2 * fast["forward_operations"])
    assert slow["backward_bytes"] == fast["backward_bytes"] == 2 * slow["forward_bytes"]
    # 2 products of 2 T^2 D operations over half of the square, for 32 x 12 heads
    assert fast["forward_operations"] == pytest.approx(32 * 12 * 2 * 1024**2 * 64 / 800e9)


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        need_gpu()
