# SPDX-License-Identifier: Apache-2.0
"""Reads the bytes of one chunk from staging, once.

The digest names the chunk, so it must be known before the first byte is sent.  The bytes therefore stay in
memory between the digest and the request: what is sent is what was hashed, whatever the trainer does with its
files meanwhile, and the disk is read once.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from blake3 import blake3
from swansong.openat import held
from swansong_bucket.errors import StagingError, Transient
from swansong_bucket.model import StagedFile
from swansong_bucket.stores.base import WINDOW_BYTES
from swansong_bucket.stores.checksums import crc32c

from swansongd.flush.cutting import Piece
from swansongd.staging import scan

T = TypeVar("T")


class Cancelled(Exception):
    """The bytes are not needed any more.  Not a StoreError, so the request is not retried."""


class Buffers:
    """Buffers for chunks, used again: fresh memory costs a page fault for every 4 KiB.  Thread-safe.

    There are never more buffers than threads that have taken one at the same time.  They are anonymous maps:
    a bytearray is filled with zeros first, and other connections wait for the interpreter's lock meanwhile.
    Page faults of a shared map cost a third more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    @contextmanager
    def taken(self, size_bytes: int) -> Iterator[memoryview]:
        """A buffer of this size, while the context is open."""
        with self._lock:
            fits = [each for each in self._free if len(each) >= size_bytes]
            buffer = min(fits or self._free, key=len, default=None)
            self._free = [each for each in self._free if each is not buffer]
        if buffer is None or len(buffer) < size_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            buffer = mmap.mmap(-1, max(1, size_bytes), flags)  # replaces one that is too small
        try:
            yield memoryview(buffer)[:size_bytes]
        finally:
            with self._lock:
                self._free.append(buffer)

    def release(self) -> None:
        """Give the memory of unused buffers back."""
        with self._lock:
            self._free.clear()


class ChunkSums:
    """The digest and the CRC32C of a chunk, computed while its bytes are in the processor's cache."""

    def __init__(self) -> None:
        self.crc32c = 0
        self._hash = blake3()

    def update(self, window: memoryview) -> None:
        self._hash.update(window)
        self.crc32c = crc32c(window, self.crc32c)

    def digest(self) -> bytes:
        return self._hash.digest()


def read_piece(
    directory: scan.SetDirectory,
    piece: Piece,
    buffer: memoryview,
    is_wanted: Callable[[Piece], bool],
    taken: Callable[[memoryview], object] = lambda _window: None,
) -> None:
    """Fill the buffer, which has the size of the piece, with its bytes.

    Args:
        is_wanted: called before each window; if it returns False, reading raises Cancelled.
        taken: called with each window once it is read.

    Raises:
        StagingError: a file changed since the scan, or cannot be read.
        Transient: no file descriptor or no memory is left; the file may be good.
        Cancelled: the bytes are not needed any more.
    """
    with opened(directory, piece.file) as fd:
        for start in range(0, piece.size_bytes, WINDOW_BYTES):
            if not is_wanted(piece):
                raise Cancelled
            window = buffer[start : start + WINDOW_BYTES]
            _read(fd, piece, start, window)
            taken(window)


def _read(fd: int, piece: Piece, start: int, window: memoryview) -> None:
    path, done = piece.file.path, 0
    while done < len(window):
        try:
            count = os.preadv(fd, [window[done:]], piece.offset_bytes + start + done)
        except OSError as error:
            raise StagingError(f"{path} cannot be read: {error.strerror}") from error
        if not count:
            raise StagingError(f"{path} ends early: it was truncated after it was sealed")
        done += count


@contextmanager
def opened(directory: scan.SetDirectory, file: StagedFile) -> Iterator[int]:
    """A descriptor of a staged file that must not change before the context ends.

    Raises:
        StagingError: the file differs from what the scan saw, at the beginning or at the end.
        Transient: no file descriptor or no memory is left; the file may be good.
    """
    with held(within_means(lambda: directory.open(file))) as fd:
        yield fd
        if not scan.unchanged(fd, file):
            raise StagingError(f"{file.path} changed while it was read")


def within_means(opening: Callable[[], T]) -> T:
    """The result of ``opening``; raises Transient if no file descriptor or no memory is left."""
    try:
        return opening()
    except StagingError as error:
        if scan.is_out_of_means(error):
            raise Transient(str(error), hint="raise LimitNOFILE= of the unit") from error
        raise
