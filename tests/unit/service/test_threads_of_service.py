# SPDX-License-Identifier: Apache-2.0
"""What the daemon's threads have in common, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import swansongd

SOURCES = sorted(Path(swansongd.__file__).parent.rglob("*.py"))


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Every call of one of these, by the name that it is written with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {word.arg: ast.unparse(word.value) for word in call.keywords}


def test_no_thread_can_keep_the_daemon_from_its_end() -> None:
    """Every thread is a daemon thread, so that exit waits for none of them."""
    found = 0
    for path in SOURCES:
        for call in calls(ast.parse(path.read_text()), "threading.Thread", "Thread", "Timer"):
            found += 1
            assert keywords(call).get("daemon") == "True", f"{path.name}:{call.lineno}"
    assert found > 5


def test_nothing_sleeps_that_cannot_be_woken() -> None:
    """Waiting is done on an event or a socket, which an end or a notice cuts short.  Commands have Ctrl-C."""
    for path in (path for path in SOURCES if path.parent.name not in ("cli", "doctor")):
        for call in calls(ast.parse(path.read_text()), "time.sleep", "sleep"):
            raise AssertionError(f"{path.name}:{call.lineno} sleeps")


EVENT_DRIVEN = (
    "service.py",
    "decisions.py",
    "inbox.py",
    "channel.py",
    "connection.py",
    "signals.py",
)
"""What runs for each event and each message, and must not start a thread for it."""


@pytest.mark.fault("H07")
def test_no_event_and_no_message_starts_a_thread() -> None:
    """Threads are made with the object that has them, or when the daemon starts."""
    checked = set()
    for path in (path for path in SOURCES if path.name in EVENT_DRIVEN):
        checked.add(path.name)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "run"):
                for call in calls(function, "threading.Thread", "Thread", "Timer"):
                    raise AssertionError(f"{path.name}:{call.lineno} starts a thread")
    assert checked == set(EVENT_DRIVEN)


def test_calls_are_found_as_they_are_written() -> None:
    tree = ast.parse("threading.Thread(target=f, daemon=True)\nx = other()")
    (call,) = calls(tree, "threading.Thread")
    assert keywords(call) == {"target": "f", "daemon": "True"}
