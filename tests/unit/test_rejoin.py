# SPDX-License-Identifier: Apache-2.0
"""Where a trainer is told to go on: real directories, a real store, real downloads."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import committed
import pytest
from story import Story, a_set
from swansong.protocol import RESTORED_DIRECTORY, Message, Restored, Restoring
from swansongd.core.state import State
from swansongd.keys import RunKeys
from swansongd.model import CommitRef, Staged
from swansongd.rejoin import Rejoin

FILES = {"weights.bin": bytes(range(256)) * 20}


class Vm:
    """A store, the staging directory of the run, and what the decision loop knows."""

    def __init__(self, directory: Path) -> None:
        self.bucket = directory / "bucket"
        self.store = committed.file_store(self.bucket)
        self.staging = directory / "staging"
        self.staging.mkdir()
        self.state: State = Story().state

    def knows(
        self, *staged: Staged, inherited: bool = False, newest: CommitRef | None = None
    ) -> None:
        """Sets in staging, of generation 2, or of an earlier boot."""
        story = Story(staged=staged if inherited else (), newest=newest)
        if not inherited:
            story.staging = list(staged)
            story.scan()
        self.state = story.state

    def commit(self, step: int, generation: int = 1, **options: Any) -> Path:
        """Commit; returns the file in which the store keeps the weights."""
        made = committed.commit(
            self.store, FILES, step=step, generation=generation, attempt=f"a{step}", **options
        )
        return self.bucket / made.shards[0].key

    def ask(self) -> Restored:
        """The answer of a daemon that has just started: none that it gave before stands."""
        rejoin = Rejoin(
            self.store, RunKeys("r"), self.staging, lambda: self.state, threading.Event()
        )
        answers: queue.Queue[Message] = queue.Queue()
        rejoin.start("q1", answers.put)
        while True:
            answer = answers.get(timeout=20)
            if isinstance(answer, Restored):
                assert answer.query_id == "q1"
                return answer
            assert isinstance(answer, Restoring)


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


def test_a_fresh_run_has_nothing_to_go_on_from(vm: Vm) -> None:
    """Neither a path nor an error."""
    assert vm.ask() == Restored("q1")


def test_a_commit_is_brought_here_byte_for_byte(vm: Vm) -> None:
    vm.commit(100)
    answer = vm.ask()
    assert (answer.step, answer.generation, answer.error) == (100, 1, "")
    assert Path(answer.path).parent == vm.staging / RESTORED_DIRECTORY
    assert committed.tree(Path(answer.path)) == FILES


@pytest.mark.parametrize("step", [100, 101])
def test_a_set_of_our_own_as_new_as_the_commit_needs_no_download(vm: Vm, step: int) -> None:
    """The trainer crashed and the VM lives: it goes on from its own disk."""
    vm.commit(100, generation=2)
    local = a_set(step)
    vm.knows(local, newest=CommitRef(2, 100))
    answer = vm.ask()
    assert answer == Restored("q1", str(vm.staging / local.directory), step, 2)
    assert not (vm.staging / RESTORED_DIRECTORY).exists()


def test_a_newer_commit_beats_an_older_set(vm: Vm) -> None:
    vm.commit(100, generation=2)
    vm.knows(a_set(90), newest=CommitRef(2, 100))
    assert vm.ask().step == 100


def test_a_commit_of_another_generation_beats_a_set_of_the_same_step(vm: Vm) -> None:
    """Two lineages: what is committed of this step is what others go on from."""
    vm.commit(100, generation=1)
    vm.knows(a_set(100), newest=CommitRef(1, 100))
    answer = vm.ask()
    assert (answer.step, answer.generation) == (100, 1)


@pytest.mark.fault("D06")
def test_a_set_of_another_boot_is_not_trusted(vm: Vm) -> None:
    """It may be torn: the commit is taken, although its step is smaller; without one the run is fresh."""
    vm.knows(a_set(200), inherited=True)
    assert vm.ask() == Restored("q1")
    vm.commit(100)
    assert vm.ask().step == 100


def test_a_set_that_turned_out_unusable_is_not_taken(vm: Vm) -> None:
    vm.commit(100)
    torn = a_set(200)
    vm.knows(torn, newest=CommitRef(1, 100))
    vm.state = replace(vm.state, unusable=frozenset({torn.id}))
    assert vm.ask().step == 100


def test_a_damaged_commit_is_passed_over(vm: Vm) -> None:
    """One bit of the newest is wrong: the one before it is restored."""
    vm.commit(100)
    committed.flip_bit(vm.commit(200), 77)
    answer = vm.ask()
    assert (answer.step, answer.error) == (100, "")
    assert committed.tree(Path(answer.path)) == FILES


def test_only_damaged_commits_are_an_error_and_no_fresh_run(vm: Vm) -> None:
    """Starting anew would bury what could be mended."""
    for step in (100, 200):
        committed.flip_bit(vm.commit(step), 77)
    answer = vm.ask()
    assert answer.path == ""
    assert answer.error != ""


def test_a_store_that_is_not_there_is_an_error_and_no_fresh_run(vm: Vm) -> None:
    vm.commit(100)
    vm.bucket.rename(vm.bucket.with_name("hidden"))
    answer = vm.ask()
    assert answer.path == ""
    assert "does not exist" in answer.error


def test_what_earlier_trainers_restored_is_removed(vm: Vm) -> None:
    """Only the newest copy stays; after a failure the old one does."""
    damaged = vm.commit(100)
    first, second = vm.ask(), vm.ask()
    assert first.path != second.path
    assert [str(path) for path in (vm.staging / RESTORED_DIRECTORY).iterdir()] == [second.path]
    committed.flip_bit(damaged, 3)
    assert vm.ask().error
    assert committed.tree(Path(second.path)) == FILES
