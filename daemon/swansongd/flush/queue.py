# SPDX-License-Identifier: Apache-2.0
"""The upload queue of one set: which bytes are stored, which are in flight, and which chunk is next."""

from __future__ import annotations

import math
import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from swansong_bucket.model import Chunk, Extent, Staged, StagedFile, StoredShard

from swansongd.flush.cutting import ChunkLayout, Piece, Pieces, size_of
from swansongd.flush.known import KnownChunks

LATE_SHARE = 3.0
"""A chunk in flight is late after this multiple of the median time of the last ones ..."""
LATE_S_MIN = 0.5
"""... and after this time at the earliest."""
ATTEMPTS_MAX = 2
"""Attempts of one chunk at the same time."""


@dataclass(frozen=True, slots=True)
class FindWork:
    """Find the work that is left of the set."""


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Read the pieces of a chunk, and name a stored chunk with these bytes, or create one."""

    pieces: Pieces
    begun_mono_s: float


@dataclass(frozen=True, slots=True)
class FinishSet:
    """Check that the set did not change, and report it as stored."""


Task = FindWork | StoreChunk | FinishSet
"""A task of a worker of the flush."""


class Traffic:
    """Counts the bytes of a set.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent_bytes = 0
        """Bytes sent so far, in finished requests and in those in flight."""
        self.compared_bytes = 0
        """Bytes that were read, and that the store has already."""

    def sent(self, size_bytes: int) -> None:
        """Count bytes as sent; a negative number takes back those of a request that is repeated."""
        with self._lock:
            self.sent_bytes += size_bytes

    def compared(self, size_bytes: int) -> None:
        with self._lock:
            self.compared_bytes += size_bytes


class ChunkTimes:
    """How long the last chunks have taken, from their first byte to the answer of the store.

    Guarded by the engine's lock.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque(maxlen=32)

    def add(self, took_s: float, size_bytes: int) -> None:
        self._last.append((took_s, size_bytes))

    def late_s(self, size_bytes: int) -> float:
        """After this time a chunk of this size is late; infinite if nothing is known."""
        if not self._last:
            return math.inf
        usual_s = statistics.median(
            took_s * max(1.0, size_bytes / of_bytes) for took_s, of_bytes in self._last
        )
        return max(LATE_S_MIN, LATE_SHARE * usual_s)


@dataclass(slots=True)
class _File:
    """A file of the set, with the extents of its stored pieces."""

    file: StagedFile
    pieces: list[Piece]
    extents: dict[Piece, Extent] = field(default_factory=dict)


class UploadQueue:
    """Hands out the chunks of one set, and keeps count of the stored bytes.

    The queue does no IO and takes no lock: the engine calls every method under its lock, except
    :meth:`wants` and :meth:`rests_on`.  A queue outlives the flushes of its set.  So a set that another one
    interrupted resumes, and files that were sent while the set was still being written are not read again.

    When no chunk of a sealed set waits any more, one that is late is handed out once more: the answer of a
    store sometimes takes many times longer than usual.  The first attempt that succeeds counts, and the other
    one then ends, because its bytes are not wanted any more.

    Args:
        generation: of the start that sealed the set.
        layout: decides which bytes share a chunk.
        times: shared by the sets of the run.
    """

    def __init__(self, generation: int, layout: ChunkLayout, times: ChunkTimes) -> None:
        self.generation = generation
        self.bytes_stored = 0
        self.traffic = Traffic()
        self.confirmed: dict[Chunk, bool] = {}
        """Whether the store has a chunk, by its answers since :meth:`close`; any thread may add one ..."""
        self.asking: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        """... while it holds the lock of the key."""
        self._layout = layout
        self._times = times
        self._files: dict[str, _File] = {}
        self._is_open = False
        self._is_sealed = False
        self._is_finishing = False
        self._waiting: deque[Pieces] = deque()
        self._attempts: dict[Pieces, list[StoreChunk]] = {}
        """Chunks that workers read or send, the oldest first, and the attempts of each one."""
        self._left = 0
        """Pieces that are not stored."""

    def open(self, staged: Staged, *, is_sealed: bool, known: KnownChunks) -> None:
        """Queue the work that is left of a set.  Unchanged files keep their progress.

        Args:
            is_sealed: False while further files may follow.
            known: chunks that a manifest may name; bytes in other chunks are stored again.
        """
        self._is_open, self._is_sealed, self._is_finishing = True, is_sealed, False
        before, self._files = self._files, {}
        for file in staged.files:
            each = before.get(file.path)
            if each is None or each.file != file:
                each = _File(file, self._layout.cut(file))
            each.extents = {p: e for p, e in each.extents.items() if known.holds([e.chunk])}
            self._files[file.path] = each
        stored = [piece for each in self._files.values() for piece in each.extents]
        self.bytes_stored = sum(piece.size_bytes for piece in stored)
        missing = [p for each in self._files.values() for p in each.pieces if p not in each.extents]
        self._left = len(missing)
        in_flight = {piece for pieces in self._attempts for piece in pieces}
        waiting = [piece for piece in missing if piece not in in_flight]
        small = [piece for piece in waiting if self._layout.is_small(piece.file)]
        # The shared chunks come last: small requests end at the same time.
        self._waiting = deque((p,) for p in waiting if not self._layout.is_small(p.file))
        self._waiting.extend(self._layout.packed(small, is_sealed=is_sealed))

    def close(self) -> None:
        """Hand out no further task, until the next :meth:`open`."""
        self._is_open = False
        self.confirmed.clear()

    def wants(self, piece: Piece) -> bool:
        """Whether these bytes are still needed.  Callable without the lock."""
        return self._is_open and self._is_missing(piece)

    def rests_on(self, task: StoreChunk) -> bool:
        """Whether bytes are still needed that no other attempt sends.  Callable without the lock.

        If two attempts fail at the same time, each may count the other one: :meth:`finish` queues the chunk.
        """
        is_alone = len(self._attempts.get(task.pieces, ())) < ATTEMPTS_MAX
        return is_alone and any(map(self.wants, task.pieces))

    @property
    def in_flight(self) -> int:
        """Attempts of all chunks that workers read or send."""
        return sum(map(len, self._attempts.values()))

    def next_bytes(self, now_mono_s: float) -> int:
        """Size of the next chunk; 0 if there is none."""
        return size_of(self._next(now_mono_s))

    def has_task(self, now_mono_s: float) -> bool:
        """Whether :meth:`next_task` would return a task."""
        if not self._is_open or self._is_finishing:
            return False
        return bool(self._next(now_mono_s)) or (self._is_sealed and not self._left)

    def next_task(self, now_mono_s: float) -> StoreChunk | FinishSet | None:
        """The next task; None when none can begin now."""
        if not self.has_task(now_mono_s):
            return None
        if pieces := self._next(now_mono_s):
            if self._waiting:
                self._waiting.popleft()
            task = StoreChunk(pieces, now_mono_s)
            self._attempts.setdefault(pieces, []).append(task)
            return task
        self._is_finishing = True
        return FinishSet()

    def _next(self, now_mono_s: float) -> Pieces:
        """The next chunk that waits, or else one that is late; empty if there is none."""
        if self._waiting:
            return self._waiting[0]
        return next(self._late(now_mono_s), ()) if self._is_sealed else ()

    def _late(self, now_mono_s: float) -> Iterator[Pieces]:
        for pieces, attempts in self._attempts.items():
            late_s = self._times.late_s(size_of(pieces))
            is_late = now_mono_s - attempts[0].begun_mono_s > late_s
            if is_late and len(attempts) < ATTEMPTS_MAX and any(map(self._is_missing, pieces)):
                yield pieces

    def stored(self, extents: Mapping[Piece, Extent]) -> None:
        """Note that these pieces are stored."""
        for piece, extent in extents.items():
            each = self._files.get(piece.file.path)
            if each is not None and each.file == piece.file and piece not in each.extents:
                each.extents[piece] = extent
                self.bytes_stored += piece.size_bytes
                self._left -= 1

    def finish(self, task: StoreChunk, *, is_deferred: bool = False) -> None:
        """Take a task back from its worker, and queue again what is not stored.

        The worker does not know that: the queue may have been opened again since it looked.

        Args:
            is_deferred: a file cannot be read now; the next :meth:`open` tries again.
        """
        attempts = self._attempts.get(task.pieces, [])
        if task not in attempts:
            return  # another attempt has stored the chunk
        missing = tuple(piece for piece in task.pieces if self._is_missing(piece))
        attempts.remove(task)
        if missing and attempts:
            return
        del self._attempts[task.pieces]
        if missing and not is_deferred:
            self._waiting.appendleft(missing)

    def _is_missing(self, piece: Piece) -> bool:
        each = self._files.get(piece.file.path)
        return each is not None and each.file == piece.file and piece not in each.extents

    @property
    def chunks(self) -> set[Chunk]:
        """The chunks with bytes of the set so far."""
        return {extent.chunk for each in self._files.values() for extent in each.extents.values()}

    def shards(self) -> tuple[StoredShard, ...]:
        """The shards of a set that is stored completely, by path."""
        return tuple(
            StoredShard(
                path=path,
                size_bytes=each.file.size_bytes,
                extents=tuple(each.extents[piece] for piece in each.pieces),
            )
            for path, each in sorted(self._files.items())
        )
