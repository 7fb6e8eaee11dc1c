# SPDX-License-Identifier: Apache-2.0
"""A VM on Azure: its eviction ends with SAFE, and an event is approved only after that."""

from __future__ import annotations

from typing import Any

from testkit.clouds import Azure, Bucket
from testkit.waiting import until


def test_an_eviction_ends_with_safe_and_is_approved_after_it(
    azure: Azure, bucket: Bucket, new_vm: Any
) -> None:
    """A freeze causes nothing; without a trainer no event is approved."""
    settings = {"sources": {"azure_approve": True}}
    vm = new_vm("vm", bucket.store, metadata=azure.metadata, settings=settings)
    daemon = vm.start_daemon()
    azure.event("Freeze", in_s=5, duration_s=5)
    lost = azure.event("Preempt", in_s=4)
    daemon.lines.wait(event="verdict", verdict="NO_TRAINING")
    azure.end(lost)
    daemon.lines.wait(event="notice_withdrawn")
    assert azure.approvals() == []

    trainer = vm.start_trainer("--steps", "100000", "--step-delay-s", "0.02")
    trainer.lines.wait(step=10)
    event = azure.event("Terminate", in_s=60)

    verdict = daemon.lines.wait(event="verdict", verdict="SAFE")
    until(azure.approvals, what="the approval")
    assert azure.approvals() == [event]
    approved = daemon.lines.wait(event="event_approved")
    assert approved["id"] == event
    assert approved["timestamp"] > verdict["timestamp"]
    kinds = [line["kind"] for line in daemon.lines.all(event="notice")]
    assert kinds == ["reclaim", "scale-in"]
