# SPDX-License-Identifier: Apache-2.0
"""The next VM starts while the one with the notice still trains (``run.handover``)."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.rig import Process, Vm, newest_step, safe_steps
from testkit.waiting import until

SOON = {"swansongd.core.schedule.INTERVAL_MIN_S": 1.0}
"""Follow-ups are 5 s apart without this constant."""
HANDOVER = {"run": {"handover": True}}


def with_handover(new_vm: Any, name: str, bucket: Bucket, **options: Any) -> Vm:
    vm: Vm = new_vm(
        name, bucket.store, follow_ups=True, constants=SOON, settings=HANDOVER, **options
    )
    return vm


def waiting(new_vm: Any, bucket: Bucket, witness: str) -> tuple[Vm, Process, Process]:
    """The next VM, its daemon and its trainer, which wait for the VM that still trains."""
    vm = with_handover(new_vm, "next", bucket)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--step-delay-s", "0.05", script=witness)
    assert daemon.lines.wait(event="predecessor_leaves")["generation"] == 1
    return vm, daemon, trainer


def prefetched(daemon: Process) -> int:
    """The newest step that the daemon has fetched; -1 before the first one."""
    return max((line["step"] for line in daemon.lines.all(event="prefetched")), default=-1)


@pytest.mark.fault("OE04")
def test_the_next_vm_resumes_from_the_last_commit_of_the_one_before(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """It waits while the other VM commits, fetches each commit, and resumes once that trainer has ended."""
    old = with_handover(new_vm, "old", bucket, metadata=aws.metadata)
    daemon = old.start_daemon()
    first = old.start_trainer("--step-delay-s", "0.05", script=witness)
    first.lines.wait(step=5)
    aws.notice(in_s=300)
    until(lambda: len(safe_steps(daemon)) >= 1, what="SAFE")
    vm, next_daemon, second = waiting(new_vm, bucket, witness)
    before = len(safe_steps(daemon))
    until(lambda: len(safe_steps(daemon)) > before, what="a follow-up meanwhile")
    fetched = safe_steps(daemon)[-1]
    until(lambda: prefetched(next_daemon) >= fetched, what="the prefetch of a follow-up")
    report = vm.status()
    assert (report["state"], report["generation"]) == ("AWAITING_HANDOVER", None)
    assert "generation 1 still trains" in report["prefetch"]["reason"]
    assert not second.lines.all(event="resumed")
    first.kill(signal.SIGKILL)
    resumed = second.lines.wait(event="resumed")
    assert resumed["from_step"] == safe_steps(daemon)[-1] <= newest_step(first)
    assert not daemon.lines.all(event="fenced")
    assert vm.status()["generation"] == 2


@pytest.mark.fault("OE04")
def test_after_a_withdrawn_notice_the_next_vm_stands_by(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The other VM commits on, until the operator lets this one take over."""
    old = with_handover(new_vm, "old", bucket, metadata=aws.metadata)
    daemon = old.start_daemon()
    old.start_trainer("--step-delay-s", "0.05", "--every-steps", "40", script=witness).lines.wait(
        step=5
    )
    aws.notice(in_s=20)
    until(lambda: safe_steps(daemon), what="SAFE")
    vm, next_daemon, second = waiting(new_vm, bucket, witness)
    aws.withdraw()
    next_daemon.lines.wait(event="predecessor_stays", generation=1)
    assert vm.status()["state"] == "STANDING_BY"
    newest = daemon.lines.wait(event="committed", after=len(daemon.lines.all()))["step"]
    until(lambda: prefetched(next_daemon) >= newest, what="the prefetch of a later commit")
    assert not second.lines.all(event="resumed")
    assert vm.swansong("takeover").stdout == "took the run over\n"
    assert second.lines.wait(event="resumed")["from_step"] >= newest
    daemon.lines.wait(event="fenced")
    assert "nothing to do" in vm.swansong("takeover").stdout
