# SPDX-License-Identifier: Apache-2.0
"""``swansong status --watch``: show the state of the daemon until Ctrl-C."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swansong_tools.commands.common import is_screen
from swansong_tools.commands.view import poller
from swansong_tools.commands.view.poller import Display, Poll

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
_ENDS = {signal.SIGINT, signal.SIGTERM}
_TICK_S = 1.0
"""The countdown moves at this interval, also between two polls."""


def watch(path: Path, interval_s: float) -> int:
    """Show the state of the daemon until SIGINT or SIGTERM; returns 0, as top and htop do.

    Args:
        path: socket of the daemon.
    """
    polls: queue.SimpleQueue[Poll] = queue.SimpleQueue()
    display = _display()
    with suppress(_Ended), _wakeups() as (reads, writes):

        def take(poll: Poll) -> None:
            polls.put(poll)
            with suppress(BlockingIOError):  # enough is unread
                writes.send(b"\0")

        def catch_up() -> None:
            while not polls.empty():
                display.take(polls.get())

        def wait_for_foreground() -> None:
            while _is_in_background():
                if signal.SIGTSTP in _woken(reads):
                    _stop()
                catch_up()

        poller.start(path, interval_s, take)
        wait_for_foreground()
        with display:
            while True:
                if signal.SIGTSTP in _woken(reads):
                    with display.suspended():
                        _stop()
                        wait_for_foreground()
                wait_for_foreground()  # SIGSTOP suspends no display
                catch_up()
                display.draw()
    return 0


class _Ended(Exception):
    """SIGINT or SIGTERM arrived."""


def _is_in_background() -> bool:
    """Whether a shell or another job has the terminal, as after Ctrl-Z and ``bg``.

    The terminal itself would stop us at each frame with ``stty tostop`` only.
    """
    if not is_screen(sys.stdout):
        return False
    try:
        return os.tcgetpgrp(sys.stdout.fileno()) != os.getpgrp()
    except OSError:  # it is not our controlling terminal, so no shell shares it with us
        return False


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
    """Wait for a signal, a poll or the next tick; returns the numbers of the signals.

    Raises:
        _Ended: one of the signals ends the view.
    """
    select.select([reads], [], [], _TICK_S)
    try:
        woken = reads.recv(4096)
    except BlockingIOError:
        return b""
    if _ENDS.intersection(woken):
        raise _Ended
    return woken


def _display() -> Display:
    if is_screen(sys.stdout):
        from swansong_tools.commands.view.screen import Screen  # noqa: PLC0415 - slow to import

        return Screen()
    from swansong_tools.commands.view.changes import ChangeLog  # noqa: PLC0415

    return ChangeLog()
