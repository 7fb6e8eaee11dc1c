# SPDX-License-Identifier: Apache-2.0
"""The state machine: ``step(state, event, now) -> (new state, actions)``.

Each transition has two halves.  ``record_*`` changes the facts as the event has it, in the module of its
topic.  ``reconcile`` compares all facts with the wanted state, topic by topic, and orders the missing work.
The same facts therefore lead to the same work in whatever sequence the events came, and a daemon that is
restarted during an evacuation continues.

- Only ``reconcile`` orders work: new requests to the ranks, the signal, flushes, manifests, looks for the
  parts of other VMs, claims and verdicts.
- ``record_*`` orders reactions to the event.  These are messages to the rank that connected or reported;
  messages to all ranks about a commit, a fence, a withdrawn request or a job start that may begin; scans, and
  a check of the fence; the cancellation of a flush whose set is gone or abandoned; the removal of sets that a
  commit or another line replaces; the daemon's end when an operator stops it.
- Both halves write the timeline and the log.  ``reconcile`` also scans, cancels, withdraws, removes
  superseded sets, and ends the daemon when it is fenced or the host shuts down.

Pure: no clock, disk, socket, thread or environment.  Every failure arrives as an event, none is raised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from swansongd.core import (
    arrival,
    commits,
    emergency,
    evacuation,
    flight,
    followup,
    gpus,
    learning,
    notices,
    peers,
    periodic,
    ranks,
    request,
    staged_sets,
    stall,
    starts,
    verdict,
)
from swansongd.core.cadence import History
from swansongd.core.events import (
    Action,
    CommitDone,
    CommitFailed,
    DownloadEnded,
    DownloadStarted,
    Event,
    Exit,
    FenceFound,
    FinishAsked,
    Flushed,
    FlushFailed,
    FlushProgress,
    GenerationClaimed,
    GpusRead,
    HistoryRead,
    NewestDated,
    NoticeRaised,
    NoticeWithdrawn,
    PaceRead,
    PartsCounted,
    PeerRequested,
    ProcessFound,
    RestoreAnswered,
    RestoreAsked,
    RolledBack,
    RunRead,
    Scanned,
    SignalledExited,
    SignalRefused,
    SignalSent,
    SourceChanged,
    StartBegun,
    StopRequested,
    Tick,
    TrainerAccepted,
    TrainerAgreed,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerRefused,
    TrainerSealed,
    WokeUp,
)
from swansongd.core.pace import UNKNOWN
from swansongd.core.state import State
from swansongd.core.transition import EXIT_STOPPED, Transition
from swansongd.model import TrainerView


def step(state: State, event: Event, now_mono_s: float) -> tuple[State, tuple[Action, ...]]:
    """One transition: the state after the event, and the actions that it calls for."""
    transition = Transition(state, now_mono_s)
    if not state.is_leaving:
        _record(transition, event)
        _reconcile(transition)
    return transition.state, tuple(transition.actions)


def _record(transition: Transition, event: Event) -> None:  # noqa: PLR0915 - one case for each event
    state = transition.state
    match event:
        case NoticeRaised(notice):
            notices.record_raised(transition, notice)
        case NoticeWithdrawn(source, reason):
            notices.record_withdrawn(transition, source, reason)
        case SourceChanged(status):
            notices.record_source(transition, status)
        case GpusRead():
            gpus.record_read(transition, event)
        case TrainerJoined(trainer):
            ranks.record_joined(transition, trainer)
        case TrainerRefused(_, reason):
            ranks.record_refused(transition, reason)
        case TrainerLeft():
            ranks.record_left(transition, event)
        case TrainerProgress():
            ranks.record_progress(transition, event)
        case TrainerAccepted(connection, request_id, at_step):
            request.record_accepted(transition, connection, request_id, at_step)
        case TrainerAgreed(request_id, at_step):
            request.record_agreed(transition, request_id, at_step)
        case PeerRequested(request_id, reason, seconds_left):
            of_peer = peers.notice_of(transition, request_id, reason, seconds_left)
            if of_peer is not None:
                notices.record_raised(transition, of_peer)
        case FinishAsked(start_id):
            starts.record_finish_asked(transition, start_id)
        case StartBegun(connection, start_id):
            starts.record_begun(transition, connection, start_id)
        case ProcessFound():
            starts.record_process(transition, event)
        case TrainerSealed(connection, request_id, at_step, save_s, size_bytes):
            emergency.record_sealed(transition, request_id, at_step)
            measured = TrainerProgress(connection, at_step, save_s=save_s, save_bytes=size_bytes)
            ranks.record_measures(transition, measured)
        case TrainerFailed(_, request_id, reason):
            ranks.record_save_failed(transition, event)
            request.record_failed(transition, request_id, reason)
        case RestoreAsked(start_id):
            starts.record_restoring(transition, start_id)
        case DownloadStarted() | DownloadEnded() | RestoreAnswered():
            pass  # only observers use them
        case RolledBack(to_step):
            starts.record_rolled_back(transition, to_step)
        case RunRead(newest, newest_start):
            starts.record_newest(transition, newest, newest_start)
        case NewestDated(ref, age_s):
            dated_mono_s = transition.now - age_s
            transition.state = replace(state, found_commit=ref, found_commit_mono_s=dated_mono_s)
        case PaceRead():
            learning.record_read(transition, event)
        case HistoryRead(observed_s, uncovered):
            transition.state = replace(state, history=History(observed_s, uncovered))
        case SignalSent(request_id, pid):
            emergency.record_signalled(transition, request_id, pid)
        case SignalRefused(request_id, reason):
            emergency.record_signal_refused(transition, request_id, reason)
        case SignalledExited(request_id, _):
            emergency.record_process_ended(transition, request_id)
        case Scanned():
            staged_sets.record_scan(transition, event)
        case GenerationClaimed():
            starts.record_claimed(transition, event)
        case FlushProgress():
            flight.record_progress(transition, event)
        case Flushed():
            flight.record_flushed(transition, event)
        case FlushFailed():
            flight.record_failed(transition, event)
        case CommitDone(flush_id, ref):
            commits.record_done(transition, flush_id, ref)
        case PartsCounted():
            commits.record_parts_counted(transition, event)
        case CommitFailed():
            commits.record_failed(transition, event)
        case FenceFound():
            starts.record_fence(transition, event)
        case WokeUp(slept_s):
            starts.record_woke_up(transition, slept_s)
        case StopRequested(reason):
            transition.state = replace(transition.state, is_leaving=True)
            transition.do(Exit(EXIT_STOPPED, reason))
        case Tick():
            flight.sample_bandwidth(transition)
        case _ as unreachable:
            assert_never(unreachable)


def _reconcile(transition: Transition) -> None:
    if transition.state.is_leaving:
        return
    evacuation.reconcile(transition)
    arrival.reconcile(transition)
    emergency.reconcile(transition)
    starts.reconcile(transition)
    followup.reconcile(transition)
    periodic.reconcile(transition)
    stall.reconcile(transition)
    flight.reconcile(transition)
    commits.reconcile(transition)
    staged_sets.reconcile(transition)
    verdict.reconcile(transition)


def rebuilt(state: State) -> State:
    """The state without the reports of trainers and staging, as a restart of the daemon leaves it.

    For a state with which :func:`step` fails: only input from outside can have spoiled it.  Notices, the
    generation and the commits stay, and the evacuation opens again.  The caller orders a scan of staging.
    """
    return replace(
        state,
        trainers=tuple(_without_reports(trainer) for trainer in state.trainers),
        staged=(),
        pending=(),
        growing=(),
        stored_bytes={},
        rejected=frozenset(),
        flight=None,
        stored=(),
        last_commit=state.last_complete,
        incomplete=None,
        retry_mono_s=0.0,
        failures=0,
        bandwidth_bytes_per_s=None,
        signal_save_s=None,
        pace=UNKNOWN,
        periodic=None,
        saved_mono_s=None,
        stalled=frozenset(),
        evacuation=None,
        opened=(),
    )


def _without_reports(trainer: TrainerView) -> TrainerView:
    return replace(
        trainer,
        save_s=None,
        save_bytes=None,
        snapshot_s=None,
        step_s=None,
        loss=None,
        loss_is_finite=None,
        reported_mono_s=None,
    )
