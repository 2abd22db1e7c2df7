"""Four bits after training: levels, rounding to them, posits, and distances of distributions."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import ndtri

from lowprec.numerics.scaling import scaled
from lowprec.studies import after, dated


@pytest.fixture
def weights():
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(3))


def test_nf4_has_the_quantiles_that_its_definition_names():
    above, below = (ndtri(np.linspace(0.9677083, 0.5, n)[:-1]) for n in (9, 8))
    both = [*above, 0.0, *-below]
    levels = torch.tensor(sorted(both) / max(both)).float()
    torch.testing.assert_close(after.LEVELS["nf4"], levels, atol=2e-7, rtol=0)


def test_fp4_is_e2m1_but_for_its_smallest_level():
    fp4, e2m1 = after.LEVELS["fp4"], after.LEVELS["e2m1"]
    assert (fp4 != e2m1).nonzero().flatten().tolist() == [6, 8]
    assert fp4[8] == torch.tensor(1 / 192) and e2m1[8] == torch.tensor(1 / 12)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_levels_and_rounding_are_those_of_bitsandbytes(name, weights):
    functional = pytest.importorskip("bitsandbytes").functional
    table = functional.get_4bit_type(name, device="cpu")
    assert torch.equal(table.unique(), after.LEVELS[name].unique())
    theirs = functional.dequantize_4bit(
        *functional.quantize_4bit(weights, blocksize=after.BLOCK, quant_type=name)
    )
    ours = after.stored(weights, name)
    assert (ours != theirs).float().mean() < 1e-3, "their quotient is a product with 1 / scale"


def test_each_number_becomes_the_nearest_level(weights):
    for name in after.FOUR:
        levels = after.LEVELS[name]
        x = weights.clamp(-1, 1)
        far = (x[..., None] - levels).abs().amin(-1)
        assert torch.equal((x - after.nearest(x, levels)).abs(), far)


def test_blocks_share_the_scale_of_their_largest(weights):
    low = after.stored(weights, "nf4")
    places = weights.abs().view(-1, 64).argmax(1, keepdim=True)
    large = weights.view(-1, 64).gather(1, places)
    kept = low.view(-1, 64).gather(1, places)
    torch.testing.assert_close(kept, large)
    ours, theirs = after.stored(weights, "e2m1"), scaled(weights, "e2m1@block64")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    with_zeros = torch.cat([torch.zeros(1, 64), weights[:1, :70].reshape(1, -1)[:, :64]])
    assert (after.stored(with_zeros, "int4")[0] == 0).all()
    assert after.stored(weights[:3, :50], "fp4").shape == (3, 50)


def test_rounding_at_random_is_right_on_average_and_takes_a_neighbour():
    levels, x = after.LEVELS["nf4"], torch.full((200_000,), 0.3)
    found = after.nearest(x, levels, torch.Generator().manual_seed(0))
    assert set(found.tolist()) == set(levels[(levels > 0.24) & (levels < 0.34)].tolist())
    assert found.mean() == pytest.approx(0.3, abs=5e-4)
    same = after.nearest(levels, levels, torch.Generator().manual_seed(0))
    assert torch.equal(same, levels)


def by_fields(code, bits, es):
    """A positive posit from its bits, read one by one."""
    field = [code >> i & 1 for i in reversed(range(bits - 1))]
    run = len(list(itertools.takewhile(lambda b: b == field[0], field)))
    scale = (run - 1 if field[0] else -run) << es
    rest = iter(field[run + 1 :])
    for i in reversed(range(es)):
        scale += next(rest, 0) << i
    return math.ldexp(1 + sum(b * 2.0 ** -(i + 1) for i, b in enumerate(rest)), scale)


@pytest.mark.parametrize(("bits", "es"), [(8, 0), (8, 1), (8, 2), (6, 1), (12, 2)])
def test_posits_are_those_of_all_codes(bits, es):
    table = after.posits(bits, es)
    assert table.tolist() == [by_fields(c, bits, es) for c in range(1, 2 ** (bits - 1))]
    assert (table.diff() > 0).all() and table[2 ** (bits - 2) - 1] == 1
    assert table[-1] == 1 / table[0] == 2.0 ** ((bits - 2) * 2**es)


def test_posits_of_16_bits_have_the_ends_and_steps_of_the_standard():
    table = after.posits(16, 2)
    assert table[-1] == 2.0**56 and table[2**14] == 1 + 2.0**-11
    assert after.posits(16, 1)[0] == 2.0**-28


@pytest.mark.parametrize(("bits", "es"), [(8, 1), (8, 2), (16, 1)])
def test_rounding_to_a_posit_keeps_posits_and_goes_up_from_nothing(bits, es):
    table = after.posits(bits, es)
    assert torch.equal(after.to_posit(-table, bits, es), -table)
    tiny = torch.tensor([table[0] * 2.0**-30, table[-1] * 2.0**30, 0.0], dtype=torch.float64)
    assert after.to_posit(tiny, bits, es).tolist() == [table[0], table[-1], 0]
    between = after.posits(bits + 1, es)[2:-1:2]
    codes = after.to_posit(between, bits, es)
    places = torch.searchsorted(table, codes)
    assert (places % 2 == 1).all(), "ties go to the even code, at an odd place"
    step = between * 2.0**-40
    for way, off in ((-step, 0), (step, 1)):
        assert torch.equal(
            after.to_posit(between + way, bits, es), table[off : len(table) - 1 + off]
        )


def test_the_sum_of_magnitudes_shows_a_side():
    x = torch.full((20_000,), 2.0**-20)
    assert after.kept(x, "posit8,1") == 2.0**8
    assert after.kept(x, "e4m3_saturate") == 0 and after.kept(x, "bf16") == 1
    fair = after.kept(x, "posit8,1 random", torch.Generator().manual_seed(0))
    assert fair == pytest.approx(1, abs=0.3)


def test_distances_of_distributions_by_hand():
    full, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    kl, differs = after.apart(full, other, 1)
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-5)
    assert differs == pytest.approx(0.25, rel=1e-5)
    assert after.apart(full, other, 1e6)[1] < 1e-5 and after.apart(full, full, 0.3) == (0, 0)


def test_blocks_are_grouped_by_kurtosis(weights):
    table = after.blocks({"a": weights.repeat(2, 1) ** 3}, "a")
    assert table.peaked.is_monotonic_increasing and len(table) == 10
    spread = torch.tensor([[1.0] * 64, [8.0] + [0.0] * 63])
    assert after.kurtosis(spread).tolist() == [1, 64]


@pytest.mark.slow
def test_the_recorded_distances_of_small_models_come_out_again(monkeypatch):
    monkeypatch.setattr(after, "ARMS", ("fp4",))
    rows, groups = after._of_small()
    found = dated.recorded("after")
    now = after.by_arm(pd.DataFrame(rows), "small", 1.0).fp4
    then = after.by_arm(found["distances"], "small", 1.0).fp4
    np.testing.assert_allclose(now, then, rtol=0.02)
    held = found["blocks"].query("model == 'small'")
    np.testing.assert_allclose(groups.nf4, held.nf4, atol=0.02)
