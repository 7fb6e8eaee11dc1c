# SPDX-License-Identifier: Apache-2.0
"""The store is reachable, but too slow for the data."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket

SMALL = "1000"
LARGE = "8000000"


@pytest.mark.fault("O02", "O03")
def test_data_that_cannot_fit_ends_partial_and_the_older_commit_remains(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str, tmp_path: Any
) -> None:
    """24 MB at 2 MB/s within 5 s: the data stops for the reserve, and the verdict is in time.  The daemon
    exits immediately, and a new VM restores the commit before."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    first = vm.start_trainer("--every-steps", "20", "--size-bytes", SMALL, script=witness)
    older = daemon.lines.wait(event="committed")["step"]
    first.kill()
    newest = max(manifest["step"] for manifest in bucket.manifests())
    bucket.order("pace", total_bytes_per_s=2_000_000)
    vm.start_trainer("--size-bytes", LARGE, script=witness).lines.wait(step=newest + 1)
    aws.notice(in_s=5)

    verdict = daemon.lines.wait(event="verdict", timeout_s=20)
    assert verdict["verdict"] == "PARTIAL"
    assert verdict["slack_s"] > -1
    assert daemon.lines.all(phase="flush_stopped"), "the reserve was spent on data"
    daemon.kill(15)
    assert daemon.wait(timeout_s=3) == 0, "the daemon waited for a request in flight"
    bucket.order("clear")
    assert newest >= older
    assert max(manifest["step"] for manifest in bucket.manifests()) == newest
    assert len(bucket.restored(tmp_path / "restored")) == 5
