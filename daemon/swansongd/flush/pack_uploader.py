# SPDX-License-Identifier: Apache-2.0
"""Carries out the tasks of packs: reference small files whose bytes are stored, and send the others together.

A pack is stored whole or not at all.  Each attempt has a key of its own, so no key gets different bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from swansongd.errors import Exists
from swansongd.flush.active import ActiveFlush
from swansongd.flush.body import Cancelled, FileBody, opened, part_size_for
from swansongd.flush.journal import ShardRecord, UploadJournal
from swansongd.flush.packs import PackBody
from swansongd.flush.tasks import SendPack, Shard
from swansongd.flush.uploader import ShardUploader
from swansongd.model import Extent, StoredObject, StoredShard
from swansongd.stores.base import ObjectStore


class PackUploader:
    """Carries out pack tasks, in as many threads as call it.

    Args:
        store, journal, part_size_bytes: as of the engine.
        lock: guards the flushes and their queues.
        shards: carries out the tasks of single files.
    """

    def __init__(
        self,
        store: ObjectStore,
        journal: UploadJournal,
        shards: ShardUploader,
        *,
        lock: threading.Lock,
        part_size_bytes: int,
    ) -> None:
        self._store = store
        self._journal = journal
        self._shards = shards
        self._lock = lock
        self._part_size_bytes = part_size_bytes

    def carry_out(self, flush: ActiveFlush, task: SendPack) -> None:
        """Carry out one task.

        Raises:
            Cancelled: the bytes are not needed any more.
            StagingError: a file cannot be read, or has changed.
            StoreError: the store failed.
        """
        stored: list[tuple[Shard, ShardRecord]] = []
        missing: list[Shard] = []
        for shard in task.shards:
            if shard.stored is not None or not flush.queue.wants(shard):
                continue
            record = self._confirmed(flush, shard) or self._referenced(flush, shard)
            if record is None:
                missing.append(shard)
            else:
                stored.append((shard, record))
        self._note(flush, stored)
        if missing:
            self._send(flush, task, missing)

    def _confirmed(self, flush: ActiveFlush, shard: Shard) -> ShardRecord | None:
        """The record of an earlier daemon, if the store has the bytes; otherwise forgets the record."""
        record = shard.record
        if isinstance(record, ShardRecord) and self._shards.is_in_store(flush, record.shard):
            return record
        with self._lock:
            shard.record, shard.is_confirmed = None, True
        return None

    def _referenced(self, flush: ActiveFlush, shard: Shard) -> ShardRecord | None:
        """The shard of the newest committed set under the same path, if it has the same bytes."""
        file = shard.file
        known = self._journal.known(file.path)
        if known is None or known.shard.size_bytes != file.size_bytes:
            return None
        with opened(self._shards.directory(flush), file) as fd:
            body = FileBody(
                fd,
                file.path,
                0,
                file.size_bytes,
                is_unwanted=lambda: not flush.queue.wants(shard),
            )
            is_same = body.read_all() == known.shard.part_digests
        if not is_same or not self._shards.is_in_store(flush, known.shard):
            return None
        return ShardRecord(file, known.shard, is_referenced=True)

    def _send(self, flush: ActiveFlush, task: SendPack, shards: Sequence[Shard]) -> None:
        body = PackBody(
            self._shards.directory(flush),
            [shard.file for shard in shards],
            is_unwanted=lambda index: not flush.queue.wants(shards[index]),
            moved=flush.count_sent,
        )
        try:
            self._store.put_shard(task.key, body)
        except Exists:
            with self._lock:
                if not flush.queue.restart_pack(shards):
                    raise
            raise Cancelled from None
        finally:
            body.close()
        pack = StoredObject(task.key, body.size_bytes)
        part_size_bytes = part_size_for(
            0, wanted_bytes=self._part_size_bytes, least_bytes=self._store.part_size_bytes_min
        )
        records = []
        for shard, packed in zip(shards, body.packed, strict=True):
            file = shard.file
            stored = StoredShard(
                path=file.path,
                size_bytes=file.size_bytes,
                part_size_bytes=part_size_bytes,
                crc32c=packed.crc32c,
                part_digests=packed.digest,
                extents=(Extent(pack, packed.offset_bytes, file.size_bytes),),
            )
            records.append((shard, ShardRecord(file, stored)))
        self._note(flush, records)

    def _note(self, flush: ActiveFlush, stored: Sequence[tuple[Shard, ShardRecord]]) -> None:
        if stored:
            self._journal.shards_stored(flush.queue.name, [record for _, record in stored])
            with self._lock:
                for shard, record in stored:
                    flush.queue.stored(shard, record)
