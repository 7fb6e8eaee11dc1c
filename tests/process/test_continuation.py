# SPDX-License-Identifier: Apache-2.0
"""No stored byte is sent again, whenever the daemon is killed."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from testkit.rig import Vm
from testkit.staged import another_boot, seal_files
from testkit.store_tap import WRITES, StoreTap, When
from testkit.strict_bucket import ACCOUNT, Strict
from testkit.waiting import until

MIB = 2**20
PART = 5 * MIB
FLUSH = {"flush": {"chunk_bytes": "5MiB", "connections": 2}}
FROZEN = random.Random(7).randbytes(4 * PART + 4321)


@pytest.mark.fault("H01", "G01", "O19")
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_request_the_uploads_continue(
    strict_bucket: Strict, new_vm: Any, tmp_path: Path, when: When
) -> None:
    """Each process of the daemon is killed one request later; none restarts an upload of an earlier one.

    ``before``: the request never arrives.  ``after``: a write took effect, and its reply is lost.
    """
    first = 7 if when == "before" else 1
    with StoreTap(strict_bucket.url) as tap:
        vm = new_vm("vm", strict_bucket.table(tap.url), settings=FLUSH)
        vm.start_daemon(**ACCOUNT).lines.wait(event="health", source="store", health="ok")
        assert vm.daemon is not None
        vm.daemon.kill()
        content = seal_files(vm.run_directory, 7, {"model.bin": FROZEN, "adapter.bin": b"small"})
        seen: dict[str, str] = {}
        # The first reads of a process are those of the claim: later ones are part of the flush.
        for request in itertools.count(first):
            daemon = vm.start_daemon(ready=False, **ACCOUNT)
            # A lost reply to a read changes as little as a request that never arrived.
            methods = WRITES if when == "after" else ("GET", "HEAD", *WRITES)
            tap.arm(request, when, daemon.kill, methods=methods)
            until(
                lambda: _is_over(vm, strict_bucket, 7), what="the end of the daemon, or its commit"
            )
            stored = strict_bucket.objects("run/data/")
            assert not [key for key in seen if stored.get(key) != seen[key]], "written twice"
            seen = stored
            if daemon.popen.poll() is None:
                break
    starts = request - first + 1
    assert starts > 4
    assert strict_bucket.restored(tmp_path / "restored") == content
    parts = strict_bucket.parts_sent()
    uploads = {upload for upload, _ in parts}
    assert len(uploads) == 1, "an upload whose id was lost never got a part"
    assert sum(parts.values()) <= 5 + 2 * starts, (
        "two connections, so at most two parts for each start"
    )


@pytest.mark.fault("H01", "D06")
def test_a_reboot_that_keeps_the_disk_continues_the_same_uploads(
    strict_bucket: Strict, new_vm: Any, tmp_path: Path
) -> None:
    """No other VM has taken the run over: the next boot commits the set under the generation of its start."""
    content, vm = _cut_off(strict_bucket, new_vm)
    another_boot(vm.run_directory)
    before = strict_bucket.parts_sent()
    strict_bucket.order("clear")
    vm.start_daemon(**ACCOUNT).lines.wait(event="committed", step=7)

    assert strict_bucket.restored(tmp_path / "restored") == content
    (manifest,) = strict_bucket.manifests()
    assert manifest["generation"] == 1
    keys = {shard["path"]: shard["key"] for shard in manifest["shards"]}
    assert keys["rank-00000/model.bin"].startswith("run/data/00000001/")
    after = strict_bucket.parts_sent()
    assert {upload for upload, _ in after} == {upload for upload, _ in before}
    assert {number for _, number in after} == {"3", "4", "5"}


@pytest.mark.fault("H01")
def test_without_listed_checksums_no_part_is_sent_twice(
    strict_bucket: Strict, new_vm: Any, tmp_path: Path
) -> None:
    """Foreign stores list number, ETag and size of a part; that is sufficient after a restart."""
    content, vm = _cut_off(strict_bucket, new_vm)
    before = strict_bucket.parts_sent()
    strict_bucket.order("clear")
    strict_bucket.order(
        "spoil", how="without", field="ChecksumCRC32C", method="GET", match="uploadId", times=1000
    )
    vm.start_daemon(**ACCOUNT).lines.wait(event="committed", step=7)

    assert strict_bucket.restored(tmp_path / "restored") == content
    after = strict_bucket.parts_sent()
    assert {upload for upload, _ in after} == {upload for upload, _ in before}
    assert {number for _, number in after} == {"3", "4", "5"}


def test_uploads_that_the_store_has_dropped_start_over(
    strict_bucket: Strict, new_vm: Any, tmp_path: Path
) -> None:
    """The daemon uses no entry of its journal that the store does not confirm."""
    content, vm = _cut_off(strict_bucket, new_vm)
    before = {upload for upload, _ in strict_bucket.parts_sent()}
    strict_bucket.order("clear")
    strict_bucket.order("forget")
    vm.start_daemon(**ACCOUNT).lines.wait(event="committed", step=7)

    assert strict_bucket.restored(tmp_path / "restored") == content
    after = strict_bucket.parts_sent()
    assert len(after) == 5
    assert not before & {upload for upload, _ in after}


@pytest.mark.fault("H01", "O61")
def test_killed_while_it_sends_changed_parts_the_next_daemon_sends_only_the_others(
    strict_bucket: Strict, new_vm: Any, tmp_path: Path
) -> None:
    """Three of five parts have changed.  The first one is stored when the daemon is killed."""
    vm = new_vm("vm", strict_bucket.table(), settings=FLUSH)
    daemon = vm.start_daemon(**ACCOUNT)
    seal_files(vm.run_directory, 1, {"model.bin": FROZEN})
    daemon.lines.wait(event="committed", step=1)
    changed = bytearray(FROZEN)
    for index in (0, 2, 3):
        changed[index * PART] ^= 1
    for number in (2, 3):
        strict_bucket.order(
            "answer", status=503, method="PUT", match=f"partNumber={number}", times=1_000_000
        )
    content = seal_files(vm.run_directory, 2, {"model.bin": bytes(changed)})
    journal = vm.run_directory / ".swansongd" / "uploads.journal"
    until(lambda: journal.read_bytes().count(b'"is":"part"') == 5 + 1, what="a part to be stored")
    daemon.kill()
    strict_bucket.order("clear")
    daemon = vm.start_daemon(**ACCOUNT)
    daemon.lines.wait(event="committed", step=2)
    assert {number for _, number in strict_bucket.parts_sent()} == {"2", "3"}
    assert vm.status()["bytes_referenced"] == len(FROZEN) - 3 * PART
    assert strict_bucket.restored(tmp_path / "restored") == content


def test_frozen_weights_are_sent_once(strict_bucket: Strict, new_vm: Any, tmp_path: Path) -> None:
    """A LoRA-like run: the first commit sends the weights, later ones reference them, also after restarts."""
    vm = new_vm("vm", strict_bucket.table(), settings=FLUSH)
    daemon = vm.start_daemon(**ACCOUNT)
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
            daemon = vm.start_daemon(**ACCOUNT)
    assert sum(strict_bucket.parts_sent().values()) == 5
    keys = {
        shard["key"]
        for manifest in strict_bucket.manifests()
        for shard in manifest["shards"]
        if shard["path"] == "rank-00000/model.bin"
    }
    assert len(keys) == 1
    assert strict_bucket.restored(tmp_path / "restored") == content

    fresh = new_vm("fresh", strict_bucket.table(), settings=FLUSH)
    daemon = fresh.start_daemon(**ACCOUNT)
    daemon.lines.wait(event="health", source="store", health="ok")
    until(lambda: (fresh.run_directory / ".swansongd" / "uploads.journal").stat().st_size > 500)
    seal_files(fresh.run_directory, 5, {"model.bin": FROZEN, "adapter.bin": b"5"})
    daemon.lines.wait(event="committed", step=5)
    assert sum(strict_bucket.parts_sent().values()) == 5


def _cut_off(strict_bucket: Strict, new_vm: Any) -> tuple[dict[str, bytes], Vm]:
    """A daemon that was killed when two of five parts were stored and the others were in flight."""
    vm = new_vm("vm", strict_bucket.table(), settings=FLUSH)
    daemon = vm.start_daemon(**ACCOUNT)
    daemon.lines.wait(event="health", source="store", health="ok")
    for number in (3, 4, 5):
        strict_bucket.order(
            "answer", status=503, method="PUT", match=f"partNumber={number}", times=1_000_000
        )
    content = seal_files(vm.run_directory, 7, {"model.bin": FROZEN, "adapter.bin": b"small"})
    journal = vm.run_directory / ".swansongd" / "uploads.journal"
    until(lambda: journal.read_bytes().count(b'"is":"part"') == 2, what="two parts to be stored")
    daemon.kill()
    return content, vm


def _is_over(vm: Vm, bucket: Strict, step: int) -> bool:
    """The daemon has ended, has made the commit, or reports the commit of an earlier process."""
    daemon = vm.daemon
    assert daemon is not None
    if daemon.popen.poll() is not None or daemon.lines.all(event="committed", step=step):
        return True
    if not bucket.manifests() or not daemon.lines.all(event="health", source="store", health="ok"):
        return False
    answer = vm.swansong("status", "--json")  # the daemon may be killed during this call
    if answer.returncode:
        return False
    commit = json.loads(answer.stdout)["last_commit"]
    return commit is not None and commit["step"] == step
