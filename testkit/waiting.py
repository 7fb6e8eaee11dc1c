# SPDX-License-Identifier: Apache-2.0
"""Waiting in tests: for a condition or for threads, with a limit, never for a fixed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SELDOM_S = 0.1
"""Longest interval between two calls of a predicate that asks for none."""


class Clock:
    """Replaces the module ``time`` with a monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def is_running(pid: int) -> bool:
    """Whether the process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


_THREADS_S = 240.0
"""Longer than two processes that import torch take on a loaded machine; the limit of a test is 300 s."""


def until(
    predicate: Callable[[], T], *, timeout_s: float = 60.0, what: str = "", every_s: float = 0.01
) -> T:
    """The first truthy value of ``predicate``, which is called at this interval, and later less often.

    Raises:
        AssertionError: there was none within ``timeout_s``; names the condition.
    """
    began = time.monotonic()
    while True:
        value = predicate()
        if value:
            return value
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"timed out after {timeout_s} s: {what or predicate}"
        # A predicate that asks a server for seconds would take a large part of a core.
        time.sleep(max(every_s, min(waited_s / 20, SELDOM_S)))


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Call ``work(0)`` to ``work(count - 1)`` at the same time, and return the results.

    Raises:
        BaseException: the first one of a call.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait(timeout=20)
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    until(
        lambda: not any(thread.is_alive() for thread in threads),
        timeout_s=_THREADS_S,
        what="the end of all threads",
    )
    if errors:
        raise errors[0]
    return [results[number] for number in range(count)]
