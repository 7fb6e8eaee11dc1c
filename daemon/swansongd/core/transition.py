# SPDX-License-Identifier: Apache-2.0
"""One transition of the decision loop: the new state and the actions so far."""

from __future__ import annotations

from swansong_bucket.errors import FencedError

from swansongd.core.events import Action, Log, Mark
from swansongd.core.state import CheckpointRequest, Evacuation, State

LOGIND_SOURCE = "logind"
HOST_SOURCE = "host"
"""Source of the notice that the service itself raises when the host's SIGTERM reaches it."""

EXIT_STOPPED = 0
EXIT_FENCED = FencedError.exit_code


class Transition:
    """The new state and the actions so far.  Each change assigns another frozen value to ``state``."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    @property
    def evacuation(self) -> Evacuation:
        """The open evacuation; only while there is one."""
        assert self.state.evacuation is not None
        return self.state.evacuation

    @property
    def waiting_requests(self) -> tuple[CheckpointRequest, ...]:
        """The requests whose checkpoints may still come."""
        made = (*self.state.requests_made, self.state.requests.periodic)
        return tuple(request for request in made if request is not None and request.is_waiting)

    def waiting_request(self, request_id: str) -> CheckpointRequest | None:
        """The waiting request with this id."""
        return next((r for r in self.waiting_requests if r.request_id == request_id), None)

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
