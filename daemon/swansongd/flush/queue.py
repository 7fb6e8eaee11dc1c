# SPDX-License-Identifier: Apache-2.0
"""The books of one set: what of it is stored, what is on its way, and what is to be done next.

No IO and no lock in here: the engine calls everything under its own lock.  A set outlives the flushes
that it is sent by, so that another set may come in between, and so that the files of a set that is still
being written are not sent again once it is sealed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from swansongd.digests import part_count
from swansongd.flush.journal import Held, ShardRecord, UploadRecord
from swansongd.model import Staged, StagedFile
from swansongd.staging.scan import SetDirectory
from swansongd.util.concurrency import ConcurrencyLimit

ADVANCE = 0
"""In the place of the number of a part: the next step of the shard as a whole."""


RENEWALS_MAX = 3
"""So often a shard begins anew because the store knows nothing of it any more."""

Outcome = Literal["done", "again", "aside"]
"""Of a task: done, to be done again, or not before the next order."""


@dataclass(eq=False, slots=True)
class Shard:
    """One file on its way."""

    file: StagedFile
    key: str
    held: Held | None = None
    is_confirmed: bool = True
    """False for what an earlier daemon held, until the store has been asked."""
    is_cut: bool = False
    """Whether its parts stand in the queue, or have been taken from it."""
    in_flight: set[int] = field(default_factory=set)
    counted_bytes: int = 0
    renewals: int = 0

    @property
    def stored(self) -> ShardRecord | None:
        """Not None once it is whole."""
        return self.held if self.is_confirmed and isinstance(self.held, ShardRecord) else None

    @property
    def upload(self) -> UploadRecord | None:
        """The upload that it is being sent by."""
        return self.held if self.is_confirmed and isinstance(self.held, UploadRecord) else None


@dataclass(eq=False, slots=True)
class Order:
    """A flush, as it was ordered."""

    flush_id: str
    staged: Staged
    is_sealed: bool
    width: ConcurrencyLimit
    is_ending: bool = False
    sent_bytes: dict[int, int] = field(default_factory=dict)
    """By thread, so that none waits for another to count."""
    directory: SetDirectory | None = None
    """Of the set, once a file of it has been opened."""
    workers: int = 0
    """That are at a task of it."""

    def moved(self, size_bytes: int) -> None:
        """So much has left, or less than that had; without a lock, from any thread."""
        thread = threading.get_ident()
        self.sent_bytes[thread] = self.sent_bytes.get(thread, 0) + size_bytes


Task = tuple[Shard, int] | Literal["end"]


class UploadQueue:
    """The books.

    Args:
        name: of the set, in the journal.
        key_of: key of a path under a given upload nonce.
        nonce: a new word for each attempt.
    """

    def __init__(
        self, name: str, key_of: Callable[[str, str], str], nonce: Callable[[], str]
    ) -> None:
        self.name = name
        self.order: Order | None = None
        """The flush under way; None while the set waits."""
        self.shards: dict[str, Shard] = {}
        self.bytes_stored = 0
        self._key_of = key_of
        self._nonce = nonce
        self._attempt = nonce()
        self._parts: deque[tuple[Shard, int]] = deque()
        self._data: deque[Shard] = deque()
        self._markers: deque[Shard] = deque()
        self._data_left = 0
        self._left = 0

    def begin(self, order: Order, held: Mapping[str, Held]) -> None:
        """Take an order: what is stored of exactly these files stays, the others are new.

        Args:
            held: what the journal says now.
        """
        self.order = order
        before = self.shards
        same = {f.path for f in order.staged.files if f.path in before and before[f.path].file == f}
        if before.keys() - same:
            # Their keys are spent: other bytes must never go there.
            self._attempt = self._nonce()
        self.shards = {
            file.path: before[file.path] if file.path in same else self._new(file, held)
            for file in order.staged.files
        }
        self.bytes_stored = 0
        self._parts.clear()
        self._data.clear()
        self._markers.clear()
        for shard in self.shards.values():
            shard.is_cut = False
            shard.counted_bytes = 0
            self.count(shard)
        waiting = [shard for shard in self.shards.values() if shard.stored is None]
        # The largest first: a big one that begins last would keep one worker busy alone.
        waiting.sort(key=lambda shard: shard.file.size_bytes, reverse=True)
        self._left = len(waiting)
        self._data_left = sum(not self._is_marker(shard) for shard in waiting)
        for shard in waiting:
            if ADVANCE not in shard.in_flight:
                self._queue(shard)

    def wants(self, shard: Shard) -> bool:
        """Whether the bytes of the shard are still of use.  May be asked without the lock."""
        return self.order is not None and self.shards.get(shard.file.path) is shard

    def has_task(self) -> bool:
        """Whether :meth:`next_task` would give one."""
        order = self.order
        if order is None or order.is_ending:
            return False
        if self._parts or self._data:
            return True
        # Neither markers nor an end before all the files of the set are known.
        return order.is_sealed and (bool(self._markers and not self._data_left) or not self._left)

    def next_task(self) -> Task | None:
        """What to do next; None when nothing may begin now.  Markers wait for the data they cover."""
        if self.order is None or not self.has_task():
            return None
        if self._parts:
            shard, number = self._parts.popleft()
        elif self._data or self._markers:
            shard, number = (self._data or self._markers).popleft(), ADVANCE
        else:
            self.order.is_ending = True
            return "end"
        shard.in_flight.add(number)
        return shard, number

    def count(self, shard: Shard) -> None:
        """Take what is stored of a shard into the sum."""
        upload = shard.upload
        if shard.stored is not None:
            stored_bytes = shard.file.size_bytes
        elif upload is not None:
            numbers = set(upload.parts) - shard.in_flight  # these count when they settle
            stored_bytes = sum(upload.upload.part_length_bytes(number) for number in numbers)
        else:
            stored_bytes = 0
        self._add(shard, stored_bytes - shard.counted_bytes)

    def stored(self, shard: Shard, held: ShardRecord) -> None:
        """The shard is whole."""
        shard.held = held
        shard.is_confirmed = True
        if self.shards.get(shard.file.path) is shard:
            self.count(shard)
            self._left -= 1
            self._data_left -= not self._is_marker(shard)

    def settle(self, shard: Shard, number: int, outcome: Outcome) -> None:
        """A worker leaves a task; queue what that makes necessary."""
        shard.in_flight.discard(number)
        if self.shards.get(shard.file.path) is not shard or shard.stored is not None:
            return
        upload = shard.upload
        if number != ADVANCE and outcome == "done" and upload is not None:
            self._add(shard, upload.upload.part_length_bytes(number))
        if outcome == "aside":
            return
        if number == ADVANCE:
            if outcome == "done":
                self._cut(shard)
            else:
                self._queue(shard)
        elif shard.is_cut:  # else its next advance sees to all of its parts
            if outcome == "again":
                self._parts.appendleft((shard, number))
            elif upload is not None and upload.is_whole and not shard.in_flight:
                self._queue(shard, at_once=True)  # to be completed

    def renew(self, shard: Shard) -> bool:
        """Nothing of the shard is there after all: it begins anew, under a new key.

        False when that has happened too often already.
        """
        if self.shards.get(shard.file.path) is not shard:
            return True
        if shard.renewals >= RENEWALS_MAX:
            return False
        key = self._key_of(shard.file.path, self._nonce())
        fresh = Shard(shard.file, key, renewals=shard.renewals + 1)
        self._add(shard, -shard.counted_bytes)
        self.shards[shard.file.path] = fresh
        self._queue(fresh, at_once=True)
        return True

    def _new(self, file: StagedFile, held: Mapping[str, Held]) -> Shard:
        shard = Shard(file, self._key_of(file.path, self._attempt))
        earlier = held.get(file.path)
        if earlier is not None and earlier.file == file:
            shard.held = earlier
            shard.is_confirmed = False
        return shard

    def _cut(self, shard: Shard) -> None:
        """Queue the parts that are neither stored nor on their way, or what comes after the last."""
        shard.is_cut = True
        missing: list[int] = []
        if (upload := shard.upload) is not None:
            busy = upload.parts.keys() | shard.in_flight
            count = part_count(upload.upload.size_bytes, upload.upload.part_size_bytes)
            missing = [number for number in range(1, count + 1) if number not in busy]
        self._parts.extend((shard, number) for number in missing)
        if not missing and not shard.in_flight:
            self._queue(shard, at_once=True)

    def _add(self, shard: Shard, more_bytes: int) -> None:
        shard.counted_bytes += more_bytes
        self.bytes_stored += more_bytes

    def _queue(self, shard: Shard, *, at_once: bool = False) -> None:
        queue = self._markers if self._is_marker(shard) else self._data
        if at_once:
            queue.appendleft(shard)
        else:
            queue.append(shard)

    def _is_marker(self, shard: Shard) -> bool:
        return self.order is not None and shard.file.path in self.order.staged.markers
