# SPDX-License-Identifier: Apache-2.0
"""Bytes, durations and times as a person reads them."""

from __future__ import annotations

from datetime import UTC, datetime


def human_bytes(size_bytes: float) -> str:
    """Format bytes as ``1.2 GB``: up to three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{_digits(size_bytes, 4)} TB"


def human_s(seconds: float, digits: int = 3) -> str:
    """Format a duration as ``4.2 s``, ``12 min``, ``3.5 h`` or ``2 d``; below a millisecond ``0 s``."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{_digits(seconds / size_s, digits)} {unit}"
    return f"{_digits(round(seconds, 3), digits)} s"


def human_age(seconds: float) -> str:
    """Format an age as ``45 s``, ``3.2 h`` or ``12 d``."""
    return human_s(seconds, 2)


def _digits(amount: float, count: int) -> str:
    """A number with this many digits; never one with an exponent, such as 1e+03."""
    rounded = float(f"{amount:.{count}g}")
    return f"{amount:,.0f}" if abs(rounded) >= 10**count else f"{rounded:g}"


def human_span(seconds: float) -> str:
    """Format a duration in at most two units: ``0.31 s``, ``78 s``, ``3 min 5 s``, ``2 h 57 min``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        large, small, units = 60, 1, ("min", "s")
    elif seconds < 2 * 86400:
        large, small, units = 60, 60, ("h", "min")
    else:
        large, small, units = 24, 3600, ("d", "h")
    whole, rest = divmod(round(seconds / small), large)
    return f"{whole} {units[0]} {rest} {units[1]}" if rest else f"{whole} {units[0]}"


def human_time(seconds: float) -> str:
    """Format a whole time on an axis as ``30 s``, ``2 min``, ``1 min 30 s`` or ``3 h 37 min``."""
    whole = round(abs(seconds))
    parts = []
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, whole = divmod(whole, size_s)
        if number:
            parts.append(f"{number} {unit}")
    return ("-" if seconds < 0 else "") + (" ".join(parts[:2]) or "0 s")


def counted(number: int, name: str) -> str:
    """A number of things, as ``1 step`` or ``1,200 steps``."""
    return f"{number} {name}" if number == 1 else f"{number:,} {name}s"


def minute(wall_s: float) -> str:
    """Format a wall-clock time as ``2026-11-22 16:50`` in UTC."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M")


def second(wall_s: float) -> str:
    """Format a wall-clock time as ``2026-11-22 16:50:00`` in UTC."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
