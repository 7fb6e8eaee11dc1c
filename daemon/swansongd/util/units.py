# SPDX-License-Identifier: Apache-2.0
"""Bytes and durations as people read them."""

from __future__ import annotations


def human_bytes(size_bytes: float) -> str:
    """Format bytes as ``1.2 GB``: up to three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


def human_s(seconds: float) -> str:
    """Format a duration as ``4.2 s``, ``12 min``, ``3.5 h`` or ``2 d``."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def human_age(seconds: float) -> str:
    """Format an age as ``45 s ago``, ``3.2 h ago`` or ``12 d ago``."""
    amount, unit = human_s(seconds).split()
    short = f"{float(amount):.0f}" if float(amount) >= 10 else f"{float(amount):.2g}"
    return f"{short} {unit} ago"
