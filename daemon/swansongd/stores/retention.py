# SPDX-License-Identifier: Apache-2.0
"""Retention that the store enforces: Object Lock of S3, object retention of GCS.

The end of a retention is computed on the store's clock, which the Date header of its responses shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

from swansongd.errors import Locked, Transient

LockMode = Literal["governance", "compliance"]
DAY_S = 86400.0
_CLOCK_VALID_S = 3600.0


@dataclass(frozen=True, slots=True)
class Lock:
    """The retention of new objects."""

    mode: LockMode
    """``governance``: a special right can end it early.  ``compliance``: nothing can."""
    period_s: Callable[[str], float]
    """Returns the period for a key; 0: the object gets no retention."""


class StoreClock:
    """The store's clock.

    Args:
        ask: sends a request, whose response is observed.
    """

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._seen: tuple[str, float] | None = None

    def observe(self, date: str) -> None:
        """Note the Date header of a response that has just arrived."""
        if date:
            self._seen = date, time.monotonic()

    def now_unix_s(self) -> float:
        """The present time; sends a request if the store has sent none for an hour."""
        if self._seen is None or time.monotonic() - self._seen[1] > _CLOCK_VALID_S:
            self._ask()
        if self._seen is not None:
            date, mono_s = self._seen
            try:
                stated = parsedate_to_datetime(date)
            except (ValueError, OverflowError):
                pass
            else:
                stated = stated.replace(tzinfo=stated.tzinfo or UTC)
                return stated.timestamp() + time.monotonic() - mono_s
        raise Transient("the responses of the store have no valid Date header")


def stamp(unix_s: float) -> str:
    """The instant as ISO 8601, in seconds."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def instant(text: str) -> float:
    """The Unix time of an ISO 8601 instant.

    Raises:
        ValueError: the text is not an instant with a time zone.
    """
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"{text:.40} has no time zone")
    return found.timestamp()


def locked(key: str, until_unix_s: float | None) -> Locked:
    """The error of a delete that a retention forbids."""
    until = "a date that the store does not return" if until_unix_s is None else stamp(until_unix_s)
    return Locked(
        f"delete {key}: the store keeps the object until {until}",
        hint="Delete it after that date; store.lock_days sets the retention of new objects",
        until_unix_s=until_unix_s,
    )
