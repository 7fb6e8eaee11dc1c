# SPDX-License-Identifier: Apache-2.0
"""Operations of the file store on files and directories, and the classification of their errors.

Everything below the root is opened by descriptors, one name at a time, and no link is followed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from swansong.openat import drop_acls, open_directory

from swansong_bucket.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansong_bucket.stores.base import Body

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE_ATTEMPTS = 100

_TRANSIENT = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOLCK,
    errno.ENOTEMPTY, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
    errno.EREMOTEIO, errno.ENOTCONN, errno.ENODEV, errno.ECONNREFUSED, errno.ECONNABORTED,
}  # fmt: skip
_HINTS = {
    errno.ENOSPC: "The file system of store.url is full: make room there",
    errno.EDQUOT: "The quota on the file system of store.url is used up",
    errno.EACCES: "Give the user of this process the right to read and write below store.url",
    errno.EPERM: "The file system of store.url must allow writing and hard links to the daemon's user",
    errno.EROFS: "The file system of store.url is mounted read-only",
    errno.EXDEV: "Everything below store.url must lie on one file system",
    errno.EOPNOTSUPP: "The file system of store.url must support hard links",
}


def classified(error: OSError, what: str) -> StoreError:
    """The error of the contract for an error of the file system."""
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
    """Turn errors of the file system into errors of the contract that name the operation ``what``."""
    try:
        yield
    except OSError as error:
        raise classified(error, what) from error


# ---------------------------------------------------------------- directories


@dataclass(frozen=True, slots=True)
class Modes:
    """Permission bits of new directories and files; umask and default ACLs have no effect."""

    directory: int
    file: int


def opened_or_made(name: str, dir_fd: int, modes: Modes) -> int:
    """Open a directory; create it if it does not exist.

    Raises:
        FileNotFoundError: the directory above it was removed meanwhile.
        OSError: the file system refused.  Never FileExistsError, which would mean that the object exists.
    """
    for _ in range(_MAKE_ATTEMPTS):
        with suppress(FileNotFoundError):
            return open_directory(name, dir_fd=dir_fd)
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=dir_fd)
            # A concurrent delete may remove it: a delete removes empty directories.
            with suppress(FileNotFoundError):
                return _widened(open_directory(name, dir_fd=dir_fd), modes.directory)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def new_file(name: str, dir_fd: int, modes: Modes) -> int:
    """Create a file and open it for writing.

    Raises:
        FileExistsError: the name exists.
        OSError: the file system refused.
    """
    fd = os.open(name, os.O_WRONLY | _NEW, 0o600, dir_fd=dir_fd)
    return _widened(fd, modes.file)


def _widened(fd: int, mode: int) -> int:
    """Set ``mode`` of a file or directory that was created for its owner alone; returns its descriptor.

    File servers that give all files one owner and one mode refuse this: the file then keeps its mode.
    """
    try:
        drop_acls(fd)
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL):
            os.close(fd)
            raise
    return fd


# ---------------------------------------------------------------- bytes


def write_body(fd: int, body: Body, what: str) -> None:
    """Write a body; exceptions of the body pass unchanged."""
    body.rewind()
    done = 0
    while window := body.next_window():
        with errors_of(what):
            write_all(fd, window, done)
        done += window.nbytes


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write ``data`` at ``offset``."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)


def read_all(fd: int, into: memoryview, offset: int, key: str) -> None:
    """Fill ``into`` from ``offset``; raises Transient if the file ends early."""
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise Transient(f"get {key}: the file ended early")
        done += count
