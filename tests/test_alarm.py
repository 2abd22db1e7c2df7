"""The alarm on trial: what a capture is judged by, half of it, a young model."""

import pytest

from lowprec.diagnose import probe
from lowprec.numerics.policy import CLEAN
from lowprec.studies import alarm


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
    assert (table.first_rule == ruled).all() and set(table.model) == {kind}
