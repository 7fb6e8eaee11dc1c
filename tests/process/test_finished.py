# SPDX-License-Identifier: Apache-2.0
"""The end of a run, with real processes: a later start trains nothing, and a notice is SAFE at once."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket

pytestmark = pytest.mark.fault("T18")
FINISHING = ("--every-steps", "10", "--finish")


def kinds(vm: Any) -> list[tuple[int, str]]:
    return [(commit["step"], commit["kind"]) for commit in vm.commits()]


def test_a_finished_run_is_marked_and_trains_no_more(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Its last step has a periodic checkpoint, too.  More steps are trained only on demand."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    trainer = vm.start_trainer("--steps", "20", *FINISHING, script=witness)
    assert trainer.wait() == 0
    assert trainer.lines.wait(event="finished")["committed"] is True
    assert kinds(vm)[0] == (20, "final")
    assert vm.swansong("finished").returncode == 0

    aws.notice(in_s=30)
    verdict = daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["step"]) == ("SAFE", 20)
    assert verdict["slack_s"] > 15

    elsewhere = new_vm("elsewhere", bucket.store)
    elsewhere.start_daemon()
    again = elsewhere.start_trainer("--steps", "20", *FINISHING, script=witness)
    assert again.wait() == 0
    resumed = again.lines.wait(event="resumed")
    assert (resumed["from_step"], resumed["finished"]) == (20, True)
    assert kinds(elsewhere)[0] == (20, "final")

    longer = elsewhere.start_trainer("--steps", "25", *FINISHING, script=witness)
    assert longer.wait() == 0
    assert longer.lines.wait(event="finished")["committed"] is True
    assert kinds(elsewhere)[0] == (25, "final")
    assert [step for step, kind in kinds(elsewhere) if kind == "final"] == [25, 20]
