# SPDX-License-Identifier: Apache-2.0
"""Reads shards over many connections, each byte once: hashed and written to its place as it arrives.

The unit is the part.  A part that an interrupted restore already wrote is read back from the disk, which is
cheaper than the network.  A part of a file that this machine has is copied.  All other parts are fetched.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from blake3 import blake3

from swansongd.bucket.keys import set_directory
from swansongd.digests import part_count, part_digest
from swansongd.errors import (
    CorruptError,
    NotFound,
    Permanent,
    StagingError,
    Stopped,
    Transient,
)
from swansongd.model import CommitRef, Extent, StoredObject, StoredShard
from swansongd.restore.journal import Noted
from swansongd.restore.runs import Range, Run, RunSink, joined
from swansongd.restore.target import RestoredFile, RestoreTarget
from swansongd.stores.base import WINDOW_BYTES, ObjectStore
from swansongd.util.concurrency import SAMPLE_S, ConcurrencyLimit
from swansongd.util.threads import Task, parallel

Progress = Callable[[int, int], None]
"""Takes the bytes done and the total; called from any thread, one call at a time."""
Verified = Callable[[str, RestoreTarget], None]
"""Takes the path of a file that matches its digest, and the target that contains it."""
Problems = dict[StoredShard, str]
"""The defect of each damaged shard, in words."""

OpenLocal = Callable[[], int]
"""Opens a file on this machine that may have the bytes of a shard; raises StagingError."""
LocalSource = Callable[
    [CommitRef, Mapping[int, StoredShard]], AbstractContextManager[Mapping[int, OpenLocal]]
]
"""Finds such files for the shards of a commit, by their number, while the context is open."""

_Numbered = tuple[int, StoredShard]
"""A shard with its number in the journal."""

CONNECTIONS = 16
"""Default limit of parallel connections."""
_SYNCS = 2
"""Threads of a restore for each connection: a thread that waits for the disk fetches nothing."""
_SMALL_BYTES = 2**20
_MISSING = "is missing from the store"
_WRONG = "{} does not match its digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Limits and callbacks of one pass over stored bytes.

    Args:
        connections: limit of parts in flight.
        progress: called with the bytes done.
        stop: ends the pass with Stopped, within one window.
        local: finds files on this machine, which are copied instead of fetched.
        verified: called with each file that is complete in a target, before it is synced; from any thread.
        found: called with the size of each part that was on this machine already, one call at a time.
    """

    connections: int = CONNECTIONS
    progress: Progress | None = None
    stop: threading.Event | None = None
    local: LocalSource | None = None
    verified: Verified | None = None
    found: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The outcome of one pass."""

    problems: Problems
    reused_bytes: int
    """Bytes that an interrupted restore had fetched already."""
    local_bytes: int
    """Bytes that were copied from files on this machine."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads and checks shards.

    Args:
        refused: makes the error for an object that the store refuses while it returns others, see
            :func:`swansongd.bucket.catalog.refused`; None: such an object ends the pass.
    """

    store: ObjectStore
    options: ReadOptions
    refused: Callable[[str, Permanent], CorruptError] | None = None

    def check_sizes(self, shards: Sequence[StoredShard]) -> Problems:
        """Compare the sizes of the stored objects with the manifest, without reading their bytes."""
        objects = dict.fromkeys(e.object for shard in shards for e in shard.extents)
        wrong = self.wrong_objects(list(objects))
        problems: Problems = {}
        for shard in shards:
            why = next((wrong[e.object] for e in shard.extents if e.object in wrong), None)
            if why is not None:
                problems[shard] = f"{shard.path} {why}"
        return problems

    def wrong_objects(self, objects: Sequence[StoredObject]) -> dict[StoredObject, str]:
        """The objects that are missing or have another size, each with its defect."""
        # Objects of one flush have one prefix: one page of a listing covers a thousand of them.
        beside: defaultdict[str, list[StoredObject]] = defaultdict(list)
        for stored in objects:
            beside[set_directory(stored.key)].append(stored)
        wrong: dict[StoredObject, str] = {}

        def check(prefix: str) -> None:
            wrong.update(self._wrong_objects(prefix, beside[prefix]))

        self._each(list(beside), check, threads=self.options.connections)
        return wrong

    def _wrong_objects(
        self, prefix: str, wanted: Sequence[StoredObject]
    ) -> dict[StoredObject, str]:
        """The objects below a prefix that are missing or have another size, each with its defect."""
        wrong: dict[StoredObject, str] = {}
        names = {stored.key for stored in wanted}  # of any number of objects there
        try:
            listing = self.store.list(prefix)
            sizes_bytes = {info.key: info.size_bytes for info in listing if info.key in names}
        except Permanent as error:
            why = f"cannot be read: {self._refused(f'the listing of {prefix}', error)}"
            return dict.fromkeys(wanted, why)
        is_one_missing = False
        for stored in wanted:
            size_bytes = sizes_bytes.get(stored.key)
            if size_bytes is None and not is_one_missing:
                # Some stores omit keys between two pages, so a HEAD decides.  One missing object makes
                # the commit unusable: the others need no request then.
                info = self.store.head(stored.key)
                size_bytes = None if info is None else info.size_bytes
                is_one_missing = info is None
            if size_bytes is None:
                wrong[stored] = _MISSING
            elif size_bytes != stored.size_bytes:
                wrong[stored] = (
                    f"has an object of {size_bytes} bytes instead of {stored.size_bytes}"
                )
        return wrong

    def read(
        self,
        shards: Mapping[int, StoredShard],
        *,
        target: RestoreTarget | None = None,
        noted: Noted | None = None,
        local: Mapping[int, OpenLocal] | None = None,
        progress: Progress | None = None,
    ) -> PassResult:
        """Read all bytes of the shards, and compare their digests.

        With a ``target`` the bytes are written there, recorded in its journal, and synced.  While the disk
        syncs finished files, all connections fetch further ones.

        Args:
            shards: by their number in the journal.
            noted: parts that the journal of an interrupted restore names.
            local: files on this machine that may have the bytes of a shard, by its number.
            progress: called with the bytes done.
        """
        total_bytes = sum(shard.size_bytes for shard in shards.values())
        limit = ConcurrencyLimit(self.options.connections)
        transfer = _Transfer(total_bytes, limit, progress, self.options.stop)
        reading = _Reading(
            self.store,
            target,
            noted or {},
            transfer,
            self._refused,
            verified=self.options.verified,
            found=self.options.found,
        )
        reading.local = local or {}
        runs, alone = reading.planned(shards, self.options.connections)
        states = [_Shard(number, shard) for number, shard in sorted(alone.items(), key=_place)]
        parts = [(state, index) for state in states for index in range(state.parts_left)]
        # The small files come first: a trainer reads the indexes before all others.
        small = sum(s.parts_left for s in states if s.shard.size_bytes <= _SMALL_BYTES)
        tasks: list[_Part | Run[_Numbered]] = [*parts[:small], *runs, *parts[small:]]
        self._each(
            tasks,
            lambda task: reading.run(task) if isinstance(task, Run) else reading.part(*task),
            threads=self.options.connections * (1 if target is None else _SYNCS),
        )
        return PassResult(
            problems=reading.problems,
            reused_bytes=reading.reused_bytes,
            local_bytes=reading.local_bytes,
        )

    def _refused(self, what: str, error: Permanent) -> str:
        """The defect of one object that the store refuses; raises ``error`` if it refuses all objects."""
        if self.refused is None:
            raise error
        return self.refused(what, error).line()

    def _each(
        self, tasks: Sequence[Task], function: Callable[[Task], None], *, threads: int
    ) -> None:
        parallel(tasks, function, threads=min(threads, len(tasks)), stop=self.options.stop)


@dataclass(slots=True)
class _Shard:
    """A shard that is being read."""

    number: int
    shard: StoredShard
    parts_left: int = field(init=False)
    starts: tuple[int, ...] = field(init=False)
    """Offset of each extent within the shard."""

    def __post_init__(self) -> None:
        self.parts_left = part_count(self.shard.size_bytes, self.shard.part_size_bytes)
        sizes = (extent.size_bytes for extent in self.shard.extents)
        self.starts = tuple(accumulate(sizes, initial=0))[:-1]

    def pieces(self, index: int) -> Iterator[Extent]:
        """The bytes of a part, in order."""
        offset, left_bytes = _span(self.shard, index)
        place = bisect_right(self.starts, offset) - 1
        while left_bytes:
            extent = self.shard.extents[place]
            skipped_bytes = offset - self.starts[place]
            size_bytes = min(left_bytes, extent.size_bytes - skipped_bytes)
            yield Extent(extent.object, extent.offset_bytes + skipped_bytes, size_bytes)
            offset, left_bytes, place = offset + size_bytes, left_bytes - size_bytes, place + 1


_Part = tuple[_Shard, int]
"""A shard, and the index of one of its parts."""


class _Transfer:
    """State that all connections of one pass share: bytes done, parts in flight, the stop."""

    def __init__(
        self,
        total_bytes: int,
        limit: ConcurrencyLimit,
        progress: Progress | None,
        stop: threading.Event | None,
    ) -> None:
        self._total_bytes = total_bytes
        self._limit = limit
        self._progress = progress
        self._stop = stop
        self._cpus = len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._waiting: deque[threading.Condition] = deque()
        """Threads with a part, in order: else a shard would wait for one of its parts until the end."""
        self._in_flight = 0
        self._done_bytes = 0
        self._next_sample_mono_s = 0.0

    @contextmanager
    def part(self) -> Iterator[None]:
        """Block until the limit admits one more part, in the order of the calls; raises Stopped."""
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
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
                self._wake_next()

    def _is_next(self, turn: threading.Condition) -> bool:
        return self._waiting[0] is turn and self._in_flight < self._limit.now

    def _wake_next(self) -> None:
        if self._waiting and self._in_flight < self._limit.now:
            self._waiting[0].notify()

    def add(self, size_bytes: int) -> None:
        """Count bytes that are done; raises Stopped after the stop."""
        self._end_if_stopped()
        with self._lock:
            self._done_bytes += size_bytes
            self._sample()
            if self._progress is not None and size_bytes > 0:
                self._progress(self._done_bytes, self._total_bytes)

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
        self._limit.sample(now_mono_s, self._done_bytes, time.process_time(), self._cpus)
        self._wake_next()

    @property
    def _is_stopped(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def _end_if_stopped(self) -> None:
        if self._is_stopped:
            raise Stopped("stopped before it was done")


class _PartSink:
    """Takes the bytes of one part: hashes them, and writes them to their place."""

    def __init__(
        self,
        offset: int,
        size_bytes: int,
        write: Callable[[memoryview, int], None],
        transfer: _Transfer,
    ) -> None:
        self._offset = offset
        self._size_bytes = size_bytes
        self._write = write
        self._transfer = transfer
        self._hash = blake3()
        self._done_bytes = 0
        self.begin_piece()

    def begin_piece(self) -> None:
        """The next bytes are from another request, which may be repeated alone."""
        self._hash_before = self._hash.copy()
        self._done_before_bytes = self._done_bytes

    def rewind(self) -> None:
        self._transfer.subtract(self._done_bytes - self._done_before_bytes)
        self._hash = self._hash_before.copy()
        self._done_bytes = self._done_before_bytes

    def write(self, window: memoryview) -> None:
        if self._done_bytes + window.nbytes > self._size_bytes:
            raise Transient("the store sent more bytes than the requested range has")
        self._hash.update(window)
        self._write(window, self._offset + self._done_bytes)
        self._done_bytes += window.nbytes
        self._transfer.add(window.nbytes)

    def digest(self) -> bytes:
        return self._hash.digest()


class _Reading:
    """One pass over some shards."""

    def __init__(
        self,
        store: ObjectStore,
        target: RestoreTarget | None,
        noted: Noted,
        transfer: _Transfer,
        refused: Callable[[str, Permanent], str],
        *,
        verified: Verified | None,
        found: Callable[[int], None] | None,
    ) -> None:
        self.problems: Problems = {}
        self.reused_bytes = 0
        self.local_bytes = 0
        self.local: Mapping[int, OpenLocal] = {}
        self._verified = verified
        self._found = found or (lambda _size_bytes: None)
        self._store = store
        self._target = target
        self._noted = noted
        self._transfer = transfer
        self._refused = refused
        self._lock = threading.Lock()
        self._has_failed = False
        """Set by the first error: threads that wait for a connection then send no further request."""

    def planned(
        self, shards: Mapping[int, StoredShard], connections: int
    ) -> tuple[list[Run[_Numbered]], dict[int, StoredShard]]:
        """The runs to fetch, and the shards that are read each by itself."""
        together = {
            number: shard
            for number, shard in shards.items()
            if _shares_object(shard) and number not in self.local and (number, 0) not in self._noted
        }
        ranges = (
            Range(extent.object.key, extent.offset_bytes, extent.size_bytes, (number, shard))
            for number, shard in together.items()
            for extent in shard.extents
        )
        alone = {number: shard for number, shard in shards.items() if number not in together}
        return joined(ranges, connections=connections), alone

    def run(self, run: Run[_Numbered]) -> None:
        """Fetch the shards of a run in one request."""
        sink = RunSink(
            run,
            None if self._target is None else self._opened,
            moved=self._transfer.add,
            taken_back=self._transfer.subtract,
        )
        shards = [each.item for each in run.ranges]
        try:
            with self._in_flight(), closing(sink):
                if self._has_failed:
                    return
                self._store.get_range(run.key, run.offset_bytes, run.size_bytes, sink)
        except NotFound:
            self.problems.update({shard: f"{shard.path} {_MISSING}" for _, shard in shards})
            return
        except Permanent as error:
            why = self._refused(run.key, error)
            self.problems.update(dict.fromkeys((shard for _, shard in shards), why))
            return
        good = {}
        for (number, shard), digest in zip(shards, sink.digests, strict=True):
            if digest == shard.part_digests:
                good[number] = shard
            else:
                self.problems[shard] = _WRONG.format(shard.path)
        if self._target is not None:
            self._target.note_whole({number: good[number].part_digests for number in good})
            if self._verified is not None:
                for shard in good.values():
                    self._verified(shard.path, self._target)

    def _opened(self, numbered: _Numbered) -> AbstractContextManager[RestoredFile]:
        assert self._target is not None
        return self._target.file(numbered[1].path)

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Hold a connection; after an error that ends the pass, no other thread gets one."""
        with self._transfer.part():
            try:
                yield
            except (NotFound, Permanent):
                raise
            except BaseException:
                self._has_failed = True
                raise

    def part(self, state: _Shard, index: int) -> None:
        """Read one part; the last part of a shard also compares the digest of the shard."""
        shard = state.shard
        if self._target is None:
            self._read(state, index, None)
            return
        with self._target.file(shard.path) as file:
            if self._read(state, index, file):
                if self._verified is not None:
                    self._verified(shard.path, self._target)
                file.sync()

    def _read(self, state: _Shard, index: int, file: RestoredFile | None) -> bool:
        """Read one part; True if the shard is now complete and matches its digest."""
        shard = state.shard
        try:
            with self._in_flight():
                if shard in self.problems or self._has_failed:
                    return False
                if file is None:
                    digest = self._fetched(state, index, lambda _window, _offset: None)
                else:
                    digest = self._placed(state, index, file)
        except NotFound:
            self.problems[shard] = f"{shard.path} {_MISSING}"
            return False
        except Permanent as error:
            self.problems[shard] = self._refused(shard.path, error)
            return False
        if digest != part_digest(shard.part_digests, index):
            self.problems[shard] = _WRONG.format(shard.path)
            return False
        with self._lock:
            state.parts_left -= 1
            return not state.parts_left

    def _placed(self, state: _Shard, index: int, file: RestoredFile) -> bytes:
        """Bring the part into its file and into the journal; returns its digest."""
        expected = part_digest(state.shard.part_digests, index)
        size_bytes = _span(state.shard, index)[1]
        is_noted = self._noted.get((state.number, index)) == expected
        if is_noted and _read_back(file, state.shard, index) == expected:
            with self._lock:
                self.reused_bytes += size_bytes
                self._found(size_bytes)
            self._transfer.add(size_bytes)
            return expected
        if self._copied(state, index, file) == expected:
            with self._lock:
                self.local_bytes += size_bytes
                self._found(size_bytes)
            self._transfer.add(size_bytes)
            digest = expected
        else:
            digest = self._fetched(state, index, file.write)
        if digest == expected:
            assert self._target is not None
            self._target.note(state.number, index, digest)
        return digest

    def _copied(self, state: _Shard, index: int, file: RestoredFile) -> bytes:
        """Copy the part from a file on this machine; returns its digest, or nothing without such a file."""
        opening = self.local.get(state.number)
        if opening is None:
            return b""
        try:
            fd = opening()
        except StagingError:
            return b""  # removed or changed since it was found
        try:
            offset, size_bytes = _span(state.shard, index)
            if file.clone(fd, offset, size_bytes):
                return _read_back(file, state.shard, index)
            return _copy(fd, file, offset, size_bytes)
        finally:
            os.close(fd)

    def _fetched(
        self, state: _Shard, index: int, write: Callable[[memoryview, int], None]
    ) -> bytes:
        offset, size_bytes = _span(state.shard, index)
        sink = _PartSink(offset, size_bytes, write, self._transfer)
        for piece in state.pieces(index):
            sink.begin_piece()
            self._store.get_range(piece.object.key, piece.offset_bytes, piece.size_bytes, sink)
        return sink.digest()


def _place(numbered: tuple[int, StoredShard]) -> tuple[bool, int]:
    """The place of a shard in the order of a pass: small ones, then the largest.

    A large shard that begins last would leave other connections idle at the end.
    """
    size_bytes = numbered[1].size_bytes
    return size_bytes > _SMALL_BYTES, -size_bytes


def _shares_object(shard: StoredShard) -> bool:
    """Whether the shard is one part in an object with further bytes: one request may fetch its neighbours."""
    return (
        len(shard.extents) == 1
        and shard.size_bytes <= shard.part_size_bytes
        and shard.size_bytes < shard.extents[0].object.size_bytes
    )


def _span(shard: StoredShard, index: int) -> tuple[int, int]:
    """Offset and size of a part."""
    offset = index * shard.part_size_bytes
    return offset, min(shard.part_size_bytes, shard.size_bytes - offset)


def _read_back(file: RestoredFile, shard: StoredShard, index: int) -> bytes:
    """Digest of the bytes in the file at the place of the part; empty if they cannot be read."""
    offset, size_bytes = _span(shard, index)
    return _hashed(file.read_into, offset, size_bytes)


def _copy(fd: int, file: RestoredFile, offset: int, size_bytes: int) -> bytes:
    """Copy a range to the same place of the file; returns its digest, or nothing if it cannot be read."""

    def copy(window: memoryview, at: int) -> int:
        try:
            count = os.preadv(fd, [window], at)
        except OSError:
            return 0
        file.write(window[:count], at)
        return count

    return _hashed(copy, offset, size_bytes)


def _hashed(read: Callable[[memoryview, int], int], offset: int, size_bytes: int) -> bytes:
    """Digest of a range that ``read`` returns window by window; empty if it ends early."""
    seen = blake3()
    buffer = memoryview(bytearray(min(size_bytes, WINDOW_BYTES)))
    done_bytes = 0
    while done_bytes < size_bytes:
        window = buffer[: size_bytes - done_bytes]
        count = read(window, offset + done_bytes)
        if not count:
            return b""
        seen.update(window[:count])
        done_bytes += count
    return seen.digest()
