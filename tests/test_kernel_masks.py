"""The Triton kernels under masks and biases, against the emulation, as everything else there."""

import pytest
import torch
from conftest import family

pytest.importorskip("triton")
from kernel_checks import DEVICES, beyond_bounds, every, run, shared
from test_kernels import compare

from lowprec import UserError, sdpa
from lowprec.attention import attention, operator
from lowprec.attention.kernels import launch
from lowprec.attention.masks import Mask, Scores
from lowprec.attention.reference import emulate
from lowprec.numerics.policy import ALL_FP32, FA2, LOW, RELEASED, SAFE

# NumPy, which is behind the interpreter, remarks on every infinity and NaN that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def dense(*shape, blind=False):
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    if not blind:
        seen[..., 0] = True
    return seen


@pytest.mark.parametrize("x", ["e4m3fn", "e2m3_saturate", "e3m2_saturate", "e5m2", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_format_without_infinity_does_not_show_what_is_hidden(x, device):
    q, k, v = (t.to(device) for t in torch.randn(3, 1, 1, 70, 16))
    other = v.clone()
    other[:, :, 40:] += 1000.0  # hidden from the first 40 queries
    found = {}
    for impl in ("emulate", "triton"):
        how = dict(is_causal=True, policy=f"ALL_FP32+x={x}", impl=impl)
        a, b, ones = (sdpa(q, k, values, **how) for values in (v, other, torch.ones_like(v)))
        assert torch.equal(a[:, :, :40], b[:, :, :40])
        torch.testing.assert_close(ones, torch.ones_like(ones), rtol=1e-5, atol=0)
        found[impl] = a
    torch.testing.assert_close(*found.values(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("s", ["e4m3fn", "e4m3fn_saturate", "fp16_saturate", "e5m2"])
@pytest.mark.parametrize("shift", ["none", "pow2"])
@pytest.mark.parametrize("device", DEVICES)
def test_scores_without_infinity_show_no_hidden_key(s, shift, device):
    """In rows of which a block hides all keys, and in rows that see none at all."""
    q, k, v, do = (t.to(device) for t in torch.randn(4, 1, 2, 40, 16))
    seen = torch.ones(40, 40, dtype=torch.bool, device=device).tril()
    seen[5:8] = False
    policy = f"ALL_FP32+s={s}+shift={shift}"
    for how in (dict(causal=True, tile=16), dict(mask=Mask(dense=seen))):
        found = [
            operator.trace(q, k, v, do, policy, impl=impl, **how) for impl in ("emulate", "triton")
        ]
        for name in ("o", "dq", "dk", "dv"):
            a, b = (getattr(t, name) for t in found)
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("number", [-1e9, -1e10, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("policy", ["FA2", "ALL_FP32"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_that_drowns_a_row_is_as_in_the_emulation(policy, number, device):
    inputs = [t.to(device) for t in torch.randn(4, 1, 2, 40, 16)]
    bias = torch.zeros(1, 1, 40, 40, device=device)
    bias[:, :, 3] = number
    how = dict(causal=False, scores=Scores(bias=bias))
    a, b = (operator.trace(*inputs, policy, impl=impl, **how) for impl in ("emulate", "triton"))
    for name in ("o", "dq", "dk", "dv"):
        error = (getattr(a, name) - getattr(b, name)).norm() / getattr(a, name).norm()
        assert error < (1e-5 if policy == "ALL_FP32" else 1e-2), (name, error)


@pytest.mark.parametrize("device", DEVICES)
def test_no_limit_may_be_a_large_number(device):
    q, k, v, do = (t.to(device) for t in torch.randn(4, 1, 2, 40, 16))

    def gradients(mask):
        t = operator.trace(q, k, v, do, "ALL_FP32", mask=mask, impl="triton")
        return [t.o, t.dq, t.dk, t.dv]

    whole, causal = gradients(Mask()), gradients(Mask(causal=True))
    for window in (40, 2**31 - 20, 2**31 - 1, 2**40):
        found = gradients(Mask(causal=True, window=window))
        assert all(map(torch.equal, found, causal)), window
    for end in (40, 2**31, 2**63 - 1):
        found = gradients(Mask(keys=torch.tensor([[-(2**40), end]], device=device)))
        assert all(map(torch.equal, found, whole)), end
    with pytest.raises(UserError, match="in 32 bits; offset=2147483647 is beyond"):
        gradients(Mask(causal=True, offset=2**31 - 1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_may_have_rows_far_apart(device):
    q, k, v, do = (t.bfloat16().to(device) for t in torch.randn(4, 1, 1, 40, 16))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = attention(*leaves, "FA2", impl="triton")
    right = torch.autograd.grad(o, leaves, do, retain_graph=True)
    far = torch.empty(39 * 2**26 + 16, dtype=do.dtype, device=device)  # 5 GB, hardly touched
    far = far.as_strided(do.shape, (0, 0, 2**26, 1)).copy_(do)
    found = torch.autograd.grad(o, leaves, far)
    assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("changed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_a_saved_output_may_come_back_in_another_layout(changed, device):
    """From a hook that offloads some of the saved tensors: of both outputs, or of one."""
    q, k, v, do = (t.bfloat16().to(device) for t in torch.randn(4, 1, 4, 40, 16))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def gradients(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            o = attention(*leaves, "FA2+delta_from=o_fp32", impl="triton")
        return torch.autograd.grad(o, leaves, do)

    right = gradients(lambda t: t)
    again = gradients(lambda t: t.contiguous() if t.dtype == changed else t)
    assert all(torch.equal(a, b) for a, b in zip(again, right, strict=True))


MASKS = {
    # queries, keys, mask
    "more keys": (37, 70, Mask()),
    "fewer keys": (70, 37, Mask()),
    "the last query at the last key": (37, 70, Mask(causal=True, offset=33)),
    "the first query at the first key": (37, 70, Mask(causal=True)),
    "queries beyond the keys": (70, 37, Mask(causal=True)),
    "one query": (1, 70, Mask(causal=True, offset=69)),
    "keys on the right are padding": (70, 70, Mask(causal=True, keys=torch.tensor([[0, 45]]))),
    "a range of keys for all": (70, 70, Mask(keys=torch.tensor([[33, 51]]))),
    "window": (70, 70, Mask(causal=True, window=20)),
    "window behind a cache": (37, 70, Mask(causal=True, offset=33, window=20)),
    "dense": (70, 70, Mask(dense=dense(1, 1, 70, 70))),
    "dense, one row for all": (37, 70, Mask(dense=dense(1, 1, 1, 70))),
    "one row for all, in a window":
        (70, 70, Mask(causal=True, window=20, dense=dense(1, 1, 1, 70))),
    "dense and causal": (70, 70, Mask(causal=True, dense=dense(1, 1, 70, 70))),
}  # fmt: skip
masks = pytest.mark.parametrize("case", MASKS.values(), ids=MASKS)
devices = pytest.mark.parametrize("device", DEVICES)


def inputs_of(n_q, n_k, device, name="tied", heads=(1, 1), d=16, **how):
    q, k, v, do = family(name, (*heads, max(n_q, n_k), d), device=device, **how)
    return q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k], do[:, :, :n_q]


def on(mask, device):
    parts = {n: x.to(device) for n in ("keys", "dense") if (x := getattr(mask, n)) is not None}
    return Mask(mask.causal, mask.offset, mask.window, **parts)


@devices
@masks
@pytest.mark.parametrize("policy,tile", [(LOW, None), (SAFE, 32)], ids=str)
def test_a_mask_equals_emulation(case, policy, tile, device):
    n_q, n_k, mask = case
    compare(*inputs_of(n_q, n_k, device), policy, tile, mask=on(mask, device))


@devices
@pytest.mark.parametrize(
    "policy,tile",
    [
        (ALL_FP32, 64), (RELEASED.replace(l_floor=0.0), 32), (LOW.replace(delta_from="dp"), None),
        (FA2.replace(row_sum="removed"), None), (FA2.replace(row_sum="refined"), 32),
        (every("bf16:stochastic"), 32), (LOW.replace(shift="beta(beta=2,gamma=0.5,tol=0.1)"), None),
    ],
    ids=str,
)  # fmt: skip
def test_policies_under_a_window_behind_a_cache(policy, tile, device):
    n_q, n_k, mask = MASKS["window behind a cache"]
    compare(*inputs_of(n_q, n_k, device), policy, tile, mask=mask, seed=3)


@devices
@pytest.mark.parametrize("tile", [None, 32])
def test_a_mask_a_head_and_a_range_a_sequence(tile, device):
    """With keys that heads share: each mask is that of the head of queries."""
    inputs = shared(inputs_of(50, 50, device, heads=(2, 4)), 2)
    keys = torch.tensor([[0, 40], [10, 50]], device=device)
    seen = dense(2, 4, 50, 50) | torch.eye(50, dtype=torch.bool)  # of rows in the range, some key
    mask = Mask(keys=keys, dense=seen.to(device))
    got = run(*inputs, SAFE, tile, mask=mask)
    blind = ~mask.seen(50, 50, device).any(-1)
    assert not blind.any() and beyond_bounds(got, inputs, SAFE, tile, mask=mask) == []


@devices
@pytest.mark.parametrize("shape", [(1, 1, 70, 70), (1, 1, 1, 70)], ids=str)
@pytest.mark.parametrize("policy,tile", [(SAFE, None), (LOW.replace(s="fp32"), 32), (LOW, None)])
def test_a_bias_equals_emulation(shape, policy, tile, device):
    bias = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    bias[..., 5:9] = -torch.inf
    mask = Mask(causal=True)
    compare(*inputs_of(70, 70, device), policy, tile, mask=mask, bias=bias.to(device))


@devices
@pytest.mark.parametrize("kind", ["dense", "keys", "bias", "offset"])
@pytest.mark.parametrize("tile", [None, 32])
def test_rows_that_see_nothing(kind, tile, device):
    q, k, v, do = inputs_of(70, 70, device)
    seen = torch.ones(70, 70, dtype=torch.bool, device=device).tril()
    seen[40:44] = False
    bias = torch.zeros(1, 1, 70, 70, device=device).masked_fill(~seen, -torch.inf)
    how = {
        "dense": dict(mask=Mask(dense=seen[None, None])), "bias": dict(mask=Mask(), bias=bias),
        "keys": dict(mask=Mask(causal=True, keys=torch.tensor([[35, 60]], device=device))),
        "offset": dict(mask=Mask(causal=True, offset=-30)),
    }[kind]  # fmt: skip
    got = run(q, k, v, do, SAFE, tile, **how)
    t = emulate(q, k, v, SAFE, tile, do, mask=how["mask"], scores=Scores(bias=how.get("bias")))
    blind = t.lse == -torch.inf
    assert 1 < blind.sum() < 40 and torch.equal(got.lse == -torch.inf, blind)
    for name in ("o", "dq"):
        assert (getattr(got, name)[blind] == 0).all()
    for name in ("o", "lse", "dq", "dk", "dv"):
        a, b = (getattr(x, name).double() for x in (got, t))
        keep = b.isfinite()
        assert (a[keep] - b[keep]).norm() < 0.01 * b[keep].norm()


@pytest.mark.parametrize("device", DEVICES[:1])
def test_a_dense_causal_mask_is_the_causal_one_bit_by_bit(device):
    """In the interpreter. Compiled, the two may add a row's weights up in another order."""
    inputs = inputs_of(70, 70, device)
    seen = torch.ones(1, 1, 70, 70, dtype=torch.bool, device=device).tril()
    for policy, tile in ((LOW, None), (RELEASED.replace(l_floor=0.0), 32)):
        plain, masked = (run(*inputs, policy, tile, **how)
                         for how in ({}, dict(mask=Mask(dense=seen))))  # fmt: skip
        for name in vars(plain):
            assert torch.equal(getattr(plain, name), getattr(masked, name)), name


# Through the operator


@pytest.mark.parametrize("sizes", [(24, 24), (16, 40), (40, 16)], ids=str)
def test_head_sizes_are_padded(sizes):
    """Zeros beyond the head size change no product, and the scale is that of the size itself."""
    d, of_values = sizes
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, 40, n, generator=g).bfloat16().requires_grad_()
              for n in (d, d, of_values)]  # fmt: skip
    seen = dense(1, 1, 40, 40)
    results = []
    for impl in ("triton", "emulate"):
        o = sdpa(*leaves, attn_mask=seen, impl=impl)
        results.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    for got, wanted in zip(*results, strict=True):
        assert got.shape == wanted.shape
        assert (got.double() - wanted.double()).norm() <= 0.01 * wanted.double().norm()


@pytest.mark.parametrize(
    "how,words",
    [
        (dict(scores=Scores(softcap=3.0)), "a soft cap"),
        (dict(scores=Scores(sinks=torch.zeros(2))), "sinks"),
        (dict(dropout=0.5), "dropout"),
        (dict(scores=Scores(bias=torch.zeros(8, 8, requires_grad=True))), "the gradient of a bias"),
        (dict(mask=Mask(causal=True, window=3), policy="RELEASED"), "l_floor under such a mask"),
    ],
)
def test_what_the_kernels_lack_is_emulated_and_told_once(how, words, monkeypatch):
    """On a GPU, by "auto"; the device is said to be one."""
    monkeypatch.setattr(operator, "resolve_impl", lambda impl, device: "triton")
    monkeypatch.setattr(operator, "_told", set())
    q, k, v, _ = family("normal", (1, 2, 8, 16))
    how = dict(policy="FA2") | how
    with pytest.warns(UserWarning, match=f"do not have {words}: attention is emulated"):
        o = attention(q, k, v, **how)
    assert torch.equal(o, attention(q, k, v, **how, impl="auto"))
    with pytest.raises(UserError, match=f"{words}; use impl='emulate'"):
        attention(q, k, v, **how, impl="triton")


def test_a_bias_that_needs_a_gradient_is_no_lack_where_none_is_asked_for(monkeypatch, recwarn):
    monkeypatch.setattr(operator, "resolve_impl", lambda impl, device: "triton")
    monkeypatch.setattr(operator, "_told", set())
    q, k, v, _ = family("normal", (1, 2, 8, 16))
    bias = torch.randn(8, 8, requires_grad=True)
    with torch.no_grad():
        o = attention(q, k, v, scores=Scores(bias=bias))
    assert not [told for told in recwarn if "emulated" in str(told.message)]
    assert torch.equal(o, attention(q, k, v, scores=Scores(bias=bias.detach())))


@pytest.mark.parametrize("mask", [Mask(causal=True, window=4), Mask(dense=dense(1, 1, 16, 16))])
def test_the_operator_is_well_formed(mask):
    q, k, v, _ = family("normal", (1, 2, 16, 16))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = torch.zeros(1, 1, 16, 16)
    for impl, more in (("triton", bias), ("emulate", bias.requires_grad_())):
        torch.library.opcheck(
            torch.ops.lowprec.attention.default,
            (*leaves, None, "LOW", mask.causal, 0.2, 0, impl, 0, mask.dense, more, None, None, None,
             0, mask.window),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip


def wanted_blocks(seen, rows, columns, suffix):
    """`blocks_seen_kernel`, block by block."""
    found = []
    for start in range(0, len(seen), rows):
        blocks = seen[start : start + rows].split(columns, 1)
        some, whole = ([bool(x.any()) for x in blocks],
                       [bool(x.all()) and x.shape[1] == columns for x in blocks])  # fmt: skip
        if not any(some):
            found.append((0, 0))
            continue
        begin, end = some.index(True), len(some) - some[::-1].index(True)
        run = whole[begin:end][::-1] if suffix else whole[begin:end]
        length = (run + [False]).index(False)
        mid = end - length if suffix else begin + length
        found.append((begin * columns, mid * columns, min(end * columns, seen.shape[1])))
    return found


@devices
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", "causal packed window padded random nothing all".split())
def test_which_blocks_a_dense_mask_leaves(name, by_keys, device):
    i, j = torch.arange(100)[:, None], torch.arange(90)
    document = torch.bucketize(torch.arange(100), torch.tensor([20, 64]), right=True)
    seen = {
        "causal": j <= i, "packed": (j <= i) & (document[:, None] == document[:90]),
        "window": (j <= i) & (j > i - 24), "padded": (j <= i) & (j >= 17), "nothing": j < 0 * i,
        "random": torch.rand(100, 90, generator=torch.Generator().manual_seed(0)) < 0.01,
        "all": j >= 0 * i,
    }[name]  # fmt: skip
    q, k = torch.zeros(1, 1, 100, 16, device=device), torch.zeros(1, 1, 90, 16, device=device)
    view = launch.mask_arguments(q, k, Mask(dense=seen[None, None].to(device)), None)
    found = launch.blocks_seen(view, dict(bm=16, bn=8), by_keys)[-2].cpu()
    wanted = wanted_blocks(*((seen.T, 8, 16) if by_keys else (seen, 16, 8)), by_keys)
    for got, want in zip(found[0, 0].tolist(), wanted, strict=True):
        assert tuple(got) == want if len(want) == 3 else got[2] == 0


@devices
def test_a_window_behind_the_start_of_a_tile(device):
    """Tiles wider than a hardware block, of which the first keys are hidden."""
    mask = Mask(causal=True, window=200)
    compare(*inputs_of(600, 600, device), RELEASED.replace(l_floor=0.0), 256, mask=mask)
