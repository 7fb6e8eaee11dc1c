# SPDX-License-Identifier: Apache-2.0
"""Notifications to systemd, as in sd_notify(3): one datagram each."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class SystemdNotifier:
    """Sends to NOTIFY_SOCKET; does nothing if that variable is not set.

    Args:
        environment: of the process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._status = ""
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval_s: float | None = None
        """Interval at which to call :meth:`watchdog`: half of systemd's limit; None without a watchdog."""
        if watchdog_us.isdigit() and int(watchdog_us) > 0 and is_ours:
            self.watchdog_interval_s = int(watchdog_us) / 2e6

    @property
    def has_systemd(self) -> bool:
        """Whether systemd started this process and expects notifications."""
        return bool(self._address)

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; sent only when it changed."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self, *, within_s: float) -> None:
        """Report that the daemon stops, and extend the timeout: it exits or reports within ``within_s``.

        systemd then waits that long even beyond TimeoutStopSec=, and never less than TimeoutStopSec=.
        """
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def store(self, name: str, fd: int) -> None:
        """Have systemd store a copy of ``fd`` and pass it to the next start of the daemon.

        systemd ignores this unless the unit sets FileDescriptorStoreMax=.
        """
        self._send(f"FDSTORE=1\nFDNAME={name}", fd)

    def drop(self, name: str) -> None:
        """Have systemd close all descriptors that it stores under this name."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, message: str, *fds: int) -> None:
        if self._address:
            with suppress(OSError):  # the daemon works without systemd's attention
                # Not socket.send_fds: in Python 3.11 it ignores the address.
                held = (
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                )
                self._socket.sendmsg([message.encode()], held, 0, self._address)
