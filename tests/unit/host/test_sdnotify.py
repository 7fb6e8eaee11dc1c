# SPDX-License-Identifier: Apache-2.0
"""Notifications to systemd, on a real datagram socket."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swansongd.host.sdnotify import SystemdNotifier

NewNotifier = Callable[[dict[str, str]], SystemdNotifier]


class Systemd:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.environment = {"NOTIFY_SOCKET": address}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def received(self) -> list[str]:
        """Every datagram so far: a local one arrives as soon as it is sent."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    """A socket in the file system, and one in the abstract name space."""
    path = str(tmp_path / "notify")
    made = Systemd(path if request.param == "path" else f"@swansong-{secrets.token_hex(8)}")
    yield made
    made.close()


@pytest.fixture
def notifier_for() -> Iterator[NewNotifier]:
    """Makes notifiers that are closed at the end of the test; the daemon never closes its own."""
    made: list[SystemdNotifier] = []

    def make(environment: dict[str, str]) -> SystemdNotifier:
        made.append(SystemdNotifier(environment))
        return made[-1]

    yield make
    for notifier in made:
        notifier._socket.close()


def test_ready_watchdog_and_stopping(systemd: Systemd, notifier_for: NewNotifier) -> None:
    """Each is one datagram, in the format of sd_notify(3); the timeout is in microseconds."""
    notifier = notifier_for(systemd.environment)
    notifier.ready()
    notifier.watchdog()
    notifier.stopping(within_s=90.5)
    assert systemd.received() == [
        "READY=1",
        "WATCHDOG=1",
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=90500000",
    ]


def test_a_status_is_sent_once_per_change(systemd: Systemd, notifier_for: NewNotifier) -> None:
    notifier = notifier_for(systemd.environment)
    for text in ("IDLE", "IDLE", "ARMED", "ARMED", "IDLE"):
        notifier.status(text)
    assert systemd.received() == ["STATUS=IDLE", "STATUS=ARMED", "STATUS=IDLE"]


def test_a_systemd_that_died_or_does_not_read_blocks_nothing(
    systemd: Systemd, notifier_for: NewNotifier
) -> None:
    """Neither a full queue nor a closed socket blocks or raises."""
    notifier = notifier_for(systemd.environment)
    for number in range(2000):
        notifier.status(str(number))
    assert 0 < len(systemd.received()) < 2000
    systemd.close()
    notifier.watchdog()


def test_without_systemd_nothing_happens(notifier_for: NewNotifier) -> None:
    notifier = notifier_for({})
    notifier.ready()
    notifier.status("IDLE")
    assert notifier.watchdog_interval_s is None


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_interval_is_half_of_the_limit(
    environment: dict[str, str], interval_s: float | None, notifier_for: NewNotifier
) -> None:
    """Only if WATCHDOG_PID is this process, or not set."""
    assert notifier_for(environment).watchdog_interval_s == interval_s
