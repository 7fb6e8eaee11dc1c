# SPDX-License-Identifier: Apache-2.0
"""The upload queue of one set: which bytes are stored, which are in flight, and which task is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from swansongd.flush.known_parts import KnownParts
from swansongd.flush.packs import NO_PACKS, Packing
from swansongd.flush.records import FileRecord, ShardRecord, UploadRecord
from swansongd.flush.tasks import (
    Advance,
    ComparePart,
    Finish,
    PartTask,
    SendPack,
    SendPart,
    Shard,
    ShardTask,
    TaskOutcome,
)
from swansongd.model import Staged, StagedFile

RESTARTS_MAX = 3
"""Uploads of one shard that are restarted in one flush because the store has lost them."""

PACKS_MAX = 999_999
"""Packs under one upload nonce: a key has six digits for them."""

NOTHING_KNOWN = KnownParts()


class UploadQueue:
    """Hands out the tasks of one set, and keeps count of the stored bytes.

    The queue does no IO and takes no lock: the engine calls every method under its lock, except
    :meth:`wants`.  A queue outlives the flushes of its set.  So a set that another one interrupted
    resumes, and files that were sent while the set was still being written are not sent again.

    Args:
        name: of the set, in the journal.
        key_of: returns the key of a path under an upload nonce.
        nonce: returns a new upload nonce.
        packing: decides which files share an object.
        pack_key_of: returns the key of a pack with this number, from 1, under an upload nonce.
    """

    def __init__(
        self,
        name: str,
        key_of: Callable[[str, str], str],
        nonce: Callable[[], str],
        *,
        packing: Packing = NO_PACKS,
        pack_key_of: Callable[[int, str], str] = lambda number, nonce: f"{nonce}-{number}",
    ) -> None:
        self.name = name
        self.shards: dict[str, Shard] = {}
        self.bytes_stored = 0
        self._key_of = key_of
        self._nonce = nonce
        self._packing = packing
        self._pack_key_of = pack_key_of
        self._packs_begun = 0
        self._upload_nonce = nonce()
        self._is_open = False
        self._is_sealed = False
        self._is_finishing = False
        self._marker_paths: frozenset[str] = frozenset()
        self._parts: deque[PartTask] = deque()
        self._packs: deque[tuple[Shard, ...]] = deque()
        self._data: deque[Advance] = deque()
        self._markers: deque[Advance] = deque()
        self._data_left = 0
        self._left = 0

    def open(
        self,
        staged: Staged,
        records: Mapping[str, FileRecord],
        *,
        is_sealed: bool,
        known: KnownParts = NOTHING_KNOWN,
    ) -> None:
        """Queue the work that is left of a set.  Unchanged files keep their progress.

        Args:
            records: the journal's records of the set, by path.
            is_sealed: False while further files may follow.
            known: the parts of the newest commit.  The progress of a file that needs an object of an older
                commit is lost: a cleanup of the bucket may delete that object.

        Raises:
            BoundsError: the set has a number that no key can contain.
        """
        self._is_open = True
        self._is_sealed = is_sealed
        self._is_finishing = False
        self._marker_paths = staged.markers
        before = self.shards
        same = {
            file.path
            for file in staged.files
            if file.path in before and _is_usable(before[file.path].record, known)
            if before[file.path].file == file
        }
        if before.keys() - same:
            # The keys of the changed files are used up: other bytes must never be written there.
            self._upload_nonce = self._nonce()
        self.shards = {
            file.path: before[file.path] if file.path in same else self._new(file, records, known)
            for file in staged.files
        }
        self.bytes_stored = 0
        self._parts.clear()
        self._packs.clear()
        self._data.clear()
        self._markers.clear()
        for shard in self.shards.values():
            shard.is_split = False
            shard.counted_bytes = 0
            if shard.comparison is not None and shard.comparison.known is not known:
                shard.comparison = None
            self.count(shard)
        missing = [shard for shard in self.shards.values() if shard.stored is None]
        small = [shard for shard in missing if self._goes_into_pack(shard)]
        # The largest first: a large shard that begins last would occupy a single worker at the end.
        missing.sort(key=lambda shard: shard.file.size_bytes, reverse=True)
        self._left = len(missing)
        self._data_left = sum(not self._is_marker(shard) for shard in missing)
        for shard in missing:
            if not shard.is_advancing and not self._goes_into_pack(shard):
                self._queue(shard)
        self._queue_packs([shard for shard in small if not shard.is_advancing])

    def close(self) -> None:
        """Hand out no further task, until the next :meth:`open`."""
        self._is_open = False

    def wants(self, shard: Shard) -> bool:
        """Whether the bytes of the shard are still needed.  Callable without the lock."""
        return self._is_open and self.shards.get(shard.file.path) is shard

    def has_task(self) -> bool:
        """Whether :meth:`next_task` would return a task."""
        if not self._is_open or self._is_finishing:
            return False
        if self._parts or self._data or self._packs:
            return True
        # Markers and the end wait until all files of the set are known.
        return self._is_sealed and (bool(self._markers and not self._data_left) or not self._left)

    def next_task(self) -> ShardTask | Finish | None:
        """The next task; None when none can begin now.  Markers wait for the data that they cover."""
        if not self.has_task():
            return None
        if self._parts:
            part = self._parts.popleft()
            if isinstance(part, SendPart):
                part.shard.parts_in_flight.add(part.number)
            else:
                part.comparison.in_flight.add(part.index)
            return part
        if self._packs and not self._data:
            return self._begin_pack(self._packs.popleft())
        if self._data or self._markers:
            advance = (self._data or self._markers).popleft()
            advance.shard.is_advancing = True
            return advance
        self._is_finishing = True
        return Finish()

    def count(self, shard: Shard) -> None:
        """Bring :attr:`bytes_stored` up to date with the record of the shard."""
        upload = shard.upload
        if shard.stored is not None:
            stored_bytes = shard.file.size_bytes
        elif upload is not None:
            # Parts in flight count when their task is finished.
            numbers = set(upload.parts) - shard.parts_in_flight
            stored_bytes = sum(upload.upload.part_length_bytes(number) for number in numbers)
            stored_bytes += shard.file.size_bytes - upload.upload.size_bytes
        else:
            stored_bytes = 0
        self._add(shard, stored_bytes - shard.counted_bytes)

    def stored(self, shard: Shard, record: ShardRecord) -> None:
        """Note that all of the shard is stored."""
        shard.record = record
        shard.is_confirmed = True
        if self.shards.get(shard.file.path) is shard:
            self.count(shard)
            self._left -= 1
            self._data_left -= not self._is_marker(shard)

    def finish(self, task: ShardTask, outcome: TaskOutcome) -> None:
        """Take a task back from its worker, and queue the tasks that follow from its outcome."""
        match task:
            case SendPart(shard, number):
                shard.parts_in_flight.discard(number)
                if self._is_missing(shard):
                    self._finish_part(task, outcome)
            case ComparePart(shard, comparison, index):
                comparison.in_flight.discard(index)
                if self._is_missing(shard) and shard.comparison is comparison:
                    self._finish_comparison(task, outcome)
            case Advance(shard):
                shard.is_advancing = False
                if not self._is_missing(shard) or outcome is TaskOutcome.DEFERRED:
                    return
                if outcome is TaskOutcome.DONE:
                    self._split(shard)
                else:
                    self._queue(shard)
            case SendPack(shards):
                for shard in shards:
                    shard.is_advancing = False
                left = tuple(shard for shard in shards if self._is_missing(shard))
                if left and outcome is not TaskOutcome.DEFERRED:
                    self._packs.appendleft(left)

    def is_current(self, known: KnownParts) -> bool:
        """Whether all objects that the set references belong to the newest commit."""
        return all(_is_usable(shard.record, known) for shard in self.shards.values())

    def restart_upload(self, shard: Shard) -> bool:
        """Send the shard again, under a new key, because the store has lost it.

        False when the shard was restarted too often already.
        """
        if self.shards.get(shard.file.path) is not shard:
            return True
        if shard.restarts >= RESTARTS_MAX:
            return False
        key = self._key_of(shard.file.path, self._nonce())
        fresh = Shard(shard.file, key, comparison=shard.comparison, restarts=shard.restarts + 1)
        self._add(shard, -shard.counted_bytes)
        self.shards[shard.file.path] = fresh
        self._queue(fresh, is_next=True)
        return True

    def restart_pack(self, shards: Sequence[Shard]) -> bool:
        """Note that the shards must be sent again, because the key of their pack is taken.

        False when a shard was restarted too often already.
        """
        for shard in shards:
            shard.restarts += 1
        return all(shard.restarts <= RESTARTS_MAX for shard in shards)

    def _goes_into_pack(self, shard: Shard) -> bool:
        return (
            self._packing.is_small(shard.file.size_bytes)
            and not self._is_marker(shard)
            and not isinstance(shard.record, UploadRecord)
        )

    def _queue_packs(self, small: Sequence[Shard]) -> None:
        for group in self._packing.groups(small, is_sealed=self._is_sealed):
            if len(group) == 1:
                self._queue(group[0])
            else:
                self._packs.append(tuple(group))

    def _begin_pack(self, shards: tuple[Shard, ...]) -> SendPack:
        for shard in shards:
            shard.is_advancing = True
        if self._packs_begun == PACKS_MAX:
            self._packs_begun, self._upload_nonce = 0, self._nonce()
        self._packs_begun += 1
        return SendPack(shards, self._pack_key_of(self._packs_begun, self._upload_nonce))

    def _finish_part(self, part: SendPart, outcome: TaskOutcome) -> None:
        shard, upload = part.shard, part.shard.upload
        is_done = outcome is TaskOutcome.DONE
        if is_done and upload is not None:
            self._add(shard, upload.upload.part_length_bytes(part.number))
        if not shard.is_split:
            return  # the next Advance queues every missing part
        if outcome is TaskOutcome.RETRY:
            self._parts.appendleft(part)
        elif is_done and upload is not None and upload.is_whole and not shard.parts_in_flight:
            self._queue(shard, is_next=True)  # to be completed

    def _finish_comparison(self, part: ComparePart, outcome: TaskOutcome) -> None:
        comparison = part.comparison
        if outcome is TaskOutcome.DONE:
            comparison.compared.add(part.index)
        if not part.shard.is_split:
            return  # the next Advance queues every missing part
        if outcome is TaskOutcome.RETRY:
            self._parts.appendleft(part)
        elif outcome is TaskOutcome.DONE and comparison.is_round_over:
            self._queue(part.shard, is_next=True)

    def _split(self, shard: Shard) -> None:
        """Queue the parts that are left and not in flight, or else the next step of the shard."""
        shard.is_split = True
        missing: list[PartTask] = []
        is_waiting = bool(shard.parts_in_flight)
        if (upload := shard.upload) is not None:
            taken = upload.parts.keys() | shard.parts_in_flight
            numbers = range(1, upload.parts_max + 1)
            missing = [SendPart(shard, number) for number in numbers if number not in taken]
        elif (comparison := shard.comparison) is not None and shard.record is None:
            indices = comparison.next_round()
            missing = [ComparePart(shard, comparison, index) for index in indices]
            is_waiting = bool(comparison.queued)
        self._parts.extend(missing)
        if not missing and not is_waiting:
            self._queue(shard, is_next=True)

    def _new(self, file: StagedFile, records: Mapping[str, FileRecord], known: KnownParts) -> Shard:
        shard = Shard(file, self._key_of(file.path, self._upload_nonce))
        earlier = records.get(file.path)
        if earlier is not None and earlier.file == file and _is_usable(earlier, known):
            shard.record = earlier
            shard.is_confirmed = False
        return shard

    def _is_missing(self, shard: Shard) -> bool:
        return self.shards.get(shard.file.path) is shard and shard.stored is None

    def _add(self, shard: Shard, more_bytes: int) -> None:
        shard.counted_bytes += more_bytes
        self.bytes_stored += more_bytes

    def _queue(self, shard: Shard, *, is_next: bool = False) -> None:
        queue = self._markers if self._is_marker(shard) else self._data
        if is_next:
            queue.appendleft(Advance(shard))
        else:
            queue.append(Advance(shard))

    def _is_marker(self, shard: Shard) -> bool:
        return shard.file.path in self._marker_paths


def _is_usable(record: FileRecord | None, known: KnownParts) -> bool:
    """Whether all objects that the record references belong to the newest commit."""
    return record is None or record.referenced <= known.objects
