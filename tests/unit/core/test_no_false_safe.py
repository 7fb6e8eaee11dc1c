# SPDX-License-Identifier: Apache-2.0
"""Sequences of events that once led to a SAFE for a state from which training had moved on.

``tests/unit/core/test_machine_nodes.py`` has those of jobs over several VMs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansongd.core import machine
from swansongd.core.events import (
    ClaimGeneration,
    Exit,
    GenerationClaimed,
    GpusRead,
    NoticeRaised,
    RolledBack,
    Scanned,
    SignalSent,
    SignalTrainer,
    TrainerProgress,
)
from swansongd.core.transition import HOST_SOURCE, LOGIND_SOURCE
from swansongd.model import CommitRef, GpuHealth, GpuStatus, Severity

from testkit.story import MIB, Story, a_set

pytestmark = pytest.mark.fault("T09", "T17")


def lose_gpu(story: Story) -> None:
    """No connected trainer is asked from here on."""
    gpu = GpuStatus(
        pci="0000:3b:00", index=0, health=GpuHealth.LOST, reason="Xid 79", since_mono_s=1.0
    )
    story.tell(GpusRead((gpu,)))


def committed(step: int = 3, *, at: int | None = None, is_final: bool = False) -> Story:
    """A trainer whose set of ``step`` is committed, and which is at step ``at`` now."""
    story = Story()
    story.join(step=step, start_id="a")
    story.progress(step)
    story.seal(step, "first", start_id="a", is_final=is_final)
    story.store_all()
    if at is not None:
        story.progress(at)
    return story


def verdict(story: Story, *, in_s: float = 60, source: str = "aws.spot") -> str:
    """The last verdict on a notice; with 6 s, no checkpoint fits any more when it is due."""
    story.notice(in_s, source)
    story.scan()
    story.wait(1.5 if in_s == 6 else 0.1)
    return story.verdicts[-1].split()[0] if story.verdicts else ""


def starts_at(story: Story, step: int, *, start_id: str = "b") -> None:
    """Another process trains from this step."""
    story.leave()
    story.now += 5
    story.join(2, pid=200, step=-1, start_id=start_id)
    story.tell(TrainerProgress(2, step, start_id=start_id))


@pytest.mark.parametrize("after_a_restart", [True, False])
def test_a_trainer_of_unknown_step_that_ends_stays_unknown(*, after_a_restart: bool) -> None:
    """A shutdown ends all processes: that of a trainer without a connection proves nothing about its step."""
    story = committed()
    if after_a_restart:
        story = story.restarted()
    else:
        story.leave(exited=False)
    story.wait(300)
    assert verdict(story, in_s=8, source=LOGIND_SOURCE) in ("", "PARTIAL")
    story.leave(story.state.trainers[0].connection)
    story.scan()
    story.wait(4)
    assert story.verdicts == ["PARTIAL generation 2 step 3"]


@pytest.mark.parametrize("how", ["restart", "restart while the request waits", "rebuilt"])
def test_training_that_was_ahead_is_remembered(how: str) -> None:
    """Its process has ended, and the evacuation opens again after a restart of the daemon."""
    story = committed(6, at=9)
    story.notice(60, LOGIND_SOURCE)
    story.scan()
    if how != "restart while the request waits":
        story.leave()
        story.scan()
        story.wait(0.1)
        assert story.verdicts == ["PARTIAL generation 2 step 6"]
    if how == "rebuilt":
        story.state = machine.rebuilt(story.state)
    else:
        notices = story.state.notices.values()
        story = story.restarted(ended=[100])
        for each in notices:
            story.tell(NoticeRaised(each))
    story.scan()
    story.wait(11)
    story.scan()
    story.wait(0.1)
    assert {each.split()[0] for each in story.verdicts} == {"PARTIAL"}


@pytest.mark.parametrize("how", ["restart", "GPU fails, trainer ends", "begins again, ends"])
def test_a_finished_run_that_trains_on_is_not_over(how: str) -> None:
    """The end of the run is committed, and a later start of the training has moved on."""
    story = committed(10, is_final=True)
    starts_at(story, 0 if how.startswith("begins") else 10)
    if how.startswith("begins"):
        story.tell(GenerationClaimed(3, CommitRef(2, 10, is_final=True), is_rollback=True))
        story.staging.clear()
        story.scan()
    story.tell(TrainerProgress(2, 15))
    if how == "restart":
        story = story.restarted()
    elif how.startswith("GPU"):
        lose_gpu(story)
        assert verdict(story) == "PARTIAL"
        story.leave(2)
        story.wait(1)
        assert len(story.verdicts) == 1
        return
    else:
        story.leave(2)
    if how == "restart":
        assert verdict(story) == "", "the trainer comes back, and saves"
        story.wait(60)
    assert verdict(story, in_s=6 if how == "restart" else 60) == "PARTIAL"


def test_a_successor_that_has_not_begun_does_not_undo_lost_steps() -> None:
    """The trainer was ahead of the commit, and crashed during the evacuation."""
    story = Story()
    story.join(step=5, start_id="a", save_s=100.0, save_bytes=100 * MIB)
    story.progress(5)
    story.seal(5, "first", start_id="a")
    story.flushed(after_s=1.0)
    story.committed()
    story.seal(6, "second", start_id="a")
    story.progress(9)
    story.notice(30)
    story.scan()
    story.store_all(after_s=1.0)
    story.wait(0.1)
    assert story.verdicts == ["PARTIAL generation 2 step 6"]
    story.leave()
    story.join(2, pid=200, step=-1)
    story.scan()
    story.wait(0.1)
    assert story.verdicts == ["PARTIAL generation 2 step 6"]


@pytest.mark.parametrize("how", ["claim answered late", "killed before the claim"])
def test_the_claim_of_the_old_line_pays_no_debt(how: str) -> None:
    """Training left the line while a claim was on its way, or had to wait."""
    story = committed(9)
    if how == "claim answered late":
        story.leave()
        story = story.restarted(claimed=False)
        story.scan()
        starts_at(story, 4)
        story.tell(GenerationClaimed(2, CommitRef(2, 9)))
        story.tell(GenerationClaimed(3, CommitRef(2, 9), is_rollback=True))
        story.staging.clear()
        story.tell(TrainerProgress(2, 6))
        lose_gpu(story)
    else:
        starts_at(story, 4)
        story.staging.clear()
        story = story.restarted(claimed=False, ended=[200])
        story.scan()
        story.tell(GenerationClaimed(2, CommitRef(2, 9)))
        assert story.last(ClaimGeneration).after == 2, (
            "the line on which training continues has none"
        )
        story.tell(GenerationClaimed(3, CommitRef(2, 9), is_rollback=True))
        story.wait(60)
    assert verdict(story, in_s=6) == "PARTIAL"


@pytest.mark.parametrize("how", ["rollback", "start behind"])
def test_a_set_of_the_line_that_was_left_is_not_adopted(how: str) -> None:
    """It was sealed before, and the first scan after a restart of the daemon finds it."""
    story = committed(3, at=5)
    story.staging.append(a_set(5, "late", start_id="a"))
    if how == "rollback":
        story.tell(RolledBack(3))
        story.tell(TrainerProgress(1, 3, start_id="b"))
    else:
        starts_at(story, 1)
    story.tell(GenerationClaimed(3, CommitRef(2, 3), is_rollback=True))
    story.staging[:] = [staged for staged in story.staging if staged.id.nonce == "late"]
    after = story.restarted(newest=CommitRef(2, 3))
    after.store_all()
    assert after.state.last_complete == CommitRef(2, 3)
    assert not after.flushes


def test_a_set_from_which_a_rollback_continued_is_adopted() -> None:
    """It belongs to the next line, also after a restart of the daemon before its flush."""
    story = committed(3, at=4)
    story.staging.append(a_set(5, "kept", start_id="a"))
    story.staging[:] = [replace(s, health={"loss_is_finite": 1.0}) for s in story.staging]
    story.scan()
    story.tell(RolledBack(5))
    story.tell(GenerationClaimed(3, CommitRef(2, 3), is_rollback=True))
    story.staging[:] = [staged for staged in story.staging if staged.id.nonce == "kept"]
    after = story.restarted(newest=CommitRef(2, 3))
    after.store_all()
    assert after.state.last_complete == CommitRef(3, 5)


@pytest.mark.parametrize("how", ["ends before the notice", "ends after it", "GPU"])
def test_a_rollback_to_a_state_in_the_store_owes_a_commit(how: str) -> None:
    """The newest commit is of the line that diverged, until the hooks have saved again."""
    story = committed(6)
    story.seal(9, "diverged", start_id="a")
    story.store_all()
    story.progress(10)
    story.tell(RolledBack(6))
    story.staging.clear()
    story.scan()
    story.tell(TrainerProgress(1, 6, start_id="b"))
    story.tell(GenerationClaimed(3, CommitRef(2, 9), is_rollback=True))
    story.progress(8)
    if how == "GPU":
        lose_gpu(story)
    if how == "ends before the notice":
        story.leave()
    verdict(story, in_s=6)
    if how == "ends after it":
        story.leave()
        story.scan()
        story.wait(3)
    assert {each.split()[0] for each in story.verdicts} == {"PARTIAL"}


@pytest.mark.fault("X01")
def test_a_set_without_a_start_is_doubtful_after_a_failure() -> None:
    """Frameworks without the hooks name no start."""
    story = Story()
    story.seal(5, framework="hf")
    story.store_all()
    lose_gpu(story)
    story.now += 60
    story.seal(6, "late", framework="hf")
    story.store_all()
    assert verdict(story, source=LOGIND_SOURCE) in ("", "PARTIAL")
    story.wait(11)
    assert story.verdicts == ["PARTIAL generation 2 step 6"]


@pytest.mark.parametrize("signals_trainer", [True, False])
def test_a_save_from_before_the_notice_is_no_answer(*, signals_trainer: bool) -> None:
    """A process without the hooks was writing it at the notice; a set that still settles is awaited."""
    story = Story(signals_trainer=signals_trainer)
    story.seal(5, framework="hf")
    story.store_all()
    story.now += 100
    began_mono_s = story.now

    def settles() -> None:
        story.tell(Scanned(story.now, tuple(story.staging), pending=("checkpoint-500",)))

    settles()
    story.notice(60, LOGIND_SOURCE)
    if signals_trainer:
        story.tell(SignalSent(story.last(SignalTrainer).request_id, 77))
    story.now += 4
    settles()
    story.wait(0.1)
    assert story.verdicts == []
    story.staging.append(replace(a_set(500, "half", framework="hf"), seen_mono_s=began_mono_s))
    story.scan()
    story.store_all()
    story.wait(0.1)
    assert story.verdicts == ([] if signals_trainer else ["SAFE generation 2 step 500"])


def test_a_shutdown_of_the_host_waits_for_a_set_in_flight() -> None:
    """The verdict of an earlier notice is SAFE already, and a newer set is on its way."""
    story = committed()
    story.notice(1800, "manual")
    story.scan()
    story.accept(3)
    story.answer(4)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 4"]
    story.now += 1200
    story.seal(880, "newer", start_id="a")
    story.notice(60, HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    story.wait(0.1)
    assert not story.all(Exit)
    story.store_all()
    story.scan()
    story.wait(0.1)
    assert story.all(Exit)
    assert story.state.last_complete == CommitRef(2, 880)


@pytest.mark.parametrize("is_restoring", [True, False])
def test_the_end_of_a_process_makes_no_step_unknown(*, is_restoring: bool) -> None:
    """Its connection ends first, moments before the process: nothing was trained in between."""
    story = committed()
    if is_restoring:
        story.leave()
        story.join(2, pid=200, step=-1)
    lose_gpu(story)
    story.notice(60)
    connection = 2 if is_restoring else 1
    story.leave(connection, exited=False)
    story.now += 0.05
    story.leave(connection)
    story.scan()
    story.wait(1)
    assert story.verdicts == ["SAFE generation 2 step 3"]


def test_a_rank_that_reconnects_later_keeps_its_start() -> None:
    """The first of two ranks shows, after a restart of the daemon, that their line was left."""
    story = Story()
    for rank in (0, 1):
        story.join(rank + 1, rank=rank, ranks=2, step=9, start_id=f"new-{rank}")
    story.seal(9, "old", start_id="gone")
    story.store_all()
    after = story.restarted()
    after.staging.clear()
    after.scan()
    after.now += 1
    after.join(11, rank=0, ranks=2, step=4, start_id="new-0")
    after.tell(TrainerProgress(11, 4))
    assert after.state.generation is None  # the line was left
    assert not {"new-0", "new-1"} & set(after.state.closed_starts)
