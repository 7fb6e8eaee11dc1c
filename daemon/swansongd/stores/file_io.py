# SPDX-License-Identifier: Apache-2.0
"""What the file store does to files and directories, and what it calls the errors of that."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from swansongd.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansongd.stores.base import WINDOW_BYTES, Body
from swansongd.stores.checksums import crc32c

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_TRANSIENT = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOLCK,
    errno.ENOTEMPTY, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
    errno.EREMOTEIO,
}  # fmt: skip
_HINTS = {
    errno.ENOSPC: "The file system of store.url is full: make room there",
    errno.EDQUOT: "The quota on the file system of store.url is used up",
    errno.EACCES: "Give the daemon's user the right to write below store.url",
    errno.EPERM: "The file system of store.url must allow writing and hard links to the daemon's user",
    errno.EROFS: "The file system of store.url is mounted read-only",
    errno.EXDEV: "Everything below store.url must lie on one file system",
    errno.EOPNOTSUPP: "The file system of store.url must support hard links",
}


def classified(error: OSError, what: str) -> StoreError:
    """The error of the contract for what the file system said."""
    number = error.errno or 0
    message = f"{what}: {os.strerror(number)}"
    if isinstance(error, FileExistsError):
        return Exists(message)
    if isinstance(error, FileNotFoundError):
        return NotFound(message)
    if number in _TRANSIENT:
        return Transient(message)
    return Permanent(message, hint=_HINTS.get(number, ""))


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Turns what the file system says into an error of the contract that says ``what`` it was."""
    try:
        yield
    except OSError as error:
        raise classified(error, what) from error


def write_body(fd: int, body: Body, offset: int, what: str) -> int:
    """Write a body, and return its CRC32C; what the body raises passes unchanged."""
    body.rewind()
    buffer = memoryview(bytearray(min(body.size_bytes, WINDOW_BYTES)))
    value = 0
    for done in range(0, body.size_bytes, WINDOW_BYTES):
        window = buffer[: body.size_bytes - done]
        body.read_into(window)
        value = crc32c(window, value)
        with errors_of(what):
            write_all(fd, window, offset + done)
    return value


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write ``data`` at ``offset``."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)


def read_all(fd: int, into: memoryview, offset: int, key: str) -> None:
    """Fill ``into`` from ``offset``; raises Transient when the file ends early."""
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise Transient(f"get {key}: the file ended early")
        done += count


def make_directory(path: str) -> bool:
    """Make it, and those above it.  False when one of them was removed meanwhile: try again.

    Not left to ``exist_ok``: a directory that goes away at the wrong moment comes out of that as
    FileExistsError, which must never be taken for an object that exists.
    """
    try:
        os.makedirs(path)
    except FileNotFoundError:
        return False
    except FileExistsError:
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            return False
        if not is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    return True


def sync_directory(path: str) -> None:
    """Make the names in it durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
