"""A router's parts one at a time in BF16: counting, slots, dispatch, and a mixture that trains."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from test_moments import InThisProcess

from lowprec import UserError
from lowprec.numerics.formats import BF16, round_to
from lowprec.studies import router

SMALL = dataclasses.replace(
    router.TASKS["mixture"], steps=4, seeds=2, batch=24, classes=32, width=8, hidden=8, experts=2
)


def draw(tokens=900, experts=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(experts, (2, tokens), generator=generator)


def test_a_count_in_bf16_is_what_additions_in_bf16_make_it():
    expert = torch.zeros(1, 600, dtype=torch.long)
    before = torch.cat([torch.zeros(1), router.running(600)[:-1]])
    assert torch.equal(router.slots(expert, 1, "count")[0], before.long())
    assert router.running(600).max() == router.STOP
    exact = router.running(600, lambda x: x)
    assert torch.equal(router.slots(expert, 1)[0], (exact - 1).long())


def test_each_expert_counts_for_itself():
    expert = draw()
    slot = router.slots(expert, 3)
    for row in range(2):
        for e in range(3):
            mine = slot[row][expert[row] == e]
            assert torch.equal(mine, torch.arange(len(mine)))
    assert not router.sharing(expert, slot, 3).any()


def test_a_stored_count_is_rounded_once_and_tokens_then_share():
    expert = torch.zeros(1, 512, dtype=torch.long)
    slot = router.slots(expert, 1, "stored")
    assert slot[0, 254:262].tolist() == [254, 255, 256, 256, 258, 260, 260, 260]
    shared = router.sharing(expert, slot, 1)[0]
    assert not shared[:256].any() and shared[256:].double().mean() == pytest.approx(0.75, abs=0.01)


def test_a_count_at_random_is_right_on_average_and_not_each_time():
    expert = torch.zeros(64, 400, dtype=torch.long)
    slot = router.slots(expert, 1, "random", torch.Generator().manual_seed(0))
    assert torch.equal(slot[:, :257], torch.arange(257).expand(64, -1))
    last = slot[:, -1].double()
    assert abs(last.mean() - 399) < 4 * last.std() / 8 and last.std() > 1
    assert (slot.diff() >= 0).all() and torch.equal(round_to(slot.float(), BF16), slot.float())
    assert router.sharing(expert, slot, 1)[:, 256:].double().mean() == pytest.approx(0.75, abs=0.03)


def test_tokens_of_one_slot_get_what_the_expert_makes_of_their_sum():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 5, generator=generator)
    up, down = torch.randn(1, 2, 5, 7, generator=generator), torch.randn(1, 2, 7, 5)
    expert, slot = torch.tensor([[0, 0, 1, 0]]), torch.tensor([[0, 1, 0, 1]])
    gate = torch.tensor([[0.5, 0.25, 2.0, 1.0]])
    routing = router.Routing(expert, slot, gate, None, None, None)
    out = router.mixture(x, routing, up, down, capacity=2)[0]

    def by(e, token):
        return F.relu(token @ up[0, e]) @ down[0, e]

    both = by(0, x[0, 1] + x[0, 3])
    wanted = [0.5 * by(0, x[0, 0]), 0.25 * both, 2 * by(1, x[0, 2]), both]
    assert torch.allclose(out, torch.stack(wanted), atol=1e-5)
    out = router.mixture(x, routing, up, down, capacity=1)[0]
    assert (out[[1, 3]] == 0).all() and torch.allclose(out[0], wanted[0], atol=1e-5)
    out = router.mixture(x, routing, up, down, capacity=2, add=False)[0]
    wanted[1], wanted[3] = 0.25 * by(0, x[0, 3]), by(0, x[0, 3])
    assert torch.allclose(out, torch.stack(wanted), atol=1e-5)


def test_a_site_in_bf16_changes_its_part_alone():
    x, w = router.drawn(1.0, 8, tokens=2048)
    right = router.route(x, w)
    assert torch.allclose(right.probabilities, (x @ w).softmax(-1))
    assert float(right.logits.std()) == pytest.approx(1, abs=0.05)
    logits, gate = router.route(x, w, ("logits",)), router.route(x, w, ("gate",))
    assert torch.equal(round_to(logits.logits, BF16), logits.logits)
    assert (logits.expert != right.expert).any()
    assert torch.equal(gate.expert, right.expert) and torch.equal(gate.logits, right.logits)
    assert torch.equal(gate.gate, round_to(right.gate, BF16))
    soft = router.route(x, w, ("softmax",))
    assert torch.equal(round_to(soft.probabilities, BF16), soft.probabilities)
    count = router.route(x, w, ("count",))
    assert torch.equal(count.gate, right.gate) and count.slot.max() == 256 < right.slot.max()


def test_means_that_stop_at_256():
    w = torch.eye(2)[None]
    x = torch.cat([torch.eye(2)[:1].expand(700, 2), torch.eye(2)[1:].expand(300, 2)])[None]
    high = math.e / (1 + math.e)
    mean = 0.7 * high + 0.3 * (1 - high)

    def balance(*sites):
        return router.route(10 * x - 9 * x, w, sites).balance.item()

    assert balance() == pytest.approx(2 * (0.7 * mean + 0.3 * (1 - mean)), rel=1e-5)
    assert balance("mask") == pytest.approx(2 * 0.256, rel=1e-5)
    assert balance("number") == pytest.approx(balance() * (1000 / 256) ** 2, rel=1e-5)


def test_what_moves_tokens_is_counted():
    found = router.moved(*router.drawn(0.3, 8, tokens=1024))
    assert 0 < found["logits"] < 0.2 and 0 < found["jitter"] < 0.2 and 0 < found["ties"] < 0.2
    assert abs(found["gate"]) < found["gate_size"] < 0.01
    assert router.crowded("", tokens=4096) == 0 and router.crowded("count", tokens=4096) == 1


def test_every_arm_trains_from_one_start():
    ends = {arm: router.train(SMALL, arm, (1, 2)) for arm in router.ARMS}
    assert all(end.loss.map(math.isfinite).all() for end in ends.values())
    assert ends["count"].shared.min() > 0.3 and (ends["fp32"].shared == 0).all()
    assert len({end.loss[0] for end in ends.values()}) >= len(ends) - 3
    again = router.train(SMALL, "fp32", (2,))
    assert again.loss[0] == pytest.approx(ends["fp32"].loss[1], rel=1e-4)
    assert router.train(SMALL, "fp32", (2,), stop=1).loss[0] != again.loss[0]


def test_a_record_reads_as_it_was_made(tmp_path, monkeypatch):
    monkeypatch.setitem(router.TASKS, "mixture", SMALL)
    monkeypatch.setattr(router, "ProcessPoolExecutor", InThisProcess)
    router.record(tmp_path, "mixture", ("fp32", "count"))
    held = router.read(tmp_path)
    assert held.loss.columns.tolist() == ["count", "fp32"]
    assert held.loss.index.tolist() == [1200, 1201]
    made = router.train(SMALL, "count", [1201]).loss[0]
    assert held.loss["count"][1201] == pytest.approx(made, rel=1e-4)
    assert json.loads((tmp_path / "mixture.json").read_text())["config"]["experts"] == 2
    with pytest.raises(UserError, match="never overwritten"):
        router.record(tmp_path, "mixture", ("fp32",))
    with pytest.raises(UserError, match="there is no record gains"):
        router.read(tmp_path, "gains")
