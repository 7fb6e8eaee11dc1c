# SPDX-License-Identifier: Apache-2.0
"""A notice without a trainer: the sealed sets are flushed, and the verdict waits for a trainer in time."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.staged import write_set

pytestmark = pytest.mark.fault("T01")

NOTICE_S = 6


def test_a_sealed_set_is_flushed(aws: Aws, bucket: Bucket, new_vm: Any) -> None:
    """A sealed set without its trainer is committed.  How far its training got is unknown: PARTIAL."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    aws.notice(in_s=NOTICE_S)
    sealed = write_set(vm.run_directory, step=7)
    daemon = vm.start_daemon()
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "PARTIAL"
    assert "has not reconnected" in verdict["reason"]
    (manifest,) = bucket.manifests()
    assert manifest["step"] == verdict["step"] == 7
    for path, content in bucket.content(manifest).items():
        assert content == (sealed / path).read_bytes()


@pytest.mark.fault("T15")
def test_a_trainer_that_has_ended_leaves_its_last_set_to_the_daemon(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The trainer seals a set during an outage and exits; at the notice the set is in staging."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    bucket.order("answer", status=503, match="/data/", times=1_000_000)
    trainer = vm.start_trainer("--steps", "30", "--every-steps", "30", script=witness)
    assert trainer.wait() == 0
    assert bucket.manifests() == []

    aws.notice(in_s=10)
    notice = daemon.lines.wait(event="evacuation", phase="notice")
    assert notice["plan"] == "FLUSH"
    bucket.order("clear")

    assert daemon.lines.wait(event="verdict", verdict="SAFE")["step"] == 30
    assert [manifest["step"] for manifest in bucket.manifests()] == [30]


@pytest.mark.fault("T17")
def test_a_trainer_that_connects_after_the_notice_is_asked(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The notice comes while the VM still starts its trainer: the one verdict is SAFE."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    aws.notice(in_s=50)
    daemon.lines.wait(event="evacuation", phase="waiting_for_trainer")
    vm.start_trainer(script=witness)
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    assert len(daemon.lines.all(event="verdict")) == 1
    (commit,) = vm.commits()
    assert (commit["kind"], commit["step"]) == ("emergency", verdict["step"])
