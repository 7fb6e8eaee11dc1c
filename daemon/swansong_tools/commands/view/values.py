# SPDX-License-Identifier: Apache-2.0
"""Values of a status report as words.  A report is from outside: nothing here trusts a type or a range."""

from __future__ import annotations

from typing import Any

from swansong_bucket.util.printable import printable

from swansong_tools.units import human_bytes, human_s

ROWS_MAX = 100
"""Entries of one list that are shown."""
NUMBER_MAX = 1e18


def number(value: Any) -> float | None:
    """A number that arithmetic keeps finite; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= NUMBER_MAX else None  # a NaN is not


def table(value: Any) -> dict[str, Any]:
    """A table; empty for anything else."""
    return value if isinstance(value, dict) else {}


def tables(value: Any) -> list[dict[str, Any]]:
    """The tables of a list; empty for anything else."""
    found = value if isinstance(value, list) else []
    return [row for row in found[:ROWS_MAX] if isinstance(row, dict)]


def word(value: Any) -> str:
    return "-" if value is None or value == "" else str(printable(value))


def seconds(value: Any) -> str:
    found = number(value)
    return "?" if found is None else human_s(found)


def size(value: Any) -> str:
    found = number(value)
    return "?" if found is None else human_bytes(found)


def share(value: Any) -> float:
    """A number from 0 to 1; 0 for anything else."""
    return min(1.0, max(0.0, number(value) or 0.0))
