"""A spoilt token stream is faulty in the steps that were asked for, and nearly whole elsewhere."""

import numpy as np
import pytest

from lowprec import UserError
from lowprec.studies import fault
from lowprec.training.data import shards as data

SIZES = dict(seed=2, batch_size=2, block_size=16)


@pytest.fixture(scope="module")
def tokens():
    return data.load_tokens(data.SMOKE)


def window(stream, tokens, step):
    """Inputs and last target of each row of a step's batch."""
    spoilt = data.Tokens("spoilt", tokens.vocabulary, "", (stream,))
    x, y = data.batch(spoilt, step, **SIZES)
    return np.concatenate([x.numpy(), y.numpy()[:, -1:]], 1)


@pytest.mark.parametrize("kind", fault.KINDS)
def test_the_batches_of_these_steps_are_spoilt(tokens, kind):
    stream = fault.spoil(tokens, kind, range(5, 8), **SIZES)
    whole = np.concatenate(tokens.shards)
    assert stream.dtype == whole.dtype and stream.max() <= 50256
    assert (stream != whole).sum() <= 3 * 2 * 17, "and nothing else"
    for step in (4, 8):
        assert np.array_equal(window(stream, tokens, step), window(whole, tokens, step))
    for step in (5, 6, 7):
        ours, before = (window(s, tokens, step) for s in (stream, whole))
        assert (ours != before).any(1).all()
        kept = np.array_equal(np.sort(ours, 1), np.sort(before, 1))
        assert kept == (kind == "shuffled")


def test_a_seed_spoils_the_same_tokens_everywhere(tokens):
    """Of recorded runs; it must never change."""
    found = [data.sha256(fault.spoil(tokens, kind, range(3), **SIZES)) for kind in fault.KINDS]
    assert [digest[:8] for digest in found] == ["d7c6e067", "7aaf98e1"]


def test_noise_has_tokens_of_the_vocabulary_alone():
    stream = np.zeros(4000, dtype=np.uint16)
    noise = fault.spoil(data.Tokens("a", "bytes", "", (stream,)), "noise", range(3), **SIZES)
    assert 255 < noise.max() < data.VOCABULARIES["bytes"]


def test_the_command_writes_shards(tmp_path, capsys):
    out = tmp_path / "smoke-noise"
    fault.main(["noise", str(data.SMOKE), str(out), "--data-seed", "3"])
    tokens = data.load_tokens(out)
    assert tokens.name == "smoke-noise" and tokens.sha256 in capsys.readouterr().out
    want = fault.spoil(data.load_tokens(data.SMOKE), "noise", seed=3)
    assert np.array_equal(np.concatenate(tokens.shards), want)
    with pytest.raises(UserError, match="smoke-noise: .*; give another folder"):
        fault.main(["noise", str(data.SMOKE), str(out)])
