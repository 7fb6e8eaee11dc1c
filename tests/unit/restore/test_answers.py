# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a trainer resumes from: real directories, a real store, real downloads."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansong.protocol import Message, Restored, RestoreQuery
from swansong_bucket.errors import Permanent
from swansong_bucket.format import wall
from swansong_bucket.model import CommitRef, Health, Staged
from swansong_bucket.retention.prune import prune
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file.store import FileStore
from swansongd.core.events import CommitSkipped, Event, RolledBack
from swansongd.observe.facts import Observed
from swansongd.restore import answers, downloads
from swansongd.restore.answers import BUDGET_S

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.records import KEY, NO_RULE
from testkit.restore_rig import RestoreRig
from testkit.story import Story, a_set
from testkit.waiting import until

FILES = {"weights.bin": bytes(range(256)) * 20}
NEWER_FILES = {"weights.bin": bytes(5000)}


class Vm(RestoreRig[ObjectStore]):
    """A store, the staging directory of the run, and the state of the decision loop."""

    def __init__(self, directory: Path) -> None:
        self.bucket = directory / "bucket"
        super().__init__(directory / "staging", committed.file_store(self.bucket))
        self.staging = self.run.path
        self.keys = self.context.keys

    def knows(
        self, *staged: Staged, is_of_earlier_boot: bool = False, newest: CommitRef | None = None
    ) -> None:
        """Put sets of a start with generation 2 into staging."""
        self.story = Story(newest=newest)
        self.story.staging = list(staged)
        self.story.join()
        self.story.scan()
        if is_of_earlier_boot:
            self.story = self.story.restarted(newest=newest, is_other_boot=True)

    def begins(self, start_id: str, *, nodes: int = 1) -> None:
        """A rank of this start connects, and the start claims its generation."""
        self.story.join(ranks=2, start_id=start_id, nodes=nodes)

    def commit(self, step: int, generation: int = 1, **options: Any) -> Path:
        """Commit; returns the file that holds the weights in the store."""
        made = committed.commit(
            self.store, FILES, step=step, generation=generation, nonce=f"a{step}", **options
        )
        return self.bucket / made.chunks[0].key

    def answer(self) -> Restored:
        """The answer of a daemon that has just started, without a cached answer."""
        self.start_daemon()
        return self.ask().answer()

    def go_back(
        self, before_step: int, *, number: int = 1, is_restarted: bool = True
    ) -> tuple[Restored, list[Event]]:
        """The answer to a rank that rolls back, which begins another start before it asks.

        Args:
            is_restarted: the daemon has just started, and has no answer in memory.
        """
        if is_restarted:
            self.start_daemon()
        start_id = f"a~{number}"
        if self.state.start is None or self.state.start.id != start_id:
            self.begins(start_id)
        self.posted.clear()
        answer = self.ask(rollback=number, before_step=before_step, start_id=start_id).answer()
        return answer, list(self.posted)


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


def test_a_commit_is_downloaded_byte_for_byte(vm: Vm) -> None:
    vm.commit(100, created=wall.text(time.time() - 3600))
    answer = vm.answer()
    assert (answer.step, answer.generation, answer.error) == (100, 1, "")
    assert answer.age_s is not None
    assert 3599 <= answer.age_s < 4000
    assert Path(answer.path).parent == vm.restored
    assert committed.tree(Path(answer.path)) == FILES


def restored_during_a_commit(directory: Path, number: int) -> tuple[Restored, bool]:
    """The answer, if another VM commits step 200, and prunes, before a request; whether it was reached."""
    store = MemoryStore()
    committed.commit(store, FILES, step=100, nonce="a100")
    rig = RestoreRig(directory, store)
    requests = itertools.count()

    def before(*_request: str) -> None:
        if next(requests) == number:
            committed.commit(store, NEWER_FILES, step=200, nonce="a200")
            prune(store, rig.context.keys, replace(NO_RULE, keep_last=1), now_wall_s=time.time())

    store.before = before
    return rig.ask().answer(), next(requests) > number


@pytest.mark.fault("G13")
def test_a_commit_during_a_restore_is_restored_whole_or_not_at_all(tmp_path: Path) -> None:
    """Another VM may commit before any request of the restore, and prune with the fewest commits kept."""
    steps = set()
    for number in itertools.count():
        answer, was_reached = restored_during_a_commit(tmp_path / str(number), number)
        files = {100: FILES, 200: NEWER_FILES}[answer.step]
        assert committed.tree(Path(answer.path)) == files
        steps.add(answer.step)
        if not was_reached:
            break
    assert steps == {100, 200}


@pytest.mark.parametrize("step", [100, 101])
def test_a_local_set_as_new_as_the_commit_needs_no_download(vm: Vm, step: int) -> None:
    """The trainer crashed but the VM runs: it resumes from the local disk."""
    vm.commit(100, generation=2)
    local = a_set(step, written_ns=time.time_ns() - 60 * 10**9)
    vm.knows(local, newest=CommitRef(2, 100))
    answer = vm.answer()
    assert answer == Restored("q", str(vm.staging / local.directory), step, 2)
    assert answer.age_s is not None
    assert 60 <= answer.age_s < 400
    assert not vm.restored.exists()


def test_a_set_sealed_just_before_the_query_is_found(vm: Vm) -> None:
    """Staging is scanned before the choice, and the choice waits for the scan."""
    vm.commit(100)
    vm.story = story = Story(newest=CommitRef(1, 100))
    story.join()
    story.state = replace(  # the clock of the story may be ahead of that of a machine just booted
        story.state, staging=replace(story.state.staging, scanned_mono_s=time.monotonic())
    )

    def rescan() -> None:
        def found() -> None:
            story.staging = [a_set(110)]
            story.now = time.monotonic() + 1
            story.scan()

        threading.Timer(0.05, found).start()

    vm.start_daemon(rescan=rescan)
    assert vm.ask().answer().step == 110


@pytest.mark.fault("S25")
def test_a_run_of_unsigned_commits_is_an_error_and_not_fresh(vm: Vm) -> None:
    """With a wrong key, or a key that was added later, no trainer starts from scratch."""
    vm.commit(100)
    vm.store = signed(vm.store, KEY)
    answer = vm.answer()
    assert answer.path == ""
    assert "none has a name that this key signed" in answer.error


def test_a_missing_store_is_an_error_and_not_a_fresh_run(vm: Vm) -> None:
    vm.commit(100)
    vm.bucket.rename(vm.bucket.with_name("hidden"))
    answer = vm.answer()
    assert answer.path == ""
    assert "does not exist" in answer.error


def test_a_disk_error_is_an_answer(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the directory, and the next query gets the checkpoint."""
    vm.commit(100)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(downloads, "interrupted", fail)
        error = vm.answer().error
    assert error.startswith(f"{vm.context.run.path} cannot be used: Too many open files"), error
    assert vm.answer().step == 100


def test_a_query_that_names_a_generation_without_a_step_is_refused(vm: Vm) -> None:
    """Only a trainer that is not ours sends it.  It is no fault of the daemon, which answers the next one."""
    vm.commit(100)
    answer = vm.ask(RestoreQuery("q", generation=1)).answer()
    assert answer.error.startswith("generation 1 has no commit of step -1")
    assert vm.ask().answer().step == 100


def test_the_decision_loop_knows_of_a_damaged_commit(vm: Vm) -> None:
    """No SAFE may rest on a commit that the next VM would skip."""
    vm.commit(100)
    damaged = vm.commit(200)
    committed.flip_bit(damaged, 3)
    posted = list[Observed]()
    vm.start_daemon(post=posted.append)
    assert vm.ask().answer().step == 100
    assert CommitSkipped(CommitRef(1, 200)) in posted


@pytest.mark.fault("M09")
def test_chunks_that_only_the_mirror_had_are_not_known(vm: Vm) -> None:
    """A commit that named them could not be restored from the store."""
    damaged = vm.commit(100)
    mirror, known = MemoryStore(), list[CommitRef]()
    mirror.objects = {info.key: vm.store.get(info.key) for info in vm.store.list("")}
    committed.flip_bit(damaged, 3)
    vm.start_daemon(mirror=mirror, fetched=lambda ref, _shards: known.append(ref))
    assert committed.tree(Path(vm.ask().answer().path)) == FILES
    assert not known


def test_earlier_downloads_are_removed(vm: Vm) -> None:
    """Only the newest download stays; if the next one fails, the old one does."""
    vm.commit(100)
    first, second = vm.answer(), vm.answer()
    assert first.path != second.path
    assert [str(path) for path in vm.restored.iterdir()] == [second.path]
    vm.store.put(vm.keys.commit(CommitRef(1, 100), 0, 1), b"{}")
    assert vm.answer().error
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
    vm.start_daemon(monotonic=lambda: now_s[0])
    first, posted = vm.go_back(21, is_restarted=False)
    assert (first.step, len(posted)) == (20, 1)
    now_s[0] = 3600.0
    assert vm.go_back(15, is_restarted=False) == (first, [])
    second, posted = vm.go_back(15, number=2, is_restarted=False)
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
    assert vm.answer().step == 10
    assert vm.go_back(40)[0].step == 10
    refused.add(vm.keys.commit(CommitRef(1, 10), 0, 1))
    for answer in (vm.answer(), vm.go_back(40)[0]):
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
    asked = vm.ask(generation=1, step=10, start_id="a~1")
    until(lambda: vm.resume._waiting, what="the query in the queue")
    assert vm.ask(generation=1, step=10).answer().step == 10
    assert asked.messages.empty(), "a later query was answered, and this one still waits"
    vm.begins("a~1", nodes=2)
    assert asked.answer().step == 10


def test_a_query_for_a_start_that_never_begins_times_out(vm: Vm) -> None:
    """The training was started again: the answer is an error, before the trainer's own timeout."""
    vm.begins("a", nodes=2)
    now_s = [0.0]
    vm.start_daemon(monotonic=lambda: now_s[0])
    asked = vm.ask(generation=1, step=10, start_id="other")
    now_s[0] = BUDGET_S + 1
    assert "started again" in asked.answer().error


@pytest.mark.fault("O07")
def test_the_error_of_a_start_without_a_generation_names_the_problem_of_the_store(vm: Vm) -> None:
    """One VM of a job lacks credentials: the log of its trainer has to name the cause."""
    vm.story.grants = False
    vm.story.health("store", Health.BLIND, "no credentials for S3")
    vm.begins("a", nodes=2)
    now_s = [0.0]
    vm.start_daemon(monotonic=lambda: now_s[0])
    asked = vm.ask(start_id="a")
    now_s[0] = BUDGET_S + 1
    error = asked.answer().error
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
    vm.restored.symlink_to(precious)
    vm.commit(100)
    answer = vm.answer()
    assert answer.error == ""
    assert committed.tree(Path(answer.path)) == FILES
    assert not vm.restored.is_symlink()
    vm.answer()
    assert sorted(path.name for path in precious.iterdir()) == [partial.name, "directory"]
    assert (precious / "directory" / "file").read_text() == "precious"


@pytest.mark.fault("S12", "S24")
def test_one_thread_and_a_bounded_queue_answer_all_queries(vm: Vm) -> None:
    """A flood of queries starts no threads; queries above the limit are refused immediately, by id."""
    vm.commit(100)
    threads = threading.active_count()
    held = RestoreQuery("held", generation=1, step=100, start_id="never begins")
    for _ in range(answers.QUERIES_MAX):
        vm.ask(held)
    answer = vm.ask(RestoreQuery("one too many")).answer()
    assert (answer.query_id, "wait already" in answer.error) == ("one too many", True)
    assert threading.active_count() <= threads + 1


def test_a_reply_that_fails_affects_no_other_peer(vm: Vm) -> None:
    """No reply to a long query id fits a message; the other peers get theirs."""
    vm.commit(100)

    def broken(_: Message) -> None:
        raise ValueError("the message is too large")

    vm.resume.ask(RestoreQuery("q0"), broken, lambda _: None)
    assert vm.ask().answer().step == 100


@pytest.mark.parametrize("umask", [0o000, 0o007, 0o077])
def test_only_the_daemon_can_change_restored_files(vm: Vm, umask: int) -> None:
    """Files have mode 0640 and directories 0750, with any umask of the daemon."""
    committed.commit(vm.store, {"deep/er/file": b"1", "top": b"2"}, step=100)
    before = os.umask(umask)
    try:
        answer = vm.answer()
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
    assert "step 7 of run r" in vm.ask(generation=5, step=7).answer().error
    assert not read
