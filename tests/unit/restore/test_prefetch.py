# SPDX-License-Identifier: Apache-2.0
"""The prefetch and the trainers that join it: real directories, a real store whose reads can be held."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from swansong_bucket.errors import StagingError, Transient
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef
from swansong_bucket.stores.base import ObjectInfo, Sink
from swansongd.core.events import FenceFound, RunRead
from swansongd.core.state import Predecessor
from swansongd.restore import downloads, prefetch
from swansongd.restore.prefetch import NO_ROOM_FOR_ALL, Prefetch

from testkit import committed
from testkit.odd_store import OddStore
from testkit.restore_rig import Asked, RestoreRig
from testkit.story import Story, a_set
from testkit.waiting import until

FILES = {"weights.bin": bytes(range(256)) * 20}
CHUNKS = 6
"""Of these files, in chunks of :data:`committed.CHUNK_BYTES`."""


class Held(OddStore):
    """A store that holds reads beyond an offset until it is released, and fails on order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, self._hold)
        self.release = threading.Event()
        self.release.set()
        self.fails_from: int | None = None
        """Requests for data from this offset on get a 503."""
        self.lists = 0
        self.places: dict[str, tuple[str, int]] = {}
        """Path and offset of each chunk in its file, by its key."""

    def hold(self) -> None:
        self.release.clear()

    def _hold(self, key: str, _offset: int, _window: memoryview) -> None:
        _path, offset = self.places[key]
        assert offset < 3 * committed.CHUNK_BYTES or self.release.wait(30)

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        super().get_range(key, offset, size_bytes, sink)
        if self.fails_from is not None and self.places[key][1] >= self.fails_from:
            raise Transient("503 during the data")

    @property
    def read(self) -> list[tuple[str, int]]:
        """Path and offset of each chunk that was requested."""
        return [self.places[key] for key, _, _ in self.given]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.lists += 1
        return super().list(prefix, after=after)


class Vm(RestoreRig[Held]):
    """A daemon that has just started: its restore thread, and the prefetch."""

    def __init__(self, directory: Path) -> None:
        self.bucket = directory / "bucket"
        committed.file_store(self.bucket)
        story = Story(claimed=False)
        story.scan()
        clock = itertools.count(0.0, 0.06)  # a download looks at the state with each window
        super().__init__(
            directory / "staging", Held(self.bucket), story=story, monotonic=lambda: next(clock)
        )
        self.prefetch = Prefetch(self.context, self.resume.downloads)
        self.resume.answered = self.prefetch.answered

    def commit(self, step: int, **options: Any) -> Path:
        """Commit; returns the file that holds the weights in the store."""
        files = {"weights.bin": bytes([step % 256]) + FILES["weights.bin"][1:]}
        made = self.put(files, step=step, nonce=f"a{step}", **options)
        return self.bucket / made.chunks[0].key

    def put(self, files: dict[str, bytes], **options: Any) -> Manifest:
        made = committed.commit(self.store, files, **options)
        self.store.places |= committed.first_places(made)
        return made

    def shows(self, state: str, reason: str = "") -> None:
        """Wait until the status shows this."""

        def is_shown() -> bool:
            status = self.prefetch.status()
            return status.state == state and reason in status.reason

        until(is_shown, what=f"{state} {reason}; it is {self.prefetch.status()}")

    @property
    def directories(self) -> list[str]:
        return sorted(os.listdir(self.restored)) if self.restored.exists() else []

    @contextmanager
    def half_fetched(self) -> Iterator[None]:
        """Start the prefetch, and hold its last parts until the end of the block."""
        self.store.hold()
        self.prefetch.start()
        try:
            until(lambda: len(self.store.given) >= 4, what="the first chunks")
            (journal,) = self.restored.glob(".*.partial-*/journal")
            until(
                lambda: journal.read_bytes().count(b"\n") >= 4, what="three chunks in the journal"
            )
            yield
        finally:
            self.store.release.set()


def leave_room_for(
    parts: int, monkeypatch: pytest.MonkeyPatch, used: Callable[[], int] = lambda: 0
) -> None:
    """Staging has room for this number of parts of one VM, 5,120 bytes each."""
    real = os.fstatvfs

    def bounded(fd: int) -> Any:
        facts = list(real(fd))
        facts[0:2] = [1, 1]
        facts[4] = (parts - used()) * 5120
        return os.statvfs_result(facts)

    monkeypatch.setattr(os, "fstatvfs", bounded)


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[Vm]:
    vm = Vm(tmp_path)
    yield vm
    vm.stop.set()
    vm.store.release.set()


@pytest.mark.fault("OE04")
def test_the_prefetch_follows_the_vm_that_still_trains(vm: Vm) -> None:
    """Each commit replaces the one before, whose unchanged files are copied, and is not read again."""
    starts = replace(vm.state.starts, predecessor=Predecessor(by_mono_s=math.inf, generation=1))
    vm.story.state = replace(vm.state, starts=starts)
    vm.story.tell(RunRead(None))
    vm.prefetch.start()
    vm.shows("waiting", "generation 1 still trains")
    for step in (100, 110, 120):
        weights = bytes([step]) + FILES["weights.bin"][1:]
        files = {"same.bin": FILES["weights.bin"], "weights.bin": weights}
        vm.put(files, step=step, nonce=f"a{step}")
        other = Predecessor(by_mono_s=math.inf, generation=1, newest=CommitRef(1, step))
        vm.story.state = replace(vm.state, starts=replace(vm.state.starts, predecessor=other))
        until(lambda step=step: vm.prefetch.status().step == step, what="the next commit")  # type: ignore[misc]
        vm.shows("ready", "generation 1 still trains")
        until(lambda: len(vm.directories) == 1, what="one directory")
    fetched = [path for path, _ in vm.store.read]
    assert fetched.count("same.bin") == CHUNKS, "it was fetched again"
    vm.story.state = replace(vm.state, starts=replace(vm.state.starts, predecessor=None))
    reads = len(vm.store.given)
    answer = vm.ask().answer()
    assert (answer.step, len(vm.store.given)) == (120, reads)


@pytest.mark.fault("OE04")
def test_the_prefetch_follows_the_job_until_a_start_begins_here(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer of this VM waits in the rendezvous of its launcher while other VMs commit.  A start of this
    VM ends the listings."""
    monkeypatch.setattr(prefetch, "_LOOK_INTERVAL_S", 0.001)  # each look advances the clock
    vm.prefetch.start()
    vm.shows("waiting")
    vm.story.tell(RunRead(None))
    for step in (100, 110):
        vm.commit(step)
        until(lambda step=step: vm.prefetch.status().step == step, what="the next commit")  # type: ignore[misc]
        vm.shows("ready")
        until(lambda: len(vm.directories) == 1, what="one directory")
    vm.story.grants = False
    vm.story.join()
    listed, began_mono_s = vm.store.lists, vm.context.monotonic()
    until(lambda: vm.context.monotonic() > began_mono_s + 20, what="ten intervals")
    assert vm.store.lists <= listed + 1
    reads = len(vm.store.given)
    vm.story.grant(vm.state.starts.claiming)
    assert (vm.ask().answer().step, len(vm.store.given)) == (110, reads)


@pytest.mark.fault("G24")
def test_an_older_prefetch_makes_room_for_the_next_commit(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging has room for one prefetch and two further checkpoints: no trainer will get the older one."""
    vm.commit(100)
    leave_room_for(3, monkeypatch, lambda: len([*vm.restored.glob("[!.]*")]))
    vm.prefetch.start()
    vm.shows("ready")
    vm.commit(110)
    until(lambda: vm.prefetch.status().step == 110, what="the next commit")
    vm.shows("ready")
    assert len(vm.directories) == 1


def test_a_trainer_joins_the_prefetch_in_progress(vm: Vm) -> None:
    """Each part is fetched once, and the answer comes with the last one."""
    vm.commit(100)
    with vm.half_fetched():
        asked = vm.ask()
    assert asked.answer().step == 100
    assert len(vm.store.given) == CHUNKS
    vm.shows("answered")


def test_a_rank_cuts_the_prefetch_down_to_its_shards(vm: Vm) -> None:
    """The chunks of its own shards are kept, and those of the other rank are dropped."""
    files = {f"rank-0000{rank}/w.bin": random.Random(rank).randbytes(5120) for rank in (0, 1)}
    vm.put(files, step=100, nonce="a100")
    with vm.half_fetched():
        (journal,) = vm.restored.glob(".*.partial-*/journal")
        until(lambda: journal.read_bytes().count(b"\n") >= 7, what="three chunks of each shard")
        asked = vm.ask(prefixes=["rank-00000"])
        until(lambda: _is_cancelled(vm), what="the end of the prefetch")
    answer = asked.answer()
    assert committed.tree(Path(answer.path)) == {"rank-00000/w.bin": files["rank-00000/w.bin"]}
    early = [offset for path, offset in vm.store.read if "rank-00000" in path and offset < 3000]
    assert sorted(early) == [0, 1000, 2000], "each was fetched once"


@pytest.mark.fault("G19")
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_trainer_that_wants_another_step_gets_that_step(vm: Vm, is_finished: bool) -> None:
    """Rank 0 of a job over several VMs chose an older commit: the prefetch makes way for it."""
    vm.commit(100)
    vm.commit(110)
    if is_finished:
        vm.prefetch.start()
        vm.shows("ready")
        answer = vm.ask(generation=1, step=100).answer()
    else:
        with vm.half_fetched():
            asked = vm.ask(generation=1, step=100)
            until(lambda: _is_cancelled(vm), what="the end of the prefetch")
        answer = asked.answer()
    assert (answer.step, answer.error) == (100, "")
    assert Path(answer.path, "weights.bin").read_bytes()[0] == 100
    vm.shows("answered")
    assert vm.directories == [Path(answer.path).name]


def _is_cancelled(vm: Vm) -> bool:
    current = vm.resume.downloads.current
    return current is not None and current.is_cancelled


@pytest.mark.fault("G20")
def test_a_rollback_during_a_prefetch_gets_the_healthy_commit(vm: Vm) -> None:
    vm.commit(100, health={"loss_is_finite": 1.0})
    vm.commit(110, health={"loss_is_finite": 0.0})
    with vm.half_fetched():
        asked = vm.ask(rollback=1, before_step=110)
        until(lambda: _is_cancelled(vm), what="the end of the prefetch")
    answer = asked.answer()
    assert (answer.step, answer.error) == (100, "")
    vm.shows("answered")
    until(lambda: vm.directories == [Path(answer.path).name], what="only this directory")


@pytest.mark.fault("G21")
def test_an_evacuation_pauses_the_prefetch_and_its_chunks_stay(vm: Vm) -> None:
    """After the notice is withdrawn, only the missing chunks are fetched."""
    vm.commit(100)
    with vm.half_fetched():
        vm.story.notice()
        assert vm.state.evacuation is not None
    vm.shows("waiting", "evacuation")
    reads = len(vm.store.given)
    (partial,) = vm.restored.glob(".*.partial-*")
    assert (partial / "journal").read_bytes().count(b"\n") >= 4
    vm.story.withdraw()
    vm.shows("ready")
    assert len(vm.store.given) < reads + CHUNKS, "the chunks of before were not fetched again"


def test_a_trainer_does_not_wait_for_a_prefetch_that_never_began(vm: Vm) -> None:
    """The notice came before the prefetch had read a manifest: the trainer gets its checkpoint."""
    vm.commit(100)
    vm.story.notice()
    vm.prefetch.start()
    vm.shows("waiting", "evacuation")
    assert not vm.store.given
    answer = vm.ask().answer()
    assert vm.state.evacuation is not None
    assert (answer.step, answer.error) == (100, "")
    vm.shows("answered")


def test_training_that_began_without_the_prefetch_ends_it(vm: Vm) -> None:
    """The trainer did not ask: the directory only takes space."""
    vm.commit(100)
    vm.prefetch.start()
    vm.shows("ready")
    vm.story.join()
    assert vm.prefetch.status().state == "ready"
    vm.story.progress(0)
    vm.shows("not_needed", "training has begun")
    until(lambda: not vm.directories, what="the removal")


def test_a_set_in_staging_needs_no_prefetch(vm: Vm) -> None:
    vm.commit(100)
    vm.story.join()
    vm.story.staging = [a_set(100)]
    vm.story.scan()
    vm.story.tell(RunRead(CommitRef(1, 100)))
    vm.prefetch.start()
    vm.shows("not_needed", "step 100 is in staging")
    assert not vm.store.given


def test_a_fresh_run_needs_no_prefetch(vm: Vm) -> None:
    """Until the claim, an earlier VM may still commit."""
    vm.prefetch.start()
    vm.shows("waiting")
    vm.story.tell(RunRead(None))
    vm.story.join()
    vm.shows("not_needed", "no commit")


def test_a_commit_before_the_claim_replaces_the_prefetched_one(vm: Vm) -> None:
    """The earlier VM made its last commit while this VM started."""
    vm.commit(100)
    vm.prefetch.start()
    vm.shows("ready")
    vm.commit(110)
    vm.story = Story(newest=CommitRef(1, 110))
    until(lambda: vm.prefetch.status().step == 110, what="the newer commit")
    vm.shows("ready")
    answer = vm.ask().answer()
    assert answer.step == 110
    assert vm.directories == [Path(answer.path).name]


@pytest.mark.fault("G22")
def test_a_fence_ends_the_prefetch(vm: Vm) -> None:
    """Another VM has taken the run over: nothing more is fetched."""
    vm.commit(100)
    with vm.half_fetched():
        vm.story.tell(FenceFound(7))
    vm.shows("not_needed", "generation 7")
    until(lambda: not vm.directories, what="the removal")


@pytest.mark.fault("G23")
def test_a_prefetch_passes_over_a_corrupt_commit(vm: Vm) -> None:
    """The trainer gets the same older commit, without another download."""
    vm.commit(100)
    committed.flip_bit(vm.commit(110), 77)
    vm.prefetch.start()
    vm.shows("ready")
    reads = len(vm.store.given)
    assert vm.ask().answer().step == 100
    assert len(vm.store.given) == reads


@pytest.mark.fault("G24")
def test_a_prefetch_leaves_room_for_checkpoints(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that asks gets the checkpoint nevertheless, as long as it fits."""
    vm.commit(100)
    leave_room_for(2, monkeypatch)
    vm.prefetch.start()
    vm.shows("failed", "bytes")
    assert not vm.directories
    assert (vm.ask().answer().step, vm.prefetch.status().state) == (100, "failed")


@pytest.mark.fault("G24")
def test_a_disk_that_fills_up_halfway_fails_the_prefetch(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before the download found room.  Nothing stays, and a trainer gets all with room again."""
    vm.commit(100)
    real, is_full = os.pwrite, True

    def bounded(fd: int, data: Any, offset: int) -> int:
        if is_full and offset >= 3 * committed.CHUNK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", bounded)
    vm.prefetch.start()
    vm.shows("failed", "No space left on device")
    assert vm.store.given, "the download had begun"
    assert vm.directories == []
    is_full = False
    answer = vm.ask().answer()
    assert (answer.step, answer.error) == (100, "")
    assert Path(answer.path, "weights.bin").stat().st_size == 5120
    assert vm.directories == [Path(answer.path).name]


@pytest.mark.fault("G25")
def test_a_store_that_fails_during_the_data_costs_no_chunk_twice(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefetch waits with the reason, and reuses the chunks that it has when the store returns."""
    vm.commit(100)
    early = 3 * committed.CHUNK_BYTES
    monkeypatch.setattr(downloads, "PREFETCH_BUDGET_S", 0.5)
    vm.store.fails_from = early
    vm.prefetch.start()
    vm.shows("waiting", "503")
    (partial,) = vm.restored.glob(".*.partial-*")
    kept = {offset for _, offset in vm.store.read if offset < early}
    assert kept == {0, 1000, 2000}
    before = len(vm.store.given)
    vm.store.fails_from = None
    vm.shows("ready")
    again = {offset for _, offset in vm.store.read[before:]}
    assert not again & kept
    assert vm.ask().answer().step == 100
    assert not partial.exists()


class Job:
    """A commit of 8 VMs with one rank each, and a new start of one of these VMs."""

    NODES = 8

    def __init__(self, vm: Vm) -> None:
        self.vm = vm
        self.files = {
            f"rank-{rank:05d}/w.bin": random.Random(rank).randbytes(5120)
            for rank in range(self.NODES)
        }
        for node, (path, data) in enumerate(self.files.items()):
            vm.put({path: data}, node=node, nodes=self.NODES, nonce=f"a{node}")

    def had_rank(self, rank: int) -> None:
        """An earlier set in staging has the files of this rank."""
        made = a_set(90, nodes=self.NODES)
        mine = tuple(file._replace(path=f"rank-{rank:05d}/w.bin") for file in made.files)
        self.vm.story.staging = [replace(made, files=mine)]
        self.vm.story.scan()

    def ask(self, *prefixes: str) -> Asked:
        """Ask for the commit that rank 0 has chosen, and only for these shards."""
        return self.vm.ask(generation=1, step=100, prefixes=list(prefixes))

    def ranks_read(self) -> list[int]:
        """The ranks whose shards were fetched, in the order of the requests."""
        paths = [path for path, _ in self.vm.store.read]
        return list(dict.fromkeys(int(path.removeprefix("rank-")[:5]) for path in paths))


@pytest.fixture
def job(vm: Vm) -> Job:
    return Job(vm)


def test_a_part_of_a_job_needs_room_for_parts_only(
    vm: Vm, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 parts have room: all 8 of the commit, and two further ones of this VM."""
    leave_room_for(10, monkeypatch)
    vm.prefetch.start()
    vm.shows("ready")
    status = vm.prefetch.status()
    assert (status.bytes_done, status.bytes_total, status.reason) == (40960, 40960, "")
    answer = job.ask("rank-00005/").answer()
    assert (answer.step, answer.error) == (100, "")


def test_a_vm_with_room_for_its_own_part_does_not_fail(
    vm: Vm, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a trainer that names its shards: no warning, and no request meanwhile."""
    leave_room_for(9, monkeypatch)
    with capture_logs() as log:
        vm.prefetch.start()
        vm.shows("waiting", NO_ROOM_FOR_ALL)
        listed = vm.store.lists
        answer = job.ask("rank-00005/").answer()
        assert vm.store.lists <= listed + 2, "the prefetch lists nothing again"
    assert (answer.step, answer.error) == (100, "")
    assert job.ranks_read() == [5]
    vm.shows("answered")
    assert not [line for line in log if line["log_level"] not in ("info", "debug")]


def test_the_shards_of_the_earlier_ranks_come_first(vm: Vm, job: Job) -> None:
    """A set in staging names the rank that this VM had; a job may need the others as well."""
    job.had_rank(6)
    vm.prefetch.start()
    vm.shows("ready")
    assert job.ranks_read()[0] == 6
    assert sorted(job.ranks_read()) == list(range(8))
    assert vm.prefetch.status().bytes_total == 8 * 5120
    reads = len(vm.store.given)
    answer = job.ask().answer()
    assert committed.tree(Path(answer.path)) == job.files
    assert len(vm.store.given) == reads


def test_the_earlier_ranks_alone_are_fetched_without_room_for_all(
    vm: Vm, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of this VM, and room for two more of them: the rank gets its answer without a request."""
    job.had_rank(6)
    leave_room_for(3, monkeypatch)
    vm.prefetch.start()
    vm.shows("ready", NO_ROOM_FOR_ALL)
    assert job.ranks_read() == [6]
    reads = len(vm.store.given)
    answer = job.ask("rank-00006/").answer()
    assert list(committed.tree(Path(answer.path))) == ["rank-00006/w.bin"]
    assert len(vm.store.given) == reads


def test_an_own_part_without_room_is_a_failure(
    vm: Vm, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This VM knows its part: it cannot hold two more checkpoints of that size."""
    job.had_rank(6)
    leave_room_for(2, monkeypatch)
    vm.prefetch.start()
    vm.shows("failed", "bytes")
    assert job.ask("rank-00006/").answer().step == 100


def test_a_prefetch_can_be_switched_off(vm: Vm) -> None:
    vm.commit(100)
    prefetch = Prefetch(vm.context, vm.resume.downloads, is_enabled=False)
    prefetch.start()
    assert prefetch.status().state == "off"
    assert vm.ask().answer().step == 100


@pytest.mark.fault("H07")
def test_a_prefetch_without_descriptors_is_tried_again(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are free again a moment later."""
    vm.commit(100)
    real, failed = downloads.interrupted, threading.Event()

    def interrupted(*arguments: Any) -> Any:
        if failed.is_set():
            return real(*arguments)
        failed.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(downloads, "interrupted", interrupted)
    vm.prefetch.start()
    vm.shows("ready")
    assert failed.is_set()


@pytest.mark.fault("H07")
def test_a_prefetch_that_no_trainer_gets_is_deleted_after_a_disk_error(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon had no descriptor left for a moment: the prefetch would keep its room for good."""
    vm.commit(100)
    vm.prefetch.start()
    vm.shows("ready")
    failed = threading.Event()
    real = downloads._opened_restored

    def opened(*arguments: Any) -> int:
        if failed.is_set():
            return real(*arguments)
        failed.set()
        raise StagingError("cannot be used: Too many open files")

    monkeypatch.setattr(downloads, "_opened_restored", opened)
    with capture_logs() as logs:
        vm.prefetch.answered()  # to a trainer that got another directory
        until(lambda: not vm.directories, what="the removal")
    assert failed.is_set()
    assert [log["event"] for log in logs if log["log_level"] != "info"] == ["prefetch_not_removed"]
