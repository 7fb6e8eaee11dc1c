# SPDX-License-Identifier: Apache-2.0
"""Carries out the tasks of one shard: reference it, send it, complete it, or confirm an earlier upload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog
from blake3 import blake3

from swansongd.digests import part_count
from swansongd.errors import Exists, NotFound, Permanent, StoreError
from swansongd.flush.active import ActiveFlush
from swansongd.flush.body import Cancelled, FileBody, opened, part_size_for, within_means
from swansongd.flush.delta import Comparison, completed, missing_parts, part_range, stored_record
from swansongd.flush.journal import UploadJournal
from swansongd.flush.known_parts import KnownParts, head_digest
from swansongd.flush.object_checks import RESUMED_S_MAX, is_recent
from swansongd.flush.records import EqualPart, PartRecord, ShardRecord, UploadRecord
from swansongd.flush.tasks import Advance, ComparePart, SendPart, Shard
from swansongd.staging import scan
from swansongd.stores.base import CRC32C_UNKNOWN, ObjectStore, PartReceipt, Upload

_log = structlog.get_logger(__name__)


class ShardUploader:
    """Carries out shard tasks, in as many threads as call it.

    Args:
        store, run_directory, journal, part_size_bytes: as of the engine.
        lock: guards the flushes and their queues.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_directory: int | Path,
        journal: UploadJournal,
        *,
        lock: threading.Lock,
        part_size_bytes: int,
    ) -> None:
        self._store = store
        self._run_directory = run_directory
        self._journal = journal
        self._lock = lock
        self._part_size_bytes = part_size_bytes

    def carry_out(self, flush: ActiveFlush, task: Advance | ComparePart | SendPart) -> None:
        """Carry out one task.

        Raises:
            Cancelled: the bytes are not needed any more.
            StagingError: the file cannot be read, or has changed.
            StoreError: the store failed.
        """
        shard = task.shard
        if isinstance(task, ComparePart):
            self._compare_part(flush, task)
        elif not shard.is_confirmed:
            self._confirm(flush, shard)
        elif (upload := shard.upload) is None:
            self._open(flush, shard)
        elif isinstance(task, SendPart):
            self._send_part(flush, shard, upload, task.number)
        elif upload.is_whole:
            self._complete(flush, shard, upload)

    def _confirm(self, flush: ActiveFlush, shard: Shard) -> None:
        """Compare the journal's record of an earlier daemon with the store, and keep what both contain."""
        record = shard.record
        if isinstance(record, ShardRecord):
            objects = {extent.object for extent in record.shard.extents}
            if flush.checks.are_recent(self._store, objects):
                self._stored(flush, shard, record)
            else:
                reason = f"an object of {record.shard.path} is gone, or too old to be resumed"
                self._restart(flush, shard, NotFound(reason))
        elif record is not None:
            self._confirm_upload(flush, shard, record)

    def _confirm_upload(self, flush: ActiveFlush, shard: Shard, record: UploadRecord) -> None:
        if not flush.checks.are_stored(self._store, record.referenced):
            self._restart(flush, shard, NotFound(f"an object of {record.file.path} is gone"))
            return
        if not self._is_recent(record.upload):
            self._restart(flush, shard, NotFound("the upload is too old to be resumed"))
            return
        try:
            receipts = {receipt.number: receipt for receipt in self._store.parts(record.upload)}
        except Permanent as error:
            # The store does not know the upload, or lists no parts for this role.  If everything fails,
            # for example for lack of credentials, this request fails too, and the upload is kept.
            info = self._store.head(record.upload.key)
            is_there = info is not None and info.size_bytes == record.upload.size_bytes
            if record.is_whole and info is not None and is_there and is_recent(info.age_s):
                # The upload was completed, and only the reply was lost.
                self._stored(flush, shard, completed(record))
            else:
                self._restart(flush, shard, error)
            return
        with self._lock:
            for number, part in list(record.parts.items()):
                is_in_store = _is_same(part.receipt, receipts.get(number))
                if not is_in_store and number not in shard.parts_in_flight:
                    del record.parts[number]
            shard.is_confirmed = True
            flush.queue.count(shard)

    def _is_recent(self, upload: Upload) -> bool:
        """Whether the upload may be resumed: on S3 the age of its object counts from the upload's start."""
        try:
            found = list(self._store.uploads(upload.key))
        except Permanent:
            return True  # a role without this right, or a store without such a list
        return all(
            each.age_s < RESUMED_S_MAX for each in found if each.upload_id == upload.upload_id
        )

    def _open(self, flush: ActiveFlush, shard: Shard) -> None:
        """Compare the file, then reference it, store it in one request, or begin its upload."""
        if not shard.file.size_bytes:
            self._stored(flush, shard, self._empty(flush, shard))
            return
        comparison = shard.comparison or self._begin_comparison(flush, shard)
        if not comparison.missing:
            self._begin(flush, shard, comparison)

    def _empty(self, flush: ActiveFlush, shard: Shard) -> ShardRecord:
        """The record of an empty file, which needs no object."""
        with opened(self.directory(flush), shard.file) as fd:
            part = PartRecord(PartReceipt(1, "", 0), blake3().digest(), head_digest(fd, 0, 0))
        return stored_record(shard.file, 1, {}, "", [part])

    def _begin_comparison(self, flush: ActiveFlush, shard: Shard) -> Comparison:
        """Find the parts that the newest commit may have, by their heads."""
        file, known = shard.file, self._journal.known_parts()
        part_size_bytes = part_size_for(
            file.size_bytes,
            wanted_bytes=self._part_size_bytes,
            least_bytes=self._store.part_size_bytes_min,
            known_bytes=known.part_size_bytes(file.path),
        )
        indices: Sequence[int] = range(part_count(file.size_bytes, part_size_bytes))
        if known and known.has_heads:
            indices = self._candidates(flush, shard, known, part_size_bytes)
        elif known.part_size_bytes(file.path) != part_size_bytes:
            indices = ()
        comparison = Comparison(known, part_size_bytes, indices)
        with self._lock:
            shard.comparison = comparison
        return comparison

    def _candidates(
        self, flush: ActiveFlush, shard: Shard, known: KnownParts, part_size_bytes: int
    ) -> list[int]:
        file, candidates = shard.file, []
        with opened(self.directory(flush), file) as fd:
            for index in range(part_count(file.size_bytes, part_size_bytes)):
                if not flush.queue.wants(shard):
                    raise Cancelled
                if known.may_contain(head_digest(fd, *part_range(file, part_size_bytes, index))):
                    candidates.append(index)
        return candidates

    def _compare_part(self, flush: ActiveFlush, task: ComparePart) -> None:
        """Read one part, and note it if the newest commit and the store have it."""
        file, comparison = task.shard.file, task.comparison
        offset, size_bytes = part_range(file, comparison.part_size_bytes, task.index)
        with opened(self.directory(flush), file) as fd:
            body = _body(flush, task.shard, fd, offset, size_bytes, moved=flush.count_compared)
            crc32c = body.read_all()
            head = head_digest(fd, offset, size_bytes)
        extents = comparison.known.find(body.digest, size_bytes)
        comparison.has_match = comparison.has_match or bool(extents)
        if extents and flush.checks.are_stored(self._store, {each.object for each in extents}):
            comparison.found[task.index] = EqualPart(body.digest, head, crc32c, extents)

    def _begin(self, flush: ActiveFlush, shard: Shard, comparison: Comparison) -> None:
        """Reference the file, or send those of its parts that are not known."""
        file, part_size_bytes = shard.file, comparison.part_size_bytes
        equal = comparison.usable(self._journal.known_parts())
        missing = missing_parts(file, part_size_bytes, equal)
        if not missing:
            self._stored(flush, shard, stored_record(file, part_size_bytes, equal, "", []))
            return
        if len(missing) == 1:
            self._send_only(flush, shard, missing[0], part_size_bytes, equal)
            return
        ranges = [part_range(file, part_size_bytes, index) for index in missing]
        size_bytes = sum(length for _, length in ranges)
        upload = self._store.begin(shard.key, size_bytes, part_size_bytes)
        record = self._journal.upload_begun(flush.queue.name, file, upload, equal)
        with self._lock:
            shard.record = record
            flush.queue.count(shard)

    def _send_only(
        self,
        flush: ActiveFlush,
        shard: Shard,
        index: int,
        part_size_bytes: int,
        equal: Mapping[int, EqualPart],
    ) -> None:
        """Store the only part that is not known, in one request."""
        file = shard.file
        offset, size_bytes = part_range(file, part_size_bytes, index)
        with opened(self.directory(flush), file) as fd:
            body = _body(flush, shard, fd, offset, size_bytes, moved=flush.count_sent)
            try:
                crc32c = self._store.put_shard(shard.key, body)
            except Exists as error:
                # The store has other bytes under this key: the key is used up.
                self._restart(flush, shard, error)
                return
            head = head_digest(fd, offset, size_bytes)
        sent = [PartRecord(PartReceipt(1, "", crc32c), body.digest, head)]
        self._stored(flush, shard, stored_record(file, part_size_bytes, equal, shard.key, sent))

    def _send_part(
        self, flush: ActiveFlush, shard: Shard, record: UploadRecord, number: int
    ) -> None:
        upload = record.upload
        index = record.indices[number - 1]
        offset, size_bytes = part_range(shard.file, upload.part_size_bytes, index)
        with opened(self.directory(flush), shard.file) as fd:
            body = _body(flush, shard, fd, offset, size_bytes, moved=flush.count_sent)
            try:
                receipt = self._store.put_part(upload, number, body)
            except NotFound as error:
                self._restart(flush, shard, error)
                raise Cancelled from None
            head = head_digest(fd, offset, size_bytes)
        self._journal.part_stored(flush.queue.name, record, PartRecord(receipt, body.digest, head))

    def _complete(self, flush: ActiveFlush, shard: Shard, record: UploadRecord) -> None:
        stored = completed(record)
        receipts = [record.parts[number].receipt for number in sorted(record.parts)]
        try:
            self._store.complete(record.upload, receipts)
        except NotFound as error:
            self._restart(flush, shard, error)
        except BaseException:
            with self._lock:
                shard.is_confirmed = (
                    False  # the outcome is unknown: the next Advance asks the store
                )
                flush.queue.count(shard)
            raise
        else:
            self._stored(flush, shard, stored)

    def _restart(self, flush: ActiveFlush, shard: Shard, error: StoreError) -> None:
        _log.warning("upload_restarted", key=shard.key, error=str(error))
        with self._lock:
            if not flush.queue.restart_upload(shard):
                raise error

    def _stored(self, flush: ActiveFlush, shard: Shard, record: ShardRecord) -> None:
        self._journal.shard_stored(flush.queue.name, record)
        with self._lock:
            flush.queue.stored(shard, record)

    def directory(self, flush: ActiveFlush) -> scan.SetDirectory:
        """The directory of the set, opened once for all workers of the flush."""
        if flush.directory is not None:
            return flush.directory
        name = flush.staged.directory
        directory = within_means(lambda: scan.SetDirectory(self._run_directory, name))
        with self._lock:
            if flush.directory is None:
                flush.directory = directory
                return directory
        directory.close()
        return flush.directory


def _body(
    flush: ActiveFlush,
    shard: Shard,
    fd: int,
    offset: int,
    size_bytes: int,
    *,
    moved: Callable[[int], None] = lambda _bytes: None,
) -> FileBody:
    def is_unwanted() -> bool:
        return not flush.queue.wants(shard)

    return FileBody(fd, shard.file.path, offset, size_bytes, is_unwanted=is_unwanted, moved=moved)


def _is_same(ours: PartReceipt, theirs: PartReceipt | None) -> bool:
    """Whether the store lists the part that our receipt describes."""
    if theirs is None or theirs != ours:
        return False
    return theirs.crc32c in (ours.crc32c, CRC32C_UNKNOWN)
