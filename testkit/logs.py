# SPDX-License-Identifier: Apache-2.0
"""Recorded log calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from swansongd.util.log import Logger, logger


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """The log calls in the block, as ``event``, ``log_level`` and fields; none is written."""
    lines: list[dict[str, Any]] = []

    def log(level: str, event: str, **fields: object) -> None:
        lines.append({"event": event, "log_level": level, **fields})

    with mock.patch.object(logger, "log", log):
        yield lines


@dataclass(frozen=True)
class Call:
    """One log call."""

    method_name: str
    args: tuple[str, ...]
    kwargs: dict[str, object]


@dataclass
class CapturingLogger(Logger):
    """A logger that records its calls."""

    calls: list[Call] = field(default_factory=list)

    def log(self, level: str, event: str, **fields: object) -> None:
        self.calls.append(Call(level, (event,), fields))
