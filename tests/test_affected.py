"""The probe: its numbers are those of an ordinary backward, and it rings where it must."""

import copy
import dataclasses
import gc
import json
import resource
import weakref

import pandas as pd
import pytest
import scipy.stats
import torch

from lowprec import UserError, __main__
from lowprec.attention.reference import oracle
from lowprec.diagnose import loading, measures, scores
from lowprec.diagnose import probe as affected
from lowprec.diagnose.calls import emulated
from lowprec.numerics.formats import BF16, ulp
from lowprec.numerics.policy import FA2, SAFE
from lowprec.records import files
from lowprec.training import loop as train
from lowprec.training.capture import Capture
from lowprec.training.config import PRESETS
from lowprec.training.model import GPT

CAPTURES = files.data_root() / "captures"


def small(hub, kind):
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    if kind == "gpt2":
        return hub.GPT2LMHeadModel(hub.GPT2Config(n_layer=2, n_head=2, n_embd=32, **sizes))
    config = hub.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             hidden_size=32, intermediate_size=86, **sizes)  # fmt: skip
    return hub.LlamaForCausalLM(config)


def weight_gradients(model, kind, tokens):
    """Norms of each head's rows of the W_Q gradient, layer by layer, by an ordinary backward."""
    model.set_attn_implementation("eager")
    model.eval()(input_ids=tokens, labels=tokens).loss.backward()
    if kind == "gpt2":
        grads = [b.attn.c_attn.weight.grad[:, :32].mT for b in model.transformer.h]
    else:
        grads = [b.self_attn.q_proj.weight.grad for b in model.model.layers]
    heads = 2 if kind == "gpt2" else 4
    return [g.reshape(heads, -1).double().norm(dim=1) for g in grads]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_exact_gradient_is_that_of_the_weights(hub, kind):
    """Through rotary positions, repeated heads, a fused projection; BF16 inputs move it little."""
    tokens = torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(1))
    calls = emulated(small(hub, kind).eval(), tokens, "FA2")
    wanted = weight_gradients(small(hub, kind), kind, tokens)
    for call, norms in zip(calls, wanted, strict=True):
        dq = call.seen["dq"]
        together, each = call.norms(dq)
        torch.testing.assert_close(together, norms, rtol=0.02, atol=0)
        for b in range(len(dq)):
            alone = torch.zeros_like(dq)
            alone[b] = dq[b]
            torch.testing.assert_close(call.norms(alone)[0], each[b])


def test_a_gpt_goes_the_same_way():
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(PRESETS["tiny"].model(), policy="ALL_FP32"))
    tokens = torch.randint(0, 300, (2, 33))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for call, block in zip(emulated(model, tokens, None), model.blocks, strict=True):
        dq = call.seen["dq"]
        norms = block.qkv.weight.grad[:64].reshape(2, -1).double().norm(dim=1)
        torch.testing.assert_close(call.norms(dq)[0], norms, rtol=0.02, atol=0)
        assert str(call.policy) == "ALL_FP32" and "attention" not in vars(block)


def test_errors_of_equal_sequences_are_coherent_and_cancel_in_no_batch():
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(PRESETS["tiny"].model(), policy="FA2"))
    one = torch.randint(0, 300, (1, 33))
    alone = measures.table(emulated(model, one, None), "")
    same = measures.table(emulated(model, one.expand(4, -1), None), "")
    assert alone.coherence.isna().all() and same.coherence.to_numpy() == pytest.approx(1)
    # the gradient is of the mean loss: an error that does not cancel keeps its length, and a
    # quarter of dO is rounded as dO is
    assert same.error.to_numpy() == pytest.approx(alone.error.to_numpy(), rel=1e-3)
    other = torch.cat([one, torch.randint(0, 300, (3, 33))])
    table = measures.table(emulated(model, other, None), "")
    parts = [measures.table(emulated(model, b[None], None), "").error for b in other]
    apart = sum((p / len(other)) ** 2 for p in parts)
    expected = (table.error**2 - apart) / (3 * apart)
    assert table.coherence.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-3)


def test_of_several_sequences_numbers_are_means_and_the_logit_is_the_largest(hub):
    model, ids = small(hub, "llama").eval(), torch.arange(96).view(2, 48) ** 2 % 300
    both, *each = (measures.table(emulated(model, x, "FA2"), "") for x in (ids, ids[:1], ids[1:]))
    for name in ("tied", "key_share", "common", "tv"):
        mean = (each[0][name] + each[1][name]) / 2
        assert both[name].to_numpy() == pytest.approx(mean.to_numpy(), rel=1e-3), name
    assert both.logit.equals(each[0].logit.where(each[0].logit > each[1].logit, each[1].logit))


def test_errors_of_one_sign_have_a_bias_of_1_whatever_the_number_of_rows():
    q, k, v, do = torch.randn(4, 1, 2, 23, 8, generator=torch.Generator().manual_seed(0))

    def norms(dq):
        return dq.square().sum((0, 2, 3)).sqrt(), dq.square().sum((2, 3)).sqrt()

    call = measures.Call(0, FA2, 1.0, norms, *(x.bfloat16() for x in (q, k, v, do)), q, k)
    seen = measures.rows(call)
    call.seen = seen | dict(eps=-torch.arange(23.0, dtype=torch.float64).expand_as(seen["eps"]))
    assert measures.measure(call)["delta_bias"].tolist() == [-1, -1]


@pytest.mark.parametrize("other", [{"text": "a.txt"}, {"length": 64}, {"sequences": 1}])
def test_a_capture_takes_no_other_text(other):
    with pytest.raises(UserError, match="a capture brings its own text; leave text, sequences"):
        affected.probe(CAPTURES / "fa2-b-seed4-1580.xz", **other)


def test_a_capture_is_probed_by_its_name():
    ours, theirs = (
        affected.probe(x) for x in ("fa2-b-seed4-1580", CAPTURES / "fa2-b-seed4-1580.xz")
    )
    pd.testing.assert_frame_equal(ours, theirs)


@pytest.mark.parametrize("name", ["loss.csv", "monitor.jsonl"])
def test_a_curve_is_no_model(tmp_path, name):
    (tmp_path / name).write_text("step,loss\n0,10.8\n")
    with pytest.raises(UserError, match=f"{name} has no weights: losses and norms alone"):
        affected.probe(tmp_path / name)


@pytest.mark.parametrize("name", ["fa2-b-seed4-1580", "low-c-seed6-1230"])
def test_a_capture_has_the_numbers_of_its_replay(name):
    capture = Capture.load(CAPTURES / f"{name}.xz")
    row = affected.probe(capture).iloc[0]
    t = capture.replay(device="cpu")
    e = capture.query_error(t)[0]
    exact = oracle(*(capture.tensors[n] for n in "qkv"), scale=capture.scale,
                   do=capture.tensors["do"])  # fmt: skip
    g = exact.dq[0, 0].mT @ capture.tensors["x"][0].double()
    assert row.share == pytest.approx((e.norm() / g.norm()).item(), rel=1e-3)
    whole = (t.dq.double() - exact.dq)[0, 0].mT @ capture.tensors["x"][0].double()
    assert row.share_all == pytest.approx((whole.norm() / g.norm()).item(), rel=1e-3)
    full = scores.unrounded(capture)
    parts = scores.parts(*full, capture.scale)
    stored = (capture.tensors[n].double() for n in "qk")
    moved = scores.total_variation(
        *(scores.probabilities(*pair, capture.scale) for pair in (full, stored))
    )
    assert row.tv == pytest.approx(moved)
    stored = (capture.tensors[n].double() for n in "qk")
    assert row.logit == pytest.approx(scores.causal_scores(*stored, capture.scale).max().item())
    assert row.key_share == pytest.approx(parts["key_share"])
    assert row.common == pytest.approx(parts["common"])
    assert row.delta_low < row.delta_bias < row.delta_high and pd.isna(row.coherence)
    eps = (t.delta_o - t.delta_ref).double()
    assert row.delta_bias == pytest.approx((eps.sum() / eps.abs().sum()).item())
    assert row.tied == (t.ties > 1).double().mean().item()
    wrong = (t.o.double() - exact.o).sum() / ulp(exact.o, BF16).sum()
    assert row.o_bias == pytest.approx(wrong.item())


@pytest.mark.parametrize(
    "name,rings",
    [
        ("fa2-a-seed1-1520", True),
        ("fa2-b-seed4-1580", True),
        ("low-c-seed6-1230", True),
        ("fa2-a-healthy-seed1-1680", False),
        ("low-c-healthy-seed6-1230", False),
    ],
)
def test_it_rings_on_failing_captures_only(name, rings):
    table = affected.probe(CAPTURES / f"{name}.xz")
    assert table.alarm.tolist() == [rings] == (table.share_all >= affected.SHARE).tolist()
    assert affected.verdict(table).startswith("ALARM in 1 of 1" if rings else "No alarm")


@pytest.mark.parametrize(
    "name,below", [("share", 0.19), ("share_all", 0.19), ("key_share", 0.89), ("common", -9.9)]
)
def test_an_alarm_needs_each_of_four_numbers(name, below):
    at = pd.DataFrame([dict(share=0.2, share_all=0.2, key_share=0.9, common=-10.0)])
    assert measures.alarmed(at).tolist() == [True]
    assert measures.alarmed(at.assign(**{name: below})).tolist() == [False]
    assert measures.alarmed(at.assign(**{name: float("nan")})).tolist() == [False]


@pytest.mark.parametrize("words,status", [([], 0), (["--fail-on-alarm"], 1)])
def test_an_alarm_is_a_failure_where_that_is_asked_for(words, status, capsys):
    ill, well = (str(CAPTURES / f"low-c-{name}seed6-1230.xz") for name in ("", "healthy-"))
    assert __main__.main(["probe", ill, *words]) == status
    assert "ALARM in 1 of 1" in capsys.readouterr().out
    assert __main__.main(["probe", well, *words]) == 0


@pytest.mark.parametrize(
    "common,share,rings", [(0.0, 0.0, False), (0.01, 64.0, False), (0.5, 64.0, True)]
)
def test_a_planted_common_part_rings_in_its_head(hub, common, share, rings):
    """A bias of all keys changes no softmax, and its rounding ruins one head's gradient. Without
    one of the queries the scores stay small and nothing rings."""
    model = small(hub, "gpt2")
    with torch.no_grad():
        bias = model.transformer.h[1].attn.c_attn.bias
        bias[16:32] += common
        bias[48:64] += share
    table = affected.probe(model, length=64)
    ill = table[table.share >= affected.SHARE][["layer", "head"]].to_numpy().tolist()
    assert ill == ([[1, 1]] if share else [])
    assert table.alarm.sum() == rings
    said = affected.verdict(table)
    assert said.startswith("ALARM in 1 of 4" if rings else "No alarm")
    assert ("needs a mean score" in said) == (share > 0 and not rings)
    assert model.config._attn_implementation != "lowprec-probe"


@pytest.mark.parametrize("change", ["bfloat16", "compile", "layers", "wrapped"])
def test_a_model_is_read_in_float32_and_eagerly_and_left_as_it_was(hub, change):
    model = small(hub, "llama").bfloat16().float().train()
    model.model.eval()
    expected = affected.probe(model, length=64)
    if change == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    elif change != "wrapped":
        getattr(model, change)()
    dtype, modes = model.dtype, [m.training for m in model.modules()]
    given = torch.compile(model, backend="eager") if change == "wrapped" else model
    pd.testing.assert_frame_equal(affected.probe(given, length=64), expected)
    assert model.dtype == dtype and (expected.tv > 0).all()
    assert [m.training for m in model.modules()] == modes and model.training


def frozen(model):
    return model.requires_grad_(False)


def partly(model):
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "change,mode",
    [
        (frozen, torch.enable_grad),
        (partly, torch.enable_grad),
        (lambda m: m, torch.no_grad),
        (lambda m: m, torch.inference_mode),
        (copy.deepcopy, torch.inference_mode),
        (lambda m: m, lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
    ids=["frozen", "partly", "no_grad", "inference", "made there", "autocast"],
)
def test_what_is_switched_off_around_a_model_does_not_matter(hub, change, mode):
    expected = affected.probe(small(hub, "llama"), length=64)
    with mode():
        model = change(small(hub, "llama"))
        before = [p.requires_grad for p in model.parameters()]
        pd.testing.assert_frame_equal(affected.probe(model, length=64), expected)
    assert [p.requires_grad for p in model.parameters()] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_ends_with_its_name_after_it_was_probed(hub, dtype, monkeypatch):
    model = small(hub, "llama").to(dtype)
    kept, deepcopy = [weakref.ref(model)], copy.deepcopy

    def copied(x, *memo):
        x = deepcopy(x, *memo)
        if not memo:
            kept.append(weakref.ref(x))
        return x

    with monkeypatch.context() as patched:
        patched.setattr(affected.copy, "deepcopy", copied)
        affected.probe(model, length=64)
    assert len(kept) == 1 + (dtype != torch.float32)
    del model
    gc.collect()
    assert [model() for model in kept] == [None] * len(kept)
    assert "lowprec-probe" not in hub.AttentionInterface().valid_keys()


def test_a_model_without_a_loss_is_one_sentence(hub):
    with pytest.raises(UserError, match="a LlamaModel is no causal language model.*it has no loss"):
        affected.probe(small(hub, "llama").model, length=64)


def test_a_model_that_reads_no_tokens_as_their_labels_is_one_sentence(hub):
    config = small(hub, "llama").config
    with pytest.raises(UserError, match="a LlamaForSequenceClassification is no causal language"):
        affected.probe(hub.LlamaForSequenceClassification(config), length=64)
    sizes = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32,
                 image_size=32, patch_size=16)  # fmt: skip
    with pytest.raises(UserError, match="a ViTForImageClassification reads no tokens"):
        affected.probe(hub.ViTForImageClassification(hub.ViTConfig(**sizes)))


def test_a_fault_of_a_language_model_is_its_own(hub, monkeypatch):
    model = small(hub, "llama")
    monkeypatch.setattr(model.lm_head, "forward", lambda x: x.nothing)
    with pytest.raises(AttributeError, match="nothing"):
        affected.probe(model, length=64)


@pytest.mark.parametrize("own", [True, False])
def test_layers_have_the_numbers_of_the_model_where_it_has_them(hub, own):
    """Some layers of a hybrid have no attention."""
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, block_ff_dim=64)  # fmt: skip
    model = hub.Lfm2ForCausalLM(hub.Lfm2Config(layer_types=kinds, **sizes))
    if not own:
        for layer in (1, 3):
            del model.model.layers[layer].self_attn.layer_idx
    assert affected.probe(model, length=48).layer.unique().tolist() == ([1, 3] if own else [0, 1])


def test_layers_that_share_a_number_have_those_of_their_calls(hub):
    model = small(hub, "llama")
    model.model.layers[1].self_attn.layer_idx = 0
    assert affected.probe(model, length=48).layer.unique().tolist() == [0, 1]


def test_a_gpt_is_probed_in_its_own_tiles():
    shape, shares = dataclasses.replace(PRESETS["tiny"].model(), policy="LOW"), []
    for tile in (None, 16):
        torch.manual_seed(0)
        model = GPT(dataclasses.replace(shape, tile=tile))
        shares.append(affected.probe(model, length=64).share)
    assert not shares[0].equals(shares[1])


def test_a_seed_draws_the_weights_and_the_text(hub, tmp_path):
    small(hub, "gpt2").config.save_pretrained(tmp_path)
    models = [loading.load(tmp_path / "config.json", seed)[0] for seed in (0, 1)]
    assert not torch.equal(*(model.lm_head.weight for model in models))
    texts = [loading.tokens(None, None, 50257, 2, 64, seed)[0] for seed in (0, 1)]
    assert not torch.equal(*texts)


def test_a_capture_is_read_under_the_policy_that_is_given():
    own, exact = (
        affected.probe(CAPTURES / "fa2-b-seed4-1580.xz", policy=policy).share[0]
        for policy in (None, "ALL_FP32")
    )
    assert exact < 0.01 * own


def test_another_module_is_for_the_monitor():
    with pytest.raises(UserError, match="a Linear is no transformers model.*lowprec.Monitor"):
        affected.probe(torch.nn.Linear(3, 3))


def test_policies_that_a_probe_does_not_take_are_named():
    shape = PRESETS["tiny"].model()
    with pytest.raises(UserError, match="o=bf16:stochastic.* draws random bits"):
        affected.probe(GPT(shape), policy="FA2+o=bf16:stochastic", length=64)
    with pytest.raises(UserError, match="several policies; give one with --policy"):
        affected.probe(GPT(dataclasses.replace(shape, layers={"1/1": "ALL_FP32"})), length=64)


def test_exact_attention_has_no_error(hub):
    table = affected.probe(small(hub, "gpt2"), policy="ALL_FP32", length=64)
    rounded = affected.probe(small(hub, "gpt2"), policy=FA2, length=64)
    assert table.share.max() < 0.1 * rounded.share.min()
    assert table.o_bias.abs().max() < 1e-3


def test_a_refined_delta_shows_in_the_whole_error_alone(hub):
    """`share` is what a stored output does to a delta that reads it. In the last layer dO is the
    same under both policies."""
    rounded, refined = (
        affected.probe(small(hub, "gpt2"), policy=policy, length=64).set_index(["layer", "head"])
        for policy in (FA2, "FA2+row_sum=refined")
    )
    last = rounded.index.get_level_values("layer").max()
    assert refined.share.loc[last].equals(rounded.share.loc[last])
    assert (refined.share_all.loc[last] < rounded.share_all.loc[last]).all()


def test_the_command(hub, tmp_path, capsys):
    small(hub, "llama").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    (tmp_path / "some.txt").write_text("def f(x):\n    return x + 1\n" * 20)
    words = ["probe", str(tmp_path / "config.json"), "--text", str(tmp_path / "some.txt")]
    outputs = ["--figure", str(tmp_path / "f.png"), "--table", str(tmp_path / "t.csv")]
    assert __main__.main([*words, *outputs]) == 0
    out, err = capsys.readouterr()
    assert "No alarm in 8 head(s)" in out
    noise = (
        "some.txt, as bytes for want of its tokenizer, so noise to a model that was trained with"
    )
    assert f"Read: random weights of seed 0, and 4 x 64 tokens of {noise} another" in out
    assert f"lowprec: the model reads {noise}" in err
    assert "; attention emulated under FA2." in out
    assert (tmp_path / "f.png").stat().st_size > 5000
    table = (tmp_path / "t.csv").read_text().splitlines()
    assert len(table) == 9 and table[0].split(",") == list(affected.COLUMNS)
    assert __main__.main([*words[:2], "--text", str(tmp_path / "none.txt")]) == 2
    assert "there is no text" in capsys.readouterr().err
    assert __main__.main([*words[:2], "--text", "the text itself\n" * 1000]) == 2
    error = capsys.readouterr().err
    assert error == "lowprec: there is no text the text itself; name a file\n"


def test_weights_of_a_folder_are_read(hub, tmp_path):
    model = small(hub, "gpt2")
    model.save_pretrained(tmp_path)
    (tmp_path / "some.txt").write_text("abc " * 100)
    tables = [affected.probe(m, tmp_path / "some.txt", length=64) for m in (model, tmp_path)]
    assert tables[0].equals(tables[1])


def test_a_checkpoint_is_read_under_its_own_policy(tmp_path):
    config = dataclasses.replace(PRESETS["tiny"], policy="LOW")
    torch.manual_seed(0)
    model = GPT(config.model())
    state = dict(config=json.dumps(dataclasses.asdict(config)), model=model.state_dict())
    torch.save(state, tmp_path / "checkpoint.pt")
    table = affected.probe(tmp_path / "checkpoint.pt", length=64)
    other = affected.probe(tmp_path / "checkpoint.pt", policy="FA2", length=64)
    assert len(table) == 4 and (table.share > other.share).all()
    assert table.equals(affected.probe(model, length=64))
    (tmp_path / ".weights").mkdir()
    torch.save(model.state_dict(), tmp_path / ".weights" / "step-000100.pt")
    info = dict(arm="a", config=dataclasses.asdict(config), hardware="CPU", ended="completed")
    (tmp_path / "run.json").write_text(json.dumps(info))
    assert table.equals(affected.probe(tmp_path / ".weights" / "step-000100.pt", length=64))


def test_a_run_s_own_checkpoint_is_read(tmp_path, monkeypatch):
    gradients, steps = train._gradients, iter(range(3))

    def killed(*how):
        if next(steps) == 2:
            raise KeyboardInterrupt
        return gradients(*how)

    monkeypatch.setattr(train, "_gradients", killed)
    monkeypatch.chdir(files.repo_root())
    config = dataclasses.replace(PRESETS["tiny"], policy="LOW", checkpoint_every=2, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train.train(config, tmp_path / "a")
    table = affected.probe(tmp_path / ".a.part" / "checkpoint.pt", length=64)
    assert len(table) == 4 and table.share.isna().sum() == 0


@pytest.mark.parametrize(
    "name,words",
    [
        ("nothing", "there is no"),
        ("nothing.pt", "there is no"),
        ("a.pt", "holds no checkpoint or weights of a run"),
        ("a.ckpt", "watch it with lowprec.Monitor"),
        ("config.json", "cannot read"),
        ("", "has no weights"),
    ],
)
def test_a_mistake_is_one_sentence(hub, tmp_path, name, words):
    if "nothing" not in name:
        (tmp_path / (name or "config.json")).write_text("{}")
    with pytest.raises(UserError, match=words):
        affected.probe(tmp_path / name)


@pytest.mark.parametrize("name", ["nothing", "nothing.json", "nothing.xz"])
def test_a_missing_path_is_named_as_it_was_typed(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"^there is no (capture )?{name}\b"):
        affected.probe(name)
    with pytest.raises(UserError, match="there is no .*/data/captures/fa2.xz; that folder has fa2"):
        affected.probe("data/captures/fa2.xz")  # a folder of the repository alone


def test_a_run_folder_is_told_from_a_model(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="is a run; give its checkpoint.pt"):
        affected.probe(tmp_path)


@pytest.mark.parametrize("name", ["step-000010.pt", "step-000010.xz"])
def test_a_folder_of_weights_or_captures_names_its_files(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"is a folder; give one file of it: {name}$"):
        affected.probe(tmp_path)


def test_a_path_that_is_not_there_is_named_as_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^there is no out/model; give a folder"):
        affected.probe("out/model")


def test_a_folder_of_a_training_by_transformers_names_its_checkpoints(tmp_path):
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="give one of checkpoint-500, checkpoint-1000 in it"):
        affected.probe(tmp_path)
    (tmp_path / "checkpoint-500" / "config.json").unlink()
    with pytest.raises(UserError, match="has no weights and no config.json; give a model's folder"):
        affected.probe(tmp_path / "checkpoint-500")


def test_a_long_line_is_read_as_far_as_it_is_needed(tmp_path, monkeypatch):
    read, encoded = [], loading._encoded
    monkeypatch.setattr(loading, "_encoded", lambda t, *how: read.append(t) or encoded(t, *how))
    path = tmp_path / "a.txt"
    path.write_text("ab" * 1_000_000)
    tokens, _ = loading.tokens(path, None, 300, 4, 64, 0)
    assert tokens.shape == (4, 64) and len(read[0]) == 8 * 256 and len(read) == 1
    # eight bytes of text a token are not always enough, and a short text is read whole
    monkeypatch.setattr(loading, "_encoded", lambda t, *_: ([0] * (len(t) // 100), "-"))
    assert loading.tokens(path, None, 300, 4, 64, 0)[0].shape == (4, 64)
    path.write_text("ab" * 15_000)
    for length, shape in ((1000, (1, 300)), (100, (3, 100)), (110, (3, 100)), (210, (1, 210))):
        assert loading.tokens(path, None, 300, 6, length, 0)[0].shape == shape


@pytest.mark.parametrize("damaged", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_is_one_sentence(hub, tmp_path, damaged):
    small(hub, "gpt2").save_pretrained(tmp_path)
    path, text = tmp_path / damaged, tmp_path / "some.txt"
    text.write_text("abc " * 100)
    if damaged == "tokenizer.json":
        path.write_text("{}")
    elif damaged == "config.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"n_layer": "x"}))
    else:
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="transformers cannot read"):
        affected.probe(tmp_path, text)


def saved_as(hub, kind, folder, change):
    """A small model's folder, its weights by the names and tensors that `change` makes of them."""
    from safetensors.torch import load_file, save_file

    small(hub, kind).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


WRAPPED = ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "a layer"]


def wrapped(weights, wrapper):
    """The names that weights have in a wrapped model, or in one whose first layer is compiled."""
    if wrapper == "a layer":
        return {
            name.replace("s.0.", "s.0._orig_mod.").replace("h.0.", "h.0._orig_mod."): weight
            for name, weight in weights.items()
        }
    return {wrapper + name: weight for name, weight in weights.items()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_weights_of_a_wrapped_module_are_the_model_s(hub, tmp_path, kind, wrapper):
    """As torch.compile and distributed wrappers save them; not random ones in their place."""
    saved_as(hub, kind, tmp_path, lambda w: wrapped(w, wrapper))
    expected = affected.probe(small(hub, kind).float(), length=64, sequences=2)
    pd.testing.assert_frame_equal(affected.probe(tmp_path, length=64, sequences=2), expected)


@pytest.mark.parametrize("wrapper", [*WRAPPED[:4], ""])
def test_weights_of_a_run_are_all_read_whatever_wraps_them(tmp_path, wrapper):
    config = dataclasses.replace(PRESETS["tiny"], policy="LOW")
    torch.manual_seed(0)
    model, path = GPT(config.model()), tmp_path / "checkpoint.pt"

    def save(weights):
        torch.save(dict(config=json.dumps(dataclasses.asdict(config)), model=weights), path)

    save(wrapped(model.state_dict(), wrapper))
    assert affected.probe(path, length=64).equals(affected.probe(model, length=64))
    save(wrapped({k: x for k, x in model.state_dict().items() if "s.1." not in k}, wrapper))
    with pytest.raises(UserError, match=r"lack blocks\.1\.\w+\.weight and \d more; save the whole"):
        affected.probe(path, length=64)


LAYER = {"transformer.h.2.attn.c_attn.weight": torch.ones(32, 96)}


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda w: {k: x for k, x in w.items() if ".1." not in k}, r"lack .*\.1\..* and \d+ more"),
        (lambda w: {k: x for k, x in w.items() if "wte" not in k}, r"lack (.*wte|lm_head)"),
        (lambda w: {k: x for k, x in w.items() if "ln_f" not in k}, r"lack .*ln_f"),
        (lambda w: w | LAYER, "have transformer.h.2.attn.c_attn.weight, for which it has no place"),
        (lambda w: {k.removeprefix("transformer."): x for k, x in (w | LAYER).items()},
         r"have (transformer\.)?h.2.attn.c_attn.weight, for which"),
        (lambda w: w | {"transformer.h.0.attn.c_attn.lora_A": torch.ones(32, 4)}, r"have .*lora_A"),
        (lambda w: w | {"transformer.wpe.weight": torch.ones(99, 32)},
         r"have transformer.wpe.weight of shape \(99, 32\), not \(64, 32\)"),
        (lambda w: {f"net.{k}": x for k, x in w.items()}, r"lack .* and have net\."),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_and_not_drawn(hub, tmp_path, capfd, change, words):
    saved_as(hub, "gpt2", tmp_path, change)
    capfd.readouterr()
    with pytest.raises(UserError, match=f"do not fit the model of its configuration: they {words}"):
        affected.probe(tmp_path)
    assert "REPORT" not in capfd.readouterr().err, "the sentence says it"


def test_a_model_without_a_head_of_its_own_is_refused(hub, tmp_path):
    """Its gradients would be those of a random one; where it is tied there is nothing to miss."""
    small(hub, "llama").model.save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="they lack lm_head.weight; save the whole model"):
        affected.probe(tmp_path / "a")
    tied = small(hub, "gpt2")
    tied.transformer.save_pretrained(tmp_path / "b")
    expected = affected.probe(tied, length=64)
    pd.testing.assert_frame_equal(affected.probe(tmp_path / "b", length=64), expected)


def test_masks_that_older_versions_stored_are_no_weights(hub, tmp_path):
    stored = {f"transformer.h.0.attn.{name}": torch.ones(1) for name in ("bias", "masked_bias")}
    saved_as(hub, "gpt2", tmp_path, lambda w: w | stored)
    table = affected.probe(tmp_path, length=64)
    assert len(table) == 4 and " without " not in table.attrs["read"]


def test_another_head_beside_a_model_is_left_out_and_said(hub, tmp_path):
    value = {"v_head.summary.weight": torch.ones(1, 32)}
    saved_as(hub, "gpt2", tmp_path, lambda w: w | value)
    read = affected.probe(tmp_path, length=64).attrs["read"]
    assert f"{tmp_path} without v_head.summary.weight, for which it has no place, and 4 x" in read


@pytest.mark.parametrize("whole", [True, False])
def test_weights_in_several_files_are_read_whole(hub, tmp_path, whole):
    model = small(hub, "llama")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.json"
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    if whole:
        pd.testing.assert_frame_equal(
            affected.probe(tmp_path, length=64), affected.probe(model, length=64)
        )
        return
    listed = json.loads(index.read_text())
    last = max(listed["weight_map"].values())
    listed["weight_map"] = {k: f for k, f in listed["weight_map"].items() if f != last}
    index.write_text(json.dumps(listed))
    with pytest.raises(UserError, match="do not fit .* they lack "):
        affected.probe(tmp_path)


def test_a_flipped_bit_of_weights_in_a_torch_file_is_found(hub, tmp_path):
    model, path = small(hub, "gpt2"), tmp_path / "pytorch_model.bin"
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), path)
    assert len(affected.probe(tmp_path, length=64)) == 4
    content = path.read_bytes()
    at = content.index(model.state_dict()["transformer.h.0.mlp.c_fc.weight"].numpy().tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(UserError, match="transformers cannot read .*BadZipFile"):
        affected.probe(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "optimizer.pt"])
def test_a_file_of_a_model_names_its_folder(tmp_path, name):
    (tmp_path / "config.json").touch()
    (tmp_path / name).touch()
    with pytest.raises(
        UserError, match=f"part of a transformers model; give its folder {tmp_path}$"
    ):
        affected.probe(tmp_path / name)


def test_an_adapter_is_not_read_as_its_model(hub, tmp_path):
    small(hub, "gpt2").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter; merge it"):
        affected.probe(tmp_path)


def test_a_head_whose_output_goes_nowhere_has_no_share():
    """As with projections that start from zero: no gradient, and no error of it."""
    model = GPT(PRESETS["tiny"].model())
    torch.nn.init.zeros_(model.blocks[1].proj.weight)
    table = affected.probe(model, length=64)
    assert (table.share > 0).tolist() == [True, True, False, False]
    assert (table[["share", "share_all"]][2:] == 0).all(axis=None)
    assert "nan" not in affected.verdict(table)


def test_sequences_too_short_for_a_mean_score_are_refused():
    with pytest.raises(UserError, match="length 2 are too short"):
        affected.probe(GPT(PRESETS["tiny"].model()), sequences=64, length=2)


def test_a_model_without_a_limit_of_positions(hub):
    """Bloom has none, and its attention goes another way."""
    model = hub.BloomForCausalLM(hub.BloomConfig(vocab_size=300, hidden_size=32, n_layer=1))
    with pytest.raises(UserError, match="no attention was called: bloom has its own.* registry"):
        affected.probe(model, length=64)


def test_a_model_that_reads_images_too_is_probed_by_its_text(hub):
    sizes = dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=32, intermediate_size=64)
    text = sizes | dict(vocab_size=300, num_key_value_heads=1, head_dim=16)
    vision = sizes | dict(image_size=28, patch_size=14)
    config = hub.Gemma3Config(text_config=text, vision_config=vision)
    model = hub.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager", "": "sdpa"})
    assert len(affected.probe(model, length=64)) == 2
    parts = model.config, model.config.text_config, model.config.vision_config
    assert [part._attn_implementation for part in parts] == ["sdpa", "sdpa", "eager"]


def windowed(hub, kind):
    """Layers with a window of 32 tokens: all, five of six, or one."""
    sizes = dict(
        num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, hidden_size=32,
        head_dim=16, intermediate_size=64, vocab_size=300, sliding_window=32,
        max_position_embeddings=128,
    )  # fmt: skip
    if kind == "mistral":
        return hub.MistralForCausalLM(hub.MistralConfig(**sizes))
    if kind == "gemma2":
        kinds = ["full_attention"] * 5 + ["sliding_attention"]
        config = hub.Gemma2Config(**sizes, layer_types=kinds, attn_logit_softcapping=None)
        return hub.Gemma2ForCausalLM(config)
    return hub.Gemma3ForCausalLM(hub.Gemma3TextConfig(**sizes))


@pytest.mark.parametrize(
    "kind,where",
    [
        ("mistral", "the model has"),
        ("gemma3", "layers 0, 1, 2, 3, 4 have"),
        ("gemma2", "^layer 5 has"),
    ],
)
def test_a_window_shorter_than_the_text_is_named(hub, kind, where):
    model = windowed(hub, kind)
    words = f"{where} a sliding window of 32 tokens, and the sequences have 48: .* --length 32"
    with pytest.raises(UserError, match=words):
        affected.probe(model, length=48)
    assert len(affected.probe(model, length=32)) == 12
    assert model.config._attn_implementation != "lowprec-probe"


def latent(hub, **other):
    """Attention whose queries and keys have heads of 24 and whose values have heads of 16."""
    torch.manual_seed(0)
    config = hub.DeepseekV3Config(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=2, **other,
    )  # fmt: skip
    return hub.DeepseekV3ForCausalLM(config)


def test_heads_of_values_may_have_another_size(hub):
    """Latent attention: the exact gradient is that of the weights, here as well."""
    tokens = torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(1))
    calls = emulated(latent(hub, q_lora_rank=None).eval(), tokens, "FA2")
    model = latent(hub, q_lora_rank=None).eval()
    model.set_attn_implementation("eager")
    model(input_ids=tokens, labels=tokens).loss.backward()
    for call, layer in zip(calls, model.model.layers, strict=True):
        wanted = layer.self_attn.q_proj.weight.grad.view(2, -1).double().norm(dim=1)
        torch.testing.assert_close(call.norms(call.seen["dq"])[0], wanted, rtol=0.02, atol=0)
    table = affected.probe(latent(hub, q_lora_rank=16), length=64)
    assert len(table) == 4 and (table.share > 0).all()


@pytest.mark.parametrize(
    "kind,words",
    [("GptOss", r"have sinks \(s_aux\): the probe"), ("Gemma2", r"have a soft cap \(softcap\)")],
)
def test_sinks_and_caps_of_a_model_are_named(hub, kind, words):
    sizes = dict(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, intermediate_size=64,
    )  # fmt: skip
    more = dict(num_local_experts=2, num_experts_per_tok=1) if kind == "GptOss" else {}
    config = getattr(hub, f"{kind}Config")(**sizes, **more)
    model = getattr(hub, f"{kind}ForCausalLM")(config)
    with pytest.raises(UserError, match=f"the scores of the model's attention {words}"):
        affected.probe(model, length=64)
    assert model.config._attn_implementation != "lowprec-probe"


def test_attention_that_is_not_causal_is_refused(hub):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = hub.BertLMHeadModel(hub.BertConfig(vocab_size=300, **sizes))
    with pytest.raises(UserError, match="the probe is for causal attention; this model has"):
        affected.probe(model, length=64)


def test_progress_counts_each_call_twice_and_only_where_it_is_asked_for(capsys):
    model = GPT(PRESETS["tiny"].model())
    calm = affected.probe(model, length=64)
    assert capsys.readouterr().err == ""
    assert affected.probe(model, length=64, progress=True).equals(calm)
    shown = capsys.readouterr().err
    assert "probe, on the CPU" in shown and "/4 " in shown


def test_a_device_that_is_not_there_is_one_sentence(hub, tmp_path):
    small(hub, "gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="there is no device=gpu; take cuda, cpu or auto"):
        affected.probe(tmp_path, length=64, device="gpu")


def test_text_is_not_read_as_bytes_for_want_of_a_vocabulary(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_GPT2_VOCAB", str(tmp_path))
    (tmp_path / "some.txt").write_text("abc " * 100)
    hub.GPT2Config(n_layer=1, n_head=2, n_embd=32).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="GPT-2's vocabulary"):
        affected.probe(tmp_path / "config.json", tmp_path / "some.txt")


def test_an_output_that_cannot_be_written_is_said_before_any_work(tmp_path, capsys):
    for words, mend in (
        (["--figure", "heads.xyz"], "must end in .png"),
        (["--table", str(tmp_path / "none" / "t.csv")], "there is no folder"),
    ):
        assert __main__.main(["probe", "nothing", *words]) == 2
        assert mend in capsys.readouterr().err
    (tmp_path / "d.png").mkdir()
    for words in (["--table", "/proc/t.csv"], ["--figure", str(tmp_path / "d.png")]):
        assert __main__.main(["probe", "nothing", *words]) == 2
        assert f"cannot write {words[1]}: " in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["d.png"]


def test_an_output_that_a_full_disk_cuts_off_is_one_sentence_and_no_file(tmp_path, capsys):
    capture, table = next(CAPTURES.glob("low-c-seed6-*.xz")), tmp_path / "t.csv"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        assert __main__.main(["probe", str(capture), "--table", str(table)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shown = capsys.readouterr()
    assert f"lowprec: cannot write {table}: File too large" in shown.err
    assert "ALARM" in shown.out and not list(tmp_path.iterdir())


def test_a_small_error_is_printed_with_digits(capsys):
    """A healthy head's is far below the fourth decimal."""
    capture = CAPTURES / "low-c-healthy-seed6-1230.xz"
    assert __main__.main(["probe", str(capture)]) == 0
    head, row = (line.split() for line in capsys.readouterr().out.splitlines()[:2])
    shown = float(row[head.index("error")])
    assert shown == pytest.approx(affected.probe(capture).error[0], rel=0.01) and shown > 0


@pytest.mark.parametrize(
    "sizes,words",
    [
        (dict(sequences=0), "sequences=0"),
        (dict(length=0), "length=0"),
        (dict(sequences=2, length=8), "has 16 tokens"),
    ],
)
def test_sizes_too_small(hub, sizes, words):
    with pytest.raises(UserError, match=words):
        affected.probe(small(hub, "gpt2"), **sizes)


@pytest.mark.parametrize(
    "size,words",
    [
        (300, ", its numbers modulo 300: noise to a model that has another, so give it a text"),
        (60000, ": noise to a model that has another, so give it a text"),
        (50257, ""),
        (50304, ""),
    ],
)
def test_without_a_text_it_says_what_was_read(size, words):
    tokens, read = loading.tokens(None, None, size, 2, 64, 0)
    assert read == "the committed text, in GPT-2's vocabulary" + words
    assert tokens.shape == (2, 64) and tokens.max() < size


def test_too_little_text(hub, tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match="a.txt has 5 tokens"):
        affected.probe(small(hub, "gpt2"), tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("long enough " * 100)
    with pytest.raises(UserError, match="2 x 8 has 16 tokens"):
        affected.probe(small(hub, "gpt2"), tmp_path / "a.txt", sequences=2, length=8)


def test_a_model_that_has_failed_is_no_model_without_alarm():
    model = GPT(dataclasses.replace(PRESETS["tiny"].model(), n_layer=1))
    with torch.no_grad():
        model.blocks[0].qkv.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="layer 0 has numbers that are not finite"):
        affected.probe(model, sequences=2, length=64)


def test_an_alarm_names_the_head_of_the_largest_error():
    """Not the one whose gradient is next to nothing, of which any error is many times as long."""
    names = dict.fromkeys(("common", "tv", "share_all", "key_share"), 20.0) | dict(layer=1)
    dead = names | dict(head=6, share=1e32, error=0.004, alarm=True)
    worst = names | dict(head=7, share=1e4, error=0.5, alarm=True)
    well = names | dict(head=8, share=0.01, error=0.9, alarm=False)
    said = affected.verdict(pd.DataFrame([dead, worst, well]))
    assert said.startswith("ALARM in 2 of 3 head(s). The largest error: in layer 1, head 7 the")
    assert "of all roundings 20 times" in said and f"The policy SAFE, {SAFE}, is for" in said
    calm = pd.DataFrame([well, well | dict(head=9, share=0.02, error=0.1)])
    assert "The largest share: in layer 1, head 9 the" in affected.verdict(calm)


@pytest.mark.parametrize("elements", [2**12, 2**13, 2**20])
def test_many_heads_at_once_give_what_one_by_one_do(elements, monkeypatch):
    """As on a GPU: parts of two heads of keys, of some and of all, and many rows."""
    g = torch.Generator().manual_seed(0)
    q, do = (torch.randn(2, 6, 32, 16, generator=g).bfloat16().float() for _ in range(2))
    k, v = (torch.randn(2, 3, 32, 16, generator=g).bfloat16().float() for _ in range(2))
    given = (q, k, v, do, q, k, FA2, 0.25)
    monkeypatch.setattr(measures, "ROWS", 8)
    grads, seen = measures.backward(*given)
    monkeypatch.setitem(measures.AT_ONCE, "cpu", elements)
    assert len(list(measures.blocks(q, k))) < 6
    again, same = measures.backward(*given)
    for a, b in zip([*grads, *seen.values()], [*again, *same.values()], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Nano(torch.nn.Module):
    """A GPT whose checkpoint is nanoGPT's."""

    def __init__(self, bias: bool, width=32, heads=2, layers=2, block=64, vocabulary=96):
        super().__init__()
        self.args = dict(n_layer=layers, n_head=heads, n_embd=width, block_size=block, bias=bias,
                         vocab_size=vocabulary, dropout=0.0)  # fmt: skip
        part = torch.nn.ModuleDict

        def linear(n, m):
            return torch.nn.Linear(n, m, bias=bias)

        def norm():
            return torch.nn.LayerNorm(width, bias=bias)

        blocks = [
            part(dict(
                ln_1=norm(), attn=part(dict(c_attn=linear(width, 3 * width),
                                            c_proj=linear(width, width))),
                ln_2=norm(), mlp=part(dict(c_fc=linear(width, 4 * width),
                                           c_proj=linear(4 * width, width))),
            ))
            for _ in range(layers)
        ]  # fmt: skip
        self.transformer = part(dict(
            wte=torch.nn.Embedding(vocabulary, width), wpe=torch.nn.Embedding(block, width),
            h=torch.nn.ModuleList(blocks), ln_f=norm(),
        ))  # fmt: skip
        self.lm_head = torch.nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids):
        t, heads = self.transformer, self.args["n_head"]
        x = t.wte(ids) + t.wpe.weight[: ids.shape[1]]
        for block in t.h:
            parts = block.attn.c_attn(block.ln_1(x)).chunk(3, -1)
            q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in parts)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.attn.c_proj(y.transpose(1, 2).flatten(2))
            hidden = torch.nn.functional.gelu(block.mlp.c_fc(block.ln_2(x)))
            x = x + block.mlp.c_proj(hidden)
        return self.lm_head(t.ln_f(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path, bias, prefix):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    nano = Nano(bias)
    for p in nano.parameters():
        torch.nn.init.normal_(p, std=0.2)
    state = {prefix + name: weight for name, weight in nano.state_dict().items()}
    config = dict(learning_rate=6e-4, dataset="openwebtext")
    path = tmp_path / "ckpt.pt"
    torch.save(dict(model=state, model_args=nano.args, iter_num=9, config=config), path)
    model, words = loading.load(path, 0)
    ids = torch.randint(96, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, nano(ids), rtol=1e-5, atol=1e-5)
    assert words == f"the weights of {path}"
    assert len(affected.probe(path, sequences=2, length=64)) == 4
    del state[prefix + "transformer.h.1.ln_2.weight"]
    torch.save(dict(model=state, model_args=nano.args), path)
    with pytest.raises(UserError, match="they lack transformer.h.1.ln_2.weight"):
        loading.load(path, 0)


def test_a_checkpoint_of_nanogpt_with_a_head_of_its_own_keeps_both(tmp_path):
    pytest.importorskip("transformers")
    nano, path = Nano(True), tmp_path / "ckpt.pt"
    nano.lm_head.weight = torch.nn.Parameter(torch.randn_like(nano.lm_head.weight))
    torch.save(dict(model=nano.state_dict(), model_args=nano.args), path)
    model, _ = loading.load(path, 0)
    assert torch.equal(model.lm_head.weight, nano.lm_head.weight)
    assert torch.equal(model.transformer.wte.weight, nano.transformer.wte.weight)
    state = nano.state_dict()
    del state["transformer.wte.weight"]
    torch.save(dict(model=state, model_args=nano.args), path)
    with pytest.raises(UserError, match="they lack transformer.wte.weight"):
        loading.load(path, 0)


def test_a_configuration_beside_weights_is_no_model_of_random_ones(tmp_path):
    hub = pytest.importorskip("transformers")
    config = hub.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=96)
    hub.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model.safetensors lies beside it: give their folder"):
        affected.probe(tmp_path / "config.json")


def test_a_tokenizer_of_another_model_is_named(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("a" * 999)
    given = lambda part, *_: (list(range(200)), loading.BESIDE)  # noqa: E731
    monkeypatch.setattr(loading, "_encoded", given)
    for size in (96, 199):
        with pytest.raises(UserError, match=f"numbers up to 199 and the model rows for {size}"):
            loading.tokens(text, tmp_path, size, 2, 64, 0)


def test_the_first_layer_with_a_number_that_is_none_is_named():
    hub = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hub.GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=64, vocab_size=96)
    model = hub.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="layer 1 has numbers that are not finite"):
        affected.probe(model, sequences=2, length=64)


def test_a_model_of_another_kind_and_one_with_its_own_code_are_named(tmp_path):
    hub = pytest.importorskip("transformers")
    small = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    hub.T5ForConditionalGeneration(hub.T5Config(**small)).save_pretrained(tmp_path / "t5")
    with pytest.raises(UserError, match="t5 is no causal language model, which the probe reads"):
        affected.probe(tmp_path / "t5")
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text(
        json.dumps(dict(model_type="mine", auto_map=dict(AutoConfig="config.Mine")))
    )
    (own / "config.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match="code of its own: load it yourself"):
        affected.probe(own / "config.json")


def test_a_folder_without_a_tokenizer_is_named_before_a_download(tmp_path, monkeypatch):
    from lowprec.training.data import text

    def offline():
        raise UserError("GPT-2's vocabulary could not be downloaded")

    monkeypatch.setattr(text, "gpt2_encoding", offline)
    with pytest.raises(UserError, match="has no tokenizer: save it there. Else GPT-2's vocabulary"):
        loading._encoded("a", tmp_path, 50257)
    with pytest.raises(UserError, match="^GPT-2's vocabulary"):
        loading._encoded("a", None, 50257)


def test_the_interval_of_delta_s_bias_is_student_s_over_blocks():
    capture = Capture.load(files.data_root() / "captures" / "fa2-b-seed4-1580.xz")
    row = affected.probe(capture).iloc[0]
    t = capture.replay(device="cpu")
    eps = (t.delta_o - t.delta_ref).double().flatten()
    means = eps.reshape(16, -1).mean(1).numpy()
    low, high = scipy.stats.t.interval(0.95, 15, means.mean(), scipy.stats.sem(means))
    size = eps.abs().mean().item()
    assert (row.delta_low, row.delta_high) == pytest.approx((low / size, high / size), rel=1e-6)
