# SPDX-License-Identifier: Apache-2.0
"""Runs: one request fetches neighbouring small shards of an object, and each shard is verified by itself."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.bucket.keys import RunKeys
from swansongd.errors import NothingToRestore, StagingError, Stopped, Transient
from swansongd.restore import runs, target
from swansongd.restore.reader import ReadOptions
from swansongd.restore.restore import Selection, restore
from swansongd.restore.runs import RUN_BYTES_MAX, Range, Run, RunSink, joined
from swansongd.restore.target import RestoredFile, RestoreTarget
from swansongd.restore.verify import verify
from swansongd.stores.base import Sink

from testkit.committed import commit, part_digest, tree
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
FILES = {f"d{n % 3}/{n:02d}": random.Random(n).randbytes(n * 20) for n in range(40)}


def packed_store(files: dict[str, bytes] | None = None, **options: Any) -> MemoryStore:
    store = MemoryStore()
    commit(store, FILES if files is None else files, is_packed=True, **options)
    store.requests.clear()
    return store


def pack_reads(store: MemoryStore) -> int:
    return sum(what == "get" and "-packs/" in key for what, key in store.requests)


class CountingStore(MemoryStore):
    """Counts the bytes that it returns, and may damage or refuse them."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__()
        self.objects = inner.objects
        self.bytes_read = 0
        self.on_read: Callable[[bytes], bytes] = lambda data: data

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        self.requests.append(("get", key))
        data = self.on_read(self.objects[key][offset : offset + size_bytes])
        self.bytes_read += size_bytes
        sink.rewind()
        for start in range(0, size_bytes, 333):
            sink.write(memoryview(bytearray(data[start : start + 333])))


@given(
    sizes=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 300_000), st.integers(1, 5_000_000))
    ),
    connections=st.integers(1, 32),
)
def test_runs_have_every_range_once_and_no_large_gap(
    sizes: list[tuple[str, int, int]], connections: int
) -> None:
    """Neighbours share a run up to its size; a gap of at most 64 KiB is read through."""
    ranges, at = [], {"a": 0, "b": 7}
    for number, (key, gap_bytes, size_bytes) in enumerate(sizes):
        ranges.append(Range(key, at[key] + gap_bytes, size_bytes, number))
        at[key] += gap_bytes + size_bytes
    random.Random(len(sizes)).shuffle(ranges)
    found = joined(ranges, connections=connections)
    assert sorted(each.item for run in found for each in run.ranges) == list(range(len(sizes)))
    total_bytes = sum(each.size_bytes for each in ranges)
    for run in found:
        assert len({each.key for each in run.ranges}) == 1
        gaps = [after.offset_bytes - before.end_bytes for before, after in pairwise(run.ranges)]
        assert all(0 <= gap <= 2**16 for gap in gaps)
        if len(run.ranges) > 1:
            assert run.size_bytes <= RUN_BYTES_MAX
            assert run.size_bytes <= max(runs.RUN_BYTES_MIN, -(-total_bytes // connections))


def test_ranges_that_overlap_are_fetched_each_by_itself() -> None:
    """A hostile manifest may name the same bytes twice."""
    found = joined(
        [Range("a", 0, 10, 1), Range("a", 0, 10, 2), Range("a", 10, 5, 3)], connections=1
    )
    assert sorted([each.item for each in run.ranges] for run in found) == [[1], [2, 3]]


class FakeFile:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, window: memoryview, offset: int) -> None:
        self.data[offset : offset + window.nbytes] = window


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1),
    windows=st.lists(st.integers(1, 40), min_size=1),
    rewind_at=st.integers(0, 200),
)
def test_the_bytes_of_a_run_reach_their_files_whatever_the_windows_are(
    sizes: list[tuple[int, int]], windows: list[int], rewind_at: int
) -> None:
    """Also after a repeated request.  Bytes between the ranges count for nothing."""
    data = random.Random(1).randbytes(sum(map(sum, sizes)))
    ranges, at = [], 100
    for number, (gap_bytes, size_bytes) in enumerate(sizes):
        ranges.append(Range("key", at + gap_bytes, size_bytes, number))
        at += gap_bytes + size_bytes
    run = Run(ranges)
    skipped = run.offset_bytes - 100
    files: dict[int, FakeFile] = {}
    counted: list[int] = []

    @contextmanager
    def opened(item: int) -> Iterator[RestoredFile]:
        yield files.setdefault(item, FakeFile())  # type: ignore[misc]

    sink = RunSink(run, opened, moved=counted.append, taken_back=lambda n: counted.append(-n))
    body = data[skipped : skipped + run.size_bytes]
    for stop in (min(rewind_at, len(body)), len(body)):
        sink.rewind()
        done = 0
        while done < stop:
            length = min(windows[done % len(windows)], stop - done)
            sink.write(memoryview(body[done : done + length]))
            done += length
    sink.close()
    wanted = [data[each.offset_bytes - 100 :][: each.size_bytes] for each in ranges]
    assert [bytes(files[number].data) for number in range(len(ranges))] == wanted
    assert sink.digests == [part_digest(each) for each in wanted]
    assert sum(counted) == sum(map(len, wanted))
    with pytest.raises(Transient):
        sink.write(memoryview(b"x"))


def test_a_pack_is_restored_by_one_request_and_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files arrive, also empty ones.  One call makes them durable, before the directory appears."""
    synced: list[bool] = []
    sync = target.sync_file_system

    def noted(fd: int) -> None:
        synced.append((tmp_path / "here").exists())
        sync(fd)

    monkeypatch.setattr(target, "sync_file_system", noted)
    fsyncs: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsyncs.append(fd), fsync(fd)))
    store = packed_store()
    verified: list[str] = []
    options = ReadOptions(verified=lambda path, _target: verified.append(path))
    restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=options)
    assert tree(tmp_path / "here") == FILES
    assert pack_reads(store) == 1
    assert synced == [False]
    assert len(fsyncs) <= 4, "the empty file, and the directories that the rename changes"
    assert sorted(verified) == sorted(FILES)


def test_a_failed_sync_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk reported an error for a file that was written."""

    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(target, "sync_file_system", fails)
    with pytest.raises(StagingError, match="Input/output error"):
        restore(packed_store(), KEYS, RestoreTarget(tmp_path / "here"))
    assert not list(tmp_path.iterdir())


def test_a_descriptor_that_cannot_be_synced_raises(tmp_path: Path) -> None:
    """The result of the system call is checked."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        target.sync_file_system(10**6)


@pytest.mark.fault("O71")
def test_a_damaged_shard_is_fetched_again_without_its_neighbours(tmp_path: Path) -> None:
    """A bit that flipped in transit costs the bytes of one shard."""
    store = CountingStore(packed_store())
    size_bytes = sum(map(len, FILES.values()))

    def flip_first(data: bytes) -> bytes:
        store.on_read = lambda data: data
        return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]

    store.on_read = flip_first
    restore(store, KEYS, RestoreTarget(tmp_path / "here"))
    assert tree(tmp_path / "here") == FILES
    assert pack_reads(store) == 2
    assert store.bytes_read < size_bytes + 800


@pytest.mark.fault("O71")
@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_verify_names_the_shards_of_a_damaged_pack(tmp_path: Path, damage: str) -> None:
    """One shard for a flipped bit, all shards for an object that is too short or missing."""
    store = packed_store()
    (key,) = (key for key in store.objects if "-packs/" in key)
    data = store.objects[key]
    if damage == "flipped":
        store.objects[key] = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    elif damage == "truncated":
        store.objects[key] = data[:-1]
    else:
        del store.objects[key]
    defects = verify(store, KEYS).defects
    assert len(defects) == (1 if damage == "flipped" else len(FILES) - 1)
    with pytest.raises(NothingToRestore):
        restore(store, KEYS, RestoreTarget(tmp_path / "here"))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_restore_fetches_only_the_other_runs_again(tmp_path: Path) -> None:
    """Shards of a complete run are in the journal; their bytes are read back and verified."""
    files = {f"{n:03d}": random.Random(n).randbytes(200_000) for n in range(40)}
    store = CountingStore(packed_store(files, part_size_bytes=2**20))
    reads: list[int] = []

    def fail_third(data: bytes) -> bytes:
        reads.append(len(data))
        if len(reads) == 3:
            raise Transient("the connection was reset")
        return data

    store.on_read = fail_third
    options = ReadOptions(connections=4)
    with pytest.raises(Transient, match="reset"):
        restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=options)
    store.on_read = lambda data: data
    store.bytes_read = 0
    done = restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=options)
    assert done.reused_bytes >= 2 * 10**6
    assert store.bytes_read + done.reused_bytes == 8 * 10**6
    assert tree(tmp_path / "here") == files


def test_a_subset_of_a_pack_is_fetched_without_the_rest(tmp_path: Path) -> None:
    """A rank reads its own shards; a few bytes of others between them are read through."""
    files = {f"rank-{n // 10}/{n:02d}": random.Random(n).randbytes(100_000) for n in range(30)}
    store = CountingStore(packed_store(files, part_size_bytes=2**20))
    mine = Selection(files=lambda shard: shard.path.startswith("rank-1/"))
    restore(store, KEYS, RestoreTarget(tmp_path / "here"), mine)
    assert tree(tmp_path / "here") == {p: d for p, d in files.items() if p.startswith("rank-1/")}
    assert pack_reads(store) == 1
    assert store.bytes_read == 10**6


def test_a_file_of_this_machine_is_copied_and_its_neighbours_are_fetched(tmp_path: Path) -> None:
    """The run has a gap at its place."""
    files = {f"{n:02d}": random.Random(n).randbytes(100_000) for n in range(10)}
    store = CountingStore(packed_store(files, part_size_bytes=2**20))
    (tmp_path / "local").write_bytes(files["04"])

    @contextmanager
    def local(_ref: object, shards: Any) -> Iterator[dict[int, Callable[[], int]]]:
        (number,) = (n for n, shard in shards.items() if shard.path == "04")
        yield {number: lambda: os.open(tmp_path / "local", os.O_RDONLY)}

    found: list[int] = []
    options = ReadOptions(local=local, found=found.append)
    done = restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=options)
    assert tree(tmp_path / "here") == files
    assert done.local_bytes == sum(found) == 100_000
    assert store.bytes_read == 900_000
    assert pack_reads(store) == 2


def test_stop_ends_a_run_within_a_window(tmp_path: Path) -> None:
    """The files of a run that was not complete are fetched again."""
    store = CountingStore(packed_store())
    stop = threading.Event()

    def stopping(data: bytes) -> bytes:
        stop.set()
        return data

    store.on_read = stopping
    with pytest.raises(Stopped):
        restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=ReadOptions(stop=stop))
    assert not (tmp_path / "here").exists()
