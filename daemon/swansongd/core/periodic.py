# SPDX-License-Identifier: Apache-2.0
"""Asks for periodic checkpoints when they are due, where the trainer leaves that to the daemon.

The request is the one for a precaution: nobody hurries, and all ranks agree on a step as in an
emergency.  Whatever goes wrong, the next interval is the next chance.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import cadence
from swansongd.core.events import AskTrainers, SendTarget, WithdrawRequest
from swansongd.core.planner import take_s
from swansongd.core.state import Periodic, State
from swansongd.core.transition import Transition

PATIENCE_S = 300.0
"""A request that is not answered for so long is withdrawn; ranks wait in vain for each other, perhaps."""
OWED_EVERY_S = 30.0
"""A checkpoint that must take the place of a discarded commit is requested again at this interval."""
UNCOMMITTED_MAX = 2
"""While this many sets wait for a slow store, no more are requested: the newest ones would only be dropped.
During an outage they are: a trainer that crashes then resumes from the newest local set."""


def interval_s(state: State) -> float:
    """Training time between two periodic checkpoints, as configured or as measured."""
    settings = state.settings
    if settings.checkpoint_interval_s is not None:
        return settings.checkpoint_interval_s
    costs = (t.save_s if t.snapshot_s is None else t.snapshot_s for t in state.connected)
    return cadence.interval_s(
        save_cost_s=max((cost for cost in costs if cost is not None), default=None),
        store_s=take_s(state.measured),
        mtbf_s=cadence.expected_mtbf_s(settings.mtbf_s, state.history),
    )


def reconcile(transition: Transition) -> None:
    """Ask, bring the ranks to one step, and give up."""
    state = transition.state
    if state.periodic is not None:
        if _is_pressed(transition):
            _withdraw(transition, "the VM may go away")
        elif transition.now - state.periodic.asked_mono_s > PATIENCE_S:
            _withdraw(transition, "nobody answered")
            transition.log(
                "warning", "periodic_checkpoint_missed", reason="no answer from the trainer"
            )
        elif state.saved_mono_s is not None and state.saved_mono_s > state.periodic.asked_mono_s:
            if state.periodic.target is None:  # it was saved for another reason; nobody need wait
                _withdraw(transition, "a checkpoint was just taken")
            transition.state = replace(transition.state, periodic=None)
        else:
            _steer_target(transition, state.periodic)
    elif _is_due(transition):
        _ask(transition)


def joined(transition: Transition, connection: int) -> None:
    """A rank came, or came back: while a request is out it is asked like the others."""
    periodic = transition.state.periodic
    if periodic is not None:
        _request(transition, periodic.request_id, (connection,))


def accepted(transition: Transition, connection: int, request_id: str, step: int) -> None:
    """A rank stands at a step boundary and waits for the target."""
    periodic = transition.state.periodic
    trainer = next((t for t in transition.state.trainers if t.connection == connection), None)
    if periodic is None or periodic.request_id != request_id or trainer is None:
        return
    if periodic.target is not None:
        transition.do(SendTarget(request_id, periodic.target, (connection,)))
    else:
        answers = {**periodic.accepted, trainer.rank: step}
        transition.state = replace(transition.state, periodic=replace(periodic, accepted=answers))


def failed(transition: Transition, request_id: str, reason: str) -> None:
    """A rank could not, or would not."""
    if transition.state.periodic is not None and transition.state.periodic.request_id == request_id:
        transition.log("warning", "periodic_checkpoint_missed", reason=reason)
        _withdraw(transition, reason)


def _is_due(transition: Transition) -> bool:
    state = transition.state
    ranks = {trainer.rank for trainer in state.connected}
    # Over several VMs the one with rank 0 asks, and the ranks' own agreement takes the others along.
    is_ready = (
        not _is_pressed(transition)
        and state.generation is not None
        and 0 in ranks
        and len(ranks) >= state.local_world_size
        and (len(state.uncommitted) < UNCOMMITTED_MAX or state.failures > 0)
    )
    if not is_ready:
        return False
    if state.owes_checkpoint and not state.uncommitted and not state.stored:
        asked_mono_s = state.periodic_mono_s
        is_placed = all(trainer.start_step >= 0 for trainer in state.connected)
        return is_placed and (asked_mono_s is None or transition.now - asked_mono_s >= OWED_EVERY_S)
    if not all(t.takes_periodic and t.step > 0 for t in state.connected):
        return False
    moments = (state.saved_mono_s, state.joined_mono_s, state.periodic_mono_s)
    last = max((moment for moment in moments if moment is not None), default=transition.now)
    return transition.now - last >= interval_s(state)


def _is_pressed(transition: Transition) -> bool:
    """Whether an evacuation needs trainer and link.  One that has its verdict and a far deadline does not."""
    evacuation = transition.state.evacuation
    return evacuation is not None and (
        evacuation.is_precaution
        or evacuation.verdict is None
        or transition.left_s <= transition.state.lead_s
    )


def _ask(transition: Transition) -> None:
    # The instant tells it from requests before a restart of the daemon, which hooks may remember.
    request_id = f"periodic-{transition.now:.3f}"
    transition.state = replace(
        transition.state,
        periodic=Periodic(request_id=request_id, asked_mono_s=transition.now),
        periodic_mono_s=transition.now,
    )
    _request(transition, request_id, tuple(t.connection for t in transition.state.connected))


def _request(transition: Transition, request_id: str, connections: tuple[int, ...]) -> None:
    transition.do(
        AskTrainers(
            request_id,
            "a periodic checkpoint is due",
            transition.now + PATIENCE_S,
            connections,
            is_urgent=False,
        )
    )


def _steer_target(transition: Transition, periodic: Periodic) -> None:
    if periodic.target is None and len(periodic.accepted) >= transition.state.local_world_size:
        target = max(periodic.accepted.values()) + 1
        transition.state = replace(transition.state, periodic=replace(periodic, target=target))
        connections = tuple(t.connection for t in transition.state.connected)
        transition.do(SendTarget(periodic.request_id, target, connections))


def _withdraw(transition: Transition, reason: str) -> None:
    assert transition.state.periodic is not None
    transition.do(WithdrawRequest(transition.state.periodic.request_id, reason))
    transition.state = replace(transition.state, periodic=None)
