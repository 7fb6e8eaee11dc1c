# SPDX-License-Identifier: Apache-2.0
"""The flush, with real files: what arrives in the store, what voids a set, and what it costs in memory."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from committed import digest_of, file_store
from staged import ME, write_files
from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.errors import Permanent, Transient
from swansongd.flush import FlushEngine
from swansongd.keys import RunKeys
from swansongd.model import CheckpointId, CheckpointKind, Staged
from swansongd.staging import scan
from swansongd.stores.base import ObjectStore, PartReceipt, Upload
from swansongd.stores.files import FileStore
from waiting import until

PART = 1000
KEYS = RunKeys("r")
SET = "step-000000000005.abc"


def staged_set(
    run_directory: Path, files: dict[str, bytes], markers: tuple[str, ...] = ()
) -> Staged:
    write_files(run_directory / SET, files)
    return Staged(
        id=CheckpointId(5, "abc"),
        directory=SET,
        kind=CheckpointKind.PERIODIC,
        files=scan.listing(run_directory, SET, ME),
        markers=frozenset(markers),
    )


class Hooked:
    """A real store with a word to say before each request: fail, hold on, or look."""

    part_size_bytes_min = 1

    def __init__(self, store: FileStore, before: Callable[[str, str, memoryview], None]) -> None:
        self.url = store.url
        self._store = store
        self._before = before

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._before("put", key, memoryview(data))
        self._store.put(key, data, if_absent=if_absent)

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        self._before("begin", key, memoryview(b""))
        return self._store.begin(key, size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, data: memoryview) -> PartReceipt:
        self._before("part", upload.key, data)
        return self._store.put_part(upload, number, data)

    def complete(self, upload: Upload, parts: list[PartReceipt]) -> None:
        self._before("complete", upload.key, memoryview(b""))
        self._store.complete(upload, parts)


class Flush:
    """An engine over a directory, and what it has said."""

    def __init__(self, tmp_path: Path, *, connections: int = 3) -> None:
        self.store = file_store(tmp_path / "store")
        self.run_directory = tmp_path / "staging" / "r"
        self.run_directory.mkdir(parents=True)
        self.before: Callable[[str, str, memoryview], None] = lambda *_: None
        self.events: queue.Queue[Event] = queue.Queue()
        self.requests: list[tuple[str, str]] = []
        nonces = count(1)
        hooked: ObjectStore = Hooked(self.store, self._look)  # type: ignore[assignment]
        self.engine = FlushEngine(
            hooked,
            KEYS,
            self.run_directory,
            self.events.put,
            nonce=lambda: f"n{next(nonces)}",
            connections=connections,
            part_size_bytes=PART,
        )

    def _look(self, what: str, key: str, data: memoryview) -> None:
        self.requests.append((what, key))
        self.before(what, key, data)

    def outcome(self) -> Flushed | FlushFailed:
        """The next word that ends a flush."""
        while True:
            event = self.events.get(timeout=20)
            if isinstance(event, Flushed | FlushFailed):
                return event
            assert isinstance(event, FlushProgress)

    def open_files(self) -> list[str]:
        names = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return [name for name in names if name.startswith(str(self.run_directory))]


@pytest.fixture
def flush(tmp_path: Path) -> Iterator[Flush]:
    made = Flush(tmp_path)
    yield made
    until(lambda: not made.open_files(), what="every staged file to be closed")


def test_every_byte_arrives_under_a_key_of_its_own(flush: Flush) -> None:
    """Empty, tiny, exactly one part, several parts, many files: identical, with the digest of each."""
    sizes = (0, 1, PART - 1, PART, PART + 1, 7 * PART, 7 * PART + 13)
    files = {f"d/{size}": random.Random(size).randbytes(size) for size in sizes}
    files |= {f"many/{number}": bytes([number]) for number in range(60)}
    flush.engine.start("f1", staged_set(flush.run_directory, files), generation=3)
    done = flush.outcome()
    assert isinstance(done, Flushed)
    assert [shard.path for shard in done.shards] == sorted(files)
    for shard in done.shards:
        assert shard.digest == digest_of(files[shard.path], PART)
        assert shard.size_bytes == len(files[shard.path])
        info = flush.store.head(shard.key)
        assert info is not None
        assert flush.store.get(shard.key) == files[shard.path]
        assert "/00000003/" in shard.key
    flush.engine.start("f2", staged_set(flush.run_directory, files), generation=3)
    again = flush.outcome()
    assert isinstance(again, Flushed)
    assert not {s.key for s in done.shards} & {s.key for s in again.shards}, "a key is written once"


def test_markers_come_after_all_the_data_that_they_cover(flush: Flush) -> None:
    """A marker in the store says that everything else is there."""
    files = {".metadata": b"m" * 10, "0/a": b"a" * 5 * PART, "0/b": b"b", "0/c": b"c" * PART}
    seen: list[set[str]] = []
    early = threading.Event()

    def before(what: str, key: str, data: memoryview) -> None:
        if key.endswith("/0/b"):
            early.wait(0.3)  # gives a marker that does not wait its chance to show
        if key.endswith(".metadata"):
            early.set()
            seen.append({info.key.split("/00000/")[1] for info in flush.store.list("r/data/")})

    flush.before = before
    flush.engine.start("f", staged_set(flush.run_directory, files, (".metadata",)), 1)
    assert isinstance(flush.outcome(), Flushed)
    assert seen == [{"0/a", "0/b", "0/c"}]


@pytest.mark.fault("D09", "S5")
@pytest.mark.parametrize("damage", ["changed", "cut", "replaced", "more", "gone"])
def test_a_set_that_changes_under_the_flush_is_void(flush: Flush, damage: str) -> None:
    """Whatever is done to a file while it is read, no set comes of it."""
    staged = staged_set(flush.run_directory, {"a": b"a" * 20 * PART, "b": b"b"})
    path = flush.run_directory / SET / "a"

    def before(what: str, key: str, data: memoryview) -> None:
        if what != "part" or len([r for r in flush.requests if r[0] == "part"]) != 8:
            return
        if damage == "changed":
            with path.open("r+b") as file:
                file.write(b"x")
        elif damage == "cut":
            os.truncate(path, 3 * PART)
        elif damage == "replaced":
            (flush.run_directory / "new").write_bytes(b"y" * 20 * PART)
            os.replace(flush.run_directory / "new", path)
        elif damage == "more":
            (flush.run_directory / SET / "c").write_bytes(b"c")
        else:
            path.unlink()

    flush.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void, failed.reason


@pytest.mark.fault("D03")
def test_a_file_that_cannot_be_read_voids_its_set_only(flush: Flush) -> None:
    """The engine says why, and the next set goes through."""
    staged = staged_set(flush.run_directory, {"a": b"a", "b": b"b" * 3 * PART})
    flush.before = lambda what, *_: what == "put" and os.unlink(flush.run_directory / SET / "b")
    (flush.run_directory / SET / "b").unlink()
    flush.before = lambda *_: None
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void
    assert "b" in failed.reason
    flush.engine.start("g", staged_set(flush.run_directory, {"b": b"whole"}), 1)
    assert isinstance(flush.outcome(), Flushed)


@pytest.mark.parametrize("error", [Transient("503"), Permanent("403")])
def test_a_refusing_store_fails_the_flush_and_not_the_set(flush: Flush, error: Exception) -> None:
    """The set is still good: it may be tried again, and then arrives."""

    def before(what: str, key: str, data: memoryview) -> None:
        raise error

    staged = staged_set(flush.run_directory, {"a": b"a" * 9 * PART, "b": b"b"})
    flush.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert not failed.void
    flush.before = lambda *_: None
    flush.engine.start("g", staged, 1)
    assert isinstance(flush.outcome(), Flushed)
    assert flush.events.empty(), "a failure is said once"


@pytest.mark.fault("H08")
def test_an_unexpected_error_becomes_an_event(flush: Flush) -> None:
    """No worker dies of a fault of ours: as many are at work afterwards as before."""

    def before(what: str, key: str, data: memoryview) -> None:
        raise ZeroDivisionError

    staged = staged_set(flush.run_directory, {str(number): b"x" for number in range(20)})
    flush.before = before
    for attempt in range(5):
        flush.engine.start(f"f{attempt}", staged, 1)
        failed = flush.outcome()
        assert isinstance(failed, FlushFailed)
        assert not failed.void
    # A worker that is still at a part of the last one would be a fourth at the barrier.
    until(lambda: not flush.engine._working, what="the workers to let go of what failed")
    together = threading.Barrier(3)
    flush.before = lambda *_: together.wait(20) and None
    wide = staged_set(flush.run_directory, {str(number): b"x" for number in range(21)})
    flush.engine.start("g", wide, 1)
    assert isinstance(flush.outcome(), Flushed)


def test_cancel_begins_nothing_more_and_says_nothing(flush: Flush) -> None:
    """What is on the wire is let go; no part begins afterwards, and the files are closed."""
    held = threading.Event()
    begun = threading.Event()

    def before(what: str, key: str, data: memoryview) -> None:
        if what == "part":
            begun.set()
            assert held.wait(20)

    flush.before = before
    flush.engine.start("f", staged_set(flush.run_directory, {"a": b"a" * 50 * PART}), 1)
    assert begun.wait(20)
    flush.engine.cancel("another")
    flush.engine.cancel("f")
    held.set()
    until(lambda: not flush.open_files(), what="the files to be closed")
    assert len([r for r in flush.requests if r[0] == "part"]) <= 3
    assert not any(isinstance(e, Flushed | FlushFailed) for e in list(flush.events.queue))


def test_a_replaced_flush_gives_way_at_once(flush: Flush) -> None:
    """The next set begins while requests of the old one still hang, and only it is heard of."""
    held = threading.Event()
    begun = threading.Event()

    def before(what: str, key: str, data: memoryview) -> None:
        if key.endswith("/old") and what == "part":
            begun.set()
            assert held.wait(20)

    flush.before = before
    old = staged_set(flush.run_directory, {"old": b"a" * 2 * PART})
    flush.engine.start("old", old, 1)
    assert begun.wait(20)
    (flush.run_directory / SET / "old").unlink()
    flush.engine.start("new", staged_set(flush.run_directory, {"new": b"n" * 5 * PART}), 1)
    done = flush.outcome()
    assert isinstance(done, Flushed)
    assert done.flush_id == "new"
    held.set()
    until(lambda: not flush.open_files(), what="the files to be closed")
    assert flush.events.empty() or isinstance(flush.events.get(), FlushProgress)


def test_flushed_only_after_every_completion(flush: Flush) -> None:
    """While one completion is out, the set is not said to be stored."""
    held = threading.Event()
    waiting = threading.Event()

    def before(what: str, key: str, data: memoryview) -> None:
        if what == "complete" and key.endswith("/a"):
            waiting.set()
            assert held.wait(20)

    flush.before = before
    files = {"a": b"a" * 2 * PART, "b": b"b" * 2 * PART, "c": b"c"}
    flush.engine.start("f", staged_set(flush.run_directory, files), 1)
    assert waiting.wait(20)
    until(lambda: sum(r[0] == "complete" for r in flush.requests) == 2)
    until(lambda: ("put", "c") in [(w, k.split("/")[-1]) for w, k in flush.requests])
    assert not any(isinstance(e, Flushed) for e in list(flush.events.queue))
    held.set()
    assert isinstance(flush.outcome(), Flushed)


@pytest.mark.fault("H06")
def test_memory_is_bounded_by_connections_and_part_size(tmp_path: Path) -> None:
    """However large the files: one buffer for each worker, none larger than a part."""
    flush = Flush(tmp_path, connections=4)
    buffers: dict[int, int] = {}

    def before(what: str, key: str, data: memoryview) -> None:
        if what in ("put", "part"):
            buffers[id(data.obj)] = len(data.obj)  # type: ignore[arg-type]

    flush.before = before
    files = {str(number): bytes(300 * PART + number) for number in range(3)}
    flush.engine.start("f", staged_set(flush.run_directory, files), 1)
    assert isinstance(flush.outcome(), Flushed)
    assert max(buffers.values()) <= PART
    assert len(buffers) <= 3 * 4, "a few short ones while they grow, and then no more"


@pytest.mark.fault("O18")
def test_open_files_are_bounded_by_connections(flush: Flush) -> None:
    """A set may have many more files than a process may have open; each is closed when it is sent."""
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, len(flush.open_files()))

    flush.before = look
    staged = staged_set(flush.run_directory, {f"part-{n}": b"x" for n in range(60)})
    flush.engine.start("f", staged, 1)
    assert isinstance(flush.outcome(), Flushed)
    assert 1 <= most <= 10, "a few for each of three connections, directories included"


def test_a_huge_file_gets_parts_that_are_large_enough(flush: Flush) -> None:
    """No object has more than 10,000 parts, whatever is configured."""
    for size in (0, PART, 10_000 * PART, 10_000 * PART + 1, 2**45):
        part = flush.engine._part_size_for(size)
        assert -(-size // part) <= 10_000
        assert part >= PART
