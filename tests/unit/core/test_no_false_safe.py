# SPDX-License-Identifier: Apache-2.0
"""Longer histories that once led to a SAFE for a state from which training had moved on.

``test_proof.py`` has one history for each rule, :mod:`testkit.simulation` the property for any history, and
``test_machine_nodes.py`` the histories of jobs over several VMs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong_bucket.model import CommitRef, Parent, Severity
from swansongd.core import machine
from swansongd.core.events import (
    CommitManifest,
    Exit,
    NoticeRaised,
    ProcessFound,
    Prune,
    RolledBack,
    Scanned,
    SignalSent,
    SignalTrainer,
    StartBegun,
    TrainerFailed,
    TrainerSealed,
)
from swansongd.core.transition import HOST_SOURCE, LOGIND_SOURCE

from testkit.story import MIB, Story, a_set, joined

pytestmark = pytest.mark.fault("T09", "T17")


def committed(step: int = 3, *, at: int | None = None, is_final: bool = False) -> Story:
    """A trainer whose set of ``step`` is committed, and which is at step ``at`` now."""
    story = joined(step=step)
    story.progress(step)
    story.commit(step, "first", is_final=is_final)
    if at is not None:
        story.progress(at)
    return story


@pytest.mark.parametrize("how", ["restart", "restart while the request waits", "rebuilt"])
def test_training_that_was_ahead_is_remembered(how: str) -> None:
    """Its process has ended, and the evacuation opens again after a restart of the daemon."""
    story = committed(6, at=9)
    story.notice(60, LOGIND_SOURCE)
    if how != "restart while the request waits":
        story.leave()
        assert story.conclude() == ["PARTIAL generation 2 step 6"]
    if how == "rebuilt":
        story.state = machine.rebuilt(story.state)
    else:
        raised = story.state.notices.live[LOGIND_SOURCE]
        story = story.restarted()
        story.tell(NoticeRaised(raised))
    assert set(story.conclude()) == {"PARTIAL generation 2 step 6"}


@pytest.mark.parametrize("signals_trainer", [True, False])
def test_a_save_from_before_the_notice_is_no_answer(*, signals_trainer: bool) -> None:
    """A process without hooks was writing it at the notice.  The verdict waits for a set that settles."""
    story = Story(signals_trainer=signals_trainer)
    story.process()
    story.commit(5, framework="hf")
    story.now += 100
    began_mono_s = story.now

    def settles() -> None:
        story.tell(Scanned(story.now, tuple(story.staging), pending=("checkpoint-500",)))

    settles()
    story.notice(60, LOGIND_SOURCE)
    if signals_trainer:
        story.tell(SignalSent(story.last(SignalTrainer).request_id, 900))
    story.now += 4
    settles()
    story.wait(0.1)
    assert story.verdicts == []
    half = a_set(500, "half", framework="hf", written_ns=2)
    story.staging.append(replace(half, begun_mono_s=began_mono_s))
    story.scan()
    story.store_all()
    assert story.conclude() == ["PARTIAL generation 2 step 500"]


def test_a_set_of_the_process_before_the_signalled_one_is_no_answer() -> None:
    """The script writes it between the order of the signal and the signal, and systemd starts it again."""
    story = Story(signals_trainer=True)
    story.tell(ProcessFound("process-a", 900, started_wall_ns=10))
    story.commit(5, framework="hf", written_ns=20)
    story.notice(60)
    late = replace(a_set(6, framework="hf", written_ns=30), begun_mono_s=story.now)
    story.tell(ProcessFound("process-b", 901, started_wall_ns=40))
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 901))
    story.staging.append(late)
    story.scan()
    story.store_all()
    assert story.conclude() == ["PARTIAL generation 2 step 6"]


def test_a_step_that_another_start_has_committed_answers_no_request() -> None:
    """A rank reports its answer again after a restart of the daemon; a scan finds the set only later."""
    story = committed(6)
    story.leave()
    story.join(2, pid=200, start_id="b")
    story.starts(4, 2, start_id="b", parent=Parent("a", 4))
    story.notice(60)
    story.accept(5, 2)
    live = story.state.notices.live["aws.spot"]
    after = story.restarted()
    after.tell(NoticeRaised(live))
    after.join(2, pid=200, start_id="b")
    after.tell(TrainerSealed(2, after.request_id, 6, 2.0, MIB))
    after.scan()
    after.wait(1)
    assert after.evacuation.request is not None
    assert after.evacuation.request.is_waiting
    after.commit(6, "late", start_id="b", request_id=after.request_id)
    assert after.verdicts == ["SAFE generation 3 step 6"]


def test_a_shutdown_of_the_host_waits_for_a_set_in_flight() -> None:
    """The verdict of an earlier notice is SAFE already, and a newer set is on its way."""
    story = committed()
    story.notice(1800, "manual")
    story.serve(3)
    assert story.verdicts[-1] == "SAFE generation 2 step 4"
    story.now += 1200
    story.seal(880, "newer")
    story.notice(60, HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    story.wait(0.1)
    assert not story.all(Exit)
    story.store_all()
    story.scan()
    story.wait(0.1)
    assert story.all(Exit)
    assert story.state.commits.last_complete == CommitRef(2, 880)


@pytest.mark.fault("H03", "O03")
def test_a_shutdown_of_the_host_waits_for_no_set_that_cannot_fit() -> None:
    """By the measured rate of the store, its bytes take three times the grace period."""
    story = joined(step=3)
    story.commit(3, "first", after_s=10)  # 100 MiB
    story.notice(1800, "manual")
    story.serve(3)
    story.seal(880, "newer", size_bytes=2000 * MIB)
    story.notice(60, HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    story.wait(0.1)
    assert story.all(Exit)
    assert story.verdicts[-1] == "SAFE generation 2 step 4"


def test_the_end_of_a_run_does_not_answer_for_the_start_that_was_asked() -> None:
    """The start before ended the run; rank 1 of the next one was asked before rank 0 named its start."""
    story = committed(5)
    story.leave()
    story.join(2, rank=1, ranks=2, pid=201, start_id="")
    story.notice(60)
    story.seal(43, "end", is_final=True)
    story.join(3, ranks=2, pid=200, start_id="b")
    story.store_all()
    assert story.conclude() == ["PARTIAL generation 2 step 43 (final)"]


@pytest.mark.parametrize("how", ["the reply is lost", "its place is taken", "the state is rebuilt"])
def test_a_manifest_that_was_dropped_may_exist(how: str) -> None:
    """The next VM would resume the state from which a rollback has gone back."""
    story = committed(5)
    story.commit(9, "kept")
    left = story.seal(12, "left")
    story.flushed()
    story.commit_fails(conflict=how == "its place is taken")
    if how == "the state is rebuilt":
        story.state = machine.rebuilt(story.state)
    story.tell(StartBegun(1, "a~1"))
    story.tell(RolledBack(9))
    assert not story.state.commits.stored, "the manifest is not tried again"
    deleted = {name for order in story.all(Prune) for name in order.directories}
    assert left.directory not in deleted, "a restarted daemon must know of it"
    story.starts(9, start_id="a~1", parent=Parent("a", 9))
    story.notice(60)
    story.accept(9)
    story.tell(TrainerFailed(1, story.request_id, "a rank hangs"))
    story.leave(is_goodbye=True)
    assert story.conclude() == ["PARTIAL generation 2 step 9"]


def test_a_rollback_keeps_no_set_whose_manifest_was_not_ordered() -> None:
    """A restarted daemon would commit it, perhaps after a SAFE for the state that the rollback has loaded."""
    story = committed(5)
    story.seal(9, "ordered")
    story.flushed()
    stored = story.seal(12, "stored")
    story.commit_fails()
    story.flushed()
    assert story.last(CommitManifest).staged.id.step == 9, "the next one waits for the store"
    story.tell(StartBegun(1, "a~1"))
    story.tell(RolledBack(5))
    assert story.last(Prune).directories == (stored.directory,)


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (None, "SAFE generation 2 step 7"),
        (CommitRef(3, 8), "PARTIAL generation 3 step 8"),  # another VM has continued the run
        (CommitRef(2, 6), "PARTIAL generation 2 step 6"),  # the commit that was SAFE is gone
    ],
)
def test_a_restarted_daemon_proves_safe_again(newest: CommitRef | None, expected: str) -> None:
    """It remembers the position, and the newest commit must still reach it."""
    story = committed(5, at=6)
    story.notice(60)
    story.serve(6)
    assert story.verdicts == ["SAFE generation 2 step 7"]
    (live,) = story.state.notices.live.values()
    after = story.restarted(newest=newest)
    after.staging.clear()
    after.scan()
    after.tell(NoticeRaised(live))
    after.join(step=9)
    assert after.verdicts == []  # the ranks may still report that they have gone back
    after.accept(9)
    after.leave()
    assert after.conclude()[-1] == expected


def test_safe_is_not_repeated_while_the_start_has_not_reconnected() -> None:
    """While the daemon was down, training may have been started again from an earlier step."""
    story = committed(5, at=6)
    story.notice(60)
    story.serve(6)
    (live,) = story.state.notices.live.values()
    after = story.restarted()
    after.tell(NoticeRaised(live))
    assert after.conclude() == ["PARTIAL generation 2 step 7"]


def test_a_set_may_commit_from_its_seal_to_its_commit() -> None:
    """A daemon whose staging was moved must not end before: the next one would not find the set."""
    story = committed(5)
    assert not story.state.may_commit
    late = story.seal(9, "late")
    assert story.state.uncommitted
    assert story.state.may_commit
    story.flushed()
    story.commit_fails()
    story.lose(late)
    assert not story.state.flush.flight
    assert not story.state.uncommitted
    assert story.state.may_commit, "the manifest is due after the backoff"
    story.wait(60)
    story.store_all()
    assert not story.state.may_commit
