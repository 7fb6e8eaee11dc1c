# SPDX-License-Identifier: Apache-2.0
"""A daemon with store.lock_days: everything that a commit needs is locked, also what an earlier one wrote."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from testkit.clouds import control
from testkit.emulators.process import EmulatorProcess
from testkit.staged import seal_files

CHUNK_BYTES = 5 * 2**20
DAYS = 8


@pytest.mark.fault("K01", "K03")
def test_a_daemon_locks_what_it_commits(new_vm: Any) -> None:
    """Manifests for eight days, data for ten, also what the second commit names again."""
    source = random.Random(7)
    files = {"same": source.randbytes(3000), "large": source.randbytes(2 * CHUNK_BYTES)}
    with EmulatorProcess("testkit.emulators.s3_strict", "--port", "0", "--bucket", "ckpt") as s3:
        control(s3.url, "bucket?name=ckpt&lock=1")
        store = {"url": "s3://ckpt/p", "endpoint": s3.url, "region": "us-east-1"}
        settings = {"flush": {"chunk_bytes": CHUNK_BYTES}}
        vm = new_vm("vm", {**store, "lock_days": DAYS}, settings=settings)
        daemon = vm.start_daemon()
        seal_files(vm.run_directory, 20, files)
        daemon.lines.wait(event="committed", step=20)
        files["large"] = files["large"][:CHUNK_BYTES] + b"x" * CHUNK_BYTES
        seal_files(vm.run_directory, 40, files)
        daemon.lines.wait(event="committed", step=40)
        vm.power_off()
        left = {key: days_left(s3.url, key) for key in keys(s3.url)}
    commits = [days for key, days in left.items() if "/commits/" in key]
    data = [days for key, days in left.items() if "/data/" in key]
    others = {days for key, days in left.items() if "/commits/" not in key and "/data/" not in key}
    assert commits == [DAYS, DAYS]
    assert len(data) >= 3
    assert set(data) == {DAYS + 2}
    assert others == {None}


def client(url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def keys(url: str) -> list[str]:
    return [item["Key"] for item in client(url).list_objects_v2(Bucket="ckpt")["Contents"]]


def days_left(url: str, key: str) -> int | None:
    """Days until the retention ends, rounded; None without a retention."""
    try:
        found = client(url).get_object_retention(Bucket="ckpt", Key=key)["Retention"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchObjectLockConfiguration":
            raise
        return None
    assert found["Mode"] == "GOVERNANCE"
    return round((found["RetainUntilDate"] - datetime.now(UTC)) / timedelta(days=1))
