"""Emulated mixed precision against torch's own autograd, optimisers, scaler, layers and casts."""

import dataclasses
import functools
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from lowprec import UserError
from lowprec.numerics.formats import BF16, FP16, round_to
from lowprec.studies import mixed_runs
from lowprec.studies.mixed import ARMS, LossScale, Optimiser, Recipe, product, store
from lowprec.studies.mixed_runs import (
    compare_product,
    learning_rate,
    load,
    losses,
    record,
    train,
    trick,
)
from lowprec.studies.small import DIGITS, TASKS, Digits, Text
from lowprec.training.model import GPT, GPTConfig

TEXT = Text(steps=12, warmup=2, batch=2, seeds=2, classes=64, width=16, length=16, held=4)
IMAGES = dataclasses.replace(TASKS["digits"], steps=12, warmup=2, batch=8, seeds=2)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(a, b, site=None):
    return a @ b


# Products


@pytest.mark.parametrize("arm", ["fp32", "bf16", "fp16", "bf16-truncated"])
def test_every_operand_of_the_three_products_is_rounded(arm):
    recipe = ARMS[arm]
    a, b, g = draw(2, 5, 7), draw(2, 7, 3, seed=1), draw(2, 5, 3, seed=2)
    leaves = [t.clone().requires_grad_() for t in (a, b)]
    seen = []
    out = product(*leaves, recipe, lambda *pair: seen.append(pair))
    da, db = torch.autograd.grad(out, leaves, g)
    ra, rb, rg = (round_to(t, recipe.fmt, recipe.rounding) for t in (a, b, g))
    assert torch.equal(out, ra @ rb)
    assert torch.equal(da, rg @ rb.mT)
    assert torch.equal(db, ra.mT @ rg)
    assert torch.equal(seen[0][0], g) and torch.equal(seen[0][1], rg)
    assert (arm == "fp32") == torch.equal(out, a @ b)


def test_small_gradients_vanish_in_fp16_and_not_in_bf16():
    a, b = (draw(1, 4, 4, seed=s).requires_grad_() for s in (0, 1))
    g = torch.full((1, 4, 4), FP16.min_subnormal / 4)
    for arm, vanishes in (("fp16", True), ("bf16", False)):
        da, _ = torch.autograd.grad(product(a, b, ARMS[arm]), (a, b), g)
        assert (da == 0).all() == vanishes


# Weights


def test_loss_scale_follows_torchs_scaler():
    finite = torch.rand(60, generator=torch.Generator().manual_seed(0)) > 0.2
    ours = LossScale(2, True, interval=3)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for step, good in enumerate(finite.tolist()):
        assert ours.scale[0] == scaler.get_scale(), step
        before = weight.item()
        scaler.scale(weight.sum()).backward()
        if not good:
            weight.grad.fill_(torch.inf)
        grad = torch.ones(2, 1, 1)
        grad[0] = 1.0 if good else torch.inf
        ok = ours.accept([torch.ones(2, 3), grad])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert ok.tolist() == [weight.item() != before, True]
    assert ours.skipped.tolist() == [int((~finite).sum()), 0]


def test_without_scaling_no_step_is_skipped():
    scaler = LossScale(1, False)
    assert scaler.accept([torch.full((1, 2), torch.nan)]).all() and scaler.scale == 1


@pytest.mark.parametrize("second", [None, 0.95])
def test_optimiser_equals_torchs(second):
    start = draw(2, 4, 3)
    ours = start.clone()
    optimiser = Optimiser([ours], 0.9, second)
    theirs = torch.nn.Parameter(start.clone())
    reference = (
        torch.optim.SGD([theirs], momentum=0.9)
        if second is None
        else torch.optim.Adam([theirs], betas=(0.9, second))
    )
    for step in range(5):
        lr = 0.01 * (step + 1)
        reference.param_groups[0]["lr"] = lr
        theirs.grad = draw(2, 4, 3, seed=10 + step)
        reference.step()
        ok = torch.ones(2, dtype=torch.bool)
        ours = ours + optimiser.updates([theirs.grad], lr, ok)[0]
    torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("second", [None, 0.95])
def test_a_skipped_step_never_was(second):
    calm, bad = (Optimiser([torch.zeros(2, 3)], 0.9, second) for _ in range(2))
    grad, both = draw(2, 3), torch.tensor([True, True])
    broken = torch.where(torch.tensor([[False], [True]]), grad, torch.inf)
    calm.updates([grad], 0.1, both)
    bad.updates([grad], 0.1, both)
    change = bad.updates([broken], 0.1, torch.tensor([False, True]))[0]
    assert (change[0] == 0).all() and (change[1] != 0).all()
    after = [o.updates([grad], 0.1, both)[0][0] for o in (calm, bad)]
    assert torch.equal(*after)


def test_stored_weights_stall_to_nearest_and_move_on_average_at_random():
    weight = torch.ones(2, 10_000)
    change = torch.full_like(weight, 2.0**-10)  # an eighth of an ulp of 1 in BF16
    change[1, :100] = 0
    nearest, counts = store(weight, change, Recipe("bf16", weights="nearest_even"))
    assert torch.equal(nearest, weight)
    assert counts.tolist() == [[10_000, 10_000], [9_900, 9_900]]
    generator = torch.Generator().manual_seed(0)
    moved, counts = store(weight, change, Recipe("bf16", weights="stochastic"), generator)
    assert torch.equal(moved, round_to(moved, BF16))
    assert abs((moved[0] - 1).mean() / 2.0**-10 - 1) < 0.1
    assert 0.85 < counts[0, 1] / counts[0, 0] < 0.9
    master, counts = store(weight, change, Recipe("bf16"))
    assert torch.equal(master, weight + change) and (counts[:, 1] == 0).all()


# Models


def test_digits_network_is_a_convolutional_network():
    task = Digits()
    w = {k: v[None] for k, v in task.init(torch.Generator().manual_seed(0)).items()}
    w |= {k: draw(*v.shape, seed=i) for i, (k, v) in enumerate(w.items()) if "bias" in k}
    x = task.data[0][:5]
    y = x
    for name in ("conv1", "conv2"):
        filters = w[name][0].mT.unflatten(1, (-1, 3, 3))
        y = F.max_pool2d(F.conv2d(y, filters, w[name + "_bias"][0, 0], padding=1).relu(), 2)
    want = y.flatten(1) @ w["linear"][0] + w["linear_bias"][0]
    torch.testing.assert_close(task.logits(w, x[None], plain)[0], want)


def test_text_model_is_the_books_gpt2():
    task = TEXT
    each = task.init(torch.Generator().manual_seed(0))
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64,
                          policy="ALL_FP32", impl="emulate"))  # fmt: skip
    state = {"token.weight": each["token"], "position.weight": each["position"]}
    for i in range(2):
        for name in ("qkv", "proj", "up", "down"):
            state[f"blocks.{i}.{name}.weight"] = each[f"{name}{i}"].mT
        for name in ("norm_attn", "norm_mlp"):
            each[f"{name}{i}"] = 1 + 0.1 * draw(1, 16, seed=i)
            state[f"blocks.{i}.{name}.weight"] = each[f"{name}{i}"][0]
    state["norm.weight"] = each["norm"][0]
    model.load_state_dict(state)
    # The second of two seeds has the weights: the look-up must take its own table.
    w = {k: torch.stack([torch.zeros_like(v), v]) for k, v in each.items()}
    x, y = task.rows(0, 0)
    logits = task.logits(w, x.expand(2, *x.shape), plain)
    got = losses(logits, y.expand(2, *y.shape))[1]
    torch.testing.assert_close(got, model(x, y))


def test_held_out_data_is_not_trained_on():
    train_part, held = TEXT.data
    whole = Text(classes=None).data
    assert len(train_part) + len(held) == sum(map(len, whole)) == 529_540
    assert len(train_part) > 18 * len(held)
    assert int(train_part.window(0, len(train_part)).max()) == 63
    assert np.array_equal(whole[1].window(0, 5), Text(classes=None).data[1].window(0, 5))
    images, _ = IMAGES.data
    assert len(images) == 1797 and 0 <= images.min() and images.max() == 1
    places = [mixed_runs.TASKS["digits"].rows(step, 0)[0] for step in range(30)]
    held = {image.numpy().tobytes() for image in images[-360:]}
    shared = {image.numpy().tobytes() for image in images[:-360]} & held
    drawn = {image.numpy().tobytes() for batch in places for image in batch}
    assert drawn & held <= shared


def test_digits_file_says_where_it_is_from():
    from safetensors import safe_open

    with safe_open(DIGITS, "numpy") as file:
        about, images, labels = (
            file.metadata(),
            file.get_tensor("images"),
            file.get_tensor("labels"),
        )
    assert about["license"] == "CC-BY-4.0" and "doi.org" in about["source"]
    assert images.shape == (1797, 8, 8) and images.max() == 16 and set(labels) == set(range(10))


# Training


@pytest.mark.parametrize("task", [IMAGES, TEXT], ids=["digits", "text"])
def test_seeds_share_nothing(task):
    for arm in ("fp16-scaled", "bf16-weights"):
        _, both, _ = train(task, arm, [0, 1])
        alone = pd.concat([train(task, arm, [seed])[1] for seed in (0, 1)])
        np.testing.assert_allclose(both.loss, alone.loss, rtol=2e-3)
        assert both.loss[0] != both.loss[1]


def test_training_learns_and_arms_differ():
    task = dataclasses.replace(IMAGES, steps=40, batch=24)
    ends = {arm: train(task, arm, [0])[1].iloc[0] for arm in ARMS}
    assert all(end.accuracy > 0.5 for end in ends.values())
    assert len({end.loss for end in ends.values()}) == len(ARMS)
    assert ends["bf16-weights"].stalled > 2 * ends["bf16"].stalled
    assert ends["fp16-scaled"].scale == 2**16 and ends["fp16"].scale == 1
    assert ends["bf16"].vanished_logits == 0


def test_what_vanishes_is_counted():
    task = dataclasses.replace(TEXT, classes=1024)
    # A loss divided by 10^6 makes FP16 lose most of what BF16 keeps.
    tiny = functools.partial(lambda logits, t: 1e-6 * losses(logits, t))
    original, mixed_runs.losses = mixed_runs.losses, tiny
    try:
        lost = {arm: train(task, arm, [0])[1].vanished_logits[0] for arm in ("fp16", "bf16")}
    finally:
        mixed_runs.losses = original
    assert lost["fp16"] > 0.9 and lost["bf16"] == 0


def test_exponents_count_every_gradient_entry():
    _, _, exponents = train(TEXT, "fp32", [0])
    assert sum(exponents["logits"].values()) <= 2 * 16 * 64
    assert sum(exponents["logits"].values()) > 0.99 * 2 * 16 * 64
    assert set(exponents) == {"logits", "inside"}


def test_learning_rate_rises_and_falls():
    rates = [learning_rate(TASKS["text"], step) for step in range(300)]
    assert max(rates) == pytest.approx(3e-3) and rates[0] < 2e-4 and rates[-1] < 1e-6
    assert np.argmax(rates) in (29, 30)


def test_a_training_shorter_than_its_warm_up_is_refused():
    with pytest.raises(UserError, match="above the warm-up"):
        train(dataclasses.replace(TEXT, steps=2), "fp32", [0])


def test_a_stopped_training_is_the_beginning_of_the_whole():
    part, whole = (train(IMAGES, "fp32", [0], stop=stop)[0] for stop in (10, None))
    assert len(part) == 1 and part.loss[0] == pytest.approx(whole.loss[0], rel=1e-6)


# Records


def test_record_and_load(tmp_path):
    assert load("text", tmp_path) is None
    record(tmp_path, "text", TEXT, arms=("fp32", "bf16"))
    about, ends, curves = load("text", tmp_path)
    assert list(ends.arm) == ["fp32"] * 2 + ["bf16"] * 2
    assert about["config"]["classes"] == 64 and about["arms"]["bf16"]["fmt"] == "bf16"
    assert about["config"]["path"] == "smoke" and about["data_sha256"] == TEXT.data[0].sha256
    assert about["hardware"] and about["commit"] and about["versions"]["torch"]
    assert set(curves.step) == {0, 10} and len(curves) == 8
    want = train(TEXT, "bf16", [0, 1])[1]
    np.testing.assert_allclose(ends[ends.arm == "bf16"].loss, want.loss, rtol=1e-6)
    with pytest.raises(UserError, match="never overwritten"):
        record(tmp_path, "text", TEXT)


def test_after_the_deadline_no_arm_is_begun(tmp_path):
    record(tmp_path, "text", TEXT, arms=("fp32", "bf16"), deadline=0.0)
    about, ends, _ = load("text", tmp_path)
    assert set(ends.arm) == set(about["arms"]) == {"fp32"}


@pytest.mark.slow
def test_command_line(tmp_path):
    command = [sys.executable, "-m", "lowprec.studies.mixed_runs", str(tmp_path), "digits"]
    sizes = ["--steps", "21", "--seeds", "2"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "digits.json").read_text())["config"]["steps"] == 21
    again = subprocess.run([*command, *sizes], capture_output=True, text=True)
    assert again.returncode == 2 and "never overwritten" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize("name", ["digits", "digits-many"])
def test_the_digits_take_no_other_data(monkeypatch, capsys, tmp_path, name):
    monkeypatch.setattr(sys, "argv", ["mixed_runs", str(tmp_path), name, "--data", "shards"])
    with pytest.raises(SystemExit):
        mixed_runs.main()
    assert f"{name} has its data in data/corpora" in capsys.readouterr().err


# Hardware and bit patterns


@pytest.mark.parametrize("positive", [False, True])
def test_product_comparison_sees_a_second_rounding(positive):
    found = compare_product(256, size=64, positive=positive)
    assert found["outputs"] == 64 * 64
    assert found["outside_halves"] > 400 and found["outside_serial"] > 2000


def test_product_comparison_accepts_one_rounding_of_any_order(monkeypatch):
    def native(a, b):
        return (a.float().flip(1) @ b.float().flip(0)).bfloat16()

    monkeypatch.setattr(mixed_runs, "native_product", native)
    found = compare_product(512, size=64)
    assert found["outside"] == 0 and found["differ"] < 0.01 * found["outputs"]
    monkeypatch.setattr(mixed_runs, "native_product", lambda a, b: 1.01 * native(a, b))
    found = compare_product(512, size=64)
    assert found["outside"] > 0.5 * found["outputs"]


def test_cast_comparison_counts_what_differs(monkeypatch):
    pattern = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 2**16))
    pattern = pattern.int()
    assert mixed_runs.compare_casts(pattern) == 0
    monkeypatch.setattr(mixed_runs, "round_to", lambda x, f: round_to(x, f, "nearest_away"))
    ties = (torch.arange(100, dtype=torch.int32) + 0x3F80 << 16) + 0x8000
    assert mixed_runs.compare_casts(ties) == 50
    assert mixed_runs.compare_all_casts("cpu", 0x3F808000, 0x3FA08000, 2**20) == 16
    seen = []
    monkeypatch.setattr(mixed_runs, "compare_casts", lambda p: seen.extend(p.tolist()) or 1)
    assert mixed_runs.compare_all_casts("cpu", 2**31 - 2**8, 2**31, 2**6) == 4
    assert seen == list(range(2**31 - 2**8, 2**31))


def test_trick_rounds_numbers_and_breaks_nan():
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, 2**32, 2**18, dtype=np.uint32)
    pattern = np.concatenate([pattern, np.array([0x7F7FFFFF, 0x7F800000, 0x80000001], np.uint32)])
    x = pattern.view(np.float32)
    got, want = trick(pattern).view(np.float32), round_to(torch.from_numpy(x), BF16).numpy()
    number = ~np.isnan(x)
    assert np.array_equal(got[number].view(np.uint32), want[number].view(np.uint32))
    broken = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert trick(broken).tolist() == [0x7F800000, 0x80000000, 0]


def test_inputs_of_the_cast_hold_what_goes_wrong():
    inputs = mixed_runs.cast_inputs()
    low = inputs["ties and their neighbours"] & 0xFFFF
    assert sorted(low.unique().tolist()) == [0x7FFF, 0x8000, 0x8001] and len(low) == 3 * 2**16
    values = {kind: bits.view(torch.float32) for kind, bits in inputs.items()}
    tiny = values["subnormal numbers"].abs()
    assert values["NaN"].isnan().all() and ((0 < tiny) & (tiny < 2.0**-126)).all()
    every = mixed_runs.every_nan()
    assert len(every) == 2 * (2**23 - 1) and (every[1:] > every[:-1]).all()
    assert np.isnan(every.view(np.float32)).all()
