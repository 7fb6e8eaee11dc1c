# SPDX-License-Identifier: Apache-2.0
"""Queries of several ranks, against a real store: all ranks of one start get the same checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from swansong.protocol import Restored, RestoreQuery, Restoring
from swansong_bucket.stores.base import ObjectStore

from testkit.committed import commit, file_store, tree
from testkit.odd_store import OddStore
from testkit.restore_rig import Asked, RestoreRig
from testkit.story import Story, a_set
from testkit.waiting import until

FILES = {"rank-00000/model.bin": b"a" * 5000, "rank-00001/model.bin": b"b" * 5000}


class Vm(RestoreRig[OddStore]):
    """A VM with three ranks, which asks a store whose reads can be held."""

    def __init__(self, tmp_path: Path) -> None:
        file_store(tmp_path / "store")
        self.may_read = threading.Event()
        self.may_read.set()
        self.now_s = 1000.0
        store = OddStore(tmp_path / "store", lambda *_: self.may_read.wait(60))
        super().__init__(tmp_path / "staging", store, monotonic=lambda: self.now_s)
        self.story.join(ranks=3, start_id="first")

    def of_rank(self, rank: int, start_id: str = "first") -> Asked:
        return self.ask(RestoreQuery(f"rank-{rank}", start_id=start_id))

    def answer(self, rank: int = 0, start_id: str = "first") -> Restored:
        return self.of_rank(rank, start_id).answer()


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


def test_every_rank_gets_the_same_directory(vm: Vm) -> None:
    """After all ranks got their answers, the directory of the first one is still there, and whole."""
    commit(vm.store, FILES, step=100)
    first = vm.answer()
    reads = len(vm.store.given)
    others = [vm.answer(rank) for rank in (1, 2)]
    assert [other.path for other in others] == [first.path] * 2
    assert len(vm.store.given) == reads, "it is fetched once"
    assert tree(Path(first.path)) == FILES


def test_a_newer_commit_changes_no_answer_of_the_start(vm: Vm) -> None:
    """``swansong restore`` fetches a newer commit between two ranks of one start: both get the older one.

    Also if the second rank asks an hour later.
    """
    commit(vm.store, FILES, step=100)
    assert vm.answer().step == 100
    commit(vm.store, FILES, step=110, nonce="a2")
    assert vm.ask().answer().step == 110
    vm.now_s += 3600.0
    late = vm.answer(1)
    assert (late.step, tree(Path(late.path))) == (100, FILES)


def test_ranks_of_a_fresh_run_all_start_fresh(vm: Vm) -> None:
    """The answer has neither a path nor an error, also after the first commit of their own start."""
    assert vm.answer() == Restored("rank-0")
    commit(vm.store, FILES, step=10, generation=2)
    assert vm.answer(1) == Restored("rank-1")


def test_a_later_start_gets_the_newest_commit(vm: Vm) -> None:
    """The download of the earlier start is deleted, however soon the next start asks."""
    commit(vm.store, FILES, step=100)
    first = vm.answer()
    commit(vm.store, FILES, step=110, nonce="a2")
    vm.story.leave()
    vm.story.join(ranks=3, pid=200, start_id="second")
    later = vm.answer(0, start_id="second")
    assert later.step == 110
    assert tree(Path(later.path)) == FILES
    assert not Path(first.path).exists()


def test_a_deleted_download_is_fetched_again(vm: Vm, tmp_path: Path) -> None:
    """If an operator removed the directory, the next rank gets the same commit, in a new one."""
    commit(vm.store, FILES, step=100)
    first = vm.answer()
    commit(vm.store, FILES, step=110, nonce="a2")
    Path(first.path).rename(tmp_path / "elsewhere")
    again = vm.answer(1)
    assert (again.step, tree(Path(again.path))) == (100, FILES)


def test_a_deleted_set_in_staging_is_not_given_to_the_next_rank(vm: Vm) -> None:
    """It gets the newest checkpoint that there is."""
    local = a_set(110)
    vm.story = Story()
    vm.story.staging = [local]
    vm.story.join(ranks=3)
    vm.story.scan()
    first, second = (RestoreQuery(f"rank-{rank}", start_id="a") for rank in (0, 1))
    vm.run.path.joinpath(local.directory).mkdir()
    assert vm.ask(first).answer().step == 110
    vm.run.path.joinpath(local.directory).rmdir()
    vm.story.staging = []
    vm.story.scan()
    commit(vm.store, FILES, step=100)
    assert vm.ask(second).answer().step == 100


def test_ranks_in_the_queue_get_the_progress_of_the_current_download(vm: Vm) -> None:
    """The hooks time out without progress, so each waiting rank gets it."""
    commit(vm.store, FILES, step=100)
    vm.may_read.clear()
    first, second = vm.of_rank(0), vm.of_rank(1)
    until(lambda: len(vm.store.given), what="the fetching to begin")
    vm.now_s += 10  # progress is sent at intervals; now it is due
    vm.may_read.set()
    for asked in (first, second):
        message = asked.messages.get(timeout=60)
        assert isinstance(message, Restoring)
        assert message.query_id == asked.query.query_id


# ---------------------------------------------------------------- several VMs


def put_parts(store: ObjectStore, step: int, nodes: Sequence[int] = (0, 1)) -> None:
    """Commit the parts of these VMs, of two."""
    for node in nodes:
        files = {f"rank-{node:05d}/w": b"%d" % node}
        commit(store, files, step=step, node=node, nodes=2, nonce=f"a{step}{node}")


def one_of_two(directory: Path, store: ObjectStore) -> RestoreRig[ObjectStore]:
    """One of two VMs.  Its part of step 50 is sealed here, and newer than every whole commit."""
    vm = RestoreRig(directory, store)
    vm.story.staging = [a_set(50, start_id="earlier", nodes=2)]
    vm.story.scan()
    vm.story.join(nodes=2, start_id="start")
    return vm


@pytest.mark.fault("G17")
def test_one_vm_chooses_a_whole_commit_and_the_others_take_that_one(tmp_path: Path) -> None:
    """Neither a set on a local disk, nor a part, nor a commit that was completed since."""
    store = file_store(tmp_path / "store")
    put_parts(store, 20)
    put_parts(store, 30, [0])
    first, second = one_of_two(tmp_path / "v0", store), one_of_two(tmp_path / "v1", store)
    chosen = first.ask(start_id="start").answer()
    assert (chosen.step, chosen.error) == (20, "")
    put_parts(store, 30, [1])
    taken = second.ask(generation=chosen.generation, step=chosen.step).answer()
    assert (taken.step, taken.error) == (20, "")
    for answer in (chosen, taken):
        assert tree(Path(answer.path)) == {"rank-00000/w": b"0", "rank-00001/w": b"1"}
    again = second.ask(generation=chosen.generation, step=chosen.step).answer()
    assert again.path == taken.path
    assert second.ask(generation=7, step=7).answer().error
