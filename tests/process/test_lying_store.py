# SPDX-License-Identifier: Apache-2.0
"""A store acknowledges chunks that it does not store."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from testkit import committed
from testkit.clouds import Aws, Bucket
from testkit.staged import seal_files
from testkit.waiting import until

MIB = 2**20
FLUSH = {"flush": {"chunk_bytes": "5MiB", "connections": 2}}
LARGE = random.Random(3).randbytes(6 * MIB)
"""More than one chunk."""
FILES = {"model.bin": LARGE, "optimizer.bin": b"small"}


@pytest.mark.fault("O12", "O11")
def test_a_store_that_acknowledges_chunks_and_stores_nothing(
    aws: Aws, bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """Each chunk gets an empty 200 and is not there: no verdict is SAFE.

    No commit names such a chunk; once the store works, everything is stored and committed.
    """
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=FLUSH)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    bucket.order("say", etag='"1"', method="PUT", match="/data/", times=1_000_000)
    content = seal_files(vm.run_directory, 7, FILES)
    aws.notice(in_s=3)
    daemon.lines.wait(event="chunk_lost")
    assert daemon.lines.wait(event="verdict")["verdict"] != "SAFE"
    assert bucket.manifests() == []
    assert not daemon.lines.all(event="committed")

    bucket.order("clear")
    daemon.lines.wait(event="committed", step=7, timeout_s=60)
    assert vm.swansong("restore", "--to", str(tmp_path / "restored")).returncode == 0
    assert committed.tree(tmp_path / "restored") == content
    # No trainer is connected: how far training got is unknown.
    until(lambda: daemon.lines.all(event="verdict", verdict="PARTIAL"), what="the later verdict")
    assert not daemon.lines.all(event="verdict", verdict="SAFE")
