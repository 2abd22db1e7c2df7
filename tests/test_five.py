"""The backward by five products: as the emulation, in a fixed order, and dk and dv bit by bit those
of the seven."""

import pytest
import torch
from conftest import family

pytest.importorskip("triton")
from kernel_checks import DEVICES, run, shared
from test_kernel_bias import with_blocks
from test_kernel_masks import MASKS, inputs_of, on
from test_kernels import compare

from lowprec.attention.kernels import launch
from lowprec.attention.masks import Mask
from lowprec.numerics.policy import ALL_FP32, FA2, LOW, SAFE

# NumPy, which is behind the interpreter, remarks on every infinity and NaN that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
devices = pytest.mark.parametrize("device", DEVICES)
TILED = LOW.replace(dq_acc="fp32")  # dkdv_acc is BF16
NAMES = ("more keys", "the last query at the last key", "queries beyond the keys", "one query",
         "keys on the right are padding", "window behind a cache")  # fmt: skip


@pytest.fixture
def switch(monkeypatch):
    """Five products from so many queries on, in hardware blocks of BM and BN in the interpreter."""

    def on(bm, bn, fewest=0):
        for d in launch.HEAD_DIMS:
            monkeypatch.setitem(launch.FIVE_FROM, d, fewest)
        if not launch.NATIVE:
            with_blocks(monkeypatch, bm, bn)

    return on


@devices
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy,tile,bm,bn", [(FA2, None, 32, 16), (TILED, 32, 16, 32)], ids=str)
def test_a_mask_equals_emulation(policy, tile, bm, bn, name, device, switch):
    switch(bm, bn)
    n_q, n_k, mask = MASKS[name]
    compare(*inputs_of(n_q, n_k, device), policy, tile, mask=on(mask, device))


@devices
@pytest.mark.parametrize("policy,tile", [(ALL_FP32, None), (TILED, None)], ids=str)
def test_it_repeats_bit_by_bit_and_only_dq_is_another_sum(policy, tile, device, switch):
    """Of heads that share keys. (On a GPU the two kernels have blocks of their own.)"""
    n = 70 if device == "cpu" else 1500
    inputs = shared(family("normal", (1, 2, n, 16), dtype=torch.float32, device=device), 1)
    how = dict(tile=tile, mask=Mask(causal=True, window=40))
    switch(64, 32, fewest=2**31)
    seven = run(*inputs, policy, **how)
    switch(64, 32)
    first = compare(*inputs, policy, **how)
    for _ in range(1 if device == "cpu" else 3):
        again = run(*inputs, policy, **how)
        assert all(torch.equal(x, getattr(again, name)) for name, x in vars(first).items())
    for name in ("delta", "dk", "dv") if device == "cpu" else ("delta",):
        assert torch.equal(getattr(first, name), getattr(seven, name)), name
    assert not torch.equal(first.dq, seven.dq)


@devices
def test_keys_beyond_the_end_add_nothing(device, switch):
    """Where all scores are below -88, exp(0 - L) of a key of zeros is infinite."""
    switch(16, 32)
    q, k, v, do = inputs_of(40, 40, device, "normal")
    got = compare(10 * q.abs(), -10 * k.abs(), v, do, FA2, causal=False)
    assert (got.lse < -90).any()


@pytest.mark.skipif(launch.NATIVE, reason="needs TRITON_INTERPRET=1")
def test_a_turn_that_has_not_come_is_noticed(switch, monkeypatch):
    """The interpreter never waits: a counter that is not yet there is an error."""
    switch(16, 16)
    inputs = inputs_of(40, 40, "cpu")
    run(*inputs, FA2)
    monkeypatch.setattr(launch.torch, "zeros", torch.ones)
    with pytest.raises(Exception, match="not its turn"):
        run(*inputs, FA2)


def test_what_five_products_serve(monkeypatch):
    """A sum in FP32 for which nothing is needed first, from the length that the table names."""
    table, causal = launch.FIVE_FROM, Mask(causal=True)

    def served(policy=FA2, mask=causal, d=64, n=4096):
        return launch.five_products(policy, mask, d, n)

    assert table == {} and not served(n=2**20)
    monkeypatch.setitem(table, 64, 4096)
    assert served() and served(FA2.replace(delta_from="o_split"), Mask(causal=True, window=9))
    assert not (served(n=4095) or served(d=128) or served(SAFE) or served(mask=MASKS["dense"][2]))
    for changed in (dict(dq_acc="bf16"), dict(row_sum="removed"), dict(delta_from="dp")):
        assert not served(FA2.replace(**changed))
