# SPDX-License-Identifier: Apache-2.0
"""The daemon is killed while it sends packs of small files, and another one finishes the set."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from testkit.rig import control
from testkit.staged import seal_files
from testkit.strict_bucket import ACCOUNT, Strict
from testkit.waiting import until

SETTINGS = {"flush": {"chunk_bytes": "5MiB", "connections": 4}}


def sent(strict_bucket: Strict) -> list[str]:
    """Keys of the packs in PUT requests since the last ``clear``."""
    requests = control(strict_bucket.url, "requests")
    return [target for method, target in requests if method == "PUT" and "-packs/" in target]


@pytest.mark.fault("O70", "H01")
def test_killed_between_packs_the_next_daemon_sends_only_the_others(
    strict_bucket: Strict, new_vm: Any, tmp_path: Path
) -> None:
    """The journal and the store have two packs of four.  The set is committed with all its bytes."""
    for number in (3, 4):
        match = f"-packs/{number:06d}"
        strict_bucket.order("answer", status=503, method="PUT", match=match, times=1_000_000)
    vm = new_vm("vm", strict_bucket.table(), settings=SETTINGS)
    daemon = vm.start_daemon(**ACCOUNT)
    files = {f"{n % 4}/{n:03d}": random.Random(n).randbytes(200_000) for n in range(40)}
    content = seal_files(vm.run_directory, 7, files)
    daemon.lines.wait(event="store_retry")
    until(lambda: len(strict_bucket.objects("run/data/")) == 2, what="two stored packs")
    journal = vm.run_directory / ".swansongd" / "uploads.journal"
    until(lambda: journal.read_bytes().count(b'"is":"shard"') >= 20, what="their records")
    daemon.kill()
    stored = strict_bucket.objects("run/data/")
    strict_bucket.order("clear")

    daemon = vm.start_daemon(**ACCOUNT)
    daemon.lines.wait(event="committed", step=7)
    assert len(sent(strict_bucket)) == 2
    (manifest,) = strict_bucket.manifests()
    assert stored.keys() < {key for key, _ in manifest["objects"]}
    assert strict_bucket.restored(tmp_path / "restored") == content
