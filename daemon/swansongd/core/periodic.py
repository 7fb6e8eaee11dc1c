# SPDX-License-Identifier: Apache-2.0
"""Requests checkpoints without an evacuation: periodic ones, and the last one of a rank that got SIGTERM.

The request takes the path of :mod:`swansongd.core.request`.  A set that is sealed for any reason ends it.
After a failure the next interval, or the next query of the rank, brings the next request.
"""

from __future__ import annotations

from dataclasses import replace

from swansong.protocol import SIGTERM_LIMIT_S

from swansongd.core import cadence, gpus, ranks
from swansongd.core.emergency import has_trainer
from swansongd.core.request import (
    end_periodic,
    fail,
    reconcile_target,
    record_periodic,
    send,
    withdraw,
)
from swansongd.core.state import CheckpointRequest, State
from swansongd.core.transition import Transition

PATIENCE_S = 300.0
"""A request without an answer is withdrawn after this time: ranks may block on each other."""
UNCOMMITTED_MAX = 2
"""While this many sets wait for a slow store, no more are requested: sets would only be dropped.  During an
outage requests continue: a trainer that crashes then resumes from the newest local set."""


def interval_s(state: State) -> float:
    """Training time between two periodic checkpoints, as configured or as measured."""
    settings = state.settings
    if settings.checkpoint_interval_s is not None:
        return settings.checkpoint_interval_s
    return cadence.interval_s(
        save_cost_s=state.stall_s,
        store_s=state.forecast.data_s,
        mtbf_s=cadence.expected_mtbf_s(settings.mtbf_s, state.learned.history),
    )


def reconcile(transition: Transition) -> None:
    """Request a checkpoint that is due, or follow the request to its end."""
    request = transition.state.requests.periodic
    if request is not None:
        _follow(transition, request)
    elif _is_asked(transition):
        request = _request(transition, "sigterm", "a rank got SIGTERM", patience_s=SIGTERM_LIMIT_S)
        _make(transition, replace(request, is_urgent=True))
    elif _is_due(transition):
        reason = "a periodic checkpoint is due"
        _make(transition, _request(transition, "periodic", reason, patience_s=PATIENCE_S))


def _follow(transition: Transition, request: CheckpointRequest) -> None:
    saved_mono_s = transition.state.staging.saved_mono_s
    if _is_pressed(transition):
        withdraw(transition, request, "the VM may be terminated")
        end_periodic(transition)
    elif transition.now > request.agree_by_mono_s:
        fail(transition, request, "no answer from the trainer")
    elif saved_mono_s is not None and saved_mono_s > request.asked_mono_s:
        if request.target is None:  # the set was saved for another reason: no rank need wait
            withdraw(transition, request, "a checkpoint was just taken")
        end_periodic(transition)
    else:
        reconcile_target(transition, request)


def _is_due(transition: Transition) -> bool:
    state = transition.state
    is_ready = (
        _can_save(transition)
        and state.generation is not None
        # Over several VMs the daemon of rank 0 requests, and the ranks take the other VMs along.
        and any(trainer.rank == 0 for trainer in state.connected)
        and all(trainer.takes_periodic and trainer.step > 0 for trainer in state.connected)
        and (len(state.uncommitted) < UNCOMMITTED_MAX or state.flush.failures > 0)
    )
    if not is_ready:
        return False
    moments = (state.joined_mono_s, state.staging.saved_mono_s, state.requests.periodic_mono_s)
    last = max(moment for moment in moments if moment is not None)
    return transition.now - last >= interval_s(state)


def _is_asked(transition: Transition) -> bool:
    """Whether a rank ends, and its state can be saved before."""
    state = transition.state
    return (
        any(t.asks_for_request and t.step > max(0, t.parent.step) for t in state.connected)
        and _can_save(transition)
        and not gpus.objection(state, transition.now)
    )


def _can_save(transition: Transition) -> bool:
    """Whether all ranks of this VM are connected, and no evacuation needs them."""
    state = transition.state
    return (
        has_trainer(state)
        and not _is_pressed(transition)
        and len({trainer.rank for trainer in state.connected}) >= state.local_world_size
    )


def _is_pressed(transition: Transition) -> bool:
    """Whether an evacuation needs trainer and link; not if it has a verdict and a far deadline."""
    evacuation = transition.state.evacuation
    return evacuation is not None and (
        evacuation.is_precaution
        or evacuation.verdict is None
        or transition.left_s <= transition.state.lead_s
    )


def _request(
    transition: Transition, name: str, reason: str, *, patience_s: float
) -> CheckpointRequest:
    return CheckpointRequest(
        # The instant makes the id differ from those of an earlier life of the daemon, which hooks remember.
        request_id=f"{name}-{transition.now:.3f}",
        reason=reason,
        start_id=transition.state.asked_start,
        is_periodic=True,
        is_urgent=False,
        asked_mono_s=transition.now,
        agree_by_mono_s=transition.now + patience_s,
        ranks=frozenset(trainer.rank for trainer in transition.state.connected),
    )


def _make(transition: Transition, request: CheckpointRequest) -> None:
    connected = transition.state.connected
    record_periodic(transition, request)
    send(transition, request, tuple(trainer.connection for trainer in connected))
    for trainer in connected:  # the request answers their queries
        ranks.update(transition, replace(trainer, asks_for_request=False))
