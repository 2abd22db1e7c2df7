"""What cutting operands does to products, and what tensor cores cut from sums."""

import pytest
import torch

from lowprec.numerics.formats import BF16
from lowprec.studies import cutting
from lowprec.studies.small import Text


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_cutting_shrinks():
    x = draw(100_000) * torch.exp2(10 * draw(100_000, seed=1))
    mean, count = cutting.relative_change(x, BF16, "toward_zero")
    assert count == 100_000 and mean == pytest.approx(-(2**-8) * 0.7213, rel=0.02)
    assert abs(cutting.relative_change(x, BF16, "nearest_even")[0]) < 2e-5


def test_cut_operands_are_a_common_factor():
    a, b = draw(1, 64, 64), draw(1, 64, 64, seed=1)
    factor, rest = cutting.common_factor(a, b, "toward_zero")
    assert factor == pytest.approx((1 - 2**-8 * 0.7213) ** 2, abs=3e-4)
    fair, rounded = cutting.common_factor(a, b, "nearest_even")
    assert fair == pytest.approx(1, abs=3e-4) and 0.5 < rest / rounded < 2 and rounded < 4e-3
    assert cutting.common_factor(a, b, "toward_zero", "fp32") == (1, 0)


def test_every_product_of_a_step_is_seen():
    task = Text(steps=12, warmup=2, batch=2, seeds=1, classes=64, width=16, length=16, held=4)
    pairs, gradients = cutting.products(task)
    outputs = sorted((a @ b).shape for a, b in pairs)
    assert len(pairs) > 8 and outputs == sorted(g.shape for g in gradients)
    assert any(shape[-1] == 64 for shape in outputs) and not any(a.requires_grad for a, _ in pairs)


def test_sums_lose_more_with_fewer_bits_and_shorter_blocks():
    fine, coarse = (cutting.lost_in_sums(*how, terms=256, sums=100) for how in ((16, 2), (4, 0)))
    assert 0 < fine < coarse < 0.01  # the sums are negative: cut toward zero they are too large
    assert abs(cutting.lost_in_sums(256, 29, terms=256, sums=100)) < fine
