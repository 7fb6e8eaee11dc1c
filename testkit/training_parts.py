# SPDX-License-Identifier: Apache-2.0
"""Objects that several tests of the hooks train."""

from __future__ import annotations

import os
from typing import Any

from swansong._ranks.agreement import Ranks
from swansong._ranks.start import TrainingStart

DEVICE = os.environ.get("SWANSONG_TEST_DEVICE", "cpu")
"""Device of the models in the tests of the hooks.  ``make test-gpu`` sets it."""


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
