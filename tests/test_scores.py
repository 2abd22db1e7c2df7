"""Scores in two parts: exact identities, and what rounding makes of them."""

import pytest
import torch

from lowprec.attention.reference import emulate, oracle
from lowprec.diagnose import scores
from lowprec.numerics.formats import BF16, round_to


def heads(seed=0, rows=96, width=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, rows, width, generator=generator, dtype=torch.float64).unbind()


def moved(k, size):
    return k + size * torch.ones(k.shape[-1], dtype=k.dtype)


def test_probabilities_are_those_of_the_oracle():
    q, k = heads()
    p = scores.probabilities(q, k, 0.25)
    assert torch.allclose(p, oracle(q[None], k[None], k[None], scale=0.25).p_bwd[0], atol=1e-15)


def test_scores_are_rounded_before_and_after_the_scale():
    q, k = (x.bfloat16() for x in heads())
    s = scores.causal_scores(q.double(), k.double(), 0.3, BF16)
    t = emulate(q[None], k[None], k[None], "ALL_FP32+s=bf16", scale=0.3)
    assert (s.amax(-1) - t.m[0]).abs().max() == 0


def test_softmax_does_not_see_the_common_part():
    q, k = heads()
    p = scores.probabilities(q, k, 0.25)
    assert scores.total_variation(p, scores.probabilities(q, moved(k, 1000), 0.25)) < 1e-11
    before, after = scores.parts(q, k, 0.25), scores.parts(q, moved(k, 1000), 0.25)
    assert abs(after["common"]) > 100 * abs(before["common"])
    assert abs(after["spread"] - before["spread"]) < 1e-9
    assert after["key_share"] > 0.999 > before["key_share"]


def test_the_rest_along_the_mean_key():
    q, k = heads()
    unit = torch.ones(k.shape[-1], dtype=k.dtype) / 4
    along = k.sum(-1, keepdim=True) / 4 * unit
    far = 100 * unit + along + 1e-3 * (k - along)
    assert scores.parts(q, far, 0.25)["along"] > 0.99
    assert scores.parts(q, 100 * unit + k - along, 0.25)["along"] < 0.05


def test_rounding_does_and_centring_mends_it():
    q, k = heads()
    p = scores.probabilities(q, k, 0.25)

    def damage(keys):
        return scores.total_variation(p, scores.probabilities(q, round_to(keys, BF16), 0.25))

    far = moved(k, 1000)
    assert damage(far) > 20 * damage(k)
    assert damage(far - far.mean(-2, keepdim=True)) < 1.5 * damage(k)


def test_noise_has_the_size_of_the_rounding():
    q, k = heads(rows=256)
    far = moved(k, 300)
    for site in (None, BF16):
        rounded = [round_to(t, BF16) for t in (q, far)]
        error = scores.causal_scores(*rounded, 0.25, site) - scores.causal_scores(q, far, 0.25)
        seen = error.isfinite()
        error = error.where(seen, 0.0)
        error = (error - error.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)).where(seen, 0.0)
        predicted = scores.rounding_noise(q, far, 0.25, site).where(seen, 0.0)
        ratio = error.square().sum() / predicted.square().sum()
        assert 0.7 < ratio < 1.3


def test_total_variation_is_one_for_disjoint_rows():
    p = torch.eye(4, dtype=torch.float64)
    assert scores.total_variation(p, p.roll(1, -1)) == 1
    assert scores.total_variation(p, p) == 0
    same = p.roll(1, -1)
    same[0] = p[0]  # a row with one key cannot differ
    assert scores.total_variation(p, same) == 1


def test_spread_is_the_root_mean_square_over_rows():
    q, k = (torch.tensor(x, dtype=torch.float64)[None, :, None] for x in ([9, 1, 0], [0, 2, 4]))
    assert scores.parts(q, k, 1.0)["spread"] == pytest.approx(0.5**0.5)
    assert scores.parts(q.new_tensor([[[9], [1], [-1]]]), k, 1.0)["common"] == -0.5


def test_alignment_is_that_of_the_mean_query_and_the_mean_key():
    q, k = torch.randn(2, 1, 9, 4, dtype=torch.float64)
    assert scores.parts(q + 50, k - 50, 0.5)["alignment"] < -0.9
