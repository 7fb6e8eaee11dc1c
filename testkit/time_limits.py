# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: a test that exceeds its time limit ends its process.

pytest-timeout sets the limits, by ``--timeout`` and by the marker ``timeout``.  Its own ways to apply them do
not suffice.  An exception in the test is a failing example for Hypothesis, which runs the example again.  A
thread that ends the process never runs while a test holds the interpreter lock, and the stacks that it prints
are lost in a worker of pytest-xdist.

Here the process prints the name of the test, its output and all stacks, kills its descendants, and exits.
pytest-xdist then reports the test as failed, and another worker runs the remaining tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pytest_timeout import is_debugging

from testkit.warm import descendants, kill

FIXTURES_LIMIT_S = 1800.0
"""Limit of fixtures whose time does not count for the test (``func_only``): they build images."""
GRACE_S_MAX = 10.0
"""Time after the limit until the process ends without running Python code."""
_FRAMES_MAX = 30
"""Innermost frames of each thread: the others are of pytest."""
RUNNING_ENV = "SWANSONG_TESTS_RUNNING"
"""Environment variable with a directory: each process keeps the name of its test there, in a file ``PID``."""


class TimeLimits:
    """The limit of the test that runs in this process."""

    def __init__(self) -> None:
        self._stderr = os.dup(2)  # pytest redirects the original one during tests
        self._limit_s = 0.0
        """Limit of the current test, and of its fixtures if they count; 0 before it is known."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._limit_s = 0.0
        _set_running(item.nodeid)
        marker = item.get_closest_marker("timeout")
        if marker is not None and marker.kwargs.get("func_only"):
            self._arm(item, FIXTURES_LIMIT_S)
        try:
            return (yield)
        finally:
            self._disarm()
            _set_running(None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        self._limit_s = FIXTURES_LIMIT_S if settings.func_only else settings.timeout
        self._arm(item, settings.timeout)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        """The test has ended or failed: its fixtures have a limit, too."""
        if item.config.getoption("usepdb"):
            self._disarm()
        elif self._limit_s:
            self._arm(item, self._limit_s)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
        """pytest cancels every timer of faulthandler when a test fails; its fixtures still have to end."""
        if isinstance(node, pytest.Item):
            self.pytest_timeout_cancel_timer(node)

    def _arm(self, item: pytest.Item, limit_s: float) -> None:
        if is_debugging():
            return

        def expire(_signal: int, _frame: FrameType | None) -> None:
            self._expire(item, limit_s)

        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        grace_s = min(limit_s, GRACE_S_MAX)
        faulthandler.dump_traceback_later(limit_s + grace_s, exit=True, file=self._stderr)

    def _disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _expire(self, item: pytest.Item, limit_s: float) -> None:
        """End this process; runs between two bytecodes of the test."""
        if is_debugging():
            return
        try:
            with contextlib.suppress(Exception):  # the test may have interrupted pytest's own code
                for text in _report(item, limit_s):
                    self._print(text)
            kill(descendants(os.getpid()))
            _set_running(None)
        finally:
            os._exit(1)

    def _print(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._stderr, data) :]


def _report(item: pytest.Item, limit_s: float) -> Iterator[str]:
    """The test, how to repeat its examples, the stacks of all threads, and what the test has printed."""
    yield f"\n++++ {item.nodeid} exceeded its time limit of {limit_s:g} s\n"
    # Hypothesis generates the same examples again from this seed.
    seed = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_generated_seed", None)
    if seed is not None:
        yield f"---- repeat its examples with --hypothesis-seed={seed}\n"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"---- stack of {names.get(ident, 'a thread')}\n"
        yield from traceback.format_stack(frame, limit=_FRAMES_MAX)
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
        for name, text in zip(("stdout", "stderr"), capture.read_global_capture(), strict=True):
            if text:
                yield f"---- captured {name}\n{text}"
    yield "++++\n"


def _set_running(test: str | None) -> None:
    """Keep the name of the test in progress for ``.ci/limit``; None: there is none."""
    directory = os.environ.get(RUNNING_ENV)
    if not directory:
        return
    own = Path(directory) / str(os.getpid())
    try:
        if test is None:
            own.unlink(missing_ok=True)
        else:
            own.write_text(f"{test}\n")
    except OSError:
        pass  # the directory was removed: the run is being ended
