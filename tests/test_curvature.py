"""The curvature of a small model's loss: against finite differences and on known cases."""

import copy

import numpy as np
import pytest
import torch

from lowprec.numerics.policy import PrecisionPolicy
from lowprec.studies import dated
from lowprec.studies.curvature import (
    CHECKED,
    FINE,
    HESSIAN,
    PARAMETERS,
    ROUNDED,
    antithetic,
    common_tokens,
    curvature,
    draw_batch,
    expected_gradient,
    head_sums,
    labels,
    output_gradient,
    predict,
    rounding_error,
    signs,
    site_errors,
    sites,
    texts,
    train_small,
    whole,
)
from lowprec.studies.curvature import SIZES as PAGE_SIZES

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


@pytest.fixture(scope="module")
def text():
    return torch.randint(20, (150,), generator=torch.Generator().manual_seed(3))


def test_signs_are_the_sums_of_both_signs_and_the_curvature_is_their_mean(small, text):
    model = small[0]
    table = signs(model, text, 2, 4, 1, torch.Generator().manual_seed(4))
    assert table.groupby("way").size().to_dict() == {
        **dict.fromkeys(("as it is", "flipped", "kept out"), 2 * 6 * 4), HESSIAN: 2 * 4,
    }  # fmt: skip
    batch = draw_batch(text, 4, 12, torch.Generator().manual_seed(4))
    outputs, gradient = output_gradient(model, *batch)
    errors = rounding_error(outputs, 3)
    some = table.query("batch == 0 and rounding == 'nearest_even' and bits == 3").set_index("way")
    plus, minus = antithetic(model, batch, errors)
    for way, sums in (("as it is", plus), ("flipped", minus)):
        assert some.loc[way, ["eps", "abs", "squares"]].to_numpy().T.ravel().tolist() == (
            sums.flatten().tolist()
        )
    kept_out = head_sums((gradient * errors).sum(-1))
    assert some.loc["kept out", "squares"].tolist() == kept_out[2].flatten().tolist()
    even = ((plus + minus)[0] / 2).numpy().ravel()
    np.testing.assert_allclose(some.eps[HESSIAN], even, rtol=0.1, atol=0.05 * abs(even).max())


def test_a_whole_text_is_read_once_by_each_model(small, text):
    table = whole({5: small[0], 6: small[0]}, text[:101], 4, 1)
    assert table.seed.tolist() == [5, 5, 6, 6] and table.piece.tolist() == [0, 1, 0, 1]
    batch = text[:48].view(4, 12), text[1:49].view(4, 12)
    errors = rounding_error(output_gradient(small[0], *batch)[0], 1)
    plus, minus = (x[0].sum().item() for x in antithetic(small[0], batch, errors))
    assert table.even[0] == pytest.approx((plus + minus) / 2)
    assert table.odd[0] == pytest.approx((plus - minus) / 2)


def test_the_first_term_is_there_where_labels_do_not_follow_the_model(small, text, monkeypatch):
    table = labels(small[0], text, 2, 4, 3, torch.Generator().manual_seed(4))
    assert len(table) == 2 * (3 + 3 + 2)
    coarse = table[(table.bits == 3) & (table.rounding == "toward_zero")].set_index("follow")
    own, rounded = coarse.loc["the model"], coarse.loc["the rounded model"]
    assert (own["first"].abs() < 0.05 * own.even).all() and (own.even > 0).all()
    assert (rounded.eps.abs() < 0.05 * rounded.even).all()
    fine = table[table.bits == FINE].groupby("follow")["first"].sum()
    assert abs(fine["power 0.9"]) > 3 * abs(fine["power 0.98"]) > 0


def test_each_site_is_rounded_alone(small, text):
    table = sites(small[0], text, 2, 4, torch.Generator().manual_seed(4))
    assert table.rounded.tolist() == 2 * list(ROUNDED)
    batch = draw_batch(text, 4, 12, torch.Generator().manual_seed(4))
    o = rounding_error(output_gradient(small[0], *batch)[0], 4)
    assert table.output[0] == pytest.approx((o.double() ** 2).sum().item(), rel=0.05)
    by_site = table.groupby("rounded").output.sum()
    assert by_site["P, a bit less"] > 2 * by_site["weights P"]


@pytest.mark.slow
def test_a_row_of_the_recorded_table_comes_out_again():
    """As near as another CPU's order of sums leaves the model that it trains."""
    size, seed = PARAMETERS["size"], PARAMETERS["seed"]
    train, held_out = texts()
    model, _ = train_small(train, PARAMETERS["train_steps"], size, seed, **PAGE_SIZES)
    bits = PARAMETERS["bits"]
    again = signs(model, held_out, 1, size, bits, torch.Generator().manual_seed(seed))
    table = dated.recorded("curvature", **PARAMETERS)["signs"]
    assert table[table.way == HESSIAN].batch.nunique() == CHECKED
    then = table[table.batch == 0].reset_index(drop=True)
    names = ["rounding", "bits", "way", "layer", "head"]
    assert then[names].equals(again[names])
    totals = [t.groupby(names[:3])["abs"].sum().drop(index=HESSIAN, level=2) for t in (then, again)]
    np.testing.assert_allclose(*totals, rtol=0.1)
