# SPDX-License-Identifier: Apache-2.0
"""One checkpoint request, from the ranks that get it to their common step, or to its failure.

The request of an evacuation (:mod:`swansongd.core.emergency`), its follow-ups
(:mod:`swansongd.core.followup`) and the periodic one (:mod:`swansongd.core.periodic`) take this path.  Each
rank that accepts stops at its next step boundary and reports the step.  When all have accepted, the target is
the greatest of these steps plus one.  Over several VMs the ranks agree on the target among themselves and
report it.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.events import AskTrainers, SendTarget, WithdrawRequest
from swansongd.core.state import CheckpointRequest
from swansongd.core.transition import Transition


def send(transition: Transition, request: CheckpointRequest, connections: tuple[int, ...]) -> None:
    """Send the request to these ranks; ranks that know its id repeat their answer."""
    deadline_mono_s = (
        request.agree_by_mono_s if request.is_periodic else transition.evacuation.deadline_mono_s
    )
    transition.do(
        AskTrainers(
            request.request_id,
            request.reason,
            deadline_mono_s,
            connections,
            is_urgent=request.is_urgent,
        )
    )


def record_joined(transition: Transition, connection: int, rank: int) -> None:
    """A rank connected, perhaps again: it gets the requests that the other ranks have."""
    for request in transition.waiting_requests:
        if not request.by_signal and (request.target is None or rank in request.ranks):
            asked = replace(request, ranks=request.ranks | {rank})
            transition.update_request(asked)
            send(transition, asked, (connection,))


def record_accepted(transition: Transition, connection: int, request_id: str, step: int) -> None:
    """A rank stands at the boundary after ``step`` and waits for the target."""
    request = transition.waiting_request(request_id)
    trainer = next((t for t in transition.state.trainers if t.connection == connection), None)
    if trainer is None or request is None:
        return
    if request.target is not None:  # a rank that reconnected: the target is decided
        transition.do(SendTarget(request_id, request.target, (connection,)))
    elif trainer.rank in request.ranks:
        if trainer.rank not in request.accepted and not request.is_periodic:
            transition.mark("accepted", rank=trainer.rank, step=step)
        transition.update_request(
            replace(request, accepted={**request.accepted, trainer.rank: step})
        )


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
        transition.do(SendTarget(request.request_id, target, connections))
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
    transition.update_request(replace(request, target=step))
    if not request.is_periodic:  # the timeline shows evacuations only
        transition.mark("target", step=step)


def fail(transition: Transition, request: CheckpointRequest, reason: str) -> None:
    """End a request whose checkpoint will not come.

    The request of an evacuation stays there with the reason, and so does a follow-up request.  A periodic one
    is forgotten: the next interval brings the next one.
    """
    if request.is_periodic:
        transition.log("warning", "periodic_checkpoint_missed", reason=reason)
        transition.state = replace(transition.state, periodic=None)
    else:
        if request.is_follow_up:
            transition.mark("follow_up_failed", reason=reason)
        else:
            transition.mark("request_failed", reason=reason)
        transition.update_request(replace(request, failure=reason, failed_mono_s=transition.now))
    if not request.by_signal:
        withdraw(transition, request, reason)


def withdraw(transition: Transition, request: CheckpointRequest, reason: str) -> None:
    """Release the ranks that wait for the target of this request."""
    transition.do(WithdrawRequest(request.request_id, reason))
