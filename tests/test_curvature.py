"""The curvature of a small model's loss: against finite differences and on known cases."""

import copy

import numpy as np
import pytest
import torch

from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies.curvature import (
    common_tokens,
    curvature,
    draw_batch,
    expected_gradient,
    head_sums,
    output_gradient,
    predict,
    rounding_error,
    site_errors,
    train_small,
)

SIZES = dict(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=20)


@pytest.fixture(scope="module")
def small():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (500,), generator=generator)
    model, losses = train_small(tokens, 12, 4, seed=0, **SIZES)
    return model, losses, draw_batch(tokens, 3, 12, generator)


def test_frequent_tokens_keep_an_id_and_the_rest_share_one():
    ids = common_tokens(np.array([7, 7, 7, 3, 3, 9, 1, 1], np.uint16), keep=3)
    assert ids.tolist() == [0, 0, 0, 2, 2, 2, 1, 1]


def test_training_is_deterministic_and_lowers_the_loss(small):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (500,), generator=generator)
    again = train_small(tokens, 12, 4, seed=0, **SIZES)[1]
    assert again == small[1]
    assert again[-1] < again[0]


def test_targets_follow_inputs(small):
    inputs, targets = small[2]
    assert inputs.shape == targets.shape == (3, 12)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_without_an_error_nothing_changes(small):
    model, _, batch = small
    with torch.no_grad():
        before = model(*batch)
    _, gradient = output_gradient(model, *batch)
    assert gradient.shape == (2, 3, 2, 12, 8) and gradient.abs().max() > 0
    assert "attention" not in vars(model.blocks[0])
    with torch.no_grad():
        assert model(*batch) == before


def test_the_error_reaches_the_loss_and_the_outputs(small):
    model, _, batch = small
    clean, _ = output_gradient(model, *batch)
    shifted, _ = output_gradient(model, *batch, lambda layer, o: 0.5 if layer == 0 else 0)
    assert torch.equal(shifted[0], clean[0] + 0.5)
    assert not torch.allclose(shifted[1], clean[1])


def test_curvature_is_the_even_part_of_the_product(small, monkeypatch):
    model, _, batch = small
    model = copy.deepcopy(model).double()
    # norms and logits too, whose float32 would be what the difference of two gradients shows
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    generator = torch.Generator().manual_seed(2)
    errors = 1e-4 * torch.randn(2, 3, 2, 12, 8, generator=generator, dtype=torch.float64)
    plus = output_gradient(model, *batch, lambda layer, o: errors[layer])[1]
    minus = output_gradient(model, *batch, lambda layer, o: -errors[layer])[1]
    even = ((plus - minus) / 2 * errors).sum(-1)
    torch.testing.assert_close(curvature(model, *batch, errors), even, rtol=1e-6, atol=1e-15)


def test_labels_that_follow_a_model_leave_no_gradient_at_its_outputs(small):
    model, _, (inputs, targets) = small
    clean, _ = output_gradient(model, inputs, targets)
    errors = rounding_error(clean, 1, "toward_zero")

    def rounded(layer, o):
        return errors[layer]

    exact, lossy = predict(model, inputs)[1], predict(model, inputs, rounded)[1]
    labels = exact.detach().softmax(-1)
    assert expected_gradient(model, inputs, labels).abs().max() < 1e-7
    assert (expected_gradient(model, inputs, labels, rounded) * errors).sum() > 1e-6
    labels = lossy.detach().softmax(-1)
    assert expected_gradient(model, inputs, labels, rounded).abs().max() < 1e-7
    one_hot = torch.nn.functional.one_hot(targets.flatten(), exact.shape[1]).float()
    found = expected_gradient(model, inputs, one_hot, rounded)
    torch.testing.assert_close(found, output_gradient(model, inputs, targets, rounded)[1])


def test_rounding_error_is_at_most_half_an_ulp():
    o = torch.linspace(1, 2, 100)[:-1]
    assert rounding_error(o, 2).abs().max() <= 0.125
    assert not rounding_error(torch.tensor([1.0, 1.25, -1.5]), 2).any()


def test_sums_are_over_batch_and_rows():
    eps = torch.tensor([1.0, -2.0]).expand(4, 3, 5, 2)
    assert torch.equal(head_sums(eps)[:, 0, 0], torch.tensor([-3.0, 9.0, 15.0]).double())
    assert head_sums(eps).shape == (3, 4, 5)


def test_errors_of_a_site_are_those_of_the_unrounded_pass(small):
    model, _, batch = small
    policies = [PrecisionPolicy.parse(f"ALL_FP32+{s}") for s in ("o=e8m4", "p=e8m4", "l=e8m4")]
    o, p, row_sum = site_errors(model, batch[0], policies)
    outputs, _ = output_gradient(model, *batch)
    assert o.shape == outputs.shape
    expected = rounding_error(outputs, 4)
    assert (o - expected).norm() < 0.02 * expected.norm(), "but for ties that FP32 decides"
    assert p[..., 0, :].abs().max() < 1e-6, "a row of one key has the weight 1, which is exact"
    factor = row_sum / outputs
    spread = factor.std(-1) / factor.abs().amax(-1).clamp(min=1e-3)
    assert spread.median() < 1e-3, "one factor on the whole row"
    assert torch.equal(output_gradient(model, *batch)[0], outputs), "the model is as it was"
