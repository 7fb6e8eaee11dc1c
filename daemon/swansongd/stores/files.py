# SPDX-License-Identifier: Apache-2.0
"""A directory as an object store: NFS, EFS, FSx, Filestore, a second disk, the demo.

An object is a file under the directory of the URL.  It is written to a hidden directory on the same
file system, synced, and then linked or renamed to its name, so that it is there whole or not at all.
Reading below a directory that does not exist is NotFound, like a missing bucket: an empty listing
there would look like a run that never was.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import unquote, urlsplit

from swansongd.errors import ConfigError, Exists, NotFound, Permanent, StoreError, Transient
from swansongd.stores.base import (
    GET_BYTES_MAX,
    ObjectInfo,
    PartReceipt,
    Upload,
    expect_all_parts,
    expect_part,
    settle_completion,
)
from swansongd.stores.checksums import crc32c

_TEMPORARY = ".swansong-tmp"
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_PUBLISH_ATTEMPTS = 100

_TRANSIENT = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOLCK,
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EREMOTEIO,
}  # fmt: skip
_HINTS = {
    errno.ENOSPC: "The file system of store.url is full: make room there",
    errno.EDQUOT: "The quota on the file system of store.url is used up",
    errno.EACCES: "Give the daemon's user the right to write below store.url",
    errno.EPERM: "The file system of store.url must allow writing and hard links to the daemon's user",
    errno.EROFS: "The file system of store.url is mounted read-only",
    errno.EXDEV: "Everything below store.url must lie on one file system",
    errno.EOPNOTSUPP: "The file system of store.url must support hard links",
}


def _classified(error: OSError, what: str) -> StoreError:
    number = error.errno or 0
    message = f"{what}: {os.strerror(number)}"
    if isinstance(error, FileExistsError):
        return Exists(message)
    if isinstance(error, FileNotFoundError):
        return NotFound(message)
    if number in _TRANSIENT:
        return Transient(message)
    return Permanent(message, hint=_HINTS.get(number, ""))


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _classified(error, what) from error


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
        with _errors_of(f"put {key}"):
            name, fd = self._create_temporary()
            try:
                try:
                    _write_all(fd, memoryview(data).cast("B"), 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                self._publish(name, key, if_absent=if_absent)
            finally:
                with suppress(OSError):
                    os.unlink(self._temporary_path(name))

    def get(self, key: str) -> bytes:
        with _errors_of(f"get {key}"):
            fd, size_bytes = self._open(key)
            try:
                if size_bytes > GET_BYTES_MAX:
                    raise Permanent(f"get {key}: {size_bytes} bytes are more than {GET_BYTES_MAX}")
                data = bytearray(size_bytes)
                _read_all(fd, memoryview(data), 0, key)
            finally:
                os.close(fd)
        return bytes(data)

    def get_range(self, key: str, offset: int, into: memoryview) -> None:
        if not into.nbytes:
            return
        with _errors_of(f"get {key}"):
            fd, size_bytes = self._open(key)
            try:
                if offset < 0 or offset + into.nbytes > size_bytes:
                    raise Permanent(f"get {key}: {into.nbytes} bytes from {offset} of {size_bytes}")
                _read_all(fd, into.cast("B"), offset, key)
            finally:
                os.close(fd)

    def head(self, key: str) -> ObjectInfo | None:
        with _errors_of(f"head {key}"):
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
        with _errors_of(f"delete {key}"):
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

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        self._path(key)
        with _errors_of(f"begin {key}"):
            name, fd = self._create_temporary()
            os.close(fd)
        return Upload(key, name, size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, data: memoryview) -> PartReceipt:
        expect_part(upload, number, data)
        with _errors_of(f"part {number} of {upload.key}"):
            fd = os.open(self._temporary_path(upload.upload_id), _WRITE)
            try:
                _write_all(fd, data.cast("B"), (number - 1) * upload.part_size_bytes)
                # A receipt outlives a reboot (it is journalled), so the bytes must too.
                os.fdatasync(fd)
            finally:
                os.close(fd)
        return PartReceipt(number, crc32c(data))

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        expect_all_parts(upload, parts)
        try:
            with _errors_of(f"complete {upload.key}"):
                fd = os.open(self._temporary_path(upload.upload_id), _WRITE)
                try:
                    size_bytes = os.fstat(fd).st_size
                    os.fsync(fd)
                finally:
                    os.close(fd)
                if size_bytes != upload.size_bytes:
                    raise Permanent(
                        f"complete {upload.key}: {size_bytes} bytes came of {upload.size_bytes}"
                    )
                self._publish(upload.upload_id, upload.key, if_absent=False)
        except NotFound as unknown:
            settle_completion(self, upload, unknown)

    def abort(self, upload: Upload) -> None:
        with _errors_of(f"abort {upload.key}"), suppress(FileNotFoundError):
            os.unlink(self._temporary_path(upload.upload_id))

    def check(self) -> None:
        try:
            os.makedirs(self._root, exist_ok=True)
            name, fd = self._create_temporary()
            os.close(fd)
            os.unlink(self._temporary_path(name))
        except OSError as error:
            found = _classified(error, f"write below {self._root}")
            if isinstance(found, Transient):
                raise found from error
            hint = found.hint or "Make store.url name a directory that the daemon may write to"
            raise Permanent(str(found), hint=hint) from error

    # ------------------------------------------------------------ names

    def warm(self) -> None:
        pass

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or parts[0] == _TEMPORARY or "\0" in key:
            raise Permanent(f"{key!r:.200} is no key of a file store")
        return os.path.join(self._root, *parts)

    def _temporary_path(self, name: str) -> str:
        if not _UPLOAD_ID.fullmatch(name):
            raise NotFound(f"{name!r:.80} is no upload of this store")
        return os.path.join(self._temporary, name)

    def _require_root(self) -> None:
        if not os.path.isdir(self._root):
            raise NotFound(
                f"the directory {self._root} does not exist",
                hint="Mount or make the directory that store.url names",
            )

    # ------------------------------------------------------------ writing

    def _create_temporary(self) -> tuple[str, int]:
        os.makedirs(self._temporary, exist_ok=True)
        name = uuid.uuid4().hex
        return name, os.open(self._temporary_path(name), _WRITE | os.O_CREAT | os.O_EXCL, 0o666)

    def _publish(self, name: str, key: str, *, if_absent: bool) -> None:
        """Give the temporary file its key, durably.  With ``if_absent`` it keeps its old name too."""
        temporary = self._temporary_path(name)
        target = self._path(key)
        parent = os.path.dirname(target)
        for _ in range(_PUBLISH_ATTEMPTS):
            if not _make_directory(parent):
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
                _sync_directory(parent)
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
            _errors_of(f"list {directory}"),
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


_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)


def _read_all(fd: int, into: memoryview, offset: int, key: str) -> None:
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise Transient(f"get {key}: the file ended early")
        done += count


def _make_directory(path: str) -> bool:
    """Make it, and those above it.  False when one of them was removed meanwhile: try again.

    Not left to ``exist_ok``: a directory that goes away at the wrong moment comes out of that as
    FileExistsError, which must never be taken for an object that exists.
    """
    try:
        os.makedirs(path)
    except FileNotFoundError:
        return False
    except FileExistsError:
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            return False
        if not is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    return True


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
