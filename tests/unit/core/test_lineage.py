# SPDX-License-Identifier: Apache-2.0
"""One line of states: the starts that leave it, and the sets of a line that was left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansongd.core.events import (
    AskTrainers,
    ClaimGeneration,
    CommitManifest,
    Conclude,
    GenerationClaimed,
    Log,
    Prune,
    SetAside,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
)
from swansongd.model import CommitRef, Staged, TrainerView
from swansongd.observe.report import status_report

from testkit.story import Story, a_set


def starts(story: Story, step: int, *, connection: int = 9, start_id: str = "second") -> None:
    """Another process connects, and reports where it starts."""
    story.now += 1
    view = TrainerView(
        connection=connection,
        pid=1000 + connection,
        rank=0,
        world_size=1,
        local_world_size=1,
        start_id=start_id,
        greeted_mono_s=story.now,
    )
    story.tell(TrainerJoined(view))
    story.tell(TrainerProgress(connection, step, start_id=start_id))


def seals(story: Story, step: int, start_id: str = "", *, nonce: str = "") -> Staged:
    story.now += 1
    staged = a_set(step, nonce or f"n{step}{start_id}")
    staged = replace(staged, starts=frozenset({start_id} if start_id else ()))
    story.staging.append(staged)
    story.scan()
    return staged


def left(story: Story) -> bool:
    return any(line.event == "lineage_left" for line in story.all(Log))


@pytest.fixture
def story() -> Story:
    """Generation 2, with step 100 committed and step 120 sealed."""
    story = Story()
    seals(story, 100, "first")
    story.store_all()
    seals(story, 120, "first")
    return story


@pytest.mark.parametrize(("step", "leaves"), [(60, True), (119, True), (120, False), (200, False)])
def test_a_start_before_the_newest_state_begins_a_generation(
    story: Story, step: int, leaves: bool
) -> None:
    """The abandoned sets are recorded with the claim and set aside; none is committed after that."""
    starts(story, step)
    assert left(story) is leaves
    if leaves:
        abandoned = {staged.id for staged in story.staging}
        assert set(story.last(ClaimGeneration).abandoned) == abandoned
        assert set(story.last(SetAside).directories) == {s.directory for s in story.staging}
        story.tell(GenerationClaimed(3, CommitRef(2, 100), is_rollback=True))
        story.store_all()
        assert [order.staged.id.step for order in story.all(CommitManifest)] == [100]
        new = seals(story, step + 1, "second")
        story.store_all()
        assert story.state.last_commit == CommitRef(3, step + 1)
        assert new.directory not in story.last(Prune).directories
    else:
        assert not story.all(ClaimGeneration)


def test_the_first_checkpoint_of_a_new_line_is_requested_immediately(story: Story) -> None:
    """Until it is committed, the next VM would resume from a discarded state: no verdict is SAFE."""
    starts(story, 60)
    story.tell(GenerationClaimed(3, CommitRef(2, 100), is_rollback=True))
    assert story.all(AskTrainers)
    assert status_report(story.state, story.now)["replication_lag"]["steps"] == 60  # type: ignore[index]
    story.notice(in_s=0.5)
    story.scan()
    story.wait(1)
    assert not [c for c in story.all(Conclude) if c.verdict.value == "SAFE"]


def test_a_trainer_is_not_judged_by_its_own_checkpoints() -> None:
    """Its first report is read late, after a scan found the sets that it sealed meanwhile."""
    story = Story()
    view = TrainerView(
        connection=1, pid=1, rank=0, world_size=1, local_world_size=1, greeted_mono_s=story.now
    )
    story.tell(TrainerJoined(view))
    seals(story, 10, "first")
    story.store_all()
    seals(story, 20, "first")
    story.tell(TrainerProgress(1, 5))
    assert not left(story)


def test_a_delayed_hello_does_not_count(story: Story) -> None:
    """The daemon restarts: its trainer sent a hello at step 110, and sealed step 120 since."""
    view = TrainerView(
        connection=1, pid=1, rank=0, world_size=1, local_world_size=1, step=110,
        start_id="first", greeted_mono_s=story.now + 1,
    )  # fmt: skip
    story.tell(TrainerJoined(view))
    assert not left(story)
    story.tell(TrainerProgress(1, 121))
    assert not left(story)


@pytest.mark.parametrize("is_known_to_have_ended", [True, False])
def test_a_set_that_an_ended_start_has_sealed_late_is_abandoned(
    story: Story, is_known_to_have_ended: bool
) -> None:
    """It is found after the line was left, and would be ahead of the new one."""
    starts(story, 121, connection=1, start_id="first")
    if is_known_to_have_ended:
        story.tell(TrainerLeft(1, exited=True, reason="ended"))
    starts(story, 60)
    assert len(story.last(ClaimGeneration).abandoned) == 2
    story.tell(GenerationClaimed(3, CommitRef(2, 100), is_rollback=True))
    late = seals(story, 130, "first")
    assert story.last(SetAside).directories == (late.directory,)
    story.store_all()
    assert [order.staged.id.step for order in story.all(CommitManifest)] == [100]


def test_the_next_commit_deletes_sets_that_were_set_aside(story: Story) -> None:
    """The first commit of the new line does, although no set in staging is older."""
    starts(story, 60)
    story.tell(GenerationClaimed(3, CommitRef(2, 100), is_rollback=True))
    story.staging.clear()
    story.scan()
    before = len(story.all(Prune))
    seals(story, 61, "second")
    story.store_all()
    assert len(story.all(Prune)) == before + 1
    seals(story, 62, "second")
    assert not story.state.has_aside


def test_an_abandoned_name_may_be_used_again(story: Story) -> None:
    """The ranks of a restarted job give the set of a step the same name."""
    starts(story, 60)
    story.tell(GenerationClaimed(3, CommitRef(2, 100), is_rollback=True))
    story.staging.clear()
    story.scan()
    seals(story, 120, "second", nonce="n120first")
    story.store_all()
    assert story.state.last_commit == CommitRef(3, 120)


@pytest.mark.parametrize(("written_ns", "leaves"), [(2, True), (0, False)])
def test_sets_of_a_trainer_without_hooks_show_its_step(written_ns: int, leaves: bool) -> None:
    """A lower step in newer files is another line; an older set that has settled late is not."""
    story = Story()
    story.staging.append(a_set(200, framework="transformers"))
    story.scan()
    story.store_all()
    lower = a_set(100, "m", framework="transformers")
    files = tuple(replace(file, mtime_ns=written_ns) for file in lower.files)
    story.now += 5
    story.staging.append(replace(lower, files=files))
    story.scan()
    assert left(story) is leaves
    if leaves:
        assert [each.step for each in story.last(ClaimGeneration).abandoned] == [200]
        story.tell(GenerationClaimed(3, CommitRef(2, 200), is_rollback=True))
        story.store_all()
        assert story.state.last_commit == CommitRef(3, 100)


@pytest.mark.fault("D06")
def test_a_set_that_was_not_flushed_before_the_boot_is_never_committed() -> None:
    """An emergency set may be torn, a periodic one was flushed; the same after a restart of the daemon."""
    for _ in range(2):
        story = Story(claimed=False)
        settings = replace(story.state.settings, booted_wall_ns=2)  # the files are of the time 1
        story.state = replace(story.state, settings=settings)
        story.staging += [a_set(50), a_set(60, request_id="r")]
        story.scan()
        story.tell(GenerationClaimed(2, None))
        story.store_all()
        assert story.state.last_commit == CommitRef(2, 50)


@pytest.mark.parametrize("newest", [CommitRef(2, 100), None])
def test_a_start_before_the_claim_causes_a_second_claim(newest: CommitRef | None) -> None:
    """The generation that a restarted daemon continues belongs to the line that was left."""
    story = Story(claimed=False, staged=[a_set(120)])
    story.scan()
    starts(story, 60)
    story.tell(GenerationClaimed(2, newest))
    assert story.state.generation is None
    assert story.last(ClaimGeneration).after == 2
    assert [each.step for each in story.last(ClaimGeneration).abandoned] == [120]
    story.tell(GenerationClaimed(3, newest, is_rollback=True))
    assert story.state.generation == 3
    story.store_all()
    assert not story.all(CommitManifest)


def test_sets_of_a_trainer_from_before_the_claim_belong_to_the_new_line() -> None:
    """After a long outage of the store the start is judged late, and its own checkpoints count."""
    story = Story(claimed=False)
    story.scan()
    starts(story, 60)
    seals(story, 70, "second")
    story.tell(GenerationClaimed(2, CommitRef(2, 100)))
    assert left(story)
    assert not story.all(SetAside)
    story.tell(GenerationClaimed(3, CommitRef(2, 100), is_rollback=True))
    story.store_all()
    assert story.state.last_commit == CommitRef(3, 70)
