# SPDX-License-Identifier: Apache-2.0
"""The ranges of objects that digests cover, and their comparison in any pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.errors import CorruptError
from swansongd.mirror.checks import Check, Checks, Verifier, checks_of, covers
from swansongd.model import Extent, StoredObject, StoredShard

from testkit.committed import part_digest

PART = 100


def a_shard(objects: dict[str, bytes], places: Sequence[tuple[str, int, int]]) -> StoredShard:
    """A shard whose bytes lie at these places: key, offset, size."""
    data = b"".join(objects[key][offset : offset + size] for key, offset, size in places)
    parts = [data[at : at + PART] for at in range(0, max(1, len(data)), PART)]
    return StoredShard(
        path="file",
        size_bytes=len(data),
        part_size_bytes=PART,
        crc32c=0,
        part_digests=b"".join(map(part_digest, parts)),
        extents=tuple(
            Extent(StoredObject(key, len(objects[key])), offset, size)
            for key, offset, size in places
        ),
    )


def some_bytes(count: int) -> bytes:
    return bytes(at * 7 % 251 for at in range(count))


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 350)), min_size=1, max_size=6))
def test_checks_and_split_parts_cover_each_byte_of_a_shard(places: list[tuple[int, int]]) -> None:
    """Each part of a shard is either one range of one object, or a split part with all its pieces."""
    objects = {f"k{number}": some_bytes(900) for number in range(len(places))}
    shard = a_shard(objects, [(f"k{n}", at, size) for n, (at, size) in enumerate(places)])
    found = checks_of([shard])
    in_checks = sum(check.size_bytes for checks in found.by_object.values() for check in checks)
    in_pieces = sum(each.size_bytes for part in found.split for each in part.extents)
    total = sum(size for _, size in places)
    # Two parts with the same bytes at the same place are one check.
    assert in_checks + in_pieces == total
    for stored, checks in found.by_object.items():
        Verifier(stored.key, checks).feed(0, memoryview(objects[stored.key]))
    for part in found.split:
        pieces = (
            objects[each.object.key][each.offset_bytes : each.offset_bytes + each.size_bytes]
            for each in part.extents
        )
        assert part_digest(b"".join(pieces)) == part.digest


@given(st.integers(1, 400), st.integers(0, 999), st.lists(st.integers(1, 300), min_size=1))
def test_a_changed_byte_is_found_in_any_pieces(step: int, changed: int, pieces: list[int]) -> None:
    """The ranges overlap, and the pieces do not respect them: each changed byte is in some range."""
    data = bytearray(some_bytes(1000))
    checks = sorted(
        Check(at, min(2 * step, 1000 - at), part_digest(bytes(data[at : at + 2 * step])))
        for at in range(0, 1000, step)
    )
    assert covers(checks, 1000)
    feed_all(checks, data, pieces)
    data[changed] ^= 1
    with pytest.raises(CorruptError, match=r"bytes \d+ to \d+ of key do not match"):
        feed_all(checks, data, pieces)


def feed_all(checks: list[Check], data: bytearray, pieces: list[int]) -> None:
    verifier, at, turn = Verifier("key", checks), 0, 0
    while at < len(data):
        end = min(len(data), at + pieces[turn % len(pieces)])
        verifier.feed(at, memoryview(data)[at:end])
        at, turn = end, turn + 1


def test_a_gap_is_not_covered() -> None:
    """An object that a manifest names only in part needs the digests of other manifests."""
    ranges = [Check(0, 10, b""), Check(10, 5, b""), Check(20, 10, b"")]
    assert not covers(ranges, 30)
    assert not covers(ranges[:2], 30)
    assert covers([*ranges[:1], Check(5, 25, b"")], 30)
    assert covers([], 0)


def test_an_empty_shard_has_no_range() -> None:
    """It has no extent, so there is nothing to copy."""
    empty = a_shard({}, [])
    assert checks_of([empty]) == Checks({}, [])
