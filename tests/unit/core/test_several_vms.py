# SPDX-License-Identifier: Apache-2.0
"""VMs of one job and the bucket that they share: one generation, whole checkpoints, one choice."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from swansong.protocol import Hello, Message, Restored, RestoreQuery
from swansongd.bucket import commit
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.signing import Signer
from swansongd.core.events import (
    CheckComplete,
    Event,
    FenceFound,
    GenerationClaimed,
    JoinGeneration,
    PartsCounted,
    SourceChanged,
)
from swansongd.core.state import State
from swansongd.errors import FencedError, Transient
from swansongd.flush.claim_record import ClaimRecord
from swansongd.flush.claimant import Claimant
from swansongd.flush.committer import Committer
from swansongd.flush.journal import UploadJournal
from swansongd.flush.store_health import StoreHealth
from swansongd.model import CheckpointId, CommitRef
from swansongd.restore.context import RestoreContext
from swansongd.restore.resume import Resume
from swansongd.staging.prepare import prepare
from swansongd.stores.base import ObjectInfo
from swansongd.stores.file.store import FileStore
from swansongd.trainers.translate import problem_with

from testkit import committed
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


@pytest.mark.fault("G04")
def test_the_vms_of_one_start_share_a_generation(store: FileStore) -> None:
    """Eight simultaneous VMs, start after start: one number each time, and a greater one every time."""
    numbers = []
    for start in range(6):
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(claim(store, f"start-{start}")))  # noqa: B023
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == 8
        assert len(set(found)) == 1, found
        numbers.append(found[0])
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_a_start_that_was_overtaken_gets_no_second_generation(store: FileStore) -> None:
    """A VM that joins it late finds that the run continues elsewhere."""
    assert claim(store, "old") == 1
    assert claim(store, "new") == 2
    with pytest.raises(FencedError) as fenced:
        claim(store, "old")
    assert fenced.value.newer == 2


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
                several_vms=True,
            ),
            journal=UploadJournal(self.own, run="r", store_url=self.store.url),
            wall=lambda: "2030-01-01T00:00:00Z",
            health=StoreHealth(note, monotonic=lambda: 0.0),
        )
        committer.start()
        return committer

    def next(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.events.get(timeout=20), kind):
            pass
        return event


def test_a_committer_joins_on_request_and_remembers_it_over_a_restart(
    tmp_path: Path, store: FileStore
) -> None:
    """No claim without a request; one generation for two VMs; after a restart the same immediately."""
    desks = [Desk(tmp_path / name, store) for name in ("a", "b")]
    committers = [desk.open() for desk in desks]
    assert list(store.list(KEYS.generations)) == []
    for desk, committer in zip(desks, committers, strict=True):
        committer.join(JoinGeneration("first"))
        claimed = desk.next(GenerationClaimed)
        assert claimed == GenerationClaimed(1, None, is_rollback=True)
    committers[0].close()
    again = desks[0].open()
    assert again.job_start_id == "first"
    assert desks[0].next(GenerationClaimed) == GenerationClaimed(1, None)
    committers[1].join(JoinGeneration("second"))
    assert desks[1].next(GenerationClaimed) == GenerationClaimed(2, None, is_rollback=True)
    again.check_fence()
    assert desks[0].next(FenceFound) == FenceFound(2)
    again.join(JoinGeneration("second"))
    assert desks[0].next(GenerationClaimed) == GenerationClaimed(2, None, is_rollback=True)
    for committer in (again, committers[1]):
        committer.close()


def test_a_record_names_the_sets_that_were_abandoned(tmp_path: Path, store: FileStore) -> None:
    """A bounded number of sets, those of the greatest steps; a restarted daemon reads them."""
    desk = Desk(tmp_path / "a", store)
    committer = desk.open()
    sets = tuple(CheckpointId(step, "abc") for step in range(2000))
    committer.join(JoinGeneration("first", sets))
    desk.next(GenerationClaimed)
    committer.close()
    again = desk.open()
    assert again.abandoned == frozenset(sets[-1000:])
    again.close()


def recorded(desk: Desk) -> ClaimRecord:
    record = ClaimRecord.load(desk.own)
    assert record is not None
    return record


@pytest.mark.fault("S25")
def test_a_record_counts_if_the_claim_is_that_of_its_job_start(
    tmp_path: Path, store: FileStore
) -> None:
    """The nonce is that of the VM which claimed.  A record of another job start joins its own again."""
    first, second = (Desk(tmp_path / name, store) for name in "ab")
    for desk in (first, second):
        committer = desk.open()
        committer.join(JoinGeneration("start"))
        assert desk.next(GenerationClaimed) == GenerationClaimed(1, None, is_rollback=True)
        committer.close()
    assert recorded(first).nonce != recorded(second).nonce
    with capture_logs() as logs:
        for desk in (first, second):
            desk.open().close()
            assert desk.next(GenerationClaimed) == GenerationClaimed(1, None)
    assert not [line for line in logs if line["event"] == "claim_record_refused"]
    forged = replace(recorded(second), job_start_id="another start", nonce="forged")
    forged.save(second.own)
    second.open().close()
    assert second.next(GenerationClaimed) == GenerationClaimed(2, None)
    assert recorded(second).job_start_id == "another start"
    assert claim(store, "another start") == 2


def test_the_record_of_a_run_on_one_vm_does_not_count_for_several_vms(
    tmp_path: Path, store: FileStore
) -> None:
    """A claim for one VM alone would fence the others: nothing is claimed before a trainer connects."""
    desk = Desk(tmp_path / "a", store)
    ClaimRecord("r", store.url, "boot", 1, "n").save(desk.own)
    committer = desk.open()
    assert committer.drain(10)
    assert list(store.list("")) == []
    committer.close()


@pytest.mark.fault("G17")
def test_a_checkpoint_is_complete_with_the_manifests_of_all_vms(
    tmp_path: Path, store: FileStore
) -> None:
    """Of this step and this number of VMs; of several checkpoints, the newest whole one is reported."""
    desk = Desk(tmp_path / "a", store)
    committer = desk.open()
    refs = (CommitRef(1, 9), CommitRef(1, 8), CommitRef(1, 7))
    order = CheckComplete(refs, 2)
    for options in ({"step": 9, "node": 0}, {"step": 8, "node": 1}, {"step": 8, "node": 0}):
        committed.commit(store, FILES, nodes=2, generation=1, upload_nonce=f"{options}", **options)
    committer.check_complete(order)
    assert desk.next(PartsCounted) == PartsCounted(refs[0], 1, refs[1])
    committed.commit(store, FILES, step=9, node=1, nodes=2, generation=1, upload_nonce="x")
    committer.check_complete(order)
    assert desk.next(PartsCounted) == PartsCounted(refs[0], 2, refs[0])
    committer.close()


def test_a_look_for_parts_is_always_answered(tmp_path: Path, store: FileStore) -> None:
    """Also when the store fails: the decision loop does not look again before the answer."""

    class Broken(FileStore):
        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            raise Transient("503")

    desk = Desk(tmp_path / "a", Broken(store.url))
    committer = desk.open()
    committer.check_complete(CheckComplete((CommitRef(1, 9),), 2))
    assert desk.next(PartsCounted) == PartsCounted(CommitRef(1, 9), 0, None)
    committer.close()


@pytest.mark.fault("S25")
def test_an_unsigned_part_makes_no_checkpoint_whole(tmp_path: Path, store: FileStore) -> None:
    """A reader with a key would refuse it."""
    keys = RunKeys("r", Signer(b"k" * 32))
    for node in (0, 1):
        committed.commit(store, FILES, step=9, node=node, nodes=2, upload_nonce=f"a{node}")
    assert commit.parts_committed(store, keys, CommitRef(1, 9), 2) == 1


class Vm:
    def __init__(self, directory: Path, store: FileStore) -> None:
        directory.mkdir()
        run = prepare(directory, "r")
        story = Story()
        story.staging = [replace(a_set(50), nodes=2)]  # sealed here, newer than every whole commit
        story.scan()
        settings = replace(story.state.settings, several_vms=True)
        self.state: State = replace(story.state, settings=settings, job_start_id="start")
        self.resume = Resume(
            RestoreContext(store, KEYS, run, lambda: self.state, threading.Event())
        )
        self.answers: queue.Queue[Message] = queue.Queue()

    def ask(self, wanted: CommitRef | None = None) -> Restored:
        query = RestoreQuery("q", job_start_id="start")
        if wanted is not None:
            query = RestoreQuery("q", generation=wanted.generation, step=wanted.step)
        self.resume.ask(query, self.answers.put, lambda _: None)
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
        committed.commit(store, files, step=20, node=node, nodes=2, upload_nonce=f"a{node}")
    committed.commit(store, {"rank-00000/w": b"1"}, step=30, node=0, nodes=2, upload_nonce="b0")
    first, second = Vm(tmp_path / "v0", store), Vm(tmp_path / "v1", store)
    chosen = first.ask()
    assert (chosen.step, chosen.error) == (20, "")
    committed.commit(store, {"rank-00001/w": b"1"}, step=30, node=1, nodes=2, upload_nonce="b1")
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
        committed.commit(store, files, step=20, node=node, nodes=2, upload_nonce=f"a{node}")
    vm = Vm(tmp_path / "v0", store)
    claimed = vm.state
    vm.state = replace(claimed, job_start_id="earlier")
    vm.resume.ask(RestoreQuery("q", job_start_id="start"), vm.answers.put, lambda _: None)
    vm.resume.ask(RestoreQuery("named", generation=1, step=20), vm.answers.put, lambda _: None)
    assert vm.answer().query_id == "named", "the other query waits, and delays no other one"
    vm.state = replace(claimed, generation=None)
    for node in (0, 1):
        files = {f"rank-{node:05d}/w": b"1"}
        committed.commit(store, files, step=30, node=node, nodes=2, upload_nonce=f"b{node}")
    vm.state = claimed
    second = vm.answer()
    assert (second.query_id, second.step) == ("q", 30)


def test_the_last_vm_of_a_job_resumes_from_its_own_disk(tmp_path: Path, store: FileStore) -> None:
    """Its sets are whole.  An older commit would leave a newer set behind, to be committed later."""
    committed.commit(store, {"rank-00000/w": b"1"}, step=20)
    vm = Vm(tmp_path / "v0", store)
    own = a_set(50)
    vm.state = replace(
        vm.state, job_start_id="alone:vm:2", staged=(own,), inherited=frozenset(), generation=2
    )
    vm.resume.ask(RestoreQuery("q"), vm.answers.put, lambda _: None)
    answer = vm.answer()
    assert (answer.step, Path(answer.path).name) == (50, own.directory)


def test_an_answer_to_one_start_is_not_given_to_the_next(tmp_path: Path, store: FileStore) -> None:
    """The job started again on two VMs, and seconds later one of them is alone."""
    vm = Vm(tmp_path / "v0", store)
    vm.state = replace(vm.state, staged=())
    assert vm.ask().path == ""
    for node in (0, 1):
        files = {f"rank-{node:05d}/w": b"1"}
        committed.commit(store, files, step=20, node=node, nodes=2, upload_nonce=f"a{node}")
    vm.state = replace(vm.state, job_start_id="alone:vm:1")
    vm.resume.ask(RestoreQuery("q"), vm.answers.put, lambda _: None)
    assert vm.answer().step == 20


def test_a_job_over_several_vms_is_refused_without_the_setting() -> None:
    """Each daemon would claim another generation and fence the others: the error names the setting."""
    hello = Hello(run="", rank=1, world_size=2, node=1, nodes=2)
    assert "run.several_vms" in problem_with(hello, "r", several_vms=False)
    assert not problem_with(hello, "r", several_vms=True)
