# SPDX-License-Identifier: Apache-2.0
"""Tables and progress bars.  rich is slow to import, so commands import this module only for a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection
from contextlib import suppress

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

_WIDTH, _WIDE = 80, 400


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # main() handles it; the method of the base class would exit


def console(*, is_wide: bool = False) -> Console:
    """Standard output for tables: as wide as the terminal, and 80 columns without one.

    Args:
        is_wide: no cell is truncated.
    """
    # A terminal without Unicode shows question marks.  Some streams cannot change.
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):
            sys.stdout.reconfigure(errors="replace")
    width = _WIDE if is_wide else None if sys.stdout.isatty() else _WIDTH
    return _Console(highlight=False, markup=False, width=width)


def table(*heads: str, left: Collection[str] = (), wraps: str = "") -> Table:
    """A table without lines, whose columns are right-aligned and keep their width.

    Args:
        heads: of the columns; without any, the table has no line of heads.
        left: left-aligned columns.
        wraps: the column that gives way.
    """
    made = Table(box=None, pad_edge=False, show_header=bool(heads))
    for head in heads:
        justify: JustifyMethod = "left" if head in (*left, wraps) else "right"
        made.add_column(head, justify=justify, no_wrap=head != wraps)
    return made


def bar(text: Callable[[], str]) -> Progress:
    """A progress bar on standard error.

    Args:
        text: the words behind the bar, at any time.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        _Words(text),
        console=Console(stderr=True, highlight=False, markup=False),
        # The console of the bar is standard error: output for a file must not go there.
        redirect_stdout=sys.stdout.isatty(),
        refresh_per_second=4,
        expand=True,
        transient=True,
    )


class _Words(ProgressColumn):
    """The words of the command, fresh at each refresh: the rate falls while nothing moves."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:  # noqa: ARG002 - there is one task
        return Text(self._text())
