# SPDX-License-Identifier: Apache-2.0
"""Retention that the store enforces: Object Lock of S3, object retention of GCS.

The end of a retention is computed on the store's clock, which the Date header of its responses shows.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from swansong.bounds import BoundsError, text

from swansong_bucket.errors import Forbidden, Locked, NotFound, Permanent
from swansong_bucket.stores.clock import StoreClock

LockMode = Literal["governance", "compliance"]
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Lock:
    """The retention of new objects."""

    mode: LockMode
    """``governance``: a special right can end it early.  ``compliance``: nothing can."""
    period_s: Callable[[str], float]
    """Returns the period for a key; 0: the object gets no retention."""


def stamp(unix_s: float) -> str:
    """The instant as ISO 8601, in seconds."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def instant(value: Any, field: str) -> float:
    """The Unix time of an ISO 8601 instant.

    Raises:
        BoundsError: the value is not an instant with a time zone.
    """
    stated = text(value, field, 40)
    try:
        found = datetime.fromisoformat(stated)
    except ValueError as error:
        raise BoundsError(f"{field}: {error}") from None
    if found.tzinfo is None:
        raise BoundsError(f"{field} {stated} has no time zone")
    return found.timestamp()


class Retention(abc.ABC):
    """The retention of the objects of one bucket.

    Args:
        lock: retention of new objects; None: they get none.
        has_lock: reads whether objects of the bucket can have a retention.
        clock: of the store.
    """

    _right: ClassVar[str]
    """The fix for a role without the right to set a retention."""
    _enable: tuple[str, str]
    """The fix for a bucket whose objects cannot have a retention, and its command."""
    _disabled: ClassVar[type[Permanent]]
    """The class of the error for such a bucket; a subclass has another cause."""

    def __init__(self, lock: Lock | None, has_lock: Callable[[], bool], clock: StoreClock) -> None:
        self._lock = lock
        self._has_lock = has_lock
        self._clock = clock
        self._may_lock: bool | None = None
        """None: not known yet."""

    def expect_none(self, key: str) -> None:
        """Raise Locked if a retention protects the object.

        Also in a bucket with versions, where a delete would hide the object, and its bytes would remain.
        """
        until = self.until(key)
        if until is not None and until > self._clock.now_unix_s():
            raise Locked(
                f"delete {key}: the store keeps the object until {stamp(until)}",
                hint="Delete it after that date; store.lock_days sets the retention of new objects",
                until_unix_s=until,
            )

    def until(self, key: str) -> float | None:
        """End of the retention of an object in Unix seconds; None: it has none, or does not exist."""
        return self._until(key) if self.may_lock() else None

    def may_lock(self) -> bool:
        """Whether objects of the bucket may have a retention; asks the store once."""
        if self._may_lock is None:
            try:
                self._may_lock = self._has_lock()
            except NotFound:
                raise
            except Permanent:  # no right to read the setting
                self._may_lock = True
        return self._may_lock

    def headers(self, key: str) -> dict[str, str]:
        """Headers of the request that creates an object."""
        until = self._end(key)
        if self._lock is None or until is None:
            return {}
        return self._headers(self._lock.mode.upper(), stamp(until))

    def extend(self, key: str) -> float | None:
        """Extend the retention of an object to that of a new one; returns its end."""
        until = self._end(key)
        if self._lock is None or until is None:
            return None
        with self.explained(key):
            self._extend(key, self._lock.mode, stamp(until))
        return until

    @contextmanager
    def explained(self, key: str) -> Iterator[None]:
        """Add the fix to the error of a request that gives an object a retention."""
        try:
            yield
        except Permanent as error:
            if self._period_s(key):
                if isinstance(error, Forbidden):
                    error.hint = f"{error.hint}. {self._right}".removeprefix(". ")
                elif type(error) is self._disabled and not error.hint:
                    error.advise(*self._enable)
            raise

    @abc.abstractmethod
    def _headers(self, mode: str, until: str) -> dict[str, str]:
        """Headers of the request that creates an object with this mode and end of its retention."""

    @abc.abstractmethod
    def _extend(self, key: str, mode: LockMode, until: str) -> None:
        """Set mode and end of the retention of an object."""

    @abc.abstractmethod
    def _until(self, key: str) -> float | None:
        """Read the end of the retention of an object."""

    def _period_s(self, key: str) -> float:
        return 0.0 if self._lock is None else self._lock.period_s(key)

    def _end(self, key: str) -> float | None:
        """End of the retention of an object that is written now; None: it gets none."""
        period_s = self._period_s(key)
        return self._clock.now_unix_s() + period_s if period_s else None
