# SPDX-License-Identifier: Apache-2.0
"""Shutdowns announced by logind, over a real bus."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.model import DeadlineQuality, Health, Severity
from swansongd.sources import host, logind
from swansongd.sources.logind import LogindError, LogindSource

from testkit.emulators.fake_logind import spoofed_shutdown, users_of
from testkit.emulators.process import EmulatorProcess
from testkit.source_run import SourceRun, control
from testkit.waiting import until


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses after a failure."""
    monkeypatch.setattr(logind, "_RETRY_MAX_S", 0.1)


class FakeHost:
    """A host with an emulated logind."""

    def __init__(self, emulator: EmulatorProcess) -> None:
        self._url = emulator.url
        self.bus = str(self.order("state")["bus"])

    def order(self, name: str, **body: object) -> Any:
        return control(self._url, name, **body)

    def shows(self, **facts: object) -> None:
        """Wait until the state of the host contains these facts."""
        until(lambda: facts.items() <= self.order("state").items(), what=str(facts))

    def source(self, **options: Any) -> LogindSource:
        return source(**{"bus": self.bus, **options})


def source(*, monotonic: Callable[[], float] = time.monotonic, **options: Any) -> LogindSource:
    return LogindSource(
        wanted_delay_s=20.0, stop_grace_s=11.0, boot_id="boot", monotonic=monotonic, **options
    )


@pytest.fixture
def fake_host() -> Iterator[FakeHost]:
    with EmulatorProcess("testkit.emulators.fake_logind") as emulator:
        yield FakeHost(emulator)


def test_a_healthy_logind_is_ok_and_the_lock_is_held(fake_host: FakeHost) -> None:
    """One delay lock is taken, the status shows the longest delay, and the end releases the lock."""
    with SourceRun(fake_host.source()) as run:
        run.await_health(Health.OK)
        assert run.statuses[-1].reason == "logind delays a shutdown by at most 24 s"
        fake_host.shows(locks=1)
    fake_host.shows(locks=0, taken=1)
    assert run.notices == []


@pytest.mark.fault("N15", "H03")
@pytest.mark.parametrize("metadata", [True, False])
def test_a_shutdown_is_a_notice_and_waits_for_the_release(
    fake_host: FakeHost, metadata: bool
) -> None:
    """One notice for both signals, due before logind's delay ends; release() lets the shutdown continue."""
    watched = fake_host.source()
    with SourceRun(watched) as run:
        run.await_health(Health.OK)
        watched.release()  # without a shutdown it has no effect
        fake_host.shows(locks=1)

        before_mono_s = time.monotonic()
        fake_host.order("shutdown", type="reboot", metadata=metadata)
        notice = run.await_notice()
        assert (notice.source, notice.kind) == ("logind", "os-shutdown")
        assert notice.severity is Severity.SHUTTING_DOWN
        assert notice.identity == "logind:boot:1"
        assert notice.deadline_quality is DeadlineQuality.DERIVED
        assert before_mono_s + 23 <= notice.deadline_mono_s <= time.monotonic() + 23
        assert notice.detail == ("reboot" if metadata else "PrepareForShutdown")
        fake_host.shows(locks=1, shutdown="waiting")

        watched.release()
        watched.release()
        fake_host.shows(locks=0, shutdown="gone")
    assert len(run.notices) == 1
    assert run.withdrawals == []


@pytest.mark.fault("N15")
def test_a_cancelled_shutdown_is_withdrawn_and_a_new_lock_taken(fake_host: FakeHost) -> None:
    """The next shutdown waits again, and is another notice."""
    watched = fake_host.source()
    with SourceRun(watched) as run:
        run.await_health(Health.OK)
        fake_host.order("shutdown")
        run.await_notice()
        watched.release()
        fake_host.shows(locks=0)

        fake_host.order("cancel")
        run.await_withdrawal()
        assert run.withdrawals[0].source == "logind"
        fake_host.shows(locks=1, taken=2)

        fake_host.order("shutdown")
        run.await_notice(2)
        assert run.notices[1].identity == "logind:boot:2"
        fake_host.shows(locks=1, shutdown="waiting")


def test_a_daemon_that_starts_during_a_shutdown_sees_it(fake_host: FakeHost) -> None:
    """The property shows the shutdown; logind grants no lock any more, so the time is short."""
    fake_host.order("shutdown")
    with SourceRun(fake_host.source()) as run:
        notice = run.await_notice()
        assert notice.deadline_quality is DeadlineQuality.ASSUMED
        assert notice.deadline_mono_s <= time.monotonic() + 11
        assert not run.is_now(Health.BLIND)


def test_a_shutdown_that_ended_while_no_daemon_ran_is_withdrawn(fake_host: FakeHost) -> None:
    """The restarted daemon has its notice from the disk; during the shutdown it stays."""
    watched = fake_host.source()
    watched.has_earlier = True
    with SourceRun(watched) as run:
        run.await_withdrawal()
        fake_host.order("shutdown")
        run.await_notice()
    again = fake_host.source()
    again.has_earlier = True
    with SourceRun(again) as run:
        run.await_notice()
        assert run.withdrawals == []


class Store:
    """The lock in systemd's file descriptor store."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def store(self, lock_fd: int | None) -> None:
        while self.held:
            os.close(self.held.pop())
        if lock_fd is not None:
            self.held.append(os.dup(lock_fd))


@pytest.mark.fault("H01")
def test_a_lock_that_was_stored_over_a_restart_still_counts(fake_host: FakeHost) -> None:
    """A copy of the lock is stored during a shutdown; the next daemon has the whole delay."""
    store = Store()
    with SourceRun(fake_host.source(store_lock=store.store)) as run:
        run.await_health(Health.OK)
        fake_host.order("shutdown")
        run.await_notice()
    fake_host.shows(locks=1, shutdown="waiting")  # the source has ended, and the lock is held

    again = fake_host.source(lock_fd=os.dup(store.held[0]), store_lock=store.store)
    with SourceRun(again) as run:
        run.await_notice()
        assert run.notices[0].deadline_quality is DeadlineQuality.DERIVED
        fake_host.shows(locks=1, shutdown="waiting")
        again.release()
        fake_host.shows(locks=0, shutdown="gone")
    assert store.held == []


def test_the_lock_is_not_stored_before_a_shutdown(fake_host: FakeHost) -> None:
    """If the daemon ends before a shutdown, or after a cancelled one, nothing delays the next one."""
    store = Store()
    with SourceRun(fake_host.source(store_lock=store.store)) as run:
        run.await_health(Health.OK)
        assert store.held == []
        fake_host.order("shutdown")
        run.await_notice()
        assert store.held
        fake_host.order("cancel")
        run.await_withdrawal()
        assert store.held == []
        fake_host.shows(locks=1)
    fake_host.shows(locks=0)


def test_an_inherited_lock_is_not_stored_again(fake_host: FakeHost) -> None:
    """The second daemon of a shutdown has the only copy; at the next shutdown the lock is stored again."""
    connection = logind.Logind(fake_host.bus)
    inherited_fd = connection.take_delay_lock()
    connection.close()
    fake_host.order("shutdown")
    store = Store()
    with SourceRun(fake_host.source(lock_fd=inherited_fd, store_lock=store.store)) as run:
        run.await_notice()
        assert store.held == []
        fake_host.order("cancel")
        run.await_withdrawal()
        fake_host.order("shutdown")
        run.await_notice(2)
        assert store.held
        store.store(None)
    fake_host.shows(locks=0, shutdown="gone")


def test_a_short_delay_is_degraded_with_the_fix(fake_host: FakeHost) -> None:
    """The reason names the file and the command; a shutdown still raises a notice, with that delay."""
    fake_host.order("delay", max_s=5)
    with SourceRun(fake_host.source()) as run:
        run.await_health(Health.DEGRADED)
        reason = run.statuses[-1].reason
        assert "by at most 5 s, less than the 20 s" in reason
        assert "zz-swansong.conf" in reason
        assert "systemctl restart systemd-logind" in reason
        fake_host.order("shutdown")
        run.await_notice()
        assert run.notices[0].deadline_mono_s <= time.monotonic() + 4


def test_a_restarted_logind_is_read_again(fake_host: FakeHost) -> None:
    """The fix takes effect without a restart of the daemon, and the lock is held throughout."""
    fake_host.order("delay", max_s=5)
    with SourceRun(fake_host.source()) as run:
        run.await_health(Health.DEGRADED)
        fake_host.order("stop")
        until(lambda: re.search("system bus|restarted", run.statuses[-1].reason))
        assert not run.is_now(Health.UNSUPPORTED)
        fake_host.shows(locks=1)
        fake_host.order("delay", max_s=30)
        fake_host.order("start")
        run.await_health(Health.OK)
        fake_host.shows(locks=1, taken=2)


def test_without_permission_for_a_lock_shutdowns_raise_notices(fake_host: FakeHost) -> None:
    """Degraded with the fix; the notice has the time that units get; with permission the lock is taken."""
    fake_host.order("deny", denied=True)
    with SourceRun(fake_host.source()) as run:
        run.await_health(Health.DEGRADED, "Permission denied")
        assert "polkitd" in run.statuses[-1].reason
        fake_host.order("shutdown")
        run.await_notice()
        assert run.notices[0].deadline_quality is DeadlineQuality.ASSUMED
        assert run.notices[0].deadline_mono_s <= time.monotonic() + 11
        fake_host.order("cancel")
        run.await_withdrawal()
        fake_host.order("deny", denied=False)
        run.await_health(Health.OK)
        fake_host.shows(locks=1)


def test_a_shutdown_and_its_lock_survive_the_loss_of_the_bus(fake_host: FakeHost) -> None:
    """The property shows the same shutdown again: it is not a second notice.  The next one is."""
    with SourceRun(fake_host.source()) as run:
        run.await_health(Health.OK)
        fake_host.order("shutdown")
        run.await_notice()
        fake_host.order("stop_bus")
        run.await_health(Health.DEGRADED)
        fake_host.shows(locks=1)
        fake_host.order("start_bus")
        run.await_health(Health.OK)
        assert len(run.notices) == 1
        assert run.withdrawals == []
        fake_host.order("cancel")
        run.await_withdrawal()
        fake_host.order("shutdown")
        run.await_notice(2)


@pytest.mark.parametrize("has_bus", [True, False])
def test_a_host_without_logind_is_unsupported(
    fake_host: FakeHost, tmp_path: Path, has_bus: bool
) -> None:
    """No crash; a logind that appears later is found."""
    fake_host.order("stop")
    bus = fake_host.bus if has_bus else f"unix:path={tmp_path}/none"
    with SourceRun(fake_host.source(bus=bus)) as run:
        run.await_health(Health.UNSUPPORTED)
        words = "systemd-logind is not on" if has_bus else "system bus is missing"
        assert words in run.statuses[-1].reason
        if has_bus:
            fake_host.order("start")
            run.await_health(Health.OK)
    assert run.notices == []


@contextmanager
def a_bus(directory: Path, talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a bus that talks in this way to each peer."""
    peers = []
    with socket.create_server(str(directory / "bus"), family=socket.AF_UNIX) as listener:

        def serve() -> None:
            while True:
                try:
                    peers.append(listener.accept()[0])
                except OSError:
                    return
                talk(peers[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"unix:path={directory}/bus"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("greets", [False, True])
def test_a_bus_that_never_responds_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greets: bool
) -> None:
    """A bus that accepts the connection and then does not respond: degraded, then blind, and no hang."""
    monkeypatch.setattr(logind, "CALL_TIMEOUT_S", 0.2)
    now = [0.0]

    def talk(peer: socket.socket) -> None:
        if greets:
            for answer in (b"OK 0123456789abcdef0123456789abcdef", b"AGREE_UNIX_FD"):
                while not peer.recv(100).endswith(b"\r\n"):
                    pass
                peer.sendall(answer + b"\r\n")

    with a_bus(tmp_path, talk) as bus:
        with SourceRun(source(bus=bus, monotonic=lambda: now[0])) as run:
            run.await_health(Health.DEGRADED)
            now[0] = 31.0
            run.await_health(Health.BLIND, "does not respond")
        with pytest.raises(LogindError):
            logind.read_inhibit_delay_max_s(bus)


def test_a_bus_with_another_protocol_is_degraded(tmp_path: Path) -> None:
    """Garbage in place of D-Bus does not crash the source."""

    def talk(peer: socket.socket) -> None:
        peer.recv(100)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        peer.shutdown(socket.SHUT_RDWR)

    with a_bus(tmp_path, talk) as bus, SourceRun(source(bus=bus)) as run:
        run.await_health(Health.DEGRADED)


def test_signals_of_other_senders_are_ignored(fake_host: FakeHost) -> None:
    """A shutdown signal that another user of the bus sends directly raises no notice."""
    with SourceRun(fake_host.source()) as run:
        run.await_health(Health.OK)
        for user in users_of(fake_host.bus):
            spoofed_shutdown(fake_host.bus, user)
        fake_host.order("shutdown", type="kexec")
        run.await_notice()
    assert [notice.detail for notice in run.notices] == ["kexec"]


def test_the_delay_can_be_read_without_a_source(fake_host: FakeHost) -> None:
    """For doctor: the effective delay in seconds, and whether a shutdown is in progress."""
    fake_host.order("delay", max_s=7.5)
    assert logind.read_inhibit_delay_max_s(fake_host.bus) == 7.5
    assert logind.is_preparing_for_shutdown(fake_host.bus) is False
    fake_host.order("shutdown")
    assert logind.is_preparing_for_shutdown(fake_host.bus) is True


def test_the_lock_is_not_inherited(fake_host: FakeHost) -> None:
    """A child process that survives the daemon does not delay the shutdown."""
    with logind.Logind(fake_host.bus) as connection:
        lock_fd = connection.take_delay_lock()
    assert os.get_inheritable(lock_fd) is False
    os.close(lock_fd)
    fake_host.shows(locks=0)


# ------------------------------------------------------------------ what SIGTERM means


def stand_in(tmp_path: Path, state: str) -> dict[str, Any]:
    """A host with systemd, whose ``systemctl is-system-running`` prints this state."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\n[ "$1" = is-system-running ] && echo {state}\n')
    systemctl.chmod(0o755)
    return {"systemd_directory": tmp_path, "systemctl": str(systemctl)}


@pytest.mark.fault("H02", "H03")
def test_if_logind_reports_no_shutdown_systemd_decides_what_sigterm_means(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    """No response counts as a shutdown."""
    for state, is_stopping in (
        *(("running", False), ("degraded", False), ("starting", False), ("maintenance", False)),
        *(("stopping", True), ("offline", True), ("", True)),
    ):
        assert host.is_host_stopping(fake_host.bus, **stand_in(tmp_path, state)) is is_stopping


@pytest.mark.fault("H03")
def test_sigterm_during_a_shutdown_by_logind_is_a_notice(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    """logind reports it first, when systemd still reports "running"."""
    fake_host.order("shutdown")
    assert host.is_host_stopping(fake_host.bus, **stand_in(tmp_path, "running")) is True


@pytest.mark.fault("H02", "H03")
def test_sigterm_without_logind_is_judged_by_systemd(tmp_path: Path) -> None:
    """Without a bus systemd alone decides; without systemd it is a shutdown."""
    bus = f"unix:path={tmp_path}/none"
    assert host.is_host_stopping(bus, **stand_in(tmp_path, "running")) is False
    assert host.is_host_stopping(bus, **stand_in(tmp_path, "stopping")) is True
    nowhere = {"systemd_directory": tmp_path, "systemctl": str(tmp_path / "nowhere")}
    assert host.is_host_stopping(bus, **nowhere) is True
    elsewhere = stand_in(tmp_path, "running") | {"systemd_directory": tmp_path / "none"}
    assert host.is_host_stopping(bus, **elsewhere) is True
