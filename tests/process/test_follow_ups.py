# SPDX-License-Identifier: Apache-2.0
"""Follow-up checkpoints: training continues after SAFE, and the next VM continues from the newest one."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.rig import newest_step, safe_steps
from testkit.waiting import until

SOON = {"swansongd.core.schedule.INTERVAL_MIN_S": 1.0}
"""Follow-ups are 5 s apart without this constant."""


def resumed_step(new_vm: Any, bucket: Bucket, witness: str) -> int:
    """The step from which the next VM continues."""
    vm = new_vm("next", bucket.store)
    vm.start_daemon()
    return int(vm.start_trainer(script=witness).lines.wait(event="resumed")["from_step"])


@pytest.mark.fault("T19", "T22", "H01")
def test_the_next_vm_continues_from_the_last_follow_up(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """SAFE again and again, also from a daemon that was killed between two; then the power is cut."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, follow_ups=True, constants=SOON)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--step-delay-s", "0.05", script=witness)
    trainer.lines.wait(step=5)
    aws.notice(in_s=60)
    until(lambda: len(safe_steps(daemon)) > 1, what="the first follow-up")
    before = safe_steps(daemon)
    assert before == sorted(set(before))
    daemon.kill()
    daemon = vm.start_daemon()
    until(lambda: len(set(safe_steps(daemon))) > 1, what="a follow-up after the restart")
    vm.power_off()
    after = safe_steps(daemon)
    assert before[0] < before[-1] <= after[0] < after[-1] <= newest_step(trainer)
    aws.withdraw()  # the notice was for the first VM
    assert resumed_step(new_vm, bucket, witness) == after[-1]
    assert {manifest["kind"] for manifest in bucket.manifests()} == {"emergency"}
