# SPDX-License-Identifier: Apache-2.0
"""How far the clock of this VM is from that of a server, by the Date of its answer."""

from __future__ import annotations

from email.utils import parsedate_to_datetime

from swansongd.doctor import fixes
from swansongd.doctor.findings import Judgement, failure, ok, skipped, warning

WARNING_S = 5.0
FAILURE_S = 600.0
"""S3 refuses signatures beyond a quarter of an hour."""
_MEND = fixes.as_root("timedatectl set-ntp true")


def skew_s(date: str, asked_wall_s: float, answered_wall_s: float) -> float | None:
    """Seconds by which this VM is ahead (or behind, when negative); None where the Date is none.

    Zero where the difference can be explained: Date names a second, and the answer took its time.
    """
    try:
        date_s = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
    if asked_wall_s > date_s + 1:
        return asked_wall_s - date_s - 1
    return min(answered_wall_s - date_s, 0.0)


def judge_skew(skew_s: float | None, server: str) -> Judgement:
    """Whether the clock is good enough for deadlines and for signatures."""
    if skew_s is None:
        return skipped(f"{server} shows no Date")
    found = f"{abs(skew_s):.0f} s {'behind' if skew_s < 0 else 'ahead of'} {server}"
    if abs(skew_s) >= FAILURE_S:
        return failure(f"{found}: signatures will be refused", _MEND)
    if abs(skew_s) >= WARNING_S:
        return warning(found, _MEND)
    return ok(f"agrees with {server} to {WARNING_S:g} s")
