# SPDX-License-Identifier: Apache-2.0
"""The store is unreachable when the notice arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from swansongd.core.staged_sets import NEWEST

from testkit.clouds import Aws, Bucket
from testkit.waiting import until


def test_data_sent_after_the_deadline_is_committed_immediately(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The VM runs longer than promised: data and manifest both use the time."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    vm.start_trainer(script=witness).lines.wait(step=5)
    bucket.order("outage", seconds=6)
    aws.notice(in_s=3)

    assert daemon.lines.wait(event="verdict")["verdict"] == "LOST"
    assert daemon.lines.wait(event="verdict", verdict="SAFE")["slack_s"] < -1
    assert not daemon.lines.all(event="outlived_deadline")


@pytest.mark.fault("O24")
def test_a_trainer_does_not_wait_for_the_store(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """Training continues through an outage, staging keeps few sets, and replication catches up after it.

    Meanwhile status reports that the store fails, the flush that waits for it, and the dropped sets.
    """
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", step=20)
    assert report(vm)["store"]["health"] == "ok"
    bucket.order("outage", seconds=100)
    # Single attempts fail: status shows the outage long before the call of 20 s fails.
    waiting = until(lambda: flush_without_store(vm), what="status that shows the outage")
    assert waiting["unsent"]["failures"] == 0, "the flush is still in its first call"
    # One small file may have been sent before the outage.
    assert waiting["flush"]["stored_bytes"] < waiting["flush"]["size_bytes"]
    shown = vm.status_words()
    assert "degraded" in shown
    assert "flush" in shown
    trainer.lines.wait(step=240)
    until(lambda: report(vm)["unsent"]["dropped"]["count"] >= 6, what="sets that were dropped")
    until(lambda: len(sealed_sets(vm)) <= NEWEST + 4, what="staging with few sets")
    assert report(vm)["unsent"]["sets"] <= NEWEST + 4
    assert report(vm)["staging"]["free_bytes"] > 0
    bucket.order("clear")
    # Not every set of the backlog is sent: the newest one is sufficient.
    until(lambda: daemon.lines.all(event="committed")[-1]["step"] >= 240, what="the newest commit")
    until(lambda: report(vm)["store"]["health"] == "ok", what="a healthy store")


def report(vm: Any) -> dict[str, Any]:
    """The output of ``swansong status --json``."""
    shown: dict[str, Any] = json.loads(vm.swansong("status", "--json").stdout)
    return shown


def flush_without_store(vm: Any) -> dict[str, Any] | None:
    """The report, once it shows a flush and a store that fails."""
    shown = report(vm)
    return shown if shown["flush"] and shown["store"]["health"] != "ok" else None


def sealed_sets(vm: Any) -> list[str]:
    return [entry.name for entry in vm.run_directory.iterdir() if entry.name.startswith("step-")]
