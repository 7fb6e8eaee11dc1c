# SPDX-License-Identifier: Apache-2.0
"""The store rows of the fault matrix: S3 and GCS with broken connections, refusals and long outages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from swansong_bucket.errors import Exists, Transient
from swansong_bucket.stores.base import Body, ObjectInfo, ObjectStore
from swansong_bucket.stores.checksums import crc32c
from swansong_bucket.stores.remote import WireLimits

from testkit.emulators.fault_proxy import FaultProxy, Way
from testkit.store_backends import (
    MIB,
    OURS,
    Cloud,
    get_range,
    retrying,
)

CONTENT = os.urandom(2 * MIB + 17)
SMALL = os.urandom(200_000)
LIMITS = WireLimits(connect_timeout_s=1.0, read_timeout_s=0.5)


def careful(cloud: Cloud, **options: object) -> ObjectStore:
    return retrying(cloud.open(limits=LIMITS), budget_s=30.0, **options)


@pytest.mark.fault("O10")
def test_a_race_of_two_creates(cloud: Cloud) -> None:
    """409: the store could not decide the race.  After retries exactly one of them has the key."""
    store = careful(cloud)
    race = {"status": 409, "code": "ConditionalRequestConflict", "match": ""}
    cloud.order("answer", **race, times=2)
    store.put("claim", b"ours", if_absent=True)
    cloud.order("answer", **race)
    with pytest.raises(Exists):
        store.put("claim", b"theirs", if_absent=True)
    cloud.order("answer", **race, carry_out=1)  # a lost reply: the caller reads it back
    with pytest.raises(Exists):
        store.put("other", b"ours", if_absent=True)
    assert (store.get("claim"), store.get("other")) == (b"ours", b"ours")
    cloud.order("answer", **race, carry_out=1)
    store.create("shard", Body(CONTENT))
    assert get_range(store, "shard", 0, len(CONTENT)) == CONTENT


@pytest.mark.fault("O17")
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_path_that_drops_large_packets(open_cloud: Callable[[str], Cloud], way: Way) -> None:
    """Large requests stall: detected in time, nothing counts as stored, and it ends with the fault."""
    cloud = open_cloud("gcs")
    with FaultProxy(cloud.server.url) as proxy:
        through = cloud.open(proxy.url, limits=LIMITS)
        store = retrying(through, budget_s=30.0)
        store.create("old", Body(CONTENT))
        proxy.stall(way, 1400)
        if way == "up":
            assert store.head("old") == ObjectInfo("old", len(CONTENT)), (
                "small requests get through"
            )
        give_up = time.monotonic() + 2
        limited = retrying(through, give_up_mono_s=lambda: give_up)
        large: dict[Way, Callable[[], object]] = {
            "up": lambda: limited.create("new", Body(CONTENT)),
            "down": lambda: get_range(limited, "old", 0, len(CONTENT)),
        }
        with pytest.raises(Transient):
            large[way]()
        assert time.monotonic() - give_up < 20  # without its limit it would last for 30 s
        assert proxy.hits
        proxy.forward()
        assert store.head("new") is None
        store.create("new", Body(CONTENT))
        assert get_range(store, "new", 0, len(CONTENT)) == CONTENT


@pytest.mark.fault("O11")
def test_a_chunk_whose_reply_was_lost(cloud: Cloud) -> None:
    """The retry is refused, the object is compared, and it counts as stored."""
    store = careful(cloud)
    cloud.order("clear")
    cloud.order("answer", status=503, method="PUT", match="shard", carry_out=1)
    moved: list[int] = []
    store.create("shard", Body(CONTENT, moved.append))
    assert moved == [MIB, MIB, 17, -len(CONTENT), MIB, MIB, 17]
    asked = [method for method, target in cloud.requests() if "shard" in target]
    assert asked == ["PUT", "PUT", "HEAD" if cloud.is_s3 else "GET"]
    assert get_range(store, "shard", 0, len(CONTENT)) == CONTENT


@pytest.mark.fault("O13")
@pytest.mark.parametrize("size_bytes", [1000, len(CONTENT)])
@pytest.mark.parametrize("cloud", OURS, indirect=True)
def test_changed_bytes_create_no_object(cloud: Cloud, size_bytes: int) -> None:
    """Over plain HTTP the signature covers the bytes; elsewhere the CRC32C in a header does."""
    store = cloud.open()
    cloud.order("flip", match="chunk")
    code = "XAmzContentSHA256Mismatch" if cloud.name == "s3" else "BadDigest"
    with pytest.raises(Transient, match=code):
        store.create("chunk", Body(CONTENT[:size_bytes]))
    assert store.head("chunk") is None


@pytest.mark.fault("O13")
@pytest.mark.parametrize("cloud", ["s3", "gcs"], indirect=True)
def test_bytes_that_change_after_their_checksum_create_no_object(cloud: Cloud) -> None:
    """The request has the CRC32C of the bytes as they were read: memory can fail before they are sent."""
    store = cloud.open()
    with pytest.raises(Transient, match="BadDigest"):
        store.create("chunk", Body(SMALL, crc32c=crc32c(b"as they were read")))
    assert store.head("chunk") is None
    store.create("chunk", Body(SMALL, crc32c=crc32c(SMALL)))
