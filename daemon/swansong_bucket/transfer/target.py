# SPDX-License-Identifier: Apache-2.0
"""The directory that a restore writes to: a hidden sibling of the destination, renamed when it is complete.

::

    .NAME.partial-<nonce>/          mode 0700, locked by its restore
        files/                      renamed to NAME
        journal                     the chunks that are written; see journal.py

Names are resolved one component at a time, relative to open directories, and links are never followed.  So a
user who can write beside the destination cannot redirect the bytes.  An interrupted restore is continued
only if its directory and all files in it belong to this user alone: another owner could still change the
published files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from swansong import openat

from swansong_bucket.errors import StagingError, Stopped, StoreError, SwansongError
from swansong_bucket.format.manifest import chunks_of
from swansong_bucket.model import Chunk, StoredShard
from swansong_bucket.stores.file.io import write_all
from swansong_bucket.transfer import journal
from swansong_bucket.transfer.journal import Noted

_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND
_FILES, _JOURNAL = "files", "journal"
_PARTIAL = re.compile(r"\.(.+)\.partial-[0-9a-f]{16}")
_WORKING_MODE = 0o700
_BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""
_FICLONERANGE = 0x4020940D
"""From ``linux/fs.h``; on XFS and Btrfs."""


class NoRoom(StagingError):
    """The file system has too little space for the files and the spare sets."""

    has_other_vms = False
    """The files are the shares of several VMs, and each spare set is the share of one."""


@dataclass(frozen=True, slots=True)
class Access:
    """Read access to the restored files; only their owner may write."""

    file_mode: int
    gid: int | None = None
    """Group of all files and directories; None: the group of the process."""

    @property
    def directory_mode(self) -> int:
        """The file mode, with permission to enter for each reader."""
        return self.file_mode | (self.file_mode & 0o444) >> 2

    @classmethod
    def by_umask(cls) -> Access:
        """The access that the umask of the process allows, but writable for the owner alone."""
        with open("/proc/self/status", "rb") as status:
            masks = (int(line.split()[1], 8) for line in status if line.startswith(b"Umask:"))
            mask = next(masks, 0o077)  # not every kernel shows the mask
        return cls(0o644 & ~mask)


@dataclass(eq=False, repr=False)
class RestoredFile:
    """A file of the target.

    Its methods raise StagingError and never OSError: a store that calls them would take an OSError for a
    failure of its own connection.
    """

    fd: int
    writing: threading.Lock
    errors: Callable[[], AbstractContextManager[None]]

    def write(self, data: memoryview, offset: int) -> None:
        """Put all of ``data`` at ``offset``."""
        # The kernel admits one writer to a file at a time; without the lock the others would spin.
        with self.errors(), self.writing:
            write_all(self.fd, data, offset)

    def clone(self, fd: int, offset: int, size_bytes: int) -> bool:
        """Share the blocks of another file's range; False if the file system cannot."""
        try:
            fcntl.ioctl(self.fd, _FICLONERANGE, struct.pack("qQQQ", fd, offset, size_bytes, offset))
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """Make the file durable."""
        with self.errors():
            os.fsync(self.fd)

    def read_into(self, window: memoryview, offset: int) -> int:
        """As :func:`read_window`."""
        return read_window(self.fd, window, offset)


def read_window(fd: int, window: memoryview, offset: int) -> int:
    """Number of bytes read into ``window``; 0 at the end of the file and after an error."""
    try:
        return os.preadv(fd, [window], offset)
    except OSError:
        return 0


class RestoreTarget:
    """A directory that is complete or absent.

    A context manager.  On exit without :meth:`publish` it removes the partial directory, unless an error of
    the store, ``Stopped`` or a signal ended the restore.  The next restore of the same commit to the same
    destination then reuses the chunks.  :meth:`file` and :meth:`note` may be called from many threads.

    Args:
        destination: path of the directory; its parent must not be a link.
        parent_fd: its parent, open; None opens the parent, and creates it if necessary.
        access: permissions of the restored files.
        extends: the destination exists, and gets further files.
        spare_sets: further checkpoints that must have room beside the restored files.
        is_scratch: the caller deletes the parent, so no restore can reuse the chunks.

    Raises:
        StagingError: on entry, unless ``destination`` is absent or an empty directory; from each method,
            when the file system fails.
    """

    def __init__(
        self,
        destination: Path,
        *,
        parent_fd: int | None = None,
        access: Access | None = None,
        extends: bool = False,
        spare_sets: int = 0,
        is_scratch: bool = False,
    ) -> None:
        self.destination = destination
        self._access = access or Access.by_umask()
        self._extends = extends
        self._spare_sets = spare_sets
        self._is_scratch = is_scratch
        self._name = ""
        self._place = destination.name
        """The destination, relative to the directory that has the partial one."""
        self._given_parent_fd = parent_fd
        self._parent_fd = -1
        self._partial_fd = -1
        self._files_fd = -1
        self._journal_fd = -1
        self._is_locked = False
        self._has_chunks = False
        self._is_synced = True
        """Whether each file was synced after its last write; else the file system is."""
        self._directories: set[tuple[str, ...]] = set()
        self._writing: dict[str, threading.Lock] = {}

    def __enter__(self) -> Self:
        try:
            self._check_destination()
        except BaseException:
            self._close_parent()
            raise
        return self

    def _check_destination(self) -> None:
        with self._errors():
            if self._given_parent_fd is not None:
                self._parent_fd = os.dup(self._given_parent_fd)
            if self._extends:
                return
            try:
                found = self._open_destination()
            except FileNotFoundError:
                return
            except NotADirectoryError:
                if not os.path.lexists(self.destination):
                    raise  # a file in place of a directory above it
                found = None
            is_free = found is not None and not os.listdir(found)
            if found is not None:
                os.close(found)
            if not is_free:
                raise StagingError(
                    f"{self.destination} exists and is not an empty directory",
                    hint="Name another directory to restore to, or move this one away",
                )
            if os.path.ismount(self.destination):
                raise StagingError(
                    f"{self.destination} is a mount point, which cannot be replaced",
                    hint="Name a directory below it",
                )

    def _open_destination(self) -> int | None:
        try:
            if self._parent_fd >= 0:
                return openat.open_directory(self.destination.name, dir_fd=self._parent_fd)
            return openat.open_directory(self.destination)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A retry fixes neither an unusable destination nor a damaged commit.
        is_retryable = not isinstance(error, SwansongError) or isinstance(
            error, StoreError | Stopped
        )
        keeps = self._has_chunks and self._is_locked and not self._is_scratch
        if error is None or not (is_retryable and keeps):
            self._discard()
        elif isinstance(error, SwansongError):
            reuse = f"The fetched chunks stay: the next restore to {self.destination} reuses them"
            error.hint = f"{error.hint}. {reuse}" if error.hint else reuse
        self._close()
        self._close_parent()

    def begin(
        self,
        identity: str,
        shards: Sequence[StoredShard],
        *,
        set_bytes: int,
    ) -> Noted:
        """Prepare a place for each of these shards, if there is enough space.

        Continues an interrupted restore of the same ``identity``, and removes all other partial
        directories of this destination, including one of this restore.

        Args:
            identity: of the restore, see :func:`journal.identity_of`.
            shards: those that are restored; other restores of the same commit may have others.
            set_bytes: size of one of the spare sets.

        Returns:
            The chunks that the journal names.  The caller must read them back and verify them.
        """
        with self._errors():
            if self._extends and os.path.ismount(self.destination):
                self._place = "."  # a rename stays on one file system
                self._parent_fd = openat.open_directory(self.destination)
            elif self._parent_fd < 0:
                os.makedirs(self.destination.parent, exist_ok=True)
                self._parent_fd = openat.open_directory(self.destination.parent)
            self._discard()
            noted = self._take_over(identity, chunks_of(shards))
            if not noted:
                self._create()
            self._has_chunks = bool(noted)
            self._files_fd = self._open_or_make(self._partial_fd, _FILES, _WORKING_MODE)
            if noted:
                self._remove_others({shard.path for shard in shards})
            self._check_space(shards, set_bytes)
            for shard in shards:
                self._make_directories(shard.path)
                if noted:  # a file of the interrupted restore may have any size
                    with self._open(shard.path) as fd:
                        os.ftruncate(fd, shard.size_bytes)
            self._writing = {shard.path: threading.Lock() for shard in shards}
            if noted:
                self._journal_fd = _open_own(
                    _JOURNAL, _APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._partial_fd
                )
            else:
                self._journal_fd = openat.create_file(
                    _JOURNAL, dir_fd=self._partial_fd, flags=_APPEND
                )
                os.write(self._journal_fd, journal.first_line(identity))
            return noted

    @property
    def leaves_room(self) -> bool:
        """Whether it leaves room for further checkpoints: nothing waits for this restore."""
        return self._spare_sets > 0

    def expect_capacity(self, size_bytes: int) -> None:
        """Check that the file system could have room for this many bytes if it were empty.

        Raises:
            NoRoom: it could not.
        """
        space = os.fstatvfs(self._parent_fd)
        capacity_bytes = space.f_blocks * space.f_frsize
        if size_bytes > capacity_bytes:
            error = NoRoom(
                f"{self.destination} needs about {size_bytes} bytes; its file system has {capacity_bytes}",
                hint="Restore to another file system",
            )
            error.has_other_vms = True
            raise error

    @contextmanager
    def file(self, path: str) -> Iterator[RestoredFile]:
        """One of the files, open; created if it does not exist."""
        with self._errors(), self._open(path) as fd:
            yield RestoredFile(fd, self._writing[path], self._errors)

    def duplicate(self) -> int:
        """Another descriptor of the directory with the files, which the caller closes."""
        with self._errors():
            return os.dup(self._files_fd)

    def note(self, chunk: Chunk, *, is_of_store: bool) -> None:
        """Record that the bytes of this chunk are in their files, and whether they came from the store."""
        with self._errors():
            # In one write, so that threads do not mix lines; the reader skips a torn line.
            os.write(self._journal_fd, journal.line(chunk, is_of_store=is_of_store))
        self._has_chunks = True

    def sync_at_publish(self) -> None:
        """Some files are not synced: :meth:`publish` makes all of them durable."""
        self._is_synced = False

    def publish(self) -> None:
        """Make all files durable, and rename the directory to the destination."""
        with self._errors():
            if not self._is_synced:
                sync_file_system(self._files_fd)
            for parts in self._directories if self._is_synced else ():
                with self._directory(parts) as fd:
                    os.fsync(fd)
            if self._extends:
                self._move_files()
                self._discard()
                return
            os.fchmod(self._files_fd, self._access.directory_mode)
            os.fsync(self._files_fd)
            os.rename(
                _FILES,
                self.destination.name,
                src_dir_fd=self._partial_fd,
                dst_dir_fd=self._parent_fd,
            )
            os.fsync(self._parent_fd)
        self._discard()

    def _move_files(self) -> None:
        """Move each file into the existing destination, where it appears whole."""
        partial_fd = self._files_fd
        self._files_fd = openat.open_directory(
            self._place, dir_fd=self._parent_fd, owners={os.geteuid()}
        )
        try:
            self._directories.clear()
            for path in self._writing:
                self._make_directories(path)
                *parents, name = path.split("/")
                with ExitStack() as stack:
                    source_fd = partial_fd
                    for parent in parents:
                        source_fd = openat.open_directory(parent, dir_fd=source_fd)
                        stack.callback(os.close, source_fd)
                    target_fd = stack.enter_context(self._directory(tuple(parents)))
                    os.rename(name, name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
            for parts in (*self._directories, ()):
                with self._directory(parts) as fd:
                    os.fsync(fd)
        finally:
            os.close(partial_fd)

    # ------------------------------------------------------------ the partial directory

    def _take_over(self, identity: str, chunks: Sequence[Chunk]) -> Noted:
        """Open the partial directory of an interrupted restore with this identity; remove all others.

        Directories of running restores and of other users stay untouched.  Returns the chunks in the journal;
        none if there is no such directory.
        """
        taken: Noted = {}
        for name in sorted(os.listdir(self._parent_fd)):
            match = _PARTIAL.fullmatch(name)
            if match is None or match[1] != self.destination.name:
                continue
            fd = self._locked(name)
            if fd is None:
                continue
            noted = None if taken else _journal(fd, identity, chunks)
            if noted:
                taken = noted
                self._name, self._partial_fd, self._is_locked = name, fd, True
            else:
                self._remove(name, fd)
                os.close(fd)
        return taken

    def _create(self) -> None:
        self._name = f".{self.destination.name}.partial-{secrets.token_hex(8)}"
        self._partial_fd = openat.make_directory(
            self._name, dir_fd=self._parent_fd, mode=_WORKING_MODE
        )
        try:
            fcntl.flock(self._partial_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # a network file system without locks: the partial directory is never reused
        self._is_locked = True

    def _locked(self, name: str) -> int | None:
        """Open and lock the directory of this name; None if another user or a running restore owns it."""
        try:
            fd = openat.open_directory(name, dir_fd=self._parent_fd, owners={os.geteuid()})
        except OSError:
            return None
        try:
            is_ours = stat.S_IMODE(os.fstat(fd).st_mode) == _WORKING_MODE and not openat.has_acl(fd)
            if is_ours and set(os.listdir(fd)) <= {_FILES, _JOURNAL}:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its earlier owner may have removed or renamed it before the lock was free.
                if os.path.samestat(
                    os.fstat(fd), os.stat(name, dir_fd=self._parent_fd, follow_symlinks=False)
                ):
                    return fd
        except OSError:
            pass  # locked by a running restore
        os.close(fd)
        return None

    def _remove(self, name: str, fd: int) -> None:
        """Empty a directory by its descriptor, and remove it; another process may have taken the name."""
        with suppress(OSError):
            openat.empty_directory(fd)
            os.rmdir(name, dir_fd=self._parent_fd)

    def _remove_others(self, wanted: Collection[str]) -> None:
        """Remove the files that an interrupted restore of further shards began."""
        for parent, _, names, directory_fd in os.fwalk(".", dir_fd=self._files_fd):
            for name in names:
                if os.path.normpath(os.path.join(parent, name)) not in wanted:
                    os.unlink(name, dir_fd=directory_fd)

    def _check_space(self, shards: Sequence[StoredShard], set_bytes: int) -> None:
        """Require space for all shards and the spare sets, less the blocks that are allocated already."""
        here_bytes = 0
        for _, _, names, directory_fd in os.fwalk(".", dir_fd=self._files_fd):
            for name in names:
                status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
                here_bytes += min(status.st_blocks * _BLOCK_BYTES, status.st_size)
        space = os.fstatvfs(self._parent_fd)
        free_bytes = space.f_bavail * space.f_frsize
        size_bytes = sum(shard.size_bytes for shard in shards)
        needed_bytes = size_bytes + self._spare_sets * set_bytes - here_bytes
        if needed_bytes > free_bytes:
            error = NoRoom(
                f"{self.destination} needs {needed_bytes} bytes; {free_bytes} are free there",
                hint="Make room, or restore to another file system",
            )
            error.has_other_vms = set_bytes < size_bytes
            raise error

    def _discard(self) -> None:
        if self._partial_fd >= 0:
            self._remove(self._name, self._partial_fd)
        self._close()

    def _close(self) -> None:
        for fd in (self._journal_fd, self._files_fd, self._partial_fd):
            if fd >= 0:
                os.close(fd)
        self._journal_fd = self._files_fd = self._partial_fd = -1
        self._is_locked = self._has_chunks = False
        self._is_synced = True
        self._directories.clear()

    def _close_parent(self) -> None:
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1

    # ------------------------------------------------------------ within

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StagingError(
                f"writing to {self.destination} failed: {error.strerror}",
                hint="Name another directory",
            ) from error

    @contextmanager
    def _open(self, path: str) -> Iterator[int]:
        *parents, name = path.split("/")
        with self._directory(tuple(parents)) as directory:
            try:
                fd = openat.create_file(
                    name, dir_fd=directory, mode=self._access.file_mode, flags=os.O_RDWR
                )
            except FileExistsError:
                fd = _open_own(name, _FILE, dir_fd=directory)
        try:
            self._give_to_group(fd)
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        fd = os.dup(self._files_fd)
        try:
            for part in parts:
                below = openat.open_directory(part, dir_fd=fd, owners={os.geteuid()})
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _make_directories(self, path: str) -> None:
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            parts = tuple(parents[:depth])
            if parts not in self._directories:
                with self._directory(parts[:-1]) as above:
                    os.close(self._open_or_make(above, parts[-1], self._access.directory_mode))
                self._directories.add(parts)

    def _open_or_make(self, parent_fd: int, name: str, mode: int) -> int:
        try:
            fd = openat.make_directory(name, dir_fd=parent_fd, mode=mode)
        except FileExistsError:
            return openat.open_directory(name, dir_fd=parent_fd, owners={os.geteuid()})
        self._give_to_group(fd)
        return fd

    def _give_to_group(self, fd: int) -> None:
        gid = self._access.gid
        if gid is not None and os.fstat(fd).st_gid != gid:
            # The unit's sandbox forbids the call, but new files have the right group there anyway.
            with suppress(PermissionError):
                os.fchown(fd, -1, gid)


def _open_own(name: str, flags: int, *, dir_fd: int) -> int:
    """Open a file that an earlier restore of this user created.

    Raises:
        OSError: it is missing, a link, owned by another user, or has a second name, through which other
            users could change it.
    """
    fd = os.open(name, flags, dir_fd=dir_fd)
    facts = os.fstat(fd)
    is_ours = facts.st_uid == os.geteuid() and facts.st_nlink == 1 and not facts.st_mode & 0o022
    if not (stat.S_ISREG(facts.st_mode) and is_ours):
        os.close(fd)
        raise openat.UnsafeFileError(name, "is not a file of an earlier restore by this user")
    return fd


def sync_file_system(fd: int) -> None:
    """Make everything on the file system of ``fd`` durable: one call instead of one for each small file.

    Raises:
        OSError: a write to the file system failed since ``fd`` was opened (from Linux 5.8).
    """
    import ctypes  # noqa: PLC0415 - slow to import, and few restores have small files

    if ctypes.CDLL(None, use_errno=True).syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _journal(fd: int, identity: str, chunks: Sequence[Chunk]) -> Noted | None:
    try:
        data = openat.read_file(
            _JOURNAL,
            dir_fd=fd,
            max_bytes=journal.BYTES_MAX,
            owners={os.geteuid()},
        )
    except OSError:
        return None
    return journal.parse(data, identity, chunks)


def interrupted(parent_fd: int, prefix: str = "") -> str | None:
    """Name of the destination of an unfinished restore in an open directory; None without one.

    Only names with the prefix count.  If there are several, it is the first in the order of names.  The next
    restore checks whether its owner lives.
    """
    for name in sorted(os.listdir(parent_fd)):
        match = _PARTIAL.fullmatch(name)
        if match is not None and match[1].startswith(prefix):
            try:
                os.stat(match[1], dir_fd=parent_fd, follow_symlinks=False)
            except FileNotFoundError:
                return match[1]
    return None
