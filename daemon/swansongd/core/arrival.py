# SPDX-License-Identifier: Apache-2.0
"""Whether an evacuation waits for a trainer that is not there yet, and for how long.

A VM can get its notice while the trainer still imports its libraries, or while it reconnects.  A trainer that
connects in time is asked for a checkpoint, so a verdict before that would be no promise.  The wait ends when
a checkpoint would no longer fit.

A cloud cuts the power at the deadline, whatever the verdict: waiting costs nothing.  The verdict on a
shutdown of the host, or on a termination by an Auto Scaling group, ends the VM's life earlier.  There the
daemon waits only for a trainer that it knows, and after its own start for :data:`RECONNECT_S`.
"""

from __future__ import annotations

from swansongd.core import gpus
from swansongd.core.lifecycle_hook import ASG_SOURCE
from swansongd.core.state import State
from swansongd.core.transition import HOST_SOURCE, LOGIND_SOURCE

RECONNECT_S = 10.0
"""The hooks reconnect to a restarted daemon within this time."""
ENDED_BY_VERDICT = frozenset({LOGIND_SOURCE, HOST_SOURCE, ASG_SOURCE})
"""Sources that end the VM as soon as it has a verdict."""


def wait_s(state: State, now_mono_s: float) -> float | None:
    """How long the verdict still waits for a trainer to connect; None if it does not wait."""
    evacuation = state.evacuation
    if evacuation is None or evacuation.is_precaution or evacuation.verdict is not None:
        return None
    is_asked = evacuation.request is not None and not evacuation.request.is_unsent
    if is_asked or state.connected or state.starts.fenced_by is not None or state.is_finished:
        return None
    if not _may_come(state, now_mono_s) or gpus.objection(state, now_mono_s):
        return None
    needed_s = state.forecast.data_s + state.settings.reserve_s
    left_s = evacuation.deadline_mono_s - now_mono_s - needed_s
    return left_s if left_s >= 0 else None


def has_just_started(state: State, now_mono_s: float) -> bool:
    """Whether a trainer that runs may not have reconnected yet since the daemon's start."""
    started_mono_s = state.staging.first_scan_mono_s
    return started_mono_s is None or now_mono_s < started_mono_s + RECONNECT_S


def _may_come(state: State, now_mono_s: float) -> bool:
    if any(not trainer.is_connected for trainer in state.ranks.trainers):
        return True  # its process runs, and reconnects
    if has_just_started(state, now_mono_s):
        return True
    return all(n.source not in ENDED_BY_VERDICT for n in state.urgent_notices(now_mono_s))
