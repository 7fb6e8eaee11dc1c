# SPDX-License-Identifier: Apache-2.0
"""VMs of one job and the bucket that they share: whole checkpoints, and one choice."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from swansong.protocol import Message, Restored, RestoreQuery
from swansong_bucket.errors import Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import GPU_IS_SOUND, CommitRef
from swansong_bucket.runs import commit
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectInfo
from swansong_bucket.stores.file.store import FileStore
from swansongd.core.events import (
    CheckComplete,
    Event,
    PartsCounted,
    RunRead,
    SourceChanged,
)
from swansongd.flush.claimant import Claimant
from swansongd.flush.committer import Committer
from swansongd.flush.known import KnownChunks
from swansongd.flush.store_health import StoreHealth
from swansongd.restore.context import RestoreContext
from swansongd.restore.resume import Resume
from swansongd.staging.prepare import prepare

from testkit import committed
from testkit.records import KEY
from testkit.story import Story, a_set

KEYS = RunKeys("r")
FILES = {"weights.bin": bytes(range(256)) * 20}


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return committed.file_store(tmp_path / "bucket")


def claim(store: FileStore, job_start_id: str) -> int:
    nonce = f"{job_start_id}{threading.get_ident()}"
    return commit.claim_generation(
        store, KEYS, identity={}, nonce=nonce, job_start_id=job_start_id
    ).generation


class Desk:
    """The committer of one VM."""

    def __init__(self, directory: Path, store: FileStore) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.own = directory
        self.own.mkdir(exist_ok=True)
        self.store = store

    def open(self) -> Committer:
        def note(event: Event) -> None:
            assert isinstance(event, SourceChanged)

        committer = Committer(
            self.store,
            KEYS,
            self.events.put,
            Claimant(
                self.store,
                KEYS,
                self.own,
                boot_id="boot",
                wall=lambda: "2030-01-01T00:00:00Z",
            ),
            known=KnownChunks(self.own, run="r", store_url=self.store.url, is_data=KEYS.is_data),
            wall=lambda: "2030-01-01T00:00:00Z",
            health=StoreHealth(note, monotonic=lambda: 0.0),
        )
        committer.start()
        return committer

    def next(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.events.get(timeout=20), kind):
            pass
        return event


@pytest.mark.fault("G17")
def test_a_checkpoint_is_complete_with_the_manifests_of_all_vms(
    tmp_path: Path, store: FileStore
) -> None:
    """Of this step and this number of VMs; of several checkpoints, the newest whole one is reported."""
    desk = Desk(tmp_path / "a", store)
    committer = desk.open()
    newest = CommitRef(1, 9)
    order = CheckComplete(newest, 2)
    for options in ({"step": 9, "node": 0}, {"step": 8, "node": 1}, {"step": 8, "node": 0}):
        committed.commit(
            store, FILES, nodes=2, generation=1, nonce="a{step}{node}".format(**options), **options
        )
    committer.check_complete(order)
    assert desk.next(PartsCounted) == PartsCounted(newest, 1, CommitRef(1, 8))
    committer.check_complete(CheckComplete(newest, 2, CommitRef(1, 8)))
    assert desk.next(PartsCounted) == PartsCounted(newest, 1, None)
    committed.commit(store, FILES, step=9, node=1, nodes=2, generation=1, nonce="x")
    committer.check_complete(order)
    assert desk.next(PartsCounted) == PartsCounted(newest, 2, newest)
    committer.close()


@pytest.mark.fault("X09", "G17")
@pytest.mark.parametrize(
    ("health", "is_sound"), [({}, True), ({GPU_IS_SOUND: 1.0}, True), ({GPU_IS_SOUND: 0.0}, False)]
)
def test_a_failed_gpu_of_another_vm_makes_the_checkpoint_unsound(
    tmp_path: Path, store: FileStore, health: dict[str, float], is_sound: bool
) -> None:
    """The VM with working GPUs reads the mark in the other manifest, at once and after a restart."""
    ref = CommitRef(1, 9)
    committed.commit(store, FILES, step=9, node=0, nodes=2, nonce="a0")
    committed.commit(store, FILES, step=9, node=1, nodes=2, nonce="a1", health=health)
    desk = Desk(tmp_path / "a", store)
    committer = desk.open()
    assert desk.next(RunRead) == RunRead(ref, "", is_sound)
    committer.check_complete(CheckComplete(ref, 2))
    assert desk.next(PartsCounted) == PartsCounted(ref, 2, ref, is_sound)
    committer.close()


@pytest.mark.fault("X09")
def test_a_daemon_that_starts_reads_the_mark_of_its_own_commit(
    tmp_path: Path, store: FileStore
) -> None:
    """The trainer may have deleted the set since."""
    committed.commit(store, FILES, step=9, health={GPU_IS_SOUND: 0.0})
    desk = Desk(tmp_path / "a", store)
    committer = desk.open()
    assert desk.next(RunRead) == RunRead(CommitRef(1, 9), "", False)
    committer.close()


@pytest.mark.fault("G17")
def test_a_damaged_manifest_makes_no_checkpoint_whole(tmp_path: Path, store: FileStore) -> None:
    """No reader could restore it; a daemon that finds it at its start gives no SAFE for it, and continues."""
    ref = CommitRef(1, 9)
    committed.commit(store, FILES, step=9, node=0, nodes=2, nonce="a0")
    store.put(KEYS.commit(ref, 1, 2), b"{}")
    desk = Desk(tmp_path / "a", store)
    committer = desk.open()
    assert desk.next(RunRead) == RunRead(ref, "", False)
    committer.check_complete(CheckComplete(ref, 2))
    assert desk.next(PartsCounted) == PartsCounted(ref, 2, None)
    committer.close()


def test_a_look_for_parts_is_always_answered(tmp_path: Path, store: FileStore) -> None:
    """Also when the store fails: the decision loop does not look again before the answer."""

    class Broken(FileStore):
        is_down = False

        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            if self.is_down:
                raise Transient("503")
            return super().list(prefix, after=after)

    broken = Broken(store.url)
    desk = Desk(tmp_path / "a", broken)
    committer = desk.open()
    desk.next(RunRead)
    broken.is_down = True
    committer.check_complete(CheckComplete(CommitRef(1, 9), 2))
    assert desk.next(PartsCounted) == PartsCounted(CommitRef(1, 9), 0, None)
    committer.close()


@pytest.mark.fault("S25")
def test_an_unsigned_part_makes_no_checkpoint_whole(tmp_path: Path, store: FileStore) -> None:
    """No reader with the key sees it."""
    view = signed(store, KEY)
    committed.commit(view, FILES, step=9, node=0, nodes=2, nonce="a0")
    committed.commit(store, FILES, step=9, node=1, nodes=2, nonce="a1")
    assert commit.parts_committed(view, KEYS, CommitRef(1, 9), 2) == (1, None)


class Vm:
    """One of two VMs, on which the start ``start`` has its generation, unless it ``is_waiting``."""

    def __init__(self, directory: Path, store: FileStore, *, is_waiting: bool = False) -> None:
        directory.mkdir()
        run = prepare(directory, "r")
        self.story = Story()
        self.story.staging = [a_set(50, start_id="earlier", nodes=2)]
        self.story.scan()  # sealed here, newer than every whole commit
        self.story.grants = not is_waiting
        self.story.join(nodes=2, start_id="start")
        self.resume = Resume(
            RestoreContext(store, KEYS, run, lambda: self.story.state, threading.Event())
        )
        self.answers: queue.Queue[Message] = queue.Queue()

    def send(self, query: RestoreQuery) -> None:
        self.resume.ask(query, self.answers.put, lambda _: None)

    def ask(self, wanted: CommitRef | None = None, *, start_id: str = "start") -> Restored:
        query = RestoreQuery("q", start_id=start_id)
        if wanted is not None:
            query = RestoreQuery("q", generation=wanted.generation, step=wanted.step)
        self.send(query)
        return self.answer()

    def answer(self) -> Restored:
        while not isinstance(answer := self.answers.get(timeout=20), Restored):
            pass
        return answer


@pytest.mark.fault("G17")
def test_one_vm_chooses_a_whole_commit_and_the_others_take_that_one(
    tmp_path: Path, store: FileStore
) -> None:
    """Neither a set on a local disk, nor a part, nor a commit that was completed since."""
    for node in (0, 1):
        files = {f"rank-{node:05d}/w": FILES["weights.bin"]}
        committed.commit(store, files, step=20, node=node, nodes=2, nonce=f"a{node}")
    committed.commit(store, {"rank-00000/w": b"1"}, step=30, node=0, nodes=2, nonce="b0")
    first, second = Vm(tmp_path / "v0", store), Vm(tmp_path / "v1", store)
    chosen = first.ask()
    assert (chosen.step, chosen.error) == (20, "")
    committed.commit(store, {"rank-00001/w": b"1"}, step=30, node=1, nodes=2, nonce="b1")
    taken = second.ask(CommitRef(chosen.generation, chosen.step))
    assert (taken.step, taken.error) == (20, "")
    names = {"rank-00000/w", "rank-00001/w"}
    for answer in (chosen, taken):
        path = Path(answer.path)
        assert {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} == names
    assert second.ask(CommitRef(chosen.generation, chosen.step)).path == taken.path
    assert second.ask(CommitRef(7, 7)).error


def test_a_choice_is_made_under_the_generation_of_its_start(
    tmp_path: Path, store: FileStore
) -> None:
    """Before the claim, a VM of the earlier start could still commit a newer checkpoint."""
    for node in (0, 1):
        files = {f"rank-{node:05d}/w": b"1"}
        committed.commit(store, files, step=20, node=node, nodes=2, nonce=f"a{node}")
    vm = Vm(tmp_path / "v0", store, is_waiting=True)
    vm.send(RestoreQuery("q", start_id="start"))
    vm.send(RestoreQuery("named", generation=1, step=20))
    assert vm.answer().query_id == "named", "the other query waits, and delays no other one"
    for node in (0, 1):
        files = {f"rank-{node:05d}/w": b"1"}
        committed.commit(store, files, step=30, node=node, nodes=2, nonce=f"b{node}")
    vm.story.grant("start")
    second = vm.answer()
    assert (second.query_id, second.step) == ("q", 30)


def test_the_last_vm_of_a_job_resumes_from_its_own_disk(tmp_path: Path, store: FileStore) -> None:
    """The sets of a start on one VM are whole."""
    committed.commit(store, {"rank-00000/w": b"1"}, step=20)
    vm = Vm(tmp_path / "v0", store)
    vm.story.leave()
    vm.story.join(2, pid=200, start_id="alone")
    vm.story.scan()
    own = vm.story.seal(50, "own", start_id="alone")
    answer = vm.ask(start_id="alone")
    assert (answer.step, Path(answer.path).name) == (50, own.directory)


def test_an_answer_to_one_start_is_not_given_to_the_next(tmp_path: Path, store: FileStore) -> None:
    """The job is started again seconds later, and another checkpoint is whole by then."""
    vm = Vm(tmp_path / "v0", store)
    assert vm.ask().path == ""
    for node in (0, 1):
        files = {f"rank-{node:05d}/w": b"1"}
        committed.commit(store, files, step=20, node=node, nodes=2, nonce=f"a{node}")
    assert vm.ask().path == "", "all ranks of a start get the same answer"
    vm.story.leave()
    vm.story.join(2, nodes=2, pid=200, start_id="next")
    assert vm.ask(start_id="next").step == 20
