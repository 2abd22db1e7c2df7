"""The monitor in training loops: what its page measures, and the loops that the page shows."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from lowprec import Monitor
from lowprec.studies import loop

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "notebooks" / "in_the_training_loop.ipynb"


def test_a_planted_run_differs_by_its_delta_alone():
    runs = {kind: loop.run(kind, 7, 11, 20.0) for kind in loop.KINDS}
    losses = {kind: tables["losses"].loss for kind, tables in runs.items()}
    assert losses["healthy"][0] == losses["planted"][0], "one forward pass, of the same weights"
    assert losses["healthy"].iloc[-1] != losses["planted"].iloc[-1]
    first = {kind: t["watched"][t["watched"].step == 0] for kind, t in runs.items()}
    assert first["healthy"].logit.equals(first["planted"].logit)
    assert (first["planted"].share_all > 5 * first["healthy"].share_all).all()
    assert set(runs["planted"]["watched"].step) == {0, 10}


def test_models_are_timed_for_the_table_alone(monkeypatch):
    monkeypatch.setattr(loop, "run", lambda kind, *_: dict(losses=pd.DataFrame([kind])))
    monkeypatch.setattr(loop, "seconds", lambda: "timed")
    assert loop.measure(**loop.PARAMETERS)["seconds"] == "timed"
    assert len(loop.measure(1, 200, 5.0)["seconds"]) == 3, "as recorded"


def told(gaps, ringing, logit=()):
    """`loop.told` of one seed: gaps of the loss by step; steps at which a head rings."""
    watched = pd.DataFrame(dict(step=range(0, len(gaps), 10), share_all=0.0, logit=1.0, seed=3))
    planted = watched.assign(kind="planted", alarm=watched.step.isin(ringing))
    planted.loc[planted.step.isin(logit), "logit"] = 101.0
    healthy = watched.assign(kind="healthy", alarm=False)
    steps = pd.DataFrame(dict(step=range(len(gaps)), seed=3, loss=1.0, kind="healthy"))
    losses = pd.concat([steps, steps.assign(loss=[1 + gap for gap in gaps], kind="planted")])
    return loop.told(losses, pd.concat([healthy, planted])).loc[3]


def test_a_loss_that_comes_back_has_not_left_for_good():
    gaps = [0.0] * 30 + [0.3] * 10 + [0.0] * 20 + [0.2] * 40
    found = told(gaps, ringing=(50, 80), logit=(60,))
    assert (found.left, found.for_good) == (33, 65), "means of ten steps above 0.1"
    assert (found.alarm, found.alarm_50, found.logit) == (50, 50, 60)
    assert found.whole == float("inf") and not found.healthy
    calm = told([0.0] * 100, ringing=())
    assert [calm.left, calm.for_good, calm.alarm] == [float("inf")] * 3


def blocks() -> list[str]:
    """The loops that the page shows."""
    cells = json.loads(PAGE.read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("which,needs", [(0, None), (1, "accelerate"), (2, "accelerate")],
                         ids=["own", "Trainer", "accelerate"])  # fmt: skip
def test_the_loops_of_the_page_run(which, needs, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if needs:
        pytest.importorskip(needs, reason=f"this loop needs {needs}")
    monkeypatch.chdir(tmp_path)
    model = loop.llama(0, length=32)
    ids = torch.randint(0, 300, (101, 2, 32), generator=torch.Generator().manual_seed(0))
    names = dict(
        Monitor=Monitor, torch=torch, model=model, tokens=list(ids), batches=list(ids),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        rows=[dict(input_ids=one[0], labels=one[0]) for one in ids],
        arguments=transformers.TrainingArguments(
            tmp_path / "out", max_steps=101, per_device_train_batch_size=1, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True,
        ) if needs else None,
    )  # fmt: skip
    exec(blocks()[which], names)
    table = pd.read_json(tmp_path / "run" / "monitor.jsonl", lines=True)
    accumulated = "accumulate" in blocks()[which]
    assert sorted(set(table.step)) == ([0] if accumulated else [0, 50, 100])
    assert names["monitor"].now == (25 if accumulated else 101), "updates of the weights"
    assert len(table) == 8 * table.step.nunique() and (table["of"] == "W_Q").all()
