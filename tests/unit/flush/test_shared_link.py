# SPDX-License-Identifier: Apache-2.0
"""The locks that the daemons of one VM share."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
from swansong_bucket.errors import ConfigError
from swansongd.core.events import FlushProgress, LinkShared
from swansongd.flush import shared_link
from swansongd.flush.shared_link import YIELD_S_MAX, SharedLink, lock_run

from testkit.staged import Clock
from testkit.story import MIB, Story
from testkit.waiting import until

LARGE = 1000 * MIB


class Daemon:
    """The state of a daemon, and its share of the link."""

    def __init__(self, directory: Path) -> None:
        self.story = Story(reserve_s=5.0)
        self.clock = Clock()
        self.link = SharedLink(
            directory,
            state=lambda: self.story.state,
            post=self.story.tell,
            stop=threading.Event(),
            monotonic=self.clock,
        )

    def yields(self) -> bool:
        """After a second and another look."""
        self.clock.now_s += 1.0
        self.link.look()
        return self.story.state.must_yield


def test_uploads_yield_only_while_a_verdict_of_another_daemon_waits_for_bytes(
    tmp_path: Path,
) -> None:
    """A periodic upload does not hold the link, and neither does an evacuation that sends nothing."""
    urgent, routine = Daemon(tmp_path), Daemon(tmp_path)
    routine.story.seal(1, size_bytes=LARGE)
    urgent.story.seal(1, size_bytes=LARGE)
    assert not urgent.yields()
    assert not routine.yields()

    urgent.story.notice(in_s=60.0)
    assert not urgent.yields()
    assert routine.yields()

    urgent.story.store_all()
    assert not urgent.yields()
    assert not routine.yields()


def test_an_evacuation_never_yields(tmp_path: Path) -> None:
    """Of two daemons with a notice both send; the first verdict leaves the link to the other one."""
    first, second = Daemon(tmp_path), Daemon(tmp_path)
    for daemon in (first, second):
        daemon.story.seal(1, size_bytes=LARGE)
    first.story.notice(in_s=60.0)
    assert not first.yields()
    assert second.yields()

    second.story.notice(in_s=60.0)
    assert not second.story.state.must_yield
    assert not second.yields()

    first.story.store_all()
    first.story.conclude()
    assert not first.yields(), "the other one has not looked since"
    assert not second.yields()
    assert first.yields()


def test_a_lock_is_respected_for_a_limited_time(tmp_path: Path) -> None:
    """A daemon that hangs delays the uploads of its neighbours, and does not prevent them."""
    daemon = Daemon(tmp_path)
    with (tmp_path / "link.lock").open() as hung:
        fcntl.flock(hung, fcntl.LOCK_EX)
        assert daemon.yields()
        daemon.clock.now_s += YIELD_S_MAX - 2
        assert daemon.yields()
        assert not daemon.yields()
    assert not daemon.yields()
    with (tmp_path / "link.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert daemon.yields(), "another lock is another evacuation"


@pytest.mark.fault("H07")
def test_a_lock_that_fails_once_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel had no memory for a lock."""
    monkeypatch.setattr(shared_link, "_RETRY_S", 0.01)
    daemon, real, failed = Daemon(tmp_path), fcntl.flock, threading.Event()

    def flock(fd: int, operation: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(fd, operation)

    with (tmp_path / "link.lock").open() as other:
        real(other, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock)
        daemon.link.start()
        until(lambda: daemon.story.state.must_yield, what="the lock of the other daemon")
    assert failed.is_set()


def test_a_pause_is_not_taken_for_the_bandwidth(tmp_path: Path) -> None:
    """A notice after a pause finds the bandwidth and the pace of before."""
    daemon = Daemon(tmp_path)
    story = daemon.story
    story.commit(1, after_s=1.0)
    before = story.state.learned
    assert before.bandwidth_bytes_per_s is not None
    story.seal(2, size_bytes=LARGE)
    story.tell(FlushProgress(story.flight.flush_id, MIB, MIB))
    story.tell(LinkShared(is_needed=True))
    for _ in range(100):
        story.wait(0.1)
    story.tell(LinkShared(is_needed=False))
    assert story.state.learned.bandwidth_bytes_per_s == before.bandwidth_bytes_per_s
    story.store_all(after_s=0.1)
    assert story.state.learned.pace.send_s_per_byte == before.pace.send_s_per_byte


def test_a_run_has_one_daemon_on_a_vm(tmp_path: Path) -> None:
    """The error names the key; the same name in another store is another run."""
    lock_run(tmp_path, "run", "s3://bucket/a")
    lock_run(tmp_path, "run", "s3://bucket/b")
    with pytest.raises(ConfigError, match=r"run\.name: .*s3://bucket/a.*'run'"):
        lock_run(tmp_path, "run", "s3://bucket/a")
