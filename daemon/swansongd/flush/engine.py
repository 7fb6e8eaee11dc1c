# SPDX-License-Identifier: Apache-2.0
"""The flush engine stores the bytes of one set as chunks, in many threads.

It sends one set at a time; :mod:`swansongd.core` decides which.  Each worker takes a chunk from the upload
queue of the set (:mod:`swansongd.flush.queue`), and :mod:`swansongd.flush.sender` stores it: it reads the
bytes once into memory, computes the digest that names the chunk, and creates the object unless a known chunk
has these bytes (:mod:`swansongd.flush.known`).  So no byte is sent twice: not after another set, not under
the sealed name, not after a restart of the daemon, and not if the newest commit has it.

Before each window the worker checks that the bytes are still needed.  So a cancelled flush ends without
waiting for a request that hangs.

Progress takes one path: the workers count the bytes of each window in the queue of the set, and one thread
posts the counters at short intervals.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from swansong_bucket.errors import StagingError, SwansongError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CheckpointId, Chunk, Staged
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.util.concurrency import ConcurrencyLimit
from swansong_bucket.util.threads import lasting_thread

from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.flush.active import ActiveFlush
from swansongd.flush.cutting import ChunkLayout, size_of
from swansongd.flush.known import KnownChunks
from swansongd.flush.queue import (
    ChunkTimes,
    FindWork,
    FinishSet,
    StoreChunk,
    Task,
    UploadQueue,
)
from swansongd.flush.reading import Cancelled
from swansongd.flush.sender import ChunkSender, chunk_nonce
from swansongd.staging import scan

SETS_MAX = 4
"""Sets whose progress is remembered."""
BUFFERS_BYTES_MAX = 512 * 2**20
"""Limits the chunks in flight, which are in memory; two may always be."""
BUFFERS_KEPT_S = 30.0
"""Unused buffers are given back this long after a flush."""
_PROGRESS_INTERVAL_S = 0.05

_log = structlog.get_logger(__name__)


class FlushEngine:
    """Sends one set at a time.

    Args:
        store: retries failed requests until the deadline.
        keys: of the run.
        run_directory: staging directory of the run, as a path or an open descriptor.
        post: receives FlushProgress, Flushed and FlushFailed.
        known: chunks of this run and store.
        layout: decides which bytes share a chunk, and how many chunks are in flight at most.
        created: takes each chunk that was created, and its bytes.
        nonce: returns a new nonce for the key of a chunk.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        run_directory: int | Path,
        post: Callable[[Event], None],
        *,
        known: KnownChunks,
        layout: ChunkLayout,
        created: Callable[[Chunk, memoryview], None] = lambda _chunk, _data: None,
        nonce: Callable[[], str] = chunk_nonce,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_directory = run_directory
        self._post = post
        self._known = known
        self._layout = layout
        self._monotonic = monotonic
        self._cpus = len(os.sched_getaffinity(0))
        self._limit = ConcurrencyLimit(layout.connections)
        self._times = ChunkTimes()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_begun = threading.Condition(self._lock)
        self._sender = ChunkSender(
            store,
            keys,
            run_directory,
            known,
            lock=self._lock,
            times=self._times,
            is_small=layout.is_small,
            created=created,
            nonce=nonce,
            monotonic=monotonic,
        )
        self._idle = 0
        """Workers that wait for a task."""
        self._in_flight_bytes = 0
        """Size of all chunks in memory, those of earlier flushes included."""
        self._queues: dict[CheckpointId, UploadQueue] = {}
        self._active: ActiveFlush | None = None
        self._ordered: ActiveFlush | None = None
        """The flush that the next free worker begins: start() must not wait."""
        self._is_beginning = False
        self._reported: FlushProgress | None = None
        lasting_thread("flush-progress", self._report).start()
        for number in range(layout.connections):
            self._start_worker(number)

    def start(
        self, flush_id: str, staged: Staged, generation: int, *, is_sealed: bool = True
    ) -> None:
        """Send this set, and interrupt the set that is being sent.

        If the set is not sealed, its files so far are sent.  Such a flush posts FlushProgress, or
        FlushFailed when the store fails, and never Flushed.
        """
        with self._lock:
            queue = self._queues.get(staged.id) or self._new_queue(staged, generation)
            if self._active is not None and self._active.queue is not queue:
                self._deactivate()
            traffic = queue.traffic
            self._ordered = ActiveFlush(
                flush_id, staged, is_sealed, queue, traffic.sent_bytes, traffic.compared_bytes
            )
            if self._active is None:  # a growing set is ordered again and again
                self._limit.begin()
            self._has_work.notify()

    def cancel(self, flush_id: str) -> None:
        """Send no further byte of this flush, and post no outcome of it."""
        with self._lock:
            if self._ordered is not None and self._ordered.flush_id == flush_id:
                self._ordered = None
                self._deactivate()  # an earlier flush of the same set
            elif self._active is not None and self._active.flush_id == flush_id:
                self._deactivate()

    def _new_queue(self, staged: Staged, generation: int) -> UploadQueue:
        active = self._active.queue if self._active is not None else None
        others = [checkpoint for checkpoint, queue in self._queues.items() if queue is not active]
        for checkpoint in others[: len(self._queues) - SETS_MAX + 1]:
            del self._queues[checkpoint]
        made = self._queues[staged.id] = UploadQueue(generation, self._layout, self._times)
        return made

    def _deactivate(self) -> None:
        flush, self._active = self._active, None
        if flush is not None:
            flush.queue.close()
            self._close_if_over(flush)

    def _close_if_over(self, flush: ActiveFlush) -> None:
        if self._active is not flush and not flush.workers:
            flush.close_directory()

    # ------------------------------------------------------------------ workers

    def _start_worker(self, number: int) -> None:
        try:
            lasting_thread(f"flush-{number}", self._work).start()
        except RuntimeError as error:  # the VM allows no more threads; one worker is enough
            if not number:
                raise
            _log.warning("flush_worker_not_started", number=number, error=str(error))

    def _work(self) -> None:
        while True:
            flush, task = self._take()
            is_readable = self._carry_out(flush, task)
            self._leave(flush, task, is_readable=is_readable)

    def _take(self) -> tuple[ActiveFlush, Task]:
        """Wait for a task."""
        with self._lock:
            while True:
                if (found := self._next_task()) is not None:
                    found[0].workers += 1
                    self._in_flight_bytes += _chunk_bytes(found[1])
                    self._wake_one()
                    return found
                self._idle += 1
                self._has_work.wait()
                self._idle -= 1

    def _next_task(self) -> tuple[ActiveFlush, Task] | None:
        if self._ordered is not None and not self._is_beginning:
            self._is_beginning = True
            return self._ordered, FindWork()
        active, now_mono_s = self._active, self._monotonic()
        if active is None or not self._admits_worker(active, now_mono_s):
            return None
        task = active.queue.next_task(now_mono_s)
        return None if task is None else (active, task)

    def _admits_worker(self, active: ActiveFlush, now_mono_s: float) -> bool:
        in_flight_bytes = self._in_flight_bytes + active.queue.next_bytes(now_mono_s)
        has_memory = in_flight_bytes <= BUFFERS_BYTES_MAX or active.queue.in_flight < 2
        return active.workers < self._limit.now and has_memory

    def _wake_one(self) -> None:
        """Wake one worker if it may take a task.  That worker wakes the next one."""
        active, now_mono_s = self._active, self._monotonic()
        if not self._idle or active is None or not active.queue.has_task(now_mono_s):
            return
        if self._admits_worker(active, now_mono_s):
            self._has_work.notify()

    def _carry_out(self, flush: ActiveFlush, task: Task) -> bool:
        """Returns False if a file cannot be read now."""
        try:
            match task:
                case FindWork():
                    self._begin(flush)
                case FinishSet():
                    self._finish(flush)
                case StoreChunk():
                    self._sender.carry_out(flush, task)
        except Cancelled:
            pass
        except StagingError as error:
            self._fail(flush, error.line(), error.kind, void=True)
            return False
        except SwansongError as error:
            # Another attempt of the chunk may succeed, or has stored it.
            if not isinstance(task, StoreChunk) or flush.queue.rests_on(task):
                self._fail(flush, error.line(), error.kind, void=False)
        except Exception as error:  # a fault of the daemon must not end the worker
            _log.exception("flush_fault", flush_id=flush.flush_id)
            reason = f"{type(error).__name__}: {error}"
            self._fail(flush, reason, SwansongError.kind, void=False)
        return True

    def _leave(self, flush: ActiveFlush, task: Task, *, is_readable: bool) -> None:
        with self._lock:
            flush.workers -= 1
            self._in_flight_bytes -= _chunk_bytes(task)
            if isinstance(task, FindWork):
                self._is_beginning = False
                self._has_work.notify()
            elif isinstance(task, StoreChunk):
                # A newer flush of the set may be able to read the file.
                is_deferred = not is_readable and self._active is flush
                flush.queue.finish(task, is_deferred=is_deferred)
            self._close_if_over(flush)

    def _begin(self, flush: ActiveFlush) -> None:
        with self._lock:
            if self._ordered is not flush:
                return  # replaced or cancelled meanwhile
            self._ordered = None
            before, self._active = self._active, flush
            self._known.forget_old()
            flush.queue.open(flush.staged, is_sealed=flush.is_sealed, known=self._known)
            if before is not None:
                self._close_if_over(before)
            self._reported = progress = flush.progress()
            self._has_begun.notify()
        self._post(progress)

    def _finish(self, flush: ActiveFlush) -> None:
        if not scan.same_listing(self._run_directory, flush.staged):
            raise StagingError(
                f"{flush.staged.directory} changed while it was read",
                hint="If the trainer was still writing, raise trainer.settle_s",
            )
        with self._lock:
            if self._active is not flush:
                return
            if not self._known.holds(flush.queue.chunks):  # a commit came in between
                flush.queue.open(flush.staged, is_sealed=flush.is_sealed, known=self._known)
                return
            shards, sent_bytes = flush.queue.shards(), flush.progress().bytes_sent
            self._deactivate()
        extents = (extent for shard in shards for extent in shard.extents)
        referenced = (each.size_bytes for each in extents if self._known.names(each.chunk))
        self._post(Flushed(flush.flush_id, shards, sum(referenced), sent_bytes))

    def _fail(self, flush: ActiveFlush, reason: str, kind: str, *, void: bool) -> None:
        with self._lock:
            # A set that is not sealed may still change; the sealed set is checked again.
            if self._active is not flush or (void and not flush.is_sealed):
                return
            self._deactivate()
        self._post(FlushFailed(flush.flush_id, reason, void, kind))

    # ------------------------------------------------------------------ progress

    def _report(self) -> None:
        """Post the progress of the active flush at short intervals, and adapt its concurrency."""
        while True:
            with self._lock:
                while (flush := self._active) is None:
                    # Fresh memory is slow, and follow-ups of an evacuation come at short intervals.
                    if not self._has_begun.wait(BUFFERS_KEPT_S) and self._active is None:
                        self._sender.buffers.release()
                progress = flush.progress()
                traffic = flush.queue.traffic
                moved_bytes = traffic.sent_bytes + traffic.compared_bytes
                self._limit.sample(self._monotonic(), moved_bytes, time.process_time(), self._cpus)
                self._wake_one()
                is_new, self._reported = progress != self._reported, progress
            if is_new:
                self._post(progress)
            with self._lock:
                self._has_begun.wait(_PROGRESS_INTERVAL_S)


def _chunk_bytes(task: Task) -> int:
    return size_of(task.pieces) if isinstance(task, StoreChunk) else 0
