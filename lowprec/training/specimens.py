"""Captures at the steps that a run asked for, and around an explosion."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from lowprec.records import explosion
from lowprec.records.tables import write_table
from lowprec.training import capture
from lowprec.training.probes import QueryErrorWindow


class Specimens:
    """Captures of single steps, and the error of W_Q's gradient over a window of them.

    Both come from an extra pass over the batch of a step before the step is made; the run's own
    numbers do not change.
    """

    def __init__(self, recorder, model, amp: bool, draw_seed, broken):
        self.recorder, self.model, self.config = recorder, model, recorder.config
        self.amp, self.draw_seed, self.broken = amp, draw_seed, broken
        if self.config.capture_at or self.config.capture_every:  # now, not at some late step
            heads = len(set(self.config.capture_heads)) or 1
            capture.check_size(capture.tensor_bytes(model.config, heads, amp))
        self.folder = recorder.part / "captures"
        self.window = None
        for path in self.folder.glob("step-*.xz"):
            if path >= self._path(recorder.step):  # after the checkpoint: made again
                path.unlink(missing_ok=True)  # each process does
        asked = {self._path(step) for step in self.config.capture_at}
        made = set(self.folder.glob("step-*.xz")) if self.config.capture_every else set()
        self.rolling = sorted(made - asked)  # by a run that is resumed here

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.xz"

    def before_step(self, step: int, batches):
        c = self.config
        inside = c.window and c.window[0] <= step <= c.window[1]
        rolling = c.capture_every and step % c.capture_every == 0
        if not (inside or rolling or step in c.capture_at) or self.broken:
            return  # the run has ended at a loss that is not finite, and there is no such step
        if inside:
            self._measure(step, batches)
        if step in c.capture_at:
            self._capture(step, batches)
        elif rolling:
            made = self._capture(step, batches)
            self.rolling = [path for path in self.rolling if path != made] + [made]
            rising = explosion.find_explosion(self.recorder.losses()) is not None
            while len(self.rolling) > c.capture_keep and not rising:
                self.rolling.pop(0).unlink()

    def _observe(self, step: int, batches, i: int, layers=None):
        seed = self.draw_seed(step, i, len(batches))
        return capture.observe(self.model, *batches[i], seed, self.amp, layers)

    def _capture(self, step: int, batches) -> Path:
        """Capture one layer on the first micro-batch."""
        c, path = self.config, self._path(step)
        layers = None if c.capture_layer is None else [c.capture_layer]
        seen = self._observe(step, batches, 0, layers)
        layer, head, sequence = capture.suspect(seen)
        self.folder.mkdir(exist_ok=True)
        kept = ("name", "arm", "config", "data_sha256", "hardware", "versions", "commit")
        info = {name: self.recorder.info[name] for name in kept} | dict(step=step)
        capture.save(path, seen, self.model, layer, c.capture_heads or (head,), (sequence,), info)
        return path

    def _measure(self, step: int, batches):
        """The error of W_Q's gradient in every layer and head, over the whole batch."""
        m = self.model.config
        if self.window is None:
            self.window = QueryErrorWindow(
                m.n_layer, m.n_head, m.head_dim, m.n_embd, device=self.recorder.group.device
            )
        rows = sum(len(x) for x, _ in batches)
        for i in range(len(batches)):
            for layer, seen in self._observe(step, batches, i).items():
                eps = capture.query_bias(seen) * len(batches[i][0]) / rows
                one = len(seen.groups) == 1  # else P comes from unrounded scores in all heads
                how = dict(policy=seen.groups[0][0]) if one else {}
                how["rotation"] = seen.rotation
                self.window.update(step, layer, seen.x, seen.q, seen.k, eps, **how)

    def after_gradients(self, step: int):
        """Set beside the error the norm of the gradient that it is a part of."""
        if self.window is not None and self.window.step == step:
            m = self.model.config
            norms = [m.by_head(b.qkv.weight.grad)[0].flatten(1).norm(dim=1)
                     for b in self.model.blocks]  # fmt: skip
            self.window.end_step(step, torch.stack(norms))

    def finish(self, end: str):
        """Write the window; drop what was kept in case of an explosion, if there was none."""
        if self.window is not None:
            write_table(self.recorder.part / "query_error.parquet", self.window.to_table())
        if end == "completed" and explosion.find_explosion(self.recorder.losses()) is None:
            while self.rolling:
                self.rolling.pop().unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()
