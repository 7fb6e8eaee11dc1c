# SPDX-License-Identifier: Apache-2.0
"""A directory as an object store: NFS, EFS, FSx, Filestore, a second disk, the demo.

An object is a file under the directory of the URL.  It is written to a hidden directory on the same
file system, synced, and then linked or renamed to its name, so that it is there whole or not at all.  A
multipart upload is a directory there: the bytes, its key, and notes of the parts that are durably in it.
Reading below a directory that does not exist is NotFound, like a missing bucket: an empty listing
there would look like a run that never was.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from swansongd.errors import ConfigError, NotFound, Permanent, TooLarge, Transient
from swansongd.stores.base import (
    GET_BYTES_MAX,
    WINDOW_BYTES,
    Body,
    ObjectInfo,
    OpenUpload,
    PartReceipt,
    Sink,
    Upload,
    expect_all_parts,
    expect_part,
    settle_completion,
)
from swansongd.stores.file_io import (
    CREATE,
    classified,
    errors_of,
    make_directory,
    read_all,
    sync_directory,
    write_all,
    write_body,
)

T = TypeVar("T")

_TEMPORARY = ".swansong-tmp"
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_PUBLISH_ATTEMPTS = 100

_BYTES, _KEY, _NOTES = "bytes", "key", "notes"
"""The files of an upload."""
_NOTE = struct.Struct(">IIQ")
"""Number, CRC32C and length of a part, at its place in the notes.  Zeros: it is not there."""


class FileStore:
    """The object store in a directory.

    Args:
        url: ``file:///absolute/path``; percent-encoding is undone.
    """

    part_size_bytes_min = 1

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = os.path.normpath(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not os.path.isabs(path) or path == "/":
            raise ConfigError(["store.url: must read file:///absolute/path"])
        self.url = url
        self._root = path
        self._temporary = os.path.join(path, _TEMPORARY)

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
        with errors_of(f"head {key}"):
            try:
                status = os.stat(self._path(key), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                self._require_root()
                return None
        return ObjectInfo(key, status.st_size) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._require_root()
        yield from self._walk(self._root, "", prefix)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with errors_of(f"delete {key}"):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._require_root()
                return
            # Directories mean nothing here: leave none empty behind.
            parent = os.path.dirname(path)
            with suppress(OSError):
                while parent != self._root:
                    os.rmdir(parent)
                    parent = os.path.dirname(parent)

    def put_shard(self, key: str, body: Body) -> int:
        return self._put(key, lambda fd: write_body(fd, body, 0, f"put {key}"), if_absent=False)

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        self._path(key)
        name = uuid.uuid4().hex
        with errors_of(f"begin {key}"):
            os.makedirs(self._temporary_path(name))
            # The key comes first: an upload without one could not be found again.
            for file, content in ((_KEY, key.encode()), (_BYTES, b""), (_NOTES, b"")):
                fd = os.open(self._upload_file(name, file), CREATE, 0o666)
                try:
                    write_all(fd, memoryview(content), 0)
                finally:
                    os.close(fd)
        return Upload(key, name, size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        expect_part(upload, number, body)
        what = f"part {number} of {upload.key}"
        with self._opened(upload, what) as (fd, notes):
            with errors_of(what):
                # A part that is sent again is not there until it has come again.
                if any(os.pread(notes, _NOTE.size, number * _NOTE.size)):
                    os.pwrite(notes, bytes(_NOTE.size), number * _NOTE.size)
                    os.fdatasync(notes)
            value = write_body(fd, body, (number - 1) * upload.part_size_bytes, what)
            with errors_of(what):
                # A receipt outlives a reboot (it is journalled), so the bytes must too.  The note may
                # be lost then, but it is never there without them.
                os.fdatasync(fd)
                os.pwrite(notes, _NOTE.pack(number, value, body.size_bytes), number * _NOTE.size)
        return _receipt(number, value)

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        what = f"parts of {upload.key}"
        with self._opened(upload, what) as (_, notes), errors_of(what):
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
                raise Permanent(f"{what}: part {missing[0]} is not the one that is there")
            with errors_of(what):
                with self._opened(upload, what) as (fd, _):
                    os.fsync(fd)
                self._publish(self._upload_file(upload.upload_id, _BYTES), upload.key)
        except NotFound as unknown:
            settle_completion(self, upload, unknown)
        self.abort(upload.key, upload.upload_id)  # what is left of it

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        self._require_root()
        with errors_of(f"uploads of {prefix}"):
            # What time it is there: a file server has a clock of its own.
            name, fd = self._create_temporary()
            now_s = os.fstat(fd).st_mtime
            os.close(fd)
            os.unlink(self._temporary_path(name))
            entries = sorted(os.listdir(self._temporary))
        for name in filter(_UPLOAD_ID.fullmatch, entries):
            with suppress(FileNotFoundError), errors_of(f"upload {name}"):
                yield from self._upload_of(name, prefix, now_s)

    def abort(self, key: str, upload_id: str) -> None:
        with suppress(NotFound), errors_of(f"abort {key}"):
            path = self._temporary_path(upload_id)
            try:
                os.unlink(path)
            except IsADirectoryError:
                shutil.rmtree(path)

    def check(self) -> None:
        try:
            os.makedirs(self._root, exist_ok=True)
            name, fd = self._create_temporary()
            os.close(fd)
            os.unlink(self._temporary_path(name))
        except OSError as error:
            found = classified(error, f"write below {self._root}")
            if isinstance(found, Transient):
                raise found from error
            hint = found.hint or "Make store.url name a directory that the daemon may write to"
            raise Permanent(str(found), hint=hint) from error

    def warm(self) -> None:
        pass

    # ------------------------------------------------------------ names

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or parts[0] == _TEMPORARY or "\0" in key:
            raise Permanent(f"{key!r:.200} is no key of a file store")
        return os.path.join(self._root, *parts)

    def _temporary_path(self, name: str) -> str:
        if not _UPLOAD_ID.fullmatch(name):
            raise NotFound(f"{name!r:.80} is no upload of this store")
        return os.path.join(self._temporary, name)

    def _upload_file(self, upload_id: str, file: str) -> str:
        return os.path.join(self._temporary_path(upload_id), file)

    def _require_root(self) -> None:
        if not os.path.isdir(self._root):
            raise NotFound(
                f"the directory {self._root} does not exist",
                hint="Mount or make the directory that store.url names",
            )

    # ------------------------------------------------------------ uploads

    @contextmanager
    def _opened(self, upload: Upload, what: str) -> Iterator[tuple[int, int]]:
        """The bytes and the notes of an upload; raises NotFound when it is not one of its key."""
        with ExitStack() as stack:
            with errors_of(what):
                if self._key_of(upload.upload_id) != upload.key:
                    raise NotFound(f"{what}: the upload is one of another key")
                fds = []
                for file in (_BYTES, _NOTES):
                    path = self._upload_file(upload.upload_id, file)
                    fds.append(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
                    stack.callback(os.close, fds[-1])
            yield fds[0], fds[1]

    def _key_of(self, upload_id: str) -> str:
        with open(self._upload_file(upload_id, _KEY), "rb") as file:
            return file.read().decode("utf-8", "replace")

    def _upload_of(self, name: str, prefix: str, now_s: float) -> Iterator[OpenUpload]:
        """What lies there under ``name``, if it is of a key with ``prefix``."""
        begun = os.stat(self._temporary_path(name), follow_symlinks=False)
        if stat.S_ISDIR(begun.st_mode):
            key = self._key_of(name)
            begun = os.stat(self._upload_file(name, _KEY))
        else:
            # A put, by one who is at it or dead.  Nobody knows of what key: it goes under each prefix.
            key = prefix
        if key.startswith(prefix):
            yield OpenUpload(key, name, max(0.0, now_s - begun.st_mtime))

    # ------------------------------------------------------------ writing

    def _put(self, key: str, write: Callable[[int], T], *, if_absent: bool) -> T:
        """Make an object of what ``write`` writes to a descriptor."""
        what = f"put {key}"
        self._path(key)
        with errors_of(what):
            name, fd = self._create_temporary()
        temporary = self._temporary_path(name)
        try:
            try:
                result = write(fd)
                with errors_of(what):
                    os.fsync(fd)
            finally:
                os.close(fd)
            with errors_of(what):
                self._publish(temporary, key, if_absent=if_absent)
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        return result

    def _create_temporary(self) -> tuple[str, int]:
        os.makedirs(self._temporary, exist_ok=True)
        name = uuid.uuid4().hex
        return name, os.open(self._temporary_path(name), CREATE, 0o666)

    def _publish(self, temporary: str, key: str, *, if_absent: bool = False) -> None:
        """Give the temporary file its key, durably.  With ``if_absent`` it keeps its old name too."""
        target = self._path(key)
        parent = os.path.dirname(target)
        for _ in range(_PUBLISH_ATTEMPTS):
            if not make_directory(parent):
                continue
            try:
                if if_absent:
                    os.link(temporary, target, follow_symlinks=False)
                else:
                    os.rename(temporary, target)
                break
            except FileNotFoundError:
                # Either the upload is unknown, or a delete has just removed an empty directory.
                if not os.path.exists(temporary):
                    raise
        else:
            raise Transient(f"the directory of {key} keeps vanishing")
        # All the way up: another thread may have made a directory and not synced it yet.
        while True:
            with suppress(FileNotFoundError):
                sync_directory(parent)
            if parent == self._root:
                return
            parent = os.path.dirname(parent)

    # ------------------------------------------------------------ reading

    def _open(self, key: str) -> tuple[int, int]:
        """File descriptor and size of an object."""
        try:
            fd = os.open(
                self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except NotADirectoryError:
            raise NotFound(f"get {key}: {os.strerror(errno.ENOENT)}") from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise NotFound(f"get {key}: it is no regular file")
        return fd, status.st_size

    def _walk(self, directory: str, above: str, prefix: str) -> Iterator[ObjectInfo]:
        found: list[tuple[str, int | None]] = []
        with (
            errors_of(f"list {directory}"),
            suppress(FileNotFoundError),
            os.scandir(directory) as it,
        ):
            for entry in it:
                key = above + entry.name
                if entry.is_dir(follow_symlinks=False):
                    key += "/"
                    if (
                        key.startswith(prefix) or prefix.startswith(key)
                    ) and key != _TEMPORARY + "/":
                        found.append((key, None))
                elif key.startswith(prefix) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        found.append((key, entry.stat(follow_symlinks=False).st_size))
        # With its slash a directory sorts where the keys below it belong: after "a-b", before "a0".
        for key, size_bytes in sorted(found):
            if size_bytes is None:
                yield from self._walk(os.path.join(self._root, key), key, prefix)
            else:
                yield ObjectInfo(key, size_bytes)


def _receipt(number: int, value: int) -> PartReceipt:
    return PartReceipt(number, f"{value:08x}", value)
