"""Attention watched while a model trains: every so many steps the probe's numbers, head by head.

    monitor = lowprec.Monitor(model, every=50, path="run/monitor.jsonl")
    for step in range(steps):
        loss(model, batch(step)).backward()
        monitor.step()                      # after backward, before the optimizer
        optimizer.step()

Nothing in the model or the loop changes besides, and the training is bit by bit the one without it:
in a watched step hooks read what passes (`lowprec.diagnose.watch`), in others there are none. The
numbers and the limits of the alarm are those of the probe (`lowprec.diagnose.measures`), of a few
tokens of one batch, so silence proves little and an alarm that stays is worth a probe. `share` says
what a delta that reads the stored O does, also where a policy such as SAFE takes that error out
again; what is left then is `share_all`, and an alarm needs both.

The file has one JSON object a line for each watched step, call and head, with `COLUMNS`:
`pandas.read_json(path, lines=True)` is the table. A file that exists is added to.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import sys
import weakref
from collections import defaultdict
from pathlib import Path

import pandas as pd
import torch.distributed as dist
from torch import nn

from lowprec import UserError
from lowprec.diagnose import measures
from lowprec.diagnose.watch import Watch
from lowprec.records import runs
from lowprec.records.files import make_folder

COLUMNS = {
    "step": "whose backward was watched, counted from 0",
    "layer": "the number of the call of attention in a forward, from 0, whatever layer makes it",
    "module": "the name in the model of the module that makes it, with /call_1 behind it for the "
    "second that it makes; where none within the model does, call_ and that number",
    "head": measures.COLUMNS["head"],
    "logit": measures.COLUMNS["logit"],
    "entropy": measures.ALSO["entropy"],
    "key_share": measures.COLUMNS["key_share"],
    "common": measures.COLUMNS["common"],
    "tied": measures.COLUMNS["tied"],
    "share": measures.COLUMNS["share"],
    "share_all": measures.COLUMNS["share_all"],
    "gradient": "norm of the exact gradient of W_Q, of the loss as it is scaled",
    "error": "norm of the error that eps makes in it",
    "error_all": measures.ALSO["error_all"],
    "of": "what these gradients are of: W_Q, or dQ where no linear map was found that made q",
    "tokens": "how many of the batch's were measured",
    "alarm": measures.COLUMNS["alarm"] + ", and these are of W_Q, for which they were chosen",
}
"""Of a line of the file, in words. Over the ranks of torch.distributed `logit` is the largest, the
norms are root mean squares, the shares their quotients, `tokens` sums, and the rest are means."""
SQUARES = ["gradient", "error", "error_all"]
AGAIN = 8
"""Steps in a row that are watched until one of them can be measured."""
UNTRACED = "no linear map was found that made q, so shares are of dQ, for which no limit was tested"
MEANS = ["entropy", "key_share", "common", "tied"]

log = logging.getLogger("lowprec.monitor")


class Monitor:
    """Watches the attention of a model that trains.

    model: the module that the loop calls, wrapped in DDP or not. every: steps from one that is
        watched to the next, from step 0 on.
    path: of the file, or None; rows go behind those that it has.
    writer: a tensorboard SummaryWriter, or a folder for one.
    policy: what attention rounds; None for what a call of this package says, else for FA2, with
        FP16 in place of BF16 where that is the dtype.
    sequences, length: what is measured of a batch, at most: first tokens of its fullest sequences.
    step: the number of the first step, where a training goes on.

    Attributes: table, of the last watched step; left_out, {number: why} of calls not measured. An
    alarm is a warning of the logger "lowprec.monitor", when a head begins to ring.
    """

    watch = None

    def __init__(
        self, model, every=50, path=None, *, writer=None, policy=None, sequences=1, length=512,
        step=0,
    ):  # fmt: skip
        if not isinstance(model, nn.Module):
            raise UserError(
                f"model is a {type(model).__name__}; give the module that the loop calls"
            )
        for name, value in (("every", every), ("sequences", sequences), ("length", length)):
            if not isinstance(value, numbers.Integral) or value < 1:
                raise UserError(f"{name}={value!r} must be a whole number of at least 1")
        if length < measures.BLOCKS:
            raise UserError(f"length={length} must be at least {measures.BLOCKS}")
        self.model, self.every, self.policy = model, every, policy
        self.sequences, self.length = sequences, length
        self.path = None if path is None else Path(path).absolute()
        if self.path and _rank() == 0:
            make_folder(self.path.parent)
            runs.require_writable(self.path)
        self.writer = _writer(writer) if isinstance(writer, (str, Path)) else writer
        self.table, self.left_out, self.ringing, self.seen = None, {}, set(), False
        self.told = set()  # what was said of calls
        self.known, self.missed = defaultdict(weakref.WeakKeyDictionary), 0
        self.calls = 0  # of step, since one was watched: numbers may jump
        self.stepped = False
        if self.path and _rank() == 0 and (last := _last(self.path)) >= step:
            log.warning(
                "%s has rows already, up to step %s; what is written goes behind them",
                self.path, last,
            )  # fmt: skip
        self._await(step)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error is None and not self.stepped:
            log.warning("the monitor saw no step: call its step() after every step's last backward")
        self.close()

    def __getstate__(self):
        """What is saved or copied with a model that holds it watches after its next step."""
        return self.__dict__ | dict(watch=None, known=defaultdict(weakref.WeakKeyDictionary))

    def __del__(self, over=sys.is_finalizing):
        if not over():
            self.close()

    def close(self):
        """Take all hooks away; the file is whole after every step."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None

    def step(self, step: int | None = None) -> pd.DataFrame | None:
        """Call it after every step's last backward; the table of a watched step, else None.

        step: its number, where the loop counts otherwise; it may jump. Every rank of a group calls
        it. Raises `UserError` if the first watched step shows no attention that a batch could let
        it measure.
        """
        step, watch = self.now if step is None else step, self.watch
        self.calls, self.stepped = self.calls + 1, True
        self.close()
        table = None if watch is None else self._finish(step, watch)
        if watch is not None:
            self.missed = self.missed + 1 if table is None else 0
            if self.missed and self.missed % AGAIN == 0:
                why = "no backward came back" if watch.seen.count else "no attention was called"
                why = next(iter(self.left_out.values()), why)
                log.warning("step %d: nothing measured in %d steps (%s)", step, self.missed, why)
        self._await(step + 1, again=watch is not None and self.missed % AGAIN > 0)
        return table

    def callback(self):
        """A `transformers.TrainerCallback` that does this in a `Trainer`."""
        try:
            from transformers import TrainerCallback
        except ImportError:
            raise UserError("Monitor.callback needs transformers") from None
        monitor = self

        class Watching(TrainerCallback):
            """Steps are the trainer's."""

            def on_train_begin(self, args, state, control, **_):
                monitor._await(state.global_step)

            def on_pre_optimizer_step(self, args, state, control, **_):
                monitor.step(state.global_step)

            def on_train_end(self, args, state, control, **_):
                monitor.close()

        return Watching()

    def _await(self, step: int, again: bool = False):
        """Watch the step that comes next, if it is one's turn; again: the last one was not seen."""
        self.close()
        self.now = step
        if again or step % self.every == 0 or self.calls >= self.every:
            self.calls = 0
            how = dict(policy=self.policy, sequences=self.sequences, length=self.length)
            self.watch = Watch(self.model, known=self.known, **how)

    def _finish(self, step, watch):
        seen, first = watch.seen, not self.left_out
        if seen.found:  # else `step` says so
            lost = {*range(seen.count)} - {*seen.found, *seen.left_out}
            seen.left_out |= dict.fromkeys(lost, "no backward came back")
        self.left_out = dict(seen.left_out)
        if not self.seen:
            _require_seen(watch)
        rows = [
            dict(layer=layer, module=seen.module(layer), head=head, of=of, tokens=tokens)
            | {name: columns[name][head].item() for name in columns if name in COLUMNS}
            for layer, (columns, of, tokens) in sorted(seen.found.items())
            for head in range(len(columns["logit"]))
        ]
        rows = _reduced(rows)
        if rows or self.seen:
            why = {seen.module(n): why for n, why in sorted(seen.left_out.items())}
            self._say(step, "calls of attention that are not watched", why)
        if not rows:
            if first and not self.seen:
                why = next(iter(seen.left_out.values()))
                log.warning("step %d: nothing was measured (%s); the next is watched", step, why)
            return None
        self.seen = True
        table = pd.DataFrame(rows).assign(step=step)
        table["share"] = _quotient(table.error, table.gradient)
        table["share_all"] = _quotient(table.error_all, table.gradient)
        table["alarm"] = measures.alarmed(table) & (table.of == "W_Q")
        self.table = table = table[list(COLUMNS)]
        if _rank() == 0:
            self._tell(step, table, seen.as_if)
            without = table.module[table.of != "W_Q"]
            self._say(
                step, "calls of attention that give no alarm", dict.fromkeys(without, UNTRACED)
            )
        return table

    def _say(self, step, what, calls: dict):
        """Warn of calls, {module: why}, unless that was said before."""
        if fresh := [call for call in calls.items() if call not in self.told]:
            self.told.update(fresh)
            some = "; ".join(f"{module}: {why}" for module, why in fresh)
            log.warning("step %d: %s: %s", step, what, some)

    def _tell(self, step, table, as_if):
        ill = table[table.alarm]
        heads = set(zip(ill.module, ill["head"], strict=True))
        if heads - self.ringing:
            worst = ill.nlargest(1, "error").iloc[0]
            log.warning(
                "step %d: ALARM in %d of %d head(s). The largest error: %s%s. What it means: "
                "python -m lowprec probe on a checkpoint, and the page Is my model affected?",
                step, len(ill), len(table), measures.describe(worst),
                "; read as if in BF16, which this attention is not" * (worst.layer in as_if),
            )  # fmt: skip
        if not all(table[name].map(math.isfinite).all() for name in ("logit", "gradient")):
            log.warning("step %d: attention has numbers that are not finite", step)
        self.ringing = heads
        try:
            if self.path:
                _append(self.path, [json.dumps(_plain(row)) for row in table.to_dict("records")])
            if self.writer is not None:
                _scalars(self.writer, step, table)
        except OSError as error:  # a full disk does not end a training
            log.warning("step %d: cannot write: %s", step, error)


def _require_seen(watch):
    """Raise `UserError` where nothing of the first watched step was measured, saying why."""
    if (seen := watch.seen).found:
        return
    if not watch.called and not watch.another:
        raise UserError(
            "the monitor saw no forward of its model: give it the module that the training loop "
            "calls, before the step"
        )
    if seen.count == 0:
        raise UserError(
            "the monitor saw no attention: it watches lowprec's, transformers' registry and "
            "torch.nn.functional.scaled_dot_product_attention, called by that name in the model's "
            "own thread: not one that `from torch.nn.functional import` took, nor "
            "MultiheadAttention with need_weights=True, nor nn.DataParallel's on several GPUs"
        )
    if len(seen.left_out) < seen.count:
        raise UserError("the monitor saw no backward through attention: call step() after backward")
    if not watch.another:
        why = ", ".join(dict.fromkeys(seen.left_out.values()))
        raise UserError(f"the monitor can watch none of {seen.count} calls of attention: {why}")


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _reduced(rows: list[dict]) -> list[dict]:
    """The rows of all ranks as one a call and head."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    table = pd.DataFrame([row for part in parts for row in part])
    if table.empty:
        return []
    table[SQUARES] = table[SQUARES] ** 2
    by = table.groupby(["module", "head"])
    firsts = dict(layer=by.layer.first(), of=by.of.first(), tokens=by.tokens.sum())
    merged = by[MEANS + SQUARES].mean().assign(logit=by.logit.max(), **firsts)
    merged[SQUARES] = merged[SQUARES] ** 0.5
    return merged.reset_index().sort_values("layer", kind="stable").to_dict("records")


def _quotient(error, whole):
    return (error / whole).where(error != 0, 0.0)


def _plain(row: dict) -> dict:
    """For JSON: six digits, and null for what is not finite."""
    return {
        name: (float(f"{x:.6g}") if math.isfinite(x) else None) if isinstance(x, float) else x
        for name, x in row.items()
    }


def _append(path: Path, lines: list[str]) -> None:
    """Write lines behind those of a file, all or none; the last of those may have been cut off."""
    with open(path, "a+b", buffering=0) as file:
        size = file.tell()
        file.seek(max(0, size - 1))
        begin = "" if file.read() in (b"", b"\n") else "\n"
        content = memoryview((begin + "\n".join(lines) + "\n").encode())
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(size)
            raise


def _last(path: Path) -> float:
    """The step of the last row of a file; -1 for none."""
    if not path.exists() or not path.stat().st_size:
        return -1
    try:
        return json.loads(path.read_text().splitlines()[-1])["step"]
    except (ValueError, TypeError, KeyError):  # of another writer
        return math.inf


def _writer(folder):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("writer: a folder needs the package tensorboard") from None
    return SummaryWriter(str(folder)) if _rank() == 0 else None


def _scalars(writer, step, table):
    """By call, of its heads the largest, of the entropy the smallest; and how many ring."""
    for module, some in table.groupby("module"):
        for name in ("logit", "share", "share_all", "key_share"):
            writer.add_scalar(f"attention/{name}/{module}", some[name].max(), step)
        writer.add_scalar(f"attention/common/{module}", some.common.abs().max(), step)
        writer.add_scalar(f"attention/entropy/{module}", some.entropy.min(), step)
    writer.add_scalar("attention/alarms", int(table.alarm.sum()), step)
    writer.flush()
