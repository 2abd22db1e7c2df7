"""The monitor: the probe's numbers in a training that does not notice it."""

import copy
import dataclasses
import json
import logging
import math
import re
import resource
import sys
import threading
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec import Monitor, UserError
from lowprec.attention import attention, huggingface
from lowprec.attention.masks import Mask
from lowprec.diagnose import measures, watch
from lowprec.diagnose import monitor as watching
from lowprec.diagnose.calls import HIDDEN, emulated, plain_length
from lowprec.diagnose.monitor import COLUMNS
from lowprec.records import files
from lowprec.training.capture import Capture
from lowprec.training.config import PRESETS
from lowprec.training.model import GPT, autocast

SDPA = F.scaled_dot_product_attention
CAPTURES = files.data_root() / "captures"


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(dataclasses.replace(PRESETS["tiny"].model(), **changes))


def llama(hub, implementation="sdpa", **changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    config = hub.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             hidden_size=32, intermediate_size=86, **(sizes | changes))  # fmt: skip
    model = hub.LlamaForCausalLM(config)
    model.set_attn_implementation(implementation)
    return model


def tokens(count=3, length=48, seed=1):
    return torch.randint(0, 300, (count, length), generator=torch.Generator().manual_seed(seed))


def watched(model, loss, **how):
    """The table of one step."""
    with Monitor(model, every=1, **how) as monitor:
        loss().backward()
        return monitor.step()


def of_hub(model, ids, **inputs):
    return lambda: model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss


def train(make, loss, every=None, steps=5, **how):
    """State, gradients and random state after a few steps of AdamW."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = every and Monitor(model, every, **how)
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        if monitor:
            monitor.step()
        optimizer.step()
    grads = [p.grad for p in model.parameters()]
    return [*model.state_dict().values(), *grads, torch.get_rng_state()]


def gpt_loss(model, step):
    ids = tokens(length=33, seed=step)
    with autocast("cpu", True):
        return model(ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "llama"])
def test_a_training_does_not_notice_it(hub, kind):
    """Weights, gradients and random numbers bit by bit, with dropout where the model has any."""

    def make():
        torch.manual_seed(0)
        if kind == "gpt":
            return tiny(policy="FA2")
        if kind == "llama":
            return llama(hub)
        config = hub.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=300, n_positions=64)
        return hub.GPT2LMHeadModel(config)  # dropout of 0.1 in four places

    def loss(model, step):
        return gpt_loss(model, step) if kind == "gpt" else of_hub(model, tokens(seed=step))()

    seen = [train(make, loss, every) for every in (None, 1, 2)]
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_the_values_are_those_of_the_probe_on_the_same_batch(hub):
    """Where the model's attention is what the probe puts in its place."""

    def attention(module, q, k, v, mask, dropout=0.0, scaling=None, **_):
        given = (x.bfloat16() for x in (q, k, v))
        o = lowprec.sdpa(*given, is_causal=True, scale=scaling, enable_gqa=True, policy="FA2")
        return o.to(q.dtype).transpose(1, 2), None

    hub.AttentionInterface.register("as-probed", attention)
    model, ids = llama(hub, "as-probed"), tokens(3)
    table = watched(model, of_hub(model, ids), sequences=3)
    probed = measures.table(emulated(model, ids, "FA2"), "")
    assert table.tied.equals(probed.tied)
    for name in ("share", "share_all", "error"):  # here dQ goes back through numbers in BF16
        assert table[name].to_numpy() == pytest.approx(probed[name].to_numpy(), rel=0.01), name
    for name in ("common", "key_share"):  # the probe reads these before BF16
        assert table[name].to_numpy() == pytest.approx(probed[name].to_numpy(), rel=0.02, abs=1e-4)
    assert table[["layer", "head"]].equals(probed[["layer", "head"]])


def test_heads_of_values_may_have_another_size(hub):
    """As in latent attention, of queries of 24 and values of 16."""
    torch.manual_seed(0)
    config = hub.DeepseekV3Config(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=64, kv_lora_rank=16, q_lora_rank=None,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=2,
    )  # fmt: skip
    model, ids = hub.DeepseekV3ForCausalLM(config), tokens(2)
    table = watched(model, of_hub(model, ids), sequences=2)
    grads = [layer.self_attn.q_proj.weight.grad.view(2, -1) for layer in model.model.layers]
    wanted = torch.cat([g.norm(dim=1) for g in grads])
    assert set(table.of) == {"W_Q"} and (table.share > 0).all()
    assert table.gradient.to_numpy() == pytest.approx(wanted.numpy(), rel=0.02)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "lowprec"])
def test_every_door_of_a_hub_model_shows_the_same(hub, implementation):
    huggingface.register(policy="ALL_FP32")
    model, ids = llama(hub, implementation), tokens(3)
    table = watched(model, of_hub(model, ids), sequences=3, policy="FA2")
    probed = measures.table(emulated(model, ids, "FA2"), "")
    assert (table["of"] == "W_Q").all() and len(table) == 8
    exact = (probed.error / probed.share).to_numpy()
    assert table.gradient.to_numpy() == pytest.approx(exact, rel=0.05)
    # attention is not rounded here, so in the layers before other numbers are
    assert (0.3 < table.share / probed.share).all() and (table.share / probed.share < 3).all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_has_its_own_scale(hub, implementation):
    tables, ids = [], tokens(1)
    for times in (1, 2):
        model = llama(hub, implementation)
        model.model.layers[0].self_attn.scaling *= times
        tables += [
            watched(model, of_hub(model, ids)),
            measures.table(emulated(model, ids, "FA2"), ""),
        ]
    once, probed, twice, again = (table.logit[table.layer == 0] for table in tables)
    assert twice.equals(2 * once) and again.equals(2 * probed)


def test_logit_and_entropy():
    model, ids = tiny(policy="ALL_FP32"), tokens(2, 33)
    table = watched(model, lambda: model(ids[:, :-1], ids[:, 1:]), sequences=2)
    block, x = model.blocks[0], model.placed(model.token(ids[:, :-1]))
    q, k, _ = block.heads(block.norm_attn(x))
    s = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~torch.ones(32, 32).tril().bool(), -math.inf)
    p = s.double().softmax(-1)
    entropy = torch.special.entr(p).sum(-1)[..., 1:].mean((0, 2))
    of = table[table.layer == 0]
    assert of.logit.to_numpy() == pytest.approx(s.amax((0, 2, 3)).tolist(), rel=1e-5)
    assert of.entropy.to_numpy() == pytest.approx(entropy.tolist(), rel=1e-5)


class Plain(nn.Module):
    """A layer of somebody else's, who calls PyTorch's function."""

    def __init__(self, width=32, heads=2, causal=True, mask=None):
        super().__init__()
        self.heads, self.causal, self.mask = heads, causal and mask is None, mask
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        split = (t.transpose(1, 2) for t in parts)
        o = F.scaled_dot_product_attention(*split, self.mask, is_causal=self.causal)
        return x + self.out(o.transpose(1, 2).flatten(2))


def test_a_layer_that_calls_torch_is_watched_down_to_its_weights():
    torch.manual_seed(0)
    model = nn.Sequential(Plain(), nn.Linear(32, 32), nn.GELU(), Plain())
    x = torch.randn(2, 40, 32)
    table = watched(model, lambda: model(x).square().sum(), sequences=2)
    grads = [layer.qkv.weight.grad[:32].view(2, -1) for layer in (model[0], model[3])]
    exact = torch.cat([g.norm(dim=1) for g in grads])
    assert table.gradient.to_numpy() == pytest.approx(exact.tolist(), rel=0.02)
    assert (table["of"] == "W_Q").all()


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(20, 20, dtype=torch.bool).tril(),
        torch.full((20, 20), -math.inf).triu(1),
        causal_upper_left(20, 20),
        causal_lower_right(20, 20),
    ],
    ids=["booleans", "floats", "upper left", "lower right"],
)
def test_a_causal_mask_may_be_given_to_torch_in_any_form(mask):
    tables, x = [], torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    for how in (dict(mask=mask), {}):
        torch.manual_seed(0)
        model = Plain(**how)
        plain = model(x)
        tables.append(watched(model, lambda model=model: model(x).square().sum()))
        with Monitor(model):
            assert torch.equal(model(x), plain)
    for name in ("logit", "gradient", "common"):
        assert tables[0][name].to_numpy() == pytest.approx(tables[1][name].to_numpy(), rel=1e-3)


def test_heads_may_be_the_first_dimension_of_three():
    class Attention(nn.Module):
        def __init__(self, flat):
            super().__init__()
            torch.manual_seed(0)
            self.maps, self.flat = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), flat

        def forward(self, x):
            q, k, v = (m(x).unflatten(-1, (4, 8)).transpose(1, 2) for m in self.maps)
            q, k, v = (t.flatten(0, 1) if self.flat else t for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    tables, x = [], torch.randn(1, 40, 32)
    for flat in (True, False):
        with Monitor(model := Attention(flat)) as monitor:
            model(x).square().mean().backward()
            tables.append(monitor.step())
    assert len(tables[0]) == 4 and tables[0].equals(tables[1])


def test_a_layer_whose_backward_did_not_come_back_is_said(caplog):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x):
            outs = []
            for m in self.maps:
                q = m(x).unflatten(-1, (2, 8)).transpose(1, 2)
                outs.append(F.scaled_dot_product_attention(q, q, q, is_causal=True))
            return outs[1]

    level = caplog.at_level(logging.WARNING, "lowprec.monitor")
    with level, Monitor(model := Half()) as monitor:
        model(torch.randn(2, 40, 16)).square().mean().backward()
        table = monitor.step()
    assert set(table.layer) == {1} and monitor.left_out == {0: "no backward came back"}
    assert "0: no backward came back" in caplog.text


@pytest.mark.parametrize("of", ["inner", "all"])
def test_a_layer_through_which_two_backward_passes_came_has_no_numbers(of):
    """Each has a part of the step's gradient."""
    torch.manual_seed(0)
    model, outs = nn.Sequential(Plain(), Plain()), []
    model[0].register_forward_hook(lambda module, given, out: outs.append(out))
    monitor = Monitor(model)
    loss = model(torch.randn(2, 40, 32)).square().mean()
    loss.backward(retain_graph=True)
    (outs[0].mean() if of == "inner" else loss).backward()
    if of == "inner":
        assert set(monitor.step().layer) == {1} and monitor.left_out == {0: watch.SEVERAL}
    else:
        with pytest.raises(UserError, match=f"none of 2 calls of attention: {watch.SEVERAL}"):
            monitor.step()


def test_our_way_to_the_kernel_of_torch_is_watched():
    class Ours(Plain):
        def forward(self, x):
            parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
            split = (t.transpose(1, 2) for t in parts)
            o = lowprec.sdpa(*split, is_causal=True, policy="FA2", impl="sdpa")
            return x + self.out(o.transpose(1, 2).flatten(2))

    tables, x = [], torch.randn(2, 40, 32)
    for layer in (Plain, Ours):
        torch.manual_seed(0)
        model = nn.Sequential(Plain(), layer(), Plain())
        tables.append(watched(model, lambda model=model: model(x).square().mean()))
    pd.testing.assert_frame_equal(*tables)


def test_keys_of_one_sequence_may_be_those_of_all():
    q = nn.Linear(32, 32)
    x, key = torch.randn(3, 2, 40, 16), torch.randn(1, 2, 40, 16)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = q

        def forward(self, k):
            own = self.q(x.transpose(1, 2).flatten(2)).unflatten(-1, (2, 16)).transpose(1, 2)
            return F.scaled_dot_product_attention(own, k, k, is_causal=True)

    model = Shared()
    tables = [watched(model, lambda k=k: model(k).square().mean(), sequences=2)
              for k in (key, key.repeat(3, 1, 1, 1))]  # fmt: skip
    pd.testing.assert_frame_equal(*tables)


def test_an_error_in_its_block_is_not_answered_by_a_missing_step(caplog):
    caplog.set_level(logging.WARNING, "lowprec.monitor")
    with pytest.raises(KeyError), Monitor(nn.Linear(2, 2)):
        raise KeyError
    assert "saw no step" not in caplog.text


def test_our_function_under_the_name_of_torchs_is_measured_once(hub, monkeypatch):
    """By the policy that it is called with, as where transformers' registry has it."""
    huggingface.register(policy="SAFE")
    ids, wanted = tokens(), llama(hub, "lowprec")
    wanted = watched(wanted, of_hub(wanted, ids))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lowprec.sdpa)
    found = watched(model := llama(hub), of_hub(model, ids))
    assert len(found) == 8 and list(found.layer) == list(wanted.layer)
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-3, atol=1e-6)


def test_without_a_linear_map_shares_are_of_dq_and_no_alarm_is_given(caplog, monkeypatch):
    """The limits of the alarm were chosen for gradients of W_Q."""
    capture = Capture.load(CAPTURES / "fa2-b-seed4-1580.xz")
    layer, x, do = Layer(capture), capture.tensors["x"], capture.tensors["do"]
    w_q = nn.Parameter(layer.maps[0].weight.detach().clone())
    layer.maps[0] = nn.Identity()
    layer.maps[0].forward = lambda x: x @ w_q.mT
    monkeypatch.setattr(measures, "alarmed", lambda heads: heads.share >= 0)
    with caplog.at_level(logging.WARNING, "lowprec.monitor"), Monitor(layer, every=1) as monitor:
        for _ in range(2):
            (layer(x) * do).sum().backward()
            table = monitor.step()
    assert table["of"].tolist() == ["dQ"] and not table.alarm.any()
    assert caplog.text.count("that give no alarm: call_0: no linear map was found") == 1


@pytest.mark.parametrize("first", [True, False], ids=["sequence first", "batch first"])
def test_maps_of_functions_are_found_as_those_of_modules_are(first):
    """PyTorch's layers call no module for W_Q, and q is made of what the one before put out."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=not first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask, x = nn.Transformer.generate_square_subsequent_mask(24), torch.randn(3, 24, 32)
    x, plain = (x.transpose(0, 1) if first else x), F.linear
    table = watched(
        model, lambda: model(x, mask=mask, is_causal=True)[..., 0].square().sum(), sequences=3
    )
    assert F.linear is plain
    grads = [layer.self_attn.in_proj_weight.grad[:32].view(2, -1) for layer in model.layers]
    exact = torch.cat([g.norm(dim=1) for g in grads])
    assert table.layer.tolist() == [0, 0, 1, 1] and set(table["of"]) == {"W_Q"}
    assert table.gradient.to_numpy() == pytest.approx(exact.tolist(), rel=0.02)


def test_two_monitors_hear_the_maps_of_functions():
    torch.manual_seed(0)
    layer, plain = nn.MultiheadAttention(32, 2, batch_first=True), F.linear
    model, x = nn.Sequential(Attends(layer)), torch.randn(1, 24, 32)
    first, second = Monitor(model, every=1), Monitor(model[0], every=1)
    model(x).square().sum().backward()
    tables = [first.step(), second.step()]
    first.close()
    second.close()
    assert F.linear is plain and [set(table.module) for table in tables] == [{"0.layer"}, {"layer"}]
    assert set(tables[0]["of"]) == {"W_Q"}
    pd.testing.assert_frame_equal(*(table.drop(columns="module") for table in tables))


class Attends(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class Recursive(nn.Module):
    """A model that calls itself for its next layer."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, depth=0):
        x = self.layers[depth](x)
        return x if depth + 1 == len(self.layers) else self(x, depth + 1)


def test_a_model_that_calls_itself_is_one_forward():
    torch.manual_seed(0)
    layers, x = [Plain() for _ in range(3)], torch.randn(1, 40, 32)
    tables = []
    for model in (nn.Sequential(*layers), Recursive(layers)):
        model.zero_grad()
        tables.append(watched(model, lambda model=model: model(x).square().sum()))
    pd.testing.assert_frame_equal(*(table.drop(columns="module") for table in tables))


class Beside(nn.Module):
    """Has something run once in another thread while the model's forward goes on."""

    run = None

    def forward(self, x):
        if self.run is not None:
            run, self.run = self.run, None
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        return x


@pytest.mark.parametrize("kind", ["another", "another, with gradients", "itself"])
def test_what_another_thread_calls_meanwhile_is_not_of_the_model(kind):
    """As an evaluation, or a model that makes the batches."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Plain(), Beside(), Plain()), torch.randn(1, 40, 32)
    other = model if kind == "itself" else nn.Sequential(Plain(), Plain())

    def run():
        with torch.set_grad_enabled(kind == "another, with gradients"):
            other(x[:, :30])

    alone = watched(model, lambda: model(x).square().sum())
    model[1].run = run
    with Monitor(model, every=1) as monitor:
        model(x).square().sum().backward()
        table = monitor.step()
    assert model[1].run is None and monitor.left_out == {}
    pd.testing.assert_frame_equal(table, alone)


def test_a_model_that_runs_its_layers_in_other_threads_is_said():
    """As nn.DataParallel does on several GPUs."""
    layer, out = Plain(), []
    model, x = Beside(), torch.randn(1, 40, 32)
    model.layer, model.run = layer, lambda: out.append(layer(x))
    with pytest.raises(UserError, match="saw no attention: .* in the model's own thread"):
        watched(model, lambda: (model(x) + out[0]).sum())


def test_calls_have_the_names_of_the_modules_that_make_them(caplog):
    """Decoders call attention twice a layer, after an encoder whose calls are counted as well."""
    torch.manual_seed(0)
    model, x = (
        nn.Transformer(32, 2, 2, 2, 64, dropout=0.0, batch_first=True),
        torch.randn(1, 24, 32),
    )
    mask = nn.Transformer.generate_square_subsequent_mask(24)
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        table = watched(
            model, lambda: model(x, x, tgt_mask=mask, tgt_is_causal=True).square().sum()
        )
    names = [f"decoder.layers.{i}.self_attn" for i in range(2)]
    assert table.layer.unique().tolist() == [2, 4] and table.module.unique().tolist() == names
    norms = [model.get_submodule(name).in_proj_weight.grad[:32].view(2, -1).norm(dim=1)
             for name in names]  # fmt: skip
    assert table.gradient.to_numpy() == pytest.approx(torch.cat(norms).numpy(), rel=0.02)
    assert "not watched: encoder.layers.0.self_attn: it is not causal; encoder" in caplog.text
    assert "decoder.layers.1.multihead_attn: it is not causal" in caplog.text


def test_layers_that_are_called_in_another_order_keep_their_names_and_numbers():
    """Also where a layer has several calls, whose heads are known by then."""

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.order = nn.ModuleList([Plain(), Halves()]), (0, 1)

        def forward(self, x):
            for i in self.order:
                x = self.layers[i](x)
            return x

    torch.manual_seed(0)
    model, x = Ordered(), torch.randn(1, 24, 32)
    with Monitor(model, every=1) as monitor:
        for model.order in ((0, 1), (1, 0)):
            model.zero_grad()
            model(x).square().sum().backward()
            table = monitor.step().set_index(["module", "head"])
            grads = [layer.qkv.weight.grad[:32].view(2, -1).norm(dim=1) for layer in model.layers]
            calls = [("layers.0", 0), ("layers.0", 1), ("layers.1", 0), ("layers.1/call_1", 0)]
            found = table.gradient[calls].to_numpy()
            assert found == pytest.approx(torch.cat(grads).numpy(), rel=0.02)
    assert table.layer[calls].tolist() == [2, 2, 0, 1]


def test_modules_that_the_model_does_not_hold_have_no_name(caplog):
    """As a teacher's within the forward: the calls have their numbers."""

    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.others = Plain(), [Plain()]

        def forward(self, x):
            with torch.no_grad():
                wanted = self.others[0](x)
            return self.own(x) - wanted

    model, x = Taught(), torch.randn(1, 24, 32)
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        table = watched(model, lambda: model(x).square().sum())
    assert set(table.module) == {"own"} and set(table.layer) == {1}
    assert f"not watched: call_0: {watch.NO_GRADIENT}" in caplog.text
    seen = watch.Seen(["own", "", "own", ""])
    assert [seen.module(i) for i in range(4)] == ["own", "call_1", "own/call_1", "call_3"]


class Steps(nn.Module):
    """Its forward goes backward as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Plain() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        x.square().sum().backward()


def test_what_checkpointed_layers_call_again_within_the_forward_is_counted_once():
    torch.manual_seed(0)
    model, x, tables = Steps(), torch.randn(1, 40, 32), []
    for training in (False, True):
        with Monitor(model.train(training), every=1) as monitor:
            model(x)
            tables.append(monitor.step())
        assert monitor.left_out == {}
    pd.testing.assert_frame_equal(*tables)


def test_after_a_forward_that_was_interrupted_the_next_is_watched():
    torch.manual_seed(0)
    layers, x = [Plain(), Plain()], torch.randn(1, 40, 32)
    model = Recursive(layers)

    def interrupt(*_):
        raise KeyboardInterrupt

    with Monitor(model, every=1) as monitor:
        hook = layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        hook.remove()
        model(x).square().sum().backward()
        assert monitor.step().layer.unique().tolist() == [0, 1]


class Layer(nn.Module):
    """The layer of a capture."""

    def __init__(self, capture, first=False):
        super().__init__()
        self.policy, self.scale, self.maps = capture.policy, capture.scale, nn.ModuleList()
        self.first = first  # whether the sequence is
        for name in ("w_q", "w_k", "w_v"):
            weight = capture.tensors[name].flatten(0, 1)
            self.maps.append(nn.Linear(*weight.mT.shape, bias=False, dtype=weight.dtype))
            self.maps[-1].weight.data.copy_(weight)

    def forward(self, x):
        made = (m(x) for m in self.maps)
        q, k, v = ((y.transpose(0, 1) if self.first else y)[:, None] for y in made)
        return lowprec.sdpa(q, k, v, is_causal=True, scale=self.scale, policy=self.policy)


@pytest.mark.parametrize(
    "name,rings",
    [("fa2-b-seed4-1580", True), ("low-c-seed6-1230", True), ("low-c-healthy-seed6-1230", False)],
)
def test_it_rings_in_a_captured_layer_that_fails_and_not_in_its_twin(name, rings, caplog):
    capture = Capture.load(CAPTURES / f"{name}.xz")
    layer, x, do = Layer(capture), capture.tensors["x"], capture.tensors["do"]
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        table = watched(layer, lambda: (layer(x) * do).sum(), length=x.shape[1])
    assert table.alarm.tolist() == [rings]
    said = "ALARM in 1 of 1 head(s). The largest error: in call_0, head 0"
    assert (said in caplog.text) == rings
    probed = lowprec.probe(capture, policy=capture.policy)
    assert probed.alarm.tolist() == [rings]
    assert table.common[0] == pytest.approx(probed.common[0], rel=0.05)


def test_in_fp16_a_sequence_has_the_same_numbers_in_a_larger_batch():
    """Errors of a small gradient, which a gradient in FP16 does not hold."""
    capture = Capture.load(CAPTURES / "fa2-a-seed1-1520.xz")
    layer, x, do = Layer(capture).float(), capture.tensors["x"], capture.tensors["do"]

    def loss(batch):
        with torch.autocast("cpu", torch.float16):
            return (layer(x.float().expand(batch, -1, -1)) * (do / 64).half()).sum()

    alone, two = (watched(layer, lambda n=n: loss(n), length=x.shape[1]) for n in (1, 2))
    assert alone.alarm.all()
    pd.testing.assert_frame_equal(two, alone)


class Turned(nn.Module):
    """A layer that goes another way from its maps to q, k and v."""

    def __init__(self, kind):
        super().__init__()
        self.kind, width = kind, 16 if "map" in kind else 32
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        heads = x.unflatten(-1, (2, 16))
        if self.kind == "sequence first":
            q, k, v = (m(x).unflatten(-1, (2, 16)).permute(1, 2, 0, 3) for m in self.maps)
        elif self.kind in ("one axis", "one axis, sequence first"):
            split = (m(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for m in self.maps)
            turn = (0, 2, 1, 3) if self.kind == "one axis" else (1, 2, 0, 3)
            q, k, v = (y.unflatten(-1, (2, 16)).permute(turn) for y in split)
        elif self.kind == "a map for each head":
            q, k, v = (m(heads).transpose(1, 2) for m in self.maps)
        else:  # "a map for each head, turned before it"
            q, k, v = (m(heads.transpose(1, 2)) for m in self.maps)
        self.q = q
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize(
    "kind",
    ["sequence first", "one axis", "one axis, sequence first", "a map for each head",
     "a map for each head, turned before it"],
)  # fmt: skip
@pytest.mark.parametrize("batch", [4, 24])
def test_rows_are_found_in_any_layout(kind, sequences, batch):
    """Against the gradient that each head's dQ makes in W_Q, of the first sequences alone."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(batch, 24, 32, generator=g), torch.randn(batch, 2, 24, 16, generator=g)
    torch.manual_seed(0)
    model, first = Turned(kind), "sequence first" in kind
    given = x.transpose(0, 1) if first else x
    table = watched(model, lambda: (model(given) * w).sum(), sequences=sequences)
    dq = torch.autograd.grad((model(given) * w).sum(), model.q)[0][:sequences]
    inputs = x.unflatten(-1, (2, 16)) if "map" in kind else x[:, :, None].expand(-1, -1, 2, -1)
    wanted = torch.einsum("bhtd,bthc->hdc", dq, inputs[:sequences]).flatten(1).norm(dim=1)
    assert table.gradient.to_numpy() == pytest.approx(wanted.numpy(), rel=0.01)
    assert (table["of"] == "W_Q").all()


def test_a_captured_layer_rings_sequence_first_as_well():
    capture = Capture.load(CAPTURES / "fa2-b-seed4-1580.xz")
    x, do, tables = capture.tensors["x"], capture.tensors["do"], []
    for first in (False, True):
        layer, given = Layer(capture, first), x.expand(4, -1, -1)
        given = given.transpose(0, 1) if first else given
        tables.append(watched(layer, lambda m=layer, y=given: (m(y) * do).sum(), length=x.shape[1]))
    pd.testing.assert_frame_equal(*tables)
    assert tables[0].alarm.all()


class Rotary(Plain):
    """Rotates q and k, in place or not."""

    in_place = False

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (parts[..., i, :, :].transpose(1, 2) for i in range(3))
        angles = torch.arange(x.shape[1])[:, None] * 0.1 ** torch.arange(8)
        for y in (q, k):
            a, b = y[..., :8], y[..., 8:]
            turned = torch.cat([a * angles.cos() - b * angles.sin(),
                                b * angles.cos() + a * angles.sin()], -1)  # fmt: skip
            if self.in_place:
                y.copy_(turned)
            elif y is q:
                q = turned
            else:
                k = turned
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(2))


def test_what_is_written_into_a_projection_changes_no_number():
    """As where rotary positions work in place: the gradient is of what the map put out."""
    tables, x = [], torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0)) + 1
    for in_place in (False, True):
        torch.manual_seed(0)
        model = Rotary()
        model.in_place = in_place
        tables.append(watched(model, lambda m=model: m(x).square().sum(), sequences=2))
    pd.testing.assert_frame_equal(*tables)
    exact = model.qkv.weight.grad[:32].view(2, -1).norm(dim=1)
    assert tables[0].gradient.to_numpy() == pytest.approx(exact.numpy(), rel=0.02)


class Halves(Plain):
    """A call of attention for each head; the projection is called for both or anew for each."""

    anew = False

    def forward(self, x):
        def heads(i):
            parts = (self.qkv(x) if self.anew else whole).unflatten(-1, (3, 2, 16)).unbind(-3)
            q, k, v = (t.transpose(1, 2)[:, i : i + 1] for t in parts)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        whole = None if self.anew else self.qkv(x)
        return x + self.out(torch.cat([heads(0), heads(1)], 1).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("anew", [False, True])
def test_several_calls_may_read_one_projection(anew):
    torch.manual_seed(0)
    model, x = nn.Sequential(Plain(), Halves()), torch.randn(1, 24, 32)
    model[1].anew = anew
    with Monitor(model, every=1) as monitor:
        for _ in range(2):  # the second with what was found in the first
            model.zero_grad()
            model(x).square().sum().backward()
            table = monitor.step()
            grads = [layer.qkv.weight.grad[:32].view(2, -1).norm(dim=1) for layer in model]
            assert table.layer.tolist() == [0, 0, 1, 2] and set(table["of"]) == {"W_Q"}
            assert table.gradient.to_numpy() == pytest.approx(torch.cat(grads).numpy(), rel=0.02)


class Pieces(nn.Module):
    """Its queries are put together from several calls of a map or of a function."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.maps = kind, nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.wide, self.small = nn.Parameter(torch.randn(64, 32) / 6), nn.Linear(16, 16)

    @property
    def made_of(self):
        if self.kind == "heads":
            return self.small.weight
        return self.wide if self.kind == "view" else self.maps[0].weight

    def project(self, x):
        if self.kind in ("function", "view"):
            return F.linear(x, self.wide[:32] if self.kind == "view" else self.made_of)
        return self.small(x) if self.kind == "heads" else self.maps[0](x)

    def forward(self, x):
        if self.kind == "again":
            return checkpoint(self.attend, x, use_reentrant=False)
        return self.attend(x)

    def attend(self, x):
        axis = dict(sequences=0, heads=2).get(self.kind, 1)
        q = torch.cat([self.project(part) for part in x.chunk(2, axis)], axis)
        k, v = (m(x) for m in self.maps[1:])
        k = k if self.kind != "keys as well" else self.maps[0](x.detach()).detach()
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in (q, k, v))
        self.q = q
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "kind", ["tokens", "sequences", "again", "function", "view", "heads", "keys as well"]
)
def test_a_map_that_is_called_in_pieces_has_one_gradient(kind):
    torch.manual_seed(0)
    model, x, w = Pieces(kind), torch.randn(4, 24, 32), torch.randn(4, 2, 24, 16)
    with Monitor(model, every=1, sequences=4) as monitor:
        for _ in range(2):  # the second with what was found in the first
            model.zero_grad()
            (model(x) * w).sum().backward()
            table = monitor.step()
    wanted = model.made_of.grad[:32].view(2, -1).norm(dim=1)
    if kind == "heads":  # which share the weights
        dq = torch.autograd.grad((model(x) * w).sum(), model.q)[0]
        parts = x.unflatten(-1, (2, 16))
        wanted = torch.einsum("bhtd,bthc->hdc", dq, parts).flatten(1).norm(dim=1)
    assert set(table["of"]) == {"W_Q"}
    assert table.gradient.to_numpy() == pytest.approx(wanted.numpy(), rel=0.02)


def test_several_calls_may_have_the_same_queries():
    """As where each has its own keys, whose maps are called between."""

    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(32, 32), nn.ModuleList(nn.Linear(32, 64) for _ in "abc")

        def forward(self, x):
            q, out = self.q(x), 0
            for kv in self.kv:
                parts = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in (q, *kv(x).chunk(2, -1)))
                out = out + F.scaled_dot_product_attention(*parts, is_causal=True)
            return out.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, x = nn.Sequential(Thrice(), Thrice()), torch.randn(1, 24, 32)
    with Monitor(model, every=1) as monitor:
        for _ in range(2):  # the second with what was found in the first
            model.zero_grad()
            model(x).square().sum().backward()
            table = monitor.step()
    assert set(table["of"]) == {"W_Q"} and len(table) == 12
    names = [f"{i}{call}" for i in range(2) for call in ("", "/call_1", "/call_2")]
    assert table.module.unique().tolist() == names
    own = table[table.layer >= 3].gradient.to_numpy().reshape(3, 2)
    for i, kv in enumerate(model[1].kv):  # the gradient of each call alone
        model.zero_grad()
        y = model[0](x)
        for j, other in enumerate(model[1].kv):
            other.requires_grad_(i == j)
        q = model[1].q(y)
        outs = []
        for other in model[1].kv:
            mine = q if other is kv else q.detach()
            parts = (t.unflatten(-1, (2, 16)).transpose(1, 2)
                     for t in (mine, *other(y).chunk(2, -1)))  # fmt: skip
            outs.append(F.scaled_dot_product_attention(*parts, is_causal=True))
        sum(outs).transpose(1, 2).flatten(2).square().sum().backward()
        wanted = model[1].q.weight.grad.view(2, -1).norm(dim=1)
        assert own[i] == pytest.approx(wanted.numpy(), rel=0.02)


def test_queries_of_what_attention_put_out_are_not_of_its_maps():
    """As of a convolution behind it, which is no linear map."""

    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.kv = Plain(), nn.Linear(32, 64)
            self.q = nn.Conv1d(32, 32, 1)

        def forward(self, x):
            parts = self.first.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
            o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in parts), is_causal=True)
            made = self.q(o.mT.flatten(1, 2)).mT, *self.kv(x).chunk(2, -1)
            parts = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in made)
            return F.scaled_dot_product_attention(*parts, is_causal=True)

    model, x = Behind(), torch.randn(1, 24, 32)
    table = watched(model, lambda: model(x).square().sum())
    assert table["of"].tolist() == ["W_Q", "W_Q", "dQ", "dQ"]


def test_heads_of_a_layer_may_have_several_policies():
    plain, split = (tiny(policy="FA2", layers=x) for x in ({}, {"1/1": "ALL_FP32+o=bf16"}))
    tables = [watched(model, lambda m=model: gpt_loss(m, 0)) for model in (plain, split)]
    assert tables[1].layer.tolist() == [0, 0, 1, 2] and set(tables[1]["of"]) == {"W_Q"}
    assert tables[1].gradient.to_numpy() == pytest.approx(tables[0].gradient.to_numpy(), rel=0.02)


def test_layers_that_share_a_module_are_those_of_a_model_with_copies():
    """Before its second pass lies what it put out in the first, which reaches its queries."""
    torch.manual_seed(0)
    layer, x = Plain(), torch.randn(1, 24, 32)
    shared, copies = (
        nn.Sequential(*[layer] * 3),
        nn.Sequential(*(copy.deepcopy(layer) for _ in "abc")),
    )
    tables = [watched(model, lambda m=model: m(x).square().sum()) for model in (shared, copies)]
    names = [table.pop("module").unique().tolist() for table in tables]
    assert names == [["0", "0/call_1", "0/call_2"], ["0", "1", "2"]]
    pd.testing.assert_frame_equal(*tables)


def planted(model):
    """A common part of keys and of queries: see `test_affected`."""
    with torch.no_grad():
        bias = model.transformer.h[1].attn.c_attn.bias
        bias[16:32] += 0.5
        bias[48:64] += 64.0
    return model


def test_the_file_has_a_line_a_step_and_head_and_an_alarm_is_said_once(hub, tmp_path, caplog):
    torch.manual_seed(0)
    config = hub.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=300, n_positions=64)
    model, path = planted(hub.GPT2LMHeadModel(config).eval()), tmp_path / "run" / "monitor.jsonl"
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        monitor = Monitor(model, every=2, path=path, sequences=3)
        for step in range(4):
            of_hub(model, tokens(seed=step))().backward()
            assert (monitor.step() is None) == bool(step % 2)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) or (
                step % 2
            ), "in a step that is not watched there is no hook"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["step"], x["layer"], x["head"]) for x in lines] == [
        (step, layer, head) for step in (0, 2) for layer in (0, 1) for head in (0, 1)
    ]
    assert all(list(x) == list(COLUMNS) for x in lines)
    assert [x["alarm"] for x in lines] == [False, False, False, True] * 2
    assert caplog.text.count("ALARM in 1 of 4") == 1
    assert "in transformer.h.1.attn, head 1 the error" in caplog.text
    table = pd.read_json(path, lines=True)
    kinds = {name: table[name].dtype.kind for name in table}
    assert {kinds.pop("of"), kinds.pop("module")} <= {*"OTU"} and kinds.pop("alarm") == "b"
    assert {name for name, kind in kinds.items() if kind == "i"} >= {"step", "layer", "head"}
    assert measures.alarmed(table).equals(table.alarm)
    goes_on = Monitor(model, every=2, path=path, step=4)
    of_hub(model, tokens())().backward()
    goes_on.step()
    assert pd.read_json(path, lines=True).step.tolist()[-4:] == [4] * 4


def test_a_full_disk_or_a_line_that_was_cut_off_spoils_no_other_line(hub, tmp_path, caplog):
    """A limit on the size of files stands in for the disk: the write comes back in the middle."""
    model, path = llama(hub), tmp_path / "m.jsonl"
    with Monitor(model, every=1, path=path) as monitor:
        of_hub(model, tokens(1, 32))().backward()
        monitor.step()
        whole, before = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
        of_hub(model, tokens(1, 32))().backward()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, before[1]))
        try:
            with caplog.at_level(logging.WARNING, "lowprec.monitor"):
                assert len(monitor.step()) == 8
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step 1: cannot write: " in caplog.text and path.read_text() == whole
    path.write_text(whole + '{"step": 1, "lay')
    with Monitor(model, every=1, path=path, step=2) as monitor:
        of_hub(model, tokens(1, 32))().backward()
        monitor.step()
    lines = path.read_text().splitlines()
    assert lines[8] == '{"step": 1, "lay' and len(lines) == 17
    assert [json.loads(line)["step"] for line in lines[:8] + lines[9:]] == [0] * 8 + [2] * 8


def test_numbers_that_are_not_finite_are_null_and_end_no_training(tmp_path, caplog):
    model, path = tiny(), tmp_path / "m.jsonl"
    monitor = Monitor(model, every=1, path=path)
    gpt_loss(model, 0).backward()
    monitor.step()
    with torch.no_grad():
        model.blocks[1].qkv.weight[0, 0] = float("nan")
    gpt_loss(model, 1).backward()
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        monitor.step()
    assert "not finite" in monitor.left_out[1]
    assert caplog.text.count("that are not watched: ") == 1
    assert "blocks.1: attention has numbers that are not finite" in caplog.text
    assert "NaN" not in path.read_text()


def test_of_a_longer_sequence_the_beginning_is_what_the_whole_is_of_a_short_one():
    model, ids = tiny(), tokens(2, 49)
    table = watched(model, lambda: model(ids[:, :-1], ids[:, 1:]), length=32)
    whole = watched(model, lambda: model(ids[:, :-1], ids[:, 1:]), length=48)
    short = watched(model, lambda: model(ids[:, :32], ids[:, 1:33]))
    assert table.logit.to_numpy() == pytest.approx(short.logit.to_numpy())
    assert table.entropy.to_numpy() == pytest.approx(short.entropy.to_numpy())
    assert (table.gradient != whole.gradient).all()


def square(rows):
    return torch.tensor(rows, dtype=torch.bool)[None, None]


def alibi(length=40):
    """What falls with the distance is added, by head."""
    i = torch.arange(length)
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    return ((i - i[:, None]) * slopes).masked_fill(i > i[:, None], -math.inf)


LOWER = torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "mask,causal,how,expected",
    [
        (None, True, {}, 4),
        (None, False, {}, "it is not causal"),
        (torch.ones(1, 1, 4, 4, dtype=torch.bool), False, {}, "it is not causal"),
        (LOWER[None, None], False, {}, 4),
        (torch.zeros(1, 1, 4, 4).masked_fill(~LOWER, -1e9), False, {}, 4),
        (LOWER[None, None] & torch.tensor([True, True, True, False]), False, {}, 3),
        (LOWER[None, None] & torch.tensor([False, True, True, True]), False, {}, "its mask hides"),
        (LOWER[None, None] & ~LOWER.tril(-3)[None, None], False, {}, 3),
        (square([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]), False, {}, 2),
        (torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), True, {}, 3),
        (torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), True, dict(count=1), 4),
        (torch.zeros(1, 1, 4, 4).masked_fill(~LOWER, -9984.0), False, {}, 4),
        (torch.zeros(1, 1, 4, 4).masked_fill(~LOWER, -99.0), False, {}, "its mask adds a bias"),
        (alibi(4)[None], False, {}, "its mask adds a bias"),
        (torch.full((1, 1, 4, 4), math.nan), False, {}, "its mask adds a bias"),
        (torch.ones(2, 1, 4, 1, dtype=torch.bool), True, {}, "it is not causal"),
        (None, True, dict(window=3), 3),
        (None, True, dict(positions=torch.tensor([[0, 1, 0, 1]])), 2),
        (None, True, dict(positions=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])), 2),
        ("block mask", True, {}, "its mask is a str"),
    ],
)  # fmt: skip
def test_how_far_a_call_is_plain_causal_attention(mask, causal, how, expected):
    """Padding on the right, windows, packed documents: to where they begin to show."""
    q = torch.zeros(2, 1, 4, 8)
    found = plain_length(mask, causal, q, q, **how)
    assert found == expected or isinstance(expected, str) and found.startswith(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", ["qk", "qkv"])
def test_what_autocast_casts_inside_of_attention_is_measured_as_cast(dtype, wide):
    """As of q and k that a norm left in float32: the dtype is that of the output."""

    class Normed(Plain):
        def forward(self, x):
            parts = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3))
            given = [t.float() if name in wide else t for t, name in zip(parts, "qkv", strict=True)]
            return F.scaled_dot_product_attention(*given, is_causal=True)

    tables, x = [], torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0))
    for kind in (Normed, Plain):
        torch.manual_seed(0)
        model, plain = kind(), kind is Plain
        if plain:
            model.out = nn.Identity()

        def loss(model=model, plain=plain):
            with torch.autocast("cpu", dtype):
                o = model(x) - x if plain else model(x).transpose(1, 2).flatten(2)
            return o.float().square().sum()

        tables.append(watched(model, loss))
    for name in ("share", "share_all", "gradient"):
        assert tables[0][name].to_numpy() == pytest.approx(tables[1][name].to_numpy(), rel=0.05)


NEAR = torch.ones(48, 48, dtype=torch.bool).tril() & ~torch.ones(48, 48).tril(-40).bool()


@pytest.mark.parametrize(
    "mask,expected",
    [
        (torch.stack([torch.ones(48, 48, dtype=torch.bool).tril(), NEAR]), 40),
        (NEAR, 40),
        (torch.ones(48, 48, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1), 48),
    ],
    ids=["heads", "all", "sequences"],
)
def test_a_mask_of_heads_is_one_for_each(mask, expected):
    x, tables = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0)), []
    for how, length in ((dict(mask=mask), 512), ({}, expected)):
        torch.manual_seed(0)
        model = Plain(**how)
        loss = lambda model=model: model(x).square().sum()  # noqa: E731
        tables.append(watched(model, loss, length=length))
    assert tables[0].logit.to_numpy() == pytest.approx(tables[1].logit.to_numpy())


@pytest.mark.parametrize("keys,found", [([[0, 20], [0, 30]], 30), ([[8, 48], [8, 48]], HIDDEN)])
@pytest.mark.parametrize("documents", [False, True])
def test_padding_counts_beside_documents(keys, found, documents):
    class Padded(Plain):
        def forward(self, x):
            parts = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3))
            return lowprec.sdpa(*parts, self.mask, policy="ALL_FP32")

    x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0))
    parts = dict(documents=(torch.arange(48) // 40).expand(2, -1)) if documents else {}
    model = Padded(mask=Mask(causal=True, keys=torch.tensor(keys), **parts))
    saw = []
    for given in (x, x[1:, :30]):
        monitor = Monitor(model, every=1)
        model(given).square().sum().backward()
        saw.append((monitor.step(), monitor.left_out))
        model.mask = Mask(causal=True)
    if found == HIDDEN:
        assert saw[0] == (None, {0: HIDDEN})
    else:
        assert saw[0][0].logit.to_numpy() == pytest.approx(saw[1][0].logit.to_numpy())


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("floats", [False, True])
def test_sequences_padded_on_the_left_are_passed_over(hub, sequences, floats):
    model, ids = llama(hub), tokens(4, 48)
    mask = torch.ones_like(ids)
    mask[0, :10] = mask[2, :5] = 0
    if floats:
        lowest = torch.finfo(torch.float32).min
        seen = torch.ones(48, 48).tril().bool() & mask[:, None, None, :].bool()
        mask = torch.zeros(4, 1, 48, 48).masked_fill(~seen, lowest)
    table = watched(model, of_hub(model, ids, attention_mask=mask), sequences=sequences)
    alone = watched(model, of_hub(model, ids[[1, 3]]), sequences=sequences)
    of_all = dict(logit=1, share=1, gradient=2, error=2)  # the loss is a mean of twice as many
    for name, times in of_all.items():
        assert times * table[name].to_numpy() == pytest.approx(alone[name].to_numpy(), rel=1e-3)


LOWER_32 = torch.ones(32, 32, dtype=torch.bool).tril()


def of_lengths(*spans):
    """A causal mask (B, 1, 32, 32) of sequences that begin and end at these tokens."""
    first, end = torch.tensor(spans).T[..., None]
    kept = (torch.arange(32) >= first) & (torch.arange(32) < end)
    return LOWER_32 & kept[:, None, None]


def made_visible(mask):
    """With rows that see no key made to see all."""
    return mask | ~mask.any(-1, keepdim=True)


@pytest.mark.parametrize(
    "mask, keys, rows",
    [
        (torch.ones(0, 1, 32, 32, dtype=torch.bool), None, []),
        (torch.ones(4, 1, 0, 0, dtype=torch.bool), None, [0]),
        (torch.tensor(True), None, [0]),
        (made_visible(of_lengths((0, 22), (5, 32), (0, 32), (0, 12))), None, [2]),
        (made_visible(of_lengths((0, 22), (5, 32), (0, 30), (0, 12)))[:, 0], None, [2]),
        (of_lengths((0, 3), (0, 30), (0, 30), (0, 30)) | of_lengths((3, 32)), None, [0]),
        (None, [[0, 9], [0, 20], [2, 32], [0, 1]], [1]),
        (of_lengths((0, 32), (0, 5), (0, 32), (0, 32)), [[0, 9], [0, 20], [2, 32], [0, 1]], [0]),
    ],
)
def test_which_sequence_is_measured(mask, keys, rows):
    keys = None if keys is None else torch.tensor(keys)
    count = 4 if mask is None or not mask.dim() else len(mask)
    assert watch._fullest(mask, keys, count, 1, 512) == rows


def test_of_packed_sequences_the_one_with_the_longest_first_document_is_measured():
    second = torch.arange(32) >= torch.tensor([3, 30, 31, 30])[:, None]
    mask = (LOWER_32 & (second[:, None] == second[..., None]))[:, None]
    assert watch._fullest(mask, None, 4, 1, 512) == [2]
    assert watch._fullest(mask, None, 4, 4, 512) == [1, 2, 3]


def test_positions_of_several_axes_are_left_whole():
    taken = watch._taken([1], 4)
    assert taken(torch.zeros(3, 4, 32)).shape == (3, 4, 32) and taken(None) is None
    assert taken(torch.zeros(4, 32)).shape == (1, 32)


def test_a_range_of_keys_that_hides_the_first_token_of_some(hub):
    class Padded(Plain):
        def forward(self, x):
            parts = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3))
            return lowprec.sdpa(*parts, self.mask, policy="ALL_FP32")

    x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([[8, 48], [0, 48]])
    dense = torch.arange(48) >= kept[:, None, None, :1]
    tables = []
    for given, parts in (x, dict(keys=kept)), (x, dict(dense=dense)), (x[1:], {}):
        torch.manual_seed(0)
        model = Padded(mask=Mask(causal=True, **parts))
        tables.append(watched(model, lambda m=model, x=given: m(x).square().sum()))
    for name in ("logit", "gradient", "share"):
        for table in tables[:2]:
            assert table[name].to_numpy() == pytest.approx(tables[2][name].to_numpy(), rel=1e-3)


def test_that_nothing_is_measured_is_said_again(hub, caplog):
    model, ids = llama(hub), tokens(2, 48)
    mask = torch.ones_like(ids)
    mask[:, :10] = 0
    monitor = Monitor(model, every=1)
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        for _ in range(17):
            of_hub(model, ids, attention_mask=mask)().backward()
            assert monitor.step() is None
    assert [m.split("(")[0] for m in caplog.messages] == [
        "step 0: nothing was measured ", "step 7: nothing measured in 8 steps ",
        "step 15: nothing measured in 16 steps ",
    ]  # fmt: skip


@pytest.mark.parametrize("apart, first", [(1, 0), (10, 0), (7, 3), (1024, 0)])
def test_of_numbers_that_jump_as_many_steps_are_watched(hub, apart, first):
    model, ids = llama(hub), tokens(1, 32)
    monitor, found = Monitor(model, every=3, step=first), []
    for i in range(8):
        of_hub(model, ids)().backward()
        found.append(monitor.step(first + i * apart) is not None)
    assert found == [True, False, False] * 2 + [True, False] or apart == 7 and any(found[5:])


def test_a_monitor_that_is_never_stepped_says_so(hub, caplog, tmp_path):
    model, ids, path = llama(hub), tokens(1, 32), tmp_path / "m.jsonl"
    for calls in (0, 1):
        with caplog.at_level(logging.WARNING, "lowprec.monitor"), Monitor(model, path=path) as some:
            of_hub(model, ids)().backward()
            for _ in range(calls):
                some.step()
        assert ("saw no step" in caplog.text) is not bool(calls)
        caplog.clear()
    for step in (0, 1):
        with caplog.at_level(logging.WARNING, "lowprec.monitor"):
            Monitor(model, path=path, step=step)
        assert ("has rows already, up to step 0" in caplog.text) is not bool(step)
        caplog.clear()
    for text, said in (('{"step": 5}\n', "up to step 5"), ("step,layer\n", "up to step inf")):
        path.write_text(text)
        with caplog.at_level(logging.WARNING, "lowprec.monitor"):
            Monitor(model, path=path, step=5)
        assert said in caplog.text
    with pytest.raises(UserError, match="model is a function; give the module"):
        Monitor(tokens)


def test_a_model_may_give_the_mask_by_its_name(hub, monkeypatch):
    model, ids = llama(hub), tokens(1, 32)
    path = type(model.model.layers[0].self_attn).__module__
    module = sys.modules[path]
    plain = module.ALL_ATTENTION_FUNCTIONS

    class ByName:
        def get_interface(self, *given):
            door = plain.get_interface(*given)
            return lambda m, q, k, v, mask, **how: door(m, q, k, v, attention_mask=mask, **how)

    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", ByName())
    with Monitor(model, every=1) as monitor:
        of_hub(model, ids)().backward()
        assert set(monitor.step().layer) == {0, 1}


def test_a_file_stays_where_it_was_named(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, ids = llama(hub), tokens(1, 32)
    with Monitor(model, every=1, path="m.jsonl") as monitor:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        of_hub(model, ids)().backward()
        monitor.step()
    assert (tmp_path / "m.jsonl").is_file() and not (tmp_path / "other" / "m.jsonl").exists()


def test_a_model_that_only_looks_is_told_so(hub, caplog):
    model, ids = llama(hub), tokens(1, 32)
    monitor = Monitor(model, every=1)
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        for step in range(9):
            loss = of_hub(model, ids)()
            if not step:
                loss.backward()
            monitor.step()
    assert "step 8: nothing measured in 8 steps (no backward came back)" in caplog.text


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "ends, sequences, rows",
    [
        ([30, 20], 1, [0]), ([20, 30], 1, [1]), ([30, 48, 40], 2, [1, 2]), ([30, 4, 30], 3, [0, 2]),
        ([4, 48, 48], 3, [1, 2]), ([30, 30], 1, [0]),
    ],
)  # fmt: skip
def test_of_a_batch_padded_on_the_right_the_sequences_with_most_tokens_are_measured(
    ends, sequences, rows, dense, hub
):
    """One short sequence neither stands for the batch nor cuts the others."""
    model, ids = llama(hub), tokens(len(ends), 48)
    mask = (torch.arange(48) < torch.tensor(ends)[:, None]).long()
    given = mask
    if dense:
        given = torch.ones(48, 48).tril().bool() & mask[:, None, None, :].bool()
    table = watched(model, of_hub(model, ids, attention_mask=given), sequences=sequences)
    least = min(ends[i] for i in rows)
    alone = watched(model, of_hub(model, ids[rows, :least]), sequences=sequences)
    assert table.logit.to_numpy() == pytest.approx(alone.logit.to_numpy())
    assert set(table.tokens) == {len(rows) * least}


@pytest.mark.parametrize("kind", ["padded", "short", "scaled"])
def test_a_batch_that_cannot_be_measured_is_said_once_and_the_next_is_watched(hub, kind, caplog):
    model, ids = llama(hub), tokens(2, 48)
    mask = torch.ones_like(ids)
    mask[:, :10] = 0
    words, bad = {
        "padded": ("its mask hides the first token", of_hub(model, ids, attention_mask=mask)),
        "short": ("9 tokens; 16 and more are needed", of_hub(model, ids[:, :9])),
        "scaled": ("not finite: .* scaled too far", lambda: of_hub(model, ids)() * math.inf),
    }[kind]
    monitor, found = Monitor(model, every=10), []
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        for loss in (bad, bad, of_hub(model, ids), bad):
            loss().backward()
            found.append(monitor.step())
    assert [table is None for table in found] == [True, True, False, True]
    assert monitor.left_out == {}
    assert len(caplog.messages) == 1 and re.search(words, caplog.text)


def test_an_error_in_a_watched_forward_is_that_error():
    model = Plain()
    with Monitor(model), pytest.raises(IndexError, match="Dimension out of range"):
        model(torch.randn(32))
    assert not model._forward_hooks and F.scaled_dot_product_attention is SDPA


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1])
def test_after_a_forward_that_failed_the_next_is_watched(error, at):
    """Also where no hook sees the end of it."""

    class Failing(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails:
                self.fails = False
                raise error("full")
            return x

    torch.manual_seed(0)
    model, x, tables = nn.Sequential(Plain(), Failing(), Plain()), torch.randn(1, 24, 32), []
    monitor = Monitor(model, every=1)
    for step in range(2):
        model[1].fails = step == at
        try:
            model(x).square().sum().backward()
        except error:
            model(x).square().sum().backward()
        tables.append(monitor.step())
    assert tables[0].layer.tolist() == [0, 0, 1, 1]
    pd.testing.assert_frame_equal(*(table.assign(step=0) for table in tables))
    monitor.close()
    assert F.scaled_dot_product_attention is SDPA
    model[1].fails, monitor = True, Monitor(model, every=1)  # a batch that is left out
    with pytest.raises(error):
        model(x)
    assert monitor.step() is None
    monitor.close()
    assert monitor.left_out == {0: "the forward ended before its output"}


def test_whatever_measuring_raises_a_training_goes_on(monkeypatch):
    model, x = Plain(), torch.randn(1, 24, 32)
    monkeypatch.setattr(measures, "measure", lambda call: {}["what"])
    monitor = Monitor(model, every=1)
    model(x).square().sum().backward()
    assert monitor.step() is None and monitor.left_out == {0: "'what'"}


def test_numbers_that_are_added_to_the_scores_are_said():
    for mask in (alibi(), alibi()[None], alibi() + 0.1, alibi()[0]):
        model, x = Plain(mask=mask), torch.randn(20, 40, 32)
        with pytest.raises(UserError, match="none of 1 calls.*its mask adds a bias to the scores"):
            watched(model, lambda model=model, x=x: model(x).square().sum(), sequences=16)


def test_a_first_batch_of_one_token_a_sequence_ends_no_training(hub):
    model = llama(hub)
    with Monitor(model, every=1) as monitor:
        for length in (1, 40):
            of_hub(model, tokens(length=length))().backward()
            table = monitor.step()
            assert (table is None) == (length == 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "lowprec"])
def test_a_sequence_of_one_token_is_passed_over(hub, implementation):
    huggingface.register(policy="FA2")
    model, ids = llama(hub, implementation), tokens(4, 40)
    mask = torch.ones_like(ids)
    mask[1, 1:] = 0
    table = watched(model, of_hub(model, ids, attention_mask=mask), sequences=4)
    alone = watched(model, of_hub(model, ids[[0, 2, 3]]), sequences=3)
    for name, times in dict(logit=1, share=1, gradient=4 / 3).items():  # the loss is a mean
        assert times * table[name].to_numpy() == pytest.approx(alone[name].to_numpy(), rel=0.01)


def test_a_layer_without_a_gradient_is_said():
    model, x = nn.Sequential(Plain(), Plain()), torch.randn(1, 24, 32)
    model[0].requires_grad_(False)
    with Monitor(model, every=1) as monitor:
        model(x).square().sum().backward()
        assert set(monitor.step().layer) == {1}
    assert monitor.left_out == {
        0: "it has no gradient: its layer is frozen, or checkpointed with use_reentrant"
    }


def test_a_policy_that_draws_is_left_out():
    model = tiny(policy="FA2", layers={"0": "FA2+o=bf16:stochastic"})
    with Monitor(model, every=1) as monitor:
        gpt_loss(model, 0).backward()
        assert set(monitor.step().layer) == {1}
    assert monitor.left_out == {0: "its policy draws random bits"}


def test_a_call_is_measured_in_its_tiles_and_fp16_under_its_own_policy():
    class Tiled(Plain):
        def forward(self, x, tile):
            parts = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3))
            return attention(*parts, "LOW", tile=tile).float()

    model, x = Tiled(), torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    whole, tiled = (watched(model, lambda t=t: model(x, t).sum()).share for t in (None, 8))
    assert not whole.equals(tiled)
    model, policies = Plain().half(), (None, watch.USUAL[torch.float16], "FA2")
    own, usual, fa2 = (
        watched(model, lambda: model(x.half()).float().sum(), policy=policy).share
        for policy in policies
    )
    assert own.equals(usual) and not own.equals(fa2)


def test_eager_attention_without_a_mask_is_not_causal(hub, monkeypatch):
    monkeypatch.setattr(hub.models.llama.modeling_llama, "create_causal_mask", lambda **_: None)
    model = llama(hub, "eager")
    with pytest.raises(UserError, match="2 calls of attention: it is not causal"):
        watched(model, of_hub(model, tokens(1)))


def test_one_token_of_many_sequences_has_no_mean_score():
    model, x = Plain(mask=torch.eye(4, dtype=torch.bool)), torch.randn(20, 4, 32)
    monitor = Monitor(model, every=1, sequences=16)
    model(x).square().sum().backward()
    assert monitor.step() is None
    assert monitor.left_out == {0: "16 tokens; 2 of a sequence and more are needed"}


def test_what_cannot_be_measured_is_not_watched_for_ever():
    """Watched steps are eager: after a few the others are compiled again."""
    model, x, calls = Plain(mask=LOWER), torch.randn(1, 4, 32), []
    compiled = torch.compile(
        model, backend=lambda graph, _: lambda *given: calls.append(1) or graph(*given)
    )
    monitor, watching = Monitor(compiled, every=20), []
    for step in range(30):
        watching += [step] * (monitor.watch is not None)
        compiled(x).square().sum().backward()
        assert monitor.step() is None
    assert watching == [*range(8), *range(20, 28)] and len(calls) == 14


def test_the_first_micro_batch_of_a_step_is_watched_and_no_pass_without_gradients():
    model = tiny()
    alone = watched(model, lambda: gpt_loss(model, 0))
    monitor = Monitor(model, every=2)
    with torch.no_grad():
        gpt_loss(model, 7)
    for seed in (0, 1, 2):
        gpt_loss(model, seed).backward()
    pd.testing.assert_frame_equal(monitor.step(), alone)


@pytest.mark.parametrize("back", [[0], [1], [0, 1]], ids=["first", "second", "both"])
def test_the_forward_is_watched_whose_backward_comes(back):
    model = tiny()
    alone = [watched(model, lambda seed=seed: gpt_loss(model, seed)) for seed in (0, 1)]
    monitor = Monitor(model, every=2)
    losses = [gpt_loss(model, seed) for seed in (0, 1)]
    sum(losses[i] for i in back).backward()
    gpt_loss(model, 2).backward()
    pd.testing.assert_frame_equal(monitor.step(), alone[back[-1]])


def test_checkpointed_layers_have_the_same_numbers(hub):
    model, ids = llama(hub).train(), tokens()
    plain = watched(model, of_hub(model, ids))
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    pd.testing.assert_frame_equal(watched(model, of_hub(model, ids)), plain)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_compiled_model_is_watched_and_compiled_once(inner, fullgraph):
    """Also where the monitor has the model that was compiled; other monitors change nothing."""
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 40, 32)
    plain, calls, graphs = watched(model, lambda: model(x).square().sum()), [], []

    def backend(graph, _):
        graphs.append(graph)
        return lambda *inputs: calls.append(1) or graph(*inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    monitors = [Monitor(model if inner else compiled, every=2) for _ in range(2)]
    for step in range(4):
        compiled(x).square().sum().backward()
        for table in [monitor.step() for monitor in monitors]:
            assert (table is None) == bool(step % 2)
            if table is not None:
                pd.testing.assert_frame_equal(table.assign(step=0), plain)
        assert len(calls) == (step + 1) // 2, "a watched step is eager"
    assert len(graphs) == 1


@pytest.mark.parametrize("how", ["copied", "saved"])
def test_a_copy_of_a_watched_model_is_not_watched(how, tmp_path):
    model = tiny()
    monitor = Monitor(model, every=1)
    if how == "copied":
        other = copy.deepcopy(model)
    else:
        torch.save(model, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
    doors = []
    other.blocks[0].register_forward_pre_hook(
        lambda *_: doors.append(F.scaled_dot_product_attention)
    )
    ids = tokens() % model.config.vocab_size
    other(ids, ids).backward()
    assert doors == [SDPA] and not monitor.watch.called and not watch.INSIDE
    model(ids, ids).backward()
    assert monitor.step() is not None
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_a_monitor_that_is_not_closed_ends_with_its_name():
    model = Plain()
    monitor = Monitor(model, every=1)
    assert model._forward_hooks
    del monitor
    assert not model._forward_hooks


class Scalars(list):
    def add_scalar(self, name, value, step):
        self.append((name, value, step))

    def flush(self):
        pass


def test_a_writer_gets_the_worst_head_of_each_call():
    model, writer = tiny(), Scalars()
    table = watched(model, lambda: gpt_loss(model, 0), writer=writer)
    scalars = {name: value for name, value, step in writer if step == 0}
    assert scalars["attention/share/blocks.1"] == table.share[table.layer == 1].max()
    assert scalars["attention/entropy/blocks.0"] == table.entropy[table.layer == 0].min()
    assert scalars["attention/alarms"] == 0 and len(scalars) == 13
    watching._scalars(writer, 1, table.assign(common=range(-9, len(table) - 9)))
    assert ("attention/common/blocks.0", 9, 1) in writer


def test_a_folder_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    model = tiny()
    watched(model, lambda: gpt_loss(model, 0), writer=tmp_path / "board")
    assert next((tmp_path / "board").glob("events*")).stat().st_size > 100


def test_a_trainer_calls_it(hub, tmp_path):
    pytest.importorskip("accelerate")
    model = llama(hub)
    monitor = Monitor(model, every=3, path=tmp_path / "m.jsonl")
    rows = [dict(input_ids=ids, labels=ids) for ids in tokens(32)]
    arguments = hub.TrainingArguments(
        tmp_path / "out", max_steps=5, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    hub.Trainer(model, arguments, train_dataset=rows, callbacks=[monitor.callback()]).train()
    assert sorted(set(pd.read_json(tmp_path / "m.jsonl", lines=True).step)) == [0, 3]
    assert monitor.watch is None, "closed with the training"


def test_the_callback_counts_as_the_trainer_does(hub):
    model = llama(hub)
    monitor = Monitor(model, every=10)
    callback, state = monitor.callback(), hub.TrainerState(global_step=19)
    callback.on_train_begin(None, state, None)
    for step in (19, 20):
        state.global_step = step
        of_hub(model, tokens())().backward()
        callback.on_pre_optimizer_step(None, state, None)
    assert set(monitor.table.step) == {20}
    callback.on_train_end(None, state, None)
    assert monitor.watch is None


def ranked(rank, folder):
    """One of two processes that train together."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(tiny())
    with Monitor(model, every=2, path=folder / "monitor.jsonl") as monitor:
        for step in range(3):
            gpt_loss(model, 2 * step + rank).backward()
            table = monitor.step()
            if table is not None:
                table.to_json(folder / f"rank{rank}-{step}.json")
            model.zero_grad()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_write_one_file_of_both(tmp_path):
    torch.multiprocessing.spawn(ranked, (tmp_path,), nprocs=2)
    table, model = pd.read_json(tmp_path / "monitor.jsonl", lines=True), tiny()
    assert len(table) == 8 and set(table.step) == {0, 2}
    each = [watched(model, lambda seed=seed: gpt_loss(model, seed)) for seed in (0, 1)]
    first = table[table.step == 0].reset_index()
    for name in ("entropy", "common", "key_share"):
        mean = (each[0][name] + each[1][name]) / 2
        assert first[name].to_numpy() == pytest.approx(mean.to_numpy(), rel=1e-4)
    largest = each[0].logit.combine(each[1].logit, max)
    assert first.logit.to_numpy() == pytest.approx(largest, rel=1e-5)
    norms = [((a**2 + b**2) / 2) ** 0.5 for a, b in
             ((each[0][n], each[1][n]) for n in ("error", "gradient"))]  # fmt: skip
    assert first.share.to_numpy() == pytest.approx((norms[0] / norms[1]).to_numpy(), rel=1e-4)
    ranks = [pd.read_json(tmp_path / f"rank{rank}-2.json") for rank in (0, 1)]
    pd.testing.assert_frame_equal(*ranks)


class Own(nn.Linear):
    """Attention of its own, which calls nothing that is watched."""

    def forward(self, x):
        q = super().forward(x)
        return (q @ x.mT).softmax(-1) @ x


def test_what_cannot_be_watched_is_said_at_the_first_step(tmp_path):
    x, plain = torch.randn(2, 20, 32), Plain(causal=False)
    for model, run, words in (
        (Own(32, 32), lambda m: m(x).sum(), "saw no attention: it watches"),
        (plain, lambda m: m(x).sum(), "none of 1 calls of attention: it is not causal"),
        (Plain(), lambda m: Plain()(x).sum(), "saw no forward of its model"),
    ):
        with pytest.raises(UserError, match=words):
            watched(model, lambda model=model, run=run: run(model))
    monitor = Monitor(Plain(), every=1)
    monitor.model(x)
    with pytest.raises(UserError, match="call step\\(\\) after backward"):
        monitor.step()
    for how, words in ((dict(every=0), "every=0"), (dict(every=2.5), "every=2.5 must be a whole"),
                       (dict(length=4), "length=4"), (dict(length=16.0), "length=16.0"),
                       (dict(path=tmp_path), "cannot write")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            Monitor(plain, **how)
    assert F.scaled_dot_product_attention is SDPA


class Adapted(nn.Module):
    """Queries from a frozen map and an adapter of rank 4, or from a map and a matrix behind it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.down, self.up = kind, nn.Linear(32, 4), nn.Linear(4, 32)
        self.base = nn.Linear(32, 32)
        self.base.requires_grad_(kind != "adapter")
        self.behind = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        y = self.base(x)
        q = y + self.up(self.down(x)) if self.kind == "adapter" else y @ self.behind
        q, k = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in (q, x))
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


@pytest.mark.parametrize("kind", ["adapter", "behind"])
@pytest.mark.parametrize("asks", [False, True])
def test_gradients_are_of_what_makes_q_last_and_is_trained(kind, asks):
    torch.manual_seed(0)
    model, x = Adapted(kind), torch.randn(1, 24, 32, requires_grad=asks)
    with Monitor(model, every=1) as monitor:
        for _ in range(2):  # what was found is known the second time
            model.zero_grad()
            model(x).square().sum().backward()
            table = monitor.step()
    assert (table["of"] == ("W_Q" if kind == "adapter" else "dQ")).all()
    if kind == "adapter":
        exact = model.up.weight.grad.view(2, -1).norm(dim=1)
        assert table.gradient.to_numpy() == pytest.approx(exact.numpy(), rel=0.02)


def test_numbers_that_are_added_may_be_a_mask_under_our_function_too(monkeypatch):
    torch.manual_seed(0)
    x, causal = torch.randn(1, 24, 32), nn.Transformer.generate_square_subsequent_mask(24)
    model, tables = Plain(mask=causal), []
    for function in (SDPA, lowprec.sdpa):
        monkeypatch.setattr(F, "scaled_dot_product_attention", function)
        tables.append(watched(model, lambda: model(x).square().sum(), policy="SAFE"))
    for name in ("logit", "gradient", "entropy"):
        assert tables[0][name].to_numpy() == pytest.approx(tables[1][name].to_numpy(), rel=0.02)
    model.mask = causal + torch.randn(24, 24).abs()
    with pytest.raises(UserError, match="adds a bias"):
        watched(model, lambda: model(x).square().sum())


def test_a_model_may_hold_its_monitor_and_be_saved(tmp_path):
    model = tiny()
    model.monitor = Monitor(model, every=1)
    ids = tokens() % model.config.vocab_size
    model(ids, ids).backward()
    seen = model.monitor.step()
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    model.monitor.close()
    for _ in range(2):
        other.zero_grad()
        other(ids, ids).backward()
        table = other.monitor.step()
    other.monitor.close()  # else nothing runs compiled
    pd.testing.assert_frame_equal(table.drop(columns="step"), seen.drop(columns="step"))


def test_a_norm_over_all_heads_goes_head_by_head(hub):
    """OLMo 2 has one: an output of W_Q is of all heads."""
    torch.manual_seed(0)
    config = hub.Olmo2Config(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=32, intermediate_size=64,
        vocab_size=300, pad_token_id=0,
    )  # fmt: skip
    model, ids = hub.Olmo2ForCausalLM(config), tokens(2)
    table = watched(model, of_hub(model, ids), sequences=2)
    call = emulated(model, ids, "FA2")[0]
    whole, _ = call.norms(call.seen["dq"])
    apart, ((_, x, out),) = [], call.norms.maps
    for head in range(2):
        dq = torch.zeros_like(call.seen["dq"])
        dq[:, head] = call.seen["dq"][:, head]
        g = torch.autograd.grad(call.norms.q, out, dq, retain_graph=True)[0]
        apart.append(torch.einsum("btd,btc->dc", g, x).norm().item())
    assert whole.tolist() == pytest.approx(apart, rel=1e-4) and call.norms.heads is None
    assert table.gradient.to_numpy() == pytest.approx(apart, rel=0.02)


def test_steps_are_counted_where_no_number_is_one_s_turn(hub):
    from lowprec import Monitor

    model, ids = llama(hub), tokens(1, 32)
    monitor, found = Monitor(model, every=3, step=1), []
    for i in range(8):
        of_hub(model, ids)().backward()
        found.append(monitor.step(1 + 3 * i) is not None)
    assert found == [False] * 3 + [True, False, False, True, False]


def test_of_two_ranks_the_logit_is_the_largest_and_norms_are_root_mean_squares(monkeypatch):
    one = dict(head=0, of="W_Q") | dict.fromkeys(watching.MEANS + watching.SQUARES, 1.0)
    some = dict(layer=1, module="b", tokens=40)
    rows = [one | some | dict(logit=x, gradient=x, common=x) for x in (1.0, 7.0)]
    other = one | dict(layer=0, module="b/call_1", logit=2.0, tokens=2)

    def gather(parts, mine):
        parts[:] = [mine, [rows[1], other]]

    yes = dict.fromkeys(("is_available", "is_initialized"), lambda: True)
    there = SimpleNamespace(get_world_size=lambda: 2, all_gather_object=gather, **yes)
    monkeypatch.setattr(watching, "dist", there)
    alone, both = watching._reduced(rows[:1])
    assert alone == other and (both["module"], both["layer"]) == ("b", 1)
    assert (both["logit"], both["common"], both["gradient"]) == (7, 4, pytest.approx(5))
    assert both["tokens"] == 80


def test_a_warning_names_the_head_of_the_largest_error(caplog):
    watch = object.__new__(Monitor)
    watch.ringing, watch.path, watch.writer = set(), None, None
    table = pd.DataFrame(dict(module="a.b", head=[0, 1], error=[1.0, 2.0], alarm=True, logit=1.0))
    table = table.assign(
        share=0.5, share_all=0.5, key_share=1.0, common=20.0, gradient=1.0, layer=4
    )
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        watch._tell(3, table, set())
    assert "in a.b, head 1 the error" in caplog.text and "as if in BF16" not in caplog.text
    watch.ringing = set()
    with caplog.at_level(logging.WARNING, "lowprec.monitor"):
        watch._tell(4, table, {4})
        watch._tell(5, table.assign(alarm=False), set())
        watch._tell(6, table, set())
    assert "; read as if in BF16, which this attention is not. What" in caplog.text
    assert caplog.text.count("ALARM") == 3


@pytest.mark.parametrize(
    "dtype, policy, function",
    [
        (None, None, SDPA), (torch.bfloat16, None, SDPA), (None, "FA2", SDPA),
        (None, None, lowprec.sdpa),
    ],
)  # fmt: skip
def test_attention_in_fp32_is_known_to_be_read_as_if_in_bf16(dtype, policy, function, monkeypatch):
    """But ours, which is in BF16 where its policy says so."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", function)
    model, x = Plain(), torch.randn(1, 40, 32)
    seeing = watch.Watch(model, policy)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        model(x).square().sum().backward()
    seeing.stop()
    assert seeing.seen.as_if == (set() if dtype or function is lowprec.sdpa else {0})
    assert seeing.seen.found


def test_nothing_of_nothing_is_nothing():
    found = watching._quotient(pd.Series([0.0, 1.0]), pd.Series([0.0, 2.0]))
    assert found.tolist() == [0, 0.5]
