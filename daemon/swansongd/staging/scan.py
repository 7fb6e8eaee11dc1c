# SPDX-License-Identifier: Apache-2.0
"""Walks, opens and removes sealed sets in staging.  The contents of staging are untrusted.

Names are resolved through directory descriptors, one component at a time, and links are never followed.  So
the daemon reads exactly the file that it checked.  Only regular files are allowed, with one name, on one
device, owned by a user of ``trainer.users``.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from swansong import bounds, openat
from swansong.bounds import FILES_MAX, BoundsError
from swansong_bucket.errors import StagingError
from swansong_bucket.model import Staged, StagedFile

from swansongd.util.mounts import mount_id

OWN_DIRECTORY = ".swansongd"
"""The daemon's own directory, below that of the run: journal, claim, and sets during their removal."""
DIRECTORIES_MAX = FILES_MAX
_REMOVING_SUFFIX = ".removing"
_ASIDE_SUFFIX = ".aside"
_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def walk(
    directory_fd: int,
    allowed_uids: frozenset[int] | None = None,
    *,
    passing_over: Callable[[str], bool] | None = None,
) -> tuple[StagedFile, ...]:
    """All files below an open directory, sorted by path.

    Args:
        directory_fd: open directory of the set.
        allowed_uids: users that may own files and directories, and whose files must be readable; None checks
            neither.
        passing_over: whether to skip an entry of the top level, by its name.

    Raises:
        StagingError: an entry must not, or cannot, be uploaded; the message names it.
    """
    try:
        walking = _Walk(os.fstat(directory_fd).st_dev, allowed_uids)
        walking.enter(directory_fd, "", passing_over=passing_over)
        _check_space(directory_fd, walking.files)
    except OSError as error:
        raise StagingError(f"changed during the walk, or cannot be read: {error}") from error
    return tuple(sorted(walking.files, key=lambda file: file.path))


def _check_space(directory_fd: int, files: Sequence[StagedFile]) -> None:
    """Refuse files that are larger together than their file system: they would take days to send."""
    space = os.fstatvfs(directory_fd)
    size_bytes = sum(file.size_bytes for file in files)
    holds_bytes = space.f_blocks * space.f_frsize
    if size_bytes > holds_bytes > 0:
        raise StagingError(
            f"has {size_bytes} bytes on a file system of {holds_bytes} bytes: its files are sparse"
        )


class _Walk:
    """One walk over a set: the files so far, and the limits."""

    def __init__(self, device: int, allowed_uids: frozenset[int] | None) -> None:
        self.files: list[StagedFile] = []
        self._directories = 0
        self._device = device
        self._allowed_uids = allowed_uids

    def enter(
        self, directory_fd: int, prefix: str, *, passing_over: Callable[[str], bool] | None = None
    ) -> None:
        with os.scandir(directory_fd) as entries:
            for entry in entries:
                if passing_over is not None and passing_over(entry.name):
                    continue
                path = prefix + entry.name
                facts = entry.stat(follow_symlinks=False)
                _check(path, facts, self._device, self._allowed_uids)  # also limits the depth
                if stat.S_ISDIR(facts.st_mode):
                    self._enter_below(directory_fd, entry.name, path)
                else:
                    self._add(directory_fd, entry.name, path, facts)

    def _enter_below(self, directory_fd: int, name: str, path: str) -> None:
        self._directories += 1
        if self._directories > DIRECTORIES_MAX:
            raise StagingError(f"contains more than {DIRECTORIES_MAX} directories")
        with openat.held(openat.open_directory(name, dir_fd=directory_fd)) as inner_fd:
            self.enter(inner_fd, f"{path}/")

    def _add(self, directory_fd: int, name: str, path: str, facts: os.stat_result) -> None:
        if len(self.files) >= FILES_MAX:
            raise StagingError(f"contains more than {FILES_MAX} files")
        if self._allowed_uids is not None and not os.access(
            name, os.R_OK, dir_fd=directory_fd, effective_ids=True
        ):
            os.stat(name, dir_fd=directory_fd, follow_symlinks=False)  # or FileNotFoundError
            raise StagingError(
                f"{path!r} cannot be read by the daemon",
                hint="set umask 027 for the trainer, so that its group can read the files",
            )
        self.files.append(_staged(path, facts))


def listing(
    run_directory: int | Path,
    directory: str,
    allowed_uids: frozenset[int] | None = None,
    *,
    passing_over: Callable[[str], bool] | None = None,
) -> tuple[StagedFile, ...]:
    """The files of a set: all files below its directory, or the file itself for a set of one file.

    Raises:
        StagingError: as for :func:`walk`.
    """
    try:
        with _opened_set(run_directory, directory) as (set_fd, is_file):
            if not is_file:
                _check(directory, os.fstat(set_fd), os.fstat(set_fd).st_dev, allowed_uids)
                return walk(set_fd, allowed_uids, passing_over=passing_over)
            facts = os.stat(directory, dir_fd=set_fd, follow_symlinks=False)
            _check(directory, facts, os.fstat(set_fd).st_dev, allowed_uids)
            files = (_staged(directory, facts),)
            _check_space(set_fd, files)
            return files
    except OSError as error:
        raise StagingError(f"cannot be read: {error.strerror}") from error


def _check(
    path: str, facts: os.stat_result, device: int, allowed_uids: frozenset[int] | None
) -> None:
    _check_path(path, "the name")
    _check_facts(path, facts, device, allowed_uids)


def _check_path(path: str, field: str) -> None:
    try:
        bounds.path(path, field)
    except BoundsError as error:
        raise StagingError(str(error)) from None


def _check_facts(
    path: str, facts: os.stat_result, device: int, allowed_uids: frozenset[int] | None
) -> None:
    kind = stat.S_IFMT(facts.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise StagingError(f"{path!r} is {_kind(facts.st_mode)}")
    if kind == stat.S_IFDIR and facts.st_dev != device:
        raise StagingError(f"{path!r} is on another file system")
    if allowed_uids is not None and facts.st_uid not in allowed_uids:
        raise StagingError(
            f"{path!r} belongs to user id {facts.st_uid}", hint="add that user to trainer.users"
        )
    if kind == stat.S_IFREG and facts.st_nlink != 1:
        raise StagingError(f"{path!r} has {facts.st_nlink} names (hard links)")


def _is_same(facts: os.stat_result, file: StagedFile) -> bool:
    seen = facts.st_size, facts.st_mtime_ns, facts.st_ino
    return seen == (file.size_bytes, file.mtime_ns, file.inode)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "not a file")


def _staged(path: str, facts: os.stat_result) -> StagedFile:
    return StagedFile(
        path=path, size_bytes=facts.st_size, mtime_ns=facts.st_mtime_ns, inode=facts.st_ino
    )


def is_out_of_means(error: StagingError) -> bool:
    """Whether no file descriptor or no memory was left; the file may be good."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _OUT_OF_MEANS


class SetDirectory:
    """The open directory of a set.

    Files opened through it belong to this directory, even if another one has its name by then.  May be used
    by many threads.

    Args:
        run_directory: staging directory of the run, as a path or an open descriptor.
        directory: of the set, as in :attr:`Staged.directory`; for a set of one file, the file itself.

    Raises:
        StagingError: there is no such set.
    """

    def __init__(self, run_directory: int | Path, directory: str) -> None:
        self._directory = directory
        try:
            with _opened_set(run_directory, directory) as (set_fd, _):
                self._device = os.fstat(set_fd).st_dev
                self._fd = os.dup(set_fd)
        except OSError as error:
            raise StagingError(f"{directory} cannot be opened: {error.strerror}") from error
        except StagingError as error:
            raise StagingError(f"{directory}: {error}", hint=error.hint) from None

    def close(self) -> None:
        """Close the directory; call this once, after the last open()."""
        os.close(self._fd)

    def open(self, file: StagedFile) -> int:
        """Open one file for reading; the caller closes the descriptor.

        Args:
            file: as listed by the scan.

        Raises:
            StagingError: the file changed since the scan, or cannot be read.
        """
        where = f"{self._directory}/{file.path}"
        try:
            fd = _open_below(self._fd, file.path)
            with openat.closed_on_error(fd):
                facts = os.fstat(fd)
                if facts.st_nlink == 0:
                    raise FileNotFoundError(errno.ENOENT, "removed just now")
                _check_facts(file.path, facts, self._device, None)
                # On overlayfs a file has the device of its layer.
                if facts.st_dev != self._device and mount_id(fd) != mount_id(self._fd):
                    raise StagingError(f"{file.path!r} is on another file system")
                if not _is_same(facts, file):
                    raise StagingError("changed after it was sealed")
                os.set_blocking(fd, True)
        except OSError as error:
            raise StagingError(f"{where} cannot be opened: {error.strerror}") from error
        except StagingError as error:
            raise StagingError(f"{where}: {error}", hint=error.hint) from None
        return fd


def open_file(run_directory: int | Path, directory: str, file: StagedFile) -> int:
    """Open one file of a sealed set; see :class:`SetDirectory` for several."""
    with closing(SetDirectory(run_directory, directory)) as set_directory:
        return set_directory.open(file)


def unchanged(fd: int, file: StagedFile) -> bool:
    """Whether the open file is unchanged since the scan."""
    return _is_same(os.fstat(fd), file)


def same_listing(run_directory: int | Path, staged: Staged) -> bool:
    """Whether the set still has exactly the files of the scan, all unchanged."""
    try:
        return listing(run_directory, staged.directory) == staged.files
    except StagingError:
        return False


def remove_set(run_directory: int | Path, directory: str) -> None:
    """Delete a set; no error if it does not exist.

    The set is first renamed, so that an interrupted removal never leaves half a set.  It moves into the
    daemon's own directory, where only the daemon can create entries, so :func:`remove_leftovers` may delete
    whatever is there.

    Raises:
        StagingError: the set cannot be deleted; :func:`remove_leftovers` retries the rest.
    """
    doomed = f"{secrets.token_hex(8)}{_REMOVING_SUFFIX}"
    try:
        with opened(run_directory) as run_fd, _own_directory(run_fd) as own_fd:
            _check_name(directory)
            with suppress(FileNotFoundError):
                os.rename(directory, doomed, src_dir_fd=run_fd, dst_dir_fd=own_fd)
                openat.remove_tree(doomed, dir_fd=own_fd)
    except OSError as error:
        raise StagingError(
            f"{directory} cannot be deleted: {error.strerror}",
            hint="use a file system with ACLs for staging, or run the trainer as the daemon's user",
        ) from error


def set_aside(run_directory: int | Path, directory: str) -> None:
    """Move a set into the daemon's own directory, out of the trainers' reach; no error if it does not exist.

    :func:`remove_set_aside` deletes it.

    Raises:
        StagingError: the set cannot be moved.
    """
    try:
        with opened(run_directory) as run_fd, _own_directory(run_fd) as own_fd:
            _check_name(directory)
            name = f"{directory}.{secrets.token_hex(4)}{_ASIDE_SUFFIX}"
            with suppress(FileNotFoundError):
                os.rename(directory, name, src_dir_fd=run_fd, dst_dir_fd=own_fd)
    except OSError as error:
        raise StagingError(f"{directory} cannot be moved aside: {error.strerror}") from error


def sets_aside(own_fd: int) -> dict[str, str]:
    """The sets that were moved aside: their names in the daemon's own directory, and their former names.

    Empty if the directory cannot be read: a restore then fetches their bytes.
    """
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(own_fd) if name.endswith(_ASIDE_SUFFIX)]
    return {name: name.removesuffix(_ASIDE_SUFFIX).rpartition(".")[0] for name in names}


def remove_set_aside(run_directory: int | Path) -> None:
    """Delete the sets that were moved aside, as far as possible."""
    _remove_own(run_directory, _ASIDE_SUFFIX)


def remove_leftovers(run_directory: int | Path) -> None:
    """Delete the rest of interrupted removals, as far as possible."""
    _remove_own(run_directory, _REMOVING_SUFFIX)


def _remove_own(run_directory: int | Path, suffix: str) -> None:
    with suppress(OSError), opened(run_directory) as run_fd, _own_directory(run_fd) as own_fd:
        for name in os.listdir(own_fd):
            if name.endswith(suffix):
                with suppress(OSError):
                    openat.remove_tree(name, dir_fd=own_fd)


@contextmanager
def _own_directory(run_fd: int) -> Iterator[int]:
    with suppress(FileExistsError):
        os.close(openat.make_directory(OWN_DIRECTORY, dir_fd=run_fd, mode=0o700))
    with openat.held(
        openat.open_directory(OWN_DIRECTORY, dir_fd=run_fd, owners={os.geteuid()})
    ) as fd:
        yield fd


@contextmanager
def opened(directory: int | Path) -> Iterator[int]:
    """Descriptor of a directory; opened here unless the caller passes a descriptor.

    Raises:
        OSError: the path is not a directory, or is a link to one.
    """
    if isinstance(directory, int):
        yield directory
        return
    with openat.held(openat.open_directory(directory)) as fd:
        yield fd


@contextmanager
def _opened_set(run_directory: int | Path, directory: str) -> Iterator[tuple[int, bool]]:
    """The directory to which the paths of a set are relative, and whether the set is one file in it."""
    _check_name(directory)
    with opened(run_directory) as run_fd:
        mode = os.stat(directory, dir_fd=run_fd, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):
            yield run_fd, True
            return
        if not stat.S_ISDIR(mode):
            raise StagingError(f"is {_kind(mode)}")
        with openat.held(openat.open_directory(directory, dir_fd=run_fd)) as set_fd:
            if os.fstat(set_fd).st_dev != os.fstat(run_fd).st_dev:
                # Reads from a FUSE mount may block forever.
                raise StagingError("is on another file system")
            yield set_fd, False


def _check_name(directory: str) -> None:
    if "/" in directory:
        raise StagingError(f"{directory[:100]!r} is not a valid name of a set")
    _check_path(directory, "the name of the set")


def _open_below(directory_fd: int, path: str) -> int:
    _check_path(path, "the path within the set")
    *parents, name = path.split("/")
    if not parents:
        return os.open(name, openat.FILE, dir_fd=directory_fd)
    parent_fd = -1
    try:
        for part in parents:
            below_fd = openat.open_directory(part, dir_fd=directory_fd)
            if parent_fd >= 0:
                os.close(parent_fd)
            parent_fd = directory_fd = below_fd
        return os.open(name, openat.FILE, dir_fd=directory_fd)
    finally:
        if parent_fd >= 0:
            os.close(parent_fd)
