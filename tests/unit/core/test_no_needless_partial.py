# SPDX-License-Identifier: Apache-2.0
"""The rules against a false SAFE stop no checkpoint, and take SAFE from no state that is safe.

``test_honest_training.py`` has the general property; these are cases that it does not reach.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansongd.core.events import (
    AskTrainers,
    ClaimGeneration,
    Conclude,
    GenerationClaimed,
    NoticeRaised,
    SendTarget,
    TrainerJoined,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.model import CommitRef, Staged, TrainerView

from testkit.story import Story, a_set


def saved_by(step: int, nonce: str, *starts: str) -> Staged:
    return replace(a_set(step, nonce), starts=frozenset(starts))


def save(story: Story, staged: Staged) -> None:
    story.staging.append(staged)
    story.scan()
    story.store_all()


def two_ranks() -> Story:
    """Two ranks have committed step 100."""
    story = Story()
    for rank in (0, 1):
        story.join(1 + rank, rank=rank, ranks=2, start_id=f"old{rank}")
        story.progress(100, 1 + rank)
    save(story, saved_by(100, "c", "old0", "old1"))
    return story


@pytest.mark.parametrize("restarts", [False, True])
def test_a_process_that_never_ends_is_no_rank_of_the_next_job(*, restarts: bool) -> None:
    """Rank 1 of two hangs in the kernel, with its GPU; the job starts again with one rank."""
    story = two_ranks()
    story.leave(1)
    story.leave(2, exited=False)
    story.now += 60
    if restarts:
        story = story.restarted(ended=[100])
    view = TrainerView(
        connection=11,
        pid=200,
        process_start=5,
        rank=0,
        world_size=1,
        local_world_size=1,
        start_id="new",
        takes_periodic=True,
    )
    story.tell(TrainerJoined(replace(view, greeted_mono_s=story.now)))
    story.tell(TrainerProgress(11, 100, start_id="new"))
    for step in range(101, 2000):
        story.now += 1
        story.progress(step, 11)
    assert any(asked.request_id.startswith("periodic") for asked in story.all(AskTrainers))
    story.notice(120)
    story.scan()
    story.accept(2000, 11)
    assert story.all(SendTarget)


def test_a_rank_that_has_lost_its_connection_for_a_moment_keeps_its_start() -> None:
    """Both ranks start again behind the newest commit, which the first report of rank 0 shows."""
    story = two_ranks()
    story.leave(1)
    story.leave(2)
    story.now += 30
    for rank in (0, 1):
        story.join(11 + rank, rank=rank, ranks=2, pid=200 + rank, start_id=f"new{rank}")
    story.leave(12, exited=False)
    story.tell(TrainerProgress(11, 60))
    claimed = story.last(ClaimGeneration).after + 1
    story.tell(GenerationClaimed(claimed, story.state.last_complete))
    story.join(13, rank=1, ranks=2, pid=201, start_id="new1")
    assert set(story.state.closed_starts) == {"old0", "old1"}
    story.now += 60
    save(story, saved_by(70, "n", "new0", "new1"))
    assert story.state.last_complete == CommitRef(claimed, 70)


def test_a_debt_that_no_commit_can_pay_yet_forces_no_checkpoint() -> None:
    """Over several VMs, a script that loads an older step by itself keeps the generation."""
    story = Story(newest=CommitRef(2, 220))
    story.state = replace(
        story.state, settings=replace(story.state.settings, several_vms=True), job_start_id="job"
    )
    story.join(nodes=2, step=-1, start_id="a")
    story.tell(TrainerProgress(1, 60))
    assert story.state.owes_checkpoint
    for step in range(61, 200):
        story.now += 60
        story.progress(step)
    assert story.all(AskTrainers) == []
    story.now += 60
    story.progress(220)
    story.wait(1.0)
    assert len(story.all(AskTrainers)) == 1


def test_an_answer_from_before_a_restart_counts_beside_its_follow_up() -> None:
    """Its set is still in staging, and a follow-up is the newest commit."""
    story = Story()
    story.join(start_id="a", step=-1, takes_follow_ups=True)
    story.progress(99)
    story.notice(120)
    story.accept(99)
    request_id = story.request_id
    save(story, a_set(100, "ans", request_id=request_id, start_id="a"))
    kept = list(story.state.notices.values())
    after = story.restarted(claimed=False)
    after.staging.append(a_set(110, "fol", request_id=f"{request_id}.follow-1.0", start_id="a"))
    for notice in kept:
        after.tell(NoticeRaised(notice))
    after.scan()
    after.join(1, step=112, start_id="a", takes_follow_ups=True)
    after.tell(TrainerSealed(1, request_id, 100, 2.0, 5))
    after.scan()
    after.tell(GenerationClaimed(2, CommitRef(2, 110)))
    after.scan()
    after.wait(1.0)
    assert after.verdicts == ["SAFE generation 2 step 110"]


@pytest.mark.parametrize("trained_on", [False, True])
def test_an_answer_from_before_a_restart_is_safe_although_training_continues(
    *, trained_on: bool
) -> None:
    """The trainer makes further steps while its answer is sent; then daemon and trainer are killed."""
    story = Story()
    story.join(step=-1, start_id="a")
    story.progress(20)
    story.notice(90)
    story.accept(23)
    story.progress(24)
    answer = a_set(24, "ans", request_id=story.request_id, start_id="a")
    story.staging.append(answer)
    story.tell(TrainerSealed(1, story.request_id, 24, 2.0, answer.size_bytes))
    story.scan()
    if trained_on:
        story.progress(26)
    kept = list(story.state.notices.values())
    after = story.restarted(claimed=False, ended=[100])
    for notice in kept:
        after.tell(NoticeRaised(notice))
    after.scan()
    after.tell(GenerationClaimed(2, None))
    after.scan()
    after.store_all()
    after.wait(1.0)
    assert after.verdicts == ["SAFE generation 2 step 24"]


def test_an_older_checkpoint_that_stays_on_the_disk_is_not_the_newest_state() -> None:
    """Without hooks: a script resumes from checkpoint-300, and checkpoint-500 is never deleted."""

    def adopted(step: int, written_ns: int) -> Staged:
        found = a_set(step, "x", framework="checkpoint-n")
        return replace(found, files=tuple(replace(f, mtime_ns=written_ns) for f in found.files))

    story = Story()
    for step in (300, 500):
        story.now += 60
        save(story, adopted(step, step))
    story.now += 60
    story.staging.append(adopted(350, 1000))
    story.scan()
    claimed = story.last(ClaimGeneration).after + 1
    story.tell(GenerationClaimed(claimed, story.state.last_complete))
    story.store_all()
    story.notice(120)
    story.scan()
    story.wait(120)
    concluded = story.last(Conclude)
    assert (concluded.verdict, concluded.commit) == ("SAFE", CommitRef(claimed, 350))


def test_a_restart_before_the_claim_is_answered_claims_again() -> None:
    """The next life resumes the generation of the line that training has left."""
    story = Story()
    story.join(step=-1, start_id="a")
    story.progress(220)
    save(story, a_set(220, "c", start_id="a"))
    story.leave()
    story.now += 5
    story.join(2, pid=200, step=-1, start_id="b")
    story.tell(TrainerProgress(2, 60))
    story = story.restarted(claimed=False)
    story.scan()
    story.tell(GenerationClaimed(2, CommitRef(2, 220)))
    assert story.last(ClaimGeneration).after == 2
    story.tell(GenerationClaimed(3, CommitRef(2, 220)))
    story.join(2, pid=200, step=70, start_id="b")
    story.tell(TrainerProgress(2, 70))
    save(story, a_set(80, "n", start_id="b"))
    assert not story.state.owes_checkpoint
    assert story.state.last_complete == CommitRef(3, 80)
