# SPDX-License-Identifier: Apache-2.0
"""The flush engine with real files: stored bytes, void sets, limits of memory and of open files."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.errors import Permanent, Transient
from swansongd.flush.body import LARGE_FILE_BYTES, PARTS_MAX, part_size_for
from swansongd.model import CheckpointId
from swansongd.stores.base import Body, PartReceipt, Upload
from swansongd.util.concurrency import FIRST

from testkit.flush_rig import PART, SET, FlushRig, keys_of, staged_set
from testkit.memory_store import WINDOW_BYTES
from testkit.waiting import until


@pytest.fixture
def flush(tmp_path: Path) -> Iterator[FlushRig]:
    made = FlushRig(tmp_path)
    yield made
    until(lambda: not made.open_files(), what="every staged file to be closed")
    assert not made.store.overwritten, "no key is written twice with different bytes"


def test_every_byte_is_stored_under_the_generation(flush: FlushRig) -> None:
    """Empty, small and large files arrive identical, with digest and CRC32C."""
    sizes = (0, 1, PART - 1, PART, PART + 1, 7 * PART, 7 * PART + 13)
    files = {f"d/{size}": random.Random(size).randbytes(size) for size in sizes}
    files |= {f"many/{number}": bytes([number]) for number in range(60)}
    done = flush.flushed(staged_set(flush.run_directory, files), generation=3)
    assert all("/00000003/" in key for key in keys_of(done))
    assert flush.store.count("begin") == 3, "a file of at most one part needs one request"
    assert flush.store.bytes_sent == sum(map(len, files.values()))


@pytest.mark.parametrize(("step", "node"), [(10**12, 0), (5, 10**5)])
def test_a_set_with_a_number_that_no_key_can_contain_is_void(
    flush: FlushRig, step: int, node: int
) -> None:
    """No reader would find its shards.  The flush fails immediately, and the next set is sent."""
    staged = staged_set(flush.run_directory, {"a": b"a" * 3 * PART}, step=6)
    beyond = replace(staged, id=CheckpointId(step, "abc"), node=node)
    flush.engine.start("beyond", beyond, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void
    assert "not an integer from 0" in failed.reason
    flush.flushed(staged)


def test_markers_are_sent_after_all_data_that_they_cover(flush: FlushRig) -> None:
    """A marker in the store guarantees that all other files are stored."""
    files = {".metadata": b"m" * 10, "0/a": b"a" * 5 * PART, "0/b": b"b", "0/c": b"c" * PART}
    seen: list[set[str]] = []
    early = threading.Event()

    def before(what: str, key: str) -> None:
        if key.endswith("/0/b"):
            early.wait(0.3)  # gives a marker the time to overtake
        if key.endswith(".metadata"):
            early.set()
            seen.append({key.split("/00000/")[1] for key in flush.store.objects})

    flush.store.before = before
    flush.engine.start("f", staged_set(flush.run_directory, files, (".metadata",)), 1)
    assert isinstance(flush.outcome(), Flushed)
    assert seen == [{"0/a", "0/b", "0/c"}]


@pytest.mark.fault("D09", "S5")
@pytest.mark.parametrize("damage", ["changed", "cut", "replaced", "more", "gone"])
def test_a_set_that_changes_during_the_flush_is_void(flush: FlushRig, damage: str) -> None:
    """A file is changed, truncated, replaced, added or deleted while the set is read."""
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
def test_a_file_that_cannot_be_read_voids_its_set_only(flush: FlushRig) -> None:
    """The event contains the reason, and the next set is flushed."""
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
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO within a shard is not retried, and voids the set; the next set is flushed."""
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
    assert 1 <= len(refused) <= 2, "once for each part in flight"
    flush.flushed(staged_set(flush.run_directory, {"a": b"whole"}, step=6, directory="step-6.abc"))


@pytest.mark.parametrize("error", [Transient("503"), Permanent("403")])
def test_a_store_error_fails_the_flush_but_does_not_void_the_set(
    flush: FlushRig, error: Exception
) -> None:
    """The next flush of the set succeeds."""

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
    assert flush.events.empty(), "a failure is posted once"


@pytest.mark.fault("H08")
def test_an_unexpected_error_becomes_an_event(flush: FlushRig) -> None:
    """No fault of the daemon ends a worker: afterwards all three workers still take tasks."""

    def before(what: str, key: str) -> None:
        raise ZeroDivisionError

    staged = staged_set(flush.run_directory, {str(number): b"x" for number in range(20)})
    flush.store.before = before
    for attempt in range(5):
        flush.engine.start(f"f{attempt}", staged, 1)
        failed = flush.outcome()
        assert isinstance(failed, FlushFailed)
        assert not failed.void
    # A worker that still sends a part of the last flush would be the fourth at the barrier.
    until(lambda: flush.engine._idle == 3, what="the workers to leave the failed flush")
    together = threading.Barrier(3)
    flush.store.before = lambda *_: together.wait(20) and None
    wide = staged_set(flush.run_directory, {str(number): b"x" for number in range(21)})
    flush.engine.start("g", wide, 1)
    assert isinstance(flush.outcome(), Flushed)


def test_a_cancelled_flush_begins_no_task_and_posts_no_outcome(flush: FlushRig) -> None:
    """Parts in flight are interrupted, and the files are closed."""
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


def test_a_new_flush_begins_while_requests_of_the_old_one_hang(flush: FlushRig) -> None:
    """Only the outcome of the new flush is posted."""
    held = threading.Event()
    begun = threading.Semaphore(0)

    def before(what: str, key: str) -> None:
        if key.endswith("/old") and what == "put_part":
            begun.release()
            assert held.wait(20)

    flush.store.before = before
    old = staged_set(flush.run_directory, {"old": b"a" * 2 * PART})
    flush.engine.start("old", old, 1)
    for _ in range(2):  # both parts: the file must not be opened again
        assert begun.acquire(timeout=20)
    (flush.run_directory / SET / "old").unlink()
    flush.engine.start("new", staged_set(flush.run_directory, {"new": b"n" * 5 * PART}), 1)
    done = flush.outcome()
    assert isinstance(done, Flushed)
    assert done.flush_id == "new"
    held.set()
    until(lambda: not flush.open_files(), what="the files to be closed")
    assert flush.events.empty() or isinstance(flush.events.get(), FlushProgress)


def test_flushed_is_posted_after_every_completion(flush: FlushRig) -> None:
    """It is not posted while the completion of one upload is in flight."""
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
def test_memory_is_limited_to_windows(flush: FlushRig) -> None:
    """The engine buffers no bytes: it only fills the windows of the store."""
    sizes: set[int] = set()
    sent = flush.store.put_part

    def put_part(upload: Upload, number: int, body: Body) -> PartReceipt:
        read_into = body.read_into

        def fill(window: memoryview) -> None:
            sizes.add(len(window))
            buffers = [
                value for value in vars(body).values() if isinstance(value, bytes | bytearray)
            ]
            assert not buffers
            read_into(window)

        body.read_into = fill  # type: ignore[method-assign]
        return sent(upload, number, body)

    flush.store.put_part = put_part  # type: ignore[method-assign]
    flush.flushed(staged_set(flush.run_directory, {"a": bytes(300 * PART)}))
    assert sizes == {WINDOW_BYTES}


def test_progress_counts_the_bytes_of_parts_in_flight(flush: FlushRig) -> None:
    """Progress is posted while no part is finished, and only when a counter has changed."""
    held = threading.Event()
    sent = flush.store.put_part

    def put_part(upload: Upload, number: int, body: Body) -> PartReceipt:
        read_into = body.read_into

        def read_and_hold(window: memoryview) -> None:
            read_into(window)
            assert held.wait(20)

        body.read_into = read_and_hold  # type: ignore[method-assign]
        return sent(upload, number, body)

    flush.store.put_part = put_part  # type: ignore[method-assign]
    flush.engine.start("f", staged_set(flush.run_directory, {"a": bytes(3 * PART)}), 1)
    progress: list[Event] = []
    while FlushProgress("f", 0, 3 * WINDOW_BYTES) not in progress:
        progress.append(flush.events.get(timeout=20))
    held.set()
    while not isinstance(event := flush.events.get(timeout=20), Flushed):
        progress.append(event)
    assert progress[0] == FlushProgress("f", 0, 0)
    assert all(event != following for event, following in pairwise(progress))


@pytest.mark.fault("O18", "H07")
def test_open_files_are_limited_by_connections(flush: FlushRig) -> None:
    """A set may have more files than a process may open; each file is closed after it is sent."""
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, len(flush.open_files()))

    flush.store.before = count
    flush.flushed(staged_set(flush.run_directory, {f"part-{n}": b"x" for n in range(60)}))
    assert 1 <= most <= 10, "a few for each of three connections, directories included"


@pytest.mark.fault("H07")
def test_without_a_free_descriptor_the_flush_fails_and_the_set_is_not_void(flush: FlushRig) -> None:
    """The file may be good; the next flush of the set succeeds."""
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
def test_parts_are_within_the_limits_of_the_stores(
    size_bytes: int, wanted_bytes: int, least_bytes: int
) -> None:
    """At most 10,000 parts, of at least the minimum of the store and at most 1 GiB."""
    part = part_size_for(size_bytes, wanted_bytes=wanted_bytes, least_bytes=least_bytes)
    assert -(-size_bytes // part) <= PARTS_MAX
    assert max(wanted_bytes, least_bytes) <= part <= 2**30


def test_parts_have_the_configured_size_or_twice_that_for_large_files() -> None:
    """16 MiB, or 32 MiB above 8 GiB, or more if there would be more than 10,000 parts."""
    mib = 2**20
    sizes = [0, 16 * mib, LARGE_FILE_BYTES, LARGE_FILE_BYTES + 1, 32 * mib * PARTS_MAX + 1]
    parts = [part_size_for(size, wanted_bytes=16 * mib, least_bytes=1) for size in sizes]
    assert parts == [16 * mib, 16 * mib, 16 * mib, 32 * mib, 64 * mib]


def test_a_flush_begins_with_few_workers(tmp_path: Path) -> None:
    """The concurrency limit does not grow before the rate is sampled."""
    flush = FlushRig(tmp_path, connections=20, monotonic=lambda: 100.0)
    held = threading.Event()
    begun: list[str] = []

    def before(what: str, key: str) -> None:
        begun.append(key)
        assert held.wait(20)

    flush.store.before = before
    many = staged_set(flush.run_directory, {f"f{n}": b"x" for n in range(20)})
    flush.engine.start("many", many, 1)
    until(
        lambda: len(begun) == FIRST and flush.engine._idle == 20 - FIRST,
        what="the first files to begin",
    )
    held.set()
    assert isinstance(flush.outcome(), Flushed)
    assert len(begun) == 20


def test_a_set_that_is_ordered_again_keeps_its_concurrency_limit(tmp_path: Path) -> None:
    """A set that is being written is ordered again at each file, and must not begin with two workers."""
    flush = FlushRig(tmp_path, connections=21)
    held = threading.Event()
    begun: list[str] = []

    def before(what: str, key: str) -> None:
        begun.append(key)
        assert held.wait(20)

    flush.store.before = before
    many = staged_set(flush.run_directory, {f"f{n}": b"x" for n in range(20)})
    flush.engine.start("early", many, 1, is_sealed=False)
    until(lambda: len(begun) == 20, what="all files to begin")
    flush.engine.start("sealed", many, 1)
    active = until(
        lambda: (now := flush.engine._active) and now.is_sealed and now,
        what="the sealed set to be flushed",
    )
    assert active.limit.now == 21
    held.set()
    assert isinstance(flush.outcome(), Flushed)


def test_more_workers_begin_while_all_requests_hang(tmp_path: Path) -> None:
    """The limit is also sampled while no byte is sent."""
    flush = FlushRig(tmp_path, connections=20)
    held = threading.Event()
    begun: list[str] = []

    def before(what: str, key: str) -> None:
        begun.append(key)
        assert held.wait(20)

    flush.store.before = before
    many = staged_set(flush.run_directory, {f"f{n}": b"x" for n in range(20)})
    flush.engine.start("many", many, 1)
    until(lambda: len(begun) == 20, what="all files to begin")
    held.set()
    assert isinstance(flush.outcome(), Flushed)
