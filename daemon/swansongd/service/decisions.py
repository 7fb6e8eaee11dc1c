# SPDX-License-Identifier: Apache-2.0
"""The state of the decision loop, and its repair after a fault in our code.

A fault costs the event that caused it, never the evacuation:

1. An event from trainers or staging is dropped, and a tick takes its place.
2. When that fails as well, or an event of the daemon itself fails, the state is corrupt: the event is decided
   again with a state rebuilt from trusted facts (:func:`machine.rebuilt`).
3. After :data:`UNDECIDED_MAX` such failures in a row the process ends, and systemd restarts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from swansongd.core import machine
from swansongd.core.events import (
    Action,
    Event,
    FromTrainer,
    Rescan,
    RolledBack,
    Scanned,
    Tick,
)
from swansongd.core.state import State
from swansongd.util.rates import LogLimit

UNDECIDED_MAX = 10
"""Events in a row that fail with every state."""
_LINES_AT_ONCE = 5
_LINE_EVERY_S = 60.0
_UNTRUSTED = (FromTrainer, Scanned, RolledBack)


class Decisions:
    """Decides events one after another, in the thread of the decision loop.

    Args:
        state: the initial one.
        log: a structlog logger.
    """

    def __init__(self, state: State, log: Any) -> None:
        self.state = state
        self.faults = 0
        """Number of faults so far, including those of actions."""
        self.last_fault: str | None = None
        self._log = log
        self._lines = LogLimit(burst=_LINES_AT_ONCE, interval_s=_LINE_EVERY_S)
        self._undecided = 0

    def decide(self, event: Event, now_mono_s: float) -> tuple[Action, ...]:
        """Replace the state; returns the actions.

        Raises:
            Exception: the last fault, after :data:`UNDECIDED_MAX` events in a row.
        """
        try:
            return self._step(self.state, event, now_mono_s)
        except Exception as error:
            self.fault(f"event {type(event).__name__}", error)
        if isinstance(event, _UNTRUSTED):
            event = Tick()
            try:
                return self._step(self.state, event, now_mono_s)
            except Exception as error:
                self.fault("event Tick", error)
        try:
            actions = self._step(machine.rebuilt(self.state), event, now_mono_s)
        except Exception as error:
            self.fault(f"event {type(event).__name__} with a rebuilt state", error)
            self._undecided += 1
            if self._undecided >= UNDECIDED_MAX:
                raise
            return ()
        self._log.warning("state_rebuilt", cause=self.last_fault)
        return (*actions, Rescan())

    def guarded(self, what: str, call: Callable[[], object]) -> bool:
        """Call this; returns whether it succeeded."""
        try:
            call()
        except Exception as error:
            self.fault(what, error)
            return False
        return True

    def fault(self, cause: str, error: Exception) -> None:
        """Count and log a fault."""
        self.faults += 1
        self.last_fault = f"{cause}: {type(error).__name__}: {error}"[:500]
        extra = self._lines.admit(cause, time.monotonic())
        if extra is not None:
            self._log.error("decision_fault", cause=self.last_fault, exc_info=error, **extra)

    def _step(self, state: State, event: Event, now_mono_s: float) -> tuple[Action, ...]:
        self.state, actions = machine.step(state, event, now_mono_s)
        self._undecided = 0
        return actions
