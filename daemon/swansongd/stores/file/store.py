# SPDX-License-Identifier: Apache-2.0
"""A directory as an object store: NFS, EFS, FSx, Filestore, a second disk, the demo.

An object is a file below the directory of the URL.  The store writes it in a hidden directory on the same
file system, calls fsync, and links or renames it to its key, so that no partial object is ever visible.  A
multipart upload is a directory in the hidden one: the bytes, the key, and the list of the durable parts.

The directory of the URL must exist, and it contains a marker with a random id: a missing mount, or another
file system, is an error and never an empty store.  The mode of that directory decides which other users may
read or write there.  See :class:`~swansongd.stores.file.tree.Tree`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from swansong.openat import FILE, open_directory, remove_tree

from swansongd.errors import Changed, ConfigError, NotFound, Permanent, TooLarge, Transient
from swansongd.stores.base import (
    GET_BYTES_MAX,
    WINDOW_BYTES,
    Body,
    Folders,
    ObjectInfo,
    OpenUpload,
    Page,
    PartReceipt,
    Sink,
    Upload,
    confirm_completion,
    delete_each,
    expect_all_parts,
    expect_part,
    listed,
)
from swansongd.stores.file.io import (
    Modes,
    classified,
    errors_of,
    new_directory,
    new_file,
    read_all,
    write_all,
    write_body,
)
from swansongd.stores.file.tree import MARKER, RESERVED, TEMPORARY, Tree

T = TypeVar("T")

_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
PAGE_KEYS = 20_000
"""Objects of a page, which is in memory."""
_PUBLISH_ATTEMPTS = 100
_DEPTH_MAX = 100
_CLOCK_VALID_S = 600.0
_KEY_BYTES_MAX = 4096
_READ_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_BYTES, _KEY, _NOTES = "bytes", "key", "notes"
"""Files of an upload."""
_NOTE = struct.Struct(">IIQ")
"""Number, CRC32C and length of a part, at the offset of its number.  Zeros: the part is missing."""


class FileStore:
    """The object store in a directory.

    Args:
        url: ``file:///absolute/path``, percent-decoded.
    """

    part_size_bytes_min = 1

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = os.path.normpath(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not os.path.isabs(path) or path == "/":
            raise ConfigError(["store.url: must read file:///absolute/path"])
        self.url = url
        self._tree = Tree(path)
        self._clock: tuple[float, float] | None = None
        """An instant on this VM's monotonic clock, and on the file server's clock."""

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
            try:
                if size_bytes > GET_BYTES_MAX:
                    raise TooLarge(f"get {key}: {size_bytes} bytes are more than {GET_BYTES_MAX}")
                data = bytearray(size_bytes)
                read_all(fd, memoryview(data), 0, key)
            finally:
                os.close(fd)
        return bytes(data)

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not size_bytes:
            return
        with errors_of(f"get {key}"):
            fd, there_bytes = self._open(key)
        try:
            if offset < 0 or offset + size_bytes > there_bytes:
                raise Permanent(f"get {key}: {size_bytes} bytes from {offset} of {there_bytes}")
            sink.rewind()
            buffer = memoryview(bytearray(min(size_bytes, WINDOW_BYTES)))
            for at in range(offset, offset + size_bytes, WINDOW_BYTES):
                window = buffer[: offset + size_bytes - at]
                with errors_of(f"get {key}"):
                    read_all(fd, window, at, key)
                sink.write(window)
        finally:
            os.close(fd)

    def head(self, key: str) -> ObjectInfo | None:
        *above, name = _names(key)
        with errors_of(f"head {key}"):
            try:
                with self._tree.chain(above) as fds:
                    facts = os.stat(name, dir_fd=fds[-1], follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(key, facts, self._now_s()) if stat.S_ISREG(facts.st_mode) else None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return listed(prefix, lambda token: self.page(prefix, token, after=after), after)

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

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        return delete_each(self, infos)

    def locked_until(self, key: str) -> float | None:
        _names(key)
        return None

    def lock(self, key: str) -> float | None:
        _names(key)
        return None

    def put_shard(self, key: str, body: Body) -> int:
        return self._put(key, lambda fd: write_body(fd, body, 0, f"put {key}"), if_absent=False)

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        _names(key)
        upload_id = uuid.uuid4().hex
        with errors_of(f"begin {key}"), self._temporary() as (temporary_fd, modes):
            fd = new_directory(upload_id, temporary_fd, modes)
            try:
                # The key is written first: an upload without a key could not be listed.
                for name, content in ((_KEY, key.encode()), (_BYTES, b""), (_NOTES, b"")):
                    file_fd = new_file(name, fd, modes)
                    try:
                        write_all(file_fd, memoryview(content), 0)
                    finally:
                        os.close(file_fd)
            finally:
                os.close(fd)
        return Upload(key, upload_id, size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        expect_part(upload, number, body)
        what = f"part {number} of {upload.key}"
        with self._opened(upload, what) as (_, fd, notes):
            with errors_of(what):
                # A part that is sent again counts as missing until it is complete again.
                if any(os.pread(notes, _NOTE.size, number * _NOTE.size)):
                    os.pwrite(notes, bytes(_NOTE.size), number * _NOTE.size)
                    os.fdatasync(notes)
            value = write_body(fd, body, (number - 1) * upload.part_size_bytes, what)
            with errors_of(what):
                # The journal keeps the receipt across a reboot, so the bytes must be durable before it
                # is returned.  The note may be lost, but it never exists without the bytes.
                os.fdatasync(fd)
                os.pwrite(notes, _NOTE.pack(number, value, body.size_bytes), number * _NOTE.size)
        return _receipt(number, value)

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        what = f"parts of {upload.key}"
        with self._opened(upload, what) as (_, _, notes), errors_of(what):
            held = bytearray(os.fstat(notes).st_size // _NOTE.size * _NOTE.size)
            read_all(notes, memoryview(held), 0, upload.key)
        return [
            _receipt(number, value)
            for place, (number, value, size_bytes) in enumerate(_NOTE.iter_unpack(held))
            if number == place > 0 and size_bytes == upload.part_length_bytes(number)
        ]

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        expect_all_parts(upload, parts)
        what = f"complete {upload.key}"
        try:
            there = set(self.parts(upload))
            if missing := [part.number for part in parts if part not in there]:
                raise Permanent(f"{what}: part {missing[0]} is not the stored one")
            with self._opened(upload, what) as (upload_fd, fd, _), errors_of(what):
                os.fsync(fd)
                self._publish(_BYTES, upload_fd, upload.key)
        except NotFound as unknown:
            confirm_completion(self, upload, unknown)
        self.abort(upload.key, upload.upload_id)  # remove the rest of the upload

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        what = f"uploads of {prefix}"
        found: list[OpenUpload] = []
        with errors_of(what), self._temporary() as (temporary_fd, modes):
            now_s = _time_at(temporary_fd, modes)
            for name in filter(_UPLOAD_ID.fullmatch, sorted(os.listdir(temporary_fd))):
                with suppress(FileNotFoundError):
                    key, begun_s = _upload_at(name, temporary_fd)
                    # The file of a put has no key: it is listed for every prefix.
                    key = prefix if key is None else key
                    if key.startswith(prefix):
                        found.append(OpenUpload(key, name, max(0.0, now_s - begun_s)))
        yield from found

    def abort(self, key: str, upload_id: str) -> None:
        with suppress(NotFound), errors_of(f"abort {key}"):
            _expect_upload_id(upload_id)
            with self._tree.chain([TEMPORARY]) as fds:
                remove_tree(upload_id, dir_fd=fds[-1])

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
            yield fds[-1], self._tree.modes(fds[0])

    @contextmanager
    def _opened(self, upload: Upload, what: str) -> Iterator[tuple[int, int, int]]:
        """Open directory, bytes and notes of an upload; raises NotFound if the upload has another key."""
        with ExitStack() as stack:
            with errors_of(what):
                _expect_upload_id(upload.upload_id)
                fds = stack.enter_context(self._tree.chain([TEMPORARY, upload.upload_id]))
                if _key_at(fds[-1]) != upload.key:
                    raise NotFound(f"{what}: the upload belongs to another key")
                files = []
                for name in (_BYTES, _NOTES):
                    files.append(os.open(name, _READ_WRITE, dir_fd=fds[-1]))
                    stack.callback(os.close, files[-1])
            yield fds[-1], files[0], files[1]

    # ------------------------------------------------------------ writing

    def _put(self, key: str, write: Callable[[int], T], *, if_absent: bool) -> T:
        """Create an object from the bytes that ``write`` writes to a descriptor."""
        what = f"put {key}"
        _names(key)
        with ExitStack() as stack:
            with errors_of(what):
                temporary_fd, modes = stack.enter_context(self._temporary())
                name = uuid.uuid4().hex
                fd = new_file(name, temporary_fd, modes)
            stack.callback(_unlink_if_there, name, temporary_fd)
            try:
                result = write(fd)
                with errors_of(what):
                    os.fsync(fd)
            finally:
                os.close(fd)
            with errors_of(what):
                self._publish(name, temporary_fd, key, if_absent=if_absent)
        return result

    def _publish(self, file: str, dir_fd: int, key: str, *, if_absent: bool = False) -> None:
        """Move a file to its key, durably.  With ``if_absent`` it also keeps its old name."""
        *above, name = _names(key)
        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                with self._tree.chain(above, create=True) as fds:
                    if if_absent:
                        os.link(
                            file, name, src_dir_fd=dir_fd, dst_dir_fd=fds[-1], follow_symlinks=False
                        )
                    else:
                        os.rename(file, name, src_dir_fd=dir_fd, dst_dir_fd=fds[-1])
                    # Up to the root: another thread may have created a directory and not synced it yet.
                    for fd in reversed(fds):
                        os.fsync(fd)
                    return
            except FileNotFoundError:
                # The upload is unknown, or a concurrent delete removed an empty directory.
                os.stat(file, dir_fd=dir_fd, follow_symlinks=False)
        raise Transient(f"the directory of {key} was removed {_PUBLISH_ATTEMPTS} times")

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
    if any(name in ("", ".", "..") for name in names) or names[0] in RESERVED or "\0" in key:
        raise Permanent(f"{key!r:.200} is not a key of a file store")
    return names


def _expect_upload_id(upload_id: str) -> None:
    if not _UPLOAD_ID.fullmatch(upload_id):
        raise NotFound(f"{upload_id!r:.80} is not an upload of this store")


def _unlink_if_there(name: str, dir_fd: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=dir_fd)


def _key_at(upload_fd: int) -> str:
    """The key of an upload."""
    fd = os.open(_KEY, FILE, dir_fd=upload_fd)
    try:
        return os.read(fd, _KEY_BYTES_MAX).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _upload_at(name: str, temporary_fd: int) -> tuple[str | None, float]:
    """Key and start time of the upload ``name``; the key is None for the file of a put."""
    facts = os.stat(name, dir_fd=temporary_fd, follow_symlinks=False)
    if not stat.S_ISDIR(facts.st_mode):
        return None, facts.st_mtime
    fd = open_directory(name, dir_fd=temporary_fd)
    try:
        return _key_at(fd), os.stat(_KEY, dir_fd=fd, follow_symlinks=False).st_mtime
    finally:
        os.close(fd)


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
                        fd = open_directory(entry.name, dir_fd=dir_fd)
                        try:
                            yield from _walk(fd, below, prefix, after, depth + 1)
                        finally:
                            os.close(fd)
                elif (
                    key.startswith(prefix)
                    and key > after
                    and key != MARKER
                    and entry.is_file(follow_symlinks=False)
                ):
                    yield key, entry.stat(follow_symlinks=False)


def _name_in_keys(entry: os.DirEntry[str]) -> str:
    """The name as the keys below it have it, so that the order of names is that of keys."""
    return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name


def _receipt(number: int, value: int) -> PartReceipt:
    return PartReceipt(number, f"{value:08x}", value)
