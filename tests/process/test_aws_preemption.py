# SPDX-License-Identifier: Apache-2.0
"""EC2 takes a spot VM back: from the notice to a commit in S3, and on to the next VM.

Read these tests first: they show the purpose of Swansong.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.committed import tree
from testkit.waiting import until


def test_a_notice_becomes_a_commit_before_the_deadline(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The trainer saves between two steps, and all its files are in S3 before the deadline."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)

    terminated_at = aws.notice("terminate", in_s=30)

    verdict = daemon.lines.wait(event="verdict")
    assert datetime.now(UTC) < terminated_at
    assert verdict["verdict"] == "SAFE"
    assert 0 < verdict["slack_s"] < 30

    (manifest,) = bucket.manifests()
    assert (manifest["generation"], manifest["kind"]) == (1, "emergency")
    target = daemon.lines.wait(event="evacuation", phase="target")
    assert manifest["step"] == target["step"] == verdict["step"]

    # The manifest lists exactly the files that the trainer sealed, byte for byte.
    (sealed,) = vm.run_directory.glob("step-*")
    files = tree(sealed)
    assert len(files) == 5  # three files of the trainer, the generators, and the rank manifest
    assert bucket.content(manifest) == files

    # The trainer receives the commit and continues until the VM is terminated.
    message = trainer.lines.wait(event="committed", committed=manifest["step"])
    assert message["generation"] == 1
    trainer.lines.wait(step=manifest["step"] + 5)

    # The farewell records the outcome for later readers.
    (farewell,) = until(bucket.farewells, what="the farewell")
    assert (farewell["verdict"], farewell["commit"]["step"]) == ("SAFE", manifest["step"])
    timeline = farewell["timeline"]
    # A slow save finishes some files before the set is sealed: a loaded machine uploads them early.
    phases = [entry["phase"] for entry in timeline if entry["phase"] != "early_shards"]
    assert phases == [
        "notice", "request", "accepted", "target", "sealed", "flush", "flushed", "committed",
        "verdict",
    ]  # fmt: skip
    assert sorted(entry["at_s"] for entry in timeline) == [entry["at_s"] for entry in timeline]


@pytest.mark.fault("N12")
def test_without_a_notice_the_loss_is_the_lag_in_status(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Periodic checkpoints are replicated continuously; a power cut costs at most the reported lag."""
    vm = new_vm("first", bucket.store)
    daemon = vm.start_daemon()
    vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", step=40)
    report = vm.status()
    vm.power_off()
    assert report["notices"] == []

    second = new_vm("second", bucket.store)
    second.start_daemon()
    trainer = second.start_trainer(script=witness)
    resumed = trainer.lines.wait(event="resumed")["from_step"]
    assert resumed >= 40
    assert resumed >= report["trainers"][0]["step"] - report["replication_lag"]["steps"]
    assert {manifest["kind"] for manifest in bucket.manifests()} == {"periodic"}
