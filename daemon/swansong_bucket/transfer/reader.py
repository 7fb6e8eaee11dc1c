# SPDX-License-Identifier: Apache-2.0
"""Reads chunks over many connections, each byte once: hashed and written to its places as it arrives.

The unit is the whole chunk, because the digest in its name verifies nothing smaller.  A chunk that an
interrupted restore already wrote is read back from the disk, which is cheaper than the network.  A chunk
whose bytes are in files on this machine is copied.  All other chunks are fetched.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TypeVar

import structlog
from blake3 import blake3

from swansong_bucket.errors import (
    CorruptError,
    NotFound,
    Permanent,
    StagingError,
    Stopped,
    StoreError,
    Transient,
)
from swansong_bucket.model import Chunk, CommitRef, StoredShard
from swansong_bucket.stores.base import WINDOW_BYTES, ObjectStore, stored_objects
from swansong_bucket.transfer.chunks import Place, cover, defect_of_size, places_of
from swansong_bucket.transfer.journal import Noted
from swansong_bucket.transfer.target import RestoredFile, RestoreTarget, read_window
from swansong_bucket.util.concurrency import FIRST, SAMPLE_S, ConcurrencyLimit
from swansong_bucket.util.threads import parallel

Task = TypeVar("Task")

Progress = Callable[[int, int], None]
"""Takes the bytes done and the total; called from any thread, one call at a time."""
Verified = Callable[[str, RestoreTarget], None]
"""Takes the path of a file whose chunks are verified, and the target that contains it."""

OpenLocal = Callable[[], int]
"""Opens a file on this machine that may have the bytes of a shard; raises StagingError."""
LocalSource = Callable[
    [CommitRef, Sequence[StoredShard]], AbstractContextManager[Mapping[str, OpenLocal]]
]
"""Finds such files for the shards of a commit, by their path, while the context is open."""

_ReadWindow = Callable[[memoryview, int], int]
"""Reads from an offset of a file into a window; returns the number of bytes, 0 at the end or on an error."""
_Write = Callable[[memoryview, int], int]
"""Takes a window of a chunk and its offset; returns how many bytes to count as done."""

CONNECTIONS = 16
"""Default limit of parallel connections."""
LISTED_MIN = 101
"""With this number of chunks of one generation, a listing costs less than their HEADs."""
_SYNCS = 2
"""Threads of a restore for each connection: a thread that waits for the disk fetches nothing."""
_SMALL_BYTES = 2**20
_WRONG = "does not match its digest"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Limits and callbacks of one pass over stored bytes.

    Args:
        connections: limit of chunks in flight.
        progress: called with the bytes done.
        stop: ends the pass with Stopped, within one window.
        local: finds files on this machine, which are copied instead of fetched.
        verified: called with each file that is complete in a target, before it is synced; from any thread.
        found: called with the size of the bytes that were on this machine already, one call at a time.
    """

    connections: int = CONNECTIONS
    progress: Progress | None = None
    stop: threading.Event | None = None
    local: LocalSource = lambda _ref, _shards: nullcontext({})
    verified: Verified = lambda _path, _target: None
    found: Callable[[int], None] = lambda _size_bytes: None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The outcome of one pass.  Its sizes count the bytes of files."""

    reused_bytes: int
    """Bytes that an interrupted restore had fetched already."""
    local_bytes: int
    """Bytes that were copied from files on this machine."""
    from_mirror: Sequence[str]
    """Paths of the files with bytes that the store has lost or damaged, and the mirror had."""
    is_of_store: bool
    """All bytes came from the store, also those that an interrupted restore had fetched."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads and verifies chunks.

    Args:
        refused: makes the error for an object that the store refuses while it returns others, see
            :func:`swansong_bucket.runs.catalog.refused`; None: such an object ends the pass.
        mirror: read for chunks that the store has lost or damaged.
    """

    store: ObjectStore
    options: ReadOptions
    refused: Callable[[str, Permanent], CorruptError] | None = None
    mirror: ObjectStore | None = None

    def sizes(self, chunks: Collection[Chunk], *, listed_min: int = LISTED_MIN) -> dict[Chunk, int]:
        """The sizes of the objects of these chunks, without those that were not found.

        Args:
            listed_min: this number of chunks of one generation is looked up by a listing, a smaller one by
                HEADs.  Some stores omit keys between two pages of a listing.
        """
        keys_of: defaultdict[str, set[str]] = defaultdict(set)
        for chunk in chunks:
            keys_of[chunk.key[: chunk.key.rindex("/") + 1]].add(chunk.key)
        many = [prefix for prefix, keys in keys_of.items() if len(keys) >= listed_min]
        few = [key for prefix, keys in keys_of.items() if prefix not in many for key in keys]
        found: dict[str, int] = {}

        def listed(prefix: str) -> None:
            for info in stored_objects(self.store, prefix):
                if info.key in keys_of[prefix]:  # there can be any number of other objects
                    found[info.key] = info.size_bytes

        def asked(key: str) -> None:
            if (info := self.store.head(key)) is not None:
                found[key] = info.size_bytes

        self._parallel(many, listed)
        self._parallel(few, asked)
        return {chunk: found[chunk.key] for chunk in chunks if chunk.key in found}

    def check(
        self, chunks: Collection[Chunk], intact: Callable[[Chunk], object] = lambda _chunk: None
    ) -> dict[Chunk, str]:
        """Read stored chunks; returns the defect of each one that is missing or does not match its name.

        Args:
            intact: called with each of the other chunks, from any thread.
        """
        defects: dict[Chunk, str] = {}
        transfer = self._transfer(chunks)

        def one(chunk: Chunk) -> None:
            with transfer.chunk() as may_begin:
                if not may_begin:
                    return
                why = self.fetch(chunk, _ChunkSink(chunk, transfer, _count_all))
            if why:
                defects[chunk] = why
            else:
                intact(chunk)

        self._parallel(chunks, one)
        return defects

    def each(self, chunks: Collection[Chunk], take: Callable[[Chunk, bytearray], object]) -> None:
        """Read stored chunks into memory, and pass each to ``take``, in as many threads as connections.

        Raises:
            CorruptError: a chunk is missing or does not match its name.
        """
        transfer = self._transfer(chunks, first=self.options.connections)

        def one(chunk: Chunk) -> None:
            with transfer.chunk() as may_begin:
                if not may_begin:
                    return
                data = bytearray()
                if why := self.fetch(chunk, _ChunkSink(chunk, transfer, partial(_collect, data))):
                    raise CorruptError(f"{chunk.key} {why}")
                take(chunk, data)

        self._parallel(chunks, one)

    def _parallel(self, tasks: Collection[Task], function: Callable[[Task], None]) -> None:
        parallel(tasks, function, threads=self.options.connections, stop=self.options.stop)

    def read(
        self,
        shards: Sequence[StoredShard],
        *,
        target: RestoreTarget,
        noted: Noted,
        local: Mapping[str, OpenLocal],
    ) -> PassResult:
        """Write the shards to the target, verified and recorded in its journal.

        While the disk syncs finished files, all connections fetch further ones.

        Args:
            noted: chunks that the journal of an interrupted restore names.
            local: files on this machine that may have the bytes of a shard, by its path.

        Raises:
            CorruptError: neither the store nor the mirror has an intact copy of a chunk.
            StoreError: the store could not be read.
        """
        # The small files come first: a trainer reads the indexes before all others.  A large file that
        # starts last would leave other connections idle at the end.
        ordered = sorted(shards, key=lambda s: (s.size_bytes > _SMALL_BYTES, -s.size_bytes))
        places = places_of(ordered)
        transfer = self._transfer(shards)
        reading = _Reading(self, transfer, places, target, noted=noted, local=dict(local))
        tasks: list[Callable[[], None]] = [
            partial(reading.create, [shard.path for shard in ordered if not shard.extents])
        ]
        tasks += [partial(reading.chunk, chunk) for chunk in places]
        threads = self.options.connections * _SYNCS
        parallel(tasks, lambda task: task(), threads=threads, stop=self.options.stop)
        return PassResult(
            reused_bytes=reading.reused_bytes,
            local_bytes=reading.local_bytes,
            from_mirror=sorted(reading.from_mirror),
            is_of_store=reading.is_of_store,
        )

    def _transfer(
        self, parts: Collection[Chunk] | Collection[StoredShard], *, first: int = FIRST
    ) -> _Transfer:
        limit = ConcurrencyLimit(self.options.connections, first)
        total_bytes = sum(part.size_bytes for part in parts)
        return _Transfer(total_bytes, limit, self.options.progress, self.options.stop)

    def fetch(self, chunk: Chunk, sink: _ChunkSink) -> str:
        """Read a chunk from the store; returns its defect, which is empty if it matches its name."""
        why = self._attempt(chunk, sink)
        # The network or this VM's memory may have flipped a bit: a second read costs less than lost steps.
        return self._attempt(chunk, sink) if why == _WRONG else why

    def _attempt(self, chunk: Chunk, sink: _ChunkSink) -> str:
        try:
            self.store.get_range(chunk.key, 0, chunk.size_bytes, sink)
        except NotFound:
            return defect_of_size(chunk, None)
        except Permanent as error:
            return self._why_refused(chunk, error)
        return "" if sink.is_intact() else _WRONG

    def _why_refused(self, chunk: Chunk, error: Permanent) -> str:
        """The defect of a chunk that cannot be read; raises ``error`` if the store refuses all objects."""
        with suppress(Permanent):
            info = self.store.head(chunk.key)
            if why := defect_of_size(chunk, None if info is None else info.size_bytes):
                return why
        if self.refused is None:
            raise error
        self.refused(chunk.key, error)
        return f"cannot be read: {error}"

    def fetch_from_mirror(self, chunk: Chunk, sink: _ChunkSink) -> bool:
        """Read a chunk from the mirror; False if the mirror has no intact copy, or fails."""
        if self.mirror is None:
            return False
        try:
            self.mirror.get_range(chunk.key, 0, chunk.size_bytes, sink)
        except StoreError as error:
            _log.warning("mirror_not_read", key=chunk.key, reason=error.line())
        return sink.is_intact()


@dataclass(eq=False, repr=False)
class _Transfer:
    """State that all connections of one pass share: bytes done, chunks in flight, the stop."""

    total_bytes: int
    limit: ConcurrencyLimit
    progress: Progress | None
    stop: threading.Event | None

    def __post_init__(self) -> None:
        self._cpus = len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._waiting: deque[threading.Condition] = deque()
        """Threads with a chunk, in order: else a shard would wait for one of its chunks until the end."""
        self._in_flight = 0
        self._done_bytes = 0
        self._next_sample_mono_s = 0.0
        self._has_failed = False

    @contextmanager
    def chunk(self) -> Iterator[bool]:
        """Block until the limit admits one more chunk, in the order of the calls; raises Stopped.

        Yields False after an error in such a context: the pass ends, and no further request may be sent.
        """
        with self._lock:
            turn = threading.Condition(self._lock)
            self._waiting.append(turn)
            while not (self._is_next(turn) or self._is_stopped):
                turn.wait(SAMPLE_S)  # without bytes, no other thread takes a sample
                self._sample()
            self._waiting.remove(turn)
            self._in_flight += 1
            self._wake_next()
        try:
            self._end_if_stopped()
            yield not self._has_failed
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
                self._wake_next()

    def _is_next(self, turn: threading.Condition) -> bool:
        return self._waiting[0] is turn and self._in_flight < self.limit.now

    def _wake_next(self) -> None:
        if self._waiting and self._in_flight < self.limit.now:
            self._waiting[0].notify()

    def add(self, size_bytes: int) -> None:
        """Count bytes that are done; raises Stopped after the stop."""
        self._end_if_stopped()
        with self._lock:
            self._done_bytes += size_bytes
            self._sample()
            if self.progress is not None and size_bytes > 0:
                self.progress(self._done_bytes, self.total_bytes)

    def subtract(self, size_bytes: int) -> None:
        """Discount bytes that are fetched again."""
        if size_bytes:
            with self._lock:
                self._done_bytes -= size_bytes

    def _sample(self) -> None:
        now_mono_s = time.monotonic()
        if now_mono_s < self._next_sample_mono_s:
            return  # process_time() costs more than reading a small file
        self._next_sample_mono_s = now_mono_s + SAMPLE_S / 4
        self.limit.sample(now_mono_s, self._done_bytes, time.process_time(), self._cpus)
        self._wake_next()

    @property
    def _is_stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def _end_if_stopped(self) -> None:
        if self._is_stopped:
            raise Stopped("stopped before it was done")


def _count_all(window: memoryview, _at_bytes: int) -> int:
    return window.nbytes


def _collect(data: bytearray, window: memoryview, at_bytes: int) -> int:
    data[at_bytes:] = window  # a repeated attempt starts again
    return window.nbytes


class _ChunkSink:
    """Takes the bytes of one chunk from the first to the last: hashes them, and passes them on."""

    def __init__(self, chunk: Chunk, transfer: _Transfer, write: _Write) -> None:
        self._chunk = chunk
        self._transfer = transfer
        self._write = write
        self._counted_bytes = 0
        self.rewind()

    def rewind(self) -> None:
        self._transfer.subtract(self._counted_bytes)
        self._hash = blake3()
        self._done_bytes = self._counted_bytes = 0

    def write(self, window: memoryview) -> None:
        if self._done_bytes + window.nbytes > self._chunk.size_bytes:
            raise Transient("the store sent more bytes than the requested range has")
        self._hash.update(window)
        counted_bytes = self._write(window, self._done_bytes)
        self._done_bytes += window.nbytes
        self._counted_bytes += counted_bytes
        self._transfer.add(counted_bytes)

    def is_intact(self) -> bool:
        """Whether all bytes have arrived: they match the name of the chunk."""
        return self._hash.digest() == self._chunk.digest


class _Writer:
    """Writes the windows of a chunk to all of its places.  One file is open at a time."""

    def __init__(self, target: RestoreTarget, places: Collection[Place]) -> None:
        self._target = target
        self._places = sorted(places, key=lambda place: place.at_bytes)
        self._stack = ExitStack()
        self._path = ""
        self._file: RestoredFile | None = None

    def close(self) -> None:
        self._stack.close()

    def write(self, window: memoryview, at_bytes: int) -> int:
        """Write the next window; one at offset 0 starts again.  Returns the number of bytes in files."""
        if not at_bytes:
            self._next, self._begun = 0, list[Place]()
        end_bytes = at_bytes + window.nbytes
        while self._next < len(self._places) and self._places[self._next].at_bytes < end_bytes:
            self._begun.append(self._places[self._next])
            self._next += 1
        written_bytes = 0
        for place in self._begun:
            start, end = max(at_bytes, place.at_bytes), min(end_bytes, place.end_bytes)
            offset = place.offset_bytes + start - place.at_bytes
            self._opened(place.path).write(window[start - at_bytes : end - at_bytes], offset)
            written_bytes += end - start
        self._begun = [place for place in self._begun if place.end_bytes > end_bytes]
        return written_bytes

    def _opened(self, path: str) -> RestoredFile:
        if self._file is None or path != self._path:
            self._stack.close()
            self._file = self._stack.enter_context(self._target.file(path))
            self._path = path
        return self._file


@dataclass(eq=False, repr=False)
class _Reading:
    """One pass over the chunks of some shards."""

    reader: Reader
    transfer: _Transfer
    places: Mapping[Chunk, Sequence[Place]]
    target: RestoreTarget
    _: KW_ONLY
    noted: Noted
    local: dict[str, OpenLocal]

    def __post_init__(self) -> None:
        self.reused_bytes = 0
        self.local_bytes = 0
        self.from_mirror: set[str] = set()
        self.is_of_store = True
        self._lock = threading.Lock()
        self._chunks_left = Counter(
            path for each in self.places.values() for path in {place.path for place in each}
        )

    def create(self, paths: Sequence[str]) -> None:
        """Create empty files."""
        for path in paths:
            with self.target.file(path):
                self.transfer.add(0)
        self._complete(paths, is_shared=len(paths) > 1)

    def chunk(self, chunk: Chunk) -> None:
        """Bring a chunk to its places; the last chunk of a file completes the file."""
        places = self.places[chunk]
        with self.transfer.chunk() as may_begin:
            if not may_begin:
                return
            if self._is_in_target(chunk, places):
                is_of_store = self.noted[chunk]
            else:
                is_of_store = not self._is_copied(chunk, places) and self._fetch(chunk, places)
                self.target.note(chunk, is_of_store=is_of_store)
            if not is_of_store:
                self.is_of_store = False
        paths = list(dict.fromkeys(place.path for place in places))
        with self._lock:
            self._chunks_left.subtract(paths)
            complete = [path for path in paths if not self._chunks_left[path]]
        self._complete(complete, is_shared=len(paths) > 1)

    def _complete(self, paths: Sequence[str], *, is_shared: bool) -> None:
        """Pass complete files on, and sync them: those that share a chunk when the target is published."""
        for path in paths:
            self.reader.options.verified(path, self.target)
            if not is_shared:
                with self.target.file(path) as file:
                    file.sync()
        if paths and is_shared:
            self.target.sync_at_publish()

    def _is_in_target(self, chunk: Chunk, places: Sequence[Place]) -> bool:
        """Whether an interrupted restore has written the chunk to all of its places."""
        ranges = cover(chunk, places)
        if chunk not in self.noted or not ranges or _size(places) != chunk.size_bytes:
            return False
        is_intact = self._is_read(ranges, self._of_target, self._hashing(chunk))
        if is_intact:
            with self._lock:
                self.reused_bytes += chunk.size_bytes
                self.reader.options.found(chunk.size_bytes)
        return is_intact

    def _is_copied(self, chunk: Chunk, places: Sequence[Place]) -> bool:
        """Whether files on this machine had the bytes.  A file with other bytes is not tried again."""
        ranges = cover(chunk, [place for place in places if place.path in self.local])
        if not ranges:
            return False
        if len(places) == 1 and self._is_cloned(places[0]):
            is_intact = self._is_read(ranges, self._of_target, self._hashing(chunk))
        else:
            with closing(_Writer(self.target, places)) as writer:
                sink = _ChunkSink(chunk, self.transfer, writer.write)
                is_intact = self._is_read(ranges, self._of_local, sink)
        if is_intact:
            with self._lock:
                self.local_bytes += _size(places)
                self.reader.options.found(_size(places))
        else:
            for each in ranges:
                self.local.pop(each.path, None)
        return is_intact

    def _is_cloned(self, place: Place) -> bool:
        opening = self.local.get(place.path)
        if opening is None:
            return False  # another thread has found other bytes
        try:
            fd = opening()
        except StagingError:
            return False  # removed or changed since it was found
        try:
            with self.target.file(place.path) as file:
                return file.clone(fd, place.offset_bytes, place.size_bytes)
        finally:
            os.close(fd)

    def _fetch(self, chunk: Chunk, places: Sequence[Place]) -> bool:
        """Fetch a chunk; False if the mirror had it, and not the store."""
        with closing(_Writer(self.target, places)) as writer:
            sink = _ChunkSink(chunk, self.transfer, writer.write)
            why = self.reader.fetch(chunk, sink)
            if why:
                path = places[0].path
                if not self.reader.fetch_from_mirror(chunk, sink):
                    raise CorruptError(f"{path} {why}")
                _log.warning("read_from_mirror", what=path, key=chunk.key, reason=why)
                with self._lock:
                    self.from_mirror.update(place.path for place in places)
            return not why

    def _hashing(self, chunk: Chunk) -> _ChunkSink:
        return _ChunkSink(chunk, self.transfer, _count_all)

    def _is_read(
        self,
        ranges: Sequence[Place],
        opened: Callable[[str], AbstractContextManager[_ReadWindow]],
        sink: _ChunkSink,
    ) -> bool:
        """Pass the bytes of these ranges of files to the sink; returns whether they are the chunk."""
        buffer = memoryview(bytearray(min(_size(ranges), WINDOW_BYTES)))
        for each in ranges:
            with opened(each.path) as read:
                done_bytes = 0
                while done_bytes < each.size_bytes:
                    window = buffer[: each.size_bytes - done_bytes]
                    count = read(window, each.offset_bytes + done_bytes)
                    if not count:
                        sink.rewind()
                        return False
                    sink.write(window[:count])
                    done_bytes += count
        if sink.is_intact():
            return True
        sink.rewind()
        return False

    @contextmanager
    def _of_target(self, path: str) -> Iterator[_ReadWindow]:
        with self.target.file(path) as file:
            yield file.read_into

    @contextmanager
    def _of_local(self, path: str) -> Iterator[_ReadWindow]:
        opening = self.local.get(path)
        try:
            fd = -1 if opening is None else opening()
        except StagingError:
            fd = -1  # removed or changed since it was found: no byte can be read
        try:
            yield partial(read_window, fd)
        finally:
            if fd >= 0:
                os.close(fd)


def _size(places: Sequence[Place]) -> int:
    return sum(place.size_bytes for place in places)
