# SPDX-License-Identifier: Apache-2.0
"""``swansong status --watch``: show the state of the daemon until Ctrl-C."""

from __future__ import annotations

import queue
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from swansongd.cli.common import is_screen
from swansongd.cli.view import poller
from swansongd.cli.view.poller import Poll

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
_ENDS = {signal.SIGINT, signal.SIGTERM}
_TICK_S = 1.0
"""The countdown moves at this interval, also between two polls."""


class Display(AbstractContextManager["Display"], Protocol):
    """Shows the polls."""

    def take(self, poll: Poll) -> None:
        """Take note of a poll."""

    def draw(self) -> None:
        """Show the state as of now."""

    def suspended(self) -> AbstractContextManager[None]:
        """Give the terminal back within this context."""


def watch(path: Path, interval_s: float) -> int:
    """Show the state of the daemon until SIGINT or SIGTERM; returns 0, as top and htop do.

    Args:
        path: socket of the daemon.
    """
    polls: queue.SimpleQueue[Poll] = queue.SimpleQueue()
    with _wakeups() as (reads, writes), _display() as display:

        def take(poll: Poll) -> None:
            polls.put(poll)
            with suppress(BlockingIOError):  # enough is unread
                writes.send(b"\0")

        poller.start(path, interval_s, take)
        while not _ENDS.intersection(woken := _woken(reads)):
            if signal.SIGTSTP in woken:
                with display.suspended():
                    _stop()
            while not polls.empty():
                display.take(polls.get())
            display.draw()
    return 0


@contextmanager
def _wakeups() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A pair of sockets: signals and the poller write to the second one, and the display reads."""
    reads, writes = socket.socketpair()
    reads.setblocking(False)
    writes.setblocking(False)
    before_fd = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    try:
        yield reads, writes  # never closed: the poller may write until the process ends
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)


def _stop() -> None:
    """Stop the process, as Ctrl-Z does without a handler, until SIGCONT."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def _woken(reads: socket.socket) -> bytes:
    """Wait for a signal, a poll or the next tick; returns the numbers of the signals."""
    select.select([reads], [], [], _TICK_S)
    try:
        return reads.recv(4096)
    except BlockingIOError:
        return b""


def _display() -> Display:
    if is_screen(sys.stdout):
        from swansongd.cli.view.screen import Screen  # noqa: PLC0415 - slow to import

        return Screen()
    from swansongd.cli.view.changes import ChangeLog  # noqa: PLC0415

    return ChangeLog()
