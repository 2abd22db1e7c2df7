"""Does an error of the attention output correlate with the gradient behind it? A small model.

The gradient dO is taken where the forward pass stood, at O + err and not at O. With H, the second
derivatives of the loss L with respect to the outputs, dO . err = (dL/dO) . err + err . H err + ...
The first term has the mean 0 if err is drawn at random with the mean 0, or, whatever err is, if the
labels follow the model without the error; the second has the sign of the curvature. With err and
-err on one batch, half the sum of the two dO . err is the even part, err . H err up to fourth
order, and half their difference the odd part. The model is FP32 without autocast. What the page
asks takes a minute of one core, so it reads tables:

    python -m lowprec.studies.curvature data/studies/curvature      DATE-NAME.parquet, four of them
"""

from contextlib import ExitStack, contextmanager

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec import entry
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import Format, round_to
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.records.files import data_root
from lowprec.studies import dated
from lowprec.training.data.shards import load_tokens
from lowprec.training.model import GPT, GPTConfig

SIZES = dict(n_layer=3, n_head=4, n_embd=64, block_size=64, vocab_size=1024)
PARAMETERS = dict(seed=0, train_steps=200, batches=30, size=16, bits=2)
"""Those of the page. size: sequences a batch; bits: of the coarsest format, three finer follow."""
CHECKED = 4
"""Batches with a product with the Hessian, which costs four passes."""
HESSIAN = "err·H·err"
FINE = 7
"""Stored significand bits of BF16."""
ROUNDED = {
    "O": "o=e8m4",
    "numerator Ō": "o_acc=e8m4",
    "row sum ℓ": "l=e8m5",
    "weights P": "p=e8m4",
    "P, a bit less": "p=e8m3",
    "the same, rows sum to ℓ": "p=e8m3+l_from=p_rounded",
}
"""A site of attention to the policy that rounds it alone."""


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


def _exact(q, k, v):
    shared = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


@contextmanager
def watch(model, error):
    """Within the block attention returns o + error(layer, o); yields the list of these, by layer.

    error gets o detached, (B, H, T, D), and returns a tensor of that shape or 0.
    """
    outputs = []

    def replacement(layer):
        def attention(q, k, v, probe=None, seed=0):
            o = _exact(q, k, v)
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
        return _exact(q, k, v)

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


def antithetic(model, batch, errors):
    """Sums of eps, |eps|, eps^2 with the errors and with their sign flipped; a pass for each."""
    return [
        head_sums((output_gradient(model, *batch, lambda i, o, e=e: e[i])[1] * e).sum(-1))
        for e in (errors, -errors)
    ]


# The page's measurements


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """The first nine tenths of the corpus `smoke`, to train on, and the rest, which is held out."""
    stream = load_tokens(data_root() / "corpora" / "smoke.safetensors")
    tokens = common_tokens(stream.window(0, len(stream)), SIZES["vocab_size"])
    split = int(0.9 * len(tokens))
    return tokens[:split], tokens[split:]


def signs(model, text, batches, size, bits, generator) -> pd.DataFrame:
    """Sums of eps, |eps| and eps^2 of each head, by batch, rounding and bits of the format.

    way: the error of O "as it is", "flipped", or "kept out" of the forward pass. Of CHECKED batches
    there is `curvature`, as HESSIAN, too, in the column eps.
    """
    decided, found = bits + 2, []  # coarse enough to be large, fine enough for second order
    roundings = [("nearest_even", b) for b in range(bits, bits + 4)]
    roundings += [("stochastic", b) for b in (bits, decided)]
    for number in range(batches):
        batch = draw_batch(text, size, model.config.block_size, generator)
        outputs, gradient = output_gradient(model, *batch)
        for rounding, b in roundings:
            errors = rounding_error(outputs, b, rounding, generator)
            sums = antithetic(model, batch, errors)
            ways = dict(zip(("as it is", "flipped"), sums, strict=True))
            ways["kept out"] = head_sums((gradient * errors).sum(-1))
            if rounding == "nearest_even" and b == decided and number < CHECKED:
                product = curvature(model, *batch, errors).double().sum((1, 3))
                ways[HESSIAN] = torch.stack([product, *torch.full_like(sums[0][:2], torch.nan)])
            found += [
                (number, rounding, b, way, layer, head, *sums[:, layer, head].tolist())
                for way, sums in ways.items()
                for layer, head in np.ndindex(*sums.shape[1:])
            ]
    columns = ["batch", "rounding", "bits", "way", "layer", "head", "eps", "abs", "squares"]
    return pd.DataFrame(found, columns=columns)


def whole(models, text, size, bits) -> pd.DataFrame:
    """The even and the odd part of the sum of eps, rounded to nearest, of all of a text, in pieces
    of `size` sequences. models: {seed: model}."""
    length = next(iter(models.values())).config.block_size
    pieces = [x[: len(x) // length // size * size * length].view(-1, size, length)
              for x in (text[:-1], text[1:])]  # fmt: skip
    found = []
    for seed, model in models.items():
        for number, piece in enumerate(zip(*pieces, strict=True)):
            errors = rounding_error(output_gradient(model, *piece)[0], bits)
            plus, minus = (x[0].double().sum().item() for x in antithetic(model, piece, errors))
            found.append((seed, number, (plus + minus) / 2, (plus - minus) / 2))
    return pd.DataFrame(found, columns=["seed", "piece", "even", "odd"])


def labels(model, text, batches, size, bits, generator) -> pd.DataFrame:
    """The first term and the sum of eps with the mean over labels that follow some probabilities.

    follow: "the model", "the rounded model", or the model to the power 0.9 or 0.98, "power 0.9".
    first: the sum of g . err; eps: of dO . err; even: its even part; squares: of err.
    """
    found = []
    for number in range(batches):
        inputs, targets = draw_batch(text, size, model.config.block_size, generator)
        outputs, _ = output_gradient(model, inputs, targets)
        own = predict(model, inputs)[1].detach().softmax(-1)
        flat = {f"power {x}": own**x / (own**x).sum(-1, keepdim=True) for x in (0.9, 0.98)}
        for rounding, b in (("toward_zero", bits), ("nearest_even", bits), ("toward_zero", FINE)):
            e = rounding_error(outputs, b, rounding)
            asked = flat
            if b == bits:
                lossy = predict(model, inputs, lambda i, o, e=e: e[i])[1].detach().softmax(-1)
                asked = {"the model": own, "the rounded model": lossy}
                asked["power 0.9"] = flat["power 0.9"]
            for name, follow in asked.items():
                first, seen, minus = (_expected(model, inputs, follow, e, x) for x in (0, 1, -1))
                sums = first, seen, (seen - minus) / 2, (e**2).sum().item()
                found.append((number, rounding, b, name, *sums))
    columns = ["batch", "rounding", "bits", "follow", "first", "eps", "even", "squares"]
    return pd.DataFrame(found, columns=columns)


def _expected(model, inputs, follow, errors, sign: int) -> float:
    """The sum of dO . err if the forward pass sees the error with this sign, 0 for not at all."""
    gradient = expected_gradient(model, inputs, follow, lambda i, o: sign * errors[i])
    return (gradient * errors).double().sum().item()


def sites(model, text, batches, size, generator) -> pd.DataFrame:
    """The even part of the sum of eps with one number of attention rounded at a time, of ROUNDED.

    squares: what the even part is if labels follow the model and errors of rows are unrelated,
    tokens times the sum of (g . err)^2; output: the sum of err^2.
    """
    length, found = model.config.block_size, []
    policies = [PrecisionPolicy.parse(f"ALL_FP32+{site}") for site in ROUNDED.values()]
    for number in range(batches):
        batch = draw_batch(text, size, length, generator)
        _, gradient = output_gradient(model, *batch)
        for name, errors in zip(ROUNDED, site_errors(model, batch[0], policies), strict=True):
            plus, minus = antithetic(model, batch, errors)
            squares = size * length * head_sums((gradient * errors).sum(-1))[2].sum()
            sums = (plus + minus)[0].sum() / 2, squares, (errors.double() ** 2).sum()
            found.append((number, name, *(x.item() for x in sums)))
    return pd.DataFrame(found, columns=["batch", "rounded", "even", "squares", "output"])


def measure(seed, train_steps, batches, size, bits) -> dict[str, pd.DataFrame]:
    """The tables `signs`, `whole`, `labels` and `sites`, of a model trained from a seed.

    The batches of the second to last follow those of the first in one stream of random numbers;
    `whole` has three models more, from the next seeds.
    """
    train, held_out = texts()
    models = {
        s: train_small(train, train_steps, size, s, **SIZES)[0] for s in range(seed, seed + 4)
    }
    model, generator = models[seed], torch.Generator().manual_seed(seed)
    return dict(
        signs=signs(model, held_out, batches, size, bits, generator),
        whole=whole(models, held_out, size, bits),
        labels=labels(model, held_out, min(batches, 10), size, bits + 2, generator),
        sites=sites(model, held_out, batches, size, generator),
    )


def main(argv: list[str] | None = None) -> None:
    """Measure the even and odd parts of the sum of eps of a small model, a minute of one core."""
    dated.command("curvature", main.__doc__, measure, argv, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
