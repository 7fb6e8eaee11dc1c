# SPDX-License-Identifier: Apache-2.0
"""Follow-up checkpoints: training continues after SAFE, and the next VM continues from the newest one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket, Gcp
from testkit.rig import Process, Vm
from testkit.waiting import until

SOON = {
    "swansongd.core.schedule.INTERVAL_MIN_S": 1.0,
    "swansongd.core.followup.SIGNAL_PROOF_S": 1.0,
}
"""Follow-ups of hooks are 5 s apart, and a process must outlive its save by 10 s, without these constants."""


def following(new_vm: Any, bucket: Bucket, cloud: Aws | Gcp, **options: Any) -> Vm:
    """A VM that takes follow-ups soon after each other."""
    vm: Vm = new_vm(
        "vm", bucket.store, metadata=cloud.metadata, follow_ups=True, constants=SOON, **options
    )
    return vm


def safe_steps(daemon: Process) -> list[int]:
    """The steps of the reported verdicts, all of which are SAFE."""
    verdicts = daemon.lines.all(event="verdict")
    assert {verdict["verdict"] for verdict in verdicts} <= {"SAFE"}
    return [verdict["step"] for verdict in verdicts]


def newest_step(trainer: Process) -> int:
    return max(int(line["step"]) for line in trainer.lines.all() if "step" in line)


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
    vm = following(new_vm, bucket, aws)
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


@pytest.mark.fault("T19")
def test_a_process_without_hooks_gets_its_signal_for_each_follow_up(
    gcp: Gcp, bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """SIGUSR1 again after SAFE; then the power is cut, and the last SAFE checkpoint is restored."""
    pid_file = str(tmp_path / "vm" / "trainer.pid")
    settings = {"trainer": {"signal": "SIGUSR1", "pid_file": pid_file, "settle_s": 0.3}}
    vm = following(new_vm, bucket, gcp, settings=settings)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(
        *("--checkpoints", str(vm.run_directory), "--pid-file", pid_file),
        *("--steps", "100000", "--step-delay-s", "0.02", "--file-delay-s", "0.02"),
        script="usr1_trainer.py",
    )
    trainer.lines.wait(step=5)
    gcp.preempt()  # the deadline is assumed, so follow-ups come soon after each other
    until(lambda: len(safe_steps(daemon)) > 1, what="a follow-up")
    signalled = daemon.lines.all(event="evacuation", phase="accepted")
    assert {line["pid"] for line in signalled} == {trainer.pid}
    vm.power_off()
    steps = safe_steps(daemon)
    assert steps == sorted(set(steps))
    assert steps[-1] <= newest_step(trainer)
    elsewhere: Vm = new_vm("next", bucket.store)
    place = elsewhere.disk / "checkpoint"
    assert elsewhere.swansong("restore", "--to", str(place)).returncode == 0
    assert json.loads((place / "trainer_state.json").read_text())["step"] >= steps[-1]
