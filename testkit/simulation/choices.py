# SPDX-License-Identifier: Apache-2.0
"""The choices of a simulation, each with a different name, to be noted and to be replayed.

A choice is the draw of a number, or a turn that another thread gets.  A replay takes its choices from a
script.  All choices outside of the script are calm: no fault happens, delays are long, and the first
alternative is taken.  The thread that has waited longest runs until it waits, and keeps its turn at locks.
So most choices of a run can be left out, and the others keep their names.
"""

from __future__ import annotations

import contextlib
import queue
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

from testkit.simulation import schedule
from testkit.simulation.schedule import Schedule, Task

Choice = tuple[str, str, int]
"""The thread, or the generator; the fault, or the function that draws; and the number of its draw."""
Value = float | str
"""A number from 0 to 1, the digits of an identifier, or the thread that runs next."""
Script = Mapping[Choice, Value]
"""The choices that are not calm."""
_CALM = 0.99
"""Also the share of the longest delay.  The longest of an exponential delay would take minutes."""
_CALM_TURN_SHARE = 0.5
_ID_BITS = 32
"""Draws of this size are identifiers, which must differ."""
_HELPERS = frozenset({"chance", "delay_s", "at", "post", "<setcomp>", "replaced"})
_HELPER_MODULES = frozenset(
    module.__name__
    for module in (contextlib, queue, random, schedule, sys.modules[__name__], threading)
)
_Random = random.Random


class Choices:
    """The choices of one run.

    Args:
        script: to be replayed; None for a run whose choices its seed makes.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.made: dict[Choice, Value] = {}
        """The choices that were not calm, in their order."""
        self.is_paused = False
        """Whether draws are part of another choice."""
        self._counts: Counter[tuple[str, str]] = Counter()

    def name(self, who: str, kind: str = "") -> Choice:
        """The name of the next choice that this thread or generator makes in the calling function."""
        place = kind + _place(sys._getframe(1))
        self._counts[who, place] += 1
        return who, place, self._counts[who, place]

    def take(self, choice: Choice, drawn: Value, calm: Value) -> Any:
        """The value of a choice."""
        if self.script is not None:
            drawn = self.script.get(choice, calm)
        if drawn != calm:
            self.made[choice] = drawn
        return drawn


def _place(frame: FrameType) -> str:
    """The fault, or the function outside of the helpers, for which a number is drawn."""
    while frame.f_globals.get("__name__") in _HELPER_MODULES or frame.f_code.co_name in _HELPERS:
        if "fault" in frame.f_locals:
            return str(frame.f_locals["fault"])
        if frame.f_back is None:
            return "start"
        frame = frame.f_back
    return frame.f_code.co_qualname


class _Draws(_Random):
    """A generator of such choices."""

    choices: Choices

    def __init__(self, seed: int | str) -> None:
        super().__init__(seed)
        self._seed = str(seed)

    def _name(self) -> Choice:
        running = schedule.active()
        return self.choices.name(self._seed if running is None else running.current.name)

    def random(self) -> float:
        drawn = super().random()
        if self.choices.is_paused:
            return drawn
        return float(self.choices.take(self._name(), drawn, _CALM))

    def getrandbits(self, k: int) -> int:
        drawn, choice = super().getrandbits(k), self._name()
        if k < _ID_BITS:
            return int(float(self.choices.take(choice, drawn / 2**k, 0.0)) * 2**k)
        return int(
            self.choices.take(choice, f"{drawn:x}", f"{_Random(str(choice)).getrandbits(k):x}"), 16
        )


class _NotedSchedule(Schedule):
    """A schedule whose turns are choices.  No two threads have the same name."""

    def __init__(self, choices: Choices, seed: int, **options: Any) -> None:
        self._choices = choices
        self._names_taken: Counter[str] = Counter()
        super().__init__(seed, **options)
        self._waiting = {self.current: None}
        """All threads: the one that had its turn longest ago first."""
        self._choice: Choice | None = None
        """The name of the turn that is passed on at a lock."""

    def start(self, *args: Any, **options: Any) -> Task:
        task = super().start(*args, **options)
        name = f"{task.group}/{task.name}"
        self._names_taken[name] += 1
        task.name = f"{name} {self._names_taken[name]}"
        self._waiting[task] = None
        return task

    def _switches_at_lock(self) -> bool:
        choice = self._choices.name(self.current.name)
        script = self._choices.script
        does = self._drawn(super()._switches_at_lock) if script is None else choice in script
        self._choice = choice if does else None
        return does

    def _turn_share(self) -> float:
        choice = self._choices.name(self.current.name, "time of ")
        return float(self._choices.take(choice, self._drawn(super()._turn_share), _CALM_TURN_SHARE))

    def _next(self) -> Task | None:
        drawn = self._drawn(super()._next) if self._choices.script is None else None
        self._waiting = {task: None for task in self._waiting if not task.has_ended}
        calm = next((task for task in self._waiting if task.may_run(self.now_s)), None)
        if calm is None:
            return None
        is_at_lock, choice = (
            self._choice is not None,
            self._choice or self._choices.name(self.current.name),
        )
        self._choice = None
        name = self._choices.take(
            choice, drawn.name if drawn else "", "" if is_at_lock else calm.name
        )
        able = (task for task in self._waiting if task.name == name and task.may_run(self.now_s))
        chosen = drawn or next(able, calm)
        del self._waiting[chosen]
        self._waiting[chosen] = None
        return chosen

    def _drawn(self, draw: Any) -> Any:
        """Draw what the seed decides, which is a part of another choice."""
        self._choices.is_paused = True
        try:
            return draw()
        finally:
            self._choices.is_paused = False


@contextlib.contextmanager
def noted(choices: Choices) -> Iterator[None]:
    """All generators and schedules that are created in this block make these choices."""
    # unittest.mock imports much, and so creates locks before the schedule: these would be no choices.
    randoms, schedules, before = vars(random), vars(schedule), (random.Random, schedule.Schedule)
    randoms["Random"] = type("Draws", (_Draws,), {"choices": choices})
    schedules["Schedule"] = partial(_NotedSchedule, choices)
    try:
        yield
    finally:
        randoms["Random"], schedules["Schedule"] = before
