# SPDX-License-Identifier: Apache-2.0
"""Tables and progress bars.  rich is slow to import, so commands import this module only for a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # main() handles it; the method of the base class would exit


def console() -> Console:
    """Standard output for tables; wide without a terminal, so that no cell is truncated."""
    return _Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 240)


def bar(*, counts_bytes: bool) -> Progress:
    """A progress bar on standard error, of bytes or of objects."""
    columns = (DownloadColumn(), TransferSpeedColumn()) if counts_bytes else (MofNCompleteColumn(),)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
