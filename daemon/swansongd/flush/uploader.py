# SPDX-License-Identifier: Apache-2.0
"""Carries out the tasks of one shard: reference it, send it, complete it, or confirm an earlier upload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from blake3 import blake3

from swansongd.digests import part_count, part_digest
from swansongd.errors import Exists, NotFound, Permanent, StoreError
from swansongd.flush.active import ActiveFlush
from swansongd.flush.body import Cancelled, FileBody, opened, part_size_for, within_means
from swansongd.flush.journal import ShardRecord, UploadJournal, UploadRecord
from swansongd.flush.tasks import Advance, SendPart, Shard
from swansongd.model import StagedFile, StoredShard
from swansongd.staging import scan
from swansongd.stores.base import CRC32C_UNKNOWN, ObjectStore, PartReceipt
from swansongd.stores.checksums import crc32c_of_parts

_log = structlog.get_logger(__name__)


class ShardUploader:
    """Carries out shard tasks, in as many threads as call it.

    Args:
        store, run_directory, journal, part_size_bytes, is_urgent: as of the engine.
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
        is_urgent: Callable[[], bool],
    ) -> None:
        self._store = store
        self._run_directory = run_directory
        self._journal = journal
        self._lock = lock
        self._part_size_bytes = part_size_bytes
        self._is_urgent = is_urgent

    def carry_out(self, flush: ActiveFlush, task: Advance | SendPart) -> None:
        """Carry out one task.

        Raises:
            Cancelled: the bytes are not needed any more.
            StagingError: the file cannot be read, or has changed.
            StoreError: the store failed.
        """
        shard = task.shard
        if not shard.is_confirmed:
            self._confirm(flush, shard)
        elif (upload := shard.upload) is None:
            self._open(flush, shard)
        else:
            match task:
                case SendPart(number=number):
                    self._send_part(flush, shard, upload, number)
                case Advance() if upload.is_whole:
                    self._complete(flush, shard, upload)

    def _confirm(self, flush: ActiveFlush, shard: Shard) -> None:
        """Compare the journal's record of an earlier daemon with the store, and keep what both contain."""
        record = shard.record
        if isinstance(record, ShardRecord):
            if self.is_in_store(flush, record.shard):
                self._stored(flush, shard, record)
            else:
                self._restart(flush, shard, NotFound(f"an object of {record.shard.path} is gone"))
        elif record is not None:
            self._confirm_upload(flush, shard, record)

    def _confirm_upload(self, flush: ActiveFlush, shard: Shard, record: UploadRecord) -> None:
        try:
            receipts = {receipt.number: receipt for receipt in self._store.parts(record.upload)}
        except Permanent as error:
            # The store does not know the upload, or lists no parts for this role.  If everything fails,
            # for example for lack of credentials, this request fails too, and the upload is kept.
            info = self._store.head(record.upload.key)
            if record.is_whole and info is not None and info.size_bytes == record.upload.size_bytes:
                # The upload was completed, and only the reply was lost.
                self._stored(flush, shard, _completed(record))
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

    def _open(self, flush: ActiveFlush, shard: Shard) -> None:
        """Reference the shard, store it in one request, or begin its upload."""
        referenced = self._reference(flush, shard)
        if referenced is not None:
            self._stored(flush, shard, referenced)
            return
        size_bytes = shard.file.size_bytes
        if not size_bytes:
            self._stored(flush, shard, self._empty(flush, shard))
            return
        part_size_bytes = part_size_for(
            size_bytes,
            wanted_bytes=self._part_size_bytes,
            least_bytes=self._store.part_size_bytes_min,
        )
        if size_bytes <= part_size_bytes:
            self._send_whole(flush, shard, part_size_bytes)
            return
        upload = self._store.begin(shard.key, size_bytes, part_size_bytes)
        record = self._journal.upload_begun(flush.queue.name, shard.file, upload)
        with self._lock:
            shard.record = record

    def _empty(self, flush: ActiveFlush, shard: Shard) -> ShardRecord:
        """The record of an empty file, which needs no object."""
        with opened(self.directory(flush), shard.file):
            return _record_of_object(shard.file, shard.key, 1, [blake3().digest()], crc32c=0)

    def _send_whole(self, flush: ActiveFlush, shard: Shard, part_size_bytes: int) -> None:
        file = shard.file
        with opened(self.directory(flush), file) as fd:
            body = _body(flush, shard, fd, 0, file.size_bytes, moved=flush.count_sent)
            try:
                crc32c = self._store.put_shard(shard.key, body)
            except Exists as error:
                # The store has other bytes under this key: the key is used up.
                self._restart(flush, shard, error)
                return
        record = _record_of_object(file, shard.key, part_size_bytes, [body.digest], crc32c=crc32c)
        self._stored(flush, shard, record)

    def _reference(self, flush: ActiveFlush, shard: Shard) -> ShardRecord | None:
        """The shard of the newest committed set under the same path, if it has the same bytes.

        If the bytes differ, the first part nearly always shows it.
        """
        file = shard.file
        known = self._journal.known(file.path)
        if known is None or known.shard.size_bytes != file.size_bytes or not file.size_bytes:
            return None
        part_size_bytes = known.shard.part_size_bytes
        with opened(self.directory(flush), file) as fd:
            for index in range(part_count(file.size_bytes, part_size_bytes)):
                offset = index * part_size_bytes
                size_bytes = min(part_size_bytes, file.size_bytes - offset)
                digest = _body(flush, shard, fd, offset, size_bytes).read_all()
                if digest != part_digest(known.shard.part_digests, index):
                    return None
        if not self.is_in_store(flush, known.shard):
            return None
        return ShardRecord(file, known.shard, is_referenced=True)

    def _send_part(
        self, flush: ActiveFlush, shard: Shard, record: UploadRecord, number: int
    ) -> None:
        upload = record.upload
        offset = (number - 1) * upload.part_size_bytes
        size_bytes = upload.part_length_bytes(number)
        with opened(self.directory(flush), shard.file) as fd:
            body = _body(flush, shard, fd, offset, size_bytes, moved=flush.count_sent)
            try:
                receipt = self._store.put_part(upload, number, body)
            except NotFound as error:
                self._restart(flush, shard, error)
                raise Cancelled from None
        self._journal.part_stored(flush.queue.name, record, receipt, body.digest)

    def _complete(self, flush: ActiveFlush, shard: Shard, record: UploadRecord) -> None:
        completed = _completed(record)
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
            self._stored(flush, shard, completed)

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

    def is_in_store(self, flush: ActiveFlush, shard: StoredShard) -> bool:
        """Whether the store has all objects of the shard.  One HEAD for each object and flush."""
        for stored in {extent.object for extent in shard.extents} - flush.found_objects:
            info = self._store.head(stored.key)
            if info is None or info.size_bytes != stored.size_bytes:
                return False
            flush.found_objects.add(stored)
        return True


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


def _completed(record: UploadRecord) -> ShardRecord:
    """The record of the shard once an upload with all its parts is completed."""
    upload = record.upload
    parts = [record.parts[number] for number in sorted(record.parts)]
    lengths = [(p.receipt.crc32c, upload.part_length_bytes(p.receipt.number)) for p in parts]
    return _record_of_object(
        record.file,
        upload.key,
        upload.part_size_bytes,
        [part.digest for part in parts],
        crc32c=crc32c_of_parts(lengths),
    )


def _record_of_object(
    file: StagedFile, key: str, part_size_bytes: int, digests: Sequence[bytes], *, crc32c: int
) -> ShardRecord:
    """The record of a file whose bytes are one object."""
    shard = StoredShard.of_object(
        key,
        path=file.path,
        size_bytes=file.size_bytes,
        part_size_bytes=part_size_bytes,
        part_digests=b"".join(digests),
        crc32c=crc32c,
    )
    return ShardRecord(file, shard)
