# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: lines that stay, one live line below them on a terminal, and tables at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

_PLAIN_INTERVAL_S = 5.0
"""Where there is no live line, its text becomes a line of its own this often."""


class Screen:
    """Times are seconds since the demo began."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live: Status | None = None
        self._began = time.time()
        self._plain_due = self._began + _PLAIN_INTERVAL_S

    def chapter(self, title: str) -> None:
        self._console.print()
        self._print(Text(title, "bold"))

    def say(self, who: str, text: str, *, at: float | None = None, style: str = "") -> None:
        """One line that stays; ``at`` is the wall-clock time at which it happened, if not now."""
        seconds = (time.time() if at is None else at) - self._began
        self._plain_due = time.time() + _PLAIN_INTERVAL_S
        self._print(
            Text.assemble((f"{seconds:6.1f} s  ", "dim"), (f"{who:<11}", "cyan"), (text, style))
        )

    def live(self, who: str, text: str) -> None:
        """What is going on this moment."""
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
        """No live line until there is something to say again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """A short column and a long one; numbers to the right."""
        for head, text in rows:
            cell = f"{head:>8}" if head[:1].isdecimal() else f"{head:<9}"
            self._print(Text.assemble("  ", (cell, "cyan"), "  ", text))

    def check(self, text: str, *, kept: bool) -> bool:
        """One promise, and whether it was kept; returns that."""
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
