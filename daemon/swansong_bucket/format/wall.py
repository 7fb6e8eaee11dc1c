# SPDX-License-Identifier: Apache-2.0
"""Wall-clock times in objects: UTC with milliseconds, such as ``2026-11-22T16:50:00.123Z``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import overload

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.util.forms import Kind

WALL_S_MAX = 4_102_444_800.0
"""The year 2100."""


@overload
def text(wall_s: float) -> str: ...
@overload
def text(wall_s: float | None) -> str | None: ...
def text(wall_s: float | None) -> str | None:
    """A time as text; a clock beyond the bounds is cut to them."""
    if wall_s is None:
        return None
    moment = datetime.fromtimestamp(min(max(0.0, wall_s), WALL_S_MAX), UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def required_s(value: object, field: str) -> float:
    """Seconds since 1970 of a time as text.

    Raises:
        BoundsError: it is not a time, or is not between 1970 and 2100.
    """
    shown = bounds.text(value, field, bounds.ID_CHARS_MAX)
    try:
        moment = datetime.fromisoformat(shown)
        seconds = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError, OSError):
        raise BoundsError(f"{field} is {bounds.shown(shown)}, not a time") from None
    return bounds.number(seconds, field, 0.0, WALL_S_MAX)


def instant_s(text: str) -> float | None:
    """As :func:`required_s`; None if the text is not a time that a record can have."""
    try:
        return required_s(text, "time")
    except BoundsError:
        return None


INSTANT = Kind(required_s, text)


def utc_now() -> str:
    """The wall clock in UTC, as text; for people."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
