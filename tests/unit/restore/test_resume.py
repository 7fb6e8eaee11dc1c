# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a trainer resumes from: real directories, a real store, real downloads."""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansong.layout import RESTORED_DIRECTORY
from swansong.protocol import Message, Restored, RestoreQuery, Restoring
from swansong_bucket.errors import Permanent
from swansong_bucket.format import wall
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef, Health, SourceStatus, Staged
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.file.store import FileStore
from swansongd.core.events import Event, RolledBack, SourceChanged
from swansongd.core.state import State
from swansongd.restore import resume as resume_module
from swansongd.restore.context import RestoreContext
from swansongd.restore.resume import BUDGET_S, Resume
from swansongd.staging.prepare import prepare

from testkit import committed
from testkit.odd_store import OddStore
from testkit.records import KEY
from testkit.story import Story, a_set
from testkit.waiting import until

FILES = {"weights.bin": bytes(range(256)) * 20}


class Vm:
    """A store, the staging directory of the run, and the state of the decision loop."""

    def __init__(self, directory: Path) -> None:
        self.bucket = directory / "bucket"
        self.store = committed.file_store(self.bucket)
        (directory / "staging").mkdir()
        self.run = prepare(directory / "staging", "r")
        self.staging = self.run.path
        self.story = Story()
        self.state: State = self.story.state
        self.keys = RunKeys("r")

    def knows(
        self, *staged: Staged, is_of_earlier_boot: bool = False, newest: CommitRef | None = None
    ) -> None:
        """Put sets of a start with generation 2 into staging."""
        story = Story(newest=newest)
        story.staging = list(staged)
        story.join()
        story.scan()
        if is_of_earlier_boot:
            story = story.restarted(newest=newest, is_other_boot=True)
        self.story, self.state = story, story.state

    def begins(self, start_id: str, *, nodes: int = 1) -> None:
        """A rank of this start connects, and the start claims its generation."""
        self.story.join(ranks=2, start_id=start_id, nodes=nodes)
        self.state = self.story.state

    def commit(self, step: int, generation: int = 1, **options: Any) -> Path:
        """Commit; returns the file that holds the weights in the store."""
        made = committed.commit(
            self.store, FILES, step=step, generation=generation, nonce=f"a{step}", **options
        )
        return self.bucket / made.chunks[0].key

    def context(self, **options: Any) -> RestoreContext:
        return RestoreContext(
            self.store, self.keys, self.run, lambda: self.state, threading.Event(), **options
        )

    def resume(self) -> Resume:
        return Resume(self.context())

    def ask(self) -> Restored:
        """The answer of a daemon that has just started, without a cached answer."""
        answers: queue.Queue[Message] = queue.Queue()
        self.resume().ask(RestoreQuery("q1"), answers.put, lambda _: None)
        return self.answer(answers)

    def go_back(
        self, before_step: int, resume: Resume | None = None, number: int = 1
    ) -> tuple[Restored, list[Event]]:
        """The answer to a rank that rolls back, which begins another start before it asks."""
        answers: queue.Queue[Message] = queue.Queue()
        posted: list[Event] = []
        start_id = f"a~{number}"
        if self.state.start is None or self.state.start.id != start_id:
            self.begins(start_id)
        query = RestoreQuery("q1", rollback=number, before_step=before_step, start_id=start_id)
        (resume or self.resume()).ask(query, answers.put, posted.append)
        return self.answer(answers), posted

    def answer(self, answers: queue.Queue[Message]) -> Restored:
        while True:
            answer = answers.get(timeout=20)
            if isinstance(answer, Restored):
                assert answer.query_id == "q1"
                return answer
            assert isinstance(answer, Restoring)


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


def test_a_fresh_run_has_no_checkpoint_to_resume_from(vm: Vm) -> None:
    """The answer has neither a path nor an error."""
    assert vm.ask() == Restored("q1")


def test_a_commit_is_downloaded_byte_for_byte(vm: Vm) -> None:
    vm.commit(100, created=wall.text(time.time() - 3600))
    answer = vm.ask()
    assert (answer.step, answer.generation, answer.error) == (100, 1, "")
    assert answer.age_s is not None
    assert 3599 <= answer.age_s < 4000
    assert Path(answer.path).parent == vm.staging / RESTORED_DIRECTORY
    assert committed.tree(Path(answer.path)) == FILES


@pytest.mark.fault("G11")
def test_the_chunks_of_an_interrupted_download_are_reused(vm: Vm) -> None:
    """The store fails after five of six chunks: the next download fetches only the sixth."""
    vm.commit(100)
    last = committed.chunk_of(FILES["weights.bin"][5 * committed.CHUNK_BYTES :], nonce="a100").key

    def fail_late(key: str, _offset: int, _window: memoryview) -> None:
        if key == last:
            (journal,) = vm.staging.glob(f"{RESTORED_DIRECTORY}/.*.partial-*/journal")
            until(lambda: journal.read_bytes().count(b"\n") == 6, what="the other chunks")
            raise Permanent("access denied")

    vm.store = OddStore(vm.bucket, fail_late)
    assert "access denied" in vm.ask().error
    vm.store = again = OddStore(vm.bucket)
    answer = vm.ask()
    assert (answer.step, answer.error) == (100, "")
    assert committed.tree(Path(answer.path)) == FILES
    assert [key for key, _, _ in again.given] == [last]
    assert [path.name for path in (vm.staging / RESTORED_DIRECTORY).iterdir()] == [
        Path(answer.path).name
    ]


@pytest.mark.parametrize("step", [100, 101])
def test_a_local_set_as_new_as_the_commit_needs_no_download(vm: Vm, step: int) -> None:
    """The trainer crashed but the VM runs: it resumes from the local disk."""
    vm.commit(100, generation=2)
    local = a_set(step, written_ns=time.time_ns() - 60 * 10**9)
    vm.knows(local, newest=CommitRef(2, 100))
    answer = vm.ask()
    assert answer == Restored("q1", str(vm.staging / local.directory), step, 2)
    assert answer.age_s is not None
    assert 60 <= answer.age_s < 400
    assert not (vm.staging / RESTORED_DIRECTORY).exists()


def test_a_newer_commit_beats_an_older_set(vm: Vm) -> None:
    vm.commit(100, generation=2)
    vm.knows(a_set(90), newest=CommitRef(2, 100))
    assert vm.ask().step == 100


@pytest.mark.parametrize("step", [60, 100])
def test_a_set_of_the_newer_start_beats_a_commit_of_an_earlier_one(vm: Vm, step: int) -> None:
    """Generation 2 began at a lower step than the newest commit of generation 1; its set is newer."""
    vm.commit(100, generation=1)
    vm.knows(a_set(step), newest=CommitRef(1, 100))
    answer = vm.ask()
    assert (answer.step, answer.generation) == (step, 2)


@pytest.mark.fault("D06")
def test_a_set_that_survived_on_the_disk_is_as_good_as_a_commit(vm: Vm) -> None:
    """The newer of the two is taken, ordered by generation, then by step."""
    vm.commit(100)
    local = a_set(200)
    vm.knows(local, is_of_earlier_boot=True, newest=CommitRef(1, 100))
    assert vm.ask().path == str(vm.staging / local.directory)
    vm.commit(150, generation=3)  # another VM resumed from the commit
    assert (vm.ask().step, vm.ask().generation) == (150, 3)


@pytest.mark.fault("D06")
def test_a_set_that_may_be_torn_is_not_used(vm: Vm) -> None:
    """An emergency set of an earlier boot was not synced to the disk: the older commit is taken."""
    vm.commit(100)
    story = Story(claimed=False)
    story.state = replace(story.state, settings=replace(story.state.settings, booted_wall_ns=2))
    story.staging = [a_set(200, request_id="r1")]
    story.scan()
    vm.state = story.state
    assert vm.ask().step == 100


def test_a_set_sealed_just_before_the_query_is_found(vm: Vm) -> None:
    """Staging is scanned before the choice, and the choice waits for the scan."""
    vm.commit(100)
    story = Story(newest=CommitRef(1, 100))
    story.join()
    story.state = replace(  # the clock of the story may be ahead of that of a machine just booted
        story.state, staging=replace(story.state.staging, scanned_mono_s=time.monotonic())
    )
    vm.state = story.state

    def rescan() -> None:
        def found() -> None:
            story.staging = [a_set(110)]
            story.now = time.monotonic() + 1
            story.scan()
            vm.state = story.state

        threading.Timer(0.05, found).start()

    answers: queue.Queue[Message] = queue.Queue()
    resume = Resume(vm.context(rescan=rescan))
    resume.ask(RestoreQuery("q1"), answers.put, lambda _: None)
    assert vm.answer(answers).step == 110


def test_an_unusable_set_is_not_used(vm: Vm) -> None:
    vm.commit(100)
    torn = a_set(200)
    vm.knows(torn, newest=CommitRef(1, 100))
    vm.state = replace(vm.state, staging=replace(vm.state.staging, unusable=frozenset({torn.id})))
    assert vm.ask().step == 100


def test_a_damaged_commit_is_skipped(vm: Vm) -> None:
    """One bit of the newest commit is wrong: the commit before it is restored."""
    vm.commit(100)
    committed.flip_bit(vm.commit(200), 77)
    answer = vm.ask()
    assert (answer.step, answer.error) == (100, "")
    assert committed.tree(Path(answer.path)) == FILES


def test_a_run_of_damaged_commits_is_an_error_and_not_fresh(vm: Vm) -> None:
    """Training from scratch would supersede commits that an operator can repair."""
    for step in (100, 200):
        committed.flip_bit(vm.commit(step), 77)
    answer = vm.ask()
    assert answer.path == ""
    assert answer.error != ""


@pytest.mark.fault("S25")
def test_a_run_of_unsigned_commits_is_an_error_and_not_fresh(vm: Vm) -> None:
    """With a wrong key, or a key that was added later, no trainer starts from scratch."""
    vm.commit(100)
    vm.store = signed(vm.store, KEY)
    answer = vm.ask()
    assert answer.path == ""
    assert "none has a name that this key signed" in answer.error


@pytest.mark.fault("G16")
def test_an_unknown_object_among_the_commits_is_an_error_and_not_a_fresh_run(vm: Vm) -> None:
    vm.store.put("r/commits/100000000/000000000001/00000-of-00001.json", b"{}")
    answer = vm.ask()
    assert answer.path == ""
    assert "r/commits/100000000" in answer.error


def test_a_missing_store_is_an_error_and_not_a_fresh_run(vm: Vm) -> None:
    vm.commit(100)
    vm.bucket.rename(vm.bucket.with_name("hidden"))
    answer = vm.ask()
    assert answer.path == ""
    assert "does not exist" in answer.error


def test_earlier_downloads_are_removed(vm: Vm) -> None:
    """Only the newest download stays; if the next one fails, the old one does."""
    vm.commit(100)
    first, second = vm.ask(), vm.ask()
    assert first.path != second.path
    assert [str(path) for path in (vm.staging / RESTORED_DIRECTORY).iterdir()] == [second.path]
    vm.store.put(vm.keys.commit(CommitRef(1, 100), 0, 1), b"{}")
    assert vm.ask().error
    assert committed.tree(Path(second.path)) == FILES


# ---------------------------------------------------------------- rollback to a healthy checkpoint

GOOD = {"loss_is_finite": 1.0}
BAD = {"loss_is_finite": 0.0}


def test_a_rollback_fetches_the_newest_healthy_commit(vm: Vm) -> None:
    """It is older than the suspect step; unhealthy, damaged and incomplete commits are skipped."""
    for step, health in ((10, GOOD), (20, GOOD), (30, BAD), (35, {}), (40, GOOD)):
        vm.commit(step, health=health)
    vm.commit(25, nodes=2, health=GOOD)
    answer, posted = vm.go_back(40)
    assert (answer.step, answer.generation) == (20, 1)
    assert committed.tree(Path(answer.path)) == FILES
    assert posted == [RolledBack(20)]


def test_a_rollback_prefers_a_local_set(vm: Vm) -> None:
    """The newest healthy set in staging, also of an earlier boot, if it is as new as the commit."""
    vm.commit(20, health=GOOD)
    sets = [replace(a_set(step), health=health) for step, health in ((30, GOOD), (40, BAD))]
    vm.knows(*sets)
    answer, posted = vm.go_back(45)
    assert (answer.path, answer.step) == (str(vm.staging / sets[0].directory), 30)
    assert posted == [RolledBack(30)]
    assert vm.go_back(30)[0].step == 20
    vm.knows(*sets, is_of_earlier_boot=True)
    assert vm.go_back(45, number=3)[0].step == 30


def test_all_ranks_get_the_same_rollback_and_it_counts_once(vm: Vm) -> None:
    """Also if they ask an hour later.  The next rollback is answered separately."""
    for step in (10, 20):
        vm.commit(step, health=GOOD)
    now_s = [0.0]
    resume = Resume(vm.context(monotonic=lambda: now_s[0]))
    first, posted = vm.go_back(21, resume)
    assert (first.step, len(posted)) == (20, 1)
    now_s[0] = 3600.0
    assert vm.go_back(15, resume) == (first, [])
    second, posted = vm.go_back(15, resume, number=2)
    assert (second.step, posted) == (10, [RolledBack(10)])


def test_without_a_healthy_checkpoint_a_rollback_fails(vm: Vm) -> None:
    """The answer is an error, and no set is dropped."""
    vm.commit(10, health=BAD)
    answer, posted = vm.go_back(40)
    assert "no healthy checkpoint before step 40" in answer.error
    assert not posted


def test_a_commit_that_the_store_refuses_is_skipped_but_is_not_absent(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses some manifests: an older commit is taken; without any, the answer is an error."""
    vm.store.put(vm.keys.generation(1), b"{}")
    for step in (10, 20):
        vm.commit(step, health=GOOD)
    refused = {vm.keys.commit(CommitRef(1, 20), 0, 1)}
    get = FileStore.get

    def getting(self: FileStore, key: str) -> bytes:
        if key in refused:
            raise Permanent(f"get {key}: HTTP 403")
        return get(self, key)

    monkeypatch.setattr(FileStore, "get", getting)
    assert vm.ask().step == 10
    assert vm.go_back(40)[0].step == 10
    refused.add(vm.keys.commit(CommitRef(1, 10), 0, 1))
    for answer in (vm.ask(), vm.go_back(40)[0]):
        assert answer.path == ""
        assert "403" in answer.error


def test_over_several_vms_a_rollback_chooses_a_whole_commit_and_posts_nothing(vm: Vm) -> None:
    """Neither an incomplete commit nor a local set will do; the ranks themselves begin the next start."""
    vm.commit(10, health=GOOD)
    vm.commit(20, nodes=2, health=GOOD)
    vm.begins("a~1", nodes=2)
    answer, posted = vm.go_back(40)
    assert (answer.step, answer.generation) == (10, 1)
    assert not posted
    answer, posted = vm.go_back(10)
    assert "no healthy checkpoint before step 10" in answer.error


def test_the_chosen_commit_is_fetched_once_the_start_has_begun(vm: Vm) -> None:
    """Before that, this daemon may still commit sets of the start before."""
    vm.commit(10, health=GOOD)
    vm.begins("a", nodes=2)
    answers: queue.Queue[Message] = queue.Queue()
    resume = vm.resume()
    query = RestoreQuery("q1", generation=1, step=10, start_id="a~1")
    resume.ask(query, answers.put, lambda _: None)
    assert answers.empty()
    until(lambda: resume._waiting, what="the query in the queue")
    other: queue.Queue[Message] = queue.Queue()
    resume.ask(RestoreQuery("q1", generation=1, step=10), other.put, lambda _: None)
    assert vm.answer(other).step == 10
    assert answers.empty(), "a later query was answered, and this one still waits"
    vm.begins("a~1", nodes=2)
    assert vm.answer(answers).step == 10


def test_a_choice_waits_for_the_generation_of_its_start(vm: Vm) -> None:
    """The answer sees every commit of earlier starts until then."""
    vm.commit(10)
    vm.story.grants = False
    vm.begins("a")
    answers: queue.Queue[Message] = queue.Queue()
    resume = vm.resume()
    resume.ask(RestoreQuery("q1", start_id="a"), answers.put, lambda _: None)
    other: queue.Queue[Message] = queue.Queue()
    resume.ask(RestoreQuery("q1"), other.put, lambda _: None)
    assert vm.answer(other).step == 10
    vm.commit(20)
    assert answers.empty()
    vm.story.grant("a", CommitRef(1, 20))
    vm.state = vm.story.state
    assert vm.answer(answers).step == 20


def test_a_query_for_a_start_that_never_begins_times_out(vm: Vm) -> None:
    """The training was started again: the answer is an error, before the trainer's own timeout."""
    vm.begins("a", nodes=2)
    now_s = [0.0]
    resume = Resume(vm.context(monotonic=lambda: now_s[0]))
    answers: queue.Queue[Message] = queue.Queue()
    query = RestoreQuery("q1", generation=1, step=10, start_id="other")
    resume.ask(query, answers.put, lambda _: None)
    now_s[0] = BUDGET_S + 1
    assert "started again" in vm.answer(answers).error


@pytest.mark.fault("O07")
def test_the_error_of_a_start_without_a_generation_names_the_problem_of_the_store(vm: Vm) -> None:
    """One VM of a job lacks credentials: the log of its trainer has to name the cause."""
    vm.story.grants = False
    status = SourceStatus(
        source="store", health=Health.BLIND, reason="no credentials for S3", since_mono_s=0.0
    )
    vm.story.tell(SourceChanged(status))
    vm.begins("a", nodes=2)
    now_s = [0.0]
    resume = Resume(vm.context(monotonic=lambda: now_s[0]))
    answers: queue.Queue[Message] = queue.Queue()
    resume.ask(RestoreQuery("q1", start_id="a"), answers.put, lambda _: None)
    now_s[0] = BUDGET_S + 1
    error = vm.answer(answers).error
    assert "no generation" in error
    assert "no credentials for S3" in error


# ---------------------------------------------------------------- hostile trainers


@pytest.mark.fault("S24")
def test_a_link_in_place_of_the_restored_directory_is_moved_aside(vm: Vm, tmp_path: Path) -> None:
    """Nothing is written or deleted behind the link, and the trainer still gets its checkpoint."""
    precious = tmp_path / "precious"
    (precious / "directory").mkdir(parents=True)
    (precious / "directory" / "file").write_text("precious")
    partial = precious / ".0123abcd.partial-0123456789abcdef"
    partial.mkdir()
    (vm.staging / RESTORED_DIRECTORY).symlink_to(precious)
    vm.commit(100)
    answer = vm.ask()
    assert answer.error == ""
    assert committed.tree(Path(answer.path)) == FILES
    assert not (vm.staging / RESTORED_DIRECTORY).is_symlink()
    vm.ask()
    assert sorted(path.name for path in precious.iterdir()) == [partial.name, "directory"]
    assert (precious / "directory" / "file").read_text() == "precious"


@pytest.mark.fault("S12", "S24")
def test_one_thread_and_a_bounded_queue_answer_all_queries(vm: Vm) -> None:
    """A flood of queries starts no threads; queries above the limit are refused immediately, by id."""
    vm.commit(100)
    resume = vm.resume()
    threads = threading.active_count()
    answers: queue.Queue[Message] = queue.Queue()
    held = RestoreQuery("held", generation=1, step=100, start_id="never begins")
    for _ in range(resume_module.QUERIES_MAX):
        resume.ask(held, answers.put, lambda _: None)
    resume.ask(RestoreQuery("one too many"), answers.put, lambda _: None)
    answer = answers.get(timeout=20)
    assert isinstance(answer, Restored)
    assert (answer.query_id, "wait already" in answer.error) == ("one too many", True)
    assert threading.active_count() <= threads + 1


def test_a_reply_that_fails_affects_no_other_peer(vm: Vm) -> None:
    """No reply to a long query id fits a message; the other peers get theirs."""
    vm.commit(100)
    resume = vm.resume()

    def broken(_: Message) -> None:
        raise ValueError("the message is too large")

    answers: queue.Queue[Message] = queue.Queue()
    resume.ask(RestoreQuery("q0"), broken, lambda _: None)
    resume.ask(RestoreQuery("q1"), answers.put, lambda _: None)
    assert vm.answer(answers).step == 100


@pytest.mark.parametrize("umask", [0o000, 0o007, 0o077])
def test_only_the_daemon_can_change_restored_files(vm: Vm, umask: int) -> None:
    """Files have mode 0640 and directories 0750, with any umask of the daemon."""
    committed.commit(vm.store, {"deep/er/file": b"1", "top": b"2"}, step=100)
    before = os.umask(umask)
    try:
        answer = vm.ask()
    finally:
        os.umask(before)
    top = Path(answer.path)
    modes = {
        str(path.relative_to(top.parent.parent)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in (top.parent, top, *top.rglob("*"))
    }
    found = {name.removeprefix(f"restored/{top.name}"): mode for name, mode in modes.items()}
    assert found == {
        "restored": "0o750", "": "0o750", "/top": "0o640",
        "/deep": "0o750", "/deep/er": "0o750", "/deep/er/file": "0o640",
    }  # fmt: skip


@pytest.mark.fault("S12")
def test_a_query_for_a_missing_commit_reads_no_other(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread answers all queries: none of them may read the manifests of the whole run."""
    for step in range(100, 110):
        vm.commit(step)
    read: list[str] = []
    get = vm.store.get
    monkeypatch.setattr(vm.store, "get", lambda key: read.append(key) or get(key))
    answers: queue.Queue[Message] = queue.Queue()
    vm.resume().ask(RestoreQuery("q1", generation=5, step=7), answers.put, lambda _: None)
    assert "step 7 of run r" in vm.answer(answers).error
    assert not read
