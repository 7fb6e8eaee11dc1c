# SPDX-License-Identifier: Apache-2.0
"""A link to the mirror with less bandwidth than the run needs: some newest commit still arrives."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs import catalog, commit
from swansongd.flush.mirroring import Mirroring

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.store_backends import Cloud

KEYS = RunKeys("r")
LINK_BYTES_PER_S = 8_000_000
CHUNK_BYTES = 4 * LINK_BYTES_PER_S
"""A commit has one chunk, larger than the buffers of the kernel."""
INTERVAL_S = 2.0
"""Time between two commits: half of the time that the link needs for one of them."""
FLUSH_S = 0.8
"""Copies pause for this time of each interval."""


@pytest.mark.fault("M02")
def test_a_slow_link_carries_some_newest_commit(open_cloud: Callable[[str], Cloud]) -> None:
    """Neither the pauses of the run nor its newer commits start the copy again."""
    cloud = open_cloud("s3-tls")
    name = f"mirror-{uuid.uuid4().hex[:12]}"
    cloud.order("bucket", name=name)
    cloud.order("pace", total_bytes_per_s=LINK_BYTES_PER_S)
    primary, mirror = MemoryStore(), cloud.open(bucket=name)
    commit.claim_generation(primary, KEYS, identity={}, start_id="vm")
    state: Any = SimpleNamespace(
        evacuation=None, must_yield=False, flush=SimpleNamespace(flight=None)
    )
    stop = threading.Event()
    mirroring = Mirroring(
        primary, mirror, KEYS, state=lambda: state, post=[].append, stop=stop, connections=1
    )
    mirroring.start()
    try:
        step = 0
        end_mono_s = time.monotonic() + 30.0
        while not (copied := mirroring.status().newest) and time.monotonic() < end_mono_s:
            step += 1
            state.flush.flight = object()
            time.sleep(FLUSH_S)
            files = {"weights": random.Random(step).randbytes(CHUNK_BYTES)}
            made = committed.commit(primary, files, step=step, chunk_bytes=CHUNK_BYTES)
            state.flush.flight = None
            mirroring.committed(made)
            time.sleep(INTERVAL_S - FLUSH_S)
    finally:
        stop.set()
        mirroring.check_fence()
    assert copied is not None, f"none of {step} commits"
    assert step > 2, "the link is slower than the run"
    assert copied in [found.ref for found in catalog.list_commits(mirror, KEYS)]
