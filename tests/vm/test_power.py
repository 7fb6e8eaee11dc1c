# SPDX-License-Identifier: Apache-2.0
"""A VM loses its power; another VM, without its disk, ends with the same weights.

Each test reads the events from the disk after the power cut, and the commits from the bucket.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testkit.vm.cloud import Cloud
from testkit.vm.evidence import Story
from testkit.vm.machine import Machine
from testkit.waiting import until

FIRST = "--steps 120 --every-steps 10 --pad-mb 8 --step-delay-s 0.5"
"""Slow enough that the power cut comes during the run."""
NEXT_STEPS = 20
"""The next VM ends the run this number of steps after the newest commit."""
HARD_STOP_S = 30.0
"""Time of a VM on GCP after the power button."""
NOTICE_S = 40.0
"""A shorter notice than the 120 s of EC2."""
VM_MAX_S = 540.0
"""For the first two commits, and for the next VM's run: on two quiet cores 60 s.  The processor is emulated,
and CI tests containers at the same time."""
TEST_MAX_S = 2 * VM_MAX_S + 120
DROP_IN = "/etc/systemd/system/trainer.service.d/test.conf"
OFF_WHEN_DONE = "[Unit]\nSuccessAction=poweroff\nFailureAction=poweroff\n"
# After the end of the run the trainer's unit trains again, from the beginning and alone: this is the
# result of an uninterrupted run on the same processor.
REFERENCE = """[Service]
TimeoutStopSec=infinity
ExecStopPost=/usr/bin/env -u SWANSONG_RESTORE SWANSONG_SOCKET=/nowhere /opt/train/bin/python \
/opt/train/char_lm.py $ARGUMENTS
"""
STAGING_ON_NVME = {
    "/etc/systemd/system/local-disk.service": """[Unit]
Before=trainer.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/sbin/mkfs.ext4 -q /dev/nvme0n1
ExecStart=/bin/mkdir -p /mnt/nvme
ExecStart=/bin/mount /dev/nvme0n1 /mnt/nvme
ExecStart=/bin/systemd-tmpfiles --create /etc/local-disk.conf
""",
    "/etc/local-disk.conf": "d /mnt/nvme/staging 2750 swansong swansong-trainers -\n",
    "/etc/systemd/system/swansongd.service.d/local-disk.conf": """[Unit]
Requires=local-disk.service
After=local-disk.service
[Service]
ReadWritePaths=/mnt/nvme
""",
}

NewVm = Callable[..., Machine]
Clouds = Callable[[str], Cloud]
FinishRun = Callable[..., Story]
pytestmark = pytest.mark.timeout(TEST_MAX_S, func_only=True)


@pytest.fixture
def finish_run(new_vm: NewVm) -> FinishRun:
    """Let a VM, a new one or the same one, train to the end; asserts that its weights are right."""

    def finish(cloud: Cloud, machine: Machine | None = None) -> Story:
        arguments = f"--steps {cloud.committed_steps()[-1] + NEXT_STEPS} --pad-mb 8"
        if machine is None:
            machine = new_vm(cloud, "next")
        cloud.new_service()
        trainer = OFF_WHEN_DONE + REFERENCE
        machine.write({DROP_IN: trainer, "/etc/trainer.env": f"ARGUMENTS={arguments}\n"})
        machine.power_on()
        assert machine.is_off_within(VM_MAX_S), "the next VM does not finish its run"
        story = machine.journal()[-1]
        log = "\n".join(entry.text for entry in story.entries[-60:])
        assert len(story.weights) == 2, log
        assert story.weights[0] == story.weights[1]
        return story

    return finish


def train(machine: Machine, cloud: Cloud) -> None:
    """Power on, and wait until the bucket contains two commits."""
    cloud.new_service()
    machine.write({"/etc/trainer.env": f"ARGUMENTS={FIRST}\n"})
    machine.power_on()
    until(lambda: len(cloud.committed_steps()) >= 2, timeout_s=VM_MAX_S, what="two commits")


def push_button_and_stop_hard(machine: Machine) -> None:
    """Press the button, and cut the power 30 s later, as GCP does."""
    machine.push_button()
    if not machine.is_off_within(HARD_STOP_S):
        machine.cut_power()


@pytest.mark.fault("H13", "H03")
def test_button_alone(clouds: Clouds, new_vm: NewVm, finish_run: FinishRun) -> None:
    """The metadata service shows no notice.  Between the power button and the hard stop 30 s later the
    newest state is committed during the shutdown, and the daemon has ended: it holds up no shutdown."""
    cloud = clouds("gcp")
    first = new_vm(cloud, "first")
    train(first, cloud)
    push_button_and_stop_hard(first)
    (before,) = first.journal()
    assert before.verdicts[-1] == ("SAFE", cloud.committed_steps()[-1])
    assert before.first(event="evacuation", phase="notice").facts["source"] == "logind"
    assert "swansongd.service: Deactivated successfully." in [
        entry.text for entry in before.entries
    ]
    after = finish_run(cloud)
    assert after.steps[0] == before.verdicts[-1][1] + 1


@pytest.mark.fault("H13")
def test_preempted_and_button(clouds: Clouds, new_vm: NewVm, finish_run: FinishRun) -> None:
    """The metadata service shows `preempted` just before the button: the verdict is SAFE before the hard
    stop."""
    cloud = clouds("gcp")
    first = new_vm(cloud, "first")
    train(first, cloud)
    cloud.gcp.preempt()
    push_button_and_stop_hard(first)
    (before,) = first.journal()
    assert before.verdicts[-1] == ("SAFE", cloud.committed_steps()[-1])
    assert before.lines(event="notice", source="gcp.preempted")
    after = finish_run(cloud)
    assert after.steps[0] == before.verdicts[-1][1] + 1


@pytest.mark.fault("D07")
def test_stop_and_start_with_a_blank_disk(
    clouds: Clouds, new_vm: NewVm, finish_run: FinishRun
) -> None:
    """EC2 stops the VM and starts it again: the root disk is unchanged, the local NVMe with the staged
    checkpoints is blank, and the run resumes from the bucket."""
    cloud = clouds("aws")
    machine = new_vm(cloud, "stopped", STAGING_ON_NVME, staging={"path": "/mnt/nvme/staging"})
    machine.insert_nvme()
    train(machine, cloud)
    cloud.aws.notice("stop", in_s=NOTICE_S)
    if not machine.is_off_within(NOTICE_S):
        push_button_and_stop_hard(machine)
    (before,) = machine.journal()
    assert before.verdicts[0][0] == "SAFE"
    newest = cloud.committed_steps()[-1]
    machine.insert_nvme()
    after = finish_run(cloud, machine)
    assert after.steps[0] == newest + 1
