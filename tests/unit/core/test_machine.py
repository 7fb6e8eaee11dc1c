# SPDX-License-Identifier: Apache-2.0
"""Stories of evacuations: notice, request, flush, commit, verdict."""

from __future__ import annotations

import pytest
from swansong.protocol import Fenced, Request, Withdrawn
from swansong_bucket.model import (
    CommitRef,
    DeadlineQuality,
    Health,
    Severity,
    Start,
    Verdict,
)
from swansongd.core import notices, transition
from swansongd.core.arrival import RECONNECT_S
from swansongd.core.events import (
    CancelFlush,
    CheckFence,
    CommitFailed,
    CommitManifest,
    Conclude,
    Exit,
    FenceFound,
    Flushed,
    FlushFailed,
    FlushProgress,
    Log,
    Mark,
    NoticeRaised,
    Prune,
    RunRead,
    StopRequested,
    Tick,
    TrainerProgress,
    WokeUp,
)
from swansongd.core.flight import RETRY_URGENT_S
from swansongd.observe.phase import Phase, phase_of

from testkit.story import MIB, Story, a_set, joined

WAITED_S = 116.0
"""After this part of a notice of 120 s not even the reserve is left: no trainer is awaited any more."""


def test_notice_to_safe() -> None:
    """A notice leads through checkpoint, flush and commit to SAFE, and each phase shows."""
    story = joined(step=40)
    assert phase_of(story.state) is Phase.IDLE
    story.notice(in_s=120)
    assert phase_of(story.state) is Phase.CHECKPOINTING
    story.accept(41)
    story.answer(42)
    assert phase_of(story.state) is Phase.FLUSHING
    story.flushed(after_s=3)
    assert phase_of(story.state) is Phase.COMMITTING
    assert not story.verdicts, "nothing is safe before the store has confirmed it"
    story.committed()
    assert phase_of(story.state) is Verdict.SAFE
    assert story.verdicts == ["SAFE generation 2 step 42"]
    assert story.last(Conclude).slack_s == 117.0


@pytest.mark.fault("N14")
def test_an_advisory_notice_takes_one_more_checkpoint_without_urgency() -> None:
    """The daemon requests a checkpoint without urgency, concludes no verdict, and watches again."""
    story = joined(step=9)
    story.notice(source="aws.rebalance", severity=Severity.ADVISORY, in_s=3600)
    assert phase_of(story.state) is Phase.ARMED
    assert story.last(Request).urgency == "drain"
    story.serve(9)
    assert phase_of(story.state) is Phase.ARMED
    assert story.state.evacuation is None
    assert story.state.commits.last == CommitRef(2, 10)
    story.wait(60)
    assert len(story.all(Request)) == 1, "once for each notice"
    assert not story.verdicts
    story.withdraw("aws.rebalance")
    assert phase_of(story.state) is Phase.IDLE


@pytest.mark.fault("N14")
def test_an_imminent_notice_replaces_a_precaution() -> None:
    """The request of the precaution is withdrawn, and the urgent one replaces it."""
    story = joined(step=9)
    story.notice(source="aws.rebalance", severity=Severity.ADVISORY, in_s=3600)
    story.notice(source="aws.spot", in_s=120)
    assert story.last(Withdrawn)
    assert story.last(Request).urgency == "emergency"
    story.serve(9)
    assert story.verdicts == ["SAFE generation 2 step 10"]


@pytest.mark.fault("N18")
@pytest.mark.parametrize(("save_s", "lead_s"), [(None, 120), (200.0, 405)])
def test_a_scheduled_end_is_evacuated_when_it_is_near(save_s: float | None, lead_s: int) -> None:
    """The lead of the evacuation is two minutes, or twice the time of a save and the reserve."""
    story = joined(step=9, save_s=save_s)
    story.notice(source="gcp.maintenance", severity=Severity.SCHEDULED, in_s=3600)
    assert story.last(Request).urgency == "drain"
    story.serve(9)
    story.join(connection=2, step=11, save_s=save_s)
    story.wait(3600 - lead_s - 5)
    assert phase_of(story.state) is Phase.ARMED
    story.wait(10)
    assert phase_of(story.state) is Phase.CHECKPOINTING
    assert story.last(Request).urgency == "emergency"


def test_a_derived_deadline_replaces_an_assumed_one_once() -> None:
    """It may be later, while logind would have reported an earlier end."""
    for logind, expected_s in ((Health.OK, 115), (Health.BLIND, 25)):
        story = Story()
        story.health("logind", logind)
        story.notice(25, "gcp.preempted", quality=DeadlineQuality.ASSUMED)
        expected_mono_s = pytest.approx(story.now + expected_s, abs=0.1)
        story.wait(15)
        for left_s in (100, 485):
            story.notice(left_s, "gcp.preempted", quality=DeadlineQuality.DERIVED)
            assert story.evacuation.deadline_mono_s == expected_mono_s


def test_a_derived_deadline_of_an_outlived_notice_moves_no_other_deadline() -> None:
    """The deadline of another evacuation stays, and the decision loop raises nothing."""
    story = Story()
    story.health("logind", Health.OK)
    story.notice(25, "gcp.preempted", quality=DeadlineQuality.ASSUMED)
    story.wait(36)
    assert story.state.evacuation is None
    story.join(step=9)
    story.notice(source="gcp.upcoming", severity=Severity.ADVISORY, in_s=3600)
    deadline_mono_s = story.evacuation.deadline_mono_s
    story.notice(80, "gcp.preempted", quality=DeadlineQuality.DERIVED)
    assert story.evacuation.deadline_mono_s == deadline_mono_s


def test_a_faster_save_does_not_withdraw_a_scheduled_evacuation() -> None:
    """It opened early because the last save was slow; a fast one shortens the lead afterwards."""
    story = joined(step=9, save_s=200)
    story.notice(source="deadline", severity=Severity.SCHEDULED, in_s=3600)
    story.serve(9)
    story.tell(TrainerProgress(1, 11, save_s=200.0))
    story.wait(3600 - 400)
    assert story.state.evacuation is not None
    story.serve(11)
    assert story.verdicts == ["SAFE generation 2 step 12"]
    story.wait(60)
    assert len(story.verdicts) == 1
    assert not story.all(Withdrawn)


def test_a_rank_that_joins_during_a_precaution_gets_no_urgent_request() -> None:
    """It reconnects while the precaution is in progress, and gets the same request as the others."""
    story = joined(step=9)
    story.notice(source="aws.rebalance", severity=Severity.ADVISORY, in_s=3600)
    story.leave(exited=False)
    story.join(2, step=9)
    assert [order.urgency for order in story.all(Request)] == ["drain", "drain"]


@pytest.mark.fault("H05", "N17")
def test_a_vm_that_was_suspended_checks_the_fence() -> None:
    """The monotonic clock stood still meanwhile, and another VM may have claimed the run."""
    story = Story()
    story.tell(WokeUp(3600.0))
    assert story.last(CheckFence)
    story.tell(FenceFound(9))
    assert story.last(Exit).code == transition.EXIT_FENCED


@pytest.mark.fault("N17")
def test_a_vm_that_outlives_its_deadline_keeps_its_verdict() -> None:
    """SAFE stays SAFE, and sets that are sealed afterwards are still stored."""
    story = Story(reserve_s=5)
    story.join(step=9)
    story.notice(in_s=25)
    story.serve(9)
    story.wait(21)
    story.seal(20)
    assert story.flushes == [10], "the reserve is not for data"
    story.wait(6)
    assert story.flushes == [10, 20], "whatever arrives after the deadline counts"
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 10", "SAFE generation 2 step 20"]


def test_the_answer_to_a_signal_is_an_emergency_checkpoint() -> None:
    """Its framework does not record why it was saved: in the manifest it is emergency, as with hooks."""
    story = Story(signals_trainer=True)
    story.seal(4, framework="checkpoint-n")
    story.notice()
    story.commit(8, framework="checkpoint-n")
    kinds = {c.staged.id.step: c.staged.kind.value for c in story.all(CommitManifest)}
    assert kinds[8] == "emergency"
    found = [dict(log.facts) for log in story.all(Log) if log.event == "sealed_set_found"]
    assert [(facts["step"], facts["kind"]) for facts in found] == [
        (4, "periodic"),
        (8, "emergency"),
    ]
    story.scan()
    assert {s.id.step: s.kind.value for s in story.state.staging.staged} == {
        4: "periodic",
        8: "emergency",
    }


def test_a_withdrawn_notice_withdraws_the_request() -> None:
    """After the last notice the request is withdrawn too, and the flush in flight continues."""
    story = joined()
    story.seal(10)
    story.notice()
    assert not story.all(Withdrawn)
    story.withdraw()
    assert story.all(Withdrawn)
    assert phase_of(story.state) is Phase.IDLE
    assert not story.all(CancelFlush)
    story.store_all()
    assert story.state.commits.last == CommitRef(2, 10)
    assert not story.verdicts


@pytest.mark.fault("N15")
def test_two_sources_make_one_evacuation_with_the_earlier_deadline() -> None:
    """The earliest deadline of all sources counts, and the trainer gets one request.

    A source withdraws only its own notice.
    """
    story = joined()
    story.notice(in_s=120, source="aws.spot")
    story.notice(in_s=30, source="logind", severity=Severity.SHUTTING_DOWN)
    assert story.evacuation.deadline_mono_s == story.now + 30
    assert len(story.all(Request)) == 1
    for source in ("logind", "aws.rebalance"):
        story.withdraw(source)
        assert story.state.evacuation is not None, "the other notice is still in force"
    assert not story.all(Withdrawn)
    assert story.evacuation.deadline_mono_s == story.now + 30


def test_a_deadline_never_moves_later() -> None:
    """Another sighting may bring the deadline nearer only, which the timeline shows."""
    story = Story()
    first = story.notice(in_s=100)
    story.notice(in_s=150)
    assert story.evacuation.deadline_mono_s == first.deadline_mono_s
    nearer = story.notice(in_s=50)
    assert story.evacuation.deadline_mono_s == nearer.deadline_mono_s
    (moved,) = [mark for mark in story.all(Mark) if mark.phase == "deadline_moved"]
    assert dict(moved.facts)["seconds_left"] == 50.0


def test_a_notice_may_become_more_severe() -> None:
    """A notice that was advisory and is imminent now opens an evacuation, with the same identity."""
    story = joined()
    story.notice(in_s=60, identity="m", severity=Severity.ADVISORY)
    assert story.last(Request).urgency == "drain"
    story.notice(in_s=60, identity="m", severity=Severity.IMMINENT)
    assert story.last(Request).urgency == "emergency"


def test_the_most_severe_notice_names_the_evacuation() -> None:
    """Of several notices the most severe one is the reason in the request."""
    story = Story()
    story.notice(source="deadline", in_s=500, severity=Severity.SCHEDULED)
    story.notice(source="gcp.preempted", in_s=90, severity=Severity.IMMINENT)
    assert story.evacuation.reason.startswith("gcp.preempted")


# ---------------------------------------------------------------------------- plans


@pytest.mark.fault("T05", "N18")
@pytest.mark.parametrize(("left_s", "asked"), [(14.9, False), (15.1, True), (3600.0, True)])
def test_a_checkpoint_is_requested_only_if_it_fits(left_s: float, asked: bool) -> None:
    """10 s for the save, an unknown bandwidth and 5 s of reserve need 15 s."""
    story = Story(reserve_s=5)
    story.join(step=9, save_s=10.0, save_bytes=100 * MIB)
    story.seal(8)
    story.notice(in_s=left_s)
    assert bool(story.all(Request)) is asked
    assert story.flushes == [8], "sealed sets are stored in either case"


def test_a_checkpoint_that_fits_later_is_requested_later() -> None:
    """A better measured bandwidth changes the plan."""
    story = Story(reserve_s=5)
    story.join(step=9, save_s=30.0, save_bytes=100 * MIB)
    story.commit(7, after_s=100)  # 1 MiB/s
    story.seal(8)
    story.notice(in_s=110)
    assert not story.all(Request)
    story.flushed(after_s=2)  # 50 MiB/s
    assert story.all(Request)


@pytest.mark.fault("T01")
def test_without_a_trainer_the_sealed_sets_are_committed() -> None:
    """No request is made; the newest set is stored and committed, whatever the trainer has done since."""
    story = Story(staged=[a_set(10)], recorded=[Start(id="a", generation=2)])
    story.notice()
    story.scan()
    story.store_all()
    assert story.state.commits.last_complete == CommitRef(2, 10)
    story.wait(WAITED_S)
    assert not story.all(Request)
    assert story.verdicts == ["PARTIAL generation 2 step 10"]


def test_a_stored_set_is_only_committed() -> None:
    """With everything stored, no data is sent after the notice."""
    story = Story()
    story.seal(10)
    story.flushed()
    story.notice()
    assert story.evacuation.plan.kind.value == "COMMIT"
    story.committed()
    assert story.flushes == [10]
    story.wait(WAITED_S)
    assert story.verdicts == []  # until a scan after the notice
    story.scan()
    assert story.verdicts == ["PARTIAL generation 2 step 10"]


# ---------------------------------------------------------------------------- flush


def test_without_a_notice_a_flush_is_finished() -> None:
    """Otherwise a fast trainer could prevent every flush from ending."""
    story = Story()
    story.seal(10)
    story.seal(11)
    assert story.flushes == [10]
    story.flushed()
    assert story.flushes == [10, 11]


@pytest.mark.fault("O09", "T07")
def test_an_older_set_is_not_sent_during_the_commit_of_a_newer_one() -> None:
    """Its bytes are not worth the bandwidth, unless that commit fails."""
    story = Story(staged=[a_set(9), a_set(10)], recorded=[Start(id="a", generation=2)])
    story.flushed()
    assert story.flushes == [10]
    story.commit_fails(conflict=True)
    assert story.flushes == [10, 9]


@pytest.mark.fault("O03", "D10")
def test_the_bandwidth_drops_during_a_flush() -> None:
    """A set that no longer fits is replaced by one that does, once."""
    story = Story(reserve_s=5)
    story.commit(5, size_bytes=400 * MIB, after_s=4)  # 100 MiB/s
    story.staging += [a_set(10, size_bytes=100 * MIB), a_set(20, size_bytes=1000 * MIB)]
    story.notice(in_s=45)
    story.scan()
    assert story.flushes == [5, 20]
    sent: dict[str, int] = {}
    for _ in range(35):
        story.now += 1
        flight = story.state.flush.flight
        if flight is None:
            break
        sent[flight.flush_id] = sent.get(flight.flush_id, 0) + 10 * MIB  # a tenth
        if sent[flight.flush_id] >= flight.staged.size_bytes:
            story.flushed()
        else:
            done = sent[flight.flush_id]
            story.tell(FlushProgress(flight.flush_id, done, done))
    assert story.flushes[:3] == [5, 20, 10]
    assert story.flushes.count(20) <= 2
    story.committed()
    assert story.state.commits.last == CommitRef(2, 10)


def test_the_reserve_is_never_spent_on_data() -> None:
    """Within the reserve no flush begins; a manifest is still written."""
    story = Story(reserve_s=5)
    story.notice(in_s=10)
    story.wait(5.1)
    story.seal(10)
    assert story.flushes == []
    story = Story(reserve_s=5)
    story.seal(10)
    story.notice(in_s=10)
    story.now += 6
    story.flushed()
    assert len(story.all(CommitManifest)) == 1


@pytest.mark.fault("O03")
def test_a_pause_after_an_error_of_the_store_spares_the_reserve() -> None:
    """The manifest of a set fails while the next one is sent: that flush still ends before the reserve."""
    story = Story(reserve_s=5)
    story.seal(10)
    story.notice(in_s=10)
    story.flushed()
    story.seal(11, "def")
    assert story.state.flush.flight is not None
    story.wait(4.8)
    story.tell(CommitFailed(story.last(CommitManifest).flush_id, "503", conflict=False))
    story.wait(0.4)
    assert story.state.flush.flight is None


def test_the_log_names_the_kind_of_a_failure() -> None:
    """The reason may contain the key of an object, which differs each time; the kind groups the lines."""
    story = Story()
    story.seal(10)
    story.tell(FlushFailed(story.flight.flush_id, "put k-1: 503", void=False, kind="transient"))
    story.wait(2)
    story.flushed()
    failed = story.last(CommitManifest).flush_id
    story.tell(CommitFailed(failed, "put k-2: 403", conflict=False, kind="refused"))
    lines = {line.event: dict(line.facts) for line in story.all(Log)}
    assert lines["flush_failed"]["kind"] == "transient"
    assert lines["commit_failed"]["kind"] == "refused"


@pytest.mark.fault("D09", "D03")
def test_a_void_set_is_not_tried_again() -> None:
    """A set that changed during its flush is not flushed again; an older one replaces it."""
    story = Story(staged=[a_set(9), a_set(10)], recorded=[Start(id="a", generation=2)])
    flight = story.flight
    story.tell(FlushFailed(flight.flush_id, "changed", void=True))
    story.wait(100)
    assert story.flushes == [10, 9]
    story.notice()
    story.scan()
    story.store_all()
    story.wait(WAITED_S)
    assert story.verdicts == ["PARTIAL generation 2 step 9"]


def test_a_set_that_disappears_after_the_notice_is_requested_again() -> None:
    """A set that is deleted before its commit proves nothing, and another one is requested in time."""
    story = Story(staged=[a_set(10)], recorded=[Start(id="a", generation=2)])
    story.store_all()
    story.join(step=11)
    story.notice()
    story.accept(11)
    lost = story.answer(12)
    story.lose(lost)
    assert story.state.flush.flight is None
    assert story.all(CancelFlush)
    assert story.verdicts == []
    story.wait(2.0)
    assert story.request_id.endswith(".again-1")
    story.serve(12)
    assert story.verdicts == ["SAFE generation 2 step 13"]


@pytest.mark.fault("O04")
def test_retries_back_off_and_are_frequent_during_an_evacuation() -> None:
    """Pauses double up to ten seconds; a notice causes a retry immediately and then every half second."""
    story = Story()
    story.seal(10)
    waits = []
    for _ in range(8):
        flight = story.flight
        story.tell(FlushFailed(flight.flush_id, "503", void=False))
        waits.append(story.state.flush.retry_mono_s - story.now)
        assert story.state.flush.flight is None
        story.now = story.state.flush.retry_mono_s
        story.tell(Tick())
    assert waits == [1, 2, 4, 8, 10, 10, 10, 10]
    flight = story.flight
    story.tell(FlushFailed(flight.flush_id, "503", void=False))
    story.notice()
    assert story.state.flush.flight is not None, "the backoff of earlier failures ends"
    story.tell(FlushFailed(story.flight.flush_id, "503", void=False))
    story.wait(RETRY_URGENT_S)
    assert story.state.flush.flight is not None


def test_late_events_of_a_replaced_flush_are_ignored() -> None:
    """Only events of the flush in flight count."""
    story = Story()
    story.seal(10)
    old = story.flight
    story.tell(FlushFailed(old.flush_id, "503", void=False))
    story.wait(60)
    story.tell(FlushFailed(old.flush_id, "changed", void=True))
    story.tell(FlushProgress(old.flush_id, 10**9))
    story.tell(Flushed(old.flush_id, ()))
    assert not story.state.commits.stored
    assert story.state.flush.flight is not None
    assert not story.state.flush.stored_bytes
    assert not story.state.staging.unusable


# ---------------------------------------------------------------------------- commit


def test_commit_follows_the_flush_and_names_its_parent() -> None:
    """With all shards stored, the manifest has our generation and the newest commit as parent."""
    story = Story(generation=3, newest=CommitRef(2, 5))
    story.seal(10)
    assert not story.all(CommitManifest)
    story.flushed()
    order = story.last(CommitManifest)
    assert (order.generation, order.parent) == (3, CommitRef(2, 5))
    assert [shard.path for shard in order.shards] == ["model.bin"]


@pytest.mark.fault("G05")
def test_a_commit_without_a_reply_is_retried_without_data() -> None:
    """The shards are stored: only the manifest is retried."""
    story = Story()
    story.seal(10)
    story.flushed()
    story.commit_fails()
    assert len(story.all(CommitManifest)) == 1
    story.wait(1)
    assert len(story.all(CommitManifest)) == 2
    story.committed()
    assert story.flushes == [10]


def test_prune_deletes_only_older_sets_of_our_hooks() -> None:
    """Adopted sets belong to their framework; the committed set stays for a quick restore."""
    story = joined()
    for step in (8, 9, 11):
        story.staging.append(a_set(step))
    story.staging.append(a_set(7, framework="hf"))
    story.staging.append(a_set(10))
    story.scan()
    story.store_all()
    pruned = {name for order in story.all(Prune) for name in order.directories}
    assert pruned == {a_set(step).directory for step in (8, 9, 10)}


@pytest.mark.fault("G03")
def test_a_fenced_daemon_ends() -> None:
    """It informs the trainer, writes the farewell of the open evacuation, and decides nothing more."""
    story = joined()
    story.seal(10)
    story.notice()
    actions = story.tell(FenceFound(7))
    assert [type(a).__name__ for a in actions] == ["Log", "CancelFlush", "Send", "Exit", "Conclude"]
    assert "as generation 7" in story.last(Conclude).reason
    assert story.verdicts == []
    assert story.last(Fenced).generation == 7
    assert story.last(Exit).code == transition.EXIT_FENCED
    assert phase_of(story.state) is Phase.FENCED
    story.seal(11)
    assert story.wait(10) == []


@pytest.mark.fault("G18")
def test_another_vm_with_our_number_fences_as_a_newer_one_does() -> None:
    """An event about an earlier generation has no effect."""
    story = joined()
    own = story.state.generation
    assert own is not None
    story.tell(FenceFound(own))
    story.tell(FenceFound(own - 1, is_same_number=True))
    assert story.state.starts.fenced_by is None
    story.tell(FenceFound(own, is_same_number=True))
    assert story.last(Exit).code == transition.EXIT_FENCED


@pytest.mark.fault("M06")
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("number", [3, 7, 1008])
def test_a_promoted_mirror_ends_the_daemon_whatever_the_number_of_its_claim(
    nodes: int, number: int
) -> None:
    """Over several VMs as well: no later start of the job may continue in the old store."""
    story = Story(generation=7)
    story.join(nodes=nodes)
    story.tell(FenceFound(number, in_mirror=True))
    reason = f"generation {number} has taken the run over"
    assert story.last(Exit) == Exit(transition.EXIT_FENCED, reason)
    assert story.state.starts.fenced_by == number


# ---------------------------------------------------------------------------- the ends


@pytest.mark.fault("N17")
def test_a_vm_that_outlives_its_deadline_watches_again() -> None:
    """The request is withdrawn; the same notice has no further effect, another one has."""
    story = joined(step=5)
    raised = story.notice(in_s=30, identity="a")
    story.wait(30)
    assert story.verdicts == ["LOST None"]
    story.wait(notices.OUTLIVED_S + 0.1)
    assert phase_of(story.state) is Phase.IDLE
    assert story.all(Withdrawn)
    story.tell(NoticeRaised(raised))
    story.wait(1)
    assert phase_of(story.state) is Phase.IDLE
    story.notice(in_s=30, identity="b")
    assert phase_of(story.state) is Phase.CHECKPOINTING


def test_no_verdict_before_the_first_scan() -> None:
    """A daemon that is restarted during a shutdown scans staging before it ends."""
    recorded = [Start(id="a", generation=2)]
    story = Story(claimed=False, staged=[a_set(20)], recorded=recorded)
    story.notice(in_s=60, source=transition.HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.tell(RunRead(CommitRef(2, 10), "a"))
    story.wait(1)
    assert not story.verdicts
    assert not story.all(Exit)
    story.scan()
    story.store_all()
    assert not story.all(Exit), "the trainers have just lost their connection"
    story.wait(RECONNECT_S)
    assert story.verdicts == ["PARTIAL generation 2 step 20"]
    assert story.all(Exit)


@pytest.mark.fault("H02")
def test_an_operator_stop_does_not_reach_the_trainer() -> None:
    """No request, no verdict: the process ends, and continues after a restart."""
    story = joined()
    story.seal(10)
    actions = story.tell(StopRequested("restart"))
    assert [type(a).__name__ for a in actions] == ["Exit"]
    assert story.wait(100) == []


@pytest.mark.fault("N10")
@pytest.mark.fault("N01", "N02")
def test_the_health_of_a_source_is_logged_and_opens_no_evacuation() -> None:
    """A blind source is logged as a warning."""
    story = joined()
    (line,) = story.health("aws.spot", Health.BLIND)
    assert isinstance(line, Log)
    assert line.level == "warning"
    assert story.state.notices.sources["aws.spot"].health is Health.BLIND
    assert phase_of(story.state) is Phase.IDLE


@pytest.mark.fault("T16")
def test_newer_sets_wait_until_the_answer_is_safe() -> None:
    """A trainer that continues does not delay its emergency checkpoint, nor change the verdict."""
    story = joined(step=4)
    story.notice(in_s=60)
    story.accept(4)
    story.answer(5)
    story.seal(6)
    assert story.flushes == [5]
    story.flushed()
    story.committed()
    assert story.verdicts == ["SAFE generation 2 step 5"]
    story.wait(1)
    assert story.flushes == [5, 6], "afterwards there may be time for more"
    story.wait(60)
    assert story.verdicts == ["SAFE generation 2 step 5"], "SAFE stays SAFE"
