# SPDX-License-Identifier: Apache-2.0
"""Detects a trainer without progress: a deadlock, a hung collective, a dead file system.

The daemon cannot fix a stall.  It reports stalls in the log, in the status and in the farewell.
"""

from __future__ import annotations

from swansong_bucket.model import TrainerView

from swansongd.core import ranks
from swansongd.core.transition import Transition


def reconcile(transition: Transition) -> None:
    """Report each rank that stalls, and each that resumes, once."""
    state = transition.state
    stalled_now = frozenset(t.connection for t in state.connected if _is_stalled(transition, t))
    if stalled_now == state.ranks.stalled:
        return
    resumed = [t.rank for t in state.connected if t.connection in state.ranks.stalled - stalled_now]
    ranks.record_stalled(transition, stalled_now)
    if resumed:
        transition.log("info", "stall_over", ranks=resumed)
    news = stalled_now - state.ranks.stalled
    if news:
        facts = _facts(transition, news)
        transition.mark("stall", **facts)
        transition.log("warning", "stall", **facts)


def mark(transition: Transition) -> None:
    """An evacuation has opened: its timeline shows the ranks that stalled before it."""
    stalled = transition.state.ranks.stalled
    if stalled:
        transition.mark("stall", **_facts(transition, stalled))


def _is_stalled(transition: Transition, trainer: TrainerView) -> bool:
    settings = transition.state.settings
    if trainer.step_s is None or trainer.reported_mono_s is None:
        return False  # the duration of its steps is unknown
    limit_s = max(settings.stall_min_s, settings.stall_steps * trainer.step_s)
    return transition.now - trainer.reported_mono_s > limit_s


def _facts(transition: Transition, connections: frozenset[int]) -> dict[str, object]:
    trainers = [t for t in transition.state.connected if t.connection in connections]
    reported = [t.reported_mono_s for t in trainers if t.reported_mono_s is not None]
    return {
        "ranks": sorted(t.rank for t in trainers),
        "step": min((t.step for t in trainers), default=-1),
        "silent_s": round(transition.now - min(reported, default=transition.now), 1),
    }
