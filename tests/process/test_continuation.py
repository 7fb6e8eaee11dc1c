# SPDX-License-Identifier: Apache-2.0
"""No stored byte is sent again, whenever the daemon is killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Bucket, digests_of
from testkit.killed_daemons import killed_at_each_write
from testkit.rig import Vm
from testkit.staged import another_boot, seal_files
from testkit.waiting import until

MIB = 2**20
CHUNK = 5 * MIB
FLUSH = {"flush": {"chunk_bytes": "5MiB", "connections": 2}}
FROZEN = random.Random(7).randbytes(4 * CHUNK + 4321)
DIGESTS = digests_of(FROZEN, CHUNK)


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


@pytest.mark.fault("H01", "D06")
def test_a_reboot_that_keeps_the_disk_continues_the_same_set(
    bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """No other VM has taken the run over: the next boot commits the set under the generation of its start."""
    content, vm = _cut_off(bucket, new_vm)
    another_boot(vm.run_directory)
    bucket.order("clear")
    vm.start_daemon().lines.wait(event="committed", step=7)

    assert bucket.restored(tmp_path / "restored") == content
    (manifest,) = bucket.manifests()
    assert manifest["generation"] == 1
    assert all(name.startswith("00000001/") for name, _ in manifest["chunks"])
    sent = bucket.chunks_sent()
    assert {DIGESTS.index(digest) for digest in sent if digest in DIGESTS} == {2, 3, 4}


def _known(vm: Vm) -> bytes:
    """The daemon's file of the chunks that it has created."""
    content: bytes = (vm.run_directory / ".swansongd" / "chunks").read_bytes()
    return content


def _cut_off(bucket: Bucket, new_vm: Any) -> tuple[dict[str, bytes], Vm]:
    """A daemon that was killed when two of five chunks were stored and the others were in flight."""
    vm = new_vm("vm", bucket.store, settings=FLUSH)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    for digest in DIGESTS[2:]:
        bucket.order("answer", status=503, method="PUT", match=digest, times=1_000_000)
    content = seal_files(vm.run_directory, 7, {"model.bin": FROZEN, "adapter.bin": b"small"})
    until(
        lambda: all(digest.encode() in _known(vm) for digest in DIGESTS[:2]),
        what="two chunks to be stored",
    )
    daemon.kill()
    return content, vm
