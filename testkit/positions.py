# SPDX-License-Identifier: Apache-2.0
"""Positions of training, as two independent witnesses show them: its own output, and a restore on any VM."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from testkit import TRAINERS
from testkit.rig import Process, Vm
from testkit.trainers.positioned import POSITION


@dataclass(frozen=True)
class Position:
    """A step of the training with this name."""

    training: str
    step: int


def train(vm: Vm, *arguments: str, **env: str) -> Process:
    """Start the trainer ``positioned.py``."""
    command = [sys.executable, "-u", str(TRAINERS / "positioned.py"), *arguments]
    return vm.spawn(command, lines_on="stdout", **{"SWANSONG_SOCKET": str(vm.socket), **env})


def trained(trainer: Process) -> list[Position]:
    """The positions that the trainer has reached by a step."""
    lines = trainer.lines.all()
    return [Position(**line) for line in lines if line.keys() == {"training", "step"}]


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
