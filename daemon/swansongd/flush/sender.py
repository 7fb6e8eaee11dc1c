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
from swansong_bucket.model import Chunk, Extent
from swansong_bucket.stores.base import ObjectStore

from swansongd.flush.active import ActiveFlush
from swansongd.flush.known import KnownChunks
from swansongd.flush.layout import Piece, size_of
from swansongd.flush.reading import Buffers, Cancelled, read_pieces, within_means
from swansongd.flush.tasks import StoreChunk
from swansongd.staging import scan


def chunk_nonce() -> str:
    """A random nonce for the key of one chunk."""
    return secrets.token_hex(4)


class ChunkSender:
    """Stores chunks, in as many threads as call it.

    Args:
        store, keys, run_directory, known, created, nonce: as of the engine.
        lock: guards the flushes and their queues.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        run_directory: int | Path,
        known: KnownChunks,
        *,
        lock: threading.Lock,
        created: Callable[[Chunk, memoryview], None] = lambda _chunk, _data: None,
        nonce: Callable[[], str] = chunk_nonce,
    ) -> None:
        self._store = store
        self._keys = keys
        self._run_directory = run_directory
        self._known = known
        self._lock = lock
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
        pieces = [piece for piece in task.pieces if flush.queue.wants(piece)]
        with self.buffers.taken(size_of(pieces)) as buffer:
            digests = read_pieces(
                self._directory(flush), pieces, buffer, lambda piece: not flush.queue.wants(piece)
            )
            if len(pieces) == 1:
                self._store_bytes(flush, pieces, digests, digests[0], buffer)
                return
            pieces, digests, data = self._without_known(flush, pieces, digests, buffer)
            if pieces:
                self._store_bytes(flush, pieces, digests, blake3(data).digest(), data)

    def _store_bytes(
        self,
        flush: ActiveFlush,
        pieces: Sequence[Piece],
        digests: Sequence[bytes],
        digest: bytes,
        data: memoryview,
    ) -> None:
        """Name a chunk with these bytes, or create one."""
        found = self._find(flush, digest)
        if found is None:
            made = self._created(flush, pieces, digest, data)
            small = dict(zip(digests, _extents(pieces, made, 0), strict=True))
            chunk = self._known.created(made, small)
            self._listener(chunk, data)
            extents = _extents(pieces, chunk, 0)
        else:
            flush.count_compared(len(data))
            extents = _extents(pieces, found.chunk, found.offset_bytes)
        self._note(flush, dict(zip(pieces, extents, strict=True)))

    def _without_known(
        self,
        flush: ActiveFlush,
        pieces: Sequence[Piece],
        digests: Sequence[bytes],
        buffer: memoryview,
    ) -> tuple[list[Piece], list[bytes], memoryview]:
        """Name what the newest commit has, and move the other bytes together."""
        found: dict[Piece, Extent] = {}
        missing: list[Piece] = []
        missing_digests: list[bytes] = []
        at = end = 0
        for piece, digest in zip(pieces, digests, strict=True):
            extent = self._find(flush, digest)
            if extent is not None:
                found[piece] = extent
            else:
                if at > end:
                    buffer[end : end + piece.size_bytes] = bytes(buffer[at : at + piece.size_bytes])
                missing.append(piece)
                missing_digests.append(digest)
                end += piece.size_bytes
            at += piece.size_bytes
        flush.count_compared(at - end)
        self._note(flush, found)
        return missing, missing_digests, buffer[:end]

    def _find(self, flush: ActiveFlush, digest: bytes) -> Extent | None:
        """Stored bytes with this digest that a manifest may name."""
        found = self._known.find(digest)
        if found is None:
            return None
        is_stored = found.is_confirmed or flush.checks.is_stored(
            self._store, self._known, found.extent.chunk
        )
        return found.extent if is_stored else None

    def _created(
        self, flush: ActiveFlush, pieces: Sequence[Piece], digest: bytes, data: memoryview
    ) -> Chunk:
        def moved(size_bytes: int) -> None:
            if size_bytes > 0 and not any(map(flush.queue.wants, pieces)):
                raise Cancelled
            flush.count_sent(size_bytes)

        for is_last in (False, True):
            key = self._keys.chunk(flush.queue.generation, digest, self._nonce())
            try:
                self._store.create(key, data, moved=moved)
            except Exists:  # the key holds other bytes, and is spent
                if is_last:
                    raise
            else:
                return Chunk(key, data.nbytes)
        raise AssertionError("unreachable")

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


def _extents(pieces: Sequence[Piece], chunk: Chunk, offset: int) -> list[Extent]:
    """The pieces of a chunk from this offset, one after the other."""
    extents = []
    for piece in pieces:
        extents.append(Extent(chunk, offset, piece.size_bytes))
        offset += piece.size_bytes
    return extents
