# SPDX-License-Identifier: Apache-2.0
"""The requests of an evacuation: whether one is made, and when it is too late for it.

:mod:`swansongd.core.request` has its way to the ranks, their common step, and the set that answers it.
"""

from __future__ import annotations

from dataclasses import replace

from swansong.protocol import NotRequested
from swansong_bucket.model import PEER_SOURCE, CheckpointId, Verdict

from swansongd.core import course, gpus, planner, proof, ranks
from swansongd.core.events import Rescan, Send, SignalTrainer
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.request import fail, reconcile_target, record_if_committed, send
from swansongd.core.request_ids import AGAIN, FOLLOW_UP
from swansongd.core.state import CheckpointRequest, Evacuation, State
from swansongd.core.transition import Transition

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
        is_committing=bool(state.commits.stored),
    )


def has_trainer(state: State) -> bool:
    """Whether a trainer can be asked for a checkpoint."""
    can_answer = bool(state.connected) or state.settings.signals_trainer
    return can_answer and state.starts.fenced_by is None and not state.is_finished


def make(transition: Transition) -> None:
    """Request a checkpoint over the socket, or by signal if no trainer is connected."""
    evacuation = transition.evacuation
    again = f"{AGAIN}{evacuation.requests}" if evacuation.requests else ""
    request = _new(transition, f"{evacuation.id}{again}")
    course.record_made(transition, request)
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
    course.record_made(transition, request)
    number = transition.evacuation.follow_ups
    transition.mark("follow_up", number=number, seconds_left=round(transition.left_s, 2))
    _ask(transition, request)


def _new(transition: Transition, request_id: str) -> CheckpointRequest:
    evacuation, connected = transition.evacuation, transition.state.connected
    by_signal = not connected
    made = transition.state.forecast
    return CheckpointRequest(
        request_id=request_id,
        reason=evacuation.reason,
        start_id=transition.state.asked_start,
        by_signal=by_signal,
        is_urgent=not evacuation.is_precaution,
        asked_mono_s=transition.now,
        agree_by_mono_s=transition.now + min(AGREEMENT_LIMIT_S, transition.left_s / 10),
        known=frozenset(staged.id for staged in transition.state.staging.staged),
        from_step=(
            -1
            if evacuation.is_resumed
            else max((trainer.step for trainer in connected), default=-1)
        ),
        at_step=max((trainer.step for trainer in transition.state.ranks.trainers), default=-1),
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
    if transition.evacuation.is_resumed:
        record_if_committed(transition, request)  # the claim may come after the trainer's answer
    if request.answer is not None:
        _fail_if_unusable(transition, request, request.answer)
    for attend_waiting in (reconcile_target, _fail_if_too_late, _scan_for_early_shards):
        waiting = transition.waiting_request(request.request_id)
        if waiting is not None:
            attend_waiting(transition, waiting)


def _make_missing(transition: Transition) -> None:
    """Make the first request when a trainer connects, or another one after a failure, if that is worth it.

    A verdict that was announced before stands: the commit of this request can only improve it.
    """
    evacuation = transition.evacuation
    request = evacuation.request
    is_first = bool(transition.state.connected) and (request is None or request.is_unsent)
    if is_first or _is_to_another_start(transition.state, request) or _is_repeat_due(transition):
        plan = planned(transition, left_s=transition.left_s)
        is_worth_it = plan.fits or (
            evacuation.verdict is None and evacuation.plan.kind in (PlanKind.NONE, PlanKind.TAKE)
        )
        if plan.kind is PlanKind.TAKE and is_worth_it:
            course.record(transition, plan=plan)
            make(transition)
            transition.do(Rescan())


def _is_repeat_due(transition: Transition) -> bool:
    request = transition.evacuation.request
    if request is not None and request.is_unsent:  # the trainer may not be ready for its signal
        return transition.now >= request.failed_mono_s + SIGNAL_AGAIN_S
    return will_repeat(transition) and transition.now >= _repeat_mono_s(transition.evacuation)


def _is_to_another_start(state: State, request: CheckpointRequest | None) -> bool:
    """The training was started again after a request that failed, or from a state before the answer.

    Without hooks, its process is known.
    """
    if request is None or request.is_unsent or not (request.failure or state.has_gone_back):
        return False
    can_answer = state.connected or (request.by_signal and state.starts.process)
    return bool(can_answer) and request.start_id != state.asked_start


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
    if state.starts.fenced_by is not None or evacuation.requests >= REQUESTS_MAX:
        return False
    answered = (n for n in state.notices.live.values() if n.identity in evacuation.identities)
    if transition.left_s <= 0 or all(notice.source == PEER_SOURCE for notice in answered):
        return False
    plan = planned(transition, left_s=transition.left_s)
    is_safe = proof.prove(state)[0] is Verdict.SAFE
    return plan.kind is PlanKind.TAKE and plan.fits and not is_safe


def answer_asking(transition: Transition) -> None:
    """Tell the ranks that got SIGTERM that no checkpoint will come: no request waits, or will be repeated."""
    asking = [trainer for trainer in transition.state.connected if trainer.asks_for_request]
    is_repeated = transition.state.evacuation is not None and will_repeat(transition)
    if asking and not transition.waiting_requests and not is_repeated:
        transition.do(Send(NotRequested(), tuple(trainer.connection for trainer in asking)))
        for trainer in asking:
            ranks.update(transition, replace(trainer, asks_for_request=False))


def _fail_if_unusable(
    transition: Transition, request: CheckpointRequest, answer: CheckpointId
) -> None:
    """The answer cannot be read, vanished, was written again or rolled back before it was committed."""
    state = transition.state
    is_usable = any(staged.id == answer for staged in state.staging.usable)
    if not is_usable and not state.is_covered(answer):
        fail(transition, request, "the set that answered it cannot be committed")


def _fail_if_too_late(transition: Transition, request: CheckpointRequest) -> None:
    """Stop waiting for a set that could not be stored in time even if it were sealed now."""
    state = transition.state
    if not (request.is_follow_up or transition.evacuation.plan.fits):
        return
    flush_s = planner.send_s(state.measured, state.bytes_to_come)
    data_left_s = transition.left_s - state.settings.reserve_s
    since_mono_s = request.too_late_mono_s
    if flush_s <= data_left_s:
        since_mono_s = None
    elif since_mono_s is None:
        since_mono_s = transition.now
    waited_s = 0.0 if since_mono_s is None else transition.now - since_mono_s
    if since_mono_s is not None and (data_left_s <= 0 or waited_s >= TOO_LATE_S):
        fail(transition, request, "no time is left to flush what the trainer has not sealed yet")
    elif since_mono_s != request.too_late_mono_s:
        course.update_request(transition, replace(request, too_late_mono_s=since_mono_s))


def _scan_for_early_shards(transition: Transition, request: CheckpointRequest) -> None:
    is_due = transition.now - request.rescan_mono_s >= EARLY_SCAN_S
    if is_due and request.target is not None and not transition.evacuation.is_precaution:
        course.update_request(transition, replace(request, rescan_mono_s=transition.now))
        transition.do(Rescan())
