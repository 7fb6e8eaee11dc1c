# SPDX-License-Identifier: Apache-2.0
"""The position of a training as independent witnesses see it: its own output, and a restore on a new VM.

The trainers ``positioned.py`` and ``signalled.py`` have their position as their state.  So a restored
checkpoint shows its training and its step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from testkit.rig import Process, Vm

POSITION = "position.json"


@dataclass(frozen=True)
class Position:
    """A step of the training with this name."""

    training: str
    step: int


def restored(vm: Vm, place: Path, *choice: str) -> Position:
    """The position that a restore on this VM returns.

    Args:
        vm: needs no daemon.
        place: new directory for the checkpoint.
        choice: further arguments of ``swansong restore``; without them it takes the newest commit.
    """
    answer = vm.swansong("restore", *choice, "--to", str(place))
    assert answer.returncode == 0, answer.stderr
    (path,) = place.rglob(POSITION)
    return Position(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Witness:
    """The state of a training at one moment, as its own output shows it."""

    position: Position
    is_as_loaded: bool
    """Whether no step was completed: the state is exactly the one that was loaded."""

    def is_kept_by(self, found: Position) -> bool:
        """Whether ``found`` is of the same training, and resuming from it repeats no step."""
        if self.is_as_loaded:
            return found == self.position
        return found.training == self.position.training and found.step >= self.position.step


def witness(trainer: Process, training: str) -> Witness:
    """The state of the trainer now.

    Args:
        trainer: the process.
        training: the name that the process was started with.
    """
    lines = trainer.lines.all()
    steps = [line["step"] for line in lines if line.keys() == {"step"}]
    if steps:
        return Witness(Position(training, steps[-1]), is_as_loaded=False)
    (loaded,) = (line for line in lines if line.get("event") == "loaded")
    return Witness(Position(loaded["training"], loaded["step"]), is_as_loaded=True)
