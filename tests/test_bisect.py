"""Guilty sets of roundings: the search is exact, finds planted causes, and agrees with tables."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowprec import UserError, __main__
from lowprec.attention.reference import emulate, oracle
from lowprec.diagnose import bisect, bisect_runs
from lowprec.numerics.policy import ALL_FP32, FA2, LOW, RELEASED, PrecisionPolicy
from lowprec.records.files import data_root
from lowprec.studies import delta, guilty, row_sums
from lowprec.training.capture import Capture
from lowprec.training.config import PRESETS
from lowprec.training.data.shards import load_tokens, write_shards

CAPTURES = data_root() / "captures"


def subsets(items, sizes=None):
    sizes = range(len(items) + 1) if sizes is None else sizes
    return [some for size in sizes for some in itertools.combinations(items, size)]


@st.composite
def oracles(draw, monotone):
    """(items, what is enough): any sets of up to five items, with what holds them if monotone."""
    items = "abcde"[: draw(st.integers(1, 5))]
    marked = draw(st.lists(st.sampled_from(subsets(items)[1:]), max_size=6))
    if monotone:
        return items, lambda some: any(set(one) <= set(some) for one in marked)
    return items, lambda some: tuple(some) in marked


def brute(items, enough, size):
    """The minimal sets by their definition."""
    good = {some for some in subsets(items)[1:] if enough(some)}
    return {one for one in good if len(one) <= size and not any(set(o) < set(one) for o in good)}


@pytest.mark.parametrize("monotone", [True, False])
@given(st.data(), st.integers(1, 5))
def test_all_minimal_sets_are_found_and_nothing_else(monotone, data, size):
    items, enough = data.draw(oracles(monotone))
    found = bisect.minimal_sets(items, enough, size)
    assert set(found) == brute(items, enough, size) and len(found) == len(set(found))


@pytest.mark.parametrize("monotone", [True, False])
@given(st.data(), st.integers(1, 5))
def test_beyond_the_size_a_set_is_found_if_all_together_are_enough(monotone, data, size):
    items, enough = data.draw(oracles(monotone))
    found = bisect.search(items, items, enough, size)
    every = brute(items, enough, len(items))
    assert set(found) <= every
    assert {one for one in every if len(one) <= size} <= set(found)
    assert found or not enough(tuple(items))


@pytest.mark.parametrize("monotone", [True, False])
@given(st.data())
def test_ddmin_leaves_nothing_out_that_could_be(monotone, data):
    items, enough = data.draw(oracles(monotone))
    if enough(tuple(items)):
        left = bisect.ddmin(items, enough)
        assert enough(left) and set(left) <= set(items)
        rests = [left[:i] + left[i + 1 :] for i in range(len(left))]
        assert len(left) == 1 or not any(map(enough, rests))


def test_a_set_once_found_is_not_asked_about_again():
    asked = []

    def enough(some):
        asked.append(some)
        return "a" in some

    assert bisect.minimal_sets("abcd", enough, 4) == [("a",)]
    assert len(asked) == len(set(asked)) == 4 + 3 + 1
    assert all("a" not in some or some == ("a",) for some in asked)


@pytest.mark.parametrize(
    ("items", "size"), [(1, 1), (8, 8), (9, 4), (12, 3), (24, 2), (300, 1), (999, 1)]
)
def test_as_many_sets_as_are_affordable(items, size):
    assert bisect.affordable(items) == size
    assert sum(math.comb(items, n) for n in range(1, size + 1)) <= max(items, bisect.SETS)


def capture(heads=1, rows=96, common=2.0, seed=0, policy="FA2") -> Capture:
    """A made layer whose keys have something in common, as those of failing heads do."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, rows, 32)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    tensors = dict(
        q=q, k=k + common, v=v + 1, do=do, x=torch.randn(1, rows, 48, generator=generator)
    )
    tensors = {name: t.bfloat16() for name, t in tensors.items()}
    fields = {
        name: mine for name, (mine, _) in PrecisionPolicy.parse(policy).diff(ALL_FP32).items()
    }
    meta = dict(
        policy=fields, tile=None, scale=32**-0.5, causal=True, layer=0, step=1,
        heads=[3 + i for i in range(heads)], model=dict(n_layer=1, n_head=8, n_embd=256),
    )  # fmt: skip
    return Capture(SimpleNamespace(stem="made"), tensors, meta)


@pytest.fixture(scope="module")
def made():
    return bisect.Replays(capture())


def sets_of(replays, policy, **how):
    (found,) = bisect.guilty(replays, policy, **how)
    return {frozenset(item.partition("=")[0] for item in one) for one in found.sets}


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("ALL_FP32+o=e8m3", [{"o"}]),
        ("ALL_FP32+o=e8m3+p=e8m16+ds=e8m14", [{"o"}]),
        ("ALL_FP32+ds=e8m3+p=e8m14", [{"ds"}]),
        ("ALL_FP32+delta_bias=300+o=bf16+ds=bf16", [{"o"}, {"delta_bias"}]),
        ("ALL_FP32+o=e8m3+s=e8m3", [{"s", "o"}]),
        ("ALL_FP32+s=e8m2+o=e8m4+ds=e8m2", [{"s", "o", "ds"}]),
    ],
)
def test_planted_causes(made, policy, wanted):
    """One bad field; a bad field among fine ones; two that only together break, so that either is
    enough: the bias is a multiple of the error of O; two, and three, each bad enough alone."""
    assert sets_of(made, policy) == set(map(frozenset, wanted))


def test_a_field_that_nothing_reads_is_not_searched():
    assert bisect.fields_of(FA2) == ("p=fp32", "o=fp32", "ds=fp32")
    assert "p_bwd=fp32" in bisect.fields_of(FA2.replace(row_sum="refined"))
    assert "p_bwd=fp32" in bisect.fields_of(FA2, all_gradients=True)
    assert len(bisect.fields_of(LOW)) == 8 and "l_floor=0" in bisect.fields_of(RELEASED)
    shifted = bisect.fields_of(PrecisionPolicy.parse("FA2+shift=beta(beta=7)+delta_bias=0.5"))
    assert shifted[-2:] == ("shift=none", "delta_bias=0")
    with pytest.raises(UserError, match="no rounding that dQ reads"):
        bisect.fields_of(ALL_FP32.replace(p_bwd="bf16"))


@pytest.mark.parametrize("field", bisect.UNREAD)
def test_what_is_said_to_be_unread_changes_no_error(made, field):
    assert made(ALL_FP32) == made(ALL_FP32.replace(**{field: "e8m2"}))


def test_heads_are_searched_one_by_one_and_replayed_together():
    both = bisect.Replays(capture(heads=2))
    found = bisect.guilty(both, LOW)
    assert [one.head for one in found] == [3, 4]
    for place, one in enumerate(found):
        made = both.capture
        own = {
            name: t[:, place : place + 1] if t.dim() == 4 else t for name, t in made.tensors.items()
        }
        single = Capture(made.path, own, made.meta | dict(heads=[3 + place]))
        (alone,) = bisect.guilty(bisect.Replays(single), LOW)
        assert alone.sets == one.sets
        assert alone.left == pytest.approx(one.left, rel=1e-3)


def test_modes_may_take_part_and_never_two_of_a_field(made):
    found = sets_of(made, "ALL_FP32+o=e8m3+s=e8m10", modes=True)
    assert {frozenset({"o"}), frozenset({"delta_from"})} <= found
    (one,) = bisect.guilty(made, "FA2", modes=True)
    assert all(bisect.possible(some) for some in one.sets)
    assert not bisect.possible(("delta_from=dp", "delta_from=o_fp32"))
    assert "row_sum=refined" not in bisect.modes_of(FA2.replace(row_sum="refined"))


def test_nothing_helps_where_the_error_is_elsewhere(made):
    (found,) = bisect.guilty(made, "ALL_FP32+o=e8m20")
    assert not found.sets and "Nothing brings" in bisect.verdict(found)
    assert found.left[found.whole] > found.within and "stored" in bisect.verdict(found)


def test_an_error_that_is_no_number_can_go(made):
    (found,) = bisect.guilty(made, "FA2+shift=mute(amplitude=-1e9,tol=1e9)")
    assert math.isinf(found.error) and found.sets == [("shift=none",)]


@pytest.mark.parametrize("how", [dict(within=0), dict(within=1), dict(size=0), dict(of="dk")])
def test_limits_out_of_range(made, how):
    with pytest.raises(UserError, match=next(iter(how))):
        bisect.guilty(made, "FA2", **how)


def test_of_roundings_that_are_drawn_anew_the_error_of_dq_tells_little(made):
    (dq,), (wq,) = (bisect.guilty(made, "FA2", of, draws=8) for of in ("dq", "wq"))
    assert 0.7 < dq.redrawn < 2 and wq.redrawn < dq.redrawn
    assert bisect.guilty(made, "FA2", "wq")[0].redrawn == wq.redrawn, "there without being asked"
    (quick,) = bisect.guilty(made, "FA2")
    assert math.isinf(quick.redrawn) and quick.sets == dq.sets


def test_a_layer_is_replayed_as_it_was_called():
    """Not causal, with a scale and tiles of its own; and random bits are those of the seed."""
    made = capture()
    made.meta.update(causal=False, scale=0.3, tile=16)
    replays, (q, k, v, do) = bisect.Replays(made), (made.tensors[n] for n in ("q", "k", "v", "do"))
    low = emulate(q, k, v, LOW, 16, do, causal=False, scale=0.3).dq.double()
    right = oracle(q, k, v, False, 0.3, do).dq
    assert replays(LOW)["dq"] == pytest.approx([((low - right).norm() / right.norm()).item()])
    one, other = replays.redrawn(FA2, 2)
    assert one != other


def test_a_sequence_that_is_there_twice_has_the_same_errors(made):
    tensors = {name: torch.cat([t, t]) for name, t in made.capture.tensors.items()}
    twice = bisect.Replays(Capture(made.capture.path, tensors, made.capture.meta))(FA2)
    for of, error in made(FA2).items():
        assert twice[of] == pytest.approx(error, rel=1e-3)


@pytest.fixture(scope="module")
def failing():
    names = ("fa2-b-seed4-1580", "low-c-seed6-1230")
    return {n: Capture.load(CAPTURES / f"{n}.xz").first(128) for n in names}


def test_sets_of_one_are_the_one_field_table(failing):
    """Of page *One number carries the failure*: the error of W_Q's gradient, field by field."""
    for name, captured in failing.items():
        policy, fields = captured.policy, bisect.fields_of(captured.policy)
        table = delta.replays(
            {name: captured},
            {"own": policy} | {field: bisect.changed(policy, [field]) for field in fields},
        ).error.droplevel("capture")
        shares = table.drop("own") / table.own
        (found,) = bisect.guilty(bisect.Replays(captured), of="wq", within=0.9, draws=0)
        assert {field: found.left[field,] for field in fields} == pytest.approx(dict(shares))
        singles = {one[0] for one in found.sets if len(one) == 1}
        assert singles == set(shares[shares <= 0.9].index)


def test_the_error_of_dq_is_that_of_the_table_of_changes(failing):
    """Of page *A fix at the root*."""
    for name, captured in failing.items():
        _, policy = row_sums.base_of(name)
        table = row_sums.errors(captured, policy).set_index(["delta", "change"]).dq
        replays = bisect.Replays(captured)
        for (source, change), mode in {
            ("o", "none"): [], ("o_fp32", "none"): ["delta_from=o_fp32"],
            ("o", "refined"): ["row_sum=refined"], ("o", "mean key"): ["row_sum=removed"],
        }.items():  # fmt: skip
            mine = replays(bisect.changed(policy, mode))["dq"]
            assert mine == pytest.approx([table[source, change]], rel=1e-6)


def test_the_tables_of_the_study(failing):
    name, captured = next(iter(failing.items()))
    tables = guilty.of_capture(name, captured, 0.25)
    sets, tried = tables["sets"], tables["tried"]
    assert set(sets.of) == {"dq", "wq"} and set(sets.within) == {0.25, 0.5, 0.1}
    assert (sets.left.dropna() <= sets.within[sets.left.notna()]).all()
    some = guilty.by_capture(sets, of="dq", within=0.25, modes=False)[name]
    (found,) = bisect.guilty(bisect.Replays(captured))
    assert [set(s) for s in some] == [guilty.members(bisect.shown(one)) for one, _ in found.minimal]
    alone = guilty.alone(tried).loc[name]
    assert alone.to_dict() == {k.partition("=")[0]: found.left[k,] for k in found.items}


def test_the_parts_of_an_error_are_those_of_its_fields(made):
    """Their squares and the cosine between them give the whole."""
    whole, of_p = (made(PrecisionPolicy.parse(p))["dq"][0] for p in ("FA2", "FA2+o=fp32"))
    found = guilty.parts(made.capture)
    stored, clean = (made_dq(made, p) for p in ("FA2", "FA2+o=fp32"))
    of_o = ((stored - clean).norm() / made.size["dq"]).item()
    squares = of_p**2 + of_o**2 + 2 * found["cosine"] * of_p * of_o
    assert squares == pytest.approx(whole**2, rel=1e-6)
    assert 0 < found["in_o"] < 1 and found["in_delta"] > 0


def made_dq(replays, policy):
    t = emulate(*replays.inputs[:3], policy, do=replays.inputs[3], scale=replays.capture.scale)
    return t.dq.double()


@pytest.mark.parametrize(("alone", "together"), [([0.6], 0.6), ([0.8, 0.6], 0), ([1.2, 1], 1.2)])
def test_independent_errors_add_by_squares(alone, together):
    assert guilty.foretold(alone) == pytest.approx(together, abs=1e-6)


def test_the_command(capsys, monkeypatch):
    path = "data/captures/fa2-b-seed4-1580.xz"
    load = Capture.load
    monkeypatch.setattr(Capture, "load", lambda path: load(path).first(128))
    assert __main__.main(["bisect", path, "--policy", "ALL_FP32+o=e8m3"]) == 0
    out = capsys.readouterr().out
    assert "Guilty in head 5: {o}" in out and "replays in" in out
    rows = dict(line.rsplit(None, 1) for line in out.splitlines() if line.endswith("%"))
    assert float(rows["{o}"].rstrip("%")) < 25 and rows["nothing"] == "100.0%"
    assert __main__.main(["bisect", "fa2-b-seed4-1580", "--policy", "ALL_FP32+o=e8m20"]) == 1
    assert "Nothing brings" in capsys.readouterr().out
    for words in (["none.xz"], [path, "--policy", "LOWW"], [path, "--within", "2"]):
        assert __main__.main(["bisect", *words]) == 2
    with pytest.raises(SystemExit) as ended:
        __main__.main(["bisect"])
    assert ended.value.code == 2


def trainings(tmp_path, policy, **changes):
    changes |= dict(policy=policy, block_size=32, device="cpu")
    config = dataclasses.replace(PRESETS["tiny"], **changes)
    return bisect_runs.Trainings(config, tmp_path)


def test_a_planted_cause_of_a_broken_training(tmp_path, capsys):
    """A shift that mutes every row: the output is 0 / 0 from the first step on."""
    policy = "ALL_FP32+o=bf16+shift=mute(amplitude=-1e9,tol=1e9)"
    some = trainings(tmp_path, policy, steps=3)
    assert some.search() == [("shift=none",)]
    assert list(some.onsets.values()) == [0, 0, None]
    again = trainings(tmp_path, policy, steps=3)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    assert again.search() == [("shift=none",)]
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    words = ["--policy", policy, "--steps", "3", "--block-size", "32", "--device", "cpu"]
    assert __main__.main(["bisect", "--train", "tiny", *words, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "explodes at step 0" in out and "No explosion with {shift=none};" in out
    with pytest.raises(UserError, match="trained with another lr; take another --out"):
        trainings(tmp_path, policy, steps=3, lr=1.0).search()
    tokens = load_tokens("data/corpora/smoke.safetensors")
    write_shards(tokens.window(0, 9999), tmp_path / "part", tokens.name, tokens.vocabulary)
    with pytest.raises(UserError, match="trained with another tokens"):
        trainings(tmp_path, policy, steps=3, data=str(tmp_path / "part")).search()


def test_a_training_that_ended_early_says_nothing(tmp_path, monkeypatch):
    ended = SimpleNamespace(explosion=None, info=dict(ended="8 steps skipped, step 3"), path="here")
    monkeypatch.setattr(bisect_runs, "train", lambda *_, **__: ended)
    monkeypatch.setattr(bisect_runs, "_require_same", lambda *_: None)
    with pytest.raises(UserError, match="here ended early .*8 steps skipped.* is not known"):
        trainings(tmp_path, "FA2").search()


def test_a_training_that_ends_in_a_rise_says_nothing(tmp_path, monkeypatch):
    rise = SimpleNamespace(onset=6, confirmed=False)
    ended = SimpleNamespace(explosion=rise, info=dict(ended="completed"), path="here")
    monkeypatch.setattr(bisect_runs, "train", lambda *_, **__: ended)
    monkeypatch.setattr(bisect_runs, "_require_same", lambda *_: None)
    with pytest.raises(UserError, match="here ends in a rise that may come back"):
        trainings(tmp_path, "FA2").search()


@pytest.mark.parametrize("size", [0, -3])
def test_sets_of_no_field_are_not_tried(tmp_path, monkeypatch, size):
    monkeypatch.setattr(bisect_runs.Trainings, "__call__", lambda *_: 7)
    with pytest.raises(UserError, match=f"size={size} must be at least 1 field"):
        trainings(tmp_path, "FA2").search(size)


def test_a_training_that_does_not_explode_has_no_cause(tmp_path, capsys):
    words = ["--steps", "2", "--block-size", "16", "--device", "cpu", "--policy", "ALL_FP32+o=bf16"]
    line = ["bisect", "--train", "tiny", *words, "--out", str(tmp_path)]
    assert __main__.main(line) == 2
    assert "does not explode in 2 steps" in capsys.readouterr().err
    assert __main__.main(["bisect", "--train", "tyny"]) == 2
    assert "did you mean tiny" in capsys.readouterr().err


def test_trainings_search_the_fields_of_all_gradients(tmp_path, monkeypatch):
    def explodes(_, policy):
        return None if policy.p_bwd.is_fp32 else 7

    monkeypatch.setattr(bisect_runs.Trainings, "__call__", explodes)
    assert trainings(tmp_path, "FA2").search() == [("p_bwd=fp32",)]


@pytest.mark.slow
def test_a_planted_bias_explodes_and_either_of_its_two_parts_is_enough(tmp_path):
    """The bias is a multiple of the error that rounding O makes, so it takes both."""
    policy = "ALL_FP32+o=bf16+delta_bias=1e5"
    some = trainings(tmp_path, policy, steps=600, lr=3e-2, warmup=5)  # to confirm a rise
    assert some.search() == [("o=fp32",), ("delta_bias=0",)]


def test_help_on_trainings_lists_the_presets(capsys):
    assert not __main__.main(["bisect", "--train", "--help"])
    assert "mini" in capsys.readouterr().out


def guilty_of(**changes):
    return bisect.Guilty(
        **dict(
            head=0,
            policy=FA2,
            of="dq",
            within=0.25,
            error=0.1,
            items=("p=fp32", "o=fp32"),
            whole=("p=fp32", "o=fp32"),
            sets=[("p=fp32",), ("o=fp32",)],
            left={("p=fp32",): 0.2, ("o=fp32",): 0.1, ("p=fp32", "o=fp32"): 0.0},
            size=2,
            redrawn=1.0,
        )
        | changes
    )


def test_of_equal_sets_the_one_that_leaves_least_comes_first():
    assert [left for _, left in guilty_of().minimal] == [0.1, 0.2]


def test_a_set_is_doubted_where_a_lucky_draw_leaves_as_little():
    assert "Doubt it" in bisect.verdict(guilty_of(redrawn=0.25)) and "Doubt" not in bisect.verdict(
        guilty_of(redrawn=0.26)
    )


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (("p=fp32",), "Guilty in head 0: {p} (20% left), alone."),
        (("p=fp32", "o=fp32"), "Guilty in head 0: {p, o} (0% left), together."),
    ],
)
def test_a_set_is_guilty_alone_or_together(one, said):
    assert bisect.verdict(guilty_of(sets=[one])) == said


def test_how_far_a_search_went_is_said():
    assert bisect.reach(guilty_of()) == "All sets of its 2 fields were tried."
    said = "All sets of up to 1 of its 2 fields were tried; --size 2 tries all."
    assert bisect.reach(guilty_of(size=1)) == said
    said = (
        "up to 1 of its 2 fields were tried and none is enough; of larger ones there may be more."
    )
    assert bisect.reach(guilty_of(size=1, sets=[("p=fp32", "o=fp32")])).endswith(said)
