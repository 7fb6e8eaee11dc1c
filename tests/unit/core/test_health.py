# SPDX-License-Identifier: Apache-2.0
"""Healthy, pinned and protected checkpoints, and the rollback of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansongd.core.events import (
    CancelFlush,
    ClaimGeneration,
    CommitManifest,
    FenceFound,
    FlushFailed,
    GenerationClaimed,
    Log,
    Prune,
    RolledBack,
    SetAside,
    StartFlush,
    TrainerProgress,
)
from swansongd.model import CommitRef, Staged, is_healthy, merged_health

from testkit.story import Story, a_set

GOOD = {"loss": 1.0, "loss_is_finite": 1.0}
BAD = {"loss_is_finite": 0.0}


def seal(story: Story, step: int, health: dict[str, float]) -> Staged:
    staged = replace(a_set(step), health=health)
    story.staging.append(staged)
    story.scan()
    return staged


def pruned(story: Story) -> set[str]:
    return {directory for order in story.all(Prune) for directory in order.directories}


def test_one_rank_with_a_bad_loss_makes_the_set_unhealthy() -> None:
    """Values are averaged over the ranks that report them; health is that of the worst rank."""
    other = {"loss": 3.0, "loss_is_finite": 1.0, "accuracy": 0.5}
    assert merged_health([GOOD, other]) == {"loss": 2.0, "loss_is_finite": 1.0, "accuracy": 0.5}
    assert is_healthy(merged_health([GOOD, other]))
    assert is_healthy(merged_health([GOOD, BAD])) is False
    assert is_healthy(merged_health([{}, {}])) is None
    assert merged_health([]) == {}


# ---------------------------------------------------------------- the pinned set in staging


def test_the_newest_healthy_set_stays_while_newer_ones_are_unhealthy() -> None:
    """Unhealthy commits prune older sets except the newest healthy one; a healthy commit frees it."""
    story = Story()
    story.join(step=1)
    for step, health in ((10, GOOD), (20, GOOD), (30, BAD), (40, BAD)):
        seal(story, step, health)
        story.store_all()
    directories = {staged.id.step: staged.directory for staged in story.staging}
    assert pruned(story) == {directories[10], directories[30]}
    seal(story, 50, GOOD)
    story.store_all()
    assert directories[20] in pruned(story)


def test_a_healthy_set_is_committed_although_a_newer_unhealthy_one_is() -> None:
    """The newest is sent first, and the healthy one after it; then no work is left."""
    story = Story()
    story.join(step=1)
    story.staging = [replace(a_set(20), health=GOOD), replace(a_set(30), health=BAD)]
    story.scan()
    story.store_all()
    assert [order.staged.id.step for order in story.all(CommitManifest)] == [30, 20]
    assert story.state.last_commit == CommitRef(2, 30)
    assert not story.state.uncommitted
    assert not pruned(story)


def test_a_healthy_set_is_retried_although_the_newer_one_is_committed() -> None:
    """A failure of the store in between does not make the healthy set dispensable."""
    story = Story()
    story.join(step=1)
    story.staging = [replace(a_set(20), health=GOOD), replace(a_set(30), health=BAD)]
    story.scan()
    story.flushed()
    story.committed()
    assert story.state.last_commit == CommitRef(2, 30)
    assert story.state.flight is not None
    story.tell(FlushFailed(story.state.flight.flush_id, "503", void=False))
    story.wait(60)
    story.store_all()
    assert [order.staged.id.step for order in story.all(CommitManifest)] == [30, 20]


def test_a_bad_loss_is_logged_once_for_each_time_that_it_turns_bad() -> None:
    """Not once a second."""
    story = Story()
    story.join(step=1)
    for is_finite in (True, False, False, True, False):
        story.tell(TrainerProgress(1, 5, loss_is_finite=is_finite))
    assert [log.event for log in story.all(Log)].count("loss_not_finite") == 2


# ---------------------------------------------------------------- going back


@pytest.fixture
def gone_back() -> Story:
    """Steps 20 (healthy) and 30 are committed, 40 is in flight; the trainer has rolled back to 20."""
    story = Story(generation=2)
    story.join(step=41)
    for step, health in ((20, GOOD), (30, BAD)):
        seal(story, step, health)
        story.store_all()
    seal(story, 40, BAD)
    assert story.state.flight is not None
    story.tell(RolledBack(20))
    return story


def test_a_rollback_drops_later_sets_and_claims_a_generation(gone_back: Story) -> None:
    """The flush is cancelled, later sets are deleted, and nothing is stored before the new generation."""
    assert gone_back.last(ClaimGeneration).after == 2
    assert gone_back.all(CancelFlush)
    later = {s.directory for s in gone_back.staging if s.id.step > 20}
    assert later <= set(gone_back.last(SetAside).directories)
    before = len(gone_back.all(StartFlush))
    seal(gone_back, 21, GOOD)
    gone_back.wait(5)
    assert len(gone_back.all(StartFlush)) == before


def test_the_same_steps_again_are_committed_under_the_new_generation(gone_back: Story) -> None:
    """Steps before the discarded ones count again, and no discarded state returns."""
    seal(gone_back, 21, GOOD)
    gone_back.tell(GenerationClaimed(3, CommitRef(2, 30), is_rollback=True))
    gone_back.store_all()
    assert gone_back.state.last_commit == CommitRef(3, 21)
    gone_back.staging = [s for s in gone_back.staging if s.id.step <= 21]
    gone_back.scan()
    seal(gone_back, 30, GOOD)
    gone_back.store_all()
    assert gone_back.state.last_commit == CommitRef(3, 30)
    generations = {o.staged.id.step: o.generation for o in gone_back.all(CommitManifest)}
    assert generations == {20: 2, 30: 3, 21: 3}


def test_the_target_of_a_rollback_is_committed_again(gone_back: Story) -> None:
    """A VM that dies now must not resume from a discarded state; older sets are not committed."""
    gone_back.tell(GenerationClaimed(3, CommitRef(2, 30), is_rollback=True))
    gone_back.store_all()
    assert gone_back.state.last_commit == CommitRef(3, 20)
    story = Story(generation=2)
    seal(story, 20, GOOD)
    story.store_all()
    story.tell(RolledBack(25))  # to one that lay in the store only
    story.tell(GenerationClaimed(3, CommitRef(2, 30), is_rollback=True))
    story.store_all()
    assert len(story.all(CommitManifest)) == 1


def test_a_notice_during_a_rollback_waits_for_the_claim(gone_back: Story) -> None:
    """The request is made immediately; the commit and the verdict follow the new generation."""
    gone_back.notice(in_s=100)
    gone_back.accept(22)
    gone_back.answer(23)
    gone_back.wait(1)
    assert not gone_back.verdicts
    gone_back.tell(GenerationClaimed(3, CommitRef(2, 30), is_rollback=True))
    gone_back.store_all()
    assert gone_back.verdicts == ["SAFE generation 3 step 23"]


def test_our_own_new_generation_does_not_fence_us(gone_back: Story) -> None:
    """Only a newer one does."""
    gone_back.tell(GenerationClaimed(3, CommitRef(2, 30), is_rollback=True))
    gone_back.tell(FenceFound(3))
    assert gone_back.state.fenced_by is None
    gone_back.tell(FenceFound(4))
    assert gone_back.state.fenced_by == 4
