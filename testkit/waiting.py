# SPDX-License-Identifier: Apache-2.0
"""Waiting in tests: on a condition, with a limit, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(predicate: Callable[[], T], *, timeout_s: float = 60.0, what: str = "") -> T:
    """The first truthy value of ``predicate``, asked every 10 ms.

    Raises:
        AssertionError: none came within ``timeout_s``; says what was waited for.
    """
    give_up = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < give_up, f"waited {timeout_s} s in vain for {what or predicate}"
        time.sleep(0.01)
