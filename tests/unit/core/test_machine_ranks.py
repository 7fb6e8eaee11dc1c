# SPDX-License-Identifier: Apache-2.0
"""Stories of trainers: requests, agreement on a step, deaths, reconnects, and trainers without hooks."""

from __future__ import annotations

import pytest
from swansong.layout import sealed_name
from swansong.protocol import NotRequested, Request, Target, Withdrawn
from swansong_bucket.model import CommitRef, Parent, Severity, Start
from swansongd.core import emergency
from swansongd.core.arrival import RECONNECT_S
from swansongd.core.emergency import REPEAT_S_MAX, REQUESTS_MAX, SIGNAL_AGAIN_S
from swansongd.core.events import (
    Conclude,
    FlushFailed,
    GenerationClaimed,
    Log,
    RequestAsked,
    Rescan,
    RunRead,
    Scanned,
    Send,
    SignalledExited,
    SignalRefused,
    SignalSent,
    SignalTrainer,
    TrainerFailed,
    TrainerSealed,
)

from testkit.story import Story, a_set, joined


@pytest.mark.fault("T12")
def test_ranks_agree_on_one_more_than_the_most_advanced() -> None:
    """The target is ahead of every rank, and sent once to all, when all have answered."""
    story = Story()
    for rank, step in enumerate((7, 9, 8)):
        story.join(rank, rank=rank, ranks=3, step=step)
    story.notice()
    story.accept(7, connection=0)
    story.accept(9, connection=1)
    assert not story.all(Target)
    story.accept(8, connection=2)
    assert story.sent(Target) == [Send(Target(story.request_id, 10), (0, 1, 2))]
    story.accept(9, connection=1)
    assert {order.step for order in story.all(Target)} == {10}, "the target is decided"


def test_a_request_that_is_made_as_a_rank_joins_names_its_start() -> None:
    """The pause after a failed request is over when rank 1 connects, and rank 0 gives it the start."""
    story = joined(1, ranks=2)
    story.notice(60)
    story.tell(TrainerFailed(1, story.request_id, "a rank hangs"))
    story.now += 10
    story.join(2, rank=1, ranks=2, start_id="")
    assert story.evacuation.requests == 2
    story.accept(8, connection=1)
    story.accept(9, connection=2)
    assert story.sent(Target) == [Send(Target(story.request_id, 10), (1, 2))]


@pytest.mark.fault("T17")
def test_a_request_before_a_rank_knows_its_start_is_for_that_start() -> None:
    """Rank 1 connects for the first time while the connection of rank 0 is broken."""
    story = joined(1, ranks=2)
    story.leave(1, exited=False)
    story.join(2, rank=1, ranks=2, start_id="")
    story.notice(60)
    story.join(3, ranks=2)
    story.accept(8, connection=2)
    story.accept(9, connection=3)
    assert story.sent(Target) == [Send(Target(story.request_id, 10), (2, 3))]


@pytest.mark.fault("T04", "T09", "T12")
@pytest.mark.parametrize("connected", [2, 1])
def test_a_missing_rank_ends_the_agreement_in_bounded_time(connected: int) -> None:
    """After 5 s, or a tenth of the time left, the others are released and older sets are committed.

    The rank does not answer, or it never connects.
    """
    story = Story()
    story.seal(5)
    for rank in range(connected):
        story.join(rank, rank=rank, ranks=2)
    story.notice(in_s=30)
    story.accept(6, connection=0)
    story.wait(2.9)
    assert not story.all(Withdrawn)
    story.wait(0.2)
    assert story.all(Withdrawn)
    assert not story.all(Target)
    story.store_all()
    assert story.conclude() == ["PARTIAL generation 2 step 5"]
    assert "did not answer in time" in story.last(Conclude).reason


@pytest.mark.fault("T09")
def test_the_request_to_ranks_without_a_start_ends_with_their_start() -> None:
    """It is for the start that rank 0 names, and an answer of the next start means nothing for it."""
    story = Story()
    story.join(2, rank=1, ranks=2, start_id="")
    story.notice()
    story.accept(7, connection=2)
    story.join(1, rank=0, ranks=2)
    story.accept(7, connection=1)
    asked = story.evacuation.request
    assert asked is not None
    assert (asked.target, asked.start_id) == (8, "a")
    story.join(3, rank=0, ranks=2, pid=300, start_id="b")
    assert story.last(Withdrawn).reason == "the training was started again"
    story.accept(9, connection=2)  # of the earlier start
    asked = story.evacuation.request
    assert asked is not None
    assert (asked.accepted, asked.start_id) == ({}, "b")


@pytest.mark.fault("T09")
def test_a_request_to_a_late_process_ends_when_the_newest_start_reconnects() -> None:
    """No checkpoint fits any more, but the answer of the newest start shows that nothing was trained."""
    recorded = (Start(id="old", generation=2), Start(id="new", generation=3))
    story = Story(recorded=recorded, newest=CommitRef(1, 10))
    story.tell(GenerationClaimed("new", 3, CommitRef(1, 10), "earlier"))
    story.notice(in_s=6)
    known = {"ranks": 2, "save_s": 60.0, "parent": Parent("earlier", 10)}
    story.join(1, rank=1, pid=50, start_id="old", **known)  # type: ignore[arg-type]
    assert [request.start_id for request in story.state.requests_made] == ["old"]
    for rank in (0, 1):
        story.join(2 + rank, rank=rank, step=10, start_id="new", **known)  # type: ignore[arg-type]
    assert [request.start_id for request in story.state.requests_made] == ["new"]
    story.leave(1)  # until then it may seal a checkpoint
    for rank in (0, 1):
        story.accept(10, connection=2 + rank)
    assert story.conclude() == ["SAFE generation 1 step 10"]


@pytest.mark.fault("T09")
def test_a_rank_that_reconnects_gets_the_request_and_the_target_again() -> None:
    """A lost connection is not a lost trainer; both messages are repeated under the same id.

    The request has the time that is left.
    """
    story = joined(1, pid=77)
    story.notice(in_s=120)
    story.leave(1, exited=False)
    story.wait(1)
    story.join(2, pid=77)
    assert story.sent(Request)[-1].connections == (2,)
    assert len({order.id for order in story.all(Request)}) == 1
    assert [order.seconds_left for order in story.all(Request)] == [120.0, 119.0]
    story.accept(3, connection=2)
    story.leave(2, exited=False)
    story.join(3, pid=77)
    story.accept(3, connection=3)
    assert story.sent(Target)[-1] == Send(Target(story.request_id, 4), (3,))


@pytest.mark.fault("T02", "T03")
def test_a_trainer_that_dies_after_accepting() -> None:
    """Its half-written set does not count; the scan after its death decides."""
    story = Story()
    story.seal(5)
    story.join(step=8)
    story.notice()
    story.accept(8)
    began = story.now
    story.now += 1
    story.leave()
    story.tell(Scanned(began, tuple(story.staging), pending=("step-9.x.partial",)))
    assert not story.all(Withdrawn), "that scan began before the death, and does not count"
    story.scan()
    story.store_all()
    assert story.verdicts == ["PARTIAL generation 2 step 5"]
    assert "ended before" in story.last(Conclude).reason


@pytest.mark.fault("T01")
def test_a_trainer_that_seals_after_it_declined_is_awaited() -> None:
    """So do ranks that save without a lost one: the verdict waits for a scan after the end of the process."""
    story = joined(step=6)
    story.notice()
    story.scan()
    story.accept(6)
    story.tell(TrainerFailed(1, story.request_id, "declined: rank 0 waited 1.7 s"))
    story.wait(0.1)
    story.staging.append(a_set(7, "own"))
    assert Rescan() in story.leave(exited=True)
    story.wait(0.1)
    assert not story.verdicts
    story.scan()
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 7"]


@pytest.mark.fault("T04")
def test_a_trainer_that_never_answers() -> None:
    """The daemon waits while the checkpoint could still be flushed; then the older set must do."""
    story = Story(reserve_s=5)
    story.commit(5, after_s=1)  # 100 MiB/s, so a set of that size takes a second
    story.join(step=8)
    story.notice(in_s=30)
    story.scan()
    story.wait(23.9)
    assert not story.verdicts
    story.wait(0.2)
    assert not story.verdicts, "the bandwidth may recover"
    for _ in range(4):
        story.wait(emergency.TOO_LATE_S / 4)
    assert story.verdicts == ["PARTIAL generation 2 step 5"]
    assert story.all(Withdrawn)


@pytest.mark.fault("D01")
def test_a_trainer_that_fails_or_declines() -> None:
    """It is asked again a limited number of times, and its reason is in the verdict."""
    story = Story()
    story.seal(5)
    story.join(step=8)
    story.notice()
    story.store_all()
    assert story.conclude(failure="no space left on device") == ["PARTIAL generation 2 step 5"]
    assert len({ask.id for ask in story.all(Request)}) == REQUESTS_MAX
    assert "no space left" in story.last(Conclude).reason


@pytest.mark.fault("D01")
def test_a_save_that_failed_is_counted_and_logged_once() -> None:
    """Each rank is logged, all ranks of one checkpoint count once, and a declined request does not."""
    story = Story()
    for rank in range(2):
        story.join(rank, rank=rank, ranks=2, step=8)
    for connection in (1, 0):
        story.tell(TrainerFailed(connection, "", "disk full", 8))
    story.tell(TrainerFailed(0, "a request", "declined: busy"))
    for step in (9, 9, 10):
        story.tell(TrainerFailed(0, "another request", "torn", step))
    lines = [dict(line.facts) for line in story.all(Log) if line.event == "save_failed"]
    assert [(line["rank"], line["step"], line["reason"]) for line in lines] == [
        (1, 8, "disk full"),
        (0, 8, "disk full"),
        (0, 9, "torn"),
        (0, 9, "torn"),
        (0, 10, "torn"),
    ]
    assert story.tally.figures.failed_saves.count == 3


@pytest.mark.fault("T06")
def test_a_rejected_set_ends_the_wait() -> None:
    """A set that should be the answer and is not sound is a failure, with its reason."""
    story = Story()
    story.seal(5)
    story.join(step=8)
    story.notice()
    story.accept(8)
    story.tell(TrainerFailed(1, "another request", "not ours"))
    story.scan(rejected=((sealed_name(9, "x"), "short file"),))
    assert not story.all(Withdrawn), "no rank reported this set as the answer"
    story.tell(TrainerSealed(1, story.request_id, 9, 1.0, 10))
    story.scan(rejected=((sealed_name(9, "emg"), "short file"),))
    assert story.last(Withdrawn).reason == "the sealed set is not sound: short file"


def two_ranks_accept(story: Story) -> None:
    """A notice, whose request both ranks of the VM accept at step 8."""
    for rank in range(2):
        story.join(rank, rank=rank, ranks=2, step=8)
    story.notice()
    for rank in range(2):
        story.accept(8, rank)


@pytest.mark.parametrize("is_goodbye", [True, False])
def test_only_a_rank_that_says_goodbye_has_written_its_part(*, is_goodbye: bool) -> None:
    """With ``stop_after_save`` a fast rank is gone while the others write: their set is the answer.

    A set with its sealed name counts, even if no rank has reported it.
    """
    story = Story()
    two_ranks_accept(story)
    answer = a_set(9, "emg", request_id=story.request_id)
    story.scan(growing=(answer,))
    story.leave(1, is_goodbye=is_goodbye)
    story.scan(growing=(answer,))
    assert bool(story.all(Withdrawn)) is not is_goodbye
    story.staging.append(answer)
    story.scan()
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 9"]


@pytest.mark.fault("T02")
def test_the_last_rank_that_leaves_without_a_set_ends_the_wait() -> None:
    """After every rank's goodbye no process is left to seal the set."""
    story = Story()
    story.seal(5)
    two_ranks_accept(story)
    for rank in range(2):
        story.leave(rank, is_goodbye=True)
    story.scan()
    story.store_all()
    assert story.verdicts == ["PARTIAL generation 2 step 5"]


# ---------------------------------------------------------------------------- by signal


def test_a_trainer_without_hooks_gets_the_signal() -> None:
    """No rank is connected and a signal is configured: the next new set is the answer."""
    story = Story(signals_trainer=True, staged=[a_set(5, framework="hf")])
    story.process()
    story.notice()
    assert story.all(SignalTrainer)
    assert not story.all(Request)
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 55))
    story.scan()
    assert not story.verdicts, "a set from before the signal does not answer it"
    story.commit(9, framework="hf")
    assert story.verdicts == ["SAFE generation 3 step 9"]


def test_before_the_first_scan_no_old_set_answers_the_signal() -> None:
    """After a restart during an evacuation, the sets of the first scan are old."""
    recorded = [Start(id="process-a", generation=2)]
    staged = [a_set(5, framework="hf")]
    story = Story(claimed=False, signals_trainer=True, staged=staged, recorded=recorded)
    story.process()
    story.notice()
    story.tell(RunRead(CommitRef(2, 5), "process-a"))
    story.scan()
    assert not story.verdicts
    story.commit(9, framework="hf")
    assert story.verdicts == ["SAFE generation 2 step 9"]


@pytest.mark.fault("T10")
def test_after_a_refused_signal_the_sealed_sets_are_committed() -> None:
    """A process that the signal would kill does not get it; a shutdown does not wait for another one."""
    story = Story(signals_trainer=True, staged=[a_set(5)])
    story.wait(RECONNECT_S)
    story.notice(source="logind", severity=Severity.SHUTTING_DOWN)
    story.tell(SignalRefused(story.last(SignalTrainer).request_id, "no handler"))
    story.scan()
    story.store_all()
    assert story.verdicts == ["PARTIAL generation 2 step 5"]
    assert "no handler" in story.last(Conclude).reason
    assert len(story.all(SignalTrainer)) == 1


@pytest.mark.fault("D09")
def test_a_verdict_waits_for_the_set_that_replaces_its_answer() -> None:
    """A process without hooks writes the same step again while its answer is sent."""
    story = Story(signals_trainer=True)
    story.process()
    story.commit(4, framework="hf")
    story.notice(60)
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 900))
    story.now += 2
    answer = story.seal(5, "emg", framework="hf", written_ns=2)
    story.staging.remove(answer)
    story.now += 1
    failed = FlushFailed(story.flight.flush_id, "a file has changed", void=True)
    assert Rescan() in story.tell(failed)
    story.tell(Scanned(story.now, tuple(story.staging), pending=("checkpoint-5",)))
    story.wait(1)
    assert not story.verdicts
    story.commit(5, "again", framework="hf", written_ns=3)
    assert story.verdicts == ["SAFE generation 2 step 5"]


def test_a_signalled_process_that_ends_may_have_saved() -> None:
    """Frameworks save and exit: while files still settle, the daemon waits."""
    story = Story(signals_trainer=True)
    story.process()
    story.notice()
    request_id = story.last(SignalTrainer).request_id
    story.tell(SignalledExited(request_id, 55))
    story.tell(Scanned(story.now, (), pending=("checkpoint-9",)))
    assert not story.verdicts
    story.commit(9, framework="hf")
    assert story.verdicts == ["SAFE generation 2 step 9"]
    gone = Story(signals_trainer=True)
    gone.process()
    gone.notice()
    gone.tell(SignalledExited(gone.last(SignalTrainer).request_id, 55))
    gone.scan()
    assert gone.verdicts == ["LOST None"]


def test_a_process_that_starts_during_the_evacuation_is_signalled_too() -> None:
    """The signalled one died: the next one is signalled while a checkpoint fits, also after the verdict."""
    story = Story(signals_trainer=True)
    story.process("process-a", 900)
    story.notice(in_s=60)
    first = story.last(SignalTrainer).request_id
    story.tell(SignalSent(first, 900))
    story.tell(SignalledExited(first, 900))
    story.process("")
    story.scan()
    assert story.verdicts == ["LOST None"]
    story.process("process-b", 901)
    second = story.last(SignalTrainer).request_id
    assert second != first
    story.tell(SignalRefused(second, "no handler"))  # it still imports its libraries
    story.wait(SIGNAL_AGAIN_S)
    third = story.last(SignalTrainer).request_id
    assert third not in (first, second)
    story.tell(SignalSent(third, 901))
    story.wait(5)
    assert story.last(SignalTrainer).request_id == third, "one signal is enough"
    story.commit(9, framework="checkpoint-n")
    assert story.verdicts[-1].startswith("SAFE")


def test_sets_of_the_next_process_do_not_hold_the_request_of_the_one_that_ended() -> None:
    """The next process always has a set that settles: it is signalled once those before it have settled."""
    story = Story(signals_trainer=True)
    story.process("process-a", 900)
    story.notice(in_s=60)
    first = story.last(SignalTrainer).request_id
    story.tell(SignalSent(first, 900))
    story.tell(SignalledExited(first, 900))
    story.process("process-b", 901)
    story.tell(Scanned(story.now, (), pending=("checkpoint-8", "checkpoint-9")))
    story.tell(Scanned(story.now, (), pending=("checkpoint-9", "checkpoint-10")))
    assert len(story.all(SignalTrainer)) == 1, "checkpoint-9 may be the answer"
    story.tell(Scanned(story.now, (), pending=("checkpoint-10",)))
    assert story.last(SignalTrainer).request_id != first


@pytest.mark.fault("T12")
def test_a_late_acceptance_states_the_position() -> None:
    """The rank answers after the request has failed, and the commit of its step stands: that is SAFE."""
    story = Story()
    for rank in (0, 1):
        story.join(rank, rank=rank, ranks=2, step=5)
    story.commit(5)
    story.notice(in_s=30)
    story.accept(5, connection=0)
    story.wait(3.0)
    assert story.all(Withdrawn)
    story.accept(5, connection=1)
    assert story.verdicts == ["SAFE generation 2 step 5"]


def test_a_process_that_starts_too_late_for_a_checkpoint_is_not_signalled() -> None:
    story = Story(signals_trainer=True)
    story.process("process-a", 900)
    story.notice(in_s=20)
    first = story.last(SignalTrainer).request_id
    story.tell(SignalSent(first, 900))
    story.tell(SignalledExited(first, 900))
    story.scan()
    story.wait(19)
    story.process("process-b", 901)
    assert [action.request_id for action in story.all(SignalTrainer)] == [first]


@pytest.mark.fault("T09")
def test_a_rank_that_got_sigterm_waits_for_the_request_of_an_evacuation() -> None:
    """While a request waits, or a failed one will be repeated, it is not told that none will come.

    If the notice is withdrawn, the rank gets a request for itself.
    """
    story = joined(step=7)
    story.notice(in_s=60)
    for _ in range(2):
        story.tell(RequestAsked(1, 7))
        story.tell(TrainerFailed(1, story.request_id, "no space left", 7))
        story.wait(REPEAT_S_MAX)
    assert len(story.all(Request)) == 3
    story.withdraw()
    assert not story.all(NotRequested)
    assert story.last(Request).id.startswith("sigterm-")
