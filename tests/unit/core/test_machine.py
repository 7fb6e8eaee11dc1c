# SPDX-License-Identifier: Apache-2.0
"""Stories of evacuations: notice, request, flush, commit, verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansongd.core import notices, transition
from swansongd.core.events import (
    AskTrainers,
    CancelFlush,
    CheckFence,
    CommitManifest,
    Conclude,
    Exit,
    FenceFound,
    Flushed,
    FlushFailed,
    FlushProgress,
    GenerationClaimed,
    Log,
    NoticeRaised,
    Prune,
    SourceChanged,
    StartFlush,
    StopRequested,
    TellFenced,
    Tick,
    TrainerFailed,
    TrainerProgress,
    TrainerSealed,
    WithdrawRequest,
    WokeUp,
)
from swansongd.core.flight import RETRY_URGENT_S
from swansongd.core.state import Phase
from swansongd.model import CommitRef, DeadlineQuality, Health, Severity, SourceStatus, Verdict

from testkit.story import MIB, Story, a_notice, a_set


def test_notice_to_safe() -> None:
    """A notice leads through checkpoint, flush and commit to SAFE, and each phase shows."""
    story = Story()
    story.join(step=40)
    assert story.state.phase is Phase.IDLE
    story.notice(in_s=120)
    assert story.state.phase is Phase.CHECKPOINTING
    story.accept(41)
    story.answer(42)
    assert story.state.phase is Phase.FLUSHING
    story.flushed(after_s=3)
    assert story.state.phase is Phase.COMMITTING
    assert not story.verdicts, "nothing is safe before the store has confirmed it"
    story.committed()
    assert story.state.phase is Verdict.SAFE
    assert story.verdicts == ["SAFE generation 2 step 42"]
    assert story.last(Conclude).slack_s == 117.0


@pytest.mark.fault("N09")
def test_the_same_notice_again_asks_nothing_twice() -> None:
    """However often a notice is seen, there is one request and one verdict."""
    story = Story()
    story.join(step=40)
    raised = story.notice()
    for _ in range(5):
        story.tell(NoticeRaised(raised))
        story.wait(1)
    assert len(story.all(AskTrainers)) == 1
    story.accept(40)
    story.answer(41)
    story.store_all()
    story.tell(NoticeRaised(raised))
    assert story.verdicts == ["SAFE generation 2 step 41"]


@pytest.mark.fault("N14")
def test_advisory_takes_one_checkpoint_more_and_stops_nobody() -> None:
    """Word that may not come true: a checkpoint without urgency, no verdict, and then just watching."""
    story = Story()
    story.join(step=9)
    story.notice(source="aws.rebalance", severity=Severity.ADVISORY, in_s=3600)
    assert story.state.phase is Phase.ARMED
    assert not story.last(AskTrainers).is_urgent
    story.accept(9)
    story.answer(10)
    story.store_all()
    assert story.state.phase is Phase.ARMED
    assert story.state.evacuation is None
    assert story.state.last_commit == CommitRef(2, 10)
    story.wait(60)
    assert len(story.all(AskTrainers)) == 1, "once for each notice"
    assert not story.verdicts
    story.withdraw("aws.rebalance")
    assert story.state.phase is Phase.IDLE


@pytest.mark.fault("N14")
def test_a_storm_of_advisories_costs_one_checkpoint() -> None:
    """However many different advisories come, trainers are asked once in ten minutes at most."""
    story = Story()
    story.join()
    for number in range(20):
        story.notice(
            source="aws.rebalance", severity=Severity.ADVISORY, in_s=3600, identity=f"r{number}"
        )
        story.store_all()
        story.wait(5)
        if number == 0:
            story.accept(0)
            story.answer(1)
    assert len(story.all(AskTrainers)) == 1


@pytest.mark.fault("N14")
def test_a_real_notice_overtakes_a_precaution() -> None:
    """The request of the precaution is withdrawn, and the urgent one takes its place."""
    story = Story()
    story.join(step=9)
    story.notice(source="aws.rebalance", severity=Severity.ADVISORY, in_s=3600)
    story.notice(source="aws.spot", in_s=120)
    assert story.last(WithdrawRequest)
    assert story.last(AskTrainers).is_urgent
    story.accept(9)
    story.answer(10)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 10"]


@pytest.mark.fault("N18")
def test_a_scheduled_end_is_evacuated_when_it_comes_near() -> None:
    """An hour ahead a precaution, two minutes ahead the real thing."""
    story = Story()
    story.join(step=9)
    story.notice(source="gcp.maintenance", severity=Severity.SCHEDULED, in_s=3600)
    assert not story.last(AskTrainers).is_urgent
    story.accept(9)
    story.answer(10)
    story.store_all()
    story.wait(3600 - 125)
    assert story.state.phase is Phase.ARMED
    story.wait(10)
    assert story.state.phase is Phase.CHECKPOINTING
    assert story.last(AskTrainers).is_urgent


@pytest.mark.fault("N18")
def test_a_slow_save_is_begun_earlier() -> None:
    """A scheduled end leaves as much time as twice the save takes, if that is more."""
    story = Story()
    story.join(step=9, save_s=200.0)
    story.notice(source="gcp.maintenance", severity=Severity.SCHEDULED, in_s=3600)
    story.accept(9)
    story.answer(10)
    story.store_all()
    story.join(connection=2, step=11, save_s=200.0)
    story.wait(3600 - 410)
    assert not story.last(AskTrainers).is_urgent
    story.wait(10)
    assert story.last(AskTrainers).is_urgent


def test_what_a_source_had_to_assume_it_may_learn() -> None:
    """A later deadline is believed once: learned instead of assumed, while logind would have spoken."""
    for logind, expected_s in ((Health.OK, 115), (Health.BLIND, 25)):
        story = Story()
        story.tell(
            SourceChanged(
                SourceStatus(source="logind", health=logind, reason="", since_mono_s=story.now)
            )
        )
        began = story.now
        first = replace(
            a_notice("gcp.preempted", deadline_mono_s=began + 25),
            deadline_quality=DeadlineQuality.ASSUMED,
        )
        story.tell(NoticeRaised(first))
        story.wait(15)
        learned = replace(
            first, deadline_mono_s=began + 115, deadline_quality=DeadlineQuality.DERIVED
        )
        story.tell(NoticeRaised(learned))
        assert story.state.evacuation is not None
        assert story.state.evacuation.deadline_mono_s == began + expected_s
        story.tell(NoticeRaised(replace(learned, deadline_mono_s=began + 500)))
        assert story.state.evacuation.deadline_mono_s == began + expected_s


def test_what_is_learned_of_a_notice_that_was_outlived_moves_nothing_else() -> None:
    """The deadline of another evacuation stands, and so does the decision loop."""
    story = Story()
    story.tell(
        SourceChanged(
            SourceStatus(source="logind", health=Health.OK, reason="", since_mono_s=story.now)
        )
    )
    first = replace(
        a_notice("gcp.preempted", deadline_mono_s=story.now + 25),
        deadline_quality=DeadlineQuality.ASSUMED,
    )
    story.tell(NoticeRaised(first))
    story.wait(36)
    assert story.state.evacuation is None
    story.join(step=9)
    story.notice(source="gcp.upcoming", severity=Severity.ADVISORY, in_s=3600)
    assert story.state.evacuation is not None
    deadline_mono_s = story.state.evacuation.deadline_mono_s
    learned = replace(
        first, deadline_mono_s=story.now + 80, deadline_quality=DeadlineQuality.DERIVED
    )
    story.tell(NoticeRaised(learned))
    assert story.state.evacuation is not None
    assert story.state.evacuation.deadline_mono_s == deadline_mono_s


def test_a_scheduled_evacuation_is_not_taken_back_by_a_faster_save() -> None:
    """It was begun early because saving was slow; that the next save was quick withdraws nothing."""
    story = Story()
    story.join(step=9, save_s=200)
    story.notice(source="deadline", severity=Severity.SCHEDULED, in_s=3600)
    story.accept(9)
    story.answer(10)  # the precaution; it took 2 s
    story.store_all()
    story.tell(TrainerProgress(1, 11, save_s=200.0))
    story.wait(3600 - 400)
    assert story.state.evacuation is not None
    story.accept(11)
    story.answer(12)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 12"]
    story.wait(60)
    assert len(story.verdicts) == 1
    assert not story.all(WithdrawRequest)


def test_who_joins_during_a_precaution_is_not_hurried() -> None:
    """A rank that comes back while a precaution is under way is asked as the others were: no urgency."""
    story = Story()
    story.join(step=9)
    story.notice(source="aws.rebalance", severity=Severity.ADVISORY, in_s=3600)
    story.leave(exited=False)
    story.join(2, step=9)
    assert [order.is_urgent for order in story.all(AskTrainers)] == [False, False]


@pytest.mark.fault("H05", "N17")
def test_a_vm_that_slept_looks_whether_it_was_overtaken() -> None:
    """The monotonic clock stood still meanwhile, and another VM may have taken the run."""
    story = Story()
    story.tell(WokeUp(3600.0))
    assert story.last(CheckFence)
    story.tell(FenceFound(9))
    assert story.last(Exit).code == transition.EXIT_FENCED


@pytest.mark.fault("N17")
def test_a_deadline_that_was_too_early_takes_nothing_back() -> None:
    """SAFE stays SAFE when the VM outlives its deadline, and what is sealed then is still stored."""
    story = Story(reserve_s=5)
    story.join(step=9)
    story.notice(in_s=25)
    story.accept(9)
    story.answer(10)
    story.store_all()
    story.wait(21)
    story.seal(20)
    assert story.flushes == [10], "the reserve is not for data"
    story.wait(6)
    assert story.flushes == [10, 20], "and what comes after the deadline is won"
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 10", "SAFE generation 2 step 20"]


def test_another_notice_after_the_verdict_is_acted_on() -> None:
    """A drill that ended SAFE does not make a reclaim that comes after it go unheard."""
    story = Story()
    story.join(step=9)
    story.notice(source="manual", in_s=300)
    story.accept(9)
    story.answer(10)
    story.store_all()
    story.progress(40)
    story.notice(source="aws.spot", in_s=120)
    assert len(story.all(AskTrainers)) == 2
    story.accept(40)
    story.answer(41, "two")
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 10", "SAFE generation 2 step 41"]
    assert story.state.evacuation is not None
    assert story.state.evacuation.deadline_mono_s < story.now + 121


def test_a_signalled_save_is_measured() -> None:
    """The next plan knows how long a trainer without hooks takes from signal to settled."""
    story = Story(signals_trainer=True)
    story.notice(in_s=120)
    story.wait(7)
    story.seal(10, framework="checkpoint-n")
    assert story.state.measured.save_s == 7


def test_withdrawn_notice_lets_training_go_on() -> None:
    """When the last notice is withdrawn, the request is too, and what is in flight goes on."""
    story = Story()
    story.join()
    story.seal(10)
    story.notice()
    assert [a.request_id for a in story.withdraw() if isinstance(a, WithdrawRequest)]
    assert story.state.phase is Phase.IDLE
    assert not story.all(CancelFlush)
    story.store_all()
    assert story.state.last_commit == CommitRef(2, 10)
    assert not story.verdicts


def test_only_the_source_that_raised_a_notice_withdraws_it() -> None:
    """The word of another source that all is well changes nothing."""
    story = Story()
    story.join()
    story.notice(source="aws.spot")
    story.withdraw("aws.rebalance")
    assert story.state.phase is Phase.CHECKPOINTING
    assert not story.all(WithdrawRequest)


@pytest.mark.fault("N15")
def test_two_sources_make_one_evacuation_with_the_earlier_deadline() -> None:
    """The earliest deadline holds, whoever named it, and the trainer is asked once."""
    story = Story()
    story.join()
    story.notice(in_s=120, source="aws.spot")
    story.notice(in_s=30, source="logind", severity=Severity.SHUTTING_DOWN)
    assert story.state.evacuation is not None
    assert story.state.evacuation.deadline_mono_s == story.now + 30
    assert len(story.all(AskTrainers)) == 1
    story.withdraw("logind")
    assert story.state.evacuation is not None, "the other notice still stands"
    assert story.state.evacuation.deadline_mono_s == story.now + 30


def test_a_deadline_never_recedes() -> None:
    """Another sighting may bring the deadline nearer, and never moves it away."""
    story = Story()
    raised = story.notice(in_s=100, identity="one")
    first = raised.deadline_mono_s
    story.tell(NoticeRaised(a_notice(identity="one", deadline_mono_s=first + 50)))
    assert story.state.evacuation is not None
    assert story.state.evacuation.deadline_mono_s == first
    story.tell(NoticeRaised(a_notice(identity="one", deadline_mono_s=first - 50)))
    assert story.state.evacuation.deadline_mono_s == first - 50


def test_a_notice_may_become_more_severe() -> None:
    """What began as advisory and is now imminent is acted on, although it keeps its name."""
    story = Story()
    story.join()
    story.notice(in_s=60, identity="m", severity=Severity.ADVISORY)
    assert not story.last(AskTrainers).is_urgent
    story.notice(in_s=60, identity="m", severity=Severity.IMMINENT)
    assert story.last(AskTrainers).is_urgent


def test_the_most_severe_notice_names_the_evacuation() -> None:
    """Of several live notices the most severe is the reason given to the trainer."""
    story = Story()
    story.notice(source="deadline", in_s=500, severity=Severity.SCHEDULED)
    story.notice(source="gcp.preempted", in_s=90, severity=Severity.IMMINENT)
    assert story.state.evacuation is not None
    assert story.state.evacuation.reason.startswith("gcp.preempted")


# ---------------------------------------------------------------------------- plans


@pytest.mark.fault("T05", "N18")
@pytest.mark.parametrize(("left_s", "asked"), [(14.9, False), (15.1, True), (3600.0, True)])
def test_a_checkpoint_is_asked_for_only_if_it_fits(left_s: float, asked: bool) -> None:
    """10 s of saving, nothing known of the network, 5 s of reserve: 15 s are needed, not less."""
    story = Story(reserve_s=5)
    story.join(step=9, save_s=10.0, save_bytes=100 * MIB)
    story.seal(8)
    story.notice(in_s=left_s)
    assert bool(story.all(AskTrainers)) is asked
    assert story.flushes == [8], "what is sealed already is stored either way"


def test_what_fits_later_is_asked_for_later() -> None:
    """A better measured bandwidth is a reason to plan again."""
    story = Story(reserve_s=5)
    story.join(step=9, save_s=30.0, save_bytes=100 * MIB)
    story.seal(7)
    story.flushed(after_s=100)  # 1 MiB/s
    story.committed()
    story.seal(8)
    story.notice(in_s=110)
    assert not story.all(AskTrainers)
    story.flushed(after_s=2)  # 50 MiB/s
    assert story.all(AskTrainers)


@pytest.mark.fault("T01")
def test_without_a_trainer_what_is_sealed_is_finished() -> None:
    """Nobody is asked, the newest set is stored and committed, and that is SAFE."""
    story = Story(staged=[a_set(10)])
    story.notice()
    story.scan()
    story.store_all()
    assert not story.all(AskTrainers)
    assert story.verdicts == ["SAFE generation 2 step 10"]


def test_stored_but_not_committed_is_only_published() -> None:
    """With everything stored, no byte of data is sent after the notice."""
    story = Story()
    story.seal(10)
    story.flushed()
    story.notice()
    assert story.state.evacuation is not None
    assert story.state.evacuation.plan.kind.value == "COMMIT"
    story.committed()
    assert story.flushes == [10]
    assert story.verdicts == []  # until staging was looked at after the notice
    story.scan()
    assert story.verdicts == ["SAFE generation 2 step 10"]


def test_nothing_ever_saved_is_lost() -> None:
    """With no trainer, no set and no commit the verdict is LOST, once a scan has looked."""
    story = Story()
    story.notice()
    assert not story.verdicts
    story.scan()
    assert story.verdicts == ["LOST None"]


def test_training_ahead_of_the_commit_is_partial() -> None:
    """If no new checkpoint came, the steps since the commit are lost, and the verdict says so."""
    story = Story()
    story.join(save_s=60.0)
    story.seal(10)
    story.store_all()
    story.progress(12)
    story.notice(in_s=30)
    story.tell(TrainerFailed(1, story.request_id, "disk full"))
    story.scan()
    assert story.verdicts == ["PARTIAL generation 2 step 10"]
    assert "disk full" in story.last(Conclude).reason


# ---------------------------------------------------------------------------- flush


def test_in_an_emergency_the_newest_set_goes_first() -> None:
    """A flush of an older set gives way to the newer one that fits."""
    story = Story()
    story.seal(10)
    story.join()
    story.notice(in_s=120)
    assert story.flushes == [10]
    story.answer(11)
    assert story.flushes == [10, 11]
    story.store_all()
    assert story.verdicts[0] == "SAFE generation 2 step 11"


def test_in_the_background_what_is_begun_is_finished() -> None:
    """Otherwise a fast trainer could keep every flush from its end."""
    story = Story()
    story.seal(10)
    story.seal(11)
    assert story.flushes == [10]
    story.flushed()
    assert story.flushes == [10, 11]


def test_an_older_set_is_not_sent_while_the_commit_of_a_newer_one_is_out() -> None:
    """Its bytes are not worth the bandwidth, unless that commit comes to nothing."""
    story = Story(claimed=False, staged=[a_set(9), a_set(10)])
    story.scan()
    story.tell(GenerationClaimed(2, None))
    story.flushed()
    assert story.flushes == [10]
    story.commit_fails(conflict=True)
    assert story.flushes == [10, 9]


@pytest.mark.fault("O03", "D10")
def test_bandwidth_drops_in_mid_flush() -> None:
    """The set that no longer fits is dropped for one that does, and that choice is not taken back."""
    story = Story(reserve_s=5)
    story.seal(5, size_bytes=400 * MIB)
    story.flushed(after_s=4)  # 100 MiB/s
    story.committed()
    story.staging += [a_set(10, size_bytes=100 * MIB), a_set(20, size_bytes=1000 * MIB)]
    story.notice(in_s=45)
    story.scan()
    assert story.flushes == [5, 20]
    sent: dict[str, int] = {}
    for _ in range(35):
        story.now += 1
        flight = story.state.flight
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
    assert story.state.last_commit == CommitRef(2, 10)


def test_the_reserve_is_never_spent_on_data() -> None:
    """No flush begins when only the reserve is left; a manifest still does."""
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


@pytest.mark.fault("D09", "D03")
def test_a_void_set_is_not_tried_again() -> None:
    """A set that changed under the flush is left alone; an older one takes its place."""
    story = Story(claimed=False, staged=[a_set(9), a_set(10)])
    story.scan()
    story.tell(GenerationClaimed(2, None))
    flight = story.state.flight
    assert flight is not None
    story.tell(FlushFailed(flight.flush_id, "changed", void=True))
    story.wait(100)
    assert story.flushes == [10, 9]
    story.notice()
    story.scan()
    story.store_all()
    assert story.verdicts == ["PARTIAL generation 2 step 9"]


def test_a_set_that_vanishes_after_the_notice_is_not_called_safe() -> None:
    """SAFE is said of the newest sealed set, even of one that somebody has deleted since."""
    story = Story(staged=[a_set(10)])
    story.store_all()
    story.join(step=11)
    story.notice()
    story.accept(11)
    lost = story.answer(12)
    story.lose(lost)
    assert story.state.flight is None
    assert story.all(CancelFlush)
    assert story.verdicts == ["PARTIAL generation 2 step 10"]


@pytest.mark.fault("O04")
def test_a_failing_store_is_asked_again_later_and_sooner_in_an_emergency() -> None:
    """Waits double up to ten seconds; a notice starts at once and then every half second."""
    story = Story()
    story.seal(10)
    waits = []
    for _ in range(8):
        flight = story.state.flight
        assert flight is not None
        story.tell(FlushFailed(flight.flush_id, "503", void=False))
        waits.append(story.state.retry_mono_s - story.now)
        assert story.state.flight is None
        story.now = story.state.retry_mono_s
        story.tell(Tick())
    assert waits == [1, 2, 4, 8, 10, 10, 10, 10]
    flight = story.state.flight
    assert flight is not None
    story.tell(FlushFailed(flight.flush_id, "503", void=False))
    story.notice()
    assert story.state.flight is not None, "what failed a minute ago is tried at once"
    story.tell(FlushFailed(story.state.flight.flush_id, "503", void=False))
    story.wait(RETRY_URGENT_S)
    assert story.state.flight is not None


def test_late_words_of_an_abandoned_flush_are_ignored() -> None:
    """Only the flush that is under way may say that a set is stored."""
    story = Story()
    story.seal(10)
    old = story.state.flight
    assert old is not None
    story.tell(FlushFailed(old.flush_id, "503", void=False))
    story.wait(60)
    story.tell(FlushFailed(old.flush_id, "changed", void=True))
    story.tell(FlushProgress(old.flush_id, 10**9))
    story.tell(Flushed(old.flush_id, ()))
    assert not story.state.stored
    assert story.state.flight is not None
    assert not story.state.stored_bytes
    assert not story.state.unusable


# ---------------------------------------------------------------------------- commit


def test_commit_follows_the_flush_and_names_its_parent() -> None:
    """The manifest is ordered only for stored shards, under our generation, after the newest commit."""
    story = Story(generation=3, newest=CommitRef(2, 5))
    story.seal(10)
    assert not story.all(CommitManifest)
    story.flushed()
    order = story.last(CommitManifest)
    assert (order.generation, order.parent) == (3, CommitRef(2, 5))
    assert [shard.path for shard in order.shards] == ["model.bin"]


@pytest.mark.fault("O09", "T07")
def test_a_conflict_ends_that_set_only() -> None:
    """What lost against another commit of the same step is not tried again; later ones are."""
    story = Story()
    story.seal(10)
    story.flushed()
    story.commit_fails(conflict=True)
    story.wait(100)
    assert len(story.all(CommitManifest)) == 1
    story.seal(11)
    story.store_all()
    assert story.state.last_commit == CommitRef(2, 11)


@pytest.mark.fault("G05")
def test_a_commit_without_an_answer_is_asked_for_again_without_data() -> None:
    """The shards are stored: only the manifest is tried again."""
    story = Story()
    story.seal(10)
    story.flushed()
    story.commit_fails()
    assert len(story.all(CommitManifest)) == 1
    story.wait(1)
    assert len(story.all(CommitManifest)) == 2
    story.committed()
    assert story.flushes == [10]


def test_prune_takes_only_what_our_hooks_wrote_and_a_newer_commit_replaced() -> None:
    """Adopted sets belong to their framework; the committed set stays for a quick restore."""
    story = Story()
    for step in (8, 9, 11):
        story.staging.append(a_set(step))
    story.staging.append(a_set(7, framework="hf"))
    story.staging.append(a_set(10))
    story.scan()
    story.tell(GenerationClaimed(2, None))
    story.store_all()
    pruned = {name for order in story.all(Prune) for name in order.directories}
    assert pruned == {a_set(step).directory for step in (8, 9, 10)}


@pytest.mark.fault("G03")
def test_fenced_means_out() -> None:
    """Once a newer generation shows, nothing more is written, the trainer is told, and we leave."""
    story = Story()
    story.join()
    story.seal(10)
    story.notice()
    actions = story.tell(FenceFound(7))
    assert [type(a).__name__ for a in actions] == ["CancelFlush", "Log", "TellFenced", "Exit"]
    assert story.last(TellFenced).generation == 7
    assert story.last(Exit).code == transition.EXIT_FENCED
    assert story.state.phase is Phase.FENCED
    story.seal(11)
    assert story.wait(10) == []


@pytest.mark.fault("G18")
def test_another_vm_with_our_number_fences_as_a_newer_one_does() -> None:
    """The number alone says nothing: the same event about a number of before is old news."""
    story = Story()
    own = story.state.generation
    assert own is not None
    story.tell(FenceFound(own))
    story.tell(FenceFound(own - 1, is_same_number=True))
    assert story.state.fenced_by is None
    story.tell(FenceFound(own, is_same_number=True))
    assert story.last(Exit).code == transition.EXIT_FENCED


def test_nothing_is_written_before_a_generation_is_claimed() -> None:
    """Sealed sets wait for the claim; afterwards the newest goes first."""
    story = Story(claimed=False, staged=[a_set(9), a_set(10)])
    story.scan()
    story.wait(100)
    assert not story.all(StartFlush)
    story.tell(GenerationClaimed(4, None))
    assert story.last(StartFlush).generation == 4
    assert story.flushes == [10]


@pytest.mark.parametrize("claim_first", [True, False])
def test_old_sets_never_outrank_newer_commits(claim_first: bool) -> None:
    """A set from before the start, older than the newest commit of another VM, is not committed.

    Under our generation it would outrank that commit.  Whether the claim or the first scan is faster
    must not matter.
    """
    story = Story(claimed=False, staged=[a_set(500)])
    events = [lambda: story.tell(GenerationClaimed(6, CommitRef(5, 1000))), story.scan]
    for happens in events if claim_first else reversed(events):
        happens()
    story.wait(60)
    assert story.flushes == []
    story.seal(501)
    assert story.flushes == [501], "what is sealed from now on is ours, and newer than their commit"


# ---------------------------------------------------------------------------- the ends


@pytest.mark.fault("N17")
def test_a_vm_that_outlives_its_deadline_goes_back_to_watching() -> None:
    """The request is withdrawn, the same notice starts nothing again, another one does."""
    story = Story()
    story.join(step=5)
    raised = story.notice(in_s=30, identity="a")
    story.wait(30)
    assert story.verdicts == ["LOST None"]
    story.wait(notices.OUTLIVED_S + 0.1)
    assert story.state.phase is Phase.IDLE
    assert story.all(WithdrawRequest)
    story.tell(NoticeRaised(raised))
    story.wait(1)
    assert story.state.phase is Phase.IDLE
    story.notice(in_s=30, identity="b")
    assert story.state.phase is Phase.CHECKPOINTING


@pytest.mark.fault("N17")
def test_outliving_one_notice_does_not_silence_the_next() -> None:
    """After a drill's deadline the reclaim that is due later still gets its own evacuation."""
    story = Story()
    story.join(step=5)
    story.notice(in_s=30, source="drill")
    story.notice(in_s=300, source="aws.spot")
    story.wait(30 + notices.OUTLIVED_S + 1)
    story.wait(1)
    assert story.state.evacuation is not None
    assert story.state.evacuation.reason.startswith("aws.spot")
    assert len({order.request_id for order in story.all(AskTrainers)}) == 2


def test_a_withdrawn_notice_that_comes_back_counts_again() -> None:
    """Having been outlived once does not make a source deaf for ever."""
    story = Story()
    story.notice(in_s=30, source="gcp.preempted")
    story.wait(41)
    story.withdraw("gcp.preempted")
    story.join()
    story.notice(in_s=30, source="gcp.preempted")
    assert story.state.phase is Phase.CHECKPOINTING


@pytest.mark.fault("H03")
def test_sigterm_of_a_dying_host_ends_with_the_verdict() -> None:
    """The daemon leaves as soon as the verdict is known, and not before."""
    story = Story()
    story.join(step=4)
    story.notice(in_s=60, source=transition.HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.accept(4)
    story.answer(5)
    assert not story.all(Exit)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 5"]
    assert story.last(Exit).code == transition.EXIT_STOPPED
    assert story.state.is_leaving


@pytest.mark.fault("H03")
def test_sigterm_after_the_verdict_ends_at_once() -> None:
    """The usual order on a reclaimed VM: notice, SAFE, and then the host shuts down."""
    story = Story()
    story.join(step=4)
    story.notice(in_s=120)
    story.accept(4)
    story.answer(5)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 5"]
    story.notice(in_s=60, source=transition.HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    assert story.all(Exit)
    assert len(story.verdicts) == 1


def test_no_verdict_before_staging_was_looked_at() -> None:
    """A daemon restarted into a shutdown does not leave before it has seen what lies there."""
    story = Story(claimed=False, staged=[a_set(20)])
    story.notice(in_s=60, source=transition.HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.tell(GenerationClaimed(2, CommitRef(2, 10)))
    story.wait(1)
    assert not story.verdicts
    assert not story.all(Exit)
    story.scan()
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 20"]
    assert story.all(Exit)


def test_the_time_runs_out() -> None:
    """At the deadline there is a verdict, and a better one if the commit comes after all."""
    story = Story()
    story.seal(10)
    story.store_all()
    story.seal(20)
    story.notice(in_s=20)
    story.wait(20)
    assert story.verdicts == ["PARTIAL generation 2 step 10"]
    story.flushed()
    story.scan()
    story.committed()
    assert story.verdicts[-1] == "SAFE generation 2 step 20"


@pytest.mark.fault("H02")
def test_an_operator_stop_disturbs_nobody() -> None:
    """No request, no verdict: the process ends, and a restart goes on."""
    story = Story()
    story.join()
    story.seal(10)
    actions = story.tell(StopRequested("restart"))
    assert [type(a).__name__ for a in actions] == ["Exit"]
    assert story.wait(100) == []


@pytest.mark.fault("N10")
@pytest.mark.fault("N01", "N02")
def test_the_health_of_a_source_is_kept_and_said_and_decides_nothing() -> None:
    """A blind source is logged as a warning; no evacuation comes of it."""
    story = Story()
    story.join()
    status = SourceStatus(source="aws.spot", health=Health.BLIND, reason="x", since_mono_s=1.0)
    (line,) = story.tell(SourceChanged(status))
    assert isinstance(line, Log)
    assert line.level == "warning"
    assert story.state.sources["aws.spot"] is status
    assert story.state.phase is Phase.IDLE


@pytest.mark.fault("T15", "T16")
def test_what_the_trainer_does_after_sealing_changes_nothing() -> None:
    """It may go on, seal more, or end: the flush goes on, and what it sealed is committed."""
    story = Story()
    story.join(step=4)
    story.notice(in_s=60)
    story.accept(4)
    story.answer(5)
    story.leave()
    assert story.state.flight is not None
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 5"]


def test_a_sealed_that_the_scan_does_not_confirm_is_not_believed() -> None:
    """The trainer's word alone neither ends the waiting nor starts a flush."""
    story = Story()
    story.join(step=4)
    story.notice()
    story.accept(4)
    story.tell(TrainerSealed(1, story.request_id, 5, 1.0, 10))
    assert story.state.phase is Phase.CHECKPOINTING
    assert not story.all(StartFlush)


@pytest.mark.fault("T16")
def test_newer_sets_wait_until_the_answer_is_safe() -> None:
    """A trainer that trains on neither takes the wire from its emergency checkpoint nor the verdict."""
    story = Story()
    story.join(step=4)
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
    assert story.verdicts == ["SAFE generation 2 step 5"], "what is safe stays safe"


def test_a_notice_acted_on_again_is_a_new_request() -> None:
    """Otherwise the set that answered it the first time would do for the second, long stale."""
    story = Story()
    story.join(step=4)
    story.notice(source="gcp.preempted")
    first = story.request_id
    story.withdraw("gcp.preempted")
    story.notice(source="gcp.preempted")
    assert story.request_id != first
