# SPDX-License-Identifier: Apache-2.0
"""Objects that several tests of the hooks train."""

from __future__ import annotations

from typing import Any


class Counter:
    """The smallest stateful object."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
