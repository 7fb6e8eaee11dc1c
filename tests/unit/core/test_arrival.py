# SPDX-License-Identifier: Apache-2.0
"""A notice before the trainer connects: the verdict waits for it, as long as a checkpoint would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong.protocol import Request
from swansong_bucket.model import CommitRef, Parent, Severity, Start, Verdict
from swansongd.core import arrival
from swansongd.core.arrival import RECONNECT_S
from swansongd.core.events import (
    Conclude,
    Exit,
    Mark,
    SignalRefused,
    SignalSent,
    SignalTrainer,
)
from swansongd.core.transition import EXIT_STOPPED, HOST_SOURCE, LOGIND_SOURCE
from swansongd.observe.phase import Phase, phase_of

from testkit.story import MIB, Story, joined

pytestmark = pytest.mark.fault("T17")


def test_a_trainer_that_connects_in_time_is_asked() -> None:
    """The verdict waits for it, and then for its checkpoint."""
    story = Story()
    story.notice(in_s=15)
    story.scan()
    story.wait(1)
    assert phase_of(story.state) is Phase.WAITING_FOR_TRAINER
    assert not story.verdicts
    story.join(step=-1)
    story.progress(0)
    assert phase_of(story.state) is Phase.CHECKPOINTING
    story.serve(3)
    assert story.verdicts == ["SAFE generation 2 step 4"]


def test_the_wait_ends_when_no_checkpoint_fits_any_more() -> None:
    """Without figures only the reserve counts.  The verdict comes before the deadline, once."""
    story = Story()
    story.notice(in_s=15)
    story.scan()
    story.wait(9.9)
    assert not story.verdicts
    assert arrival.wait_s(story.state, story.now) == pytest.approx(0.1)
    story.wait(0.2)
    assert story.verdicts == ["NO_TRAINING None"]
    assert story.last(Conclude).slack_s == pytest.approx(4.9)
    story.join()
    assert not story.all(Request)
    story.scan()
    story.wait(4)
    assert story.verdicts[1:] == ["LOST None"], "there is training now, and the run has no commit"


def test_the_wait_leaves_the_time_that_a_checkpoint_takes() -> None:
    """By the size of the newest set and the measured bandwidth."""
    story = Story()
    story.commit(5, after_s=10)  # 100 MiB in 10 s
    story.notice(in_s=60)
    story.scan()
    wait_s = arrival.wait_s(story.state, story.now)
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(10 * MIB)
    assert wait_s == pytest.approx(60 - 10 - 5)


def test_a_farewell_foretells_the_verdict_of_the_wait() -> None:
    """The power may be cut early: a farewell is written when the wait begins, the verdict at its end.

    Neither is SAFE: no training was seen.
    """
    story = Story(newest=CommitRef(1, 50))
    story.notice()
    story.scan()
    story.wait(1)
    (foretold,) = story.all(Conclude)
    assert (foretold.verdict, foretold.is_final) == (Verdict.NO_TRAINING, False)
    assert "waiting for a trainer" in foretold.reason
    assert [mark.phase for mark in story.all(Mark)].count("waiting_for_trainer") == 1
    story.wait(114.1)
    assert story.verdicts == ["NO_TRAINING generation 1 step 50"]


@pytest.mark.parametrize("dies", [True, False])
def test_a_trainer_that_connects_after_the_verdict_gets_another_one(dies: bool) -> None:
    """It is asked.  Its steps are lost unless it answers: then NO_TRAINING would claim too much."""
    story = Story(newest=CommitRef(1, 50))
    story.wait(RECONNECT_S)
    story.notice(source=LOGIND_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    assert story.verdicts == ["NO_TRAINING generation 1 step 50"]
    story.join(step=-1)
    story.starts(50, parent=Parent("earlier", 50))
    story.progress(51)
    story.accept(51)
    if dies:
        story.leave(exited=True)
        story.scan()
        story.wait(1)
        assert story.verdicts[1:] == ["PARTIAL generation 1 step 50"]
        assert "the newest commit is of step 50, not of step 51" in story.last(Conclude).reason
    else:
        story.answer(52)
        story.store_all()
        assert story.verdicts[-1] == "SAFE generation 2 step 52"


def test_a_shutdown_ends_the_wait_of_an_earlier_notice() -> None:
    story = Story()
    story.wait(RECONNECT_S)
    story.notice(source="gcp.preempted")
    story.scan()
    assert not story.verdicts
    story.notice(in_s=30, source=LOGIND_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    assert story.verdicts == ["NO_TRAINING None"]


def test_a_shutdown_waits_for_a_trainer_that_reconnects() -> None:
    """Its process runs: the lock of the shutdown is held until it has saved."""
    story = joined(step=8)
    story.wait(RECONNECT_S)
    story.leave(exited=False)
    story.notice(in_s=30, source=HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    story.wait(2)
    assert not story.all(Exit)
    story.join(2, step=9)
    story.serve(9, connection=2)
    assert story.verdicts == ["SAFE generation 2 step 10"]
    assert story.last(Exit).code == EXIT_STOPPED


def test_a_start_that_claims_nothing_any_more_delays_no_verdict() -> None:
    """Its process ended before the daemon started, without a set.  Before a claim another VM may commit."""
    story = Story(recorded=[Start(id="a")])
    story.now += RECONNECT_S
    story.notice(in_s=60, source=LOGIND_SOURCE)
    story.scan()
    assert story.verdicts == ["PARTIAL None"]


def test_a_restarted_daemon_waits_for_the_trainers_of_the_earlier_one() -> None:
    """It does not know them yet, and the hooks reconnect within seconds, also during a shutdown."""
    before = joined()
    story = before.restarted()
    story.notice(in_s=30, source=LOGIND_SOURCE, severity=Severity.SHUTTING_DOWN)
    story.scan()
    story.wait(RECONNECT_S - 1)
    assert not story.verdicts
    story.wait(1)
    assert story.verdicts == ["LOST None"]


def test_a_signal_is_tried_until_the_trainer_is_ready_for_it() -> None:
    """The pid file appears later, or the handler is installed later.  Each reason is in the timeline once."""
    story = Story(signals_trainer=True)
    story.process()
    story.notice(in_s=60)
    story.scan()
    for _ in range(5):
        story.tell(SignalRefused(story.last(SignalTrainer).request_id, "no pid file"))
        assert not story.verdicts
        story.wait(1)
    requests = [action.request_id for action in story.all(SignalTrainer)]
    assert len(set(requests)) == len(requests) == 6
    story.tell(SignalSent(requests[-1], 55))
    story.commit(9, framework="checkpoint-n")
    assert story.verdicts == ["SAFE generation 2 step 9"]
    phases = [mark.phase for mark in story.all(Mark)]
    assert (phases.count("signal"), phases.count("request_failed")) == (1, 1)


def test_a_fenced_vm_and_a_precaution_wait_for_no_trainer() -> None:
    story = Story()
    story.notice()
    assert arrival.wait_s(story.state, story.now) is not None
    fenced = replace(story.state, starts=replace(story.state.starts, fenced_by=7))
    assert arrival.wait_s(fenced, story.now) is None
    assert story.state.evacuation is not None
    precaution = replace(story.state.evacuation, is_precaution=True)
    assert arrival.wait_s(replace(story.state, evacuation=precaution), story.now) is None


def test_a_restart_with_no_time_to_wait_is_not_safe_before_the_trainer_reports() -> None:
    """The trainer may be ahead of the newest commit, and reconnects after the verdict."""
    before = joined(step=220)
    before.commit(220)
    story = before.restarted()
    story.notice(2)
    story.scan()
    story.wait(0.2)
    assert story.verdicts == ["PARTIAL generation 2 step 220"]
    story.join(step=300)
    story.progress(300)
    story.wait(0.2)
    assert story.verdicts == ["PARTIAL generation 2 step 220"]
