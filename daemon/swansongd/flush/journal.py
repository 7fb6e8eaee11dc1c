# SPDX-License-Identifier: Apache-2.0
"""The upload journal: what is stored of which set, so that a restarted daemon goes on where it was.

One file of lines in the daemon's own directory, a record in each: the digest of everything up to it,
and JSON.  Reading ends at the first line whose digest does not fit, so a torn tail, one with a hole in
it, or one written twice is as good as none.  Nothing is ever synced: after SIGKILL the kernel still has
all of it, and what a power cut takes away is sent again.  A record is a claim, never a proof: whoever
reads one of an earlier daemon asks the store whether it is so.

The file counts only if it lies in a directory of this user and was written by it; each record is checked
field by field.  A flush works with its content in memory, as :class:`UploadRecord` and
:class:`ShardRecord`.  Methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from blake3 import blake3
from swansong import bounds, openat

from swansongd.digests import PART_SIZE_BYTES_MAX, part_count
from swansongd.model import StagedFile, StoredShard
from swansongd.stores.base import CRC32C_UNKNOWN, PartReceipt, Upload

FILE_NAME = "uploads.journal"
_TEMPORARY = f".{FILE_NAME}.new"
SETS_MAX = 4
"""Sets that are remembered; the one begun first is forgotten for a fifth."""
BYTES_MAX = 256 * 2**20
"""Longest file that is read: a million parts."""
_COMPACT_OVER_BYTES = 4 * 2**20
_LINE_BYTES_MAX = 8 * 2**20
_CRC32C_MAX = 2**32 - 1
_VERSION = 1

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode

_log = structlog.get_logger(__name__)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part that the store has acknowledged, and the BLAKE3 of its bytes."""

    receipt: PartReceipt
    digest: bytes


@dataclass(eq=False, slots=True)
class UploadRecord:
    """A multipart upload under way, and its parts so far, by number."""

    file: StagedFile
    upload: Upload
    parts: dict[int, PartRecord] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all its parts are there."""
        return len(self.parts) == self.parts_max

    @property
    def parts_max(self) -> int:
        return part_count(self.upload.size_bytes, self.upload.part_size_bytes)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that is stored whole."""

    file: StagedFile
    shard: StoredShard
    part_digests: tuple[bytes, ...]
    """BLAKE3 of each part; empty when only that of the whole is known."""
    is_referenced: bool = False
    """It was stored by another set."""


Held = UploadRecord | ShardRecord


@dataclass(slots=True)
class Contents:
    """What a journal says, record by record."""

    sets: dict[str, dict[str, Held]] = field(default_factory=dict)
    """By set and path."""
    known: dict[str, ShardRecord] = field(default_factory=dict)
    """The shards of the newest committed set, by path."""

    def apply(self, record: Record) -> None:
        """Apply one record.

        Raises:
            ValueError: this version does not write such a record.
        """
        match record.get("is"):
            case "upload":
                self.put(_set(record), UploadRecord(_file(record), _upload(record)))
            case "part":
                held = self.sets.get(_set(record), {}).get(_text(record, "path"))
                if isinstance(held, UploadRecord):
                    receipt = _receipt(record, held.parts_max)
                    held.parts[receipt.number] = PartRecord(receipt, _digest(record.get("digest")))
            case "shard":
                self.put(_set(record), _shard(record))
            case "known":
                held = _shard(record)
                self.known[held.shard.path] = held
            case "dropped":
                held_of_set = self.sets.get(_set(record), {})
                held_of_set.pop(_text(record, "path"), None)
                if not held_of_set:
                    self.sets.pop(_set(record), None)
            case "committed":
                held_of_set = self.sets.pop(_set(record), {})
                self.known = {
                    path: held
                    for path, held in held_of_set.items()
                    if isinstance(held, ShardRecord)
                }
            case unknown:
                raise ValueError(unknown)

    def records(self) -> Iterator[Record]:
        """The fewest records that say the same."""
        for held in self.known.values():
            yield _shard_record("", held) | {"is": "known"}
        for name, paths in self.sets.items():
            for path, held_of_path in paths.items():
                if isinstance(held_of_path, ShardRecord):
                    yield _shard_record(name, held_of_path)
                    continue
                yield _upload_record(name, held_of_path)
                for part in list(held_of_path.parts.values()):
                    yield _part_record(name, path, part)

    def put(self, name: str, held: Held) -> None:
        """Hold this of the set of that name."""
        while name not in self.sets and len(self.sets) >= SETS_MAX:
            del self.sets[next(iter(self.sets))]
        self.sets.setdefault(name, {})[held.file.path] = held


class Journal:
    """The journal of one run and one store.

    Reads what is there, and begins a file anew that says the same in as few lines.  A disk that does not
    take it is logged, and costs only what a restart would have to send again.

    Args:
        directory: the daemon's own, in staging.
        run, store_url: a journal of another run or store is not read.
    """

    def __init__(self, directory: Path, *, run: str, store_url: str) -> None:
        self._directory = directory
        self._header: Record = {
            "is": "journal", "version": _VERSION, "run": run, "store": store_url,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._fd = -1
        self._chain = ""
        self._size_bytes = 0
        self._compact_at_bytes = 0
        self._contents = replay(self._read(), self._header)
        with self._lock:
            self._rewrite()

    def held(self, set_name: str) -> dict[str, Held]:
        """What is held of a set, by path."""
        with self._lock:
            return dict(self._contents.sets.get(set_name, {}))

    def known(self, path: str) -> ShardRecord | None:
        """The shard that the newest committed set has under this path."""
        with self._lock:
            return self._contents.known.get(path)

    def holds_upload(self, upload_id: str) -> bool:
        """Whether a flush may still go on with this upload."""
        with self._lock:
            return any(
                isinstance(held, UploadRecord) and held.upload.upload_id == upload_id
                for paths in self._contents.sets.values()
                for held in paths.values()
            )

    def upload_begun(self, set_name: str, file: StagedFile, upload: Upload) -> UploadRecord:
        with self._lock:
            self._take(_upload_record(set_name, UploadRecord(file, upload)))
            held = self._contents.sets[set_name][file.path]
        assert isinstance(held, UploadRecord)
        return held

    def part_stored(
        self, set_name: str, held: UploadRecord, receipt: PartReceipt, digest: bytes
    ) -> None:
        part = PartRecord(receipt, digest)
        path = held.file.path
        body = _encoded(_part_record(set_name, path, part))
        with self._lock:
            held.parts[receipt.number] = part
            # Else the set, or this upload of the file, was given up meanwhile.
            if self._contents.sets.get(set_name, {}).get(path) is held:
                self._append(body)

    def shard_stored(self, set_name: str, held: ShardRecord) -> None:
        body = _encoded(_shard_record(set_name, held))
        with self._lock:
            self._contents.put(set_name, held)
            self._append(body)

    def committed(self, set_name: str, shards: Sequence[StoredShard]) -> None:
        """The set is committed as these shards, which may be referenced from now on."""
        with self._lock:
            held_of_set = self._contents.sets.get(set_name)
            named = set(shards)
            if held_of_set is None:
                return
            for path, held in list(held_of_set.items()):
                if not isinstance(held, ShardRecord) or held.shard not in named:
                    self._take({"is": "dropped", "set": set_name, "path": path})
            self._take({"is": "committed", "set": set_name})

    def seed(self, shards: Sequence[StoredShard]) -> None:
        """What the newest commit of an earlier VM has stored; ignored where more is known."""
        with self._lock:
            if self._contents.known:
                return
            for shard in shards:
                file = StagedFile(path=shard.path, size_bytes=shard.size_bytes, mtime_ns=0, inode=0)
                self._take(_shard_record("", ShardRecord(file, shard, ())) | {"is": "known"})

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    # ------------------------------------------------------------------ the file, under the lock

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        own_fd = openat.open_directory(self._directory, owners={os.geteuid()})
        try:
            yield own_fd
        finally:
            os.close(own_fd)

    def _read(self) -> bytes:
        try:
            with self._opened() as own_fd:
                return openat.read_file(
                    FILE_NAME, dir_fd=own_fd, max_bytes=BYTES_MAX, owners={os.geteuid()}
                )
        except FileNotFoundError:
            return b""
        except OSError as error:
            _log.warning(
                "journal_not_read",
                error=str(error),
                hint="Uploads of an earlier daemon are not continued, but sent again",
            )
            return b""

    def _take(self, record: Record) -> None:
        self._contents.apply(record)
        self._append(_encoded(record))

    def _append(self, body: bytes) -> None:
        if self._fd < 0:
            return
        line, self._chain = _line(body, self._chain)
        try:
            openat.write_all(self._fd, line)
        except OSError as error:
            self._give_up(error)
            return
        self._size_bytes += len(line)
        if self._size_bytes > self._compact_at_bytes:
            self._rewrite()

    def _rewrite(self) -> None:
        """Put the shortest file that says the same in the place of what is there."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        lines = []
        self._chain = ""
        for record in (self._header, *self._contents.records()):
            line, self._chain = _line(_encoded(record), self._chain)
            lines.append(line)
        data = b"".join(lines)
        try:
            with self._opened() as own_fd:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_TEMPORARY, dir_fd=own_fd)  # of a daemon that was killed right here
                flags = os.O_WRONLY | os.O_APPEND
                self._fd = openat.create_file(_TEMPORARY, dir_fd=own_fd, flags=flags)
                openat.write_all(self._fd, data)
                os.rename(_TEMPORARY, FILE_NAME, src_dir_fd=own_fd, dst_dir_fd=own_fd)
        except OSError as error:
            self._give_up(error)
        self._size_bytes = len(data)
        self._compact_at_bytes = 2 * len(data) + _COMPACT_OVER_BYTES

    def _give_up(self, error: OSError) -> None:
        """No more is written until the next start: what follows a torn line would not be read."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _log.warning(
            "journal_not_written",
            error=str(error),
            hint="Make room in staging; a daemon that restarts now sends again what it has sent",
        )


def replay(data: bytes, header: Mapping[str, Any]) -> Contents:
    """What the bytes of a journal say, as far as they are whole, if they begin with ``header``."""
    contents = Contents()
    chain = ""
    is_first = True
    begin = 0
    while (end := data.find(b"\n", begin, begin + _LINE_BYTES_MAX)) >= 0:  # else: a torn line
        try:
            record, chain = _parse(data[begin:end], chain)
            if not is_first:
                contents.apply(record)
            elif record != header:
                break
        except ValueError:
            break
        is_first = False
        begin = end + 1
    return contents


def _encoded(record: Record) -> bytes:
    return _ENCODE(record).encode()


def _line(body: bytes, chain: str) -> tuple[bytes, str]:
    """The line of a record after the line that ``chain`` is of, and its own chain."""
    chain = _chained(body, chain)
    return b"%b %b\n" % (chain.encode(), body), chain


def _parse(line: bytes, chain: str) -> tuple[Record, str]:
    """The record of a line, and its own chain.

    Raises:
        ValueError: the line does not follow the one that ``chain`` is of, or contains no record.
    """
    claimed, _, body = line.partition(b" ")
    chain = _chained(body, chain)
    if claimed != chain.encode():
        raise ValueError("the chain is broken")
    return bounds.json_object(body, "the record", _LINE_BYTES_MAX), chain


def _chained(body: bytes, chain: str) -> str:
    return blake3(chain.encode() + body).hexdigest(8)


# ---------------------------------------------------------------------- records


def _upload_record(set_name: str, held: UploadRecord) -> Record:
    upload = held.upload
    fields = [upload.key, upload.upload_id, upload.size_bytes, upload.part_size_bytes]
    return {"is": "upload", "set": set_name, "file": _fields(held.file), "upload": fields}


def _part_record(set_name: str, path: str, part: PartRecord) -> Record:
    receipt = part.receipt
    return {
        "is": "part",
        "set": set_name,
        "path": path,
        "receipt": [receipt.number, receipt.etag, receipt.crc32c],
        "digest": part.digest.hex(),
    }


def _shard_record(set_name: str, held: ShardRecord) -> Record:
    shard = held.shard
    return {
        "is": "shard",
        "set": set_name,
        "file": _fields(held.file),
        "shard": [shard.digest, shard.key, shard.part_size_bytes, shard.crc32c],
        "parts": [digest.hex() for digest in held.part_digests],
        "is_referenced": held.is_referenced,
    }


def _fields(file: StagedFile) -> list[str | int]:
    return [file.path, file.size_bytes, file.mtime_ns, file.inode]


def _set(record: Record) -> str:
    return _text(record, "set")


def _text(record: Record, name: str) -> str:
    return bounds.text(record.get(name), name)


def _list(record: Record, name: str, length: int) -> list[Any]:
    found = bounds.items(record.get(name), name, length)
    if len(found) != length:
        raise bounds.BoundsError(f"{name} has {len(found)} items, not {length}")
    return found


def _size(value: Any) -> int:
    return bounds.integer(value, "a size", 0, bounds.BYTES_MAX)


def _part_size(value: Any) -> int:
    return bounds.integer(value, "a part size", 1, PART_SIZE_BYTES_MAX)


def _digest(value: Any) -> bytes:
    return bytes.fromhex(bounds.text(value, "a digest", bounds.ID_CHARS_MAX))


def _file(record: Record) -> StagedFile:
    path, size_bytes, mtime_ns, inode = _list(record, "file", 4)
    return StagedFile(
        path=bounds.text(path, "a path"),
        size_bytes=_size(size_bytes),
        mtime_ns=bounds.integer(mtime_ns, "a time", -(2**63), 2**63 - 1),
        inode=bounds.integer(inode, "an inode", 0, 2**64 - 1),
    )


def _upload(record: Record) -> Upload:
    key, upload_id, size_bytes, part_size_bytes = _list(record, "upload", 4)
    return Upload(
        bounds.text(key, "a key"),
        bounds.text(upload_id, "an upload id"),
        _size(size_bytes),
        _part_size(part_size_bytes),
    )


def _receipt(record: Record, parts_max: int) -> PartReceipt:
    number, etag, crc32c = _list(record, "receipt", 3)
    return PartReceipt(
        bounds.integer(number, "a part number", 1, parts_max),
        bounds.text(etag, "an ETag"),
        bounds.integer(crc32c, "a CRC32C", CRC32C_UNKNOWN, _CRC32C_MAX),
    )


def _shard(record: Record) -> ShardRecord:
    file = _file(record)
    digest, key, part_size_bytes, crc32c = _list(record, "shard", 4)
    shard = StoredShard(
        path=file.path,
        size_bytes=file.size_bytes,
        digest=bounds.text(digest, "a digest", bounds.ID_CHARS_MAX),
        key=bounds.text(key, "a key"),
        part_size_bytes=_part_size(part_size_bytes),
        crc32c=bounds.integer(crc32c, "a CRC32C", 0, _CRC32C_MAX),
    )
    count = part_count(shard.size_bytes, shard.part_size_bytes) if record.get("parts") else 0
    digests = tuple(_digest(part) for part in _list(record, "parts", count))
    return ShardRecord(
        file, shard, digests, bounds.boolean(record.get("is_referenced"), "is_referenced")
    )
