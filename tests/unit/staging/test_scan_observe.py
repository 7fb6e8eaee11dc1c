# SPDX-License-Identifier: Apache-2.0
"""The observer finds each set, with and without inotify; one daemon locks one staging directory."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger, capture_logs
from swansong import openat
from swansong_bucket.errors import StagingError
from swansongd.core.events import Event, Scanned
from swansongd.staging import scan
from swansongd.staging.observe import StagingObserver
from swansongd.staging.prepare import prepare
from swansongd.staging.seal import Scanner

from testkit.other_users import needs_root
from testkit.staged import ME, write_files, write_set
from testkit.waiting import until

NEVER_S = 3600.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "r1").mkdir()
    return tmp_path / "r1"


class Observing:
    """A running observer and its events."""

    def __init__(
        self,
        run: Path,
        *,
        run_fd: int | None = None,
        interval_s: float = NEVER_S,
        settle_s: float = 0.05,
    ) -> None:
        self.events: list[Scanned] = []
        self.log = CapturingLogger()
        self.scanner = Scanner(
            run, run_fd=run_fd, allowed_uids=ME, settle_s=settle_s, monotonic=time.monotonic
        )
        self.replaced: list[bool] = []
        self.observer = StagingObserver(
            self.scanner,
            self._post,
            self.log,
            interval_s=interval_s,
            replaced=lambda: self.replaced.append(True),
        )

    def _post(self, event: Event) -> None:
        assert isinstance(event, Scanned)
        self.events.append(event)

    def until_staged(self, count: int) -> None:
        until(lambda: self.events and len(self.events[-1].staged) == count, what=f"{count} sets")

    @property
    def log_lines(self) -> list[str]:
        return [str(call.args[0]) for call in self.log.calls]


@pytest.fixture
def observing(run: Path) -> Iterator[Callable[..., Observing]]:
    started: list[Observing] = []

    def start(**arguments: Any) -> Observing:
        started.append(Observing(run, **arguments))
        started[-1].observer.start()
        until(lambda: started[-1].events, what="the first scan")
        return started[-1]

    yield start
    for one in started:
        one.observer.close()


def test_a_seal_triggers_the_scan(run: Path, observing: Callable[..., Observing]) -> None:
    """A set is posted when it gets its sealed name, long before the next periodic scan."""
    seen = observing()
    directory = write_set(run.parent / "elsewhere" / "r1")
    directory.rename(run / f"{directory.name}.partial")
    until(lambda: seen.events[-1].pending == (f"{directory.name}.partial",), what="the partial set")
    (run / f"{directory.name}.partial").rename(run / directory.name)
    seen.until_staged(1)


def test_an_adopted_set_is_posted_when_it_has_settled(
    run: Path, observing: Callable[..., Observing]
) -> None:
    """While a set settles, scans follow without a trigger."""
    seen = observing()
    (run / "step=5.ckpt").write_bytes(b"1")
    seen.until_staged(1)


@pytest.mark.fault("D11")
def test_the_periodic_scan_finds_what_inotify_lost(
    run: Path, observing: Callable[..., Observing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a single inotify event, sets are still found."""
    monkeypatch.setattr(StagingObserver, "_watch", lambda _: None)
    seen = observing(interval_s=0.02)
    write_set(run)
    seen.until_staged(1)


def test_only_changes_are_posted_unless_requested(
    run: Path, observing: Callable[..., Observing]
) -> None:
    """A scan without a change posts nothing; a requested one begins after the request, and is posted."""
    seen = observing(interval_s=0.01)
    scans = count_scans(seen.scanner)
    until(lambda: len(scans) > 5)
    assert len(seen.events) == 1
    asked_mono_s = time.monotonic()
    seen.observer.rescan()
    until(lambda: len(seen.events) == 2, what="the requested scan")
    assert seen.events[1].started_mono_s >= asked_mono_s
    assert seen.events[1].staged == seen.events[0].staged


def test_a_request_during_a_scan_gets_the_next_one(
    run: Path, observing: Callable[..., Observing]
) -> None:
    """A scan that had already begun does not answer the request."""
    seen = observing()
    inside, resume = threading.Event(), threading.Event()
    scan = seen.scanner.scan

    def held() -> Scanned:
        result = scan()
        inside.set()
        assert resume.wait(60)
        return result

    seen.scanner.scan = held  # type: ignore[method-assign]
    seen.observer.rescan()
    assert inside.wait(60)
    asked_mono_s = time.monotonic()
    seen.observer.rescan()
    resume.set()
    until(lambda: len(seen.events) >= 3, what="both answers")
    assert seen.events[1].started_mono_s < asked_mono_s <= seen.events[2].started_mono_s


def test_the_scan_does_not_trigger_itself(run: Path, observing: Callable[..., Observing]) -> None:
    """A scan opens directories and files in the watched directory, and triggers no other scan."""
    write_set(run)
    (run / "step=5.ckpt").write_bytes(b"1")
    seen = observing(interval_s=NEVER_S, settle_s=0.0)
    seen.until_staged(2)
    scans = count_scans(seen.scanner)
    seen.observer.rescan()
    until(lambda: scans)
    threading.Event().wait(0.3)  # enough time for a loop to show
    assert len(scans) == 1


def test_errors_never_end_the_observer(run: Path, observing: Callable[..., Observing]) -> None:
    """While the directory is missing, one line reports it; when it is back, the scans resume."""
    seen = observing(interval_s=0.01)
    run.rename(run.parent / "away")
    until(lambda: seen.log_lines, what="the log line")
    scans = count_scans(seen.scanner)
    until(lambda: len(scans) > 3)
    # The directory may be gone before the watch begins.
    assert [line for line in seen.log_lines if line != "staging_watch_failed"] == [
        "staging_scan_failed"
    ]
    seen.observer.rescan()
    (run.parent / "away").rename(run)
    until(lambda: len(seen.events) == 2, what="the requested scan")


@pytest.mark.fault("D13")
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_directory_that_is_replaced_is_reported_once(
    run: Path, observing: Callable[..., Observing], is_made_again: bool
) -> None:
    """In the log; and to the daemon after each scan, because it may have to finish an upload first."""
    write_set(run)
    with openat.held(openat.open_directory(run)) as fd:
        seen = observing(run_fd=fd, interval_s=0.01)
        seen.until_staged(1)
        assert not seen.replaced
        run.rename(run.parent / "away")
        if is_made_again:
            run.mkdir()
        shutil.rmtree(run.parent / "away")
        seen.until_staged(0)
        scans = count_scans(seen.scanner)
        until(lambda: len(scans) > 3)
        assert seen.log_lines.count("staging_replaced") == 1
        assert len(seen.replaced) > 2
        seen.observer.close()


def count_scans(scanner: Scanner) -> list[None]:
    scans: list[None] = []
    scan = scanner.scan

    def counting() -> Scanned:
        scans.append(None)
        return scan()

    scanner.scan = counting  # type: ignore[method-assign]
    return scans


EXHAUSTED = """
import ctypes, json, os, sys, time
from pathlib import Path
from typing import Any
from structlog.testing import CapturingLogger, capture_logs
from swansong import openat
from swansongd.staging import scan
import watchdog.observers  # before the user changes, who cannot read this Python
from swansongd.staging import scan
from swansongd.staging.observe import StagingObserver
from swansongd.staging.seal import Scanner
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
libc = ctypes.CDLL(None, use_errno=True)
while libc.inotify_init1(0) >= 0:
    pass
assert ctypes.get_errno() == 24
log, events = CapturingLogger(), []
scanner = Scanner(Path({run!r}), allowed_uids=frozenset([{uid}]), settle_s=0, monotonic=time.monotonic)
observer = StagingObserver(scanner, events.append, log, interval_s=0.01)
observer.start()
give_up = time.monotonic() + 20
def until(predicate):
    while not predicate():
        assert time.monotonic() < give_up
        time.sleep(0.01)
until(lambda: events)
Path({run!r}, "step=5.ckpt").write_bytes(b"1")
until(lambda: events[-1].staged)
print(json.dumps([call.args[0] for call in log.calls]), flush=True)
os._exit(0)
"""


@needs_root
@pytest.mark.fault("D11")
def test_without_inotify_there_is_polling() -> None:
    """If the user's inotify instances are used up, one line reports it, and polling finds the sets."""
    uid = 61000 + os.getpid() % 4000
    run = Path(tempfile.mkdtemp(prefix="swansong-"))
    os.chown(run, uid, uid)
    try:
        done = subprocess.run(
            [sys.executable, "-c", EXHAUSTED.format(uid=uid, run=str(run))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == ["staging_watch_failed"]
    finally:
        shutil.rmtree(run)


# ---------------------------------------------------------------- prepare


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_directory_of_a_run_lets_the_group_in(tmp_path: Path, mask: int) -> None:
    """Trainers write there and cannot remove other users' entries; the daemon's own directory is closed."""
    with umask(mask):
        held = prepare(tmp_path, "r1")
    assert held.path == tmp_path / "r1"
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o1770
    assert stat.S_IMODE(held.own.stat().st_mode) == 0o700
    assert sorted(os.listdir(held.path)) == [".swansongd"]
    held.release()


def test_containers_of_one_machine_are_several_vms(tmp_path: Path) -> None:
    """Boot id and path are equal in all of them; a restart of the daemon, and it alone, keeps the id."""

    def vm(boot_id: str = "boot") -> str:
        held = prepare(tmp_path, "r1")
        found = held.vm(boot_id)
        held.release()
        return found

    first = vm()
    assert vm() == first
    (tmp_path / "r1").rename(tmp_path / "of another container")
    second = vm()
    assert len({first, second, vm("the next boot")}) == 3


@pytest.mark.fault("H10")
def test_one_daemon_locks_a_run(tmp_path: Path) -> None:
    """A second daemon of the same run is refused; another run is free, and this one after the release."""
    held = prepare(tmp_path, "r1")
    with pytest.raises(StagingError, match="another swansongd") as caught:
        prepare(tmp_path, "r1")
    assert caught.value.hint
    prepare(tmp_path, "r2").release()
    held.release()
    prepare(tmp_path, "r1").release()


@pytest.mark.fault("D08")
def test_the_staging_directory_is_never_created(tmp_path: Path) -> None:
    """If the mount is missing, the daemon reports it instead of filling the root disk."""
    with pytest.raises(StagingError, match="cannot be used: No such file") as caught:
        prepare(tmp_path / "missing", "r1")
    assert "mount" in caught.value.hint
    assert os.listdir(tmp_path) == []


def test_the_staging_directory_may_be_a_link(tmp_path: Path) -> None:
    """The operator configures it, for example as a link to a local disk of the VM."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "staging").symlink_to(tmp_path / "disk")
    held = prepare(tmp_path / "staging", "r1")
    assert (tmp_path / "disk" / "r1").is_dir()
    held.release()


@pytest.mark.fault("S1", "S6")
def test_the_directory_of_a_run_must_not_be_a_link(tmp_path: Path) -> None:
    """Neither the run nor the daemon's own directory may lead elsewhere.

    The first ends the start; a link in place of the second is moved aside, because trainers can create it.
    """
    outside = write_files(tmp_path / "outside", {"a": b"1"})
    (tmp_path / "r1").symlink_to(outside)
    with pytest.raises(StagingError):
        prepare(tmp_path, "r1")
    (tmp_path / "r2").mkdir()
    (tmp_path / "r2" / ".swansongd").symlink_to(outside)
    held = prepare(tmp_path, "r2")
    assert not held.own.is_symlink()
    held.release()
    for run in ("..", ".", "", "a/b", "/etc", ".hidden"):
        with pytest.raises(StagingError, match="name of a directory"):
            prepare(tmp_path, run)
    assert os.listdir(outside) == ["a"]


@needs_root
def test_an_unwritable_staging_directory_is_named(tmp_path: Path) -> None:
    """Without permission to write, the start ends with one line and the fix."""
    for directory in (tmp_path, *tmp_path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            directory.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(StagingError, match="Permission denied") as caught:
            prepare(tmp_path, "r1")
    finally:
        os.seteuid(0)
    assert "write" in caught.value.hint


def test_a_deep_tree_does_not_prevent_the_start(tmp_path: Path) -> None:
    """1,500 levels: the start ignores them, and their removal does not recurse."""
    run = tmp_path / "r1"
    prepare(tmp_path, "r1").release()
    try:
        for parent in (run, run / ".swansongd"):
            fd = openat.open_directory(parent)
            for name in ["0123456789abcdef.removing", *["x"] * 1500]:
                below = openat.make_directory(name, dir_fd=fd, mode=0o700)
                os.close(fd)
                fd = below
            os.close(fd)
        held = prepare(tmp_path, "r1")
        scan.remove_leftovers(held.fd)
        assert os.listdir(held.own) == []
        assert (run / "0123456789abcdef.removing").exists()
        held.release()
    finally:  # too deep for pytest
        subprocess.run(["rm", "-rf", run], check=True)


@pytest.mark.fault("D02")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_does_not_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Without space or inodes the daemon starts, and logs it."""
    prepare(tmp_path, "r1").release()

    def full(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(openat, "create_file", full)
    with capture_logs() as lines:
        prepare(tmp_path, "r1").release()
    assert [line["event"] for line in lines] == ["staging_full"]


def test_a_foreign_entry_is_moved_aside_and_reported(tmp_path: Path) -> None:
    """A file in place of the daemon's own directory is neither used nor deleted."""
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / ".swansongd").write_text("planted")
    with capture_logs() as lines:
        held = prepare(tmp_path, "r1")
    (line,) = lines
    assert line["event"] == "staging_entry_displaced"
    assert (held.path / line["to"]).read_text() == "planted"
    assert stat.S_IMODE(held.own.stat().st_mode) == 0o700
    held.release()


@pytest.mark.fault("D06")
def test_a_power_cut_cannot_lose_the_directory_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry in staging is synced before trainers seal sets in it."""
    synced: list[tuple[int, bool]] = []

    def fsync(fd: int) -> None:
        synced.append((os.fstat(fd).st_ino, (tmp_path / "run").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    prepare(tmp_path, "run").release()
    assert (tmp_path.stat().st_ino, True) in synced
