# SPDX-License-Identifier: Apache-2.0
"""Rebuilds damaged and missing objects from intact copies of their parts.

This is the only code that replaces an object, and it never changes what a key means: every byte that a
manifest names is verified against the digest of its part, before and after the write.  The bytes come from

1. the object itself, for the parts that are intact;
2. an identical part in another object of the run;
3. a file in staging on this machine;
4. the mirror.

The new bytes are complete on disk before anything is written, and the store then replaces the object
atomically, or creates it.  A crash leaves the old object.  In a bucket with versions, the damaged version
remains below the new one, and Object Lock keeps protecting both.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
from blake3 import blake3

from swansongd.bucket import catalog
from swansongd.bucket import manifest as manifests
from swansongd.bucket.catalog import Commit
from swansongd.bucket.keys import RunKeys
from swansongd.errors import (
    CorruptError,
    NotFound,
    Permanent,
    StagingError,
    Transient,
    UnreadableError,
)
from swansongd.model import CommitRef, Extent, StoredObject, StoredShard
from swansongd.restore.local_files import LocalCopies
from swansongd.restore.reader import OpenLocal, ReadOptions
from swansongd.restore.stored_parts import StoredPart, gaps, parts_of
from swansongd.restore.verify import ByteCounter, Defect, each_commit
from swansongd.stores.base import WINDOW_BYTES, BytesSink, ObjectStore
from swansongd.util.threads import parallel

PUT_BYTES_MAX = 8 * 2**20
"""Larger objects are written in parts."""
_PART_BYTES = 16 * 2**20
_PARTS_MAX = 10_000
_THREADS = 4
"""Each holds one part in memory."""
_COPIES_MAX = 4
"""Other objects with the same part that are tried."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOutcome:
    """The outcome for one object."""

    key: str
    size_bytes: int
    commits: Sequence[CommitRef]
    """The commits that name the object, newest first."""
    problem: str = ""
    """Why it is still damaged; empty if it is whole again."""
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by their origin: ``object``, ``run``, ``staging``, ``mirror``."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a part in a shard."""

    path: str
    shard_bytes: int
    offset_bytes: int


@dataclass(slots=True)
class _Plan:
    """Everything that the manifests of the run say about one object."""

    stored: StoredObject
    sizes_bytes: set[int] = field(default_factory=set)
    parts: dict[StoredPart, _Place] = field(default_factory=dict)
    refs: set[CommitRef] = field(default_factory=set)

    @property
    def own(self) -> list[Extent]:
        """The pieces of parts that lie in this object."""
        pieces = (piece for part in self.parts for piece in part.pieces)
        return [piece for piece in pieces if piece.object.key == self.stored.key]


def repair(
    store: ObjectStore,
    keys: RunKeys,
    damaged: Collection[StoredObject],
    *,
    mirror: ObjectStore | None = None,
    local: LocalCopies | None = None,
    options: ReadOptions,
) -> list[RepairOutcome]:
    """Rebuild these objects from intact copies.  An object that no commit names any more is left out.

    Args:
        options: with the progress, which is called with the bytes that were found intact.

    Raises:
        StoreError: a store failed.
        Stopped: ``options.stop`` was set.
    """
    commits = catalog.list_commits(store, keys)
    plans = {stored.key: _Plan(stored) for stored in damaged}
    each = partial(each_commit, store, keys, commits, progress=None, stop=options.stop)
    unread: list[Defect] = []
    each(partial(_plan, plans), unread)
    copies: dict[bytes, list[StoredPart]] = {
        part.digest: [] for plan in plans.values() for part in plan.parts
    }
    each(partial(_find_copies, plans, copies), [])
    total_bytes = sum(piece.size_bytes for plan in plans.values() for piece in plan.own)
    counter = ByteCounter(total_bytes, options.progress, options.stop)
    rebuilding = _Rebuilding(store, options, counter, copies=copies, mirror=mirror, local=local)
    done = []
    for plan in plans.values():
        present = [ref for ref in plan.refs if catalog.list_commits(store, keys, ref)]
        if present:
            outcome = rebuilding.repaired(plan, sorted(present, reverse=True))
            done.append(outcome)
            if outcome.problem:
                _log.error("object_not_repaired", key=outcome.key, reason=outcome.problem)
            else:
                _log.info("object_repaired", key=outcome.key, bytes_from=outcome.copied_bytes)
    return done


def repair_manifests(
    store: ObjectStore,
    keys: RunKeys,
    mirror: ObjectStore,
    options: ReadOptions,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[RepairOutcome]:
    """Replace each damaged manifest by that of the mirror.  A missing one is not a commit: it stays away.

    Args:
        progress: called with the number of commits whose manifests were read, and of all commits.

    Raises:
        StoreError: a store failed.
        Stopped: ``options.stop`` was set.
    """
    unread: list[Defect] = []
    commits = catalog.list_commits(store, keys)
    each_commit(
        store,
        keys,
        commits,
        lambda _commit, _shards: None,
        unread,
        progress=progress,
        stop=options.stop,
    )
    refs = {defect.ref for defect in unread}
    done = []
    for commit in commits:
        for node in commit.manifest_keys if commit.ref in refs else ():
            outcome = _repaired_manifest(store, keys, mirror, commit, node)
            if outcome is not None:
                done.append(outcome)
    return done


def _repaired_manifest(
    store: ObjectStore, keys: RunKeys, mirror: ObjectStore, commit: Commit, node: int
) -> RepairOutcome | None:
    """None if the manifest is intact."""
    try:
        catalog.load_node(store, keys, commit, node)
        return None
    except UnreadableError:
        return None  # the store refuses it, and would refuse to replace it
    except CorruptError:
        pass
    key = commit.manifest_keys[node]
    problem, data = "", b""
    try:
        catalog.load_node(mirror, keys, commit, node)
        data = mirror.get(key)
        manifests.decode(data, keys.signer)
        if store.head(key) is not None:  # prune may have deleted it
            store.put(key, data)
    except CorruptError as error:
        problem = f"in the mirror {error.line()}"
    except Permanent as error:
        problem = f"the store refused the new manifest: {error.line()}"
    size_bytes = len(data)
    origin = {} if problem else {"mirror": size_bytes}
    return RepairOutcome(
        key=key, size_bytes=size_bytes, commits=[commit.ref], problem=problem, copied_bytes=origin
    )


def _plan(plans: Mapping[str, _Plan], commit: Commit, shards: Sequence[StoredShard]) -> None:
    for shard in shards:
        named = {extent.object for extent in shard.extents if extent.object.key in plans}
        for stored in named:
            plans[stored.key].sizes_bytes.add(stored.size_bytes)
            plans[stored.key].refs.add(commit.ref)
        for index, part in enumerate(parts_of(shard) if named else ()):
            place = _Place(shard.path, shard.size_bytes, index * shard.part_size_bytes)
            for piece in part.pieces:
                if piece.object.key in plans:
                    plans[piece.object.key].parts.setdefault(part, place)


def _find_copies(
    plans: Mapping[str, _Plan],
    copies: dict[bytes, list[StoredPart]],
    _commit: Commit,
    shards: Sequence[StoredShard],
) -> None:
    for shard in shards:
        for part in parts_of(shard):
            found = copies.get(part.digest)
            is_new = found is not None and len(found) < _COPIES_MAX and part not in found
            if found is not None and is_new and all(p.object.key not in plans for p in part.pieces):
                found.append(part)


class _Rebuilding:
    """Rebuilds one object after the other."""

    def __init__(
        self,
        store: ObjectStore,
        options: ReadOptions,
        counter: ByteCounter,
        *,
        copies: Mapping[bytes, Sequence[StoredPart]],
        mirror: ObjectStore | None,
        local: LocalCopies | None,
    ) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._copies = copies
        self._mirror = mirror
        self._local = local
        self._options = options
        self._counter = counter

    def repaired(self, plan: _Plan, commits: Sequence[CommitRef]) -> RepairOutcome:
        """Rebuild and replace the object; the outcome has the reason if that is impossible."""
        stored = plan.stored
        copied_bytes: dict[str, int] = {}
        problem = ""
        try:
            if len(plan.sizes_bytes) > 1:
                raise CorruptError("manifests name it with different sizes")
            with tempfile.TemporaryFile() as spool:
                copied_bytes = self._fill(plan, spool.fileno())
                if set(copied_bytes) != {"object"} or self._is_wrong(stored):
                    self._replace(stored, spool.fileno())
                    self._confirm(plan, spool.fileno())
        except CorruptError as error:
            problem = error.line()
        except Permanent as error:
            problem = f"the store refused the new object: {error.line()}"
        except OSError as error:
            problem = f"no room for its bytes on this machine: {error.strerror}; set TMPDIR"
        return RepairOutcome(
            key=stored.key,
            size_bytes=stored.size_bytes,
            commits=commits,
            problem=problem,
            copied_bytes={} if problem else copied_bytes,
        )

    def _is_wrong(self, stored: StoredObject) -> bool:
        info = self._store.head(stored.key)
        return info is None or info.size_bytes != stored.size_bytes

    def _fill(self, plan: _Plan, fd: int) -> dict[str, int]:
        """Write all bytes of the object to a file; returns how many came from each origin.

        Raises:
            CorruptError: there is no intact copy of some bytes.
        """
        stored = plan.stored
        os.ftruncate(fd, stored.size_bytes)
        copied_bytes: dict[str, int] = {}
        own = [(piece.offset_bytes, piece.size_bytes) for piece in plan.own]
        unnamed = gaps(own, stored.size_bytes)
        if unnamed and self._is_wrong(stored):
            size_bytes = sum(size for _, size in unnamed)
            raise CorruptError(f"no manifest names {size_bytes} of its bytes")
        for offset, size_bytes in unnamed:  # no reader needs them: they stay as they are
            for start in range(offset, offset + size_bytes, WINDOW_BYTES):
                length = min(WINDOW_BYTES, offset + size_bytes - start)
                data = _joined(self._store, [Extent(stored, start, length)])
                if len(data) != length:
                    raise CorruptError(f"{length} bytes from {start} cannot be read")
                _write(fd, data, start)

        def one(part: StoredPart) -> None:
            origin, data = self._bytes_of(part, plan.parts[part])
            at_bytes = 0
            for piece in part.pieces:
                if piece.object.key == stored.key:
                    own = data[at_bytes : at_bytes + piece.size_bytes]
                    _write(fd, own, piece.offset_bytes)
                    # A part of several objects may be damaged in another one only.
                    is_intact = len(part.pieces) > 1 and own == _joined(self._store, [piece])
                    source = "object" if is_intact else origin
                    with self._lock:
                        copied_bytes[source] = copied_bytes.get(source, 0) + piece.size_bytes
                    self._counter.add(piece.size_bytes)
                at_bytes += piece.size_bytes

        parallel(list(plan.parts), one, threads=_THREADS, stop=self._options.stop)
        return copied_bytes

    def _confirm(self, plan: _Plan, fd: int) -> None:
        """Read all named bytes back; raises CorruptError if the store returns others."""

        def one(part: StoredPart) -> None:
            for piece in part.pieces:
                if piece.object.key == plan.stored.key:
                    written = os.pread(fd, piece.size_bytes, piece.offset_bytes)
                    if _joined(self._store, [piece]) != written:
                        raise CorruptError("the store does not return the bytes that were written")

        parallel(list(plan.parts), one, threads=_THREADS, stop=self._options.stop)

    def _bytes_of(self, part: StoredPart, place: _Place) -> tuple[str, bytes]:
        """The bytes of a part, from the first origin with an intact copy.

        Raises:
            CorruptError: no source has intact bytes.
        """
        for origin, data in self._candidates(part, place):
            if blake3(data).digest() == part.digest:
                return origin, data
        where = f"{part.size_bytes} bytes from {place.offset_bytes} of {place.path}"
        raise CorruptError(f"there is no intact copy of {where}")

    def _candidates(self, part: StoredPart, place: _Place) -> Iterator[tuple[str, bytes]]:
        yield "object", _joined(self._store, part.pieces)
        for copy in self._copies.get(part.digest, ()):
            yield "run", _joined(self._store, copy.pieces)
        for opening in self._local(place.path, place.shard_bytes) if self._local else ():
            yield "staging", _read_local(opening, place.offset_bytes, part.size_bytes)
        if self._mirror is not None:
            try:
                yield "mirror", _joined(self._mirror, part.pieces)
            except Transient as error:
                _log.warning("mirror_not_read", reason=error.line())

    def _replace(self, stored: StoredObject, fd: int) -> None:
        if stored.size_bytes <= PUT_BYTES_MAX:
            self._store.put(stored.key, os.pread(fd, stored.size_bytes, 0))
            return
        part_bytes = max(
            _PART_BYTES, self._store.part_size_bytes_min, -(-stored.size_bytes // _PARTS_MAX)
        )
        upload = self._store.begin(stored.key, stored.size_bytes, part_bytes)
        receipts = []
        try:
            for number in range(1, -(-stored.size_bytes // part_bytes) + 1):
                length_bytes = upload.part_length_bytes(number)
                body = _FileBody(fd, (number - 1) * part_bytes, length_bytes)
                receipts.append(self._store.put_part(upload, number, body))
            self._store.complete(upload, receipts)
        except BaseException:
            self._store.abort(upload.key, upload.upload_id)
            raise


def _joined(store: ObjectStore, pieces: Sequence[Extent]) -> bytes:
    """The bytes of these ranges; empty if the store does not return all of them."""
    data = bytearray()
    for piece in pieces:
        sink = BytesSink(piece.size_bytes)
        try:
            store.get_range(piece.object.key, piece.offset_bytes, piece.size_bytes, sink)
        except (NotFound, Permanent):
            return b""
        data += sink.data
    return bytes(data)


def _read_local(opening: OpenLocal, offset: int, size_bytes: int) -> bytes:
    try:
        fd = opening()
    except StagingError:
        return b""
    try:
        return os.pread(fd, size_bytes, offset)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


class _FileBody:
    """A range of a file."""

    def __init__(self, fd: int, offset: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = fd
        self._offset = offset
        self._done_bytes = 0

    def rewind(self) -> None:
        self._done_bytes = 0

    def read_into(self, window: memoryview) -> None:
        while window:
            count = os.preadv(self._fd, [window], self._offset + self._done_bytes)
            if not count:
                raise OSError("the temporary file became shorter")
            self._done_bytes += count
            window = window[count:]
