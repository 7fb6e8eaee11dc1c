# SPDX-License-Identifier: Apache-2.0
"""Follow-up checkpoints: further ones after the verdict, while the VM runs and another one fits.

:mod:`swansongd.core.schedule` has the arithmetic.  The request is kept beside the one that led to the
verdict, and a commit only replaces an older one.  So nothing that happens to a follow-up changes a verdict,
except that its commit may improve it.

Over several VMs the daemon of rank 0 makes the requests.  Each of them is one round for all VMs, and the
earliest end of any VM is its deadline.
"""

from __future__ import annotations

import math
from dataclasses import replace

from swansong_bucket.model import DeadlineQuality, Notice

from swansongd.core import emergency, gpus, planner
from swansongd.core.arrival import ENDED_BY_VERDICT
from swansongd.core.notices import BY_HAND
from swansongd.core.planner import Measurements
from swansongd.core.schedule import INTERVAL_MIN_S, Ending, FollowUpCost, next_start_s
from swansongd.core.state import Evacuation, State
from swansongd.core.transition import Transition

CONFIGURED_SOURCE = "deadline"
EARLY_SHARE_STATED = 0.05
"""Assumed part of the VMs that end before the deadline that their cloud stated.  AWS calls its notice best
effort: a VM was seen to end 39 s after it."""
EARLY_SHARE_ASSUMED = 0.5
"""The same without a stated deadline.  Compute Engine gives 0, 30 or 120 s, and does not report which."""
LATENCY_S = 0.5
"""For the tick of the decision loop, messages, and the scan that finds the set."""
ROUND_S = 1.5
"""The same, and the time until the ranks of all VMs notice a round."""
SIGNAL_PROOF_S = 10.0
"""A process that still runs this long after its checkpoint trains on: many exit after the save."""


def wait_s(state: State, now_mono_s: float) -> float | None:
    """Time until the next follow-up is requested, as things are; None if none is."""
    evacuation = state.evacuation
    if evacuation is None or not _is_wanted(state, evacuation, now_mono_s) or not _is_idle(state):
        return None
    if not (
        _hooks_take(state)
        if state.ranks.trainers
        else _process_takes(state, evacuation, now_mono_s)
    ):
        return None
    age_s = now_mono_s - _captured_mono_s(state, evacuation)
    asked_mono_s = max((r.asked_mono_s for r in state.requests_made), default=-math.inf)
    tried_s = now_mono_s - asked_mono_s
    took_s = _took_s(state)
    if state.ranks.trainers and took_s is None:  # an attempt measures it
        return max(0.0, INTERVAL_MIN_S - min(age_s, tried_s))
    return next_start_s(
        Ending(
            left_s=_end_mono_s(state, evacuation) - now_mono_s,
            early_per_s=_early_per_s(state, evacuation, now_mono_s),
        ),
        _cost(state, took_s or 0.0),
        reserve_s=state.settings.reserve_s,
        age_s=age_s,
        tried_s=tried_s,
    )


def reconcile(transition: Transition) -> None:
    """Request a follow-up that is due, or attend to the one in progress."""
    request = transition.state.follow_up
    if request is not None:
        emergency.attend(transition, request)
        if request.is_waiting:
            return
    due_s = wait_s(transition.state, transition.now)
    if due_s is not None and due_s <= 0:
        emergency.make_follow_up(transition)


def _is_wanted(state: State, evacuation: Evacuation, now_mono_s: float) -> bool:
    """Whether training after the verdict is worth saving: the VM lives on, and ends soon."""
    live = state.urgent_notices(now_mono_s)
    return (
        state.settings.follow_ups
        and evacuation.verdict is not None
        and _end_mono_s(state, evacuation) - now_mono_s <= state.lead_s
        and not any(notice.source in ENDED_BY_VERDICT for notice in live)
        and state.generation is not None
        and state.starts.fenced_by is None
        and not state.starts.is_finishing
        and not state.is_finished
        and not gpus.objection(state, now_mono_s)
    )


def _is_idle(state: State) -> bool:
    """Whether no other checkpoint is being taken, sent or committed."""
    return not (
        any(request.is_waiting for request in state.requests_made)
        or state.requests.periodic
        or state.flush.flight
        or state.commits.stored
        or state.uncommitted
        or state.part
    )


def _hooks_take(state: State) -> bool:
    """Whether all ranks of this VM can be asked, rank 0 of the job among them, and have trained on."""
    connected = state.connected
    ranks = {trainer.rank for trainer in connected}
    newest = _newest_step(state)
    return (
        0 in ranks
        and len(ranks) >= state.local_world_size
        and all(trainer.takes_follow_ups for trainer in connected)
        and max(t.step for t in connected) > newest
    )


def _newest_step(state: State) -> int:
    """Newest step of this start that is sealed or committed; -1 without one."""
    start, last = state.start, state.commits.last
    if start is None:
        return -1
    own = (s.id for s in state.staging.usable if s.id.start == start.id)
    newest = max((id_.step for id_ in own), default=-1)
    is_own = last is not None and last.generation == start.generation
    return max(newest, last.step) if last is not None and is_own else newest


def _process_takes(state: State, evacuation: Evacuation, now_mono_s: float) -> bool:
    """Whether a process without hooks has answered its signal, and has lived on since."""
    if (
        not state.settings.signals_trainer
        or state.staging.saved_mono_s is None
        or not evacuation.request
    ):
        return False
    return (
        all(r.by_signal and r.lost_mono_s is None and r.sealed for r in state.requests_made)
        and now_mono_s - state.staging.saved_mono_s >= SIGNAL_PROOF_S
    )


def _took_s(state: State) -> float | None:
    """Time of a checkpoint of this evacuation, which counts while the bandwidth is unknown; else 0.

    The bandwidth stays unknown while nearly all bytes are sent during the save.
    """
    measured = state.measured
    is_large = (measured.save_bytes or 0) >= planner.BANDWIDTH_SAMPLE_MIN_BYTES
    if measured.bandwidth_bytes_per_s is not None or not is_large:
        return 0.0
    return max((r.took_s for r in state.requests_made if r.took_s is not None), default=None)


def _captured_mono_s(state: State, evacuation: Evacuation) -> float:
    """When the newest sealed state was that of the trainer."""
    if state.staging.saved_mono_s is None:
        return evacuation.opened_mono_s
    return state.staging.saved_mono_s - (state.measured.save_s or 0.0)


def _end_mono_s(state: State, evacuation: Evacuation) -> float:
    """The earliest deadline of any VM of the job."""
    if state.notices.peer_end_mono_s is None or not state.spans_vms:
        return evacuation.deadline_mono_s
    return min(evacuation.deadline_mono_s, state.notices.peer_end_mono_s)


def _early_per_s(state: State, evacuation: Evacuation, now_mono_s: float) -> float:
    """Assumed rate at which VMs with these notices end before the deadline."""
    span_s = max(1.0, evacuation.deadline_mono_s - evacuation.opened_mono_s)
    live = state.urgent_notices(now_mono_s)
    share = max((_early_share(notice) for notice in live), default=0.0)
    return 1 / state.settings.mtbf_s + share / span_s


def _early_share(notice: Notice) -> float:
    if notice.source in (*BY_HAND, CONFIGURED_SOURCE):
        return 0.0  # the operator decides
    is_assumed = notice.deadline_quality is DeadlineQuality.ASSUMED
    return EARLY_SHARE_ASSUMED if is_assumed else EARLY_SHARE_STATED


def _cost(state: State, took_s: float) -> FollowUpCost:
    stall_s = state.stall_s
    if stall_s is None:  # a process without hooks saves in its training loop
        stall_s = state.measured.save_s or 0.0
    step_s = max((t.step_s for t in state.connected if t.step_s is not None), default=0.0)
    wait_s = step_s + (ROUND_S if state.spans_vms else LATENCY_S)
    return cost_of(state.measured, stall_s=stall_s, wait_s=wait_s, took_s=took_s)


def cost_of(
    measured: Measurements, *, stall_s: float, wait_s: float, took_s: float = 0.0
) -> FollowUpCost:
    """The times of a follow-up checkpoint.

    Args:
        measured: of its save and its flush.
        stall_s: training stands still for this long.
        wait_s: the longest wait for the step boundary.
        took_s: time of the last checkpoint, where the bandwidth is unknown.
    """
    forecast = planner.forecast(replace(measured, step_s=None))  # from the step boundary on
    return FollowUpCost(
        data_s=max(forecast.data_s, took_s) + forecast.spread_s,
        commit_s=max(forecast.expected_s, took_s) + forecast.spread_s,
        stall_s=stall_s,
        step_s=wait_s,
    )
