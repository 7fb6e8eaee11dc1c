# SPDX-License-Identifier: Apache-2.0
"""The flush: moves the shards of one sealed set to the object store, part by part, in many threads.

One set at a time; whoever decides which is :mod:`swansongd.core`.  A part is read into the buffer of
its worker, hashed there and sent from there, so memory is bounded by workers times part size whatever
the files measure.  Between parts a worker looks whether its flush still stands: that is how a flush is
cancelled, and nothing waits for a request that hangs.  Uploads of a cancelled flush are left alone (an
abort would cost time when there is none); a lifecycle rule of the bucket removes them.

The keys of each flush carry a nonce of their own, so no key is ever written twice.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.digests import part_count, part_digest, shard_digest
from swansongd.errors import StagingError, SwansongError
from swansongd.keys import RunKeys
from swansongd.model import Staged, StagedFile, StoredShard
from swansongd.staging import scan
from swansongd.stores.base import ObjectStore, PartReceipt, Upload

PARTS_MAX = 10_000
"""Of one object, at S3 and GCS alike."""
_PROGRESS_INTERVAL_S = 0.05

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Shard:
    """One file on its way.  Guarded by the lock of its job, but for the beginning of the upload."""

    file: StagedFile
    key: str
    part_size_bytes: int
    begin_lock: threading.Lock = field(default_factory=threading.Lock)
    fd: int = -1
    upload: Upload | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    receipts: dict[int, PartReceipt] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        return part_count(self.file.size_bytes, self.part_size_bytes)

    def length_bytes(self, number: int) -> int:
        """Of part ``number``, counted from 1."""
        return min(self.part_size_bytes, self.file.size_bytes - (number - 1) * self.part_size_bytes)

    def close(self) -> None:
        """Only when no worker reads it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Job:
    """One flush: which parts are still to be sent, and what came of the others."""

    def __init__(self, flush_id: str, staged: Staged, shards: list[_Shard], now: float) -> None:
        self.flush_id = flush_id
        self.staged = staged
        self.lock = threading.Lock()
        self.is_over = False
        self.stored: list[StoredShard] = []
        self.bytes_stored = 0
        self.progress_mono_s = now
        self._shards = shards
        markers = [s for s in shards if s.file.path in staged.markers]
        data = [s for s in shards if s.file.path not in staged.markers]
        # The largest first: a big one that begins last would keep one worker busy alone.
        data.sort(key=lambda shard: shard.file.size_bytes, reverse=True)
        self._tasks = deque((shard, number + 1) for shard in data for number in range(shard.parts))
        self._markers = deque((s, number + 1) for s in markers for number in range(s.parts))
        self._data_left = len(data)

    def next_task(self) -> tuple[_Shard, int] | None:
        """A part to send; None when none may begin now.  Markers wait for all the data they cover."""
        with self.lock:
            if self.is_over:
                return None
            if self._tasks:
                return self._tasks.popleft()
            return self._markers.popleft() if self._markers and not self._data_left else None

    def shard_done(self, shard: _Shard, stored: StoredShard) -> bool:
        """Note it; True when it was the last one."""
        with self.lock:
            self.stored.append(stored)
            if shard.file.path not in self.staged.markers:
                self._data_left -= 1
            return len(self.stored) == len(self._shards)

    def end(self) -> bool:
        """No part begins any more; True for the one caller that ended it."""
        with self.lock:
            was_over, self.is_over = self.is_over, True
        return not was_over

    def close_files(self) -> None:
        """Only when no worker reads any more."""
        for shard in self._shards:
            shard.close()


class FlushEngine:
    """Sends one sealed set at a time.

    Args:
        store: wrapped so that it retries, and gives up at the deadline.
        keys: of the run.
        run_directory: staging directory of the run.
        post: takes FlushProgress, Flushed and FlushFailed.
        nonce: a new short random word at each call.
        connections: how many parts travel at once.
        part_size_bytes: of each part, but for files so large that they would have too many.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        run_directory: Path,
        post: Callable[[Event], None],
        *,
        nonce: Callable[[], str],
        connections: int,
        part_size_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._run_directory = run_directory
        self._post = post
        self._nonce = nonce
        self._part_size_bytes = max(part_size_bytes, store.part_size_bytes_min)
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._working: dict[_Job, int] = {}
        for number in range(connections):
            name = f"flush-{number}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, flush_id: str, staged: Staged, generation: int) -> None:
        """Send this set, and forget about whatever was being sent."""
        attempt = self._nonce()
        shards = [
            _Shard(
                file=file,
                key=self._keys.shard(generation, staged.id, attempt, staged.node, file.path),
                part_size_bytes=self._part_size_for(file.size_bytes),
            )
            for file in staged.files
        ]
        self._replace(_Job(flush_id, staged, shards, self._monotonic()))

    def cancel(self, flush_id: str) -> None:
        """Begin no further part of this flush; says nothing more about it."""
        with self._changed:
            stands = self._job is not None and self._job.flush_id == flush_id
        if stands:
            self._replace(None)

    def _replace(self, job: _Job | None) -> None:
        with self._changed:
            before, self._job = self._job, job
            if before is not None:
                before.end()
                self._close_if_idle(before)
            self._changed.notify_all()

    def _part_size_for(self, size_bytes: int) -> int:
        size = self._part_size_bytes
        while part_count(size_bytes, size) > PARTS_MAX:
            size *= 2
        return size

    # ------------------------------------------------------------------ in the workers

    def _work(self) -> None:
        buffer = bytearray()
        while True:
            job, shard, number = self._take()
            try:
                wanted = shard.length_bytes(number)
                if len(buffer) < wanted:
                    buffer = bytearray(max(wanted, min(shard.part_size_bytes, 2 * len(buffer))))
                self._send(job, shard, number, memoryview(buffer)[:wanted])
            except StagingError as error:
                self._fail(job, error.line(), void=True)
            except SwansongError as error:
                self._fail(job, error.line(), void=False)
            except Exception as error:  # a fault of ours must not end the worker
                _log.exception("flush_fault", flush_id=job.flush_id)
                self._fail(job, f"{type(error).__name__}: {error}", void=False)
            finally:
                self._release(job)

    def _take(self) -> tuple[_Job, _Shard, int]:
        with self._changed:
            while True:
                job = self._job
                task = job.next_task() if job is not None else None
                if job is not None and task is not None:
                    self._working[job] = self._working.get(job, 0) + 1
                    return job, *task
                self._changed.wait()

    def _release(self, job: _Job) -> None:
        with self._changed:
            self._working[job] -= 1
            if not self._working[job]:
                del self._working[job]
            if job.is_over:
                self._close_if_idle(job)
            self._changed.notify_all()  # the markers may be due

    def _close_if_idle(self, job: _Job) -> None:
        if job not in self._working:
            job.close_files()

    def _send(self, job: _Job, shard: _Shard, number: int, view: memoryview) -> None:
        with shard.begin_lock:
            if shard.fd < 0:
                shard.fd = scan.open_file(self._run_directory, job.staged.directory, shard.file)
            if shard.upload is None and shard.parts > 1:
                shard.upload = self._store.begin(
                    shard.key, shard.file.size_bytes, shard.part_size_bytes
                )
        _read(shard, (number - 1) * shard.part_size_bytes, view)
        digest = part_digest(view)
        receipt = None
        if shard.upload is None:
            self._store.put(shard.key, view)
        else:
            receipt = self._store.put_part(shard.upload, number, view)
        with job.lock:
            if job.is_over:
                return
            shard.digests[number] = digest
            if receipt is not None:
                shard.receipts[number] = receipt
            is_last = len(shard.digests) == shard.parts
            job.bytes_stored += len(view)
            now = self._monotonic()
            is_due = now - job.progress_mono_s >= _PROGRESS_INTERVAL_S
            if is_due:
                job.progress_mono_s = now
        if is_due:
            self._post(FlushProgress(job.flush_id, job.bytes_stored))
        if is_last:
            self._finish(job, shard)

    def _finish(self, job: _Job, shard: _Shard) -> None:
        numbers = range(1, shard.parts + 1)
        if shard.upload is not None:
            self._store.complete(shard.upload, [shard.receipts[number] for number in numbers])
        if not scan.unchanged(shard.fd, shard.file):
            raise StagingError(f"{shard.file.path} changed while it was read")
        shard.close()  # all its parts are sent; a set may have more files than we may have open
        stored = StoredShard(
            path=shard.file.path,
            size_bytes=shard.file.size_bytes,
            digest=shard_digest([shard.digests[number] for number in numbers]),
            key=shard.key,
            part_size_bytes=shard.part_size_bytes,
        )
        if not job.shard_done(shard, stored):
            return
        if not scan.same_listing(self._run_directory, job.staged):
            raise StagingError(
                f"{job.staged.directory} changed while it was read",
                hint="If the trainer was still writing, raise trainer.settle_s",
            )
        if job.end():
            shards = tuple(sorted(job.stored, key=lambda item: item.path))
            self._post(Flushed(job.flush_id, shards))

    def _fail(self, job: _Job, reason: str, *, void: bool) -> None:
        if job.end():
            self._post(FlushFailed(job.flush_id, reason, void))


def _read(shard: _Shard, offset: int, view: memoryview) -> None:
    """Fill ``view`` from the file.  A short read means that the file was cut: its set is void."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(shard.fd, [view[done:]], offset + done)
        except OSError as error:
            raise StagingError(f"{shard.file.path} cannot be read: {error.strerror}") from error
        if not count:
            raise StagingError(f"{shard.file.path} ends early: it was cut after it was sealed")
        done += count
