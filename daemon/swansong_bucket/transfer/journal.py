# SPDX-License-Identifier: Apache-2.0
"""The journal of a restore: the chunks that it wrote, so that the next restore does not fetch them again.

A line with the number of a chunk is appended once its bytes are in their files.  Neither the journal nor the
files are synced, so a line is only a hint: the bytes are read back and must match the name of the chunk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from swansong_bucket.model import Chunk, CommitRef, StoredShard

_LINE = re.compile(r"[0-9]{1,10}")
_VERSION = "swansong-restore-1"
_SPARE_BYTES = 4096

Noted = frozenset[Chunk]
"""The chunks that a journal names."""


def identity_of(run: str, ref: CommitRef, shards: Sequence[StoredShard]) -> str:
    """The first line of the journal: equal if and only if the same files are restored from the same chunks.

    Every other line is the index of a chunk in the result of
    :func:`swansong_bucket.format.manifest.chunks_of` for the shards.
    """
    facts = hashlib.sha256(repr((run, ref)).encode())
    for shard in shards:
        facts.update(repr((shard.path, shard.size_bytes, len(shard.extents))).encode())
        for extent in shard.extents:
            chunk = extent.chunk
            place = (chunk.key, chunk.size_bytes, extent.offset_bytes, extent.size_bytes)
            facts.update(repr(place).encode())
    return f"{_VERSION} {facts.hexdigest()}"


def line(number: int) -> bytes:
    """The line for a chunk whose bytes are in their files."""
    return f"{number}\n".encode()


def first_line(identity: str) -> bytes:
    return f"{identity}\n".encode()


def parse(data: bytes, identity: str, chunks: Sequence[Chunk]) -> Noted | None:
    """The chunks in the journal; None if it belongs to another restore, or is not a journal.

    Lines that a crash tore or filled with other bytes are skipped.
    """
    first, *rest = data.decode("ascii", "replace").split("\n")
    if first != identity:
        return None
    # The text after the last line break is empty or a torn line.
    numbers = (int(text) for text in rest[:-1] if _LINE.fullmatch(text))
    return frozenset(chunks[number] for number in numbers if number < len(chunks))


def max_bytes(chunks: Sequence[Chunk]) -> int:
    """The size of the journal after a few restores of these chunks; a larger one is not read."""
    return _SPARE_BYTES + 4 * len(chunks) * len(line(10**9))
