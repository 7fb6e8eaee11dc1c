# SPDX-License-Identifier: Apache-2.0
"""The journal of a restore: the chunks that it wrote, so that the next restore does not fetch them again.

A line with the name of a chunk is appended once its bytes are in their files.  Neither the journal nor the
files are synced, so a line is only a hint: the bytes are read back and must match the name of the chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from swansong_bucket.model import Chunk, CommitRef

_VERSION = "swansong-restore-3"
BYTES_MAX = 16 * 2**20
"""Room for 900,000 chunks; a larger journal is not read."""
_NAME_CHARS = 16
_ELSEWHERE = "-"
"""End of the line of a chunk whose bytes did not come from the store."""

Noted = Mapping[Chunk, bool]
"""The chunks that a journal names, each with whether its bytes came from the store."""


def identity_of(run: str, ref: CommitRef, nodes: int) -> str:
    """The first line of the journal: equal if and only if the same commit is restored."""
    return f"{_VERSION} {hashlib.sha256(repr((run, ref, nodes)).encode()).hexdigest()}"


def line(chunk: Chunk, *, is_of_store: bool) -> bytes:
    """The line for a chunk whose bytes are in their files."""
    return f"{_name(chunk)}{'' if is_of_store else _ELSEWHERE}\n".encode()


def first_line(identity: str) -> bytes:
    return f"{identity}\n".encode()


def parse(data: bytes, identity: str, chunks: Iterable[Chunk]) -> Noted | None:
    """The chunks that the journal names; None if it belongs to another restore, or is not a journal.

    Lines that a crash tore or filled with other bytes are skipped.
    """
    first, *rest = data.decode("ascii", "replace").split("\n")
    if first != identity:
        return None
    names = frozenset(rest[:-1])  # the text after the last line break is empty or a torn line
    named = ((chunk, _name(chunk)) for chunk in chunks)
    return {
        chunk: name in names
        for chunk, name in named
        if not names.isdisjoint((name, name + _ELSEWHERE))
    }


def _name(chunk: Chunk) -> str:
    """The start of its digest."""
    return chunk.key.rpartition("/")[2][:_NAME_CHARS]
