# SPDX-License-Identifier: Apache-2.0
"""Rules for all threads of the daemon, checked in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from testkit import REPOSITORY

SOURCES = sorted((REPOSITORY / "daemon").glob("*/**/*.py"))


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Every call of one of these names, as written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {word.arg: ast.unparse(word.value) for word in call.keywords}


def test_no_thread_delays_the_exit_of_the_daemon() -> None:
    """Every thread is a daemon thread, so the interpreter waits for none of them."""
    found = 0
    for path in SOURCES:
        for call in calls(ast.parse(path.read_text()), "threading.Thread", "Thread", "Timer"):
            found += 1
            assert keywords(call).get("daemon") == "True", f"{path.name}:{call.lineno}"
    assert found > 5


def test_no_thread_sleeps_without_a_way_to_wake_it() -> None:
    """Threads wait on an event or a socket, which a stop or a notice can end.

    Commands have Ctrl-C, and the daemon kills the process that reads NVIDIA's library.
    """
    for path in (path for path in SOURCES if not {"commands", "doctor", "nvml.py"} & {*path.parts}):
        for call in calls(ast.parse(path.read_text()), "time.sleep", "sleep"):
            raise AssertionError(f"{path.name}:{call.lineno} sleeps")


BRIEF = {
    "config.py": "a look-up of the configuration",
    "log.py": "it cannot log its faults",
    "unconnected.py": "a search of a command",
    "delivery.py": "one attempt to send a notification",
    "signal_reader.py": "the handler of one signal",
    "metadata.py": "it waits for the stop",
    "gcp.py": "one look at a notice",
    "committer.py": "one farewell",
}
"""Modules of the daemon with threads that do one thing, and the reason."""


@pytest.mark.fault("H07")
def test_no_error_ends_a_thread_that_lasts_as_long_as_the_daemon() -> None:
    """All others are made by :func:`swansong_bucket.util.threads.lasting_thread`."""
    started = {
        path.name
        for path in SOURCES
        if "swansongd" in path.parts
        and any(calls(ast.parse(path.read_text()), "threading.Thread", "Thread"))
    }
    assert started == set(BRIEF)


EVENT_DRIVEN = (
    "service.py",
    "decisions.py",
    "inbox.py",
    "channel.py",
    "connection.py",
    "signals.py",
)
"""Modules that run for each event or message, and must not start a thread for it."""


@pytest.mark.fault("H07")
def test_no_event_and_no_message_starts_a_thread() -> None:
    """Threads start with the object that owns them, or with the daemon."""
    checked = set()
    for path in (path for path in SOURCES if path.name in EVENT_DRIVEN):
        checked.add(path.name)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "run"):
                for call in calls(
                    function, "threading.Thread", "lasting_thread", "Thread", "Timer"
                ):
                    raise AssertionError(f"{path.name}:{call.lineno} starts a thread")
    assert checked == set(EVENT_DRIVEN)
