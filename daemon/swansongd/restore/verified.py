# SPDX-License-Identifier: Apache-2.0
"""Passes the verified files of a download to trainers, which load them while the download continues.

A trainer gets a read-only descriptor of each file, because no other user may enter the directory before it is
published.  A trainer gets only :data:`AHEAD` files more than it has confirmed.  A trainer that confirms
nothing costs nothing: it loads the other files from the published directory.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass

import structlog
from swansong import openat
from swansong.protocol import RestoreQuery, ShardsTaken, ShardVerified
from swansong_bucket.transfer.target import RestoreTarget

from swansongd.trainers.admission import Reply

AHEAD = 16
"""Files that a trainer gets before it has confirmed the first of them."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Reader:
    """A trainer that waits for the download."""

    query: RestoreQuery
    reply: Reply
    place: int = 0
    """Number of files that were sent, or that the trainer does not read."""
    sent: int = 0
    taken: int = 0

    def reads(self, path: str) -> bool:
        prefixes = self.query.prefixes
        return not prefixes or path.startswith(tuple(prefixes))


class VerifiedShards:
    """The verified files of one download.  All methods may be called from any thread; none blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._download = ""
        self._directory_fd = -1
        self._paths: list[str] = []
        self._readers: dict[Reply, _Reader] = {}

    def join(self, query: RestoreQuery, reply: Reply) -> None:
        """Send the files to this trainer too, those of the past first."""
        if query.takes_shards:
            with self._lock:
                reader = self._readers[reply] = _Reader(query, reply)
                self._send_to(reader)

    def leave(self, reply: Reply) -> None:
        """Send nothing more to this trainer."""
        with self._lock:
            self._readers.pop(reply, None)

    def take(self, message: ShardsTaken, reply: Reply) -> None:
        """Record how many files a trainer has taken, and send further ones."""
        with self._lock:
            reader = self._readers.get(reply)
            if reader is not None and message.download == self._download:
                reader.taken = max(reader.taken, min(message.count, reader.sent))
                self._send_to(reader)

    def add(self, path: str, target: RestoreTarget) -> None:
        """Send a file that matches its digest."""
        with self._lock:
            if not self._download:
                self._download = secrets.token_hex(8)
                self._directory_fd = target.duplicate()
            self._paths.append(path)
            for reader in self._readers.values():
                self._send_to(reader)

    def end(self) -> str:
        """End this download; returns its id, or an empty text if it had no files.

        The next :meth:`add` begins another one.
        """
        with self._lock:
            ended, self._download = self._download, ""
            if self._directory_fd >= 0:
                os.close(self._directory_fd)
                self._directory_fd = -1
            self._paths.clear()
            for reader in self._readers.values():
                reader.place = reader.sent = reader.taken = 0
            return ended

    def _send_to(self, reader: _Reader) -> None:
        while reader.sent - reader.taken < AHEAD and reader.place < len(self._paths):
            path = self._paths[reader.place]
            reader.place += 1
            if not reader.reads(path):
                continue
            try:  # no other user can have put a link into the directory
                fd = os.open(path, openat.FILE, dir_fd=self._directory_fd)
            except OSError as error:
                _log.warning("shard_not_sent", path=path, error=error.strerror)
                continue
            reader.sent += 1
            reader.reply(ShardVerified(reader.query.query_id, self._download, path), fd)
