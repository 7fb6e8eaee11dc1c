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

Without systemd the notices and the health of the GPUs are written to files in the daemon's own directory.
These files are valid for the current boot only.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import structlog
from swansong import bounds, openat

from swansongd.core.notices import REPEATS_MAX
from swansongd.host import gpu_record
from swansongd.host.sdnotify import SystemdNotifier
from swansongd.model import DeadlineQuality, GpuRecord, Notice, Severity

LISTENER = "trainer-socket"
LOCK = "delay-lock"
NOTICES = "notices"
GPUS = "gpus"
_FIRST_FD = 3
_NOTICES_MAX_BYTES = 2**16
_NOTICES_MAX = 64
_FACTS_MAX = 64

T = TypeVar("T")

_log = structlog.get_logger(__name__)


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
        self._fds = _inherited(environment)
        self._notices: tuple[Notice, ...] = ()
        self._gpus: GpuRecord | None = None
        self._stored_notices = _Document(
            NOTICES,
            self._fds.pop(NOTICES, None),
            notifier,
            boot_id=boot_id,
            max_bytes=_NOTICES_MAX_BYTES,
        )
        self._stored_gpus = _Document(
            GPUS,
            self._fds.pop(GPUS, None),
            notifier,
            boot_id=boot_id,
            max_bytes=gpu_record.BYTES_MAX,
        )
        if LOCK in self._fds:
            # First of all: if this start fails later, the lock is released with the process.
            notifier.drop(LOCK)

    def use_directory(self, own_fd: int) -> None:
        """Without systemd, use files in this directory, which only the daemon can write."""
        if not self._notifier.has_systemd:
            self._stored_notices.own_fd = self._stored_gpus.own_fd = own_fd

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

        def parse(found: Mapping[str, Any]) -> list[Notice]:
            return [_notice(f) for f in bounds.items(found[NOTICES], NOTICES, _NOTICES_MAX)]

        return [n for n in self._stored_notices.read(parse) or () if n.deadline_mono_s > now_mono_s]

    def gpus(self) -> GpuRecord | None:
        """The record of the GPUs; None without one."""
        self._gpus = self._stored_gpus.read(gpu_record.parse)
        return self._gpus

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
        self._stored_notices.write({NOTICES: [asdict(item) for item in wanted]})

    def store_gpus(self, record: GpuRecord | None) -> None:
        """Replace the stored record of the GPUs.  Without one, the stored one stays."""
        if record is not None and record != self._gpus:
            self._gpus = record
            self._stored_gpus.write(gpu_record.facts_of(record))

    def forget_gpus(self) -> None:
        """The next daemon begins without a record of the GPUs."""
        self._gpus = None
        self._stored_gpus.clear()

    def record_stop(self) -> None:
        """The operator stopped the daemon, which ends the suspicion: systemd closes what it has stored."""
        if not self._notifier.has_systemd:
            self.forget_gpus()


class _Document:
    """A JSON object for the next daemon of this boot: in memory that systemd keeps, or in a file."""

    def __init__(
        self, name: str, fd: int | None, notifier: SystemdNotifier, *, boot_id: str, max_bytes: int
    ) -> None:
        self._name = name
        self._fd = fd
        self._notifier = notifier
        self._boot_id = boot_id
        self._max_bytes = max_bytes
        self.own_fd: int | None = None
        """The directory of the file; None: systemd keeps the memory."""

    def read(self, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        """The object of the previous daemon; None if it is absent, damaged, or of another boot."""
        try:
            data = self._data()
            if not data:
                return None
            found = bounds.json_object(data, self._name, self._max_bytes)
            return parse(found) if found["boot_id"] == self._boot_id else None
        except FileNotFoundError:
            return None
        # BoundsError is a ValueError.
        except (OSError, ValueError, KeyError, RecursionError) as error:
            _log.warning("stored_state_ignored", what=self._name, reason=f"{error!r:.200}")
            return None

    def _data(self) -> bytes:
        if self.own_fd is not None:
            owners = {os.geteuid()}
            return openat.read_file(
                self._file, dir_fd=self.own_fd, max_bytes=self._max_bytes, owners=owners
            )
        return b"" if self._fd is None else os.pread(self._fd, self._max_bytes, 0)

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replace the object."""
        data = json.dumps({"boot_id": self._boot_id, **facts}).encode()
        # Out of memory or disk space: the next daemon reads the sources.
        with suppress(OSError):
            if self.own_fd is not None:
                # No fsync: the file need not survive this boot, and the decision loop must not block.
                openat.replace_file(self._file, data, dir_fd=self.own_fd, durable=False)
                return
            if self._fd is None:
                self._fd = os.memfd_create(self._name)
                self._notifier.store(self._name, self._fd)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)

    def clear(self) -> None:
        with suppress(OSError):
            if self.own_fd is not None:
                os.unlink(self._file, dir_fd=self.own_fd)
            elif self._fd is not None:
                os.ftruncate(self._fd, 0)

    @property
    def _file(self) -> str:
        return f"{self._name}.json"


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
