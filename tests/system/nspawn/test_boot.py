# SPDX-License-Identifier: Apache-2.0
"""A provisioned image boots, and the daemon acts on a notice of the cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.nspawn.build import Layer, run_script

pytestmark = pytest.mark.timeout(300, func_only=True)


@pytest.mark.fault("S27")
def test_systemd_accepts_the_units(debian: Layer, tmp_path: Path) -> None:
    """The systemd of this release recognises every key and prints no warning."""
    assert run_script(debian, tmp_path, "units.sh") == ""


def test_boots_to_ready(new_vm: Any, bucket: Bucket, aws: Aws, phases: Any) -> None:
    """No unit has failed, every source is healthy, the delay lock is held, the trainer is connected."""
    vm = new_vm(bucket)
    vm.power_on()
    assert vm.wait_booted() == "running", vm.run("systemctl", "--failed")
    vm.wait_step(5)
    phases.begin(vm.journal.all()[0])
    phases.add("trainer.service started", vm.journal.wait("Started trainer.service"))
    phases.add("swansongd.service READY", vm.journal.wait("Started swansongd.service"))
    phases.add("delay lock held", vm.journal.wait(source="logind", health="ok"))

    status = vm.status()
    assert {source["health"] for source in status["sources"]} == {"ok"}, status
    assert len(status["trainers"]) == 1
    locks = vm.run("systemd-inhibit", "--list", "--no-legend")
    assert "swansong" in locks
    assert "delay" in locks


@pytest.mark.fault("S27")
def test_daemon_is_confined(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """A user other than root, one capability, no new privileges, and writable directories only of its own."""
    vm = new_vm(bucket)
    vm.power_on()
    vm.wait_active()
    status = vm.run("cat", f"/proc/{vm.main_pid()}/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["Uid"].split()[0] != "0"
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 1 << 5  # CAP_KILL
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == "2"
    mounts = vm.run("cat", f"/proc/{vm.main_pid()}/mounts").splitlines()
    options = {fields[1]: fields[3].split(",") for fields in map(str.split, mounts)}
    assert "ro" in options["/"]
    assert "rw" in options["/var/lib/swansong/staging"]


def test_notice_to_safe(new_vm: Any, bucket: Bucket, aws: Aws, phases: Any) -> None:
    """The notice gives 30 s: the newest state is committed in time, and training continues."""
    vm = new_vm(bucket, arguments="--steps 100000 --step-delay-s 0.02 --pad-mb 20")
    vm.power_on()
    vm.wait_step(20)
    vm.wait_active()

    vm.wait_connected()
    aws.notice(in_s=30)

    verdict = vm.journal.wait(event="verdict")
    assert verdict.facts["verdict"] == "SAFE"
    for phase in ("notice", "request", "sealed", "flushed", "committed"):
        entry = vm.journal.wait(event="evacuation", phase=phase)
        phases.add(phase, entry)
    phases.add("verdict", verdict)
    (manifest,) = bucket.manifests()
    assert manifest["kind"] == "emergency"
    assert manifest["step"] == verdict.facts["step"]
    vm.wait_step(manifest["step"] + 20)
