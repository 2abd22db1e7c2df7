"""Masks, soft cap, sinks, bias and dropout: what they mean, with every rounding in its place."""

import pytest
import torch
from conftest import family

from lowprec import UserError, sdpa
from lowprec.attention import attention
from lowprec.attention.inputs import kept
from lowprec.attention.masks import Mask, Scores, packed
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import keyed_bits
from lowprec.numerics.policy import ALL_FP32, DROPOUT, FA2, LOW, SAFE

N = 24
IDS = torch.tensor([[0] * 9 + [1] * 15, [0] * 3 + [1] * 3 + [2] * 18])
MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "offset": Mask(causal=True, offset=5),
    "behind": Mask(causal=True, offset=-4),
    "window": Mask(causal=True, window=6),
    "keys": Mask(causal=True, keys=torch.tensor([[0, 20], [7, 24]])),
    "documents": Mask(causal=True, documents=IDS),
    "dense": Mask(dense=torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(1)) < 0.5),
    "both": Mask(causal=True, documents=IDS, dense=torch.ones(4, N, N).triu(-8).bool()),
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def scored(**which):
    g = torch.Generator().manual_seed(2)
    parts = dict(softcap=1.5, bias=torch.randn(4, N, N, generator=g),
                 sinks=torch.randn(4, generator=g))  # fmt: skip
    return {name: value for name, value in parts.items() if which.get(name)}


SCORES = [{}, dict(softcap=1), dict(bias=1), dict(sinks=1), dict(softcap=1, bias=1, sinks=1)]
scores = pytest.mark.parametrize("which", SCORES, ids=lambda x: "+".join(x) or "plain")


def by_hand(mask, n_q=N, n_k=N, batch=2):
    """(B, 1 or H, L, S) of a mask, row by row, from its definition."""
    seen = torch.ones(batch, 4, n_q, n_k, dtype=torch.bool)
    for b in range(batch):
        for i in range(n_q):
            for j in range(n_k):
                ok = not mask.causal or j <= i + mask.offset
                ok = ok and (not mask.window or j > i + mask.offset - mask.window)
                if mask.keys is not None:
                    ok = ok and mask.keys[b, 0] <= j < mask.keys[b, 1]
                if mask.documents is not None:
                    ok = ok and mask.documents[b, i] == mask.documents[b, j]
                seen[b, :, i, j] = bool(ok)
    return seen if mask.dense is None else seen & mask.dense


def textbook(q, k, v, seen, softcap=0.0, bias=None, sinks=None, keep=None, dropout=0.0):
    """Attention as its formula says, for autograd."""
    s = q @ k.mT / q.shape[-1] ** 0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[2]] * seen.any(-1, keepdim=True)
    return (p if keep is None else p * keep / (1 - dropout)) @ v


def leaves_of(which, mask_shape=N, dtype=torch.float64):
    q, k, v, do = (x.to(dtype) for x in family("normal", (2, 4, N, 16), dtype=torch.float64))
    parts = {n: x if n == "softcap" else x.to(dtype) for n, x in scored(**which).items()}
    leaves = [q, k, v, *(x for n, x in parts.items() if n != "softcap")]
    return [x.requires_grad_() for x in leaves], parts, do


@masks
@scores
def test_the_oracle_is_the_formula(mask, which):
    leaves, parts, do = leaves_of(which)
    o = attention(*leaves[:3], impl="oracle", mask=mask, scores=Scores(**parts))
    wanted = textbook(*leaves[:3], by_hand(mask), **parts)
    for a, b in zip(
        (o, *torch.autograd.grad(o, leaves, do)),
        (wanted, *torch.autograd.grad(wanted, leaves, do)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@masks
@scores
@pytest.mark.parametrize("tile", [None, 8])
def test_without_roundings_the_emulation_is_the_oracle(mask, which, tile):
    leaves, parts, do = leaves_of(which, dtype=torch.float32)
    how = dict(mask=mask, scores=Scores(**parts))
    o = attention(*leaves[:3], ALL_FP32, impl="emulate", tile=tile, **how)
    t = oracle(*(x.detach() for x in leaves[:3]), do=do, **how)
    wanted = [t.dq, t.dk, t.dv, *(getattr(t, f"d{n}") for n in parts if n != "softcap")]
    for a, b in zip((o, *torch.autograd.grad(o, leaves, do)), (t.o, *wanted), strict=True):
        torch.testing.assert_close(a.double(), b.reshape(a.shape), rtol=1e-4, atol=2e-5)


def test_a_dense_mask_is_the_causal_one_bit_by_bit(inputs):
    q, k, v, do = inputs
    dense = Mask(dense=torch.ones(96, 96, dtype=torch.bool).tril())
    for policy, tile in ((SAFE, None), (LOW.replace(row_sum="refined"), 32)):
        a, b = emulate(q, k, v, policy, tile, do), emulate(q, k, v, policy, tile, do, mask=dense)
        assert all(torch.equal(vars(a)[n], vars(b)[n]) for n in vars(a))


@pytest.mark.parametrize("field", ["s", "x", "p", "l", "o_acc", "o", "dodo", "dp", "p_bwd", "ds",
                                   "dq_acc", "dkdv_acc"])  # fmt: skip
def test_every_site_rounds_under_a_mask(field):
    """A number of a row that sees keys is of the site's format, and differs from the unrounded."""
    leaves, parts, do = leaves_of(dict(softcap=1, bias=1, sinks=1), dtype=torch.float32)
    how = dict(mask=MASKS["window"], scores=Scores(**parts), dropout=0.2, seed=3)
    leaves = [x.detach() for x in leaves[:3]]
    plain, rounded = (emulate(*leaves, p, 8, do, **how)
                      for p in (ALL_FP32, ALL_FP32.replace(**{field: "bf16"})))  # fmt: skip
    name = {"dodo": "delta", "dq_acc": "dq", "dkdv_acc": "dv"}.get(field, field)
    value = getattr(rounded, name)
    assert not torch.equal(value, getattr(plain, name))
    if field not in ("dodo", "dq_acc", "dkdv_acc"):  # sums, or scaled after the last rounding
        assert torch.equal(value, value.bfloat16().float())


def test_rows_that_see_nothing_give_zeros():
    q, k, v, do = family("normal", (1, 2, 16, 32))
    dense = torch.ones(16, 16, dtype=torch.bool).tril()
    dense[5] = False
    for policy in (SAFE, LOW, FA2.replace(row_sum="refined"), SAFE.replace(delta_from="dp")):
        t = emulate(q, k, v, policy, 8, do, mask=Mask(dense=dense))
        assert (t.o[:, :, 5] == 0).all() and (t.dq[:, :, 5] == 0).all()
        assert (t.lse[:, :, 5] == -torch.inf).all()
        for x in (t.o, t.dq, t.dk, t.dv):
            assert x.isfinite().all()


def test_a_sink_takes_its_share_of_the_row_sum():
    leaves, parts, do = leaves_of(dict(sinks=1))
    t = oracle(*(x.detach() for x in leaves[:3]), do=do, scores=Scores(**parts))
    assert t.ds.sum(-1).abs().max() > 0.1 and t.row_sum.abs().max() < 1e-13
    for row_sum in ("removed", "refined"):
        policy = ALL_FP32.replace(row_sum=row_sum)
        got = emulate(*(x.detach().float() for x in leaves[:3]), policy, do=do.float(),
                      scores=Scores(sinks=parts["sinks"].detach()))  # fmt: skip
        torch.testing.assert_close(got.dq.double(), t.dq, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", [{}, dict(softcap=1), dict(softcap=1, sinks=1, bias=1)], ids=str)
def test_refined_mends_delta_also_under_a_cap(which):
    """With O in BF16 all of the error is delta's, and row sums have it: for bias and sinks, too."""
    leaves, parts, do = leaves_of(which, dtype=torch.float32)
    given = [x.detach() for x in leaves[:3]]
    parts = {name: x if name == "softcap" else x.detach() for name, x in parts.items()}
    how = dict(mask=Mask(causal=True), scores=Scores(**parts))
    exact = oracle(*given, do=do, **how)
    names, errors = [x for x in ("dq", "dk", "dbias", "dsinks") if hasattr(exact, x)], {}
    for row_sum in ("as_rounded", "refined"):
        t = emulate(*given, ALL_FP32.replace(o="bf16", row_sum=row_sum), do=do, **how)
        errors[row_sum] = [(getattr(t, x) - getattr(exact, x)).norm() for x in names]
    for left, whole in zip(errors["refined"], errors["as_rounded"], strict=True):
        assert left < 0.01 * whole


# Dropout


def test_dropout_is_of_the_seed_and_the_backward_has_the_same():
    leaves, _, do = leaves_of({}, dtype=torch.float32)
    eye = torch.eye(N).expand(2, 4, N, N)
    q, k = (x.detach() for x in leaves[:2])
    how = dict(mask=Mask(causal=True), dropout=0.3, seed=5)
    p, kept = (emulate(q, k, eye, ALL_FP32, **how | dict(dropout=x)).o for x in (0.0, 0.3))
    keep = kept != 0
    torch.testing.assert_close(kept, p * keep / 0.7)
    seen = p > 0
    assert abs((keep & seen).sum() / seen.sum() - 0.7) < 0.03
    o = attention(*leaves, ALL_FP32, impl="emulate", **how)
    wanted = textbook(*leaves, by_hand(Mask(causal=True)), keep=keep, dropout=0.3)
    for a, b in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(wanted, leaves, do),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [None, 8])
def test_dropout_does_not_depend_on_the_tile(tile):
    leaves, _, _ = leaves_of({}, dtype=torch.float32)
    q, k, v = (x.detach() for x in leaves)
    got = emulate(q, k, v, ALL_FP32, tile, dropout=0.5, seed=1).o
    exact = oracle(q, k, v, dropout=0.5, seed=1).o
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


def test_torchs_seed_repeats_dropout_of_the_drop_in():
    def run(seed):
        torch.manual_seed(seed)
        leaves = [x.requires_grad_() for x in family("normal", (1, 2, 32, 16))[:3]]
        first, second = (sdpa(*leaves, dropout_p=0.2, is_causal=True) for _ in range(2))
        assert not torch.equal(first, second)
        return [first, *torch.autograd.grad(first.float().sum(), leaves)]

    one, again, other = (run(s) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])


def test_all_weights_dropped_is_zero():
    q, k, v, do = family("normal", (1, 2, 16, 16))
    t = emulate(q, k, v, SAFE, do=do, dropout=1.0)
    assert all((x == 0).all() for x in (t.o, t.dq, t.dk, t.dv))


def test_dropout_has_random_bits_that_nothing_else_draws():
    shape = (1, 2, 16, 16)
    place = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    keep = kept(shape, 0.5, 3, "cpu")
    for stream in range(DROPOUT):
        alike = (keep == (keyed_bits(3, stream, *place) >= 2**31)).double().mean()
        assert abs(alike - 0.5) < 0.2, stream


# Documents


def test_tokens_of_a_packed_sequence():
    assert packed(torch.tensor([0, 3, 8]), 8).tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]


def test_documents_do_not_reach_each_other():
    q, k, v, _ = family("normal", (1, 2, 8, 16))
    mask = Mask(causal=True, documents=packed(torch.tensor([0, 3, 8]), 8))
    whole = sdpa(q, k, v, mask, impl="emulate")
    for part in (slice(0, 3), slice(3, 8)):
        alone = sdpa(*(x[:, :, part] for x in (q, k, v)), is_causal=True, impl="emulate")
        torch.testing.assert_close(whole[:, :, part], alone, rtol=2.0**-7, atol=1e-6)


def test_documents_of_queries_and_of_keys_may_be_given_apart():
    q, k, v, _ = family("normal", (1, 2, 8, 16))
    ids = packed(torch.tensor([0, 3, 8]), 8)
    whole, last = (
        emulate(x, k, v, ALL_FP32, mask=Mask(documents=of)).o
        for x, of in ((q, ids), (q[:, :, 2:], (ids[:, 2:], ids)))
    )
    assert torch.equal(last, whole[:, :, 2:])


# What is refused


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda: Mask(window=4), "window=4.*causal=True"),
        (lambda: Mask(causal=True, window=3.5), "window=3.5, offset=0.: both count keys, so"),
        (lambda: Mask(causal=True, offset=1.0), "offset=1.0.: both count keys, so they are whole"),
        (lambda: Mask(causal=True, window=-1), "window=-1"),
        (lambda: Mask(offset=2), "offset=2"),
        (lambda: Mask(dense=torch.zeros(2, 2)), "boolean, not torch.float32.*bias"),
        (lambda: Scores(softcap=-1.0), "softcap=-1.0"),
        (lambda: Scores(softcap=float("inf")), "softcap=inf"),
        (lambda: Scores(bias=torch.ones(2, 2).bool()), "bias.*torch.bool"),
        (lambda: Scores(sinks=torch.zeros(3)), r"sinks.*\(2,\), not \(3,\)"),
        (
            lambda: Scores(bias=torch.zeros(3, 8, 8)),
            r"\(3, 8, 8\) does not broadcast to \(1, 2, 8, 8\)",
        ),
        (lambda: Mask(dense=torch.ones(9, 9).bool()), r"\(9, 9\) does not broadcast"),
        (lambda: Mask(documents=([0] * 8, None)), r"documents=...\) takes a tensor, not a list"),
        (lambda: Scores(sinks=[0.0, 1.0]), r"sinks=...\) takes a tensor, not a list"),
        (lambda: Mask(keys=torch.tensor([0, 8])), r"keys.*\(1, 2\), not \(2,\)"),
        (lambda: Mask(documents=torch.zeros(1, 9)), r"documents.*\(1, 8\), not \(1, 9\)"),
        (lambda: Mask(documents=torch.zeros(2, 8)), r"documents.*\(1, 8\), not \(2, 8\)"),
        (lambda: torch.ones(8, 8).bool(), "must be a lowprec.attention.masks.Mask, not Tensor"),
    ],
)
def test_parts_that_do_not_fit(call, words):
    q, k, v, _ = family("normal", (1, 2, 8, 16))
    with pytest.raises(UserError, match=words):
        made = call()
        part = "scores" if isinstance(made, Scores) else "mask"
        attention(q, k, v, **{part: made})


@pytest.mark.parametrize(
    "how,words",
    [
        (
            dict(scores=Scores(softcap=3.0), policy="FA2+row_sum=removed"),
            "row_sum=removed.*soft cap",
        ),
        (dict(scores=Scores(scale=0.1), scale=0.2), "not both"),
        (dict(dropout=1.5), "dropout=1.5"),
        (dict(scores=Scores(softcap=3.0), impl="triton"), "a soft cap; use impl='emulate'"),
        (dict(scores=Scores(sinks=torch.zeros(2)), impl="sdpa"), "does not have sinks"),
        (dict(mask=Mask(causal=True, window=2), impl="sdpa_forward"), "takes neither masks"),
        (
            dict(mask=Mask(causal=True, window=2), impl="triton", policy="FA2+l_floor=0.1"),
            "l_floor under such a mask",
        ),
    ],
)
def test_what_does_not_go_together(how, words):
    if how.get("impl") == "triton":
        pytest.importorskip("triton")
    q, k, v, _ = family("normal", (1, 2, 8, 16))
    with pytest.raises(UserError, match=words):
        attention(q, k, v, **how)


def test_pytorchs_kernel_takes_masks_and_biases():
    leaves, parts, _ = leaves_of(dict(bias=1), dtype=torch.float32)
    how = dict(mask=MASKS["both"], scores=Scores(**parts))
    o = attention(*leaves[:3], impl="sdpa", **how)
    exact = oracle(*(x.detach() for x in leaves[:3]), **how).o
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["emulate", "oracle"])
@pytest.mark.parametrize("policy", ["ALL_FP32", "SAFE"])
def test_no_sink_beside_a_row_that_sees_no_key(impl, policy):
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 4, 8).unbind())
    sinks = torch.tensor([-torch.inf, 0.0], requires_grad=True)
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[1] = False
    how = dict(policy=policy, impl=impl)
    o = sdpa(q, k, v, seen, scores=Scores(sinks=sinks), **how)
    grads = torch.autograd.grad(o.sum(), (q, k, v, sinks))
    assert not o[0, :, 1].any() and all(g.isfinite().all() for g in grads) and grads[3][0] == 0
    bare = sdpa(q[:, :1], k[:, :1], v[:, :1], seen, **how)
    torch.testing.assert_close(o[:, :1], bare, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shift", ["none", "beta(beta=7)", "pow2", "offset(amplitude=2)"])
def test_a_sink_of_minus_infinity_is_none(shift):
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    policy, gone = f"ALL_FP32+shift={shift}", torch.full((2,), -torch.inf)
    with_gone = sdpa(q, k, v, policy=policy, scores=Scores(sinks=gone))
    torch.testing.assert_close(with_gone, sdpa(q, k, v, policy=policy, impl="emulate"))


def test_a_bias_of_keys_that_nobody_sees_is_cut_with_them():
    q, k, v = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    bias, how = torch.randn(4, 7), dict(is_causal=True, policy="ALL_FP32")
    o = sdpa(q, k, v, scores=Scores(bias=bias), **how)
    few = sdpa(q, k[:, :, :4], v[:, :, :4], scores=Scores(bias=bias[:, :4]), **how)
    assert torch.equal(o, few)
    one = sdpa(q, k, v, scores=Scores(bias=bias[:, :1]), **how)
    torch.testing.assert_close(one, sdpa(q, k, v, **how))


def test_a_bias_has_the_gradient_of_the_refined_delta():
    q, k, v, do = family("tied")
    bias = torch.zeros(1, 1, 96, 96)
    traces = {p: emulate(q, k, v, p, do=do, scores=Scores(bias=bias)) for p in ("FA2", "SAFE")}
    left = {p: t.dbias.sum(-1).abs().mean() for p, t in traces.items()}
    assert left["SAFE"] < 0.3 * left["FA2"]


@torch.no_grad()
def test_a_bias_of_a_dtype_that_pytorch_refuses_is_ours():
    q, k, v = (
        torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i in range(3)
    )
    bias = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).half()
    o = sdpa(q, k, v, scores=Scores(bias=bias))
    assert torch.allclose(
        o.float(), sdpa(q.float(), k.float(), v.float(), bias.float(), policy="ALL_FP32"), atol=0.02
    )
