# SPDX-License-Identifier: Apache-2.0
"""The record of sent notifications, which survives a restart of the daemon."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from swansong_bucket.util.forms import Form, several, text

from swansongd.host.stored_document import DocumentPlace, OwnFile, StoredDocument

SENT_MAX = 500
BEGUN_MAX = 100
_KEY_CHARS_MAX = 1000
_KEY = text(_KEY_CHARS_MAX)


@dataclass(frozen=True, slots=True)
class _Record:
    """The sent and the begun notifications, in their file."""

    sent: Collection[str] = ()
    begun: Collection[str] = ()


_RECORD = Form(_Record, sent=several(_KEY, SENT_MAX), begun=several(_KEY, BEGUN_MAX))


def record_file(own_fd: int) -> OwnFile:
    """The file of the record in the daemon's own directory."""
    return OwnFile("notifications", own_fd, max_bytes=2**20)


class SentNotifications:
    """Keys of sent notifications, and the problems that were begun.  Thread-safe.

    The decision loop calls :meth:`has` and :meth:`forget`, which never wait for the disk.

    The threads that send write the record.  A damaged record counts as empty: a notification may be sent
    twice, and none is lost.

    Args:
        place: of the record.
        boot_id: of this boot; the record is valid for one boot.
    """

    def __init__(self, place: DocumentPlace, *, boot_id: str) -> None:
        self._document = StoredDocument(place, boot_id=boot_id, form=_RECORD)
        found = self._document.read() or _Record()
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._sent = OrderedDict.fromkeys(found.sent)
        self._begun = frozenset(found.begun)

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

    def _save(self) -> None:
        with self._saving:
            with self._lock:
                sent = tuple(key[:_KEY_CHARS_MAX] for key in self._sent)
            self._document.write(_Record(sent, tuple(sorted(self._begun)[:BEGUN_MAX])))
