# SPDX-License-Identifier: Apache-2.0
"""The chunks of a restore that are in flight: their number, and their use of the connections."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.transfer import reader
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_bucket.util.concurrency import FIRST, ConcurrencyLimit

from testkit.committed import commit
from testkit.memory_store import MemoryStore
from testkit.waiting import until

FILES = 12
KEYS = RunKeys("r")


@contextmanager
def reading(tmp_path: Path) -> Iterator[list[str]]:
    """Read from a store that blocks until the end of the block; yields the keys requested so far."""
    store = MemoryStore()
    commit(store, {f"f{number}": b"x" * (number + 1) for number in range(FILES)})
    answers = threading.Event()
    begun: list[str] = []

    def before(what: str, key: str) -> None:
        if what == "get" and "/data/" in key:
            begun.append(key)
            assert answers.wait(60)

    store.before = before
    target = RestoreTarget(tmp_path / "here")
    options = ReadOptions(connections=FILES)
    thread = threading.Thread(target=lambda: restore(store, KEYS, target, options=options))
    thread.start()
    try:
        yield begun
    finally:
        answers.set()
        thread.join(60)
    assert len(begun) == len(list((tmp_path / "here").iterdir())) == FILES


def test_few_chunks_are_in_flight_before_the_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The concurrency limit bounds the requests, and not the number of threads."""
    waiting: list[float] = []
    wait = threading.Condition.wait

    def noted(self: threading.Condition, timeout: float | None = None) -> bool:
        if timeout == 3600.0:
            waiting.append(timeout)
            return wait(self, 20)
        return wait(self, timeout)

    monkeypatch.setattr(reader, "SAMPLE_S", 3600.0)
    monkeypatch.setattr(threading.Condition, "wait", noted)
    with reading(tmp_path) as begun:
        until(lambda: len(waiting) == FILES - FIRST, what="the other threads to wait")
        assert len(begun) == FIRST


def test_chunks_without_progress_do_not_block_the_others(tmp_path: Path) -> None:
    """While no byte arrives, the limit grows until all chunks are in flight."""
    with reading(tmp_path) as begun:
        until(lambda: len(begun) == FILES, what="all chunks to be requested")


def test_a_slow_fsync_does_not_block_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one file is synced, the only connection fetches the next file."""
    store = MemoryStore()
    commit(store, {f"f{number}": b"%d" % number for number in range(4)})
    fetched: list[str] = []
    fsync = os.fsync

    def before(what: str, key: str) -> None:
        if what == "get" and "/data/" in key:
            fetched.append(key)

    def slow(fd: int) -> None:
        until(lambda: len(fetched) > 1, timeout_s=10, what="the next file to be fetched")
        fsync(fd)

    store.before = before
    monkeypatch.setattr(os, "fsync", slow)
    restored = restore(
        store, KEYS, RestoreTarget(tmp_path / "here"), options=ReadOptions(connections=1)
    )
    assert restored.size_bytes == len(fetched) == 4


def test_chunks_are_fetched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many threads that wait for the link, the one with the first chunk is next.

    Otherwise some chunk of each shard waits until the end, and no shard is complete early.
    """
    files = 150
    store = MemoryStore()
    made = commit(store, {f"f{number:03d}": b"%03d" % number for number in range(files)})
    fetched: list[str] = []
    never = threading.Event()

    def before(what: str, key: str) -> None:
        if what == "get" and "/data/" in key:
            fetched.append(key)
            never.wait(0.004)  # waiting threads take samples meanwhile

    store.before = before
    monkeypatch.setattr(reader, "SAMPLE_S", 0.001)
    monkeypatch.setattr(ConcurrencyLimit, "sample", lambda *_: None)
    restore(store, KEYS, RestoreTarget(tmp_path / "here"))
    order = [chunk.key for chunk in made.chunks]
    assert sorted(order) == sorted(fetched)
    late = max(place - order.index(key) for place, key in enumerate(fetched))
    # The threads of two passes, on a machine that lets some of them wait; without an order nearly all files.
    assert late <= files // 2
