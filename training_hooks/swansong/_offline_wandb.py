# SPDX-License-Identifier: Apache-2.0
"""Reads the last step in the files of offline W&B runs.

W&B writes these files in blocks of 32 KiB, so a killed process loses its newest points.  Only the files show
which points survived.  They have the format of a LevelDB log, with one ``Record`` of W&B's protocol in each
entry; see ``log_format.md`` of LevelDB.
"""

from __future__ import annotations

import glob
import os
import struct
from collections.abc import Iterator
from typing import Any

_BLOCK_BYTES = 32 * 1024
_FILE_HEADER_BYTES = 7
_ENTRY = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def last_step(directory: str, run_id: str) -> int:
    """The last logged step in all offline files of a W&B run; -1 without any.

    Args:
        directory: the directory ``wandb`` with a folder for each offline run.
        run_id: of W&B.

    Raises:
        OSError: a file cannot be read.
        Exception: a file has another format.
    """
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415  optional

    pattern = os.path.join(
        glob.escape(directory), f"offline-run-*-{glob.escape(run_id)}", "*.wandb"
    )
    newest = -1
    for path in glob.glob(pattern):
        with open(path, "rb") as file:
            data = file.read()
        for entry in _entries(data):
            newest = max(newest, _history_step(wandb_internal_pb2.Record.FromString(entry)))
    return newest


def _history_step(record: Any) -> int:
    is_history = record.WhichOneof("record_type") == "history"
    return int(record.history.step.num) if is_history else -1


def _entries(data: bytes) -> Iterator[bytes]:
    """The whole entries of a log; the last one may be cut off."""
    place, entry = _FILE_HEADER_BYTES, b""
    while place + _ENTRY.size <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _ENTRY.size:  # a block's end is filled with zeros
            place += left
            continue
        _checksum, size_bytes, kind = _ENTRY.unpack_from(data, place)
        place += _ENTRY.size
        if kind == 0 or place + size_bytes > len(data):
            return
        entry += data[place : place + size_bytes]
        place += size_bytes
        if kind in (_WHOLE, _LAST):
            yield entry
            entry = b""
