"""The kernels at the edges of their input: blind rows, infinities, NaN, strides, unwritten memory,
and what they refuse."""

import functools

import pytest
import torch
from conftest import family

pytest.importorskip("triton")
from kernel_checks import DEVICES, GRADIENTS, NAMES, run

from lowprec import UserError
from lowprec.attention import kernels
from lowprec.attention.kernels import launch
from lowprec.attention.masks import Mask
from lowprec.attention.reference import emulate
from lowprec.numerics.policy import ALL_FP32, FA2, LOW, PAPER, RELEASED, SITES, PrecisionPolicy

# NumPy, which is behind the interpreter, remarks on every infinity and NaN that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def different(a, b, names=(*NAMES, "ties")):
    """Names of the results that are not bitwise equal."""
    return [name for name in names if not torch.equal(getattr(a, name), getattr(b, name))]


@pytest.mark.parametrize("device", DEVICES)
def test_views_that_are_not_contiguous(device):
    """(B, T, H, D) in memory, also for dO; and a last dimension with a stride. What a call returns
    is also bitwise the same each time."""
    x = family("normal", (1, 2, 40, 32), device=device)
    wanted = run(*x, LOW)
    for i, j in ((1, 2), (2, 3)):
        views = [y.transpose(i, j).contiguous().transpose(i, j) for y in x]
        assert not views[0].is_contiguous()
        assert different(run(*views, LOW), wanted) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", ["row_sum=removed", "row_sum=refined", "l_from=p_both"])
def test_a_call_repeats_bit_by_bit(change, device):
    """Sums over keys, of p, of ds and of the keys themselves, have one order."""
    inputs = family("tied", (1, 2, 300 if device == "cuda" else 100, 64), device=device)
    policy = PrecisionPolicy.parse(f"FA2+{change}")
    first, *others = (run(*inputs, policy) for _ in range(3))
    assert [different(first, other) for other in others] == [[], []]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 512, 1100])
def test_the_parts_of_the_mean_key_add_up_to_it(device, n):
    """Keys of a fused tensor, and a length that fills no part."""
    fused = torch.randn(2, n, 3, 2, 32, generator=torch.Generator().manual_seed(0)) + 3
    k = fused.bfloat16().to(device)[:, :, 1].transpose(1, 2)
    same = launch.common(k, k, Mask(causal=True), None, 1.0, FA2)
    parts = launch._mean_key(k, same)
    assert parts.shape == (2, 2, -(-n // 512), 32)
    torch.testing.assert_close(parts.double().sum(2), k.double().mean(2), rtol=2e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_sum", ["removed", "refined"])
def test_taking_out_the_row_sum_of_the_largest_keys_stays_finite(row_sum, device):
    """A sum of these keys overflows; their mean does not, weighted or not."""
    q, k, v, do = family("normal", (1, 1, 64, 32), device=device)
    k = (k.sign() * 2.0**127).bfloat16()
    q, do = (x * 2.0**-126 for x in (q, do))
    policy = FA2.replace(row_sum=row_sum)
    for dq in (run(q, k, v, do, policy).dq, emulate(q, k.abs(), v, policy, do=do).dq):
        assert dq.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_every_output_element_is_written(device, causal, monkeypatch):
    """Outputs start as NaN (-1 for counts) and end finite."""

    def poisoned(make, *args, **how):
        x = make(*args, **how)
        return x.fill_(float("nan") if x.is_floating_point() else -1)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(launch.torch, name, functools.partial(poisoned, getattr(torch, name)))
    for n, tile in ((1, None), (129, 64)):
        got = run(*family("normal", (1, 2, n, 32), device=device), RELEASED, tile, causal)
        assert all(x.isfinite().all() for x in vars(got).values()) and (got.ties >= 1).all()


BLIND = [0, 5, 37]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "policy,tile",
    [(LOW, None), (ALL_FP32, None), (RELEASED, 16), (PAPER.replace(shift="beta"), 16)],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_nothing(device, policy, tile, causal):
    """Scores of -inf throughout: o = 0, lse = -inf, no gradient. Other rows do not notice: they
    have what they have when the gradient of these rows is zero."""
    q, k, v, do = family("normal", (1, 1, 40, 64), device=device)
    k[..., 0] = 2 + k[..., 0].abs()
    without = do.clone()
    without[:, :, BLIND] = 0
    wanted = run(q, k, v, without, policy, tile, causal)
    q[:, :, BLIND, 0] = -3e38  # the product overflows
    got = run(q, k, v, do, policy, tile, causal)
    assert (got.o[:, :, BLIND] == 0).all() and (got.lse[:, :, BLIND] == float("-inf")).all()
    wanted.o[:, :, BLIND] = 0
    wanted.lse[:, :, BLIND] = float("-inf")
    assert different(got, wanted, ("o", "lse", *GRADIENTS)) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_ties_of_rows_that_see_nothing(device, causal):
    """The keys that a row may see count, not those that are hidden from it."""
    q, k, v, _ = family("normal", (1, 1, 40, 64), device=device)
    k[..., 0] = 2 + k[..., 0].abs()
    q[:, :, BLIND, 0] = -3e38
    for tile in (None, 16):
        got = kernels.forward(q, k, v, LOW, causal, 0.125, tile, ties=True)[-1]
        assert torch.equal(got.long(), emulate(q, k, v, LOW, tile, causal=causal).ties), tile


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("policy,tile", [(LOW, None), (FA2, None), (RELEASED, 32)], ids=str)
def test_nan_and_infinity_stay_visible_in_their_rows(device, value, policy, tile):
    clean = family("normal", (1, 1, 40, 64), device=device)
    wanted = run(*clean, policy, tile)

    def with_bad(i, row, column):
        inputs = [x.clone() for x in clean]
        inputs[i][0, 0, row, column] = float(value)
        return run(*inputs, policy, tile)

    def alike(x, y, *index):
        return torch.equal(x[0, 0][index], y[0, 0][index])

    got = with_bad(2, 3, 5)  # v: also above it, in its column, where a hidden key adds 0 * NaN
    assert not got.o[0, 0, 3:, 5].isfinite().any() and torch.equal(got.lse, wanted.lse)
    others = [i for i in range(64) if i != 5]
    assert alike(got.o, wanted.o, slice(None), others)
    got = with_bad(0, 7, 0)  # q: its own row, and the keys that this row sees
    assert got.o[0, 0, 7].isnan().all() and not got.lse[0, 0, 7].isfinite()
    assert got.dq[0, 0, 7].isnan().all() and got.dv[0, 0, :8].isnan().any()
    others = [i for i in range(40) if i != 7]
    for name in ("o", "lse", "dq"):
        assert alike(getattr(got, name), getattr(wanted, name), others), name
    assert alike(got.dv, wanted.dv, slice(8, None))
    got = with_bad(1, 7, 0)  # k: the rows that see it
    assert got.o[0, 0, 7:].isnan().all(-1).sum() >= (33 if value == "nan" else 10)
    assert alike(got.o, wanted.o, slice(0, 7)) and alike(got.lse, wanted.lse, slice(0, 7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_infinite_key_that_nobody_heeds(device, causal):
    """Its scores are all -inf, so P is 0 there: it gets no gradient and spoils no other. (In its
    column dq has 0 * inf.)"""
    q, k, v, do = family("normal", (1, 1, 40, 64), device=device)
    q[..., 0] = -1 - q[..., 0].abs()
    k[0, 0, 7, 0] = float("inf")
    got = run(q, k, v, do, ALL_FP32, causal=causal)
    for name in ("o", "lse", "delta", "dk", "dv"):
        assert getattr(got, name).isfinite().all(), name
    assert (got.dk[0, 0, 7] == 0).all() and (got.dv[0, 0, 7] == 0).all()
    assert got.dq[..., 1:].isfinite().all()


@pytest.mark.parametrize("site", ["e5m9", "bf16_saturate", "e8m23", "e7m8", "e9m2"])
@pytest.mark.parametrize("field", SITES)
def test_formats_not_honoured_raise_and_name_the_field(field, site):
    with pytest.raises(UserError, match=f"policy field {field}={site}"):
        launch.check_supported(PrecisionPolicy(**{field: site}))


@pytest.mark.parametrize("tile", [-16, 8, 48])
def test_tiles_not_honoured_raise(tile):
    with pytest.raises(UserError, match=f"tile={tile}"):
        launch.check_supported(LOW, tile)


def test_tensors_not_taken_raise(monkeypatch):
    """By the entry itself, before any work."""
    x = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    far = torch.empty_strided((1, 1, 8, 64), (0, 0, 2**28, 1), device="meta", dtype=x.dtype)
    many = torch.empty_strided((1, 2**18, 128, 64), (0, 8192, 64, 1), device="meta", dtype=x.dtype)
    for q, k, scale, words in (
        (x[..., :48], x[..., :48], 0.1, "head_dim=48"),
        (x.double(), x.double(), 0.1, "torch.float64"),
        (x, x[:0], 0.1, "batches of 1 queries and 0 keys"),
        (x.expand(-1, 3, -1, -1), x.expand(-1, 2, -1, -1), 0.1, "2 heads of keys .* 3 of queries"),
        (far, far, 0.1, "seqlen=8"),
        (many, many, 0.1, "seqlen=128 .* fewer heads"),
        (x, x, 0.0, "positive scale"),
        (x, x, -1.0, "positive scale"),
        (x, x, float("nan"), "positive scale"),
    ):
        with pytest.raises(UserError, match=words):
            kernels.forward(q, k, k, LOW, False, scale)
    monkeypatch.setattr(launch, "NATIVE", True)
    with pytest.raises(UserError, match="TRITON_INTERPRET=1"):
        kernels.forward(x, x, x, LOW, True, 0.1)
