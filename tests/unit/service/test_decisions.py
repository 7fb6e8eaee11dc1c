# SPDX-License-Identifier: Apache-2.0
"""A fault in our code costs the event or the action that caused it, never the decision loop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import CapturingLogger, capture_logs
from swansong import protocol
from swansong_bucket.errors import StagingError
from swansong_bucket.loss_records import LastReport
from swansong_bucket.model import CommitRef, Start, TrainerView, Verdict
from swansongd.config.config import load
from swansongd.core import machine
from swansongd.core.events import (
    Action,
    Conclude,
    Event,
    Exit,
    FenceFound,
    Mark,
    NoticeRaised,
    NoticeWithdrawn,
    Prune,
    Rescan,
    Scanned,
    Send,
    StopRequested,
    Tick,
    TrainerJoined,
    TrainerProgress,
)
from swansongd.core.state import Settings, State
from swansongd.core.transition import EXIT_FENCED
from swansongd.observe import decision_log
from swansongd.observe.accounting import MeasuredResume
from swansongd.service import decisions
from swansongd.service.decisions import UNDECIDED_MAX, Decisions
from swansongd.service.service import Service
from swansongd.staging import scan

from testkit.committed import configuration
from testkit.story import a_notice, a_set

JOINED = TrainerJoined(
    TrainerView(connection=1, pid=7, rank=0, world_size=1, local_world_size=1, step=3)
)
Faulty = Callable[[Callable[[State, Event], bool]], None]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Makes the state machine raise where the test wants it."""
    real = machine.step

    def inject(is_fault: Callable[[State, Event], bool]) -> None:
        def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
            if is_fault(state, event):
                raise ValueError("math domain error")
            return real(state, event, now)

        monkeypatch.setattr(machine, "step", step)

    return inject


class Loop:
    """The decisions for a VM with one trainer."""

    def __init__(self) -> None:
        self.log = CapturingLogger()
        state = State(settings=Settings(reserve_s=5.0, signals_trainer=False))
        self.decisions = Decisions(state, self.log)
        self.tell(JOINED)

    def tell(self, event: Event, now: float = 1000.0) -> tuple[Action, ...]:
        return self.decisions.decide(event, now)

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [dict(call.kwargs) for call in self.log.calls if call.args == (event,)]


@pytest.fixture
def loop() -> Loop:
    return Loop()


def requests(actions: Iterable[Action]) -> list[Send]:
    sent = [action for action in actions if isinstance(action, Send)]
    return [each for each in sent if isinstance(each.message, protocol.Request)]


def is_poison(_: State, event: Event) -> bool:
    return isinstance(event, TrainerProgress) and event.step == 666


@pytest.mark.fault("H09", "S13")
def test_an_event_that_raises_is_dropped_and_the_state_stays(loop: Loop, faulty: Faulty) -> None:
    """It is counted and logged with its type and trace; later events are decided as usual."""
    faulty(is_poison)
    before = loop.decisions.state
    assert loop.tell(TrainerProgress(1, 666)) == ()
    assert loop.decisions.state == before
    assert loop.decisions.faults == 1
    assert loop.decisions.last_fault == "event TrainerProgress: ValueError: math domain error"
    (line,) = loop.lines("decision_fault")
    assert isinstance(line["exc_info"], ValueError)
    loop.tell(TrainerProgress(1, 8))
    assert loop.decisions.state.ranks.trainers[0].step == 8
    asked = loop.tell(NoticeRaised(a_notice(deadline_mono_s=1100.0)))
    assert requests(asked)


@pytest.mark.fault("H09", "S12")
def test_a_flood_of_events_that_raise_does_not_stop_deadlines(loop: Loop, faulty: Faulty) -> None:
    """A tick replaces each event; the log has a few lines, the status all faults."""
    loop.tell(NoticeRaised(a_notice(deadline_mono_s=1050.0)))
    faulty(is_poison)
    for number in range(1000):
        loop.tell(TrainerProgress(1, 666), 1000.0 + number / 10)
    assert loop.decisions.faults == 1000
    assert len(loop.lines("decision_fault")) == decisions._LINES_AT_ONCE
    assert loop.decisions.state.evacuation is None, "the deadline passed, and the VM outlived it"


@pytest.mark.fault("H09")
def test_a_corrupt_state_is_rebuilt_and_the_notice_is_evacuated(loop: Loop, faulty: Faulty) -> None:
    """A trainer's report makes every step raise: the report is forgotten, and nothing else."""

    def is_spoiled(state: State, event: Event) -> bool:
        return any(trainer.save_s == 1e308 for trainer in state.ranks.trainers)

    loop.tell(NoticeRaised(a_notice("aws.rebalance", deadline_mono_s=9000.0)))
    loop.tell(TrainerProgress(1, 4, save_s=1e308))
    faulty(is_spoiled)
    actions = loop.tell(NoticeRaised(a_notice(deadline_mono_s=1100.0)))
    (asked,) = requests(actions)
    assert asked.connections == (1,)
    assert Rescan() in actions
    state = loop.decisions.state
    assert set(state.notices.live) == {"aws.rebalance", "aws.spot"}
    assert [trainer.step for trainer in state.ranks.trainers] == [4]
    (line,) = loop.lines("state_rebuilt")
    assert "NoticeRaised" in line["cause"]
    loop.tell(Tick())
    assert loop.decisions.faults == 1


@pytest.mark.fault("H09")
def test_a_scan_that_raises_does_not_end_the_evacuation(loop: Loop, faulty: Faulty) -> None:
    """It is dropped like a message: trainers decide the content of staging."""
    loop.tell(NoticeRaised(a_notice(deadline_mono_s=1100.0)))
    faulty(lambda _, event: isinstance(event, Scanned))
    evacuation = loop.decisions.state.evacuation
    assert evacuation is not None
    for _ in range(50):
        loop.tell(Scanned(1000.0, (a_set(5),)))
    assert loop.decisions.state.evacuation == evacuation
    assert not loop.lines("state_rebuilt")


@pytest.mark.fault("H09")
def test_when_no_event_can_be_decided_the_process_is_restarted(loop: Loop, faulty: Faulty) -> None:
    """Not before several events in a row have failed with a rebuilt state as well."""
    faulty(lambda *_: True)
    for _ in range(UNDECIDED_MAX - 1):
        assert loop.tell(Tick()) == ()
    with pytest.raises(ValueError, match="math domain"):
        loop.tell(Tick())


# ---------------------------------------------------------------- the service


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """A whole daemon that does not run: a test passes the events to it."""
    (tmp_path / "staging").mkdir()
    more = f'[sources]\ncloud = "none"\nsystem_bus = "unix:path={tmp_path}/no-bus"\n'
    more += f'[trainer]\nsocket = "{tmp_path}/s"\n[flush]\nconnections = 1\n'
    return Service(load(configuration(tmp_path, more=more)))


def with_generation(state: State) -> State:
    """The state after a start of the training has claimed generation 2."""
    return replace(
        state,
        starts=replace(state.starts, known=(Start(id="a", generation=2, is_live=True),)),
        commits=replace(state.commits, is_run_read=True),
    )


def report(service: Service) -> dict[str, Any]:
    replies: list[protocol.Message] = []
    service._answer(protocol.StatusQuery(), replies.append)
    (status,) = replies
    assert isinstance(status, protocol.Status)
    found: dict[str, Any] = json.loads(json.dumps(status.report))
    return found


@pytest.mark.fault("H09")
def test_the_service_survives_an_event_that_raises_and_shows_it(
    service: Service, faulty: Faulty
) -> None:
    """The status has the number of faults and the last one; later events are handled as usual."""
    assert report(service)["decision_faults"] == {"count": 0, "last": None}
    faulty(is_poison)
    service._post(TrainerProgress(1, 666))
    service._post(StopRequested("enough"))
    service._turn()  # the daemon's own events are read first
    assert service._exit == Exit(0, "enough")
    service._turn()
    assert report(service)["decision_faults"] == {
        "count": 1,
        "last": "event TrainerProgress: ValueError: math domain error",
    }


def test_a_replaced_staging_directory_ends_the_daemon_after_the_evacuation(
    service: Service,
) -> None:
    """With the exit code of staging.  Until then the open directory may have sets to commit."""
    service._post(NoticeRaised(a_notice(deadline_mono_s=time.monotonic() + 100.0)))
    service._turn()
    service._restart_in_new_staging()
    service._turn()
    assert service._exit is None
    service._post(NoticeWithdrawn("aws.spot", "test"))
    service._turn()
    service._restart_in_new_staging()
    service._turn()
    assert service._exit == Exit(StagingError.exit_code, "staging was replaced")


@pytest.mark.fault("H09")
def test_a_decision_loop_that_hangs_gives_no_figures_and_takes_no_notice(service: Service) -> None:
    """The threads of channel and metrics still run; clients and scrapers see that it does not respond."""
    replies: list[protocol.Message] = []
    service._turned_mono_s -= 3600
    notify = protocol.Notify(nonce="n", seconds_left=9.0)
    for message in (protocol.StatusQuery(), notify, protocol.NotifyWithdrawn()):
        service._answer(message, replies.append)
    assert replies == [protocol.Refused("the decision loop hangs")] * 2
    with pytest.raises(RuntimeError, match="hangs"):
        service._figures()
    service._turn()
    assert report(service)["notices"] == []
    assert service._figures()


@pytest.mark.fault("H09", "H08")
def test_the_service_survives_an_action_that_raises(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other actions of the turn are executed, and a flush that could not begin is retried."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    staged = a_set(5)
    state = with_generation(service._state)
    service._decisions.state = replace(
        state, staging=replace(state.staging, scanned_mono_s=0.0, staged=(staged,))
    )
    monkeypatch.setattr(service._flush, "start", fails)
    scans: list[int] = []
    monkeypatch.setattr(service._observer, "rescan", lambda: scans.append(1))
    service._post(NoticeRaised(a_notice(deadline_mono_s=1e9)))
    service._turn()
    assert "StartFlush: RuntimeError" in report(service)["decision_faults"]["last"]
    assert scans
    assert service._state.flush.flight is not None
    service._turn()  # the failure of the flush
    assert service._state.flush.flight is None
    assert service._state.flush.failures == 1


def test_a_farewell_has_the_step_of_the_event_that_caused_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accounting sees each event before the actions of the event are carried out."""
    steps: list[int] = []

    def farewell(*_: object, training: LastReport, **__: object) -> None:
        steps.append(training.step)

    monkeypatch.setattr(service._committer, "farewell", farewell)
    conclusion = Conclude("e1", Verdict.SAFE, "a reason", CommitRef(2, 46), 30.0)
    decide = service._decisions.decide
    monkeypatch.setattr(
        service._decisions,
        "decide",
        lambda event, now: (*decide(event, now), Mark("e1", "notice"), conclusion),
    )
    service._decisions.state = with_generation(service._state)
    service._step(TrainerProgress(1, 47), 1.0)
    assert steps == [47]


def test_a_notice_wakes_the_thread_of_the_mirror(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each evacuation: the mirror gets the farewell although no commit follows."""
    woken: list[int] = []
    mirroring = SimpleNamespace(expedite=lambda: woken.append(1))
    monkeypatch.setattr(service._storage, "mirroring", mirroring)
    for _ in range(2):
        service._post(NoticeRaised(a_notice(deadline_mono_s=1e9)))
        service._turn()
    assert woken == [1]


@pytest.mark.fault("G04")
def test_a_daemon_that_is_fenced_during_an_evacuation_waits_for_its_farewell(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written after the end of the daemon."""
    done: list[str] = []
    committer, ledger = service._committer, service._storage.ledger
    monkeypatch.setattr(committer, "farewell", lambda *_, **__: done.append("farewell"))
    monkeypatch.setattr(committer, "drain", lambda _: done.append("drained"))
    monkeypatch.setattr(ledger, "finish", lambda _: done.append("resumes recorded"))
    service._decisions.state = with_generation(service._state)
    for event in (NoticeRaised(a_notice(deadline_mono_s=1e9)), FenceFound(3)):
        service._post(event)
        service._turn()
    assert service._exit is not None
    assert service._leave(service._exit) == EXIT_FENCED
    assert done[-3:] == ["farewell", "drained", "resumes recorded"]


def test_a_resume_is_recorded_in_the_store_and_notified(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both happen once, with the report of the first new step."""
    recorded: list[int] = []
    notified: list[int] = []

    class Receiver:
        def resumed(self, measured: MeasuredResume) -> None:
            notified.append(measured.milestones.first_step)

    monkeypatch.setattr(
        service._storage.ledger,
        "record",
        lambda measured, **_: recorded.append(measured.milestones.first_step),
    )
    monkeypatch.setattr(service, "_notifications", Receiver())
    service._decisions.state = with_generation(service._state)
    for step in (40, 41, 42):
        service._step(TrainerProgress(1, step, start_id="a" if step == 40 else ""), 1.0)
    assert recorded == notified == [41]


@pytest.mark.fault("H07", "S12")
def test_the_decision_loop_starts_no_thread(service: Service, tmp_path: Path) -> None:
    """Removals start no thread, whatever their number and duration."""
    service._remover.start()
    before = set(threading.enumerate())
    for number in range(500):
        service._carry_out(Prune((f"step-{number:012d}.gone",)), 0.0)
    assert set(threading.enumerate()) <= before  # threads of other tests may end


def test_lines_that_trainers_cause_are_limited(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that turns finite and not finite with each message: a bounded number of lines and marks."""
    written: list[str] = []

    class Log:
        def log(self, _: int, event: str, **__: object) -> None:
            written.append(event)

        def __getattr__(self, _: str) -> Any:
            return lambda event, **__: written.append(event)

    monkeypatch.setattr(decision_log, "_log", Log())
    service._step(JOINED, 1.0)
    for number in range(2000):
        is_finite = number % 2 == 0
        service._step(TrainerProgress(1, number, loss_is_finite=is_finite), 1.0)
    assert written.count("loss_not_finite") == decision_log._LINES_AT_ONCE


@pytest.mark.fault("S12")
def test_sets_that_cannot_be_removed_cost_one_line_for_each_commit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer write-protects its sets: the log does not get a line for each of them."""

    def refuses(*_: object) -> None:
        raise StagingError("cannot be deleted: Permission denied")

    monkeypatch.setattr(scan, "remove_set", refuses)
    with capture_logs() as logs:
        service._remover._prune(tuple(f"step-{number:012d}.x" for number in range(400)))
    assert [(line["event"], line["sets"]) for line in logs] == [("not_pruned", 400)]
