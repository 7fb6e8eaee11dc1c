# SPDX-License-Identifier: Apache-2.0
"""The milestones of a resume, and the end of the training."""

from __future__ import annotations

from typing import Any

import pytest
from swansong_bucket.model import CommitRef, Severity, TrainerView
from swansongd.core.events import (
    Conclude,
    Event,
    FenceFound,
    RestoreAsked,
    RolledBack,
    StartBegun,
    StopRequested,
    TrainerJoined,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.observe.accounting import (
    LAST_FAREWELL_LEAD_S,
    LAST_FAREWELL_REPEAT_S,
    Accounting,
    MeasuredResume,
    Training,
    last_report,
)
from swansongd.observe.facts import DownloadEnded, DownloadStarted, Observed, RestoreAnswered
from swansongd.observe.observer import Observation

from testkit.story import Story

NEWEST = CommitRef(1, 40)


class Accounted(Story):
    """A story with an accounting; its resumes and its last farewells are collected."""

    def __init__(self, **options: Any) -> None:
        self.resumes: list[MeasuredResume] = []
        self.farewells: list[Conclude] = []
        self.farewell_step = -1
        """Newest step at the last one."""
        self.accounting = Accounting(self.resumes.append, self._farewell)
        super().__init__(**options)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        before, after, event, _, now_mono_s = observation
        self.accounting.record(before, after, event, now_mono_s)
        self.accounting.observe(observation)

    @property
    def training(self) -> Training:
        return self.accounting.training

    @property
    def left_s(self) -> float:
        """The time until the deadline of the evacuation."""
        return self.evacuation.deadline_mono_s - self.now

    def _farewell(self, conclusion: Conclude, _: float) -> None:
        self.farewells.append(conclusion)
        self.farewell_step = self.training.step


def at(story: Story, seconds: float, event: Observed) -> None:
    story.now += seconds
    story.tell(event)


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
    story = Accounted(newest=NEWEST)
    begun_s = story.now
    resumed(story)
    at(story, 1.0, TrainerProgress(1, 45, step_s=1.0))
    (record,) = story.resumes
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
    story = Accounted(generation=7)
    story.grants = False
    resumed(story)
    assert not story.resumes
    story.grant("s1")
    assert [record.generation for record in story.resumes] == [7]


def short(newest: CommitRef = NEWEST) -> Accounted:
    """A training that starts at step 40, and whose pace stays unknown."""
    story = Accounted(newest=newest)
    story.join(start_id="s1")
    at(story, 3.0, TrainerProgress(1, 40, start_id="s1"))
    return story


def test_a_trainer_that_only_sealed_its_end_is_recorded() -> None:
    """A training of a second may report no step before its final checkpoint."""
    story = short()
    begun_s = story.now
    at(story, 2.0, TrainerSealed(1, "", 44, 0.1, 100))
    (record,) = story.resumes
    made = record.milestones
    assert (made.start_step, made.first_step) == (40, 41)
    # Four steps of unknown duration count as equally long.
    assert made.first_step_mono_s == pytest.approx(begun_s + 0.5)


def test_the_first_report_of_a_new_step_is_recorded_at_once() -> None:
    """The power may be cut within a second of it, before any rank reports the duration of a step."""
    story = short()
    assert not story.resumes
    story.progress(41)
    assert len(story.resumes) == 1
    story.progress(42)
    assert len(story.resumes) == 1


def test_a_rollback_is_recorded_by_its_own_start() -> None:
    """Steps of the start before do not count as the first step of the next one."""
    story = Accounted(newest=NEWEST)
    resumed(story)
    late_rank = TrainerProgress(1, 40, start_id="s1")
    at(story, 0.0, late_rank)
    at(story, 1.0, TrainerProgress(1, 45, step_s=1.0))
    story.tell(StartBegun(1, "s1~1"))
    story.tell(RolledBack(42))
    story.progress(46)
    assert len(story.resumes) == 1
    at(story, 1.0, TrainerProgress(1, 42, start_id="s1~1"))
    at(story, 1.0, TrainerProgress(1, 43, step_s=1.0))
    record = story.resumes[-1]
    assert (record.generation, record.milestones.start_step) == (3, 42)
    assert record.milestones.bytes_fetched == 0, "the start before made the download"


def test_each_start_of_a_job_over_several_vms_is_recorded() -> None:
    """Each has a generation of its own, and begins with the question of its ranks."""
    story = Accounted(newest=NEWEST, generation=3)
    for number in (3, 4):
        made = {"rank": 1, "world_size": 2, "local_world_size": 1, "node": 1, "nodes": 2}
        story.tell(TrainerJoined(TrainerView(connection=number, pid=number, step=-1, **made)))
        story.tell(StartBegun(number, f"s{number}"))
        late_rank = TrainerProgress(number, 39, start_id=f"s{number}")
        for event in (
            TrainerProgress(number, 40, start_id=f"s{number}"),
            TrainerProgress(number, 41, step_s=1.0),
            late_rank,
            TrainerProgress(number, 42),
        ):
            at(story, 1.0, event)
    records = story.resumes
    assert [record.generation for record in records] == [3, 4]
    assert [record.milestones.start_step for record in records] == [40, 40]
    assert [(record.training.node, record.training.nodes) for record in records] == [(1, 2), (1, 2)]


def test_a_later_start_has_its_own_question() -> None:
    """A trainer that died before its first step does not lengthen the fetch of the next one."""
    story = Accounted(newest=NEWEST)
    at(story, 1.0, RestoreAsked())
    at(story, 1.0, RestoreAnswered(40, 1))
    story.now += 300.0
    begun_s = story.now
    resumed(story)
    made = story.resumes[-1].milestones
    assert made.asked_mono_s == pytest.approx(begun_s + 3.0)


def test_what_failed_ends_no_fetch() -> None:
    """The trainer waits from its first question on, however often the download fails."""
    story = Accounted(newest=NEWEST)
    at(story, 1.0, RestoreAsked())
    asked_s = story.now
    at(story, 1.0, DownloadEnded(error="refused"))
    at(story, 1.0, RestoreAnswered(error="refused"))
    at(story, 300.0, RestoreAsked())
    story.join(start_id="s1")
    at(story, 3.0, TrainerProgress(1, 40, start_id="s1"))
    at(story, 4.0, TrainerProgress(1, 41))
    made = story.resumes[-1].milestones
    assert made.asked_mono_s == asked_s
    assert (made.download_ended_mono_s, made.answered_mono_s) == (None, None)


def test_a_report_without_a_connected_rank_counts() -> None:
    story = Accounted(newest=NEWEST)
    at(story, 1.0, TrainerProgress(1, 40))
    assert story.training.step == 40


def evacuated(in_s: float = 60.0) -> Accounted:
    """An evacuation whose verdict is SAFE, while training continues."""
    story = Accounted(newest=NEWEST)
    resumed(story)
    story.notice(in_s=in_s)
    story.serve(44)
    assert story.verdicts
    return story


def test_agreement_and_snapshot_are_the_stall() -> None:
    """The time from the first acceptance to the target, and the time that the save reports."""
    story = Accounted(newest=NEWEST)
    story.join(1, rank=0, ranks=2, start_id="s")
    story.join(2, rank=1, ranks=2, start_id="s")
    for connection in (1, 2):
        story.tell(TrainerProgress(connection, 40, start_id="s"))
        story.tell(TrainerProgress(connection, 44, step_s=1.0, snapshot_s=9.0))
    story.notice(in_s=60.0)
    story.accept(44, 1)
    story.now += 0.25
    story.accept(44, 2)
    story.answer(45)
    at(story, 0.5, TrainerProgress(2, 46, snapshot_s=7.0))
    at(story, 0.5, TrainerProgress(1, 46, snapshot_s=0.5))
    at(story, 1.0, TrainerProgress(1, 47, snapshot_s=0.5))
    assert story.training.stall_s == pytest.approx(0.75)
    assert story.training.saves_s == 0.0


def test_saves_without_a_notice_are_counted_apart() -> None:
    """So is the stall of an evacuation that the VM has outlived."""
    story = evacuated()
    at(story, 1.0, TrainerProgress(1, 46, snapshot_s=0.5))
    assert story.training.stall_s == pytest.approx(0.5)
    story.withdraw()
    story.notice(in_s=60.0, identity="another")
    assert story.training.stall_s == 0.0
    assert story.training.saves_s == pytest.approx(0.5)


@pytest.mark.parametrize("in_s", [60.0, 3600.0])
def test_the_last_farewell_has_a_late_step(in_s: float) -> None:
    """It is written once, shortly before the deadline, and announces no verdict."""
    story = evacuated(in_s)
    story.wait(story.left_s - LAST_FAREWELL_LEAD_S - 0.5)
    assert not story.farewells
    verdicts = list(story.verdicts)
    story.progress(90)
    story.wait(0.6)
    story.wait(0.6)
    (last,) = story.farewells
    assert story.training.step == 90
    assert not last.is_final
    assert last.verdict == story.state.course.last_verdict.verdict  # type: ignore[union-attr]
    assert story.verdicts == verdicts


@pytest.mark.parametrize("handover", [True, False])
def test_the_next_vm_of_a_handover_learns_the_end_at_once(*, handover: bool) -> None:
    """Without a handover the end is reported shortly before the deadline, like the last step."""
    story = evacuated()
    story.configure(handover=handover)
    story.leave()
    assert len(story.farewells) == handover


def test_a_vm_that_outlives_its_deadline_reports_its_later_steps() -> None:
    """An assumed deadline is too early, and steps that no farewell has would count as downtime."""
    story = evacuated()
    story.wait(story.left_s - 0.5)
    assert len(story.farewells) == 1
    story.progress(91)
    story.wait(0.4)
    assert len(story.farewells) == 1  # before the deadline one is enough
    verdicts = list(story.verdicts)
    story.wait(LAST_FAREWELL_REPEAT_S)
    assert (len(story.farewells), story.farewell_step) == (2, 91)
    for step in (92, 93):
        story.progress(step)
        assert story.farewell_step == step - 1
        story.wait(LAST_FAREWELL_REPEAT_S)
        assert story.farewell_step == step
    count = len(story.farewells)
    assert count == 4
    story.wait(LAST_FAREWELL_REPEAT_S)
    assert len(story.farewells) == count  # no further step
    assert story.verdicts == verdicts
    story.wait(60.0)
    story.progress(200)
    story.wait(LAST_FAREWELL_REPEAT_S)
    assert story.state.evacuation is None
    assert len(story.farewells) == count


def test_the_last_farewell_waits_for_a_commit() -> None:
    """A manifest never waits behind it."""
    story = evacuated()
    story.seal(70, start_id="s1")
    story.flushed()
    assert story.state.commits.stored
    story.wait(story.left_s - LAST_FAREWELL_LEAD_S / 2)
    assert not story.farewells
    before = len(story.all(Conclude))
    story.store_all()
    story.wait(0.1)
    assert len(story.farewells) + len(story.all(Conclude)) - before == 1


def test_a_shutdown_of_the_host_has_a_last_farewell() -> None:
    """The verdict stands since the cloud's notice: the farewell of the shutdown has the last step."""
    story = evacuated()
    story.progress(80)
    story.notice(in_s=30.0, source="host", severity=Severity.SHUTTING_DOWN)
    assert len(story.farewells) == 1
    assert story.state.course.is_leaving
    found = last_report(story.training, story.state, now_mono_s=story.now, now_wall_s=5000.0)
    assert found is not None
    assert found.is_over  # no further step follows


def test_training_is_over_when_all_ranks_have_ended() -> None:
    """Its last step is exact then; a trainer that comes back trains again."""
    story = evacuated()
    story.leave(exited=False)
    assert not story.training.is_over
    story.join(2, start_id="s1")
    story.leave(2)
    assert story.training.is_over
    story.join(3, start_id="s3")
    story.tell(TrainerProgress(3, 45, start_id="s3"))
    assert not story.training.is_over


def test_a_fault_costs_only_the_facts_so_far() -> None:
    """Input from outside spoiled them: the next reports count again."""
    story = evacuated()
    spoiled = TrainerProgress(1, "47")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        story.accounting.record(story.state, story.state, spoiled, story.now)
    assert story.training == Training()
    story.progress(48)
    assert story.training.step == 48


@pytest.mark.parametrize("event", [FenceFound(9), StopRequested("stopped")], ids=["fenced", "stop"])
def test_nothing_is_reported_once_the_daemon_ends(event: Event) -> None:
    """After a fence the generation belongs to another VM, and a stop has another conclusion."""
    story = evacuated()
    story.now += story.left_s - LAST_FAREWELL_LEAD_S / 2
    story.tell(event)
    assert not story.farewells


def test_a_report_is_dated_by_the_wall_clock() -> None:
    """The monotonic instants of the training become wall-clock times."""
    story = evacuated()
    training = Training(step=7, mono_s=story.now - 10.0, step_s=0.5, ranks=2)
    found = last_report(training, story.state, now_mono_s=story.now, now_wall_s=5000.0)
    assert found is not None
    assert found.wall_s == pytest.approx(4990.0)
    assert found.deadline_wall_s == pytest.approx(5000.0 + story.left_s)
    assert not found.is_over


def test_there_is_no_report_before_the_first_step() -> None:
    """A farewell without it leaves the end of the training unknown."""
    story = Accounted()
    assert last_report(Training(), story.state, now_mono_s=100.0, now_wall_s=5000.0) is None
