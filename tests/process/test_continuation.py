# SPDX-License-Identifier: Apache-2.0
"""No stored byte is sent again, whenever the daemon is killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Bucket, digests_of
from testkit.killed_daemons import killed_at_each_request
from testkit.rig import Vm
from testkit.staged import another_boot, seal_files
from testkit.waiting import until

MIB = 2**20
CHUNK = 5 * MIB
FLUSH = {"flush": {"chunk_bytes": "5MiB", "connections": 2}}
FROZEN = random.Random(7).randbytes(4 * CHUNK + 4321)
DIGESTS = digests_of(FROZEN, CHUNK)


@pytest.mark.fault("H01", "G01", "G02", "O19", "O70")
@pytest.mark.parametrize(
    # A process first reads for the claim: later reads are part of the flush.  A lost reply
    # to a read changes as little as a request that never arrived.
    "kills",
    [{"at": "before_headers", "first": 7}, {"at": "before_answer", "method": "PUT"}],
    ids=lambda kills: kills["at"],
)
def test_killed_at_any_request_the_flush_continues(
    bucket: Bucket, new_vm: Any, tmp_path: Path, kills: dict[str, Any]
) -> None:
    """Each process of the daemon is killed one request later; none sends what an earlier one has stored.

    ``before_headers``: the request never arrives.  ``before_answer``: a write took effect, and its reply is
    lost.
    """
    vm = new_vm("vm", bucket.store, settings=FLUSH)
    vm.start_daemon().lines.wait(event="health", source="store", health="ok")
    vm.daemon.kill()
    content = seal_files(vm.run_directory, 7, {"model.bin": FROZEN, "adapter.bin": b"small"})
    seen: dict[str, bytes] = {}
    starts = chunks_sent = 0
    bucket.order("clear")
    for _, sent in killed_at_each_request(vm, bucket, 7, **kills):
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


def test_frozen_weights_are_sent_once(bucket: Bucket, new_vm: Any, tmp_path: Path) -> None:
    """A LoRA-like run: the first commit sends the weights, later ones reference them, also after restarts."""
    vm = new_vm("vm", bucket.store, settings=FLUSH)
    daemon = vm.start_daemon()
    for step in (1, 2, 3, 4):
        content = seal_files(
            vm.run_directory, step, {"model.bin": FROZEN, "adapter.bin": b"%d" % step * 1000}
        )
        daemon.lines.wait(event="committed", step=step)
        if step > 1:
            assert daemon.lines.wait(event="shards_referenced")["bytes_referenced"] == len(FROZEN)
        if step == 2:
            assert vm.status()["bytes_referenced"] == len(FROZEN)
            daemon.kill()
            daemon = vm.start_daemon()
    sent = bucket.chunks_sent()
    assert [sent[digest] for digest in DIGESTS] == [1] * 5
    assert bucket.restored(tmp_path / "restored") == content

    bucket.order("clear")
    fresh = new_vm("fresh", bucket.store, settings=FLUSH)
    daemon = fresh.start_daemon()
    until(lambda: b"named" in _known(fresh), what="the newest commit to be read")
    seal_files(fresh.run_directory, 5, {"model.bin": FROZEN, "adapter.bin": b"5"})
    daemon.lines.wait(event="committed", step=5)
    assert not bucket.chunks_sent().keys() & set(DIGESTS)


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
