# SPDX-License-Identifier: Apache-2.0
"""Retention that the store enforces, on each server that has it: Object Lock of S3, retention of GCS."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.client import Config
from swansong_bucket.config.sections import StoreConfig
from swansong_bucket.errors import Locked, NotFound, Permanent, Transient
from swansong_bucket.retention import locks
from swansong_bucket.stores.base import Body, ObjectInfo
from swansong_bucket.stores.retention import DAY_S, Lock, LockMode, StoreClock, instant, stamp

from testkit.store_backends import MIB, Cloud

OURS = ("s3-tls", "gcs")
SERVERS = (*OURS, "seaweedfs")
"""rclone has no Object Lock."""
DAYS = 30


def period_s(key: str) -> float:
    """Objects below ``kept/`` are locked."""
    return DAYS * DAY_S if key.startswith("kept/") else 0.0


def client_of(cloud: Cloud) -> Any:
    """boto3's client for a server of S3, plain or TLS."""
    return boto3.client(
        "s3",
        endpoint_url=cloud.server.url,
        region_name="us-east-1",
        verify=str(cloud.ca) if cloud.ca else None,
        config=Config(s3={"addressing_style": "path"}),
    )


def new_bucket(cloud: Cloud, *, lock: bool = True, versioning: bool = False) -> str:
    """A new bucket with retention; ``versioning`` is for GCS, S3 has it with Object Lock."""
    name = f"locks-{uuid.uuid4().hex[:12]}"
    if cloud.name.startswith("gcs"):
        cloud.order("bucket", name=name, retention=int(lock), versioning=int(versioning))
    elif cloud.name.startswith("s3"):
        cloud.order("bucket", name=name, lock=int(lock))
    else:
        client_of(cloud).create_bucket(Bucket=name, ObjectLockEnabledForBucket=lock)
    return name


def opened(cloud: Cloud, bucket: str, mode: LockMode = "governance") -> Any:
    return cloud.open(bucket=bucket, lock=Lock(mode, period_s))


@pytest.fixture(params=SERVERS)
def locking(request: pytest.FixtureRequest, open_cloud: Callable[[str], Cloud]) -> Cloud:
    """Each server with retention."""
    return open_cloud(request.param)


@pytest.fixture(params=OURS)
def strict(request: pytest.FixtureRequest, open_cloud: Callable[[str], Cloud]) -> Cloud:
    return open_cloud(request.param)


def end_of(store: Any, key: str) -> float | None:
    """End of the retention of an object, as the store reads it before a delete."""
    found: float | None = store._retention.until(key)
    return found


def ends_in(until_unix_s: float | None, days: float) -> bool:
    return until_unix_s is not None and abs(until_unix_s - time.time() - days * DAY_S) < 60


@pytest.mark.fault("K01")
def test_new_objects_are_locked_by_their_key(locking: Cloud) -> None:
    """Each way to create an object gives it the retention of its key; other objects get none."""
    store = opened(locking, new_bucket(locking))
    store.put("kept/small", b"manifest", if_absent=True)
    store.create("kept/chunk", Body(b"chunk"))
    store.create("kept/large", Body(bytes(5 * MIB)))
    store.create("whole", Body(b"whole"))
    store.put("free", b"pin")
    for key in ("kept/small", "kept/chunk", "kept/large"):
        assert ends_in(end_of(store, key), DAYS), key
    assert end_of(store, "free") is None
    assert end_of(store, "whole") is None
    assert end_of(store, "kept/absent") is None
    assert store.get("kept/small") == b"manifest"


@pytest.mark.fault("K02")
def test_a_locked_object_is_not_deleted(locking: Cloud) -> None:
    """Delete raises Locked with the date, delete_many names the key; the object stays the current one."""
    store = opened(locking, new_bucket(locking))
    store.put("kept/a", b"1")
    store.put("free/b", b"2")
    with pytest.raises(Locked) as refused:
        store.delete("kept/a")
    assert ends_in(refused.value.until_unix_s, DAYS)
    assert stamp(refused.value.until_unix_s or 0) in str(refused.value)
    remaining = store.delete_many(list(store.list("")))
    assert list(remaining) == ["kept/a"]
    assert "until" in remaining["kept/a"]
    assert [info.key for info in store.list("")] == ["kept/a"]
    assert store.get("kept/a") == b"1"


@pytest.mark.fault("K03")
def test_a_retention_is_extended(locking: Cloud) -> None:
    """The end moves to a full period from now; an object without a period is not touched."""
    bucket = new_bucket(locking)
    short = locking.open(bucket=bucket, lock=Lock("governance", lambda _: DAY_S))
    short.put("kept/a", b"1")
    assert ends_in(end_of(short, "kept/a"), 1)
    store = opened(locking, bucket)
    assert ends_in(store.lock("kept/a"), DAYS)
    assert ends_in(end_of(store, "kept/a"), DAYS)
    assert store.lock("free/absent") is None
    with pytest.raises(NotFound):
        store.lock("kept/absent")


def test_an_object_can_be_deleted_after_its_retention(strict: Cloud) -> None:
    """The store's clock decides: the retention has ended there, whatever the clock of this VM shows."""
    bucket = new_bucket(strict)
    store = strict.open(bucket=bucket, lock=Lock("governance", lambda _: 300.0))
    store.put("kept/a", b"1")
    until = end_of(store, "kept/a")
    assert until is not None
    strict.order("clock", ahead_s=600)
    store.delete("kept/a")
    assert store.head("kept/a") is None


@pytest.mark.fault("K04")
def test_a_bucket_without_retention_names_the_command(strict: Cloud) -> None:
    """The write is refused, and the hint contains the command that enables retention."""
    store = opened(strict, new_bucket(strict, lock=False))
    for write in (
        lambda: store.put("kept/a", b"1"),
        lambda: store.create("kept/a", Body(b"1")),
    ):
        with pytest.raises(Permanent) as refused:
            write()
        assert "kept/a" in str(refused.value)
        command = "put-object-lock-configuration" if strict.is_s3 else "per-object-retention"
        assert command in refused.value.hint
        assert "store.lock_days = 0" in refused.value.hint
    store.put("free/a", b"1")
    assert end_of(store, "free/a") is None
    store.delete("free/a")


@pytest.mark.fault("K05")
def test_a_role_without_the_right_to_lock_is_told_the_permission(strict: Cloud) -> None:
    """A retention that cannot be set is an error, and never an object without one."""
    bucket = new_bucket(strict)
    if strict.is_s3:
        may = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        not_lock = {"Effect": "Deny", "Action": "s3:PutObjectRetention", "Resource": "*"}
        strict.order("role", policy=json.dumps({"Statement": [may, not_lock]}))
    else:
        strict.order("role", retention=0)
    store = opened(strict, bucket)
    with pytest.raises(Permanent) as refused:
        store.put("kept/a", b"1")
    assert "vm-lock" in refused.value.hint
    assert store.head("kept/a") is None


@pytest.mark.fault("K06")
def test_without_the_right_to_read_a_retention_nothing_is_deleted(
    open_cloud: Callable[[str], Cloud],
) -> None:
    """On S3 a delete would hide the object behind a marker, so unknown is not unlocked."""
    cloud = open_cloud("s3")
    bucket = new_bucket(cloud)
    opened(cloud, bucket).put("kept/a", b"1")
    may = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    hidden = ["s3:GetObjectRetention", "s3:GetBucketObjectLockConfiguration"]
    denied = {"Effect": "Deny", "Action": hidden, "Resource": "*"}
    cloud.order("role", policy=json.dumps({"Statement": [may, denied]}))
    with pytest.raises(Permanent):
        opened(cloud, bucket).delete("kept/a")
    with pytest.raises(Permanent):
        opened(cloud, bucket).delete_many([ObjectInfo("kept/a", 1)])
    assert opened(cloud, bucket).get("kept/a") == b"1"


@pytest.mark.parametrize("mode", ["governance", "compliance"])
def test_the_mode_is_that_of_the_configuration(
    open_cloud: Callable[[str], Cloud], mode: LockMode
) -> None:
    """In S3 no right shortens a retention in compliance mode; governance has such a right."""
    cloud = open_cloud("s3")
    bucket = new_bucket(cloud)
    opened(cloud, bucket, mode).put("kept/a", b"1")
    named = {"Bucket": bucket, "Key": f"{cloud.prefix}/kept/a"}
    assert client_of(cloud).get_object_retention(**named)["Retention"]["Mode"] == mode.upper()


def test_a_store_without_multi_object_deletes_gets_single_ones(strict: Cloud) -> None:
    """The objects go one after the other, each with its condition."""
    store = opened(strict, new_bucket(strict, lock=False))
    for key in ("a", "b", "c"):
        store.put(key, b"old")
    infos = sorted(store.list(""), key=lambda info: info.key)
    store.put("b", b"newer")
    strict.order("answer", status=501, code="NotImplemented", method="POST", match="?delete")
    assert list(store.delete_many(infos)) == ["b"]
    assert [info.key for info in store.list("")] == ["b"]


@pytest.mark.parametrize("how", ["empty", "half", "foreign"])
def test_a_damaged_response_is_no_proof_of_a_deletion(
    open_cloud: Callable[[str], Cloud], how: str
) -> None:
    """It raises Transient, and the call can be repeated; a damaged retention is never "not locked"."""
    cloud = open_cloud("s3")
    store = opened(cloud, new_bucket(cloud))
    store.put("free", b"1")
    infos = list(store.list(""))
    cloud.order("spoil", how=how, method="POST", match="?delete")
    with pytest.raises(Transient):
        store.delete_many(infos)
    assert store.delete_many(infos) == {}
    store.put("kept/a", b"1")
    cloud.order("spoil", how=how, method="GET", match="?retention")
    with pytest.raises(Transient):
        store.delete("kept/a")
    cloud.order("spoil", how="without", field="RetainUntilDate", method="GET", match="?retention")
    with pytest.raises(Transient):
        store.delete("kept/a")
    assert store.get("kept/a") == b"1"


@pytest.mark.parametrize("how", ["empty", "half", "foreign"])
def test_a_damaged_setting_is_no_proof_that_nothing_is_locked(strict: Cloud, how: str) -> None:
    """If the response about the bucket's lock is damaged, a delete raises Transient and deletes nothing."""
    store = opened(strict, new_bucket(strict))
    store.put("kept/a", b"1")
    match = "?object-lock" if strict.is_s3 else "/storage/v1/b/"
    strict.order("spoil", how=how, method="GET", match=match)
    with pytest.raises(Transient):
        store.delete("kept/a")
    assert store.get("kept/a") == b"1"
    with pytest.raises(Locked):
        store.delete("kept/a")


def test_the_clock_is_that_of_the_store() -> None:
    """The time of the last Date header counts, also when the clock of this VM is hours off."""
    asked: list[int] = []
    clock = StoreClock(lambda: asked.append(1) or clock.observe("Thu, 01 Jan 2026 00:00:00 GMT"))
    assert abs(clock.now_unix_s() - instant("2026-01-01T00:00:00Z", "Date")) < 5
    assert abs(clock.now_unix_s() - instant("2026-01-01T00:00:00Z", "Date")) < 5
    assert asked == [1]
    with pytest.raises(Transient):
        StoreClock(lambda: None).now_unix_s()


def test_no_days_are_no_retention() -> None:
    assert locks.of(StoreConfig(url="s3://bucket")) is None
