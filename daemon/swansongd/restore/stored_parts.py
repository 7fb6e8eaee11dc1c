# SPDX-License-Identifier: Apache-2.0
"""The parts of a shard as they are stored: ranges of objects, each with its digest.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from swansongd.digests import part_count, part_digest
from swansongd.model import Extent, StoredObject, StoredShard


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of a shard.  Two equal ones are the same bytes of the same objects."""

    pieces: tuple[Extent, ...]
    """Its bytes, from the first to the last.  An empty shard has one part without pieces."""
    digest: bytes

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


def parts_of(shard: StoredShard) -> Iterator[StoredPart]:
    """The parts of a shard in order, in time linear in its parts and extents."""
    extents = iter(shard.extents)
    extent, at_bytes = Extent(StoredObject("", 0), 0, 0), 0
    left_bytes = shard.size_bytes
    for index in range(part_count(shard.size_bytes, shard.part_size_bytes)):
        missing_bytes = min(shard.part_size_bytes, left_bytes)
        left_bytes -= missing_bytes
        pieces = []
        while missing_bytes:
            if at_bytes == extent.size_bytes:
                extent, at_bytes = next(extents), 0
            size_bytes = min(missing_bytes, extent.size_bytes - at_bytes)
            pieces.append(Extent(extent.object, extent.offset_bytes + at_bytes, size_bytes))
            at_bytes += size_bytes
            missing_bytes -= size_bytes
        yield StoredPart(tuple(pieces), part_digest(shard.part_digests, index))


def runs(parts: Iterable[StoredPart], max_bytes: int) -> list[list[StoredPart]]:
    """Parts in groups that one request reads: neighbours in one object, up to ``max_bytes`` together.

    A part with several pieces is a group of its own.
    """
    grouped: list[list[StoredPart]] = []
    end, size_bytes = ("", 0), 0
    for part in sorted(parts, key=_place):
        (first, *others) = part.pieces
        start = (first.object.key, first.offset_bytes)
        size_bytes += first.size_bytes
        if others or start != end or size_bytes > max_bytes:
            grouped.append([])
            size_bytes = first.size_bytes
        grouped[-1].append(part)
        end = ("", 0) if others else (first.object.key, first.offset_bytes + first.size_bytes)
    return grouped


def _place(part: StoredPart) -> tuple[str, int, int]:
    first = part.pieces[0]
    return first.object.key, first.offset_bytes, first.size_bytes


def gaps(ranges: Iterable[tuple[int, int]], size_bytes: int) -> Sequence[tuple[int, int]]:
    """The ranges (offset and size) of an object that none of these ranges covers."""
    found = []
    at_bytes = 0
    for offset, length in sorted(ranges):
        if offset > at_bytes:
            found.append((at_bytes, offset - at_bytes))
        at_bytes = max(at_bytes, offset + length)
    if at_bytes < size_bytes:
        found.append((at_bytes, size_bytes - at_bytes))
    return found
