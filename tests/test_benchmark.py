"""What of the benchmark runs without a GPU."""

import datetime
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch._subclasses import FakeTensorMode

from lowprec import UserError, entry, plots
from lowprec.studies import benchmark, mixed_runs, peers
from lowprec.studies.benchmark import Case, Inputs, floors, need_gpu, training_step

SMALL = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2)


@pytest.mark.parametrize("policy, impl", [("FA2+delta_from=o_split", "emulate"), ("FA2", "sdpa")])
def test_a_training_step_is_timed(policy, impl):
    row = training_step(policy, impl, steps=2, device="cpu", **SMALL)
    assert (row["policy"], row["impl"]) == (policy, impl) and row["tokens_per_second"] > 0


def test_a_probed_training_step_does_what_a_run_records(monkeypatch):
    looked = []
    monkeypatch.setattr(benchmark, "spectral_norms", lambda w: looked.append(w.shape) or w)
    row = training_step("FA2", "emulate", 4, "cpu", probed=True, **SMALL, probe_every=2)
    assert row["tokens_per_second"] > 0
    assert looked == [(1, 2, 16, 32)] * 6  # q and k, once before the clock starts and twice after


@pytest.mark.parametrize("impl", ["flash", "cudnn"])
def test_a_kernel_of_pytorch_is_the_one_that_is_timed(monkeypatch, impl):
    kernels, allowed = torch.backends.cuda, []

    def spy(q, k, v, is_causal):
        on = dict(flash=kernels.flash_sdp_enabled(), cudnn=kernels.cudnn_sdp_enabled())
        allowed.extend(name for name in on if on[name])

    monkeypatch.setattr(benchmark, "scaled_dot_product_attention", spy)
    x = object.__new__(Inputs)  # whose __init__ needs a GPU
    with FakeTensorMode():
        x.q = x.k = x.v = torch.empty(1, 2, 16, 16, device="cuda", dtype=torch.bfloat16)
        x.case, x.released = Case(impl=impl), None
        x.forward()
    assert allowed == [impl]


def test_flex_attention_is_causal_attention(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    q, k, v = torch.randn(3, 2, 2, 128, 16).unbind(0)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(benchmark.flex.__wrapped__(128, "cpu")(q, k, v), wanted)


def test_every_length_has_as_much_to_do():
    for case in benchmark.cases():
        tokens = case.batch * case.seqlen * case.heads * case.head_dim
        assert tokens == benchmark.TOKENS * 12 * 64 and case.batch >= 1


def test_a_floor_is_linear_in_its_ceiling():
    case = vars(Case())
    slow, fast = (floors(case, dict(tflops=400.0 * k, tbps=2.0)) for k in (1, 2))
    assert slow["forward_operations"] == pytest.approx(2 * fast["forward_operations"])
    assert slow["backward_bytes"] == fast["backward_bytes"] == 2 * slow["forward_bytes"]
    # 2 products of 2 T^2 D operations over half of the square, for 32 x 12 heads
    assert fast["forward_operations"] == pytest.approx(32 * 12 * 2 * 1024**2 * 64 / 800e9)


@pytest.mark.parametrize(
    "module, words, sentence",
    [
        (benchmark, ["OUT"], "needs an NVIDIA GPU"),
        (peers, ["OUT"], "exists and is never overwritten"),
        (mixed_runs, ["OUT", "digits", "--steps", "1"], "steps=1 must be above"),
    ],
)
def test_a_users_mistake_ends_with_status_2(tmp_path, monkeypatch, capsys, module, words, sentence):
    path = tmp_path / f"{datetime.date.today().isoformat()}-cpu.json"
    path.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["a", *(w.replace("OUT", str(tmp_path)) for w in words)])
    with pytest.raises(SystemExit) as stop:
        entry(module.main)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_an_interrupted_command_ends_in_one_line(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        entry(main)
    assert stop.value.code == 130 and capsys.readouterr().err == "lowprec: interrupted\n"


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        need_gpu()


def made_record(**steps):
    """A record of attention with FA2 and a changed policy, and of training steps."""
    cases = [vars(Case(policy=p)) | dict(forward_ms=1.0, backward_ms=x, peak_mib=100 * x)
             for p, x in (("FA2", 1.0), ("FA2+row_sum=removed", 2.0))]  # fmt: skip
    cases.insert(0, vars(Case(seqlen=512)) | dict(forward_ms=9.0, backward_ms=9.0, peak_mib=9.0))
    rows = [dict(policy=p, impl="triton", tokens_per_second=x, peak_mib=50.0)
            for p, x in ({"FA2": 1000.0} | steps).items()]  # fmt: skip
    return dict(cases=cases, training=rows)


def test_a_policy_is_set_beside_another_as_far_as_a_record_has_it():
    removed = "FA2+row_sum=removed"
    found = benchmark.relative(made_record(**{removed: 990.0}), removed)
    assert found == {"time": 1.5, "memory": 2.0, "step speed": 0.99, "step memory": 1.0}
    assert list(benchmark.relative(made_record(), removed)) == ["time", "memory"]
    assert benchmark.relative(made_record(), "LOW") == benchmark.relative({}, removed) == {}


def test_a_ratio_of_times_has_the_range_of_its_replays():
    record = made_record()
    for case in record["cases"]:
        for part in ("forward", "backward"):
            case |= {f"{part}_least": 0.5 * case[f"{part}_ms"], f"{part}_most": 2.0}
    assert benchmark.time_ratio(record, "FA2+row_sum=removed", "FA2") == (1.5, (1.5 / 4, 4.0))


def test_the_newest_record_with_a_policy_is_found(monkeypatch):
    some, other = made_record(LOW=900.0), made_record(PAPER=800.0)
    records = {"2026-01-01-a": made_record(LOW=1.0), "2026-01-02-a": some, "2026-01-03-a": other}
    monkeypatch.setattr(benchmark, "recorded", lambda: records)
    assert benchmark.newest_with("LOW", "FA2") is some
    assert benchmark.newest_with("PAPER") is other and benchmark.newest_with("RELEASED") == {}


SPEEDS = {
    "FA2+delta_from=o_fp32": 980.0,
    "FA2+row_sum=removed": 995.0,
    "FA2+row_sum=refined": 950.0,
}


@pytest.mark.parametrize(
    "record, price, ratio",
    [(made_record(), "to come", None),
     (made_record(**SPEEDS) | dict(hardware="GPU"),
      "clean 0.980, mean 0.995, refined 0.950, on one GPU", 0.995)],
)  # fmt: skip
def test_the_page_of_the_fix_has_its_price_once_it_is_recorded(monkeypatch, record, price, ratio):
    path = Path(__file__).resolve().parent.parent / "notebooks" / "a_fix_at_the_root.ipynb"
    (cell,) = (c for c in json.loads(path.read_text())["cells"] if c["id"] == "price")
    monkeypatch.setattr(benchmark, "recorded", lambda: {"2026-12-01-a": record})
    said, shown = {}, []
    names = dict(
        pd=pd, plots=plots, benchmark=benchmark, display=shown.append, STORED="stored", MEAN="mean",
        REFINED="refined",
        POLICIES=dict(zip(("stored", "clean", "mean", "refined"), ("FA2", *SPEEDS), strict=True)),
        facts=lambda **values: said.update(values), check=lambda **values: said.update(values),
    )  # fmt: skip
    exec("".join(cell["source"]), names)
    more = {"gpu", "refined_speed", "refined_cost", "refined_memory"} if ratio else set()
    assert said.keys() == {"price", "root_price"} | more
    assert (said["price"], said["root_price"]) == (price, ratio)
    assert said.get("refined_speed", "0.950") == "0.950"
    assert said.get("refined_cost", "5.0") == "5.0"
    assert ("0.995" in shown[0].to_html()) == (ratio is not None)
