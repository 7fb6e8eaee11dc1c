# SPDX-License-Identifier: Apache-2.0
"""The milestones of a resume, and the end of the training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansongd.core.events import (
    Conclude,
    DownloadEnded,
    DownloadStarted,
    GenerationClaimed,
    JobStarted,
    LastFarewell,
    RecordResumption,
    RestoreAnswered,
    RestoreAsked,
    RolledBack,
    StopRequested,
    TrainerJoined,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.core.resumption import AGAIN_S, PART_S
from swansongd.model import CommitRef, Severity, TrainerView

from testkit.story import Story

NEWEST = CommitRef(1, 40)


def at(story: Story, seconds: float, event: object) -> None:
    story.now += seconds
    story.tell(event)  # type: ignore[arg-type]


def resumed(story: Story, *, start_id: str = "s1") -> None:
    """A trainer restores step 40, starts, and reports step 43 with the duration of a step."""
    at(story, 1.0, DownloadStarted())
    at(story, 2.0, RestoreAsked())
    at(story, 1.0, DownloadEnded(bytes_fetched=70, bytes_linked=30))
    at(story, 0.5, RestoreAnswered(40, 1))
    story.join(start_id=start_id)
    at(story, 3.0, TrainerProgress(1, 40, start_id=start_id))
    at(story, 4.0, TrainerProgress(1, 43))
    at(story, 1.0, TrainerProgress(1, 44, step_s=1.0))


def test_a_resume_is_recorded_once_with_its_milestones() -> None:
    """The first new step is dated back from the first report: its steps count as equally long."""
    story = Story(newest=NEWEST)
    begun_s = story.now
    resumed(story)
    at(story, 1.0, TrainerProgress(1, 45, step_s=1.0))
    (record,) = story.all(RecordResumption)
    made = record.milestones
    assert (record.generation, made.restored) == (2, NEWEST)
    assert (made.start_step, made.first_step) == (40, 41)
    assert (made.bytes_fetched, made.bytes_linked) == (70, 30)
    instants = [
        made.download_began_mono_s,
        made.asked_mono_s,
        made.download_ended_mono_s,
        made.answered_mono_s,
        made.started_mono_s,
        made.first_step_mono_s,
    ]
    seconds = [at_s - begun_s for at_s in instants if at_s is not None]
    assert seconds == pytest.approx([1.0, 3.0, 4.0, 4.5, 7.5, 7.5 + 4.0 / 3])


def test_a_record_waits_for_the_claim() -> None:
    """The store is away at the start: the record has the generation that is claimed later."""
    story = Story(claimed=False)
    story.scan()
    resumed(story)
    assert not story.all(RecordResumption)
    story.tell(GenerationClaimed(7, None))
    assert [record.generation for record in story.all(RecordResumption)] == [7]


def test_a_reconnection_is_no_resume() -> None:
    """The first report to a restarted daemon is a step: training began before, and nothing is recorded."""
    story = Story(newest=NEWEST)
    story.join(start_id="s1")
    story.progress(500)
    story.progress(501)
    story.wait(60.0)
    assert not story.all(RecordResumption)


def short(newest: CommitRef = NEWEST) -> Story:
    """A training that starts at step 40, and whose pace stays unknown."""
    story = Story(newest=newest)
    story.join(start_id="s1")
    at(story, 3.0, TrainerProgress(1, 40, start_id="s1"))
    return story


def test_a_trainer_that_only_sealed_its_end_is_recorded() -> None:
    """A training of a second may report no step before its final checkpoint."""
    story = short()
    begun_s = story.now
    at(story, 2.0, TrainerSealed(1, "", 44, 0.1, 100))
    (record,) = story.all(RecordResumption)
    made = record.milestones
    assert (made.start_step, made.first_step) == (40, 41)
    # Four steps of unknown duration count as equally long.
    assert made.first_step_mono_s == pytest.approx(begun_s + 0.5)


def test_the_first_report_of_a_new_step_is_recorded_at_once() -> None:
    """The power may be cut within a second of it, before any rank reports the duration of a step."""
    story = short()
    assert not story.all(RecordResumption)
    actions = story.tell(TrainerProgress(1, 41))
    assert RecordResumption in {type(action) for action in actions}
    story.progress(42)
    assert len(story.all(RecordResumption)) == 1


def test_a_stop_without_a_new_step_records_nothing() -> None:
    """No rank has trained from the restored state."""
    assert not short().tell(StopRequested("stopped"))[:-1]


def test_a_start_that_leaves_the_line_records_the_start_before_it() -> None:
    """The first one made a step under the old generation."""
    story = short()
    story.progress(41)
    story.seal(41, start_id="s1")
    story.store_all()
    at(story, 1.0, TrainerProgress(1, 40, start_id="s2"))
    assert story.state.generation is None
    (record,) = story.all(RecordResumption)
    assert (record.generation, record.milestones.first_step) == (2, 41)


def test_a_rollback_is_recorded_by_its_own_start() -> None:
    """Steps of the line that was left do not count as the first step of the next one."""
    story = Story(newest=NEWEST)
    resumed(story)
    late_rank = TrainerProgress(1, 40, start_id="s1")
    at(story, 0.0, late_rank)
    at(story, 1.0, TrainerProgress(1, 45, step_s=1.0))
    story.tell(RolledBack(42))
    story.tell(GenerationClaimed(3, NEWEST, is_rollback=True))
    story.progress(46)
    assert len(story.all(RecordResumption)) == 1
    at(story, 1.0, TrainerProgress(1, 42, start_id="s2"))
    at(story, 1.0, TrainerProgress(1, 43, step_s=1.0))
    record = story.last(RecordResumption)
    assert (record.generation, record.milestones.start_step) == (3, 42)


def test_each_start_of_a_job_over_several_vms_is_recorded() -> None:
    """Each has a generation of its own, and begins with the question of its ranks."""
    story = Story(newest=NEWEST)
    settings = replace(story.state.settings, several_vms=True)
    story.state = replace(story.state, settings=settings)
    for number in (3, 4):
        story.tell(JobStarted(f"start~{number}"))
        story.tell(GenerationClaimed(number, NEWEST, is_rollback=True))
        made = {"rank": 1, "world_size": 2, "local_world_size": 1, "node": 1, "nodes": 2}
        story.tell(TrainerJoined(TrainerView(connection=number, pid=number, step=-1, **made)))
        late_rank = TrainerProgress(number, 39, start_id="late")
        for event in (
            TrainerProgress(number, 40, start_id=f"s{number}"),
            TrainerProgress(number, 41, step_s=1.0),
            late_rank,
            TrainerProgress(number, 42),
        ):
            at(story, 1.0, event)
    records = story.all(RecordResumption)
    assert [record.generation for record in records] == [3, 4]
    assert [record.milestones.start_step for record in records] == [40, 40]
    assert [(record.training.node, record.training.nodes) for record in records] == [(1, 2), (1, 2)]


def test_a_later_start_has_its_own_question() -> None:
    """A trainer that died before its first step does not lengthen the fetch of the next one."""
    story = Story(newest=NEWEST)
    at(story, 1.0, RestoreAsked())
    at(story, 1.0, RestoreAnswered(40, 1))
    story.now += 300.0
    begun_s = story.now
    resumed(story)
    made = story.last(RecordResumption).milestones
    assert made.asked_mono_s == pytest.approx(begun_s + 3.0)


def evacuated(in_s: float = 60.0) -> Story:
    """An evacuation whose verdict is SAFE, while training continues."""
    story = Story(newest=NEWEST)
    resumed(story)
    story.notice(in_s=in_s)
    story.accept(44)
    story.answer(45)
    story.store_all()
    assert story.verdicts
    return story


def test_agreement_and_snapshot_are_the_stall() -> None:
    """The time from the first acceptance to the target, and the time that the save reports."""
    story = Story(newest=NEWEST)
    story.join(1, rank=0, ranks=2, start_id="s")
    story.join(2, rank=1, ranks=2, start_id="t")
    for connection in (1, 2):
        story.tell(TrainerProgress(connection, 40, start_id="st"[connection - 1]))
        story.tell(TrainerProgress(connection, 44, step_s=1.0, snapshot_s=9.0))
    story.notice(in_s=60.0)
    story.accept(44, 1)
    story.now += 0.25
    story.accept(44, 2)
    story.answer(45)
    at(story, 0.5, TrainerProgress(2, 46, snapshot_s=7.0))
    at(story, 0.5, TrainerProgress(1, 46, snapshot_s=0.5))
    at(story, 1.0, TrainerProgress(1, 47, snapshot_s=0.5))
    assert story.state.training.stall_s == pytest.approx(0.75)
    assert story.state.training.saves_s == 0.0


def test_saves_without_a_notice_are_counted_apart() -> None:
    """So is the stall of an evacuation that the VM has outlived."""
    story = evacuated()
    at(story, 1.0, TrainerProgress(1, 46, snapshot_s=0.5))
    assert story.state.training.stall_s == pytest.approx(0.5)
    story.withdraw()
    story.notice(in_s=60.0, identity="another")
    assert story.state.training.stall_s == 0.0
    assert story.state.training.saves_s == pytest.approx(0.5)


@pytest.mark.parametrize("in_s", [60.0, 3600.0])
def test_the_last_farewell_has_a_late_step(in_s: float) -> None:
    """It is written once, shortly before the deadline, and announces no verdict."""
    story = evacuated(in_s)
    left_s = story.state.evacuation.deadline_mono_s - story.now  # type: ignore[union-attr]
    story.wait(left_s - PART_S - 0.5)
    assert not story.all(LastFarewell)
    verdicts = list(story.verdicts)
    story.progress(90)
    story.wait(0.6)
    story.wait(0.6)
    (last,) = story.all(LastFarewell)
    assert story.state.training.step == 90
    assert not last.conclusion.is_final
    assert last.conclusion.verdict == story.state.last_verdict.verdict  # type: ignore[union-attr]
    assert story.verdicts == verdicts


def test_a_vm_that_outlives_its_deadline_reports_its_later_steps() -> None:
    """An assumed deadline is too early, and steps that no farewell has would count as downtime."""
    story = evacuated()
    left_s = story.state.evacuation.deadline_mono_s - story.now  # type: ignore[union-attr]
    story.wait(left_s - 0.5)
    assert len(story.all(LastFarewell)) == 1
    story.progress(91)
    story.wait(0.4)
    assert len(story.all(LastFarewell)) == 1  # before the deadline one is enough
    verdicts = list(story.verdicts)
    story.wait(AGAIN_S)
    assert (len(story.all(LastFarewell)), story.state.parted_step) == (2, 91)
    for step in (92, 93):
        story.progress(step)
        assert story.state.parted_step == step - 1
        story.wait(AGAIN_S)
        assert story.state.parted_step == step
    count = len(story.all(LastFarewell))
    assert count == 4
    story.wait(AGAIN_S)
    assert len(story.all(LastFarewell)) == count  # no further step
    assert story.verdicts == verdicts
    story.wait(60.0)
    story.progress(200)
    story.wait(AGAIN_S)
    assert story.state.evacuation is None
    assert len(story.all(LastFarewell)) == count


def test_the_last_farewell_waits_for_a_commit() -> None:
    """A manifest never waits behind it."""
    story = evacuated()
    story.seal(70)
    story.flushed()
    assert story.state.stored
    left_s = story.state.evacuation.deadline_mono_s - story.now  # type: ignore[union-attr]
    story.wait(left_s - PART_S / 2)
    assert not story.all(LastFarewell)
    before = len(story.all(Conclude))
    story.store_all()
    story.wait(0.1)
    assert len(story.all(LastFarewell)) + len(story.all(Conclude)) - before == 1


def test_a_shutdown_of_the_host_has_a_last_farewell() -> None:
    """The verdict stands since the cloud's notice: the farewell of the shutdown has the last step."""
    story = evacuated()
    story.progress(80)
    story.notice(in_s=30.0, source="host", severity=Severity.SHUTTING_DOWN)
    assert len(story.all(LastFarewell)) == 1
    assert story.state.is_leaving


def test_training_is_over_when_all_ranks_have_ended() -> None:
    """Its last step is exact then; a trainer that comes back trains again."""
    story = evacuated()
    story.leave(exited=False)
    assert not story.state.training.is_over
    story.join(2, start_id="s1")
    story.leave(2)
    assert story.state.training.is_over
    story.join(3, start_id="s3")
    story.tell(TrainerProgress(3, 45, start_id="s3"))
    assert not story.state.training.is_over
