# SPDX-License-Identifier: Apache-2.0
"""systemd's file descriptor store: state that survives a restart of the daemon.

Four things survive a crash or a restart:

- the listening socket, so that trainers wait for the next daemon instead of being refused;
- the notices in force, with the ids of their evacuations;
- the health of the GPUs, and the training that a failed one makes suspect;
- logind's delay lock, while a shutdown waits for an evacuation.

When the service is stopped, systemd closes all four.

A stored lock delays the shutdown even if no daemon runs any more.  Each start therefore removes the lock from
the store, and does not store an inherited lock again.  One restart during a shutdown keeps the lock; a
second crash releases it.

Without systemd the notices and the record of the GPUs are written to files in the daemon's own directory.
These files are valid until the daemon stops, and for the current boot only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from swansong import bounds
from swansong_bucket.model import DeadlineQuality, GpuRecord, Notice, Position, Severity
from swansong_bucket.util.forms import (
    FLAG,
    ID,
    Form,
    one_of,
    optional,
    seconds,
    several,
    text,
    whole,
)

from swansongd.core.notices import REPEATS_MAX
from swansongd.core.transition import HOST_SOURCE
from swansongd.host import gpu_record
from swansongd.host.sdnotify import SystemdNotifier
from swansongd.host.stored_document import OwnFile, StoredDocument, SystemdMemory

LISTENER = "trainer-socket"
LOCK = "delay-lock"
NOTICES = "notices"
GPUS = "gpus"
_FIRST_FD = 3
_NOTICES_MAX_BYTES = 2**16
_NOTICES_MAX = 64


@dataclass(frozen=True, slots=True)
class _Stored:
    """The supervisor keeps these notices for the daemon across a restart."""

    notices: tuple[Notice, ...]


_POSITION = Form(Position, start_id=ID, step=whole(-1, bounds.STEP_MAX))
_NOTICE = Form(
    Notice,
    source=text(),
    kind=text(),
    identity=text(),
    severity=one_of(Severity),
    deadline_mono_s=seconds(),
    deadline_quality=one_of(DeadlineQuality),
    detail=text(),
    later_mono_s=optional(seconds()),
    is_overdue=FLAG,
    evacuation_id=ID,
    safe_at=optional(_POSITION.kind),
    repeats=several(text(), REPEATS_MAX),
)
_STORED = Form(_Stored, notices=several(_NOTICE.kind, _NOTICES_MAX))


class FdStore:
    """Stores descriptors and notices for the next daemon, and returns those of the previous one.

    If systemd's store is full or disabled, nothing is stored and nothing is returned.

    Args:
        notifier: the connection to systemd.
        environment: of the process; lists the inherited descriptors.
        boot_id: of this boot; notices from another boot are dropped, because its monotonic clock is gone.
    """

    def __init__(
        self,
        notifier: SystemdNotifier,
        environment: Mapping[str, str],
        *,
        boot_id: str = "",
    ) -> None:
        self._notifier = notifier
        self._fds = _inherited(environment)
        self._notices = StoredDocument(
            self._memory(NOTICES, _NOTICES_MAX_BYTES),
            boot_id=boot_id,
            form=_STORED,
            nothing=_Stored(()),
        )
        self._gpus = StoredDocument(
            self._memory(GPUS, gpu_record.BYTES_MAX), boot_id=boot_id, form=gpu_record.RECORD
        )
        if LOCK in self._fds:
            # First of all: if this start fails later, the lock is released with the process.
            notifier.drop(LOCK)

    def use_directory(self, own_fd: int) -> None:
        """Without systemd, use files in this directory, which only the daemon can write."""
        if not self._notifier.has_systemd:
            self._notices.place = OwnFile(NOTICES, own_fd, max_bytes=_NOTICES_MAX_BYTES)
            self._gpus.place = OwnFile(GPUS, own_fd, max_bytes=gpu_record.BYTES_MAX)

    def _memory(self, name: str, max_bytes: int) -> SystemdMemory:
        return SystemdMemory(name, self._fds.pop(name, None), self._notifier, max_bytes=max_bytes)

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

    def notices(self, now_mono_s: float, sources: Collection[str]) -> list[Notice]:
        """The notices of these sources that were in force and whose deadlines have not passed since.

        The configuration may have changed: without its source, nothing would withdraw a notice.
        Without systemd, SIGTERM ended only the container of the previous daemon.
        """
        found = self._notices.read()
        return [
            notice
            for notice in (found.notices if found else ())
            if notice.deadline_mono_s > now_mono_s
            and notice.source in sources
            and (notice.source != HOST_SOURCE or self._notifier.has_systemd)
        ]

    def gpus(self) -> GpuRecord | None:
        """The record of the GPUs; None without one."""
        return self._gpus.read()

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
        self._notices.write(_Stored(tuple(notices)))

    def store_gpus(self, record: GpuRecord | None) -> None:
        """Replace the stored record of the GPUs.  Without one, the stored one stays."""
        if record is not None:
            self._gpus.write(record)

    def forget_gpus(self) -> None:
        """The next daemon begins without a record of the GPUs."""
        self._gpus.clear()

    def record_stop(self) -> None:
        """The daemon was stopped, and the next one begins without a record, as if systemd had closed it."""
        if not self._notifier.has_systemd:
            self.forget_gpus()
            self._notices.clear()


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
