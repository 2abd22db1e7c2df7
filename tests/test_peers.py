"""The errors of other kernels: inputs with exact ties, what a dQ gives away, records."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from lowprec import UserError
from lowprec.attention.reference import oracle
from lowprec.numerics.formats import BF16, ulp
from lowprec.records import files
from lowprec.studies import peers
from lowprec.studies.additions import output_errors

RECORDS = sorted((files.repo_root() / "data/peers").glob("*.json"))


@pytest.fixture(scope="module")
def specimens():
    found = peers.captures()
    return peers.Specimens({name: found[name] for name in list(found)[:2]}, tokens=64)


@pytest.mark.parametrize("k", [1, 3])
def test_tied_rows_have_k_ties_one_other_token_and_the_exact_output(k):
    q, keys, v, rows, exact = peers.tied_rows(k, (5.0, 8.0), heads=2, seqlen=128)
    assert q.shape == (1, 2, 128, 64) and len(rows) == 8
    t = oracle(q, keys, v)
    p = t.p_unnorm[0][:, rows]
    assert ((p == 1).sum(-1) == k).all()
    rest = torch.where(p < 1, p, 0.0)
    assert (rest.amax(-1) <= peers.WEIGHT * 1.05).all()
    assert (rest.amax(-1) >= 0.2 * peers.WEIGHT * 0.95).all()
    assert ((rest.sum(-1) - rest.amax(-1)).abs() < 1e-12).all()
    assert torch.allclose(t.o[0][:, rows], exact, rtol=1e-12)
    tied = v[0][:, :, None].expand(-1, -1, 8, -1).permute(0, 2, 1, 3)[p == 1]
    assert ((tied >= -4) & (tied <= -2)).all()


def test_tied_rows_are_independent_draws():
    *_, exact = peers.tied_rows(2, (0.1, 1.0), heads=2, seqlen=128)
    assert len(exact.flatten().unique()) > 0.99 * exact.numel()


@pytest.mark.parametrize("name", ["FA2", "math"])
def test_one_rounding_after_the_division_errs_as_the_model_says(name):
    program = peers.programs("cpu")[name]
    for row in peers.measure_ties(program, "cpu", heads=9, counts=(2, 3)):
        of_model = output_errors(
            BF16, row["ties"], peers.OTHERS[row["other"]], peers.WEIGHT, 50_000,
            torch.Generator().manual_seed(1),
        )["output"].mean()  # fmt: skip
        assert row["n"] == 9 * 16 * 64
        assert row["mean"] == pytest.approx(of_model.item(), abs=2 * row["half"])


def test_a_rounded_numerator_errs_the_other_way():
    (row,) = (
        r
        for r in peers.measure_ties(peers.programs("cpu")["RELEASED"], "cpu", 4, counts=(2,))
        if r["other"] == "nearer to 0"
    )
    assert row["mean"] < -0.2


def test_the_bias_of_delta_is_one_ulp_if_each_number_of_o_is_off_by_one_towards_do():
    g = torch.Generator().manual_seed(0)
    do, o = torch.randn(2, 3, 5, 8, generator=g, dtype=torch.float64)
    off = do.sign() * ulp(o, BF16)
    bias, half = peers.in_ulp((do * off).sum(-1), do, o)
    assert bias == pytest.approx(1) and half > 0
    small = -0.25 * o.sign() * ulp(o, BF16)
    assert peers.in_ulp((o.sign() * small).sum(-1), o.sign(), o)[0] == pytest.approx(-0.25)


def test_on_ties_delta_has_the_bias_of_o_if_do_has_one_sign_and_none_if_drawn():
    for row in peers.measure_ties(peers.programs("cpu")["FA2"], "cpu", heads=9, counts=(2,)):
        assert row["delta_same"] == pytest.approx(row["mean"], abs=0.02)
        assert abs(row["delta_drawn"]) < 2 * row["delta_drawn_half"]


class Shifted(torch.autograd.Function):
    """Exact attention whose backward takes delta + eps."""

    @staticmethod
    def forward(ctx, q, k, v, eps):
        ctx.save_for_backward(q, k, v, eps)
        return oracle(q, k, v).o

    @staticmethod
    def backward(ctx, do):
        q, k, v, eps = ctx.saved_tensors
        t = oracle(q, k, v, do=do)
        ds = t.p_bwd * (t.dp - t.delta[..., None] - eps[..., None])
        return q.shape[-1] ** -0.5 * (ds @ k.double()), None, None, None


def test_dq_gives_away_the_error_of_delta_that_its_backward_had(specimens):
    s = specimens
    # float64 inputs, so that dQ is not rounded: what is left is the error of delta alone
    s = SimpleNamespace(**vars(s), of_query_weights=s.of_query_weights)
    s.q, s.k, s.v, s.do = (x.double() for x in (s.q, s.k, s.v, s.do))
    eps = torch.randn(s.exact.delta.shape, generator=torch.Generator().manual_seed(0)).double()
    program = peers.Program("shifted", lambda q, k, v: Shifted.apply(q, k, v, eps))
    e = peers.Specimens.run(s, program)
    assert e["o"].abs().max() == 0 and e["delta"].abs().max() == 0
    assert torch.allclose(e["implied"], eps, rtol=1e-6, atol=1e-9)
    expected = -s.scale * torch.einsum("ct,ctd,ctx->cdx", eps[0], s.exact.mean_key[0], s.x)
    assert torch.allclose(e["gradient"], expected, rtol=1e-8, atol=1e-12)


def test_ours_beside_plain_attention(specimens):
    programs = peers.programs("cpu")
    found = {name: specimens.run(programs[name]) for name in ("FA2", "FA2 o_fp32", "math")}
    rows = peers.measure_captures(specimens, found)
    table = {(r["program"], r["capture"]): r for r in rows}
    assert len(rows) == 6
    for capture in specimens.names:
        ours, math = table["FA2", capture], table["math", capture]
        assert (ours["corr_o"], ours["equal"], ours["delta_size"], ours["cosine"]) == (1, 1, 1, 1)
        assert ours["corr_implied"] > 0.8 > abs(math["corr_implied"])
        assert 0.5 < math["corr_o"] < 1
        assert table["FA2 o_fp32", capture]["delta_size"] < 0.9
        assert table["FA2 o_fp32", capture]["equal"] == 1


def test_rounded_weights_and_their_sum_do_not_match(specimens):
    ratio = peers.mismatch(specimens)
    assert ratio.shape == (2, 64) and (ratio[:, 0] == 0).all()  # one key, weight 1
    assert 0 < ratio.abs().max() < BF16.unit_roundoff


def test_a_program_that_fails_is_named_and_the_rest_goes_on(specimens, monkeypatch):
    def fail(q, k, v):
        raise RuntimeError("No available kernel.\nmore")

    found = {"FA2": peers.programs("cpu")["FA2"], "cuDNN": peers.Program("cuDNN", fail)}
    monkeypatch.setattr(peers, "programs", lambda device: found)
    out = peers.measure(specimens, heads=1, counts=(2,))
    assert out["failed"] == {"cuDNN": "RuntimeError: No available kernel."}
    assert {r["program"] for r in out["ties"]} == {r["program"] for r in out["captures"]} == {"FA2"}
    monkeypatch.setattr(peers, "programs", lambda device: {"FA2": found["cuDNN"]})
    with pytest.raises(UserError, match="our own kernel does not run here"):
        peers.measure(specimens)


def test_the_command_writes_one_record_and_never_over_another(tmp_path, monkeypatch, capsys):
    small = dict(hardware="CPU", ties=[], captures=[{}], failed={"flex": "no"})
    monkeypatch.setattr(peers, "record", lambda device: small)
    monkeypatch.setattr(sys, "argv", ["peers", str(tmp_path / "peers")])
    peers.main()
    (path,) = (tmp_path / "peers").iterdir()
    assert json.loads(path.read_text()) == small
    assert "flex failed: no" in capsys.readouterr().out
    with pytest.raises(UserError, match="never overwritten"):
        peers.main()


def test_the_model_of_ties_is_that_of_the_draws_and_means_are_held_against_it():
    model = peers.tie_model(20_000, counts=(1, 2))
    assert list(model) == [(k, other) for other in peers.OTHERS for k in (1, 2)]
    assert model[2, "nearer to 0"] == pytest.approx(0.2, abs=0.02)
    assert model[2, "further from 0"] == pytest.approx(-0.18, abs=0.02)
    rows = [{"ties": 2, "other": "nearer to 0", "mean": model[2, "nearer to 0"] - 0.1}]
    assert peers.beside_model(rows, model).off.item() == pytest.approx(0.1)


def test_the_interval_of_a_size_does_not_go_below_zero():
    assert peers.within(0.3, 0.1, 5).interval == pytest.approx((0.2, 0.4))
    assert peers.within(0.3, 0.5, 5).interval == pytest.approx((0, 0.8))


def rows_of_captures(**columns):
    """A table of two captures, a failing head and a twin, of `FA2` and two other programs."""
    names = ["fa2-b-seed4-1580", "fa2-a-healthy-seed1-1680"]
    rows = [dict(program=p, capture=c) for p in ("FA2", "cuDNN", "math") for c in names]
    values = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
    return peers.table([row | value for row, value in zip(rows, values, strict=True)])


def test_tables_of_captures_stand_beside_ours():
    found = rows_of_captures(gradient=[8, 1, 2, 3, 0.4, 0.9])
    assert peers.kernels(found) == ["cuDNN"]
    grid = peers.grid(found, "gradient", ["math", "cuDNN"])
    assert grid.loc["b, 1,580"].tolist() == [0.4, 2]
    assert grid.loc["a, healthy"].tolist() == [0.9, 3]
    assert peers.failing(grid.index) == ["b, 1,580"]
    apart = peers.apart(found, ["cuDNN"]).cuDNN
    assert apart.to_dict() == pytest.approx({"b, 1,580": 4, "a, healthy": 3})
    assert peers.over_ours(found, "math").to_dict() == pytest.approx({"b, 1,580": 0.05})


def test_the_largest_mean_along_o_may_be_negative():
    found = rows_of_captures(along=[0.9, 0, 0.2, -0.5, 0.3, 0], along_half=[1, 1, 1, 0.1, 1, 1])
    row = peers.most_along(found, ["cuDNN", "math"])
    assert (row.program, row.capture, row.measured.value, row.measured.n) == (
        "cuDNN", "a, healthy", 0.5, 2
    )  # fmt: skip
    assert row.measured.interval == pytest.approx((0.4, 0.6))


def test_sums_of_a_record_come_back_in_ulp(specimens):
    programs = peers.programs("cpu")
    found = {name: specimens.run(programs[name]) for name in ("FA2", "math")}
    measured = peers.table(peers.measure_captures(specimens, found))
    again = peers.delta_in_ulp(measured, ["FA2", "math"], specimens, found["FA2"]["delta"][0])
    then = peers.grid(measured, "delta_ulp", ["FA2", "math"])
    assert (again - then).abs().max(axis=None) < 2e-5 < then.abs().min(axis=None)


def test_a_record_is_the_newest_or_one_by_name():
    assert peers.chosen("newest") == json.loads(RECORDS[-1].read_text())
    assert peers.chosen(RECORDS[0].stem)["date"] == RECORDS[0].stem[:10]
    with pytest.raises(UserError, match=f"no record '2025' .* one of {RECORDS[0].stem}"):
        peers.chosen("2025")


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_a_committed_record_has_what_the_page_reads(path):
    found = json.loads(path.read_text())
    assert path.stat().st_size < 200_000
    assert {"date", "hardware", "versions", "commit", "ties", "captures", "failed"} <= set(found)
    assert {r["capture"] for r in found["captures"]} == set(peers.captures())
    assert {"FA2", "math"} <= {r["program"] for r in found["captures"]}
    assert {r["ties"] for r in found["ties"]} == set(peers.TIES)


@pytest.mark.gpu
def test_every_kernel_of_a_gpu_runs():
    found = peers.record("cuda")
    assert not found["failed"]
    assert set(peers.PRODUCTION) <= {row["program"] for row in found["captures"]}
