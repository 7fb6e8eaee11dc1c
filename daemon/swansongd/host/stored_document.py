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
from typing import Generic, TypeVar

import structlog
from swansong import bounds, openat
from swansong_bucket.util.forms import Form

from swansongd.host.sdnotify import SystemdNotifier

SLOTS = 2
_HEADER = 32

V = TypeVar("V")

_log = structlog.get_logger(__name__)


class StoredDocument(Generic[V]):
    """The value and its place.

    Args:
        name: of the stored descriptor, or of the file without its ``.json``.
        fd: the inherited memory; None without one.
        notifier: the connection to systemd.
        boot_id: of this boot; a value of another boot is not read.
        max_bytes: of the value as JSON.
        form: of the value.
        nothing: the value that need not be written first.
    """

    def __init__(
        self,
        name: str,
        fd: int | None,
        notifier: SystemdNotifier,
        *,
        boot_id: str,
        max_bytes: int,
        form: Form[V],
        nothing: V | None = None,
    ) -> None:
        self._name = name
        self._fd = fd
        self._notifier = notifier
        self._boot_id = boot_id
        self._max_bytes = max_bytes
        self._form = form
        self._serial = 0
        """Number of the newest slot; 0: none is valid."""
        self._written = nothing
        """The value that this daemon has written."""
        self._has_failed = False
        self.own_fd: int | None = None
        """The directory of the file; None: systemd keeps the memory."""

    def read(self) -> V | None:
        """The value of the previous daemon; None if it is absent, damaged, or of another boot."""
        try:
            data = self._data()
            if not data:
                return None
            found = bounds.json_object(data, self._name, self._max_bytes)
            is_of_boot = found.get("boot_id") == self._boot_id
            return self._form.read(found, self._name) if is_of_boot else None
        except FileNotFoundError:
            return None
        # BoundsError is a ValueError.
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("stored_state_ignored", what=self._name, reason=f"{error!r:.200}")
            return None

    def write(self, value: V) -> None:
        """Replace the value, unless it is in its place already.

        The next call repeats a write that failed for want of memory or disk space.
        """
        if value == self._written:
            return
        self._written = None
        try:
            self._put(json.dumps({"boot_id": self._boot_id, **self._form.write(value)}).encode())
        except OSError as error:
            if not self._has_failed:
                _log.warning("state_not_stored", what=self._name, reason=f"{error!r:.200}")
            self._has_failed = True
        else:
            self._written, self._has_failed = value, False

    def clear(self) -> None:
        """Remove the value."""
        self._written = None
        with suppress(OSError):  # it is absent, or the next write repeats the failure
            if self.own_fd is not None:
                os.unlink(self._file, dir_fd=self.own_fd)
            elif self._fd is not None:
                os.ftruncate(self._fd, 0)

    def _data(self) -> bytes:
        if self.own_fd is not None:
            owners = {os.geteuid()}
            return openat.read_file(
                self._file, dir_fd=self.own_fd, max_bytes=self._max_bytes, owners=owners
            )
        if self._fd is None or os.fstat(self._fd).st_size == 0:
            return b""
        found = [_parsed(os.pread(self._fd, self._slot, i * self._slot)) for i in range(SLOTS)]
        self._serial, data = max(found)
        if self._serial == 0:
            raise ValueError("no slot has a valid checksum")
        return data

    def _put(self, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise OSError(f"{len(data)} bytes are over the limit")
        if self.own_fd is not None:
            # No fsync: the file need not survive this boot, and the decision loop must not block.
            openat.replace_file(self._file, data, dir_fd=self.own_fd, durable=False)
            return
        if self._fd is None:
            self._fd = os.memfd_create(self._name)
            self._notifier.store(self._name, self._fd)
        serial = self._serial + 1
        slot = as_slot(serial, data)
        if os.pwrite(self._fd, slot, serial % SLOTS * self._slot) != len(slot):
            raise OSError("the write was cut short")
        self._serial = serial

    @property
    def _slot(self) -> int:
        return self._max_bytes + _HEADER

    @property
    def _file(self) -> str:
        return f"{self._name}.json"


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
