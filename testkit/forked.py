# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a fork of the test: alone in its process, and with nothing to undo afterwards."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import traceback
import tracemalloc
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60.0


def forked(function: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """The result of ``function`` in a fork, as JSON.

    It can use only modules that are imported already, if it changes its user.

    Raises:
        AssertionError: the function raised, with its traceback, or ran longer than the timeout.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            report = {"result": function()}
        except BaseException:
            report = {"error": traceback.format_exc()}
        try:
            with os.fdopen(writer, "w") as stream:
                json.dump(report, stream)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        if not select.select([stream], [], [], timeout_s)[0]:
            os.kill(pid, signal.SIGKILL)
        data = stream.read()
    _, status = os.waitpid(pid, 0)
    assert data, f"the fork ended without a result: {os.waitstatus_to_exitcode(status)}"
    report = json.loads(data)
    assert "error" not in report, report["error"]
    return report["result"]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that the objects of ``work`` had at one time.

    A thread that an earlier test left behind would add its own objects: a fork has none.
    """

    def measured() -> int:
        gc.freeze()  # a collection would visit, and so copy, all objects of the tests before
        tracemalloc.start()
        work()
        return tracemalloc.get_traced_memory()[1]

    result: int = forked(measured)
    return result
