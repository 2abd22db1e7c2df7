"""Tables and weights as a run records them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lowprec.records import files

DOS_FOLDER = 0x10
"""Bit of a zip member's attributes that miniz, which torch reads with, takes for a folder."""


def load_archive(path: Path, device: str = "cpu"):
    """What `torch.save` wrote, tensors and plain values only.

    torch reads past a flipped bit; the CRC-32 that it stored with each tensor finds one. The bit
    that calls a member a folder is in no checksum, and torch would then read nothing, into memory
    that is not cleared. Raises `zipfile.BadZipFile` for an archive that is damaged, and torch's
    errors.
    """
    require_whole(path)
    return torch.load(path, map_location=device, weights_only=True)


def require_whole(path: Path) -> None:
    """Raise `zipfile.BadZipFile` unless each member of an archive has the checksum it came with."""
    with zipfile.ZipFile(path) as archive:
        folders = [m.filename for m in archive.infolist() if m.external_attr & DOS_FOLDER]
        damaged = [*folders, archive.testzip()][0]
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} is not as it was written")


def weights_sha256(weights: dict) -> str:
    """One hash of all weights of a `state_dict`, bit by bit."""
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(tensor.cpu().contiguous().numpy())
    return digest.hexdigest()


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Parquet, half its usual size: measured floats are packed by place of the byte, steps as
    differences, and the footer says nothing beyond the columns and `table.attrs`. Each page has
    a checksum."""
    about = {"PANDAS_ATTRS": json.dumps(table.attrs)} if table.attrs else {}
    write_groups(path, [pa.Table.from_pandas(table, preserve_index=False)], about)


def write_groups(path: Path, groups: list[pa.Table], about: dict[str, str]) -> None:
    """As `write_table`, tables of the same columns, each as a row group; `about` in the footer."""
    schema, data = groups[0].schema, io.BytesIO()
    packed = {f.name: "BYTE_STREAM_SPLIT" for f in schema if pa.types.is_floating(f.type)}
    packed |= {"step": "DELTA_BINARY_PACKED"} if "step" in schema.names else {}
    with pq.ParquetWriter(
        data, schema, compression="brotli", compression_level=10, column_encoding=packed,
        use_dictionary=[name for name in schema.names if name not in packed],
        write_statistics=False, store_schema=False, write_page_checksum=True,
    ) as writer:  # fmt: skip
        for group in groups:
            writer.write_table(group, row_group_size=max(group.num_rows, 1))
        if about:
            writer.add_key_value_metadata(about)
    files.write_atomic(path, lambda file: file.write(data.getvalue()))
