# SPDX-License-Identifier: Apache-2.0
"""A mirror that locks its objects: copies create and never replace or delete, so no lock is in the way."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import pytest
from swansong_bucket.format.keys import ManifestPlace, RunKeys
from swansong_bucket.mirror.copier import Copier
from swansong_bucket.runs import catalog
from swansong_bucket.stores.retention import DAY_S, Lock

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.store_backends import Cloud


@pytest.mark.fault("M07")
@pytest.mark.parametrize("server", ["s3-tls", "gcs"])
def test_copies_need_no_right_that_a_lock_takes_away(
    server: str, open_cloud: Callable[[str], Cloud]
) -> None:
    """Two copiers and a repetition succeed in a bucket that locks each object for thirty days."""
    cloud = open_cloud(server)
    name = f"mirror-{uuid.uuid4().hex[:12]}"
    options = {"lock": 1} if server.startswith("s3") else {"retention": 1, "versioning": 0}
    cloud.order("bucket", name=name, **options)
    lock = Lock("compliance", lambda _key: 30 * DAY_S)
    keys, stop = RunKeys("r"), threading.Event()
    primary, mirror = MemoryStore(), cloud.open(bucket=name, lock=lock)
    files = {"weights": b"".join(n.to_bytes(4) for n in range(3_000_000)), "index.json": b"{}"}
    made = committed.commit(primary, files, chunk_bytes=5 * 2**20)
    for _ in range(2):
        copier = Copier(primary, mirror, keys, stop, connections=2)
        copier.copy(ManifestPlace(made.ref, 0, 1))
    (found,) = catalog.list_commits(mirror, keys)
    assert catalog.load(mirror, keys, found) == (made,)
