"""Layer norm by where it rounds, and clustered gains in blocks of a power-of-two scale."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from lowprec.numerics.formats import BF16, round_to
from lowprec.studies import norms

SMALL = dataclasses.replace(norms.TASKS["gains"], steps=8, seeds=2, width=32, hidden=8, batch=16)


def draws(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_a_norm_and_its_gradient_are_torchs():
    x, g = norms.drawn(48, rows=5, mean=2.0)
    leaf = x.double().requires_grad_()
    wanted = F.layer_norm(leaf, (48,), eps=norms.EPS)
    wanted.backward(g.double())
    y, dx = norms.norm(x.double(), g.double())
    assert torch.allclose(y, wanted.detach()) and torch.allclose(dx, leaf.grad)


def test_sums_in_bf16_one_by_one_and_by_halves():
    ones = torch.ones(2, 700)
    assert norms.total(ones, "serial").tolist() == [[256], [256]]
    assert norms.total(ones, "pairwise").tolist() == [[700], [700]]
    assert norms.total(ones, "").tolist() == [[700], [700]]
    x = draws((3, 7))
    serial = torch.zeros(3)
    for i in range(7):
        serial = round_to(serial + x[:, i], BF16)
    assert torch.equal(norms.total(x, "serial")[:, 0], serial)


@pytest.mark.parametrize("way", norms.WAYS)
def test_every_way_is_near_and_off(way):
    x, g = norms.drawn(128, rows=16)
    found = norms.errors(x, g, (way,)).loc[way]
    assert 1e-5 < found.error < 0.02 and 1e-5 < found.error_back < 0.02
    y, dx = norms.norm(x, g, way)
    stored = torch.equal(round_to(y, BF16), y) and torch.equal(round_to(dx, BF16), dx)
    assert stored == (way == "edges")


def test_size_is_what_is_too_large():
    x, g = norms.drawn(32, rows=8)
    exact = norms.norm(x.double(), g.double())
    plain = norms.errors(x, g, ("",)).loc[""]
    assert plain.abs().max() < 1e-5
    larger = torch.ones(8, 32) * 1.5
    assert float((larger * exact[0] * exact[0]).sum() / exact[0].square().sum() - 1) == 0.5


def test_the_law_is_the_mean_of_a_rounded_addition():
    assert abs(norms.law(64)) < 0.01 < norms.law(512) < norms.law(4096)
    squares = draws(400_000).square()
    for s in (300.0, 700.0):
        added = round_to(s + squares, BF16).double().mean().item() - s
        unit = 2.0 ** (math.frexp(s)[1] - 8)
        tail = (torch.arange(20) + 0.5) * unit
        wanted = unit * torch.erfc((tail.double() / 2).sqrt()).sum().item()
        assert added == pytest.approx(wanted, rel=0.02)


def test_a_norm_in_bf16_is_told_from_one_that_is_rounded_once():
    x, _ = norms.drawn(384, rows=8)
    count, most = norms.of_torch(x)
    assert 0 <= count <= x.numel() and most >= (count > 0)
    serial = norms.norm(norms.bf16(x), x, "serial")[0].bfloat16()
    once = F.layer_norm(norms.bf16(x), (384,)).bfloat16()
    assert (serial != once).double().mean() > 0.1


def test_gains_below_one_are_clamped_and_above_are_not():
    below, above = torch.full((1, 64), 0.95), torch.full((1, 64), 1.0625)
    error, clamped = norms.stored(below, "floor")
    assert clamped == 1 and error == pytest.approx(0.875 / 0.95 - 1, rel=1e-5)
    assert norms.stored(below, "floor-random")[0] == error
    error, clamped = norms.stored(below, "ceil")
    assert clamped == 0 and abs(error) < 0.07
    assert norms.stored(above, "floor") == norms.stored(above, "ceil")
    assert norms.stored(below, "exact") == (pytest.approx(0, abs=1e-6), 0)


def test_a_cluster_lies_around_its_centre():
    gains = norms.cluster(0.9, 4096, torch.Generator().manual_seed(0))
    assert gains.shape == (1, 4096) and (gains / 0.9 - 1).abs().max() <= norms.HALF
    assert float(gains.mean()) == pytest.approx(0.9, rel=2e-3)


def test_a_student_that_is_its_teacher_has_no_loss():
    x = draws((2, 16, 32))
    each = [SMALL.init(torch.Generator().manual_seed(i), 0.95) for i in range(2)]
    w = {n: torch.stack([one[n] for one in each]) for n in each[0]}
    same = SMALL.outputs(w, x) - SMALL.outputs(w, x, lambda gain: gain)
    assert (same == 0).all() and SMALL.outputs(w, x).sub(x).abs().mean() > 0.1
    other = SMALL.outputs(w, x, lambda gain: 0.875 + 0 * gain)
    assert (other - SMALL.outputs(w, x)).abs().mean() > 0.01


def test_students_learn_in_every_arm_and_records_read_by_centre(tmp_path, monkeypatch):
    monkeypatch.setitem(norms.TASKS, "gains", SMALL)
    norms.record(tmp_path)
    held = norms.read(tmp_path)
    assert set(held) == set(norms.CENTRES)
    for record in held.values():
        assert set(record.loss.columns) == set(norms.ARMS) and record.loss.notna().all(axis=None)
        assert record.loss.index.tolist() == [1300, 1301]
    near, far = (held[centre].ending("floor", "clamped") for centre in norms.CENTRES)
    assert (near > far).all() and (far == 0).all()
    assert (held[1.4].loss["floor"] == held[1.4].loss["ceil"]).all()
