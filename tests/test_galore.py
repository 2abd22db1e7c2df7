"""GaLore as the trainer has it: what is projected, on what, and when it stands still."""

import dataclasses

import pytest
import torch

from lowprec import UserError
from lowprec.training import galore
from lowprec.training.config import PRESETS, TrainConfig
from lowprec.training.loop import make_optimizer
from lowprec.training.model import GPT

TEXT = "galore,rank8,every3,scale0.5"


def small(**changes):
    return dataclasses.replace(
        TrainConfig(n_layer=1, n_head=2, n_embd=32, block_size=16), **changes
    )


def test_its_text():
    assert galore.Projection.parse("adamw") is None
    assert galore.Projection.parse(TEXT) == galore.Projection(8, 3, 0.5)
    assert galore.Projection.parse("galore,rank96") == galore.Projection(96, 200, 0.25)
    for text in ("sgd", "galore", "galore,rank0", "galore,rank4,scale0", "galore,rank4,every"):
        with pytest.raises(UserError, match="optimizer="):
            TrainConfig(optimizer=text)
    with pytest.raises(UserError, match="rank is above n_embd=32"):
        small(optimizer="galore,rank64")
    with pytest.raises(UserError, match="galore is of runs without"):
        small(optimizer="galore,rank8", amp=False, loss_scale="2^13")


def stepped(config):
    """The weights of a GPT before and after a step, and its gradients, by name."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config.model(), vocab_size=64))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    make_optimizer(config, model).step()
    return before, dict(model.named_parameters()), grads


@pytest.mark.parametrize("preset", ["tiny", "llama"])
def test_each_matrix_moves_within_its_own_gradient_s_first_directions(preset):
    pytest.importorskip("pytorch_optimizer")
    parts = dict(positions="rotary", norm="rms", mlp="swiglu", n_kv_head=1)
    changes = parts if preset == "llama" else {}
    config = dataclasses.replace(
        PRESETS["tiny"], optimizer="galore,rank8,scale0.5", lr=0.01, eps=0.0, **changes
    )
    before, after, grads = stepped(config)
    plain = stepped(dataclasses.replace(config, optimizer="adamw"))[1]
    rows = {"qkv": [64, 32, 32] if changes else [64] * 3}
    rows |= {"up": [192, 192]} if changes else {}
    for name in before:
        moved, kind = after[name] - before[name], name.split(".")[-2]
        if not name.startswith("blocks") or "norm" in name:
            torch.testing.assert_close(after[name], plain[name], rtol=1e-5, atol=1e-7)
            continue
        for step, grad in zip(
            *(t.split(rows.get(kind, [len(moved)])) for t in (moved, grads[name])), strict=True
        ):
            m, n = grad.shape
            u, _, vh = torch.linalg.svd(grad, full_matrices=False)
            kept, other = (vh[:8], grad @ vh[:8].mT) if m >= n else (u[:, :8], u[:, :8].mT @ grad)
            sign = other.sign()  # Adam's first step
            wanted = sign @ kept if m >= n else kept @ sign
            torch.testing.assert_close(step, -0.01 * 0.5 * wanted, rtol=0, atol=2e-5)


def test_a_loss_that_is_not_finite_ends_the_updates():
    pytest.importorskip("pytorch_optimizer")
    model = GPT(dataclasses.replace(small().model(), vocab_size=64))
    optimizer = make_optimizer(small(optimizer=TEXT), model)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
