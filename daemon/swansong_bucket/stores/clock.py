# SPDX-License-Identifier: Apache-2.0
"""The store's clock, which the Date header of its responses shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from swansong_bucket.errors import Transient
from swansong_bucket.stores.http.client import Response
from swansong_bucket.util.http1 import http_date

CLOCK_HINT = "The clock of this VM is wrong: sudo timedatectl set-ntp true, or see swansong doctor"
_CLOCK_WORDS = (
    "Signature expired", "Signature not yet current", "RequestExpired",  # AWS STS
    "in a reasonable timeframe",  # Google's OAuth 2.0 server
    "AADSTS700024",  # Microsoft Entra ID
)  # fmt: skip
_VALID_S = 3600.0
_TOLERANCE = timedelta(minutes=5)
"""Stores accept signatures of the last and of the next 15 minutes."""
_CORRECTION_MAX = timedelta(days=1)
"""A false store gets no signatures that are valid later."""


def is_clock_problem(message: str) -> bool:
    """Whether the server of the credentials refused a signature for its time.  No SDK corrects it."""
    return any(word in message for word in _CLOCK_WORDS)


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
        if self._seen is None or time.monotonic() - self._seen[1] > _VALID_S:
            self._ask()
        if self._seen is not None:
            date, mono_s = self._seen
            stated = http_date(date)
            if stated is not None:
                return stated.timestamp() + time.monotonic() - mono_s
        raise Transient("the responses of the store have no valid Date header")


class SigningClock:
    """The time of signatures: this VM's clock, until the store shows that it is wrong.

    As the SDKs of AWS for most languages do; botocore has no such correction (boto/boto3#1252).
    """

    def __init__(self) -> None:
        self._correction = timedelta()

    def now(self) -> datetime:
        """The present time."""
        return datetime.now(UTC) + self._correction

    def answered(self, send: Callable[[datetime], Response]) -> Response:
        """The response to a request, which is sent once more if its signature was refused for its time.

        Args:
            send: signs the request with this time, and sends it.
        """
        signed = self.now()
        response = send(signed)
        if response.status == 403 and self.explains(signed, response.headers.get("date", "")):
            response = send(self.now())
        return response

    def explains(self, signed: datetime, date: str) -> bool:
        """Whether the time in a signature differs from the store's date, which the next one has."""
        stated = http_date(date)
        if stated is None or abs(stated - signed) < _TOLERANCE:
            return False
        correction = stated - datetime.now(UTC)
        if abs(correction) > _CORRECTION_MAX:
            return False
        self._correction = correction
        return True
