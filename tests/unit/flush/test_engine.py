# SPDX-License-Identifier: Apache-2.0
"""The flush engine with real files: stored bytes, void sets, limits of memory and of open files."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from swansong_bucket.errors import Transient
from swansong_bucket.model import CommitRef, StagedFile
from swansong_bucket.stores.base import Body
from swansong_bucket.util.concurrency import FIRST
from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.flush import engine as engines
from swansongd.flush import queue, reading
from swansongd.staging.scan import SetDirectory

from testkit.flush_rig import CHUNK, SET, FlushRig, is_named, noise, staged_set
from testkit.memory_store import WINDOW_BYTES
from testkit.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_is_late")

SMALL = CHUNK // 4
EDGES = (0, 1, SMALL - 1, SMALL, SMALL + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK)
STEPS = count(1)


def small_files(number: int, size_bytes: int = 100) -> dict[str, bytes]:
    return {f"d/{n:03d}": noise(size_bytes, n) for n in range(number)}


# ---------------------------------------------------------------------- stored bytes


@pytest.fixture(scope="module")
def long_flush(tmp_path_factory: pytest.TempPathFactory) -> FlushRig:
    """One engine for many examples: its threads end only with the process."""
    return FlushRig(tmp_path_factory.mktemp("long"), small_bytes_max=CHUNK)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    files=st.lists(
        st.tuples(st.sampled_from(EDGES) | st.integers(0, 4 * CHUNK), st.integers(0, 3)),
        max_size=25,
    ),
    is_committed=st.booleans(),
)
@example(files=[(size, 0) for size in EDGES * 3], is_committed=True)
def test_the_shards_give_the_files_back(
    long_flush: FlushRig, files: list[tuple[int, int]], *, is_committed: bool
) -> None:
    """Empty, small, large and equal files; every object has the bytes of its name.

    ``flushed`` compares the bytes in the extents with the staged bytes.
    """
    step = next(STEPS)
    directory = f"s-{step}"
    (long_flush.run_directory / directory).mkdir()
    content = {f"{n % 3}/{n}": noise(size, seed) for n, (size, seed) in enumerate(files)}
    staged = staged_set(long_flush.run_directory, content, step=step, directory=directory)
    done = long_flush.flushed(staged)
    if is_committed:
        long_flush.known.committed(done.shards, CommitRef(1, step))
    long_flush.expect_named_bytes()


# ---------------------------------------------------------------------- void sets and failures


@pytest.mark.fault("D09", "S5")
@pytest.mark.parametrize("damage", ["changed", "cut", "replaced", "more", "gone"])
@pytest.mark.parametrize("request_number", [1, 8, 20])
def test_a_set_that_changes_while_a_chunk_is_sent_is_void(
    flush: FlushRig, damage: str, request_number: int
) -> None:
    """No manifest can name its chunks.  The object has the bytes that were hashed, not those of the file.

    The fixture compares every object with its name.
    """
    staged = staged_set(flush.run_directory, {"a": noise(20 * CHUNK)})
    path = flush.run_directory / SET / "a"
    numbers = count(1)

    def before(what: str, key: str) -> None:
        if next(numbers) != request_number:
            return
        if damage == "changed":
            path.write_bytes(noise(20 * CHUNK, 1))
        elif damage == "cut":
            os.truncate(path, 300)
        elif damage == "replaced":
            (flush.run_directory / "new").write_bytes(noise(20 * CHUNK, 1))
            os.replace(flush.run_directory / "new", path)
        elif damage == "more":
            (flush.run_directory / SET / "c").write_bytes(b"c")
        else:
            path.unlink()

    flush.store.before = before
    assert flush.failure(staged).void


@pytest.mark.fault("D09", "S5")
def test_a_file_that_changes_while_it_is_read_is_not_sent(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its bytes would be old and half new."""
    staged = staged_set(flush.run_directory, {"a": noise(CHUNK)})
    read = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        done = read(fd, buffers, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/a"):
            os.utime(flush.run_directory / SET / "a", ns=(1, 1))
        return done

    monkeypatch.setattr(os, "preadv", preadv)
    assert flush.failure(staged).void
    assert not flush.store.requests


@pytest.mark.fault("D03")
@pytest.mark.parametrize("small_bytes_max", [0, CHUNK])
@pytest.mark.parametrize("fault", ["gone", "bad sector"])
def test_a_file_that_cannot_be_read_voids_its_set_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, small_bytes_max: int
) -> None:
    """The reason names the file, which is read once, also among files that share its chunk."""
    flush = FlushRig(tmp_path, small_bytes_max=small_bytes_max)
    staged = staged_set(flush.run_directory, small_files(9) | {"d/bad": noise(100)})
    read = os.preadv
    refused: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/bad"):
            refused.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    if fault == "gone":
        (flush.run_directory / SET / "d/bad").unlink()
    else:
        monkeypatch.setattr(os, "preadv", preadv)
    failed = flush.failure(staged)
    assert failed.void
    assert "d/bad" in failed.reason
    assert len(refused) == (fault != "gone")
    flush.flushed(staged_set(flush.run_directory, {"a": b"whole"}, step=6, directory="s-6.abc"))


@pytest.mark.fault("H08")
def test_an_unexpected_error_becomes_an_event(flush: FlushRig) -> None:
    """No fault of the daemon ends a worker: afterwards all three workers still take tasks."""

    def before(what: str, key: str) -> None:
        raise ZeroDivisionError

    staged = staged_set(flush.run_directory, small_files(20))
    flush.store.before = before
    with capture_logs():  # tracebacks take long
        for _ in range(5):
            assert not flush.failure(staged).void
        flush.wait_until_idle()
    together = threading.Barrier(3)
    flush.store.before = lambda *_: together.wait(60) and None
    flush.flushed(staged_set(flush.run_directory, small_files(21)))


# ---------------------------------------------------------------------- cancel and replace


class SlowCreates:
    """Each create reports windows as sent, waits for the release, and then sends the chunk from its start.

    Args:
        again: called before the chunk is sent again.
    """

    def __init__(
        self, flush: FlushRig, *, windows: int = 1, again: Callable[[], object] = lambda: None
    ) -> None:
        self.begun, self.released = threading.Semaphore(0), threading.Event()
        self.count = 0
        create = flush.store.create

        def begin(key: str, body: Body) -> None:
            for _ in range(windows):
                body.next_window(WINDOW_BYTES)
            self.count += 1
            self.begun.release()
            assert self.released.wait(60)
            body.rewind()
            again()
            create(key, body)

        flush.store.create = begin  # type: ignore[method-assign]


@pytest.mark.parametrize("small_bytes_max", [0, CHUNK])
def test_a_cancelled_flush_ends_within_one_window(tmp_path: Path, small_bytes_max: int) -> None:
    """Requests in flight are interrupted, no chunk is stored, and no outcome is posted."""
    flush = FlushRig(tmp_path, small_bytes_max=small_bytes_max)
    slow = SlowCreates(flush)
    staged = staged_set(flush.run_directory, small_files(30) | {"a": noise(20 * CHUNK)})
    flush.started(staged)
    for _ in range(2):
        assert slow.begun.acquire(timeout=20)
    flush.engine.cancel("f")
    slow.released.set()
    flush.wait_until_idle()
    assert not flush.store.objects
    assert slow.count <= 3
    assert not any(isinstance(e, Flushed | FlushFailed) for e in flush.events.queue)
    flush.flushed(staged)


def test_a_flush_that_is_cancelled_before_it_begins_sends_nothing(tmp_path: Path) -> None:
    """The only worker is still busy with another set."""
    flush = FlushRig(tmp_path, connections=1)
    held = flush.hold()
    flush.started(staged_set(flush.run_directory, {"old": noise(CHUNK)}), flush_id="old")
    flush.wait_for_creates(1)
    other = staged_set(flush.run_directory, {"new": noise(CHUNK, 1)}, step=6, directory="s-6.abc")
    flush.started(other, flush_id="new")
    flush.engine.cancel("new")
    held.set()
    flush.wait_until_idle()
    assert flush.store.count("create") == 1
    assert all(isinstance(event, FlushProgress) for event in flush.events.queue)


def test_a_cancelled_flush_reads_no_further_window(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer waits for the disk meanwhile."""
    monkeypatch.setattr(reading, "WINDOW_BYTES", 10)
    read, windows = os.preadv, count(1)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(windows) == 5:
            flush.engine.cancel("f")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    flush.started(staged_set(flush.run_directory, {"a": noise(20 * CHUNK)}))
    until(lambda: next(windows) > 5, what="the fifth window")
    flush.wait_until_idle()
    assert not flush.store.requests


def test_a_new_flush_begins_while_requests_of_the_old_one_hang(flush: FlushRig) -> None:
    """Only the outcome of the new flush is posted.  The files of the old set may be deleted."""
    held = flush.hold()
    flush.started(staged_set(flush.run_directory, {"old": noise(2 * CHUNK)}), flush_id="old")
    flush.wait_for_creates(2)
    (flush.run_directory / SET / "old").unlink()
    flush.store.before = lambda *_: None
    files = {"new": noise(5 * CHUNK, 1)}
    new = staged_set(flush.run_directory, files, step=6, directory="s-6.abc")
    assert flush.flushed(new).flush_id != "old"
    held.set()
    flush.wait_until_idle()
    assert all(isinstance(event, FlushProgress) for event in flush.events.queue)


def test_flushed_is_posted_after_every_request(flush: FlushRig) -> None:
    """It is not posted while one of them is in flight.  The end of another flush does not cancel this one."""
    held = threading.Event()
    last = noise(CHUNK, 9)
    flush.store.before = lambda _, key: is_named(key, last) and held.wait(60)
    flush.started(staged_set(flush.run_directory, {"a": noise(5 * CHUNK), "b": last, "c": b"c"}))
    until(lambda: len(flush.store.objects) == 6, what="all other chunks")
    until(lambda: flush.engine._idle == 2, what="the workers to find no task")
    assert not any(isinstance(event, Flushed) for event in flush.events.queue)
    flush.engine.cancel("another")
    held.set()
    assert isinstance(flush.outcome(), Flushed)


@pytest.mark.fault("O02")
def test_a_chunk_whose_request_hangs_is_sent_once_more(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is stored without the answer, and the first request changes nothing when it ends."""
    monkeypatch.setattr(queue, "LATE_S_MIN", 0.1)
    let_go, hangs, last = threading.Event(), count(), noise(CHUNK, 9)
    flush.store.before = lambda _, key: is_named(key, last) and not next(hangs) and let_go.wait(60)
    staged = staged_set(flush.run_directory, {"a": noise(5 * CHUNK), "b": last})
    done = flush.flushed(staged)
    assert done.shards[1].extents[0].chunk.key in flush.store.objects
    assert sum(is_named(key, last) for key in flush.store.objects) == 1
    let_go.set()
    flush.wait_until_idle()
    assert sum(is_named(key, last) for key in flush.store.objects) <= 2
    assert all(isinstance(event, FlushProgress) for event in flush.events.queue)


@pytest.mark.fault("O02")
def test_a_late_attempt_that_fails_does_not_fail_the_flush(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunk is stored already, and the flush waits for another one."""
    monkeypatch.setattr(queue, "LATE_S_MIN", 0.1)
    let_go, held, hangs = threading.Event(), threading.Event(), count()
    late, last = noise(CHUNK, 9), noise(CHUNK, 8)
    began: list[str] = []

    def before(_: str, key: str) -> None:
        if is_named(key, late) and not next(hangs):
            assert let_go.wait(60)
            raise Transient("too late")
        if is_named(key, last):
            began.append(key)
            assert held.wait(60)

    flush.store.before = before
    files = {"a": noise(5 * CHUNK), "b": late, "c": last}
    flush.started(staged_set(flush.run_directory, files))
    until(lambda: any(is_named(key, late) for key in flush.store.objects), what="a second attempt")
    until(lambda: began, what="the last chunk to be sent")
    let_go.set()
    until(lambda: flush.engine._idle, what="the first attempt to end")
    held.set()
    assert isinstance(flush.outcome(), Flushed)


def test_an_attempt_that_fails_while_another_one_is_under_way_does_not_fail_the_flush(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other attempt of the chunk may succeed."""
    monkeypatch.setattr(queue, "LATE_S_MIN", 0.1)
    failed, attempts, late = threading.Event(), count(), noise(CHUNK, 9)
    second = threading.Event()

    def before(_: str, key: str) -> None:
        if not is_named(key, late):
            return
        if not next(attempts):
            assert second.wait(60)
            failed.set()
            raise Transient("too late")
        second.set()
        assert failed.wait(60)
        until(lambda: flush.engine._idle, what="the first attempt to end")

    flush.store.before = before
    flush.started(staged_set(flush.run_directory, {"a": noise(5 * CHUNK), "b": late}))
    assert isinstance(flush.outcome(), Flushed)


# ---------------------------------------------------------------------- memory and descriptors


class Buffer(mmap.mmap):
    """A buffer that a test can count while it exists."""


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Buffer]]:
    made: list[weakref.ref[Buffer]] = []

    def make(fd: int, size_bytes: int, flags: int) -> Buffer:
        buffer = Buffer(fd, size_bytes, flags)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(reading.mmap, "mmap", make)
    return made


@pytest.mark.fault("H06")
def test_there_are_never_more_buffers_than_connections(
    flush: FlushRig, buffers: list[weakref.ref[Buffer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the sizes of the chunks.  The next flush uses them, and then they are released."""
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(buffer() is not None for buffer in buffers))

    flush.store.before = look
    growing = {f"{n:03d}": noise(100 + n, n) for n in range(60)}
    flush.flushed(staged_set(flush.run_directory, growing))
    assert 1 <= most <= 3
    kept = sum(len(buffer() or b"") >= CHUNK for buffer in buffers)
    monkeypatch.setattr(engines, "BUFFERS_KEPT_S", 0.01)
    equal = staged_set(flush.run_directory, {"a": noise(60 * CHUNK)}, step=6, directory="s-6.abc")
    made = len(buffers)
    flush.flushed(equal)
    assert len(buffers) - made <= 3 - kept
    until(lambda: not any(buffer() for buffer in buffers), what="the buffers to be released")


@pytest.mark.fault("H06")
@pytest.mark.parametrize(("most_bytes", "at_once"), [(3 * CHUNK, 3), (1, 2)])
def test_chunks_in_memory_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, at_once: int
) -> None:
    """By their bytes, not by the connections; two may always be, also while another set hangs.

    A set that grows and is ordered again has no further chunks in memory.
    """
    monkeypatch.setattr(engines, "BUFFERS_BYTES_MAX", most_bytes)
    flush = FlushRig(tmp_path, connections=8)
    held = flush.hold()

    def expect_in_flight(number: int) -> None:
        flush.wait_for_creates(number)
        until(lambda: flush.engine._limit.now == 8)
        flush.wait_for_creates(number)
        assert flush.engine._idle == 8 - number

    staged = staged_set(flush.run_directory, {"a": noise(20 * CHUNK)})
    for number in range(3):
        flush.started(staged, flush_id=f"f{number}", is_sealed=False)
        until(lambda name=f"f{number}": (now := flush.engine._active) and now.flush_id == name)
        expect_in_flight(at_once)
    other = staged_set(flush.run_directory, {"a": noise(9 * CHUNK, 1)}, step=6, directory="s-6.abc")
    flush.started(other)
    expect_in_flight(at_once + 2)
    held.set()
    assert isinstance(flush.outcome(), Flushed)


@pytest.mark.fault("O18", "H07")
@pytest.mark.parametrize("small_bytes_max", [0, CHUNK])
def test_open_files_are_limited_by_connections(tmp_path: Path, small_bytes_max: int) -> None:
    """A set may have more files than a process may open: each one is closed before its chunk is sent."""
    flush = FlushRig(tmp_path, small_bytes_max=small_bytes_max)
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, len(flush.open_files()))

    flush.store.before = look
    flush.flushed(staged_set(flush.run_directory, small_files(60)))
    assert 1 <= most <= 10, "one for each of three connections, and directories"


@pytest.mark.fault("H07")
def test_without_a_free_descriptor_the_flush_fails_and_the_set_is_not_void(flush: FlushRig) -> None:
    """The file may be good; the next flush of the set succeeds."""
    staged = staged_set(flush.run_directory, {"a": noise(3 * CHUNK), "b": b"b"})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    # Below this limit no descriptor is free, and threads of earlier tests can poll a few: not so with 0.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(free, 8), hard))
    try:
        failed = flush.failure(staged)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not failed.void
    assert "Too many open files" in failed.reason
    assert "LimitNOFILE" in failed.reason
    flush.flushed(staged)


@pytest.mark.fault("H07")
def test_a_file_without_a_free_descriptor_does_not_void_its_set(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the directory was opened before."""
    opening = SetDirectory.open

    def open_file(directory: SetDirectory, file: StagedFile) -> int:
        if file.path != "d/013":
            return opening(directory, file)
        with monkeypatch.context() as patched:
            patched.setattr("swansongd.staging.scan._open_below", no_descriptor)
            return opening(directory, file)

    staged = staged_set(flush.run_directory, small_files(20))
    with monkeypatch.context() as patched:
        patched.setattr(SetDirectory, "open", open_file)
        assert not flush.failure(staged).void
    flush.flushed(staged)


def no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


# ---------------------------------------------------------------------- progress


def test_progress_counts_the_bytes_of_requests_in_flight(flush: FlushRig) -> None:
    """Progress is posted while no chunk is stored, and only when a counter has changed."""
    slow = SlowCreates(flush)
    flush.started(staged_set(flush.run_directory, {"a": noise(3 * CHUNK)}))
    progress: list[Event] = []
    while FlushProgress("f", 0, 3 * WINDOW_BYTES) not in progress:
        progress.append(flush.events.get(timeout=60))
    slow.released.set()
    while not isinstance(event := flush.events.get(timeout=60), Flushed):
        progress.append(event)
    assert event.bytes_sent == 3 * CHUNK, "each byte counts once, however often a store reads it"
    assert progress[0] == FlushProgress("f", 0, 0)
    assert all(event != following for event, following in pairwise(progress))


def test_bytes_of_a_repeated_request_do_not_make_progress_negative(flush: FlushRig) -> None:
    """An earlier flush of the set has begun the request; its bytes before that are not of this one."""

    def seen() -> list[Event]:
        return list(flush.events.queue)

    def wait_for_progress() -> None:
        until(lambda: (now := flush.engine._active) and now.progress() in seen())

    slow = SlowCreates(flush, windows=9, again=wait_for_progress)
    staged = staged_set(flush.run_directory, {"a": noise(CHUNK)})
    flush.started(staged, is_sealed=False)
    until(lambda: FlushProgress("f", 0, 9 * WINDOW_BYTES) in seen())
    flush.started(staged, flush_id="g")
    until(lambda: FlushProgress("g", 0, 0) in seen())
    slow.released.set()
    until(lambda: any(isinstance(event, Flushed) for event in seen()))
    progress = [event for event in seen() if isinstance(event, FlushProgress)]
    assert all(min(e.bytes_stored, e.bytes_sent, e.bytes_compared) >= 0 for e in progress)


# ---------------------------------------------------------------------- concurrency


@pytest.mark.parametrize(("judged", "workers"), [(0, FIRST), (16, 8)])
def test_a_flush_begins_with_few_workers(tmp_path: Path, judged: int, workers: int) -> None:
    """The concurrency limit does not grow before the rate is sampled.

    After another flush it begins with half of its workers: an evacuation does not learn again what the last
    flush of this store has learned.
    """
    flush = FlushRig(tmp_path, connections=20, monotonic=lambda: 100.0)
    if judged:
        flush.engine._limit._judged = judged
    held = flush.hold()
    flush.started(staged_set(flush.run_directory, small_files(20)))
    flush.wait_for_creates(workers)
    until(lambda: flush.engine._idle == 20 - workers, what="the other workers to wait")
    assert flush.store.count("create") == workers
    held.set()
    assert isinstance(flush.outcome(), Flushed)


def test_more_workers_begin_while_all_requests_hang_and_a_growing_set_keeps_them(
    tmp_path: Path,
) -> None:
    """The limit is sampled while no byte is sent.  A set that is being written is ordered at each file."""
    flush = FlushRig(tmp_path, connections=21)
    held = flush.hold()
    many = staged_set(flush.run_directory, small_files(20))
    flush.started(many, is_sealed=False)
    flush.wait_for_creates(20)
    flush.started(many, flush_id="sealed")
    until(lambda: (now := flush.engine._active) and now.is_sealed)
    assert flush.engine._limit.now == 21
    held.set()
    assert isinstance(flush.outcome(), Flushed)


def test_the_bytes_of_a_growing_set_are_counted_on(flush: FlushRig) -> None:
    """A counter that falls would pass for a lower rate, and the next doubling for a gain."""
    moved: list[int] = []

    class Recorded(engines.ConcurrencyLimit):
        def sample(self, _now_mono_s: float, moved_bytes: int, *_: float) -> None:
            moved.append(moved_bytes)

    # Of this engine only: the threads of an earlier test's engine may still take samples.
    flush.engine._limit = Recorded(3)
    staged = staged_set(flush.run_directory, small_files(20))
    for number in range(10, 20):
        part = replace(staged, files=staged.files[:number])
        flush.started(part, flush_id=str(number), is_sealed=False)
        until(lambda number=number: flush.store.bytes_sent == number * 100)
    flush.flushed(staged)
    assert moved == sorted(moved)
    assert moved[-1] > 0
