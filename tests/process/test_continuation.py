# SPDX-License-Identifier: Apache-2.0
"""No stored byte is sent again, whenever the daemon is killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Bucket
from testkit.killed_daemons import killed_at_each_write
from testkit.staged import seal_files

MIB = 2**20
CHUNK = 5 * MIB
FLUSH = {"flush": {"chunk_bytes": "5MiB", "connections": 2}}
FROZEN = random.Random(7).randbytes(4 * CHUNK + 4321)


@pytest.mark.fault("H01", "G01", "G02", "O19", "O70")
def test_killed_at_any_write_the_flush_continues(
    bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """Each process of the daemon is killed one write later; none sends what an earlier one has stored.

    The write took effect, and its reply is lost.
    """
    vm = new_vm("vm", bucket.store, settings=FLUSH)
    vm.start_daemon().lines.wait(event="health", source="store", health="ok")
    vm.daemon.kill()
    content = seal_files(vm.run_directory, 7, {"model.bin": FROZEN, "adapter.bin": b"small"})
    seen: dict[str, bytes] = {}
    starts = chunks_sent = 0
    bucket.order("clear")
    for sent in killed_at_each_write(vm, bucket, 7):
        stored = bucket.objects("run/data/")
        assert not [key for key in seen if stored.get(key) != seen[key]], "written twice"
        seen = stored
        starts += 1
        chunks_sent += sent.total()
    assert starts >= 4
    assert bucket.restored(tmp_path / "restored") == content
    assert chunks_sent <= 6 + 2 * starts, "two connections, so at most two chunks for each start"
