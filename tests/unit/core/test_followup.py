# SPDX-License-Identifier: Apache-2.0
"""Stories of follow-up checkpoints: requested after the verdict, as long as another one fits."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from enum import Enum

import pytest
from swansong.protocol import Hello, Request, Withdrawn
from swansong_bucket.model import (
    PEER_SOURCE,
    CommitRef,
    DeadlineQuality,
    GpuHealth,
    Severity,
    Start,
    Verdict,
)
from swansongd import sources
from swansongd.core import followup, gpus
from swansongd.core.events import (
    CancelFlush,
    Conclude,
    FlushProgress,
    Mark,
    NoticeRaised,
    PeerRequested,
    RunRead,
    SignalledExited,
    SignalRefused,
    SignalSent,
    SignalTrainer,
    TrainerAgreed,
    TrainerFailed,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.core.request_ids import FOLLOW_UP
from swansongd.core.schedule import INTERVAL_MIN_S
from swansongd.observe.phase import is_follow_up_under_way, phase_of
from swansongd.trainers.translate import view_of

from testkit.story import MIB, Story, a_notice, a_set, joined

TICK_S = 0.5
STEP_S = 0.5
RESERVE_S = 5.0


def asks(story: Story) -> list[Request]:
    return [ask for ask in story.all(Request) if FOLLOW_UP in ask.id]


def marks(story: Story) -> list[str]:
    return [mark.phase for mark in story.all(Mark)]


def safe(
    in_s: float = 120.0,
    *,
    source: str = "aws.spot",
    takes_follow_ups: bool = True,
    follow_ups: bool = True,
) -> Story:
    """SAFE at step 42, one second after the notice; a save blocks for 0.1 s, and training continues."""
    story = Story(follow_ups=follow_ups)
    story.join(step=40, takes_follow_ups=takes_follow_ups)
    report(story, 40)
    story.notice(in_s=in_s, source=source)
    story.serve(41, after_s=1.0)
    assert phase_of(story.state) is Verdict.SAFE
    return story


def report(story: Story, step: int, connection: int = 1, *, snapshot_s: float = 0.1) -> None:
    measured = TrainerProgress(
        connection,
        step,
        save_s=1.0,
        save_bytes=100 * MIB,
        snapshot_s=snapshot_s,
        step_s=STEP_S,
    )
    story.tell(measured)


def asked(in_s: float = 120.0) -> Story:
    """SAFE at step 42; a follow-up is requested, and accepted at step 60."""
    story = safe(in_s)
    while not asks(story):
        report(story, 60)
        story.wait(TICK_S)
    story.accept(60)
    return story


def train(story: Story, until_s: float, *, step: int = 50) -> int:
    """Train, and answer each follow-up one step later, until ``until_s``; returns the last step."""
    served = len(asks(story))
    while story.now < until_s:
        story.wait(TICK_S)
        if story.now % STEP_S < TICK_S:
            step += 1
            report(story, step)
        if len(asks(story)) > served:
            served += 1
            story.accept(step)
            step += 1
            story.now += 1.0
            story.answer(step, nonce=f"f{served}")
            story.store_all(after_s=0.5)
            report(story, step)
    return step


def test_follow_ups_are_committed_until_no_more_fits() -> None:
    """Each one is reported with the verdict and its own times, from which forecasts learn their errors.

    At the deadline the last commit is a few seconds old.
    """
    story = safe()
    deadline_mono_s = story.evacuation.deadline_mono_s
    last_step = train(story, deadline_mono_s)
    assert len(asks(story)) >= 3
    assert all(ask.urgency == "emergency" for ask in asks(story))
    assert [word.split()[0] for word in story.verdicts] == ["SAFE"] * (1 + len(asks(story)))
    last = story.all(Conclude)[-1]
    assert last.commit == story.state.commits.last
    assert 5.0 < last.slack_s < 7.5, "as late as is safe: reserve, save, send and a step"
    assert last.commit is not None
    assert last_step - last.commit.step < 20
    assert marks(story).count("follow_up") == len(asks(story))
    assert len({ask.id for ask in asks(story)}) == len(asks(story))
    first, *others = story.all(Conclude)
    assert first.took_s == 1.0
    assert [end.took_s for end in others] == [1.5] * len(asks(story))
    assert all(end.expected_s is not None for end in others)
    learned = story.state.learned.pace.error_square
    assert learned is not None
    assert learned.samples >= len(others)


@pytest.mark.fault("X01")
def test_training_on_a_failed_gpu_is_asked_for_no_follow_up() -> None:
    """The failure ends the one in progress, and no further one is requested."""
    story = safe()
    train(story, story.now + 30)
    asked = len(asks(story))
    assert asked
    story.read_gpus(GpuHealth.DYING)
    train(story, story.evacuation.deadline_mono_s)
    assert len(asks(story)) == asked


def test_the_phase_stays_safe_while_a_follow_up_is_under_way() -> None:
    """The state shows SAFE in each of its phases, and beside it that a follow-up is under way."""
    assert not is_follow_up_under_way(safe().state)
    story = asked()
    assert is_follow_up_under_way(story.state)
    assert phase_of(story.state) is Verdict.SAFE
    story.answer(61)
    assert story.state.flush.flight is not None
    assert phase_of(story.state) is Verdict.SAFE
    story.flushed()
    assert phase_of(story.state) is Verdict.SAFE
    assert is_follow_up_under_way(story.state)
    story.committed()
    assert not is_follow_up_under_way(story.state)
    assert story.verdicts == ["SAFE generation 2 step 42", "SAFE generation 2 step 61"]


@pytest.mark.parametrize("end", ["process", "withdrawn", "job"])
def test_a_follow_up_that_fails_changes_no_verdict(end: str) -> None:
    """Its rank dies, its notice is withdrawn, or a shutdown follows: SAFE stands, with its commit."""
    story = asked()
    before, commit = story.verdicts, story.state.commits.last_complete
    if end == "process":
        story.leave()
        story.scan()
        failed = next(mark for mark in story.all(Mark) if mark.phase == "follow_up_failed")
        assert "ended" in str(dict(failed.facts)["reason"])
    elif end == "withdrawn":
        story.withdraw()
        assert story.state.evacuation is None
    else:
        story.notice(source="logind", in_s=20.0, severity=Severity.SHUTTING_DOWN)
        assert FOLLOW_UP not in story.request_id, "the shutdown has a request of its own"
    assert story.verdicts == before
    assert story.state.commits.last_complete == commit
    assert asks(story)[0].id in {order.request_id for order in story.all(Withdrawn)}


def test_after_a_failure_the_next_one_waits_and_the_last_one_comes() -> None:
    """A trainer that declines is asked again after an interval, not with every tick."""
    story = safe()
    deadline_mono_s = story.evacuation.deadline_mono_s
    step = 60
    while story.now < deadline_mono_s:
        story.wait(TICK_S)
        step += 1
        report(story, step)
        request = story.state.follow_up
        if request is not None and request.is_waiting:
            story.tell(TrainerFailed(1, request.request_id, "declined: no room"))
    assert 3 <= len(asks(story)) <= 15
    story.notice(source="logind", in_s=20.0, severity=Severity.SHUTTING_DOWN)
    withdrawn = [done.request_id for done in story.all(Withdrawn)]
    assert withdrawn == [ask.id for ask in asks(story)], "each once"
    assert story.verdicts == ["SAFE generation 2 step 42"]


def test_the_flush_of_a_follow_up_stops_at_the_reserve() -> None:
    """The store becomes slow: data stops at the reserve, and the verdict stands."""
    story = asked(in_s=60.0)
    deadline_mono_s = story.evacuation.deadline_mono_s
    story.answer(61)
    flight = story.flight
    while story.now < deadline_mono_s - 1.0:
        story.wait(TICK_S)
        if story.state.flush.flight is not None:
            story.tell(FlushProgress(flight.flush_id, MIB, MIB))
            assert story.now < deadline_mono_s - 5.0 + TICK_S
    assert story.all(CancelFlush)
    assert story.verdicts == ["SAFE generation 2 step 42"]


def test_a_follow_up_can_improve_a_verdict() -> None:
    """The first request failed, so the verdict is PARTIAL; a follow-up makes it SAFE."""
    story = Story(newest=None)
    story.join(step=40, takes_follow_ups=True)
    story.commit(30)
    report(story, 40)
    story.notice()
    assert story.conclude(failure="no space left") == ["PARTIAL generation 2 step 30"]
    train(story, story.now + 30.0)
    assert story.verdicts[1].startswith("SAFE ")


class Follow(Enum):
    """The follow-ups after a notice."""

    EARLY = "some before the last one, because the VM may end before the deadline"
    LATE = "the last one and the one just before it, because the end is exact"
    NONE = "none"


FOLLOWED = {
    "aws.spot": (Severity.IMMINENT, Follow.EARLY),
    "aws.scheduled": (Severity.SCHEDULED, Follow.EARLY),
    "azure.deletion": (Severity.IMMINENT, Follow.EARLY),
    "azure.scheduled": (Severity.SCHEDULED, Follow.EARLY),
    "gcp.preempted": (Severity.IMMINENT, Follow.EARLY),
    "gcp.stop": (Severity.IMMINENT, Follow.EARLY),
    "gcp.maintenance": (Severity.SCHEDULED, Follow.EARLY),
    "gcp.upcoming": (Severity.SCHEDULED, Follow.EARLY),
    "command": (Severity.IMMINENT, Follow.EARLY),
    "peer": (Severity.IMMINENT, Follow.EARLY),
    "deadline": (Severity.IMMINENT, Follow.LATE),
    "manual": (Severity.IMMINENT, Follow.LATE),
    "drill": (Severity.IMMINENT, Follow.LATE),
    # Their verdict ends the VM.
    "aws.asg": (Severity.IMMINENT, Follow.NONE),
    "logind": (Severity.SHUTTING_DOWN, Follow.NONE),
    "host": (Severity.SHUTTING_DOWN, Follow.NONE),
    # No end is announced, and a precaution has no verdict.
    "aws.rebalance": (Severity.ADVISORY, Follow.NONE),
    "gpu": (Severity.ADVISORY, Follow.NONE),
}
"""The decision for each source.  A new source has to be decided here."""


def sources_of_the_code() -> list[str]:
    """The names of all sources: those of the classes with ``run``, and the constants of the other modules."""
    found = {PEER_SOURCE, gpus.SOURCE}
    for each in pkgutil.iter_modules(sources.__path__):
        values = vars(importlib.import_module(f"{sources.__name__}.{each.name}"))
        names = [values.get(name) for name in ("NAME", "MANUAL", "DRILL")]
        names += [
            getattr(kind, "name", None)
            for kind in values.values()
            if isinstance(kind, type) and hasattr(kind, "run")
        ]
        found |= {name for name in names if isinstance(name, str)}
    return sorted(found)


def announced(source: str, severity: Severity) -> Story:
    """A VM with this notice, 100 s before its end, and its first commit."""
    story = Story(mtbf_s=1e9)
    story.join(step=40, nodes=2 if source == "peer" else 1, takes_follow_ups=True)
    report(story, 40)
    if source == "peer":
        story.tell(PeerRequested("peer-a", "gone", 100.0))
        serve_round(story, 42)
    else:
        story.notice(in_s=100.0, source=source, severity=severity)
        story.serve(41, after_s=1.0)
    return story


@pytest.mark.parametrize("source", sources_of_the_code())
def test_follow_ups_after_the_notice_of_each_source(source: str) -> None:
    """Early ones, late ones or none.  Unannounced interruptions are excluded."""
    severity, follow = FOLLOWED[source]
    story = announced(source, severity)
    end_mono_s = story.now + 98.0
    step, started_mono_s = 50, []
    while story.now < end_mono_s:
        story.wait(TICK_S)
        step += 1
        report(story, step)
        if len(asks(story)) > len(started_mono_s):
            started_mono_s.append(story.now)
            if source == "peer":
                serve_round(story, step, nonce=f"f{step}")
            else:
                story.serve(step, f"f{step}", after_s=0.5)
            step += 1
    if follow is Follow.NONE:
        assert not started_mono_s
    elif follow is Follow.LATE:
        assert 1 <= len(started_mono_s) <= 2
        assert end_mono_s - started_mono_s[0] < 20.0
    else:
        assert len(started_mono_s) >= 3
        assert end_mono_s - started_mono_s[0] > 50.0


@pytest.mark.parametrize(
    "why", ["the trainer stops after its save", "switched off", "no step since the commit"]
)
def test_none_is_requested(why: str) -> None:
    """The hello lacks the capability, ``trainer.follow_ups`` is false, or there is nothing to save."""
    hello = Hello(run="r", capabilities=["periodic", "follow_ups"])
    view = view_of(1, 1, hello, greeted_mono_s=0.0)
    assert (view.takes_periodic, view.takes_follow_ups) == (True, True)
    story = safe(
        takes_follow_ups=why != "the trainer stops after its save",
        follow_ups=why != "switched off",
    )
    for step in range(60, 160):
        if why != "no step since the commit":
            report(story, step)
        story.wait(1.0)
    assert not asks(story)


def test_none_while_a_set_is_sent() -> None:
    """A set that the trainer took itself is committed first; the follow-up comes after it."""
    story = safe()
    report(story, 60)
    story.seal(60, "own")
    flight = story.flight
    for step in range(60, 80):
        report(story, step)
        story.wait(1.0)
        story.tell(FlushProgress(flight.flush_id, 5 * step * MIB // 4, 5 * (step - 60) * MIB))
    assert not asks(story)
    story.store_all()
    assert story.verdicts[-1] == "SAFE generation 2 step 60"
    report(story, 100)
    story.wait(20.0)
    assert asks(story)


@pytest.mark.fault("T09")
def test_no_set_waits_for_an_answer_that_the_trainer_has_deleted() -> None:
    """A newer set, which contains the position that the answer has stated, is sent and is SAFE."""
    story = Story(signals_trainer=True)
    story.process("process-a", pid=900)
    story.notice()
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 900))
    story.wait(2)
    answer = story.seal(40, "answer", framework="transformers")
    story.seal(50, "newer", framework="transformers", written_ns=2)
    story.lose(answer)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 50"]


def test_a_distant_end_leaves_the_time_before_to_periodic_checkpoints() -> None:
    """With an hour left, no follow-up is requested before the end is near."""
    story = safe(in_s=3600.0, source="manual")
    deadline_mono_s = story.evacuation.deadline_mono_s
    step = 50
    while story.now < deadline_mono_s - story.state.lead_s - 6.0:
        step += 10
        report(story, step)
        story.wait(5.0)
    assert not asks(story)
    train(story, deadline_mono_s, step=step)
    assert asks(story)
    assert not [ask for ask in story.all(Request) if ask.id.startswith("periodic-")][1:]


def test_early_shards_of_a_follow_up_are_sent_during_the_save() -> None:
    """As for the first request: final files of the growing set are sent before it is sealed."""
    story = asked()
    growing = a_set(61, "grow", request_id=story.request_id)
    story.scan(growing=(growing,))
    assert not story.flight.is_sealed


def test_the_earliest_end_of_any_vm_counts() -> None:
    """Rank 0 leads, and another VM ends before this one: each follow-up starts before that end."""
    story = joined(step=40, ranks=1, nodes=2, takes_follow_ups=True)
    report(story, 40)
    story.notice(in_s=300.0)
    serve_round(story, 42)
    assert story.verdicts == ["SAFE generation 2 step 42"]
    report(story, 50)
    story.wait(1.0)
    peer_end_mono_s = story.now + 30.0
    story.tell(PeerRequested("peer-b", "gone", 30.0))
    serve_round(story, 52)
    assert story.verdicts[-1] == "SAFE generation 2 step 52"
    started_mono_s = []
    while story.now < peer_end_mono_s + 60:
        report(story, round(story.now))
        story.wait(TICK_S)
        if len(asks(story)) > len(started_mono_s):
            started_mono_s.append(story.now)
            serve_round(story, round(story.now) + 2, nonce=f"f{len(started_mono_s)}")
    assert started_mono_s, "another one fits before the end of the other VM"
    assert max(started_mono_s) + 2.0 + RESERVE_S <= peer_end_mono_s


def serve_round(story: Story, step: int, *, nonce: str = "r") -> None:
    """The ranks of all VMs agree on the newest request, and this VM commits its part: 2 s in all."""
    story.tell(TrainerAgreed(story.request_id, step))
    story.now += 1.0
    story.staging.append(replace(a_set(step, nonce, request_id=story.request_id), nodes=1))
    story.scan()
    story.store_all(after_s=1.0)
    report(story, step)


def test_only_the_daemon_of_rank_0_leads_and_the_others_take_part() -> None:
    """A follow-up request of another VM is no new notice, and its set is committed."""
    story = joined(rank=1, step=40, ranks=1, nodes=2, takes_follow_ups=True)
    report(story, 40)
    story.tell(PeerRequested("peer-a", "gone", 110.0))
    serve_round(story, 42)
    assert story.verdicts == ["SAFE generation 2 step 42"]
    for step in range(43, 90):
        report(story, step)
        story.wait(1.0)
    assert not asks(story)
    led = f"peer-a{FOLLOW_UP}123.456"
    opened = story.state.course.opened
    story.tell(PeerRequested(led, "gone", 50.0))
    assert story.state.course.opened == opened
    story.scan(growing=(a_set(91, "led", request_id=led),))
    assert story.state.flush.flight is not None, (
        "early shards, also of a request that another daemon made"
    )
    story.staging.append(a_set(91, "led", request_id=led))
    story.scan()
    story.store_all()
    assert story.verdicts[-1] == "SAFE generation 2 step 91"


def two_ranks() -> Story:
    """SAFE with two ranks on one VM."""
    story = Story()
    for connection, rank in ((1, 0), (2, 1)):
        story.join(connection, rank=rank, ranks=2, step=40, takes_follow_ups=True)
        report(story, 40, connection)
    story.notice()
    for connection in (1, 2):
        story.accept(41, connection)
    story.answer(42)
    story.store_all(after_s=1.0)
    assert story.verdicts == ["SAFE generation 2 step 42"]
    return story


def train_until_asked(story: Story, connections: tuple[int, ...], *, limit_s: float = 60.0) -> int:
    """These ranks train until a follow-up is requested, or for a while; returns the last step."""
    step, asked, end_s = 100, len(asks(story)), story.now + limit_s
    while len(asks(story)) == asked and story.now < end_s:
        story.wait(TICK_S)
        step += 1
        for connection in connections:
            report(story, step, connection)
    return step


def test_none_while_a_rank_is_missing() -> None:
    """A rank is disconnected, or its process has ended: no step is common to all ranks."""
    for exited in (False, True):
        story = two_ranks()
        story.leave(2, exited=exited)
        train_until_asked(story, (1,))
        assert not asks(story)
        story.join(3, rank=1, ranks=2, step=300, takes_follow_ups=True)
        train_until_asked(story, (1, 3))
        assert asks(story), "the rank is back"


def signalled(*, save_s: float = 1.0, quality: DeadlineQuality = DeadlineQuality.STATED) -> Story:
    """SAFE at a signal, without hooks, and after a save of this time; the process runs on."""
    story = Story(signals_trainer=True)
    story.notice(source="gcp.preempted", quality=quality)
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 77))
    story.now += save_s
    story.commit(42, framework="dcp", after_s=1.0)
    assert phase_of(story.state) is Verdict.SAFE
    return story


def test_a_process_that_trains_on_after_its_signal_gets_another_one() -> None:
    """The last moment that is safe; only the id of the request differs."""
    story = signalled()
    while len(story.all(SignalTrainer)) < 2:
        story.wait(TICK_S)
        assert story.now < 1121.0
    first, second = story.all(SignalTrainer)
    assert second.request_id.startswith(f"{first.request_id}{FOLLOW_UP}")
    story.tell(SignalSent(second.request_id, 77))
    story.now += 1.0
    story.commit(90, framework="dcp")
    assert story.verdicts[-1] == "SAFE generation 2 step 90"


def test_a_second_signal_that_is_refused_is_given_up() -> None:
    """The process may have ended.  The verdict stands, and the timeline has no failure of its request."""
    story = signalled()
    while len(story.all(SignalTrainer)) < 2:
        story.wait(TICK_S)
    story.tell(SignalRefused(story.last(SignalTrainer).request_id, "no such process"))
    story.wait(1.0)
    assert story.state.follow_up is not None
    assert (story.state.follow_up.is_waiting, story.evacuation.refusal) == (False, "")
    assert len(story.all(SignalTrainer)) == 2


def test_a_process_is_signalled_again_only_10_s_after_its_save() -> None:
    """It may save at the signal and exit.  The end may come any second, so the schedule would not wait."""
    story = signalled(save_s=0.1, quality=DeadlineQuality.ASSUMED)
    saved_mono_s = story.now - 1.0
    while len(story.all(SignalTrainer)) < 2:
        story.wait(TICK_S)
        assert story.now < saved_mono_s + 60.0
    assert 10.0 <= story.now - saved_mono_s < 10.0 + 2 * TICK_S


@pytest.mark.parametrize(("save_s", "ends"), [(1.0, True), (60.0, False)])
def test_a_process_that_ends_or_saves_slowly_gets_no_other(save_s: float, *, ends: bool) -> None:
    """Many trainers save at the signal and exit.  A save of 60 s costs more than it gains in 120 s."""
    story = signalled(save_s=save_s)
    if ends:
        story.tell(SignalledExited(story.last(SignalTrainer).request_id, 77))
    for _ in range(118):
        story.wait(1.0)
    assert len(story.all(SignalTrainer)) == 1


def test_an_assumed_deadline_brings_follow_ups_closer_together() -> None:
    """Compute Engine may end the VM at any moment: the next one is due earlier than by a stated deadline."""
    waits_s = []
    for quality in (DeadlineQuality.STATED, DeadlineQuality.ASSUMED):
        story = joined(step=40, takes_follow_ups=True)
        report(story, 40)
        story.notice(source="gcp.preempted", quality=quality)
        story.serve(41, after_s=1.0)
        report(story, 60)
        waits_s.append(followup.wait_s(story.state, story.now))
    stated_s, assumed_s = waits_s
    assert stated_s is not None
    assert assumed_s is not None
    assert assumed_s < stated_s / 2


def test_an_unknown_bandwidth_is_measured_by_an_early_follow_up() -> None:
    """After a restart of the daemon nothing is known of the store: the last moment cannot be computed."""
    story = safe()
    evacuation = story.evacuation
    assert evacuation.request is not None
    unmeasured = replace(evacuation, request=replace(evacuation.request, took_s=None))
    story.state = replace(
        story.state,
        evacuation=unmeasured,
        learned=replace(story.state.learned, bandwidth_bytes_per_s=None),
    )
    report(story, 60)
    story.wait(INTERVAL_MIN_S)
    assert asks(story)


@pytest.mark.fault("T22")
def test_a_restarted_daemon_takes_the_follow_ups_of_its_earlier_life_for_the_answer() -> None:
    """The trainer repeats its first answer, whose commit a follow-up has replaced: SAFE, and more follow."""
    story = Story(claimed=False, recorded=[Start(id="a", generation=2)])
    story.scan()
    story.join(step=70, takes_follow_ups=True)
    report(story, 70)
    raised = a_notice(deadline_mono_s=story.now + 60.0)
    story.tell(NoticeRaised(replace(raised, evacuation_id="earlier")))
    assert story.request_id == "earlier"
    story.tell(TrainerSealed(1, "earlier", 42, 1.0, 100 * MIB))
    story.scan()
    assert not story.verdicts
    story.tell(RunRead(CommitRef(2, 61), "a"))
    assert story.verdicts == ["SAFE generation 2 step 61"]
    train(story, story.now + 30.0, step=80)
    assert asks(story)
    assert story.verdicts[-1].startswith("SAFE")
