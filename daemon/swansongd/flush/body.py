# SPDX-License-Identifier: Apache-2.0
"""What a flush reads: how files are cut into parts, and parts as bodies for the store."""

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

T = TypeVar("T")

PARTS_MAX = 10_000
"""Of one object, at S3 and GCS alike."""
LARGE_FILE_BYTES = 8 * 2**30
"""From here on parts are twice as large: half the requests, and still hundreds of parts to share out."""
_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Cancelled(Exception):
    """Nobody wants these bytes any more.  No error of a store, so nothing tries again."""


def part_size_for(size_bytes: int, *, wanted_bytes: int, least_bytes: int) -> int:
    """Into parts of how many bytes a file of ``size_bytes`` is cut.

    Args:
        wanted_bytes: as configured; doubled for large files, and further while there are too many parts.
        least_bytes: what the store demands of every part but the last.
    """
    part_size_bytes = max(wanted_bytes, least_bytes)
    if size_bytes > LARGE_FILE_BYTES:
        part_size_bytes *= 2
    while part_count(size_bytes, part_size_bytes) > PARTS_MAX:
        part_size_bytes *= 2
    return min(part_size_bytes, PART_SIZE_BYTES_MAX)


@contextmanager
def opened(directory: scan.SetDirectory, file: StagedFile) -> Iterator[int]:
    """Descriptor of a staged file, which was the same before and after whatever is done with it.

    Raises:
        StagingError: it is not what the scan saw, or was not any more at the end.
        Transient: this process or this VM has no descriptor or no memory left; the file may be good.
    """
    fd = within_means(lambda: directory.open(file))
    try:
        yield fd
        if not scan.unchanged(fd, file):
            raise StagingError(f"{file.path} changed while it was read")
    finally:
        os.close(fd)


def within_means(opening: Callable[[], T]) -> T:
    """What ``opening`` gives; raises Transient when it fails for want of descriptors or memory."""
    try:
        return opening()
    except StagingError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _OUT_OF_MEANS:
            raise Transient(str(error), hint="raise LimitNOFILE= of the unit") from error
        raise


class FileBody:
    """A piece of an open file as the body of a request; knows its BLAKE3 when it has been sent.

    Args:
        fd: of the file, open for as long as the body is in use.
        path: names the file in errors.
        offset: of the first byte.
        is_unwanted: asked before each window; once it is true, reading raises Cancelled.
        moved: told the length of each window that leaves, and takes back those of a pass that did not count.
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
        """The next bytes of the file.

        Raises:
            StagingError: they cannot be read, or the file was cut.
            Cancelled: nobody wants them any more.
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
                raise StagingError(f"{self._path} ends early: it was cut after it was sealed")
            done += count
        self._hash.update(window)
        self._done_bytes += done
        self._moved(done)

    def read_all(self) -> bytes:
        """Read it through, for nothing but the digest."""
        self.rewind()
        window = memoryview(bytearray(min(WINDOW_BYTES, self.size_bytes)))
        while self._done_bytes < self.size_bytes:
            self.read_into(window[: self.size_bytes - self._done_bytes])
        return self.digest

    @property
    def digest(self) -> bytes:
        """Of the bytes of the last pass, which must have been a whole one."""
        assert self._done_bytes == self.size_bytes, "the store acknowledged what it has not read"
        return self._hash.digest()
