# SPDX-License-Identifier: Apache-2.0
"""A process writes to a sealed set during its upload."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from swansong import layout

from testkit.clouds import Bucket, digests_of
from testkit.staged import seal_files
from testkit.waiting import until

CHUNK_BYTES = 5 * 2**20
FLUSH = {"flush": {"chunk_bytes": CHUNK_BYTES, "connections": 2}}
FROZEN = random.Random(7).randbytes(20 * 2**20 + 4321)


@pytest.mark.fault("D09", "S5")
def test_a_file_that_changes_during_its_upload_voids_the_set(
    bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """The file changes after two of its chunks are stored.  The set is not committed, the older commit
    remains, and the next set is committed."""
    vm = new_vm("vm", bucket.store, settings=FLUSH)
    daemon = vm.start_daemon()
    seal_files(vm.run_directory, 1, {"model.bin": b"older"})
    daemon.lines.wait(event="committed", step=1)
    for digest in digests_of(FROZEN, CHUNK_BYTES)[2:]:
        bucket.order("answer", status=503, method="PUT", match=digest, times=1_000_000)
    seal_files(vm.run_directory, 2, {"model.bin": FROZEN})
    until(lambda: len(bucket.chunks_sent()) >= 4, what="chunks in flight")
    changed = vm.run_directory / layout.sealed_name(2, "abc") / "rank-00000" / "model.bin"
    with changed.open("r+b") as file:
        file.write(b"x")
    bucket.order("clear")

    daemon.lines.wait(event="flush_failed", void=True)
    content = seal_files(vm.run_directory, 3, {"model.bin": FROZEN})
    daemon.lines.wait(event="committed", step=3)
    assert [manifest["step"] for manifest in bucket.manifests()] == [3, 1]
    assert bucket.restored(tmp_path / "restored") == content
