# SPDX-License-Identifier: Apache-2.0
"""Objects that several tests of the hooks train."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import swansong
from swansong._ranks.agreement import Ranks
from swansong._ranks.start import TrainingStart

DEVICE = os.environ.get("SWANSONG_TEST_DEVICE", "cpu")
"""Device of the models in the tests of the hooks.  ``make test-gpu`` sets it."""


Attach = Callable[..., swansong.Guard]
"""Type of the fixture ``attach``."""
Restore = Callable[[Path], None]
"""Type of the fixture ``restore_from``."""


class Counter:
    """The smallest stateful object."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def start_of(ranks: Ranks | None = None) -> TrainingStart:
    """Return the start of a rank without a daemon, by default of the only one."""
    return TrainingStart(ranks or Ranks(), lambda _: None, "")


def set_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int = 2, local_world_size: int = 2
) -> None:
    """Set the variables of torchrun for this rank."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    monkeypatch.setenv("GROUP_RANK", str(rank // local_world_size))


def save_part(state: Any, directory: Path, rank: int = 0) -> Path:
    """Save a state as the part of a rank; returns the directory of the set."""
    part = directory / f"rank-{rank:05d}"
    part.mkdir(parents=True, exist_ok=True)
    state.snapshot()(part)
    return directory
