# SPDX-License-Identifier: Apache-2.0
"""``swansong status --watch`` and the signals of a terminal."""

from __future__ import annotations

import io
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from swansong_tools.commands.view import screen, watch
from swansong_tools.commands.view.poller import Display

LEAVE, ENTER = "\x1b[?1049l", "\x1b[?1049h"


class Recorder(Display):
    """A display that notes what happens to it, and sends a signal at each picture."""

    def __init__(self, *signals: int) -> None:
        self.seen: list[str] = []
        self._signals = list(signals)

    def take(self, poll: Any) -> None:
        """No poll comes."""

    def draw(self) -> None:
        self.seen.append("draw")
        os.kill(os.getpid(), self._signals.pop(0))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self.seen.append("leave")
        yield
        self.seen.append("enter")


def test_ctrl_z_gives_the_terminal_back_before_the_process_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process stops as without a handler, and draws again after SIGCONT."""
    shown = Recorder(signal.SIGTSTP, signal.SIGCONT, signal.SIGINT)

    def stop(number: int) -> None:
        assert signal.getsignal(number) is signal.SIG_DFL
        shown.seen.append("stop")

    reads, writes = socket.socketpair()
    monkeypatch.setattr(socket, "socketpair", lambda: (reads, writes))
    monkeypatch.setattr(watch, "_display", lambda: shown)
    monkeypatch.setattr(watch, "_TICK_S", 30.0)
    monkeypatch.setattr(
        "swansong_tools.commands.view.poller.start", lambda _path, _interval_s, take: take(None)
    )
    monkeypatch.setattr(signal, "raise_signal", stop)
    before = signal.getsignal(signal.SIGTSTP)
    with reads, writes:  # the poller of a process may write until its end
        assert watch.watch(Path("/nowhere"), 1.0) == 0
    assert shown.seen == ["draw", "leave", "stop", "enter", "draw", "draw"]
    assert signal.getsignal(signal.SIGTSTP) is before


def test_a_suspended_screen_shows_the_text_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alternate screen is left, and entered again."""
    out = io.StringIO()
    monkeypatch.setattr(screen, "console", lambda: Console(file=out, force_terminal=True))
    with screen.Screen() as shown:
        before = len(out.getvalue())
        with shown.suspended():
            left = out.getvalue()[before:]
        entered = out.getvalue()[before + len(left) :]
    assert LEAVE in left
    assert ENTER in entered
    assert LEAVE not in entered
    assert out.getvalue().endswith(LEAVE)
