# SPDX-License-Identifier: Apache-2.0
"""The live view on a terminal, on its alternate screen: the text from before comes back at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import ConsoleDimensions
from rich.live import Live

from swansong_tools.commands.terminal import console
from swansong_tools.commands.view.live import Canvas, Frame, view
from swansong_tools.commands.view.poller import Display, Poll
from swansong_tools.commands.view.recent import PollHistory

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""A character of a status may be wider than expected: the terminal then cuts its line."""


class Screen(Display):
    """Draws the newest status, with the figures of the ones before."""

    def __init__(self) -> None:
        self._console = console()
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._history = PollHistory()
        self._is_shown = False

    def take(self, poll: Poll) -> None:
        self._history.take(poll)

    def draw(self) -> None:
        width, height = _size()
        self._console.size = ConsoleDimensions(width, height)
        frame = Frame(self._history, time.monotonic(), time.time())
        canvas = Canvas(width, height, is_ascii=self._console.options.ascii_only)
        self._live.update(view(frame, canvas), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._write(_NO_WRAP)
        self._is_shown = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._is_shown = False
            self._write(_WRAP)
            self._live.stop()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Show the text from before within this context, and after an exception in it."""
        self.__exit__()
        yield
        self.__enter__()

    def _write(self, code: str) -> None:
        self._console.file.write(code)
        self._console.file.flush()


def _size() -> tuple[int, int]:
    """Columns and lines of the terminal now; rich would prefer the variables COLUMNS and LINES of a shell."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    return columns or 80, lines or 24  # a serial console knows no size
