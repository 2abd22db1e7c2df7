"""The model's switches: what each does, and that centred keys change nothing but rounding."""

import dataclasses

import pytest
import torch

from lowprec.training.model import GPT, GPTConfig

SMALL = GPTConfig(
    n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=64, policy="ALL_FP32", impl="oracle"
)


def made(**switches):
    """A model with weights large enough that scores matter."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, **switches))
    with torch.no_grad():
        for block in model.blocks:
            block.qkv.weight *= 20
    return model


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randint(64, (2, 3, 24), generator=g).unbind()


def test_centred_keys_are_the_same_function():
    """Loss and gradients agree to FP32 accuracy, and the keys have no mean."""
    results = []
    for switch in (False, True):
        model = made(center_keys=switch)
        loss = model(*batch())
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters()]))
        keys = model.blocks[0].heads(torch.randn(2, 24, 32))[1]
        assert (keys.mean(2).abs().max() < 1e-5 * keys.abs().max()) == switch
    (plain, gradients), (centred, others) = results
    torch.testing.assert_close(centred, plain, rtol=1e-5, atol=0)
    for a, b in zip(others, gradients, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_qk_norm_gives_rows_of_one_size():
    q, k, _ = made(qk_norm=True).blocks[0].heads(torch.randn(2, 24, 32))
    for x in (q, k):
        torch.testing.assert_close(x.square().mean(-1), torch.ones(2, 2, 24), rtol=1e-3, atol=0)


def test_gate_scales_each_element():
    model = made(gate=True)
    x = torch.randn(2, 24, 32)
    block = model.blocks[0]
    with torch.no_grad():
        block.gate.weight.zero_()
        halved = block.attend(x, None, 0)
        block.config = dataclasses.replace(block.config, gate=False)
        torch.testing.assert_close(2 * halved, block.attend(x, None, 0))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap_bounds_the_loss(cap):
    """Logits within c of 0 leave every token a probability of at least exp(-2c)/V."""
    model = made(logit_softcap=cap)
    with torch.no_grad():
        model.token.weight *= 100
    tokens, targets = batch()
    assert model(tokens, targets) <= 2 * cap + torch.log(torch.tensor(64.0))
    uncapped = GPT.loss(model, model.token(tokens), targets)
    model.config = dataclasses.replace(model.config, logit_softcap=0.0)
    assert model(tokens, targets) > uncapped
