# SPDX-License-Identifier: Apache-2.0
"""The guard, against a fake daemon on a real socket."""

from __future__ import annotations

import functools
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swansong
from swansong._checkpoint import restore_query
from swansong._checkpoint.saver import SaveCost
from swansong._checkpoint.training_health import LossMonitor
from swansong._daemon import daemon_channel
from swansong._daemon.daemon_channel import TICK_S, WATCHFUL_TICK_S
from swansong._daemon.progress_reports import Reporter
from swansong._ranks import agreement
from swansong._ranks.agreement import Agreement
from swansong.layout import RankManifest
from swansong.protocol import (
    Accepted,
    Bye,
    Committed,
    Declined,
    Failed,
    Fenced,
    Hello,
    Message,
    Progress,
    Refused,
    Request,
    Restored,
    RestoreQuery,
    Restoring,
    Sealed,
    Target,
    Withdrawn,
)
from swansong.rank_files import load_tree

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Attach, Counter, set_rank, start_of
from testkit.waiting import until


@pytest.fixture
def guard(daemon: FakeDaemon, attach: Attach, counter: Counter) -> swansong.Guard:
    """The guard of ``counter`` in a fresh run."""
    guard = attach({"counter": counter})
    assert guard.restore() == 0
    return guard


def train(guard: swansong.Guard, counter: Counter, first: int, last: int) -> None:
    """Complete the steps ``first`` to ``last``."""
    for step in range(first, last + 1):
        counter.value = step
        guard.step(step, loss=1.0 / step)


def train_until(guard: swansong.Guard, counter: Counter, done: Callable[[], object]) -> int:
    """Train, about one step in 10 ms, until ``done``; returns the last step."""

    def one() -> bool:
        counter.value += 1
        guard.step(counter.value)
        return bool(done())

    until(one, what="done() after a step")
    return counter.value


def set_target(daemon: FakeDaemon, guard: swansong.Guard, step: int) -> None:
    """Send the target of the request r1, and wait until the guard knows it."""
    daemon.send(Target("r1", step))
    until(lambda: guard._agreement._active is not None and guard._agreement._active.target)


def manifest_of(directory: Path, rank: int = 0) -> RankManifest:
    return RankManifest.decode((directory / f"rank-{rank:05d}.json").read_bytes())


def value_in(directory: Path, rank: int = 0) -> int:
    return int(load_tree(directory / f"rank-{rank:05d}")["objects"]["counter"]["value"])


# ---------------------------------------------------------------- without a daemon


@pytest.mark.fault("T08")
def test_without_a_daemon_nothing_happens(attach: Attach, counter: Counter) -> None:
    """Every call does nothing, and the run is fresh; a rollback is an error."""
    guard = attach({"counter": counter}, every_steps=2)
    assert guard.restore() == 0
    train(guard, counter, 1, 20)
    with guard.critical():
        assert guard.poll() is None
    assert not guard.save(20)
    assert guard.request is None
    assert not guard.should_stop
    assert not guard.fenced
    assert guard.last_committed is None
    with pytest.raises(swansong.RestoreError, match="no daemon"):
        guard.rollback()
    assert not guard.finish()
    assert not guard.finished
    guard.step(21)


def test_a_step_reads_its_attributes_at_full_speed(attach: Attach, counter: Counter) -> None:
    """CPython 3.11 keeps up to 29 attributes of an object without a dictionary, which costs 15 ns a step."""
    guard = attach({"counter": counter})
    for each in (guard, guard._agreement, guard._health, guard._session.redone, guard._session):
        assert len(vars(each)) < 30


def test_steps_without_a_number_are_counted(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """Steps count from 1, after a restore from its step, and after a given number from that number."""
    guard = attach({"counter": counter}, every_steps=3)
    daemon.wait_connected()
    guard.step(loss=1.0)
    until(lambda: guard.save(1), what="the welcome")
    for _ in range(2):
        guard.step(loss=1.0)
    guard.step(10)
    guard.step()
    guard.step()
    assert sorted(int(path.name[5:17]) for path in daemon.wait_sealed(4)) == [1, 3, 10, 12]
    (first,) = [path for path in daemon.sealed() if "001." in path.name]
    daemon.restorable = lambda: (first, 1)
    resumed = attach({"counter": counter}, every_steps=3)
    assert resumed.restore() == 1
    resumed.step()
    assert resumed._agreement.step == 2


def test_a_forbidden_socket_is_explained(
    attach: Attach,
    counter: Counter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without permission: one warning with the path and the fix, and no checkpoints."""

    def refuse(self: object, path: str) -> None:
        raise PermissionError(13, "Permission denied")

    # No mode stops root, as whom the tests may run.
    monkeypatch.setattr(
        "swansong._daemon.daemon_channel.socket.socket.connect", refuse, raising=False
    )
    guard = attach({"counter": counter})
    assert guard.restore() == 0
    assert "trainer.sock" in caplog.text
    assert "group" in caplog.text
    train(guard, counter, 1, 3)


# ---------------------------------------------------------------- requests


def test_a_request_is_answered_and_sealed_at_the_target(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """The hooks accept immediately with the last step, and save at exactly the target."""
    guard = attach({"counter": counter}, run="run")
    assert guard.restore() == 0
    train(guard, counter, 1, 10)
    daemon.request("r1", seconds_left=1000.0)
    assert daemon.wait_for(Accepted) == Accepted("r1", 10)
    request = guard.request
    assert request is not None
    assert request.id == "r1"
    assert 900 < request.deadline_mono_s - time.monotonic() <= 1000
    train(guard, counter, 11, 14)
    (directory,) = daemon.sealed()
    assert daemon.partial() == []
    assert value_in(directory) == 11
    manifest = manifest_of(directory)
    assert (manifest.step, manifest.kind, manifest.request_id) == (11, "emergency", "r1")
    assert manifest.health == {"loss": 1 / 11, "loss_is_finite": 1.0}
    for entry in manifest.files:
        assert (directory / entry.path).stat().st_size == entry.size_bytes
    sealed = daemon.wait_for(Sealed)
    assert (sealed.request_id, sealed.step, sealed.directory) == ("r1", 11, directory.name)
    assert sealed.size_bytes == sum(entry.size_bytes for entry in manifest.files)
    assert guard.request is None


def test_no_step_boundary_is_passed_before_the_target_is_known(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Accepted the loop blocks at its next boundary; with the target it runs to the target."""
    monkeypatch.setattr(agreement, "AGREEMENT_LIMIT_S", 60.0)
    daemon.sends_targets = False
    train(guard, counter, 1, 7)
    daemon.request(seconds_left=1000.0)
    assert daemon.wait_for(Accepted).step == 7
    trainer = threading.Thread(target=train, args=(guard, counter, 8, 20), daemon=True)
    trainer.start()
    until(lambda: counter.value == 8)
    trainer.join(0.3)
    assert counter.value == 8
    daemon.send(Target("r1", 12))
    assert daemon.wait_for(Sealed).step == 12
    trainer.join(60)
    assert counter.value == 20
    assert value_in(daemon.sealed()[0]) == 12


@pytest.mark.fault("T04")
def test_without_a_target_the_wait_ends(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a tenth of the time left the rank declines, and training continues without another wait."""
    daemon.sends_targets = False
    daemon.request(seconds_left=2.0)
    daemon.wait_for(Accepted)
    begun_s = time.monotonic()
    train(guard, counter, 1, 1)
    assert time.monotonic() - begun_s >= 0.2
    assert daemon.wait_for(Declined).request_id == "r1"
    assert guard.request is None
    monkeypatch.setattr(guard._agreement._changed, "wait_for", pytest.fail)
    train(guard, counter, 2, 50)
    assert len(daemon.all_of(Declined)) == 1


def test_a_late_target_is_still_met(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has declined still saves at a target that is a later step."""
    monkeypatch.setattr(agreement, "AGREEMENT_LIMIT_S", 0.1)
    daemon.sends_targets = False
    daemon.request(seconds_left=1000.0)
    daemon.wait_for(Accepted)
    train(guard, counter, 1, 3)
    daemon.wait_for(Declined)
    set_target(daemon, guard, 1000)
    train(guard, counter, 4, 1001)
    assert daemon.wait_for(Sealed).step == 1000


def test_a_withdrawn_request_is_forgotten(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter
) -> None:
    """Withdrawn unblocks a waiting loop immediately, and nothing is saved."""
    daemon.sends_targets = False
    daemon.request()
    daemon.wait_for(Accepted)
    trainer = threading.Thread(target=train, args=(guard, counter, 1, 9), daemon=True)
    trainer.start()
    until(lambda: counter.value == 1)
    daemon.send(Withdrawn("r1", "false alarm"))
    trainer.join(60)
    assert counter.value == 9
    assert guard.request is None
    assert daemon.sealed() == []


def test_a_step_that_does_not_advance_is_reported_once(
    guard: swansong.Guard, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that reports its epoch at each batch would save nothing until the next epoch."""
    train(guard, counter, 1, 5)
    assert not caplog.records
    for _ in range(20):
        guard.step(5)
    (record,) = caplog.records
    assert "was called again with step 5" in record.message


@pytest.mark.fault("N09", "T07")
def test_the_same_request_is_answered_again_and_not_saved_twice(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter
) -> None:
    """A repeated request gets the same Sealed again."""
    daemon.request()
    train_until(guard, counter, daemon.sealed)
    first = daemon.wait_for(Sealed)
    daemon.request()
    train_until(guard, counter, lambda: len(daemon.all_of(Sealed)) == 2)
    assert daemon.wait_for(Sealed, 2) == first
    assert len(daemon.sealed()) == 1


@pytest.mark.fault("T09")
@pytest.mark.parametrize("when", ["waiting for the target", "on the way to it", "after sealing"])
def test_the_answer_is_repeated_to_a_restarted_daemon(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter, when: str
) -> None:
    """The hooks reconnect and repeat the answer; nothing is saved twice."""
    daemon.sends_targets = False
    train(guard, counter, 1, 3)
    daemon.request()
    daemon.wait_for(Accepted)
    trainer = threading.Thread(target=train, args=(guard, counter, 4, 4), daemon=True)
    if when == "waiting for the target":
        trainer.start()
        until(lambda: counter.value == 4)
    else:
        set_target(daemon, guard, 5)
        train(guard, counter, 4, 4)
    if when == "after sealing":
        train(guard, counter, 5, 5)
        daemon.wait_for(Sealed)
    daemon.stop()
    daemon.received.clear()
    daemon.start()
    assert daemon.wait_for(Hello).step == (5 if when == "after sealing" else 4)
    if when != "after sealing":
        # The first step again: so a restarted daemon computes the same target.
        assert daemon.wait_for(Accepted) == Accepted("r1", 3)
        daemon.request()
        assert daemon.wait_for(Accepted, 2) == Accepted("r1", 3)
        set_target(daemon, guard, 5)
        if trainer.ident:
            trainer.join(60)
        train(guard, counter, 5, 5)
    assert daemon.wait_for(Sealed).step == 5
    (directory,) = daemon.sealed()
    assert value_in(directory) == 5


def test_a_critical_section_delays_the_save(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """While the state is torn nothing is written; the end of the section writes."""
    guard = attach({"counter": counter}, every_steps=3)
    guard.restore()
    train(guard, counter, 1, 2)
    with guard.critical():
        counter.value = -1
        with guard.critical():
            guard.step(3)
        assert daemon.sealed() == []
        counter.value = 3
    assert [value_in(directory) for directory in daemon.sealed()] == [3]


def test_close_answers_a_request_in_progress(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter
) -> None:
    """A run whose last step is before the target still saves before it disconnects."""
    train(guard, counter, 1, 5)
    daemon.request()
    daemon.wait_for(Accepted)
    guard.close()
    assert value_in(daemon.sealed()[0]) == 5
    assert daemon.wait_for(Bye).reason == "finished"


# ---------------------------------------------------------------- periodic and final


def test_every_steps(daemon: FakeDaemon, attach: Attach, counter: Counter) -> None:
    """Periodic checkpoints are at multiples of ``every_steps``."""
    with attach({"counter": counter}, every_steps=5) as guard:
        guard.restore()
        train(guard, counter, 1, 12)
        for step in (14, 18, 19, 20):
            counter.value = step
            guard.step(step)
    assert [value_in(directory) for directory in daemon.sealed()] == [5, 10, 18, 20]
    assert all(manifest_of(directory).kind == "periodic" for directory in daemon.sealed())
    until(lambda: len(daemon.all_of(Sealed)) == 4)
    assert [sealed.request_id for sealed in daemon.all_of(Sealed)] == [""] * 4


def test_every_s(daemon: FakeDaemon, attach: Attach, counter: Counter) -> None:
    """Periodic checkpoints by time; the daemon receives time and size of the last one."""
    guard = attach({"counter": counter}, every_s=0.1)
    guard.restore()
    train_until(guard, counter, lambda: len(daemon.sealed()) >= 2)
    train_until(guard, counter, lambda: any(p.step_s for p in daemon.all_of(Progress)))
    report = next(p for p in daemon.all_of(Progress) if p.save_s)
    assert report.save_s is not None
    assert report.save_s > 0
    assert report.save_bytes
    assert len(daemon.all_of(Progress)) <= 10


def test_finish_saves_the_end_of_the_run(
    daemon: FakeDaemon,
    attach: Attach,
    guard: swansong.Guard,
    counter: Counter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A later start has ``finished`` set and a log line, until it trains on; its own end is another one.

    A start that trains nothing leaves the end as it is.
    """
    train(guard, counter, 1, 4)
    assert not guard.finished
    assert guard.finish()
    assert guard.finished
    (directory,) = daemon.sealed()
    assert (manifest_of(directory).kind, value_in(directory)) == ("final", 4)
    daemon.restorable = lambda: (directory, 4)
    idle = attach({"counter": counter})
    idle.restore()
    assert idle.finish()
    assert daemon.sealed() == [directory]
    caplog.clear()
    again = attach({"counter": counter})
    assert again.restore() == 4
    assert again.finished
    assert [r.message for r in caplog.records if "finished at step 4" in r.message]
    train(again, counter, 5, 6)
    assert not again.finished
    assert again.finish()
    assert [value_in(path) for path in daemon.wait_sealed(2)] == [4, 6]


def test_a_run_that_stops_for_another_vm_is_not_finished(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """After ``should_stop`` a script may call finish() all the same."""
    guard = attach({"counter": counter}, stop_after_save=True)
    guard.restore()
    daemon.wait_connected()
    daemon.request()
    daemon.wait_for(Accepted)
    train_until(guard, counter, lambda: guard.should_stop)
    assert not guard.finish()
    assert [manifest_of(path).kind for path in daemon.sealed()] == ["emergency"]


def test_a_run_that_ends_early_is_not_finished(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that took fewer steps than ``at`` marks no end, and the log has both steps."""
    train(guard, counter, 1, 4)
    assert not guard.finish(at=5)
    assert not daemon.sealed()
    assert "ended at step 4 instead of 5" in caplog.text


def test_an_end_without_a_step_is_named(
    daemon: FakeDaemon, attach: Attach, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one of a loop over epochs from restore(): not after a step, with ``at``, or at a known end."""
    first = attach({"counter": counter})
    train(first, counter, 1, 4)
    until(lambda: first.save(4), what="the welcome")
    first.close()
    (directory,) = daemon.sealed()
    daemon.restorable = lambda: (directory, 4)
    for steps, at, is_named in ((0, None, True), (1, None, False), (0, 4, False)):
        caplog.clear()
        guard = attach({"counter": counter})
        start = guard.restore()
        train(guard, counter, start + 1, start + steps)
        assert guard.finish(at=at)
        assert ("this start has trained no step" in caplog.text) == is_named
    daemon.restorable = lambda: (daemon.sealed()[-1], 5)
    caplog.clear()
    guard = attach({"counter": counter})
    guard.restore()
    assert guard.finish()
    assert "trained no step" not in caplog.text


def test_a_request_is_answered_with_the_end_of_the_run(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """finish() saves once: for the request that waits, and for one that comes before the commit."""
    daemon.commits = False
    guard = attach({"counter": counter}, stop_after_save=True)
    guard.restore()
    train(guard, counter, 1, 4)
    daemon.request()
    daemon.wait_for(Accepted)
    finishing = threading.Thread(target=guard.finish)
    finishing.start()
    assert daemon.wait_for(Sealed).request_id == "r1"
    daemon.request("r2")
    assert daemon.wait_for(Sealed, 2).request_id == "r2"
    (directory,) = daemon.sealed()
    daemon.send(Committed(1, 4, is_final=True))
    finishing.join(60)
    assert manifest_of(directory).kind == "final"
    assert not guard.should_stop


def test_finish_waits_within_its_limit(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a commit the limit ends the wait; the run is finished, and one line has the reason."""
    daemon.commits = False
    train(guard, counter, 1, 4)
    assert not guard.finish(limit_s=0.2)
    assert guard.finished
    assert [r.message for r in caplog.records if "not committed yet" in r.message]


def test_an_error_in_the_loop_saves_nothing(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter
) -> None:
    """An error in the block is reported to the daemon and raised; torn state is not saved."""
    train(guard, counter, 1, 4)
    daemon.request()
    daemon.wait_for(Accepted)
    with pytest.raises(RuntimeError), guard:
        raise RuntimeError
    assert daemon.wait_for(Bye).reason == "RuntimeError"
    assert daemon.sealed() == []


def test_a_fenced_run_stops_its_periodic_checkpoints(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """``fenced`` is set, later steps save nothing, and the training loop continues."""
    guard = attach({"counter": counter}, every_steps=5)
    guard.restore()
    daemon.send(Committed(1, 99))
    daemon.send(Fenced(2))
    until(lambda: guard.fenced)
    assert guard.last_committed == Committed(1, 99)
    train(guard, counter, 1, 20)
    assert daemon.sealed() == []


# ---------------------------------------------------------------- failures


class Broken(BaseException):
    """An error that is not an Exception, as some frameworks raise."""


@pytest.mark.fault("D01", "T08")
@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("torn"), Broken()])
def test_a_failed_save_does_not_reach_the_loop(
    daemon: FakeDaemon,
    attach: Attach,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The daemon receives Failed, the log a warning; the partial directory is removed, training continues.

    So it is for a checkpoint that the script itself schedules or saves.
    """

    def save(directory: Path) -> None:
        (directory / "model.bin").write_bytes(b"half")
        raise error

    guard = attach(save=save, load=lambda _: None, every_steps=4)
    guard.restore()
    guard.step(1)
    daemon.request()
    daemon.wait_for(Accepted)
    guard.step(2)
    failed = daemon.wait_for(Failed)
    assert (failed.request_id, failed.step) == ("r1", 2)
    assert type(error).__name__ in failed.reason
    assert "failed" in caplog.text
    assert os.listdir(daemon.staging) == []
    assert not guard.save(3)
    for step in (3, 4, 5):
        guard.step(step)
    failed = [daemon.wait_for(Failed, count) for count in (2, 3)]
    assert [(each.request_id, each.step) for each in failed] == [("", 3), ("", 4)]


def test_a_staging_directory_is_used_once_it_is_usable(
    daemon: FakeDaemon, attach: Attach, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """Log and daemon get the path and the fix; requests are declined immediately instead of failing late.

    A disk that fails while the trainer connects does not cost all later checkpoints.
    """
    staging, aside = daemon.staging, daemon.staging.with_name("aside")
    staging.rename(aside)
    guard = attach({"counter": counter})
    failed = daemon.wait_for(Failed)
    assert (failed.request_id, failed.step) == ("", -1)
    assert f"cannot write to {staging}" in failed.reason
    assert "the group that owns it" in caplog.text
    assert "training continues without checkpoints" in caplog.text
    assert not guard.save(1)
    daemon.request()
    assert "cannot write" in daemon.wait_for(Declined).reason
    aside.rename(staging)
    until(lambda: guard.save(1), what="a save")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_users_interrupt_passes(
    daemon: FakeDaemon, attach: Attach, error: type[BaseException]
) -> None:
    """Ctrl-C during a save ends the script and leaves no files."""

    def save(directory: Path) -> None:
        raise error

    guard = attach(save=save, load=lambda _: None)
    guard.restore()
    with pytest.raises(error):
        guard.save(1)
    assert os.listdir(daemon.staging) == []


@pytest.mark.fault("T14")
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_group_may_read_whatever_the_umask(
    daemon: FakeDaemon, attach: Attach, counter: Counter, umask: int
) -> None:
    """The group of the staging directory can read all files, and write to none."""
    group = os.stat(daemon.staging).st_gid
    if os.geteuid() == 0:  # another user may be in no other group
        group = 54321
        os.chown(daemon.staging, -1, group)
    before = os.umask(umask)
    try:
        guard = attach({"counter": counter})
        guard.restore()
        assert guard.save(1)
    finally:
        os.umask(before)
    (sealed,) = daemon.sealed()
    for directory, _, names in os.walk(sealed):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o2750
        assert os.stat(directory).st_gid == group
        for name in names:
            facts = os.stat(os.path.join(directory, name))
            assert stat.S_IMODE(facts.st_mode) == 0o640
            assert facts.st_gid == group


def test_a_daemon_that_does_not_read_does_not_stop_the_loop(
    tmp_path: Path, attach: Attach, counter: Counter
) -> None:
    """A full socket drops the message and causes a reconnect; nothing blocks."""
    with FakeDaemon(tmp_path) as daemon:
        blocked, release = threading.Event(), threading.Event()

        def stop_reading(_query: str) -> None:
            blocked.set()
            release.wait(60)

        daemon.on_query = stop_reading
        guard = attach({"counter": counter})
        channel = guard._session.channel
        assert channel.has_connected()
        assert channel.send(RestoreQuery("q"))
        assert blocked.wait(60)  # a Hello that is read after the hang-up is not counted
        begun_s = time.monotonic()
        while channel.send(Bye("x" * 60000)):
            assert time.monotonic() - begun_s < 60
        train(guard, counter, 1, 100)
        daemon.wait_for(Hello, 2)
        release.set()


def test_invalid_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes raise when the script starts."""
    counter = Counter()
    with pytest.raises(ValueError, match="needs state="):
        swansong.attach()
    with pytest.raises(ValueError, match="not both"):
        swansong.attach({"c": counter}, save=print, load=print)
    with pytest.raises(ValueError, match="positive"):
        swansong.attach({"c": counter}, every_steps=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        swansong.attach({"c": counter})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="every_steps"):
        swansong.attach({"c": counter}, every_s=5)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first'"):
        swansong.attach({"c": counter})


# ---------------------------------------------------------------- restoring


def test_restore_from_a_directory(
    daemon: FakeDaemon, attach: Attach, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory in the argument or the environment overrides the daemon."""
    guard = attach({"counter": counter})
    for step in (3, 4):
        counter.value = step
        until(functools.partial(guard.save, step))
    three, four = map(str, daemon.sealed())
    assert attach({"counter": counter}).restore(three) == 3
    assert counter.value == 3
    monkeypatch.setenv("SWANSONG_RESTORE", four)
    assert attach({"counter": counter}).restore(three) == 4
    assert counter.value == 4
    assert daemon.all_of(RestoreQuery) == []


def test_restore_waits_while_there_is_progress(
    daemon: FakeDaemon,
    attach: Attach,
    counter: Counter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restore waits for a long download and for another VM; a stalled one is an error, not a fresh run."""
    clock_s = [0.0]
    monkeypatch.setattr(restore_query, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    guard = attach({"counter": counter})
    client = guard._session.restore

    def download(query_id: str) -> None:
        for done in range(8):
            clock_s[0] += 0.9 * restore_query.PATIENCE_S
            daemon.send(Restoring(query_id, done, 8))
            until(lambda: client._progress_mono_s == clock_s[0])
        for _ in range(3):  # nothing is fetched meanwhile
            clock_s[0] += 0.9 * restore_query.PATIENCE_S
            daemon.send(Restoring(query_id, 0, 0, waits_for="another VM"))
            until(lambda: client._progress_mono_s == clock_s[0])
        daemon.send(Restored(query_id))

    daemon.on_query = lambda query_id: threading.Thread(target=download, args=(query_id,)).start()
    assert guard.restore() == 0
    guard.close()
    assert caplog.messages.count("restore waits for another VM") == 1
    stop = threading.Event()

    def hang(query_id: str) -> None:
        while not stop.wait(0.01):
            clock_s[0] += 0.1 * restore_query.PATIENCE_S
            daemon.send(Restoring(query_id, 3, 8))

    hanging: list[threading.Thread] = []

    def start_to_hang(query_id: str) -> None:
        hanging.append(threading.Thread(target=hang, args=(query_id,)))
        hanging[0].start()

    daemon.on_query = start_to_hang
    with pytest.raises(swansong.RestoreError, match="no progress"):
        attach({"counter": counter}).restore()
    stop.set()
    hanging[0].join()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: os.unlink(d / "rank-00000.json"), "rank-00000.json"),
        (lambda d: (d / "rank-00000.json").write_bytes(b"{}"), "missing"),
        (lambda d: os.unlink(d / "rank-00000" / "state.json"), "state.json"),
        (lambda d: (d / "rank-00000" / "state.json").write_bytes(b"x"), "bytes"),
    ],
    ids=["no manifest", "bad manifest", "no file", "short file"],
)
def test_a_damaged_checkpoint_is_an_error(
    daemon: FakeDaemon,
    attach: Attach,
    counter: Counter,
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    """The error names the directory; the run does not start from step 0."""
    guard = attach({"counter": counter})
    until(lambda: guard.save(3))
    daemon.wait_for(Sealed)  # its thread has read the set
    (directory,) = daemon.sealed()
    damage(directory)
    daemon.restorable = lambda: (directory, 3)
    with pytest.raises(swansong.RestoreError, match=reason) as caught:
        attach({"counter": counter}).restore()
    assert str(directory) in str(caught.value)


def test_a_checkpoint_of_another_step_or_world_is_an_error(
    daemon: FakeDaemon, attach: Attach, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory must match the daemon's answer."""
    guard = attach({"counter": counter})
    until(lambda: guard.save(3))
    daemon.restorable = lambda: (daemon.sealed()[0], 4)
    with pytest.raises(swansong.RestoreError, match="step 3"):
        guard.restore()
    daemon.restorable = lambda: (daemon.sealed()[0], 3)
    set_rank(monkeypatch, 0)
    with pytest.raises(swansong.RestoreError, match="1 ranks saved it, and this job has 2"):
        attach({"counter": counter}).restore()


def test_a_refusal_or_an_error_of_the_daemon_is_an_error(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """A daemon that cannot restore is not mistaken for a fresh run."""
    daemon.on_query = lambda query_id: daemon.send(Restored(query_id, error="no commit is whole"))
    with pytest.raises(swansong.RestoreError, match="no commit is whole"):
        attach({"counter": counter}).restore()
    daemon.on_query = lambda _: daemon.send(Refused("this socket serves the run other"))
    with pytest.raises(swansong.RestoreError, match="serves the run other"):
        attach({"counter": counter}).restore()


def test_limits_of_the_agreement() -> None:
    """The wait is a tenth of the time left, and at most 5 s."""
    agreement = Agreement(1, None, lambda _: None)
    for number, (seconds_left, limit_s) in enumerate([(10.0, 1.0), (3600.0, 5.0), (-1.0, 0.0)]):
        agreement.request(Request(f"r{number}", "test", seconds_left))
        assert agreement._active is not None
        assert agreement._active.limit_s == limit_s


def test_the_first_new_step_is_reported_without_a_wait() -> None:
    """The daemon measures a resume by it; the reports after it are rare again."""
    said: list[Message] = []
    reporter = Reporter(
        lambda message: said.append(message) or True,  # type: ignore[func-returns-value]
        *(start_of(), LossMonitor(), SaveCost()),
    )
    reporter.started(40)
    for step in (40, 41, 42):
        reporter.tick(step)
    assert [report.step for report in said if isinstance(report, Progress)] == [40, 41]


def test_a_start_is_watched_until_its_first_step(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter
) -> None:
    """The daemon records a resume with it: the next look at the step is a tenth of a second away."""
    channel = guard._session.channel
    until(lambda: channel.tick_s == WATCHFUL_TICK_S)
    guard.step(1)
    until(lambda: channel.tick_s == TICK_S)
    until(lambda: [report.step for report in daemon.all_of(Progress)] == [0, 1])


@pytest.mark.parametrize("is_connected", [True, False])
def test_the_end_of_the_training_reports_its_last_step(is_connected: bool) -> None:
    """Also if the start was not sent yet, because no daemon was connected."""
    said: list[Message] = []
    start = start_of()
    reporter = Reporter(
        lambda message: is_connected and (said.append(message) or True),  # type: ignore[func-returns-value]
        *(start, LossMonitor(), SaveCost()),
    )
    reporter.started(40)
    reporter.tick(41)
    is_connected = True
    reporter.ended(45)
    reports = [(p.step, p.start_id) for p in said if isinstance(p, Progress)]
    assert (reports[0], reports[-1]) == ((40, start.id), (45, ""))


def test_a_short_training_reports_its_step_before_its_goodbye(
    daemon: FakeDaemon, guard: swansong.Guard, counter: Counter
) -> None:
    """It ends before the first report is due."""
    guard.step(1)
    guard.close()
    daemon.wait_for(Bye)
    steps = [message.step for message in daemon.all_of(Progress)]
    assert steps == [0, 1]


@pytest.mark.fault("T09")
@pytest.mark.parametrize("was_connected", [False, True])
def test_a_restore_waits_for_a_daemon_that_is_being_restarted(
    tmp_path: Path, attach: Attach, counter: Counter, was_connected: bool
) -> None:
    """A daemon that was connected, or whose socket refuses connections: no run starts from step 0."""
    with FakeDaemon(tmp_path) as first:
        guard = attach({"counter": counter})
        guard.restore()
        counter.value = 7
        guard.step(7)
        assert guard.save(7)
        saved = first.sealed()[0]
        guard.close()
        if was_connected:
            guard = attach({"counter": counter})
            first.wait_for(Hello, 2)
    path = tmp_path / "trainer.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))  # closed without unlink, as by SIGKILL
    if not was_connected:
        guard = attach({"counter": counter})
    channel = guard._session.channel
    until(lambda: channel._tried.is_set() and channel._socket is None)
    steps: list[int] = []
    thread = threading.Thread(target=lambda: steps.append(guard.restore()), daemon=True)
    thread.start()
    until(lambda: thread.is_alive() or steps)
    assert not steps
    path.unlink()
    with FakeDaemon(tmp_path) as second:
        second.restorable = lambda: (saved, 7)
        thread.join(60)
        assert steps == [7]


def test_a_restore_waits_for_the_first_attempt_to_connect(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was suspended after attach() has not connected yet: no run starts from step 0."""
    asks: list[str] = []
    steps: list[int] = []
    waits: list[float] = []
    daemon.on_query = asks.append
    check_listener = daemon_channel.check_listener

    def check_late(*listener: Any) -> int:
        until(lambda: steps or len(waits) > 1)
        return check_listener(*listener)

    monkeypatch.setattr(daemon_channel, "check_listener", check_late)
    guard = attach({"counts": {}})
    tried = guard._session.channel._tried
    wait = tried.wait

    def late(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return len(waits) > 1 and wait(timeout_s)

    monkeypatch.setattr(tried, "wait", late)
    thread = threading.Thread(target=lambda: steps.append(guard.restore()), daemon=True)
    thread.start()
    until(lambda: asks or steps)
    assert not steps
    daemon.send(Restored(asks[0]))
    thread.join(60)
    assert steps == [0]
