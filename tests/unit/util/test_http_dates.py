# SPDX-License-Identifier: Apache-2.0
"""Dates of foreign responses, which deadlines and ages depend on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.util.http1 import http_date

WORDS = [
    "Sun,",
    "Sun",
    "06",
    "6",
    "Nov",
    "nov-",
    "94",
    "1994",
    "99999",
    "08:49:37",
    "08:49",
    "8.49",
    "GMT",
]
WORDS += ["-0000", "+0000", "+9999", "-", ",", ":", "", "0", "-1", "\u0661"]


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC+11")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
@pytest.mark.parametrize("zone", ["GMT", "+0000", "-0000"])
def test_a_date_does_not_depend_on_the_zone_of_the_vm(zone: str) -> None:
    """Python returns a time without a zone for -0000, which astimezone() takes for local time."""
    instant = datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)
    assert http_date(f"Sun, 06 Nov 1994 08:49:37 {zone}") == instant


@given(st.text() | st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join))
def test_any_text_is_an_instant_in_utc_or_none(text: str) -> None:
    """No header of a server raises anything."""
    found = http_date(text)
    assert found is None or found.tzinfo is UTC
