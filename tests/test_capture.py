"""Captures: what is observed is what the model computed, a file replays, damage is refused; and
the error of W_Q's gradient is the difference that it is said to be."""

import dataclasses
import lzma
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FAMILIES, family

from lowprec import UserError
from lowprec.attention import attention, trace
from lowprec.numerics import agreement
from lowprec.numerics.policy import ALL_FP32, LOW, PrecisionPolicy
from lowprec.records import files
from lowprec.records.tables import write_table
from lowprec.training import capture
from lowprec.training.capture import Capture
from lowprec.training.model import GPT, GPTConfig, take_heads
from lowprec.training.probes import QueryErrorWindow, query_error, sketch_signs, sketched_sum

INFO = dict(step=7, run="low-seed0", config=dict(lr=1e-3), data_sha256="0" * 64)
T, C, H = 48, 64, 2


def small(policy="LOW", **changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, H, C, T, vocab_size=128, policy=policy, **changes))
    with torch.no_grad():  # scores of several units, as in a trained layer
        for block in model.blocks:
            block.qkv.weight *= 8
    return model, *torch.randint(0, 128, (2, 3, T))


def saved(tmp_path, policy="LOW", heads=(1,), sequences=(2,), layer=1, amp=True, **changes):
    model, x, y = small(policy, **changes)
    observed = capture.observe(model, x, y, seed=3, amp=amp)
    path = tmp_path / "a.xz"
    return capture.save(path, observed, model, layer, heads, sequences, INFO)


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize("layers", [{}, {"1/0": "FA2"}], ids=["one policy", "two policies"])
def test_observed_is_what_the_model_computed(amp, layers):
    """The observed dO must lead to the gradient of W_QKV that an ordinary backward gives."""
    model, x, y = small(layers=layers)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        loss = model(x, y)
    loss.backward()
    observed = capture.observe(model, x, y, amp=amp)
    assert set(observed) == {0, 1}
    for layer, s in observed.items():
        assert torch.equal(s.loss, loss.detach()) and s.seed == layer
        assert s.x.dtype == s.q.dtype == (torch.bfloat16 if amp else torch.float32)
        w = model.blocks[layer].qkv.weight.detach()
        flat = (s.x @ w.to(s.x.dtype).T).split(C, dim=2)
        for got, wanted in zip((s.q, s.k, s.v), flat, strict=True):
            torch.testing.assert_close(got.transpose(1, 2).flatten(2), wanted)
        gradients = [torch.empty_like(s.q) for _ in range(3)]
        for policy, heads in s.groups:
            some = [take_heads(t, heads, s.q.shape[1]) for t in (s.q, s.k, s.v, s.do)]
            t = trace(*some, policy)
            assert torch.equal(t.o.to(s.o.dtype), take_heads(s.o, heads, s.q.shape[1]))
            for g, part in zip(gradients, (t.dq, t.dk, t.dv), strict=True):
                g[:, heads] = part
        g = torch.cat([g.transpose(1, 2).flatten(2) for g in gradients], 2)
        got = torch.einsum("btn,btc->nc", g.double(), s.x.double())
        error = (got - model.blocks[layer].qkv.weight.grad).norm() / got.norm()
        assert error < (2**-8 if amp else 1e-5)


def test_observing_leaves_the_model_untouched_and_compiled_code_compiled():
    torch._dynamo.reset()
    model, x, y = small()
    model(x, y).backward()
    before = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
    graphs = []
    model.loss = torch.compile(model.loss, backend=lambda g, _: graphs.append(g) or g.forward)
    loss, n_graphs = model(x, y), len(graphs)
    with torch.no_grad():
        observed = capture.observe(model, x, y, amp=False, layers=[1])
    assert list(observed) == [1] and n_graphs == len(graphs) == 1, "the eager path is observed"
    torch.testing.assert_close(observed[1].loss, loss)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0]) and torch.equal(p.grad, before[name][1])
    assert not any({"heads", "attention"} & set(vars(block)) for block in model.blocks)
    assert torch.equal(model(x, y), loss) and len(graphs) == n_graphs, "nothing compiles again"
    again = capture.observe(torch.compile(small()[0]), x, y, amp=False, layers=[1])
    assert torch.equal(again[1].do, observed[1].do)


def test_an_error_inside_the_model_leaves_no_watch():
    model, x, y = small()
    with pytest.raises(IndexError):
        capture.observe(model, x + 128, y)
    assert not any({"heads", "attention"} & set(vars(block)) for block in model.blocks)


POLICIES = [
    dict(policy="LOW"), dict(policy="RELEASED", tile=16), dict(policy="PAPER", amp=False),
    dict(policy="FA2", layers={"1/1": "LOW"}), dict(policy="ALL_FP32", amp=False),
    dict(policy="LOW+s=bf16:stochastic+shift=dither(amplitude=0.5)"),
    dict(policy="FA2", layers={"1/1": "LOW+p=bf16:stochastic"}, heads=[1], sequences=[2, 0]),
]  # fmt: skip


@pytest.mark.parametrize("how", POLICIES, ids=lambda how: how["policy"])
def test_a_capture_is_reproduced(tmp_path, how):
    file = Capture.load(saved(tmp_path, **how))
    assert file.layer == 1 and file.step == 7 and file.meta["run"] == "low-seed0"
    assert file.policy == PrecisionPolicy.parse(how.get("layers", {}).get("1/1", how["policy"]))
    assert file.tile == how.get("tile") and file.heads == [1]
    names = {"x", "tokens", "targets", "w_q", "w_k", "w_v", "q", "k", "v", "o", "do"}
    assert set(file.tensors) == names and file.tensors["x"].shape[1:] == (T, C)
    q = torch.einsum("stc,hdc->shtd", file.tensors["x"], file.tensors["w_q"])
    torch.testing.assert_close(q, file.tensors["q"])
    t = file.replay()
    assert t.reproduced is True and t.policy == file.policy
    assert t.differs <= agreement.SHARE or how["policy"] == "ALL_FP32"
    assert {"o", "o_fp32", "lse", "delta", "delta_o", "delta_ref", "dq", "dk", "dv", "ties"} <= set(
        vars(t)
    )


def test_the_first_tokens_of_a_capture_are_a_capture(tmp_path):
    whole = Capture.load(saved(tmp_path, "FA2"))
    part = whole.first(5)
    rows = {t.shape[t.ndim // 2] for n, t in part.tensors.items() if n not in ("w_q", "w_k", "w_v")}
    assert rows == {5}
    kept = part.replay().o
    assert torch.equal(kept, whole.replay().o[:, :, :5]) and part.replay().reproduced
    with pytest.raises(UserError, match="a is not causal, so it cannot be cut"):
        dataclasses.replace(whole, meta=whole.meta | dict(causal=False)).first(5)


def test_another_policy_is_a_counterfactual_and_the_wrong_one_is_seen(tmp_path):
    file = Capture.load(saved(tmp_path))
    plain, other = file.replay(), file.replay("LOW+delta_from=o_fp32")
    assert other.reproduced is None and other.policy != file.policy
    assert torch.equal(plain.o, other.o) and not torch.equal(plain.dq, other.dq)
    assert file.replay(impl="oracle").reproduced is None
    refined = file.replay("LOW+row_sum=refined")
    assert torch.equal(plain.o, refined.o) and torch.equal(plain.dv, refined.dv)
    assert not torch.equal(plain.dq, refined.dq) and not torch.equal(plain.dk, refined.dk)
    for wrong in ("FA2", "LOW+s=fp32", "LOW+p=fp32", "LOW+l=fp32"):
        policy = PrecisionPolicy.parse(wrong)
        fields = {name: str(getattr(policy, name)) for name in file.meta["policy"]}
        mislabelled = dataclasses.replace(file, meta=file.meta | dict(policy=fields))
        t = mislabelled.replay()
        assert t.reproduced is False and t.differs > agreement.SHARE and t.max_ulp > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("how", POLICIES, ids=lambda how: how["policy"])
def test_a_capture_is_reproduced_bitwise_on_its_gpu_and_by_a_cpu(tmp_path, how):
    how = dict(heads=(1,), sequences=(2,), amp=True) | how
    options = {name: how[name] for name in ("tile", "layers") if name in how}
    model, x, y = small(how["policy"], **options)
    observed = capture.observe(model.cuda(), x.cuda(), y.cuda(), seed=3, amp=how["amp"])
    path = tmp_path / "a.xz"
    capture.save(path, observed, model, 1, how["heads"], how["sequences"], INFO)
    file = Capture.load(path)
    assert file.meta["impl"] == "triton" and file.meta["hardware"] != "CPU"
    here, cpu = file.replay(), file.replay(device="cpu")
    assert here.reproduced is True and here.differs == 0
    assert cpu.reproduced is True
    file.tensors["o"][0, 0, -1, 0] *= 1 + 2**-7
    assert file.replay().reproduced is False, "bitwise on the same GPU"


def test_a_single_wrong_element_is_seen(tmp_path):
    file = Capture.load(saved(tmp_path))
    file.tensors["o"][0, 0, -1, 0] += 2
    t = file.replay()
    assert t.reproduced is False and 0 < t.differs < agreement.SHARE and t.max_ulp > 16
    file.tensors["o"][0, 0, -1, 0] = float("nan")
    t = file.replay()
    assert t.reproduced is False and t.max_ulp == float("inf")


@pytest.mark.parametrize(
    "policy,tile",
    [("LOW", None), ("RELEASED", 16), ("FA2", None), ("FA2+row_sum=refined", None)],
)
def test_another_implementation_reproduces(tmp_path, monkeypatch, policy, tile):
    pytest.importorskip("triton")
    from lowprec.attention.kernels import launch

    if launch.NATIVE:
        pytest.skip("needs TRITON_INTERPRET=1")
    file = Capture.load(saved(tmp_path, policy, tile=tile))
    t = file.replay(impl="triton", device="cpu")
    assert t.reproduced is True and t.differs <= agreement.SHARE
    monkeypatch.setattr(Capture, "_recorded_here", lambda *_: True)
    here = file.replay(impl="triton", device="cpu")
    assert here.reproduced is (here.differs == 0), "bitwise where it was recorded"
    here.o[0, 0, -1, 0] *= 2
    altered = dataclasses.replace(file, tensors=file.tensors | dict(o=here.o.to(file.tensors["o"])))
    assert altered.replay(impl="triton", device="cpu").reproduced is False
    counterfactual = file.replay("ALL_FP32", impl="triton", device="cpu")
    assert counterfactual.reproduced is None and counterfactual.dq.shape == t.dq.shape


@pytest.mark.parametrize("impl", ["emulate", "triton", "oracle"])
def test_trace_is_what_attention_and_its_backward_give(impl):
    if impl == "triton":
        pytest.importorskip("triton")
    q, k, v, do = family("tied", (2, 2, 40, 32))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, LOW, impl=impl)
    o.backward(do)
    t = trace(q, k, v, do, LOW, impl=impl)
    assert torch.equal(t.o.to(q.dtype), o)
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        assert torch.equal(getattr(t, name).to(q.dtype), leaf.grad)
    assert t.lse.shape == t.ties.shape == t.delta.shape == t.delta_o.shape == t.delta_ref.shape
    forward = trace(q, k, v, None, "LOW", impl=impl)
    assert torch.equal(forward.o_fp32, t.o_fp32) and not hasattr(forward, "dq")
    with pytest.raises(UserError, match="sdpa"):
        trace(q, k, v, do, "FA2", impl="sdpa")


def test_damage_and_foreign_files(tmp_path):
    path = saved(tmp_path)
    broken = tmp_path / "broken.xz"
    packed, content = path.read_bytes(), lzma.decompress(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    inside = [*range(0, header, 37), *range(header, len(content), 4001), len(content) - 1]
    outside = [*range(0, len(packed), 4001), *range(len(packed) - 50, len(packed))]
    for whole, places, pack in (content, inside, lzma.compress), (packed, outside, bytes):
        for place in places:
            flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            broken.write_bytes(pack(flipped))
            with pytest.raises(UserError, match="broken"):
                Capture.load(broken)
        for length in (0, 4, 100, header, len(whole) - 1):
            broken.write_bytes(pack(whole[:length]))
            with pytest.raises(UserError, match="broken"):
                Capture.load(broken)
    with pytest.raises(UserError, match="not a capture of the format"):
        Capture.load(files.data_root() / "corpora" / "smoke.safetensors")
    no_header = b'{"__metadata__":null}'
    broken.write_bytes(len(no_header).to_bytes(8, "little") + no_header)
    with pytest.raises(UserError, match="not a capture of the format"):
        Capture.load(broken)
    broken.write_text("a text\n" * 50)
    with pytest.raises(UserError, match="damaged or no capture .*: restore it, if a training"):
        Capture.load(broken)
    with pytest.raises(UserError, match="no capture .*; that folder has [^.]*broken(,|$)"):
        Capture.load(tmp_path / "nothing.xz")
    with pytest.raises(UserError, match="no capture .*; that folder has .*broken.xz"):
        Capture.load(tmp_path / "broken")
    with pytest.raises(UserError, match=f"no capture .*; {tmp_path.name}/ has .*broken.xz"):
        Capture.load(tmp_path)
    with pytest.raises(UserError, match="no capture [^;]*$"):
        Capture.load(tmp_path / "nowhere" / "nothing.xz")
    Capture.load(path)


def test_a_recorded_capture_is_found_from_a_folder_below_and_shown_in_a_line(monkeypatch):
    monkeypatch.chdir(files.repo_root() / "notebooks" / "profiles")
    specimen = Capture.load("data/captures/low-c-seed6-1230.xz")
    where = "step 1230, layer 1, heads [3], sequences [13], LOW"
    assert repr(specimen) == f"Capture(low-c-seed6-1230: {where})"
    assert specimen.heading == ("LOW", "seed 6", "1,230")
    healthy = Capture.load("data/captures/fa2-a-healthy-seed1-1680.xz")
    assert healthy.heading == ("FA2", "seed 1", "1,680"), "of the twin's policy the preset alone"


def test_a_capture_is_read_without_its_xz_as_well(tmp_path):
    packed = Capture.load("data/captures/low-c-seed6-1230.xz")
    path = tmp_path / "plain.safetensors"
    path.write_bytes(lzma.decompress(packed.path.read_bytes()))
    plain = Capture.load(path)
    assert plain.meta == packed.meta and plain.tensors.keys() == packed.tensors.keys()
    assert all(torch.equal(plain.tensors[name], packed.tensors[name]) for name in packed.tensors)


def test_what_save_refuses(tmp_path, monkeypatch):
    model, x, y = small(layers={"1/0": "FA2"})
    observed = capture.observe(model, x, y)
    path = tmp_path / "captures" / "a.xz"

    def save(heads=(1,), info=INFO, observed=observed):
        return capture.save(path, observed, model, 1, heads, [0], info)

    with pytest.raises(UserError, match="share one policy"):
        save(heads=(0, 1))
    with pytest.raises(UserError, match="lacks step"):
        save(info={})
    monkeypatch.setattr(capture, "MAX_BYTES", 20_000)
    with pytest.raises(UserError, match="fewer sequences"):
        save()
    assert not path.exists()
    monkeypatch.undo()
    before = save().read_bytes()
    with pytest.raises(UserError, match="never overwritten"):
        save()
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    observed[1].impl = "sdpa"
    path.unlink()
    with pytest.raises(UserError, match="impl='triton'"):
        save()


def test_the_implementation_of_a_capture_is_the_one_that_runs(tmp_path, monkeypatch):
    """On a GPU "auto" emulates what the kernels lack, and so must a replay."""
    asked = []
    monkeypatch.setattr(capture, "that_runs", lambda *call: asked.append(call) or "emulate")
    policy = "FA2+o=bf16:stochastic"
    file = Capture.load(saved(tmp_path, policy, tile=16))
    assert file.meta["impl"] == "emulate" and file.replay("LOW").reproduced is None
    cpu = torch.device("cpu"), C // H
    assert asked == [
        (PrecisionPolicy.parse(policy), 16, "auto", *cpu), (LOW, 16, "auto", "cpu", C // H)
    ]  # fmt: skip


def test_one_head_of_gpt2_fits(tmp_path):
    """The largest model of the campaigns: 1024 tokens, width 768, heads of 64."""
    config = GPTConfig(1, 12, 768, 1024, vocab_size=128, policy="LOW")
    model = GPT(config)
    rows = torch.zeros(1, 12, 1024, 64, dtype=torch.bfloat16)
    seen = SimpleNamespace(
        x=torch.zeros(1, 1024, 768, dtype=torch.bfloat16), q=rows, k=rows, v=rows, o=rows, do=rows,
        tokens=torch.zeros(1, 1024), targets=torch.zeros(1, 1024), groups=config.groups(0),
        tile=None, impl="auto", seed=0,
    )  # fmt: skip
    path = capture.save(tmp_path / "a", {0: seen}, model, 0, [11], [0], INFO)
    size = len(lzma.decompress(path.read_bytes()))
    assert path.stat().st_size < size < capture.MAX_BYTES
    assert size - 8192 < capture.tensor_bytes(config, 1, True) < size
    assert capture.tensor_bytes(config, 2, True) > capture.MAX_BYTES


def test_the_suspect_is_the_head_with_the_largest_error():
    model, x, y = small(layers={"0/1": "FA2"})
    observed = capture.observe(model, x, y)
    for wanted in ((0, 1, 2), (1, 0, 1)):
        layer, head, sequence = wanted
        observed[layer].do[sequence, head] *= 1000
        assert capture.suspect(observed) == wanted
    observed[0].do[:, 1] *= 1e6
    first = capture.suspect(observed)
    observed[0].x[first[2]] = 0
    assert first[:2] == capture.suspect(observed)[:2] == (0, 1)
    assert capture.suspect(observed)[2] != first[2], "without an input it has no gradient"
    observed[1].do[0, 1, 3, 2] = float("nan")
    assert capture.suspect(observed) == (1, 1, 0)


def test_what_is_observed_depends_on_the_seed_and_scales_with_the_loss():
    """Also inside of what wraps a model."""
    model, x, y = small("LOW+p=bf16:stochastic")
    plain, other = (capture.observe(model, x, y, seed=seed, amp=False)[1] for seed in (0, 3))
    assert (plain.seed, other.seed) == (1, 7) and not torch.equal(plain.loss, other.loss)
    wrapper = SimpleNamespace(module=SimpleNamespace(_orig_mod=model))
    scaled = capture.observe(wrapper, x, y, amp=False, loss_scale=8.0)[1]
    assert torch.equal(scaled.do, 8 * plain.do) and torch.equal(scaled.loss, plain.loss)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("s", ["fp32", "bf16"])
def test_query_error_is_the_difference_of_the_gradients(name, s):
    """With every other site in FP32 the identity is exact, so W_Q's gradient with delta from the
    stored O and with delta from the unrounded O must differ by e to FP32 rounding."""
    q, k, v, do = family(name, (2, 2, 96, 32), dtype=torch.float32)
    x = torch.randn(2, 96, 40, generator=torch.Generator().manual_seed(1))
    stored = ALL_FP32.replace(o="bf16", s=s)
    t, reference = (trace(q, k, v, do, p) for p in (stored, stored.replace(delta_from="o_fp32")))
    e = query_error(q, k, x, t.delta_o - t.delta_ref, policy=stored)
    dq = t.dq.double() - reference.dq.double()
    wanted = torch.einsum("bhtd,btc->hdc", dq, x.double())
    assert (e - wanted).norm() < 2e-3 * wanted.norm()
    if s == "bf16":  # P is that of the rounded scores
        other = query_error(q, k, x, t.delta_o - t.delta_ref)
        assert (other - wanted).norm() > (e - wanted).norm()


def test_query_error_of_a_capture_adds_up_over_row_tiles(tmp_path):
    file = Capture.load(saved(tmp_path))
    t = file.replay()
    e = file.query_error(t)
    assert e.shape == (1, C // H, C) and e.norm() > 0
    parts = [file.query_error(t, slice(i, i + 16)) for i in range(0, T, 16)]
    torch.testing.assert_close(sum(parts), e, rtol=1e-4, atol=1e-5 * e.abs().max().item())
    healthy = file.query_error(file.replay("ALL_FP32"))
    assert healthy.norm() < 1e-3 * e.norm()
    mine = SimpleNamespace(**{**vars(t), "delta_o": t.delta_ref})
    assert not file.query_error(mine).any(), "a delta of one's own, as book/fork.md has it"
    q, k, x = (file.tensors[name] for name in "qkx")
    other = dataclasses.replace(file, meta=file.meta | dict(scale=2 * file.scale))
    wanted = query_error(q, k, x, t.delta_o - t.delta_ref, scale=2 * file.scale, policy="LOW")
    torch.testing.assert_close(other.query_error(t), wanted)


def micro_batches(steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for layer in range(2):
            for _ in range(2):
                q, k = (torch.randn(1, 3, 20, 16, generator=g) for _ in range(2))
                x = torch.randn(1, 20, 24, generator=g)
                yield step, layer, x, q, k, torch.randn(1, 3, 20, generator=g)


def filled(steps=4):
    window = QueryErrorWindow(2, 3, 16, 24)
    for step, layer, *rest in micro_batches(steps):
        if window.step not in (None, step):
            window.end_step(window.step)
        window.update(step, layer, *rest)
    window.end_step(steps - 1)
    return window


def test_window_sums():
    table = filled().to_table().set_index(["step", "layer", "head"])
    total, sums = torch.zeros(2, 3, 16, 24), {}
    for step, layer, x, q, k, eps in micro_batches(4):
        sums.setdefault((step, layer), []).append((query_error(q, k, x, eps), eps))
    for (step, layer), parts in sums.items():
        e, eps = sum(p[0] for p in parts), torch.cat([p[1] for p in parts])
        total[layer] += e
        rows = table.loc[step, layer]
        for column, wanted in dict(
            delta_bias=eps.sum((0, 2)), delta_abs=eps.abs().sum((0, 2)),
            error_norm=e.flatten(1).norm(dim=1), sum_norm=total[layer].flatten(1).norm(dim=1),
        ).items():  # fmt: skip
            assert np.allclose(rows[column], wanted, rtol=1e-4), column
        a, b = sketch_signs(0, 64, 16, 24)
        sketch = torch.einsum("jd,hdc,jc->hj", a, e, b) / 8
        got = rows.filter(like="sketch_").to_numpy(np.float64) * rows[["error_norm"]].to_numpy()
        assert np.allclose(got, sketch, atol=2e-3 * e.flatten(1).norm(dim=1).max().item())
    assert table.grad_norm.isna().all()


def test_sketches_add_and_keep_the_norm_on_average():
    """Linear: the sketch of the sum of steps is the sum of their sketches. Unbiased: over seeds
    the mean of ||sketch||^2 / ||e||^2, of standard deviation at most sqrt(8/64), is 1."""
    whole = QueryErrorWindow(2, 3, 16, 24)
    for _, layer, *rest in micro_batches(4):
        whole.update(0, layer, *rest)
    whole.end_step(0)
    added, at_once = (sketched_sum(w.to_table()) for w in (filled(), whole))
    assert np.allclose(added.sum_norm, at_once.sum_norm, rtol=5e-3)
    assert (added.coherence < 1).all()
    exact = filled().to_table().query("step == 3").sum_norm
    assert np.allclose(added.sum_norm, exact, rtol=5 * np.sqrt(2 / 64))

    ratios = []
    for seed in range(100):
        window = QueryErrorWindow(2, 3, 16, 24, seed=seed)
        for _, layer, *rest in micro_batches(1):
            window.update(0, layer, *rest)
        window.end_step(0)
        table = window.to_table()
        ratios.append((table.filter(like="sketch_").astype(float) ** 2).sum(axis=1).mean())
    assert abs(np.mean(ratios) - 1) < 5 * np.sqrt(8 / 64 / 100)
    assert np.std(ratios) > 1e-3


def test_window_survives_what_is_not_finite():
    """The head's row is NaN in that step, and its sum and later steps go on without it."""
    window = filled(3)
    before = window.total.clone()
    _, _, x, q, k, eps = next(micro_batches(1))
    eps[0, 1, 5] = float("inf")
    for step in (3, 4):
        window.update(step, 1, x, q, k, eps if step == 3 else torch.ones_like(eps))
        window.end_step(step, grad_norm=torch.ones(2, 3))
    table = window.to_table().query("step >= 3")
    assert set(table.step) == {3, 4} and (table.grad_norm == 1).all()
    broken = table.error_norm.isna()
    assert table[broken][["step", "layer", "head"]].to_numpy().tolist() == [[3, 1, 1]]
    assert np.isfinite(table.sum_norm).all() and torch.equal(window.total[0], before[0])
    assert (table[(table.step == 3) & (table.layer == 0)].error_norm == 0).all()
    result = sketched_sum(table).set_index(["layer", "head"])
    assert np.isfinite(result.sum_norm[1, 1]) and result.sum_norm[1, 1] > 0


def test_window_fits_parquet(tmp_path):
    window = filled(4)
    table = window.to_table()
    table.loc[2, ["delta_bias", "error_norm"]] = np.nan, np.inf
    write_table(tmp_path / "a.parquet", table)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "a.parquet"), table, check_exact=True)
    table.to_parquet(tmp_path / "b.parquet", index=False, compression="zstd")
    ours, plain = ((tmp_path / f"{name}.parquet").stat().st_size for name in "ab")
    assert ours < plain / 2, (ours, plain)
    assert (table.filter(like="sketch_").dtypes == np.float16).all()
    assert len(QueryErrorWindow(2, 3, 16, 24).to_table()) == 0


def test_a_window_mixes_no_steps():
    """A step that was not ended would be added to the next, one without an update be recorded."""
    window, (_, layer, *rest) = filled(2), next(micro_batches(1))
    with pytest.raises(ValueError, match="step 5 has no update; the last one was for None"):
        window.end_step(5)
    window.update(5, layer, *rest)
    before = window.error.clone()
    for refused, words in (
        (lambda: window.update(6, layer, *rest), "step 5 has not ended; call end_step before step"),
        (lambda: window.end_step(6), "step 6 has no update; the last one was for 5"),
    ):
        with pytest.raises(ValueError, match=words):
            refused()
    assert torch.equal(window.error, before) and window.step == 5 and len(window.records) == 2
    window.update(5, layer, *rest)
    window.end_step(5)
    assert window.records[-1][0] == 5 and not window.error.any()


def test_a_trace_of_any_head_size_is_that_of_the_emulation():
    pytest.importorskip("triton")
    from lowprec.attention.kernels import launch

    if launch.NATIVE:
        pytest.skip("needs TRITON_INTERPRET=1")
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 20, 24, dtype=torch.bfloat16) for _ in range(4))
    ours, want = (trace(q, k, v, do, "ALL_FP32", impl=impl) for impl in ("triton", "emulate"))
    for name in ("o", "dq", "dk", "dv"):
        one, other = getattr(ours, name), getattr(want, name)
        assert one.shape == other.shape and torch.allclose(one.float(), other.float(), atol=1e-2)
