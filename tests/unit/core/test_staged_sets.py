# SPDX-License-Identifier: Apache-2.0
"""The sealed sets that wait for the store: which ones stay in staging, and their status."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong_bucket.model import CommitRef, Parent, Staged, Start
from swansongd.core.events import (
    CommitFailed,
    FlushFailed,
    FlushProgress,
    GenerationClaimed,
    Log,
    Prune,
    RestoreAsked,
    StartBegun,
)
from swansongd.core.staged_sets import NEWEST
from swansongd.observe.status import DroppedStatus, FlushStatus, UnsentStatus

from testkit.story import MIB, Story, a_set, joined

UNSENT_MAX = NEWEST + 5
"""Also the newest healthy set, the newest synced one, the set in flight, one that is partly stored, and the
answer to a request."""


def dropped_steps(story: Story) -> set[int]:
    """Steps of the sets whose deletion was ordered."""
    names = {name for order in story.all(Prune) for name in order.directories}
    return {staged.id.step for staged in story.staging if staged.directory in names}


def store_refuses(story: Story) -> None:
    story.tell(FlushFailed(story.flight.flush_id, "503 SlowDown", void=False))


def with_health(staged: Staged, *, is_finite: bool) -> Staged:
    return replace(staged, health={"loss_is_finite": float(is_finite)})


@pytest.mark.fault("O24")
def test_an_outage_of_the_store_does_not_fill_the_disk() -> None:
    """Of twenty sets that the store refuses, staging keeps the newest two and deletes each other one once."""
    story = Story(newest=CommitRef(1, 5))
    story.join()
    for step in range(10, 210, 10):
        story.seal(step)
        if story.state.flush.flight is not None:
            store_refuses(story)
        story.wait(1)
        assert len(story.state.uncommitted) <= UNSENT_MAX
    assert [staged.id.step for staged in story.state.uncommitted] == [200, 190]
    ordered = [name for order in story.all(Prune) for name in order.directories]
    assert len(ordered) == len(set(ordered)) == 18
    assert dropped_steps(story) == set(range(10, 190, 10))
    logged = [action for action in story.all(Log) if action.event == "unsent_set_dropped"]
    assert len(logged) == 18
    story.wait(60)
    story.store_all()
    assert story.state.commits.last == CommitRef(2, 200)


@pytest.mark.fault("O24")
def test_a_store_that_refuses_manifests_does_not_fill_the_disk() -> None:
    """All chunks of twenty sets are stored, and no manifest: neither the disk nor the list of them grows."""
    story = Story(newest=CommitRef(1, 5))
    story.join()
    for step in range(10, 210, 10):
        story.seal(step)
        story.flushed()
        for item in story.state.commits.stored:
            if item.is_asked:
                story.tell(CommitFailed(item.flush_id, "403", conflict=False))
        story.wait(60)
        assert len(story.state.commits.stored) <= NEWEST + 1
    assert dropped_steps(story) == set(range(10, 190, 10))
    story.committed()
    assert story.state.commits.last == CommitRef(2, 200)


def test_the_set_in_flight_and_a_partly_stored_one_stay() -> None:
    """A slow flush is not cut short by newer sets, and bytes that the store has are not wasted."""
    story = joined()
    story.seal(10)
    story.tell(FlushProgress(story.flight.flush_id, 60 * MIB, 60 * MIB))
    store_refuses(story)
    for step in (20, 30, 40, 50):
        story.seal(step)
        story.wait(60)
    in_flight = story.flight.staged.id.step
    assert {s.id.step for s in story.state.uncommitted} == {10, in_flight, 40, 50}


def test_the_newest_healthy_set_stays() -> None:
    """After the loss has diverged, the last healthy state stays in staging however many sets follow it.

    Also the set of an earlier start: a rollback may diverge again.
    """
    story = joined()
    story.staging.append(with_health(a_set(10), is_finite=True))
    story.scan()
    store_refuses(story)
    story.tell(StartBegun(1, "a~1"))
    for step in (20, 30, 40, 50):
        story.staging.append(with_health(a_set(step, start_id="a~1"), is_finite=False))
        story.scan()
    assert {s.id.step for s in story.state.uncommitted} == {10, 40, 50}


@pytest.mark.fault("D06")
def test_emergency_sets_replace_no_synced_set() -> None:
    """A power cut may tear all of them: the next boot commits the newest set that was synced to the disk."""
    story = joined()
    for number, request_id in enumerate(["", "", "r1", "r2", "r3"], 1):
        story.seal(10 * number, request_id=request_id)
        if story.state.flush.flight is not None:
            store_refuses(story)
    kept = [staged for staged in story.staging if staged.id.step not in dropped_steps(story)]
    assert [staged.id.step for staged in kept] == [20, 40, 50]


def test_nothing_is_dropped_before_the_verdict_of_an_evacuation() -> None:
    """An older set may be all that fits before the deadline; after the verdict the rule applies again."""
    story = joined()
    story.seal(10)
    store_refuses(story)
    story.notice(in_s=30)
    for step in (20, 30, 40):
        story.seal(step)
    assert not story.all(Prune)
    assert len(story.state.uncommitted) == 4
    story.withdraw()
    assert len(story.state.uncommitted) <= NEWEST + 1


def test_no_set_is_dropped_while_a_start_loads_one() -> None:
    """The answer to its query may be an older set in staging, as after a rollback."""
    story = joined()
    story.seal(10)
    store_refuses(story)
    story.join(step=10)
    story.tell(RestoreAsked("a"))
    for step in (20, 30, 40):
        story.seal(step)
    assert not story.all(Prune)
    story.starts(10)
    assert story.all(Prune)


def test_sets_that_our_hooks_did_not_write_are_not_deleted() -> None:
    """They are the trainer's own checkpoints: all of them stay in staging."""
    story = Story()
    for step in (10, 20, 30, 40):
        story.staging.append(a_set(step, framework="hf"))
        story.scan()
    assert not story.all(Prune)


def test_status_shows_the_flush_and_the_pressure() -> None:
    """The set in flight, the sets that wait with their bytes, the next attempt, and the dropped sets."""
    story = joined()
    story.seal(10)
    story.tell(FlushProgress(story.flight.flush_id, 25 * MIB, 25 * MIB))
    story.wait(16)
    assert story.status.flush == FlushStatus(
        step=10, size_bytes=100 * MIB, stored_bytes=25 * MIB, for_s=16.0
    )
    store_refuses(story)
    for step in (20, 30, 40):
        story.seal(step)
    assert story.status.flush is None
    assert story.status.unsent == UnsentStatus(
        sets=3,
        bytes=275 * MIB,
        failures=1,
        retry_in_s=1.0,
        dropped=DroppedStatus(count=1, step=20, age_s=0.0),
    )


@pytest.mark.fault("D06")
@pytest.mark.parametrize(
    ("booted_wall_ns", "is_of_boot", "step"), [(2, False, 50), (0, False, 50), (2, True, 60)]
)
def test_a_set_that_was_not_flushed_before_the_boot_is_never_committed(
    booted_wall_ns: int, *, is_of_boot: bool, step: int
) -> None:
    """An emergency set may be torn, a periodic one was flushed.  The claim record decides, not the clock."""
    recorded = [Start(id="a", generation=2, is_of_boot=is_of_boot, is_open=is_of_boot)]
    staged = [a_set(50), a_set(60, request_id="r")]
    story = Story(
        claimed=False,
        staged=staged,
        recorded=recorded,
        booted_wall_ns=booted_wall_ns,  # the files are of the time 1
    )
    story.scan()
    story.tell(GenerationClaimed("a", 2, None))
    story.store_all()
    assert story.state.commits.last == CommitRef(2, step)


@pytest.mark.fault("H01")
def test_a_restarted_daemon_drops_no_set_that_a_rollback_may_load() -> None:
    """It does not know which one the answer of its earlier life named, until the start says it."""
    sets = [a_set(step, f"n{step}") for step in (14, 16, 18)]
    recorded = (Start(id="a", generation=1), Start(id="a~1", generation=2))
    story = Story(staged=sets, recorded=recorded, newest=CommitRef(1, 10))
    story.join(start_id="a~1")
    story.wait(1)
    assert not dropped_steps(story)
    story.starts(14, start_id="a~1", parent=Parent("a", 14))
    assert dropped_steps(story) == {14}
