# SPDX-License-Identifier: Apache-2.0
"""The end of a run: its checkpoint is final, and no trainer is asked or awaited after it."""

from __future__ import annotations

import pytest
from swansong.protocol import Committed, Request
from swansong_bucket.model import CheckpointKind, CommitRef, Parent, Severity
from swansongd.core.events import CommitManifest, Prune, RestoreAsked
from swansongd.core.transition import LOGIND_SOURCE

from testkit.story import Story, a_set, joined

pytestmark = pytest.mark.fault("T18")

START = "start-1"


def finished(*, committed: bool = True, **facts: float) -> Story:
    """A trainer that has sealed the end of its run at step 9, and still waits for the commit."""
    story = joined(step=9, start_id=START, takes_periodic=True)
    story.seal(9, "end", is_final=True, start_id=START, **facts)
    if committed:
        story.store_all()
    return story


def test_the_end_is_committed_beside_a_checkpoint_of_its_step() -> None:
    """A periodic checkpoint of the last step does not mark the end, and its set is no longer needed."""
    story = joined(step=9, start_id=START)
    periodic = story.commit(9, start_id=START)
    story.commit(9, "end", is_final=True, start_id=START)
    assert story.state.commits.last_complete == CommitRef(2, 9, is_final=True)
    assert story.last(Committed).is_final, "the trainer waits for this message"
    assert story.last(CommitManifest).staged.kind is CheckpointKind.FINAL
    assert story.last(Prune).directories == (periodic.directory,)


def test_the_end_precedes_a_checkpoint_of_its_step_that_is_not_stored() -> None:
    story = Story()
    story.staging = [a_set(9, "zzz"), a_set(9, "aaa", is_final=True)]
    story.scan()
    story.store_all()
    assert story.flushes[-1] == 9
    assert story.state.commits.last_complete == CommitRef(2, 9, is_final=True)


def test_a_notice_after_the_end_is_safe_at_once() -> None:
    """With the trainer still connected and without it; neither is asked."""
    for is_connected in (True, False):
        story = finished()
        if not is_connected:
            story.leave()
        story.notice()
        story.scan()
        assert story.verdicts == ["SAFE generation 2 step 9 (final)"]
        assert not story.all(Request)


def test_a_notice_while_the_end_is_flushed_asks_no_trainer() -> None:
    story = finished(committed=False)
    story.notice()
    story.leave()
    story.scan()
    assert not story.verdicts
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 9 (final)"]
    assert not story.all(Request)


def test_a_shutdown_waits_for_the_manifest_of_a_set_that_is_removed() -> None:
    """The script removes its directory after the last byte is stored."""
    story = finished(committed=False)
    story.leave()
    story.flushed()
    story.lose(story.staging[0])
    story.wait(60)
    story.notice(60, LOGIND_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    assert not story.verdicts
    story.committed()
    assert story.verdicts == ["SAFE generation 2 step 9 (final)"]


@pytest.mark.fault("H03")
def test_a_shutdown_soon_after_a_restart_finds_a_finished_run_safe() -> None:
    """No trainer of a finished run reconnects, so the daemon waits for none."""
    story = finished()
    story.leave()
    story.staging.clear()
    story = story.restarted()
    story.notice(60, LOGIND_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    story.wait(0.1)
    assert story.verdicts == ["SAFE generation 2 step 9 (final)"]


def test_the_end_answers_a_request_that_the_ranks_cannot_answer() -> None:
    """The ranks accepted, and their script ended: no further step comes."""
    story = Story()
    for rank in range(2):
        story.join(rank + 1, rank=rank, ranks=2, step=9, start_id=START)
    story.notice()
    for rank in range(2):
        story.accept(9, rank + 1)
    story.seal(9, "end", is_final=True, start_id=START)
    for rank in range(2):
        story.leave(rank + 1)
    story.scan()
    story.store_all()
    assert story.verdicts[-1] == "SAFE generation 2 step 9 (final)"
    assert not [verdict for verdict in story.verdicts if "SAFE" not in verdict]


def test_a_script_that_trains_on_is_asked() -> None:
    """Another start continues past the end: its training counts, and its loss is not hidden."""
    story = finished()
    story.leave()
    story.join(2, step=9, start_id="start-2")
    story.starts(9, 2, start_id="start-2", parent=Parent(START, 9))
    story.progress(12, 2)
    story.notice()
    assert story.sent(Request)[-1].connections == (2,)
    story.leave(2)
    story.scan()
    assert story.verdicts == ["PARTIAL generation 2 step 9 (final)"]


def test_a_start_of_a_finished_run_that_trains_nothing_loses_nothing() -> None:
    """The script restores the end and exits, while the daemon asks it."""
    story = finished()
    story.leave()
    story.join(2, start_id="start-2")
    story.tell(RestoreAsked("start-2"))
    story.notice()
    story.accept(-1, 2)
    story.leave(2)
    story.scan()
    assert story.verdicts == ["SAFE generation 2 step 9 (final)"]


def test_a_finished_run_gets_no_periodic_request() -> None:
    story = finished()
    story.wait(7200)
    assert not story.all(Request)
