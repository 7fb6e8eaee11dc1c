# SPDX-License-Identifier: Apache-2.0
"""The flush, with real files: what arrives in the store, what voids a set, and what it costs in memory."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.core.events import Flushed, FlushFailed, FlushProgress
from swansongd.errors import Permanent, Transient
from swansongd.flush.body import LARGE_FILE_BYTES, PARTS_MAX, part_size_for
from swansongd.model import CheckpointId
from swansongd.stores.base import Body, PartReceipt, Upload
from swansongd.util.concurrency import FIRST

from testkit.flush_rig import PART, SET, Flush, staged_set
from testkit.memory_store import WINDOW_BYTES
from testkit.waiting import until


@pytest.fixture
def flush(tmp_path: Path) -> Iterator[Flush]:
    made = Flush(tmp_path)
    yield made
    until(lambda: not made.open_files(), what="every staged file to be closed")
    assert not made.store.overwritten, "no key is written twice with different bytes"


def test_every_byte_arrives_under_the_generation(flush: Flush) -> None:
    """Empty, tiny, exactly one part, several parts, many files: identical, with digest and CRC32C."""
    sizes = (0, 1, PART - 1, PART, PART + 1, 7 * PART, 7 * PART + 13)
    files = {f"d/{size}": random.Random(size).randbytes(size) for size in sizes}
    files |= {f"many/{number}": bytes([number]) for number in range(60)}
    done = flush.flushed(staged_set(flush.run_directory, files), generation=3)
    assert all("/00000003/" in shard.key for shard in done.shards)
    assert flush.store.count("begin") == 3, "what fits one part goes in one request"
    assert flush.store.bytes_sent == sum(map(len, files.values()))


@pytest.mark.parametrize(("step", "node"), [(10**12, 0), (5, 10**5)])
def test_a_set_with_a_number_that_no_key_can_hold_is_void(
    flush: Flush, step: int, node: int
) -> None:
    """No reader would find its shards: the set is given up at once, and the next one is sent."""
    staged = staged_set(flush.run_directory, {"a": b"a" * 3 * PART}, step=6)
    beyond = replace(staged, id=CheckpointId(step, "abc"), node=node)
    flush.engine.start("beyond", beyond, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void
    assert "not an integer from 0" in failed.reason
    flush.flushed(staged)


def test_markers_come_after_all_the_data_that_they_cover(flush: Flush) -> None:
    """A marker in the store says that everything else is there."""
    files = {".metadata": b"m" * 10, "0/a": b"a" * 5 * PART, "0/b": b"b", "0/c": b"c" * PART}
    seen: list[set[str]] = []
    early = threading.Event()

    def before(what: str, key: str) -> None:
        if key.endswith("/0/b"):
            early.wait(0.3)  # gives a marker that does not wait its chance to show
        if key.endswith(".metadata"):
            early.set()
            seen.append({key.split("/00000/")[1] for key in flush.store.objects})

    flush.store.before = before
    flush.engine.start("f", staged_set(flush.run_directory, files, (".metadata",)), 1)
    assert isinstance(flush.outcome(), Flushed)
    assert seen == [{"0/a", "0/b", "0/c"}]


@pytest.mark.fault("D09", "S5")
@pytest.mark.parametrize("damage", ["changed", "cut", "replaced", "more", "gone"])
def test_a_set_that_changes_under_the_flush_is_void(flush: Flush, damage: str) -> None:
    """Whatever is done to a file while it is read, no set comes of it."""
    staged = staged_set(flush.run_directory, {"a": b"a" * 20 * PART, "b": b"b"})
    path = flush.run_directory / SET / "a"

    def before(what: str, key: str) -> None:
        if what != "put_part" or len([r for r in flush.store.requests if r[0] == "put_part"]) != 8:
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

    flush.store.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void, failed.reason


@pytest.mark.fault("D03")
def test_a_file_that_cannot_be_read_voids_its_set_only(flush: Flush) -> None:
    """The engine says why, and the next set goes through."""
    staged = staged_set(flush.run_directory, {"a": b"a", "b": b"b" * 3 * PART})
    (flush.run_directory / SET / "b").unlink()
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void
    assert "b" in failed.reason
    flush.engine.start("g", staged_set(flush.run_directory, {"b": b"whole"}), 1)
    assert isinstance(flush.outcome(), Flushed)


@pytest.mark.fault("D03")
def test_a_bad_sector_voids_its_set_and_is_read_once(
    flush: Flush, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO in the middle of a shard: no retry loop, no commit of the set; the next one gets through."""
    staged = staged_set(flush.run_directory, {"bad": bytes(3 * PART), "good": b"good"})
    read = os.preadv
    refused: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/bad") and offset >= PART:
            refused.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void
    assert "bad" in failed.reason
    assert 1 <= len(refused) <= 2, "once for each part that was under way"
    flush.flushed(staged_set(flush.run_directory, {"a": b"whole"}, step=6, directory="step-6.abc"))


@pytest.mark.parametrize("error", [Transient("503"), Permanent("403")])
def test_a_refusing_store_fails_the_flush_and_not_the_set(flush: Flush, error: Exception) -> None:
    """The set is still good: it may be tried again, and then arrives."""

    def before(what: str, key: str) -> None:
        raise error

    staged = staged_set(flush.run_directory, {"a": b"a" * 9 * PART, "b": b"b"})
    flush.store.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert not failed.void
    flush.store.before = lambda *_: None
    flush.engine.start("g", staged, 1)
    assert isinstance(flush.outcome(), Flushed)
    assert flush.events.empty(), "a failure is said once"


@pytest.mark.fault("H08")
def test_an_unexpected_error_becomes_an_event(flush: Flush) -> None:
    """No worker dies of a fault of ours: as many are at work afterwards as before."""

    def before(what: str, key: str) -> None:
        raise ZeroDivisionError

    staged = staged_set(flush.run_directory, {str(number): b"x" for number in range(20)})
    flush.store.before = before
    for attempt in range(5):
        flush.engine.start(f"f{attempt}", staged, 1)
        failed = flush.outcome()
        assert isinstance(failed, FlushFailed)
        assert not failed.void
    # A worker that is still at a part of the last one would be a fourth at the barrier.
    until(lambda: flush.engine._idle == 3, what="the workers to let go of what failed")
    together = threading.Barrier(3)
    flush.store.before = lambda *_: together.wait(20) and None
    wide = staged_set(flush.run_directory, {str(number): b"x" for number in range(21)})
    flush.engine.start("g", wide, 1)
    assert isinstance(flush.outcome(), Flushed)


def test_cancel_begins_nothing_more_and_says_nothing(flush: Flush) -> None:
    """What is on the wire is let go; no part begins afterwards, and the files are closed."""
    held = threading.Event()
    begun = threading.Event()

    def before(what: str, key: str) -> None:
        if what == "put_part":
            begun.set()
            assert held.wait(20)

    flush.store.before = before
    flush.engine.start("f", staged_set(flush.run_directory, {"a": b"a" * 50 * PART}), 1)
    assert begun.wait(20)
    flush.engine.cancel("another")
    flush.engine.cancel("f")
    held.set()
    until(lambda: not flush.open_files(), what="the files to be closed")
    assert len([r for r in flush.store.requests if r[0] == "put_part"]) <= 3
    assert not any(isinstance(e, Flushed | FlushFailed) for e in list(flush.events.queue))


def test_a_replaced_flush_gives_way_at_once(flush: Flush) -> None:
    """The next set begins while requests of the old one still hang, and only it is heard of."""
    held = threading.Event()
    begun = threading.Semaphore(0)

    def before(what: str, key: str) -> None:
        if key.endswith("/old") and what == "put_part":
            begun.release()
            assert held.wait(20)

    flush.store.before = before
    old = staged_set(flush.run_directory, {"old": b"a" * 2 * PART})
    flush.engine.start("old", old, 1)
    for _ in range(2):  # both parts: the file must not be opened once more
        assert begun.acquire(timeout=20)
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

    def before(what: str, key: str) -> None:
        if what == "complete" and key.endswith("/a"):
            waiting.set()
            assert held.wait(20)

    flush.store.before = before
    files = {"a": b"a" * 2 * PART, "b": b"b" * 2 * PART, "c": b"c"}
    flush.engine.start("f", staged_set(flush.run_directory, files), 1)
    assert waiting.wait(20)
    until(lambda: sum(r[0] == "complete" for r in flush.store.requests) == 2)
    until(lambda: ("put_shard", "c") in [(w, k.split("/")[-1]) for w, k in flush.store.requests])
    assert not any(isinstance(e, Flushed) for e in list(flush.events.queue))
    held.set()
    assert isinstance(flush.outcome(), Flushed)


@pytest.mark.fault("H06")
def test_memory_is_bounded_by_windows(flush: Flush) -> None:
    """The engine holds no bytes of its own: it fills the windows that the store hands it, and those only."""
    sizes: set[int] = set()
    sent = flush.store.put_part

    def put_part(upload: Upload, number: int, body: Body) -> PartReceipt:
        read_into = body.read_into

        def look(window: memoryview) -> None:
            sizes.add(len(window))
            held = [value for value in vars(body).values() if isinstance(value, bytes | bytearray)]
            assert not held
            read_into(window)

        body.read_into = look  # type: ignore[method-assign]
        return sent(upload, number, body)

    flush.store.put_part = put_part  # type: ignore[method-assign]
    flush.flushed(staged_set(flush.run_directory, {"a": bytes(300 * PART)}))
    assert sizes == {WINDOW_BYTES}


@pytest.mark.fault("O18", "H07")
def test_open_files_are_bounded_by_connections(flush: Flush) -> None:
    """A set may have many more files than a process may have open; each is closed when it is sent."""
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, len(flush.open_files()))

    flush.store.before = look
    flush.flushed(staged_set(flush.run_directory, {f"part-{n}": b"x" for n in range(60)}))
    assert 1 <= most <= 10, "a few for each of three connections, directories included"


@pytest.mark.fault("H07")
def test_without_a_free_descriptor_the_flush_fails_and_the_set_stays_good(flush: Flush) -> None:
    """Having no descriptor says nothing about the file: nothing is void, and the next flush gets through."""
    staged = staged_set(flush.run_directory, {"a": b"a" * 3 * PART, "b": b"b"})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        flush.engine.start("f", staged, 1)
        failed = flush.outcome()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(failed, FlushFailed)
    assert not failed.void
    assert "Too many open files" in failed.reason
    assert "LimitNOFILE" in failed.reason
    flush.flushed(staged)


@pytest.mark.fault("O18")
@given(
    size_bytes=st.integers(0, 5 * 2**40),
    wanted_bytes=st.integers(5 * 2**20, 2**30),
    least_bytes=st.integers(1, 2**26),
)
def test_every_file_is_cut_as_stores_allow(
    size_bytes: int, wanted_bytes: int, least_bytes: int
) -> None:
    """Never more than 10,000 parts, never below the minimum of the store, never beyond 1 GiB."""
    part = part_size_for(size_bytes, wanted_bytes=wanted_bytes, least_bytes=least_bytes)
    assert -(-size_bytes // part) <= PARTS_MAX
    assert max(wanted_bytes, least_bytes) <= part <= 2**30


def test_parts_are_as_configured_and_twice_that_for_large_files() -> None:
    """16 MiB, 32 MiB above 8 GiB, more only where there would be too many."""
    mib = 2**20
    sizes = [0, 16 * mib, LARGE_FILE_BYTES, LARGE_FILE_BYTES + 1, 32 * mib * PARTS_MAX + 1]
    parts = [part_size_for(size, wanted_bytes=16 * mib, least_bytes=1) for size in sizes]
    assert parts == [16 * mib, 16 * mib, 16 * mib, 32 * mib, 64 * mib]


def test_no_more_workers_take_part_than_pays(tmp_path: Path) -> None:
    """Before anybody has looked whether more would bring more, few of the many workers are at it."""
    flush = Flush(tmp_path, connections=20, monotonic=lambda: 100.0)
    held = threading.Event()
    begun: list[str] = []

    def before(what: str, key: str) -> None:
        begun.append(key)
        assert held.wait(20)

    flush.store.before = before
    many = staged_set(flush.run_directory, {f"f{n}": b"x" for n in range(20)})
    flush.engine.start("many", many, 1)
    until(
        lambda: len(begun) == FIRST and flush.engine._idle == 20 - FIRST, what="the first to begin"
    )
    held.set()
    assert isinstance(flush.outcome(), Flushed)
    assert len(begun) == 20


def test_a_set_that_is_ordered_again_keeps_its_width(tmp_path: Path) -> None:
    """As one that is still being written is, at every file: what pays need not be found out each time."""
    flush = Flush(tmp_path, connections=21)
    held = threading.Event()
    begun: list[str] = []

    def before(what: str, key: str) -> None:
        begun.append(key)
        assert held.wait(20)

    flush.store.before = before
    many = staged_set(flush.run_directory, {f"f{n}": b"x" for n in range(20)})
    flush.engine.start("early", many, 1, is_sealed=False)
    until(lambda: len(begun) == 20, what="all of them to begin")
    flush.engine.start("sealed", many, 1)
    active = until(
        lambda: (now := flush.engine._active) and now.is_sealed and now,
        what="the sealed set to be flushed",
    )
    assert active.limit.now == 21
    held.set()
    assert isinstance(flush.outcome(), Flushed)


def test_requests_that_all_stand_still_do_not_hold_up_the_others(tmp_path: Path) -> None:
    """The first ones hang, so nothing moves and nobody reports: more workers take part all the same."""
    flush = Flush(tmp_path, connections=20)
    held = threading.Event()
    begun: list[str] = []

    def before(what: str, key: str) -> None:
        begun.append(key)
        assert held.wait(20)

    flush.store.before = before
    many = staged_set(flush.run_directory, {f"f{n}": b"x" for n in range(20)})
    flush.engine.start("many", many, 1)
    until(lambda: len(begun) == 20, what="all of them to begin")
    held.set()
    assert isinstance(flush.outcome(), Flushed)
