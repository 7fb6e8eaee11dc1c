# SPDX-License-Identifier: Apache-2.0
"""Training that does its part gets SAFE: the rules against a false SAFE cost no true one.

A trainer is honest if it resumes from the newest state that it may use and answers each request in time.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansongd.core.events import (
    Action,
    ClaimGeneration,
    Conclude,
    Event,
    GenerationClaimed,
    NoticeRaised,
    TrainerAccepted,
    TrainerProgress,
    TrainerSealed,
)

from testkit.story import Story, a_set

SETTLED_S = 12.0
"""A verdict waits at most ten seconds for a set that settles."""


class Life:
    """One training with one start at a time, whose daemon and processes restart."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.story = Story()
        self.claimed = 0
        self.generation = 2
        self.number = 0
        self.connections: tuple[int, ...] = ()
        self.begin(-1)

    # ------------------------------------------------------------------ the daemon and the store

    def tell(self, event: Event) -> None:
        self.story.tell(event)
        self.claim()

    def claim(self) -> None:
        """The store gives each generation that the daemon asks for."""
        while True:
            asked = self.story.actions[self.claimed :]
            self.claimed = len(self.story.actions)
            if not any(isinstance(action, ClaimGeneration) for action in asked):
                return
            self.generation += 1
            self.story.tell(GenerationClaimed(self.generation, self.story.state.last_complete))

    def store(self) -> None:
        self.story.scan()
        self.story.store_all()
        self.claim()

    def wait(self, seconds: float) -> None:
        self.store()
        self.story.wait(seconds)
        self.claim()

    def restart_daemon(self, *, ends: bool = False, remembers: bool = True) -> None:
        ended = self.pids if ends else ()
        self.story = self.story.restarted(ended=ended, remembers=remembers)
        self.claimed = 0
        self.claim()

    # ------------------------------------------------------------------ the trainer

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(1000 * self.start + rank for rank in range(self.ranks))

    def begin(self, step: int) -> None:
        """A new start of the training, from the state of a step."""
        self.number += 1
        self.start = self.number
        self.start_id = f"start{self.number}"
        self.join(-1)
        self.step = max(step, 0) + 1
        self.report()

    def join(self, step: int) -> None:
        first = 1 + max(self.connections, default=0)
        self.connections = tuple(range(first, first + self.ranks))
        for rank, connection in enumerate(self.connections):
            self.story.join(
                connection,
                rank=rank,
                ranks=self.ranks,
                pid=self.pids[rank],
                step=step,
                start_id=self.start_id,
            )
            self.claim()

    def connect(self) -> None:
        self.join(self.step)
        self.report()

    def report(self) -> None:
        for connection in self.connections:
            self.tell(TrainerProgress(connection, self.step, start_id=self.start_id))

    def leave(self, *, exited: bool = True) -> None:
        for connection in self.connections:
            self.story.leave(connection, exited=exited)
        self.claim()

    def newest(self) -> int:
        """The step from which a start continues."""
        state = self.story.state
        steps = [each.id.step for each in state.staged if each.id not in state.abandoned]
        committed = -1 if state.last_complete is None else state.last_complete.step
        return max([*steps, committed])

    def seal(self, request_id: str = "") -> int:
        """Size of the set."""
        self.number += 1
        staged = a_set(self.step, f"n{self.number}", start_id=self.start_id, request_id=request_id)
        self.story.staging.append(staged)
        return staged.size_bytes

    def answer(self) -> None:
        """Agree, make one more step, and save, if a request is open."""
        evacuation = self.story.state.evacuation
        if evacuation is None or evacuation.request is None or evacuation.verdict is not None:
            return
        request_id = evacuation.request.request_id
        for connection in self.connections:
            self.tell(TrainerAccepted(connection, request_id, self.step))
        self.step += 1
        self.report()
        size_bytes = self.seal(request_id)
        for connection in self.connections:
            self.tell(TrainerSealed(connection, request_id, self.step, 2.0, size_bytes))
        self.store()

    # ------------------------------------------------------------------ events

    def do(self, event: str) -> None:
        match event:
            case "steps":
                self.step += 3
                self.report()
            case "save":
                self.seal()
                self.story.scan()
                self.claim()
            case "store":
                self.store()
            case "a minute":
                self.wait(60.0)
                self.report()
            case "the daemon restarts":
                self.restart_daemon()
                self.connect()
            case "the daemon restarts, ranks return late":
                self.restart_daemon()
                self.wait(20.0)
                self.connect()
            case "systemctl stop and start":
                self.restart_daemon(remembers=False)
                self.connect()
            case "the trainer crashes":
                self.leave()
                self.begin(self.newest())
            case "the trainer crashes while no daemon runs":
                self.restart_daemon(ends=True)
                self.story.wait(1.0)
                self.begin(self.newest())
            case "the connection is lost":
                self.leave(exited=False)
                self.story.wait(2.0)
                self.connect()
            case "the operator rolls back":
                last = self.story.state.last_complete
                if last is not None and last.step > 2:
                    self.leave()
                    self.begin(last.step - 2)
            case "a notice is withdrawn":
                self.alarm(answers=False)
            case "a notice is answered and withdrawn":
                self.alarm(answers=True)

    def alarm(self, *, answers: bool) -> None:
        """A notice that the cloud withdraws.  After a minute, the next one is not one too many."""
        self.story.notice(60)
        self.claim()
        if answers:
            self.answer()
        self.story.withdraw()
        self.wait(100.0)
        self.report()

    def end(self, ending: str) -> list[Action]:
        """A notice of 60 s; returns the final verdicts of the last daemon."""
        if ending == "training has ended":
            self.step += 1
            self.report()
            self.seal()
            self.store()
            self.leave()
        self.wait(SETTLED_S)
        before = len(self.story.actions)
        self.story.notice(60)
        self.claim()
        if ending == "the daemon restarts":
            kept = list(self.story.state.notices.values())
            self.restart_daemon()
            before = 0
            for notice in kept:
                self.tell(NoticeRaised(notice))
            self.connect()
        self.answer()
        # Without a trainer, the verdict waits for one as long as a checkpoint would fit.
        for _ in range(round(2 * (60.0 if ending == "training has ended" else SETTLED_S))):
            self.story.wait(0.5)
            self.store()
        actions = self.story.actions[before:]
        return [each for each in actions if isinstance(each, Conclude) and each.is_final]


EVENTS = [
    "steps",
    "save",
    "store",
    "a minute",
    "the daemon restarts",
    "the daemon restarts, ranks return late",
    "systemctl stop and start",
    "the trainer crashes",
    "the trainer crashes while no daemon runs",
    "the connection is lost",
    "the operator rolls back",
    "a notice is withdrawn",
    "a notice is answered and withdrawn",
]


ENDINGS = ["training answers", "the daemon restarts", "training has ended"]
"""After the notice, or, for the last one, before it."""


@pytest.mark.parametrize("ranks", [1, 2])
@given(events=st.lists(st.sampled_from(EVENTS), max_size=12), ending=st.sampled_from(ENDINGS))
@settings(max_examples=100, deadline=None)
def test_honest_training_gets_safe_after_any_history(
    ranks: int, events: list[str], ending: str
) -> None:
    """At the step of the answer within 12 s; at the last step of training that has ended, by the deadline."""
    life = Life(ranks)
    for event in events:
        life.do(event)
    verdicts = life.end(ending)
    assert verdicts
    last = verdicts[-1]
    assert isinstance(last, Conclude)
    assert (last.verdict, last.commit and last.commit.step) == ("SAFE", life.step), last.reason
