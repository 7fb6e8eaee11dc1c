# SPDX-License-Identifier: Apache-2.0
"""The requests of an evacuation: whether one is made, when it is too late for it, and what answers it.

:mod:`swansongd.core.request` has its way to the ranks and their common step.
"""

from __future__ import annotations

from dataclasses import replace

from swansong import protocol

from swansongd.core import gpus, learning, peers, planner, proof
from swansongd.core.events import Rescan, Scanned, SignalTrainer
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.request import fail, reconcile_target, send
from swansongd.core.request_ids import AGAIN, FOLLOW_UP
from swansongd.core.state import CheckpointRequest, Evacuation, State
from swansongd.core.transition import Transition
from swansongd.model import CheckpointId, Staged, Verdict

AGREEMENT_LIMIT_S = 5.0
"""Ranks that have not all answered by then, or in a tenth of the time left, do not agree."""
TOO_LATE_S = 2.0
"""A save that could not be stored in time is abandoned after this long: the bandwidth may recover."""
SIGNAL_AGAIN_S = 1.0
"""Pause after a signal that could not be sent: the trainer may not be ready for it yet."""
EARLY_SCAN_S = 0.2
"""Staging is scanned at this interval while the trainer saves."""
REQUESTS_MAX = 8
"""Requests of one evacuation."""
REPEAT_S = 1.0
REPEAT_S_MAX = 8.0
"""Pause after a request that failed; doubled each time."""


def planned(transition: Transition, *, left_s: float) -> Plan:
    """The plan for an evacuation with ``left_s`` to its deadline."""
    state = transition.state
    objection = gpus.objection(state, transition.now)
    return planner.decide(
        left_s=left_s,
        reserve_s=state.settings.reserve_s,
        measured=state.measured,
        has_trainer=has_trainer(state) and not objection,
        why_not=objection or "no trainer",
        candidates=state.candidates,
        is_committing=bool(state.stored),
    )


def has_trainer(state: State) -> bool:
    """Whether a trainer can be asked for a checkpoint."""
    can_answer = bool(state.connected) or state.settings.signals_trainer
    return can_answer and state.fenced_by is None and not state.is_finished


def make(transition: Transition) -> None:
    """Request a checkpoint over the socket, or by signal if no trainer is connected."""
    evacuation = transition.evacuation
    again = f"{AGAIN}{evacuation.requests}" if evacuation.requests else ""
    request = _new(transition, f"{evacuation.id}{again}")
    transition.evacuation = replace(evacuation, request=request, requests=evacuation.requests + 1)
    if not request.by_signal:
        transition.mark("request", ranks=len(request.ranks))
    elif not evacuation.refusal:
        transition.mark("signal")
    _ask(transition, request)


def make_follow_up(transition: Transition) -> None:
    """Request a follow-up checkpoint, in the same way."""
    evacuation = transition.evacuation
    # The instant makes the id differ from those of an earlier life of the daemon, which hooks remember.
    request = _new(transition, f"{evacuation.id}{FOLLOW_UP}{transition.now:.3f}")
    request = replace(request, is_follow_up=True)
    number = evacuation.follow_ups + 1
    transition.evacuation = replace(evacuation, follow_up=request, follow_ups=number)
    transition.mark("follow_up", number=number, seconds_left=round(transition.left_s, 2))
    _ask(transition, request)


def _new(transition: Transition, request_id: str) -> CheckpointRequest:
    evacuation, connected = transition.evacuation, transition.state.connected
    by_signal = not connected
    made = transition.state.forecast
    return CheckpointRequest(
        request_id=request_id,
        reason=evacuation.reason,
        start_id="" if transition.state.start is None else transition.state.start.id,
        by_signal=by_signal,
        is_urgent=not evacuation.is_precaution,
        asked_mono_s=transition.now,
        agree_by_mono_s=transition.now + min(AGREEMENT_LIMIT_S, transition.left_s / 10),
        known=frozenset(staged.id for staged in transition.state.staged),
        from_step=(
            -1
            if evacuation.is_resumed
            else max((trainer.step for trainer in connected), default=-1)
        ),
        at_step=max((trainer.step for trainer in transition.state.trainers), default=-1),
        ranks=frozenset() if by_signal else frozenset(t.rank for t in connected),
        expected_s=made.expected_s if made.is_measured else None,
        pessimistic_s=made.pessimistic_s if made.is_measured else None,
    )


def _ask(transition: Transition, request: CheckpointRequest) -> None:
    if request.by_signal:
        transition.do(SignalTrainer(request.request_id))
    else:
        send(transition, request, tuple(t.connection for t in transition.state.connected))


def reconcile(transition: Transition) -> None:
    """Make the request that is missing, bring the ranks to one step, and stop waiting when it is too late."""
    if transition.state.evacuation is None:
        return
    _make_missing(transition)
    request = transition.evacuation.request
    if request is not None:
        attend(transition, request)


def attend(transition: Transition, request: CheckpointRequest) -> None:
    """Bring the ranks to one step, and stop waiting for their set when it is too late for it."""
    step = request.reported_step
    if transition.evacuation.is_resumed and step is not None and _is_committed(transition, step):
        _record_committed(
            transition, request, step
        )  # the claim may come after the trainer's answer
    waiting = transition.waiting_request(request.request_id)
    if waiting is not None:
        reconcile_target(transition, waiting)
    waiting = transition.waiting_request(request.request_id)
    if waiting is not None and (waiting.is_follow_up or transition.evacuation.plan.fits):
        _fail_if_too_late(transition, waiting)
    waiting = transition.waiting_request(request.request_id)
    if waiting is not None and waiting.target is not None:
        _scan_for_early_shards(transition, waiting)


def _make_missing(transition: Transition) -> None:
    """Make the first request when a trainer connects, or another one after a failure, if that is worth it.

    A verdict that was announced before stands: the commit of this request can only improve it.
    """
    evacuation = transition.evacuation
    request = evacuation.request
    is_first = bool(transition.state.connected) and (
        request is None or request.is_unsent or _is_of_earlier_start(transition.state, request)
    )
    if is_first or _is_repeat_due(transition):
        plan = planned(transition, left_s=transition.left_s)
        is_worth_it = plan.fits or (
            evacuation.verdict is None and evacuation.plan.kind is PlanKind.NONE
        )
        if plan.kind is PlanKind.TAKE and is_worth_it:
            transition.evacuation = replace(transition.evacuation, plan=plan)
            make(transition)
            transition.do(Rescan())


def _is_repeat_due(transition: Transition) -> bool:
    request = transition.evacuation.request
    if transition.evacuation.awaits_trainer and request is not None:  # for its signal
        return transition.now >= request.failed_mono_s + SIGNAL_AGAIN_S
    return will_repeat(transition) and transition.now >= _repeat_mono_s(transition.evacuation)


def _is_of_earlier_start(state: State, request: CheckpointRequest) -> bool:
    return bool(request.failure) and state.start is not None and request.start_id != state.start.id


def _repeat_mono_s(evacuation: Evacuation) -> float:
    """End of the pause after a failed request."""
    assert evacuation.request is not None
    pause_s = min(REPEAT_S * 2.0 ** (evacuation.requests - 1), REPEAT_S_MAX)
    return evacuation.request.failed_mono_s + pause_s


def will_repeat(transition: Transition) -> bool:
    """Whether a request that failed is made again: a rank may hang for a moment only.

    Over several VMs only the VM that has the notice does so; the others take part.
    """
    state, evacuation = transition.state, transition.evacuation
    request = evacuation.request
    if request is None or not request.failure or evacuation.is_precaution or not state.connected:
        return False
    if state.fenced_by is not None or evacuation.requests >= REQUESTS_MAX:
        return False
    answered = (n for n in state.notices.values() if n.identity in evacuation.identities)
    if transition.left_s <= 0 or all(notice.source == peers.PEER_SOURCE for notice in answered):
        return False
    plan = planned(transition, left_s=transition.left_s)
    is_safe = proof.prove(state)[0] is Verdict.SAFE
    return plan.kind is PlanKind.TAKE and plan.fits and not is_safe


def _fail_if_too_late(transition: Transition, request: CheckpointRequest) -> None:
    """Stop waiting for a set that could not be stored in time even if it were sealed now."""
    state = transition.state
    flush_s = planner.send_s(state.measured, state.bytes_to_come)
    data_left_s = transition.left_s - state.settings.reserve_s
    if flush_s <= data_left_s:
        if request.too_late_mono_s is not None:
            transition.update_request(replace(request, too_late_mono_s=None))
    elif data_left_s <= 0 or (
        request.too_late_mono_s is not None
        and transition.now - request.too_late_mono_s >= TOO_LATE_S
    ):
        fail(transition, request, "no time is left to flush what the trainer has not sealed yet")
    elif request.too_late_mono_s is None:
        transition.update_request(replace(request, too_late_mono_s=transition.now))


def _scan_for_early_shards(transition: Transition, request: CheckpointRequest) -> None:
    is_due = transition.now - request.rescan_mono_s >= EARLY_SCAN_S
    if is_due and not transition.evacuation.is_precaution:
        transition.update_request(replace(request, rescan_mono_s=transition.now))
        transition.do(Rescan())


def record_sealed(transition: Transition, request_id: str, step: int) -> None:
    """A rank reports that it has sealed its part: a scan will find the set."""
    _record_reported_step(transition, request_id, step)
    transition.do(Rescan())


def _record_reported_step(transition: Transition, request_id: str, step: int) -> None:
    """A step that the ranks had left behind when the request was made does not answer it."""
    request = transition.waiting_request(request_id)
    if request is None or request.is_periodic:
        return
    stood_at = max(request.accepted.values(), default=request.from_step)
    if step < stood_at:
        reason = (
            f"the trainer answered with step {step}, the request was made after step {stood_at}"
        )
        fail(transition, request, reason)
    else:
        transition.update_request(replace(request, reported_step=step))


def record_signalled(transition: Transition, request_id: str, pid: int) -> None:
    """The signal was sent, perhaps to a process that started after the request was made."""
    request = transition.waiting_request(request_id)
    if request is not None:
        process = transition.state.process or request.start_id
        transition.update_request(replace(request, start_id=process))
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
    transition.update_request(refused)
    transition.evacuation = replace(transition.evacuation, refusal=reason)


def record_process_ended(transition: Transition, request_id: str) -> None:
    """The process that got the signal ended: a scan that begins now decides whether it had sealed."""
    evacuation = transition.state.evacuation
    for request in () if evacuation is None else evacuation.requests_made:
        if request.request_id == request_id:
            _record_lost(transition, request)


def record_rank_ended(transition: Transition, rank: int) -> None:
    """A rank's process ended, perhaps right after it had sealed: a scan that begins now decides."""
    for request in transition.waiting_requests:
        if rank in request.ranks and not request.is_periodic:
            _record_lost(transition, request)


def _record_lost(transition: Transition, request: CheckpointRequest) -> None:
    transition.update_request(replace(request, lost_mono_s=transition.now))
    transition.do(Rescan())


def record_scan(transition: Transition, event: Scanned) -> None:
    """Whether a set answers a request, or none ever will."""
    evacuation = transition.state.evacuation
    if evacuation is None:
        return
    for request in transition.evacuation.requests_made:
        if request.is_waiting:
            _record_outcome(transition, event, request)


def _record_outcome(transition: Transition, event: Scanned, request: CheckpointRequest) -> None:
    state = transition.state
    usable = [s for s in state.staged if s.id not in state.unusable]
    answer = next((s for s in usable if _answers(s, request)), None)
    if answer is None and state.is_finished:
        ends = (s for s in usable if s.id.is_final and s.id.step >= request.at_step)
        answer = next(ends, None)
    unsound = next((why for name, why in event.rejected if _is_reported(name, request)), None)
    if answer is not None:
        _record_answer(transition, request, answer)
    elif request.reported_step is not None and _is_committed(transition, request.reported_step):
        _record_committed(transition, request, request.reported_step)
    elif unsound is not None:
        fail(transition, request, f"the sealed set is not sound: {unsound}")
    elif (
        request.lost_mono_s is not None
        and event.started_mono_s >= request.lost_mono_s
        and not (request.by_signal and event.pending)  # its last files may still have to settle
    ):
        fail(transition, request, "the trainer's process ended before it had sealed a checkpoint")


def _record_answer(transition: Transition, request: CheckpointRequest, answer: Staged) -> None:
    transition.update_request(replace(request, sealed=answer.id, sealed_mono_s=transition.now))
    learning.record_sealed(transition, request)
    if request.by_signal:
        save_s = transition.now - request.asked_mono_s
        transition.state = replace(transition.state, signal_save_s=save_s)
    transition.mark("sealed", step=answer.id.step, size_bytes=answer.size_bytes)


def _record_committed(transition: Transition, request: CheckpointRequest, step: int) -> None:
    if request.is_waiting:  # the nonce of the set is not known any more
        answered = CheckpointId(step, "", start=request.start_id)
        transition.update_request(replace(request, sealed=answered))


def _is_committed(transition: Transition, step: int) -> bool:
    """Whether this generation has a commit of the step: made and pruned before the daemon was restarted."""
    last = transition.state.last_commit
    return last is not None and last.generation == transition.state.generation and last.step >= step


def _answers(staged: Staged, request: CheckpointRequest) -> bool:
    if request.by_signal:
        # A save that had begun before the signal is no answer: the process still writes the real one.
        seen_mono_s = staged.seen_mono_s
        is_earlier = seen_mono_s is not None and seen_mono_s < request.asked_mono_s
        process = request.start_id.partition("~")[0]
        is_of_process = not process or staged.id.start.partition("~")[0] == process
        return staged.id not in request.known and not is_earlier and is_of_process
    if request.start_id not in ("", staged.id.start):
        return False
    # A set that was sealed before the request, of the very step that the trainer is at, is as good.
    return staged.request_id == request.request_id or (
        staged.framework == "swansong" and staged.id.step == request.reported_step
    )


def _is_reported(directory: str, request: CheckpointRequest) -> bool:
    """Whether the trainer reported this set as the answer to the request."""
    name = protocol.parse_sealed_name(directory)
    return name is not None and name[0] == request.reported_step
