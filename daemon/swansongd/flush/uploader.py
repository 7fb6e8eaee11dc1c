# SPDX-License-Identifier: Apache-2.0
"""What a worker of the flush does for one shard: refer to it, send it, complete it, or ask what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Condition

import structlog

from swansongd.digests import part_count, shard_digest
from swansongd.errors import Exists, NotFound, Permanent, StoreError
from swansongd.flush.body import Cancelled, FileBody, opened, part_size_for, within_means
from swansongd.flush.journal import Journal, ShardRecord, UploadRecord
from swansongd.flush.queue import ADVANCE, Order, Shard, UploadQueue
from swansongd.model import StoredShard
from swansongd.staging import scan
from swansongd.stores.base import CRC32C_UNKNOWN, ObjectStore, PartReceipt
from swansongd.stores.checksums import crc32c_of_parts

_log = structlog.get_logger(__name__)


class ShardUploader:
    """Carries out the tasks of a :class:`UploadQueue`, in as many threads as call.

    Args:
        store, run_directory, journal, part_size_bytes, is_urgent: as of the engine.
        lock: under which the books are kept.
        report: called as often as something has moved.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_directory: int | Path,
        journal: Journal,
        *,
        lock: Condition,
        report: Callable[[UploadQueue], None],
        part_size_bytes: int,
        is_urgent: Callable[[], bool],
    ) -> None:
        self._store = store
        self._run_directory = run_directory
        self._journal = journal
        self._lock = lock
        self._report = report
        self._part_size_bytes = part_size_bytes
        self._is_urgent = is_urgent

    def carry_out(self, order: Order, flush_set: UploadQueue, shard: Shard, number: int) -> None:
        """Send part ``number``, or take the next step of the shard as a whole; raises what hinders it."""
        upload = shard.upload
        if not shard.is_confirmed:
            self._recover(flush_set, shard)
        elif upload is None:
            self._open(order, flush_set, shard)
        elif number != ADVANCE:
            self._send_part(order, flush_set, shard, upload, number)
        elif upload.is_whole:
            self._complete(flush_set, shard, upload)

    def _recover(self, flush_set: UploadQueue, shard: Shard) -> None:
        """Ask the store about what the journal says, and believe what both say."""
        held = shard.held
        if isinstance(held, ShardRecord):
            if self._is_there(held.shard):
                self._stored(flush_set, shard, held)
            else:
                self._renew(flush_set, shard, NotFound(f"{held.shard.key} is gone"))
        elif held is not None:
            try:
                receipts = {receipt.number: receipt for receipt in self._store.parts(held.upload)}
            except Permanent as error:
                # The store does not know the upload, or the store or the role lists no parts.  An outage
                # of everything, such as of credentials, fails this question too, and keeps the upload.
                info = self._store.head(held.upload.key)
                if held.is_whole and info is not None and info.size_bytes == held.upload.size_bytes:
                    self._stored(
                        flush_set, shard, _whole(held)
                    )  # completed, but the reply was lost
                else:
                    self._renew(flush_set, shard, error)
                return
            with self._lock:
                for number, part in list(held.parts.items()):
                    is_true = _agree(part.receipt, receipts.get(number))
                    if not is_true and number not in shard.in_flight:
                        del held.parts[number]
                shard.is_confirmed = True
                flush_set.count(shard)

    def _open(self, order: Order, flush_set: UploadQueue, shard: Shard) -> None:
        """Reference the shard, store it in one request, or begin its upload."""
        file = shard.file
        referenced = self._reference(order, flush_set, shard)
        if referenced is not None:
            self._stored(flush_set, shard, referenced)
            return
        part_size_bytes = part_size_for(
            file.size_bytes,
            wanted_bytes=self._part_size_bytes,
            least_bytes=self._store.part_size_bytes_min,
        )
        if file.size_bytes > part_size_bytes:
            upload = self._store.begin(shard.key, file.size_bytes, part_size_bytes)
            held = self._journal.upload_begun(flush_set.name, file, upload)
            with self._lock:
                shard.held = held
            return
        with opened(self._directory(order), file) as fd:
            body = _body(
                flush_set, shard, fd, 0, file.size_bytes, moved=self._moved(order, flush_set)
            )
            try:
                crc32c = self._store.put_shard(shard.key, body)
            except Exists as error:
                # Other bytes than were sent were taken all the same: the key is spent.
                self._renew(flush_set, shard, error)
                return
        stored = StoredShard(
            path=file.path,
            size_bytes=file.size_bytes,
            digest=shard_digest([body.digest]),
            key=shard.key,
            part_size_bytes=part_size_bytes,
            crc32c=crc32c,
        )
        self._stored(flush_set, shard, ShardRecord(file, stored, (body.digest,)))

    def _reference(self, order: Order, flush_set: UploadQueue, shard: Shard) -> ShardRecord | None:
        """The shard as the newest committed set has stored it, when it has the same bytes.

        Its first part tells nearly always when it has not.  Where nothing is known of the parts the whole
        file has to be read, for which there is no time in an evacuation.
        """
        file = shard.file
        known = self._journal.known(file.path)
        if known is None or known.shard.size_bytes != file.size_bytes or not file.size_bytes:
            return None
        if not known.part_digests and self._is_urgent():
            return None
        part_size_bytes = known.shard.part_size_bytes
        digests: list[bytes] = []
        with opened(self._directory(order), file) as fd:
            for index in range(part_count(file.size_bytes, part_size_bytes)):
                offset = index * part_size_bytes
                size_bytes = min(part_size_bytes, file.size_bytes - offset)
                body = _body(flush_set, shard, fd, offset, size_bytes)
                digests.append(body.read_all())
                if known.part_digests and digests[-1] != known.part_digests[index]:
                    return None
        if shard_digest(digests) != known.shard.digest or not self._is_there(known.shard):
            return None
        return ShardRecord(file, known.shard, tuple(digests), is_referenced=True)

    def _send_part(
        self, order: Order, flush_set: UploadQueue, shard: Shard, held: UploadRecord, number: int
    ) -> None:
        upload = held.upload
        offset = (number - 1) * upload.part_size_bytes
        size_bytes = upload.part_length_bytes(number)
        with opened(self._directory(order), shard.file) as fd:
            body = _body(
                flush_set, shard, fd, offset, size_bytes, moved=self._moved(order, flush_set)
            )
            try:
                receipt = self._store.put_part(upload, number, body)
            except NotFound as error:
                self._renew(flush_set, shard, error)
                raise Cancelled from None
        self._journal.part_stored(flush_set.name, held, receipt, body.digest)

    def _complete(self, flush_set: UploadQueue, shard: Shard, held: UploadRecord) -> None:
        whole = _whole(held)
        receipts = [held.parts[number].receipt for number in sorted(held.parts)]
        try:
            self._store.complete(held.upload, receipts)
        except NotFound as error:
            self._renew(flush_set, shard, error)
        except BaseException:
            with self._lock:
                shard.is_confirmed = False  # the next try asks for the parts first
                flush_set.count(shard)
            raise
        else:
            self._stored(flush_set, shard, whole)

    def _renew(self, flush_set: UploadQueue, shard: Shard, error: StoreError) -> None:
        _log.warning("shard_sent_anew", key=shard.key, error=str(error))
        with self._lock:
            if not flush_set.renew(shard):
                raise error

    def _stored(self, flush_set: UploadQueue, shard: Shard, held: ShardRecord) -> None:
        self._journal.shard_stored(flush_set.name, held)
        with self._lock:
            flush_set.stored(shard, held)

    def _directory(self, order: Order) -> scan.SetDirectory:
        """Of the set, opened once an order."""
        if order.directory is not None:
            return order.directory
        name = order.staged.directory
        mine = within_means(lambda: scan.SetDirectory(self._run_directory, name))
        with self._lock:
            if order.directory is None:
                order.directory = mine
                return mine
        mine.close()
        return order.directory

    def _moved(self, order: Order, flush_set: UploadQueue) -> Callable[[int], None]:
        """Counts what leaves, window by window: with many parts under way none of them may end for long."""

        def moved(size_bytes: int) -> None:
            order.moved(size_bytes)
            self._report(flush_set)

        return moved

    def _is_there(self, shard: StoredShard) -> bool:
        info = self._store.head(shard.key)
        return info is not None and info.size_bytes == shard.size_bytes


def _body(
    flush_set: UploadQueue,
    shard: Shard,
    fd: int,
    offset: int,
    size_bytes: int,
    *,
    moved: Callable[[int], None] = lambda _bytes: None,
) -> FileBody:
    def is_unwanted() -> bool:
        return not flush_set.wants(shard)

    return FileBody(fd, shard.file.path, offset, size_bytes, is_unwanted=is_unwanted, moved=moved)


def _agree(ours: PartReceipt, theirs: PartReceipt | None) -> bool:
    """Whether the store has the part that we have a receipt of."""
    if theirs is None or theirs != ours:
        return False
    return theirs.crc32c in (ours.crc32c, CRC32C_UNKNOWN)


def _whole(held: UploadRecord) -> ShardRecord:
    """The shard that comes of an upload that has all its parts."""
    upload = held.upload
    parts = [held.parts[number] for number in sorted(held.parts)]
    digests = tuple(part.digest for part in parts)
    lengths = [(p.receipt.crc32c, upload.part_length_bytes(p.receipt.number)) for p in parts]
    return ShardRecord(
        held.file,
        StoredShard(
            path=held.file.path,
            size_bytes=upload.size_bytes,
            digest=shard_digest(digests),
            key=upload.key,
            part_size_bytes=upload.part_size_bytes,
            crc32c=crc32c_of_parts(lengths),
        ),
        digests,
    )
