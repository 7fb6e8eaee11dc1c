# SPDX-License-Identifier: Apache-2.0
"""The output of the demo: permanent lines, one live line on a terminal, and tables at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

_PLAIN_INTERVAL_S = 5.0
"""Without a terminal, the text of the live line is printed at this interval."""


class Screen:
    """Prints lines with the seconds since the start of the demo."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live: Status | None = None
        self._began = time.time()
        self._plain_due = self._began + _PLAIN_INTERVAL_S

    def chapter(self, title: str) -> None:
        self._console.print()
        self._print(Text(title, "bold"))

    def say(self, who: str, text: str, *, at: float | None = None, style: str = "") -> None:
        """Print a permanent line; ``at`` is the wall-clock time of the event, by default now."""
        seconds = (time.time() if at is None else at) - self._began
        self._plain_due = time.time() + _PLAIN_INTERVAL_S
        self._print(
            Text.assemble((f"{seconds:6.1f} s  ", "dim"), (f"{who:<11}", "cyan"), (text, style))
        )

    def live(self, who: str, text: str) -> None:
        """Show the current activity in the live line."""
        if not self._console.is_terminal:
            if time.time() >= self._plain_due:
                self.say(who, text)
            return
        line = Text(f"{who}: {text}")
        if self._live is None:
            self._live = self._console.status(line)
            self._live.start()
        self._live.update(line)

    def quiet(self) -> None:
        """Remove the live line until the next call of :meth:`live`."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print rows of a short column and a long one; numbers are aligned to the right."""
        for head, text in rows:
            cell = f"{head:>8}" if head[:1].isdecimal() else f"{head:<9}"
            self._print(Text.assemble("  ", (cell, "cyan"), "  ", text))

    def check(self, text: str, *, kept: bool) -> bool:
        """Print a promise and whether it was kept; returns ``kept``."""
        word = ("  kept    ", "bold green") if kept else ("  BROKEN  ", "bold red")
        self._print(Text.assemble(word, text))
        return kept

    def fault(self, text: str, lines: Iterable[str]) -> None:
        self.quiet()
        for line in lines:
            self._print(Text(f"    {line}", "dim"))
        self._print(Text(f"demo: {text}", "bold red"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.quiet()
