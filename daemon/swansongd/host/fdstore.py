# SPDX-License-Identifier: Apache-2.0
"""systemd's file descriptor store: state that survives a restart of the daemon.

Three things survive a crash or a restart:

- the listening socket, so that trainers wait for the next daemon instead of being refused;
- the notices in force, with the ids of their evacuations;
- logind's delay lock, while a shutdown waits for an evacuation.

When the service is stopped, systemd closes all three.

A stored lock delays the shutdown even if no daemon runs any more.  Each start therefore removes the lock from
the store, and does not store an inherited lock again.  One restart during a shutdown keeps the lock; a
second crash releases it.

Without systemd the notices are written to a file in the daemon's own directory.  That file is valid for the
current boot only.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swansong import bounds, openat

from swansongd.core.notices import REPEATS_MAX
from swansongd.host.sdnotify import SystemdNotifier
from swansongd.model import DeadlineQuality, Notice, Severity

LISTENER = "trainer-socket"
LOCK = "delay-lock"
NOTICES = "notices"
NOTICES_FILE = "notices.json"
_FIRST_FD = 3
_NOTICES_MAX_BYTES = 2**16
_NOTICES_MAX = 64
_FACTS_MAX = 64


class FdStore:
    """Stores descriptors and notices for the next daemon, and returns those of the previous one.

    If systemd's store is full or disabled, nothing is stored and nothing is returned.

    Args:
        notifier: the connection to systemd.
        environment: of the process; lists the inherited descriptors.
        boot_id: of this boot; notices from another boot are dropped, because its monotonic clock is gone.
    """

    def __init__(
        self, notifier: SystemdNotifier, environment: Mapping[str, str], *, boot_id: str = ""
    ) -> None:
        self._notifier = notifier
        self._boot_id = boot_id
        self._fds = _inherited(environment)
        self._notices: tuple[Notice, ...] = ()
        self._notices_fd = self._fds.pop(NOTICES, None)
        self._own_fd: int | None = None
        if LOCK in self._fds:
            # First of all: if this start fails later, the lock is released with the process.
            notifier.drop(LOCK)

    def use_directory(self, own_fd: int) -> None:
        """Without systemd, store the notices in this directory, which only the daemon can write."""
        if not self._notifier.has_systemd:
            self._own_fd = own_fd

    # ------------------------------------------------------------------ from the previous daemon

    def listener_fd(self, path: Path) -> int | None:
        """The inherited listening socket; None unless it is bound to ``path``."""
        fd = self._fds.pop(LISTENER, None)
        if fd is None:
            return None
        with socket.socket(fileno=os.dup(fd)) as listener:
            bound = listener.getsockname() if listener.family == socket.AF_UNIX else None
        if bound == os.fspath(path) and path.is_socket():
            return fd
        os.close(fd)
        self._notifier.drop(LISTENER)
        return None

    def lock_fd(self) -> int | None:
        """The delay lock that the previous daemon held during a shutdown; None without one."""
        return self._fds.pop(LOCK, None)

    def notices(self, now_mono_s: float) -> list[Notice]:
        """The notices that were in force and whose deadlines have not passed since."""
        # Absent, truncated, or of another version; BoundsError is a ValueError.
        with suppress(OSError, ValueError, KeyError, RecursionError):
            found = bounds.json_object(self._read(), NOTICES, _NOTICES_MAX_BYTES)
            if found["boot_id"] != self._boot_id:
                return []
            items = bounds.items(found[NOTICES], NOTICES, _NOTICES_MAX)
            notices = [_notice(facts) for facts in items]
            return [notice for notice in notices if notice.deadline_mono_s > now_mono_s]
        return []

    def _read(self) -> bytes:
        if self._own_fd is not None:
            owners = {os.geteuid()}
            return openat.read_file(
                NOTICES_FILE, dir_fd=self._own_fd, max_bytes=_NOTICES_MAX_BYTES, owners=owners
            )
        return (
            b"" if self._notices_fd is None else os.pread(self._notices_fd, _NOTICES_MAX_BYTES, 0)
        )

    # ------------------------------------------------------------------ for the next daemon

    def store_listener(self, fd: int) -> None:
        self._notifier.store(LISTENER, fd)

    def store_lock(self, fd: int | None) -> None:
        """Replace the stored lock; None only removes it."""
        self._notifier.drop(LOCK)
        if fd is not None:
            self._notifier.store(LOCK, fd)

    def store_notices(self, notices: Iterable[Notice]) -> None:
        """Replace the stored notices."""
        wanted = tuple(notices)
        if wanted == self._notices:
            return
        self._notices = wanted
        body = {"boot_id": self._boot_id, NOTICES: [asdict(item) for item in wanted]}
        data = json.dumps(body).encode()
        with suppress(
            OSError
        ):  # out of memory or disk space: the next daemon reads them from the sources
            if self._own_fd is not None:
                # No fsync: the file need not survive this boot, and the decision loop must not block.
                openat.replace_file(NOTICES_FILE, data, dir_fd=self._own_fd, durable=False)
                return
            if self._notices_fd is None:
                self._notices_fd = os.memfd_create(NOTICES)
                self._notifier.store(NOTICES, self._notices_fd)
            os.ftruncate(self._notices_fd, 0)
            os.pwrite(self._notices_fd, data, 0)


def _inherited(environment: Mapping[str, str]) -> dict[str, int]:
    """The descriptors that systemd passed to this process, by name; the last one if a name repeats."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    found: dict[str, int] = {}
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    count = environment.get("LISTEN_FDS", "0")
    for fd, name in enumerate(names[: int(count) if count.isdecimal() else 0], _FIRST_FD):
        try:
            os.set_inheritable(fd, False)
        except OSError:  # listed, but not open
            continue
        if name in found:
            os.close(found[name])
        found[name] = fd
    return found


def _notice(value: Any) -> Notice:
    facts = bounds.mapping(value, "a notice", _FACTS_MAX)
    return Notice(
        source=bounds.text(facts["source"], "source"),
        kind=bounds.text(facts["kind"], "kind"),
        identity=bounds.text(facts["identity"], "identity"),
        severity=Severity(facts["severity"]),
        deadline_mono_s=_instant(facts["deadline_mono_s"], "deadline_mono_s"),
        deadline_quality=DeadlineQuality(facts["deadline_quality"]),
        detail=bounds.text(facts["detail"], "detail"),
        later_mono_s=None
        if facts["later_mono_s"] is None
        else _instant(facts["later_mono_s"], "later_mono_s"),
        is_overdue=bounds.boolean(facts["is_overdue"], "is_overdue"),
        evacuation_id=bounds.identifier(facts["evacuation_id"], "evacuation_id"),
        repeats=tuple(
            bounds.text(identity, "a repeat")
            for identity in bounds.items(facts["repeats"], "repeats", REPEATS_MAX)
        ),
    )


def _instant(value: Any, field: str) -> float:
    return bounds.number(value, field, -bounds.SECONDS_MAX, bounds.SECONDS_MAX)
