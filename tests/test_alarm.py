"""The alarm on trial: what a capture is judged by, half of it, a young model."""

from types import SimpleNamespace

import pandas as pd
import pytest

from lowprec.diagnose import probe
from lowprec.numerics.policy import CLEAN
from lowprec.records.explosion import Explosion
from lowprec.studies import alarm, otherwise


def test_a_twin_is_judged_as_if_it_had_read_the_stored_output(captures):
    name = "fa2-b-healthy-seed4-1580"
    found = alarm.read({name: captures[name]})
    assert found.share[name] == probe.probe(captures[name], policy="FA2").share[0]
    assert not found.alarm[name] and found.alarm.dtype == bool
    safe = alarm.read({name: captures[name]}, CLEAN)
    assert safe.share_all[name] == probe.probe(captures[name], policy=CLEAN).share_all[0]
    assert safe.share_all[name] < found.share_all[name]


def test_half_of_a_capture_is_what_its_first_rows_are(captures):
    capture = captures["fa2-b-seed4-1580"]
    half = alarm.first_half(capture)
    rows = capture.tensors["x"].shape[1]
    for name in ("x", "q", "do"):
        kept = half.tensors[name]
        assert kept.shape[-2] == rows // 2
        assert kept.equal(capture.tensors[name][..., : rows // 2, :])
    assert half.replay().max_ulp <= 1, "rows look back only"


@pytest.mark.parametrize("kind", alarm.KINDS)
def test_a_young_model_is_probed_before_and_on_the_way(kind):
    pytest.importorskip("transformers")
    table = alarm.young(kind, seed=3, steps=3, length=64)
    assert table.step.value_counts().to_dict() == dict.fromkeys(range(4), 16)
    assert table.groupby("step").share.median().nunique() == 4, "it is trained between probes"
    ruled = (table.share >= probe.SHARE) & (table.key_share >= 0.9)
    assert alarm.second_rule(table)[table.alarm].all(), "today's rule asks for more"
    assert (table.first_rule == ruled).all() and set(table.model) == {kind}


@pytest.mark.parametrize(
    "arm,onset,read",
    [
        ("rate16", 2100, [2000]),
        ("noise", 2010, [2000, 2250, 2500]),
        ("climb", None, []),
        ("fa2", 2100, [1000, 2000]),
        ("refined", None, [1000, 2000, 2250, 2500, 3000]),
    ],
)
def test_which_weights_are_read(arm, onset, read, tmp_path):
    (tmp_path / ".weights").mkdir()
    for step in (1000, 2000, 2250, 2500, 3000):
        (tmp_path / ".weights" / f"step-{step:06d}.pt").touch()
    info = dict(arm=arm, ended="explosion" if onset else "completed")
    run = SimpleNamespace(
        path=tmp_path, info=info, explosion=onset and Explosion(onset, True), metrics=range(3100)
    )
    assert otherwise.read(run) == read


def test_what_the_predictions_on_fresh_seeds_are_judged_by():
    """A run of FA2 that rings late, in another head than the largest; one at too high a rate that
    only the rule before rings in; one that was to explode and did not; one that exploded before any
    weights of it were kept, which is judged by its end alone."""
    sigma = [(step, 0, head, 2.0 + head) for step in (49, 99) for head in (0, 1)]
    probes = pd.DataFrame(sigma, columns=["step", "layer", "head", "sigma_q"])
    run = SimpleNamespace(probes=probes, explosion=Explosion(300, True), metrics=range(900))
    found = pd.DataFrame(
        dict(arm=["fa2", "rate8", "noise", "refined", "shuffled"], end=[300, 700, 7000, 900, 1475],
             outcome=["explodes", "explodes", "healthy", "healthy", "explodes"], run=run),
        index=["f", "r", "n", "c", "s"],
    )  # fmt: skip
    heads = pd.DataFrame(
        [("f", 100, 0, 0, True, False, 0.8), ("f", 200, 0, 0, True, True, 1.0),
         ("f", 200, 0, 1, False, False, 1.0), ("r", 500, 0, 0, True, False, 0.4),
         ("n", 2000, 0, 0, True, True, 1.0), ("c", 100, 0, 0, False, False, 1.0)],
        columns=["run", "step", "layer", "head", "before", "alarm", "key_share"],
    )  # fmt: skip
    seen = {name: list(value) for name, value in otherwise.judged(found, heads).items()}
    assert seen == dict(
        ends=[False, False, True, False, False], otherwise=[False], rates=[False],
        genuine=[False], notice=[True], head=[True], healthy=[False], keys=[True], before=[True],
    )  # fmt: skip
    assert set(seen) == set(otherwise.CLAIMS)
