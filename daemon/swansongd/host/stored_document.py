# SPDX-License-Identifier: Apache-2.0
"""A value for the next daemon of this boot, as JSON: in memory that systemd keeps, or in a file.

The memory has two slots.  A write fills the older one, and each slot has a checksum, so a daemon that is
killed during a write leaves the earlier value.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import structlog
from swansong import bounds, openat
from swansong_bucket.util.forms import Form

from swansongd.host.sdnotify import SystemdNotifier

SLOTS = 2
_HEADER = 32

V = TypeVar("V")

_log = structlog.get_logger(__name__)


class DocumentPlace(Protocol):
    """A place for one value."""

    name: str
    max_bytes: int
    """Size limit of the value as JSON."""

    def read(self) -> bytes | None:
        """The value of the previous daemon; None if it is absent.

        Raises:
            OSError, ValueError: it cannot be read, or is damaged.
        """

    def write(self, data: bytes) -> None:
        """Replace the value.

        Raises:
            OSError: it stays as it was.
        """

    def clear(self) -> None:
        """Remove the value.

        Raises:
            OSError: it is absent, or cannot be removed.
        """


class OwnFile:
    """A file ``<name>.json`` in the daemon's own directory, which only the daemon can write."""

    def __init__(self, name: str, own_fd: int, *, max_bytes: int) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self._own_fd = own_fd
        self._file = f"{name}.json"

    def read(self) -> bytes | None:
        try:
            return openat.read_file(
                self._file, dir_fd=self._own_fd, max_bytes=self.max_bytes, owners={os.geteuid()}
            )
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        # No fsync: the file need not survive this boot, and the decision loop must not block.
        openat.replace_file(self._file, data, dir_fd=self._own_fd, durable=False)

    def clear(self) -> None:
        os.unlink(self._file, dir_fd=self._own_fd)


class SystemdMemory:
    """Memory that systemd keeps as a stored descriptor of this name.

    Args:
        fd: the inherited memory; None without one.
        notifier: the connection to systemd.
    """

    def __init__(
        self, name: str, fd: int | None, notifier: SystemdNotifier, *, max_bytes: int
    ) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self._fd = fd
        self._notifier = notifier
        self._serial = 0
        """Number of the newest slot; 0: none is valid."""
        self._slot = max_bytes + _HEADER

    def read(self) -> bytes | None:
        if self._fd is None or os.fstat(self._fd).st_size == 0:
            return None
        found = [_parsed(os.pread(self._fd, self._slot, i * self._slot)) for i in range(SLOTS)]
        self._serial, data = max(found)
        if self._serial == 0:
            raise ValueError("no slot has a valid checksum")
        return data

    def write(self, data: bytes) -> None:
        if self._fd is None:
            self._fd = os.memfd_create(self.name)
            self._notifier.store(self.name, self._fd)
        serial = self._serial + 1
        slot = as_slot(serial, data)
        if os.pwrite(self._fd, slot, serial % SLOTS * self._slot) != len(slot):
            raise OSError("the write was cut short")
        self._serial = serial

    def clear(self) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)


class StoredDocument(Generic[V]):
    """The value in its place.

    Args:
        boot_id: of this boot; a value of another boot is not read.
        form: of the value.
        nothing: the value that need not be written first.
    """

    def __init__(
        self, place: DocumentPlace, *, boot_id: str, form: Form[V], nothing: V | None = None
    ) -> None:
        self.place = place
        self._boot_id = boot_id
        self._form = form
        self._written = nothing
        """The value that this daemon has written."""
        self._has_failed = False

    def read(self) -> V | None:
        """The value of the previous daemon; None if it is absent, damaged, or of another boot."""
        name = self.place.name
        try:
            data = self.place.read()
            if data is None:
                return None
            found = bounds.json_object(data, name, self.place.max_bytes)
            is_of_boot = found.get("boot_id") == self._boot_id
            return self._form.read(found, name) if is_of_boot else None
        # BoundsError is a ValueError.
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("stored_state_ignored", what=name, reason=f"{error!r:.200}")
            return None

    def write(self, value: V) -> None:
        """Replace the value, unless it is in its place already.

        The next call repeats a write that failed for want of memory or disk space.
        """
        if value == self._written:
            return
        self._written = None
        data = json.dumps({"boot_id": self._boot_id, **self._form.write(value)}).encode()
        try:
            if len(data) > self.place.max_bytes:
                raise OSError(f"{len(data)} bytes are over the limit")
            self.place.write(data)
        except OSError as error:
            if not self._has_failed:
                _log.warning("state_not_stored", what=self.place.name, reason=f"{error!r:.200}")
            self._has_failed = True
        else:
            self._written, self._has_failed = value, False

    def clear(self) -> None:
        """Remove the value."""
        self._written = None
        with suppress(OSError):  # it is absent, or the next write repeats the failure
            self.place.clear()


def as_slot(serial: int, data: bytes) -> bytes:
    """The content of a slot."""
    body = b"%d %s" % (serial, data)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parsed(slot: bytes) -> tuple[int, bytes]:
    """Serial number and object of a slot; (0, b"") if it is empty or torn."""
    line = slot.partition(b"\n")[0]
    checksum, _, body = line.partition(b" ")
    serial, _, data = body.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body) or not serial.isdigit():
        return 0, b""
    return int(serial), data
