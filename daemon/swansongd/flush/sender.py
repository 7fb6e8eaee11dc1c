# SPDX-License-Identifier: Apache-2.0
"""Stores the bytes of one chunk: names a chunk that has them, or creates one."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3
from swansong_bucket.errors import Exists
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import Chunk, Extent, StagedFile
from swansong_bucket.stores.base import Body, ObjectStore
from swansong_bucket.stores.checksums import crc32c

from swansongd.flush.active import ActiveFlush
from swansongd.flush.cutting import Piece, size_of
from swansongd.flush.known import KnownChunks, SmallSums
from swansongd.flush.queue import ChunkTimes, StoreChunk
from swansongd.flush.reading import Buffers, Cancelled, ChunkSums, read_piece, within_means
from swansongd.staging import scan


def chunk_nonce() -> str:
    """A random nonce for the key of one chunk."""
    return secrets.token_hex(4)


class ChunkSender:
    """Stores chunks, in as many threads as call it.

    Args:
        store, keys, run_directory, known, created, nonce, monotonic: as of the engine.
        lock: guards the flushes, their queues and ``times``.
        times: takes the time of each chunk that was created.
        is_small: whether a file shares a chunk.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        run_directory: int | Path,
        known: KnownChunks,
        *,
        lock: threading.Lock,
        times: ChunkTimes,
        is_small: Callable[[StagedFile], bool],
        created: Callable[[Chunk, memoryview], None],
        nonce: Callable[[], str],
        monotonic: Callable[[], float],
    ) -> None:
        self._is_small = is_small
        self._store = store
        self._keys = keys
        self._run_directory = run_directory
        self._known = known
        self._lock = lock
        self._times = times
        self._monotonic = monotonic
        self._listener = created
        self._nonce = nonce
        self.buffers = Buffers()

    def carry_out(self, flush: ActiveFlush, task: StoreChunk) -> None:
        """Store the pieces of a task.

        Raises:
            Cancelled: the bytes are not needed any more.
            StagingError: a file cannot be read, or has changed.
            StoreError: the store failed.
        """
        with self.buffers.taken(size_of(task.pieces)) as buffer:
            pieces, sums, small = self._read(flush, task.pieces, buffer)
            if not pieces:
                return
            data = buffer[: size_of(pieces)]
            found = self._find(flush, sums.digest())
            if found is None:
                made = self._created(flush, pieces, sums, data)
                places = _extents(pieces, made, 0)
                chunk = self._known.created(made, {places[p]: each for p, each in small.items()})
                self._listener(chunk, data)
                extents = _extents(pieces, chunk, 0)
            else:
                flush.queue.traffic.compared(len(data))
                extents = _extents(pieces, found.chunk, found.offset_bytes)
            self._note(flush, extents)

    def _read(
        self, flush: ActiveFlush, pieces: Sequence[Piece], buffer: memoryview
    ) -> tuple[list[Piece], ChunkSums, dict[Piece, SmallSums]]:
        """Read pieces into the buffer, one after the other, and name small files that are stored.

        Returns:
            The pieces in the buffer, the sums of all their bytes, and the sums of each small file.
        """
        missing: list[Piece] = []
        sums, small, end = ChunkSums(), dict[Piece, SmallSums](), 0
        for piece in filter(flush.queue.wants, pieces):
            place = buffer[end : end + piece.size_bytes]
            if not self._is_small(piece.file):
                read_piece(self._directory(flush), piece, place, flush.queue.wants, sums.update)
            else:
                read_piece(self._directory(flush), piece, place, flush.queue.wants)
                each = self._small_sums(place)
                if each.digest and (extent := self._find(flush, each.digest)) is not None:
                    flush.queue.traffic.compared(piece.size_bytes)
                    self._note(flush, {piece: extent})
                    continue
                small[piece] = each
                sums.update(place)
            missing.append(piece)
            end += piece.size_bytes
        return missing, sums, small

    def _small_sums(self, data: memoryview) -> SmallSums:
        checksum = crc32c(data)
        is_likely = self._known.has_seen(checksum, data.nbytes)
        return SmallSums(checksum, blake3(data).digest() if is_likely else b"")

    def _find(self, flush: ActiveFlush, digest: bytes) -> Extent | None:
        """Stored bytes with this digest that a manifest may name."""
        found = self._known.find(digest)
        if found is None or not (found.is_confirmed or self._is_stored(flush, found.extent.chunk)):
            return None
        return found.extent

    def _is_stored(self, flush: ActiveFlush, chunk: Chunk) -> bool:
        """Whether the store has this chunk, with its size; one without a commit must not be too old."""
        queue = flush.queue
        with queue.asking[chunk.key]:  # another worker may have the same request in flight
            is_stored = queue.confirmed.get(chunk)
            if is_stored is None:
                info = self._store.head(chunk.key)
                is_stored = (
                    info is not None
                    and info.size_bytes == chunk.size_bytes
                    and self._known.confirmed(chunk, info.age_s)
                )
                queue.confirmed[chunk] = is_stored
                if not is_stored:
                    self._known.is_gone(chunk)
            return is_stored

    def _created(
        self, flush: ActiveFlush, pieces: Sequence[Piece], sums: ChunkSums, data: memoryview
    ) -> Chunk:
        def moved(size_bytes: int) -> None:
            if size_bytes > 0 and not any(map(flush.queue.wants, pieces)):
                raise Cancelled
            flush.queue.traffic.sent(size_bytes)

        body = Body(data, moved, sums.crc32c)
        begun_mono_s = self._monotonic()
        generation, digest = flush.queue.generation, sums.digest()
        key = self._keys.chunk(generation, digest, self._nonce())
        try:
            self._store.create(key, body)
        except Exists:  # the key holds other bytes, and is spent
            key = self._keys.chunk(generation, digest, self._nonce())
            self._store.create(key, body)
        with self._lock:
            self._times.add(self._monotonic() - begun_mono_s, body.size_bytes)
        return Chunk(key, body.size_bytes)

    def _note(self, flush: ActiveFlush, extents: dict[Piece, Extent]) -> None:
        with self._lock:
            flush.queue.stored(extents)

    def _directory(self, flush: ActiveFlush) -> scan.SetDirectory:
        """The directory of the set, opened once for all workers of the flush."""
        if flush.directory is not None:
            return flush.directory
        name = flush.staged.directory
        directory = within_means(lambda: scan.SetDirectory(self._run_directory, name))
        with self._lock:
            if flush.directory is None:
                flush.directory = directory
                return directory
        directory.close()
        return flush.directory


def _extents(pieces: Sequence[Piece], chunk: Chunk, offset: int) -> dict[Piece, Extent]:
    """The pieces of a chunk from this offset, one after the other."""
    extents = {}
    for piece in pieces:
        extents[piece] = Extent(chunk, offset, piece.size_bytes)
        offset += piece.size_bytes
    return extents
