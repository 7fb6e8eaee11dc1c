# SPDX-License-Identifier: Apache-2.0
"""The daemon is killed while it sends chunks of small files, and another one finishes the set."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from testkit.staged import seal_files
from testkit.strict_bucket import Strict
from testkit.waiting import until

SETTINGS = {"flush": {"chunk_bytes": "5MiB", "connections": 1, "background_bytes_per_s": 2_000_000}}
CHUNKS = 2
"""Of 8 MB in small files, with one connection."""


@pytest.mark.fault("O70", "H01")
def test_killed_between_shared_chunks_the_next_daemon_sends_only_the_others(
    strict_bucket: Strict, new_vm: Any, tmp_path: Path
) -> None:
    """The store has one chunk of two.  The set is committed with all its bytes."""
    vm = new_vm("vm", strict_bucket.table(), settings=SETTINGS)
    daemon = vm.start_daemon()
    files = {f"{n % 4}/{n:03d}": random.Random(n).randbytes(200_000) for n in range(40)}
    content = seal_files(vm.run_directory, 7, files)
    known = vm.run_directory / ".swansongd" / "chunks"
    until(lambda: b"/data/" in known.read_bytes(), what="a stored chunk")
    daemon.kill()
    stored = strict_bucket.objects("run/data/")
    assert len(stored) == 1
    strict_bucket.order("clear")

    daemon = vm.start_daemon()
    daemon.lines.wait(event="committed", step=7)
    assert sum(strict_bucket.chunks_sent().values()) == CHUNKS - 1
    (manifest,) = strict_bucket.manifests()
    assert stored.keys() < {f"run/data/{name}" for name, _ in manifest["chunks"]}
    assert strict_bucket.restored(tmp_path / "restored") == content
