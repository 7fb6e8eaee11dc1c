# SPDX-License-Identifier: Apache-2.0
"""Credentials are renewed before a flush needs them, and used until they expire."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from botocore.credentials import RefreshableCredentials
from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Transient
from swansong_bucket.stores.credentials import CredentialCache
from swansong_bucket.stores.remote import DEFAULT_LIMITS
from swansong_bucket.stores.s3.access import S3Access
from swansong_bucket.stores.warm import Warmer

from testkit.store_backends import Cloud
from testkit.waiting import until


def test_credentials_are_used_until_they_expire() -> None:
    """``renew`` renews them in their last 15 minutes, as botocore does; ``get`` only after them."""
    calls: list[datetime] = []
    now = datetime.now(UTC)
    answers = iter([timedelta(minutes=8), None, timedelta(hours=1)])

    def fetch() -> dict[str, str]:
        calls.append(now)
        life = next(answers)
        if life is None:
            raise OSError("the metadata service does not respond")
        expiry = (now + life).isoformat()
        return {"access_key": "a", "secret_key": "b", "token": "c", "expiry_time": expiry}

    found = RefreshableCredentials(
        "a", "b", "c", now - timedelta(hours=1), fetch, "test", time_fetcher=lambda: now
    )
    store = S3Access(StoreAccess(url="s3://bucket"), DEFAULT_LIMITS, lambda: None)
    cache = CredentialCache(
        "S3",
        load=lambda: found,
        fetch=store._fetch_credentials,
        has_expired=store._has_expired,
    )
    first = cache.get()
    assert len(calls) == 1, "expired credentials are replaced"
    assert cache.get() == first
    assert len(calls) == 1, "valid credentials are used"
    with pytest.raises(Transient, match="does not respond"):
        cache.renew()
    assert cache.get() == first
    cache.renew()
    cache.renew()
    assert len(calls) == 3, "credentials that last are not renewed"


# ---------------------------------------------------------------- the thread


def test_warmer_calls_at_the_start_and_on_request(cloud: Cloud) -> None:
    """The first call is at the start, the next one at a notice, long before the interval ends."""
    stop = threading.Event()
    warmer = Warmer(cloud.open(), stop=stop, interval_s=3600)
    warmer.start()
    until(lambda: len(cloud.requests()) == 1, what="the first time")
    warmer.now()
    until(lambda: len(cloud.requests()) == 2, what="the second time")
    stop.set()
    warmer.now()


def test_warmer_survives_an_outage(cloud: Cloud) -> None:
    """After failures it retries soon, and returns to its interval after a success."""
    stop = threading.Event()
    cloud.order("outage", seconds=3600)
    warmer = Warmer(cloud.open(), stop=stop, interval_s=3600, retry_s=0.1)
    warmer.start()
    until(lambda: len(cloud.requests()) >= 3, what="more than one time")
    cloud.order("clear")
    until(cloud.requests, what="the time that works")
    stop.set()
    warmer.now()
