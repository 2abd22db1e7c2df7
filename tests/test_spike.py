"""From a drift to a spike: norms that grow, Adam's steps along errors, heads that are moved."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lowprec import UserError
from lowprec.attention.reference import emulate
from lowprec.diagnose import scores
from lowprec.records.files import data_root
from lowprec.studies import rivals, signs, spike
from lowprec.training.capture import Capture

CONFIG = dict(probe_every=50, lr=0.01, beta1=0.9, beta2=0.95, n_embd=384, n_head=6, clip=1.0)


def made_run(sigma):
    """A run with one head, its σ(W_Q) every 50 steps, and no explosion."""
    steps = np.arange(49, 50 * len(sigma), 50)
    probes = pd.DataFrame(dict(step=steps, layer=0, head=0, sigma_q=sigma))
    metrics = pd.DataFrame(dict(loss=np.ones(steps[-1] + 1)))
    return SimpleNamespace(
        name="r", info=dict(config=CONFIG), probes=probes, metrics=metrics, explosion=None
    )


def test_an_exponential_is_a_line():
    level, growing = [2.0] * 14, [2.0 * 2 ** (i / 1.5) for i in range(1, 7)]  # doubles in 75 steps
    found = spike.growth(made_run(level + growing))
    assert found["take_off"] == 799 and found["probes"] == 5
    assert found["doubling"] == pytest.approx(75) and found["r2"] == pytest.approx(1)
    step = (growing[-1] - growing[-2]) / 50
    assert found["fastest"] == pytest.approx(step / spike.speed_limit(CONFIG))


def test_too_few_probes_are_no_line_and_a_level_run_has_no_head():
    assert np.isnan(spike.growth(made_run([2.0] * 18 + [9.0, 9.0]))["r2"])
    with pytest.raises(UserError, match="no head of r takes off with factor=2: take less"):
        spike.growth(made_run([2.0] * 20))


def test_no_step_of_adam_is_beyond_the_limit():
    weight = torch.nn.Parameter(torch.zeros(64, 384, dtype=torch.float64))
    adam = torch.optim.Adam([weight], CONFIG["lr"], (CONFIG["beta1"], CONFIG["beta2"]), eps=0)
    longest = 0.0
    for i in range(300):  # the worst gradients grow, and then go on as they decay
        weight.grad = torch.full_like(weight, (CONFIG["beta2"] / CONFIG["beta1"]) ** i)
        before = weight.detach().clone()
        adam.step()
        if i > 100:
            longest = max(longest, (weight.detach() - before).norm().item())
    assert 0.95 < longest / spike.speed_limit(CONFIG) <= 1


def test_an_error_counts_by_its_share_of_the_recent_gradient():
    steps = np.arange(100, 160)
    errors = pd.DataFrame(dict(step=steps, error_norm=1.0, grad_norm=4.0), index=steps)
    metrics = pd.DataFrame(dict(step=steps, grad_norm=0.5))
    run = SimpleNamespace(info=dict(config=CONFIG), metrics=metrics)
    unit = CONFIG["lr"] * (384**2 / 6) ** 0.5
    assert spike.adam_steps(run, errors).error_norm.to_numpy() == pytest.approx(unit / 4)
    clipped = spike.adam_steps(
        SimpleNamespace(info=run.info, metrics=metrics.assign(grad_norm=5.0)), errors
    )
    assert clipped.error_norm.to_numpy() == pytest.approx(unit / 4)  # both are clipped
    fading = errors.assign(grad_norm=np.where(steps < 110, 4.0, 1.0))
    assert spike.adam_steps(run, fading).error_norm.iloc[-1] == pytest.approx(unit, rel=0.6)


def test_a_window_of_steps():
    window = signs.windows()["fa2-b"]
    errors, found = spike.course(window), spike.steps(window)
    assert len(errors) == 200 and set(zip(errors.layer, errors["head"])) == {window.head}  # noqa: B905
    whole, pieces = found.iloc[-1], found.iloc[:-1]
    assert pieces.measured.sum() == pytest.approx(whole.measured)
    assert whole.predicted <= 1.3 * pieces.predicted.sum()  # a sketch is off by a fifth
    assert spike.projected(window) == pytest.approx(1, abs=0.36)  # twice 18 %
    ends = pd.DataFrame(dict(predicted=[2.0, 1.0, 1.0], measured=[1.0, 4.0, -1.0]))
    assert spike.factor_off(ends).tolist() == pytest.approx([2, 4, np.inf])
    course = pd.DataFrame(dict(x=[1.0, 1.0, 7.0, 9.0, 9.0, 9.0, 3.0, 3.0]))
    assert spike.last_over_first(course, "x") == 3


@pytest.fixture(scope="module")
def failing():
    capture = Capture.load(data_root() / "captures/fa2-b-seed4-1580.xz").first(192)
    return spike.specimen(capture)


def test_the_exact_gradient_is_close_to_that_of_stored_keys(failing):
    stored = rivals.exact_gradient(failing.capture)[0]
    assert ((failing.gradient - stored).norm() / stored.norm()).item() < 0.3
    assert torch.allclose(failing.p.sum(-1), torch.ones(1, dtype=torch.float64))
    assert failing.site is None and failing.centred.mean(-2).abs().max() < 1e-12


def test_centred_keys_are_the_same_attention_and_mend_it(failing):
    centred = scores.probabilities(failing.q, failing.centred, failing.capture.scale)
    assert scores.total_variation(failing.p, centred) < 1e-11
    assert spike.broken(failing, failing.centred) < spike.broken(failing) / 3
    assert spike.output_error(failing, failing.centred) < spike.output_error(failing)
    assert spike.gradient_error(failing, failing.centred) < spike.gradient_error(failing) / 2
    unrounded = dict.fromkeys("s p l o_acc o dodo dp p_bwd ds".split(), "fp32")
    few = spike.gradient_error(failing, **unrounded)  # of q and k alone
    assert 0 < few < spike.gradient_error(failing) / 5


def test_the_output_error_is_that_of_the_policy(failing):
    policy = failing.capture.policy.replace(o="fp32", p="fp32")
    assert spike.output_error(failing, policy=policy) < spike.output_error(failing)
    v = failing.capture.tensors["v"]
    t = emulate(failing.q.bfloat16(), failing.k.bfloat16(), v, failing.capture.policy,
                scale=failing.capture.scale)  # fmt: skip
    off = (t.o.double() - failing.p @ v.double()).norm() / (failing.p @ v.double()).norm()
    assert spike.output_error(failing) == pytest.approx(off.item())


def test_a_common_part_breaks_p_sooner_where_scores_are_rounded():
    s = spike.specimen(
        Capture.load(data_root() / "captures/fa2-b-healthy-seed4-1580.xz").first(192)
    )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(s.p.shape, generator=generator, dtype=torch.float64)
    found = spike.sweep(s, [0.0, 16.0, 128.0, 1024.0, 8192.0], noise)
    assert (found.common.diff()[1:] > 0).all()
    assert found.common[4] - found.common[0] == pytest.approx(8192, rel=0.2)
    assert found["FA2", "measured"].is_monotonic_increasing
    fa2, low = (spike.threshold(found, policy, 0.1) for policy in ("FA2", "LOW"))
    assert found.common[1] < low < fa2 < found.common[4]
    calm = found[("LOW", "noise")] / found[("LOW", "measured")]
    assert calm[:3].between(0.6, 1.6).all()
    assert spike.output_at(found, "FA2", fa2) > 2
    with pytest.raises(UserError, match="target=0.99 is not reached"):
        spike.threshold(found, "FA2", 0.99)


def test_what_lies_along_the_drift(failing):
    pull = spike.pull(failing, 100.0, torch.Generator().manual_seed(0))
    assert (
        abs(pull["gradient"]) < abs(pull["error"]) <= 1 and pull["error"] * pull["wrong_part"] > 0
    )
    assert 0 < pull["flat"] < 1 and 0 < pull["random"] < 1
    wider, changed = spike.moved(failing, pull["wrong_part"], 0.4)
    narrower, _ = spike.moved(failing, pull["wrong_part"], -0.4)
    assert narrower < 1 < wider and 0 < changed < 1
    assert spike.moved(failing, pull["wrong_part"], 0.0) == pytest.approx((1, 0))
    assert spike.moved(failing, -pull["wrong_part"], 0.4)[0] == pytest.approx(narrower)
