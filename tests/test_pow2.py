"""shift=pow2: maxima that are powers of two, so that blocks leave no trace in P and O."""

import math

import pytest
import torch
from conftest import family
from kernel_checks import run
from test_kernels import DEVICES

from lowprec import UserError
from lowprec.attention.kernels import launch
from lowprec.attention.masks import Scores
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.policy import FA2, LOW

POW2 = FA2.replace(shift="pow2")


def unscaled(t):
    """p (..., queries, keys) of a trace relative to the last maximum, float64, 0 below 2^-126."""
    blocks = t.alpha.shape[-1]
    after = torch.cat([t.alpha[..., 1:], torch.ones_like(t.alpha[..., :1])], -1).double()
    after = after.flip(-1).cumprod(-1).flip(-1).repeat_interleave(t.p.shape[-1] // blocks, -1)
    p = t.p.double() * after
    return torch.where(p < 2.0**-126, 0.0, p)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("name", ["normal", "lowrank"])
def test_p_does_not_depend_on_the_blocks(name, size):
    q, k, v, _ = family(name, (1, 2, 128, 64))
    q = (size * q.float()).round().to(q.dtype)  # scores that FP32 holds, in any order
    whole, tiled = (emulate(q, k.float().round().to(k.dtype), v, POW2, tile) for tile in (None, 16))
    assert whole.alpha.shape[-1] == 1 and tiled.alpha.shape[-1] == 8
    assert torch.equal(unscaled(whole), unscaled(tiled))
    shares = tiled.alpha[tiled.alpha > 0]
    assert (torch.frexp(shares).mantissa == 0.5).all() and (shares < 1).any()
    plain = [emulate(q, k.float().round().to(k.dtype), v, FA2, tile) for tile in (None, 16)]
    assert not torch.equal(*map(unscaled, plain))


def test_the_largest_weight_lies_between_a_half_and_one():
    q, k, v, _ = family("normal", (1, 2, 128, 64))
    largest = emulate(q, k, v, POW2).p_unnorm.amax(-1)
    assert (largest > 0.5).all() and (largest <= 1).all() and (largest < 1).float().mean() > 0.9


def attention(q, k, v, policy, tile):
    """(o, shadow o) of the kernel."""
    found = launch.forward(q, k, v, policy, True, 0.125, tile, shadow=True)
    return found[0], found[2]


@pytest.mark.parametrize("device", DEVICES)
def test_one_pass_is_two_passes_bit_by_bit(device, monkeypatch):
    inputs = family("normal", (1, 2, 256, 64), device=device)[:3]
    blocks = launch.blocks

    def of_64_keys(kernel, d, lengths, tile, dtype, kind):
        sizes, options = blocks("forward", d, lengths, 64, dtype)
        return sizes | dict(tile=tile), options

    monkeypatch.setattr(launch, "blocks", of_64_keys)
    for policy, alike in ((POW2, True), (FA2, False)):
        one = attention(*inputs, policy, 64)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "one_pass", lambda policy: False)
            two = attention(*inputs, policy, None)
        assert [torch.equal(x, y) for x, y in zip(one, two, strict=True)] == [alike, alike]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_keys_and_scores_without_bounds(device):
    """Hidden rows are 0; a key with a score of -inf counts nothing; NaN, +inf and maxima beyond
    2^21 powers of two make their row NaN, and no other."""
    q, k, v, _ = family("normal", (1, 1, 32, 64), device=device)
    k[..., 3, :], q[..., 0] = 0.0, 1.0
    for key, wanted in ((-math.inf, "finite"), (math.nan, "nan"), (math.inf, "nan"), (2e7, "nan"),
                        (-2e7, "finite")):  # fmt: skip
        k[..., 3, 0] = key
        for t in (emulate(q, k, v, POW2), run(q, k, v, v, POW2)):
            assert t.o[..., :3, :].isfinite().all()
            seen = t.o[..., 3:, :]
            assert seen.isfinite().all() if wanted == "finite" else seen.isnan().all(), key
    hidden = emulate(q[:, :, :4], k[:, :, :2], v[:, :, :2], POW2, causal=False)
    assert hidden.o.isfinite().all()


def test_sinks_and_exact_attention():
    q, k, v, do = family("normal", (1, 2, 64, 16), dtype=torch.float32)
    how = dict(do=do, scores=Scores(sinks=torch.tensor([0.3, 7.0])))
    policy = "ALL_FP32+shift=pow2"
    got, wanted = emulate(q, k, v, policy, 16, **how), oracle(q, k, v, **how)
    for name in ("o", "lse", "dq", "dk", "dv", "dsinks"):
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(wanted, name), rtol=1e-5, atol=1e-5
        )


def test_there_is_no_difference_to_round():
    with pytest.raises(UserError, match="field x: bf16 has nothing to round with shift=pow2"):
        LOW.replace(shift="pow2", x="bf16")
