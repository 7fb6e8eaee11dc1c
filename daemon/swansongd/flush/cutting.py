# SPDX-License-Identifier: Apache-2.0
"""Cuts the files of a set into the pieces of its chunks.  No IO.

A large file is cut at equal distances, and each piece is a chunk.  Small files share chunks, in the order of
their paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swansong_bucket.model import CHUNK_BYTES_MAX, StagedFile

SMALL_BYTES_MAX = 4 * 2**20
"""Largest file that shares a chunk.  Above this size a request costs little next to its bytes."""
PACKED_FILES_MAX = 5000
"""Limits the work that one failed request repeats."""
FILE_CHUNKS_MAX = 4096
"""Larger files have larger chunks, so that the manifest of 1 TB stays below 10 MB."""


class Piece(NamedTuple):
    """A range of a staged file; it lies within one chunk."""

    file: StagedFile
    offset_bytes: int
    size_bytes: int


Pieces = tuple[Piece, ...]
"""The bytes of one chunk, from the first to the last."""


def size_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.size_bytes for piece in pieces)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Decides which bytes share a chunk.

    Args:
        chunk_bytes: size of a chunk, except of large files.  The last file of a shared chunk may exceed it.
        connections: parallel requests, which should all have work.
        small_bytes_max: largest file that shares a chunk; 0: none does.
    """

    chunk_bytes: int
    connections: int
    small_bytes_max: int = SMALL_BYTES_MAX

    def is_small(self, file: StagedFile) -> bool:
        """Whether a file shares a chunk with others."""
        return file.size_bytes <= min(self.chunk_bytes // 4, self.small_bytes_max)

    def cut(self, file: StagedFile) -> list[Piece]:
        """The pieces of a file, in order; an empty file has none."""
        size_bytes = chunk_bytes_for(file.size_bytes, self.chunk_bytes)
        return [
            Piece(file, offset, min(size_bytes, file.size_bytes - offset))
            for offset in range(0, file.size_bytes, size_bytes)
        ]

    def packed(self, pieces: Sequence[Piece], *, is_sealed: bool) -> list[Pieces]:
        """Small files in groups, one for each chunk.

        Files of a set that still grows stay out until a quarter of a chunk waits.
        """
        wanted_bytes = self._wanted_bytes(size_of(pieces)) if is_sealed else self.chunk_bytes // 4
        groups: list[Pieces] = []
        group: list[Piece] = []
        group_bytes = 0
        for piece in pieces:
            group.append(piece)
            group_bytes += piece.size_bytes
            if group_bytes >= wanted_bytes or len(group) == PACKED_FILES_MAX:
                groups.append(tuple(group))
                group, group_bytes = [], 0
        if group and is_sealed:
            groups.append(tuple(group))
        return groups

    def _wanted_bytes(self, total_bytes: int) -> int:
        """The size of each shared chunk of a sealed set."""
        share_bytes = -(-total_bytes // self.connections)
        wanted_bytes = max(1, self.chunk_bytes // 8, min(self.chunk_bytes, share_bytes))
        # Chunks of one size: a small last one would cost a request of its own.
        chunks = max(1, -(-total_bytes // wanted_bytes))
        return -(-total_bytes // chunks)


def chunk_bytes_for(size_bytes: int, wanted_bytes: int) -> int:
    """Size of the chunks of a file: as configured, doubled until there are at most 4,096."""
    while size_bytes > wanted_bytes * FILE_CHUNKS_MAX and wanted_bytes < CHUNK_BYTES_MAX:
        wanted_bytes *= 2
    return min(wanted_bytes, CHUNK_BYTES_MAX)
