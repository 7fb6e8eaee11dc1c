# SPDX-License-Identifier: Apache-2.0
"""The parts of the newest commit, by digest: a later set references them instead of sending them again.

A digest finds a part wherever it lies, also in a file of another name.  Reading a whole part only to find
that it differs would cost a third of sending it.  So a part also has a *head*: the digest of its first
16 KiB, which nearly always shows a difference.  The journal holds the heads of what this VM has committed
itself; manifests have none.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from blake3 import blake3

from swansongd.digests import part_count, part_digest
from swansongd.model import Extent, StoredObject, StoredShard

HEAD_BYTES = 16 * 2**10
HEAD_DIGEST_BYTES = 8


def head_digest(fd: int, offset: int, size_bytes: int) -> bytes:
    """The head of the part of a file that has ``size_bytes`` from ``offset``."""
    return head_of(os.pread(fd, min(size_bytes, HEAD_BYTES), offset))


def head_of(data: bytes | memoryview) -> bytes:
    """The head of a part that begins with these bytes: all of it, or at least 16 KiB."""
    return blake3(data[:HEAD_BYTES]).digest(HEAD_DIGEST_BYTES)


class KnownParts:
    """An index of shards; it never changes.

    Args:
        shards: with the heads of their parts, concatenated; empty if they are unknown.
    """

    def __init__(self, shards: Iterable[tuple[StoredShard, bytes]] = ()) -> None:
        self.objects: set[StoredObject] = set()
        """All objects of the shards."""
        self._part_sizes_bytes: dict[str, int] = {}
        self._places: dict[bytes, tuple[StoredShard, list[int], int]] = {}
        """By digest: the shard, the offsets at which its extents begin, and the index of the part."""
        heads: set[bytes] = set()
        has_heads = True
        for shard, shard_heads in shards:
            parts = part_count(shard.size_bytes, shard.part_size_bytes)
            self.objects.update(extent.object for extent in shard.extents)
            self._part_sizes_bytes[shard.path] = shard.part_size_bytes
            if not shard.size_bytes:
                continue
            starts = list(accumulate((extent.size_bytes for extent in shard.extents), initial=0))
            for index in range(parts):
                digest = part_digest(shard.part_digests, index)
                self._places.setdefault(digest, (shard, starts, index))
            has_heads = has_heads and len(shard_heads) == parts * HEAD_DIGEST_BYTES
            heads.update(
                shard_heads[start : start + HEAD_DIGEST_BYTES]
                for start in range(0, len(shard_heads), HEAD_DIGEST_BYTES)
            )
        self._heads = heads if has_heads else None

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def has_heads(self) -> bool:
        """Whether :meth:`may_contain` can exclude a part."""
        return self._heads is not None

    def may_contain(self, head: bytes) -> bool:
        """Whether a part with this head may be known."""
        return self._heads is None or head in self._heads

    def part_size_bytes(self, path: str) -> int | None:
        """The part size of the shard under this path."""
        return self._part_sizes_bytes.get(path)

    def find(self, digest: bytes, size_bytes: int) -> tuple[Extent, ...]:
        """The stored bytes of a part with this digest and size; empty if no such part is known."""
        place = self._places.get(digest)
        if place is None:
            return ()
        shard, starts, index = place
        offset = index * shard.part_size_bytes
        if size_bytes != min(shard.part_size_bytes, shard.size_bytes - offset):
            return ()
        return tuple(cut(shard.extents, starts, offset, size_bytes))


def cut(
    extents: Sequence[Extent], starts: Sequence[int], offset: int, size_bytes: int
) -> Iterator[Extent]:
    """The ``size_bytes`` bytes from ``offset`` of the bytes in these extents."""
    for number in range(bisect_right(starts, offset) - 1, len(extents)):
        extent, skipped = extents[number], max(0, offset - starts[number])
        length = min(extent.size_bytes - skipped, offset + size_bytes - starts[number] - skipped)
        if length <= 0:
            return
        yield Extent(extent.object, extent.offset_bytes + skipped, length)


def merged(extents: Sequence[Extent]) -> tuple[Extent, ...]:
    """The same bytes in the fewest extents: neighbours in one object become one."""
    result: list[Extent] = []
    for extent in extents:
        last = result[-1] if result else None
        end = None if last is None else (last.object, last.offset_bytes + last.size_bytes)
        if last is not None and end == (extent.object, extent.offset_bytes):
            size_bytes = last.size_bytes + extent.size_bytes
            result[-1] = Extent(last.object, last.offset_bytes, size_bytes)
        elif extent.size_bytes:
            result.append(extent)
    return tuple(result)
