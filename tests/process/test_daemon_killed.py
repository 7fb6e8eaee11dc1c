# SPDX-License-Identifier: Apache-2.0
"""The daemon is killed during each of its tasks and started again."""

from __future__ import annotations

import shutil
import signal
from typing import Any

import pytest
from swansongd.staging.prepare import OWN_DIRECTORY

from testkit.clouds import Aws, Bucket
from testkit.waiting import until


@pytest.mark.fault("T08", "T09", "T17", "H01")
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


@pytest.mark.fault("G03", "H01")
def test_without_its_claim_record_it_is_not_fenced_by_a_claim_of_its_vm(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """A trainer that was frozen while the next one started wakes up: it is the only one that is known.

    It keeps its generation, and the trainer after both commits, too.
    """
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    first = vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", generation=1)
    first.kill(signal.SIGSTOP)
    daemon.kill()
    daemon = vm.start_daemon()
    second = vm.start_trainer(script=witness)
    second.lines.wait(event="resumed")
    second.kill()
    assert vm.status()["generation"] == 2
    daemon.kill()
    (vm.run_directory / OWN_DIRECTORY / "claim.json").unlink()

    restarted = vm.start_daemon()
    restarted.lines.wait(event="health", source="store", health="ok")
    first.kill(signal.SIGCONT)
    until(lambda: vm.status()["generation"] == 1, what="the claim of the first trainer")
    first.kill()
    vm.start_trainer("--every-steps", "20", script=witness)
    restarted.lines.wait(event="committed", generation=3)


@pytest.mark.fault("D13")
def test_after_its_directory_in_staging_was_deleted_it_makes_another(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The daemon ends; the next one creates the directory, and a notice to the same trainer ends SAFE."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    vm.run_directory.rename(vm.disk / "lost")
    shutil.rmtree(vm.disk / "lost")
    assert daemon.wait() == 15
    assert daemon.lines.all(event="staging_replaced", directory=str(vm.run_directory))

    restarted = vm.start_daemon()
    until(lambda: vm.status()["trainers"], what="the trainer")
    aws.notice(in_s=60)
    restarted.lines.wait(event="verdict", verdict="SAFE")
    assert bucket.manifests()
