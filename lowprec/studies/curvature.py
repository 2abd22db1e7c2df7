"""Does an error of the attention output correlate with the gradient behind it? A small model.

The gradient dO is taken where the forward pass stood, at O + err and not at O. With H, the second
derivatives of the loss L with respect to the outputs, dO . err = (dL/dO) . err + err . H err + ...
The first term has the mean 0 if err is drawn at random with the mean 0, or, whatever err is, if the
labels follow the model without the error; the second has the sign of the curvature. With err and
-err on one batch, half the sum of the two dO . err is the even part, err . H err up to fourth
order, and half their difference the odd part. The model is FP32 without autocast.
"""

from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import Format, round_to
from lowprec.training.model import GPT, GPTConfig


def common_tokens(tokens, keep):
    """The most frequent tokens as ids 0 to keep - 2, all others as keep - 1; int64 tensor."""
    found, counts = np.unique(tokens, return_counts=True)
    order = found[np.lexsort((found, -counts))][: keep - 1]
    ids = np.full(int(found.max()) + 1, keep - 1)
    ids[order] = np.arange(len(order))
    return torch.from_numpy(ids[tokens])


def draw_batch(tokens, size, length, generator):
    """Inputs and targets, (size, length) each, at random places of a token stream."""
    starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    rows = tokens[starts + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def train_small(tokens, steps, size, seed, lr=3e-3, warmup=20, **sizes):
    """A GPT trained by AdamW on random batches, and its loss at each step.

    tokens: int64 stream; size: sequences a step; sizes: fields of `GPTConfig`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(impl="sdpa", **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0)
    generator, losses = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / warmup)
        loss = model(*draw_batch(tokens, size, model.config.block_size, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@contextmanager
def watch(model, error):
    """Within the block attention returns o + error(layer, o); yields the list of these, by layer.

    error gets o detached, (B, H, T, D), and returns a tensor of that shape or 0.
    """
    outputs = []

    def replacement(layer):
        def attention(q, k, v, probe=None, seed=0):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            outputs.append(o + error(layer, o.detach()))
            return outputs[-1]

        return attention

    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the others have no second derivative
        for layer, block in enumerate(model.blocks):
            block.attention = replacement(layer)
            stack.callback(delattr, block, "attention")
        yield outputs


def output_gradient(model, inputs, targets, error=lambda layer, o: 0):
    """The outputs with their error and the gradients dO of the mean loss, (layers, B, H, T, D)."""
    with watch(model, error) as outputs:
        loss = model(inputs, targets)
    gradients = torch.autograd.grad(loss, outputs)
    return torch.stack([o.detach() for o in outputs]), torch.stack(gradients)


def predict(model, inputs, error=lambda layer, o: 0):
    """The outputs with their error, a tensor a layer, and the logits that follow, (B * T, V)."""
    states = []
    hook = model.norm.register_forward_hook(lambda module, x, y: states.append(y))
    with hook, watch(model, error) as outputs:
        model(inputs, inputs)
    return outputs, F.linear(states[0], model.token.weight).float().flatten(0, 1)


def expected_gradient(model, inputs, labels, error=lambda layer, o: 0):
    """dO of the mean loss where labels come with the probabilities `labels`, (B * T, V)."""
    outputs, logits = predict(model, inputs, error)
    return torch.stack(torch.autograd.grad(F.cross_entropy(logits, labels), outputs))


def rounding_error(o, bits, rounding="nearest_even", generator=None):
    """Rounded minus exact o, for a format of 8 exponent and `bits` stored significand bits."""
    return round_to(o, Format.custom(8, bits), rounding, generator=generator) - o


def site_errors(model, inputs, policies):
    """What the roundings of each policy do to the output: (policies, layers, B, H, T, D), emulated
    minus exact, on what attention reads when nothing is rounded."""
    found = []

    def attention(q, k, v, probe=None, seed=0):
        o = oracle(q, k, v).o
        found.append(torch.stack([(emulate(q, k, v, p).o - o).float() for p in policies]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with ExitStack() as stack, torch.no_grad():
        for block in model.blocks:
            block.attention = attention
            stack.callback(delattr, block, "attention")
        model(inputs, inputs)
    return torch.stack(found, 1)


def curvature(model, inputs, targets, errors):
    """err . H err of each row, (layers, B, H, T), by a product with the Hessian at no error."""
    at = torch.zeros_like(errors).requires_grad_()
    with watch(model, lambda layer, o: at[layer]):
        loss = model(inputs, targets)
        (gradient,) = torch.autograd.grad(loss, at, create_graph=True)
        (product,) = torch.autograd.grad((gradient * errors).sum(), at)
    return (product * errors).sum(-1)


def head_sums(eps):
    """Sums of eps, |eps| and eps^2 over batch and rows: (layers, B, H, T) to (3, layers, H)."""
    return torch.stack([eps, eps.abs(), eps**2]).double().sum((2, 4))
