# SPDX-License-Identifier: Apache-2.0
"""The place that a restore writes to: a hidden sibling of the destination, renamed when it is whole.

::

    .NAME.partial-<nonce>/          locked by the restore that works on it
        files/                      becomes NAME
        journal                     which parts are there; see restore_journal.py

All names are resolved one component at a time, relative to open directories, and through no link, so
that nobody who may write near the destination can lead the bytes elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from swansongd import restore_journal
from swansongd.errors import StagingError, Stopped, StoreError, SwansongError
from swansongd.model import StoredShard
from swansongd.restore_journal import Noted

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FILES, _JOURNAL = "files", "journal"
_PARTIAL = re.compile(r"\.(.+)\.partial-[0-9a-f]{16}")
_BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""


class RestoredFile:
    """A file of the target.  Raises StagingError, whoever calls it: a store must not take it for its own."""

    def __init__(
        self,
        fd: int,
        writing: threading.Lock,
        errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._fd = fd
        self._writing = writing
        self._errors = errors

    def write(self, data: memoryview, offset: int) -> None:
        """Put all of ``data`` at ``offset``."""
        # The kernel lets one write a file at a time, and has the others spin for their turn.
        with self._errors(), self._writing:
            done = 0
            while done < data.nbytes:
                done += os.pwrite(self._fd, data[done:], offset + done)

    def read_into(self, window: memoryview, offset: int) -> int:
        """How many bytes of ``window`` were filled; 0 where there is nothing to read."""
        try:
            return os.preadv(self._fd, [window], offset)
        except OSError:
            return 0


class RestoreTarget:
    """A directory in the making.

    As a context manager it leaves nothing behind unless :meth:`publish` was reached, or it was ended by
    an error of the store, by ``Stopped`` or by a signal: then what is there waits for the next restore of
    the same commit to the same destination.  :meth:`file`, :meth:`note` and :meth:`sync` may be called
    from many threads.

    Args:
        destination: where the directory will stand; its parent must be no link.

    Raises:
        StagingError: on entering, when ``destination`` is anything but absent or an empty directory;
            from every method, when the file system refuses.
    """

    def __init__(self, destination: Path) -> None:
        self._destination = destination
        self._name = ""
        self._parent_fd = -1
        self._partial_fd = -1
        self._files_fd = -1
        self._journal_fd = -1
        self._is_locked = False
        self._has_parts = False
        self._directories: set[tuple[str, ...]] = set()
        self._writing: dict[str, threading.Lock] = {}

    def __enter__(self) -> Self:
        with self._errors():
            try:
                mode = os.lstat(self._destination).st_mode
            except FileNotFoundError:
                return self
            if not stat.S_ISDIR(mode) or os.listdir(self._destination):
                raise StagingError(
                    f"{self._destination} exists and is no empty directory",
                    hint="Name another directory to restore to, or move this one away",
                )
            if os.path.ismount(self._destination):
                raise StagingError(
                    f"{self._destination} is a mount point, which cannot be replaced",
                    hint="Name a directory below it",
                )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Neither a place that cannot be used nor a commit that is damaged gets better by itself.
        is_worth_keeping = not isinstance(error, SwansongError) or isinstance(
            error, StoreError | Stopped
        )
        if error is None or not (is_worth_keeping and self._has_parts and self._is_locked):
            self._discard()
        elif isinstance(error, SwansongError):
            kept = (
                f"What was fetched is kept: the next restore to {self._destination} goes on with it"
            )
            error.hint = f"{error.hint}. {kept}" if error.hint else kept
        self._close()
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1

    def begin(self, identity: str, shards: Sequence[StoredShard]) -> Noted:
        """Make a file for each shard, if there is space for what they will hold.

        Goes on with what an interrupted restore of the same ``identity`` left here; everything else that
        was left here, by this restore too, is removed.  Returns the parts that are noted, which the
        caller must read back before it believes them.
        """
        with self._errors():
            if self._parent_fd < 0:
                os.makedirs(self._destination.parent, exist_ok=True)
                self._parent_fd = os.open(self._destination.parent, _DIRECTORY)
            self._discard()
            noted = self._take_over(identity, shards)
            if noted is None:
                noted = {}
                self._create()
            self._has_parts = bool(noted)
            with suppress(FileExistsError):
                os.mkdir(_FILES, dir_fd=self._partial_fd)
            self._files_fd = os.open(_FILES, _DIRECTORY, dir_fd=self._partial_fd)
            self._check_space(shards)
            for shard in shards:
                self._make_directories(shard.path)
                with self._open(shard.path, os.O_CREAT) as fd:
                    os.ftruncate(fd, shard.size_bytes)
            self._writing = {shard.path: threading.Lock() for shard in shards}
            self._journal_fd = os.open(
                _JOURNAL, _APPEND | os.O_CREAT, 0o600, dir_fd=self._partial_fd
            )
            if not noted:
                os.ftruncate(self._journal_fd, 0)
                os.write(self._journal_fd, restore_journal.first_line(identity))
            return noted

    @contextmanager
    def file(self, path: str) -> Iterator[RestoredFile]:
        """One of the files, open."""
        with self._errors(), self._open(path) as fd:
            yield RestoredFile(fd, self._writing[path], self._errors)

    def note(self, shard_number: int, part_index: int, digest: bytes) -> None:
        """The bytes of this part are in their file."""
        with self._errors():
            # One write, so that threads do not mix their lines; a torn one is passed over.
            os.write(self._journal_fd, restore_journal.line(shard_number, part_index, digest))
        self._has_parts = True

    def sync(self, path: str) -> None:
        """Make one of the files durable."""
        with self._errors(), self._open(path) as fd:
            os.fsync(fd)

    def publish(self) -> None:
        """Make all durable, and give the directory its name."""
        with self._errors():
            for parts in self._directories:
                with self._directory(parts) as fd:
                    os.fsync(fd)
            os.fsync(self._files_fd)
            os.rename(
                _FILES,
                self._destination.name,
                src_dir_fd=self._partial_fd,
                dst_dir_fd=self._parent_fd,
            )
            os.fsync(self._parent_fd)
        self._discard()

    # ------------------------------------------------------------ the partial directory

    def _take_over(self, identity: str, shards: Sequence[StoredShard]) -> Noted | None:
        """Go on with what a dead restore of the same left; remove what other dead ones left."""
        taken: Noted | None = None
        for name in sorted(os.listdir(self._parent_fd)):
            match = _PARTIAL.fullmatch(name)
            if match is None or match[1] != self._destination.name:
                continue
            fd = self._locked(name)
            if fd is None:
                continue  # of a living restore
            journal = restore_journal.read(_JOURNAL, dir_fd=fd)
            noted = restore_journal.parse(journal, identity, shards) if taken is None else None
            if noted:
                taken = noted
                self._name, self._partial_fd, self._is_locked = name, fd, True
            else:
                shutil.rmtree(name, ignore_errors=True, dir_fd=self._parent_fd)
                os.close(fd)
        return taken

    def _create(self) -> None:
        self._name = f".{self._destination.name}.partial-{secrets.token_hex(8)}"
        os.mkdir(self._name, dir_fd=self._parent_fd)
        fd = self._locked(self._name)
        self._is_locked = fd is not None
        # Some network file systems lock no directories: then nothing is left here for others to find.
        self._partial_fd = (
            fd if fd is not None else os.open(self._name, _DIRECTORY, dir_fd=self._parent_fd)
        )

    def _locked(self, name: str) -> int | None:
        """The directory of that name, open and locked; None when a living restore has it."""
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=self._parent_fd)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it before may have removed it meanwhile, or given it its final name.
            if os.path.samestat(
                os.fstat(fd), os.stat(name, dir_fd=self._parent_fd, follow_symlinks=False)
            ):
                return fd
        except OSError:
            pass
        os.close(fd)
        return None

    def _check_space(self, shards: Sequence[StoredShard]) -> None:
        """Counts what is there already, but only the bytes that really take up space."""
        here_bytes = 0
        for _, _, names, directory_fd in os.fwalk(".", dir_fd=self._files_fd):
            for name in names:
                status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
                here_bytes += min(status.st_blocks * _BLOCK_BYTES, status.st_size)
        space = os.fstatvfs(self._parent_fd)
        free_bytes = space.f_bavail * space.f_frsize
        needed_bytes = sum(shard.size_bytes for shard in shards) - here_bytes
        if needed_bytes > free_bytes:
            raise StagingError(
                f"{self._destination} needs {needed_bytes} bytes; {free_bytes} are free there",
                hint="Make room, or restore to another file system",
            )

    def _discard(self) -> None:
        if self._partial_fd >= 0:
            shutil.rmtree(self._name, ignore_errors=True, dir_fd=self._parent_fd)
        self._close()

    def _close(self) -> None:
        for fd in (self._journal_fd, self._files_fd, self._partial_fd):
            if fd >= 0:
                os.close(fd)
        self._journal_fd = self._files_fd = self._partial_fd = -1
        self._is_locked = self._has_parts = False
        self._directories.clear()

    # ------------------------------------------------------------ within

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StagingError(
                f"cannot restore to {self._destination}: {error.strerror}"
            ) from error

    @contextmanager
    def _open(self, path: str, flags: int = 0) -> Iterator[int]:
        *parents, name = path.split("/")
        with self._directory(tuple(parents)) as directory:
            fd = os.open(name, _FILE | flags, 0o666, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StagingError(f"cannot restore to {self._destination}: {path} is no file")
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        fd = os.dup(self._files_fd)
        try:
            for part in parts:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
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
                with self._directory(parts[:-1]) as above, suppress(FileExistsError):
                    os.mkdir(parts[-1], dir_fd=above)
                self._directories.add(parts)


def interrupted(parent: Path) -> Path | None:
    """The destination within ``parent`` of a restore that was not finished, or None.

    Which of several is left open; whether its owner lives is found out by the restore that goes on.
    """
    for name in sorted(os.listdir(parent)):
        match = _PARTIAL.fullmatch(name)
        if match is not None and not os.path.lexists(parent / match[1]):
            return parent / match[1]
    return None
