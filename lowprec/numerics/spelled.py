"""Frozen settings that can be spelled: a preset, then changes of fields, as in "LOW+o=bf16"."""

from __future__ import annotations

import dataclasses
import difflib
import re
from functools import lru_cache
from typing import ClassVar, Self

from lowprec import UserError


class Spelled:
    """What a `PrecisionPolicy` and a `Recipe` have in common beside their fields."""

    noun: ClassVar[str]
    example: ClassVar[str]
    presets: ClassVar[dict[str, Self]]
    """What `str` writes names of."""
    names: ClassVar[dict[str, Self]]
    """What `parse` starts from: the presets, and names that may come to mean something else."""

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    def replace(self, **changes) -> Self:
        """A copy with some fields changed: `LOW.replace(o_acc="fp32")`.

        Raises `UserError` naming a field that is unknown or cannot have that value.
        """
        known = self.fields()
        for name in changes:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"fields: {', '.join(known)}"
                raise UserError(f"unknown {self.noun} field {name!r}; {hint}")
        return dataclasses.replace(self, **changes)

    def diff(self, other: Self) -> dict[str, tuple[str, str]]:
        """Fields that differ, as {field: (mine, other's)} in text, in dataflow order."""
        pairs = ((n, str(getattr(self, n)), str(getattr(other, n))) for n in self.fields())
        return {name: (mine, theirs) for name, mine, theirs in pairs if mine != theirs}

    def __str__(self) -> str:
        name = min(self.presets, key=lambda preset: len(self.presets[preset].diff(self)))
        changes = self.presets[name].diff(self)
        return "+".join([name, *(f"{field}={new}" for field, (_, new) in changes.items())])

    @classmethod
    def parse(cls, text: str | Self) -> Self:
        """Read "LOW", "LOW+delta_from=o_fp32" or "ALL_FP32 + o=bf16:stochastic".

        Of two changes of one field the later wins. Raises `UserError` for an unknown base, field
        or value.
        """
        return text if isinstance(text, cls) else cls._read(str(text))

    @classmethod
    @lru_cache(maxsize=256)
    def _read(cls, text: str) -> Self:
        base, *changes = re.split(r"\s*\+\s*(?=[A-Za-z_]+\s*=)", text.strip())
        if base not in cls.names:
            near = difflib.get_close_matches(base.upper(), cls.names, n=1)
            hint = f"did you mean {near[0]}? Or " if near else ""
            raise UserError(
                f"unknown {cls.noun} {base!r}; {hint}start from one of {', '.join(cls.names)}, "
                f"then add changes as in {cls.example}"
            )
        fields = dict(re.split(r"\s*=\s*", change, maxsplit=1) for change in changes)
        return cls.names[base].replace(**fields)
