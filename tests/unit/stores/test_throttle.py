# SPDX-License-Identifier: Apache-2.0
"""The throttle: its rate, and the end of waits when the limit changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from swansong_bucket.stores.base import WINDOW_BYTES, Body
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.wrappers import throttle
from swansong_bucket.stores.wrappers.throttle import Throttled

from testkit.bodies import CountedSink, torn
from testkit.waiting import until

RATE = 8.0 * WINDOW_BYTES


class Limit:
    """A rate that can be changed."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s

    def __call__(self) -> float | None:
        return self.rate_bytes_per_s


class Watched(FileStore):
    """A real store that counts the bodies in flight."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory.as_uri())
        self._lock = threading.Lock()
        self.under_way = 0
        self.most_under_way = 0

    def create(self, key: str, body: Body) -> None:
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            super().create(key, body)
        finally:
            with self._lock:
                self.under_way -= 1


@pytest.fixture
def files(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def started(count: int, work: Callable[[int], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_all_threads_together_keep_to_the_rate(files: Watched) -> None:
    """Chunks of several threads share one limit; only the first window is free."""
    store = Throttled(files, Limit(RATE))
    began_s = time.monotonic()

    def send(number: int) -> None:
        for turn in range(2):
            store.create(f"chunk-{number}-{turn}", Body(bytes(WINDOW_BYTES)))

    joined(started(4, send))
    took_s = time.monotonic() - began_s
    assert took_s >= 7 * WINDOW_BYTES / RATE * 0.9
    assert len(list(store.list("chunk-"))) == 8


def test_no_credit_for_idle_times(files: Watched) -> None:
    """Idle time does not increase the rate afterwards."""
    now_s = [0.0]
    store = Throttled(files, Limit(RATE), monotonic=lambda: now_s[0])
    store.create("first", Body(bytes(WINDOW_BYTES)))
    now_s[0] += 3600
    store.create("second", Body(bytes(WINDOW_BYTES)))
    (third,) = started(1, lambda _: store.create("third", Body(bytes(WINDOW_BYTES))))
    until(lambda: files.under_way == 1, what="the third to begin")
    third.join(timeout=0.2)
    assert third.is_alive()
    now_s[0] += 1
    joined([third])


def test_removing_the_limit_ends_all_waits(files: Watched) -> None:
    """Bodies in flight and waiting bodies continue immediately."""
    limit = Limit(1000.0)  # 15 minutes for one window
    store = Throttled(files, limit)
    windows: list[int] = []
    data = memoryview(bytes(3 * WINDOW_BYTES))
    threads = started(4, lambda n: store.create(f"shard-{n}", Body(data, windows.append)))
    until(lambda: len(windows) == 2, what="a second window, which is one too many")
    assert files.under_way == 1
    assert all(thread.is_alive() for thread in threads)
    assert list(files.list("")) == []
    limit.rate_bytes_per_s = None
    joined(threads)
    assert [info.size_bytes for info in files.list("")] == [3 * WINDOW_BYTES] * 4


@pytest.mark.parametrize(("rate", "most"), [(WINDOW_BYTES / 2, 1), (3.5 * WINDOW_BYTES, 3)])
def test_few_bodies_are_in_flight(files: Watched, rate: float, most: int) -> None:
    """Each one in flight can send a window about once a second."""
    limit = Limit(rate)
    store = Throttled(files, limit)
    threads = started(8, lambda n: store.create(f"shard-{n}", Body(bytes(WINDOW_BYTES))))
    until(lambda: files.under_way == most, what=f"{most} under way")
    most_under_way = files.most_under_way
    limit.rate_bytes_per_s = None
    joined(threads)
    assert most_under_way == most


def test_a_cancelled_body_frees_its_slot(files: Watched) -> None:
    """Its error is raised, and the next body takes the slot."""
    store = Throttled(files, Limit(WINDOW_BYTES / 2))
    for _ in range(3):
        with pytest.raises(InterruptedError, match="unwanted"):
            store.create("shard", Body(b"x", torn(InterruptedError("unwanted"))))
    store.create("shard", Body(b"x"))
    assert files.get("shard") == b"x"


def test_other_calls_are_not_limited(files: Watched) -> None:
    """Small objects and reads pass with a limit close to 0."""
    store = Throttled(files, Limit(1e-3))
    assert store.url == files.url
    store.check()
    store.warm()
    content = bytes(WINDOW_BYTES)
    store.put("key", content, if_absent=True)
    assert store.get("key") == content
    sink = CountedSink()
    store.get_range("key", 1, WINDOW_BYTES - 1, sink)
    assert sink.data == content[1:]
    assert store.head("key") == next(store.list("k"))
    store.delete("key")


def test_ranges_keep_to_the_rate_on_request(files: Watched) -> None:
    """A verification beside training limits what it reads; a restore reads as fast as it can."""
    size_bytes = 8 * WINDOW_BYTES
    files.put("key", bytes(size_bytes))
    slow, fast = (
        Throttled(files, Limit(RATE), limits_reads=True),
        Throttled(files, Limit(1.0)),
    )
    began_s = time.monotonic()
    sink = CountedSink()
    slow.get_range("key", 0, size_bytes, sink)
    assert len(sink.data) == size_bytes
    assert time.monotonic() - began_s >= 0.9 * (size_bytes - WINDOW_BYTES) / RATE
    sink = CountedSink()
    fast.get_range("key", 0, size_bytes, sink)  # at one byte a second this would never return
    assert len(sink.data) == size_bytes


def test_the_chunk_that_a_repair_puts_keeps_to_the_rate(files: Watched) -> None:
    """A verification beside training limits what it writes again as what it reads."""
    size_bytes = 8 * WINDOW_BYTES
    store = Throttled(files, Limit(RATE))
    began_s = time.monotonic()
    for key in ("first", "second"):
        store.put(key, bytes(size_bytes))
    assert time.monotonic() - began_s >= 0.9 * size_bytes / RATE
    assert files.head("second") is not None


class Pause:
    """A pause that begins with the first window of a body, and ends at a request."""

    def __init__(self) -> None:
        self.windows: list[int] = []
        self.is_on = threading.Event()

    def moved(self, size_bytes: int) -> None:
        self.windows.append(size_bytes)
        if len(self.windows) == 1:
            self.is_on.set()


@pytest.mark.parametrize(("held_s", "repeated"), [(60.0, 0), (0.0, 1)])
def test_a_pause_holds_bodies_and_a_long_one_repeats_them(
    files: Watched, monkeypatch: pytest.MonkeyPatch, held_s: float, repeated: int
) -> None:
    """A body in flight sends one window and waits, or frees its connection; the next one does not start."""
    monkeypatch.setattr(throttle, "HELD_S", held_s)
    pause = Pause()
    store = Throttled(files, Limit(None), is_paused=pause.is_on.is_set)
    data = memoryview(bytes(3 * WINDOW_BYTES))
    first = started(1, lambda _: store.create("first", Body(data, pause.moved)))
    until(pause.is_on.is_set, what="the first window")
    second = started(1, lambda _: store.create("second", Body(data)))
    until(lambda: files.under_way == 1 - repeated, what="the held body")
    assert list(files.list("")) == []
    assert (len(pause.windows), files.most_under_way) == (1, 1)
    pause.is_on.clear()
    joined([*first, *second])
    assert sorted(info.size_bytes for info in files.list("")) == [3 * WINDOW_BYTES] * 2
    assert pause.windows.count(-WINDOW_BYTES) == repeated


def test_a_range_waits_as_well(files: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long pause it is read again, and the sink has each byte once."""
    monkeypatch.setattr(throttle, "HELD_S", 0.0)
    content = bytes(range(256)) * 3 * 4096
    files.put("key", content)
    looks = iter([False, True, True])
    store = Throttled(files, Limit(None), is_paused=lambda: next(looks, False), limits_reads=True)
    sink = CountedSink()
    store.get_range("key", 0, len(content), sink)
    assert sink.data == content
    assert next(looks, None) is None
