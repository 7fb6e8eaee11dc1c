# SPDX-License-Identifier: Apache-2.0
"""One look at the state of the daemon: the rows, then lists of the sources, GPUs and trainers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from swansongd.observe.status import DaemonStatus, GpuHealthStatus, HealthStatus, TrainerStatus
from swansongd.trainers.unconnected import Unconnected

from swansong_tools.commands.terminal import console, table
from swansong_tools.commands.view.rows import Row, level_of, rows, word
from swansong_tools.units import human_s

_LISTINGS = (
    ("SOURCE", "sources", ("name", "health", "reason", "for_s")),
    ("GPU", "gpus", ("index", "name", "health", "reason", "for_s")),
    ("TRAINER", "trainers", ("pid", "rank", "step")),
)


def print_status(
    status: DaemonStatus, others: Sequence[Unconnected] = (), jobs: Sequence[Path] = ()
) -> None:
    """Print a status on standard output.

    Args:
        others: processes that are not connected.
        jobs: configurations of the other jobs of this VM.
    """
    out = console()
    out.print(_summary([*rows(status, others), *_jobs(jobs)]))
    for listing in listings(status):
        out.print()
        out.print(listing)


def _jobs(jobs: Sequence[Path]) -> Iterator[Row]:
    for job in jobs:
        yield Row("other job", f"swansong --config {job} status")


def _summary(found: Sequence[Row]) -> Table:
    summary = table()
    summary.add_column(style="bold", no_wrap=True)
    summary.add_column(overflow="fold")
    for row in found:
        summary.add_row(row.label, row.text, style=row.style)
    return summary


def listings(status: DaemonStatus) -> list[Table]:
    """The tables of the sources, GPUs and trainers, without empty ones."""
    found = ((title, columns, getattr(status, key)) for title, key, columns in _LISTINGS)
    return [_listing(title, columns, each) for title, columns, each in found if each]


def _listing(
    title: str,
    columns: tuple[str, ...],
    found: Sequence[HealthStatus | GpuHealthStatus | TrainerStatus],
) -> Table:
    names = [column.removesuffix("_s").upper() for column in columns]
    heads = (f"{title} {names[0]}", *names[1:])
    listing = table(*heads, left=heads, wraps="REASON")
    for item in found:
        cells = ((column, getattr(item, column)) for column in columns)
        shown = (human_s(cell) if column.endswith("_s") else word(cell) for column, cell in cells)
        listing.add_row(*shown, style=level_of(item))
    return listing
