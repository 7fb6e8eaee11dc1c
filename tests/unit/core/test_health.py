# SPDX-License-Identifier: Apache-2.0
"""Healthy, pinned and protected checkpoints, and the rollback of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong_bucket.model import (
    GPU_IS_SOUND,
    CommitRef,
    Parent,
    Staged,
    is_healthy,
    merged_health,
)
from swansongd.core.events import (
    CancelFlush,
    ClaimGeneration,
    CommitManifest,
    FlushFailed,
    Log,
    Prune,
    RolledBack,
    StartBegun,
    TrainerProgress,
)

from testkit.story import Story, a_set, joined

GOOD = {"loss": 1.0, "loss_is_finite": 1.0}
BAD = {"loss_is_finite": 0.0}


def seal(story: Story, step: int, health: dict[str, float]) -> Staged:
    staged = replace(a_set(step), health=health)
    story.staging.append(staged)
    story.scan()
    return staged


def pruned(story: Story) -> set[str]:
    return {directory for order in story.all(Prune) for directory in order.directories}


def test_one_unhealthy_part_makes_the_set_unhealthy() -> None:
    """Values are averaged over the ranks or VMs that report them; health is that of the worst one."""
    other = {"loss": 3.0, "loss_is_finite": 1.0, "accuracy": 0.5}
    assert merged_health([GOOD, other]) == {"loss": 2.0, "loss_is_finite": 1.0, "accuracy": 0.5}
    assert is_healthy(merged_health([GOOD, other]))
    assert is_healthy({**GOOD, "loss_is_usual": 1.0})
    for bad in (BAD, {**GOOD, "loss_is_usual": 0.0}, {GPU_IS_SOUND: 0.0}):
        assert is_healthy(merged_health([GOOD, bad])) is False
    assert is_healthy(merged_health([{}, {}])) is None
    assert merged_health([]) == {}


# ---------------------------------------------------------------- the pinned set in staging


def test_the_newest_healthy_set_stays_while_newer_ones_are_unhealthy() -> None:
    """Unhealthy commits prune older sets except the newest healthy one; a healthy commit frees it."""
    story = joined(step=1)
    for step, health in ((10, GOOD), (20, GOOD), (30, BAD), (40, BAD)):
        seal(story, step, health)
        story.store_all()
    directories = {staged.id.step: staged.directory for staged in story.staging}
    assert pruned(story) == {directories[10], directories[30]}
    seal(story, 50, GOOD)
    story.store_all()
    assert directories[20] in pruned(story)


def test_a_healthy_set_is_retried_although_the_newer_one_is_committed() -> None:
    """A failure of the store in between does not make the healthy set dispensable."""
    story = joined(step=1)
    story.staging = [replace(a_set(20), health=GOOD), replace(a_set(30), health=BAD)]
    story.scan()
    story.flushed()
    story.committed()
    assert story.state.commits.last == CommitRef(2, 30)
    story.tell(FlushFailed(story.flight.flush_id, "503", void=False))
    story.wait(60)
    story.store_all()
    assert [order.staged.id.step for order in story.all(CommitManifest)] == [30, 20]
    assert story.state.commits.last == CommitRef(2, 30)
    assert not story.state.uncommitted
    assert not pruned(story)


@pytest.mark.parametrize(
    ("event", "bad"),
    [
        ("loss_not_finite", {"loss_is_finite": False, "loss_is_usual": False}),
        ("loss_not_usual", {"loss_is_finite": True, "loss_is_usual": False}),
    ],
)
def test_a_bad_loss_is_logged_once_for_each_time_that_it_turns_bad(
    event: str, bad: dict[str, bool]
) -> None:
    """Not once a second."""
    story = joined(step=1)
    good = dict.fromkeys(bad, True)
    for facts in (good, bad, bad, good, bad):
        story.tell(TrainerProgress(1, 5, loss=1e10, **facts))
    events = [log.event for log in story.all(Log)]
    assert [each for each in events if each.startswith("loss_")] == [event, event]


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
    assert story.state.flush.flight is not None
    story.tell(StartBegun(1, "a~1"))
    story.tell(RolledBack(20))
    story.starts(20, start_id="a~1", parent=Parent("a", 20))
    return story


def seal_again(story: Story, step: int) -> None:
    story.commit(step, "again", start_id="a~1")


def test_a_rollback_is_a_start_with_a_generation_of_its_own(gone_back: Story) -> None:
    """The flush of a later set is cancelled, and none of them is committed."""
    assert gone_back.last(ClaimGeneration) == ClaimGeneration("a~1", began_ticks=1100)
    assert gone_back.all(CancelFlush)
    gone_back.wait(60)
    assert gone_back.flushes == [20, 30, 40]
    assert not gone_back.state.uncommitted


def test_a_restarted_daemon_commits_nothing_that_a_rollback_left(gone_back: Story) -> None:
    """The next start would resume from it."""
    deleted = gone_back.last(Prune).directories
    left = [staged for staged in gone_back.staging if staged.directory not in deleted]
    gone_back.staging[:] = left
    after = gone_back.restarted()
    after.wait(60)
    assert not after.flushes


def test_the_same_steps_again_are_committed_under_the_new_generation(gone_back: Story) -> None:
    """Steps before the discarded ones count again, and no discarded state returns."""
    for step in (21, 30):
        seal_again(gone_back, step)
        assert gone_back.state.commits.last == CommitRef(3, step)
    generations = [(o.staged.id.step, o.generation) for o in gone_back.all(CommitManifest)]
    assert generations == [(20, 2), (30, 2), (21, 3), (30, 3)]


def test_until_the_first_commit_the_discarded_state_is_the_newest(gone_back: Story) -> None:
    """The next VM would resume from it, so no verdict is SAFE: also not at the step of the rollback."""
    gone_back.notice(60)
    gone_back.accept(20)
    assert gone_back.conclude(failure="disk full") == ["PARTIAL generation 2 step 30"]


def test_a_notice_during_a_rollback_waits_for_the_claim() -> None:
    """The request is made immediately; the commit and the verdict follow the new generation."""
    story = joined(step=41)
    seal(story, 30, BAD)
    story.store_all()
    story.grants = False
    story.tell(StartBegun(1, "a~1"))
    story.notice(in_s=100)
    story.accept(22)
    story.answer(23)
    story.wait(1)
    assert not story.verdicts
    story.grant("a~1")
    story.store_all()
    assert story.verdicts == ["SAFE generation 3 step 23"]
