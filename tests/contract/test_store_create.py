# SPDX-License-Identifier: Apache-2.0
"""The creation of chunks as in stores/base.py, for every backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from swansong_bucket.errors import Exists, Transient
from swansong_bucket.stores.base import WINDOW_BYTES, Body, ObjectInfo, ObjectStore, ignore_moved

from testkit.bodies import CountedSink, torn
from testkit.store_backends import MIB, get_range
from testkit.waiting import in_threads

SIZES = [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 5]


@pytest.mark.fault("O11")
def test_create(store: ObjectStore) -> None:
    """Every byte arrives and is counted once.  The same bytes again, after a lost reply, are no error."""
    for size_bytes in SIZES:
        content = os.urandom(size_bytes)
        moved: list[int] = []
        for count in (moved.append, ignore_moved):
            store.create(key := f"data/{size_bytes}", Body(content, count))
            assert sum(moved) == size_bytes
            assert max(moved, default=0) <= WINDOW_BYTES
            assert store.head(key) == ObjectInfo(key, size_bytes)
            assert get_range(store, key, 0, size_bytes) == content
    assert {info.size_bytes for info in store.list("")} == set(SIZES)


@pytest.mark.fault("O11")
def test_create_overwrites_nothing(store: ObjectStore, requires: Callable[[str], None]) -> None:
    """An object with other bytes, of the same or another size, does not count as ours and is not replaced."""
    requires("spent names")
    for size_bytes in (5, MIB + 5):
        content = os.urandom(size_bytes)
        store.create(key := f"chunk-{size_bytes}", Body(content))
        for other in (content[1:] + bytes([content[0] ^ 1]), content + b"1", b""):
            with pytest.raises(Exists):
                store.create(key, Body(other))
        assert get_range(store, key, 0, size_bytes) == content


def test_many_creators_with_the_same_bytes_all_succeed(store: ObjectStore) -> None:
    """A server may answer some of them with a transient error; they succeed when they repeat the request."""
    content = os.urandom(MIB + 1)

    def create(_: int) -> None:
        for _attempt in range(100):  # each round of racing requests has a winner
            with suppress(Transient):
                return store.create("data/chunk", Body(content))
        return store.create("data/chunk", Body(content))

    in_threads(8, create)
    assert get_range(store, "data/chunk", 0, MIB + 1) == content


class _Trouble(OSError):
    pass


class _BrokenSink(CountedSink):
    def write(self, window: memoryview) -> None:
        super().write(window)
        raise _Trouble


@pytest.mark.fault("S5")
def test_an_exception_of_moved_reaches_the_caller(store: ObjectStore) -> None:
    """Unchanged and without a retry.  No object exists, and the key can still be created."""
    content = os.urandom(5 * MIB)
    for windows in (0, 1):
        with pytest.raises(_Trouble):
            store.create("chunk", Body(content, torn(_Trouble(), windows)))
    assert store.head("chunk") is None
    store.create("chunk", Body(content))
    assert get_range(store, "chunk", 0, len(content)) == content


def test_an_exception_of_a_sink_reaches_the_caller(store: ObjectStore) -> None:
    """Unchanged and without a retry."""
    content = os.urandom(3 * MIB)
    store.create("chunk", Body(content))
    sink = _BrokenSink()
    with pytest.raises(_Trouble):
        store.get_range("chunk", 0, len(content), sink)
    assert sink.passes == 1
    assert get_range(store, "chunk", 1, len(content) - 1) == content[1:]
