# SPDX-License-Identifier: Apache-2.0
"""Makes the staging directory of a run ready, and holds it for one daemon alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swansong import protocol

from swansongd.errors import StagingError
from swansongd.staging import scan

OWN_DIRECTORY = ".swansongd"
"""The daemon's own, below the staging directory of the run: lock and upload journal."""
RUN_DIRECTORY_MODE = 0o1770
"""Trainers come in by the group; the sticky bit keeps them from renaming what is the daemon's."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The staging directory of a run, held until :meth:`release` or the end of the process."""

    path: Path
    lock_fd: int

    @property
    def own(self) -> Path:
        """Where the daemon keeps its own state; nobody else may look in."""
        return self.path / OWN_DIRECTORY

    def release(self) -> None:
        """Let another daemon have it."""
        os.close(self.lock_fd)


def prepare(staging: Path, run: str) -> RunDirectory:
    """Create ``<staging>/<run>`` and the daemon's own directory in it, and lock them.

    The staging directory itself must exist: were a mount missing, the root disk would fill up instead.

    Raises:
        StagingError: it is missing, not writable, not ours, or another daemon holds it.
    """
    if "/" in run or run.startswith(".") or not protocol.is_safe_path(run):
        raise StagingError(f"{run!r:.100} cannot be the name of a directory", hint="change run")
    path = staging / run
    with _explained(staging, "create or mount it, or change staging.path"):
        staging_fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _explained(path, "let the daemon's user write to the staging directory"):
            run_fd = _own_directory(staging_fd, run, RUN_DIRECTORY_MODE, {0, os.geteuid()})
    finally:
        os.close(staging_fd)
    try:
        with _explained(path, "let the daemon's user write there"):
            own_fd = _own_directory(run_fd, OWN_DIRECTORY, 0o700, {os.geteuid()})
            try:
                lock_fd = _lock(own_fd, path)
            finally:
                os.close(own_fd)
            try:
                _probe(run_fd)
                scan.remove_leftovers(run_fd)
            except BaseException:
                os.close(lock_fd)
                raise
    finally:
        os.close(run_fd)
    return RunDirectory(path, lock_fd)


def _own_directory(parent_fd: int, name: str, mode: int, owners: set[int]) -> int:
    is_new = True
    try:
        os.mkdir(name, mode, dir_fd=parent_fd)
    except FileExistsError:
        is_new = False
    directory_fd = os.open(name, scan.DIRECTORY_FLAGS, dir_fd=parent_fd)
    try:
        facts = os.fstat(directory_fd)
        if facts.st_uid not in owners:
            raise StagingError(
                f"{name} in staging belongs to user id {facts.st_uid}",
                hint="remove it, or give it to the daemon's user",
            )
        if is_new and facts.st_mode & 0o7777 & mode != mode:  # the umask took something away
            os.fchmod(directory_fd, facts.st_mode & 0o7777 | mode)
    except BaseException:
        os.close(directory_fd)
        raise
    return directory_fd


def _lock(own_fd: int, path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock_fd = os.open("lock", flags, 0o600, dir_fd=own_fd)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise StagingError(
            f"another swansongd works in {path}", hint="stop it, or give this one another run"
        ) from None
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _probe(run_fd: int) -> None:
    name = f".probe-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=run_fd)  # of a process that was killed right here
    os.close(os.open(name, flags, 0o600, dir_fd=run_fd))
    os.unlink(name, dir_fd=run_fd)


@contextmanager
def _explained(path: Path, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StagingError(f"{path} cannot be used: {error.strerror}", hint=hint) from error
