# SPDX-License-Identifier: Apache-2.0
"""Tells systemd how we are: sd_notify(3), which is one datagram."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class SystemdNotifier:
    """Sends to NOTIFY_SOCKET; does nothing where there is none.

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
        """How often to call :meth:`watchdog`: half of what systemd allows."""
        if watchdog_us.isdigit() and int(watchdog_us) > 0 and is_ours:
            self.watchdog_interval_s = int(watchdog_us) / 2e6

    @property
    def has_systemd(self) -> bool:
        """Whether there is anybody to tell."""
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
        """We are on the way out, and systemd hears from us again, or we are gone, within so long.

        Until then it waits, though TimeoutStopSec= may be over by that time; it never waits less than that.
        """
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def keep(self, name: str, fd: int) -> None:
        """Let systemd hold a copy of ``fd``, and hand it to the next start of the daemon.

        It does so only if the unit has FileDescriptorStoreMax=.
        """
        self._send(f"FDSTORE=1\nFDNAME={name}", fd)

    def drop(self, name: str) -> None:
        """Let systemd close all that it holds under this name."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, message: str, *fds: int) -> None:
        if self._address:
            with suppress(OSError):  # a systemd that does not listen changes nothing for us
                # Not socket.send_fds: Python 3.11's leaves the address out.
                held = (
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                )
                self._socket.sendmsg([message.encode()], held, 0, self._address)
