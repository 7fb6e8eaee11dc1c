# SPDX-License-Identifier: Apache-2.0
"""The root of a file store, the identity of its file system, and the directories below it.

The root of a store contains a marker with a random id.  A root without the expected marker is the mount point
of a file system that is not mounted, or another file system.  A checkpoint written there would be lost, and a
reader would find a run without commits.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from swansong import bounds
from swansong.bounds import BoundsError
from swansong.openat import FILE, has_acl, held, open_directory

from swansong_bucket.errors import NotFound, Permanent, Transient
from swansong_bucket.stores.file import mount_points
from swansong_bucket.stores.file.io import Modes, classified, new_file, opened_or_made, write_all

MARKER = ".swansong-store.json"
"""File in the root that identifies the store."""
TEMPORARY = ".swansong-tmp"
"""Directory in the root for unpublished files."""
RESERVED = (MARKER, TEMPORARY)
"""Names in the root that cannot be keys."""
HIDDEN = "."
"""Files whose names begin with it are no objects: NFS renames an open file that is deleted to ``.nfs01``."""
FORMAT = "swansong-store"
VERSION = 1
_MARKER_BYTES_MAX = 4096
_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Tree:
    """The directories below an existing root; the store never creates the root.

    The mode of the root decides which other users may read and write: new directories get its permission
    bits, new files get them without execute.

    Args:
        root: path from the configuration; links above it are followed.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.store_id = ""
        """Id of the store, from the marker; empty until it is known."""
        self._checked: tuple[int, ...] = ()
        """Root and marker of the last comparison."""
        self._lock = threading.Lock()

    @contextmanager
    def chain(self, names: Sequence[str] = (), *, create: bool = False) -> Iterator[list[int]]:
        """Open the directories from the root to the last of ``names``.

        Args:
            create: create the directories below the root, and the marker of a new store.

        Raises:
            NotFound: the root does not exist, and the id of the store is not known.
            Permanent: the root is not a directory, other users may write to it, or it is not on the file
                system of the store.
            Transient: the root was mounted at this moment.
            OSError: a directory does not exist or cannot be created, or is a link or a file.
        """
        with ExitStack() as stack:
            fd = self._open_root()
            stack.callback(os.close, fd)
            modes = self.modes(fd)
            self._expect_marker(fd, modes if create else None)
            fds = [fd]
            for name in names:
                fd = (
                    opened_or_made(name, fds[-1], modes)
                    if create
                    else open_directory(name, dir_fd=fds[-1])
                )
                stack.callback(os.close, fd)
                fds.append(fd)
            yield fds

    def modes(self, root_fd: int) -> Modes:
        """The permission bits below the root; raises Permanent if every user may write to it."""
        mode = stat.S_IMODE(os.fstat(root_fd).st_mode)
        if mode & stat.S_IWOTH:
            raise Permanent(
                f"every user of this machine may write to {self.root}",
                hint="Configure another directory, or remove that right",
                command=f"chmod o-w {self.root}",
            )
        if has_acl(root_fd):
            mode &= ~0o070  # these bits are the mask of the ACL, not rights of the group
        return Modes(directory=mode & 0o3777 | 0o700, file=mode & 0o666 | 0o600)

    def _open_root(self) -> int:
        try:
            return os.open(self.root, _ROOT)
        except FileNotFoundError:
            if self.store_id:
                raise self._is_gone(f"the directory {self.root} does not exist") from None
            raise NotFound(
                f"the directory {self.root} does not exist",
                hint="Mount its file system.  For a new store, create the directory: "
                f"`install -d -m 0700 -o swansong {self.root}`",
            ) from None
        except NotADirectoryError:  # readers would conclude that the object is missing
            raise Permanent(
                f"{self.root}, or a name in this path, is not a directory",
                hint="Set store.url to a directory",
            ) from None

    # ------------------------------------------------------------ identity

    def _expect_marker(self, root_fd: int, modes: Modes | None) -> None:
        """Compare the marker with the known one, unless root and marker are unchanged since the last time.

        Device and inode of the root alone prove nothing: the kernel reuses the numbers of an unmounted file
        system for the next one.

        Args:
            modes: permission bits for the marker of a new store; None: create no marker.
        """
        if self._checked and self._checked == _facts(root_fd):
            return
        with self._lock:
            facts = _facts(root_fd)
            if not facts:
                if self.store_id:
                    raise self._is_gone(f"{self.root} does not contain {MARKER}")
                missing = mount_points.missing_mount(self.root)
                if missing is not None:
                    raise Permanent(
                        f"nothing is mounted at {missing}, and store.url is below it",
                        hint="Mount it",
                        command=f"mount {missing}",
                    )
                if not os.path.samestat(os.fstat(root_fd), os.stat(self.root)):
                    raise Transient(f"a file system was mounted at {self.root} at this moment")
                if modes is None:
                    return  # a store to which nothing was written yet
                self._create_marker(root_fd, modes)
                facts = _facts(root_fd)
            found = self._read_marker(root_fd)
            if self.store_id and found != self.store_id:
                raise Permanent(
                    f"{self.root} is another file system than before: the id of its store is "
                    f"{found}, and the one of this run is {self.store_id}",
                    hint="Mount the right file system.  To continue in this one, delete claim.json in "
                    "the daemon's directory in staging and restart swansongd",
                )
            self.store_id, self._checked = found, facts

    def _is_gone(self, problem: str) -> Permanent:
        marker = json.dumps(_marker(self.store_id))
        return Permanent(
            f"{problem}: the file system of the store is not mounted, or is another one",
            hint=f"Mount it again.  If the directory was emptied on purpose: "
            f"`echo '{marker}' > {self.root}/{MARKER}`",
        )

    def _create_marker(self, root_fd: int, modes: Modes) -> None:
        """Create the marker with a new id, durably; does not replace the marker of another writer."""
        with held(opened_or_made(TEMPORARY, root_fd, modes)) as temporary_fd:
            name = uuid.uuid4().hex
            with held(new_file(name, temporary_fd, modes)) as fd:
                write_all(fd, memoryview(json.dumps(_marker(uuid.uuid4().hex)).encode()), 0)
                os.fsync(fd)
            try:
                with suppress(FileExistsError):
                    os.link(
                        name,
                        MARKER,
                        src_dir_fd=temporary_fd,
                        dst_dir_fd=root_fd,
                        follow_symlinks=False,
                    )
            finally:
                os.unlink(name, dir_fd=temporary_fd)
            os.fsync(root_fd)

    def _read_marker(self, root_fd: int) -> str:
        """The id in the marker.

        Raises:
            Permanent: the marker is not a file of a user who may write to the root, or is malformed.
        """
        what = f"{self.root}/{MARKER}"
        try:
            with held(os.open(MARKER, FILE, dir_fd=root_fd)) as fd:
                facts, root = os.fstat(fd), os.fstat(root_fd)
                # The link count is not checked: link(2) creates the marker, which then has two names.
                if not stat.S_ISREG(facts.st_mode):
                    raise OSError(errno.EISDIR, "")
                # Daemons with several user ids share a root that its group may write to.
                is_shared = root.st_mode & stat.S_IWGRP
                if not is_shared and facts.st_uid not in (0, os.geteuid(), root.st_uid):
                    raise Permanent(
                        f"{what} belongs to user id {facts.st_uid}",
                        hint="Give it to the owner of the directory",
                        command=f"chown {root.st_uid} {what}",
                    )
                data = os.pread(fd, _MARKER_BYTES_MAX + 1, 0)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise Permanent(f"{what} is not a regular file", hint=f"Remove {what}") from None
            if error.errno == errno.ENOENT:
                # Not NotFound: readers would conclude that the object is missing.
                raise Permanent(f"{what} was removed at this moment") from None
            raise classified(error, f"read {what}") from error
        return _id_of(data, what)


def _id_of(data: bytes, what: str) -> str:
    """The id in the content of a marker.

    Raises:
        Permanent: a field is missing or out of bounds.
    """
    try:
        body = bounds.json_object(data, what, _MARKER_BYTES_MAX)
        if body.get("format") != FORMAT:
            raise BoundsError(f"format of {what} is {bounds.shown(body.get('format'))}")
        bounds.integer(body.get("version"), f"version of {what}", VERSION, VERSION)
        found = bounds.identifier(body.get("id"), f"id of {what}")
        if not found:
            raise BoundsError(f"id of {what} is empty")
    except BoundsError as error:
        raise Permanent(
            str(error), hint="Upgrade swansong if a newer version wrote the file, else restore it"
        ) from None
    return found


def _marker(store_id: str) -> dict[str, object]:
    return {"format": FORMAT, "version": VERSION, "id": store_id}


def _facts(root_fd: int) -> tuple[int, ...]:
    """Device and inodes of the root and its marker, and the marker's ctime; empty without a marker."""
    root = os.fstat(root_fd)
    try:
        marker = os.stat(MARKER, dir_fd=root_fd, follow_symlinks=False)
    except FileNotFoundError:
        return ()
    return root.st_dev, root.st_ino, marker.st_ino, marker.st_ctime_ns
