# SPDX-License-Identifier: Apache-2.0
"""Notices that a trainer makes no progress any more: a deadlock, a hung collective, a dead file system.

The daemon cannot fix it.  It says so: in the log, in the status, and in the farewell.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.transition import Transition
from swansongd.model import TrainerView

SMOOTHING = 0.2
"""Weight of the newest report in the usual step time."""


def usual_step_s(known_s: float | None, reported_s: float | None) -> float | None:
    """The usual time of a step after one more report."""
    if reported_s is None or known_s is None:
        return known_s if reported_s is None else reported_s
    return known_s + SMOOTHING * (reported_s - known_s)


def reconcile(transition: Transition) -> None:
    """Say which ranks have come to a halt, and which go on again; once each."""
    state = transition.state
    halted = frozenset(t.connection for t in state.connected if _is_halted(transition, t))
    if halted == state.stalled:
        return
    resumed = [t.rank for t in state.connected if t.connection in state.stalled - halted]
    transition.state = replace(transition.state, stalled=halted)
    if resumed:
        transition.log("info", "stall_over", ranks=resumed)
    news = halted - state.stalled
    if news:
        _tell(transition, news)
        transition.log("warning", "stall", **_facts(transition, news))


def mark(transition: Transition) -> None:
    """An evacuation has opened: its timeline is to show which ranks had come to a halt before."""
    if transition.state.stalled:
        _tell(transition, transition.state.stalled)


def _is_halted(transition: Transition, trainer: TrainerView) -> bool:
    settings = transition.state.settings
    if trainer.step_s is None or trainer.reported_mono_s is None:
        return False  # nobody knows yet how long its steps take
    limit_s = max(settings.stall_min_s, settings.stall_steps * trainer.step_s)
    return transition.now - trainer.reported_mono_s > limit_s


def _tell(transition: Transition, connections: frozenset[int]) -> None:
    transition.mark("stall", **_facts(transition, connections))


def _facts(transition: Transition, connections: frozenset[int]) -> dict[str, object]:
    trainers = [t for t in transition.state.connected if t.connection in connections]
    reported = [t.reported_mono_s for t in trainers if t.reported_mono_s is not None]
    return {
        "ranks": sorted(t.rank for t in trainers),
        "step": min((t.step for t in trainers), default=-1),
        "silent_s": round(transition.now - min(reported, default=transition.now), 1),
    }
