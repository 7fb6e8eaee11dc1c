# SPDX-License-Identifier: Apache-2.0
"""The time of signatures, if the clock of this VM is wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from swansong_bucket.errors import Permanent
from swansong_bucket.stores.clock import SigningClock
from swansong_bucket.stores.remote import translated

pytestmark = pytest.mark.fault("O06")
HOUR = timedelta(hours=1)


def test_requests_in_parallel_are_all_signed_again() -> None:
    """Both were signed before the first refusal; after it, a refusal has another cause."""
    clock = SigningClock()
    signed = clock.now()
    date = format_datetime(signed + HOUR, usegmt=True)
    assert clock.explains(signed, date)
    assert clock.explains(signed, date)
    assert not clock.explains(clock.now(), date)
    assert abs(clock.now() - datetime.now(UTC) - HOUR) < timedelta(seconds=60)


@pytest.mark.parametrize("date", ["", "yesterday", "Fri, 31 Dec 9999 23:59:59 GMT", "9" * 9000])
def test_no_date_of_a_store_is_an_error(date: str) -> None:
    """The time of signatures stays as it is."""
    clock = SigningClock()
    assert not clock.explains(clock.now(), date)
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(seconds=60)


@pytest.mark.parametrize(
    "message",
    [
        "Signature expired: 20300101T000000Z is now earlier than 20300101T004500Z",
        "invalid_grant: Invalid JWT: Token must be a short-lived token and in a reasonable timeframe.",
        "AADSTS700024: Client assertion is not within its valid time range.",
    ],
)
def test_credentials_that_were_refused_for_their_time_name_the_clock(message: str) -> None:
    """The SDKs sign these requests with the clock of the VM; the hint has the command that sets it."""
    with (
        pytest.raises(Permanent) as caught,
        translated("credentials", lambda _error, text: Permanent(text, hint="set credentials")),
    ):
        raise ValueError(message)
    assert "timedatectl" in caught.value.hint
