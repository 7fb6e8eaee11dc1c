# SPDX-License-Identifier: Apache-2.0
"""A restarted daemon concludes SAFE only about training that it knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansongd.core import restart
from swansongd.core.arrival import RECONNECT_S
from swansongd.core.events import ClaimGeneration, GenerationClaimed, GpusRead, TrainerProgress
from swansongd.core.state import State
from swansongd.host import training_record
from swansongd.model import CommitRef, GpuHealth, GpuStatus, TrainingRecord

from testkit.story import Story, a_set, as_stored

pytestmark = pytest.mark.fault("T09", "T17")

SHORT_S = 6.0
"""A notice with no time for a checkpoint."""
SAFE = "SAFE generation 2 step 3"
PARTIAL = "PARTIAL generation 2 step 3"


def trained(step: int = 3) -> Story:
    """A trainer of one rank at ``step``, whose step 3 is committed."""
    story = Story()
    story.join(step=3, start_id="first")
    story.progress(3)
    story.seal(3, start_id="first")
    story.store_all()
    story.progress(step)
    return story


def lose_gpu(story: Story) -> None:
    """No connected trainer is asked from here on, so the commits alone decide."""
    gpu = GpuStatus(
        pci="0000:3b:00", index=0, health=GpuHealth.LOST, reason="Xid 79", since_mono_s=1.0
    )
    story.tell(GpusRead((gpu,)))


def ends(story: Story) -> list[str]:
    """The verdicts on a notice."""
    story.notice(SHORT_S)
    story.scan()
    story.wait(1.5)  # no checkpoint fits any more, so the verdict waits for no trainer
    return story.verdicts


def test_a_trainer_that_reconnects_slowly_is_not_forgotten() -> None:
    """However long it needs: its process runs, so its step may be ahead of the newest commit."""
    story = trained(step=5).restarted()
    story.wait(100 * RECONNECT_S)
    assert ends(story) == [PARTIAL]


def test_a_trainer_that_reconnected_at_the_commit_loses_nothing() -> None:
    """The verdict improves with its first report."""
    story = trained().restarted()
    story.wait(100)
    assert ends(story) == [PARTIAL]
    story.join(2, step=3, start_id="first")
    story.wait(0.1)
    assert story.verdicts == [PARTIAL]
    story.tell(TrainerProgress(2, 3))
    story.wait(0.1)
    assert story.verdicts == [PARTIAL, SAFE]


def test_a_trainer_that_ended_meanwhile_loses_nothing_more() -> None:
    """Its steps were lost before the notice.  A trainer may have started meanwhile, so the daemon waits."""
    story = trained(step=5).restarted(ended=[100])
    assert ends(story) == [PARTIAL]
    story = trained(step=5).restarted(ended=[100])
    story.wait(RECONNECT_S)
    assert ends(story) == [SAFE]


def test_without_a_record_trainers_get_some_time_to_reconnect() -> None:
    """``systemctl stop`` and ``start`` leave no record."""
    story = trained(step=5).restarted(remembers=False)
    assert ends(story) == [PARTIAL]
    story = trained(step=5).restarted(remembers=False)
    story.wait(RECONNECT_S)
    assert ends(story) == [SAFE]


def test_a_set_that_is_committed_after_the_restart_says_nothing_about_the_trainer() -> None:
    """It is at a later step, and has not reconnected."""
    before = trained(step=5)
    before.seal(4, start_id="first")
    story = before.restarted()
    story.store_all()
    assert ends(story) == ["PARTIAL generation 2 step 4"]


def test_a_trainer_that_loses_its_connection_has_an_unknown_step() -> None:
    """Its last report does not count, because it trains on."""
    story = trained()
    story.leave(exited=False)
    assert ends(story) == [PARTIAL]
    other = trained()
    other.leave(exited=False)
    other.join(2, pid=200, step=3, start_id="second")
    other.progress(3, connection=2)
    lose_gpu(other)
    assert ends(other) == [SAFE]


def behind() -> Story:
    """A trainer at step 2, which has left the line of the committed step 3; the next claim is made."""
    story = trained()
    story.leave()
    story.join(2, step=-1, start_id="second")
    story.tell(TrainerProgress(2, 1, start_id="second"))
    story.last(ClaimGeneration)
    story.tell(GenerationClaimed(3, CommitRef(2, 3)))
    story.tell(TrainerProgress(2, 2))
    story.staging.clear()  # the set of the old line is set aside
    story.scan()
    return story


@pytest.mark.parametrize("ended", [[], [100]])
def test_a_line_that_was_left_stays_left(ended: list[int]) -> None:
    """The newest commit is not the state of the training, until this generation has a commit."""
    story = behind().restarted(ended=ended)
    story.wait(RECONNECT_S)
    assert ends(story) == [PARTIAL]


def test_a_commit_of_the_new_line_pays_the_debt() -> None:
    """Also one that was written at the moment at which the daemon was killed."""
    before = behind()
    before.staging[:] = [a_set(2, "new", start_id="second")]
    for newest in (None, CommitRef(3, 2)):
        story = before.restarted(newest=newest, ended=[100])
        story.store_all()
        story.wait(RECONNECT_S)
        assert ends(story) == ["SAFE generation 3 step 2"]


def test_a_set_that_the_old_line_sealed_meanwhile_is_abandoned() -> None:
    """A predecessor that still runs seals it while no daemon runs, and the next life finds it later."""
    story = behind().restarted()
    story.staging.append(a_set(4, "old", start_id="first"))
    story.scan()
    assert [staged.step for staged in story.state.abandoned if staged.nonce == "old"] == [4]
    assert not story.state.uncommitted


def test_a_job_over_several_vms_that_began_behind_the_newest_commit_owes_one() -> None:
    """Each start of such a job has its own generation; the newest commit is of an earlier one."""
    story = Story(claimed=False)
    story.state = replace(
        story.state, settings=replace(story.state.settings, several_vms=True), job_start_id="job"
    )
    story.scan()
    story.tell(GenerationClaimed(3, CommitRef(2, 9)))
    story.join(ranks=2, nodes=2, step=-1, start_id="second")
    story.progress(4)
    assert story.state.owes_checkpoint
    lose_gpu(story)
    assert ends(story) == ["PARTIAL generation 2 step 9"]


def test_the_same_process_keeps_its_place_only_if_it_is_the_same() -> None:
    """A process with a reused pid is another one: its first report shows where it begins."""
    story = trained(step=5)
    (known,) = story.state.trainers
    story.state = replace(story.state, trainers=(replace(known, process_start=1),))
    story.join(2, step=3, start_id="second")
    assert [trainer.start_step for trainer in story.state.trainers] == [-1]


@given(
    st.lists(
        st.sampled_from(["step", "seal", "commit", "restart", "restart, trainer ends", "connect"]),
        max_size=14,
    ),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_sequence_of_restarts_makes_a_false_safe(events: list[str], remembers: bool) -> None:
    """SAFE means that no step of a running trainer is ahead of the newest commit.

    Without the record that holds after the time for reconnecting only for trainers that use this time.
    """
    story = trained()
    step, is_running, is_connected, number = 3, True, True, 1
    for event in events:
        number += 1
        if event == "step" and is_running:
            step += 1
            if is_connected:
                story.progress(step, connection=connection_of(story.state))
        elif event == "seal" and is_running:
            story.staging.append(a_set(step, f"n{number}", start_id="first"))
            story.scan()
        elif event == "commit":
            story.store_all()
        elif event == "connect" and is_running and not is_connected:
            story.join(number, step=step, start_id="first")
            story.progress(step, connection=number)
            is_connected = True
        elif event.startswith("restart"):
            is_running = is_running and "ends" not in event
            story = story.restarted(ended=[] if is_running else [100], remembers=remembers)
            is_connected = False
    committed = story.state.last_complete
    verdicts = ends(story)
    if is_running and committed is not None and step > committed.step:
        newest = max(commit_steps(verdicts), default=-1)
        assert not any(v.startswith("SAFE") for v in verdicts) or newest >= step


def connection_of(state: State) -> int:
    return max(trainer.connection for trainer in state.trainers)


def commit_steps(verdicts: list[str]) -> list[int]:
    return [int(verdict.split()[-1]) for verdict in verdicts if verdict.startswith("SAFE")]


def test_the_record_is_the_same_after_it_was_stored() -> None:
    """Apart from the connections, which it numbers below zero."""
    record = restart.record_of(behind().state)
    again = training_record.parse(as_stored(training_record.facts_of(record)))
    assert [view.connection for view in again.trainers] == [-1]
    same = tuple(replace(view, connection=0) for view in again.trainers)
    assert replace(again, trainers=same) == record
    assert record.starts == ("first", "second")
    assert record.closed_starts == ("first",)
    assert record.owes_checkpoint


def test_the_record_changes_with_no_step() -> None:
    """It is written at starts and ends of trainers, not at each report."""
    story = trained()
    before = restart.record_of(story.state)
    story.progress(50)
    story.seal(51, start_id="first")
    assert restart.record_of(story.state) == before


def test_the_record_is_bounded() -> None:
    """Whatever trainers do."""
    story = Story()
    for number in range(1, 400):
        story.join(number, rank=number % 100, ranks=100, pid=number, start_id=f"start-{number}")
    record = restart.record_of(story.state)
    assert isinstance(record, TrainingRecord)
    found = training_record.parse(as_stored(training_record.facts_of(record)))
    assert len(found.trainers) == len(found.starts) == restart.KNOWN_MAX
