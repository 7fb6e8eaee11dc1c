# SPDX-License-Identifier: Apache-2.0
"""Carries out the tasks of packs: reference small files whose bytes are stored, and send the others together.

A pack is stored whole or not at all.  Each attempt has a key of its own, so no key gets different bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from swansongd.errors import Exists
from swansongd.flush.active import ActiveFlush
from swansongd.flush.body import Cancelled, FileBody, opened
from swansongd.flush.journal import UploadJournal
from swansongd.flush.known_parts import KnownParts, head_digest
from swansongd.flush.packs import PackBody
from swansongd.flush.records import ShardRecord
from swansongd.flush.tasks import SendPack, Shard
from swansongd.flush.uploader import ShardUploader
from swansongd.model import Extent, StagedFile, StoredObject, StoredShard
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
        self._part_size_bytes = max(part_size_bytes, store.part_size_bytes_min)

    def carry_out(self, flush: ActiveFlush, task: SendPack) -> None:
        """Carry out one task.

        Raises:
            Cancelled: the bytes are not needed any more.
            StagingError: a file cannot be read, or has changed.
            StoreError: the store failed.
        """
        known = self._journal.known_parts()
        stored: list[tuple[Shard, ShardRecord]] = []
        missing: list[Shard] = []
        for shard in task.shards:
            if shard.stored is not None or not flush.queue.wants(shard):
                continue
            record = self._confirmed(flush, shard) or self._referenced(flush, shard, known)
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
        if isinstance(record, ShardRecord):
            objects = {extent.object for extent in record.shard.extents}
            if flush.checks.are_recent(self._store, objects):
                return record
        with self._lock:
            shard.record, shard.is_confirmed = None, True
        return None

    def _referenced(
        self, flush: ActiveFlush, shard: Shard, known: KnownParts
    ) -> ShardRecord | None:
        """The record of a shard whose bytes the newest commit has."""
        file = shard.file
        is_candidate = known.has_heads or known.part_size_bytes(file.path) is not None
        if not known or not is_candidate:
            return None
        with opened(self._shards.directory(flush), file) as fd:
            head = head_digest(fd, 0, file.size_bytes)
            if not known.may_contain(head):
                return None
            body = FileBody(
                fd,
                file.path,
                0,
                file.size_bytes,
                is_unwanted=lambda: not flush.queue.wants(shard),
                moved=flush.count_compared,
            )
            crc32c = body.read_all()
        extents = known.find(body.digest, file.size_bytes)
        if not extents or not flush.checks.are_stored(self._store, {e.object for e in extents}):
            return None
        stored = self._shard(file, body.digest, crc32c, extents)
        return ShardRecord(file, stored, head)

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
        records = []
        for shard, packed in zip(shards, body.packed, strict=True):
            extent = Extent(pack, packed.offset_bytes, shard.file.size_bytes)
            stored = self._shard(shard.file, packed.digest, packed.crc32c, (extent,))
            records.append((shard, ShardRecord(shard.file, stored, packed.head, task.key)))
        self._note(flush, records)

    def _shard(
        self, file: StagedFile, digest: bytes, crc32c: int, extents: tuple[Extent, ...]
    ) -> StoredShard:
        return StoredShard(
            path=file.path,
            size_bytes=file.size_bytes,
            part_size_bytes=self._part_size_bytes,
            part_digests=digest,
            crc32c=crc32c,
            extents=extents,
        )

    def _note(self, flush: ActiveFlush, stored: Sequence[tuple[Shard, ShardRecord]]) -> None:
        if stored:
            self._journal.shards_stored(flush.queue.name, [record for _, record in stored])
            with self._lock:
                for shard, record in stored:
                    flush.queue.stored(shard, record)
