# SPDX-License-Identifier: Apache-2.0
"""Clock skew of this VM against a server, from the Date header of its answer."""

from __future__ import annotations

from email.utils import parsedate_to_datetime

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Judgement, failure, ok, skipped, warning

WARNING_S = 5.0
FAILURE_S = 600.0
"""Below the 15 minutes at which S3 refuses signatures."""
_FIX = fixes.as_root("timedatectl set-ntp true")


def skew_s(date: str, asked_wall_s: float, answered_wall_s: float) -> float | None:
    """Seconds by which this VM is ahead, negative if behind; None if ``date`` is not valid.

    Date has a resolution of one second, and the answer has a latency.  A difference within both is zero.
    """
    try:
        date_s = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
    if asked_wall_s > date_s + 1:
        return asked_wall_s - date_s - 1
    return min(answered_wall_s - date_s, 0.0)


def judge_skew(skew_s: float | None, server: str) -> Judgement:
    """Whether the clock is accurate enough for deadlines and signatures."""
    if skew_s is None:
        return skipped(f"{server} sent no Date header")
    found = f"{abs(skew_s):.0f} s {'behind' if skew_s < 0 else 'ahead of'} {server}"
    if abs(skew_s) >= FAILURE_S:
        return failure(f"{found}: the store will refuse signatures", _FIX)
    if abs(skew_s) >= WARNING_S:
        return warning(found, _FIX)
    return ok(f"within {WARNING_S:g} s of {server}")
