# SPDX-License-Identifier: Apache-2.0
"""A notice without a trainer: the sealed sets are flushed, and the verdict does not wait for a save."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.staged import write_set

pytestmark = pytest.mark.fault("T01")


def test_a_sealed_set_is_flushed(aws: Aws, bucket: Bucket, new_vm: Any) -> None:
    """A sealed set without its trainer is committed.  Nothing else is missing: SAFE."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    aws.notice(in_s=30)
    sealed = write_set(vm.run_directory, step=7)
    daemon = vm.start_daemon()
    verdict = daemon.lines.wait(event="verdict", verdict="SAFE")
    (manifest,) = bucket.manifests()
    assert manifest["step"] == verdict["step"] == 7
    for shard in manifest["shards"]:
        assert bucket.get(shard["key"]) == (sealed / shard["path"]).read_bytes()


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

    aws.notice(in_s=30)
    notice = daemon.lines.wait(event="evacuation", phase="notice")
    assert notice["plan"] == "FLUSH"
    bucket.order("clear")

    assert daemon.lines.wait(event="verdict", verdict="SAFE")["step"] == 30
    assert [manifest["step"] for manifest in bucket.manifests()] == [30]


def test_nothing_staged_and_nothing_committed_is_lost_immediately(
    aws: Aws, bucket: Bucket, new_vm: Any
) -> None:
    """No commit exists and none can be made: LOST, before the deadline."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    aws.notice(in_s=30)
    verdict = daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["step"]) == ("LOST", None)
    assert verdict["slack_s"] > 15
    assert bucket.manifests() == []


def test_nothing_new_since_the_last_commit_is_safe(aws: Aws, bucket: Bucket, new_vm: Any) -> None:
    """The newest sealed state is already committed; the daemon only reports the verdict."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    write_set(vm.run_directory, step=7)
    daemon.lines.wait(event="committed", step=7)
    aws.notice(in_s=30)
    assert daemon.lines.wait(event="evacuation", phase="notice")["plan"] == "NONE"
    assert daemon.lines.wait(event="verdict", verdict="SAFE")["step"] == 7
