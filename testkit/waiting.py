# SPDX-License-Identifier: Apache-2.0
"""Waiting in tests: for a condition, with a limit, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def is_running(pid: int) -> bool:
    """Whether the process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(
    predicate: Callable[[], T], *, timeout_s: float = 60.0, what: str = "", every_s: float = 0.01
) -> T:
    """The first truthy value of ``predicate``, which is called at this interval.

    Raises:
        AssertionError: there was none within ``timeout_s``; names the condition.
    """
    end = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < end, f"timed out after {timeout_s} s: {what or predicate}"
        time.sleep(every_s)
