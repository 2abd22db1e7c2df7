"""The alarm on trial: what a capture is judged by, half of it, a window's shares, a young model."""

import pandas as pd
import pytest

from lowprec.diagnose import probe
from lowprec.numerics.policy import SAFE
from lowprec.records.runs import load_runs
from lowprec.studies import alarm


def test_a_twin_is_judged_as_if_it_had_read_the_stored_output(captures):
    name = "fa2-b-healthy-seed4-1580"
    found = alarm.read({name: captures[name]})
    assert found.share[name] == probe.probe(captures[name], policy="FA2").share[0]
    assert not found.alarm[name] and found.alarm.dtype == bool
    safe = alarm.read({name: captures[name]}, SAFE)
    assert safe.share_all[name] == probe.probe(captures[name], policy=SAFE).share_all[0]
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


def test_the_share_of_a_step_is_its_error_over_its_gradient():
    run = load_runs("windows").run.iloc[0]
    table = alarm.shares(run)
    raw = pd.read_parquet(run.path / "query_error.parquet").iloc[40]
    share = float(raw.error_norm) / float(raw.grad_norm)
    assert table.shape == (200, 36)
    assert table.loc[raw.step, (raw.layer, raw["head"])] == pytest.approx(share)


@pytest.mark.parametrize("kind", alarm.KINDS)
def test_a_young_model_is_probed_before_and_on_the_way(kind):
    pytest.importorskip("transformers")
    table = alarm.young(kind, seed=3, steps=3, length=64)
    assert table.step.value_counts().to_dict() == dict.fromkeys(range(4), 16)
    assert table.groupby("step").share.median().nunique() == 4, "it is trained between probes"
    ruled = (table.share >= probe.SHARE) & (table.key_share >= 0.9)
    assert (table.first_rule == ruled).all() and set(table.model) == {kind}
