# SPDX-License-Identifier: Apache-2.0
"""The chunks of a checkpoint, and the places of their bytes in its files.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swansong_bucket.model import Chunk, StoredShard

MISSING = "is missing from the store"
"""The defect of a chunk without an object."""


@dataclass(frozen=True, slots=True)
class Place:
    """A range of a file that has the same bytes as a range of a chunk."""

    path: str
    file_bytes: int
    """Size of the whole file."""
    offset_bytes: int
    """Start of the range within the file."""
    at_bytes: int
    """Start of the range within the chunk."""
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """End of the range within the chunk."""
        return self.at_bytes + self.size_bytes


def defect_of_size(chunk: Chunk, size_bytes: int | None) -> str:
    """The defect of a chunk with an object of this size, None if there is no object; empty without one."""
    if size_bytes is None:
        return MISSING
    if size_bytes != chunk.size_bytes:
        return f"has an object of {size_bytes} bytes instead of {chunk.size_bytes}"
    return ""


def places_of(shards: Iterable[StoredShard]) -> dict[Chunk, list[Place]]:
    """The places of each chunk, in the order of their first use."""
    places: dict[Chunk, list[Place]] = {}
    for shard in shards:
        offset = 0
        for extent in shard.extents:
            place = Place(
                shard.path, shard.size_bytes, offset, extent.offset_bytes, extent.size_bytes
            )
            places.setdefault(extent.chunk, []).append(place)
            offset += extent.size_bytes
    return places


def cover(chunk: Chunk, places: Iterable[Place]) -> tuple[Place, ...]:
    """Ranges of the places that have each byte of the chunk once, in order.

    Empty if some bytes of the chunk are in none of the places.
    """
    found = []
    end_bytes = 0
    for place in sorted(places, key=lambda place: place.at_bytes):
        known_bytes = end_bytes - place.at_bytes
        if known_bytes < 0:
            return ()
        if known_bytes < place.size_bytes:
            rest = replace(
                place,
                offset_bytes=place.offset_bytes + known_bytes,
                at_bytes=end_bytes,
                size_bytes=place.size_bytes - known_bytes,
            )
            found.append(rest)
            end_bytes = place.end_bytes
    return tuple(found) if end_bytes == chunk.size_bytes else ()
