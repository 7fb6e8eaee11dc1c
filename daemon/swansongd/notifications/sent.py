# SPDX-License-Identifier: Apache-2.0
"""The record of sent notifications, which survives a restart of the daemon."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from contextlib import suppress

from swansong import bounds, openat

NAME = "notifications.json"
SENT_MAX = 500
BEGUN_MAX = 100
_BYTES_MAX = 2**20
_KEY_CHARS_MAX = 1000


class SentNotifications:
    """Keys of sent notifications, and the problems that were begun.  Thread-safe.

    The decision loop calls :meth:`has` and :meth:`forget`, which never wait for the disk.

    The file is valid for one boot.  It is written without an fsync, by the threads that send: it must survive
    the death of the daemon, not that of the VM.

    Args:
        own_fd: the daemon's own directory; None: nothing survives.
        boot_id: of this boot.
    """

    def __init__(self, own_fd: int | None, *, boot_id: str) -> None:
        self._own_fd = own_fd
        self._boot_id = boot_id
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._sent: OrderedDict[str, None] = OrderedDict()
        self._begun: frozenset[str] = frozenset()
        # Absent, truncated, or of another version; BoundsError is a ValueError.
        with suppress(OSError, ValueError, KeyError, RecursionError):
            self._load()

    @property
    def begun(self) -> frozenset[str]:
        """Groups of the problems that were begun and are not over."""
        return self._begun

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self._sent

    def sent(self, sender: str) -> list[str]:
        """Keys of the notifications of this sender, oldest first, without its name."""
        beginning = f"{sender} "
        with self._lock:
            return [k.removeprefix(beginning) for k in self._sent if k.startswith(beginning)]

    def add(self, key: str) -> None:
        """Record that this notification needs no further attempt."""
        with self._lock:
            self._sent[key] = None
            while len(self._sent) > SENT_MAX:
                self._sent.popitem(last=False)
        self._save()

    def forget(self, beginning: str) -> None:
        """Keys that begin like this count as new; the next save records it."""
        with self._lock:
            for key in [key for key in self._sent if key.startswith(beginning)]:
                del self._sent[key]

    def set_begun(self, groups: frozenset[str]) -> None:
        """Record the problems that hold now."""
        if groups != self._begun:
            self._begun = groups
            self._save()

    def _load(self) -> None:
        if self._own_fd is None:
            return
        data = openat.read_file(
            NAME, dir_fd=self._own_fd, max_bytes=_BYTES_MAX, owners={os.geteuid()}
        )
        found = bounds.json_object(data, NAME, _BYTES_MAX)
        if found["boot_id"] != self._boot_id:
            return
        sent = bounds.items(found["sent"], "sent", SENT_MAX)
        begun = bounds.items(found["begun"], "begun", BEGUN_MAX)
        keys = [bounds.text(key, "a key", _KEY_CHARS_MAX) for key in sent]
        self._begun = frozenset(bounds.text(each, "a group", _KEY_CHARS_MAX) for each in begun)
        self._sent = OrderedDict.fromkeys(keys)

    def _save(self) -> None:
        if self._own_fd is None:
            return
        # A full disk: after a restart, a notification may be sent twice.
        with self._saving, suppress(OSError):
            with self._lock:
                sent = [key[:_KEY_CHARS_MAX] for key in self._sent]
            begun = sorted(self._begun)[:BEGUN_MAX]
            data = json.dumps({"boot_id": self._boot_id, "sent": sent, "begun": begun}).encode()
            openat.replace_file(NAME, data, dir_fd=self._own_fd, durable=False)
