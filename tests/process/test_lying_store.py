# SPDX-License-Identifier: Apache-2.0
"""A store returns its listings in any order, truncates responses, or acknowledges what it did not do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from testkit import committed
from testkit.clouds import Aws, Bucket
from testkit.rig import Vm
from testkit.staged import seal_files
from testkit.waiting import until

MIB = 2**20
FLUSH = {"flush": {"chunk_bytes": "5MiB", "connections": 2}}
LARGE = random.Random(3).randbytes(6 * MIB)
"""More than one chunk."""
FILES = {"model.bin": LARGE, "optimizer.bin": b"small"}


def restored(vm: Vm, to: Path, *options: str) -> tuple[int, dict[str, bytes]]:
    """Exit code of ``swansong restore``, and the files that it wrote."""
    done = vm.swansong("restore", "--to", str(to), *options)
    return done.returncode, committed.tree(to)


@pytest.mark.fault("O15")
def test_a_store_that_lists_in_another_order(bucket: Bucket, new_vm: Any, tmp_path: Path) -> None:
    """SAFE means restorable although listings are unsorted, two keys a page, with duplicates."""
    bucket.order("page", size=2)
    bucket.order("listing", reversed=1, duplicates=1)
    vm = new_vm("vm", bucket.store, settings=FLUSH)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    for step in (3, 7):
        content = seal_files(vm.run_directory, step, FILES)
        daemon.lines.wait(event="committed", step=step)
    assert restored(vm, tmp_path / "restored") == (0, content)
    verified = vm.swansong("verify")
    assert verified.returncode == 0, verified.stdout
    listed = json.loads(vm.swansong("ls", "--json").stdout)
    assert [commit["step"] for commit in listed] == [7, 3]


@pytest.mark.fault("O15")
def test_a_truncated_listing_causes_no_fresh_start(
    bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """``restore --fresh-ok`` finds the commit behind a truncated listing, and never starts from scratch."""
    content = {f"rank-00000/{name}": data for name, data in FILES.items()}
    committed.commit(bucket.client, content, run="run", step=7, chunk_bytes=5 * MIB)
    vm = new_vm("vm", bucket.store, settings=FLUSH)
    for how in ("cut", "empty", "half", "foreign"):
        bucket.order("spoil", how=how, match="list-type", times=2)
        assert restored(vm, tmp_path / how, "--fresh-ok") == (0, content)


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
    assert restored(vm, tmp_path / "restored") == (0, content)
    # No trainer is connected: how far training got is unknown.
    until(lambda: daemon.lines.all(event="verdict", verdict="PARTIAL"), what="the later verdict")
    assert not daemon.lines.all(event="verdict", verdict="SAFE")
