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
  commit or another line replaces; the daemon's end when an operator stops it or another VM has the run.
- Both halves write the timeline and the log.  ``reconcile`` also scans, cancels, withdraws, removes
  superseded sets, and ends the daemon when the host shuts down.

Pure: no clock, disk, socket, thread or environment.  Every failure arrives as an event, none is raised.
"""

from __future__ import annotations

from typing import assert_never

from swansongd.core import (
    commits,
    course,
    emergency,
    evacuation,
    events,
    flight,
    followup,
    gpus,
    learning,
    notices,
    periodic,
    ranks,
    request,
    staged_sets,
    starts,
    verdict,
)
from swansongd.core.events import Action, Event
from swansongd.core.state import State
from swansongd.core.transition import Transition


def step(state: State, event: Event, now_mono_s: float) -> tuple[State, tuple[Action, ...]]:
    """One transition: the state after the event, and the actions that it calls for."""
    transition = Transition(state, now_mono_s)
    if not state.course.is_leaving:
        _record(transition, event)
        _reconcile(transition)
    return transition.state, tuple(transition.actions)


def _record(transition: Transition, event: Event) -> None:  # noqa: PLR0915 - one case for each event
    match event:
        case events.NoticeRaised(notice):
            notices.record_raised(transition, notice)
        case events.NoticeWithdrawn(source, reason):
            notices.record_withdrawn(transition, source, reason)
        case events.SourceChanged(status):
            notices.record_source(transition, status)
        case events.GpusRead():
            gpus.record_read(transition, event)
        case events.TrainerJoined(trainer):
            ranks.record_joined(transition, trainer)
            starts.record_joined(transition, trainer.connection)
            if not gpus.objection(transition.state, transition.now):
                request.record_joined(transition, trainer.connection, trainer.rank)
        case events.TrainerLeft():
            starts.record_left(transition, event)
            request.record_left(transition, event)
            ranks.record_left(transition, event)
        case events.TrainerProgress():
            ranks.record_progress(transition, event)
            starts.record_progress(transition, event)
        case events.TrainerAccepted(connection, request_id, at_step):
            request.record_accepted(transition, connection, request_id, at_step)
        case events.TrainerAgreed(request_id, at_step):
            request.record_agreed(transition, request_id, at_step)
        case events.PeerRequested(request_id, reason, seconds_left):
            notices.record_peer(transition, request_id, reason, seconds_left)
        case events.RequestAsked(connection, at_step):
            ranks.record_asking(transition, connection, at_step)
        case events.FinishAsked(start_id, connection):
            starts.record_finish_asked(transition, start_id, connection)
        case events.StartBegun(connection, start_id):
            ranks.record_begun(transition, connection, start_id)
            starts.record_begun(transition, connection)
        case events.ProcessFound():
            starts.record_process(transition, event)
        case events.TrainerSealed(connection, request_id, at_step, save_s, size_bytes):
            request.record_sealed(transition, request_id, at_step)
            measured = events.TrainerProgress(
                connection, at_step, save_s=save_s, save_bytes=size_bytes
            )
            ranks.record_measures(transition, measured)
        case events.TrainerFailed(_, request_id, reason):
            ranks.record_save_failed(transition, event)
            request.record_failed(transition, request_id, reason)
        case events.RestoreAsked(start_id):
            starts.record_restoring(transition, start_id)
        case events.CommitSkipped(ref):
            commits.record_skipped(transition, ref)
        case events.RolledBack(to_step):
            starts.record_rolled_back(transition, to_step)
        case events.RunRead():
            commits.record_newest(transition, event)
        case events.PredecessorFound():
            starts.record_predecessor(transition, event)
        case events.PredecessorDenied(reason):
            starts.record_denied(transition, reason)
        case events.PaceRead():
            learning.record_read(transition, event)
        case events.HistoryRead():
            learning.record_history(transition, event)
        case events.SignalSent(request_id, pid):
            request.record_signalled(transition, request_id, pid)
        case events.SignalRefused(request_id, reason):
            request.record_signal_refused(transition, request_id, reason)
        case events.SignalledExited(request_id, _):
            request.record_process_ended(transition, request_id)
        case events.Scanned():
            _record_scan(transition, event)
        case events.GenerationClaimed():
            starts.record_claimed(transition, event)
        case events.FlushProgress():
            flight.record_progress(transition, event)
        case events.Flushed():
            commits.record_flushed(transition, event)
        case events.FlushFailed():
            flight.record_failed(transition, event)
        case events.CommitDone(flush_id, ref):
            commits.record_done(transition, flush_id, ref)
        case events.PartsCounted():
            commits.record_parts_counted(transition, event)
        case events.CommitFailed():
            commits.record_failed(transition, event)
        case events.FenceFound():
            starts.record_fence(transition, event)
            verdict.record_fence(transition)
        case events.LinkShared(is_needed):
            flight.record_link(transition, is_needed=is_needed)
        case events.WokeUp(slept_s):
            starts.record_woke_up(transition, slept_s)
        case events.StopRequested(reason, code):
            course.leave(transition, code, reason)
        case events.Tick():
            flight.sample_bandwidth(transition)
        case _ as unreachable:
            assert_never(unreachable)


def _record_scan(transition: Transition, event: events.Scanned) -> None:
    """A scan of staging ended: its sets get their starts, and then may answer requests."""
    staging = transition.state.staging
    is_first = staging.first_scan_mono_s is None
    known = {staged.id for staged in staging.staged}
    unknown = [staged for staged in event.staged if staged.id not in known]
    new = starts.record_found(transition, unknown, is_first=is_first)
    staged_sets.record_scan(transition, event, new, is_first=is_first)
    gpus.record_found(transition, new, is_first=is_first)
    learning.record_found(transition, new, is_first=is_first)
    flight.record_scan(transition, event)
    request.record_scan(transition, event, is_first=is_first)


def _reconcile(transition: Transition) -> None:
    if transition.state.course.is_leaving:
        return
    evacuation.reconcile(transition)
    emergency.reconcile(transition)
    starts.reconcile(transition)
    followup.reconcile(transition)
    periodic.reconcile(transition)
    emergency.answer_asking(transition)
    flight.reconcile(transition)
    commits.reconcile(transition)
    staged_sets.reconcile(transition)
    verdict.reconcile(transition)


def rebuilt(state: State) -> State:
    """The state without the reports of trainers and staging, as a restart of the daemon leaves it.

    For a state with which :func:`step` fails: only input from outside can have spoiled it.  Notices, the
    generation and the commits stay, and the evacuation opens again.  The caller orders a scan of staging.
    """
    transition = Transition(state, 0.0)
    ranks.forget_reports(transition)
    gpus.forget(transition)
    staged_sets.forget(transition)
    flight.forget(transition)
    commits.forget(transition)
    learning.forget(transition)
    request.end_periodic(transition)
    course.forget(transition)
    return transition.state
