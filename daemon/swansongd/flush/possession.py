# SPDX-License-Identifier: Apache-2.0
"""Reads samples of created chunks back, at random, while their set is still sent.

A store that acknowledges bytes and drops them would otherwise get SAFE.  If the store does not return a
sample, all chunks without a commit are forgotten: their bytes are sent again, and no manifest names them
meanwhile.  The reads run beside the uploads and delay none of them.  Each commit of new chunks waits a short
time for a sample of one of them.  After a loss a sample of each further chunk is read, until the samples of
a whole commit were.  The store learns the place of a sample only when it is read.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from blake3 import blake3
from swansong_bucket.errors import NotFound, Permanent, StoreError
from swansong_bucket.model import Chunk
from swansong_bucket.stores.base import BytesSink, ObjectStore
from swansong_bucket.util.threads import lasting_thread

from swansongd.flush.known import KnownChunks

SAMPLE_BYTES = 256 * 2**10
"""Size of a sample: a whole chunk would delay the commit by up to a second over a slow link."""
INTERVAL_S = 2.0
"""Shortest time between two reads."""
WAIT_S = 10.0
"""Longest wait of a commit for the read in progress ..."""
URGENT_WAIT_S = 1.0
"""... and in an evacuation."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A random range of a chunk."""

    chunk: Chunk
    offset: int
    size_bytes: int
    digest: bytes


class Possession:
    """Reads back a sample of one chunk of those that were created since the last read; after a loss, of all.

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
        self._unread: list[_Sample] = []
        """A sample of the chosen one; after a loss, of each."""
        self._is_reading = False
        self._is_doubted = False
        """The store has lost a chunk, and no commit since then was read back whole."""
        self._has_lost = False
        """It has lost one since the last commit."""
        self._next_mono_s = -1.0
        """The next read starts no earlier."""
        lasting_thread("possession", self._run).start()

    def offer(self, chunk: Chunk, data: memoryview) -> None:
        """A chunk was created.  Each one since the last read has the same chance to be read back.

        Args:
            data: the bytes of the chunk.
        """
        size_bytes = min(SAMPLE_BYTES, data.nbytes)
        offset = self._random.randrange(data.nbytes - size_bytes + 1)
        with self._changed:
            self._offered += 1
            is_chosen = self._random.randrange(self._offered) == 0
            if is_chosen or self._is_doubted:
                digest = blake3(data[offset : offset + size_bytes]).digest()
                sample = _Sample(chunk, offset, size_bytes, digest)
                self._unread = [*self._unread, sample] if self._is_doubted else [sample]
            self._changed.notify_all()

    def settle(self) -> None:
        """Read a sample of a chunk that was created since the last read, but do not wait for long.

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
                sample = self._unread.pop()
                self._offered, self._is_reading = 0, True
                self._next_mono_s = self._monotonic() + INTERVAL_S
            try:
                self._read_back(sample)
            finally:
                with self._changed:
                    self._is_reading = False
                    self._changed.notify_all()

    def _read_back(self, sample: _Sample) -> None:
        chunk = sample.chunk
        try:
            why = self._defect(sample)
        except StoreError as error:  # it proves nothing about the chunk
            _log.warning("chunk_not_read_back", key=chunk.key, kind=error.kind, error=error.line())
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

    def _defect(self, sample: _Sample) -> str:
        chunk, sink = sample.chunk, BytesSink(sample.size_bytes)
        try:
            self._store.get_range(chunk.key, sample.offset, sample.size_bytes, sink)
        except NotFound:
            return "it is missing"
        except Permanent:
            info = self._store.head(chunk.key)
            if info is not None and info.size_bytes == chunk.size_bytes:
                raise  # for lack of a right to read
            return "it has another size"
        return "" if blake3(sink.data).digest() == sample.digest else "it has other bytes"
