# SPDX-License-Identifier: Apache-2.0
"""The place that a restore writes to: a hidden sibling of the destination, renamed when it is whole.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from swansongd.errors import StagingError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class RestoreTarget:
    """A directory in the making.

    As a context manager it leaves nothing behind unless :meth:`publish` was reached.  :meth:`write` and
    :meth:`sync` may be called from many threads.

    Args:
        destination: where the directory will stand; its parent must be no link.

    Raises:
        StagingError: on entering, when ``destination`` is anything but absent or an empty directory;
            from every method, when the file system refuses.
    """

    def __init__(self, destination: Path) -> None:
        self._destination = destination
        self._name = f".{destination.name}.partial-{secrets.token_hex(8)}"
        self._parent_fd = -1
        self._fd = -1
        self._directories: set[tuple[str, ...]] = set()

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
        self._discard()
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1

    def begin(self, sizes_bytes: Mapping[str, int]) -> None:
        """Start afresh with empty files of these paths, if there is space for what they will hold."""
        with self._errors():
            if self._parent_fd < 0:
                os.makedirs(self._destination.parent, exist_ok=True)
                self._parent_fd = os.open(self._destination.parent, _DIRECTORY)
                self._remove_leftovers()
            self._discard()
            space = os.fstatvfs(self._parent_fd)
            free_bytes, needed_bytes = space.f_bavail * space.f_frsize, sum(sizes_bytes.values())
            if needed_bytes > free_bytes:
                raise StagingError(
                    f"{self._destination} needs {needed_bytes} bytes; {free_bytes} are free there",
                    hint="Make room, or restore to another file system",
                )
            os.mkdir(self._name, dir_fd=self._parent_fd)
            self._fd = os.open(self._name, _DIRECTORY, dir_fd=self._parent_fd)
            with suppress(OSError):  # some network file systems lock no directories
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in sizes_bytes:
                self._make_directories(path)
                with self._open(path, _FILE | os.O_CREAT | os.O_EXCL):
                    pass

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Put bytes at an offset of one of the files."""
        with self._errors(), self._open(path, _FILE) as fd:
            done = 0
            while done < data.nbytes:
                done += os.pwrite(fd, data[done:], offset + done)

    def sync(self, path: str) -> None:
        """Make one of the files durable."""
        with self._errors(), self._open(path, _FILE) as fd:
            os.fsync(fd)

    def publish(self) -> None:
        """Make all durable, and give the directory its name."""
        with self._errors():
            for parts in self._directories:
                with self._directory(parts) as fd:
                    os.fsync(fd)
            os.fsync(self._fd)
            os.rename(
                self._name,
                self._destination.name,
                src_dir_fd=self._parent_fd,
                dst_dir_fd=self._parent_fd,
            )
            os.close(self._fd)
            self._fd = -1
            os.fsync(self._parent_fd)

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
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        fd = os.dup(self._fd)
        try:
            for part in parts:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        *parents, name = path.split("/")
        with self._directory(tuple(parents)) as directory:
            fd = os.open(name, flags, 0o666, dir_fd=directory)
        try:
            yield fd
        finally:
            os.close(fd)

    def _make_directories(self, path: str) -> None:
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            parts = tuple(parents[:depth])
            if parts not in self._directories:
                with self._directory(parts[:-1]) as above:
                    os.mkdir(parts[-1], dir_fd=above)
                self._directories.add(parts)

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._directories.clear()
            shutil.rmtree(self._name, ignore_errors=True, dir_fd=self._parent_fd)

    def _remove_leftovers(self) -> None:
        """Remove what restores to the same destination left that did not live to do it."""
        pattern = re.compile(rf"\.{re.escape(self._destination.name)}\.partial-[0-9a-f]{{16}}")
        for name in os.listdir(self._parent_fd):
            if not pattern.fullmatch(name):
                continue
            with suppress(OSError):
                fd = os.open(name, _DIRECTORY, dir_fd=self._parent_fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living restore holds it
                    shutil.rmtree(name, ignore_errors=True, dir_fd=self._parent_fd)
                finally:
                    os.close(fd)
