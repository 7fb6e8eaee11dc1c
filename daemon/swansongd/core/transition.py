# SPDX-License-Identifier: Apache-2.0
"""One transition of the decision loop: the state as it becomes, and the orders that follow from it."""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.events import (
    Action,
    Log,
    Mark,
    WithdrawRequest,
)
from swansongd.core.state import Ask, Evacuation, State
from swansongd.errors import FencedError

LOGIND_SOURCE = "logind"
HOST_SOURCE = "host"
"""Source of the notice that the service itself raises when the host's SIGTERM reaches it."""

EXIT_STOPPED = 0
EXIT_FENCED = FencedError.exit_code


class Transition:
    """The state as it becomes, and the orders so far.  A change of the state assigns a new value."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    @property
    def evacuation(self) -> Evacuation:
        """The open evacuation; only while there is one."""
        assert self.state.evacuation is not None
        return self.state.evacuation

    @evacuation.setter
    def evacuation(self, evacuation: Evacuation) -> None:
        self.state = replace(self.state, evacuation=evacuation)

    @property
    def ask(self) -> Ask:
        """The request of the open evacuation; only while there is one."""
        ask = self.evacuation.ask
        assert ask is not None
        return ask

    @ask.setter
    def ask(self, ask: Ask) -> None:
        self.evacuation = replace(self.evacuation, ask=ask)

    @property
    def left_s(self) -> float:
        """Time to the deadline of the open evacuation; negative after it."""
        return self.evacuation.deadline_mono_s - self.now

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def log(self, level: str, event: str, **facts: object) -> None:
        self.do(Log(level, event, tuple(facts.items())))

    def mark(self, phase: str, **facts: object) -> None:
        """A line of the evacuation's timeline, if there is an evacuation."""
        if self.state.evacuation is not None:
            self.do(Mark(self.state.evacuation.id, phase, tuple(facts.items())))

    def ask_if_waiting(self, request_id: str) -> Ask | None:
        """The request of this id, while a checkpoint for it may still come."""
        evacuation = self.state.evacuation
        if evacuation is None or evacuation.ask is None:
            return None
        ask = evacuation.ask
        return ask if ask.request_id == request_id and ask.is_waiting else None

    def fail_ask(self, reason: str) -> None:
        """The checkpoint that was requested will not come."""
        self.mark("request_failed", reason=reason)
        self.ask = replace(self.ask, failure=reason, failed_mono_s=self.now)
        if not self.ask.by_signal:
            self.do(WithdrawRequest(self.ask.request_id, reason))
