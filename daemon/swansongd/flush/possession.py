# SPDX-License-Identifier: Apache-2.0
"""Reads created chunks back, at random, while their set is still sent.

A store that acknowledges bytes and drops them would otherwise get SAFE.  If the store does not return a
chunk, all chunks without a commit are forgotten: their bytes are sent again, and no manifest names them
meanwhile.  The reads run beside the uploads and delay none of them.  Each commit of new chunks waits a short
time for one of them to be read.  After a loss each further chunk is read, until all those of a commit were.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import structlog
from blake3 import blake3
from swansong_bucket.errors import NotFound, Permanent, StoreError
from swansong_bucket.model import Chunk
from swansong_bucket.stores.base import ObjectStore

from swansongd.flush.known import KnownChunks

INTERVAL_S = 2.0
"""Shortest time between two reads."""
WAIT_S = 10.0
"""Longest wait of a commit for the read in progress ..."""
URGENT_WAIT_S = 1.0
"""... and in an evacuation."""

_log = structlog.get_logger(__name__)


class Possession:
    """Reads back one of the chunks that were created since the last read; after a loss, all of them.

    Args:
        store: without retries; a read that fails proves nothing.
        known: forgets what the store may have lost.
        is_urgent: whether an evacuation is open.
        stop: ends the thread.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        known: KnownChunks,
        *,
        is_urgent: Callable[[], bool],
        stop: threading.Event,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._known = known
        self._is_urgent = is_urgent
        self._stop = stop
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._random = random.SystemRandom()
        self._offered = 0
        """Chunks that were created since the last read began."""
        self._unread: list[Chunk] = []
        """The chosen one of them; after a loss, all."""
        self._is_reading = False
        self._is_doubted = False
        """The store has lost a chunk, and no commit since then was read back whole."""
        self._has_lost = False
        """It has lost one since the last commit."""
        self._next_mono_s = -1.0
        """The next read starts no earlier."""
        threading.Thread(target=self._run, name="possession", daemon=True).start()

    def offer(self, chunk: Chunk) -> None:
        """A chunk was created.  Each one since the last read has the same chance to be read back."""
        with self._changed:
            self._offered += 1
            if self._is_doubted:
                self._unread.append(chunk)
            elif self._random.randrange(self._offered) == 0:
                self._unread = [chunk]
            self._changed.notify_all()

    def settle(self) -> None:
        """Read one of the chunks that were created since the last read, but do not wait for long.

        Afterwards :meth:`KnownChunks.holds` returns whether a manifest may name its chunks.
        """
        limit_s = URGENT_WAIT_S if self._is_urgent() else WAIT_S
        with self._changed:
            self._next_mono_s = self._monotonic()
            self._changed.notify_all()
            is_read = self._changed.wait_for(
                lambda: not self._is_reading and not self._unread, limit_s
            )
            self._is_doubted = self._has_lost or (self._is_doubted and not is_read)
            self._has_lost = False

    @property
    def _is_due(self) -> bool:
        is_time = self._is_doubted or self._monotonic() >= self._next_mono_s
        return bool(self._unread) and is_time

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._stop.is_set(), INTERVAL_S)
                if not self._is_due:
                    continue
                chunk = self._unread.pop()
                self._offered, self._is_reading = 0, True
                self._next_mono_s = self._monotonic() + INTERVAL_S
            try:
                self._read_back(chunk)
            finally:
                with self._changed:
                    self._is_reading = False
                    self._changed.notify_all()

    def _read_back(self, chunk: Chunk) -> None:
        try:
            why = self._defect(chunk)
        except StoreError as error:  # it proves nothing about the chunk
            _log.warning("chunk_not_read_back", key=chunk.key, error=error.line())
        except Exception:
            _log.exception("possession_fault")
        else:
            if why:
                self._known.distrust()
                with self._changed:
                    self._is_doubted = self._has_lost = True
                    self._unread.clear()  # they are forgotten as well
                _log.error(
                    "chunk_lost",
                    key=chunk.key,
                    reason=why,
                    hint="The store has acknowledged this object; all bytes without a commit are sent again",
                )

    def _defect(self, chunk: Chunk) -> str:
        sink = _DigestSink()
        try:
            self._store.get_range(chunk.key, 0, chunk.size_bytes, sink)
        except NotFound:
            return "it is missing"
        except Permanent:
            info = self._store.head(chunk.key)
            if info is not None and info.size_bytes == chunk.size_bytes:
                raise  # for lack of a right to read
            return "it has another size"
        return "" if sink.digest() == chunk.digest else "it has other bytes"


class _DigestSink:
    def __init__(self) -> None:
        self.rewind()

    def rewind(self) -> None:
        self._hash = blake3()

    def write(self, window: memoryview) -> None:
        self._hash.update(window)

    def digest(self) -> bytes:
        return self._hash.digest()
