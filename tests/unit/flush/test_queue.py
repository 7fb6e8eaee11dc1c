# SPDX-License-Identifier: Apache-2.0
"""The layout of chunks, and the upload queue: the order of the tasks, and what follows from each outcome."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import (
    CHUNK_BYTES_MAX,
    CheckpointId,
    CheckpointKind,
    Extent,
    Staged,
    StagedFile,
)
from swansongd.flush import cutting as layouts
from swansongd.flush.cutting import (
    FILE_CHUNKS_MAX,
    PACKED_FILES_MAX,
    SMALL_BYTES_MAX,
    ChunkLayout,
    size_of,
)
from swansongd.flush.known import KnownChunks
from swansongd.flush.queue import (
    LATE_S_MIN,
    LATE_SHARE,
    ChunkTimes,
    FinishSet,
    StoreChunk,
    UploadQueue,
)

from testkit.committed import chunk_of

MIB = 2**20
LAYOUT = ChunkLayout(100, 3, 25)


def file_of(path: str, size_bytes: int, *, inode: int = 1) -> StagedFile:
    return StagedFile(path=path, size_bytes=size_bytes, mtime_ns=1, inode=inode)


def staged(sizes: dict[str, int], *changed: str) -> Staged:
    """A set of files with these sizes; the changed ones have other inodes."""
    files = tuple(
        file_of(path, size, inode=2 if path in changed else 1) for path, size in sizes.items()
    )
    return Staged(
        id=CheckpointId(5, "abc"), directory="s", kind=CheckpointKind.PERIODIC, files=files
    )


# ---------------------------------------------------------------------- layout


@pytest.mark.fault("O18")
@given(
    size_bytes=st.integers(0, 2**40) | st.integers(0, 2**22),
    chunk_bytes=st.sampled_from([MIB, 16 * MIB, CHUNK_BYTES_MAX]),
)
def test_the_pieces_of_a_file_cover_it_once(size_bytes: int, chunk_bytes: int) -> None:
    """Pieces of one size, except the last; at most 4,096 of them, or of the largest size of the format."""
    pieces = ChunkLayout(chunk_bytes, 3).cut(file_of("a", size_bytes))
    assert size_of(pieces) == size_bytes
    assert [p.offset_bytes for p in pieces[1:]] == [
        p.offset_bytes + p.size_bytes for p in pieces[:-1]
    ]
    assert len({p.size_bytes for p in pieces[:-1]}) <= 1
    assert all(0 < p.size_bytes <= CHUNK_BYTES_MAX for p in pieces)
    assert len(pieces) <= FILE_CHUNKS_MAX or pieces[0].size_bytes == CHUNK_BYTES_MAX


def test_larger_files_have_larger_chunks() -> None:
    """So a file that grows a little has the same chunks, and the manifest of 1 TB stays small."""
    sizes = [1, 64 * 2**30, 64 * 2**30 + 1, 2**40, 2**44]
    wanted = [layouts.chunk_bytes_for(size, 16 * MIB) // MIB for size in sizes]
    assert wanted == [16, 16, 32, 256, 256]
    requests = [len(ChunkLayout(16 * MIB, 32).cut(file_of("a", 10**n))) for n in (9, 10, 11, 12)]
    assert requests == [60, 597, 2981, 3726]


@given(
    sizes=st.lists(st.integers(1, 2**22), max_size=200),
    chunk_bytes=st.sampled_from([1, 1000, 5 * MIB, 16 * MIB]),
    connections=st.integers(1, 64),
    is_sealed=st.booleans(),
)
@example(sizes=[1] * (2 * PACKED_FILES_MAX + 1), chunk_bytes=2**24, connections=1, is_sealed=True)
def test_groups_keep_the_order_and_give_all_connections_work(
    sizes: list[int], chunk_bytes: int, connections: int, *, is_sealed: bool
) -> None:
    """Neighbours stay neighbours.  A sealed set leaves nothing over, a growing one less than a quarter."""
    layout = ChunkLayout(chunk_bytes, connections)
    pieces = [layouts.Piece(file_of(str(n), size), 0, size) for n, size in enumerate(sizes)]
    groups = layout.packed(pieces, is_sealed=is_sealed)
    grouped = [piece for group in groups for piece in group]
    assert grouped == pieces[: len(grouped)]
    left_bytes = sum(sizes[len(grouped) :])
    assert not left_bytes if is_sealed else left_bytes < max(1, chunk_bytes // 4)
    largest_bytes = max(sizes, default=0)
    for group in groups:
        assert 0 < len(group) <= PACKED_FILES_MAX
        assert size_of(group) < chunk_bytes + largest_bytes
        share_bytes = max(chunk_bytes // 8, -(-sum(sizes) // connections))
        assert not is_sealed or size_of(group) <= share_bytes + largest_bytes


def test_only_files_of_some_mib_share_a_chunk() -> None:
    """The limit is a quarter of a chunk, and at most 4 MiB.  An empty file has no chunk."""
    usual = ChunkLayout(16 * MIB, 32)
    sizes = (0, 1, SMALL_BYTES_MAX, SMALL_BYTES_MAX + 1)
    assert [usual.is_small(file_of("a", n)) for n in sizes] == [True, True, True, False]
    assert not ChunkLayout(2**28, 32).is_small(file_of("a", SMALL_BYTES_MAX + 1))
    assert not ChunkLayout(8 * MIB, 32).is_small(file_of("a", 2 * MIB + 1))
    assert not usual.cut(file_of("a", 0))


# ---------------------------------------------------------------------- queue


@pytest.fixture
def known(tmp_path: Path) -> KnownChunks:
    return KnownChunks(tmp_path, run="r", store_url="u", is_data=RunKeys("r").is_data)


class Queue(UploadQueue):
    """A queue whose chunks a test stores without a store."""

    def __init__(self, known: KnownChunks) -> None:
        self.times = ChunkTimes()
        super().__init__(1, LAYOUT, self.times)
        self._known = known
        self.now = 0.0

    def reopen(self, set_: Staged, *, is_sealed: bool = True) -> None:
        self.open(set_, is_sealed=is_sealed, known=self._known)

    def take(self) -> StoreChunk:
        task = self.next_task(self.now)
        assert isinstance(task, StoreChunk), task
        return task

    def store(self, task: StoreChunk) -> None:
        self.times.add(self.now - task.begun_mono_s, size_of(task.pieces))
        self.note(task)
        self.finish(task)

    def note(self, task: StoreChunk) -> None:
        data = repr(task.pieces).encode()
        chunk = self._known.created(chunk_of(data, size_bytes=size_of(task.pieces)), {})
        offset, extents = 0, {}
        for piece in task.pieces:
            extents[piece] = Extent(chunk, offset, piece.size_bytes)
            offset += piece.size_bytes
        self.stored(extents)


@pytest.fixture
def queue(known: KnownChunks) -> Queue:
    return Queue(known)


def paths(task: StoreChunk) -> list[str]:
    return [piece.file.path for piece in task.pieces]


def test_large_chunks_come_first_shared_ones_last_and_finish_once(queue: Queue) -> None:
    """Small requests end at the same time.  An empty file needs no chunk."""
    queue.reopen(staged({"a": 10, "b": 250, "c": 20, "d": 90, "e": 0}))
    tasks = [queue.take() for _ in range(6)]
    assert [paths(task) for task in tasks] == [["b"], ["b"], ["b"], ["d"], ["a"], ["c"]]
    assert queue.next_task(queue.now) is None, "chunks are in flight"
    for task in tasks:
        queue.store(task)
    assert queue.bytes_stored == 370
    assert queue.next_task(queue.now) == FinishSet()
    assert queue.next_task(queue.now) is None
    assert [(s.path, s.size_bytes, len(s.extents)) for s in queue.shards()] == [
        ("a", 10, 1), ("b", 250, 3), ("c", 20, 1), ("d", 90, 1), ("e", 0, 0),
    ]  # fmt: skip


def test_a_chunk_to_retry_is_the_next_task_and_a_deferred_one_waits_for_the_next_flush(
    queue: Queue,
) -> None:
    set_ = staged({"a": 250})
    queue.reopen(set_)
    first, second = queue.take(), queue.take()
    queue.finish(first)
    assert queue.take() == first
    queue.finish(second, is_deferred=True)
    third = queue.take()
    assert queue.next_task(queue.now) is None
    queue.reopen(set_)
    assert queue.take() == second, "the first and the third chunk are still in flight"
    assert queue.in_flight == 3
    for task in (first, second, third):
        queue.store(task)
    assert queue.next_task(queue.now) == FinishSet()


@given(
    actions=st.lists(
        st.sampled_from(
            ["take", "store", "note", "give back", "close", "reopen", "distrust", "wait"]
        ),
        max_size=40,
    ),
    number=st.integers(0, 10),
)
@example(actions=["take", "close", "reopen", "give back"], number=0)
@example(actions=["take", "note", "distrust", "reopen", "give back"], number=0)
def test_no_chunk_is_left_out_whatever_happened_while_it_was_in_flight(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str], number: int
) -> None:
    """A flush that waits for a chunk which no worker has, and which is not queued, never ends."""
    known = KnownChunks(
        tmp_path_factory.mktemp("known"), run="r", store_url="u", is_data=RunKeys("r").is_data
    )
    queue, set_ = Queue(known), staged({"a": 250, "b": 10, "c": 20})
    queue.reopen(set_)
    in_flight: list[StoreChunk] = []
    for action in actions:
        match action:
            case "take" if queue.has_task(queue.now) and isinstance(
                task := queue.next_task(queue.now), StoreChunk
            ):
                in_flight.append(task)
            case "store" if in_flight:
                queue.store(in_flight.pop(number % len(in_flight)))
            case "note" if in_flight:
                queue.note(in_flight[0])
            case "give back" if in_flight:
                queue.finish(in_flight.pop(number % len(in_flight)))
            case "close":
                queue.close()
            case "reopen":
                queue.reopen(set_)
            case "distrust":
                known.distrust()
            case "wait":
                queue.now += LATE_S_MIN + 0.1
    queue.reopen(set_)
    for task in in_flight:
        queue.finish(task)
    while isinstance(task := queue.next_task(queue.now), StoreChunk):
        queue.store(task)
    assert task == FinishSet()
    assert [shard.size_bytes for shard in queue.shards()] == [250, 10, 20]


def test_a_chunk_that_is_stored_while_the_set_is_reopened_counts_once(queue: Queue) -> None:
    """Also if the worker hands it back after that; the count stays below the size."""
    set_ = staged({"a": 250})
    queue.reopen(set_)
    tasks = [queue.take() for _ in range(3)]
    queue.store(tasks[0])
    queue.close()
    queue.reopen(set_)
    assert queue.bytes_stored == 100
    queue.stored(dict.fromkeys(tasks[0].pieces, Extent.whole(chunk_of(b"again"))))
    assert queue.bytes_stored == 100
    for task in tasks[1:]:
        queue.store(task)
    assert queue.bytes_stored == 250


def test_a_closed_queue_hands_out_nothing_and_wants_nothing(queue: Queue) -> None:
    queue.reopen(staged({"a": 100, "b": 100}))
    (piece,) = queue.take().pieces
    assert queue.wants(piece)
    queue.close()
    assert queue.next_task(queue.now) is None
    assert not queue.wants(piece)


def test_a_late_chunk_is_handed_out_once_more_when_no_other_one_waits(queue: Queue) -> None:
    """The first attempt that succeeds counts; the other one then wants nothing, and is not queued again."""
    queue.reopen(staged({"a": 300}))
    late, usual, last = queue.take(), queue.take(), queue.take()
    queue.now = 1.0
    queue.store(usual)
    queue.now = LATE_SHARE * 1.0
    assert queue.next_task(queue.now) is None, "not late yet"
    queue.store(last)
    queue.now = LATE_SHARE * 2.0 + 0.1
    again = queue.take()
    assert again.pieces == late.pieces
    assert queue.next_task(queue.now) is None, "there are two attempts at most"
    queue.store(again)
    assert not queue.wants(late.pieces[0])
    assert queue.next_task(queue.now) == FinishSet()
    queue.finish(late)
    assert queue.in_flight == 0
    assert queue.next_task(queue.now) is None


def test_a_large_chunk_may_take_longer_than_small_ones(queue: Queue) -> None:
    """Otherwise a slow link would get the bytes of each large chunk twice."""
    queue.times.add(1.0, 20)
    queue.reopen(staged({"a": 100}))
    large = queue.take()
    queue.now = LATE_SHARE * 1.0 * 5
    assert queue.next_task(queue.now) is None
    queue.now += 0.1
    assert queue.take().pieces == large.pieces


def test_while_chunks_wait_or_the_set_grows_none_is_sent_twice(queue: Queue) -> None:
    """A worker with other bytes to send saves more time, and a set that grows waits for its trainer."""
    queue.reopen(staged({"a": 300}))
    late = queue.take()
    queue.store(queue.take())
    queue.now = 10.0
    assert queue.take().pieces != late.pieces
    queue.reopen(staged({"a": 300}), is_sealed=False)
    assert queue.next_task(queue.now) is None


def test_a_failed_attempt_leaves_the_chunk_to_the_other_one(queue: Queue) -> None:
    """It is queued again once both have failed."""
    queue.reopen(staged({"a": 200}))
    late = queue.take()
    queue.store(queue.take())
    queue.now = 10.0
    again = queue.take()
    queue.finish(late)
    assert queue.next_task(queue.now) is None
    queue.finish(again)
    assert queue.take().pieces == late.pieces


def test_a_changed_file_loses_its_progress_alone(queue: Queue) -> None:
    """Bytes of the old file that arrive late are not counted, and are not queued again."""
    queue.reopen(staged({"a": 200, "b": 100}), is_sealed=False)
    tasks = [queue.take() for _ in range(3)]
    queue.store(tasks[2])
    queue.store(tasks[0])
    queue.reopen(staged({"a": 200, "b": 100}, "a"))
    assert queue.bytes_stored == 100
    queue.finish(tasks[1])
    assert [queue.take().pieces[0].file.inode for _ in range(2)] == [2, 2]
    assert queue.next_task(queue.now) is None


def test_an_unsealed_set_holds_small_files_and_finish_back(queue: Queue) -> None:
    """Small files wait for a quarter of a chunk; the files of the sealed set have the same progress."""
    queue.reopen(staged({"a": 10, "b": 10, "c": 100}), is_sealed=False)
    queue.store(queue.take())
    assert not queue.has_task(queue.now)
    queue.reopen(staged({"a": 10, "b": 10, "c": 100, "d": 10}), is_sealed=False)
    shared = queue.take()
    assert paths(shared) == ["a", "b", "d"]
    queue.store(shared)
    assert not queue.has_task(queue.now)
    queue.reopen(staged({"a": 10, "b": 10, "c": 100, "d": 10, "e": 1}))
    queue.store(queue.take())
    assert queue.next_task(queue.now) == FinishSet()


def test_bytes_in_a_chunk_that_no_manifest_may_name_are_queued_again(
    queue: Queue, known: KnownChunks
) -> None:
    set_ = staged({"a": 200})
    queue.reopen(set_)
    tasks = [queue.take(), queue.take()]
    for task in tasks:
        queue.store(task)
    known.is_gone(queue.shards()[0].extents[1].chunk)
    queue.reopen(set_)
    assert queue.bytes_stored == 100
    assert queue.take() == tasks[1]
    assert queue.next_task(queue.now) is None
