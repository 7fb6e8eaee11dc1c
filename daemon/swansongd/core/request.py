# SPDX-License-Identifier: Apache-2.0
"""One checkpoint request, from the ranks that get it to the set that answers it, or to its failure.

The request of an evacuation (:mod:`swansongd.core.emergency`), its follow-ups
(:mod:`swansongd.core.followup`) and the periodic one (:mod:`swansongd.core.periodic`) take this path.  Each
rank that accepts stops at its next step boundary and reports the step.  When all have accepted, the target is
the greatest of these steps plus one.  Over several VMs the ranks agree on the target among themselves and
report it.  A scan finds the set that answers the request.
"""

from __future__ import annotations

from dataclasses import replace

from swansong import layout, protocol
from swansong_bucket.model import CheckpointId, CommitRef, Staged, first_start

from swansongd.core import course, events, learning
from swansongd.core.state import CheckpointRequest, RequestState, State
from swansongd.core.transition import Transition


def send(transition: Transition, request: CheckpointRequest, connections: tuple[int, ...]) -> None:
    """Send the request to these ranks; ranks that know its id repeat their answer."""
    deadline_mono_s = (
        request.agree_by_mono_s if request.is_periodic else transition.evacuation.deadline_mono_s
    )
    message = protocol.Request(
        request.request_id,
        request.reason,
        seconds_left=round(deadline_mono_s - transition.now, 3),
        urgency="emergency" if request.is_urgent else "drain",
    )
    transition.do(events.Send(message, connections))


def record_joined(transition: Transition, connection: int, rank: int) -> None:
    """A rank connected, perhaps again: it gets the requests that the other ranks have."""
    for request in transition.waiting_requests:
        if not request.by_signal and (request.target is None or rank in request.ranks):
            asked = replace(request, ranks=request.ranks | {rank})
            _update(transition, asked)
            send(transition, asked, (connection,))


def name_start(transition: Transition, request: CheckpointRequest, start_id: str) -> None:
    """The ranks that got the request have learned which start they belong to."""
    _update(transition, replace(request, start_id=start_id))


def record_accepted(transition: Transition, connection: int, request_id: str, step: int) -> None:
    """A rank stands at the boundary after ``step`` and waits for the target.

    After the request has failed, this still states the position of the training.
    """
    made = (*transition.state.requests_made, transition.state.requests.periodic)
    request = next((each for each in made if each and each.request_id == request_id), None)
    trainer = transition.state.ranks.on(connection)
    if trainer is None or request is None:
        return
    if request.target is not None:
        if request.is_waiting:  # a rank that reconnected: the target is decided
            target = protocol.Target(request_id, request.target)
            transition.do(events.Send(target, (connection,)))
    elif trainer.rank in request.ranks and trainer.start_id == request.start_id:
        if trainer.rank not in request.accepted and not request.is_periodic:
            transition.mark("accepted", rank=trainer.rank, step=step)
        _update(transition, replace(request, accepted={**request.accepted, trainer.rank: step}))


def record_agreed(transition: Transition, request_id: str, step: int) -> None:
    """The ranks of all VMs have agreed to save at ``step``."""
    request = transition.waiting_request(request_id)
    if request is not None and request.target is None and transition.state.spans_vms:
        _set_target(transition, request, step)


def record_failed(transition: Transition, request_id: str, reason: str) -> None:
    """A rank declined or failed, or the signal could not be sent: no checkpoint will come."""
    request = transition.waiting_request(request_id)
    if request is not None:
        fail(transition, request, reason)


def reconcile_target(transition: Transition, request: CheckpointRequest) -> None:
    """Send the target once all ranks have accepted; fail the request when that takes too long."""
    if request.target is not None:
        return
    if transition.state.spans_vms:
        # The request reaches other VMs later: they get twice the time.
        limit_s = 2 * (request.agree_by_mono_s - request.asked_mono_s)
        if transition.now >= request.asked_mono_s + limit_s:
            fail(transition, request, "the ranks of all VMs have not agreed on a step in time")
        return
    if request.by_signal:
        return
    # After a restart of the daemon the ranks reconnect one by one, and a common step needs all of them.
    expected = max(len(request.ranks), transition.state.local_world_size)
    if len(request.accepted) >= expected:
        # Ranks stand still between accepting and the target, so max + 1 is ahead of all of them.
        target = max(request.accepted.values()) + 1
        _set_target(transition, request, target)
        connections = tuple(
            t.connection for t in transition.state.connected if t.rank in request.ranks
        )
        transition.do(events.Send(protocol.Target(request.request_id, target), connections))
    elif expected > 1 and transition.now >= request.agree_by_mono_s:
        missing = sorted(request.ranks - request.accepted.keys())
        absent = expected - len(request.ranks)
        fail(
            transition,
            request,
            f"ranks {missing} did not answer in time"
            + (f", and {absent} of {expected} never connected" if absent else ""),
        )


def _set_target(transition: Transition, request: CheckpointRequest, step: int) -> None:
    _update(transition, replace(request, target=step))
    if not request.is_periodic:  # the timeline shows evacuations only
        transition.mark("target", step=step)


def fail(transition: Transition, request: CheckpointRequest, reason: str) -> None:
    """End a request whose checkpoint will not come.

    The request of an evacuation stays there with the reason, and so does a follow-up request.  A periodic one
    is forgotten: the next interval brings the next one.
    """
    if request.is_periodic:
        transition.log("warning", "periodic_checkpoint_missed", reason=reason)
        end_periodic(transition)
    else:
        if request.is_follow_up:
            transition.mark("follow_up_failed", reason=reason)
        else:
            transition.mark("request_failed", reason=reason)
        _update(transition, replace(request, failure=reason, failed_mono_s=transition.now))
    withdraw(transition, request, reason)


def withdraw(transition: Transition, request: CheckpointRequest, reason: str) -> None:
    """Release the ranks that wait for the target of this request."""
    transition.do(events.Send(protocol.Withdrawn(request.request_id, reason)))


def record_periodic(transition: Transition, request: CheckpointRequest) -> None:
    """A periodic request is made."""
    made_mono_s = request.asked_mono_s
    _put(transition, RequestState(periodic=request, periodic_mono_s=made_mono_s))


def end_periodic(transition: Transition) -> None:
    """The periodic request has its answer, or gets none; the next interval brings the next one."""
    _put(transition, replace(transition.state.requests, periodic=None))


def record_rolled_back(transition: Transition) -> None:
    """The training returned to an earlier step: the hooks save at the next step without a request."""
    _put(transition, RequestState(periodic=None, periodic_mono_s=transition.now))


def record_sealed(transition: Transition, request_id: str, step: int) -> None:
    """A rank reports that it has sealed its part: a scan will find the set."""
    transition.do(events.Rescan())
    request = transition.waiting_request(request_id)
    if request is None or request.is_periodic:
        return
    # A step that the ranks had left behind when the request was made does not answer it.
    stood_at = max(request.accepted.values(), default=request.from_step)
    if step < stood_at:
        made = f"the request was made after step {stood_at}"
        fail(transition, request, f"the trainer answered with step {step}, {made}")
    else:
        _update(transition, replace(request, reported_step=step))


def record_signalled(transition: Transition, request_id: str, pid: int) -> None:
    """The signal was sent, perhaps to a process that started after the request was made."""
    request = transition.waiting_request(request_id)
    if request is not None:
        process = transition.state.starts.process or request.start_id
        _update(transition, replace(request, start_id=process))
        transition.mark("accepted", pid=pid)


def record_signal_refused(transition: Transition, request_id: str, reason: str) -> None:
    """No process got the signal; the timeline has each reason once, however often it is tried."""
    request = transition.waiting_request(request_id)
    if request is None:
        return
    if request.is_follow_up:
        fail(transition, request, reason)
        return
    if reason != transition.evacuation.refusal:
        transition.mark("request_failed", reason=reason)
    refused = replace(request, failure=reason, is_unsent=True, failed_mono_s=transition.now)
    _update(transition, refused)
    course.record(transition, refusal=reason)


def record_process_ended(transition: Transition, request_id: str) -> None:
    """The process that got the signal ended: a scan that begins now decides whether it had sealed."""
    for request in transition.state.requests_made:
        if request.request_id == request_id:
            _record_lost(transition, request)


def record_left(transition: Transition, event: events.TrainerLeft) -> None:
    """A rank's process ended, perhaps right after it had sealed: a scan that begins now decides.

    After a goodbye its part is written, so the other ranks still seal the set.
    """
    trainer = transition.state.ranks.on(event.connection)
    if trainer is None or not event.exited:
        return
    others = {other.rank for other in transition.state.connected if other is not trainer}
    for request in transition.waiting_requests:
        if trainer.rank not in request.ranks or (event.is_goodbye and request.ranks & others):
            continue
        if not request.is_periodic:
            _record_lost(transition, request)
        elif not event.is_goodbye:
            fail(transition, request, f"the process of rank {trainer.rank} ended")


def _record_lost(transition: Transition, request: CheckpointRequest) -> None:
    _update(transition, replace(request, lost_mono_s=transition.now))
    transition.do(events.Rescan())


def record_scan(transition: Transition, event: events.Scanned, *, is_first: bool) -> None:
    """Whether a set answers a request, or none ever will."""
    evacuation = transition.state.evacuation
    if evacuation is None:
        return
    if is_first and evacuation.request is not None and evacuation.request.by_signal:
        # Sets of the first scan are old, even if the notice came before the scan.
        known = frozenset(staged.id for staged in event.staged)
        _update(transition, replace(evacuation.request, known=known))
    for request in transition.state.requests_made:
        if request.is_waiting:
            _record_outcome(transition, event, request)


def _record_outcome(
    transition: Transition, event: events.Scanned, request: CheckpointRequest
) -> None:
    state = transition.state
    usable = state.staging.usable
    answer = next((s for s in usable if _answers(s, request)), None)
    if answer is None and state.is_finished:
        ends = (s for s in usable if s.id.is_final and s.id.step >= request.at_step)
        answer = next(ends, None)
    unsound = next((why for name, why in event.rejected if _is_reported(name, request)), None)
    if answer is not None:
        _record_answer(transition, request, answer)
    elif _is_committed(transition.state, request):
        record_if_committed(transition, request)
    elif unsound is not None:
        fail(transition, request, f"the sealed set is not sound: {unsound}")
    elif request.lost_mono_s is not None and event.started_mono_s >= request.lost_mono_s:
        _record_unanswered(transition, event, request)


def _record_unanswered(
    transition: Transition, event: events.Scanned, request: CheckpointRequest
) -> None:
    """The process ended without an answer; without hooks, the last set that it wrote may have to settle."""
    settling = frozenset(event.pending if request.by_signal else ())
    if request.settling is not None:  # the next process may write sets, too
        settling &= request.settling
    if settling:
        _update(transition, replace(request, settling=settling))
    else:
        fail(transition, request, "the trainer's process ended before it had sealed a checkpoint")


def _record_answer(transition: Transition, request: CheckpointRequest, answer: Staged) -> None:
    _update(transition, replace(request, sealed=answer.id, sealed_mono_s=transition.now))
    learning.record_sealed(transition, request)
    transition.mark("sealed", step=answer.id.step, size_bytes=answer.size_bytes)


def record_if_committed(transition: Transition, request: CheckpointRequest) -> None:
    """A set that the ranks reported may be committed, and deleted, before the daemon was restarted."""
    step = request.reported_step
    if step is not None and request.is_waiting and _is_committed(transition.state, request):
        answered = CheckpointId(step, "", start=request.start_id)  # its nonce is not known any more
        _update(transition, replace(request, sealed=answered))


def _is_committed(state: State, request: CheckpointRequest) -> bool:
    """Whether this generation has a commit of the reported step: made and pruned before a restart."""
    step, last = request.reported_step, state.commits.last
    if step is None or last is None or last.generation != state.generation:
        return False
    return last.step >= step


def _answers(staged: Staged, request: CheckpointRequest) -> bool:
    if request.by_signal:
        # A save that had begun before the signal is no answer: the process still writes the real one.
        begun_mono_s = staged.begun_mono_s
        is_earlier = begun_mono_s is not None and begun_mono_s < request.asked_mono_s
        process = first_start(request.start_id)
        is_of_process = process in ("", first_start(staged.id.start))
        return staged.id not in request.known and not is_earlier and is_of_process
    if request.start_id not in ("", staged.id.start):
        return False
    # A set that was sealed before the request, of the very step that the trainer is at, is as good.
    return staged.request_id == request.request_id or (
        staged.framework == "swansong" and staged.id.step == request.reported_step
    )


def _is_reported(directory: str, request: CheckpointRequest) -> bool:
    """Whether the trainer reported this set as the answer to the request."""
    name = layout.parse_sealed_name(directory)
    return name is not None and name[0] == request.reported_step


def record_whole(transition: Transition, ref: CommitRef) -> None:
    """The checkpoint is committed, with the parts of all VMs: compare the forecast of its request."""
    state = transition.state
    for request in state.requests_made:
        is_new = request.took_s is None
        if is_new and request.answer is not None and state.ref_of(request.answer) == ref:
            took_s = max(0.0, transition.now - request.asked_mono_s)
            _update(transition, replace(request, took_s=took_s))
            learning.record_error(transition, request, took_s)


def _update(transition: Transition, request: CheckpointRequest) -> None:
    """The request of the evacuation, its follow-up request or the periodic one has come further."""
    if request.is_periodic:
        _put(transition, replace(transition.state.requests, periodic=request))
    else:
        course.update_request(transition, request)


def _put(transition: Transition, requests: RequestState) -> None:
    transition.state = replace(transition.state, requests=requests)
