# SPDX-License-Identifier: Apache-2.0
"""The position of a training that is restored: the state of the trainer ``positioned.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from testkit.rig import Vm

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
