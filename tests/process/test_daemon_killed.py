# SPDX-License-Identifier: Apache-2.0
"""The daemon is killed during each of its tasks and started again."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.waiting import until


@pytest.mark.fault("T08", "T09", "H01")
def test_killed_during_a_flush_it_continues_where_it_was(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The same generation, the same emergency checkpoint, SAFE once the trainer has reconnected."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    bucket.order("answer", status=503, method="PUT", match="/data/", times=1_000_000)
    aws.notice(in_s=60)
    flush = daemon.lines.wait(event="evacuation", phase="flush")
    daemon.lines.wait(event="store_retry")  # a request with bytes is in flight

    daemon.kill()
    trainer.lines.wait(step=flush["step"] + 20)
    trainer.kill(signal.SIGSTOP)  # so that it reconnects only after the commit
    bucket.order("clear")
    restarted = vm.start_daemon()

    restarted.lines.wait(event="committed", step=flush["step"])
    assert not restarted.lines.all(event="verdict", verdict="SAFE")
    trainer.kill(signal.SIGCONT)
    verdict = restarted.lines.wait(event="verdict", verdict="SAFE")
    assert verdict["step"] == flush["step"]
    assert [(m["generation"], m["step"]) for m in bucket.manifests()] == [(1, flush["step"])]
    (known,) = until(lambda: vm.status()["trainers"], what="the trainer")
    assert known["pid"] == trainer.pid
    trainer.lines.wait(event="committed", committed=flush["step"])


@pytest.mark.fault("T09", "T17", "H01")
def test_a_trainer_that_is_ahead_and_does_not_reconnect_is_never_safe(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Its process stands still during the restart, so its position is unknown: PARTIAL."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    committed = daemon.lines.wait(event="committed")["step"]
    trainer.lines.wait(step=committed + 5)
    trainer.kill(signal.SIGSTOP)
    daemon.kill()

    restarted = vm.start_daemon()
    until(lambda: vm.status()["generation"], what="the claim")
    assert vm.swansong("notify", "--in", "4s", "--wait").returncode == 10
    verdict = restarted.lines.wait(event="verdict")
    assert verdict["verdict"] == "PARTIAL", verdict
    assert "has not reconnected" in verdict["reason"]


@pytest.mark.fault("T09", "H01")
def test_killed_between_request_and_seal_it_repeats_the_request_and_the_trainer_saves_once(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The notice and the request outlive the daemon: the request has the same id afterwards."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    trainer = vm.start_trainer("--step-delay-s", "0.7", script=witness)
    trainer.lines.wait(step=2)
    aws.notice(in_s=60)
    before = daemon.lines.wait(event="evacuation", phase="request")
    daemon.kill()  # the next step boundary is most of a second away

    restarted = vm.start_daemon()
    restarted.lines.wait(event="verdict", verdict="SAFE")
    assert restarted.lines.all(event="evacuation", phase="notice")[0]["id"] == before["id"]
    assert [manifest["kind"] for manifest in bucket.manifests()] == ["emergency"]
