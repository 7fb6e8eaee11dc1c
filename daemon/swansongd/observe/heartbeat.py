# SPDX-License-Identifier: Apache-2.0
"""Whether all is well, so that the heartbeat may be sent.  Pure.

The heartbeat is a request at an interval to a service that raises an alarm when it misses one.  It is sent
only after success: silence raises the alarm, whether a checkpoint, the daemon or the VM is missing.
"""

from __future__ import annotations

from swansongd.core import periodic
from swansongd.core.state import State
from swansongd.model import Health
from swansongd.observe.report import STORE_HEALTH

DECIDED_S = 10.0
"""The decision loop decides at least once a second."""
INTERVALS = 3.0
"""A commit may be this many checkpoint intervals old."""


def why_silent(
    state: State, *, decided_mono_s: float, now_mono_s: float, heartbeat_interval_s: float
) -> str:
    """The reason against a heartbeat; empty if all is well.

    Args:
        decided_mono_s: when the state was decided.
    """
    if now_mono_s - decided_mono_s > DECIDED_S:
        return "the decision loop hangs"
    if state.newer_generation is not None:
        return f"generation {state.newer_generation} has taken the run over"
    store = state.sources.get(STORE_HEALTH)
    if store is None or store.health is not Health.OK:
        return "the store is not reached yet" if store is None else f"store: {store.reason}"
    blind = sorted(name for name, s in state.sources.items() if s.health is Health.BLIND)
    if blind:
        return f"source {blind[0]} is blind"
    if state.stalled:
        return "the trainer is stalled"
    return _why_stale(state, now_mono_s, heartbeat_interval_s)


def _why_stale(state: State, now_mono_s: float, heartbeat_interval_s: float) -> str:
    """Training without a commit for too long.

    A trainer with a schedule of its own commits when it likes: the rule then holds for sealed sets only.
    """
    is_planned = any(trainer.takes_periodic for trainer in state.connected)
    is_waiting = bool(state.uncommitted or state.stored)
    if not state.connected or not (is_planned or is_waiting):
        return ""
    since = [state.joined_mono_s, state.last_commit_mono_s]
    age_s = now_mono_s - max((at_s for at_s in since if at_s is not None), default=now_mono_s)
    limit_s = max(heartbeat_interval_s, INTERVALS * periodic.interval_s(state))
    return "" if age_s <= limit_s else f"no commit for {age_s:.0f} s"
