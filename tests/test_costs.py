"""What a record of the benchmark says of costs."""

import math

import pytest

from lowprec import UserError
from lowprec.studies import benchmark, costs
from lowprec.studies.costs import Costs, blocks, chosen, having, largest

CEILINGS = dict(tflops=400.0, tbps=2.0)


def case(ms=1.0, tile=None, **changes):
    """A case as a record has it; its replays take a tenth less to a tenth more than `ms`."""
    row = costs.BASE | dict(batch=32, heads=12, peak_mib=100.0) | changes | {"tile": tile}
    for half, factor in (("forward", 1), ("backward", 3)):
        times = (("ms", 1.0), ("least", 0.9), ("most", 1.1))
        row |= {f"{half}_{name}": factor * ms * scale for name, scale in times}
    return row


def record(*more, **parts):
    """A record of two lengths, at which flash takes twice and cuDNN half as long as FA2."""
    cases = [
        case(ms * (1 + (t > 512)), tile, seqlen=t, impl=impl)
        for t in (1024, 512)
        for ms, impl, tile in ((1, "triton", None), (0.5, "triton", 64), (2, "flash", None),
                               (0.5, "cudnn", None))
    ]  # fmt: skip
    return dict(cases=[*cases, *more], ceilings=CEILINGS, **parts)


def test_a_ratio_is_of_medians_and_its_interval_of_all_replays():
    found = Costs(record()).ratio({"tile": 64}, {"impl": "flash"})
    assert (found.value, found.n) == (0.25, 1)
    assert found.interval == pytest.approx((0.25 * 0.9 / 1.1, 0.25 * 1.1 / 0.9))


def test_a_ratio_of_one_half_is_of_that_half_alone():
    dear = case(5, policy="LOW") | {"forward_ms": 2.0}
    found = Costs(record(dear))
    assert found.ratio({"policy": "LOW"}, halves=["forward"]).value == 1
    assert found.ratio({"policy": "LOW"}).value == (2 + 15) / 8


def test_a_case_that_is_not_there_is_named():
    with pytest.raises(UserError, match="0 cases of .*'policy': 'PAPER'"):
        Costs(record()).case(policy="PAPER")
    with pytest.raises(UserError, match="2 cases of .*'policy': 'LOW'"):
        Costs(record(case(policy="LOW"), case(policy="LOW"))).case(policy="LOW")


def test_the_largest_ratio_keeps_each_unit_and_the_largest_ends():
    wide, high = costs.Measured(1.0, 1, (0.1, 3.0)), costs.Measured(2.0, 1, (1.5, 2.5))
    found = largest({"wide": wide, "high": high})
    assert (found.value, found.n, found.interval) == (2.0, 2, (1.5, 3.0))
    assert found.by == {"wide": 1.0, "high": 2.0}


def test_beside_pytorch_the_worst_kernel_and_half_of_each_length_counts():
    slow = case(1, seqlen=512) | {"backward_ms": 30.0}
    found = record()
    found["cases"] = [slow if c["seqlen"] == 512 and c == case(1, seqlen=512) else c
                      for c in found["cases"]]  # fmt: skip
    halves = (("forward",), ("backward",))
    assert Costs(found).beside(["flash"], halves).by == {512: 5.0, 1024: 0.5}
    assert Costs(found).beside(["flash", "cudnn"]).by == {512: 15.5, 1024: 2.0}


def test_the_floor_is_the_larger_of_products_and_bytes():
    times = Costs(record()).times()
    assert list(times.half) == ["forward"] * 2 + ["backward"] * 2
    assert list(times["T"]) == [512, 1024] * 2
    assert (times.floor == times[["operations", "bytes"]].max(axis=1)).all()
    assert times.bytes[0] > times.operations[0] and times.operations[1] > times.bytes[1]
    ratio = Costs(record()).over_floor()
    assert ratio.FA2[512] == pytest.approx(4 / (times.floor[0] + times.floor[2]))
    assert (ratio.flash == 2 * ratio.FA2).all()


def test_products_done_are_three_for_two_and_seven_for_five():
    busy = Costs(record()).busy([1024])
    assert list(busy[""]) == ["forward", "backward"]
    done = busy["products done"] / busy["products needed"]
    assert list(done) == pytest.approx([1.5, 1.4])
    assert list(busy.share) == pytest.approx(list(busy["products done"] / busy.FA2))


def test_one_score_matrix_is_quadratic():
    memory = Costs(record(*())).memory()
    assert list(memory["one score matrix"]) == [32 * 12 * t * t * 2 / 2**20 for t in (512, 1024)]


STEPS = [
    dict(policy="FA2", impl="triton", tokens_per_second=100.0, peak_mib=10.0),
    dict(policy="FA2", impl="sdpa", tokens_per_second=50.0, peak_mib=10.0),
    dict(policy="FA2+row_sum=refined", impl="triton", tokens_per_second=98.0, peak_mib=11.0),
]


def test_a_repair_is_shown_once_a_record_has_it():
    plain = Costs(record())
    assert plain.repairs().empty and plain.untimed() == list(costs.REPAIRS.values())
    found = Costs(record(case(2.4, policy="FA2+row_sum=removed"), training=STEPS))
    removed, refined = found.repairs().itertuples(index=False)
    assert removed[:2] == ("mean key taken out of dQ", 1.2) and math.isnan(removed[2])
    assert refined[0] == "refined δ" and math.isnan(refined.time)
    assert refined[2:] == (0.98, 1.1)
    assert len(found.untimed()) == 3 and removed.repair not in found.untimed()


def test_a_record_without_training_has_no_steps():
    assert Costs(record()).steps().empty
    speed = Costs(record(training=STEPS)).steps().speed
    assert speed[("FA2", "sdpa")] == 0.5


def test_every_repair_is_one_that_the_benchmark_times():
    timed = {c.policy for c in benchmark.cases()}
    trained = {policy for policy, _ in benchmark.TRAINED}
    assert set(costs.REPAIRS) <= timed & trained


def test_policies_are_of_one_shape_and_begin_with_the_slowest():
    found = Costs(record(case(9, policy="LOW"), case(9, policy="PAPER", head_dim=128))).policies()
    assert list(found.policy) == ["LOW", "FA2", "FA2"] and list(found.tile) == [0, 0, 64]
    assert found.relative[0] == 4.5


def test_a_sweep_gives_the_fastest_block_and_leaves_out_what_does_not_fit():
    row = dict(kernel="dq_tiled", policy="FA2", head_dim=64, half="backward", warps=4, stages=2)
    tried = [row | dict(BM=bm, BN=64, registers=r, ms=ms)
             for bm, r, ms in ((32, None, 3.0), (64, None, 2.0), (128, 128, None))]  # fmt: skip
    (best,) = blocks(tried).to_dict("records")
    assert best["kernel"] == "dq tiled" and best["queries × keys"] == "64 × 64"
    assert (best["tried"], best["slowest / fastest"]) == (3, 1.5)
    assert best["register limit"] == "none"


def test_the_newest_record_is_the_last_by_name(monkeypatch):
    old, new = dict(record(), sweep=[1]), dict(record(), sweep=[])
    records = {"2026-01-01-gpu": old, "2026-01-02-gpu": new}
    monkeypatch.setattr(benchmark, "recorded", lambda: records)
    assert chosen("newest") is new and chosen("2026-01-01-gpu") is old
    with pytest.raises(UserError, match="no record '2025'.* one of 2026-01-01-gpu, 2026-01-02"):
        chosen("2025")
    swept = having(new, lambda r: bool(r["sweep"]))
    assert swept == ("the record 2026-01-01-gpu", old)
    assert having(old, lambda r: bool(r["sweep"]))[0] == "this record"
    assert having(new, lambda r: "released" in r) == ("none", None)
    monkeypatch.setattr(benchmark, "recorded", dict)
    with pytest.raises(UserError, match="one of none; make gpu-check writes one"):
        chosen("newest")


def test_models_are_held_against_themselves_with_pytorchs_attention():
    rows = [
        dict(model=model, padded=padded, attention=attention, tokens_per_second=rate, peak_mib=mib)
        for model, padded, ours in (("A", False, 90), ("A", True, 120), ("B", False, 100))
        for attention, rate, mib in (("sdpa", 100, 50), ("lowprec", ours, 60))
    ]
    found = costs.beside_stock(rows, tokens_per_second="speed", peak_mib="memory")
    assert found.speed.to_dict() == {("A", False): 0.9, ("A", True): 1.2, ("B", False): 1.0}
    assert set(found.memory) == {1.2}
    made = [{k: v for k, v in row.items() if k != "padded"} for row in rows if not row["padded"]]
    assert costs.beside_stock(made, peak_mib="x").x.to_dict() == {"A": 1.2, "B": 1.2}
