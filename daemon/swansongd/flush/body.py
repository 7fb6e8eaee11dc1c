# SPDX-License-Identifier: Apache-2.0
"""Splits staged files into parts, and reads each part as the body of a request."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from blake3 import blake3

from swansongd.digests import PART_SIZE_BYTES_MAX, part_count
from swansongd.errors import StagingError, Transient
from swansongd.model import StagedFile
from swansongd.staging import scan
from swansongd.stores.base import WINDOW_BYTES
from swansongd.stores.checksums import crc32c

T = TypeVar("T")

PARTS_MAX = 10_000
"""Limit for one object, in S3 and in GCS."""
LARGE_FILE_BYTES = 8 * 2**30
"""Above this size parts are twice as large: half the requests, and still hundreds of parts."""
_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Cancelled(Exception):
    """The bytes are not needed any more.  Not a StoreError, so the request is not retried."""


def part_size_for(
    size_bytes: int, *, wanted_bytes: int, least_bytes: int, known_bytes: int | None = None
) -> int:
    """The part size of a file of ``size_bytes``.

    Args:
        wanted_bytes: as configured; doubled for large files, and until there are at most PARTS_MAX parts.
        least_bytes: minimum that the store requires of every part but the last.
        known_bytes: the part size of an earlier file under the same path.  It stays if it is valid and at
            most a factor of two away: with another part size, no part would be equal.
    """
    part_size_bytes = max(wanted_bytes, least_bytes)
    if size_bytes > LARGE_FILE_BYTES:
        part_size_bytes *= 2
    while part_count(size_bytes, part_size_bytes) > PARTS_MAX:
        part_size_bytes *= 2
    part_size_bytes = min(part_size_bytes, PART_SIZE_BYTES_MAX)
    if known_bytes is None or not part_size_bytes / 2 <= known_bytes <= 2 * part_size_bytes:
        return part_size_bytes
    is_valid = (
        least_bytes <= known_bytes <= PART_SIZE_BYTES_MAX
        and part_count(size_bytes, known_bytes) <= PARTS_MAX
    )
    return known_bytes if is_valid else part_size_bytes


@contextmanager
def opened(directory: scan.SetDirectory, file: StagedFile) -> Iterator[int]:
    """A descriptor of a staged file that must not change before the context ends.

    Raises:
        StagingError: the file differs from what the scan saw, at the beginning or at the end.
        Transient: no file descriptor or no memory is left; the file may be good.
    """
    fd = within_means(lambda: directory.open(file))
    try:
        yield fd
        if not scan.unchanged(fd, file):
            raise StagingError(f"{file.path} changed while it was read")
    finally:
        os.close(fd)


def within_means(opening: Callable[[], T]) -> T:
    """The result of ``opening``; raises Transient if no file descriptor or no memory is left."""
    try:
        return opening()
    except StagingError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _OUT_OF_MEANS:
            raise Transient(str(error), hint="raise LimitNOFILE= of the unit") from error
        raise


class FileBody:
    """A range of an open file as the body of a request; computes its BLAKE3 while it is sent.

    Args:
        fd: of the file; open while the body is in use.
        path: of the file, for error messages.
        offset: of the first byte.
        is_unwanted: called before each window; if it returns True, reading raises Cancelled.
        moved: called with the length of each window, and with a negative number of bytes after a rewind.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        offset: int,
        size_bytes: int,
        *,
        is_unwanted: Callable[[], bool],
        moved: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        self.size_bytes = size_bytes
        self._fd = fd
        self._path = path
        self._offset = offset
        self._is_unwanted = is_unwanted
        self._moved = moved
        self._done_bytes = 0
        self.rewind()

    def rewind(self) -> None:
        if self._done_bytes:
            self._moved(-self._done_bytes)
        self._done_bytes = 0
        self._hash = blake3()

    def read_into(self, window: memoryview) -> None:
        """Fill the window with the next bytes of the file.

        Raises:
            StagingError: the file cannot be read, or was truncated.
            Cancelled: the bytes are not needed any more.
        """
        if self._is_unwanted():
            raise Cancelled
        at = self._offset + self._done_bytes
        done = 0
        while done < len(window):
            try:
                count = os.preadv(self._fd, [window[done:]], at + done)
            except OSError as error:
                raise StagingError(f"{self._path} cannot be read: {error.strerror}") from error
            if not count:
                raise StagingError(f"{self._path} ends early: it was truncated after it was sealed")
            done += count
        self._hash.update(window)
        self._done_bytes += done
        self._moved(done)

    def read_all(self) -> int:
        """Read all bytes, only for the digest and the CRC32C; returns the CRC32C."""
        self.rewind()
        value = 0
        window = memoryview(bytearray(min(WINDOW_BYTES, self.size_bytes)))
        while self._done_bytes < self.size_bytes:
            read = window[: self.size_bytes - self._done_bytes]
            self.read_into(read)
            value = crc32c(read, value)
        return value

    @property
    def digest(self) -> bytes:
        """BLAKE3 of the body; valid once all bytes have been read since the last rewind."""
        assert self._done_bytes == self.size_bytes, (
            "the store acknowledged a body that it had not read"
        )
        return self._hash.digest()
