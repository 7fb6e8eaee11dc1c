# SPDX-License-Identifier: Apache-2.0
"""One turn of the decision loop: the state as it becomes, and the orders that come of it."""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.events import (
    Action,
    Log,
    Mark,
    WithdrawRequest,
)
from swansongd.core.state import Ask, State
from swansongd.errors import FencedError

LOGIND_SOURCE = "logind"
HOST_SOURCE = "host"
"""Source of the notice that the service itself raises when the host's SIGTERM reaches it."""

EXIT_STOPPED = 0
EXIT_FENCED = FencedError.exit_code


class Turn:
    """The state as it becomes, and what was ordered, within one turn."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def set_evacuation(self, **changes: object) -> None:
        assert self.state.evacuation is not None
        self.set(evacuation=replace(self.state.evacuation, **changes))  # type: ignore[arg-type]

    def set_ask(self, **changes: object) -> None:
        assert self.state.evacuation is not None
        assert self.state.evacuation.ask is not None
        self.set_evacuation(ask=replace(self.state.evacuation.ask, **changes))  # type: ignore[arg-type]

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def log(self, level: str, event: str, **facts: object) -> None:
        self.do(Log(level, event, tuple(facts.items())))

    def mark(self, phase: str, **facts: object) -> None:
        """A line of the evacuation's timeline, if there is an evacuation."""
        if self.state.evacuation is not None:
            self.do(Mark(self.state.evacuation.id, phase, tuple(facts.items())))

    def ask_if_waiting(self, request_id: str) -> Ask | None:
        evacuation = self.state.evacuation
        if evacuation is None or evacuation.ask is None:
            return None
        ask = evacuation.ask
        return ask if ask.request_id == request_id and ask.is_waiting else None

    @property
    def left_s(self) -> float:
        assert self.state.evacuation is not None
        return self.state.evacuation.deadline_mono_s - self.now

    def fail_ask(self, reason: str) -> None:
        """The checkpoint that was asked for will not come."""
        self.mark("request_failed", reason=reason)
        self.set_ask(failure=reason, failed_mono_s=self.now)
        assert self.state.evacuation is not None
        assert self.state.evacuation.ask is not None
        if not self.state.evacuation.ask.by_signal:
            self.do(WithdrawRequest(self.state.evacuation.ask.request_id, reason))
