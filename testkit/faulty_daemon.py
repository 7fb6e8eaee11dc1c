# SPDX-License-Identifier: Apache-2.0
"""``swansongd`` with a bug: every progress report of a trainer makes the state machine raise."""

from __future__ import annotations

from swansongd.core import machine
from swansongd.core.events import Action, Event, TrainerProgress
from swansongd.core.state import State
from swansongd.service.main import main

_real_step = machine.step


def _step(state: State, event: Event, now_mono_s: float) -> tuple[State, tuple[Action, ...]]:
    if isinstance(event, TrainerProgress):
        raise ArithmeticError("a fault that was put here")  # noqa: TRY004 - any type will do
    return _real_step(state, event, now_mono_s)


if __name__ == "__main__":
    machine.step = _step
    main()
