# SPDX-License-Identifier: Apache-2.0
"""Packs: small files share objects, and each keeps its digest, its reference and its place in the journal."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from swansongd.core.events import Flushed, FlushFailed
from swansongd.errors import Permanent, Transient
from swansongd.flush.packs import PACK_FILES_MAX, SMALL_BYTES_MAX, Packing
from swansongd.flush.queue import RESTARTS_MAX
from swansongd.model import CommitRef, StagedFile
from swansongd.stores.base import Body

from testkit.flush_rig import PART, SET, FlushRig, found_set, keys_of, staged_set
from testkit.memory_store import WINDOW_BYTES
from testkit.staged import write_files
from testkit.waiting import until

SMALL = PART // 4
"""Size of the largest file in a pack."""
EDGES = (0, 1, SMALL - 1, SMALL, SMALL + 1, PART, 3 * PART)
PACKING = Packing.for_parts(PART, 3)
STEPS = count(1)


@pytest.fixture
def flush(tmp_path: Path) -> Iterator[FlushRig]:
    made = FlushRig(tmp_path, packing=PACKING)
    yield made
    until(lambda: not made.open_files(), what="every staged file to be closed")
    assert not made.store.overwritten, "no key is written twice with different bytes"


@pytest.fixture(scope="module")
def long_flush(tmp_path_factory: pytest.TempPathFactory) -> FlushRig:
    """One engine for many examples: its threads end only with the process."""
    return FlushRig(tmp_path_factory.mktemp("long"), packing=PACKING)


def small_files(count: int, size_bytes: int = 100) -> dict[str, bytes]:
    return {f"d/{n:03d}": random.Random(n).randbytes(size_bytes) for n in range(count)}


def packs(keys: list[str]) -> set[str]:
    return {key for key in keys if "-packs/" in key}


@dataclass
class Item:
    file: StagedFile


def items(sizes: list[int]) -> list[Item]:
    return [
        Item(StagedFile(path=f"{n}", size_bytes=size, mtime_ns=1, inode=n))
        for n, size in enumerate(sizes)
    ]


@given(
    sizes=st.lists(st.integers(1, 2**22), max_size=200),
    part_bytes=st.sampled_from([1, 1000, 5 * 2**20, 16 * 2**20, 2**30]),
    connections=st.integers(1, 64),
    is_sealed=st.booleans(),
)
@example(sizes=[1] * (2 * PACK_FILES_MAX + 1), part_bytes=2**24, connections=1, is_sealed=True)
def test_groups_keep_the_order_and_give_all_connections_work(
    sizes: list[int], part_bytes: int, connections: int, *, is_sealed: bool
) -> None:
    """Neighbours stay neighbours.  A sealed set leaves nothing over, a growing one less than a quarter."""
    packing = Packing.for_parts(part_bytes, connections)
    all_items = items(sizes)
    groups = packing.groups(all_items, is_sealed=is_sealed)
    grouped = [item for group in groups for item in group]
    assert grouped == all_items[: len(grouped)]
    left_bytes = sum(sizes[len(grouped) :])
    assert not left_bytes if is_sealed else left_bytes < max(1, packing.pack_bytes // 4)
    total_bytes = sum(sizes)
    largest_bytes = max(sizes, default=0)
    for group in groups:
        size_bytes = sum(item.file.size_bytes for item in group)
        assert 0 < len(group) <= PACK_FILES_MAX
        assert size_bytes < packing.pack_bytes + largest_bytes
        if is_sealed:
            share_bytes = max(packing.pack_bytes // 8, total_bytes // connections)
            assert size_bytes <= share_bytes + largest_bytes


def test_only_files_of_some_mib_go_into_packs() -> None:
    """The limit is a quarter of a part, and at most 4 MiB.  An empty file needs no object."""
    usual = Packing.for_parts(16 * 2**20, 32)
    assert [usual.is_small(n) for n in (0, 1, SMALL_BYTES_MAX, SMALL_BYTES_MAX + 1)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not Packing.for_parts(2**30, 32).is_small(SMALL_BYTES_MAX + 1)
    assert not Packing.for_parts(8 * 2**20, 32).is_small(2**21 + 1)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 2 * SMALL)), max_size=25),
    seed=st.integers(0, 2**32),
)
@example(sizes=list(EDGES) * 3, seed=0)
def test_every_byte_of_files_around_the_limit_is_stored(
    long_flush: FlushRig, sizes: list[int], seed: int
) -> None:
    """Each file has its digest, its CRC32C and its extents.  Only small files share an object."""
    step = next(STEPS)
    files = {
        f"{n % 3}/{n}": random.Random(seed + n).randbytes(size) for n, size in enumerate(sizes)
    }
    name = f"step-{step:012d}.abc"
    (long_flush.run_directory / name).mkdir()
    staged = staged_set(long_flush.run_directory, files, step=step, directory=name)
    before = long_flush.store.count("put_shard")
    done = long_flush.flushed(staged)
    small = [shard for shard in done.shards if 0 < shard.size_bytes <= SMALL]
    for shard in done.shards:
        is_packed = bool(packs([extent.object.key for extent in shard.extents]))
        assert not is_packed or shard in small
        assert is_packed or shard not in small or len(small) < 25
        assert len(shard.extents) <= 1
    single = sum(SMALL < shard.size_bytes <= PART for shard in done.shards)
    small_bytes = sum(shard.size_bytes for shard in small)
    assert long_flush.store.count("put_shard") - before <= single + small_bytes // (PART // 8) + 1


def test_a_hundred_small_files_need_few_requests(flush: FlushRig) -> None:
    """Ten objects of a part each, and a single small file keeps its own name in the store."""
    done = flush.flushed(staged_set(flush.run_directory, small_files(100)))
    assert len(flush.store.requests) == len(packs(keys_of(done))) == 10
    one = staged_set(flush.run_directory, {"a": b"a"}, step=6, directory="step-6.abc")
    assert keys_of(flush.flushed(one))[0].endswith("/00000/a")


def test_a_marker_is_never_in_a_pack_and_is_stored_last(flush: FlushRig) -> None:
    """All packs are stored before the first marker is sent."""
    files = small_files(40) | {"a/.done": b"1", "z/.done": b"2"}
    seen: list[int] = []

    def before(what: str, key: str) -> None:
        if key.endswith(".done"):
            seen.append(sum(map(len, flush.store.objects.values())))

    flush.store.before = before
    done = flush.flushed(staged_set(flush.run_directory, files, ("a/.done", "z/.done")))
    by_path = {shard.path: shard.extents[0].object.key for shard in done.shards}
    assert not packs([by_path["a/.done"], by_path["z/.done"]])
    assert len(seen) == 2
    assert min(seen) >= 4000


def test_an_unchanged_small_file_is_referenced_within_its_pack(flush: FlushRig) -> None:
    """The next set sends only the files that changed.  One HEAD for each pack confirms the others."""
    files = small_files(40)
    first = flush.flushed(staged_set(flush.run_directory, files))
    flush.journal.committed("5.abc", first.shards, CommitRef(1, 5))
    del flush.store.requests[:]
    files |= {"d/007": b"x" * 100, "d/039": b"y" * 10}
    second = staged_set(flush.run_directory, files, step=6, directory="step-6.abc")
    done = flush.flushed(second)
    assert flush.store.count("put_shard") <= 2
    assert flush.store.count("head") <= 2 * len(packs(keys_of(first))), (
        "two workers may ask at once"
    )
    assert done.bytes_referenced == 38 * 100
    same = [s for s in done.shards if s.path not in ("d/007", "d/039")]
    assert {s.extents for s in same} < {s.extents for s in first.shards}


def test_a_reference_whose_pack_is_gone_is_sent_again(flush: FlushRig) -> None:
    """The digest is equal, but the object was deleted."""
    files = small_files(20)
    first = flush.flushed(staged_set(flush.run_directory, files))
    flush.journal.committed("5.abc", first.shards, CommitRef(1, 5))
    flush.store.objects.clear()
    done = flush.flushed(staged_set(flush.run_directory, files, step=6, directory="step-6.abc"))
    assert done.bytes_referenced == 0


def test_small_files_of_a_growing_set_wait_for_a_quarter_of_a_pack(flush: FlushRig) -> None:
    """A pack is sent when enough bytes wait, the rest after the seal, and no byte twice."""
    small = small_files(7, 60)
    write_files(flush.run_directory / SET, {path: small[path] for path in list(small)[:3]})
    flush.engine.start("f1", found_set(flush.run_directory), 1, is_sealed=False)
    until(lambda: flush.engine._queues and not flush.engine._is_beginning)
    assert not flush.store.requests
    write_files(flush.run_directory / SET, {path: small[path] for path in list(small)[3:6]})
    flush.engine.start("f2", found_set(flush.run_directory), 1, is_sealed=False)
    until(lambda: flush.store.bytes_sent == 5 * 60, what="the first pack")
    write_files(flush.run_directory / SET, {path: small[path] for path in list(small)[6:]})
    done = flush.flushed(found_set(flush.run_directory))
    assert flush.store.bytes_sent == 7 * 60
    assert len(packs(keys_of(done))) == 2


@pytest.mark.fault("D03", "D09")
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_file_that_changes_while_its_pack_is_sent_voids_the_set(
    flush: FlushRig, damage: str
) -> None:
    """No record of the pack is kept.  Another set is flushed afterwards."""
    staged = staged_set(flush.run_directory, small_files(9))
    path = flush.run_directory / SET / "d" / "001"

    def before(what: str, key: str) -> None:
        if damage == "changed":
            path.write_bytes(b"x" * 100)
            os.utime(path, ns=(1, 1))
        elif damage == "cut":
            os.truncate(path, 50)
        else:
            path.unlink(missing_ok=True)

    flush.store.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void, failed.reason
    assert "d/001" in failed.reason
    flush.store.before = lambda *_: None
    assert "d/001" not in flush.journal.records_of("5.abc")
    flush.flushed(staged_set(flush.run_directory, small_files(9), step=6, directory="step-6.abc"))


def test_a_file_that_is_still_written_defers_its_pack(flush: FlushRig) -> None:
    """A set that is not sealed is not void.  The next flush sends the pack with the file's new bytes."""
    staged = staged_set(flush.run_directory, small_files(5))
    (flush.run_directory / SET / "d" / "001").write_bytes(b"longer" * 20)
    tried = threading.Event()
    flush.store.before = lambda *_: tried.set()
    flush.engine.start("f1", staged, 1, is_sealed=False)
    assert tried.wait(20)
    until(lambda: flush.engine._idle == 3, what="the workers to leave the pack")
    assert not flush.store.objects
    flush.flushed(found_set(flush.run_directory))


@pytest.mark.fault("H01", "O70")
def test_a_restarted_daemon_sends_no_stored_pack_again(flush: FlushRig) -> None:
    """Killed during a pack, it confirms each stored pack by one HEAD, and sends only the others."""
    staged = staged_set(flush.run_directory, small_files(60))
    held = threading.Event()

    def before(what: str, key: str) -> None:
        if len(flush.store.objects) >= 3:
            assert held.wait(20)

    flush.store.before = before
    flush.engine.start("f", staged, 1)
    until(lambda: len(flush.journal.records_of("5.abc")) >= 21, what="the records of three packs")
    flush.engine.cancel("f")
    held.set()
    until(lambda: flush.engine._idle == 3, what="the packs in flight to end")
    flush.store.before = lambda *_: None
    stored = len(flush.store.objects)
    records = flush.journal.records_of("5.abc")
    del flush.store.requests[:]
    flush.store.bytes_sent = 0
    flush.start_daemon()
    flush.flushed(staged)
    assert flush.store.bytes_sent == 100 * (60 - len(records))
    assert flush.store.count("head") == stored < 6


def test_a_pack_that_the_store_lost_is_sent_again_under_another_key(flush: FlushRig) -> None:
    """The journal of an earlier daemon proves nothing."""
    staged = staged_set(flush.run_directory, small_files(20))
    first = flush.flushed(staged)
    lost = min(packs(keys_of(first)))
    del flush.store.objects[lost]
    flush.start_daemon()
    done = flush.flushed(staged)
    assert lost not in keys_of(done)
    assert packs(keys_of(first)) - {lost} < packs(keys_of(done))


@pytest.mark.parametrize("times", [1, 100])
def test_a_pack_whose_key_is_taken_gets_another_key(flush: FlushRig, times: int) -> None:
    """A limited number of times: then the flush fails, and the set is not void."""
    taken: list[str] = []

    def before(what: str, key: str) -> None:
        if what == "put_shard" and len(taken) < times:
            taken.append(key)
            flush.store.objects[key] = b"other bytes"

    flush.store.before = before
    flush.engine.start("f", staged_set(flush.run_directory, small_files(2, 50)), 1)
    outcome = flush.outcome()
    flush.store.overwritten.clear()
    assert len(set(taken)) == len(taken) == min(times, RESTARTS_MAX + 1)
    if times == 1:
        assert isinstance(outcome, Flushed)
    else:
        assert isinstance(outcome, FlushFailed)
        assert not outcome.void


@pytest.mark.parametrize("error", [Transient("503"), Permanent("403")])
def test_a_store_error_fails_the_flush_and_the_next_one_sends_the_packs(
    flush: FlushRig, error: Exception
) -> None:
    """The set is not void."""

    def before(what: str, key: str) -> None:
        raise error

    staged = staged_set(flush.run_directory, small_files(30))
    flush.store.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert not failed.void
    flush.store.before = lambda *_: None
    flush.flushed(staged)


def test_a_cancelled_flush_ends_within_a_pack(flush: FlushRig) -> None:
    """The pack is not stored, no outcome is posted, and the next flush of the set sends every byte."""
    staged = staged_set(flush.run_directory, small_files(30))
    begun, held = threading.Event(), threading.Event()
    put_shard = flush.store.put_shard

    def put(key: str, body: Body) -> int:
        body.rewind()
        body.read_into(memoryview(bytearray(150)))
        begun.set()
        assert held.wait(20)
        return put_shard(key, body)

    flush.store.put_shard = put  # type: ignore[method-assign]
    flush.engine.start("f", staged, 1)
    assert begun.wait(20)
    assert len(flush.open_files()) <= 4, "one file for each connection, and the directory"
    flush.engine.cancel("f")
    held.set()
    until(lambda: not flush.open_files(), what="the files to be closed")
    assert not flush.store.objects
    del flush.store.put_shard  # type: ignore[method-assign]
    flush.flushed(staged)


@pytest.mark.fault("H06")
def test_a_pack_is_read_window_by_window(flush: FlushRig) -> None:
    """Memory does not depend on the size or the number of its files, and bytes count once."""
    sizes: set[int] = set()
    put_shard = flush.store.put_shard

    def put(key: str, body: Body) -> int:
        read_into = body.read_into

        def fill(window: memoryview) -> None:
            sizes.add(len(window))
            read_into(window)

        body.read_into = fill  # type: ignore[method-assign]
        return put_shard(key, body)

    flush.store.put_shard = put  # type: ignore[method-assign]
    flush.engine.start("f", staged_set(flush.run_directory, small_files(100, 10)), 1)
    assert isinstance(flush.outcome(), Flushed)
    assert max(sizes) == WINDOW_BYTES
    flush.engine._active = None
    progress = [event for event in list(flush.events.queue) if hasattr(event, "bytes_sent")]
    assert all(event.bytes_sent <= 1000 for event in progress)
