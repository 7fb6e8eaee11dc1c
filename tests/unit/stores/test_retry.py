# SPDX-License-Identifier: Apache-2.0
"""The retry wrapper: which errors it retries, for how long, and its log lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from swansong_bucket.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansong_bucket.stores.base import Body, Page, Sink
from swansong_bucket.stores.checksums import crc32c
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.wrappers.retry import Retrying

from testkit.bodies import CountedSink


class Moody(FileStore):
    """A real store; a list of moods decides the result of each call: an error, or None for success.

    With ``after`` the error is raised after the call took effect.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory.as_uri())
        self.moods: list[StoreError | None] = []
        self.after = False
        self.attempts = 0

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self.attempts += 1
        mood = self.moods.pop(0) if self.moods else None
        if mood is None or self.after:
            super().put(key, data, if_absent=if_absent)
        if mood is not None:
            raise mood

    def create(self, key: str, body: Body) -> None:
        super().create(key, body)
        self._be_moody()

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        super().get_range(key, offset, size_bytes, sink)
        self._be_moody()

    def _be_moody(self) -> None:
        mood = self.moods.pop(0) if self.moods else None
        if mood is not None:
            raise mood

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        """Two keys a page, in reverse order; each page except the first repeats a key."""
        self.attempts += 1
        self._be_moody()
        infos = sorted(
            super().page(prefix, None, after=after).infos, key=lambda info: info.key, reverse=True
        )
        start = int(token or 0)
        end = start + 2
        return Page(infos[max(0, start - 1) : end], str(end) if end < len(infos) else None)


class Clock:
    """A manual clock; each call advances it by ``step_s``."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Waits(threading.Event):
    """A stop event that records the waits on it, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return False


@pytest.fixture
def moody(tmp_path: Path) -> Moody:
    return Moody(tmp_path)


def retrying(
    store: Moody,
    *,
    give_up: Callable[[], float | None] = lambda: None,
    stop: threading.Event | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Retrying:
    return Retrying(
        store, give_up_mono_s=give_up, stop=stop or threading.Event(), monotonic=monotonic
    )


@pytest.mark.parametrize("error", [Permanent("403"), NotFound("404"), Exists("412")])
def test_other_errors_are_not_retried(moody: Moody, error: StoreError) -> None:
    """Other errors are raised immediately."""
    moody.moods = [error]
    with pytest.raises(type(error)) as caught:
        retrying(moody).put("key", b"content")
    assert caught.value is error
    assert moody.attempts == 1


def test_bytes_that_changed_in_memory_are_not_sent_again(moody: Moody) -> None:
    """A store refuses them at each attempt: the caller must read them once more."""
    moody.moods = [Transient("BadDigest")] * 1000
    content = bytearray(b"content")
    body = Body(memoryview(content), crc32c=crc32c(content))
    content[3] ^= 1
    with pytest.raises(Permanent, match="changed in memory"):
        retrying(moody, stop=Waits()).create("chunk", body)
    assert len(moody.moods) == 999


def test_exists_after_an_ambiguous_attempt_is_raised(moody: Moody) -> None:
    """The object may be from our own first attempt: the caller decides."""
    moody.moods, moody.after = [Transient("no reply")], True
    with pytest.raises(Exists):
        retrying(moody).put("key", b"mine", if_absent=True)
    assert moody.get("key") == b"mine"


def test_no_attempt_starts_after_the_deadline(moody: Moody) -> None:
    """Not even the first one; without a limit there is no deadline."""
    for give_up_mono_s in (1000.0, 995.0):
        late = retrying(moody, give_up=[give_up_mono_s].pop, monotonic=Clock())
        with pytest.raises(Transient):
            late.put("key", b"")
    assert moody.attempts == 0
    retrying(moody, monotonic=Clock()).put("k", b"")
    assert moody.attempts == 1


def test_the_last_error_is_raised_when_the_time_is_up(moody: Moody) -> None:
    """All the time left is used for attempts; then the last error is raised."""
    moody.moods = [Transient(f"attempt {n}") for n in range(1, 1000)]
    clock = Clock(step_s=0.05)
    with pytest.raises(Transient) as caught:
        retrying(moody, give_up=lambda: 1001.0, stop=Waits(), monotonic=clock).put("key", b"")
    assert str(caught.value) == f"attempt {moody.attempts}"
    assert moody.attempts >= 2
    assert clock.now_s >= 1000.8


def test_a_deadline_that_comes_during_a_wait(moody: Moody) -> None:
    """A notice during a backoff takes effect at the end of that backoff: the deadline is read again."""
    moody.moods = [Transient("down")] * 1000
    stop = Waits()

    def give_up() -> float | None:
        return 0.0 if stop.seconds else None

    with pytest.raises(Transient, match="down"):
        retrying(moody, give_up=give_up, stop=stop).put("key", b"")
    assert moody.attempts == 1


def test_stop_ends_the_backoff(moody: Moody) -> None:
    """After stop there is one attempt without a wait; its error is raised."""
    stop = threading.Event()
    stop.set()
    moody.moods = [Transient("down")] * 1000
    with pytest.raises(Transient, match="down"):
        retrying(moody, stop=stop).put("key", b"")
    assert moody.attempts == 1


def test_backoff_is_bounded_and_jittered(moody: Moody) -> None:
    """The bound doubles from 0.1 s to 2 s, and the waits differ."""
    stop = Waits()
    moody.moods = [Transient("down")] * 60
    retrying(moody, stop=stop).put("key", b"")
    assert len(stop.seconds) == 60
    for number, wait_s in enumerate(stop.seconds):
        assert 0 <= wait_s <= min(0.1 * 2**number, 2.0)
    assert max(stop.seconds) > 1.0
    assert min(stop.seconds[10:]) < 1.0


def test_the_backoff_leaves_time_for_an_attempt(moody: Moody) -> None:
    """The next attempt starts before the deadline, after any backoff."""
    stop = Waits()
    moody.moods = [Transient("down")] * 60
    retrying(moody, give_up=lambda: 1000.5, stop=stop, monotonic=Clock()).put("key", b"")
    assert max(stop.seconds) <= 0.5


@pytest.mark.fault("O04")
@pytest.mark.parametrize(
    ("wanted_s", "waited_s", "jitter_s"),
    [([7.0, 0.3], 7.3, 0.1 + 0.2), ([86400.0], 60.0, 0.1)],
    ids=["added", "limited"],
)
def test_retry_after_is_added_to_the_jitter(
    moody: Moody, wanted_s: list[float], waited_s: float, jitter_s: float
) -> None:
    """Callers with the same Retry-After do not retry together; it counts up to one minute."""
    stop = Waits()
    moody.moods = [*(Transient("503", retry_after_s=each_s) for each_s in wanted_s), None]
    retrying(moody, stop=stop).put("key", b"")
    assert waited_s <= sum(stop.seconds) <= waited_s + jitter_s


@pytest.mark.fault("O04")
def test_retry_after_leaves_time_for_an_attempt(moody: Moody) -> None:
    """A wait longer than the time left is limited to half of it."""
    for wanted_s in (11.0, 3600.0):
        stop = Waits()
        clock = Clock()

        def wait(timeout: float, clock: Clock = clock, stop: Waits = stop) -> bool:
            stop.seconds.append(timeout)
            clock.now_s += timeout
            return False

        stop.wait = wait  # type: ignore[method-assign,assignment]
        moody.attempts, moody.moods = 0, [Transient("503", retry_after_s=wanted_s), None]
        retrying(moody, give_up=lambda: 1020.0, stop=stop, monotonic=clock).put("key", b"")
        assert moody.attempts == 2
        assert 9.9 <= clock.now_s - 1000.0 <= 10.6


@pytest.mark.fault("O04")
def test_a_deadline_shortens_retry_after(moody: Moody) -> None:
    """A notice during the wait takes effect within half a second."""
    stop = Waits()

    def give_up() -> float | None:
        return 1002.0 if len(stop.seconds) >= 10 else None

    moody.moods = [Transient("503", retry_after_s=60.0), None]
    retrying(moody, give_up=give_up, stop=stop, monotonic=Clock()).put("key", b"")
    assert len(stop.seconds) == 11
    assert max(stop.seconds) <= 0.5


def test_bodies_and_sinks_are_rewound(moody: Moody) -> None:
    """A chunk and a range are complete after a second attempt."""
    content = b"content" * 1000
    down = Transient("reset")
    store = retrying(moody)
    moved: list[int] = []
    moody.moods = [down]
    store.create("chunk", Body(content, moved.append))
    assert moved == [len(content), -len(content), len(content)]
    assert moody.get("chunk") == content
    sink = CountedSink()
    moody.moods = [down]
    store.get_range("chunk", 1, len(content) - 1, sink)
    assert (sink.passes, sink.data) == (2, content[1:])


def test_a_listing_resumes_with_the_page_that_failed(moody: Moody) -> None:
    """Each key occurs once, in any order, although pages fail."""
    keys = [f"key-{n}" for n in range(6)]
    for key in keys:
        moody.put(key, b"")
    moody.attempts = 0
    down = Transient("down")
    moody.moods = [down, None, down, down, None]
    assert [info.key for info in retrying(moody).list("key-")] == keys[::-1]
    assert moody.attempts == 6


def test_one_log_line_at_the_first_retry_and_one_at_recovery(moody: Moody) -> None:
    """Not one for each attempt, and none without a retry."""
    moody.moods = [Transient("503 SlowDown"), Transient("again"), Transient("again"), None]
    with capture_logs() as lines:
        store = retrying(moody)
        store.put("good/key", b"")
        store.put("key", b"")
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("store_retry", "warning"),
        ("store_recovered", "info"),
    ]
    assert lines[0]["call"] == lines[1]["call"] == "put good/key"
    assert lines[0]["error"] == "503 SlowDown"
    assert lines[1]["attempts"] == 4
