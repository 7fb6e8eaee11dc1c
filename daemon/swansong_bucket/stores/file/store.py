# SPDX-License-Identifier: Apache-2.0
"""A directory as an object store: NFS, EFS, FSx, Filestore, a second disk, the demo.

An object is a file below the directory of the URL.  The store writes it in a hidden directory on the same
file system, calls fsync, and links or renames it to its key, so that no partial object is ever visible.  The
first write of a process removes the hidden files that killed writers left.

The directory of the URL must exist, and it contains a marker with a random id: a missing mount, or another
file system, is an error and never an empty store.  The mode of that directory decides which other users may
read or write there.  See :class:`~swansong_bucket.stores.file.tree.Tree`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice

from swansong.openat import FILE, held, open_directory

from swansong_bucket.config.values import directory_of
from swansong_bucket.errors import (
    Changed,
    Exists,
    NotFound,
    Permanent,
    TooLarge,
    Transient,
)
from swansong_bucket.stores.base import (
    GET_BYTES_MAX,
    WINDOW_BYTES,
    Body,
    BytesSink,
    Folders,
    ObjectInfo,
    ObjectStore,
    Page,
    Sink,
)
from swansong_bucket.stores.file.io import (
    Modes,
    classified,
    errors_of,
    new_file,
    read_all,
    write_all,
    write_body,
)
from swansong_bucket.stores.file.tree import HIDDEN, RESERVED, TEMPORARY, Tree

PAGE_KEYS = 20_000
"""Objects of a page, which is in memory."""
_PUBLISH_ATTEMPTS = 100
_DEPTH_MAX = 100
_CLOCK_VALID_S = 600.0
_ABANDONED_S = 24 * 3600.0
"""Time without a write after which a hidden file belongs to a killed writer."""


class FileStore(ObjectStore):
    """The object store in a directory.

    Args:
        url: ``file:///absolute/path``, percent-encoded.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._tree = Tree(str(directory_of(url)))
        self._clock: tuple[float, float] | None = None
        """An instant on this VM's monotonic clock, and on the file server's clock."""
        self._has_swept = False

    @property
    def store_id(self) -> str:
        """Id in the marker of the directory; empty until the marker is read."""
        return self._tree.store_id

    def expect(self, store_id: str) -> None:
        """Refuse to read or write unless the marker has this id; empty: accept any."""
        self._tree.store_id = store_id

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        def write(fd: int) -> None:
            with errors_of(f"put {key}"):
                write_all(fd, memoryview(data).cast("B"), 0)

        self._put(key, write, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        with errors_of(f"get {key}"):
            fd, size_bytes = self._open(key)
            with held(fd):
                if size_bytes > GET_BYTES_MAX:
                    raise TooLarge(f"get {key}: {size_bytes} bytes are more than {GET_BYTES_MAX}")
                data = bytearray(size_bytes)
                read_all(fd, memoryview(data), 0, key)
        return bytes(data)

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        with errors_of(f"get {key}"):
            fd, there_bytes = self._open(key)
        with held(fd):
            if offset < 0 or offset + size_bytes > there_bytes:
                raise Permanent(f"get {key}: {size_bytes} bytes from {offset} of {there_bytes}")
            sink.rewind()
            buffer = memoryview(bytearray(min(size_bytes, WINDOW_BYTES)))
            for at in range(offset, offset + size_bytes, WINDOW_BYTES):
                window = buffer[: offset + size_bytes - at]
                with errors_of(f"get {key}"):
                    read_all(fd, window, at, key)
                sink.write(window)

    def head(self, key: str) -> ObjectInfo | None:
        *above, name = _names(key)
        with errors_of(f"head {key}"):
            try:
                with self._tree.chain(above) as fds:
                    facts = os.stat(name, dir_fd=fds[-1], follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(key, facts, self._now_s()) if stat.S_ISREG(facts.st_mode) else None

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        after = max(after, token or "")
        with (
            errors_of(f"list {prefix}"),
            self._tree.chain() as fds,
            closing(_walk(fds[0], "", prefix, after, 0)) as keys,
        ):
            found = list(islice(keys, PAGE_KEYS))
        now_s = self._now_s() if found else None
        is_last = len(found) < PAGE_KEYS
        return Page(
            [_info(key, facts, now_s) for key, facts in found], None if is_last else found[-1][0]
        )

    def folders(self, prefix: str, token: str | None) -> Folders:
        del token  # the first page has all names
        with errors_of(f"list {prefix}"):
            try:
                with (
                    self._tree.chain(prefix.split("/")[:-1]) as fds,
                    os.scandir(fds[-1]) as entries,
                ):
                    names = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
            except (FileNotFoundError, NotADirectoryError):
                names = []
        return Folders([name for name in names if prefix or name not in RESERVED], None)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        *above, name = _names(key)
        with errors_of(f"delete {key}"):
            try:
                with self._tree.chain(above) as fds:
                    if if_tag:
                        facts = os.stat(name, dir_fd=fds[-1], follow_symlinks=False)
                        if if_tag != _tag(facts):
                            raise Changed(f"delete {key}: the file is another one than was listed")
                    os.unlink(name, dir_fd=fds[-1])
                    # A directory is only a part of keys: an empty one is removed.
                    with suppress(OSError):
                        for directory, fd in zip(above[::-1], fds[-2::-1], strict=True):
                            os.rmdir(directory, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return

    def create(self, key: str, body: Body) -> None:
        what = f"create {key}"
        try:
            self._put(key, lambda fd: write_body(fd, body, what), if_absent=True)
        except Exists:
            # If the bytes match, our write succeeded and only the reply was lost.
            info = self.head(key)
            if info is None or info.size_bytes != body.size_bytes:
                raise
            sink = BytesSink(body.size_bytes)
            self.get_range(key, 0, body.size_bytes, sink)
            if sink.data != body.data:
                raise

    def check(self) -> None:
        try:
            with self._temporary() as (fd, modes):
                name = uuid.uuid4().hex
                os.close(new_file(name, fd, modes))
                os.unlink(name, dir_fd=fd)
        except OSError as error:
            found = classified(error, f"write below {self._tree.root}")
            if isinstance(found, Transient):
                raise found from error
            hint = found.hint or "Set store.url to a directory that the daemon may write to"
            raise Permanent(str(found), hint=hint) from error

    def warm(self) -> None:
        with errors_of("look for the store"), self._tree.chain():
            pass  # opening the root compares the marker

    def _now_s(self) -> float | None:
        """Time on the file server; None if this process may not write there.

        The file server is asked once, and again after :data:`_CLOCK_VALID_S`.
        """
        mono_s = time.monotonic()
        if self._clock is None or mono_s - self._clock[0] > _CLOCK_VALID_S:
            try:
                with self._tree.chain([TEMPORARY]) as fds:
                    self._clock = mono_s, _time_at(fds[-1], self._tree.modes(fds[0]))
            except OSError:
                return None
        at_mono_s, at_s = self._clock
        return at_s + mono_s - at_mono_s

    # ------------------------------------------------------------ directories

    @contextmanager
    def _temporary(self) -> Iterator[tuple[int, Modes]]:
        """Open the directory of unpublished files; create it if it does not exist."""
        with self._tree.chain([TEMPORARY], create=True) as fds:
            modes = self._tree.modes(fds[0])
            if not self._has_swept:
                with suppress(OSError):
                    _remove_abandoned(fds[-1], modes)
                    self._has_swept = True
            yield fds[-1], modes

    # ------------------------------------------------------------ writing

    def _put(self, key: str, write: Callable[[int], None], *, if_absent: bool) -> None:
        """Create an object from the bytes that ``write`` writes to a descriptor."""
        what = f"put {key}"
        _names(key)
        with ExitStack() as stack:
            with errors_of(what):
                temporary_fd, modes = stack.enter_context(self._temporary())
                name = uuid.uuid4().hex
                fd = new_file(name, temporary_fd, modes)
            stack.callback(_unlink_if_there, name, temporary_fd)
            with held(fd):
                write(fd)
                with errors_of(what):
                    os.fsync(fd)
            with errors_of(what):
                self._publish(name, temporary_fd, key, if_absent=if_absent)

    def _publish(self, file: str, dir_fd: int, key: str, *, if_absent: bool) -> None:
        """Move a file to its key, durably.  With ``if_absent`` it also keeps its old name."""
        *above, name = _names(key)
        for _ in range(_PUBLISH_ATTEMPTS):
            # A concurrent delete may remove an empty directory.
            with suppress(FileNotFoundError), self._tree.chain(above, create=True) as fds:
                try:
                    if if_absent:
                        os.link(
                            file, name, src_dir_fd=dir_fd, dst_dir_fd=fds[-1], follow_symlinks=False
                        )
                    else:
                        os.rename(file, name, src_dir_fd=dir_fd, dst_dir_fd=fds[-1])
                finally:
                    # Up to the root: another thread may have created a directory and not synced it yet.
                    # Also if the name exists: its link may be ours, from an attempt whose fsync failed.
                    for fd in reversed(fds):
                        os.fsync(fd)
                return
        raise Transient(f"put {key}: its directory was removed {_PUBLISH_ATTEMPTS} times")

    # ------------------------------------------------------------ reading

    def _open(self, key: str) -> tuple[int, int]:
        """File descriptor and size of an object."""
        *above, name = _names(key)
        try:
            with self._tree.chain(above) as fds:
                fd = os.open(name, FILE, dir_fd=fds[-1])
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise NotFound(f"get {key}: not a regular file") from None
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            os.close(fd)
            raise NotFound(f"get {key}: not a regular file")
        return fd, facts.st_size


def _names(key: str) -> list[str]:
    """The names of a key's directories and file."""
    names = key.split("/")
    is_place = all(name not in ("", ".", "..") for name in names) and names[0] not in RESERVED
    if not is_place or names[-1].startswith(HIDDEN) or "\0" in key:
        raise Permanent(f"{key!r:.200} is not a key of a file store")
    return names


def _unlink_if_there(name: str, dir_fd: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=dir_fd)


def _remove_abandoned(temporary_fd: int, modes: Modes) -> None:
    now_s = _time_at(temporary_fd, modes)
    for name in os.listdir(temporary_fd):
        with suppress(OSError):
            facts = os.stat(name, dir_fd=temporary_fd, follow_symlinks=False)
            if now_s - facts.st_mtime > _ABANDONED_S:
                os.unlink(name, dir_fd=temporary_fd)


def _info(key: str, facts: os.stat_result, now_s: float | None) -> ObjectInfo:
    age_s = None if now_s is None else max(0.0, now_s - facts.st_mtime)
    return ObjectInfo(key, facts.st_size, age_s, _tag(facts))


def _tag(facts: os.stat_result) -> str:
    """Identifies a file: a rename to its name gives another inode, a write another time."""
    return f"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"


def _time_at(dir_fd: int, modes: Modes) -> float:
    """Time on the file server, which has its own clock."""
    name = uuid.uuid4().hex
    fd = new_file(name, dir_fd, modes)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=dir_fd)


def _walk(
    dir_fd: int, above: str, prefix: str, after: str, depth: int
) -> Generator[tuple[str, os.stat_result], None, None]:
    """The objects below a directory whose keys begin with ``prefix`` and come after ``after``, by key.

    Links are left out.  Directories whose keys all come before ``after`` are not read.
    """
    if depth > _DEPTH_MAX:
        raise Permanent(f"more than {_DEPTH_MAX} nested directories: {above:.200}")
    with os.scandir(dir_fd) as entries:
        # By name: some file systems return a name twice if the directory changes meanwhile.
        for name, entry in sorted({_name_in_keys(entry): entry for entry in entries}.items()):
            key = above + entry.name
            # An object that is deleted meanwhile is left out.
            with suppress(FileNotFoundError):
                if name != entry.name:
                    below = f"{key}/"
                    is_wanted = below.startswith(prefix) or prefix.startswith(below)
                    is_wanted = is_wanted and (below > after or after.startswith(below))
                    if is_wanted and key != TEMPORARY:
                        with held(open_directory(entry.name, dir_fd=dir_fd)) as fd:
                            yield from _walk(fd, below, prefix, after, depth + 1)
                elif (
                    key.startswith(prefix)
                    and key > after
                    and not name.startswith(HIDDEN)
                    and entry.is_file(follow_symlinks=False)
                ):
                    yield key, entry.stat(follow_symlinks=False)


def _name_in_keys(entry: os.DirEntry[str]) -> str:
    """The name as the keys below it have it, so that the order of names is that of keys."""
    return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
