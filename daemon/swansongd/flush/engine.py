# SPDX-License-Identifier: Apache-2.0
"""The flush: moves the shards of one set to the object store, part by part, in many threads.

One set at a time; whoever decides which is :mod:`swansongd.core`.  What is done for one shard is
:mod:`swansongd.flush.uploader`.  A part passes window by window through the digest and onto the wire, so
memory is bounded by workers times window whatever the files measure.  Before each window a worker looks
whether its bytes are still wanted: that is how a flush is cancelled, and nothing waits for a request that
hangs.

Nothing that is stored is sent again.  A set that comes back after another one, or under its sealed name,
goes on where it was (:mod:`swansongd.flush.queue`), and so does a daemon that was restarted
(:mod:`swansongd.flush.journal`), once the store has confirmed what the journal says.  A file whose bytes the
newest committed set has stored under the same path is referenced instead.

No key is written twice with different bytes: keys carry a nonce, which is new for each set in each life
of the daemon, and whenever a file of the set is not the same any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import structlog
from swansong.bounds import BoundsError

from swansongd.bucket.keys import RunKeys
from swansongd.core.events import Event, Flushed, FlushFailed, FlushProgress
from swansongd.errors import StagingError, SwansongError
from swansongd.flush.body import Cancelled
from swansongd.flush.journal import SETS_MAX, Journal
from swansongd.flush.queue import Order, Outcome, Task, UploadQueue
from swansongd.flush.uploader import ShardUploader
from swansongd.model import CheckpointId, Staged
from swansongd.staging import scan
from swansongd.stores.base import ObjectStore
from swansongd.util.concurrency import SAMPLE_S, ConcurrencyLimit

_PROGRESS_INTERVAL_S = 0.05

_log = structlog.get_logger(__name__)


class FlushEngine:
    """Sends one set at a time.

    Args:
        store: wrapped so that it retries, and gives up at the deadline.
        keys: of the run.
        run_directory: staging directory of the run, as a path or an open descriptor.
        post: takes FlushProgress, Flushed and FlushFailed.
        journal: of this run and store.
        nonce: a new short random word at each call.
        connections: how many parts travel at once, at the most.
        part_size_bytes: of each part, but for large files.
        is_urgent: whether an evacuation is open.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        run_directory: int | Path,
        post: Callable[[Event], None],
        *,
        journal: Journal,
        nonce: Callable[[], str],
        connections: int,
        part_size_bytes: int,
        is_urgent: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._run_directory = run_directory
        self._post = post
        self._journal = journal
        self._nonce = nonce
        self._connections = connections
        self._cpus = len(os.sched_getaffinity(0))
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._sender = ShardUploader(
            store,
            run_directory,
            journal,
            lock=self._changed,
            report=self._report,
            part_size_bytes=part_size_bytes,
            is_urgent=is_urgent,
        )
        self._idle = 0
        self._is_watched = False
        self._sets: dict[CheckpointId, UploadQueue] = {}
        self._active: UploadQueue | None = None
        self._ordered: tuple[Order, UploadQueue] | None = None
        """What the next free worker begins: whoever gives the order must not wait for the journal."""
        self._is_beginning = False
        self._progress_mono_s = monotonic()
        for number in range(connections):
            self._start_worker(number)

    def start(
        self, flush_id: str, staged: Staged, generation: int, *, is_sealed: bool = True
    ) -> None:
        """Send this set, and leave whatever else was being sent where it is.

        Of a set that is not sealed the files so far are sent; FlushProgress is all that is heard of it,
        or FlushFailed when the store fails.
        """
        with self._changed:
            flush_set = self._sets.get(staged.id) or self._new_set(staged, generation)
            if self._active is not flush_set:
                self._halt()
            # A set that grows is ordered again and again: each time from two would cost it the wire.
            before = flush_set.order
            width = ConcurrencyLimit(self._connections) if before is None else before.width
            width.reset_counters()
            self._ordered = Order(flush_id, staged, is_sealed, width), flush_set
            self._changed.notify()

    def cancel(self, flush_id: str) -> None:
        """Send no further byte of this flush; says nothing more about it."""
        with self._changed:
            if self._ordered is not None and self._ordered[0].flush_id == flush_id:
                self._ordered = None
                self._halt()  # what was to go on as this one
            order = self._active.order if self._active is not None else None
            if order is not None and order.flush_id == flush_id:
                self._halt()

    def _new_set(self, staged: Staged, generation: int) -> UploadQueue:
        others = [
            checkpoint for checkpoint, other in self._sets.items() if other is not self._active
        ]
        for checkpoint in others[: len(self._sets) - SETS_MAX + 1]:
            del self._sets[checkpoint]
        key_of = partial(self._key_of, generation, staged)
        made = self._sets[staged.id] = UploadQueue(str(staged.id), key_of, self._nonce)
        return made

    def _key_of(self, generation: int, staged: Staged, path: str, upload_nonce: str) -> str:
        return self._keys.shard(generation, staged.id, upload_nonce, staged.node, path)

    def _halt(self) -> None:
        flush_set, self._active = self._active, None
        if flush_set is not None and flush_set.order is not None:
            order, flush_set.order = flush_set.order, None
            self._close_if_over(order, flush_set)

    # ------------------------------------------------------------------ in the workers

    def _start_worker(self, number: int) -> None:
        try:
            threading.Thread(target=self._work, name=f"flush-{number}", daemon=True).start()
        except RuntimeError as error:  # as many as this VM allows, and at least one
            if not number:
                raise
            _log.warning("flush_worker_not_started", number=number, error=str(error))

    def _work(self) -> None:
        while True:
            order, flush_set, task = self._take()
            outcome: Outcome = "again"
            try:
                if task == "begin":
                    self._begin(order, flush_set)
                elif task == "end":
                    self._end(order, flush_set)
                else:
                    self._sender.carry_out(order, flush_set, *task)
                outcome = "done"
            except Cancelled:
                pass
            except StagingError as error:
                outcome = "aside"
                self._fail(order, flush_set, error.line(), void=True)
            except BoundsError as error:  # the set has a number that no key can hold
                self._fail(order, flush_set, str(error), void=True)
            except SwansongError as error:
                self._fail(order, flush_set, error.line(), void=False)
            except Exception as error:  # a fault of ours must not end the worker
                _log.exception("flush_fault", flush_id=order.flush_id)
                self._fail(order, flush_set, f"{type(error).__name__}: {error}", void=False)
            self._leave(order, flush_set, task, outcome)

    def _take(self) -> tuple[Order, UploadQueue, Task | Literal["begin"]]:
        with self._changed:
            while True:
                if self._ordered is not None and not self._is_beginning:
                    self._is_beginning = True
                    return *self._ordered, "begin"
                if (open_to := self._open_to_more()) is not None:
                    order, active = open_to
                    if (task := active.next_task()) is not None:
                        order.workers += 1
                        self._wake()
                        return order, active, task
                self._wait()

    def _wait(self) -> None:
        """Until something changed.  During a flush one of those who wait keeps watch: when nothing moves
        at all, nobody else looks whether more workers help."""
        keeps_watch = self._active is not None and not self._is_watched
        self._is_watched |= keeps_watch
        self._idle += 1
        self._changed.wait(SAMPLE_S if keeps_watch else None)
        self._idle -= 1
        if keeps_watch:
            self._is_watched = False
            if self._active is not None and self._active.order is not None:
                self._look(self._active.order)

    def _look(self, order: Order) -> int:
        """See whether more workers may take part; returns the bytes sent."""
        sent_bytes = sum(list(order.sent_bytes.values()))
        order.width.look(self._monotonic(), sent_bytes, time.process_time(), self._cpus)
        return sent_bytes

    def _wake(self) -> None:
        """One worker at a time, who wakes the next: there may be less to do than there are workers."""
        open_to = self._open_to_more()
        if self._idle and (not self._is_watched or (open_to and open_to[1].has_task())):
            self._changed.notify()

    def _open_to_more(self) -> tuple[Order, UploadQueue] | None:
        """What is being sent, if one more worker may take part."""
        active = self._active
        if active is None or active.order is None:
            return None
        order = active.order
        return (order, active) if order.workers < order.width.now else None

    def _leave(
        self,
        order: Order,
        flush_set: UploadQueue,
        task: Task | Literal["begin"],
        outcome: Outcome,
    ) -> None:
        with self._changed:
            if task == "begin":
                self._is_beginning = False
                self._changed.notify()
            elif task != "end":
                if outcome == "aside" and flush_set.order is not order:
                    outcome = "again"  # what the order before could not read, this one may
                flush_set.settle(*task, outcome)
            order.workers -= task != "begin"
            self._close_if_over(order, flush_set)
        self._report(flush_set, at_once=task == "begin")

    def _fail(self, order: Order, flush_set: UploadQueue, reason: str, *, void: bool) -> None:
        with self._changed:
            # A set that is not sealed may still change: its files are looked at again when it is.
            if flush_set.order is not order or (void and not order.is_sealed):
                return
            flush_set.order = None
            if self._active is flush_set:
                self._active = None
        self._post(FlushFailed(order.flush_id, reason, void))

    def _begin(self, order: Order, flush_set: UploadQueue) -> None:
        held = self._journal.held(flush_set.name)
        with self._changed:
            if self._ordered is None or self._ordered[0] is not order:
                return  # there is another by now, or none
            self._ordered = None
            self._active = flush_set
            before = flush_set.order
            flush_set.begin(order, held)
            if before is not None:
                self._close_if_over(before, flush_set)

    def _end(self, order: Order, flush_set: UploadQueue) -> None:
        if not scan.same_listing(self._run_directory, order.staged):
            raise StagingError(
                f"{order.staged.directory} changed while it was read",
                hint="If the trainer was still writing, raise trainer.settle_s",
            )
        with self._changed:
            if flush_set.order is not order:
                return
            stored = [shard.stored for _, shard in sorted(flush_set.shards.items())]
            self._halt()
        held = [item for item in stored if item is not None]
        referenced = [item.shard.size_bytes for item in held if item.is_referenced]
        self._post(Flushed(order.flush_id, tuple(item.shard for item in held), sum(referenced)))

    def _close_if_over(self, order: Order, flush_set: UploadQueue) -> None:
        if flush_set.order is not order and not order.workers and order.directory is not None:
            order.directory.close()
            order.directory = None

    def _report(self, flush_set: UploadQueue, *, at_once: bool = False) -> None:
        """Say how far the flush is, now and then."""
        now = self._monotonic()
        if not at_once and now - self._progress_mono_s < _PROGRESS_INTERVAL_S:
            return  # nearly always, and then without waiting for the lock
        with self._changed:
            order = flush_set.order
            is_due = at_once or now - self._progress_mono_s >= _PROGRESS_INTERVAL_S
            if order is None or not is_due:
                return
            self._progress_mono_s = now
            sent_bytes = self._look(order)
            self._wake()
            progress = FlushProgress(order.flush_id, flush_set.bytes_stored, sent_bytes)
        self._post(progress)
