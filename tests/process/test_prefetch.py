# SPDX-License-Identifier: Apache-2.0
"""The prefetch of a real daemon, as the requests that the store receives show it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from swansong.protocol import Hello, Restored, RestoreQuery

from testkit import committed
from testkit.channel_peer import Client
from testkit.clouds import Bucket
from testkit.rig import Vm

FILES = {f"rank-00000/{name}.bin": random.Random(name).randbytes(200_000) for name in "abcd"}
CHUNK_BYTES = 50_000
CHUNKS = 16


@pytest.fixture
def vm(bucket: Bucket, new_vm: Any) -> Vm:
    """A VM that has just booted, and a run with one commit of 800 kB."""
    committed.commit(bucket.client, FILES, run="run", step=100, chunk_bytes=CHUNK_BYTES)
    bucket.order("clear")
    made: Vm = new_vm("vm", bucket.store)
    return made


def data_requests(bucket: Bucket) -> int:
    """Number of GET requests for data objects since the last ``clear``."""
    below = f"/{bucket.prefix}/run/data/"
    requests = bucket.order("requests")
    return sum(method == "GET" and below in target for method, target in requests)


def asking(vm: Vm) -> Client:
    """A trainer that asks for its checkpoint."""
    rank = Client(vm.socket)
    rank.send(Hello("run", start_id="5a17"))
    rank.send(RestoreQuery("q", start_id="5a17"))
    return rank


@pytest.mark.fault("G25")
def test_the_bytes_arrive_before_a_trainer_asks(vm: Vm, bucket: Bucket) -> None:
    """The store fails while the daemon starts.  It returns, and the daemon fetches at once; the answer to
    the trainer costs no further request for data."""
    bucket.order("answer", status=503, method="GET", match="list-type", times=1_000_000)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="prefetch", state="waiting")
    bucket.order("clear")
    found = daemon.lines.wait(event="prefetched")
    assert (found["step"], found["size_bytes"]) == (100, 800_000)
    assert data_requests(bucket) == CHUNKS
    assert vm.status()["prefetch"]["state"] == "ready"
    with asking(vm) as rank:
        answer = rank.receive_a(Restored)
    assert (answer.step, answer.error) == (100, "")
    assert committed.tree(Path(answer.path)) == FILES
    assert data_requests(bucket) == CHUNKS
