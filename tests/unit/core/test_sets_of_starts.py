# SPDX-License-Identifier: Apache-2.0
"""Which sets of which start are sent, deleted, resumed from, and taken as the answer to a signal."""

from __future__ import annotations

import pytest
from swansong_bucket.model import CommitRef, Parent, Position, Start
from swansongd.core import resume
from swansongd.core.arrival import RECONNECT_S
from swansongd.core.events import (
    ClaimGeneration,
    FenceFound,
    ProcessFound,
    Prune,
    RunRead,
    SignalSent,
    SignalTrainer,
    StartBegun,
)

from testkit.story import Story, a_set, joined


def test_a_commit_of_an_earlier_start_deletes_no_set() -> None:
    """The set of step 30 becomes a commit while the ranks that roll back load step 20: step 20 stays.

    The first commit of the start that the rollback has begun deletes both.
    """
    story = joined()
    story.starts(0)
    kept = story.commit(20)
    left = story.seal(30, "def")
    story.flushed()
    story.tell(StartBegun(1, "a~1"))
    story.committed()
    assert not any(prune.directories for prune in story.all(Prune))
    assert resume.newest_local(story.state, None) == left
    story.commit(21, "ghi", start_id="a~1")
    assert {kept.directory, left.directory} <= set(story.last(Prune).directories)


def test_the_process_that_got_the_signal_answers() -> None:
    """The process was started again just before the notice, and the daemon sees it with the signal."""
    story = Story(signals_trainer=True)
    story.process("process-a", pid=900)
    story.commit(10, framework="transformers")
    story.notice()
    request = story.last(SignalTrainer).request_id
    story.process("process-b", pid=901)
    story.tell(SignalSent(request, 901))
    story.wait(2)
    story.commit(12, "new", framework="transformers", written_ns=2)
    assert story.verdicts == ["SAFE generation 3 step 12"]


@pytest.mark.fault("H01")
def test_safe_is_recorded_for_the_start_that_it_is_about() -> None:
    """A restarted daemon must not prove it for a process that was started since the signal."""
    story = Story(signals_trainer=True)
    story.process("process-a", pid=900)
    story.notice()
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 900))
    story.wait(2)
    story.seal(12, framework="transformers")
    story.process("process-b", pid=901)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 12"]
    (notice,) = story.state.notices.live.values()
    assert notice.safe_at == Position("process-a", 12)


@pytest.mark.fault("H01", "T09")
def test_a_set_of_a_process_that_went_back_before_it_ended_answers_for_nothing() -> None:
    """It has the step of a commit and another state, and the next process is seen before the set."""
    story = Story(signals_trainer=True)
    story.process("process-a", pid=900)
    story.seal(2, "two", framework="checkpoint-n", written_ns=1)
    story.commit(4, "four", framework="checkpoint-n", written_ns=2)
    story.notice()
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 900))
    story.now += 2
    story.tell(ProcessFound("process-b", 901, started_wall_ns=10))
    story.seal(4, "again", framework="checkpoint-n", written_ns=5)
    assert story.conclude() == ["PARTIAL generation 2 step 4"]


def test_sets_from_before_a_process_went_back_are_not_committed_after_a_restart() -> None:
    """The next process runs already; the set of step 16 is the newest one of the process before."""
    sets = [
        a_set(step, f"n{step}", framework="checkpoint-n", written_ns=at)
        for step, at in ((18, 1), (20, 2), (16, 3))
    ]
    story = Story(claimed=False, staged=sets, recorded=(Start(id="process-a", generation=1),))
    story.tell(ProcessFound("process-b", 901, started_wall_ns=10))
    story.scan()
    story.tell(RunRead(CommitRef(1, 16), "process-a"))
    story.wait(1)
    assert story.flushes == []


def test_a_start_that_is_known_from_its_sets_only_has_the_place_of_its_sets() -> None:
    """A restarted daemon finds older sets of a start that never had a generation: they get none."""
    sets = [
        a_set(39, "before", start_id="a", written_ns=1),
        a_set(42, "older", start_id="a~1", written_ns=2),
        a_set(45, "newer", start_id="a~1", written_ns=3),
    ]
    story = Story(staged=sets, recorded=(Start(id="a~1", generation=7),))
    assert [(start.id, start.is_open) for start in story.state.starts.known] == [
        ("a", False),
        ("a~1", True),
    ]
    assert story.flushes == [45]


def test_a_set_whose_start_has_yet_to_claim_is_the_newest() -> None:
    """Sealed during an outage of the store, its generation is higher than those of all commits.

    Before the run is read, its start may have claimed in an earlier life of the daemon.
    """
    story = Story(claimed=False)
    story.grants = False
    sealed = story.seal(7)
    assert resume.newest_local(story.state, CommitRef(1, 50)) is None
    story.tell(RunRead(CommitRef(1, 50), "earlier"))
    assert story.state.ref_of(sealed.id) is None
    assert resume.newest_local(story.state, CommitRef(1, 50)) == sealed


def test_no_flush_begins_before_the_run_is_read() -> None:
    """A restarted daemon knows the generation of a set, but not yet that the set is committed."""
    story = Story(claimed=False, recorded=(Start(id="a", generation=1),))
    story.seal(20)
    assert story.flushes == []


@pytest.mark.fault("H01", "T09")
def test_a_start_that_has_not_reconnected_may_be_the_newest() -> None:
    """Only a late process of the start before has reconnected: the newer set stays, and nothing is SAFE.

    With the process of the newer start its place is known, and its set becomes a commit.
    """
    recorded = (Start(id="a", generation=1),)
    story = Story(staged=[a_set(7, "old", written_ns=10)], recorded=recorded)
    story.join()
    story.starts(0)
    newer = story.seal(
        10, "new", start_id="b", written_ns=20 * 10**9
    )  # its process is the later one
    story.notice(60)
    story.accept(7)
    story.store_all()
    assert story.state.commits.last == CommitRef(1, 7)
    assert story.conclude() == ["PARTIAL generation 1 step 7"]
    assert newer.directory not in {name for order in story.all(Prune) for name in order.directories}
    story.withdraw()
    story.join(2, pid=200, start_id="b")
    story.store_all()
    assert story.state.commits.last == CommitRef(2, 10)


@pytest.mark.fault("H01")
@pytest.mark.parametrize("written_s", [1, 10**6])
@pytest.mark.parametrize(
    ("of", "began_ticks", "verdict"),
    [
        ("b", 1099, "SAFE"),
        ("b", 1100, "PARTIAL"),
        ("b", 0, "PARTIAL"),
        ("new", 1100, "SAFE"),
        ("new~3", 1100, "PARTIAL"),
    ],
)
def test_a_start_whose_processes_began_later_than_those_of_another_one_is_the_newer_one(
    of: str, began_ticks: int, verdict: str, written_s: int
) -> None:
    """The record of the claims was lost, and names no start of a set that is not the newest commit.

    The process of the running start began at 1100 ticks.  The clock of file times may have stepped.
    """
    lost = [a_set(9, "s", start_id=of, written_ns=written_s * 10**9, began_ticks=began_ticks)]
    story = Story(claimed=False, staged=lost)
    story.grants = False
    story.scan()
    story.tell(RunRead(CommitRef(1, 10), "earlier"))
    story.join(start_id="new~2")
    story.tell(FenceFound(2, start_id=of))
    story.grant("new~2")
    story.starts(10, start_id="new~2", parent=Parent("earlier", 10))
    story.notice(60)
    story.scan()
    story.accept(10)
    story.wait(60)
    assert story.verdicts == [f"{verdict} generation 1 step 10"]


@pytest.mark.parametrize(("began_ticks", "is_of_boot"), [(0, False), (1100, True)])
def test_a_set_that_names_this_boot_is_of_this_boot(began_ticks: int, is_of_boot: bool) -> None:
    """The clock of file times has stepped forward since.  Hooks of before name no boot."""
    lost = [a_set(9, "s", start_id="b", written_ns=1, began_ticks=began_ticks)]
    (start,) = Story(staged=lost, booted_wall_ns=2).state.starts.known
    assert (start.is_of_boot, start.is_placed) == (is_of_boot, not is_of_boot)


@pytest.mark.fault("H01")
def test_a_set_from_before_the_process_of_a_recorded_start_precedes_this_start() -> None:
    """The next life of the daemon knows its own claim only: the older set gets no greater generation."""
    recorded = (Start(id="new", generation=7, began_ticks=1110),)
    lost = [a_set(20, "of-b", start_id="b", written_ns=10 * 10**9)]
    story = Story(newest=CommitRef(1, 10), staged=lost, recorded=recorded)
    story.wait(RECONNECT_S)
    assert not story.all(ClaimGeneration)
    assert [start.id for start in story.state.starts.known] == ["b", "new"]


def test_newer_sets_of_another_start_drop_no_set_whose_place_is_unknown() -> None:
    """No start has a generation, as in an outage of the store.  The process of start b has not connected."""
    story = Story()
    story.grants = False
    story.join()
    story.starts(0)
    story.seal(10, "of-b", start_id="b", written_ns=20)
    for step in (7, 8, 9):
        story.seal(step, f"of-a-{step}", written_ns=20 + step)
    dropped = {name for order in story.all(Prune) for name in order.directories}
    assert dropped == {"step-000000000007.of-a-7"}
