# SPDX-License-Identifier: Apache-2.0
"""File operations below directories that other users may write to.

Trainers, other members of their group and crashed processes write to staging, so no path there is safe
to resolve twice.  Every function takes one name and the descriptor of the directory that holds it, follows
no link, and checks the open descriptor instead of the name.  Both distributions use this module for
everything below the staging directory; ``tests/unit/hooks/test_openat_rule.py`` enforces that.

Standard library only, Python 3.10 and later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Collection, Iterator

DIRECTORY = FILE = _NEW_FILE = 0
if sys.platform != "win32":  # where no function of this module works
    DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    # Non-blocking: a FIFO under the name of a file must not block the reader.
    FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    _NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
REMOVED_ENTRIES_MAX = 1_000_000
"""Limit of :func:`empty_directory`: a process that keeps adding entries must not hold the caller forever."""
_ACL = "system.posix_acl_access"
_DEFAULT_ACL = "system.posix_acl_default"


class UnsafeFileError(OSError):
    """A file or directory that has the wrong type, owner, link count or size."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(errno.EPERM, f"{name[:100]!r} {reason}")


@contextlib.contextmanager
def held(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    """Close a descriptor if the block raises."""
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def open_directory(
    name: str | os.PathLike[str],
    *,
    dir_fd: int | None = None,
    owners: Collection[int] | None = None,
) -> int:
    """Open a directory; the caller closes the descriptor.

    Args:
        name: one name below ``dir_fd``; without ``dir_fd`` a path whose parents are trusted.
        owners: user ids that the directory may belong to; None accepts all.

    Raises:
        UnsafeFileError: the directory belongs to another user.
        OSError: there is no such directory, or the name is that of a link or a file.
    """
    fd = os.open(name, DIRECTORY, dir_fd=dir_fd)
    with closed_on_error(fd):
        _check_owner(os.fstat(fd), os.fspath(name), owners)
    return fd


def open_absolute(path: str, *, owners: Collection[int]) -> int:
    """Open a directory that another process named; the caller closes the descriptor.

    Args:
        path: absolute path, whose parents are trusted.
        owners: user ids that the directory may belong to.

    Raises:
        UnsafeFileError: the path is not absolute, or the directory belongs to another user.
        OSError: there is no such directory, or the path ends in a link or a file.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise UnsafeFileError(path, "is not an absolute path")
    return open_directory(path, owners=owners)


def make_directory(name: str, *, dir_fd: int, mode: int) -> int:
    """Create a directory with exactly this mode, whatever umask and default ACL are; returns it open.

    Default ACLs of the parent are not inherited.  The directory is created for its owner alone, and gets
    ``mode`` through its descriptor, so no other user can have put an entry into it.

    Raises:
        FileExistsError: the name is taken.
        OSError: the file system returned an error.
    """
    os.mkdir(name, 0o700, dir_fd=dir_fd)
    fd = open_directory(name, dir_fd=dir_fd, owners={os.geteuid()})
    with closed_on_error(fd):
        drop_acls(fd)
        os.fchmod(fd, mode)
    return fd


def open_file(name: str, *, dir_fd: int, owners: Collection[int] | None = None) -> int:
    """Open a regular file with a single name for reading; the caller closes the descriptor.

    Raises:
        UnsafeFileError: it is not a regular file, has several hard links, or belongs to another user.
        OSError: it cannot be opened.
    """
    fd = os.open(name, FILE, dir_fd=dir_fd)
    with closed_on_error(fd):
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise UnsafeFileError(name, "is not a regular file")
        if facts.st_nlink > 1:
            raise UnsafeFileError(name, f"has {facts.st_nlink} hard links")
        _check_owner(facts, name, owners)
    return fd


def create_file(name: str, *, dir_fd: int, mode: int = 0o600, flags: int = os.O_WRONLY) -> int:
    """Create a file that does not exist yet; the caller closes the descriptor.

    Args:
        mode: exactly this mode, whatever umask and default ACL are.
        flags: access mode, with ``O_APPEND`` where wanted.

    Raises:
        FileExistsError: the name is taken, perhaps by a link.
        OSError: the file system returned an error.
    """
    fd = os.open(name, flags | _NEW_FILE, 0o600, dir_fd=dir_fd)
    with closed_on_error(fd):
        os.fchmod(fd, mode)
    return fd


def read_file(
    name: str, *, dir_fd: int, max_bytes: int, owners: Collection[int] | None = None
) -> bytes:
    """Content of a small regular file.

    Raises:
        UnsafeFileError: as for :func:`open_file`, or the file has more than ``max_bytes``.
        OSError: it cannot be read.
    """
    fd = open_file(name, dir_fd=dir_fd, owners=owners)
    with os.fdopen(fd, "rb", buffering=0) as file:
        parts: list[bytes] = []
        left = max_bytes + 1
        if os.fstat(fd).st_size > max_bytes:  # do not read gigabytes of a hole first
            left = 0
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise UnsafeFileError(name, f"has more than {max_bytes} bytes")
    return b"".join(parts)


def replace_file(
    name: str, data: bytes, *, dir_fd: int, mode: int = 0o600, durable: bool = True
) -> None:
    """Replace the content of a file atomically: a crash leaves the old content or the new one.

    Args:
        durable: fsync file and directory, for content that must survive a power cut.

    Raises:
        OSError: the file system returned an error; the file has its old content.
    """
    temporary = f"{temporary_prefix(name)}{secrets.token_hex(8)}"
    fd = create_file(temporary, dir_fd=dir_fd, mode=mode)
    try:
        with held(fd):
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    if durable:
        os.fsync(dir_fd)


def temporary_prefix(name: str) -> str:
    """Return how the names of the temporary files begin that :func:`replace_file` makes for a file."""
    return f".{name}."


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, in as many calls as the kernel needs.

    Raises:
        OSError: the file system returned an error.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Remove a file, a link, or a directory with its contents.  A missing name is not an error.

    Raises:
        OSError: something cannot be removed, or other processes add entries faster than they are removed.
    """
    try:
        fd = os.open(name, DIRECTORY, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(name, dir_fd=dir_fd)
        return
    with held(fd):
        empty_directory(fd)
    os.rmdir(name, dir_fd=dir_fd)


def empty_directory(fd: int) -> None:
    """Remove all entries of an open directory, at most :data:`REMOVED_ENTRIES_MAX`.

    Two descriptors suffice for a tree of any depth: deep directories are moved to the top, not entered.

    Raises:
        OSError: something cannot be removed, or the limit is reached.
    """
    left = REMOVED_ENTRIES_MAX
    while left > 0:
        removed = _remove_level(fd, left, None)
        if not removed:
            return
        left -= removed
    raise OSError(errno.EBUSY, f"more than {REMOVED_ENTRIES_MAX} entries")


def _remove_level(fd: int, limit: int, top_fd: int | None) -> int:
    """Remove about ``limit`` entries of a directory, and move directories within it to ``top_fd``.

    Without ``top_fd`` the directory is the top itself, and the directories in it are emptied in this way.
    """
    removed = 0
    with os.scandir(fd) as entries:
        for entry in entries:
            if removed >= limit:
                break
            removed += 1
            if _remove_entry(entry, fd):
                continue
            if top_fd is not None:
                os.rename(entry.name, secrets.token_hex(16), src_dir_fd=fd, dst_dir_fd=top_fd)
                continue
            with held(os.open(entry.name, DIRECTORY, dir_fd=fd)) as inner_fd:
                removed += _remove_level(inner_fd, limit - removed, fd)
            with contextlib.suppress(OSError):  # the next round repeats it
                os.rmdir(entry.name, dir_fd=fd)
    return removed


def _remove_entry(entry: os.DirEntry[str], dir_fd: int) -> bool:
    """Remove a file, a link or an empty directory; False for a directory that contains something."""
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.name, dir_fd=dir_fd)
        return True
    try:
        os.rmdir(entry.name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def has_acl(fd: int) -> bool:
    """Whether a file has an access ACL.  If so, the group bits of its mode are the mask of the ACL."""
    try:
        return bool(os.getxattr(fd, _ACL))
    except OSError:
        return False


def drop_acls(fd: int) -> None:
    """Remove access and default ACL of an open directory, so that only the mode bits apply."""
    for name in (_ACL, _DEFAULT_ACL):
        try:
            os.removexattr(fd, name)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise


def displace(name: str, *, dir_fd: int) -> str:
    """Rename an entry that must not have this name, and return its new, hidden name.

    Raises:
        OSError: the directory does not permit it, or the entry does not exist.
    """
    hidden = f".displaced.{secrets.token_hex(8)}"
    os.rename(name, hidden, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    return hidden


def _check_owner(facts: os.stat_result, name: str, owners: Collection[int] | None) -> None:
    if owners is not None and facts.st_uid not in owners:
        raise UnsafeFileError(name, f"belongs to user id {facts.st_uid}")
