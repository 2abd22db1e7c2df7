"""Parts of the model: the usual one is as it was, and each exchange trains, resumes, captures."""

import dataclasses
import json
import math
import signal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowprec import UserError
from lowprec.attention import trace
from lowprec.diagnose import probe as affected
from lowprec.diagnose import scores
from lowprec.diagnose.directions import head_cosines, mean_cosine
from lowprec.numerics.policy import ALL_FP32
from lowprec.records import files
from lowprec.records.tables import weights_sha256
from lowprec.studies import landscape, rivals
from lowprec.studies.rotated import take_weights
from lowprec.training import campaign, capture
from lowprec.training.capture import Capture
from lowprec.training.config import LLAMA, PRESETS, TrainConfig
from lowprec.training.loop import train
from lowprec.training.model import GPT, GPTConfig
from lowprec.training.probes import query_error
from lowprec.training.recorder import Recorder
from lowprec.training.rotary import rotate, rotation

PARTS = {
    "none": dict(positions="none"),
    "rotary": dict(positions="rotary"),
    "half": dict(positions="rotary", rotary_share=0.5, rotary_base=100.0),
    "mixed": dict(positions="rotary", unrotated_layers=(0,)),
    "rms": dict(norm="rms"),
    "swiglu": dict(mlp="swiglu", mlp_hidden=48),
    "shared": dict(n_kv_head=2),
    "llama": LLAMA | dict(n_kv_head=1, qk_norm=True),
}
SMALL = dict(n_layer=2, n_head=4, n_embd=32, block_size=24)
USUAL_PARTS = ("positions", "norm", "mlp", "n_kv_head")
"""What a run's summary says where it is not the usual one."""
parts = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())


def made(steep=8, **changes):
    """A model whose scores are of several units, as in a trained layer."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL | dict(vocab_size=64) | changes))
    with torch.no_grad():
        for block in model.blocks:
            block.qkv.weight *= steep
    return model


def batch():
    return torch.randint(64, (2, 3, 24), generator=torch.Generator().manual_seed(1)).unbind()


def config(**changes):
    few = dict(batch_size=2, steps=4, warmup=2, probe_every=2, device="cpu", policy="LOW")
    return TrainConfig(**SMALL | few | dict(data="data/corpora/smoke.safetensors") | changes)


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(files.repo_root())


USUAL = {
    (): ("e751c3990af697481fe3fd41d6cfb40b3e8bb88edec3ec1874a816f8a2ce624c", "0x1.5af1dep+3"),
    ("qk_norm", "center_keys", "gate"): (
        "6f24dffb7f6140ec31577d36032b2e6dfe23f6a8b1c1a4fa0bb7d9542359ef5c", "0x1.5999bep+3",
    ),
}  # fmt: skip
"""Hash of the first weights of `tiny` with some switches, and its loss, before parts could be
exchanged."""


@pytest.mark.parametrize("switches", USUAL)
def test_the_usual_model_is_as_it_was(switches):
    torch.manual_seed(0)
    usual = dataclasses.replace(PRESETS["tiny"].model(), **dict.fromkeys(switches, True))
    model, (weights, loss) = GPT(usual), USUAL[switches]
    assert weights_sha256(model.state_dict()) == weights
    x, y = torch.randint(0, 300, (2, 2, 64), generator=torch.Generator().manual_seed(1))
    assert model(x, y).item() == pytest.approx(float.fromhex(loss), rel=1e-6)


def test_parts_without_weights_leave_the_first_weights_alone():
    """One seed gives arms that differ in positions or norms the same first weights."""
    usual = made().state_dict()
    for name in ("none", "rotary", "mixed", "rms"):
        weights = made(**PARTS[name]).state_dict()
        assert usual.keys() - weights.keys() <= {"position.weight"}
        assert all(torch.equal(usual[key], weight) for key, weight in weights.items())


def test_the_presets_are_of_one_size():
    with torch.device("meta"):
        for usual, llama in (("gpt2", "gpt2-llama"), ("mini", "mini-llama")):
            sizes = [
                sum(p.numel() for p in GPT(PRESETS[name].model()).parameters())
                for name in (usual, llama)
            ]
            assert 0.98 < sizes[1] / sizes[0] < 1
    assert PRESETS["gpt2-llama"].model().hidden == 2048


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rotated_products_know_the_distance_alone(share):
    table = rotation(40, round(16 * share))
    q, k = (torch.randn(16, dtype=torch.float64).expand(40, 16) for _ in range(2))
    products = rotate(q, table) @ rotate(k, table).mT
    for distance in (0, 7):
        of_one = products.diagonal(-distance)
        torch.testing.assert_close(of_one, of_one[:1].expand_as(of_one), rtol=1e-5, atol=1e-5)
    assert (products[0, 0] - products[7, 0]).abs() > 1e-3
    torch.testing.assert_close(rotate(rotate(q, table), table, back=True), q, rtol=0, atol=1e-6)
    assert torch.equal(rotate(q, table)[:, round(16 * share) :], q[:, round(16 * share) :])


def test_rotation_is_computed_in_fp32_and_rounded_once():
    table, x = rotation(24, 8), torch.randn(2, 3, 24, 8).bfloat16()
    turned = rotate(x, table)
    assert turned.dtype == torch.bfloat16 and table.dtype == torch.float32
    exact = rotate(x.double(), table).bfloat16()
    assert (turned != exact).float().mean() < 0.01


def test_layers_turn_or_do_not():
    turns = [block.rotation is not None for block in made(**PARTS["mixed"]).blocks]
    assert turns == [False, True]
    model = made(**PARTS["none"])
    assert model.position is None and not any(b.rotation is not None for b in model.blocks)


def test_a_model_without_positions_sees_no_order_but_the_mask():
    """The last token's logits are the same for any order of the tokens before, with one layer."""
    x, swapped = batch()[0][:1], batch()[0][:1].clone()
    swapped[0, 3], swapped[0, 11] = x[0, 11], x[0, 3]
    how = dict(n_layer=1, policy="ALL_FP32", impl="oracle")
    for part, same in ((PARTS["none"], True), (PARTS["rotary"], False), ({}, False)):
        model = made(**how | part)
        last = []
        for tokens in (x, swapped):
            stream = model.blocks[0](model.placed(model.token(tokens)))
            last.append(model.norm(stream)[0, -1])
        assert torch.allclose(*last, atol=1e-5) == same


def test_centred_keys_are_the_same_function_of_turned_keys():
    how = dict(policy="ALL_FP32", impl="oracle") | PARTS["rotary"]
    plain, centred = (made(center_keys=switch, **how)(*batch()) for switch in (False, True))
    torch.testing.assert_close(centred, plain, rtol=1e-5, atol=0)
    keys = made(center_keys=True, **how).blocks[0].heads(torch.randn(2, 24, 32))[1]
    assert keys.mean(2).abs().max() < 1e-5 * keys.abs().max()


def test_shared_keys_serve_consecutive_heads():
    model = made(n_kv_head=2)
    x = torch.randn(2, 24, 32)
    q, k, v = model.blocks[0].heads(x)
    assert q.shape == (2, 4, 24, 8) and k.shape == v.shape == (2, 2, 24, 8)
    w_q, w_k, w_v = (model.head_weights(which)[0] for which in "qkv")
    assert w_q.shape == (4, 8, 32) and w_k.shape == w_v.shape == (2, 8, 32)
    for t, w in ((q, w_q), (k, w_k), (v, w_v)):
        for head, rows in enumerate(w):
            torch.testing.assert_close(t[:, head], x @ rows.mT)
    o, own = model.blocks[0].attention(q, k, v), [0, 0, 1, 1]
    assert torch.equal(o, model.blocks[0].attention(q, k[:, own], v[:, own]))


@parts
def test_flops_are_those_that_are_done(part):
    """As in the test of the usual model: 6 a parameter of the matmuls, and half of attention."""
    model = made(impl="sdpa", **part | dict(qk_norm=False))
    with FlopCounterMode(display=False) as counter:
        model(*batch()).backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    attention = 2 * (2 * 2 * 24 * 32) / 2 * 3
    assert model.flops_per_token() == products / (3 * 24) + attention


def stop_in_step_4(how, out, monkeypatch):
    measured = Recorder.measured

    def interrupted(self, *numbers):
        measured(self, *numbers)
        if self.step == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="stopped after 4"):
        patch.setattr(Recorder, "measured", interrupted)
        train(how, out, resume=True)


@pytest.mark.parametrize(
    "part",
    [pytest.param(how, id=name, marks=() if name in ("mixed", "llama") else pytest.mark.slow)
     for name, how in PARTS.items()],
)  # fmt: skip
def test_a_part_trains_resumes_bit_by_bit_and_is_read_again(part, tmp_path, monkeypatch):
    how = config(steps=6, checkpoint_every=2, capture_at=(5,), weights_at=(3,), **part)
    whole = train(how, tmp_path / "a")
    stop_in_step_4(how, tmp_path / "b", monkeypatch)
    table = affected.probe(tmp_path / ".b.part/checkpoint.pt", sequences=4)
    assert len(table) == 8 and table.share.notna().all()
    resumed = train(how, tmp_path / "b", resume=True)
    assert resumed.metrics.equals(whole.metrics) and resumed.probes.equals(whole.probes)
    assert resumed.info["weights_sha256"] == whole.info["weights_sha256"]
    assert whole.metrics.loss.iloc[-1] < whole.metrics.loss[0]
    assert ("wide;" in whole.summary()) == set(part).isdisjoint({*USUAL_PARTS})
    again = dataclasses.asdict(TrainConfig(**whole.info["config"]))
    assert json.loads(json.dumps(again)) == whole.info["config"]
    file = Capture.load(tmp_path / "a/captures/step-000005.xz")
    assert file.replay().reproduced
    assert len(affected.probe(file)) == 1
    kept = affected.probe(tmp_path / "a/.weights/step-000003.pt", sequences=4)
    assert len(kept) == 8


def test_the_norm_of_a_shared_key_is_recorded_for_each_head_that_reads_it(tmp_path):
    run = train(config(n_kv_head=2), tmp_path / "a")
    by_head = run.probes[run.probes.step == 3].set_index(["layer", "head"])
    assert len(by_head) == 8
    for layer in range(2):
        keys, queries = by_head.sigma_k[layer], by_head.sigma_q[layer]
        assert keys[0] == keys[1] != keys[2] == keys[3] and queries.nunique() == 4


@parts
def test_the_error_of_the_gradient_is_that_of_the_weights(part):
    """With all but the stored output in FP32, W_Q's gradient of the last layer with delta from
    that output, less the one with delta from the unrounded one, is e."""
    if part.get("qk_norm"):
        part = part | dict(qk_norm=False)  # with it e is of what the norm puts out
    stored = ALL_FP32.replace(o="bf16")
    model = made(policy=str(stored), **part)
    seen = capture.observe(model, *batch(), amp=False)[1]
    e = query_error(seen.q, seen.k, seen.x, capture.query_bias(seen), seen.rotation, policy=stored)
    gradients = []
    for policy in (stored, stored.replace(delta_from="o_fp32")):
        other = made(policy=str(policy), **part)
        other(*batch()).backward()
        gradients.append(other.config.by_head(other.blocks[1].qkv.weight.grad)[0].double())
    wanted = gradients[0] - gradients[1]
    assert (e - wanted).norm() < 2e-3 * wanted.norm()
    if seen.rotation is not None:
        wrong = query_error(seen.q, seen.k, seen.x, capture.query_bias(seen), policy=stored)
        assert (wrong - wanted).norm() > 0.1 * wanted.norm()


@parts
def test_a_window_sets_the_error_beside_the_gradient(part, tmp_path):
    """The window of a run has the sizes that an observation of the same step gives."""
    run = train(config(window=(0, 1), weights_at=(0,), **part), tmp_path / "a")
    table = affected.pd.read_parquet(run.path / "query_error.parquet")
    assert len(table) == 2 * 2 * 4 and table.error_norm.gt(0).all()
    model = GPT(config(**part).model())
    model.load_state_dict(torch.load(run.path / ".weights/step-000000.pt"))
    from lowprec.training.data import shards as data
    from lowprec.training.loop import Group, micro_batches

    tokens = data.load_tokens(config().data)
    ((x, y),) = micro_batches(config(**part), tokens, Group("cpu"), 0)
    seen = capture.observe(model, x, y, amp=False)
    first = table[table.step == 0].set_index(["layer", "head"])
    for layer, s in seen.items():
        e = query_error(s.q, s.k, s.x, capture.query_bias(s), s.rotation, policy="LOW")
        assert first.error_norm[layer].to_numpy() == pytest.approx(e.flatten(1).norm(dim=1).numpy())
    model(x, y).backward()
    for layer, block in enumerate(model.blocks):
        norms = model.config.by_head(block.qkv.weight.grad)[0].flatten(1).norm(dim=1)
        assert first.grad_norm[layer].to_numpy() == pytest.approx(norms.numpy(), rel=1e-4)


@pytest.mark.parametrize("name", ["rotary", "half", "shared"])
def test_a_capture_knows_its_rotation_and_its_keys(name, tmp_path):
    """x and the weights make the q and k that were stored, and dQ the gradient of W_Q."""
    model = made(policy="LOW", **PARTS[name])
    observed = capture.observe(model, *batch(), amp=False)
    info = dict(step=1, run="a", config={}, data_sha256="0")
    path = capture.save(tmp_path / "a.xz", observed, model, 1, (2,), (0, 1, 2), info)
    file = Capture.load(path)
    for name, exact in zip("qk", scores.unrounded(file), strict=True):
        torch.testing.assert_close(exact.float(), file.tensors[name], rtol=1e-4, atol=1e-4)
    model(*batch()).backward()
    wanted = model.config.by_head(model.blocks[1].qkv.weight.grad)[0][2]
    t = file.replay()
    got = rivals.query_gradient(file, t.dq)[0]
    assert (got - wanted).norm() < 1e-4 * wanted.norm()
    norms = affected._capture_call(file, None).norms(t.dq.double())[0]
    assert norms.item() == pytest.approx(wanted.norm().item(), rel=1e-4)


def test_the_suspect_sequence_is_found_behind_a_rotation():
    model = made(policy="LOW", **PARTS["rotary"])
    observed = capture.observe(model, *batch(), amp=False)
    layer, head, sequence = capture.suspect(observed)
    s, sizes = observed[layer], []
    for one in range(3):
        cut = [t[one : one + 1] for t in (s.q, s.k, s.x, capture.query_bias(s))]
        sizes.append(query_error(*cut, s.rotation)[head].norm().item())
    assert sequence == max(range(3), key=sizes.__getitem__)


def test_studies_of_mean_keys_undo_the_rotation():
    """Their mean R is the one whose sum with -scale * eps = 1 `query_error` takes."""
    model = made(policy="ALL_FP32", **PARTS["rotary"])
    text = batch()[0]
    mean = landscape.mean_r(model, text, 1)
    s = capture.observe(model, text, text, amp=False)[1]
    ones = torch.full(s.q.shape[:3], -1.0)
    e = query_error(s.q, s.k, s.x, ones, s.rotation, scale=8**-0.5) / text.numel() * 8**0.5
    assert (mean - e).norm() < 1e-4 * e.norm()
    model.requires_grad_(False)
    table, bare = head_cosines(model, text[0]), head_cosines(made(**PARTS["none"]), text[0])
    assert len(table) == 8 and not bare.cos_r.equals(table.cos_r)
    one = [t[:1] for t in (s.q, s.k, s.x)]
    each = [query_error(*one, row.expand(1, 4, -1), s.rotation) for row in torch.eye(24)]
    cosines = [mean_cosine(e) for e in torch.stack(each, 1).flatten(2)]
    assert table.cos_r[table.layer == 1].to_numpy() == pytest.approx(cosines, abs=1e-4)


def test_runs_from_before_are_read_as_before():
    """A run.json, or a checkpoint, that knows none of the parts is of the usual model."""
    info = json.loads((files.data_root() / "runs/mini/low-seed0/run.json").read_text())
    assert "positions" not in info["config"]
    assert TrainConfig(**info["config"] | dict(device="cpu")).model() == dataclasses.replace(
        PRESETS["mini"].model(), policy="LOW"
    )


def test_a_checkpoint_from_before_goes_on(tmp_path, monkeypatch):
    how = config(steps=6, checkpoint_every=2)
    stop_in_step_4(how, tmp_path / "a", monkeypatch)
    path = tmp_path / ".a.part/checkpoint.pt"
    state = torch.load(path)
    new = {name for part in PARTS.values() for name in part} - {"qk_norm"}
    before = {k: v for k, v in json.loads(state["config"]).items() if k not in new}
    torch.save(state | dict(config=json.dumps(before)), path)
    with pytest.raises(UserError, match="with other norm; take the same"):
        train(dataclasses.replace(how, norm="rms"), tmp_path / "a", resume=True)
    assert train(how, tmp_path / "a", resume=True).info["ended"] == "completed"


CAMPAIGN = """
question: q
predictions: [p]
preset: tiny
train: {policy: FA2, steps: 2}
arms:
  plain: {seeds: [0]}
  nope: {positions: none, seeds: [0]}
  turned: {positions: rotary, unrotated_layers: [1], rotary_share: 0.5, seeds: [0]}
  llama: {positions: rotary, norm: rms, mlp: swiglu, n_kv_head: 1, seeds: [0]}
"""


def test_arms_of_a_campaign_set_parts(tmp_path):
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN)
    jobs = campaign.load_campaign(tmp_path / "campaign.yaml")
    models = {job.arm: job.config.model() for job in jobs}
    assert [models[arm].positions for arm in models] == ["learned", "none", "rotary", "rotary"]
    assert models["llama"].kv_heads == 1 and models["turned"].rotation(0) is not None
    assert models["turned"].rotation(1) is None
    spec = json.loads(next(job for job in jobs if job.arm == "turned").spec())
    assert TrainConfig(**spec["config"]).model().rotated == 16
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN.replace("none", "nowhere"))
    with pytest.raises(UserError, match="arm nope: positions='nowhere' must be one of learned, "):
        campaign.load_campaign(tmp_path / "campaign.yaml")


@pytest.mark.parametrize(
    "changes,word",
    [
        (dict(positions="alibi"), "positions='alibi' must be one of learned, rotary, none"),
        (dict(norm="batch"), "norm='batch' must be one of layer, rms"),
        (dict(mlp="relu"), "mlp='relu' must be one of gelu, swiglu"),
        (dict(mlp_hidden=0), "mlp_hidden=0 must be at least 1"),
        (dict(n_kv_head=3), "n_kv_head=3 must divide n_head=4"),
        (dict(n_kv_head=0), "n_kv_head=0 must divide n_head=4"),
        (dict(n_kv_head=8), "n_kv_head=8 must divide n_head=4"),
        (dict(rotary_share=0.5), "rotary_share is of rotary positions; set positions=rotary"),
        (dict(rotary_base=1e6, positions="none"), "rotary_base is of rotary positions"),
        (dict(unrotated_layers=(1,)), "unrotated_layers is of rotary positions"),
        (dict(positions="rotary", unrotated_layers=(2,)), "must be layers below 2"),
        (dict(positions="rotary", rotary_share=0.375), "turns 3 of 8 channels; take a share"),
        (dict(positions="rotary", rotary_share=0.3), "turns 2.4 of 8 channels; take a share"),
        (dict(positions="rotary", rotary_share=0.0), "turns 0 of 8 channels; take a share"),
        (dict(positions="rotary", rotary_share=1.25), "turns 10 of 8 channels; take a share"),
        (dict(positions="rotary", rotary_share=math.nan), "turns nan of 8 channels"),
        (dict(positions="rotary", n_embd=36), "turns 9 of 9 channels; take a share"),
        (dict(positions="rotary", rotary_base=1.0), "rotary_base=1.0 must be above 1, and finite"),
        (dict(positions="rotary", rotary_base=math.inf), "must be above 1, and finite"),
    ],
    ids=str,
)
def test_parts_that_no_model_can_have_are_refused_in_a_sentence(changes, word):
    with pytest.raises(UserError, match=word):
        config(**changes)


def test_trace_reads_what_the_capture_stores():
    """q and k as attention reads them are turned: the oracle on them is the model's attention."""
    model = made(policy="ALL_FP32", impl="oracle", **PARTS["rotary"])
    s = capture.observe(model, *batch(), amp=False)[0]
    t = trace(s.q, s.k, s.v, s.do, "ALL_FP32", impl="oracle")
    torch.testing.assert_close(t.o.float(), s.o)


def test_a_llama_compiles_into_one_graph():
    """Tables of rotation and shared keys cut no graph, and the loss is the eager one."""
    model, (x, y) = made(policy="LOW", **PARTS["llama"]), batch()
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(model.token(x), y), model(x, y), rtol=1e-6, atol=0)


def llama(keys, tied=True):
    hub = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=keys, hidden_size=32,
        intermediate_size=48, vocab_size=64, max_position_embeddings=24, rms_norm_eps=1e-5,
        initializer_range=0.2, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hub.LlamaForCausalLM(config)


@torch.no_grad()
def copied(theirs, **changes):
    """A GPT with the weights of a transformers Llama whose embeddings are tied."""
    c = theirs.config
    model = made(n_kv_head=c.num_key_value_heads, mlp_hidden=c.intermediate_size, **LLAMA | changes)
    take_weights(model, theirs)
    return model


@pytest.mark.parametrize("keys", [4, 2, 1])
def test_with_the_weights_of_transformers_llama_it_is_that_model(keys):
    """Logits and the gradients of W_Q to FP32 rounding; with tied embeddings, which it has."""
    theirs = llama(keys)
    with torch.no_grad():
        for layer in theirs.model.layers:  # from one, that norms should not be left out
            layer.input_layernorm.weight.normal_(1, 0.2)
    model = copied(theirs, policy="ALL_FP32")
    x, y = batch()
    logits, of_norm = [], model.norm.register_forward_hook
    hook = of_norm(lambda m, i, o: logits.append(o @ model.token.weight.mT))
    loss = model(x, y)
    hook.remove()
    out = theirs(input_ids=x)
    assert out.logits.std() > 1, "weights large enough that a wrong part shows"
    torch.testing.assert_close(logits[0], out.logits, rtol=1e-4, atol=2e-5)
    wanted = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    loss.backward(), wanted.backward()
    for ours, layer in zip(model.blocks, theirs.model.layers, strict=True):
        got = model.config.by_head(ours.qkv.weight.grad)
        for part, name in zip(got, ("q_proj", "k_proj", "v_proj"), strict=True):
            grad = getattr(layer.self_attn, name).weight.grad
            assert (part.flatten(0, 1) - grad).norm() < 1e-4 * grad.norm(), name


@pytest.mark.parametrize(
    "wrong",
    [
        dict(norm="layer"),
        dict(positions="none"),
        dict(rotary_base=1000.0),
        dict(rotary_share=0.5),
        dict(unrotated_layers=(1,)),
    ],
    ids=str,
)
def test_with_another_part_it_is_not_that_model(wrong):
    theirs, (x, y) = llama(2), batch()
    logits = theirs(input_ids=x).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss = copied(theirs, policy="ALL_FP32", **wrong)(x, y)
    assert (loss - wanted).abs() > 1e-4 * wanted


@pytest.mark.parametrize("keys", [4, 2])
def test_the_probe_says_of_a_llama_what_it_says_of_transformers_one(keys):
    """The same weights and text, through our model and through the library's registry."""
    theirs = llama(keys)
    how = dict(policy="FA2", sequences=4, length=17)
    ours, hub = (affected.probe(model, **how) for model in (copied(theirs), theirs))
    assert len(ours) == len(hub) == 8
    for column in ("share", "error", "share_all", "coherence"):
        assert ours[column].to_numpy() == pytest.approx(hub[column].to_numpy(), rel=0.02), column
