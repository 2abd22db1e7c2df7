"""Readings of BF16 flash attention: where they round, how alike they are, which way they err."""

import pandas as pd
import pytest
import torch

from lowprec.numerics.policy import LOW, PAPER, RELEASED
from lowprec.studies import published, readings, which_way


@pytest.fixture(scope="module")
def made():
    return readings.inputs(heads=1, length=128)


def test_the_table_of_sites_is_what_the_policies_say():
    table = readings.sites().set_index("stores")
    assert list(table.columns) == ["site", "PAPER", "RELEASED", "FA2", "LOW"]
    rounded = {name: set(table.site[table[name] == "bf16"]) for name in table.columns[1:]}
    assert rounded["PAPER"] == {"s", "p", "o_acc", "o"}
    assert rounded["PAPER"] & rounded["RELEASED"] & rounded["FA2"] == {"p", "o"}
    assert rounded["LOW"] < rounded["RELEASED"] == set(readings.STORES)
    assert table.loc["keys in a block"].tolist() == ["", "all", "512", "all", "all"]
    assert float(table.loc["least row sum of a block", "RELEASED"]) == RELEASED.l_floor


def test_the_families_are_what_they_are_called(made):
    q, k, v, _ = made["tied"]
    scores = (q.float() @ k.float().mT / 8).bfloat16()[..., -1, :]
    assert scores.unique().numel() < 20 and (v <= -1).all()
    q, k, _, _ = made["sink"]
    first, *others = (q.float() @ k.float().mT)[0, 0].argmax(-1).bincount().tolist()
    assert first > 5 * max(others), "the first key is the largest of more rows than any other"


def test_a_program_agrees_with_itself_and_less_with_one_of_its_sites_in_fp32(made):
    variants = readings.programs("RELEASED", tile=32) | readings.without(["o_acc"], tile=32)
    assert variants["without o_acc"] == (RELEASED.replace(o_acc="fp32"), 32)
    program = {}
    for family, (q, k, v, _) in made.items():
        with published.GpuAutocast():
            program[family] = published.forward(q, k, v, 32)
    share = readings.agreement(program, readings.traces(variants, made))
    assert list(share.columns) == list(readings.FAMILIES) and share.loc["RELEASED"].min() > 0.97
    assert (share.loc["without o_acc"] < 0.9).all()


def test_shares_of_gradients_are_the_least_of_three(made):
    traces = readings.traces({"LOW": (LOW, None)}, {"normal": made["normal"]}, backward=True)
    (kept,) = traces.values()
    assert set(kept) == {"dq", "dk", "dv"}
    own = type("Own", (), kept | {"dk": torch.zeros_like(kept["dk"])})
    assert readings.agreement({"normal": own}, traces).loc["LOW", "normal"] < 0.1


def test_between_counts_equal_elements_of_every_pair():
    a, b = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 2, 0, 0])
    traces = {(name, "normal"): {"o": x} for name, x in (("A", a), ("B", b), ("C", a))}
    expected = pd.DataFrame({"normal": {"A, B": 0.5, "A, C": 1.0, "B, C": 0.5}})
    pd.testing.assert_frame_equal(readings.between(traces), expected)


def test_on_tied_inputs_no_difference_needs_the_rounding_of_x(made):
    assert readings.moved(made["tied"], 32) == 0 < 0.3 < readings.moved(made["normal"], 32)
    assert min(readings.products(made["normal"], 32).values()) > 0.99


# Which way


ROWS = dict(seed=0, rows=200, keys=16, gap=11.0)


def test_rows_have_two_equal_largest_scores():
    q, k, v, do = which_way.two_ties(8, **ROWS)
    scores = (q.float() @ k.float().mT)[:, 0, 0] / 8
    assert torch.equal(scores[:, 0], scores[:, 8])
    others = scores[:, [i for i in range(16) if i not in (0, 8)]]
    assert (scores[:, 0] - others.amax(1) > 8).all() and (do < 0).all()
    assert (v[:, 0, [0, 8]] <= -2).all() and (v[:, 0, 1:8] >= -1).all()


def test_the_numerator_makes_the_sign_and_delta_mirrors_it():
    kinds = {"ties": (which_way.two_ties(1, **ROWS), False, None)}
    found = which_way.biases(kinds)
    means = {name: found["ties", name, "O"].mean for name in which_way.PROGRAMS}
    assert means["PAPER"] < -0.2 < 0.1 < means[which_way.NUMERATOR] == means["FA2"]
    assert means[which_way.PLAIN] < -0.1 and found["ties", "FA2", "O"].n == 200
    for name, mean in means.items():
        assert found["ties", name, "δ"].mean == pytest.approx(-mean, abs=0.02)


def test_ties_in_two_blocks_are_rounded_before_they_meet(made):
    kinds = which_way.kinds(made["tied"], 32, **ROWS)
    assert [tile for *_, tile in kinds.values()] == [None, 8, 32]
    found = which_way.biases(kinds, ["RELEASED"])
    one, two = (found[kind, "RELEASED", "O"].mean for kind in list(kinds)[:2])
    assert one < 2 * two < 0


def test_the_second_bias_is_gone_where_the_row_sum_adds_rounded_numbers(monkeypatch):
    monkeypatch.setattr(which_way, "SIZES", (8,))
    (row,) = which_way.grid(0, 256).to_dict("records")
    assert row["PAPER"] > 0.1 and abs(row[which_way.CONSISTENT]) < 0.03 and abs(row["FA2"]) < 0.03
    assert str(PAPER) in which_way.CONSISTENT
