# SPDX-License-Identifier: Apache-2.0
"""Polls the daemon in a separate thread: an answer may take seconds, and a display must not wait."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swansong_bucket.errors import Unreachable
from swansongd.observe.status import DaemonStatus

from swansong_tools.commands.daemon_client import DaemonClient


@dataclass(frozen=True, slots=True)
class Poll:
    """The result of one poll: a status, or the reason why there is none."""

    at_mono_s: float
    at_wall_s: float
    status: DaemonStatus | None
    reason: str = ""


class Display(ABC):
    """Shows the polls, between entry and exit."""

    @abstractmethod
    def take(self, poll: Poll) -> None:
        """Take note of a poll."""

    def draw(self) -> None:  # noqa: B027 - a log shows the polls as they come
        """Show the state as of now."""

    def suspended(self) -> AbstractContextManager[None]:
        """Give the terminal back within this context, and after an exception in it."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - most displays hold nothing
        """Give the terminal back."""


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
