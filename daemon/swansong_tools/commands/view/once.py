# SPDX-License-Identifier: Apache-2.0
"""One look at the state of the daemon: the rows, then lists of the sources, GPUs and trainers."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from swansong_tools.commands.terminal import console
from swansong_tools.commands.view.rows import PLAIN, level_of, rows
from swansong_tools.commands.view.values import seconds, tables, word

_LISTINGS = (
    ("SOURCE", "sources", ("name", "health", "reason", "for_s")),
    ("GPU", "gpus", ("index", "name", "health", "reason", "for_s")),
    ("TRAINER", "trainers", ("pid", "rank", "step")),
)


def print_report(report: dict[str, Any]) -> None:
    """Print a report on standard output."""
    out = console()
    out.print(_summary(report))
    for listing in listings(report):
        out.print()
        out.print(listing)


def _summary(report: dict[str, Any]) -> Table:
    summary = Table(box=None, pad_edge=False, show_header=False)
    summary.add_column(style="bold", no_wrap=True)
    summary.add_column(overflow="fold")
    for row in rows(report):
        summary.add_row(row.label, row.text, style=row.style)
    return summary


def listings(report: dict[str, Any]) -> list[Table]:
    """The tables of the sources, GPUs and trainers, without empty ones."""
    found = ((title, columns, tables(report.get(key))) for title, key, columns in _LISTINGS)
    return [_listing(title, columns, each) for title, columns, each in found if each]


def _listing(title: str, columns: tuple[str, ...], found: list[dict[str, Any]]) -> Table:
    listing = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        name = column.removesuffix("_s").upper()
        listing.add_column(f"{title} {name}" if index == 0 else name, no_wrap=True)
    for row in found:
        cells = (
            seconds(row.get(column)) if column.endswith("_s") else word(row.get(column))
            for column in columns
        )
        listing.add_row(*cells, style=level_of(row) or PLAIN)
    return listing
