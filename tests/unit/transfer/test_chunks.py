# SPDX-License-Identifier: Apache-2.0
"""A chunk is fetched once, verified as a whole, and written to every place in a file that has its bytes."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.errors import NotFound, NothingToRestore, StagingError, Stopped
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import Extent, StoredShard
from swansong_bucket.stores.base import Sink
from swansong_bucket.transfer import target
from swansong_bucket.transfer.chunks import Place, cover, places_of
from swansong_bucket.transfer.reader import Reader, ReadOptions
from swansong_bucket.transfer.restore import Selection, restore
from swansong_bucket.transfer.target import RestoreTarget

from testkit.committed import chunk_of, commit, tree
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
FILES = {f"d{n % 3}/{n:02d}": random.Random(n).randbytes(n * 20) for n in range(40)}


class WindowStore(MemoryStore):
    """Returns small windows, and counts and may change the bytes that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0
        self.on_read: Callable[[bytes], bytes] = lambda data: data
        self.windows: Sequence[int] = [333]
        self.torn_at = 0
        """Number of bytes after which the first attempt of each request breaks off."""

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        self._request("get", key)
        if key not in self.objects:
            raise NotFound(key)
        data = self.on_read(self.objects[key][offset : offset + size_bytes])
        self.bytes_read += size_bytes
        for end in (min(self.torn_at, len(data)), len(data)):
            sink.rewind()
            at = 0
            while at < end:
                length = min(self.windows[at % len(self.windows)], end - at)
                sink.write(memoryview(bytearray(data[at : at + length])))
                at += length


def packed_store(files: dict[str, bytes] = FILES) -> WindowStore:
    store = WindowStore()
    commit(store, files, is_packed=True)
    store.requests.clear()
    return store


def chunk_reads(store: MemoryStore) -> int:
    return sum(what == "get" and KEYS.is_data(key) for what, key in store.requests)


def flip(data: bytes) -> bytes:
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


# ---------------------------------------------------------------- places

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=8)


@given(ranges)
def test_a_cover_has_each_byte_of_the_chunk_once(ranges: list[tuple[int, int]]) -> None:
    """In order, from any of the places; there is none if a byte is in no place."""
    content = bytes(range(30))
    places = [
        Place("f", 99, 50 + at, at, min(size, 30 - at)) for at, size in ranges if at < len(content)
    ]
    found = cover(chunk_of(content), places)
    covered = {at for place in places for at in range(place.at_bytes, place.end_bytes)}
    if covered != set(range(30)):
        assert found == ()
    else:
        assert b"".join(content[each.at_bytes : each.end_bytes] for each in found) == content
        assert all(each.offset_bytes == 50 + each.at_bytes for each in found)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[bytes], list[list[tuple[int, int, int]]]]:
    """The bytes of some chunks, and files as ranges of them, which may overlap and repeat."""
    contents = draw(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=4))
    files = []
    for _ in range(draw(st.integers(1, 5))):
        extents = []
        for _ in range(draw(st.integers(0, 5))):
            number = draw(st.integers(0, len(contents) - 1))
            start = draw(st.integers(0, len(contents[number]) - 1))
            end = draw(st.integers(start + 1, len(contents[number])))
            extents.append((number, start, end))
        files.append(extents)
    return contents, files


@given(
    layout=layouts(),
    windows=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    torn_at=st.integers(0, 60),
)
def test_any_extents_reach_their_files_whatever_the_windows_are(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[list[bytes], list[list[tuple[int, int, int]]]],
    windows: list[int],
    torn_at: int,
) -> None:
    """Also after a repeated request.  Each chunk is requested once; the progress counts bytes of files."""
    contents, files = layout
    store = WindowStore()
    store.windows, store.torn_at = windows, torn_at
    chunks = [chunk_of(content) for content in contents]
    store.objects = {chunk.key: data for chunk, data in zip(chunks, contents, strict=True)}
    shards, wanted = [], {}
    for name, extents in enumerate(files):
        data = b"".join(contents[number][start:end] for number, start, end in extents)
        made = tuple(Extent(chunks[number], start, end - start) for number, start, end in extents)
        shards.append(StoredShard(path=f"f{name}", size_bytes=len(data), extents=made))
        wanted[f"f{name}"] = data
    done: list[tuple[int, int]] = []
    options = ReadOptions(connections=2, progress=lambda *both: done.append(both))
    destination = tmp_path_factory.mktemp("any") / "to"
    with RestoreTarget(destination) as to:
        noted = to.begin("identity", shards, set_bytes=0)
        Reader(store, options).read(shards, target=to, noted=noted, local={})
        to.publish()
    assert tree(destination) == wanted
    assert chunk_reads(store) == len(places_of(shards))
    total_bytes = sum(map(len, wanted.values()))
    assert not total_bytes or done[-1] == (total_bytes, total_bytes)


# ---------------------------------------------------------------- requests and syncs


def test_a_chunk_of_many_files_is_fetched_by_one_request_and_synced_once(
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
    assert chunk_reads(store) == 1
    assert synced == [False]
    assert len(fsyncs) <= 3, "the empty file, and the directories that the rename changes"
    assert sorted(verified) == sorted(FILES)


def test_a_failed_sync_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk reported an error for a file that was written."""

    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(target, "sync_file_system", fails)
    with pytest.raises(StagingError, match="Input/output error"):
        restore(packed_store(), KEYS, RestoreTarget(tmp_path / "here"))
    assert not list(tmp_path.iterdir())


def test_a_descriptor_that_cannot_be_synced_raises() -> None:
    """The result of the system call is checked."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        target.sync_file_system(10**6)


@pytest.mark.fault("O71")
def test_a_damaged_chunk_is_fetched_again_and_no_other(tmp_path: Path) -> None:
    """A bit that flipped in transit costs the bytes of one chunk, also of a large file."""
    store = WindowStore()
    large = random.Random(1).randbytes(5 * 6000)
    commit(store, {"large": large}, chunk_bytes=6000)

    def flip_first(data: bytes) -> bytes:
        store.on_read = lambda data: data
        return flip(data)

    store.on_read = flip_first
    restore(store, KEYS, RestoreTarget(tmp_path / "here"))
    assert tree(tmp_path / "here") == {"large": large}
    assert store.bytes_read == 6 * 6000


def test_a_subset_of_a_chunk_is_written_and_the_rest_is_not(tmp_path: Path) -> None:
    """The whole chunk is read, because only the whole chunk can be verified."""
    files = {f"rank-{n // 10}/{n:02d}": random.Random(n).randbytes(1000) for n in range(30)}
    store = packed_store(files)
    mine = Selection(files=lambda shard: shard.path.startswith("rank-1/"))
    done = restore(store, KEYS, RestoreTarget(tmp_path / "here"), mine)
    assert tree(tmp_path / "here") == {p: d for p, d in files.items() if p.startswith("rank-1/")}
    assert (done.size_bytes, store.bytes_read) == (10_000, 30_000)
    (key,) = (key for key in store.objects if KEYS.is_data(key))
    store.objects[key] = store.objects[key][:-1] + b"?"
    with pytest.raises(NothingToRestore):
        restore(store, KEYS, RestoreTarget(tmp_path / "there"), mine)


def test_a_missing_chunk_ends_the_pass(tmp_path: Path) -> None:
    """No further chunk is requested: the commit cannot be restored."""
    store = WindowStore()
    made = commit(store, {"large": random.Random(1).randbytes(40_000)})
    del store.objects[made.chunks[3].key]
    with pytest.raises(NothingToRestore, match="large is missing from the store"):
        restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=ReadOptions(connections=1))
    assert chunk_reads(store) == 4


def test_stop_ends_a_chunk_within_a_window(tmp_path: Path) -> None:
    """Neither the destination nor a partial directory stays: there is no chunk to reuse."""
    store = packed_store()
    stop = threading.Event()

    def stopping(data: bytes) -> bytes:
        stop.set()
        return data

    store.on_read = stopping
    with pytest.raises(Stopped):
        restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=ReadOptions(stop=stop))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- files on this machine


class Local:
    """Files on this machine, which are counted when they are opened."""

    def __init__(self, directory: Path, files: dict[str, bytes]) -> None:
        self.opened: list[str] = []
        self._directory = directory
        directory.mkdir()
        for path, data in files.items():
            (directory / path.replace("/", "_")).write_bytes(data)

    @contextmanager
    def __call__(
        self, _ref: object, shards: Sequence[StoredShard]
    ) -> Iterator[dict[str, Callable[[], int]]]:
        names = {shard.path: self._directory / shard.path.replace("/", "_") for shard in shards}
        yield {path: self._open(path, name) for path, name in names.items() if name.exists()}

    def _open(self, path: str, name: Path) -> Callable[[], int]:
        def opened() -> int:
            self.opened.append(path)
            return os.open(name, os.O_RDONLY)

        return opened


@pytest.mark.parametrize("missing", [None, "d1/04"])
def test_a_chunk_is_copied_if_all_of_its_files_are_on_this_machine(
    tmp_path: Path, missing: str | None
) -> None:
    """A missing file costs the whole chunk, and no other file is opened."""
    store = packed_store()
    local = Local(tmp_path / "local", {p: d for p, d in FILES.items() if p != missing})
    found: list[int] = []
    options = ReadOptions(local=local, found=found.append)
    done = restore(store, KEYS, RestoreTarget(tmp_path / "here"), options=options)
    assert tree(tmp_path / "here") == FILES
    size_bytes = sum(map(len, FILES.values()))
    assert done.local_bytes == sum(found) == (0 if missing else size_bytes)
    assert chunk_reads(store) == (1 if missing else 0)
    assert bool(local.opened) == (not missing)


def test_a_file_with_other_bytes_is_tried_once(tmp_path: Path) -> None:
    """Each checkpoint has files of the same names and sizes: reading all of an old one would cost time."""
    files = {name: random.Random(name).randbytes(20_000) for name in ("changed", "same")}
    store = WindowStore()
    commit(store, files)
    local = Local(tmp_path / "local", {**files, "changed": bytes(20_000)})
    reported: list[tuple[int, int]] = []
    done = restore(
        store,
        KEYS,
        RestoreTarget(tmp_path / "here"),
        options=ReadOptions(
            local=local, connections=1, progress=lambda *both: reported.append(both)
        ),
    )
    assert tree(tmp_path / "here") == files
    assert reported[-1] == (40_000, 40_000)
    assert done.local_bytes == 20_000
    assert local.opened.count("changed") == 2  # for a clone, and for a copy
