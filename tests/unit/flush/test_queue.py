# SPDX-License-Identifier: Apache-2.0
"""The upload queue: the order of the tasks, and the tasks that follow from each outcome."""

from __future__ import annotations

from itertools import count

from swansongd.flush.queue import RESTARTS_MAX, UploadQueue
from swansongd.flush.records import PartRecord, ShardRecord, UploadRecord
from swansongd.flush.tasks import Advance, Finish, SendPart, Shard, TaskOutcome
from swansongd.model import CheckpointId, CheckpointKind, Staged, StagedFile
from swansongd.stores.base import PartReceipt, Upload

from testkit.committed import named_shard

PART = 100


MARKER = ".metadata"


def staged(sizes: dict[str, int]) -> Staged:
    """A set with files of these sizes, and perhaps a marker."""
    return Staged(
        id=CheckpointId(5, "abc"),
        directory="step-5.abc",
        kind=CheckpointKind.PERIODIC,
        files=tuple(
            StagedFile(path=path, size_bytes=size_bytes, mtime_ns=1, inode=1)
            for path, size_bytes in sizes.items()
        ),
        markers=frozenset({MARKER}),
    )


def opened(set_: Staged, *, is_sealed: bool = True) -> UploadQueue:
    nonces = count(1)
    queue = UploadQueue(
        str(set_.id), lambda path, nonce: f"{nonce}/{path}", lambda: f"n{next(nonces)}"
    )
    queue.open(set_, {}, is_sealed=is_sealed)
    return queue


def advance(queue: UploadQueue) -> Shard:
    task = queue.next_task()
    assert isinstance(task, Advance), task
    return task.shard


def part_task(queue: UploadQueue) -> SendPart:
    task = queue.next_task()
    assert isinstance(task, SendPart), task
    return task


def store(queue: UploadQueue, shard: Shard) -> None:
    """Carry out an Advance that stores all of the shard."""
    file = shard.file
    stored = named_shard(file.path, file.size_bytes, shard.key, part_size_bytes=PART)
    queue.stored(shard, ShardRecord(file, stored, sent_key=shard.key))
    queue.finish(Advance(shard), TaskOutcome.DONE)


def begin_upload(queue: UploadQueue, shard: Shard) -> UploadRecord:
    """Carry out an Advance that begins a multipart upload."""
    record = UploadRecord(shard.file, Upload(shard.key, "id", shard.file.size_bytes, PART))
    shard.record = record
    queue.finish(Advance(shard), TaskOutcome.DONE)
    return record


def store_part(queue: UploadQueue, record: UploadRecord, task: SendPart) -> None:
    record.parts[task.number] = PartRecord(PartReceipt(task.number, "etag", 0), b"")
    queue.finish(task, TaskOutcome.DONE)


def test_tasks_come_in_order_data_before_markers_and_finish_last() -> None:
    queue = opened(staged({"small": 1, "large": 50, MARKER: 99}))
    large, small = advance(queue), advance(queue)
    assert (large.file.path, small.file.path) == ("large", "small")
    assert queue.next_task() is None, "the marker waits for the data"
    store(queue, large)
    store(queue, small)
    marker = advance(queue)
    assert marker.file.path == MARKER
    assert queue.next_task() is None
    store(queue, marker)
    assert queue.next_task() == Finish()
    assert queue.next_task() is None, "the set is finished once"
    assert queue.bytes_stored == 150


def test_a_large_file_becomes_parts_and_is_completed_by_another_advance() -> None:
    queue = opened(staged({"large": 250}))
    shard = advance(queue)
    record = begin_upload(queue, shard)
    parts = [part_task(queue) for _ in range(3)]
    assert parts == [SendPart(shard, number) for number in (1, 2, 3)]
    assert queue.next_task() is None
    for done, part in enumerate(parts, 1):
        store_part(queue, record, part)
        assert queue.bytes_stored == min(250, done * PART)
    assert advance(queue) is shard


def test_a_part_to_retry_is_the_next_task_and_a_deferred_one_waits_for_the_next_flush() -> None:
    set_ = staged({"large": 250})
    queue = opened(set_)
    begin_upload(queue, advance(queue))
    first, second = part_task(queue), part_task(queue)
    queue.finish(first, TaskOutcome.RETRY)
    assert queue.next_task() == first
    queue.finish(second, TaskOutcome.DEFERRED)
    third = queue.next_task()
    assert third == SendPart(first.shard, 3)
    assert queue.next_task() is None
    queue.close()
    queue.open(set_, {}, is_sealed=True)
    queue.finish(Advance(advance(queue)), TaskOutcome.DONE)
    assert queue.next_task() == second, "the first and the third part are still in flight"


def test_a_part_that_is_stored_while_the_set_is_reopened_counts_once() -> None:
    """The journal has the receipt before the worker hands the task back.  The count stays below the size."""
    set_ = staged({"large": 250})
    queue = opened(set_)
    record = begin_upload(queue, advance(queue))
    parts = [part_task(queue) for _ in range(3)]
    record.parts[1] = PartRecord(PartReceipt(1, "etag", 0), b"")
    queue.close()
    queue.open(set_, {}, is_sealed=True)
    assert queue.bytes_stored == 0
    for part in parts:
        store_part(queue, record, part)
    assert queue.bytes_stored == 250


def test_a_closed_queue_hands_out_nothing_and_wants_nothing() -> None:
    set_ = staged({"a": 1, "b": 2})
    queue = opened(set_)
    shard = advance(queue)
    assert queue.wants(shard)
    queue.close()
    assert queue.next_task() is None
    assert not queue.wants(shard)


def test_an_unsealed_set_holds_markers_and_finish_back() -> None:
    queue = opened(staged({"a": 1, MARKER: 1}), is_sealed=False)
    store(queue, advance(queue))
    assert not queue.has_task()
    queue.open(staged({"a": 1, MARKER: 1}), {}, is_sealed=True)
    store(queue, advance(queue))
    assert queue.next_task() == Finish()


def test_a_restarted_upload_gets_a_new_key_a_limited_number_of_times() -> None:
    queue = opened(staged({"large": 250}))
    keys = set()
    for _ in range(RESTARTS_MAX):
        shard = advance(queue)
        keys.add(shard.key)
        record = begin_upload(queue, shard)
        first, *others = [part_task(queue) for _ in range(3)]
        store_part(queue, record, first)
        assert queue.bytes_stored == PART
        assert queue.restart_upload(shard)
        assert queue.bytes_stored == 0
        for part in others:
            queue.finish(part, TaskOutcome.RETRY)
    last = advance(queue)
    assert len(keys | {last.key}) == RESTARTS_MAX + 1
    assert not queue.restart_upload(last)
