# SPDX-License-Identifier: Apache-2.0
"""Detects a trainer without progress: a deadlock, a hung collective, a dead file system.

The daemon cannot fix a stall.  It reports stalls in the log, in the status and in the farewell.
"""

from __future__ import annotations

from collections.abc import Sequence

from swansong_bucket.model import TrainerView

from swansongd.core.events import Log, Mark
from swansongd.core.state import State
from swansongd.observe.decision_log import DecisionLog
from swansongd.observe.observer import Observation


def stalled(state: State, now_mono_s: float) -> tuple[TrainerView, ...]:
    """The connected ranks without a report for many of their usual steps."""
    least_s, steps = state.settings.stall_min_s, state.settings.stall_steps
    return tuple(
        trainer
        for trainer in state.connected
        if trainer.step_s is not None  # else the duration of its steps is unknown
        and trainer.reported_mono_s is not None
        and now_mono_s - trainer.reported_mono_s > max(least_s, steps * trainer.step_s)
    )


class StallWatch:
    """Reports each stall and its end once; an :class:`~swansongd.observe.observer.Observer`.

    Args:
        log: gets the lines.  The timeline of an evacuation has the stalls before it, too.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self._known: frozenset[int] = frozenset()
        """Connections of the ranks whose stall was reported."""

    def observe(self, observation: Observation) -> None:
        """Report the ranks that stall now, and those that resume."""
        before, after, _, _, now_mono_s = observation
        found = stalled(after, now_mono_s)
        news = tuple(t for t in found if t.connection not in self._known)
        over = [t.rank for t in after.connected if t.connection in self._known and t not in found]
        self._known = frozenset(t.connection for t in found)
        if over:
            self._log.write(Log("info", "stall_over", (("ranks", over),)), now_mono_s)
        if news:
            self._log.write(Log("warning", "stall", _facts(news, now_mono_s)), now_mono_s)
        evacuation, last = after.evacuation, before.evacuation
        if evacuation is None:
            return
        shown = news if last is not None and last.id == evacuation.id else found
        if shown:
            self._log.mark(Mark(evacuation.id, "stall", _facts(shown, now_mono_s)), now_mono_s)


def _facts(trainers: Sequence[TrainerView], now_mono_s: float) -> tuple[tuple[str, object], ...]:
    reported_s = (t.reported_mono_s for t in trainers if t.reported_mono_s is not None)
    return (
        ("ranks", sorted(trainer.rank for trainer in trainers)),
        ("step", min(trainer.step for trainer in trainers)),
        ("silent_s", round(now_mono_s - min(reported_s), 1)),
    )
