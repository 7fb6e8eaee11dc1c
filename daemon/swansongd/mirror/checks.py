# SPDX-License-Identifier: Apache-2.0
"""The byte ranges of stored objects that the digests of a manifest cover.  Pure.

A copy is verified by these ranges: each part of a shard has a digest, and its extents name the object and the
offset of its bytes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from swansongd.digests import part_count, part_digest
from swansongd.errors import CorruptError
from swansongd.model import Extent, StoredObject, StoredShard


@dataclass(frozen=True, slots=True, order=True)
class Check:
    """A byte range of an object, with the digest of its bytes."""

    offset_bytes: int
    size_bytes: int
    digest: bytes

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A part of a shard whose bytes lie in several places, with its digest."""

    path: str
    extents: tuple[Extent, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Checks:
    """All ranges that the digests of some shards cover."""

    by_object: Mapping[StoredObject, Sequence[Check]]
    """The ranges of each object, by offset."""
    split: Sequence[SplitPart]


def checks_of(shards: Iterable[StoredShard]) -> Checks:
    """The ranges that the digests of these shards cover, each once."""
    found: defaultdict[StoredObject, set[Check]] = defaultdict(set)
    split: list[SplitPart] = []
    for shard in shards:
        for digest, pieces in _parts(shard):
            if len(pieces) == 1:
                piece = pieces[0]
                found[piece.object].add(Check(piece.offset_bytes, piece.size_bytes, digest))
            elif pieces:  # an empty shard has no bytes
                split.append(SplitPart(shard.path, tuple(pieces), digest))
    return Checks({stored: sorted(checks) for stored, checks in found.items()}, split)


def _parts(shard: StoredShard) -> Iterator[tuple[bytes, list[Extent]]]:
    """The digest of each part of a shard, and the pieces of objects with its bytes."""
    extents = deque(shard.extents)
    for index in range(part_count(shard.size_bytes, shard.part_size_bytes)):
        left_bytes = min(shard.part_size_bytes, shard.size_bytes - index * shard.part_size_bytes)
        pieces: list[Extent] = []
        while left_bytes:
            first = extents.popleft()
            taken_bytes = min(left_bytes, first.size_bytes)
            pieces.append(Extent(first.object, first.offset_bytes, taken_bytes))
            if taken_bytes < first.size_bytes:
                rest_bytes = first.size_bytes - taken_bytes
                extents.appendleft(
                    Extent(first.object, first.offset_bytes + taken_bytes, rest_bytes)
                )
            left_bytes -= taken_bytes
        yield part_digest(shard.part_digests, index), pieces


def covers(checks: Sequence[Check], size_bytes: int) -> bool:
    """Whether the ranges, by offset, cover all bytes of an object."""
    end_bytes = 0
    for check in checks:
        if check.offset_bytes > end_bytes:
            return False
        end_bytes = max(end_bytes, check.end_bytes)
    return end_bytes >= size_bytes


class Verifier:
    """Compares the bytes of an object with its checks.

    Args:
        key: of the object, for the error.
        checks: by offset.
    """

    def __init__(self, key: str, checks: Iterable[Check]) -> None:
        self._key = key
        self._left = deque(check for check in checks if check.size_bytes)
        self._open: list[tuple[Check, blake3]] = []

    def feed(self, offset_bytes: int, data: memoryview) -> None:
        """Take the bytes from ``offset_bytes``, which follow those of the previous call.

        Raises:
            CorruptError: a range that ends in these bytes does not match its digest.
        """
        end_bytes = offset_bytes + data.nbytes
        while self._left and self._left[0].offset_bytes < end_bytes:
            self._open.append((self._left.popleft(), blake3()))
        still_open = []
        for check, digest in self._open:
            start = max(check.offset_bytes, offset_bytes) - offset_bytes
            digest.update(data[start : min(check.end_bytes, end_bytes) - offset_bytes])
            if check.end_bytes > end_bytes:
                still_open.append((check, digest))
            elif digest.digest() != check.digest:
                raise CorruptError(
                    f"bytes {check.offset_bytes} to {check.end_bytes} of {self._key} do not match "
                    "the digest in the manifest"
                )
        self._open = still_open
