# SPDX-License-Identifier: Apache-2.0
"""The upload queue of one set: which bytes are stored, which are in flight, and which chunk is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from swansong_bucket.model import Chunk, Extent, Staged, StagedFile, StoredShard

from swansongd.flush.known import KnownChunks
from swansongd.flush.layout import ChunkLayout, Piece, Pieces, size_of
from swansongd.flush.tasks import FinishSet, StoreChunk


@dataclass(slots=True)
class _File:
    """A file of the set, with the extents of its stored pieces."""

    file: StagedFile
    pieces: list[Piece]
    extents: dict[Piece, Extent] = field(default_factory=dict)


class UploadQueue:
    """Hands out the chunks of one set, and keeps count of the stored bytes.

    The queue does no IO and takes no lock: the engine calls every method under its lock, except
    :meth:`wants`.  A queue outlives the flushes of its set.  So a set that another one interrupted
    resumes, and files that were sent while the set was still being written are not read again.

    Args:
        generation: of the start that sealed the set.
        layout: decides which bytes share a chunk.
    """

    def __init__(self, generation: int, layout: ChunkLayout) -> None:
        self.generation = generation
        self.bytes_stored = 0
        self._layout = layout
        self._files: dict[str, _File] = {}
        self._is_open = False
        self._is_sealed = False
        self._is_finishing = False
        self._waiting: deque[Pieces] = deque()
        self.in_flight = 0
        """Chunks that workers read or send."""
        self._in_flight: set[Piece] = set()
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
        waiting = [piece for piece in missing if piece not in self._in_flight]
        small = [piece for piece in waiting if self._layout.is_small(piece.file)]
        # The shared chunks come last: small requests end at the same time.
        self._waiting = deque((p,) for p in waiting if not self._layout.is_small(p.file))
        self._waiting.extend(self._layout.packed(small, is_sealed=is_sealed))

    def close(self) -> None:
        """Hand out no further task, until the next :meth:`open`."""
        self._is_open = False

    def wants(self, piece: Piece) -> bool:
        """Whether these bytes are still needed.  Callable without the lock."""
        each = self._files.get(piece.file.path)
        return self._is_open and each is not None and each.file == piece.file

    @property
    def next_bytes(self) -> int:
        """Size of the next chunk; 0 if none waits."""
        return size_of(self._waiting[0]) if self._waiting else 0

    def has_task(self) -> bool:
        """Whether :meth:`next_task` would return a task."""
        if not self._is_open or self._is_finishing:
            return False
        return bool(self._waiting) or (self._is_sealed and not self._left)

    def next_task(self) -> StoreChunk | FinishSet | None:
        """The next task; None when none can begin now."""
        if not self.has_task():
            return None
        if self._waiting:
            pieces = self._waiting.popleft()
            self._in_flight.update(pieces)
            self.in_flight += 1
            return StoreChunk(pieces)
        self._is_finishing = True
        return FinishSet()

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
        self._in_flight.difference_update(task.pieces)
        self.in_flight -= 1
        missing = tuple(piece for piece in task.pieces if self._is_missing(piece))
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
