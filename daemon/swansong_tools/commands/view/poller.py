# SPDX-License-Identifier: Apache-2.0
"""Polls the daemon from a thread of its own: an answer may take seconds, and the display must not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swansong_bucket.errors import Unreachable
from swansongd.observe.status import DaemonStatus

from swansong_tools.commands.client import DaemonClient


@dataclass(frozen=True, slots=True)
class Poll:
    """The result of one poll: a status, or the reason why there is none."""

    at_mono_s: float
    at_wall_s: float
    status: DaemonStatus | None
    reason: str = ""


def start(path: Path, interval_s: float, take: Callable[[Poll], None]) -> None:
    """Query the daemon until the process ends, and connect again after each error.

    Args:
        path: socket of the daemon.
        take: called in the thread of the poller.
    """
    arguments = (path, interval_s, take)
    threading.Thread(target=_run, args=arguments, name="poller", daemon=True).start()


def _run(path: Path, interval_s: float, take: Callable[[Poll], None]) -> None:
    daemon: DaemonClient | None = None
    while True:
        status, reason = None, ""
        try:
            daemon = daemon or DaemonClient(path)
            status = daemon.status()
        except Unreachable as error:
            reason = error.line()
            if daemon is not None:
                daemon.close()
            daemon = None
        take(Poll(time.monotonic(), time.time(), status, reason))
        time.sleep(interval_s)
