# SPDX-License-Identifier: Apache-2.0
"""Prepares the staging directory of a run, and locks it for one daemon."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from swansong import bounds, layout, openat
from swansong.bounds import BoundsError
from swansong_bucket.errors import StagingError

from swansongd.observe.status import StagingStatus
from swansongd.staging import acl
from swansongd.staging.scan import OWN_DIRECTORY

RUN_DIRECTORY_MODE = 0o1770
"""Trainers get access by their group; the sticky bit prevents renames of other users' entries."""
RESTORED_DIRECTORY_MODE = 0o750
_ATTEMPTS = 3
_NAMING_KEY = "naming.key"
_NAMING_KEY_BYTES = 32

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The staging directory of a run, locked until :meth:`release` or the end of the process.

    All file operations use the descriptors; the path is for messages and for trainers.
    """

    path: Path
    fd: int
    own_fd: int
    """The daemon's own directory, mode 0700, which carries the lock."""

    @property
    def own(self) -> Path:
        """Path of the daemon's own directory."""
        return self.path / OWN_DIRECTORY

    def naming_secret(self, uid: int) -> str:
        """Secret part of the names of sets, for the ranks of this user; other users cannot compute it.

        It survives a restart of the daemon, because ranks reconnect one by one.
        """
        try:
            return self._keyed(str(uid))[:32]
        except OSError:
            return ""  # a full disk: another user could compute a name, and taking it makes one save fail

    def vm(self, boot_id: str) -> str:
        """Id of the VM and its boot, which survives a restart of the daemon.

        A container with its own staging directory counts as a VM.  On one machine, all containers have the
        same boot id and path, and a later directory can get the inode of a deleted one.
        """
        facts = f"{boot_id}{self.path}"
        try:
            return self._keyed(facts)[:16]
        except OSError:  # a full disk
            return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def _keyed(self, text: str) -> str:
        return hmac.digest(_naming_key(self.own_fd), text.encode(), hashlib.sha256).hex()

    def room(self) -> StagingStatus | None:
        """Size of the file system, and the bytes that this user can still write; None if unknown."""
        try:
            facts = os.fstatvfs(self.fd)
        except OSError:
            return None
        return StagingStatus(
            size_bytes=facts.f_blocks * facts.f_frsize,
            free_bytes=facts.f_bavail * facts.f_frsize,
        )

    def release(self) -> None:
        """Release the lock."""
        os.close(self.fd)
        os.close(self.own_fd)


def prepare(staging: Path, run: str) -> RunDirectory:
    """Create ``<staging>/<run>`` and the daemon's own directory in it, and lock that directory.

    The staging directory must exist: if a mount is missing, sets must not fill the root disk.  Entries of
    other users with names that the daemon needs are moved aside.  A full disk is not an error.

    Raises:
        StagingError: the directory is missing, not writable, owned by another user, or locked by another
            daemon.
    """
    if not run or "/" in run or run.startswith("."):
        raise StagingError(
            f"{run!r:.100} is not a valid name of a directory", hint="change run.name"
        )
    try:
        bounds.path(run, "run")
    except BoundsError as error:
        raise StagingError(str(error)) from None
    path = staging / run
    with explained(staging, "create or mount it, or change staging.path"):
        # The operator configured the path, so it may be a link to the disk for staging.
        staging_fd = openat.open_directory(os.path.realpath(staging))
    explanation = explained(path, "let the daemon's user write to the staging directory")
    with openat.held(staging_fd), explanation:
        run_fd = _open_run(staging_fd, run)
        # The hooks sync their sets and the entries of this directory, but not the entry for it.
        os.fsync(staging_fd)
    with openat.closed_on_error(run_fd), explained(path, "let the daemon's user write there"):
        own_fd = open_own(run_fd, OWN_DIRECTORY, 0o700)
        with openat.closed_on_error(own_fd):
            _lock(own_fd, path)
            _probe(own_fd, path)
    return RunDirectory(path, run_fd, own_fd)


def open_restored(run_fd: int) -> int:
    """Open the directory for restored checkpoints, which trainers can read and only the daemon can write.

    Raises:
        OSError: the directory can be neither opened nor created.
    """
    return open_own(run_fd, layout.RESTORED_DIRECTORY, RESTORED_DIRECTORY_MODE)


def open_own(run_fd: int, name: str, mode: int) -> int:
    """Open a directory of the daemon in the staging directory of the run; create it if necessary.

    A link, a file, or another user's directory of that name is moved aside and never followed, also if the
    daemon has no permission to enter it.

    Raises:
        OSError: the file system failed, or another process creates the name repeatedly.
    """
    for _ in range(_ATTEMPTS):
        with suppress(FileExistsError):
            return openat.make_directory(name, dir_fd=run_fd, mode=mode)
        try:
            fd = openat.open_directory(name, dir_fd=run_fd, owners={os.geteuid()})
        except FileNotFoundError:
            continue
        except OSError as error:
            is_foreign = isinstance(error, openat.UnsafeFileError) or _is_closed_to_us(name, run_fd)
            if not is_foreign and error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            hidden = openat.displace(name, dir_fd=run_fd)
            _log.warning("staging_entry_displaced", name=name, to=hidden, reason=error.strerror)
            continue
        with openat.closed_on_error(fd):
            if os.fstat(fd).st_mode & 0o7777 != mode or openat.has_acl(fd):
                openat.drop_acls(fd)
                os.fchmod(fd, mode)
        return fd
    raise FileExistsError(errno.EEXIST, "other processes create this name repeatedly", name)


def _is_closed_to_us(name: str, run_fd: int) -> bool:
    """Whether another user owns the entry; the daemon cannot open another user's directory of mode 0700."""
    try:
        return os.stat(name, dir_fd=run_fd, follow_symlinks=False).st_uid != os.geteuid()
    except OSError:
        return False


def _naming_key(own_fd: int) -> bytes:
    with suppress(FileNotFoundError):
        key = openat.read_file(
            _NAMING_KEY, dir_fd=own_fd, max_bytes=_NAMING_KEY_BYTES, owners={os.geteuid()}
        )
        if len(key) == _NAMING_KEY_BYTES:
            return key
    openat.replace_file(_NAMING_KEY, secrets.token_bytes(_NAMING_KEY_BYTES), dir_fd=own_fd)
    return openat.read_file(_NAMING_KEY, dir_fd=own_fd, max_bytes=_NAMING_KEY_BYTES)


def _open_run(staging_fd: int, run: str) -> int:
    before = os.umask(0)  # in the sandbox, a later fchmod would lose the inherited setgid bit
    try:
        os.mkdir(run, RUN_DIRECTORY_MODE, dir_fd=staging_fd)
        is_new = True
    except FileExistsError:
        is_new = False
    finally:
        os.umask(before)
    try:
        run_fd = openat.open_directory(run, dir_fd=staging_fd, owners={0, os.geteuid()})
    except openat.UnsafeFileError as error:
        raise StagingError(
            f"the staging directory of the run cannot be used: {error.strerror}",
            hint="remove it, or give it to the daemon's user",
        ) from None
    with openat.closed_on_error(run_fd):
        facts = os.fstat(run_fd)
        if facts.st_uid == os.geteuid():
            _admit_trainers(run_fd, facts.st_mode & 0o7777, is_new=is_new)
    return run_fd


def _admit_trainers(run_fd: int, mode: int, *, is_new: bool) -> None:
    """Let the group create entries, and let the daemon delete them."""
    if is_new and mode & RUN_DIRECTORY_MODE != RUN_DIRECTORY_MODE:
        mode |= RUN_DIRECTORY_MODE
    if mode & 0o022:
        mode = (mode | 0o1000) & ~0o002
    try:
        openat.drop_acls(run_fd)
        acl.set_default(run_fd, os.geteuid())
    except OSError as error:
        _log.warning(
            "staging_without_acl",
            reason=error.strerror,
            hint="Use ext4, XFS, Btrfs or tmpfs for staging, or run the trainer as the daemon's user;"
            " otherwise the daemon cannot delete the sets of other users",
        )
    if os.fstat(run_fd).st_mode & 0o7777 != mode:
        try:
            os.fchmod(run_fd, mode)
        except PermissionError:  # the sandbox forbids the setgid bit; the ACL works without it
            os.fchmod(run_fd, mode & ~0o2000)


def _lock(own_fd: int, path: Path) -> None:
    try:
        fcntl.flock(own_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StagingError(
            f"another swansongd has locked {path}", hint="stop it, or set another run.name here"
        ) from None


def _probe(own_fd: int, path: Path) -> None:
    """Check that files can be created; a disk without space or inodes is only logged."""
    name = f"probe-{secrets.token_hex(8)}"
    try:
        os.close(openat.create_file(name, dir_fd=own_fd))
        os.unlink(name, dir_fd=own_fd)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _log.warning(
            "staging_full",
            staging=str(path),
            reason=error.strerror,
            hint="Free space: trainers cannot save, and after a restart the daemon repeats its uploads",
        )


@contextmanager
def explained(path: Path, hint: str) -> Iterator[None]:
    """Raise a StagingError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise StagingError(f"{path} cannot be used: {error.strerror}", hint=hint) from error
