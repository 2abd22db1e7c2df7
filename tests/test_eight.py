"""Loss scales against torch's own, what E5M2 flushes, the small trainings, and the trainer's."""

import dataclasses
import math

import pandas as pd
import pytest
import torch

from lowprec import UserError
from lowprec.evidence.survival import counted
from lowprec.numerics import scaling
from lowprec.numerics.formats import E5M2, round_to
from lowprec.numerics.recipe import Recipe
from lowprec.numerics.scaling import PATIENCE, LossRule, LossScaler, flushed, scaled
from lowprec.records import files
from lowprec.studies import eight
from lowprec.training.config import TrainConfig
from lowprec.training.eight import RuledScaler, put_into
from lowprec.training.loop import train
from lowprec.training.model import GPT
from lowprec.training.plan import load_campaign

# Rules


@pytest.mark.parametrize(
    "text",
    ["1", "2^13", "0.00001", "dynamic", "dynamic,from2^8,every100,least2^7@0,least2^10@66", "1000"],
)
def test_a_rule_is_its_text(text):
    rule = LossRule.parse(text)
    assert LossRule.parse(str(rule)) == rule and LossRule.parse(rule) is rule
    assert rule == LossRule.parse(text) and hash(rule)


@pytest.mark.parametrize(
    ("text", "word"),
    [("fast", "write 2\\^13"), ("2^25", "and 2\\^24"), ("0", "between 2\\^-126"),
     ("2^-150", "between 2\\^-126"),
     ("2^13,every5", "only a dynamic one"), ("dynamic,min3", "unknown option 'min3'"),
     ("dynamic,least2^7@9,least2^8@9", "one after the other")],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text, word):
    with pytest.raises(UserError, match=word):
        LossRule.parse(text)


def test_a_minimum_that_a_run_never_comes_to_is_refused():
    rule = LossRule.parse("dynamic,least2^7@0,least2^13@900")
    rule.require(901)
    with pytest.raises(UserError, match="minimum of 2\\^13 begins at step 900, and a run of 600"):
        rule.require(600)


def test_a_dynamic_scale_moves_as_torch_s_own():
    torch.manual_seed(0)
    ours = LossScaler("dynamic,from2^10,every3", 2)
    theirs = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    fine = torch.rand(30, 2) > 0.2
    for row in fine:
        for scaler, ok in zip(theirs, row, strict=True):
            weight = torch.zeros(1, requires_grad=True)
            optimiser = torch.optim.SGD([weight], 0.0)
            weight.grad = torch.tensor([1.0 if ok else math.inf])
            scaler.scale(torch.zeros(()))
            scaler.step(optimiser)
            scaler.update()
        ours.accept(row)
        assert ours.scale.tolist() == [min(s.get_scale(), 2.0**24) for s in theirs]
    assert ours.skipped.tolist() == (~fine).sum(0).tolist()


def test_a_minimum_grows_and_a_scale_that_stays_does_not_move():
    moving = LossScaler("dynamic,from2^2,every100,least2^1@0,least2^3@2")
    seen = []
    for _ in range(4):
        moving.accept(torch.tensor([False]))
        seen.append(moving.scale.item())
    assert seen == [2, 8, 8, 8]
    still = LossScaler("2^5")
    still.accept(torch.tensor([False]))
    assert still.scale.item() == 32 and still.skipped.item() == 1


def test_a_run_of_skipped_steps_has_an_end_with_a_name():
    scaler = LossScaler("dynamic", 2)
    scaler.accept(torch.tensor([True, True]))
    for _ in range(PATIENCE):
        assert scaler.ended == [None, None]
        scaler.accept(torch.tensor([False, True]))
    assert scaler.ended == [f"{PATIENCE} steps skipped, step {PATIENCE}", None]
    assert scaler.scale[0] > 0
    for fine in (True, *[False] * PATIENCE):
        scaler.accept(torch.tensor([fine, True]))
    assert scaler.ended == [f"{PATIENCE} steps skipped, step {PATIENCE}", None], "the first stays"


# What is flushed


def test_the_flushed_share_is_that_of_a_cast():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).exp2().square() * 2.0**-17
    watch = eight.Exponents([0])
    watch(0, "logits", x)
    for scale in (1.0, 2.0, 64.0):
        want = float((round_to(x * scale, E5M2) == 0).double().mean())
        assert flushed(watch.counts["logits"], E5M2, scale) == pytest.approx(want, abs=1e-3)
    assert 0.2 < flushed(watch.counts["logits"], E5M2) < 0.9


@pytest.mark.parametrize("x", [[0.0, 0.0], [math.nan, math.inf]])
def test_a_share_of_nothing_is_refused(x):
    watch = eight.Exponents([0])
    watch(0, "logits", torch.tensor(x))
    with pytest.raises(UserError, match="all these numbers are zero or not finite"):
        flushed(watch.counts["logits"], E5M2)


# Small trainings

IMAGES = dataclasses.replace(eight.TASKS["images"], steps=60, seeds=2, batch=8, warmup=2, held=40)


def test_a_power_of_two_changes_nothing_in_fp32():
    seeds = range(2)
    plain, scaled = (eight.train(IMAGES, eight.Arm("FP32", rule), seeds) for rule in ("1", "2^13"))
    assert torch.equal(plain[2]["up"], scaled[2]["up"])
    assert (scaled[1].vanished < plain[1].vanished).all()


def test_overflows_that_are_put_in_skip_their_steps_and_no_other():
    arm = eight.Arm(eight.RECIPES["nearest"], "dynamic,from2^8,every100", 15)
    _, ends, weights = eight.train(IMAGES, arm, range(2))
    assert ends.skipped.tolist() == [4, 4] and ends.scale.tolist() == [16.0, 16.0]
    assert ends.ended.isna().all()
    up = weights["up"]
    assert torch.equal(up, round_to(up, "fp16")) and not torch.equal(up, round_to(up, "e5m2"))


def test_a_loss_that_is_not_finite_has_its_step_named():
    task = dataclasses.replace(IMAGES, lr=1e30)
    _, ends, _ = eight.train(task, eight.Arm(), range(1), stop=20)
    assert ends.ended[0].startswith("loss not finite, step ")


def test_a_record_is_what_was_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(eight.TASKS, "images", dataclasses.replace(IMAGES, steps=100))
    eight.record(tmp_path, "images", ("fp32", "1 random", "2^13 nearest spurious"))
    found = eight.read("images", tmp_path)
    assert found.loss.shape == (2, 3) and not found.loss.isna().any().any()
    assert sum(map(int, found.exponents["logits"].values())) > 0
    assert found.ending("2^13 nearest spurious", "skipped").tolist() == [4, 4]
    assert found.left("1 random", "1 random").mean == 1
    assert list(found.above("1 random", "1 random")) == [False, False]
    ends = found.ends[["arm", "seed", "loss", "norm", "ended"]]
    rates = [ends.assign(rate=rate, skipped=0) for rate in (0.00003, 0.0001)]
    eight.save(tmp_path, "rates", {}, rates)  # a rate is a key, and kept as it is
    assert len(eight.load(tmp_path, "rates")[1].dropna(subset="skipped")) == 2 * len(ends)
    with pytest.raises(UserError, match="there is no record text"):
        eight.read("text", tmp_path)


# Unit scaling


def test_both_parametrisations_are_one_net():
    """Given weights that only differ by size, and gradients up to a factor a weight."""
    units = pytest.importorskip("lowprec.studies.units")
    unit = units.net("unit", 0.1)
    weights = {n: w[None] for n, w in unit.init(torch.Generator().manual_seed(3)).items()}
    tokens, targets = (t[None] for t in unit.rows(0, 3))

    def gradients(task):
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        logits = task.logits(leaves, tokens, lambda a, b, site: a @ b)
        aim = task.objective(logits, targets)
        return dict(zip(leaves, torch.autograd.grad(aim, list(leaves.values())), strict=True))

    found = gradients(unit)
    head = found["head"].flatten()
    logits = unit.logits(weights, tokens, lambda a, b, site: a @ b)
    leaf = logits.detach().requires_grad_()
    (pull,) = torch.autograd.grad(units.losses(leaf, targets).sum(), leaf)
    seen = []
    unit.logits(weights, tokens, lambda a, b, site: (seen.append(a), a @ b)[1])
    direct = (seen[-1].mT @ pull).flatten()
    assert torch.cosine_similarity(head, direct, 0) == pytest.approx(1, abs=1e-5)
    assert not torch.allclose(head, direct)


def test_constants_of_the_library_are_near_what_is_drawn():
    units = pytest.importorskip("lowprec.studies.units")
    found = units.drawn(32, 512, 64)
    assert (found[["out", "gradient"]] - 1).abs().max().max() < 0.25
    assert found.loc["gelu", "plain out"] == pytest.approx(0.588, abs=0.01)


def test_a_record_of_unit_scaling_is_what_was_trained(tmp_path, monkeypatch, capsys):
    units = pytest.importorskip("lowprec.studies.units")
    small = dict(steps=60, warmup=2, seeds=2, batch=2, width=8, length=8, layers=1, held=4)
    monkeypatch.setitem(units.TASKS, "units-gpt", units.Net(**small))
    runs = [("plain", "fp32", 0.001), ("unit", "fp32", 0.03), ("unit", "eight", 0.03)]
    units.record(tmp_path, "units-gpt", runs)
    found = units.read(tmp_path, "units-gpt")
    assert found.cost("unit", "fp32").eq(0).all() and found.cost("unit", "eight").ne(0).all()
    assert list(found.sizes("plain").index) == list(found.sizes("unit").index)
    assert {rate for _, _, rate in units.arms("units-gpt")} == {
        0.0003,
        0.001,
        0.003,
        0.01,
        0.03,
        0.1,
    }
    with pytest.raises(UserError, match="there is no record units in"):
        units.read(tmp_path)


# The trainer

TINY = dict(
    n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=2, steps=6, warmup=2, probe_every=3,
    data="data/corpora/smoke.safetensors", device="cpu", policy="ALL_FP32", amp=False,
)  # fmt: skip


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(files.repo_root())


def test_a_run_takes_a_recipe_and_a_loss_scale(tmp_path, at_root):
    plain = train(TrainConfig(**TINY), tmp_path / "plain")
    same = train(TrainConfig(**TINY, loss_scale="2^13"), tmp_path / "same")
    assert list(same.metrics.loss) == list(plain.metrics.loss)
    assert list(same.probes.delta_abs) == pytest.approx(list(plain.probes.delta_abs), rel=1e-5)
    config = TrainConfig(
        **TINY, recipe=eight.RECIPES["random"], loss_scale="dynamic,from2^4,every2", spurious=3,
        weights_at=(2, 3, 4, 6),
    )  # fmt: skip
    run = train(config, tmp_path / "eight")
    kept = [torch.load(p)["token.weight"] for p in sorted((tmp_path / "eight/.weights").iterdir())]
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])
    assert torch.equal(kept[-1], round_to(kept[-1], "fp16"))
    losses = pd.DataFrame({"plain": plain.metrics.loss, "eight": run.metrics.loss})
    assert (losses.plain != losses.eight).all() and losses.diff(axis=1).eight.abs().max() < 0.2


def test_a_run_whose_steps_are_all_skipped_ends_with_a_name(tmp_path, at_root, monkeypatch):
    monkeypatch.setattr(scaling, "PATIENCE", 4)
    config = TrainConfig(**TINY | {"steps": 12}, loss_scale="dynamic", spurious=1)
    run = train(config, tmp_path / "a")
    assert run.info["ended"] == "4 steps skipped, step 3" and run.info["steps"] == 6
    table = pd.DataFrame([dict(run=run, exploded=False, duration=6)])
    assert counted(table, 5) == (0, 1) and counted(table, 6) == counted(table) == (0, 0)


@pytest.mark.parametrize("group", ["tensor", "token", "channel", "block3"])
def test_weights_are_stored_in_the_groups_that_products_read(group):
    recipe = Recipe.parse("FP32+" + "+".join(f"{x}=e4m3@{group}" for x in ("w", "master", "grad")))
    weight = torch.nn.Parameter(torch.randn(4, 6) * torch.logspace(-2, 2, 4)[:, None])
    weight.grad = torch.randn(4, 6) * torch.logspace(-2, 2, 6)
    optimizer = torch.optim.AdamW([weight], lr=0.0, fused=True)
    scaler = RuledScaler(recipe, None, 0, torch.zeros(()), None)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for stored in (weight.detach(), weight.grad):
        torch.testing.assert_close(scaled(stored.mT, recipe.w), stored.mT, rtol=1e-6, atol=0)


def test_a_delayed_scale_is_of_the_layers_own_past():
    """Once every layer has seen the same text many times, its last scale is the current one."""
    torch.manual_seed(0)
    model, text = GPT(TrainConfig(**TINY).model()), torch.arange(16)[None]
    loss = {}
    for name, scale in (("delayed", ",delayed1"), ("current", "")):
        put_into(model, Recipe.parse(f"FP32+x=e4m3_saturate@tensor{scale}"), None)
        for _ in range(12):
            loss[name] = model(text, text)
    assert torch.equal(loss["delayed"], loss["current"])


@pytest.mark.parametrize(
    ("changes", "word"),
    [(dict(recipe="FP32+v=bf16"), "Adam's moments in FP32"), (dict(spurious=5), "set loss_scale"),
     (dict(recipe="FP32+x=e4m3@tensor,delayed16"), "a history of 16 casts"),
     (dict(recipe="FP8", amp=True), "set amp=False"),
     (dict(recipe="FP8", compile=True), "a compiler removes roundings"),
     (dict(loss_scale="dynamic,least2^7@6"), "a run of 6 steps never comes"),
     (dict(loss_scale="1", checkpoint_every=2), "has no checkpoints"),
     (dict(recipe="FP8", capture_at=(1,)), "captures and windows"),
     (dict(loss_scale="2^13", amp="fp16"), "a loss scale of its own")],
)  # fmt: skip
def test_what_a_run_cannot_do_is_refused(changes, word):
    with pytest.raises(UserError, match=word):
        TrainConfig(**TINY | changes)


def test_the_campaign_can_be_read():
    jobs = load_campaign(files.data_root() / "runs" / "eight" / "campaign.yaml")
    assert len(jobs) == 27 and {job.config.n_embd for job in jobs} == {384}


def test_a_dynamic_scale_grows_no_further_than_apexs():
    scaler = LossScaler("dynamic,from2^24,every1")
    scaler.accept(torch.ones(1, dtype=torch.bool))
    assert scaler.scale.item() == scaling.LARGEST


def test_the_first_scale_is_no_smaller_than_its_minimum():
    assert LossScaler("dynamic,from2^0,least2^7@0").scale.item() == 2.0**7
